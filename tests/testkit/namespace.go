package testkit

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// InNamespace runs the test in a process with a network namespace of its own, in which only lo exists and is up. It reports true in that process. In
// the other one it passes on the result, and the test must return. The test is skipped without root.
func InNamespace(t *testing.T) bool {
	t.Helper()
	const variable = "ISER_TEST_NAMESPACE"
	if os.Getenv(variable) == t.Name() {
		if err := loopbackUp(); err != nil {
			t.Fatalf("lo: %v", err)
		}
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("a network namespace of its own requires root")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=120s")
	cmd.Env = append(os.Environ(), variable+"="+t.Name())
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	text := strings.TrimSpace(string(out))
	switch {
	case err != nil:
		t.Fatalf("in the namespace: %v\n%s", err, text)
	case bytes.Contains(out, []byte("--- SKIP: "+t.Name()+" ")):
		t.Skipf("in the namespace: %s", text)
	case !bytes.Contains(out, []byte("--- PASS: "+t.Name()+" ")):
		t.Fatalf("in the namespace the test did not run:\n%s", text)
	}
	t.Log(text)
	return false
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}
