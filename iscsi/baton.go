package iscsi

import "sync"

// A baton is a lock whose holder may wait for the network. Waiters sleep at once. A sync.Mutex
// spins first, and so keeps a processor from the goroutine that the holder is about to need.
type baton struct {
	mu    sync.Mutex
	free  sync.Cond
	taken bool
	left  int // 0: no; else 1, and 1 more for each call of remind since
}

func (b *baton) init() { b.free.L = &b.mu }

// Lock waits until the baton is free and takes it.
func (b *baton) Lock() {
	b.mu.Lock()
	for b.taken {
		b.free.Wait()
	}
	b.taken, b.left = true, 0
	b.mu.Unlock()
}

// TryLock takes the baton if it is free.
func (b *baton) TryLock() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	free := !b.taken
	b.taken = true
	return free
}

// ifFree calls f if the baton is free. Nobody can take it before f returns, so f must not wait.
func (b *baton) ifFree(f func()) {
	b.mu.Lock()
	if !b.taken {
		f()
	}
	b.mu.Unlock()
}

// Unlock gives the baton back and wakes the goroutine that has waited longest. Another one may
// still take the baton first.
func (b *baton) Unlock() {
	b.mu.Lock()
	b.taken = false
	b.mu.Unlock()
	b.free.Signal()
}

// leave gives the baton back and wakes nobody. The caller takes it again soon, or calls wake.
func (b *baton) leave() {
	b.mu.Lock()
	b.taken, b.left = false, 1
	b.mu.Unlock()
}

// isLeft reports whether the baton was left and is still free.
func (b *baton) isLeft() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.left > 0
}

// wake does what leave has left out.
func (b *baton) wake() {
	b.mu.Lock()
	left := b.left > 0
	b.left = 0
	b.mu.Unlock()
	if left {
		b.free.Signal()
	}
}

// remind does so if remind was called since leave. It reports whether it did.
func (b *baton) remind() bool {
	b.mu.Lock()
	due := b.left > 1
	if b.left > 0 {
		b.left++
	}
	b.mu.Unlock()
	if due {
		b.wake()
	}
	return due
}
