package iscsi

import (
	"errors"
	"slices"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

var errLoggedOut = errors.New("logged out on another connection")

// runLogout serves a Logout Request (RFC 7143, section 11.14). It first stops all tasks that the
// logout covers. Then the initiator has LogoutWait to close the connection.
func (t *Task) runLogout() {
	c := t.conn
	reason := t.header().LogoutReason()
	other := t.header().CID() != c.cid
	switch {
	case reason > pdu.LogoutForRecovery, c.sess.discovery && reason != pdu.LogoutCloseSession:
		t.rejectRequest(pdu.RejectProtocolError)
	case reason == pdu.LogoutForRecovery && !c.recovers():
		t.respondLogout(pdu.LogoutRecoveryNotSupported)
	case reason == pdu.LogoutForRecovery && other:
		t.removeOther()
	case reason == pdu.LogoutForRecovery:
		t.removeOwn()
	case reason == pdu.LogoutCloseConnection && other:
		t.logoutOther()
	default:
		t.logoutOwn(reason == pdu.LogoutCloseSession)
	}
}

// logoutOwn closes the connection of the Logout Request, or its whole session.
func (t *Task) logoutOwn(session bool) {
	c := t.conn
	c.mu.Lock()
	if c.phase != phaseFullFeature { // another logout was first
		c.drop(t)
		c.mu.Unlock()
		return
	}
	leaving := []*conn{c}
	if session {
		leaving = c.sess.closeLocked()
	}
	for _, o := range leaving {
		if o.phase == phaseFullFeature {
			o.enterPhase(phaseLogout)
		}
	}
	covered := func(u *Task) bool { return u != t && (u.conn == c || session) }
	c.shared.terminate(covered)
	c.shared.callOff(covered)
	for c.phase == phaseLogout && c.shared.tasks.any(covered) {
		c.shared.changed.Wait()
	}
	if len(c.sess.conns) == 1 {
		c.sess.dropUnclaimed()
	}
	ends := c.phase == phaseLogout && (session || len(c.sess.conns) == 1 && len(c.sess.lost) == 0)
	if ends {
		c.sess.closed = true // no connection can join: the nexus is about to end
	}
	c.mu.Unlock()
	for _, o := range leaving {
		if o != c {
			o.stop(errLoggedOut)
		}
	}
	if ends && c.sess.nexus != nil { // this is the loss of the nexus: sections 6.3.5 and 6.3.5.1
		c.sess.nexus.Close()
	}
	c.timer.setLast(c.opt.LogoutWait, func() { c.end(nil) })
	t.respondLogout(pdu.LogoutSuccess)
	c.halfClose()
}

// logoutOther closes another connection of the session, the one with the CID of the Logout Request.
func (t *Task) logoutOther() {
	s := t.conn.sess
	o := s.byCID(t.header().CID())
	if o == nil {
		t.respondLogout(pdu.LogoutCIDNotFound)
		return
	}
	o.stop(errLoggedOut)
	s.shared.mu.Lock()
	if i := slices.IndexFunc(s.lost, func(l *lostConn) bool { return l.conn == o }); i >= 0 {
		s.drop(s.lost[i])
	}
	for slices.Contains(s.conns, o) && !t.aborted.Load() {
		s.shared.changed.Wait()
	}
	s.shared.mu.Unlock()
	t.respondLogout(pdu.LogoutSuccess)
}

// respondLogout sends the Logout Response.
func (t *Task) respondLogout(response byte) {
	c := t.conn
	h := t.beginPDU(pdu.LogoutResp, t.header().ITT())
	h.SetResponse(response)
	h.SetTime2Wait(c.params.DefaultTime2Wait)
	h.SetTime2Retain(c.params.DefaultTime2Retain)
	c.respond(t)
}
