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

// stateOf returns the state of the connection that was logged in with that CID.
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

// A stateEnv is the session whose connection a changes its state.
type stateEnv struct {
	*testNode
	a, b *testConn // of one session; it is about a
	open func()    // lets the task of a end
}

// ask asks the initiator to log out.
func (e *stateEnv) ask() {
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

// logout sends the Logout Request of a.
func (e *stateEnv) logout() { e.a.logoutOf(pdu.LogoutCloseConnection, e.a.cid) }

// end lets the task of a end.
func (e *stateEnv) end() { e.open() }

// endLogout lets the task of a end, and with it the logout.
func (e *stateEnv) endLogout() {
	e.open()
	e.a.want(pdu.LogoutResp)
	e.a.close()
}

// fail drops a.
func (e *stateEnv) fail() { e.a.close() }

// byOther logs connection a, or its session, out by way of b.
func byOther(reason byte) func(e *stateEnv) {
	return func(e *stateEnv) {
		e.open()
		e.b.on(e.a).logoutOf(reason, e.a.cid)
	}
}

// timeout lets the time for recovery pass.
func (e *stateEnv) timeout() {
	e.open()
	e.mu.Lock()
	s := e.sessions[e.a.tsih]
	e.mu.Unlock()
	s.shared.mu.Lock()
	l := s.lost[0]
	s.shared.mu.Unlock()
	s.expire(l)
}

// ISCSI-8.1.4-1, ISCSI-8.2-1: the transitions of a connection of the target. T3, T4,
// T6 and T7 are in TestLoginTimeout and TestLoginRefused.
func TestConnectionStates(t *testing.T) {
	type step struct {
		name  string
		event func(e *stateEnv)
		after connState
	}
	for _, c := range []struct {
		name  string
		steps []step
	}{
		{"session closed elsewhere", []step{{"T8", byOther(pdu.LogoutCloseSession), free}}},
		{"connection closed elsewhere", []step{{"T8", byOther(pdu.LogoutCloseConnection), free}}},
		{"logout", []step{{"T9", (*stateEnv).logout, inLogout}, {"T13", (*stateEnv).endLogout, free}}},
		{"logout on request", []step{{"T11", (*stateEnv).ask, loggedIn}, {"T10", (*stateEnv).logout, inLogout},
			{"T13", (*stateEnv).endLogout, free}}},
		{"requested twice", []step{{"T11", (*stateEnv).ask, loggedIn}, {"T12", (*stateEnv).ask, loggedIn},
			{"T18", byOther(pdu.LogoutCloseSession), free}}},
		{"failure, then the time is over", []step{{"T15", (*stateEnv).fail, cleanupWait},
			{"M1", (*stateEnv).timeout, free}}},
		{"failure after a request", []step{{"T11", (*stateEnv).ask, loggedIn}, {"T16", (*stateEnv).fail, cleanupWait},
			{"M2, M4", byOther(pdu.LogoutForRecovery), free}}},
		{"failure, then closed elsewhere", []step{{"T15", (*stateEnv).fail, cleanupWait},
			{"M2, M4", byOther(pdu.LogoutCloseConnection), free}}},
		{"failure, then the session closes", []step{{"T15", (*stateEnv).fail, cleanupWait},
			{"M1", byOther(pdu.LogoutCloseSession), free}}},
		// The logout has gone so far that nothing is left to clean up: its tasks end
		// with it.
		{"failure during logout", []step{{"T9", (*stateEnv).logout, inLogout},
			{"T17, M4", func(e *stateEnv) { e.fail(); e.end() }, free}}},
	} {
		bubble(t, c.name, func(t *testing.T) {
			n := newTestNode(t, recovering)
			a := n.leadRecovering()
			e := &stateEnv{testNode: n, a: a, b: a.join(1)}
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
				testkit.Eventually(n.tb, s.name+" to "+string(s.after),
					func() bool { return n.stateOf(a.tsih, a.cid) == s.after })
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
