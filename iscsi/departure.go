package iscsi

import (
	"time"

	"github.com/iser-target/iser-target/lun"
)

// A Departure is for a mover that learns at once of several PDUs that have left. It does what Task.Sent does for each, but reads the
// clock, takes the lock of the slots and counts for many. The zero value is ready. It belongs to one goroutine at a time.
type Departure struct {
	at          time.Duration // by clock, when the first of them had left
	first, last *Task         // slots of one connection, linked by nextFree, to make free
	slots       int64
	spent       lun.Tally
}

// Sent does what t.Sent does, in part not before End.
func (d *Departure) Sent(t *Task) {
	c := t.conn
	switch {
	case t.recovery.kept:
		t.Sent()
		return
	case d.first != nil && d.first.conn != c:
		d.End()
	}
	if d.first == nil {
		d.at, d.last = clock(), t
	}
	t.countSpent(d.at, &d.spent)
	c.empty(t)
	t.nextFree, d.first = d.first, t
	d.slots++
}

// End ends what the calls of Sent have begun.
func (d *Departure) End() {
	if d.first == nil {
		return
	}
	d.spent.End()
	d.first.conn.freeSlots(d.first, d.last, d.slots)
	d.first, d.last, d.slots = nil, nil, 0
}
