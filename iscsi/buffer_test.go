package iscsi

import (
	"testing"
	"testing/synctest"

	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
)

func newBudget(octets int) *budget {
	m := &memory{limit: &limits.New().Memory}
	m.limit.SetMax(1 << 40)
	g := &budget{pool: &bufferPool{}, quota: quota{free: octets}, bound: octets}
	m.join(g, "initiator", func() {})
	return g
}

func waiter() *Task { return &Task{wake: make(chan struct{}, 1)} }

func TestBufferClasses(t *testing.T) {
	for n, want := range map[int]int{0: 4096, 1: 4096, 4096: 4096, 4097: 8192, 65536: 65536, 65537: 131072,
		1 << 20: 1 << 20, maxBuffer: maxBuffer} {
		if got := 1 << (minBufferShift + bufferClass(n)); got != want {
			t.Errorf("%d bytes in a Buffer of %d, want %d", n, got, want)
		}
	}
}

// Waiters are served in order of arrival, and a small request does not
// overtake a large one.
func TestBudgetIsFair(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		g := newBudget(64 << 10)
		all := g.try(64 << 10)
		if all == nil || g.try(1) != nil {
			t.Fatal("budget of 64 KiB")
		}
		got := make(chan int, 3)
		bufs := make([]*Buffer, 3)
		for i, n := range []int{32 << 10, 64 << 10, 4096} {
			w := waiter()
			go func() {
				bufs[i] = g.wait(w, n, n)
				got <- i
			}()
			synctest.Wait()
			if g.last() != w {
				t.Fatalf("waiter %d does not wait", i)
			}
		}
		all.Release()
		if i := <-got; i != 0 {
			t.Fatalf("waiter %d first", i)
		}
		if g.try(4096) != nil {
			t.Error("try overtakes those who wait")
		}
		synctest.Wait()
		if len(got) != 0 {
			t.Fatalf("waiter %d without memory", <-got)
		}
		bufs[0].Release()
		if i := <-got; i != 1 {
			t.Fatalf("waiter %d second", i)
		}
		bufs[1].Release()
		<-got
		bufs[2].Release()
		if pieces, octets := g.out(); g.free != 64<<10 || pieces != 0 || octets != 0 {
			t.Errorf("free %d, %d pieces of %d bytes out", g.free, pieces, octets)
		}
	})
}

// Buffers that leave together come back at End of their Departure, each to its own connection, and those who wait get them then. Others come back at once.
func TestDepartureGivesBack(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		g, neighbor := newBudget(8192), newBudget(8192)
		queue, other := quota{free: 100}, quota{free: 100}
		take := func(g *budget, q *quota) *Buffer {
			b := g.try(4096)
			if b == nil || !q.take(40) {
				t.Fatal("no room")
			}
			b.room, b.queued = q, 40
			return b
		}
		first, second, third := take(g, &queue), take(g, &queue), take(neighbor, &other)
		kept := neighbor.try(4096)
		kept.Retain() // by a second owner
		got := make(chan *Buffer, 1)
		go func() { got <- g.wait(waiter(), 8192, 8192) }()
		synctest.Wait()
		var d Departure
		d.Release(first)
		d.Release(second)
		synctest.Wait()
		if pieces, _ := g.out(); pieces != 2 || len(got) != 0 || queue.done.Load() != 0 {
			t.Errorf("before End: %d Buffers are out, %d waits have ended", pieces, len(got))
		}
		d.Release(kept)
		if _, octets := neighbor.out(); octets != 8192 {
			t.Errorf("a Buffer with another owner has come back: %d bytes are out", octets)
		}
		d.Release(kept) // by the last owner, and not on its way to the initiator
		d.Release(third)
		if pieces, octets := neighbor.out(); pieces != 1 || octets != 4096 {
			t.Errorf("%d Buffers of %d bytes are out at the neighbor", pieces, octets)
		}
		d.End()
		synctest.Wait()
		if (<-got).Release(); queue.left() != 100 || queue.done.Load() != 2 || other.left() != 100 || other.done.Load() != 1 {
			t.Errorf("the send queues have %d and %d of 100, after %d and %d Buffers", queue.left(), other.left(), queue.done.Load(), other.done.Load())
		}
		for _, g := range []*budget{g, neighbor} {
			if pieces, octets := g.out(); pieces != 0 || octets != 0 {
				t.Errorf("%d Buffers of %d bytes are out", pieces, octets)
			}
		}
		defer func() {
			if recover() == nil {
				t.Error("a second Release did not panic")
			}
		}()
		d.Release(first)
	})
}

// A cancelled waiter leaves, and those behind it get what they want.
func TestBudgetCancel(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		g := newBudget(8192)
		half := g.try(4096)
		first, second, third := waiter(), waiter(), waiter()
		type result struct {
			t *Task
			b *Buffer
		}
		got := make(chan result, 3)
		for _, w := range []struct {
			t *Task
			n int
		}{{first, 8192}, {second, 4096}, {third, 8192}} {
			go func() { got <- result{w.t, g.wait(w.t, w.n, w.n)} }()
			synctest.Wait()
			if g.last() != w.t {
				t.Fatalf("%p does not wait", w.t)
			}
		}
		first.aborted.Store(true)
		g.cancel(first)
		g.cancel(waiter()) // does not wait: nothing happens
		var second2 *Buffer
		for range 2 {
			r := <-got
			if r.t == first && r.b != nil || r.t == second && r.b == nil || r.t == third {
				t.Fatalf("%p got %v", r.t, r.b)
			}
			if r.t == second {
				second2 = r.b
			}
		}
		if b := g.wait(first, 1, 1); b != nil {
			t.Error("an aborted task got a Buffer")
		}
		g.close()
		if r := <-got; r.t != third || r.b != nil {
			t.Errorf("%p got %v after close", r.t, r.b)
		}
		if g.try(1) != nil || g.wait(waiter(), 1, 1) != nil {
			t.Error("Buffer from a closed budget")
		}
		half.Release()
		second2.Release()
		if pieces, _ := g.out(); pieces != 0 {
			t.Errorf("%d out", pieces)
		}
		defer func() {
			if recover() == nil {
				t.Error("second Release did not panic")
			}
		}()
		half.Release()
	})
}

func TestTaskTable(t *testing.T) {
	var tt taskTable
	tt.init(10)
	tasks := map[uint32]*Task{}
	for i := range 300 {
		itt := uint32(i) * 0x01000193
		u := &Task{}
		u.header().SetITT(itt)
		tt.insert(u)
		tasks[itt] = u
	}
	seen := 0
	tt.each(func(*Task) { seen++ })
	if seen != len(tasks) {
		t.Fatalf("%d of %d tasks", seen, len(tasks))
	}
	for itt, u := range tasks {
		if tt.find(itt) != u {
			t.Fatalf("task %#x not found", itt)
		}
		tt.remove(u)
		tt.remove(u) // twice does no harm
		if tt.find(itt) != nil {
			t.Fatalf("task %#x found after its end", itt)
		}
	}
	if tt.any(func(*Task) bool { return true }) {
		t.Error("table is not empty")
	}
}

// last returns who waits and has come last.
func (q *quota) last() (t *Task) {
	for t = range q.waiters.All() {
	}
	return t
}

// A countedPipe counts calls of Release.
type countedPipe struct{ released int }

func (*countedPipe) In() int    { return -1 }
func (p *countedPipe) Release() { p.released++ }

// A Buffer of a Pipe gives back the Pipe when its data has left, or will not leave, and its memory later. It counts for the connection that answers for it.
func TestPipedBuffers(t *testing.T) {
	g, other, p := newBudget(64<<10), newBudget(64<<10), &countedPipe{}
	b := g.tryPiped(1<<20, p)
	if b == nil || g.pipes.Load() != 1 || b.Pipe() != Pipe(p) || !b.Share() || len(b.Lent()) != 0 {
		t.Fatalf("%+v", b)
	}
	if !g.take(64 << 10) {
		t.Error("the Pipe takes the place of pieces of data")
	}
	used, usedByOther := g.used, other.used
	b.chargeTo(other)
	if g.used != used-1<<20 || g.pipes.Load() != 0 || other.used != usedByOther+1<<20 || other.pipes.Load() != 1 {
		t.Errorf("the first has %d bytes and %d Pipes, the second %d and %d", g.used, g.pipes.Load(), other.used, other.pipes.Load())
	}
	b.Sent()
	if p.released != 1 || other.pipes.Load() != 0 || other.used != usedByOther+1<<20 || b.Pipe() != nil {
		t.Errorf("%d times released after the data has left", p.released)
	}
	b.Release()
	if p.released != 1 || other.used != usedByOther {
		t.Errorf("%d times released in the end, %d bytes are left", p.released, other.used)
	}
	g.tryPiped(4096, p).Release() // without having left
	if p.released != 2 || g.pipes.Load() != 0 {
		t.Errorf("%d times released without having left", p.released)
	}
	g.of.limit.SetMax(1 << 20)
	if g.tryPiped(2<<20, p) != nil || g.pipes.Load() != 0 || p.released != 2 {
		t.Error("a Pipe without memory")
	}
}
