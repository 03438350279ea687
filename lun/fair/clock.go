package fair

import (
	"sync"
	"sync/atomic"
	"time"
)

// tick is how exact a clock is.
const tick = 100 * time.Millisecond

// A clock is a time that costs one atomic load to read. It ticks only while calls are under way, so
// an idle process sleeps. The time is what has passed since the first reading, and never 0.
type clock struct {
	ticked atomic.Int64 // 0: the clock stands
	busy   func() bool  // reports whether somebody needs the next tick
	sweep  func()       // called at each tick; may be nil

	mu    sync.Mutex // a leaf
	epoch time.Time  // guarded by mu
}

// read returns the time of the last tick.
func (c *clock) read() time.Duration {
	if t := c.ticked.Load(); t != 0 {
		return time.Duration(t)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if t := c.ticked.Load(); t != 0 {
		return time.Duration(t)
	}
	now := c.nowLocked()
	c.ticked.Store(int64(now))
	time.AfterFunc(tick, c.next)
	return now
}

// now returns the exact time.
func (c *clock) now() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nowLocked()
}

func (c *clock) nowLocked() time.Duration {
	if c.epoch.IsZero() {
		c.epoch = time.Now()
	}
	return max(time.Since(c.epoch), 1)
}

// next ticks. The clock stands still when a second has ended in which nobody needs it.
func (c *clock) next() {
	c.mu.Lock()
	now := c.nowLocked()
	busy := c.busy() || now%time.Second >= tick
	if busy {
		c.ticked.Store(int64(now))
		time.AfterFunc(tick, c.next)
	} else {
		c.ticked.Store(0)
	}
	c.mu.Unlock()
	if c.sweep != nil {
		c.sweep()
	}
}
