package iscsi

import (
	"math/bits"
	"sync"
	"sync/atomic"
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
}

// Release gives b back. Its memory must not be touched afterwards, and a second
// Release is a bug that panics.
func (b *Buffer) Release() {
	g := b.budget
	if g == nil {
		panic("iscsi: Buffer released twice")
	}
	b.budget = nil
	if poison {
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

// A budget bounds the Buffers of one connection. Tasks that find it used up
// wait in order of arrival. None of them holds a Buffer meanwhile, so those
// who hold one always get on and give it back.
type budget struct {
	pool *bufferPool

	mu         sync.Mutex // a leaf: nothing is called with it held
	free       int        // octets
	head, tail *Task      // waiters, linked by nextWaiter
	closed     bool
}

// try takes a Buffer for n octets if it is there at once and nobody waits for
// one; otherwise it returns nil.
func (g *budget) try(n int) *Buffer {
	class := bufferClass(n)
	size := 1 << (minBufferShift + class)
	g.mu.Lock()
	ok := g.head == nil && g.free >= size && !g.closed
	if ok {
		g.free -= size
	}
	g.mu.Unlock()
	if !ok {
		return nil
	}
	return g.pool.get(g, class)
}

// wait takes a Buffer for n octets and waits until it is there. It returns nil
// when t is cancelled or the budget is closed.
//
// Preconditions: t holds no Buffer, its goroutine holds no lock, and what it has
// queued in the mover has been flushed.
func (g *budget) wait(t *Task, n int) *Buffer {
	class := bufferClass(n)
	size := 1 << (minBufferShift + class)
	g.mu.Lock()
	if g.closed || t.aborted.Load() {
		g.mu.Unlock()
		return nil
	}
	if g.head == nil && g.free >= size {
		g.free -= size
		g.mu.Unlock()
		return g.pool.get(g, class)
	}
	t.wants, t.granted, t.nextWaiter = size, false, nil
	if g.tail == nil {
		g.head = t
	} else {
		g.tail.nextWaiter = t
	}
	g.tail = t
	g.mu.Unlock()

	<-t.wake
	if !t.granted {
		return nil
	}
	return g.pool.get(g, class)
}

func (g *budget) release(size int) {
	g.mu.Lock()
	g.free += size
	g.serve()
	g.mu.Unlock()
}

// serve grants what the first waiters want as far as it goes.
//
// Preconditions: g.mu is held.
func (g *budget) serve() {
	for g.head != nil && g.free >= g.head.wants {
		t := g.head
		g.free -= t.wants
		g.unlink(nil, t)
		t.granted = true
		t.wake <- struct{}{}
	}
}

// cancel ends the wait of t, if it waits.
func (g *budget) cancel(t *Task) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for prev, w := (*Task)(nil), g.head; w != nil; prev, w = w, w.nextWaiter {
		if w == t {
			g.unlink(prev, t)
			t.wake <- struct{}{}
			g.serve() // t may have wanted more than those behind it
			return
		}
	}
}

// close ends all waits, now and in future. Buffers that are out come back by
// Release.
func (g *budget) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	for g.head != nil {
		t := g.head
		g.unlink(nil, t)
		t.wake <- struct{}{}
	}
}

// unlink takes t, which follows prev, out of the list.
//
// Preconditions: g.mu is held.
func (g *budget) unlink(prev, t *Task) {
	if prev == nil {
		g.head = t.nextWaiter
	} else {
		prev.nextWaiter = t.nextWaiter
	}
	if g.tail == t {
		g.tail = prev
	}
	t.nextWaiter = nil
}
