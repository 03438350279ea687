package iscsi

import (
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
)

const piece = 64 << 10 // of the accounts of a bank

// A bank is a memory with accounts of connections in the full feature phase.
type bank struct {
	*memory
	t        *testing.T
	accounts []*budget
}

func newBank(t *testing.T, bound int64, conns int) *bank {
	b := &bank{memory: &memory{limit: &limits.New().Memory}, t: t}
	b.limit.SetMax(bound)
	pool := &bufferPool{}
	for i := range conns {
		g := &budget{pool: pool, quota: quota{free: 1 << 40}, bound: 1 << 40}
		b.join(g, fmt.Sprint(i), func() {})
		if !b.promote(g, fmt.Sprint("initiator ", i), loginBytes, piece) {
			t.Fatalf("no share for connection %d", i)
		}
		b.accounts = append(b.accounts, g)
	}
	return b
}

// fill takes Buffers of n bytes for g as long as there are any.
func (b *bank) fill(g *budget, n int) (list []*Buffer) {
	for {
		buf := g.try(n)
		if buf == nil {
			return list
		}
		list = append(list, buf)
	}
}

// exhaust makes the shares of the accounts from first on all that is left, and takes them.
func (b *bank) exhaust(first int) (list []*Buffer) {
	b.limit.SetMax(b.reserved + b.lent)
	for _, g := range b.accounts[first:] {
		list = append(append(list, b.fill(g, piece)...), b.fill(g, 4096)...)
	}
	return list
}

// end ends all accounts. Nothing may be in use, lent or reserved after that.
func (b *bank) end() {
	b.t.Helper()
	for _, g := range b.accounts {
		b.leave(g)
		if g.used != 0 {
			b.t.Errorf("connection %s has %d bytes in use", g.who, g.used)
		}
	}
	if b.reserved != 0 || b.lent != 0 || b.limit.Used() != 0 {
		b.t.Errorf("%d bytes reserved, %d lent, %d in the limit", b.reserved, b.lent, b.limit.Used())
	}
}

func release(lists ...[]*Buffer) {
	for _, l := range lists {
		for _, b := range l {
			b.Release()
		}
	}
}

// However much some connections take, the bound holds, each other one has its share and finds as much
// as the greedy ones have.
func TestGreedyConnectionsLeaveAShare(t *testing.T) {
	const bound, greedy = 64 << 20, 40
	b := newBank(t, bound, greedy+1)
	var taken [][]*Buffer
	for _, g := range b.accounts[:greedy] {
		taken = append(taken, b.fill(g, 1<<20), b.fill(g, piece), b.fill(g, 4096))
	}
	if used := b.limit.Used(); used > bound {
		t.Errorf("%d bytes in use of %d", used, bound)
	}
	honest := b.accounts[greedy]
	mine := b.fill(honest, 4096)
	if have := len(mine) * 4096; have < 4*piece {
		t.Errorf("the next connection gets %d bytes", have)
	}
	release(append(taken, mine)...)
	b.end()
}

// A connection alone may use a part that suffices for any load.
func TestOneConnectionBorrowsAPart(t *testing.T) {
	b := newBank(t, 2<<30, 1)
	all := b.fill(b.accounts[0], 1<<20)
	if n := len(all); n < 80 || n > 100 {
		t.Errorf("%d MiB of 2 GiB", n)
	}
	release(all)
	b.end()
}

// Memory that comes back goes to the connections that wait, one task of each in turn. It
// does not matter which came first.
func TestWaitingConnectionsTakeTurns(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		b := newBank(t, 16<<20, 2)
		full := b.exhaust(0)
		type got struct {
			conn int
			buf  *Buffer
		}
		turns := make(chan got, 8)
		for conn, g := range b.accounts { // all tasks of the first connection come before those of the second
			for range 4 {
				go func() { turns <- got{conn, g.wait(waiter(), 8<<10, 8<<10)} }()
				synctest.Wait()
			}
		}
		if len(turns) > 0 {
			t.Fatalf("%d tasks found memory that is not there", len(turns))
		}
		if b.limit.State().Bites == 0 {
			t.Error("waiting was not counted")
		}
		order := ""
		for n := 0; len(order) < 8; n++ {
			if n == 1000 {
				t.Fatalf("only %s got memory", order)
			}
			b.limit.SetMax(b.limit.Max() + 8<<10)
			b.changed()
			synctest.Wait()
			for len(turns) > 0 {
				g := <-turns
				order += fmt.Sprint(g.conn)
				full = append(full, g.buf)
			}
		}
		if order != "01010101" {
			t.Errorf("the turns were %s", order)
		}
		release(full)
		b.end()
	})
}

// A connection that is idle keeps nothing but its share.
func TestIdleConnectionGivesBack(t *testing.T) {
	b := newBank(t, 64<<20, 1)
	g := b.accounts[0]
	release(b.fill(g, piece))
	if g.lent == 0 || g.lent > maxUnused {
		t.Errorf("a busy connection keeps %d bytes", g.lent)
	}
	b.idle(g)
	if g.lent != 0 {
		t.Errorf("an idle connection keeps %d bytes", g.lent)
	}
	b.end()
}

// While memory is short, a task that asks for a long piece continues with its connection's share.
func TestShortMemoryMakesShortPieces(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		b := newBank(t, 64<<20, 1)
		b.limit.SetMax(b.reserved)
		g := b.accounts[0]
		buf := g.wait(waiter(), 1<<20, piece)
		if buf == nil || len(buf.data) != piece {
			t.Fatalf("%+v", buf)
		}
		buf.Release()
		b.limit.SetMax(64 << 20)
		b.changed()
		if buf = g.wait(waiter(), 1<<20, piece); len(buf.data) != 1<<20 {
			t.Errorf("a piece of %d bytes although memory is free", len(buf.data))
		}
		buf.Release()
		b.end()
	})
}

// The end of a wait, of a connection that waits, and of one that has all.
func TestEndsWhileMemoryIsShort(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		b := newBank(t, 16<<20, 3)
		hog := b.fill(b.accounts[0], piece)
		a, c := b.accounts[1], b.accounts[2]
		mine := b.exhaust(1)
		bufs := make(chan *Buffer, 3)
		aborted, closed, served := waiter(), waiter(), waiter()
		go func() { bufs <- a.wait(aborted, 8<<10, 8<<10) }()
		synctest.Wait()
		go func() { bufs <- a.wait(closed, 8<<10, 8<<10) }()
		go func() { bufs <- c.wait(served, 8<<10, 8<<10) }()
		synctest.Wait()
		a.cancel(aborted)
		if buf := <-bufs; buf != nil {
			t.Error("an aborted task got a Buffer")
		}
		a.close()
		if buf := <-bufs; buf != nil {
			t.Error("a task of a closed connection got a Buffer")
		}
		b.leave(b.accounts[0]) // with Buffers in use
		synctest.Wait()
		if len(bufs) > 0 {
			t.Error("memory came back before it was given back")
		}
		release(hog)
		synctest.Wait()
		if len(bufs) == 0 {
			t.Fatal("no task got what came back")
		}
		release(mine, []*Buffer{<-bufs})
		b.accounts = []*budget{a, c}
		b.end()
	})
}

// A new bound holds at once: tasks continue, or find less.
func TestMemoryChangesLive(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		b := newBank(t, 16<<20, 2)
		g := b.accounts[1]
		mine := b.exhaust(0)
		bufs := make(chan *Buffer, 1)
		go func() { bufs <- g.wait(waiter(), piece, piece) }()
		synctest.Wait()
		if len(bufs) > 0 {
			t.Fatal("there is memory left")
		}
		b.limit.SetMax(64 << 20)
		b.changed()
		synctest.Wait()
		if len(bufs) == 0 {
			t.Fatal("the task does not go on with the new bound")
		}
		mine = append(mine, <-bufs)
		b.limit.SetMax(1 << 20)
		b.changed()
		if more := b.fill(b.accounts[0], piece); len(more) > 0 {
			t.Errorf("%d Buffers beyond the new bound", len(more))
		}
		release(mine)
		b.end()
	})
}

// What is not a piece of data leaves room for one piece.
func TestOtherDataLeavesRoomForAPiece(t *testing.T) {
	b := newBank(t, 16<<20, 2)
	hog := b.fill(b.accounts[0], piece)
	g := b.accounts[1]
	var other []*Buffer
	for buf := g.other(4096); buf != nil; buf = g.other(4096) {
		other = append(other, buf)
	}
	buf := g.try(piece)
	if buf == nil {
		t.Error("no piece")
	} else {
		buf.Release()
	}
	if len(other)*4096 < stashShare {
		t.Errorf("%d bytes of other data", len(other)*4096)
	}
	release(hog, other)
	b.end()
}
