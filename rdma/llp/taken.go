package llp

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// control calls f with the descriptor of nc, and reports whether nc is an open socket.
func control(nc net.Conn, f func(fd int)) bool {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	return err == nil && raw.Control(func(fd uintptr) { f(int(fd)) }) == nil
}

// Taken returns how many bytes of the stream the peer's TCP has acknowledged, and how many the kernel
// still holds for it: those on their way, and those for which the peer has no room. It asks the
// kernel, so what a writer does costs nothing. ok is false if nc is not an open socket.
func Taken(nc net.Conn) (taken, owed uint64, ok bool) {
	control(nc, func(fd int) {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			return
		}
		n, err := unix.IoctlGetInt(fd, unix.TIOCOUTQ)
		if err != nil {
			return
		}
		taken, owed, ok = info.Bytes_acked, uint64(n), true
	})
	return taken, owed, ok
}

// Closed reports whether nc is a TCP connection that has ended in both directions, by a reset for example.
func Closed(nc net.Conn) (closed bool) {
	control(nc, func(fd int) {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		closed = err == nil && info.State == unix.BPF_TCP_CLOSE
	})
	return closed
}
