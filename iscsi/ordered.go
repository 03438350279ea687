package iscsi

import (
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// An orderedGate keeps the order between commands with the ORDERED attribute of a target and all
// others. The target's logical units have one task set for all initiators (TST 000b), so ORDERED
// commands and those of other sessions wait for one another too (SAM-5, section 8.6). Without
// ORDERED commands the gate costs a session two loads for each command.
type orderedGate struct {
	tasks atomic.Int32  // ORDERED commands, from becoming ready to their end
	clock atomic.Uint64 // counts them as they become ready

	mu      sync.Mutex // a leaf
	changed sync.Cond  // on mu
	moves   uint64     // guarded by mu: how often something may have moved
}

func newOrderedGate() *orderedGate {
	g := &orderedGate{}
	g.changed.L = &g.mu
	return g
}

// enter gives t its place among the commands of all sessions, as it becomes ready. It reports
// whether t may have to wait.
//
// Preconditions: shared.mu of the session is held.
func (g *orderedGate) enter(t *Task) bool {
	if !t.isOrdered() {
		t.orderStamp = g.clock.Load() // before tasks: see readyBefore
		return g.tasks.Load() > 0
	}
	g.tasks.Add(1)
	t.orderStamp = g.clock.Add(1)
	return true
}

// leave takes back enter.
func (g *orderedGate) leave(t *Task) {
	if t.isOrdered() {
		g.tasks.Add(-1)
		g.wake()
	} else {
		g.moved()
	}
}

// moved wakes the waiters. Callers have changed something that may end a wait.
func (g *orderedGate) moved() {
	if g.tasks.Load() > 0 { // else nobody waits
		g.wake()
	}
}

func (g *orderedGate) wake() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.moves++
	g.changed.Broadcast()
}

// readyBefore reports whether u, of another session, became ready before t, if one of them is
// ORDERED. Two commands that are not ORDERED have no order.
func readyBefore(u, t *Task) bool {
	switch {
	case t.isOrdered(): // u has seen an earlier clock, or advanced it
		return u.orderStamp < t.orderStamp
	case u.isOrdered(): // t has seen the clock that u has advanced
		return u.orderStamp <= t.orderStamp
	}
	return false
}

// awaitOlder waits until the tasks have ended that have to end before t begins, by SAM's task
// attributes: all older ones for the logical unit if t is ORDERED, otherwise the older ORDERED
// ones. It returns false if t cannot begin: it is aborted, or its connection is lost.
func (c *conn) awaitOlder(t *Task) bool {
	if t.header().Attr() == pdu.AttrHeadOfQueue {
		return true
	}
	waits := func() bool { return !t.aborted.Load() && !c.recovery.suspends.Load() }
	sameUnit := func(u *Task) bool { return c.sess.nexus.SameUnit(u.header().LUN(), t.header().LUN()) }
	c.mu.Lock()
	older := func(u *Task) bool {
		return u.seq != 0 && u.seq < t.seq && u.isCommand() && (t.isOrdered() || u.isOrdered()) && sameUnit(u)
	}
	for waits() && c.shared.tasks.any(older) {
		c.shared.changed.Wait()
	}
	c.mu.Unlock()

	g := c.sess.target.gate
	elsewhere := func(u *Task) bool { return u.seq != 0 && u.isCommand() && readyBefore(u, t) && sameUnit(u) }
	for waits() {
		g.mu.Lock()
		moves := g.moves
		g.mu.Unlock()
		blocked := false
		for _, s := range c.node.otherSessions(c.sess) {
			s.shared.mu.Lock()
			blocked = blocked || s.shared.tasks.any(elsewhere)
			s.shared.mu.Unlock()
		}
		if !blocked {
			break
		}
		g.mu.Lock()
		for g.moves == moves && waits() {
			g.changed.Wait()
		}
		g.mu.Unlock()
	}
	return waits()
}
