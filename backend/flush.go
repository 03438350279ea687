package backend

import (
	"errors"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// The kernel reports a failed write-back once for each open file description (errseq_t in the
// kernel's Documentation/core-api/errseq.rst), to the sync that asks first. Two rules follow:
//
//   - Two calls that sync never use one description at the same time: one could take the error that
//     the other must report.
//   - A sync answers for all earlier writes. A description that was opened after them does not report
//     an error that somebody saw before it was opened. So it is of use for a Sync only when a sync of
//     disk.fd, which was opened first, began after the opening and found no error.
//
// A durable write answers only for its own data, which is younger than any open description. So it
// may use every description, except disk.fd.
//
// An idle disk has only disk.fd. The others are its spares, opened when calls run at the same time.

// maxSpares bounds the spares of a disk, and maxSyncs those of them that a Sync may use at a time.
const (
	maxSpares = 8
	maxSyncs  = 4
)

// rounds let concurrent syncs share system calls. A round is one sync of one description; callers
// that find no description free share the next round. The zero value is ready.
type rounds struct {
	mu    sync.Mutex
	ended sync.Cond // a round has ended; its L is mu
	begun uint64    // number of the last round that has begun
	good  uint64    // the highest number of a round that has succeeded

	first  bool // a round uses disk.fd
	others int  // rounds that use a spare
	failed uint64
	err    error // of round failed, the first that failed; no later one succeeds
}

// sync returns the error of a sync that began after the call.
//
// Preconditions: d.mu is held, at least for reading.
func (d *disk) sync() error {
	held(&d.mu)
	if d.info.ReadOnly {
		return nil
	}
	r := &d.syncs
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended.L == nil {
		r.ended.L = &r.mu
	}
	mine := r.begun + 1 // those in progress may have begun before the caller's writes
	for opened := false; ; {
		switch {
		case r.good >= mine:
			return nil
		case r.failed >= mine:
			return r.err
		case r.failed != 0:
			return ErrUnsynced
		case r.begun < mine && d.round():
		case r.begun < mine && !opened:
			opened = true
			r.mu.Unlock()
			d.spares.openForSync()
			r.mu.Lock()
		default:
			r.ended.Wait()
		}
	}
}

// round makes one round if a description is free, and reports whether it has.
//
// Preconditions: d.syncs.mu is held. It is not held during the round.
func (d *disk) round() bool {
	r := &d.syncs
	var other *spare
	switch {
	case !r.first:
		r.first = true
	case r.others == maxSyncs:
		return false
	default:
		if other = d.spares.takeChecked(); other == nil {
			return false
		}
		r.others++
	}
	r.begun++
	n := r.begun
	r.mu.Unlock()
	var err error
	if other == nil {
		opened := d.spares.opened.Load()
		if err = d.flush(d.fd); err == nil {
			d.spares.checked.Store(opened)
		}
	} else {
		err = d.flush(other)
		d.spares.give(other)
	}
	r.mu.Lock()
	if other == nil {
		r.first = false
	} else {
		r.others--
	}
	switch {
	case err == nil:
		r.good = max(r.good, n)
	case r.failed == 0 || n < r.failed:
		r.failed, r.err = n, err
	}
	r.ended.Broadcast()
	return true
}

// flush syncs f, which nothing else syncs meanwhile.
func (d *disk) flush(f osFile) error {
	if d.failed.Load() {
		return ErrUnsynced
	}
	if err := f.fdatasync(); err != nil {
		return d.fail(err)
	}
	return nil
}

// spareIdle is how long spare descriptions stay open when no durable write uses them.
const spareIdle = 10 * time.Second

// spareCount is how many spares the process has; spareLimit: see LimitSpares.
var spareLimit, spareCount atomic.Int64

func init() { spareLimit.Store(1 << 62) }

// LimitSpares makes file and block stores open no descriptors from number n on, besides the one that
// each has: the system gives the lowest numbers first. Without them durable writes take longer.
func LimitSpares(n int64) { spareLimit.Store(n) }

var errSpares = errors.New("too few descriptors are left")

// spares are further descriptions of the file of a disk. Each serves one call at a time.
type spares struct {
	reopen func() (osFile, error)

	opened  atomic.Uint64 // how many were opened so far; a spare has the number of its opening
	checked atomic.Uint64 // those with numbers up to it may serve a Sync

	mu      sync.Mutex
	given   sync.Cond // one was given back or closed; its L is mu
	idle    []*spare
	open    int  // also those in use
	used    bool // since reap looked
	reaping bool // reap will be called
}

// A spare is one of spares.
type spare struct {
	osFile
	number uint64
}

// init makes s open files with reopen.
func (s *spares) init(reopen func() (osFile, error)) {
	s.reopen = reopen
	s.given.L = &s.mu
}

// take returns a description that nobody else uses until give. It waits while maxSpares are in use.
// It returns nil if none can be opened.
func (s *spares) take() *spare {
	s.mu.Lock()
	for len(s.idle) == 0 && s.open == maxSpares {
		s.given.Wait()
	}
	if n := len(s.idle); n > 0 {
		f := s.idle[n-1]
		s.idle = s.idle[:n-1]
		s.mu.Unlock()
		return f
	}
	s.open++
	s.mu.Unlock()
	return s.openOne()
}

// takeChecked returns a description that may serve a Sync, or nil. It does not wait.
func (s *spares) takeChecked() *spare {
	checked := s.checked.Load()
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.idle, func(f *spare) bool { return f.number <= checked })
	if i < 0 {
		return nil
	}
	f := s.idle[i]
	s.idle = slices.Delete(s.idle, i, i+1)
	return f
}

// openForSync opens a description for later syncs, unless there are enough.
func (s *spares) openForSync() {
	s.mu.Lock()
	more := len(s.idle) == 0 && s.open < maxSyncs
	if more {
		s.open++
	}
	s.mu.Unlock()
	if !more {
		return
	}
	if f := s.openOne(); f != nil {
		s.give(f)
	}
}

// openOne opens a description that s.open counts already. It returns nil, and no longer counts it, if
// that fails.
func (s *spares) openOne() *spare {
	spareCount.Add(1)
	if f, err := s.reopen(); err == nil {
		return &spare{f, s.opened.Add(1)}
	}
	s.closed(1)
	return nil
}

// give takes back what take has returned.
func (s *spares) give(f *spare) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.idle = append(s.idle, f)
	s.used = true
	s.given.Signal()
	if !s.reaping {
		s.reaping = true
		time.AfterFunc(spareIdle, s.reap)
	}
}

// reap closes the descriptions if they were not used since the last time.
func (s *spares) reap() {
	s.mu.Lock()
	if s.used {
		s.used = false
		time.AfterFunc(spareIdle, s.reap)
		s.mu.Unlock()
		return
	}
	s.reaping = false
	s.mu.Unlock()
	s.close()
}

// close closes the descriptions that are not in use. Their errors do not matter: what they have
// written is durable, and disk.fd reports the errors of the rest.
func (s *spares) close() {
	s.mu.Lock()
	idle := s.idle
	s.idle = nil
	s.mu.Unlock()
	for _, f := range idle {
		f.close()
	}
	s.closed(len(idle))
}

// closed counts that n descriptions are not open any longer.
func (s *spares) closed(n int) {
	spareCount.Add(-int64(n))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open -= n
	s.given.Broadcast()
}

// reopen opens another description of fd. Unlike it, dup would return the same one. It fails
// without /proc.
func reopen(fd int) (osFile, error) {
	extra, err := retryValue(func() (int, error) {
		return unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_RDWR|unix.O_CLOEXEC, 0)
	})
	switch {
	case err != nil:
		return nil, err
	case int64(extra) >= spareLimit.Load():
		return nil, errors.Join(errSpares, unix.Close(extra))
	}
	return sysFile(extra), nil
}
