package protection

import "golang.org/x/sys/cpu"

// folds: whether the processor has the instructions of fold.
var folds = cpu.X86.HasPCLMULQDQ && cpu.X86.HasSSSE3

// fold writes 16 bytes to rest whose CRC is that of the n bytes at p. It takes a tenth of the time of the tables.
//
// Preconditions: n is a positive multiple of foldBlock.
//
//go:noescape
func fold(p *byte, n int, rest *[slices]byte)
