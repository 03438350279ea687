package main

import (
	"os"
	"runtime/debug"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/security/limits"
)

// limitHeap makes the garbage collector keep the process within 90 % of what m allows, with the pages of memory LUNs, unless the
// variable GOMEMLIMIT says another limit. The kernel would end a process that exceeds its cgroup. It
// returns the limit in bytes, or 0 if it set none.
func limitHeap(m limits.Machine) int64 {
	if os.Getenv("GOMEMLIMIT") != "" || m.Memory.N == 0 {
		return 0
	}
	n := m.Memory.N / 10 * 9
	backend.OnPages(func(mapped int64) {
		debug.SetMemoryLimit(max(n-mapped, n/10)) // with less, the collector would have no time for anything else
	})
	return n
}
