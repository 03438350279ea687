package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/bench"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi/initiator"
	iserinitiator "github.com/iser-target/iser-target/iser/initiator"
	"github.com/iser-target/iser-target/security"
)

// benchFormats are the values of -o of bench.
var benchFormats = []string{"table", "json", "json+"}

// A benchCommand has the flags of bench that require parsing.
type benchCommand struct {
	p *program
	o bench.Options

	sizes, depths, runtime, ramp, rate, size, offset string
	format, baseline                                 string
	user, secretFile, targetSecretFile               string
	seed                                             uint64
	poll                                             bool
}

// bench returns the command that measures a LUN.
func (p *program) bench() *cobra.Command {
	b := &benchCommand{p: p}
	cmd := &cobra.Command{
		Use: "bench URL", Short: "Measure a LUN from the side of the initiator", Args: cobra.ExactArgs(1),
		Long: `Measure a LUN from the side of the initiator, over iSCSI/TCP or iSER, without
a kernel initiator. The URL is iscsi://HOST[:PORT]/TARGET/LUN, or the same with
iser://. The target may be any.

The flags are those of fio. With several values of --bs or --iodepth, bench
measures each combination in turn. Each job has a session and a part of the LUN of
its own, and does I/O for --runtime, from the start again at the end of its part.

A run that writes is refused if the LUN has data, unless --destructive is given.

If the control API of the target can be reached, bench shows the CPU time of
the target, and in which phase its time was spent. Interrupt bench to see what
it has measured so far.`,
		Example: `  iser-target bench iscsi://192.0.2.10/iqn.2026-11.io.example:store/0 --bs 4k,64k --iodepth 1,32
  iser-target bench iser://192.0.2.10/iqn.2026-11.io.example:store/0 --rw randrw --rwmixread 70 -o json >before.json
  iser-target bench iser://192.0.2.10/iqn.2026-11.io.example:store/0 --rw randrw --rwmixread 70 --baseline before.json`,
		RunE: func(cmd *cobra.Command, args []string) error { return b.run(cmd, args[0]) },
	}
	f := cmd.Flags()
	o := &b.o
	f.StringVar(&o.RW, "rw", "randread", "kind of I/O: "+strings.Join(bench.Modes, ", "))
	f.IntVar(&o.MixRead, "rwmixread", 50, "percentage of READs with --rw readwrite and randrw")
	f.StringVar(&b.sizes, "bs", "4k", "bytes of one I/O, several with commas, like 4k,64k,1m")
	f.StringVar(&b.depths, "iodepth", "1", "I/Os in progress of each job, several with commas, like 1,8,32")
	f.IntVar(&o.Jobs, "numjobs", 1, "number of jobs")
	f.StringVar(&b.runtime, "runtime", "30", "time of each measurement: seconds, or like 1m30s")
	f.StringVar(&b.ramp, "ramp", "0", "time before each measurement that is not measured")
	f.StringVar(&b.rate, "rate", "0", "bytes per second of each job at most, like 10m")
	f.Int64Var(&o.RateIOPS, "rate-iops", 0, "I/Os per second of each job at most")
	f.BoolVar(&o.Verify, "verify", false, "write data that is different each time, and verify it when it is read, and at the end")
	f.BoolVar(&o.SkipCopy, "skip-rx-copy", false, "leave the data of READs in the kernel, which drops it: less work for bench (TCP only)")
	f.BoolVar(&b.poll, "hipri", false, "poll for answers instead of sleeping until they come, which takes a CPU for each connection")
	f.StringVar(&b.size, "size", "0", "bytes of the LUN to use, like 10g (default: to its end)")
	f.StringVar(&b.offset, "offset", "0", "first byte of the LUN to use")
	f.Uint64Var(&b.seed, "seed", 1, "start of the random numbers; the same seed makes the same I/O")
	f.BoolVar(&o.Destructive, "destructive", false, "overwrite the data of the LUN")
	f.IntVar(&o.Login.Connections, "connections", 1, "connections of each session")
	f.BoolVar(&o.Login.HeaderDigest, "header-digest", false, "require CRC32C for headers (TCP only)")
	f.BoolVar(&o.Login.DataDigest, "data-digest", false, "require CRC32C for data (TCP only)")
	f.StringVar(&o.Login.Name, "initiator-name", initiator.DefaultName, "iSCSI name of bench, which the target must admit")
	f.StringVar(&b.user, "chap-user", "", "CHAP name")
	f.StringVar(&b.secretFile, "chap-secret-file", "", "file with the CHAP secret of --chap-user, which nobody else may read")
	f.StringVar(&b.targetSecretFile, "chap-target-secret-file", "", "file with the CHAP secret by which the target must prove its identity")
	f.StringVar(&b.baseline, "baseline", "", "JSON file of an earlier bench, or of fio, to compare with")
	f.StringVarP(&b.format, "output", "o", "table", "format: table, json (that of fio) or json+ (with all latencies)")
	for _, name := range []string{"chap-secret-file", "chap-target-secret-file"} {
		cmd.MarkFlagFilename(name)
	}
	cmd.MarkFlagFilename("baseline", "json")
	cmd.RegisterFlagCompletionFunc("rw", cobra.FixedCompletions(bench.Modes, cobra.ShellCompDirectiveNoFileComp))
	cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(benchFormats, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// run does what the flags say.
func (b *benchCommand) run(cmd *cobra.Command, arg string) error {
	u, err := b.parse(cmd, arg)
	if err != nil {
		return err
	}
	var base *bench.Baseline
	if b.baseline != "" {
		if base, err = bench.ReadBaseline(b.baseline); err != nil {
			return fmt.Errorf("--baseline: %w", err)
		}
	}
	var h bench.Hooks
	h.Note = func(s string) { fmt.Fprintln(cmd.ErrOrStderr(), shown(s)) }
	if h.Target, err = b.target(cmd, h.Note); err != nil {
		return err
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(b.processors()))
	show := newBenchLine(cmd.ErrOrStderr())
	h.Progress = show.show
	results, err := bench.Run(cmd.Context(), b.o, h)
	show.end()
	var flag *bench.FlagError
	if errors.As(err, &flag) {
		return &usageError{cmd, err}
	}
	var data *bench.DataError
	if errors.As(err, &data) {
		return &schema.Error{Code: schema.Refused, Message: data.Error(), Hint: "use --destructive to overwrite it"}
	}
	if bench.Interrupted(err) {
		err = fmt.Errorf("interrupted: %d of %d runs have results", len(results), len(b.o.Sizes)*len(b.o.Depths))
	}
	if len(results) > 0 || err == nil {
		var out error
		if b.format == "table" {
			out = bench.WriteTable(cmd.OutOrStdout(), &b.o, results, base)
		} else {
			out = bench.WriteJSON(cmd.OutOrStdout(), &b.o, u.String(), results, b.format == "json+")
		}
		err = errors.Join(err, out)
	}
	return err
}

// processors returns how many CPUs bench may use: one per connection, as a job of fio is one thread. With more, the goroutines of a
// connection wake each other on other CPUs, which takes longer than their work does, and takes those CPUs from a target on the same
// machine. The environment variable GOMAXPROCS has priority.
func (b *benchCommand) processors() int {
	if os.Getenv("GOMAXPROCS") != "" {
		return runtime.GOMAXPROCS(0)
	}
	return min(runtime.GOMAXPROCS(0), b.o.Jobs*b.o.Login.Connections)
}

// parse sets b.o from the flags, and returns the URL.
func (b *benchCommand) parse(cmd *cobra.Command, arg string) (u initiator.URL, err error) {
	o := &b.o
	u, err = initiator.ParseURL(arg)
	switch {
	case err != nil:
		return u, &usageError{cmd, err}
	case u.Target == "":
		return u, usage(cmd, "%s names no target: a URL is like iscsi://HOST[:PORT]/TARGET/LUN", arg)
	case u.LUN < 0:
		return u, usage(cmd, "%s names no LUN: a URL is like iscsi://HOST[:PORT]/TARGET/LUN", arg)
	case !slices.Contains(benchFormats, b.format):
		return u, usage(cmd, "--output must be table, json or json+, not %q", b.format)
	case b.baseline != "" && b.format != "table":
		return u, usage(cmd, "--baseline requires --output table")
	case u.Scheme == "iser" && (o.Login.HeaderDigest || o.Login.DataDigest):
		return u, usage(cmd, "--header-digest and --data-digest are not for iser://: iWARP has CRCs instead")
	case u.Scheme == "iser" && o.SkipCopy:
		return u, usage(cmd, "--skip-rx-copy is not for iser://: RDMA Writes place the data")
	}
	o.Address, o.LUN, o.Login.Target, o.Seed = u.Address, u.LUN, u.Target, b.seed
	var tcp initiator.TCP
	var iser iserinitiator.Transport
	if b.poll {
		tcp.Dialer, iser.Dialer = bench.DialPolling, bench.DialPolling
	}
	o.Login.Transport = tcp
	if u.Scheme == "iser" {
		o.Login.Transport = iser
	}
	if n := o.Login.Connections; n < 1 || n > initiator.MaxConnections {
		return u, usage(cmd, "--connections: %d is not from 1 to %d", n, initiator.MaxConnections)
	}
	if _, err := security.NormalizeName(o.Login.Name); err != nil {
		return u, usage(cmd, "--initiator-name: %q: %v", o.Login.Name, err)
	}
	for _, list := range []struct {
		flag, text string
		to         *[]int
		parse      func(string) (int64, error)
	}{
		{"bs", b.sizes, &o.Sizes, bench.ParseSize},
		{"iodepth", b.depths, &o.Depths, parseCount},
	} {
		for _, s := range strings.Split(list.text, ",") {
			n, err := list.parse(strings.TrimSpace(s))
			if err != nil || n > 1<<40 {
				return u, usage(cmd, "--%s: %v", list.flag, cmpError(err, s))
			}
			*list.to = append(*list.to, int(n))
		}
	}
	for _, one := range []struct {
		flag, text string
		to         *int64
	}{{"rate", b.rate, &o.Rate}, {"size", b.size, &o.Size}, {"offset", b.offset, &o.Offset}} {
		if *one.to, err = bench.ParseSize(one.text); err != nil {
			return u, usage(cmd, "--%s: %v", one.flag, err)
		}
	}
	if o.Runtime, err = bench.ParseTime(b.runtime); err != nil {
		return u, usage(cmd, "--runtime: %v", err)
	}
	if o.Ramp, err = bench.ParseTime(b.ramp); err != nil {
		return u, usage(cmd, "--ramp: %v", err)
	}
	if err := o.Check(); err != nil {
		return u, &usageError{cmd, err}
	}
	return u, b.chap(cmd)
}

// cmpError returns err, or that s is too large.
func cmpError(err error, s string) error {
	if err == nil {
		err = fmt.Errorf("%q is too large", s)
	}
	return err
}

func parseCount(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%q is not a number", s)
	}
	return n, nil
}

// chap sets the identity of the initiator.
func (b *benchCommand) chap(cmd *cobra.Command) error {
	switch {
	case b.user == "" && b.secretFile == "" && b.targetSecretFile == "":
		return nil
	case b.user == "":
		return usage(cmd, "--chap-secret-file and --chap-target-secret-file require --chap-user")
	case b.secretFile == "":
		return usage(cmd, "--chap-user requires --chap-secret-file")
	}
	c := &initiator.CHAP{Name: b.user}
	var err error
	if c.Secret, err = readCHAPSecret("--chap-secret-file", b.secretFile); err != nil {
		return err
	}
	if b.targetSecretFile != "" {
		if c.TargetSecret, err = readCHAPSecret("--chap-target-secret-file", b.targetSecretFile); err != nil {
			return err
		}
		if c.TargetSecret == c.Secret {
			return fmt.Errorf("--chap-target-secret-file: %s has the same secret as --chap-secret-file (RFC 7143, section 9.2.1, forbids it)",
				b.targetSecretFile)
		}
	}
	b.o.Login.CHAP = c
	return nil
}

// readCHAPSecret reads the file with a secret that a flag names.
func readCHAPSecret(flag, path string) (security.Secret, error) {
	s, err := config.ReadSecret(path)
	if err == nil && s.Short() {
		err = fmt.Errorf("the secret has %d bytes, less than %d (96 bits)", len(s), security.MinSecret)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %s: %w", flag, path, err)
	}
	return s, nil
}

// target returns the hook that asks the target what it has measured. It returns nil if no target answers at the control
// API, unless flags name it, or if that target does not have the sessions of bench.
func (b *benchCommand) target(cmd *cobra.Command, note func(string)) (func(context.Context, []uint16) (*bench.Target, error), error) {
	named := b.p.socket != "" || b.p.address != "" || b.p.context != ""
	c, err := b.p.client(cmd)
	var wrong *usageError
	if err != nil {
		if named || errors.As(err, &wrong) {
			return nil, err
		}
		return nil, nil
	}
	limit := b.p.timeout
	if !named {
		limit = min(limit, completeTime)
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), limit)
	defer cancel()
	if _, err := c.State(ctx); err != nil {
		if named {
			return nil, err
		}
		return nil, nil
	}
	said := false
	return func(ctx context.Context, tsihs []uint16) (*bench.Target, error) {
		t, err := b.measured(ctx, c, tsihs)
		if t == nil && err == nil && !said {
			said = true
			note("The target of the control API does not have the sessions of bench, so its CPU time and its phases are not shown.")
		}
		return t, err
	}, nil
}

// measured returns what the target has measured so far for the sessions of bench; nil: they are not its own.
func (b *benchCommand) measured(ctx context.Context, c *client.Client, tsihs []uint16) (*bench.Target, error) {
	ctx, cancel := context.WithTimeout(ctx, b.p.timeout)
	defer cancel()
	st, err := c.State(ctx)
	if err != nil {
		return nil, err
	}
	sum := map[string]*bench.Phase{}
	t := &bench.Target{CPU: time.Duration(st.CPUSeconds * float64(time.Second))}
	found := 0
	for i := range st.Sessions {
		s := &st.Sessions[i]
		if !slices.Contains(tsihs, s.TSIH) || s.Initiator != b.o.Login.Name || s.Target != b.o.Login.Target {
			continue
		}
		found++
		for _, p := range s.Counters.Latency {
			if sum[p.Phase] == nil {
				sum[p.Phase] = &bench.Phase{Name: p.Phase}
			}
			sum[p.Phase].Count += p.Count
			sum[p.Phase].Sum += time.Duration(p.Seconds * float64(time.Second))
		}
	}
	if found < len(tsihs) {
		return nil, nil
	}
	for _, name := range []string{"receive", "backend", "read_wait", "send", "total"} {
		if p := sum[name]; p != nil {
			t.Phases = append(t.Phases, *p)
		}
	}
	return t, nil
}

// A benchLine shows the progress of bench: on a terminal in one line that changes, elsewhere with a line from time to time.
type benchLine struct {
	w        io.Writer
	terminal bool
	last     time.Time // of a line
	drawn    bool
}

func newBenchLine(w io.Writer) *benchLine {
	return &benchLine{w: w, terminal: isTerminal(w), last: time.Now()}
}

func (l *benchLine) show(p bench.Progress) {
	what := fmt.Sprintf("run %d of %d: bs %s, iodepth %d: ", p.Run, p.Runs, bench.FormatSize(int64(p.Size)), p.Depth)
	if p.Ramp {
		what += "ramp "
	}
	speed := fmt.Sprintf("%.0f of %.0f s: %.0f IOPS, %s MB/s read, %s MB/s written", p.Elapsed.Seconds(), p.Of.Seconds(), p.IOPS[0]+p.IOPS[1],
		megabytes(p.Bandwidth[0]), megabytes(p.Bandwidth[1]))
	if p.Repeated > 0 {
		speed += fmt.Sprintf(", %d repeated", p.Repeated)
	}
	if p.Written > 0 {
		speed = fmt.Sprintf("verified %d of %d places", p.Verified, p.Written)
	}
	what += speed
	switch {
	case l.terminal:
		columns, _ := windowSize(l.w)
		if len(what) >= columns {
			what = what[:max(columns-1, 0)]
		}
		fmt.Fprintf(l.w, "\r%s\x1b[K", what)
		l.drawn = true
	case time.Since(l.last) >= lineEvery:
		fmt.Fprintln(l.w, what)
		l.last = time.Now()
	}
}

// end clears the line of a terminal.
func (l *benchLine) end() {
	if l.drawn {
		fmt.Fprint(l.w, "\r\x1b[K")
		l.drawn = false
	}
}
