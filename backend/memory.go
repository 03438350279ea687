package backend

import (
	"bytes"
	"fmt"
	"sync"
	"sync/atomic"
)

const (
	// memoryPage is what a memory store allocates at a time, in octets. Larger
	// pages waste more under scattered small writes, smaller ones need a
	// larger table.
	memoryPage = 64 << 10
	// leafPages is the number of pages whose slots are allocated together.
	leafPages = 1024
	leafSpan  = leafPages * memoryPage // octets of the store below one leaf: 64 MiB
	// maxMemorySize bounds the root of the table to 8 MiB of memory.
	maxMemorySize = 64 << 40
	// memoryAtomic is the longest write that memory stores call atomic.
	memoryAtomic = 1 << 20
)

// MemoryConfig describes a memory store. The zero value of a field other than
// Size means its default.
type MemoryConfig struct {
	Size      int64  // octets, a multiple of BlockSize, at most 64 TiB
	BlockSize uint32 // 512 or 4096; default 512
	// Limit is the most memory, in octets, that the data may use; a write
	// beyond it fails with ErrNoSpace. Default: no limit other than Size.
	Limit int64
}

// Memory is a Store in the memory of this process; its data ends with it. It
// is sparse: memory is allocated in pages of 64 KiB as it is written, and
// Discard of whole pages gives it back. Beside the data, a table of 32 KiB is
// kept for every 64 MiB of the store that were ever written to.
//
//	root ─ leaf ─ slot ─ page
//	       64 MiB of the store each; nil until first written
//	              64 KiB each, with the lock of its page
//	                     nil where the store reads as zeros
type Memory struct {
	info   Info // but for Size
	size   atomic.Int64
	limit  int64
	used   atomic.Int64 // octets in pages
	closed atomic.Bool
	root   atomic.Pointer[[]atomic.Pointer[leaf]] // a longer one takes its place

	mu sync.Mutex // held while a leaf is made, and by Resize and Close
}

type leaf [leafPages]slot

// A slot holds one page. There is no lock but these on the data path: accesses
// to different pages never wait for one another, and reads of one page run
// together.
type slot struct {
	mu   sync.RWMutex
	page *[memoryPage]byte // guarded by mu
}

// OpenMemory makes a memory store that reads as zeros. The Store is a *Memory.
func OpenMemory(c MemoryConfig) (Store, error) {
	if c.BlockSize == 0 {
		c.BlockSize = defaultBlockSize
	}
	info := Info{
		Size:               c.Size,
		BlockSize:          c.BlockSize,
		PhysicalBlockSize:  c.BlockSize, // no access costs a read-modify-write
		DiscardGranularity: memoryPage,
		// There is no cache in front of the medium: what WriteAt has written
		// is where it will ever be. That the medium itself forgets when the
		// power fails is no cache either, and no sync would help.
		VolatileCache: false,
		Nonblocking:   true,
		// What survives neither a power failure nor the process has no part
		// that could. The limit keeps writes that are collected short.
		AtomicWrite: memoryAtomic,
	}
	switch {
	case c.Size > maxMemorySize:
		return nil, fmt.Errorf("memory store: size %d: want at most %d octets", c.Size, int64(maxMemorySize))
	case c.Limit < 0:
		return nil, fmt.Errorf("memory store: limit %d is negative", c.Limit)
	}
	if err := info.Validate(); err != nil {
		return nil, fmt.Errorf("memory store: %w", err)
	}
	m := &Memory{info: info, limit: c.Limit}
	m.size.Store(c.Size)
	root := make([]atomic.Pointer[leaf], leavesOf(c.Size))
	m.root.Store(&root)
	return m, nil
}

// leavesOf is how many leaves a store of that size can have.
func leavesOf(size int64) int64 { return (size + leafSpan - 1) / leafSpan }

// Info implements Store.
func (m *Memory) Info() Info {
	info := m.info
	info.Size = m.size.Load()
	return info
}

// Resize implements Resizer. A write that is under way may leave data behind the end
// of a store that becomes smaller; that is gone when the store becomes larger again.
func (m *Memory) Resize(size int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed.Load():
		return ErrClosed
	case size <= 0 || size > maxMemorySize || size%int64(m.info.BlockSize) != 0:
		return fmt.Errorf("size %d: want a multiple of the block size %d, at most %d octets", size, m.info.BlockSize, int64(maxMemorySize))
	}
	if old := m.size.Load(); size < old {
		if err := m.Discard(size, old-size); err != nil {
			return err
		}
	}
	if old := *m.root.Load(); leavesOf(size) > int64(len(old)) {
		root := make([]atomic.Pointer[leaf], leavesOf(size))
		for i := range old {
			root[i].Store(old[i].Load())
		}
		m.root.Store(&root)
	}
	if old := m.size.Load(); size > old {
		m.clearPages(old, size, m.discardPart)
	}
	m.size.Store(size)
	return nil
}

// leaf is that of off, or nil.
func (m *Memory) leaf(off int64) *leaf { return (*m.root.Load())[off/leafSpan].Load() }

// makeLeaf is leaf, where there is none yet.
func (m *Memory) makeLeaf(off int64) *leaf {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed.Load() {
		return nil
	}
	p := &(*m.root.Load())[off/leafSpan]
	if p.Load() == nil {
		p.Store(new(leaf))
	}
	return p.Load()
}

// ReadAt implements Store. It does not allocate.
func (m *Memory) ReadAt(p []byte, off int64) error {
	if err := m.check(off, int64(len(p))); err != nil {
		return err
	}
	for len(p) > 0 {
		in := int(off % memoryPage)
		n := min(len(p), memoryPage-in)
		m.slot(off).read(p[:n], in)
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// WriteAt implements Store. It allocates the pages that are missing, unless
// there is nothing but zeros to write to them.
func (m *Memory) WriteAt(p []byte, off int64) error {
	if err := m.check(off, int64(len(p))); err != nil {
		return err
	}
	for len(p) > 0 {
		in := int(off % memoryPage)
		n := min(len(p), memoryPage-in)
		if err := m.write(p[:n], off, in); err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// WriteDurable implements Store: memory is as stable as it will ever be.
func (m *Memory) WriteDurable(p []byte, off int64) error { return m.WriteAt(p, off) }

// Sync implements Store.
func (m *Memory) Sync() error { return m.check(0, 0) }

// Discard implements Store. Pages that lie wholly in the range are freed.
func (m *Memory) Discard(off, n int64) error { return m.clear(off, n, m.discardPart) }

// discardPart is Discard for a part of a page.
//
// Preconditions: s is locked.
func (m *Memory) discardPart(s *slot, from, to int) {
	if to-from == memoryPage {
		s.page = nil
		m.used.Add(-memoryPage)
		return
	}
	clear(s.page[from:to])
}

// Zero implements Store. Pages keep their memory.
func (m *Memory) Zero(off, n int64) error {
	return m.clear(off, n, func(s *slot, from, to int) { clear(s.page[from:to]) })
}

// Extent implements Mapper: pages take space.
func (m *Memory) Extent(off int64) (mapped bool, n int64, err error) {
	if m.closed.Load() {
		return false, 0, ErrClosed
	}
	size := m.size.Load() // which may be another one soon
	if err := checkRange(size, off, 1); err != nil {
		return false, 0, err
	}
	mapped, end := m.allocated(off), off
	for range 16 * leafPages { // of 64 KiB or 64 MiB
		if end >= size || m.allocated(end) != mapped {
			break
		}
		if m.leaf(end) == nil {
			end += leafSpan - end%leafSpan
		} else {
			end += memoryPage - end%memoryPage
		}
	}
	return mapped, min(end, size) - off, nil
}

// Usage implements Gauge: used is the memory that the data takes, a multiple of 64 KiB.
func (m *Memory) Usage() (used, free int64, err error) {
	if m.closed.Load() {
		return 0, 0, ErrClosed
	}
	most := (m.size.Load() + memoryPage - 1) / memoryPage * memoryPage
	if m.limit > 0 {
		most = min(most, m.limit)
	}
	used = m.used.Load()
	return used, max(most-used, 0), nil
}

// allocated tells whether off lies in a page that takes space.
func (m *Memory) allocated(off int64) bool {
	s := m.slot(off)
	if s == nil {
		return false
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.page != nil
}

// Close implements Store and frees the data.
func (m *Memory) Close() error {
	if m.closed.Swap(true) {
		return ErrClosed
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	root := *m.root.Load()
	for i := range root {
		root[i].Store(nil)
	}
	m.used.Store(0)
	return nil
}

func (m *Memory) check(off, n int64) error {
	if m.closed.Load() {
		return ErrClosed
	}
	return checkRange(m.size.Load(), off, n)
}

// slot returns the slot of the page that off lies in, or nil when nothing was
// written near it.
func (m *Memory) slot(off int64) *slot {
	l := m.leaf(off)
	if l == nil {
		return nil
	}
	return &l[off%leafSpan/memoryPage]
}

func (s *slot) read(p []byte, in int) {
	if s == nil {
		clear(p)
		return
	}
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.page == nil {
		clear(p)
		return
	}
	copy(p, s.page[in:])
}

// write writes p, which lies within one page, to that page at in.
func (m *Memory) write(p []byte, off int64, in int) error {
	s := m.slot(off)
	if s == nil {
		if isZero(p) {
			return nil
		}
		l := m.makeLeaf(off)
		if l == nil {
			return ErrClosed // meanwhile
		}
		s = &l[off%leafSpan/memoryPage]
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.page == nil {
		if isZero(p) {
			return nil
		}
		if used := m.used.Add(memoryPage); m.limit > 0 && used > m.limit {
			m.used.Add(-memoryPage)
			return fmt.Errorf("%w: memory store is limited to %d octets", ErrNoSpace, m.limit)
		}
		s.page = new([memoryPage]byte)
	}
	copy(s.page[in:], p)
	return nil
}

// clear calls f, with the slot locked, for every page that is allocated in
// the range and the octets [from, to) of it that are in the range. The last
// page counts as whole when the range reaches the end of the store.
func (m *Memory) clear(off, n int64, f func(s *slot, from, to int)) error {
	if err := m.check(off, n); err != nil {
		return err
	}
	m.clearPages(off, off+n, f)
	return nil
}

// clearPages is clear of [off, end), wherever the store ends.
func (m *Memory) clearPages(off, end int64, f func(s *slot, from, to int)) {
	for off < end {
		if m.leaf(off) == nil {
			off = off - off%leafSpan + leafSpan
			continue
		}
		from := int(off % memoryPage)
		to := int(min(memoryPage, int64(from)+end-off))
		next := off + int64(to-from)
		if s := m.slot(off); s != nil {
			s.mu.Lock()
			if next == m.size.Load() { // now: who has seen a larger store writes there only with the lock
				to = memoryPage
			}
			if s.page != nil {
				f(s, from, to)
			}
			s.mu.Unlock()
		}
		off = next
	}
}

// isZero tells whether p is all zeros. On most data it looks at one octet.
func isZero(p []byte) bool {
	return len(p) == 0 || p[0] == 0 && bytes.Equal(p[1:], p[:len(p)-1])
}
