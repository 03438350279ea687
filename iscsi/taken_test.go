package iscsi

import (
	"bytes"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/fair"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// takers are the functions that take commands away from another session, whose key is 2. The session that
// asks has key 1. wait takes the answer.
var takers = []struct {
	name      string
	attention lun.Sense // that the other session gets
	begin     func(by *testConn) (wait func())
}{
	{"CLEAR TASK SET", lun.Sense{}, taker(pdu.ClearTaskSet)},
	{"LOGICAL UNIT RESET", lun.Sense{Key: 6, ASC: 0x29, ASCQ: 3}, taker(pdu.LogicalUnitReset)},
	{"TARGET WARM RESET", lun.Sense{Key: 6, ASC: 0x29, ASCQ: 3}, taker(pdu.TargetWarmReset)},
	{"PREEMPT AND ABORT", lun.Sense{Key: 6, ASC: 0x2a, ASCQ: 5}, func(by *testConn) func() {
		h := by.preemptAndAbort(1, 2)
		return func() { by.wantStatus(h, 0) }
	}},
}

func taker(function byte) func(by *testConn) (wait func()) {
	return func(by *testConn) func() {
		f := by.tmf(function, [8]byte{}, pdu.ReservedTag, 0)
		return func() { by.wantTMF(f, pdu.FunctionComplete) }
	}
}

// rivals returns two sessions with registered keys: what one of them takes away, the other has begun.
func (n *testNode) rivals(change ...func(*testConn)) (victim, by *testConn) {
	n.tb.Helper()
	victim = n.connect(change...).login()
	by = n.connect(append(change, func(tc *testConn) { tc.isid[5] = 2 })...).login()
	by.register(1)
	victim.register(2)
	return victim, by
}

// wantSettled checks that the victim has met the attention, if there is one, and has its whole window.
func (tc *testConn) wantSettled(attention lun.Sense) {
	tc.tb.Helper()
	if attention != (lun.Sense{}) {
		// ISCSI-4.2.3.3-6: it follows the answers to the commands.
		tc.wantSense(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), attention.Key, attention.ASC, attention.ASCQ)
	}
	tc.wantStatus(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
	tc.ping()
	tc.wantOpenWindow()
}

// wantAllAborted takes TASK ABORTED for each of hs, in any order, with no data moved.
func (tc *testConn) wantAllAborted(hs ...pdu.BHS) {
	tc.tb.Helper()
	open := map[uint32]pdu.BHS{}
	for _, h := range hs {
		open[h.ITT()] = h
	}
	for len(open) > 0 {
		p := tc.want(pdu.SCSIResponse)
		h := open[p.h.ITT()]
		if h == nil || p.h.Status() != lun.StatusTaskAborted {
			tc.tb.Fatalf("SCSI Response %x", []byte(p.h))
		}
		flag := byte(pdu.FlagUnderflow)
		if h.EDTL() == 0 {
			flag = 0
		}
		wantResidual(tc.tb, p, flag, h.EDTL())
		delete(open, p.h.ITT())
	}
}

// Commands that another session takes away are answered, wherever they are: those that wait for others
// at once, one in the store when that lets it go, and one with data on its way when the data has come
// (ISCSI-11.4-2). Nothing of them is written, and the function waits for the store alone.
func TestTakenCommandsAreAnswered(t *testing.T) {
	for _, c := range takers {
		for _, rdma := range []bool{true, false} {
			bubble(t, fmt.Sprintf("%s, RDMA %t", c.name, rdma), func(t *testing.T) {
				n := newTestNode(t)
				victim, by := n.rivals(func(tc *testConn) { tc.m.rdma = rdma })
				neighbour := n.connect(func(tc *testConn) { tc.isid[5] = 3 }).login()
				before := n.stored(0, 8192)
				victim.m.holdGets = true
				fetching := victim.command(writeF, 4096, cdb.Write10(0, 8), nil)
				victim.wantGets(1)
				gate := n.store.ShutFrom(4096)
				inStore := victim.command(readF, 4096, cdb.Read10(8, 8), nil)
				<-gate.Entered
				ordered := victim.command(writeF|pdu.AttrOrdered, 4096, cdb.Write10(8, 8), make([]byte, 4096))
				behind := victim.command(readF|pdu.AttrSimple, 512, cdb.Read10(0, 1), nil)
				victim.wantNothing()
				wait := c.begin(by)
				victim.wantAllAborted(ordered, behind)
				victim.wantNothing()
				by.wantNothing()
				neighbour.ping()
				gate.Open()
				victim.wantAborted(inStore, 4096)
				wait()
				victim.wantNothing()
				victim.m.releaseGets()
				victim.wantAborted(fetching, 4096)
				victim.wantNothing()
				if !bytes.Equal(n.stored(0, 8192), before) {
					t.Error("data of an aborted write is on the medium")
				}
				if got := n.sessions[victim.tsih].nexus.Counts().Aborted; got != 2 { // the others have not begun
					t.Errorf("%d commands count as aborted, want 2", got)
				}
				victim.wantSettled(c.attention)
				for _, tc := range []*testConn{victim, by, neighbour} {
					if c.name == "LOGICAL UNIT RESET" || c.name == "TARGET WARM RESET" {
						tc.skipAttentions()
					}
					tc.logout()
				}
			})
		}
	}
}

// A command that waits for its turn at the LUN or for memory, and one that no goroutine has taken up yet,
// are answered at once.
func TestTakenCommandsThatWaitAreAnsweredAtOnce(t *testing.T) {
	for _, c := range takers {
		bubble(t, c.name+", rate", func(t *testing.T) {
			n := newTestNode(t)
			victim, by := n.rivals()
			u := n.inv.Unit(0)
			u.SetRates(fair.Rates{IOPS: 1}, nil)
			victim.wantStatus(victim.command(readF, 512, cdb.Read10(0, 1), nil), 0)
			var waiting []pdu.BHS
			for i := range 30 {
				waiting = append(waiting, victim.command(readF, 512, cdb.Read10(uint32(i), 1), nil))
			}
			victim.wantNothing()
			if s := u.StoreCalls(); s.Waiting != 30 {
				t.Fatalf("%d commands wait", s.Waiting)
			}
			begin := time.Now()
			c.begin(by)()
			victim.wantAllAborted(waiting...)
			if took := time.Since(begin); took > 0 {
				t.Errorf("answered after %v", took)
			}
			victim.wantSettled(c.attention)
			u.SetRates(fair.Rates{}, nil)
			victim.logout()
			by.skipAttentions()
			by.logout()
		})
		bubble(t, c.name+", memory", func(t *testing.T) {
			n := newTestNode(t, func(o *Options) { o.ConnectionMemory, o.MaxTransferPiece = 1, 1 })
			victim, by := n.rivals()
			victim.m.holdGets = true
			fetching := victim.command(writeF, 65536, cdb.Write10(0, 128), nil) // has all memory
			victim.wantGets(1)
			waiting := []pdu.BHS{
				victim.command(readF, 65536, cdb.Read10(0, 128), nil), victim.command(writeF, 65536, cdb.Write10(0, 128), nil),
			}
			victim.wantNothing()
			c.begin(by)()
			victim.wantAllAborted(waiting...)
			victim.wantNothing()
			if s := n.Stats(); s.BuffersOut != 1 {
				t.Errorf("%d Buffers in use, want that of the data on its way", s.BuffersOut)
			}
			victim.m.releaseGets()
			victim.wantAborted(fetching, 65536)
			victim.wantSettled(c.attention)
			if s := n.Stats(); s.BuffersOut != 0 {
				t.Errorf("%d Buffers in use", s.BuffersOut)
			}
			victim.logout()
			by.skipAttentions()
			by.logout()
		})
		bubble(t, c.name+", ready", func(t *testing.T) {
			n := newTestNode(t)
			victim, by := n.rivals()
			gap := victim.CmdSN
			victim.CmdSN++
			waiting := []pdu.BHS{
				victim.command(readF, 4096, cdb.Read10(0, 8), nil),
				victim.command(writeF, 4096, cdb.Write10(0, 8), make([]byte, 4096)),
				victim.command(writeF, 4096, cdb.Write10(0, 8), make([]byte, 512)),
				victim.command(pdu.FlagF, 0, cdb.TestUnitReady, nil),
			}
			victim.wantNothing()
			s := n.sessions[victim.tsih].shared
			s.mu.Lock() // what closes a gap lets the next goroutine that receives run them
			s.win.receive(gap, nil)
			n.sessions[victim.tsih].conns[0].advance()
			s.mu.Unlock()
			victim.wantNothing()
			c.begin(by)()
			victim.wantAllAborted(waiting...)
			victim.wantSettled(c.attention)
			victim.logout()
			by.skipAttentions()
			by.logout()
		})
	}
}

// A write whose unsolicited data is on its way is answered after the last Data-Out (ISCSI-11.4-2), and
// keeps the memory for it. Late data disturbs nobody.
func TestTakenWriteWaitsForItsUnsolicitedData(t *testing.T) {
	for _, c := range takers {
		bubble(t, c.name, func(t *testing.T) {
			n := unsolicitedNode(t)
			victim, by := n.rivals(func(tc *testConn) { tc.m.rdma = false })
			before := n.stored(0, 8192)
			h := victim.scsi(pdu.FlagW, 8192, cdb.Write10(0, 16))
			data := pattern(8192, h.ITT())
			victim.write(h, data[:512])
			victim.write(victim.dataOutPDU(h, false, 0, 512), data[512:1024])
			victim.wantNothing()
			begin := time.Now()
			c.begin(by)()
			if took := time.Since(begin); took > 0 {
				t.Errorf("answered after %v", took)
			}
			victim.wantNothing()
			victim.write(victim.dataOutPDU(h, false, 1, 1024), data[1024:4096])
			victim.wantNothing()
			victim.write(victim.dataOutPDU(h, true, 2, 4096), data[4096:])
			victim.wantAborted(h, 8192)
			late := victim.dataOutPDU(h, true, 3, 0) // the tag is not in use any longer
			victim.write(late, data[:512])
			victim.wantReject(pdu.RejectInvalidField, late)
			victim.wantSettled(c.attention)
			if !bytes.Equal(n.stored(0, 8192), before) {
				t.Error("data of an aborted write is on the medium")
			}
			victim.logout()
			by.skipAttentions()
			by.logout()
		})
	}
}

// A session that aborts its own command, after another one has taken that away and before it was
// answered, gets no answer to it: not after the TMF Response (ISCSI-11.5-2), and none before.
func TestOwnAbortOfATakenCommandIsSilent(t *testing.T) {
	for name, function := range map[string]byte{"ABORT TASK": pdu.AbortTask, "ABORT TASK SET": pdu.AbortTaskSet,
		"LOGICAL UNIT RESET": pdu.LogicalUnitReset} {
		bubble(t, name, func(t *testing.T) {
			n := unsolicitedNode(t)
			victim, by := n.rivals(func(tc *testConn) { tc.m.rdma = false })
			victim.m.holdGets = true
			fetching := victim.command(writeF, 4096, cdb.Write10(0, 8), nil)
			victim.wantGets(1)
			by.wantTMF(by.tmf(pdu.ClearTaskSet, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
			victim.wantNothing()
			f := victim.tmf(function, [8]byte{}, fetching.ITT(), fetching.CmdSN())
			victim.wantNothing()
			victim.m.releaseGets()
			victim.wantTMF(f, pdu.FunctionComplete)
			victim.wantNothing()

			unsolicited := victim.scsi(pdu.FlagW, 4096, cdb.Write10(0, 8))
			victim.write(unsolicited, nil)
			victim.wantNothing()
			by.wantTMF(by.tmf(pdu.ClearTaskSet, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
			victim.wantTMF(victim.tmf(function, [8]byte{}, unsolicited.ITT(), unsolicited.CmdSN()), pdu.FunctionComplete)
			victim.wantNothing()
			victim.wantTMF(victim.tmf(pdu.AbortTask, [8]byte{}, fetching.ITT(), fetching.CmdSN()), pdu.TaskDoesNotExist)
			victim.skipAttentions()
			by.skipAttentions()
			victim.logout()
			by.logout()
		})
	}
}

// Two sessions that reset each other while commands of both hang in the store get their answers: each
// knows from its own function what became of its commands, if nothing told it before (ISCSI-11.5-2).
func TestSessionsThatResetEachOther(t *testing.T) {
	for _, function := range []byte{pdu.ClearTaskSet, pdu.LogicalUnitReset, pdu.TargetWarmReset} {
		bubble(t, fmt.Sprint("function ", function), func(t *testing.T) {
			n := newTestNode(t)
			a, b := n.rivals()
			gate := n.store.Shut()
			t.Cleanup(gate.Open)
			var functions []pdu.BHS
			for _, tc := range []*testConn{a, b} {
				tc.m.holdGets = true
				tc.command(readF, 4096, cdb.Read10(0, 8), nil)
				<-gate.Entered
				tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
				tc.wantGets(1)
				tc.command(writeF|pdu.AttrOrdered, 4096, cdb.Write10(0, 8), make([]byte, 4096))
			}
			begin := time.Now()
			for _, tc := range []*testConn{a, b} {
				functions = append(functions, tc.tmf(function, [8]byte{}, pdu.ReservedTag, 0))
			}
			synctest.Wait()
			for _, tc := range []*testConn{a, b} {
				tc.m.releaseGets()
			}
			a.wantAbortedThenTMF(functions[0])
			b.wantAbortedThenTMF(functions[1])
			if took := time.Since(begin); took > fencingTime {
				t.Errorf("answered after %v", took)
			}
			a.wantNothing()
			b.wantNothing()
			gate.Open()
			testkit.Eventually(t, "no detached task", func() bool { return n.Stats().DetachedTasks == 0 })
			for _, tc := range []*testConn{a, b} {
				tc.skipAttentions()
				tc.ping()
				tc.wantOpenWindow()
				tc.logout()
			}
		})
	}
}

// wantAbortedThenTMF takes the TMF Response to h, after TASK ABORTED of what others were faster with.
func (tc *testConn) wantAbortedThenTMF(h pdu.BHS) {
	tc.tb.Helper()
	for {
		tc.m.mu.Lock()
		for len(tc.m.sent) == 0 && !tc.m.closed {
			tc.m.cond.Wait()
		}
		answer := !tc.m.closed && tc.m.sent[0].h.Opcode() == pdu.SCSIResponse
		tc.m.mu.Unlock()
		if !answer {
			tc.wantTMF(h, pdu.FunctionComplete)
			return
		}
		if p := tc.want(pdu.SCSIResponse); p.h.Status() != lun.StatusTaskAborted {
			tc.tb.Fatalf("%x", []byte(p.h))
		}
	}
}

// A command ahead of a gap has not come to the logical unit yet (RFC 7143, section 4.2.3.3): nobody takes
// it away. It begins when the gap is closed.
func TestCommandAheadOfAGapIsNotTaken(t *testing.T) {
	for _, c := range takers {
		bubble(t, c.name, func(t *testing.T) {
			n := newTestNode(t)
			victim, by := n.rivals()
			gap := victim.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
			h := victim.command(readF, 4096, cdb.Read10(0, 8), nil)
			c.begin(by)()
			victim.wantNothing()
			victim.write(gap, nil)
			met := 0 // by the one or the other, which run at the same time
			open := map[uint32]bool{gap.ITT(): true, h.ITT(): true}
			for len(open) > 0 {
				p := victim.want(pdu.SCSIResponse)
				if !open[p.h.ITT()] || p.h.Status() != 0 && p.h.Status() != lun.StatusCheckCondition {
					t.Fatalf("%x", []byte(p.h))
				}
				delete(open, p.h.ITT())
				if p.h.Status() != 0 {
					met++
				}
			}
			if c.attention == (lun.Sense{}) && met != 0 || c.attention != (lun.Sense{}) && met != 1 {
				t.Errorf("%d commands met a unit attention", met)
			}
			victim.wantSettled(lun.Sense{})
			victim.logout()
			by.skipAttentions()
			by.logout()
		})
	}
}

// With fences TASK ABORTED keeps its place among the responses: what was held back before comes first, and
// keeps its status. The unit attention follows when all answers are acknowledged (ISCSI-4.2.2.3-2,
// ISCSI-4.2.3.3-6).
func TestTakenCommandsAndFences(t *testing.T) {
	for _, reporting := range []string{responseFence, fastAbort} {
		bubble(t, reporting, func(t *testing.T) {
			n := newTestNode(t, several(4))
			a := n.leadReporting(reporting)
			b := a.join(1)
			by := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
			b.wantStatus(b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0) // not acknowledged
			f := a.on(b).tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
			b.wantAsked()
			ended := a.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
			testkit.Eventually(t, "held", func() bool { return held(n) == 2 })
			gate := n.store.Shut()
			onA := a.command(readF, 4096, cdb.Read10(0, 8), nil)
			<-gate.Entered
			onB := b.on(a).scsi(readF, 4096, cdb.Read10(8, 8))
			onB.SetExpStatSN(b.ExpStatSN - 1)
			b.write(onB, nil)
			<-gate.Entered
			reset := by.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0)
			synctest.Wait()
			gate.Open()
			by.wantTMF(reset, pdu.FunctionComplete)
			a.skipTerminations()
			b.skipTerminations()
			if got := held(n); got != 4 {
				t.Errorf("%d responses are held back, want 4", got)
			}
			b.ack()
			a.wantTMF(f, pdu.FunctionComplete)
			a.wantAsked()
			b.wantNothing()
			a.ack()
			a.wantStatus(ended, 0)
			a.wantAborted(onA, 4096)
			b.wantAborted(onB, 4096)
			h := a.on(b).scsi(pdu.FlagF, 0, cdb.TestUnitReady)
			h.SetExpStatSN(a.ExpStatSN)
			a.write(h, nil) // acknowledges the answers on a
			b.wantAsked()
			a.wantNothing()
			b.ack()
			a.wantSense(h, 6, 0x29, 3)
			a.wantAsked()
			a.ack()
			by.skipAttentions()
			by.logout()
			b.on(a).logoutBoth(a)
		})
	}
}

// skipTerminations takes the messages that have come about tasks that end.
func (tc *testConn) skipTerminations() {
	tc.tb.Helper()
	for synctest.Wait(); ; {
		tc.m.mu.Lock()
		more := len(tc.m.sent) > 0 && tc.m.sent[0].h.Opcode() == pdu.AsyncMessage
		tc.m.mu.Unlock()
		if !more {
			return
		}
		if p := tc.want(pdu.AsyncMessage); p.h.AsyncEvent() != pdu.AsyncTaskTermination {
			tc.tb.Fatalf("%x", []byte(p.h))
		}
	}
}

// A command of a lost connection that another session takes away, before or after the loss, is answered
// after TASK REASSIGN. One that had ended keeps its status. Without a reassignment a unit attention tells of
// them (ISCSI-11.14-5).
func TestTakenCommandsOfALostConnection(t *testing.T) {
	for _, reassigned := range []bool{true, false} {
		bubble(t, fmt.Sprint("reassigned ", reassigned), func(t *testing.T) {
			n := unsolicitedNode(t, func(o *Options) {
				o.Limits.MaxConnections, o.Limits.ErrorRecoveryLevel, o.MaxTransferPiece = 4, 2, 1
			})
			a := n.leadRecovering()
			b := a.join(1)
			by := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
			takeAway := func() {
				t.Helper()
				by.wantTMF(by.tmf(pdu.ClearTaskSet, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
			}
			a.m.holdGets = true
			fetching := a.on(b).command(writeF, 4096, cdb.Write10(0, 8), nil)
			a.wantGets(1)
			unsolicited := a.scsi(pdu.FlagW, 4096, cdb.Write10(0, 8))
			a.write(unsolicited, make([]byte, 512))
			a.wantNothing()
			takeAway()
			a.wantNothing() // their data is on its way
			parked := a.command(writeF, 192<<10, cdb.Write10(8, 384), nil)
			a.wantGets(2)
			a.m.mu.Lock()
			a.m.endGet(a.m.gets[1], nil) // a piece of 64 KiB
			a.m.mu.Unlock()
			a.wantGets(2)
			expStatSN := a.ExpStatSN
			ended := a.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
			a.wantStatus(ended, 0)
			a.close()
			a.wantEnd(io.EOF)
			b.on(a).hearOf(a)
			takeAway()
			b.wantNothing()
			if !reassigned {
				time.Sleep(8 * time.Second)
				b.wantWindow()
				b.wantSense(b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x47, 0x7f)
			} else {
				b.recoverFrom(a, expStatSN)
				for h, rest := range map[*pdu.BHS]uint32{&fetching: 4096, &unsolicited: 4096, &parked: 128 << 10} {
					b.takeOver(a, *h)
					b.wantTMF(b.reassign(*h), pdu.FunctionComplete)
					b.wantAborted(*h, rest)
				}
				b.wantTMF(b.reassign(ended), pdu.FunctionComplete)
				b.wantStatus(ended, 0)
			}
			b.wantSettled(lun.Sense{})
			if !bytes.Equal(n.stored(0, 4096), make([]byte, 4096)) {
				t.Error("data of an aborted write is on the medium")
			}
			b.logout()
			by.logout()
		})
	}
}

// A takenModel is what three initiators know of their commands, while they reset each other, the store
// hangs at times, and one or the other takes or sends nothing for a while.
type takenModel struct {
	t     *testing.T
	n     *testNode
	r     *rand.Rand
	hosts []*takenHost
	gate  *backendtest.Gate // nil: the store does not hang
	taken int               // TASK ABORTED in all
}

type takenHost struct {
	*testConn
	open         map[uint32]bool // commands without an answer
	silent, deaf bool            // it sends no data, or takes nothing
	function     pdu.BHS         // that is not answered; nil: none
	covered      []uint32        // the commands that it was sent after
}

// Each command gets one answer, unless a function of its own session ends it: then it gets none after the
// TMF Response (ISCSI-11.5-1, ISCSI-11.5-2).
func TestNobodyWaitsForATakenCommand(t *testing.T) {
	taken := 0
	for seed := range uint64(6) {
		bubble(t, fmt.Sprint("seed ", seed), func(t *testing.T) {
			m := &takenModel{t: t, n: newTestNode(t, func(o *Options) { o.MaxTransferPiece = 64 << 10 }),
				r: rand.New(rand.NewPCG(seed, 1))}
			for i := range byte(3) {
				tc := m.n.connect(func(tc *testConn) { tc.isid[5], tc.m.rdma = i, seed%2 == 0 }).login()
				m.hosts = append(m.hosts, &takenHost{testConn: tc, open: map[uint32]bool{}})
			}
			for range 300 {
				m.step(m.hosts[m.r.IntN(3)])
			}
			m.end()
			taken += m.taken
		})
	}
	if taken == 0 {
		t.Error("no command was taken away")
	}
}

func (m *takenModel) step(h *takenHost) {
	switch x := m.r.IntN(40); {
	case x < 24:
		m.command(h)
	case x < 27 && h.function == nil:
		f := []byte{pdu.LogicalUnitReset, pdu.ClearTaskSet, pdu.AbortTaskSet, pdu.TargetWarmReset}[m.r.IntN(4)]
		h.covered = slices.Collect(maps.Keys(h.open))
		h.function = h.tmf(f, [8]byte{}, pdu.ReservedTag, 0)
	case x < 30:
		h.silent = m.r.IntN(2) == 0
		h.m.hold(h.silent, h.deaf)
	case x < 32:
		h.deaf = m.r.IntN(2) == 0
		h.m.hold(h.silent, h.deaf)
	case x == 32 && m.gate == nil:
		m.gate = m.n.store.Shut()
	case x < 35 && m.gate != nil:
		m.gate.Open()
		m.gate = nil
	case x == 35:
		time.Sleep(time.Duration(m.r.IntN(1500)) * time.Millisecond)
	default:
		synctest.Wait()
	}
	for _, h := range m.hosts {
		m.take(h)
	}
}

// command sends one of several commands.
func (m *takenModel) command(h *takenHost) {
	if len(h.open) > 60 {
		return
	}
	attr := []byte{0, pdu.AttrSimple, pdu.AttrSimple, pdu.AttrOrdered}[m.r.IntN(4)]
	at := m.r.IntN(512)
	var c pdu.BHS
	switch m.r.IntN(5) {
	case 0:
		c = h.command(pdu.FlagF|attr, 0, cdb.TestUnitReady, nil)
	case 1:
		c = h.command(readF|attr, 4096, cdb.Read10(uint32(at), 8), nil)
	case 2:
		c = h.command(readF|attr, 256<<10, cdb.Read10(uint32(at), 512), nil)
	case 3:
		c = h.command(writeF|attr, 4096, cdb.Write10(uint32(at), 8), nil)
	case 4:
		c = h.command(writeF|attr, 192<<10, cdb.Write10(uint32(at), 384), make([]byte, 512))
	}
	h.open[c.ITT()] = true
}

// take takes what h has got.
func (m *takenModel) take(h *takenHost) {
	for h.m.waiting() > 0 {
		p := h.next(0)
		if h.statSeen && p.h.StatSN() != h.ExpStatSN {
			m.t.Fatalf("StatSN %d instead of %d: %x", p.h.StatSN(), h.ExpStatSN, []byte(p.h))
		}
		unasked := p.h.Opcode() == pdu.NOPIn && p.h.ITT() == pdu.ReservedTag
		if !unasked {
			h.statSeen, h.ExpStatSN = true, p.h.StatSN()+1
		}
		h.expCmdSN, h.maxCmdSN = p.h.ExpCmdSN(), p.h.MaxCmdSN()
		switch op := p.h.Opcode(); {
		case op == pdu.SCSIResponse:
			if !h.open[p.h.ITT()] {
				m.t.Fatalf("an answer to a command that has ended: %x", []byte(p.h))
			}
			delete(h.open, p.h.ITT())
			if p.h.Status() == lun.StatusTaskAborted {
				m.taken++
			}
		case op == pdu.TaskMgmtResp:
			if h.function == nil || p.h.ITT() != h.function.ITT() || p.h.Response() != pdu.FunctionComplete {
				m.t.Fatalf("%x", []byte(p.h))
			}
			h.function = nil
			for _, itt := range h.covered {
				delete(h.open, itt)
			}
		case unasked && p.h.TTT() != pdu.ReservedTag:
			nop := h.Request(pdu.NOPOut, pdu.FlagF, true)
			nop.SetITT(pdu.ReservedTag)
			nop.SetTTT(p.h.TTT())
			h.write(nop, nil)
		case unasked:
		default:
			m.t.Fatalf("%x", []byte(p.h))
		}
	}
}

// end lets everything go and checks that nothing is open.
func (m *takenModel) end() {
	if m.gate != nil {
		m.gate.Open()
	}
	for _, h := range m.hosts {
		h.m.hold(false, false)
	}
	for range 10 {
		time.Sleep(time.Second)
		for _, h := range m.hosts {
			m.take(h)
		}
	}
	for i, h := range m.hosts {
		if len(h.open) > 0 || h.function != nil {
			m.t.Errorf("host %d: %d commands without an answer, function %x", i, len(h.open), []byte(h.function))
		}
	}
	for _, h := range m.hosts {
		h.skipAttentions()
		h.ping()
		h.wantOpenWindow()
		h.logout()
	}
}
