package llp

import (
	"io"
	"net"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A buffersReader is a net.Conn that wraps a socket and forwards to ReadBuffers of a Socket.
type buffersReader interface {
	net.Conn
	ReadBuffers(p, q []byte) (int, error)
}

// Readers returns functions that read from nc with one system call: one is like Read of an io.Reader, and both reads to p, and to q what comes
// after that. It waits like one until something has come, and is nil if nc has no such function.
func Readers(nc net.Conn) (one func(p []byte) (int, error), both func(p, q []byte) (int, error)) {
	switch nc := nc.(type) {
	case buffersReader:
		return nc.Read, nc.ReadBuffers
	case *net.TCPConn:
		s := NewSocket(nc)
		return s.Read, s.ReadBuffers
	}
	return nc.Read, nil
}

// silentLen is how many bytes a system call may send without the knowledge of Go's scheduler: a call that copies more
// takes so long that others should get the P meanwhile.
const silentLen = 256 << 10

// A Socket reads from a TCP connection and writes to it. Its system calls never wait, and take no longer than a copy of the data, or its
// encryption by ESP, so it does not tell Go's scheduler about them. That is what makes it cheaper than the methods of a net.TCPConn, whose
// errors it has. One goroutine at a time may read, and one may write.
type Socket struct {
	nc      *net.TCPConn
	raw     syscall.RawConn
	in, out transfer
}

// A transfer is what a Socket does in one direction.
type transfer struct {
	try func(fd uintptr) bool // tryRead or tryWrite, once, so that no call allocates

	// Of one call:
	parts [2]unix.Iovec // iov, unless it is longer
	long  []unix.Iovec  // iov of WriteBuffers
	iov   []unix.Iovec  // what is left
	msg   unix.Msghdr
	size  int // bytes of iov
	n     int // bytes read or written
	errno syscall.Errno
	waits bool // tryRead waits if nothing has come
	more  bool // tryWrite: the kernel may wait for what follows

	// Of WritePages:
	refers bool // tryWrite lets pipe refer to the parts
	pipe   *Pipe
	piped  int // bytes in it to be written, which are not in size
}

// NewSocket returns a Socket for nc.
func NewSocket(nc *net.TCPConn) *Socket {
	raw, _ := nc.SyscallConn() // it fails only for the zero value of TCPConn
	s := &Socket{nc: nc, raw: raw}
	s.in.try, s.out.try = s.tryRead, s.tryWrite
	return s
}

// Read implements io.Reader.
func (s *Socket) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	s.in.begin(s.in.parts[:0], p)
	return s.read(true)
}

// ReadBuffers does what both of Readers does. Neither p nor q is empty.
func (s *Socket) ReadBuffers(p, q []byte) (int, error) {
	s.in.begin(s.in.parts[:0], p, q)
	return s.read(true)
}

// look does what Read does, but does not wait: the error is unix.EAGAIN if nothing has come.
func (s *Socket) look(p []byte) (int, error) {
	s.in.begin(s.in.parts[:0], p)
	return s.read(false)
}

// Write implements io.Writer.
func (s *Socket) Write(p []byte) (int, error) {
	s.out.begin(s.out.parts[:0], p)
	n, err := s.write("write")
	return int(n), err
}

// WriteBuffers writes all of b, with one system call if the peer takes it.
func (s *Socket) WriteBuffers(b [][]byte) (int64, error) {
	s.out.long = s.out.begin(s.out.long[:0], b...)
	return s.write("writev")
}

// begin prepares a call for the bytes of b. It appends to iov, which it returns.
func (t *transfer) begin(iov []unix.Iovec, b ...[]byte) []unix.Iovec {
	t.size, t.n, t.errno = 0, 0, 0
	for _, p := range b {
		if len(p) > 0 {
			iov = append(iov, unix.Iovec{Base: unsafe.SliceData(p)})
			iov[len(iov)-1].SetLen(len(p))
			t.size += len(p)
		}
	}
	t.iov = iov
	return iov
}

// forget ends a call, so that t does not keep the data alive.
func (t *transfer) forget() {
	clear(t.parts[:])
	clear(t.long)
	t.iov, t.msg.Iov = nil, nil
}

// call makes the system call one for one part, and many for more. Each sends or receives. t keeps the memory alive meanwhile, and
// what t refers to is not on a stack, which could move.
func (t *transfer) call(fd, one, many, flags uintptr) (n uintptr, errno syscall.Errno) {
	silent := t.size <= silentLen
	if len(t.iov) == 1 {
		p, size := uintptr(unsafe.Pointer(t.iov[0].Base)), uintptr(t.iov[0].Len)
		if silent {
			n, _, errno = unix.RawSyscall6(one, fd, p, size, flags, 0, 0)
		} else {
			n, _, errno = unix.Syscall6(one, fd, p, size, flags, 0, 0)
		}
		return n, errno
	}
	t.msg.Iov = &t.iov[0]
	t.msg.SetIovlen(min(len(t.iov), maxIov))
	p := uintptr(unsafe.Pointer(&t.msg))
	if silent {
		n, _, errno = unix.RawSyscall6(many, fd, p, flags, 0, 0, 0)
	} else {
		n, _, errno = unix.Syscall6(many, fd, p, flags, 0, 0, 0)
	}
	return n, errno
}

// maxIov is the number of parts that the kernel accepts in one call (UIO_MAXIOV).
const maxIov = 1024

// read reads to the parts of s.in. If nothing has come it waits, or returns unix.EAGAIN.
func (s *Socket) read(waits bool) (int, error) {
	t := &s.in
	t.waits = waits
	err := s.raw.Read(t.try)
	t.forget()
	switch {
	case err != nil:
		return 0, named("read", err)
	case t.errno == unix.EAGAIN:
		return 0, t.errno
	case t.errno != 0:
		return 0, s.failed("read", "read", t.errno)
	case t.n == 0:
		return 0, io.EOF
	}
	return t.n, nil
}

// tryRead reads what has come. It returns false if that is nothing yet, and the caller waits.
func (s *Socket) tryRead(fd uintptr) bool {
	t := &s.in
	for {
		n, errno := t.call(fd, unix.SYS_RECVFROM, unix.SYS_RECVMSG, unix.MSG_DONTWAIT)
		switch t.errno = errno; errno {
		case 0:
			t.n = int(n)
			acquire(fd)
			return true
		case unix.EAGAIN:
			return !t.waits
		case unix.EINTR:
		default:
			return true
		}
	}
}

// write writes the parts of s.out. call names the system call for errors.
func (s *Socket) write(call string) (int64, error) {
	t := &s.out
	var err error
	if t.size+t.piped > 0 {
		err = s.raw.Write(t.try)
	}
	t.forget()
	switch {
	case err != nil:
		err = named("write", err)
	case t.errno != 0:
		err = s.failed("write", call, t.errno)
	}
	return int64(t.n), err
}

// tryWrite writes what the socket takes. It returns false if the rest has to wait.
func (s *Socket) tryWrite(fd uintptr) bool {
	t := &s.out
	release()
	for t.size+t.piped > 0 {
		n, errno := t.send(fd)
		switch t.errno = errno; errno {
		case 0:
			t.sent(n)
		case unix.EAGAIN:
			return false
		case unix.EINTR:
		default:
			return true
		}
	}
	return true
}

// send makes one system call that writes.
func (t *transfer) send(fd uintptr) (int, syscall.Errno) {
	if t.refers && t.piped == 0 && t.refer() != 0 { // no memory for it, for example: a copy has its own errors
		t.refers = false
	}
	if t.piped > 0 {
		return t.splice(fd)
	}
	flags := uintptr(unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL)
	if t.more {
		flags |= unix.MSG_MORE
	}
	n, errno := t.call(fd, unix.SYS_SENDTO, unix.SYS_SENDMSG, flags)
	return int(n), errno
}

// sent takes the first n bytes from what is left.
func (t *transfer) sent(n int) {
	t.n += n
	if t.piped > 0 {
		t.piped -= n
		t.pipe.left -= n
		return
	}
	t.size -= n
	t.advance(n)
}

// advance takes the first n bytes from the parts.
func (t *transfer) advance(n int) {
	for left := uint64(n); left > 0; {
		v := &t.iov[0]
		if v.Len > left {
			v.Base = (*byte)(unsafe.Add(unsafe.Pointer(v.Base), left))
			v.Len -= left
			return
		}
		left -= v.Len
		t.iov = t.iov[1:]
	}
}

// named returns an error of a RawConn as op has it.
func named(op string, err error) error {
	if e, ok := err.(*net.OpError); ok {
		e.Op = op
	}
	return err
}

// failed returns the error of a system call.
func (s *Socket) failed(op, call string, errno syscall.Errno) error {
	return &net.OpError{Op: op, Net: "tcp", Source: s.nc.LocalAddr(), Addr: s.nc.RemoteAddr(), Err: os.NewSyscallError(call, errno)}
}
