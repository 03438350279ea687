package backend

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// FileConfig describes a file store. The zero value of a field other than Path
// means its default.
type FileConfig struct {
	Path string
	// Size in octets, a multiple of BlockSize. Default: that of the file,
	// which then must exist.
	Size      int64
	BlockSize uint32 // 512 or 4096; default 512
	ReadOnly  bool
	// WriteThrough makes every change durable before its call returns.
	WriteThrough bool
}

// OpenFile opens a regular file as a Store. A file that is absent or empty is
// made, sparse and with mode 0600, unless ReadOnly; created tells so, and its
// existence and size are on stable storage then. A file of another size is
// refused, for only its owner knows which of the two sizes is the mistake.
//
// The file is locked (flock(2)), exclusively or, with ReadOnly, shared, so that
// no two targets serve it while one of them writes.
func OpenFile(c FileConfig) (s Store, created bool, err error) {
	fail := func(err error) (Store, bool, error) {
		return nil, false, fmt.Errorf("file store %s: %w", c.Path, err)
	}
	if c.BlockSize == 0 {
		c.BlockSize = defaultBlockSize
	}
	info := Info{Size: c.Size, BlockSize: c.BlockSize, PhysicalBlockSize: c.BlockSize, ReadOnly: c.ReadOnly}
	if c.Size == 0 {
		info.Size = int64(c.BlockSize) // for now: the file knows better
	}
	if err := info.Validate(); err != nil { // before a file is made
		return fail(err)
	}
	// To open a device or a FIFO may do something or wait for somebody.
	st, err := os.Stat(c.Path)
	absent := errors.Is(err, fs.ErrNotExist)
	switch {
	case absent && c.ReadOnly:
		return fail(errors.New("does not exist, and a read-only store is not created"))
	case absent && c.Size == 0:
		return fail(errors.New("does not exist: create it, or configure the size that it is to be created with"))
	case absent:
	case err != nil:
		return fail(err)
	case st.IsDir():
		return fail(errors.New("is a directory: a file is wanted"))
	case !st.Mode().IsRegular():
		return fail(fmt.Errorf("is no regular file (%s): a block device wants the block backend", st.Mode().Type()))
	}

	flags, lock := unix.O_RDWR|unix.O_CREAT, unix.LOCK_EX
	if c.ReadOnly {
		flags, lock = unix.O_RDONLY, unix.LOCK_SH
	} else if c.Size == 0 {
		flags = unix.O_RDWR
	}
	var fd int
	if err := retry(func() (err error) {
		fd, err = unix.Open(c.Path, flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0o600)
		return err
	}); err != nil {
		return fail(fmt.Errorf("open: %w", err))
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	switch err := retry(func() error { return unix.Flock(fd, lock|unix.LOCK_NB) }); err {
	case nil:
	case unix.EWOULDBLOCK:
		return fail(errors.New("is locked: another target serves it, or another LUN by another name; stop that one, or give this LUN a file of its own"))
	default:
		return fail(fmt.Errorf("lock: %w", err))
	}

	var kst unix.Stat_t
	if err := unix.Fstat(fd, &kst); err != nil {
		return fail(fmt.Errorf("stat: %w", err))
	}
	switch {
	case kst.Mode&unix.S_IFMT != unix.S_IFREG:
		return fail(errors.New("is no regular file any more"))
	case kst.Size == 0 && c.Size > 0 && !c.ReadOnly:
		// Also what is left when the power failed between creation and this:
		// an empty file has nothing to lose.
		if err := makeSparse(c.Path, fd, c.Size); err != nil {
			if absent {
				os.Remove(c.Path) // we hold its lock, and it is empty
			}
			return fail(err)
		}
		created, info.Size = true, c.Size
	case c.Size != 0 && kst.Size != c.Size:
		return fail(fmt.Errorf("has %d octets, but %d are configured: configure its size, or change the file's with truncate(1)", kst.Size, c.Size))
	case kst.Size == 0:
		return fail(errors.New("is empty: configure the size that it is to have"))
	case kst.Size%int64(c.BlockSize) != 0:
		return fail(fmt.Errorf("has %d octets, no multiple of the block size %d: configure a block size that fits, "+
			"or change the file's size with truncate(1)", kst.Size, c.BlockSize))
	default:
		info.Size = kst.Size
	}

	// st_blksize is the size for efficient I/O: the block of a local file
	// system, but the largest transfer of a network one, hence the limit.
	info.PhysicalBlockSize = blockSizeOf(int64(kst.Blksize), c.BlockSize, 64<<10)
	if !c.ReadOnly {
		info.DiscardGranularity = punchGranularity(fd, info)
	}
	if err := info.Validate(); err != nil {
		return fail(err)
	}
	// fallocate takes any range of a regular file: "partial filesystem blocks
	// are zeroed, and whole filesystem blocks are removed" (fallocate(2)).
	d := newDisk(c.Path, fd, info, 1, c.WriteThrough && !c.ReadOnly)
	d.regular = true
	return d, created, nil
}

// makeSparse gives the new file its size and makes both survive a power loss.
func makeSparse(path string, fd int, size int64) error {
	if err := retry(func() error { return unix.Ftruncate(fd, size) }); err != nil {
		return fmt.Errorf("create with %d octets: %w", size, err)
	}
	if err := retry(func() error { return unix.Fsync(fd) }); err != nil {
		return fmt.Errorf("sync the new file: %w", err)
	}
	return syncDir(path)
}

// syncDir puts the name of a new file on stable storage.
func syncDir(path string) error {
	// The name is in the directory of the file, not of a link to it.
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := dir.Sync(); err != nil {
		return fmt.Errorf("sync the directory of the new file: %w", err)
	}
	return nil
}

// punchGranularity returns the block size of the file system that fd is on, or
// 0 when that cannot punch holes. To find out, it punches one behind the end
// of the file, where there is nothing to lose.
func punchGranularity(fd int, info Info) uint32 {
	var sfs unix.Statfs_t
	if err := retry(func() error { return unix.Fstatfs(fd, &sfs) }); err != nil {
		return 0
	}
	g := blockSizeOf(int64(sfs.Bsize), info.BlockSize, 1<<30)
	if sysFile(fd).fallocate(eraseModes[erasePunch], info.Size, int64(g)) != nil {
		return 0
	}
	return g
}
