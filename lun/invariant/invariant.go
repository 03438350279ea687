// Package invariant asserts what the code relies on, in builds with the tag "invariants". Without
// the tag every call is empty and inlined: it costs nothing on the I/O path.
//
// The arguments of a call are evaluated in both builds. Put a costly condition behind Enabled:
//
//	if invariant.Enabled {
//		invariant.Check(len(q.list) == q.count(), "queue: %d entries", len(q.list))
//	}
package invariant

// Lock is a lock that can be tried: *sync.Mutex, and the write side of *sync.RWMutex.
type Lock interface {
	TryLock() bool
	Unlock()
}
