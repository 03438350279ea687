package backend

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// chunkSize is a huge page of x86-64 and of most ARM machines.
	chunkSize = 2 << 20
	// chunkPages fit the bits of a uint32.
	chunkPages = chunkSize / memoryPage
	// arenaSize is how much address space a pagePool takes at a time.
	arenaSize = 64 << 20
	// maxStale is how many free pages may keep their memory, apart from those of one huge page.
	maxStale = 64
)

// pages has the pages of all memory stores, so that small stores share huge pages.
var pages pagePool

// A pagePool has memory outside of the heap of Go, which the kernel backs by huge pages if it can: with pages of 4 KiB, the processor spends much of the time of
// a copy on finding them. The collector neither waits for that memory to be twice as much before it runs, nor for its next run to give it back.
//
//	arena 64 MiB ─ chunk 2 MiB ─ page 64 KiB
//
// Arenas are never unmapped. Free pages lose their memory, chunk by chunk.
type pagePool struct {
	mapped atomic.Int64 // bytes in arenas

	grows sync.Mutex
	grown func(mapped int64) // of OnPages; guarded by grows

	mu     sync.Mutex
	arena  []byte             // not yet in chunks
	chunks map[uintptr]*chunk // by address
	some   []*chunk           // with free pages, and others
	empty  []*chunk           // with nothing but free pages, which have no memory
	stale  int                // free pages that have memory
}

// A chunk is a huge page.
type chunk struct {
	mem   *[chunkSize]byte
	free  uint32 // a bit for each page
	stale uint32 // those of free that have memory, with old data
	index int    // in pagePool.some
}

// OnPages calls f with how many bytes of address space memory stores have for their pages, now and whenever that grows. They never have less again.
func OnPages(f func(mapped int64)) {
	pages.grows.Lock()
	pages.grown = f
	pages.grows.Unlock()
	pages.hasGrown()
}

// hasGrown calls what OnPages has got.
func (p *pagePool) hasGrown() {
	p.grows.Lock()
	defer p.grows.Unlock()
	if p.grown != nil {
		p.grown(p.mapped.Load())
	}
}

// get returns a page of zeros; unless whole, when the caller overwrites all of it.
func (p *pagePool) get(whole bool) *[memoryPage]byte {
	page, stale, grown := p.take()
	if grown {
		p.hasGrown()
	}
	if page == nil { // the kernel has no address space for us, but maybe for the heap
		return new([memoryPage]byte)
	}
	if stale && !whole {
		clear(page[:])
	}
	return page
}

// take takes a free page; nil: the kernel refuses memory. It prefers pages that have memory. grown: it has mapped another arena.
func (p *pagePool) take() (page *[memoryPage]byte, stale, grown bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.some) == 0 {
		var c *chunk
		if c, grown = p.takeChunk(); c == nil {
			return nil, false, false
		}
		p.add(c)
	}
	c := p.some[len(p.some)-1]
	from := c.free
	if stale = c.stale != 0; stale {
		from = c.stale
		p.stale--
	}
	i := bits.TrailingZeros32(from)
	c.free &^= 1 << i
	c.stale &^= 1 << i
	if c.free == 0 {
		p.remove(c)
	}
	return c.page(i), stale, grown
}

// chunkOf returns the chunk of a page, and its place there; nil: the page is of the heap.
//
// Preconditions: p.mu is held.
func (p *pagePool) chunkOf(page *[memoryPage]byte) (c *chunk, i int) {
	at := uintptr(unsafe.Pointer(page))
	return p.chunks[at-at%chunkSize], int(at % chunkSize / memoryPage)
}

// has reports whether a page is not of the heap.
func (p *pagePool) has(page *[memoryPage]byte) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, _ := p.chunkOf(page)
	return c != nil
}

// put makes a page free that get has returned. shared: the kernel may refer to its memory, so the page gets other memory.
func (p *pagePool) put(page *[memoryPage]byte, shared bool) {
	if shared && unix.Madvise(page[:], unix.MADV_DONTNEED) != nil {
		return // of locked memory: nobody uses the page again
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	c, i := p.chunkOf(page)
	if c == nil {
		return
	}
	if c.free == 0 {
		p.add(c)
	}
	bit := uint32(1) << i
	c.free |= bit
	if !shared {
		c.stale |= bit
		p.stale++
	}
	switch {
	case c.free == 1<<chunkPages-1:
		p.remove(c)
		p.empty = append(p.empty, c)
		p.drop(c)
	case p.stale > maxStale:
		p.drop(c)
	}
}

// takeChunk returns a chunk of free pages; nil: the kernel refuses.
//
// Preconditions: p.mu is held; so it is for all functions below.
func (p *pagePool) takeChunk() (c *chunk, grown bool) {
	if n := len(p.empty); n > 0 {
		c = p.empty[n-1]
		p.empty = p.empty[:n-1]
		return c, false
	}
	if len(p.arena) == 0 {
		p.arena = mapArena()
		if p.arena == nil {
			return nil, false
		}
		p.mapped.Add(arenaSize)
		grown = true
	}
	c = &chunk{mem: (*[chunkSize]byte)(p.arena), free: 1<<chunkPages - 1}
	p.arena = p.arena[chunkSize:]
	if p.chunks == nil {
		p.chunks = map[uintptr]*chunk{}
	}
	p.chunks[uintptr(unsafe.Pointer(c.mem))] = c
	return c, grown
}

// mapArena returns the memory of an arena, in huge pages if the kernel has some; nil: it refuses.
func mapArena() []byte {
	m, err := unix.Mmap(-1, 0, arenaSize+chunkSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return nil
	}
	before := int(-uintptr(unsafe.Pointer(unsafe.SliceData(m))) % chunkSize)
	arena := m[before : before+arenaSize : before+arenaSize]
	_ = unix.Madvise(arena, unix.MADV_HUGEPAGE) // without it the memory is as slow as that of others
	return arena
}

// drop gives the memory of the free pages of c back to the kernel.
func (p *pagePool) drop(c *chunk) {
	p.stale -= bits.OnesCount32(c.stale)
	for s := c.stale; s != 0; {
		from := bits.TrailingZeros32(s)
		n := bits.TrailingZeros32(^(s >> from))
		mem := c.mem[from*memoryPage : (from+n)*memoryPage]
		if unix.Madvise(mem, unix.MADV_DONTNEED) != nil { // of locked memory: nobody may see the old data all the same
			clear(mem)
		}
		s &^= (1<<n - 1) << from
	}
	c.stale = 0
}

// add adds c to some.
func (p *pagePool) add(c *chunk) {
	c.index = len(p.some)
	p.some = append(p.some, c)
}

// remove removes c from some.
func (p *pagePool) remove(c *chunk) {
	last := len(p.some) - 1
	p.some[c.index] = p.some[last]
	p.some[c.index].index = c.index
	p.some[last] = nil
	p.some = p.some[:last]
}

// page returns a page of c.
func (c *chunk) page(i int) *[memoryPage]byte { return (*[memoryPage]byte)(c.mem[i*memoryPage:]) }
