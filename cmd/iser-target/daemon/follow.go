package daemon

import (
	"context"
	"errors"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/lun"
)

const (
	// firstRetry is after which time a store that is absent is looked for again; the
	// time doubles up to lastRetry.
	firstRetry = time.Second
	lastRetry  = 30 * time.Second
	// retryTime is how long that may take of a turn.
	retryTime = 200 * time.Millisecond
	// watchInterval is how often a file that is watched is looked at, and how long it
	// must be as it is before it is read: who writes it may not be done.
	watchInterval = time.Second
	// reloadWait bounds the wait for changes that are under way.
	reloadWait = time.Minute
)

// follow looks after what changes by itself until ctx ends: SIGHUP, the file if it is
// watched, and stores that are absent.
func (d *Daemon) follow(ctx context.Context, hup <-chan os.Signal) {
	tick := time.NewTicker(min(watchInterval, firstRetry) / 2)
	defer tick.Stop()
	w := watch{d: d} // which has seen nothing: the file may have changed since the start read it
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
			d.reloading(func() {
				w.seen, _ = w.look()
				d.reload(ctx, "SIGHUP")
			})
		case <-tick.C:
			w.tick(ctx)
			d.retryAbsent(ctx)
		}
	}
}

// reload applies the file.
func (d *Daemon) reload(ctx context.Context, why string) {
	ctx, cancel := context.WithTimeout(By(ctx, why), reloadWait)
	defer cancel()
	err := d.applyFile(ctx)
	var refused *ErrRefused
	switch {
	case errors.As(err, &refused):
		d.log.Error("configuration is as before", eventKey, "config", "because", why, "reason", err,
			"allow", strings.Join(append([]string{"iser-target config apply", d.path}, refused.Needs().Flags()...), " "))
	case err != nil:
		d.log.Error("configuration is as before", eventKey, "config", "because", why, "reason", err)
	default:
		for _, w := range d.warnings() {
			d.log.Warn("configuration", "reason", w)
		}
		d.growDevices(ctx)
		d.log.Info("configuration read again", eventKey, "config", "because", why, "path", d.path)
	}
}

func (d *Daemon) warnings() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := d.cfg.Warnings()
	for _, ch := range d.pending {
		list = append(list, describe(ch)+" takes effect when the target is started again")
	}
	return list
}

// growDevices takes notice of media that have grown, where no size is configured.
func (d *Daemon) growDevices(ctx context.Context) {
	if err := d.takeTurn(ctx); err != nil {
		d.log.Warn("media that have grown are not looked for", "reason", err)
		return
	}
	defer d.endTurn()
	end := time.Now().Add(d.waits.store)
	for _, t := range d.targets {
		for id, l := range t.luns {
			if l.Size != 0 || l.fault != nil {
				continue
			}
			log := d.log.With("target", t.name, "lun", id)
			tell := func(grown bool, err error) {
				if err != nil {
					log.Error("LUN is as before", "reason", err)
				} else if grown {
					log.Info("LUN has grown", eventKey, "lun", "octets", l.unit.Size())
				}
			}
			var grown bool // valid when the call is back
			_, err := d.calls.do(ctx, max(time.Until(end), d.waits.brief), storeKey(t.name, &l.LUN), "looking for its size",
				func(*call) (_ *lun.Unit, err error) {
					grown, err = l.unit.Grow()
					return nil, err
				},
				func(_ *lun.Unit, err error) { tell(grown, err) })
			tell(err == nil && grown, err)
		}
	}
}

// A watch is what is known of the configuration file. It is looked at rather than
// waited for: whatever an editor does to replace it, it is another file afterwards.
type watch struct {
	d       *Daemon
	seen    fileState // that was applied, or tried
	changed fileState // that is different, since
	since   time.Time
}

// A fileState is what a file has when it is the same.
type fileState struct {
	dev, ino uint64
	size     int64
	mtime    unix.Timespec
	ctime    unix.Timespec
}

func (w *watch) look() (s fileState, err error) {
	var st unix.Stat_t
	if err := unix.Stat(w.d.path, &st); err != nil {
		return s, err
	}
	return fileState{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}, nil
}

// tick applies the file if it is to be watched and has been another one for a while.
// What the daemon writes itself is the document that runs, and makes no steps.
func (w *watch) tick(ctx context.Context) {
	w.d.mu.Lock()
	watches := w.d.path != "" && w.d.cfg.Watch
	w.d.mu.Unlock()
	if !watches {
		return
	}
	now, err := w.look()
	switch {
	case err != nil, now == w.seen: // absent: it is being replaced
		w.changed = w.seen
	case now != w.changed:
		w.changed, w.since = now, time.Now()
	case time.Since(w.since) >= watchInterval:
		w.seen = now
		if err := w.d.takeTurn(ctx); err != nil {
			return // ctx has ended
		}
		same := w.d.checkEdited() == nil
		w.d.endTurn()
		if !same {
			w.d.reload(ctx, "file has changed")
		}
	}
}

// retryAbsent looks for stores that are absent, unless something is being changed.
func (d *Daemon) retryAbsent(ctx context.Context) {
	select {
	case d.turn <- struct{}{}:
		defer d.endTurn()
	default:
		return
	}
	end := time.Now().Add(retryTime)
	for _, t := range d.targets {
		for _, l := range t.luns {
			if time.Now().After(end) {
				return // to go on at the next tick: others wait for their turn
			}
			if l.fault != nil && (l.opening != nil || !time.Now().Before(l.again)) {
				d.retry(ctx, t, l)
			}
		}
	}
}

// retry opens the store of a LUN that is not ready, or looks what has become of that if it
// takes its time. It is the caller's turn.
func (d *Daemon) retry(ctx context.Context, t *servedTarget, l *servedLUN) {
	log := d.log.With("target", t.name, "lun", l.ID)
	c, wait := l.opening, time.Duration(0)
	var err error
	if c == nil {
		wait = d.waits.brief
		c, err = d.calls.begin(storeKey(t.name, &l.LUN), opening, d.opener(t.name, &l.LUN, l.fresh))
	}
	if err == nil {
		err = c.wait(ctx, wait)
	}
	if err != nil {
		if err.Error() != l.fault.Error() {
			log.Error("LUN not ready", eventKey, "lun", "reason", err)
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		l.fault = err
		if errors.Is(err, ErrStuck) {
			l.opening = c // which nobody asks for twice
			return
		}
		l.opening = nil
		l.wait = min(2*l.wait, lastRetry)
		l.again = time.Now().Add(l.wait)
		return
	}
	c.unit.InheritFrom(l.unit)
	d.mu.Lock()
	t.luns[l.ID] = &servedLUN{LUN: l.LUN, unit: c.unit}
	d.mu.Unlock()
	d.discard(t.inventory.Replace(uint16(l.ID), c.unit))
	log.Info("LUN ready", eventKey, "lun", "octets", c.unit.Size())
	if err := d.forgetShrinks(); err != nil {
		log.Error("state_dir", "reason", err)
	}
}

// discard closes a unit without a store.
func (d *Daemon) discard(u *lun.Unit) {
	if u != nil {
		u.Close() // which does nothing that could fail
	}
}
