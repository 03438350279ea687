package backend

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// What was lent does not change, whatever happens to the store, and the store has what was written.
func TestLoansDoNotChange(t *testing.T) {
	const size = 4 * memoryPage
	old, fresh := bytes.Repeat([]byte("old!"), size/4), bytes.Repeat([]byte("new?"), size/4)
	taken := func(t *testing.T, m *Memory) *Memory {
		f := memoryFile(t)
		if err := m.CopyTo(f); err != nil {
			t.Fatal(err)
		}
		next := openMemory(t, size)
		if err := errors.Join(next.Take(f), m.Close()); err != nil {
			t.Fatal(err)
		}
		return next
	}
	for name, tc := range map[string]struct {
		change func(m *Memory) error
		want   func(data []byte) // makes the old data the new data; nil: the store is closed
	}{
		"a write of a page":    {func(m *Memory) error { return m.WriteAt(fresh[:memoryPage], memoryPage) }, func(p []byte) { copy(p[memoryPage:], fresh[:memoryPage]) }},
		"a write of a block":   {func(m *Memory) error { return m.WriteAt(fresh[:512], memoryPage+512) }, func(p []byte) { copy(p[memoryPage+512:], fresh[:512]) }},
		"a write of zeros":     {func(m *Memory) error { return m.WriteAt(make([]byte, 512), 0) }, func(p []byte) { clear(p[:512]) }},
		"Zero":                 {func(m *Memory) error { return m.Zero(512, size-512) }, func(p []byte) { clear(p[512:]) }},
		"Discard":              {func(m *Memory) error { return m.Discard(512, size-512) }, func(p []byte) { clear(p[512:]) }},
		"a smaller store":      {func(m *Memory) error { return errors.Join(m.Resize(memoryPage+512), m.Resize(size)) }, func(p []byte) { clear(p[memoryPage+512:]) }},
		"the end of the store": {func(m *Memory) error { return m.Close() }, nil},
	} {
		for _, mapped := range []bool{false, true} {
			t.Run(name, func(t *testing.T) {
				m := openMemory(t, size)
				if err := m.WriteAt(old, 0); err != nil {
					t.Fatal(err)
				}
				if mapped {
					m = taken(t, m)
				}
				var lent [][]byte
				var loans []*Loan
				for range 2 { // to two readers
					for off := int64(0); off < size; {
						p, l, err := m.Lend(off, size-off)
						if err != nil {
							t.Fatal(err)
						}
						lent, loans, off = append(lent, p), append(loans, l), off+int64(len(p))
					}
				}
				check := func() {
					t.Helper()
					if !bytes.Equal(bytes.Join(lent, nil), append(bytes.Clone(old), old...)) {
						t.Error("what was lent has changed")
					}
				}
				check()
				if err := tc.change(m); err != nil {
					t.Fatal(err)
				}
				check()
				if tc.want == nil {
					if _, _, err := m.Lend(0, 512); !errors.Is(err, ErrClosed) {
						t.Errorf("a closed store lends: %v", err)
					}
				} else {
					want, got := bytes.Clone(old), make([]byte, size)
					tc.want(want)
					if err := m.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
						t.Errorf("the store has other data: %v", err)
					}
					if used, _, err := m.Usage(); err != nil || used > size {
						t.Errorf("%d bytes are used, %v", used, err)
					}
				}
				for _, l := range loans {
					l.Return()
				}
			})
		}
	}
}

// Pages that nobody has borrowed are written in place, and those that were borrowed once are too when they are back.
func TestReturnedPagesAreWrittenInPlace(t *testing.T) {
	m := openMemory(t, memoryPage)
	data := bytes.Repeat([]byte("data"), 128)
	m.WriteAt(data, 0)
	page := m.slot(0).page
	_, l, err := m.Lend(0, 512)
	if err != nil {
		t.Fatal(err)
	}
	l.Return()
	if m.WriteAt(data, 512); m.slot(0).page != page {
		t.Error("a page that is back was replaced")
	}
	if _, _, err := m.Lend(512, 512); err != nil {
		t.Fatal(err)
	}
	if m.WriteAt(data, 1024); m.slot(0).page == page {
		t.Error("a page that is lent was written to")
	}
}

// A store without data lends zeros, and nothing outside its range.
func TestLoansOfNothing(t *testing.T) {
	m := openMemory(t, 2*leafSpan)
	m.WriteAt([]byte{1}, 0)
	for _, off := range []int64{memoryPage, leafSpan + 512} {
		p, l, err := m.Lend(off, memoryPage)
		if err != nil || len(p) == 0 || !isZero(p) {
			t.Errorf("Lend(%d): %d bytes, %v", off, len(p), err)
			continue
		}
		l.Return()
	}
	for _, tc := range [][2]int64{{-1, 512}, {2 * leafSpan, 512}, {2*leafSpan - 512, 1024}} {
		if _, _, err := m.Lend(tc[0], tc[1]); !errors.Is(err, ErrRange) {
			t.Errorf("Lend(%d, %d): %v", tc[0], tc[1], err)
		}
	}
}

// Nothing that is lent changes while others write, discard and zero at random.
func TestLoansWhileOthersWrite(t *testing.T) {
	const pages, writers, readers = 4, 2, 3
	m := openMemory(t, pages*memoryPage)
	end := time.Now().Add(300 * time.Millisecond)
	var all sync.WaitGroup
	for i := range writers {
		all.Go(func() {
			r, p := rand.New(rand.NewPCG(1, uint64(i))), make([]byte, memoryPage)
			for n := uint32(1); time.Now().Before(end); n++ {
				off, size := r.Int64N(pages)*memoryPage, int64(512)<<r.IntN(8)
				for j := range p {
					p[j] = byte(n)
				}
				var err error
				switch r.IntN(8) {
				case 0:
					err = m.Discard(off, size)
				case 1:
					err = m.Zero(off, size)
				default:
					err = m.WriteAt(p[:size], off)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range readers {
		all.Go(func() {
			r, p := rand.New(rand.NewPCG(2, uint64(i))), make([]byte, memoryPage)
			for time.Now().Before(end) {
				got, l, err := m.Lend(r.Int64N(pages)*memoryPage, memoryPage)
				if err != nil {
					t.Error(err)
					return
				}
				copy(p, got)
				for range r.IntN(4) {
					time.Sleep(10 * time.Microsecond) // others write meanwhile
					if !bytes.Equal(p, got) {
						t.Error("what was lent has changed")
					}
				}
				l.Return()
			}
		})
	}
	all.Wait()
}

// A spare page does not show what another store had in it.
func TestSparePagesShowNothing(t *testing.T) {
	secret, public := openMemory(t, memoryPage), openMemory(t, memoryPage)
	secret.WriteAt(bytes.Repeat([]byte("secret"), memoryPage/6), 0)
	public.WriteAt([]byte{1}, 0)
	for n := range uint64(100) {
		_, l, err := secret.Lend(0, memoryPage)
		if err != nil {
			t.Fatal(err)
		}
		secret.WriteAt([]byte("secret"), 0)
		l.Return() // the page is spare
		_, l, err = public.Lend(0, memoryPage)
		if err != nil {
			t.Fatal(err)
		}
		public.WriteAt(binary.BigEndian.AppendUint64(nil, n), 0) // takes a spare page
		l.Return()
		got := make([]byte, memoryPage)
		if public.ReadAt(got, 0); !isZero(got[8:]) {
			t.Fatalf("%.30q is in the other store", got)
		}
	}
}

// Lending allocates nothing but a Loan for each page, once.
func TestLendingAllocatesNothing(t *testing.T) {
	m := openMemory(t, memoryPage)
	m.WriteAt([]byte{1}, 0)
	lend := func() {
		_, l, err := m.Lend(0, memoryPage)
		if err != nil {
			t.Fatal(err)
		}
		l.Return()
	}
	lend()
	if n := testing.AllocsPerRun(100, lend); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkLend compares a loan with a copy, and a write to a page that is lent with one to a page that is not.
func BenchmarkLend(b *testing.B) {
	const size = 64 << 20
	s, err := OpenMemory(MemoryConfig{Size: size})
	if err != nil {
		b.Fatal(err)
	}
	m, p := s.(*Memory), bytes.Repeat([]byte("data"), memoryPage/4)
	for off := int64(0); off < size; off += memoryPage {
		m.WriteAt(p, off)
	}
	off := int64(0)
	next := func() int64 { off = (off + 17*memoryPage) % size; return off }
	lend := func() *Loan {
		_, l, err := m.Lend(off, memoryPage)
		if err != nil {
			b.Fatal(err)
		}
		return l
	}
	for name, f := range map[string]func(){
		"copy":       func() { m.ReadAt(p, next()) },
		"lend":       func() { next(); lend().Return() },
		"write":      func() { m.WriteAt(p[:4096], next()) },
		"write/lent": func() { next(); l := lend(); m.WriteAt(p[:4096], off); l.Return() },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				f()
			}
		})
	}
}

// A call during Close returns data or an error, never the zeros of pages that Close has freed.
func TestNoZerosWhileAStoreCloses(t *testing.T) {
	const size = 16 * memoryPage
	data := bytes.Repeat([]byte("data"), memoryPage/4)
	for name, call := range map[string]func(m *Memory, off int64) (ok bool, err error){
		"ReadAt": func(m *Memory, off int64) (bool, error) {
			p := make([]byte, 4096)
			err := m.ReadAt(p, off)
			return bytes.Equal(p, data[:len(p)]), err
		},
		"Lend": func(m *Memory, off int64) (bool, error) {
			p, loan, err := m.Lend(off, 4096)
			if err != nil {
				return false, err
			}
			defer loan.Return()
			return bytes.Equal(p, data[:len(p)]), nil
		},
		"Extent": func(m *Memory, off int64) (bool, error) {
			mapped, _, err := m.Extent(off)
			return mapped, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			for range 100 {
				m := openMemory(t, size)
				for off := int64(0); off < size; off += memoryPage {
					if err := m.WriteAt(data, off); err != nil {
						t.Fatal(err)
					}
				}
				var all, begun sync.WaitGroup
				for i := range int64(2) {
					begun.Add(1)
					all.Go(func() {
						for n := i; ; n++ {
							ok, err := call(m, n*memoryPage%size)
							if n == i {
								begun.Done()
							}
							if errors.Is(err, ErrClosed) {
								return
							}
							if err != nil || !ok {
								t.Errorf("other data than was written, %v", err)
								return
							}
						}
					})
				}
				begun.Wait()
				if err := m.Close(); err != nil {
					t.Fatal(err)
				}
				all.Wait()
			}
		})
	}
}

// inPipe makes a pipe refer to p, and returns a function that reads what it refers to now.
func inPipe(t *testing.T, p []byte) (read func() []byte) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	iov := []unix.Iovec{{Base: &p[0]}}
	iov[0].SetLen(len(p))
	if n, err := unix.Vmsplice(int(w.Fd()), iov, 0); n != len(p) || err != nil {
		t.Fatal(n, err)
	}
	return func() []byte {
		got := make([]byte, len(p))
		if _, err := io.ReadFull(r, got); err != nil {
			t.Error(err)
		}
		return got
	}
}

// The kernel may refer to a shared page when its loan is over, because an initiator says that it has data which it has not. So no other store gets the memory,
// neither that of a page that was replaced, nor that of one that was discarded, nor that of a store that was closed.
func TestSharedPagesAreNotReused(t *testing.T) {
	const size = 40 * memoryPage // more than a huge page
	for name, free := range map[string]func(m *Memory, l *Loan) error{
		"replaced": func(m *Memory, l *Loan) error {
			err := m.WriteAt(make([]byte, size), 0)
			l.Return()
			return err
		},
		"discarded": func(m *Memory, l *Loan) error { l.Return(); return m.Discard(0, size) },
		"closed":    func(m *Memory, l *Loan) error { l.Return(); return m.Close() },
		"closed before the end of the loan": func(m *Memory, l *Loan) error {
			err := m.Close()
			l.Return()
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := openMemory(t, size)
			old := bytes.Repeat([]byte("old!"), size/4)
			if err := m.WriteAt(old, 0); err != nil {
				t.Fatal(err)
			}
			p, l, err := m.Lend(memoryPage, 60<<10)
			if err != nil {
				t.Fatal(err)
			}
			if !l.Share() {
				t.Fatal("the page is of the heap")
			}
			read := inPipe(t, p)
			if err := free(m, l); err != nil {
				t.Fatal(err)
			}
			other := openMemory(t, 2*size)
			secret := bytes.Repeat([]byte("secret! "), size/4)
			if err := other.WriteAt(secret, 0); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(read(), old[:60<<10]) {
				t.Error("the kernel refers to memory of another store")
			}
			got := make([]byte, 2*size)
			if err := other.ReadAt(got, 0); err != nil || !bytes.Equal(got, secret) {
				t.Errorf("the other store has other data: %v", err)
			}
		})
	}
}

// A store keeps some of the shared pages that it has replaced for others that it replaces, and frees them when it is closed.
func TestSparePages(t *testing.T) {
	const n = 10 * maxSparePages
	before := pages.taken(t)
	m := openMemory(t, n*memoryPage)
	data := bytes.Repeat([]byte("data"), n*memoryPage/4)
	for round := range 3 {
		if err := m.WriteAt(data, 0); err != nil {
			t.Fatal(err)
		}
		var loans []*Loan
		for i := range int64(n) {
			_, l, err := m.Lend(i*memoryPage, memoryPage)
			if err != nil || !l.Share() {
				t.Fatal(err)
			}
			loans = append(loans, l)
		}
		copy(data, fmt.Sprint("round ", round))
		if err := m.WriteAt(data[:n*memoryPage-512], 0); err != nil { // replaces all, of the last one a part
			t.Fatal(err)
		}
		for _, l := range loans {
			l.Return()
		}
		if got := pages.taken(t) - before; got != n+maxSparePages {
			t.Errorf("%d pages are taken, want %d and %d to spare", got, n, maxSparePages)
		}
		got := make([]byte, len(data))
		if err := m.ReadAt(got, 0); err != nil || !bytes.Equal(got, data) {
			t.Errorf("the store has other data: %v", err)
		}
	}
	if err := m.Discard(0, (n-16)*memoryPage); err != nil {
		t.Fatal(err)
	}
	if got := pages.taken(t) - before; got != 16+2 {
		t.Errorf("after Discard %d pages are taken, want 16 and an eighth of that to spare", got)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if got := pages.taken(t); got != before {
		t.Errorf("%d pages are left", got-before)
	}
}

// What was lent and abandoned never changes, and its page is free when the store does not need it any longer.
func TestAbandonedLoans(t *testing.T) {
	const size = 4 * memoryPage
	before := pages.taken(t)
	m := openMemory(t, size)
	old, fresh := bytes.Repeat([]byte("old!"), size/4), bytes.Repeat([]byte("new?"), size/4)
	if err := m.WriteAt(old, 0); err != nil {
		t.Fatal(err)
	}
	p, l, err := m.Lend(memoryPage+512, 1024)
	if err != nil || !l.Share() {
		t.Fatal(err)
	}
	read := inPipe(t, p)
	l.Abandon()
	for range 2 {
		if err := m.WriteAt(fresh[:512], memoryPage+512); err != nil {
			t.Fatal(err)
		}
	}
	if got := pages.taken(t) - before; got != 4 {
		t.Errorf("%d pages are taken, want 4: the abandoned one is free", got)
	}
	if !bytes.Equal(read(), old[:1024]) {
		t.Error("what was lent has changed")
	}
	got := make([]byte, 1024)
	if err := m.ReadAt(got, memoryPage+512); err != nil || !bytes.Equal(got, append(bytes.Clone(fresh[:512]), old[:512]...)) {
		t.Errorf("the store has other data: %v", err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if got := pages.taken(t); got != before {
		t.Errorf("%d pages are left", got-before)
	}
}

// A page of the heap, which the collector frees, is not shared.
func TestPagesOfTheHeapAreNotShared(t *testing.T) {
	if (&Loan{page: new([memoryPage]byte)}).Share() {
		t.Error("the kernel may refer to memory of the heap")
	}
	m := openMemory(t, memoryPage)
	if _, l, err := m.Lend(0, 512); err != nil || !l.Share() {
		t.Errorf("zeros that are never freed are not shared: %v", err)
	}
}
