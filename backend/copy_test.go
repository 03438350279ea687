package backend_test

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// sharedMemory returns a directory on tmpfs, if the machine has one.
func sharedMemory(t *testing.T) string {
	t.Helper()
	var st unix.Statfs_t
	if err := unix.Statfs("/dev/shm", &st); err != nil || st.Type != unix.TMPFS_MAGIC {
		backendtest.Unavailable(t, "/dev/shm is no tmpfs: %v", err)
	}
	dir, err := os.MkdirTemp("/dev/shm", "iser-target-test-")
	if err != nil {
		backendtest.Unavailable(t, "%v", err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

const copySize = 4 << 20

// filePair returns two file stores: the first has content, the second has hooks.
func filePair(t *testing.T, from, to string, h *backend.Hooks) (src, dst backend.Store, content []byte) {
	t.Helper()
	src = openFile(t, backend.FileConfig{Path: filepath.Join(from, "src"), Size: copySize})
	dst = openFile(t, backend.FileConfig{Path: filepath.Join(to, "dst"), Size: copySize})
	backend.Intercept(dst, h)
	content = make([]byte, copySize)
	for i := range content {
		content[i] = byte(i*7) ^ byte(i>>9)
	}
	if err := src.WriteAt(content, 0); err != nil {
		t.Fatal(err)
	}
	return src, dst, content
}

// Between files the kernel copies, and Copy reads and writes what the kernel leaves.
func TestCopyFiles(t *testing.T) {
	disk, shm := t.TempDir(), sharedMemory(t)
	refuse := func(errno unix.Errno) func(int64) (int64, error) {
		return func(int64) (int64, error) { return 0, errno }
	}
	for _, tt := range []struct {
		name, from, to string
		kernel         bool // is to copy all
		copy           func(n int64) (int64, error)
	}{
		{"on disk", disk, disk, true, nil},
		{"on tmpfs", shm, shm, true, nil},
		{"from tmpfs to disk", shm, disk, false, nil},
		{"short", disk, disk, true, func(n int64) (int64, error) { return min(n, 30_000), nil }},
		{"nothing", disk, disk, false, func(int64) (int64, error) { return 0, nil }},
		{"EXDEV", disk, disk, false, refuse(unix.EXDEV)},
		{"EINVAL", disk, disk, false, refuse(unix.EINVAL)},
		{"EOPNOTSUPP", disk, disk, false, refuse(unix.EOPNOTSUPP)},
		{"ENOSYS", disk, disk, false, refuse(unix.ENOSYS)},
		{"EPERM", disk, disk, false, refuse(unix.EPERM)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wrote := 0
			from, to := filepath.Join(tt.from, tt.name), filepath.Join(tt.to, tt.name)
			for _, dir := range []string{from, to} {
				if err := os.MkdirAll(dir, 0o700); err != nil {
					t.Fatal(err)
				}
			}
			src, dst, content := filePair(t, from, to, &backend.Hooks{
				Copy: tt.copy,
				Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
					wrote += len(p)
					return below(p, off, flags)
				},
			})
			const n, at, srcAt = 3 << 20, 4096 + 512, 8192
			if err := backend.Copy(dst, at, src, srcAt, n, make([]byte, 256<<10)); err != nil {
				t.Fatal(err)
			}
			got, want := make([]byte, copySize), make([]byte, copySize)
			copy(want[at:], content[srcAt:][:n])
			if err := dst.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
				t.Errorf("the copy differs; %v", err)
			}
			if tt.kernel && wrote != 0 {
				t.Errorf("%d bytes went through this process", wrote)
			}
		})
	}
}

// An error of copy_file_range is reported like one of WriteAt.
func TestCopyFails(t *testing.T) {
	errno := unix.ENOSPC
	dir := t.TempDir()
	src, dst, _ := filePair(t, dir, dir, &backend.Hooks{Copy: func(n int64) (int64, error) {
		if errno != 0 {
			return 0, errno
		}
		return n, nil
	}})
	copy := func() error { return backend.Copy(dst, 0, src, 0, 4096, make([]byte, 512)) }
	if err := copy(); !errors.Is(err, backend.ErrNoSpace) {
		t.Errorf("%v, want ErrNoSpace", err)
	}
	errno = unix.EIO
	if err := copy(); !errors.Is(err, unix.EIO) || errors.Is(err, backend.ErrNoSpace) {
		t.Errorf("%v, want EIO", err)
	}
	// The source has become smaller than it was.
	errno = 0
	if err := os.Truncate(filepath.Join(dir, "src"), 1024); err != nil {
		t.Fatal(err)
	}
	if err := copy(); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("%v, want ErrUnexpectedEOF", err)
	}
}

// A copy to a write-through store is on stable storage when it returns.
func TestCopyWriteThrough(t *testing.T) {
	dir, syncs := t.TempDir(), 0
	src := openFile(t, backend.FileConfig{Path: filepath.Join(dir, "src"), Size: copySize})
	dst := openFile(t, backend.FileConfig{Path: filepath.Join(dir, "dst"), Size: copySize, WriteThrough: true})
	backend.Intercept(dst, &backend.Hooks{Fdatasync: func(int) error { syncs++; return nil }})
	if err := src.WriteAt(make([]byte, 8192), 0); err != nil {
		t.Fatal(err)
	}
	if err := backend.Copy(dst, 0, src, 0, 8192, make([]byte, 512)); err != nil || syncs == 0 {
		t.Errorf("%v, %d syncs", err, syncs)
	}
}

// Copies in both directions and Close do not deadlock.
func TestCopyAndClose(t *testing.T) {
	for range 20 {
		dir := t.TempDir()
		a, b, _ := filePair(t, dir, dir, &backend.Hooks{})
		done := make(chan error, 4)
		for _, pair := range [][2]backend.Store{{a, b}, {b, a}, {a, b}, {b, a}} {
			go func() {
				for {
					if err := backend.Copy(pair[0], 0, pair[1], 65536, 65536, make([]byte, 65536)); err != nil {
						done <- err
						return
					}
				}
			}()
		}
		go a.Close()
		go b.Close()
		for range 4 {
			if err := <-done; !errors.Is(err, backend.ErrClosed) {
				t.Fatal(err)
			}
		}
	}
}
