package privilege

import (
	"errors"
	"fmt"
	"io/fs"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	readRights  = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	fileRights  = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE
	writeRights = readRights | fileRights | unix.LANDLOCK_ACCESS_FS_REMOVE_DIR | unix.LANDLOCK_ACCESS_FS_REMOVE_FILE |
		unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_DIR | unix.LANDLOCK_ACCESS_FS_MAKE_REG |
		unix.LANDLOCK_ACCESS_FS_MAKE_SOCK | unix.LANDLOCK_ACCESS_FS_MAKE_FIFO | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK |
		unix.LANDLOCK_ACCESS_FS_MAKE_SYM | unix.LANDLOCK_ACCESS_FS_REFER
	// neverMade are made nowhere, not even where the target writes.
	neverMade = unix.LANDLOCK_ACCESS_FS_MAKE_CHAR | unix.LANDLOCK_ACCESS_FS_MAKE_BLOCK
)

// A ruleset says what can be opened. It handles no EXECUTE: an upgrade starts the program, which may be anywhere.
type ruleset struct {
	fd      int
	handled uint64
}

// system has what any program reads: libraries, names of hosts and users, time zones, devices.
var system = []string{"/etc", "/usr", "/lib", "/lib32", "/lib64", "/proc", "/sys"}

// ruleset makes the rules of w.
func (w *Wish) ruleset() (*ruleset, error) {
	abi, _, e := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	switch {
	case e == unix.ENOSYS:
		return nil, errors.New("the kernel has no Landlock. Use one with CONFIG_SECURITY_LANDLOCK=y, or leave process.paths out")
	case e == unix.EOPNOTSUPP:
		return nil, errors.New("the Landlock of the kernel is off. Add landlock to lsm= on its command line, or leave process.paths out")
	case e != 0:
		return nil, fmt.Errorf("version of Landlock: %w", e)
	case abi < 2:
		return nil, fmt.Errorf("the Landlock of the kernel has version %d, which permits no rename between directories. Use Linux 5.19 or later, or leave process.paths out", abi)
	}
	r := &ruleset{handled: writeRights}
	if abi < 3 {
		r.handled &^= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	attr := unix.LandlockRulesetAttr{Handled_access_fs: r.handled}
	fd, _, e := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr.Handled_access_fs), 0)
	if e != 0 {
		return nil, fmt.Errorf("landlock_create_ruleset: %w", e)
	}
	r.fd = int(fd)
	for _, p := range w.Paths {
		if err := r.allow(p, writeRights&^neverMade); err != nil {
			return nil, err
		}
	}
	for _, p := range append(w.Write, "/dev/null") {
		if err := r.allow(p, writeRights&^neverMade); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	for _, p := range append(w.Read, system...) {
		if err := r.allow(p, readRights); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return r, nil
}

// allow permits rights to path, and to all below it.
func (r *ruleset) allow(path string, rights uint64) error {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		rights &= fileRights
	}
	rule := unix.LandlockPathBeneathAttr{Allowed_access: rights & r.handled, Parent_fd: int32(fd)}
	if _, _, e := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(r.fd), unix.LANDLOCK_RULE_PATH_BENEATH, uintptr(unsafe.Pointer(&rule)), 0, 0, 0); e != 0 {
		return &fs.PathError{Op: "landlock_add_rule", Path: path, Err: e}
	}
	return nil
}

// enforce binds the calling thread, and what it executes, to r.
func (r *ruleset) enforce() error {
	if _, _, e := unix.Syscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(r.fd), 0, 0); e != 0 {
		return fmt.Errorf("landlock_restrict_self: %w", e)
	}
	return unix.Close(r.fd)
}

// setGroups sets the supplementary groups of the calling thread.
func setGroups(list []uint32) error {
	var p unsafe.Pointer
	if len(list) > 0 {
		p = unsafe.Pointer(&list[0])
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(list)), uintptr(p), 0); e != 0 {
		return e
	}
	return nil
}
