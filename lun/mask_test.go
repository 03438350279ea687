package lun

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
)

// maskFor returns a mask with that access for initiators with that ending, and ReadWrite for
// others.
func maskFor(ending string, access Access) Mask {
	return func(initiator string) Access {
		if strings.HasSuffix(initiator, ending) {
			return access
		}
		return ReadWrite
	}
}

// A masked logical unit does not exist (SPC-4, sections 6.6.2 and 6.33; SAM-5, section 5.11),
// neither for commands nor for task management.
func TestMaskedUnit(t *testing.T) {
	r := newRig(t, setup{})
	inv := NewInventory()
	for id, u := range []*Unit{r.unit, newRig(t, setup{}).unit, newRig(t, setup{}).unit} {
		if err := inv.AddMasked(uint16(id), u, map[int]Mask{1: maskFor(":c", NoAccess), 2: maskFor(":a", NoAccess)}[id]); err != nil {
			t.Fatal(err)
		}
	}
	if err := inv.AddMasked(1, r.unit, nil); err == nil {
		t.Error("LUN 1 was added twice")
	}
	upper := portC
	upper.InitiatorName = "IQN.2026-11.io.example:C"
	for _, s := range []struct {
		port Port
		hide byte
		list string
	}{
		{portA, 2, "00000010 00000000 0000000000000000 0001000000000000"},
		{portC, 1, "00000010 00000000 0000000000000000 0002000000000000"},
		{upper, 1, "00000010 00000000 0000000000000000 0002000000000000"},
	} {
		n := inv.NewNexus(s.port)
		on := func(lun byte, cdb string) result { return do(n, &r.c, [8]byte{1: lun}, cdb, nil, all) }
		res := on(s.hide, "a0 00 00 000000 000000ff 00 00")
		wantGood(t, "REPORT LUNS", res)
		wantBytes(t, res.in, unhex(s.list))
		if res := on(s.hide, "12 00 00 00ff 00"); res.in[0] != 0x7f {
			t.Errorf("%s: byte 0 of INQUIRY is %#x", s.port.InitiatorName, res.in[0])
		}
		wantSense(t, on(s.hide, "12 01 83 00ff 00"), 0x5, 0x25, 0x00)
		for i := range commands {
			row := &commands[i]
			if row.flags&absentLUN == 0 {
				wantSense(t, doCDB(n, &r.c, [8]byte{1: s.hide}, rowCDB(row), rowData, all), 0x5, 0x25, 0x00)
			}
		}
		hidden := [8]byte{1: s.hide}
		if n.LUNExists(hidden) || n.SameUnit(hidden, hidden) || !n.LUNExists([8]byte{}) {
			t.Errorf("%s: LUN %d is there for task management", s.port.InitiatorName, s.hide)
		}
		n.Close()
	}
}

// Commands that change the medium or the unit are refused to initiators with read-only access, and to
// no others.
func TestReadOnlyNexus(t *testing.T) {
	r := newRig(t, setup{opt: Options{Sanitize: true, Removable: true}})
	inv := NewInventory()
	if err := inv.AddMasked(0, r.unit, maskFor(":c", ReadOnly)); err != nil {
		t.Fatal(err)
	}
	enter := func(p Port) *Nexus {
		n := inv.NewNexus(p)
		wantSense(t, do(n, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x29, 0x00)
		n.list()[0].copies.begin(0, &copyStatus{}, &Command{})
		return n
	}
	n, a := enter(portC), enter(portA)
	for _, row := range rowsFor(r.unit) {
		res := doCDB(n, &r.c, [8]byte{}, rowCDB(row), rowData, all)
		if row.flags&(writes|changes) != 0 && !row.endsOwn(rowCDB(row)) {
			wantSense(t, res, 0x7, 0x27, 0x00)
		} else {
			wantDone(t, row, res)
		}
	}
	for _, op := range []backendtest.Op{backendtest.WriteAt, backendtest.WriteDurable, backendtest.Discard, backendtest.Zero} {
		if calls := r.store.Calls(op); calls != 0 {
			t.Errorf("%v was called %d times", op, calls)
		}
	}
	const wpBit = 0x80
	for _, s := range []struct {
		n    *Nexus
		want byte
	}{{n, wpBit}, {a, 0}} {
		if got := do(s.n, &r.c, [8]byte{}, "1a 00 3f 00 ff 00", nil, all).in[2] & wpBit; got != s.want {
			t.Errorf("MODE SENSE(6) of %s: WP %#x, want %#x", s.n.name.initiator, got, s.want)
		}
		if got := do(s.n, &r.c, [8]byte{}, "5a 00 3f 00 000000 00ff 00", nil, all).in[3] & wpBit; got != s.want {
			t.Errorf("MODE SENSE(10) of %s: WP %#x, want %#x", s.n.name.initiator, got, s.want)
		}
	}
	wantGood(t, "WRITE(10) of another", do(a, &r.c, [8]byte{}, "2a 00 00000000 00 0001 00", make([]byte, 512), all))
}

// An initiator with read-only access can register, because otherwise a cluster node could not read
// behind a reservation of registrants only. It changes no registration of another and no reservation.
func TestReaderMayRegister(t *testing.T) {
	kept, err := OpenReservations(filepath.Join(t.TempDir(), "reservations.json"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kept.Close() })
	r := newPRRig(t, setup{opt: Options{Reservations: kept}})
	if err := r.inv.SetMask(0, maskFor(":c", ReadOnly)); err != nil {
		t.Fatal(err)
	}
	wantSense(t, r.on(r.c, "00", nil), 0x6, 0x2a, 0x01)
	const read, write = "28 00 00000000 00 0001 00", "2a 00 00000000 00 0001 00"
	refused := func(sa, scopeType byte, list []byte) {
		t.Helper()
		wantSense(t, r.out(r.c, sa, scopeType, list), 0x7, 0x27, 0x00)
	}
	r.ok(r.a, prRegister, 0, prList(0, keyA, 1)) // APTPL
	r.ok(r.a, prReserve, 6, prList(keyA, 0, 0))  // Exclusive Access - Registrants Only
	wantConflict(t, "READ(10)", r.on(r.c, read, nil))
	refused(prRegister, 0, prList(0, keyC, 0)) // without APTPL, which is about all registrations
	refused(prRegister, 0, portList(0, keyC, 1, unhex(strings.Replace(transportIDC, "3a63", "3a64", 1))))
	r.ok(r.c, prRegister, 0, prList(0, keyC, 1))
	wantGood(t, "READ(10)", r.on(r.c, read, nil))
	wantSense(t, r.on(r.c, write, make([]byte, 512)), 0x7, 0x27, 0x00)
	for sa, list := range map[byte][]byte{
		prReserve: prList(keyC, 0, 0), prClear: prList(keyC, 0, 0), prPreempt: prList(keyC, keyA, 0),
		prPreemptAndAbort: prList(keyC, keyA, 0), prRegisterAndMove: moveList(keyC, keyC, 0, unhex(transportIDC)),
	} {
		refused(sa, 6, list)
	}
	r.ok(r.c, prRelease, 6, prList(keyC, 0, 0)) // it holds nothing
	r.wantReservation(6, keyA)
	r.ok(r.c, prRegister, 0, prList(keyC, 0, 0)) // unregisters, also without APTPL
	if !r.unit.Reservation().APTPL {
		t.Error("a reader took the persistence from others")
	}

	r.ok(r.a, prRelease, 6, prList(keyA, 0, 0))
	r.ok(r.a, prReserve, 7, prList(keyA, 0, 0)) // Write Exclusive - All Registrants
	r.ok(r.c, prRegisterAndIgnore, 0, prList(0, keyC, 1))
	refused(prRelease, 7, prList(keyC, 0, 0)) // it holds the reservation, but so do others
	wantGood(t, "WRITE(10) of the writer", r.on(r.a, write, make([]byte, 512)))
	r.wantReservation(7, 0)
	r.wantKeys(keyA, keyC)
}

// An initiator that loses the right to write keeps what it holds, and can end it.
func TestReaderEndsItsOwn(t *testing.T) {
	r := newPRRig(t, setup{opt: everything})
	const read, eject, load = "28 00 00000000 00 0001 00", "1b 00 0000 02 00", "1b 00 0000 03 00"
	wantGood(t, "RESERVE(6)", r.on(r.c, "16 00 00 00 00 00", nil))
	wantGood(t, "PREVENT", r.on(r.c, "1e 00 0000 01 00", nil))
	if err := r.inv.SetMask(0, maskFor(":c", ReadOnly)); err != nil {
		t.Fatal(err)
	}
	wantSense(t, r.on(r.c, "00", nil), 0x6, 0x2a, 0x01)
	wantConflict(t, "READ(10)", r.on(r.a, read, nil))
	wantGood(t, "RELEASE(6)", r.on(r.c, "17 00 00 00 00 00", nil))
	wantGood(t, "READ(10)", r.on(r.a, read, nil))
	wantSense(t, r.on(r.a, eject, nil), 0x5, 0x53, 0x02)
	wantGood(t, "ALLOW", r.on(r.c, "1e 00 0000 00 00", nil))
	wantSense(t, r.on(r.c, "1e 00 0000 01 00", nil), 0x7, 0x27, 0x00)
	wantGood(t, "eject", r.on(r.a, eject, nil))
	wantSense(t, r.on(r.c, load, nil), 0x7, 0x27, 0x00)
	wantGood(t, "load", r.on(r.a, load, nil))
}

// A LUN that is read-only for everybody has no writers to protect: its state can be changed.
func TestReadOnlyUnitCanBeReserved(t *testing.T) {
	r := newPRRig(t, setup{opt: Options{ReadOnly: true, Removable: true}})
	wantGood(t, "RESERVE(6)", r.on(r.a, "16 00 00 00 00 00", nil))
	wantGood(t, "RELEASE(6)", r.on(r.a, "17 00 00 00 00 00", nil))
	wantGood(t, "eject", r.on(r.a, "1b 00 0000 02 00", nil))
	wantGood(t, "load", r.on(r.a, "1b 00 0000 03 00", nil))
	r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
	r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
}

// EXTENDED COPY writes where WRITE could, and finds only what the initiator sees.
func TestCopyRespectsMasks(t *testing.T) {
	r := newCopyRig(t, setup{}, setup{})
	for _, s := range []struct {
		access Access
		want   func(res result)
	}{
		{ReadWrite, func(res result) { wantGood(t, "EXTENDED COPY", res) }},
		{ReadOnly, func(res result) { wantCopyAborted(t, res, 0x0d, 0x01, 0) }},
		{NoAccess, func(res result) { wantCopyAborted(t, res, 0x0d, 0x02, 0) }},
	} {
		inv := NewInventory()
		if err := inv.Add(0, r.unit); err != nil {
			t.Fatal(err)
		}
		if err := inv.AddMasked(1, r.other.unit, maskFor("", s.access)); err != nil {
			t.Fatal(err)
		}
		r.nexus = inv.NewNexus(portA)
		do(r.nexus, &r.c, [8]byte{}, "00", nil, all)
		s.want(r.copy(copyList(0x21, 0, []string{cscdZero, cscdOne}, []string{blocks(0, 1, 1, 0, 0)})))
	}
}

// A RESERVE that began before a mask takes the unit away reserves nothing: nobody would ever end
// it.
func TestReserveDuringMaskChange(t *testing.T) {
	r := newPRRig(t, setup{})
	c := Command{CDB: append(unhex("16 00 0000 00 00"), make([]byte, 10)...)}
	if !r.c.Begin(&c) {
		t.Fatalf("RESERVE(6): sense % x", c.Sense())
	}
	if err := r.inv.SetMask(0, maskFor(":c", NoAccess)); err != nil {
		t.Fatal(err)
	}
	r.c.End(&c)
	wantSense(t, result{status: c.Status, sense: c.Sense()}, 0x5, 0x25, 0x00)
	wantGood(t, "WRITE(10)", r.on(r.a, "2a 00 00000000 00 0001 00", make([]byte, 512)))
}
