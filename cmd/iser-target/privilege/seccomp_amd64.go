package privilege

import "golang.org/x/sys/unix"

// deniedHere are system calls like denied that not all architectures have.
var deniedHere = []uint32{unix.SYS_KEXEC_FILE_LOAD, unix.SYS_IOPL, unix.SYS_IOPERM, unix.SYS_MODIFY_LDT}
