package lun

import (
	"fmt"
	"sync/atomic"
	"time"
)

// A store hangs when a call of it has not returned for limits.store_timeout. A sync may take syncFactor
// times as long, because much data may wait to be written; initiators have patience for that, too. A unit whose store hangs
// is held up, like one with a detached command: commands get BUSY at once instead of piling up behind
// those that wait already. It serves again when the call has returned.

// A storeWatch looks at the calls of a store from time to time while there are any.
type storeWatch struct {
	armed atomic.Bool // a timer is running
	hung  atomic.Bool
	since atomic.Int64 // when the oldest call began, as Unix time in nanoseconds, while hung
	hangs atomic.Uint64
}

const syncFactor = 6

// How often a storeWatch looks: while the store hangs, and at least while it does not.
const (
	lookHung = 100 * time.Millisecond
	lookBusy = time.Second
)

// watchStore makes sure that a timer looks at the calls of the store. It follows every call that has
// entered the gate: the timer stops only after it has found none.
func (u *Unit) watchStore() {
	if !u.watch.armed.Load() && !u.info.Nonblocking && u.watch.armed.CompareAndSwap(false, true) {
		u.lookIn(u.opt.StoreTimeout.Time())
	}
}

// lookIn makes look look after d, but soon enough to notice a change of the limit.
func (u *Unit) lookIn(d time.Duration) { time.AfterFunc(min(max(d, lookHung), lookBusy), u.look) }

// look finds out whether the store hangs.
func (u *Unit) look() {
	w, calls, timeout := &u.watch, u.gate.State(), u.opt.StoreTimeout.Time()
	age := calls.Quick
	if age < timeout && calls.Oldest >= syncFactor*timeout {
		age = calls.Oldest
	}
	switch hangs := calls.UnderWay > 0 && age >= timeout; {
	case hangs && !w.hung.Load():
		since := time.Now().Add(-age)
		w.since.Store(since.UnixNano())
		w.hangs.Add(1)
		w.hung.Store(true)
		u.opt.StoreTimeout.Bite(u.opt.Identity.Serial)
		u.opt.Events(StoreHangsEvent{Serial: u.opt.Identity.Serial, Since: since, Commands: calls.UnderWay + calls.Waiting})
	case !hangs && w.hung.Load():
		w.hung.Store(false)
		u.opt.Events(StoreHangsEvent{Serial: u.opt.Identity.Serial, Since: time.Unix(0, w.since.Load()), Ended: true})
	}
	switch {
	case w.hung.Load():
		u.lookIn(lookHung)
	case calls.UnderWay > 0:
		u.lookIn(timeout - calls.Quick)
	default:
		w.armed.Store(false)
		if u.gate.State().UnderWay > 0 { // began meanwhile, and saw the timer
			u.watchStore()
		}
	}
}

// A Hang describes a store that has not answered in time.
type Hang struct {
	Since    time.Time // when its oldest call began
	Commands int       // that are in the store, or wait for their turn
}

// Hang returns how long the store has not answered, if it hangs.
func (u *Unit) Hang() (h Hang, hangs bool) {
	if !u.watch.hung.Load() {
		return Hang{}, false
	}
	calls := u.gate.State()
	return Hang{Since: time.Unix(0, u.watch.since.Load()), Commands: calls.UnderWay + calls.Waiting}, true
}

// Hangs returns how often the store has begun to hang.
func (u *Unit) Hangs() uint64 { return u.watch.hangs.Load() }

// heldUp reports whether the unit must not touch its store.
func (u *Unit) heldUp() bool {
	return u.detachedIn.Load() > 0 || u.watch.hung.Load() || !u.group.admits()
}

// heldUpStatus returns for Status why the unit is held up.
func (u *Unit) heldUpStatus() string {
	if !u.group.admits() {
		return "reservations are out of reach: " + u.group.reason().Error()
	}
	h, hangs := u.Hang()
	if !hangs {
		calls := u.gate.State()
		h = Hang{time.Now().Add(-calls.Oldest), calls.UnderWay + calls.Waiting}
	}
	switch h.Commands {
	case 0:
		return "a command that was aborted is still in the store"
	case 1:
		return fmt.Sprintf("the store has not answered since %s; 1 command waits", h.Since.Format(time.TimeOnly))
	}
	return fmt.Sprintf("the store has not answered since %s; %d commands wait", h.Since.Format(time.TimeOnly), h.Commands)
}
