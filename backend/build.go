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

// BuildConfig describes a file that takes time to build. The zero value of a field other than
// Path means its default.
type BuildConfig struct {
	Path string // of the file, which must not exist
	// Size in bytes, a multiple of BlockSize. Default: the size of From, rounded up.
	Size      int64
	BlockSize uint32 // default 512
	// Preallocate allocates all blocks of the file, so that no write to it fails because the
	// file system is full.
	Preallocate bool
	// From is a file or block device whose content the file begins with; zeros follow.
	From string
	// Share makes Build fail with an ErrNoReflink, instead of copying, if the file cannot share the blocks of From.
	Share bool
	// Fill fills the empty file fd, instead of From, and gives it its size; nil: From, or zeros.
	Fill func(fd int) error
	Mode uint32 // of the complete file; default 0600
}

// A Progress reports the progress of the current phase of a FileBuilder, in bytes.
type Progress struct {
	Phase       string // Preallocating, Zeroing or Copying
	Done, Total int64
}

// The phases of a FileBuilder.
const (
	Preallocating = "preallocating"
	Zeroing       = "zeroing" // if the file system cannot preallocate
	Copying       = "copying"
)

// A FileBuilder builds a file that appears when it is complete. The file has no name until Publish,
// so nothing of it remains if the process ends. On a file system without unnamed files (O_TMPFILE)
// its name is .NAME.part until then, and the next FileBuilder with the same Path removes the rest.
type FileBuilder struct {
	c      BuildConfig
	source *buildSource // nil: nothing to copy
	fd     int          // -1: not open
	part   string       // name before Publish; empty: unnamed
	itself os.FileInfo  // of the published file; nil: Abort does not remove it
	hooks  buildHooks
}

// buildHooks replace system calls in tests.
type buildHooks struct {
	wrap  func(osFile) osFile
	named bool // the file system has no unnamed files
}

// A buildSource is an open file or device to copy from.
type buildSource struct {
	path    string
	fd      int
	regular bool
	size    int64 // bytes
}

const (
	// allocateStep is the number of bytes to allocate with one call, so that there are few
	// calls and Build still ends soon after its context.
	allocateStep = 128 << 20
	// copyStep is the number of bytes to copy with one copy_file_range(2).
	copyStep = 16 << 20
	// flushEvery is the number of written bytes after which Build syncs, so that Progress
	// counts bytes on the medium, not in memory.
	flushEvery = 256 << 20
)

// NewFileBuilder checks c, and opens and locks c.From. It creates no file: Build does. The
// caller must call Abort in any case.
func NewFileBuilder(c BuildConfig) (*FileBuilder, error) { return newFileBuilder(c, buildHooks{}) }

func newFileBuilder(c BuildConfig, hooks buildHooks) (*FileBuilder, error) {
	if c.BlockSize == 0 {
		c.BlockSize = defaultBlockSize
	}
	b := &FileBuilder{c: c, fd: -1, hooks: hooks}
	if _, err := os.Lstat(c.Path); err == nil {
		return nil, fmt.Errorf("%s: %w. It was not overwritten", c.Path, fs.ErrExist)
	}
	if c.From != "" {
		source, err := openSource(c.From)
		if err != nil {
			return nil, fmt.Errorf("copy from %s: %w", c.From, err)
		}
		b.source = source
		switch {
		case c.Size == 0:
			mask := int64(c.BlockSize) - 1
			b.c.Size = (source.size + mask) &^ mask
		case c.Size < source.size:
			b.Abort()
			return nil, fmt.Errorf("copy from %s: it has %d bytes, more than the size %d of the new file", c.From, source.size, c.Size)
		}
	}
	if err := (Info{Size: b.c.Size, BlockSize: c.BlockSize, PhysicalBlockSize: c.BlockSize}).Validate(); err != nil {
		b.Abort()
		return nil, fmt.Errorf("%s: %w", c.Path, err)
	}
	return b, nil
}

// openSource opens a file or device to copy from. It keeps others from writing to it: with
// flock(2), which file stores respect, or O_EXCL, which block stores and mounts respect.
func openSource(path string) (*buildSource, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, errors.Unwrap(err) // the caller adds the path
	}
	flags, regular := unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, st.Mode().IsRegular()
	switch {
	case regular:
	case st.Mode()&fs.ModeDevice != 0 && st.Mode()&fs.ModeCharDevice == 0:
		flags |= unix.O_EXCL
	default:
		return nil, errors.New("neither a regular file nor a block device")
	}
	s := &buildSource{path: path, regular: regular}
	s.fd, err = retryValue(func() (int, error) { return unix.Open(path, flags, 0) })
	if err == unix.EBUSY {
		return nil, errors.New("in use. Unmount it, or copy a snapshot of it")
	}
	if err != nil {
		return nil, err
	}
	if regular {
		err = retry(func() error { return unix.Flock(s.fd, unix.LOCK_SH|unix.LOCK_NB) })
		if err == unix.EWOULDBLOCK {
			err = errors.New("locked by a target that serves it. Delete that LUN or make it read-only first")
		}
	}
	if err == nil {
		s.size, err = sysFile(s.fd).seek(0, unix.SEEK_END)
	}
	if err == nil && s.size == 0 {
		err = errors.New("the file is empty")
	}
	if err != nil {
		unix.Close(s.fd)
		return nil, err
	}
	return s, nil
}

// Size returns the size of the complete file, in bytes. Fill may change it.
func (b *FileBuilder) Size() int64 { return b.c.Size }

// Path returns the path of the published file.
func (b *FileBuilder) Path() string { return b.c.Path }

// Build builds the file, and calls report often from the same goroutine. When ctx ends, Build
// soon returns the cause. It returns ErrNoSpace if the file system has no space for the file.
func (b *FileBuilder) Build(ctx context.Context, report func(Progress)) error {
	err := b.build(ctx, report)
	switch {
	case err == nil:
		return nil
	case isNoSpace(err):
		err = fmt.Errorf("%w: %w", ErrNoSpace, err)
	}
	return fmt.Errorf("create %s: %w", b.c.Path, err)
}

func (b *FileBuilder) build(ctx context.Context, report func(Progress)) error {
	if b.c.Preallocate {
		if err := CheckRoom(filepath.Dir(b.c.Path), b.c.Size); err != nil {
			return err
		}
	}
	if err := b.open(); err != nil {
		return err
	}
	if b.c.Fill != nil {
		return b.fill()
	}
	var f osFile = sysFile(b.fd)
	if b.hooks.wrap != nil {
		f = b.hooks.wrap(f)
	}
	if err := f.truncate(b.c.Size); err != nil {
		return err
	}
	w := &buildWork{ctx: ctx, f: f, report: report}
	allocated, err := false, error(nil)
	if b.c.Preallocate {
		allocated, err = w.allocate(b.c.Size)
	}
	switch full := b.c.Preallocate && !allocated; {
	case err != nil:
	case b.source != nil && b.c.Share:
		err = cloneError(b.source.path, sysFile(b.source.fd).cloneTo(b.fd, 0))
	case b.source != nil:
		err = w.copy(b.source, b.c.Size, b.c.Preallocate, full)
	case full:
		w.Progress = Progress{Phase: Zeroing, Total: b.c.Size}
		err = w.zero(0, b.c.Size)
	}
	if err != nil {
		return err
	}
	return b.finish()
}

// fill lets Fill fill the file.
func (b *FileBuilder) fill() error {
	if err := b.c.Fill(b.fd); err != nil {
		return err
	}
	st, err := sysFile(b.fd).stat()
	if err != nil {
		return err
	}
	b.c.Size = st.Size
	if err := (Info{Size: st.Size, BlockSize: b.c.BlockSize, PhysicalBlockSize: b.c.BlockSize}).Validate(); err != nil {
		return err
	}
	return b.finish()
}

// finish gives the file its mode, and puts its content on stable storage.
func (b *FileBuilder) finish() error {
	if b.c.Mode != 0 {
		if err := retry(func() error { return unix.Fchmod(b.fd, b.c.Mode) }); err != nil {
			return err
		}
	}
	return retry(func() error { return unix.Fsync(b.fd) })
}

// CheckRoom returns ErrNoSpace if the file system of path has less than size free bytes. To
// find out by allocating them would take the space of others. CheckRoom returns nil if the
// file system does not report its free space.
func CheckRoom(path string, size int64) error {
	var fs unix.Statfs_t
	if err := retry(func() error { return unix.Statfs(path, &fs) }); err != nil || fs.Blocks == 0 || fs.Frsize <= 0 {
		return nil
	}
	if uint64(size)/uint64(fs.Frsize) > fs.Bavail {
		return fmt.Errorf("%w: %d more bytes are required, and %d are free", ErrNoSpace, size, int64(fs.Bavail)*fs.Frsize)
	}
	return nil
}

// open creates the file, without a name if the file system can.
func (b *FileBuilder) open() error {
	dir, name := filepath.Split(b.c.Path)
	if dir == "" {
		dir = "."
	}
	const flags = unix.O_RDWR | unix.O_CLOEXEC
	if !b.hooks.named {
		fd, err := unix.Open(dir, flags|unix.O_TMPFILE, 0o600)
		switch err {
		case nil:
			if _, err := os.Stat(descriptorPath(fd)); err == nil { // Publish needs that
				b.fd = fd
				return nil
			}
			unix.Close(fd)
		case unix.EOPNOTSUPP, unix.EISDIR, unix.EINVAL: // open(2)
		default:
			return &fs.PathError{Op: "create a file in", Path: dir, Err: err}
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
			return &fs.PathError{Op: "create", Path: part, Err: err}
		}
		if err := lockPart(part, fd); err == nil {
			b.fd, b.part = fd, part
			return nil
		}
		unix.Close(fd)
	}
	return fmt.Errorf("%s: %w", part, errBuilding)
}

var errBuilding = errors.New("another process is creating this file")

// lockPart locks the open file fd, which another FileBuilder may not have removed before.
func lockPart(part string, fd int) error {
	var open, there unix.Stat_t
	if unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil || unix.Fstat(fd, &open) != nil || unix.Lstat(part, &there) != nil ||
		open.Ino != there.Ino || open.Dev != there.Dev {
		return errBuilding
	}
	return nil
}

// removePart removes the file of a process that has ended. It does not reuse the file, which
// may have other names by now.
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

// Publish gives the file its name, puts name and content on stable storage, and closes the
// file. It returns fs.ErrExist if another file has the name.
func (b *FileBuilder) Publish() error {
	err := b.link()
	if err != nil {
		return &fs.PathError{Op: "name the new file", Path: b.c.Path, Err: err}
	}
	b.part = ""
	if b.itself, err = os.Lstat(b.c.Path); err == nil {
		err = syncDir(b.c.Path)
	}
	b.close()
	return err
}

func (b *FileBuilder) link() error {
	if b.part == "" {
		return unix.Linkat(unix.AT_FDCWD, descriptorPath(b.fd), unix.AT_FDCWD, b.c.Path, unix.AT_SYMLINK_FOLLOW)
	}
	err := unix.Renameat2(unix.AT_FDCWD, b.part, unix.AT_FDCWD, b.c.Path, unix.RENAME_NOREPLACE)
	if err != unix.EINVAL && err != unix.ENOSYS {
		return err
	}
	if err := unix.Link(b.part, b.c.Path); err != nil { // NFS
		return err
	}
	return unix.Unlink(b.part)
}

// Abort removes the file, even if it is published, unless Keep was called. It closes all files.
func (b *FileBuilder) Abort() error {
	var err error
	if b.part != "" {
		err = os.Remove(b.part)
		b.part = ""
	}
	if b.itself != nil {
		if fi, err2 := os.Lstat(b.c.Path); err2 == nil && os.SameFile(fi, b.itself) {
			err = os.Remove(b.c.Path)
		}
		b.itself = nil
	}
	b.close()
	return err
}

// Keep makes Abort keep a published file.
func (b *FileBuilder) Keep() { b.itself = nil }

func (b *FileBuilder) close() {
	if b.fd >= 0 {
		unix.Close(b.fd)
		b.fd = -1
	}
	if b.source != nil {
		unix.Close(b.source.fd)
		b.source = nil
	}
}

// buildWork is the state of one Build.
type buildWork struct {
	Progress
	ctx     context.Context
	f       osFile
	report  func(Progress)
	unsaved int64  // bytes written since the last sync
	buf     []byte // for data that the kernel does not copy
}

// done counts n more bytes, of which written were written to the file.
func (w *buildWork) done(n, written int64) error {
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

// allocate allocates all blocks of a file; false: the file system cannot allocate.
func (w *buildWork) allocate(size int64) (bool, error) {
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
func (w *buildWork) zero(off, end int64) error {
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

// copy copies all of s to the beginning of the file, which has size bytes and reads as zeros. own:
// the file shares no blocks with s. full: copy writes zeros where s has holes, and after s.
func (w *buildWork) copy(s *buildSource, size int64, own, full bool) error {
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

// dataOf returns the first range in [off, size) that may have other data than zeros, or an
// empty range at size.
func dataOf(f osFile, off, size int64) (data, end int64) {
	data, err := f.seek(off, unix.SEEK_DATA)
	switch {
	case err == unix.ENXIO:
		return size, size
	case err != nil: // the medium does not report holes
		return off, size
	}
	if end, err = f.seek(data, unix.SEEK_HOLE); err != nil {
		end = size
	}
	return min(data, size), min(end, size)
}

// copyData copies [off, end) of src to the same place.
func (w *buildWork) copyData(src sysFile, off, end int64, own, full bool) error {
	for !own && off < end {
		n, err := copyRange(w.f, off, src, off, min(end-off, copyStep))
		if err != nil {
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
			err = errors.New("the source has become shorter")
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
