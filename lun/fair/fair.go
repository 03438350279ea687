// Package fair decides which call of a store begins next. A Gate belongs to a LUN: every call that a
// command makes enters it and leaves it. A Process has what the Gates of a process share.
//
//	if !gate.Enter(&call, fair.Work{Ops: 1, Bytes: n}) {
//		return errAborted // or the gate is shut
//	}
//	err := store.ReadAt(p, off)
//	gate.Leave(&call)
//
// # Bounds
//
// A call of a store that can block takes a thread. A LUN has at most limits.backend_calls_per_lun such
// calls under way, and the process limits.backend_calls. Each LUN gets one call in any case. Calls that
// take longer than a second do not count in the process, up to as many as the bound: so LUNs whose stores
// hang do not keep others out. At most twice limits.backend_calls and one call per LUN are under way. A
// command that waits is a goroutine on a channel, which has no thread, and Call.Cancel ends its wait.
//
// # Fairness
//
// As long as nobody waits, a call enters with a few atomic operations. Else initiators take turns at
// the gate of a LUN, and LUNs at the bound of the process. They take turns by work, not by numbers of
// calls (start-time fair queueing). An initiator that has nothing to do gives its turn away.
//
// # Rates
//
// Gate.SetRates limits or guarantees commands and bytes per second, for the LUN and for initiators by
// their names. Calls that would exceed a limit wait, and delay nobody else. Of calls that wait, those
// of initiators and LUNs that got less than is guaranteed to them begin first.
//
// # Heavy work
//
// Work with Heavy set, such as a step of WRITE SAME, also takes one of the few places that
// limits.heavy_commands gives the process. Initiators take turns there by the CPU time that they use. While
// others read and write, each place pauses after a step, so that it uses at most a fifth of a CPU.
package fair

import (
	"sync/atomic"
	"time"
)

// Work says what a call does. It is what rates and turns count.
type Work struct {
	Ops   int64 // operations: 1 for the first call of a command, 0 for its others
	Bytes int64 // that move to or from the medium
	Heavy bool  // it takes much CPU time for what the initiator sends
	More  bool  // it is Heavy and enters another gate as well, where it takes the place for heavy work
}

// callCost is what a call is worth in turns, in addition to its bytes.
const callCost = 16 << 10

func (w Work) cost() int64 { return callCost + w.Bytes }

// A Call is one call of a store at a time. A command has one, or a few, and uses it again and again.
type Call struct {
	Who   string       // the initiator, as a normalized name
	Abort *atomic.Bool // if not nil: becomes true when the command has to stop soon
	// Waited is how long the call has waited for its turns. Its owner sets it to 0.
	Waited time.Duration

	work Work
	slot int32 // 0: none; else the index of the slot plus one
	seen int64 // the last step of heavy work that heavies heard of this call in

	gate   atomic.Pointer[Gate]    // where it waits, or is about to
	heavy  atomic.Pointer[heavies] // the same
	wait   wait                    // guarded by the mutex of where it waits
	began  time.Duration           // of that
	wake   chan struct{}           // ends the wait; capacity 1
	next   *Call                   // in a queue; so is prev
	prev   *Call
	number uint64 // in the order of arrival at the gate
	place  int    // among the heavies: its index plus one
	cpu    time.Duration
}

// A wait is how far a Call is.
type wait uint8

const (
	outside wait = iota // it has never waited
	queued              // nobody has to be woken
	parked              // a goroutine waits on wake
	granted
	refused
)

func (c *Call) aborted() bool { return c.Abort != nil && c.Abort.Load() }

// Cancel makes Enter return false soon if c waits in it. Abort of c is true before.
func (c *Call) Cancel() {
	if g := c.gate.Load(); g != nil {
		g.cancel(c)
	}
	if h := c.heavy.Load(); h != nil {
		h.cancel(c)
	}
}

// settle ends the wait of c, which has left its queue, and wakes its goroutine.
//
// Preconditions: the mutex of where c waits is held.
func (c *Call) settle(w wait) {
	was := c.wait
	c.wait = w
	c.gate.Store(nil)
	c.heavy.Store(nil)
	if was == parked {
		c.wake <- struct{}{}
	}
}

// park prepares c to wait on wake, and returns false if it does not have to.
//
// Preconditions: the mutex of where c waits is held.
func (c *Call) park() bool {
	if c.wait != queued {
		return false
	}
	if c.wake == nil {
		c.wake = make(chan struct{}, 1)
	}
	c.wait = parked
	return true
}

// waits reports whether c is in a queue.
func (c *Call) waits() bool { return c.wait == queued || c.wait == parked }

// A queue has the waiting calls of one kind and initiator, the oldest first. Its zero value is empty.
type queue struct{ head, tail *Call }

func (q *queue) push(c *Call) {
	c.next, c.prev = nil, q.tail
	if q.tail == nil {
		q.head = c
	} else {
		q.tail.next = c
	}
	q.tail = c
}

func (q *queue) remove(c *Call) {
	if c.prev == nil {
		q.head = c.next
	} else {
		c.prev.next = c.next
	}
	if c.next == nil {
		q.tail = c.prev
	} else {
		c.next.prev = c.prev
	}
	c.next, c.prev = nil, nil
}

// A turn is the place of something in a line.
type turn struct {
	at  int   // the index plus one; 0: it is not in the line
	tag int64 // the work after which it is its turn
}

// A line has those that wait for a turn. The next one is that with the least work behind it (start-time
// fair queueing). Who comes back after a pause has as much behind it as those that were served last.
type line[T interface {
	comparable
	turnOf() *turn
}] struct {
	list []T
	now  int64 // the highest tag of those that were served
}

func (l *line[T]) len() int { return len(l.list) }

// add adds t unless it is in the line.
func (l *line[T]) add(t T) {
	turn := t.turnOf()
	if turn.at != 0 {
		return
	}
	l.list = append(l.list, t)
	turn.at = len(l.list)
	turn.tag = max(turn.tag, l.now)
}

// remove takes t out of the line if it is there.
func (l *line[T]) remove(t T) {
	turn := t.turnOf()
	if turn.at == 0 {
		return
	}
	last := len(l.list) - 1
	moved := l.list[last]
	l.list[turn.at-1] = moved
	moved.turnOf().at = turn.at
	var none T
	l.list[last] = none
	l.list = l.list[:last]
	turn.at = 0
}

// next returns the one whose turn it is of those that ready accepts. ok is false if it accepts none.
func (l *line[T]) next(ready func(T) bool) (next T, ok bool) {
	for _, t := range l.list {
		if ready(t) && (!ok || t.turnOf().tag < next.turnOf().tag) {
			next, ok = t, true
		}
	}
	return next, ok
}

// charge counts work of t, whose turn it was.
func (l *line[T]) charge(t T, cost int64) {
	turn := t.turnOf()
	l.now = max(l.now, turn.tag)
	turn.tag += cost
}

// forgotten reports whether t has no more work behind it than those that come back after a pause.
func (l *line[T]) forgotten(t T) bool { return t.turnOf().tag <= l.now }
