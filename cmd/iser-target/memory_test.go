package main

import (
	"runtime/debug"
	"testing"

	"github.com/iser-target/iser-target/security/limits"
)

func TestHeapLimitFollowsTheMachine(t *testing.T) {
	before := debug.SetMemoryLimit(-1)
	defer debug.SetMemoryLimit(before)
	m := limits.Machine{Memory: limits.Quantity{N: 512 << 20, From: "memory.max"}}

	t.Setenv("GOMEMLIMIT", "1GiB")
	if n := limitHeap(m); n != 0 || debug.SetMemoryLimit(-1) != before {
		t.Errorf("limit %d in spite of GOMEMLIMIT", n)
	}
	t.Setenv("GOMEMLIMIT", "")
	if n := limitHeap(limits.Machine{}); n != 0 || debug.SetMemoryLimit(-1) != before {
		t.Errorf("limit %d although nothing is known", n)
	}
	const want = 512 << 20 / 10 * 9
	if n := limitHeap(m); n != want || debug.SetMemoryLimit(-1) != want {
		t.Errorf("limit %d, want %d", n, want)
	}
}
