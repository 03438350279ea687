package main

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"sync/atomic"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// supervisorName is the command of a supervisor.
const supervisorName = "supervisor"

// passed are the signals that a supervisor passes on.
var passed = []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2}

// becomeSupervisor turns this process into the supervisor of the one that serves, at the other end of link. It
// returns only if that fails.
//
// Those in came go with the arguments. While the new program starts, SIGHUP is ignored, or it would end the target. Others end it.
func becomeSupervisor(link *os.File, came <-chan os.Signal) error {
	fd := link.Fd()
	if _, err := unix.FcntlInt(fd, unix.F_SETFD, 0); err != nil { // to keep it open
		return err
	}
	signal.Ignore(unix.SIGHUP) // which execve(2) keeps, and the runtime of Go
	args := []string{os.Args[0], supervisorName, strconv.Itoa(int(fd))}
	for len(came) > 0 {
		s := strconv.Itoa(int((<-came).(unix.Signal)))
		if !slices.Contains(args[3:], s) { // as the kernel does with those that wait
			args = append(args, s)
		}
	}
	// The file of the program may be another one by now, or be gone.
	err := unix.Exec("/proc/self/exe", args, os.Environ())
	return fmt.Errorf("another process serves, but this one cannot wait for its end: %w", err)
}

// nameProcess gives a process that runs /proc/self/exe a name other than exe, for people only.
func nameProcess() { os.WriteFile("/proc/self/comm", []byte("iser-target"), 0) }

// toPass are signals for the process that serves. main lets them come before all else.
var toPass = make(chan os.Signal, 16)

func supervisorCommand() *cobra.Command {
	return &cobra.Command{
		Use: supervisorName + " FD [SIGNAL]...", Short: "Wait for a target that has been upgraded", Args: cobra.MinimumNArgs(1), Hidden: true,
		RunE: func(_ *cobra.Command, args []string) error {
			fd, err := strconv.Atoi(args[0])
			if err != nil || fd < 3 {
				return fmt.Errorf("descriptor %q: serve starts this command after an upgrade", args[0])
			}
			var came []unix.Signal
			for _, arg := range args[1:] {
				n, err := strconv.Atoi(arg)
				if err != nil || !slices.Contains(passed, os.Signal(unix.Signal(n))) {
					return fmt.Errorf("signal %q: serve starts this command after an upgrade", arg)
				}
				came = append(came, unix.Signal(n))
			}
			return supervise(os.NewFile(uintptr(fd), "supervision"), came)
		},
	}
}

// supervise passes signals to the process at the other end of link, first those that came before, and waits for all children. It ends the
// process like the last of them.
func supervise(link *os.File, came []unix.Signal) error {
	nameProcess()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("prctl: %w", err)
	}
	var serving atomic.Int64
	known := make(chan struct{}) // serving is
	go func() {
		var b [16]byte
		for {
			n, err := link.Read(b[:])
			if n == 0 || err != nil {
				return
			}
			if pid, err := strconv.Atoi(string(b[:n])); err == nil && pid > 0 && serving.Swap(int64(pid)) == 0 {
				close(known)
			}
		}
	}()
	if _, err := link.Write([]byte("attached")); err != nil && !errors.Is(err, unix.EPIPE) {
		return fmt.Errorf("link to the process that serves: %w", err)
	}
	go func() {
		<-known
		pass := func(s unix.Signal) { unix.Kill(int(serving.Load()), s) }
		for _, s := range came {
			pass(s)
		}
		for s := range toPass {
			pass(s.(unix.Signal))
		}
	}()
	var last unix.WaitStatus
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, 0, nil)
		switch {
		case err == nil:
			if s := serving.Load(); s == 0 || s == int64(pid) { // and not a child of that one
				last = status
			}
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
