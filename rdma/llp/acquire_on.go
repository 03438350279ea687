//go:build race

package llp

import "syscall"

// acquire notifies the race detector, as a read of package syscall does, that what the writer did before is done. It reads nothing.
func acquire(fd uintptr) { _, _ = syscall.Read(int(fd), nil) }
