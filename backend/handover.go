package backend

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// A Holder is a Store on a file or device that it holds by a lock or as its only user. Another process that gets
// the descriptor, by package handed, holds it too.
type Holder interface {
	// Descriptor returns the descriptor, which belongs to the Store.
	Descriptor() int
}

// Descriptor implements Holder. It is -1 if the disk does not have one.
func (d *disk) Descriptor() int {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if fd, ok := d.fd.(sysFile); ok && !d.closed {
		return int(fd)
	}
	return -1
}

// CopyTo copies the data to f, a file without data at the first call: each page at its place. A later call copies what has changed since. Other
// calls of the store proceed meanwhile.
func (m *Memory) CopyTo(f *os.File) error {
	if m.closed.Load() {
		return ErrClosed
	}
	if err := f.Truncate(m.size.Load()); err != nil {
		return err
	}
	first := m.copiedTo != f
	m.copiedTo = f
	root := *m.root.Load()
	for i := range root {
		l := root[i].Load()
		if l == nil {
			continue
		}
		for j := range l {
			off := int64(i)*leafSpan + int64(j)*memoryPage
			if off >= m.size.Load() {
				break
			}
			if err := l[j].copyTo(f, off, first); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyTo copies the page of s, which is at that place, if it differs from what f has.
func (s *slot) copyTo(f *os.File, off int64, first bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.page != nil && (first || s.changed || !s.copied):
		if _, err := f.WriteAt(s.page[:], off); err != nil {
			return err
		}
	case s.page == nil && s.copied && !first:
		if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, memoryPage); err != nil {
			return err
		}
	}
	s.copied, s.changed = s.page != nil, false
	return nil
}

// maxMapping bounds the address space that a store takes for the pages of another process, in bytes.
const maxMapping = 1 << 40

// Take fills a store that was not used yet with the data that CopyTo has copied to f. If the kernel maps f, its pages become
// those of the store, so that takes no longer for much data; otherwise Take copies them.
func (m *Memory) Take(f *os.File) error {
	var mapping []byte
	if span := (m.size.Load() + memoryPage - 1) &^ (memoryPage - 1); span <= maxMapping {
		if err := f.Truncate(span); err != nil { // else the last page would end in the middle
			return err
		}
		mapping, _ = unix.Mmap(int(f.Fd()), 0, int(span), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
	}
	m.mu.Lock()
	m.mapping = mapping
	m.mu.Unlock()
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	for off := int64(0); off < end; {
		from, err := unix.Seek(int(f.Fd()), off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // none is left
			return nil
		}
		if err != nil {
			return err
		}
		to, err := unix.Seek(int(f.Fd()), from, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		for from -= from % memoryPage; from < to; from += memoryPage {
			n := min(memoryPage, m.size.Load()-from)
			if n <= 0 {
				return nil
			}
			if err := m.takePage(f, from, n); err != nil {
				return err
			}
		}
		off = max(from, off+1)
	}
	return nil
}

// takePage takes the page at off, of which the store has n bytes.
func (m *Memory) takePage(f *os.File, off, n int64) error {
	if m.mapping == nil {
		page := make([]byte, n)
		if _, err := f.ReadAt(page, off); err != nil {
			return err
		}
		return m.WriteAt(page, off)
	}
	s := m.makeSlot(off)
	if s == nil {
		return ErrClosed
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.page, s.mapped = (*[memoryPage]byte)(m.mapping[off:]), true
	m.used.Add(memoryPage)
	return nil
}

// free frees the page. Its loans continue.
//
// Preconditions: s.mu is held; s has a page.
func (s *slot) free() {
	held(&s.mu)
	page := s.page
	s.page = nil
	if s.mapped {
		s.mapped = false
		_ = unix.Madvise(page[:], unix.MADV_REMOVE) // without success the memory is free when the store is closed
		return
	}
	s.release(page)
}

// close frees the pages, except those of the mapping, so that no call that began before uses them.
func (l *leaf) close() {
	for i := range l {
		s := &l[i]
		s.mu.Lock()
		switch {
		case s.mapped:
			s.page, s.mapped = nil, false
		case s.page != nil:
			s.free()
		}
		s.mu.Unlock()
	}
}

// unmap gives the mapping back.
//
// Preconditions: m.mu is held, and no slot has a page.
func (m *Memory) unmap() {
	if m.mapping != nil {
		_ = unix.Munmap(m.mapping)
		m.mapping = nil
	}
}
