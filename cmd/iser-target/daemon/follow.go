package daemon

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/iser-target/iser-target/config"
	"golang.org/x/sys/unix"
)

const (
	// firstRetry is the time until the daemon opens an absent store again. It doubles up
	// to lastRetry.
	firstRetry = time.Second
	lastRetry  = 30 * time.Second
	// retryTime bounds how long retries keep other changes waiting.
	retryTime = 200 * time.Millisecond
	// watchInterval is how long a watched file must not change before the daemon reads
	// it, because an editor may still be writing it.
	watchInterval = time.Second
	// reloadWait bounds the wait for changes in progress.
	reloadWait = time.Minute
)

// Reload makes the daemon read the configuration file again and apply it. It does not
// wait for that. The log has why and the outcome.
func (d *Daemon) Reload(why string) {
	select {
	case d.reloads <- why:
	default: // one is waiting already
	}
}

// follow handles what happens without a request until ctx ends: Reload, changes of the
// file if it is watched, and stores that are absent.
func (d *Daemon) follow(ctx context.Context) {
	tick := time.NewTicker(min(watchInterval, firstRetry) / 2)
	defer tick.Stop()
	w := watch{d: d} // has seen nothing: the file may have changed since the start read it
	for {
		select {
		case <-ctx.Done():
			return
		case why := <-d.reloads:
			d.reloading(func() {
				w.seen, _ = w.stat()
				d.reload(ctx, why)
			})
		case <-tick.C:
			w.tick(ctx)
			d.retryAbsent(ctx)
		}
	}
}

// reload applies the configuration file.
func (d *Daemon) reload(ctx context.Context, why string) {
	ctx, cancel := context.WithTimeout(By(ctx, why), reloadWait)
	defer cancel()
	err := d.applyFile(ctx)
	log := d.log.With(eventKey, "config", "because", why)
	if err != nil {
		d.applied.fail()
		log = log.With("reason", err)
		if refused, ok := errors.AsType[*ErrRefused](err); ok {
			flags := strings.Join(refused.Needs().Flags(), " ")
			log = log.With("allow", "iser-target config apply "+d.path+" "+flags)
		}
		log.Error("configuration file was not applied")
		return
	}
	d.warn()
	d.growDevices(ctx)
	log.Info("configuration file was applied", "path", d.path)
}

// applied is the outcome of the last attempt to apply the configuration file.
type applied struct {
	mu     sync.Mutex
	failed bool
	at     time.Time // of the last success
}

// last reports whether the last attempt succeeded, and when the configuration was applied last.
func (a *applied) last() (ok bool, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return !a.failed, a.at
}

// succeed notes that the file is the running configuration: at the start, after a reload, and after every other change, which writes the file.
func (a *applied) succeed() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.failed, a.at = false, time.Now()
}

// fail notes that a reload was refused.
func (a *applied) fail() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.failed = true
}

// warn logs what the user should know about the running configuration.
func (d *Daemon) warn() {
	d.mu.Lock()
	doc, cfg, pending := d.served.doc, d.served.cfg, slices.Clone(d.served.pending)
	d.mu.Unlock()
	list := cfg.Warnings() // without the lock: a directory of a secret file may be on a disk that hangs
	for i, w := range list {
		list[i] = doc.Located(w)
	}
	if d.path != "" {
		if w := config.LooseDirectory(d.path); w != "" {
			list = append(list, d.path+": "+w)
		}
	}
	for _, ch := range pending {
		list = append(list, atNextStart(ch))
	}
	for _, w := range list {
		d.log.Warn("configuration", "reason", w)
	}
}

// growDevices adopts the sizes of media that have grown, for LUNs without a configured size.
func (d *Daemon) growDevices(ctx context.Context) {
	e, err := d.edit(ctx)
	if err != nil {
		d.log.Warn("sizes of media were not read", "reason", err)
		return
	}
	defer e.release()
	end := time.Now().Add(d.waits.store)
	for _, t := range d.served.targets {
		for id, l := range t.luns {
			if l.Size != 0 || l.fault != nil {
				continue
			}
			log := d.log.With("target", t.name, "lun", id)
			var grown bool // valid when the call is back without an error
			report := func(err error) {
				if err != nil {
					log.Error("size of the medium was not read", "reason", err)
				} else if grown {
					log.Info("LUN has grown", eventKey, "lun", "octets", l.unit.Size())
				}
			}
			report(d.calls.do(ctx, max(time.Until(end), d.waits.brief), storeKey(t.name, &l.LUN), "reading its size",
				func(*call) (err error) {
					grown, err = l.unit.Grow()
					return err
				},
				report))
		}
	}
}

// A watch polls the configuration file. Polling notices every way by which an editor
// replaces a file.
type watch struct {
	d       *Daemon
	seen    fileState // that was applied, or tried
	changed fileState // the last different one
	since   time.Time // when changed was first seen
}

// A fileState is equal for two looks at an unchanged file.
type fileState struct {
	dev, ino uint64
	size     int64
	mtime    unix.Timespec
	ctime    unix.Timespec
}

// stat returns the state of the file.
func (w *watch) stat() (s fileState, err error) {
	var st unix.Stat_t
	if err := unix.Stat(w.d.path, &st); err != nil {
		return s, err
	}
	return fileState{st.Dev, st.Ino, st.Size, st.Mtim, st.Ctim}, nil
}

// tick applies the file if it is watched and changed watchInterval ago. It ignores what
// the daemon wrote itself.
func (w *watch) tick(ctx context.Context) {
	w.d.mu.Lock()
	watched := w.d.path != "" && w.d.served.cfg.Watch
	w.d.mu.Unlock()
	if !watched {
		return
	}
	now, err := w.stat()
	switch {
	case err != nil, now == w.seen: // an absent file is being replaced
		w.changed = w.seen
	case now != w.changed:
		w.changed, w.since = now, time.Now()
	case time.Since(w.since) >= watchInterval:
		w.seen = now
		e, err := w.d.edit(ctx)
		if err != nil {
			return // ctx has ended
		}
		same := w.d.checkEdited() == nil
		e.release()
		if !same {
			w.d.reload(ctx, "file has changed")
		}
	}
}

// retryAbsent opens absent stores again, unless a change is in progress.
func (d *Daemon) retryAbsent(ctx context.Context) {
	e := d.tryEdit()
	if e == nil {
		return
	}
	defer e.release()
	end := time.Now().Add(retryTime)
	for _, t := range d.served.targets {
		for _, l := range t.luns {
			if time.Now().After(end) {
				return // until the next tick, so that changes need not wait
			}
			if l.fault != nil && (l.attempt != nil || !time.Now().Before(l.retryAt)) {
				e.retry(ctx, t, l)
			}
		}
	}
}

// retry opens the store of a LUN that is not ready, or checks whether the attempt before has ended.
func (e *editor) retry(ctx context.Context, t *servedTarget, l *servedLUN) {
	d := e.d
	log := d.log.With("target", t.name, "lun", l.ID)
	c, timeout := l.attempt, time.Duration(0)
	var err error
	if c == nil {
		timeout = d.waits.brief
		c, err = d.calls.begin(storeKey(t.name, &l.LUN), callOpen, e.opener(t.name, &l.LUN, l.fresh))
	}
	if err == nil {
		err = c.wait(ctx, timeout)
	}
	if c != nil && errors.Is(err, ErrStuck) && !errors.Is(l.fault, ErrStuck) && time.Since(c.since) < d.waits.store {
		d.locked(func() { l.attempt = c }) // the reason stays: a server may take longer than a file
		return
	}
	if err != nil {
		if err.Error() != l.fault.Error() {
			log.Error("LUN not ready", eventKey, "lun", "reason", err)
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		l.fault = err
		if errors.Is(err, ErrStuck) {
			l.attempt = c
			return
		}
		l.attempt = nil
		l.wait = min(2*l.wait, lastRetry)
		l.retryAt = time.Now().Add(l.wait)
		return
	}
	c.unit.InheritFrom(l.unit)
	e.write(func() { t.luns[l.ID] = newServed(l.LUN, c.unit) })
	if old := t.inventory.Replace(uint16(l.ID), c.unit); old != nil {
		old.Close() // cannot fail: it has no store
	}
	log.Info("LUN ready", eventKey, "lun", "octets", c.unit.Size(), "health", c.unit.Health().String())
	if err := e.forgetShrinks(); err != nil {
		log.Error("state_dir", "reason", err)
	}
}
