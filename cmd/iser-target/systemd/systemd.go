// Package systemd lets a service talk to its manager: notifications (sd_notify(3)), the
// watchdog (sd_watchdog_enabled(3)) and sockets that the manager opened before it started
// the service (sd_listen_fds(3)). All of it begins with variables of the environment,
// which the package removes. Without them it does nothing.
package systemd

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
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
	// Room is how many files the manager keeps while the service restarts (FileDescriptorStoreMax=).
	Room int
	// Kept are the files that the process before stored, by name. They belong to the caller.
	Kept map[string]*os.File
	// turn is closed when this process has become the main process. nil: it is.
	turn <-chan struct{}
	left atomic.Bool // another process is the main process, or becomes it
}

// kept is how the names of stored files begin.
const kept = "kept-"

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
	if v := os.Getenv("FDSTORE"); v != "" {
		if m.Room, err = strconv.Atoi(v); err != nil || m.Room < 0 {
			return nil, fmt.Errorf("FDSTORE is %q, want a number of files", v)
		}
		os.Unsetenv("FDSTORE")
	}
	for _, f := range activation.Files(true) {
		if name, ok := strings.CutPrefix(f.Name(), kept); ok {
			m.keep(name, f)
			continue
		}
		l, err := listener(f)
		if err != nil { // the others stay open until the process ends
			return nil, fmt.Errorf("socket %q does not listen on TCP: %w", f.Name(), err)
		}
		m.Sockets = append(m.Sockets, &Socket{l, f.Name()})
	}
	return m, nil
}

// keep adds f to Kept, and lets the manager forget it: else the sockets would never be closed.
func (m *Manager) keep(name string, f *os.File) {
	if m.Kept == nil {
		m.Kept = map[string]*os.File{}
	}
	m.Kept[name] = f
	_ = m.Notify("FDSTOREREMOVE=1", "FDNAME="+kept+name) // it forgets all when the service ends
}

// Store lets the manager keep a copy of a file for the next process of the service, and Stored waits until it has all.
func (m *Manager) Store(name string, fd int) error {
	return m.send(unix.UnixRights(fd), "FDSTORE=1", "FDNAME="+kept+name, "FDPOLL=0")
}

// Stored waits until the manager has handled all notifications (sd_notify_barrier(3)).
func (m *Manager) Stored() error { return m.barrier(m.send) }

func (m *Manager) barrier(send func(rights []byte, assignments ...string) error) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	err = send(unix.UnixRights(int(w.Fd())), "BARRIER=1")
	if err = errors.Join(err, w.Close()); err != nil {
		return err
	}
	if err := r.SetReadDeadline(time.Now().Add(notifyTime)); err != nil {
		return err
	}
	if _, err := r.Read(make([]byte, 1)); err != io.EOF { // the manager closes its copy
		return fmt.Errorf("the manager does not answer: %w", err)
	}
	return nil
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

// After delays notifications until turn is closed, each for at most notifyTime: with NotifyAccess=main the manager refuses those of
// a process that is not the main process yet. The caller sends none meanwhile.
func (m *Manager) After(turn <-chan struct{}) { m.turn = turn }

// Leave makes another process the main process of the service, and returns when the manager knows it. All later notifications of
// this process are dropped.
func (m *Manager) Leave(pid int) error {
	m.left.Store(true)
	err := m.write(nil, "MAINPID="+strconv.Itoa(pid), "STATUS=upgrading")
	return errors.Join(err, m.barrier(m.write))
}

// Environment returns the assignments by which another process finds the manager. It becomes the main process
// of the service by Leave.
func (m *Manager) Environment() (list []string) {
	if m.conn != nil {
		list = append(list, "NOTIFY_SOCKET="+m.conn.RemoteAddr().String())
	}
	if m.Watchdog > 0 {
		list = append(list, fmt.Sprintf("WATCHDOG_USEC=%d", m.Watchdog.Microseconds()))
	}
	if m.Room > 0 {
		list = append(list, fmt.Sprintf("FDSTORE=%d", m.Room))
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
	return m.send(nil, assignments...)
}

// send sends assignments with files, in the form of unix.UnixRights, if and when it is the turn of this process.
func (m *Manager) send(rights []byte, assignments ...string) error {
	if m.turn != nil {
		select {
		case <-m.turn:
		case <-time.After(notifyTime):
		}
	}
	if m.left.Load() {
		return nil
	}
	return m.write(rights, assignments...)
}

// write sends assignments with files at once.
func (m *Manager) write(rights []byte, assignments ...string) error {
	raw, err := m.conn.SyscallConn()
	if err == nil {
		err = m.conn.SetWriteDeadline(time.Now().Add(notifyTime))
	}
	if err != nil {
		return err
	}
	// WriteMsgUnix does not write to a connected socket for datagrams.
	err2 := raw.Write(func(fd uintptr) bool {
		err = unix.Sendmsg(int(fd), []byte(strings.Join(assignments, "\n")), rights, nil, unix.MSG_NOSIGNAL)
		return !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR)
	})
	return errors.Join(err2, err)
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
	i := slices.IndexFunc(m.Sockets, m.Matches(listen))
	if i < 0 {
		return nil
	}
	s := m.Sockets[i]
	m.Sockets = slices.Delete(m.Sockets, i, i+1)
	return s
}

// Matches returns which of Sockets Match finds for an address.
func (m *Manager) Matches(listen string) func(*Socket) bool {
	want, err := net.ResolveTCPAddr("tcp", listen)
	return func(s *Socket) bool { return err == nil && sameAddr(want, s.Addr().(*net.TCPAddr)) } // net.Listen reports the error
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
