package checked

import (
	"errors"
	"fmt"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/protection"
)

// The methods of this file pass on what the store below can do besides the methods of backend.Store. A Store is
// not a backend.Copier: copies go through ReadAt and WriteAt, which verify and compute checksums.

// Extent implements backend.Mapper.
func (s *Store) Extent(off int64) (mapped bool, n int64, err error) {
	if err := s.enter(off, 1, false); err != nil {
		return false, 0, err
	}
	defer s.leave()
	mapped, n, err = backend.Extent(s.below, off)
	return mapped, min(n, s.size.Load()-off), err
}

// Usage implements backend.Gauge.
func (s *Store) Usage() (used, free int64, err error) { return backend.Usage(s.below) }

// Prefetch implements backend.Prefetcher.
func (s *Store) Prefetch(off, n int64) error {
	if err := s.enter(off, n, false); err != nil {
		return err
	}
	defer s.leave()
	return backend.Prefetch(s.below, off, n)
}

// Allocate implements backend.Allocator.
func (s *Store) Allocate(off, n int64) error {
	if a, ok := s.below.(backend.Allocator); ok {
		return a.Allocate(off, n)
	}
	return backend.ErrNoAllocate
}

// ErrSide is in errors of Inspect about the side file.
var ErrSide = errors.New("side file")

// Inspect implements backend.Inspector. Besides what the store below says, it returns an ErrCorrupt while blocks are
// known to be corrupt, and an error about the side file.
func (s *Store) Inspect() error {
	if i, ok := s.below.(backend.Inspector); ok {
		if err := i.Inspect(); err != nil {
			return err
		}
	}
	if n, first := s.bad.get(); n > 0 {
		more := ""
		if n == maxBad {
			more = "at least "
		}
		err := backend.ErrCorrupt
		if s.typ != protection.None {
			err = errUnprotected
		}
		return fmt.Errorf("%w: %s%d blocks, the first has LBA %d. Write them again or restore them from a backup, then scrub the LUN",
			err, more, n, first/s.bs)
	}
	if i, ok := s.sums.(backend.Inspector); ok {
		if err := i.Inspect(); err != nil && !errors.Is(err, backend.ErrClosed) {
			return fmt.Errorf("%w: %s: %v. %s", ErrSide, s.side.path, err, s.kind.remedy)
		}
	}
	return nil
}

// SyncFailed implements backend.SyncFailer. A file of checksums does not count: without it the data is still safe.
func (s *Store) SyncFailed() bool {
	if f, ok := s.below.(backend.SyncFailer); ok && f.SyncFailed() {
		return true
	}
	f, ok := s.sums.(backend.SyncFailer)
	return ok && s.typ != protection.None && f.SyncFailed()
}

// Device implements backend.Recoverer.
func (s *Store) Device() uint64 {
	if r, ok := s.below.(backend.Recoverer); ok {
		return r.Device()
	}
	return 0
}

// Recover implements backend.Recoverer. If the file below is replaced, the checksums of the new one are computed
// from its data.
func (s *Store) Recover() error {
	s.resizing.Lock()
	defer s.resizing.Unlock()
	if err := s.enter(0, 0, false); err != nil {
		return err
	}
	defer s.leave()
	r, ok := s.below.(backend.Recoverer)
	if !ok {
		return errors.ErrUnsupported
	}
	if sums, ok := s.sums.(backend.Recoverer); ok && !s.info.ReadOnly {
		switch err := sums.Inspect(); {
		case errors.Is(err, backend.ErrUnsynced):
			if err := sums.Recover(); err != nil {
				return fmt.Errorf("%s: %w", s.kind.file, err)
			}
		case err != nil:
			return fmt.Errorf("%s %s: %v. %s", s.kind.file, s.side.path, err, s.kind.remedy)
		}
	}
	if s.info.ReadOnly || !errors.Is(r.Inspect(), backend.ErrReplaced) {
		return r.Recover()
	}
	last := (s.size.Load() - 1) / regionSpan
	var trusted []int64
	for r := range last + 1 {
		if !s.intent.isStale(r) {
			trusted = append(trusted, r)
		}
	}
	if err := s.intent.staleAll(0, last); err != nil { // before there are other data
		return fmt.Errorf("%s: %w", s.kind.file, err)
	}
	if err := r.Recover(); err != nil {
		for _, r := range trusted {
			s.intent.adopt(r)
			s.intent.trust(r)
		}
		return err
	}
	s.intent.makeStale(0, last) // also what was adopted from the old file meanwhile
	s.bad.remove(0, s.size.Load())
	return nil
}

// Scrub verifies whole blocks at off on the medium, not in a cache of the kernel, and reads them into p. It returns
// how many differ from their checksums, without an error for them. A change of the blocks meanwhile does no harm.
func (s *Store) Scrub(p []byte, off int64) (bad int, err error) {
	n := int64(len(p))
	if err := s.enter(off, n, false); err != nil {
		return 0, err
	}
	defer s.leave()
	if err := backend.ReadMedium(s.below, p, off); err != nil {
		return 0, err
	}
	w := s.works.Get().(*work)
	defer s.works.Put(w)
	bad, err = s.verify(w, p, off, func(p []byte, off int64) error { return backend.ReadMedium(s.below, p, off) }, true)
	if errors.Is(err, backend.ErrCorrupt) {
		err = nil
	}
	if bad == 0 && err == nil {
		s.bad.remove(off, off+n)
	}
	return bad, err
}

// Descriptor implements backend.Holder.
func (s *Store) Descriptor() int { return descriptor(s.below) }

// Memory returns the stores of the data and of the side file, or nil for what is not in memory.
func (s *Store) Memory() (data, side *backend.Memory) {
	data, _ = s.below.(*backend.Memory)
	side, _ = s.sums.(*backend.Memory)
	return data, side
}

// Side returns the path of the side file and its descriptor, or -1.
func (s *Store) Side() (path string, fd int) { return s.side.path, descriptor(s.sums) }

func descriptor(s backend.Store) int {
	if h, ok := s.(backend.Holder); ok {
		return h.Descriptor()
	}
	return -1
}

// Rest makes s leave the side file alone until Resume, for another process that opens the same files. It waits for
// what the keeper does, and fails after limit. Nobody changes s meanwhile.
func (s *Store) Rest(limit time.Duration) error {
	s.atRest.Store(true)
	for end := time.Now().Add(limit); !s.resting.TryLock(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			s.atRest.Store(false)
			return fmt.Errorf("%s %s is still in use after %v", s.kind.file, s.side.path, limit)
		}
	}
	s.resting.Unlock()
	return nil
}

// AtRest returns what the next process needs to know. Rest was called.
func (s *Store) AtRest() *Rested { return &Rested{Stale: s.intent.staleSpans(), Bad: s.bad.list()} }

// resume trusts the checksums that the process before trusted. Bits remain set until the keeper has made their
// regions durable.
func (s *Store) resume(r *Rested) {
	s.intent.trustOthers(r.Stale)
	for _, off := range r.Bad {
		if off%s.bs == 0 && s.checkRange(off, s.bs) == nil {
			s.bad.add(off)
		}
	}
}

// Resume ends Rest, after the other process has ended. That process may have cleared bits of the map, so Resume
// writes all again. Nobody changes s meanwhile.
func (s *Store) Resume() error {
	if !s.atRest.Load() || s.info.ReadOnly {
		return nil
	}
	err := s.intent.saveAll()
	s.atRest.Store(false)
	s.wakeKeeper()
	return err
}

// Abandon closes the side file, but not the store below. Nobody uses s any longer.
func (s *Store) Abandon() error {
	s.endKeeper()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	return s.sums.Close()
}

// CloneTo implements backend.Snapshotter for the data, without the checksums.
func (s *Store) CloneTo(fd int, limit time.Duration) (time.Duration, error) {
	if b, ok := s.below.(backend.Snapshotter); ok {
		return b.CloneTo(fd, limit)
	}
	return 0, backend.ErrNoReflink
}

// CanClone implements backend.Snapshotter.
func (s *Store) CanClone(dir string) error {
	if b, ok := s.below.(backend.Snapshotter); ok {
		return b.CanClone(dir)
	}
	return backend.ErrNoReflink
}
