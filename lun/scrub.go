package lun

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/checked"
	"github.com/iser-target/iser-target/lun/fair"
)

// A scrub reads all blocks from the medium in the background, and compares them with their checksums. Each
// step takes its turn at the gate as heavy work, so that commands of initiators come first. A scrub changes nothing, so the
// end of the process ends it.

const (
	scrubStep  = 1 << 20 // bytes
	scrubPiece = 4096    // bytes that are read on their own in a step that cannot be read
)

// Errors of Scrub, BeginScrub and CancelScrub.
var (
	ErrNoChecksums  = errors.New("the LUN has no checksums")
	ErrScrubbing    = errors.New("a scrub is running already")
	ErrScrubEnding  = errors.New("the backend still executes a step of the last scrub")
	ErrNotScrubbing = errors.New("no scrub is running")
	ErrNoScrub      = errors.New("no scrub was begun since the LUN was opened")
)

// A ScrubStatus is how far a scrub is.
type ScrubStatus uint8

// Values of ScrubStatus.
const (
	ScrubRunning ScrubStatus = iota
	ScrubDone
	ScrubCanceled
	ScrubInterrupted // the unit was closed
)

// String returns the name of the value.
func (s ScrubStatus) String() string {
	return [...]string{"running", "done", "canceled", "interrupted"}[s]
}

// A Scrub is the last scrub of a unit.
type Scrub struct {
	Status      ScrubStatus
	Done, Total int64  // bytes
	Bad         uint64 // blocks that differ from their checksums, or cannot be read
	First       uint64 // LBA of the first step with such a block
	Rate        int64  // bytes per second; 0: no limit
	Begun       time.Time
	Ended       time.Time // zero while it runs
}

// A scrubber is the scrub of a unit.
type scrubber struct {
	mu     sync.Mutex
	last   Scrub         // its Begun is zero before the first one
	stop   chan struct{} // closed: the scrub ends; nil: none is running
	done   chan struct{} // closed: it has ended
	closed bool          // no scrub begins any longer
	call   *fair.Call
	abort  *atomic.Bool // of call
}

// checks returns the store as one with checksums.
func (u *Unit) checks() (*checked.Store, bool) {
	s, ok := u.store.(*checked.Store)
	return s, ok
}

// Checksums returns the counts of the checksums; ok is false if the unit has none.
func (u *Unit) Checksums() (c checked.Counts, ok bool) {
	s, ok := u.checks()
	if !ok {
		return c, false
	}
	return s.Counts(), true
}

// Scrub returns the last scrub.
func (u *Unit) Scrub() (Scrub, error) {
	if _, ok := u.checks(); !ok {
		return Scrub{}, ErrNoChecksums
	}
	s := &u.scrubber
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last.Begun.IsZero() {
		return Scrub{}, ErrNoScrub
	}
	return s.last, nil
}

// BeginScrub begins a scrub that reads at most rate bytes per second; 0: no limit.
func (u *Unit) BeginScrub(rate int64) error {
	store, ok := u.checks()
	if !ok {
		return ErrNoChecksums
	}
	s := &u.scrubber
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return backend.ErrClosed
	case s.stop != nil:
		return ErrScrubbing
	case s.done != nil:
		select {
		case <-s.done:
		default:
			return ErrScrubEnding
		}
	}
	s.abort = new(atomic.Bool)
	s.call = &fair.Call{Abort: s.abort}
	s.last = Scrub{Total: u.Size(), Rate: rate, Begun: time.Now()}
	s.stop, s.done = make(chan struct{}), make(chan struct{})
	go u.runScrub(store, s.call, rate, s.stop, s.done)
	return nil
}

// CancelScrub ends the scrub that is running, without waiting for the step that it is in.
func (u *Unit) CancelScrub() error {
	if _, err := u.Scrub(); err != nil {
		return err
	}
	s := &u.scrubber
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stop == nil {
		return ErrNotScrubbing
	}
	s.end(ScrubCanceled)
	return nil
}

// end ends the scrub that is running.
//
// Preconditions: s.mu is held.
func (s *scrubber) end(status ScrubStatus) {
	close(s.stop)
	s.stop = nil
	s.last.Status, s.last.Ended = status, time.Now()
	s.abort.Store(true)
	s.call.Cancel()
}

// InterruptScrub ends the scrub that is running, without waiting for the step that it is in.
func (u *Unit) InterruptScrub() {
	s := &u.scrubber
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stop != nil {
		s.end(ScrubInterrupted)
	}
}

// close ends the scrub and waits for it. No other one begins.
func (s *scrubber) close() {
	s.mu.Lock()
	s.closed = true
	if s.stop != nil {
		s.end(ScrubInterrupted)
	}
	done := s.done
	s.mu.Unlock()
	if done != nil {
		<-done
	}
}

// runScrub reads the blocks of a scrub, in a goroutine of its own.
func (u *Unit) runScrub(store *checked.Store, call *fair.Call, rate int64, stop, done chan struct{}) {
	defer close(done)
	buf := make([]byte, scrubStep+scrubPiece)
	buf = buf[-uintptr(unsafe.Pointer(&buf[0]))%scrubPiece:][:scrubStep] // ReadMedium requires that
	begun, sum := time.Now(), int64(0)
	s := &u.scrubber
	for off := int64(0); ; off += scrubStep {
		n := min(u.Size()-off, scrubStep)
		if n <= 0 {
			break
		}
		bad, err := u.scrubAt(store, call, buf[:n], off)
		if errors.Is(err, backend.ErrClosed) {
			break
		}
		s.mu.Lock()
		if s.stop != stop {
			s.mu.Unlock()
			return
		}
		if bad > 0 && s.last.Bad == 0 {
			s.last.First = uint64(off) >> u.shift
		}
		s.last.Bad += uint64(bad)
		s.last.Done, s.last.Total = off+n, max(u.Size(), off+n)
		s.mu.Unlock()
		sum += n
		if rate > 0 {
			ahead := time.Duration(float64(sum)/float64(rate)*float64(time.Second)) - time.Since(begun)
			select {
			case <-stop:
				return
			case <-time.After(ahead):
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stop == stop {
		s.end(ScrubDone)
		if s.last.Done < s.last.Total {
			s.last.Status = ScrubInterrupted
		}
		u.opt.Events(ScrubEndedEvent{u.opt.Identity.Serial, s.last})
	}
}

// scrubAt makes one step, and returns how many blocks are bad.
func (u *Unit) scrubAt(store *checked.Store, call *fair.Call, p []byte, off int64) (bad int, err error) {
	if !u.gate.Enter(call, heavyStep(int64(len(p)))) {
		return 0, backend.ErrClosed
	}
	u.watchStore()
	defer u.gate.Leave(call)
	bad, err = store.Scrub(p, off)
	if err == nil || errors.Is(err, backend.ErrClosed) || errors.Is(err, backend.ErrRange) { // of which it became smaller
		return bad, err
	}
	bad = 0
	for at := 0; at < len(p); at += scrubPiece {
		part := p[at:min(at+scrubPiece, len(p))]
		n, err := store.Scrub(part, off+int64(at))
		if err != nil {
			n = len(part) >> u.shift
		}
		bad += n
	}
	return bad, nil
}

// SideFile returns the path of the side file of the checksums and its descriptor, or -1.
func (u *Unit) SideFile() (path string, fd int) {
	if s, ok := u.checks(); ok {
		return s.Side()
	}
	return "", -1
}

// Rest makes the unit leave its side file alone until Resume. It is for an upgrade, while no command is
// in progress.
func (u *Unit) Rest(limit time.Duration) error {
	if s, ok := u.checks(); ok {
		return s.Rest(limit)
	}
	return nil
}

// ChecksumsAtRest returns what the next process needs to know about the checksums, or nil. Rest was called.
func (u *Unit) ChecksumsAtRest() *checked.Rested {
	if s, ok := u.checks(); ok {
		return s.AtRest()
	}
	return nil
}

// Resume ends Rest.
func (u *Unit) Resume() error {
	if s, ok := u.checks(); ok {
		return s.Resume()
	}
	return nil
}
