package lun

import (
	"testing"

	"github.com/iser-target/iser-target/backend"
)

// A unit without a store reports its identity and is NOT READY. The next command finds the unit
// that takes its place (SAM-5, section 5.14; SPC-4, section 5.6).
func TestAbsentUnitIsNotReady(t *testing.T) {
	r := newRig(t, setup{})
	u, err := NewAbsent(0, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	r.add(1, u)
	one := [8]byte{0, 1}
	run := func(cdb string, out []byte) result { return do(r.nexus, &r.c, one, cdb, out, all) }
	wantSense(t, run("00", nil), 0x6, 0x29, 0x00)
	wantSense(t, run("00", nil), 0x6, 0x3f, 0x0e)
	for _, cdb := range []string{
		"00", "25", "28 00 00000000 00 0001 00", "1a 00 3f 00 ff 00", "5e 00 00000000 00 0100 00", "9e10 0000000000000000 00000020 00 00", "1b 00 00 00 01 00",
		"42 00 00000000 00 0000 00", "48 03 00000000 00 0000 00", "9c 00 0000000000000000 0000 0001 00 00", // of those that not all units have
	} {
		wantSense(t, run(cdb, nil), 0x2, 0x04, 0x03) // MANUAL INTERVENTION REQUIRED
	}
	wantSense(t, run("ff", nil), 0x5, 0x20, 0x00)
	if got := run("03 00 00 00 ff 00", nil).in; got[2] != 0x2 || got[12] != 0x04 || got[13] != 0x03 {
		t.Errorf("REQUEST SENSE: % x", got)
	}
	if !u.Absent() || u.Status() != "store is absent" {
		t.Errorf("status %q", u.Status())
	}
	for _, cdb := range []string{"12 00 00 00ff 00", "12 01 80 00ff 00", "a0 00 00 000000 00000100 00 00", "03 00 00 00 ff 00"} {
		wantGood(t, cdb, run(cdb, nil))
	}
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	full, err := New(m, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	var events int
	r.nexus.OnEvent(func([8]byte, []byte) { events++ })
	if old := r.inv.Replace(1, full); old != u || r.inv.Unit(1) != full {
		t.Error("another unit was replaced")
	}
	if r.inv.Replace(2, full) != nil {
		t.Error("what is not there was replaced")
	}
	if events != 1 {
		t.Errorf("%d events", events)
	}
	wantSense(t, run("00", nil), 0x6, 0x28, 0x00) // NOT READY TO READY CHANGE, MEDIUM MAY HAVE CHANGED
	wantGood(t, "TEST UNIT READY", run("00", nil))
	wantGood(t, "WRITE(10)", run("2a 00 00000000 00 0001 00", make([]byte, 512)))
	full.raise(condModeChanged, nil)
	wantSense(t, run("00", nil), 0x6, 0x2a, 0x01) // it knows the nexus, and the old one does not
	if len(u.seen) != 0 {
		t.Error("the old unit still has nexuses")
	}
}

// A unit whose store is about to open is BECOMING READY, and so are commands that end because of
// that: initiators try again.
func TestOpeningUnitIsBecomingReady(t *testing.T) {
	r := newRig(t, setup{})
	between, err := NewOpening(512, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	late := Command{CDB: unhex("28 00 00000000 00 0001 00 000000000000")}
	if !r.nexus.Begin(&late) {
		t.Fatalf("status %#x", late.Status)
	}
	if r.inv.Replace(0, between) != r.unit {
		t.Error("another unit was replaced")
	}
	if err := r.unit.Close(); err != nil {
		t.Fatal(err)
	}
	if r.nexus.Produce(&late, make([]byte, 512), 0) {
		t.Error("READ of a closed store")
	}
	wantSense(t, result{status: late.Status, sense: late.Sense()}, 0x2, 0x04, 0x01)
	wantSense(t, r.run("00", nil), 0x6, 0x28, 0x00)
	for _, cdb := range []string{"00", "28 00 00000000 00 0001 00", "42 00 00000000 00 0000 00"} {
		wantSense(t, r.run(cdb, nil), 0x2, 0x04, 0x01)
	}
	if got := r.run("03 00 00 00 ff 00", nil).in; got[2] != 0x2 || got[12] != 0x04 || got[13] != 0x01 {
		t.Errorf("REQUEST SENSE: % x", got)
	}
	if !between.Absent() || between.Status() != "store is being opened" {
		t.Errorf("status %q", between.Status())
	}
}
