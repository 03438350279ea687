package iscsi

import "sync"

// A turn is a lock for what takes long: who has it may wait for the peer. So who
// wants it sleeps at once, where a sync.Mutex spins for a while first and keeps a
// processor from the one that the holder is about to need.
type turn struct {
	mu    sync.Mutex
	free  sync.Cond
	taken bool
}

func (t *turn) init() { t.free.L = &t.mu }

// Lock waits until nobody has the turn, and takes it.
func (t *turn) Lock() {
	t.mu.Lock()
	for t.taken {
		t.free.Wait()
	}
	t.taken = true
	t.mu.Unlock()
}

// ifFree calls f, which must not wait, if nobody has the turn, and keeps it so
// meanwhile.
func (t *turn) ifFree(f func()) {
	t.mu.Lock()
	if !t.taken {
		f()
	}
	t.mu.Unlock()
}

// Unlock gives the turn back. Who was waiting longest wakes, but whoever is faster
// gets it.
func (t *turn) Unlock() {
	t.mu.Lock()
	t.taken = false
	t.mu.Unlock()
	t.free.Signal()
}
