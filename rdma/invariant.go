package rdma

import "sync"

// held panics in a build with the tag "invariants" if nobody holds mu. It does nothing
// in other builds.
func held(mu *sync.Mutex) {
	if invariants && mu.TryLock() {
		panic("rdma: a lock is not held")
	}
}
