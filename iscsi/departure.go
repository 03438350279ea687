package iscsi

import (
	"time"

	"github.com/iser-target/iser-target/lun"
)

// A Departure is for a mover that learns at once of several PDUs that have left. It does what Task.Sent and Buffer.Release do for each, but
// reads the clock, takes the locks of slots and memory and counts for many. The zero value is ready. It belongs to one goroutine at a time.
type Departure struct {
	at          time.Duration // by clock, when the first of them had left
	first, last *Task         // slots to make free, linked by nextFree
	slots       int
	spent       lun.Tally

	// Of Buffers that were released: bytes of data, and of the send queue.
	budget              *budget
	room                *quota
	pieces, size, freed int
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

// Release does what b.Release does, in part not before End.
func (d *Departure) Release(b *Buffer) {
	if !b.plain() || b.room == nil {
		b.Release()
		return
	}
	if d.budget != b.budget || d.room != b.room {
		d.giveBack()
		d.budget, d.room = b.budget, b.room
	}
	d.pieces++
	d.size += len(b.data)
	d.freed += b.queued
	b.room = nil
	b.leave()
	d.budget.pool.put(b)
}

// giveBack gives back the room of Buffers.
func (d *Departure) giveBack() {
	if d.pieces == 0 {
		return
	}
	d.room.done.Add(uint64(d.pieces))
	d.room.release(d.freed)
	d.budget.release(d.size, d.pieces)
	d.budget, d.room, d.pieces, d.size, d.freed = nil, nil, 0, 0, 0
}

// End ends what the calls of Sent and Release have begun. It takes leaf locks only, and that of the memory of the Node.
func (d *Departure) End() {
	d.giveBack()
	if d.first == nil {
		return
	}
	d.spent.End()
	c := d.first.conn
	p := &c.slots
	p.mu.Lock()
	c.useSlots(-d.slots)
	d.last.nextFree, p.free = p.free, d.first
	p.moves++
	p.mu.Unlock()
	p.freed.Broadcast()
	d.first, d.last, d.slots = nil, nil, 0
}
