package backend_test

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// openFile opens a file store, on a new file if Path is empty.
func openFile(t testing.TB, c backend.FileConfig) backend.Store {
	t.Helper()
	if c.Path == "" {
		c.Path = filepath.Join(t.TempDir(), "lun.img")
	}
	s, _, err := backend.OpenFile(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestFile(t *testing.T) {
	for name, c := range map[string]backend.FileConfig{
		"512":          {Size: 8 << 20},
		"4096":         {Size: 8 << 20, BlockSize: 4096},
		"RaggedEnd":    {Size: 1<<20 + 512},
		"WriteThrough": {Size: 2 << 20, WriteThrough: true},
	} {
		t.Run(name, func(t *testing.T) {
			backendtest.Run(t, func(t *testing.T) backend.Store { return openFile(t, c) })
		})
	}
	t.Run("ReadOnly", func(t *testing.T) {
		backendtest.RunReadOnly(t, func(t *testing.T, content []byte) backend.Store {
			path := filepath.Join(t.TempDir(), "lun.img")
			if err := os.WriteFile(path, content, 0o400); err != nil {
				t.Fatal(err)
			}
			return openFile(t, backend.FileConfig{Path: path, ReadOnly: true, WriteThrough: true})
		})
	})
}

// A store keeps its contract if the kernel refuses calls or does them in part.
func TestFileFallbacks(t *testing.T) {
	short := func(p []byte) []byte { return p[:min(len(p), 30_000)] }
	for name, h := range map[string]*backend.Hooks{
		"ShortTransfers": {
			Pread: func(p []byte, off int64, below func([]byte, int64) (int, error)) (int, error) {
				return below(short(p), off)
			},
			Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
				return below(short(p), off, flags)
			},
		},
		"NoFallocate": {Fallocate: func(uint32) error { return unix.EOPNOTSUPP }},
		"NoPunchHole": {Fallocate: func(mode uint32) error {
			if mode == backend.PunchHole {
				return unix.ENOSYS
			}
			return nil
		}},
		"NotThisRange": {Fallocate: func(uint32) error { return unix.EINVAL }},
		"NoDsync": {Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
			if flags != 0 {
				return 0, unix.EOPNOTSUPP
			}
			return below(p, off, flags)
		}},
	} {
		t.Run(name, func(t *testing.T) {
			backendtest.Run(t, func(t *testing.T) backend.Store {
				s := openFile(t, backend.FileConfig{Size: 1 << 20})
				backend.Intercept(s, h)
				return s
			})
		})
	}
}

func TestFileInfo(t *testing.T) {
	s := openFile(t, backend.FileConfig{Size: 1 << 20})
	i := s.Info()
	if i.Size != 1<<20 || i.BlockSize != 512 || i.ReadOnly || !i.VolatileCache || i.Nonblocking {
		t.Errorf("Info() = %+v", i)
	}
	if i.PhysicalBlockSize < 512 || i.PhysicalBlockSize > 64<<10 {
		t.Errorf("physical block of %d bytes", i.PhysicalBlockSize)
	}
	if s := openFile(t, backend.FileConfig{Size: 1 << 20, WriteThrough: true}); s.Info().VolatileCache {
		t.Error("a write-through store has a volatile cache")
	}
}

func TestFileIsCreatedSparse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lun.img")
	open := func(c backend.FileConfig, want bool) backend.Store {
		t.Helper()
		c.Path = path
		s, created, err := backend.OpenFile(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		if created != want {
			t.Errorf("created is %v, want %v", created, want)
		}
		return s
	}
	s := open(backend.FileConfig{Size: 1 << 40, BlockSize: 4096}, true)
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	if st.Size != 1<<40 || st.Mode != unix.S_IFREG|0o600 {
		t.Errorf("the new file has %d bytes and mode %o", st.Size, st.Mode)
	}
	if st.Blocks*512 > 1<<20 {
		t.Errorf("the new file takes %d bytes", st.Blocks*512)
	}
	if err := s.WriteAt([]byte("here"), 1<<40-4); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}

	// It is found again, with its data, by its size or without one.
	for _, size := range []int64{0, 1 << 40} {
		s := open(backend.FileConfig{Size: size}, false)
		if got := s.Info().Size; got != 1<<40 {
			t.Errorf("size %d, want %d", got, int64(1<<40))
		}
		got := make([]byte, 4)
		if err := s.ReadAt(got, 1<<40-4); err != nil || string(got) != "here" {
			t.Errorf("the end is %q, %v", got, err)
		}
		s.Close()
	}

	// An empty file, such as a power loss leaves between creation and sizing,
	// is as good as none; a link leads to the file.
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	path = link
	open(backend.FileConfig{Size: 1 << 20}, true).Close()
}

func TestFileRefusals(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for name, size := range map[string]int{"8k": 8192, "odd": 8192 + 512, "ragged": 1000, "empty": 0} {
		if err := os.WriteFile(at(name), make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(at("fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		c    backend.FileConfig
		want string // in the error
	}{
		{"Smaller", backend.FileConfig{Path: at("8k"), Size: 16384}, "is 8KiB (8192 bytes), but its size is configured as 16KiB (16384 bytes)"},
		{"Larger", backend.FileConfig{Path: at("8k"), Size: 4096}, "is 8KiB (8192 bytes), but its size is configured as 4KiB (4096 bytes)"},
		{"SmallerReadOnly", backend.FileConfig{Path: at("8k"), Size: 16384, ReadOnly: true}, "is 8KiB (8192 bytes)"},
		{"NoMultiple", backend.FileConfig{Path: at("odd"), BlockSize: 4096}, "not a multiple of the block size 4096"},
		{"NoMultipleOf512", backend.FileConfig{Path: at("ragged")}, "truncate(1)"},
		{"Empty", backend.FileConfig{Path: at("empty")}, "is empty"},
		{"EmptyReadOnly", backend.FileConfig{Path: at("empty"), Size: 512, ReadOnly: true}, "is 0 bytes, but its size is configured as 512"},
		{"Directory", backend.FileConfig{Path: dir, Size: 4096}, "is a directory"},
		{"FIFO", backend.FileConfig{Path: at("fifo"), Size: 4096}, "not a regular file (p"},
		{"Device", backend.FileConfig{Path: "/dev/null", Size: 4096}, "not a regular file (D"},
		{"AbsentWithoutSize", backend.FileConfig{Path: at("absent")}, "not found. Create it, or configure the size"},
		{"AbsentReadOnly", backend.FileConfig{Path: at("absent"), Size: 4096, ReadOnly: true}, "a read-only file is not created"},
		{"AbsentOddSize", backend.FileConfig{Path: at("absent"), Size: 4095}, "not a multiple of the block size 512"},
		{"AbsentNegative", backend.FileConfig{Path: at("absent"), Size: -512}, "size -512"},
		{"AbsentBlockSize", backend.FileConfig{Path: at("absent"), Size: 4096, BlockSize: 2048}, "block size 2048: must be 512 or 4096"},
		{"AbsentTooLarge", backend.FileConfig{Path: at("absent"), Size: 1<<63 - 512}, "create with"},
		{"NoDirectory", backend.FileConfig{Path: at("absent/lun.img"), Size: 4096}, "no such file or directory"},
		{"NoPath", backend.FileConfig{Size: 4096}, "no such file"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, created, err := backend.OpenFile(c.c)
			if err == nil {
				t.Fatalf("opened, as %+v", s.Info())
			}
			if s != nil || created {
				t.Errorf("returned %v, %v with the error", s, created)
			}
			if !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), c.c.Path) {
				t.Errorf("error %q: want the path and %q", err, c.want)
			}
		})
	}
	if _, err := os.Stat(at("absent")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a refused file was created: %v", err)
	}
	for name, size := range map[string]int64{"8k": 8192, "odd": 8192 + 512, "ragged": 1000, "empty": 0} {
		if st, err := os.Stat(at(name)); err != nil || st.Size() != size {
			t.Errorf("refused file %s was changed: %v, %v", name, st, err)
		}
	}
}

func TestFileLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lun.img")
	refused := func(readOnly bool) {
		t.Helper()
		_, _, err := backend.OpenFile(backend.FileConfig{Path: path, Size: 4096, ReadOnly: readOnly})
		if err == nil || !strings.Contains(err.Error(), "locked by another target") {
			t.Errorf("opening it again (read-only: %v): %v, want a refusal", readOnly, err)
		}
	}
	s := openFile(t, backend.FileConfig{Path: path, Size: 4096})
	refused(false)
	refused(true)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	// Readers share it, and keep writers out.
	a := openFile(t, backend.FileConfig{Path: path, ReadOnly: true})
	b := openFile(t, backend.FileConfig{Path: path, ReadOnly: true})
	refused(false)
	a.Close()
	refused(false)
	b.Close()
	openFile(t, backend.FileConfig{Path: path})
}

// allocated returns the bytes that the file takes on its file system.
func allocated(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

func TestFileDiscardGivesBackSpace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lun.img")
	s := openFile(t, backend.FileConfig{Path: path, Size: 4 << 20})
	if s.Info().DiscardGranularity == 0 {
		backendtest.Unavailable(t, "the file system of %s does not punch holes", path)
	}
	if err := errors.Join(s.WriteAt(bytes.Repeat([]byte{1}, 4<<20), 0), s.Sync()); err != nil {
		t.Fatal(err)
	}
	full := allocated(t, path)
	if err := errors.Join(s.Zero(1<<20, 1<<20), s.Sync()); err != nil {
		t.Fatal(err)
	}
	if got := allocated(t, path); got < full {
		t.Errorf("Zero gave back %d bytes", full-got)
	}
	if err := errors.Join(s.Discard(100, 3<<20), s.Sync()); err != nil {
		t.Fatal(err)
	}
	if got := full - allocated(t, path); got < 3<<20-2*64<<10 {
		t.Errorf("Discard of 3 MiB gave back %d bytes", got)
	}
	if st, err := os.Stat(path); err != nil || st.Size() != 4<<20 {
		t.Errorf("the file has %d bytes now", st.Size())
	}
}

// Extent reports that the holes of the file take no space.
func TestFileExtent(t *testing.T) {
	const mib = 1 << 20
	s := openFile(t, backend.FileConfig{Size: 8 * mib})
	if s.Info().DiscardGranularity == 0 {
		backendtest.Unavailable(t, "the file system punches no holes")
	}
	wantExtents(t, s, []extent{{0, 8 * mib, false}, {5 * mib, 3 * mib, false}})
	for _, off := range []int64{mib, 7 * mib} {
		if err := s.WriteAt(bytes.Repeat([]byte{1}, mib), off); err != nil {
			t.Fatal(err)
		}
	}
	wantExtents(t, s, []extent{{0, mib, false}, {mib, mib, true}, {mib + 512, mib - 512, true},
		{2 * mib, 5 * mib, false}, {7 * mib, mib, true}, {8*mib - 1, 1, true}})
	if err := s.Discard(mib, mib/2); err != nil {
		t.Fatal(err)
	}
	wantExtents(t, s, []extent{{0, mib + mib/2, false}, {mib + mib/2, mib / 2, true}})
	// What was zeroed keeps its blocks, and what was there may be in them yet.
	if err := s.Zero(7*mib, mib/2); err != nil {
		t.Fatal(err)
	}
	for _, off := range []int64{7 * mib, 7*mib + mib/2 - 1, 7*mib + mib/2} {
		if mapped, _, err := backend.Extent(s, off); !mapped || err != nil {
			t.Errorf("Extent(%d) after Zero: %t, %v", off, mapped, err)
		}
	}
	if mapped, n, err := backend.Extent(s, 2*mib); mapped || n != 5*mib || err != nil {
		t.Errorf("the hole before what was zeroed: %t, %d bytes, %v", mapped, n, err)
	}
	if err := backend.Prefetch(s, 0, 8*mib+1); !errors.Is(err, backend.ErrRange) {
		t.Errorf("Prefetch beyond the end: %v, want ErrRange", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := backend.Prefetch(s, 0, 1); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("Prefetch after Close: %v, want ErrClosed", err)
	}
}

// If the file system does not report blocks without data, they count as a hole. Other
// failures are errors.
func TestFileExtentWithoutMap(t *testing.T) {
	s := openFile(t, backend.FileConfig{Size: 1 << 20})
	err := unix.EIO
	asked := 0
	backend.Intercept(s, &backend.Hooks{Map: func() error { asked++; return err }})
	if _, _, got := backend.Extent(s, 0); !errors.Is(got, unix.EIO) {
		t.Errorf("%v, want EIO", got)
	}
	err = unix.EOPNOTSUPP
	wantExtents(t, s, []extent{{0, 1 << 20, false}, {512, 1<<20 - 512, false}})
	if asked != 2 {
		t.Errorf("asked %d times", asked)
	}
}

func TestFileErrors(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lun.img")
	s := openFile(t, backend.FileConfig{Path: path, Size: 1 << 20})
	var errno error
	backend.Intercept(s, &backend.Hooks{
		Pread: func(p []byte, off int64, below func([]byte, int64) (int, error)) (int, error) {
			if errno != nil {
				return 0, errno
			}
			return below(p, off)
		},
		Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
			return 0, errno
		},
		Fallocate: func(uint32) error { return errno },
	})
	errno = unix.EIO
	for name, err := range map[string]error{
		"ReadAt":  s.ReadAt(make([]byte, 512), 4096),
		"WriteAt": s.WriteAt(make([]byte, 512), 4096),
		"Discard": s.Discard(4096, 512),
		"Zero":    s.Zero(4096, 512),
	} {
		if !errors.Is(err, unix.EIO) || !strings.Contains(err.Error(), path+" at 4096") {
			t.Errorf("%s: %v, want EIO, the path and the offset", name, err)
		}
	}
	if err := s.Sync(); err != nil {
		t.Errorf("Sync after failed writes: %v", err)
	}
	errno = unix.ENOSPC
	for name, err := range map[string]error{"Discard": s.Discard(0, 512), "Zero": s.Zero(0, 512)} {
		if !errors.Is(err, backend.ErrNoSpace) {
			t.Errorf("%s: %v, want ErrNoSpace", name, err)
		}
	}
	errno = nil // a write that gets nowhere and does not say why
	if err := s.WriteAt([]byte{1}, 0); !errors.Is(err, unix.EIO) {
		t.Errorf("WriteAt: %v, want EIO", err)
	}
	// Somebody else shortens the file: not a panic, not zeros.
	if err := os.Truncate(path, 4096); err != nil {
		t.Fatal(err)
	}
	if err := s.ReadAt(make([]byte, 512), 4000); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("beyond the new end: %v, want ErrUnexpectedEOF", err)
	}
}

// After the end of a file that another process has truncated, Extent reports no hole, which
// would read as zeros: a copy of the data has to get the error of ReadAt.
func TestExtentOfShortenedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lun.img")
	s := openFile(t, backend.FileConfig{Path: path, Size: 1 << 20})
	if err := os.Truncate(path, 256<<10); err != nil {
		t.Fatal(err)
	}
	for off := int64(0); off < 1<<20; {
		mapped, n, err := backend.Extent(s, off)
		if err != nil {
			t.Fatal(err)
		}
		if want := off >= 256<<10; mapped != want || !want && off+n > 256<<10 {
			t.Errorf("%d bytes at %d: mapped %t", n, off, mapped)
		}
		off += n
	}
}

func TestFileNoSpace(t *testing.T) {
	dir := backendtest.Mount(t, "none", "tmpfs", "size=1m")
	s := openFile(t, backend.FileConfig{Path: filepath.Join(dir, "lun.img"), Size: 16 << 20})
	p := bytes.Repeat([]byte{1}, 2<<20)
	if err := s.WriteAt(p, 0); !errors.Is(err, backend.ErrNoSpace) {
		t.Errorf("WriteAt: %v, want ErrNoSpace", err)
	}
	if err := s.WriteDurable(p, 0); !errors.Is(err, backend.ErrNoSpace) {
		t.Errorf("WriteDurable: %v, want ErrNoSpace", err)
	}
	if err := s.Zero(0, 16<<20); !errors.Is(err, backend.ErrNoSpace) {
		t.Errorf("Zero: %v, want ErrNoSpace", err)
	}
	if err := s.Sync(); err != nil {
		t.Errorf("Sync: %v", err)
	}
	if err := s.Discard(0, 16<<20); err != nil {
		t.Errorf("Discard: %v", err)
	}
	if err := s.WriteAt(p[:4096], 8<<20); err != nil {
		t.Errorf("WriteAt with room again: %v", err)
	}
}

func TestFileAllocs(t *testing.T) {
	noAllocs(t, openFile(t, backend.FileConfig{Size: 1 << 20}))
}

func BenchmarkFileRead4K(b *testing.B) {
	s := openFile(b, backend.FileConfig{Size: 1 << 30})
	benchmark(b, s, s.ReadAt)
}

func BenchmarkFileWrite4K(b *testing.B) {
	s := openFile(b, backend.FileConfig{Size: 1 << 30})
	benchmark(b, s, s.WriteAt)
}

// An idle store has one descriptor. Close and a failed open close all.
func TestFileDescriptors(t *testing.T) {
	count := func() int {
		t.Helper()
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	before := count()
	path := filepath.Join(t.TempDir(), "lun.img")
	s := openFile(t, backend.FileConfig{Path: path, Size: 4096})
	if n := count() - before; n != 1 {
		t.Errorf("an idle store has %d descriptors, want 1", n)
	}
	if _, _, err := backend.OpenFile(backend.FileConfig{Path: path}); err == nil {
		t.Error("opened twice")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := backend.OpenFile(backend.FileConfig{Path: path, Size: 512}); err == nil {
		t.Error("opened with another size")
	}
	if after := count(); after != before {
		t.Errorf("%d descriptors are open, %d were before", after, before)
	}
}

// Grow adopts the new end of an extended file, without a last block that is not whole. The
// size stays if the file was truncated.
func TestFileGrows(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	s := openFile(t, backend.FileConfig{Path: path, Size: 1 << 20, BlockSize: 4096})
	if err := s.WriteAt([]byte("before"), 1<<20-6); err != nil {
		t.Fatal(err)
	}
	want := func(size int64) {
		t.Helper()
		got, err := s.(backend.Grower).Grow()
		if err != nil || got != size || s.Info().Size != size {
			t.Fatalf("Grow: %d, %v; Info has %d; want %d", got, err, s.Info().Size, size)
		}
	}
	want(1 << 20)
	if err := os.Truncate(path, 2<<20+512); err != nil {
		t.Fatal(err)
	}
	if err := s.WriteAt([]byte("x"), 1<<20); !errors.Is(err, backend.ErrRange) {
		t.Errorf("a write to what nobody has looked at: %v", err)
	}
	want(2 << 20)
	if err := s.WriteAt([]byte("after"), 2<<20-5); err != nil {
		t.Fatal(err)
	}
	p := make([]byte, 8)
	if err := s.ReadAt(p, 1<<20-6); err != nil || string(p) != "before\x00\x00" {
		t.Errorf("read %q, %v", p, err)
	}
	if _, n, err := backend.Extent(s, 2<<20-1); n != 1 || err != nil {
		t.Errorf("Extent of the last byte: %d, %v", n, err)
	}
	if err := os.Truncate(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	want(2 << 20)
	s.Close()
	if _, err := s.(backend.Grower).Grow(); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("Grow after Close: %v", err)
	}
}
