package rbd

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/backend/rbd/rbduri"
	"golang.org/x/sys/unix"
)

// The programs of a Store, which are found by PATH.
const (
	daemonProgram = "qemu-storage-daemon"
	clientProgram = "rbd"
)

const (
	startTime   = 20 * time.Second // for a daemon until it exports the image
	endTime     = 3 * time.Second  // for one that has been told to end
	cleanTime   = 15 * time.Second // for one whose cluster has just answered: a lock that it leaves behind keeps the next one out for half a minute
	resizeTime  = 10 * time.Second
	longestWait = 5 * time.Second // between two attempts to start one
	lastLines   = 3               // of what the daemon has said that an error quotes
)

// The names of the image in the daemon.
const (
	nodeName   = "image"
	exportName = "disk"
)

// A daemon is the qemu-storage-daemon of a Store, which is started again when it ends.
type daemon struct {
	c        Config
	image    *rbduri.Image
	socket   string
	listener *os.File
	record   string // path of the file with what another process has to know if this one is killed; empty: none

	mu   sync.Mutex // held while the process changes, and during a command of QMP
	p    *process   // nil: none runs
	dead []string   // clients whose process ended

	ctx     context.Context // ends with the Store
	closing context.CancelFunc

	told   sync.Mutex
	reason error // why there is no process
	since  time.Time
	up     chan struct{} // closed when the image is exported; nil: it is

	ended chan struct{} // closed when supervise has returned
}

// A process is one run of the program.
type process struct {
	cmd   *exec.Cmd
	m     *monitor
	ended chan struct{}
	said  *tail

	known  chan struct{} // closed when client is set
	client watcher       // of the image; zero: not known
}

// A tail has the last lines of what a process has said.
type tail struct {
	mu    sync.Mutex
	lines []string
}

func (t *tail) add(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines = append(t.lines, line)
	t.lines = t.lines[max(0, len(t.lines)-lastLines):]
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.Join(t.lines, "; ")
}

// Environment returns the variables of a program that the target runs: without those that are for the target, which may be secret.
func Environment() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return strings.HasPrefix(name, "ISER_TARGET_") || slices.Contains([]string{"NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID"}, name)
	})
}

// begin starts the program and connects to its monitor. The process ends with the target, even if that is killed.
func (d *daemon) begin(until time.Time) (*process, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "qmp"), os.NewFile(uintptr(fds[1]), "qmp")
	defer theirs.Close()
	p := &process{ended: make(chan struct{}), said: &tail{}, known: make(chan struct{})}
	// The descriptors of ExtraFiles begin with 3. An iothread of the export would end the daemon of QEMU 7.2 when the client leaves.
	p.cmd = exec.Command(daemonProgram, "--chardev", "socket,id=qmp,fd=4", "--monitor", "chardev=qmp",
		"--nbd-server", "addr.type=fd,addr.str=3,max-connections=0")
	p.cmd.ExtraFiles = []*os.File{d.listener, theirs}
	p.cmd.Env = Environment()
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	out, err := p.cmd.StderrPipe()
	if err != nil {
		ours.Close()
		return nil, err
	}
	started := make(chan error)
	go func() {
		runtime.LockOSThread() // Pdeathsig is sent when the thread ends, not the process
		err := p.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		d.listen(p.said, out)
		p.cmd.Wait()
		close(p.ended)
	}()
	if err := <-started; err != nil {
		ours.Close()
		if errors.Is(err, exec.ErrNotFound) {
			err = fmt.Errorf("%w. apt-get install qemu-system-common qemu-block-extra", err)
		}
		return nil, err
	}
	if p.m, err = newMonitor(ours, until); err != nil {
		p.kill()
		return nil, d.late(until, fmt.Errorf("%s does not answer: %w%s", daemonProgram, err, p.words()))
	}
	return p, nil
}

// listen reads what the process says until it ends. Of equal lines, such as one about each request that is lost, it takes the first.
func (d *daemon) listen(said *tail, r io.Reader) {
	b, last := bufio.NewReaderSize(r, 4096), ""
	for {
		line, err := b.ReadSlice('\n') // a longer line becomes several
		if text := strings.TrimSpace(string(line)); text != "" && text != last {
			last = text
			said.add(text)
			if d.c.Said != nil {
				d.c.Said(text)
			}
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return
		}
	}
}

// words returns what the process has said last, for the end of an error.
func (p *process) words() string {
	if s := p.said.String(); s != "" {
		return ". It said: " + s
	}
	return ""
}

// kill ends the process at once.
func (p *process) kill() {
	p.cmd.Process.Kill()
	<-p.ended
	if p.m != nil {
		p.m.close()
	}
}

// end makes the process end in order, so that it leaves no lock behind, and reports whether it has. It kills one that takes longer than limit for each of two
// steps.
func (p *process) end(limit time.Duration) (clean bool) {
	_ = p.m.execute("quit", nil, nil, time.Now().Add(limit)) // it may not answer, or may have ended
	select {
	case <-p.ended:
	case <-time.After(limit):
		p.cmd.Process.Kill()
		<-p.ended
	}
	p.m.close()
	return p.cmd.ProcessState.Success()
}

// late returns errNoAnswer in place of err if the time is over.
func (d *daemon) late(until time.Time, err error) error {
	if time.Now().Before(until) {
		return err
	}
	return fmt.Errorf("%w (%v): %w", errNoAnswer, startTime, err)
}

// start starts a process that exports the image. size is the least size of it, in bytes; first says that it may have to be made as large, and that a larger one is refused.
// Preconditions: d.mu is held, and no process runs.
func (d *daemon) start(size int64, first bool) error {
	until := time.Now().Add(startTime)
	ctx, cancel := context.WithDeadline(d.ctx, until)
	defer cancel()
	freed, looked := make(chan error, 1), make(chan error, 1)
	var before []watcher
	if d.c.ReadOnly {
		freed <- nil
		looked <- nil
	} else {
		go func() { freed <- d.free(ctx) }()
		go func() {
			var err error
			before, err = watching(ctx, d.image)
			looked <- err
		}()
	}
	p, err := d.begin(until)
	failed := <-looked
	if freed := <-freed; freed != nil && failed == nil {
		failed = freed
	}
	if err != nil {
		return err
	}
	stop := context.AfterFunc(d.ctx, func() { p.cmd.Process.Kill() })
	defer stop()
	if errors.Is(failed, exec.ErrNotFound) || errors.Is(failed, errNoAnswer) {
		p.kill()
		return failed
	}
	if err := d.export(p, size, first, until); err != nil { // QMP tells best what else failed
		p.end(endTime)
		return explain(d.image, d.late(until, err))
	}
	if failed != nil {
		p.end(endTime)
		return explain(d.image, failed)
	}
	stop()
	d.p = p
	d.ready(true)
	d.setReason(nil)
	go d.identify(p, before)
	if !d.c.Shared { // another process may have to know it at any time; gateways have Fence
		<-p.known
	}
	return nil
}

// identify finds out and stores which client p is: one that was not there before.
func (d *daemon) identify(p *process, before []watcher) {
	defer close(p.known)
	if d.c.ReadOnly {
		return
	}
	var err error
	if p.client, err = d.newClient(d.ctx, before); err == nil {
		err = d.note(p)
	}
	if err != nil && d.ctx.Err() == nil {
		d.tell(fmt.Sprintf("the client of RBD is not known, so writes would wait for half a minute if it were killed: %v", err))
	}
}

// free breaks the lock of clients that have ended.
func (d *daemon) free(ctx context.Context) error {
	if len(d.dead) == 0 {
		return nil
	}
	if err := breakLock(ctx, d.image, d.dead); err != nil {
		return fmt.Errorf("the lock of a client that ended: %w", err)
	}
	d.dead = nil
	return nil
}

// ready notes whether the image is exported.
func (d *daemon) ready(yes bool) {
	d.told.Lock()
	defer d.told.Unlock()
	if open := d.up == nil; open != yes {
		if yes {
			close(d.up)
			d.up = nil
		} else {
			d.up = make(chan struct{})
		}
	}
}

// wait waits until the image is exported.
func (d *daemon) wait(ctx context.Context) error {
	d.told.Lock()
	up := d.up
	d.told.Unlock()
	if up == nil {
		return nil
	}
	select {
	case <-up:
		return nil
	case <-ctx.Done():
		if reason := d.why(); reason != nil {
			return reason
		}
		return ctx.Err()
	}
}

// export opens the image in the daemon and exports it.
func (d *daemon) export(p *process, size int64, first bool, until time.Time) error {
	node := map[string]any{
		"driver": "rbd", "node-name": nodeName, "pool": d.image.Pool, "image": d.image.Name, "conf": d.image.Conf, "user": d.image.User,
		"read-only": d.c.ReadOnly, "discard": "unmap", "cache": map[string]bool{"direct": true},
	}
	if d.image.Namespace != "" {
		node["namespace"] = d.image.Namespace
	}
	if err := p.m.execute("blockdev-add", node, nil, until); err != nil {
		return err
	}
	has, err := p.size(until)
	switch {
	case err != nil:
		return err
	case has < size && first && !d.c.ReadOnly:
		if err := p.resize(size, until); err != nil {
			return fmt.Errorf("the image cannot become as large as size says: %w", err)
		}
	case has < size:
		return fmt.Errorf("the image has %d bytes, less than %d. Restore it, or let the target write to it", has, size)
	case first && size != 0 && has > size:
		return fmt.Errorf("the image has %d bytes, but size says %d. Leave size out to use the image as it is, or set size: %d", has, size, has)
	}
	return p.export(d.c.ReadOnly, until)
}

// export exports the open image.
func (p *process) export(readOnly bool, until time.Time) error {
	return p.m.execute("block-export-add", map[string]any{
		"type": "nbd", "id": exportName, "name": exportName, "node-name": nodeName, "writable": !readOnly,
	}, nil, until)
}

// size returns the size of the image when it was opened, in bytes.
func (p *process) size(until time.Time) (int64, error) {
	var nodes []struct {
		Name  string `json:"node-name"`
		Image struct {
			Size int64 `json:"virtual-size"`
		}
	}
	if err := p.m.execute("query-named-block-nodes", map[string]bool{"flat": true}, &nodes, until); err != nil {
		return 0, err
	}
	for _, n := range nodes {
		if n.Name == nodeName {
			return n.Image.Size, nil
		}
	}
	return 0, fmt.Errorf("%s has no node %s", daemonProgram, nodeName)
}

// resize gives the image another size, in bytes, while it is not exported.
func (p *process) resize(size int64, until time.Time) error {
	return p.m.execute("block_resize", map[string]any{"node-name": nodeName, "size": size}, nil, until)
}

// resize gives the image another size, in bytes. The client of NBD loses its connection, and connects again.
func (d *daemon) resize(size int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.p == nil {
		return fmt.Errorf("no size can be set now: %w", d.why())
	}
	d.ready(false)
	defer d.ready(true)
	until := time.Now().Add(resizeTime)
	err := d.p.m.executeUntil("block-export-del", "BLOCK_EXPORT_DELETED", map[string]string{"id": exportName, "mode": "hard"}, nil, until)
	if err == nil {
		err = d.p.resize(size, until)
		var refused *qmpError
		if err != nil && !errors.As(err, &refused) {
			d.p.cmd.Process.Kill() // nobody knows what it will do
			return err
		}
		if again := d.p.export(d.c.ReadOnly, until); again != nil {
			d.p.cmd.Process.Kill()
			return errors.Join(err, again)
		}
	}
	return err
}

// newClient returns the client of the image that was not there before.
func (d *daemon) newClient(ctx context.Context, before []watcher) (watcher, error) {
	now, err := watching(ctx, d.image)
	if err != nil {
		return watcher{}, err
	}
	list := slices.DeleteFunc(now, func(w watcher) bool { return slices.Contains(before, w) })
	if len(list) != 1 {
		return watcher{}, fmt.Errorf("%d clients have opened the image in the meantime", len(list))
	}
	return list[0], nil
}

// supervise starts another process whenever one ends, until end.
func (d *daemon) supervise(size func() int64) {
	defer close(d.ended)
	wait := time.Duration(0)
	for {
		d.mu.Lock()
		p := d.p
		d.mu.Unlock()
		if p != nil {
			<-p.ended
			wait = 0
			d.ready(false)
			<-p.known
			d.mu.Lock()
			d.p = nil
			p.m.close()
			if p.client != (watcher{}) {
				d.dead = append(d.dead, p.client.name())
			}
			d.mu.Unlock()
			d.fail(fmt.Errorf("%s ended (%v)%s", daemonProgram, p.cmd.ProcessState, p.words()))
			if d.c.Shared {
				return
			}
		}
		select {
		case <-d.ctx.Done():
			return
		case <-time.After(wait):
		}
		d.mu.Lock()
		err := d.ctx.Err()
		if err == nil {
			err = d.start(size(), false)
		}
		d.mu.Unlock()
		if err != nil {
			d.fail(err)
			wait = min(max(2*wait, 100*time.Millisecond), longestWait)
		}
	}
}

// fail notes why no process runs.
func (d *daemon) fail(reason error) {
	if d.ctx.Err() != nil {
		return
	}
	if old := d.why(); old == nil || old.Error() != reason.Error() {
		d.tell(reason.Error())
	}
	d.setReason(reason)
}

func (d *daemon) setReason(reason error) {
	d.told.Lock()
	defer d.told.Unlock()
	if reason != nil && d.reason == nil {
		d.since = time.Now()
	}
	d.reason = reason
}

// why returns why no process runs; nil: one does.
func (d *daemon) why() error {
	d.told.Lock()
	defer d.told.Unlock()
	return d.reason
}

func (d *daemon) tell(text string) {
	if d.c.Said != nil {
		d.c.Said(text)
	}
}

// kill ends the process at once, if one runs. Another one follows.
func (d *daemon) kill() {
	d.mu.Lock()
	p := d.p
	d.mu.Unlock()
	if p != nil {
		p.cmd.Process.Kill()
		<-p.ended
	}
}

// end ends the process and lets no other follow: in order, so that the image is not locked any longer. limit is that of process.end.
func (d *daemon) end(limit time.Duration) {
	d.closing()
	d.mu.Lock()
	clean := d.p != nil && d.p.end(limit)
	if d.p != nil {
		<-d.p.known
	}
	d.mu.Unlock()
	<-d.ended
	if clean && d.record != "" {
		os.Remove(d.record)
	}
	d.listener.Close()
	sub := filepath.Dir(d.socket)
	os.RemoveAll(sub)
	sockets.Delete(sub)
}

// A record is what another process has to know if this one is killed.
type record struct {
	PID    int    // of the daemon
	Start  string // time when that process started, in the units of /proc/PID/stat
	Client string // of Ceph
}

// note stores the client of a process.
func (d *daemon) note(p *process) error {
	if d.record == "" {
		return nil
	}
	pid := p.cmd.Process.Pid
	b, err := json.Marshal(record{pid, startOf(pid), p.client.name()})
	if err != nil {
		return err
	}
	next := filepath.Join(filepath.Dir(d.socket), "client")
	if err := os.WriteFile(next, b, 0o600); err != nil {
		return err
	}
	return os.Rename(next, d.record)
}

// recall finds the client of a target that was killed. One whose daemon is alive gives its lock away by itself.
func (d *daemon) recall() {
	b, err := os.ReadFile(d.record)
	if err != nil {
		return
	}
	var r record
	if json.Unmarshal(b, &r) == nil && r.Client != "" && (r.Start == "" || startOf(r.PID) != r.Start) {
		d.dead = append(d.dead, r.Client)
	}
}

// startOf returns the time when a process started, as /proc/PID/stat has it; empty: it ended.
func startOf(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
		return ""
	}
	return f[19]
}

// open listens on a socket in a new directory of dir, which only this user can enter.
func (d *daemon) open(dir, key string) error {
	own := fmt.Sprintf("rbd-%s-%d-", key, os.Getpid())
	opening.Lock()
	defer opening.Unlock()
	sweep(dir, "rbd-"+key+"-")
	sub, err := os.MkdirTemp(dir, own)
	if err != nil {
		return err
	}
	d.socket = filepath.Join(sub, "s")
	if err := d.bind(); err != nil {
		os.RemoveAll(sub)
		return fmt.Errorf("socket %s: %w", d.socket, err)
	}
	sockets.Store(sub, true)
	return nil
}

func (d *daemon) bind() error {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: d.socket, Net: "unix"})
	if err != nil {
		return err
	}
	defer l.Close()
	l.SetUnlinkOnClose(false)
	d.listener, err = l.File()
	return err
}

var (
	sockets sync.Map   // directories of open Stores of this process
	opening sync.Mutex // held while one is made
)

// sweep removes directories of processes that ended.
func sweep(dir, prefix string) {
	list, _ := filepath.Glob(filepath.Join(dir, prefix+"*-*"))
	for _, sub := range list {
		var pid int
		if _, err := fmt.Sscanf(strings.TrimPrefix(filepath.Base(sub), prefix), "%d-", &pid); err != nil {
			continue
		}
		_, open := sockets.Load(sub)
		if pid == os.Getpid() && !open || pid != os.Getpid() && unix.Kill(pid, 0) == unix.ESRCH {
			os.RemoveAll(sub)
		}
	}
}
