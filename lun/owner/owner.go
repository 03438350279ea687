// Package owner decides which of several gateways serves a LUN: at each moment at most one.
//
// Gateways agree in a state.Lessor, which all of them share. Each has a lease there, and with it these values:
//
//   - gateways/NAME: that it is there;
//   - owners/LUN: that it is the owner. Who puts this value first is.
//
// A value without a lease, stores/LUN, says how the store of the LUN was opened last, by whomever.
//
// An owner first makes sure that no earlier one can change the LUN any longer (Medium.Fence), notes in stores/LUN that it opens the store,
// opens it, serves, and notes how it has opened it. It stops by itself, by its own clock, before its lease can have ended for others. So two things keep an old owner
// from harm, and either is enough: that it answers nothing any longer, and that the store does not listen to it.
//
// Which gateway should have a LUN follows from the names of both (see weight), unless preferred/LUN names one. The others claim a
// LUN without owner only if that one does not.
package owner

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/lun/state"
)

// A Medium is what the LUNs are on. Its methods end with their context. They may be called for several LUNs at a time, but not for one.
type Medium interface {
	// Fence returns when the store of the LUN obeys no earlier opening any longer. gateway has opened it last, and address is that of the
	// opening, or "" if its owner did not come so far to note that. It is not called if the latest owner has closed the store.
	Fence(ctx context.Context, lun, gateway, address string) error
	// Open opens the store.
	Open(ctx context.Context, lun string) error
	// Address returns what Fence of a later owner gets; "": nothing. It is called once after Open, while the LUN is served already, and ends before Close
	// is called. If it fails for another reason than its context, this gateway does not serve the LUN any longer.
	Address(ctx context.Context, lun string) (string, error)
	// Close waits for the commands in progress and closes the store, to which nothing gets then, even if it fails. Without an
	// error all that was answered is on it.
	Close(ctx context.Context, lun string) error
}

// Options of a Gateway. The zero value of a time is its default.
type Options struct {
	Name   string // no other gateway has it
	Home   state.Lessor
	LUNs   []string // all that the gateway has a part in, by their NAA for example; what it cannot open it leaves to others
	Medium Medium

	// TTL is that of the lease: when it has been silent for so long, others take over. Default 5 s.
	TTL time.Duration
	// Margin is how long before that the gateway stops to answer. It has to cover how much faster than the others its clock may run,
	// and the time from the last look at the gate until an answer is sent. Default: a fifth of TTL.
	Margin time.Duration
	// Step is how long a gateway waits for each other one that should have a LUN rather. Default 200 ms.
	Step time.Duration
	// Failback is how long another gateway has to be there that should have a LUN rather, until it gets it. Default 30 s. Negative: never.
	Failback time.Duration
	// Moves is how many LUNs the gateway gives to others at a time when it drains. Those that take them then open few stores at once, so that each LUN is
	// away for a short time. LUNs that others should have are not urgent, so these go one at a time, with pauses. Default 4.
	Moves int

	// Note is what the other gateways learn of this one, as JSON: see Member. nil: nothing.
	Note json.RawMessage
	// News is called when owners, gateways or preferences have changed. It must not wait, and not call the Gateway.
	News func()
	// Changed is called when the gateway begins or stops to serve a LUN, with the reason of a failure, if there was one. It must not wait.
	Changed func(lun string, serves bool, reason error)
}

const (
	defaultTTL      = 5 * time.Second
	defaultStep     = 200 * time.Millisecond
	defaultFailback = 30 * time.Second
	defaultMoves    = 4
	renewals        = 5 // per TTL
	// retry is the pause after a failure that concerns one LUN or the home.
	retry = 500 * time.Millisecond
	// maxCalls is how many calls of the home are under way for LUNs of a gateway. Thousands at once would all come too late.
	maxCalls = 16
	// company is how long a gateway that is alone at its start waits for others, before it claims LUNs that they should have.
	company = 2 * time.Second
	// maxBold is how many LUNs a gateway claims at a time that another one should have rather.
	maxBold = 4
	// breath is how many steps a gateway waits between LUNs that it gives back. Initiators then have few disks at a time that look for their paths.
	breath = 4
	// maxSteps is how many steps a LUN keeps its place among these, while nobody opens it.
	maxSteps = 10
	// unableFor is how long a gateway leaves a LUN to others that it could not open.
	unableFor = 5 * time.Minute
)

// Prefixes of keys.
const (
	gatewayKey   = "gateways/"
	ownerKey     = "owners/"
	storeKey     = "stores/"
	preferredKey = "preferred/"
)

// A member is the value of a gateway.
type member struct {
	Draining bool            `json:"draining,omitempty"` // it takes no LUN
	Unable   []string        `json:"unable,omitempty"`   // LUNs that it could not open, or has no part in
	Note     json.RawMessage `json:"note,omitempty"`

	hash uint64 // of its name
}

// takes reports whether the gateway would take the LUN.
func (m *member) takes(lun string) bool { return !m.Draining && !slices.Contains(m.Unable, lun) }

// An opening is the value of an owner and of a store.
type opening struct {
	Gateway string `json:"gateway"`
	Address string `json:"address,omitempty"` // of a store
	Open    bool   `json:"open,omitempty"`    // of an owner: it serves the LUN
}

// A Gateway is a member of a group that shares LUNs.
type Gateway struct {
	o      Options
	hash   uint64          // of its name
	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	done   sync.WaitGroup
	bold   chan struct{} // has room for maxBold
	moves  chan struct{} // has room for Options.Moves: LUNs that a drain gives away
	backs  chan struct{} // has room for one: a LUN that another gateway should have
	calls  chan struct{} // has room for maxCalls

	mu        sync.Mutex // guards the fields below
	term      *term      // nil: without a lease
	draining  bool
	members   map[string]member
	preferred map[string]string
	owners    map[string]opening        // of all LUNs of the group
	known     map[string]state.Revision // of all values
	listed    bool                      // known has what there was at the start
	without   map[string]bool           // LUNs of the group that the gateway has no part in
	stale     bool                      // without has changed since the value of the gateway was put
	units     map[string]*Unit
	changed   chan struct{}       // closed when the fields above have changed, and while the gateway gives LUNs back also when units have
	err       error               // why the gateway has no lease
	claims    map[*Unit]time.Time // when claims were sent that are not answered
	slow      time.Time           // when a claim was answered after more than Step
}

// A term is the time of one lease.
type term struct {
	lease state.Lease
	gate  gate
	ctx   context.Context // ends with the lease
	end   context.CancelFunc

	presenting chan struct{}  // has room for one: who changes the value of the gateway
	revision   state.Revision // of that value, for whom is in presenting
}

// A mediumError is one of Medium.
type mediumError struct{ error }

func (e *mediumError) Unwrap() error { return e.error }

// A Unit is a LUN that a gateway can serve.
type Unit struct {
	g     *Gateway
	name  string
	hash  uint64        // of name
	wake  chan struct{} // has room for one: owner has changed
	ended chan struct{} // closed when nothing serves it any longer

	// The gate of the term: of admits from the moment when the store is open until it has to be closed, of answers until it is closed.
	admits, answers atomic.Pointer[gate]

	// guarded by g.mu:
	left   bool          // see Gateway.Remove
	again  bool          // see Reopen
	owner  opening       // no Gateway: none
	since  time.Time     // when owner changed
	busy   bool          // it is claimed, served or given back
	began  time.Time     // when it was claimed last
	turn   chan struct{} // it has a place in this one of g.moves and g.backs; nil: in none
	unable time.Time     // until when this gateway leaves it to others; zero: it does not
	failed int           // openings in succession that have failed
	wished time.Time     // when Prefer was called last, or the gateway began to look
}

// Admits reports whether a command may begin.
func (u *Unit) Admits() bool { return u.admits.Load().isOpen() }

// MayAnswer reports whether a command that was admitted may be answered as the store has answered it. Otherwise another gateway may have
// the LUN already.
func (u *Unit) MayAnswer() bool { return u.answers.Load().isOpen() }

// Put does what state.Home.Put does as long as this gateway owns the LUN, and fails with a state.ErrConflict otherwise. The home checks
// that when it stores the value. So no gateway can change what a later owner has found.
func (u *Unit) Put(ctx context.Context, key string, data []byte, base state.Revision) (state.Revision, error) {
	u.g.mu.Lock()
	t := u.g.term
	u.g.mu.Unlock()
	if t == nil {
		return 0, fmt.Errorf("%w: the gateway has no lease", state.ErrConflict)
	}
	return t.lease.PutHeld(ctx, key, data, base, ownerKey+u.name)
}

// Reopen makes the owner give the LUN up, so that the gateway that should have it, perhaps this one, opens its store again. It is for a store that
// has failed.
func (u *Unit) Reopen() {
	u.g.mu.Lock()
	defer u.g.mu.Unlock()
	u.again = true
	u.signal()
}

// Join makes a gateway known to the others. It returns at once: while the home does not answer, the gateway serves nothing.
func Join(o Options) (*Gateway, error) {
	for d, value := range map[*time.Duration]time.Duration{&o.TTL: defaultTTL, &o.Step: defaultStep, &o.Failback: defaultFailback} {
		if *d == 0 {
			*d = value
		}
	}
	if o.Margin == 0 {
		o.Margin = o.TTL / 5
	}
	o.Moves = cmp.Or(o.Moves, defaultMoves)
	switch {
	case o.Name == "" || strings.Contains(o.Name, "/"):
		return nil, fmt.Errorf("%q is not a name of a gateway", o.Name)
	case o.TTL < time.Second:
		return nil, fmt.Errorf("gateway %s: a lease of %v: it has to be at least 1s", o.Name, o.TTL)
	case o.Moves < 0:
		return nil, fmt.Errorf("gateway %s: %d moves at a time", o.Name, o.Moves)
	case o.Margin < 0 || o.Margin > o.TTL/2:
		return nil, fmt.Errorf("gateway %s: a margin of %v: it can be 0s to %v, half of the lease", o.Name, o.Margin, o.TTL/2)
	}
	g := &Gateway{o: o, hash: hash(o.Name), members: map[string]member{}, preferred: map[string]string{}, owners: map[string]opening{}, without: map[string]bool{}, known: map[string]state.Revision{},
		units: map[string]*Unit{}, changed: make(chan struct{})}
	g.calls = make(chan struct{}, maxCalls)
	g.bold, g.moves, g.backs, g.claims = make(chan struct{}, maxBold), make(chan struct{}, o.Moves), make(chan struct{}, 1), map[*Unit]time.Time{}
	g.ctx, g.cancel = context.WithCancel(context.Background())
	for _, name := range o.LUNs {
		if name == "" || g.units[name] != nil {
			g.cancel()
			return nil, fmt.Errorf("gateway %s: %q is not a name of a LUN, or it is there twice", o.Name, name)
		}
		g.units[name] = g.newUnit(name)
	}
	g.done.Go(g.follow)
	g.done.Go(g.lead)
	for _, u := range g.units {
		g.done.Go(u.run)
	}
	return g, nil
}

func (g *Gateway) newUnit(lun string) *Unit {
	return &Unit{g: g, name: lun, hash: hash(lun), wake: make(chan struct{}, 1), ended: make(chan struct{})}
}

// Unit returns a LUN of Options.LUNs or Add, or nil.
func (g *Gateway) Unit(lun string) *Unit {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.units[lun]
}

// Add gives the gateway a part in another LUN.
func (g *Gateway) Add(lun string) (*Unit, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case lun == "" || g.units[lun] != nil:
		return nil, fmt.Errorf("gateway %s: %q is not a name of a LUN, or it has that already", g.o.Name, lun)
	case g.ctx.Err() != nil:
		return nil, fmt.Errorf("gateway %s: it has left the group", g.o.Name)
	}
	u := g.newUnit(lun)
	u.owner, u.since = g.owners[lun], time.Now()
	g.units[lun] = u
	g.stale = g.stale || g.without[lun]
	delete(g.without, lun)
	g.done.Go(u.run)
	return u, nil
}

// Remove ends the part that the gateway has in a LUN, which another gateway takes over then, and waits for that.
func (g *Gateway) Remove(ctx context.Context, lun string) error {
	g.mu.Lock()
	u, t := g.units[lun], g.term
	if u == nil {
		g.mu.Unlock()
		return nil
	}
	u.left, g.without[lun] = true, true
	g.mu.Unlock()
	var err error
	if t != nil {
		err = g.present(ctx, t) // before it is given back: the others need not wait for this gateway then
	}
	if err != nil { // the gateway keeps its part
		g.mu.Lock()
		defer g.mu.Unlock()
		u.left = false
		delete(g.without, lun)
		return err
	}
	u.signal()
	select {
	case <-u.ended:
	case <-ctx.Done():
		return fmt.Errorf("LUN %s is not handed over: %w", lun, context.Cause(ctx))
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.units[lun] == u {
		delete(g.units, lun)
	}
	return nil
}

// Owner returns the name of the gateway that owns a LUN of the group, as far as this one knows, or "".
func (g *Gateway) Owner(lun string) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.owners[lun].Gateway
}

// Server returns the name of the gateway that serves a LUN of the group, as far as this one knows: an owner that has opened its store. "": none.
func (g *Gateway) Server(lun string) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if o := g.owners[lun]; o.Open {
		return o.Gateway
	}
	return ""
}

// Preferred returns the gateway that Prefer has named for a LUN, or "".
func (g *Gateway) Preferred(lun string) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.preferred[lun]
}

// A Member is a gateway as the others know it.
type Member struct {
	Name     string
	Draining bool            // it takes no LUN
	Unable   []string        // LUNs that it could not open a short time ago, or has no part in
	Note     json.RawMessage // Options.Note
}

// Members returns the gateways that are there, by name.
func (g *Gateway) Members() []Member {
	g.mu.Lock()
	defer g.mu.Unlock()
	list := make([]Member, 0, len(g.members))
	for _, name := range slices.Sorted(maps.Keys(g.members)) {
		m := g.members[name]
		list = append(list, Member{name, m.Draining, m.Unable, m.Note})
	}
	return list
}

// Favorite returns the gateway that should have a LUN, of those that are there, or "".
func (g *Gateway) Favorite(lun string) (name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	h, most := hash(lun), uint64(0)
	for _, other := range slices.Sorted(maps.Keys(g.members)) {
		m := g.members[other]
		switch w := weight(m.hash, h); {
		case !m.takes(lun):
		case other == g.preferred[lun]:
			return other
		case name == "" || w > most:
			name, most = other, w
		}
	}
	return name
}

// Err returns why the gateway has no lease, or nil.
func (g *Gateway) Err() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.term == nil && g.err == nil {
		return errJoining
	}
	return g.err
}

var errJoining = errors.New("the gateway has no lease yet")

// Prefer makes the group give the LUN to a gateway, at once and whenever that is there; "": to the one that its name gives.
func (g *Gateway) Prefer(ctx context.Context, lun, gateway string) error {
	key := preferredKey + lun
	for {
		v, err := g.o.Home.Get(ctx, key)
		if err != nil {
			return err
		}
		var data []byte
		if gateway != "" {
			data = []byte(gateway)
		} else if v.Data == nil {
			return nil
		}
		if _, err = g.o.Home.Put(ctx, key, data, v.Revision); !errors.Is(err, state.ErrConflict) {
			return err
		}
	}
}

// A Move is a LUN that goes from one gateway to another.
type Move struct{ LUN, From, To string }

// Balance returns the fewest moves after which the LUNs of the group are spread evenly over the gateways that take them. Prefer makes a move.
func (g *Gateway) Balance() (moves []Move) {
	g.mu.Lock()
	defer g.mu.Unlock()
	has := map[string][]string{}
	for name, m := range g.members {
		if !m.Draining {
			has[name] = nil
		}
	}
	var homeless []Move
	for _, lun := range slices.Sorted(maps.Keys(g.owners)) {
		owner := g.owners[lun].Gateway
		if _, ok := has[owner]; !ok {
			homeless = append(homeless, Move{LUN: lun, From: owner}) // it will have another one soon
			continue
		}
		has[owner] = append(has[owner], lun)
	}
	names := slices.Sorted(maps.Keys(has))
	if len(names) == 0 {
		return nil
	}
	fewest := func(lun string) (to string) {
		for _, name := range names {
			if m := g.members[name]; m.takes(lun) && (to == "" || len(has[name]) < len(has[to])) {
				to = name
			}
		}
		return to
	}
	for _, h := range homeless {
		if h.To = fewest(h.LUN); h.To != "" {
			has[h.To] = append(has[h.To], h.LUN)
		}
	}
	for {
		from := slices.MaxFunc(names, func(a, b string) int { return cmp.Compare(len(has[a]), len(has[b])) })
		moved := false
		for i := len(has[from]) - 1; i >= 0 && !moved; i-- {
			lun := has[from][i]
			if to := fewest(lun); to != "" && len(has[from])-len(has[to]) > 1 {
				has[from], has[to] = slices.Delete(has[from], i, i+1), append(has[to], lun)
				moves, moved = append(moves, Move{lun, from, to}), true
			}
		}
		if !moved {
			return moves
		}
	}
}

// Drain hands all LUNs over to the other gateways, and waits until this one owns none. If no other gateway can take a LUN, nobody serves it.
func (g *Gateway) Drain(ctx context.Context) error {
	g.mu.Lock()
	g.draining = true
	t := g.term
	g.announce()
	g.mu.Unlock()
	if t != nil {
		if err := g.present(ctx, t); err != nil {
			return err
		}
	}
	for {
		g.mu.Lock()
		n, changed := 0, g.changed
		for _, u := range g.units {
			if u.busy || u.owner.Gateway == g.o.Name {
				n++
			}
		}
		g.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%d LUNs are not handed over: %w", n, context.Cause(ctx))
		}
	}
}

// SetNote changes Options.Note. The others learn it soon.
func (g *Gateway) SetNote(note json.RawMessage) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !bytes.Equal(g.o.Note, note) {
		g.o.Note, g.stale = note, true
	}
}

// Resume ends a drain: the gateway takes LUNs again.
func (g *Gateway) Resume(ctx context.Context) error {
	g.mu.Lock()
	g.draining = false
	t := g.term
	g.announce()
	g.mu.Unlock()
	if t == nil {
		return nil
	}
	return g.present(ctx, t)
}

// Close closes all stores and leaves the group. It does not wait for other gateways, see Drain.
func (g *Gateway) Close() {
	g.cancel()
	g.done.Wait()
}

// announce wakes those who wait for a change. g.mu is held.
func (g *Gateway) announce() {
	g.news()
	close(g.changed)
	g.changed = make(chan struct{})
	for _, u := range g.units {
		if u.owner.Gateway == "" || u.owner.Gateway == g.o.Name || u.busy { // the others wait for their owners
			u.signal()
		}
	}
}

func (g *Gateway) news() {
	if f := g.o.News; f != nil {
		f()
	}
}

// signal wakes the goroutine of u.
func (u *Unit) signal() {
	select {
	case u.wake <- struct{}{}:
	default:
	}
}

// pause waits, and reports false if ctx ends first.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// lead keeps a lease for the gateway.
func (g *Gateway) lead() {
	for g.ctx.Err() == nil {
		err := g.serveTerm()
		g.mu.Lock()
		g.err = err
		g.mu.Unlock()
		pause(g.ctx, retry)
	}
}

// serveTerm begins a lease and renews it until it expires.
func (g *Gateway) serveTerm() error {
	began := time.Now()
	lease, err := g.o.Home.Lease(g.ctx, g.o.TTL)
	if err != nil {
		return err
	}
	t := &term{lease: lease, presenting: make(chan struct{}, 1)}
	t.ctx, t.end = context.WithCancel(g.ctx)
	t.gate.extend(began, lease.TTL()-g.o.Margin)
	defer func() {
		t.end()
		g.mu.Lock()
		g.term = nil
		g.announce()
		g.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), g.o.TTL)
		defer cancel()
		g.closed(ctx)
		_ = lease.End(ctx) // else it ends by itself
	}()
	if err := g.present(g.ctx, t); err != nil {
		if errors.Is(err, state.ErrConflict) {
			err = fmt.Errorf("another gateway is called %s, or this one was there less than %v ago", g.o.Name, lease.TTL())
		}
		return err
	}
	g.mu.Lock()
	g.term, g.err = t, nil
	g.announce()
	g.mu.Unlock()
	for pause(g.ctx, lease.TTL()/renewals) {
		began := time.Now()
		ctx, cancel := context.WithTimeout(g.ctx, lease.TTL()/2)
		err := lease.Renew(ctx)
		cancel()
		switch {
		case err == nil:
			t.gate.extend(began, lease.TTL()-g.o.Margin)
			g.mu.Lock()
			g.err = nil
			stale := g.stale
			g.mu.Unlock()
			if stale {
				ctx, cancel := context.WithTimeout(g.ctx, lease.TTL()/2)
				_ = g.present(ctx, t) // or later
				cancel()
			}
		case errors.Is(err, state.ErrLeaseEnded):
			t.gate.extend(began, 0)
			return err
		default: // the gate closes if that is too long
			g.mu.Lock()
			g.err = err
			g.mu.Unlock()
		}
	}
	return nil
}

// closed waits until all stores are closed, or ctx ends.
func (g *Gateway) closed(ctx context.Context) {
	for {
		g.mu.Lock()
		n, changed := 0, g.changed
		for _, u := range g.units {
			if u.busy {
				n++
			}
		}
		g.mu.Unlock()
		if n == 0 {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// present puts the value of the gateway.
func (g *Gateway) present(ctx context.Context, t *term) (err error) {
	select {
	case t.presenting <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-t.presenting }()
	defer func() {
		if err != nil {
			g.mu.Lock()
			g.stale = true
			g.mu.Unlock()
		}
	}()
	for {
		g.mu.Lock()
		m := member{Draining: g.draining, Note: g.o.Note}
		for _, u := range g.units {
			if !u.unable.IsZero() && !g.without[u.name] {
				m.Unable = append(m.Unable, u.name)
			}
		}
		m.Unable = slices.AppendSeq(m.Unable, maps.Keys(g.without))
		g.stale = false
		g.mu.Unlock()
		slices.Sort(m.Unable)
		data, err := json.Marshal(m)
		if err != nil {
			return err
		}
		r, err := t.lease.Put(ctx, gatewayKey+g.o.Name, data, t.revision)
		if err == nil {
			t.revision = r
		}
		if !errors.Is(err, state.ErrConflict) || t.revision == 0 {
			return err
		}
		// The value stays as long as the lease, and nobody else changes it: an earlier Put came through that seemed to fail.
		v, err := g.o.Home.Get(ctx, gatewayKey+g.o.Name)
		if err != nil {
			return err
		}
		t.revision = v.Revision
	}
}

// follow learns what the gateways have put, and what they put from now on.
func (g *Gateway) follow() {
	for g.ctx.Err() == nil {
		g.watch()
		pause(g.ctx, retry)
	}
}

func (g *Gateway) watch() {
	ctx, cancel := context.WithCancel(g.ctx)
	defer cancel()
	prefixes := []string{gatewayKey, ownerKey, preferredKey}
	news := make(chan state.Value)
	for _, prefix := range prefixes {
		c, err := g.o.Home.Watch(ctx, prefix)
		if err != nil {
			return
		}
		go func() {
			defer cancel()
			for v := range c {
				select {
				case news <- v:
				case <-ctx.Done():
				}
			}
		}()
	}
	seen := map[string]bool{}
	for _, prefix := range prefixes {
		list, err := g.o.Home.List(ctx, prefix)
		if err != nil {
			return
		}
		for _, v := range list {
			seen[v.Key] = true
			g.learn(v)
		}
	}
	g.mu.Lock()
	var gone []string
	for key := range g.known {
		if !seen[key] {
			gone = append(gone, key)
		}
	}
	g.mu.Unlock()
	for _, key := range gone {
		g.learn(state.Value{Key: key})
	}
	g.mu.Lock()
	g.listed = true
	since := time.Now()
	if len(g.members) < 2 {
		since = since.Add(company)
	}
	for _, u := range g.units {
		if u.since.IsZero() {
			u.since = since
		}
	}
	g.announce()
	g.mu.Unlock()
	for {
		select {
		case v := <-news:
			g.learn(v)
		case <-ctx.Done():
			return
		}
	}
}

// learn takes a value. An owner that cannot be read counts as a gateway that nobody is.
func (g *Gateway) learn(v state.Value) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if v.Data != nil && v.Revision <= g.known[v.Key] {
		return
	}
	if v.Data == nil {
		delete(g.known, v.Key)
	} else {
		g.known[v.Key] = v.Revision
	}
	if name, ok := strings.CutPrefix(v.Key, gatewayKey); ok {
		var m member
		if v.Data == nil || json.Unmarshal(v.Data, &m) != nil {
			delete(g.members, name)
		} else {
			m.hash = hash(name)
			g.members[name] = m
		}
		g.announce()
	} else if name, ok := strings.CutPrefix(v.Key, preferredKey); ok {
		if v.Data == nil {
			delete(g.preferred, name)
		} else {
			g.preferred[name] = string(v.Data)
		}
		if u := g.units[name]; u != nil {
			u.wished = time.Now()
		}
		g.announce()
	} else if name, ok := strings.CutPrefix(v.Key, ownerKey); ok {
		o := opening{}
		if v.Data != nil && (json.Unmarshal(v.Data, &o) != nil || o.Gateway == "") {
			o.Gateway = "?"
		}
		if g.owners[name] = o; v.Data == nil {
			delete(g.owners, name)
		}
		if u := g.units[name]; u != nil {
			u.learn(o)
		} else {
			if v.Data != nil && !g.without[name] {
				g.without[name], g.stale = true, true
			}
			g.news()
		}
	}
}

// learn notes who owns u. g.mu is held.
func (u *Unit) learn(o opening) {
	u.owner, u.since = o, time.Now()
	u.g.news()
	if u.g.draining {
		u.g.announce()
	}
	u.signal()
}

// rank returns how many gateways should have u rather than this one. g.mu is held.
func (u *Unit) rank() (n int) {
	g := u.g
	preferred := g.preferred[u.name]
	own := weight(g.hash, u.hash)
	for name, m := range g.members {
		switch {
		case name == g.o.Name || !m.takes(u.name):
		case !u.unable.IsZero() || name == preferred:
			n++
		case g.o.Name == preferred:
		default:
			if w := weight(m.hash, u.hash); w > own || w == own && name < g.o.Name {
				n++
			}
		}
	}
	return n
}

// run serves the LUN whenever it falls to this gateway.
func (u *Unit) run() {
	defer close(u.ended)
	for {
		t, bold := u.await()
		if t == nil {
			return
		}
		err := u.serve(t, bold)
		g := u.g
		switch u.turn {
		case nil:
		case g.backs:
			u.awaitOther()
			g.done.Go(func() {
				pause(g.ctx, breath*g.o.Step)
				<-g.backs
			})
		default:
			u.awaitOther()
			<-u.turn
		}
		g.mu.Lock()
		u.busy, u.turn, u.again = false, nil, false
		failed := u.failed
		if g.draining || g.term == nil {
			g.announce()
		}
		left := u.left
		g.mu.Unlock()
		if left {
			return
		}
		if err != nil && t.ctx.Err() == nil {
			u.report(false, err)
			pause(g.ctx, retry<<min(failed, 4))
		}
	}
}

// awaitOther waits until another gateway serves u, if one is there that can, or this one should have it again: the other may have served it and given it
// back between two looks.
func (u *Unit) awaitOther() {
	g := u.g
	for end := time.Now().Add(maxSteps * g.o.Step); time.Now().Before(end); {
		g.mu.Lock()
		o, others := g.owners[u.name], false
		for name, m := range g.members {
			others = others || name != g.o.Name && m.takes(u.name)
		}
		back := !g.draining && u.rank() == 0
		g.mu.Unlock()
		if o.Open && o.Gateway != g.o.Name || !others || back || !pause(g.ctx, g.o.Step/10) {
			return
		}
	}
}

func (u *Unit) report(serves bool, reason error) {
	if f := u.g.o.Changed; f != nil {
		f(u.name, serves, reason)
	}
}

// call calls the home for a LUN, when it is its turn.
func (g *Gateway) call(ctx context.Context, f func()) error {
	select {
	case g.calls <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-g.calls }()
	f()
	return nil
}

// get calls Get of the home.
func (g *Gateway) get(ctx context.Context, key string) (v state.Value, err error) {
	late := g.call(ctx, func() { v, err = g.o.Home.Get(ctx, key) })
	return v, cmp.Or(late, err)
}

// A putter is a home or a lease.
type putter interface {
	Put(ctx context.Context, key string, data []byte, base state.Revision) (state.Revision, error)
}

// put calls Put of p.
func (g *Gateway) put(ctx context.Context, p putter, key string, data []byte, base state.Revision) (r state.Revision, err error) {
	late := g.call(ctx, func() { r, err = p.Put(ctx, key, data, base) })
	return r, cmp.Or(late, err)
}

// isSlow reports whether claims take longer than Step at present. g.mu is held.
func (g *Gateway) isSlow() bool {
	if time.Since(g.slow) < 5*g.o.Step {
		return true
	}
	for _, sent := range g.claims {
		if time.Since(sent) > g.o.Step {
			return true
		}
	}
	return false
}

// claim puts the value of the owner.
func (u *Unit) claim(t *term, bold bool) (state.Revision, error) {
	g := u.g
	me, err := json.Marshal(opening{Gateway: g.o.Name})
	if err != nil {
		return 0, err
	}
	g.mu.Lock()
	sent := time.Now()
	g.claims[u] = sent
	g.mu.Unlock()
	revision, err := g.put(t.ctx, t.lease, ownerKey+u.name, me, 0)
	if bold {
		<-g.bold
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.claims, u)
	if now := time.Now(); now.Sub(sent) > g.o.Step {
		g.slow = now
	}
	if err == nil && g.known[ownerKey+u.name] < revision {
		g.known[ownerKey+u.name] = revision
		u.owner, u.since = opening{Gateway: g.o.Name}, time.Now()
		g.owners[u.name] = u.owner
		g.news()
	}
	return revision, err
}

// await waits until u has no owner and this gateway is the one to claim it; bold: because better ones have not. It returns nil after Close.
func (u *Unit) await() (t *term, bold bool) {
	g := u.g
	for {
		g.mu.Lock()
		t := g.term
		claim, bold, recovered, wait := false, false, false, time.Duration(-1)
		var orphan state.Revision
		left := u.left
		switch {
		case left, t == nil || !g.listed:
		case u.owner.Gateway == g.o.Name: // a claim that seemed to fail, or the end of one
			orphan = g.known[ownerKey+u.name]
			wait = retry
		case g.draining:
		case u.owner.Gateway == "":
			rank := time.Duration(u.rank())
			wait = max(time.Until(u.since.Add(rank*g.o.Step)), 0)
			claim = wait == 0
			if claim && rank > 0 {
				select {
				case g.bold <- struct{}{}:
					bold = true
				default:
					claim = false
				}
				if claim && g.isSlow() { // the better ones may be on their way, and more claims make it worse
					<-g.bold
					claim, bold = false, false
				}
				if !claim {
					wait = rank * g.o.Step
				}
			}
			if u.busy = claim; claim {
				u.began = time.Now()
			}
		case !u.unable.IsZero():
			if wait = max(time.Until(u.unable), 0); wait == 0 {
				u.unable, recovered, wait = time.Time{}, true, -1
			}
		}
		g.mu.Unlock()
		switch {
		case left:
			return nil, false
		case claim:
			return t, bold
		}
		if recovered {
			_ = g.present(t.ctx, t)
		}
		if orphan != 0 {
			_, _ = g.put(t.ctx, t.lease, ownerKey+u.name, nil, orphan) // until it is gone, as the watch will tell
		}
		if !u.sleep(g.ctx, wait) {
			return nil, false
		}
	}
}

// sleep waits for a change, for d unless that is negative, and until ctx ends. Then it returns false.
func (u *Unit) sleep(ctx context.Context, d time.Duration) bool {
	var late <-chan time.Time
	if d >= 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		late = timer.C
	}
	select {
	case <-u.wake:
	case <-late:
	case <-ctx.Done():
		return false
	}
	return true
}

// serve claims u and serves it until that has to end. It fails if it could not begin.
func (u *Unit) serve(t *term, bold bool) error {
	g := u.g
	revision, err := u.claim(t, bold)
	if errors.Is(err, state.ErrConflict) {
		pause(t.ctx, g.o.Step) // until the watch tells whose it is
		return nil
	}
	if err != nil {
		return err
	}
	noted, err := u.open(t)
	u.able(t, err)
	if err == nil {
		u.answers.Store(&t.gate)
		u.admits.Store(&t.gate)
		u.report(true, nil)
		revision = u.tell(t, revision)
		address := u.noteAddress(t, noted)
		lost := u.hold(t, revision, address.failed)
		u.admits.Store(nil)
		if lost {
			u.answers.Store(nil)
		}
		if noted, err = address.end(); err != nil {
			u.able(t, err)
		}
		e := u.close(noted)
		u.answers.Store(nil)
		u.report(false, cmp.Or(err, e))
	}
	ctx, cancel := context.WithTimeout(context.Background(), g.o.TTL)
	defer cancel()
	// Without success, the value goes with the lease.
	_, e := g.put(ctx, t.lease, ownerKey+u.name, nil, revision)
	if e != nil && !errors.Is(e, state.ErrConflict) && !errors.Is(e, state.ErrLeaseEnded) {
		err = errors.Join(err, e)
	}
	return err
}

// tell lets the others know that u is served. It returns the revision of the value of the owner. If that fails, hold finds out why.
func (u *Unit) tell(t *term, revision state.Revision) state.Revision {
	g := u.g
	me := opening{Gateway: g.o.Name, Open: true}
	data, err := json.Marshal(me)
	if err != nil {
		return revision
	}
	next, err := g.put(t.ctx, t.lease, ownerKey+u.name, data, revision)
	if err != nil { // it may have been stored, and then that is the present revision
		if v, e := g.get(t.ctx, ownerKey+u.name); e == nil && bytes.Equal(v.Data, data) {
			next, err = v.Revision, nil
		}
	}
	if err != nil {
		return revision
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.known[ownerKey+u.name] < next {
		g.known[ownerKey+u.name] = next
		g.owners[u.name], u.owner = me, me
		g.news()
	}
	return next
}

// able notes whether this gateway could open u, and tells the others if that has changed.
func (u *Unit) able(t *term, err error) {
	g := u.g
	_, ofMedium := errors.AsType[*mediumError](err)
	if t.ctx.Err() != nil || err != nil && !ofMedium {
		return
	}
	g.mu.Lock()
	was := u.unable.IsZero()
	u.failed++
	if u.unable = time.Now().Add(unableFor); err == nil {
		u.unable, u.failed = time.Time{}, 0
	}
	changed := was != u.unable.IsZero()
	g.mu.Unlock()
	if changed {
		_ = g.present(t.ctx, t) // the others then give u back, and learn it the next time
	}
}

// open fences earlier owners, opens the store and notes that. It returns the revision of the note.
func (u *Unit) open(t *term) (noted state.Revision, err error) {
	g := u.g
	v, err := g.get(t.ctx, storeKey+u.name)
	if err != nil {
		return 0, err
	}
	if v.Data != nil {
		var last opening
		if err := json.Unmarshal(v.Data, &last); err != nil {
			return 0, fmt.Errorf("%s%s: %w", storeKey, u.name, err)
		}
		if err := g.o.Medium.Fence(t.ctx, u.name, last.Gateway, last.Address); err != nil {
			return 0, &mediumError{fmt.Errorf("fencing %s: %w", last.Gateway, err)}
		}
	}
	// Not sooner, or nobody could fence the last owner if this one ended here. An owner that was late has a conflict from now on.
	if noted, err = u.note(t.ctx, "", v.Revision); err != nil {
		return 0, err
	}
	if err := g.o.Medium.Open(t.ctx, u.name); err != nil {
		return 0, &mediumError{err}
	}
	if t.ctx.Err() != nil {
		ctx, cancel := context.WithTimeout(context.Background(), g.o.TTL)
		defer cancel()
		return 0, errors.Join(context.Cause(t.ctx), g.o.Medium.Close(ctx, u.name))
	}
	return noted, nil
}

// An addressNote is how the store was opened, on its way into the value of the store.
type addressNote struct {
	cancel context.CancelFunc
	failed chan struct{} // closed when err is set
	done   chan struct{} // closed when the fields below are set
	noted  state.Revision
	err    error // of Medium.Address
}

// noteAddress begins to note how the store was opened. A later owner can fence that opening without the note as well, if the store then knows it.
func (u *Unit) noteAddress(t *term, noted state.Revision) *addressNote {
	a := &addressNote{failed: make(chan struct{}), done: make(chan struct{}), noted: noted}
	var ctx context.Context
	ctx, a.cancel = context.WithCancel(t.ctx)
	go func() {
		defer close(a.done)
		address, err := u.g.o.Medium.Address(ctx, u.name)
		switch {
		case err != nil && ctx.Err() == nil:
			a.err = &mediumError{err}
			close(a.failed)
			u.signal()
		case err == nil && address != "":
			if next, err := u.note(ctx, address, noted); err == nil {
				a.noted = next
			}
		}
	}()
	return a
}

// end ends the attempt to note it, and returns the revision of the value of the store.
func (a *addressNote) end() (state.Revision, error) {
	a.cancel()
	<-a.done
	return a.noted, a.err
}

// note puts the value of the store.
func (u *Unit) note(ctx context.Context, address string, base state.Revision) (state.Revision, error) {
	data, err := json.Marshal(opening{Gateway: u.g.o.Name, Address: address})
	if err != nil {
		return 0, err
	}
	return u.g.put(ctx, u.g.o.Home, storeKey+u.name, data, base)
}

// hold waits until u must not, or should not, be served any longer, or failed is closed. It returns true if another gateway may be the owner.
func (u *Unit) hold(t *term, revision state.Revision, failed <-chan struct{}) (lost bool) {
	g := u.g
	var better time.Time // since when another gateway should have u rather
	for {
		g.mu.Lock()
		doubt := u.owner.Gateway != g.o.Name || g.known[ownerKey+u.name] != revision
		away, wait := u.left || u.again, time.Duration(-1)
		switch {
		case g.draining:
			if away {
				break
			}
			select {
			case g.moves <- struct{}{}:
				u.turn, away = g.moves, true
			default:
				wait = g.o.Step / 4
			}
		case g.o.Failback < 0 || u.rank() == 0:
			better = time.Time{}
		default:
			if better.IsZero() {
				better = time.Now()
			}
			if wait = max(time.Until(better.Add(g.o.Failback)), 0); u.wished.After(u.began) {
				wait = 0 // somebody waits for it
			}
			if wait > 0 || away {
				break
			}
			select {
			case g.backs <- struct{}{}:
				u.turn, away = g.backs, true
			default:
				wait = g.o.Step
			}
		}
		g.mu.Unlock()
		select {
		case <-failed:
			away = true
		default:
		}
		if away {
			return false
		}
		if doubt {
			v, err := g.get(t.ctx, ownerKey+u.name)
			switch {
			case err != nil: // the gate limits how long that can take
				wait = retry
			case v.Revision != revision:
				return true
			default: // a removal was late that came before
				g.mu.Lock()
				g.known[v.Key] = revision
				u.owner = opening{Gateway: g.o.Name}
				g.mu.Unlock()
				continue
			}
		}
		if !u.sleep(t.ctx, wait) {
			return g.ctx.Err() == nil
		}
	}
}

// close closes the store. If all is on it, the next owner need not fence.
func (u *Unit) close(noted state.Revision) error {
	g := u.g
	ctx, cancel := context.WithTimeout(context.Background(), g.o.TTL)
	defer cancel()
	if err := g.o.Medium.Close(ctx, u.name); err != nil {
		return err
	}
	// There is a conflict if another gateway is the owner by now.
	if _, err := g.put(ctx, g.o.Home, storeKey+u.name, nil, noted); err != nil && !errors.Is(err, state.ErrConflict) {
		return err
	}
	return nil
}
