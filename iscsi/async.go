package iscsi

import (
	"encoding/binary"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// Asynchronous Messages (RFC 7143, section 11.9). They count as unexpected: over
// RDMA one is not sent that the initiator has no buffer for.

// async is an Asynchronous Message with an event and its three parameters, ready
// for sendOwn. It is nil where the initiator cannot be told: before the full
// feature phase and in discovery, before it has sent its first PDU, when it may
// not have the buffers yet (RFC 7145, section 5.1.3), and without a free slot.
func (c *conn) async(event byte, p1, p2, p3 uint16) *Task {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.asyncLocked(event, p1, p2, p3)
}

// Preconditions: mu is held.
func (c *conn) asyncLocked(event byte, p1, p2, p3 uint16) *Task {
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
	t.own, t.unasked = true, true
	return t
}

// farewell tells the initiator that this connection (event 2) or its session
// (event 3) is going to be dropped, with nothing kept, and drops the connection
// for that reason: after LogoutWait at the latest, whether or not the initiator
// reads. It does not wait.
func (c *conn) farewell(event byte, reason error) {
	if !c.enter() {
		return
	}
	cid := c.cid
	if event != pdu.AsyncConnectionDropped {
		cid = 0
	}
	t := c.async(event, cid, c.params.DefaultTime2Wait, 0)
	if t == nil {
		c.workers.Done()
		c.stop(reason)
		return
	}
	late := time.AfterFunc(c.opt.LogoutWait, func() { c.stop(reason) })
	go func() {
		defer c.workers.Done()
		defer late.Stop()
		if !c.sendOwn(t) {
			c.stop(reason)
			return
		}
		c.part(reason) // what is queued gets out
		if !c.dm.RDMA() {
			c.stop(reason)
		}
	}()
}

// part ends the connection for that reason as after a logout: the initiator has
// LogoutWait to close it.
func (c *conn) part(reason error) {
	c.mu.Lock()
	if c.phase != phaseFullFeature {
		c.mu.Unlock()
		return
	}
	c.phase, c.reason = phaseLogout, reason
	c.terminate(c.owns)
	c.mu.Unlock()
	c.lastTimer(func() { c.stop(reason) })
	c.halfClose()
}

// reportEvent reports what a logical unit wants the initiator to look at (event 0).
// It does not wait. An initiator that cannot take the message finds the unit
// attention with its next command.
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
		c.sendOwn(t)
	}()
}

// anyConn is a connection of s in the full feature phase, or nil.
func (s *session) anyConn() *conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		if c.phase == phaseFullFeature {
			return c
		}
	}
	return nil
}
