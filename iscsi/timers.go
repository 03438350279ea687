package iscsi

import (
	"fmt"
	"sync"
	"time"
)

// A connTimer is the one timer of a connection: keepalive, then the wait after a logout.
type connTimer struct {
	mu    sync.Mutex // a leaf
	timer *time.Timer
	last  bool // the timer is that of setLast
}

// set makes the timer call f after d. It does nothing after setLast.
func (ct *connTimer) set(d time.Duration, f func()) { ct.replace(d, f, false) }

// setLast makes the timer call f after d, the last wait of the connection. A keepalive that is due at
// that moment does not replace it.
func (ct *connTimer) setLast(d time.Duration, f func()) { ct.replace(d, f, true) }

func (ct *connTimer) replace(d time.Duration, f func(), last bool) {
	ct.mu.Lock()
	defer ct.mu.Unlock()
	if ct.last && !last {
		return
	}
	if ct.timer != nil {
		ct.timer.Stop()
	}
	ct.timer, ct.last = time.AfterFunc(d, f), last
}

func (ct *connTimer) stop() {
	ct.mu.Lock()
	defer ct.mu.Unlock()
	if ct.timer != nil {
		ct.timer.Stop()
	}
}

// watch calls f after d, and again after the time that f returns. It ends when f returns 0 or the
// connection ends.
func (c *conn) watch(d time.Duration, f func() (next time.Duration)) {
	c.timer.set(d, func() {
		c.start(func() {
			if next := f(); next > 0 {
				c.watch(next, f)
			}
		})
	})
}

// keepalive pings the initiator of a normal session after NopInterval without a word from it, and
// gives it up after another NopTimeout. Data that the initiator takes counts as a word: while it is
// busy receiving, the ping may be queued after that data. An initiator in discovery has no buffers
// for pings; the receive deadline bounds its silence.
func (c *conn) keepalive() {
	if c.sess.discovery {
		c.dm.SetReceiveDeadline(time.Now().Add(c.opt.DiscoveryTimeout))
		c.watchDiscovery()
		return
	}
	c.dm.SetReceiveDeadline(time.Time{})
	now := clock()
	c.heard.Store(int64(now))
	k := &keeper{c: c, sentAt: now}
	k.add(now+lookInterval(c.node.shared.DataTimeout.Time()), k.lookData)
	k.add(now+lookInterval(c.node.shared.TaskWait.Time()), k.lookWaits)
	if k.meter, _ = c.dm.(Meter); k.meter != nil {
		k.add(now+lookInterval(c.node.shared.SendTimeout.Time()), k.lookTaken)
	}
	if c.opt.NopInterval >= 0 {
		k.add(now+c.opt.NopInterval, k.lookSilence)
	}
	c.watch(k.next(now), k.look)
}

// A keeper looks after a connection of a normal session, with the one timer that it has.
type keeper struct {
	c     *conn
	looks []look

	waits map[sampledTask]*sample // of lookWaits: the tasks that waited at the last look; or nil

	// Of lookTaken:
	meter    Meter         // the mover, if it is one
	owes     bool          // the initiator had not taken all at the last mark
	mark     uint64        // of Meter.Taken: where there was progress
	markedAt time.Duration // by clock

	// Of lookSilence:
	sent     uint64        // c.sending.done the last time
	sentAt   time.Duration // when it was seen to move
	pinged   bool          // since its last word
	pingedAt time.Duration
}

// A look is something that a keeper looks after.
type look struct {
	due  time.Duration                                 // by clock
	look func(now time.Duration) (again time.Duration) // 0: the connection has ended
}

// add makes k look after something, for the first time when it is due.
func (k *keeper) add(due time.Duration, f func(now time.Duration) (again time.Duration)) {
	k.looks = append(k.looks, look{due, f})
}

// next returns when something is due next.
func (k *keeper) next(now time.Duration) time.Duration {
	next := k.looks[0].due
	for _, l := range k.looks[1:] {
		next = min(next, l.due)
	}
	return max(next-now, 1)
}

// look looks after what is due. It returns when to look again, or 0 if the connection has ended.
func (k *keeper) look() (next time.Duration) {
	now := clock()
	for i := range k.looks {
		l := &k.looks[i]
		if l.due > now {
			continue
		}
		again := l.look(now)
		if again == 0 {
			return 0
		}
		l.due = now + again
	}
	return k.next(now)
}

// lookSilence pings an initiator that has been silent, or ends its connection. It returns when to look
// again.
func (k *keeper) lookSilence(now time.Duration) (next time.Duration) {
	c := k.c
	sending := false
	if sent := c.sending.done.Load(); sent != k.sent {
		k.sent, k.sentAt, sending = sent, now, true
	}
	word := max(time.Duration(c.heard.Load()), k.sentAt)
	k.pinged = k.pinged && word < k.pingedAt
	silent, o := now-word, c.opt
	switch {
	case silent < o.NopInterval && sending: // the moment at which this stops does not show
		return min(o.NopInterval-silent, o.NopInterval/4)
	case silent < o.NopInterval:
		return o.NopInterval - silent
	case !k.pinged:
		k.pinged, k.pingedAt = true, now
		c.trimSlots()
		c.node.memory.idle(&c.budget)
		c.workers.Go(func() { c.sendNOPIn(true) }) // which may wait for the network
	case now-k.pingedAt >= o.NopTimeout:
		c.end(fmt.Errorf("initiator has been silent for %v in spite of a NOP-In", silent.Round(time.Second)))
		return 0
	}
	return min(k.pingedAt+o.NopTimeout-now, o.NopInterval) // there may be a word, and silence again
}

// watchDiscovery ends a discovery session whose initiator takes no answers and so has used up the
// slots: nothing comes from it although the target owes it nothing more.
func (c *conn) watchDiscovery() {
	heard := ^uint64(0) // c.received the last time
	c.watch(c.opt.DiscoveryTimeout, func() time.Duration {
		now := c.received.Load()
		if now == heard {
			c.end(fmt.Errorf("initiator has taken no answer for %v", c.opt.DiscoveryTimeout))
			return 0
		}
		heard = now
		return c.opt.DiscoveryTimeout
	})
}
