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
	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/security/limits"
)

// maxEvents is how many events of each kind are kept.
const maxEvents = 1024

// events has the last events of each kind, and the subscribers.
type events struct {
	log string // names the numbering

	mu    sync.Mutex
	last  uint64
	rings map[string]*ring // by kind
	subs  map[chan struct{}]struct{}
}

// A ring has the last maxEvents of a kind, so that an initiator that causes many events of
// one kind, like refused logins, displaces no other kind.
type ring struct {
	list []schema.Event // the event after n others is at n%maxEvents
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

// since appends the events with numbers above n to list, newest first.
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

// kindOf returns the ring of e: one for each kind of docs/cli.md, and others for refused
// logins and requests, which anyone can cause.
func kindOf(e *schema.Event) string {
	if e.Attrs["outcome"] == "refused" {
		return e.Event + " refused"
	}
	return e.Event
}

// add numbers e and stores it.
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
		default: // it is notified already
		}
	}
}

// since returns the kept events with numbers above n, by number.
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

// Events returns the kept events with numbers above since, oldest first. A gap in the
// numbers means that events were displaced.
func (d *Daemon) Events(since uint64) []schema.Event { return d.events.since(since) }

// EventLog names the numbering of Events. Each process has another one, also after an upgrade, and its numbers
// begin at 1.
func (d *Daemon) EventLog() string { return d.events.log }

// Subscribe returns a channel that receives when there may be new Events, until cancel is called.
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

// report writes e as a line of the log, which eventHandler stores as an Event.
func (d *Daemon) report(e lun.Event) {
	attrs := []slog.Attr{slog.String(eventKey, e.Kind())}
	if l, ok := e.(iscsi.LoginEvent); ok {
		if v, demand := d.ipsec.known(l.Local, l.Remote).now(); demand != ipsec.Off {
			attrs = append(attrs, verdictAttrs(v)...)
		}
	}
	e.Log(d.log, attrs...)
}

// reportBite reports that a limit has begun to refuse, or to make wait. It does not wait for the
// log: the caller may hold locks.
func (d *Daemon) reportBite(b limits.Bite) {
	go d.log.Warn("a limit is reached", eventKey, "limit", "limit", b.Limit.Name(), "who", b.Who, "max", b.Max, "used", b.Used)
}

// byKey is the key of By in a context.
type byKey struct{}

// By returns a context for a request of who. Log lines and events about it have the attribute "by".
func By(ctx context.Context, who string) context.Context {
	return context.WithValue(ctx, byKey{}, who)
}

// An eventHandler passes records on, and records those with an event attribute as events,
// even if the log does not show their level.
type eventHandler struct {
	next   slog.Handler
	events *events
	attrs  []slog.Attr // of With; groups are not supported
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
