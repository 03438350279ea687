package lun

import (
	"encoding/binary"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/security/limits"
)

// SPC-4, section 5.13.7: REGISTER and REGISTER AND IGNORE EXISTING KEY.
func TestRegister(t *testing.T) {
	r := newPRRig(t, setup{})
	wantConflict(t, "a key without registration", r.out(r.a, prRegister, 0, prList(keyA, keyB, 0)))
	r.ok(r.a, prRegister, 0, prList(0, 0, 0)) // nothing to do
	r.wantKeys()
	r.ok(r.a, prRegister, 0xf7, prList(0, keyA, 0)) // SCOPE and TYPE do not count
	r.wantKeys(keyA)
	wantConflict(t, "key 0", r.out(r.a, prRegister, 0, prList(0, keyB, 0)))
	wantConflict(t, "another key", r.out(r.a, prRegister, 0, prList(keyB, keyC, 0)))
	r.wantKeys(keyA)
	before := r.generation()
	r.ok(r.a, prRegister, 0, prList(keyA, keyB, 0))
	r.wantKeys(keyB)
	r.ok(r.a, prRegisterAndIgnore, 0, prList(1, keyC, 0))
	r.wantKeys(keyC)
	r.ok(r.c, prRegisterAndIgnore, 0, prList(keyC, keyC, 0)) // a key may be there twice
	r.wantKeys(keyC, keyC)
	r.ok(r.c, prRegisterAndIgnore, 0, prList(0, 0, 0))
	r.ok(r.c, prRegisterAndIgnore, 0, prList(0, 0, 0))
	r.ok(r.a, prRegister, 0, prList(keyC, 0, 0))
	r.wantKeys()
	if n := r.generation() - before; n != 6 {
		t.Errorf("PRGENERATION grew by %d, want 6", n)
	}
	for _, n := range []*Nexus{r.a, r.b, r.c} {
		r.wantAttention(n, 0)
	}
}

// A registration belongs to name and ISID: another session of the initiator does not have it, and
// a later session with the same ISID does.
func TestRegistrationIsOfThePort(t *testing.T) {
	r := newPRRig(t, setup{})
	r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
	wantConflict(t, "another ISID", r.out(r.b, prReserve, 1, prList(keyA, 0, 0)))
	wantConflict(t, "another name", r.out(r.c, prReserve, 1, prList(keyA, 0, 0)))
	r.a.Close()
	p := portA
	p.InitiatorName = strings.ToUpper(p.InitiatorName)
	r.a = r.enter(p)
	r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
}

// The parameter list and the fields of the CDB.
func TestPersistentReserveOutErrors(t *testing.T) {
	r := newPRRig(t, setup{}).registered()
	idC := unhex(transportIDC)
	for n := range prListLen {
		wantSense(t, r.out(r.a, prRegister, 0, make([]byte, n)), 0x5, 0x1a, 0x00)
	}
	wantSense(t, r.out(r.a, prRegister, 0, make([]byte, 25)), 0x5, 0x1a, 0x00)
	wantSense(t, r.on(r.a, "5f 00 00 0000 00010001 00", nil), 0x5, 0x1a, 0x00)
	wantSense(t, r.on(r.a, "5f 00 00 0000 00000018 00", make([]byte, 23)), 0x5, 0x0e, 0x03)
	wantSense(t, r.on(r.a, "5f 00 00 0000 00000018 00", nil), 0x5, 0x0e, 0x03)
	for sa := byte(1); sa <= prRegisterAndIgnore; sa++ {
		wantListBit(t, r.out(r.a, sa, 1, prList(keyA, 0, 0x08)), 20, 3) // SPEC_I_PT
	}
	for _, sa := range []byte{prRegister, prRegisterAndIgnore} {
		wantListBit(t, r.out(r.a, sa, 0, prList(keyA, keyA, 0x01)), 20, 0) // APTPL without a file
	}
	r.ok(r.a, prClear, 0, prList(keyA, 0, 0x01)) // which does not look at it
	r.wantAttention(r.b, reservationsPreempted)
	r.wantAttention(r.c, reservationsPreempted)
	r.registered()

	for _, typ := range []byte{0, 2, 4, 9, 15} {
		wantField(t, r.out(r.a, prReserve, typ, prList(keyA, 0, 0)), 2, 3)
	}
	wantField(t, r.out(r.a, prReserve, 0x11, prList(keyA, 0, 0)), 2, 7)
	for sa := byte(1); sa <= prRegisterAndMove; sa++ {
		if sa != prRegisterAndIgnore {
			list := prList(keyB, keyB, 0)
			if sa == prRegisterAndMove {
				list = moveList(keyB, keyB, 0, idC)
			}
			wantConflict(t, "another key", r.out(r.a, sa, 1, list))
		}
	}
	wantListBit(t, r.out(r.a, prRegisterAndMove, 0, moveList(keyA, keyA, 1, idC)), 17, 0)
	r.wantReservation(0, 0)
	r.wantKeys(keyA, keyB, keyC)
}

// SPC-4, sections 5.13.9 and 5.13.11.2.2: RESERVE and RELEASE.
func TestReserveAndRelease(t *testing.T) {
	for _, typ := range types {
		t.Run(fmt.Sprintf("type %d", typ), func(t *testing.T) {
			r := newPRRig(t, setup{}).registered()
			before := r.generation()
			allHold, roOrAR := typ >= 7, typ >= 5
			key := uint64(keyA)
			if allHold {
				key = 0
			}
			r.ok(r.a, prRelease, typ, prList(keyA, 0, 0)) // nothing to release
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
			r.wantReservation(typ, key)
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0)) // again
			for _, other := range types {
				if other != typ {
					wantConflict(t, "another type", r.out(r.a, prReserve, other, prList(keyA, 0, 0)))
					wantSense(t, r.out(r.a, prRelease, other, prList(keyA, 0, 0)), 0x5, 0x26, 0x04)
				}
			}
			wantSense(t, r.out(r.a, prRelease, 0x10|typ, prList(keyA, 0, 0)), 0x5, 0x26, 0x04)
			if res := r.out(r.b, prReserve, typ, prList(keyB, 0, 0)); allHold {
				wantGood(t, "RESERVE of another holder", res)
			} else {
				wantConflict(t, "RESERVE of another nexus", res)
				r.ok(r.b, prRelease, typ, prList(keyB, 0, 0)) // of no effect
			}
			r.wantReservation(typ, key)
			for _, n := range []*Nexus{r.a, r.b, r.c} {
				r.wantAttention(n, 0)
			}
			r.ok(r.a, prRelease, typ, prList(keyA, 0, 0))
			r.wantReservation(0, 0)
			r.wantAttention(r.a, 0)
			for _, n := range []*Nexus{r.b, r.c} {
				if roOrAR {
					r.wantAttention(n, reservationsReleased)
				}
				r.wantAttention(n, 0)
			}
			if r.generation() != before {
				t.Error("PRGENERATION has changed")
			}
		})
	}
}

// SPC-4, section 5.13.11.2.3: a holder that unregisters releases its reservation.
func TestUnregisteringHolderReleases(t *testing.T) {
	for _, typ := range types {
		t.Run(fmt.Sprintf("type %d", typ), func(t *testing.T) {
			r := newPRRig(t, setup{}).registered()
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
			r.ok(r.b, prRegister, 0, prList(keyB, 0, 0)) // no holder, or one of many
			r.ok(r.a, prRegister, 0, prList(keyA, 0, 0))
			r.wantAttention(r.a, 0)
			r.wantAttention(r.b, 0) // no longer registered
			switch {
			case typ >= 7:
				r.wantReservation(typ, 0)
				r.wantAttention(r.c, 0)
				r.ok(r.c, prRegister, 0, prList(keyC, 0, 0))
			case typ >= 5:
				r.wantAttention(r.c, reservationsReleased)
			default:
				r.wantAttention(r.c, 0)
			}
			r.wantReservation(0, 0)
		})
	}
}

// SPC-4, section 5.13.11.2.7.
func TestClear(t *testing.T) {
	for _, typ := range append(types, 0) {
		r := newPRRig(t, setup{}).registered()
		if typ != 0 {
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
		}
		before := r.generation()
		r.ok(r.b, prClear, 0xff, prList(keyB, 0x1234, 0))
		if r.generation() != before+1 {
			t.Error("PRGENERATION was not incremented once")
		}
		r.wantReservation(0, 0)
		r.wantKeys()
		r.wantAttention(r.a, reservationsPreempted)
		r.wantAttention(r.b, 0)
		r.wantAttention(r.c, reservationsPreempted)
		wantGood(t, "WRITE(10)", r.on(r.c, "2a 00 00000000 00 0001 00", make([]byte, 512)))
	}
}

// SPC-4, sections 5.13.11.2.4 to 5.13.11.2.6: what PREEMPT and PREEMPT AND ABORT from port B
// remove, and which nexuses they notify.
func TestPreempt(t *testing.T) {
	for name, s := range map[string]struct {
		typ      byte   // reservation of A
		sameKey  bool   // C has registered keyA too
		saKey    uint64 // of the command
		newType  byte
		keys     []uint64 // that are left
		want     byte     // reservation that is left
		wantKey  uint64
		a, c     byte // unit attentions
		conflict bool
		aborted  string // whose commands PREEMPT AND ABORT stops
	}{
		"registration, no reservation": {saKey: keyA, newType: 0xff, keys: []uint64{keyB, keyC}, a: registrationsPreempted, aborted: "a"},
		"two of one key":               {sameKey: true, saKey: keyA, keys: []uint64{keyB}, a: registrationsPreempted, c: registrationsPreempted, aborted: "ac"},
		"itself, no reservation":       {saKey: keyB, keys: []uint64{keyA, keyC}, aborted: "b"},
		"key of nobody":                {saKey: 5, newType: 1, conflict: true, keys: []uint64{keyA, keyB, keyC}},
		"key 0, no reservation":        {saKey: 0, newType: 1, conflict: true, keys: []uint64{keyA, keyB, keyC}},
		"not the holder":               {typ: 1, saKey: keyC, newType: 0xff, keys: []uint64{keyA, keyB}, want: 1, wantKey: keyA, c: registrationsPreempted, aborted: "c"},
		"holder":                       {typ: 1, saKey: keyA, newType: 1, keys: []uint64{keyB, keyC}, want: 1, wantKey: keyB, a: registrationsPreempted, aborted: "a"},
		"holder, two of one key":       {typ: 1, sameKey: true, saKey: keyA, newType: 1, keys: []uint64{keyB}, want: 1, wantKey: keyB, a: registrationsPreempted, c: registrationsPreempted, aborted: "ac"},
		"holder, new type":             {typ: 1, saKey: keyA, newType: 6, keys: []uint64{keyB, keyC}, want: 6, wantKey: keyB, a: registrationsPreempted, c: reservationsReleased, aborted: "a"},
		"holder, all registrants new":  {typ: 5, saKey: keyA, newType: 8, keys: []uint64{keyB, keyC}, want: 8, a: registrationsPreempted, c: reservationsReleased, aborted: "a"},
		"all registrants, by key 0":    {typ: 7, saKey: 0, newType: 3, keys: []uint64{keyB}, want: 3, wantKey: keyB, a: registrationsPreempted, c: registrationsPreempted, aborted: "ac"},
		"all registrants, one of them": {typ: 8, saKey: keyC, newType: 0xff, keys: []uint64{keyA, keyB}, want: 8, c: registrationsPreempted, aborted: "c"},
		"all registrants, itself":      {typ: 8, saKey: keyB, newType: 1, keys: []uint64{keyA, keyC}, want: 8, aborted: "b"},
		"all registrants, nobody":      {typ: 8, saKey: 5, newType: 1, conflict: true, keys: []uint64{keyA, keyB, keyC}, want: 8},
	} {
		for _, sa := range []byte{prPreempt, prPreemptAndAbort} {
			t.Run(fmt.Sprintf("%s/service action %d", name, sa), func(t *testing.T) {
				r := newPRRig(t, setup{}).registered()
				if s.sameKey {
					r.ok(r.c, prRegister, 0, prList(keyC, keyA, 0))
				}
				if s.typ != 0 {
					r.ok(r.a, prReserve, s.typ, prList(keyA, 0, 0))
				}
				var aborted []string
				for who, n := range map[string]*Nexus{"a": r.a, "b": r.b, "c": r.c} {
					n.OnPreempt(func(lun [8]byte, except *Command) {
						if lun != [8]byte{} || except != &r.rig.c || except.row.sa != prPreemptAndAbort {
							t.Errorf("commands for % x are stopped, except %v", lun, except.row)
						}
						// In force already: new commands are checked against it.
						if got := r.unit.reservations.persistent.typ; got != s.want {
							t.Errorf("type %d while commands are stopped, want %d", got, s.want)
						}
						aborted = append(aborted, who)
					})
				}
				before := r.generation()
				res := r.out(r.b, sa, s.newType, prList(keyB, s.saKey, 0))
				if s.conflict {
					wantConflict(t, name, res)
				} else {
					wantGood(t, name, res)
					before++
				}
				if got := r.generation(); got != before {
					t.Errorf("PRGENERATION %d, want %d", got, before)
				}
				r.wantAttention(r.a, s.a)
				r.wantAttention(r.b, 0)
				r.wantAttention(r.c, s.c)
				r.wantKeys(s.keys...)
				r.wantReservation(s.want, s.wantKey)
				slices.Sort(aborted)
				if got := strings.Join(aborted, ""); sa == prPreemptAndAbort && got != s.aborted || sa == prPreempt && got != "" {
					t.Errorf("commands of %q were stopped, want %q", got, s.aborted)
				}
			})
		}
	}
}

func TestPreemptErrors(t *testing.T) {
	r := newPRRig(t, setup{}).registered()
	r.ok(r.a, prReserve, 5, prList(keyA, 0, 0))
	wantListBit(t, r.out(r.b, prPreempt, 5, prList(keyB, 0, 0)), 8, noField)
	wantField(t, r.out(r.b, prPreempt, 2, prList(keyB, keyA, 0)), 2, 3)
	wantField(t, r.out(r.b, prPreempt, 0x15, prList(keyB, keyA, 0)), 2, 7)
	r.wantKeys(keyA, keyB, keyC)
	r.wantReservation(5, keyA)

	// A holder that preempts itself changes the type and stays registered.
	r.ok(r.a, prPreempt, 3, prList(keyA, keyA, 0))
	r.wantKeys(keyA, keyB, keyC)
	r.wantReservation(3, keyA)
	r.wantAttention(r.a, 0)
	r.wantAttention(r.b, reservationsReleased)
	r.wantAttention(r.c, reservationsReleased)
	r.ok(r.a, prPreempt, 8, prList(keyA, keyA, 0))
	r.wantReservation(8, 0)
	r.wantAttention(r.b, reservationsReleased)
	r.wantAttention(r.c, reservationsReleased)
	checkState(t, r)
	r.ok(r.a, prRelease, 8, prList(keyA, 0, 0))
	r.wantAttention(r.b, reservationsReleased)
	// A closed session has no commands, and needs no OnPreempt.
	r.c.Close()
	r.ok(r.a, prPreemptAndAbort, 3, prList(keyA, keyC, 0))
	r.ok(r.a, prPreemptAndAbort, 3, prList(keyA, keyB, 0))
	r.wantKeys(keyA)
}

// SPC-4, section 5.13.8.
func TestRegisterAndMove(t *testing.T) {
	idC := unhex(transportIDC)
	for _, typ := range []byte{1, 3, 5, 6} {
		r := newPRRig(t, setup{})
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
		r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
		before := r.generation()
		r.ok(r.a, prRegisterAndMove, 0xff, moveList(keyA, keyC, 0, idC))
		r.wantReservation(typ, keyC)
		r.wantKeys(keyA, keyC)
		r.ok(r.c, prRegisterAndMove, 0, moveList(keyC, keyB, 0x02, initiatorPort{portB.InitiatorName, portB.ISID}.appendTransportID(nil))) // UNREG
		r.wantReservation(typ, keyB)
		r.wantKeys(keyA, keyB)
		wantConflict(t, "WRITE(10)", r.on(r.c, "2a 00 00000000 00 0001 00", nil))
		wantGood(t, "WRITE(10)", r.on(r.b, "2a 00 00000000 00 0001 00", make([]byte, 512)))
		r.ok(r.b, prRegisterAndMove, 0, moveList(keyB, 7, 0x02, initiatorPort{portA.InitiatorName, portA.ISID}.appendTransportID(nil)))
		r.wantReservation(typ, 7)
		r.wantKeys(7)
		if got := r.generation(); got != before+3 {
			t.Errorf("PRGENERATION %d, want %d", got, before+3)
		}
		for _, n := range []*Nexus{r.a, r.b, r.c} {
			r.wantAttention(n, 0)
		}
	}

	r := newPRRig(t, setup{}).registered()
	move := func(list []byte) result { return r.out(r.a, prRegisterAndMove, 0, list) }
	wantField(t, move(moveList(keyA, keyC, 0, idC)), 1, 4) // no reservation
	r.ok(r.b, prReserve, 8, prList(keyB, 0, 0))
	wantConflict(t, "all registrants", move(moveList(keyA, keyC, 0, idC)))
	r.ok(r.b, prRelease, 8, prList(keyB, 0, 0))
	r.wantAttention(r.a, reservationsReleased)
	r.ok(r.b, prReserve, 1, prList(keyB, 0, 0))
	wantConflict(t, "who does not hold the reservation", move(moveList(keyA, keyC, 0, idC)))
	r.ok(r.b, prRelease, 1, prList(keyB, 0, 0))
	r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
	wantListBit(t, move(moveList(keyA, 0, 0, idC)), 8, noField)
	other := moveList(keyA, keyC, 0, idC)
	other[19] = 2
	wantListBit(t, move(other), 18, noField)
	wantListBit(t, move(moveList(keyA, keyC, 0, nil)), 20, noField)
	wantListBit(t, move(moveList(keyA, keyC, 0, append(idC, idC...))), 20, noField)
	wantListBit(t, move(moveList(keyA, keyC, 0, initiatorPort{portA.InitiatorName, portA.ISID}.appendTransportID(nil))), 24, noField)
	wantListBit(t, move(moveList(keyA, keyC, 0, deviceID(portC.InitiatorName))), 24, noField) // which port?
	short := moveList(keyA, keyC, 0, idC)
	wantSense(t, move(short[:len(short)-4]), 0x5, 0x1a, 0x00)
	r.wantReservation(1, keyA)
	r.wantKeys(keyA, keyB, keyC)
}

// Registrations have a limit; a list that exceeds it registers no nexus.
func TestRegistrationLimitRefusesWholeList(t *testing.T) {
	all := &limits.New().Registrations
	all.SetMax(maxRegistrations)
	r := newPRRig(t, setup{opt: Options{Registrations: all}})
	ids := func(n int) (list [][]byte) {
		for i := range n {
			list = append(list, initiatorPort{"iqn.2026-11.io.example:n", [6]byte{4: byte(i >> 8), 5: byte(i)}}.appendTransportID(nil))
		}
		return list
	}
	wantSense(t, r.out(r.a, prRegister, 0, portList(0, keyA, 0, ids(maxRegistrations)...)), 0x5, 0x55, 0x04)
	r.wantKeys()
	r.ok(r.a, prRegister, 0, portList(0, keyA, 0, ids(maxRegistrations-1)...))
	wantSense(t, r.out(r.b, prRegister, 0, prList(0, keyB, 0)), 0x5, 0x55, 0x04)
	wantSense(t, r.out(r.b, prRegisterAndIgnore, 0, prList(0, keyB, 0)), 0x5, 0x55, 0x04)
	r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
	wantSense(t, r.out(r.a, prRegisterAndMove, 0, moveList(keyA, 1, 0, unhex(transportIDC))), 0x5, 0x55, 0x04)
	in := r.in(r.b, prReadFullStatus)
	if want := maxRegistrations * (24 + 48); binary.BigEndian.Uint32(in[4:]) != uint32(want) || len(in) != min(8+want, 0xffff) {
		t.Errorf("READ FULL STATUS: %d bytes, ADDITIONAL LENGTH %d, want %d", len(in), binary.BigEndian.Uint32(in[4:]), want)
	}
}

// One name cannot take the places of others, neither with many ports nor by registering others.
func TestRegistrationsPerInitiator(t *testing.T) {
	const most = 3
	set := limits.New()
	set.Registrations.SetMax(most)
	var bites []limits.Bite
	set.Observe(func(b limits.Bite) { bites = append(bites, b) })
	r := newPRRig(t, setup{opt: Options{Registrations: &set.Registrations}})
	port := func(name string, i int) Port {
		p := portA
		p.InitiatorName, p.ISID[5] = "iqn.2026-11.io.example:"+name, byte(0x80+i)
		return p
	}
	id := func(i int) []byte {
		return initiatorPort{fmt.Sprintf("iqn.2026-11.io.example:x%d", i), [6]byte{}}.appendTransportID(nil)
	}
	// One initiator with many ports, and then one that registers others.
	for i := range most {
		r.ok(r.enter(port("many", i)), prRegister, 0, prList(0, keyB, 0))
	}
	last := r.enter(port("many", most))
	wantSense(t, r.out(last, prRegister, 0, prList(0, keyB, 0)), 0x5, 0x55, 0x04)
	r.ok(r.enter(port("many", 0)), prRegister, 0, prList(keyB, keyB+1, 0)) // changes its key
	r.ok(r.c, prRegister, 0, portList(0, keyC, 0, id(0), id(1)))
	for i := range maxRegistrations {
		r.ok(r.c, prRegisterAndIgnore, 0, prList(0, 0, 0)) // unregisters only itself
		wantSense(t, r.out(r.c, prRegister, 0, portList(0, keyC, 0, id(10+2*i), id(11+2*i))), 0x5, 0x55, 0x04)
	}
	if len(bites) != 1 || bites[0].Who != "iqn.2026-11.io.example:many" {
		t.Errorf("news of %+v, want one of :many", bites)
	}
	// Others find their places.
	r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
	r.ok(r.b, prRegister, 0, prList(0, keyA, 0))
	r.ok(r.a, prReserve, 5, prList(keyA, 0, 0))
	set.Registrations.SetMax(1) // those that exist stay, and can change their key
	r.ok(r.a, prRegister, 0, prList(keyA, keyB, 0))
}

// FuzzPersistentReserveOut runs any sequence of PERSISTENT RESERVE OUT commands with any
// parameter lists. Three bytes of plan describe a command: its nexus, its service action and
// TYPE, and the keys of its list; the rest comes from data. After each, PERSISTENT RESERVE IN is
// sound, a failed command has changed nothing, and the file has what has to survive.
func FuzzPersistentReserveOut(f *testing.F) {
	f.Add([]byte{0, 0, 0x01, 1, 1, 0x11, 0, 2, 0x11}, unhex(""), false)
	f.Add([]byte{0, 6, 0x01, 1, 6, 0x01, 0, 0x51, 0x11, 1, 0x54, 0x11, 2, 0x55, 0x12}, unhex(""), true)
	f.Add([]byte{0, 0, 0x01, 0, 0x11, 0x11, 0, 7, 0x12, 1, 3, 0x11}, append(unhex("0001 00000030"), unhex(transportIDC)...), true)
	f.Add([]byte{0, 0, 0x41}, append(unhex("00000030"), unhex(transportIDC)...), true)
	f.Add([]byte{0, 0, 0x01, 1, 0, 0x02, 0, 0x81, 0x11, 1, 0x82, 0x22, 1, 0x84, 0x20}, unhex(""), false)
	f.Fuzz(func(t *testing.T, plan, data []byte, keep bool) {
		if len(plan) > 60 || len(data) > 4096 {
			return
		}
		k := newKeeping(t)
		var err error
		if k.held, err = OpenReservations(k.path); err != nil {
			t.Fatal(err)
		}
		defer k.held.Close()
		k.held.SetSync(func(*os.File) error { return nil })
		var opt Options
		if keep {
			opt.Reservations = k.held
		}
		r := newPRRig(t, setup{opt: opt})
		for ; len(plan) >= 3; plan = plan[3:] {
			n := []*Nexus{r.a, r.b, r.c}[plan[0]%3]
			sa, typ := plan[1]&0x07, plan[1]>>4
			list := prList(uint64(plan[2]>>4&3), uint64(plan[2]&3), plan[2]>>3&0x08|byte(plan[2]>>2&1)|plan[0]>>4&4)
			if sa == prRegisterAndMove {
				list = list[:16]
				list = append(list, 0, plan[2]>>2&3)
			}
			if len(list) < prListLen || list[20]&0x08 != 0 {
				list = append(list, data...)
			}
			s := &r.unit.reservations.persistent
			before := *s
			res := r.out(n, sa, typ, list)
			if res.status != StatusGood && fmt.Sprint(before) != fmt.Sprint(*s) {
				t.Fatalf("status %#x, but %+v has become %+v", res.status, before, *s)
			}
			if res.status == StatusCheckCondition && res.sense[2] != keyIllegalRequest && res.sense[2] != keyUnitAttention {
				t.Fatalf("sense % x", res.sense)
			}
			checkState(t, r)
			if keep {
				got, err := keptState(k.held, testIdentity.Serial)
				want := prState{}
				if s.aptpl && len(s.registrations) > 0 {
					want = *s
					want.generation = 0
				}
				if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
					t.Fatalf("kept is %+v, %v; want %+v", got, err, want)
				}
				if b, err := os.ReadFile(k.path); err == nil {
					if _, err := reservationsFormat.Decode(b); err != nil {
						t.Fatalf("the file %v:\n%s", err, b)
					}
				}
			}
			for _, n := range []*Nexus{r.a, r.b, r.c} { // takes the attention
				r.on(n, "03 00 0000 12 00", nil)
			}
		}
	})
}

// checkState checks a state of persistent reservations, and that commands follow it.
func checkState(t *testing.T, r *prRig) {
	t.Helper()
	s := &r.unit.reservations.persistent
	holders := 0
	for i, reg := range s.registrations {
		if reg.key == 0 || s.find(reg.nexus) != i {
			t.Fatalf("registration %d of %+v", i, s.registrations)
		}
		if s.holds(reg.nexus) {
			holders++
		}
	}
	switch kind := prTypes[s.typ]; {
	case s.typ == 0 && (holders != 0 || s.holder != nexusName{}),
		s.typ != 0 && !kind.valid,
		kind.valid && !kind.all && holders != 1,
		kind.all && (holders != len(s.registrations) || holders == 0 || s.holder != nexusName{}):
		t.Fatalf("%d holders of %+v", holders, s)
	}
	for _, n := range []*Nexus{r.a, r.b, r.c} {
		r.on(n, "03 00 0000 12 00", nil)
		may := s.typ == 0 || s.holds(n.name) || prTypes[s.typ].registrants && s.find(n.name) >= 0
		res := r.on(n, "0a 000000 01 00", make([]byte, 512))
		if may != (res.status == StatusGood) || !may && res.status != statusReservationConflict {
			t.Fatalf("WRITE(6) of %s: status %#x, with %+v", n.name, res.status, s)
		}
	}
}

// While PREEMPT AND ABORT ends the commands of its victim it holds nothing: the victim can register
// again, and preempt and abort in turn. Both commands end.
func TestPreemptAndAbortOfEachOther(t *testing.T) {
	r := newPRRig(t, setup{}).registered()
	preempt := func(n *Nexus, key, saKey uint64) result {
		var c Command
		return do(n, &c, [8]byte{}, fmt.Sprintf("5f 05 01 0000 %08x 00", prListLen), prList(key, saKey, 0), all)
	}
	register := func(n *Nexus, saKey uint64) result {
		var c Command
		return do(n, &c, [8]byte{}, fmt.Sprintf("5f 06 00 0000 %08x 00", prListLen), prList(0, saKey, 0), all)
	}
	var order []string
	r.c.OnPreempt(func([8]byte, *Command) { // by a
		order = append(order, "c")
		wantSense(t, register(r.c, keyC), 0x6, 0x2a, 0x05)
		wantGood(t, "REGISTER", register(r.c, keyC))
		wantGood(t, "PREEMPT AND ABORT of c", preempt(r.c, keyC, keyA))
		r.unit.reset(condReset)
	})
	r.a.OnPreempt(func([8]byte, *Command) { // by c
		order = append(order, "a")
	})
	wantGood(t, "PREEMPT AND ABORT of a", preempt(r.a, keyA, keyC))
	if got := strings.Join(order, ""); got != "ca" {
		t.Errorf("commands of %q were stopped, want those of c, then of a", got)
	}
	wantSense(t, r.on(r.see, "00", nil), 0x6, 0x29, 0x03)
	r.wantKeys(keyB, keyC)
}
