package backend

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/handed"
)

// FileConfig describes a file store. The zero value of a field other than Path means its default.
type FileConfig struct {
	Path string
	// Size in bytes, a multiple of BlockSize. Default: the size of the file, which must exist.
	Size      int64
	BlockSize uint32 // 512 or 4096; default 512
	ReadOnly  bool
	// WriteThrough makes every change durable before its call returns.
	WriteThrough bool
}

// OpenFile opens a regular file as a Store. If the file is absent or empty, and c is not
// ReadOnly, OpenFile creates it, sparse and with mode 0600, returns created, and leaves its
// name and size on stable storage. It refuses a file of another size than c.Size, because only
// the owner knows which of the two is wrong.
//
// The file is locked (flock(2)), exclusively or, with ReadOnly, shared. So no two targets
// serve it while one of them writes.
func OpenFile(c FileConfig) (s Store, created bool, err error) {
	if s, created, err = openFile(c); err != nil {
		return nil, false, fmt.Errorf("file store %s: %w", c.Path, err)
	}
	return s, created, nil
}

func openFile(c FileConfig) (_ Store, created bool, err error) {
	info := c.complete()
	if err := info.Validate(); err != nil { // before a file is created
		return nil, false, err
	}
	absent, err := checkFile(c)
	if err != nil {
		return nil, false, err
	}
	fd, err := lockFile(c)
	if err != nil {
		return nil, false, err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, false, fmt.Errorf("stat: %w", err)
	}
	if info.Size, err = fileSize(c, &st); err != nil {
		return nil, false, err
	}
	if st.Size == 0 {
		// Also after a power failure during creation: an empty file has nothing to lose.
		if err := makeSparse(c.Path, fd, c.Size); err != nil {
			if absent {
				os.Remove(c.Path) // it is empty, and locked
			}
			return nil, false, err
		}
		created = true
	}

	// st_blksize is the size for efficient I/O: the block of a local file system, but the
	// largest transfer of a network one. Hence the limit.
	info.PhysicalBlockSize = blockSizeOf(int64(st.Blksize), c.BlockSize, 64<<10)
	if !c.ReadOnly {
		info.DiscardGranularity = punchGranularity(fd, info)
	}
	if err := info.Validate(); err != nil {
		return nil, false, err
	}
	// fallocate accepts any range of a regular file: "partial filesystem blocks are zeroed,
	// and whole filesystem blocks are removed" (fallocate(2)).
	d := newDisk(c.Path, fd, info, 1, c.WriteThrough && !c.ReadOnly)
	d.regular = true
	d.noPipe.Store(!freezes(fd))
	d.device.Store(st.Dev)
	return d, created, nil
}

// complete gives c its defaults and returns what is known of its store before its file is open.
func (c *FileConfig) complete() Info {
	if c.BlockSize == 0 {
		c.BlockSize = defaultBlockSize
	}
	info := Info{Size: c.Size, BlockSize: c.BlockSize, PhysicalBlockSize: c.BlockSize, ReadOnly: c.ReadOnly}
	if c.Size == 0 {
		info.Size = int64(c.BlockSize) // until the size of the file is known
	}
	return info
}

// checkFile checks that c.Path is a regular file, or is absent and may be created. It does
// not open the file: to open a device or a FIFO may have effects or wait.
func checkFile(c FileConfig) (absent bool, err error) {
	st, err := os.Stat(c.Path)
	absent = errors.Is(err, fs.ErrNotExist)
	switch {
	case absent && c.ReadOnly:
		return true, errors.New("not found, and a read-only file is not created")
	case absent && c.Size == 0:
		return true, errors.New("not found. Create it, or configure the size to create it with")
	case absent:
		return true, nil
	case err != nil:
		return false, err
	case st.IsDir():
		return false, errors.New("is a directory, not a file")
	case !st.Mode().IsRegular():
		return false, fmt.Errorf("not a regular file (%s). For a block device, use the backend block", st.Mode().Type())
	case !c.ReadOnly && isSnapshot(c.Path, st.Mode()):
		return false, errors.New("is a snapshot. Make the LUN read-only, or serve a clone of it (lun clone)")
	}
	return false, nil
}

// lockFile opens and locks the file, which it creates if c.Size is set, or takes it from the process before.
func lockFile(c FileConfig) (fd int, err error) {
	if fd, ok := handed.TakeDescriptor(c.Path); ok {
		return fd, nil
	}
	return openLocked(c)
}

// openLocked opens and locks the file, which it creates if c.Size is set.
func openLocked(c FileConfig) (fd int, err error) {
	flags, lock := unix.O_RDWR|unix.O_CREAT, unix.LOCK_EX
	if c.ReadOnly {
		flags, lock = unix.O_RDONLY, unix.LOCK_SH
	} else if c.Size == 0 {
		flags = unix.O_RDWR
	}
	fd, err = retryValue(func() (int, error) {
		return unix.Open(c.Path, flags|unix.O_CLOEXEC|unix.O_NONBLOCK, 0o600)
	})
	if err != nil {
		return 0, fmt.Errorf("open: %w", err)
	}
	err = retry(func() error { return unix.Flock(fd, lock|unix.LOCK_NB) })
	if err == nil {
		return fd, nil
	}
	unix.Close(fd)
	if err == unix.EWOULDBLOCK {
		return 0, errors.New("locked by another target, or by another LUN under another name. Stop that one, or use another file")
	}
	return 0, fmt.Errorf("lock: %w", err)
}

// fileSize returns the size of the store on a file with status st. An empty file gets the
// configured size.
func fileSize(c FileConfig, st *unix.Stat_t) (int64, error) {
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return 0, errors.New("no longer a regular file")
	case st.Size == 0 && c.Size > 0 && !c.ReadOnly:
		return c.Size, nil
	case c.Size != 0 && st.Size != c.Size:
		return 0, fmt.Errorf("the file is %s, but its size is configured as %s. Configure the size of the file, or change the file with truncate(1)", SizeText(st.Size), SizeText(c.Size))
	case st.Size == 0:
		return 0, errors.New("the file is empty. Configure its size")
	case st.Size%int64(c.BlockSize) != 0:
		return 0, fmt.Errorf("the file has %d bytes, which is not a multiple of the block size %d. Configure another block size, or change the file with truncate(1)", st.Size, c.BlockSize)
	}
	return st.Size, nil
}

// SizeText returns n bytes for people, and exactly: 30GiB (32212254720 bytes).
func SizeText(n int64) string {
	exact := fmt.Sprintf("%d bytes", n)
	unit := -1
	short := n
	for short >= 1024 && short%1024 == 0 && unit < len("KMGTP")-1 {
		short, unit = short/1024, unit+1
	}
	if unit < 0 {
		return exact
	}
	return fmt.Sprintf("%d%ciB (%s)", short, "KMGTP"[unit], exact)
}

// makeSparse gives the new file its size and puts name and size on stable storage.
func makeSparse(path string, fd int, size int64) error {
	if err := sysFile(fd).truncate(size); err != nil {
		return fmt.Errorf("create with %d bytes: %w", size, err)
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

// punchGranularity returns the block size of the file system of fd, or 0 if it cannot punch
// holes. To find out, it punches a hole after the end of the file, where no data is lost.
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
