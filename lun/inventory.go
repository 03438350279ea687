package lun

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/lun/invariant"
)

// An Inventory has the logical units of one SCSI target device. All of its target ports lead to
// them.
type Inventory struct {
	ports atomic.Pointer[[]uint16] // relative target port identifiers, ascending; a new slice takes its place

	mu      sync.RWMutex
	ids     []uint16 // ascending
	units   []*Unit
	masks   []Mask // nil: all initiators have ReadWrite
	nexuses map[*Nexus]struct{}
}

// Access is what an initiator may do with a logical unit.
type Access int

const (
	ReadWrite Access = iota // all commands
	ReadOnly                // the medium is write protected
	NoAccess                // the logical unit does not exist
)

// A Mask returns the access of the initiator with that normalized name. A nexus calls it once,
// and again when the mask changes.
type Mask func(initiator string) Access

// NewInventory returns an empty inventory. Portal groups with these tags, 1 to 65535, lead to the
// target; without tags, one with tag 1.
func NewInventory(tpgts ...uint16) *Inventory {
	if len(tpgts) == 0 {
		tpgts = []uint16{1}
	}
	inv := &Inventory{nexuses: map[*Nexus]struct{}{}}
	inv.setPorts(tpgts)
	return inv
}

// setPorts sets the target ports to tpgts, or to port 1 if tpgts is empty.
func (inv *Inventory) setPorts(tpgts []uint16) (changed bool) {
	if len(tpgts) == 0 {
		tpgts = []uint16{1}
	}
	ports := slices.Clone(tpgts)
	slices.Sort(ports)
	ports = slices.Compact(ports)
	old := inv.ports.Swap(&ports)
	return old != nil && !slices.Equal(*old, ports)
}

// SetPorts makes portal groups with these tags lead to the target, like NewInventory. It notifies
// initiators that something about the paths changed.
func (inv *Inventory) SetPorts(tpgts ...uint16) {
	if !inv.setPorts(tpgts) {
		return
	}
	for _, u := range inv.all() {
		u.raise(condAccessChanged, nil)
	}
}

// maxLUN is the largest LUN of flat space addressing (SAM-5, section 4.7.7).
const maxLUN = 1<<14 - 1

// Add makes u the logical unit with that LUN, 0 to 16383. Initiators that are logged in see it at
// once, and are notified.
func (inv *Inventory) Add(id uint16, u *Unit) error { return inv.AddMasked(id, u, nil) }

// AddMasked adds u like Add for the initiators that m lets see it.
func (inv *Inventory) AddMasked(id uint16, u *Unit, m Mask) error {
	if id > maxLUN {
		return fmt.Errorf("LUN %d is above %d", id, maxLUN)
	}
	inv.mu.Lock()
	defer inv.mu.Unlock()
	i, taken := slices.BinarySearch(inv.ids, id)
	if taken {
		return fmt.Errorf("LUN %d is used twice", id)
	}
	inv.ids = slices.Insert(inv.ids, i, id)
	inv.units = slices.Insert(inv.units, i, u)
	inv.masks = slices.Insert(inv.masks, i, m)
	for n := range inv.nexuses {
		if l := inv.show(n, i); l != nil {
			n.changeList(slices.Insert(slices.Clone(n.list()), n.search(id), l))
		}
	}
	return nil
}

// Remove takes the logical unit with that LUN away from all initiators and returns it, or returns
// nil if the LUN does not exist. Commands in progress continue until the caller closes the unit.
func (inv *Inventory) Remove(id uint16) *Unit {
	inv.mu.Lock()
	defer inv.mu.Unlock()
	i, ok := slices.BinarySearch(inv.ids, id)
	if !ok {
		return nil
	}
	u := inv.units[i]
	inv.ids = slices.Delete(inv.ids, i, i+1)
	inv.units = slices.Delete(inv.units, i, i+1)
	inv.masks = slices.Delete(inv.masks, i, i+1)
	for n := range inv.nexuses {
		list := n.list()
		at := n.search(id)
		if at == len(list) || list[at].id != id {
			continue
		}
		list[at].leave()
		n.changeList(slices.Delete(slices.Clone(list), at, at+1))
	}
	return u
}

// Replace puts u in the place of the logical unit with that LUN and returns the old one, or
// returns nil if the LUN does not exist. Commands in progress continue in the old unit until the
// caller closes it, and are NOT READY then. The next command of each initiator meets NOT READY TO
// READY CHANGE, MEDIUM MAY HAVE CHANGED. Persistent reservations are those of u.
func (inv *Inventory) Replace(id uint16, u *Unit) (old *Unit) {
	inv.mu.Lock()
	defer inv.mu.Unlock()
	i, ok := slices.BinarySearch(inv.ids, id)
	if !ok {
		return nil
	}
	old, inv.units[i] = inv.units[i], u
	old.replaced.Store(true)
	u.replaced.Store(false)
	for n := range inv.nexuses {
		list := n.list()
		at := n.search(id)
		if at == len(list) || list[at].id != id {
			continue
		}
		was := list[at]
		if old.Absent() {
			was.leave()
		} else {
			old.dropReserve(n) // it stays in old.seen: a PREEMPT AND ABORT may be in progress
		}
		l := &itl{nexus: n, id: id, unit: u}
		l.readOnly.Store(was.readOnly.Load())
		l.due.Store(was.due.Load())
		u.mu.Lock()
		u.seen[l] = struct{}{}
		u.mu.Unlock()
		next := slices.Clone(list)
		next[at] = l
		n.luns.Store(&next)
		l.raise(condMediumChanged)
		if u.modeChanged {
			l.raise(condModeChanged)
		}
	}
	return old
}

// SetMask replaces the mask of the LUN. It notifies initiators that gain or lose access. For
// others a change between ReadWrite and ReadOnly applies from their next command on.
func (inv *Inventory) SetMask(id uint16, m Mask) error {
	inv.mu.Lock()
	defer inv.mu.Unlock()
	i, ok := slices.BinarySearch(inv.ids, id)
	if !ok {
		return fmt.Errorf("LUN %d: not found", id)
	}
	inv.masks[i] = m
	for n := range inv.nexuses {
		list := n.list()
		at := n.search(id)
		seen := at < len(list) && list[at].id == id
		access := ReadWrite
		if m != nil {
			access = m(n.name.initiator.name)
		}
		switch {
		case seen && access == NoAccess:
			list[at].leave()
			n.hidesSome.Store(true)
			n.changeList(slices.Delete(slices.Clone(list), at, at+1))
		case seen:
			if was := list[at].readOnly.Swap(access == ReadOnly); was != (access == ReadOnly) {
				list[at].raise(condModeChanged) // the WP bit of MODE SENSE
			}
		case access != NoAccess:
			if l := inv.show(n, i); l != nil {
				n.changeList(slices.Insert(slices.Clone(list), at, l))
			}
		}
	}
	return nil
}

// show returns the view of the i-th unit for n, or nil if the mask hides the unit.
//
// Preconditions: inv.mu is held.
func (inv *Inventory) show(n *Nexus, i int) *itl {
	invariant.Held(&inv.mu)
	access := ReadWrite
	if mask := inv.masks[i]; mask != nil {
		access = mask(n.name.initiator.name)
	}
	if access == NoAccess {
		n.hidesSome.Store(true)
		return nil
	}
	u := inv.units[i]
	l := &itl{nexus: n, id: inv.ids[i], unit: u}
	l.readOnly.Store(access == ReadOnly)
	l.raise(condPowerOn)
	u.mu.Lock()
	defer u.mu.Unlock()
	u.seen[l] = struct{}{}
	return l
}

// Unit returns the logical unit with that LUN, or nil.
func (inv *Inventory) Unit(id uint16) *Unit {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	if i, ok := slices.BinarySearch(inv.ids, id); ok {
		return inv.units[i]
	}
	return nil
}

// all returns the logical units in the order of their LUNs.
func (inv *Inventory) all() []*Unit {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	return slices.Clone(inv.units)
}

// An Entry is a logical unit of an Inventory.
type Entry struct {
	LUN  uint16
	Unit *Unit
}

// Entries returns all logical units in the order of their LUNs.
func (inv *Inventory) Entries() []Entry {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	list := make([]Entry, len(inv.ids))
	for i, id := range inv.ids {
		list[i] = Entry{id, inv.units[i]}
	}
	return list
}

// PowerOn does what ResetUnit does for all logical units, and also what a loss of power does: it
// ends persistent reservations and registrations that APTPL does not keep (SPC-4, section
// 5.13.5).
func (inv *Inventory) PowerOn() {
	for _, u := range inv.all() {
		u.reservations.losePower()
		u.reset(condPowerOn)
	}
}

// Close closes all logical units.
func (inv *Inventory) Close() error {
	var errs []error
	for _, u := range inv.all() {
		errs = append(errs, u.Close())
	}
	return errors.Join(errs...)
}
