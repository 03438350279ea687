package main

import (
	"errors"
	"runtime/debug"
	"testing"

	"github.com/iser-target/iser-target/backend"
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
	if n := limitHeap(m); n != want {
		t.Errorf("limit %d, want %d", n, want)
	}
	// The pages of memory LUNs are in the 90 %, too.
	store, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(store.WriteAt([]byte("data"), 0), store.Close()); err != nil {
		t.Fatal(err)
	}
	got, mapped := debug.SetMemoryLimit(-1), int64(0)
	backend.OnPages(func(n int64) { mapped = n })
	if mapped == 0 || got != want-mapped {
		t.Errorf("the heap may have %d bytes, want %d less %d for pages", got, want, mapped)
	}
}
