package iscsi

import "sync"

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
	mu    sync.Mutex // a leaf; also guards Task.resend
	freed sync.Cond  // on mu
	free  *Task      // linked by nextFree
	made  int
	max   int
}

func (p *slotPool) init(max int) { p.max, p.freed.L = max, &p.mu }

// exhausted reports whether all slots are in use.
//
// Preconditions: p.mu is held.
func (p *slotPool) exhausted() bool { return p.free == nil && p.made == p.max }

// take returns a free slot, or nil if the caller has to make one. It unlocks p.mu.
//
// Preconditions: p.mu is held; the slots are not exhausted.
func (p *slotPool) take() *Task {
	t := p.free
	if t != nil {
		p.free, t.nextFree = t.nextFree, nil
	} else {
		p.made++
	}
	p.mu.Unlock()
	return t
}

// put makes the slot of t, which is empty, free.
func (p *slotPool) put(t *Task) {
	p.mu.Lock()
	t.nextFree, p.free = p.free, t
	p.mu.Unlock()
	p.freed.Signal()
}

// setMax sets the number of slots.
func (p *slotPool) setMax(max int) {
	p.mu.Lock()
	p.max = max
	p.mu.Unlock()
}

// grow raises the number of slots by n and returns the new one.
func (p *slotPool) grow(n int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.max += n
	return p.max
}

// discard forgets all slots: they were made for another Datamover.
func (p *slotPool) discard() {
	p.mu.Lock()
	p.free, p.made = nil, 0
	p.mu.Unlock()
}

// wakeAll wakes the goroutines that wait for a slot: the connection is ending.
func (p *slotPool) wakeAll() {
	p.mu.Lock()
	p.freed.Broadcast()
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
			p.mu.Unlock()
			freed := c.giveUpStatus()
			p.mu.Lock()
			if freed {
				continue
			}
		}
		p.freed.Wait()
	}
	t := c.useSlot(p.take())
	t.waited = waited
	return t
}

// tryTask returns an empty slot for a goroutine that is not the connection's own. It returns nil
// if all slots are in use, or outside of the full feature phase.
func (c *conn) tryTask() *Task {
	c.mu.Lock()
	ok := c.phase == phaseFullFeature
	c.mu.Unlock()
	if !ok {
		return nil
	}
	return c.trySlot()
}

// trySlot does the work of tryTask for a connection in the full feature phase.
func (c *conn) trySlot() *Task {
	c.slots.mu.Lock()
	if c.slots.exhausted() {
		c.slots.mu.Unlock()
		return nil
	}
	return c.useSlot(c.slots.take())
}

// useSlot counts t as in use. If t is nil it makes a slot first.
func (c *conn) useSlot(t *Task) *Task {
	if t == nil {
		t = &Task{conn: c, Mover: c.dm.NewTask(), wake: make(chan struct{}, 1)}
		t.cmd.Abort = &t.aborted
	}
	c.node.stats.tasks.Add(1)
	return t
}

// freeTask makes the slot of t free. It takes leaf locks only.
func (c *conn) freeTask(t *Task) {
	t.countSpent()
	t.reset()
	c.node.stats.tasks.Add(-1)
	c.slots.put(t)
}
