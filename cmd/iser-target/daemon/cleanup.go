package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun/invariant"
)

// What a change removed ends after the editor is released: sessions log out, commands
// drain or are cut off, and stores close. Meanwhile other changes are made, except those
// that need what has not ended yet.

// ErrBeingRemoved is in errors about what an earlier change removed and what has not ended yet.
var ErrBeingRemoved = errors.New("was removed and is still in use")

// ending is what changes removed and what has not ended yet. Daemon.mu guards it.
type ending struct {
	removals []*removal
	sessions []*endingSessions
}

// A removal is a LUN that is being removed.
type removal struct {
	d      *Daemon
	t      *servedTarget
	l      *servedLUN
	hidden bool // from the initiators
	final  bool // the change is committed
	drain  time.Duration

	ctx context.Context // ends when the commands are to be cut off
	cut context.CancelFunc

	// Guarded by d.mu.
	whole           bool      // the target is removed, too, with its sessions
	until           time.Time // when the commands are cut off; zero: the LUN is not hidden
	closing, closed bool      // the store
}

// newRemoval returns the removal of l by the change. It does not begin yet.
func (c *change) newRemoval(t *servedTarget, l *servedLUN) *removal {
	r := &removal{d: c.d, t: t, l: l, drain: c.o.drain()}
	r.ctx, r.cut = context.WithCancel(c.ctx)
	return r
}

// store reports whether the removal has begun to close the store, and whether it is closed.
func (r *removal) store() (closing, closed bool) {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	return r.closing, r.closed
}

// hide removes the LUN from the initiators' view, the first step of a removal.
func (r *removal) hide() {
	r.hidden = true
	r.t.inventory.Remove(uint16(r.l.ID))
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	delete(r.t.luns, r.l.ID)
	r.until = time.Now().Add(r.drain)
	if !r.whole { // otherwise it is on the list already
		r.d.ending.removals = append(r.d.ending.removals, r)
	}
}

// forget takes r off the list.
func (d *Daemon) forget(r *removal) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ending.removals = slices.DeleteFunc(d.ending.removals, func(o *removal) bool { return o == r })
}

// checkFree fails with ErrBeingRemoved if a LUN that is being removed has the backend of
// l, or, if number is set, the number of l in the target.
func (d *Daemon) checkFree(target string, l *config.LUN, number bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.ending.removals {
		sameNumber := number && r.t.name == target && r.l.ID == l.ID && !r.closing
		if r.closed || !sameNumber && storeKey(r.t.name, &r.l.LUN) != storeKey(target, l) {
			continue
		}
		return fmt.Errorf("LUN %d of %s %w: %s. Nothing was changed", r.l.ID, r.t.name, ErrBeingRemoved, r.progress())
	}
	return nil
}

// progress describes how far the removal is.
//
// Preconditions: r.d.mu is held.
func (r *removal) progress() string {
	invariant.Held(&r.d.mu)
	switch {
	case r.closing:
		if err := r.d.calls.stuck(storeKey(r.t.name, &r.l.LUN)); err != nil {
			return err.Error()
		}
		return "its store closes"
	case r.until.IsZero():
		return "the sessions of its target end"
	}
	return "it drains until " + r.until.Format(time.TimeOnly) + " at most"
}

// matches reports whether the removal is that of a LUN, or, if id is negative, that of a target.
//
// Preconditions: r.d.mu is held.
func (r *removal) matches(target string, id int) bool {
	invariant.Held(&r.d.mu)
	return r.t.name == target && r.whole == (id < 0) && (id < 0 || r.l.ID == id)
}

// Removing returns the numbers of the LUNs of the target that are being removed.
func (d *Daemon) Removing(target string) (ids []int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.ending.removals {
		if r.t.name == target && !r.closing {
			ids = append(ids, r.l.ID)
		}
	}
	return ids
}

// RemovalProgress describes how far the removal of a LUN, or, if id is negative, of a
// target, is. Without such a removal it returns "".
func (d *Daemon) RemovalProgress(target string, id int) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.ending.removals {
		if r.matches(target, id) {
			return r.progress()
		}
	}
	for _, s := range d.ending.sessions {
		if id < 0 && s.target == target {
			return "its sessions end"
		}
	}
	return ""
}

// CutOff ends at once the drain of a LUN, or, if id is negative, of a target, that an
// earlier change removed. It reports whether one was draining.
func (d *Daemon) CutOff(ctx context.Context, target string, id int) (found bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.ending.removals {
		if !r.closing && r.matches(target, id) {
			r.cut()
			found = true
		}
	}
	for _, s := range d.ending.sessions {
		if id < 0 && s.target == target {
			s.cut()
			found = true
		}
	}
	if found {
		d.log.InfoContext(ctx, "removal is cut short", eventKey, "config", "target", target, "lun", id)
	}
	return found
}

// finish gives the commands in progress time to end, cuts off those that do not, and
// closes the store. It returns what the user should know.
func (r *removal) finish(drain time.Duration) (notes []string) {
	defer r.cut() // releases the context
	d, begin := r.d, time.Now()
	log := d.log.With("target", r.t.name, "lun", r.l.ID)
	d.locked(func() { r.until = begin.Add(drain) })
	if drain > 0 {
		ctx, cancel := context.WithTimeout(r.ctx, drain)
		left, err := d.node.Drain(ctx, r.t.inventory, uint16(r.l.ID))
		cancel()
		if err != nil {
			after := time.Since(begin).Round(time.Millisecond)
			notes = append(notes, fmt.Sprintf("%d commands for LUN %d were cut off after %v", left, r.l.ID, after))
			log.Warn("commands are cut off", "commands", left, "after", after)
		}
	}
	r.l.unit.CutOff()
	d.locked(func() { r.closing = true })
	closed := func(err error) {
		if r.final { // before another LUN can have the identity
			if err := d.forgetFailure(r.l.unit); err != nil {
				log.Warn("failed sync of a removed LUN stays on record", "reason", err)
			}
			if r.l.Shared {
				d.group.erase(&r.l.LUN)
			}
		}
		d.locked(func() { r.closed = true })
		d.forget(r)
		if err != nil {
			log.Error("LUN removed, but closing its store failed", eventKey, "lun", "reason", err)
		} else {
			log.Info("LUN removed", eventKey, "lun")
		}
	}
	// Not with r.ctx: CutOff ends commands, but their data still has to be written.
	err := d.closeLUN(d.changes.ended, d.waits.close, r.t, r.l, closed)
	if errors.Is(err, ErrStuck) {
		log.Error("LUN removed, but its store does not close", eventKey, "lun", "reason", err)
		return append(notes, fmt.Sprintf("LUN %d: %v; it closes in the background", r.l.ID, err))
	}
	closed(err)
	if err != nil {
		notes = append(notes, fmt.Sprintf("closing the store of LUN %d: %v", r.l.ID, err))
	}
	return notes
}

// endingSessions are the sessions that end with one removed target, or for other reasons.
type endingSessions struct {
	target string // that was removed; empty: none
	ctx    context.Context
	cut    context.CancelFunc
}

// An endingSession is a session that a change ends.
type endingSession struct {
	*endingSessions
	tsih   uint16
	reason string
}

// A cleanup is the part of a change that follows when it is committed and its editor is
// released. It cannot be undone.
type cleanup struct {
	d        *Daemon
	drain    time.Duration
	sessions []endingSession
	removals []*removal

	mu    sync.Mutex
	notes []string // guarded by mu
}

// cleanup collects the sessions and LUNs that c ends. Sessions that begin later are not among them.
func (c *change) cleanup() *cleanup {
	d := c.d
	d.changes.cleanups.Add(1)
	k := &cleanup{d: d, drain: c.o.drain(), removals: c.removals, notes: c.notes}
	groups := map[string]*endingSessions{} // by target, if that is removed
	for _, s := range d.node.Sessions() {
		reason := c.endReason(&s)
		if reason == "" {
			continue
		}
		target := ""
		if targetOf(c.cfg, s.Target) == nil {
			target = s.Target
		}
		if groups[target] == nil {
			g := &endingSessions{target: target}
			g.ctx, g.cut = context.WithCancel(c.ctx)
			groups[target] = g
		}
		k.sessions = append(k.sessions, endingSession{groups[target], s.TSIH, reason})
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range c.removals {
		if !r.hidden {
			r.whole = true
			d.ending.removals = append(d.ending.removals, r)
		}
	}
	for _, g := range groups {
		d.ending.sessions = append(d.ending.sessions, g)
	}
	return k
}

// endIf makes the sessions that match end for that reason when c is complete.
func (c *change) endIf(match func(*iscsi.SessionInfo) bool, reason string) {
	c.ending = append(c.ending, func(s *iscsi.SessionInfo) string {
		if match(s) {
			return reason
		}
		return ""
	})
}

// endReason returns why s has to end, or "".
func (c *change) endReason(s *iscsi.SessionInfo) string {
	for _, f := range c.ending {
		if reason := f(s); reason != "" {
			return reason
		}
	}
	return ""
}

// run ends the sessions, then the LUNs of removed targets; other LUNs it ends at once.
// It returns what the user should know.
func (k *cleanup) run() []string {
	var sessions, luns sync.WaitGroup
	for _, s := range k.sessions {
		sessions.Go(func() {
			if err := k.d.endSession(s.ctx, s.tsih, k.drain, s.reason); err != nil {
				k.note(err.Error())
			}
		})
	}
	finish := func(r *removal) {
		r.final = true
		luns.Go(func() { k.note(r.finish(k.drain)...) })
	}
	for _, r := range k.removals {
		if closing, _ := r.store(); r.hidden && !closing {
			finish(r)
		}
	}
	sessions.Wait()
	k.d.mu.Lock()
	k.d.ending.sessions = slices.DeleteFunc(k.d.ending.sessions, func(g *endingSessions) bool {
		return slices.ContainsFunc(k.sessions, func(s endingSession) bool { return s.endingSessions == g })
	})
	k.d.mu.Unlock()
	for _, s := range k.sessions {
		s.cut()
	}
	for _, r := range k.removals {
		if !r.hidden {
			r.hide()
			finish(r)
		}
	}
	luns.Wait()
	return k.notes
}

// note adds to the notes.
func (k *cleanup) note(notes ...string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.notes = append(k.notes, notes...)
}

// endSlack is what the end of a session may take in addition to its grace.
const endSlack = 5 * time.Second

// endSession asks the initiator to log out within grace, and then ends the session.
func (d *Daemon) endSession(ctx context.Context, tsih uint16, grace time.Duration, reason string) error {
	ctx, cancel := context.WithTimeout(ctx, grace+endSlack)
	defer cancel()
	err := d.node.EndSession(ctx, tsih, grace, errors.New(reason))
	if errors.Is(err, iscsi.ErrNoSession) {
		return nil // it ended meanwhile
	}
	return err
}
