//go:build invariants

package backend

import "fmt"

// held panics if l is not held, by any goroutine, for reading or writing.
func held(l interface {
	TryLock() bool
	Unlock()
}) {
	if l.TryLock() {
		l.Unlock()
		panic(fmt.Sprintf("backend: lock %T is not held", l))
	}
}
