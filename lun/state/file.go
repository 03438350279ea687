package state

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/iser-target/iser-target/backend/handed"
)

// maxFile is the longest file, in bytes: it has room for some hundred thousand entries.
const maxFile = 16 << 20

// A file is a small file that is only replaced as a whole: new content goes to
// path.tmp, which is synced and renamed, and then the directory is synced. After
// a crash the file has the old content or the new one. path.spare has the same content, for
// the case that something else damages the file.
type file struct {
	path  string
	lock  *os.File
	fsync func(*os.File) error // tests let it fail
	// unsure: a replacement failed in or after its rename. The file has the old
	// content or the new one, and a power failure may decide which.
	unsure   bool
	revision Revision // see Directory
	// restored says why load had to take the spare copy when the file was opened, or is nil.
	restored error
}

// open creates the missing directories of path, with mode 0700, and locks
// path.lock (flock(2)) until unlock. It refuses a path that is locked already.
func (f *file) open(path string) (err error) {
	f.path = path
	if err := makeDirectory(filepath.Dir(path), f.fsync); err != nil {
		return err
	}
	f.lock, err = lockFile(path + ".lock")
	return err
}

// unlock releases the lock. The lock file stays: if it were removed, one process
// could lock it while another creates and locks its successor.
func (f *file) unlock() error {
	if f.lock == nil {
		return nil
	}
	return f.lock.Close()
}

// read returns the content of the file, or of its spare copy. It is nil if that does not exist.
func (f *file) read(path string) ([]byte, error) {
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		// A link too: the rename would replace it, not the file it points to.
		return nil, fmt.Errorf("is not a regular file (%s)", st.Mode().Type())
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	b, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	if err != nil {
		return nil, err
	}
	// The process that wrote this may have been killed before its last sync.
	if err := f.fsync(file); err != nil {
		return nil, err
	}
	return b, syncDir(filepath.Dir(path), f.fsync)
}

// load returns the content that counts, or nil if the file does not exist. If the file is damaged or gone and its
// spare copy is not, load restores it. check finds damage.
func (f *file) load(check func([]byte) error) ([]byte, error) {
	from, reason := f.find(check)
	switch {
	case from == nil:
		return nil, reason
	case reason != nil:
		return from, f.restore(from, reason)
	}
	if copied, err := f.read(f.spare()); err != nil || !bytes.Equal(copied, from) {
		// The last change was cut short, or an earlier version made it. If this fails, the next change helps.
		f.replace(from)
	}
	return from, nil
}

// errGone is the reason to restore a file that does not exist.
var errGone = errors.New("was missing")

// find returns the content that counts: of the file, or with a reason of its spare copy. Without content the reason
// is nil if neither exists. check succeeds last with the content that find returns.
func (f *file) find(check func([]byte) error) (from []byte, reason error) {
	b, err := f.read(f.path)
	if b != nil && err == nil {
		err = check(b)
	}
	if err == nil && b != nil {
		return b, nil
	}
	if errors.Is(err, errVersion) {
		return nil, err
	}
	copied, spareErr := f.read(f.spare())
	if copied == nil && spareErr == nil {
		return nil, err // of the file alone, or neither exists
	}
	if spareErr == nil {
		spareErr = check(copied)
	}
	switch {
	case spareErr == nil && err == nil:
		return copied, errGone
	case spareErr == nil:
		return copied, err
	case err == nil:
		return nil, fmt.Errorf("is missing, and its spare copy %s %w", f.spare(), spareErr)
	}
	return nil, fmt.Errorf("%w; its spare copy %s %v", err, f.spare(), spareErr)
}

// restore puts the spare copy in the place of a file that is gone or damaged, for that reason. It keeps the
// damaged file as path.damaged.
func (f *file) restore(copied []byte, reason error) error {
	if reason != errGone {
		if err := os.Rename(f.path, f.path+".damaged"); err != nil {
			return errors.Join(reason, err)
		}
	}
	if err := f.replace(copied); err != nil {
		return errors.Join(reason, err)
	}
	f.restored = reason
	return nil
}

// spare returns the path of the spare copy.
func (f *file) spare() string { return f.path + ".spare" }

// replace writes b as the new content of the file and its spare copy, with mode 0600. b is on stable storage
// in both when replace returns nil.
func (f *file) replace(b []byte) error {
	paths := []string{f.path, f.spare()}
	for _, path := range paths {
		tmp := path + ".tmp"
		// A process that was killed may have left one, with any owner and mode.
		if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		defer os.Remove(tmp)
		if err := f.write(tmp, b); err != nil {
			return err
		}
	}
	f.unsure = true
	for _, path := range paths {
		if err := os.Rename(path+".tmp", path); err != nil {
			return err
		}
	}
	return f.settle()
}

// settle makes what was done to the name of the file durable.
func (f *file) settle() error {
	f.unsure = true
	err := syncDir(filepath.Dir(f.path), f.fsync)
	f.unsure = err != nil
	return err
}

// remove removes the file and its spare copy, if they exist, so that a power failure does not bring them back.
func (f *file) remove() error {
	removed := f.unsure
	for _, path := range []string{f.spare(), f.path} { // the spare copy alone would come back
		switch err := os.Remove(path); {
		case err == nil:
			removed, f.unsure = true, true
		case !errors.Is(err, fs.ErrNotExist):
			return err
		}
	}
	if !removed {
		return nil
	}
	return f.settle()
}

// write creates a file with mode 0600 and content b, and syncs it.
func (f *file) write(path string, b []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if _, err = file.Write(b); err == nil {
		err = f.fsync(file)
	}
	return errors.Join(err, file.Close())
}

// lockFile creates the file if it is missing and locks it until it is closed.
func lockFile(path string) (*os.File, error) {
	if f, ok := handed.Take(path); ok {
		return f, nil
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.EINTR
	for err == syscall.EINTR {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	}
	switch err {
	case nil:
		return f, nil
	case syscall.EWOULDBLOCK:
		err = fmt.Errorf("in use: %s is locked by another target; "+
			"stop that target, or give this one another directory", path)
	default:
		err = fmt.Errorf("lock %s: %w", path, err)
	}
	f.Close()
	return nil, err
}

// makeDirectory creates dir and the missing directories above it, with mode 0700, so that they
// survive a power failure. It does not notice that dir is something else than a directory.
func makeDirectory(dir string, fsync func(*os.File) error) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrNotExist) && filepath.Dir(dir) != dir {
		if err := makeDirectory(filepath.Dir(dir), fsync); err != nil {
			return err
		}
		err = os.Mkdir(dir, 0o700)
	}
	switch {
	case err == nil:
		return syncDir(filepath.Dir(dir), fsync)
	case errors.Is(err, fs.ErrExist):
		return nil
	}
	return err
}

// syncDir makes the names in a directory durable. Packages backend and config have
// such a function of their own: they may not import this one.
func syncDir(dir string, fsync func(*os.File) error) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(fsync(f), f.Close())
}
