package backend_test

import (
	"bytes"
	"errors"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

func openMemory(t testing.TB, c backend.MemoryConfig) *backend.Memory {
	t.Helper()
	s, err := backend.OpenMemory(c)
	if err != nil {
		t.Fatal(err)
	}
	return s.(*backend.Memory)
}

func TestMemory(t *testing.T) {
	for name, c := range map[string]backend.MemoryConfig{
		"512":          {Size: 8 << 20},
		"4096":         {Size: 8 << 20, BlockSize: 4096},
		"RaggedEnd":    {Size: 3<<20 + 512}, // the last page lies partly beyond the end
		"SeveralSpans": {Size: 130 << 20},   // two and a bit leaves
	} {
		t.Run(name, func(t *testing.T) {
			backendtest.Run(t, func(t *testing.T) backend.Store { return openMemory(t, c) })
		})
	}
}

func TestMemoryInfo(t *testing.T) {
	m := openMemory(t, backend.MemoryConfig{Size: 1 << 30, BlockSize: 4096})
	want := backend.Info{Size: 1 << 30, BlockSize: 4096, PhysicalBlockSize: 4096, DiscardGranularity: 64 << 10, Nonblocking: true, AtomicWrite: 1 << 20}
	if m.Info() != want {
		t.Errorf("Info() = %+v, want %+v", m.Info(), want)
	}
}

func TestMemoryConfig(t *testing.T) {
	for _, c := range []backend.MemoryConfig{
		{}, {Size: -512}, {Size: 513}, {Size: 512, BlockSize: 4096}, {Size: 4096, BlockSize: 1024},
		{Size: 64<<40 + 512}, {Size: 1<<63 - 512}, {Size: 4096, Limit: -1},
	} {
		if s, err := backend.OpenMemory(c); err == nil {
			t.Errorf("%+v gave %+v, want an error", c, s.Info())
		}
	}
}

// Writes take memory, and Discard frees it.
func TestMemoryUsed(t *testing.T) {
	const page = 64 << 10
	m := openMemory(t, backend.MemoryConfig{Size: 64 << 40})
	step := func(what string, want int64, err error) {
		t.Helper()
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if used, _, err := m.Usage(); err != nil || used != want {
			t.Errorf("after %s: %d bytes used, error %v; want %d", what, used, err, want)
		}
	}
	size, full := m.Info().Size, bytes.Repeat([]byte{0xa5}, 4*page)
	step("opening", 0, nil)
	step("reading", 0, m.ReadAt(make([]byte, 1<<20), 1<<40))
	step("writing zeros", 0, m.WriteAt(make([]byte, 1<<20), 1<<40))
	step("zeroing and discarding all", 0, errors.Join(m.Zero(0, size), m.Discard(0, size)))
	step("writing one byte", page, m.WriteAt(full[:1], 5))
	step("writing the last byte", 2*page, m.WriteAt(full[:1], size-1))
	step("writing four pages ragged", 7*page, m.WriteAt(full, 20*page+1))
	step("writing zeros there", 7*page, m.WriteAt(make([]byte, 4*page), 20*page+1))
	step("zeroing them", 7*page, m.Zero(20*page, 5*page))
	step("discarding less than a page", 7*page, m.Discard(20*page, page-1))
	step("discarding ragged", 4*page, m.Discard(20*page+1, 4*page))
	step("discarding the last block", 4*page, m.Discard(size-512, 512))
	step("discarding the last page", 3*page, m.Discard(size-page, page))
	step("discarding all", 0, m.Discard(0, size))
	step("discarding again", 0, m.Discard(0, size))
	step("writing", 5*page, m.WriteAt(full, 1))
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}

	// The last page is given back although it lies partly beyond the end.
	m = openMemory(t, backend.MemoryConfig{Size: page + 512})
	step("writing", 2*page, m.WriteAt(full[:page+512], 0))
	step("discarding the ragged end", page, m.Discard(page, 512))
}

func TestMemoryLimit(t *testing.T) {
	const page = 64 << 10
	m := openMemory(t, backend.MemoryConfig{Size: 1 << 30, Limit: 2*page + 5})
	p := bytes.Repeat([]byte{1}, page)
	for i := range int64(2) {
		if err := m.WriteAt(p, i*page); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.WriteAt(p[:1], 1<<20); !errors.Is(err, backend.ErrNoSpace) {
		t.Errorf("a third page: %v, want ErrNoSpace", err)
	}
	if used, _, err := m.Usage(); err != nil || used != 2*page {
		t.Errorf("%d bytes used, error %v; want %d", used, err, 2*page)
	}
	if err := m.WriteAt(p, page/2); err != nil {
		t.Errorf("rewriting: %v", err)
	}
	if err := m.Discard(0, page); err != nil {
		t.Fatal(err)
	}
	if err := m.WriteAt(p[:1], 1<<20); err != nil {
		t.Errorf("after a discard: %v", err)
	}
}

// Extent follows the page table, across leaves that exist and that do not.
func TestMemoryExtent(t *testing.T) {
	const page, leaf = 64 << 10, 64 << 20
	m := openMemory(t, backend.MemoryConfig{Size: 1 << 40})
	for _, off := range []int64{page, 2*page + 5, leaf - 1, leaf, 4*leaf + page} {
		if err := m.WriteAt([]byte{1}, off); err != nil {
			t.Fatal(err)
		}
	}
	wantExtents(t, m, []extent{
		{0, page, false}, {page, 2 * page, true}, {3 * page, leaf - 4*page, false},
		{leaf - page, 2 * page, true}, {leaf + page, 3 * leaf, false}, {4*leaf + page, page, true},
	})
	if err := m.Discard(page, page); err != nil {
		t.Fatal(err)
	}
	wantExtents(t, m, []extent{{0, 2 * page, false}, {2 * page, page, true}, {2*page + 7, page - 7, true}})
}

// An extent is a result of Extent at off.
type extent struct {
	off, n int64
	mapped bool
}

func wantExtents(t *testing.T, s backend.Store, want []extent) {
	t.Helper()
	for _, e := range want {
		mapped, n, err := backend.Extent(s, e.off)
		if mapped != e.mapped || n != e.n || err != nil {
			t.Errorf("Extent(%d) = %v, %d, %v; want %v, %d", e.off, mapped, n, err, e.mapped, e.n)
		}
	}
}

func TestMemoryAllocs(t *testing.T) {
	m := openMemory(t, backend.MemoryConfig{Size: 1 << 30})
	noAllocs(t, m)
}

// noAllocs checks that neither reading nor rewriting s allocates.
func noAllocs(t *testing.T, s backend.Store) {
	t.Helper()
	p := bytes.Repeat([]byte{7}, 128<<10)
	if err := s.WriteAt(p, 0); err != nil {
		t.Fatal(err)
	}
	for name, f := range map[string]func() error{
		"ReadAt":       func() error { return s.ReadAt(p, 0) },
		"WriteAt":      func() error { return s.WriteAt(p, 0) },
		"WriteDurable": func() error { return s.WriteDurable(p[:4096], 4096) },
	} {
		if n := testing.AllocsPerRun(50, func() {
			if err := f(); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}); n != 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
}

func benchmark(b *testing.B, s backend.Store, f func(p []byte, off int64) error) {
	const n, span = 4096, 64 << 20
	p := bytes.Repeat([]byte{7}, 1<<20)
	for off := int64(0); off < span; off += int64(len(p)) {
		if err := s.WriteAt(p, off); err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(n)
	b.ReportAllocs()
	off := int64(0)
	for b.Loop() {
		if err := f(p[:n], off); err != nil {
			b.Fatal(err)
		}
		off = (off + 257*n) % span
	}
}

func BenchmarkMemoryRead4K(b *testing.B) {
	s := openMemory(b, backend.MemoryConfig{Size: 1 << 30})
	benchmark(b, s, s.ReadAt)
}

func BenchmarkMemoryWrite4K(b *testing.B) {
	s := openMemory(b, backend.MemoryConfig{Size: 1 << 30})
	benchmark(b, s, s.WriteAt)
}

// Data that a concurrent write leaves after the end of a store that becomes smaller does not
// return when it becomes larger, and a Discard that began before does not lose later writes.
func TestMemoryCutOff(t *testing.T) {
	const small, large = 64 << 10, 2 << 20
	m := openMemory(t, backend.MemoryConfig{Size: large})
	data, got := bytes.Repeat([]byte{0xa5}, large-small), make([]byte, large-small)
	resize := func(size int64) {
		t.Helper()
		if err := m.Resize(size); err != nil {
			t.Fatal(err)
		}
	}
	start := func(f func() error) (wait func()) {
		begun, done := make(chan struct{}), make(chan error, 1)
		go func() {
			close(begun)
			done <- f()
		}()
		<-begun
		return func() {
			if err := <-done; err != nil && !errors.Is(err, backend.ErrRange) {
				t.Error(err)
			}
		}
	}
	for range 100 {
		wait := start(func() error { return m.WriteAt(data, small) })
		resize(small)
		wait()
		resize(large)
		if err := m.ReadAt(got, small); err != nil || bytes.IndexByte(got, 0xa5) >= 0 {
			t.Fatalf("what was cut off is there again: %v", err)
		}
	}
	const ragged = small + 4096
	for range 2000 {
		resize(ragged)
		wait := start(func() error { return m.Discard(small, ragged-small) })
		resize(large)
		if err := m.WriteAt(data[:512], ragged); err != nil {
			t.Fatal(err)
		}
		wait()
		if err := m.ReadAt(got[:512], ragged); err != nil || got[0] != 0xa5 {
			t.Fatalf("what was written after a Discard is lost: %v", err)
		}
	}
}
