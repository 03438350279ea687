package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// The figures depend on the congestion control of TCP (docs/tuning.md), which some machines have changed. So they are measured on the
// loopback of a network namespace with the control that Linux has by default.

// loopbackVariable names the congestion control for a process that ownLoopback has started.
const loopbackVariable = "REPORT_LOOPBACK"

// ownLoopback runs this program again with its arguments in a network namespace whose loopback has that congestion control, and returns its
// exit code. done is false in that process, and where the machine does not permit that, with the reason.
func ownLoopback(ctx context.Context, control string) (code int, done bool, reason error) {
	if name := os.Getenv(loopbackVariable); name != "" {
		return 0, false, setLoopback(ctx, name)
	}
	if congestion() == control {
		return 0, false, nil
	}
	if os.Geteuid() != 0 {
		return 0, false, errors.New("only root can change that for the measurement")
	}
	self, err := os.Executable()
	if err != nil {
		return 0, false, err
	}
	cmd := exec.CommandContext(ctx, self, os.Args[1:]...)
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGINT) }
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), loopbackVariable+"="+control)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	runtime.LockOSThread() // Pdeathsig is sent when the thread ends, not the process
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return 0, false, err
	}
	return cmd.ProcessState.ExitCode(), true, nil
}

// setLoopback brings up the loopback of a new network namespace. The sysctl of a namespace takes only what
// tcp_allowed_congestion_control has, a route all that is available.
func setLoopback(ctx context.Context, control string) error {
	for _, args := range [][]string{
		{"link", "set", "lo", "up"},
		{"route", "change", "local", "127.0.0.1", "dev", "lo", "table", "local", "proto", "kernel", "scope", "host", "src", "127.0.0.1", "congctl", control},
	} {
		if _, err := output(ctx, "ip", args...); err != nil {
			return fmt.Errorf("loopback with %s: %w", control, err)
		}
	}
	return nil
}
