package backend

import (
	"bytes"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
)

const (
	// memoryPage is the unit of allocation of a memory store, in bytes. Larger pages waste
	// more with scattered small writes, smaller pages need a larger table.
	memoryPage = 64 << 10
	// leafPages is the number of pages whose slots are allocated together.
	leafPages = 1024
	leafSpan  = leafPages * memoryPage // bytes of the store below one leaf: 64 MiB
	// maxMemorySize bounds the root of the table to 8 MiB of memory.
	maxMemorySize = 64 << 40
	// memoryAtomic is the AtomicWrite of memory stores.
	memoryAtomic = 1 << 20
)

// MemoryConfig describes a memory store. The zero value of a field other than Size means its
// default.
type MemoryConfig struct {
	Size      int64  // bytes, a multiple of BlockSize, at most 64 TiB
	BlockSize uint32 // 512 or 4096; default 512
	// Limit bounds the memory of the data, in bytes; a write beyond it fails with
	// ErrNoSpace. Default: Size.
	Limit int64
}

// Memory is a Store in the memory of this process, which loses its data when it ends. It is sparse:
// writes allocate pages of 64 KiB, and Discard of whole pages frees them. In addition to the data,
// it keeps a table of 48 KiB for every 64 MiB of the store that were ever written to.
//
//	root ─ leaf ─ slot ─ page
//	       64 MiB of the store each; nil until first written
//	              64 KiB each, with the lock of its page
//	                     nil where the store reads as zeros
type Memory struct {
	info   Info // except Size
	size   atomic.Int64
	limit  int64
	used   atomic.Int64 // bytes in pages
	closed atomic.Bool
	root   atomic.Pointer[[]atomic.Pointer[leaf]] // Resize replaces it by a longer one

	spares sparePages

	mu      sync.Mutex // held by makeSlot, Resize and Close
	mapping []byte     // that Take took pages from; guarded by mu

	copiedTo *os.File // of the last CopyTo; only its callers use it
}

type leaf [leafPages]slot

// A slot holds one page. The data path takes no other lock: accesses to different pages never
// wait for each other, and reads of one page run concurrently.
type slot struct {
	mu   sync.RWMutex
	page *[memoryPage]byte // guarded by mu
	// The file of CopyTo has the page as it was at the last call; changed: since then it was written to.
	copied, changed bool
	mapped          bool // the page belongs to the mapping of the store

	loan atomic.Pointer[Loan] // of the page; nil: it was never lent. Set while mu is held, or held for reading
}

// OpenMemory returns a memory store that reads as zeros. The Store is a *Memory.
func OpenMemory(c MemoryConfig) (Store, error) {
	info, err := c.info()
	if err != nil {
		return nil, err
	}
	m := &Memory{info: info, limit: c.Limit}
	m.size.Store(c.Size)
	root := make([]atomic.Pointer[leaf], leavesOf(c.Size))
	m.root.Store(&root)
	return m, nil
}

// info gives c its defaults and returns the Info of its store.
func (c *MemoryConfig) info() (Info, error) {
	if c.BlockSize == 0 {
		c.BlockSize = defaultBlockSize
	}
	info := Info{
		Size:               c.Size,
		BlockSize:          c.BlockSize,
		PhysicalBlockSize:  c.BlockSize, // no access costs a read-modify-write
		DiscardGranularity: memoryPage,
		// There is no cache in front of the medium, and no sync would help against a loss of power.
		VolatileCache: false,
		Nonblocking:   true,
		// No part of a write survives a loss of power or the process. The limit bounds
		// the writes that are collected to be atomic.
		AtomicWrite: memoryAtomic,
	}
	switch {
	case c.Size > maxMemorySize:
		return info, fmt.Errorf("memory store: size %d: must be at most %d bytes", c.Size, int64(maxMemorySize))
	case c.Limit < 0:
		return info, fmt.Errorf("memory store: limit %d is negative", c.Limit)
	}
	if err := info.Validate(); err != nil {
		return info, fmt.Errorf("memory store: %w", err)
	}
	return info, nil
}

// leavesOf returns the number of leaves of a store of a size in bytes.
func leavesOf(size int64) int64 { return (size + leafSpan - 1) / leafSpan }

// Info implements Store.
func (m *Memory) Info() Info {
	info := m.info
	info.Size = m.size.Load()
	return info
}

// Resize implements Resizer. A concurrent write may leave data after the end of a store that
// becomes smaller; Resize clears it when the store becomes larger again.
func (m *Memory) Resize(size int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.closed.Load():
		return ErrClosed
	case size <= 0 || size > maxMemorySize || size%int64(m.info.BlockSize) != 0:
		return fmt.Errorf("size %d: must be a multiple of the block size %d, at most %d bytes", size, m.info.BlockSize, int64(maxMemorySize))
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

// leaf returns the leaf of off, or nil.
func (m *Memory) leaf(off int64) *leaf { return (*m.root.Load())[off/leafSpan].Load() }

// makeSlot returns the slot of off, whose leaf it allocates if necessary; nil: the store is closed.
func (m *Memory) makeSlot(off int64) *slot {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed.Load() {
		return nil
	}
	p := &(*m.root.Load())[off/leafSpan]
	if p.Load() == nil {
		p.Store(new(leaf))
	}
	return m.slot(off)
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
	if m.closed.Load() { // before its pages went: the zeros may be no data
		return ErrClosed
	}
	return nil
}

// WriteAt implements Store. It allocates missing pages, unless it writes only zeros to them.
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

// WriteDurable implements Store. Memory cannot be more stable than after WriteAt.
func (m *Memory) WriteDurable(p []byte, off int64) error { return m.WriteAt(p, off) }

// Sync implements Store.
func (m *Memory) Sync() error { return m.check(0, 0) }

// Discard implements Store. It frees the pages that are entirely in the range.
func (m *Memory) Discard(off, n int64) error {
	defer func() { m.spares.trim(m.mostSpares()) }()
	return m.clear(off, n, m.discardPart)
}

// discardPart discards the bytes [from, to) of a page.
//
// Preconditions: s.mu is held.
func (m *Memory) discardPart(s *slot, from, to int) {
	held(&s.mu)
	if to-from == memoryPage {
		s.free()
		m.used.Add(-memoryPage)
		return
	}
	s.own(m, false)
	clear(s.page[from:to])
	s.changed = true
}

// Zero implements Store. Pages keep their memory.
func (m *Memory) Zero(off, n int64) error {
	return m.clear(off, n, func(s *slot, from, to int) {
		s.own(m, to-from == memoryPage)
		clear(s.page[from:to])
		s.changed = true
	})
}

// Extent implements Mapper: pages take space.
func (m *Memory) Extent(off int64) (mapped bool, n int64, err error) {
	if m.closed.Load() {
		return false, 0, ErrClosed
	}
	size := m.size.Load() // may change at any time
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
	if m.closed.Load() { // before its pages went
		return false, 0, ErrClosed
	}
	return mapped, min(end, size) - off, nil
}

// Usage implements Gauge: used is the memory that the data takes, a multiple of 64 KiB.
func (m *Memory) Usage() (used, free int64, err error) {
	if m.closed.Load() {
		return 0, 0, ErrClosed
	}
	limit := (m.size.Load() + memoryPage - 1) / memoryPage * memoryPage
	if m.limit > 0 {
		limit = min(limit, m.limit)
	}
	used = m.used.Load()
	return used, max(limit-used, 0), nil
}

// allocated reports whether off is in a page that takes space.
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
	m.spares.close()
	m.mu.Lock()
	defer m.mu.Unlock()
	root := *m.root.Load()
	for i := range root {
		if l := root[i].Load(); l != nil {
			l.close()
		}
		root[i].Store(nil)
	}
	m.unmap()
	m.used.Store(0)
	return nil
}

func (m *Memory) check(off, n int64) error {
	if m.closed.Load() {
		return ErrClosed
	}
	return checkRange(m.size.Load(), off, n)
}

// slot returns the slot of the page of off, or nil if its leaf was never written to.
func (m *Memory) slot(off int64) *slot {
	l := m.leaf(off)
	if l == nil {
		return nil
	}
	return &l[off%leafSpan/memoryPage]
}

func (s *slot) read(p []byte, in int) {
	if s != nil {
		s.mu.RLock()
		defer s.mu.RUnlock()
		if s.page != nil {
			copy(p, s.page[in:])
			return
		}
	}
	clear(p)
}

// write writes p, which is within one page, at offset off of the store and in of the page.
func (m *Memory) write(p []byte, off int64, in int) error {
	s := m.slot(off)
	if s == nil {
		if isZero(p) {
			return nil
		}
		if s = m.makeSlot(off); s == nil {
			return ErrClosed // by a concurrent Close
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.page == nil {
		if isZero(p) {
			return nil
		}
		if m.closed.Load() { // Close has freed the page
			return ErrClosed
		}
		if used := m.used.Add(memoryPage); m.limit > 0 && used > m.limit {
			m.used.Add(-memoryPage)
			return fmt.Errorf("%w: memory store is limited to %d bytes", ErrNoSpace, m.limit)
		}
		s.page = pages.get(len(p) == memoryPage)
	}
	s.own(m, len(p) == memoryPage)
	stream(s.page[in:in+len(p)], p)
	s.changed = true
	return nil
}

// clear calls f, with the slot locked, for every allocated page in the range, with the bytes
// [from, to) of the page that are in the range. If the range reaches the end of the store,
// it includes the rest of the last page.
func (m *Memory) clear(off, n int64, f func(s *slot, from, to int)) error {
	if err := m.check(off, n); err != nil {
		return err
	}
	m.clearPages(off, off+n, f)
	return nil
}

// clearPages implements clear for [off, end), which may be outside the store.
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
			if next == m.size.Load() { // after Lock: a write to a larger store holds it, too
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

// isZero reports whether p is all zeros. For most data it reads one byte.
func isZero(p []byte) bool {
	return len(p) == 0 || p[0] == 0 && bytes.Equal(p[1:], p[:len(p)-1])
}
