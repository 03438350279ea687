package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/cephcluster"
)

func TestMain(m *testing.M) {
	code := m.Run()
	harness.Cleanup()
	os.Exit(code)
}

const store = "iqn.2026-11.io.example:store"

// The LUNs of a gateway.
const (
	fileLUN byte = iota
	memoryLUN
	rbdLUN
)

// storeTimeout is limits.store_timeout of a gateway, and longestAnswer what commands of the LUNs take that are not on Ceph, on a busy machine.
const (
	storeTimeout  = 2 * time.Second
	longestAnswer = time.Second
)

// A gateway is the program with a LUN on a file, one in memory and one on an image of a cluster.
type gateway struct {
	dir  string
	api  *client.Client
	cmd  *exec.Cmd
	addr string
	wait chan error
}

func newGateway(t *testing.T, uri string) *gateway {
	t.Helper()
	return newGatewayIn(t, t.TempDir(), uri, "")
}

// newGatewayIn starts a gateway with its files in a directory. more are further keys of its configuration.
func newGatewayIn(t *testing.T, dir, uri, more string) *gateway {
	t.Helper()
	g := &gateway{dir: dir}
	harness.Copy(t, filepath.Join(g.dir, "iser-target"))
	text := fmt.Sprintf(`
state_dir: %[1]s/state
control: {socket: %[1]s/socket}
portals: [{listen: "127.0.0.1:0"}]
limits: {store_timeout: %[2]v}
targets:
  - name: %[3]s
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: %[1]s/0.img, size: 16MiB}
      - {id: 1, backend: memory, size: 16MiB}
      - {id: 2, backend: rbd, path: "%[4]s"}
%[5]s`, g.dir, storeTimeout, store, uri, more)
	if err := os.WriteFile(filepath.Join(g.dir, "c.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	g.api = client.New(filepath.Join(g.dir, "socket"))
	g.start(t)
	return g
}

func (g *gateway) start(t *testing.T) {
	t.Helper()
	log, err := os.OpenFile(filepath.Join(g.dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	g.cmd, g.wait = exec.Command(filepath.Join(g.dir, "iser-target"), "serve", "--config", filepath.Join(g.dir, "c.yaml")), make(chan error, 1)
	g.cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "ISER_TARGET_") })
	g.cmd.Stdout, g.cmd.Stderr = log, log
	if err := g.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	cmd, ended := g.cmd, g.wait
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		cmd.Process.Kill()
		if t.Failed() {
			b, _ := os.ReadFile(filepath.Join(g.dir, "log"))
			t.Logf("the target said:\n%s", b)
		}
	})
	testkit.Eventually(t, "the target serves", func() bool {
		select {
		case err := <-ended:
			t.Fatal("the target ended: ", err)
		default:
		}
		st, err := g.api.State(t.Context())
		if err == nil && len(st.Portals) > 0 && len(st.Targets) > 0 {
			g.addr = st.Portals[0].Address
			return true
		}
		return false
	})
}

// lun returns the state of the LUN on Ceph. The target has to say it at once.
func (g *gateway) lun(t *testing.T) schema.LUNState {
	t.Helper()
	begun := time.Now()
	st, err := g.api.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if d := time.Since(begun); d > longestAnswer {
		t.Errorf("the state of the target took %v", d)
	}
	for _, l := range st.Targets[0].LUNs {
		if l.ID == int(rbdLUN) {
			return l
		}
	}
	t.Fatal("no LUN on Ceph")
	return schema.LUNState{}
}

// ready waits until the LUN on Ceph is ready.
func (g *gateway) ready(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, "the LUN is ready", func() bool { l := g.lun(t); return l.State == schema.Ready && l.Health == schema.Healthy })
}

// login logs in and takes the unit attentions of the login.
func (g *gateway) login(t *testing.T, name string) *initiator.Session {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	s, err := initiator.Login(ctx, g.addr, initiator.Options{Name: "iqn.2026-11.io.example:" + name, Target: store})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	for l := fileLUN; l <= rbdLUN; l++ {
		if err := s.Do(&initiator.Command{LUN: l, CDB: cdb.TestUnitReady}); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// Each of a load's workers has as many blocks of 4 KiB, which are spread over 16 MiB: four objects of Ceph, which are on all OSDs.
const (
	workers = 4
	places  = 64
	quantum = 4096
	spacing = 64 << 10
)

// A load writes blocks with ever higher numbers to the LUN on Ceph, and knows which of them the target has acknowledged.
type load struct {
	session *initiator.Session
	stop    atomic.Bool
	running sync.WaitGroup
	done    atomic.Int64
	busy    atomic.Int64 // commands that ended with BUSY or TASK SET FULL
	longest atomic.Int64 // ns, of one that was acknowledged
	numbers [workers][places]uint64
	errs    [workers]error
}

// fill makes b the content of a block with that number.
func fill(b []byte, worker, place int, number uint64) {
	for i := 0; i < len(b); i += 16 {
		binary.BigEndian.PutUint64(b[i:], number)
		binary.BigEndian.PutUint64(b[i+8:], uint64(worker)<<32|uint64(place))
	}
}

func lba(worker, place int) uint64 { return uint64(worker*places+place) * spacing / 512 }

// start begins to write.
func (l *load) start() {
	l.stop.Store(false)
	for w := range workers {
		l.running.Go(func() {
			c := &initiator.Command{LUN: rbdLUN, Out: make([]byte, quantum)}
			for n := 0; !l.stop.Load(); n++ {
				place := n * 7 % places
				number := l.numbers[w][place] + 1
				fill(c.Out, w, place, number)
				c.CDB = cdb.Write16(lba(w, place), quantum/512)
				begun := time.Now()
				if err := l.session.Do(c); err != nil {
					l.errs[w] = err
					return
				}
				switch c.Status {
				case 0:
					l.numbers[w][place] = number
					l.done.Add(1)
					if took := int64(time.Since(begun)); took > l.longest.Load() {
						l.longest.Store(took)
					}
				case 0x08, 0x28: // BUSY, TASK SET FULL
					l.busy.Add(1)
					time.Sleep(20 * time.Millisecond)
				default:
					l.errs[w] = fmt.Errorf("WRITE: status %#x, sense % x", c.Status, c.Sense)
					return
				}
			}
		})
	}
}

// flows waits until writes are acknowledged.
func (l *load) flows(t *testing.T) {
	t.Helper()
	before := l.done.Load()
	testkit.Eventually(t, "writes", func() bool { return l.done.Load() > before+20 })
}

// end ends the load, which must have been without an error.
func (l *load) end(t *testing.T) {
	t.Helper()
	l.stop.Store(true)
	l.running.Wait()
	if err := errors.Join(l.errs[:]...); err != nil {
		t.Error(err)
	}
}

// verify requires that a session reads what was acknowledged last.
func (l *load) verify(t *testing.T, s *initiator.Session) {
	t.Helper()
	want, lost := make([]byte, quantum), 0
	for w := range workers {
		for p := range places {
			c := &initiator.Command{LUN: rbdLUN, CDB: cdb.Read16(lba(w, p), quantum/512), In: make([]byte, quantum)}
			if err := s.Do(c); err != nil || c.Status != 0 {
				t.Fatalf("READ: %v, status %#x, sense % x", err, c.Status, c.Sense)
			}
			if l.numbers[w][p] == 0 {
				continue
			}
			if fill(want, w, p, l.numbers[w][p]); !bytes.Equal(c.In, want) {
				lost++
			}
		}
	}
	if lost > 0 {
		t.Errorf("%d blocks of %d are not as acknowledged", lost, workers*places)
	}
	t.Logf("all acknowledged: %d writes, the slowest took %v; %d ended with BUSY", l.done.Load(), time.Duration(l.longest.Load()).Round(time.Millisecond), l.busy.Load())
}

// A neighbor writes to the LUNs that are not on Ceph and reads what it wrote.
type neighbor struct {
	session *initiator.Session
	stop    atomic.Bool
	running sync.WaitGroup
	done    [rbdLUN]atomic.Int64
	longest [rbdLUN]atomic.Int64 // ns
	errs    [rbdLUN]error
}

func (n *neighbor) start() {
	for l := fileLUN; l < rbdLUN; l++ {
		n.running.Go(func() {
			out := make([]byte, quantum)
			for i := uint64(1); !n.stop.Load() && n.errs[l] == nil; i++ {
				fill(out, int(l), 0, i)
				where, begun := i%1024*8, time.Now()
				w, r := &initiator.Command{LUN: l, CDB: cdb.Write16(where, 8), Out: out}, &initiator.Command{LUN: l, CDB: cdb.Read16(where, 8), In: make([]byte, quantum)}
				for _, c := range []*initiator.Command{w, r} {
					if err := n.session.Do(c); err != nil || c.Status != 0 {
						n.errs[l] = fmt.Errorf("LUN %d: %w, status %#x, sense % x", l, err, c.Status, c.Sense)
						return
					}
				}
				if !bytes.Equal(r.In, out) {
					n.errs[l] = fmt.Errorf("LUN %d: other data", l)
				}
				n.longest[l].Store(max(n.longest[l].Load(), int64(time.Since(begun))))
				n.done[l].Add(2)
				time.Sleep(time.Millisecond)
			}
		})
	}
}

// lap requires that commands were answered in time since the last lap.
func (n *neighbor) lap(t *testing.T, when string) {
	t.Helper()
	for l := fileLUN; l < rbdLUN; l++ {
		done, longest := n.done[l].Swap(0), time.Duration(n.longest[l].Swap(0))
		t.Logf("%s: LUN %d of the neighbor has answered %d commands, two of them within %v", when, l, done, longest.Round(time.Millisecond))
		if done == 0 || longest > 2*longestAnswer {
			t.Errorf("%s: LUN %d of the neighbor has answered %d commands, two of them within %v", when, l, done, longest)
		}
	}
}

func (n *neighbor) end(t *testing.T) {
	t.Helper()
	n.stop.Store(true)
	n.running.Wait()
	if err := errors.Join(n.errs[:]...); err != nil {
		t.Error(err)
	}
}

// A hung cluster costs its LUN only. The target keeps answering for its other LUNs, to the initiator that works on Ceph, too, and to the operator. Of the LUN
// on Ceph, commands in progress wait, others get BUSY after store_timeout, and TEST UNIT READY is NOT READY. When the cluster is back, commands continue, and
// what was acknowledged is there. A target that starts meanwhile serves its other LUNs after 15 s at most, and one that ends is not held up.
func TestHungCluster(t *testing.T) {
	c := newCluster(t, cephcluster.Options{OSDs: 1, Copies: 1, GiB: 4})
	g := newGateway(t, c.image(t, "hung", "16M"))
	g.ready(t)
	l := &load{session: g.login(t, "host")}
	n := &neighbor{session: g.login(t, "neighbor")}
	own := &neighbor{session: l.session} // the same session
	second := g.login(t, "second")
	n.start()
	own.start()
	for _, frozen := range [][]string{{"osd.0"}, nil, {"mon.a"}} {
		name := strings.Join(frozen, ", ")
		if frozen == nil {
			name = "the cluster"
		}
		l.start()
		l.flows(t)
		n.lap(t, "before")
		own.lap(t, "before, same session")
		thaw := c.Freeze(frozen...)
		begun := time.Now()
		if name == "mon.a" { // OSDs serve what they serve
			l.flows(t)
			time.Sleep(2 * storeTimeout)
			l.flows(t)
		} else {
			testkit.Eventually(t, "the LUN is not ready", func() bool {
				l := g.lun(t)
				return l.State == schema.NotReady && strings.HasPrefix(l.Reason, "the store has not answered since ")
			})
			t.Logf("%s frozen: after %v the LUN is not ready: %s", name, time.Since(begun).Round(10*time.Millisecond), g.lun(t).Reason)
			for range 5 { // a second initiator has its answers at once
				asked := time.Now()
				turn, read := &initiator.Command{LUN: rbdLUN, CDB: cdb.TestUnitReady}, &initiator.Command{LUN: rbdLUN, CDB: cdb.Read16(0, 8), In: make([]byte, quantum)}
				for _, c := range []*initiator.Command{turn, read} {
					if err := second.Do(c); err != nil {
						t.Fatal(err)
					}
				}
				if turn.Status != 2 || len(turn.Sense) < 14 || turn.Sense[2]&0xf != 2 || turn.Sense[12] != 4 {
					t.Errorf("TEST UNIT READY: status %#x, sense % x, want NOT READY", turn.Status, turn.Sense)
				}
				if read.Status != 0x08 {
					t.Errorf("READ: status %#x, sense % x, want BUSY", read.Status, read.Sense)
				}
				if d := time.Since(asked); d > longestAnswer {
					t.Errorf("two commands of a second initiator took %v", d)
				}
				time.Sleep(storeTimeout)
			}
		}
		n.lap(t, name+" frozen")
		own.lap(t, name+" frozen, same session")
		thaw()
		thawed := time.Now()
		l.flows(t)
		t.Logf("%s thawed after %v: writes continue after %v", name, thawed.Sub(begun).Round(time.Second), time.Since(thawed).Round(10*time.Millisecond))
		g.ready(t)
		l.end(t)
		l.verify(t, second)
	}
	sync := &initiator.Command{LUN: rbdLUN, CDB: [16]byte{0x35}} // SYNCHRONIZE CACHE(10)
	if err := second.Do(sync); err != nil || sync.Status != 0 {
		t.Fatalf("SYNCHRONIZE CACHE: %v, status %#x", err, sync.Status)
	}
	n.end(t)
	own.end(t)

	thaw := c.Freeze()
	g.cmd.Process.Kill()
	<-g.wait
	begun := time.Now()
	g.start(t)
	t.Logf("with a hung cluster the target serves after %v", time.Since(begun).Round(10*time.Millisecond))
	n = &neighbor{session: g.login(t, "neighbor")}
	t.Logf("and an initiator is logged in after %v", time.Since(begun).Round(10*time.Millisecond))
	n.start()
	testkit.Eventually(t, "the reason is known", func() bool {
		l := g.lun(t)
		return l.State == schema.NotReady && strings.Contains(l.Reason, "has not answered in time")
	})
	t.Logf("after %v: %s", time.Since(begun).Round(time.Second), g.lun(t).Reason)
	testkit.Eventually(t, "the neighbor has answers", func() bool { return n.done[fileLUN].Load() > 100 && n.done[memoryLUN].Load() > 100 }) // the reason may have been known at once
	n.lap(t, "after a start with a hung cluster")
	thaw()
	g.ready(t)
	n.end(t)
	l.verify(t, g.login(t, "second"))

	l = &load{session: g.login(t, "host")}
	l.start()
	l.flows(t)
	thaw = c.Freeze()
	testkit.Eventually(t, "the LUN is not ready", func() bool { return g.lun(t).State == schema.NotReady })
	begun = time.Now()
	g.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-g.wait:
		t.Logf("with a hung cluster the target ends after %v", time.Since(begun).Round(time.Second))
	case <-time.After(time.Minute):
		t.Error("the target does not end within a minute of SIGTERM while the cluster hangs")
	}
	l.stop.Store(true)
	l.running.Wait()
	thaw()
}

// An OSD that is frozen costs a pause until its cluster has marked it down, and nothing else: the other copy serves. When it is thawed, nothing changes.
func TestFrozenOSD(t *testing.T) {
	c := newCluster(t, cephcluster.Options{OSDs: 3, Copies: 2, GiB: 2})
	g := newGateway(t, c.image(t, "frozen", "16M"))
	g.ready(t)
	l := &load{session: g.login(t, "host")}
	n := &neighbor{session: g.login(t, "neighbor")}
	l.start()
	n.start()
	l.flows(t)
	n.lap(t, "before")
	thaw := c.Freeze("osd.0")
	begun := time.Now()
	testkit.Eventually(t, "osd.0 is marked down", func() bool {
		return strings.Contains(c.must(t, "ceph", "osd", "stat", "-f", "json"), `"num_up_osds":2,`)
	})
	l.flows(t)
	t.Logf("osd.0 frozen: writes continue after %v", time.Since(begun).Round(10*time.Millisecond))
	n.lap(t, "osd.0 frozen")
	thaw()
	testkit.Eventually(t, "osd.0 is back", func() bool {
		return strings.Contains(c.must(t, "ceph", "osd", "stat", "-f", "json"), `"num_up_osds":3,`)
	})
	l.flows(t)
	n.lap(t, "osd.0 thawed")
	l.end(t)
	n.end(t)
	l.verify(t, g.login(t, "second"))
}
