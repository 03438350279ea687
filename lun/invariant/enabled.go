//go:build invariants

package invariant

import "fmt"

// Enabled reports whether this build asserts invariants.
const Enabled = true

// Held panics if nobody holds l. It cannot see who holds it, so a lock that
// another goroutine holds passes. A read lock of a sync.RWMutex passes too.
func Held(l Lock) {
	if l.TryLock() {
		l.Unlock()
		panic(fmt.Sprintf("invariant: lock %T is not held", l))
	}
}

// Check panics with the formatted message if ok is false.
func Check(ok bool, format string, args ...any) {
	if !ok {
		panic("invariant: " + fmt.Sprintf(format, args...))
	}
}
