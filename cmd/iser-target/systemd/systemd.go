// Package systemd lets a service talk to its manager: notifications (sd_notify(3)), the
// watchdog (sd_watchdog_enabled(3)) and sockets that the manager opened before it started
// the service (sd_listen_fds(3)). All of it begins with variables of the environment,
// which the package removes. Without them it does nothing.
package systemd

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
)

// notifyTime bounds the wait for a manager that does not read its socket.
const notifyTime = 2 * time.Second

// A Manager is the service manager that started the process. The zero value is none.
type Manager struct {
	conn *net.UnixConn
	// Watchdog is the time without WATCHDOG=1 after which the manager ends the process; 0: never.
	Watchdog time.Duration
	Sockets  []*Socket // that the manager passed, in its order
}

// A Socket is a listener that the manager passed.
type Socket struct {
	net.Listener
	Name string // FileDescriptorName= of the socket unit
}

// FromEnvironment returns the service manager that started the process. An error names a
// variable that is wrong, or a socket that does not listen on TCP.
func FromEnvironment() (*Manager, error) {
	m := &Manager{}
	var err error
	if m.conn, err = dial(); err != nil {
		return nil, err
	}
	if m.Watchdog, err = daemon.SdWatchdogEnabled(true); err != nil {
		return nil, err
	}
	if err := checkSockets(); err != nil {
		return nil, err
	}
	for _, f := range activation.Files(true) {
		l, err := listener(f)
		if err != nil { // the others stay open until the process ends
			return nil, fmt.Errorf("socket %q does not listen on TCP: %w", f.Name(), err)
		}
		m.Sockets = append(m.Sockets, &Socket{l, f.Name()})
	}
	return m, nil
}

// checkSockets fails if the variables for sockets are wrong, which activation.Files ignores.
func checkSockets() error {
	count, names := os.Getenv("LISTEN_FDS"), os.Getenv("LISTEN_FDNAMES")
	if count == "" || os.Getenv("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil // they are for another process
	}
	n, err := strconv.Atoi(count)
	switch {
	case err != nil || n < 0 || n > 1<<16:
		return fmt.Errorf("LISTEN_FDS is %q, want a number of sockets", count)
	case names != "" && strings.Count(names, ":")+1 != n:
		return fmt.Errorf("LISTEN_FDNAMES is %q, want %d names", names, n)
	}
	return nil
}

// dial connects to the socket for notifications, if there is one. daemon.SdNotify would
// wait for as long as the manager does not read.
func dial() (*net.UnixConn, error) {
	path := os.Getenv("NOTIFY_SOCKET")
	os.Unsetenv("NOTIFY_SOCKET")
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

// listener turns a file into a listener and closes the file.
func listener(f *os.File) (net.Listener, error) {
	defer f.Close()
	fd := int(f.Fd())
	listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err != nil {
		return nil, err
	}
	if listens == 0 {
		return nil, errors.New("it accepts no connections (Accept=no and ListenStream= are required)")
	}
	// Portals set options of TCP. A socket for Multipath TCP (SocketProtocol=mptcp) does
	// not have all of them.
	if p, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL); err != nil || p != unix.IPPROTO_TCP {
		return nil, errors.Join(fmt.Errorf("its protocol is number %d", p), err)
	}
	return net.FileListener(f)
}

// Environment returns the assignments by which another process finds the manager. It becomes the main process
// of the service when this one sends MAINPID=.
func (m *Manager) Environment() (list []string) {
	if m.conn != nil {
		list = append(list, "NOTIFY_SOCKET="+m.conn.RemoteAddr().String())
	}
	if m.Watchdog > 0 {
		list = append(list, fmt.Sprintf("WATCHDOG_USEC=%d", m.Watchdog.Microseconds()))
	}
	return list
}

// Present reports whether a manager accepts notifications.
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

// Reloading returns the assignments that begin a reload of the configuration. READY=1 ends it.
func Reloading() []string {
	var now unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // cannot fail: every kernel has this clock
	return []string{daemon.SdNotifyReloading, "MONOTONIC_USEC=" + strconv.FormatInt(now.Nano()/1000, 10)}
}

// Status returns a STATUS= assignment of one line.
func Status(text string) string {
	return "STATUS=" + strings.Map(func(r rune) rune {
		if r < ' ' {
			return ' '
		}
		return r
	}, text)
}

// Extend returns the assignment that asks for d more time from now on.
func Extend(d time.Duration) string {
	return "EXTEND_TIMEOUT_USEC=" + strconv.FormatInt(d.Microseconds(), 10)
}

// Match removes the socket with address listen, host:port, from Sockets and returns it, or
// nil. As for net.Listen, the wildcards of both address families are equal.
func (m *Manager) Match(listen string) *Socket {
	want, err := net.ResolveTCPAddr("tcp", listen)
	if err != nil {
		return nil // net.Listen reports it
	}
	i := slices.IndexFunc(m.Sockets, func(s *Socket) bool { return sameAddr(want, s.Addr().(*net.TCPAddr)) })
	if i < 0 {
		return nil
	}
	s := m.Sockets[i]
	m.Sockets = slices.Delete(m.Sockets, i, i+1)
	return s
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
