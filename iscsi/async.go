package iscsi

import (
	"encoding/binary"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun/invariant"
)

// Asynchronous Messages (RFC 7143, section 11.9). They count as unexpected: over RDMA the target
// sends one only if the initiator has a buffer for it.

// async returns an Asynchronous Message with an event and its three parameters, ready for
// sendFromTarget. It returns nil where the initiator cannot be told: before the full feature phase
// and in discovery; before it has sent its first PDU, when it may not have the buffers yet (RFC
// 7145, section 5.1.3); and without a free slot.
func (c *conn) async(event byte, p1, p2, p3 uint16) *Task {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.asyncLocked(event, p1, p2, p3)
}

// asyncLocked does the work of async.
//
// Preconditions: c.mu is held.
func (c *conn) asyncLocked(event byte, p1, p2, p3 uint16) *Task {
	invariant.Held(&c.mu)
	if c.phase != phaseFullFeature || c.sess.discovery || c.received.Load() == 0 {
		return nil
	}
	t := c.trySlot()
	if t == nil {
		return nil
	}
	h := pdu.BHS(t.Header[:])
	h.Reset(pdu.AsyncMessage, pdu.FlagF)
	h.SetITT(pdu.ReservedTag)
	h.SetAsync(event, p1, p2, p3)
	t.fromTarget, t.unexpected = true, true
	return t
}

// askLogout asks the initiator of a normal session to log out within d (event 1). It returns false
// if it cannot ask.
func (c *conn) askLogout(d time.Duration) bool {
	if !c.enter() {
		return false
	}
	c.mu.Lock()
	room := len(c.unexpected.outstanding) < c.unexpectedLimit()
	c.mu.Unlock()
	var t *Task
	if room {
		t = c.async(pdu.AsyncLogoutRequest, 0, 0, uint16(min((d+time.Second-1)/time.Second, 0xffff)))
	}
	if t == nil {
		c.workers.Done()
		return false
	}
	go func() { // sending may wait for a peer that does not read
		defer c.workers.Done()
		c.sendFromTarget(t)
	}()
	return true
}

// reportEvent reports a unit attention of a logical unit to the initiator (event 0). It does not
// wait. An initiator that cannot take the message finds the unit attention with its next command.
func (s *session) reportEvent(lun [8]byte, sense []byte) {
	go func() { // the logical unit holds a lock
		c := s.anyConn()
		if c == nil || !c.enter() {
			return
		}
		defer c.workers.Done()
		t := c.async(pdu.AsyncSCSIEvent, 0, 0, 0)
		if t == nil {
			return
		}
		pdu.BHS(t.Header[:]).SetLUN(lun)
		t.Segment = append(binary.BigEndian.AppendUint16(t.scratch[:0], uint16(len(sense))), sense...)
		c.sendFromTarget(t)
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
