package lun

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/lun/state"
)

// Statuses (SAM-5, section 5.3).
const (
	statusBusy                = 0x08
	statusReservationConflict = 0x18
)

var (
	condInvalidRelease         = Sense{keyIllegalRequest, 0x26, 0x04} // INVALID RELEASE OF PERSISTENT RESERVATION
	condNoRegistration         = Sense{keyIllegalRequest, 0x55, 0x04} // INSUFFICIENT REGISTRATION RESOURCES
	condReservationsPreempted  = Sense{keyUnitAttention, 0x2a, 0x03}
	condReservationsReleased   = Sense{keyUnitAttention, 0x2a, 0x04}
	condRegistrationsPreempted = Sense{keyUnitAttention, 0x2a, 0x05}
)

// reservations say which nexuses may use a unit. A unit has a persistent reservation, or one made
// with RESERVE, or none.
type reservations struct {
	fence atomic.Pointer[fence] // what commands are checked against; nil while nothing is reserved

	turn turn // of changes of persistent, which may have to be stored

	mu         sync.Mutex // guards the fields below; not held while they are stored
	persistent prState
	storing    *prState // what comes after persistent, while it is being stored
	legacy     *Nexus   // reserved the unit by RESERVE
	handedOver bool     // another unit has them now: see InheritFrom
	losses     int      // of power: see losePower
}

// A fence is a reservation as commands meet it. It does not change; a new one takes its place.
type fence struct {
	legacy     *Nexus // if nil the reservation is persistent
	typ        byte
	holder     nexusName
	registered map[nexusName]bool
}

// publish builds the fence.
//
// Preconditions: r.mu is held.
func (r *reservations) publish() {
	invariant.Held(&r.mu)
	s := &r.persistent
	if r.legacy == nil && s.typ == 0 {
		r.fence.Store(nil)
		return
	}
	registered := make(map[nexusName]bool, len(s.registrations))
	for _, reg := range s.registrations {
		registered[reg.nexus] = true
	}
	r.fence.Store(&fence{r.legacy, s.typ, s.holder, registered})
}

// restoreReservations loads what survived the loss of power.
func (u *Unit) restoreReservations() error {
	if u.opt.Reservations == nil {
		return nil
	}
	r := &u.reservations
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok, err := u.opt.Reservations.Get(u.opt.Identity.Serial)
	if !ok {
		return err
	}
	if r.persistent, err = e.decode(); err != nil {
		return err
	}
	r.publish()
	return nil
}

// keepsReservations reports whether those with APTPL survive the loss of power.
func (u *Unit) keepsReservations() bool { return u.opt.Reservations != nil || u.group != nil }

// losePower ends everything that APTPL does not keep.
func (r *reservations) losePower() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.persistent.aptpl {
		r.persistent = prState{}
	}
	r.persistent.generation = 0
	r.losses++
	r.publish()
}

// allowedByCDB reports whether persistent reservations of somebody else let this CDB pass,
// whatever the flags of its row (SBC-3, commands allowed in the presence of various reservations).
func (row *command) allowedByCDB(cdb []byte) bool {
	switch row.op {
	case opStartStop:
		return cdb[4]&0xf1 == 0x01 // START, and POWER CONDITION 0
	case opPreventAllow:
		return cdb[4]&0x03 == 0 // PREVENT
	}
	return false
}

// keepsOut reports whether a command from n meets RESERVATION CONFLICT.
func (f *fence) keepsOut(n *Nexus, row *command, cdb []byte) bool {
	return f.excludes(n, row.flags) && (f.legacy != nil || !row.allowedByCDB(cdb))
}

// excludes reports whether the reservation keeps out commands from n with these flags (SPC-4,
// section 5.13.1 and the table of each command set; for RESERVE SPC-2, section 5.5.1).
func (f *fence) excludes(n *Nexus, class flags) bool {
	if f.legacy != nil {
		return f.legacy != n && class&anyReserve == 0
	}
	t := prTypes[f.typ]
	switch {
	case class&anyPersistent != 0, class&reads != 0 && !t.exclusive,
		t.registrants && f.registered[n.name], !t.all && f.holder == n.name:
		return false
	}
	return true
}

// conflict ends c with RESERVATION CONFLICT and returns false.
func (c *Command) conflict() bool {
	c.Status = statusReservationConflict
	c.failed = true
	return false
}

// OnPreempt sets what PREEMPT AND ABORT does about the commands of n. The function ends those for
// the logical unit at lun, except the command except, and returns when nothing more of them will
// be read, written or sent. It runs on the goroutine of the command that preempts, without a
// lock; n may be closed by then. If that command came through another gateway, it runs on another goroutine, and
// except is nil. Set it before the first Begin.
func (n *Nexus) OnPreempt(abort func(lun [8]byte, except *Command)) { n.abort.Store(&abort) }

// dropReserve ends a reservation by RESERVE of n, whose commands ended.
func (u *Unit) dropReserve(n *Nexus) {
	u.dropReserveOf(func(holder *Nexus) bool { return holder == n })
}

// dropReserveOf ends a reservation by RESERVE if match selects its holder.
func (u *Unit) dropReserveOf(match func(holder *Nexus) bool) {
	r := &u.reservations
	if f := r.fence.Load(); f == nil || f.legacy == nil || !match(f.legacy) {
		return // does not wait for the lock, which may be held during a sync
	}
	r.mu.Lock()
	had := r.legacy
	if had == nil || !match(had) {
		r.mu.Unlock()
		return
	}
	r.legacy = nil
	r.publish()
	r.mu.Unlock()
	u.opt.Events(ReservationEndedEvent{
		Target: had.port.TargetName, Serial: u.opt.Identity.Serial, Initiator: had.port.InitiatorName,
	})
}

// endReserve executes RESERVE(6) and RESERVE(10) of the whole unit for this initiator (SPC-2,
// sections 7.21 and 7.22).
func endReserve(_ *Unit, c *Command) { c.changeLegacy((*Unit).reserve) }

// endRelease executes RELEASE(6) and RELEASE(10) (SPC-2, sections 7.16 and 7.17). It leaves a
// reservation of somebody else alone, which is not an error.
func endRelease(_ *Unit, c *Command) { c.changeLegacy((*Unit).release) }

// changeLegacy calls change with reservations.mu held, unless nexuses are registered, and reports
// that the reservation by RESERVE changed.
func (c *Command) changeLegacy(change func(*Unit, *Command) bool) {
	u, r, changed := c.unit, &c.unit.reservations, false
	r.mu.Lock()
	s := &r.persistent
	if r.storing != nil && len(s.registrations) == 0 { // its registrations are in force soon
		s = r.storing
	}
	if len(s.registrations) == 0 {
		changed = change(u, c)
	} else if !s.compatible(c.nexus.name) {
		c.conflict()
	}
	r.mu.Unlock()
	if changed {
		u.opt.Events(ReservationChangedEvent{
			Target: c.nexus.port.TargetName, LUN: c.itl.id, Command: c.row.name, Initiator: c.nexus.port.InitiatorName,
		})
	}
}

// reserve reserves the unit for the nexus of c.
//
// Preconditions: u.reservations.mu is held.
func (u *Unit) reserve(c *Command) (changed bool) {
	r := &u.reservations
	invariant.Held(&r.mu)
	switch r.legacy {
	case nil:
	case c.nexus:
		return false
	default: // since Begin
		return c.conflict()
	}
	r.legacy = c.nexus
	r.publish()
	u.mu.Lock()
	_, seen := u.seen[c.itl]
	u.mu.Unlock()
	if !seen { // since Begin, and dropReserve may have found nothing
		r.legacy = nil
		r.publish()
		return c.fail(condNoLUN)
	}
	return true
}

// release ends the reservation of the nexus of c.
//
// Preconditions: u.reservations.mu is held.
func (u *Unit) release(c *Command) (changed bool) {
	r := &u.reservations
	invariant.Held(&r.mu)
	if changed = r.legacy == c.nexus; changed {
		r.legacy = nil
		r.publish()
	}
	return changed
}

// compatible reports whether RESERVE and RELEASE of n do nothing and are GOOD (SPC-4, section
// 5.13.3). Otherwise they conflict with registrations.
func (s *prState) compatible(n nexusName) bool {
	return s.holds(n) || prTypes[s.typ].registrants && s.find(n) >= 0
}

// reservedByReserve reports whether PERSISTENT RESERVE IN and OUT conflict with a RESERVE, even
// one of the same initiator (SPC-2, section 5.5.1).
func (r *reservations) reservedByReserve() bool {
	f := r.fence.Load()
	return f != nil && f.legacy != nil
}

// A ReservationInfo lists the registrations and reservations of a unit.
type ReservationInfo struct {
	Generation    uint32 // PRGENERATION
	APTPL         bool   // it survives a restart
	Type          byte   // of the persistent reservation (SPC-4, section 5.13.4); 0: no reservation
	Registrations []Registration
	Legacy        string // the initiator port that reserved it with RESERVE; empty: none
}

// A Registration is one that an initiator made with PERSISTENT RESERVE OUT.
type Registration struct {
	Initiator  string // initiator port name (RFC 7143, section 4.2.7)
	TargetPort uint16 // relative target port identifier
	Key        uint64
	Holder     bool // of the reservation
}

// Reservation returns the present registrations and reservations.
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

// ClearReservation ends all registrations and reservations, as CLEAR (SPC-4, section 5.13.11.2.7)
// and a reset do, and notifies the registered nexuses: RESERVATIONS PREEMPTED. It reports whether
// any existed. An error leaves the persistent ones as they were.
func (u *Unit) ClearReservation() (cleared bool, err error) {
	if u.group != nil {
		return u.group.clear()
	}
	gone, cleared, err := u.reservations.clear(&u.opt)
	u.mu.Lock()
	defer u.mu.Unlock()
	for l := range u.seen {
		if slices.Contains(gone, l.nexus.name) {
			l.raise(condReservationsPreempted)
		}
	}
	return cleared, err
}

// clear ends all registrations and reservations, and returns the registered nexuses.
func (r *reservations) clear(o *Options) (gone []nexusName, cleared bool, err error) {
	p, err := r.turn.take(nil, o.Reservations)
	if err != nil {
		return nil, false, err
	}
	defer r.turn.give()
	r.mu.Lock()
	next, none := r.persistent, r.legacy == nil && len(r.persistent.registrations) == 0
	gone = next.remove(func(registration) bool { return true })
	r.mu.Unlock()
	if none {
		return nil, false, nil
	}
	next.generation++
	if err := r.store(o, p, &next, func() { r.legacy = nil }); err != nil {
		return nil, false, err
	}
	return gone, true, nil
}

// errReplaced is the error of a change of reservations that another unit has taken over.
var errReplaced = errors.New("the unit was replaced")

// store makes next the persistent reservations, after they are stored if they have to survive the
// loss of power. with, which may be nil, changes more at the same time, with r.mu held. After an
// error the old ones are in force, and stay so when the file system answers later.
//
// Preconditions: the caller has the turn. r.mu is not held.
func (r *reservations) store(o *Options, p state.Patience, next *prState, with func()) (err error) {
	r.mu.Lock()
	losses := r.losses
	r.storing = next
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.storing = nil; err != nil && r.handedOver {
			err = errReplaced
		}
	}()
	p.Commit = func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.handedOver || r.losses != losses {
			return false
		}
		r.persistent = *next
		if with != nil {
			with()
		}
		r.publish()
		return true
	}
	return o.keepReservations(next, p)
}
