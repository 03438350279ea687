package handover

import (
	"fmt"
	"os"
	"strconv"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// A shell, or a container runtime, waits for the process of a target that it started, sends it signals, and ends it. After
// an upgrade that process is the supervisor of the one that serves: it passes signals on, and ends when that ends. A link connects both. On
// it, the process that serves sends its process ID, and the supervisor sends one message when it has begun.

// A Supervisor is the link of the process that serves. A nil Supervisor is none.
type Supervisor struct {
	f        *os.File
	attached atomic.Bool
	settled  chan struct{} // closed when it has begun, or ended
}

// NewSupervision returns the two ends of a link: that of the supervisor, and a descriptor for the process that serves.
func NewSupervision() (own *os.File, other int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, -1, fmt.Errorf("socketpair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "supervision"), fds[1], nil
}

// NewSupervisor returns the Supervisor at the other end of f. attached says that it has begun.
func NewSupervisor(f *os.File, attached bool) *Supervisor {
	s := &Supervisor{f: f, settled: make(chan struct{})}
	s.attached.Store(attached)
	return s
}

// Attached reports whether the supervisor has begun.
func (s *Supervisor) Attached() bool { return s.attached.Load() }

// Settled returns a channel that is closed when the supervisor has begun, or has ended before. Until it has begun, it
// would not inherit the child of a child that ends. Watch was called.
func (s *Supervisor) Settled() <-chan struct{} { return s.settled }

// Fd returns the descriptor of the link.
func (s *Supervisor) Fd() int { return int(s.f.Fd()) }

// Watch sends the supervisor the ID of this process, and calls ended when the supervisor has ended. One that
// ends before it has begun does not count: it was killed while it handed over.
func (s *Supervisor) Watch(ended func()) {
	if s == nil {
		return
	}
	s.f.Write([]byte(strconv.Itoa(os.Getpid()))) // fails if it has ended
	if s.attached.Load() {
		close(s.settled)
	}
	go func() {
		var b [16]byte
		for {
			n, err := s.f.Read(b[:])
			if n == 0 || err != nil {
				break
			}
			if !s.attached.Swap(true) {
				close(s.settled)
			}
		}
		if s.attached.Load() {
			ended()
		} else {
			close(s.settled)
		}
	}()
}
