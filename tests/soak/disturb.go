package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// calm is the time between disturbances.
const calm = "calm"

// A kind is a disturbance. do returns an error if the target did not do what it has to.
type kind struct {
	name     string
	replaces bool // the process that serves
	do       func(*world, *rand.Rand) error
}

var kinds = []kind{
	{"reset", false, (*world).reset},
	{"session kill", false, (*world).killSessions},
	{"login storm", false, (*world).storm},
	{"half-open flood", false, (*world).flood},
	{"slow store", false, (*world).slow},
	{"failing store", false, (*world).failing},
	{"hanging store", false, (*world).hanging},
	{"LUN changes", false, (*world).changeLUNs},
	{"target changes", false, (*world).changeTargets},
	{"limits", false, (*world).changeLimits},
	{"reload", false, (*world).reload},
	{"scrub", false, (*world).scrub},
	{"reservation", false, (*world).reserve},
	{"upgrade", true, (*world).upgrade},
	{"drain", true, (*world).drain},
	{"kill -9", true, (*world).killTarget},
}

// replaces has the names of the kinds that replace the process.
var replaces = map[string]bool{"upgrade": true, "drain": true, "kill -9": true}

// A step is a disturbance that is planned.
type step struct {
	at   time.Duration
	kind int
	seed uint64
}

// newPlan returns the disturbances of a run. Each kind comes once before any comes again. In the last third the process stays, so
// that a leak shows at the end.
func newPlan(seed uint64, d time.Duration) (plan []step) {
	rng := rand.New(rand.NewPCG(seed, 0))
	gap := min(max(d/60, 100*time.Millisecond), 1500*time.Millisecond)
	var order []int
	for at := gap; at < d; {
		if len(order) == 0 {
			order = rng.Perm(len(kinds))
		}
		k := order[0]
		order = order[1:]
		if kinds[k].replaces && at > d*2/3 {
			continue
		}
		plan = append(plan, step{at, k, rng.Uint64()})
		at += gap/2 + time.Duration(rng.Int64N(int64(gap)))
	}
	return plan
}

// disturb does what is planned, each step when it is due and the one before has ended. What is not due when the time is over
// is left out.
func (w *world) disturb(plan []step) error {
	end, half := w.begun.Add(w.duration), w.begun.Add(w.duration/2)
	sleep := func(until time.Time) {
		for w.ctx.Err() == nil && time.Now().Before(until) {
			if time.Now().After(half) && w.halfway != nil {
				w.halfway()
				w.halfway = nil
			}
			time.Sleep(min(time.Until(until), 50*time.Millisecond))
		}
	}
	for i, p := range plan {
		sleep(w.begun.Add(p.at))
		// A disturbance that takes long delays the following ones; between two there is a moment of calm.
		sleep(time.Now().Add(100 * time.Millisecond))
		if w.ctx.Err() != nil || time.Now().After(end) {
			break
		}
		k := kinds[p.kind]
		if k.replaces && time.Now().After(w.begun.Add(w.duration*2/3)) {
			continue
		}
		w.log("%d: %s, seed %d", i, k.name, p.seed)
		w.label.Store(k.name)
		err := k.do(w, rand.New(rand.NewPCG(p.seed, 0)))
		w.label.Store(calm)
		w.log("%d: %s has ended", i, k.name)
		if w.done[k.name]++; err != nil {
			err = fmt.Errorf("%s: %w", k.name, err)
			if w.ctx.Err() != nil {
				return nil
			}
			if k.replaces {
				return err
			}
			w.fail("%v", err)
		}
		fmt.Fprintf(w.progress, "\r%v of %v, %d disturbances, %d reads, %d writes, %d failures ", time.Since(w.begun).Round(time.Second),
			w.duration, i+1, w.count.reads.Load(), w.count.writes.Load(), w.failed())
	}
	sleep(end)
	fmt.Fprintln(w.progress)
	return nil
}

func (w *world) failed() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.failures)
}

// within waits until f returns true.
func (w *world) within(what string, f func() bool) error {
	for end := time.Now().Add(patience); !f(); time.Sleep(5 * time.Millisecond) {
		if w.ctx.Err() != nil {
			return w.ctx.Err()
		}
		if time.Now().After(end) {
			return fmt.Errorf("not within %v: %s", patience, what)
		}
	}
	return nil
}

// A relay passes connections on, and resets them.
type relay struct {
	listener net.Listener
	to       string
	mu       sync.Mutex
	conns    map[*net.TCPConn]bool
}

func newRelay(to string) (*relay, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &relay{listener: l, to: to, conns: map[*net.TCPConn]bool{}}
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			go r.pass(a.(*net.TCPConn))
		}
	}()
	return r, nil
}

func (r *relay) addr() string { return r.listener.Addr().String() }

func (r *relay) pass(a *net.TCPConn) {
	defer a.Close()
	c, err := net.Dial("tcp", r.to)
	if err != nil {
		return
	}
	b := c.(*net.TCPConn)
	defer b.Close()
	r.mu.Lock()
	r.conns[a], r.conns[b] = true, true
	r.mu.Unlock()
	ended := make(chan struct{}, 2)
	for _, p := range [][2]*net.TCPConn{{a, b}, {b, a}} {
		go func() { io.Copy(p[0], p[1]); ended <- struct{}{} }()
	}
	<-ended
	r.mu.Lock()
	delete(r.conns, a)
	delete(r.conns, b)
	r.mu.Unlock()
}

// reset ends all connections by RST, each with the probability p.
func (r *relay) reset(rng *rand.Rand, p float64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		if rng.Float64() < p {
			c.SetLinger(0)
			c.Close()
		}
	}
}

func (r *relay) close() {
	r.listener.Close()
	r.reset(rand.New(rand.NewPCG(0, 0)), 1)
}

func (w *world) reset(rng *rand.Rand) error {
	for range 5 {
		w.relay.reset(rng, 0.5)
		time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
	}
	return nil
}

func (w *world) killSessions(rng *rand.Rand) error {
	all, err := w.api.Sessions(w.ctx)
	if err != nil {
		return err
	}
	for _, s := range all {
		if s.Target != victimName {
			continue
		}
		var e *schema.Error // it may have ended
		if err := w.api.KillSession(w.ctx, s.TSIH, "soak"); err != nil && (!errors.As(err, &e) || e.Code != schema.NotFound) {
			return err
		}
	}
	return nil
}

// storm logs in with 64 names at the same time, half of them twice.
func (w *world) storm(rng *rand.Rand) error {
	var all sync.WaitGroup
	errs := make(chan error, 64)
	for i := range 64 {
		transport, twice := []string{"iser", "tcp"}[rng.IntN(2)], rng.IntN(2) == 0
		all.Go(func() {
			for range 1 + map[bool]int{true: 1}[twice] {
				c, err := login(w.ctx, transport, w.addr, fmt.Sprintf("%s-storm-%d", hostName, i), storeName)
				if err != nil {
					errs <- fmt.Errorf("login over %s: %w", transport, err)
					return
				}
				w.count.logins.Add(1)
				defer c.Close()
			}
		})
	}
	all.Wait()
	close(errs)
	return <-errs
}

// flood opens connections from another address that say nothing, or a part of a login, or garbage.
func (w *world) flood(rng *rand.Rand) error {
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 9)}, Timeout: patience}
	for range 200 {
		c, err := d.DialContext(w.ctx, "tcp", w.addr)
		if err != nil {
			return err
		}
		defer c.Close()
		text := []byte("\x43\x87\x00\x00\x00\x00\x01\x00") // a Login Request with 256 bytes of text that do not come
		switch rng.IntN(3) {
		case 0:
			text = nil
		case 1:
			text = make([]byte, 100)
			for i := range text {
				text[i] = byte(rng.Uint32())
			}
		}
		c.Write(text) // the target may have dropped it
	}
	time.Sleep(300 * time.Millisecond)
	return nil
}

// inject puts faults on both LUNs that are there for it, for a time, and recovers the LUNs.
func (w *world) inject(rng *rand.Rand, f schema.Faults) error {
	d := time.Duration(300+rng.IntN(700)) * time.Millisecond
	f.Seed, f.For = rng.Uint64()>>1, "30s"
	w.faults.Add(1)
	defer w.faults.Add(1)
	for _, id := range []int{3, 4} {
		if err := w.api.SetFaults(w.ctx, storeName, id, f); err != nil {
			return err
		}
	}
	time.Sleep(d)
	for _, id := range []int{3, 4} {
		if err := w.api.ClearFaults(w.ctx, storeName, id); err != nil {
			return err
		}
		r, err := w.api.RecoverLUN(w.ctx, storeName, id)
		var healthy *schema.Error
		switch {
		case errors.As(err, &healthy) && healthy.Code == schema.Refused: // it needs no recovery
		case err != nil:
			return fmt.Errorf("recover: %w", err)
		case r.Health != schema.Healthy:
			return fmt.Errorf("recover: LUN %d is %s", id, r.Health)
		default:
			w.count.recovered.Add(1)
		}
	}
	return nil
}

func (w *world) slow(rng *rand.Rand) error {
	return w.inject(rng, schema.Faults{Latency: fmt.Sprintf("%dms", 1+rng.IntN(50))})
}

func (w *world) failing(rng *rand.Rand) error {
	return w.inject(rng, schema.Faults{ReadError: rng.Float64() / 2, WriteError: rng.Float64() / 2, SyncError: rng.Float64()})
}

func (w *world) hanging(rng *rand.Rand) error {
	return w.inject(rng, schema.Faults{Hang: 0.01 + rng.Float64()/2})
}

// changeLUNs creates, grows, shrinks, limits and deletes LUNs of the target whose LUN 0 has load, and grows that.
func (w *world) changeLUNs(rng *rand.Rand) error {
	for i := range 1 + rng.IntN(3) {
		id := 10 + i
		l := schema.LUN{ID: &id, Backend: "memory", Size: "1MiB"}
		if rng.IntN(2) == 0 {
			l.Backend, l.Path, l.Checksums = "file", filepath.Join(w.dir, fmt.Sprintf("changing-%d.img", id)), rng.IntN(2) == 0
		}
		if _, err := w.api.AddLUN(w.ctx, changingName, l, schema.Options{}); err != nil {
			return fmt.Errorf("create: %w", err)
		}
		if l.Path != "" {
			size := strconv.Itoa((1 + rng.IntN(64)) << 16)
			if _, err := w.api.SetLUN(w.ctx, changingName, id, schema.Values{"size": size}, schema.Options{AllowShrink: true}); err != nil {
				return fmt.Errorf("resize: %w", err)
			}
		}
		if _, err := w.api.SetLUN(w.ctx, changingName, id, schema.Values{"iops": "500"}, schema.Options{}); err != nil {
			return fmt.Errorf("set: %w", err)
		}
		size := strconv.Itoa((16 + rng.IntN(8)) << 20)
		if _, err := w.api.SetLUN(w.ctx, changingName, 0, schema.Values{"size": size}, schema.Options{AllowShrink: true}); err != nil {
			return fmt.Errorf("resize: %w", err)
		}
		if _, err := w.api.RemoveLUN(w.ctx, changingName, id, schema.Options{Disrupt: true, Now: true}); err != nil {
			return fmt.Errorf("delete: %w", err)
		}
		if err := w.within("the LUN is removed", func() bool {
			_, err := w.api.LUN(w.ctx, changingName, id)
			return err != nil
		}); err != nil {
			return err
		}
		if l.Path != "" {
			left, err := filepath.Glob(l.Path + "*")
			if err != nil {
				return err
			}
			for _, path := range left {
				if err := os.Remove(path); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (w *world) changeTargets(*rand.Rand) error {
	if _, err := w.api.AddTarget(w.ctx, schema.Target{Name: extraName, Initiators: []string{"*"}}, schema.Options{}); err != nil {
		return err
	}
	if _, err := w.api.AddLUN(w.ctx, extraName, schema.LUN{Backend: "memory", Size: "1MiB"}, schema.Options{}); err != nil {
		return err
	}
	for _, transport := range []string{"iser", "tcp"} {
		c, err := login(w.ctx, transport, w.addr, hostName+"-extra-"+transport, extraName)
		if err != nil {
			return fmt.Errorf("login over %s: %w", transport, err)
		}
		defer c.Close()
		w.count.logins.Add(1)
	}
	if _, err := w.api.RemoveTarget(w.ctx, extraName, schema.Options{Disrupt: true, Now: true}); err != nil {
		return err
	}
	return w.within("the target is removed", func() bool {
		_, err := w.api.Target(w.ctx, extraName)
		return err != nil
	})
}

func (w *world) changeLimits(rng *rand.Rand) error {
	for _, v := range []string{strconv.Itoa(1000 + rng.IntN(1000)), ""} {
		if _, err := w.api.SetLimits(w.ctx, schema.Values{"max_connections": v}, schema.Options{}); err != nil {
			return err
		}
	}
	return nil
}

// reload changes an alias in the file, and sends SIGHUP.
func (w *world) reload(*rand.Rand) error {
	text, err := os.ReadFile(w.config())
	if err != nil {
		return err
	}
	from, to := "one", "two"
	if bytes.Contains(text, []byte("alias: two")) {
		from, to = to, from
	}
	changed := bytes.Replace(text, []byte("alias: "+from), []byte("alias: "+to), 1)
	if err := os.WriteFile(w.config(), changed, 0o600); err != nil {
		return err
	}
	if err := unix.Kill(int(w.pid.Load()), unix.SIGHUP); err != nil {
		return err
	}
	return w.within("the alias has changed", func() bool {
		t, err := w.api.Target(w.ctx, changingName)
		return err == nil && t.Alias == to
	})
}

// scrub compares all blocks of a LUN that neighbours use with their checksums.
func (w *world) scrub(*rand.Rand) error {
	s, err := w.api.BeginScrub(w.ctx, storeName, 0, schema.ScrubRequest{})
	if err != nil {
		return err
	}
	if err := w.within("the scrub has ended", func() bool {
		s, err = w.api.Scrub(w.ctx, storeName, 0)
		return err != nil || s.State != schema.ScrubRunning
	}); err != nil {
		return err
	}
	if err != nil || s.State != schema.ScrubDone || s.Bad > 0 {
		return fmt.Errorf("%+v, %w", s, err)
	}
	return nil
}

// reserve reserves a LUN over one transport, and requires that another initiator notices it until it is released.
func (w *world) reserve(rng *rand.Rand) error {
	var c [2]conn
	order := rng.Perm(2)
	for i := range c {
		s, err := login(w.ctx, []string{"iser", "tcp"}[order[i]], w.addr, fmt.Sprintf("%s-reserve-%d", hostName, i), storeName)
		if err != nil {
			return err
		}
		defer s.Close()
		w.count.logins.Add(1)
		c[i] = s
	}
	for _, q := range []struct {
		who  int
		cdb  [16]byte
		want byte
	}{
		{0, [16]byte{}, 0}, {1, [16]byte{}, 0},
		{0, [16]byte{0x56}, 0}, {1, [16]byte{0x56}, 0x18}, // RESERVE(10)
		{0, [16]byte{0x57}, 0}, {1, [16]byte{0x56}, 0}, {1, [16]byte{0x57}, 0}, // RELEASE(10)
	} {
		for {
			status, sense, _, err := c[q.who].do(5, q.cdb, nil, 0)
			if err != nil {
				return err
			}
			if status == 2 && len(sense) > 2 && sense[2]&0x0f == 6 {
				continue
			}
			if status != q.want {
				return fmt.Errorf("CDB % x of initiator %d: status %#x, want %#x; sense % x", q.cdb, q.who, status, q.want, sense)
			}
			break
		}
	}
	return nil
}

// upgrade replaces the process. A refusal because a disk is slow changes nothing.
func (w *world) upgrade(*rand.Rand) error {
	u, err := w.api.Upgrade(w.ctx)
	if err != nil {
		if !strings.Contains(err.Error(), "its store has not done all commands within") {
			return err
		}
		w.log("upgrade: %v", err)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.refused++
		return nil
	}
	w.pid.Store(int64(u.PID))
	w.log("upgrade: %d sessions continue, %d are cut, pause %s", u.Sessions, u.Cut, u.Pause)
	return nil
}

// out runs f, which ends the target, while nobody logs in, and starts the target again.
func (w *world) out(f func() error) error {
	w.gate.Lock()
	defer w.gate.Unlock()
	for _, k := range w.workers {
		k.doomed.Store(k.gen.Load())
	}
	if err := f(); err != nil {
		return err
	}
	return w.start()
}

func (w *world) drain(*rand.Rand) error {
	return w.out(func() error {
		if _, err := w.api.Drain(w.ctx, time.Second, ""); err != nil {
			return err
		}
		return w.wait()
	})
}

func (w *world) killTarget(rng *rand.Rand) error {
	time.Sleep(time.Duration(rng.IntN(200)) * time.Millisecond)
	return w.out(w.kill)
}

// terminate ends the target by SIGTERM, and returns an error unless its exit code is 0.
func (w *world) terminate() error {
	if err := w.cmd.Process.Signal(unix.SIGTERM); err != nil {
		return err
	}
	if err := w.wait(); err != nil {
		return err
	}
	return w.exit
}
