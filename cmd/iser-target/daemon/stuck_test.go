package daemon

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A hanger makes stores that hang at chosen calls, like those on a server that is gone.
type hanger struct {
	mu    sync.Mutex
	gates map[string]chan struct{} // by what hangs
	calls map[string]int           // by what was asked, hanging or not
}

// hang makes the next calls of that name, like "open /path", wait until free is called.
func (h *hanger) hang(what string) (free func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	gate := make(chan struct{})
	h.gates[what] = gate
	return sync.OnceFunc(func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		delete(h.gates, what)
		close(gate)
	})
}

// pass counts a call and waits if hang made it wait.
func (h *hanger) pass(what string) {
	h.mu.Lock()
	gate := h.gates[what]
	h.calls[what]++
	h.mu.Unlock()
	if gate != nil {
		<-gate
	}
}

// count returns the number of calls of that name.
func (h *hanger) count(what string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.calls[what]
}

// openStore implements Options.openStore.
func (h *hanger) openStore(c *config.LUN) (backend.Store, error) {
	h.pass("open " + c.Path)
	if c.Backend == "memory" {
		return backend.OpenMemory(backend.MemoryConfig{Size: int64(c.Size), BlockSize: uint32(c.BlockSize)})
	}
	s, _, err := backend.OpenFile(backend.FileConfig{Path: c.Path, Size: int64(c.Size), BlockSize: uint32(c.BlockSize)})
	return &hangingStore{s, h, c.Path}, err
}

type hangingStore struct {
	backend.Store
	*hanger
	path string
}

func (s *hangingStore) ReadAt(p []byte, off int64) error {
	s.pass("read " + s.path)
	return s.Store.ReadAt(p, off)
}

func (s *hangingStore) Resize(size int64) error {
	s.pass("resize " + s.path)
	return s.Store.(backend.Resizer).Resize(size)
}

func (s *hangingStore) Grow() (int64, error) {
	s.pass("grow " + s.path)
	return s.Store.(backend.Grower).Grow()
}

func (s *hangingStore) Close() error {
	s.pass("close " + s.path)
	return s.Store.Close()
}

// testWaits are short, but long enough for a busy machine.
var testWaits = waits{store: 500 * time.Millisecond, slow: 500 * time.Millisecond, changes: 20 * time.Second, brief: 10 * time.Millisecond, close: 500 * time.Millisecond,
	start: time.Second, end: time.Second, slot: 20 * time.Millisecond, calls: 64, health: 50 * time.Millisecond, sync: time.Second}

// soon bounds every call, whatever hangs. It is more than the sum of some waits.
const soon = 30 * time.Second

// newHangingLab returns a lab with a memory LUN 0; h makes the stores of the other LUNs. If
// the test does not end the lab, it ends with the test, and must end without an error.
func newHangingLab(t *testing.T, w waits, before func(*hanger), o ...func(*lab)) (l *lab, h *hanger, end func() error) {
	h = &hanger{gates: map[string]chan struct{}{}, calls: map[string]int{}}
	l = &lab{t: t, dir: quickDir(t), portals: `{listen: "127.0.0.1:0"}`, initiators: `"*"`, luns: `{id: 0, backend: memory, size: 4MiB}`}
	for _, f := range o {
		f(l)
	}
	l.path = filepath.Join(l.dir, "c.yaml")
	l.write()
	if before != nil {
		before(h)
	}
	d, stop := run(t, l.path, Options{openStore: h.openStore, waits: w})
	l.Daemon = d
	ended := false
	end = func() error {
		ended = true
		return stop()
	}
	t.Cleanup(func() {
		if !ended {
			if err := stop(); err != nil {
				t.Error(err)
			}
		}
		h.mu.Lock()
		for _, gate := range h.gates {
			close(gate)
		}
		h.gates = nil
		h.mu.Unlock()
		testkit.Eventually(t, "no store is asked any more", func() bool {
			d.calls.mu.Lock()
			defer d.calls.mu.Unlock()
			return len(d.calls.inProgress) == 0
		})
	})
	return l, h, end
}

// disk returns the configuration of a LUN on a file of the lab.
func (l *lab) disk(id int, name, more string) string {
	return fmt.Sprintf("{id: %d, backend: file, path: %s, size: 1MiB%s}", id, filepath.Join(l.dir, name), more)
}

// inTime fails if f takes longer than soon.
func inTime(t *testing.T, what string, f func()) {
	t.Helper()
	begin := time.Now()
	f()
	if d := time.Since(begin); d > soon {
		t.Errorf("%s took %v", what, d)
	}
}

// serves requires that a store that hangs does not block initiators, lists and changes.
func (l *lab) serves(s *initiator.Session) {
	l.t.Helper()
	inTime(l.t, "what others do", func() {
		if got := testUnitReady(l.t, s, 0); got != "" && !strings.HasPrefix(got, "6/") {
			l.t.Errorf("LUN 0: %s", got)
		}
		l.State()
		l.status() // what the service manager is told
		for _, edit := range []func(*config.Document) error{
			func(d *config.Document) error {
				return d.AddLUN(store, config.LUN{ID: 99, Backend: "memory", Size: 1 << 20})
			},
			func(d *config.Document) error { return d.RemoveLUN(store, 99) },
		} {
			if _, err := l.Change(l.t.Context(), edit, ChangeOptions{Now: true, Disrupt: true}); err != nil {
				l.t.Error(err)
			}
		}
	})
}

func (l *lab) lunState(id int) schema.LUNState {
	l.t.Helper()
	luns := l.State().Targets[0].LUNs
	i := slices.IndexFunc(luns, func(s schema.LUNState) bool { return s.ID == id })
	if i < 0 {
		return schema.LUNState{}
	}
	return luns[i]
}

// A store that hangs at the start delays no other LUN. It is called once, and its LUN
// becomes ready when it answers.
func TestStoreThatHangsAtTheStart(t *testing.T) {
	t.Parallel()
	var free func()
	var disk string
	begin := time.Now()
	l, h, _ := newHangingLab(t, testWaits, func(h *hanger) { free = h.hang("open " + disk) }, func(l *lab) {
		disk = filepath.Join(l.dir, "one")
		l.luns += "," + l.disk(1, "one", "") + "," + l.disk(2, "two", "")
	})
	defer free()
	if d := time.Since(begin); d > soon {
		t.Errorf("the start took %v", d)
	}
	s := l.login("host1", store)
	for _, id := range []byte{0, 2} {
		if got := attentions(t, s, id); got != "29/00" {
			t.Errorf("LUN %d: %s", id, got)
		}
	}
	if got := attentions(t, s, 1); got != "29/00 2/04/03" { // LOGICAL UNIT NOT READY, MANUAL INTERVENTION REQUIRED
		t.Errorf("LUN 1: %s", got)
	}
	for range 3 {
		l.serves(s)
		time.Sleep(300 * time.Millisecond) // of retries
	}
	if st := l.lunState(1); st.State != schema.NotReady || !strings.Contains(st.Reason, "does not answer: opening it has not ended since") {
		t.Errorf("LUN 1: %+v", st)
	}
	if got := l.status(); !strings.Contains(got, "does not answer") {
		t.Errorf("status %q", got)
	}
	if n := h.count("open " + disk); n != 1 {
		t.Errorf("the store was asked %d times", n)
	}
	free()
	testkit.Eventually(t, "LUN 1 is ready", func() bool { return l.lunState(1).State == schema.Ready })
	if got := attentions(t, s, 1); !strings.Contains(got, "28/00") || capacity(t, s, 1) != 1<<20 {
		t.Errorf("LUN 1 when it is there: %s", got)
	}
	if n := h.count("open " + disk); n != 1 {
		t.Errorf("the store was asked %d times", n)
	}
}

// A LUN whose store hangs while it is opened can be removed, and the target can end. The
// store is closed when it answers.
func TestLUNWhoseStoreHangsCanBeRemoved(t *testing.T) {
	t.Parallel()
	var free func()
	var disk string
	l, h, _ := newHangingLab(t, testWaits, func(h *hanger) { free = h.hang("open " + disk) }, func(l *lab) {
		disk = filepath.Join(l.dir, "one")
		l.luns += "," + l.disk(1, "one", "")
	})
	zero := `{id: 0, backend: memory, size: 4MiB}`
	l.luns = zero + "," + l.disk(1, "other", "")
	inTime(t, "another file for the LUN", func() { l.ok(ChangeOptions{}) })
	if st := l.lunState(1); st.State != schema.Ready {
		t.Errorf("LUN 1: %+v", st)
	}
	l.luns = zero
	inTime(t, "its removal", func() { l.ok(ChangeOptions{Now: true}) })
	l.luns = zero + "," + l.disk(2, "one", "")
	inTime(t, "the first file again", func() {
		if _, err := l.apply(ChangeOptions{}); !errors.Is(err, ErrStuck) {
			t.Errorf("error %v", err)
		}
	})
	free()
	testkit.Eventually(t, "the first file is back", func() bool {
		_, err := l.apply(ChangeOptions{})
		if err != nil && !errors.Is(err, ErrStuck) { // which a loaded machine may make it be once more
			t.Fatal(err)
		}
		return err == nil
	})
	if got := h.count("open " + disk); got < 2 {
		t.Errorf("the file was opened %d times", got)
	}
	l.luns = zero
	l.ok(ChangeOptions{Now: true})
	h.hang("open " + disk)
	l.luns = zero + "," + l.disk(2, "one", "")
	if _, err := l.apply(ChangeOptions{}); !errors.Is(err, ErrStuck) { // and stays so to the end
		t.Errorf("error %v", err)
	}
}

// Adding a LUN whose store hangs fails and leaves nothing.
func TestStoreThatHangsWhenItsLUNIsAdded(t *testing.T) {
	t.Parallel()
	l, h, _ := newHangingLab(t, testWaits, nil)
	s := l.login("host1", store)
	load(t, l.login("other", store))
	disk := filepath.Join(l.dir, "one")
	free := h.hang("open " + disk)
	defer free()
	before := l.snapshot()
	zero := l.luns
	for range 4 {
		l.luns = zero + "," + l.disk(1, "one", "")
		inTime(t, "a creation that hangs", func() {
			_, err := l.apply(ChangeOptions{})
			if !errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), "add LUN 1 of "+store) && !strings.Contains(err.Error(), "LUN 1 of "+store) || !strings.Contains(err.Error(), "Nothing was changed") {
				t.Errorf("error %v", err)
			}
		})
		l.luns = zero
		if after := l.snapshot(); after != before {
			t.Fatalf("the state is\n%s\nand was\n%s", after, before)
		}
		l.serves(s)
	}
	if n := h.count("open " + disk); n != 1 {
		t.Errorf("the store was asked %d times", n)
	}
	l.calls.mu.Lock()
	if n := len(l.calls.inProgress); n != 1 {
		t.Errorf("%d goroutines hang", n)
	}
	l.calls.mu.Unlock()
	free()
	testkit.Eventually(t, "the store is closed", func() bool { return l.calls.pending(disk) == nil })
	l.luns = zero + "," + l.disk(1, "one", "")
	l.ok(ChangeOptions{})
	if got := attentions(t, s, 1); !strings.HasPrefix(got, "29/00") {
		t.Errorf("LUN 1: %s", got)
	}
}

// The number of stores that hang at a time is limited: no others are called.
func TestNumberOfStoresThatHangIsLimited(t *testing.T) {
	t.Parallel()
	var frees []func()
	var disks []string
	begin := time.Now()
	l, _, _ := newHangingLab(t, testWaits, func(h *hanger) {
		for _, disk := range disks {
			frees = append(frees, h.hang("open "+disk))
		}
	}, func(l *lab) {
		for i := 1; i <= testWaits.calls+5; i++ {
			name := fmt.Sprintf("disk%d", i)
			disks = append(disks, filepath.Join(l.dir, name))
			l.luns += "," + l.disk(i, name, "")
		}
	})
	if took := time.Since(begin); took > soon {
		t.Errorf("the start took %v", took)
	}
	s := l.login("host1", store)
	if got := attentions(t, s, 0); got != "29/00" {
		t.Errorf("LUN 0: %s", got)
	}
	if st := l.lunState(testWaits.calls + 5); st.State != schema.NotReady || !strings.Contains(st.Reason, "64 other stores do not answer") {
		t.Errorf("the last one: %+v", st)
	}
	for _, f := range frees {
		f()
	}
	testkit.Eventually(t, "all are ready", func() bool {
		return !slices.ContainsFunc(l.State().Targets[0].LUNs, func(s schema.LUNState) bool { return s.State != schema.Ready })
	})
}

// A LUN whose store hangs while it is resized keeps its size.
func TestStoreThatHangsInResize(t *testing.T) {
	t.Parallel()
	l, h, _ := newHangingLab(t, testWaits, nil, func(l *lab) { l.luns += "," + l.disk(1, "one", "") })
	s := l.login("host1", store)
	disk := filepath.Join(l.dir, "one")
	free := h.hang("resize " + disk)
	defer free()
	old := l.luns
	l.luns = strings.Replace(old, "size: 1MiB", "size: 2MiB", 1)
	inTime(t, "a resize that hangs", func() {
		if _, err := l.apply(ChangeOptions{}); !errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), "setting its size to 2097152 bytes") {
			t.Errorf("error %v", err)
		}
	})
	l.serves(s)
	if b, err := os.ReadFile(l.path); err != nil || !strings.Contains(string(b), "size: 1MiB") {
		t.Errorf("the file says\n%s%v", b, err)
	}
	// A start would find what the store may still do.
	left := filepath.Join(l.dir, "state", shrinkFile)
	if b, err := os.ReadFile(left); err != nil || !strings.Contains(string(b), `"`+disk+`": 1048576`) {
		t.Errorf("%s: %s, %v", left, b, err)
	}
	testkit.Eventually(t, "LUN 1 says why it is not ready", func() bool {
		st := l.lunState(1)
		return st.State == schema.NotReady && strings.Contains(st.Reason, "setting its size to 2097152 bytes has not ended")
	})
	free()
	testkit.Eventually(t, "LUN 1 is ready", func() bool { return l.lunState(1).State == schema.Ready })
	attentions(t, s, 1)
	if got := capacity(t, s, 1); got != 1<<20 {
		t.Errorf("LUN 1 has %d octets", got)
	}
	if fi, err := os.Stat(disk); err != nil || fi.Size() != 1<<20 {
		t.Errorf("the file: %v, %v", fi, err)
	}
	testkit.Eventually(t, "there is nothing left to do", func() bool {
		_, err := os.Stat(left)
		return errors.Is(err, os.ErrNotExist)
	})
	l.ok(ChangeOptions{})
	attentions(t, s, 1)
	if got := capacity(t, s, 1); got != 2<<20 {
		t.Errorf("LUN 1 has %d octets", got)
	}
}

// A LUN whose store hangs while it closes is removed. Its file is not used again before the
// store is closed.
func TestStoreThatHangsInClose(t *testing.T) {
	t.Parallel()
	l, h, _ := newHangingLab(t, testWaits, nil, func(l *lab) { l.luns += "," + l.disk(1, "one", "") })
	s := l.login("host1", store)
	disk := filepath.Join(l.dir, "one")
	free := h.hang("close " + disk)
	defer free()
	both, zero := l.luns, `{id: 0, backend: memory, size: 4MiB}`
	l.luns = zero
	inTime(t, "a removal that hangs", func() {
		if p := l.ok(ChangeOptions{Disrupt: true}); !strings.Contains(p.Note, "LUN 1: the store does not answer: closing it has not ended since") {
			t.Errorf("note %q", p.Note)
		}
	})
	l.serves(s)
	l.luns = both
	inTime(t, "its creation", func() {
		if _, err := l.apply(ChangeOptions{}); !errors.Is(err, ErrBeingRemoved) || !strings.Contains(err.Error(), "LUN 1 of "+store) {
			t.Errorf("error %v", err)
		}
	})
	l.luns = zero + "," + l.disk(1, "two", "")
	l.ok(ChangeOptions{}) // the number is free
	if got := attentions(t, s, 1); !strings.HasPrefix(got, "29/00") {
		t.Errorf("LUN 1: %s", got)
	}
	free()
	testkit.Eventually(t, "nothing is draining", func() bool {
		return !slices.ContainsFunc(l.State().Targets[0].LUNs, func(s schema.LUNState) bool { return s.State == schema.Draining })
	})
	l.luns += "," + l.disk(2, "one", "")
	l.ok(ChangeOptions{})
}

// A LUN that is opened again and whose store hangs becomes ready when the store answers.
func TestStoreThatHangsWhenItsLUNIsReplaced(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"close", "open"} {
		t.Run(what, func(t *testing.T) {
			l, h, _ := newHangingLab(t, testWaits, nil, func(l *lab) { l.luns += "," + l.disk(1, "one", "") })
			s := l.login("host1", store)
			disk := filepath.Join(l.dir, "one")
			free := h.hang(what + " " + disk)
			defer free()
			old := l.luns
			l.luns = strings.Replace(old, "size: 1MiB", "size: 1MiB, write_through: true", 1)
			inTime(t, "a change that hangs", func() {
				if _, err := l.apply(ChangeOptions{Disrupt: true}); !errors.Is(err, ErrStuck) {
					t.Errorf("error %v", err)
				}
			})
			l.serves(s)
			if st := l.lunState(1); st.State != schema.NotReady || !strings.Contains(st.Reason, "does not answer") || st.WriteThrough {
				t.Errorf("LUN 1: %+v", st)
			}
			free()
			testkit.Eventually(t, "LUN 1 is ready", func() bool { return l.lunState(1).State == schema.Ready })
			if got := attentions(t, s, 1); !strings.Contains(got, "28/00") {
				t.Errorf("LUN 1: %s", got)
			}
			l.ok(ChangeOptions{Disrupt: true})
		})
	}
}

// A store that hangs does not delay the check for media that have grown.
func TestStoreThatHangsInGrow(t *testing.T) {
	t.Parallel()
	l, h, _ := newHangingLab(t, testWaits, nil, func(l *lab) {
		for i, name := range []string{"one", "two"} {
			path := filepath.Join(l.dir, name)
			if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
				t.Fatal(err)
			}
			l.luns += fmt.Sprintf(", {id: %d, backend: block, path: %s}", i+1, path) // which h takes for one
		}
	})
	s := l.login("host1", store)
	attentions(t, s, 2)
	one, two := filepath.Join(l.dir, "one"), filepath.Join(l.dir, "two")
	free := h.hang("grow " + one)
	defer free()
	for _, path := range []string{one, two} {
		if err := os.Truncate(path, 2<<20); err != nil {
			t.Fatal(err)
		}
	}
	inTime(t, "looking for what has grown", func() { l.growDevices(t.Context()) })
	l.serves(s)
	attentions(t, s, 2)
	if got := capacity(t, s, 2); got != 2<<20 {
		t.Errorf("LUN 2 has %d octets", got)
	}
	free()
	testkit.Eventually(t, "LUN 1 has grown", func() bool { return l.lunState(1).Size == 2<<20 })
}

// A shutdown names the stores that hang and closes the others.
func TestShutdownNamesStoresThatHang(t *testing.T) {
	t.Parallel()
	l, h, end := newHangingLab(t, testWaits, nil, func(l *lab) {
		l.luns += "," + l.disk(1, "one", "") + "," + l.disk(2, "two", "") + "," + l.disk(4, "four", "") + "," + l.disk(3, "three", "")
	})
	disk := func(name string) string { return filepath.Join(l.dir, name) }
	free := h.hang("close " + disk("one"))
	defer free()
	freeFour := h.hang("resize " + disk("four"))
	defer freeFour()
	resized := l.doc()
	if err := resized.SetLUN(store, 4, "size", "2MiB"); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Apply(t.Context(), resized, ChangeOptions{}); !errors.Is(err, ErrStuck) {
		t.Fatalf("resize: %v", err)
	}
	// The store of a removed LUN is closed, too.
	freeThree := h.hang("close " + disk("three"))
	l.luns = `{id: 0, backend: memory, size: 4MiB},` + l.disk(1, "one", "") + "," + l.disk(2, "two", "") + "," + l.disk(4, "four", "")
	l.ok(ChangeOptions{})
	time.AfterFunc(200*time.Millisecond, freeThree)
	var err error
	inTime(t, "the end", func() { err = end() })
	if !errors.Is(err, ErrStuck) || !strings.Contains(err.Error(), "LUN 1 of "+store+": the store does not answer: closing it") ||
		!strings.Contains(err.Error(), "LUN 4 of "+store+": the store does not answer: setting its size to 2097152 bytes") ||
		strings.Contains(err.Error(), "LUN 2") || strings.Contains(err.Error(), "LUN 3") {
		t.Errorf("error %v", err)
	}
	for _, name := range []string{"two", "three"} {
		s, err := backendOpen(disk(name), 1<<20)
		if err != nil {
			t.Errorf("it was not closed: %v", err)
			continue
		}
		s.Close()
	}
}

// A change whose store hangs does not delay a shutdown.
func TestShutdownDuringAChangeThatHangs(t *testing.T) {
	t.Parallel()
	w := testWaits
	w.store = time.Minute
	l, h, end := newHangingLab(t, w, nil)
	disk := filepath.Join(l.dir, "one")
	free := h.hang("open " + disk)
	defer free()
	l.luns += "," + l.disk(1, "one", "")
	failed := make(chan error)
	doc := l.doc()
	go func() {
		_, err := l.Apply(t.Context(), doc, ChangeOptions{})
		failed <- err
	}()
	testkit.Eventually(t, "the change hangs", func() bool { return h.count("open "+disk) == 1 })
	inTime(t, "the end", func() {
		if err := end(); err != nil {
			t.Error(err)
		}
	})
	if err := <-failed; !errors.Is(err, ErrStuck) {
		t.Errorf("error %v", err)
	}
	free()
	testkit.Eventually(t, "the store has answered", func() bool { return l.calls.pending(disk) == nil })
	if b, err := os.ReadFile(l.path); err != nil || strings.Contains(string(b), disk) {
		t.Errorf("the file says\n%s%v", b, err)
	}
}
