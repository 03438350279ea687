package lun

import "encoding/binary"

// beginPRIn executes PERSISTENT RESERVE IN with READ KEYS, READ RESERVATION and READ FULL STATUS
// (SPC-4, sections 6.15.2, 6.15.3 and 6.15.5).
func beginPRIn(u *Unit, c *Command) bool {
	r := &u.reservations
	if r.reservedByReserve() {
		return c.conflict()
	}
	if !u.group.admits() {
		return c.busy()
	}
	r.mu.Lock()
	s := r.persistent
	r.mu.Unlock()
	allocation := uint32(binary.BigEndian.Uint16(c.CDB[7:]))
	b := binary.BigEndian.AppendUint32(c.buf[:0], s.generation)
	b = append(b, 0, 0, 0, 0)
	additional := 0
	add := func(descriptor []byte) {
		if additional += len(descriptor); len(b) < int(allocation) {
			b = append(b, descriptor...)
		}
	}
	switch c.row.sa {
	case prReadKeys:
		for _, reg := range s.registrations {
			add(binary.BigEndian.AppendUint64(nil, reg.key))
		}
	case prReadReservation:
		add(s.reservationDescriptor())
	case prReadFullStatus:
		for _, reg := range s.registrations {
			all := s.covers(reg, c.nexus.targets(u))
			if !all || reg.nexus.target == c.nexus.targets(u)[0] { // one descriptor for all target ports
				add(s.fullStatusDescriptor(reg, all))
			}
		}
	}
	binary.BigEndian.PutUint32(b[4:], uint32(additional)) // however short the allocation is
	return c.report(b, allocation)
}

// reservationDescriptor returns the descriptor of READ RESERVATION, or nil without a reservation.
// One that all registrants hold has key 0.
func (s *prState) reservationDescriptor() []byte {
	if s.typ == 0 {
		return nil
	}
	d := make([]byte, 16)
	if !prTypes[s.typ].all {
		binary.BigEndian.PutUint64(d, s.registrations[s.find(s.holder)].key)
	}
	d[13] = s.typ // SCOPE 0: the logical unit
	return d
}

// fullStatusDescriptor returns the descriptor of READ FULL STATUS for a registration, or with all
// for those of all target ports.
func (s *prState) fullStatusDescriptor(r registration, all bool) []byte {
	const allTgPt, rHolder, fixed = 0x02, 0x01, 24
	d := r.nexus.initiator.appendTransportID(make([]byte, fixed))
	binary.BigEndian.PutUint64(d, r.key)
	if all {
		d[12] |= allTgPt
	}
	if s.holds(r.nexus) {
		d[12] |= rHolder
		d[13] = s.typ
	}
	binary.BigEndian.PutUint16(d[18:], r.nexus.target)
	binary.BigEndian.PutUint32(d[20:], uint32(len(d)-fixed))
	return d
}

// prCapabilities executes PERSISTENT RESERVE IN with REPORT CAPABILITIES (SPC-4, section 6.15.4).
// ALLOW COMMANDS 011b: TEST UNIT READY always passes; MODE SENSE and those named with it pass
// Write Exclusive reservations.
func prCapabilities(u *Unit, c *Command) bool {
	const crh, sipC, atpC, ptplC, tmv, allow, ptplA = 0x10, 0x08, 0x04, 0x01, 0x80, 0x30, 0x01
	const typeMask = 0xea01 // PERSISTENT RESERVATION TYPE MASK: all of prTypes
	r := &u.reservations
	if r.reservedByReserve() {
		return c.conflict()
	}
	b := c.zeroed(8)
	b[1], b[2], b[3] = byte(len(b)), crh|sipC|atpC, tmv|allow
	if u.group != nil {
		b[2] &^= crh
	}
	if u.keepsReservations() {
		b[2] |= ptplC
	}
	r.mu.Lock()
	if r.persistent.aptpl {
		b[3] |= ptplA
	}
	r.mu.Unlock()
	binary.BigEndian.PutUint16(b[4:], typeMask)
	return c.report(b, uint32(binary.BigEndian.Uint16(c.CDB[7:])))
}
