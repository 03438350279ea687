package lun

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// portA2 is portA's initiator port on the second target port, 0102h.
var portA2 = Port{InitiatorName: portA.InitiatorName, ISID: portA.ISID, TargetName: portA.TargetName, TPGT: 0x0102}

// newPortsRig returns a prRig whose target has the ports 1 and 0102h; a2 is portA2.
func newPortsRig(t *testing.T, opt Options) (r *prRig, a2 *Nexus) {
	r = &prRig{rig: newRig(t, setup{opt: opt})}
	inv := NewInventory(0x0102, 1, 0x0102)
	if err := inv.Add(0, r.unit); err != nil {
		t.Fatal(err)
	}
	r.inv = inv
	r.see = r.enter(testPort)
	r.a, r.b, r.c = r.enter(portA), r.enter(portB), r.enter(portC)
	return r, r.enter(portA2)
}

// A portal group is a target port: its tag is the relative target port identifier, and its name
// ends with it.
func TestTargetPorts(t *testing.T) {
	r, a2 := newPortsRig(t, Options{})
	if got := r.on(r.a, "12 00 00 00ff 00", nil).in[6]; got != 0x10 {
		t.Errorf("MULTIP: byte 6 is %#02x", got)
	}
	for _, s := range []struct {
		n    *Nexus
		port uint16
		name string
	}{
		{r.a, 1, "iqn.2026-11.io.example:store,t,0x0001"},     // ISCSI-4.4.2-1
		{a2, 0x0102, "iqn.2026-11.io.example:store,t,0x0102"}, // ISCSI-4.4.2-1
	} {
		page := r.on(s.n, "12 01 83 00ff 00", nil).in
		for _, header := range []string{"51 94 0004 0000", "51 95 0004 0000"} { // relative port, port group
			if want := append(unhex(header), byte(s.port>>8), byte(s.port)); !bytes.Contains(page, want) {
				t.Errorf("port %#x: no % x in % x", s.port, want, page)
			}
		}
		// SET UTF-8, PIV, target port, SCSI name string of 40 bytes.
		if want := append(unhex("53 98 00 28"), s.name+"\x00\x00\x00"...); !bytes.Contains(page, want) {
			t.Errorf("port %#x: no %q in %q", s.port, want, page)
		}
		wantBytes(t, r.on(s.n, "a3 0a 00000000 000000ff 00 00", nil).in, unhex(`
			00000018
			00 0f 0001 00 00 00   # active/optimized; supported are unavailable, standby, both active states
			01                    # TARGET PORT COUNT
			0000 0001
			00 0f 0102 00 00 00 01 0000 0102`))
		wantBytes(t, r.on(s.n, "12 01 88 00ff 00", nil).in, unhex(`
			00 88 0070
			0000 0001             # RELATIVE PORT IDENTIFIER
			0000 0000             # no initiator port
			0000 002c             # TARGET PORT DESCRIPTORS LENGTH
			53 98 00 28
			69716e2e 323032362d31312e 696f2e6578616d706c65 3a73746f7265 2c742c307830303031 000000
			0000 0102 0000 0000 0000 002c 53 98 00 28
			69716e2e 323032362d31312e 696f2e6578616d706c65 3a73746f7265 2c742c307830313032 000000`))
	}
}

// SPC-4, sections 5.13.1 and 5.13.7: a registration and a reservation belong to
// an I_T nexus, so to the target port as well.
func TestReservationsOfTargetPorts(t *testing.T) {
	write := func(r *prRig, n *Nexus) result { return r.on(n, "2a 00 00000000 00 0001 00", make([]byte, 512)) }
	t.Run("one target port", func(t *testing.T) {
		r, a2 := newPortsRig(t, Options{})
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
		r.wantKeys(keyA)
		wantConflict(t, "RESERVE through the other port", r.out(a2, prReserve, 1, prList(keyA, 0, 0)))
		r.ok(r.a, prReserve, 5, prList(keyA, 0, 0))
		wantConflict(t, "WRITE(10) through the other port", write(r, a2))
		wantGood(t, "WRITE(10)", write(r, r.a))
		r.ok(a2, prRegister, 0, prList(0, keyB, 0))
		r.wantKeys(keyA, keyB)
		wantGood(t, "WRITE(10) of a registrant", write(r, a2))
		full := r.in(r.see, prReadFullStatus)
		if p1, p2 := binary.BigEndian.Uint16(full[8+18:]), binary.BigEndian.Uint16(full[8+24+48+18:]); p1 != 1 || p2 != 0x0102 {
			t.Errorf("RELATIVE TARGET PORT IDENTIFIER %#x and %#x", p1, p2)
		}
		// The unit attention is for the other nexus of the same initiator port.
		r.ok(r.a, prPreempt, 5, prList(keyA, keyB, 0))
		r.wantAttention(a2, registrationsPreempted)
		r.wantAttention(r.a, 0)
		wantConflict(t, "WRITE(10) after PREEMPT", write(r, a2))
	})
	t.Run("ALL_TG_PT", func(t *testing.T) {
		k := newKeeping(t)
		k.start()
		r, a2 := newPortsRig(t, Options{Reservations: k.held})
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0x05))
		r.wantKeys(keyA, keyA)
		full := r.in(r.see, prReadFullStatus)
		if n := len(full) - 8; n != 24+48 || full[8+12] != 0x02 {
			t.Errorf("one descriptor with ALL_TG_PT for all ports, not % x", full)
		}
		r.ok(a2, prReserve, 1, prList(keyA, 0, 0))
		wantConflict(t, "WRITE(10), Write Exclusive of the other nexus", write(r, r.a))
		wantGood(t, "WRITE(10) of the holder", write(r, a2))
		if full := r.in(r.see, prReadFullStatus); len(full)-8 != 2*(24+48) || full[8+12] != 0 || full[8+24+48+12] != 0x01 || full[8+24+48+19] != 0x02 {
			t.Errorf("one of the two nexuses holds: % x", full)
		}

		// Both survive a restart, and the same one holds.
		k.held.Close()
		var err error
		if k.held, err = OpenReservations(k.path); err != nil {
			t.Fatal(err)
		}
		r, a2 = newPortsRig(t, Options{Reservations: k.held})
		r.wantKeys(keyA, keyA)
		wantConflict(t, "WRITE(10) after the restart", write(r, r.a))
		wantGood(t, "WRITE(10) of the holder after the restart", write(r, a2))

		// Another key for one nexus, then for all.
		r.ok(r.a, prRegister, 0, prList(keyA, keyB, 0))
		r.wantKeys(keyA, keyB)
		wantConflict(t, "REGISTER with ALL_TG_PT where another nexus has another key", r.out(r.a, prRegister, 0, prList(keyB, keyC, 0x04)))
		r.ok(r.a, prRegisterAndIgnore, 0, prList(0, keyC, 0x04))
		r.wantKeys(keyC, keyC)
		r.ok(a2, prRegister, 0, prList(keyC, 0, 0))
		r.wantKeys(keyC)
		r.wantReservation(0, 0)
		r.ok(a2, prRegister, 0, prList(0, keyC, 0))
		r.ok(a2, prRegister, 0, prList(keyC, 0, 0x04))
		r.wantKeys()
	})
	t.Run("SPEC_I_PT and ALL_TG_PT", func(t *testing.T) {
		r, a2 := newPortsRig(t, Options{})
		r.ok(r.c, prRegister, 0, prList(0, keyC, 0))
		list := portList(0, keyA, 0x04, unhex(transportIDC))
		wantListBit(t, r.out(a2, prRegister, 0, list), 28, noField) // c is registered with one of the target ports
		r.wantKeys(keyC)
		r.ok(r.c, prRegister, 0, prList(keyC, 0, 0))
		r.ok(a2, prRegister, 0, list)
		r.wantKeys(keyA, keyA, keyA, keyA)
		r.ok(a2, prReserve, 3, prList(keyA, 0, 0))
	})
	t.Run("SPEC_I_PT", func(t *testing.T) {
		r, a2 := newPortsRig(t, Options{})
		r.ok(a2, prRegister, 0, portList(0, keyA, 0, unhex(transportIDC)))
		r.wantKeys(keyA, keyA)
		wantConflict(t, "c is registered with the other port", r.out(r.c, prReserve, 1, prList(keyA, 0, 0)))
		p := portC
		p.TPGT = 0x0102
		r.ok(r.enter(p), prReserve, 1, prList(keyA, 0, 0))
	})
	t.Run("REGISTER AND MOVE", func(t *testing.T) {
		r, a2 := newPortsRig(t, Options{})
		idA := r.a.name.initiator.appendTransportID(nil)
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
		r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
		absent := moveList(keyA, keyB, 0, idA)
		absent[19] = 3
		wantListBit(t, r.out(r.a, prRegisterAndMove, 0, absent), 18, noField)
		wantListBit(t, r.out(r.a, prRegisterAndMove, 0, moveList(keyA, keyB, 0, idA)), 24, noField) // to itself
		own := moveList(keyA, keyB, 0, idA)
		own[18], own[19] = 1, 2
		wantListBit(t, r.out(r.a, prRegisterAndMove, 0, own), 24, noField) // nor through another target port
		other := moveList(keyA, keyB, 0, unhex(transportIDC))
		other[18], other[19] = 1, 2
		r.ok(r.a, prRegisterAndMove, 0, other)
		wantConflict(t, "WRITE(10) after the move", write(r, r.a))
		wantConflict(t, "WRITE(10) through the same target port", write(r, a2))
		wantConflict(t, "WRITE(10) through another target port", write(r, r.c))
		p := portC
		p.TPGT = 0x0102
		wantGood(t, "WRITE(10) of the new holder", write(r, r.enter(p)))
		r.wantKeys(keyA, keyB)
	})
}
