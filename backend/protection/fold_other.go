//go:build !amd64

package protection

const folds = false

func fold(_ *byte, _ int, _ *[slices]byte) { panic("protection: no such instruction") }
