package api

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"syscall"

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

// Listen creates a Unix socket that only its owner can connect to, or takes that of another process. It is one of open. It replaces the socket of
// a dead process. If that process is alive, the error is ErrInUse. Any other file at path
// is an error, and stays.
func Listen(path string, open *handover.Listeners) (net.Listener, error) {
	// The holder of the lock owns the socket. A process that dies loses the lock, and two
	// that start at once cannot take the socket from each other.
	lock, ok := handed.Take(path + ".lock")
	if !ok {
		var err error
		if lock, err = os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600); err != nil {
			return nil, err
		}
	}
	l, _, err := open.Listen("control socket "+path, func() (net.Listener, error) { return listen(path, lock) })
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	l.Locked(lock)
	return &listener{Listener: l, path: path, lock: lock}, nil
}

func listen(path string, lock *os.File) (net.Listener, error) {
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
	return ul, nil
}

// Accept implements net.Listener. The remote address of a connection is its process.
func (l *listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return peer{c.(*net.UnixConn)}, nil
}

// A peer is a connection of the socket.
type peer struct{ *net.UnixConn }

// A process is the address of a peer.
type process string

func (process) Network() string  { return "unix" }
func (p process) String() string { return string(p) }

// RemoteAddr returns the process at the other end. Clients of a Unix socket have no other address.
func (p peer) RemoteAddr() net.Addr {
	var cred *unix.Ucred
	raw, err := p.SyscallConn()
	if err == nil {
		err2 := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
		err = errors.Join(err, err2)
	}
	if err != nil {
		return process("unknown process")
	}
	return process(fmt.Sprintf("uid %d, process %d", cred.Uid, cred.Pid))
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
