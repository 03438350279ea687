package iscsi

import (
	"slices"
)

// resetsOthers reports whether the configuration lets the initiator of s end the commands of others
// (TargetConfig.ResetsFor), as it is now: s may be older.
func (s *session) resetsOthers() bool {
	t := s.target
	if now := s.node.target(t.Name); now != nil {
		t = now
	}
	return t.ResetsFor.Match(s.key.initiator)
}

// within returns the other sessions whose commands CLEAR TASK SET and resets of s end: all with the
// target, or without that right those of its own initiator. SAM-5, section 7, knows no such right.
// Without it any initiator could keep its neighbours from their work, and a refusal would keep one
// from its own: Linux takes its disk offline if LOGICAL UNIT RESET fails.
func (s *session) within(resetsOthers bool) []*session {
	sessions := s.node.otherSessions(s)
	if resetsOthers {
		return sessions
	}
	return slices.DeleteFunc(sessions, func(o *session) bool { return o.key.initiator != s.key.initiator })
}
