package iscsi

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A connState is a state of RFC 7143, section 8.1.1. LOGOUT_REQUESTED is LOGGED_IN
// for us: whether the initiator has been asked changes nothing.
type connState string

const (
	free        connState = "S1 FREE"
	loggedIn    connState = "S5 LOGGED_IN"
	inLogout    connState = "S6 IN_LOGOUT"
	cleanupWait connState = "S8 CLEANUP_WAIT"
)

// stateOf is the state of the connection that was logged in with that CID.
func (n *testNode) stateOf(tsih, cid uint16) connState {
	n.mu.Lock()
	s := n.sessions[tsih]
	n.mu.Unlock()
	if s == nil {
		return free
	}
	s.shared.mu.Lock()
	defer s.shared.mu.Unlock()
	for _, l := range s.lost {
		if l.conn.cid == cid && !l.removed {
			return cleanupWait
		}
	}
	for _, c := range s.conns {
		switch {
		case c.cid != cid:
		case c.phase == phaseFullFeature:
			return loggedIn
		case c.phase == phaseLogout:
			return inLogout
		}
	}
	return free
}

// ISCSI-8.1.4-1, ISCSI-8.2-1: the transitions of a connection of the target. T3, T4,
// T6 and T7 are in TestLoginTimeout and TestLoginRefused.
func TestConnectionStates(t *testing.T) {
	type env struct {
		*testNode
		a, b *testConn // of one session; it is about a
		open func()    // lets the task of a end
	}
	ask := func(e *env) {
		e.mu.Lock()
		s := e.sessions[e.a.tsih]
		e.mu.Unlock()
		s.shared.mu.Lock()
		i := slices.IndexFunc(s.conns, func(c *conn) bool { return c.cid == e.a.cid })
		c := s.conns[i]
		s.shared.mu.Unlock()
		if !c.askLogout(time.Second) {
			e.tb.Error("the initiator cannot be asked")
		}
		if p := e.a.want(pdu.AsyncMessage); p.h.AsyncEvent() != pdu.AsyncLogoutRequest {
			e.tb.Errorf("%x", []byte(p.h))
		}
		e.a.ping() // which acknowledges it
	}
	logout := func(e *env) { e.a.logoutOf(pdu.LogoutCloseConnection, e.a.cid) }
	end := func(e *env) { e.open() }
	endLogout := func(e *env) {
		e.open()
		e.a.want(pdu.LogoutResp)
		e.a.close()
	}
	fail := func(e *env) { e.a.close() }
	other := func(reason byte) func(e *env) {
		return func(e *env) {
			e.open()
			e.b.on(e.a).logoutOf(reason, e.a.cid)
		}
	}
	timeout := func(e *env) {
		e.open()
		e.mu.Lock()
		s := e.sessions[e.a.tsih]
		e.mu.Unlock()
		s.shared.mu.Lock()
		l := s.lost[0]
		s.shared.mu.Unlock()
		s.expire(l)
	}
	type step struct {
		name  string
		event func(e *env)
		after connState
	}
	for _, c := range []struct {
		name  string
		steps []step
	}{
		{"session closed elsewhere", []step{{"T8", other(pdu.LogoutCloseSession), free}}},
		{"connection closed elsewhere", []step{{"T8", other(pdu.LogoutCloseConnection), free}}},
		{"logout", []step{{"T9", logout, inLogout}, {"T13", endLogout, free}}},
		{"logout on request", []step{{"T11", ask, loggedIn}, {"T10", logout, inLogout}, {"T13", endLogout, free}}},
		{"requested twice", []step{{"T11", ask, loggedIn}, {"T12", ask, loggedIn}, {"T18", other(pdu.LogoutCloseSession), free}}},
		{"failure, then the time is over", []step{{"T15", fail, cleanupWait}, {"M1", timeout, free}}},
		{"failure after a request", []step{{"T11", ask, loggedIn}, {"T16", fail, cleanupWait}, {"M2, M4", other(pdu.LogoutForRecovery), free}}},
		{"failure, then closed elsewhere", []step{{"T15", fail, cleanupWait}, {"M2, M4", other(pdu.LogoutCloseConnection), free}}},
		{"failure, then the session closes", []step{{"T15", fail, cleanupWait}, {"M1", other(pdu.LogoutCloseSession), free}}},
		// The logout has gone as far that there is nothing to clean up: its tasks end
		// with it.
		{"failure during logout", []step{{"T9", logout, inLogout}, {"T17, M4", func(e *env) { fail(e); end(e) }, free}}},
	} {
		bubble(t, c.name, func(t *testing.T) {
			n := newTestNode(t, recovering)
			a := n.leadRecovering()
			e := &env{testNode: n, a: a, b: a.join(1)}
			gate := n.store.Shut()
			e.open = gate.Open
			defer e.open()
			a.on(e.b).command(readF, 4096, cdb.Read10(0, 8), nil)
			<-gate.Entered
			if got := n.stateOf(a.tsih, a.cid); got != loggedIn { // T5
				t.Fatalf("%s after login", got)
			}
			for _, s := range c.steps {
				s.event(e)
				testkit.Eventually(n.tb, s.name+" to "+string(s.after), func() bool { return n.stateOf(a.tsih, a.cid) == s.after })
			}
			e.open()
			e.a.close()
			e.b.close()
			if err := n.Shutdown(context.Background()); err != nil {
				t.Error(err)
			}
		})
	}
}
