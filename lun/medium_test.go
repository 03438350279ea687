package lun

import (
	"fmt"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

const (
	eject   = "1b 00 0000 02 00"
	load    = "1b 00 0000 03 00"
	prevent = "1e 00 0000 01 00"
	allow   = "1e 00 0000 00 00"
)

// wantNotReady checks that all commands that need the medium end with NOT READY, and no others.
// It does not send START STOP UNIT.
func (r *rig) wantNotReady(asc, ascq byte, nexuses ...*Nexus) {
	r.t.Helper()
	for _, n := range nexuses {
		for _, row := range rowsFor(r.unit) {
			if row.op == 0x1b {
				continue
			}
			res := doCDB(n, &r.c, [8]byte{}, rowCDB(row), make([]byte, 512), all)
			if row.flags&medium != 0 {
				wantSense(r.t, res, 0x2, asc, ascq)
			} else {
				wantDone(r.t, row, res)
			}
		}
	}
}

// SBC-3, section 5.25: without a medium, commands that need one fail for all initiators. Those
// that did not load it are notified when it is back.
func TestEject(t *testing.T) {
	r := newRig(t, setup{info: volatile, opt: Options{Removable: true}})
	other := r.login()
	tur := func(n *Nexus) result { return do(n, &r.c, [8]byte{}, "00", nil, all) }
	r.good(extentCDB(0x2a, 0, 0, 1), pattern(512, 1))
	r.good(eject, nil)
	if n := r.store.Calls(backendtest.Sync); n != 1 {
		t.Errorf("%d syncs, want 1", n)
	}
	r.wantNotReady(0x3a, 0x02, r.nexus, other) // MEDIUM NOT PRESENT - TRAY OPEN
	wantBytes(t, r.good("03 00 0000 ff 00", nil), unhex("70 00 02 00000000 0a 00000000 3a 02 00 000000"))
	r.good(eject, nil)                                            // twice is no different
	wantSense(t, r.run("1b 00 0000 01 00", nil), 0x2, 0x3a, 0x02) // START without LOEJ loads nothing
	wantSense(t, r.run("1b 00 0000 00 00", nil), 0x2, 0x3a, 0x02)
	r.nexus.ResetUnit([8]byte{}, true) // is no load either
	wantSense(t, tur(r.nexus), 0x6, 0x29, 0x03)
	wantSense(t, tur(other), 0x6, 0x29, 0x03)
	wantSense(t, tur(other), 0x2, 0x3a, 0x02)

	r.good(load, nil)
	wantGood(t, "who loaded it", tur(r.nexus))
	wantSense(t, tur(other), 0x6, 0x28, 0x00) // NOT READY TO READY CHANGE
	wantGood(t, "who did not", tur(other))
	r.good(load, nil)
	wantGood(t, "nothing was loaded", tur(other))
	wantBytes(t, r.good(extentCDB(0x28, 0, 0, 1), nil), pattern(512, 1))

	r.store.Fail(backendtest.Sync, backend.ErrUnsynced)
	wantSense(t, r.run(eject, nil), 0x4, 0x0c, 0x00)
	wantGood(t, "it is still there", tur(r.nexus))
}

// Only its ejection stops a removable medium. The only power condition is active: with one in the
// CDB, START and LOEJ mean nothing.
func TestRemovableWithoutEject(t *testing.T) {
	r := newRig(t, setup{info: volatile, opt: Options{Removable: true}})
	for _, b := range []int{0x00, 0x01, 0x04, 0x05} { // START, NO_FLUSH
		r.good(fmt.Sprintf("1b 01 0000 %02x 00", b), nil)
		r.good("00", nil)
	}
	for condition := 1; condition < 16; condition++ {
		r.good(fmt.Sprintf("1b 00 0000 %x2 00", condition), nil)
		r.good("00", nil)
	}
}

// SBC-3, section 5.15: removal is prevented while one nexus prevents it, until a reset or the end
// of that nexus.
func TestPreventRemoval(t *testing.T) {
	r := newRig(t, setup{opt: Options{Removable: true}})
	other := r.login()
	on := func(n *Nexus, cdb string) result { return do(n, &r.c, [8]byte{}, cdb, nil, all) }
	refused := func(why string) {
		t.Helper()
		t.Log(why)
		for _, n := range []*Nexus{r.nexus, other} {
			wantSense(t, on(n, eject), 0x5, 0x53, 0x02) // MEDIUM REMOVAL PREVENTED
			wantGood(t, "TEST UNIT READY", on(n, "00"))
		}
	}
	r.good(prevent, nil)
	refused("one nexus prevents it")
	wantGood(t, "PREVENT", on(other, prevent))
	r.good(allow, nil)
	refused("the other one still does")
	wantGood(t, "ALLOW", on(other, allow))
	r.good(eject, nil)

	r.good(prevent, nil)
	wantSense(t, r.run(load, nil), 0x5, 0x53, 0x02)
	r.good(allow, nil)
	r.good(load, nil)

	wantSense(t, on(other, prevent), 0x6, 0x28, 0x00)
	wantGood(t, "PREVENT", on(other, prevent))
	other.Close()
	r.good(eject, nil)
	r.good(load, nil)

	r.good(prevent, nil)
	r.reset(r.nexus)
	r.good(eject, nil)

	fixed := newRig(t, setup{})
	wantSense(t, fixed.run(prevent, nil), 0x5, 0x20, 0x00)
}

// SPC-4, section 5.13.11.2.6 h: PREEMPT AND ABORT ends the preempted nexus's prevention of
// removal, as if it had allowed it. PREEMPT does not.
func TestPreemptAndAbortAllowsRemoval(t *testing.T) {
	for sa, prevented := range map[byte]bool{prPreempt: true, prPreemptAndAbort: false} {
		r := newPRRig(t, setup{opt: Options{Removable: true}}).registered()
		r.ok(r.a, prReserve, writeExclusiveRO, prList(keyA, 0, 0))
		wantGood(t, "PREVENT", r.on(r.a, prevent, nil))
		r.ok(r.c, sa, writeExclusiveRO, prList(keyC, keyA, 0))
		if res := r.on(r.c, eject, nil); prevented {
			wantSense(t, res, 0x5, 0x53, 0x02)
		} else {
			wantGood(t, "eject", res)
		}

		// A nexus that is not preempted still prevents it.
		r = newPRRig(t, setup{opt: Options{Removable: true}}).registered()
		r.ok(r.a, prReserve, writeExclusiveRO, prList(keyA, 0, 0))
		wantGood(t, "PREVENT", r.on(r.b, prevent, nil))
		r.ok(r.c, sa, writeExclusiveRO, prList(keyC, keyA, 0))
		wantSense(t, r.on(r.c, eject, nil), 0x5, 0x53, 0x02)
	}
}
