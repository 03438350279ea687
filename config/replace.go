package config

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// A replacement is a file that gets another text.
//
// There is no way to replace a file only if it has a certain text. But two files can
// exchange their names (renameat2(2), RENAME_EXCHANGE), and what was displaced is there
// to be looked at, whoever wrote it and however late. If it is not what was read
// before, somebody has written the file in between: it gets its name back, or, if it
// may be overwritten whatever it says, a place in the history. If it is, it takes the
// place of its copy in the history, so that what an editor writes that still has it open is
// found there.
//
// Where a file system cannot exchange names (NFS, FAT), a second name is made for the file
// (link(2)) before it is replaced, so that what is written into it is not lost either.
// Another file that takes its name between a last look and the rename is.
type replacement struct {
	path    string
	text    []byte
	old     []byte      // what the file had
	fi      fs.FileInfo // and what it was; nil: there was none
	history string      // where old is kept
}

// beforeReplace is what tests do to a file at the last moment.
var beforeReplace = func(path string) {}

// exchange is renameat2; tests let it fail.
var exchange = func(a, b string, flags uint) error {
	err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, flags)
	if err != nil {
		return &os.LinkError{Op: "rename", Old: a, New: b, Err: err}
	}
	return nil
}

// syncData is fdatasync(2), which costs little where the data is on stable storage already;
// tests watch it.
var syncData = func(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(unix.Fdatasync(int(f.Fd())), f.Close())
}

// cannot tells that a file system does not know what it was asked for.
func cannot(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPERM)
}

// beside is a name beside path for what it is about to have, or has had.
func beside(path, suffix string) string {
	dir, name := filepath.Split(path)
	return dir + "." + name + suffix
}

// keepDisplaced keeps what a process has left that was killed: what it has displaced, or was
// about to put in its place.
func keepDisplaced(path string) error {
	displaced := beside(path, ".old")
	b, _, err := readFile(displaced)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	}
	now, _, err := readFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if !bytes.Equal(b, now) {
		if _, err := keep(path+".history", b); err != nil {
			return err
		}
	}
	return os.Remove(displaced)
}

// replace has the file have the text. expected tells whether what somebody else has
// written in between may be overwritten; if not the error is ErrChanged. written tells that
// the file has the text, though that may not last. With errRaced it is another file than
// it was, and nothing has happened.
func (r *replacement) replace(expected func(now []byte) bool) (written bool, err error) {
	next, displaced := beside(r.path, ".new"), beside(r.path, ".old")
	// What a process has left there that was killed is of no use.
	if err := removeIfThere(next); err != nil {
		return false, err
	}
	if err := writeSynced(next, r.text, r.fi); err != nil {
		return false, errors.Join(err, removeIfThere(next))
	}
	beforeReplace(r.path)
	if r.fi == nil {
		return r.create(next)
	}
	if err := os.Rename(next, displaced); err != nil {
		return false, errors.Join(err, removeIfThere(next))
	}
	err = exchange(displaced, r.path, unix.RENAME_EXCHANGE)
	switch {
	case errors.Is(err, fs.ErrNotExist): // it was removed: what it had is kept
		r.fi = nil
		return r.create(displaced)
	case err != nil && cannot(err):
		return r.replaceLinked(displaced)
	case err != nil:
		return false, errors.Join(err, removeIfThere(displaced))
	}
	now, _, err := readFile(displaced)
	switch {
	case err == nil && bytes.Equal(now, r.old):
		err = r.keepInode(displaced)
	case err == nil && expected(now):
		err = r.keepText(displaced, now)
	case err == nil, errors.Is(err, errTooLarge):
		return false, r.giveBack(displaced)
	}
	return true, errors.Join(err, syncDirectory(filepath.Dir(r.path)))
}

// create gives next the name that no file has.
func (r *replacement) create(next string) (written bool, err error) {
	err = exchange(next, r.path, unix.RENAME_NOREPLACE)
	if err != nil && cannot(err) {
		if err = os.Link(next, r.path); err == nil {
			err = os.Remove(next)
		} else if cannot(err) {
			err = os.Rename(next, r.path)
		}
	}
	if err != nil {
		err = errors.Join(err, removeIfThere(next))
		if errors.Is(err, fs.ErrExist) {
			return false, errRaced
		}
		return false, err
	}
	return true, syncDirectory(filepath.Dir(r.path))
}

// giveBack gives a file its name again that must not be replaced.
func (r *replacement) giveBack(displaced string) error {
	if err := exchange(displaced, r.path, unix.RENAME_EXCHANGE); err != nil {
		return err // it stays for keepDisplaced
	}
	now, _, err := readFile(displaced)
	if err == nil && !bytes.Equal(now, r.text) { // somebody was as fast again
		err = r.keepText(displaced, now)
	} else {
		err = errors.Join(err, os.Remove(displaced))
	}
	return errors.Join(ErrChanged, err)
}

// keepText keeps what was displaced as a version of its own.
func (r *replacement) keepText(displaced string, text []byte) error {
	if _, err := keep(r.path+".history", text); err != nil {
		return err
	}
	return os.Remove(displaced)
}

// keepInode has what was displaced take the place of its copy, which is on stable storage,
// and so has to be what replaces it: an editor may not have seen to that. What cannot, for
// it has other names or belongs to somebody else, goes.
func (r *replacement) keepInode(displaced string) error {
	fi, err := os.Lstat(displaced)
	switch {
	case err != nil:
		return err
	case !fi.Mode().IsRegular(), fi.Sys().(*syscall.Stat_t).Nlink > 1, fi.Mode() != 0o600 && os.Chmod(displaced, 0o600) != nil:
		return os.Remove(displaced)
	}
	if err := syncData(displaced); err != nil {
		return err
	}
	return os.Rename(displaced, r.history)
}

// replaceLinked replaces the file by next where names cannot be exchanged.
func (r *replacement) replaceLinked(next string) (written bool, err error) {
	second := beside(r.path, ".link")
	if err := removeIfThere(second); err != nil {
		return false, errors.Join(err, removeIfThere(next))
	}
	switch err := os.Link(r.path, second); {
	case errors.Is(err, fs.ErrNotExist):
		return false, errors.Join(errRaced, removeIfThere(next))
	case err != nil && !cannot(err):
		return false, errors.Join(err, removeIfThere(next))
	}
	if now, err := os.Stat(r.path); err != nil || !os.SameFile(now, r.fi) {
		return false, errors.Join(errRaced, removeIfThere(next), removeIfThere(second))
	}
	if now, _, err := readFile(r.path); err != nil || !bytes.Equal(now, r.old) {
		return false, errors.Join(errRaced, err, removeIfThere(next), removeIfThere(second))
	}
	if err := os.Rename(next, r.path); err != nil {
		return false, errors.Join(err, removeIfThere(next), removeIfThere(second))
	}
	now, _, err := readFile(second)
	switch {
	case errors.Is(err, fs.ErrNotExist): // there are no second names
		err = nil
	case err == nil && !bytes.Equal(now, r.old):
		err = r.keepText(second, now)
	case err == nil:
		err = r.keepInode(second)
	}
	return true, errors.Join(err, syncDirectory(filepath.Dir(r.path)))
}
