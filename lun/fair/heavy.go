package fair

import (
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/security/limits"
)

const (
	heavyQuantum = time.Millisecond      // of CPU time: a turn, and the least work that a pause follows
	heavyPause   = 4                     // how many times as long as the work a pause is
	heavyLeast   = 25 * time.Microsecond // what a step costs at least, with its thread, its place and its command
	lately       = 5 * time.Millisecond  // so long after a call its initiator counts as active
)

// heavies are the places for heavy work in a process.
type heavies struct {
	clock *clock
	most  *limits.Limit
	cpu   func() time.Duration // that the calling thread has used
	busy  atomic.Bool          // somebody has a place, or waits for one
	step  atomic.Int64         // the time when a step began or ended, for note

	mu      sync.Mutex
	line    line[*flow]
	flows   map[string]*flow
	places  []place
	used    int
	waiting int
	timer   *time.Timer
	active  [2]activity // of the last two initiators with other work
}

// A place is where one step of heavy work runs at a time.
type place struct {
	call  *Call // nil: it is free
	since time.Duration
	ended time.Duration // when the last call left
	until time.Duration // of its pause
	debt  time.Duration // work that no pause has paid for
}

// An activity says when an initiator last had work that is not heavy.
type activity struct {
	who string
	at  time.Duration
}

func (h *heavies) init(c *clock, most *limits.Limit) {
	h.clock, h.most, h.cpu, h.flows = c, most, threadTime, map[string]*flow{}
}

// threadTime returns the CPU time of the calling thread.
func threadTime() time.Duration {
	const thread = 1 // RUSAGE_THREAD
	var r syscall.Rusage
	if syscall.Getrusage(thread, &r) != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// note notes that the initiator of c, which is not heavy, is active.
func (h *heavies) note(c *Call) {
	at := h.step.Load()
	if c.seen == at {
		return
	}
	c.seen = at
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.clock.now()
	if h.active[0].who != c.Who {
		h.active[0], h.active[1] = activity{who: c.Who}, h.active[0]
	}
	h.active[0].at = now
}

// others reports whether another initiator was active at that time or later.
//
// Preconditions: h.mu is held.
func (h *heavies) others(who string, since time.Duration) bool {
	for _, a := range h.active {
		if a.at > 0 && a.who != who && a.at >= since {
			return true
		}
	}
	return false
}

// enter waits for a place for c. It returns false if c was aborted before.
func (h *heavies) enter(c *Call) bool {
	c.heavy.Store(h) // before c.aborted, so that Cancel cannot miss c
	h.mu.Lock()
	if c.aborted() {
		c.heavy.Store(nil)
		h.mu.Unlock()
		return false
	}
	h.busy.Store(true)
	now := h.clock.now()
	c.wait, c.began = queued, now
	f := h.flows[c.Who]
	if f == nil {
		f = &flow{who: c.Who}
		h.flows[c.Who] = f
	}
	f.heavy.push(c)
	h.line.add(f)
	h.waiting++
	h.dispatch(now)
	wait := c.park()
	h.mu.Unlock()
	h.clock.read() // so that it ticks
	if wait {
		<-c.wake
		c.Waited += h.clock.now() - c.began
	}
	if c.wait != granted {
		return false
	}
	runtime.LockOSThread() // whose CPU time counts
	c.cpu = h.cpu()
	return true
}

// dispatch gives free places to calls that wait.
//
// Preconditions: h.mu is held.
func (h *heavies) dispatch(now time.Duration) {
	invariant.Held(&h.mu)
	for h.waiting > 0 {
		i, at := h.free(now)
		if i < 0 {
			if at != never {
				h.arm(at - now)
			}
			return
		}
		f, _ := h.line.next(func(*flow) bool { return true })
		c := f.heavy.head
		h.line.charge(f, int64(heavyQuantum)) // until leave knows better
		h.drop(f, c)
		h.used++
		h.places[i].call, h.places[i].since = c, now
		c.place = i + 1
		h.step.Store(int64(now))
		c.settle(granted)
	}
}

// free returns the index of a free place, or -1 and when the pause of one ends; never: when a call leaves.
//
// Preconditions: h.mu is held.
func (h *heavies) free(now time.Duration) (i int, at time.Duration) {
	most := max(int(h.most.Max()), 1)
	for len(h.places) < most {
		h.places = append(h.places, place{})
	}
	at = never
	if h.used >= most {
		return -1, never
	}
	for i := range h.places[:most] {
		p := &h.places[i]
		switch {
		case p.call != nil:
		case p.until <= now:
			return i, 0
		default:
			at = min(at, p.until)
		}
	}
	return -1, at
}

func (h *heavies) arm(d time.Duration) {
	if h.timer == nil {
		h.timer = time.AfterFunc(d, h.fire)
	} else {
		h.timer.Reset(d)
	}
}

func (h *heavies) fire() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dispatch(h.clock.now())
}

// drop takes c, which waits, out of the queue of f. A flow without calls is forgotten in idle.
//
// Preconditions: h.mu is held.
func (h *heavies) drop(f *flow, c *Call) {
	f.heavy.remove(c)
	h.waiting--
	if f.empty() {
		h.line.remove(f)
	}
}

// leave ends a step of c.
func (h *heavies) leave(c *Call) {
	spent := max(h.cpu()-c.cpu, heavyLeast)
	runtime.UnlockOSThread()
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.clock.now()
	h.step.Store(int64(now))
	if f := h.flows[c.Who]; f != nil {
		f.tag += int64(spent - heavyQuantum)
	}
	if p := &h.places[c.place-1]; p.call == c {
		p.call = nil
		h.used--
		p.debt += spent
		if !h.others(c.Who, min(now-lately, p.ended)) {
			p.debt = 0
		} else if p.debt >= heavyQuantum {
			p.until, p.debt = now+heavyPause*p.debt, 0
		}
		p.ended = now
	}
	c.place = 0
	h.dispatch(now)
	h.idle()
}

// idle forgets all initiators if nobody has work.
//
// Preconditions: h.mu is held.
func (h *heavies) idle() {
	if h.waiting == 0 && h.used == 0 {
		clear(h.flows)
		h.busy.Store(false)
	}
}

// cancel ends the wait of c, if it waits here.
func (h *heavies) cancel(c *Call) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if c.heavy.Load() == h && c.waits() {
		h.drop(h.flows[c.Who], c)
		c.settle(refused)
		h.idle()
	}
}

// running returns how many places are in use.
func (h *heavies) running() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return int64(h.used)
}

// sweep frees the places of calls that take so long that they wait for a device rather than compute,
// and serves those who wait after the bound has changed.
func (h *heavies) sweep(now time.Duration) {
	if !h.busy.Load() {
		return
	}
	h.mu.Lock()
	for i := range h.places {
		if p := &h.places[i]; p.call != nil && now-p.since >= stallTime {
			p.call = nil
			h.used--
		}
	}
	full := false
	for _, f := range h.line.list {
		full = full || now-f.heavy.head.began >= stallTime
	}
	h.dispatch(now)
	h.idle()
	h.mu.Unlock()
	if full {
		h.most.Bite("all LUNs")
	}
}
