package daemon

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// The running document again has no steps and does not write the file.
func TestApplyOfTheRunningDocumentDoesNothing(t *testing.T) {
	l := newLab(t)
	before, err := os.Stat(l.path)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if p := l.ok(ChangeOptions{}); len(p.Steps) != 0 || !p.Persisted || p.Note != "" {
			t.Errorf("plan %+v", p)
		}
	}
	p, err := l.Change(t.Context(), func(*config.Document) error { return nil }, ChangeOptions{})
	if err != nil || len(p.Steps) != 0 {
		t.Errorf("plan %+v, %v", p, err)
	}
	if after, err := os.Stat(l.path); err != nil || !os.SameFile(before, after) || !after.ModTime().Equal(before.ModTime()) {
		t.Errorf("the file was written again: %v", err)
	}
}

// snapshot returns, as text, everything that a change may change.
func (l *lab) snapshot() string {
	l.t.Helper()
	st := l.State()
	st.CPUSeconds = 0
	for i := range st.Sessions {
		st.Sessions[i].Tasks, st.Sessions[i].Depth, st.Sessions[i].Counters = 0, 0, schema.CounterState{}
		for j := range st.Sessions[i].Connections {
			st.Sessions[i].Connections[j].Received = 0
		}
	}
	for i := range st.Portals {
		if st.Portals[i].Listen != "127.0.0.1:0" {
			st.Portals[i].Address = "" // the kernel may choose another port
		}
	}
	for _, target := range st.Targets {
		for i := range target.LUNs {
			target.LUNs[i].Counters, target.LUNs[i].Space = schema.CounterState{}, nil
		}
	}
	slices.SortFunc(st.Targets, func(a, b schema.TargetState) int { return strings.Compare(a.Name, b.Name) })
	b, err := json.MarshalIndent(st, "", " ")
	if err != nil {
		l.t.Fatal(err)
	}
	file, err := os.ReadFile(l.path)
	if err != nil {
		l.t.Fatal(err)
	}
	return string(b) + string(file)
}

// Whichever step of a change fails, the change is undone completely.
func TestFailedChangeIsUndone(t *testing.T) {
	l := newLab(t, func(l *lab) {
		l.luns += `, {id: 1, backend: memory, size: 1MiB}, {id: 2, backend: file, path: ` + filepath.Join(l.dir, "two") + `, size: 1MiB}` +
			`, {id: 3, backend: file, path: ` + filepath.Join(l.dir, "three") + `, size: 1MiB}, {id: 4, backend: memory, size: 1MiB}`
		l.targets = "  - {name: \"" + prefix + "second\", initiators: [\"*\"], luns: [{id: 0, backend: memory, size: 1MiB}]}"
	})
	s := l.login("stays", store)
	load(t, s)
	gone := l.login("gone", prefix+"second")
	w := &initiator.Command{LUN: 1, CDB: cdb.Write16(0, 1), Out: bytes.Repeat([]byte{7}, 512)}
	attentions(t, s, 1)
	if got := do(t, s, w); got != "" {
		t.Fatal(got)
	}
	before := l.snapshot()
	old := *l
	l.portals += `, {listen: "127.0.0.2:0", tpgt: 2}`
	l.initiators = `"*", "` + prefix + `more"`
	l.luns = `{id: 0, backend: memory, size: 4MiB}, {id: 2, backend: file, path: ` + filepath.Join(l.dir, "two") + `, size: 2MiB}` +
		`, {id: 3, backend: file, path: ` + filepath.Join(l.dir, "three") + `, size: 1MiB, write_through: true}, {id: 4, backend: memory, size: 1MiB, removable: true}` +
		`, {id: 5, backend: file, path: ` + filepath.Join(l.dir, "five") + `, size: 1MiB}`
	l.targets = "  - {name: \"" + prefix + "third\", initiators: [\"*\"], luns: [{id: 0, backend: memory, size: 1MiB}]}"
	l.more = "limits: {queue_depth: 4}\nlog: {level: warn}\ndebug: {listen: \"127.0.0.1:0\"}"
	o := ChangeOptions{Disrupt: true, Now: true}
	done := false
	for fail := 1; !done; fail++ {
		calls, what := 0, ""
		l.before = func(name string) error {
			if calls++; calls == fail {
				what = name
				return errInjected
			}
			return nil
		}
		_, err := l.apply(o)
		l.before = func(string) error { return nil }
		if done = what == ""; done {
			if err != nil || fail < 10 {
				t.Fatalf("%d steps: %v", fail, err)
			}
			break
		}
		if !errors.Is(err, errInjected) {
			t.Fatalf("%s: %v", what, err)
		}
		if strings.Contains(err.Error(), "Undoing the change failed") {
			t.Errorf("%s: %v", what, err)
		}
		if after := l.snapshot(); after != before {
			t.Fatalf("after a failure of %s the state is\n%s\nand was\n%s", what, after, before)
		}
		if p, err := old.apply(ChangeOptions{DryRun: true}); err != nil || len(p.Steps) != 0 {
			t.Errorf("after a failure of %s a plan has steps: %+v, %v", what, p, err)
		}
		attentions(t, s, 1)
		r := &initiator.Command{LUN: 1, CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
		if got := do(t, s, r); got != "" || !bytes.Equal(r.In, w.Out) {
			t.Errorf("after a failure of %s: LUN 1: %s, or its data is lost", what, got)
		}
		select {
		case <-gone.Done():
			t.Fatalf("a failure of %s ended a session", what)
		default:
		}
	}
	<-gone.Done()
	if got := reportLUNs(t, s); !slices.Equal(got, []int{0, 2, 3, 4, 5}) {
		t.Errorf("LUNs %v", got)
	}
	if p, err := l.apply(ChangeOptions{DryRun: true}); err != nil || len(p.Steps) != 0 {
		t.Errorf("after the change a plan has steps: %+v, %v", p, err)
	}
}

// Concurrent changes are made one after the other, and none is lost.
func TestConcurrentChangesAreAllMade(t *testing.T) {
	l := newLab(t)
	load(t, l.login("stays", store))
	const n = 16
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			_, err := l.Change(t.Context(), func(d *config.Document) error {
				return d.AddLUN(store, config.LUN{ID: 1 + i, Backend: "memory", Size: 1 << 20})
			}, ChangeOptions{})
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := len(l.State().Targets[0].LUNs); got != 1+n {
		t.Errorf("%d LUNs", got)
	}
	cfg, err := config.Load(l.path)
	if err != nil || len(cfg.Targets[0].LUNs) != 1+n {
		t.Errorf("the file: %v", err)
	}
}

// A plan during another change does not take that change for an edit of the file, not even
// when it is undone. An edit is still noticed.
func TestPlanDuringChangeNoticesOnlyEdits(t *testing.T) {
	l := newLab(t)
	plan := func() error {
		_, err := l.Change(t.Context(), func(d *config.Document) error { return d.AllowInitiator(store, prefix+"x") }, ChangeOptions{DryRun: true})
		return err
	}
	failed := errors.New("by a test")
	for _, want := range []error{nil, failed} {
		steps := 0
		l.before = func(string) error { // "save", a step, "paths"
			steps++
			if err := plan(); err != nil {
				t.Errorf("step %d: %v", steps, err)
			}
			if p, err := l.apply(ChangeOptions{DryRun: true}); err != nil || len(p.Steps) != 0 {
				t.Errorf("step %d: the change in progress again would do %+v, %v", steps, p, err)
			}
			if steps == 3 {
				return want
			}
			return nil
		}
		l.initiators += `, "` + prefix + `y"`
		if _, err := l.apply(ChangeOptions{}); !errors.Is(err, want) || steps != 3 {
			t.Fatalf("after %d steps: %v, want %v", steps, err, want)
		}
		if err := plan(); err != nil {
			t.Errorf("after it: %v", err)
		}
	}
	l.before = func(what string) error {
		if what == "save" {
			return nil
		}
		if err := os.WriteFile(l.path, []byte(l.text()+"# by hand\n"), 0o600); err != nil {
			t.Error(err)
		}
		if err := plan(); !errors.Is(err, ErrEdited) {
			t.Errorf("an edit by hand: %v", err)
		}
		return nil
	}
	l.initiators = `"` + prefix + `z"`
	l.ok(ChangeOptions{})
	if err := plan(); !errors.Is(err, ErrEdited) {
		t.Errorf("an edit by hand, after the change: %v", err)
	}
}

// cpuTime returns the CPU time of the process, which does not depend on the load of the machine.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Adding a LUN takes less than 100 ms of CPU time with 1,000 LUNs present.
func TestAddingOneOfManyLUNsIsFast(t *testing.T) {
	if testing.Short() {
		t.Skip("a thousand LUNs")
	}
	n := 1000
	if testkit.Race {
		n = 50 // the race detector makes times meaningless
	}
	var list []string
	for i := range n {
		list = append(list, fmt.Sprintf("{id: %d, backend: memory, size: 4MiB}", i))
	}
	l := newLab(t, func(l *lab) {
		l.luns = strings.Join(list, ",\n      ")
		l.dir = quickDir(t)
	})
	s := l.login("stays", store)
	// The garbage collector or another goroutine may run during some attempts.
	least, made := time.Hour, 0
	for ; made < 50 && (made < 5 || least > 100*time.Millisecond); made++ {
		begin := cpuTime(t)
		_, err := l.Change(t.Context(), func(d *config.Document) error {
			return d.AddLUN(store, config.LUN{ID: n + made, Backend: "memory", Size: 1 << 20})
		}, ChangeOptions{})
		if err != nil {
			t.Fatal(err)
		}
		least = min(least, cpuTime(t)-begin)
	}
	t.Logf("adding a LUN to %d LUNs: %v of CPU time", n, least)
	if least > 100*time.Millisecond && !testkit.Race {
		t.Errorf("adding a LUN took %v of CPU time", least)
	}
	if got := len(reportLUNs(t, s)); got != n+made {
		t.Errorf("the initiator finds %d LUNs", got)
	}
}

// After a crash during a change of a size, the start makes the committed state true.
func TestStartCompletesAChangeOfSize(t *testing.T) {
	for _, tt := range []struct {
		name       string
		was        int64  // size of the file
		configured string // what the configuration says
		shrinks    string // what is left in the state directory
		want       int64  // size of the file; negative: the LUN is not ready
	}{
		{"grow committed", 1 << 20, "3MiB", "", 3 << 20},
		{"shrink committed", 3 << 20, "1MiB", `{"PATH": 1048576}`, 1 << 20},
		{"shrink not committed", 3 << 20, "3MiB", `{"PATH": 1048576}`, 3 << 20},
		{"larger by mistake", 3 << 20, "1MiB", "", -3 << 20},
		{"larger than it was to be", 3 << 20, "1MiB", `{"PATH": 2097152}`, -3 << 20},
		{"not made yet", 0, "1MiB", "", 1 << 20},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			disk := filepath.Join(dir, "disk.img")
			if tt.was > 0 {
				if err := os.WriteFile(disk, make([]byte, tt.was), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			left := filepath.Join(dir, "state", shrinkFile)
			if err := os.Mkdir(filepath.Dir(left), 0o700); err != nil {
				t.Fatal(err)
			}
			if tt.shrinks != "" {
				if err := os.WriteFile(left, []byte(strings.ReplaceAll(tt.shrinks, "PATH", disk)), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			l := newLab(t, func(l *lab) {
				l.dir = dir
				l.luns += ", {id: 1, backend: file, path: " + disk + ", size: " + tt.configured + "}"
			})
			st := l.State().Targets[0].LUNs[1]
			if (st.State == schema.Ready) != (tt.want > 0) {
				t.Errorf("LUN 1: %+v", st)
			}
			if fi, err := os.Stat(disk); err != nil || fi.Size() != max(tt.want, -tt.want) {
				t.Errorf("the file: %v, %v", fi, err)
			}
			if _, err := os.Stat(left); (err == nil) != (tt.want < 0 && tt.shrinks != "") {
				t.Errorf("%s: %v", left, err)
			}
		})
	}
}

// A refusal is one short line however many sessions it names. Its plan names all.
func TestRefusalIsShort(t *testing.T) {
	var all []string
	for i := range 1000 {
		all = append(all, fmt.Sprintf("session %d", i))
	}
	p := &schema.Plan{Steps: []schema.Step{{Change: config.Change{Op: config.Remove, Kind: "target", Target: store}, Disruptive: true, Disturbs: all}}}
	var refused *ErrRefused
	if err := allowed(p, ChangeOptions{}); !errors.As(err, &refused) || !strings.Contains(err.Error(), "session 7 and 992 more.") || len(refused.Plan.Steps[0].Disturbs) != 1000 {
		t.Errorf("error %v", err)
	}
}
