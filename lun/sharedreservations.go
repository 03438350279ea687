package lun

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/lun/state"
)

// SharedOptions configure SharedReservations. The zero value of a time means its default.
type SharedOptions struct {
	// Home is what all gateways of the group share. It is used under the keys reservations/NAA and acks/NAA/.
	Home    state.Lessor
	Gateway string // no other gateway of the group has this name
	// TTL is that of the lease: others wait so long for a gateway that is silent. Default 5 s.
	TTL time.Duration
	// Margin is how long before the end of its lease a gateway stops to serve by its own clock. It has to cover how much faster
	// the clock of another one may run, and calls of the store. Default: a fifth of TTL.
	Margin time.Duration
	// Limit returns how long a command may wait for the home and for other gateways, in all. It has to be longer than TTL, or
	// commands fail each time a gateway dies. Default: 30 s.
	Limit func() time.Duration
}

const (
	sharedTTL      = 5 * time.Second
	sharedLimit    = 30 * time.Second
	sharedRenewals = 5 // per TTL
	// sharedRetry is the pause after a call of the home that has failed.
	sharedRetry = 200 * time.Millisecond
	// confirmPoll is how often a command asks which gateways have acknowledged, if it hears nothing.
	confirmPoll = 500 * time.Millisecond
	// maxSharedCalls is how many calls of the home are under way for units of a gateway that join or follow. Thousands at once
	// would all come too late.
	maxSharedCalls = 16
)

// Prefixes of keys in the home.
const (
	sharedRecordKey = "reservations/" // and the NAA: a sharedRecord
	sharedAckKey    = "acks/"         // and the NAA, the gateway and a part of it: an ackEntry, under the lease of the gateway
)

// An ackEntry says which operations a gateway has applied: those up to Operation that are not in Pending.
type ackEntry struct {
	Operation uint64 `json:"operation"`
	Pending   []span `json:"pending,omitempty"` // in force, but commands that they end have not ended
	Serving   bool   `json:"serving"`           // it may have let commands of initiators in
}

// A span has the operations from First to Last.
type span struct {
	First uint64 `json:"first"`
	Last  uint64 `json:"last"`
}

// has reports whether the gateway has applied operation n.
func (a *ackEntry) has(n uint64) bool {
	return n <= a.Operation && !slices.ContainsFunc(a.Pending, func(p span) bool { return p.First <= n && n <= p.Last })
}

func (a *ackEntry) equal(b *ackEntry) bool {
	return a.Operation == b.Operation && a.Serving == b.Serving && slices.Equal(a.Pending, b.Pending)
}

// SharedReservations make the persistent reservations of logical units the same on several gateways, each of which has a Unit
// for the same NAA. A PERSISTENT RESERVE OUT on any of them ends with GOOD only when each gateway that serves the unit has
// applied it, or has lost its lease. To apply it means: new commands meet the new reservation, unit attentions are due,
// and the commands that PREEMPT AND ABORT ends have ended. All registrations are kept as long as a gateway of the unit lives. When
// the first one starts, those that APTPL does not keep are gone.
//
// A gateway that does not hold its lease for sure serves no unit: commands are BUSY. A call of the store that has begun before
// can still end after the lease. So the store itself has to keep out a gateway that was too late (see package owner).
//
// RESERVE and RELEASE do not exist on such units: a gateway could not know of a RESERVE on another one in time.
//
// Several goroutines may use it at once.
type SharedReservations struct {
	o      SharedOptions
	id     string // of this process among those that had the name of the gateway
	ctx    context.Context
	cancel context.CancelFunc
	done   sync.WaitGroup
	calls  chan struct{} // has room for maxSharedCalls
	serial atomic.Uint64 // of parts and operations

	mu      sync.Mutex // guards the fields below
	term    *sharedTerm
	changed chan struct{} // closed when term changes
	err     error         // why there is no term
	members map[string][]*member
}

// A sharedTerm is the time of one lease.
type sharedTerm struct {
	lease state.Lease
	ctx   context.Context // ends with the lease, at the latest
	until atomic.Pointer[time.Time]
}

// isHeld reports whether the gateway holds the lease for sure. Two clocks count: the monotonic clock of Linux stops while a
// machine is suspended, and the other one can be set back.
func (t *sharedTerm) isHeld() bool {
	now, until := time.Now(), t.until.Load()
	return now.Before(*until) && now.UnixNano() < until.UnixNano()
}

// NewSharedReservations makes a gateway take part in the reservations of a group. It returns at once: while the home does not
// answer, no unit is served. To serve a unit:
//
//  1. New with Options.Shared, and not with Options.Reservations.
//  2. Unit.InheritFrom or Unit.Restore, if the unit continues another one of this gateway.
//  3. Unit.JoinShared. Until it has succeeded, commands are BUSY.
//  4. Inventory.Add or Inventory.Replace. The unit that was replaced is closed after that.
//
// The inventory has the target ports of all gateways of the group (see NewInventory), for ALL_TG_PT. Close and Detach of the unit end its part. Close ends that of the gateway, after all units are closed.
func NewSharedReservations(o SharedOptions) (*SharedReservations, error) {
	if o.TTL == 0 {
		o.TTL = sharedTTL
	}
	if o.Margin == 0 {
		o.Margin = o.TTL / 5
	}
	if o.Limit == nil {
		o.Limit = func() time.Duration { return sharedLimit }
	}
	switch {
	case o.Home == nil:
		return nil, errors.New("shared reservations: the home is missing")
	case o.Gateway == "" || strings.Contains(o.Gateway, "/"):
		return nil, fmt.Errorf("shared reservations: %q is not a name of a gateway", o.Gateway)
	case o.TTL < time.Second:
		return nil, fmt.Errorf("shared reservations: a lease of %v: it has to be at least 1s", o.TTL)
	case o.Margin < 0 || o.Margin > o.TTL/2:
		return nil, fmt.Errorf("shared reservations: a margin of %v: it can be 0s to %v, half of the lease", o.Margin, o.TTL/2)
	}
	s := &SharedReservations{o: o, id: rand.Text(), calls: make(chan struct{}, maxSharedCalls), changed: make(chan struct{}), members: map[string][]*member{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.done.Go(s.lead)
	s.done.Go(func() { s.follow(sharedRecordKey, (*member).offer) })
	s.done.Go(func() { s.follow(sharedAckKey, func(m *member, _ state.Value) { m.acknowledgedElsewhere() }) })
	return s, nil
}

// Close ends the part of the gateway, and waits for that. The home stays open.
func (s *SharedReservations) Close() {
	s.cancel()
	s.done.Wait()
}

// Err returns why the gateway does not hold its lease, or nil.
func (s *SharedReservations) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Remove forgets the reservations of a unit that no gateway serves any longer, because it was deleted.
func (s *SharedReservations) Remove(ctx context.Context, naa string) error {
	for {
		v, err := s.o.Home.Get(ctx, sharedRecordKey+naa)
		if err == nil && v.Data != nil {
			_, err = s.o.Home.Put(ctx, v.Key, nil, v.Revision)
		}
		if err == nil || !errors.Is(err, state.ErrConflict) && !errors.Is(err, state.ErrUnsure) || ctx.Err() != nil {
			return err
		}
	}
}

// call calls the home by f, when it is its turn.
func (s *SharedReservations) call(ctx context.Context, f func() error) error {
	select {
	case s.calls <- struct{}{}:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-s.calls }()
	return f()
}

// pauseFor waits, and reports false if ctx ends first.
func pauseFor(ctx context.Context, d time.Duration) bool {
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
func (s *SharedReservations) lead() {
	for s.ctx.Err() == nil {
		err := s.serveTerm()
		s.mu.Lock()
		s.err = err
		s.mu.Unlock()
		pauseFor(s.ctx, sharedRetry)
	}
}

// serveTerm begins a lease, and renews it until that fails for too long.
func (s *SharedReservations) serveTerm() error {
	began := time.Now()
	lease, err := s.o.Home.Lease(s.ctx, s.o.TTL)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(s.ctx)
	t := &sharedTerm{lease: lease, ctx: ctx}
	extend := func(from time.Time) {
		until := from.Add(lease.TTL() - s.o.Margin)
		t.until.Store(&until)
	}
	extend(began)
	s.setTerm(t)
	defer func() {
		cancel()
		s.setTerm(nil)
		if s.ctx.Err() != nil { // else parts of this gateway may be in use, and the lease ends by itself
			ctx, cancel := context.WithTimeout(context.Background(), s.o.TTL)
			defer cancel()
			_ = lease.End(ctx)
		}
	}()
	for wait := lease.TTL() / sharedRenewals; pauseFor(s.ctx, wait); {
		began := time.Now()
		ctx, cancel := context.WithTimeout(s.ctx, lease.TTL()/2)
		err := lease.Renew(ctx)
		cancel()
		switch {
		case err == nil:
			extend(began)
			wait = lease.TTL() / sharedRenewals
		case errors.Is(err, state.ErrLeaseEnded) || !t.isHeld():
			return err
		default:
			wait = sharedRetry
		}
	}
	return nil
}

func (s *SharedReservations) setTerm(t *sharedTerm) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.term = t
	if t != nil {
		s.err = nil
	}
	close(s.changed)
	s.changed = make(chan struct{})
}

// awaitTerm returns the present term, or nil if ctx ends first.
func (s *SharedReservations) awaitTerm(ctx context.Context) *sharedTerm {
	for ctx.Err() == nil { // also with a lease: a member that has left must not try again
		s.mu.Lock()
		t, changed := s.term, s.changed
		s.mu.Unlock()
		if t != nil {
			return t
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
	return nil
}

// follow calls tell with each member of a unit whose values under prefix change.
func (s *SharedReservations) follow(prefix string, tell func(*member, state.Value)) {
	for s.ctx.Err() == nil {
		values, err := s.o.Home.Watch(s.ctx, prefix)
		if err == nil {
			for _, m := range s.all() { // what came before
				m.lookAgain()
				m.acknowledgedElsewhere()
			}
			for v := range values {
				naa, _, _ := strings.Cut(strings.TrimPrefix(v.Key, prefix), "/")
				for _, m := range s.of(naa) {
					tell(m, v)
				}
			}
		}
		pauseFor(s.ctx, sharedRetry)
	}
}

// of returns the members of a unit.
func (s *SharedReservations) of(naa string) []*member {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.members[naa]
}

func (s *SharedReservations) all() (list []*member) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, ms := range s.members {
		list = append(list, ms...)
	}
	return list
}

// newID returns an ID that nothing else in the home has.
func (s *SharedReservations) newID() string {
	return fmt.Sprintf("%s/%s.%d", s.o.Gateway, s.id, s.serial.Add(1))
}

// others returns the values of the other parts of a unit, by their keys.
func (s *SharedReservations) others(ctx context.Context, m *member) (map[string]ackEntry, error) {
	values, err := s.o.Home.List(ctx, sharedAckKey+m.naa+"/")
	if err != nil {
		return nil, err
	}
	acks := map[string]ackEntry{}
	for _, v := range values {
		if v.Key == m.key {
			continue
		}
		var a ackEntry
		if json.Unmarshal(v.Data, &a) != nil {
			a = ackEntry{} // of another program, which has to acknowledge, too
		}
		acks[v.Key] = a
	}
	return acks, nil
}

// gatewayOf returns the name of the gateway in the key of an ackEntry of a unit.
func gatewayOf(key, naa string) string {
	name, _, _ := strings.Cut(strings.TrimPrefix(key, sharedAckKey+naa+"/"), "/")
	return name
}
