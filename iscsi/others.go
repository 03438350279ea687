package iscsi

import (
	"slices"

	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/security"
)

// otherNexus returns a new nexus between the initiator of s and another target whose inventory has what the caller looks for,
// or nil: see lun.FindNexus. EXTENDED COPY may use the logical units of targets to which the initiator could log in: by the same
// name, as the same CHAP user, from the same addresses and through the same portal group. The nexus has the port of a session
// that the initiator has there, and its reservations, or the port that a login would have.
func (s *session) otherNexus(has func(*lun.Inventory) bool) *lun.Nexus {
	nd := s.node
	nd.mu.Lock()
	targets := nd.targets
	nd.mu.Unlock()
	for _, t := range targets {
		if t.Name != s.key.target && has(t.LUNs) && s.couldLogIn(t) {
			return t.LUNs.NewNexus(s.portAt(t))
		}
	}
	return nil
}

// couldLogIn reports whether a login of the initiator of s to t would succeed.
func (s *session) couldLogIn(t *target) bool {
	if t.Redirect.Address != "" || len(t.PortalGroups) > 0 && !slices.Contains(t.PortalGroups, s.key.tpgt) ||
		!t.Initiators.Match(s.key.initiator) {
		return false
	}
	if t.Auth != nil && t.Auth.Excludes(s.params.CHAPName, security.CHAPProof(s.params.CHAPProof), s.key.initiator) != "" {
		return false
	}
	s.shared.mu.Lock()
	defer s.shared.mu.Unlock()
	return !slices.ContainsFunc(s.conns, func(c *conn) bool { return !t.Networks.Admit(security.AddressOf(c.dm.RemoteAddr())) })
}

// portAt returns the port of the initiator of s at t.
func (s *session) portAt(t *target) lun.Port {
	p := lun.Port{InitiatorName: s.key.initiator, ISID: s.key.isid, TargetName: t.Name, TPGT: s.key.tpgt}
	nd := s.node
	nd.mu.Lock()
	defer nd.mu.Unlock()
	first := uint16(0)
	for tsih, o := range nd.sessions {
		if o.discovery || o.key.target != t.Name || o.key.initiator != s.key.initiator || first != 0 && tsih > first {
			continue
		}
		if t.Auth == nil || o.params.CHAPName == s.params.CHAPName { // else it is of somebody else with that name
			first, p.ISID, p.TPGT = tsih, o.key.isid, o.key.tpgt
		}
	}
	return p
}
