//go:build !race

package backend

const streams = true

// streamBlocks copies n bytes from src to dst, which do not overlap, by non-temporal stores. All of it is visible to others before
// what the caller writes later.
//
// Preconditions: n is a positive multiple of streamUnit, and dst of streamAlign.
//
//go:noescape
func streamBlocks(dst, src *byte, n int)
