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

// openAtomic opens a file of 1 MiB of ones in a file system that has these limits of atomic writes, or pretends to.
func openAtomic(t *testing.T, min, max uint32, writeThrough bool) (backend.Store, string) {
	t.Helper()
	defer backend.PretendAtomic(min, max)()
	path := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(path, bytes.Repeat([]byte{1}, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	s, _, err := backend.OpenFile(backend.FileConfig{Path: path, WriteThrough: writeThrough})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, path
}

// statx(2) gives the limits. Those that no initiator could use are none.
func TestAtomicLimits(t *testing.T) {
	for _, tt := range []struct{ min, max, unit, most uint32 }{
		{0, 0, 0, 0}, // an older kernel, or a device without atomic writes
		{4096, 65536, 4096, 65536},
		{512, 512, 512, 512},
		{1, 4096, 512, 4096},
		{4096, 1 << 30, 4096, 1 << 20}, // more than is collected
		{8192, 4096, 0, 0},
		{4096, 12288, 0, 0},
	} {
		s, _ := openAtomic(t, tt.min, tt.max, false)
		if info := s.Info(); info.AtomicUnit != tt.unit || info.AtomicWrite != tt.most {
			t.Errorf("statx %d to %d: AtomicUnit %d, AtomicWrite %d; want %d, %d", tt.min, tt.max, info.AtomicUnit, info.AtomicWrite, tt.unit, tt.most)
		}
	}
	defer backend.PretendAtomic(4096, 65536)()
	path := filepath.Join(t.TempDir(), "ro.img")
	if err := os.WriteFile(path, make([]byte, 65536), 0o600); err != nil {
		t.Fatal(err)
	}
	s, _, err := backend.OpenFile(backend.FileConfig{Path: path, ReadOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if s.Info().AtomicWrite != 0 {
		t.Error("a file that cannot be written has atomic writes")
	}
}

// An atomic write is one system call with RWF_ATOMIC, for the whole range, and with RWF_DSYNC where it has to be durable. What the
// kernel does not take is an error, without any other way to write.
func TestWriteAtomic(t *testing.T) {
	for _, through := range []bool{false, true} {
		s, path := openAtomic(t, 4096, 65536, through)
		type call struct {
			off      int64
			n, flags int
		}
		var calls []call
		fail := error(nil)
		backend.Intercept(s, &backend.Hooks{Pwrite: func(p []byte, off int64, flags int, below func([]byte, int64, int) (int, error)) (int, error) {
			calls = append(calls, call{off, len(p), flags})
			if fail != nil {
				return 0, fail
			}
			return below(p, off, flags&^unix.RWF_ATOMIC) // which few media have
		}})
		data := bytes.Repeat([]byte{7}, 8192)
		for _, durable := range []bool{false, true} {
			calls = nil
			if err := backend.WriteAtomic(s, data, 16384, durable); err != nil {
				t.Fatal(err)
			}
			want := call{16384, 8192, unix.RWF_ATOMIC}
			if durable || through {
				want.flags |= unix.RWF_DSYNC
			}
			if len(calls) != 1 || calls[0] != want {
				t.Errorf("calls %+v, want %+v", calls, want)
			}
		}
		// Direct I/O and the page cache agree.
		b := make([]byte, 8192+2)
		if err := s.ReadAt(b, 16383); err != nil || b[0] != 1 || b[8193] != 1 || !bytes.Equal(b[1:8193], data) {
			t.Errorf("read after an atomic write: %v, % x, % x", err, b[:2], b[8192:])
		}
		if b, err := os.ReadFile(path); err != nil || !bytes.Equal(b[16384:][:8192], data) {
			t.Errorf("the file: %v", err)
		}
		calls = nil
		for _, bad := range []struct {
			off int64
			n   int
		}{{0, 2048}, {0, 131072}, {0, 12288}, {4096, 8192}, {2048, 4096}} {
			if err := backend.WriteAtomic(s, make([]byte, bad.n), bad.off, false); !errors.Is(err, errors.ErrUnsupported) {
				t.Errorf("%d bytes at %d: %v", bad.n, bad.off, err)
			}
		}
		if err := backend.WriteAtomic(s, make([]byte, 4096), 1<<20, false); !errors.Is(err, backend.ErrRange) {
			t.Errorf("behind the end: %v", err)
		}
		if len(calls) != 0 {
			t.Errorf("refused writes made calls: %+v", calls)
		}
		if fail = unix.ENOSPC; !errors.Is(backend.WriteAtomic(s, data, 0, true), backend.ErrNoSpace) {
			t.Error("no ErrNoSpace")
		}
		if fail = unix.EINVAL; !errors.Is(backend.WriteAtomic(s, data, 0, true), unix.EINVAL) {
			t.Error("no EINVAL")
		}
		fail = nil
		if err := s.Sync(); err != nil {
			t.Errorf("a refused write has failed syncs: %v", err)
		}
		fail = unix.EIO
		if err := backend.WriteAtomic(s, data, 0, true); !errors.Is(err, unix.EIO) {
			t.Errorf("a failed durable write: %v", err)
		}
		fail = nil
		if err := backend.WriteAtomic(s, data, 0, true); !errors.Is(err, backend.ErrUnsynced) {
			t.Errorf("after a failed durable write: %v", err)
		}
	}
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	if err := backend.WriteAtomic(m, make([]byte, 4096), 0, false); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("memory: %v", err)
	}
}
