// Package systemd is what a service has to say to its manager and what it gets from it:
// notifications (sd_notify(3)), the watchdog (sd_watchdog_enabled(3)) and sockets that
// are open before it starts (sd_listen_fds(3)). Everything is in the environment; a
// process that no manager has started finds nothing there, and then nothing happens.
//
// What is found is taken out of the environment.
package systemd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// firstFD is the first descriptor that is passed: SD_LISTEN_FDS_START.
const firstFD = 3

// notifyTime bounds the wait for a manager that does not take what it is told.
const notifyTime = 2 * time.Second

// A Manager is who has started the process. The zero value is nobody.
type Manager struct {
	conn *net.UnixConn
	// Watchdog is after which time without Alive the manager ends the process; 0: it
	// does not watch.
	Watchdog time.Duration
	// Sockets are those that were passed, in their order.
	Sockets []*Socket
}

// A Socket is a listener that was passed.
type Socket struct {
	net.Listener
	Name string // FileDescriptorName= of the socket unit; "unknown" without one
}

// FromEnvironment is who has started the process. An error says which variable is wrong,
// or which socket is not one that listens on TCP.
func FromEnvironment() (*Manager, error) {
	m := &Manager{}
	var err error
	if m.conn, err = dial(take("NOTIFY_SOCKET")); err != nil {
		return nil, err
	}
	usec, pid := take("WATCHDOG_USEC"), take("WATCHDOG_PID")
	if usec != "" && (pid == "" || isOurs(pid)) {
		n, err := strconv.ParseInt(usec, 10, 64)
		if err != nil || n <= 0 || n > int64(1<<63-1)/int64(time.Microsecond) {
			return nil, fmt.Errorf("WATCHDOG_USEC is %q, want microseconds", usec)
		}
		m.Watchdog = time.Duration(n) * time.Microsecond
	}
	m.Sockets, err = sockets(take("LISTEN_PID"), take("LISTEN_FDS"), take("LISTEN_FDNAMES"))
	if err != nil {
		return nil, err
	}
	return m, nil
}

func take(name string) string {
	v := os.Getenv(name)
	os.Unsetenv(name)
	return v
}

// isOurs tells that the variables are for this process and not for one that has started
// it.
func isOurs(pid string) bool { return pid == strconv.Itoa(os.Getpid()) }

func dial(path string) (*net.UnixConn, error) {
	switch {
	case path == "":
		return nil, nil
	case path[0] != '/' && path[0] != '@':
		return nil, fmt.Errorf("NOTIFY_SOCKET is %q, want an absolute path or @ and an abstract name", path)
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		return nil, fmt.Errorf("NOTIFY_SOCKET: %w", err)
	}
	return c, nil
}

func sockets(pid, count, names string) ([]*Socket, error) {
	if count == "" || !isOurs(pid) {
		return nil, nil
	}
	n, err := strconv.Atoi(count)
	if err != nil || n < 0 || n > 1<<16 {
		return nil, fmt.Errorf("LISTEN_FDS is %q, want a number of sockets", count)
	}
	var named []string
	if names != "" {
		if named = strings.Split(names, ":"); len(named) != n {
			return nil, fmt.Errorf("LISTEN_FDNAMES is %q, want %d names", names, n)
		}
	}
	// All of them before anything can fail: none is to stay open in a child.
	for fd := firstFD; fd < firstFD+n; fd++ {
		unix.CloseOnExec(fd)
	}
	var list []*Socket
	for i := range n {
		name := "unknown"
		if named != nil {
			name = named[i]
		}
		l, err := listener(firstFD + i)
		if err != nil {
			for _, s := range list {
				s.Close()
			}
			return nil, fmt.Errorf("socket %q, descriptor %d, is not one that listens on TCP: %w", name, firstFD+i, err)
		}
		list = append(list, &Socket{l, name})
	}
	return list, nil
}

// listener makes a listener of a descriptor, which it closes.
func listener(fd int) (net.Listener, error) {
	f := os.NewFile(uintptr(fd), "")
	defer f.Close()
	listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err != nil {
		return nil, err
	}
	if listens == 0 {
		return nil, errors.New("nobody can connect to it (Accept=no and ListenStream= are needed)")
	}
	// The options that portals have are those of TCP: a socket for Multipath TCP
	// (SocketProtocol=mptcp) does not know them all.
	if p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err != nil || p != unix.IPPROTO_TCP {
		return nil, errors.Join(fmt.Errorf("its protocol is number %d", p), err)
	}
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	return l, nil
}

// Present tells that there is a manager that takes notifications.
func (m *Manager) Present() bool { return m.conn != nil }

// Notify sends assignments, such as READY=1.
func (m *Manager) Notify(assignments ...string) error {
	if m.conn == nil {
		return nil
	}
	if err := m.conn.SetWriteDeadline(time.Now().Add(notifyTime)); err != nil {
		return err
	}
	_, err := m.conn.Write([]byte(strings.Join(assignments, "\n")))
	return err
}

// Reloading is what announces that the configuration is being read again, until READY=1.
func Reloading() []string {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return []string{"RELOADING=1"} // all that managers before version 253 want
	}
	return []string{"RELOADING=1", "MONOTONIC_USEC=" + strconv.FormatInt(now.Nano()/1000, 10)}
}

// Status is a STATUS= of one line.
func Status(text string) string {
	return "STATUS=" + strings.Map(func(r rune) rune {
		if r < ' ' {
			return ' '
		}
		return r
	}, text)
}

// Extend asks for so much more time from now on.
func Extend(d time.Duration) string {
	return "EXTEND_TIMEOUT_USEC=" + strconv.FormatInt(d.Microseconds(), 10)
}

// Match takes the socket out of the list on which listen, a host and a port, is open, or
// returns nil. Wildcards are the same in both families, as they are to net.Listen.
func (m *Manager) Match(listen string) *Socket {
	want, err := net.ResolveTCPAddr("tcp", listen)
	if err != nil {
		return nil // what is wrong with it is told by who listens
	}
	for i, s := range m.Sockets {
		if s != nil && sameAddr(want, s.Addr().(*net.TCPAddr)) {
			m.Sockets = append(m.Sockets[:i:i], m.Sockets[i+1:]...)
			return s
		}
	}
	return nil
}

func sameAddr(a, b *net.TCPAddr) bool {
	if a.Port != b.Port {
		return false
	}
	if anyIP(a.IP) || anyIP(b.IP) {
		return anyIP(a.IP) && anyIP(b.IP)
	}
	return a.IP.Equal(b.IP) && a.Zone == b.Zone
}

func anyIP(ip net.IP) bool { return len(ip) == 0 || ip.IsUnspecified() }
