package fair

import (
	"sync/atomic"
	"time"
)

const (
	chunk     = 64 // slots that are allocated at a time
	maxChunks = 64
)

// slots keep since when each call of a gate is under way, without a lock. A call that finds no free
// slot, which takes more calls than a gate can be allowed, is not in them.
type slots [maxChunks]atomic.Pointer[[chunk]atomic.Int64]

// take takes a slot for a call that begins at that time, and returns its index plus one, or 0. n
// other calls are under way, so one of the slots up to n is free, most likely the last one.
func (s *slots) take(n int64, at time.Duration) int32 {
	n = min(max(n, 0), chunk*maxChunks-1)
	for i := n; i >= 0; i-- {
		if s.chunk(i / chunk)[i%chunk].CompareAndSwap(0, int64(at)) {
			return int32(i) + 1
		}
	}
	for i := n + 1; i < chunk*maxChunks; i++ { // others were faster
		if s.chunk(i / chunk)[i%chunk].CompareAndSwap(0, int64(at)) {
			return int32(i) + 1
		}
	}
	return 0
}

func (s *slots) chunk(i int64) *[chunk]atomic.Int64 {
	if c := s[i].Load(); c != nil {
		return c
	}
	s[i].CompareAndSwap(nil, new([chunk]atomic.Int64))
	return s[i].Load()
}

// give gives back what take has returned.
func (s *slots) give(slot int32) {
	if slot != 0 {
		i := slot - 1
		s[i/chunk].Load()[i%chunk].Store(0)
	}
}

// mark marks the call with that slot as one that may take long: its time is negative.
func (s *slots) mark(slot int32) {
	if slot != 0 {
		at := &s[(slot-1)/chunk].Load()[(slot-1)%chunk]
		at.Store(-at.Load()) // only the call itself changes it
	}
}

// each calls f with the time when each call began, and whether the call may take long.
func (s *slots) each(f func(since time.Duration, long bool)) {
	for i := range s {
		c := s[i].Load()
		if c == nil {
			continue
		}
		for j := range c {
			if at := c[j].Load(); at != 0 {
				f(time.Duration(max(at, -at)), at < 0)
			}
		}
	}
}

// oldest returns when the oldest call began, and the oldest that must not take long; 0 without one.
func (s *slots) oldest() (oldest, quick time.Duration) {
	s.each(func(at time.Duration, long bool) {
		if oldest == 0 || at < oldest {
			oldest = at
		}
		if !long && (quick == 0 || at < quick) {
			quick = at
		}
	})
	return oldest, quick
}
