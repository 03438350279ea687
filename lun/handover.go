package lun

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
)

// A PathState is what a logical unit owes to one nexus, or has from it, and keeps in memory only.
type PathState struct {
	LUN        uint16   `json:"lun"`
	Attentions []string `json:"attentions,omitempty"` // that are due: ASC and ASCQ, "29/00"
	Prevents   bool     `json:"prevents,omitempty"`   // PREVENT ALLOW MEDIUM REMOVAL
	Reserves   bool     `json:"reserves,omitempty"`   // it holds the unit by RESERVE
}

// code returns ASC and ASCQ of a unit attention.
func (k Sense) code() string { return fmt.Sprintf("%02x/%02x", k.ASC, k.ASCQ) }

// State returns what another process needs to continue the nexus. No command is in progress.
func (n *Nexus) State() []PathState {
	list := make([]PathState, 0, len(n.list()))
	for _, l := range n.list() {
		st := PathState{LUN: l.id}
		for due := l.due.Load(); due != 0; due &= due - 1 {
			st.Attentions = append(st.Attentions, attentions[bits.TrailingZeros32(due)].code())
		}
		l.unit.mu.Lock()
		st.Prevents = l.prevents
		l.unit.mu.Unlock()
		r := &l.unit.reservations
		r.mu.Lock()
		st.Reserves = r.legacy == n
		r.mu.Unlock()
		list = append(list, st)
	}
	return list
}

// Restore gives a new nexus the state of one of another process. A logical unit that is not in list keeps its
// unit attentions: the initiator does not know it. What list has of logical units that do not exist is
// dropped.
func (n *Nexus) Restore(list []PathState) {
	for _, st := range list {
		i, ok := slices.BinarySearchFunc(n.list(), st.LUN, func(l *itl, id uint16) int { return cmp.Compare(l.id, id) })
		if !ok {
			continue
		}
		l := n.list()[i]
		var due uint32
		for _, code := range st.Attentions {
			if i := slices.IndexFunc(attentions, func(k Sense) bool { return k.code() == code }); i >= 0 {
				due |= 1 << i
			} else {
				due |= dueBit(condReset) // of a version that has other attentions: the initiator looks at everything
			}
		}
		l.due.Store(due)
		l.unit.mu.Lock()
		l.prevents = st.Prevents
		l.unit.mu.Unlock()
		r := &l.unit.reservations
		r.mu.Lock()
		if st.Reserves && r.legacy == nil {
			r.legacy = n
			r.publish()
		}
		r.mu.Unlock()
	}
}
