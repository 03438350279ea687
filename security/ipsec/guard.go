package ipsec

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// What a Guard does not exceed.
const (
	defaultTimeout = 2 * time.Second
	maxCalls       = 64                    // of a driver at a time
	maxRejudging   = 8                     // connections at a time
	coalesce       = 50 * time.Millisecond // from a notice to the round of questions that it causes
	maxAddresses   = 256                   // that a round can tell apart; with more it asks for all
	firstRetry     = time.Second           // after a driver failed, doubled up to lastRetry
	lastRetry      = 30 * time.Second      //
	initiateTime   = 30 * time.Second      // of one negotiation of keys
	maxInitiating  = 8                     // negotiations at a time
	statusCommand  = "iser-target ipsec status"
)

// A Need is what a portal or a target requires. The zero value requires nothing.
type Need struct {
	Demand  Demand
	Profile *Profile // nil: the zero profile. It must not change any longer
}

func (n Need) off() bool { return n.Demand == Off || n.Demand == "" }

// Options of a Guard.
type Options struct {
	Timeout time.Duration // of one call of the driver; 0: 2 s
	Grace   time.Duration // that a connection has after its keys are gone, until it ends; 0: none
	Failed  func(error)   // is called when the driver cannot notice changes; nil: nothing is
}

func (o Options) timeout() time.Duration {
	if o.Timeout <= 0 {
		return defaultTimeout
	}
	return o.Timeout
}

// A Connection is what a Guard has to know about a connection. Its functions are called without locks of the Guard, one at a
// time for each connection, and must not wait for anything.
type Connection struct {
	Flow Flow
	// End ends the connection, for a reason that names the problem and then the remedy. It is called at most once, in a goroutine
	// of its own, and not after a denial by Accept or Login.
	End func(reason string)
	// Changed is called when something of the verdict changed after Accept or Login returned it. After new keys for
	// old ones only the SPIs differ. It may be nil.
	Changed func(before, now Verdict)
	// Pin demands that the kernel sends packets of the connection in ESP only, through the SA or one that replaces it,
	// whatever happens to the policies of the machine. It is called under Required, again when the endpoints or the ReqID change, and may
	// be nil. A failure denies the connection.
	Pin func(SA) error
}

// A Guard asks its driver whether connections are protected as their portals and targets require: when they are accepted, when they log
// in, and when keys or policies changed. Connections without a demand cost it nothing. A nil *Guard permits them, and denies
// those with a demand of Required. Its methods may be called concurrently.
type Guard struct {
	slots      chan struct{} // has an element for each running call of a driver
	initiating chan struct{}
	wake       chan struct{}
	ctx        context.Context
	cancel     context.CancelFunc
	loops      sync.WaitGroup
	counters   counters

	mu         sync.Mutex
	set        settings
	stopWatch  context.CancelFunc
	watched    map[*Watched]struct{}
	all        bool // the next round asks for all connections
	addresses  map[netip.Addr]struct{}
	retry      *time.Timer // nil: none is due
	retryAfter time.Duration
}

// settings are what Use replaces as a whole.
type settings struct {
	driver  Driver
	options Options
}

type counters struct{ questions, permitted, marked, denied, failures, notices, rounds, ended atomic.Uint64 }

// Stats are the counters of a Guard since its start, and how many connections it has.
type Stats struct {
	Questions, Permitted, Marked, Denied uint64
	Failures                             uint64 // calls of the driver that failed or took too long
	Notices                              uint64 // changes that the driver reported
	Rounds                               uint64 // in which notices led to questions
	Ended                                uint64 // connections
	Watched, InGrace                     int
}

// NewGuard returns a Guard that asks driver. The caller must call Close.
func NewGuard(driver Driver, options Options) *Guard {
	g := &Guard{
		slots: make(chan struct{}, maxCalls), initiating: make(chan struct{}, maxInitiating), wake: make(chan struct{}, 1),
		watched: map[*Watched]struct{}{}, addresses: map[netip.Addr]struct{}{}, retryAfter: firstRetry,
	}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	g.loops.Go(g.rejudge)
	g.use(settings{driver, options})
	return g
}

// Use replaces driver and options, and asks the new driver about all connections. It returns the driver from before, which the caller closes.
func (g *Guard) Use(driver Driver, options Options) Driver {
	before := g.use(settings{driver, options})
	g.Recheck()
	return before
}

func (g *Guard) use(s settings) Driver {
	ctx, cancel := context.WithCancel(g.ctx)
	g.mu.Lock()
	before, stop := g.set.driver, g.stopWatch
	g.set, g.stopWatch = s, cancel
	g.mu.Unlock()
	if stop != nil {
		stop()
	}
	g.loops.Go(func() { g.watch(ctx, s) })
	return before
}

// Close ends all questions and closes the driver. It waits for the driver up to the timeout of Options, once for its calls and once for
// its Close.
func (g *Guard) Close() error {
	if g == nil {
		return nil
	}
	g.cancel()
	g.mu.Lock()
	s := g.set
	if g.retry != nil {
		g.retry.Stop()
	}
	list := g.list(func(*Watched) bool { return true })
	g.mu.Unlock()
	for _, w := range list {
		w.Close()
	}
	done := make(chan error, 1)
	go func() {
		g.loops.Wait()
		done <- nil
	}()
	if err := wait(done, s.options.timeout()); err != nil {
		return fmt.Errorf("ipsec driver %s: its calls do not return: %w", s.driver.Name(), err)
	}
	go func() { done <- s.driver.Close() }()
	if err := wait(done, s.options.timeout()); err != nil {
		return fmt.Errorf("ipsec driver %s: close: %w", s.driver.Name(), err)
	}
	return nil
}

func wait(done <-chan error, limit time.Duration) error {
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case err := <-done:
		return err
	case <-t.C:
		return fmt.Errorf("no answer within %v", limit)
	}
}

// Stats returns the counters.
func (g *Guard) Stats() Stats {
	if g == nil {
		return Stats{}
	}
	c := &g.counters
	s := Stats{
		Questions: c.questions.Load(), Permitted: c.permitted.Load(), Marked: c.marked.Load(), Denied: c.denied.Load(),
		Failures: c.failures.Load(), Notices: c.notices.Load(), Rounds: c.rounds.Load(), Ended: c.ended.Load(),
	}
	g.mu.Lock()
	list := g.list(func(*Watched) bool { return true })
	g.mu.Unlock()
	s.Watched = len(list)
	for _, w := range list {
		w.mu.Lock()
		if w.grace != nil {
			s.InGrace++
		}
		w.mu.Unlock()
	}
	return s
}

// Check returns what the driver lacks to enforce Required. It takes the time of Options at most.
func (g *Guard) Check(ctx context.Context) []error {
	s := g.settings()
	missing, err := call(ctx, g, s, func(ctx context.Context) ([]error, error) { return s.driver.Check(ctx), nil })
	if err != nil {
		return []error{fmt.Errorf("ipsec driver %s: %w", s.driver.Name(), err)}
	}
	return missing
}

// Ask answers q, for explanations. It changes no connection and no counter of verdicts.
func (g *Guard) Ask(ctx context.Context, q Question) Verdict {
	need := Need{q.Demand, q.Profile}
	if need.off() {
		return Verdict{Action: Permit}
	}
	if g == nil {
		return noGuard(q.Demand)
	}
	return g.ask(ctx, g.settings(), q, []Need{need}).verdict
}

func noGuard(d Demand) Verdict {
	v := Verdict{Action: Deny, Reason: "IPsec cannot be checked: no driver runs. Set ipsec.driver"}
	if d == Audit {
		v.Action = Mark
	}
	return v
}

// Recheck asks about all connections again, in the background.
func (g *Guard) Recheck() {
	if g != nil {
		g.note(netip.Addr{})
	}
}

func (g *Guard) settings() settings {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.set
}

// list returns the connections that match. Preconditions: g.mu is held.
func (g *Guard) list(match func(*Watched) bool) []*Watched {
	var list []*Watched
	for w := range g.watched {
		if match(w) {
			list = append(list, w)
		}
	}
	return list
}

// An answer is a verdict and what led to it.
type answer struct {
	verdict Verdict
	failed  bool // the driver gave none
	out     SA   // that the kernel sends with; zero: unknown
}

var errSlow = errors.New("the driver has not answered in time")

// ask asks the driver once for each need, with a time limit, and returns the strictest answer.
func (g *Guard) ask(ctx context.Context, s settings, q Question, needs []Need) answer {
	g.counters.questions.Add(1)
	var a answer
	var p Protection
	var err error
	decider, decides := s.driver.(Decider)
	if !decides {
		p, err = call(ctx, g, s, func(ctx context.Context) (Protection, error) { return s.driver.Look(ctx, q.Flow) })
		if len(p.Out) > 0 {
			a.out = p.Out[0]
		}
	}
	for i, need := range needs {
		q.Demand, q.Profile = need.Demand, need.Profile
		if q.Profile == nil {
			q.Profile = &Profile{}
		}
		v := Verdict{}
		switch {
		case err != nil:
		case decides:
			v, err = call(ctx, g, s, func(ctx context.Context) (Verdict, error) { return decider.Decide(ctx, q) })
			if err == nil {
				v, err = decided(v, need.Demand)
			}
		default:
			v = Judge(q, p)
		}
		if err != nil {
			a.failed = true
			v = Verdict{Action: Deny, Reason: fmt.Sprintf("IPsec cannot be checked: driver %s: %v. Run %s", s.driver.Name(), err, statusCommand)}
			if need.Demand == Audit {
				v.Action = Mark
			}
		}
		if i == 0 || worse(v, a.verdict) {
			a.verdict = v
		}
	}
	if err != nil {
		g.counters.failures.Add(1)
	}
	return a
}

// decided checks the verdict of a Decider. Under Audit a denial is a mark.
func decided(v Verdict, d Demand) (Verdict, error) {
	switch {
	case v.Action != Permit && v.Action != Mark && v.Action != Deny:
		return v, fmt.Errorf("its verdict %s is not permit, mark or deny", quote(string(v.Action)))
	case v.Action == Permit:
		v.Reason = ""
	case v.Reason == "":
		return v, fmt.Errorf("its verdict %s has no reason", v.Action)
	case d == Audit:
		v.Action = Mark
	}
	return v, nil
}

// worse reports whether a is stricter than b. Of two denials the one that cannot pass with new keys is.
func worse(a, b Verdict) bool {
	order := map[Action]int{Permit: 0, Mark: 1, Deny: 2}
	if order[a.Action] != order[b.Action] {
		return order[a.Action] > order[b.Action]
	}
	return b.KeysGone && !a.KeysGone
}

// call calls f in a goroutine and returns its result. It stops waiting after the timeout of s, because a driver that hangs must not hold up
// the caller. The goroutine keeps its slot until f returns, so that their number is bounded.
func call[T any](ctx context.Context, g *Guard, s settings, f func(context.Context) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	var zero T
	limited, cancel := context.WithTimeout(ctx, s.options.timeout())
	defer cancel()
	select {
	case g.slots <- struct{}{}:
	case <-limited.Done():
		return zero, fmt.Errorf("%w: %d calls hang", errSlow, maxCalls)
	}
	done := make(chan result, 1)
	go func() {
		defer func() { <-g.slots }()
		value, err := f(limited)
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		if errors.Is(r.err, context.DeadlineExceeded) && limited.Err() != nil && ctx.Err() == nil {
			r.err = fmt.Errorf("%w: the limit is %v", errSlow, s.options.timeout())
		}
		return r.value, r.err
	case <-limited.Done():
		if err := ctx.Err(); err != nil {
			return zero, err
		}
		return zero, fmt.Errorf("%w: the limit is %v", errSlow, s.options.timeout())
	}
}

// watch lets the driver report changes until ctx ends. After a failure it retries, and since changes may be lost meanwhile, each
// try asks about all connections.
func (g *Guard) watch(ctx context.Context, s settings) {
	delay := firstRetry
	for {
		began := time.Now()
		err := s.driver.Watch(ctx, g.changed)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("it stopped without an error")
		}
		g.counters.failures.Add(1)
		if s.options.Failed != nil {
			s.options.Failed(fmt.Errorf("ipsec driver %s: changes of keys are not noticed: %w", s.driver.Name(), err))
		}
		if time.Since(began) > lastRetry {
			delay = firstRetry
		}
		if !sleep(ctx, delay) {
			return
		}
		delay = min(2*delay, lastRetry)
		g.changed(Change{Kind: Lost})
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// changed notes a change for the next round.
func (g *Guard) changed(c Change) {
	g.counters.notices.Add(1)
	if c.Kind == Lost || c.Kind == Policy {
		c.Remote = netip.Addr{}
	}
	g.note(c.Remote)
}

// note notes that connections with remote, or all, have to be asked about.
func (g *Guard) note(remote netip.Addr) {
	g.mu.Lock()
	if !remote.IsValid() || len(g.addresses) >= maxAddresses {
		g.all = true
	} else if !g.all {
		g.addresses[remote.Unmap()] = struct{}{}
	}
	g.mu.Unlock()
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// rejudge asks about the connections that changes may affect. Changes that come close to each other make one round.
func (g *Guard) rejudge() {
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-g.wake:
		}
		if !sleep(g.ctx, coalesce) {
			return
		}
		g.mu.Lock()
		all, addresses := g.all, g.addresses
		g.all, g.addresses = false, map[netip.Addr]struct{}{}
		list := g.list(func(w *Watched) bool {
			_, hit := addresses[w.c.Flow.Remote.Addr().Unmap()]
			return all || hit
		})
		g.mu.Unlock()
		if len(list) > 0 {
			g.counters.rounds.Add(1)
			g.round(list)
		}
	}
}

// round asks about the connections of list. When the driver fails it asks about no more than are in progress, because with hundreds of
// connections each would wait for its time limit.
func (g *Guard) round(list []*Watched) {
	var failed atomic.Bool
	var workers sync.WaitGroup
	next := make(chan *Watched)
	for range min(maxRejudging, len(list)) {
		workers.Go(func() {
			for w := range next {
				if w.change(&failed) {
					failed.Store(true)
				}
			}
		})
	}
	for _, w := range list {
		next <- w
	}
	close(next)
	workers.Wait()
	g.retryIf(failed.Load())
}

// retryIf makes a round soon after a failure, later after each further one, and none after a success.
func (g *Guard) retryIf(failed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.retry != nil {
		g.retry.Stop()
		g.retry = nil
	}
	if !failed {
		g.retryAfter = firstRetry
		return
	}
	if g.ctx.Err() == nil {
		g.retry = time.AfterFunc(g.retryAfter, g.Recheck)
		g.retryAfter = min(2*g.retryAfter, lastRetry)
	}
}

// initiate asks the driver for keys, if it can negotiate them.
func (g *Guard) initiate(f Flow) {
	driver, ok := g.settings().driver.(Initiator)
	if !ok {
		return
	}
	select {
	case g.initiating <- struct{}{}:
	default:
		return // the next round tries again
	}
	go func() {
		defer func() { <-g.initiating }()
		ctx, cancel := context.WithTimeout(g.ctx, initiateTime)
		defer cancel()
		if err := driver.Initiate(ctx, f); err != nil && g.ctx.Err() == nil {
			g.counters.failures.Add(1)
			if failed := g.settings().options.Failed; failed != nil {
				failed(fmt.Errorf("ipsec: no new keys for the connection from %v: %w", f.Remote, err))
			}
		}
	}()
}
