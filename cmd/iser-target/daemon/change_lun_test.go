package daemon

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// LUNs are added, resized, changed and removed while a session that the changes do not
// name is under load.
func TestChangesOfALUNUnderLoad(t *testing.T) {
	l := newLab(t)
	c := &lunChanges{lab: l, other: l.login("other", store), disk: filepath.Join(l.dir, "disk.img")}
	load(t, c.other)
	c.s = l.login("host1", store)
	if got := attentions(t, c.s, 0); got != "29/00" {
		t.Fatalf("LUN 0: %s", got)
	}
	c.write = &initiator.Command{LUN: 1, CDB: cdb.Write16(4096, 1), Out: bytes.Repeat([]byte{7}, 512)}
	for _, step := range []struct {
		name string
		run  func(*lunChanges, *testing.T)
	}{
		{"added", (*lunChanges).add},
		{"extended", (*lunChanges).grow},
		{"cut off only when allowed", (*lunChanges).shrink},
		{"opened again only when allowed", (*lunChanges).makeReadOnly},
		{"shown to one initiator, then to all", (*lunChanges).remask},
		{"removed only when allowed", (*lunChanges).remove},
	} {
		if !t.Run(step.name, func(t *testing.T) {
			defer func(t *testing.T) { l.t = t }(l.t)
			l.t = t
			step.run(c, t)
		}) {
			return
		}
	}
}

// lunChanges are the steps of TestChangesOfALUNUnderLoad, for LUN 1 on a file.
type lunChanges struct {
	*lab
	s, other *initiator.Session
	disk     string
	write    *initiator.Command
}

const lunZero = `{id: 0, backend: memory, size: 4MiB}`

// set sets the keys of LUN 1 in the configuration.
func (c *lunChanges) set(keys string) {
	c.luns = lunZero + `, {id: 1, backend: file, path: ` + c.disk + `, ` + keys + `}`
}

// wantStep checks the only step of p.
func wantStep(t *testing.T, p *schema.Plan, disruptive, shrinks bool, disturbs string) {
	t.Helper()
	if len(p.Steps) != 1 {
		t.Fatalf("steps %+v, want 1", p.Steps)
	}
	st := p.Steps[0]
	if st.Disruptive != disruptive || st.Shrinks != shrinks || !regexp.MustCompile(`^`+disturbs+`$`).MatchString(strings.Join(st.Disturbs, ";")) {
		t.Errorf("step %+v, want disruptive %v, shrinks %v, disturbs %s", st, disruptive, shrinks, disturbs)
	}
}

// wantRefused requires that err is a refusal that names exactly these needs.
func wantRefused(t *testing.T, err error, needs schema.Needs) {
	t.Helper()
	var refused *ErrRefused
	if !errors.As(err, &refused) || refused.Needs() != needs {
		t.Fatalf("error %v, want a refusal that needs %+v", err, needs)
	}
}

func (c *lunChanges) add(t *testing.T) {
	c.set("size: 1MiB")
	wantStep(t, c.ok(ChangeOptions{}), false, false, "")
	if got := attentions(t, c.s, 0); got != "3f/0e" { // REPORTED LUNS DATA HAS CHANGED
		t.Errorf("LUN 0: %s", got)
	}
	if got := attentions(t, c.s, 1); got != "29/00 3f/0e" {
		t.Errorf("LUN 1: %s", got)
	}
}

func (c *lunChanges) grow(t *testing.T) {
	c.set("size: 3MiB")
	wantStep(t, c.ok(ChangeOptions{}), false, false, "")
	if got := attentions(t, c.s, 1); got != "2a/09" || capacity(t, c.s, 1) != 3<<20 { // CAPACITY DATA HAS CHANGED
		t.Errorf("LUN 1: %s, %d bytes", got, capacity(t, c.s, 1))
	}
	if fi, err := os.Stat(c.disk); err != nil || fi.Size() != 3<<20 {
		t.Errorf("the file: %v, %v", fi, err)
	}
	if got := do(t, c.s, c.write); got != "" {
		t.Errorf("WRITE beyond the old end: %s", got)
	}
}

func (c *lunChanges) shrink(t *testing.T) {
	c.set("size: 2MiB")
	p, err := c.apply(ChangeOptions{Disrupt: true})
	wantRefused(t, err, schema.Needs{Shrink: true})
	if !strings.Contains(err.Error(), "cuts off data") {
		t.Errorf("error %v", err)
	}
	wantStep(t, p, false, true, `session \d+ of .*;session \d+ of .*;LUN 1 of .*store`)
	if fi, err := os.Stat(c.disk); err != nil || fi.Size() != 3<<20 || capacity(t, c.s, 1) != 3<<20 {
		t.Errorf("the file after the refusal: %v, %v", fi, err)
	}
	c.ok(ChangeOptions{AllowShrink: true})
	if got := attentions(t, c.s, 1); got != "2a/09" || capacity(t, c.s, 1) != 2<<20 {
		t.Errorf("LUN 1: %s", got)
	}
	if got := do(t, c.s, c.write); got != "5/21/00" {
		t.Errorf("WRITE beyond the new end: %s", got)
	}
}

func (c *lunChanges) makeReadOnly(t *testing.T) {
	c.set("size: 2MiB, read_only: true")
	_, err := c.apply(ChangeOptions{AllowShrink: true})
	wantRefused(t, err, schema.Needs{Disrupt: true})
	p, err := c.apply(ChangeOptions{DryRun: true})
	if err != nil {
		t.Fatal(err)
	}
	wantStep(t, p, true, false, `session \d+ of .*;session \d+ of .*;LUN 1 of .*store`)
	c.ok(ChangeOptions{Disrupt: true})
	if got := attentions(t, c.s, 1); got != "28/00 2a/01" { // MEDIUM MAY HAVE CHANGED, MODE PARAMETERS CHANGED: WP
		t.Errorf("LUN 1: %s", got)
	}
	c.write.CDB = cdb.Write16(0, 1)
	if got := do(t, c.s, c.write); got != "7/27/00" {
		t.Errorf("WRITE: %s", got)
	}
}

func (c *lunChanges) remask(t *testing.T) {
	c.set(`size: 2MiB, read_only: true, initiators: ["` + prefix + `host1"]`)
	c.ok(ChangeOptions{Disrupt: true}) // it disturbs the session of "other"
	if got := testUnitReady(t, c.s, 1); got != "" {
		t.Errorf("LUN 1 for its initiator: %s", got)
	}
	if got := testUnitReady(t, c.other, 1); got != "5/25/00" {
		t.Errorf("LUN 1 for the other initiator: %s", got)
	}
	c.set(`size: 2MiB, read_only: true`)
	wantStep(t, c.ok(ChangeOptions{}), false, false, "")
	if got := attentions(t, c.other, 1); !strings.HasPrefix(got, "29/00") {
		t.Errorf("LUN 1 for the other initiator again: %s", got)
	}
}

func (c *lunChanges) remove(t *testing.T) {
	c.luns = lunZero
	_, err := c.apply(ChangeOptions{})
	wantRefused(t, err, schema.Needs{Disrupt: true})
	c.ok(ChangeOptions{Disrupt: true})
	if got := testUnitReady(t, c.s, 1); got != "5/25/00" {
		t.Errorf("LUN 1: %s", got)
	}
	if got := reportLUNs(t, c.s); !slices.Equal(got, []int{0}) {
		t.Errorf("LUNs %v", got)
	}
	if b, err := os.ReadFile(c.path); err != nil || string(b) != c.text() {
		t.Errorf("the file says\n%s%v", b, err)
	}
	if f, err := backendOpen(c.disk, 2<<20); err != nil {
		t.Errorf("the file is still in use: %v", err)
	} else {
		f.Close()
	}
}

// A LUN that is removed drains, or its commands are cut off.
func TestRemovedLUNDrainsOrIsCutOff(t *testing.T) {
	for _, tt := range []struct {
		name    string
		o       ChangeOptions
		release time.Duration // when the command ends; 0: after the removal
		want    string        // its outcome
		least   time.Duration // of the removal
		most    time.Duration
		note    string
	}{
		{"drains", ChangeOptions{Drain: time.Minute}, 300 * time.Millisecond, "", 300 * time.Millisecond, 30 * time.Second, ""},
		{"drains too long", ChangeOptions{Drain: 200 * time.Millisecond}, 0, "5/25/00", 200 * time.Millisecond, 30 * time.Second, "1 commands for LUN 1 were cut off"},
		{"now", ChangeOptions{Now: true, Drain: time.Minute}, 0, "5/25/00", 0, 30 * time.Second, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			slow := &backendtest.Faulty{}
			gate := slow.Shut(backendtest.ReadAt)
			l := newLab(t, func(l *lab) { l.luns += `, {id: 1, backend: memory, size: 1MiB, read_only: true}` })
			s := l.login("host1", store)
			load(t, l.login("other", store))
			// The slow store wraps the next one that is opened.
			l.openStore = func(c *config.LUN) (backend.Store, error) {
				st, err := l.openBackend(c)
				slow.Store = st
				return slow, err
			}
			l.luns = `{id: 0, backend: memory, size: 4MiB}, {id: 2, backend: memory, size: 1MiB}, {id: 1, backend: memory, size: 1MiB, read_only: true}`
			l.ok(ChangeOptions{})
			attentions(t, s, 2)
			r := &initiator.Command{LUN: 2, CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
			if err := s.Start(r); err != nil {
				t.Fatal(err)
			}
			<-gate.Entered
			begin := time.Now()
			if tt.release > 0 {
				time.AfterFunc(tt.release, gate.Open)
			}
			l.luns = `{id: 0, backend: memory, size: 4MiB}, {id: 1, backend: memory, size: 1MiB, read_only: true}`
			tt.o.Disrupt = true
			p := l.ok(tt.o)
			if d := time.Since(begin); d < tt.least || d > tt.most {
				t.Errorf("that took %v, want %v to %v", d, tt.least, tt.most)
			}
			if want := strings.ReplaceAll(tt.note, "LUN 1", "LUN 2"); !strings.Contains(p.Note, want) || want == "" && p.Note != "" {
				t.Errorf("note %q, want %q", p.Note, want)
			}
			if got := testUnitReady(t, s, 2); got != "5/25/00" {
				t.Errorf("the LUN that was removed: %s", got)
			}
			if tt.release == 0 {
				gate.Open()
			}
			if err := r.Wait(); err != nil || outcome(r) != tt.want {
				t.Errorf("the command: %v, %s; want %s", err, outcome(r), tt.want)
			}
			testkit.Eventually(t, "nothing is draining", func() bool {
				return !slices.ContainsFunc(l.State().Targets[0].LUNs, func(s schema.LUNState) bool { return s.State == schema.Draining })
			})
		})
	}
}

// A LUN that is added again after its file was removed gets a new file and identity.
func TestRecreatedLUNIsAnotherDisk(t *testing.T) {
	l := newLab(t)
	zero, disk := l.luns, filepath.Join(l.dir, "disk.img")
	both := zero + `, {id: 1, backend: file, path: ` + disk + `, size: 1MiB}`
	naas := map[string]bool{}
	for range 2 {
		l.luns = both
		l.ok(ChangeOptions{})
		naas[l.State().Targets[0].LUNs[1].NAA] = true
		l.luns = zero
		l.ok(ChangeOptions{})
		if err := os.Remove(disk); err != nil {
			t.Fatal(err)
		}
	}
	if len(naas) != 2 {
		t.Errorf("identities %v", naas)
	}
}

// A LUN that a change opens again keeps its reservations, with or without APTPL: they
// protect a cluster, and a change of how the disk is served does not end them (SPC-4,
// section 5.13.5).
func TestReplacedLUNKeepsReservations(t *testing.T) {
	for _, backend := range []string{"memory", "file, path: DISK"} {
		t.Run(backend[:4], func(t *testing.T) {
			luns := func(l *lab, more string) {
				l.luns = "{id: 0, size: 1MiB, backend: " + strings.ReplaceAll(backend, "DISK", filepath.Join(l.dir, "disk.img")) + more + "}"
			}
			l := newLab(t, func(l *lab) { luns(l, "") })
			holder, fenced := l.login("holder", store), l.login("fenced", store)
			for _, s := range []*initiator.Session{holder, fenced} {
				attentions(t, s, 0)
			}
			out := func(sa, typ byte, key, saKey uint64) {
				t.Helper()
				list := make([]byte, 24)
				binary.BigEndian.PutUint64(list, key)
				binary.BigEndian.PutUint64(list[8:], saKey)
				if got := do(t, holder, &initiator.Command{CDB: [16]byte{0: 0x5f, 1: sa, 2: typ, 8: 24}, Out: list}); got != "" {
					t.Fatalf("PERSISTENT RESERVE OUT %d: %s", sa, got)
				}
			}
			out(0, 0, 0, 7) // REGISTER
			out(1, 5, 7, 0) // RESERVE, Write Exclusive - Registrants Only
			for _, more := range []string{", removable: true", ", removable: true, write_through: true", ""} {
				luns(l, more)
				l.ok(ChangeOptions{Disrupt: true})
				for _, s := range []*initiator.Session{holder, fenced} {
					if got := attentions(t, s, 0); !strings.HasPrefix(got, "28/00") {
						t.Errorf("with %q: %s", more, got)
					}
				}
				w := &initiator.Command{CDB: cdb.Write16(0, 1), Out: make([]byte, 512)}
				if got := do(t, fenced, w); got != "status 0x18" {
					t.Errorf("with %q: WRITE of the other initiator: %q", more, got)
				}
				if got := do(t, holder, w); got != "" {
					t.Errorf("with %q: WRITE of the holder: %s", more, got)
				}
			}
			out(2, 5, 7, 0) // RELEASE
		})
	}
}

// Commands for a LUN that a change opens again get NOT READY, so that initiators retry.
func TestCommandsOfReplacedLUNGetNotReady(t *testing.T) {
	slow := &backendtest.Faulty{}
	gate := slow.Shut(backendtest.ReadAt)
	l := newLab(t)
	l.openStore = func(c *config.LUN) (backend.Store, error) {
		st, err := l.openBackend(c)
		if c.Removable {
			return st, err
		}
		slow.Store = st
		return slow, err
	}
	luns := func(more string) {
		l.luns = `{id: 0, backend: memory, size: 4MiB}, {id: 1, backend: file, size: 1MiB, path: ` + filepath.Join(l.dir, "disk.img") + more + `}`
	}
	luns("")
	l.ok(ChangeOptions{})
	s := l.login("host1", store)
	attentions(t, s, 1)
	r := &initiator.Command{LUN: 1, CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
	if err := s.Start(r); err != nil {
		t.Fatal(err)
	}
	<-gate.Entered
	luns(", removable: true")
	done := make(chan *schema.Plan)
	go func() { done <- l.ok(ChangeOptions{Disrupt: true, Drain: 1500 * time.Millisecond}) }()
	testkit.Eventually(t, "LUN 1 is being opened", func() bool {
		switch got := testUnitReady(t, s, 1); got {
		case "":
		case "6/28/00":
		case "2/04/01": // LOGICAL UNIT IS IN PROCESS OF BECOMING READY
			return true
		default:
			t.Errorf("TEST UNIT READY: %s", got)
		}
		return false
	})
	if p := <-done; !strings.Contains(p.Note, "1 commands for LUN 1 were cut off") {
		t.Errorf("note %q", p.Note)
	}
	gate.Open()
	if err := r.Wait(); err != nil || outcome(r) != "2/04/01" {
		t.Errorf("the command that was cut off: %v, %s", err, outcome(r))
	}
	if got := attentions(t, s, 1); got != "28/00" {
		t.Errorf("LUN 1: %s", got)
	}
	if got := do(t, s, r); got != "" {
		t.Errorf("READ: %s", got)
	}
}

// After a failed sync, earlier writes may be lost. So no later sync succeeds, not even
// after the LUN was opened again. Closing the store syncs, too.
func TestFailedSyncOutlivesReplacement(t *testing.T) {
	for _, tt := range []struct {
		name string
		fail []backendtest.Op
	}{
		{"SYNCHRONIZE CACHE fails", []backendtest.Op{backendtest.Sync, backendtest.Close}}, // for ever
		{"closing fails", []backendtest.Op{backendtest.Close}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLab(t)
			opened := 0
			l.openStore = func(c *config.LUN) (backend.Store, error) {
				st, err := l.openBackend(c)
				if opened++; err != nil || opened > 1 {
					return st, err
				}
				f := &backendtest.Faulty{Store: st}
				closed := false
				f.Hook(func(op backendtest.Op, _, _ int64) error {
					if !slices.Contains(tt.fail, op) || closed {
						return nil
					}
					closed = op == backendtest.Close // once
					return syscall.EIO
				})
				return f, nil
			}
			luns := func(more string) {
				l.luns = `{id: 0, backend: memory, size: 4MiB}, ` + l.disk(1, "disk.img", more)
			}
			luns("")
			l.ok(ChangeOptions{})
			s := l.login("host1", store)
			attentions(t, s, 1)
			write := &initiator.Command{LUN: 1, CDB: cdb.Write16(0, 1), Out: make([]byte, 512)}
			if got := do(t, s, write); got != "" {
				t.Fatalf("WRITE: %s", got)
			}
			flush := &initiator.Command{LUN: 1, CDB: [16]byte{0: 0x35}} // SYNCHRONIZE CACHE(10)
			if tt.fail[0] == backendtest.Sync {
				if got := do(t, s, flush); got != "3/0c/00" {
					t.Fatalf("SYNCHRONIZE CACHE: %s", got)
				}
			}
			luns(", removable: true")
			if _, err := l.apply(ChangeOptions{Disrupt: true}); !errors.Is(err, syscall.EIO) {
				t.Fatalf("a change whose store does not close: %v", err)
			}
			for range 2 { // first the change was undone, then it succeeds
				if got := attentions(t, s, 1); got != "28/00" {
					t.Errorf("LUN 1: %s", got)
				}
				if got := do(t, s, write); got != "" {
					t.Errorf("WRITE: %s", got)
				}
				write.CDB[1] = 0x08 // FUA
				for _, c := range []*initiator.Command{flush, write} {
					if got := do(t, s, c); got != "4/0c/00" {
						t.Errorf("%#x: %q, want a hardware error", c.CDB[0], got)
					}
				}
				write.CDB[1] = 0
				l.ok(ChangeOptions{Disrupt: true})
			}
		})
	}
}

// A LUN keeps its reservations when a change of it fails, even if its store can be opened
// again only later.
func TestFailedChangeKeepsReservations(t *testing.T) {
	for _, tt := range []struct {
		name string
		luns func(l *lab) string
		fail int // openings of the LUN as it was, before one succeeds
		back string
	}{
		{"replacement", func(l *lab) string { return l.disk(1, "disk.img", ", removable: true") }, 0, "28/00"},
		{"replacement that is not ready in between", func(l *lab) string { return l.disk(1, "disk.img", ", removable: true") }, 1, "28/00"},
		{"another file", func(l *lab) string { return l.disk(1, "new.img", "") + ", " + l.disk(3, "other.img", "") }, 0, "28/00"},
		{"removal", func(l *lab) string { return l.disk(2, "disk.img", "") + ", " + l.disk(3, "other.img", "") }, 0, "29/00"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := newLab(t)
			fail := 0
			l.openStore = func(c *config.LUN) (backend.Store, error) {
				switch {
				case c.ID == 3:
					return nil, syscall.EIO
				case c.Removable:
					fail = tt.fail
					return nil, syscall.EIO
				case fail > 0:
					fail--
					return nil, syscall.EIO
				}
				return l.openBackend(c)
			}
			first := `{id: 0, backend: memory, size: 4MiB}, `
			l.luns = first + l.disk(1, "disk.img", "")
			l.ok(ChangeOptions{})
			holder, fenced := l.login("holder", store), l.login("fenced", store)
			for _, s := range []*initiator.Session{holder, fenced} {
				attentions(t, s, 1)
			}
			for sa := range byte(2) { // REGISTER, RESERVE: Write Exclusive - Registrants Only
				list := make([]byte, 24)
				list[7+8*(1-sa)] = 7
				if got := do(t, holder, &initiator.Command{LUN: 1, CDB: [16]byte{0: 0x5f, 1: sa, 2: 5, 8: 24}, Out: list}); got != "" {
					t.Fatalf("PERSISTENT RESERVE OUT %d: %s", sa, got)
				}
			}
			l.luns = first + tt.luns(l)
			if _, err := l.apply(ChangeOptions{Disrupt: true, Now: true}); !errors.Is(err, syscall.EIO) {
				t.Fatal(err)
			}
			testkit.Eventually(t, "LUN 1 is back", func() bool { return l.State().Targets[0].LUNs[1].State == schema.Ready })
			for _, s := range []*initiator.Session{holder, fenced} {
				if got := attentions(t, s, 1); !strings.HasPrefix(got, tt.back) {
					t.Errorf("LUN 1: %s, want %s", got, tt.back)
				}
			}
			w := &initiator.Command{LUN: 1, CDB: cdb.Write16(0, 1), Out: make([]byte, 512)}
			if got := do(t, fenced, w); got != "status 0x18" {
				t.Errorf("WRITE of the other initiator: %q", got)
			}
			if got := do(t, holder, w); got != "" {
				t.Errorf("WRITE of the holder: %s", got)
			}
		})
	}
}
