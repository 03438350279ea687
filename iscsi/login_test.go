package iscsi

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iscsi/vectors"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// wantRefused takes a refusal and the end of the connection: ISCSI-7.12-1,
// ISCSI-11.13-4.
func (tc *testConn) wantRefused(status pdu.LoginStatus) {
	tc.tb.Helper()
	r, _ := tc.wantLogin(status)
	if r.Transit || r.TSIH != 0 {
		tc.tb.Fatalf("refusal %+v", r)
	}
	tc.close()
	if err := tc.wait(); err == nil {
		tc.tb.Fatal("Serve returned nil after a refusal")
	}
	if s := tc.Stats(); s.LoginsRefused == 0 {
		tc.tb.Fatalf("%+v", s)
	}
}

// without returns pairs without those of the given keys.
var without = vectors.Without

// The target answers the offers of Linux, in its first and only request, with the final
// response.
func TestLoginOfLinux(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect()
		tc.CmdSN = 0x1234
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
		p := tc.want(pdu.LoginResp) // ISCSI-11.13-2: want checks StatSN from here on
		r := pdu.ParseLoginResponse(p.h)
		// ISCSI-11.13-1 (TSIH), ISCSI-11.12-3 (ExpCmdSN)
		if !r.Transit || r.CSG != 1 || r.NSG != 3 || r.TSIH == 0 || r.ExpCmdSN != 0x1234 || r.MaxCmdSN != 0x1234+127 {
			t.Errorf("%+v", r)
		}
		answers := strings.Split(strings.TrimSuffix(string(p.data), "\x00"), "\x00")
		// ISCSI-6.3.1-3 (the tag), ISCSI-13.6-1 (the alias), ISER-5.1-3 and ISER-5.1-7 (RDMAExtensions)
		for _, want := range []string{"TargetPortalGroupTag=1", "TargetAlias=store", "RDMAExtensions=Yes",
			"InitialR2T=Yes", "ImmediateData=Yes",
			"ErrorRecoveryLevel=0", "MaxConnections=1", "TargetRecvDataSegmentLength=8192"} {
			if !slices.Contains(answers, want) {
				t.Errorf("no %s in %q", want, answers)
			}
		}
		if tc.m.full != 128+immediateSlots+targetSlots {
			t.Errorf("EnterFullFeature with %d tasks", tc.m.full)
		}
		testkit.Eventually(n.tb, "Stats", func() bool {
			s := n.Stats()
			return s.Sessions == 1 && s.Connections == 1 && s.LoginsAccepted == 1
		})
		tc.logout()
		if l := n.log.Lines("msg=login"); len(l) != 1 || !strings.Contains(l[0], "outcome=accepted") ||
			!strings.Contains(l[0], initiatorName) ||
			!strings.Contains(l[0], targetName) || !strings.Contains(l[0], "transport=fake") {
			t.Errorf("log: %q", l)
		}
		if l := n.log.Lines("session ended"); len(l) != 1 || !strings.Contains(l[0], "level=INFO") ||
			!strings.Contains(l[0], "reason=logout") {
			t.Errorf("log: %q", l)
		}
	})
}

// Each refusal has its status and leaves one line in the log.
func TestLoginRefusals(t *testing.T) {
	for _, c := range slices.Concat(vectors.LoginRefusals, vectors.IserLoginRefusals) {
		bubble(t, c.ID, func(t *testing.T) {
			n := newTestNode(t)
			tc := n.connect()
			r := tc.loginRequest(true, 1, 3)
			if c.Change != nil {
				c.Change(&r)
			}
			tc.writeLogin(r, c.Pairs(names)...)
			tc.wantRefused(c.Status)
			l := n.log.Lines("msg=login")
			if len(l) != 1 || !strings.Contains(l[0], "outcome=refused") ||
				!strings.Contains(l[0], c.Status.String()) || !strings.Contains(l[0], "reason=") {
				t.Errorf("log: %q", l)
			}
		})
	}
}

// ISCSI-6.3-2: the data segment of a Login Request has 8192 bytes at most.
func TestLoginRequestOfTooManyBytesIsRefused(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		tc := newTestNode(t).connect()
		tc.write(tc.loginRequest(false, 1, 0).Append(nil), text(names...))
		tc.wantLogin(pdu.LoginSuccess)
		tc.write(tc.loginRequest(false, 1, 0).Append(nil), make([]byte, 8193))
		tc.wantRefused(pdu.LoginInitiatorError)
	})
}

// ISER-10.1.3.1-3: a target that cannot allocate resources says so.
func TestLoginWithoutResourcesIsRefused(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect(func(tc *testConn) { tc.m.enterErr = errors.New("no memory") })
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
		tc.wantRefused(pdu.LoginOutOfResources)
	})
}

// ISCSI-11.12-2: the CID stays the same during login.
func TestLoginThatChangesItsCIDIsRefused(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		tc := newTestNode(t).connect()
		tc.writeLogin(tc.loginRequest(false, 1, 0), names...)
		tc.wantLogin(pdu.LoginSuccess)
		tc.cid++
		tc.writeLogin(tc.loginRequest(true, 1, 3), linuxKeys...)
		tc.wantRefused(pdu.LoginInitiatorError)
	})
}

// ISCSI-6.3-3: the stages of login go one way.
func TestLoginBackToTheSecurityStageIsRefused(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		tc := newTestNode(t).connect()
		tc.writeLogin(tc.loginRequest(false, 1, 0), names...)
		tc.wantLogin(pdu.LoginSuccess)
		tc.writeLogin(tc.loginRequest(true, 0, 1), "AuthMethod=None")
		tc.wantRefused(pdu.LoginInitiatorError)
	})
}

// ISCSI-4.2.4-2: login takes Login Requests only.
func TestNOPOutDuringLoginIsRefused(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		tc := newTestNode(t).connect()
		tc.writeLogin(tc.loginRequest(false, 1, 0), names...)
		tc.wantLogin(pdu.LoginSuccess)
		tc.write(tc.Request(pdu.NOPOut, pdu.FlagF, true), nil)
		tc.wantRefused(pdu.LoginInvalidRequest)
	})
}

// ISCSI-4.2.4-1: a connection that does not begin with login ends without an answer.
func TestCommandBeforeLoginEndsTheConnection(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		tc := newTestNode(t).connect()
		tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil)
		if err := tc.wait(); err == nil || tc.next(0) != nil {
			t.Errorf("%v, or an answer", err)
		}
	})
}

// A login has a bounded number of requests.
func TestLoginOfTooManyRequestsIsRefused(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		tc := newTestNode(t).connect()
		tc.writeLogin(tc.loginRequest(false, 1, 0), names...)
		tc.wantLogin(pdu.LoginSuccess)
		for range maxLoginRequests - 1 {
			tc.writeLogin(tc.loginRequest(false, 1, 0))
			tc.wantLogin(pdu.LoginSuccess)
		}
		tc.writeLogin(tc.loginRequest(false, 1, 0))
		tc.wantRefused(pdu.LoginInitiatorError)
	})
}

// ISCSI-6.1-5: the text of a login is bounded. Requests with C are answered without data
// (ISCSI-6.2-2).
func TestLoginOfTooMuchTextIsRefused(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		tc := newTestNode(t).connect()
		r := tc.loginRequest(false, 1, 0)
		r.Continue = true
		for range keys.MaxText / 8192 {
			tc.write(r.Append(nil), bytes.Repeat([]byte{'x'}, 8192))
			tc.wantLogin(pdu.LoginSuccess) // ISCSI-6.2-2: without data
		}
		tc.write(r.Append(nil), []byte{'x'})
		tc.wantRefused(pdu.LoginInitiatorError)
	})
}

// Login has one or two stages, of many exchanges.
func TestLoginStages(t *testing.T) {
	bubble(t, "security, operational, full feature", func(t *testing.T) {
		tc := newTestNode(t).connect()
		tc.writeLogin(tc.loginRequest(true, 0, 1), append(slices.Clone(names), "AuthMethod=CHAP,None")...)
		r, answers := tc.wantLogin(pdu.LoginSuccess)
		// ISCSI-6.3-5: NSG is not beyond the one asked for
		if !r.Transit || r.CSG != 0 || r.NSG != 1 || r.TSIH != 0 || !slices.Contains(answers, "AuthMethod=None") ||
			!slices.Contains(answers, "TargetPortalGroupTag=1") {
			t.Fatalf("%+v %q", r, answers)
		}
		for _, k := range linuxKeys { // ISCSI-6.2-12: one key in each request
			tc.writeLogin(tc.loginRequest(false, 1, 0), k)
			r, answers := tc.wantLogin(pdu.LoginSuccess)
			// ISCSI-6.3-8: T and TSIH only in the final answer
			if r.Transit || r.TSIH != 0 || strings.Contains(strings.Join(answers, ","), "TargetPortalGroupTag") {
				t.Fatalf("%+v %q", r, answers)
			}
		}
		tc.writeLogin(tc.loginRequest(true, 1, 3))
		tc.loggedIn().logout()
	})
	bubble(t, "ISCSI-9.2-2 only CHAP offered", func(t *testing.T) {
		tc := newTestNode(t).connect()
		tc.writeLogin(tc.loginRequest(true, 0, 1), append(slices.Clone(names), "AuthMethod=CHAP")...)
		tc.wantRefused(pdu.LoginAuthentication)
	})
	bubble(t, "ISCSI-6.3.2-3 security to full feature", func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect(func(tc *testConn) { tc.m.rdma = false })
		tc.writeLogin(tc.loginRequest(true, 0, 3), append(slices.Clone(names), "AuthMethod=None")...)
		tc.loggedIn().logout()
	})
	bubble(t, "ISCSI-6.1-2 pairs split at every octet", func(t *testing.T) {
		tc := newTestNode(t).connect()
		all := text(append(slices.Clone(names), linuxKeys...)...)
		r := tc.loginRequest(false, 1, 0)
		r.Continue = true
		for len(all) > 60 {
			tc.write(r.Append(nil), all[:7])
			if p := tc.want(pdu.LoginResp); len(p.data) != 0 { // ISCSI-6.2-2
				t.Fatalf("answer %q to a request with C=1", p.data)
			}
			all = all[7:]
		}
		tc.write(tc.loginRequest(true, 1, 3).Append(nil), all)
		tc.loggedIn().logout()
	})
	bubble(t, "ISCSI-11.13-5 long answer", func(t *testing.T) {
		tc := newTestNode(t).connect()
		var many []string
		for i := range 700 {
			many = append(many, "X"+strconv.Itoa(i)+"=1")
		}
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(append(slices.Clone(names), linuxKeys...), many[:350]...)...)
		var got []byte
		for {
			p := tc.want(pdu.LoginResp)
			r := pdu.ParseLoginResponse(p.h)
			got = append(got, p.data...)
			if len(p.data) > loginDataLength-1 || r.Continue && r.Transit {
				t.Fatalf("%+v, %d bytes", r, len(p.data))
			}
			if !r.Continue {
				tc.tsih = r.TSIH
				break
			}
			tc.write(tc.loginRequest(true, 1, 3).Append(nil), nil)
		}
		if c := strings.Count(string(got), "=NotUnderstood\x00"); c != 350 { // ISCSI-6.2-6
			t.Errorf("%d keys not understood", c)
		}
		tc.ping()
		tc.logout()
	})
}

// ISCSI-6.3.5-1, ISCSI-4.4.3-1: a login with the key of a session and TSIH 0
// ends the old one before the final response, with its tasks.
func TestSessionReinstatement(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		old := n.connect().login()
		old.m.holdGets = true
		old.command(0xa0, 4096, cdb.Write10(0, 8), nil)
		old.wantGets(1)

		tc := n.connect().login()
		if err := old.wait(); !errors.Is(err, errReinstated) {
			t.Errorf("old session ended with %v", err)
		}
		if old.next(0) != nil {
			t.Error("response of a task of the old session")
		}
		if tc.tsih == old.tsih {
			t.Errorf("both have TSIH %d", tc.tsih)
		}
		if s := n.Stats(); s.Sessions != 1 {
			t.Errorf("%+v", s)
		}
		// Another initiator port is another session.
		other := n.connect(func(tc *testConn) { tc.isid[5]++ }).login()
		if s := n.Stats(); s.Sessions != 2 || other.tsih == tc.tsih {
			t.Errorf("%+v", s)
		}
		tc.ping()
		tc.logout()
		other.logout()
	})
}

// A closingMover is closed before Close returns.
type closingMover struct {
	*fakeMover
	finish chan struct{}
}

func (m closingMover) Close() error {
	err := m.fakeMover.Close()
	<-m.finish
	return err
}

// Serve of a connection does not return, and frees nothing, while the login that takes its place still closes it.
func TestServeWaitsForTheReinstatement(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		finish := make(chan struct{})
		old := n.connect(func(tc *testConn) { tc.dm = closingMover{tc.m, finish} }).login()
		next := n.connect()
		next.writeLogin(next.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
		synctest.Wait()
		if len(old.result) != 0 {
			t.Error("Serve has returned")
		}
		close(finish)
		if err := old.wait(); !errors.Is(err, errReinstated) {
			t.Errorf("Serve returned %v", err)
		}
		next.loggedIn()
	})
}

// A backend that does not return holds up a reinstatement for a bounded time.
func TestReinstatementIsBounded(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.ReinstatementWait = 50 * time.Millisecond })
		old := n.connect().login()
		gate := n.store.Shut()
		old.command(0xc0, 4096, cdb.Read10(0, 8), nil)
		<-gate.Entered
		tc := n.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
		tc.wantRefused(pdu.LoginUnavailable)
		gate.Open()
		if err := old.wait(); !errors.Is(err, errReinstated) {
			t.Error(err)
		}
	})
}

// ISCSI-6.3.1-1, ISCSI-6.3.4-1, ISCSI-6.3.4-3: the rows of the ISID, TSIH, CID
// table with an existing session.
func TestLoginToExistingSession(t *testing.T) {
	begin := func(t *testing.T) (*testNode, *testConn) {
		n := newTestNode(t)
		old := n.connect().login()
		for range 5 {
			old.wantStatus(old.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
		}
		return n, old
	}
	all := append(slices.Clone(names), linuxKeys...)
	leading := without(all, "DefaultTime2Wait", "DefaultTime2Retain", "ErrorRecoveryLevel", "InitialR2T",
		"ImmediateData", "MaxBurstLength",
		"FirstBurstLength", "MaxOutstandingR2T", "MaxConnections", "DataPDUInOrder", "DataSequenceInOrder",
		"RDMAExtensions")

	bubble(t, "other CID", func(t *testing.T) {
		n, old := begin(t)
		tc := n.connect(func(tc *testConn) { tc.tsih, tc.cid = old.tsih, 5 })
		tc.writeLogin(tc.loginRequest(true, 1, 3), leading...)
		tc.wantRefused(pdu.LoginTooManyConnections)
		old.ping() // that has not touched it
	})
	bubble(t, "other TSIH", func(t *testing.T) {
		n, old := begin(t)
		tc := n.connect(func(tc *testConn) { tc.tsih = old.tsih + 1 })
		tc.writeLogin(tc.loginRequest(true, 1, 3), all...)
		tc.wantRefused(pdu.LoginNoSession)
		old.ping()
	})
	bubble(t, "ISCSI-13-1 leading-only key", func(t *testing.T) {
		n, old := begin(t)
		tc := n.connect(func(tc *testConn) { tc.tsih = old.tsih })
		tc.writeLogin(tc.loginRequest(true, 1, 3), all...)
		tc.wantRefused(pdu.LoginInitiatorError)
		old.ping()
	})
	bubble(t, "same CID", func(t *testing.T) {
		n, old := begin(t)
		tc := n.connect(func(tc *testConn) { tc.tsih, tc.CmdSN = old.tsih, old.CmdSN })
		tc.writeLogin(tc.loginRequest(true, 1, 3), leading...)
		tc.loggedIn()
		if err := old.wait(); !errors.Is(err, errReinstated) {
			t.Error(err)
		}
		if tc.tsih != old.tsih {
			t.Errorf("TSIH %d became %d", old.tsih, tc.tsih)
		}
		tc.logout()
	})
}

// ISCSI-8.1.4-2: silence before and during login ends with the login timeout.
func TestLoginTimeout(t *testing.T) {
	for _, requests := range []int{0, 1} {
		testkit.Bubble(t, func(t *testing.T) {
			n := newTestNode(t)
			start := time.Now()
			tc := n.connect()
			if requests > 0 {
				tc.writeLogin(tc.loginRequest(false, 1, 0), names...)
				tc.wantLogin(pdu.LoginSuccess)
			}
			if err := tc.wait(); err == nil {
				t.Error("no error")
			}
			if d := time.Since(start); d != 15*time.Second {
				t.Errorf("MPA-7.1.2-26: after %v", d)
			}
			if l := n.log.Lines("outcome=refused"); len(l) != 1 {
				t.Errorf("log: %q", l)
			}
		})
	}
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		start := time.Now()
		if err := n.portal.Serve(newFakeMover(), ServeOptions{Accepted: start.Add(-10 * time.Second)}); err == nil {
			t.Error("no error")
		}
		if d := time.Since(start); d != 5*time.Second {
			t.Errorf("after %v of the 5 s that were left", d)
		}
	})
	// An initiator that takes no answer has no more time.
	for _, pairs := range [][]string{names, {"InitiatorName=" + initiatorName,
		"TargetName=iqn.2026-11.io.example:none"}} {
		testkit.Bubble(t, func(t *testing.T) {
			n := newTestNode(t)
			start := time.Now()
			tc := n.connect(func(tc *testConn) { tc.m.holdFlush = true })
			tc.writeLogin(tc.loginRequest(false, 1, 0), pairs...)
			time.Sleep(20 * time.Second)
			synctest.Wait()
			if !tc.m.isClosed() {
				t.Errorf("still there after %v", time.Since(start))
				tc.m.Close()
			}
			if err := tc.wait(); err == nil {
				t.Error("no error")
			}
			if l := n.log.Lines("outcome=refused"); len(l) != 1 {
				t.Errorf("log: %q", l)
			}
		})
	}
}

// A connection that is closed before a PDU comes leaves a line, too.
func TestNoLogin(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect()
		tc.close()
		if err := tc.wait(); !errors.Is(err, io.EOF) {
			t.Error(err)
		}
		if l := n.log.Lines(`stage="before login"`); len(l) != 1 {
			t.Errorf("log: %q", l)
		}
	})
}

// ISCSI-7.4-2, ISCSI-7.4-3: unnamed discovery sessions replace each other on
// one portal; a named one obeys the rule for normal sessions.
func TestDiscoveryReinstatement(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		first := n.connect().discover()
		normal := n.connect().login() // same ISID, but no discovery
		second := n.connect().discover()
		if err := first.wait(); !errors.Is(err, errReinstated) {
			t.Error(err)
		}
		named := n.connect(func(tc *testConn) { tc.isid[5] = 9 })
		named.writeLogin(named.loginRequest(true, 1, 3), "InitiatorName="+initiatorName, "SessionType=Discovery",
			"TargetName="+targetName)
		named.wantLogin(pdu.LoginSuccess)
		replacing := n.connect(func(tc *testConn) { tc.isid[5] = 9 }).login()
		if err := named.wait(); !errors.Is(err, errReinstated) {
			t.Error(err)
		}
		replacing.logout()
		normal.logout()
		second.logout()
	})
}

// Names are compared after preparation: ISCSI-4.2.7-3.
func TestNamesArePrepared(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3),
			append([]string{"InitiatorName=" + strings.ToUpper(initiatorName), "TargetName=" +
				strings.ToUpper(targetName)}, linuxKeys...)...)
		tc.loggedIn().logout()
		if err := n.AddTarget(TargetConfig{Name: strings.ToUpper(targetName), LUNs: n.inv}); err == nil {
			t.Error("second target of the same name")
		}
		if err := n.AddTarget(TargetConfig{Name: "store", LUNs: n.inv}); err == nil {
			t.Error("name that is none")
		}
		if err := n.AddTarget(TargetConfig{Name: targetName + "x", Initiators: security.Patterns{}}); err == nil {
			t.Error("target without LUNs")
		}
	})
}

// TSIHs wrap around zero and skip what is in use: ISCSI-11.13-1.
func TestTSIH(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := NewNode(Options{})
		n.mu.Lock() // which newTSIH needs
		defer n.mu.Unlock()
		n.lastTSIH = 0xfffe
		n.sessions[0xffff] = &session{}
		n.sessions[1] = &session{}
		if got := n.newTSIH(); got != 2 {
			t.Errorf("TSIH %d", got)
		}
		for i := range 1 << 16 {
			n.sessions[uint16(i)] = &session{}
		}
		if got := n.newTSIH(); got != 0 {
			t.Errorf("TSIH %d", got)
		}
	})
}
