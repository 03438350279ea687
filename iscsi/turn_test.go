package iscsi

import (
	"sync"
	"testing"
)

// One at a time has the turn, and everybody gets it.
func TestTurn(t *testing.T) {
	const goroutines, times = 8, 1000
	var tn turn
	tn.init()
	n := 0
	var wg sync.WaitGroup
	tn.Lock()
	for range goroutines {
		wg.Go(func() {
			for range times {
				tn.Lock()
				n++ // a race, if two have it
				tn.Unlock()
			}
		})
	}
	tn.Unlock()
	wg.Wait()
	if n != goroutines*times {
		t.Errorf("%d turns were taken instead of %d", n, goroutines*times)
	}
}
