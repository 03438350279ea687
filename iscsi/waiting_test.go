package iscsi

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/fair"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// Commands that wait for their turn at one LUN hold up neither pings nor another LUN, and a task
// management function ends them at once.
func TestCommandsThatWaitHoldUpNothing(t *testing.T) {
	bubble(t, "rate", func(t *testing.T) {
		n := newTestNode(t)
		other, err := lun.New(newStore(t), lun.Options{Identity: state.Identity{NAA: [8]byte{0x30, 7: 9}, Serial: "3000000000000009"}})
		if err != nil {
			t.Fatal(err)
		}
		if err := n.inv.Add(1, other); err != nil {
			t.Fatal(err)
		}
		tc := n.connect().login()
		tc.wantSense(tc.onLUN(1, pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x29, 0)
		slow := n.inv.Unit(0)
		slow.SetRates(fair.Rates{IOPS: 1}, nil)
		defer slow.SetRates(fair.Rates{}, nil)
		began := time.Now()
		tc.wantStatus(tc.command(readF, 512, cdb.Read10(0, 1), nil), lun.StatusGood)
		const waiting = 30
		for i := range waiting {
			tc.command(readF, 512, cdb.Read10(uint32(i), 1), nil)
		}
		synctest.Wait()
		if s := slow.StoreCalls(); s.Waiting != waiting {
			t.Fatalf("%d commands wait, want %d", s.Waiting, waiting)
		}
		tc.ping()
		tc.wantStatus(tc.onLUN(1, readF, 512, cdb.Read10(0, 1), nil), lun.StatusGood)
		tc.wantTMF(tc.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
		if s := slow.StoreCalls(); s.Waiting != 0 {
			t.Errorf("%d commands wait after LOGICAL UNIT RESET", s.Waiting)
		}
		if took := time.Since(began); took > 100*time.Millisecond {
			t.Errorf("all of that took %v", took)
		}
	})
}
