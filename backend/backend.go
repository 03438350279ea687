// Package backend stores the data of LUNs. A Store is one medium: a file, a block device,
// memory, or a store of gotgt (package backend/gotgt). Package backendtest tests that all of
// them keep the contract of Store.
package backend

import (
	"errors"
	"fmt"
	"math/bits"

	"github.com/iser-target/iser-target/backend/protection"
)

var (
	// ErrReadOnly reports a change of a Store that was opened read-only.
	ErrReadOnly = errors.New("store is read-only")
	// ErrRange reports an access that is not entirely within the Store.
	ErrRange = errors.New("outside the store")
	// ErrNoSpace reports a write for which the medium has no space (ENOSPC, EDQUOT, or the
	// limit of a memory store).
	ErrNoSpace = errors.New("medium is full")
	// ErrUnsynced reports that a sync has failed once: data that was written before it may be
	// lost, although later syncs would succeed.
	ErrUnsynced = errors.New("an earlier sync failed")
	// ErrFixedSize reports a Resize of a Store whose medium has a fixed size.
	ErrFixedSize = errors.New("the medium has a fixed size")
	// ErrCorrupt reports data that differs from its checksum: see CorruptError.
	ErrCorrupt = errors.New("the data differs from its checksum")
	// ErrMoved reports a call of a Store whose medium another gateway has, or is about to have.
	ErrMoved = errors.New("another gateway has the medium, or none")
	// ErrClosed reports a call after Close.
	ErrClosed = errors.New("store is closed")
)

// A CorruptError is a block that differs from its checksum or its protection information. It is an ErrCorrupt.
type CorruptError struct {
	Offset int64            // of the first such block, in bytes
	Field  protection.Field // of its protection information; 0: it has a checksum
}

// Error returns the message.
func (e *CorruptError) Error() string {
	if e.Field != 0 {
		return fmt.Sprintf("block at byte %d: the data differs from its protection information: %v", e.Offset, e.Field)
	}
	return fmt.Sprintf("block at byte %d: %v", e.Offset, ErrCorrupt)
}

// Unwrap returns ErrCorrupt.
func (e *CorruptError) Unwrap() error { return ErrCorrupt }

// Info describes a Store. It does not change while the Store is open, except the Size of a
// Grower or Resizer.
type Info struct {
	Size               int64  // bytes, a multiple of BlockSize
	BlockSize          uint32 // bytes of a logical block: 512 or 4096
	PhysicalBlockSize  uint32 // bytes of a physical block, at least BlockSize
	DiscardGranularity uint32 // bytes; 0: Discard cannot free space
	// DiscardAlignment is the offset in bytes of the first whole granule, or DiscardUnaligned.
	DiscardAlignment int64
	ReadOnly         bool
	// VolatileCache means that a loss of power may lose a completed WriteAt until Sync has
	// returned.
	VolatileCache bool
	// Nonblocking means that no call waits for a device.
	Nonblocking bool
	// AtomicWrite is the length in bytes up to which a WriteAt is written entirely or not at
	// all when the power fails or the process ends; 0: not known. A WriteAt that returns an
	// error may still have written a part. With an AtomicUnit this is not about WriteAt, but about
	// the AtomicWriter that the Store is, which has written nothing when it returns an error.
	AtomicWrite uint32
	AtomicUnit  uint32 // the least length in bytes of WriteAtomic; 0: WriteAt has no bounds of this kind
}

// DiscardUnaligned is the DiscardAlignment of a Store whose granules do not begin at a block,
// or at an offset that is not known.
const DiscardUnaligned = -1

// CheckRange returns ErrRange unless [off, off+n) is within the Store. An empty range may be
// at its end.
func (i Info) CheckRange(off, n int64) error { return checkRange(i.Size, off, n) }

func checkRange(size, off, n int64) error {
	if off < 0 || n < 0 || off > size || n > size-off {
		return fmt.Errorf("%w: %d bytes at offset %d of %d", ErrRange, n, off, size)
	}
	return nil
}

// Validate returns an error unless the fields of i are consistent.
func (i Info) Validate() error {
	switch {
	case i.BlockSize != 512 && i.BlockSize != 4096:
		return fmt.Errorf("block size %d: must be 512 or 4096", i.BlockSize)
	case i.Size <= 0:
		return fmt.Errorf("size %d: must be positive", i.Size)
	case i.Size%int64(i.BlockSize) != 0:
		return fmt.Errorf("size %d is not a multiple of the block size %d", i.Size, i.BlockSize)
	case i.PhysicalBlockSize < i.BlockSize || bits.OnesCount32(i.PhysicalBlockSize) != 1:
		return fmt.Errorf("physical block size %d: must be a power of two, and at least the block size %d",
			i.PhysicalBlockSize, i.BlockSize)
	case i.DiscardGranularity%i.BlockSize != 0:
		return fmt.Errorf("discard granularity %d is not a multiple of the block size %d",
			i.DiscardGranularity, i.BlockSize)
	case i.DiscardAlignment != DiscardUnaligned && (i.DiscardAlignment < 0 || i.DiscardAlignment%int64(i.BlockSize) != 0 ||
		i.DiscardAlignment >= max(int64(i.DiscardGranularity), 1)):
		return fmt.Errorf("discard alignment %d: must be a multiple of the block size %d below the granularity %d, or %d",
			i.DiscardAlignment, i.BlockSize, i.DiscardGranularity, DiscardUnaligned)
	case i.AtomicWrite%i.BlockSize != 0:
		return fmt.Errorf("atomic write of %d bytes is not a multiple of the block size %d", i.AtomicWrite, i.BlockSize)
	case i.AtomicUnit != 0 && (i.AtomicUnit < i.BlockSize || i.AtomicWrite < i.AtomicUnit ||
		bits.OnesCount32(i.AtomicUnit) != 1 || bits.OnesCount32(i.AtomicWrite) != 1):
		return fmt.Errorf("atomic writes of %d to %d bytes: must be powers of two, and at least the block size %d",
			i.AtomicUnit, i.AtomicWrite, i.BlockSize)
	}
	return nil
}

// defaultBlockSize is the block size if the configuration names none.
const defaultBlockSize = 512

// A Store is a medium of fixed size. Its methods are safe for concurrent use; of overlapping
// concurrent writes either may win, byte by byte. Offsets and lengths are in bytes and need
// not be aligned. An access that leaves [0, Size) fails with ErrRange and changes nothing; an
// empty one within [0, Size] succeeds. A Store uses a []byte only until the call returns. If
// several errors apply, ErrClosed comes before ErrReadOnly, and ErrReadOnly before ErrRange.
type Store interface {
	Info() Info

	// ReadAt fills p or fails. Bytes that were never written, or were discarded or zeroed,
	// read as zeros.
	ReadAt(p []byte, off int64) error

	// WriteAt writes all of p or fails; after a failure the range is indeterminate.
	WriteAt(p []byte, off int64) error

	// WriteDurable does what WriteAt does, and returns when p is on stable storage.
	WriteDurable(p []byte, off int64) error

	// Sync returns when everything that was written before the call is on stable storage. A
	// failure is final: from then on Sync, WriteDurable and Close fail with ErrUnsynced. A
	// read-only Store has nothing to sync.
	Sync() error

	// Discard frees the space of a range if the medium can. The range always reads as zeros
	// afterwards.
	Discard(off, n int64) error

	// Zero makes a range read as zeros. If the medium can tell the difference, the range
	// keeps its space.
	Zero(off, n int64) error

	// Close syncs and releases the medium, even if the sync fails. Calls in progress
	// complete. Calls after Close fail with ErrClosed, except Info.
	Close() error
}

// A Mapper is a Store that knows which ranges take space. Its method follows the rules of
// Store's methods.
type Mapper interface {
	// Extent reports whether the byte at off, 0 <= off < Size, takes space on the medium,
	// and for how many bytes n > 0 from off this holds. More may follow. Bytes that take no
	// space read as zeros. During concurrent changes of the range the result may be old.
	Extent(off int64) (mapped bool, n int64, err error)
}

// Extent calls s.Extent if s is a Mapper. All bytes of other Stores take space.
func Extent(s Store, off int64) (mapped bool, n int64, err error) {
	if m, ok := s.(Mapper); ok {
		return m.Extent(off)
	}
	return true, s.Info().Size - off, nil
}

// A Gauge is a Store that knows how much space it takes.
type Gauge interface {
	// Usage returns the bytes of space that the store takes, which may be more than Size,
	// and the free bytes of its medium, which others may share. It fails with
	// errors.ErrUnsupported if they are not known.
	Usage() (used, free int64, err error)
}

// Usage calls s.Usage if s is a Gauge, else it fails with errors.ErrUnsupported.
func Usage(s Store) (used, free int64, err error) {
	if g, ok := s.(Gauge); ok {
		return g.Usage()
	}
	return 0, 0, errors.ErrUnsupported
}

// A Grower is a Store whose medium another program may enlarge.
type Grower interface {
	// Grow adopts the size of the medium and returns the new size of the Store. A medium
	// that has become smaller changes nothing.
	Grow() (size int64, err error)
}

// A Settler is a Store that keeps in this process what it needs to write again if its medium loses it.
type Settler interface {
	// Settle returns when the medium has everything, and nothing is kept.
	Settle() error
}

// An Allocator is a Store that can take space before there is data for it.
type Allocator interface {
	// Allocate takes space for n bytes at off, so that writes there do not fail with
	// ErrNoSpace. The content does not change. It fails with ErrNoAllocate if the medium
	// cannot allocate, and with ErrNoSpace if it is full.
	Allocate(off, n int64) error
}

// ErrNoAllocate reports that the file system does not support Allocate.
var ErrNoAllocate = errors.New("the file system cannot allocate space without data")

// A Resizer is a Store whose medium can be given another size.
type Resizer interface {
	// Resize gives the medium and the Store a size in bytes, a multiple of BlockSize, and
	// returns when it is on stable storage. Added bytes read as zeros, and bytes after the
	// end are lost. A failure leaves the size as it was.
	Resize(size int64) error
}

// A Prefetcher is a Store with a cache in front of its medium. Its method follows the rules of
// Store's methods.
type Prefetcher interface {
	// Prefetch starts to read a range into the cache. It does not wait, and does not
	// promise that the cache will have the data.
	Prefetch(off, n int64) error
}

// Prefetch calls s.Prefetch if s is a Prefetcher.
func Prefetch(s Store, off, n int64) error {
	if p, ok := s.(Prefetcher); ok {
		return p.Prefetch(off, n)
	}
	return nil
}

// A Copier is a Store that can copy from another Store without moving the data through this
// process. Its method follows the rules of Store's methods.
type Copier interface {
	// CopyFrom copies the first bytes of [srcOff, srcOff+n) of src to off, and returns how many: 0
	// if src is of another kind, less than n if it cannot copy the rest. After a failure [off,
	// off+n) is indeterminate. src may be the Store itself if the ranges do not overlap.
	CopyFrom(off int64, src Store, srcOff, n int64) (done int64, err error)
}

// A SourceError is an error that Copy has met at its source. All others are those of its destination, or of CopyFrom, which does
// not tell them apart.
type SourceError struct{ Err error }

// Error implements error.
func (e *SourceError) Error() string { return e.Err.Error() }

// Unwrap returns the error of the source.
func (e *SourceError) Unwrap() error { return e.Err }

// Copy copies n bytes at srcOff of src to off of dst, with dst.CopyFrom if dst is a Copier,
// and the rest through buf. src and dst may be the same Store if the ranges do not overlap. An
// error of src is a *SourceError.
func Copy(dst Store, off int64, src Store, srcOff, n int64, buf []byte) error {
	if err := src.Info().CheckRange(srcOff, n); err != nil {
		return &SourceError{err}
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
			return &SourceError{err}
		}
		if err := dst.WriteAt(p, off+done); err != nil {
			return err
		}
		done += int64(len(p))
	}
	return nil
}
