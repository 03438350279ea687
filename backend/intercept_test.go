package backend

import (
	"errors"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Hooks replace system calls of a file or block store. A nil hook makes the call.
type Hooks struct {
	Pread     func(p []byte, off int64, below func([]byte, int64) (int, error)) (int, error)
	Pwrite    func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error)
	Splice    func(off int64, n int) (int, error) // how much may be spliced at once
	Cached    func() bool                         // true: the page cache has kept a page
	Fallocate func(mode uint32) error             // nil lets the call through
	Copy      func(n int64) (int64, error)        // how much may be copied at once
	Map       func() error                        // nil lets the call through
	// Fdatasync gets the number of the file description that is synced, 0 for the first.
	Fdatasync func(description int) error // nil lets the call through
	Reopen    func() error                // nil lets the call through
	Truncate  func() error                // nil lets the call through
	Clone     func() error                // nil lets the call through
}

// PretendAtomic makes files that are opened later have these limits of atomic writes, until undo is called. A min of 0
// stands for a kernel that knows no atomic writes.
func PretendAtomic(min, max uint32) (undo func()) {
	was := statxOf
	statxOf = func(_ int, st *unix.Statx_t) error {
		if min > 0 {
			st.Mask, st.Atomic_write_unit_min, st.Atomic_write_unit_max = unix.STATX_WRITE_ATOMIC, min, max
		}
		return nil
	}
	return func() { statxOf = was }
}

// DiscardLimits calls discardLimits.
var DiscardLimits = discardLimits

// Spares returns how many spare descriptors are open in the process.
func Spares() int64 { return spareCount.Load() }

// Modes that the hook Fallocate gets.
var (
	PunchHole = eraseModes[erasePunch]
	ZeroRange = eraseModes[eraseZero]
)

// Intercept makes s use h. No goroutine may use s yet.
func Intercept(s Store, h *Hooks) {
	d := s.(*disk)
	d.fd = &hookedFile{d.fd, h, 0}
	direct, below := d.direct, d.spares.reopen
	d.direct = func() (osFile, error) {
		f, err := direct()
		if errors.Is(err, unix.EINVAL) { // tmpfs before Linux 6.6
			f, err = below()
		}
		if err != nil {
			return nil, err
		}
		return &hookedFile{f, h, -1}, nil
	}
	n := atomic.Int64{}
	d.spares.reopen = func() (osFile, error) {
		if h.Reopen != nil {
			if err := h.Reopen(); err != nil {
				return nil, err
			}
		}
		f, err := below()
		if err != nil {
			return nil, err
		}
		return &hookedFile{f, h, int(n.Add(1))}, nil
	}
}

// InterceptBuilder returns a FileBuilder that uses h; named: the file system has no unnamed
// files.
func InterceptBuilder(c BuildConfig, h *Hooks, named bool) (*FileBuilder, error) {
	return newFileBuilder(c, buildHooks{func(f osFile) osFile { return &hookedFile{f, h, 0} }, named})
}

type hookedFile struct {
	osFile
	h *Hooks
	n int
}

func (f *hookedFile) pread(p []byte, off int64) (int, error) {
	if f.h.Pread != nil {
		return f.h.Pread(p, off, f.osFile.pread)
	}
	return f.osFile.pread(p, off)
}

func (f *hookedFile) pwrite(p []byte, off int64, flags int) (int, error) {
	if f.h.Pwrite != nil {
		return f.h.Pwrite(p, off, flags, f.osFile.pwrite)
	}
	return f.osFile.pwrite(p, off, flags)
}

func (f *hookedFile) splice(pipe int, off int64, n int) (int, error) {
	if f.h.Splice != nil {
		var err error
		if n, err = f.h.Splice(off, n); n == 0 || err != nil {
			return 0, err
		}
	}
	return f.osFile.splice(pipe, off, n)
}

func (f *hookedFile) cached(off, n int64) (bool, error) {
	if f.h.Cached != nil && f.h.Cached() {
		return true, nil
	}
	return f.osFile.cached(off, n)
}

func (f *hookedFile) fallocate(mode uint32, off, n int64) error {
	if f.h.Fallocate != nil {
		if err := f.h.Fallocate(mode); err != nil {
			return err
		}
	}
	return f.osFile.fallocate(mode, off, n)
}

func (f *hookedFile) copyFrom(off int64, src osFile, srcOff, n int64) (int64, error) {
	if h, ok := src.(*hookedFile); ok {
		src = h.osFile
	}
	if f.h.Copy != nil {
		var err error
		if n, err = f.h.Copy(n); n == 0 || err != nil {
			return 0, err
		}
	}
	return f.osFile.copyFrom(off, src, srcOff, n)
}

func (f *hookedFile) extent(off, n int64) (at, length int64, err error) {
	if f.h.Map != nil {
		if err := f.h.Map(); err != nil {
			return 0, 0, err
		}
	}
	return f.osFile.extent(off, n)
}

func (f *hookedFile) fdatasync() error {
	if f.h.Fdatasync != nil {
		if err := f.h.Fdatasync(f.n); err != nil {
			return err
		}
	}
	return f.osFile.fdatasync()
}

func (f *hookedFile) truncate(size int64) error {
	if f.h.Truncate != nil {
		if err := f.h.Truncate(); err != nil {
			return err
		}
	}
	return f.osFile.truncate(size)
}

func (f *hookedFile) cloneTo(fd int, n int64) error {
	if f.h.Clone != nil {
		if err := f.h.Clone(); err != nil {
			return err
		}
	}
	return f.osFile.cloneTo(fd, n)
}
