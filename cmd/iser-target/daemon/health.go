package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/checked"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
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
	// unsure: the look said nothing about the file. A LUN that is worse stays so: else an orphan would take
	// writes again while its file system hangs.
	unsure bool
}

// Reasons of health, with what the operator can do.
const (
	reasonUnsynced = "a sync has failed (%s): what was written before may be lost, and syncs fail until lun recover. Check the file system and its device (dmesg)"
	reasonDeleted  = "%v: writes and syncs are refused. As root, copy it back from /proc/%d/fd (ls -l shows it as deleted), or restore it, and use lun recover"
	reasonReplaced = "%v: writes and syncs are refused. Put the old file back, or accept the new one with lun recover"
	reasonError    = "the store failed a command: %v, last at %s. Check the file system and its device (dmesg)"
	reasonCut      = "%v: what was behind its end is lost. Restore the data, or make the LUN smaller with lun resize"
	reasonBefore   = "the process before this one has found it so, and this one looks soon"
)

// reasonHangs returns the reason of a LUN whose device does not answer.
func reasonHangs(err error) string { return err.Error() + ". Check the file system and its device" }

// watchHealth looks at all LUNs again and again until ctx ends.
func (d *Daemon) watchHealth(ctx context.Context) { every(ctx, d.waits.health, d.lookAtLUNs) }

// lookAtLUNs updates the health of all LUNs. The LUNs of a device have one call: a device that hangs keeps one
// thread, and delays no look at another device, and nothing else that is done with its LUNs.
func (d *Daemon) lookAtLUNs() {
	devices := map[string][]watched{}
	d.locked(func() {
		for _, t := range d.served.targets {
			for _, l := range t.luns {
				if l.fault != nil || l.closed {
					continue
				}
				key := "looks at others"
				if device, ok := l.unit.Device(); ok {
					key = fmt.Sprintf("looks at device %#x", device)
				}
				devices[key] = append(devices[key], watched{t, l, l.recovered})
			}
		}
	})
	var begun []*call
	for key, list := range devices {
		c, err := d.calls.begin(key, callInspect, func(*call) error {
			for _, w := range list {
				if now, known := healthOf(w.l, w.l.unit.Inspect()); known {
					d.setHealth(w, now)
				}
				w.l.unit.SampleSpace()
			}
			return nil
		})
		if err == nil {
			begun = append(begun, c)
		} else if err := d.calls.stuck(key); err != nil { // or so many stores hang that these LUNs keep their health
			for _, w := range list {
				d.setHealth(w, health{is: lun.Degraded, reason: reasonHangs(err), unsure: true})
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), healthTime)
	defer cancel()
	for _, c := range begun {
		_ = c.wait(ctx, healthTime) // the next look finds it if it hangs
	}
}

// A watched LUN is one whose store is open, with the number of its recoveries.
type watched struct {
	t         *servedTarget
	l         *servedLUN
	recovered int
}

// look returns the health of a LUN. known is false if its file system does not answer, which lun list shows
// anyway, or if the store is being closed.
func (d *Daemon) look(ctx context.Context, t *servedTarget, l *servedLUN) (now health, known bool) {
	return healthOf(l, d.calls.do(ctx, healthTime, storeKey(t.name, &l.LUN), callInspect, func(*call) error { return l.unit.Inspect() }, nil))
}

// errorMemory is how long a LUN is degraded after its store failed a command.
const errorMemory = 5 * time.Minute

// healthOf returns what the error of Inspect says of l, like look.
func healthOf(l *servedLUN, err error) (now health, known bool) {
	last, failed := l.unit.LastError()
	switch {
	case errors.Is(err, backend.ErrDeleted):
		now.is, now.reason = lun.Orphaned, fmt.Sprintf(reasonDeleted, err, os.Getpid())
	case errors.Is(err, backend.ErrReplaced):
		now.is, now.reason = lun.Orphaned, fmt.Sprintf(reasonReplaced, err)
	case errors.Is(err, backend.ErrUnsynced), l.unit.Unsynced(), l.unit.SyncFailure() != nil:
		l.unit.NoteSyncFailure(backend.ErrUnsynced)            // tries again to store it
		if now = initialHealth(l.unit); now.is != lun.Failed { // it is being recovered
			now.is, now.reason = lun.Failed, fmt.Sprintf(reasonUnsynced, backend.ErrUnsynced)
		}
	case errors.Is(err, backend.ErrCorrupt), errors.Is(err, checked.ErrSide):
		now.is, now.reason = lun.Degraded, err.Error()
	case errors.Is(err, backend.ErrCut):
		now.is, now.reason = lun.Degraded, fmt.Sprintf(reasonCut, err)
	case errors.Is(err, ErrStuck), errors.Is(err, backend.ErrClosed):
		return now, false
	case err != nil:
		now.is, now.reason, now.unsure = lun.Degraded, err.Error(), true
	case failed && time.Since(last.At) < errorMemory:
		now.is, now.reason = lun.Degraded, fmt.Sprintf(reasonError, last.Err, last.At.Format(time.TimeOnly))
	}
	return now, true
}

// initialHealth returns the health of a unit that nobody has looked at: failed if a sync has failed, also before a
// restart.
func initialHealth(u *lun.Unit) health {
	f := u.SyncFailure()
	if f == nil {
		return health{}
	}
	return health{is: lun.Failed, reason: fmt.Sprintf(reasonUnsynced, f.Reason), since: f.Since.Local()}
}

// newServed returns a LUN whose store is open.
func newServed(l config.LUN, u *lun.Unit) *servedLUN {
	return &servedLUN{LUN: l, unit: u, health: initialHealth(u)}
}

// pruneFailures forgets failed syncs of LUNs that the configuration does not have any longer. Those of an identity
// that is not known stay: a file can bring it back.
func (d *Daemon) pruneFailures() {
	if d.state.failures == nil {
		return
	}
	keep := map[string]bool{} // by NAA
	serials := d.state.ids.Serials()
	for i := range d.served.cfg.Targets {
		t := &d.served.cfg.Targets[i]
		for j := range t.LUNs {
			keep[serials[identityKey(t.Name, &t.LUNs[j])]] = true
		}
	}
	for _, naa := range d.state.failures.Units() {
		if keep[naa] || !d.state.ids.Has(naa) {
			continue
		}
		if _, err := d.state.failures.Remove(naa, state.Patience{}); err != nil {
			d.log.Warn("failed sync of a removed LUN stays on record", eventKey, "service", "naa", naa, "reason", err)
		}
	}
}

// forgetFailure forgets the failed sync of a LUN that was removed.
func (d *Daemon) forgetFailure(u *lun.Unit) error {
	if u.Absent() && d.state.failures != nil {
		_, err := d.state.failures.Remove(u.Identity().Serial, state.Patience{})
		return err
	}
	return u.DropFailure()
}

// setHealth notes the health of a LUN, and tells when it changes. A look that began before a recovery of the
// LUN changes nothing.
func (d *Daemon) setHealth(w watched, now health) {
	t, l := w.t, w.l
	if now.since.IsZero() {
		now.since = time.Now()
	}
	d.mu.Lock()
	was := l.health
	gone := t.luns[l.ID] != l || l.recovered != w.recovered || now.unsure && was.is > now.is
	switch {
	case gone:
	case was.is != now.is:
		l.health = now
	case was.reason != now.reason:
		l.health.reason = now.reason
	}
	if !gone {
		l.unit.SetHealth(now.is)
	}
	d.mu.Unlock()
	if gone || was.is == now.is {
		return
	}
	log := d.log.With(eventKey, "lun", "target", t.name, "lun", l.ID, "health", now.is.String())
	if now.is == lun.Healthy {
		log.Info("LUN is healthy again", "was", was.is.String())
	} else {
		log.Error("LUN is not healthy", "reason", now.reason)
	}
}

// ErrHealthy refuses to recover a LUN that is healthy.
var ErrHealthy = errors.New("is healthy, and needs no recovery")

// Recover uses the file or device of a LUN again that is not healthy. Its sessions stay. After a failed sync,
// syncs are possible again; what was written before may be lost. After an orphan the LUN has the file that is
// in place now. If that is missing, or of another size, or cannot be written, Recover fails, and the LUN keeps
// the file that it has.
func (d *Daemon) Recover(ctx context.Context, target string, id int) (*schema.Recovery, error) {
	e, err := d.edit(ctx)
	if err != nil {
		return nil, err
	}
	defer e.release()
	l, err := d.lun(target, id)
	if err != nil {
		return nil, err
	}
	wrap := func(err error) error { return fmt.Errorf("LUN %d of %s: %w", id, target, err) }
	if l.fault != nil {
		return nil, fmt.Errorf("LUN %d of %s is not ready: %w", id, target, l.fault)
	}
	if err := d.group.mayRecover(&l.LUN); err != nil {
		return nil, wrap(err)
	}
	t := d.served.target(target)
	before, known := d.look(ctx, t, l)
	switch {
	case !known:
		return nil, wrap(ErrStuck)
	case before.is == lun.Healthy:
		d.setHealth(watched{t, l, l.recovered}, before)
		return nil, fmt.Errorf("LUN %d of %s %w", id, target, ErrHealthy)
	}
	d.locked(func() {
		if before.since = time.Now(); l.health.is == before.is {
			before.since = l.health.since
		}
	})
	d.log.WarnContext(ctx, "LUN is being recovered", eventKey, "lun", "target", target, "lun", id, "reason", before.reason)
	err = d.calls.do(ctx, d.waits.slow, storeKey(target, &l.LUN), "recovering it", func(*call) error { return recoverUnit(l.unit, &l.LUN) },
		func(err error) { d.log.Warn(lateAnswer, "target", target, "lun", id, "reason", err) })
	if errors.Is(err, lun.ErrNotInPlace) {
		err = e.reopenInPlace(ctx, t, l)
	}
	if err != nil {
		return nil, wrap(err)
	}
	d.locked(func() {
		l = t.luns[id]
		l.recovered++
	})
	after, known := d.look(ctx, t, l)
	if known {
		d.setHealth(watched{t, l, l.recovered}, after)
	}
	d.log.InfoContext(ctx, "LUN is recovered", eventKey, "lun", "target", target, "lun", id, "naa", l.unit.Identity().Serial)
	return &schema.Recovery{Before: before.is.String(), Health: after.is.String(), Lost: before.lost(l.Path)}, nil
}

// reopenInPlace closes the store of l and opens it again.
func (e *editor) reopenInPlace(ctx context.Context, t *servedTarget, l *servedLUN) error {
	c := &change{editor: e, ctx: context.WithoutCancel(ctx), o: ChangeOptions{Now: true}, cfg: e.d.served.cfg}
	if err := c.replace(t, l.LUN); err != nil {
		return errors.Join(err, c.rollBack())
	}
	return t.luns[l.ID].unit.ForgetFailure()
}

// recoverUnit recovers unit, unless its path has a file that was served as another LUN. It marks the file that
// the unit gets.
func recoverUnit(unit *lun.Unit, l *config.LUN) error {
	naa := unit.Identity().Serial
	if l.Shared && !unit.MediumFailed() { // the store of another time or gateway has failed
		return unit.ForgetFailure()
	}
	if found, inode, marked := readMark(l.Path); l.Backend == "file" && marked && found.naa != naa && found.inode == inode {
		return fmt.Errorf("%s was served with NAA %s, and this LUN has %s. Bring back the file of this LUN, or create another LUN", l.Path, found.naa, naa)
	}
	if err := unit.Recover(); err != nil || l.Backend != "file" {
		return err
	}
	if found, inode, _ := readMark(l.Path); inode != 0 && found != (mark{naa, inode}) {
		return mark{naa, inode}.write(l.Path)
	}
	return nil
}

// lost returns which data a recovery from h may have cost.
func (h *health) lost(path string) string {
	since := h.since.Format(time.DateTime)
	switch h.is {
	case lun.Failed:
		return "Data that initiators wrote before " + since + " may be missing. Check it, for example with fsck, or restore a backup"
	case lun.Orphaned:
		return "The LUN has the content of " + path + ". The file that it had until then lost that path before " + since + ", and is no longer served. Check the data, for example with fsck"
	}
	return ""
}

// ErrUnwell refuses a change of a LUN that has to be recovered first.
var ErrUnwell = errors.New("nothing was changed: recover the LUN first")

// mayResize returns an ErrUnwell if a resize of l would not last, or could not be synced.
func mayResize(target string, l *servedLUN) error {
	if h := l.health; h.is == lun.Failed || h.is == lun.Orphaned {
		return fmt.Errorf("LUN %d of %s is %s: %s: %w", l.ID, target, h.is, h.reason, ErrUnwell)
	}
	return nil
}
