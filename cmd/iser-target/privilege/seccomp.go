package privilege

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// denied are system calls that neither the target nor a program of it needs, on all architectures: to look into other processes, to change what
// file systems and namespaces there are, to change the kernel and its time, and parts of it that attacks like.
var denied = []uint32{
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_PIDFD_GETFD, unix.SYS_KCMP,
	unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE, unix.SYS_FSOPEN,
	unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_MOUNT_SETATTR, unix.SYS_SETNS, unix.SYS_UNSHARE,
	unix.SYS_OPEN_BY_HANDLE_AT, unix.SYS_QUOTACTL, unix.SYS_QUOTACTL_FD, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_ACCT,
	unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE, unix.SYS_KEXEC_LOAD, unix.SYS_REBOOT,
	unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_CLOCK_ADJTIME, unix.SYS_ADJTIMEX, unix.SYS_SETHOSTNAME, unix.SYS_SETDOMAINNAME,
	unix.SYS_SYSLOG, unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD, unix.SYS_KEYCTL, unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY,
	unix.SYS_FANOTIFY_INIT, unix.SYS_LOOKUP_DCOOKIE,
}

const (
	// probe is a call that the target does not need, and that service managers permit. The filter answers it with installed, so
	// that a process knows whether it inherited the filter.
	probe     = unix.SYS_GETITIMER
	installed = unix.Errno(3001)
	// foreign is where the numbers of x32 begin, which reach calls of amd64 by other numbers.
	foreign = 0x40000000
)

// ErrNoFilter reports that this kernel or architecture has no filters of system calls.
var ErrNoFilter = errors.New("system calls are not restricted")

// DenyCalls makes the kernel refuse, with EPERM, system calls that the target never needs: for all threads of the process, and what they execute. No program
// of them gets rights by its file (PR_SET_NO_NEW_PRIVS). Nothing happens if the process has inherited that, or a filter that permits no other. An error that is ErrNoFilter is a warning.
func DenyCalls() error {
	arch, ok := map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}[runtime.GOARCH]
	if !ok {
		return fmt.Errorf("%w: there is no filter for %s", ErrNoFilter, runtime.GOARCH)
	}
	if Filtered() {
		return nil
	}
	return deny(arch)
}

// deny installs the filter of an architecture.
func deny(arch uint32) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_NO_NEW_PRIVS: %w", err)
	}
	list := filter(arch)
	prog := unix.SockFprog{Len: uint16(len(list)), Filter: &list[0]}
	// Not RawSyscall, which would keep the other threads of the runtime from being stopped meanwhile.
	r, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(list)
	switch {
	case e == unix.ENOSYS, e == unix.EINVAL:
		return fmt.Errorf("%w: the kernel has no seccomp filters (CONFIG_SECCOMP_FILTER): %w", ErrNoFilter, e)
	case e == unix.EPERM && confined():
		return nil // by a service manager, whose filter lacks seccomp, but permits fewer calls
	case e == unix.EPERM:
		return fmt.Errorf("%w: seccomp: %w", ErrNoFilter, e)
	case e != 0:
		return fmt.Errorf("seccomp: %w", e)
	case r != 0:
		return fmt.Errorf("seccomp: thread %d has another filter", r)
	}
	return nil
}

// confined reports whether a filter of another program is in force, like that of the service manager.
func confined() bool {
	mode, err := unix.PrctlRetInt(unix.PR_GET_SECCOMP, 0, 0, 0, 0)
	return err == nil && mode == 2
}

// Filtered reports whether DenyCalls has taken effect in this process, or in one before it.
func Filtered() bool {
	const noTimer = 3
	_, _, e := unix.Syscall(probe, noTimer, 0, 0) // without the filter EINVAL
	return e == installed
}

// filter returns a program that decides by architecture and number of the call (seccomp(2)). It looks at no arguments, so the kernel keeps its decisions.
func filter(arch uint32) []unix.SockFilter {
	// Offsets in struct seccomp_data.
	const number, architecture = 0, 4
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	answer := func(action uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: action}
	}
	calls := slices.Concat(denied, deniedHere)
	const last = 2 // the answers follow the comparisons: allow, installed, deny
	n := len(calls)
	list := []unix.SockFilter{
		load(architecture),
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: arch, Jt: 1},
		answer(unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)),
		load(number),
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: probe, Jt: uint8(n + 2)},
		{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, K: foreign, Jt: uint8(n + last)},
	}
	for i, call := range calls {
		list = append(list, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: call, Jt: uint8(n - 1 - i + last)})
	}
	return append(list, answer(unix.SECCOMP_RET_ALLOW), answer(unix.SECCOMP_RET_ERRNO|uint32(installed)), answer(unix.SECCOMP_RET_ERRNO|uint32(unix.EPERM)))
}
