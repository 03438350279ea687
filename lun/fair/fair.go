// Package fair decides which call of a store begins next. A Gate belongs to a LUN: every call that a
// command makes enters it and leaves it. A Process has what the Gates of a process share.
//
//	if !gate.Enter(&call, fair.Work{Bytes: n}) {
//		return errAborted // or the gate is shut
//	}
//	err := store.ReadAt(p, off)
//	gate.Leave(&call)
package fair

import (
	"sync/atomic"
	"time"
)

// A Process is what the Gates of a process share.
type Process struct {
	clock    clock
	underWay atomic.Int64 // calls of all gates
}

// NewProcess returns a Process without gates.
func NewProcess() *Process {
	p := &Process{}
	p.clock.busy = func() bool { return p.underWay.Load() > 0 }
	return p
}

// A Gate is the way to the store of a LUN.
type Gate struct {
	process  *Process
	blocking bool
	underWay atomic.Int64
	slots    slots
}

// NewGate returns a gate. blocking says that a call may take a thread while it waits for a device:
// only such calls are counted and bounded.
func (p *Process) NewGate(blocking bool) *Gate { return &Gate{process: p, blocking: blocking} }

// A Call is one call of a store at a time. A command has one and uses it again and again.
type Call struct {
	Who   string       // the initiator, as a normalized name
	Abort *atomic.Bool // if not nil: becomes true when the command has to stop soon

	slot int32 // 0: none; else the index of the slot plus one
}

// Work says what a call does.
type Work struct {
	Bytes int64 // that move to or from the medium
}

// Enter counts a call as under way. It returns false if the command was aborted. Leave follows if
// it returns true.
func (g *Gate) Enter(c *Call, _ Work) bool {
	if c.Abort != nil && c.Abort.Load() {
		return false
	}
	g.begin(c)
	return true
}

// Force does what Enter does, but never waits and never fails.
func (g *Gate) Force(c *Call) { g.begin(c) }

func (g *Gate) begin(c *Call) {
	if g.blocking {
		g.process.underWay.Add(1)
		c.slot = g.slots.take(g.underWay.Add(1)-1, g.process.clock.read())
	}
}

// Cancel makes Enter return false soon if c waits in it. Abort of c is true before.
func (c *Call) Cancel() {}

// Leave ends a call that has entered.
func (g *Gate) Leave(c *Call) {
	if g.blocking {
		g.slots.give(c.slot)
		g.underWay.Add(-1)
		g.process.underWay.Add(-1)
	}
}

// A State describes a gate at one time.
type State struct {
	UnderWay int           // calls of a store that can block, which have begun and not returned
	Waiting  int           // commands that wait for their turn
	Oldest   time.Duration // for how long the oldest call has been under way, to a tenth of a second
}

// State describes g at this time.
func (g *Gate) State() State {
	s := State{UnderWay: int(g.underWay.Load())}
	if since := g.slots.oldest(); since != 0 && s.UnderWay > 0 {
		s.Oldest = max(g.process.clock.now()-since, 0)
	}
	return s
}
