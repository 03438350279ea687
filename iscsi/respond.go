package iscsi

import (
	"sync/atomic"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun/invariant"
)

// respond queues the PDU in t.Header, with t.Segment, as the last PDU of t, and sends. If t has been
// aborted it sends nothing, or TASK ABORTED. The slot of t is free when the PDU has left.
//
// Preconditions: the caller runs t and has given back its Buffer.
func (c *conn) respond(t *Task) {
	c.mu.Lock()
	if t.taken {
		t.settle()
	}
	if t.aborted.Load() {
		c.drop(t)
		c.mu.Unlock()
		c.tellWindow()
		return
	}
	if c.recovery.suspends.Load() && t.recoverable() {
		t.recovery.finished = true
		t.parkLocked()
		c.mu.Unlock()
		return
	}
	if c.shared.fence != nil && c.holdBack(t) {
		c.mu.Unlock()
		c.sess.releaseHeld()
		return
	}
	small := t.isCommand() && (t.header().Write() || t.off <= maxPutOffData)
	c.leave(t)
	err := c.sendStatus(t)
	c.mu.Unlock()
	if err != nil {
		c.end(c.endReason(err))
		return
	}
	if small {
		c.flush()
	} else {
		c.dm.Flush()
	}
}

// sendStatus numbers the PDU in t.Header and queues it. If that fails the slot of t is free, unless
// the PDU stays in the store.
//
// Preconditions: c.mu is held.
func (c *conn) sendStatus(t *Task) error {
	c.stamp(t)
	if t.recovery.snackTag != 0 && pdu.BHS(t.Header[:]).Opcode() == pdu.SCSIResponse {
		pdu.BHS(t.Header[:]).SetSNACKTag(t.recovery.snackTag)
	}
	c.keep(t)
	c.statSN++
	err := c.dm.SendControl(t)
	switch {
	case err == nil: // t belongs to the mover
	case t.recovery.kept && t.isCommand() && c.recovers(): // sent, but lost
		c.setUse(t, true, false)
	default:
		c.unkeep(t)
		c.freeTask(t)
	}
	return err
}

// stamp fills in the serial numbers and the data segment length.
//
// Preconditions: c.mu is held.
func (c *conn) stamp(t *Task) {
	h := pdu.BHS(t.Header[:])
	h.SetStatSN(c.statSN)
	c.stampWindow(t)
	h.SetDataSegmentLength(len(t.Segment))
}

// stampWindow fills in ExpCmdSN and MaxCmdSN.
//
// Preconditions: c.mu is held.
func (c *conn) stampWindow(t *Task) {
	invariant.Held(&c.mu)
	h, w := pdu.BHS(t.Header[:]), &c.shared.win
	h.SetExpCmdSN(w.exp)
	h.SetMaxCmdSN(w.max)
	w.told = w.max
}

const (
	// Up to maxPutOff answers may wait for the next one. Then the first has waited long enough.
	maxPutOff = 16
	// An answer with more than maxPutOffData bytes of data-in does not wait: compared with its
	// data a system call costs little.
	maxPutOffData = 64 << 10
)

// A putOffFlush lets answers to commands that have come together leave with one system call. The
// whole rule:
//
//   - receive notes whether a whole PDU has come after the one that it returns (pending).
//   - flush, after a command's answer or R2T, leaves the sending to the goroutine that answers that next PDU,
//     if nobody is receiving: the caller itself is about to.
//   - If that next command waits for its backend, somebody else receives meanwhile, and the mover
//     sends what is queued before Receive waits for the initiator (Deferrer.Defer).
//   - newTask sends before it waits for a slot.
type putOffFlush struct {
	deferrer Deferrer    // the mover; nil: it is none, and nothing is put off
	pending  atomic.Bool // written by the holder of the baton
	inARow   int         // answers put off; guarded by the baton, also where that is kept free
}

// notePending notes whether a whole PDU has come after the last notice.
//
// Preconditions: c.baton is held.
func (c *conn) notePending() {
	if d := c.putOff.deferrer; d != nil {
		if p := d.Pending(); p != c.putOff.pending.Load() {
			c.putOff.pending.Store(p)
		}
	}
}

// flush sends what the caller has queued for a command, or puts that off.
func (c *conn) flush() {
	if c.putOff.pending.Load() {
		putOff, d := false, c.putOff.deferrer
		c.baton.ifFree(func() {
			if putOff = c.putOff.inARow < maxPutOff && d.Pending(); putOff {
				c.putOff.inARow++
				d.Defer()
			} else {
				c.putOff.inARow = 0
			}
		})
		if putOff {
			return
		}
	}
	c.dm.Flush()
}

// beginPDU makes t.Header a PDU with that opcode and Initiator Task Tag, and the F bit alone.
func (t *Task) beginPDU(op pdu.Opcode, itt uint32) pdu.BHS {
	h := pdu.BHS(t.Header[:])
	h.Reset(op, pdu.FlagF)
	h.SetITT(itt)
	return h
}

// setReject makes the PDU of t a Reject of one with that header.
func (t *Task) setReject(reason pdu.RejectReason, header []byte) {
	t.beginPDU(pdu.Reject, pdu.ReservedTag).SetReason(reason)
	t.Segment = append(t.scratch[:0], header...)
}

// runNOP answers a ping with its data, as far as the initiator can take it (RFC 7143, section
// 11.19; RFC 7145, section 6.2).
func (t *Task) runNOP() {
	if t.noMemory {
		t.rejectRequest(pdu.RejectOutOfResources)
		return
	}
	h := t.beginPDU(pdu.NOPIn, t.header().ITT())
	h.SetLUN(t.header().LUN())
	h.SetTTT(pdu.ReservedTag)
	t.Segment = t.data[:min(len(t.data), t.conn.dm.MaxSendSegment())] // which may have changed
	t.conn.respond(t)
}

// rejectRequest answers the request of t with a Reject instead of a response.
func (t *Task) rejectRequest(reason pdu.RejectReason) {
	t.data = nil
	t.giveStash() // the Reject may have to wait for the network
	t.setReject(reason, t.req[:])
	t.conn.respond(t)
}
