package backend_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

func ignore(backend.Progress) {}

// makeFile builds and publishes a file.
func makeFile(t *testing.T, c backend.BuildConfig, h *backend.Hooks, named bool) {
	t.Helper()
	m, err := backend.InterceptBuilder(c, h, named)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Abort(); err != nil {
			t.Error(err)
		}
	}()
	if err := m.Build(t.Context(), ignore); err != nil {
		t.Fatal(err)
	}
	if err := m.Publish(); err != nil {
		t.Fatal(err)
	}
	m.Keep()
}

func stat(t *testing.T, path string) (st unix.Stat_t) {
	t.Helper()
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatal(path, err)
	}
	return st
}

// names returns the names in a directory.
func names(t *testing.T, dir string) string {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var s []string
	for _, e := range list {
		s = append(s, e.Name())
	}
	return strings.Join(s, " ")
}

// sparse creates a file of 8 MiB and a few bytes, with data at its beginning and at 4 MiB.
func sparse(t *testing.T, path string) []byte {
	t.Helper()
	b := make([]byte, 8<<20+100)
	copy(b, bytes.Repeat([]byte{1}, 70000))
	copy(b[4<<20:], bytes.Repeat([]byte{2}, 300000))
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, at := range []int64{0, 4 << 20} {
		if _, err := f.WriteAt(b[at:at+300000], at); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Truncate(int64(len(b))); err != nil {
		t.Fatal(err)
	}
	return b
}

// The new file has the right content and blocks, whatever the kernel supports.
func TestBuild(t *testing.T) {
	const size = 12 << 20
	refuse := func(errno unix.Errno) func(uint32) error { return func(uint32) error { return errno } }
	noCopy := func(int64) (int64, error) { return 0, unix.EXDEV }
	for _, tc := range []struct {
		name        string
		preallocate bool
		from        bool
		size        int64
		hooks       backend.Hooks
		full        bool // all blocks are allocated
	}{
		{"preallocated", true, false, size, backend.Hooks{}, true},
		{"zeroed", true, false, size, backend.Hooks{Fallocate: refuse(unix.EOPNOTSUPP)}, true},
		{"copied", false, true, 0, backend.Hooks{}, false},
		{"copied, larger", false, true, size, backend.Hooks{}, false},
		{"copied by reading", false, true, size, backend.Hooks{Copy: noCopy}, false},
		{"copied in small pieces", false, true, 0, backend.Hooks{Copy: func(n int64) (int64, error) { return min(n, 9000), nil }}, false},
		{"copied and preallocated", true, true, size, backend.Hooks{}, true},
		{"copied and zeroed", true, true, size, backend.Hooks{Fallocate: refuse(unix.ENOSYS)}, true},
	} {
		for _, named := range []bool{false, true} {
			t.Run(tc.name+map[bool]string{true: ", named"}[named], func(t *testing.T) {
				dir := t.TempDir()
				want, other := make([]byte, size), t.TempDir()
				c := backend.BuildConfig{Path: filepath.Join(dir, "a"), Size: tc.size, Preallocate: tc.preallocate}
				if tc.from {
					c.From = filepath.Join(other, "from")
					copy(want, sparse(t, c.From))
					if tc.size == 0 {
						want = want[:8<<20+512] // whole blocks
					}
				}
				makeFile(t, c, &tc.hooks, named)
				got, err := os.ReadFile(c.Path)
				if err != nil || !bytes.Equal(got, want) {
					t.Errorf("the file has %d bytes, error %v; want %d with the right data", len(got), err, len(want))
				}
				st := stat(t, c.Path)
				if allocated := st.Blocks * 512; tc.full && allocated < int64(len(want)) || !tc.full && allocated > 2<<20 {
					t.Errorf("%d bytes are allocated of %d; all wanted: %v", allocated, len(want), tc.full)
				}
				if st.Mode&0o777 != 0o600 {
					t.Errorf("mode %o", st.Mode)
				}
				if got := names(t, dir); got != "a" {
					t.Errorf("in the directory: %s", got)
				}
				openFile(t, backend.FileConfig{Path: c.Path, Size: int64(len(want))})
			})
		}
	}
}

// An aborted build leaves no file, and keeps the file of another process.
func TestBuildEndsEarly(t *testing.T) {
	dir := t.TempDir()
	c := backend.BuildConfig{Path: filepath.Join(dir, "a"), Size: 8 << 20, Preallocate: true}
	for _, named := range []bool{false, true} {
		wrote := 0
		full := &backend.Hooks{
			Fallocate: func(uint32) error { return unix.EOPNOTSUPP },
			Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
				if wrote++; wrote > 4 {
					return 0, unix.ENOSPC
				}
				return below(p, off, flags)
			},
		}
		m, err := backend.InterceptBuilder(c, full, named)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Build(t.Context(), ignore); !errors.Is(err, backend.ErrNoSpace) || !strings.Contains(err.Error(), c.Path) {
			t.Errorf("named %v: %v, want ErrNoSpace", named, err)
		}
		if err := m.Abort(); err != nil || names(t, dir) != "" {
			t.Errorf("named %v: error %v, left behind: %s", named, err, names(t, dir))
		}

		enough := errors.New("enough")
		ctx, cancel := context.WithCancelCause(t.Context())
		m, err = backend.InterceptBuilder(c, &backend.Hooks{Fallocate: full.Fallocate}, named)
		if err != nil {
			t.Fatal(err)
		}
		var last backend.Progress
		err = m.Build(ctx, func(p backend.Progress) {
			if last = p; p.Done >= 2<<20 {
				cancel(enough)
			}
		})
		if !errors.Is(err, enough) || last.Phase != backend.Zeroing || last.Total != c.Size || last.Done >= c.Size/2 {
			t.Errorf("named %v: %v after %+v, want the cause soon after 2 MiB", named, err, last)
		}
		if err := m.Abort(); err != nil || names(t, dir) != "" {
			t.Errorf("named %v: error %v, left behind: %s", named, err, names(t, dir))
		}

		m, err = backend.InterceptBuilder(c, &backend.Hooks{}, named)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Build(t.Context(), ignore); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(c.Path, []byte("mine"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := m.Publish(); !errors.Is(err, fs.ErrExist) {
			t.Errorf("named %v: a name that is taken: %v", named, err)
		}
		m.Abort()
		if b, err := os.ReadFile(c.Path); string(b) != "mine" || names(t, dir) != "a" {
			t.Errorf("named %v: somebody else's file has %q, error %v; in the directory: %s", named, b, err, names(t, dir))
		}
		os.Remove(c.Path)

		m, err = backend.InterceptBuilder(c, &backend.Hooks{}, named)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(m.Build(t.Context(), ignore), m.Publish(), m.Abort()); err != nil || names(t, dir) != "" {
			t.Errorf("named %v: published and discarded: error %v, left behind: %s", named, err, names(t, dir))
		}
	}
}

// A build removes the file of a killed process, but not of a living one.
func TestBuildPart(t *testing.T) {
	dir := t.TempDir()
	c := backend.BuildConfig{Path: filepath.Join(dir, "a"), Size: 1 << 20}
	part, other := filepath.Join(dir, ".a.part"), filepath.Join(dir, "other")
	if err := os.WriteFile(part, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(part, other); err != nil { // it is not written to
		t.Fatal(err)
	}
	makeFile(t, c, &backend.Hooks{}, true)
	if b, err := os.ReadFile(other); string(b) != "half" || names(t, dir) != "a other" {
		t.Errorf("%q, error %v; in the directory: %s", b, err, names(t, dir))
	}
	os.Remove(c.Path)

	first, err := backend.InterceptBuilder(c, &backend.Hooks{}, true)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Abort()
	if err := first.Build(t.Context(), ignore); err != nil {
		t.Fatal(err)
	}
	second, err := backend.InterceptBuilder(c, &backend.Hooks{}, true)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Abort()
	if err := second.Build(t.Context(), ignore); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("two at once: %v", err)
	}
	if err := first.Publish(); err != nil {
		t.Errorf("the first of two: %v", err)
	}
}

func TestBuildRefused(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	sparse(t, path("from"))
	for name, size := range map[string]int64{"empty": 0, "served": 1 << 20} {
		if err := os.WriteFile(path(name), make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	openFile(t, backend.FileConfig{Path: path("served")})
	for _, tc := range []struct {
		c    backend.BuildConfig
		want string
	}{
		{backend.BuildConfig{Path: path("from"), Size: 1 << 20}, "It was not overwritten"},
		{backend.BuildConfig{Path: path("a"), Size: 1000}, "size"},
		{backend.BuildConfig{Path: path("a"), Size: 1 << 20, From: path("from")}, "has 8388708 bytes, more than the size 1048576"},
		{backend.BuildConfig{Path: path("a"), From: path("none")}, path("none") + ": no such file"},
		{backend.BuildConfig{Path: path("a"), From: path("empty")}, "is empty"},
		{backend.BuildConfig{Path: path("a"), From: path("served")}, "locked by a target"},
		{backend.BuildConfig{Path: path("a"), From: dir}, "neither a regular file nor"},
		{backend.BuildConfig{Path: path("a"), From: "/dev/zero"}, "neither a regular file nor"},
	} {
		m, err := backend.NewFileBuilder(tc.c)
		if err == nil {
			m.Abort()
		}
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: %v, want %q", tc.c, err, tc.want)
		}
	}
	m, err := backend.NewFileBuilder(backend.BuildConfig{Path: path("none/a"), Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Abort()
	if err := m.Build(t.Context(), ignore); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory that is not there: %v", err)
	}
}

// A file that does not fit is refused before any block is allocated.
func TestBuildNoSpace(t *testing.T) {
	dir := backendtest.Mount(t, "none", "tmpfs", "size=1m")
	from := filepath.Join(t.TempDir(), "from")
	if err := os.WriteFile(from, bytes.Repeat([]byte{1}, 2<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []backend.BuildConfig{{Size: 2 << 20, Preallocate: true}, {From: from}} {
		c.Path = filepath.Join(dir, "a")
		m, err := backend.NewFileBuilder(c)
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Build(t.Context(), ignore); !errors.Is(err, backend.ErrNoSpace) {
			t.Errorf("%+v: %v, want ErrNoSpace", c, err)
		}
		m.Abort()
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil || st.Bfree != st.Blocks || names(t, dir) != "" {
			t.Errorf("%+v: error %v, %d of %d blocks are free, in the directory: %s", c, err, st.Bfree, st.Blocks, names(t, dir))
		}
	}
}

// If the file system can, a copy shares its blocks with the source, so that it fits on a file
// system without space for another copy. A preallocated file shares no blocks.
func TestBuildShares(t *testing.T) {
	dir := backendtest.Mount(t, backendtest.MakeFS(t, "btrfs", 48<<20, "-q", "--mixed"), "btrfs", "")
	path := func(name string) string { return filepath.Join(dir, name) }
	const size = 24 << 20
	want := make([]byte, size)
	rand.NewChaCha8([32]byte{}).Read(want)
	for _, tc := range []struct {
		name  string
		size  int64 // of what is copied
		grown int64 // size of the file
		steps int   // reports of progress
	}{
		{"all at once", size, size, 1},
		{"the begin of a larger file", size, size + 4<<20, 1},
		{"what ends inside a block", size - 100, size, 4}, // copy_file_range shares all blocks but the last
	} {
		t.Run(tc.name, func(t *testing.T) {
			from := path("from")
			if err := os.WriteFile(from, want[:tc.size], 0o600); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"a", "b"} {
				m, err := backend.NewFileBuilder(backend.BuildConfig{Path: path(name), From: from, Size: tc.grown})
				if err != nil {
					t.Fatal(err)
				}
				defer m.Abort()
				var said []backend.Progress
				if err := m.Build(t.Context(), func(p backend.Progress) { said = append(said, p) }); err != nil {
					t.Fatal(err)
				}
				if last := (backend.Progress{Phase: backend.Copying, Done: tc.size, Total: tc.size}); said[len(said)-1] != last || len(said) > tc.steps {
					t.Errorf("progress %+v, want %+v within %d", said, last, tc.steps)
				}
				if err := m.Publish(); err != nil {
					t.Fatal(err)
				}
			}
			m, err := backend.NewFileBuilder(backend.BuildConfig{Path: path("c"), From: from, Preallocate: true})
			if err != nil {
				t.Fatal(err)
			}
			defer m.Abort()
			if err := m.Build(t.Context(), ignore); !errors.Is(err, backend.ErrNoSpace) {
				t.Errorf("with space of its own: %v, want ErrNoSpace", err)
			}
			// Who writes to a copy changes nothing else.
			if err := openFile(t, backend.FileConfig{Path: path("a")}).WriteAt(make([]byte, 1<<20), 1<<20); err != nil {
				t.Fatal(err)
			}
			whole := append(bytes.Clone(want[:tc.size]), make([]byte, tc.grown-tc.size)...)
			changed := bytes.Clone(whole)
			clear(changed[1<<20 : 2<<20])
			for name, want := range map[string][]byte{"from": want[:tc.size], "a": changed, "b": whole} {
				if got, err := os.ReadFile(path(name)); err != nil || !bytes.Equal(got, want) {
					t.Errorf("%s: %d bytes, which differ, error %v", name, len(got), err)
				}
			}
		})
	}
}

// A block device is copied without its zeros, and not while it is in use.
func TestBuildFromDevice(t *testing.T) {
	want := make([]byte, 4<<20)
	copy(want[1<<20:], bytes.Repeat([]byte{7}, 4096))
	dev, _ := backendtest.LoopDevice(t, want, 512, false)
	c := backend.BuildConfig{Path: filepath.Join(t.TempDir(), "a"), From: dev}
	makeFile(t, c, &backend.Hooks{}, false)
	if got, err := os.ReadFile(c.Path); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes, error %v", len(got), err)
	}
	if st := stat(t, c.Path); st.Blocks*512 > 1<<20 {
		t.Errorf("%d bytes are allocated for zeros", st.Blocks*512)
	}
	openBlock(t, backend.BlockConfig{Path: dev})
	if _, err := backend.NewFileBuilder(backend.BuildConfig{Path: c.Path + "2", From: dev}); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a device that is served: %v", err)
	}
}

// Allocate takes space for a file in use and keeps its content.
func TestAllocate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	s := openFile(t, backend.FileConfig{Path: path, Size: 8 << 20})
	want := bytes.Repeat([]byte{5}, 4096)
	if err := s.WriteAt(want, 4<<20); err != nil {
		t.Fatal(err)
	}
	a := s.(backend.Allocator)
	if err := errors.Join(a.Allocate(2<<20, 6<<20), a.Allocate(8<<20, 0)); err != nil {
		t.Fatal(err)
	}
	if st := stat(t, path); st.Size != 8<<20 || st.Blocks*512 < 6<<20 || st.Blocks*512 > 7<<20 {
		t.Errorf("%d bytes, of which %d have space", st.Size, st.Blocks*512)
	}
	got := make([]byte, 4096)
	if err := s.ReadAt(got, 4<<20); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the old content is gone, error %v", err)
	}
	if err := a.Allocate(8<<20, 512); !errors.Is(err, backend.ErrRange) {
		t.Errorf("beyond the end: %v, want ErrRange", err)
	}
	var errno unix.Errno
	backend.Intercept(s, &backend.Hooks{Fallocate: func(uint32) error { return errno }})
	for of, want := range map[unix.Errno]error{unix.EOPNOTSUPP: backend.ErrNoAllocate, unix.ENOSPC: backend.ErrNoSpace, unix.EIO: unix.EIO} {
		errno = of
		if err := a.Allocate(0, 512); !errors.Is(err, want) {
			t.Errorf("%v: %v, want %v", errno, err, want)
		}
	}
	if err := openFile(t, backend.FileConfig{Path: path + "2", Size: 1 << 20}).Close(); err != nil {
		t.Fatal(err)
	}
	r := openFile(t, backend.FileConfig{Path: path + "2", ReadOnly: true})
	if err := r.(backend.Allocator).Allocate(0, 512); !errors.Is(err, backend.ErrReadOnly) {
		t.Errorf("read only: %v", err)
	}
	dev, _ := backendtest.LoopDevice(t, make([]byte, 1<<20), 512, false)
	if err := openBlock(t, backend.BlockConfig{Path: dev}).(backend.Allocator).Allocate(0, 512); !errors.Is(err, backend.ErrNoAllocate) {
		t.Errorf("a device: %v", err)
	}
}
