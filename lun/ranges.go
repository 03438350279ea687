package lun

import (
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/lun/invariant"
)

const (
	stripes    = 64 // bits of a stripeSet
	stripeSpan = 1 << 20
)

// rangeLocks keep commands that read and write back a range, such as COMPARE AND WRITE, apart
// from all others on that range. The medium is divided into pieces of 1 MiB, and piece i belongs
// to stripe i%64. A READ or WRITE holds the stripes of its range for reading, which costs an
// atomic addition each way, and an exclusive command holds them for writing.
//
// A command takes its stripes in ascending order, and takes no more while it holds some. So no
// two commands can wait for one another.
type rangeLocks [stripes]stripe

// A stripe has a cache line of its own.
type stripe struct {
	sync.RWMutex
	views   atomic.Int32 // that have begun and not ended
	changes atomic.Int32 // that are announced
	waited  atomic.Int64 // when a change last had to wait for a View, by viewClock
	copied  atomic.Int64 // until when no View begins, by viewClock; 0: they do
	_       [16]byte
}

// A stripeSet is a set of stripes, by number.
type stripeSet uint64

const allStripes = ^stripeSet(0)

// stripesOf returns the stripes of n bytes at off.
func stripesOf(off, n int64) stripeSet {
	if n <= 0 {
		return 0
	}
	first, last := off/stripeSpan, (off+n-1)/stripeSpan
	if last-first >= stripes-1 {
		return allStripes
	}
	return stripeSet(bits.RotateLeft64(1<<(last-first+1)-1, int(first%stripes)))
}

// assertHeld asserts that somebody holds the stripes of n bytes at off.
func (l *rangeLocks) assertHeld(off, n int64) {
	if !invariant.Enabled {
		return
	}
	for s := stripesOf(off, n); s != 0; s &= s - 1 {
		invariant.Held(&l[bits.TrailingZeros64(uint64(s))])
	}
}

// heldStripes are stripes that share or exclude holds, until release.
type heldStripes struct {
	locks     *rangeLocks
	stripes   stripeSet
	exclusive bool
}

// share holds stripes for reading.
func (l *rangeLocks) share(s stripeSet) heldStripes {
	for left := s; left != 0; left &= left - 1 {
		l[bits.TrailingZeros64(uint64(left))].RLock()
	}
	return heldStripes{l, s, false}
}

// exclude holds stripes for writing.
func (l *rangeLocks) exclude(s stripeSet) heldStripes {
	for left := s; left != 0; left &= left - 1 {
		l[bits.TrailingZeros64(uint64(left))].Lock()
	}
	return heldStripes{l, s, true}
}

func (h heldStripes) release() {
	for s := h.stripes; s != 0; s &= s - 1 {
		if stripe := &h.locks[bits.TrailingZeros64(uint64(s))]; h.exclusive {
			stripe.Unlock()
		} else {
			stripe.RUnlock()
		}
	}
}
