package iscsi

import "sync/atomic"

const (
	// Up to maxPutOff answers may wait for the next one. Then the first has waited long enough.
	maxPutOff = 16
	// An answer with more than maxPutOffData bytes of data-in does not wait: compared with its
	// data a system call costs little.
	maxPutOffData = 16 << 10
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
