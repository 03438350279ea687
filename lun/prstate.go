package lun

import "slices"

// prTypes are the persistent reservation types (SPC-4, section 5.13.4), by the value of TYPE.
var prTypes = [16]struct {
	valid       bool
	exclusive   bool // keeps out readers as well as writers
	registrants bool // keeps out no registered nexus
	all         bool // all registered nexuses hold it
}{
	1: {valid: true},                                                // Write Exclusive
	3: {valid: true, exclusive: true},                               // Exclusive Access
	5: {valid: true, registrants: true},                             // Write Exclusive - Registrants Only
	6: {valid: true, exclusive: true, registrants: true},            // Exclusive Access - Registrants Only
	7: {valid: true, registrants: true, all: true},                  // Write Exclusive - All Registrants
	8: {valid: true, exclusive: true, registrants: true, all: true}, // Exclusive Access - All Registrants
}

// maxRegistrations is how many I_T nexuses can register with a unit.
const maxRegistrations = 512

// A prState has the registrations and the persistent reservation of a unit. Methods that change
// it leave a copy of it as it was.
type prState struct {
	generation    uint32 // PRGENERATION
	aptpl         bool   // survives the loss of power
	registrations []registration
	typ           byte      // 0: no reservation
	holder        nexusName // the only holder; zero if all registrants hold it
}

type registration struct {
	nexus          nexusName
	key            uint64 // not 0
	allTargetPorts bool   // made with ALL_TG_PT, as were those of the other target ports
	// by is the initiator that made the registration, which need not be that of nexus (SPEC_I_PT,
	// REGISTER AND MOVE). It counts for Options.Registrations. After a restart it is that of nexus.
	by string
	// number is that of the operation that made the registration, in a home that several gateways share; else 0.
	number uint64
}

// madeBy returns how many registrations the initiator made.
func (s *prState) madeBy(initiator string) (n int) {
	for _, r := range s.registrations {
		if r.by == initiator {
			n++
		}
	}
	return n
}

// find returns the index of the registration of n, or -1.
func (s *prState) find(n nexusName) int {
	return slices.IndexFunc(s.registrations, func(r registration) bool { return r.nexus == n })
}

// holds reports whether n holds the reservation.
func (s *prState) holds(n nexusName) bool {
	if prTypes[s.typ].all {
		return s.find(n) >= 0
	}
	return s.typ != 0 && s.holder == n
}

// release ends the reservation.
func (s *prState) release() { s.typ, s.holder = 0, nexusName{} }

// put registers a nexus, or changes its registration.
func (s *prState) put(r registration) {
	if i := s.find(r.nexus); i >= 0 {
		s.registrations = slices.Clone(s.registrations)
		s.registrations[i] = r
		return
	}
	s.registrations = append(s.registrations, r)
}

// remove removes the registrations that match, and the reservation if that leaves no holder. It
// returns the nexuses of the removed ones.
func (s *prState) remove(match func(registration) bool) (gone []nexusName) {
	var rest []registration
	for _, r := range s.registrations {
		if match(r) {
			gone = append(gone, r.nexus)
		} else {
			rest = append(rest, r)
		}
	}
	s.registrations = rest
	if all := prTypes[s.typ].all; all && len(rest) == 0 || !all && slices.Contains(gone, s.holder) {
		s.release()
	}
	return gone
}

// equal reports whether both are the same.
func (s *prState) equal(o *prState) bool {
	return s.generation == o.generation && s.aptpl == o.aptpl && s.typ == o.typ && s.holder == o.holder &&
		slices.Equal(s.registrations, o.registrations)
}

// nexuses returns the registered nexuses.
func (s *prState) nexuses() []nexusName {
	list := make([]nexusName, len(s.registrations))
	for i, r := range s.registrations {
		list[i] = r.nexus
	}
	return list
}

// covers reports whether r represents the registrations of its initiator port through all of
// these target ports: ALL_TG_PT made them, and they still have the same key and reservation
// (SPC-4, section 6.15.5).
func (s *prState) covers(r registration, targets []uint16) bool {
	if !r.allTargetPorts || !slices.Contains(targets, r.nexus.target) {
		return false
	}
	for _, target := range targets {
		n := nexusName{r.nexus.initiator, target}
		i := s.find(n)
		if i < 0 || !s.registrations[i].allTargetPorts || s.registrations[i].key != r.key {
			return false
		}
		if s.holds(n) != s.holds(r.nexus) {
			return false
		}
	}
	return true
}
