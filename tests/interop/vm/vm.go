// Package vm boots a small Linux machine and runs scripts in it. The machine is
// the one that tests/interop/setup.sh makes: Debian's kernel 6.1 with siw, under
// QEMU without KVM. Its root file system is the host's, read-only under a tmpfs,
// so every tool of the host is at hand and nothing done in the guest remains.
// The guest reaches the host's 127.0.0.1 as HostAddr.
package vm

import (
	"bufio"
	"crypto/rand"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/proc"
)

const (
	HostAddr   = "10.0.2.2"   // what the guest calls the host's 127.0.0.1
	HostAddr6  = "fec0::2"    // what the guest calls the host's ::1
	GuestAddr  = "10.0.2.15"  // what QEMU's user network expects the guest to be
	GuestAddr6 = "fec0::15"   // what the guest may be besides
	Files      = "/run/share" // what the guest calls the directory VM.Files
)

// killGrace is how long a script may take to die after its time is up.
const killGrace = 20 * time.Second

//go:embed guest/agent
var agent []byte

// Config describes a machine. The zero value of a field means its default.
type Config struct {
	Dir         string        // where setup.sh put the machine; as setup.sh chooses
	MemMiB      int           // 1024
	CPUs        int           // 2
	BootTimeout time.Duration // from QEMU's start to the first script; 2 minutes

	// Tap is a tap device of the host. With it the guest has a second network device, eth1, which gets
	// and sends the TCP segments of the other end as they are. The first one, eth0, is a proxy that cuts the stream again.
	Tap string
}

func (c Config) withDefaults() (Config, error) {
	if c.Dir == "" {
		c.Dir = os.Getenv("ISER_TARGET_VM_DIR")
	}
	if c.Dir == "" {
		cache, err := os.UserCacheDir() // XDG_CACHE_HOME or ~/.cache
		if err != nil {
			return c, err
		}
		c.Dir = filepath.Join(cache, "iser-target", "vm")
	}
	if c.MemMiB == 0 {
		c.MemMiB = 1024
	}
	if c.CPUs == 0 {
		c.CPUs = 2
	}
	if c.BootTimeout == 0 {
		c.BootTimeout = 2 * time.Minute
	}
	return c, nil
}

// Missing returns why no machine can be booted here, or nil if one can.
func Missing(cfg Config) error {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return err
	}
	if _, err := exec.LookPath(qemu); err != nil {
		return fmt.Errorf("%w (tests/interop/setup.sh installs it)", err)
	}
	for _, name := range []string{"vmlinuz", "initrd.img", "lib/modules"} {
		if _, err := os.Stat(filepath.Join(cfg.Dir, "current", name)); err != nil {
			return fmt.Errorf("%w (tests/interop/setup.sh makes it)", err)
		}
	}
	return nil
}

// A VM is a running machine.
type VM struct {
	BootTime time.Duration // until scripts could be run
	LogName  string        // the file with all that the console printed; stays

	dir     string // temporary; removed by Close
	machine string // see Machine
	mark    string // ends the output of a script
	cmd     *exec.Cmd
	exited  chan struct{} // closed when QEMU has ended and all was read
	console console
	ctl     net.Conn
	stop    net.Conn
	status  chan string // lines of the agent: "ID STATUS"
	out     stream
	err     stream

	mu     sync.Mutex // one script at a time; guards what follows
	lastID int
	broken error // why no further script can be run
}

// A Result is what became of a script.
type Result struct {
	Stdout string
	Stderr string
	Status int // exit status; 128 + n after signal n, as in a shell
}

// Start boots a machine that lives as long as t. It fails t if that does not
// work, or if the kernel has found a fault in itself by the end.
func Start(t testing.TB, cfg Config) *VM {
	t.Helper()
	v, err := Boot(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := v.Close(); err != nil {
			t.Error(err)
		}
	})
	return v
}

const qemu = "qemu-system-x86_64"

// Boot boots a machine. Its end is Close, or the end of this process.
func Boot(cfg Config) (_ *VM, err error) {
	begun := time.Now()
	cfg, err = cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if err := Missing(cfg); err != nil {
		return nil, err
	}
	v := &VM{exited: make(chan struct{}), status: make(chan string, 1)}
	if v.dir, err = os.MkdirTemp("", "iser-target-vm-"); err != nil {
		return nil, err
	}
	if err := v.start(cfg); err != nil {
		os.RemoveAll(v.dir)
		return nil, fmt.Errorf("vm: %w", err)
	}
	select {
	case <-v.status:
	case <-v.exited:
		err = errors.New("vm: QEMU ended during boot")
	case <-time.After(cfg.BootTimeout):
		err = fmt.Errorf("vm: no sign of life from the guest in %v", cfg.BootTimeout)
	}
	if err != nil {
		v.Close()
		return nil, fmt.Errorf("%w\n%s", err, v.Console())
	}
	v.BootTime = time.Since(begun)
	return v, nil
}

// start starts QEMU and the goroutines that read from the guest.
func (v *VM) start(cfg Config) (err error) {
	// Resolved once: setup.sh may put a newer machine into place meanwhile.
	v.machine, err = filepath.EvalSymlinks(filepath.Join(cfg.Dir, "current"))
	if err != nil {
		return err
	}
	if err := os.Mkdir(v.Files(), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(v.Files(), ".agent"), agent, 0o644); err != nil {
		return err
	}
	v.LogName = filepath.Join(cfg.Dir, "console.log")
	log, err := os.Create(v.LogName)
	if err != nil {
		return err
	}
	v.console.log = log

	var mark [16]byte
	rand.Read(mark[:])
	v.mark = hex.EncodeToString(mark[:])

	v.cmd = v.command(cfg)
	conns, err := v.connect()
	if err != nil {
		return err
	}
	v.cmd.Stdout, v.cmd.Stderr = log, log
	err = proc.Start(v.cmd)
	for _, theirs := range v.cmd.ExtraFiles {
		theirs.Close() // QEMU has its own copy
	}
	if err != nil {
		for _, c := range conns {
			c.Close()
		}
		log.Close()
		return err
	}

	v.read(conns, log)
	return nil
}

// command returns the command line of QEMU, except for what connect adds.
func (v *VM) command(cfg Config) *exec.Cmd {
	cmd := exec.Command(qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		// What is emulated slowly is off: moving strings byte by byte (ERMS, FSRM),
		// and page tables of five levels.
		"-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max,erms=off,fsrm=off,la57=off",
		"-smp", strconv.Itoa(cfg.CPUs), "-m", strconv.Itoa(cfg.MemMiB),
		"-kernel", filepath.Join(v.machine, "vmlinuz"), "-initrd", filepath.Join(v.machine, "initrd.img"),
		// An oops ends the machine, and with it the test. The watchdogs measure
		// how busy the host is, not the guest. Without tsc=reliable Linux reads the time from the HPET, a device, which
		// took a sixth of the CPU time of the guest while it wrote over iSER.
		"-append", "console=ttyS0 loglevel=7 oops=panic panic=-1 nowatchdog "+
			"tsc=reliable rcupdate.rcu_cpu_stall_suppress=1 mitigations=off init_on_alloc=0 net.ifnames=0 agent.mark="+v.mark,
		"-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile=",
		"-device", "virtio-serial-pci")
	if cfg.Tap != "" {
		cmd.Args = append(cmd.Args, "-netdev", "tap,id=tap,ifname="+escape(cfg.Tap)+",script=no,downscript=no",
			"-device", "virtio-net-pci,netdev=tap,romfile=,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off")
	}
	for tag, dir := range map[string]string{"share": v.Files(), "host": "/", "machine": v.machine} {
		fsdev := "local,id=" + tag + ",path=" + escape(dir) + ",security_model=none,multidevs=remap"
		if tag != "share" {
			fsdev += ",readonly=on"
		}
		cmd.Args = append(cmd.Args, "-fsdev", fsdev,
			"-device", "virtio-9p-pci,fsdev="+tag+",mount_tag="+tag)
	}
	return cmd
}

// connect makes a connection for each port of the guest. QEMU inherits the other ends.
func (v *VM) connect() (map[string]net.Conn, error) {
	conns := make(map[string]net.Conn)
	for _, port := range []string{"console", "ctl", "out", "err", "stop"} {
		ours, theirs, err := socketPair()
		if err != nil {
			return nil, err
		}
		conns[port] = ours
		fd := 3 + len(v.cmd.ExtraFiles)
		v.cmd.ExtraFiles = append(v.cmd.ExtraFiles, theirs)
		device := "virtserialport,chardev=" + port + ",name=" + port
		if port == "console" {
			device = "isa-serial,chardev=console"
		}
		v.cmd.Args = append(v.cmd.Args,
			"-chardev", fmt.Sprintf("socket,id=%s,fd=%d", port, fd), "-device", device)
	}
	v.ctl, v.stop = conns["ctl"], conns["stop"]
	return conns, nil
}

// read reads what the guest sends until QEMU ends. Then it closes the connections and the log.
func (v *VM) read(conns map[string]net.Conn, log *os.File) {
	// Each reader ends when QEMU, the other end of its connection, has.
	var readers sync.WaitGroup
	readers.Go(func() { v.console.read(conns["console"]) })
	readers.Go(func() { v.out.read(conns["out"]) })
	readers.Go(func() { v.err.read(conns["err"]) })
	readers.Go(func() {
		for lines := bufio.NewScanner(v.ctl); lines.Scan(); {
			v.status <- lines.Text()
		}
	})
	go func() {
		v.cmd.Wait()
		readers.Wait()
		for _, c := range conns {
			c.Close()
		}
		log.Close()
		close(v.exited)
	}()
}

// escape doubles the commas in s, as QEMU's options want it.
func escape(s string) string { return strings.ReplaceAll(s, ",", ",,") }

// socketPair returns the ends of a stream: ours, and one for a child process.
func socketPair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	f := os.NewFile(uintptr(fds[0]), "ours")
	defer f.Close() // FileConn has its own copy
	theirs = os.NewFile(uintptr(fds[1]), "theirs")
	if ours, err = net.FileConn(f); err != nil {
		theirs.Close()
	}
	return ours, theirs, err
}

// Files returns the host's directory that the guest has at the path [Files].
func (v *VM) Files() string { return filepath.Join(v.dir, "share") }

// Machine returns the directory that setup.sh made, which the guest has at /run/machine.
func (v *VM) Machine() string { return v.machine }

// Console returns the end of what the guest's kernel has printed; LogName names
// the file that has all of it.
func (v *VM) Console() string {
	return fmt.Sprintf("the end of the guest's console, all of which is in %s:\n%s", v.LogName, v.console.end())
}

// Yield lets all other processes of this machine run first until t ends: a guest whose targets are on the same machine takes no CPU from
// them, as if they had machines of their own.
func (v *VM) Yield(t testing.TB) {
	t.Helper()
	p, err := syscall.Getpriority(syscall.PRIO_PROCESS, v.cmd.Process.Pid)
	if err != nil {
		t.Fatalf("priority of the VM: %v", err)
	}
	nice := 20 - p // as the system call returns it
	v.setNice(t, nice+10)
	t.Cleanup(func() {
		if v.Broken() == nil {
			v.setNice(t, nice)
		}
	})
}

func (v *VM) setNice(t testing.TB, nice int) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", v.cmd.Process.Pid))
	if err != nil || len(tasks) == 0 {
		t.Fatalf("threads of the VM: %v", err)
	}
	for _, task := range tasks {
		tid, err := strconv.Atoi(filepath.Base(task))
		if err == nil {
			err = syscall.Setpriority(syscall.PRIO_PROCESS, tid, nice)
		}
		if err != nil && err != syscall.ESRCH {
			t.Fatalf("priority of the VM: %v", err)
		}
	}
}

// Close ends the machine. The error tells of faults that the kernel has found
// in itself since the last script.
func (v *VM) Close() error {
	v.cmd.Process.Kill()
	<-v.exited
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.broken == nil {
		v.broken = net.ErrClosed
	}
	err := os.RemoveAll(v.dir)
	if found := v.console.trouble(); found != nil {
		err = fmt.Errorf("the guest's kernel reports:\n%s\n%s", strings.Join(found, "\n"), v.Console())
	}
	return err
}

// Broken returns why the machine can run no further script, or nil if it can.
func (v *VM) Broken() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.broken
}

// Run runs a script and returns what it printed to its standard output. The
// shell is bash with -euo pipefail. Run fails t, at once, if the script fails or
// takes longer than limit. All that the script prints is logged as it comes. A
// process that it leaves behind must have redirected its output.
func (v *VM) Run(t testing.TB, script string, limit time.Duration) string {
	t.Helper()
	r := v.Try(t, script, limit)
	if r.Status != 0 {
		t.Fatalf("exit status %d of the script:\n%s", r.Status, script)
	}
	return r.Stdout
}

// Try runs a script as Run does, but leaves it to the caller to judge the exit status. It fails
// t, at once, if the script could not be run to its end, or if the guest's kernel has found a
// fault in itself.
func (v *VM) Try(t testing.TB, script string, limit time.Duration) Result {
	t.Helper()
	r, err := v.Script(t.Logf, script, limit)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Script runs a script as Try does, for a caller that is no test. logf gets each line that the script
// prints. After an error the machine can run no further script, and the error has the end of its console.
func (v *VM) Script(logf func(string, ...any), script string, limit time.Duration) (Result, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.broken != nil {
		return Result{}, fmt.Errorf("vm: %w", v.broken)
	}
	r, err := v.run(logf, script, limit)
	if err != nil {
		v.broken = err
		v.cmd.Process.Kill()
		<-v.exited
	}
	if found := v.console.trouble(); found != nil {
		v.broken = fmt.Errorf("the guest's kernel reports:\n%s", strings.Join(found, "\n"))
	}
	if v.broken != nil {
		return Result{}, fmt.Errorf("vm: %w\n%s\nthe script was:\n%s", v.broken, v.Console(), script)
	}
	return r, nil
}

// run runs a script. An error means that the machine cannot be used any longer.
func (v *VM) run(logf func(string, ...any), script string, limit time.Duration) (Result, error) {
	v.lastID++
	id := strconv.Itoa(v.lastID)
	name := filepath.Join(v.Files(), ".script."+id)
	if err := os.WriteFile(name, []byte(script), 0o644); err != nil {
		return Result{}, err
	}
	defer os.Remove(name)
	out := v.out.begin(v.mark+" "+id, logf)
	defer v.out.drop()
	err := v.err.begin(v.mark+" "+id, logf)
	defer v.err.drop()

	late := time.After(limit + killGrace)
	if _, err := fmt.Fprintln(v.ctl, id); err != nil {
		return Result{}, err
	}
	defer time.AfterFunc(limit, func() { fmt.Fprintln(v.stop, id) }).Stop()
	var status string
	for _, done := range []<-chan struct{}{out.done, err.done, nil} {
		arrived := v.status
		if done != nil {
			arrived = nil
		}
		select {
		case <-done:
		case status = <-arrived:
		case <-v.exited:
			return Result{}, errors.New("the machine has ended")
		case <-late:
			return Result{}, fmt.Errorf("the script could not be ended after %v", limit)
		}
	}
	code, ok := strings.CutPrefix(status, id+" ")
	if !ok {
		return Result{}, fmt.Errorf("the agent answers script %s with %q", id, status)
	}
	r := Result{Stdout: out.buf.String(), Stderr: err.buf.String()}
	var convErr error
	if r.Status, convErr = strconv.Atoi(code); convErr != nil {
		return Result{}, convErr
	}
	return r, errors.Join(out.err, err.err)
}
