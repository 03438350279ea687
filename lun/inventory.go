package lun

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// An Inventory is the logical units of one SCSI target device, which all of its
// target ports lead to.
type Inventory struct {
	ports atomic.Pointer[[]uint16] // relative target port identifiers, ascending; a new slice takes its place

	mu      sync.RWMutex
	ids     []uint16 // ascending
	units   []*Unit
	masks   []Mask // nil: everybody has ReadWrite
	nexuses map[*Nexus]struct{}
}

// Access is what an initiator may do with a logical unit.
type Access int

const (
	ReadWrite Access = iota
	ReadOnly         // the medium is write protected
	NoAccess         // there is no such logical unit
)

// A Mask is the access of the initiator with that name, which is normalised. It
// is asked once for every nexus.
type Mask func(initiator string) Access

// NewInventory makes an empty inventory. The target is reached by portal groups
// with these tags, 1 to 65535, or else by one with tag 1.
func NewInventory(tpgts ...uint16) *Inventory {
	if len(tpgts) == 0 {
		tpgts = []uint16{1}
	}
	inv := &Inventory{nexuses: map[*Nexus]struct{}{}}
	inv.setPorts(tpgts)
	return inv
}

// setPorts makes tpgts the target ports, or port 1 if there are none.
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

// SetPorts makes the target one that portal groups with these tags lead to, as
// NewInventory does. Initiators hear that something about the paths has changed.
func (inv *Inventory) SetPorts(tpgts ...uint16) {
	if !inv.setPorts(tpgts) {
		return
	}
	for _, u := range inv.Units() {
		u.raise(attentionAccess, nil)
	}
}

// maxLUN is the largest LUN of flat space addressing (SAM-5, section 4.7.7).
const maxLUN = 1<<14 - 1

// Add makes u the logical unit with that LUN, 0 to 16383. Initiators that are
// there already find it, and hear that there is something to find.
func (inv *Inventory) Add(id uint16, u *Unit) error { return inv.AddMasked(id, u, nil) }

// AddMasked is Add for some initiators only.
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

// Remove takes the logical unit with that LUN away from all initiators, and
// returns it, or nil if there is none. Commands that have begun go on until the
// caller closes it.
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

// Replace makes u the logical unit with that LUN in the place of the one there is,
// which it returns, or nil if there is none. Commands that have begun go on with the old
// one until the caller closes it, and are NOT READY then; the next one of each initiator meets NOT READY TO
// READY CHANGE, MEDIUM MAY HAVE CHANGED, and persistent reservations are those that u
// has.
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
			old.dropReserve(n) // it stays in old.seen: a PREEMPT AND ABORT may be under way
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
		l.raise(attentionMedium)
		if u.modeChanged {
			l.raise(attentionMode)
		}
	}
	return old
}

// SetMask says anew who has which access to the LUN. Initiators for which it comes or
// goes hear of it; for others a change between ReadWrite and ReadOnly holds from
// their next command on.
func (inv *Inventory) SetMask(id uint16, m Mask) error {
	inv.mu.Lock()
	defer inv.mu.Unlock()
	i, ok := slices.BinarySearch(inv.ids, id)
	if !ok {
		return fmt.Errorf("LUN %d: there is none", id)
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
				list[at].raise(attentionMode) // the WP bit of MODE SENSE
			}
		case access != NoAccess:
			if l := inv.show(n, i); l != nil {
				n.changeList(slices.Insert(slices.Clone(list), at, l))
			}
		}
	}
	return nil
}

// show makes the view of the i-th unit for n, or nil if the mask hides it.
//
// Preconditions: mu is held.
func (inv *Inventory) show(n *Nexus, i int) *itl {
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
	l.raise(attentionPowerOn)
	u.mu.Lock()
	defer u.mu.Unlock()
	u.seen[l] = struct{}{}
	return l
}

// Unit is the logical unit with that LUN, or nil.
func (inv *Inventory) Unit(id uint16) *Unit {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	if i, ok := slices.BinarySearch(inv.ids, id); ok {
		return inv.units[i]
	}
	return nil
}

// Units are the logical units in the order of their LUNs.
func (inv *Inventory) Units() []*Unit {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	return slices.Clone(inv.units)
}

// An Entry is a logical unit of an Inventory.
type Entry struct {
	LUN  uint16
	Unit *Unit
}

// Entries are all logical units in the order of their LUNs.
func (inv *Inventory) Entries() []Entry {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	list := make([]Entry, len(inv.ids))
	for i, id := range inv.ids {
		list[i] = Entry{id, inv.units[i]}
	}
	return list
}

// PowerOn is ResetUnit for all logical units, with what the loss of power takes as well: persistent
// reservations and registrations that APTPL does not keep (SPC-4, section
// 5.13.5).
func (inv *Inventory) PowerOn() {
	for _, u := range inv.Units() {
		u.reservations.losePower()
		u.reset(attentionPowerOn)
	}
}

// Close closes all logical units.
func (inv *Inventory) Close() error {
	var errs []error
	for _, u := range inv.Units() {
		errs = append(errs, u.Close())
	}
	return errors.Join(errs...)
}
