package backend_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// What the page cache does not have is read from the medium, although the pipe never waits. Splice allocates nothing.
func TestSpliceOfColdPages(t *testing.T) {
	path := filepath.Join(backendtest.SpliceDir(t), "lun.img")
	s := openFile(t, backend.FileConfig{Path: path, Size: 1 << 20})
	want := bytes.Repeat([]byte("0123456789abcdef"), 16<<10)
	if err := errors.Join(s.WriteAt(want, 0), s.Sync()); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	pipe := testkit.NewPipe(t)
	sp := s.(backend.Splicer)
	if err := sp.Splice(pipe.In, 0, int64(len(want))); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(pipe.Content(t), want) {
		t.Error("other data")
	}
	buf := make([]byte, 64<<10)
	if n := testing.AllocsPerRun(100, func() {
		if err := sp.Splice(pipe.In, 4096, int64(len(buf))); err != nil {
			t.Fatal(err)
		}
		unix.Read(pipe.Out, buf)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// Transfers of the kernel may be short. An error says where it was, and does not look like data.
func TestSpliceFails(t *testing.T) {
	path := filepath.Join(backendtest.SpliceDir(t), "lun.img")
	s := openFile(t, backend.FileConfig{Path: path, Size: 1 << 20})
	sp := s.(backend.Splicer)
	want := bytes.Repeat([]byte("0123456789abcdef"), 4<<10)
	if err := s.WriteAt(want, 0); err != nil {
		t.Fatal(err)
	}
	var fail func(off int64) error
	backend.Intercept(s, &backend.Hooks{Splice: func(off int64, n int) (int, error) {
		if fail != nil {
			if err := fail(off); err != nil {
				return 0, err
			}
		}
		return min(n, 10_000), nil
	}})
	pipe := testkit.NewPipe(t)
	if err := sp.Splice(pipe.In, 0, int64(len(want))); err != nil || !bytes.Equal(pipe.Content(t), want) {
		t.Errorf("in pieces: %v, or other data", err)
	}
	fail = func(off int64) error {
		if off >= 20_000 {
			return unix.EIO
		}
		return nil
	}
	if err := sp.Splice(pipe.In, 0, 65536); !errors.Is(err, unix.EIO) || !strings.Contains(err.Error(), path+" at 20000") {
		t.Errorf("%v, want EIO, the path and the offset", err)
	}
	if n := len(pipe.Content(t)); n != 20_000 {
		t.Errorf("%d bytes are in the pipe", n)
	}
	fail = nil
	if err := os.Truncate(path, 4096); err != nil { // by somebody else
		t.Fatal(err)
	}
	if err := sp.Splice(pipe.In, 0, 65536); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("beyond the new end: %v, want ErrUnexpectedEOF", err)
	}
	pipe.Content(t)
	fail = func(int64) error { return unix.EINVAL }
	if err := sp.Splice(pipe.In, 0, 4096); !errors.Is(err, backend.ErrNoSplice) || sp.CanSplice() {
		t.Errorf("a file system without splice: %v, CanSplice %t", err, sp.CanSplice())
	}
}

// A file system may keep pages in spite of direct I/O, as tmpfs does. Once may be chance, and then Freeze tries again. Otherwise it fails, and the disk
// splices no longer. A medium that fails says nothing about that.
func TestFreezeFails(t *testing.T) {
	for name, tc := range map[string]struct {
		kept    int   // how often pages stay
		write   error // of direct I/O
		ok      bool
		splices bool
	}{
		"pages stay once":    {kept: 1, ok: true, splices: true},
		"pages stay":         {kept: 100},
		"no direct I/O":      {write: unix.EINVAL},
		"the medium fails":   {write: unix.EIO, splices: true},
		"the medium is full": {write: unix.ENOSPC, splices: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := openFile(t, backend.FileConfig{Path: filepath.Join(backendtest.SpliceDir(t), "lun.img"), Size: 1 << 20})
			old := bytes.Repeat([]byte("old data"), 8<<10)
			if err := s.WriteAt(old, 4096); err != nil {
				t.Fatal(err)
			}
			backend.Intercept(s, &backend.Hooks{
				Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
					if tc.write != nil {
						return 0, tc.write
					}
					return below(p, off, flags)
				},
				Cached: func() bool { tc.kept--; return tc.kept >= 0 },
			})
			sp := s.(backend.Splicer)
			err := sp.Freeze(4096, 64<<10)
			if (err == nil) != tc.ok || tc.write != nil && !errors.Is(err, tc.write) {
				t.Errorf("Freeze: %v", err)
			}
			if got := sp.CanSplice(); got != tc.splices {
				t.Errorf("CanSplice %t", got)
			}
			got := make([]byte, len(old))
			if err := s.ReadAt(got, 4096); err != nil || !bytes.Equal(got, old) {
				t.Errorf("the data is other data: %v", err)
			}
		})
	}
	s := openFile(t, backend.FileConfig{Path: readOnlyFile(t), ReadOnly: true})
	if err := s.(backend.Splicer).Freeze(0, 4096); !errors.Is(err, backend.ErrReadOnly) {
		t.Errorf("a read-only store: %v", err)
	}
}

// readOnlyFile returns the path of a file of 64 KiB.
func readOnlyFile(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "lun.img")
	if err := os.WriteFile(path, make([]byte, 64<<10), 0o400); err != nil {
		t.Fatal(err)
	}
	return path
}

// Files of these file systems keep the contract of a Store, with Splice and Freeze. They splice where Freeze works.
func TestFilesOfFileSystems(t *testing.T) {
	made := func(fstype, options string) func(t *testing.T) string {
		return func(t *testing.T) string {
			return backendtest.Mount(t, backendtest.MakeFS(t, fstype, 32<<20, "-q"), fstype, options)
		}
	}
	reflink := func(fstype string) func(t *testing.T) string {
		return func(t *testing.T) string { return backendtest.ReflinkFS(t, fstype) }
	}
	for name, tc := range map[string]struct {
		mount          func(t *testing.T) (dir string)
		splices, loses bool // from the beginning; after Freeze
	}{
		"ext4":            {mount: made("ext4", ""), splices: true},
		"ext4, journaled": {mount: made("ext4", "data=journal"), splices: true, loses: true},
		"ext2":            {mount: made("ext2", ""), splices: true},
		"xfs":             {mount: reflink("xfs"), splices: true},
		"btrfs":           {mount: reflink("btrfs")},
		"tmpfs":           {mount: func(t *testing.T) string { return backendtest.Mount(t, "none", "tmpfs", "size=64m") }},
	} {
		t.Run(name, func(t *testing.T) {
			dir := tc.mount(t)
			n := 0
			open := func(t *testing.T) backend.Store {
				n++
				return openFile(t, backend.FileConfig{Path: filepath.Join(dir, fmt.Sprint(n)), Size: 2<<20 + 512})
			}
			backendtest.Run(t, open)
			sp := open(t).(backend.Splicer)
			if sp.CanSplice() != tc.splices {
				t.Errorf("CanSplice %t", sp.CanSplice())
			}
			err := sp.Freeze(0, 4096)
			if frozen := tc.splices && !tc.loses; sp.CanSplice() != frozen || tc.splices && (err == nil) != frozen {
				t.Errorf("Freeze: %v, and CanSplice %t", err, sp.CanSplice())
			}
		})
	}
}
