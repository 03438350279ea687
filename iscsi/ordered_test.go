package iscsi

import (
	"bytes"
	"io"
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

// rival is another initiator: a neighbour of the one under test, or the one that attacks it.
const rival = "iqn.1993-08.org.debian:01:rival"

// enter logs in as initiator rival.
func (n *testNode) enter() *testConn {
	n.tb.Helper()
	tc := n.connect()
	tc.writeLogin(tc.loginRequest(true, 1, 3), append([]string{"InitiatorName=" + rival,
		"TargetName=" + targetName, "SessionType=Normal"}, linuxKeys...)...)
	return tc.loggedIn()
}

// hold makes the network keep the data that the target fetches.
func (tc *testConn) hold() {
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	tc.m.holdGets = true
}

// block makes the network take nothing, until it is called with false.
func (tc *testConn) block(on bool) {
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	tc.m.holdFlush = on
	tc.m.cond.Broadcast()
}

// releaseGet ends the oldest GetData that is held back.
func (tc *testConn) releaseGet() {
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	tc.m.endGet(tc.m.gets[0], nil)
}

// The task set is that of all initiators (TST 000b): ORDERED commands of one session wait for the
// older ones of the others that can run, which wait for them in turn.
func TestOrderedAmongSessions(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		a, b := n.connect().login(), n.enter()
		gate := n.store.Shut()
		first := a.command(writeF|pdu.AttrSimple, 512, cdb.Write10(0, 1), make([]byte, 512))
		<-gate.Entered
		ordered := b.command(pdu.FlagF|pdu.AttrOrdered, 0, cdb.TestUnitReady, nil)
		second := b.command(writeF|pdu.AttrOrdered, 512, cdb.Write10(0, 1), make([]byte, 512))
		b.ping() // both have come
		synctest.Wait()
		last := a.command(pdu.FlagF|pdu.AttrSimple, 0, cdb.TestUnitReady, nil)
		a.wantStatus(a.command(pdu.FlagF|pdu.AttrHeadOfQueue, 0, cdb.TestUnitReady, nil), 0)
		a.wantNothing() // last came after an ORDERED command of b
		b.wantNothing()
		if n.store.Calls(backendtest.WriteAt) > 1 {
			t.Error("an ORDERED command has overtaken one of another session")
		}
		gate.Open()
		a.wantStatus(first, 0)
		b.wantStatus(ordered, 0)
		b.wantStatus(second, 0)
		a.wantStatus(last, 0)

		// A command that waits can be aborted, and the end of a session ends the wait for it.
		gate = n.store.Shut()
		a.command(writeF|pdu.AttrSimple, 512, cdb.Write10(0, 1), make([]byte, 512))
		<-gate.Entered
		h := b.command(pdu.FlagF|pdu.AttrOrdered, 0, cdb.TestUnitReady, nil)
		b.wantNothing()
		b.wantTMF(b.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN()), pdu.FunctionComplete)
		h = b.command(pdu.FlagF|pdu.AttrOrdered, 0, cdb.TestUnitReady, nil)
		b.wantNothing()
		a.close()
		synctest.Wait()
		gate.Open()
		a.wait()
		b.wantStatus(h, 0)
		g := n.targets[0].gate
		if got := g.tasks.Load(); got != 0 || len(g.ordered) != 0 {
			t.Errorf("%d and %d ORDERED commands have a place at the end", got, len(g.ordered))
		}
		b.logout()
	})
}

// A command that waits for data of its initiator stops no other initiator, and neither does an
// ORDERED one behind it. They still keep their order.
func TestOrderedWithoutDataStopsNobody(t *testing.T) {
	for name, attack := range map[string]func(a *testConn) []pdu.BHS{
		"ORDERED behind a WRITE": func(a *testConn) []pdu.BHS {
			w := a.command(writeF|pdu.AttrSimple, 4096, cdb.Write10(0, 8), nil)
			return []pdu.BHS{w, a.command(pdu.FlagF|pdu.AttrOrdered, 0, cdb.TestUnitReady, nil)}
		},
		"ORDERED WRITE": func(a *testConn) []pdu.BHS {
			w := a.command(writeF|pdu.AttrOrdered, 4096, cdb.Write10(0, 8), nil)
			return []pdu.BHS{w, a.command(readF|pdu.AttrSimple, 4096, cdb.Read10(0, 8), nil)}
		},
	} {
		bubble(t, name, func(t *testing.T) {
			n := newTestNode(t)
			a, b := n.connect().login(), n.enter()
			a.hold()
			hs := attack(a)
			a.wantGets(1)
			began := time.Now()
			for _, attr := range []byte{pdu.AttrSimple, pdu.AttrOrdered, pdu.AttrHeadOfQueue} {
				data := make([]byte, 512)
				b.wantStatus(b.command(readF|attr, 4096, cdb.Read10(0, 8), nil), 0)
				b.wantStatus(b.command(writeF|attr, 512, cdb.Write10(0, 1), data), 0)
			}
			if took := time.Since(began); took != 0 {
				t.Errorf("the neighbour waited %v", took)
			}
			a.wantNothing()
			a.m.releaseGets()
			for _, h := range hs {
				a.wantStatus(h, 0)
			}
			if !bytes.Equal(n.stored(0, 4096), pattern(4096, hs[0].ITT())) {
				t.Error("the WRITE was not executed")
			}
			a.logout()
			b.logout()
		})
	}
}

// A command that stops in the middle of its data loses its place after limits.order_timeout, and
// fails. Afterwards its initiator stops nobody for a while.
func TestOrderTimeout(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		a, b := n.connect().login(), n.enter()
		attack := func() pdu.BHS {
			a.hold()
			h := a.command(writeF|pdu.AttrOrdered, 2<<20, cdb.Write10(0, 4096), nil)
			a.wantGets(1)
			a.releaseGet()
			a.wantGets(1) // the second piece
			return h
		}
		h := attack()
		began := time.Now()
		b.wantStatus(b.command(readF|pdu.AttrSimple, 512, cdb.Read10(0, 1), nil), 0)
		if took, limit := time.Since(began), n.shared.OrderTimeout.Time(); took != limit {
			t.Errorf("the neighbour waited %v, want %v", took, limit)
		}
		if st := n.shared.OrderTimeout.State(); st.Bites != 1 {
			t.Errorf("limit bit %d times", st.Bites)
		}
		a.m.releaseGets()
		a.wantSense(h, 0x0b, 0x4b, 0x06)

		h = attack()
		began = time.Now()
		for range 3 {
			b.wantStatus(b.command(readF|pdu.AttrSimple, 512, cdb.Read10(0, 1), nil), 0)
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("the neighbour waited %v for an initiator that was too slow before", took)
		}
		a.m.releaseGets()
		a.wantStatus(h, 0)
		a.logout()
		b.logout()
	})
}

// An initiator that may only read stops nobody with ORDERED commands.
func TestOrderedOfAReaderStopsNobody(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		u, err := lun.New(newStore(t), lun.Options{Identity: state.Identity{NAA: [8]byte{0x3f}, Serial: "3f00000000000000"}})
		if err != nil {
			t.Fatal(err)
		}
		if err := n.inv.AddMasked(1, u, func(initiator string) lun.Access {
			if initiator == rival {
				return lun.ReadOnly
			}
			return lun.ReadWrite
		}); err != nil {
			t.Fatal(err)
		}
		on1 := func(tc *testConn, flags byte, edtl uint32, block [16]byte) pdu.BHS {
			h := tc.scsi(flags, edtl, block)
			h.SetLUN([8]byte{1: 1})
			tc.write(h, nil)
			return h
		}
		writer, reader := n.connect().login(), n.enter()
		for _, tc := range []*testConn{writer, reader} {
			tc.wantSense(on1(tc, pdu.FlagF, 0, cdb.TestUnitReady), 0x06, 0x29, 0x00)
		}
		reader.block(true)
		h := on1(reader, readF|pdu.AttrOrdered, 3<<20, cdb.Read10(0, 6144))
		synctest.Wait()
		began := time.Now()
		writer.wantStatus(on1(writer, writeF|pdu.AttrSimple, 4096, cdb.Write10(0, 8)), 0)
		writer.wantStatus(on1(writer, writeF|pdu.AttrOrdered, 4096, cdb.Write10(0, 8)), 0)
		if took := time.Since(began); took != 0 {
			t.Errorf("the writer waited %v", took)
		}
		reader.block(false)
		reader.wantStatus(h, 0)
		reader.logout()
		writer.logout()
	})
}

// An ORDERED READ whose initiator takes nothing stops no other one once all of it is read.
func TestOrderedReadThatIsNotTakenStopsNobody(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		a, b := n.connect().login(), n.enter()
		a.block(true)
		var hs []pdu.BHS
		for range 8 { // more than may be queued
			hs = append(hs, a.command(readF|pdu.AttrOrdered, 1<<20, cdb.Read10(0, 2048), nil))
		}
		synctest.Wait()
		began := time.Now()
		b.wantStatus(b.command(writeF|pdu.AttrSimple, 512, cdb.Write10(0, 1), make([]byte, 512)), 0)
		b.wantStatus(b.command(readF|pdu.AttrOrdered, 512, cdb.Read10(0, 1), nil), 0)
		if took := time.Since(began); took != 0 {
			t.Errorf("the neighbour waited %v", took)
		}
		a.block(false)
		for _, h := range hs {
			a.wantStatus(h, 0)
		}
		a.logout()
		b.logout()
	})
}

// Tasks of a lost connection stop no other initiator, as long as they wait for reassignment.
func TestParkedOrderedTasksStopNobody(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, recovering)
		a, b := n.leadRecovering(), n.enter()
		a.block(true)
		a.command(readF|pdu.AttrOrdered, 3<<20, cdb.Read10(0, 6144), nil)
		a.command(pdu.FlagF|pdu.AttrOrdered, 0, cdb.TestUnitReady, nil)
		synctest.Wait()
		a.close()
		a.wantEnd(io.EOF)
		synctest.Wait()
		began := time.Now()
		b.wantStatus(b.command(readF|pdu.AttrSimple, 512, cdb.Read10(0, 1), nil), 0)
		b.wantStatus(b.command(readF|pdu.AttrOrdered, 512, cdb.Read10(0, 1), nil), 0)
		if took := time.Since(began); took != 0 {
			t.Errorf("the neighbour waited %v", took)
		}
		b.logout()
		testkit.Eventually(t, "end of the lost session", func() bool { return n.Stats().Sessions == 0 })
	})
}

// modeTaskSets is a parameter list of MODE SELECT(6) with the Control mode page and TST 001b, and modeOneTaskSet one
// with TST 000b (SPC-4, section 7.5.8).
var (
	modeTaskSets   = testkit.Unhex("00 00 00 00 0a 0a 22 10 00 40 0000 ffff 0000")
	modeOneTaskSet = testkit.Unhex("00 00 00 00 0a 0a 02 10 00 40 0000 ffff 0000")
)

// selectModes sends MODE SELECT(6) with that list.
func (tc *testConn) selectModes(list []byte) pdu.BHS {
	return tc.command(writeF|pdu.AttrHeadOfQueue, uint32(len(list)), [16]byte{0x15, 0x10, 0, 0, byte(len(list))}, list)
}

// With TST 001b, each session has a task set of its own: an ORDERED command of one neither waits for commands of
// others, nor holds them up, and keeps its order in its session. The old order is back with TST 000b.
func TestOrderedInOwnTaskSets(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		a, b := n.connect().login(), n.enter()
		gate := n.store.Shut()
		write := a.command(writeF|pdu.AttrSimple, 512, cdb.Write10(0, 1), make([]byte, 512))
		<-gate.Entered
		ordered := a.command(pdu.FlagF|pdu.AttrOrdered, 0, cdb.TestUnitReady, nil)
		later := a.command(pdu.FlagF|pdu.AttrSimple, 0, cdb.TestUnitReady, nil)
		waits := b.command(pdu.FlagF|pdu.AttrOrdered, 0, cdb.TestUnitReady, nil)
		a.wantNothing()
		b.wantNothing() // one task set
		b.wantStatus(b.selectModes(modeTaskSets), 0)
		a.want(pdu.AsyncMessage)
		b.wantStatus(waits, 0) // the change reaches those that wait
		for _, attr := range []byte{pdu.AttrSimple, pdu.AttrOrdered, pdu.AttrHeadOfQueue} {
			b.wantStatus(b.command(pdu.FlagF|attr, 0, cdb.TestUnitReady, nil), 0)
		}
		a.wantNothing() // its own order remains
		gate.Open()
		a.wantStatus(write, 0)
		a.wantSense(ordered, 0x06, 0x2a, 0x01) // MODE PARAMETERS CHANGED
		a.wantStatus(later, 0)

		a.wantStatus(a.selectModes(modeOneTaskSet), 0)
		b.want(pdu.AsyncMessage)
		b.wantSense(b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0x06, 0x2a, 0x01)
		gate = n.store.Shut()
		write = a.command(writeF|pdu.AttrSimple, 512, cdb.Write10(0, 1), make([]byte, 512))
		<-gate.Entered
		waits = b.command(pdu.FlagF|pdu.AttrOrdered, 0, cdb.TestUnitReady, nil)
		b.wantNothing()
		gate.Open()
		a.wantStatus(write, 0)
		b.wantStatus(waits, 0)
		a.logout()
		b.logout()
	})
}

// With TST 001b, CLEAR TASK SET ends the commands of its own session, and none of others. LOGICAL UNIT RESET ends
// those of all.
func TestClearOwnTaskSet(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		a, b := n.connect().login(), n.enter()
		a.wantStatus(a.selectModes(modeTaskSets), 0)
		b.want(pdu.AsyncMessage)
		b.wantSense(b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0x06, 0x2a, 0x01)
		a.hold()
		b.hold()
		a.command(writeF|pdu.AttrSimple, 4096, cdb.Write10(0, 8), nil)
		theirs := b.command(writeF|pdu.AttrSimple, 4096, cdb.Write10(8, 8), nil)
		a.wantGets(1)
		b.wantGets(1)
		f := a.tmf(pdu.ClearTaskSet, [8]byte{}, pdu.ReservedTag, 0)
		synctest.Wait()
		a.m.releaseGets()
		a.wantTMF(f, pdu.FunctionComplete)
		b.wantNothing()
		b.m.releaseGets()
		b.wantStatus(theirs, 0)
		if !bytes.Equal(n.stored(8, 4096), pattern(4096, theirs.ITT())) {
			t.Error("the WRITE of the neighbour was not executed")
		}

		b.hold()
		theirs = b.command(writeF|pdu.AttrSimple, 4096, cdb.Write10(8, 8), nil)
		b.wantGets(1)
		a.wantTMF(a.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
		b.m.releaseGets()
		b.wantAborted(theirs, 4096)
		a.logout()
		b.logout()
	})
}
