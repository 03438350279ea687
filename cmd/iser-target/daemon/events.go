package daemon

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
)

// maxEvents of each kind are kept for those that ask later.
const maxEvents = 1024

// events are the last ones of each kind, and those who want to have the next.
type events struct {
	mu    sync.Mutex
	last  uint64
	rings map[string]*ring // by kind
	subs  map[chan struct{}]struct{}
}

// A ring has the last maxEvents of a kind: what an initiator can cause as often as it
// wants, like refused logins, pushes out none of another kind.
type ring struct {
	list []schema.Event // n%maxEvents is where the event stands before which there were n
	n    int
}

func (r *ring) add(e schema.Event) {
	if len(r.list) < maxEvents {
		r.list = append(r.list, e)
	} else {
		r.list[r.n%maxEvents] = e
	}
	r.n++
}

// since appends those with numbers above n to list, newest first.
func (r *ring) since(list []schema.Event, n uint64) []schema.Event {
	for i := range r.list {
		e := r.list[(r.n-1-i)%maxEvents]
		if e.Number <= n {
			break
		}
		list = append(list, e)
	}
	return list
}

// kindOf returns the ring of e. There is one for each kind of docs/cli.md, and refused
// logins, which cost nobody anything, have one of their own.
func kindOf(e *schema.Event) string {
	if e.Event == "login" && e.Attrs["outcome"] == "refused" {
		return "login refused"
	}
	return e.Event
}

// add makes e the next event.
func (ev *events) add(e schema.Event) {
	ev.mu.Lock()
	defer ev.mu.Unlock()
	ev.last++
	e.Number = ev.last
	r := ev.rings[kindOf(&e)]
	if r == nil {
		r = &ring{}
		if ev.rings == nil {
			ev.rings = map[string]*ring{}
		}
		ev.rings[kindOf(&e)] = r
	}
	r.add(e)
	for c := range ev.subs {
		select {
		case c <- struct{}{}:
		default: // it knows already that there is something
		}
	}
}

// since are the events with numbers above n that are still known, by their numbers.
func (ev *events) since(n uint64) []schema.Event {
	ev.mu.Lock()
	defer ev.mu.Unlock()
	var list []schema.Event
	for _, r := range ev.rings {
		list = r.since(list, n)
	}
	slices.SortFunc(list, func(a, b schema.Event) int { return cmp.Compare(a.Number, b.Number) })
	return list
}

// Events are those with numbers above since that are still known, oldest first. A gap
// in the numbers is what was forgotten.
func (d *Daemon) Events(since uint64) []schema.Event { return d.events.since(since) }

// Subscribe returns a channel that has something in it whenever there may be new Events,
// until cancel is called.
func (d *Daemon) Subscribe() (news <-chan struct{}, cancel func()) {
	ev := &d.events
	c := make(chan struct{}, 1)
	ev.mu.Lock()
	defer ev.mu.Unlock()
	if ev.subs == nil {
		ev.subs = map[chan struct{}]struct{}{}
	}
	ev.subs[c] = struct{}{}
	return c, func() {
		ev.mu.Lock()
		defer ev.mu.Unlock()
		delete(ev.subs, c)
	}
}

// eventKey is the attribute that makes a line of the log an event.
const eventKey = "event"

// nodeEvents implements iscsi.Events: each event is a line of the log and an Event.
type nodeEvents struct{ log *slog.Logger }

// Login records the outcome of a connection attempt.
func (n nodeEvents) Login(e iscsi.LoginEvent) { e.Log(n.log, slog.String(eventKey, "login")) }

// ConnectionEnded records the end of a connection whose session goes on.
func (n nodeEvents) ConnectionEnded(e iscsi.ConnectionEndedEvent) {
	e.Log(n.log, slog.String(eventKey, "session"))
}

// SessionEnded records the end of a session.
func (n nodeEvents) SessionEnded(e iscsi.SessionEndedEvent) {
	e.Log(n.log, slog.String(eventKey, "session"))
}

// Kinds of events about logical units.
var (
	reservationEvent = slog.String(eventKey, "reservation")
	mediumEvent      = slog.String(eventKey, "medium")
)

// unitEvents implements lun.Events: each event is a line of the log and an Event.
type unitEvents struct{ log *slog.Logger }

// ReservationChanged records a command that changed reservations.
func (u unitEvents) ReservationChanged(e lun.ReservationChangedEvent) { e.Log(u.log, reservationEvent) }

// ReservationEnded records the end of a reservation by RESERVE.
func (u unitEvents) ReservationEnded(e lun.ReservationEndedEvent) { e.Log(u.log, reservationEvent) }

// StoreFailed records a command that the store could not execute.
func (u unitEvents) StoreFailed(e lun.StoreFailedEvent) { e.Log(u.log, mediumEvent) }

// SyncsFail records that a LUN inherits a failed sync.
func (u unitEvents) SyncsFail(e lun.SyncsFailEvent) { e.Log(u.log, mediumEvent) }

// StateNotStored records that a state file could not be replaced.
func (u unitEvents) StateNotStored(e lun.StateNotStoredEvent) { e.Log(u.log, mediumEvent) }

// Sanitize records a step of a SANITIZE.
func (u unitEvents) Sanitize(e lun.SanitizeEvent) { e.Log(u.log, mediumEvent) }

// byKey is the key of By in a context.
type byKey struct{}

// By returns a context for what who asks for: in the log, and in events, it has the
// attribute "by".
func By(ctx context.Context, who string) context.Context {
	return context.WithValue(ctx, byKey{}, who)
}

// eventHandler passes records on, and makes events of those that have an event
// attribute, whether or not the log is to show them.
type eventHandler struct {
	next   slog.Handler
	events *events
	attrs  []slog.Attr // of With, without groups: nobody uses them
}

func (h *eventHandler) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelInfo || h.next.Enabled(ctx, l)
}

func (h *eventHandler) Handle(ctx context.Context, r slog.Record) error {
	if who, ok := ctx.Value(byKey{}).(string); ok {
		r = r.Clone()
		r.AddAttrs(slog.String("by", who))
	}
	e := schema.Event{Time: r.Time, Level: r.Level.String(), Text: r.Message, Attrs: map[string]any{}}
	put := func(a slog.Attr) bool {
		v := a.Value.Resolve()
		switch {
		case a.Key == eventKey:
			e.Event = v.String()
		case v.Kind() == slog.KindInt64 || v.Kind() == slog.KindUint64 || v.Kind() == slog.KindBool:
			e.Attrs[a.Key] = v.Any()
		default:
			e.Attrs[a.Key] = v.String()
		}
		return true
	}
	for _, a := range h.attrs {
		put(a)
	}
	r.Attrs(put)
	if e.Event != "" {
		h.events.add(e)
	}
	if !h.next.Enabled(ctx, r.Level) {
		return nil
	}
	return h.next.Handle(ctx, r)
}

func (h *eventHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &eventHandler{h.next.WithAttrs(attrs), h.events, append(h.attrs[:len(h.attrs):len(h.attrs)], attrs...)}
}

func (h *eventHandler) WithGroup(name string) slog.Handler {
	return &eventHandler{h.next.WithGroup(name), h.events, h.attrs}
}
