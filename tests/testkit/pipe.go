package testkit

import (
	"testing"

	"golang.org/x/sys/unix"
)

// A Pipe has room for 1 MiB in pages. Its descriptors never wait.
type Pipe struct{ In, Out int }

// NewPipe returns a Pipe, which is closed at the end of the test.
func NewPipe(tb testing.TB) Pipe {
	tb.Helper()
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { unix.Close(fds[0]); unix.Close(fds[1]) })
	if _, err := unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, 1<<20); err != nil {
		tb.Fatal(err)
	}
	return Pipe{fds[1], fds[0]}
}

// Content removes all that is in p, and returns it.
func (p Pipe) Content(tb testing.TB) (all []byte) {
	tb.Helper()
	for b := make([]byte, 64<<10); ; {
		n, err := unix.Read(p.Out, b)
		if err == unix.EAGAIN {
			return all
		}
		if err != nil {
			tb.Fatal(err)
		}
		all = append(all, b[:n]...)
	}
}
