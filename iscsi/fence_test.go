package iscsi

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// leadReporting opens a session of several connections with a TaskReporting.
func (n *testNode) leadReporting(reporting string, change ...func(*testConn)) *testConn {
	n.tb.Helper()
	tc := n.connect(change...)
	tc.writeLogin(tc.loginRequest(true, 1, 3),
		slices.Concat(names, leadingKeys, []string{"TaskReporting=" + reporting})...)
	r, answers := tc.wantLogin(pdu.LoginSuccess)
	if !slices.Contains(answers, "TaskReporting="+reporting) {
		n.tb.Fatalf("answers %q", answers)
	}
	tc.tsih = r.TSIH
	tc.wantSense(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x29, 0)
	return tc
}

// ack acknowledges all that tc has got, in a NOP-Out that is no ping.
func (tc *testConn) ack() {
	h := tc.Request(pdu.NOPOut, pdu.FlagF, true)
	h.SetITT(pdu.ReservedTag)
	h.SetTTT(pdu.ReservedTag)
	tc.write(h, nil)
}

// wantAsked takes the NOP-In that asks for an acknowledgement, which the test gives
// when it likes.
func (tc *testConn) wantAsked() {
	tc.tb.Helper()
	if p := tc.want(pdu.NOPIn); p.h.ITT() != pdu.ReservedTag || p.h.TTT() == pdu.ReservedTag {
		tc.tb.Fatalf("%x", []byte(p.h))
	}
}

// ISCSI-4.2.2.3-2, ISCSI-4.2.2.3-3: a fenced response waits until everything before
// it has been acknowledged on all connections, and others wait for it.
func TestResponseFence(t *testing.T) {
	for _, reporting := range []string{responseFence, fastAbort} {
		bubble(t, reporting, func(t *testing.T) {
			n := newTestNode(t, several(4))
			a := n.leadReporting(reporting)
			b := a.join(1)
			b.wantStatus(b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0) // not acknowledged
			a.on(b)
			f := a.tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
			b.wantAsked()
			a.wantNothing()
			// What is not a response of SCSI does not wait, nor acknowledge too much.
			h := a.Request(pdu.NOPOut, pdu.FlagF, true)
			h.SetTTT(pdu.ReservedTag)
			a.write(h, nil)
			a.want(pdu.NOPIn)
			a.ack()
			a.wantNothing()
			b.ExpStatSN--
			b.ack()
			b.ExpStatSN++
			a.wantNothing()
			b.ack()
			a.wantTMF(f, pdu.FunctionComplete)
			a.wantAsked()
			// Responses after the fence, in order, on both connections.
			first := b.on(a).command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
			testkit.Eventually(n.tb, "it has been carried out", func() bool { return held(n) == 1 })
			second := a.on(b).command(pdu.FlagF, 0, cdb.TestUnitReady, nil) // acknowledges the TMF Response
			b.wantStatus(first, 0)
			a.wantStatus(second, 0)
			// Without a fence nothing waits.
			third := b.on(a).command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
			b.wantStatus(third, 0)
			b.wantNothing()
			// A tag is in use as long as its response is held.
			a.on(b)
			f = a.tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
			b.wantAsked()
			h = a.Request(pdu.NOPOut, pdu.FlagF, true)
			h.SetITT(f.ITT())
			a.write(h, nil)
			a.wantReject(pdu.RejectTaskInProgress, h)
			b.ack() // the Reject was sent later
			a.wantTMF(f, pdu.FunctionComplete)
			a.wantAsked()
			a.ack()
			b.on(a).logoutBoth(a)
		})
	}
}

// logoutBoth closes the session of tc and other.
func (tc *testConn) logoutBoth(other *testConn) {
	tc.tb.Helper()
	tc.logout()
	other.wantEnd(nil)
}

// held counts the responses that fences keep back.
func held(n *testNode) (responses int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, s := range n.sessions {
		s.shared.mu.Lock()
		s.shared.tasks.each(func(t *Task) {
			if t.state == taskHeld {
				responses++
			}
		})
		s.shared.mu.Unlock()
	}
	return responses
}

// A connection that ends has acknowledged all that it ever will, and a session with
// one connection needs no fences (section 4.2.2.3.3, a).
func TestFenceWithoutConnections(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4))
		a := n.leadReporting(responseFence)
		f := a.tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
		a.ExpStatSN -= 2
		a.wantTMFUnacknowledged(f)
		b := a.join(1)
		c := a.on(b).join(2)
		b.CmdSN, a.CmdSN = c.CmdSN, c.CmdSN
		b.wantStatus(b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
		f = a.on(b).tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
		b.wantAsked()
		c.wantAsked()
		c.ack()
		a.wantNothing()
		out := a.logoutOf(pdu.LogoutCloseConnection, b.cid)
		a.wantTMF(f, pdu.FunctionComplete)
		a.until(out)
		b.wantEnd(errLoggedOut)
		// The fenced response is not acknowledged, but its connection goes.
		h := c.on(a).command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		testkit.Eventually(n.tb, "held", func() bool { return held(n) == 1 })
		l := c.logoutOf(pdu.LogoutCloseConnection, a.cid)
		a.wantEnd(errLoggedOut)
		got := map[uint32]bool{c.next(testkit.Patience).h.ITT(): true, c.next(testkit.Patience).h.ITT(): true}
		if !got[h.ITT()] || !got[l.ITT()] {
			t.Errorf("answers to %v", got)
		}
		c.statSeen = false
		c.logout()
	})
}

// wantTMFUnacknowledged takes a TMF Response, whatever its StatSN.
func (tc *testConn) wantTMFUnacknowledged(h pdu.BHS) {
	tc.tb.Helper()
	tc.statSeen = false
	tc.wantTMF(h, pdu.FunctionComplete)
}

// ISCSI-4.2.2.3-2: a fence awaits what was sent before it. Pings that come meanwhile, and the Reject
// of one of them, do not hold it up, however many there are.
func TestFenceAndPings(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4))
		a := n.leadReporting(responseFence)
		b := a.join(1)
		b.wantStatus(b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0) // not acknowledged
		f := a.on(b).tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0)
		b.wantAsked()
		noted := b.ExpStatSN
		for range 3 { // each answer is a status that nobody has acknowledged
			h := b.Request(pdu.NOPOut, pdu.FlagF, true)
			h.SetTTT(pdu.ReservedTag)
			h.SetExpStatSN(noted - 1)
			b.write(h, nil)
			b.want(pdu.NOPIn)
			a.wantNothing()
		}
		last := b.ExpStatSN
		b.ExpStatSN = noted
		b.ack()
		b.ExpStatSN = last
		a.wantTMF(f, pdu.FunctionComplete)
		a.wantAsked()
		a.ack()
		a.logoutBoth(b)
	})
}

// ISCSI-4.2.2.3-2: an initiator whose answer to the ping acknowledges a part is asked again, and one whose answer acknowledges
// nothing new is not.
func TestFenceAsksAgain(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4))
		a := n.leadReporting(responseFence)
		b := a.join(1)
		before := b.ExpStatSN
		for range 3 {
			b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil) // none acknowledges a status
		}
		for range 3 { // in any order
			b.want(pdu.SCSIResponse)
		}
		last := b.ExpStatSN
		f := a.on(b).tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0)
		answer := func(expStatSN uint32) {
			t.Helper()
			p := b.want(pdu.NOPIn)
			if p.h.TTT() == pdu.ReservedTag {
				t.Fatalf("NOP-In %x is no ping", []byte(p.h))
			}
			h := b.Request(pdu.NOPOut, pdu.FlagF, true)
			h.SetITT(pdu.ReservedTag)
			h.SetTTT(p.h.TTT())
			h.SetExpStatSN(expStatSN)
			b.write(h, nil)
		}
		answer(before + 2)
		a.wantNothing()
		answer(before + 2) // nothing new: the target could ask for ever
		a.wantNothing()
		b.wantNothing()
		b.ExpStatSN = last
		b.ack()
		a.wantTMF(f, pdu.FunctionComplete)
		a.wantAsked()
		a.ack()
		a.logoutBoth(b)
	})
}

// ISCSI-4.2.2.3-4: the responses that are fenced, and some that are not. There is no
// ACA, hence no case of it.
func TestFenceCases(t *testing.T) {
	register := func(key byte) []byte { return []byte{7: 0, 15: key, 23: 0} }
	for _, c := range []struct {
		what   string
		fenced bool
		// run makes the response on a that may be fenced; b has a status that it has
		// not acknowledged.
		run func(n *testNode, a, other *testConn) (h pdu.BHS)
	}{
		{"ABORT TASK", false, func(_ *testNode, a,
			_ *testConn) pdu.BHS {
			return a.tmf(pdu.AbortTask, [8]byte{}, 0x7777, a.CmdSN-1)
		}},
		{"b) ABORT TASK SET", true, func(_ *testNode, a, _ *testConn) pdu.BHS {
			return a.tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
		}},
		{"b) CLEAR TASK SET", true, func(_ *testNode, a, _ *testConn) pdu.BHS {
			return a.tmf(pdu.ClearTaskSet, [8]byte{}, pdu.ReservedTag, 0)
		}},
		{"b) LOGICAL UNIT RESET", true, func(_ *testNode, a, _ *testConn) pdu.BHS {
			return a.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0)
		}},
		{"b) TARGET WARM RESET", true, func(_ *testNode, a, _ *testConn) pdu.BHS {
			return a.tmf(pdu.TargetWarmReset, [8]byte{}, pdu.ReservedTag, 0)
		}},
		{"a) unit attention", true, func(_ *testNode, a, other *testConn) pdu.BHS {
			other.wantTMF(other.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
			return a.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		}},
		{"another CHECK CONDITION", false, func(_ *testNode, a,
			_ *testConn) pdu.BHS {
			return a.command(pdu.FlagF, 0, [16]byte{0xff}, nil)
		}},
		{"f) PREEMPT AND ABORT", true, func(n *testNode, a, _ *testConn) pdu.BHS {
			return a.command(writeF, 24, [16]byte{0x5f, 5, 1, 8: 24}, register(1))
		}},
		{"PREEMPT", false, func(n *testNode, a, _ *testConn) pdu.BHS {
			return a.command(writeF, 24, [16]byte{0x5f, 4, 1, 8: 24}, register(1))
		}},
	} {
		bubble(t, c.what, func(t *testing.T) {
			n := newTestNode(t, several(4))
			a := n.leadReporting(responseFence)
			b := a.join(1)
			other := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
			// A registration, for PREEMPT; it is what b does not acknowledge.
			b.wantStatus(b.command(writeF, 24, [16]byte{0x5f, 0, 0, 8: 24}, []byte{15: 1, 23: 0}), 0)
			h := c.run(n, a.on(b), other)
			op := pdu.SCSIResponse
			if h.Opcode() == pdu.TaskMgmtReq {
				op = pdu.TaskMgmtResp
			}
			if c.fenced {
				b.wantAsked()
				a.wantNothing()
				b.ack()
			}
			if p := a.want(op); p.h.ITT() != h.ITT() {
				t.Fatalf("%x", []byte(p.h))
			}
			if c.fenced {
				a.wantAsked()
				a.ack()
			}
			other.logout()
			a.on(a).logoutBoth(b)
		})
	}
}

// An ABORT TASK takes a response that is held, and the queue continues.
func TestAbortOfHeldResponse(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4))
		a := n.leadReporting(responseFence)
		b := a.join(1)
		b.wantStatus(b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
		f := a.on(b).tmf(pdu.AbortTaskSet, [8]byte{}, pdu.ReservedTag, 0)
		b.wantAsked()
		h := a.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		testkit.Eventually(n.tb, "held", func() bool { return held(n) == 2 })
		g := a.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		a.wantNothing()
		b.ack()
		a.wantTMF(f, pdu.FunctionComplete)
		a.wantAsked()
		a.ack()
		a.wantTMF(g, pdu.FunctionComplete)
		a.wantNothing()
		a.wantOpenWindow()
		a.logoutBoth(b)
	})
}

// wantTerminations takes Asynchronous Messages with event 5 about these LUNs, in any
// order, and answers them.
func (tc *testConn) wantTerminations(luns ...byte) {
	tc.tb.Helper()
	var got []byte
	for range luns {
		p := tc.want(pdu.AsyncMessage)
		// ISCSI-11.9-3: the LUN field is valid, the parameters are reserved.
		if string(p.h[36:44]) != "\x05\x00\x00\x00\x00\x00\x00\x00" || p.h.ITT() != pdu.ReservedTag || p.h[8] != 0 ||
			string(p.h[10:16]) != "\x00\x00\x00\x00\x00\x00" || len(p.data) != 0 {
			tc.tb.Fatalf("%x %x", []byte(p.h), p.data)
		}
		got = append(got, p.h[9])
		tc.answerTermination(p.h[9])
	}
	slices.Sort(got)
	if !slices.Equal(got, luns) {
		tc.tb.Fatalf("told of LUNs %v, want %v", got, luns)
	}
}

// answerTermination sends the NOP-Out that answers a message about a LUN.
func (tc *testConn) answerTermination(lun byte) {
	h := tc.Request(pdu.NOPOut, pdu.FlagF, true)
	h.SetLUN([8]byte{1: lun})
	h.SetITT(pdu.ReservedTag)
	h.SetTTT(pdu.ReservedTag)
	tc.write(h, nil)
}

// ISCSI-4.2.3.4-1, ISCSI-4.2.3.4-3, ISCSI-4.2.3.5-1: the connections that are told that tasks are
// terminated: each connection that has some, once for each logical unit, where
// FastAbort was agreed on; but not the connection where the function came.
func TestTerminations(t *testing.T) {
	for _, issuing := range []string{"RFC3720", fastAbort} {
		bubble(t, issuing+" issues", func(t *testing.T) {
			n := newTestNode(t, several(4))
			u, err := lun.New(newStore(t), lun.Options{Identity: state.Identity{NAA: [8]byte{0x30, 7: 9},
				Serial: "3000000000000009"}})
			if err != nil {
				t.Fatal(err)
			}
			if err := n.inv.Add(1, u); err != nil {
				t.Fatal(err)
			}
			write := func(tc *testConn, lun byte) {
				h := tc.scsi(writeF, 4096, cdb.Write10(0, 8))
				h.SetLUN([8]byte{1: lun})
				tc.write(h, nil)
			}
			// A session of two connections that has met all unit attentions.
			session := func(last byte, reporting string) (a, b *testConn) {
				a = n.leadReporting(reporting, func(tc *testConn) { tc.isid[5], tc.m.holdGets = last, true })
				h := a.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
				h.SetLUN([8]byte{1: 1})
				a.write(h, nil)
				a.wantSense(h, 6, 0x29, 0)
				b = a.join(1, func(tc *testConn) { tc.m.holdGets = true })
				return a, b
			}
			a, b := session(1, issuing)
			c, d := session(2, fastAbort)
			e, f := session(3, "RFC3720")
			g, h := session(4, responseFence)
			for _, p := range [][2]*testConn{{a, b}, {c, d}, {e, f}, {g, h}} {
				// Three writes on the first connection, one on the second.
				write(p[0], 0)
				write(p[0], 0)
				write(p[0], 1)
				write(p[1].on(p[0]), 0)
				testkit.Eventually(n.tb, "GetDatas",
					func() bool { return p[0].m.getting() == 3 && p[1].m.getting() == 1 })
			}
			reset := a.on(b).tmf(pdu.TargetWarmReset, [8]byte{}, pdu.ReservedTag, 0)
			c.wantTerminations(0, 1)
			d.wantTerminations(0)
			if issuing == fastAbort {
				b.wantTerminations(0)
				// The data of this connection has to end; the reset does not wait for that of the
				// other one.
				a.m.releaseGets()
			} else {
				b.wantNothing()
				a.m.releaseGets()
				a.wantNothing()
				b.m.releaseGets()
			}
			a.wantTMF(reset, pdu.FunctionComplete)
			for _, tc := range []*testConn{e, f, g, h} {
				tc.wantNothing()
			}
			// Another reset reports what it meets, which is nothing.
			a.ack()
			reset = a.tmf(pdu.TargetWarmReset, [8]byte{}, pdu.ReservedTag, 0)
			if p := a.until(reset); p.h.Response() != pdu.FunctionComplete {
				t.Errorf("%x", []byte(p.h))
			}
			for _, tc := range []*testConn{c, d} {
				tc.wantNothing()
			}
			for _, p := range [][2]*testConn{{a, b}, {c, d}, {e, f}, {g, h}} {
				for _, tc := range p {
					tc.m.releaseGets()
				}
				out := p[0].logoutOf(pdu.LogoutCloseSession, 0)
				p[0].until(out)
				p[0].close()
				p[0].wantEnd(nil)
				p[1].wantEnd(nil)
			}
		})
	}
}

// An initiator over RDMA has a buffer for one message in addition to that for a ping: the
// others come when it has acknowledged that.
func TestTerminationsWaitForBuffers(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4))
		for id := range uint16(4) {
			u, err := lun.New(newStore(t), lun.Options{Identity: state.Identity{NAA: [8]byte{0x30, 7: byte(id) + 9},
				Serial: "300000000000000" + string(rune('A'+id))}})
			if err != nil {
				t.Fatal(err)
			}
			if err := n.inv.Add(id+1, u); err != nil {
				t.Fatal(err)
			}
		}
		a := n.connect().login()
		c := n.leadReporting(fastAbort, func(tc *testConn) { tc.isid[5], tc.m.holdGets = 2, true })
		writes := map[uint32]bool{}
		for lun := range byte(5) {
			h := c.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
			h.SetLUN([8]byte{1: lun})
			c.write(h, nil)
			c.want(pdu.SCSIResponse)
			h = c.scsi(writeF, 4096, cdb.Write10(0, 8))
			h.SetLUN([8]byte{1: lun})
			c.write(h, nil)
			writes[h.ITT()] = true
		}
		c.wantGets(5)
		f := a.tmf(pdu.TargetWarmReset, [8]byte{}, pdu.ReservedTag, 0)
		var told []byte
		for range 5 {
			told = append(told, c.want(pdu.AsyncMessage).h[9])
			c.wantNothing()
			c.answerTermination(told[len(told)-1])
		}
		c.wantNothing()
		slices.Sort(told)
		if !slices.Equal(told, []byte{0, 1, 2, 3, 4}) {
			t.Errorf("told of LUNs %v", told)
		}
		a.wantTMF(f, pdu.FunctionComplete)
		a.logout()
		c.m.releaseGets()
		for range 5 {
			p := c.want(pdu.SCSIResponse)
			if !writes[p.h.ITT()] || p.h.Status() != 0x40 {
				t.Errorf("%x", []byte(p.h))
			}
			delete(writes, p.h.ITT())
		}
		c.logout()
	})
}

// Many commands, functions that abort them, and an initiator that acknowledges when it
// likes: nothing is lost, and no response overtakes a fenced one, on three connections.
func TestFencesUnderLoad(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4))
		a := n.leadReporting(fastAbort)
		b := a.join(1)
		c := b.join(2)
		m := newFenceModel(t, a, b, c)
		r := rand.New(rand.NewPCG(1, 2))
		for i := range 800 {
			tc := m.conns[r.IntN(3)].on(m.last)
			m.last = tc
			switch x := r.IntN(20); {
			case x == 0 && m.functions() < 4: // of 8 on a connection
				h := tc.tmf([]byte{pdu.AbortTaskSet, pdu.ClearTaskSet}[r.IntN(2)], [8]byte{}, pdu.ReservedTag, 0)
				m.sent(tc, h, h.Function())
			case x < 10 && len(m.open) < 100:
				m.sent(tc, tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
			default:
				m.ack(tc)
			}
			if r.IntN(8) == 0 {
				synctest.Wait() // there may be something to take then
			}
			m.take(tc)
			if i%50 == 49 {
				m.settle()
			}
		}
		m.settle()
		out := a.on(m.last).logoutOf(pdu.LogoutCloseSession, 0)
		a.statSeen = false
		a.until(out)
		a.close()
		for _, tc := range m.conns {
			tc.wantEnd(nil)
		}
	})
}

// A fenceModel is what an initiator with several connections knows of its requests.
type fenceModel struct {
	t      *testing.T
	conns  []*testConn
	last   *testConn                // has the next CmdSN
	acked  map[*testConn]uint32     // ExpStatSN as last told to the target
	behind map[*testConn]uint32     // ExpStatSN that acknowledges the last response of SCSI
	open   map[uint32]fencedRequest // by ITT
	fenced *testConn                // of the last fenced response that is not acknowledged
	n      int                      // requests so far
}

type fencedRequest struct {
	function byte // 0: a command
	n        int
}

func newFenceModel(t *testing.T, conns ...*testConn) *fenceModel {
	m := &fenceModel{
		t: t, conns: conns, last: conns[0],
		acked: map[*testConn]uint32{}, behind: map[*testConn]uint32{}, open: map[uint32]fencedRequest{},
	}
	for _, tc := range conns {
		tc.CmdSN = conns[len(conns)-1].CmdSN
		tc.ack()
		m.acked[tc], m.behind[tc] = tc.ExpStatSN, tc.ExpStatSN
	}
	return m
}

// functions returns how many task management functions are not answered.
func (m *fenceModel) functions() (k int) {
	for _, o := range m.open {
		if o.function != 0 {
			k++
		}
	}
	return k
}

// sent notes a request, which also acknowledges what has come.
func (m *fenceModel) sent(tc *testConn, h pdu.BHS, function byte) {
	m.open[h.ITT()] = fencedRequest{function, m.n}
	m.n++
	m.acknowledged(tc)
}

func (m *fenceModel) ack(tc *testConn) {
	tc.ack()
	m.acknowledged(tc)
}

func (m *fenceModel) acknowledged(tc *testConn) {
	if m.acked[tc] = tc.ExpStatSN; m.fenced == tc {
		m.fenced = nil
	}
}

// take takes what has come on a connection. No response overtakes a fenced one, and a fenced
// one comes only after the responses before it were acknowledged.
func (m *fenceModel) take(tc *testConn) {
	m.t.Helper()
	for p := tc.next(0); p != nil; p = tc.next(0) {
		if p.h.Opcode() == pdu.NOPIn {
			continue
		}
		if p.h.StatSN() != tc.ExpStatSN {
			m.t.Fatalf("StatSN %d instead of %d", p.h.StatSN(), tc.ExpStatSN)
		}
		tc.ExpStatSN++
		if p.h.Opcode() == pdu.AsyncMessage {
			if p.h.AsyncEvent() != pdu.AsyncTaskTermination {
				m.t.Fatalf("%x", []byte(p.h))
			}
			continue
		}
		req, ok := m.open[p.h.ITT()]
		if !ok || m.fenced != nil {
			m.t.Fatalf("%x, or it overtakes a fenced response (%v)", []byte(p.h), m.fenced != nil)
		}
		delete(m.open, p.h.ITT())
		before := m.behind[tc]
		m.behind[tc] = tc.ExpStatSN
		if req.function != 0 {
			m.fence(tc, req, before)
		}
	}
}

// fence takes a fenced response, before which the connection had acknowledged before.
func (m *fenceModel) fence(tc *testConn, req fencedRequest, before uint32) {
	m.t.Helper()
	m.fenced = tc
	// ISCSI-11.5-2: no response of the commands before follows.
	maps.DeleteFunc(m.open, func(_ uint32, o fencedRequest) bool { return o.function == 0 && o.n < req.n })
	for _, o := range m.conns {
		due := m.behind[o]
		if o == tc {
			due = before
		}
		if pdu.Before(m.acked[o], due) {
			m.t.Fatalf("fenced response although CID %d has acknowledged up to %d of %d only", o.cid, m.acked[o], due)
		}
	}
}

// settle acknowledges everything until every request is answered.
func (m *fenceModel) settle() {
	m.t.Helper()
	testkit.Eventually(m.t, "every request is answered", func() bool {
		for _, tc := range m.conns {
			m.take(tc)
			m.ack(tc.on(m.last))
		}
		return len(m.open) == 0
	})
}
