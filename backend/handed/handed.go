// Package handed has the open files that another process of the target has handed to this one. A file that
// is locked, or a device that is in use, can be opened by nobody else: who opens it takes the description that
// has the lock from here instead.
package handed

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// A key identifies a file, or a device.
type key struct {
	device bool
	dev    uint64
	ino    uint64 // of a file
}

var files struct {
	sync.Mutex
	of map[key]*os.File
}

func keyOf(st *unix.Stat_t) (key, error) {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return key{dev: st.Dev, ino: st.Ino}, nil
	case unix.S_IFBLK:
		return key{device: true, dev: st.Rdev}, nil
	}
	return key{}, fmt.Errorf("neither a file nor a block device: mode %#o", st.Mode)
}

// Give adds a file, which belongs to the package from then on.
func Give(f *os.File) error {
	var st unix.Stat_t
	err := unix.Fstat(int(f.Fd()), &st)
	var k key
	if err == nil {
		k, err = keyOf(&st)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", f.Name(), err)
	}
	files.Lock()
	defer files.Unlock()
	if files.of == nil {
		files.of = map[key]*os.File{}
	}
	if files.of[k] != nil {
		return fmt.Errorf("%s was given twice", f.Name())
	}
	files.of[k] = f
	return nil
}

// Take returns the file or device at path, and removes it from the package; ok is false if the package does not
// have it. Links are followed.
func Take(path string) (f *os.File, ok bool) {
	files.Lock()
	defer files.Unlock()
	if len(files.of) == 0 {
		return nil, false
	}
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil {
		return nil, false
	}
	k, err := keyOf(&st)
	if err != nil {
		return nil, false
	}
	f = files.of[k]
	delete(files.of, k)
	return f, f != nil
}

// TakeDescriptor does what Take does, for a caller that uses descriptors. The descriptor belongs to the caller.
func TakeDescriptor(path string) (fd int, ok bool) {
	f, ok := Take(path)
	if !ok {
		return 0, false
	}
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	return fd, err == nil
}

// Close closes the files that nobody has taken.
func Close() error {
	files.Lock()
	defer files.Unlock()
	var errs []error
	for _, f := range files.of {
		errs = append(errs, f.Close())
	}
	files.of = nil
	return errors.Join(errs...)
}
