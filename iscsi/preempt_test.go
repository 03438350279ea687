package iscsi

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/lun/state/hometest"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// Service actions of PERSISTENT RESERVE OUT.
const (
	register          = 0x00
	preemptAndAbort   = 0x05
	registerAndIgnore = 0x06
)

// A duel is a node whose PREEMPT AND ABORTs stop between the change of the reservation and the end
// of the commands that they preempt.
type duel struct {
	*testNode
	preempting chan chan struct{} // a channel for each PREEMPT AND ABORT; closing it lets the command continue
}

func newDuel(t *testing.T) *duel {
	d := &duel{newTestNode(t), make(chan chan struct{}, 4)}
	u, err := lun.New(newStore(t), lun.Options{
		Identity: state.Identity{NAA: [8]byte{0x30, 7: 9}, Serial: "3000000000000009"},
		Events: func(e lun.Event) {
			if c, ok := e.(lun.ReservationChangedEvent); ok && strings.HasSuffix(c.Command, "PREEMPT AND ABORT") {
				stop := make(chan struct{})
				d.preempting <- stop
				<-stop
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	inv := lun.NewInventory()
	if err := inv.Add(0, u); err != nil {
		t.Fatal(err)
	}
	all, err := security.Compile([]string{"*"})
	if err != nil {
		t.Fatal(err)
	}
	err = d.AddTarget(TargetConfig{Name: targetName + ".duel", Initiators: all, LUNs: inv})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// enter logs in as another port of the initiator.
func (d *duel) enter(port byte) *testConn {
	d.tb.Helper()
	tc := d.connect(func(tc *testConn) { tc.isid[5] = port })
	tc.writeLogin(tc.loginRequest(true, 1, 3), append([]string{"InitiatorName=" + initiatorName,
		"TargetName=" + targetName + ".duel", "SessionType=Normal"}, linuxKeys...)...)
	return tc.loggedIn()
}

// prOut sends PERSISTENT RESERVE OUT.
func (tc *testConn) prOut(sa, key, saKey byte) pdu.BHS {
	return tc.command(writeF, 24, [16]byte{0x5f, sa, 1, 8: 24}, []byte{7: key, 15: saKey, 23: 0})
}

// wantAlive checks that the target answers: the next command ends, a unit attention or two apart.
func (tc *testConn) wantAlive() {
	tc.tb.Helper()
	for {
		h := tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		p := tc.next(testkit.Patience)
		for p != nil && p.h.ITT() != h.ITT() { // news about the window, or the end of an older task
			p = tc.next(testkit.Patience)
		}
		if p == nil {
			tc.tb.Fatalf("no answer\n%s", testkit.Stacks())
		}
		tc.statSeen = false
		if p.h.Status() == 0 {
			break
		}
	}
	for synctest.Wait(); tc.next(0) != nil; { // news about the window
	}
}

// Two PREEMPT AND ABORT that are each other's victims end, in whatever order they abort, and a
// LOGICAL UNIT RESET of a third initiator port behind them is answered.
func TestPreemptAndAbortOfEachOther(t *testing.T) {
	for _, c := range []struct {
		name  string
		first int
		reset bool
	}{{"first first", 0, false}, {"second first", 1, false}, {"with LOGICAL UNIT RESET", 0, true}} {
		bubble(t, c.name, func(t *testing.T) {
			d := newDuel(t)
			a, b, other := d.enter(1), d.enter(2), d.enter(3)
			a.wantStatus(a.prOut(register, 0, 1), 0)
			b.wantStatus(b.prOut(register, 0, 2), 0)
			a.prOut(preemptAndAbort, 1, 2)
			stops := []chan struct{}{<-d.preempting}
			b.wantStatus(b.prOut(registerAndIgnore, 0, 2), 0)
			b.prOut(preemptAndAbort, 2, 1)
			stops = append(stops, <-d.preempting)
			var f pdu.BHS
			if c.reset {
				f = other.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0)
				other.wantNothing()
			}
			close(stops[c.first])
			synctest.Wait()
			close(stops[1-c.first])
			if c.reset {
				other.wantTMF(f, pdu.FunctionComplete)
			}
			other.wantAlive()
			for _, tc := range []*testConn{a, b, other} {
				tc.wantAlive()
				tc.logout()
			}
		})
	}
}

// A PREEMPT AND ABORT through another gateway ends the commands of a session here, and waits for the one in the store.
func TestPreemptAndAbortFromAnotherGateway(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		home := hometest.NewMemory(1)
		n := newTestNode(t)
		gateway := func(name string, tpgt uint16, store backend.Store) *lun.Inventory {
			t.Helper()
			s, err := lun.NewSharedReservations(lun.SharedOptions{Home: home.Link(time.Millisecond), Gateway: name})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(s.Close)
			u, err := lun.New(store, lun.Options{Identity: state.Identity{NAA: [8]byte{0x30, 7: 9}, Serial: "3000000000000009"}, Shared: s})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { u.Close() })
			if err := u.JoinShared(t.Context()); err != nil {
				t.Fatal(err)
			}
			inv := lun.NewInventory(tpgt)
			if err := inv.Add(0, u); err != nil {
				t.Fatal(err)
			}
			return inv
		}
		store := newStore(t)
		all, err := security.Compile([]string{"*"})
		if err != nil {
			t.Fatal(err)
		}
		if err := n.AddTarget(TargetConfig{Name: targetName + ".duel", Initiators: all, LUNs: gateway("x", 1, store)}); err != nil {
			t.Fatal(err)
		}
		other := gateway("y", 2, newStore(t)).NewNexus(lun.Port{InitiatorName: initiatorName, TargetName: targetName + ".duel", TPGT: 2})
		run := func(block [16]byte, list []byte) byte {
			c := &lun.Command{CDB: block[:]}
			if other.Begin(c) && (len(list) == 0 || other.Consume(c, list, 0)) {
				other.End(c)
			}
			return c.Status
		}
		prOut := func(sa, key, saKey byte) byte {
			return run([16]byte{0x5f, sa, 1, 8: 24}, []byte{7: key, 15: saKey, 23: 0})
		}
		run(cdb.TestUnitReady, nil)
		if s := prOut(register, 0, 1); s != 0 {
			t.Fatalf("REGISTER: status %#x", s)
		}
		d := &duel{testNode: n}
		tc := d.enter(1)
		tc.wantStatus(tc.prOut(register, 0, 2), 0)
		inStore, let := make(chan struct{}), make(chan struct{})
		store.Hook(func(backendtest.Op, int64, int64) error {
			close(inStore)
			<-let
			return nil
		})
		h := tc.command(writeF, 512, cdb.Write10(0, 1), make([]byte, 512))
		<-inStore
		done := make(chan byte, 1)
		go func() { done <- prOut(preemptAndAbort, 1, 2) }()
		time.Sleep(time.Second)
		select {
		case s := <-done:
			t.Errorf("PREEMPT AND ABORT ended with status %#x while a command is in the store", s)
		default:
		}
		close(let)
		if s := <-done; s != 0 {
			t.Errorf("PREEMPT AND ABORT: status %#x", s)
		}
		tc.wantStatus(h, lun.StatusTaskAborted)
		store.Hook(nil)
		tc.wantSense(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x2a, 5)
		tc.wantAlive()
		tc.logout()
	})
}

// A session that preempts its own key twice, without waiting for the first answer, ends both.
func TestPreemptAndAbortPipelined(t *testing.T) {
	for name, first := range map[string]int{"first first": 0, "second first": 1} {
		bubble(t, name, func(t *testing.T) {
			d := newDuel(t)
			a, other := d.enter(1), d.enter(2)
			a.wantStatus(a.prOut(register, 0, 1), 0)
			a.prOut(preemptAndAbort, 1, 1)
			stops := []chan struct{}{<-d.preempting}
			a.wantStatus(a.prOut(registerAndIgnore, 0, 1), 0)
			a.prOut(preemptAndAbort, 1, 1)
			stops = append(stops, <-d.preempting)
			close(stops[first])
			synctest.Wait()
			close(stops[1-first])
			f := other.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0)
			other.wantTMF(f, pdu.FunctionComplete)
			for _, tc := range []*testConn{a, other} {
				tc.wantAlive()
				tc.logout()
			}
		})
	}
}
