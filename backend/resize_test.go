package backend

import (
	"bytes"
	"errors"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// A store is resized during writes: data within its size is never lost, and added bytes read
// as zeros.
func TestMemoryResizeUnderWrites(t *testing.T) {
	s, err := OpenMemory(MemoryConfig{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	m := s.(*Memory)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for w := range 2 {
		wg.Go(func() {
			p, q := make([]byte, 4096), make([]byte, 4096)
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				// Within the first MiB, and beyond its end.
				for j := range p {
					p[j] = byte(i)
				}
				off := int64(w) << 19
				if err := m.WriteAt(p, off); err != nil {
					t.Error(err)
					return
				}
				if err := m.ReadAt(q, off); err != nil || !bytes.Equal(p, q) {
					t.Errorf("what was written is not what was read: %v", err)
					return
				}
				if err := m.WriteAt(p, 65<<20+off); err != nil && !errors.Is(err, ErrRange) {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 200 {
		for _, size := range []int64{200 << 20, 1 << 20, 70 << 20, 1 << 20} {
			if err := m.Resize(size); err != nil || m.Info().Size != size {
				t.Fatalf("Resize(%d): %v", size, err)
			}
		}
	}
	close(stop)
	wg.Wait()
	if err := m.Close(); err != nil || !errors.Is(m.Resize(2<<20), ErrClosed) {
		t.Errorf("closed: %v", err)
	}
}

// Resize checks size and state first; a failure leaves the old size.
func TestFileResize(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	s, _, err := OpenFile(FileConfig{Path: path, Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	d := s.(*disk)
	for _, size := range []int64{0, -512, 513} {
		if err := d.Resize(size); err == nil || d.Info().Size != 1<<20 {
			t.Errorf("Resize(%d): %v", size, err)
		}
	}
	fd := d.fd
	d.fd = failingTruncate{fd}
	if err := d.Resize(2 << 20); !errors.Is(err, unix.ENOSPC) || d.Info().Size != 1<<20 {
		t.Errorf("a truncate that fails: %v, %d bytes", err, d.Info().Size)
	}
	d.fd = fd
	d.regular = false
	if err := d.Resize(2 << 20); !errors.Is(err, ErrFixedSize) {
		t.Errorf("a device: %v", err)
	}
	d.regular = true
	if err := d.Resize(2 << 20); err != nil || d.Info().Size != 2<<20 {
		t.Errorf("%v, %d bytes", err, d.Info().Size)
	}
	if err := d.Close(); err != nil || !errors.Is(d.Resize(1<<20), ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	if s, _, err = OpenFile(FileConfig{Path: path, Size: 2 << 20, ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.(Resizer).Resize(1 << 20); !errors.Is(err, ErrReadOnly) {
		t.Errorf("read-only: %v", err)
	}
}

type failingTruncate struct{ osFile }

func (failingTruncate) truncate(int64) error { return unix.ENOSPC }
