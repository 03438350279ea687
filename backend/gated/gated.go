// Package gated has a Store whose medium several gateways can reach, of which one has it at a time. The Store of a gateway outlives
// the times in which that is this one: it knows what the medium is like, and passes calls on while the medium is open here.
package gated

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
)

// A Gate says whether this gateway has the medium: see owner.Unit. Its methods are called before and after each call of the Store.
type Gate interface {
	Admits() bool    // a call may begin
	MayAnswer() bool // the outcome of a call counts; otherwise another gateway may have changed the medium meanwhile
}

// MaxHold is how long calls wait for the medium that nobody has: about the time of a hand-over, and less than until a store counts as hung.
const MaxHold = 8 * time.Second

// A Store is a backend.Store. While the medium is not open here, or the gate is closed, calls wait, at most for MaxHold, for this gateway or
// another one to have it. They fail with backend.ErrMoved if another one has it.
type Store struct {
	gate   Gate
	info   atomic.Pointer[backend.Info]
	open   atomic.Pointer[backend.Store] // nil: not open here
	dead   atomic.Pointer[backend.Store] // the medium that was open, if it has failed for ever: another one follows
	away   atomic.Bool                   // another gateway has it
	closed atomic.Bool
}

// New returns a Store for a medium that is not open yet, and was like info when it was open last.
func New(info backend.Info, gate Gate) *Store {
	s := &Store{gate: gate}
	s.info.Store(&info)
	return s
}

// ErrOtherMedium reports a medium that is not the one that initiators know.
var ErrOtherMedium = errors.New("the medium has changed in more than its size. Restart the target")

// Fits fails with ErrOtherMedium if info differs from that of s in more than the size.
func (s *Store) Fits(info backend.Info) error {
	was := *s.info.Load()
	if was.Size = info.Size; was != info {
		return ErrOtherMedium
	}
	return nil
}

// Adopt makes calls reach the medium, which Release closes. It must not be open.
func (s *Store) Adopt(medium backend.Store) error {
	info := medium.Info()
	if err := s.Fits(info); err != nil {
		return err
	}
	s.info.Store(&info)
	s.away.Store(false)
	s.open.Store(&medium)
	return nil
}

// Release closes the medium, if it is open here, as backend.Store.Close does.
func (s *Store) Release() error {
	medium := s.open.Swap(nil)
	if medium == nil {
		return nil
	}
	return (*medium).Close()
}

// SetSize notes that another gateway has made the medium larger or smaller.
func (s *Store) SetSize(size int64) {
	if s.open.Load() != nil {
		return
	}
	info := *s.info.Load()
	info.Size = size
	s.info.Store(&info)
}

// Info implements backend.Store.
func (s *Store) Info() backend.Info {
	if medium := s.open.Load(); medium != nil {
		return (*medium).Info()
	}
	return *s.info.Load()
}

// begin returns the medium, if a call may use it.
func (s *Store) begin() (*backend.Store, error) {
	for wait := time.Duration(0); ; wait += poll {
		medium := s.open.Load()
		switch {
		case s.closed.Load():
			return nil, backend.ErrClosed
		case medium != nil && medium != s.dead.Load() && s.gate.Admits():
			return medium, nil
		case s.away.Load() || wait >= MaxHold:
			return nil, backend.ErrMoved
		}
		time.Sleep(poll)
	}
}

// poll is how often a call looks whether it can begin.
const poll = 2 * time.Millisecond

// SetAway notes whether another gateway has the medium open.
func (s *Store) SetAway(away bool) { s.away.Store(away) }

// end returns what the caller gets in place of err, which the medium has returned. A change that the medium has not answered is not made again here:
// another gateway may have had it meanwhile.
func (s *Store) end(medium *backend.Store, err error) error {
	closed := errors.Is(err, backend.ErrClosed)
	if closed {
		s.dead.Store(medium)
	}
	if closed || !s.gate.MayAnswer() {
		return backend.ErrMoved
	}
	return err
}

// ReadAt implements backend.Store.
func (s *Store) ReadAt(p []byte, off int64) error {
	medium, err := s.begin()
	if err != nil {
		return err
	}
	return s.end(medium, (*medium).ReadAt(p, off))
}

// WriteAt implements backend.Store.
func (s *Store) WriteAt(p []byte, off int64) error {
	medium, err := s.begin()
	if err != nil {
		return err
	}
	return s.end(medium, (*medium).WriteAt(p, off))
}

// WriteDurable implements backend.Store.
func (s *Store) WriteDurable(p []byte, off int64) error {
	medium, err := s.begin()
	if err != nil {
		return err
	}
	return s.end(medium, (*medium).WriteDurable(p, off))
}

// Sync implements backend.Store.
func (s *Store) Sync() error {
	medium, err := s.begin()
	if err != nil {
		return err
	}
	return s.end(medium, (*medium).Sync())
}

// Discard implements backend.Store.
func (s *Store) Discard(off, n int64) error {
	medium, err := s.begin()
	if err != nil {
		return err
	}
	return s.end(medium, (*medium).Discard(off, n))
}

// Zero implements backend.Store.
func (s *Store) Zero(off, n int64) error {
	medium, err := s.begin()
	if err != nil {
		return err
	}
	return s.end(medium, (*medium).Zero(off, n))
}

// Extent implements backend.Mapper.
func (s *Store) Extent(off int64) (mapped bool, n int64, err error) {
	medium, err := s.begin()
	if err != nil {
		return false, 0, err
	}
	mapped, n, err = backend.Extent(*medium, off)
	return mapped, n, s.end(medium, err)
}

// Usage implements backend.Gauge. It does not wait for the medium.
func (s *Store) Usage() (used, free int64, err error) {
	medium := s.open.Load()
	switch {
	case s.closed.Load():
		return 0, 0, backend.ErrClosed
	case medium == nil || !s.gate.Admits():
		return 0, 0, backend.ErrMoved
	}
	used, free, err = backend.Usage(*medium)
	return used, free, s.end(medium, err)
}

// Grow implements backend.Grower. Where the medium is not open, its size is what SetSize has said.
func (s *Store) Grow() (size int64, err error) {
	if s.open.Load() == nil {
		return s.Info().Size, nil
	}
	medium, err := s.begin()
	if err != nil {
		return 0, err
	}
	if g, ok := (*medium).(backend.Grower); ok {
		size, err = g.Grow()
		return size, s.end(medium, err)
	}
	return s.Info().Size, nil
}

// Resize implements backend.Resizer.
func (s *Store) Resize(size int64) error {
	medium, err := s.begin()
	if err != nil {
		return err
	}
	r, ok := (*medium).(backend.Resizer)
	if !ok {
		return backend.ErrFixedSize
	}
	if err := r.Resize(size); err != nil {
		return s.end(medium, err)
	}
	return nil // that is the size, whichever gateway has the medium now
}

// Settle implements backend.Settler.
func (s *Store) Settle() error {
	medium := s.open.Load()
	if medium == nil {
		return nil
	}
	if k, ok := (*medium).(backend.Settler); ok {
		return k.Settle()
	}
	return nil
}

// SyncFailed implements backend.SyncFailer. A sync that fails because the medium is gone does not count: all that was answered is on it.
func (s *Store) SyncFailed() bool {
	medium := s.open.Load()
	if medium == nil || medium == s.dead.Load() || !s.gate.MayAnswer() {
		return false
	}
	f, ok := (*medium).(backend.SyncFailer)
	return ok && f.SyncFailed()
}

// Inspect implements backend.Inspector.
func (s *Store) Inspect() error {
	medium := s.open.Load()
	if medium == nil {
		return nil
	}
	if i, ok := (*medium).(backend.Inspector); ok {
		return s.end(medium, i.Inspect())
	}
	return nil
}

// Close implements backend.Store. The medium, if it is open here, stays so until Release.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return backend.ErrClosed
	}
	return nil
}
