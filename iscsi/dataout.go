package iscsi

import (
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
)

// dataOut takes an unsolicited Data-Out PDU (RFC 7143, section 11.7). Solicited ones never come
// here: RDMA has no such PDUs (RFC 7145, section 7.3.4), on TCP they belong to the mover. A PDU
// that does not fit is rejected, and the task it names fails once the last Data-Out has come.
//
// Preconditions: c.baton is held.
func (c *conn) dataOut(n *Notice) {
	c.mu.Lock()
	reason := c.takeDataOut(n)
	c.mu.Unlock()
	if reason != 0 {
		c.reject(n, reason, unexpected)
	}
}

// takeDataOut does the work of dataOut. A reason other than 0 rejects the PDU.
//
// Preconditions: c.baton and c.mu are held.
func (c *conn) takeDataOut(n *Notice) (reason pdu.RejectReason) {
	h := pdu.BHS(n.BHS)
	unsolicited := h.TTT() == pdu.ReservedTag
	t := c.shared.tasks.find(h.ITT())
	if t != nil && t.conn != c {
		t = nil // data comes where the command came (section 4.2.2)
	}
	switch {
	case t == nil && unsolicited:
		return pdu.RejectInvalidField // of a task that has ended, perhaps
	case t == nil || !t.needsData || !unsolicited:
		return pdu.RejectProtocolError
	}
	if c.recovery.store.repeater != nil && h.LUN() == t.header().LUN() && h.DataSN() != t.dataSN {
		if pdu.Before(h.DataSN(), t.dataSN) { // a duplicate
			return 0
		}
		t.recovery.gap, t.dataSN = true, h.DataSN()
	}
	end := uint64(h.BufferOffset()) + uint64(len(n.Data))
	switch {
	case h.LUN() != t.header().LUN(), h.DataSN() != t.dataSN: // sections 4.2.5.3 and 11.7.5
		reason = pdu.RejectProtocolError
	case t.refusal != (lun.Sense{}), t.recovery.gap, t.noMemory: // the data is not needed
	case h.BufferOffset() != t.arrived, end > uint64(t.unsolicited):
		reason = pdu.RejectInvalidField
	default:
		copy(t.stash.data[t.arrived:], n.Data)
		t.arrived = uint32(end)
	}
	t.dataSN = h.DataSN() + 1
	incomplete := h.Final() && t.refusal == (lun.Sense{}) && !t.recovery.gap && !t.noMemory && t.arrived != t.unsolicited
	if reason != 0 || incomplete { // section 4.2.5.2
		t.refusal = senseWrongAmount
	}
	if h.Final() {
		c.dataCame(t)
		c.endUnsolicited(t)
	}
	return reason
}

// endUnsolicited lets t continue when the last unsolicited Data-Out has come. From the place where
// some was lost, the target asks for all data: the R2T is a recovery R2T (RFC 7143, section 7.8).
//
// Preconditions: c.mu is held.
func (c *conn) endUnsolicited(t *Task) {
	invariant.Held(&c.mu)
	t.needsData = false
	t.lap(lun.PhaseReadWait)
	if t.recovery.gap {
		t.unsolicited = t.arrived
	}
	c.makeReady(t)
}

// lostDataOut rejects a Data-Out PDU that the mover has discarded. The target asks again for
// unsolicited data that is lost. At ErrorRecoveryLevel 0 the task fails instead, once the last
// Data-Out has come (RFC 7143, section 7.8). If there was no memory for the data it fails without a
// Reject. Solicited data belongs to the mover.
//
// Preconditions: c.baton is held.
func (c *conn) lostDataOut(n *Notice) {
	h, noMemory := pdu.BHS(n.BHS), n.Reject == pdu.RejectOutOfResources
	c.mu.Lock()
	if t := c.shared.tasks.find(h.ITT()); t != nil && t.conn == c && t.needsData && h.TTT() == pdu.ReservedTag {
		switch t.dataSN = h.DataSN() + 1; {
		case c.recovery.store.repeater != nil:
			t.recovery.gap = true
		case noMemory:
			t.noMemory = true
		default:
			t.refusal = senseLost
		}
		if h.Final() {
			c.dataCame(t)
			c.endUnsolicited(t)
		}
	}
	c.mu.Unlock()
	if !noMemory {
		c.reject(n, n.Reject, unexpected)
	}
}

// unplace puts the unsolicited data of a task that is going to wait where it does not hold up other
// tasks of the connection.
func (t *Task) unplace() {
	if !t.placed {
		return
	}
	b := t.buf
	t.buf, t.placed = nil, false
	if room := t.room(int(t.unsolicited)); room != nil {
		copy(room, b.data[:t.unsolicited])
		b.Release()
		return
	}
	t.stash = b
	b.budget.makeOther(b)
}
