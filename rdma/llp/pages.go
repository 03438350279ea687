package llp

import (
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// pipeSize is how many bytes of pages a pipe refers to, 4 KiB or a part of them each. If the kernel permits less, a call of WritePages takes more steps, with less
	// than leastPipe so many that a copy is cheaper.
	pipeSize  = 512 << 10
	leastPipe = 64 << 10
	// maxPipes bounds the pipes of the process: of peers that take nothing, each keeps one. Without a pipe, data is copied.
	maxPipes = 32
	// maxIdlePipes is how many pipes stay open while nobody uses them.
	maxIdlePipes = 4
)

// pipes has the pipes of all Sockets.
var pipes pipePool

// pipeLimit: see LimitPipes.
var pipeLimit atomic.Int64

func init() { pipeLimit.Store(1 << 62) }

// LimitPipes makes Sockets open no descriptors for pipes from number n on: the system gives the lowest numbers first. Without a pipe, Socket.WritePages copies.
func LimitPipes(n int64) { pipeLimit.Store(n) }

// A pipe refers to pages on their way to a socket. Both descriptors are non-blocking.
type pipe struct{ in, out int }

// A pipePool has pipes that are empty.
type pipePool struct {
	mu   sync.Mutex
	idle []pipe
	open int // in all
}

// take returns an empty pipe, or false.
func (p *pipePool) take() (pipe, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.idle); n > 0 {
		x := p.idle[n-1]
		p.idle = p.idle[:n-1]
		return x, true
	}
	if p.open == maxPipes {
		return pipe{}, false
	}
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		return pipe{}, false
	}
	x := pipe{in: fds[1], out: fds[0]}
	size, err := unix.FcntlInt(uintptr(x.in), unix.F_SETPIPE_SZ, pipeSize)
	if err != nil {
		size, err = unix.FcntlInt(uintptr(x.in), unix.F_GETPIPE_SZ, 0)
	}
	if err != nil || size < leastPipe || int64(max(x.in, x.out)) >= pipeLimit.Load() {
		x.close()
		return pipe{}, false
	}
	p.open++
	return x, true
}

// put gives back a pipe.
func (p *pipePool) put(x pipe, empty bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if empty && len(p.idle) < maxIdlePipes {
		p.idle = append(p.idle, x)
		return
	}
	p.open--
	x.close()
}

func (x pipe) close() {
	unix.Close(x.in)
	unix.Close(x.out)
}

// paces reports whether the congestion control of nc is BBR, which cuts what it sends into small pieces at the pace of the network. That costs more with pages of 4 KiB
// than the copy to larger ones.
func paces(nc net.Conn) (paces bool) {
	control(nc, func(fd int) {
		name, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
		paces = err == nil && strings.HasPrefix(name, "bbr")
	})
	return paces
}

// WritePages does what WriteBuffers does, but it does not copy the parts of b that pages names by their indices, in ascending order: the kernel refers to their memory. It
// still does so after the call, until the peer has acknowledged them. A peer on the same machine may then still refer to it, until it has read them. So they must not
// change until the peer has said so by its own protocol, and their memory must not be of the heap.
func (s *Socket) WritePages(b [][]byte, pages []int) (n int64, err error) {
	p, ok := pipes.take()
	if !ok {
		return s.WriteBuffers(b)
	}
	empty := true
	defer func() { pipes.put(p, empty) }()
	next := 0
	for len(pages) > 0 {
		first, run := pages[0], 1
		for run < len(pages) && pages[run] == first+run {
			run++
		}
		pages = pages[run:]
		sent, err := s.writeMore(b[next:first])
		n += sent
		if err != nil {
			return n, err
		}
		next = first + run
		sent, empty, err = s.splice(p, b[first:next], next < len(b))
		n += sent
		if err != nil {
			return n, err
		}
	}
	sent, err := s.WriteBuffers(b[next:])
	return n + sent, err
}

// writeMore does what WriteBuffers does, before pages: the kernel may wait for them.
func (s *Socket) writeMore(b [][]byte) (int64, error) {
	s.out.more = true
	defer func() { s.out.more = false }()
	return s.WriteBuffers(b)
}

// splice writes b, to which p refers. more: the kernel may wait for what follows. empty says whether p is, as it was before.
func (s *Socket) splice(p pipe, b [][]byte, more bool) (n int64, empty bool, err error) {
	t := &s.out
	t.long = t.begin(t.long[:0], b...)
	t.refers, t.pipe, t.more = true, p, more
	n, err = s.write("splice")
	empty = t.piped == 0
	t.refers, t.piped, t.more = false, 0, false
	return n, empty, err
}

// refer makes the pipe refer to the beginning of the parts of t, as far as it has room.
func (t *transfer) refer() syscall.Errno {
	n, _, errno := unix.RawSyscall6(unix.SYS_VMSPLICE, uintptr(t.pipe.in), uintptr(unsafe.Pointer(&t.iov[0])), uintptr(min(len(t.iov), maxIov)), unix.SPLICE_F_NONBLOCK, 0, 0)
	if errno == 0 {
		t.piped = int(n)
		t.size -= t.piped
		t.advance(t.piped)
	}
	return errno
}

// splice writes what is in the pipe, as much as a call may without the knowledge of Go's scheduler: the kernel may encrypt it by ESP.
func (t *transfer) splice(fd uintptr) (int, syscall.Errno) {
	flags := uintptr(unix.SPLICE_F_NONBLOCK)
	if t.more || t.size > 0 || t.piped > silentLen {
		flags |= unix.SPLICE_F_MORE
	}
	n, _, errno := unix.RawSyscall6(unix.SYS_SPLICE, uintptr(t.pipe.out), 0, fd, 0, uintptr(min(t.piped, silentLen)), flags)
	return int(n), errno
}
