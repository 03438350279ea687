package llp

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrNothing is what a read returns instead of waiting.
var ErrNothing = fmt.Errorf("nothing has come from the peer: %w", os.ErrDeadlineExceeded)

// Ready reports whether a read from a socket would return at once: something has come, the peer has closed its direction, or the
// connection has failed or is closed.
func Ready(raw syscall.RawConn) (ready bool) {
	err := raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		ready = err != unix.EAGAIN && err != unix.EINTR
	})
	return ready || err != nil
}
