package lun

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
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/lun/state"
)

// A member is the part of a Unit in SharedReservations. One goroutine, run, applies what other gateways change.
//
// The turn of the reservations is held from the decision about a change until the change is in force, and while one of another gateway
// comes into force, but not while gateways acknowledge: each of them may wait for the others.
type member struct {
	s      *SharedReservations
	u      *Unit
	naa    string
	key    string // of its ackEntry
	ctx    context.Context
	cancel context.CancelFunc
	joined atomic.Pointer[sharedTerm] // in which others know of it, and it has followed; nil: no term
	wake   chan struct{}              // has room for one: run has something to do

	// Of run.
	acked    ackEntry
	revision state.Revision // of acked

	// Guarded by u.reservations.mu:
	begun       bool // run runs
	at          position
	news        state.Value   // the latest value that the home has told of
	stale       bool          // run asks the home
	busy        map[span]int  // operations that are in force, but not applied in full
	moved       chan struct{} // closed when at or joined changes
	acks        chan struct{} // closed when another gateway has acknowledged something, or has gone
	err         error         // why the last try to join, or to follow, has failed
	unconfirmed map[nexusName]prAttempt
	// owed has bits of dueBit for nexuses that are to see the unit when it takes the place of an absent one; nil: initiators see the
	// unit. The key without a name is that of all nexuses.
	owed map[nexusName]uint32
}

// A prAttempt is a PERSISTENT RESERVE OUT that was in force, or may have been, when its initiator was told to try again.
type prAttempt struct {
	id   string // of the operation
	cdb  []byte
	list []byte
}

// maxAttempts bounds the attempts that a member remembers.
const maxAttempts = 32

var errNotJoined = errors.New("this gateway does not hold its lease in the home of the reservations")

func newMember(s *SharedReservations, u *Unit) *member {
	naa := u.opt.Identity.Serial
	m := &member{
		s: s, u: u, naa: naa, key: sharedAckKey + naa + "/" + s.newID(), wake: make(chan struct{}, 1), busy: map[span]int{},
		moved: make(chan struct{}), acks: make(chan struct{}), unconfirmed: map[nexusName]prAttempt{}, owed: map[nexusName]uint32{},
	}
	m.ctx, m.cancel = context.WithCancel(s.ctx)
	return m
}

// JoinShared makes other gateways know that this one serves the unit (Options.Shared), and returns when the unit has their
// reservations. An error says why that was not so when ctx ended; the unit tries further, and its commands are BUSY.
func (u *Unit) JoinShared(ctx context.Context) error {
	m := u.group
	if m == nil {
		return nil
	}
	r := &u.reservations
	r.mu.Lock()
	if !m.begun && m.ctx.Err() == nil {
		m.begun = true
		m.s.mu.Lock()
		m.s.members[m.naa] = append(slices.Clone(m.s.members[m.naa]), m)
		m.s.mu.Unlock()
		m.s.done.Go(m.run)
	}
	r.mu.Unlock()
	for {
		r.mu.Lock()
		moved := m.moved
		r.mu.Unlock()
		if m.admits() {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("NAA %s: %w", m.naa, m.reason())
		case <-m.ctx.Done():
			return fmt.Errorf("NAA %s: %w", m.naa, m.ctx.Err())
		}
	}
}

// admits reports whether commands may use the unit. nil does.
func (m *member) admits() bool {
	if m == nil {
		return true
	}
	t := m.joined.Load()
	return t != nil && t.isHeld()
}

// inherit makes m continue from where another member of this gateway is, whose reservations the unit of m gets at the same time.
//
// Preconditions: old.u.reservations.mu is held, and m has not begun.
func (m *member) inherit(old *member) {
	if m != nil && old != nil {
		invariant.Held(&old.u.reservations.mu)
		m.at = old.at
		m.unconfirmed = maps.Clone(old.unconfirmed)
	}
}

// leave ends the part of the unit, whose commands have ended. m may be nil.
func (m *member) leave() {
	if m != nil {
		m.cancel()
	}
}

// signal makes run look.
func (m *member) signal() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// offer hands run a value that the home has, or has had, or that it has removed one.
func (m *member) offer(v state.Value) {
	r := &m.u.reservations
	r.mu.Lock()
	if v.Data == nil {
		m.stale = true
	} else if v.Revision > m.news.Revision {
		m.news = v
	}
	r.mu.Unlock()
	m.signal()
}

// lookAgain makes run ask the home.
func (m *member) lookAgain() { m.offer(state.Value{}) }

// acknowledgedElsewhere makes confirm look again.
func (m *member) acknowledgedElsewhere() {
	r := &m.u.reservations
	r.mu.Lock()
	defer r.mu.Unlock()
	close(m.acks)
	m.acks = make(chan struct{})
}

// announce wakes those that wait for moved.
//
// Preconditions: m.u.reservations.mu is held.
func (m *member) announce() {
	invariant.Held(&m.u.reservations.mu)
	close(m.moved)
	m.moved = make(chan struct{})
}

// run takes part, term by term, until the member leaves.
func (m *member) run() {
	defer m.end()
	for {
		t := m.s.awaitTerm(m.ctx)
		if t == nil {
			return
		}
		ctx, cancel := context.WithCancel(t.ctx)
		stop := context.AfterFunc(m.ctx, cancel)
		m.acked, m.revision = ackEntry{}, 0
		err := m.serve(ctx, t)
		if m.ctx.Err() == nil && ctx.Err() == nil {
			m.note(err)
			// Calls of the store that began before have the same time as at the end of a lease.
			pauseFor(ctx, m.s.o.Margin)
			m.withdraw(ctx, t)
		}
		stop()
		cancel()
		if m.ctx.Err() != nil {
			m.withdraw(context.Background(), t)
			return
		}
		pauseFor(m.ctx, sharedRetry)
	}
}

// end makes the member unknown in this process.
func (m *member) end() {
	m.s.mu.Lock()
	defer m.s.mu.Unlock()
	rest := slices.DeleteFunc(slices.Clone(m.s.members[m.naa]), func(o *member) bool { return o == m })
	if m.s.members[m.naa] = rest; len(rest) == 0 {
		delete(m.s.members, m.naa)
	}
}

// setJoined begins or ends the time in which the unit serves.
func (m *member) setJoined(t *sharedTerm) {
	r := &m.u.reservations
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.joined.Store(t); t != nil {
		m.err = nil
	}
	m.announce()
}

// note notes why the member does not serve, apart from its term.
func (m *member) note(reason error) {
	r := &m.u.reservations
	r.mu.Lock()
	defer r.mu.Unlock()
	m.err = reason
}

// withdraw removes the ackEntry, so that nobody waits for the member. Otherwise it goes with the lease.
func (m *member) withdraw(ctx context.Context, t *sharedTerm) {
	ctx, cancel := context.WithTimeout(ctx, m.s.o.TTL)
	defer cancel()
	for {
		_, err := t.lease.Put(ctx, m.key, nil, m.revision)
		if err == nil || errors.Is(err, state.ErrLeaseEnded) {
			return
		}
		if v, err := m.s.o.Home.Get(ctx, m.key); err == nil { // present may have ended before it had its answer
			m.revision = v.Revision
		}
		if !pauseFor(ctx, sharedRetry) {
			return
		}
	}
}

// serve joins and follows until that fails, or ctx, which ends with the term, does.
func (m *member) serve(ctx context.Context, t *sharedTerm) error {
	defer m.setJoined(nil)
	if err := m.present(ctx, t, ackEntry{}); err != nil {
		return err
	}
	if err := m.join(ctx, t); err != nil {
		return err
	}
	for {
		if a := m.applied(); !a.equal(&m.acked) {
			if err := m.present(ctx, t, a); err != nil {
				return err
			}
		}
		if m.joined.Load() == nil {
			m.setJoined(t)
		}
		select {
		case <-m.wake:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := m.catchNews(ctx); err != nil {
			return err
		}
	}
}

// present puts the ackEntry. It tries until the term or ctx ends.
func (m *member) present(ctx context.Context, t *sharedTerm, a ackEntry) error {
	data, err := json.Marshal(a)
	if err != nil {
		return err
	}
	for {
		err := m.s.call(ctx, func() (err error) {
			revision, err := t.lease.Put(ctx, m.key, data, m.revision)
			if err == nil {
				m.acked, m.revision = a, revision
			} else if v, err := m.s.o.Home.Get(ctx, m.key); err == nil { // an answer may have been lost
				m.revision = v.Revision
			}
			return err
		})
		if err == nil || errors.Is(err, state.ErrLeaseEnded) || ctx.Err() != nil {
			return err
		}
		if !errors.Is(err, state.ErrConflict) && !pauseFor(ctx, sharedRetry) {
			return err
		}
	}
}

// applied returns what the member has applied.
func (m *member) applied() ackEntry {
	r := &m.u.reservations
	r.mu.Lock()
	defer r.mu.Unlock()
	a := ackEntry{Operation: m.at.operation, Serving: true}
	a.Pending = slices.SortedFunc(maps.Keys(m.busy), func(x, y span) int { return cmp.Compare(x.First, y.First) })
	return a
}

// get asks the home for the record until it answers or ctx ends.
func (m *member) get(ctx context.Context) (state.Value, error) {
	for {
		var v state.Value
		err := m.s.call(ctx, func() (err error) {
			v, err = m.s.o.Home.Get(ctx, sharedRecordKey+m.naa)
			return err
		})
		if err == nil || ctx.Err() != nil || !pauseFor(ctx, sharedRetry) {
			return v, err
		}
	}
}

// takeTurn waits for the turn as long as ctx lasts. It returns the function that gives it.
func (m *member) takeTurn(ctx context.Context) (give func(), err error) {
	storing := m.u.reservations.turn.storing
	select {
	case storing <- struct{}{}:
		return func() { <-storing }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// join brings the record in force. If nobody has served the unit since this process knows it, that was a loss of power.
func (m *member) join(ctx context.Context, t *sharedTerm) error {
	give, err := m.takeTurn(ctx)
	if err != nil {
		return err
	}
	defer give()
	r := &m.u.reservations
	r.mu.Lock()
	fresh := !m.at.known
	r.mu.Unlock()
	for {
		v, err := m.get(ctx)
		if err != nil {
			return err
		}
		if err := m.adopt(v); err != nil {
			return err
		}
		if !fresh {
			return nil
		}
		// After the value was read: a member that serves now has either seen it, or changes it.
		alone, err := m.isAlone(ctx)
		if err != nil {
			return err
		}
		r.mu.Lock()
		at, old := m.at, r.persistent
		r.mu.Unlock()
		next := old.withoutPower()
		if !alone || next.equal(&old) {
			return nil
		}
		op := operation{id: m.s.newID(), action: actionPowerLoss, by: m.s.o.Gateway}
		err = m.put(ctx, at.next(&old, &next, op), &next)
		if err == nil {
			m.finish(span{at.operation + 1, at.operation + 1})
			return nil
		}
		if !errors.Is(err, state.ErrConflict) && !errors.Is(err, state.ErrUnreachable) && !errors.Is(err, state.ErrUnsure) {
			return err
		}
	}
}

// isAlone reports whether no other gateway serves the unit. One that has the same name died before this one began.
func (m *member) isAlone(ctx context.Context) (bool, error) {
	for {
		var acks map[string]ackEntry
		err := m.s.call(ctx, func() (err error) {
			acks, err = m.s.others(ctx, m)
			return err
		})
		if err == nil {
			for key, a := range acks {
				if a.Serving && gatewayOf(key, m.naa) != m.s.o.Gateway {
					return false, nil
				}
			}
			return true, nil
		}
		if ctx.Err() != nil || !pauseFor(ctx, sharedRetry) {
			return false, err
		}
	}
}

// withoutPower returns what APTPL keeps of s.
func (s prState) withoutPower() prState {
	if !s.aptpl {
		return prState{}
	}
	s.generation = 0
	return s
}

// catchNews brings in force what the home has told of.
func (m *member) catchNews(ctx context.Context) error {
	r := &m.u.reservations
	r.mu.Lock()
	v, stale := m.news, m.stale
	m.stale = false
	done := !stale && v.Revision <= m.at.revision
	r.mu.Unlock()
	if done {
		return nil
	}
	give, err := m.takeTurn(ctx)
	if err != nil {
		return err
	}
	defer give()
	if stale { // with the turn, or a change of this gateway could come after the answer
		if v, err = m.get(ctx); err != nil {
			return err
		}
	}
	return m.adopt(v)
}

// adopt brings a value of the home in force, unless a later one is. The rest of what it means continues when adopt has returned; applied
// knows.
//
// Preconditions: the caller has the turn. If v has no Data, it had the turn when it asked the home.
func (m *member) adopt(v state.Value) error {
	p, s := position{known: true}, prState{}
	if v.Data != nil {
		rec, err := sharedFormat.Decode(v.Data)
		if err == nil && rec.NAA != m.naa {
			err = fmt.Errorf("is that of NAA %.100q", rec.NAA)
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", sharedFormat.Name, v.Key, err)
		}
		if p, s, err = rec.decode(); err != nil {
			return fmt.Errorf("%s %s: %w", sharedFormat.Name, v.Key, err)
		}
		p.revision = v.Revision
	}
	r := &m.u.reservations
	r.mu.Lock()
	at, old := m.at, r.persistent
	switch {
	case at.known && v.Data != nil && v.Revision < at.revision:
		r.mu.Unlock()
		return nil
	case at.known && p.operation < at.operation:
		r.mu.Unlock()
		return fmt.Errorf("%s %s: has operation %d, but this gateway knows operation %d", sharedFormat.Name, v.Key, p.operation, at.operation)
	}
	var ops []operation
	var spans []span
	reset := at.known && p.epoch != at.epoch
	if at.known {
		var ok bool
		if ops, ok = p.after(at.operation); !ok {
			ops, spans = []operation{{effects: guess(&old, &s)}}, []span{{at.operation + 1, p.operation}}
		}
	}
	for i, op := range ops {
		if n := p.operation - uint64(len(ops)-1-i); len(spans) == i {
			spans = append(spans, span{n, n})
		}
		if op.effects.aborts {
			m.busy[spans[i]]++
		}
	}
	if m.owed != nil {
		m.owe(reset, ops)
	}
	m.at, r.persistent = p, s
	r.publish()
	m.announce()
	r.mu.Unlock()
	if reset {
		m.u.raise(condPowerOn, nil)
	}
	for i, op := range ops {
		stop := m.u.notify(op.effects)
		if op.effects.aborts {
			go func() { // without s.done, because the store may hang
				m.u.endCommands(stop, nil)
				m.finish(spans[i])
			}()
		}
	}
	return nil
}

// owe notes the unit attentions of operations.
//
// Preconditions: m.u.reservations.mu is held.
func (m *member) owe(reset bool, ops []operation) {
	invariant.Held(&m.u.reservations.mu)
	if reset {
		m.owed[nexusName{}] |= dueBit(condPowerOn)
	}
	for _, op := range ops {
		for _, n := range op.effects.notices {
			m.owed[n.nexus] |= dueBit(n.attention)
		}
	}
}

// pay makes the unit attentions due that came before l existed. Initiators see the unit from now on. m may be nil.
func (m *member) pay(list []*itl) {
	if m == nil {
		return
	}
	r := &m.u.reservations
	r.mu.Lock()
	owed := m.owed
	m.owed = nil
	r.mu.Unlock()
	for _, l := range list {
		l.due.Or(owed[l.nexus.name] | owed[nexusName{}])
	}
}

// put stores p and s, and brings them in force. The operation is applied in full after finish.
//
// Preconditions: the caller has the turn, and had it when it looked at the position before p.
func (m *member) put(ctx context.Context, p position, s *prState) error {
	data, err := state.Encode(p.encode(m.naa, s))
	if err != nil {
		return err
	}
	revision, err := m.s.o.Home.Put(ctx, sharedRecordKey+m.naa, data, p.revision)
	if err != nil {
		return err
	}
	r := &m.u.reservations
	r.mu.Lock()
	defer r.mu.Unlock()
	p.revision = revision
	m.busy[span{p.operation, p.operation}]++
	m.at, r.persistent = p, *s
	r.publish()
	m.announce()
	return nil
}

// finish notes that operations are applied here in full.
func (m *member) finish(of span) {
	r := &m.u.reservations
	r.mu.Lock()
	if m.busy[of]--; m.busy[of] <= 0 {
		delete(m.busy, of)
	}
	r.mu.Unlock()
	m.signal()
}

// Limit implements deadliner.
func (m *member) Limit() time.Duration { return m.s.o.Limit() }

// TooLate implements deadliner.
func (m *member) TooLate() error {
	return fmt.Errorf("%s %s: %w: nothing was stored within %v", sharedFormat.Name, sharedRecordKey+m.naa, state.ErrUnreachable, m.Limit())
}

// A sharedChange is a change in progress, of a command or of the daemon.
type sharedChange struct {
	*member
	c      *Command // or nil
	ctx    context.Context
	cancel context.CancelFunc
	give   func() // nil: it does not have the turn
}

// begin waits for the turn of c, or with nil of the daemon. Without an error, end follows.
func (m *member) begin(c *Command) (*sharedChange, error) {
	t := &m.u.reservations.turn
	p, err := t.take(c, m)
	if err != nil {
		return nil, err
	}
	h := &sharedChange{member: m, c: c, give: func() { <-t.storing }}
	h.ctx, h.cancel = context.WithDeadlineCause(m.ctx, p.Since.Add(m.Limit()), m.TooLate())
	if p.Aborted != nil {
		go h.watchAbort(p.Aborted)
	}
	return h, nil
}

// watchAbort ends the change when its command is aborted.
func (h *sharedChange) watchAbort(aborted func() bool) {
	poll := time.NewTicker(turnPoll)
	defer poll.Stop()
	for {
		select {
		case <-poll.C:
			if aborted() {
				h.cancel()
				return
			}
		case <-h.ctx.Done():
			return
		}
	}
}

// giveTurn lets others change the reservations, and other gateways' changes come into force.
func (h *sharedChange) giveTurn() {
	if h.give != nil {
		h.give()
		h.give = nil
	}
}

// end ends the change.
func (h *sharedChange) end() {
	h.giveTurn()
	h.cancel()
	<-h.u.reservations.turn.places
}

// change stores what decide makes of the present reservations, as the operation with that id. If others change them first, it calls decide
// again. It returns the number of the operation, or 0 if decide has returned false. own reports that the effects are left to the
// caller, who calls finish then. An errMaybe may be in force later.
func (h *sharedChange) change(id string, decide func() (next prState, op operation, ok bool)) (n uint64, own bool, err error) {
	r := &h.u.reservations
	for {
		if !h.admits() {
			return 0, false, errNotJoined
		}
		next, op, ok := decide()
		if !ok {
			return 0, false, nil
		}
		op.id, op.by = id, h.s.o.Gateway
		r.mu.Lock()
		at, old := h.at, r.persistent
		r.mu.Unlock()
		err := h.put(h.ctx, at.next(&old, &next, op), &next)
		switch {
		case err == nil:
			h.giveTurn()
			return at.operation + 1, true, nil
		case !errors.Is(err, state.ErrConflict) && !errors.Is(err, state.ErrUnsure) && !errors.Is(err, state.ErrUnreachable):
			return 0, false, err
		}
		unsure := errors.Is(err, state.ErrUnsure)
		if e := h.catchUp(); e != nil {
			if unsure {
				e = maybe{e}
			}
			return 0, false, e
		}
		r.mu.Lock()
		n = h.at.find(id)
		r.mu.Unlock()
		if n != 0 {
			h.giveTurn()
			return n, false, nil
		}
	}
}

// A maybe is an error about a change that may be in force all the same, now or later.
type maybe struct{ error }

func (e maybe) Unwrap() error { return e.error }

// catchUp gives the turn, waits until what the home has now is in force, and takes the turn again.
func (h *sharedChange) catchUp() error {
	h.giveTurn()
	v, err := h.get(h.ctx)
	if err != nil {
		return h.tooLate(err)
	}
	h.offer(v)
	r := &h.u.reservations
	for {
		r.mu.Lock()
		there, moved := h.at.known && v.Revision <= h.at.revision, h.moved
		r.mu.Unlock()
		if there {
			break
		}
		if !h.admits() {
			return errNotJoined
		}
		select {
		case <-moved:
		case <-h.ctx.Done():
			return h.tooLate(nil)
		}
	}
	h.give, err = h.takeTurn(h.ctx)
	return err
}

// tooLate returns why the change has ended, with err as the last reason.
func (h *sharedChange) tooLate(err error) error {
	if cause := context.Cause(h.ctx); cause != nil {
		return cause
	}
	return err
}

// confirm waits until all other gateways that serve the unit have applied operation n, or have lost their leases.
func (h *sharedChange) confirm(n uint64) error {
	r := &h.u.reservations
	for {
		r.mu.Lock()
		changed := h.acks
		r.mu.Unlock()
		acks, err := h.s.others(h.ctx, h.member)
		var missing []string
		for key, a := range acks {
			if !a.has(n) {
				missing = append(missing, gatewayOf(key, h.naa))
			}
		}
		if err == nil && len(missing) == 0 {
			return nil
		}
		timer := time.NewTimer(confirmPoll)
		select {
		case <-changed:
		case <-timer.C:
		case <-h.ctx.Done():
			timer.Stop()
			if err == nil {
				slices.Sort(missing)
				err = fmt.Errorf("%s not acknowledged it within %v", strings.Join(slices.Compact(missing), ", ")+" has", h.Limit())
			}
			return maybe{fmt.Errorf("operation %d is in force, but %w", n, err)}
		}
		timer.Stop()
	}
}

// executeOut executes PERSISTENT RESERVE OUT with that parameter list.
func (m *member) executeOut(o *prOut, list []byte) bool {
	h, err := m.begin(o.Command)
	if err != nil {
		return o.failStore(err)
	}
	defer h.end()
	id, n, err := h.repeats(o, list)
	own := false
	if err == nil && n == 0 {
		n, own, err = h.change(id, func() (prState, operation, bool) {
			o.notices, o.preempted = nil, nil
			if !o.decide() || !prOuts[o.row.sa].counts && o.state.equal(&o.before) {
				return prState{}, operation{}, false
			}
			return o.state, operation{action: o.row.name, effects: o.effects()}, true
		})
	}
	if o.failed {
		return false
	}
	if err == nil && (n == 0 || own) {
		o.inForce()
	}
	if own {
		m.finish(span{n, n})
	}
	if err == nil && n != 0 {
		h.giveTurn()
		err = h.confirm(n)
	}
	if err == nil {
		return true
	}
	return h.fail(o, id, list, err)
}

// fail ends a PERSISTENT RESERVE OUT with an error. One that is in force, or may come into force, is BUSY: the initiator tries again, and
// repeats finds the attempt.
func (h *sharedChange) fail(o *prOut, id string, list []byte, err error) bool {
	_, unsure := errors.AsType[maybe](err)
	if unsure {
		r := &h.u.reservations
		r.mu.Lock()
		for n := range h.unconfirmed {
			if len(h.unconfirmed) < maxAttempts {
				break
			}
			delete(h.unconfirmed, n)
		}
		h.unconfirmed[o.from] = prAttempt{id, bytes.Clone(o.CDB), bytes.Clone(list)}
		r.mu.Unlock()
	}
	switch {
	case o.aborted():
		return o.Command.fail(condAborted)
	case unsure:
		h.u.opt.Events(ReservationUnconfirmedEvent{h.naa, err})
		return o.busy()
	case errors.Is(err, errNotJoined), h.member.ctx.Err() != nil:
		return o.busy()
	}
	return o.failStore(err)
}

// repeats returns the ID for the operation of o. If o is the second attempt of an operation that is the last one, which means that
// the reservations are as it has left them, repeats returns its number, too.
func (h *sharedChange) repeats(o *prOut, list []byte) (id string, n uint64, err error) {
	r := &h.u.reservations
	r.mu.Lock()
	a, ok := h.unconfirmed[o.from]
	delete(h.unconfirmed, o.from)
	r.mu.Unlock()
	if ok && bytes.Equal(a.cdb, o.CDB) && bytes.Equal(a.list, list) {
		if err := h.catchUp(); err != nil {
			return a.id, 0, maybe{err}
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if n := h.at.find(a.id); n != 0 && n == h.at.operation {
			return a.id, n, nil
		}
	}
	return h.s.newID(), 0, nil
}

// alter changes the reservations for the daemon. f returns the next ones and what they mean to nexuses, or false if nothing changes.
func (m *member) alter(action string, f func(now prState) (next prState, effects prEffects, ok bool)) (changed bool, err error) {
	h, err := m.begin(nil)
	if err != nil {
		return false, err
	}
	defer h.end()
	var e prEffects
	n, own, err := h.change(m.s.newID(), func() (next prState, op operation, ok bool) {
		r := &m.u.reservations
		r.mu.Lock()
		now := r.persistent
		r.mu.Unlock()
		next, e, ok = f(now)
		return next, operation{action: action, effects: e}, ok
	})
	if own {
		m.u.followUp(e, nil)
		m.finish(span{n, n})
	}
	if err == nil && n != 0 {
		err = h.confirm(n)
	}
	return n != 0, err
}

// losePower ends what APTPL does not keep, on all gateways.
func (m *member) losePower() {
	_, err := m.alter(actionPowerLoss, func(now prState) (prState, prEffects, bool) {
		next := now.withoutPower()
		return next, prEffects{}, !next.equal(&now)
	})
	if err != nil {
		m.u.notStored(err)
	}
}

// clear does what Unit.ClearReservation says.
func (m *member) clear() (cleared bool, err error) {
	return m.alter(actionClear, func(now prState) (next prState, e prEffects, ok bool) {
		next = now
		next.generation++
		for _, n := range next.remove(func(registration) bool { return true }) {
			e.notices = append(e.notices, notice{n, condReservationsPreempted})
		}
		return next, e, len(e.notices) > 0
	})
}

// reason returns why the member does not admit commands.
func (m *member) reason() error {
	r := &m.u.reservations
	r.mu.Lock()
	err := m.err
	r.mu.Unlock()
	if of := m.s.Err(); err == nil && of != nil {
		return fmt.Errorf("%w: %w", errNotJoined, of)
	}
	return cmp.Or(err, errNotJoined)
}

// A sharedPosition is what another process needs to follow the reservations from where this one is.
type sharedPosition struct {
	Epoch     uint64   `json:"epoch"`
	Operation uint64   `json:"operation"`
	Numbers   []uint64 `json:"numbers"` // of the registrations, in their order
}

// position returns where m is, or nil if it does not know. m may be nil.
//
// Preconditions: m.u.reservations.mu is held.
func (m *member) position() *sharedPosition {
	if m == nil {
		return nil
	}
	invariant.Held(&m.u.reservations.mu)
	if !m.at.known {
		return nil
	}
	p := &sharedPosition{m.at.epoch, m.at.operation, []uint64{}}
	for _, r := range m.u.reservations.persistent.registrations {
		p.Numbers = append(p.Numbers, r.number)
	}
	return p
}

// check finds what no unit with so many registrations could have got into. p may be nil.
func (p *sharedPosition) check(registrations int) error {
	if p != nil && len(p.Numbers) != registrations {
		return fmt.Errorf("%d registrations, and the numbers of %d of them", registrations, len(p.Numbers))
	}
	return nil
}

// restore makes m, which has not begun, continue from p. Both may be nil.
//
// Preconditions: m.u.reservations.mu is held.
func (m *member) restore(p *sharedPosition) {
	if m == nil || p == nil {
		return
	}
	invariant.Held(&m.u.reservations.mu)
	m.at = position{known: true, epoch: p.Epoch, operation: p.Operation}
	for i, n := range p.Numbers {
		m.u.reservations.persistent.registrations[i].number = n
	}
}
