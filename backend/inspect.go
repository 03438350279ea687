package backend

import (
	"errors"
	"fmt"
	"io"

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

// A Recoverer is an Inspector that can use its file again, in place, after a failure.
type Recoverer interface {
	Inspector
	// Device returns a number that only Stores of one device share, which hang together.
	Device() uint64
	// Recover makes syncs possible again after one has failed, and opens the file that has the path if
	// that is another one; the size must be that of the Store. First it proves that the medium works: it
	// reads the first block, writes it back, and syncs. It waits for the calls in progress, and others
	// wait for it. If the cause is still there, it fails and changes nothing: the Store keeps its file.
	Recover() error
}

// A SyncFailer is a Store that knows whether its syncs fail because one has failed.
type SyncFailer interface {
	SyncFailed() bool // waits for nothing
}

// SyncFailed implements SyncFailer.
func (d *disk) SyncFailed() bool { return d.failed.Load() }

// Inspect implements Inspector. Of a device it only says whether a sync has failed.
func (d *disk) Inspect() error {
	v, err := d.enter(0, 0, false)
	if err != nil {
		return err
	}
	defer v.leave()
	return d.inspect()
}

// inspect implements Inspect.
//
// Preconditions: d.mu is held, at least for reading.
func (d *disk) inspect() error {
	held(&d.mu)
	if !d.regular {
		if d.failed.Load() {
			return ErrUnsynced
		}
		return nil
	}
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

// Device implements Recoverer.
func (d *disk) Device() uint64 { return d.device.Load() }

// Recover implements Recoverer.
func (d *disk) Recover() error {
	d.resizing.Lock()
	defer d.resizing.Unlock()
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return ErrClosed
	}
	switch err := d.inspect(); {
	case errors.Is(err, ErrReplaced):
		return d.changeFile()
	case err != nil && !errors.Is(err, ErrUnsynced):
		return err
	}
	if err := d.prove(d.fd); err != nil {
		return err
	}
	d.forgetFailure()
	return nil
}

// changeFile makes d use the file that has its path now. Until that file has proved to work, the old one
// stays open: it may have no name any longer, and its data would be gone.
//
// Preconditions: d.mu is held for writing.
func (d *disk) changeFile() error {
	held(&d.mu)
	s, _, err := OpenFile(FileConfig{Path: d.path, BlockSize: d.info.BlockSize, ReadOnly: d.info.ReadOnly, WriteThrough: d.through})
	if err != nil {
		return err
	}
	next := s.(*disk)
	if size := next.size.Load(); size != d.size.Load() {
		err = fmt.Errorf("%s has %d bytes, and the LUN %d. Put a file of that size there", d.path, size, d.size.Load())
	} else {
		err = d.prove(next.fd)
	}
	if err != nil {
		return errors.Join(err, next.fd.close())
	}
	d.spares.close() // no call is left to use one
	d.fd.close()     // its errors are those of a file that nobody uses any longer
	d.fd, d.spares.reopen = next.fd, next.spares.reopen
	d.device.Store(next.device.Load())
	for mode := range d.refused {
		d.refused[mode].Store(false)
	}
	d.noDsync.Store(false)
	d.noMap.Store(false)
	d.forgetFailure()
	return nil
}

// forgetFailure makes syncs possible again.
//
// Preconditions: d.mu is held for writing.
func (d *disk) forgetFailure() {
	held(&d.mu)
	d.spares.close()
	d.syncs.mu.Lock()
	d.syncs.failed, d.syncs.err = 0, nil
	d.syncs.mu.Unlock()
	d.failed.Store(false)
}

// prove returns nil if f can be read, written and synced. Its first block keeps its content.
//
// Preconditions: d.mu is held for writing, so nobody else writes to the block.
func (d *disk) prove(f osFile) error {
	held(&d.mu)
	p := make([]byte, d.info.BlockSize)
	n, err := f.pread(p, 0)
	if err == nil && n < len(p) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return fmt.Errorf("read the first block of %s: %w", d.path, err)
	}
	if d.info.ReadOnly {
		return nil
	}
	_ = f.fdatasync() // reports a failure of before, once
	if err := writeAll(f, p, 0, 0); err != nil {
		return fmt.Errorf("write the first block of %s: %w", d.path, err)
	}
	if err := f.fdatasync(); err != nil {
		return fmt.Errorf("sync %s: %w", d.path, err)
	}
	return nil
}
