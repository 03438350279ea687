package lun

import (
	"encoding/binary"
	"slices"
)

// Service actions of PERSISTENT RESERVE IN and OUT.
const (
	prReadKeys           = 0x00
	prReadReservation    = 0x01
	prReportCapabilities = 0x02
	prReadFullStatus     = 0x03

	prRegister          = 0x00
	prReserve           = 0x01
	prRelease           = 0x02
	prClear             = 0x03
	prPreempt           = 0x04
	prPreemptAndAbort   = 0x05
	prRegisterAndIgnore = 0x06
	prRegisterAndMove   = 0x07
)

// prOuts are the service actions of PERSISTENT RESERVE OUT (SPC-4, section 6.16.2). A nexus that
// is not registered, or gives another key, meets RESERVATION CONFLICT, except that apply checks
// that itself where anyone is set.
var prOuts = [...]struct {
	name   string
	apply  func(*prOut) bool
	anyone bool
	counts bool // in PRGENERATION
	aptpl  int  // offset of the byte with the APTPL bit, or 0 without one
	// changes is the flag of the row. An initiator that may only read can register, and release what
	// it holds: it may be a node of a cluster that votes, or that reads behind a reservation of
	// registrants only. See also prOut.reader.
	changes bool
}{
	prRegister:          {"REGISTER", (*prOut).register, true, true, prFlags, false},
	prReserve:           {"RESERVE", (*prOut).reserve, false, false, 0, true},
	prRelease:           {"RELEASE", (*prOut).release, false, false, 0, false},
	prClear:             {"CLEAR", (*prOut).clear, false, true, 0, true},
	prPreempt:           {"PREEMPT", (*prOut).preempt, false, true, 0, true},
	prPreemptAndAbort:   {"PREEMPT AND ABORT", (*prOut).preempt, false, true, 0, true},
	prRegisterAndIgnore: {"REGISTER AND IGNORE EXISTING KEY", (*prOut).register, true, true, prFlags, false},
	prRegisterAndMove:   {"REGISTER AND MOVE", (*prOut).registerAndMove, false, true, prMoveFlags, true},
}

// A prOut is a PERSISTENT RESERVE OUT command and its effects.
type prOut struct {
	*Command
	from    nexusName
	key     uint64 // RESERVATION KEY
	saKey   uint64 // SERVICE ACTION RESERVATION KEY
	reader  bool   // the initiator may only read: it changes only registrations and reservations of its own
	specIPT bool
	allTgPt bool
	aptpl   bool
	ports   []initiatorPort // that TransportIDs name
	portsAt []int           // where in the parameter list each of them is named

	unreg      bool
	targetPort uint16 // RELATIVE TARGET PORT IDENTIFIER

	before    prState // of the unit
	state     prState // what comes after; apply changes it
	notices   []notice
	preempted []nexusName // lost their registration to PREEMPT
}

// A notice is a unit attention for an I_T nexus.
type notice struct {
	nexus     nexusName
	attention Sense
}

// notify adds a unit attention for all of the nexuses, except that of this command.
func (o *prOut) notify(nexuses []nexusName, attention Sense) {
	for _, n := range nexuses {
		if n != o.from {
			o.notices = append(o.notices, notice{n, attention})
		}
	}
}

// Offsets in the parameter list, and bits of its flags (SPC-4, sections 6.16.3 and 6.16.4).
const (
	prListLen  = 24 // without TransportIDs
	prFlags    = 20 // SPEC_I_PT, ALL_TG_PT and APTPL
	prPortsLen = 24 // with SPEC_I_PT; TransportIDs follow

	// REGISTER AND MOVE
	prMoveFlags   = 17 // UNREG and APTPL
	prMovePort    = 18 // RELATIVE TARGET PORT IDENTIFIER
	prMovePortLen = 20 // a TransportID follows

	specIPTBit, allTgPtBit, unregBit, aptplBit = 3, 2, 1, 0
)

func beginPROut(u *Unit, c *Command) bool {
	n := binary.BigEndian.Uint32(c.CDB[5:])
	switch {
	case u.reservations.reservedByReserve():
		return c.conflict()
	case !u.group.admits():
		return c.busy()
	case n < prListLen || n > MaxParameterList:
		return c.fail(condListLength)
	}
	c.DataOut, c.Whole = uint64(n), true
	return true
}

// consumePROut executes PERSISTENT RESERVE OUT with its parameter list.
func consumePROut(u *Unit, c *Command, p []byte, _ uint64) bool {
	be := binary.BigEndian
	o := prOut{
		Command: c, from: c.nexus.name, key: be.Uint64(p), saKey: be.Uint64(p[8:]), reader: c.itl.readOnly.Load(),
	}
	switch {
	case !o.parse(p):
		return false
	case u.group != nil:
		return u.group.executeOut(&o, p)
	case !o.execute():
		return false
	}
	o.inForce()
	return true
}

// inForce does what follows from o, which is in force.
func (o *prOut) inForce() {
	c := o.Command
	c.unit.opt.Events(ReservationChangedEvent{
		Target: c.nexus.port.TargetName, LUN: c.itl.id, Command: c.row.name,
		Initiator: o.from.initiator.String(), TPGT: o.from.target,
	})
	c.unit.followUp(o.effects(), c)
}

// effects returns what the change means to the nexuses.
func (o *prOut) effects() prEffects {
	e := prEffects{notices: o.notices, aborts: o.row.sa == prPreemptAndAbort}
	if e.aborts {
		e.aborted = o.preempted
	}
	return e
}

// prEffects are what a change of registrations and reservations means to the nexuses of a unit.
type prEffects struct {
	notices []notice
	aborts  bool        // it is a PREEMPT AND ABORT
	aborted []nexusName // whose commands that ends
}

// followUp does what follows from a change that is in force: it raises unit attentions, and ends the commands of preempted
// nexuses, except c. c is nil if the change came through another gateway. When followUp returns, those commands write nothing more.
func (u *Unit) followUp(e prEffects, c *Command) {
	if stop := u.notify(e); e.aborts {
		u.endCommands(stop, c)
	}
}

// endCommands does what PREEMPT AND ABORT does about the commands of preempted nexuses.
func (u *Unit) endCommands(stop []*itl, c *Command) {
	u.endCopies()
	for _, l := range stop {
		endAll(l.copies.haltBackground())
	}
	for _, l := range stop {
		if abort := l.nexus.abort.Load(); abort != nil {
			(*abort)(EncodeLUN(l.id), c)
		}
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, l := range stop {
		l.prevents = false // they no longer prevent the removal of the medium (SPC-4, section 5.13.11.2.6)
	}
}

// notify raises the unit attentions, and returns the nexuses whose commands have to end.
func (u *Unit) notify(e prEffects) (stop []*itl) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for l := range u.seen {
		for _, n := range e.notices {
			if n.nexus == l.nexus.name {
				l.raise(n.attention)
				if now := l.nexus.find(EncodeLUN(l.id)); now != nil && now != l { // another unit replaced u
					now.raise(n.attention)
				}
			}
		}
		if slices.Contains(e.aborted, l.nexus.name) {
			stop = append(stop, l)
		}
	}
	return stop
}

// parse decodes the rest of the parameter list.
func (o *prOut) parse(p []byte) bool {
	sa := o.row.sa
	lengthAt, move := 0, sa == prRegisterAndMove
	o.specIPT = !move && p[prFlags]>>specIPTBit&1 != 0
	o.allTgPt = !move && p[prFlags]>>allTgPtBit&1 != 0
	switch {
	case move:
		lengthAt = prMovePortLen
		o.unreg = p[prMoveFlags]>>unregBit&1 != 0
		o.targetPort = binary.BigEndian.Uint16(p[prMovePort:])
	case o.specIPT && sa != prRegister:
		return o.failListBit(prFlags, specIPTBit)
	case o.specIPT && o.reader: // registers others
		return o.fail(condWriteProtected)
	case o.specIPT:
		lengthAt = prPortsLen
	case len(p) != prListLen:
		return o.fail(condListLength)
	}
	if at := prOuts[sa].aptpl; at != 0 {
		o.aptpl = p[at]>>aptplBit&1 != 0
		if o.aptpl && !o.unit.keepsReservations() {
			return o.failListBit(at, aptplBit)
		}
	}
	if lengthAt == 0 {
		return true
	}
	at := lengthAt + 4
	if len(p) < at || uint64(binary.BigEndian.Uint32(p[lengthAt:])) != uint64(len(p)-at) {
		return o.fail(condListLength)
	}
	for at < len(p) {
		id, n, wrong := parseTransportID(p[at:])
		if wrong != noField {
			return o.failList(at + wrong)
		}
		ports := []initiatorPort{id.port}
		if id.device {
			ports = o.unit.portsOf(id.port.name)
		}
		if len(ports) == 0 || id.device && move {
			return o.failList(at)
		}
		for _, p := range ports {
			o.ports, o.portsAt = append(o.ports, p), append(o.portsAt, at)
		}
		at += n
	}
	return true
}

// portsOf returns the ports of an initiator that are logged in: a unit knows no others.
func (u *Unit) portsOf(initiator string) (ports []initiatorPort) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for l := range u.seen {
		if p := l.nexus.name.initiator; p.name == initiator && !slices.Contains(ports, p) {
			ports = append(ports, p)
		}
	}
	return ports
}

// execute changes the state of the unit. State that has to survive the loss of power is on stable
// storage before it is in force.
func (o *prOut) execute() bool {
	r := &o.unit.reservations
	p, err := r.turn.take(o.Command, o.unit.opt.Reservations)
	if err != nil {
		return o.failStore(err)
	}
	defer r.turn.give()
	if !o.decide() {
		return false
	}
	if err := r.store(&o.unit.opt, p, &o.state, nil); err != nil {
		return o.failStore(err)
	}
	return true
}

// decide sets the next state of the unit. It fails c if the command has to change nothing.
func (o *prOut) decide() bool {
	r, row := &o.unit.reservations, &prOuts[o.row.sa]
	r.mu.Lock()
	defer r.mu.Unlock()
	o.before, o.state = r.persistent, r.persistent
	i := o.state.find(o.from)
	if r.handedOver {
		return o.failClosed()
	}
	if r.legacy != nil || !row.anyone && (i < 0 || o.state.registrations[i].key != o.key) {
		return o.conflict()
	}
	if !row.apply(o) {
		return false
	}
	if row.counts {
		o.state.generation++
	}
	return true
}

// put registers a nexus with the key of the service action. No initiator can take the places of all
// others: each has Options.Registrations for itself. An initiator that is registered can change its
// keys even where a lower bound came later.
func (o *prOut) put(n nexusName) bool {
	by, bound := o.from.initiator.name, o.unit.opt.Registrations
	isNew := o.state.find(n) < 0
	o.state.put(registration{nexus: n, key: o.saKey, allTargetPorts: o.allTgPt, by: by})
	switch {
	case isNew && int64(o.state.madeBy(by)) > bound.Max():
		bound.Bite(by)
		return o.fail(condNoRegistration)
	case len(o.state.registrations) > maxRegistrations:
		return o.fail(condNoRegistration)
	}
	return true
}

// register executes REGISTER and REGISTER AND IGNORE EXISTING KEY (SPC-4, section 5.13.7).
func (o *prOut) register() bool {
	s := &o.state
	i, existing := s.find(o.from), uint64(0)
	if i >= 0 {
		existing = s.registrations[i].key
	}
	targets := []uint16{o.from.target}
	if o.allTgPt { // as if the command came through all of them
		targets = o.nexus.targets(o.unit)
	}
	own := func(r registration) bool {
		return r.nexus.initiator == o.from.initiator && slices.Contains(targets, r.nexus.target)
	}
	strange := func(r registration) bool { return own(r) && r.key != o.key }
	switch {
	case o.row.sa == prRegister && (o.key != existing || slices.ContainsFunc(s.registrations, strange)):
		return o.conflict()
	case i >= 0 && o.specIPT:
		return o.failListBit(prFlags, specIPTBit)
	case i < 0 && o.saKey == 0:
		return true
	}
	for j, p := range o.ports { // table 67, note b
		for _, target := range targets {
			if s.find(nexusName{p, target}) >= 0 {
				return o.failList(o.portsAt[j])
			}
		}
	}
	alone := !slices.ContainsFunc(s.registrations, func(r registration) bool { return !own(r) })
	switch { // APTPL is about all registrations
	case !o.reader || alone:
		s.aptpl = o.aptpl
	case o.saKey != 0 && o.aptpl != s.aptpl:
		return o.fail(condWriteProtected)
	}
	if o.saKey == 0 {
		o.unregister(own)
		return true
	}
	for _, target := range targets {
		if !o.put(nexusName{o.from.initiator, target}) {
			return false
		}
		for _, p := range o.ports {
			if n := (nexusName{p, target}); s.find(n) < 0 && !o.put(n) {
				return false
			}
		}
	}
	return true
}

// unregister removes the initiator's own registrations, and the reservation if that leaves no
// holder (SPC-4, section 5.13.11.2.3).
func (o *prOut) unregister(own func(registration) bool) {
	s := &o.state
	was := s.typ
	s.remove(own)
	if s.typ == 0 && prTypes[was].registrants {
		o.notify(s.nexuses(), condReservationsReleased)
	}
}

// reserve executes RESERVE (SPC-4, section 5.13.9).
func (o *prOut) reserve() bool {
	s := &o.state
	if s.typ == 0 {
		return o.establish()
	}
	if !o.checkType() {
		return false
	}
	if !s.holds(o.from) || s.typ != o.CDB[2] {
		return o.conflict()
	}
	return true
}

// checkType checks SCOPE, which has to be the logical unit, and TYPE.
func (o *prOut) checkType() bool {
	switch scope, typ := o.CDB[2]>>4, o.CDB[2]&0x0f; {
	case scope != 0:
		return o.failCDB(2, 7)
	case !prTypes[typ].valid:
		return o.failCDB(2, 3)
	}
	return true
}

// establish makes a reservation for this nexus.
func (o *prOut) establish() bool {
	if !o.checkType() {
		return false
	}
	o.state.release()
	o.state.typ = o.CDB[2]
	if !prTypes[o.state.typ].all {
		o.state.holder = o.from
	}
	return true
}

// release executes RELEASE (SPC-4, section 5.13.11.2.2). From a nexus that holds no reservation
// it is GOOD and does nothing.
func (o *prOut) release() bool {
	s := &o.state
	switch {
	case !s.holds(o.from):
		return true
	case o.reader && prTypes[s.typ].all && len(s.registrations) > 1: // it is the reservation of others, too
		return o.fail(condWriteProtected)
	case o.CDB[2] != s.typ: // SCOPE and TYPE
		return o.fail(condInvalidRelease)
	case prTypes[s.typ].registrants:
		o.notify(s.nexuses(), condReservationsReleased)
	}
	s.release()
	return true
}

// clear executes CLEAR (SPC-4, section 5.13.11.2.7).
func (o *prOut) clear() bool {
	o.notify(o.state.remove(func(registration) bool { return true }), condReservationsPreempted)
	return true
}

// preempt executes PREEMPT and PREEMPT AND ABORT (SPC-4, sections 5.13.11.2.4 to 5.13.11.2.6). It
// removes the registrations with the key of the service action. If that is the holder's key, or 0
// where all registrants are holders, it takes over the reservation; then this nexus stays
// registered in any case.
func (o *prOut) preempt() bool {
	s := &o.state
	all := prTypes[s.typ].all
	victim := func(r registration) bool { return r.key == o.saKey }
	isHolder := func(r registration) bool { return s.holds(r.nexus) && victim(r) }
	takeOver := all && o.saKey == 0 || !all && slices.ContainsFunc(s.registrations, isHolder)
	switch {
	case o.saKey == 0 && s.typ != 0 && !all:
		return o.failList(8)
	case !takeOver && !slices.ContainsFunc(s.registrations, victim):
		return o.conflict()
	case !takeOver:
		o.preempted = s.remove(victim)
		o.notify(o.preempted, condRegistrationsPreempted)
		return true
	}
	was := s.typ
	o.preempted = s.remove(func(r registration) bool { return r.nexus != o.from && (all || victim(r)) })
	if !o.establish() {
		return false
	}
	o.notify(o.preempted, condRegistrationsPreempted)
	if s.typ != was {
		o.notify(s.nexuses(), condReservationsReleased)
	}
	return true
}

// registerAndMove executes REGISTER AND MOVE (SPC-4, section 5.13.8).
func (o *prOut) registerAndMove() bool {
	s := &o.state
	switch {
	case prTypes[s.typ].all:
		return o.conflict()
	case s.typ == 0:
		return o.failCDB(1, 4)
	case !s.holds(o.from):
		return o.conflict()
	case o.saKey == 0:
		return o.failList(8)
	case !slices.Contains(o.nexus.targets(o.unit), o.targetPort):
		return o.failList(prMovePort)
	case len(o.ports) != 1:
		return o.failList(prMovePortLen)
	}
	to := nexusName{o.ports[0], o.targetPort}
	if to.initiator == o.from.initiator { // whatever the target port
		return o.failList(prMovePortLen + 4)
	}
	s.aptpl = o.aptpl
	if !o.put(to) {
		return false
	}
	s.holder = to
	if o.unreg {
		s.remove(func(r registration) bool { return r.nexus == o.from })
	}
	return true
}

// failListBit fails c because of a bit of the parameter list.
func (c *Command) failListBit(octet, bit int) bool {
	return c.failSense(senseData{Sense: condListField, field: octet, bit: bit, inList: true})
}
