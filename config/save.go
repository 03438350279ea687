package config

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ErrChanged reports that another process has changed a file since it was read.
var ErrChanged = errors.New("changed since it was read")

const (
	// maxHistory is the number of old versions of a file that the history keeps.
	maxHistory = 20
	// lockWait bounds the wait for another process that writes a file in the same directory.
	lockWait = 10 * time.Second
	// maxTries bounds the attempts to write a file that another process keeps replacing.
	maxTries = 10
)

// SaveOver writes the document to the file at path, if that has the text old or is absent;
// otherwise it fails with ErrChanged. From then on that file is the document's. At any
// time, and after a loss of power, the file has either all of its old text or all of the
// new one. FILE.history keeps the old one. A path that is a symbolic link stays one.
//
// If another process writes the file at the same time, no text is lost: see replacement.
//
// If only the last step fails, the file has the new text and the error says so: the old
// text may return after a loss of power.
func (d *Document) SaveOver(path string, old []byte) error {
	return d.write(path, func(b []byte, absent bool) bool { return absent || bytes.Equal(b, old) })
}

// SaveAs writes the document to the file at path like SaveOver, whatever that file has.
func (d *Document) SaveAs(path string) error {
	return d.write(path, func([]byte, bool) bool { return true })
}

// Create writes the document to a file that does not exist. It fails with ErrExists if the file does, and changes nothing.
func (d *Document) Create(path string) error {
	err := d.write(path, func(_ []byte, absent bool) bool { return absent })
	if errors.Is(err, ErrChanged) {
		return &Error{Source: path, Reason: "exists. Nothing was changed", class: ErrExists}
	}
	return err
}

// write does what SaveOver says; expected reports whether the file may have that text, or be
// absent.
func (d *Document) write(path string, expected func(old []byte, absent bool) bool) error {
	real, err := followLinks(path)
	if err != nil {
		return saveError(path, "", err)
	}
	unlock, err := lockDirectory(filepath.Dir(real))
	if err != nil {
		return saveError(path, "", err)
	}
	defer unlock()
	if err := keepDisplaced(real); err != nil {
		return saveError(path, "history: ", err)
	}
	for tries := 1; ; tries++ {
		written, err := d.writeOnce(path, real, expected)
		switch {
		case errors.Is(err, errRaced) && tries < maxTries:
			continue
		case errors.Is(err, errRaced):
			return errChanged(path)
		case err != nil && written:
			err = saveError(path, "written, but a loss of power may undo it: ", err)
		}
		return err
	}
}

// errRaced reports that another process has replaced the file during writeOnce.
var errRaced = errors.New("another file has its name now")

func errChanged(path string) error {
	return &Error{Source: path, Reason: "changed by another process since it was read. It was not overwritten", class: ErrChanged}
}

// writeOnce tries once to write the file at real, whose directory is locked. written means
// that the file has the text, even with an error.
func (d *Document) writeOnce(path, real string, expected func(old []byte, absent bool) bool) (written bool, err error) {
	old, fi, err := readFile(real)
	absent := errors.Is(err, fs.ErrNotExist)
	switch {
	case err != nil && !absent:
		return false, saveError(path, "", err)
	case !expected(old, absent):
		return false, errChanged(path)
	case !absent && !fi.Mode().IsRegular():
		return false, saveError(path, "", errors.New("not a regular file"))
	}
	mode := fs.FileMode(0o600)
	if !absent {
		mode = fi.Mode()
	}
	// An invalid document may be written, but not one whose secrets others can read.
	if c, err := configOf(d.source, d.settings, nil, nil); err == nil {
		if err := c.checkFileMode(mode); err != nil {
			return false, saveError(path, "", err)
		}
	}
	if absent || !bytes.Equal(old, d.text) {
		history := ""
		if !absent {
			if history, err = keep(real+".history", old); err != nil {
				return false, saveError(path, "history: ", err)
			}
		}
		f := replacement{path: real, text: d.text, old: old, fi: fi, history: history}
		written, err = f.replace(func(now []byte) bool { return expected(now, false) })
		switch {
		case errors.Is(err, errRaced):
			return false, err
		case errors.Is(err, ErrChanged):
			return false, errChanged(path)
		case err != nil && !written:
			return false, saveError(path, "", err)
		}
	}
	d.source, d.mode = path, mode
	return written, err
}

// ErrStorage is the class of errors of the file system that has the configuration: nothing is wrong
// with the document.
var ErrStorage = errors.New("the file system failed")

// saveError returns an Error that names the file and what failed.
func saveError(path, what string, err error) error {
	class := err
	var errno syscall.Errno
	if errors.As(err, &errno) {
		class = errors.Join(ErrStorage, err)
	}
	var link *os.LinkError
	if errors.As(err, &link) {
		err = fmt.Errorf("%s to %s: %w", link.Op, link.New, link.Err)
	}
	var pe *fs.PathError
	if errors.As(err, &pe) && pe.Path != path {
		return &Error{Source: path, Reason: what + pe.Error(), class: class}
	}
	return &Error{Source: path, Reason: what + reasonOf(err), class: class}
}

// followLinks returns the path of the file that path leads to, which need not exist.
func followLinks(path string) (string, error) {
	for range 40 {
		fi, err := os.Lstat(path)
		if errors.Is(err, fs.ErrNotExist) || err == nil && fi.Mode()&fs.ModeSymlink == 0 {
			return path, nil
		}
		if err != nil {
			return "", err
		}
		next, err := os.Readlink(path)
		if err != nil {
			return "", err
		}
		if !filepath.IsAbs(next) {
			// Not Join, which would resolve .. before the links.
			next = filepath.Dir(path) + string(filepath.Separator) + next
		}
		path = next
	}
	return "", syscall.ELOOP
}

// lockDirectory locks a directory against other processes that save a file there.
func lockDirectory(dir string) (unlock func(), err error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(lockWait); ; time.Sleep(10 * time.Millisecond) {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		switch {
		case err == nil:
			return func() { f.Close() }, nil
		case err != syscall.EWOULDBLOCK && err != syscall.EINTR:
			f.Close()
			return nil, &fs.PathError{Op: "lock", Path: dir, Err: err}
		case time.Now().After(end):
			f.Close()
			return nil, fmt.Errorf("%s is locked by another process", dir)
		}
	}
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// writeSynced creates a file on stable storage, with the mode and owner of like; nil: 0600.
func writeSynced(path string, b []byte, like fs.FileInfo) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if like != nil {
		mine, err := f.Stat()
		if err != nil {
			return err
		}
		if was := owner(like); was != owner(mine) {
			if err := f.Chown(was[0], was[1]); err != nil {
				return err
			}
		}
		if err := f.Chmod(like.Mode().Perm()); err != nil {
			return err
		}
	}
	if _, err := f.Write(b); err != nil {
		return err
	}
	return f.Sync()
}

// owner returns the user and the group of a file.
func owner(fi fs.FileInfo) [2]int {
	st := fi.Sys().(*syscall.Stat_t)
	return [2]int{int(st.Uid), int(st.Gid)}
}

// syncDirectory calls fsync(2) on a directory; tests observe it.
var syncDirectory = func(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// keep writes an old version of a file into a directory as NNNN.yaml with the next number,
// unless the newest version has that text, and removes the oldest versions. It returns the
// path of the version.
func keep(dir string, b []byte) (path string, err error) {
	switch err := os.Mkdir(dir, 0o700); {
	case err == nil:
		if err := syncDirectory(filepath.Dir(dir)); err != nil {
			return "", err
		}
	case !errors.Is(err, fs.ErrExist):
		return "", err
	}
	numbers, err := versions(dir)
	if err != nil {
		return "", err
	}
	next := 1
	if n := len(numbers); n > 0 {
		path := versionPath(dir, numbers[n-1])
		newest, err := os.ReadFile(path)
		if err == nil && bytes.Equal(newest, b) {
			return path, nil
		}
		next = numbers[n-1] + 1
	}
	path = versionPath(dir, next)
	if err := writeSynced(path, b, nil); err != nil {
		return "", errors.Join(err, removeIfThere(path))
	}
	numbers = append(numbers, next)
	for len(numbers) > maxHistory {
		if err := removeIfThere(versionPath(dir, numbers[0])); err != nil {
			return "", err
		}
		numbers = numbers[1:]
	}
	return path, syncDirectory(dir)
}

func versionPath(dir string, n int) string { return filepath.Join(dir, fmt.Sprintf("%04d.yaml", n)) }

// versions returns the numbers of the versions in a directory, ascending.
func versions(dir string) ([]int, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var numbers []int
	for _, e := range entries {
		digits, ok := strings.CutSuffix(e.Name(), ".yaml")
		if n, err := strconv.Atoi(digits); ok && err == nil && n > 0 && filepath.Base(versionPath(dir, n)) == e.Name() {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	return numbers, nil
}
