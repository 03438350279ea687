package iscsi

import (
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/iscsi/fifo"
	"github.com/iser-target/iser-target/lun/invariant"
)

// Buffers come in sizes of 4 KiB times a power of two.
const (
	minBufferShift = 12
	bufferClasses  = 13 // up to 16 MiB
	maxBuffer      = 1 << (minBufferShift + bufferClasses - 1)
)

// A Buffer holds a piece of a task's data. Whoever has it owns it: the task
// from budget.try or budget.wait until Datamover.PutData succeeds, from then
// on the mover, which gives it back with Release.
type Buffer struct {
	data   []byte // as long as its class
	class  int
	budget *budget // nil while the Buffer is in the pool

	refs atomic.Int32 // owners beside the first one

	room   *quota // of what is queued for sending; nil: none of it
	queued int    // octets of that
}

// Retain makes one more owner of b, whose octets do not change any more: b is
// given back by the last Release.
func (b *Buffer) Retain() { b.refs.Add(1) }

// Sent tells that what PutData has queued of b has left, if that is before the
// Release.
func (b *Buffer) Sent() {
	if q := b.room; q != nil {
		b.room = nil
		q.done.Add(1)
		q.release(b.queued)
	}
}

// Release gives b back. Its memory must not be touched afterwards, and a second
// Release is a bug that panics.
func (b *Buffer) Release() {
	g := b.budget
	if g == nil {
		panic("iscsi: Buffer released twice")
	}
	if b.refs.Load() != 0 {
		if b.refs.Add(-1) >= 0 {
			return
		}
		b.refs.Store(0)
	}
	b.Sent()
	b.budget = nil
	if invariant.Enabled { // whoever still reads b finds that out
		for i := range b.data {
			b.data[i] = 0xdb
		}
	}
	n := len(b.data)
	g.pool.put(b)
	g.release(n)
}

// bufferClass is the class of the smallest Buffer that holds n octets.
func bufferClass(n int) int {
	if n <= 1<<minBufferShift {
		return 0
	}
	return bits.Len(uint(n-1)) - minBufferShift
}

// A bufferPool keeps Buffers for all connections of a Node. What nobody uses
// goes back to the operating system by way of the garbage collector.
type bufferPool struct {
	classes [bufferClasses]sync.Pool
	out     atomic.Int64 // Buffers not in the pool
	octets  atomic.Int64 // their size
}

func (p *bufferPool) get(g *budget, class int) *Buffer {
	b, _ := p.classes[class].Get().(*Buffer)
	if b == nil {
		b = &Buffer{data: make([]byte, 1<<(minBufferShift+class)), class: class}
	}
	b.budget = g
	p.out.Add(1)
	p.octets.Add(int64(len(b.data)))
	return b
}

func (p *bufferPool) put(b *Buffer) {
	p.out.Add(-1)
	p.octets.Add(-int64(len(b.data)))
	p.classes[b.class].Put(b)
}

// A quota bounds how many octets of something a connection has. Tasks that find
// it used up wait in order of arrival.
type quota struct {
	mu      sync.Mutex // a leaf: nothing is called with it held
	free    int        // octets
	waiters fifo.Queue[Task]
	closed  bool

	done atomic.Uint64 // what a Buffer has Sent; of the quota of a send queue
}

// take takes n octets if they are there at once and nobody waits for some.
func (q *quota) take(n int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.waiters.Empty() || q.free < n || q.closed {
		return false
	}
	q.free -= n
	return true
}

// wait takes n octets and waits until they are there. It returns false when t is
// cancelled or the quota is closed.
//
// Preconditions: t has nothing of this quota that comes back only when t goes on;
// its goroutine holds no lock, and what it has queued in the mover has been
// flushed.
func (q *quota) wait(t *Task, n int) bool {
	q.mu.Lock()
	if q.closed || t.aborted.Load() {
		q.mu.Unlock()
		return false
	}
	if q.waiters.Empty() && q.free >= n {
		q.free -= n
		q.mu.Unlock()
		return true
	}
	t.wants, t.granted = n, false
	q.waiters.Push(t, &t.waiter)
	q.mu.Unlock()

	<-t.wake
	return t.granted
}

// contended tells whether somebody waits.
func (q *quota) contended() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return !q.waiters.Empty()
}

func (q *quota) release(n int) {
	q.mu.Lock()
	q.free += n
	q.serve()
	q.mu.Unlock()
}

// serve grants what the first waiters want as far as it goes.
//
// Preconditions: q.mu is held.
func (q *quota) serve() {
	for t := q.waiters.Front(); t != nil && q.free >= t.wants; t = q.waiters.Front() {
		q.waiters.Pop()
		q.free -= t.wants
		t.granted = true
		t.wake <- struct{}{}
	}
}

// cancel ends the wait of t, if it waits.
func (q *quota) cancel(t *Task) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.waiters.Remove(&t.waiter) {
		t.wake <- struct{}{}
		q.serve() // t may have wanted more than those behind it
	}
}

// left is how many octets are free.
func (q *quota) left() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.free
}

// close ends all waits, now and in future. What is out comes back by release.
func (q *quota) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	for t := q.waiters.Pop(); t != nil; t = q.waiters.Pop() {
		t.wake <- struct{}{}
	}
}

// A budget bounds the Buffers of one connection. Who waits for one holds none,
// so those who hold one always get on and give it back.
type budget struct {
	quota
	pool *bufferPool
}

// try takes a Buffer for n octets if it is there at once and nobody waits for
// one; otherwise it returns nil.
func (g *budget) try(n int) *Buffer {
	class := bufferClass(n)
	if !g.take(1 << (minBufferShift + class)) {
		return nil
	}
	return g.pool.get(g, class)
}

// wait takes a Buffer for n octets and waits until it is there, as quota.wait
// does. It returns nil when that returns false.
func (g *budget) wait(t *Task, n int) *Buffer {
	class := bufferClass(n)
	if !g.quota.wait(t, 1<<(minBufferShift+class)) {
		return nil
	}
	return g.pool.get(g, class)
}
