package rdma

import "time"

// nudges is how often nudge sends an RDMA Write at most.
const nudges = 5

// nudge sends empty RDMA Writes until something was sent after the peer's first FPDU; see Options.Nudge. That FPDU need not be an answer:
// the server of rstream sends one as soon as it has accepted the connection, and our message may still be in its socket. But siw reads from
// then on what comes.
func (c *Conn) nudge() {
	pause := c.opt.Nudge
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for n := 0; n < nudges; {
		select {
		case <-timer.C:
		case <-c.gone:
			return
		}
		c.mu.Lock()
		// A peer that was heard before anything was sent reads what comes later.
		heard := !c.unheard.Load() && (c.sentUnheard == 0 || c.batches > c.sentUnheard)
		if heard || c.dead || c.broken != nil || c.ended || c.terminateFPDU != nil {
			c.mu.Unlock()
			return
		}
		if c.batches > 0 { // a message may be in the peer's socket
			// Nothing holds up what is in due, a Read that exceeds ORD neither. Some adapters refuse STag 0.
			c.due.push(&WorkRequest{Op: Write, STag: 1})
			n, pause = n+1, 2*pause
		}
		c.mu.Unlock()
		c.Flush()
		timer.Reset(pause)
	}
}

// hear notes the peer's first FPDU for nudge.
func (c *Conn) hear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sentUnheard = c.batches
	if c.flushing { // the batch that is being sent
		c.sentUnheard++
	}
	c.unheard.Store(false)
}
