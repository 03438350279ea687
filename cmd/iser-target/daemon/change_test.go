package daemon

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

const (
	prefix = "iqn.2026-11.io.example:"
	store  = prefix + "store"
)

// A lab is a daemon with a configuration that tests put together of pieces.
type lab struct {
	*Daemon
	t    *testing.T
	dir  string
	path string
	// What the configuration says.
	portals, initiators, luns, more, targets string
}

func newLab(t *testing.T, o ...func(*lab)) *lab {
	l := &lab{t: t, dir: t.TempDir(),
		portals:    `{listen: "127.0.0.1:0"}`,
		initiators: `"*"`,
		luns:       `{id: 0, backend: memory, size: 4MiB}`,
	}
	for _, f := range o {
		f(l)
	}
	l.path = filepath.Join(l.dir, "c.yaml")
	l.write()
	l.Daemon = serveFile(t, l.path)
	return l
}

func (l *lab) text() string {
	return fmt.Sprintf(`# of a test
state_dir: %s/state
portals: [%s]
targets:
  - name: %s
    initiators: [%s]
    luns: [%s]
%s
%s`, l.dir, l.portals, store, l.initiators, l.luns, l.targets, l.more)
}

func (l *lab) write() {
	l.t.Helper()
	if err := os.WriteFile(l.path, []byte(l.text()), 0o600); err != nil {
		l.t.Fatal(err)
	}
}

// doc is the document that the lab's fields make.
func (l *lab) doc() *config.Document {
	l.t.Helper()
	doc, err := config.NewDocument(l.path, []byte(l.text()))
	if err != nil {
		l.t.Fatal(err)
	}
	return doc
}

// apply applies what the fields make.
func (l *lab) apply(o ChangeOptions) (*schema.Plan, error) {
	l.t.Helper()
	return l.Apply(l.t.Context(), l.doc(), o)
}

// ok is apply, which succeeds.
func (l *lab) ok(o ChangeOptions) *schema.Plan {
	l.t.Helper()
	p, err := l.apply(o)
	if err != nil {
		l.t.Fatal(err)
	}
	for _, s := range p.Steps {
		if !s.Done && !s.Restart {
			l.t.Fatalf("step %+v is not done", s)
		}
	}
	return p
}

func (l *lab) addr() string { return l.State().Portals[0].Address }

// login logs in as the initiator of that name, behind prefix.
func (l *lab) login(name, target string) *initiator.Session {
	l.t.Helper()
	s, err := l.tryLogin(name, target)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { s.Close() })
	return s
}

func (l *lab) tryLogin(name, target string) (*initiator.Session, error) {
	ctx, cancel := context.WithTimeout(l.t.Context(), 20*time.Second)
	defer cancel()
	return initiator.Login(ctx, l.addr(), initiator.Options{Name: prefix + name, Target: target})
}

// do is one command, and what its status and sense say: "" for GOOD, else
// "key/asc/ascq".
func do(t *testing.T, s *initiator.Session, c *initiator.Command) string {
	t.Helper()
	if err := s.Do(c); err != nil {
		t.Fatal(err)
	}
	return outcome(c)
}

func outcome(c *initiator.Command) string {
	if c.Status == 0 {
		return ""
	}
	if len(c.Sense) < 14 {
		return fmt.Sprintf("status %#x", c.Status)
	}
	return fmt.Sprintf("%x/%02x/%02x", c.Sense[2], c.Sense[12], c.Sense[13])
}

func testUnitReady(t *testing.T, s *initiator.Session, lun byte) string {
	t.Helper()
	return do(t, s, &initiator.Command{LUN: lun})
}

// attentions are the unit attentions that a LUN has for the session, up to the first
// answer that is none.
func attentions(t *testing.T, s *initiator.Session, lun byte) (list string) {
	t.Helper()
	for {
		switch got := testUnitReady(t, s, lun); {
		case strings.HasPrefix(got, "6/"):
			list += got[2:] + " "
		default:
			return strings.TrimSpace(list + got)
		}
	}
}

func capacity(t *testing.T, s *initiator.Session, lun byte) int {
	t.Helper()
	c := &initiator.Command{LUN: lun, In: make([]byte, 8), CDB: [16]byte{0x25}}
	if got := do(t, s, c); got != "" {
		t.Fatalf("READ CAPACITY(10): %s", got)
	}
	return (int(binary.BigEndian.Uint32(c.In)) + 1) * int(binary.BigEndian.Uint32(c.In[4:]))
}

func reportLUNs(t *testing.T, s *initiator.Session) (ids []int) {
	t.Helper()
	c := &initiator.Command{In: make([]byte, 16384), CDB: [16]byte{0: 0xa0, 8: 0x40}}
	if got := do(t, s, c); got != "" {
		t.Fatalf("REPORT LUNS: %s", got)
	}
	for at := 8; at < 8+int(binary.BigEndian.Uint32(c.In)); at += 8 {
		ids = append(ids, int(binary.BigEndian.Uint16(c.In[at:])&0x3fff))
	}
	return ids
}

// load keeps writing to LUN 0 and reading back, until the test ends; unit attentions
// are none of its business, everything else is an error.
func load(t *testing.T, s *initiator.Session) {
	t.Helper()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	begun := make(chan struct{}) // the first round is over
	begin := sync.OnceFunc(func() { close(begun) })
	wg.Go(func() {
		defer begin()
		w := &initiator.Command{CDB: cdb.Write16(1024, 8), Out: make([]byte, 4096)}
		r := &initiator.Command{CDB: cdb.Read16(1024, 8), In: make([]byte, 4096)}
		for rounds := 0; ; rounds++ {
			select {
			case <-stop:
				return
			default:
			}
			for i := range w.Out {
				w.Out[i] = byte(rounds + i)
			}
			for _, c := range []*initiator.Command{w, r} {
				for {
					if err := s.Do(c); err != nil {
						t.Errorf("session that is not named: %v", err)
						return
					}
					got := outcome(c)
					if got == "" {
						break
					}
					if !strings.HasPrefix(got, "6/") {
						t.Errorf("session that is not named: %s", got)
						return
					}
				}
			}
			if !bytes.Equal(w.Out, r.In) {
				t.Error("what was read is not what was written")
				return
			}
			begin()
		}
	})
	t.Cleanup(func() {
		close(stop)
		wg.Wait()
	})
	<-begun
}

// Nothing differs: there is nothing to do, and the file stays as it is.
func TestApplyUnchanged(t *testing.T) {
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

// LUNs come, grow, shrink, change and go under the load of a session that no step
// names.
func TestLUNs(t *testing.T) {
	l := newLab(t)
	other := l.login("other", store)
	load(t, other)
	s := l.login("host1", store)
	if got := attentions(t, s, 0); got != "29/00" {
		t.Fatalf("LUN 0: %s", got)
	}
	disk := filepath.Join(l.dir, "disk.img")
	zero := `{id: 0, backend: memory, size: 4MiB}`
	one := func(more string) string { return zero + `, {id: 1, backend: file, path: ` + disk + `, ` + more + `}` }
	plan := func(p *schema.Plan, steps int, disruptive, shrinks bool, disturbs string) {
		t.Helper()
		if len(p.Steps) != steps {
			t.Fatalf("steps %+v, want %d", p.Steps, steps)
		}
		st := p.Steps[0]
		if st.Disruptive != disruptive || st.Shrinks != shrinks || !regexp.MustCompile(`^`+disturbs+`$`).MatchString(strings.Join(st.Disturbs, ";")) {
			t.Errorf("step %+v, want disruptive %v, shrinks %v, disturbs %s", st, disruptive, shrinks, disturbs)
		}
	}

	l.luns = one("size: 1MiB")
	plan(l.ok(ChangeOptions{}), 1, false, false, "")
	if got := attentions(t, s, 0); got != "3f/0e" { // REPORTED LUNS DATA HAS CHANGED
		t.Errorf("LUN 0 after the add: %s", got)
	}
	if got := attentions(t, s, 1); got != "29/00 3f/0e" {
		t.Errorf("LUN 1 after the add: %s", got)
	}

	l.luns = one("size: 3MiB")
	plan(l.ok(ChangeOptions{}), 1, false, false, "")
	if got := attentions(t, s, 1); got != "2a/09" || capacity(t, s, 1) != 3<<20 { // CAPACITY DATA HAS CHANGED
		t.Errorf("LUN 1 after it has grown: %s, %d octets", got, capacity(t, s, 1))
	}
	if fi, err := os.Stat(disk); err != nil || fi.Size() != 3<<20 {
		t.Errorf("the file: %v, %v", fi, err)
	}
	w := &initiator.Command{LUN: 1, CDB: cdb.Write16(4096, 1), Out: bytes.Repeat([]byte{7}, 512)}
	if got := do(t, s, w); got != "" {
		t.Errorf("WRITE behind the old end: %s", got)
	}

	l.luns = one("size: 2MiB")
	p, err := l.apply(ChangeOptions{Disrupt: true})
	var refused *ErrRefused
	if !errors.As(err, &refused) || !slices.Equal(refused.Needs().Flags(), []string{"--allow-shrink"}) || !strings.Contains(err.Error(), "cuts off data") {
		t.Fatalf("a LUN was cut off: %v", err)
	}
	plan(p, 1, false, true, `session \d+ of .*host1;LUN 1 of .*store|session \d+ of .*;session \d+ of .*;LUN 1 of .*store`)
	if fi, err := os.Stat(disk); err != nil || fi.Size() != 3<<20 || capacity(t, s, 1) != 3<<20 {
		t.Errorf("the file after the refusal: %v, %v", fi, err)
	}
	l.ok(ChangeOptions{AllowShrink: true})
	if got := attentions(t, s, 1); got != "2a/09" || capacity(t, s, 1) != 2<<20 {
		t.Errorf("LUN 1 after it has shrunk: %s", got)
	}
	if got := do(t, s, w); got != "5/21/00" {
		t.Errorf("WRITE behind the new end: %s", got)
	}

	l.luns = one("size: 2MiB, read_only: true")
	_, err = l.apply(ChangeOptions{AllowShrink: true})
	if !errors.As(err, &refused) || !slices.Equal(refused.Needs().Flags(), []string{"--disrupt"}) {
		t.Fatalf("a LUN was opened anew: %v", err)
	}
	if p, err = l.apply(ChangeOptions{DryRun: true}); err != nil {
		t.Fatal(err)
	}
	plan(p, 1, true, false, `session \d+ of .*;session \d+ of .*;LUN 1 of .*store`)
	l.ok(ChangeOptions{Disrupt: true})
	if got := attentions(t, s, 1); got != "28/00 2a/01" { // MEDIUM MAY HAVE CHANGED, MODE PARAMETERS CHANGED: WP
		t.Errorf("LUN 1 after it is read only: %s", got)
	}
	w.CDB = cdb.Write16(0, 1)
	if got := do(t, s, w); got != "7/27/00" {
		t.Errorf("WRITE to what is read only: %s", got)
	}

	l.luns = one(`size: 2MiB, read_only: true, initiators: ["` + prefix + `host1"]`)
	l.ok(ChangeOptions{Disrupt: true}) // it is taken from other
	if got := testUnitReady(t, s, 1); got != "" {
		t.Errorf("LUN 1 for whom it is: %s", got)
	}
	if got := testUnitReady(t, other, 1); got != "5/25/00" {
		t.Errorf("LUN 1 for whom it is not: %s", got)
	}
	l.luns = one(`size: 2MiB, read_only: true`)
	plan(l.ok(ChangeOptions{}), 1, false, false, "")
	if got := attentions(t, other, 1); !strings.HasPrefix(got, "29/00") {
		t.Errorf("LUN 1 that comes back: %s", got)
	}

	l.luns = zero
	if _, err := l.apply(ChangeOptions{}); !errors.As(err, &refused) {
		t.Fatalf("a LUN that is seen was removed: %v", err)
	}
	l.ok(ChangeOptions{Disrupt: true})
	if got := testUnitReady(t, s, 1); got != "5/25/00" {
		t.Errorf("LUN 1 after its end: %s", got)
	}
	if got := reportLUNs(t, s); !slices.Equal(got, []int{0}) {
		t.Errorf("LUNs %v", got)
	}
	if b, err := os.ReadFile(l.path); err != nil || string(b) != l.text() {
		t.Errorf("the file says\n%s%v", b, err)
	}
	if f, err := backendOpen(disk, 2<<20); err != nil {
		t.Errorf("the file is still in use: %v", err)
	} else {
		f.Close()
	}
}

func backendOpen(path string, size int64) (backend.Store, error) {
	s, _, err := backend.OpenFile(backend.FileConfig{Path: path, Size: size})
	return s, err
}

// A LUN that is removed drains, or is cut off, and either way that ends.
func TestRemoveLUN(t *testing.T) {
	for _, tt := range []struct {
		name    string
		o       ChangeOptions
		release time.Duration // when the command ends; 0: it does not before the LUN has gone
		want    string        // its outcome
		least   time.Duration // that the removal takes
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
			// The slow store takes the place of the one that was opened.
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

// Targets come, change and go. Sessions end that have no place any more, and they alone.
func TestTargets(t *testing.T) {
	l := newLab(t)
	stays := l.login("stays", store)
	load(t, stays)
	tsihs := func() (names []string) {
		for _, s := range l.State().Sessions {
			names = append(names, strings.TrimPrefix(s.Initiator, prefix)+"@"+strings.TrimPrefix(s.Target, prefix))
		}
		slices.Sort(names)
		return names
	}
	const second = prefix + "second"
	target := func(more string) string {
		return "  - {name: \"" + second + "\", initiators: [" + more + "], luns: [{id: 0, backend: memory, size: 1MiB}]}"
	}
	l.targets = target(`"*"`)
	l.ok(ChangeOptions{})
	a, b := l.login("a", second), l.login("b", second)
	if got := attentions(t, a, 0); got != "29/00" {
		t.Fatalf("LUN 0 of a new target: %s", got)
	}
	if got := tsihs(); !slices.Equal(got, []string{"a@second", "b@second", "stays@store"}) {
		t.Fatalf("sessions %v", got)
	}

	l.targets = target(`"` + prefix + `a"`)
	p, err := l.apply(ChangeOptions{})
	var refused *ErrRefused
	if !errors.As(err, &refused) || len(p.Steps) != 1 || len(p.Steps[0].Disturbs) != 1 || !strings.HasSuffix(p.Steps[0].Disturbs[0], "of "+prefix+"b") {
		t.Fatalf("%+v, %v", p, err)
	}
	l.ok(ChangeOptions{Disrupt: true, Drain: 200 * time.Millisecond})
	select {
	case <-b.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("the session of an initiator that is no longer allowed goes on")
	}
	if got := tsihs(); !slices.Equal(got, []string{"a@second", "stays@store"}) {
		t.Errorf("sessions %v", got)
	}
	if _, err := l.tryLogin("b", second); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("login of an initiator that is not allowed: %v", err)
	}
	if got := attentions(t, a, 0); got != "" {
		t.Errorf("the session that is allowed: %s", got)
	}

	// Authentication is for logins from now on.
	l.targets = "  - {name: \"" + second + "\", initiators: [\"" + prefix + "a\"], auth: {method: chap, users: [{name: u, secret: \"secret of user u\"}]}, luns: [{id: 0, backend: memory, size: 1MiB}]}"
	l.ok(ChangeOptions{})
	if got := testUnitReady(t, a, 0); got != "" {
		t.Errorf("the session of before: %s", got)
	}
	if _, err := l.tryLogin("a", second); err == nil {
		t.Error("login without CHAP")
	}

	// Who is asked to log out has its LUNs until it does, or until its time is over.
	l.targets = ""
	removed := make(chan time.Duration)
	go func() {
		begin := time.Now()
		l.ok(ChangeOptions{Disrupt: true, Drain: time.Minute})
		removed <- time.Since(begin)
	}()
	testkit.Eventually(t, "the target is gone", func() bool { return len(l.State().Targets) == 1 })
	w := &initiator.Command{CDB: cdb.Write16(0, 1), Out: make([]byte, 512)}
	if got := do(t, a, w); got != "" {
		t.Errorf("WRITE before the logout: %s", got)
	}
	if err := a.Logout(t.Context()); err != nil {
		t.Fatal(err)
	}
	a.Close()
	if d := <-removed; d > 30*time.Second {
		t.Errorf("the removal took %v", d)
	}
	if got := tsihs(); !slices.Equal(got, []string{"stays@store"}) {
		t.Errorf("sessions %v", got)
	}
	if _, err := l.tryLogin("a", second); err == nil {
		t.Error("login to what was removed")
	}
}

// Portals come, change and go.
func TestPortals(t *testing.T) {
	l := newLab(t)
	load(t, l.login("stays", store))
	// Port 0 twice would be the same portal twice: the second is another address.
	l.portals = `{listen: "127.0.0.1:0"}, {listen: "127.0.0.2:0", tpgt: 2}`
	l.ok(ChangeOptions{})
	st := l.State()
	if len(st.Portals) != 2 || !slices.Equal(st.Targets[0].PortalGroups, []int{1, 2}) {
		t.Fatalf("portals %+v, groups %v", st.Portals, st.Targets[0].PortalGroups)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	s, err := initiator.Login(ctx, st.Portals[1].Address, initiator.Options{Name: prefix + "a", Target: store})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	attentions(t, s, 0)
	rtpg := &initiator.Command{In: make([]byte, 64), CDB: [16]byte{0: 0xa3, 1: 0x0a, 9: 64}}
	if got := do(t, s, rtpg); got != "" || binary.BigEndian.Uint32(rtpg.In) != 2*12 {
		t.Errorf("REPORT TARGET PORT GROUPS: %s, % x", got, rtpg.In)
	}

	// Who is there stays, also when the portal speaks something else from now on.
	l.portals = `{listen: "127.0.0.1:0"}, {listen: "127.0.0.2:0", tpgt: 2, transports: [tcp]}`
	l.ok(ChangeOptions{})
	if got := testUnitReady(t, s, 0); got != "" {
		t.Errorf("the session of before: %s", got)
	}
	if _, err := initiator.Login(ctx, st.Portals[1].Address, initiator.Options{Name: prefix + "b", Target: store}); err == nil {
		t.Error("login over iser where there is none")
	}

	l.portals = `{listen: "127.0.0.1:0"}`
	var refused *ErrRefused
	if p, err := l.apply(ChangeOptions{}); !errors.As(err, &refused) || !strings.Contains(strings.Join(p.Steps[0].Disturbs, " "), prefix+"a") {
		t.Fatalf("%+v, %v", p, err)
	}
	l.ok(ChangeOptions{Disrupt: true, Now: true})
	<-s.Done()
	if _, err := initiator.Login(ctx, st.Portals[1].Address, initiator.Options{Name: prefix + "a", Target: store}); err == nil {
		t.Error("login at a portal that was removed")
	}
	if got := l.State().Targets[0].PortalGroups; !slices.Equal(got, []int{1}) {
		t.Errorf("groups %v", got)
	}
}

// Limits are for new connections, the log level and the debug server change at once, and
// what has to wait for a restart says so and goes on waiting.
func TestSettings(t *testing.T) {
	l := newLab(t)
	load(t, l.login("stays", store))
	l.more = "limits: {queue_depth: 4}\nlog: {level: warn}\ndebug: {listen: \"127.0.0.1:0\"}\nmpa: {crc: true}"
	if p := l.ok(ChangeOptions{}); len(p.Steps) != 4 || p.Note != "" {
		t.Errorf("plan %+v", p)
	}
	if l.log.Enabled(t.Context(), -4) || l.side[config.KindDebug].end == nil {
		t.Error("log level or debug server are as they were")
	}
	s := l.login("a", store)
	if got := attentions(t, s, 0); got != "29/00" {
		t.Errorf("LUN 0: %s", got)
	}
	l.more = "log: {format: json}\ncontrol: {socket: /nowhere/s}\ndrain: 1s"
	for range 2 {
		p := l.ok(ChangeOptions{})
		if i := slices.IndexFunc(p.Steps, func(s schema.Step) bool { return s.Restart }); i < 0 || p.Steps[i].Done || p.Steps[i].Change.Key != "format" ||
			!strings.Contains(p.Note, "takes effect at the next start of the target") {
			t.Errorf("plan %+v", p)
		}
		if got := l.State().Pending; len(got) != 2 || !strings.Contains(got[0]+got[1], "format") || !strings.Contains(got[0]+got[1], "control") {
			t.Errorf("pending %q", got)
		}
	}
}

// snapshot is all that a change may change, for people to compare.
func (l *lab) snapshot() string {
	l.t.Helper()
	st := l.State()
	for i := range st.Sessions {
		st.Sessions[i].Tasks, st.Sessions[i].Counters = 0, schema.CounterState{}
		for j := range st.Sessions[i].Connections {
			st.Sessions[i].Connections[j].Received = 0
		}
	}
	for i := range st.Portals {
		if st.Portals[i].Listen != "127.0.0.1:0" {
			st.Portals[i].Address = "" // another port may be free now
		}
	}
	for _, target := range st.Targets {
		for i := range target.LUNs {
			target.LUNs[i].Counters = schema.CounterState{}
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

var errInjected = errors.New("injected")

// Whichever step fails, everything is as it was; and when none does, all is new.
func TestFailure(t *testing.T) {
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
		if strings.Contains(err.Error(), "could be undone") {
			t.Errorf("%s: %v", what, err)
		}
		if after := l.snapshot(); after != before {
			t.Fatalf("after a failure of %s the state is\n%s\nand was\n%s", what, after, before)
		}
		if p, err := old.apply(ChangeOptions{DryRun: true}); err != nil || len(p.Steps) != 0 {
			t.Errorf("after a failure of %s there is a difference: %+v, %v", what, p, err)
		}
		attentions(t, s, 1)
		r := &initiator.Command{LUN: 1, CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
		if got := do(t, s, r); got != "" || !bytes.Equal(r.In, w.Out) {
			t.Errorf("after a failure of %s: LUN 1: %s, or its data is lost", what, got)
		}
		select {
		case <-gone.Done():
			t.Fatalf("a failure of %s has ended a session", what)
		default:
		}
	}
	<-gone.Done()
	if got := reportLUNs(t, s); !slices.Equal(got, []int{0, 2, 3, 4, 5}) {
		t.Errorf("LUNs %v", got)
	}
	if p, err := l.apply(ChangeOptions{DryRun: true}); err != nil || len(p.Steps) != 0 {
		t.Errorf("there is a difference: %+v, %v", p, err)
	}
}

// Changes that are made at the same time come one after the other, and none is lost.
func TestConcurrentChanges(t *testing.T) {
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

// A file that was edited and not applied is not overwritten.
func TestEdited(t *testing.T) {
	l := newLab(t)
	l.luns += `, {id: 7, backend: memory, size: 1MiB}`
	l.write()
	_, err := l.Change(t.Context(), func(d *config.Document) error {
		return d.AddLUN(store, config.LUN{ID: 1, Backend: "memory", Size: 1 << 20})
	}, ChangeOptions{})
	if !errors.Is(err, ErrEdited) {
		t.Errorf("error %v", err)
	}
	if b, err := os.ReadFile(l.path); err != nil || string(b) != l.text() {
		t.Errorf("the file says\n%s%v", b, err)
	}
}

// Nor is one that is edited while a change is under way: before the change is saved, that
// is refused, and behind that the edit stays even if the change fails.
func TestEditedMeanwhile(t *testing.T) {
	l := newLab(t)
	before := l.snapshot()
	was := l.text()
	edited := was + "# edited\n"
	for _, at := range []string{"save", "paths"} {
		l.before = func(what string) error {
			if what != at {
				return nil
			}
			if err := os.WriteFile(l.path, []byte(edited), 0o600); err != nil {
				t.Fatal(err)
			}
			if at == "save" {
				return nil
			}
			return errInjected
		}
		_, err := l.Change(t.Context(), func(d *config.Document) error {
			return d.AddLUN(store, config.LUN{ID: 1, Backend: "memory", Size: 1 << 20})
		}, ChangeOptions{})
		if want := map[string]error{"save": ErrEdited, "paths": errInjected}[at]; !errors.Is(err, want) || strings.Contains(err.Error(), "could be undone") {
			t.Errorf("%s: error %v", at, err)
		}
		if b, err := os.ReadFile(l.path); err != nil || string(b) != edited {
			t.Errorf("%s: the file says\n%s%v", at, b, err)
		}
		if err := os.WriteFile(l.path, []byte(was), 0o600); err != nil {
			t.Fatal(err)
		}
		if after := l.snapshot(); after != before {
			t.Errorf("%s: the state is\n%s\nand was\n%s", at, after, before)
		}
	}
	// What is applied may say anything, but what it replaces is kept.
	l.before = func(what string) error {
		if what == "save" {
			return os.WriteFile(l.path, []byte(edited), 0o600)
		}
		return nil
	}
	l.luns += `, {id: 1, backend: memory, size: 1MiB}`
	l.ok(ChangeOptions{})
	if b, err := os.ReadFile(l.path); err != nil || string(b) != l.text() {
		t.Errorf("the file says\n%s%v", b, err)
	}
	kept, err := filepath.Glob(l.path + ".history/*")
	if err != nil || len(kept) == 0 {
		t.Fatalf("history %q, %v", kept, err)
	}
	if b, err := os.ReadFile(kept[len(kept)-1]); err != nil || string(b) != edited {
		t.Errorf("the newest in the history is\n%s%v", b, err)
	}
}

// A store that is missing at the start keeps its LUN from being ready, and that LUN
// alone; when it is there, it is served.
func TestAbsent(t *testing.T) {
	dir := t.TempDir()
	disk, link := filepath.Join(dir, "disk.img"), filepath.Join(dir, "mnt", "disk.img")
	if err := os.Mkdir(filepath.Dir(link), 0o700); err != nil {
		t.Fatal(err)
	}
	yaml := fmt.Sprintf(`
state_dir: %s/state
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: %s
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 4MiB}
      - {id: 1, backend: file, path: %s, size: 1MiB}
      - {id: 2, backend: block, path: %s/no-such-disk}
      - {id: 3, backend: gotgt, plugin: nonsense, path: /tmp/x}
      - {id: 4, backend: file, path: %s, size: 512}
`, dir, store, link, dir, write(t, "larger", strings.Repeat("x", 1024)))
	path := filepath.Join(dir, "c.yaml")
	if err := os.WriteFile(path, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	var naa string
	t.Run("first start", func(t *testing.T) { // which makes the file
		l := &lab{Daemon: serveFile(t, path), t: t}
		s := l.login("a", store)
		if got := attentions(t, s, 1); got != "29/00" {
			t.Errorf("LUN 1: %s", got)
		}
		naa = l.State().Targets[0].LUNs[1].NAA
	})
	if err := os.Rename(link, disk); err != nil { // as if nothing were mounted there
		t.Fatal(err)
	}
	t.Run("missing", func(t *testing.T) {
		l := &lab{Daemon: serveFile(t, path), t: t}
		s := l.login("a", store)
		load(t, s)
		for lun, reason := range map[byte]string{1: "file is missing", 2: "no such file", 3: "nonsense", 4: "has 1024 bytes, but 512 are configured"} {
			if got := attentions(t, s, lun); got != "29/00 2/04/03" { // LOGICAL UNIT NOT READY, MANUAL INTERVENTION REQUIRED
				t.Errorf("LUN %d: %s", lun, got)
			}
			inquiry := &initiator.Command{LUN: lun, In: make([]byte, 64), CDB: [16]byte{0x12, 1, 0x80, 0, 64}}
			st := l.State().Targets[0].LUNs[lun]
			if got := do(t, s, inquiry); got != "" || string(inquiry.In[4:20]) != st.NAA {
				t.Errorf("LUN %d: INQUIRY: %s, % x", lun, got, inquiry.In)
			}
			if st.State != schema.NotReady || !strings.Contains(st.Reason, reason) {
				t.Errorf("LUN %d: %+v", lun, st)
			}
		}
		if got := reportLUNs(t, s); !slices.Equal(got, []int{0, 1, 2, 3, 4}) {
			t.Errorf("LUNs %v", got)
		}
		if _, err := os.Stat(link); err == nil {
			t.Error("the missing file was made anew")
		}
		if err := os.Rename(disk, link); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "LUN 1 is ready", func() bool { return l.State().Targets[0].LUNs[1].State == schema.Ready })
		if got := attentions(t, s, 1); got != "28/00" || capacity(t, s, 1) != 1<<20 {
			t.Errorf("LUN 1 when it is there: %s", got)
		}
		if got := l.State().Targets[0].LUNs[1].NAA; got != naa {
			t.Errorf("LUN 1 is %s, was %s", got, naa)
		}
		var texts []string
		for _, e := range l.Events(0) {
			if e.Event == "lun" && fmt.Sprint(e.Attrs["lun"]) == "1" {
				texts = append(texts, e.Text)
			}
		}
		if !slices.Equal(texts, []string{"LUN not ready", "LUN ready"}) {
			t.Errorf("events %q", texts)
		}
	})
}

// A file that could not be made at the first start is made at the next one: it was never
// there.
func TestAbsentFromTheFirst(t *testing.T) {
	dir := t.TempDir()
	mnt := filepath.Join(dir, "mnt")
	path := write(t, "c.yaml", fmt.Sprintf(`
state_dir: %s/state
portals: [{listen: "127.0.0.1:0"}]
targets: [{name: %s, initiators: ["*"], luns: [{id: 0, backend: file, path: %s/disk.img, size: 1MiB}]}]
`, dir, store, mnt))
	var naa string
	t.Run("without its directory", func(t *testing.T) {
		l := serveFile(t, path).State().Targets[0].LUNs[0]
		if l.State != schema.NotReady {
			t.Errorf("%+v", l)
		}
		naa = l.NAA
	})
	if err := os.Mkdir(mnt, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Run("with it", func(t *testing.T) {
		if l := serveFile(t, path).State().Targets[0].LUNs[0]; l.State != schema.Ready || l.NAA != naa {
			t.Errorf("%+v; the NAA was %s", l, naa)
		}
	})
}

// A change of a LUN that is not ready, which fails because of that, leaves it as it was, and
// says so.
func TestChangeNotReady(t *testing.T) {
	var disk string
	with := func(lun string) string {
		return `{id: 0, backend: memory, size: 4MiB}, {id: 1, backend: file, ` + lun + `}`
	}
	l := newLab(t, func(l *lab) {
		disk = filepath.Join(l.dir, "mnt", "disk.img")
		l.luns = with(`path: ` + disk + `, size: 1MiB`)
	})
	before := l.State().Targets[0].LUNs[1]
	if before.State != schema.NotReady {
		t.Fatalf("LUN %+v", before)
	}
	for _, lun := range []string{`path: ` + disk + `, size: 2MiB`, `path: ` + disk + `, size: 1MiB, read_only: true`, `path: ` + disk + `.2, size: 1MiB`} {
		l.luns = with(lun)
		_, err := l.apply(ChangeOptions{Disrupt: true})
		if err == nil || !strings.HasSuffix(err.Error(), ". Nothing was changed") {
			t.Errorf("%s: %v", lun, err)
		}
		if after := l.State().Targets[0].LUNs[1]; !reflect.DeepEqual(after, before) {
			t.Errorf("%s: LUN %+v, was %+v", lun, after, before)
		}
	}
	if err := os.Mkdir(filepath.Dir(disk), 0o700); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the LUN is ready", func() bool { return l.State().Targets[0].LUNs[1].State == schema.Ready })
}

// Who looks while somebody else's change is made does not take what that has written for an
// edit by hand, also when it is undone; an edit by hand is still one.
func TestDryRunDuringChange(t *testing.T) {
	l := newLab(t)
	look := func() error {
		_, err := l.Change(t.Context(), func(d *config.Document) error { return d.AllowInitiator(store, prefix+"x") }, ChangeOptions{DryRun: true})
		return err
	}
	failed := errors.New("by a test")
	for _, want := range []error{nil, failed} {
		steps := 0
		l.before = func(string) error { // "save", a step, "paths"
			steps++
			if err := look(); err != nil {
				t.Errorf("step %d: %v", steps, err)
			}
			if p, err := l.apply(ChangeOptions{DryRun: true}); err != nil || len(p.Steps) != 0 {
				t.Errorf("step %d: what is being made would do %+v, %v", steps, p, err)
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
		if err := look(); err != nil {
			t.Errorf("behind it: %v", err)
		}
	}
	l.before = func(what string) error {
		if what == "save" {
			return nil
		}
		if err := os.WriteFile(l.path, []byte(l.text()+"# by hand\n"), 0o600); err != nil {
			t.Error(err)
		}
		if err := look(); !errors.Is(err, ErrEdited) {
			t.Errorf("an edit by hand: %v", err)
		}
		return nil
	}
	l.initiators = `"` + prefix + `z"`
	l.ok(ChangeOptions{})
	if err := look(); !errors.Is(err, ErrEdited) {
		t.Errorf("an edit by hand, behind the change: %v", err)
	}
}

// A LUN that is created where one had been has a file and an identity of its own.
func TestRecreate(t *testing.T) {
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

// quickDir is a directory in memory where there is one: what a disk takes for syncs, beside
// all that it does for others, is none of our work.
func quickDir(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "iser-target")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// LUN create takes less than 100 ms with 1,000 LUNs present.
func TestManyLUNs(t *testing.T) {
	if testing.Short() {
		t.Skip("a thousand LUNs")
	}
	n := 1000
	if raceEnabled {
		n = 50 // which says nothing about time
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
	// On a machine with other things to do one may have to wait for its turn.
	least, made := time.Hour, 0
	for ; made < 50 && (made < 5 || least > 100*time.Millisecond); made++ {
		begin := time.Now()
		_, err := l.Change(t.Context(), func(d *config.Document) error {
			return d.AddLUN(store, config.LUN{ID: n + made, Backend: "memory", Size: 1 << 20})
		}, ChangeOptions{})
		if err != nil {
			t.Fatal(err)
		}
		least = min(least, time.Since(begin))
	}
	t.Logf("LUN create beside %d LUNs: %v", n, least)
	if least > 100*time.Millisecond && !raceEnabled {
		t.Errorf("LUN create took %v", least)
	}
	if got := len(reportLUNs(t, s)); got != n+made {
		t.Errorf("the initiator finds %d LUNs", got)
	}
}

// Explain says what a login meets, for every rule of access.
func TestExplain(t *testing.T) {
	d := serve(t, accessConfig)
	for _, r := range accessRules {
		if r.target == "" || r.auth != nil || r.host == "host*" {
			continue // discovery, and what only a login knows
		}
		host := r.host
		if host == "" {
			host = "host1"
		}
		e := d.Explain(prefix+host, prefix+r.target, d.State().Portals[r.portal].Address)
		status := r.status.String()
		if r.name == "CHAP is required" { // which Explain takes for granted
			status = pdu.LoginSuccess.String()
		}
		if e.Status != status || e.Admitted != (status == pdu.LoginSuccess.String()) || len(e.Rules) == 0 {
			t.Errorf("%s: %+v, want %s", r.name, e, status)
		}
		var luns []string
		for _, v := range e.LUNs {
			if a := map[string]string{"read and write": "write", "read only": "read"}[v.Access]; a != "" {
				luns = append(luns, fmt.Sprintf("%d:%s", v.ID, a))
			}
		}
		if got := strings.Join(luns, " "); r.luns != "" && got != r.luns {
			t.Errorf("%s: LUNs %s, want %s", r.name, got, r.luns)
		}
	}
}

// A portal on all addresses is the one at each of them.
func TestExplainWildcard(t *testing.T) {
	l := newLab(t, func(l *lab) { l.portals = `{listen: "0.0.0.0:0"}` })
	_, port, err := net.SplitHostPort(l.addr())
	if err != nil {
		t.Fatal(err)
	}
	for portal, admitted := range map[string]bool{
		"0.0.0.0:0": true, "0.0.0.0:" + port: true, "127.0.0.1:" + port: true, "192.0.2.7:" + port: true,
		"127.0.0.1:1": false, "127.0.0.1": false,
	} {
		if e := l.Explain(prefix+"host", store, portal); e.Admitted != admitted {
			t.Errorf("portal %s: %+v", portal, e)
		}
	}
}

// KillSession ends one session, and events tell of it.
func TestKillSession(t *testing.T) {
	l := newLab(t)
	load(t, l.login("stays", store))
	news, cancel := l.Subscribe()
	defer cancel()
	s := l.login("victim", store)
	i := slices.IndexFunc(l.State().Sessions, func(s schema.SessionState) bool { return s.Initiator == prefix+"victim" })
	if err := l.KillSession(t.Context(), l.State().Sessions[i].TSIH, "by a test"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("the session goes on")
	}
	if err := l.KillSession(t.Context(), 999, ""); !errors.Is(err, ErrNotFound) {
		t.Errorf("no such session: %v", err)
	}
	<-news
	testkit.Eventually(t, "its end is an event", func() bool {
		return slices.ContainsFunc(l.Events(0), func(e schema.Event) bool {
			return e.Text == "session ended" && e.Attrs["reason"] == "by a test" && e.Attrs["initiator"] == prefix+"victim"
		})
	})
}

// ClearReservation takes away what a host that is gone has left.
func TestClearReservation(t *testing.T) {
	l := newLab(t)
	a, b := l.login("a", store), l.login("b", store)
	for _, s := range []*initiator.Session{a, b} {
		attentions(t, s, 0)
	}
	pr := func(s *initiator.Session, action, typ byte, key, sakey byte) string {
		c := &initiator.Command{Out: make([]byte, 24), CDB: [16]byte{0: 0x5f, 1: action, 2: typ, 8: 24}}
		c.Out[7], c.Out[15] = key, sakey
		return do(t, s, c)
	}
	if got := pr(a, 0, 0, 0, 1); got != "" {
		t.Fatal(got)
	}
	if got := pr(a, 1, 3, 1, 0); got != "" { // Exclusive Access
		t.Fatal(got)
	}
	r := &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
	if got := do(t, b, r); got != "status 0x18" {
		t.Fatalf("READ of the other one: %s", got)
	}
	if rs := l.State().Targets[0].LUNs[0].Reservation; rs == nil || rs.Type != "exclusive access" || len(rs.Registrations) != 1 ||
		!rs.Registrations[0].Holder || rs.Registrations[0].Key != "0x0000000000000001" || !strings.HasPrefix(rs.Registrations[0].Initiator, prefix+"a,i,0x") {
		t.Errorf("reservation %+v", rs)
	}
	if err := l.ClearReservation(t.Context(), store, 0); err != nil {
		t.Fatal(err)
	}
	if got := do(t, b, r); got != "" {
		t.Errorf("READ of the other one: %s", got)
	}
	if got := attentions(t, a, 0); got != "2a/03" { // RESERVATIONS PREEMPTED
		t.Errorf("who had it: %s", got)
	}
	if l.State().Targets[0].LUNs[0].Reservation != nil {
		t.Error("it is still there")
	}
	for _, tt := range []struct {
		target string
		lun    int
	}{{store, 0}, {store, 5}, {prefix + "nothing", 0}} {
		if err := l.ClearReservation(t.Context(), tt.target, tt.lun); !errors.Is(err, ErrNotFound) {
			t.Errorf("%v: %v", tt, err)
		}
	}
}

// A file that is watched is applied when it was replaced, or written in place.
func TestWatch(t *testing.T) {
	l := newLab(t, func(l *lab) { l.more = "watch: true" })
	load(t, l.login("stays", store))
	l.luns += `, {id: 1, backend: memory, size: 1MiB}`
	tmp := filepath.Join(l.dir, "new.yaml")
	if err := os.WriteFile(tmp, []byte(l.text()), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, l.path); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "LUN 1", func() bool { return len(l.State().Targets[0].LUNs) == 2 })
	l.luns += `, {id: 2, backend: memory, size: 1MiB}`
	l.write()
	testkit.Eventually(t, "LUN 2", func() bool { return len(l.State().Targets[0].LUNs) == 3 })
}

// SIGHUP reads the file when it is its turn, and so does not take back what a change
// before it has written. It never writes to the file: what somebody else has written
// meanwhile stays, and so does what cannot be done.
func TestReloadTurn(t *testing.T) {
	l := newLab(t)
	check := func(text string, luns int) {
		t.Helper()
		if b, err := os.ReadFile(l.path); err != nil || string(b) != text {
			t.Errorf("the file is, %v\n%s\nwant\n%s", err, b, text)
		}
		if n := len(l.State().Targets[0].LUNs); n != luns {
			t.Errorf("%d LUNs, want %d", n, luns)
		}
	}
	e, err := l.edit(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		l.reload(t.Context(), "SIGHUP")
		close(done)
	}()
	select {
	case <-done:
		t.Error("it did not wait for the other change")
	case <-time.After(100 * time.Millisecond):
	}
	l.luns += `, {id: 1, backend: memory, size: 1MiB}`
	l.write()
	e.release()
	<-done
	check(l.text(), 2)

	l.luns += `, {id: 2, backend: memory, size: 1MiB}`
	l.write()
	newer := l.text() + "# newer\n"
	l.before = func(step string) error {
		if step == "save" {
			return os.WriteFile(l.path, []byte(newer), 0o600)
		}
		return nil
	}
	l.reload(t.Context(), "SIGHUP")
	check(newer, 2)

	failed := false
	l.before = func(step string) error {
		if strings.HasPrefix(step, "add LUN 2") {
			failed = true
			return errors.New("no")
		}
		return nil
	}
	l.reload(t.Context(), "SIGHUP")
	if check(newer, 2); !failed {
		t.Error("the step has not failed")
	}
	l.before = func(string) error { return nil }
	l.reload(t.Context(), "SIGHUP")
	check(newer, 3)

	// The same of who sends the text of the file: it has to be that still.
	doc := l.doc()
	l.luns += `, {id: 3, backend: memory, size: 1MiB}`
	l.write()
	if _, err := l.ApplyOwn(t.Context(), doc, ChangeOptions{}); !errors.Is(err, ErrEdited) {
		t.Errorf("a text that the file does not have any more: error %v", err)
	}
	check(l.text(), 3)
	if _, err := l.ApplyOwn(t.Context(), l.doc(), ChangeOptions{}); err != nil {
		t.Error(err)
	}
	check(l.text(), 4)
}

// The end of the process between the commit of a change and its last step: the start
// comes to the new state, and before the commit to the old one.
func TestCutShort(t *testing.T) {
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

// A refusal is one line that can be read, however many sessions there are; the plan has
// them all.
func TestRefusalIsShort(t *testing.T) {
	var all []string
	for i := range 1000 {
		all = append(all, fmt.Sprintf("session %d", i))
	}
	p := &schema.Plan{Steps: []schema.Step{{Change: config.Change{Op: config.Remove, Kind: "target", Target: store}, Disruptive: true, Disturbs: all}}}
	var refused *ErrRefused
	if err := allowed(p, ChangeOptions{}); !errors.As(err, &refused) || !strings.Contains(err.Error(), "session 7 and 992 more)") || len(refused.Plan.Steps[0].Disturbs) != 1000 {
		t.Errorf("error %v", err)
	}
}

// A LUN that is opened anew keeps its reservations, also those that APTPL would not keep: what
// keeps the nodes of a cluster apart does not go because an operator changes how the disk is
// served (SPC-4, section 5.13.5).
func TestReservationsAcrossReplacement(t *testing.T) {
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
					t.Errorf("with %q: WRITE of who is kept out: %q", more, got)
				}
				if got := do(t, holder, w); got != "" {
					t.Errorf("with %q: WRITE of the holder: %s", more, got)
				}
			}
			out(2, 5, 7, 0) // RELEASE
		})
	}
}

// What meets a LUN that is opened anew is told to try again: an initiator that has a file
// system on it does so.
func TestBusyLUNIsOpenedAnew(t *testing.T) {
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

// What was written and not synced when a sync has failed may be lost: no later sync may
// succeed, whatever is done to the LUN meanwhile. When the store of it closes it syncs as well.
func TestFailedSyncOutlivesReplacement(t *testing.T) {
	for _, tt := range []struct {
		name string
		fail []backendtest.Op
	}{
		{"a SYNCHRONIZE CACHE has failed", []backendtest.Op{backendtest.Sync, backendtest.Close}}, // which is final
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
				t.Fatalf("the change whose store does not close: %v", err)
			}
			for range 2 { // the change was taken back; then it is made
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

// A change that fails gives the LUN back as it was: to open its store anew is no loss of
// power then either, also if that succeeds only later.
func TestReservationsAcrossFailedChange(t *testing.T) {
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
				t.Errorf("WRITE of who is kept out: %q", got)
			}
			if got := do(t, holder, w); got != "" {
				t.Errorf("WRITE of the holder: %s", got)
			}
		})
	}
}
