// Package privilege takes rights from the process permanently: its user, its capabilities (capabilities(7)), the
// files that it can open (Landlock, landlock(7)), and system calls (seccomp(2)). The kernel keeps these rights for each thread, so the program does
// that in one thread and then executes itself: all threads of the new program have what that one had left.
package privilege

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A Wish says what the process keeps.
type Wish struct {
	User  *User    // to become; nil: the process stays what it is
	Keep  []string // capabilities besides those that the target needs, like CAP_SYS_RESOURCE
	Paths []string // directories, files and devices that can be opened; nil: all
	// Read are what can also be opened for reading, and Write what the target itself writes to, if Paths is not nil. A file
	// that is missing is left out.
	Read, Write []string
}

// A User is an account of this machine.
type User struct {
	Name     string
	UID, GID int
	Groups   []int
}

// names are the capabilities by their numbers in linux/capability.h.
var names = []string{
	"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_SETGID", "CAP_SETUID",
	"CAP_SETPCAP", "CAP_LINUX_IMMUTABLE", "CAP_NET_BIND_SERVICE", "CAP_NET_BROADCAST", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_IPC_LOCK",
	"CAP_IPC_OWNER", "CAP_SYS_MODULE", "CAP_SYS_RAWIO", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE", "CAP_SYS_PACCT", "CAP_SYS_ADMIN",
	"CAP_SYS_BOOT", "CAP_SYS_NICE", "CAP_SYS_RESOURCE", "CAP_SYS_TIME", "CAP_SYS_TTY_CONFIG", "CAP_MKNOD", "CAP_LEASE",
	"CAP_AUDIT_WRITE", "CAP_AUDIT_CONTROL", "CAP_SETFCAP", "CAP_MAC_OVERRIDE", "CAP_MAC_ADMIN", "CAP_SYSLOG", "CAP_WAKE_ALARM",
	"CAP_BLOCK_SUSPEND", "CAP_AUDIT_READ", "CAP_PERFMON", "CAP_BPF", "CAP_CHECKPOINT_RESTORE",
}

// Names returns the names of all capabilities.
func Names() []string { return slices.Clone(names) }

// ofRoot are the capabilities that the target keeps as root: files of other users are opened, created and given their owner
// back, portals may be below 1024, and IPsec policies are set.
var ofRoot = []string{"CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_NET_BIND_SERVICE", "CAP_NET_ADMIN"}

// ofUser are those that it keeps as another user: portals may be below 1024.
var ofUser = []string{"CAP_NET_BIND_SERVICE"}

// A set is a set of capabilities, one bit each.
type set uint64

func setOf(list ...[]string) (s set) {
	for _, name := range slices.Concat(list...) {
		if i := slices.Index(names, name); i >= 0 {
			s |= 1 << i
		}
	}
	return s
}

// String returns the names in s.
func (s set) String() string {
	var list []string
	for i, name := range names {
		if s&(1<<i) != 0 {
			list = append(list, name)
		}
	}
	return strings.Join(list, ", ")
}

// permitted returns what the calling thread may use.
func permitted() (set, error) {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	if err := unix.Capget(&h, &d[0]); err != nil {
		return 0, fmt.Errorf("capget: %w", err)
	}
	return set(d[0].Permitted) | set(d[1].Permitted)<<32, nil
}

// ErrStays reports capabilities that the process cannot give up.
var ErrStays = errors.New("the process keeps capabilities that it does not need")

// Apply gives up what w does not keep, and executes the program again, with the same arguments and the environment plus env. It
// returns nil if the process has no more than that, and an error if it cannot give up the rest. An error that is ErrStays is a warning.
func (w *Wish) Apply(env ...string) error {
	have, err := permitted()
	if err != nil {
		return err
	}
	root := os.Geteuid() == 0
	if lacks := setOf(w.Keep) &^ have; lacks != 0 {
		return fmt.Errorf("process.capabilities: the process has not got %v. Start it as root, or with AmbientCapabilities= in its systemd unit", lacks)
	}
	become := w.User
	if become != nil && become.UID == os.Geteuid() {
		become = nil
	}
	if become != nil && have&setOf([]string{"CAP_SETUID", "CAP_SETGID"}) != setOf([]string{"CAP_SETUID", "CAP_SETGID"}) {
		return fmt.Errorf("process.user: the process runs as uid %d without CAP_SETUID and CAP_SETGID, and cannot become %s. Start it as root, or as that user",
			os.Geteuid(), become.Name)
	}
	keep := have
	switch {
	case become != nil:
		keep = have & setOf(ofUser, w.Keep)
	case root:
		keep = have & setOf(ofRoot, w.Keep)
	}
	if keep == have && become == nil && w.Paths == nil {
		return nil
	}
	// As another user the process loses them by the change.
	if keep != have && have&setOf([]string{"CAP_SETPCAP"}) == 0 && become == nil && w.Paths == nil {
		return fmt.Errorf("%w, because it has not got CAP_SETPCAP: %v", ErrStays, have&^keep)
	}
	failed := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread is not fit for other goroutines
		failed <- w.exec(have, keep, become, env)
	}()
	return <-failed
}

// exec gives up rights of the calling thread and executes the program again. It returns only an error.
func (w *Wish) exec(have, keep set, become *User, env []string) error {
	var rules *ruleset
	var err error
	if w.Paths != nil { // opened as the user that may do that
		if rules, err = w.ruleset(); err != nil {
			return fmt.Errorf("process.paths: %w", err)
		}
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_NO_NEW_PRIVS: %w", err)
	}
	if have&setOf([]string{"CAP_SETPCAP"}) != 0 {
		for i := range names {
			if keep&(1<<i) != 0 {
				continue
			}
			// A kernel that does not know the capability cannot give it.
			if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(i), 0, 0, 0); err != nil && err != unix.EINVAL {
				return fmt.Errorf("PR_CAPBSET_DROP %s: %w", names[i], err)
			}
		}
	}
	if become != nil {
		if err := become.enter(keep); err != nil {
			return fmt.Errorf("process.user: cannot become %s: %w", become.Name, err)
		}
	}
	if rules != nil {
		if err := rules.enforce(); err != nil {
			return fmt.Errorf("process.paths: %w", err)
		}
	}
	return execute(env)
}

// execute executes the program again, by its path if that still leads to it: the path is its name in process lists.
func execute(env []string) error {
	env = append(os.Environ(), env...)
	own, err := os.Stat("/proc/self/exe")
	if err != nil {
		return err
	}
	if path, err := os.Executable(); err == nil {
		if fi, err := os.Stat(path); err == nil && os.SameFile(fi, own) {
			_ = unix.Exec(path, os.Args, env) // or else by the link
		}
	}
	return fmt.Errorf("execute the program again: %w", unix.Exec("/proc/self/exe", os.Args, env))
}

// enter makes the calling thread one of u that keeps capabilities over the next exec.
func (u *User) enter(keep set) error {
	if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_KEEPCAPS: %w", err)
	}
	groups := make([]uint32, 0, len(u.Groups))
	for _, g := range u.Groups {
		groups = append(groups, uint32(g))
	}
	if err := setGroups(groups); err != nil {
		return fmt.Errorf("setgroups: %w", err)
	}
	// Not those of package syscall, which are for all threads.
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(u.GID), uintptr(u.GID), uintptr(u.GID)); e != 0 {
		return fmt.Errorf("setresgid: %w", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(u.UID), uintptr(u.UID), uintptr(u.UID)); e != 0 {
		return fmt.Errorf("setresuid: %w", e)
	}
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	for i := range d {
		half := uint32(keep >> (32 * i))
		d[i] = unix.CapUserData{Effective: half, Permitted: half, Inheritable: half}
	}
	if err := unix.Capset(&h, &d[0]); err != nil {
		return fmt.Errorf("capset: %w", err)
	}
	for i := range names {
		if keep&(1<<i) == 0 {
			continue
		}
		if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, uintptr(i), 0, 0); err != nil {
			return fmt.Errorf("PR_CAP_AMBIENT_RAISE %s: %w", names[i], err)
		}
	}
	return nil
}

// Marker returns the assignment that Apply's caller passes on, by which the program that is executed knows that it is.
func Marker() string { return envMarker + "=" + strconv.Itoa(os.Getpid()) }

// envMarker has the number of the process that was executed again.
const envMarker = "ISER_TARGET_RESTRICTED"

// Done reports whether Apply has executed this program. It removes the variable.
func Done() bool {
	v := os.Getenv(envMarker)
	os.Unsetenv(envMarker)
	return v == strconv.Itoa(os.Getpid())
}
