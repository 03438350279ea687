package daemon

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/iser-target/iser-target/security/limits"
)

const (
	// logPause is the time in which the log has one line for each address and reason.
	logPause = time.Second
	// logSavings is for how long an address saves up the lines that it does not use. A host can log
	// in to 1,000 targets at once.
	logSavings = 200 * time.Second
	// maxRefusals and maxLogKeys bound what a logGate remembers, and so the lines per second of all
	// addresses: about refusals, which anyone can cause, and of all kinds.
	maxRefusals = 256
	maxLogKeys  = 4096
)

// peerKinds are the events that initiators, and callers of the control API, cause as often as they like.
var peerKinds = map[string]bool{"login": true, "session": true, "reservation": true, "control": true, "slow": true, "capture": true}

// A logGate bounds the lines of log, and the events, that initiators cause: one line for each address
// and reason per second, and limits.log_lines_per_address. The last of the lines that were left out
// follows at the end of the second, with their number. The zero value with limits is ready.
type logGate struct {
	limits *limits.Set

	mu       sync.Mutex
	pauses   map[string]*logPaused // by address and reason
	refusals int                   // of pauses
	credits  map[string]*credit    // by address
	timer    *time.Timer           // of tick; nil: there are no pauses
}

// A logPaused is an address and reason that the log had a line about in this second.
type logPaused struct {
	peer    string
	refusal bool
	left    uint64 // lines that were left out
	last    func(more uint64)
}

// A credit is what an address has saved up.
type credit struct {
	lines float64
	at    time.Time
}

// A gateHandler passes on the records that its gate lets through. Records that no peer causes pass
// always.
type gateHandler struct {
	slog.Handler
	gate  *logGate
	attrs []slog.Attr // of With
}

// Handle implements slog.Handler.
func (h *gateHandler) Handle(ctx context.Context, r slog.Record) error {
	peer, reason, refusal := h.cause(r)
	if peer == "" || h.gate.pass(peer, reason, refusal, func(more uint64) {
		if more > 0 {
			r = r.Clone()
			r.AddAttrs(slog.Uint64("more", more))
		}
		h.Handler.Handle(ctx, r)
	}) {
		return h.Handler.Handle(ctx, r)
	}
	return nil
}

// WithAttrs implements slog.Handler.
func (h *gateHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &gateHandler{h.Handler.WithAttrs(attrs), h.gate, append(h.attrs[:len(h.attrs):len(h.attrs)], attrs...)}
}

// WithGroup implements slog.Handler.
func (h *gateHandler) WithGroup(name string) slog.Handler {
	return &gateHandler{h.Handler.WithGroup(name), h.gate, h.attrs}
}

// cause returns the address of the peer that causes r, or its name if r has no address; empty: none.
// reason tells its lines apart: those of refusals by their reason, others by all that they say about
// the session or reservation.
func (h *gateHandler) cause(r slog.Record) (peer, reason string, refusal bool) {
	var kind, initiator, remote string
	var says strings.Builder
	says.WriteString(r.Message)
	attrs := map[string]string{}
	put := func(a slog.Attr) bool {
		switch v := a.Value.Resolve().String(); a.Key {
		case eventKey:
			kind = v
		case "remote":
			peer, remote = limits.TextKey(v), v
		case "initiator":
			initiator = v
		default:
			attrs[a.Key] = v
		}
		return true
	}
	for _, a := range h.attrs {
		put(a)
	}
	r.Attrs(put)
	if !peerKinds[kind] {
		return "", "", false
	}
	if peer == "" {
		peer = initiator
	}
	if refusal = attrs["outcome"] == "refused"; refusal {
		text := attrs["reason"]
		if remote != "" { // errors of the net package have the port, which differs each time
			text = strings.ReplaceAll(text, remote, "")
		}
		return peer, says.String() + "\x00" + attrs["stage"] + "\x00" + text, true
	}
	for _, key := range []string{"tsih", "cid", "command", "target", "lun", "serial"} {
		says.WriteString("\x00" + attrs[key])
	}
	return peer, says.String(), false
}

// pass reports whether a line may be written now. If not, and no other line of the same peer and
// reason follows, later is called at the end of the second, with the number of the others.
func (g *logGate) pass(peer, reason string, refusal bool, later func(more uint64)) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	key := peer + "\x00" + reason
	if g.pauses[key] == nil && !g.affords(peer) {
		key = peer
	}
	if g.pauses[key] == nil && (len(g.pauses) >= maxLogKeys || refusal && g.refusals >= maxRefusals) {
		key = "" // all that the gate cannot remember
	}
	if p := g.pauses[key]; p != nil {
		p.left++
		p.last = later
		g.limits.LogLines.Bite(peer)
		return false
	}
	if g.pauses == nil {
		g.pauses = map[string]*logPaused{}
	}
	g.pauses[key] = &logPaused{peer: peer, refusal: refusal}
	if refusal {
		g.refusals++
	}
	if g.timer == nil {
		g.timer = time.AfterFunc(logPause, g.tick)
	}
	return true
}

// affords takes a line from the credit of the address, if it has one.
//
// Preconditions: g.mu is held.
func (g *logGate) affords(peer string) bool {
	rate, now := float64(g.limits.LogLines.Max()), time.Now()
	most := rate * logSavings.Seconds()
	c := g.credits[peer]
	if c == nil {
		if g.credits == nil {
			g.credits = map[string]*credit{}
		}
		if len(g.credits) >= maxLogKeys {
			g.forget(most, now, rate)
		}
		if len(g.credits) >= maxLogKeys {
			return false
		}
		c = &credit{most, now}
		g.credits[peer] = c
	}
	c.earn(most, now, rate)
	if c.lines < 1 {
		return false
	}
	c.lines--
	return true
}

func (c *credit) earn(most float64, now time.Time, rate float64) {
	c.lines = min(c.lines+now.Sub(c.at).Seconds()*rate, most)
	c.at = now
}

// forget removes the credits that are full again. If none is, it removes them all: an attacker has
// thousands of addresses then, and maxRefusals bounds the log.
//
// Preconditions: g.mu is held.
func (g *logGate) forget(most float64, now time.Time, rate float64) {
	for peer, c := range g.credits {
		if c.earn(most, now, rate); c.lines >= most {
			delete(g.credits, peer)
		}
	}
	if len(g.credits) >= maxLogKeys {
		clear(g.credits)
	}
}

// tick ends a second: it writes the last of the lines that were left out. Those are the first of the
// next second.
func (g *logGate) tick() {
	g.mu.Lock()
	g.merge()
	var write []func()
	for key, p := range g.pauses {
		if p.left == 0 {
			g.remove(key)
			continue
		}
		last, more := p.last, p.left-1
		write = append(write, func() { last(more) })
		p.left, p.last = 0, nil
	}
	g.timer = nil
	if len(g.pauses) > 0 {
		g.timer = time.AfterFunc(logPause, g.tick)
	}
	g.mu.Unlock()
	for _, f := range write {
		f()
	}
}

// merge makes one of the lines of a peer that has no credit left for each.
//
// Preconditions: g.mu is held.
func (g *logGate) merge() {
	merged := map[string]*logPaused{}
	for key, p := range g.pauses {
		if p.left == 0 || key == "" || key == p.peer || g.affords(p.peer) {
			continue
		}
		m := merged[p.peer]
		if m == nil {
			m = &logPaused{peer: p.peer}
			merged[p.peer] = m
		}
		m.left += p.left
		m.last = p.last
		g.remove(key)
	}
	for peer, m := range merged {
		if p := g.pauses[peer]; p != nil {
			m.left += p.left
			m.refusal = p.refusal
		}
		g.pauses[peer] = m
	}
}

// remove forgets the key.
//
// Preconditions: g.mu is held.
func (g *logGate) remove(key string) {
	if g.pauses[key].refusal {
		g.refusals--
	}
	delete(g.pauses, key)
}

// flush writes at once what the gate has held back, before the log ends.
func (g *logGate) flush() {
	g.mu.Lock()
	if g.timer != nil {
		g.timer.Stop()
	}
	g.mu.Unlock()
	g.tick()
}

const (
	// logPatience is how long who logs waits for the reader of the log, such as a pipe.
	logPatience = 100 * time.Millisecond
	// logQueue bounds the bytes that wait for it, and logEndTime how long the end of the daemon does.
	logQueue   = 1 << 20
	logEndTime = time.Second
)

// A logEnd is where the lines of a daemon's log go until it ends. A store that hangs can have something
// to say after that, when LogTo may be something else's. If nobody reads the log, as when journald hangs
// or a pager has its pipe, the target continues: lines wait in memory, and those that have no room are
// counted and left out.
type logEnd struct {
	lostLines func(n uint64) // reports lines that were left out

	mu    sync.Mutex
	w     io.Writer
	queue []byte
	busy  chan struct{} // of drain, which closes it when the queue is empty; nil: nothing to write
	late  bool          // drain has taken longer than logPatience
	lost  uint64        // lines
	ended bool
}

// Write implements io.Writer. p is on its way when it returns, unless the reader is late. It discards
// what comes after the end.
func (l *logEnd) Write(p []byte) (int, error) {
	l.mu.Lock()
	if l.ended {
		l.mu.Unlock()
		return len(p), nil
	}
	if len(l.queue)+len(p) > logQueue {
		l.lost++
		l.mu.Unlock()
		return len(p), nil
	}
	l.queue = append(l.queue, p...)
	if l.busy == nil {
		l.busy = make(chan struct{})
		go l.drain()
	}
	busy, late := l.busy, l.late
	l.mu.Unlock()
	if !late && !closedWithin(busy, logPatience) {
		l.mu.Lock()
		l.late = l.busy == busy
		l.mu.Unlock()
	}
	return len(p), nil
}

// drain writes the queue.
func (l *logEnd) drain() {
	var other []byte
	for {
		l.mu.Lock()
		if len(l.queue) == 0 {
			break
		}
		b, w := l.queue, l.w
		l.queue = other[:0]
		l.mu.Unlock()
		w.Write(b) // there is no log to report an error in
		other = b
	}
	close(l.busy)
	n := l.lost
	l.busy, l.queue, l.late, l.lost = nil, nil, false, 0
	l.mu.Unlock()
	if n > 0 {
		l.lostLines(n)
	}
}

// end discards what is logged from now on.
func (l *logEnd) end() {
	l.mu.Lock()
	l.ended = true
	busy := l.busy
	l.mu.Unlock()
	if busy != nil && !closedWithin(busy, logEndTime) {
		l.mu.Lock()
		l.queue = nil
		l.mu.Unlock()
	}
}

// closedWithin waits for ch.
func closedWithin(ch <-chan struct{}, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ch:
		return true
	case <-t.C:
		return false
	}
}
