package iscsi

import (
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// An order is about the commands with the ORDERED attribute of a target. Its
// logical units have one task set for all initiators (TST 000b), so that such a
// command and those of other sessions wait for one another as well (SAM-5,
// section 8.6). Where there is none of them, all this costs a session two loads
// for a command.
type order struct {
	tasks atomic.Int32  // ORDERED commands, from becoming ready to their end
	clock atomic.Uint64 // counts them as they become ready

	mu      sync.Mutex // a leaf
	changed sync.Cond  // on mu
	moves   uint64     // guarded by mu: how often something may have moved
}

func newOrder() *order {
	o := &order{}
	o.changed.L = &o.mu
	return o
}

// enter gives t its place among the commands of all sessions, as it becomes ready.
// It tells whether t may have to wait.
//
// Preconditions: the mu of the session is held.
func (o *order) enter(t *Task) bool {
	if !t.isOrdered() {
		t.stamp = o.clock.Load() // first: see before
		return o.tasks.Load() > 0
	}
	o.tasks.Add(1)
	t.stamp = o.clock.Add(1)
	return true
}

// leave is the other half of enter.
func (o *order) leave(t *Task) {
	if t.isOrdered() {
		o.tasks.Add(-1)
		o.wake()
	} else {
		o.moved()
	}
}

// moved wakes who waits. It has to be called after a change that may end that.
func (o *order) moved() {
	if o.tasks.Load() > 0 { // else nobody waits
		o.wake()
	}
}

func (o *order) wake() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.moves++
	o.changed.Broadcast()
}

// before tells whether u, of another session, became ready before t, one of them
// being ORDERED. Two of which none is have no order.
func before(u, t *Task) bool {
	switch {
	case t.isOrdered(): // u has seen an earlier clock, or made it go
		return u.stamp < t.stamp
	case u.isOrdered(): // t has seen what u has made of the clock
		return u.stamp <= t.stamp
	}
	return false
}

// waitTurn waits until the tasks have ended that SAM's task attributes want to
// see ended before t begins: all older ones for the logical unit if t is ORDERED,
// otherwise the older ORDERED ones. It returns false if t cannot go on: it is
// aborted, or its connection is lost.
func (c *conn) waitTurn(t *Task) bool {
	if t.header().Attr() == pdu.AttrHeadOfQueue {
		return true
	}
	waits := func() bool { return !t.aborted.Load() && !c.suspends.Load() }
	sameUnit := func(u *Task) bool { return c.sess.nexus.SameUnit(u.header().LUN(), t.header().LUN()) }
	c.mu.Lock()
	older := func(u *Task) bool {
		return u.seq != 0 && u.seq < t.seq && u.isCommand() && (t.isOrdered() || u.isOrdered()) && sameUnit(u)
	}
	for waits() && c.tasks.any(older) {
		c.changed.Wait()
	}
	c.mu.Unlock()

	o := c.sess.target.order
	elsewhere := func(u *Task) bool { return u.seq != 0 && u.isCommand() && before(u, t) && sameUnit(u) }
	for waits() {
		o.mu.Lock()
		moves := o.moves
		o.mu.Unlock()
		blocked := false
		for _, s := range c.node.neighbours(c.sess) {
			s.mu.Lock()
			blocked = blocked || s.tasks.any(elsewhere)
			s.mu.Unlock()
		}
		if !blocked {
			break
		}
		o.mu.Lock()
		for o.moves == moves && waits() {
			o.changed.Wait()
		}
		o.mu.Unlock()
	}
	return waits()
}
