//go:build !nogotgt

// Package gotgt serves the backing stores of github.com/gostor/gotgt as
// backend.Stores.
//
// What is taken from gotgt is the plug-in contract, api.BackingStore with
// api.UnmapBlockDescriptor, and the registry behind scsi.NewBackingStore. None
// of its SCSI engine, its LUN maps or its iSCSI daemon runs.
//
// gotgt's own file store registers as "file" through the import below; a
// program that imports other plug-ins can open those. The null store that comes
// with it keeps nothing and is refused, for it has no size.
//
// What gotgt does not promise, this package does not count on:
//
//   - gotgt calls a store from one goroutine per connection and takes no lock,
//     while its stores say nothing about concurrency. Here, calls take turns.
//   - A Read may come back short (gotgt fills up with zeros). Here, that is an
//     error.
//   - An Unmap may do nothing, as in all of gotgt's own stores. Here, a range
//     reads as zeros afterwards.
//   - A plug-in may panic. Here, that is an error, and the plug-in is not called
//     again: what it left half done, and which locks it holds, nobody knows.
//
// DataAdvise is never called: gotgt's implementation makes the system call 221,
// which is fadvise64 on amd64 only (on arm64 it is execve).
//
// Read returns memory that the plug-in allocates, so that this store, unlike
// the others, allocates for every read and copies.
package gotgt

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/bits"
	"sync"
	"syscall"

	"github.com/gostor/gotgt/pkg/api"
	"github.com/gostor/gotgt/pkg/scsi"
	_ "github.com/gostor/gotgt/pkg/scsi/backingstore" // the "file" plug-in
	"github.com/sirupsen/logrus"

	"github.com/iser-target/iser-target/backend"
	_ "github.com/iser-target/iser-target/backend/gotgt/gostorenv" // before gotgt
)

// Config describes a store of gotgt. The zero value of a field other than
// Plugin and Path means its default.
type Config struct {
	Plugin  string // the name that the store registered with
	Path    string // for the plug-in's Open
	Options string // for the plug-in's Init
	// Size in octets, a multiple of BlockSize, which the plug-in's has to
	// equal. Default: the plug-in's.
	Size      int64
	BlockSize uint32 // 512 or 4096; default 512
	ReadOnly  bool
	// Unmap tells that the plug-in's Unmap gives space back. Without it,
	// Discard writes zeros.
	Unmap bool
}

// maxTransfer bounds the memory that zeroing and checking take, in octets.
const maxTransfer = 1 << 20

var zeros [maxTransfer]byte // never written to

// quiet makes logrus, through which gotgt logs and which nothing else here
// uses, a source of debug records of the default slog.Logger. What matters of
// it is in the errors that the stores return as well.
var quiet = sync.OnceFunc(func() {
	logrus.SetOutput(io.Discard)
	logrus.AddHook(toSlog{})
})

type toSlog struct{}

func (toSlog) Levels() []logrus.Level { return logrus.AllLevels }

func (toSlog) Fire(e *logrus.Entry) error {
	slog.Debug(e.Message, "from", "gotgt", "level", e.Level.String())
	return nil
}

// Open opens a store of gotgt.
func Open(c Config) (backend.Store, error) {
	fail := func(err error) (backend.Store, error) {
		return nil, fmt.Errorf("gotgt store %q, %s: %w", c.Plugin, c.Path, err)
	}
	if c.Plugin == "" {
		return fail(errors.New("no plug-in is named"))
	}
	if c.BlockSize == 0 {
		c.BlockSize = 512
	}
	s := &store{
		name: c.Plugin,
		path: c.Path,
		dev:  &api.SCSILu{Path: c.Path, BlockShift: uint(bits.TrailingZeros32(c.BlockSize))},
		info: backend.Info{
			BlockSize:         c.BlockSize,
			PhysicalBlockSize: c.BlockSize,
			ReadOnly:          c.ReadOnly,
			VolatileCache:     true, // or there would be no DataSync
		},
	}
	if c.Unmap && !c.ReadOnly {
		s.info.DiscardGranularity = c.BlockSize
	}
	if bs := c.BlockSize; bs != 512 && bs != 4096 {
		return fail(fmt.Errorf("block size %d: want 512 or 4096", bs)) // before anything is opened
	}
	quiet()
	err := s.call("New", func() (err error) {
		s.bs, err = scsi.NewBackingStore(c.Plugin)
		if err == nil && s.bs == nil {
			err = errors.New("the plug-in made no store")
		}
		s.dev.Storage = s.bs
		return err
	})
	if err != nil {
		return fail(err)
	}
	if err := s.call("Init", func() error { return s.bs.Init(s.dev, c.Options) }); err != nil {
		return fail(err)
	}
	if err := s.call("Open", func() error { return s.bs.Open(s.dev, c.Path) }); err != nil {
		return fail(errors.Join(err, s.call("Exit", func() error { return s.bs.Exit(s.dev) })))
	}
	err = s.call("Size", func() error {
		size := s.bs.Size(s.dev)
		if size > math.MaxInt64 {
			return fmt.Errorf("%d octets are too many", size)
		}
		s.info.Size, s.dev.Size = int64(size), size
		return nil
	})
	if err == nil {
		err = s.info.Validate()
	}
	if err == nil && c.Size != 0 && c.Size != s.info.Size {
		err = fmt.Errorf("has %d octets, but %d are configured: configure its size, or none to take the store's", s.info.Size, c.Size)
	}
	if err != nil {
		return fail(errors.Join(err, s.release()))
	}
	return s, nil
}

type store struct {
	info backend.Info
	name string
	path string
	dev  *api.SCSILu // what the plug-in's calls for opening and closing get

	mu       sync.Mutex // held over every call of the plug-in
	bs       api.BackingStore
	closed   bool
	unsynced bool  // a DataSync has failed
	panicked error // the plug-in is not called again
}

// call calls the plug-in by f. A panic becomes an error and the last call.
func (s *store) call(name string, f func() error) (err error) {
	if s.panicked != nil {
		return s.panicked
	}
	defer func() {
		if v := recover(); v != nil {
			s.panicked = fmt.Errorf("gotgt store %q has panicked in %s and is not used any more: %v", s.name, name, v)
			err = s.panicked
		}
	}()
	if err := f(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// check is what every call of the Store begins with.
func (s *store) check(off, n int64, changes bool) error {
	switch {
	case s.closed:
		return backend.ErrClosed
	case changes && s.info.ReadOnly:
		return backend.ErrReadOnly
	}
	return s.info.CheckRange(off, n)
}

// Info implements backend.Store.
func (s *store) Info() backend.Info { return s.info }

// ReadAt implements backend.Store.
func (s *store) ReadAt(p []byte, off int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.check(off, int64(len(p)), false); err != nil {
		return err
	}
	return s.read(off, int64(len(p)), func(b []byte) error {
		copy(p, b)
		return nil
	})
}

// read has f look at the n octets at off. What f gets is its own until it
// returns.
func (s *store) read(off, n int64, f func(b []byte) error) error {
	if n == 0 {
		return s.panicked
	}
	return s.call("Read", func() error {
		b, err := s.bs.Read(off, n)
		switch {
		case err != nil:
			return fmt.Errorf("%d octets at %d of %s: %w", n, off, s.path, err)
		case int64(len(b)) != n:
			return fmt.Errorf("%d octets at %d of %s: %d came: %w", n, off, s.path, len(b), io.ErrUnexpectedEOF)
		}
		return f(b)
	})
}

// WriteAt implements backend.Store.
func (s *store) WriteAt(p []byte, off int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.check(off, int64(len(p)), true); err != nil {
		return err
	}
	return s.write(p, off)
}

func (s *store) write(p []byte, off int64) error {
	if len(p) == 0 {
		return s.panicked
	}
	return s.call("Write", func() error {
		err := s.bs.Write(p, off)
		switch {
		case errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT):
			return fmt.Errorf("%d octets at %d of %s: %w: %w", len(p), off, s.path, backend.ErrNoSpace, err)
		case err != nil:
			return fmt.Errorf("%d octets at %d of %s: %w", len(p), off, s.path, err)
		}
		return nil
	})
}

// WriteDurable implements backend.Store.
func (s *store) WriteDurable(p []byte, off int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.check(off, int64(len(p)), true); err != nil {
		return err
	}
	if s.unsynced {
		return backend.ErrUnsynced
	}
	if err := s.write(p, off); err != nil {
		return err
	}
	return s.sync(off, int64(len(p)))
}

// Sync implements backend.Store.
func (s *store) Sync() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.check(0, 0, false); err != nil {
		return err
	}
	return s.sync(0, s.info.Size)
}

func (s *store) sync(off, n int64) error {
	switch {
	case s.info.ReadOnly:
		return nil
	case s.unsynced:
		return backend.ErrUnsynced
	}
	err := s.call("DataSync", func() error { return s.bs.DataSync(off, n) })
	s.unsynced = err != nil
	return err
}

// Discard implements backend.Store. What Unmap, if it is used at all, has left
// is found by reading and overwritten, for no plug-in says what it leaves.
func (s *store) Discard(off, n int64) error {
	return s.erase(off, n, func(off, n int64) error {
		if s.info.DiscardGranularity == 0 {
			return s.write(zeros[:n], off)
		}
		// Whole blocks only, as from gotgt: who knows how others are rounded.
		bs := int64(s.info.BlockSize)
		if first, last := (off+bs-1)/bs*bs, (off+n)/bs*bs; first < last {
			if err := s.call("Unmap", func() error {
				return s.bs.Unmap([]api.UnmapBlockDescriptor{{Offset: uint64(first), TL: uint32(last - first)}})
			}); err != nil {
				return err
			}
		}
		left := false
		if err := s.read(off, n, func(b []byte) error {
			left = string(b) != string(zeros[:n])
			return nil
		}); err != nil || !left {
			return err
		}
		return s.write(zeros[:n], off)
	})
}

// Zero implements backend.Store.
func (s *store) Zero(off, n int64) error {
	return s.erase(off, n, func(off, n int64) error { return s.write(zeros[:n], off) })
}

// erase has f erase the range in pieces that end on multiples of maxTransfer.
func (s *store) erase(off, n int64, f func(off, n int64) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.check(off, n, true); err != nil {
		return err
	}
	for end := off + n; off < end; {
		n := min(maxTransfer-off%maxTransfer, end-off)
		if err := f(off, n); err != nil {
			return err
		}
		off += n
	}
	return nil
}

// Close implements backend.Store.
func (s *store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return backend.ErrClosed
	}
	s.closed = true
	return errors.Join(s.sync(0, s.info.Size), s.release())
}

// release closes the plug-in's store. After a panic it stays open: to call it
// again could hang.
func (s *store) release() error {
	if s.panicked != nil {
		return nil
	}
	return errors.Join(
		s.call("Close", func() error { return s.bs.Close(s.dev) }),
		s.call("Exit", func() error { return s.bs.Exit(s.dev) }),
	)
}
