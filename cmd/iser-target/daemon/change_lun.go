package daemon

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun"
)

func (c *change) addLUN(ch config.Change) error {
	t := c.target(ch.Target)
	if t == nil {
		return ErrNotFound
	}
	if t.luns[ch.LUN] != nil {
		return nil // added with its target
	}
	return c.open(t, *lunOf(targetOf(c.cfg, ch.Target), ch.LUN))
}

// open opens a LUN and shows it to the initiators.
func (c *change) open(t *servedTarget, l config.LUN) error {
	d := c.d
	if err := c.freePath(l.Path); err != nil {
		return err
	}
	var served *servedLUN
	var err error
	if c.o.follow { // as at a start: one medium out of reach keeps nothing else away
		served, err = c.openOrRetry(c.ctx, d.waits.store, t, l)
	} else {
		served, err = c.openLUN(c.ctx, t, l)
	}
	if err != nil {
		return err
	}
	c.write(func() { err = t.add(served) })
	if err != nil {
		return errors.Join(err, c.closeAgain(t, served, d.waits.close))
	}
	c.tell("LUN created", t, l.ID, "backend", l.Backend, "octets", served.unit.Size())
	c.onUndo(func() error {
		c.write(func() { delete(t.luns, l.ID) })
		t.inventory.Remove(uint16(l.ID)).CutOff()
		var err error
		if c.o.File == nil && slices.Contains(c.absent, l.Path) { // the change created it
			err = d.calls.do(c.lasting(), d.waits.store, storeKey(t.name, &l), "removing the new file", func(*call) error {
				return removeNew(l.Path)
			}, nil)
		}
		return errors.Join(err, c.closeAgain(t, served, d.waits.close))
	})
	return nil
}

// closeAgain closes the store of a LUN that the change opened or replaces.
func (c *change) closeAgain(t *servedTarget, l *servedLUN, timeout time.Duration) error {
	log := c.d.log.With("target", t.name, "lun", l.ID)
	return c.d.closeLUN(c.lasting(), timeout, t, l, func(err error) { log.Warn("store closed after its time limit", "reason", err) })
}

func (c *change) removeLUN(ch config.Change) error {
	t := c.target(ch.Target)
	if t == nil || t.luns[ch.LUN] == nil {
		return nil // removed with its target
	}
	r := c.newRemoval(t, t.luns[ch.LUN])
	r.hide()
	c.removals = append(c.removals, r)
	c.onUndo(func() error { return c.takeBack(r) })
	return nil
}

// takeBack undoes the removal of a LUN.
func (c *change) takeBack(r *removal) error {
	d, l := c.d, r.l
	closing, closed := r.store()
	if closing && !closed {
		return fmt.Errorf("LUN %d of %s: %w", l.ID, r.t.name, ErrStuck)
	}
	d.forget(r)
	if closed {
		var err error
		if l, err = c.openOrRetry(c.lasting(), d.waits.store, r.t, r.l.LUN); err != nil {
			return err
		}
		l.unit.InheritFrom(r.l.unit)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return r.t.add(l)
}

// freePath completes the removal of the LUN whose file or device is path, because the
// change needs it for another LUN.
func (c *change) freePath(path string) error {
	if path == "" {
		return nil
	}
	for _, r := range c.removals {
		if _, closed := r.store(); r.l.Path != path || closed {
			continue
		}
		if !r.hidden { // its target is removed, too
			r.hide()
			c.onUndo(func() error { return c.takeBack(r) })
		}
		c.notes = append(c.notes, r.finish(c.editDrain())...)
		if _, closed := r.store(); !closed {
			return fmt.Errorf("%s: commands for LUN %d of %s still use it", path, r.l.ID, r.t.name)
		}
	}
	return nil
}

// updateLUN changes a LUN to what the next configuration says. Masks, rates, thresholds and size change in
// place. Other keys require to open the LUN again; it is not ready meanwhile.
func (c *change) updateLUN(ch config.Change) error {
	t := c.target(ch.Target)
	if t == nil || t.luns[ch.LUN] == nil {
		return ErrNotFound
	}
	next := *lunOf(targetOf(c.cfg, ch.Target), ch.LUN)
	if replaces(t.luns[ch.LUN].LUN, next) || t.luns[ch.LUN].fault != nil {
		return c.replace(t, next)
	}
	if err := c.remask(t, next); err != nil {
		return err
	}
	c.rerate(t, next)
	c.rethreshold(t, next)
	return c.resize(t, next)
}

// replaces reports whether l has to be opened again to become next: all keys but those that
// remask, rerate, rethreshold and resize change.
func replaces(l, next config.LUN) bool {
	l = withRates(l, next)
	l.Size, l.Initiators, l.ReadOnlyFor = next.Size, next.Initiators, next.ReadOnlyFor
	l.ThresholdAvailable, l.ThresholdUsed = next.ThresholdAvailable, next.ThresholdUsed
	return !reflect.DeepEqual(l, next)
}

// setServed stores l as the served LUN of its number.
func (c *change) setServed(t *servedTarget, l *servedLUN) {
	c.write(func() { t.luns[l.ID] = l })
}

// copyOf returns a copy of the served LUN with that number.
func (c *change) copyOf(t *servedTarget, id int) (l servedLUN) {
	c.d.locked(func() { l = *t.luns[id] }) // its health may be changing
	return l
}

// update stores l as the served LUN of its number, until the change is undone.
func (c *change) update(t *servedTarget, l *servedLUN) {
	was := t.luns[l.ID]
	c.setServed(t, l)
	c.onUndo(func() error {
		c.setServed(t, was)
		return nil
	})
}

// remask changes which initiators see the LUN, and which may only read.
func (c *change) remask(t *servedTarget, next config.LUN) error {
	l := c.copyOf(t, next.ID)
	if slices.Equal(l.Initiators, next.Initiators) && slices.Equal(l.ReadOnlyFor, next.ReadOnlyFor) {
		return nil
	}
	if err := t.inventory.SetMask(uint16(next.ID), maskOf(next)); err != nil {
		return err
	}
	old := maskOf(l.LUN)
	c.onUndo(func() error { return t.inventory.SetMask(uint16(next.ID), old) })
	l.Initiators, l.ReadOnlyFor = next.Initiators, next.ReadOnlyFor
	c.update(t, &l)
	return nil
}

// resize changes the size of the LUN. Size 0 keeps the size of the medium.
func (c *change) resize(t *servedTarget, next config.LUN) error {
	d := c.d
	l := c.copyOf(t, next.ID)
	if l.Size == next.Size {
		return nil
	}
	switch {
	case next.Size == 0:
	case c.elsewhere(&next):
		if c.edited {
			if err := d.group.awaitSize(c.ctx, &next); err != nil {
				return err
			}
		}
	default:
		if err := mayResize(t.name, &l); err != nil {
			return err
		}
		r := resizing{d: d, t: t, unit: l.unit, next: next, old: l.unit.Size()}
		if err := r.to(c.ctx, int64(next.Size)); err != nil {
			return err
		}
		if l.Shared {
			if err := d.group.noteMedium(c.ctx, l.unit.Identity().Serial, l.unit.Info()); err != nil {
				return errors.Join(err, r.to(c.lasting(), r.old))
			}
		}
		c.onUndo(func() error { return r.to(c.lasting(), r.old) })
		c.tellSize(t, next.ID, r.old, int64(next.Size))
	}
	l.Size = next.Size
	c.update(t, &l)
	return nil
}

// elsewhere reports whether l is a LUN of the cluster whose size another gateway sets.
func (c *change) elsewhere(l *config.LUN) bool {
	return l.Shared && (c.edited || c.o.follow) && !c.d.group.servesHere(l)
}

// A resizing is the change of the size of one LUN.
type resizing struct {
	d    *Daemon
	t    *servedTarget
	unit *lun.Unit
	next config.LUN
	old  int64 // bytes
}

// noteOutgrown stores, or with so false forgets, that the file may be larger than before,
// if the LUN grows and lies on a file.
func (r *resizing) noteOutgrown(so bool) error {
	if r.next.Backend != "file" || int64(r.next.Size) < r.old {
		return nil
	}
	return r.d.mayOutgrow(r.next.Path, r.old, so)
}

// to sets the size in bytes. A store that exceeds its time limit is set back when it
// answers, because the change has failed by then.
func (r *resizing) to(ctx context.Context, size int64) error {
	if err := r.noteOutgrown(true); err != nil && size != r.old { // an undo has to proceed in any case
		return err
	}
	err := r.d.calls.do(ctx, r.d.waits.slow, storeKey(r.t.name, &r.next), fmt.Sprintf("setting its size to %d bytes", size),
		func(*call) error { return r.unit.Resize(size) },
		func(err error) {
			if err == nil {
				err = r.unit.Resize(r.old)
			}
			if err == nil {
				err = r.noteOutgrown(false)
			}
			r.d.log.Warn(lateAnswer, "target", r.t.name, "lun", r.next.ID, "octets", r.unit.Size(), "reason", err)
		})
	if !errors.Is(err, ErrStuck) { // otherwise the function above forgets it
		err = errors.Join(err, r.noteOutgrown(false))
	}
	return err
}

// replace opens a LUN again as next. A memory LUN keeps its data if its backend and block
// size stay the same.
func (c *change) replace(t *servedTarget, next config.LUN) error {
	d, old := c.d, t.luns[next.ID]
	if err := c.freePath(next.Path); err != nil {
		return err
	}
	before := old.unit.Size()
	between, err := lun.NewOpening(uint32(next.BlockSize), d.unitOptions(&next, old.unit.Identity()))
	if err != nil {
		return err
	}
	t.inventory.Replace(uint16(next.ID), between)
	c.onUndo(func() error {
		t.inventory.Replace(uint16(next.ID), between)
		return c.replaceBack(t, old)
	})
	ctx, cancel := context.WithTimeout(c.ctx, c.editDrain())
	left, err := d.node.Drain(ctx, t.inventory, uint16(next.ID))
	cancel()
	if err != nil {
		c.notes = append(c.notes, fmt.Sprintf("%d commands for LUN %d were cut off", left, next.ID))
	}
	l, err := c.reopen(t, old, next)
	if err != nil {
		return err
	}
	l.unit.InheritFrom(old.unit) // reservations, if it is the same disk
	if err := t.inventory.SetMask(uint16(next.ID), maskOf(next)); err != nil {
		return errors.Join(err, c.closeAgain(t, l, d.waits.close))
	}
	t.inventory.Replace(uint16(next.ID), l.unit)
	c.setServed(t, l)
	if old.fault == nil {
		c.tellSize(t, next.ID, before, l.unit.Size())
	}
	return nil
}

// replaceBack opens old again after its replacement failed. If that fails, too, the LUN
// is not ready, and the daemon retries.
func (c *change) replaceBack(t *servedTarget, old *servedLUN) error {
	last := t.luns[old.ID]
	l, failed := c.reopen(t, last, old.LUN)
	if failed != nil {
		var err error
		if l, err = c.readyOrNot(t, old.LUN, old.fresh, nil, failed); err != nil {
			return errors.Join(failed, err)
		}
	}
	if last.unit.Identity() != old.unit.Identity() { // the replacement was another disk
		last = old
	}
	l.unit.InheritFrom(last.unit)
	t.inventory.Replace(uint16(old.ID), l.unit)
	c.setServed(t, l)
	if old.fault != nil { // it was not ready before the change
		failed = nil
	}
	return errors.Join(failed, t.inventory.SetMask(uint16(old.ID), maskOf(old.LUN)))
}

// reopen closes the store of l, which initiators cannot reach, and opens that of next.
// Two memory LUNs of the same block size share the store.
func (c *change) reopen(t *servedTarget, l *servedLUN, next config.LUN) (*servedLUN, error) {
	d := c.d
	if l.fault == nil && l.Backend == "memory" && next.Backend == "memory" && l.BlockSize == next.BlockSize {
		id, err := d.state.ids.Get(identityKey(t.name, &next))
		if err != nil {
			return nil, err
		}
		unit, err := d.newUnit(l.unit.Detach(), &next, id)
		if err != nil {
			return nil, err
		}
		if int64(next.Size) != unit.Size() {
			err = unit.Resize(int64(next.Size))
		}
		return &servedLUN{LUN: next, unit: unit}, err
	}
	if !l.closed {
		if err := c.closeAgain(t, l, d.waits.slow); err != nil && !errors.Is(err, backend.ErrClosed) {
			return nil, err
		}
		c.write(func() { l.closed = true })
	}
	return c.openLUN(c.lasting(), t, next)
}
