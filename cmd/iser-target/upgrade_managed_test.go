package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A mainManager plays a service manager with NotifyAccess=main that is the parent of the program, as systemd is: it accepts notifications
// of the main process only, and as main process only its own children.
type mainManager struct {
	path    string
	barrier func(pid int) // called before a barrier is answered, with the main process
	mu      sync.Mutex
	main    int      // guarded by mu; 0: nobody has notified yet
	moves   []int    // guarded by mu; the main processes that others named
	refused []string // guarded by mu; notifications that systemd ignores, with a warning
	ready   []int    // guarded by mu; processes that sent READY=1
}

func newMainManager(t *testing.T) *mainManager {
	t.Helper()
	return newBarrierManager(t, func(int) {})
}

func newBarrierManager(t *testing.T, barrier func(pid int)) *mainManager {
	t.Helper()
	m := &mainManager{path: filepath.Join(t.TempDir(), "notify"), barrier: barrier}
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: m.path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := conn.SyscallConn()
	if err == nil {
		err2 := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1) })
		if err2 != nil {
			err = err2
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	var read sync.WaitGroup
	read.Go(func() {
		buf, oob := make([]byte, 1<<16), make([]byte, 256)
		for {
			n, oobn, _, _, err := conn.ReadMsgUnix(buf, oob)
			if err != nil {
				return
			}
			m.take(string(buf[:n]), oob[:oobn])
		}
	})
	t.Cleanup(func() {
		conn.Close()
		read.Wait()
	})
	return m
}

// take handles one notification.
func (m *mainManager) take(text string, oob []byte) {
	var (
		fds    []int
		sender int
	)
	list, _ := unix.ParseSocketControlMessage(oob)
	for _, c := range list {
		if cred, err := unix.ParseUnixCredentials(&c); err == nil {
			sender = int(cred.Pid)
		} else if some, err := unix.ParseUnixRights(&c); err == nil {
			fds = append(fds, some...)
		}
	}
	m.mu.Lock()
	if m.main == 0 {
		m.main = sender
	}
	main := m.main
	switch pid, ok := strings.CutPrefix(strings.SplitN(text, "\n", 2)[0], "MAINPID="); {
	case text == "BARRIER=1": // of any process, as the others
	case sender != main:
		m.refused = append(m.refused, fmt.Sprintf("%q of process %d, the main process is %d", text, sender, main))
	case ok:
		n, err := strconv.Atoi(pid)
		if err != nil || parentOf(n) != os.Getpid() {
			m.refused = append(m.refused, fmt.Sprintf("%q: it is no child", text))
			break
		}
		m.main, m.moves = n, append(m.moves, n)
	case strings.HasPrefix(text, "READY=1"):
		m.ready = append(m.ready, sender)
	}
	main = m.main
	m.mu.Unlock()
	if text == "BARRIER=1" {
		m.barrier(main)
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// moved returns the main processes that others named, after the last of them has sent READY=1.
func (m *mainManager) moved(t *testing.T) []int {
	t.Helper()
	var moves []int
	testkit.Eventually(t, "READY=1 of the main process", func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		moves = slices.Clone(m.moves)
		return slices.Contains(m.ready, m.main)
	})
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.refused {
		t.Errorf("systemd would refuse %s", r)
	}
	return moves
}

// environment returns the variables by which the program finds m.
func (m *mainManager) environment() []string { return []string{"NOTIFY_SOCKET=" + m.path} }

// parentOf returns the parent of a process, or 0 if it ended.
func parentOf(pid int) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The name, in parentheses, may have any character.
	f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(f) < 2 || f[0] == "Z" {
		return 0
	}
	parent, _ := strconv.Atoi(f[1])
	return parent
}

// awaitExit waits for a child of this process, and returns its exit code, or -1.
func awaitExit(t *testing.T, pid int) int {
	t.Helper()
	var status unix.WaitStatus
	testkit.Eventually(t, "end of the process", func() bool {
		got, err := unix.Wait4(pid, &status, unix.WNOHANG, nil)
		return got == pid || err != nil && err != unix.EINTR
	})
	return status.ExitStatus()
}

// Under a service manager, each of several processes that serve one after the other, under load, is a child of the manager before it becomes
// the main process. So the manager learns its exit code. It never hears of a process that is not the main process.
func TestManagedUpgrade(t *testing.T) {
	m := newMainManager(t)
	s := &station{dir: t.TempDir(), env: m.environment()}
	s.configure(t, withFile(s.dir))
	s.startProgram(t, executable(t))
	load := newTraffic(t, s.addr)
	var pids []int
	for range 3 {
		load.flows(t)
		out := s.says(t, cli.ExitOK, "sessions 2 continue after a pause of ", "upgrade")
		pid, err := strconv.Atoi(strings.Fields(out)[1])
		if err != nil {
			t.Fatalf("upgrade: %s", out)
		}
		pids = append(pids, pid)
		if got := m.moved(t); !slices.Equal(got, pids) {
			t.Fatalf("main processes %v, want %v", got, pids)
		}
	}
	load.flows(t)
	load.end(t)
	testkit.Eventually(t, "one process that serves", func() bool { return slices.Equal(s.processes(t), pids[2:]) })
	for _, pid := range pids[:2] {
		if code := awaitExit(t, pid); code != 0 {
			t.Errorf("exit code %d of a process that was upgraded", code)
		}
	}
	unix.Kill(pids[2], unix.SIGTERM)
	if code := awaitExit(t, pids[2]); code != 0 {
		t.Errorf("exit code %d after SIGTERM", code)
	}
	if err := s.cmd.Wait(); err != nil {
		t.Errorf("the first process: %v", err)
	}
	m.moved(t)
}

// A process that ends after it has begun to serve, before the manager watches it, would not be started again if the one before ended without
// an error.
func TestManagedUpgradeIsLost(t *testing.T) {
	m := newBarrierManager(t, func(pid int) {
		unix.Kill(pid, unix.SIGKILL)
		unix.Wait4(pid, nil, 0, nil)
	})
	s := &station{dir: t.TempDir(), env: m.environment()}
	s.configure(t)
	s.startProgram(t, executable(t))
	session := s.login(t)
	s.says(t, cli.ExitError, "served and does not continue: it ended", "upgrade")
	endsSoon(t, session)
	if err := s.cmd.Wait(); err == nil || s.cmd.ProcessState.ExitCode() != cli.ExitError {
		t.Errorf("the process before: %v, want exit code %d, for Restart=on-failure", err, cli.ExitError)
	}
}

// survive checks, after an upgrade under m that failed, that the process before is the main process, and that the next upgrade succeeds.
func (s *station) survive(t *testing.T, m *mainManager) {
	t.Helper()
	if got := m.moved(t); len(got) > 0 {
		t.Errorf("the manager was told of the main processes %v", got)
	}
	if got := s.processes(t); len(got) != 1 || got[0] != s.cmd.Process.Pid {
		t.Errorf("processes %v serve, want %d", got, s.cmd.Process.Pid)
	}
	s.ok(t, "upgrade")
	testkit.Eventually(t, "another process that serves", func() bool {
		got := s.processes(t)
		return len(got) == 1 && got[0] != s.cmd.Process.Pid && slices.Equal(m.moved(t), got)
	})
}

// reap waits for the children of this process that have ended, which a manager does.
func reap() {
	for _, pid := range testkit.Children(os.Getpid()) {
		if parentOf(pid) == 0 {
			unix.Wait4(pid, nil, unix.WNOHANG, nil)
		}
	}
}

// A hand-over waits for the end of a giver that is no parent.
func TestGiverIsNotTheParent(t *testing.T) {
	m := newMainManager(t)
	s := &station{dir: t.TempDir(), env: m.environment()}
	s.configure(t, func(text string) string { return strings.Replace(text, "127.0.0.1:0", freeAddress(t), 1) })
	program := filepath.Join(s.dir, "program")
	script := fmt.Sprintf("#!/bin/sh\nKILL_AT='send prepare' exec %s \"$@\"\n", executable(t))
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	s.startProgram(t, program)
	if err := os.Remove(program); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(executable(t), program); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	s.run(t, "upgrade")
	testkit.Eventually(t, "another process that serves", func() bool {
		_, _, code := s.run(t, "lun", "list")
		return code == cli.ExitOK
	})
	if took := time.Since(begun); took > 25*time.Second {
		t.Errorf("the new process served after %v: it has waited for the end of another process", took)
	}
	session := s.login(t)
	if err := session.Do(&initiator.Command{CDB: cdb.TestUnitReady}); err != nil {
		t.Error(err)
	}
}
