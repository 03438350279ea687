//go:build !race

package llp

func acquire(uintptr) {}
