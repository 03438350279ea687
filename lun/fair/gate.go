package fair

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/lun/invariant"
)

// Bits of Gate.state and Process.state above the number of calls under way. With one of them set,
// nobody enters without the mutex.
const (
	waiters = 1 << 40 // somebody waits
	rated   = 1 << 41 // there are rates, or the gate is shut
)

// count returns the number of calls in a state.
func count(state int64) int64 { return state & (waiters - 1) }

// A Gate is the way to the store of a LUN. Its methods are safe for concurrent use.
type Gate struct {
	process  *Process
	name     string
	blocking bool
	state    atomic.Int64 // calls under way, if blocking; and bits
	slots    slots
	delayed  atomic.Int64 // nanoseconds that calls waited

	mu      sync.Mutex // before process.mu
	shut    bool
	meter   meter
	ratesOf func(who string) Rates
	flows   map[string]*flow
	line    line[*flow] // those with waiting calls
	waiting int
	heavy   int64  // heavy calls under way
	arrived uint64 // calls that came to wait, ever
	timer   *time.Timer
	armed   time.Duration // when timer fires; 0: it does not

	turn              // in process.line, under process.mu
	due  atomic.Int64 // when the guarantee of the LUN asks for more; never: it has no guarantee
}

// A flow has the waiting calls of one initiator.
type flow struct {
	turn
	who   string
	light queue
	heavy queue
	meter meter
}

func (f *flow) turnOf() *turn { return &f.turn }
func (f *flow) empty() bool   { return f.light.head == nil && f.heavy.head == nil }
func (g *Gate) turnOf() *turn { return &g.turn }

// of returns the queue that c belongs to.
func (f *flow) of(c *Call) *queue {
	if c.work.Heavy {
		return &f.heavy
	}
	return &f.light
}

// head returns the call of f that begins next: the oldest one of those that may begin.
func (f *flow) head(heavies bool) *Call {
	l, h := f.light.head, f.heavy.head
	switch {
	case h == nil || !heavies:
		return l
	case l == nil || h.number < l.number:
		return h
	}
	return l
}

// NewGate returns the gate of a LUN with that name. blocking says that a call may take a thread while
// it waits for a device: only such calls are counted and bounded.
func (p *Process) NewGate(name string, blocking bool) *Gate {
	g := &Gate{process: p, name: name, blocking: blocking, flows: map[string]*flow{}}
	g.due.Store(int64(never))
	p.mu.Lock()
	p.gates[g] = struct{}{}
	p.mu.Unlock()
	return g
}

// Enter waits until c may begin. It returns false if c was aborted before, or g is shut. Leave
// follows if it returns true.
func (g *Gate) Enter(c *Call, w Work) bool {
	if c.aborted() {
		return false
	}
	c.work = w
	p := g.process
	if !w.Heavy {
		if p.heavies.busy.Load() {
			p.heavies.note(c)
		}
		return g.quick(c) || g.await(c)
	}
	if !g.await(c) {
		return false
	}
	if !w.More && !p.heavies.enter(c) {
		g.leave(c)
		return false
	}
	return true
}

// quick lets c in if nobody waits and there is room. It takes no lock.
func (g *Gate) quick(c *Call) bool {
	if !g.blocking {
		return g.state.Load() == 0
	}
	if g.state.Load() >= waiters {
		return false
	}
	p := g.process
	n := g.state.Add(1)
	if n <= p.perLUN.Max() {
		if p.state.Add(1) <= p.most() {
			c.slot = g.slots.take(n-1, p.clock.read())
			return true
		}
		p.give()
	}
	if g.state.Add(-1) >= waiters {
		g.serve() // it may have been full only because of this call
	}
	return false
}

// Force does what Enter does, but never waits and never fails. It is for calls that no command makes.
func (g *Gate) Force(c *Call) {
	c.work = Work{}
	if g.blocking {
		g.process.state.Add(1)
		c.slot = g.slots.take(g.state.Add(1)&(waiters-1)-1, g.process.clock.read())
	}
}

// Leave ends a call that has entered.
func (g *Gate) Leave(c *Call) {
	if g.blocking || c.work.Heavy {
		g.end(c)
	}
}

func (g *Gate) end(c *Call) {
	if c.work.Heavy && !c.work.More {
		g.process.heavies.leave(c)
	}
	g.leave(c)
}

// leave does the work of Leave at the gate itself.
func (g *Gate) leave(c *Call) {
	if c.work.Heavy {
		g.mu.Lock()
		g.heavy--
		g.mu.Unlock()
	}
	if g.blocking {
		g.slots.give(c.slot)
		n := g.state.Add(-1)
		g.process.give()
		if n >= waiters {
			g.serve()
		}
	}
}

// await puts c into the queue of its initiator and waits until it may begin.
func (g *Gate) await(c *Call) bool {
	c.gate.Store(g) // before c.aborted, so that Cancel cannot miss c
	g.mu.Lock()
	if c.aborted() || g.shut {
		c.gate.Store(nil)
		g.mu.Unlock()
		return false
	}
	now := g.process.clock.now()
	g.arrived++
	c.number, c.began, c.wait = g.arrived, now, queued
	f := g.flow(c.Who)
	f.of(c).push(c)
	g.line.add(f)
	if g.waiting++; g.waiting == 1 {
		g.state.Or(waiters)
	}
	g.dispatch(now)
	wait := c.park()
	g.unlock()
	if wait {
		g.process.clock.read() // so that it ticks
		<-c.wake
		waited := g.process.clock.now() - c.began
		g.delayed.Add(int64(waited))
		c.Waited += waited
	}
	return c.wait == granted
}

// flow returns the flow of an initiator.
//
// Preconditions: g.mu is held.
func (g *Gate) flow(who string) *flow {
	f := g.flows[who]
	if f == nil {
		f = &flow{who: who}
		if g.ratesOf != nil {
			f.meter.set(0, g.ratesOf(who))
		}
		g.flows[who] = f
	}
	return f
}

// dispatch lets calls in as long as that is possible.
//
// Preconditions: g.mu is held.
func (g *Gate) dispatch(now time.Duration) {
	invariant.Held(&g.mu)
	for g.waiting > 0 {
		if g.blocking && count(g.state.Load()) >= g.process.perLUN.Max() {
			return
		}
		f, at := g.pick(now)
		if f == nil {
			g.arm(now, at)
			return
		}
		if g.blocking && !g.process.take(g) {
			return
		}
		g.grant(f, now)
	}
}

// heavyShare is the part of a LUN's calls that heavy work may have, as a divisor.
const heavyShare = 4

// pick returns the flow whose turn it is, or nil and when there is one; never: when a call leaves.
//
// Preconditions: g.mu is held.
func (g *Gate) pick(now time.Duration) (f *flow, at time.Duration) {
	if at := g.meter.ready(); at > now {
		return nil, at
	}
	heavies := !g.blocking || g.heavy < max(g.process.perLUN.Max()/heavyShare, 1)
	at = never
	ready := func(f *flow) bool {
		if f.head(heavies) == nil {
			return false
		}
		if t := f.meter.ready(); t > now {
			at = min(at, t)
			return false
		}
		return true
	}
	var most *flow
	first := never
	for _, f := range g.line.list {
		if !f.meter.guarantees() || !ready(f) {
			continue
		}
		if t, ok := f.meter.due(now); ok && t < first {
			most, first = f, t
		}
	}
	if most != nil {
		return most, 0
	}
	if f, ok := g.line.next(ready); ok {
		return f, 0
	}
	return nil, at
}

// grant lets in the next call of f, which is counted in the process.
//
// Preconditions: g.mu is held; pick has returned f.
func (g *Gate) grant(f *flow, now time.Duration) {
	c := f.head(!g.blocking || g.heavy < max(g.process.perLUN.Max()/heavyShare, 1))
	g.line.charge(f, c.work.cost())
	g.drop(f, c)
	f.meter.charge(now, c.work)
	g.meter.charge(now, c.work)
	if at, _ := g.meter.due(now); at != never {
		g.due.Store(int64(at))
	}
	if c.work.Heavy {
		g.heavy++
	}
	if g.blocking {
		c.slot = g.slots.take(g.state.Add(1)&(waiters-1)-1, g.process.clock.read())
	}
	c.settle(granted)
}

// drop takes c out of the queue of f.
//
// Preconditions: g.mu is held.
func (g *Gate) drop(f *flow, c *Call) {
	f.of(c).remove(c)
	if g.waiting--; g.waiting == 0 {
		g.state.And(^waiters)
	}
	if f.empty() {
		g.line.remove(f)
	}
	if g.waiting == 0 && g.state.Load() < rated { // nobody has to remember what they had
		clear(g.flows)
	}
}

// cancel ends the wait of c, if it waits here.
func (g *Gate) cancel(c *Call) {
	g.mu.Lock()
	if c.gate.Load() == g && c.waits() {
		g.drop(g.flows[c.Who], c)
		c.settle(refused)
		g.dispatch(g.process.clock.now())
	}
	g.unlock()
}

// arm makes g look for calls again at a time.
//
// Preconditions: g.mu is held.
func (g *Gate) arm(now, at time.Duration) {
	if at == never || g.armed != 0 && g.armed <= at {
		return
	}
	g.armed = at
	if g.timer == nil {
		g.timer = time.AfterFunc(at-now, g.fire)
	} else {
		g.timer.Reset(at - now)
	}
}

func (g *Gate) fire() {
	g.mu.Lock()
	g.armed = 0
	g.dispatch(g.process.clock.now())
	g.unlock()
}

// serve lets in the calls that can enter now.
func (g *Gate) serve() {
	g.mu.Lock()
	g.dispatch(g.process.clock.now())
	g.unlock()
}

// unlock unlocks g.mu, and then lets in calls of other gates, if that has become possible.
func (g *Gate) unlock() {
	g.mu.Unlock()
	g.process.kick()
}

// grantTaken lets in one call, for which the process has taken a place. It returns false if no call
// can begin.
func (g *Gate) grantTaken() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.process.clock.now()
	if g.waiting == 0 || count(g.state.Load()) >= g.process.perLUN.Max() {
		return false
	}
	f, at := g.pick(now)
	if f == nil {
		g.arm(now, at)
		return false
	}
	cost := f.head(true).work.cost()
	g.grant(f, now)
	g.process.charge(g, cost)
	g.dispatch(now) // it waits for its next turn
	return true
}

// SetRates sets the rates of the LUN, and of its initiators by their normalized names; of may be nil.
// They apply to calls that wait already.
func (g *Gate) SetRates(lun Rates, of func(who string) Rates) {
	g.mu.Lock()
	now := g.process.clock.now()
	g.meter.set(now, lun)
	g.ratesOf = of
	for _, f := range g.flows {
		r := Rates{}
		if of != nil {
			r = of(f.who)
		}
		f.meter.set(now, r)
		if f.empty() && !f.meter.limits() && g.waiting == 0 {
			delete(g.flows, f.who)
		}
	}
	at, _ := g.meter.due(now)
	g.due.Store(int64(at))
	if g.meter.limits() || of != nil || g.shut {
		g.state.Or(rated)
	} else {
		g.state.And(^rated)
	}
	if g.timer != nil {
		g.timer.Stop()
		g.armed = 0
	}
	g.dispatch(now)
	g.unlock()
}

// Retire takes g out of what its process watches, because another gate takes its place. Calls still
// enter and leave.
func (g *Gate) Retire() {
	g.process.mu.Lock()
	delete(g.process.gates, g)
	g.process.mu.Unlock()
}

// Shut makes Enter return false, now and in future, because the store closes. Calls under way continue.
func (g *Gate) Shut() {
	p := g.process
	p.mu.Lock()
	delete(p.gates, g)
	p.line.remove(g)
	p.mu.Unlock()
	g.mu.Lock()
	g.shut = true
	g.state.Or(rated)
	for _, f := range g.line.list {
		for _, q := range [...]*queue{&f.light, &f.heavy} {
			for c := q.head; c != nil; c = q.head {
				q.remove(c)
				c.settle(refused)
			}
		}
	}
	g.line.list = nil
	clear(g.flows)
	g.waiting = 0
	g.state.And(^waiters)
	if g.timer != nil {
		g.timer.Stop()
	}
	g.unlock()
}

// MayTakeLong notes that the call c, which has entered, may take much longer than others without being
// stuck.
func (g *Gate) MayTakeLong(c *Call) {
	if g.blocking {
		g.slots.mark(c.slot)
	}
}

// A State describes a gate at one time.
type State struct {
	UnderWay int           // calls of a store that can block, which have begun and not returned
	Waiting  int           // commands that wait for their turn, because of bounds or rates
	Oldest   time.Duration // for how long the oldest call has been under way, to a tenth of a second
	Quick    time.Duration // the same of the oldest call that must not take long: see MayTakeLong
	Delayed  time.Duration // what all calls together waited for their turn
}

// State describes g at this time.
func (g *Gate) State() State {
	s := State{UnderWay: int(count(g.state.Load())), Delayed: time.Duration(g.delayed.Load())}
	if oldest, quick := g.slots.oldest(); oldest != 0 && s.UnderWay > 0 {
		now := g.process.clock.now()
		s.Oldest = max(now-oldest, 0)
		if quick != 0 {
			s.Quick = max(now-quick, 0)
		}
	}
	g.mu.Lock()
	s.Waiting = g.waiting
	g.mu.Unlock()
	return s
}

// sweep does what must happen now and then: it lets in calls after a bound has changed, forgets
// initiators that are gone, and returns how many calls have been under way for too long to count.
func (g *Gate) sweep(now time.Duration) (stalled int64) {
	if count(g.state.Load()) > 0 {
		g.slots.each(func(since time.Duration, _ bool) {
			if now-since >= stallTime {
				stalled++
			}
		})
	}
	if g.state.Load() < waiters {
		return stalled
	}
	g.mu.Lock()
	bound := false
	for _, f := range g.flows {
		if f.empty() && f.meter.idle(now) && g.line.forgotten(f) {
			delete(g.flows, f.who)
		}
		if c := f.head(true); c != nil && now-c.began >= stallTime {
			bound = true
		}
	}
	bound = bound && g.blocking && count(g.state.Load()) >= g.process.perLUN.Max()
	g.dispatch(now)
	g.unlock()
	if bound {
		g.process.perLUN.Bite(g.name)
	}
	return stalled
}
