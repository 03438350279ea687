package backendtest

import (
	"slices"
	"sync"
)

// A Gate holds calls of a Faulty until it is opened. Shut and ShutFrom return one.
type Gate struct {
	// Entered receives a value for every call that the gate holds, up to 1000 that the
	// test has not yet received; a call beyond these waits for the test to receive.
	Entered <-chan struct{}

	ops     []Op
	from    int64
	entered chan struct{}
	opened  chan struct{}
	once    sync.Once
}

// Shut makes every later call of ops, by default those of FailIO, wait until the gate that it
// returns is opened. It replaces an earlier gate, which still holds the calls that have reached it.
func (f *Faulty) Shut(ops ...Op) *Gate { return f.ShutFrom(0, ops...) }

// ShutFrom does what Shut does for calls whose range begins at or after byte from.
func (f *Faulty) ShutFrom(from int64, ops ...Op) *Gate {
	if len(ops) == 0 {
		ops = data
	}
	entered := make(chan struct{}, 1000)
	g := &Gate{Entered: entered, ops: ops, from: from, entered: entered, opened: make(chan struct{})}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gate = g
	return g
}

// Open releases the calls that the gate holds and lets later ones pass. It may be called again.
func (g *Gate) Open() { g.once.Do(func() { close(g.opened) }) }

// pass waits at the gate if it holds calls of op at byte off. A nil Gate holds none.
func (g *Gate) pass(op Op, off int64) {
	if g == nil || off < g.from || !slices.Contains(g.ops, op) {
		return
	}
	select {
	case <-g.opened:
		return
	default:
	}
	g.entered <- struct{}{}
	<-g.opened
}
