package daemon

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/cmd/iser-target/systemd"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// setSync makes f sync all files of the state directory.
func (s *stateFiles) setSync(f func(*os.File) error) {
	s.ids.SetSync(f)
	s.reservations.SetSync(f)
	s.settings.SetSync(f)
	s.sanitizations.SetSync(f)
	s.failures.SetSync(f)
	s.shrinks.doc.SetSync(f)
}

// A pinged is a service manager that counts the pings of the watchdog.
type pinged struct {
	mu sync.Mutex
	n  int
}

func (p *pinged) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.n
}

// newPinged returns a manager with a short watchdog interval, and what counts its pings.
func newPinged(t *testing.T) (*systemd.Manager, *pinged) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	p := &pinged{}
	go func() {
		for b := make([]byte, 4096); ; {
			n, err := conn.Read(b)
			if err != nil {
				return
			}
			if strings.Contains(string(b[:n]), "WATCHDOG=1") {
				p.mu.Lock()
				p.n++
				p.mu.Unlock()
			}
		}
	}()
	t.Setenv("NOTIFY_SOCKET", path)
	t.Setenv("WATCHDOG_USEC", "60000")
	m, err := systemd.FromEnvironment()
	if err != nil {
		t.Fatal(err)
	}
	return m, p
}

// register returns PERSISTENT RESERVE OUT, REGISTER AND IGNORE EXISTING KEY, with APTPL.
func register(lun byte, key uint64) *initiator.Command {
	p := make([]byte, 24)
	binary.BigEndian.PutUint64(p[8:], key)
	p[20] = 1
	return &initiator.Command{LUN: lun, CDB: [16]byte{0: 0x5f, 1: 6, 8: 24}, Out: p}
}

// newDeadStateLab returns a lab with two LUNs whose state directory can hang, and the function that ends
// it, and returns the error of Run and how long it took.
func newDeadStateLab(t *testing.T) (l *lab, watchdog *pinged, end func() (time.Duration, error)) {
	m, watchdog := newPinged(t)
	l = &lab{t: t, dir: quickDir(t), portals: `{listen: "127.0.0.1:0"}`, initiators: `"*"`,
		luns: `{id: 0, backend: memory, size: 4MiB}, {id: 1, backend: memory, size: 4MiB}`,
		more: "drain: 1s\nlimits: {state_timeout: 1h}"}
	l.path = filepath.Join(l.dir, "c.yaml")
	l.write()
	w := testWaits
	w.changes, w.store = 2*time.Second, 20*time.Second
	d, stop := run(t, l.path, Options{Manager: m, waits: w})
	l.Daemon = d
	return l, watchdog, func() (time.Duration, error) {
		begun := time.Now()
		err := stop()
		return time.Since(begun), err
	}
}

// While the file system of the state directory hangs, and a command waits for it: I/O, logins, the state,
// the watchdog and PERSISTENT RESERVE IN continue. Changes fail in time, and the next one can be made. A
// shutdown ends.
func TestDeadStateDirectory(t *testing.T) {
	l, watchdog, end := newDeadStateLab(t)
	gate := make(chan struct{})
	defer close(gate)
	s, other := l.login("a", store), l.login("b", store)
	for _, s := range []*initiator.Session{s, other} {
		attentions(t, s, 0)
		attentions(t, s, 1)
	}
	l.state.setSync(func(*os.File) error { <-gate; return nil })
	hung := make(chan error, 1)
	go func() { hung <- s.Do(register(0, 7)) }()
	testkit.Eventually(t, "the registration is being stored", func() bool {
		return len(inState(l.dir, ".tmp")) > 0
	})

	within(t, "the state", func() {
		if st := l.State(); len(st.Targets[0].LUNs) != 2 || st.Targets[0].LUNs[0].Reservation != nil {
			t.Errorf("%+v", st.Targets)
		}
	})
	within(t, "I/O", func() {
		for lun := range byte(2) {
			do(t, other, &initiator.Command{LUN: lun, CDB: cdb.Write16(1024, 8), Out: make([]byte, 4096)})
			if got := do(t, other, &initiator.Command{LUN: lun, CDB: cdb.Read16(1024, 8), In: make([]byte, 4096)}); got != "" {
				t.Errorf("READ of LUN %d: %s", lun, got)
			}
		}
	})
	within(t, "PERSISTENT RESERVE IN", func() {
		do(t, other, &initiator.Command{CDB: [16]byte{0: 0x5e, 8: 0xff}, In: make([]byte, 255)})
	})
	within(t, "a login", func() { l.login("c", store) })
	pings := watchdog.count()
	testkit.Eventually(t, "the watchdog is notified", func() bool { return watchdog.count() > pings+5 })

	l.net.limits.StateTimeout.SetMax(int64(200 * time.Millisecond))
	path := filepath.Join(l.dir, "new.img")
	create := func(d *config.Document) error {
		return d.AddLUN(store, config.LUN{ID: 5, Backend: "file", Path: path, Size: 1 << 20, BlockSize: 512})
	}
	within(t, "lun create", func() {
		_, err := l.Change(t.Context(), create, ChangeOptions{})
		if !errors.Is(err, ErrStateStuck) || !strings.Contains(err.Error(), filepath.Join(l.dir, "state")) {
			t.Errorf("lun create: %v, want an error that names the state directory", err)
		}
	})
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("lun create failed and left its file: %v", err)
	}
	within(t, "another change", func() {
		if _, err := l.Change(t.Context(), func(d *config.Document) error {
			return d.AllowInitiator(store, prefix+"x")
		}, ChangeOptions{}); err != nil {
			t.Errorf("a change that stores nothing: %v", err)
		}
	})
	if n := len(l.State().Targets[0].LUNs); n != 2 {
		t.Errorf("%d LUNs, want 2", n)
	}
	select {
	case err := <-hung:
		t.Errorf("the registration has ended: %v", err)
	default:
	}
	if took, err := end(); err == nil || !strings.Contains(err.Error(), "state_dir") || took > soon {
		t.Errorf("the end: %v after %v, want an error about state_dir", err, took)
	}
}

// inState returns the names of the files in the state directory of a lab with that end.
func inState(dir, suffix string) (names []string) {
	names, _ = filepath.Glob(filepath.Join(dir, "state", "*"+suffix))
	return names
}

// within fails the test if f takes long.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(soon):
		t.Errorf("%s waits for the state directory", what)
	}
}

// A change that fails removes the file that it has created, and leaves one that existed.
func TestFailedCreateLeavesNoFile(t *testing.T) {
	for _, existed := range []bool{false, true} {
		l := newLab(t)
		path := filepath.Join(l.dir, "new.img")
		if existed {
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(path, 1<<20); err != nil {
				t.Fatal(err)
			}
		}
		create := func() (*schema.Plan, error) {
			return l.Change(t.Context(), func(d *config.Document) error {
				return d.AddLUN(store, config.LUN{ID: 5, Backend: "file", Path: path, Size: 1 << 20, BlockSize: 512})
			}, ChangeOptions{})
		}
		want := func(after string) {
			t.Helper()
			if _, err := os.Stat(path); err == nil != existed {
				t.Errorf("after %s, existed before: %v; now: %v", after, existed, err)
			}
		}
		l.state.setSync(func(*os.File) error { return errInjected })
		if _, err := create(); !errors.Is(err, errInjected) {
			t.Errorf("lun create: %v", err)
		}
		want("a failure of the state directory")
		l.state.setSync(nil)
		l.before = func(what string) error {
			if what == "paths" { // after all steps
				return errInjected
			}
			return nil
		}
		if _, err := create(); !errors.Is(err, errInjected) {
			t.Errorf("lun create: %v", err)
		}
		want("a failure of a later step")
		l.before = func(string) error { return nil }
		if _, err := create(); err != nil {
			t.Errorf("lun create afterwards: %v", err)
		}
	}
}
