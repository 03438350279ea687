package llp

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// ErrNothing is what a read returns instead of waiting.
var ErrNothing = fmt.Errorf("nothing has come from the peer: %w", os.ErrDeadlineExceeded)

// Ready reports what Come does, and true if the connection is closed.
func Ready(raw syscall.RawConn, n int) (ready bool) {
	err := raw.Control(func(fd uintptr) { ready = Come(int(fd), n) })
	return ready || err != nil
}

// Come reports whether n bytes, at least 1, have come to the socket fd, or as many as it has room for whatever the size of their
// segments. It is also true if no more will come, because the peer has closed its direction or the connection has failed.
func Come(fd, n int) bool {
	p := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN | unix.POLLRDHUP}}
	for {
		some, err := unix.Poll(p[:], 0)
		switch {
		case err == unix.EINTR:
			continue
		case err == nil && some == 0:
			return false
		case err != nil || n <= 1 || p[0].Revents&^unix.POLLIN != 0:
			return true
		}
		came, err := unix.IoctlGetInt(fd, unix.SIOCINQ)
		if err != nil || came >= n {
			return true
		}
		room, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
		return err != nil || came >= room/4 // half of it is for the records of the kernel
	}
}
