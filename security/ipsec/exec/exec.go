package exec

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/iser-target/iser-target/security/ipsec"
	"golang.org/x/sys/unix"
)

// Name is the value of ipsec.driver.
const Name = "exec"

// What a program cannot exceed.
const (
	maxOutput     = 64 << 10 // of bytes on standard output, and as many of standard error
	maxReason     = 1024     // of bytes
	maxWord       = 256      // of bytes, of suite and identity
	maxConcurrent = 64
	// drain is the time that the rest of the group has to close its ends of the pipes after the program ended.
	drain = 200 * time.Millisecond
)

// Options say which program to ask.
type Options struct {
	Command    []string      // absolute path, followed by arguments
	Timeout    time.Duration // of one question; 0: 2 s
	Concurrent int           // programs at a time; 0: 8
	Recheck    time.Duration // between two questions about a connection; 0: 30 s
	Kernel     ipsec.Driver  // answers Look, and its notices lead to questions; nil: questions follow from time alone
	ClearText  bool          // Kernel need not be able to use ESP
}

// A Driver asks a program.
type Driver struct {
	o      Options
	slots  chan struct{}
	ctx    context.Context
	cancel context.CancelFunc
	mu     sync.Mutex // is held while cancel is called and calls grows
	calls  sync.WaitGroup
}

// New checks the options. It does not start the program.
func New(o Options) (*Driver, error) {
	if len(o.Command) == 0 {
		return nil, errors.New("ipsec.exec.command: it is empty. Name the program that decides")
	}
	if !filepath.IsAbs(o.Command[0]) {
		return nil, fmt.Errorf("ipsec.exec.command: %q is not an absolute path", o.Command[0])
	}
	for _, s := range o.Command {
		if strings.ContainsRune(s, 0) {
			return nil, errors.New("ipsec.exec.command: it has a NUL")
		}
	}
	if o.Timeout < 0 || o.Concurrent < 0 || o.Concurrent > maxConcurrent || o.Recheck < 0 {
		return nil, fmt.Errorf("ipsec.exec: timeout and recheck must not be negative, and at most %d programs run at a time", maxConcurrent)
	}
	if o.Timeout == 0 {
		o.Timeout = 2 * time.Second
	}
	if o.Concurrent == 0 {
		o.Concurrent = 8
	}
	if o.Recheck == 0 {
		o.Recheck = 30 * time.Second
	}
	d := &Driver{o: o, slots: make(chan struct{}, o.Concurrent)}
	d.ctx, d.cancel = context.WithCancel(context.Background())
	return d, nil
}

// Name returns "exec".
func (*Driver) Name() string { return Name }

// Check returns why the program cannot start.
func (d *Driver) Check(ctx context.Context) []error {
	path := d.o.Command[0]
	var errs []error
	st, err := os.Stat(path)
	switch {
	case err != nil:
		errs = append(errs, fmt.Errorf("ipsec.exec.command: %w. Install the program", err))
	case !st.Mode().IsRegular():
		errs = append(errs, fmt.Errorf("ipsec.exec.command: %s is not a program", path))
	case unix.Access(path, unix.X_OK) != nil:
		errs = append(errs, fmt.Errorf("ipsec.exec.command: %s cannot be executed. Run: chmod 0755 %s", path, path))
	case st.Mode().Perm()&0o022 != 0:
		errs = append(errs, fmt.Errorf("ipsec.exec.command: others may change %s: mode %04o. Run: chmod go-w %s", path, st.Mode().Perm(), path))
	default:
		if sys, ok := st.Sys().(*syscall.Stat_t); ok && sys.Uid != 0 && int(sys.Uid) != os.Geteuid() {
			errs = append(errs, fmt.Errorf("ipsec.exec.command: user %d owns %s. Run: chown root %s", sys.Uid, path, path))
		}
	}
	if d.o.Kernel != nil && !d.o.ClearText {
		errs = append(errs, d.o.Kernel.Check(ctx)...)
	}
	return errs
}

// Look asks the driver of Options.Kernel.
func (d *Driver) Look(ctx context.Context, f ipsec.Flow) (ipsec.Protection, error) {
	if d.o.Kernel == nil {
		return ipsec.Protection{}, errors.New("only the program knows")
	}
	return d.o.Kernel.Look(ctx, f)
}

// Watch reports a change at intervals of Options.Recheck, because nothing says when the program would decide otherwise, and those that the driver of
// Options.Kernel notices.
func (d *Driver) Watch(ctx context.Context, changed func(ipsec.Change)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	notices := make(chan ipsec.Change)
	ended := make(chan error, 1)
	if d.o.Kernel != nil {
		go func() {
			ended <- d.o.Kernel.Watch(ctx, func(c ipsec.Change) {
				select {
				case notices <- c:
				case <-ctx.Done():
				}
			})
		}()
	}
	t := time.NewTicker(d.o.Recheck)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-ended:
			return err
		case c := <-notices:
			changed(c)
		case <-t.C:
			changed(ipsec.Change{Kind: ipsec.Lost})
		}
	}
}

// Close kills the programs that run.
func (d *Driver) Close() error {
	d.mu.Lock()
	d.cancel()
	d.mu.Unlock()
	d.calls.Wait()
	if d.o.Kernel != nil {
		return d.o.Kernel.Close()
	}
	return nil
}

// A question is what the program reads.
type question struct {
	Version   int          `json:"version"` // 1
	Moment    ipsec.Moment `json:"moment"`
	Local     string       `json:"local"` // address and port
	Remote    string       `json:"remote"`
	Initiator string       `json:"initiator,omitempty"`
	Target    string       `json:"target,omitempty"`
	Demand    ipsec.Demand `json:"demand"`
	Profile   profile      `json:"profile"`
	Kernel    *protection  `json:"kernel,omitempty"`       // what a driver of the kernel knows
	Error     string       `json:"kernel_error,omitempty"` // why it does not know it
}

type profile struct {
	Name            string     `json:"name"`
	Mode            ipsec.Mode `json:"mode,omitempty"`
	Suites          []string   `json:"suites,omitempty"`
	MinKeyBits      int        `json:"min_key_bits,omitempty"`
	NullEncryption  bool       `json:"null_encryption,omitempty"`
	ESN             bool       `json:"esn,omitempty"`
	MinReplayWindow int        `json:"min_replay_window,omitempty"`
	MaxLifetime     float64    `json:"max_lifetime_seconds,omitempty"`
	ManualKeys      bool       `json:"manual_keys,omitempty"`
	Identities      []identity `json:"identities,omitempty"`
}

type identity struct {
	Initiator string `json:"initiator"`
	ID        string `json:"id"`
}

type protection struct {
	In        []sa `json:"in"`
	Out       []sa `json:"out"`
	InPolicy  bool `json:"in_policy"`
	OutPolicy bool `json:"out_policy"`
}

type sa struct {
	SPI          uint32     `json:"spi"`
	Source       string     `json:"source"`
	Destination  string     `json:"destination"`
	ReqID        int        `json:"reqid"`
	Mode         ipsec.Mode `json:"mode"`
	Suite        string     `json:"suite"` // like esp-tunnel aes128gcm16 esn
	ReplayWindow int        `json:"replay_window"`
	Lifetime     float64    `json:"lifetime_seconds,omitempty"`
	RemoteID     string     `json:"remote_id,omitempty"`
}

// question returns what the program reads.
func (d *Driver) question(ctx context.Context, q ipsec.Question) question {
	x := question{Version: 1, Moment: q.Moment, Local: q.Flow.Local.String(), Remote: q.Flow.Remote.String(), Initiator: q.Initiator, Target: q.Target, Demand: q.Demand}
	if p := q.Profile; p != nil {
		x.Profile = profile{
			Name: p.Name, Mode: p.Mode, Suites: p.Suites, MinKeyBits: p.MinKeyBits, NullEncryption: p.NullEncryption, ESN: p.ESN,
			MinReplayWindow: p.MinReplayWindow, MaxLifetime: p.MaxLifetime.Seconds(), ManualKeys: p.ManualKeys,
		}
		for _, r := range p.Identities {
			x.Profile.Identities = append(x.Profile.Identities, identity(r))
		}
	}
	if d.o.Kernel == nil {
		return x
	}
	p, err := d.o.Kernel.Look(ctx, q.Flow)
	if err != nil {
		x.Error = err.Error()
		return x
	}
	if q.Profile != nil {
		x.Profile.ESN, _ = q.Profile.NeedsESN(p.Link)
	}
	x.Kernel = &protection{In: sas(p.In), Out: sas(p.Out), InPolicy: p.InPolicy, OutPolicy: p.OutPolicy}
	return x
}

func sas(list []ipsec.SA) []sa {
	all := make([]sa, len(list))
	for i, s := range list {
		all[i] = sa{s.SPI, s.Source.String(), s.Destination.String(), s.ReqID, s.Mode, s.String(), s.ReplayWindow, s.Lifetime.Seconds(), s.RemoteID}
	}
	return all
}

// Decide asks the program. It kills the program with its group at the end of the time limit or of ctx, and when it says too much. Waiting for
// others to end counts for the limit.
func (d *Driver) Decide(ctx context.Context, q ipsec.Question) (ipsec.Verdict, error) {
	ctx, cancel := context.WithTimeout(ctx, d.o.Timeout)
	defer cancel()
	stop := context.AfterFunc(d.ctx, cancel)
	defer stop()
	select {
	case d.slots <- struct{}{}:
		defer func() { <-d.slots }()
	case <-ctx.Done():
		return ipsec.Verdict{}, d.why(ctx, fmt.Sprintf("%d programs run already", d.o.Concurrent))
	}
	if !d.enter() {
		return ipsec.Verdict{}, os.ErrClosed
	}
	defer d.calls.Done()
	input, err := json.Marshal(d.question(ctx, q))
	if err != nil {
		return ipsec.Verdict{}, err
	}
	out, err := d.run(ctx, append(input, '\n'))
	if err != nil {
		return ipsec.Verdict{}, err
	}
	v, err := parse(out)
	if err != nil {
		return ipsec.Verdict{}, fmt.Errorf("program %s: %w", d.o.Command[0], err)
	}
	return v, nil
}

// enter counts a call. It reports false after Close.
func (d *Driver) enter() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ctx.Err() != nil {
		return false
	}
	d.calls.Add(1)
	return true
}

// why returns why ctx ended.
func (d *Driver) why(ctx context.Context, doing string) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("program %s: no verdict within %v: %s", d.o.Command[0], d.o.Timeout, doing)
	}
	return fmt.Errorf("program %s: %w", d.o.Command[0], ctx.Err())
}

// limited keeps the first bytes that a program writes, and calls full at the first one too many.
type limited struct {
	b    []byte
	full func()
	over bool
}

func (l *limited) Write(p []byte) (int, error) {
	n := min(len(p), maxOutput-len(l.b))
	l.b = append(l.b, p[:n]...)
	if n < len(p) && !l.over {
		l.over = true
		l.full()
	}
	return len(p), nil
}

// run runs the program once.
func (d *Driver) run(ctx context.Context, input []byte) ([]byte, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stdout, stderr := &limited{full: cancel}, &limited{full: func() {}}
	cmd := exec.CommandContext(ctx, d.o.Command[0], d.o.Command[1:]...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	cmd.Dir = "/"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(input), stdout, stderr
	// A group of its own, so that what the program starts is killed with it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var mu sync.Mutex
	over := false // the group may belong to others
	kill := func() error {
		mu.Lock()
		defer mu.Unlock()
		if over {
			return os.ErrProcessDone
		}
		return unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
	}
	cmd.Cancel, cmd.WaitDelay = kill, drain
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("program: %w", err)
	}
	// The id of the group is that of the program. So the rest of the group is killed before Wait gives that id free.
	ended(cmd.Process.Pid)
	_ = kill()
	mu.Lock()
	over = true
	mu.Unlock()
	err := cmd.Wait()
	name := d.o.Command[0]
	switch {
	case stdout.over:
		return nil, fmt.Errorf("program %s: it writes more than %d bytes to standard output", name, maxOutput)
	case ctx.Err() != nil:
		return nil, d.why(ctx, "it was killed")
	case errors.Is(err, exec.ErrWaitDelay):
		return nil, fmt.Errorf("program %s: it ended, but something that it started still had its standard output", name)
	case err != nil && !errors.Is(err, io.ErrClosedPipe) && !errors.Is(err, unix.EPIPE):
		return nil, fmt.Errorf("program %s: %w%s", name, err, said(stderr.b))
	}
	return stdout.b, nil
}

// ended waits until the process has ended, and leaves its status to Wait.
func ended(pid int) {
	for unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
}

// said returns the end of the first line of standard error, for an error.
func said(b []byte) string {
	line, _, _ := bytes.Cut(bytes.TrimSpace(b), []byte("\n"))
	if len(line) == 0 {
		return ""
	}
	return ": " + clean(string(line), maxWord)
}

// clean makes text of a program fit for logs and terminals.
func clean(s string, limit int) string {
	s = strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	for len(s) > limit {
		_, n := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-n]
	}
	return strings.TrimSpace(s)
}

// parse parses a verdict: one JSON object, with the fields of ipsec.Verdict and no others.
func parse(b []byte) (ipsec.Verdict, error) {
	if len(bytes.TrimSpace(b)) == 0 {
		return ipsec.Verdict{}, errors.New("it writes no verdict")
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var v *ipsec.Verdict
	if err := dec.Decode(&v); err != nil {
		return ipsec.Verdict{}, fmt.Errorf("its verdict: %s", clean(err.Error(), maxWord))
	}
	if _, err := dec.Token(); err != io.EOF {
		return ipsec.Verdict{}, errors.New("its verdict: something follows the object")
	}
	if v == nil {
		return ipsec.Verdict{}, errors.New("its verdict: null is not an object")
	}
	switch v.Action {
	case ipsec.Permit, ipsec.Mark, ipsec.Deny:
	default:
		return ipsec.Verdict{}, fmt.Errorf("its verdict: action %q is not permit, mark or deny", clean(string(v.Action), maxWord))
	}
	v.Reason, v.Suite, v.Identity = clean(v.Reason, maxReason), clean(v.Suite, maxWord), clean(v.Identity, maxWord)
	if v.Action != ipsec.Permit && v.Reason == "" {
		return ipsec.Verdict{}, fmt.Errorf("its verdict: action %s needs a reason", v.Action)
	}
	return *v, nil
}
