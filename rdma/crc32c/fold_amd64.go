package crc32c

import "golang.org/x/sys/cpu"

// folds: whether the processor has the instructions of fold.
var folds = cpu.X86.HasAVX512F && cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasSSE42

// fold extends crc, a remainder that is not complemented, by the n bytes at p, with a fourth of the time that CRC32 instructions take, each of
// which has to wait for the result of the one before.
//
// Preconditions: n is a positive multiple of block.
//
//go:noescape
func fold(crc uint32, p *byte, n int) uint32
