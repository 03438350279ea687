package iscsi

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
)

// Order by task attributes (SAM-5, section 8.6) has two steps. Within its session a command waits
// for older ones as it becomes ready: awaitOlder. Among all sessions with the target, which share
// one task set (TST 000b), a command takes a place when it can run, and waits for those with an
// earlier place: takeTurn. A WRITE can run when the first piece of its data is there, a READ when
// it has a Buffer. So a command that waits for its own initiator, or for an older command that
// does, has no place and stops nobody else. A command that comes to wait for its initiator later
// loses its place after limits.order_timeout if another session waits for it, and fails.

// An orderedGate keeps the order among all sessions with a target. Without ORDERED commands it
// costs a command a few atomic operations.
type orderedGate struct {
	tasks atomic.Int32  // ORDERED commands that have a place
	clock atomic.Uint64 // counts them; written with mu held

	mu      sync.Mutex // before that of slow only
	changed sync.Cond  // on mu
	moves   uint64     // guarded by mu: how often something may have moved
	ordered []*Task    // guarded by mu: ORDERED commands that have a place

	slow laggards // stop nobody
}

func newOrderedGate() *orderedGate {
	g := &orderedGate{}
	g.changed.L = &g.mu
	return g
}

// A holding says whether a command that has a place can lose it.
const (
	placeKept = iota
	placeIdle // the command waits for its initiator
	placeLost // it has waited too long
)

// enter gives t its place. It reports whether t may have to wait.
func (g *orderedGate) enter(t *Task) bool {
	if t.isOrdered() {
		g.mu.Lock()
		defer g.mu.Unlock()
		now := g.clock.Load() + 1
		g.tasks.Add(1)
		g.ordered = append(g.ordered, t)
		t.place.Store(now + 1)
		g.clock.Store(now) // last: see placedBefore
		return true
	}
	for first := true; ; first = false {
		now := g.clock.Load()
		t.place.Store(now + 1)
		if g.clock.Load() != now {
			continue // an ORDERED command that has not seen the place yet may not wait for it
		}
		if !first {
			g.wake() // one that has seen the old place waits in vain
		}
		return g.tasks.Load() > 0
	}
}

// leave takes its place from t if it has one.
func (g *orderedGate) leave(t *Task) {
	switch {
	case t.place.Load() == 0:
	case t.isOrdered():
		g.mu.Lock()
		defer g.mu.Unlock()
		g.leaveOrdered(t)
	default:
		t.place.Store(0)
		g.moved()
	}
}

// leaveOrdered does the work of leave for an ORDERED command.
//
// Preconditions: g.mu is held.
func (g *orderedGate) leaveOrdered(t *Task) {
	invariant.Held(&g.mu)
	if t.place.Swap(0) == 0 {
		return
	}
	g.tasks.Add(-1)
	g.ordered = slices.DeleteFunc(g.ordered, func(u *Task) bool { return u == t })
	g.moves++
	g.changed.Broadcast()
}

// lose takes its place from u, whose initiator has let others wait for too long.
//
// Preconditions: g.mu is held.
func (g *orderedGate) lose(u *Task) {
	invariant.Held(&g.mu)
	name := u.conn.sess.key.initiator
	g.slow.add(name)
	u.conn.node.shared.OrderTimeout.Bite(name)
	if u.isOrdered() {
		g.leaveOrdered(u)
		return
	}
	u.place.Store(0)
	g.moves++
	g.changed.Broadcast()
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

// placedBefore reports whether u, of another session, has a place before that of t, if one of them
// is ORDERED. Two commands that are not ORDERED have no order. An ORDERED command stores its place
// before it advances the clock. So a command that has read the new clock sees that place, and one
// that has read the old one stored its own place before the ORDERED command looked.
func placedBefore(u, t *Task) bool {
	at := u.place.Load()
	switch {
	case at == 0:
		return false
	case t.isOrdered():
		return at < t.place.Load()
	case u.isOrdered():
		return at <= t.place.Load()
	}
	return false
}

// awaitOlder waits until the commands of the session have ended that have to end before t begins:
// all older ones for the logical unit if t is ORDERED, otherwise the older ORDERED ones. It returns
// false if t cannot begin: it is aborted, or its connection is lost.
func (c *conn) awaitOlder(t *Task) bool {
	if t.header().Attr() == pdu.AttrHeadOfQueue {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for t.canWait() && c.shared.tasks.any(t.mustFollow) {
		t.waits.Store(waitsOlder)
		c.shared.changed.Wait()
	}
	t.waits.Store(waitsNot)
	return t.canWait()
}

// mustFollow reports whether t begins after u, a command of its session, has ended.
//
// Preconditions: t.conn.mu is held.
func (t *Task) mustFollow(u *Task) bool {
	return u.seq != 0 && u.seq < t.seq && u.isCommand() && (t.isOrdered() || u.isOrdered()) && t.sameUnit(u)
}

// canWait reports whether t is neither aborted nor on a lost connection.
func (t *Task) canWait() bool { return !t.aborted.Load() && !t.conn.recovery.suspends.Load() }

// takeTurn gives t its place among the commands of all sessions, unless it has one, and waits for
// those before it. It returns false if t cannot continue, as awaitOlder does.
func (t *Task) takeTurn() bool {
	g := t.conn.shared.gate
	if t.place.Load() != 0 {
		return true
	}
	return !g.enter(t) || t.header().Attr() == pdu.AttrHeadOfQueue || t.awaitOthers(g)
}

// leaveOrder takes its place from t, which does nothing to the medium any longer, or nothing yet.
func (t *Task) leaveOrder() { t.conn.shared.gate.leave(t) }

// idle notes that t, which has moved some of its data, waits for its initiator.
func (t *Task) idle() {
	if t.place.Load() != 0 {
		t.hold.Store(placeIdle)
	}
}

// resume takes back idle. It returns false if t has lost its place meanwhile: then t has to fail.
func (t *Task) resume() bool {
	return t.hold.Load() == placeKept || t.hold.CompareAndSwap(placeIdle, placeKept)
}

// awaitOthers does the waiting of takeTurn.
func (t *Task) awaitOthers(g *orderedGate) bool {
	began, limit := clock(), t.conn.node.shared.OrderTimeout.Time()
	var timer *time.Timer
	for t.canWait() {
		g.mu.Lock()
		moves := g.moves
		g.mu.Unlock()
		late := clock()-began >= limit
		if !t.isBlocked(g, late) {
			break
		}
		t.waited = true
		t.waits.Store(waitsOthers)
		switch {
		case timer == nil:
			timer = time.AfterFunc(limit, g.wake)
			defer timer.Stop()
		case late: // a backend may be slow, and the initiator later
			timer.Reset(limit/8 + time.Millisecond)
		}
		g.mu.Lock()
		for g.moves == moves && t.canWait() {
			g.changed.Wait()
		}
		g.mu.Unlock()
	}
	t.waits.Store(waitsNot)
	return t.canWait()
}

// isBlocked reports whether a command of another session is before t, in the same task set. If t is late, those
// that wait for their initiators lose their places.
func (t *Task) isBlocked(g *orderedGate, late bool) (blocked bool) {
	own := t.conn.sess
	if own.nexus.HasOwnTaskSet(t.header().LUN()) {
		return false
	}
	look := func(u *Task) {
		s := u.conn.sess
		if s == own || !u.isCommand() || !placedBefore(u, t) || !t.sameLUN(u) || g.slow.has(s.key.initiator) ||
			s.nexus.ReadOnly(u.header().LUN()) { // it may not stop those that write
			return
		}
		if late && u.hold.CompareAndSwap(placeIdle, placeLost) {
			g.lose(u)
			return
		}
		blocked = true
	}
	if !t.isOrdered() {
		g.mu.Lock()
		defer g.mu.Unlock()
		for _, u := range slices.Clone(g.ordered) {
			look(u)
		}
		return blocked
	}
	for _, s := range t.conn.node.otherSessions(own) {
		s.shared.mu.Lock()
		g.mu.Lock()
		s.shared.tasks.each(look)
		g.mu.Unlock()
		s.shared.mu.Unlock()
	}
	return blocked
}

// sameLUN reports whether t and u are for the same logical unit of their target.
func (t *Task) sameLUN(u *Task) bool {
	return t.conn.sess.nexus.SameUnit(u.header().LUN(), t.header().LUN())
}

// senseNotTaken is INITIATOR RESPONSE TIMEOUT: the initiator has not sent or taken data in time.
var senseNotTaken = lun.Sense{Key: 0x0b, ASC: 0x4b, ASCQ: 0x06}
