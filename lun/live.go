package lun

import (
	"context"
	"fmt"
	"slices"

	"github.com/iser-target/iser-target/backend"
)

// What an operator can look at and change while initiators are there.

// NewAbsent makes a logical unit whose store is not there yet. It says who it is,
// and what else needs the medium or changes the unit is answered with NOT READY. Its
// place is taken by Inventory.Replace. The block size is 512 or 4096 octets, and 512
// if it is 0.
func NewAbsent(blockSize uint32, o Options) (*Unit, error) {
	if blockSize == 0 {
		blockSize = 512
	}
	// A unit keeps what its initiators set. This one is set nothing, and what the
	// store's unit has kept is for that one to find.
	o.Reservations, o.Settings, o.Sanitizations, o.Sanitize = nil, nil, nil, false
	u, err := New(absentStore{blockSize}, o)
	if err == nil {
		u.absent = condNoStore
	}
	return u, err
}

// NewOpening is NewAbsent for a store that is about to be there: initiators are told to try
// again, not that somebody has to come.
func NewOpening(blockSize uint32, o Options) (*Unit, error) {
	u, err := NewAbsent(blockSize, o)
	if err == nil {
		u.absent = condBecomingReady
	}
	return u, err
}

// absentStore is what stands for a store that is not there.
type absentStore struct{ blockSize uint32 }

func (s absentStore) Info() backend.Info {
	return backend.Info{Size: int64(s.blockSize), BlockSize: s.blockSize, PhysicalBlockSize: s.blockSize}
}
func (absentStore) ReadAt([]byte, int64) error       { return backend.ErrClosed }
func (absentStore) WriteAt([]byte, int64) error      { return backend.ErrClosed }
func (absentStore) WriteDurable([]byte, int64) error { return backend.ErrClosed }
func (absentStore) Sync() error                      { return nil }
func (absentStore) Discard(int64, int64) error       { return backend.ErrClosed }
func (absentStore) Zero(int64, int64) error          { return backend.ErrClosed }
func (absentStore) Close() error                     { return nil }

// Info is that of the store, with the size that it has now.
func (u *Unit) Info() backend.Info {
	info := u.info
	info.Size = u.Size()
	return info
}

// Identity is who the unit is.
func (u *Unit) Identity() Identity { return u.opt.Identity }

// Absent tells that the unit is one of NewAbsent or NewOpening.
func (u *Unit) Absent() bool { return u.absent != condNone }

// Status is "ready", or why the medium cannot be used, in a few words.
func (u *Unit) Status() string {
	switch k := u.readiness(); {
	case u.absent == condBecomingReady:
		return "store is being opened"
	case u.Absent():
		return "store is absent"
	case u.sanitizer.state.Load() == sanitizeRunning:
		return "sanitize in progress"
	case k == condSanitizeFailed:
		return "sanitize failed"
	case k == condNoMedium:
		return "medium ejected"
	case k == condNotReadyStopped:
		return "stopped"
	}
	return "ready"
}

// allocateStep is how many octets are allocated at once: a Resize waits for that.
const allocateStep = 128 << 20

// Allocate has the medium take space for all octets from that one to the end, as it is
// when it begins, while initiators use the unit; report hears how far it has come, often.
// When ctx ends it stops soon, with the cause, and what it has taken stays.
func (u *Unit) Allocate(ctx context.Context, from int64, report func(backend.Progress)) error {
	a, ok := u.store.(backend.Allocator)
	if !ok {
		return backend.ErrNoAllocate
	}
	p := backend.Progress{Phase: backend.Preallocating, Total: max(u.Size()-from, 0)}
	for p.Done < p.Total {
		n := min(p.Total-p.Done, allocateStep)
		if err := a.Allocate(from+p.Done, n); err != nil {
			return err
		}
		p.Done += n
		report(p)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// Resize gives the unit and its store another size, a multiple of the block size in
// octets, and lets all initiators hear of it. What is behind the end of a smaller
// unit is lost. A unit of that size stays as it is. An error leaves the size as it was,
// unless it says otherwise.
func (u *Unit) Resize(size int64) error {
	r, ok := u.store.(backend.Resizer)
	switch {
	case !ok:
		return backend.ErrFixedSize
	case u.readOnly:
		return backend.ErrReadOnly
	case size <= 0 || size&int64(u.info.BlockSize-1) != 0:
		return fmt.Errorf("size %d: want a positive multiple of the block size %d", size, u.info.BlockSize)
	}
	u.sanitizer.mu.Lock() // none begins, with the size as it was
	defer u.sanitizer.mu.Unlock()
	if u.sanitizer.state.Load() == sanitizeRunning {
		return errSanitizing
	}
	old, next := u.blocks.Load(), uint64(size)>>u.shift
	if next < old { // before there is less: commands that come now are refused
		u.blocks.Store(next)
	}
	err := r.Resize(size)
	next = uint64(u.store.Info().Size) >> u.shift // which after an error may be either
	u.blocks.Store(next)
	if next != old {
		u.raise(attentionCapacity, nil)
	}
	return err
}

// Detach ends a sanitize and returns the store, open, of a unit that has been replaced.
// Commands that the unit still has change nothing there any more.
func (u *Unit) Detach() backend.Store {
	u.sanitizer.close()
	u.ranges.exclude(^stripeSet(0))
	u.detached.Store(true)
	u.ranges.admit(^stripeSet(0))
	return u.store
}

// Succeed makes u, which nobody knows yet, the successor of a unit of the same identity. To
// open a store anew is neither a loss of power nor a reset: registrations and persistent
// reservations remain (SPC-4, section 5.13.5), and so do the mode parameters and the states
// of target port groups that initiators have set and not saved. Who has disabled the cache,
// above all, counts on that. A sync that has failed, the one when the old store closed
// included, is as final as in the store: what was written before may be lost. The old unit,
// which has been replaced, takes no more reservations. An absent unit hands all of that on.
func (u *Unit) Succeed(old *Unit) {
	if old.Absent() {
		old = old.before
	}
	if old == nil || u.opt.Identity != old.opt.Identity {
		return
	}
	if u.Absent() {
		u.before = old
		return
	}
	if old.unsynced.Load() {
		u.opt.Logger.Error("syncs go on to fail: what was written before the store was opened anew may be lost", "event", "medium",
			"naa", u.opt.Identity.Serial)
		u.unsynced.Store(true)
	}
	r := &old.reservations
	r.mu.Lock()
	s := r.persistent
	r.over = true
	r.mu.Unlock()
	next := &u.reservations
	next.mu.Lock()
	next.persistent = s
	next.publish()
	next.mu.Unlock()

	both, was := u.modeMutable&old.modeMutable, old.mode.Load()
	u.mode.Store(u.mode.Load()&^both | was&both)
	u.modeNews = u.mode.Load() != was || u.readOnly != old.readOnly
	u.access.Store(old.access.Load())
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

// targets are the relative identifiers of all target ports, ascending.
func (n *Nexus) targets() []uint16 { return *n.inv.ports.Load() }

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
		if u.modeNews {
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
			n.blind.Store(true)
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

// Unit is the logical unit with that LUN, or nil.
func (inv *Inventory) Unit(id uint16) *Unit {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	if i, ok := slices.BinarySearch(inv.ids, id); ok {
		return inv.units[i]
	}
	return nil
}

// LUNs are those that the initiator sees, ascending.
func (n *Nexus) LUNs() []uint16 {
	list := n.list()
	ids := make([]uint16, len(list))
	for i, l := range list {
		ids[i] = l.id
	}
	return ids
}

// CutOff makes commands that are under way fail as soon as the store is closed as
// those do that come from now on: with LOGICAL UNIT NOT SUPPORTED. It is for a unit
// that no inventory has any more.
func (u *Unit) CutOff() { u.gone.Store(true) }

// A ReservationInfo is who has registered with a unit and who has reserved it.
type ReservationInfo struct {
	Generation    uint32 // PRGENERATION
	APTPL         bool   // it survives a restart
	Type          byte   // of the persistent reservation (SPC-4, section 5.13.4); 0: there is none
	Registrations []Registration
	Legacy        string // the initiator port that has reserved it with RESERVE; empty: none
}

// A Registration is one of PERSISTENT RESERVE OUT.
type Registration struct {
	Initiator  string // initiator port name (RFC 7143, section 4.2.7)
	TargetPort uint16 // relative target port identifier
	Key        uint64
	Holder     bool // of the reservation
}

// Reservation is what there is now.
func (u *Unit) Reservation() ReservationInfo {
	r := &u.reservations
	r.mu.Lock()
	defer r.mu.Unlock()
	s := &r.persistent
	info := ReservationInfo{Generation: s.generation, APTPL: s.aptpl, Type: s.typ}
	for _, reg := range s.registrations {
		info.Registrations = append(info.Registrations, Registration{
			reg.nexus.initiator.String(), reg.nexus.target, reg.key, s.holds(reg.nexus),
		})
	}
	if r.legacy != nil {
		info.Legacy = r.legacy.name.initiator.String()
	}
	return info
}

// ClearReservation ends all registrations and reservations, as CLEAR (SPC-4, section
// 5.13.11.2.7) and a reset do, and lets those hear of it who had registered:
// RESERVATIONS PREEMPTED. It tells whether there was any. An error leaves the
// persistent ones as they were.
func (u *Unit) ClearReservation() (cleared bool, err error) {
	gone, cleared, err := u.reservations.clear(u.opt)
	u.mu.Lock()
	defer u.mu.Unlock()
	for l := range u.seen {
		if slices.Contains(gone, l.nexus.name) {
			l.raise(attentionReservationsPreempted)
		}
	}
	return cleared, err
}

// clear ends all there is, and returns who had registered.
func (r *reservations) clear(o Options) (gone []nexusName, cleared bool, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.legacy == nil && len(r.persistent.registrations) == 0 {
		return nil, false, nil
	}
	next := r.persistent
	gone = next.remove(func(registration) bool { return true })
	next.generation++
	if o.Reservations != nil {
		if err := o.Reservations.save(o.Identity.Serial, &next); err != nil {
			return nil, false, err
		}
	}
	r.persistent, r.legacy = next, nil
	r.publish()
	return gone, true, nil
}
