package testkit

import (
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
)

var bubbles struct {
	mu sync.Mutex
	n  int // that run
	p  int // Ps of the process without them
}

// Bubble runs f in a bubble, as synctest.Test does, which no test calls itself. With the race detector the process has one P
// until f returns, because Go 1.26 runs all timers of a bubble in one context of the detector: two goroutines that do so at once, each
// with a timer that is due when it is made or when its channel is read, crash the process.
func Bubble(t *testing.T, f func(*testing.T)) {
	t.Helper()
	if Race {
		bubbles.mu.Lock()
		if bubbles.n++; bubbles.n == 1 {
			bubbles.p = runtime.GOMAXPROCS(1)
		}
		bubbles.mu.Unlock()
		defer func() {
			bubbles.mu.Lock()
			defer bubbles.mu.Unlock()
			if bubbles.n--; bubbles.n == 0 {
				runtime.GOMAXPROCS(bubbles.p)
			}
		}()
	}
	synctest.Test(t, f)
}
