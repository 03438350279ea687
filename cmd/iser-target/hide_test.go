package main

import (
	"fmt"
	"os"
	"regexp"
	"testing"

	"golang.org/x/sys/unix"
)

// The memory of the target, with its secrets, is not for core files and other processes of its user.
func TestMemoryIsHidden(t *testing.T) {
	if err := hideMemory(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0) })
	if n, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0); err != nil || n != 0 {
		t.Errorf("PR_GET_DUMPABLE: %d, %v, want 0", n, err)
	}
	s := newStation(t)
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", s.cmd.Process.Pid))
	if err != nil || !regexp.MustCompile(`(?m)^Max core file size +0 +0 `).Match(b) {
		t.Errorf("limits of the process: %v\n%s", err, b)
	}
}
