package iscsi

import (
	"maps"
	"sync"
	"time"
)

// Press implements lun.Viewer by a NOP-In, which the initiator answers. It sends no other one before there is a word from the initiator.
func (c *conn) Press() {
	last := c.pressed.Load()
	if last >= c.heard.Load() || !c.pressed.CompareAndSwap(last, int64(clock())) {
		return
	}
	c.start(func() {
		if !c.sendNOPIn(true) {
			c.pressed.Store(0)
		}
	})
}

// Lag implements lun.Viewer: data for the initiator is copied for a while, also on connections that it makes meanwhile.
func (c *conn) Lag() { c.lagged.Store(int64(c.node.laggards.add(c.sess.key.initiator))) }

// lags reports whether Lag was called not long ago.
func (c *conn) lags() bool { return isAhead(time.Duration(c.lagged.Load())) }

// slowFor is how long an initiator is among laggards.
const slowFor = time.Minute

// laggards are initiators that others had to wait for too long, by name. The zero value has none. Any goroutine may call its methods.
type laggards struct {
	mu    sync.Mutex               // a leaf
	until map[string]time.Duration // by clock; guarded by mu
}

// add adds an initiator, and returns until when it stays.
func (l *laggards) add(initiator string) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := clock()
	maps.DeleteFunc(l.until, func(_ string, until time.Duration) bool { return now >= until })
	if l.until == nil {
		l.until = map[string]time.Duration{}
	}
	l.until[initiator] = now + slowFor
	return now + slowFor
}

// find returns until when an initiator stays; 0: it is not among them.
func (l *laggards) find(initiator string) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.until[initiator]
}

// has reports whether an initiator is among them.
func (l *laggards) has(initiator string) bool { return isAhead(l.find(initiator)) }

// isAhead reports whether a time of laggards is in the future. It may be 0.
func isAhead(until time.Duration) bool { return until != 0 && clock() < until }
