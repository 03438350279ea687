package checked

import (
	"errors"
	"fmt"

	"github.com/iser-target/iser-target/backend"
)

// adjust makes the side file one for size bytes of data. It was for old bytes: a Resize was interrupted, or
// somebody extended the data. Blocks that were added that way have no checksums yet.
func (s *Store) adjust(old, size int64) error {
	need := s.kind.sideSize(size, s.side.bs)
	if s.info.ReadOnly {
		if size > old {
			return errors.New("it is for fewer bytes than the LUN has. Make the LUN writable once")
		}
		return nil
	}
	r := s.sums.(backend.Resizer)
	if size > old {
		if s.sums.Info().Size != need {
			if err := r.Resize(need); err != nil {
				return err
			}
		}
		regions := (size + regionSpan - 1) / regionSpan
		s.intent.grow(regions)
		if err := s.intent.staleAll(old/regionSpan, regions-1); err != nil {
			return err
		}
		return s.side.writeHeader(size)
	}
	if size < old {
		if err := s.side.writeHeader(size); err != nil {
			return err
		}
	}
	return s.cutSums(size)
}

// cutSums cuts off the checksums behind the end of size bytes of data. If the LUN grows later, new blocks
// read as zeros, and so must the checksums.
func (s *Store) cutSums(size int64) error {
	need, end := s.kind.sideSize(size, s.side.bs), s.sumAt(size)
	if s.sums.Info().Size > need {
		if err := s.sums.(backend.Resizer).Resize(need); err != nil {
			return err
		}
	}
	if end < need {
		return s.sums.WriteAt(make([]byte, need-end), end)
	}
	return nil
}

// Resize implements backend.Resizer. It fails with backend.ErrFixedSize if the store below cannot.
func (s *Store) Resize(size int64) error {
	s.resizing.Lock()
	defer s.resizing.Unlock()
	if err := s.enter(0, 0, true); err != nil {
		return err
	}
	defer s.leave()
	r, ok := s.below.(backend.Resizer)
	old := s.size.Load()
	switch {
	case !ok:
		return backend.ErrFixedSize
	case size <= 0 || size%s.bs != 0:
		return fmt.Errorf("size %d: must be a positive multiple of the block size %d", size, s.bs)
	case size > maxSize:
		return fmt.Errorf("size %d: %s is possible for up to %d bytes", size, s.kind.content, int64(maxSize))
	case size < old:
		return s.shrink(r, size, old)
	}
	if err := s.sums.(backend.Resizer).Resize(s.kind.sideSize(size, s.side.bs)); err != nil {
		return fmt.Errorf("extend the %s: %w", s.kind.file, err)
	}
	s.intent.grow((size + regionSpan - 1) / regionSpan)
	if err := r.Resize(size); err != nil {
		s.size.Store(s.below.Info().Size)
		return err
	}
	if err := s.side.writeHeader(size); err != nil { // the next start finds the new size, and adopts it
		return errors.Join(fmt.Errorf("write the new size to the %s: %w", s.kind.file, err), r.Resize(old))
	}
	s.size.Store(size)
	return nil
}

// shrink gives the Store a smaller size. New calls behind the end fail before the data is cut off, and those
// in progress end before.
func (s *Store) shrink(r backend.Resizer, size, old int64) error {
	s.size.Store(size)
	for i := range s.locks {
		s.locks[i].wait()
	}
	if err := r.Resize(size); err != nil {
		s.size.Store(min(old, s.below.Info().Size))
		return err
	}
	s.bad.remove(size, old)
	err := s.side.writeHeader(size)
	if err == nil {
		err = s.cutSums(size)
	}
	if err != nil {
		return fmt.Errorf("the LUN has its new size, but its %s has not: %w", s.kind.file, err)
	}
	return nil
}

// Grow implements backend.Grower. Blocks that somebody added have no checksums yet: see the package.
func (s *Store) Grow() (int64, error) {
	s.resizing.Lock()
	defer s.resizing.Unlock()
	if err := s.enter(0, 0, false); err != nil {
		return 0, err
	}
	defer s.leave()
	g, ok := s.below.(backend.Grower)
	if !ok {
		return s.size.Load(), nil
	}
	size, err := g.Grow()
	if err != nil {
		return 0, err
	}
	old := s.size.Load()
	if size <= old {
		return old, nil
	}
	if size > maxSize {
		return 0, fmt.Errorf("the medium has %d bytes, and %s is possible for up to %d", size, s.kind.content, int64(maxSize))
	}
	s.resting.Lock() // else the keeper would compute only the checksums up to the old end
	defer s.resting.Unlock()
	if err := s.adjust(old, size); err != nil {
		return 0, fmt.Errorf("extend the %s: %w", s.kind.file, err)
	}
	s.size.Store(size)
	return size, nil
}
