package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A ward is a lab whose LUN 1 is on a file, and a session that has met all unit attentions.
type ward struct {
	*lab
	s    *initiator.Session
	path string
}

func newWard(t *testing.T, open func(l *lab) func(*config.LUN) (backend.Store, error)) *ward {
	l := newLab(t)
	if open != nil {
		l.openStore = open(l)
	}
	w := &ward{l, nil, filepath.Join(l.dir, "disk.img")}
	l.luns += ", " + l.disk(1, "disk.img", "")
	l.ok(ChangeOptions{})
	w.s = l.login("host1", store)
	attentions(t, w.s, 0)
	attentions(t, w.s, 1)
	return w
}

// write writes a block full of b at LBA 8 and syncs; it returns both outcomes.
func (w *ward) write(lun, b byte) (write, sync string) {
	w.t.Helper()
	p := bytes.Repeat([]byte{b}, 512)
	write = do(w.t, w.s, &initiator.Command{LUN: lun, CDB: cdb.Write16(8, 1), Out: p})
	return write, do(w.t, w.s, &initiator.Command{LUN: lun, CDB: [16]byte{0x35}})
}

// read returns the first byte at LBA 8.
func (w *ward) read(lun byte) byte {
	w.t.Helper()
	p := make([]byte, 512)
	if got := do(w.t, w.s, &initiator.Command{LUN: lun, CDB: cdb.Read16(8, 1), In: p}); got != "" {
		w.t.Errorf("READ of LUN %d: %s", lun, got)
	}
	return p[0]
}

// look makes the daemon look at its LUNs, and checks the health of LUN 1. The neighbor works as before.
func (w *ward) look(health, reason string) schema.LUNState {
	w.t.Helper()
	w.lookAtLUNs()
	l := w.lunState(1)
	if l.State != schema.Ready || l.Health != health || !strings.Contains(l.Reason, reason) || (l.HealthSince == nil) != (health == schema.Healthy) {
		w.t.Errorf("LUN 1 is %s, %s: %s (since %v), want %s: %s", l.State, l.Health, l.Reason, l.HealthSince, health, reason)
	}
	if write, sync := w.write(0, 1); write != "" || sync != "" || w.lunState(0).Health != schema.Healthy {
		w.t.Errorf("the neighbor: %s, %s, %s", write, sync, w.lunState(0).Health)
	}
	return l
}

const intervention = "2/04/03" // NOT READY, MANUAL INTERVENTION REQUIRED

// A file that is deleted or replaced makes its LUN orphaned: nothing is acknowledged that the next start would
// not find. When the file is back, it is healthy again.
func TestOrphanedLUN(t *testing.T) {
	w := newWard(t, nil)
	if write, sync := w.write(1, 'a'); write != "" || sync != "" {
		t.Fatal(write, sync)
	}
	w.look(schema.Healthy, "")
	if _, err := w.Recover(t.Context(), store, 1); !errors.Is(err, ErrHealthy) {
		t.Errorf("a healthy LUN: %v", err)
	}
	away := w.path + ".away"
	for _, step := range []func() error{
		func() error { return os.Rename(w.path, away) },
		func() error { return os.Rename(away, w.path) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(w.path); err != nil {
			w.look("orphaned", "deleted or renamed")
			if write, sync := w.write(1, 'b'); write != intervention || sync != intervention || w.read(1) != 'a' {
				t.Errorf("WRITE %s, SYNCHRONIZE CACHE %s", write, sync)
			}
			if _, err := w.Recover(t.Context(), store, 1); !errors.Is(err, backend.ErrDeleted) {
				t.Errorf("recover without a file: %v", err)
			}
			if w.read(1) != 'a' {
				t.Error("the LUN is lost after a recover that failed")
			}
		} else {
			w.look(schema.Healthy, "")
			if write, sync := w.write(1, 'c'); write != "" || sync != "" {
				t.Errorf("back again: %s, %s", write, sync)
			}
		}
	}
	for _, text := range []string{"LUN is not healthy", "LUN is healthy again"} {
		if !slices.ContainsFunc(w.Events(0), func(e schema.Event) bool { return e.Text == text }) {
			t.Errorf("no event %q", text)
		}
	}

	// A file that cannot be used takes its place: the LUN keeps the old one, which has no name any longer.
	if err := errors.Join(os.WriteFile(away, []byte{'y'}, 0o600), os.Truncate(away, 1<<19), os.Rename(away, w.path)); err != nil {
		t.Fatal(err)
	}
	w.look("orphaned", "another file")
	resize := func(d *config.Document) error { return d.SetLUN(store, 1, "size", "2MiB") }
	if _, err := w.Change(t.Context(), resize, ChangeOptions{}); !errors.Is(err, ErrUnwell) {
		t.Errorf("resize: %v, want ErrUnwell", err)
	}
	if _, err := w.Recover(t.Context(), store, 1); err == nil || !strings.Contains(err.Error(), "has 524288 bytes, and the LUN 1048576") {
		t.Errorf("recover with a smaller file: %v", err)
	}
	w.look("orphaned", "another file")
	if w.read(1) != 'c' {
		t.Error("the data of the old file is lost after a recover that failed")
	}

	// Another file takes its place, and the operator accepts it.
	if err := os.WriteFile(away, bytes.Repeat([]byte{'z'}, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(away, w.path); err != nil {
		t.Fatal(err)
	}
	w.look("orphaned", "another file")
	if write, _ := w.write(1, 'd'); write != intervention {
		t.Errorf("WRITE %s", write)
	}
	naa := w.lunState(1).NAA
	r, err := w.Recover(t.Context(), store, 1)
	if err != nil || r.Before != "orphaned" || r.Health != schema.Healthy || !strings.Contains(r.Lost, w.path) {
		t.Fatalf("recover: %+v, %v", r, err)
	}
	if got := attentions(t, w.s, 1); got != "28/00" {
		t.Errorf("attentions %q, want that of a medium that may have changed", got)
	}
	w.look(schema.Healthy, "")
	if w.read(1) != 'z' || w.lunState(1).NAA != naa {
		t.Errorf("after recover LBA 8 has %c, NAA %s, was %s", w.read(1), w.lunState(1).NAA, naa)
	}
	if write, sync := w.write(1, 'e'); write != "" || sync != "" {
		t.Errorf("after recover: %s, %s", write, sync)
	}
}

// A file that is cut short makes its LUN degraded, until it has its size again.
func TestDegradedLUN(t *testing.T) {
	w := newWard(t, nil)
	if err := os.Truncate(w.path, 4096); err != nil {
		t.Fatal(err)
	}
	w.look("degraded", "it has 4096 bytes, and the LUN 1048576")
	if err := os.Truncate(w.path, 1<<20); err != nil {
		t.Fatal(err)
	}
	w.look(schema.Healthy, "")
}

// latching is a store that fails to sync for ever after it has failed once, and says so.
type latching struct {
	*backendtest.Faulty
	failed atomic.Bool
}

func (f *latching) Sync() error {
	if err := f.Faulty.Sync(); err != nil {
		f.failed.Store(true)
	}
	return f.Inspect()
}

func (f *latching) Inspect() error {
	if f.failed.Load() {
		return backend.ErrUnsynced
	}
	return nil
}

// A LUN that another process handed over as degraded has a reason also before this one has looked at it.
func TestHealthContinuesWithAReason(t *testing.T) {
	w := newWard(t, nil)
	if err := os.Truncate(w.path, 4096); err != nil {
		t.Fatal(err)
	}
	w.look("degraded", "it has 4096 bytes")
	u := w.lunUnit(1)
	if err := w.restoreLUN(&handover.LUN{Target: store, ID: 1, NAA: u.Identity().Serial, State: u.State()}); err != nil {
		t.Fatal(err)
	}
	if l := w.lunState(1); l.Health != "degraded" || l.Reason == "" || l.HealthSince == nil {
		t.Errorf("LUN 1 is %s since %v: %q", l.Health, l.HealthSince, l.Reason)
	}
	w.look("degraded", "it has 4096 bytes")
}

// A failed sync makes a LUN failed until the operator recovers it, although the store works again.
func TestFailedLUN(t *testing.T) {
	f := &backendtest.Faulty{}
	w := newWard(t, func(l *lab) func(*config.LUN) (backend.Store, error) {
		return func(c *config.LUN) (backend.Store, error) {
			s, err := l.openBackend(c)
			if c.ID != 1 || err != nil {
				return s, err
			}
			f.Store = s
			return &latching{Faulty: f}, nil
		}
	})
	f.Fail(backendtest.Sync, backend.ErrUnsynced)
	if _, sync := w.write(1, 'a'); sync == "" {
		t.Error("a sync that fails is GOOD")
	}
	w.look("failed", "a sync has failed")
	f.Fail(backendtest.Sync, nil)
	if _, sync := w.write(1, 'b'); sync == "" {
		t.Error("a sync is GOOD after one has failed")
	}
	begin := time.Now()
	if _, err := w.Recover(t.Context(), store, 1); err != nil {
		t.Fatal(err)
	}
	t.Logf("recovered after %v", time.Since(begin))
	attentions(t, w.s, 1)
	w.look(schema.Healthy, "")
	if write, sync := w.write(1, 'c'); write != "" || sync != "" || w.read(1) != 'c' {
		t.Errorf("after recover: %s, %s", write, sync)
	}
}

// A device that hangs delays no look at another one, and no change.
func TestLookThatHangs(t *testing.T) {
	w := newWard(t, nil)
	device, ok := w.lunUnit(1).Device()
	if !ok {
		t.Fatal("the file has no device")
	}
	hang := func() (release func()) {
		hangs := make(chan struct{})
		testkit.Eventually(t, "no look is in progress", func() bool {
			_, err := w.calls.begin(fmt.Sprintf("looks at device %#x", device), callInspect, func(*call) error { <-hangs; return nil })
			return err == nil
		})
		return sync.OnceFunc(func() { close(hangs) })
	}
	release := hang()
	defer release()
	if err := os.Remove(w.path); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the LUN is degraded", func() bool { // after stuckFor
		w.lookAtLUNs()
		l := w.lunState(1)
		return l.Health == "degraded" && strings.Contains(l.Reason, callInspect+" has not ended since")
	})
	inTime(t, "a look and a change", func() {
		w.look("degraded", "has not ended since")
		resize := func(d *config.Document) error { return d.SetLUN(store, 0, "size", "8MiB") }
		if _, err := w.Change(t.Context(), resize, ChangeOptions{}); err != nil {
			t.Error(err)
		}
	})
	attentions(t, w.s, 0)
	release()
	testkit.Eventually(t, "the LUN is orphaned", func() bool {
		w.lookAtLUNs()
		return w.lunState(1).Health == "orphaned"
	})

	// Neither a device that hangs nor a look that fails makes an orphan better.
	defer hang()()
	testkit.Eventually(t, "the second hang is known", func() bool {
		w.lookAtLUNs()
		return w.calls.stuck(fmt.Sprintf("looks at device %#x", device)) != nil
	})
	w.look("orphaned", "deleted or renamed")
	target, l := w.served.target(store), w.served.target(store).luns[1]
	now, known := healthOf(l, errors.New("EIO of stat"))
	if !known {
		t.Error("a look that fails says nothing")
	}
	w.setHealth(watched{target, l, l.recovered}, now)
	if write, sync := w.write(1, 'd'); write != intervention || sync != intervention {
		t.Errorf("WRITE %s, SYNCHRONIZE CACHE %s of an orphan whose file system hangs", write, sync)
	}
}

// lunUnit returns the unit of a LUN.
func (w *ward) lunUnit(id int) *lun.Unit {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.served.target(store).luns[id].unit
}

// A broken store fails its commands, recoveries and syncs while it says so.
type broken struct {
	*backendtest.Faulty
	err atomic.Pointer[error] // of Recover
}

func (b *broken) Device() uint64 { return 1 }

func (b *broken) Inspect() error { return b.Store.(backend.Inspector).Inspect() }

func (b *broken) Recover() error {
	if err := b.err.Load(); err != nil {
		return *err
	}
	return b.Store.(backend.Recoverer).Recover()
}

// A command that fails makes its LUN degraded. Recover says so while the store does not work, and both
// sessions stay.
func TestLUNWhoseStoreFailsCommands(t *testing.T) {
	b := &broken{Faulty: &backendtest.Faulty{}}
	w := newWard(t, func(l *lab) func(*config.LUN) (backend.Store, error) {
		return func(c *config.LUN) (backend.Store, error) {
			s, err := l.openBackend(c)
			if c.ID != 1 || err != nil {
				return s, err
			}
			b.Store = s
			return b, nil
		}
	})
	other := w.login("host2", store)
	attentions(t, other, 1)
	broke := error(unix.EIO)
	b.Fail(backendtest.WriteAt, broke)
	b.err.Store(&broke)
	if write, _ := w.write(1, 'a'); write != "3/0c/00" {
		t.Errorf("WRITE: %s", write)
	}
	w.look("degraded", "the store failed a command: input/output error")
	if _, err := w.Recover(t.Context(), store, 1); !errors.Is(err, unix.EIO) {
		t.Errorf("recover while the store does not work: %v", err)
	}
	w.look("degraded", "the store failed a command: input/output error")
	b.Fail(backendtest.WriteAt, nil)
	b.err.Store(nil)
	if _, err := w.Recover(t.Context(), store, 1); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*initiator.Session{w.s, other} {
		if got := attentions(t, s, 1); got != "28/00" {
			t.Errorf("attentions %q, want that of a medium that may have changed", got)
		}
	}
	w.look(schema.Healthy, "")
	if write, sync := w.write(1, 'b'); write != "" || sync != "" {
		t.Errorf("after recover: %s, %s", write, sync)
	}
}
