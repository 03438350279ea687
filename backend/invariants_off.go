//go:build !invariants

package backend

// held does nothing without the build tag invariants.
func held(interface {
	TryLock() bool
	Unlock()
}) {
}
