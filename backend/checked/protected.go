package checked

import (
	"bytes"
	"fmt"
	"sync"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/protection"
)

// The side file has the inverse of a Tuple, so that where it has a hole, blocks are protection.Unwritten.
//
// Tags belong to initiators, so they cannot be computed from the data. In a stale region, only the guard and the
// reference tag of type 1 of a block that differs are. Sync and WriteDurable make the side file durable, too.

// stored returns what the side file has for t.
func stored(t protection.Tuple) uint64 { return ^uint64(t) }

// tuple returns what stored was called with.
func tuple(sum uint64) protection.Tuple { return ^protection.Tuple(sum) }

// errUnprotected is the ErrCorrupt of blocks that differ from their protection information.
var errUnprotected = fmt.Errorf("%w (protection information)", backend.ErrCorrupt)

// Protection returns the type of the protection information of s, or None.
func (s *Store) Protection() protection.Type { return s.typ }

// SetAppTags makes a the application tags that reads check, and that blocks without protection information get; nil: none is known.
func (s *Store) SetAppTags(a *protection.AppTags) {
	s.tags.Store(a)
	if s.awaiting.Swap(false) {
		s.wakeKeeper()
	}
}

// AppTags returns what SetAppTags has set last.
func (s *Store) AppTags() *protection.AppTags { return s.tags.Load() }

// isOf reports whether a checksum is that of the block at off, whatever its tags.
func (s *Store) isOf(block []byte, off int64, sum uint64) bool {
	switch {
	case s.typ == protection.None:
		return s.sum(block, off) == sum
	case tuple(sum) == protection.Unwritten:
		return isZero(block)
	}
	return protection.CRC(block) == tuple(sum).Guard()
}

// repairs reports whether the protection information of a block of a stale region is not that of its data. A tag
// that disables checks excuses what an initiator has written.
func (s *Store) repairs(block []byte, sum uint64) bool {
	t := tuple(sum)
	if t == protection.Unwritten {
		return !isZero(block)
	}
	return !s.typ.Escapes(t) && protection.CRC(block) != t.Guard()
}

// repaired returns the protection information for a block for which repairs is true. The application tag remains if there is one.
func (s *Store) repaired(block []byte, off int64, sum uint64) uint64 {
	old, next := tuple(sum), s.typ.Generate(block, uint64(off/s.bs), s.tags.Load())
	if old == protection.Unwritten {
		return stored(next)
	}
	ref := old.Ref()
	if s.typ == protection.Type1 {
		ref = next.Ref()
	}
	return stored(protection.New(next.Guard(), old.App(), ref))
}

// adoptedSum returns the checksum that a block of a stale region gets.
func (s *Store) adoptedSum(block []byte, off int64, old uint64) uint64 {
	switch {
	case s.typ == protection.None:
		return s.sum(block, off)
	case s.repairs(block, old):
		return s.repaired(block, off, old)
	}
	return old
}

func isZero(p []byte) bool { return len(p) == 0 || p[0] == 0 && bytes.Equal(p[1:], p[:len(p)-1]) }

// zeroBlock is a block of zeros.
var zeroBlock [maxBlock]byte

// adoptHole does what adoptPiece does for a hole of the data. It leaves out holes of the side file.
//
// Preconditions: the locks of [off, off+n) are held.
func (s *Store) adoptHole(w *work, off, n int64) error {
	for end := off + n; off < end; {
		pos := s.sumAt(off)
		mapped, hole, err := backend.Extent(s.sums, pos)
		if err != nil {
			return err
		}
		if skip := min(hole/int64(s.sumLen)*s.bs, end-off); !mapped && skip > 0 {
			off += skip
			continue
		}
		k := min(end-off, chunk*s.bs)
		sums := w.sums[:k/s.bs*int64(s.sumLen)]
		if err := s.readSums(sums, off); err != nil {
			return err
		}
		changed := uint64(0)
		for i := 0; i < len(sums); i += s.sumLen {
			if s.repairs(zeroBlock[:s.bs], s.getSum(sums[i:])) {
				s.putSum(sums[i:], stored(protection.Unwritten))
				changed++
			}
		}
		if changed > 0 {
			s.adopted.Add(changed)
			if err := s.sums.WriteAt(sums, pos); err != nil {
				return err
			}
		}
		s.bad.remove(off, off+k)
		off += k
	}
	return nil
}

// wireLen returns how many bytes a block has with its protection information.
func (s *Store) wireLen() int { return int(s.bs) + protection.Len }

// checkWire returns an error unless s has protection information, and n bytes are whole blocks with it.
func (s *Store) checkWire(n int) error {
	if s.typ == protection.None || n%s.wireLen() != 0 {
		return fmt.Errorf("%d bytes are not blocks of %d bytes with protection information", n, s.bs)
	}
	return nil
}

// ReadProtected fills p with the blocks from off on, each followed by its protection information. It returns a
// backend.CorruptError for the first block for which one of checks fails.
func (s *Store) ReadProtected(p []byte, off int64, checks protection.Checks) error {
	if err := s.checkWire(len(p)); err != nil {
		return err
	}
	count := len(p) / s.wireLen()
	if err := s.enter(off, int64(count)*s.bs, false); err != nil {
		return err
	}
	defer s.leave()
	if count == 0 {
		return nil
	}
	// The data comes to the end of p, and moves to its places block by block, as there is room before it.
	data, bs, tags := p[count*protection.Len:], int(s.bs), s.tags.Load()
	if err := s.below.ReadAt(data, off); err != nil {
		return err
	}
	w := s.works.Get().(*work)
	defer s.works.Put(w)
	for len(data) > 0 {
		n := min(len(data)/bs, chunk)
		sums := w.sums[:n*protection.Len]
		if err := s.readSums(sums, off); err != nil {
			return err
		}
		for i := 0; i < len(sums); i += protection.Len {
			block, sum := data[:bs], s.getSum(sums[i:])
			// A write that is in progress shows in the guard, so it counts whatever the checks are.
			// So does what a crash left behind, which a block that was never written before hides.
			if s.typ.CheckRead(block, tuple(sum), uint64(off/s.bs), checks|protection.CheckGuard, tags) != 0 ||
				s.intent.stale.Load() > 0 && s.intent.isStale(off/regionSpan) && s.repairs(block, sum) {
				var err error
				if sum, err = s.lookAgain(block, off, s.below.ReadAt, checks); err != nil {
					return err
				}
			}
			copy(p, block)
			tuple(sum).Put(p[bs:])
			p, data, off = p[bs+protection.Len:], data[bs:], off+s.bs
		}
		s.verified.Add(uint64(n))
	}
	return nil
}

// gatherLen is how many bytes WriteProtected writes at once.
const gatherLen = 256 << 10

// gathers has memory for the data of WriteProtected.
var gathers = sync.Pool{New: func() any { return new([gatherLen]byte) }}

// WriteProtected writes blocks from off on, each with the protection information that follows it in p. It checks nothing.
func (s *Store) WriteProtected(p []byte, off int64, durable bool) error {
	if err := s.checkWire(len(p)); err != nil {
		return err
	}
	if err := s.enter(off, int64(len(p)/s.wireLen())*s.bs, true); err != nil {
		return err
	}
	defer s.leave()
	o := opWrite
	if durable {
		o = opWriteDurable
	}
	buf := gathers.Get().(*[gatherLen]byte)
	defer gathers.Put(buf)
	w := s.works.Get().(*work)
	defer s.works.Put(w)
	for len(p) > 0 {
		n := min(len(p)/s.wireLen(), gatherLen/int(s.bs))
		wire := p[:n*s.wireLen()]
		data := buf[:n*int(s.bs)]
		for i := range n {
			copy(data[i*int(s.bs):], wire[i*s.wireLen():][:s.bs])
		}
		end := off + int64(len(data))
		if err := s.writeWire(w, &content{p: data, off: off, end: end, op: o, wire: wire}); err != nil {
			return err
		}
		p, off = p[len(wire):], end
	}
	return nil
}

func (s *Store) writeWire(w *work, c *content) error {
	s.lock(c.off, c.end)
	defer s.unlock(c.off, c.end)
	if err := s.checkRange(c.off, c.end-c.off); err != nil {
		return err
	}
	return s.changeLocked(w, c, c.off, c.end)
}

// Format makes a range read as zeros, which nothing checks until they are written (SBC-3, section 5.3.2.1). It gives
// space back if discard is set.
func (s *Store) Format(off, n int64, discard bool) error {
	if discard {
		return s.erase(off, n, opDiscard)
	}
	return s.erase(off, n, opFormat)
}
