package testkit

import (
	"runtime"
	"testing"
	"time"
)

// Patience is how long tests wait for something that has to happen. It only matters when the
// test fails, so it is long enough for a machine that is busy with other things.
const Patience = 2 * time.Minute

// Eventually waits until f returns true, and fails the test if that takes longer than
// Patience. It is for conditions that no channel reports.
func Eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	end := time.Now().Add(Patience)
	for pause := 50 * time.Microsecond; !f(); pause = min(2*pause, 2*time.Millisecond) {
		time.Sleep(pause)
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s\n%s", Patience, what, Stacks())
		}
	}
}

// Stacks returns the stacks of all goroutines, up to 1 MiB.
func Stacks() string {
	b := make([]byte, 1<<20)
	return string(b[:runtime.Stack(b, true)])
}
