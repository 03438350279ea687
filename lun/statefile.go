package lun

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"unicode/utf8"
)

const maxStateFile = 16 << 20 // octets: some hundred thousand entries

// A stateFile is a small file that is only ever replaced as a whole: new
// content goes to path.tmp, is synced and renamed, and the directory is synced.
// After a crash the file has what was there before or what was to follow.
type stateFile struct {
	path  string
	lock  *os.File
	fsync func(*os.File) error // tests let it fail
	// unsure: a replacement failed in or after its rename. The file has the old
	// content or the new one, and a power failure may decide which.
	unsure bool
}

// open makes the directory, with mode 0700, if it is absent, and locks
// path.lock (flock(2)) until unlock: whoever else opens the same path is refused.
func (f *stateFile) open(path string) (err error) {
	f.path = path
	if err := makeDirectory(filepath.Dir(path), f.fsync); err != nil {
		return err
	}
	f.lock, err = lockFile(path + ".lock")
	return err
}

// unlock gives the file free for others. The lock file stays: if it were
// removed, one process could lock it while another makes and locks its successor.
func (f *stateFile) unlock() error {
	if f.lock == nil {
		return nil
	}
	return f.lock.Close()
}

// read returns the content, or nil if there is no file.
func (f *stateFile) read() ([]byte, error) {
	st, err := os.Lstat(f.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, err
	case !st.Mode().IsRegular():
		// A link too: the rename would replace it, not the file it points to.
		return nil, fmt.Errorf("is no regular file (%s)", st.Mode().Type())
	}
	file, err := os.OpenFile(f.path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	b, err := io.ReadAll(io.LimitReader(file, maxStateFile+1))
	if err != nil {
		return nil, err
	}
	// The process that wrote this may have been killed before its last sync.
	if err := f.fsync(file); err != nil {
		return nil, err
	}
	return b, syncDirectory(filepath.Dir(f.path), f.fsync)
}

// replace makes b the content, with mode 0600. When it returns nil b is on
// stable storage.
func (f *stateFile) replace(b []byte) error {
	tmp := f.path + ".tmp"
	// One may be left from a process that was killed, with any owner and mode.
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := f.write(tmp, b); err != nil {
		os.Remove(tmp)
		return err
	}
	f.unsure = true
	if err := os.Rename(tmp, f.path); err != nil {
		os.Remove(tmp)
		return err
	}
	if err := syncDirectory(filepath.Dir(f.path), f.fsync); err != nil {
		return err
	}
	f.unsure = false
	return nil
}

// write makes a file with mode 0600 and content b, and syncs it.
func (f *stateFile) write(path string, b []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if _, err = file.Write(b); err == nil {
		err = f.fsync(file)
	}
	return errors.Join(err, file.Close())
}

// encodeState is s as JSON. What decodeState would refuse for its length is an
// error.
func encodeState(s any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(s); err != nil {
		return nil, err
	}
	if b.Len() > maxStateFile {
		return nil, fmt.Errorf("the file would have %d octets, more than the limit of %d", b.Len(), maxStateFile)
	}
	return b.Bytes(), nil
}

// decodeState is the reverse of encodeState: it fills *s from JSON with that
// version. Members that are unknown are errors; sameTokens finds what is left.
func decodeState(b []byte, version int, s any) error {
	got, err := stateVersion(b)
	switch {
	case err != nil:
		return err
	case got != version:
		return fmt.Errorf("has version %d, but this program knows version %d only", got, version)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(s); err != nil {
		return fmt.Errorf("is damaged: %w", err)
	}
	return nil
}

// stateVersion is the version of what decodeState takes: it decides what else
// may be there.
func stateVersion(b []byte) (int, error) {
	switch {
	case len(b) == 0:
		return 0, errors.New("is empty")
	case len(b) > maxStateFile:
		return 0, fmt.Errorf("is longer than the limit of %d octets", maxStateFile)
	case !utf8.Valid(b):
		return 0, errors.New("is not valid UTF-8")
	}
	var v struct{ Version *int }
	if err := json.Unmarshal(b, &v); err != nil {
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			return 0, fmt.Errorf("is damaged at octet %d of %d: %w", syntax.Offset, len(b), err)
		}
		return 0, fmt.Errorf("is damaged: %w", err)
	}
	if v.Version == nil {
		return 0, errors.New("has no version")
	}
	return *v.Version, nil
}

// sameTokens checks that b says s and nothing else; white space is free, and so
// is how a string is escaped. Package json is lenient: of a member that is
// repeated it takes the last, it overlooks case and order, and null is as good as
// a value.
func sameTokens(b []byte, s any) error {
	canonical, err := json.Marshal(s)
	if err != nil {
		return err
	}
	got, want := json.NewDecoder(bytes.NewReader(b)), json.NewDecoder(bytes.NewReader(canonical))
	for {
		w, err := want.Token()
		if err == io.EOF {
			return nil // b is one JSON value: it has ended as well
		}
		if err != nil {
			return err
		}
		g, err := got.Token()
		if err != nil {
			return err
		}
		if g != w {
			return fmt.Errorf("%v before octet %d, where %v belongs", g, got.InputOffset(), w)
		}
	}
}

// lockFile makes the file if it is absent and locks it until it is closed.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err != syscall.EINTR {
			break
		}
	}
	switch err {
	case nil:
		return f, nil
	case syscall.EWOULDBLOCK:
		err = fmt.Errorf("in use: %s is locked by another target; stop that one, or give this one a directory of its own", path)
	default:
		err = fmt.Errorf("lock %s: %w", path, err)
	}
	f.Close()
	return nil, err
}

// makeDirectory makes dir and those above it that are absent, with mode 0700,
// so that they survive a power failure. It leaves to others to notice that
// something else has the name.
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
		return syncDirectory(filepath.Dir(dir), fsync)
	case errors.Is(err, fs.ErrExist):
		return nil
	}
	return err
}

func syncDirectory(dir string, fsync func(*os.File) error) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(fsync(f), f.Close())
}
