package iscsi

import (
	"sync"
	"testing"
)

// One goroutine at a time holds the baton, and all get it.
func TestBatonHasOneHolder(t *testing.T) {
	const goroutines, times = 8, 1000
	var b baton
	b.init()
	n := 0
	var wg sync.WaitGroup
	b.Lock()
	for range goroutines {
		wg.Go(func() {
			for range times {
				b.Lock()
				n++ // a race, if two have it
				b.Unlock()
			}
		})
	}
	b.Unlock()
	wg.Wait()
	if n != goroutines*times {
		t.Errorf("%d times the baton was taken instead of %d", n, goroutines*times)
	}
}
