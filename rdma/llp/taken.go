package llp

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// Taken returns how many bytes of the stream the peer's TCP has acknowledged, and how many the kernel
// still holds for it: those on their way, and those for which the peer has no room. It asks the
// kernel, so what a writer does costs nothing. ok is false if nc is not an open socket.
func Taken(nc net.Conn) (taken, owed uint64, ok bool) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return 0, 0, false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return 0, 0, false
	}
	ok = false
	raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil {
			return
		}
		n, err := unix.IoctlGetInt(int(fd), unix.TIOCOUTQ)
		if err != nil {
			return
		}
		taken, owed, ok = info.Bytes_acked, uint64(n), true
	})
	return taken, owed, ok
}

// Closed reports whether nc is a TCP connection that has ended in both directions, by a reset for example.
func Closed(nc net.Conn) (closed bool) {
	sc, ok := nc.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		closed = err == nil && info.State == unix.BPF_TCP_CLOSE
	})
	return closed
}
