package backend

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

var (
	// ErrNoReflink reports that the medium cannot share its blocks with another file.
	ErrNoReflink = errors.New("the file system cannot share blocks between files (reflink)")
	// ErrUnsettled reports that changes in progress did not end in time for a CloneTo.
	ErrUnsettled = errors.New("changes in progress did not end")
)

// A Snapshotter is a Store whose content another file can share. Its methods follow the rules of Store's methods.
type Snapshotter interface {
	// CloneTo gives the empty regular file fd the content that the Store has at one moment during the call: with each
	// change that returned before the call, and with none that begins after it. If it has a change, it has all that
	// returned before that one began. Both files share their blocks until one of them changes. Changes that begin meanwhile
	// wait, for the time that CloneTo returns, while reads and syncs proceed. fd is on stable storage after a sync of it.
	// CloneTo fails with an ErrUnsettled if changes in progress take longer than limit, and with an ErrNoReflink if
	// the file system cannot share blocks. Then fd is of no use.
	CloneTo(fd int, limit time.Duration) (waited time.Duration, err error)

	// CanClone returns nil if a file in dir can share blocks of the Store, which it tries with one without a name, or the
	// error that CloneTo would return. An empty dir is that of the Store.
	CanClone(dir string) error
}

// SnapshotEnd ends the name of the file of a snapshot, FILE@NAME.snap, which is not opened for writing.
const SnapshotEnd = ".snap"

// isSnapshot reports whether the file at path is a snapshot: by its name, and because nobody may write to it.
func isSnapshot(path string, mode fs.FileMode) bool {
	base := filepath.Base(path)
	return mode.Perm()&0o222 == 0 && strings.HasSuffix(base, SnapshotEnd) && strings.Contains(base, "@")
}

// settleRounds bounds the syncs before CloneTo stops changes, and settled is the time of one after which it stops them: as long as
// that takes, they wait for what is left.
const (
	settleRounds = 3
	settled      = 20 * time.Millisecond
)

// A pause makes changes of a disk wait until over is closed.
type pause struct{ over chan struct{} }

// pause makes changes that begin from now on wait, and returns when none is in progress, or false after limit. In both cases
// resume follows. Only one goroutine may call it.
func (c *changes) pause(limit time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended.L = &c.mu
	c.waiting.Store(true)
	defer c.waiting.Store(false)
	c.paused.Store(&pause{make(chan struct{})})
	late := false
	timer := time.AfterFunc(limit, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		late = true
		c.ended.Broadcast()
	})
	defer timer.Stop()
	for c.calls[0].Load() != 0 || c.calls[1].Load() != 0 { // in any turn: those that wait do not count
		if late {
			return false
		}
		c.ended.Wait()
	}
	return true
}

// resume ends pause.
func (c *changes) resume() { close(c.paused.Swap(nil).over) }

// CloneTo implements Snapshotter with FICLONE (ioctl_ficlonerange(2)).
func (d *disk) CloneTo(fd int, limit time.Duration) (waited time.Duration, err error) {
	d.resizing.Lock() // the size stays, and nobody else pauses
	defer d.resizing.Unlock()
	v, err := d.enter(0, 0, false)
	if err != nil {
		return 0, err
	}
	defer v.leave()
	if !d.regular {
		return 0, ErrNoReflink
	}
	if err := d.inspect(); err != nil {
		return 0, err
	}
	if !d.info.ReadOnly {
		for range settleRounds { // most of what the clone would have to write while changes wait
			began := time.Now()
			if err := d.sync(); err != nil {
				return 0, err
			}
			if time.Since(began) < settled {
				break
			}
		}
		began := time.Now()
		defer func() { waited = time.Since(began) }()
		defer d.changes.resume()
		if !d.changes.pause(limit) {
			return 0, fmt.Errorf("%s: %w in %v", d.path, ErrUnsettled, limit)
		}
	}
	if err := d.fd.cloneTo(fd, 0); err != nil {
		return 0, cloneError(d.path, err)
	}
	return 0, cutTo(fd, d.size.Load())
}

// cutTo gives a clone the size of its Store: the file of the Store may have more bytes.
func cutTo(fd int, size int64) error {
	st, err := sysFile(fd).stat()
	switch {
	case err != nil || st.Size == size:
		return err
	case st.Size < size:
		return fmt.Errorf("%w: its clone has %d bytes, and the LUN %d", ErrCut, st.Size, size)
	}
	return sysFile(fd).truncate(size)
}

// CanClone implements Snapshotter.
func (d *disk) CanClone(dir string) error {
	v, err := d.enter(0, 0, false)
	if err != nil {
		return err
	}
	defer v.leave()
	if !d.regular {
		return ErrNoReflink
	}
	if err := d.inspect(); err != nil {
		return err
	}
	if dir == "" {
		path, err := filepath.EvalSymlinks(d.path)
		if err != nil {
			return err
		}
		dir = filepath.Dir(path)
	}
	return tryClone(d.path, d.fd, d.size.Load(), dir)
}

// CanShare returns nil if a file in dir can share the blocks of the regular file at path, else what Build would say of that.
func CanShare(path, dir string) error {
	s, err := openSource(path)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	defer unix.Close(s.fd)
	return tryClone(path, sysFile(s.fd), s.size, dir)
}

// maxFileBlock is the largest block of a file system, in bytes.
const maxFileBlock = 64 << 10

// tryClone clones the first block of f, which has size bytes and that path, to a file without a name in dir.
func tryClone(path string, f osFile, size int64, dir string) error {
	fd, err := retryValue(func() (int, error) { return unix.Open(dir, unix.O_RDWR|unix.O_CLOEXEC|unix.O_TMPFILE, 0o600) })
	switch err {
	case nil:
	case unix.EOPNOTSUPP, unix.EISDIR, unix.EINVAL: // no files without a name: the clone itself finds out
		return nil
	default:
		return &fs.PathError{Op: "create a file in", Path: dir, Err: err}
	}
	defer unix.Close(fd)
	n := int64(maxFileBlock)
	if size <= n {
		n = 0 // to the end
	}
	return cloneError(path, f.cloneTo(fd, n))
}

// cloneError returns the error of FICLONE on the file at path; nil stays nil.
func cloneError(path string, err error) error {
	switch err {
	case nil:
		return nil
	case unix.EXDEV:
		return fmt.Errorf("%s: the new file is on another file system: %w", path, ErrNoReflink)
	case unix.EOPNOTSUPP, unix.ENOTTY, unix.ENOSYS:
		return fmt.Errorf("%s: %w", path, ErrNoReflink)
	case unix.EINVAL: // also of btrfs, about a file with the attribute C in a directory without
		return fmt.Errorf("%s: %w, or not with the attributes of this file, which lsattr(1) shows", path, ErrNoReflink)
	case unix.EPERM, unix.EACCES:
		return fmt.Errorf("%s: the kernel, or the filter of system calls, forbids to share its blocks: %w", path, err)
	}
	if isNoSpace(err) {
		return fmt.Errorf("share the blocks of %s: %w: %w", path, ErrNoSpace, err)
	}
	return fmt.Errorf("share the blocks of %s: %w", path, err)
}

// cloneTo makes the first n bytes of f, or all of them if n is 0, those of the file fd, too.
func (f sysFile) cloneTo(fd int, n int64) error {
	return retry(func() error {
		return unix.IoctlFileCloneRange(fd, &unix.FileCloneRange{Src_fd: int64(f), Src_length: uint64(n)})
	})
}
