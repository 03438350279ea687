package lun

import (
	"math/bits"
	"sync"
)

const (
	stripes    = 64 // bits of a stripeSet
	stripeSpan = 1 << 20
)

// rangeLocks keeps commands that read and write back a range, such as COMPARE
// AND WRITE, apart from all others on that range. The medium is divided into
// pieces of 1 MiB, and piece i belongs to stripe i%64; a READ or WRITE holds
// the stripes of its range for reading, which costs it an atomic addition each
// way, and an exclusive command for writing.
//
// Stripes are taken in ascending order, and who holds some takes no more: no
// two commands can wait for one another.
type rangeLocks [stripes]struct {
	sync.RWMutex
	_ [40]byte // so that a stripe has a cache line to itself
}

// A stripeSet is a set of stripes, by number.
type stripeSet uint64

// stripesOf is the stripes of n octets at off.
func stripesOf(off, n int64) stripeSet {
	if n <= 0 {
		return 0
	}
	first, last := off/stripeSpan, (off+n-1)/stripeSpan
	if last-first >= stripes-1 {
		return ^stripeSet(0)
	}
	return stripeSet(bits.RotateLeft64(1<<(last-first+1)-1, int(first%stripes)))
}

func (l *rangeLocks) share(s stripeSet) {
	for ; s != 0; s &= s - 1 {
		l[bits.TrailingZeros64(uint64(s))].RLock()
	}
}

func (l *rangeLocks) unshare(s stripeSet) {
	for ; s != 0; s &= s - 1 {
		l[bits.TrailingZeros64(uint64(s))].RUnlock()
	}
}

func (l *rangeLocks) exclude(s stripeSet) {
	for ; s != 0; s &= s - 1 {
		l[bits.TrailingZeros64(uint64(s))].Lock()
	}
}

func (l *rangeLocks) admit(s stripeSet) {
	for ; s != 0; s &= s - 1 {
		l[bits.TrailingZeros64(uint64(s))].Unlock()
	}
}
