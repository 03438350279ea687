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
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	_ = raw.Control(func(fd uintptr) {
		name, err := unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
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
	s.out.flags = unix.MSG_MORE
	defer func() { s.out.flags = 0 }()
	return s.WriteBuffers(b)
}

// splice writes b, to which p refers. more: the kernel may wait for what follows. empty says whether p is, as it was before.
func (s *Socket) splice(p pipe, b [][]byte, more bool) (n int64, empty bool, err error) {
	t := &s.out
	t.long = t.begin(t.long[:0], b...)
	t.pipe = p.out
	for t.size > 0 {
		if t.piped, t.errno = t.refer(p); t.errno != 0 { // no memory for it, for example
			n, err = s.write("writev")
			return n, true, err
		}
		t.size -= t.piped
		t.advance(t.piped)
		t.flags = 0
		if more || t.size > 0 {
			t.flags = unix.SPLICE_F_MORE
		}
		err = s.raw.Write(s.trySplice)
		t.flags = 0
		if err != nil || t.errno != 0 {
			break
		}
	}
	t.forget()
	switch {
	case err != nil:
		err = named("write", err)
	case t.errno != 0:
		err = s.failed("write", "splice", t.errno)
	}
	return int64(t.n), err == nil, err
}

// refer makes p refer to the beginning of the parts of t, as far as it has room, and returns how many bytes that is.
func (t *transfer) refer(p pipe) (int, syscall.Errno) {
	for {
		n, _, errno := unix.RawSyscall6(unix.SYS_VMSPLICE, uintptr(p.in), uintptr(unsafe.Pointer(&t.iov[0])), uintptr(min(len(t.iov), maxIov)), unix.SPLICE_F_NONBLOCK, 0, 0)
		if errno != unix.EINTR {
			return int(n), errno
		}
	}
}

// splicePipe writes what the socket takes from the pipe of s.out. It returns false if the rest has to wait.
func (s *Socket) splicePipe(fd uintptr) bool {
	t := &s.out
	release()
	for t.piped > 0 {
		n, _, errno := unix.RawSyscall6(unix.SYS_SPLICE, uintptr(t.pipe), 0, fd, 0, uintptr(t.piped), unix.SPLICE_F_NONBLOCK|t.flags)
		switch t.errno = errno; errno {
		case 0:
			t.piped -= int(n)
			t.n += int(n)
		case unix.EAGAIN:
			return false
		case unix.EINTR:
		default:
			return true
		}
	}
	return true
}
