package iscsi

import (
	"fmt"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
)

// Data that the initiator owes does not always come: what GetData asks for, and what a command has
// announced to come unsolicited. Without a bound its command would keep its slot and its Buffer for as
// long as the connection lives. limits.data_timeout bounds that. In the other direction an initiator
// may not take what the target sends, and limits.send_timeout bounds that. Commands take no time for
// these: the timer of the connection looks, a few times per limit, at what has moved since.

const (
	// enoughData is how many bytes have to move within a limit, or the rest if that is less. Less is
	// no progress: an initiator could move a byte now and then for ever.
	enoughData = 64 << 10

	// looksPerLimit is how often the timer of a connection looks within a limit, and lookAtLeast how
	// often it does whatever the limit is: a new one counts from the next look.
	looksPerLimit = 4
	lookAtLeast   = 10 * time.Second
)

// awaited is the data that a task waits for. conn.mu guards it.
type awaited struct {
	number uint64 // counts the transfers of the connection
	want   int    // bytes
	again  bool   // the target has asked for them once more
	stuck  bool   // they are overdue, and cannot be called off

	// Of the latest progress that the timer has seen.
	seen bool
	came uint64        // of Meter
	at   time.Duration // by clock
}

// A dataWatch is what a connection notes about data that comes. conn.mu guards it.
type dataWatch struct {
	transfers uint64 // so far
	came      uint64 // the lowest number of those that are complete since the timer looked; 0: none
}

// awaitData notes that t waits for n bytes.
//
// Preconditions: c.mu is held.
func (c *conn) awaitData(t *Task, n int) {
	c.data.transfers++
	t.await = awaited{number: c.data.transfers, want: n}
}

// dataCame notes that the data of t is complete.
//
// Preconditions: c.mu is held.
func (c *conn) dataCame(t *Task) {
	if n := t.await.number; c.data.came == 0 || n < c.data.came {
		c.data.came = n
	}
}

// progress returns a number that grows with the data that comes for t, and how many bytes are
// missing. It returns false if t does not wait for data.
//
// Preconditions: t.conn.mu is held.
func (t *Task) progress() (came uint64, missing int, ok bool) {
	switch {
	case t.state == taskWaiting && t.needsData:
		return uint64(t.arrived), int(t.unsolicited - t.arrived), true
	case t.state != taskFetching:
		return 0, 0, false
	}
	if m, ok := t.conn.dm.(Meter); ok {
		return m.Fetched(t)
	}
	return 0, t.await.want, true
}

// An overdueData is what lookData has to do without a lock.
type overdueData struct {
	events []DataTimeoutEvent
	flush  bool  // the target has asked again
	stuck  error // why the connection has to end; nil: it continues

	oldest  *Task // of those that are stuck
	missing int   // bytes of that
}

// lookData ends commands whose data does not come: a transfer that made no progress for
// limits.data_timeout, and neither did any that the connection asked for earlier. Initiators serve
// one after the other, so a transfer may wait for as long as those before it move. It returns when
// to look again.
//
// At ErrorRecoveryLevel 1 and above the target first asks again (RFC 7143, section 7.1.4.1). If the
// transfer cannot be called off, nothing that follows on the connection would come either, and the
// connection ends: responses to RDMA Reads come in order, and a Data-Out PDU comes as a whole.
func (k *keeper) lookData(now time.Duration) (next time.Duration) {
	c := k.c
	limit := &c.node.shared.DataTimeout
	c.mu.Lock()
	todo := c.endOverdue(now, limit.Time())
	c.mu.Unlock()
	for _, e := range todo.events {
		limit.Bite(e.Session.Initiator)
		c.opt.Events(e)
	}
	if todo.stuck != nil {
		c.end(todo.stuck)
		return 0
	}
	if len(todo.events) > 0 || todo.flush {
		c.runReady()
		c.start(c.dm.Flush)
	}
	return lookInterval(limit.Time())
}

// lookInterval returns when the timer looks next whether limit is over.
func lookInterval(limit time.Duration) time.Duration { return min(limit/looksPerLimit, lookAtLeast) }

// endOverdue does the work of lookData.
//
// Preconditions: c.mu is held.
func (c *conn) endOverdue(now, limit time.Duration) (todo overdueData) {
	moved := c.data.came - 1 // math.MaxUint64 if none came
	if c.data.came = 0; c.phase != phaseFullFeature {
		return todo
	}
	waits := false
	c.shared.tasks.each(func(t *Task) {
		if t.conn != c {
			return
		}
		came, _, ok := t.progress()
		if !ok {
			return
		}
		waits = true
		switch w := &t.await; {
		case !w.seen:
			w.seen, w.came, w.at = true, came, now
		case came-w.came >= enoughData:
			w.came, w.at = came, now
			moved = min(moved, w.number)
		}
	})
	if !waits {
		return todo
	}
	c.shared.tasks.each(func(t *Task) {
		if t.conn != c {
			return
		}
		_, missing, ok := t.progress()
		if !ok {
			return
		}
		w := &t.await
		if w.number > moved {
			w.at = now
		}
		if now-w.at < limit {
			return
		}
		c.endTransfer(t, now, missing, &todo)
	})
	if t := todo.oldest; t != nil {
		todo.stuck = c.stuckOn(t, todo.missing)
		todo.events = append(todo.events, c.dataTimeout(t, todo.missing))
	}
	return todo
}

// endTransfer ends the wait of t for data that is overdue, or asks for it again.
//
// Preconditions: c.mu is held; t waits for data.
func (c *conn) endTransfer(t *Task, now time.Duration, missing int, todo *overdueData) {
	w := &t.await
	repeater := c.recovery.store.repeater
	if t.state == taskWaiting {
		switch {
		case t.refusal != (lun.Sense{}) || t.noMemory: // the data was not needed
		case repeater != nil && !t.aborted.Load(): // an R2T asks for what is missing
			t.recovery.gap, todo.flush = true, true
			c.endUnsolicited(t)
			return
		default:
			t.refusal = senseNotTaken
		}
		c.endUnsolicited(t)
	} else {
		m, _ := c.dm.(Canceler)
		switch {
		case w.stuck:
			if todo.oldest == nil || w.number < todo.oldest.await.number {
				todo.oldest, todo.missing = t, missing
			}
			return
		case repeater != nil && !w.again && !t.aborted.Load() && repeater.AskAgain(t):
			w.again, w.at, todo.flush = true, now, true
			return
		case m == nil:
			w.stuck = true // unless its end is on the way, which the next look shows
			return
		case m.CancelData(t):
			t.fetched, t.fetchErr = true, ErrCanceled
			c.begin(t)
		default:
			if _, _, waits := t.progress(); !waits {
				return
			}
			w.stuck = true // unless the PDU ends before the next look
		}
	}
	todo.events = append(todo.events, c.dataTimeout(t, missing))
}

// dataTimeout returns the event that missing bytes for t have not come.
func (c *conn) dataTimeout(t *Task, missing int) DataTimeoutEvent {
	number, _ := lun.DecodeLUN(t.header().LUN())
	return DataTimeoutEvent{ConnAddr: c.addr(), Session: c.sess.name(), LUN: number, ITT: t.header().ITT(), Missing: missing,
		Limit: c.node.shared.DataTimeout.Time(), Ends: t.await.stuck}
}

// stuckOn returns why the connection ends because the data of t does not come.
func (c *conn) stuckOn(t *Task, missing int) error {
	what := "rest of a Data-Out PDU"
	if c.dm.RDMA() {
		what = "RDMA Read Response"
	}
	number, _ := lun.DecodeLUN(t.header().LUN())
	return fmt.Errorf("%s for the %v with ITT %#x to LUN %d has not come, %d bytes are missing: %v", what, pdu.SCSICommand,
		t.header().ITT(), number, missing, &c.node.shared.DataTimeout)
}

// lookTaken ends the connection of an initiator that takes nothing of what was sent for
// limits.send_timeout, whatever it sends meanwhile. It returns when to look again.
func (k *keeper) lookTaken(now time.Duration) (next time.Duration) {
	c, limit := k.c, &k.c.node.shared.SendTimeout
	taken, owed := k.meter.Taken()
	switch {
	case owed == 0 || !k.owes || taken >= k.mark:
		k.owes, k.mark, k.markedAt = owed > 0, taken+min(owed, enoughData), now
	case now-k.markedAt >= limit.Time():
		limit.Bite(c.sess.key.initiator)
		c.end(fmt.Errorf("initiator takes no answers: %d bytes have waited for %v: %v", owed,
			(now - k.markedAt).Round(time.Second), limit))
		return 0
	}
	return lookInterval(limit.Time())
}
