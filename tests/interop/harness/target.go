// Package harness runs iser-target as its users do: the binary, a config file,
// signals.
package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/tests/interop/proc"
	"github.com/iser-target/iser-target/tests/interop/vm"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/ports"
)

const (
	startLimit = 20 * time.Second // until it serves
	stopLimit  = 20 * time.Second // from SIGTERM to the end
)

// binary is cmd/iser-target, built once for all tests, or what
// ISER_TARGET_BINARY names: a release, or a build with the race detector.
var binary struct {
	once sync.Once
	dir  string // temporary; removed by Cleanup
	name string
	err  error
}

// build builds cmd/iser-target and returns the binary's name.
func build() (string, error) {
	b := &binary
	b.once.Do(func() {
		if b.name = os.Getenv("ISER_TARGET_BINARY"); b.name != "" {
			return
		}
		root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
		if err != nil {
			b.err = fmt.Errorf("go list -m: %w", err)
			return
		}
		if b.dir, b.err = os.MkdirTemp("", "iser-target-bin-"); b.err != nil {
			return
		}
		b.name = filepath.Join(b.dir, "iser-target")
		cmd := exec.Command("go", "build", "-o", b.name, "./cmd/iser-target")
		cmd.Dir = strings.TrimSpace(string(root))
		if out, err := cmd.CombinedOutput(); err != nil {
			b.err = fmt.Errorf("%v: %w\n%s", cmd, err, out)
		}
	})
	return b.name, b.err
}

// environment returns the environment of this process without the variables of the tests: the
// target refuses variables that look like its own and are not.
func environment(more ...string) []string {
	ours := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "ISER_TARGET_") })
	return append(ours, more...)
}

// Copy copies cmd/iser-target to a file that can be executed.
func Copy(t testing.TB, file string) {
	t.Helper()
	name, err := build()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b, 0o755); err != nil {
		t.Fatal(err)
	}
}

// Cleanup removes what the tests of this process shared. TestMain calls it.
func Cleanup() {
	if binary.dir != "" {
		os.RemoveAll(binary.dir)
	}
}

// A Config is what a test requires of a target.
type Config struct {
	Targets string   // value of the config key "targets" in YAML, not indented
	Portals []Portal // nil: one, as its zero value
	More    string   // further keys of the config file
	Dir     string   // of the config file, the state directory and the control socket; "" for one of its own
	Env     []string // "NAME=value" of further variables
	Cgroup  string   // directory of the control group that it runs in; "" for that of the test
}

// A Portal is one of a target.
type Portal struct {
	Host  string // "", which is 127.0.0.1, or ::1, or an address of a tap device that the guest reaches
	TPGT  int    // 0: as the target chooses
	Proxy *Proxy // where initiators are told to go, if not to the portal itself
}

// A Target is an iser-target that listens on the loopback and tells the guest of
// a vm.VM to come there.
type Target struct {
	Port int // of the first portal

	listen  []string // addresses of the portals
	addrs   []string // the same as the guest must call them
	config  string   // file name
	debug   int      // port of the debug endpoint
	metrics int      // port of the metrics endpoint
	socket  string   // where it takes orders
	env     []string // see Config.Env
	cgroup  string   // see Config.Cgroup
	log     testkit.Log
	run     *run // nil when it does not run
}

// A run is one process.
type run struct {
	cmd    *exec.Cmd
	exited chan struct{} // closed when err, what Wait returned, is there
	err    error
}

// Start starts a target with one portal that lives as long as t. targets is as
// in Config.
func Start(t testing.TB, targets string) *Target {
	t.Helper()
	return Config{Targets: targets}.Start(t)
}

// Start starts a target that lives as long as t.
func (c Config) Start(t testing.TB) *Target {
	t.Helper()
	if c.Portals == nil {
		c.Portals = make([]Portal, 1)
	}
	ports, err := freePorts(len(c.Portals) + 2)
	if err != nil {
		t.Fatal(err)
	}
	dir := c.Dir
	if dir == "" {
		dir = t.TempDir()
	}
	d := &Target{
		env: c.Env, cgroup: c.Cgroup,
		Port: ports[0], debug: ports[len(c.Portals)], metrics: ports[len(c.Portals)+1],
		config: filepath.Join(dir, "iser-target.yaml"), socket: filepath.Join(dir, "control"),
	}
	portals := ""
	for i, p := range c.Portals {
		host, guest := "127.0.0.1", vm.HostAddr
		switch p.Host {
		case "":
		case "::1":
			host, guest = p.Host, vm.HostAddr6
		default:
			host, guest = p.Host, p.Host
		}
		listen, addr := hostPort(host, ports[i]), hostPort(guest, ports[i])
		if p.Proxy != nil {
			p.Proxy.to, addr = listen, p.Proxy.Addr()
		}
		d.listen, d.addrs = append(d.listen, listen), append(d.addrs, addr)
		portals += fmt.Sprintf("  - listen: %q\n    advertise: [%q]\n", listen, addr)
		if p.TPGT != 0 {
			portals += fmt.Sprintf("    tpgt: %d\n", p.TPGT)
		}
	}
	config := fmt.Sprintf(`portals:
%stargets:
%s
state_dir: %s
control: {socket: %s}
debug: {listen: 127.0.0.1:%d}
metrics: {listen: 127.0.0.1:%d}
log: {level: debug, format: text}
%s`, portals, strings.Trim(c.Targets, "\n"), filepath.Join(dir, "state"), d.socket, d.debug, d.metrics, strings.TrimPrefix(c.More, "\n"))
	if err := os.WriteFile(d.config, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if d.run != nil {
			select {
			case <-d.run.exited:
				t.Errorf("the target has ended by itself: %v", d.run.err)
			default:
				d.Stop(t)
			}
		}
		if t.Failed() {
			t.Logf("the target's config:\n%s\nthe end of its log:\n%s", config, d.logEnd())
		}
	})
	d.Start(t)
	return d
}

// freePorts returns n TCP ports of 127.0.0.1 that nobody listens on. A target
// that is started again needs the port it had, so it cannot be left to choose.
func freePorts(n int) (list []int, err error) {
	for range n {
		port, err := ports.Free()
		if err != nil {
			return nil, err
		}
		list = append(list, port)
	}
	return list, nil
}

func hostPort(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// Addr returns the address at which the guest reaches the first portal.
func (d *Target) Addr() string { return d.addrs[0] }

// Addrs returns the addresses at which the guest reaches the portals.
func (d *Target) Addrs() []string { return d.addrs }

// Start starts the process, for the first time or again, and waits until it serves. Its portals listen before that, and
// then the control API answers.
func (d *Target) Start(t testing.TB) {
	t.Helper()
	if d.run != nil {
		t.Fatal("the target runs already")
	}
	name, err := build()
	if err != nil {
		t.Fatal(err)
	}
	args := []string{name, "serve", "--config", d.config}
	if d.cgroup != "" {
		args = append([]string{"sh", "-c", `echo $$ >"$0" && exec "$@"`, filepath.Join(d.cgroup, "cgroup.procs")}, args...)
	}
	r := &run{cmd: exec.Command(args[0], args[1:]...), exited: make(chan struct{})}
	r.cmd.Env = environment(d.env...)
	r.cmd.Stdout, r.cmd.Stderr = &d.log, &d.log
	if err := proc.Start(r.cmd); err != nil {
		t.Fatal(err)
	}
	d.run = r
	go func() {
		r.err = r.cmd.Wait()
		close(r.exited)
	}()
	for begun := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := d.answers()
		if err == nil {
			return
		}
		select {
		case <-r.exited:
			d.run = nil
			t.Fatalf("the target has ended by itself: %v", r.err)
		default:
		}
		if time.Since(begun) > startLimit {
			t.Fatalf("the target does not serve %v after its start: %v", startLimit, err)
		}
	}
}

// answers returns an error if the target does not serve yet.
func (d *Target) answers() error {
	ctx, cancel := context.WithTimeout(context.Background(), startLimit)
	defer cancel()
	c := client.New(d.socket)
	c.Limit(startLimit, startLimit)
	_, err := c.Portals(ctx)
	return err
}

// PID returns the process ID.
func (d *Target) PID() int { return d.run.cmd.Process.Pid }

// Kill ends the process as kill -9 does.
func (d *Target) Kill(t testing.TB) {
	t.Helper()
	if err := d.run.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-d.run.exited
	d.run = nil
}

// Stop sends SIGTERM and expects the process to end with exit code 0.
func (d *Target) Stop(t testing.TB) {
	t.Helper()
	r := d.run
	d.run = nil
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Errorf("SIGTERM: %v", err)
	}
	select {
	case <-r.exited:
		if r.err != nil {
			t.Errorf("after SIGTERM the target ended with %v, want exit code 0", r.err)
		}
	case <-time.After(stopLimit):
		r.cmd.Process.Signal(syscall.SIGQUIT) // prints the goroutines
		time.Sleep(time.Second)
		r.cmd.Process.Kill()
		<-r.exited
		t.Errorf("the target did not end in %v after SIGTERM", stopLimit)
	}
}

// Terminate sends SIGTERM and waits until the process has ended, or nothing of it is left but threads that
// hang in the kernel, which let its parent wait. After limit it fails t. wait returns the exit code as soon as
// these threads have ended, too.
func (d *Target) Terminate(t testing.TB, limit time.Duration) (wait func() int) {
	t.Helper()
	r := d.run
	d.run = nil
	begun := time.Now()
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Errorf("SIGTERM: %v", err)
	}
	for !r.gone() {
		if time.Since(begun) > limit {
			r.cmd.Process.Signal(syscall.SIGQUIT) // prints the goroutines
			time.Sleep(time.Second)
			r.cmd.Process.Kill()
			t.Fatalf("the target did not end in %v after SIGTERM", limit)
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Logf("the target has ended %v after SIGTERM", time.Since(begun).Round(time.Millisecond))
	return func() int {
		<-r.exited
		return r.cmd.ProcessState.ExitCode()
	}
}

// gone reports whether the process has ended, except for threads that hang in the kernel.
func (r *run) gone() bool {
	select {
	case <-r.exited:
		return true
	default:
	}
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", r.cmd.Process.Pid))
	if err != nil || len(tasks) == 0 {
		return false
	}
	for _, name := range tasks {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // it has just ended
		}
		// "pid (comm) state ...": D hangs in the kernel, Z and X have ended.
		if _, rest, _ := strings.Cut(string(b), ") "); !strings.ContainsRune("DZX", rune(rest[0])) {
			return false
		}
	}
	return true
}

// Listen returns the addresses of the portals on this machine.
func (d *Target) Listen() []string { return d.listen }

// Vars returns the numbers that the debug endpoint has under "iser_target".
func (d *Target) Vars(t testing.TB) map[string]float64 {
	t.Helper()
	vars, err := d.vars()
	if err != nil {
		t.Fatal(err)
	}
	return vars
}

func (d *Target) vars() (map[string]float64, error) {
	client := http.Client{
		Timeout: 10 * time.Second,
		// A connection kept open would be a goroutine that the target counts.
		Transport: &http.Transport{DisableKeepAlives: true},
	}
	resp, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/debug/vars", d.debug))
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %v: %s", resp.Request.URL, resp.Status)
	}
	var all struct {
		Target map[string]any `json:"iser_target"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&all); err != nil {
		return nil, fmt.Errorf("GET %v: %w", resp.Request.URL, err)
	}
	if all.Target == nil {
		return nil, errors.New(`/debug/vars has no key "iser_target"`)
	}
	vars := make(map[string]float64)
	for key, value := range all.Target {
		if n, ok := value.(float64); ok {
			vars[key] = n
		}
	}
	return vars, nil
}

// SettledVars returns the numbers of the debug endpoint when they have not
// changed for a second: connections go away a little after the initiator has
// turned its back on them.
func (d *Target) SettledVars(t testing.TB) map[string]float64 {
	t.Helper()
	vars, same := d.Vars(t), 0
	for begun := time.Now(); same < 10; time.Sleep(100 * time.Millisecond) {
		now := d.Vars(t)
		if maps.Equal(now, vars) {
			same++
		} else {
			vars, same = now, 0
		}
		if time.Since(begun) > 20*time.Second {
			t.Fatalf("the target does not come to rest: %v", vars)
		}
	}
	return vars
}

// AwaitVars waits until the debug endpoint has the numbers want, and fails t if
// that takes longer than limit.
func (d *Target) AwaitVars(t testing.TB, want map[string]float64, limit time.Duration) {
	t.Helper()
	for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		got := d.Vars(t)
		var differ []string
		for key, n := range want {
			if v, ok := got[key]; !ok {
				differ = append(differ, fmt.Sprintf("%s is missing, want %v", key, n))
			} else if v != n {
				differ = append(differ, fmt.Sprintf("%s is %v, want %v", key, v, n))
			}
		}
		if differ == nil {
			return
		}
		if time.Since(begun) > limit {
			t.Fatalf("after %v: %s", limit, strings.Join(differ, "; "))
		}
	}
}

// Log returns what the target has printed, in all its runs.
func (d *Target) Log() string { return d.log.String() }

// logEnd returns the last lines of that.
func (d *Target) logEnd() string {
	const lines = 100
	all := strings.SplitAfter(d.Log(), "\n")
	return strings.Join(all[max(len(all)-lines, 0):], "")
}
