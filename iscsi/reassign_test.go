package iscsi

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// recovering allows ErrorRecoveryLevel 2.
func recovering(o *Options) { o.Limits.MaxConnections, o.Limits.ErrorRecoveryLevel = 4, 2 }

var recoveringKeys = append(without(linuxKeys, "MaxConnections", "ErrorRecoveryLevel", "DefaultTime2Retain"),
	"MaxConnections=4", "ErrorRecoveryLevel=2", "DefaultTime2Retain=5")

// leadRecovering opens a session at ErrorRecoveryLevel 2 that keeps what is lost for
// 7 seconds.
func (n *testNode) leadRecovering(change ...func(*testConn)) *testConn {
	n.tb.Helper()
	tc := n.connect(change...)
	tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), recoveringKeys...)...)
	return tc.loggedIn()
}

// hearOf takes the message that connection lost was dropped.
func (tc *testConn) hearOf(lost *testConn) {
	tc.tb.Helper()
	p := tc.want(pdu.AsyncMessage)
	if p.h.AsyncEvent() != pdu.AsyncConnectionDropped || [6]byte(p.h[38:44]) != [6]byte{0, byte(lost.cid), 0, 2, 0, 5} {
		tc.tb.Fatalf("Asynchronous Message %x", []byte(p.h))
	}
}

// recoverFrom logs lost out for recovery, with its ExpStatSN.
func (tc *testConn) recoverFrom(lost *testConn, expStatSN uint32) {
	tc.tb.Helper()
	tc.wantLogout(tc.removal(lost, expStatSN), pdu.LogoutSuccess)
}

func (tc *testConn) removal(lost *testConn, expStatSN uint32) pdu.BHS {
	h := tc.Request(pdu.LogoutReq, pdu.FlagF|pdu.LogoutForRecovery, true)
	h.SetCID(lost.cid)
	h.SetExpStatSN(expStatSN)
	tc.write(h, nil)
	return h
}

// takeOver makes the memory of h's data that of tc.
func (tc *testConn) takeOver(from *testConn, h pdu.BHS) {
	from.m.mu.Lock()
	sink, source := from.m.sink[h.ITT()], from.m.source[h.ITT()]
	from.m.mu.Unlock()
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	tc.m.sink[h.ITT()], tc.m.source[h.ITT()] = make([]byte, len(sink)), source
}

// reassign sends TASK REASSIGN.
func (tc *testConn) reassign(h pdu.BHS) pdu.BHS {
	return tc.tmf(pdu.TaskReassign, [8]byte{}, h.ITT(), 0)
}

// lose returns two connections of a session at ErrorRecoveryLevel 2. The tests drop a and
// reassign its tasks to b, after they have logged a out for recovery.
func lose(t *testing.T) (n *testNode, a, b *testConn) {
	n = newTestNode(t, recovering)
	a = n.leadRecovering()
	return n, a, a.join(1)
}

// The new connection gets all data of a READ that was in the backend (ISER-10.2.2-1,
// ISER-10.2.2-3), after the TMF Response (ISCSI-7.2.2-2). ExpDataSN is 0 (ISER-7.3.3-3).
func TestReassignedReadSendsItsDataOnTheNewConnection(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n, a, b := lose(t)
		n.fill()
		gate := n.store.Shut()
		h := a.on(b).command(readF, 2<<20, cdb.Read10(0, 4096), nil)
		<-gate.Entered
		a.close()
		b.on(a).hearOf(a)
		b.wantTMF(b.reassign(h), pdu.TaskStillAllegiant) // nobody has logged it out
		l := b.removal(a, a.ExpStatSN)
		b.wantNothing()
		gate.Open()
		b.wantLogout(l, pdu.LogoutSuccess)
		a.wantEnd(io.EOF)
		b.takeOver(a, h)
		b.wantTMF(b.reassign(h), pdu.FunctionComplete) // first, then the data
		b.wantStatus(h, 0)
		if !bytes.Equal(b.m.sink[h.ITT()], n.stored(0, 2<<20)) {
			t.Error("wrong data")
		}
		f := b.Request(pdu.TaskMgmtReq, pdu.FlagF|pdu.TaskReassign, true)
		f.SetReferencedTaskTag(h.ITT())
		f.SetExpStatSN(b.ExpStatSN - 1)
		b.write(f, nil)
		b.wantTMF(f, pdu.TaskStillAllegiant) // to us; the status is not acknowledged
		b.wantTMF(b.reassign(h), pdu.TaskDoesNotExist)
		b.wantOpenWindow()
		b.logout()
	})
}

// The target fetches the data that it has not received (ISER-10.2.2-4), with the mapping of
// the Referenced Task Tag (ISER-7.3.3-4).
func TestReassignedWriteFetchesTheRestOfItsData(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n, a, b := lose(t)
		a.m.holdGets = true
		h := a.on(b).scsi(writeF, 8192, cdb.Write10(0, 16))
		data := pattern(8192, h.ITT())
		a.write(h, data[:512])
		a.wantGets(1)
		a.m.progress = Progress{Next: 3} // R2TSN
		a.close()
		a.wantEnd(io.EOF)
		b.on(a).hearOf(a)
		b.recoverFrom(a, a.ExpStatSN)
		b.takeOver(a, h)
		b.wantTMF(b.reassign(h), pdu.FunctionComplete)
		b.wantStatus(h, 0)
		if !bytes.Equal(n.stored(0, 8192), data) {
			t.Error("wrong data on the medium")
		}
		if !slices.Equal(b.m.getRanges, [][2]int{{512, 8192 - 512}}) ||
			!slices.Equal(b.m.resumed, []Resumption{{SN: 3, Immediate: 512}}) {
			t.Errorf("fetched %v, %+v", b.m.getRanges, b.m.resumed)
		}
		b.logout()
	})
}

// A transfer that fails before the connection does is repeated.
func TestReassignedWriteFetchesDataThatFailed(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		_, a, b := lose(t)
		a.m.holdGets = true
		h := a.on(b).command(writeF, 4096, cdb.Write10(0, 8), nil)
		a.wantGets(1)
		a.m.mu.Lock()
		a.m.endGet(a.m.gets[0], errors.New("nothing can be asked for"))
		a.m.mu.Unlock()
		if err := a.wait(); err == nil {
			t.Error("no reason")
		}
		b.on(a).hearOf(a)
		b.recoverFrom(a, a.ExpStatSN)
		b.takeOver(a, h)
		b.wantTMF(b.reassign(h), pdu.FunctionComplete)
		b.wantStatus(h, 0)
		b.logout()
	})
}

// Pieces that are on the medium are not fetched again.
func TestReassignedWriteContinuesWithItsPiece(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, recovering, func(o *Options) { o.MaxTransferPiece = 1 })
		a := n.leadRecovering()
		b := a.join(1)
		h := a.on(b).scsi(writeF, 192<<10, cdb.Write10(0, 384))
		a.m.holdGets = true
		a.write(h, nil)
		a.wantGets(1)
		a.m.mu.Lock()
		a.m.endGet(a.m.gets[0], nil)
		a.m.mu.Unlock()
		a.wantGets(1)
		a.close()
		a.wantEnd(io.EOF)
		b.on(a).hearOf(a)
		b.recoverFrom(a, a.ExpStatSN)
		b.takeOver(a, h)
		b.wantTMF(b.reassign(h), pdu.FunctionComplete)
		b.wantStatus(h, 0)
		if !bytes.Equal(n.stored(0, 192<<10), pattern(192<<10, h.ITT())) ||
			b.m.getRanges[0] != [2]int{64 << 10, 64 << 10} {
			t.Errorf("fetched %v", b.m.getRanges)
		}
		b.logout()
	})
}

// Unsolicited data that has not come is fetched.
func TestReassignedWriteFetchesUnsolicitedData(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := unsolicitedNode(t, func(o *Options) { o.Limits.MaxConnections, o.Limits.ErrorRecoveryLevel = 4, 2 })
		a := n.leadRecovering()
		b := a.join(1)
		h := a.on(b).scsi(pdu.FlagW, 4096, cdb.Write10(0, 8))
		data := pattern(4096, h.ITT())
		a.write(h, data[:512])
		a.write(a.dataOutPDU(h, false, 0, 512), data[512:1024])
		a.ping()
		a.close()
		a.wantEnd(io.EOF)
		b.on(a).hearOf(a)
		b.recoverFrom(a, a.ExpStatSN)
		b.takeOver(a, h)
		b.wantTMF(b.reassign(h), pdu.FunctionComplete)
		b.wantStatus(h, 0)
		if !bytes.Equal(n.stored(0, 4096), data) || !slices.Equal(b.m.getRanges, [][2]int{{1024, 3072}}) {
			t.Errorf("fetched %v", b.m.getRanges)
		}
		b.logout()
	})
}

// An ORDERED task waits for its turn after it was reassigned, too.
func TestReassignedOrderedTaskWaitsForItsTurn(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		_, a, b := lose(t)
		b.m.holdGets = true
		first := b.command(writeF, 4096, cdb.Write10(0, 8), nil)
		b.wantGets(1)
		h := a.on(b).command(readF|pdu.AttrOrdered, 4096, cdb.Read10(0, 8), nil)
		a.ping()
		a.close()
		a.wantEnd(io.EOF)
		b.on(a).hearOf(a)
		b.recoverFrom(a, a.ExpStatSN)
		b.takeOver(a, h)
		b.wantTMF(b.reassign(h), pdu.FunctionComplete)
		b.wantNothing() // it still is not its turn
		b.m.releaseGets()
		b.wantStatus(first, 0)
		b.wantStatus(h, 0)
		if !bytes.Equal(b.m.sink[h.ITT()], pattern(4096, first.ITT())) {
			t.Error("wrong data")
		}
		b.logout()
	})
}

// A status that was not acknowledged is sent again; the data of a READ is produced again
// (ISCSI-11.14-2, ISCSI-8.2-1).
func TestReassignedTaskRepeatsItsStatus(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n, a, b := lose(t)
		n.fill()
		a.on(b)
		first := a.ExpStatSN
		var sent []pdu.BHS
		for _, h := range []pdu.BHS{a.scsi(writeF, 4096, cdb.Write10(0, 8)), a.scsi(readF, 4096, cdb.Read10(8, 8)),
			a.scsi(readF, 4096, cdb.Read10(storeLen/blockLen, 8))} {
			h.SetExpStatSN(first)
			a.write(h, nil)
			if p := a.want(pdu.SCSIResponse); p.h.ITT() != h.ITT() {
				t.Fatalf("%x", []byte(p.h))
			}
			sent = append(sent, h)
		}
		w, r, bad := sent[0], sent[1], sent[2]
		a.close()
		a.wantEnd(io.EOF)
		b.on(a).hearOf(a)
		before := n.stored(0, 4096)
		n.store.WriteAt(make([]byte, 4096), 0) // by somebody else
		b.recoverFrom(a, first+1)
		b.wantTMF(b.reassign(w), pdu.TaskDoesNotExist)
		b.takeOver(a, r)
		b.wantTMF(b.reassign(r), pdu.FunctionComplete)
		b.wantStatus(r, 0)
		if !bytes.Equal(b.m.sink[r.ITT()], n.stored(8, 4096)) {
			t.Error("wrong data")
		}
		b.takeOver(a, bad)
		b.wantTMF(b.reassign(bad), pdu.FunctionComplete)
		b.wantSense(bad, 5, 0x21, 0)
		if bytes.Equal(before, n.stored(0, 4096)) {
			t.Error("a command was executed twice")
		}
		b.ping()
		b.wantOpenWindow()
		b.logout()
	})
}

// A WRITE that was answered is not executed again.
func TestReassignedWriteIsNotExecutedTwice(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n, a, b := lose(t)
		w := a.on(b).command(writeF, 4096, cdb.Write10(0, 8), nil)
		expStatSN := a.ExpStatSN
		a.wantStatus(w, 0)
		a.close()
		a.wantEnd(io.EOF)
		b.on(a).hearOf(a)
		n.store.WriteAt(make([]byte, 4096), 0)
		b.recoverFrom(a, expStatSN)
		b.takeOver(a, w)
		b.wantTMF(b.reassign(w), pdu.FunctionComplete)
		b.wantStatus(w, 0)
		if !bytes.Equal(n.stored(0, 4096), make([]byte, 4096)) {
			t.Error("a command was executed twice")
		}
		b.logout()
	})
}

// A task survives the failure of its second connection, too.
func TestTaskIsReassignedTwice(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n, a, b := lose(t)
		c := b.join(2)
		a.m.holdGets, b.m.holdGets = true, true
		h := a.on(c).command(writeF, 4096, cdb.Write10(0, 8), nil)
		a.wantGets(1)
		a.close()
		a.wantEnd(io.EOF)
		testkit.Eventually(n.tb, "news", func() bool {
			return b.next(time.Millisecond) != nil ||
				c.next(time.Millisecond) != nil
		})
		b.statSeen, c.statSeen = false, false
		b.on(a).recoverFrom(a, a.ExpStatSN)
		b.takeOver(a, h)
		b.wantTMF(b.reassign(h), pdu.FunctionComplete)
		b.wantGets(1)
		b.close()
		b.wantEnd(io.EOF)
		c.on(b).hearOf(b)
		c.recoverFrom(b, b.ExpStatSN)
		c.takeOver(b, h)
		c.wantTMF(c.reassign(h), pdu.FunctionComplete)
		c.wantStatus(h, 0)
		if !bytes.Equal(n.stored(0, 4096), pattern(4096, h.ITT())) {
			t.Error("wrong data on the medium")
		}
		c.logout()
	})
}

// An advertisement that does not fit is rejected, and the initiator may try again.
func TestReassignWithAWrongAdvertisementIsRejected(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		_, a, b := lose(t)
		a.m.holdGets = true
		h := a.on(b).command(writeF, 4096, cdb.Write10(0, 8), nil)
		a.wantGets(1)
		a.close()
		a.wantEnd(io.EOF)
		b.on(a).hearOf(a)
		b.recoverFrom(a, a.ExpStatSN)
		b.m.mu.Lock()
		b.m.bindErr = errors.New("no STag")
		b.m.mu.Unlock()
		b.wantTMF(b.reassign(h), pdu.FunctionRejected)
		b.m.mu.Lock()
		b.m.bindErr = nil
		b.m.mu.Unlock()
		b.takeOver(a, h)
		b.wantTMF(b.reassign(h), pdu.FunctionComplete)
		b.wantStatus(h, 0)
		b.logout()
	})
}

// RFC 7143, section 11.5.1 (ISCSI-11.6-1): the status of a task that was answered on a
// connection that has been logged out since, but not acknowledged, is sent again before
// the response to ABORT TASK. Its data is not.
func TestAbortAnswered(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, recovering)
		n.fill()
		a := n.leadRecovering()
		b := a.join(1)
		a.on(b)
		first := a.ExpStatSN
		var sent []pdu.BHS
		for _, h := range []pdu.BHS{a.scsi(readF, 512, cdb.Read10(0, 1)), a.scsi(writeF, 4096, cdb.Write10(0, 8)),
			a.scsi(readF, 4096, cdb.Read10(8, 8)), a.scsi(readF, 4096, cdb.Read10(storeLen/blockLen, 8))} {
			h.SetExpStatSN(first)
			a.write(h, nil)
			if p := a.want(pdu.SCSIResponse); p.h.ITT() != h.ITT() {
				t.Fatalf("%x", []byte(p.h))
			}
			sent = append(sent, h)
		}
		abort := func(h pdu.BHS, lun byte) pdu.BHS {
			return b.tmf(pdu.AbortTask, [8]byte{1: lun}, h.ITT(), h.CmdSN())
		}
		acknowledged, w, r, bad := sent[0], sent[1], sent[2], sent[3]
		f := a.Request(pdu.TaskMgmtReq, pdu.FlagF|pdu.AbortTask, true)
		f.SetReferencedTaskTag(w.ITT())
		f.SetRefCmdSN(w.CmdSN())
		f.SetExpStatSN(first)
		a.write(f, nil)
		a.wantTMF(f, pdu.TaskDoesNotExist) // the status is on its way; if it is lost, a SNACK asks for it
		a.close()
		a.wantEnd(io.EOF)
		b.on(a).hearOf(a)
		b.wantTMF(abort(w, 0), pdu.TaskDoesNotExist) // nobody has logged it out
		before := n.stored(0, 4096)
		n.store.WriteAt(make([]byte, 4096), 0) // by somebody else
		b.recoverFrom(a, first+1)
		b.wantTMF(abort(acknowledged, 0), pdu.TaskDoesNotExist)
		b.wantTMF(abort(w, 1), pdu.TaskDoesNotExist) // of another LUN
		for _, h := range []pdu.BHS{w, r} {
			b.takeOver(a, h)
			f := abort(h, 0)
			b.wantStatus(h, 0)
			b.wantTMF(f, pdu.FunctionComplete)
		}
		f = abort(bad, 0)
		b.wantSense(bad, 5, 0x21, 0)
		b.wantTMF(f, pdu.FunctionComplete)
		if !bytes.Equal(b.m.sink[r.ITT()], make([]byte, 4096)) {
			t.Error("data was sent again")
		}
		if bytes.Equal(before, n.stored(0, 4096)) {
			t.Error("a command was executed twice")
		}
		b.ping()
		b.wantTMF(abort(r, 0), pdu.TaskDoesNotExist)
		b.wantOpenWindow()
		b.logout()
	})
}

// ISCSI-11.5-3 and the rest of the answers to TASK REASSIGN.
func TestReassignAnswers(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, recovering)
		a := n.leadRecovering()
		b := a.join(1)
		a.m.holdGets = true
		h := a.on(b).command(writeF, 4096, cdb.Write10(0, 8), nil)
		a.wantGets(1)
		b.on(a).wantTMF(b.reassign(h), pdu.TaskStillAllegiant)
		a.wantTMF(a.reassign(h), pdu.TaskStillAllegiant)
		f := a.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		n.mu.Lock()
		sess := n.sessions[a.tsih]
		n.mu.Unlock()
		testkit.Eventually(n.tb, "abort", func() bool {
			sess.shared.mu.Lock()
			defer sess.shared.mu.Unlock()
			return sess.shared.tasks.find(h.ITT()).aborted.Load()
		})
		b.wantTMF(b.reassign(f), pdu.FunctionRejected)
		a.m.releaseGets()
		a.wantTMF(f, pdu.FunctionComplete)
		b.wantTMF(b.reassign(h), pdu.TaskDoesNotExist)
		b.logout()
		a.wantEnd(nil)
	})
}

// ISCSI-11.14-2: a connection is logged out for recovery on itself.
func TestRecoveryLogoutOfItself(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, recovering, func(o *Options) { o.MaxTransferPiece = 1 }) // 64 KiB
		a := n.leadRecovering()
		b := a.join(1)
		a.m.holdGets = true
		w := a.on(b).command(writeF, 4096, cdb.Write10(0, 8), nil)
		a.wantGets(1)
		gate := n.store.Shut()
		r := a.command(readF, 4096, cdb.Read10(8, 8), nil)
		<-gate.Entered
		second := a.scsi(writeF, 192<<10, cdb.Write10(16, 384))
		a.write(second, nil)
		a.wantGets(2)
		gap := a.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		lost := a.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		a.ping()
		l := a.removal(a, a.ExpStatSN)
		a.wantNothing()   // the READ has not stopped
		a.m.releaseGets() // data requested before may still come
		gate.Open()
		p := a.wantLogout(l, pdu.LogoutSuccess)
		if [4]byte(p.h[40:44]) != [4]byte{0, 2, 0, 5} { // ISCSI-11.15-2
			t.Errorf("%x", []byte(p.h))
		}
		a.wantNothing()
		b.on(a).takeOver(a, r)
		b.takeOver(a, w)
		f := b.reassign(r)
		a.close()
		a.wantEnd(nil)
		b.wantTMF(f, pdu.FunctionComplete)
		b.wantStatus(r, 0)
		b.wantTMF(b.reassign(w), pdu.FunctionComplete)
		b.wantStatus(w, 0)
		b.takeOver(a, second)
		b.wantTMF(b.reassign(second), pdu.FunctionComplete)
		b.wantStatus(second, 0)
		if !bytes.Equal(n.stored(0, 4096), pattern(4096, w.ITT())) ||
			!bytes.Equal(n.stored(16, 192<<10), pattern(192<<10, second.ITT())) {
			t.Error("wrong data on the medium")
		}
		if got := b.m.getRanges[len(b.m.getRanges)-2:]; !slices.Equal(got,
			[][2]int{{64 << 10, 64 << 10}, {128 << 10, 64 << 10}}) {
			t.Errorf("fetched %v", got) // nothing was requested after the logout
		}
		// What had not been acknowledged has never come.
		b.wantTMF(b.reassign(lost), pdu.TaskDoesNotExist)
		b.write(gap, nil)
		b.wantStatus(gap, 0)
		b.write(lost, nil)
		b.wantStatus(lost, 0)
		b.wantLogout(b.removal(a, 0), pdu.LogoutCIDNotFound)
		b.logout()
	})
}

// ISCSI-6.3.4-3, ISCSI-E-1, ISCSI-8.3.2-1 (N5, N7, N10): a session without
// connections continues with the next one, by connection reinstatement or with another
// CID. Neither is a loss of the nexus.
func TestSessionContinuation(t *testing.T) {
	for _, c := range []struct {
		name string
		cid  uint16
	}{{"connection reinstatement", 0}, {"another CID", 5}} {
		bubble(t, c.name, func(t *testing.T) {
			n := newTestNode(t, recovering)
			a := n.leadRecovering()
			a.m.holdGets = true
			h := a.command(writeF, 4096, cdb.Write10(0, 8), nil)
			a.wantGets(1)
			a.close()
			a.wantEnd(io.EOF)
			if s := n.Stats(); s.Sessions != 1 || s.Connections != 0 || len(n.log.Lines("session ended")) != 0 {
				t.Errorf("%+v", s)
			}
			b := a.joinAs(c.cid)
			b.wantLogin(pdu.LoginSuccess)
			b.CmdSN = a.CmdSN
			b.wantStatus(b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
			if c.cid != a.cid {
				b.wantTMF(b.reassign(h), pdu.TaskStillAllegiant)
				b.recoverFrom(a, a.ExpStatSN)
			}
			b.takeOver(a, h)
			b.wantTMF(b.reassign(h), pdu.FunctionComplete)
			b.wantStatus(h, 0)
			b.logout()
		})
	}
	// A live connection that is replaced: the implicit logout is one for recovery.
	bubble(t, "of a live connection", func(t *testing.T) {
		n := newTestNode(t, recovering)
		a := n.leadRecovering()
		a.m.holdGets = true
		h := a.command(writeF, 4096, cdb.Write10(0, 8), nil)
		a.wantGets(1)
		b := a.joinAs(a.cid)
		b.wantLogin(pdu.LoginSuccess)
		a.wantEnd(errReinstated)
		b.CmdSN = a.CmdSN
		b.takeOver(a, h)
		b.wantTMF(b.reassign(h), pdu.FunctionComplete)
		b.wantStatus(h, 0)
		b.logout()
	})
}

// A session and a connection that nobody recovers end after Time2Wait and Time2Retain.
func TestConnectionStateTimeout(t *testing.T) {
	// ISCSI-6.3.5-3, ISCSI-6.3.5-4, ISCSI-8.3.2-1 (N6)
	bubble(t, "the session", func(t *testing.T) {
		n := newTestNode(t, recovering)
		a := n.connect()
		a.writeLogin(a.loginRequest(true, 1, 3), append(slices.Clone(names), recoveringKeys...)...)
		r, _ := a.wantLogin(pdu.LoginSuccess)
		a.tsih = r.TSIH
		a.close()
		a.wantEnd(io.EOF)
		time.Sleep(7*time.Second - time.Millisecond)
		if s := n.Stats(); s.Sessions != 1 {
			t.Errorf("%+v", s)
		}
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		if s := n.Stats(); s.Sessions != 0 {
			t.Errorf("%+v", s)
		}
		if l := n.log.Lines("session ended"); len(l) != 1 || !strings.Contains(l[0], "level=WARN") ||
			!strings.Contains(l[0], "no connection came back within 7s") {
			t.Errorf("log: %q", l)
		}
		a.joinAs(0).wantRefused(pdu.LoginNoSession)
	})
	for _, removed := range []bool{false, true} {
		bubble(t, map[bool]string{false: "ISCSI-11.14-5 b", true: "ISCSI-11.14-5 c"}[removed], func(t *testing.T) {
			n := newTestNode(t, recovering)
			a := n.leadRecovering()
			b := a.join(1)
			a.m.holdGets = true
			h := a.on(b).command(writeF, 4096, cdb.Write10(0, 8), nil)
			a.wantGets(1)
			a.close()
			a.wantEnd(io.EOF)
			b.on(a).hearOf(a)
			if removed {
				b.recoverFrom(a, a.ExpStatSN)
			}
			b.wantStatus(b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
			n.mu.Lock()
			s := n.sessions[a.tsih]
			n.mu.Unlock()
			s.shared.mu.Lock()
			l := s.lost[0]
			s.shared.mu.Unlock()
			if !l.timer.Stop() {
				t.Error("no time-out was coming")
			}
			s.expire(l)       // ISCSI-E-1, ISCSI-8.2-1 (M1)
			b.want(pdu.NOPIn) // an initiator with nothing left of its window would wait for ever
			b.wantOpenWindow()
			b.clearedByTransport()
			b.wantTMF(b.reassign(h), pdu.TaskDoesNotExist)
			b.wantLogout(b.removal(a, 0), pdu.LogoutCIDNotFound)
			b.wantOpenWindow()
			b.logout()
		})
	}
}

// ISCSI-7.14-1, ISCSI-11.14-2: immediate commands, and commands that were not
// acknowledged, do not survive.
func TestWhatIsNotRecovered(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, recovering)
		a := n.leadRecovering()
		b := a.join(1)
		a.on(b).m.holdGets = true
		i := a.scsi(writeF, 4096, cdb.Write10(0, 8))
		i.SetImmediate()
		a.CmdSN--
		a.write(i, nil)
		a.wantGets(1)
		gap := a.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		lost := a.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		a.ping()
		a.close()
		a.wantEnd(io.EOF)
		b.on(a).hearOf(a)
		b.recoverFrom(a, a.ExpStatSN)
		b.wantTMF(b.reassign(i), pdu.TaskDoesNotExist)
		b.wantTMF(b.reassign(lost), pdu.TaskDoesNotExist)
		b.write(gap, nil)
		b.wantSense(gap, 6, 0x47, 0x7f) // of the immediate one
		b.write(lost, nil)
		b.wantStatus(lost, 0)
		b.logout()
	})
}

// loseWrite loses connection a of a session while one of its WRITEs waits for data. The
// session has a second connection b on demand.
func loseWrite(t *testing.T, second bool) (n *testNode, a, b *testConn, h pdu.BHS) {
	n = newTestNode(t, recovering)
	a = n.leadRecovering()
	if second {
		b = a.join(1)
		a.on(b)
	}
	a.m.holdGets = true
	h = a.command(writeF, 4096, cdb.Write10(0, 8), nil)
	a.wantGets(1)
	a.close()
	a.wantEnd(io.EOF)
	if second {
		b.on(a).hearOf(a)
	}
	return n, a, b, h
}

// ABORT TASK ends a task of a connection that was lost and logged out.
func TestAbortTaskEndsATaskOfALostConnection(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n, a, b, h := loseWrite(t, true)
		synctest.Wait()
		if s := n.Stats(); s.Connections != 1 || s.TasksInFlight != 3 { // two PDUs that b has not acknowledged, and the WRITE of a
			t.Errorf("%d connections and %d tasks, want 1 and 3", s.Connections, s.TasksInFlight)
		}
		b.recoverFrom(a, a.ExpStatSN)
		b.wantTMF(b.tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN()), pdu.FunctionComplete)
		b.wantTMF(b.reassign(h), pdu.TaskDoesNotExist)
		b.wantStatus(b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
		b.logout()
	})
}

// LOGICAL UNIT RESET ends a task of a lost connection.
func TestResetEndsATaskOfALostConnection(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		_, _, b, h := loseWrite(t, true)
		b.wantTMF(b.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0), pdu.FunctionComplete)
		b.wantTMF(b.reassign(h), pdu.TaskDoesNotExist)
		b.logout()
	})
}

// ISCSI-11.14-1: Logout of a lost connection ends its tasks.
func TestLogoutOfALostConnectionEndsItsTasks(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		_, a, b, _ := loseWrite(t, true)
		b.wantLogout(b.logoutOf(pdu.LogoutCloseConnection, a.cid), pdu.LogoutSuccess)
		b.clearedByTransport()
		b.logout()
	})
}

// ISCSI-11.14-1: so does Logout of the session.
func TestLogoutOfASessionEndsALostConnection(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		_, _, b, _ := loseWrite(t, true)
		b.logout()
	})
}

// ISCSI-6.3.5-1, ISCSI-E-2: session reinstatement ends a session without a connection.
func TestReinstatementEndsALostConnection(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n, a, _, _ := loseWrite(t, false)
		b := n.leadRecovering()
		if b.tsih == a.tsih {
			t.Errorf("TSIH %d", b.tsih)
		}
		if l := n.log.Lines("session ended"); len(l) != 1 || !strings.Contains(l[0], "level=INFO") ||
			!strings.Contains(l[0], errReinstated.Error()) {
			t.Errorf("log: %q", l)
		}
		b.logout()
	})
}

// Shutdown ends a session without a connection.
func TestShutdownEndsALostConnection(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n, _, _, _ := loseWrite(t, false)
		if err := n.Shutdown(context.Background()); err != nil || n.Stats().Sessions != 0 {
			t.Errorf("%v, %+v", err, n.Stats())
		}
	})
}

// leadAs opens a session at ErrorRecoveryLevel 2 as that initiator, and loses its connection.
func (n *testNode) leadAs(initiator string, port byte) *testConn {
	n.tb.Helper()
	tc := n.connect(func(tc *testConn) { tc.isid[5] = port })
	tc.writeLogin(tc.loginRequest(true, 1, 3), append([]string{"InitiatorName=" + initiator,
		"TargetName=" + targetName, "SessionType=Normal"}, recoveringKeys...)...)
	tc.loggedIn().close()
	tc.wantEnd(io.EOF)
	synctest.Wait()
	return tc
}

// An initiator has a few places for sessions that wait for a connection. When all places are taken
// the one with most makes room, so a neighbour's session stays.
func TestPlacesOfLostSessions(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, recovering)
		l := n.shared
		l.LostSessions.SetMax(3)
		l.LostSessionsByName.SetMax(3)
		const neighbour = "iqn.1993-08.org.debian:01:neighbour"
		has := func(initiator string) (sessions int) {
			for _, s := range n.Sessions() {
				if s.Initiator == initiator {
					sessions++
				}
			}
			return sessions
		}
		for port := range byte(6) { // more than all places
			n.leadAs(rival, port)
		}
		if got := has(rival); got != 3 || l.LostSessionsByName.State().Bites == 0 {
			t.Errorf("the initiator has %d sessions, want 3; the limit bit %d times", got, l.LostSessionsByName.State().Bites)
		}
		for port := range byte(1) {
			n.leadAs(neighbour, port)
		}
		if a, b := has(rival), has(neighbour); a != 2 || b != 1 {
			t.Errorf("%d sessions of the one with most and %d of the neighbour are left, want 2 and 1", a, b)
		}
		if got := l.LostSessions.State().Bites; got != 1 {
			t.Errorf("limit bit %d times", got)
		}
		n.Shutdown(context.Background())
		if l.LostSessions.Used() != 0 || l.LostSessionsByName.Used() != 0 {
			t.Errorf("%d and %d places are still taken", l.LostSessions.Used(), l.LostSessionsByName.Used())
		}
	})
}

// A login at ErrorRecoveryLevel 2 with a DefaultTime2Wait beyond the limit is refused: the higher
// proposal counts, and the target would have to keep what is lost for that long.
func TestTime2WaitIsBounded(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, recovering)
		keys := append(without(recoveringKeys, "DefaultTime2Wait"), "DefaultTime2Wait=31")
		tc := n.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), keys...)...)
		tc.wantLogin(pdu.LoginInitiatorError)
		if err := tc.wait(); err == nil || !strings.Contains(err.Error(), "limits.max_time2wait is 30s") {
			t.Error(err)
		}
		// Without recovery the target keeps nothing, and does not mind.
		keys = append(without(linuxKeys, "DefaultTime2Wait"), "DefaultTime2Wait=3600")
		tc = n.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), keys...)...)
		tc.loggedIn().logout()
	})
}

// A login that asks to be kept for an hour gets limits.max_time2retain. When that is over, nothing of
// the session is left, and its neighbour has noticed nothing. The limit changes for the next logins.
func TestTime2RetainIsBounded(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		l := limits.New()
		n := newTestNode(t, recovering, func(o *Options) { o.Shared = l })
		neighbour := n.connect(func(tc *testConn) { tc.isid[5] = 2 }).login()
		used, places := l.Memory.Used(), n.Stats().TasksInFlight
		leads := func(offer, answer string) *testConn {
			t.Helper()
			tc := n.connect()
			tc.writeLogin(tc.loginRequest(true, 1, 3),
				append(append(slices.Clone(names), without(recoveringKeys, "DefaultTime2Retain")...), offer)...)
			r, answers := tc.wantLogin(pdu.LoginSuccess)
			if tc.tsih = r.TSIH; !slices.Contains(answers, answer) {
				t.Fatalf("answers to %s: %q, want %s", offer, answers, answer)
			}
			return tc
		}
		leads("DefaultTime2Retain=3600", "DefaultTime2Retain=20").logout()
		l.MaxTime2Retain.SetMax(int64(5 * time.Second))
		leads("DefaultTime2Retain=4", "DefaultTime2Retain=4").logout()

		greedy := leads("DefaultTime2Retain=3600", "DefaultTime2Retain=5")
		l.MaxTime2Retain.SetMax(int64(time.Hour)) // for later logins
		for range 3 {
			greedy.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
			greedy.want(pdu.SCSIResponse)
		}
		greedy.m.holdGets = true
		greedy.command(writeF, 8192, cdb.Write10(0, 16), make([]byte, 4096))
		greedy.wantGets(1)
		greedy.close()
		greedy.wantEnd(io.EOF)
		serves := func() {
			t.Helper()
			neighbour.wantStatus(neighbour.command(readF, 4096, cdb.Read10(0, 8), nil), lun.StatusGood)
		}
		for range 7 {
			serves()
			if s := n.Stats(); s.Sessions != 2 || l.LostSessions.Used() != 1 {
				t.Fatalf("%+v, %d lost sessions", s, l.LostSessions.Used())
			}
			time.Sleep(time.Second - time.Millisecond)
		}
		time.Sleep(7*time.Millisecond + 1)
		synctest.Wait()
		serves()
		synctest.Wait()
		if s := n.Stats(); s.Sessions != 1 || s.TasksInFlight != places || s.BuffersOut != 0 || l.LostSessions.Used() != 0 ||
			l.LostSessionsByName.UsedBy(initiatorName) != 0 || l.Memory.Used() > used {
			t.Errorf("%+v; %d lost sessions; %d bytes, %d without the session", s, l.LostSessions.Used(), l.Memory.Used(), used)
		}
		neighbour.logout()
	})
}

// With a limit below the default, a login at ErrorRecoveryLevel 2 that asks for no Time2Retain is
// refused: the default would hold.
func TestTime2RetainHasADefault(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) { // ISCSI-6.2-5
		l := limits.New()
		l.MaxTime2Retain.SetMax(int64(19 * time.Second))
		n := newTestNode(t, recovering, func(o *Options) { o.Shared = l })
		keys := append(slices.Clone(names), without(recoveringKeys, "DefaultTime2Retain")...)
		tc := n.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3), keys...)
		tc.wantLogin(pdu.LoginInitiatorError)
		if err := tc.wait(); err == nil || !strings.Contains(err.Error(), "its default is 20, and the limit 19") {
			t.Error(err)
		}
		tc = n.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), without(linuxKeys, "DefaultTime2Retain")...)...)
		tc.loggedIn().logout()
		l.MaxTime2Retain.SetMax(int64(20 * time.Second))
		tc = n.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3), keys...)
		tc.loggedIn().logout()
	})
}

// Logout for recovery reports that cleanup failed while a task of the connection runs on.
func TestCleanupFailsWhileATaskDoesNotStop(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, recovering, func(o *Options) { o.ReinstatementWait = 20 * time.Millisecond })
		a := n.leadRecovering()
		b := a.join(1)
		gate := n.store.Shut()
		a.on(b).command(readF, 4096, cdb.Read10(0, 8), nil)
		<-gate.Entered
		a.close()
		b.on(a).hearOf(a)
		b.wantLogout(b.removal(a, a.ExpStatSN), pdu.LogoutCleanupFailed)
		gate.Open()
		a.wantEnd(io.EOF)
		b.recoverFrom(a, a.ExpStatSN)
		b.logout()
	})
}

// Below ErrorRecoveryLevel 2, and with Time2Retain 0, nothing is kept.
func TestNoRecovery(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, recovering)
		a := n.connect()
		a.writeLogin(a.loginRequest(true, 1, 3),
			append(append(slices.Clone(names), without(recoveringKeys, "DefaultTime2Retain")...),
				"DefaultTime2Retain=0")...)
		a.loggedIn()
		a.wantLogout(a.removal(a, 0), pdu.LogoutRecoveryNotSupported)
		a.wantTMF(a.reassign(a.Request(pdu.NOPOut, 0, true)), pdu.ReassignNotSupported)
		a.close()
		a.wantEnd(io.EOF)
		if s := n.Stats(); s.Sessions != 0 {
			t.Errorf("%+v", s)
		}
	})
}
