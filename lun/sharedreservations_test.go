package lun

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/lun/state"
)

// What initiators do on one gateway holds on the other, and nexuses there hear of it.
func TestSharedReservations(t *testing.T) {
	sharedBubble(t, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		x, y := g[0], g[1]
		a, b, c := x.enter("a"), y.enter("b"), y.enter("c")
		gr.ok(a, prRegister, 0, 0, 1)
		gr.ok(b, prRegister, 0, 0, 2)
		gr.ok(a, prReserve, 5, 1, 0)
		x.want("5@2 a1=1* b2=2")
		y.want("5@2 a1=1* b2=2")
		wantGood(t, "WRITE of a registrant", send(b, sharedWrite, sharedBlock))
		wantConflict(t, "WRITE of another one", send(c, sharedWrite, sharedBlock))
		wantGood(t, "READ of another one", send(c, sharedRead, nil))
		wantConflict(t, "RESERVE of another one", sendOut(b, prReserve, 5, 2, 0))

		gr.ok(b, prPreempt, 5, 2, 1)
		x.want("5@3 b2=2*")
		gr.wantDue(a, "2a/05")
		gr.wantDue(b, "")
		wantConflict(t, "WRITE of who was preempted", send(a, sharedWrite, sharedBlock))
		gr.ok(a, prRegister, 0, 0, 3)
		gr.ok(b, prRelease, 5, 2, 0)
		gr.wantDue(a, "2a/04")
		gr.ok(b, prClear, 0, 2, 0)
		gr.wantDue(a, "2a/03")
		gr.wantDue(c, "")
		x.want("0@5")
		y.want("0@5")
		wantGood(t, "WRITE where nothing is reserved", send(c, sharedWrite, sharedBlock))

		gr.ok(a, prRegister, 0, 0, 1)
		if cleared, err := y.unit.ClearReservation(); err != nil || !cleared {
			t.Errorf("ClearReservation = %v, %v", cleared, err)
		}
		if cleared, err := y.unit.ClearReservation(); err != nil || cleared {
			t.Errorf("a second ClearReservation = %v, %v", cleared, err)
		}
		gr.wantDue(a, "2a/03")
		x.want("0@7")
		// What needs one gateway alone does not exist.
		wantSense(t, send(a, "16 00 0000 00 00", nil), 0x5, 0x20, 0x00)
		if in := send(a, "5e 02 0000000000 ffff 00", nil).in; in[2]&0x10 != 0 || in[2]&0x01 == 0 {
			t.Errorf("the capabilities are % x, want PTPL_C without CRH", in)
		}
	})
}

// Of two nodes that preempt each other through different gateways at the same moment, one wins.
func TestSharedDuel(t *testing.T) {
	sharedBubble(t, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		a, b := g[0].enter("a"), g[1].enter("b")
		won := map[string]int{}
		for range 40 {
			gr.ok(a, prRegisterAndIgnore, 0, 0, 1)
			gr.ok(b, prRegisterAndIgnore, 0, 0, 2)
			due(a)
			due(b)
			p, q := beginOut(a, prPreempt, 3, 1, 2), beginOut(b, prPreempt, 3, 2, 1)
			<-p.done
			<-q.done
			winner, loser, next := "a", q.res, b
			if p.res.status != StatusGood {
				winner, loser, next = "b", p.res, a
				wantGood(t, "PREEMPT of b", q.res)
			}
			won[winner]++
			if g[0].has() != g[1].has() || !strings.Contains(g[0].has(), winner) || len(g[0].unit.Reservation().Registrations) != 1 {
				t.Fatalf("%s has won, the gateways have %s and %s", winner, g[0].has(), g[1].has())
			}
			gr.wantDue(next, "2a/05")
			wantConflict(t, "the other PREEMPT", loser)
		}
		if won["a"] == 0 || won["b"] == 0 {
			t.Errorf("the winners are %v", won)
		}
	})
}

// GOOD comes after the other gateway has the change in force, however long that takes. Only if its lease ends first, GOOD does not
// wait for it, and it serves nothing then.
func TestSharedAcknowledgement(t *testing.T) {
	sharedBubble(t, "xyz", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		a, b := g[0].enter("a"), g[1].enter("b")
		gr.ok(a, prRegister, 0, 0, 1)
		g[1].link.Cut(true)
		p := beginOut(a, prReserve, 3, 1, 0)
		time.Sleep(2 * time.Second)
		if p.isDone() {
			t.Fatal("RESERVE has not waited for a gateway")
		}
		g[0].want("3@1 a1=1*")
		g[2].want("3@1 a1=1*")
		wantGood(t, "WRITE before the gateway knows", send(b, sharedWrite, sharedBlock))
		g[1].link.Cut(false)
		<-p.done
		wantGood(t, "RESERVE", p.res)
		g[1].want("3@1 a1=1*")
		wantConflict(t, "WRITE after RESERVE", send(b, sharedWrite, sharedBlock))

		g[1].link.Cut(true)
		p = beginOut(a, prRelease, 3, 1, 0)
		q := begin(b, 0, sharedRead, nil)
		wantConflict(t, "READ while its gateway is cut off", q.res)
		served := time.Duration(0)
		for began := time.Now(); !p.isDone(); time.Sleep(10 * time.Millisecond) {
			if send(b, sharedRead, nil).status != StatusBusy {
				served = time.Since(began)
			}
		}
		wantGood(t, "RELEASE", p.res)
		if p.ended < 4*time.Second || p.ended > 7*time.Second || served > p.ended-sharedTTL/10 {
			t.Errorf("RELEASE took %v, and the other gateway served for %v", p.ended, served)
		}
		if res := send(b, "00", nil); res.status != StatusCheckCondition {
			t.Errorf("TEST UNIT READY without a lease: status %#x", res.status)
		}
		if s := g[1].unit.Status(); !strings.Contains(s, "reservations are out of reach: ") {
			t.Errorf("the status is %q", s)
		}
		for _, cdb := range []string{"5e 00 0000000000 ffff 00", prOutCDB(prRegister, 0)} {
			if res := send(b, cdb, prList(0, 2, 0)); res.status != StatusBusy {
				t.Errorf("%s without a lease: status %#x", cdb, res.status)
			}
		}
		g[1].link.Cut(false)
		g[1].join(g[1].unit)
		g[1].want("0@1 a1=1")
		wantGood(t, "READ", send(b, sharedRead, nil))
	})
}

// PREEMPT AND ABORT ends commands of nexuses on another gateway before it is GOOD. A command there that does not end stops
// neither the next change of the unit, nor another unit.
func TestSharedPreemptAndAbort(t *testing.T) {
	sharedBubble(t, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		x, y := g[0], g[1]
		neighbor := testIdentity
		neighbor.NAA[7]++
		neighbor.Serial = "3001020304050608"
		for _, g := range g {
			u := g.newUnit(neighbor)
			g.join(u)
			if err := g.inv.Add(1, u); err != nil {
				t.Fatal(err)
			}
		}
		a, b, c := x.enter("a"), y.enter("b"), y.enter("c")
		for n, key := range map[*Nexus]uint64{a: 1, b: 2, c: 3} {
			gr.ok(n, prRegister, 0, 0, key)
		}
		hang := make(chan struct{})
		var mu sync.Mutex
		called := ""
		call := func(who string) {
			mu.Lock()
			defer mu.Unlock()
			called += who
		}
		b.OnPreempt(func(lun [8]byte, except *Command) {
			if lun != [8]byte{} || except != nil {
				t.Errorf("the commands for % x have to end, except %v", lun, except)
			}
			if strings.Contains(y.has(), "b2") {
				t.Error("the commands have to end before the change is in force")
			}
			call("b")
			<-hang
		})
		c.OnPreempt(func([8]byte, *Command) { call("c") })
		a.OnPreempt(func([8]byte, *Command) { call("a") })
		wantGood(t, "PREVENT", send(b, "1e 00 0000 01 00", nil))
		p := beginOut(a, prPreemptAndAbort, 3, 1, 2)
		time.Sleep(8 * time.Second) // more than a lease
		mu.Lock()
		ended := called
		mu.Unlock()
		if p.isDone() || ended != "b" {
			t.Fatalf("PREEMPT AND ABORT has not waited; ended are the commands of %q", ended)
		}
		gr.wantDue(b, "2a/05")
		y.want("0@4 a1=1 c2=3")
		gr.ok(c, prReserve, 1, 3, 0)
		x.want("1@4 a1=1 c2=3*")
		wantGood(t, "REGISTER of the neighbor", do(a, &Command{}, [8]byte{1: 1}, prOutCDB(prRegister, 0), prList(0, 7, 0), all))
		wantGood(t, "REGISTER of the neighbor", do(b, &Command{}, [8]byte{1: 1}, prOutCDB(prRegister, 0), prList(0, 8, 0), all))
		close(hang)
		<-p.done
		wantGood(t, "PREEMPT AND ABORT", p.res)
		y.unit.mu.Lock()
		defer y.unit.mu.Unlock()
		for l := range y.unit.seen {
			if l.prevents {
				t.Error("a preempted nexus still prevents the removal of the medium")
			}
		}
	})
}

// A gateway that has missed changes ends the commands of all nexuses that lost a registration, also if they have another one, and
// tells them. With the log it knows exactly what has happened; without it, it guesses.
func TestSharedMissed(t *testing.T) {
	for name, tc := range map[string]struct {
		more             int // REGISTERs that make the log forget
		b, c, d, aborted string
	}{
		"exact": {0, "2a/03", "2a/05", "", "c"},
		"guess": {maxLog, "2a/05", "2a/05", "", "bc"},
	} {
		t.Run(name, func(t *testing.T) {
			sharedBubble(t, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
				x, y := g[0], g[1]
				a, b, c, d := x.enter("a"), y.enter("b"), y.enter("c"), y.enter("d")
				gr.ok(a, prRegister, 0, 0, 1)
				for n, key := range map[*Nexus]uint64{b: 2, c: 3} {
					gr.ok(n, prRegister, 0, 0, key)
				}
				var aborted sync.Map
				for who, n := range map[string]*Nexus{"b": b, "c": c, "d": d} {
					n.OnPreempt(func([8]byte, *Command) { aborted.Store(who, true) })
				}
				y.link.Cut(true)
				gr.ok(a, prPreemptAndAbort, 5, 1, 3)
				// b is removed and registered again.
				gr.ok(a, prClear, 0, 1, 0)
				const allTgPt = 0x04
				list := portList(0, 1, allTgPt, b.name.initiator.appendTransportID(nil))
				wantGood(t, "REGISTER with SPEC_I_PT", send(a, fmt.Sprintf("5f 00 00 0000 %08x 00", len(list)), list))
				for range tc.more {
					gr.ok(a, prRegister, 0, 1, 1)
				}
				if len(y.unit.Reservation().Registrations) != 3 {
					t.Fatalf("gateway y has followed: %s", y.has())
				}
				y.link.Cut(false)
				y.join(y.unit)
				synctest.Wait()
				if x.has() != y.has() {
					t.Errorf("the gateways have %s and %s", x.has(), y.has())
				}
				gr.wantDue(b, tc.b)
				gr.wantDue(c, tc.c)
				gr.wantDue(d, tc.d)
				got := ""
				for _, who := range []string{"b", "c", "d"} {
					if _, ok := aborted.Load(who); ok {
						got += who
					}
				}
				if got != tc.aborted {
					t.Errorf("the commands of %q have ended, want %q", got, tc.aborted)
				}
			})
		})
	}
}

// A reset of the unit leaves the reservations on all gateways. A loss of power ends those that APTPL does not keep, everywhere.
func TestSharedPower(t *testing.T) {
	sharedBubble(t, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		x, y := g[0], g[1]
		a, b := x.enter("a"), y.enter("b")
		gr.ok(a, prRegister, 0, 0, 1)
		gr.ok(b, prRegister, 0, 0, 2)
		gr.ok(a, prReserve, 1, 1, 0)
		a.ResetUnit([8]byte{}, true)
		gr.wantDue(a, "29/03")
		x.want("1@2 a1=1* b2=2")
		y.want("1@2 a1=1* b2=2")

		x.inv.PowerOn()
		gr.wantDue(a, "29/00")
		gr.wantDue(b, "29/00")
		x.want("0@0")
		y.want("0@0")
		wantGood(t, "REGISTER with APTPL", send(b, prOutCDB(prRegister, 0), prList(0, 2, 1)))
		y.inv.PowerOn()
		gr.wantDue(a, "29/00")
		x.want("0@0 b2=2")
		y.want("0@0 b2=2")
		x.inv.PowerOn() // nothing to lose
		gr.wantDue(b, "29/00")

		// A gateway that starts besides another one finds all.
		gr.ok(b, prRegister, 0, 2, 5) // without APTPL
		x.stop()
		x = gr.start("x", 1)
		x.want("0@1 b2=5")
		y.stop()
		x.stop()
		x = gr.start("x", 1)
		x.want("0@0")

		// So does one after a crash, but what died with the same name is not another one.
		a = x.enter("a")
		gr.ok(a, prRegister, 0, 0, 1)
		x.kill()
		x = gr.start("x", 1)
		x.want("0@0")
		a = x.enter("a")
		wantGood(t, "REGISTER with APTPL", send(a, prOutCDB(prRegister, 0), prList(0, 1, 1)))
		x.kill()
		y = gr.start("y", 2) // while x may live
		y.want("0@1 a1=1")
		time.Sleep(10 * time.Second)
		y.kill()
		time.Sleep(10 * time.Second)
		x = gr.start("x", 1)
		x.want("0@0 a1=1")
	})
}

// While nobody has a lease because the home does not answer, that is no loss of power.
func TestSharedOutage(t *testing.T) {
	sharedBubble(t, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		a, b := g[0].enter("a"), g[1].enter("b")
		gr.ok(a, prRegister, 0, 0, 1)
		gr.ok(a, prReserve, 3, 1, 0)
		for _, g := range g {
			g.link.Cut(true)
		}
		time.Sleep(time.Minute)
		if err := g[0].shared.Err(); !errors.Is(err, state.ErrUnreachable) {
			t.Errorf("Err = %v", err)
		}
		if res := send(a, sharedWrite, sharedBlock); res.status != StatusBusy {
			t.Errorf("WRITE without a lease: status %#x", res.status)
		}
		for _, g := range g {
			g.link.Cut(false)
		}
		for _, g := range g {
			g.join(g.unit)
			g.want("3@1 a1=1*")
			if err := g.shared.Err(); err != nil {
				t.Errorf("Err = %v", err)
			}
		}
		gr.wantDue(a, "")
		gr.wantDue(b, "")

		// If a gateway starts meanwhile that knows of nothing, it was one for the others.
		g[0].link.Cut(true)
		g[1].link.Cut(true)
		time.Sleep(time.Minute)
		z := gr.start("z", 3)
		z.want("0@0")
		g[0].link.Cut(false)
		g[0].join(g[0].unit)
		g[0].want("0@0")
		gr.wantDue(a, "29/00")
	})
}

// A unit that is closed takes part no longer, also while its gateway keeps its lease.
func TestSharedLeave(t *testing.T) {
	sharedBubble(t, "xy", func(t *testing.T, _ *sharedGroup, g []*sharedGateway) {
		if err := g[0].inv.Remove(0).Close(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if n := len(g[0].shared.all()); n != 0 {
			t.Errorf("%d members are left", n)
		}
		if n := len(g[1].shared.all()); n != 1 {
			t.Errorf("the other gateway has %d members", n)
		}
	})
}
