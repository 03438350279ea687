package backend

import (
	"bytes"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"unsafe"
)

// taken returns how many pages of p are in use, and checks its lists.
func (p *pagePool) taken(t *testing.T) (n int) {
	t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	stale, some, empty := 0, 0, 0
	for _, c := range p.chunks {
		n += chunkPages - bits.OnesCount32(c.free)
		stale += bits.OnesCount32(c.stale)
		switch {
		case c.stale&^c.free != 0:
			t.Errorf("chunk %p: pages %08x are stale and not free", c, c.stale&^c.free)
		case c.free == 1<<chunkPages-1 && c.stale == 0:
			empty++
		case c.free != 0:
			some++
			if p.some[c.index] != c {
				t.Errorf("chunk %p is not where its index says", c)
			}
		}
	}
	if stale != p.stale || stale > maxStale+chunkPages || some != len(p.some) || empty != len(p.empty) {
		t.Errorf("%d stale pages, counted as %d; chunks with free pages: %d, listed %d; empty ones: %d, listed %d", stale, p.stale, some, len(p.some), empty, len(p.empty))
	}
	return n
}

// Pages belong to one caller each, in one arena as long as they fit, and have zeros, or old data if the caller overwrites all of it. Those that are
// free have no memory, except a few.
func TestPagePool(t *testing.T) {
	var p pagePool
	r := rand.New(rand.NewPCG(1, 2))
	held := map[*[memoryPage]byte]byte{}
	var order []*[memoryPage]byte
	for step := range 20000 {
		if r.IntN(1000) < 500+200*(1-step/5000%2*2) && len(order) < arenaSize/memoryPage || len(order) == 0 {
			whole := r.IntN(2) == 0
			page := p.get(whole)
			switch _, twice := held[page]; {
			case twice:
				t.Fatal("a page has two owners")
			case !whole && !isZero(page[:]):
				t.Fatal("a page has old data")
			}
			b := byte(1 + step%255)
			page[0], page[memoryPage-1] = b, b
			held[page] = b
			order = append(order, page)
			continue
		}
		i := r.IntN(len(order))
		page := order[i]
		if b := held[page]; page[0] != b || page[memoryPage-1] != b {
			t.Fatal("the data of a page has changed")
		}
		delete(held, page)
		order[i] = order[len(order)-1]
		order = order[:len(order)-1]
		p.put(page, false)
	}
	if n := p.taken(t); n != len(order) {
		t.Errorf("%d pages are in use, want %d", n, len(order))
	}
	if n := p.mapped.Load(); n != arenaSize {
		t.Errorf("%d bytes are mapped, want %d", n, arenaSize)
	}
	for _, page := range order {
		p.put(page, false)
	}
	if n := p.taken(t); n != 0 {
		t.Errorf("%d pages are in use, want none", n)
	}
	for _, c := range p.chunks {
		if !isZero(c.mem[:]) {
			t.Fatal("a chunk without pages in use has its memory still")
		}
	}
}

// A page of the heap, which a store got because the kernel had refused memory, is left to the collector.
func TestPageOfTheHeap(t *testing.T) {
	var p pagePool
	p.put(new([memoryPage]byte), false)
	if len(p.chunks)+len(p.some)+len(p.empty)+p.stale != 0 {
		t.Errorf("it is in the pool: %+v", &p)
	}
}

// The kernel knows that arenas should have huge pages, if it has any, and each chunk can be one.
func TestPagesMayBeHuge(t *testing.T) {
	_, err := os.Stat("/sys/kernel/mm/transparent_hugepage/enabled")
	want := err == nil // else the kernel has none, and the memory is in small pages
	var p pagePool
	page := p.get(true)
	page[0] = 1
	at := uintptr(unsafe.Pointer(page))
	if at%chunkSize != 0 {
		t.Errorf("the first page is at %#x", at)
	}
	b, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	inside := false
	for line := range strings.Lines(string(b)) {
		var from, to uintptr
		if n, _ := fmt.Sscanf(line, "%x-%x ", &from, &to); n == 2 {
			inside = from <= at && at < to
		}
		if flags, ok := strings.CutPrefix(line, "VmFlags:"); ok && inside {
			if strings.Contains(flags, " hg") != want {
				t.Errorf("the memory at %#x has the flags%s; the kernel has huge pages: %v", at, flags, want)
			}
			return
		}
	}
	t.Error("/proc/self/smaps does not have the page")
}

// A store gives back every page that it took, when the last loan of the page ends: replaced and discarded pages, and all others when it closes.
func TestStoreGivesPagesBack(t *testing.T) {
	before := pages.taken(t)
	const size = 200 * memoryPage
	r := rand.New(rand.NewPCG(3, 4))
	data := bytes.Repeat([]byte{7}, 3*memoryPage)
	m := openMemory(t, size)
	var loans []*Loan
	for range 3000 {
		n := 512 + 512*r.Int64N(int64(len(data))/512)
		off := 512 * r.Int64N((size-n)/512)
		var err error
		switch r.IntN(5) {
		case 0, 1:
			err = m.WriteAt(data[:n], off)
		case 2:
			err = m.Discard(off, n)
		case 3:
			var l *Loan
			if _, l, err = m.Lend(off, n); err == nil {
				loans = append(loans, l)
			}
		default:
			if n := len(loans); n > 0 {
				loans[n-1].Return()
				loans = loans[:n-1]
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	lent := map[*Loan]bool{}
	for _, l := range loans {
		if l != &zeroPage {
			lent[l] = true
		}
	}
	if len(lent) == 0 {
		t.Error("nothing is lent at the end")
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if n := pages.taken(t) - before; n != len(lent) {
		t.Errorf("%d pages are in use after the end of the store, and %d are lent", n, len(lent))
	}
	for _, l := range loans {
		l.Return()
	}
	if n := pages.taken(t) - before; n != 0 {
		t.Errorf("%d pages are in use after the last loan", n)
	}
}

// A write that began before the store closed takes no page any longer.
func TestWriteAfterClose(t *testing.T) {
	m := openMemory(t, 4*memoryPage)
	if err := m.WriteAt([]byte{1}, 0); err != nil {
		t.Fatal(err)
	}
	before := pages.taken(t)
	l := m.leaf(0)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	(*m.root.Load())[0].Store(l) // as if the write had found it before
	if err := m.write([]byte{1}, memoryPage, 0); !errors.Is(err, ErrClosed) {
		t.Errorf("it wrote: %v", err)
	}
	if pages.taken(t) != before-1 {
		t.Error("it took a page")
	}
}
