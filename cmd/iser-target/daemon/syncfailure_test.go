package daemon

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
)

// errSync is the reason of a sync that fails.
var errSync = errors.New("injected: the cable is cut")

// syncFails returns a function that opens stores, of which that of LUN 1 fails its first sync, and then all.
func syncFails(openBackend func(*config.LUN) (backend.Store, error)) func(*config.LUN) (backend.Store, error) {
	return func(c *config.LUN) (backend.Store, error) {
		s, err := openBackend(c)
		if c.ID != 1 || err != nil {
			return s, err
		}
		f := &backendtest.Faulty{Store: s}
		f.Fail(backendtest.Sync, errSync)
		return &failing{latching{Faulty: f}}, nil
	}
}

// failing is a latching store that says what a sync failed of, and that it has failed.
type failing struct{ latching }

func (f *failing) Sync() error {
	if f.failed.Load() {
		return backend.ErrUnsynced
	}
	err := f.Faulty.Sync()
	if err != nil {
		f.failed.Store(true)
	}
	return err
}

func (f *failing) SyncFailed() bool { return f.failed.Load() }

// failureLab returns a configuration file with two LUNs on files.
func failureLab(t *testing.T) *lab {
	l := &lab{t: t, dir: quickDir(t), portals: `{listen: "127.0.0.1:0"}`, initiators: `"*"`}
	l.luns = l.disk(0, "zero.img", "") + ", " + l.disk(1, "one.img", "")
	l.path = filepath.Join(l.dir, "c.yaml")
	l.write()
	return l
}

// start serves the lab with the stores that open opens, nil for those of the configuration, and logs in. It returns the
// function that ends it.
func (l *lab) start(open func(l *lab) func(*config.LUN) (backend.Store, error)) (w *ward, end func()) {
	l.t.Helper()
	var o Options
	if open != nil {
		o.openStore = open(l)
	}
	d, stop := run(l.t, l.path, o)
	l.Daemon = d
	w = &ward{l, nil, filepath.Join(l.dir, "one.img")}
	w.s = l.login("host1", store)
	attentions(l.t, w.s, 0)
	if l.served.target(store).luns[1] != nil {
		attentions(l.t, w.s, 1)
	}
	return w, func() {
		l.t.Helper()
		w.s.Close()
		_ = stop() // the store that has failed may make that an error
	}
}

// failSync makes a sync of LUN 1 fail, and waits until the state directory has it.
func (w *ward) failSync() {
	w.t.Helper()
	if write, sync := w.write(1, 'a'); write != "" || sync != "3/0c/00" {
		w.t.Fatalf("WRITE %s, SYNCHRONIZE CACHE %s", write, sync)
	}
	testkit.Eventually(w.t, "the failure is on record", func() bool { return strings.Contains(w.record(), errSync.Error()) })
}

// record returns the file of failed syncs.
func (w *ward) record() string {
	b, err := os.ReadFile(filepath.Join(w.dir, "state", failuresFile))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		w.t.Fatal(err)
	}
	return string(b)
}

// fails checks that LUN 1 is failed as it was, and that the neighbor has its data and works.
func (w *ward) fails(since *time.Time) *time.Time {
	w.t.Helper()
	l := w.lunState(1)
	if l.State != schema.Ready || l.Health != "failed" || !strings.Contains(l.Reason, errSync.Error()) || l.HealthSince == nil ||
		since != nil && !since.Equal(*l.HealthSince) {
		w.t.Errorf("LUN 1 is %s, %s: %s since %v, want failed since %v", l.State, l.Health, l.Reason, l.HealthSince, since)
	}
	if write, sync := w.write(1, 'b'); write != "" || sync != "4/0c/00" || w.read(1) != 'b' {
		w.t.Errorf("LUN 1: WRITE %s, SYNCHRONIZE CACHE %s", write, sync)
	}
	if n := w.lunState(0); n.Health != schema.Healthy || w.read(0) != 'n' {
		w.t.Errorf("the neighbor is %s, and has %q", n.Health, w.read(0))
	}
	if write, sync := w.write(0, 'n'); write != "" || sync != "" {
		w.t.Errorf("the neighbor: %s, %s", write, sync)
	}
	return l.HealthSince
}

// A failed sync is one after kill -9, too, and after each restart, until the LUN is recovered.
func TestFailedSyncOutlivesKill(t *testing.T) {
	if dir := os.Getenv("DAEMON_TEST_FILE"); os.Getenv(dieAt) != "" {
		l := &lab{t: t, dir: dir, path: filepath.Join(dir, "c.yaml")}
		w, _ := l.start(func(l *lab) func(*config.LUN) (backend.Store, error) {
			return syncFails(func(c *config.LUN) (backend.Store, error) { return l.openBackendOf(c) })
		})
		if write, sync := w.write(0, 'n'); write != "" || sync != "" {
			t.Fatal(write, sync)
		}
		w.failSync()
		unix.Kill(os.Getpid(), unix.SIGKILL)
	}
	l := failureLab(t)
	if !runKilled(t, 0, l.dir) {
		t.Fatal("the process was not killed")
	}
	var since *time.Time
	for range 2 { // the second start is one after a graceful end
		w, end := l.start(nil)
		since = w.fails(since)
		w.lookAtLUNs()
		since = w.fails(since)
		end()
	}
	w, end := l.start(nil)
	gate, recovered := make(chan struct{}), make(chan error, 1)
	var r *schema.Recovery
	w.state.setSync(func(f *os.File) error { <-gate; return f.Sync() })
	go func() {
		var err error
		r, err = w.Recover(t.Context(), store, 1)
		recovered <- err
	}()
	testkit.Eventually(t, "the recovery is being stored", func() bool { return w.lunUnit(1).SyncFailure() == nil })
	for range 3 { // looks meanwhile do not make it fail again
		w.look("failed", "")
	}
	close(gate)
	err := <-recovered
	w.state.setSync(nil)
	if err != nil || r.Before != "failed" || r.Health != schema.Healthy || !strings.Contains(r.Lost, "may be missing") {
		t.Fatalf("recover: %+v, %v", r, err)
	}
	attentions(t, w.s, 1)
	for range 2 {
		w.look(schema.Healthy, "")
		if write, sync := w.write(1, 'c'); write != "" || sync != "" || strings.Contains(w.record(), "naa") {
			t.Errorf("after recover: %s, %s; on record is %s", write, sync, w.record())
		}
		end()
		w, end = l.start(nil)
	}
	end()
}

// openBackendOf opens a store without a daemon.
func (l *lab) openBackendOf(c *config.LUN) (backend.Store, error) {
	if c.Backend != "file" {
		return nil, errors.New("the lab has files only")
	}
	return backendOpen(c.Path, int64(c.Size))
}

// A LUN that is removed takes its failed sync with it, by the running target or while it is stopped.
func TestFailedSyncEndsWithItsLUN(t *testing.T) {
	for _, running := range []bool{true, false} {
		l := failureLab(t)
		w, end := l.start(func(l *lab) func(*config.LUN) (backend.Store, error) {
			return syncFails(func(c *config.LUN) (backend.Store, error) { return l.openBackendOf(c) })
		})
		w.write(0, 'n')
		w.failSync()
		both := l.luns
		l.luns = l.disk(0, "zero.img", "")
		if running {
			l.ok(ChangeOptions{Disrupt: true, Now: true})
			testkit.Eventually(t, "the record is gone", func() bool { return !strings.Contains(w.record(), "naa") })
			attentions(t, w.s, 0)
			if w.read(0) != 'n' {
				t.Error("the neighbor has lost its data")
			}
			end()
		} else {
			end()
			l.write()
			if !strings.Contains(w.record(), "naa") {
				t.Fatal("the record is gone with the process")
			}
			w, end = l.start(nil)
			if strings.Contains(w.record(), "naa") || w.read(0) != 'n' {
				t.Errorf("after a start without the LUN: %s", w.record())
			}
			end()
		}
		l.luns = both
		l.write()
		w, end = l.start(nil)
		w.look(schema.Healthy, "")
		if write, sync := w.write(1, 'c'); write != "" || sync != "" {
			t.Errorf("the LUN that was added again: %s, %s", write, sync)
		}
		end()
	}
}

// While the file system of the state directory hangs, a failed sync is answered, and everything else works. The
// record is stored as soon as possible. A recovery that cannot be stored leaves the LUN failed.
func TestFailedSyncWhileStateHangs(t *testing.T) {
	l := failureLab(t)
	w, end := l.start(func(l *lab) func(*config.LUN) (backend.Store, error) {
		return syncFails(func(c *config.LUN) (backend.Store, error) { return l.openBackendOf(c) })
	})
	defer end()
	w.write(0, 'n')
	gate := make(chan struct{})
	w.state.setSync(func(*os.File) error { <-gate; return errInjected })
	inTime(t, "a sync that fails, looks and the neighbor", func() {
		if write, sync := w.write(1, 'a'); write != "" || sync != "3/0c/00" {
			t.Fatalf("WRITE %s, SYNCHRONIZE CACHE %s", write, sync)
		}
		for range 3 {
			w.look("failed", errSync.Error())
		}
		if write, sync := w.write(0, 'n'); write != "" || sync != "" {
			t.Errorf("the neighbor: %s, %s", write, sync)
		}
	})
	if busy := w.lunUnit(1).Busy(); !strings.Contains(busy, "failure of a sync") {
		t.Errorf("an upgrade would find %q", busy)
	}
	close(gate) // storage answers, and fails
	testkit.Eventually(t, "the failure is reported", func() bool {
		return strings.Contains(texts(w.Events(0)), "state not stored") && w.lunUnit(1).Busy() == ""
	})
	w.state.setSync(nil)
	testkit.Eventually(t, "a look stores the record", func() bool {
		w.lookAtLUNs()
		return strings.Contains(w.record(), errSync.Error())
	})
	w.fails(nil)

	w.state.setSync(func(*os.File) error { return errInjected })
	if _, err := w.Recover(t.Context(), store, 1); err == nil {
		t.Error("a recovery that cannot be stored succeeds")
	}
	attentions(t, w.s, 1)
	w.look("failed", errSync.Error())
	w.state.setSync(nil)
}

// texts joins the texts of events.
func texts(list []schema.Event) string {
	var b strings.Builder
	for _, e := range list {
		b.WriteString(e.Text + "\n")
	}
	return b.String()
}

// A damaged file of failed syncs is found, restored from its spare copy, and counts.
func TestFailedSyncIsRestored(t *testing.T) {
	l := failureLab(t)
	w, end := l.start(func(l *lab) func(*config.LUN) (backend.Store, error) {
		return syncFails(func(c *config.LUN) (backend.Store, error) { return l.openBackendOf(c) })
	})
	w.write(0, 'n')
	w.failSync()
	end()
	path := filepath.Join(l.dir, "state", failuresFile)
	if err := os.WriteFile(path, bytes.Repeat([]byte{0}, 64), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range CheckState(filepath.Join(l.dir, "state")) {
		if want := c.Path == path; (c.Verdict == state.Restorable) != want {
			t.Errorf("%s is %s", c.Path, c.Verdict)
		}
	}
	w, end = l.start(nil)
	w.fails(nil)
	end()
}
