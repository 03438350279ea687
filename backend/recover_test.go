package backend_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
)

// Inspect finds each failure of a file, and Recover repairs what it can. Another store is well all the
// time.
func TestRecover(t *testing.T) {
	const size = 1 << 20
	pattern := bytes.Repeat([]byte("data"), 128)
	replace := func(t *testing.T, path string, size int64) {
		t.Helper()
		if err := errors.Join(os.WriteFile(path+".new", pattern, 0o600), os.Truncate(path+".new", size), os.Rename(path+".new", path)); err != nil {
			t.Fatal(err)
		}
	}
	must := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name    string
		fail    func(t *testing.T, s backend.Store, path string)
		want    error
		recover error
		repair  func(t *testing.T, path string) // the cause, before another Recover
	}{
		{"deleted", func(t *testing.T, _ backend.Store, path string) { must(t, os.Remove(path)) },
			backend.ErrDeleted, backend.ErrDeleted, func(t *testing.T, path string) { replace(t, path, size) }},
		{"replaced", func(t *testing.T, _ backend.Store, path string) { replace(t, path, size) },
			backend.ErrReplaced, nil, nil},
		{"replaced by a file that another store has", func(t *testing.T, _ backend.Store, path string) {
			replace(t, path, size)
			openFile(t, backend.FileConfig{Path: path})
		}, backend.ErrReplaced, errAny, nil},
		{"replaced by a smaller file", func(t *testing.T, _ backend.Store, path string) { replace(t, path, size/2) },
			backend.ErrReplaced, errAny, func(t *testing.T, path string) { replace(t, path, size) }},
		{"renamed", func(t *testing.T, _ backend.Store, path string) { must(t, os.Rename(path, path+".old")) },
			backend.ErrDeleted, backend.ErrDeleted, func(t *testing.T, path string) { must(t, os.Rename(path+".old", path)) }},
		{"cut off", func(t *testing.T, _ backend.Store, path string) { must(t, os.Truncate(path, size/2)) },
			backend.ErrCut, backend.ErrCut, func(t *testing.T, path string) { must(t, os.Truncate(path, size)) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "lun.img")
			s, other := openFile(t, backend.FileConfig{Path: path, Size: size}), openFile(t, backend.FileConfig{Size: size})
			must(t, s.WriteDurable(pattern, 0))
			r := s.(backend.Recoverer)
			if err := r.Inspect(); err != nil {
				t.Fatalf("before: %v", err)
			}
			c.fail(t, s, path)
			err := r.Inspect()
			if !errors.Is(err, c.want) {
				t.Errorf("Inspect: %v, want %v", err, c.want)
			}
			if c.want == backend.ErrCut {
				if got := s.(backend.Resizer).Resize(2 * size); !errors.Is(got, backend.ErrCut) {
					t.Errorf("Resize: %v, want ErrCut", got)
				}
			}
			if got := r.Recover(); !errors.Is(got, c.recover) && (c.recover != errAny || got == nil) {
				t.Errorf("Recover: %v, want %v", got, c.recover)
			}
			if c.recover != nil {
				if again := r.Inspect(); again == nil || again.Error() != err.Error() {
					t.Errorf("Inspect after a Recover that failed: %v, want %v", again, err)
				}
				must(t, s.ReadAt(make([]byte, 512), 0))
			}
			if c.repair != nil {
				c.repair(t, path)
				must(t, r.Recover())
			}
			if c.recover != errAny || c.repair != nil {
				got := make([]byte, 512)
				must(t, errors.Join(r.Inspect(), s.ReadAt(got, 0), s.Sync(), s.WriteDurable(got, 512)))
				on, err := os.ReadFile(path)
				if err != nil || !bytes.Equal(on[:512], pattern) || !bytes.Equal(on[512:1024], pattern) {
					t.Errorf("%v: writes after Recover are not in the file", err)
				}
			}
			must(t, errors.Join(other.(backend.Inspector).Inspect(), other.WriteDurable(pattern, 0)))
		})
	}
}

var errAny = errors.New("any")

// Recover after a failed sync works when writes and syncs do, and not before. It also works if
// the description reports the old failure once more.
func TestRecoverFromFailedSync(t *testing.T) {
	for name, fails := range map[string]func(*backend.Hooks, *error){
		"sync": func(h *backend.Hooks, err *error) { h.Fdatasync = func(int) error { return *err } },
		"write": func(h *backend.Hooks, err *error) {
			h.Pwrite = func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
				if *err != nil {
					return 0, *err
				}
				return below(p, off, flags)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "lun.img")
			s, other := openFile(t, backend.FileConfig{Path: path, Size: 1 << 20}), openFile(t, backend.FileConfig{Size: 1 << 20})
			failure := error(unix.EIO)
			h := &backend.Hooks{}
			fails(h, &failure)
			backend.Intercept(s, h)
			if err := s.WriteDurable(make([]byte, 512), 0); name == "write" && !errors.Is(err, unix.EIO) {
				t.Errorf("WriteDurable: %v, want EIO", err)
			}
			if err := s.Sync(); !errors.Is(err, unix.EIO) && !errors.Is(err, backend.ErrUnsynced) {
				t.Errorf("Sync: %v, want a failure", err)
			}
			r := s.(backend.Recoverer)
			for range 2 {
				if err := r.Inspect(); !errors.Is(err, backend.ErrUnsynced) {
					t.Errorf("Inspect: %v, want ErrUnsynced", err)
				}
				if err := r.Recover(); !errors.Is(err, unix.EIO) {
					t.Errorf("Recover: %v, want EIO", err)
				}
			}
			failure = nil
			if name == "sync" {
				once := error(unix.EIO)
				h.Fdatasync = func(int) error { defer func() { once = nil }(); return once }
			}
			p := make([]byte, 512)
			if err := errors.Join(r.Recover(), r.Inspect(), s.Sync(), s.WriteDurable(p, 0), s.Sync(), s.ReadAt(p, 0)); err != nil {
				t.Error(err)
			}
			if err := errors.Join(other.(backend.Inspector).Inspect(), other.Sync()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A durable write that a read-only file system refuses loses nothing: it is no failed sync.
func TestReadOnlyFileSystemIsNoFailedSync(t *testing.T) {
	s := openFile(t, backend.FileConfig{Size: 1 << 20})
	refuses := true
	backend.Intercept(s, &backend.Hooks{Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
		if refuses {
			return 0, unix.EROFS
		}
		return below(p, off, flags)
	}})
	if err := s.WriteDurable(make([]byte, 512), 0); !errors.Is(err, unix.EROFS) {
		t.Errorf("WriteDurable: %v, want EROFS", err)
	}
	refuses = false
	if err := errors.Join(s.(backend.Inspector).Inspect(), s.Sync(), s.WriteDurable(make([]byte, 512), 0)); err != nil {
		t.Error(err)
	}
}
