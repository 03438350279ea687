package privilege

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend/backendtest"
)

// run runs the filter for one call, as the kernel does, and returns the action.
func run(t *testing.T, list []unix.SockFilter, arch, number uint32) uint32 {
	t.Helper()
	var a uint32
	for at := 0; at < len(list); at++ {
		switch i := list[at]; i.Code {
		case unix.BPF_LD | unix.BPF_W | unix.BPF_ABS:
			a = map[uint32]uint32{0: number, 4: arch}[i.K]
		case unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K:
			if a == i.K || i.Code&unix.BPF_JGE == unix.BPF_JGE && a >= i.K {
				at += int(i.Jt)
			} else {
				at += int(i.Jf)
			}
		case unix.BPF_RET | unix.BPF_K:
			return i.K
		default:
			t.Fatalf("instruction %d: %+v", at, i)
		}
	}
	t.Fatal("the filter has no answer")
	return 0
}

// Each call of the list is denied, and no other one; those of another architecture, and of x32, all are.
func TestFilter(t *testing.T) {
	const arch, denies = unix.AUDIT_ARCH_X86_64, unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)
	list := filter(arch)
	if len(list) > 200 {
		t.Fatalf("%d instructions: jumps may be too far", len(list))
	}
	all := slices.Concat(denied, deniedHere)
	for n := range uint32(1000) {
		want := uint32(unix.SECCOMP_RET_ALLOW)
		if slices.Contains(all, n) {
			want = denies
		}
		if n == probe {
			want = unix.SECCOMP_RET_ERRNO | uint32(installed)
		}
		if got := run(t, list, arch, n); got != want {
			t.Errorf("call %d: %#x, want %#x", n, got, want)
		}
		if got := run(t, list, unix.AUDIT_ARCH_I386, n); got != denies {
			t.Errorf("call %d of another architecture: %#x", n, got)
		}
		if got := run(t, list, arch, foreign+n); got != denies {
			t.Errorf("call %d of x32: %#x", n, got)
		}
	}
}

const envChild = "ISER_TARGET_TEST_FILTERED"

// A process that denies calls does so in all threads and in what it executes, once, and can do everything else.
func TestDenyCalls(t *testing.T) {
	switch os.Getenv(envChild) {
	case "first":
		if Filtered() {
			t.Fatal("the filter is there before it is installed")
		}
		// Threads that are there before.
		var ready, all sync.WaitGroup
		goon := make(chan struct{})
		for range 4 {
			ready.Add(1)
			all.Go(func() {
				runtime.LockOSThread()
				ready.Done()
				<-goon
				mustBeDenied(t)
			})
		}
		ready.Wait()
		if err := DenyCalls(); err != nil {
			t.Fatal(err)
		}
		close(goon)
		all.Wait()
		mustBeDenied(t)
		before := filters(t)
		if err := DenyCalls(); err != nil || filters(t) != before {
			t.Errorf("again: %v, %s filters after %s", err, filters(t), before)
		}
		t.Setenv(envChild, "second")
		t.Setenv(envChild+"_COUNT", before)
		if err := unix.Exec(os.Args[0], os.Args, os.Environ()); err != nil {
			t.Fatal(err)
		}
	case "second":
		mustBeDenied(t)
		if err := DenyCalls(); err != nil || filters(t) != os.Getenv(envChild+"_COUNT") {
			t.Errorf("in the next program: %v, %s filters", err, filters(t))
		}
		if out, err := exec.Command("/bin/sh", "-c", "echo works").CombinedOutput(); err != nil || string(out) != "works\n" {
			t.Errorf("a program: %q, %v", out, err)
		}
		fmt.Println("denied in the next program")
	default:
		cmd := exec.Command(os.Args[0], "-test.run=^TestDenyCalls$", "-test.v")
		cmd.Env = append(os.Environ(), envChild+"=first")
		out, err := cmd.CombinedOutput()
		if strings.Contains(string(out), ErrNoFilter.Error()) {
			backendtest.Unavailable(t, "%s", out)
		}
		if err != nil || !strings.Contains(string(out), "denied in the next program") {
			t.Errorf("%v\n%s", err, out)
		}
	}
}

// mustBeDenied makes calls that fail for other reasons, or have no effect, without the filter.
func mustBeDenied(t *testing.T) {
	t.Helper()
	for name, call := range map[string]uintptr{"unshare": unix.SYS_UNSHARE, "keyctl": unix.SYS_KEYCTL, "bpf": unix.SYS_BPF, "mount": unix.SYS_MOUNT, "chroot": unix.SYS_CHROOT} {
		arg := uintptr(0) // of unshare: nothing; of the others: no pointer
		if name == "keyctl" || name == "bpf" {
			arg = 0xffff
		}
		if _, _, e := unix.Syscall(call, arg, 0, 0); e != unix.EPERM {
			t.Errorf("%s: %v, want EPERM", name, e)
		}
	}
	if !Filtered() {
		t.Error("the filter is not there")
	}
	if n, err := unix.PrctlRetInt(unix.PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0); err != nil || n != 1 {
		t.Errorf("no new privileges: %d, %v", n, err)
	}
}

// filters returns the number of filters of this thread, as the kernel says it.
func filters(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/thread-self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if n, ok := strings.CutPrefix(line, "Seccomp_filters:"); ok {
			return strings.TrimSpace(n)
		}
	}
	backendtest.Unavailable(t, "the kernel does not count filters")
	return ""
}

// Under a filter that refuses further ones, like that of a service manager, the process starts without its own.
func TestDenyCallsUnderAnotherFilter(t *testing.T) {
	if os.Getenv(envChild) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestDenyCallsUnderAnotherFilter$", "-test.v")
		cmd.Env = append(os.Environ(), envChild+"=other")
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	was := denied
	denied = []uint32{unix.SYS_SECCOMP}
	if err := DenyCalls(); err != nil {
		t.Fatal(err)
	}
	denied = was
	if _, _, e := unix.Syscall(unix.SYS_SECCOMP, 0, 0, 0); e != unix.EPERM {
		t.Fatalf("seccomp: %v", e)
	}
	if !confined() {
		t.Error("the filter is not noticed")
	}
	if err := deny(unix.AUDIT_ARCH_X86_64); err != nil {
		t.Errorf("a filter that cannot be added: %v", err)
	}
}
