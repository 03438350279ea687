package api

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/user"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/handed"
	"github.com/iser-target/iser-target/cmd/iser-target/handover"
)

// ErrInUse is the error of Listen when another process serves on the socket.
var ErrInUse = errors.New("another target serves on this socket")

// A listener is a Unix socket and the lock that reserves it.
type listener struct {
	*handover.Listener
	path  string
	lock  *os.File
	close sync.Once
}

// Listen creates a Unix socket, or takes that of another process. It is one of open. Only its owner can connect to it, and the
// group with that name or number unless group is empty. Listen replaces the socket of a dead process. If that process is alive, the error is ErrInUse.
// Any other file at path is an error, and stays.
func Listen(path, group string, open *handover.Listeners) (net.Listener, error) {
	gid := -1
	if group != "" {
		n, err := groupNumber(group, user.LookupGroup)
		if err != nil {
			return nil, fmt.Errorf("group %s: %w", group, err)
		}
		gid = int(n)
	}
	// The holder of the lock owns the socket. A process that dies loses the lock, and two
	// that start at once cannot take the socket from each other.
	lock, ok := handed.Take(path + ".lock")
	if !ok {
		var err error
		if lock, err = os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600); err != nil {
			return nil, err
		}
	}
	l, received, err := open.Listen("control socket "+path, func() (net.Listener, error) { return listen(path, gid, lock) })
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if received {
		if err := share(path, gid); err != nil && !errors.Is(err, fs.ErrNotExist) {
			l.Close()
			lock.Close()
			return nil, err
		}
	}
	l.Locked(lock)
	return &listener{Listener: l, path: path, lock: lock}, nil
}

// share lets a group connect to the socket at path, in addition to its owner; -1: none.
func share(path string, gid int) error {
	if gid < 0 {
		return os.Chmod(path, 0o600)
	}
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &fs.PathError{Op: "lstat", Path: path, Err: err}
	}
	if int(st.Gid) != gid { // the directory may have given it the group, where the service must not
		if err := os.Lchown(path, -1, gid); err != nil {
			return fmt.Errorf("%w. Only members of the group, and root, can give it the socket; docs/service.md says what the service needs", err)
		}
	}
	return os.Chmod(path, 0o660)
}

func listen(path string, gid int, lock *os.File) (net.Listener, error) {
	switch err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return nil, ErrInUse
	case err != nil:
		return nil, err
	}
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, err
	case fi.Mode().Type() != fs.ModeSocket:
		return nil, errors.New("file exists and is not a socket")
	default:
		if c, err := net.Dial("unix", path); err == nil { // of a process without our lock
			c.Close()
			return nil, ErrInUse
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	// bind(2) gives the file the mode of the socket, less the umask, so at no moment can
	// others connect.
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if err2 := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); err2 != nil {
			return err2
		}
		return err
	}}
	l, err := lc.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, err
	}
	ul := l.(*net.UnixListener)
	ul.SetUnlinkOnClose(false) // see close
	if err := share(path, gid); err != nil {
		return nil, errors.Join(err, os.Remove(path), ul.Close())
	}
	return ul, nil
}

// Accept implements net.Listener. The remote address of a connection is its process.
func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	uc := c.(*net.UnixConn)
	return peer{uc, processOf(uc)}, nil
}

// A peer is a connection of the socket.
type peer struct {
	*net.UnixConn
	from *process
}

// RemoteAddr returns the process at the other end. Clients of a Unix socket have no other address.
func (p peer) RemoteAddr() net.Addr { return p.from }

// A process is the address of a peer: the process that connected, with the rights that it had then.
type process struct {
	pid      int32
	uid, gid uint32
	groups   []uint32 // besides gid
	known    bool     // the kernel has named the process
}

// Network returns "unix".
func (*process) Network() string { return "unix" }

// String names the process.
func (p *process) String() string {
	if !p.known {
		return "unknown process"
	}
	return fmt.Sprintf("uid %d, process %d", p.uid, p.pid)
}

// AddressKey returns the same for all processes of a user, which limits.AddressKey takes for one host.
func (p *process) AddressKey() string {
	if !p.known {
		return "unknown process"
	}
	return fmt.Sprintf("uid %d", p.uid)
}

// processOf returns the process at the other end of c.
func processOf(c *net.UnixConn) *process {
	p := &process{}
	raw, err := c.SyscallConn()
	if err != nil {
		return p
	}
	raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil {
			return
		}
		p.pid, p.uid, p.gid, p.known = cred.Pid, cred.Uid, cred.Gid, true
		p.groups, _ = peerGroups(fd) // without them the caller has fewer rights
	})
	return p
}

// peerGroups returns the supplementary groups of the process that connected to fd (SO_PEERGROUPS, unix(7)).
func peerGroups(fd uintptr) ([]uint32, error) {
	groups := make([]uint32, 64)
	for {
		size := uint32(4 * len(groups))
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&groups[0])), uintptr(unsafe.Pointer(&size)), 0)
		switch {
		case errno == 0:
			return groups[:size/4], nil
		case errno == unix.ERANGE && int(size) > 4*len(groups): // the kernel says how much it takes
			groups = make([]uint32, size/4)
		default:
			return nil, errno
		}
	}
}

// Close implements net.Listener. It removes the socket before it releases the lock, unless another process has both.
func (l *listener) Close() error {
	err := net.ErrClosed
	l.close.Do(func() {
		err = nil
		if !l.Elsewhere() {
			err = os.Remove(l.path)
		}
		err = errors.Join(err, l.Listener.Close(), l.lock.Close())
	})
	return err
}
