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
func (ct *connTimer) set(d time.Duration, f func()) {
	ct.mu.Lock()
	defer ct.mu.Unlock()
	if !ct.last {
		ct.replace(d, f)
	}
}

// setLast makes the timer call f after d, the last wait of the connection. A keepalive that is due at
// that moment does not replace it.
func (ct *connTimer) setLast(d time.Duration, f func()) {
	ct.mu.Lock()
	defer ct.mu.Unlock()
	ct.replace(d, f)
	ct.last = true
}

func (ct *connTimer) replace(d time.Duration, f func()) {
	if ct.timer != nil {
		ct.timer.Stop()
	}
	ct.timer = time.AfterFunc(d, f)
}

func (ct *connTimer) stop() {
	ct.mu.Lock()
	defer ct.mu.Unlock()
	if ct.timer != nil {
		ct.timer.Stop()
	}
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
	if c.opt.NopInterval < 0 {
		return
	}
	var heard uint64 // c.received and c.sending.done at the last tick
	pinged := false
	var tick func()
	tick = func() {
		if !c.enter() {
			return
		}
		defer c.workers.Done()
		wait := c.opt.NopInterval
		switch now := c.received.Load() + c.sending.done.Load(); {
		case now != heard:
			heard, pinged = now, false
		case pinged:
			c.end(fmt.Errorf("initiator has been silent for %v in spite of a NOP-In", c.opt.NopInterval+c.opt.NopTimeout))
			return
		default:
			pinged, wait = true, c.opt.NopTimeout
			defer c.sendNOPIn(true) // which may wait for the network: set the timer first
		}
		c.timer.set(wait, tick)
	}
	c.timer.set(c.opt.NopInterval, tick)
}

// watchDiscovery ends a discovery session whose initiator takes no answers and so has used up the
// slots: nothing comes from it although the target owes it nothing more.
func (c *conn) watchDiscovery() {
	heard := ^uint64(0) // c.received at the last tick
	var tick func()
	tick = func() {
		if !c.enter() {
			return
		}
		defer c.workers.Done()
		now := c.received.Load()
		if now == heard {
			c.end(fmt.Errorf("initiator has taken no answer for %v", c.opt.DiscoveryTimeout))
			return
		}
		heard = now
		c.timer.set(c.opt.DiscoveryTimeout, tick)
	}
	c.timer.set(c.opt.DiscoveryTimeout, tick)
}
