package iscsi

import (
	"encoding/binary"
	"slices"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun/invariant"
)

// maxUnexpected is how many unexpected PDUs may be unacknowledged at a time: ib_iser has receive
// buffers for two NOP-In and two Asynchronous Messages.
const maxUnexpected = 2

// unexpectedPDUs are the PDUs of a connection that the initiator has not asked for (RFC 7145,
// section 8.1.2). The mutex of shared guards them.
type unexpectedPDUs struct {
	outstanding []unexpectedPDU // sent and not acknowledged yet
	heldBack    *Task           // waits until the initiator has taken others
	lastPing    uint32          // TTT of the last NOP-In that asked for an answer
	telling     bool            // a goroutine is in tellWindow
}

// An unexpectedPDU is one that the initiator has not acknowledged yet.
type unexpectedPDU struct {
	statSN uint32 // acknowledged when ExpStatSN is beyond
	ttt    uint32 // of a NOP-In, which the answer acknowledges too; else ReservedTag
}

// sendFromTarget sends a PDU that is not the answer of a task, and reports whether it was sent.
// StatSN advances unless the PDU is a NOP-In. An initiator with RDMA may have no room for it (RFC
// 7145, section 8.1.2). The last place is for a ping, the answer to which makes room, or for the
// last PDU of the connection. Until then one other PDU is held back. Further ones are dropped.
func (c *conn) sendFromTarget(t *Task) bool {
	c.mu.Lock()
	if c.unexpected.heldBack == nil && c.phase == phaseFullFeature && !c.hasRoom(t) && !takesLast(pdu.BHS(t.Header[:])) {
		c.unexpected.heldBack = t
		c.mu.Unlock()
		c.sendNOPIn(true)
		return false
	}
	ok, err := c.queueFromTarget(t)
	c.mu.Unlock()
	if err != nil {
		c.end(c.endReason(err))
	}
	if ok {
		c.dm.Flush()
	}
	return ok
}

// hasRoom reports whether the initiator can take t.
//
// Preconditions: c.mu is held.
func (c *conn) hasRoom(t *Task) bool {
	t.unexpected = t.unexpected && c.dm.RDMA() // on TCP there are no receive buffers to count
	limit := c.unexpectedLimit()
	if !takesLast(pdu.BHS(t.Header[:])) {
		limit--
	}
	return !t.unexpected || len(c.unexpected.outstanding) < limit
}

// queueFromTarget queues t in the mover, and reports whether it did. It holds nothing back. An error
// ends the connection.
//
// Preconditions: c.mu is held.
func (c *conn) queueFromTarget(t *Task) (ok bool, err error) {
	invariant.Held(&c.mu)
	h := pdu.BHS(t.Header[:])
	if !c.hasRoom(t) || c.phase != phaseFullFeature {
		c.freeTask(t)
		return false, nil
	}
	if t.unexpected {
		u := unexpectedPDU{statSN: c.statSN, ttt: pdu.ReservedTag}
		if h.Opcode() == pdu.NOPIn {
			u.ttt = h.TTT()
		}
		c.unexpected.outstanding = append(c.unexpected.outstanding, u)
	}
	c.stamp(t)
	if h.Opcode() != pdu.NOPIn {
		c.keep(t)
		c.statSN++
	}
	if err := c.dm.SendControl(t); err != nil {
		c.unkeep(t)
		c.freeTask(t)
		return false, err
	}
	return true, nil
}

// takesLast reports whether an unexpected PDU may take the last place that the initiator has: a
// ping, or the news that the connection ends.
func takesLast(h pdu.BHS) bool {
	switch h.Opcode() {
	case pdu.NOPIn:
		return h.TTT() != pdu.ReservedTag
	case pdu.AsyncMessage:
		return h.AsyncEvent() == pdu.AsyncConnectionDropped || h.AsyncEvent() == pdu.AsyncSessionDropped
	}
	return false
}

// unexpectedLimit returns how many unexpected PDUs may be outstanding.
func (c *conn) unexpectedLimit() int {
	if n := c.params.MaxOutstandingUnexpectedPDUs; n > 0 {
		return int(min(n, maxUnexpected))
	}
	return maxUnexpected
}

// acknowledge takes the ExpStatSN of a PDU of the initiator.
//
// Preconditions: c.mu is held.
func (c *conn) acknowledge(expStatSN uint32) {
	invariant.Held(&c.mu)
	if c.recovery.store.on {
		c.forgetBefore(expStatSN)
	}
	if len(c.unexpected.outstanding) > 0 {
		c.forgetUnexpected(func(u unexpectedPDU) bool { return pdu.Before(u.statSN, expStatSN) })
	}
	if c.shared.fence != nil {
		c.acknowledgeStatus(expStatSN)
	}
}

// pong takes the answer to a NOP-In. It ignores an unknown tag.
func (c *conn) pong(ttt uint32) {
	if ttt == pdu.ReservedTag {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgetUnexpected(func(u unexpectedPDU) bool { return u.ttt == ttt })
	if c.shared.fence != nil {
		c.askAgain()
	}
}

// forgetUnexpected forgets the unexpected PDUs that the initiator has taken. There may be room now
// for PDUs that could not be sent before.
//
// Preconditions: c.mu is held; the caller is one of the connection's workers.
func (c *conn) forgetUnexpected(taken func(unexpectedPDU) bool) {
	x := &c.unexpected
	n := len(x.outstanding)
	x.outstanding = slices.DeleteFunc(x.outstanding, taken)
	switch t := x.heldBack; {
	case t != nil && len(x.outstanding) < c.unexpectedLimit()-1:
		x.heldBack = nil
		c.workers.Go(func() { c.sendFromTarget(t) })
	case len(x.outstanding) < n && c.windowNews():
		c.workers.Go(c.tellWindow)
	}
}

// windowNews reports whether MaxCmdSN has moved while no PDU is on its way that will carry it (RFC
// 7143, section 11.4.11).
//
// Preconditions: c.mu is held.
func (c *conn) windowNews() bool {
	s := c.shared
	return s.win.told != s.win.max && c.phase == phaseFullFeature && !c.sess.discovery &&
		!s.tasks.any(func(t *Task) bool { return t.state != taskParked })
}

// tellWindow sends a NOP-In if there is news about MaxCmdSN that nothing else will carry. Callers
// are tasks that have ended without a response. With RDMA the NOP-In asks for an answer, because
// that frees the receive buffer. When tasks end at the same time, the first caller, which may wait
// for the network, sends for all.
func (c *conn) tellWindow() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unexpected.telling {
		return
	}
	c.unexpected.telling = true
	for c.windowNews() {
		news := c.shared.win.max
		c.mu.Unlock()
		sent := c.sendNOPIn(c.dm.RDMA())
		c.mu.Lock()
		if !sent && news == c.shared.win.max {
			break
		}
	}
	c.unexpected.telling = false
}

// sendNOPIn sends a NOP-In that no request asked for (RFC 7143, section 11.19): a ping, or news
// about MaxCmdSN. It reports false, and sends nothing, without a free slot or if the initiator
// cannot take it.
func (c *conn) sendNOPIn(ping bool) bool {
	c.mu.Lock()
	t := c.newUnexpected(pdu.NOPIn)
	if t == nil {
		c.mu.Unlock()
		return false
	}
	ttt := uint32(pdu.ReservedTag)
	if ping {
		x := &c.unexpected
		if x.lastPing++; x.lastPing == pdu.ReservedTag {
			x.lastPing = 0
		}
		ttt = x.lastPing
	}
	c.mu.Unlock()
	pdu.BHS(t.Header[:]).SetTTT(ttt)
	return c.sendFromTarget(t)
}

// newUnexpected returns a task for an unexpected PDU with that opcode, or nil without a free slot or
// outside of the full feature phase.
//
// Preconditions: c.mu is held.
func (c *conn) newUnexpected(op pdu.Opcode) *Task {
	invariant.Held(&c.mu)
	if c.phase != phaseFullFeature {
		return nil
	}
	c.slots.mu.Lock()
	if c.slots.exhausted() {
		c.slots.mu.Unlock()
		return nil
	}
	t := c.takeSlot()
	t.beginPDU(op, pdu.ReservedTag)
	t.fromTarget, t.unexpected = true, true
	return t
}

// async returns an Asynchronous Message (RFC 7143, section 11.9) with an event and its three
// parameters, ready for sendFromTarget. It returns nil where the initiator cannot be told: before
// the full feature phase and in discovery; before it has sent its first PDU, when it may not have
// the buffers yet (RFC 7145, section 5.1.3); and without a free slot.
//
// Preconditions: c.mu is held.
func (c *conn) async(event byte, p1, p2, p3 uint16) *Task {
	if c.phase != phaseFullFeature || c.sess.discovery || c.received.Load() == 0 {
		return nil
	}
	t := c.newUnexpected(pdu.AsyncMessage)
	if t != nil {
		pdu.BHS(t.Header[:]).SetAsync(event, p1, p2, p3)
	}
	return t
}

// askLogout asks the initiator of a normal session to log out within d (event 1). It does not wait.
// It returns false if it cannot ask.
func (c *conn) askLogout(d time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	// Before the full feature phase the parameters belong to the login.
	if c.phase != phaseFullFeature || len(c.unexpected.outstanding) >= c.unexpectedLimit() {
		return false
	}
	t := c.async(pdu.AsyncLogoutRequest, 0, 0, uint16(min((d+time.Second-1)/time.Second, 0xffff)))
	if t != nil {
		c.workers.Go(func() { c.sendFromTarget(t) })
	}
	return t != nil
}

// reportEvent reports a unit attention of a logical unit to the initiator (event 0). It does not
// wait. An initiator that cannot take the message finds the unit attention with its next command.
func (s *session) reportEvent(lun [8]byte, sense []byte) {
	go func() { // the logical unit holds a lock
		c := s.anyConn()
		if c == nil {
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		t := c.async(pdu.AsyncSCSIEvent, 0, 0, 0)
		if t == nil {
			return
		}
		pdu.BHS(t.Header[:]).SetLUN(lun)
		t.Segment = append(binary.BigEndian.AppendUint16(t.scratch[:0], uint16(len(sense))), sense...)
		c.workers.Go(func() { c.sendFromTarget(t) })
	}()
}

// anyConn returns a connection of s in the full feature phase, or nil.
func (s *session) anyConn() *conn {
	s.shared.mu.Lock()
	defer s.shared.mu.Unlock()
	for _, c := range s.conns {
		if c.phase == phaseFullFeature {
			return c
		}
	}
	return nil
}
