//go:build !amd64

package crc32c

const folds = false

func fold(_ uint32, _ *byte, _ int) uint32 { panic("crc32c: no such instruction") }
