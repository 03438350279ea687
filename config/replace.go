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

// A replacement gives a file another text, and loses no text that an editor writes meanwhile.
//
// To compare the file and then rename(2) the new one over it is not enough: editors take no
// lock, and the rename destroys what an editor has saved since the comparison. So the new
// file and the old one exchange their names (renameat2(2), RENAME_EXCHANGE), and then the
// displaced file is compared:
//
//   - It has another text than was read: an editor has saved. The displaced file gets its name
//     back, or, if the caller overwrites any text, its text goes into the history.
//   - It has the same text: the displaced file itself, not a copy, becomes the version in the
//     history. An editor that still has it open writes into the history.
//
// On file systems that cannot exchange names (NFS, FAT), link(2) gives the file a second name
// first, so that its text survives the rename. There, another file that an editor renames to
// the path between the last comparison and the rename is lost.
type replacement struct {
	path    string
	text    []byte
	old     []byte      // text of the file when it was read
	fi      fs.FileInfo // of the file when it was read; nil: there was no file
	history string      // path of the version that has old
}

// beforeReplace is called before names change; tests edit the file there.
var beforeReplace = func(path string) {}

// exchange calls renameat2(2); tests let it fail.
var exchange = func(a, b string, flags uint) error {
	err := unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, flags)
	if err != nil {
		return &os.LinkError{Op: "rename", Old: a, New: b, Err: err}
	}
	return nil
}

// syncData calls fdatasync(2), which costs little if the data is on stable storage already;
// tests observe it.
var syncData = func(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(unix.Fdatasync(int(f.Fd())), f.Close())
}

// cannot reports whether err means that the file system lacks the operation.
func cannot(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EPERM)
}

// sibling returns the name in the same directory for the next or the displaced file of path.
func sibling(path, suffix string) string {
	dir, name := filepath.Split(path)
	return dir + "." + name + suffix
}

// keepDisplaced puts the file that a killed process has left, displaced or new, into the history.
func keepDisplaced(path string) error {
	displaced := sibling(path, ".old")
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

// replace gives the file the text. If another text was written meanwhile, expected reports
// whether it may be overwritten; if not, the error is ErrChanged. written means that the file
// has the text, but with an error it may lose it with the power. errRaced means that the path
// leads to another file now and nothing was changed.
func (r *replacement) replace(expected func(now []byte) bool) (written bool, err error) {
	next, displaced := sibling(r.path, ".new"), sibling(r.path, ".old")
	// A killed process may have left one.
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
	case errors.Is(err, fs.ErrNotExist): // it was removed; the history has its text
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

// create renames next to the path, which no file has.
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

// giveBack undoes the exchange of a file that must not be replaced, and returns ErrChanged.
func (r *replacement) giveBack(displaced string) error {
	if err := exchange(displaced, r.path, unix.RENAME_EXCHANGE); err != nil {
		return err // the next write finds it: keepDisplaced
	}
	now, _, err := readFile(displaced)
	if err == nil && !bytes.Equal(now, r.text) { // an editor has saved again
		err = r.keepText(displaced, now)
	} else {
		err = errors.Join(err, os.Remove(displaced))
	}
	return errors.Join(ErrChanged, err)
}

// keepText adds the text of the displaced file to the history as another version.
func (r *replacement) keepText(displaced string, text []byte) error {
	if _, err := keep(r.path+".history", text); err != nil {
		return err
	}
	return os.Remove(displaced)
}

// keepInode renames the displaced file over its copy in the history. It syncs the file
// first: the copy is on stable storage, and an editor may not have synced. A file that has
// other names or another owner is removed.
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

// replaceLinked replaces the file by next on a file system that cannot exchange names.
func (r *replacement) replaceLinked(next string) (written bool, err error) {
	second := sibling(r.path, ".link")
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
	case errors.Is(err, fs.ErrNotExist): // the file system has no links
		err = nil
	case err == nil && !bytes.Equal(now, r.old):
		err = r.keepText(second, now)
	case err == nil:
		err = r.keepInode(second)
	}
	return true, errors.Join(err, syncDirectory(filepath.Dir(r.path)))
}
