package testkit

import (
	"runtime"
	"sync"
	"testing"
	"time"
)

// Goroutines of a bubble can have timers run at once, with the race detector, too.
func TestBubble(t *testing.T) {
	before := runtime.GOMAXPROCS(0)
	Bubble(t, func(*testing.T) {
		var wg sync.WaitGroup
		defer wg.Wait()
		for range 4 {
			wg.Go(func() {
				for range 5000 {
					time.AfterFunc(0, func() {}).Stop()
					<-time.After(0)
				}
			})
		}
	})
	if n := runtime.GOMAXPROCS(0); n != before {
		t.Errorf("afterwards the process has %d Ps, want %d as before", n, before)
	}
}
