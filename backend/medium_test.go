package backend

import (
	"bytes"
	"errors"
	"path/filepath"
	"testing"
	"unsafe"
)

// ReadMedium reads what was written, aligned or not, and fails like ReadAt.
func TestReadMedium(t *testing.T) {
	const size = 1 << 20
	s, _, err := OpenFile(FileConfig{Path: filepath.Join(t.TempDir(), "lun.img"), Size: size})
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, size)
	for i := range want {
		want[i] = byte(i*7 + i>>9)
	}
	if err := s.WriteAt(want, 0); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, size+4096)
	aligned := buf[-uintptr(unsafe.Pointer(&buf[0]))%4096:]
	for _, r := range []struct{ at, off, n int }{
		{0, 0, size}, {0, 4096, 64 << 10}, {1, 0, 4096}, {0, 512, 512}, {0, 7, 1000}, {3, size - 5, 5}, {0, size, 0},
	} {
		p := aligned[r.at:][:r.n]
		clear(p)
		if err := ReadMedium(s, p, int64(r.off)); err != nil || !bytes.Equal(p, want[r.off:][:r.n]) {
			t.Errorf("%d bytes at %d: %v, or other data", r.n, r.off, err)
		}
	}
	if err := ReadMedium(s, aligned[:512], size-511); !errors.Is(err, ErrRange) {
		t.Errorf("across the end: %v, want ErrRange", err)
	}
	d := s.(*disk)
	d.mu.RLock()
	n := d.readDirect(aligned[:4096], 0)
	d.mu.RUnlock()
	if n != 4096 {
		t.Logf("the file system does not support O_DIRECT: %d bytes", n)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := ReadMedium(s, aligned[:512], 0); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v, want ErrClosed", err)
	}
}
