package iscsi

import (
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun/invariant"
)

// A verdict says what happens to a request: it is to become a task, or is rejected if there is a reason, or else ignored.
type verdict struct {
	take   bool
	reason pdu.RejectReason
}

// judge decides about a request. It looks at tags before CmdSN (RFC 7143, section 4.2.2.1).
//
// Preconditions: c.mu is held.
func (c *conn) judge(h pdu.BHS, r *request) verdict {
	invariant.Held(&c.mu)
	if c.phase != phaseFullFeature {
		return verdict{}
	}
	if same := c.shared.tasks.find(h.ITT()); same != nil {
		if !h.Immediate() && !same.immediate() && same.header().CmdSN() == h.CmdSN() {
			return verdict{} // a retry
		}
		return verdict{reason: pdu.RejectTaskInProgress}
	}
	if !h.Immediate() {
		return verdict{take: c.shared.win.accepts(h.CmdSN())}
	}
	if r.maxImmediate > 0 && c.immediate[h.Opcode()] >= r.maxImmediate {
		return verdict{reason: pdu.RejectTooManyImmediate}
	}
	return verdict{take: true}
}

// admit enters t in the table of tasks. As far as CmdSNs have come without a gap it makes tasks
// ready, those of other connections included.
//
// Preconditions: c.mu is held; judge has said to take it.
func (c *conn) admit(t *Task) {
	t.become(taskWaiting)
	c.shared.tasks.insert(t)
	if t.needsData {
		c.awaitData(t, int(t.unsolicited-t.arrived))
	}
	h := t.header()
	if t.immediate() {
		c.immediate[h.Opcode()]++
		c.makeReady(t)
		return
	}
	t.needsSN = true
	c.shared.win.receive(h.CmdSN(), t)
	c.advance()
}

// advance takes from the window the tasks that have come without a gap.
//
// Preconditions: c.mu is held.
func (c *conn) advance() {
	invariant.Held(&c.mu)
	for t, ok := c.shared.win.next(); ok; t, ok = c.shared.win.next() {
		if t != nil {
			t.needsSN = false
			c.makeReady(t)
		}
	}
	c.shared.changed.Broadcast()
}

// makeReady queues t to run unless it waits for its CmdSN or for unsolicited data. Perhaps no
// goroutine is about to look for ready tasks of another connection: such a task begins at once.
//
// Preconditions: c.mu is held.
func (c *conn) makeReady(t *Task) {
	if t.needsSN || t.needsData {
		return
	}
	c.arrange(t)
	if t.conn != c && !c.shared.pausing {
		t.conn.begin(t)
		return
	}
	t.become(taskReady)
	t.conn.ready.Push(t, &t.link)
}

// arrange gives t its place among the tasks of the session.
//
// Preconditions: c.mu is held.
func (c *conn) arrange(t *Task) {
	s := c.shared
	s.seq++
	t.seq = s.seq
	if t.isOrdered() {
		s.ordered++
	}
	t.mayWait = s.ordered > 0
}

// leave takes t out of the table. It belongs in the critical section that queues the last PDU of t
// or drops t: from then on the initiator may use the tag again.
//
// Preconditions: c.mu is held.
func (c *conn) leave(t *Task) {
	invariant.Held(&c.mu)
	if t.fromTarget {
		return
	}
	s := c.shared
	s.tasks.remove(t)
	switch {
	case t.recovery.answered: // it left the window before, on another connection
	case t.immediate():
		c.immediate[t.header().Opcode()]--
	case t.needsSN:
		// Ahead of a gap: it counts as received, and ends there. With its connection it is
		// forgotten, and may come again (section 11.14).
		*s.win.slot(t.header().CmdSN()) = windowSlot{received: c.phase == phaseFullFeature}
	case !c.recovery.store.defers():
		s.win.ended()
	}
	if t.seq != 0 && !t.recovery.answered && t.isOrdered() {
		s.ordered--
	}
	if t.isCommand() {
		s.gate.leave(t)
	}
	t.become(taskFree)
	s.changed.Broadcast()
}

// drop ends t without a response.
//
// Preconditions: c.mu is held; no data of t is on its way.
func (c *conn) drop(t *Task) {
	if t.cleared { // section 11.14.5
		c.sess.nexus.ClearedByTransport(t.header().LUN())
	}
	c.leave(t)
	c.discard(t)
}

// answer queues TASK ABORTED for t, which another session has taken away and which no goroutine runs. The
// caller lets another goroutine send it, after releaseHeld if the session has a fence: the network may be
// slower than the caller's.
//
// Preconditions: c.mu is held; no data of t is on its way.
func (c *conn) answer(t *Task) {
	t.settle()
	if c.shared.fence != nil && c.holdBack(t) {
		return
	}
	c.leave(t)
	c.sendStatus(t) // an error has ended the connection, and Receive reports that
}

// discard frees the slot of t and what it has.
func (c *conn) discard(t *Task) {
	if t.bound {
		c.dm.Unbind(t)
	}
	if t.buf != nil {
		t.buf.Release()
	}
	c.freeTask(t)
}
