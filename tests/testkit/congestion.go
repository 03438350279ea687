package testkit

import (
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Unpaced gives a socket a congestion control that does not pace, whatever the machine has. Connections that a listener accepts have that of the listener.
func Unpaced(tb testing.TB, c syscall.Conn) {
	tb.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		if e := raw.Control(func(fd uintptr) { err = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "reno") }); e != nil {
			err = e
		}
	}
	if err != nil {
		tb.Fatal(err)
	}
}
