package iscsi

import (
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/lun/invariant"
)

const (
	// immediateSlots are task slots in addition to the command window, which does not count
	// immediate requests.
	immediateSlots = 32
	// Commands and task management functions can hold immediate slots for long. Requests that are
	// answered at once get the rest. So they always get a slot once the network has taken the last
	// answers.
	maxImmediateCommands = 16
	maxImmediateTMFs     = 8
	// targetSlots are for PDUs that no request asked for: Reject, NOP-In, Asynchronous Message.
	targetSlots = 8
)

// slotsFor returns how many task slots a connection has whose session may have depth commands in
// flight.
func slotsFor(depth int) int { return depth + immediateSlots + targetSlots }

// A slotPool has the free task slots of a connection. Slots are made as they are needed.
type slotPool struct {
	mu     sync.Mutex // a leaf; also guards Task.resend
	freed  sync.Cond  // on mu
	free   *Task      // linked by nextFree
	made   int
	used   int    // slots that are not free
	left   bool   // nothing else is left of the connection, and the Node counts the used slots
	closed bool   // no slot is taken: see freeze
	moves  uint64 // counts what may give newTask a slot
	max    int

	trimmed atomic.Bool // the connection has ended: free slots keep nothing
}

// exhausted reports whether all slots are in use.
//
// Preconditions: p.mu is held.
func (p *slotPool) exhausted() bool { return p.closed || p.free == nil && p.made == p.max }

// useSlots counts n more slots as used.
//
// Preconditions: slots.mu is held.
func (c *conn) useSlots(n int) {
	p := &c.slots
	invariant.Held(&p.mu)
	p.used += n
	if p.left {
		c.node.stats.strays.Add(int64(n))
	}
}

// tasks returns how many slots are used.
func (p *slotPool) tasks() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}

// leaveSlots makes the Node count the slots that are used.
func (c *conn) leaveSlots() {
	p := &c.slots
	p.mu.Lock()
	defer p.mu.Unlock()
	p.left = true
	c.node.stats.strays.Add(int64(p.used))
}

// setMax sets the number of slots.
func (p *slotPool) setMax(max int) {
	p.mu.Lock()
	p.max = max
	p.mu.Unlock()
}

// newTask returns an empty slot. If all are in use it waits until the network has taken a
// response. It returns nil if the connection is ending.
func (c *conn) newTask() *Task {
	p := &c.slots
	waited := false
	p.mu.Lock()
	for p.exhausted() {
		select {
		case <-c.ending:
			p.mu.Unlock()
			return nil
		default:
		}
		if !waited {
			waited = true
			p.mu.Unlock()
			c.dm.Flush() // answers that flush has put off
			p.mu.Lock()
			continue
		}
		if c.recovery.store.on {
			moves := p.moves
			p.mu.Unlock()
			freed := c.giveUpStatus()
			p.mu.Lock()
			if freed || p.moves != moves { // nobody has waited for the signal
				continue
			}
		}
		p.freed.Wait()
	}
	t := c.takeSlot()
	t.waited = waited
	return t
}

// takeSlot returns an empty slot and makes it if need be. It unlocks slots.mu.
//
// Preconditions: slots.mu is held; the slots are not exhausted.
func (c *conn) takeSlot() *Task {
	p := &c.slots
	t := p.free
	if t != nil {
		p.free, t.nextFree = t.nextFree, nil
	} else {
		p.made++
	}
	c.useSlots(1)
	p.mu.Unlock()
	if t == nil {
		c.node.memory.add(&c.budget, slotBytes, true)
		t = newSlot(c, c.dm.NewTask())
	}
	return t
}

// newSlot makes a slot of c with that state of the mover.
func newSlot(c *conn, mover any) *Task {
	t := &Task{conn: c, Mover: mover, wake: make(chan struct{}, 1)}
	t.cmd.Abort, t.cmd.Owner = &t.aborted, t
	return t
}

// freeTask makes the slot of t, one of c, free. It takes leaf locks only.
func (c *conn) freeTask(t *Task) {
	var d Departure
	d.free(t)
	d.End()
}

// maxKeptStash is the longest Buffer that a free slot keeps for the next request, in bytes.
const maxKeptStash = 64 << 10

// keepsStash reports whether the free slot of t may keep its Buffer.
func (c *conn) keepsStash(t *Task) bool {
	return len(t.stash.data) <= maxKeptStash && !c.node.memory.short.Load() && !c.slots.trimmed.Load()
}

// trimSlots gives back the Buffers of free slots.
func (c *conn) trimSlots() {
	p := &c.slots
	p.mu.Lock()
	var list []*Buffer
	for t := p.free; t != nil; t = t.nextFree {
		if t.stash != nil {
			list = append(list, t.stash)
			t.stash = nil
		}
	}
	p.mu.Unlock()
	for _, b := range list {
		b.Release()
	}
}
