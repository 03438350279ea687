package backend

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/handed"
)

func memoryFile(t testing.TB) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "memfd:test")
	t.Cleanup(func() { f.Close() })
	return f
}

func openMemory(t *testing.T, size int64) *Memory {
	t.Helper()
	s, err := OpenMemory(MemoryConfig{Size: size})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s.(*Memory)
}

// A copy in two steps, the first of them while others write and discard, has what the store has.
func TestCopyOfMemory(t *testing.T) {
	const size = 3*leafSpan + 5*memoryPage + 512
	m, f := openMemory(t, size), memoryFile(t)
	change := func(n int) {
		for range n {
			off := rand.Int64N(size/512-300) * 512
			switch p := make([]byte, 512*(1+rand.IntN(300))); rand.IntN(4) {
			case 0:
				m.Discard(off, int64(len(p)))
			case 1:
				m.Zero(off, int64(len(p)))
			default:
				for i := range p {
					p[i] = byte(rand.Uint32())
				}
				m.WriteAt(p, off)
			}
		}
	}
	for i := range int64(4) {
		m.WriteAt([]byte("data"), i*memoryPage)
	}
	change(300)
	var load sync.WaitGroup
	load.Go(func() { change(200) })
	if err := m.CopyTo(f); err != nil {
		t.Fatal(err)
	}
	load.Wait()
	m.WriteAt([]byte{1, 2, 3}, size-3)
	m.WriteAt([]byte{1}, 0) // and then discarded: not copied, and the copied page must not return
	m.Zero(memoryPage, 512)
	m.Discard(2*memoryPage+512, 512)
	m.Discard(0, 4*memoryPage)
	if err := m.CopyTo(f); err != nil {
		t.Fatal(err)
	}
	n := openMemory(t, size)
	if err := n.Take(f); err != nil {
		t.Fatal(err)
	}
	a, b := make([]byte, 1<<20), make([]byte, 1<<20)
	for off := int64(0); off < size; off += int64(len(a)) {
		k := min(int64(len(a)), size-off)
		if err := m.ReadAt(a[:k], off); err != nil {
			t.Fatal(err)
		}
		if err := n.ReadAt(b[:k], off); err != nil || !bytes.Equal(a[:k], b[:k]) {
			t.Fatalf("at %d: %v, or other data", off, err)
		}
	}
	again := memoryFile(t)
	if err := n.CopyTo(again); err != nil {
		t.Fatal(err)
	}
	k := openMemory(t, size)
	if err := k.Take(again); err != nil || k.used.Load() > n.used.Load() {
		t.Errorf("another file: %v, %d bytes, want %d", err, k.used.Load(), n.used.Load())
	}
}

// bytesIn returns how many bytes a file takes.
func bytesIn(t *testing.T, f *os.File) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// A store that has taken its pages from a file works like any other: discarded pages are free, a smaller and then larger
// store reads as zeros, and calls in progress survive its end. So does one that has to copy them.
func TestTakenMemory(t *testing.T) {
	const size = 8*memoryPage + 512
	data := bytes.Repeat([]byte("data"), memoryPage/4)
	for name, span := range map[string]int64{"mapped": size, "copied": maxMapping + memoryPage} {
		t.Run(name, func(t *testing.T) {
			from, f := openMemory(t, span), memoryFile(t)
			for i := range int64(8) {
				from.WriteAt(data, i*memoryPage)
			}
			from.WriteAt(data[:512], span-512)
			if err := from.CopyTo(f); err != nil {
				t.Fatal(err)
			}
			m := openMemory(t, span)
			if err := m.Take(f); err != nil {
				t.Fatal(err)
			}
			if used, _, err := m.Usage(); err != nil || used != 9*memoryPage {
				t.Errorf("%d bytes are used, %v", used, err)
			}
			last := make([]byte, 512)
			if err := m.ReadAt(last, span-512); err != nil || !bytes.Equal(last, data[:512]) {
				t.Errorf("the end: %q, %v", last, err)
			}
			before := bytesIn(t, f)
			if err := m.Discard(0, 4*memoryPage); err != nil {
				t.Fatal(err)
			}
			if freed := before - bytesIn(t, f); (name == "mapped") != (freed == 4*memoryPage) {
				t.Errorf("%d bytes are free after a discard", freed)
			}
			m.WriteAt(data[:512], memoryPage)
			p := make([]byte, 3*memoryPage)
			if err := m.ReadAt(p, 0); err != nil || !bytes.Equal(p[memoryPage:][:512], data[:512]) || !isZero(p[:memoryPage]) || !isZero(p[memoryPage+512:]) {
				t.Errorf("a page after a discard and a write: %v, or other data", err)
			}
			for _, size := range []int64{6 * memoryPage, span} {
				if err := m.Resize(size); err != nil {
					t.Fatal(err)
				}
			}
			if err := m.ReadAt(p, 5*memoryPage); err != nil || !bytes.Equal(p[:memoryPage], data) || !isZero(p[memoryPage:]) {
				t.Errorf("a resized store: %v, or other data", err)
			}
			var calls sync.WaitGroup
			for range 4 {
				calls.Go(func() {
					for p := make([]byte, memoryPage); m.ReadAt(p, 5*memoryPage) == nil && m.WriteAt(p, 4*memoryPage) == nil; {
					}
				})
			}
			if err := m.Close(); err != nil {
				t.Error(err)
			}
			calls.Wait()
		})
	}
}

// BenchmarkTake measures what a memory LUN adds to the pause of an upgrade.
func BenchmarkTake(b *testing.B) {
	const size = 64 << 20
	open := func() *Memory {
		s, err := OpenMemory(MemoryConfig{Size: size})
		if err != nil {
			b.Fatal(err)
		}
		return s.(*Memory)
	}
	m, f := open(), memoryFile(b)
	if err := errors.Join(m.WriteAt(bytes.Repeat([]byte("data"), size/4), 0), m.CopyTo(f)); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		n := open()
		if err := n.Take(f); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		n.Close()
		b.StartTimer()
	}
}

// A store opens a locked file on the descriptor of another process. The lock is never free.
func TestOpenHandedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	first, _, err := OpenFile(FileConfig{Path: path, Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := first.WriteAt([]byte("data"), 512); err != nil {
		t.Fatal(err)
	}
	if _, _, err := OpenFile(FileConfig{Path: path}); err == nil {
		t.Fatal("a locked file was opened")
	}
	fd, err := unix.FcntlInt(uintptr(first.(Holder).Descriptor()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := handed.Give(os.NewFile(uintptr(fd), "fd "+strconv.Itoa(fd))); err != nil {
		t.Fatal(err)
	}
	next, created, err := OpenFile(FileConfig{Path: path, Size: 1 << 20})
	if err != nil || created {
		t.Fatalf("the handed file: %v, created: %t", err, created)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := OpenFile(FileConfig{Path: path}); err == nil {
		t.Error("the lock was lost with the first process")
	}
	p := make([]byte, 4)
	if err := next.ReadAt(p, 512); err != nil || string(p) != "data" {
		t.Errorf("%q, %v", p, err)
	}
	if err := next.Sync(); err != nil {
		t.Error(err)
	}
	if err := next.Close(); err != nil {
		t.Error(err)
	}
	if d := next.(Holder).Descriptor(); d != -1 {
		t.Errorf("descriptor %d of a closed store", d)
	}
}
