package iscsi

import (
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/fifo"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/security/limits"
)

// The memory that initiators make the target use is bounded for the process (limits.memory). Each
// connection has an account. Its share is reserved as long as the connection exists, so no
// connection depends on what others give back. Beyond its share a connection borrows.
//
//	limit = reserved + lent + free
//
// A connection may borrow as long as it then has no more than a sixteenth of what remains free. So
// connections that take all they get, and keep it, leave something for the next one: 40 of them a
// twelfth. Those that find too little wait in line, and take turns when memory comes back. What
// waits is a task. A quarter is never lent: newcomers find their share there.

const (
	// chunk is how many bytes a connection borrows at a time, and maxUnused what it may keep of
	// that without using it, unless others wait.
	chunk     = 256 << 10
	maxUnused = 1 << 20

	// fairPart is which part of the free memory a connection may have.
	fairPart = 16

	// stashShare is the part of a share for what is not a piece of a command's data.
	stashShare = 16 << 10

	// loginBytes counts for a connection before the end of its login: its goroutine, text of both
	// sides, and the Datamover's buffers, which are short until then.
	loginBytes = 48 << 10

	// slotBytes counts for a task slot: the Task, the Datamover's part, and a goroutine.
	slotBytes = 4 << 10

	// When ebb bytes less are in use than before, or a quarter of the limit if that is less, for
	// ebbTime, the process returns memory to the system. The runtime alone takes minutes.
	ebb     = 64 << 20
	ebbTime = 5 * time.Second
)

// A memory is the budget of a Node.
type memory struct {
	limit *limits.Limit
	short atomic.Bool // a connection has found too little: nobody keeps what it does not use

	mu       sync.Mutex // after the locks of conns, before the mutexes of accounts
	reserved int64
	lent     int64
	peak     int64 // the most that was reserved and lent since giveBack
	ebbing   bool  // giveBack will be called
	accounts map[*budget]struct{}
	line     fifo.Queue[budget] // of those whose first task waits for memory of others
	hit      *budget            // has found too little since m.mu was locked
}

// An account says what a connection has of its Node's memory. The mutex of its quota guards it.
// share and lent change under memory.mu as well.
type account struct {
	of    *memory
	who   string // for limits.Bite
	share int
	piece int // the part of share for a piece of data
	lent  int
	used  int  // of share and lent
	lacks bool // the first waiter needs more
	gone  bool // the connection has ended

	always int // the part of used that comes back when the connection ends

	queued bool              // in memory.line; under memory.mu
	inLine fifo.Link[budget] // under memory.mu
	trim   func()            // gives back what the connection keeps without need
}

// rest returns how many bytes the account has left.
func (a *account) rest() int { return a.share + a.lent - a.used }

// unused returns how many bytes the account could give back.
func (a *account) unused() int { return max(0, min(a.rest(), a.lent)) }

// join makes g the account of a connection before login.
func (m *memory) join(g *budget, who string, trim func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	g.account = account{of: m, who: who, trim: trim, share: loginBytes, used: loginBytes, always: loginBytes}
	m.reserve(loginBytes)
	if m.accounts == nil {
		m.accounts = make(map[*budget]struct{})
	}
	m.accounts[g] = struct{}{}
}

// reserve changes what is reserved by n bytes.
//
// Preconditions: m.mu is held.
func (m *memory) reserve(n int) {
	invariant.Held(&m.mu)
	m.reserved += int64(n)
	m.limit.Add(int64(n))
	m.tide()
}

// tide notes how much is in use, and calls giveBack soon if that is much less than before.
//
// Preconditions: m.mu is held.
func (m *memory) tide() {
	invariant.Held(&m.mu)
	m.peak = max(m.peak, m.reserved+m.lent)
	if m.ebbed() && !m.ebbing {
		m.ebbing = true
		time.AfterFunc(ebbTime, m.giveBack)
	}
}

// ebbed reports whether much less is in use than since giveBack.
//
// Preconditions: m.mu is held.
func (m *memory) ebbed() bool {
	return m.peak-m.reserved-m.lent >= min(ebb, m.limit.Max()/4)
}

// lend changes what is lent to g by n bytes.
//
// Preconditions: m.mu and g.mu are held.
func (m *memory) lend(g *budget, n int) {
	invariant.Held(&m.mu)
	g.lent += n
	m.lent += int64(n)
	m.limit.Add(int64(n))
	m.tide()
}

// giveBack returns to the system what a flood has left, unless the memory is in use again.
func (m *memory) giveBack() {
	m.mu.Lock()
	over := m.ebbed()
	m.peak, m.ebbing = m.reserved+m.lent, false
	m.mu.Unlock()
	if over {
		debug.FreeOSMemory() // Buffers leave their pool
		debug.FreeOSMemory() // and then the heap
	}
}

// promote gives g the share of a connection in the full feature phase: fixed bytes that it always
// uses, and a piece of data. It returns false if there is no memory for that.
func (m *memory) promote(g *budget, who string, fixed, piece int) bool {
	m.mu.Lock()
	defer m.unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.who = who
	more := fixed + piece + stashShare - loginBytes
	if m.reserved+m.lent+int64(more) > m.limit.Max() {
		m.hit = g
		return false
	}
	m.reserve(more)
	g.share += more
	g.piece = piece
	g.used += fixed - loginBytes
	g.always += fixed - loginBytes
	return true
}

// leave ends the account of a connection that has ended. What it still uses comes back later.
func (m *memory) leave(g *budget) {
	m.mu.Lock()
	defer m.mu.Unlock()
	g.mu.Lock()
	if g.queued {
		g.queued = !m.line.Remove(&g.inLine)
	}
	delete(m.accounts, g)
	g.used -= g.always
	m.reserve(-g.share)
	g.gone, g.share, g.piece, g.always = true, 0, 0, 0
	m.lend(g, g.used-g.lent)
	g.mu.Unlock()
	m.serve()
}

// grow borrows so that g, which has rest bytes left, has at least n. It returns false if that is not
// allowed.
//
// Preconditions: m.mu and g.mu are held.
func (m *memory) grow(g *budget, n, rest int) bool {
	invariant.Held(&g.mu)
	need := n - rest
	if need <= 0 {
		return true
	}
	for _, want := range [...]int{max(need, chunk), need} {
		if int64(g.lent+want) <= (m.free()-int64(want))/fairPart {
			m.lend(g, want)
			return true
		}
	}
	m.hit = g
	return false
}

// free returns how many bytes may be lent.
//
// Preconditions: m.mu is held.
func (m *memory) free() int64 {
	all := m.limit.Max()
	return all - m.lent - max(m.reserved, all/4)
}

// unlock unlocks m.mu. If a connection has found too little memory, it first makes all connections
// give back what they do not use, and serves those in line.
func (m *memory) unlock() {
	for m.hit != nil {
		g := m.hit
		m.hit = nil
		m.limit.Bite(g.who)
		if m.short.Swap(true) {
			break
		}
		trims := make([]func(), 0, len(m.accounts))
		for o := range m.accounts {
			o.mu.Lock()
			m.lend(o, -o.unused())
			o.mu.Unlock()
			trims = append(trims, o.trim)
		}
		go func() {
			for _, trim := range trims {
				trim()
			}
		}()
		m.serve()
	}
	m.hit = nil
	m.mu.Unlock()
}

// serve gives those in line what they need, one task of each in turn.
//
// Preconditions: m.mu is held, and no mutex of an account.
func (m *memory) serve() {
	for served := true; served; {
		served = false
		line := m.line.Take()
		for g := line.Pop(); g != nil; g = line.Pop() {
			g.mu.Lock()
			ok := m.serveOne(g)
			if g.queued = g.lacks; g.queued {
				m.line.Push(g, &g.inLine)
			}
			g.mu.Unlock()
			served = served || ok
		}
	}
	m.hit = nil // it has been told before
	if m.line.Empty() && m.free() > m.limit.Max()/8 {
		m.short.Store(false)
	}
}

// serveOne gives the first task that waits for g what it asks for, or the least that it can continue
// with. It reports whether it did, and leaves in g.lacks whether a task needs more.
//
// Preconditions: m.mu and g.mu are held.
func (m *memory) serveOne(g *budget) bool {
	t := g.waiters.Front()
	if g.lacks = t != nil && g.quota.free >= t.wants; !g.lacks {
		return false
	}
	n := t.wants
	if !m.grow(g, n, g.rest()) {
		if n = t.least; !m.grow(g, n, g.rest()) {
			return false
		}
	}
	g.grant(n)
	t = g.waiters.Front()
	g.lacks = t != nil && g.quota.free >= t.wants
	return true
}

// settle takes back what g does not use. If its first task lacks memory it serves that, or puts g in
// line.
func (m *memory) settle(g *budget) {
	m.mu.Lock()
	defer m.unlock()
	g.mu.Lock()
	for g.lacks && !g.queued && m.serveOne(g) {
	}
	switch n := g.unused(); {
	case g.lacks:
		if !g.queued {
			g.queued = true
			m.line.Push(g, &g.inLine)
		}
	case g.gone || m.short.Load():
		m.lend(g, -n)
	case n > maxUnused:
		m.lend(g, chunk-n)
	}
	hit := m.hit
	g.mu.Unlock()
	m.serve()
	m.hit = hit
}

// idle takes back what g does not use, because it has been idle.
func (m *memory) idle(g *budget) {
	m.mu.Lock()
	defer m.mu.Unlock()
	g.mu.Lock()
	m.lend(g, -g.unused())
	g.mu.Unlock()
	m.serve()
}

// borrow takes n bytes for a piece of data of g, if g may have them and no task waits.
func (m *memory) borrow(g *budget, n int) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.waiters.Empty() || g.quota.free < n || g.closed || !m.grow(g, n, g.rest()) {
		m.hit = nil // the caller waits, or does with less
		return false
	}
	g.takePiece(n)
	g.used += n
	return true
}

// charge counts n bytes of something other than a piece of data, if g may have them.
func (m *memory) charge(g *budget, n int) bool {
	m.mu.Lock()
	defer m.unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	if !m.grow(g, n, g.restForOther()) {
		return false
	}
	g.used += n
	return true
}

// open makes g an account without a share, for what add counts.
func (m *memory) open(g *budget) { g.account = account{of: m, gone: true} }

// add counts n bytes in any case, also beyond the limit. If they last they come back when the
// connection ends.
func (m *memory) add(g *budget, n int, last bool) {
	m.mu.Lock()
	defer m.unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.used += n
	if last {
		g.always += n
	}
	if rest := g.rest(); rest < 0 {
		m.lend(g, -rest)
	}
}

// out returns how many Buffers of all accounts have pieces of data, and how many bytes.
func (m *memory) out() (pieces, bytes int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for g := range m.accounts {
		p, n := g.out()
		pieces, bytes = pieces+p, bytes+n
	}
	return pieces, bytes
}

// changed serves those in line after the limit was changed.
func (m *memory) changed() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.serve()
}
