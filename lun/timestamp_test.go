package lun

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/testkit"
)

// timestamp takes the answer to REPORT TIMESTAMP apart (SPC-4, section 6.38).
func (r *rig) timestamp(n *Nexus) (ms uint64, origin byte) {
	r.t.Helper()
	res := do(n, &r.c, [8]byte{}, "a3 0f 00000000 000000ff 00 00", nil, all)
	wantGood(r.t, "REPORT TIMESTAMP", res)
	b := res.in
	if len(b) != 12 || b[0] != 0 || b[1] != 10 || b[3] != 0 || b[10] != 0 || b[11] != 0 {
		r.t.Fatalf("REPORT TIMESTAMP: % x", b)
	}
	return binary.BigEndian.Uint64(append([]byte{0, 0}, b[4:10]...)), b[2]
}

const setTimestamp = "a4 0f 00000000 0000000c 00 00"

// The device clock is that of the machine until an initiator sets it. Then all others are notified, and it advances
// from there, in the next process, too, until a power on.
func TestTimestamp(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		r := newRig(t, setup{})
		other := r.login()
		want := func(n *Nexus, ms int64, origin byte) {
			t.Helper()
			if got, o := r.timestamp(n); got != uint64(ms) || o != origin {
				t.Errorf("TIMESTAMP %d, ORIGIN %d; want %d, %d", got, o, ms, origin)
			}
		}
		want(r.nexus, time.Now().UnixMilli(), 0b011)
		time.Sleep(time.Hour)
		want(other, time.Now().UnixMilli(), 0b011)

		r.good(setTimestamp, unhex("00000000 0000000f4240 0000")) // 1 000 000
		wantSense(t, do(other, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x2a, 0x10)
		wantGood(t, "TEST UNIT READY", do(other, &r.c, [8]byte{}, "00", nil, all))
		r.good("00", nil) // the one that set it knows
		want(other, 1e6, 0b010)
		time.Sleep(90 * time.Second)
		want(r.nexus, 1e6+90e3, 0b010)
		r.reset(r.nexus) // a reset of the unit is no power on
		want(r.nexus, 1e6+90e3, 0b010)

		next := newRig(t, setup{})
		if err := next.unit.Restore(throughJSON(t, r.unit.State())); err != nil {
			t.Fatal(err)
		}
		reopened := newRig(t, setup{})
		reopened.unit.InheritFrom(r.unit)
		time.Sleep(time.Second)
		for _, again := range []*rig{next, reopened} {
			if ms, origin := again.timestamp(again.nexus); ms != 1e6+91e3 || origin != 0b010 {
				t.Errorf("continued: TIMESTAMP %d, ORIGIN %d", ms, origin)
			}
		}
		// 48 bits wrap.
		r.good(setTimestamp, unhex("00000000 ffffffffffff 0000"))
		time.Sleep(time.Millisecond)
		want(r.nexus, 0, 0b010)
		r.inv.PowerOn()
		wantSense(t, r.run("00", nil), 0x6, 0x29, 0x00)
		want(r.nexus, time.Now().UnixMilli(), 0b011)
	})
}

func TestSetTimestampList(t *testing.T) {
	r := newRig(t, setup{})
	other := r.login()
	r.good("a4 0f 00000000 00000000 00 00", nil)                                         // no list, no change
	wantSense(t, r.run("a4 0f 00000000 0000000b 00 00", make([]byte, 11)), 0x5, 0x1a, 0) // PARAMETER LIST LENGTH ERROR
	wantSense(t, r.run("a4 0f 00000000 0000000d 00 00", make([]byte, 13)), 0x5, 0x1a, 0)
	wantSense(t, r.run("a4 0f 00000000 ffffffff 00 00", nil), 0x5, 0x1a, 0)
	wantSense(t, r.run(setTimestamp, make([]byte, 11)), 0x5, 0x0e, 0x03) // less than announced
	for _, reserved := range []int{0, 1, 2, 3, 10, 11} {
		list := make([]byte, 12)
		list[reserved] = 1
		wantListField(t, r.run(setTimestamp, list), reserved)
	}
	wantGood(t, "the neighbour is not notified", do(other, &r.c, [8]byte{}, "00", nil, all))
	if _, origin := r.timestamp(r.nexus); origin != 0b011 {
		t.Errorf("ORIGIN %d", origin)
	}
	wantBytes(t, r.good("a3 0f 00000000 00000002 00 00", nil), unhex("000a"))
	// An initiator that may only read does not set the clock of the others.
	if err := r.inv.SetMask(0, maskFor(testPort.InitiatorName, ReadOnly)); err != nil {
		t.Fatal(err)
	}
	wantSense(t, r.run("00", nil), 0x6, 0x2a, 0x01)
	wantSense(t, r.run(setTimestamp, make([]byte, 12)), 0x7, 0x27, 0x00)
	r.timestamp(r.nexus)
}
