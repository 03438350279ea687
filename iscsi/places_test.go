package iscsi

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// within makes a node share limits that f changes.
func within(f func(*limits.Set)) func(*Options) {
	return func(o *Options) {
		o.Shared = limits.New()
		f(o.Shared)
	}
}

// port makes the ith initiator port.
func port(i int) func(*testConn) {
	return func(tc *testConn) { tc.isid[4], tc.isid[5] = byte(i>>8), byte(i) }
}

// sessionsOf logs in with so many initiator ports.
func (n *testNode) sessionsOf(count int) (list []*testConn) {
	n.tb.Helper()
	for i := range count {
		list = append(list, n.connect(port(i)).login())
	}
	return list
}

func logoutAll(list []*testConn) {
	for _, tc := range list {
		tc.logout()
	}
}

// as logs in under another name.
func (tc *testConn) as(host string) *testConn {
	names := []string{"InitiatorName=iqn.1993-08.org.debian:01:" + host, "TargetName=" + targetName, "SessionType=Normal"}
	tc.writeLogin(tc.loginRequest(true, 1, 3), append(names, linuxKeys...)...)
	return tc
}

func (tc *testConn) works() {
	tc.tb.Helper()
	tc.wantStatus(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
}

// One initiator name asks for 1,024 sessions. It gets 16. Other initiators log in, sessions work, and
// a login that replaces a session is not refused.
func TestSessionsOfOneNameAreBounded(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		before := n.connect().as("neighbour").loggedIn()
		greedy := n.sessionsOf(16)
		for i := 16; i < 1024; i++ {
			tc := n.connect(port(i))
			tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
			tc.wantRefused(pdu.LoginOutOfResources)
		}
		if got := n.log.Lines("limits.sessions_per_initiator is 16"); len(got) != 1024-16 {
			t.Errorf("%d lines of the log name the limit", len(got))
		}
		for i := range 20 {
			n.connect().as(fmt.Sprint("honest", i)).loggedIn().logout()
		}
		before.works()
		for _, tc := range greedy { // the pings of the refusals
			tc.want(pdu.NOPIn)
		}
		again := n.connect(port(7)).login()
		greedy[7].wantEnd(errReinstated)
		greedy[7] = again
		greedy[3].logout()
		greedy[3] = n.connect(port(99)).login()
		logoutAll(append(greedy, before))
		l := n.shared
		if l.Sessions.Used() != 0 || l.Reserved.Used() != 0 || l.PerUser.Used() != 0 || l.Sessions.State().Bites != 1024-16 {
			t.Errorf("sessions %+v", l.Sessions.State())
		}
	})
}

// An initiator that crashed comes back with new ISIDs. At its limit the session that does not answer
// yields, and those that answer stay.
func TestSessionThatDoesNotAnswerGivesWay(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, within(func(s *limits.Set) { s.Sessions.SetMax(3) }))
		list := n.sessionsOf(3)
		refused := func() {
			t.Helper()
			tc := n.connect(port(50))
			tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
			tc.wantRefused(pdu.LoginOutOfResources)
		}
		refused()
		for i, tc := range list {
			p := tc.want(pdu.NOPIn)
			if i == 1 {
				continue // its host has crashed
			}
			h := tc.Request(pdu.NOPOut, pdu.FlagF, true)
			h.SetITT(pdu.ReservedTag)
			h.SetTTT(p.h.TTT())
			tc.write(h, nil)
		}
		time.Sleep(answerWait / 2)
		refused()
		time.Sleep(answerWait / 2)
		back := n.connect(port(51)).login()
		list[1].wantEnd(errUnanswered)
		for _, tc := range []*testConn{list[0], list[2]} {
			synctest.Wait() // the ping of the last login has left
			for tc.m.waiting() > 0 {
				tc.want(pdu.NOPIn) // of the last login
			}
			tc.works()
			tc.logout()
		}
		back.logout()
	})
}

// A CHAP user that is bound to no name has a bound of its own. Another user's name has its places
// whatever sessions the first one opens under that name.
func TestSessionsOfAUserAreBounded(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newCHAPNode(t, chap(t, ""), within(func(s *limits.Set) { s.PerUser.SetMax(4); s.Sessions.SetMax(3) }))
		begin := func(user, host string, i int) *testConn {
			p := n.connect(port(i)).chapPeer()
			p.first = []string{"InitiatorName=iqn.1993-08.org.debian:01:" + host, "TargetName=" + targetName}
			p.authenticate("AuthMethod=CHAP", "CHAP_A=5", "T CHAP_N="+user+" CHAP_R=%"+user)
			p.writeLogin(p.loginRequest(true, 1, 3), linuxKeys...)
			return p.testConn
		}
		list := []*testConn{begin("bob", "host", 0).loggedIn(), begin("bob", "host", 1).loggedIn(), begin("bob", "host", 2).loggedIn()}
		begin("bob", "host", 3).wantRefused(pdu.LoginOutOfResources)
		list = append(list, begin("bob", "y", 4).loggedIn())
		begin("bob", "z", 5).wantRefused(pdu.LoginOutOfResources)
		if got := n.log.Lines("limits.sessions_per_user is 4"); len(got) != 1 {
			t.Errorf("log %q", got)
		}
		for _, tc := range list[:3] { // the pings of the first refusal
			tc.want(pdu.NOPIn)
		}
		logoutAll(append(list, begin("alice", "host", 9).loggedIn()))
	})
}

// Discovery sessions of one address yield to each other. Those of another address, and sessions,
// stay.
func TestDiscoveryIsBoundedByAddress(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, within(func(s *limits.Set) { s.Discoveries.SetMax(3) }))
		session := n.connect(port(100)).login()
		other := n.connect(port(101), func(tc *testConn) { tc.m.host = 1 }).discover()
		var list []*testConn
		for i := range 5 {
			list = append(list, n.connect(port(i)).discover())
			time.Sleep(time.Second)
		}
		list[0].wantEnd(errRediscovery)
		list[1].wantEnd(errRediscovery)
		h := other.Request(pdu.TextReq, pdu.FlagF, false)
		h.SetTTT(pdu.ReservedTag)
		other.write(h, text("SendTargets=All"))
		other.want(pdu.TextResp)
		session.works()
		logoutAll(append(list[2:], other, session))
		if l := n.shared.Discoveries.State(); l.Used != 0 || l.Bites != 2 {
			t.Errorf("%+v", l)
		}
	})
}

// One name with sessions at many targets, or with many connections, does not get the places that are
// kept for others. What it has stays, and can be replaced.
func TestPlacesAreKeptForNamesWithoutSessions(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, several(4), within(func(s *limits.Set) { s.Connections.SetMax(8); s.Reserved.SetMax(4) }))
		lead := n.lead(port(9))
		others := []*testConn{lead.join(1), lead.join(2)}
		list := append(n.sessionsOf(1), others...)
		lead.joinAs(3).wantRefused(pdu.LoginOutOfResources)
		replaces := lead.join(2)
		others[1].wantEnd(errReinstated)
		list[2] = replaces
		for i := range 4 {
			list = append(list, n.connect().as(fmt.Sprint("host", i)).loggedIn())
		}
		if got := n.log.Lines("limits.reserved_connections is 4"); len(got) != 1 {
			t.Errorf("log %q", got)
		}
		for _, tc := range list[3:] {
			tc.works()
			tc.logout()
		}
		list[0].logout()
		replaces.logoutOf(pdu.LogoutCloseSession, 0)
		for _, tc := range []*testConn{lead, others[0]} {
			if err := tc.wait(); err != nil && !errors.Is(err, errLoggedOut) {
				t.Error(err)
			}
		}
		replaces.want(pdu.LogoutResp)
		replaces.close()
		if err := replaces.wait(); err != nil {
			t.Error(err)
		}
		if used := n.shared.Reserved.Used(); used != 0 {
			t.Errorf("%d reserved places are in use", used)
		}
	})
}
