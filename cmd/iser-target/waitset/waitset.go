// Package waitset lets connections wait for their peers without a goroutine each. A goroutine that waits in
// Read keeps a stack of 4 to 8 KiB. A Wait takes less than 300 bytes.
package waitset

import (
	"container/heap"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrClosed is why a Wait ends when its Set is closed.
var ErrClosed = errors.New("the set of waiting connections is closed")

// A Set has connections that wait. One goroutine, Run, serves all of them.
type Set struct {
	file *os.File // the epoll instance
	raw  syscall.RawConn

	mu     sync.Mutex // held for moments
	byFD   map[int32]*Wait
	due    dueHeap
	serial int32
	closed bool
}

// A Wait is a connection that waits. It ends once: when its peer has sent enough or has closed its direction, at its
// deadline, by Wake, or with the Set.
type Wait struct {
	set      *Set
	raw      syscall.RawConn
	deadline time.Time
	enough   func(fd int) bool
	wake     func(error)

	// Under Set.mu:
	fd     int32
	serial int32 // tells events of an earlier user of fd
	index  int   // in Set.due; -1: it is over
}

// New returns an empty Set. The caller runs Run.
func New() (*Set, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll_create1: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // so that the runtime waits for it, and no thread
		unix.Close(fd)
		return nil, fmt.Errorf("epoll instance: %w", err)
	}
	s := &Set{file: os.NewFile(uintptr(fd), "epoll"), byFD: map[int32]*Wait{}}
	if s.raw, err = s.file.SyscallConn(); err != nil {
		s.file.Close()
		return nil, err
	}
	return s, nil
}

// Len returns how many connections wait.
func (s *Set) Len() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.due)
}

// Add lets c wait until deadline, and calls wake when that ends: with nil if the peer has sent enough, has closed its
// direction or the connection has failed, with os.ErrDeadlineExceeded, with the error of Wake, or with ErrClosed.
// wake must not wait. It may be called before Add returns.
//
// The Set calls enough when something has come, with the descriptor of the connection. It must not wait, and must leave
// what it looks at. nil means that anything is enough. A connection may be closed while it waits, but only Wake tells the
// Set.
func (s *Set) Add(c syscall.Conn, deadline time.Time, enough func(fd int) bool, wake func(error)) *Wait {
	w := &Wait{set: s, deadline: deadline, enough: enough, wake: wake, index: -1}
	var err error
	if w.raw, err = c.SyscallConn(); err == nil {
		err = s.add(w)
	}
	if err != nil {
		wake(err)
	}
	return w
}

// add makes w one of s.
func (s *Set) add(w *Wait) (err error) {
	cerr := w.raw.Control(func(fd uintptr) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.closed {
			err = ErrClosed
			return
		}
		s.serial++
		w.fd, w.serial = int32(fd), s.serial
		// Edge-triggered, it also reports what has come before.
		err = s.control(unix.EPOLL_CTL_ADD, w, unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLET)
		if err != nil {
			return
		}
		s.byFD[w.fd] = w
		heap.Push(&s.due, w)
		s.arm(w)
	})
	return errors.Join(cerr, err)
}

// control calls epoll_ctl for w, whose descriptor is open.
func (s *Set) control(op int, w *Wait, events uint32) (err error) {
	cerr := s.raw.Control(func(ep uintptr) {
		err = unix.EpollCtl(int(ep), op, int(w.fd), &unix.EpollEvent{Events: events, Fd: w.fd, Pad: w.serial})
	})
	return errors.Join(cerr, err)
}

// arm sets the time at which Run has something to do, if changed is the first Wait. nil stands for one that has gone.
//
// Preconditions: s.mu is held.
func (s *Set) arm(changed *Wait) {
	switch {
	case len(s.due) == 0:
		s.file.SetReadDeadline(time.Time{})
	case changed == nil || s.due[0] == changed:
		s.file.SetReadDeadline(s.due[0].deadline)
	}
}

// Wake ends w with err, unless it has ended. It reports whether it did.
func (w *Wait) Wake(err error) bool {
	s := w.set
	s.mu.Lock()
	is := s.remove(w)
	s.mu.Unlock()
	if is {
		w.wake(err)
	}
	return is
}

// remove takes w out of s. It returns false if w has ended.
//
// Preconditions: s.mu is held.
func (s *Set) remove(w *Wait) bool {
	if w.index < 0 {
		return false
	}
	first := w.index == 0
	heap.Remove(&s.due, w.index)
	if first {
		s.arm(nil)
	}
	if s.byFD[w.fd] == w { // else the connection is closed, and another one has its descriptor
		delete(s.byFD, w.fd)
		w.raw.Control(func(uintptr) { s.control(unix.EPOLL_CTL_DEL, w, 0) }) // fails if the connection is closed
	}
	return true
}

// Run serves s until Close. It does not poll.
func (s *Set) Run() {
	defer s.file.Close()
	events := make([]unix.EpollEvent, 128)
	for {
		n := 0
		s.raw.Read(func(ep uintptr) bool { // fails at the deadline, which expire looks at
			for {
				var err error
				if n, err = unix.EpollWait(int(ep), events, 0); err != unix.EINTR {
					return n > 0
				}
			}
		})
		for _, e := range events[:max(n, 0)] {
			s.look(&e)
		}
		if s.expire() {
			return
		}
	}
}

// look ends the Wait that e is about, if its peer has sent enough.
func (s *Set) look(e *unix.EpollEvent) {
	s.mu.Lock()
	w := s.byFD[e.Fd]
	s.mu.Unlock()
	if w == nil || w.serial != e.Pad {
		return
	}
	enough := w.enough == nil || e.Events&^unix.EPOLLIN != 0
	if !enough {
		w.raw.Control(func(fd uintptr) { enough = w.enough(int(fd)) }) // fails if the connection is closed: Wake follows
	}
	if enough {
		w.Wake(nil)
	}
}

// expire ends the Waits whose deadline has passed, or all of them after Close, which it reports.
func (s *Set) expire() (closed bool) {
	for {
		s.mu.Lock()
		why := os.ErrDeadlineExceeded
		if closed = s.closed; closed {
			why = ErrClosed
		}
		if len(s.due) == 0 || !closed && time.Until(s.due[0].deadline) > 0 {
			s.mu.Unlock()
			return closed
		}
		w := s.due[0]
		s.remove(w)
		s.mu.Unlock()
		w.wake(why)
	}
}

// Close ends all Waits, and Run.
func (s *Set) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.file.SetReadDeadline(time.Unix(1, 0))
}

// A dueHeap is a heap of Waits by deadline.
type dueHeap []*Wait

// Len implements heap.Interface.
func (h dueHeap) Len() int { return len(h) }

// Less implements heap.Interface.
func (h dueHeap) Less(i, j int) bool { return h[i].deadline.Before(h[j].deadline) }

// Swap implements heap.Interface.
func (h dueHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push implements heap.Interface.
func (h *dueHeap) Push(x any) {
	w := x.(*Wait)
	w.index = len(*h)
	*h = append(*h, w)
}

// Pop implements heap.Interface.
func (h *dueHeap) Pop() any {
	old := *h
	w := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	w.index = -1
	return w
}
