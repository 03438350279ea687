package iscsi

import (
	"fmt"
	"slices"

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
		c.end(fmt.Errorf("sending failed: %w", err))
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
		c.workers.Add(1)
		go func() {
			defer c.workers.Done()
			c.sendFromTarget(t)
		}()
	case len(x.outstanding) < n && c.windowNews():
		c.workers.Add(1)
		go func() {
			defer c.workers.Done()
			c.tellWindow()
		}()
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

// tellWindowAsync calls tellWindow on another goroutine: the network may be slow.
func (c *conn) tellWindowAsync() {
	if !c.enter() {
		return
	}
	go func() {
		defer c.workers.Done()
		c.tellWindow()
	}()
}

// sendNOPIn sends a NOP-In that no request asked for (RFC 7143, section 11.19): a ping, or news
// about MaxCmdSN. It reports false, and sends nothing, without a free slot or if the initiator
// cannot take it.
func (c *conn) sendNOPIn(ping bool) bool {
	t := c.tryTask()
	if t == nil {
		return false
	}
	h := pdu.BHS(t.Header[:])
	h.Reset(pdu.NOPIn, pdu.FlagF)
	h.SetITT(pdu.ReservedTag)
	h.SetTTT(pdu.ReservedTag)
	if ping {
		c.mu.Lock()
		x := &c.unexpected
		if x.lastPing++; x.lastPing == pdu.ReservedTag {
			x.lastPing = 0
		}
		h.SetTTT(x.lastPing)
		c.mu.Unlock()
	}
	t.fromTarget, t.unexpected = true, true
	return c.sendFromTarget(t)
}
