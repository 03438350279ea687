package backend

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// MakeConfig describes a file that is to be made with more than its size. The zero
// value of a field other than Path means its default.
type MakeConfig struct {
	Path string // of the file, which must not be there
	// Size in octets, a multiple of BlockSize. Default: that of From, rounded up.
	Size      int64
	BlockSize uint32 // default 512
	// Preallocate allocates all blocks of the file, so that no write to it meets a
	// full file system.
	Preallocate bool
	// From is a file or block device whose content the file begins with; zeros follow.
	From string
}

// A Progress is how far a Making has come in its present phase, in octets.
type Progress struct {
	Phase       string // one of those below
	Done, Total int64
}

// What a Making does.
const (
	Preallocating = "preallocating"
	Zeroing       = "zeroing" // where the file system cannot preallocate
	Copying       = "copying"
)

// A Making is a file that is not there before it is whole. Until Publish it has no
// name, so that the end of the process leaves nothing of it; on a file system that
// knows no such files (O_TMPFILE) it is called .NAME.part, and the next Making of the
// same Path removes what is left.
type Making struct {
	c      MakeConfig
	source *makeSource // nil: there is none
	fd     int         // -1: there is none
	part   string      // its name so far; empty: it has none
	itself os.FileInfo // of what Publish has given its name
	hooks  makeHooks
}

// makeHooks are what tests put in the place of the kernel.
type makeHooks struct {
	wrap  func(osFile) osFile
	named bool // the file system knows no files without names
}

// A makeSource is what is copied.
type makeSource struct {
	path    string
	fd      int
	regular bool
	size    int64 // octets
}

const (
	// allocateStep is how many octets are allocated at once: few calls, and an end
	// soon after it is asked for.
	allocateStep = 128 << 20
	// copyStep is how many octets the kernel copies at once.
	copyStep = 16 << 20
	// flushEvery is after how many written octets they go to the medium, so that
	// Progress tells of those that are there, and not of those in memory.
	flushEvery = 256 << 20
)

// NewMaking checks c and opens what is to be copied, which nobody may be writing to.
// Nothing is made before Run. The caller has to call Discard in any case.
func NewMaking(c MakeConfig) (*Making, error) { return newMaking(c, makeHooks{}) }

func newMaking(c MakeConfig, hooks makeHooks) (*Making, error) {
	if c.BlockSize == 0 {
		c.BlockSize = defaultBlockSize
	}
	m := &Making{c: c, fd: -1, hooks: hooks}
	if _, err := os.Lstat(c.Path); err == nil {
		return nil, fmt.Errorf("%s: %w: it would be overwritten", c.Path, fs.ErrExist)
	}
	if c.From != "" {
		source, err := openSource(c.From)
		if err != nil {
			return nil, fmt.Errorf("copy from %s: %w", c.From, err)
		}
		m.source = source
		switch {
		case c.Size == 0:
			mask := int64(c.BlockSize) - 1
			m.c.Size = (source.size + mask) &^ mask
		case c.Size < source.size:
			m.Discard()
			return nil, fmt.Errorf("copy from %s: it has %d octets, which are more than the size %d", c.From, source.size, c.Size)
		}
	}
	if err := (Info{Size: m.c.Size, BlockSize: c.BlockSize, PhysicalBlockSize: c.BlockSize}).Validate(); err != nil {
		m.Discard()
		return nil, fmt.Errorf("%s: %w", c.Path, err)
	}
	return m, nil
}

// openSource opens what is to be copied, and keeps others from writing to it: by
// flock(2), which file stores respect, and O_EXCL, as block stores and mounts do.
func openSource(path string) (*makeSource, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, errors.Unwrap(err) // the path is said already
	}
	flags, regular := unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, st.Mode().IsRegular()
	switch {
	case regular:
	case st.Mode()&fs.ModeDevice != 0 && st.Mode()&fs.ModeCharDevice == 0:
		flags |= unix.O_EXCL
	default:
		return nil, errors.New("is neither a regular file nor a block device")
	}
	s := &makeSource{path: path, regular: regular}
	err = retry(func() (err error) {
		s.fd, err = unix.Open(path, flags, 0)
		return err
	})
	if err == unix.EBUSY {
		return nil, errors.New("is in use: unmount it, or copy a snapshot of it")
	}
	if err != nil {
		return nil, err
	}
	if regular {
		err = retry(func() error { return unix.Flock(s.fd, unix.LOCK_SH|unix.LOCK_NB) })
		if err == unix.EWOULDBLOCK {
			err = errors.New("is locked: a target serves it; delete that LUN first, or make it read only")
		}
	}
	if err == nil {
		s.size, err = sysFile(s.fd).seek(0, unix.SEEK_END)
	}
	if err == nil && s.size == 0 {
		err = errors.New("is empty")
	}
	if err != nil {
		unix.Close(s.fd)
		return nil, err
	}
	return s, nil
}

// Size is how many octets the file will have.
func (m *Making) Size() int64 { return m.c.Size }

// Path is where the file will be.
func (m *Making) Path() string { return m.c.Path }

// Run makes the file, and calls report often from the same goroutine. When ctx ends it
// stops soon, with the cause. ErrNoSpace: the file system has no room for it.
func (m *Making) Run(ctx context.Context, report func(Progress)) error {
	err := m.run(ctx, report)
	switch {
	case err == nil:
		return nil
	case isNoSpace(err):
		err = fmt.Errorf("%w: %w", ErrNoSpace, err)
	}
	return fmt.Errorf("make %s: %w", m.c.Path, err)
}

func (m *Making) run(ctx context.Context, report func(Progress)) error {
	if m.c.Preallocate {
		if err := CheckRoom(filepath.Dir(m.c.Path), m.c.Size); err != nil {
			return err
		}
	}
	if err := m.open(); err != nil {
		return err
	}
	var f osFile = sysFile(m.fd)
	if m.hooks.wrap != nil {
		f = m.hooks.wrap(f)
	}
	if err := f.truncate(m.c.Size); err != nil {
		return err
	}
	w := &makeWork{ctx: ctx, f: f, report: report}
	allocated := false
	if m.c.Preallocate {
		var err error
		if allocated, err = w.allocate(m.c.Size); err != nil {
			return err
		}
	}
	var err error
	switch full := m.c.Preallocate && !allocated; {
	case m.source != nil:
		err = w.copy(m.source, m.c.Size, m.c.Preallocate, full)
	case full:
		w.Progress = Progress{Phase: Zeroing, Total: m.c.Size}
		err = w.zero(0, m.c.Size)
	}
	if err != nil {
		return err
	}
	return retry(func() error { return unix.Fsync(m.fd) })
}

// CheckRoom fails with ErrNoSpace if the file system that path is on has not so many octets
// free: to find out by taking them would leave none to others, and they stay with a file
// that is there. A file system that does not say passes.
func CheckRoom(path string, octets int64) error {
	var fs unix.Statfs_t
	if err := retry(func() error { return unix.Statfs(path, &fs) }); err != nil || fs.Blocks == 0 || fs.Frsize <= 0 {
		return nil
	}
	if uint64(octets)/uint64(fs.Frsize) > fs.Bavail {
		return fmt.Errorf("%w: %d octets more are wanted, and %d are free", ErrNoSpace, octets, int64(fs.Bavail)*fs.Frsize)
	}
	return nil
}

// open makes the file, without a name if that can be.
func (m *Making) open() error {
	dir, name := filepath.Split(m.c.Path)
	if dir == "" {
		dir = "."
	}
	const flags = unix.O_RDWR | unix.O_CLOEXEC
	if !m.hooks.named {
		fd, err := unix.Open(dir, flags|unix.O_TMPFILE, 0o600)
		switch err {
		case nil:
			if _, err := os.Stat(descriptorPath(fd)); err == nil { // Publish needs that
				m.fd = fd
				return nil
			}
			unix.Close(fd)
		case unix.EOPNOTSUPP, unix.EISDIR, unix.EINVAL: // open(2)
		default:
			return &fs.PathError{Op: "make a file in", Path: dir, Err: err}
		}
	}
	part := filepath.Join(dir, "."+name+".part")
	for range 3 {
		if err := removePart(part); err != nil {
			return fmt.Errorf("%s: %w", part, err)
		}
		fd, err := unix.Open(part, flags|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
		if err == unix.EEXIST {
			continue
		}
		if err != nil {
			return &fs.PathError{Op: "make", Path: part, Err: err}
		}
		if err := lockPart(part, fd); err == nil {
			m.fd, m.part = fd, part
			return nil
		}
		unix.Close(fd)
	}
	return fmt.Errorf("%s: %w", part, errMaking)
}

var errMaking = errors.New("another process is making this file")

// lockPart locks what a Making has open, which no other may have removed before.
func lockPart(part string, fd int) error {
	var open, there unix.Stat_t
	if unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil || unix.Fstat(fd, &open) != nil || unix.Lstat(part, &there) != nil ||
		open.Ino != there.Ino || open.Dev != there.Dev {
		return errMaking
	}
	return nil
}

// removePart removes what a process that has ended left. Nothing is ever written to
// it: it could have other names by now.
func removePart(part string) error {
	fd, err := unix.Open(part, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err == unix.ENOENT {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := lockPart(part, fd); err != nil {
		return err
	}
	return unix.Unlink(part)
}

func descriptorPath(fd int) string { return "/proc/self/fd/" + strconv.Itoa(fd) }

// Publish gives the file its name. fs.ErrExist: somebody else has taken that meanwhile.
// On success name and content are on stable storage, and the file is closed.
func (m *Making) Publish() error {
	err := m.link()
	if err != nil {
		return &fs.PathError{Op: "name the new file", Path: m.c.Path, Err: err}
	}
	m.part = ""
	if m.itself, err = os.Lstat(m.c.Path); err == nil {
		err = syncDir(m.c.Path)
	}
	m.close()
	return err
}

func (m *Making) link() error {
	if m.part == "" {
		return unix.Linkat(unix.AT_FDCWD, descriptorPath(m.fd), unix.AT_FDCWD, m.c.Path, unix.AT_SYMLINK_FOLLOW)
	}
	err := unix.Renameat2(unix.AT_FDCWD, m.part, unix.AT_FDCWD, m.c.Path, unix.RENAME_NOREPLACE)
	if err != unix.EINVAL && err != unix.ENOSYS {
		return err
	}
	if err := unix.Link(m.part, m.c.Path); err != nil { // NFS
		return err
	}
	return unix.Unlink(m.part)
}

// Discard removes the file, published or not, unless Keep was called, and closes all.
func (m *Making) Discard() error {
	var err error
	if m.part != "" {
		err = os.Remove(m.part)
		m.part = ""
	}
	if m.itself != nil {
		if fi, err2 := os.Lstat(m.c.Path); err2 == nil && os.SameFile(fi, m.itself) {
			err = os.Remove(m.c.Path)
		}
		m.itself = nil
	}
	m.close()
	return err
}

// Keep has Discard leave a file that is published.
func (m *Making) Keep() { m.itself = nil }

func (m *Making) close() {
	if m.fd >= 0 {
		unix.Close(m.fd)
		m.fd = -1
	}
	if m.source != nil {
		unix.Close(m.source.fd)
		m.source = nil
	}
}

// makeWork is what Run does with the file.
type makeWork struct {
	Progress
	ctx     context.Context
	f       osFile
	report  func(Progress)
	unsaved int64  // octets written since the last sync
	buf     []byte // of what the kernel does not copy
}

// done counts n more octets, of which written are new on the file.
func (w *makeWork) done(n, written int64) error {
	w.Done += n
	if w.unsaved += written; w.unsaved >= flushEvery {
		w.unsaved = 0
		if err := w.f.fdatasync(); err != nil {
			return err
		}
	}
	w.report(w.Progress)
	if w.ctx.Err() != nil {
		return context.Cause(w.ctx)
	}
	return nil
}

// allocate allocates all blocks of a file; false: the file system cannot do that.
func (w *makeWork) allocate(size int64) (bool, error) {
	w.Progress = Progress{Phase: Preallocating, Total: size}
	for w.Done < size {
		n := min(size-w.Done, allocateStep)
		switch err := w.f.fallocate(0, w.Done, n); err {
		case nil:
		case unix.EOPNOTSUPP, unix.ENOSYS:
			return false, nil
		default:
			return false, err
		}
		if err := w.done(n, 0); err != nil {
			return false, err
		}
	}
	return true, nil
}

// zero writes zeros to [off, end).
func (w *makeWork) zero(off, end int64) error {
	for off < end {
		n := min(end-off, int64(len(zeros)))
		if err := writeAll(w.f, zeros[:n], off, 0); err != nil {
			return err
		}
		off += n
		if err := w.done(n, n); err != nil {
			return err
		}
	}
	return nil
}

// copy copies all of s to the begin of the file, which has size octets and reads as
// zeros. own: it is to share no blocks with s. full: zeros are written where s has
// holes, and behind it.
func (w *makeWork) copy(s *makeSource, size int64, own, full bool) error {
	w.Progress = Progress{Phase: Copying, Total: s.size}
	if full {
		w.Total = size
	}
	if file, ok := w.f.(sysFile); ok && s.regular && !own && unix.IoctlFileClone(int(file), s.fd) == nil {
		return w.done(s.size, 0)
	}
	src := sysFile(s.fd)
	for off := int64(0); off < s.size; {
		data, end := dataOf(src, off, s.size)
		var err error
		if full {
			err = w.zero(off, data)
		} else {
			err = w.done(data-off, 0)
		}
		if err == nil {
			err = w.copyData(src, data, end, own, full)
		}
		if err != nil {
			return err
		}
		off = end
	}
	if full {
		return w.zero(s.size, size)
	}
	return nil
}

// dataOf is the first range in [off, size) that may have other data than zeros; where
// there is none it is empty, at the end.
func dataOf(f osFile, off, size int64) (data, end int64) {
	data, err := f.seek(off, unix.SEEK_DATA)
	switch {
	case err == unix.ENXIO:
		return size, size
	case err != nil: // the medium does not tell
		return off, size
	}
	if end, err = f.seek(data, unix.SEEK_HOLE); err != nil {
		end = size
	}
	return min(data, size), min(end, size)
}

// copyData copies [off, end) of src to the same place.
func (w *makeWork) copyData(src sysFile, off, end int64, own, full bool) error {
	for !own && off < end {
		n, err := w.f.copyFrom(off, src, off, min(end-off, copyStep))
		switch err {
		case nil:
		case unix.EINVAL, unix.EXDEV, unix.EOPNOTSUPP, unix.ENOSYS, unix.EPERM: // as in CopyFrom
			n = 0
		default:
			return err
		}
		if n == 0 {
			break
		}
		off += n
		if err := w.done(n, n); err != nil {
			return err
		}
	}
	if w.buf == nil && off < end {
		w.buf = make([]byte, len(zeros))
	}
	for off < end {
		p := w.buf[:min(end-off, int64(len(w.buf)))]
		n, err := src.pread(p, off)
		if err == nil && n == 0 {
			err = errors.New("what is copied has become shorter")
		}
		if err != nil {
			return fmt.Errorf("read at %d: %w", off, err)
		}
		p = p[:n]
		written := int64(0)
		if full || !bytes.Equal(p, zeros[:n]) {
			if err := writeAll(w.f, p, off, 0); err != nil {
				return err
			}
			written = int64(n)
		}
		off += int64(n)
		if err := w.done(int64(n), written); err != nil {
			return err
		}
	}
	return nil
}
