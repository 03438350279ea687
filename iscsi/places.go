package iscsi

import (
	"errors"
	"fmt"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/security/limits"
)

// answerWait is how long the sessions of an initiator that has as many as it may have get to answer a
// ping. One that has not answered by then yields to the next login.
const answerWait = 10 * time.Second

var (
	errUnanswered  = errors.New("it did not answer, and a new session of the same initiator takes its place")
	errRediscovery = errors.New("a new discovery session of the same address takes its place")
)

// A probe is a ping of a connection whose initiator asks for another session. Node.mu guards it.
type probe struct {
	at    time.Time
	heard uint64 // what had come from the initiator, and what it had taken, until then
}

// holder returns for whom sessions with a target count: for a name and the CHAP user that has proved
// it. Other users cannot use up the places of a name.
func (k *sessionKey) holder(user string) string {
	if user == "" {
		return k.initiator + " at " + k.target
	}
	return k.initiator + " (" + user + ") at " + k.target
}

// takePlaces takes the places of s, which is about to begin, and of its first connection. If a limit is in the way, it
// returns the session that yields, or the refusal. s replaces a session of the same initiator port
// that has ended if replaces is true. Then no limit is in the way.
//
// Preconditions: nd.mu is held.
func (nd *Node) takePlaces(s *session, replaces bool) (leaves *session, refusal *loginError) {
	if s.discovery {
		return nd.takeDiscovery(s.from, replaces)
	}
	l := nd.shared
	holder, user := s.key.holder(s.params.CHAPName), s.params.CHAPName
	switch {
	case replaces:
		l.Sessions.Add(holder, 1)
	case !l.Sessions.Take(holder, 1):
		l.Sessions.Bite(s.key.initiator)
		if leaves = nd.unanswered(holder); leaves != nil {
			return leaves, nil
		}
		return nil, noPlace(&l.Sessions.Limit, "the initiator has that many sessions with the target")
	}
	if !takeUser(l, user, replaces) {
		l.Sessions.Give(holder, 1)
		l.PerUser.Bite(user)
		return nil, noPlace(&l.PerUser.Limit, "the CHAP user has that many sessions")
	}
	if refusal := nd.logIn(s.key.initiator, replaces); refusal != nil {
		l.Sessions.Give(holder, 1)
		giveUser(l, user)
		return nil, refusal
	}
	return nil, nil
}

func takeUser(l *limits.Set, user string, replaces bool) bool {
	switch {
	case user == "":
		return true
	case replaces:
		l.PerUser.Add(user, 1)
		return true
	}
	return l.PerUser.Take(user, 1)
}

func giveUser(l *limits.Set, user string) {
	if user != "" {
		l.PerUser.Give(user, 1)
	}
}

// logIn takes the place of a connection of that initiator name. conn.leave gives it back.
func (nd *Node) logIn(name string, replaces bool) *loginError {
	ok, at := nd.shared.LogIn(name, replaces)
	if ok {
		return nil
	}
	at.Bite(name)
	return noPlace(at, "the places that are left are kept for initiators with fewer sessions")
}

// takeDiscovery takes the place of a discovery session. The oldest one of the same address yields.
//
// Preconditions: nd.mu is held.
func (nd *Node) takeDiscovery(from string, replaces bool) (leaves *session, refusal *loginError) {
	l := &nd.shared.Discoveries
	if replaces {
		l.Add(from, 1)
		return nil, nil
	}
	if l.Take(from, 1) {
		return nil, nil
	}
	l.Bite(from)
	for _, s := range nd.sessions {
		if s.discovery && s.from == from && (leaves == nil || s.started.Before(leaves.started)) {
			leaves = s
		}
	}
	if leaves == nil { // the limit is 0, or the places are about to be free
		return nil, noPlace(&l.Limit, "the address has that many discovery sessions")
	}
	return leaves, nil
}

// givePlaces gives back what takePlaces has taken, except the place of the connection.
//
// Preconditions: nd.mu is held.
func (nd *Node) givePlaces(s *session) {
	invariant.Held(&nd.mu)
	if s.discovery {
		nd.shared.Discoveries.Give(s.from, 1)
		return
	}
	nd.shared.Sessions.Give(s.key.holder(s.params.CHAPName), 1)
	giveUser(nd.shared, s.params.CHAPName)
}

// noPlace refuses a login because of l.
func noPlace(l *limits.Limit, reason string) *loginError {
	return refuse(pdu.LoginOutOfResources, fmt.Sprintf("%v: %s", l, reason))
}

// unanswered returns the oldest session of the holder whose initiator has not answered the ping of an
// earlier call for answerWait, or that has lost its connections. It pings the others, so that a
// later call knows. An initiator that comes back after a crash so gets the places of its old sessions.
//
// Preconditions: nd.mu is held.
func (nd *Node) unanswered(holder string) (oldest *session) {
	invariant.Held(&nd.mu)
	for _, s := range nd.sessions {
		if s.discovery || s.key.holder(s.params.CHAPName) != holder || s.answers() {
			continue
		}
		if oldest == nil || s.started.Before(oldest.started) {
			oldest = s
		}
	}
	return oldest
}

// answers reports whether one of the connections of s has answered its last ping, or has time left
// to do so. It pings those whose last ping is long ago.
//
// Preconditions: Node.mu is held.
func (s *session) answers() bool {
	s.shared.mu.Lock()
	conns := s.conns[:len(s.conns):len(s.conns)]
	s.shared.mu.Unlock()
	answers := false
	for _, c := range conns {
		heard, now := c.received.Load()+c.sending.done.Load(), time.Now()
		switch {
		case c.probed.at.IsZero(), heard != c.probed.heard && now.Sub(c.probed.at) >= answerWait:
			c.probed = probe{now, heard}
			c.start(func() { c.sendNOPIn(true) }) // which may wait for the network
		case heard == c.probed.heard && now.Sub(c.probed.at) >= answerWait:
			continue
		}
		answers = true
	}
	return answers
}
