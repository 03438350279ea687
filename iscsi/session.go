package iscsi

import (
	"errors"
	"log/slog"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
)

// A sessionKey is what makes two sessions the same one (RFC 7143, sections
// 4.4.3 and 7.4.2): a login with the key of a session replaces it.
type sessionKey struct {
	initiator string // normalised
	isid      [6]byte
	target    string // normalised; empty in an unnamed discovery session
	tpgt      uint16
	portal    *Portal // of an unnamed discovery session; else nil
}

// A session is an I_T nexus, or a discovery session. With MaxConnections 1 and
// ErrorRecoveryLevel 0 it lives as long as its one connection: there is nothing
// that a later connection could take up.
type session struct {
	key       sessionKey
	tsih      uint16
	user      string // CHAP_N of who opened it; empty without CHAP
	discovery bool
	target    *target    // nil in an unnamed discovery session
	nexus     *lun.Nexus // nil in a discovery session
	conn      *conn
	started   time.Time
	done      chan struct{} // closed when the session and all of its tasks have ended
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

// establish enters a session for c, or finds out that it cannot be (RFC 7143,
// section 6.3.1):
//
//	ISID       TSIH       CID
//	new        0          any        new session
//	new        not 0      any        020a
//	existing   0          any        session reinstatement
//	existing   existing   new        0206, MaxConnections is 1
//	existing   existing   existing   connection reinstatement
//	existing   unknown    any        020a
//
// Both reinstatements end the old session with its connection and wait until
// its tasks have ended. The second keeps TSIH and CmdSN.
func (nd *Node) establish(c *conn, key sessionKey, req *pdu.LoginRequest, t *target) (*session, *loginError) {
	timeout := time.NewTimer(nd.opt.ReinstatementWait)
	defer timeout.Stop()
	expCmdSN := req.CmdSN
	continued := false
	for {
		nd.mu.Lock()
		old := nd.find(key)
		switch {
		case nd.stopping:
			nd.mu.Unlock()
			return nil, &loginError{pdu.LoginUnavailable, errShutdown}
		case old != nil && !old.discovery && old.user != c.params.CHAPName:
			// Section 9.2: who replaces or joins a session is who opened it. A
			// discovery session has nothing to protect.
			nd.mu.Unlock()
			return nil, refuse(pdu.LoginAuthentication, "session of this initiator port belongs to another CHAP user")
		case old != nil && req.TSIH != 0 && req.TSIH != old.tsih,
			old == nil && req.TSIH != 0 && !continued,
			old == nil && req.TSIH != 0 && nd.sessions[req.TSIH] != nil:
			nd.mu.Unlock()
			return nil, refuse(pdu.LoginNoSession, "TSIH names no session of this initiator port")
		case old != nil && req.TSIH != 0 && old.conn.cid != req.CID:
			nd.mu.Unlock()
			return nil, refuse(pdu.LoginTooManyConnections, "a session has one connection only")
		case old == nil:
			s := &session{key: key, tsih: req.TSIH, user: c.params.CHAPName, discovery: c.params.Discovery, target: t, conn: c,
				started: time.Now(), done: make(chan struct{})}
			if s.tsih == 0 {
				s.tsih = nd.newTSIH()
			}
			if s.tsih == 0 {
				nd.mu.Unlock()
				return nil, refuse(pdu.LoginOutOfResources, "all session handles are in use")
			}
			if !s.discovery {
				s.nexus = t.LUNs.NewNexus(lun.Port{InitiatorName: key.initiator, ISID: key.isid, TargetName: t.Name, TPGT: key.tpgt})
				s.nexus.OnPreempt(s.abortUnit)
			}
			nd.sessions[s.tsih] = s
			nd.mu.Unlock()
			c.openWindow(expCmdSN)
			return s, nil
		}
		nd.mu.Unlock()

		old.conn.end(errReinstated)
		select {
		case <-old.done:
		case <-timeout.C:
			return nil, refuse(pdu.LoginUnavailable, "tasks of the session to be replaced have not ended yet")
		case <-c.ending:
			return nil, refuse(pdu.LoginUnavailable, "connection was closed during reinstatement")
		}
		if req.TSIH != 0 {
			expCmdSN, continued = old.conn.expCmdSN(), true
		}
	}
}

// find returns the session with that key, or nil.
//
// Preconditions: nd.mu is held.
func (nd *Node) find(key sessionKey) *session {
	for _, s := range nd.sessions {
		if s.key == key {
			return s
		}
	}
	return nil
}

// newTSIH returns a handle that is not in use, or 0 if there is none.
//
// Preconditions: nd.mu is held.
func (nd *Node) newTSIH() uint16 {
	for range 1 << 16 {
		nd.lastTSIH++
		if nd.lastTSIH != 0 && nd.sessions[nd.lastTSIH] == nil {
			return nd.lastTSIH
		}
	}
	return 0
}

// finish ends s after its connection and all of its tasks have ended.
func (s *session) finish(nd *Node) {
	if s.nexus != nil {
		s.nexus.Close()
	}
	nd.mu.Lock()
	delete(nd.sessions, s.tsih)
	nd.mu.Unlock()
	nd.stats.sessionsEnded.Add(1)
	close(s.done)
}

// neighbours are the connections of all sessions with the target of s, s
// itself included.
func (nd *Node) neighbours(s *session) []*conn {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	var all []*conn
	for _, o := range nd.sessions {
		if o.target == s.target && o.nexus != nil {
			all = append(all, o.conn)
		}
	}
	return all
}

// attrs are the session in a log line.
func (s *session) attrs() []slog.Attr {
	kind := "normal"
	if s.discovery {
		kind = "discovery"
	}
	return []slog.Attr{slog.String("session", kind), slog.Int("tsih", int(s.tsih))}
}

// abortUnit ends the commands of s for a logical unit, but not except: what PREEMPT
// AND ABORT does to the sessions that it preempts.
func (s *session) abortUnit(field [8]byte, except *lun.Command) {
	c := s.conn
	match := func(t *Task) bool {
		return t.isCommand() && &t.cmd != except && s.nexus.SameUnit(t.header().LUN(), field)
	}
	c.mu.Lock()
	lost := c.tasks.any(match)
	c.abortTasks(match)
	c.mu.Unlock()
	if lost && c.enter() {
		go func() {
			defer c.workers.Done()
			c.sendNOPIn(false)
		}()
	}
	c.stopped(match, false)
}
