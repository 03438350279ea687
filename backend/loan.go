package backend

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// A Lender is a Store that can show its memory to readers, instead of copying from it. Its method follows the rules of
// Store's methods.
type Lender interface {
	// Lend returns the bytes of the Store from off on, 1 to n of them, n > 0. They do not change until loan.Return: a
	// write to them goes to other memory. p must not be written to.
	Lend(off, n int64) (p []byte, loan *Loan, err error)
}

// LoanSize is how many bytes of memory a Loan keeps from being freed at most.
const LoanSize = memoryPage

// A Loan is memory that a Store has lent. It outlives the Store.
type Loan struct {
	of    *Memory
	state atomic.Int32 // how often it is lent, and the bits below
	page  *[memoryPage]byte
}

// Bits of Loan.state.
const (
	replaced  = 1 << 30 // the page belongs to no slot any longer
	shared    = 1 << 29 // Share was called
	abandoned = 1 << 28 // Abandon was called
	lentMask  = abandoned - 1
)

// isLent reports whether the memory must not change.
func (l *Loan) isLent() bool { return l.state.Load()&(lentMask|abandoned) != 0 }

// Return ends one Lend. The caller must not touch the memory afterwards.
func (l *Loan) Return() { l.settle(l.state.Add(-1)) }

// settle frees the page if that is the state of l for the first time.
func (l *Loan) settle(state int32) {
	switch {
	case state&(replaced|lentMask) != replaced:
	case state&shared == 0:
		pages.put(l.page, false)
	case state&abandoned != 0 || !l.of.spares.put(l.page, l.of.mostSpares()):
		pages.put(l.page, true)
	}
}

// maxSparePages bounds the spare pages of a store: 2 MiB.
const maxSparePages = 32

// mostSpares returns how many spare pages m may keep: an eighth of its pages at most.
func (m *Memory) mostSpares() int { return int(min(maxSparePages, m.used.Load()/memoryPage/8)) }

// sparePages are shared pages that no slot has. The store has them for pages that it replaces, because to give their memory back would split huge pages.
type sparePages struct {
	mu     sync.Mutex
	list   []*[memoryPage]byte
	closed bool
}

// put takes a page, unless there are most of them.
func (s *sparePages) put(page *[memoryPage]byte, most int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || len(s.list) >= most {
		return false
	}
	s.list = append(s.list, page)
	return true
}

// get returns a page with old data, or nil.
func (s *sparePages) get() *[memoryPage]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.list)
	if n == 0 {
		return nil
	}
	page := s.list[n-1]
	s.list = s.list[:n-1]
	return page
}

// trim frees all but the first pages, as many as most.
func (s *sparePages) trim(most int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := len(s.list); n > most; n-- {
		pages.put(s.list[n-1], true)
		s.list = s.list[:n-1]
	}
}

// close frees the pages, now and in future.
func (s *sparePages) close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.trim(0)
}

// Share notes that the kernel may refer to the memory, as the buffers of a socket do, also when the process has returned it. Nobody can take such references
// back, so the process gives the memory back to the kernel before another Store uses the page. It reports whether that is possible.
//
// Preconditions: l is lent to the caller; so for Abandon.
func (l *Loan) Share() bool {
	if l.state.Load()&shared != 0 {
		return true
	}
	if l != &zeroPage && !pages.has(l.page) {
		return false
	}
	l.state.Or(shared)
	return true
}

// Abandon does what Return does, where nobody will ever know when the kernel refers to the memory no longer: that never changes.
func (l *Loan) Abandon() {
	l.state.Or(abandoned)
	l.Return()
}

// zeroPage is lent where a memory store has no page. Nobody writes to it.
var zeroPage = Loan{page: new([memoryPage]byte)}

// Lend implements Lender: bytes of one page. A page of another process moves to the memory of this one first.
func (m *Memory) Lend(off, n int64) ([]byte, *Loan, error) {
	if err := m.check(off, n); err != nil {
		return nil, nil, err
	}
	in := off % memoryPage
	end := min(in+n, memoryPage)
	l := m.slot(off).lend(m)
	if m.closed.Load() { // before its pages went: the zeros may be no data
		l.Return()
		return nil, nil, ErrClosed
	}
	return l.page[in:end:end], l, nil
}

// lend lends the page of s, a slot of m or nil.
func (s *slot) lend(m *Memory) *Loan {
	if s != nil {
		s.mu.RLock()
		mapped := s.mapped
		if s.page != nil && !mapped {
			defer s.mu.RUnlock()
			return s.lendPage(m)
		}
		s.mu.RUnlock()
		if mapped {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.mapped {
				s.replace(m, false)
			}
			if s.page != nil {
				return s.lendPage(m)
			}
		}
	}
	zeroPage.state.Add(1)
	return &zeroPage
}

// lendPage lends the page of s, a slot of m.
//
// Preconditions: s.mu is held, or held for reading; s has a page that is not mapped.
func (s *slot) lendPage(m *Memory) *Loan {
	l := s.loan.Load()
	if l == nil {
		l = &Loan{of: m, page: s.page}
		if !s.loan.CompareAndSwap(nil, l) { // by another reader
			l = s.loan.Load()
		}
	}
	l.state.Add(1)
	return l
}

// own makes the page of s, a slot of m, one that may be written to: if it is lent, the loans keep it, and s gets another. Unless whole, when
// the caller overwrites all of it, it has the same data.
//
// Preconditions: s.mu is held; s has a page.
func (s *slot) own(m *Memory, whole bool) {
	held(&s.mu)
	if l := s.loan.Load(); l != nil && l.isLent() {
		s.replace(m, whole)
	}
}

// replace gives s another page, with the same data unless whole.
//
// Preconditions: as for own.
func (s *slot) replace(m *Memory, whole bool) {
	held(&s.mu)
	page := m.spares.get()
	if page == nil {
		page = pages.get(true)
	}
	if !whole {
		*page = *s.page
	}
	old, mapped := s.page, s.mapped
	s.page, s.mapped = page, false
	if mapped {
		_ = unix.Madvise(old[:], unix.MADV_REMOVE) // without success the memory is free when the store is closed
		return
	}
	s.release(old)
}

// release frees a page that s had. Its loans continue.
//
// Preconditions: s.mu is held.
func (s *slot) release(page *[memoryPage]byte) {
	held(&s.mu)
	if l := s.loan.Swap(nil); l == nil { // it was never lent
		pages.put(page, false)
	} else {
		l.settle(l.state.Add(replaced))
	}
}
