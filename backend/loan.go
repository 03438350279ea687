package backend

import (
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
	state atomic.Int32 // how often it is lent, and replaced
	page  *[memoryPage]byte
}

// replaced is a bit of Loan.state: the page belongs to no slot any longer.
const replaced = 1 << 30

// Return ends one Lend. The caller must not touch the memory afterwards.
func (l *Loan) Return() {
	if l.state.Add(-1) == replaced {
		pages.put(l.page)
	}
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
	l := m.slot(off).lend()
	if m.closed.Load() { // before its pages went: the zeros may be no data
		l.Return()
		return nil, nil, ErrClosed
	}
	return l.page[in:end:end], l, nil
}

// lend lends the page of s, which may be nil.
func (s *slot) lend() *Loan {
	if s != nil {
		s.mu.RLock()
		mapped := s.mapped
		if s.page != nil && !mapped {
			defer s.mu.RUnlock()
			return s.lendPage()
		}
		s.mu.RUnlock()
		if mapped {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.mapped {
				s.replace(false)
			}
			if s.page != nil {
				return s.lendPage()
			}
		}
	}
	zeroPage.state.Add(1)
	return &zeroPage
}

// lendPage lends the page of s.
//
// Preconditions: s.mu is held, or held for reading; s has a page that is not mapped.
func (s *slot) lendPage() *Loan {
	l := s.loan.Load()
	if l == nil {
		l = &Loan{page: s.page}
		if !s.loan.CompareAndSwap(nil, l) { // by another reader
			l = s.loan.Load()
		}
	}
	l.state.Add(1)
	return l
}

// own makes the page of s one that may be written to: if it is lent, the loans keep it, and s gets another. Unless whole, when
// the caller overwrites all of it, it has the same data.
//
// Preconditions: s.mu is held; s has a page.
func (s *slot) own(whole bool) {
	held(&s.mu)
	if l := s.loan.Load(); l != nil && l.state.Load() > 0 {
		s.replace(whole)
	}
}

// replace gives s another page, with the same data unless whole.
//
// Preconditions: as for own.
func (s *slot) replace(whole bool) {
	held(&s.mu)
	page := pages.get(true)
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
	if l := s.loan.Swap(nil); l == nil || l.state.Add(replaced) == replaced { // not lent
		pages.put(page)
	}
}
