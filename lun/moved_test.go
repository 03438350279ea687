package lun

import (
	"encoding/binary"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// With implicit access, the daemon sets the states of target port groups: initiators learn it by a unit attention and REPORT TARGET PORT
// GROUPS, and cannot set them (SPC-4, sections 5.11.2.7 and 6.37).
func TestImplicitAccess(t *testing.T) {
	r := newRig(t, setup{opt: Options{ImplicitAccess: true}})
	r.inv.SetPorts([]uint16{1}, []uint16{2, 3})
	wantSense(t, r.run("00", nil), 0x6, 0x2a, 0x06)
	if b := r.good("12 00 0000 24 00", nil); b[5]&0x30 != 0x10 {
		t.Errorf("TPGS is %#x", b[5]&0x30)
	}
	wantSense(t, r.run("a4 0a 000000000000 00000008 0000", make([]byte, 8)), 0x5, 0x24, 0x00) // no such service action
	r.unit.SetAccess(map[uint16]AccessState{1: ActiveOptimized, 2: Standby, 3: Transitioning}, time.Time{})
	wantSense(t, r.run("00", nil), 0x6, 0x2a, 0x06)
	r.unit.SetAccess(map[uint16]AccessState{1: ActiveOptimized, 2: Standby, 3: Transitioning}, time.Time{})
	wantGood(t, "without news", r.run("00", nil))
	b := r.good("a3 0a 00000000 000000ff 0000", nil)
	for i, want := range []byte{0x0, 0x2, 0xf} {
		d := b[4+12*i:]
		if d[0]&0x0f != want || d[1] != 0x85 || d[5] != 0x02 || binary.BigEndian.Uint16(d[2:]) != uint16(i+1) {
			t.Errorf("descriptor %x, want state %x, altered implicitly", d[:12], want)
		}
	}
	for tag, asc := range map[uint16]byte{2: 0x0b, 3: 0x0a} {
		port := testPort
		port.TPGT = tag
		n := r.inv.NewNexus(port)
		tur := func(cdb string) result { return do(n, &r.c, [8]byte{}, cdb, nil, all) }
		wantSense(t, tur("00"), 0x6, 0x29, 0x00)
		wantSense(t, tur("00"), 0x2, 0x04, asc)
		wantSense(t, tur("28 00 00000000 00 0001 00"), 0x2, 0x04, asc)
		wantGood(t, "READ CAPACITY", do(n, &r.c, [8]byte{}, "25 00 00000000 0000 00 00", nil, all))
		wantGood(t, "PERSISTENT RESERVE IN", do(n, &r.c, [8]byte{}, "5e 00 0000000000 0008 00", nil, all))
	}
	if len(r.unit.Settings()) > 0 {
		for _, s := range r.unit.Settings() {
			if s.Name == accessName(1) {
				t.Error("the states count as settings of initiators")
			}
		}
	}
	if _, err := r.unit.ResetSettings(); err != nil {
		t.Fatal(err)
	}
	if got := r.good("a3 0a 00000000 000000ff 0000", nil); got[4+12]&0x0f != 0x2 {
		t.Error("ResetSettings changes the states")
	}
}

// While a store moves, REPORT TARGET PORT GROUPS waits for the states that follow, but not for ever, and not if it is aborted. Other commands do not wait.
func TestAccessSettles(t *testing.T) {
	const rtpg = "a3 0a 00000000 000000ff 0000"
	before, after := map[uint16]AccessState{1: Standby}, map[uint16]AccessState{1: ActiveOptimized}
	r := newRig(t, setup{opt: Options{ImplicitAccess: true}})
	for r.unit.SetAccess(before, time.Time{}); r.run(rtpg, nil).status != 0; {
	}
	r.unit.SetAccess(before, time.Now().Add(time.Hour))
	wantGood(t, "READ CAPACITY", r.run("25 00 00000000 0000 00 00", nil))
	settled := make(chan time.Time, 1)
	go func() {
		time.Sleep(50 * time.Millisecond)
		settled <- time.Now()
		r.unit.SetAccess(after, time.Time{})
	}()
	got := r.good(rtpg, nil)
	select {
	case <-settled:
	default:
		t.Error("did not wait")
	}
	if AccessState(got[4]&0x0f) != ActiveOptimized {
		t.Errorf("state %x, want active/optimized", got[4])
	}
	for r.run(rtpg, nil).status != 0 { // the unit attention
	}

	r.unit.SetAccess(after, time.Now().Add(50*time.Millisecond))
	began := time.Now()
	r.good(rtpg, nil)
	if took := time.Since(began); took < 40*time.Millisecond {
		t.Errorf("waited for %v, want 50ms", took)
	}

	r.unit.SetAccess(after, time.Now().Add(time.Hour))
	r.c.Abort = new(atomic.Bool)
	r.c.Abort.Store(true)
	r.run(rtpg, nil)
}

// A command whose store another gateway has meanwhile is NOT READY, and never MEDIUM ERROR or GOOD.
func TestMovedStore(t *testing.T) {
	r := newRig(t, setup{opt: Options{ImplicitAccess: true}, info: volatile})
	for _, state := range []struct {
		is  AccessState
		asc byte
	}{{ActiveOptimized, 0x0a}, {Standby, 0x0b}} {
		for _, cdb := range []string{extentCDB(0x28, 0, 0, 1), extentCDB(0x2a, 0, 0, 1), "35 00 00000000 00 0000 00"} {
			r.unit.SetAccess(map[uint16]AccessState{1: ActiveOptimized}, time.Time{})
			for r.run("00", nil).status != 0 {
			}
			r.store.Hook(func(backendtest.Op, int64, int64) error {
				r.unit.SetAccess(map[uint16]AccessState{1: state.is}, time.Time{})
				return backend.ErrMoved
			})
			wantSense(t, r.run(cdb, make([]byte, 512)), 0x2, 0x04, state.asc)
		}
	}
	if r.unit.Unsynced() || r.unit.SyncFailure() != nil {
		t.Error("the unit counts as one whose sync has failed")
	}
	if _, failed := r.unit.LastError(); failed {
		t.Error("the store counts as failed")
	}
}
