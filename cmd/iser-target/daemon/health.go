package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun"
)

const (
	// healthInterval is how often the daemon looks at the files of LUNs.
	healthInterval = 5 * time.Second
	// healthTime is how long it waits for a file system that does not answer.
	healthTime = time.Second
)

// callInspect is what a call does that looks at a file.
const callInspect = "looking at its file"

// health is what is known of a LUN that has a store. The zero value is that of a LUN that nobody has looked at.
type health struct {
	is     lun.Health
	reason string
	since  time.Time
}

// Reasons of health, with what the operator can do.
const (
	reasonUnsynced = "a sync has failed: what was written before may be lost, and syncs fail until lun recover. Check the file system and its device (dmesg)"
	reasonDeleted  = "%v: writes and syncs are refused. Copy it back from /proc/%d/fd (ls -l shows it as deleted), or restore it, and use lun recover"
	reasonReplaced = "%v: writes and syncs are refused. Put the old file back, or accept the new one with lun recover"
	reasonCut      = "%v: what was behind its end is lost. Restore the data, or make the LUN smaller with lun resize"
)

// watchHealth looks at all LUNs again and again until ctx ends.
func (d *Daemon) watchHealth(ctx context.Context) { every(ctx, d.waits.health, d.lookAtLUNs) }

// lookAtLUNs updates the health of all LUNs. A file system that hangs delays only the look at its own LUNs.
func (d *Daemon) lookAtLUNs() {
	var list []*removal
	d.locked(func() {
		for _, t := range d.served.targets {
			for _, l := range t.luns {
				if l.fault == nil && !l.closed {
					list = append(list, &removal{t: t, l: l})
				}
			}
		}
	})
	ctx, cancel := context.WithTimeout(context.Background(), d.waits.health)
	defer cancel()
	inParallel(ctx, d.waits.slot, list, func(r *removal) error {
		now, known := d.look(ctx, r.t, r.l)
		if known {
			d.setHealth(r.t, r.l, now)
		}
		return nil
	})
}

// look returns the health of a LUN. known is false if its file system does not answer, which lun list shows
// anyway, or if the store is being closed.
func (d *Daemon) look(ctx context.Context, t *servedTarget, l *servedLUN) (now health, known bool) {
	err := d.calls.do(ctx, healthTime, storeKey(t.name, &l.LUN), callInspect, func(*call) error { return l.unit.Inspect() }, nil)
	switch {
	case errors.Is(err, backend.ErrDeleted):
		now.is, now.reason = lun.Orphaned, fmt.Sprintf(reasonDeleted, err, os.Getpid())
	case errors.Is(err, backend.ErrReplaced):
		now.is, now.reason = lun.Orphaned, fmt.Sprintf(reasonReplaced, err)
	case errors.Is(err, backend.ErrUnsynced), l.unit.Unsynced():
		now.is, now.reason = lun.Failed, reasonUnsynced
	case errors.Is(err, backend.ErrCut):
		now.is, now.reason = lun.Degraded, fmt.Sprintf(reasonCut, err)
	case err != nil:
		return now, false
	}
	return now, true
}

// setHealth notes the health of l, and tells when it changes.
func (d *Daemon) setHealth(t *servedTarget, l *servedLUN, now health) {
	now.since = time.Now()
	d.mu.Lock()
	was := l.health
	gone := t.luns[l.ID] != l
	if !gone && (was.is != now.is || was.reason != now.reason) {
		l.health = now
	}
	d.mu.Unlock()
	if gone || was.is == now.is {
		return
	}
	l.unit.SetHealth(now.is)
	log := d.log.With(eventKey, "lun", "target", t.name, "lun", l.ID, "health", now.is.String())
	if now.is == lun.Healthy {
		log.Info("LUN is healthy again", "was", was.is.String())
	} else {
		log.Error("LUN is not healthy", "reason", now.reason)
	}
}

// ErrHealthy refuses to recover a LUN that is healthy.
var ErrHealthy = errors.New("is healthy, and needs no recovery")

// Recover reopens the store of a LUN that is not healthy. Its sessions stay. After a failed sync, syncs are
// possible again; what was written before may be lost. After an orphan it serves the file that is in place
// now. Recover fails, and changes nothing, if the file is missing.
func (d *Daemon) Recover(ctx context.Context, target string, id int) error {
	e, err := d.edit(ctx)
	if err != nil {
		return err
	}
	defer e.release()
	var t *servedTarget
	var l *servedLUN
	d.locked(func() {
		for _, s := range d.served.targets {
			if s.name == target {
				t, l = s, s.luns[id]
			}
		}
	})
	switch {
	case t == nil:
		return fmt.Errorf("target %s: %w", target, ErrNotFound)
	case l == nil:
		return fmt.Errorf("LUN %d of %s: %w", id, target, ErrNotFound)
	case l.fault != nil:
		return fmt.Errorf("LUN %d of %s is not ready: %w", id, target, l.fault)
	}
	wrap := func(err error) error { return fmt.Errorf("LUN %d of %s: %w", id, target, err) }
	now, known := d.look(ctx, t, l)
	switch {
	case !known:
		return wrap(ErrStuck)
	case now.is == lun.Healthy:
		d.setHealth(t, l, now)
		return fmt.Errorf("LUN %d of %s %w", id, target, ErrHealthy)
	}
	if l.Path != "" {
		if err := d.calls.do(ctx, d.waits.store, storeKey(t.name, &l.LUN), callInspect, func(*call) error {
			_, err := os.Stat(l.Path)
			return err
		}, nil); err != nil {
			return wrap(err)
		}
	}
	d.log.WarnContext(ctx, "LUN is being recovered", eventKey, "lun", "target", target, "lun", id, "reason", now.reason)
	c := &change{editor: e, ctx: context.WithoutCancel(ctx), o: ChangeOptions{Now: true}, cfg: d.served.cfg}
	if err := c.replace(t, l.LUN); err != nil {
		return wrap(errors.Join(err, c.rollBack()))
	}
	d.locked(func() { l = t.luns[id] })
	l.unit.Recover()
	d.log.InfoContext(ctx, "LUN is recovered", eventKey, "lun", "target", target, "lun", id, "naa", l.unit.Identity().Serial)
	return nil
}
