package llp

import (
	"io"
	"net"
	"os"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A buffersReader is a net.Conn that wraps a socket and forwards to ReadBuffers of a Scatter.
type buffersReader interface {
	ReadBuffers(p, q []byte) (int, error)
}

// BuffersReader returns a function that reads from nc to p, and to q what comes after that, with one system call. Like Read of an io.Reader, it waits
// until something has come. It is nil if nc has no such function.
func BuffersReader(nc net.Conn) func(p, q []byte) (int, error) {
	switch nc := nc.(type) {
	case buffersReader:
		return nc.ReadBuffers
	case *net.TCPConn:
		if s := NewScatter(nc); s != nil {
			return s.ReadBuffers
		}
	}
	return nil
}

// A Scatter reads from a TCP connection to two places at once (readv(2)). It belongs to one goroutine at a time.
type Scatter struct {
	nc   *net.TCPConn
	raw  syscall.RawConn
	read func(fd uintptr) bool // readNow, once, so that ReadBuffers allocates nothing

	// Of one ReadBuffers:
	iov [2]unix.Iovec
	n   int
	err error
}

// NewScatter returns a Scatter for nc, or nil if nc is closed.
func NewScatter(nc *net.TCPConn) *Scatter {
	raw, err := nc.SyscallConn()
	if err != nil {
		return nil
	}
	s := &Scatter{nc: nc, raw: raw}
	s.read = s.readNow
	return s
}

// ReadBuffers does what BuffersReader says. Neither p nor q is empty. Its errors are those of Read of a net.TCPConn.
func (s *Scatter) ReadBuffers(p, q []byte) (int, error) {
	for i, b := range [...][]byte{p, q} {
		s.iov[i].Base = unsafe.SliceData(b)
		s.iov[i].SetLen(len(b))
	}
	s.n, s.err = 0, nil
	err := s.raw.Read(s.read)
	runtime.KeepAlive(p)
	s.iov[0].Base, s.iov[1].Base = nil, nil // do not keep the data alive
	switch {
	case err != nil:
		if op, ok := err.(*net.OpError); ok {
			op.Op = "read"
		}
		return 0, err
	case s.err != nil:
		return 0, &net.OpError{Op: "read", Net: "tcp", Source: s.nc.LocalAddr(), Addr: s.nc.RemoteAddr(), Err: s.err}
	case s.n == 0:
		return 0, io.EOF
	}
	return s.n, nil
}

// readNow reads what has come. It returns false if that is nothing yet.
func (s *Scatter) readNow(fd uintptr) bool {
	for {
		n, _, errno := unix.Syscall(unix.SYS_READV, fd, uintptr(unsafe.Pointer(&s.iov)), uintptr(len(s.iov)))
		switch errno {
		case 0:
			s.n = int(n)
			acquire(fd)
			return true
		case unix.EAGAIN:
			return false
		case unix.EINTR:
		default:
			s.err = os.NewSyscallError("read", errno)
			return true
		}
	}
}
