package lun

import (
	"errors"
	"sync"
	"time"
)

// A store that hangs keeps the goroutine that called it. The transport cannot wait for it: it
// detaches the command. The goroutine stays in the unit; the transport forgets the command, and
// answers what waited for its end. As long as a detached command is in a unit, the unit is held up:
// it begins nothing that touches the store, and continues nothing. So a late write lands before
// every write that is acknowledged after the command was given up.

// Where a command is (Command.place).
const (
	outside  uint32 = iota // of the unit
	inside                 // in Begin, Consume, Produce or End
	detached               // inside, and nobody waits for it
)

// enter notes that c is in its unit. It returns false, and c has failed, if c was aborted before.
// Afterwards an abort finds c either outside, where it does nothing more, or inside.
func (c *Command) enter() bool {
	c.place.Store(inside)
	if c.aborted() {
		c.leave()
		return c.fail(condAborted)
	}
	return true
}

// proceed does what enter does for a command that has begun. It also returns false if the unit has
// been held up since.
func (c *Command) proceed() bool {
	if !c.enter() {
		return false
	}
	if c.unit != nil && c.unit.heldUp() && c.row.touchesStore() {
		c.leave()
		return c.busy()
	}
	return true
}

// leave undoes enter. If c was detached meanwhile, it ends what Detach has begun.
func (c *Command) leave() {
	if c.place.CompareAndSwap(inside, outside) {
		return
	}
	detaching.Lock()
	defer detaching.Unlock()
	for _, u := range c.holds {
		if u != nil {
			u.detachedIn.Add(-1)
		}
	}
}

// detaching is held while a command is detached, and while one that was is back. It is a leaf.
var detaching sync.Mutex

// Inside reports whether c, which the caller has aborted, is in its unit. If not, it touches the
// store no more.
func (c *Command) Inside() bool { return c.place.Load() == inside }

// Detached reports whether Detach has given c up. The goroutine that runs c calls it after Begin,
// Consume, Produce and End: from then on c concerns nobody else.
func (c *Command) Detached() bool { return c.place.Load() == detached }

// Detach gives up c, which the caller has aborted, if it is in its unit. Until the goroutine that
// runs c is back, the units that c may still change are held up.
func (c *Command) Detach() bool {
	if !c.Inside() {
		return false
	}
	detaching.Lock()
	defer detaching.Unlock()
	if !c.place.CompareAndSwap(inside, detached) {
		return false
	}
	c.holds = [2]*Unit{c.copyTo.Load()}
	if c.unit != nil && c.row != nil && c.unit != c.holds[0] && c.row.changesAnytime() {
		c.holds[1] = c.unit
	}
	for _, u := range c.holds {
		if u != nil {
			u.detachedIn.Add(1)
		}
	}
	return true
}

// asideWait is how long aside waits.
const asideWait = 500 * time.Millisecond

// aside calls f, which may wait for the store, and waits until it returns, but not for longer than
// asideWait. Until f has returned then, u is held up.
func (u *Unit) aside(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	timer := time.NewTimer(asideWait)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		u.detachedIn.Add(1)
		go func() {
			<-done
			u.detachedIn.Add(-1)
		}()
	}
}

// errHeldUp ends a copy step between units of which one is held up.
var errHeldUp = errors.New("the logical unit is held up")

// busy ends c with BUSY, which initiators retry (SAM-5, section 5.3.1), and returns false.
func (c *Command) busy() bool {
	c.Status = StatusBusy
	c.failed = true
	return false
}

// mayUseStore reports whether the unit of c is not held up, or c does not need the store. Otherwise
// c has ended. TEST UNIT READY is NOT READY then, which the path checkers of initiators see; other
// commands are BUSY.
func (c *Command) mayUseStore() bool {
	switch {
	case c.unit == nil || !c.unit.heldUp():
		return true
	case c.row.op == opTestUnitReady:
		return c.fail(condHeldUp)
	case c.row.touchesStore():
		return c.busy()
	}
	return true
}

// changesAnytime reports whether the command, once it is in its unit, may change the store until it is back. Others say with
// Command.copyTo when they do.
func (row *command) changesAnytime() bool {
	return row.touchesStore() && (row.op != opExtendedCopy || row.sa != saPopulateToken && row.sa != saWriteUsingToken)
}

// touchesStore reports whether the command may call the store.
func (row *command) touchesStore() bool {
	switch row.op {
	case opStartStop, opModeSelect6, opModeSelect10:
		return true
	case opExtendedCopy:
		return row.sa != saCopyAbort
	case opTestUnitReady, opReadCapacity10, opReadDefectData10, opReadDefectData12:
		return false
	case opServiceActionIn16:
		return row.sa != saReadCapacity16
	}
	return row.flags&medium != 0
}
