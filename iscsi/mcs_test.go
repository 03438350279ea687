package iscsi

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// several allows a session that many connections.
func several(connections uint16) func(*Options) {
	return func(o *Options) { o.Limits.MaxConnections = connections }
}

// leadingKeys are linuxKeys of an initiator that asks for more from its session;
// joiningKeys are what is left of them for later connections.
var (
	leadingKeys = append(without(linuxKeys, "MaxConnections"), "MaxConnections=4")
	joiningKeys = without(linuxKeys, "DefaultTime2Wait", "DefaultTime2Retain", "ErrorRecoveryLevel", "InitialR2T",
		"ImmediateData",
		"MaxBurstLength", "FirstBurstLength", "MaxOutstandingR2T", "MaxConnections", "DataPDUInOrder",
		"DataSequenceInOrder", "RDMAExtensions")
)

// lead opens a session of several connections.
func (n *testNode) lead(change ...func(*testConn)) *testConn {
	n.tb.Helper()
	tc := n.connect(change...)
	tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), leadingKeys...)...)
	return tc.loggedIn()
}

// joinAs begins a connection of the session of tc with another CID.
func (tc *testConn) joinAs(cid uint16, change ...func(*testConn)) *testConn {
	o := tc.connect(append([]func(*testConn){func(o *testConn) {
		o.isid, o.tsih, o.cid, o.CmdSN, o.ITT = tc.isid, tc.tsih, cid, tc.CmdSN, 0x1000*uint32(cid+1)
	}}, change...)...)
	o.writeLogin(o.loginRequest(true, 1, 3), append(slices.Clone(names), joiningKeys...)...)
	return o
}

// join adds a connection to the session of tc.
func (tc *testConn) join(cid uint16, change ...func(*testConn)) *testConn {
	tc.tb.Helper()
	o := tc.joinAs(cid, change...)
	tsih := o.tsih
	o.loggedIn()
	if o.tsih != tsih {
		tc.tb.Fatalf("TSIH %d became %d", tsih, o.tsih)
	}
	tc.CmdSN = o.CmdSN
	return o
}

// on makes the next command of the session one of tc; from had the last one.
func (tc *testConn) on(from *testConn) *testConn {
	tc.CmdSN = from.CmdSN
	return tc
}

// wantEnd waits until the target ends the connection.
func (tc *testConn) wantEnd(is error) {
	tc.tb.Helper()
	if err := tc.wait(); !errors.Is(err, is) {
		tc.tb.Errorf("connection ended with %v, want %v", err, is)
	}
}

// logoutOf sends a Logout Request.
func (tc *testConn) logoutOf(reason byte, cid uint16) pdu.BHS {
	h := tc.Request(pdu.LogoutReq, pdu.FlagF|reason, true)
	h.SetCID(cid)
	tc.write(h, nil)
	return h
}

func (tc *testConn) wantLogout(h pdu.BHS, response byte) *sentPDU {
	tc.tb.Helper()
	p := tc.want(pdu.LogoutResp)
	if p.h.ITT() != h.ITT() || p.h.Response() != response {
		tc.tb.Fatalf("Logout Response %x, want response %d", []byte(p.h), response)
	}
	return p
}

// clearedByTransport takes the unit attention of RFC 7143, section 11.14.5, and
// only one.
func (tc *testConn) clearedByTransport() {
	tc.tb.Helper()
	tc.wantSense(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x47, 0x7f)
	tc.wantStatus(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
}

// Two connections have one CmdSN window and a StatSN each; a command is answered
// where it came.
func TestConnectionsOfASession(t *testing.T) {
	begin := func(t *testing.T) (n *testNode, a, b *testConn) {
		n = newTestNode(t, several(4))
		a = n.lead()
		return n, a, a.join(1)
	}
	bubble(t, "commands by turns, until logout", func(t *testing.T) {
		n, a, b := begin(t)
		if s := n.Stats(); s.Sessions != 1 || s.Connections != 2 {
			t.Fatalf("%+v", s)
		}
		from, to := a, b
		for range 20 {
			to.on(from)
			h := to.command(writeF, 4096, cdb.Write10(8, 8), nil)
			to.wantStatus(h, 0)
			if got := n.stored(8, 4096); !bytes.Equal(got, pattern(4096, h.ITT())) {
				t.Fatal("wrong data")
			}
			r := to.command(readF, 4096, cdb.Read10(8, 8), nil)
			to.wantStatus(r, 0)
			if !bytes.Equal(to.m.sink[r.ITT()], pattern(4096, h.ITT())) {
				t.Fatal("wrong data")
			}
			from, to = to, from
		}
		b.on(from)
		b.logout()
		a.wantEnd(nil)
		if l := n.log.Lines("connection ended"); len(l) != 1 || !strings.Contains(l[0], "reason=logout") {
			t.Errorf("log: %q", l)
		}
		if l := n.log.Lines("session ended"); len(l) != 1 || !strings.Contains(l[0], "reason=logout") {
			t.Errorf("log: %q", l)
		}
	})
	bubble(t, "ISCSI-4.2.2.1-3 ISCSI-4.2.2.1-4 gap closed by the other connection", func(t *testing.T) {
		_, a, b := begin(t)
		a.on(b)
		gap := a.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		held := []pdu.BHS{b.on(a).command(readF, 4096, cdb.Read10(8, 8), nil),
			b.command(writeF, 4096, cdb.Write10(16, 8), nil)}
		a.on(b)
		b.wantNothing()
		if b.ping(); b.expCmdSN != gap.CmdSN() {
			t.Errorf("ExpCmdSN %d beyond the gap at %d", b.expCmdSN, gap.CmdSN())
		}
		a.write(gap, nil)
		a.wantStatus(gap, 0)
		b.wantAllGood(held)
		a.wantNothing()
	})
	bubble(t, "ISCSI-7.2.1-1 ISCSI-4.2.2.1-10 retry on the other connection", func(t *testing.T) {
		_, a, b := begin(t)
		a.on(b)
		gap := a.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		h := a.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		a.ping() // it has come
		b.on(a).write(h, nil)
		other := bytes.Clone(h)
		pdu.BHS(other).SetCmdSN(h.CmdSN() + 1)
		b.write(other, nil)
		b.wantReject(pdu.RejectTaskInProgress, other)
		b.write(gap, nil)
		b.wantStatus(gap, 0)
		a.wantStatus(h, 0)
		b.write(h, nil) // answered: its CmdSN is below the window
		b.wantNothing()
		a.wantNothing()
	})
	bubble(t, "ISCSI-4.2.2.1-5 one window", func(t *testing.T) {
		_, a, b := begin(t)
		b.on(a)
		a.ping()
		b.ping()
		if a.expCmdSN != b.expCmdSN || a.maxCmdSN != b.maxCmdSN || a.maxCmdSN != a.expCmdSN+127 {
			t.Errorf("windows %d..%d and %d..%d", a.expCmdSN, a.maxCmdSN, b.expCmdSN, b.maxCmdSN)
		}
		if a.m.full == 0 || b.m.full == 0 {
			t.Error("EnterFullFeature was not called")
		}
	})
}

// Commands in flight are never more than the queue depth, however many
// connections there are; ORDERED holds across them.
func TestConnectionsShareTheWindow(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4), func(o *Options) { o.QueueDepth = 3 })
		a := n.lead()
		b := a.join(1)
		gate := n.store.Shut()
		first := a.command(readF, 4096, cdb.Read10(0, 8), nil)
		<-gate.Entered
		ordered := b.on(a).command(readF|pdu.AttrOrdered, 4096, cdb.Read10(0, 8), nil)
		last := a.on(b).command(readF|pdu.AttrSimple, 4096, cdb.Read10(0, 8), nil)
		a.ping() // it has come
		b.on(a).ping()
		if b.maxCmdSN != b.expCmdSN-1 {
			t.Errorf("MaxCmdSN %d, ExpCmdSN %d with a full queue", b.maxCmdSN, b.expCmdSN)
		}
		beyond := b.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		b.wantNothing()
		if len(gate.Entered) != 0 {
			t.Error("a task has overtaken an ORDERED one, or the ORDERED one others")
		}
		gate.Open()
		a.wantStatus(first, 0)
		b.wantStatus(ordered, 0)
		a.wantStatus(last, 0)
		b.write(beyond, nil)
		b.wantStatus(beyond, 0)
		b.logout()
		a.wantEnd(nil)
	})
}

// What a session may have in flight was agreed on when it began. A connection that joins
// when the options say less has the slots for it: with fewer, commands that wait for data
// would keep that from being received.
func TestQueueDepthOfASession(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(2))
		a := n.lead()
		o := *n.opt.Load()
		o.QueueDepth = 1
		n.SetOptions(o)
		b := a.join(1)
		b.m.holdGets = true
		var all []pdu.BHS
		for range 128 {
			all = append(all, b.command(writeF, 4096, cdb.Write10(0, 8), nil))
		}
		b.wantGets(len(all))
		b.m.releaseGets()
		for range all {
			if p := b.want(pdu.SCSIResponse); p.h.Status() != 0 {
				t.Errorf("SCSI Response %x", []byte(p.h))
			}
		}
		b.logout()
		a.wantEnd(nil)
	})
}

// Task management reaches the tasks of all connections of the session.
func TestTMFAcrossConnections(t *testing.T) {
	begin := func(t *testing.T) (n *testNode, a, b *testConn) {
		n = newTestNode(t, several(4))
		a = n.lead()
		return n, a, a.join(1)
	}
	bubble(t, "ABORT TASK", func(t *testing.T) {
		_, a, b := begin(t)
		a.m.holdGets = true
		h := a.on(b).command(writeF, 4096, cdb.Write10(0, 8), nil)
		a.wantGets(1)
		f := b.on(a).tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		b.wantNothing()
		a.m.releaseGets()
		b.wantTMF(f, pdu.FunctionComplete)
		a.wantNothing()
	})
	bubble(t, "ISCSI-7.11-1 ABORT TASK closes a gap", func(t *testing.T) {
		_, a, b := begin(t)
		a.on(b)
		gap := a.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
		h := a.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		a.ping()
		b.on(a).wantTMF(b.tmf(pdu.AbortTask, [8]byte{}, gap.ITT(), gap.CmdSN()), pdu.FunctionComplete)
		a.wantStatus(h, 0)
	})
	bubble(t, "functions about all tasks", func(t *testing.T) {
		n, a, b := begin(t)
		a.on(b)
		for _, f := range []byte{pdu.AbortTaskSet, pdu.ClearTaskSet, pdu.LogicalUnitReset, pdu.TargetWarmReset} {
			gate := n.store.Shut()
			h := a.command(readF, 4096, cdb.Read10(0, 8), nil)
			<-gate.Entered
			r := b.on(a).tmf(f, [8]byte{}, pdu.ReservedTag, 0)
			b.wantNothing()
			gate.Open()
			b.wantTMF(r, pdu.FunctionComplete)
			a.wantNothing()
			if b.expCmdSN != h.CmdSN()+1 || b.maxCmdSN != b.expCmdSN+127 {
				t.Errorf("window %d..%d after function %d", b.expCmdSN, b.maxCmdSN, f)
			}
			if f == pdu.LogicalUnitReset || f == pdu.TargetWarmReset {
				a.wantSense(a.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x29, 0x03)
			}
		}
	})
	bubble(t, "on behalf of a connection that ends", func(t *testing.T) {
		n, a, b := begin(t)
		a.on(b)
		gate := n.store.Shut()
		defer gate.Open()
		h := a.command(readF, 4096, cdb.Read10(0, 8), nil)
		<-gate.Entered
		b.on(a).tmf(pdu.AbortTask, [8]byte{}, h.ITT(), h.CmdSN())
		n.mu.Lock()
		sess := n.sessions[a.tsih]
		n.mu.Unlock()
		testkit.Eventually(n.tb, "abort", func() bool {
			sess.shared.mu.Lock()
			defer sess.shared.mu.Unlock()
			return sess.shared.tasks.find(h.ITT()).aborted.Load()
		})
		l := a.logoutOf(pdu.LogoutCloseConnection, b.cid)
		a.wantLogout(l, pdu.LogoutSuccess) // although the command has not stopped
		b.wantEnd(errLoggedOut)
		gate.Open()
		a.want(pdu.NOPIn) // room in the window, of the command that was aborted
		a.logout()
	})
}

// Unsolicited data comes where its command came.
func TestDataOutOnAnotherConnection(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := unsolicitedNode(t, func(o *Options) { o.Limits.MaxConnections = 4 })
		a := n.lead()
		b := a.join(1)
		h := a.scsi(pdu.FlagW, 4096, cdb.Write10(0, 8))
		a.write(h, nil)
		a.ping()
		d := a.dataOutPDU(h, true, 0, 0)
		b.write(d, make([]byte, 4096))
		b.wantReject(pdu.RejectInvalidField, d)
		a.wantNothing()
		a.write(d, pattern(4096, h.ITT()))
		a.wantStatus(h, 0)
		b.on(a).logout()
		a.wantEnd(nil)
	})
}

// A logout that closes one connection ends its tasks. The initiator may send again what the
// target had not acknowledged.
func TestLogoutOfOneConnection(t *testing.T) {
	for _, c := range []struct {
		name  string
		other bool
	}{{"its own", false}, {"another", true}} {
		bubble(t, c.name, func(t *testing.T) {
			n := newTestNode(t, several(4))
			a := n.lead()
			b := a.join(1)
			b.m.holdGets = true
			survives := b.on(a).command(writeF, 4096, cdb.Write10(0, 8), nil)
			b.wantGets(1)
			gate := n.store.Shut()
			a.on(b).command(readF, 4096, cdb.Read10(0, 8), nil)
			<-gate.Entered
			gap := a.scsi(pdu.FlagF, 0, cdb.TestUnitReady)
			lost := a.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
			b.on(a)
			a.ping() // so that it has been taken

			by := a
			if c.other {
				by = b
			}
			l := by.logoutOf(pdu.LogoutCloseConnection, a.cid)
			by.wantNothing()
			gate.Open()
			by.wantLogout(l, pdu.LogoutSuccess) // ISCSI-11.14-1
			if c.other {
				a.wantEnd(errLoggedOut)
			} else {
				a.close()
				a.wantEnd(nil)
			}
			if n.Stats().Sessions != 1 {
				t.Fatal("the session has ended")
			}
			b.write(gap, nil)
			b.wantSense(gap, 6, 0x47, 0x7f) // ISCSI-11.14-5
			b.wantNothing()
			b.write(lost, nil)
			b.wantStatus(lost, 0)
			b.m.releaseGets()
			b.wantStatus(survives, 0)
			b.ping()
			b.wantOpenWindow()
			b.wantLogout(b.logoutOf(pdu.LogoutCloseConnection, a.cid), pdu.LogoutCIDNotFound) // ISCSI-11.14-4
			// ISCSI-6.3.5-2: the last one is the end of the session.
			b.wantLogout(b.logoutOf(pdu.LogoutCloseConnection, b.cid), pdu.LogoutSuccess)
			b.close()
			b.wantEnd(nil)
			if l := n.log.Lines("session ended"); len(l) != 1 {
				t.Errorf("log: %q", l)
			}
		})
	}
}

// ISCSI-7.1.4-1, ISCSI-7.14-1, ISCSI-6.3.5-2: at ErrorRecoveryLevel 0 a connection
// that fails takes its session along; the others are told.
func TestDeathOfOneConnection(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4), func(o *Options) { o.LogoutWait = 200 * time.Millisecond })
		a := n.lead()
		b := a.join(1)
		c := b.join(2)
		c.m.mu.Lock()
		c.m.holdFlush = true // an initiator that does not read
		c.m.mu.Unlock()
		gate := n.store.Shut()
		b.on(c).command(readF, 4096, cdb.Read10(0, 8), nil)
		<-gate.Entered
		a.close()
		a.wantEnd(io.EOF)
		p := b.want(pdu.AsyncMessage)
		if p.h.AsyncEvent() != pdu.AsyncSessionDropped || p.h.ITT() != pdu.ReservedTag {
			t.Errorf("%x", []byte(p.h))
		}
		gate.Open()
		b.close()
		b.wantEnd(errConnectionLost)
		if b.next(0) != nil {
			t.Error("an answer of a session that has ended")
		}
		c.wantEnd(errConnectionLost)
		testkit.Eventually(n.tb, "end of the session", func() bool { return n.Stats().Sessions == 0 })
		joining := b.joinAs(3)
		joining.wantRefused(pdu.LoginNoSession)
	})
}

// ISCSI-6.3.1-1: logins that do not get into a session.
func TestJoinRefused(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(2))
		a := n.lead()
		b := a.join(1)
		a.joinAs(2).wantRefused(pdu.LoginTooManyConnections)
		a.joinAs(2, func(tc *testConn) { tc.isid[5]++ }).wantRefused(pdu.LoginNoSession)
		a.joinAs(2, func(tc *testConn) { tc.tsih++ }).wantRefused(pdu.LoginNoSession)
		a.joinAs(0, func(tc *testConn) { tc.m.rdma = false }).wantRefused(pdu.LoginCannotInclude)
		d := n.connect().discover()
		j := n.connect(func(tc *testConn) { tc.isid, tc.tsih, tc.cid = d.isid, d.tsih, 1 })
		j.writeLogin(j.loginRequest(true, 1, 3), "InitiatorName="+initiatorName, "SessionType=Discovery")
		j.wantRefused(pdu.LoginInitiatorError)
		d.logout()
		leading := n.connect(func(tc *testConn) { tc.tsih, tc.cid = a.tsih, 1 })
		leading.writeLogin(leading.loginRequest(true, 1, 3), append(slices.Clone(names), "MaxConnections=4")...)
		leading.wantRefused(pdu.LoginInitiatorError)
		noRoom := a.connect(func(tc *testConn) { tc.tsih, tc.cid, tc.m.enterErr = a.tsih, 1, errors.New("no memory") })
		noRoom.writeLogin(noRoom.loginRequest(true, 1, 3), append(slices.Clone(names), joiningKeys...)...)
		noRoom.wantRefused(pdu.LoginOutOfResources) // having replaced b
		b.wantEnd(errReinstated)
		b = a.join(1)
		b.on(a).logout()
		a.wantEnd(nil)
		if l := n.log.Lines("session ended"); len(l) != 2 {
			t.Errorf("log: %q", l)
		}
	})
}

// The final Login Response to a joining connection carries the session's window. Those before it carry numbers
// that change nothing in the session of the initiator, whatever CmdSN comes.
func TestJoiningLoginTellsWindow(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(2))
		a := n.lead()
		for range 5 {
			a.wantStatus(a.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
		}
		b := n.connect(func(tc *testConn) { tc.tsih, tc.cid, tc.CmdSN = a.tsih, 1, a.CmdSN })
		b.writeLogin(b.loginRequest(false, 1, 0), names...)
		b.wantLogin(pdu.LoginSuccess)
		if !pdu.Before(b.expCmdSN, a.expCmdSN-127) || b.maxCmdSN != b.expCmdSN-1 {
			t.Errorf("ExpCmdSN %d, MaxCmdSN %d; the session has %d and %d", b.expCmdSN, b.maxCmdSN, a.expCmdSN, a.maxCmdSN)
		}
		a.ping() // the session has lost nothing
		b.writeLogin(b.loginRequest(true, 1, 3), joiningKeys...)
		b.wantLogin(pdu.LoginSuccess)
		if b.expCmdSN != a.CmdSN || b.maxCmdSN != a.CmdSN+127 {
			t.Errorf("ExpCmdSN %d, MaxCmdSN %d; the session expects %d", b.expCmdSN, b.maxCmdSN, a.CmdSN)
		}
		b.logout()
		a.wantEnd(nil)
	})
}

// ISCSI-6.3.4-1, ISCSI-6.3.4-2, ISCSI-6.3.4-3: a login with the TSIH and CID of a
// connection replaces that one. The session continues; the tasks of the old
// connection do not.
func TestConnectionReinstatement(t *testing.T) {
	bubble(t, "one of two", func(t *testing.T) {
		n := newTestNode(t, several(2))
		a := n.lead()
		b := a.join(1)
		b.m.holdGets = true
		survives := b.on(a).command(writeF, 4096, cdb.Write10(0, 8), nil)
		a.on(b).m.holdGets = true
		a.command(writeF, 4096, cdb.Write10(8, 8), nil)
		testkit.Eventually(n.tb, "GetData", func() bool { return a.m.getting() == 1 && b.m.getting() == 1 })
		c := a.joinAs(a.cid)
		c.ITT = 0x9000
		c.wantLogin(pdu.LoginSuccess)
		a.wantEnd(errReinstated)
		c.clearedByTransport()
		if a.next(0) != nil {
			t.Error("a response of the old connection")
		}
		b.on(c).m.releaseGets()
		b.wantStatus(survives, 0)
		b.logout()
		c.wantEnd(nil)
	})
	bubble(t, "the only one", func(t *testing.T) {
		n := newTestNode(t)
		a := n.connect().login()
		a.m.holdGets = true
		a.command(writeF, 4096, cdb.Write10(8, 8), nil)
		a.wantGets(1)
		c := a.joinAs(a.cid)
		c.wantLogin(pdu.LoginSuccess)
		a.wantEnd(errReinstated)
		c.clearedByTransport() // and no more: the nexus is the same
		c.logout()
		if l := n.log.Lines("session ended"); len(l) != 1 {
			t.Errorf("log: %q", l)
		}
	})
	bubble(t, "whose tasks do not end", func(t *testing.T) {
		n := newTestNode(t, several(2), func(o *Options) { o.ReinstatementWait = 50 * time.Millisecond })
		a := n.lead()
		b := a.join(1)
		gate := n.store.Shut()
		b.on(a).command(readF, 4096, cdb.Read10(0, 8), nil)
		<-gate.Entered
		c := b.joinAs(1)
		c.wantRefused(pdu.LoginUnavailable)
		gate.Open()
		b.wantEnd(errReinstated)
		a.on(b).clearedByTransport()
		a.logout()
	})
	// A login that is itself replaced while it waits leaves its wait to who replaces it.
	bubble(t, "twice, whose tasks do not end", func(t *testing.T) {
		n := newTestNode(t, several(2))
		a := n.lead()
		b := a.join(1)
		gate := n.store.Shut()
		b.on(a).command(writeF, 4096, cdb.Write10(0, 8), pattern(4096, 1))
		<-gate.Entered
		c := b.joinAs(1)
		testkit.Eventually(n.tb, "the old connection ends", b.m.isClosed)
		d := b.joinAs(1)
		if err := c.wait(); err == nil {
			t.Error("a login that was replaced has succeeded")
		}
		d.wantNothing()
		gate.Open()
		d.wantLogin(pdu.LoginSuccess)
		b.wantEnd(errReinstated)
		d.CmdSN = b.CmdSN
		d.clearedByTransport()
		d.logout()
		a.wantEnd(nil)
	})
}

// ISCSI-6.3.5-1, ISCSI-E-2: a session reinstatement ends all connections of the
// old session, and nothing of it is left.
func TestReinstatementOfSeveralConnections(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4))
		a := n.lead()
		b := a.join(1)
		gate := n.store.Shut()
		b.on(a).command(readF, 4096, cdb.Read10(0, 8), nil)
		<-gate.Entered
		c := n.connect(func(tc *testConn) { tc.CmdSN = 77 })
		c.writeLogin(c.loginRequest(true, 1, 3), append(slices.Clone(names), leadingKeys...)...)
		c.wantNothing()
		gate.Open()
		c.loggedIn()
		a.wantEnd(errReinstated)
		b.wantEnd(errReinstated)
		if c.tsih == a.tsih || n.Stats().Sessions != 1 {
			t.Errorf("TSIH %d, %+v", c.tsih, n.Stats())
		}
		c.logout()
	})
}

// All connections of a session are asked to log out when the node is emptied, and are told when they are dropped.
func TestShutdownOfSeveralConnections(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4))
		a := n.lead()
		b := a.join(1)
		down := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			if left, err := n.Empty(ctx, ""); left != 1 || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%d sessions are left, %v", left, err)
			}
			down <- n.Shutdown(context.Background())
		}()
		for _, tc := range []*testConn{a, b} {
			if p := tc.want(pdu.AsyncMessage); p.h.AsyncEvent() != pdu.AsyncLogoutRequest {
				t.Errorf("%x", []byte(p.h))
			}
		}
		a.wantLogout(a.logoutOf(pdu.LogoutCloseConnection, a.cid), pdu.LogoutSuccess)
		a.close()
		a.wantEnd(nil)
		if p := b.want(pdu.AsyncMessage); p.h.AsyncEvent() != pdu.AsyncConnectionDropped {
			t.Errorf("%x", []byte(p.h))
		}
		b.close()
		b.wantEnd(errShutdown)
		if err := <-down; err != nil {
			t.Error(err)
		}
	})
}

// PREEMPT AND ABORT, seen from the session that it hits, and resets of other
// sessions reach all connections.
func TestAbortOfSeveralConnections(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4))
		a := n.lead()
		b := a.join(1)
		other := n.connect(func(tc *testConn) { tc.isid[5]++ }).login()
		gate := n.store.Shut()
		var reads []pdu.BHS
		for _, tc := range []*testConn{a, b} {
			tc.on(map[*testConn]*testConn{a: b, b: a}[tc])
			reads = append(reads, tc.command(readF, 4096, cdb.Read10(0, 8), nil))
			<-gate.Entered
		}
		f := other.tmf(pdu.LogicalUnitReset, [8]byte{}, pdu.ReservedTag, 0)
		a.wantNothing()
		b.wantNothing()
		gate.Open()
		a.wantAborted(reads[0], 4096)
		b.wantAborted(reads[1], 4096)
		other.wantTMF(f, pdu.FunctionComplete)
		a.wantSense(a.on(b).command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 6, 0x29, 0x03)
		b.on(a).logout()
		a.wantEnd(nil)
		other.logout()
	})
}
