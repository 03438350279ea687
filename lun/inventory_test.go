package lun

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"testing"
)

func TestInventory(t *testing.T) {
	r := newRig(t, setup{})
	if err := r.inv.Add(0, r.unit); err == nil {
		t.Error("a LUN was given twice")
	}
	if err := r.inv.Add(1<<14, r.unit); err == nil {
		t.Error("LUN 16384 was accepted")
	}
	other := newRig(t, setup{})
	for _, id := range []uint16{16383, 3} {
		if err := r.inv.Add(id, other.unit); err != nil {
			t.Fatal(err)
		}
	}
	if u := r.inv.Entries(); len(u) != 3 || u[0].Unit != r.unit || u[1].Unit != other.unit || u[2].Unit != other.unit {
		t.Errorf("units are %v", u)
	}
}

// Logical units come and go while initiators are logged in (SPC-4, section 6.33, and SAM-5,
// section 4.7.1). Each initiator gets an attention once for each of its units, until it sends
// REPORT LUNS, and one event.
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
		wantBytes(t, res.in[8:], unhex(want))
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

	// A command in progress continues until the unit is closed.
	var c Command
	c.LUN, c.CDB = [8]byte{0, 2}, append(unhex("2a 00 00000000 00 0001 00"), make([]byte, 6)...)
	if !n.Begin(&c) {
		t.Fatalf("WRITE(10): sense % x", c.Sense())
	}
	if u := r.inv.Remove(2); u != two.unit {
		t.Fatalf("removed %p, want %p", u, two.unit)
	}
	if r.inv.Remove(2) != nil || len(r.inv.Entries()) != 3 {
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
					n.ResetUnit([8]byte{0, lun}, true)
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

// REPORT LUNS takes away no unit attention about a change that it does not report.
func TestReportLUNsDuringChanges(t *testing.T) {
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
			if l.due.Load()&dueBit(condLUNsChanged) == 0 {
				t.Fatalf("round %d: LUN %d: the list that was reported is an old one, and nobody says so", round, l.id)
			}
		}
	}
	t.Logf("%d reports of the list as it had been", stale)
}

// SetMask shows, hides and write protects a unit while initiators are logged in (SPC-4, section
// 6.33).
func TestSetMask(t *testing.T) {
	r := newRig(t, setup{})
	write := func() result { return r.run("2a 00 00000000 00 0001 00", make([]byte, 512)) }
	if err := r.inv.SetMask(0, maskFor(":host", ReadOnly)); err != nil {
		t.Fatal(err)
	}
	wantSense(t, write(), 0x6, 0x2a, 0x01)
	wantSense(t, write(), 0x7, 0x27, 0x00)
	if err := r.inv.SetMask(0, maskFor(":host", NoAccess)); err != nil {
		t.Fatal(err)
	}
	wantSense(t, write(), 0x5, 0x25, 0x00)
	if r.nexus.SeesAll() || len(r.nexus.LUNs()) != 0 || len(r.unit.seen) != 0 {
		t.Errorf("it sees all: %v, LUNs %v", r.nexus.SeesAll(), r.nexus.LUNs())
	}
	if err := r.inv.SetMask(0, nil); err != nil {
		t.Fatal(err)
	}
	wantSense(t, write(), 0x6, 0x29, 0x00)
	wantSense(t, write(), 0x6, 0x3f, 0x0e)
	wantGood(t, "WRITE(10)", write())
	if !slices.Equal(r.nexus.LUNs(), []uint16{0}) {
		t.Errorf("LUNs %v", r.nexus.LUNs())
	}
	if r.inv.SetMask(7, nil) == nil {
		t.Error("mask of what is not there")
	}
}

// SetPorts changes the target ports and notifies the initiators (SPC-4, section 5.11.2.1:
// ASYMMETRIC ACCESS STATE CHANGED).
func TestSetPorts(t *testing.T) {
	r := newRig(t, setup{})
	groups := func() int {
		res := r.run("a3 0a 00000000 00000100 00 00", nil)
		wantGood(t, "REPORT TARGET PORT GROUPS", res)
		return (len(res.in) - 4) / 12
	}
	r.inv.SetPorts([]uint16{1}, nil)
	if groups() != 1 {
		t.Errorf("%d groups", groups())
	}
	r.inv.SetPorts([]uint16{3, 1, 3}, nil)
	wantSense(t, r.run("00", nil), 0x6, 0x2a, 0x06)
	if groups() != 2 {
		t.Errorf("%d groups", groups())
	}
	r.inv.SetPorts([]uint16{1, 3}, []uint16{4, 5}) // they lead to units with implicit access
	wantGood(t, "without news", r.run("00", nil))
	if groups() != 2 {
		t.Errorf("%d groups, and those of other gateways do not lead to the unit", groups())
	}
}

// An attention that the new unit raises for a nexus during Replace is not lost to those of the
// old unit.
func TestReplaceLosesNoAttention(t *testing.T) {
	r := newRig(t, setup{})
	for i := range 200 {
		p := testPort
		p.InitiatorName = fmt.Sprintf("iqn.2026-11.io.example:%d", i)
		r.inv.NewNexus(p)
	}
	for range 100 {
		u := newRig(t, setup{}).unit
		told := map[*itl]bool{}
		replaced, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			for {
				u.mu.Lock()
				for l := range u.seen {
					if !told[l] && l.nexus.inv == r.inv {
						told[l] = true
						l.raise(condReservationsPreempted)
					}
				}
				u.mu.Unlock()
				select {
				case <-replaced:
					return
				default:
				}
			}
		}()
		r.inv.Replace(0, u)
		close(replaced)
		<-ended
		for l := range told {
			if l.due.Load()&dueBit(condReservationsPreempted) == 0 {
				t.Fatal("a unit attention was lost")
			}
			l.due.Store(0)
		}
	}
}

// PREEMPT AND ABORT that began in a unit that is then replaced still ends the commands of the
// preempted nexuses, which continue in that unit, and notifies them.
func TestPreemptAndAbortDuringReplace(t *testing.T) {
	r := newPRRig(t, setup{}).registered()
	r.ok(r.a, prReserve, writeExclusiveRO, prList(keyA, 0, 0))
	var ended []string
	r.a.OnPreempt(func(lun [8]byte, _ *Command) { ended = append(ended, fmt.Sprintf("%x", lun)) })
	list := prList(keyC, keyA, 0)
	c := Command{CDB: append(unhex("5f 05 05 0000 00000018 00"), make([]byte, 6)...)}
	if !r.c.Begin(&c) {
		t.Fatalf("PREEMPT AND ABORT: sense % x", c.Sense())
	}
	next := newRig(t, setup{}).unit
	r.inv.Replace(0, next)
	r.c.Consume(&c, list, 0)
	if r.c.End(&c); c.Status != StatusGood {
		t.Fatalf("PREEMPT AND ABORT: status %#x, sense % x", c.Status, c.Sense())
	}
	if !slices.Equal(ended, []string{"0000000000000000"}) {
		t.Errorf("commands were ended for %q", ended)
	}
	wantSense(t, r.on(r.a, "00", nil), 0x6, 0x28, 0x00)
	wantSense(t, r.on(r.a, "00", nil), 0x6, 0x2a, registrationsPreempted)
}

// SAM-5, section 4.7: LUN fields and what they address.
func TestLUNField(t *testing.T) {
	r := newRig(t, setup{})
	for _, id := range []uint16{1, 255, 256, 16383} {
		u := newRig(t, setup{}).unit
		if err := r.inv.Add(id, u); err != nil {
			t.Fatal(err)
		}
	}
	n := r.inv.NewNexus(testPort)
	for _, s := range []struct {
		field string
		id    int // -1: no logical unit
	}{
		{"0000 0000 0000 0000", 0},
		{"0001 0000 0000 0000", 1},
		{"00ff 0000 0000 0000", 255},
		{"4000 0000 0000 0000", 0}, // flat space addressing
		{"4001 0000 0000 0000", 1},
		{"4100 0000 0000 0000", 256},
		{"7fff 0000 0000 0000", 16383},
		{"0100 0000 0000 0000", -1}, // bus 1
		{"0002 0000 0000 0000", -1},
		{"8001 0000 0000 0000", -1}, // logical unit addressing
		{"c101 0000 0000 0000", -1}, // REPORT LUNS well known logical unit
		{"0001 0001 0000 0000", -1}, // two levels
		{"0000 0000 0000 0001", -1},
	} {
		f := [8]byte(unhex(s.field))
		l := n.find(f)
		if s.id < 0 {
			if l != nil || n.LUNExists(f) || n.SameUnit(f, f) {
				t.Errorf("%s addresses LUN %d", s.field, l.id)
			}
			continue
		}
		if l == nil || int(l.id) != s.id || !n.LUNExists(f) || !n.SameUnit(f, EncodeLUN(l.id)) {
			t.Errorf("%s does not address LUN %d", s.field, s.id)
		}
	}
	if n.SameUnit([8]byte{0, 1}, [8]byte{}) {
		t.Error("LUN 1 and LUN 0 are taken for the same unit")
	}
}

// SAM-5, section 5.13: commands for a LUN that does not exist.
func TestAbsentLUN(t *testing.T) {
	r := newRig(t, setup{})
	lun := [8]byte{0, 5}
	for _, row := range commands {
		t.Run(row.name, func(t *testing.T) {
			cdb := rowCDB(&row)
			res := doCDB(r.nexus, &r.c, lun, cdb, nil, all)
			if row.flags&absentLUN == 0 {
				wantSense(t, res, 0x5, 0x25, 0x00)
				return
			}
			wantGood(t, row.name, res)
		})
	}
	wantSense(t, do(r.nexus, &r.c, lun, "ff", nil, all), 0x5, 0x25, 0x00)
	wantSense(t, do(r.nexus, &r.c, lun, "12 01 80 00ff 00", nil, all), 0x5, 0x25, 0x00)

	res := do(r.nexus, &r.c, lun, "12 00 00 00ff 00", nil, all)
	if len(res.in) != 96 || res.in[0] != 0x7f {
		t.Errorf("INQUIRY % x, want PERIPHERAL QUALIFIER 011b and type 1Fh", res.in)
	}
	res = do(r.nexus, &r.c, lun, "03 00 0000 ff 00", nil, all)
	wantBytes(t, res.in, unhex("70 00 05 00000000 0a 00000000 25 00 00 000000"))
}
