//go:build race

package llp

import "syscall"

// acquire notifies the race detector, as a read of package syscall does, that what the writer did before is done. It reads nothing.
func acquire(fd uintptr) { _, _ = syscall.Read(int(fd), nil) }

// release notifies the race detector, as a write of package syscall does, that what the writer did before is done. It writes nothing,
// and not to the socket, whose error it would take.
func release() { _, _ = syscall.Write(-1, nil) }
