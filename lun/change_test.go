package lun

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// REPORT LUNS takes away no unit attention about a change that it does not tell of.
func TestReportLUNsBesideChanges(t *testing.T) {
	r := newRig(t, setup{})
	const units, last = 4000, 5000
	for id := range uint16(units) {
		if err := r.inv.Add(id+1, r.unit); err != nil {
			t.Fatal(err)
		}
	}
	report := func() []byte {
		var c Command
		return do(r.nexus, &c, [8]byte{}, "a0 00 00 000000 00010000 00 00", nil, all).in
	}
	stale := 0
	for round := range 1000 {
		report()
		lists := make(chan []byte)
		go func() { lists <- report() }()
		if round%2 == 0 {
			if err := r.inv.Add(last, r.unit); err != nil {
				t.Fatal(err)
			}
		} else {
			r.inv.Remove(last)
		}
		if list := <-lists; len(list) == 8+8*len(r.nexus.list()) {
			continue
		}
		stale++
		for _, l := range r.nexus.list() {
			if l.due.Load()&(1<<attentionLUNs) == 0 {
				t.Fatalf("round %d: LUN %d: the list that was reported is an old one, and nobody says so", round, l.id)
			}
		}
	}
	t.Logf("%d reports of the list as it had been", stale)
}

// Logical units come and go while initiators are there (SPC-4, section 6.33, and
// SAM-5, section 4.7.1): all of them hear of it once for each of their units, until
// they ask with REPORT LUNS, and once by event.
func TestInventoryChanges(t *testing.T) {
	r := newRig(t, setup{})
	n := r.login()
	var events [][]byte
	n.OnEvent(func(lun [8]byte, sense []byte) { events = append(events, append(lun[:], sense...)) })
	tur := func(lun byte) result { return do(n, &r.c, [8]byte{0, lun}, "00", nil, all) }
	reportLUNs := func(want string) {
		t.Helper()
		res := do(n, &r.c, [8]byte{}, "a0 00 00 000000 00000100 00 00", nil, all)
		wantGood(t, "REPORT LUNS", res)
		wantOctets(t, res.in[8:], unhex(want))
	}
	two, one := newRig(t, setup{}), newRig(t, setup{})
	if err := r.inv.Add(2, two.unit); err != nil {
		t.Fatal(err)
	}
	if want := unhex("0000000000000000 70 00 06 00000000 0a 00000000 3f 0e 00 00 0000"); len(events) != 1 || !bytes.Equal(events[0], want) {
		t.Errorf("events % x, want % x", events, want)
	}
	wantSense(t, tur(0), 0x6, 0x3f, 0x0e) // REPORTED LUNS DATA HAS CHANGED
	wantGood(t, "TEST UNIT READY", tur(0))
	wantSense(t, tur(2), 0x6, 0x29, 0x00) // the new one: power on
	wantSense(t, tur(2), 0x6, 0x3f, 0x0e)
	if err := r.inv.AddMasked(1, one.unit, maskFor(":host", ReadOnly)); err != nil {
		t.Fatal(err)
	}
	reportLUNs("0000000000000000 0001000000000000 0002000000000000")
	wantGood(t, "REPORT LUNS takes the unit attentions away", tur(0))
	wantGood(t, "REPORT LUNS takes the unit attentions away", tur(2))
	wantSense(t, tur(1), 0x6, 0x29, 0x00)
	wantSense(t, do(n, &r.c, [8]byte{0, 1}, extentCDB(0x2a, 0, 0, 1), make([]byte, 512), all), 0x7, 0x27, 0x00)
	if err := r.inv.AddMasked(3, newRig(t, setup{}).unit, maskFor(":host", NoAccess)); err != nil {
		t.Fatal(err)
	}
	wantGood(t, "a unit that a mask hides", tur(0))
	if len(events) != 2 || n.SeesAll() {
		t.Errorf("%d events, want one for each unit that can be seen; sees all: %t", len(events), n.SeesAll())
	}

	// A command that has begun goes on until the unit is closed.
	var c Command
	c.LUN, c.CDB = [8]byte{0, 2}, append(unhex("2a 00 00000000 00 0001 00"), make([]byte, 6)...)
	if !n.Begin(&c) {
		t.Fatalf("WRITE(10): sense % x", c.Sense())
	}
	if u := r.inv.Remove(2); u != two.unit {
		t.Fatalf("removed %p, want %p", u, two.unit)
	}
	if r.inv.Remove(2) != nil || len(r.inv.Units()) != 3 {
		t.Error("the unit is still there")
	}
	if !n.Consume(&c, pattern(512, 1), 0) {
		t.Errorf("WRITE(10): sense % x", c.Sense())
	}
	n.End(&c)
	wantSense(t, tur(2), 0x5, 0x25, 0x00)
	wantSense(t, tur(0), 0x6, 0x3f, 0x0e)
	reportLUNs("0000000000000000 0001000000000000")
	wantGood(t, "REPORT LUNS takes the unit attentions away", tur(1))
	if len(two.unit.seen) != 1 {
		t.Errorf("%d nexuses are remembered, want one: that of its own rig", len(two.unit.seen))
	}
	n.Close()
	if err := r.inv.Add(2, two.unit); err != nil {
		t.Fatal(err)
	}
	if len(n.list()) != 2 || len(two.unit.seen) != 2 {
		t.Error("a nexus that has ended still sees what comes")
	}
}

// Units come and go while sessions do and commands run.
func TestInventoryConcurrency(t *testing.T) {
	r := newRig(t, setup{})
	unit := newRig(t, setup{}).unit
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			var c Command
			for range 100 {
				n := r.inv.NewNexus(testPort)
				for lun := range byte(2) {
					do(n, &c, [8]byte{0, lun}, "a0 00 00 000000 000000ff 00 00", nil, all)
					do(n, &c, [8]byte{0, lun}, "28 00 00000000 00 0010 00", nil, all)
					n.ResetUnit([8]byte{0, lun})
				}
				n.Close()
			}
		})
	}
	for range 200 {
		if err := r.inv.Add(1, unit); err != nil {
			t.Fatal(err)
		}
		r.inv.Remove(1)
	}
	wg.Wait()
	if len(r.inv.nexuses) != 1 || len(unit.seen) != 1 {
		t.Errorf("%d and %d nexuses are remembered, want the rigs' own", len(r.inv.nexuses), len(unit.seen))
	}
}

// A growing is a store that can be given a size.
type growing struct {
	describedStore
	size *int64
	err  error
}

func (s *growing) Grow() (int64, error) { return *s.size, s.err }

// SBC-3, section 4.7: the capacity of a medium that has grown.
func TestGrow(t *testing.T) {
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	info := m.Info()
	info.Size = 1 << 20
	size := int64(1 << 20)
	faulty := &backendtest.Faulty{Store: m}
	store := &growing{describedStore: describedStore{faulty, info}, size: &size}
	u, err := New(store, Options{Identity: testIdentity, Sanitize: true})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, setup{})
	r.inv = NewInventory()
	if err := r.inv.Add(0, u); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { u.Close() })
	r.unit, r.store = u, faulty
	r.nexus = r.login()
	other := r.login()
	grow := func(want bool) {
		t.Helper()
		if grown, err := u.Grow(); grown != want || err != nil {
			t.Fatalf("grown %t, error %v", grown, err)
		}
	}
	grow(false)
	size = 3 << 20
	wantSense(t, r.run(extentCDB(0x28, 0, 2047, 2), nil), 0x5, 0x21, 0x00) // nobody has looked yet
	grow(true)
	for _, n := range []*Nexus{r.nexus, other} {
		wantSense(t, do(n, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x2a, 0x09) // CAPACITY DATA HAS CHANGED
	}
	wantOctets(t, r.good("25", nil), unhex("000017ff 00000200"))
	wantOctets(t, r.good("9e 10 0000000000000000 0000000c 00 00", nil), unhex("00000000000017ff 00000200"))
	wantOctets(t, r.good("1a 00 0a 00 0c 00", nil)[4:], unhex("00001800 00 000200"))
	r.good(extentCDB(0x8a, 0, 6143, 1), pattern(512, 1))
	wantSense(t, r.run(extentCDB(0x8a, 0, 6143, 2), make([]byte, 1024)), 0x5, 0x21, 0x00)
	size = 2 << 20
	grow(false)
	wantGood(t, "TEST UNIT READY", r.run("00", nil))

	// All of it is sanitized, and it does not grow meanwhile.
	size = 4 << 20
	held, release := r.hold(backendtest.WriteAt)
	release = sync.OnceFunc(release)
	defer release()
	r.good("48 81 0000000000 0005 00", unhex("01 00 0001 5a"))
	<-held
	if grown, err := u.Grow(); grown || !errors.Is(err, errSanitizing) {
		t.Errorf("grown %t, error %v while being sanitized", grown, err)
	}
	release()
	testkit.Eventually(t, "end of the sanitize", func() bool { return r.run("00", nil).status == StatusGood })
	wantOctets(t, r.good(extentCDB(0x28, 0, 6143, 1), nil), bytes.Repeat([]byte{0x5a}, 512))
	grow(true)

	store.err = fmt.Errorf("injected")
	if grown, err := u.Grow(); grown || err != store.err {
		t.Errorf("grown %t, error %v", grown, err)
	}
	if grown, err := newRig(t, setup{}).unit.Grow(); grown || err != nil {
		t.Errorf("a store of fixed size: grown %t, error %v", grown, err)
	}
}
