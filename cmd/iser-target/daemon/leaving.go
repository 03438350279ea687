package daemon

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/iser-target/iser-target/config"
)

// What a change has removed comes to its end behind the change: sessions log out, commands
// drain or are cut off, and stores close. That has its time, and others make changes
// meanwhile; but not such as would need what has not ended.

// ErrLeaving is in errors about what an earlier change has removed and what has not come
// to its end yet.
var ErrLeaving = errors.New("was removed, and is still in use")

// A removal is a LUN that is being removed.
type removal struct {
	d      *Daemon
	t      *servedTarget
	l      *servedLUN
	hidden bool // from the initiators
	drain  time.Duration

	ctx context.Context // ends when it is to be cut off
	cut context.CancelFunc

	// Guarded by d.mu, as who is in d.leaving.
	whole           bool      // the target goes, with its sessions
	until           time.Time // when its commands are cut off; zero: it is not hidden
	closing, closed bool      // the store
}

// removal is that of a LUN by the change.
func (c *change) removal(t *servedTarget, l *servedLUN) *removal {
	r := &removal{d: c.d, t: t, l: l, drain: c.o.drain()}
	r.ctx, r.cut = context.WithCancel(c.ctx)
	return r
}

func (r *removal) isClosed() bool {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	return r.closed
}

// isClosing tells whether its store has been told to close and has not.
func (r *removal) isClosing() bool {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	return r.closing && !r.closed
}

// hide is what comes first of a removal.
func (r *removal) hide() {
	r.hidden = true
	r.t.inventory.Remove(uint16(r.l.ID))
	r.d.mu.Lock()
	delete(r.t.luns, r.l.ID)
	r.until = time.Now().Add(r.drain)
	r.d.mu.Unlock()
	r.d.remember(r)
}

// remember has State tell of r, and isFree heed it.
func (d *Daemon) remember(r *removal) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !slices.Contains(d.leaving, r) {
		d.leaving = append(slices.Clone(d.leaving), r)
	}
}

// forget drops r.
func (d *Daemon) forget(r *removal) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.leaving = slices.DeleteFunc(slices.Clone(d.leaving), func(o *removal) bool { return o == r })
}

// isFree fails with ErrLeaving if what the LUN lies on, or with number its number, is that
// of one which is being removed.
func (d *Daemon) isFree(target string, l *config.LUN, number bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.leaving {
		sameNumber := number && r.t.name == target && r.l.ID == l.ID && !r.closing
		if r.closed || !sameNumber && storeKey(r.t.name, &r.l.LUN) != storeKey(target, l) {
			continue
		}
		return fmt.Errorf("nothing has changed: LUN %d of target %s %w: %s", r.l.ID, r.t.name, ErrLeaving, r.describe())
	}
	return nil
}

// describe is how far it has come.
//
// Preconditions: d.mu is held.
func (r *removal) describe() string {
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

// Leaving are the numbers that LUNs of the target have which are being removed.
func (d *Daemon) Leaving(target string) (ids []int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.leaving {
		if r.t.name == target && !r.closing {
			ids = append(ids, r.l.ID)
		}
	}
	return ids
}

// IsLeaving says how far a LUN, or if the number is negative a target, has come that is
// being removed; it is empty if there is none.
func (d *Daemon) IsLeaving(target string, id int) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.leaving {
		if r.t.name == target && r.whole == (id < 0) && (id < 0 || r.l.ID == id) {
			return r.describe()
		}
	}
	for _, p := range d.parting {
		if id < 0 && p.target == target {
			return "its sessions end"
		}
	}
	return ""
}

// CutOff ends at once what an earlier change has removed and what has time to end: that LUN,
// or, if the number is negative, that target. It tells whether there is such a thing.
func (d *Daemon) CutOff(ctx context.Context, target string, id int) (found bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range d.leaving {
		if r.t.name == target && !r.closing && r.whole == (id < 0) && (id < 0 || r.l.ID == id) {
			r.cut()
			found = true
		}
	}
	for _, p := range d.parting {
		if id < 0 && p.target == target {
			p.cut()
			found = true
		}
	}
	if found {
		d.log.InfoContext(ctx, "what was removed is cut off", eventKey, "config", "target", target, "lun", id)
	}
	return found
}

// finish gives the commands that have begun time to end, cuts off those that have not,
// and closes the store. It tells what is worth knowing about that.
func (r *removal) finish(drain time.Duration) (notes []string) {
	defer r.cut() // nobody waits for it any more
	d, begin := r.d, time.Now()
	log := d.log.With("target", r.t.name, "lun", r.l.ID)
	d.mu.Lock()
	r.until = begin.Add(drain)
	d.mu.Unlock()
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
	d.mu.Lock()
	r.closing = true
	d.mu.Unlock()
	closed := func(err error) {
		d.mu.Lock()
		r.closed = true
		d.mu.Unlock()
		d.forget(r)
		if err != nil {
			log.Error("LUN removed, but its store", eventKey, "lun", "reason", err)
		} else {
			log.Info("LUN removed", eventKey, "lun")
		}
	}
	// Not r.ctx: who cuts off commands has time for what they have written.
	err := d.closeLUN(d.ended, d.waits.close, r.t, r.l, closed)
	if errors.Is(err, ErrStuck) {
		log.Error("LUN removed, but its store does not close", eventKey, "lun", "reason", err)
		return append(notes, fmt.Sprintf("LUN %d: %v, and nobody waits for it", r.l.ID, err))
	}
	closed(err)
	if err != nil {
		notes = append(notes, fmt.Sprintf("closing the store of LUN %d: %v", r.l.ID, err))
	}
	return notes
}

// A parting is a session that has to end.
type parting struct {
	*partings
	tsih   uint16
	reason string
}

// partings are the sessions that end with a target, or for another reason.
type partings struct {
	target string // that was removed; empty: none was
	ctx    context.Context
	cut    context.CancelFunc
}

// part notes what has to end, in the change's turn: what comes later is not meant.
func (c *change) part() {
	d := c.d
	d.finishing.Add(1)
	all := map[string]*partings{}
	of := func(target string) *partings {
		if all[target] == nil {
			p := &partings{target: target}
			p.ctx, p.cut = context.WithCancel(c.ctx)
			all[target] = p
		}
		return all[target]
	}
	removed := func(target string) string {
		if targetOf(c.cfg, target) == nil {
			return target
		}
		return ""
	}
	if len(c.ending) > 0 {
		for _, s := range d.node.Sessions() {
			for _, f := range c.ending {
				if reason := f(&s); reason != "" {
					c.parting = append(c.parting, parting{of(removed(s.Target)), s.TSIH, reason})
					break
				}
			}
		}
	}
	for _, r := range c.leaving {
		if !r.hidden {
			d.mu.Lock()
			r.whole = true
			d.mu.Unlock()
			d.remember(r)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range all {
		d.parting = append(d.parting, p)
	}
}

// finish ends what has no place any more: sessions, and LUNs. It is nobody's turn. The
// change is made; there is no way back.
func (c *change) finish() {
	var (
		sessions, luns sync.WaitGroup
		mu             sync.Mutex
	)
	note := func(notes ...string) {
		mu.Lock()
		defer mu.Unlock()
		c.notes = append(c.notes, notes...)
	}
	for _, p := range c.parting {
		sessions.Go(func() {
			if err := c.d.endSession(p.ctx, p.tsih, c.o.drain(), p.reason); err != nil {
				note(err.Error())
			}
		})
	}
	end := func(r *removal) { luns.Go(func() { note(r.finish(c.o.drain())...) }) }
	for _, r := range c.leaving {
		if r.hidden && !r.isClosed() && !r.isClosing() {
			end(r)
		}
	}
	sessions.Wait()
	c.d.mu.Lock()
	c.d.parting = slices.DeleteFunc(slices.Clone(c.d.parting), func(p *partings) bool {
		return slices.ContainsFunc(c.parting, func(o parting) bool { return o.partings == p })
	})
	c.d.mu.Unlock()
	for _, p := range c.parting {
		p.cut()
	}
	for _, r := range c.leaving {
		if !r.hidden {
			r.hide()
			end(r)
		}
	}
	luns.Wait()
}
