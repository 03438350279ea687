package main

import (
	"os"
	"runtime/debug"

	"github.com/iser-target/iser-target/security/limits"
)

// limitHeap makes the garbage collector keep the process within 90 % of what m allows, unless the
// variable GOMEMLIMIT says another limit. The kernel would end a process that exceeds its cgroup. It
// returns the limit in bytes, or 0 if it set none.
func limitHeap(m limits.Machine) int64 {
	if os.Getenv("GOMEMLIMIT") != "" || m.Memory.N == 0 {
		return 0
	}
	n := m.Memory.N / 10 * 9
	debug.SetMemoryLimit(n)
	return n
}
