//go:build amd64

package crash

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// A recorder runs the program under ptrace(2). After each system call that may have changed a
// directory it notes how that looks, and for each sync it notes what is durable since then.
type recorder struct {
	dir   string
	pid   int
	ended chan error // has room for one

	mu     sync.Mutex // guards what follows
	forest forest
	steps  []step
}

// record starts the program with its output in the file log.
func record(t *testing.T, dir, log, program string, args ...string) *recorder {
	t.Helper()
	r := &recorder{dir: dir, ended: make(chan error, 1), forest: newForest(dir)}
	started := make(chan error)
	go func() {
		// All requests come from the thread that started the process.
		runtime.LockOSThread()
		out, err := os.OpenFile(log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err == nil {
			defer out.Close()
			r.pid, err = syscall.ForkExec(program, append([]string{program}, args...), &syscall.ProcAttr{
				Env: environment(), Files: []uintptr{0, out.Fd(), out.Fd()}, Sys: &syscall.SysProcAttr{Ptrace: true}})
		}
		started <- err
		if err == nil {
			r.ended <- r.trace()
		}
	}()
	switch err := <-started; err {
	case nil:
	case unix.EPERM:
		t.Skipf("ptrace(2) is not permitted here: %v", err)
	default:
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Kill(r.pid, unix.SIGKILL) })
	return r
}

// stop kills the process and returns what was noted.
func (r *recorder) stop(t *testing.T) []step {
	t.Helper()
	unix.Kill(r.pid, unix.SIGKILL)
	if err := <-r.ended; err != nil {
		t.Fatal(err)
	}
	return r.steps
}

// count returns how many steps were noted so far.
func (r *recorder) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.steps)
}

// trace lets the threads of the process run from one system call to the next, until the process ends.
func (r *recorder) trace() error {
	const syscallStop = unix.SIGTRAP | 0x80
	var ws unix.WaitStatus
	if _, err := unix.Wait4(r.pid, &ws, unix.WALL, nil); err != nil {
		return err
	}
	if err := unix.PtraceSetOptions(r.pid, unix.PTRACE_O_TRACESYSGOOD|unix.PTRACE_O_TRACECLONE|unix.PTRACE_O_EXITKILL); err != nil {
		return err
	}
	entered := map[int]*unix.PtraceRegs{} // threads in a system call
	seen := map[int]bool{r.pid: true}
	for next, sig := r.pid, 0; ; {
		if err := unix.PtraceSyscall(next, sig); err != nil && err != unix.ESRCH { // it was killed
			return err
		}
		for {
			var err error
			if next, err = unix.Wait4(-1, &ws, unix.WALL|unix.WNOTHREAD, nil); err == nil {
				break
			}
			if err == unix.ECHILD {
				return nil
			}
			if err != unix.EINTR {
				return err
			}
		}
		sig = 0
		switch {
		case !ws.Stopped(): // a thread has ended, and nothing is to be continued
			if next == r.pid {
				return nil
			}
			delete(entered, next)
			next = 0
		case ws.StopSignal() == syscallStop && entered[next] == nil:
			entered[next] = new(unix.PtraceRegs)
			if err := unix.PtraceGetRegs(next, entered[next]); err != nil && err != unix.ESRCH {
				return err
			}
		case ws.StopSignal() == syscallStop:
			var out unix.PtraceRegs
			if err := unix.PtraceGetRegs(next, &out); err == nil && int64(out.Rax) >= 0 {
				if err := r.called(next, entered[next]); err != nil {
					return err
				}
			}
			delete(entered, next)
		case ws.StopSignal() == unix.SIGTRAP: // a new thread
		case ws.StopSignal() == unix.SIGSTOP && !seen[next]:
			seen[next] = true
		default:
			sig = int(ws.StopSignal())
		}
	}
}

// changesNames are system calls that change names in directories, or files by their names.
var changesNames = map[uint64]bool{
	unix.SYS_RENAME: true, unix.SYS_RENAMEAT: true, unix.SYS_RENAMEAT2: true, unix.SYS_LINK: true, unix.SYS_LINKAT: true,
	unix.SYS_UNLINK: true, unix.SYS_UNLINKAT: true, unix.SYS_MKDIR: true, unix.SYS_MKDIRAT: true, unix.SYS_RMDIR: true,
	unix.SYS_SETXATTR: true, unix.SYS_CHMOD: true, unix.SYS_FCHMODAT: true,
}

// changesFile are those that change the file of their first argument.
var changesFile = map[uint64]bool{
	unix.SYS_WRITE: true, unix.SYS_PWRITE64: true, unix.SYS_WRITEV: true, unix.SYS_PWRITEV: true, unix.SYS_PWRITEV2: true,
	unix.SYS_FTRUNCATE: true, unix.SYS_FALLOCATE: true, unix.SYS_FCHMOD: true, unix.SYS_FSETXATTR: true, unix.SYS_IOCTL: true,
}

// called notes what a system call has done, which has succeeded.
func (r *recorder) called(tid int, in *unix.PtraceRegs) error {
	nr, fd := in.Orig_rax, in.Rdi
	if nr == unix.SYS_COPY_FILE_RANGE {
		fd = in.Rdx
	}
	link := fmt.Sprintf("/proc/%d/fd/%d", tid, fd)
	ours := func() bool {
		path, err := os.Readlink(link)
		return err == nil && strings.HasPrefix(path, r.dir)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case changesNames[nr], nr == unix.SYS_OPENAT && in.Rdx&(unix.O_CREAT|unix.O_TRUNC) != 0:
	case (nr == unix.SYS_FSYNC || nr == unix.SYS_FDATASYNC) && ours():
		return r.forest.synced(link, &r.steps)
	case (changesFile[nr] || nr == unix.SYS_COPY_FILE_RANGE) && ours():
		if nr == unix.SYS_PWRITEV2 && in.R9&unix.RWF_DSYNC != 0 {
			if err := r.forest.changed(&r.steps); err != nil {
				return err
			}
			return r.forest.synced(link, &r.steps)
		}
	default:
		return nil
	}
	return r.forest.changed(&r.steps)
}
