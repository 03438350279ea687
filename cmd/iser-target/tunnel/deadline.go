package tunnel

import (
	"sync"
	"time"
)

// A deadline is a time that can be set while others wait for it.
type deadline struct {
	mu      *sync.Mutex
	timer   *time.Timer   // nil: none is set
	expired chan struct{} // closed at the time
}

func newDeadline() deadline { return deadline{mu: &sync.Mutex{}, expired: make(chan struct{})} }

// set sets the time; zero: none.
func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil && !d.timer.Stop() {
		<-d.expired // the timer closes it at once
	}
	d.timer = nil
	select {
	case <-d.expired:
		d.expired = make(chan struct{})
	default:
	}
	expired := d.expired
	switch left := time.Until(t); {
	case t.IsZero():
	case left <= 0:
		close(expired)
	default:
		d.timer = time.AfterFunc(left, func() { close(expired) })
	}
}

// wait returns a channel that is closed at the time. Waiters of a time before keep theirs.
func (d *deadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.expired
}

// over reports whether the time has passed.
func (d *deadline) over() bool {
	select {
	case <-d.wait():
		return true
	default:
		return false
	}
}
