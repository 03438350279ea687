package backend

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/handed"
)

// BlockConfig describes a block store. The zero value of a field other than Path means its default.
type BlockConfig struct {
	Path string
	// BlockSize is 512 or 4096, and at least the device's logical sector size, the default.
	BlockSize uint32
	ReadOnly  bool
	// WriteThrough makes every change durable before its call returns.
	WriteThrough bool
}

// OpenBlock opens a block device as a Store with the sizes that the kernel reports. The Store
// is read-only if c or the kernel says so. OpenBlock opens the device with O_EXCL, even to
// read: it refuses a device that is mounted or otherwise in use, and the device cannot be
// mounted while the Store is open.
//
// The Store has a volatile cache, whatever queue/write_cache in sysfs says about the device:
// the page cache is in front of it.
func OpenBlock(c BlockConfig) (s Store, err error) {
	fail := func(err error) (Store, error) {
		return nil, fmt.Errorf("block store %s: %w", c.Path, err)
	}
	st, err := os.Stat(c.Path)
	switch {
	case err != nil:
		return fail(err)
	case st.Mode()&(os.ModeDevice|os.ModeCharDevice) != os.ModeDevice:
		return fail(fmt.Errorf("not a block device (%s). For a regular file, use the backend file", st.Mode()))
	}
	fd, err := openBlock(c.Path, c.ReadOnly)
	if err != nil {
		return fail(err)
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()

	info := Info{BlockSize: c.BlockSize}
	var logical, physical, readOnly uint32 // the kernel's are int and unsigned int
	var kst unix.Stat_t
	for _, q := range []struct {
		what string
		err  error
	}{
		{"fstat", unix.Fstat(fd, &kst)},
		{"BLKGETSIZE64", ioctl(fd, unix.BLKGETSIZE64, unsafe.Pointer(&info.Size))},
		{"BLKSSZGET", ioctl(fd, unix.BLKSSZGET, unsafe.Pointer(&logical))},
		{"BLKPBSZGET", ioctl(fd, unix.BLKPBSZGET, unsafe.Pointer(&physical))},
		{"BLKROGET", ioctl(fd, unix.BLKROGET, unsafe.Pointer(&readOnly))},
	} {
		if q.err != nil {
			return fail(fmt.Errorf("%s: %w", q.what, q.err))
		}
	}
	if kst.Mode&unix.S_IFMT != unix.S_IFBLK {
		return fail(errors.New("no longer a block device"))
	}
	switch {
	case info.Size == 0:
		return fail(errors.New("has no medium, or its size is 0"))
	case c.BlockSize == 0:
		info.BlockSize = logical
	case c.BlockSize < logical:
		return fail(fmt.Errorf("block size %d is configured, but the device has sectors of %d bytes. Configure %[2]d or no block size",
			c.BlockSize, logical))
	}
	info.ReadOnly = c.ReadOnly || readOnly != 0
	info.PhysicalBlockSize = blockSizeOf(int64(physical), info.BlockSize, 1<<30)
	if !info.ReadOnly {
		info.DiscardGranularity, info.DiscardAlignment = discardLimits("/sys", kst.Rdev, info.BlockSize)
	}
	if err := info.Validate(); err != nil {
		return fail(err)
	}
	// blkdev_fallocate refuses ranges that are not aligned to logical sectors.
	d := newDisk(c.Path, fd, info, int64(logical), c.WriteThrough && !info.ReadOnly)
	d.device.Store(kst.Rdev)
	return d, nil
}

// openBlock opens a device for writing, or for reading if readOnly or if the kernel has the
// device as read-only.
func openBlock(path string, readOnly bool) (fd int, err error) {
	if fd, ok := handed.TakeDescriptor(path); ok {
		return fd, nil
	}
	open := func(mode int) (int, error) {
		return retryValue(func() (int, error) { return unix.Open(path, mode|unix.O_EXCL|unix.O_CLOEXEC, 0) })
	}
	mode := unix.O_RDWR
	if readOnly {
		mode = unix.O_RDONLY
	}
	fd, err = open(mode)
	if !readOnly && (err == unix.EROFS || err == unix.EACCES || err == unix.EPERM) {
		first := err
		if fd, err = open(unix.O_RDONLY); err == nil {
			var ro int32
			if ioctl(fd, unix.BLKROGET, unsafe.Pointer(&ro)) != nil || ro == 0 {
				unix.Close(fd)
				err = first // only this process may not write
			}
		}
	}
	switch err {
	case nil:
		return fd, nil
	case unix.EBUSY:
		return 0, errors.New("in use: mounted, swap, part of a RAID or volume group, or served by another target. " +
			"Run lsblk to see which")
	}
	return 0, fmt.Errorf("open: %w", err)
}

// ioctl calls ioctl(2) with a request of linux/fs.h that fills in *arg.
func ioctl(fd int, request uint, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

// discardLimits returns DiscardGranularity and DiscardAlignment of a device from sysfs
// (Documentation/ABI/stable/sysfs-block). The granularity is 0 if Discard would only write zeros:
// for a device that can discard but does not promise zeros afterwards, and without sysfs.
func discardLimits(sysfs string, dev uint64, blockSize uint32) (granularity uint32, alignment int64) {
	dir, err := filepath.EvalSymlinks(fmt.Sprintf("%s/dev/block/%d:%d", sysfs, unix.Major(dev), unix.Minor(dev)))
	if err != nil {
		return 0, 0
	}
	device := dir // the disk or the partition
	if _, err := os.Stat(filepath.Join(dir, "queue")); err != nil {
		dir = filepath.Dir(dir) // a partition has the queue of its disk
	}
	attribute := func(name ...string) uint64 {
		b, _ := os.ReadFile(filepath.Join(name...)) // without the file 0, like a wrong value
		v, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
		if err != nil {
			return 0
		}
		return v
	}
	g := attribute(dir, "queue/discard_granularity")
	if g == 0 || g > math.MaxInt32 || attribute(dir, "queue/discard_max_bytes") == 0 || attribute(dir, "queue/write_zeroes_max_bytes") == 0 {
		return 0, 0
	}
	bs, a := uint64(blockSize), attribute(device, "discard_alignment")
	if g%bs != 0 || a%bs != 0 || a >= g {
		return uint32((g + bs - 1) / bs * bs), DiscardUnaligned
	}
	return uint32(g), int64(a)
}
