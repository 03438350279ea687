package lun

import (
	"bytes"
	"cmp"
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
	ports atomic.Pointer[portSet] // a new one takes its place

	mu      sync.RWMutex
	entries []maskedEntry // ascending by LUN
	nexuses map[*Nexus]struct{}
}

// A portSet has relative target port identifiers, ascending.
type portSet struct {
	own []uint16
	all []uint16 // with those of other gateways
}

type maskedEntry struct {
	Entry
	mask Mask // nil: all initiators have ReadWrite
}

// search returns where the LUN is in the entries, or where it would be inserted.
func (inv *Inventory) search(id uint16) (i int, found bool) {
	return slices.BinarySearchFunc(inv.entries, id, func(e maskedEntry, id uint16) int { return cmp.Compare(e.LUN, id) })
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
	inv := &Inventory{nexuses: map[*Nexus]struct{}{}}
	inv.setPorts(tpgts, nil)
	return inv
}

// setPorts sets the target ports to tpgts, or to port 1 if tpgts is empty, and those of other gateways. It returns the ports before.
func (inv *Inventory) setPorts(tpgts, peers []uint16) (old *portSet) {
	if len(tpgts) == 0 {
		tpgts = []uint16{1}
	}
	sorted := func(list []uint16) []uint16 {
		slices.Sort(list)
		return slices.Compact(list)
	}
	return inv.ports.Swap(&portSet{sorted(slices.Clone(tpgts)), sorted(slices.Concat(tpgts, peers))})
}

// SetPorts makes portal groups with these tags lead to the target, like NewInventory, and those of peers, of other gateways, to the units with Options.ImplicitAccess.
// It notifies initiators if something about the paths to a unit changed.
func (inv *Inventory) SetPorts(tpgts, peers []uint16) {
	old := inv.setPorts(tpgts, peers)
	now := inv.ports.Load()
	for _, e := range inv.Entries() {
		if !slices.Equal(old.of(e.Unit), now.of(e.Unit)) {
			e.Unit.raise(condAccessChanged, nil)
		}
	}
}

// of returns the ports that lead to u.
func (p *portSet) of(u *Unit) []uint16 {
	if u.opt.ImplicitAccess {
		return p.all
	}
	return p.own
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
	i, taken := inv.search(id)
	if taken {
		return fmt.Errorf("LUN %d is used twice", id)
	}
	u.openTokens()
	inv.entries = slices.Insert(inv.entries, i, maskedEntry{Entry{id, u}, m})
	for n := range inv.nexuses {
		n.insert(inv.show(n, inv.entries[i]))
	}
	u.group.pay(nil)
	return nil
}

// Remove takes the logical unit with that LUN away from all initiators and returns it, or returns
// nil if the LUN does not exist. Commands in progress continue until the caller closes the unit.
func (inv *Inventory) Remove(id uint16) *Unit {
	inv.mu.Lock()
	defer inv.mu.Unlock()
	i, ok := inv.search(id)
	if !ok {
		return nil
	}
	u := inv.entries[i].Unit
	u.shutTokens()
	inv.entries = slices.Delete(inv.entries, i, i+1)
	for n := range inv.nexuses {
		if at, seen := search(n.list(), id); seen {
			n.remove(at)
		}
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
	i, ok := inv.search(id)
	if !ok {
		return nil
	}
	old, inv.entries[i].Unit = inv.entries[i].Unit, u
	old.replaced.Store(true)
	old.shutTokens()
	u.replaced.Store(false)
	u.openTokens()
	var owed []*itl
	for n := range inv.nexuses {
		at, seen := search(n.list(), id)
		if !seen {
			continue
		}
		was := n.list()[at]
		was.copies.haltBackground() // they fail in the old unit
		if old.Absent() {
			was.leave()
		} else {
			old.dropReserve(n) // it stays in old.seen: a PREEMPT AND ABORT may be in progress
		}
		l := &itl{nexus: n, id: id, unit: u}
		l.readOnly.Store(was.readOnly.Load())
		l.due.Store(was.due.Load())
		l.enter()
		next := slices.Clone(n.list())
		next[at] = l
		n.luns.Store(&next)
		if old.Absent() { // nobody has told the nexus of reservations meanwhile
			owed = append(owed, l)
		}
		l.raise(condMediumChanged)
		if u.modeChanged {
			l.raise(condModeChanged)
		}
		l.raiseUnknown()
		if u.inquiryChanged {
			l.raise(condInquiryChanged)
		}
	}
	u.group.pay(owed)
	return old
}

// SetMask replaces the mask of the LUN. It notifies initiators that gain or lose access. For
// others a change between ReadWrite and ReadOnly applies from their next command on.
func (inv *Inventory) SetMask(id uint16, m Mask) error {
	inv.mu.Lock()
	defer inv.mu.Unlock()
	i, ok := inv.search(id)
	if !ok {
		return fmt.Errorf("LUN %d: not found", id)
	}
	inv.entries[i].mask = m
	for n := range inv.nexuses {
		at, seen := search(n.list(), id)
		if !seen {
			n.insert(inv.show(n, inv.entries[i]))
			continue
		}
		l, access := n.list()[at], m.access(n)
		if access == NoAccess {
			n.hidesSome.Store(true)
			n.remove(at)
		} else if was := l.readOnly.Swap(access == ReadOnly); was != (access == ReadOnly) {
			l.raise(condModeChanged) // the WP bit of MODE SENSE
		}
	}
	return nil
}

// access returns the access of the initiator of n.
func (m Mask) access(n *Nexus) Access {
	if m == nil {
		return ReadWrite
	}
	return m(n.name.initiator.name)
}

// show returns the view of a unit for n, or nil if the mask hides the unit.
//
// Preconditions: inv.mu is held.
func (inv *Inventory) show(n *Nexus, e maskedEntry) *itl {
	invariant.Held(&inv.mu)
	access := e.mask.access(n)
	if access == NoAccess {
		n.hidesSome.Store(true)
		return nil
	}
	l := &itl{nexus: n, id: e.LUN, unit: e.Unit}
	l.readOnly.Store(access == ReadOnly)
	l.raise(condPowerOn)
	l.enter()
	return l
}

// Unit returns the logical unit with that LUN, or nil.
func (inv *Inventory) Unit(id uint16) *Unit {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	if i, ok := inv.search(id); ok {
		return inv.entries[i].Unit
	}
	return nil
}

// has reports whether is selects a logical unit.
func (inv *Inventory) has(is func(*Unit) bool) bool {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	return slices.ContainsFunc(inv.entries, func(e maskedEntry) bool { return is(e.Unit) })
}

// isNamed reports whether naa is the NAA designator of the unit.
func (u *Unit) isNamed(naa []byte) bool { return bytes.Equal(naa, u.naa()) }

// An Entry is a logical unit of an Inventory.
type Entry struct {
	LUN  uint16
	Unit *Unit
}

// Entries returns all logical units in the order of their LUNs.
func (inv *Inventory) Entries() []Entry {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	list := make([]Entry, len(inv.entries))
	for i, e := range inv.entries {
		list[i] = e.Entry
	}
	return list
}

// PowerOn does what ResetUnit does for all logical units, and also what a loss of power does: it
// ends persistent reservations and registrations that APTPL does not keep (SPC-4, section 5.13.5).
func (inv *Inventory) PowerOn() {
	var shared sync.WaitGroup
	for _, e := range inv.Entries() {
		if m := e.Unit.group; m != nil {
			shared.Go(m.losePower)
		}
	}
	shared.Wait()
	for _, e := range inv.Entries() {
		if e.Unit.group == nil {
			e.Unit.reservations.losePower()
		}
		e.Unit.clock.Store(nil)
		e.Unit.reset(condPowerOn)
	}
}

// Close closes all logical units.
func (inv *Inventory) Close() error {
	var errs []error
	for _, e := range inv.Entries() {
		errs = append(errs, e.Unit.Close())
	}
	return errors.Join(errs...)
}
