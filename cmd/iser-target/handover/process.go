package handover

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A Process is the taker, as the giver sees it.
type Process struct {
	cmd   *exec.Cmd
	pid   int
	ended chan struct{}
	mu    sync.Mutex
	pidfd int  // guarded by mu; of a running sibling, or negative
	gone  bool // guarded by mu; the sibling ended
}

// Start starts cmd, which a Process then owns. With sibling, the new process is a child of the parent of this one (CLONE_PARENT), if the kernel has
// pidfds (Linux 5.3). The kernel refuses that to process 1 of a PID namespace.
func Start(cmd *exec.Cmd, sibling bool) (*Process, error) {
	if sibling {
		own, err := unix.PidfdOpen(os.Getpid(), 0)
		if sibling = err == nil; sibling {
			unix.Close(own)
		}
	}
	pidfd := -1
	if sibling {
		if cmd.SysProcAttr == nil {
			cmd.SysProcAttr = &unix.SysProcAttr{}
		}
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_PARENT
		cmd.SysProcAttr.PidFD = &pidfd
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	p := &Process{cmd: cmd, pid: cmd.Process.Pid, ended: make(chan struct{}), pidfd: pidfd}
	go func() {
		defer close(p.ended)
		if pidfd >= 0 { // Wait fails at once for the child of another process
			awaitEnd(pidfd, -1)
			p.mu.Lock()
			p.pidfd, p.gone = -1, true
			p.mu.Unlock()
			unix.Close(pidfd)
		}
		cmd.Wait()
		cmd.Process.Release()
	}()
	return p, nil
}

// awaitEnd waits until the process of a pidfd ends and releases its files. A limit that is not negative bounds the wait. It reports
// whether the process ended.
func awaitEnd(pidfd int, limit time.Duration) bool {
	by := time.Now().Add(limit)
	for {
		ms := -1
		if limit >= 0 {
			ms = int(max(0, time.Until(by)).Milliseconds())
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, ms)
		if !errors.Is(err, unix.EINTR) {
			return n > 0
		}
	}
}

// PID returns the process ID.
func (p *Process) PID() int { return p.pid }

// Path returns the file of the program.
func (p *Process) Path() string { return p.cmd.Path }

// Ended returns a channel that is closed when the process ends.
func (p *Process) Ended() <-chan struct{} { return p.ended }

// HasEnded reports whether the process ended.
func (p *Process) HasEnded() bool {
	select {
	case <-p.ended:
		return true
	default:
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.gone || p.pidfd >= 0 && awaitEnd(p.pidfd, 0)
}

// End returns how the process ended: "ended: exit status 1". Only the parent learns the status.
func (p *Process) End() string {
	select {
	case <-p.ended:
		if s := p.cmd.ProcessState; s != nil {
			return "ended: " + s.String()
		}
	default:
	}
	return "ended"
}

// Kill ends the process. Nothing happens if it ended.
func (p *Process) Kill() { p.cmd.Process.Kill() }
