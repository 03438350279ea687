package fair

import (
	"sync"
	"sync/atomic"
	"time"
)

// tick is how exact the reading of a clock is.
const tick = 100 * time.Millisecond

// A clock is a time that costs one atomic load to read. It ticks only while calls are under way, so
// an idle process sleeps. The time is what has passed since newClock, and never 0.
type clock struct {
	epoch  time.Time
	ticked atomic.Int64            // 0: the clock stands
	sweep  func(now time.Duration) // called at each tick
	busy   func() bool             // reports whether somebody needs the next tick

	mu sync.Mutex // a leaf; held while the clock starts or stops
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
	now := c.now()
	c.ticked.Store(int64(now))
	time.AfterFunc(tick, c.next)
	return now
}

// now returns the exact time.
func (c *clock) now() time.Duration { return max(time.Since(c.epoch), 1) }

// next ticks. The clock stands still when a second has ended and nobody needs it.
func (c *clock) next() {
	c.mu.Lock()
	now := c.now()
	if c.busy() || now%time.Second >= tick {
		c.ticked.Store(int64(now))
		time.AfterFunc(tick, c.next)
	} else {
		c.ticked.Store(0)
	}
	c.mu.Unlock()
	c.sweep(now)
}
