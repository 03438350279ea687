package ipsec

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"
)

// A Watched is a connection that a Guard knows. A nil *Watched has no demands. Its methods may be called concurrently.
type Watched struct {
	g *Guard
	c Connection

	turn turn // is held during questions and calls of c, so that their order is that of the answers

	mu              sync.Mutex
	portal, target  Need
	initiator, name string // of the initiator and of the target
	verdict         Verdict
	pinned          pin
	graceOver       time.Time   // when the connection ends; zero: nothing is missing
	unanswered      time.Time   // since when a verdict is missing after a change; zero: none is
	misses          int         // questions since then that got no answer
	last            answer      // the last one that denied or failed
	timer           *time.Timer // calls decide at the time at; nil: no decision is due
	at              time.Time
	judged          bool // the driver has answered since something was required
	told            bool // a verdict was returned, so changes go to c.Changed and c.End
	closed          bool
}

// A turn is a lock. Who waits for a channel, unlike for a mutex, does not stop the clock of testing/synctest.
type turn chan struct{}

func (t turn) take()  { t <- struct{}{} }
func (t turn) leave() { <-t }

// A pin is what Connection.Pin depends on.
type pin struct {
	mode        Mode
	source, dst netip.Addr
	reqID       int
}

// Accept asks about a connection that was just accepted, before a byte of it is answered. After a denial the Guard forgets the
// connection. Otherwise the caller must call Close at its end. Accept returns within the timeout of Options for each demand.
func (g *Guard) Accept(ctx context.Context, c Connection, portal Need) (*Watched, Verdict) {
	if g == nil {
		if portal.off() {
			return nil, Verdict{Action: Permit}
		}
		return nil, noGuard(portal.Demand)
	}
	w := &Watched{g: g, c: c, turn: make(turn, 1), portal: portal, verdict: Verdict{Action: Permit}}
	if portal.off() {
		w.told = true
		return w, w.verdict
	}
	v := w.ask(ctx, AtAccept)
	if v.Action == Deny {
		w.Close()
		return nil, v
	}
	return w, v
}

// Login asks again, now that names are known and authenticated. target is empty, and need zero, in a discovery session. Nothing is asked
// if neither the portal nor the target has a demand.
func (w *Watched) Login(ctx context.Context, initiator, target string, need Need) Verdict {
	if w == nil {
		if need.off() {
			return Verdict{Action: Permit}
		}
		return noGuard(need.Demand)
	}
	w.mu.Lock()
	w.initiator, w.name, w.target = initiator, target, need
	idle := w.portal.off() && need.off()
	v := w.verdict
	w.mu.Unlock()
	if idle {
		return v
	}
	return w.ask(ctx, AtLogin)
}

// Require replaces the demands of portal and target, after the configuration changed, and asks again in the background. Once nothing is
// Required, the caller may undo what Connection.Pin did. A later demand calls it again.
func (w *Watched) Require(portal, target Need) {
	if w == nil {
		return
	}
	w.mu.Lock()
	same := w.portal == portal && w.target == target
	w.portal, w.target = portal, target
	if rank(portal.Demand) < rank(Required) && rank(target.Demand) < rank(Required) {
		w.pinned = pin{} // the caller may take the pin away
	}
	w.mu.Unlock()
	if same {
		return
	}
	w.enter()
	w.g.note(w.c.Flow.Remote.Addr())
}

// Verdict returns the last verdict.
func (w *Watched) Verdict() Verdict {
	if w == nil {
		return Verdict{Action: Permit}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.verdict
}

// Demand returns the stricter demand of portal and target.
func (w *Watched) Demand() Demand {
	if w == nil {
		return Off
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return Stricter(Stricter(Off, w.portal.Demand), w.target.Demand)
}

// Close makes the Guard forget the connection. A function of Connection that runs already may still run.
func (w *Watched) Close() {
	if w == nil {
		return
	}
	w.mu.Lock()
	w.closed = true
	w.settle()
	w.mu.Unlock()
	w.g.mu.Lock()
	delete(w.g.watched, w)
	w.g.mu.Unlock()
}

// enter lets the Guard know of the connection, before it asks the first time. Otherwise it could miss a change between the answer and the
// entry.
func (w *Watched) enter() {
	w.g.mu.Lock()
	defer w.g.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed && w.g.ctx.Err() == nil {
		w.g.watched[w] = struct{}{}
	}
}

// settle ends the times of patience and of grace. Preconditions: w.mu is held.
func (w *Watched) settle() {
	w.disarm()
	w.unanswered, w.misses, w.graceOver = time.Time{}, 0, time.Time{}
}

// arm calls decide at that time, and not at the one before. Preconditions: w.mu is held.
func (w *Watched) arm(at time.Time) {
	w.disarm()
	w.at = at
	w.timer = time.AfterFunc(time.Until(at), func() { w.decide(at) })
}

// disarm undoes arm. Preconditions: w.mu is held.
func (w *Watched) disarm() {
	if w.timer != nil {
		w.timer.Stop()
	}
	w.timer, w.at = nil, time.Time{}
}

// question returns what to ask at the moment, and the needs that are not off.
func (w *Watched) question(m Moment) (Question, []Need) {
	w.mu.Lock()
	defer w.mu.Unlock()
	q := Question{Moment: m, Flow: w.c.Flow, Initiator: w.initiator, Target: w.name}
	portal, target := w.portal, w.target
	switch {
	case portal.off() && target.off():
		return q, nil
	case portal.off():
		return q, []Need{target}
	case target.off():
		return q, []Need{portal}
	case portal.Profile == target.Profile:
		return q, []Need{{Stricter(portal.Demand, target.Demand), target.Profile}}
	}
	return q, []Need{portal, target}
}

// ask asks at accept or login, and returns the verdict to the caller instead of calling functions of the connection.
func (w *Watched) ask(ctx context.Context, m Moment) Verdict {
	w.enter()
	w.turn.take()
	defer w.turn.leave()
	s := w.g.settings()
	q, needs := w.question(m)
	a := w.g.ask(ctx, s, q, needs)
	w.pin(&a, needs)
	w.g.count(a.verdict)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unanswered, w.misses = time.Time{}, 0
	w.judged = a.judged
	if a.verdict.Action != Deny || w.graceOver.IsZero() {
		w.settle()
	}
	w.verdict, w.told = a.verdict, true
	return a.verdict
}

// pin pins the connection to the SA that the kernel sends with, if that is required. A failure turns the answer into a denial.
func (w *Watched) pin(a *answer, needs []Need) {
	if !requires(needs) || w.c.Pin == nil || a.verdict.Action == Deny || a.out.SPI == 0 {
		return
	}
	next := pin{a.out.Mode, a.out.Source, a.out.Destination, a.out.ReqID}
	w.mu.Lock()
	same := w.pinned == next
	w.mu.Unlock()
	if same {
		return
	}
	if err := w.c.Pin(a.out); err != nil {
		a.verdict.Action, a.verdict.Class, a.failed = Deny, ClassClear, true
		a.verdict.Reason = fmt.Sprintf("the kernel cannot keep clear text of the connection back: %v", err)
		return
	}
	w.mu.Lock()
	w.pinned = next
	w.mu.Unlock()
}

func (g *Guard) count(v Verdict) {
	switch v.Action {
	case Permit:
		g.counters.permitted.Add(1)
	case Mark:
		g.counters.marked.Add(1)
	case Deny:
		g.counters.denied.Add(1)
	}
}

// expect notes that something changed at that time about which the connection has no verdict yet. The time of patience begins.
func (w *Watched) expect(changed time.Time, patience time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || !w.judged || w.verdict.Action == Deny || !w.unanswered.IsZero() {
		return
	}
	w.unanswered, w.misses = changed, 0
	if w.graceOver.IsZero() {
		w.arm(changed.Add(patience))
	}
}

// waiting returns since when a verdict is missing. If none is, the time is later than all times at which one is.
func (w *Watched) waiting() (since time.Time, waits bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.unanswered.IsZero() {
		return time.Now(), false
	}
	return w.unanswered, true
}

// change asks after a change, and ends the connection if it has to. It returns the answer, and whether the connection still
// required one. With unasked it asks nothing, because the driver has failed for others.
func (w *Watched) change(unasked bool) (a answer, judged bool) {
	w.turn.take()
	defer w.turn.leave()
	began := time.Now()
	w.mu.Lock()
	skip := w.closed || !w.told || w.verdict.Action == Deny
	w.mu.Unlock()
	if skip {
		return answer{}, false
	}
	s := w.g.settings()
	limit, over := w.limit(s.options)
	s.limit = limit
	q, needs := w.question(AtChange)
	a = answer{verdict: Verdict{Action: Permit}}
	switch {
	case len(needs) == 0:
	case unasked || over:
		a = failure(s, needs)
	default:
		a = w.g.ask(w.g.ctx, s, q, needs)
		w.pin(&a, needs)
	}
	if w.g.ctx.Err() != nil {
		return answer{}, false // the Guard closes
	}
	w.take(s, a, began)
	return a, true
}

// limit returns how long to wait for the next answer: not longer than until it is due, when decide decides without it. over says that there is no time
// left. But if that time is short or over, and the driver may have been slow only once, it has all of its time. So it does if the process did not run when the
// answer was due.
func (w *Watched) limit(o Options) (limit time.Duration, over bool) {
	failures, answered := w.g.silence()
	w.mu.Lock()
	defer w.mu.Unlock()
	full, end := o.timeout(), w.at
	if !w.graceOver.IsZero() {
		end = w.graceOver
	}
	firm := !w.graceOver.IsZero() || w.confirmed(failures, answered)
	switch left := time.Until(end); {
	case end.IsZero() || left < -slow:
		return full, false
	case left <= 0 && firm:
		return full, true
	case left > 0 && (firm || left >= full/2):
		return min(full, left), false
	}
	return full, false
}

// confirmed reports whether there were two failures since the change that a verdict is missing about, of questions about the connection or about others without
// an answer among them. One may be one slow call. Preconditions: w.mu is held.
func (w *Watched) confirmed(failures int, answered time.Time) bool {
	return w.misses >= 2 || failures >= 2 && !answered.After(w.unanswered)
}

// failure returns the answer of a driver that gave none to another connection.
func failure(s settings, needs []Need) answer {
	a := answer{failed: true, verdict: Verdict{Action: Mark, Class: ClassDriver}}
	a.verdict.Reason = fmt.Sprintf("IPsec cannot be checked: driver %s does not answer. Run %s", s.driver.Name(), statusCommand)
	if requires(needs) {
		a.verdict.Action = Deny
	}
	return a
}

func requires(needs []Need) bool {
	return slices.ContainsFunc(needs, func(n Need) bool { return n.Demand != Audit })
}

// decide ends the time of patience or that of grace, for the timer that arm has set to the time at. It does not wait for an answer that would come too
// late. Before the end of grace it asks a last time, and it asks again if the process did not run when the timer was due.
func (w *Watched) decide(at time.Time) {
	s := w.g.settings()
	failures, answered := w.g.silence()
	w.mu.Lock()
	if !w.at.Equal(at) {
		w.mu.Unlock()
		return // there was an answer
	}
	w.disarm()
	ask := time.Since(at) > slow
	switch {
	case w.graceOver.IsZero():
		ask = ask || !w.confirmed(failures, answered)
	case at.Before(w.graceOver):
		w.arm(w.graceOver)
		ask = true
	}
	w.mu.Unlock()
	_, needs := w.question(AtChange)
	if ask || len(needs) == 0 {
		w.change(false)
		return
	}
	w.turn.take()
	defer w.turn.leave()
	w.mu.Lock()
	a, waits := w.last, !w.closed && w.verdict.Action != Deny && !(w.unanswered.IsZero() && w.graceOver.IsZero())
	end := w.graceOver
	if end.IsZero() {
		end = w.unanswered.Add(s.options.patience())
	}
	waits = waits && !time.Now().Before(end) // otherwise an answer has come, and another change
	w.misses = max(w.misses, 2)
	w.mu.Unlock()
	if !waits || w.g.ctx.Err() != nil {
		return
	}
	if a.verdict.Reason == "" || !requires(needs) {
		a = failure(s, needs)
	}
	w.take(s, a, at)
}

// take takes an answer to a question that began at that time. A denial ends the connection, at once or after the time of grace. There is such a time when
// keys can come back while no clear text passes: policies still demand ESP, or the connection is pinned, or the driver gave no
// answer. A connection that has a verdict keeps it for the time of patience after a change, unless the driver answers. The time of grace begins
// with the change, too.
//
// Preconditions: w.turn is held.
func (w *Watched) take(s settings, a answer, began time.Time) {
	now, v := time.Now(), a.verdict
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return
	}
	before, loss := w.verdict, w.unanswered
	if loss.IsZero() || loss.After(now) {
		loss = began
	}
	graced := !w.graceOver.IsZero()
	inTime := !graced || now.Before(w.graceOver)
	if w.last = (answer{}); v.Action == Deny || a.failed {
		w.last = a
	}
	if v.Class != ClassDriver {
		w.unanswered, w.misses, w.judged = time.Time{}, 0, a.judged
		if !graced {
			w.disarm()
		}
	} else {
		w.unanswered = loss
		w.misses++
		if over := loss.Add(s.options.patience()); w.judged && !graced && (now.Before(over) || w.misses < 2) {
			if w.timer == nil {
				w.arm(later(over, now.Add(s.options.retry())))
			}
			w.mu.Unlock()
			return // the Guard asks again
		}
		if before.Class == ClassDriver && inTime && (graced && v.Action == Deny || v.Action == before.Action) {
			w.mu.Unlock()
			return // only the words can differ
		}
	}
	patient := v.KeysGone || a.failed || !v.Protected() && w.pinned != pin{}
	first := false
	switch {
	case v.Action != Deny:
		w.graceOver = time.Time{}
		w.disarm()
	case patient && inTime && (graced || now.Before(loss.Add(s.options.Grace))):
		if !graced {
			w.graceOver = loss.Add(s.options.Grace)
			w.arm(w.graceOver.Add(-s.lastWord(w.graceOver.Sub(now))))
			first = true
		}
		v.Action = Mark
		v.Reason = fmt.Sprintf("%s. The connection ends %v after the loss, at %s, unless this is mended",
			strings.TrimSuffix(v.Reason, "."), s.options.Grace, w.graceOver.UTC().Format(time.RFC3339))
		if a.failed {
			// What was known last is still shown.
			v.Suite, v.SPIIn, v.SPIOut, v.Identity = before.Suite, before.SPIIn, before.SPIOut, before.Identity
		}
	default:
		w.settle()
	}
	w.verdict = v
	w.mu.Unlock()
	if before == v {
		return
	}
	w.g.count(v)
	if first && !a.failed {
		w.g.initiate(w.c.Flow)
	}
	if v.Action == Deny {
		w.g.counters.ended.Add(1)
	}
	if w.c.Changed != nil {
		w.c.Changed(before, v)
	}
	if v.Action == Deny && w.c.End != nil {
		go w.c.End(v.Reason)
	}
}

func later(a, b time.Time) time.Time {
	if a.Before(b) {
		return b
	}
	return a
}

// lastWord returns how long before the end of grace, of which that is left, the driver is asked a last time: a program has its whole time, and a driver that
// reads tables a second.
func (s settings) lastWord(left time.Duration) time.Duration {
	d := slow
	if _, decides := s.driver.(Decider); decides {
		d = s.options.timeout()
	}
	return min(d, left/2)
}
