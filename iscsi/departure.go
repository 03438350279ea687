package iscsi

import (
	"time"

	"github.com/iser-target/iser-target/lun"
)

// A Departure is for a mover that learns at once of several PDUs that have left. It does what Task.Sent does for each, but reads the
// clock, takes the lock of the slots and counts for many. The zero value is ready. It belongs to one goroutine at a time.
type Departure struct {
	at          time.Duration // by clock, when the first of them had left
	first, last *Task         // slots to make free, linked by nextFree
	slots       int64
	spent       lun.Tally
}

// Sent does what t.Sent does, in part not before End. All tasks are of one connection.
func (d *Departure) Sent(t *Task) {
	if t.recovery.kept {
		t.Sent()
		return
	}
	d.free(t)
}

// free makes the slot of t free.
func (d *Departure) free(t *Task) {
	if d.first == nil {
		d.at, d.last = clock(), t
	}
	t.countSpent(d.at, &d.spent)
	t.reset()
	if t.stash != nil && !t.conn.keepsStash(t) {
		t.giveStash()
	}
	t.nextFree, d.first = d.first, t
	d.slots++
}

// End ends what the calls of Sent have begun. It takes leaf locks only.
func (d *Departure) End() {
	if d.first == nil {
		return
	}
	d.spent.End()
	c := d.first.conn
	c.node.stats.tasks.Add(-d.slots)
	p := &c.slots
	p.mu.Lock()
	d.last.nextFree, p.free = p.free, d.first
	p.moves++
	p.mu.Unlock()
	p.freed.Broadcast()
	d.first, d.last, d.slots = nil, nil, 0
}
