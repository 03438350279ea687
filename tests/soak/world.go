package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/tests/testkit/ports"
)

// options say what to run.
type options struct {
	duration time.Duration
	seed     uint64
	program  string
	dir      string
	bounds   []bound
	progress io.Writer
	settle   time.Duration // how long the target may take to be at rest
	halfway  func()        // a test changes something here
}

const (
	storeName    = "iqn.2026-11.io.example:store"    // LUNs of neighbours, and of those with faults
	victimName   = "iqn.2026-11.io.example:victim"   // its sessions are reset and killed
	changingName = "iqn.2026-11.io.example:changing" // its LUNs come and go
	extraName    = "iqn.2026-11.io.example:extra"    // it comes and goes itself
	hostName     = "iqn.2026-11.io.example:host"
)

// counts are what a run has done.
type counts struct {
	reads, writes, syncs, medium, recovered, logins, lost, blind atomic.Int64
}

// A world is the target, its initiators and what is known of them.
type world struct {
	options
	ctx     context.Context
	api     *client.Client
	addr    string // of the portal
	metrics string
	cmd     *exec.Cmd
	ended   chan struct{} // closed when cmd has ended; exit says how
	exit    error
	pid     atomic.Int64 // of the process that serves
	epoch   atomic.Int64 // number of the start
	gate    sync.RWMutex // held for reading by logins, and for writing while the target is not there
	label   atomic.Value // the disturbance in progress, a string
	faults  atomic.Int64 // odd while faults are injected
	count   counts
	relay   *relay
	workers []*worker

	latencies map[string]*histogram // of neighbours, by disturbance
	done      map[string]int        // disturbances by kind; the plan's goroutine only

	mu       sync.Mutex // guards what follows
	logFile  io.Writer
	begun    time.Time
	failures []string
	samples  []sample
	refused  int // upgrades
}

// log writes a line to the log.
func (w *world) log(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	fmt.Fprintf(w.logFile, "%9.3f %s\n", time.Since(w.begun).Seconds(), fmt.Sprintf(format, args...))
}

// fail notes a failure of the target.
func (w *world) fail(format string, args ...any) {
	text := fmt.Sprintf("after %v, during %v: ", time.Since(w.begun).Round(time.Millisecond), w.label.Load()) + fmt.Sprintf(format, args...)
	w.log("FAILED: %s", text)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures = append(w.failures, text)
}

func (w *world) config() string { return filepath.Join(w.dir, "config.yaml") }

func (w *world) configure() (err error) {
	if w.addr, err = ports.FreeAddress(); err != nil {
		return err
	}
	if w.metrics, err = ports.FreeAddress(); err != nil {
		return err
	}
	text := fmt.Sprintf(`state_dir: %[1]s/state
control: {socket: %[1]s/control}
metrics: {listen: %[2]q}
portals:
  - listen: %[3]q
targets:
  - name: %[4]s
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: %[1]s/checked.img, size: 16MiB, checksums: true}
      - {id: 1, backend: memory, size: 16MiB}
      - {id: 2, backend: file, path: %[1]s/plain.img, size: 16MiB}
      - {id: 3, backend: file, path: %[1]s/faulty.img, size: 16MiB}
      - {id: 4, backend: file, path: %[1]s/faulty-checked.img, size: 16MiB, checksums: true}
      - {id: 5, backend: memory, size: 1MiB}
  - name: %[5]s
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: %[1]s/victim.img, size: 16MiB, checksums: true}
      - {id: 1, backend: memory, size: 15MiB}
  - name: %[6]s
    alias: one
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: %[1]s/changing.img, size: 16MiB}
`, w.dir, w.metrics, w.addr, storeName, victimName, changingName)
	return os.WriteFile(w.config(), []byte(text), 0o600)
}

// start starts the target and waits until it serves.
func (w *world) start() error {
	out, err := os.OpenFile(filepath.Join(w.dir, "target.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	w.cmd = exec.Command(w.program, "serve", "--config", w.config())
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "ISER_TARGET_") {
			w.cmd.Env = append(w.cmd.Env, v)
		}
	}
	w.cmd.Stdout, w.cmd.Stderr = out, out
	if err := w.cmd.Start(); err != nil {
		return err
	}
	w.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan<- struct{}) {
		w.exit = cmd.Wait()
		close(ended)
	}(w.cmd, w.ended)
	w.pid.Store(int64(w.cmd.Process.Pid))
	w.epoch.Add(1)
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		s, err := w.api.State(w.ctx)
		if err == nil && len(s.Portals) > 0 {
			if _, err = measure(int(w.pid.Load()), w.metrics); err == nil {
				return nil
			}
		}
		select {
		case <-w.ended:
			return fmt.Errorf("the target does not start, see target.log: %w", w.exit)
		default:
		}
		if time.Now().After(end) {
			w.cmd.Process.Kill()
			return fmt.Errorf("the target does not serve within %v: %w", patience, err)
		}
	}
}

// kill ends the process that serves. After an upgrade the one that stands for it then ends by itself.
func (w *world) kill() error {
	select {
	case <-w.ended:
		return nil // its number may be that of another process by now
	default:
	}
	if err := unix.Kill(int(w.pid.Load()), unix.SIGKILL); err != nil {
		return err
	}
	return w.wait()
}

// wait waits for the end of the target.
func (w *world) wait() error {
	select {
	case <-w.ended:
		return nil
	case <-time.After(patience):
		unix.Kill(int(w.pid.Load()), unix.SIGKILL)
		w.cmd.Process.Kill()
		return fmt.Errorf("the process of the target does not end within %v", patience)
	}
}

// populate makes the workers.
func (w *world) populate() {
	seed := uint64(0)
	for i, k := range []*worker{
		{kind: neighbour, transport: "iser", lun: 0}, {kind: neighbour, transport: "tcp", lun: 0},
		{kind: neighbour, transport: "iser", lun: 1, memory: true}, {kind: neighbour, transport: "tcp", lun: 1, memory: true},
		{kind: neighbour, transport: "iser", lun: 2}, {kind: neighbour, transport: "tcp", lun: 2},
		{kind: neighbour, transport: "iser", lun: 0, target: changingName}, {kind: neighbour, transport: "tcp", lun: 0, target: changingName},
		{kind: faulty, transport: "iser", lun: 3}, {kind: faulty, transport: "tcp", lun: 3},
		{kind: faulty, transport: "iser", lun: 4}, {kind: faulty, transport: "tcp", lun: 4},
		{kind: victim, transport: "iser", lun: 0, target: victimName}, {kind: victim, transport: "tcp", lun: 0, target: victimName},
		{kind: victim, transport: "iser", lun: 1, target: victimName, memory: true}, {kind: victim, transport: "tcp", lun: 1, target: victimName, memory: true},
	} {
		k := &worker{world: w, kind: k.kind, transport: k.transport, lun: k.lun, target: k.target, memory: k.memory,
			name: fmt.Sprintf("%s-%d", hostName, i), addr: w.addr}
		if k.target == "" {
			k.target = storeName
		}
		lanes := 1 // of a Dialog
		if k.transport == "iser" {
			lanes = 4
		}
		if k.kind == victim {
			k.addr = w.relay.addr()
		}
		for j := range lanes {
			seed++
			k.lanes = append(k.lanes, &lane{w: k, rng: rand.New(rand.NewPCG(w.seed, seed)), first: uint64(1000*(i+1) + laneBlocks*j)})
		}
		w.workers = append(w.workers, k)
	}
}

// run runs the target under load and disturbances, and returns what happened. An error means that there was no run.
func run(ctx context.Context, o options) (*report, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	file, err := os.Create(filepath.Join(o.dir, "soak.log"))
	if err != nil {
		return nil, err
	}
	defer file.Close()
	w := &world{options: o, ctx: ctx, logFile: file, begun: time.Now(), api: client.New(filepath.Join(o.dir, "control")),
		latencies: map[string]*histogram{calm: {}}, done: map[string]int{}}
	for _, k := range kinds {
		w.latencies[k.name] = &histogram{}
	}
	w.label.Store(calm)
	if err := w.configure(); err != nil {
		return nil, err
	}
	plan := newPlan(o.seed, o.duration)
	w.log("seed %d, duration %v", o.seed, o.duration)
	for _, p := range plan {
		w.log("plan: %8.3f %s", p.at.Seconds(), kinds[p.kind].name)
	}
	if err := w.start(); err != nil {
		return nil, err
	}
	defer func() { w.kill() }()
	time.Sleep(200 * time.Millisecond) // so that the target is at rest
	before, err := measure(int(w.pid.Load()), w.metrics)
	if err != nil {
		return nil, err
	}
	if w.relay, err = newRelay(w.addr); err != nil {
		return nil, err
	}
	defer w.relay.close()
	w.populate()
	stop, stopWatch := make(chan struct{}), make(chan struct{})
	var load, watch sync.WaitGroup
	for _, k := range w.workers {
		for _, l := range k.lanes {
			load.Go(func() { l.run(stop) })
		}
	}
	watch.Go(func() { w.watch(stopWatch) })
	var broken error
	if broken = w.disturb(plan); broken != nil {
		w.fail("%v", broken)
		cancel() // the target may not be there
	} else if ctx.Err() != nil {
		w.fail("the run was interrupted")
	}
	close(stop)
	load.Wait()
	close(stopWatch)
	watch.Wait()
	for _, k := range w.workers {
		k.close()
	}
	r := &report{world: w, before: before, took: time.Since(w.begun)}
	if broken == nil && ctx.Err() == nil {
		r.rest()
		r.end()
	}
	r.judge()
	return r, nil
}
