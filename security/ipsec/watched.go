package ipsec

import (
	"context"
	"fmt"
	"net/netip"
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
	grace           *time.Timer // nil: keys are not gone
	graceOver       time.Time
	unanswered      time.Time // when the first of the last questions in a row that got no answer began; zero: the last one got one
	judged          bool      // the driver has answered since something was required
	told            bool      // a verdict was returned, so changes go to c.Changed and c.End
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
	w.stopGrace()
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

// stopGrace stops the timer. Preconditions: w.mu is held.
func (w *Watched) stopGrace() {
	if w.grace != nil {
		w.grace.Stop()
		w.grace = nil
	}
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
	w.unanswered = time.Time{}
	w.judged = a.judged
	if a.verdict.Action != Deny {
		w.stopGrace()
	}
	w.verdict, w.told = a.verdict, true
	return a.verdict
}

// pin pins the connection to the SA that the kernel sends with, if that is required. A failure turns the answer into a denial.
func (w *Watched) pin(a *answer, needs []Need) {
	required := false
	for _, n := range needs {
		required = required || n.Demand != Audit
	}
	if !required || w.c.Pin == nil || a.verdict.Action == Deny || a.out.SPI == 0 {
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

// change asks after a change, and ends the connection if it has to. It reports whether the driver failed. With unasked it asks nothing, because
// the driver has failed for others. began is when the round began.
func (w *Watched) change(unasked bool, began time.Time) (failed bool) {
	w.turn.take()
	defer w.turn.leave()
	w.mu.Lock()
	skip := w.closed || !w.told || w.verdict.Action == Deny
	w.mu.Unlock()
	if skip {
		return false
	}
	s := w.g.settings()
	q, needs := w.question(AtChange)
	a := answer{verdict: Verdict{Action: Permit}}
	switch {
	case len(needs) == 0:
	case unasked:
		a = failure(s, needs)
	default:
		a = w.g.ask(w.g.ctx, s, q, needs)
		w.pin(&a, needs)
	}
	if w.g.ctx.Err() != nil {
		return false // the Guard closes
	}
	w.take(s, a, began)
	return a.failed
}

// failure returns the answer of a driver that gave none to another connection.
func failure(s settings, needs []Need) answer {
	a := answer{failed: true, verdict: Verdict{Action: Mark, Class: ClassDriver}}
	a.verdict.Reason = fmt.Sprintf("IPsec cannot be checked: driver %s does not answer. Run %s", s.driver.Name(), statusCommand)
	for _, n := range needs {
		if n.Demand != Audit {
			a.verdict.Action = Deny
		}
	}
	return a
}

// take takes an answer after a change. A denial ends the connection, at once or after the time of grace. There is such a time when
// keys can come back while no clear text passes: policies still demand ESP, or the connection is pinned, or the driver gave no
// answer. A connection that has a verdict keeps it for the time of Options.Patience after the first of the questions without an answer.
//
// Preconditions: w.turn is held.
func (w *Watched) take(s settings, a answer, began time.Time) {
	now, v := time.Now(), a.verdict
	w.mu.Lock()
	if w.closed {
		w.mu.Unlock()
		return
	}
	before := w.verdict
	if a.verdict.Class != ClassDriver {
		w.unanswered = time.Time{}
		w.judged = a.judged
	} else if w.unanswered.IsZero() {
		w.unanswered = began
	}
	if w.judged && !w.unanswered.IsZero() && now.Sub(w.unanswered) < s.options.Patience() && (w.grace == nil || now.Before(w.graceOver)) {
		w.mu.Unlock()
		return // the Guard asks again
	}
	inTime := w.grace == nil || now.Before(w.graceOver)
	if v.Class == ClassDriver && before.Class == ClassDriver && inTime && (w.grace != nil || v.Action == before.Action) {
		w.mu.Unlock()
		return // only the words can differ
	}
	patient := v.KeysGone || a.failed || !v.Protected() && w.pinned != pin{}
	first := false
	switch {
	case v.Action != Deny:
		w.stopGrace()
	case patient && s.options.Grace > 0 && inTime:
		if w.grace == nil {
			w.graceOver = now.Add(s.options.Grace)
			w.grace = time.AfterFunc(s.options.Grace, w.expire)
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
		w.stopGrace()
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

// expire asks a last time when the time of grace is over.
func (w *Watched) expire() {
	w.change(false, time.Now())
}
