//go:build invariants

package iscsi

// poison overwrites Buffers on their way back to the pool, so that whoever
// still reads one is found out.
const poison = true
