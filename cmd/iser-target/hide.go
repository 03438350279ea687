package main

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// hideMemory keeps the memory of this process, which has secrets and data, from other processes of its user and
// from core files (prctl(2), PR_SET_DUMPABLE).
func hideMemory() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("PR_SET_DUMPABLE: %w", err)
	}
	limit := unix.Rlimit{}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &limit); err != nil {
		return fmt.Errorf("RLIMIT_CORE: %w", err)
	}
	return nil
}
