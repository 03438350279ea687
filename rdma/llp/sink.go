package llp

import (
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// A Sink drops data of a TCP connection in the kernel, without a copy (MSG_TRUNC; tcp(7)). It belongs to one goroutine at a time.
type Sink struct {
	raw  syscall.RawConn
	drop func(fd uintptr) bool // dropNow, once, so that Drop allocates nothing

	// Of one Drop:
	n, dropped int
	err        error
}

// NewSink returns a Sink for a TCP connection.
func NewSink(raw syscall.RawConn) *Sink {
	s := &Sink{raw: raw}
	s.drop = s.dropNow
	return s
}

// Drop waits for data, and drops up to n bytes of it, n > 0. It returns how many, and io.EOF at the end of the stream. The read deadline
// of the connection limits the wait.
func (s *Sink) Drop(n int) (int, error) {
	s.n, s.dropped, s.err = n, 0, nil
	if err := s.raw.Read(s.drop); err != nil {
		return 0, err
	}
	if s.dropped == 0 && s.err == nil {
		return 0, io.EOF
	}
	return s.dropped, s.err
}

// dropNow drops what has come. It returns false if that is nothing yet.
func (s *Sink) dropNow(fd uintptr) bool {
	for {
		// With MSG_TRUNC, TCP takes only a length, and no memory. The call does not wait, so Go's scheduler need not know of it.
		n, _, errno := unix.RawSyscall6(unix.SYS_RECVFROM, fd, 0, uintptr(s.n), unix.MSG_TRUNC|unix.MSG_DONTWAIT, 0, 0)
		switch errno {
		case 0:
			s.dropped = int(n)
			return true
		case unix.EAGAIN:
			return false
		case unix.EINTR:
		default:
			s.err = os.NewSyscallError("recvfrom", errno)
			return true
		}
	}
}
