package fair

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/security/limits"
)

// stallTime is how long a call may take before it does not count in the process any longer.
const stallTime = time.Second

// A Process is what the Gates of a process share.
type Process struct {
	clock   clock
	calls   *limits.Limit // bounds of the process
	perLUN  *limits.Limit
	state   atomic.Int64 // calls under way at all gates; and waiters
	stalled atomic.Int64 // of these, those that do not count
	heavies heavies

	mu    sync.Mutex
	gates map[*Gate]struct{}
	line  line[*Gate] // those that wait for a place in the process
}

// NewProcess returns a Process without gates, with the bounds of s; nil: the default bounds.
func NewProcess(s *limits.Set) *Process {
	if s == nil {
		s = limits.New()
	}
	p := &Process{calls: &s.BackendCalls, perLUN: &s.BackendCallsPerLUN, gates: map[*Gate]struct{}{}}
	p.heavies.init(&p.clock, &s.HeavyCommands)
	p.clock.epoch = time.Now()
	p.clock.busy = func() bool { return count(p.state.Load()) > 0 || p.heavies.busy.Load() }
	p.clock.sweep = p.sweep
	p.calls.Measure(func() (int64, string) { return count(p.state.Load()), "" })
	p.perLUN.Measure(p.busiest)
	s.HeavyCommands.Measure(func() (int64, string) { return p.heavies.running(), "" })
	return p
}

// most returns how many calls may be under way now.
func (p *Process) most() int64 { return p.calls.Max() + p.stalled.Load() }

// busiest returns the most calls that are under way at one gate, and its name.
func (p *Process) busiest() (n int64, name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for g := range p.gates {
		if m := count(g.state.Load()); m > n {
			n, name = m, g.name
		}
	}
	return n, name
}

// take takes a place for a call at g, or notes that g waits for one.
//
// Preconditions: g.mu is held, and g waits for a call.
func (p *Process) take(g *Gate) bool {
	invariant.Held(&g.mu)
	if count(g.state.Load()) == 0 {
		p.state.Add(1) // one call for each LUN
		return true
	}
	for n := p.state.Load(); n < p.most(); n = p.state.Load() {
		if p.state.CompareAndSwap(n, n+1) {
			return true
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !g.shut {
		p.state.Or(waiters)
		p.line.add(g)
	}
	return false
}

// give gives back the place of a call.
func (p *Process) give() {
	if p.state.Add(-1) >= waiters {
		p.kick()
	}
}

// kick gives places to gates that wait for them, as long as there are any.
func (p *Process) kick() {
	for {
		n := p.state.Load()
		if n < waiters || count(n) >= p.most() {
			return
		}
		g := p.next()
		if g == nil {
			return
		}
		if !g.grantTaken() {
			p.state.Add(-1)
		}
	}
}

// next takes the gate whose turn it is out of the line, and a place for it.
func (p *Process) next() *Gate {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.line.len() == 0 {
		p.state.And(^waiters)
		return nil
	}
	if count(p.state.Load()) >= p.most() {
		return nil
	}
	p.state.Add(1)
	now, first := p.clock.now(), never
	var most *Gate
	for _, g := range p.line.list {
		if due := time.Duration(g.due.Load()); due <= now && due < first {
			most, first = g, due
		}
	}
	if most == nil {
		most, _ = p.line.next(func(*Gate) bool { return true })
	}
	p.line.remove(most)
	return most
}

// charge counts work of g, whose turn it was.
//
// Preconditions: g.mu is held.
func (p *Process) charge(g *Gate, cost int64) {
	invariant.Held(&g.mu)
	p.mu.Lock()
	p.line.charge(g, cost)
	p.mu.Unlock()
}

// sweep counts the calls that stall, and lets in who waits if that makes room.
func (p *Process) sweep(now time.Duration) {
	p.heavies.sweep(now)
	p.mu.Lock()
	gates := make([]*Gate, 0, len(p.gates))
	for g := range p.gates {
		if g.state.Load() != 0 {
			gates = append(gates, g)
		}
	}
	p.mu.Unlock()
	stalled := int64(0)
	for _, g := range gates {
		stalled += g.sweep(now)
	}
	bound := p.calls.Max()
	p.stalled.Store(min(stalled, bound))
	if p.state.Load() >= waiters {
		if count(p.state.Load()) >= p.most() {
			p.calls.Bite("all LUNs")
		}
		p.kick()
	}
}
