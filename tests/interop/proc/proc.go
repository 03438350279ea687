// Package proc starts processes that cannot outlive the test that started
// them.
package proc

import (
	"os/exec"
	"runtime"
	"syscall"
)

// Start starts cmd like cmd.Start, and has the kernel kill it when this process
// ends, however it ends: a test that runs into the time limit of go test runs
// no cleanup.
func Start(cmd *exec.Cmd) error {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	started := make(chan error)
	go func() {
		// The signal comes when the thread ends that made the process. A thread
		// locked to a goroutine that blocks permanently stays until the very end.
		runtime.LockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			select {}
		}
	}()
	return <-started
}
