package lun

import (
	"cmp"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/iser-target/iser-target/lun/invariant"
)

// A Port names both ends of an I_T nexus. A portal group is a target port (RFC 7143, section
// 4.4.2), and its tag is the relative target port identifier.
type Port struct {
	InitiatorName string
	ISID          [6]byte
	TargetName    string
	TPGT          uint16 // one of the tags of the inventory
}

// A Nexus is the relation between an initiator port and a target port (I_T nexus).
type Nexus struct {
	inv       *Inventory
	port      Port
	name      nexusName
	luns      atomic.Pointer[[]*itl] // ascending by id; a new slice takes its place
	hidesSome atomic.Bool            // a mask hides other units
	level     uint8                  // iSCSIProtocolLevel
	transport Transport
	shard     uint8 // of the counts of units
	counts    *nexusCounts
	abort     atomic.Pointer[func(lun [8]byte, except *Command)]
	event     atomic.Pointer[func(lun [8]byte, sense []byte)]
	others    atomic.Pointer[FindNexus]
}

// A FindNexus returns a new nexus between the initiator and another target whose inventory has what it looks for,
// if the initiator could log in to that target as it has logged in to this one, else nil. The caller closes the nexus.
type FindNexus func(has func(*Inventory) bool) *Nexus

// SetOthers lets EXTENDED COPY reach logical units of other targets. find may be called at any time, by several commands at once.
func (n *Nexus) SetOthers(find FindNexus) { n.others.Store(&find) }

// An itl is a logical unit as one initiator port sees it (I_T_L nexus).
type itl struct {
	nexus    *Nexus
	id       uint16
	unit     *Unit
	readOnly atomic.Bool   // because of the mask
	due      atomic.Uint32 // of dueBit
	reached  atomic.Uint32 // thresholds that condSoftThreshold is about: bits by threshold

	prevents bool // guarded by unit.mu: the medium must not be removed
	copies   copies
	echo     echoBuffer
}

// nexuses counts the nexuses that NewNexus made.
var nexuses atomic.Uint32

// NewNexus returns a nexus with the units that the masks let the initiator see. The first command
// for each of them meets a unit attention: POWER ON, RESET, OR BUS DEVICE RESET OCCURRED.
func (inv *Inventory) NewNexus(p Port) *Nexus {
	inv.mu.Lock()
	defer inv.mu.Unlock()
	n := &Nexus{
		inv: inv, port: p, level: 1,
		shard: uint8(nexuses.Add(1) % countShards), counts: &nexusCounts{},
		name: nexusName{initiatorPort{strings.ToLower(p.InitiatorName), p.ISID}, p.TPGT},
	}
	var list []*itl
	for _, e := range inv.entries {
		if l := inv.show(n, e); l != nil {
			list = append(list, l)
		}
	}
	n.luns.Store(&list)
	inv.nexuses[n] = struct{}{}
	return n
}

// Close ends the nexus and its reservations by RESERVE. Registrations and persistent reservations
// remain.
func (n *Nexus) Close() {
	n.inv.mu.Lock()
	delete(n.inv.nexuses, n) // its list changes no more
	n.inv.mu.Unlock()
	var copied []*Unit
	for _, l := range n.list() {
		copied = append(copied, l.leave()...)
	}
	endAll(copied)
}

// enter makes the unit know the nexus.
func (l *itl) enter() {
	l.unit.mu.Lock()
	defer l.unit.mu.Unlock()
	l.unit.seen[l] = struct{}{}
}

// leave undoes enter: the unit forgets the nexus. It ends the copies of the nexus that continue after their commands, and
// returns the units to which they may write until endAll returns.
func (l *itl) leave() (copied []*Unit) {
	copied = l.copies.haltBackground()
	l.unit.mu.Lock()
	delete(l.unit.seen, l)
	l.unit.mu.Unlock()
	l.unit.dropReserve(l.nexus) // after that: see Unit.reserve
	return copied
}

// list returns the logical units that the initiator sees, ascending by LUN.
func (n *Nexus) list() []*itl { return *n.luns.Load() }

// changeList sets the logical units that the initiator sees. All of them get a unit attention
// about it, and the first one an Asynchronous Message.
//
// Preconditions: n.inv.mu is held.
func (n *Nexus) changeList(list []*itl) {
	invariant.Held(&n.inv.mu)
	n.luns.Store(&list)
	for i, l := range list {
		l.raise(condLUNsChanged)
		if i == 0 {
			l.report(condLUNsChanged)
		}
	}
}

// insert adds l, which may be nil, to what the initiator sees.
func (n *Nexus) insert(l *itl) {
	if l != nil {
		at, _ := search(n.list(), l.id)
		n.changeList(slices.Insert(slices.Clone(n.list()), at, l))
	}
}

// remove takes the unit at that place of list away from the initiator.
func (n *Nexus) remove(at int) {
	n.list()[at].leave()
	n.changeList(slices.Delete(slices.Clone(n.list()), at, at+1))
}

// search returns where the LUN is in list, or where it would be inserted.
func search(list []*itl, id uint16) (i int, found bool) {
	return slices.BinarySearchFunc(list, id, func(l *itl, id uint16) int { return cmp.Compare(l.id, id) })
}

// find returns the logical unit that a LUN field addresses, or nil.
func (n *Nexus) find(lun [8]byte) *itl {
	id, ok := DecodeLUN(lun)
	if !ok {
		return nil
	}
	list := n.list()
	if i, ok := search(list, id); ok {
		return list[i]
	}
	return nil
}

// LUNs returns the LUNs that the initiator sees, ascending.
func (n *Nexus) LUNs() []uint16 {
	list := n.list()
	ids := make([]uint16, len(list))
	for i, l := range list {
		ids[i] = l.id
	}
	return ids
}

// LUNExists reports whether the LUN field addresses a logical unit.
func (n *Nexus) LUNExists(lun [8]byte) bool { return n.find(lun) != nil }

// SameUnit reports whether both LUN fields address the same logical unit.
func (n *Nexus) SameUnit(a, b [8]byte) bool {
	l, m := n.find(a), n.find(b)
	return l != nil && m != nil && l.unit == m.unit
}

// HasOwnTaskSet reports whether the task set of the logical unit has no commands of other nexuses (TST 001b in the
// Control mode page: SPC-4, section 7.5.8).
func (n *Nexus) HasOwnTaskSet(lun [8]byte) bool {
	l := n.find(lun)
	return l != nil && l.unit.mode.Load()&modeTST != 0
}

// ReadOnly reports whether a mask lets the initiator only read the logical unit.
func (n *Nexus) ReadOnly(lun [8]byte) bool {
	l := n.find(lun)
	return l != nil && l.readOnly.Load()
}

// SeesAll reports whether no mask hides a logical unit from the initiator.
func (n *Nexus) SeesAll() bool { return !n.hidesSome.Load() }

// targets returns the relative identifiers of all target ports that lead to u, ascending.
func (n *Nexus) targets(u *Unit) []uint16 { return n.inv.ports.Load().of(u) }

// SetProtocolLevel sets the iSCSIProtocolLevel of the session, by default 1: level 2 has more
// task management functions. Call it before the first command.
func (n *Nexus) SetProtocolLevel(level uint8) { n.level = level }

// ResetUnit does what LOGICAL UNIT RESET does beyond the end of the tasks: it starts a stopped
// unit, restores the saved mode parameters, allows the removal of the medium, ends a RESERVE, and
// notifies all nexuses (SAM-5, section 6.3.3: the one that asked, too). With others false, and while
// other initiators see the unit, the reset reaches only the nexuses of the same initiator: it ends
// their RESERVE, allows the removal that they prevented, and notifies them.
func (n *Nexus) ResetUnit(lun [8]byte, others bool) {
	if l := n.find(lun); l != nil {
		l.reset(others)
	}
}

// ResetTarget does what ResetUnit does, for all logical units that the initiator sees (RFC 7143,
// section 11.5.1).
func (n *Nexus) ResetTarget(others bool) {
	for _, l := range n.list() {
		l.reset(others)
	}
}

// reset does what ResetUnit does.
func (l *itl) reset(others bool) {
	if others || l.hasUnitAlone() {
		l.unit.reset(condReset)
		return
	}
	u, initiator := l.unit, l.nexus.name.initiator.name
	own := func(n *Nexus) bool { return n.name.initiator.name == initiator }
	u.dropReserveOf(own)
	u.endBackground(own)
	u.mu.Lock()
	defer u.mu.Unlock()
	for o := range u.seen {
		if own(o.nexus) {
			o.prevents = false
			o.echo.set(nil)
			o.raise(condReset)
		}
	}
}

// endBackground ends the copies that continue after their commands for u, of the nexuses that match selects, and returns once they
// write nothing more.
func (u *Unit) endBackground(match func(*Nexus) bool) {
	u.mu.Lock()
	var copied []*Unit
	for l := range u.seen {
		if match(l.nexus) {
			copied = append(copied, l.copies.haltBackground()...)
		}
	}
	u.mu.Unlock()
	endAll(copied)
}

// hasUnitAlone reports whether the initiator may change the state of the unit, and no other
// initiator is there to see it.
func (l *itl) hasUnitAlone() bool {
	if l.readOnly.Load() {
		return false
	}
	l.unit.mu.Lock()
	defer l.unit.mu.Unlock()
	for o := range l.unit.seen {
		if o.nexus.name.initiator.name != l.nexus.name.initiator.name {
			return false
		}
	}
	return true
}

// DecodeLUN returns the LUN that a LUN field addresses: peripheral device addressing on bus 0 or
// flat space addressing, on one level (SAM-5, section 4.7).
func DecodeLUN(f [8]byte) (id uint16, ok bool) {
	if [6]byte(f[2:]) != [6]byte{} {
		return 0, false
	}
	switch f[0] >> 6 {
	case 0:
		return uint16(f[1]), f[0] == 0
	case 1:
		return uint16(f[0]&0x3f)<<8 | uint16(f[1]), true
	}
	return 0, false
}

// EncodeLUN returns the LUN field of a PDU that addresses a LUN (SAM-5, section 4.7). Small LUNs
// have the older form.
func EncodeLUN(id uint16) (f [8]byte) {
	if f[0], f[1] = byte(id>>8), byte(id); id > 0xff {
		f[0] |= 1 << 6
	}
	return f
}
