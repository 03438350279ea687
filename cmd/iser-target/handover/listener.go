package handover

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A Listener is a listener on TCP or a Unix socket that can pause: clients that connect meanwhile wait. It is
// handed over in that state.
type Listener struct {
	net.Listener
	of *Listeners

	mu      sync.Mutex
	changed sync.Cond // of mu
	paused  bool
	closed  bool
	// elsewhere: another process has it, and will serve with it unless it ends before.
	elsewhere bool
	lock      *os.File // that goes with it, or nil
}

// Listeners are the open listeners of a process, by name, and those that it got from another process. The zero value has
// none.
type Listeners struct {
	mu       sync.Mutex
	open     map[*Listener]string
	received map[string]net.Listener
}

// Listen returns the listener with that name that another process has handed over, or what open returns.
// received tells which. open must return a *net.TCPListener or *net.UnixListener.
func (s *Listeners) Listen(name string, open func() (net.Listener, error)) (l *Listener, received bool, err error) {
	s.mu.Lock()
	inner, received := s.received[name]
	delete(s.received, name)
	s.mu.Unlock()
	if !received {
		if inner, err = open(); err != nil {
			var op *net.OpError
			if errors.Is(err, unix.EADDRINUSE) && errors.As(err, &op) && op.Net != "unix" {
				err = fmt.Errorf("%w. End the program that has it, which ss -ltnp shows, or use another port", err)
			}
			return nil, false, err
		}
	}
	l = &Listener{Listener: inner, of: s, elsewhere: received}
	l.changed.L = &l.mu
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil {
		s.open = map[*Listener]string{}
	}
	s.open[l] = name
	return l, received, nil
}

// Received reports whether another process has handed over a listener with that name, which nobody has asked for yet.
func (s *Listeners) Received(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.received[name] != nil
}

// Receive adds a listener that another process has handed over, and closes f.
func (s *Listeners) Receive(name string, f *os.File) error {
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if u, ok := l.(*net.UnixListener); ok {
		u.SetUnlinkOnClose(false)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.received == nil {
		s.received = map[string]net.Listener{}
	}
	if s.received[name] != nil {
		l.Close()
		return fmt.Errorf("%s was handed over twice", name)
	}
	s.received[name] = l
	return nil
}

// CloseReceived closes the listeners that nobody has asked for, and returns their names.
func (s *Listeners) CloseReceived() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, l := range s.received {
		l.Close()
		names = append(names, name)
	}
	s.received = nil
	return names
}

// each calls f for each open listener.
func (s *Listeners) each(f func(l *Listener, name string)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for l, name := range s.open {
		f(l, name)
	}
}

// Pause pauses all open listeners.
func (s *Listeners) Pause() { s.each(func(l *Listener, _ string) { l.pause(true) }) }

// Resume ends the pause.
func (s *Listeners) Resume() { s.each(func(l *Listener, _ string) { l.pause(false) }) }

// Give notes that another process has the open listeners now, and Own that this one has them.
func (s *Listeners) Give() { s.each(func(l *Listener, _ string) { l.setElsewhere(true) }) }

// Own ends what Give, or Receive, has noted.
func (s *Listeners) Own() { s.each(func(l *Listener, _ string) { l.setElsewhere(false) }) }

func (l *Listener) setElsewhere(is bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.elsewhere = is
}

// Add adds the open listeners whose names are wanted to the files that are handed over.
func (s *Listeners) Add(to *Sender, wanted func(name string) bool) (err error) {
	s.each(func(l *Listener, name string) {
		if err == nil && wanted(name) {
			err = to.AddSocket(KindListener, name, l.Listener.(syscall.Conn))
			if l.lock != nil {
				to.Add(KindLock, l.lock.Name(), int(l.lock.Fd()))
			}
		}
	})
	return err
}

func (l *Listener) pause(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.paused = on
	at := time.Time{}
	if on {
		at = time.Unix(1, 0)
	}
	l.Listener.(interface{ SetDeadline(time.Time) error }).SetDeadline(at)
	l.changed.Broadcast()
}

// Elsewhere reports whether another process has the listener, too, and serves with it.
func (l *Listener) Elsewhere() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.elsewhere
}

// Locked notes a locked file that is handed over with l.
func (l *Listener) Locked(lock *os.File) { l.lock = lock }

// Accept implements net.Listener. It does not return during a pause.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return c, err
		}
		l.mu.Lock()
		for l.paused && !l.closed {
			l.changed.Wait()
		}
		l.mu.Unlock()
	}
}

// Close implements net.Listener.
func (l *Listener) Close() error {
	l.of.mu.Lock()
	delete(l.of.open, l)
	l.of.mu.Unlock()
	l.mu.Lock()
	l.closed = true
	l.changed.Broadcast()
	l.mu.Unlock()
	return l.Listener.Close()
}

// duplicate returns a descriptor for the socket of c. It belongs to the caller.
func duplicate(c syscall.Conn) (fd int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	err2 := raw.Control(func(old uintptr) { fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) })
	return fd, errors.Join(err, err2)
}
