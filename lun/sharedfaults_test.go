package lun

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
)

// unconfirmed returns how many changes the gateway has reported as not confirmed, and the last reason.
func (g *sharedGateway) unconfirmed() (n int, reason string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, e := range g.events {
		if e, ok := e.(ReservationUnconfirmedEvent); ok {
			n, reason = n+1, e.Err.Error()
		}
	}
	return n, reason
}

// A change that another gateway does not acknowledge in time is BUSY, and in force. The second attempt waits again, and changes nothing. What
// is not the same command, or comes after another change, is not the second attempt.
func TestSharedUnconfirmed(t *testing.T) {
	sharedBubble(t, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		x, y := g[0], g[1]
		a, c := x.enter("a"), x.enter("c")
		gr.limit = time.Second
		y.link.Cut(true)
		wantBusy := func(what string, res result) {
			t.Helper()
			if res.status != StatusBusy {
				t.Fatalf("%s: status %#x, sense % x; want BUSY", what, res.status, res.sense)
			}
		}
		wantBusy("REGISTER", sendOut(a, prRegister, 0, 0, 1))
		x.want("0@1 a1=1")
		if n, reason := x.unconfirmed(); n != 1 || reason != "operation 1 is in force, but y has not acknowledged it within 1s" {
			t.Errorf("%d are not confirmed, the last because of %q", n, reason)
		}
		wantBusy("the second attempt", sendOut(a, prRegister, 0, 0, 1))
		y.link.Cut(false)
		gr.ok(a, prRegister, 0, 0, 1)
		x.want("0@1 a1=1")
		y.want("0@1 a1=1")
		wantConflict(t, "another REGISTER with the old key", sendOut(a, prRegister, 0, 0, 1))

		y.link.Cut(true)
		wantBusy("REGISTER", sendOut(a, prRegister, 0, 1, 2))
		y.link.Cut(false)
		wantConflict(t, "another command", sendOut(a, prRegister, 0, 1, 3))
		y.link.Cut(true)
		wantBusy("REGISTER", sendOut(a, prRegister, 0, 2, 3))
		y.link.Cut(false)
		gr.ok(c, prRegister, 0, 0, 7)
		wantConflict(t, "a second attempt after another change", sendOut(a, prRegister, 0, 2, 3))
		x.want("0@4 a1=3 c1=7")
		y.want("0@4 a1=3 c1=7")

		// An abort ends the wait.
		gr.limit = time.Minute
		y.link.Cut(true)
		p := beginOut(a, prReserve, 1, 3, 0)
		time.Sleep(time.Second)
		p.abort.Store(true)
		<-p.done
		wantSense(t, p.res, 0xb, 0x00, 0x00)
		x.want("1@4 a1=3* c1=7")
		y.link.Cut(false)
		gr.ok(a, prReserve, 1, 3, 0)
		y.want("1@4 a1=3* c1=7")
	})
}

// Of a change whose answer is lost, the home says whether it counts. If the home does not answer in time, the change may come into force
// later, and is BUSY; one that was certainly not stored is an error.
func TestSharedLostAnswer(t *testing.T) {
	sharedBubble(t, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		x, y := g[0], g[1]
		a, b := x.enter("a"), y.enter("b")
		x.link.Lose(sharedRecordKey+testIdentity.Serial, 1)
		gr.ok(a, prRegister, 0, 0, 1)
		x.want("0@1 a1=1")
		y.want("0@1 a1=1")

		gr.limit = 2 * time.Second
		x.link.Slow(200 * time.Millisecond)
		synctest.Wait()
		p := beginOut(a, prReserve, 3, 1, 0)
		for y.has() != "3@1 a1=1*" {
			time.Sleep(time.Millisecond)
			if p.isDone() {
				t.Fatalf("RESERVE has ended with status %#x before the other gateway has it", p.res.status)
			}
		}
		x.want("0@1 a1=1")
		x.link.Cut(true)
		<-p.done
		if p.res.status != StatusBusy {
			t.Errorf("RESERVE whose answer is lost: status %#x, sense % x", p.res.status, p.res.sense)
		}
		wantConflict(t, "READ on the other gateway", send(b, sharedRead, nil))
		x.link.Slow(0)
		x.link.Cut(false)
		gr.ok(a, prReserve, 3, 1, 0)
		x.want("3@1 a1=1*")

		gr.limit = 500 * time.Millisecond
		x.link.Cut(true)
		wantSense(t, sendOut(a, prRelease, 3, 1, 0), 0x4, 0x44, 0x00)
		if _, err := x.unit.ClearReservation(); !errors.Is(err, state.ErrUnreachable) || !strings.Contains(err.Error(), "nothing was stored within 500ms") {
			t.Errorf("ClearReservation without the home: %v", err)
		}
		x.link.Cut(false)
		time.Sleep(time.Minute)
		x.want("3@1 a1=1*")
		y.want("3@1 a1=1*")
	})
}

// A gateway whose lease the home has ended joins again.
func TestSharedRevoked(t *testing.T) {
	sharedBubble(t, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		a, b := g[0].enter("a"), g[1].enter("b")
		gr.ok(a, prRegister, 0, 0, 1)
		gr.ok(b, prRegister, 0, 0, 2)
		g[1].link.ExpireLeases()
		gr.ok(a, prPreempt, 0, 1, 2)
		time.Sleep(3 * time.Second)
		g[1].join(g[1].unit)
		g[1].want("0@3 a1=1")
		gr.wantDue(b, "2a/05")
	})
}

// A record that is damaged, goes back, or is removed stops its unit on all gateways. Its neighbor serves.
func TestSharedDamage(t *testing.T) {
	sharedBubble(t, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		neighbor := testIdentity
		neighbor.NAA[7]++
		neighbor.Serial = "3001020304050608"
		x := g[0]
		other := x.newUnit(neighbor)
		x.join(other)
		if err := x.inv.Add(1, other); err != nil {
			t.Fatal(err)
		}
		a := x.enter("a")
		gr.ok(a, prRegister, 0, 0, 1)
		home := gr.memory.Link(0)
		key := sharedRecordKey + testIdentity.Serial
		old, err := home.Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		gr.ok(a, prRegister, 0, 1, 2)
		good, err := home.Get(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		last := good.Revision
		for _, tc := range []struct{ data, want string }{
			{"{", "is damaged"},
			{strings.Replace(string(good.Data), `"version": 1`, `"version": 2`, 1), "has version 2, but this program knows only version 1"},
			{strings.ReplaceAll(string(good.Data), testIdentity.Serial, neighbor.Serial), "is that of NAA"},
			{string(old.Data), "has operation 1, but this gateway knows operation 2"},
			{"", "has operation 0, but this gateway knows operation 2"},
		} {
			put := func(data []byte) {
				if last, err = home.Put(t.Context(), key, data, last); err != nil {
					t.Fatal(err)
				}
				time.Sleep(5 * time.Second)
			}
			data := []byte(tc.data)
			if tc.data == "" {
				data = nil
			}
			put(data)
			for _, g := range g {
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				if err := g.unit.JoinShared(ctx); err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("with %.20q in the home the error is %v, want %q", tc.data, err, tc.want)
				}
				cancel()
			}
			if res := send(a, sharedRead, nil); res.status != StatusBusy {
				t.Errorf("with %.20q in the home READ: status %#x", tc.data, res.status)
			}
			wantGood(t, "READ of the neighbor", do(a, &Command{}, [8]byte{1: 1}, sharedRead, nil, all))
			put(good.Data)
			for _, g := range g {
				g.join(g.unit)
				g.want("0@2 a1=2")
			}
			wantGood(t, "READ", send(a, sharedRead, nil))
		}
	})
}

// A unit that takes the place of another one, in this process or in the next, continues where that was, and its initiators miss no unit
// attention.
func TestSharedReload(t *testing.T) {
	sharedBubble(t, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		x, y := g[0], g[1]
		a, b := x.enter("a"), y.enter("b")
		gr.ok(a, prRegister, 0, 0, 1)
		gr.ok(b, prRegister, 0, 0, 2)
		next := y.newUnit(testIdentity)
		next.InheritFrom(y.unit)
		y.join(next)
		old := y.inv.Replace(0, next)
		y.unit = next
		gr.wantDue(b, "28/00")
		gr.ok(a, prPreempt, 0, 1, 2) // both follow
		gr.wantDue(b, "2a/05")
		if err := old.Close(); err != nil {
			t.Error(err)
		}
		gr.ok(b, prRegister, 0, 0, 3)
		x.want("0@4 a1=1 b2=3")
		y.want("0@4 a1=1 b2=3")

		// Also if no other gateway serves the unit, that is no loss of power. Neither is another process.
		x.stop()
		next = y.newUnit(testIdentity)
		next.InheritFrom(y.unit)
		y.join(next)
		old = y.inv.Replace(0, next)
		y.unit = next
		if err := old.Close(); err != nil {
			t.Error(err)
		}
		y.want("0@4 a1=1 b2=3")
		st := y.unit.State()
		y.stop()
		y = gr.prepare("y", 2)
		if err := y.unit.Restore(st); err != nil {
			t.Fatal(err)
		}
		y.serve()
		y.want("0@4 a1=1 b2=3")
		for _, n := range st.Shared.Numbers {
			if n == 0 {
				t.Errorf("the numbers are %v", st.Shared.Numbers)
			}
		}
		st.Shared.Numbers = nil
		if err := y.newUnit(testIdentity).Restore(st); err == nil || err.Error() != "2 registrations, and the numbers of 0 of them" {
			t.Errorf("Restore without numbers: %v", err)
		}
	})
}

// What happens while the store of a gateway is absent reaches its initiators when that is back.
func TestSharedAbsent(t *testing.T) {
	sharedBubble(t, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		x, y := g[0], g[1]
		a, b, c := x.enter("a"), y.enter("b"), y.enter("c")
		gr.ok(a, prRegister, 0, 0, 1)
		gr.ok(b, prRegister, 0, 0, 2)
		absent, err := NewAbsent(0, Options{Identity: testIdentity, Shared: y.shared, Events: func(Event) {}})
		if err != nil {
			t.Fatal(err)
		}
		absent.InheritFrom(y.unit)
		old := y.inv.Replace(0, absent)
		if err := old.Close(); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Second)
		gr.ok(a, prPreempt, 0, 1, 2)
		due(b)
		due(c)
		y.unit = y.newUnit(testIdentity)
		y.unit.InheritFrom(absent)
		y.join(y.unit)
		if err := y.inv.Replace(0, y.unit).Close(); err != nil {
			t.Error(err)
		}
		y.want("0@3 a1=1")
		gr.wantDue(b, "28/00 2a/05")
		gr.wantDue(c, "28/00")
		gr.ok(b, prRegister, 0, 0, 2)
		gr.ok(a, prPreempt, 0, 1, 2)
		gr.wantDue(b, "2a/05")
	})
}

// The reservations of a deleted unit can be forgotten. A unit without JoinShared serves nothing.
func TestSharedRemove(t *testing.T) {
	sharedBubble(t, "x", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
		x := g[0]
		a := x.enter("a")
		wantGood(t, "REGISTER", send(a, prOutCDB(prRegister, 0), prList(0, 1, 1)))
		x.stop()
		y := gr.prepare("y", 2)
		if err := y.inv.Add(0, y.unit); err != nil {
			t.Fatal(err)
		}
		if res := send(y.enter("b"), sharedRead, nil); res.status != StatusBusy {
			t.Errorf("READ before JoinShared: status %#x", res.status)
		}
		for range 2 {
			if err := y.shared.Remove(t.Context(), testIdentity.Serial); err != nil {
				t.Error(err)
			}
		}
		y.join(y.unit)
		y.want("0@0")
	})
}

func TestSharedOptions(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		for want, o := range map[string]SharedOptions{
			"the home is missing":                        {Gateway: "x"},
			`"" is not a name of a gateway`:              {Home: fakeLessor{}},
			`"x/y" is not a name of a gateway`:           {Home: fakeLessor{}, Gateway: "x/y"},
			"a lease of 1ms: it has to be at least 1s":   {Home: fakeLessor{}, Gateway: "x", TTL: time.Millisecond},
			"a margin of 3s: it can be 0s to 2.5s, half": {Home: fakeLessor{}, Gateway: "x", Margin: 3 * time.Second},
		} {
			if s, err := NewSharedReservations(o); s != nil || err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("NewSharedReservations(%+v) = %v, want %q", o, err, want)
			}
		}
	})
}

// A fakeLessor is a home that nobody calls.
type fakeLessor struct{ state.Lessor }

func TestSharedRecord(t *testing.T) {
	const golden = `{
  "version": 1,
  "naa": "3001020304050607",
  "epoch": 1,
  "operation": 7,
  "generation": 4,
  "aptpl": true,
  "type": 5,
  "registrations": [
    {
      "initiator": "iqn.2026-11.io.example:a,i,0x00023d000001",
      "target_port": 1,
      "key": "0xa0a1a2a3a4a5a6a7",
      "all_target_ports": false,
      "holder": true,
      "number": 3
    }
  ],
  "log": [
    {
      "id": "x/1.1",
      "action": "REGISTER",
      "by": "x"
    },
    {
      "id": "x/1.2",
      "action": "PREEMPT AND ABORT",
      "by": "x",
      "notices": [
        {
          "initiator": "iqn.2026-11.io.example:c,i,0x00023d000001",
          "target_port": 2,
          "attention": "2a/05"
        }
      ],
      "aborts": true,
      "aborted": [
        {
          "initiator": "iqn.2026-11.io.example:c,i,0x00023d000001",
          "target_port": 2
        }
      ]
    }
  ]
}
`
	rec, err := sharedFormat.Decode([]byte(golden))
	if err != nil {
		t.Fatal(err)
	}
	p, s, err := rec.decode()
	if err != nil {
		t.Fatal(err)
	}
	if b, err := state.Encode(p.encode(rec.NAA, &s)); err != nil || string(b) != golden {
		t.Errorf("it comes back as %s, %v", b, err)
	}
	if p.find("x/1.1") != 6 || p.find("x/1.2") != 7 || p.find("x/1.3") != 0 {
		t.Errorf("the operations have the numbers %d and %d", p.find("x/1.1"), p.find("x/1.2"))
	}
	for want, change := range map[string][2]string{
		"naa is empty":                             {`"3001020304050607"`, `""`},
		"operation 0, epoch 1":                     {`"operation": 7`, `"operation": 0`},
		"operation 7, epoch 9":                     {`"epoch": 1`, `"epoch": 9`},
		"the log has 2 operations, want 1 to 1":    {`"epoch": 1,` + "\n" + `  "operation": 7`, `"epoch": 1,` + "\n" + `  "operation": 1`},
		"registrations[0]: number 8, want 1 to":    {`"number": 3`, `"number": 8`},
		"registrations[0]: number 0, want 1 to":    {`"number": 3`, `"number": 0`},
		"want 1 for type 5":                        {`"holder": true`, `"holder": false`},
		`log[1]: id "x/1.1" is there twice`:        {"x/1.2", "x/1.1"},
		"log[0]: the id is empty":                  {`"x/1.1"`, `""`},
		"log[0]: the action is empty":              {`"REGISTER"`, `""`},
		"log[1]: aborts is false, but aborted":     {`      "aborts": true,` + "\n", ""},
		`log[1]: notices[0]: attention "29/00"`:    {"2a/05", "29/00"},
		"log[1]: notices[0]: target port 0":        {`"target_port": 2,`, `"target_port": 0,`},
		"log[1]: aborted[0]: target port 0":        {`"target_port": 2` + "\n", `"target_port": 0` + "\n"},
		"have to be lists":                         {golden[strings.Index(golden, `"log": [`) : len(golden)-2], `"log": null` + "\n"},
		"is damaged: json: unknown field \"unit\"": {`"naa"`, `"unit"`},
	} {
		damaged := strings.Replace(golden, change[0], change[1], 1)
		if damaged == golden {
			t.Errorf("%s: nothing was damaged", want)
		}
		if _, err := sharedFormat.Decode([]byte(damaged)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error is %v, want %q", err, want)
		}
	}

	// The log is bounded, and keeps its last operation, however long that is.
	var old prState
	p = position{known: true}
	for i := range 40 {
		op := operation{id: fmt.Sprint(i), action: "REGISTER", by: "x"}
		next := old
		if i%20 == 19 {
			op.effects.notices = make([]notice, 2*maxLogSize)
		}
		p = p.next(&old, &next, op)
		switch {
		case p.operation != uint64(i+1) || p.log[len(p.log)-1].id != op.id:
			t.Fatalf("operation %d is not the last one of %d", i+1, p.operation)
		case len(p.log) > maxLog, i%20 == 19 && len(p.log) != 1:
			t.Errorf("after operation %d the log has %d", i+1, len(p.log))
		}
	}
	if len(p.log) != 1 {
		t.Errorf("the log has %d operations", len(p.log))
	}
}

func FuzzSharedRecord(f *testing.F) {
	f.Add([]byte(`{"version":1,"naa":"3001020304050607","epoch":0,"operation":1,"generation":1,"aptpl":false,"type":0,"registrations":[],"log":[{"id":"x","action":"CLEAR","by":"x"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		rec, err := sharedFormat.Decode(b)
		if err != nil {
			return
		}
		p, s, err := rec.decode()
		if err != nil {
			t.Fatal(err)
		}
		again, err := state.Encode(p.encode(rec.NAA, &s))
		if err != nil {
			t.Fatal(err)
		}
		if rec2, err := sharedFormat.Decode(again); err != nil || fmt.Sprint(rec2) != fmt.Sprint(rec) {
			t.Fatalf("%+v came back as %+v, %v", rec, rec2, err)
		}
	})
}

// The first changes of a unit come while its gateways still look for earlier ones.
func TestSharedFirstChange(t *testing.T) {
	for seed := range uint64(200) {
		sharedBubbleOf(t, seed, "xy", func(t *testing.T, gr *sharedGroup, g []*sharedGateway) {
			a, b := g[0].enter("a"), g[1].enter("b")
			p, q := beginOut(a, prRegister, 0, 0, 1), beginOut(b, prRegister, 0, 0, 2)
			<-p.done
			<-q.done
			wantGood(t, "REGISTER of a", p.res)
			wantGood(t, "REGISTER of b", q.res)
			for _, g := range g {
				g.want("0@2 a1=1 b2=2")
			}
		})
	}
}
