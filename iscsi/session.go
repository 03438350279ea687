package iscsi

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/security/limits"
)

// A sessionKey identifies a session (RFC 7143, sections 4.4.3 and 7.4.2): a login with the key of a
// session replaces it.
type sessionKey struct {
	initiator string // normalised
	isid      [6]byte
	target    string // normalised; empty in an unnamed discovery session
	tpgt      uint16
	portal    *Portal // of an unnamed discovery session; else nil
}

// shared is the state that the connections of a session have in common. A connection begins with
// one of its own. A later connection of a session takes that of the session before it enters the
// full feature phase.
type shared struct {
	mu      sync.Mutex
	changed sync.Cond // on mu: a task has ended, the window or a phase has moved
	win     window
	tasks   taskTable
	seq     uint64       // counts tasks as they become ready
	ordered int          // tasks in execution that have the ORDERED attribute
	aborts  uint64       // counts calls of detachLater
	gate    *orderedGate // of the target; nil in a discovery session, which has no commands
	fence   *fence       // nil: TaskReporting=RFC3720; set before any connection is in the full feature phase
	pausing bool         // requests do not begin: see handover.go
}

// newShared makes the state of a session with that many tasks on each connection. Commands share
// one window, so more connections do not bring many more tasks.
func newShared(tasks int) *shared {
	s := &shared{}
	s.changed.L = &s.mu
	s.tasks.init(tasks)
	return s
}

// A sharedLock is the lock of the shared that a connection has at the time. It also guards which
// one that is: the field changes while the old and the new one are locked.
type sharedLock struct{ of atomic.Pointer[shared] }

// Lock takes the lock.
func (l *sharedLock) Lock() {
	for {
		s := l.of.Load()
		s.mu.Lock()
		if s == l.of.Load() {
			return
		}
		s.mu.Unlock()
	}
}

// TryLock takes the lock if it is free.
func (l *sharedLock) TryLock() bool {
	s := l.of.Load()
	if !s.mu.TryLock() {
		return false
	}
	if s != l.of.Load() {
		s.mu.Unlock()
		return false
	}
	return true
}

// Unlock frees the lock.
func (l *sharedLock) Unlock() { l.of.Load().mu.Unlock() }

// join makes s the shared state of c.
//
// Preconditions: s.mu is held, or nothing else uses s; c has no tasks.
func (c *conn) join(s *shared) {
	if old := c.shared; old != nil {
		old.mu.Lock()
		defer old.mu.Unlock()
	}
	c.shared = s
	c.mu.of.Store(s)
}

// A session is an I_T nexus, or a discovery session. It lives as long as one of its connections, or
// as one can be recovered.
type session struct {
	shared    *shared
	node      *Node
	key       sessionKey
	tsih      uint16
	params    Params // what the leading login agreed on
	discovery bool
	target    *target    // nil in an unnamed discovery session
	nexus     *lun.Nexus // nil in a discovery session
	started   time.Time
	from      string        // AddressKey of a discovery session
	done      chan struct{} // closed when the session and all of its tasks have ended

	// Under shared.mu:
	conns    []*conn     // including those in login that have found the session
	lost     []*lostConn // connections that can be recovered, or their tasks
	closed   bool        // no connection can join
	finished bool
	failed   bool // no connection is left, but some may come back
}

// A loginError refuses a login.
type loginError struct {
	status pdu.LoginStatus
	err    error
}

func (e *loginError) Error() string { return e.err.Error() }
func (e *loginError) Unwrap() error { return e.err }

func refuse(status pdu.LoginStatus, reason string) *loginError {
	return &loginError{status, errors.New(reason)}
}

var errReinstated = errors.New("replaced by a new login of the same initiator port")

// establish finds or makes the session of c, whose login is about to succeed (RFC 7143, section
// 6.3.1):
//
//	ISID       TSIH       CID
//	new        0          any        new session
//	new        not 0      any        020a
//	existing   0          any        session reinstatement
//	existing   existing   new        another connection; 0206 beyond MaxConnections
//	existing   existing   existing   connection reinstatement
//	existing   unknown    any        020a
//
// A reinstatement ends the old session, or the old connection, and waits until its tasks have
// ended. No limit of places is in its way. At a limit a session that does not answer can yield, too.
func (nd *Node) establish(c *conn, key sessionKey, req *pdu.LoginRequest, t *target) *loginError {
	timeout := time.NewTimer(c.opt.ReinstatementWait)
	defer timeout.Stop()
	for replaces := false; ; {
		var old []*conn
		var leaves *session // ends before the new one begins
		var refusal *loginError
		nd.mu.Lock()
		s := nd.find(key)
		switch {
		case nd.stopping.Load():
			refusal = &loginError{pdu.LoginUnavailable, errShutdown}
		case nd.pausing.Load():
			refusal = refuse(pdu.LoginUnavailable, "target is being handed over to another process")
		case nd.closing.Load() != nil && !c.params.Discovery: // Empty has begun during the login
			refusal = refuse(pdu.LoginUnavailable, "target is being drained")
		case t != nil && !nd.has(t):
			// The rules that admitted the initiator may not hold any longer.
			refusal = refuse(pdu.LoginUnavailable, "target was changed or removed during login")
		case c.recovers() && !c.params.Discovery && c.waitsTooLong():
			refusal = refuse(pdu.LoginInitiatorError, fmt.Sprintf("DefaultTime2Wait=%d is too long for "+
				"ErrorRecoveryLevel=2: %v", c.params.DefaultTime2Wait, &nd.shared.MaxTime2Wait))
			nd.shared.MaxTime2Wait.Bite(key.initiator)
		case s.refuses(req.TSIH, c.params.CHAPName) != nil:
			refusal = s.refuses(req.TSIH, c.params.CHAPName)
		case req.TSIH != 0:
			old, refusal = s.addConn(c)
		case s != nil:
			leaves, replaces = s, true
		default:
			leaves, refusal = nd.open(c, key, t, replaces)
		}
		nd.mu.Unlock()
		switch {
		case refusal != nil:
			return refusal
		case req.TSIH != 0:
			return s.reinstate(c, old, req, timeout.C)
		case leaves == nil:
			return nil
		}
		leaves.end(leaves.replacedBecause(key))
		if refusal := c.awaitEnd(leaves.done, timeout.C); refusal != nil {
			return refusal
		}
	}
}

// refuses returns why a login with that TSIH, by that CHAP user, neither joins nor replaces s, which has its
// key, or is nil if there is no such session.
func (s *session) refuses(tsih uint16, chapName string) *loginError {
	switch {
	case s != nil && !s.discovery && s.params.CHAPName != chapName:
		// Section 9.2: only the user that opened a session replaces or joins it. A discovery
		// session has nothing to protect.
		return refuse(pdu.LoginAuthentication, "session of this initiator port belongs to another CHAP user")
	case tsih != 0 && (s == nil || s.tsih != tsih):
		return errNoSession
	}
	return nil
}

// replacedBecause returns why s ends for a session with that key.
func (s *session) replacedBecause(key sessionKey) error {
	switch {
	case s.key == key:
		return errReinstated
	case s.discovery:
		return errRediscovery
	}
	return errUnanswered
}

// reinstate ends the old connections with the CID of c, which has joined s.
func (s *session) reinstate(c *conn, old []*conn, req *pdu.LoginRequest, timeout <-chan time.Time) *loginError {
	for _, o := range old {
		o.shut(errReinstated, true)
	}
	for _, o := range old {
		if refusal := c.awaitEnd(o.done, timeout); refusal != nil {
			return refusal
		}
	}
	if len(old) > 0 {
		s.remove(req.CID, req.ExpStatSN)
	}
	return nil
}

var errNoSession = refuse(pdu.LoginNoSession, "TSIH names no session of this initiator port")

// awaitEnd waits until the session or connection that c replaces has ended.
func (c *conn) awaitEnd(done <-chan struct{}, timeout <-chan time.Time) *loginError {
	select {
	case <-done:
		return nil
	case <-timeout:
		return refuse(pdu.LoginUnavailable, "tasks of the session or connection that this login replaces have not ended yet")
	case <-c.ending:
		return &loginError{pdu.LoginUnavailable, fmt.Errorf("connection was closed during reinstatement: %w", c.endedBy(errPeerClosed))}
	}
}

// open makes a session with c as its leading connection, if there is a place for it, or returns the
// session that yields.
//
// Preconditions: nd.mu is held.
func (nd *Node) open(c *conn, key sessionKey, t *target, replaces bool) (leaves *session, refusal *loginError) {
	tsih := nd.newTSIH()
	if tsih == 0 {
		return nil, refuse(pdu.LoginOutOfResources, "all session handles are in use")
	}
	s := &session{shared: c.shared, node: nd, key: key, tsih: tsih, params: c.params, discovery: c.params.Discovery,
		target: t, conns: []*conn{c}, started: time.Now(), done: make(chan struct{})}
	if s.discovery {
		s.from = limits.AddressKey(c.dm.RemoteAddr())
	}
	if leaves, refusal = nd.takePlaces(s, replaces); leaves != nil || refusal != nil {
		return leaves, refusal
	}
	if !s.discovery {
		s.nexus = t.LUNs.NewNexus(lun.Port{InitiatorName: key.initiator, ISID: key.isid, TargetName: t.Name, TPGT: key.tpgt})
		s.nexus.SetProtocolLevel(c.params.ISCSIProtocolLevel)
		if c.dm.RDMA() || c.params.RDMAExtensions {
			s.nexus.SetTransport(lun.ISER)
		}
		s.nexus.OnPreempt(s.abortUnit)
		s.nexus.OnEvent(s.reportEvent)
		s.nexus.SetOthers(s.otherNexus)
	}
	s.shared.mu.Lock() // the connection may be ending
	s.shared.fence = newFence(c.params)
	if t != nil {
		s.shared.gate = t.gate
	}
	s.shared.mu.Unlock()
	nd.sessions[tsih] = s
	c.sess = s
	return nil, nil
}

// addConn makes c a connection of s, with the slots for all commands that the session may have in
// flight. old are the connections with the same CID, which the caller ends: one connection, and
// logins that are waiting for its end. refusal, unless it is nil, says why c cannot join.
//
// Preconditions: nd.mu is held.
func (s *session) addConn(c *conn) (old []*conn, refusal *loginError) {
	invariant.Held(&s.node.mu)
	s.shared.mu.Lock()
	defer s.shared.mu.Unlock()
	live := 0
	for _, o := range s.conns {
		if o.cid == c.cid {
			old = append(old, o)
		} else {
			live++
		}
	}
	switch {
	case s.closed, s.discovery:
		return nil, errNoSession
	case live >= int(s.params.MaxConnections):
		return nil, refuse(pdu.LoginTooManyConnections, fmt.Sprintf("session has its %d connections", s.params.MaxConnections))
	}
	for _, l := range s.lost {
		if l.conn.cid == c.cid && !l.removed {
			old = append(old, l.conn)
		}
	}
	if refusal := s.node.logIn(s.key.initiator, len(old) > 0); refusal != nil {
		return nil, refusal
	}
	c.slots.setMax(slotsFor(s.shared.win.depth))
	c.join(s.shared)
	c.sess = s
	s.conns = append(s.conns, c)
	if s.failed {
		s.foundAgain()
	}
	return old, nil
}

// find returns the session with that key, or nil.
//
// Preconditions: nd.mu is held.
func (nd *Node) find(key sessionKey) *session {
	invariant.Held(&nd.mu)
	for _, s := range nd.sessions {
		if s.key == key {
			return s
		}
	}
	return nil
}

// newTSIH returns a handle that is not in use, or 0 if all are.
//
// Preconditions: nd.mu is held.
func (nd *Node) newTSIH() uint16 {
	invariant.Held(&nd.mu)
	for range 1 << 16 {
		nd.lastTSIH++
		if nd.lastTSIH != 0 && nd.sessions[nd.lastTSIH] == nil {
			return nd.lastTSIH
		}
	}
	return 0
}

// leave takes c, of which nothing runs, out of s. It reports whether s has ended with it.
func (s *session) leave(c *conn) (last bool) {
	s.shared.mu.Lock()
	s.conns = slices.DeleteFunc(s.conns, func(o *conn) bool { return o == c })
	if !s.discovery {
		s.node.shared.LogOut(s.key.initiator)
	}
	s.shared.changed.Broadcast()
	if len(s.conns) == 0 && len(s.lost) > 0 { // session failure: section 6.3.6
		s.failed = true
		if !s.node.keepLost(s.key.initiator) {
			s.foundAgain()
			s.closeLocked()
		}
	}
	s.shared.mu.Unlock()
	s.node.makeRoom()
	return s.finishIdle()
}

// finishIdle ends s if nothing of it is left. It returns true to one caller only.
func (s *session) finishIdle() bool {
	s.shared.mu.Lock()
	idle := len(s.conns) == 0 && len(s.lost) == 0 && !s.finished
	if idle {
		s.closed, s.finished = true, true
		if s.failed {
			s.foundAgain()
		}
	}
	s.shared.mu.Unlock()
	if idle {
		s.finish()
	}
	return idle
}

// finish ends s after its connections and all of its tasks have ended.
func (s *session) finish() {
	if s.nexus != nil {
		s.nexus.Close()
	}
	nd := s.node
	nd.mu.Lock()
	delete(nd.sessions, s.tsih)
	nd.givePlaces(s)
	if s.nexus != nil {
		nd.ended[s.nexus.Transport()].add(s.nexus)
	}
	nd.stats.sessionsEnded.Add(1) // before nd.mu is free: Stats has the session in one of both counts
	nd.mu.Unlock()
	close(s.done)
}

// close lets no more connections join s and returns those that it has. Without any, s ends.
func (s *session) close(reason error) []*conn {
	s.shared.mu.Lock()
	conns := s.closeLocked()
	s.shared.mu.Unlock()
	if s.finishIdle() {
		s.reportEnd(ConnAddr{}, reason.Error(), false)
	}
	return conns
}

// closeLocked does the work of close, except that s does not end.
//
// Preconditions: s.shared.mu is held.
func (s *session) closeLocked() []*conn {
	invariant.Held(&s.shared.mu)
	s.closed = true
	for len(s.lost) > 0 {
		s.drop(s.lost[0])
	}
	return slices.Clone(s.conns)
}

// end closes all connections of s.
func (s *session) end(reason error) {
	for _, c := range s.close(reason) {
		c.stop(reason)
	}
}

var errConnectionLost = errors.New("another connection of the session has failed")

// connFailed ends the session because one of its connections has failed (session recovery: RFC
// 7143, sections 7.1.4.4 and 7.14). The target tells the initiator on the other connections.
func (s *session) connFailed(failed *conn) {
	for _, c := range s.close(errConnectionLost) {
		if c != failed {
			c.dismiss(pdu.AsyncSessionDropped, c.params.DefaultTime2Wait, c.opt.LogoutWait, errConnectionLost)
		}
	}
}

// otherSessions returns the other sessions with the target of s, without those in discovery.
func (nd *Node) otherSessions(s *session) []*session {
	return slices.DeleteFunc(nd.sessionsWith(s.target), func(o *session) bool { return o == s || o.discovery })
}

// sessionsWith returns the sessions with a target, also those from before UpdateTarget.
func (nd *Node) sessionsWith(t *target) []*session {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	var all []*session
	for _, s := range nd.sessions {
		if s.target != nil && s.target.LUNs == t.LUNs {
			all = append(all, s)
		}
	}
	return all
}
