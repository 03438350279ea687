package backend

import "unsafe"

// streamAtLeast is the length in bytes from which stream goes past the caches of the processor.
const streamAtLeast = 4 << 10

// streamUnit is what streamBlocks copies at a time, and streamAlign to what it aligns its destination.
const (
	streamUnit  = 64
	streamAlign = 16
)

// stream copies src to dst, which is as long. Before a processor writes to memory, it reads that into its cache, unless it is told that nobody needs it there. For
// the pages of a LUN, which are seldom in a cache, that reading is half of the time of a copy.
func stream(dst, src []byte) {
	n := 0
	if streams && len(src) >= streamAtLeast && uintptr(unsafe.Pointer(unsafe.SliceData(dst)))%streamAlign == 0 {
		n = len(src) / streamUnit * streamUnit
		streamBlocks(&dst[0], &src[0], n)
	}
	copy(dst[n:], src[n:])
}
