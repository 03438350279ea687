package llp

import (
	"net"
	"os"
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
	// maxPipes bounds the pipes of the process: of peers that take nothing, each keeps some. Without a pipe, data is copied.
	maxPipes = 64
	// maxIdlePipes is how many pipes stay open while nobody uses them.
	maxIdlePipes = 32
	// fewPipes is how many Pipes a connection may have when others have half of all.
	fewPipes = 4
	// pageSize is the length of what one slot of a pipe refers to at most.
	pageSize = 4 << 10
)

// pipes has the pipes of all Sockets.
var pipes pipePool

// pipeLimit: see LimitPipes.
var pipeLimit atomic.Int64

func init() { pipeLimit.Store(1 << 62) }

// LimitPipes makes Sockets open no descriptors for pipes from number n on: the system gives the lowest numbers first. Without a pipe, Socket.WritePages copies.
func LimitPipes(n int64) { pipeLimit.Store(n) }

// A Pipe refers to pages on their way to a socket. Its descriptors are non-blocking.
type Pipe struct {
	in, out int
	size    int // bytes of whole pages to which it can refer
	left    int // bytes in it; less than 0: not known
}

// TakePipe returns an empty Pipe that can refer to n bytes anywhere in a file, or nil. Release gives it back. have is how many the connection has: where
// few are left, it gets no more, so that others find one.
func TakePipe(n, have int) *Pipe {
	p := pipes.take(have)
	if p != nil && n > p.size-pageSize {
		p.Release()
		return nil
	}
	return p
}

// In returns the descriptor by which the caller may fill p, before it calls Filled.
func (p *Pipe) In() int {
	p.left = -1
	return p.in
}

// Filled notes that p has n bytes, which Socket.WritePages may write.
func (p *Pipe) Filled(n int) { p.left = n }

// Read moves bytes of p to b, as an io.Reader that never waits.
func (p *Pipe) Read(b []byte) (int, error) {
	n, err := unix.Read(p.out, b[:min(len(b), p.left)])
	if err != nil {
		return 0, os.NewSyscallError("read", err)
	}
	p.left -= n
	return n, nil
}

// Release gives back p, with what is left in it.
func (p *Pipe) Release() { pipes.put(p) }

// A pipePool has pipes that are empty.
type pipePool struct {
	mu   sync.Mutex
	idle []*Pipe
	open int // in all
}

// take returns an empty pipe for a connection that has as many, or nil.
func (p *pipePool) take(have int) *Pipe {
	p.mu.Lock()
	defer p.mu.Unlock()
	if have >= fewPipes && p.open-len(p.idle) >= maxPipes/2 {
		return nil
	}
	if n := len(p.idle); n > 0 {
		x := p.idle[n-1]
		p.idle = p.idle[:n-1]
		return x
	}
	if p.open == maxPipes {
		return nil
	}
	var fds [2]int
	if unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK) != nil {
		return nil
	}
	x := &Pipe{in: fds[1], out: fds[0]}
	size, err := unix.FcntlInt(uintptr(x.in), unix.F_SETPIPE_SZ, pipeSize)
	if err != nil {
		size, err = unix.FcntlInt(uintptr(x.in), unix.F_GETPIPE_SZ, 0)
	}
	if err != nil || size < leastPipe || int64(max(x.in, x.out)) >= pipeLimit.Load() {
		x.close()
		return nil
	}
	x.size = size
	p.open++
	return x
}

// put gives back a pipe.
func (p *pipePool) put(x *Pipe) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if x.left == 0 && len(p.idle) < maxIdlePipes {
		p.idle = append(p.idle, x)
		return
	}
	p.open--
	x.close()
}

func (p *Pipe) close() {
	unix.Close(p.in)
	unix.Close(p.out)
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

// A PagesPart is a part of what WritePages writes to whose memory the kernel refers.
type PagesPart struct {
	Index int   // of the part
	Pipe  *Pipe // nil: the pages are those of the part
	Len   int   // bytes of Pipe that take the place of the part, which is empty
}

// WritePages does what WriteBuffers does, but it does not copy the parts of b that pages has, in ascending order: the kernel refers to their memory. It
// still does so after the call, until the peer has acknowledged them. A peer on the same machine may then still refer to it, until it has read them. So they must not
// change until the peer has said so by its own protocol, and memory in b must not be of the heap. After an error, Pipes may have a rest.
func (s *Socket) WritePages(b [][]byte, pages []PagesPart) (n int64, err error) {
	var own *Pipe // for the pages of b
	defer func() {
		if own != nil {
			own.Release()
		}
	}()
	next := 0
	for len(pages) > 0 {
		first, run := pages[0], 1
		if first.Pipe == nil {
			for run < len(pages) && pages[run].Pipe == nil && pages[run].Index == first.Index+run {
				run++
			}
			if own == nil {
				if own = pipes.take(0); own == nil {
					pages = pages[run:] // they are copied
					continue
				}
			}
		}
		pages = pages[run:]
		sent, err := s.writeMore(b[next:first.Index])
		n += sent
		if err != nil {
			return n, err
		}
		next = first.Index + run
		more := next < len(b)
		if first.Pipe == nil {
			sent, err = s.refer(own, b[first.Index:next], more)
		} else {
			sent, err = s.splice(first.Pipe, first.Len, more)
		}
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

// refer writes b, to which p refers. more: the kernel may wait for what follows.
func (s *Socket) refer(p *Pipe, b [][]byte, more bool) (n int64, err error) {
	t := &s.out
	t.long = t.begin(t.long[:0], b...)
	t.refers = true
	return s.writePipe(p, more)
}

// splice writes size bytes that p has. more: the kernel may wait for what follows.
func (s *Socket) splice(p *Pipe, size int, more bool) (n int64, err error) {
	t := &s.out
	t.begin(t.parts[:0])
	t.piped = size
	n, err = s.writePipe(p, more)
	return n, err
}

// writePipe writes what t has, by p.
func (s *Socket) writePipe(p *Pipe, more bool) (n int64, err error) {
	t := &s.out
	t.pipe, t.more = p, more
	n, err = s.write("splice")
	t.refers, t.pipe, t.piped, t.more = false, nil, 0, false
	return n, err
}

// refer makes the pipe refer to the beginning of the parts of t, as far as it has room.
func (t *transfer) refer() syscall.Errno {
	n, _, errno := unix.RawSyscall6(unix.SYS_VMSPLICE, uintptr(t.pipe.in), uintptr(unsafe.Pointer(&t.iov[0])), uintptr(min(len(t.iov), maxIov)), unix.SPLICE_F_NONBLOCK, 0, 0)
	if errno == 0 {
		t.piped = int(n)
		t.pipe.left = t.piped
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
