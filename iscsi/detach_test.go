package iscsi

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// fencingTime is what docs/limits.md promises: what ends tasks is answered in that time, whatever
// their store and their initiator do.
const fencingTime = 2 * time.Second

// A hungRig has a session with a WRITE of one block that hangs in the store of LUN 0, and another
// session. LUN 1 has another store.
type hungRig struct {
	*testNode
	victim, other *testConn
	gate          *backendtest.Gate
	hung          pdu.BHS // the WRITE
}

func newHungRig(t *testing.T, change ...func(*Options)) *hungRig {
	t.Helper()
	r := &hungRig{testNode: newTestNode(t, change...)}
	u, err := lun.New(newStore(t), lun.Options{Identity: state.Identity{NAA: [8]byte{0x30, 7: 9}, Serial: "3000000000000009"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := r.inv.Add(1, u); err != nil {
		t.Fatal(err)
	}
	r.victim = r.connect().login()
	r.other = r.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
	for _, tc := range []*testConn{r.victim, r.other} {
		tc.wantSense(tc.onLUN(1, pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x29, 0)
	}
	r.other.register(1)
	r.victim.register(2)
	r.gate = r.store.Shut(backendtest.WriteAt)
	t.Cleanup(r.gate.Open)
	r.hung = r.victim.command(writeF, 512, cdb.Write10(7, 1), bytes.Repeat([]byte{'v'}, 512))
	<-r.gate.Entered
	return r
}

// enter logs in like login, and leaves the unit attentions.
func (tc *testConn) enter() *testConn {
	tc.tb.Helper()
	tc.writeLogin(tc.loginRequest(true, 1, 3), slices.Concat(names, linuxKeys)...)
	r, _ := tc.wantLogin(pdu.LoginSuccess)
	tc.tsih = r.TSIH
	return tc
}

// onLUN sends a SCSI Command to a LUN.
func (tc *testConn) onLUN(lun byte, flags byte, edtl uint32, block [16]byte, immediate []byte) pdu.BHS {
	h := tc.scsi(flags, edtl, block)
	h.SetLUN([8]byte{1: lun})
	tc.write(h, immediate)
	return h
}

// register registers a key by PERSISTENT RESERVE OUT.
func (tc *testConn) register(key byte) {
	tc.tb.Helper()
	tc.wantStatus(tc.command(writeF, 24, [16]byte{0x5f, 6, 0, 8: 24}, []byte{15: key, 23: 0}), 0)
}

// preemptAndAbort sends PREEMPT AND ABORT of the key that a second session has registered.
func (tc *testConn) preemptAndAbort(own, key byte) pdu.BHS {
	return tc.command(writeF, 24, [16]byte{0x5f, 5, 1, 8: 24}, []byte{7: own, 15: key, 23: 0})
}

// wantServed checks that LUN 1 is served as if nothing were wrong, and that LUN 0 tells who it is.
func (tc *testConn) wantServed() {
	tc.tb.Helper()
	begin := time.Now()
	data := bytes.Repeat([]byte{byte(tc.ITT)}, 512)
	tc.wantStatus(tc.onLUN(1, writeF, 512, cdb.Write10(uint32(tc.isid[5]), 1), data), 0)
	h := tc.onLUN(1, readF, 512, cdb.Read10(uint32(tc.isid[5]), 1), nil)
	tc.wantStatus(h, 0)
	if !bytes.Equal(tc.m.sink[h.ITT()], data) {
		tc.tb.Error("LUN 1 returned other data")
	}
	tc.wantStatus(tc.command(readF, 36, [16]byte{0x12, 4: 36}, nil), 0)
	tc.wantStatus(tc.command(readF, 8, [16]byte{0x25}, nil), 0)
	tc.wantStatus(tc.command(readF, 8, [16]byte{0x5e, 8: 8}, nil), 0)
	if took := time.Since(begin); took > 0 {
		tc.tb.Errorf("the neighbour of a hung LUN waited %v", took)
	}
}

// wantHeldUp checks that LUN 0 begins nothing that touches its store, and says so at once.
func (tc *testConn) wantHeldUp() {
	tc.tb.Helper()
	tc.skipAttentions()
	begin := time.Now()
	for _, c := range []struct {
		flags byte
		edtl  uint32
		cdb   [16]byte
	}{
		{writeF, 512, cdb.Write10(7, 1)},
		{readF, 512, cdb.Read10(7, 1)},
		{pdu.FlagF, 0, [16]byte{0x35}},       // SYNCHRONIZE CACHE
		{pdu.FlagF, 0, [16]byte{0x1b, 4: 0}}, // STOP UNIT
	} {
		h := tc.command(c.flags, c.edtl, c.cdb, nil)
		p := tc.want(pdu.SCSIResponse)
		if p.h.ITT() != h.ITT() || p.h.Status() != lun.StatusBusy {
			tc.tb.Fatalf("SCSI Response %x %x, want BUSY", []byte(p.h), p.data)
		}
	}
	tc.wantSense(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 2, 0x04, 0x00)
	if took := time.Since(begin); took > 0 {
		tc.tb.Errorf("a LUN that is held up let commands wait %v", took)
	}
}

// skipAttentions takes the unit attentions of LUN 0, and what a session is told unasked.
func (tc *testConn) skipAttentions() {
	tc.tb.Helper()
	for range 4 {
		h := tc.command(pdu.FlagF, 0, [16]byte{0x1b, 4: 1}, nil) // START UNIT: BUSY if held up
		p := tc.next(testkit.Patience)
		for p != nil && p.h.ITT() == pdu.ReservedTag { // news about the window
			p = tc.next(testkit.Patience)
		}
		if p == nil || p.h.ITT() != h.ITT() {
			tc.tb.Fatalf("no answer to START UNIT, but %+v", p)
		}
		tc.statSeen = false
		if p.h.Status() != lun.StatusCheckCondition {
			return
		}
	}
	tc.tb.Fatal("unit attentions without end")
}

// wantRecovery opens the gate. The hung WRITE has to land before a WRITE that is acknowledged later.
func (r *hungRig) wantRecovery(tc *testConn) {
	r.tb.Helper()
	r.gate.Open()
	testkit.Eventually(r.tb, "no detached task", func() bool { return r.Stats().DetachedTasks == 0 })
	later := bytes.Repeat([]byte{'l'}, 512)
	tc.skipAttentions()
	tc.wantStatus(tc.command(writeF, 512, cdb.Write10(7, 1), later), 0)
	if got := r.stored(7, 512); !bytes.Equal(got, later) {
		r.tb.Errorf("a write that was given up has overtaken a later one: the block has %q", got[:1])
	}
	tc.wantStatus(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
}

// What ends tasks is answered in bounded time although the store of one hangs. Nobody else waits,
// and nothing is overtaken when the store answers at last.
func TestFencingOfAHungStore(t *testing.T) {
	tmf := func(function byte) func(r *hungRig, by *testConn) {
		return func(r *hungRig, by *testConn) {
			by.wantTMF(by.tmf(function, [8]byte{}, r.hung.ITT(), r.hung.CmdSN()), pdu.FunctionComplete)
		}
	}
	for _, c := range []struct {
		name  string
		own   bool // the session of the hung command asks for it
		fence func(r *hungRig, by *testConn)
	}{
		{"ABORT TASK", true, tmf(pdu.AbortTask)},
		{"ABORT TASK SET", true, tmf(pdu.AbortTaskSet)},
		{"CLEAR TASK SET", true, tmf(pdu.ClearTaskSet)},
		{"LOGICAL UNIT RESET", true, tmf(pdu.LogicalUnitReset)},
		{"CLEAR TASK SET of another", false, tmf(pdu.ClearTaskSet)},
		{"LOGICAL UNIT RESET of another", false, tmf(pdu.LogicalUnitReset)},
		{"TARGET WARM RESET of another", false, tmf(pdu.TargetWarmReset)},
		{"PREEMPT AND ABORT", false, func(_ *hungRig, by *testConn) { by.wantStatus(by.preemptAndAbort(1, 2), 0) }},
	} {
		bubble(t, c.name, func(t *testing.T) {
			r := newHungRig(t)
			by := r.other
			if c.own {
				by = r.victim
			}
			r.victim.wantServed()
			r.other.wantServed()
			begin := time.Now()
			c.fence(r, by)
			if took := time.Since(begin); took > fencingTime {
				t.Errorf("answered after %v", took)
			}
			if !c.own {
				r.victim.wantAborted(r.hung, 512)
			}
			for _, tc := range []*testConn{r.victim, r.other} {
				tc.wantHeldUp()
				if c.name != "TARGET WARM RESET of another" {
					tc.wantServed()
				}
			}
			if s := r.Stats(); s.DetachedTasks != 1 {
				t.Errorf("%d tasks are detached, want 1", s.DetachedTasks)
			}
			r.wantRecovery(r.other)
			r.victim.skipAttentions()
			r.victim.ping()
			r.victim.wantOpenWindow()
			r.victim.logout()
			r.other.logout()
		})
	}
}

// A session whose command hangs in the store ends in bounded time, and its initiator port is back.
func TestSessionOfAHungStoreEnds(t *testing.T) {
	killed := errors.New("killed")
	for _, c := range []struct {
		name string
		end  func(r *hungRig)
	}{
		{"logout", func(r *hungRig) { r.victim.logout() }},
		{"the connection is lost", func(r *hungRig) {
			r.victim.m.Close()
			r.victim.wait()
		}},
		{"session reinstatement", func(r *hungRig) {
			r.connect().enter().logout()
			if err := r.victim.wait(); !errors.Is(err, errReinstated) {
				r.tb.Error(err)
			}
		}},
		{"session kill", func(r *hungRig) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
			defer cancel()
			if err := r.EndSession(ctx, r.victim.tsih, 0, killed); err != nil {
				r.tb.Error(err)
			}
			if err := r.victim.wait(); !errors.Is(err, killed) {
				r.tb.Error(err)
			}
		}},
	} {
		bubble(t, c.name, func(t *testing.T) {
			r := newHungRig(t)
			begin := time.Now()
			c.end(r)
			testkit.Eventually(t, "the end of the session", func() bool { return r.Stats().Sessions == 1 })
			if took := time.Since(begin); took > fencingTime {
				t.Errorf("ended after %v", took)
			}
			r.other.wantServed()
			again := r.connect().enter()
			again.wantHeldUp()
			r.wantRecovery(again)
			again.logout()
			r.other.logout()
		})
	}
}

// A shutdown does not wait for a store that hangs.
func TestShutdownWithAHungStore(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		r := newHungRig(t)
		begin := time.Now()
		if err := r.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		if took := time.Since(begin); took > fencingTime+2*partingWait {
			t.Errorf("the shutdown took %v", took)
		}
		for _, tc := range []*testConn{r.victim, r.other} {
			tc.m.Close()
			tc.wait()
		}
		if s := r.Stats(); s.DetachedTasks != 1 || s.BuffersOut != 0 && s.BuffersOut != 1 {
			t.Errorf("%+v", s)
		}
		r.gate.Open()
	})
}

// A connection that is lost at ErrorRecoveryLevel 2 is free for its reinstatement in bounded time
// although a command of it hangs.
func TestReinstatedConnectionOfAHungStore(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, recovering)
		a := n.leadRecovering()
		gate := n.store.Shut(backendtest.ReadAt)
		t.Cleanup(gate.Open)
		a.command(readF, 4096, cdb.Read10(0, 8), nil)
		<-gate.Entered
		begin := time.Now()
		a.m.Close()
		a.wait()
		if took := time.Since(begin); took > fencingTime {
			t.Errorf("the connection ended after %v", took)
		}
		gate.Open()
		n.Shutdown(context.Background())
	})
}

// The memory of a detached command does not count for its connection, which continues with all of
// its memory.
func TestMemoryOfDetachedTasks(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		r := newHungRig(t, func(o *Options) { o.ConnectionMemory, o.MaxTransferPiece = 1<<20, 1<<20 })
		gate := r.store.Shut(backendtest.ReadAt)
		t.Cleanup(gate.Open)
		tc := r.other
		h := tc.command(readF, 1<<20, cdb.Read10(0, 2048), nil) // takes all memory
		<-gate.Entered
		waits := tc.onLUN(1, readF, 1<<20, cdb.Read10(0, 2048), nil)
		f := tc.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		got := map[uint32]bool{}
		for range 2 {
			got[tc.next(testkit.Patience).h.ITT()] = true
		}
		if !got[waits.ITT()] || !got[f.ITT()] {
			t.Errorf("answers of the tasks %v, want %d and %d", got, waits.ITT(), f.ITT())
		}
		tc.statSeen = false
		gate.Open()
		testkit.Eventually(t, "the return of the READ", func() bool { return r.Stats().BuffersOut == 0 })
		r.gate.Open()
		testkit.Eventually(t, "the end of the WRITE", func() bool { return r.victim.next(testkit.Patience) != nil })
		tc.skipAttentions()
		tc.logout()
		r.victim.statSeen = false
		r.victim.logout()
	})
}

// An initiator that takes no data does not hold up the functions of others: its task counts as ended
// when it only waits for the network.
func TestFencingOfAStalledReader(t *testing.T) {
	for _, fence := range []string{"LOGICAL UNIT RESET", "CLEAR TASK SET", "PREEMPT AND ABORT"} {
		bubble(t, fence, func(t *testing.T) {
			n := newTestNode(t, func(o *Options) { o.MaxTransferPiece = 64 << 10 })
			victim := n.connect().login()
			other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
			other.register(1)
			victim.register(2)
			hold := func(on bool) {
				victim.m.mu.Lock()
				defer victim.m.mu.Unlock()
				victim.m.holdFlush = on
				victim.m.cond.Broadcast()
			}
			hold(true)
			h := victim.command(readF, 1<<20, cdb.Read10(0, 2048), nil)
			synctest.Wait()
			reads := n.store.Calls(backendtest.ReadAt)
			begin := time.Now()
			switch fence {
			case "LOGICAL UNIT RESET":
				other.wantTMF(other.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
			case "CLEAR TASK SET":
				other.wantTMF(other.tmf(pdu.ClearTaskSet, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
			default:
				other.wantStatus(other.preemptAndAbort(1, 2), 0)
			}
			if took := time.Since(begin); took > 0 {
				t.Errorf("answered after %v", took)
			}
			hold(false)
			synctest.Wait()
			if now := n.store.Calls(backendtest.ReadAt); now != reads {
				t.Errorf("the aborted READ read %d pieces more", now-reads)
			}
			victim.wantAborted(h, 1<<20-64<<10) // of which one piece was on its way
			victim.skipAttentions()
			victim.logout()
			other.skipAttentions()
			other.logout()
		})
	}
}
