package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"sync/atomic"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// becomeSupervisor turns this process into the supervisor of the one that serves, at the other end of link. It
// returns only if that fails.
func becomeSupervisor(link *os.File) error {
	fd := link.Fd()
	if _, err := unix.FcntlInt(fd, unix.F_SETFD, 0); err != nil { // to keep it open
		return err
	}
	// The file of the program may be another one by now, or be gone.
	err := unix.Exec("/proc/self/exe", []string{os.Args[0], "supervisor", strconv.Itoa(int(fd))}, os.Environ())
	return fmt.Errorf("another process serves, but this one cannot wait for its end: %w", err)
}

func supervisorCommand() *cobra.Command {
	return &cobra.Command{
		Use: "supervisor FD", Short: "Wait for a target that has been upgraded", Args: cobra.ExactArgs(1), Hidden: true,
		RunE: func(_ *cobra.Command, args []string) error {
			fd, err := strconv.Atoi(args[0])
			if err != nil || fd < 3 {
				return fmt.Errorf("descriptor %q: serve starts this command after an upgrade", args[0])
			}
			return supervise(os.NewFile(uintptr(fd), "supervision"))
		},
	}
}

// supervise passes signals to the process at the other end of link, and waits for all children. It ends the
// process like the last of them.
func supervise(link *os.File) error {
	os.WriteFile("/proc/self/comm", []byte("iser-target"), 0) // instead of exe; only for people
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("prctl: %w", err)
	}
	var serving atomic.Int64
	go func() {
		var b [16]byte
		for {
			n, err := link.Read(b[:])
			if n == 0 || err != nil {
				return
			}
			if pid, err := strconv.Atoi(string(b[:n])); err == nil {
				serving.Store(int64(pid))
			}
		}
	}()
	if _, err := link.Write([]byte("attached")); err != nil && !errors.Is(err, unix.EPIPE) {
		return fmt.Errorf("link to the process that serves: %w", err)
	}
	passed := []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2}
	signal.Reset(passed...)
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, passed...)
	go func() {
		for s := range signals {
			if pid := serving.Load(); pid > 0 {
				unix.Kill(int(pid), s.(unix.Signal))
			}
		}
	}()
	var last unix.WaitStatus
	for {
		var status unix.WaitStatus
		_, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err == nil:
			last = status
		case errors.Is(err, unix.ECHILD):
			exitLike(last)
		case !errors.Is(err, unix.EINTR):
			return fmt.Errorf("wait4: %w", err)
		}
	}
}

// exitLike ends the process like one that ended with that status.
func exitLike(status unix.WaitStatus) {
	if !status.Signaled() {
		os.Exit(status.ExitStatus())
	}
	dieBy(status.Signal())
}
