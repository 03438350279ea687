package backend

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Reasons why the file of a store is not any longer what was opened.
var (
	ErrDeleted  = errors.New("the file was deleted or renamed")
	ErrReplaced = errors.New("another file has taken the place of the file")
	ErrCut      = errors.New("the file was cut short")
)

// An Inspector is a Store that can look whether its file is still there.
type Inspector interface {
	// Inspect returns nil, or an error that says what somebody else did to the file: ErrDeleted,
	// ErrReplaced or ErrCut; or ErrUnsynced if a sync has failed. It waits for the file system, but
	// for no other call.
	Inspect() error
}

// Inspect implements Inspector, for regular files.
func (d *disk) Inspect() error {
	if !d.regular {
		if d.failed.Load() {
			return ErrUnsynced
		}
		return nil
	}
	v, err := d.enter(0, 0, false)
	if err != nil {
		return err
	}
	defer v.leave()
	size := d.size.Load() // before the look: a Resize that makes it smaller cuts the file afterwards
	mine, err := d.fd.stat()
	if err != nil {
		return fmt.Errorf("look at %s: %w", d.path, err)
	}
	var named unix.Stat_t
	err = retry(func() error { return unix.Stat(d.path, &named) })
	switch {
	case err == unix.ENOENT:
		return ErrDeleted
	case err != nil:
		return fmt.Errorf("look at %s: %w", d.path, err)
	case named.Dev != mine.Dev || named.Ino != mine.Ino:
		return ErrReplaced
	case d.failed.Load():
		return ErrUnsynced
	case mine.Size < min(size, d.size.Load()):
		return fmt.Errorf("%w: it has %d bytes, and the LUN %d", ErrCut, mine.Size, size)
	}
	return nil
}
