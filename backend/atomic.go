package backend

import (
	"errors"
	"fmt"
	"math/bits"
	"strconv"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// An AtomicWriter is a Store that has an AtomicUnit in its Info.
type AtomicWriter interface {
	// WriteAtomic writes all of p or nothing, also when the power fails or the process ends. len(p) is a power of two from
	// AtomicUnit to AtomicWrite, and off a multiple of it. With durable, p is on stable storage when WriteAtomic returns.
	WriteAtomic(p []byte, off int64, durable bool) error
}

// WriteAtomic calls s.WriteAtomic if s is an AtomicWriter, else it fails with errors.ErrUnsupported.
func WriteAtomic(s Store, p []byte, off int64, durable bool) error {
	if w, ok := s.(AtomicWriter); ok {
		return w.WriteAtomic(p, off, durable)
	}
	return errors.ErrUnsupported
}

// maxAtomic bounds AtomicWrite of files and devices: a write is collected in memory.
const maxAtomic = 1 << 20

// statxOf is statx(2) of an open file; tests replace it.
var statxOf = func(fd int, st *unix.Statx_t) error {
	return retry(func() error { return unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_WRITE_ATOMIC, st) })
}

// atomicLimits returns AtomicUnit and AtomicWrite of an open file or device: what the kernel promises for RWF_ATOMIC
// (statx(2), Linux 6.11; files since 6.13). Both are 0 where it promises nothing.
func atomicLimits(fd int, blockSize uint32) (unit, most uint32) {
	var st unix.Statx_t
	if err := statxOf(fd, &st); err != nil || st.Mask&unix.STATX_WRITE_ATOMIC == 0 {
		return 0, 0
	}
	unit, most = max(st.Atomic_write_unit_min, blockSize), min(st.Atomic_write_unit_max, maxAtomic)
	if st.Atomic_write_unit_min == 0 || most < unit || bits.OnesCount32(unit) != 1 || bits.OnesCount32(most) != 1 {
		return 0, 0
	}
	return unit, most
}

// directAlign is the alignment in bytes of the memory of direct I/O: at least what any device requires (Dio_mem_align).
const directAlign = 4096

// directBuffers has aligned memory of maxAtomic bytes for atomic writes.
var directBuffers = sync.Pool{New: func() any {
	b := make([]byte, maxAtomic+directAlign)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (directAlign - 1)
	b = b[skip:][:maxAtomic]
	return &b
}}

// openDirect opens another description of fd for direct I/O, without which the kernel has no atomic writes.
func openDirect(fd int) (osFile, error) {
	direct, err := retryValue(func() (int, error) {
		return unix.Open("/proc/self/fd/"+strconv.Itoa(fd), unix.O_RDWR|unix.O_CLOEXEC|unix.O_DIRECT, 0)
	})
	switch {
	case err != nil:
		return nil, err
	case int64(direct) >= spareLimit.Load():
		return nil, errors.Join(errSpares, unix.Close(direct))
	}
	return sysFile(direct), nil
}

// WriteAtomic implements AtomicWriter with RWF_ATOMIC.
func (d *disk) WriteAtomic(p []byte, off int64, durable bool) error {
	durable = durable || d.through
	v, err := d.enter(off, int64(len(p)), true)
	if err != nil {
		return err
	}
	defer v.leave()
	n := len(p)
	if d.info.AtomicUnit == 0 || n < int(d.info.AtomicUnit) || n > int(d.info.AtomicWrite) || n&(n-1) != 0 || off&int64(n-1) != 0 {
		return fmt.Errorf("atomic write of %d bytes at %d: %w", n, off, errors.ErrUnsupported)
	}
	if durable && d.failed.Load() {
		return ErrUnsynced
	}
	f, err := d.direct()
	if err != nil {
		return fmt.Errorf("open %s for direct I/O: %w", d.path, err)
	}
	defer f.close()
	buffer := directBuffers.Get().(*[]byte)
	defer directBuffers.Put(buffer)
	b := (*buffer)[:copy(*buffer, p)]
	flags := unix.RWF_ATOMIC
	if durable {
		flags |= unix.RWF_DSYNC
	}
	done, err := f.pwrite(b, off, flags)
	switch {
	case err == nil && done == n:
		return nil
	case err == nil:
		err = unix.EIO // the kernel writes no part
	case durable && !isNoSpace(err) && err != unix.EINVAL && err != unix.EOPNOTSUPP && err != unix.EROFS:
		return d.fail(err)
	}
	return d.writeError(off, err)
}
