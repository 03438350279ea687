package llp

import (
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// A Polling says for how long connections poll: for how long each looks for data again and again, before it sleeps until some has come. That
// saves the time in which an interrupt wakes a thread, and maybe a CPU, and costs the CPU on which the connection polls. Other goroutines
// run in between. It must not be copied.
type Polling struct {
	// Most is the number of connections that poll at the same time. Others sleep.
	Most int
	// Rest lets a connection sleep once in this time, even if it could poll, while Others returns true; 0: it need not. As long as all Ps of Go's
	// scheduler have something to do, and polling is that, the scheduler looks for what has come to other connections every 10 ms only; and
	// each time that a goroutine sleeps.
	Rest   time.Duration
	Others func() bool // whether there are other connections

	time          atomic.Int64 // nanoseconds
	places        atomic.Int64 // connections that poll
	found, missed atomic.Uint64
}

// SetTime sets for how long a connection polls; 0: not at all.
func (p *Polling) SetTime(d time.Duration) { p.time.Store(int64(d)) }

// Counts returns how often data came while a connection polled, and how often the time passed before.
func (p *Polling) Counts() (found, missed uint64) { return p.found.Load(), p.missed.Load() }

// Reader returns a Poller for s.
func (p *Polling) Reader(s *Socket) *Poller { return &Poller{p: p, s: s} }

// A Poller reads from a Socket. It polls if the data before came within the time of its Polling, so an idle connection does
// not. It belongs to one goroutine at a time.
type Poller struct {
	p      *Polling
	s      *Socket
	soon   bool // the last data came within the time
	rested time.Time
}

// Read implements io.Reader.
func (r *Poller) Read(b []byte) (int, error) {
	limit := time.Duration(r.p.time.Load())
	if limit <= 0 || len(b) == 0 {
		return r.s.Read(b)
	}
	began := time.Now()
	if r.soon && !r.rests(began) {
		if n, err, ended := r.poll(b, began, limit); ended {
			return n, err
		}
	}
	n, err := r.s.Read(b)
	r.soon = time.Since(began) < limit
	return n, err
}

// rests reports whether it is time to sleep.
func (r *Poller) rests(now time.Time) bool {
	if r.p.Rest <= 0 || now.Sub(r.rested) < r.p.Rest || !r.p.Others() {
		return false
	}
	r.rested = now
	return true
}

// enter takes a place, if one is free.
func (p *Polling) enter() bool {
	if p.places.Add(1) <= int64(p.Most) {
		return true
	}
	p.places.Add(-1)
	return false
}

// poll reads what has come already, or comes until limit after began. It returns false if that is nothing, or if there is no place.
func (r *Poller) poll(b []byte, began time.Time, limit time.Duration) (n int, err error, ended bool) {
	n, err, ended = r.look(b)
	if !ended && r.p.enter() {
		for !ended && time.Since(began) < limit {
			runtime.Gosched()
			n, err, ended = r.look(b)
		}
		r.p.places.Add(-1)
		switch {
		case !ended:
			r.p.missed.Add(1)
		case err == nil:
			r.p.found.Add(1)
		}
	}
	return n, err, ended
}

// look reads what has come. It returns false if that is nothing.
func (r *Poller) look(b []byte) (n int, err error, ended bool) {
	n, err = r.s.look(b)
	return n, err, err != unix.EAGAIN
}
