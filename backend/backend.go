// Package backend stores the data of LUNs. A Store is one medium; file, block,
// memory and gotgt stores implement it, and package backendtest holds all of
// them to the same contract.
package backend

import (
	"errors"
	"fmt"
	"math/bits"
)

var (
	// ErrReadOnly answers a change of a Store that was opened read-only.
	ErrReadOnly = errors.New("store is read-only")
	// ErrRange answers an access that does not lie wholly within the Store.
	ErrRange = errors.New("outside the store")
	// ErrNoSpace answers a write for which the medium has no room left
	// (ENOSPC, EDQUOT, or the memory limit of a memory store).
	ErrNoSpace = errors.New("medium is full")
	// ErrUnsynced is what a Store answers once a sync has failed: data that
	// was written earlier may be lost although later syncs would succeed.
	ErrUnsynced = errors.New("an earlier sync failed")
	// ErrFixedSize answers a Resize of a Store whose medium has the size it has.
	ErrFixedSize = errors.New("size is that of the medium and cannot be set")
	// ErrClosed answers a call after Close.
	ErrClosed = errors.New("store is closed")
)

// Info describes a Store. It does not change while the Store is open, but for
// the Size of a Grower or Resizer.
type Info struct {
	Size               int64  // octets, a multiple of BlockSize
	BlockSize          uint32 // octets in a logical block: 512 or 4096
	PhysicalBlockSize  uint32 // octets in a physical block, at least BlockSize
	DiscardGranularity uint32 // octets; 0 when Discard cannot give space back
	// DiscardAlignment is the offset in octets of the first whole granule, or
	// DiscardUnaligned.
	DiscardAlignment int64
	ReadOnly         bool
	// VolatileCache tells that a completed WriteAt may be lost with the power
	// until Sync has returned.
	VolatileCache bool
	// Nonblocking tells that no call waits for a device.
	Nonblocking bool
	// AtomicWrite is the length in octets up to which no failure of the power
	// or end of the process leaves a part of a WriteAt behind; 0 when nobody
	// knows. A WriteAt that fails may have written a part all the same.
	AtomicWrite uint32
}

// DiscardUnaligned is the DiscardAlignment of a Store whose granules do not begin
// where blocks do, or nobody knows where.
const DiscardUnaligned = -1

// CheckRange fails with ErrRange unless [off, off+n) lies within the Store.
// An empty range may lie at its end.
func (i Info) CheckRange(off, n int64) error { return checkRange(i.Size, off, n) }

func checkRange(size, off, n int64) error {
	if off < 0 || n < 0 || off > size || n > size-off {
		return fmt.Errorf("%w: %d octets at offset %d of %d", ErrRange, n, off, size)
	}
	return nil
}

// Validate checks the promises that Info's fields make about one another.
func (i Info) Validate() error {
	switch {
	case i.BlockSize != 512 && i.BlockSize != 4096:
		return fmt.Errorf("block size %d: want 512 or 4096", i.BlockSize)
	case i.Size <= 0:
		return fmt.Errorf("size %d: want a positive number of octets", i.Size)
	case i.Size%int64(i.BlockSize) != 0:
		return fmt.Errorf("size %d is not a multiple of the block size %d", i.Size, i.BlockSize)
	case i.PhysicalBlockSize < i.BlockSize || bits.OnesCount32(i.PhysicalBlockSize) != 1:
		return fmt.Errorf("physical block size %d: want a power of two of at least the block size %d",
			i.PhysicalBlockSize, i.BlockSize)
	case i.DiscardGranularity%i.BlockSize != 0:
		return fmt.Errorf("discard granularity %d is not a multiple of the block size %d",
			i.DiscardGranularity, i.BlockSize)
	case i.DiscardAlignment != DiscardUnaligned && (i.DiscardAlignment < 0 || i.DiscardAlignment%int64(i.BlockSize) != 0 ||
		i.DiscardAlignment >= max(int64(i.DiscardGranularity), 1)):
		return fmt.Errorf("discard alignment %d: want a multiple of the block size %d that is less than the granularity %d, or %d",
			i.DiscardAlignment, i.BlockSize, i.DiscardGranularity, DiscardUnaligned)
	case i.AtomicWrite%i.BlockSize != 0:
		return fmt.Errorf("atomic write of %d octets is not a multiple of the block size %d", i.AtomicWrite, i.BlockSize)
	}
	return nil
}

// defaultBlockSize is the block size where the config names none.
const defaultBlockSize = 512

// A Store is a medium of fixed size. Its methods may be called at the same
// time by several goroutines; of overlapping writes that run at the same time
// either may win, octet by octet. Offsets and lengths are octets and need not
// be aligned. An access that leaves [0, Size) fails with ErrRange and changes
// nothing; an empty one within [0, Size] succeeds. A []byte is a loan that ends
// when the call returns. Where several errors apply, ErrClosed comes before
// ErrReadOnly, and ErrReadOnly before ErrRange.
type Store interface {
	Info() Info

	// ReadAt fills p or fails. What was never written, and what was discarded
	// or zeroed, reads as zeros.
	ReadAt(p []byte, off int64) error

	// WriteAt writes all of p or fails; after a failure the range is
	// indeterminate.
	WriteAt(p []byte, off int64) error

	// WriteDurable is WriteAt and returns only when p is on stable storage.
	WriteDurable(p []byte, off int64) error

	// Sync returns when everything that was written before the call is on
	// stable storage. A failure is final: from then on Sync, WriteDurable and
	// Close fail with ErrUnsynced. A read-only Store has nothing to sync.
	Sync() error

	// Discard gives back the space of a range where the medium can. The range
	// reads as zeros afterwards, always.
	Discard(off, n int64) error

	// Zero makes a range read as zeros without giving up its claim to space
	// where the medium can tell the difference.
	Zero(off, n int64) error

	// Close syncs and releases the medium, also when the sync fails. Calls
	// that are under way are not disturbed; calls after it fail with
	// ErrClosed, and Info alone still answers.
	Close() error
}

// A Mapper is a Store that knows where it keeps data. Its method follows the
// rules of Store's.
type Mapper interface {
	// Extent tells whether the octet at off, 0 <= off < Size, takes space on
	// the medium, and that the n octets from it on, n > 0, are like it. More
	// may follow that are. What takes no space reads as zeros. Beside changes
	// of the range the answer may be an old one.
	Extent(off int64) (mapped bool, n int64, err error)
}

// Extent is s.Extent for a Mapper. Of other Stores all takes space.
func Extent(s Store, off int64) (mapped bool, n int64, err error) {
	if m, ok := s.(Mapper); ok {
		return m.Extent(off)
	}
	return true, s.Info().Size - off, nil
}

// A Gauge is a Store that knows how much space it takes.
type Gauge interface {
	// Usage returns how many octets of space the store takes, which may be more
	// than Size, and how many more its medium can give it, or something else that
	// is kept there. It fails with errors.ErrUnsupported if nobody knows.
	Usage() (used, free int64, err error)
}

// Usage is s.Usage for a Gauge. Of other Stores it is unknown.
func Usage(s Store) (used, free int64, err error) {
	if g, ok := s.(Gauge); ok {
		return g.Usage()
	}
	return 0, 0, errors.ErrUnsupported
}

// A Grower is a Store whose medium may become larger, and what is there is as
// it was.
type Grower interface {
	// Grow looks for the size of the medium and returns that of the Store from
	// then on. A medium that has become smaller changes nothing.
	Grow() (size int64, err error)
}

// An Allocator is a Store that can take space before there is data for it.
type Allocator interface {
	// Allocate has the medium take space for n octets at off, so that writes there do
	// not fail for want of it. What can be read stays as it is. ErrNoAllocate: the
	// medium cannot do that; ErrNoSpace: it has no room.
	Allocate(off, n int64) error
}

// ErrNoAllocate answers Allocate where the file system cannot.
var ErrNoAllocate = errors.New("the file system cannot allocate space without data")

// A Resizer is a Store whose medium can be given another size.
type Resizer interface {
	// Resize makes size, a multiple of BlockSize in octets, that of the medium and
	// of the Store; it is on stable storage then. What is added reads as zeros, and what
	// is cut off is lost. A failure leaves the size as it was.
	Resize(size int64) error
}

// A Prefetcher is a Store with a cache in front of its medium. Its method
// follows the rules of Store's.
type Prefetcher interface {
	// Prefetch asks for a range to be brought into the cache. It waits for
	// nothing, and whether the data is there later, or stays, is not said.
	Prefetch(off, n int64) error
}

// Prefetch is s.Prefetch for a Prefetcher. Other Stores need none.
func Prefetch(s Store, off, n int64) error {
	if p, ok := s.(Prefetcher); ok {
		return p.Prefetch(off, n)
	}
	return nil
}

// A Copier is a Store that can take data from another one without its passing
// through this process. Its method follows the rules of Store's.
type Copier interface {
	// CopyFrom copies the first octets of [srcOff, srcOff+n) of src to off, and
	// returns how many: 0 if src is not of its kind, less than n if it cannot go
	// on. After a failure [off, off+n) is indeterminate. src may be the Store
	// itself if the ranges do not overlap.
	CopyFrom(off int64, src Store, srcOff, n int64) (done int64, err error)
}

// Copy copies n octets at srcOff of src to off of dst, as a Copier does where
// there is one, else by way of buf. src and dst may be the same if the ranges do
// not overlap. An error may be that of either.
func Copy(dst Store, off int64, src Store, srcOff, n int64, buf []byte) error {
	if err := src.Info().CheckRange(srcOff, n); err != nil {
		return err
	}
	if err := dst.Info().CheckRange(off, n); err != nil {
		return err
	}
	done := int64(0)
	if c, ok := dst.(Copier); ok {
		var err error
		if done, err = c.CopyFrom(off, src, srcOff, n); err != nil {
			return err
		}
	}
	for done < n {
		p := buf[:min(int64(len(buf)), n-done)]
		if err := src.ReadAt(p, srcOff+done); err != nil {
			return err
		}
		if err := dst.WriteAt(p, off+done); err != nil {
			return err
		}
		done += int64(len(p))
	}
	return nil
}
