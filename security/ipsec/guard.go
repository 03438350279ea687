package ipsec

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// What a Guard does not exceed.
const (
	defaultTimeout  = 5 * time.Second
	defaultPatience = 10 * time.Second
	maxCalls        = 64                    // of a driver at a time
	maxInspections  = 4                     // calls for lists, besides those
	maxRejudging    = 8                     // connections at a time
	coalesce        = 50 * time.Millisecond // from a notice to the round of questions that it causes
	maxAddresses    = 256                   // that a round can tell apart; with more it asks for all
	firstRetry      = time.Second           // after a driver failed, doubled up to lastRetry
	lastRetry       = 30 * time.Second      //
	reportPause     = 10 * time.Second      // between two reports that the driver fails
	slow            = time.Second           // a question that takes longer shows that the driver hangs
	initiateTime    = 30 * time.Second      // of one negotiation of keys
	maxInitiating   = 8                     // negotiations at a time
	statusCommand   = "iser-target ipsec status"
)

// A Need is what a portal or a target requires. The zero value requires nothing.
type Need struct {
	Demand  Demand
	Profile *Profile // nil: the zero profile. It must not change any longer
}

func (n Need) off() bool { return n.Demand == Off || n.Demand == "" }

// Options of a Guard.
type Options struct {
	Timeout time.Duration // of one call of the driver; 0: 5 s
	// Grace is for how long a connection continues without keys, or without an answer of the driver, until it ends; 0: not at all.
	Grace time.Duration
	// Patience is for how long a connection that was protected keeps its verdict while the driver does not answer; 0: 10 s. It is at least twice the
	// time limit, so that one slow call changes nothing. It is a part of Grace, unless it is longer.
	Patience time.Duration
	// Failed is called when the driver begins to fail, and Answers after it answers again, each not more often than every 10 s. NoKeys
	// is called when it could not negotiate keys. They may be nil.
	Failed  func(error)
	Answers func()
	NoKeys  func(Flow, error)
}

func (o Options) timeout() time.Duration {
	if o.Timeout <= 0 {
		return defaultTimeout
	}
	return o.Timeout
}

func (o Options) patience() time.Duration {
	if o.Patience <= 0 {
		o.Patience = defaultPatience
	}
	return max(o.Patience, 2*o.timeout())
}

// Unanswered returns how long a connection that must be protected, and was, continues while the driver does not answer: Grace or, if that
// is longer, Patience. The kernel keeps clear text out meanwhile.
func (o Options) Unanswered() time.Duration { return max(o.Grace, o.patience()) }

// retry returns the time from a failure to the next round. The second call then has most of its time before the time of patience is over.
func (o Options) retry() time.Duration { return min(firstRetry, o.timeout()*3/8) }

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
	inspecting chan struct{} // the same, for lists
	initiating chan struct{}
	wake       chan struct{}
	begin      chan struct{} // wakes the goroutine that makes rounds
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
	noted      time.Time             // when the first change was noted that these are about
	due        map[*Watched]struct{} // connections that the next round asks about
	answered   time.Time             // when the driver last gave an answer
	retry      *time.Timer           // nil: none is due
	retryAfter time.Duration
	silent     trouble // the last call of the driver failed
	blind      trouble // the driver does not notice changes
}

// A trouble is how a driver fails. The zero value is none.
type trouble struct {
	err      error
	since    time.Time
	reported time.Time // the last time
	told     bool      // this one was reported
	count    int       // failures
}

// settings are what Use replaces as a whole.
type settings struct {
	driver  Driver
	options Options
	turn    uint64 // counts the calls of Use
	// limit is how long a caller waits for a call; 0: for the timeout of options.
	limit time.Duration
}

func (s settings) wait() time.Duration {
	if s.limit > 0 {
		return s.limit
	}
	return s.options.timeout()
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
		slots: make(chan struct{}, maxCalls), inspecting: make(chan struct{}, maxInspections), initiating: make(chan struct{}, maxInitiating), wake: make(chan struct{}, 1),
		begin: make(chan struct{}, 1), watched: map[*Watched]struct{}{}, addresses: map[netip.Addr]struct{}{}, due: map[*Watched]struct{}{},
	}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	g.loops.Go(g.rejudge)
	g.loops.Go(g.rounds)
	g.use(driver, options)
	return g
}

// Use replaces driver and options, and asks the new driver about all connections. It returns the driver from before, which the caller closes.
func (g *Guard) Use(driver Driver, options Options) Driver {
	before := g.use(driver, options)
	g.Recheck()
	return before
}

func (g *Guard) use(driver Driver, options Options) Driver {
	ctx, cancel := context.WithCancel(g.ctx)
	g.mu.Lock()
	before, stop := g.set.driver, g.stopWatch
	s := settings{driver: driver, options: options, turn: g.set.turn + 1}
	g.set, g.stopWatch = s, cancel
	g.silent, g.blind, g.retryAfter = trouble{}, trouble{}, options.retry()
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
		if !w.graceOver.IsZero() {
			s.InGrace++
		}
		w.mu.Unlock()
	}
	return s
}

// Check returns what the driver lacks to enforce Required. The error says that it gave no answer within the timeout of Options.
func (g *Guard) Check(ctx context.Context) (missing []error, err error) {
	s := g.settings()
	return call(ctx, g.inspecting, s, func(ctx context.Context) ([]error, error) { return s.driver.Check(ctx), nil })
}

// Look returns what protects each flow, for lists, by the index of the flow. After an error, which comes within the timeout of Options, some flows are
// missing.
func (g *Guard) Look(ctx context.Context, flows []Flow) (map[int]Protection, error) {
	s := g.settings()
	var mu sync.Mutex
	found := map[int]Protection{}
	_, err := call(ctx, g.inspecting, s, func(ctx context.Context) (struct{}, error) {
		for i, f := range flows {
			p, err := s.driver.Look(ctx, f)
			if err != nil {
				return struct{}{}, err
			}
			mu.Lock()
			found[i] = p
			mu.Unlock()
		}
		return struct{}{}, nil
	})
	mu.Lock()
	defer mu.Unlock()
	return maps.Clone(found), err
}

// Trouble returns how the driver fails now; nil: the last call of it was answered, and it notices changes.
func (g *Guard) Trouble() error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return errors.Join(g.blind.err, g.silent.err)
}

// fails notes that the driver of s fails. t is g.silent or g.blind.
func (g *Guard) fails(s settings, t *trouble, err error) {
	g.counters.failures.Add(1)
	now := time.Now()
	g.mu.Lock()
	if g.set.turn != s.turn {
		g.mu.Unlock()
		return // another driver answers by now
	}
	if t.err == nil {
		t.since, t.count = now, 0
	}
	t.err = err
	t.count++
	if t == &g.silent && g.retry == nil {
		g.retryLater() // even if no connection is left that a round would ask about
	}
	report := !t.told && (t.reported.IsZero() || now.Sub(t.reported) >= reportPause)
	if report {
		t.told, t.reported = true, now
	}
	g.mu.Unlock()
	if report && s.options.Failed != nil {
		s.options.Failed(err)
	}
}

// works notes that the driver of s does what it did not when t began.
func (g *Guard) works(s settings, t *trouble) {
	g.mu.Lock()
	if g.set.turn == s.turn && t == &g.silent {
		g.answered = time.Now()
	}
	if g.set.turn != s.turn || t.err == nil {
		g.mu.Unlock()
		return
	}
	report := t.told
	t.err, t.told = nil, false
	well := g.silent.err == nil && g.blind.err == nil
	g.mu.Unlock()
	if report && well && s.options.Answers != nil {
		s.options.Answers()
	}
}

// silence returns how often in a row the driver gave no answer, and when it gave the last one.
func (g *Guard) silence() (failures int, answered time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.silent.err != nil {
		failures = g.silent.count
	}
	return failures, g.answered
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
	v := Verdict{Action: Deny, Class: ClassDriver, Reason: "IPsec cannot be checked: no driver runs. Set ipsec.driver"}
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
	slow    bool // in time
	judged  bool // the driver gave one, and something is required
	out     SA   // that the kernel sends with; zero: unknown
}

// ErrSlow reports a call of a driver that took longer than its time limit.
var ErrSlow = errors.New("the driver has not answered in time")

// ask asks the driver once for each need, with a time limit, and returns the strictest answer.
func (g *Guard) ask(ctx context.Context, s settings, q Question, needs []Need) answer {
	g.counters.questions.Add(1)
	var a answer
	var p Protection
	var err error
	decider, decides := s.driver.(Decider)
	if !decides {
		p, err = call(ctx, g.slots, s, func(ctx context.Context) (Protection, error) { return s.driver.Look(ctx, q.Flow) })
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
			v, err = call(ctx, g.slots, s, func(ctx context.Context) (Verdict, error) { return decider.Decide(ctx, q) })
			if err == nil {
				v, err = decided(v, need.Demand)
			}
		default:
			v = Judge(q, p)
		}
		if err != nil {
			v = Verdict{Action: Deny, Class: ClassDriver, Reason: fmt.Sprintf("%s. Run %s", unanswered(inDriver(s, err)), statusCommand)}
			if need.Demand == Audit {
				v.Action = Mark
			}
		}
		if i == 0 || worse(v, a.verdict) {
			a.verdict = v
		}
	}
	a.failed, a.slow = a.verdict.Class == ClassDriver, errors.Is(err, ErrSlow)
	a.judged = len(needs) > 0 && !a.failed
	if err == nil {
		err = p.Incomplete
	}
	switch {
	case err == nil:
		g.works(s, &g.silent)
	case ctx.Err() == nil: // otherwise the caller gave up
		g.fails(s, &g.silent, inDriver(s, err))
	}
	return a
}

func inDriver(s settings, err error) error { return fmt.Errorf("driver %s: %w", s.driver.Name(), err) }

// decided checks the verdict of a Decider. Under Audit a denial is a mark.
func decided(v Verdict, d Demand) (Verdict, error) {
	switch {
	case v.Action != Permit && v.Action != Mark && v.Action != Deny:
		return v, fmt.Errorf("its verdict %s is not permit, mark or deny", quote(string(v.Action)))
	case v.Action == Permit:
		v.Reason, v.Class = "", ""
		return v, nil
	case v.Reason == "":
		return v, fmt.Errorf("its verdict %s has no reason", v.Action)
	}
	if d == Audit {
		v.Action = Mark
	}
	if v.Class = ClassProgram; v.KeysGone {
		v.Class = ClassKeys
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
func call[T any](ctx context.Context, slots chan struct{}, s settings, f func(context.Context) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	var zero T
	limited, cancel := context.WithTimeout(ctx, s.wait())
	defer cancel()
	select {
	case slots <- struct{}{}:
	case <-limited.Done():
		if err := ctx.Err(); err != nil {
			return zero, err
		}
		return zero, fmt.Errorf("%w: %d calls hang", ErrSlow, cap(slots))
	}
	done := make(chan result, 1)
	go func() {
		defer func() { <-slots }()
		value, err := f(limited)
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		if errors.Is(r.err, context.DeadlineExceeded) && limited.Err() != nil && ctx.Err() == nil {
			r.err = fmt.Errorf("%w: the limit is %v", ErrSlow, s.options.timeout())
		}
		return r.value, r.err
	case <-limited.Done():
		if err := ctx.Err(); err != nil {
			return zero, err
		}
		return zero, fmt.Errorf("%w: the limit is %v", ErrSlow, s.options.timeout())
	}
}

// watch lets the driver report changes until ctx ends. After a failure it retries, and since changes may be lost meanwhile, each
// try asks about all connections.
func (g *Guard) watch(ctx context.Context, s settings) {
	delay := firstRetry
	for {
		began := time.Now()
		// A driver that has nothing to report notices changes as well.
		settled := time.AfterFunc(s.options.timeout(), func() { g.works(s, &g.blind) })
		err := s.driver.Watch(ctx, func(c Change) {
			g.works(s, &g.blind)
			g.changed(c)
		})
		settled.Stop()
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("it stopped without an error")
		}
		g.fails(s, &g.blind, inDriver(s, fmt.Errorf("changes of keys are not noticed: %w", err)))
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
	if g.noted.IsZero() {
		g.noted = time.Now()
	}
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

// rejudge finds the connections that changes may affect, for the next round. Changes that come close to each other make one round. The time
// of patience begins with the change, also for connections whose round waits for the end of another.
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
		noted, patience := g.noted, g.set.options.patience()
		g.all, g.addresses, g.noted = false, map[netip.Addr]struct{}{}, time.Time{}
		list := g.list(func(w *Watched) bool {
			_, hit := addresses[w.c.Flow.Remote.Addr().Unmap()]
			return all || hit
		})
		for _, w := range list {
			g.due[w] = struct{}{}
		}
		g.mu.Unlock()
		for _, w := range list {
			w.expect(noted, patience)
		}
		select {
		case g.begin <- struct{}{}:
		default: // it has to begin already, with these as well
		}
	}
}

// rounds asks about the connections that rejudge found, and those that wait for an answer since an earlier round. Those come first that have waited longest.
func (g *Guard) rounds() {
	for {
		select {
		case <-g.ctx.Done():
			return
		case <-g.begin:
		}
		g.mu.Lock()
		since := map[*Watched]time.Time{}
		list := g.list(func(w *Watched) bool {
			_, due := g.due[w]
			at, waits := w.waiting()
			since[w] = at
			return due || waits
		})
		g.due = map[*Watched]struct{}{}
		g.mu.Unlock()
		if len(list) == 0 {
			g.probe()
			continue
		}
		slices.SortFunc(list, func(a, b *Watched) int { return since[a].Compare(since[b]) })
		g.counters.rounds.Add(1)
		g.round(list)
	}
}

// round asks about the connections of list. When a question fails after a second, and no other was answered meanwhile, it asks about no more than are in progress, because
// with hundreds of connections each would wait for its time limit. A driver that fails for one connection alone is asked about all others.
func (g *Guard) round(list []*Watched) {
	var failed, silent atomic.Bool
	var answers atomic.Uint64
	least := min(slow, g.settings().options.timeout())
	var workers sync.WaitGroup
	next := make(chan *Watched)
	for range min(maxRejudging, len(list)) {
		workers.Go(func() {
			for w := range next {
				before, asked := answers.Load(), time.Now()
				switch a, judged := w.change(silent.Load()); {
				case !judged:
				case !a.failed:
					answers.Add(1)
					silent.Store(false)
				default:
					failed.Store(true)
					if answers.Load() == before && (a.slow || time.Since(asked) >= least) {
						silent.Store(true)
					}
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

// retryIf makes a round soon after a failure, later after each further one once connections are marked, and none after a success.
func (g *Guard) retryIf(failed bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case failed && g.retry == nil:
		g.retryLater()
	case !failed:
		if g.retry != nil {
			g.retry.Stop()
			g.retry = nil
		}
		g.retryAfter = g.set.options.retry()
	}
}

// retryLater makes a round after g.retryAfter. Preconditions: g.mu is held.
func (g *Guard) retryLater() {
	if g.ctx.Err() != nil {
		return
	}
	g.retry = time.AfterFunc(g.retryAfter, func() {
		g.mu.Lock()
		g.retry = nil
		g.mu.Unlock()
		g.Recheck()
	})
	if g.silent.err == nil || time.Since(g.silent.since) >= g.set.options.patience() {
		g.retryAfter = min(2*g.retryAfter, lastRetry)
	} else {
		g.retryAfter = firstRetry
	}
}

// probe asks a driver that gave no answer for something, to know whether it answers by now.
func (g *Guard) probe() {
	s := g.settings()
	g.mu.Lock()
	silent := g.silent.err != nil
	g.mu.Unlock()
	if !silent {
		return
	}
	_, err := call(g.ctx, g.inspecting, s, func(ctx context.Context) ([]error, error) { return s.driver.Check(ctx), nil })
	switch {
	case err == nil:
		g.works(s, &g.silent)
	case g.ctx.Err() == nil:
		g.fails(s, &g.silent, inDriver(s, err))
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
			if report := g.settings().options.NoKeys; report != nil {
				report(f, err)
			}
		}
	}()
}
