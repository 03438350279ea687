package iscsi

import (
	"runtime"
	"time"

	"github.com/iser-target/iser-target/lun/invariant"
)

// A store that hangs keeps the goroutines of the commands that it executes. Nothing of the session
// waits for them longer than limits.fence_timeout after they were aborted: then the session detaches
// them. Their goroutines stay in the logical unit (lun.Command.Detach has what that means there),
// and end when the store lets them go. The end of a task shows in the task table and in
// the goroutines of its connection. Detaching changes both, so those who wait need not know of it.

// detachLater detaches the aborted tasks of s that are in their logical unit when limits.fence_timeout
// is over, and the tasks of connections that are lost. c is one of the session's.
//
// Preconditions: s.mu is held.
func (s *shared) detachLater(c *conn) {
	invariant.Held(&s.mu)
	s.aborts++
	upTo := s.aborts
	s.tasks.each(func(t *Task) {
		if t.abortedIn == 0 && t.mustEnd() {
			t.abortedIn = upTo
		}
	})
	time.AfterFunc(c.node.shared.FenceTimeout.Time(), func() { s.detachUpTo(upTo) })
}

// detachUpTo detaches the tasks of the calls of detachLater up to that one.
func (s *shared) detachUpTo(call uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var again *conn
	s.tasks.each(func(t *Task) {
		if t.abortedIn == 0 || t.abortedIn > call || !t.mustEnd() {
			return
		}
		switch c := t.conn; {
		case t.cmd.Inside():
			c.detach(t)
		case !t.aborted.Load(): // it may get into the unit until it is parked
			again, t.abortedIn = c, 0
		}
	})
	if again != nil {
		s.detachLater(again)
	}
}

// mustEnd reports whether a goroutine works on t, and something waits for the end of that.
//
// Preconditions: t.conn.mu is held.
func (t *Task) mustEnd() bool {
	return t.state == taskRunning && (t.aborted.Load() || t.conn.recovery.suspends.Load())
}

// detach separates t from its goroutine, which is in the logical unit, if it still is. It ends t
// like drop, or answers if another session has taken t away. The slot gets a new Task.
//
// Preconditions: c.mu is held.
func (c *conn) detach(t *Task) {
	invariant.Held(&c.mu)
	answers := t.taken && c.phase == phaseFullFeature
	if !t.aborted.Swap(true) || t.taken && !answers {
		t.cleared = true
	}
	if !t.cmd.Detach() {
		return
	}
	if t.cleared { // section 11.14.5
		c.sess.nexus.ClearedByTransport(t.header().LUN())
	}
	if t.buf != nil {
		t.buf.chargeTo(&c.node.detached)
	}
	if t.stash != nil {
		t.stash.chargeTo(&c.node.detached)
	}
	c.node.stats.detached.Add(1)
	next := newSlot(c, t.Mover)
	if answers {
		c.answerFor(t, next)
	} else {
		c.leave(t)
		if t.bound {
			c.dm.Unbind(t)
		}
		c.freeTask(next)
	}
	if c.phase != phaseEnded {
		c.workers.Go(func() {
			if c.shared.fence != nil {
				c.sess.releaseHeld()
			}
			c.tellLoss()
		})
	}
	c.workers.Done()
}

// answerFor queues TASK ABORTED for t, which was detached, from next, which takes the place of t.
//
// Preconditions: c.mu is held; the rest as for detach.
func (c *conn) answerFor(t, next *Task) {
	t.leaveOrder()
	c.shared.tasks.remove(t)
	next.req, next.bound, next.seq, next.state = t.req, t.bound, t.seq, t.state
	next.off, next.transfers, next.recovery.snackTag = t.off, t.transfers, t.recovery.snackTag
	next.cmd.LUN, next.cmd.CDB = next.header().LUN(), next.header().CDB()
	next.taken = true
	c.shared.tasks.insert(next)
	c.answer(next)
}

// leftUnit follows every call of the logical unit for t. If t was detached, leftUnit gives back what
// the goroutine has kept and ends the goroutine: nothing of its connection concerns it any longer.
func (t *Task) leftUnit() {
	if t.cmd.Detached() {
		t.endDetached()
		runtime.Goexit()
	}
	if t.aborted.Load() {
		c := t.conn
		c.mu.Lock()
		c.shared.changed.Broadcast() // those who wait only until t is out of the unit
		c.mu.Unlock()
	}
}

// endDetached gives back what a detached task has kept.
func (t *Task) endDetached() {
	c, nd := t.conn, t.conn.node
	c.mu.Lock() // then detach has ended
	off := t.off
	c.mu.Unlock()
	c.sess.nexus.Count(&t.cmd, off, true)
	if t.buf != nil {
		t.buf.Release()
	}
	t.giveStash()
	nd.stats.detached.Add(-1)
}
