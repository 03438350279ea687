//go:build !nogotgt

// Package gotgt serves the backing stores of github.com/gostor/gotgt as backend.Stores. The
// build tag nogotgt leaves gotgt out of a program; Open fails then.
//
// The package uses gotgt's plug-in contract, api.BackingStore with api.UnmapBlockDescriptor,
// and the registry of scsi.NewBackingStore. It does not run gotgt's SCSI engine, LUN maps or
// iSCSI daemon.
//
// The import below registers gotgt's file store as "file". A program that imports other
// plug-ins can open those, too. The import also registers the null store, which Open refuses
// because it has no size.
//
// The package does not rely on anything that gotgt does not promise:
//
//   - gotgt calls a store from one goroutine for each connection without a lock, and its
//     stores say nothing about concurrency. This package calls a store from one goroutine at
//     a time.
//   - A Read may be short (gotgt appends zeros). This package returns an error.
//   - An Unmap may do nothing, like that of gotgt's stores. This package makes the range read
//     as zeros.
//   - A plug-in may panic. This package returns an error, and does not call the plug-in again,
//     because it may be in any state and hold locks.
//
// The package never calls DataAdvise: gotgt's implementation makes the system call 221, which
// is fadvise64 on amd64 only (on arm64 it is execve).
//
// Read returns memory that the plug-in allocates, so this store, unlike the others, allocates
// and copies for every read.
package gotgt

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/gostor/gotgt/pkg/api"
	"github.com/gostor/gotgt/pkg/scsi"
	_ "github.com/gostor/gotgt/pkg/scsi/backingstore" // the "file" plug-in
	"github.com/sirupsen/logrus"

	"github.com/iser-target/iser-target/backend"
	_ "github.com/iser-target/iser-target/backend/gotgt/gostorenv" // before gotgt
)

// Config describes a store of gotgt. The zero value of a field other than Plugin and Path
// means its default.
type Config struct {
	Plugin  string // name that the store registered with
	Path    string // for the plug-in's Open
	Options string // for the plug-in's Init
	// Size in bytes, a multiple of BlockSize; the plug-in must report the same size. Default:
	// the plug-in's size.
	Size      int64
	BlockSize uint32 // 512 or 4096; default 512
	ReadOnly  bool
	// Unmap means that the plug-in's Unmap frees space. Without it, Discard writes zeros.
	Unmap bool
}

// maxTransfer bounds the memory of one Discard or Zero, in bytes.
const maxTransfer = 1 << 20

var zeros [maxTransfer]byte // never written to

// quiet sends the log of gotgt, which uses logrus, to the default slog.Logger as debug
// records: the stores return what matters as errors. Nothing else uses logrus.
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
		return fail(fmt.Errorf("block size %d: must be 512 or 4096", bs)) // before anything is opened
	}
	quiet()
	err := s.call("New", func() (err error) {
		s.bs, err = scsi.NewBackingStore(c.Plugin)
		if err == nil && s.bs == nil {
			err = errors.New("the plug-in returned no store")
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
			return fmt.Errorf("%d bytes are too many", size)
		}
		s.info.Size, s.dev.Size = int64(size), size
		return nil
	})
	if err == nil {
		err = s.info.Validate()
	}
	if err == nil && c.Size != 0 && c.Size != s.info.Size {
		err = fmt.Errorf("the store has %d bytes, but %d are configured. Configure its size or no size", s.info.Size, c.Size)
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
	dev  *api.SCSILu // argument of the plug-in's Init, Open, Size, Close and Exit

	mu       sync.Mutex // held over every call of the plug-in
	bs       api.BackingStore
	closed   bool
	unsynced atomic.Bool // a DataSync has failed
	panicked error       // not nil: do not call the plug-in again
}

// call calls f, which calls the plug-in. It turns a panic into an error, and calls the plug-in
// no more after one.
func (s *store) call(name string, f func() error) (err error) {
	if s.panicked != nil {
		return s.panicked
	}
	defer func() {
		if v := recover(); v != nil {
			s.panicked = fmt.Errorf("gotgt store %q panicked in %s and is no longer used: %v", s.name, name, v)
			err = s.panicked
		}
	}()
	if err := f(); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// do calls f for a call on [off, off+n), with s.mu held.
func (s *store) do(off, n int64, changes bool, f func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return backend.ErrClosed
	case changes && s.info.ReadOnly:
		return backend.ErrReadOnly
	}
	if err := s.info.CheckRange(off, n); err != nil {
		return err
	}
	return f()
}

// Info implements backend.Store.
func (s *store) Info() backend.Info { return s.info }

// ReadAt implements backend.Store.
func (s *store) ReadAt(p []byte, off int64) error {
	n := int64(len(p))
	return s.do(off, n, false, func() error {
		return s.read(off, n, func(b []byte) { copy(p, b) })
	})
}

// read calls f with the n bytes at off, which f may use until it returns.
func (s *store) read(off, n int64, f func(b []byte)) error {
	if n == 0 {
		return s.panicked
	}
	return s.call("Read", func() error {
		b, err := s.bs.Read(off, n)
		switch {
		case err != nil:
			return fmt.Errorf("%d bytes at %d of %s: %w", n, off, s.path, err)
		case int64(len(b)) != n:
			return fmt.Errorf("%d bytes at %d of %s: got %d: %w", n, off, s.path, len(b), io.ErrUnexpectedEOF)
		}
		f(b)
		return nil
	})
}

// WriteAt implements backend.Store.
func (s *store) WriteAt(p []byte, off int64) error {
	return s.do(off, int64(len(p)), true, func() error { return s.write(p, off) })
}

func (s *store) write(p []byte, off int64) error {
	if len(p) == 0 {
		return s.panicked
	}
	return s.call("Write", func() error {
		err := s.bs.Write(p, off)
		switch {
		case errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT):
			return fmt.Errorf("%d bytes at %d of %s: %w: %w", len(p), off, s.path, backend.ErrNoSpace, err)
		case err != nil:
			return fmt.Errorf("%d bytes at %d of %s: %w", len(p), off, s.path, err)
		}
		return nil
	})
}

// WriteDurable implements backend.Store.
func (s *store) WriteDurable(p []byte, off int64) error {
	n := int64(len(p))
	return s.do(off, n, true, func() error {
		if s.unsynced.Load() {
			return backend.ErrUnsynced
		}
		if err := s.write(p, off); err != nil {
			return err
		}
		return s.sync(off, n)
	})
}

// Sync implements backend.Store.
func (s *store) Sync() error {
	return s.do(0, 0, false, func() error { return s.sync(0, s.info.Size) })
}

func (s *store) sync(off, n int64) error {
	switch {
	case s.info.ReadOnly:
		return nil
	case s.unsynced.Load():
		return backend.ErrUnsynced
	}
	err := s.call("DataSync", func() error { return s.bs.DataSync(off, n) })
	s.unsynced.Store(err != nil)
	return err
}

// SyncFailed implements backend.SyncFailer.
func (s *store) SyncFailed() bool { return s.unsynced.Load() }

// Discard implements backend.Store. No plug-in says what Unmap leaves, so Discard reads the
// range after an Unmap and overwrites the rest with zeros.
func (s *store) Discard(off, n int64) error {
	return s.erase(off, n, func(off, n int64) error {
		if s.info.DiscardGranularity == 0 {
			return s.write(zeros[:n], off)
		}
		// Whole blocks only, like gotgt: the rounding of others is not known.
		bs := int64(s.info.BlockSize)
		if first, last := (off+bs-1)/bs*bs, (off+n)/bs*bs; first < last {
			if err := s.call("Unmap", func() error {
				return s.bs.Unmap([]api.UnmapBlockDescriptor{{Offset: uint64(first), TL: uint32(last - first)}})
			}); err != nil {
				return err
			}
		}
		left := false
		if err := s.read(off, n, func(b []byte) { left = !bytes.Equal(b, zeros[:n]) }); err != nil || !left {
			return err
		}
		return s.write(zeros[:n], off)
	})
}

// Zero implements backend.Store.
func (s *store) Zero(off, n int64) error {
	return s.erase(off, n, func(off, n int64) error { return s.write(zeros[:n], off) })
}

// erase calls f for pieces of the range, which end on multiples of maxTransfer.
func (s *store) erase(off, n int64, f func(off, n int64) error) error {
	return s.do(off, n, true, func() error {
		for end := off + n; off < end; {
			n := min(maxTransfer-off%maxTransfer, end-off)
			if err := f(off, n); err != nil {
				return err
			}
			off += n
		}
		return nil
	})
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

// release closes the plug-in's store, except after a panic: another call could hang.
func (s *store) release() error {
	if s.panicked != nil {
		return nil
	}
	return errors.Join(
		s.call("Close", func() error { return s.bs.Close(s.dev) }),
		s.call("Exit", func() error { return s.bs.Exit(s.dev) }),
	)
}
