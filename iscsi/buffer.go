package iscsi

import (
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/iscsi/fifo"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
)

// Buffers come in sizes of 4 KiB times a power of two.
const (
	minBufferShift = 12
	bufferClasses  = 13 // up to 16 MiB
	maxBuffer      = 1 << (minBufferShift + bufferClasses - 1)
)

// A Buffer holds a piece of a task's data. It has one owner: the task from budget.try or budget.wait
// until Datamover.PutData succeeds, then the mover, which gives it back with Release.
type Buffer struct {
	data   []byte  // as long as its class
	budget *budget // nil while the Buffer is in the pool

	other bool // it is not for a piece of data

	// A Buffer of getLent has no data of its own.
	lent  []lun.Lent // by a logical unit
	keeps int        // bytes of memory that the loans or the Pipe keep; 0: data belongs to the Buffer

	// A Buffer of getPiped has no data of its own either.
	pipe Pipe     // until its data has left; then nil
	view lun.View // of the data, until the initiator has it

	abandoned atomic.Bool // abandon was called

	link  fifo.Link[Buffer] // of Holds
	until uint32            // see Holds.Hold

	refs atomic.Int32 // owners in addition to the first one

	room   *quota // of the data that is queued for sending; nil: none
	queued int    // bytes of that
}

// Bytes returns the memory of b.
func (b *Buffer) Bytes() []byte { return b.data }

// Lent returns the memory of b where a logical unit has lent it, in the order of the data.
func (b *Buffer) Lent() []lun.Lent { return b.lent }

// Pipe returns what has the data of b, or nil if b does not have its data in a Pipe.
func (b *Buffer) Pipe() Pipe { return b.pipe }

// Retain adds an owner of b. Its bytes do not change from now on. The last Release gives b back.
func (b *Buffer) Retain() { b.refs.Add(1) }

// Sent gives back the room of b in the send queue, and its Pipe, before Release does: the data that PutData or PutPipe has
// queued has left.
func (b *Buffer) Sent() {
	if p := b.pipe; p != nil {
		b.pipe = nil
		p.Release()
		b.budget.pipes.Add(-1)
	}
	if q := b.room; q != nil {
		b.room = nil
		q.done.Add(1)
		q.release(b.queued)
	}
}

// plain reports whether b has data of its own, which is a piece of data, and one owner.
func (b *Buffer) plain() bool {
	return b.budget != nil && !b.other && b.keeps == 0 && b.refs.Load() == 0
}

// Share reports whether the kernel may refer to the bytes of b until the initiator has them, also after they have left. Then b no longer counts as a piece of
// data, so nobody waits for its release. The mover gives it to its Holds then.
func (b *Buffer) Share() bool {
	if b.keeps == 0 {
		return false
	}
	if b.other { // it is shared
		return true
	}
	for _, l := range b.lent {
		if !l.Share() {
			return false
		}
	}
	return b.budget.tryOther(b)
}

// abandon does what Release does, at the end of the connection of a shared Buffer: nobody learns then when the initiator has the bytes, so they never change.
func (b *Buffer) abandon() {
	b.abandoned.Store(true)
	b.Release()
}

// Release gives b back. The caller must not touch its memory afterwards. Release panics if b was
// given back before.
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
	b.leave()
	n, other := b.size(), b.other
	g.pool.put(b)
	if other {
		g.discharge(n)
	} else {
		g.release(n, 1)
	}
}

// leave makes b forget whose it is, and what it refers to.
func (b *Buffer) leave() {
	b.budget = nil
	if b.keeps > 0 {
		abandoned := b.abandoned.Swap(false)
		for _, l := range b.lent {
			if abandoned {
				l.Abandon()
			} else {
				l.Return()
			}
		}
		clear(b.lent) // do not keep the data alive
		b.lent = b.lent[:0]
		if abandoned {
			b.view.Abandon()
		} else {
			b.view.End()
		}
	} else if invariant.Enabled { // so that a late reader of b is found out
		for i := range b.data {
			b.data[i] = 0xdb
		}
	}
}

// size returns how many bytes of memory b counts for.
func (b *Buffer) size() int {
	if b.keeps > 0 {
		return b.keeps
	}
	return len(b.data)
}

// chargeTo makes g answer for b instead of the budget that b is from.
func (b *Buffer) chargeTo(g *budget) {
	from, n := b.budget, b.size()
	b.budget = g
	g.of.add(g, n, false)
	if b.pipe != nil {
		from.pipes.Add(-1)
		g.pipes.Add(1)
	}
	if b.other {
		from.discharge(n)
		return
	}
	g.mu.Lock()
	g.takePiece(n)
	g.mu.Unlock()
	from.release(n, 1)
}

// bufferClass returns the class of the smallest Buffer that holds n bytes.
func bufferClass(n int) int {
	if n <= 1<<minBufferShift {
		return 0
	}
	return bits.Len(uint(n-1)) - minBufferShift
}

// A bufferPool keeps Buffers for all connections of a Node. The garbage collector frees those that
// nobody uses.
type bufferPool struct {
	classes [bufferClasses]sync.Pool
	lent    sync.Pool // Buffers for what logical units lend
}

// get returns a Buffer for a piece of data.
func (p *bufferPool) get(g *budget, class int) *Buffer {
	b := p.getOther(g, class)
	b.other = false
	return b
}

// getLent returns a Buffer for what a logical unit lends, which keeps n bytes of memory.
func (p *bufferPool) getLent(g *budget, n int) *Buffer {
	b, _ := p.lent.Get().(*Buffer)
	if b == nil {
		b = &Buffer{}
	}
	b.budget, b.other, b.keeps = g, false, n
	return b
}

// getPiped returns a Buffer for data in a Pipe, which keeps n bytes of memory.
func (p *bufferPool) getPiped(g *budget, n int, pipe Pipe) *Buffer {
	b, _ := p.lent.Get().(*Buffer)
	if b == nil {
		b = &Buffer{}
	}
	b.budget, b.other, b.keeps, b.pipe = g, true, n, pipe
	return b
}

// getOther returns a Buffer for something else.
func (p *bufferPool) getOther(g *budget, class int) *Buffer {
	b, _ := p.classes[class].Get().(*Buffer)
	if b == nil {
		b = &Buffer{data: make([]byte, 1<<(minBufferShift+class))}
	}
	b.budget, b.other = g, true
	return b
}

func (p *bufferPool) put(b *Buffer) {
	if b.keeps > 0 {
		p.lent.Put(b)
		return
	}
	p.classes[bufferClass(len(b.data))].Put(b)
}

// A quota bounds how many bytes of something a connection has. Tasks that find it used up wait in
// order of arrival.
type quota struct {
	mu      sync.Mutex // a leaf: its holder calls nothing
	free    int        // bytes
	waiters fifo.Queue[Task]
	closed  bool

	done atomic.Uint64 // of a send queue: counts calls of Buffer.Sent
}

// take takes n bytes if they are free and no task waits.
func (q *quota) take(n int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.waiters.Empty() || q.free < n || q.closed {
		return false
	}
	q.free -= n
	return true
}

// wait takes n bytes and waits until they are free. It returns false when t is cancelled or the
// quota is closed.
//
// Preconditions: t has nothing of this quota that it gives back only when it continues; its
// goroutine holds no lock, and has flushed what it has queued in the mover.
func (q *quota) wait(t *Task, n int) bool {
	q.mu.Lock()
	if q.closed || t.aborted.Load() {
		q.mu.Unlock()
		return false
	}
	t.wants, t.granted = n, false
	q.waiters.Push(t, &t.waiter)
	q.serve()
	q.mu.Unlock()
	<-t.wake
	return t.granted
}

// contended reports whether a task waits.
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

// serve ends waits, the oldest first, as far as the free bytes suffice.
//
// Preconditions: q.mu is held.
func (q *quota) serve() {
	invariant.Held(&q.mu)
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
		q.serve() // t may have needed more than those after it
	}
}

// left returns how many bytes are free.
func (q *quota) left() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.free
}

// close ends all waits, now and in future. Bytes that were taken still come back by release.
func (q *quota) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	for t := q.waiters.Pop(); t != nil; t = q.waiters.Pop() {
		t.wake <- struct{}{}
	}
}

// A budget bounds the Buffers of one connection, and has its account. A task that waits for a Buffer
// holds none, so tasks that hold one always continue and give it back.
type budget struct {
	quota
	account
	pool   *bufferPool
	bound  int          // of the quota
	pieces int          // Buffers with pieces of data, which have bound-free bytes; guarded by mu
	pipes  atomic.Int32 // that Buffers have
}

// takePiece counts a Buffer of n bytes for a piece of data.
//
// Preconditions: g.mu is held.
func (g *budget) takePiece(n int) {
	invariant.Held(&g.mu)
	g.free -= n
	g.pieces++
}

// out returns how many Buffers have pieces of data, and how many bytes.
func (g *budget) out() (pieces, bytes int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.pieces, g.bound - g.free
}

// grant lets the first task that waits continue, with n bytes.
//
// Preconditions: g.mu is held; the bytes are free.
func (g *budget) grant(n int) {
	invariant.Held(&g.mu)
	t := g.waiters.Pop()
	g.takePiece(n)
	g.used += n
	t.wants, t.granted = n, true
	t.wake <- struct{}{}
}

// serve does what quota.serve does, as far as the account suffices. While memory is short a task gets
// the least that it can continue with.
//
// Preconditions: g.mu is held.
func (g *budget) serve() {
	invariant.Held(&g.mu)
	g.lacks = false
	for t := g.waiters.Front(); t != nil && g.free >= t.wants; t = g.waiters.Front() {
		n := t.wants
		if g.rest() < n && g.of.short.Load() {
			n = t.least
		}
		if g.rest() < n {
			g.lacks = true
			return
		}
		g.grant(n)
	}
}

// unsettled reports whether memory.settle has something to do.
//
// Preconditions: g.mu is held.
func (g *budget) unsettled() bool {
	if g.lacks {
		return !g.queued
	}
	n := g.unused()
	return n > maxUnused || n > 0 && (g.gone || g.of.short.Load())
}

// restForOther returns how many bytes are left for what is not a piece of data: one piece always
// finds its part of the share.
//
// Preconditions: g.mu is held.
func (g *budget) restForOther() int { return g.rest() - max(0, g.piece-(g.bound-g.free)) }

// take takes n bytes for a piece of data if they are free and no task waits.
func (g *budget) take(n int) bool {
	g.mu.Lock()
	switch {
	case !g.waiters.Empty() || g.free < n || g.closed:
		g.mu.Unlock()
		return false
	case g.rest() < n:
		g.mu.Unlock()
		return g.of.borrow(g, n)
	}
	g.takePiece(n)
	g.used += n
	g.mu.Unlock()
	return true
}

// try returns a Buffer for n bytes, or nil if the budget is used up or a task waits.
func (g *budget) try(n int) *Buffer {
	class := bufferClass(n)
	if !g.take(1 << (minBufferShift + class)) {
		return nil
	}
	return g.pool.get(g, class)
}

// tryLent does what try does, for what a logical unit lends. That keeps n bytes of memory.
func (g *budget) tryLent(n int) *Buffer {
	if !g.take(n) {
		return nil
	}
	return g.pool.getLent(g, n)
}

// tryPiped returns a Buffer for n bytes in a Pipe, or nil if memory is short. It is shared from the beginning: see Buffer.Share.
func (g *budget) tryPiped(n int, pipe Pipe) *Buffer {
	if !g.charge(n) {
		return nil
	}
	g.pipes.Add(1)
	return g.pool.getPiped(g, n, pipe)
}

// wait returns a Buffer for n bytes, for which it waits as quota.wait does, or nil when that returns
// false. While memory is short the Buffer may have only as many bytes as least.
func (g *budget) wait(t *Task, n, least int) *Buffer {
	g.mu.Lock()
	if g.closed || t.aborted.Load() {
		g.mu.Unlock()
		return nil
	}
	t.wants, t.granted = 1<<(minBufferShift+bufferClass(n)), false
	t.least = min(t.wants, 1<<(minBufferShift+bufferClass(least)))
	g.waiters.Push(t, &t.waiter)
	g.serve()
	g.unlock()
	<-t.wake
	if !t.granted {
		return nil
	}
	return g.pool.get(g, bufferClass(t.wants))
}

// unlock unlocks g.mu, and settles the account if need be.
func (g *budget) unlock() {
	settle := g.unsettled()
	g.mu.Unlock()
	if settle {
		g.of.settle(g)
	}
}

// release gives back n bytes of so many pieces of data.
func (g *budget) release(n, pieces int) {
	g.mu.Lock()
	g.free += n
	g.pieces -= pieces
	g.used -= n
	g.serve()
	g.unlock()
}

// cancel ends the wait of t, if it waits.
func (g *budget) cancel(t *Task) {
	g.mu.Lock()
	if g.waiters.Remove(&t.waiter) {
		t.wake <- struct{}{}
		g.serve() // t may have needed more than those after it
	}
	g.unlock()
}

// other returns a Buffer for n bytes that are not a piece of data, or nil if memory is short.
func (g *budget) other(n int) *Buffer {
	class := bufferClass(n)
	if !g.charge(1 << (minBufferShift + class)) {
		return nil
	}
	return g.pool.getOther(g, class)
}

// makeOther makes b, a Buffer of g, one that is not for a piece of data.
func (g *budget) makeOther(b *Buffer) {
	g.mu.Lock()
	b.other = true
	g.free += b.size()
	g.pieces--
	g.serve()
	g.unlock()
}

// tryOther does what makeOther does, unless memory is short: one piece of data always finds its part of the share.
func (g *budget) tryOther(b *Buffer) bool {
	n := b.size()
	if !g.charge(n) {
		return false
	}
	g.makeOther(b)
	g.discharge(n) // of the piece
	return true
}

// charge counts n bytes of something other than a piece of data. It returns false if memory is short.
func (g *budget) charge(n int) bool {
	g.mu.Lock()
	if g.restForOther() < n {
		g.mu.Unlock()
		for range 2 { // between the two, others may have given back what they did not use
			if g.of.charge(g, n) {
				return true
			}
		}
		return false
	}
	g.used += n
	g.mu.Unlock()
	return true
}

// discharge gives back what charge has counted.
func (g *budget) discharge(n int) {
	g.mu.Lock()
	g.used -= n
	g.serve()
	g.unlock()
}
