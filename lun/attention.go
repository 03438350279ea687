package lun

import (
	"math/bits"
	"slices"

	"github.com/iser-target/iser-target/lun/invariant"
)

// attentions are the unit attentions that a unit can raise; the first is reported first.
var attentions = []Sense{
	condPowerOn,
	condReset,
	condClearedByTransport,
	condMediumChanged,
	condModeChanged,
	condLogChanged,
	condCapacityChanged,
	condLUNsChanged,
	condAccessChanged,
	condReservationsPreempted,
	condReservationsReleased,
	condRegistrationsPreempted,
	condTimestampChanged,
	condIdentifierChanged,
	condSoftThreshold,
	condInquiryChanged,
}

// reported are the attentions about facts that an initiator keeps in mind and that may be wrong
// now, although it has nothing to ask the unit: see OnEvent. All units of a nexus raise
// condLUNsChanged together, so changeList reports it once.
var reported = []Sense{condMediumChanged, condModeChanged, condCapacityChanged}

// dueBit returns the bit of itl.due that stands for an attention.
func dueBit(attention Sense) uint32 { return 1 << slices.Index(attentions, attention) }

// raise makes a unit attention due. It does nothing if the attention is due already.
func (l *itl) raise(attention Sense) {
	if bit := dueBit(attention); l.due.Or(bit)&bit == 0 && slices.Contains(reported, attention) {
		l.report(attention)
	}
}

// report calls the function of OnEvent with the sense data of the attention.
func (l *itl) report(attention Sense) {
	if f := l.nexus.event.Load(); f != nil {
		s := newSense(attention)
		(*f)(EncodeLUN(l.id), s.put(make([]byte, maxSenseLen), l.unit.hasDescriptors()))
	}
}

// OnEvent sets a function that is called as soon as a unit attention is due, if its subject
// should not wait for the initiator's next command. The attention remains due. report must
// neither wait nor call the nexus.
func (n *Nexus) OnEvent(report func(lun [8]byte, sense []byte)) { n.event.Store(&report) }

// takeAttention returns the first unit attention that is due, and takes it away.
func (l *itl) takeAttention() (s senseData, ok bool) {
	for {
		due := l.due.Load()
		if due == 0 {
			return s, false
		}
		if l.due.CompareAndSwap(due, due&(due-1)) {
			if s = newSense(attentions[bits.TrailingZeros32(due)]); s.Sense == condSoftThreshold {
				s = l.takeThreshold(s)
			}
			return s, true
		}
	}
}

// PendingAttention returns the unit attention that the next command for the LUN field would meet,
// and how many are due in all. It takes none away.
func (n *Nexus) PendingAttention(lun [8]byte) (first Sense, pending int) {
	l := n.find(lun)
	if l == nil {
		return Sense{}, 0
	}
	due := l.due.Load()
	if due == 0 {
		return Sense{}, 0
	}
	return attentions[bits.TrailingZeros32(due)], bits.OnesCount32(due)
}

// raise makes an attention due for all nexuses except by, which may be nil.
func (u *Unit) raise(attention Sense, by *Nexus) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.raiseLocked(attention, by)
}

// raiseLocked does what raise does.
//
// Preconditions: u.mu is held.
func (u *Unit) raiseLocked(attention Sense, by *Nexus) {
	invariant.Held(&u.mu)
	for l := range u.seen {
		if l.nexus != by {
			l.raise(attention)
		}
	}
}

// ClearedByTransport makes the next command for the unit meet a unit attention:
// SOME COMMANDS CLEARED BY ISCSI PROTOCOL EVENT (RFC 7143, section 11.14.5).
func (n *Nexus) ClearedByTransport(lun [8]byte) {
	if l := n.find(lun); l != nil {
		l.raise(condClearedByTransport)
	}
}
