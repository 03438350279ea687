package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/gotgt"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/security"
)

// In the state directory: who is who of the LUNs, who has reserved them, what
// initiators have set in them for good, and which are being sanitized.
const (
	identitiesFile   = "identities.json"
	reservationsFile = "reservations.json"
	settingsFile     = "settings.json"
	sanitizeFile     = "sanitize.json"
)

// A servedTarget is a target and the LUNs that it has at the time. Beside its name and
// inventory it is guarded as what Daemon.mu guards.
type servedTarget struct {
	name      string
	inventory *lun.Inventory
	luns      map[int]*servedLUN // by LUN
}

// A servedLUN is a LUN. It is not changed but by whose turn it is, with Daemon.mu held.
type servedLUN struct {
	config.LUN
	unit *lun.Unit
	// fault is why there is no store; nil: there is one.
	fault  error
	again  time.Time     // when to try again
	wait   time.Duration // until the time after that
	fresh  bool          // the LUN had never been there: its file may be made
	closed bool          // it has been closed, to be opened anew
	// opening is the attempt to open the store that has not come to an end, or nil.
	opening *call
}

func newTarget(c *config.Target, tpgts []uint16) *servedTarget {
	return &servedTarget{c.Name, lun.NewInventory(tpgts...), map[int]*servedLUN{}}
}

// config is t as package iscsi wants it.
func (t *servedTarget) config(c *config.Target, of *config.Config) (iscsi.TargetConfig, error) {
	who, err := security.Compile(c.Initiators)
	if err != nil {
		return iscsi.TargetConfig{}, fmt.Errorf("target %s: %w", c.Name, err)
	}
	chap, err := c.Auth.CHAP()
	if err != nil {
		return iscsi.TargetConfig{}, fmt.Errorf("target %s: auth: %w", c.Name, err)
	}
	return iscsi.TargetConfig{
		Name: c.Name, Alias: c.Alias, Initiators: who, Auth: chap,
		Redirect: iscsi.Redirect{Address: c.Redirect.To, Permanent: c.Redirect.Permanent},
		LUNs:     t.inventory, PortalGroups: of.TPGTs(c),
	}, nil
}

// add lets initiators have l.
func (t *servedTarget) add(l *servedLUN) error {
	mask, err := maskOf(l.LUN)
	if err == nil {
		err = t.inventory.AddMasked(uint16(l.ID), l.unit, mask)
	}
	if err != nil {
		return fmt.Errorf("target %s, LUN %d: %w", t.name, l.ID, err)
	}
	t.luns[l.ID] = l
	return nil
}

// openState opens the files of the state directory; with an empty name there are
// none.
func (d *Daemon) openState(dir string) (err error) {
	d.ids = state.Ephemeral()
	if dir == "" {
		return nil
	}
	ids, err := state.OpenIdentities(filepath.Join(dir, identitiesFile))
	if err != nil {
		return fmt.Errorf("state_dir: %w", err)
	}
	d.ids = ids
	if err := d.shrinks.open(dir); err != nil {
		return fmt.Errorf("state_dir: %w", err)
	}
	if d.reservations, err = lun.OpenReservations(filepath.Join(dir, reservationsFile)); err != nil {
		return fmt.Errorf("state_dir: %w", err)
	}
	if d.settings, err = lun.OpenSettings(filepath.Join(dir, settingsFile)); err != nil {
		return fmt.Errorf("state_dir: %w", err)
	}
	if d.sanitizations, err = lun.OpenSanitizations(filepath.Join(dir, sanitizeFile)); err != nil {
		return fmt.Errorf("state_dir: %w", err)
	}
	return nil
}

// identityKey is what the identity of a LUN belongs to.
func identityKey(target string, l *config.LUN) string {
	return fmt.Sprintf("%s/%d/%s:%s", target, l.ID, l.Backend, l.Path)
}

var errMissing = errors.New("file is missing: it was there before, and would be made anew without its data. " +
	"Bring it back, or remove the LUN and create it again")

// openLUN makes a logical unit, for which its store has that time. Without the store there
// is none.
func (d *Daemon) openLUN(ctx context.Context, most time.Duration, t *servedTarget, l config.LUN) (*servedLUN, error) {
	fresh := !d.ids.Known(identityKey(t.name, &l))
	unit, err := d.calls.do(ctx, most, storeKey(t.name, &l), opening, d.opener(t.name, &l, fresh), func(u *lun.Unit, err error) {
		if err == nil {
			err = u.Close()
		}
		d.log.Warn("the store answers that nobody waited for", "target", t.name, "lun", l.ID, "reason", err)
	})
	if err != nil {
		return nil, err
	}
	return &servedLUN{LUN: l, unit: unit}, nil
}

// openOrWait is openLUN, but makes a logical unit that is not ready if its store cannot be
// opened.
func (d *Daemon) openOrWait(ctx context.Context, most time.Duration, t *servedTarget, l config.LUN) (*servedLUN, error) {
	fresh := !d.ids.Known(identityKey(t.name, &l))
	c, err := d.calls.begin(storeKey(t.name, &l), opening, d.opener(t.name, &l, fresh))
	if err == nil {
		err = c.wait(ctx, most)
	}
	return d.opened(t, l, fresh, c, err)
}

// opened is what has come of opening a store: a LUN, ready or not.
func (d *Daemon) opened(t *servedTarget, l config.LUN, fresh bool, c *call, err error) (*servedLUN, error) {
	if err == nil {
		return &servedLUN{LUN: l, unit: c.unit}, nil
	}
	return d.notReady(t, l, fresh, c, err)
}

// notReady makes a logical unit whose store cannot be opened; c is what goes on with that,
// or has come to an end, or nil.
func (d *Daemon) notReady(t *servedTarget, l config.LUN, fresh bool, c *call, reason error) (*servedLUN, error) {
	id, err := d.ids.Promise(identityKey(t.name, &l))
	if err != nil {
		return nil, err
	}
	unit, err := lun.NewAbsent(uint32(l.BlockSize), d.unitOptions(&l, id))
	if err != nil {
		return nil, err
	}
	d.log.Error("LUN not ready", eventKey, "lun", "target", t.name, "lun", l.ID, "reason", reason)
	served := &servedLUN{LUN: l, unit: unit, fault: reason, again: time.Now().Add(firstRetry), wait: firstRetry, fresh: fresh}
	if errors.Is(reason, ErrStuck) {
		served.opening = c
	}
	return served, nil
}

// opening is the what of a call that opens.
const opening = "opening it"

// errLeft ends the opening of a store that nobody waits for.
var errLeft = errors.New("nobody waits for the store any more")

// opener opens the store of a LUN, as a call. It is the caller's turn now, and may not be
// when it does.
func (d *Daemon) opener(target string, l *config.LUN, fresh bool) func(*call) (*lun.Unit, error) {
	open, config := d.openStore, *l
	return func(c *call) (*lun.Unit, error) { return d.openUnit(target, &config, fresh, open, c.isLeft) }
}

// closeLUN closes the store of a LUN that nobody has any more. late follows what takes
// longer than that time, or goes on when ctx has ended; then the error is an ErrStuck.
func (d *Daemon) closeLUN(ctx context.Context, most time.Duration, t *servedTarget, l *servedLUN, late func(error)) error {
	if c := l.opening; c != nil { // which closes what it opens, if it ever does
		if err := c.wait(ctx, 0); errors.Is(err, ErrStuck) && c.leave(func(err error) {
			if err == nil {
				c.unit.Close()
			}
		}) {
			return nil
		}
		if c.err != nil {
			return nil
		}
		l = &servedLUN{LUN: l.LUN, unit: c.unit}
	}
	if l.fault != nil { // there is no store
		return nil
	}
	_, err := d.calls.do(ctx, most, storeKey(t.name, &l.LUN), closing, func(*call) (*lun.Unit, error) { return nil, l.unit.Close() },
		func(_ *lun.Unit, err error) { late(err) })
	return err
}

// openUnit opens the store of a LUN and makes its logical unit. A file that was there
// once is not made anew, unless it is there and empty: then it is another disk with an
// identity of its own. Whether it is known is asked first, and a new identity is
// stored behind the file, so that a crash in between cannot leave a file that was never
// there as one that is missing, nor a new disk with the identity of an old one.
//
// It may be the turn of anybody. open is openStore, and what is not wanted any more ends
// when isLeft tells so.
func (d *Daemon) openUnit(target string, l *config.LUN, fresh bool, open func(*config.LUN) (backend.Store, error), isLeft func() bool) (*lun.Unit, error) {
	key := identityKey(target, l)
	if l.Backend == "file" && !fresh {
		switch fi, err := os.Stat(l.Path); {
		case errors.Is(err, fs.ErrNotExist):
			return nil, errMissing
		case err == nil && fi.Size() == 0:
			if _, err := d.ids.Renew(key); err != nil {
				return nil, err
			}
		}
	}
	if isLeft() {
		return nil, errLeft
	}
	store, err := open(l)
	if err != nil {
		return nil, err
	}
	if isLeft() {
		return nil, errors.Join(errLeft, store.Close())
	}
	id, err := d.ids.Get(key)
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	unit, err := lun.New(store, d.unitOptions(l, id))
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return unit, nil
}

func (d *Daemon) unitOptions(l *config.LUN, id state.Identity) lun.Options {
	return lun.Options{
		Identity: id, ReadOnly: l.ReadOnly, WriteThrough: l.WriteThrough, Removable: l.Removable, Sanitize: l.Sanitize,
		Reservations: d.reservations, Settings: d.settings, Sanitizations: d.sanitizations, Events: unitEvents{d.log},
	}
}

// maskOf says who sees a LUN, and who may only read it.
func maskOf(l config.LUN) (lun.Mask, error) {
	who, err := security.Compile(l.Initiators)
	readers, err2 := security.Compile(l.ReadOnlyFor)
	if err := errors.Join(err, err2); err != nil {
		return nil, err
	}
	return func(initiator string) lun.Access {
		switch {
		case len(l.Initiators) > 0 && !who.Match(initiator):
			return lun.NoAccess
		case readers.Match(initiator):
			return lun.ReadOnly
		}
		return lun.ReadWrite
	}, nil
}

// openBackend opens what a LUN lies on. The configuration is valid.
func (d *Daemon) openBackend(l *config.LUN) (s backend.Store, err error) {
	switch l.Backend {
	case "memory":
		return backend.OpenMemory(backend.MemoryConfig{Size: int64(l.Size), BlockSize: uint32(l.BlockSize)})
	case "file":
		return d.openFile(l)
	case "block":
		return backend.OpenBlock(backend.BlockConfig{Path: l.Path, BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly})
	case "gotgt":
		return gotgt.Open(gotgt.Config{Plugin: l.Plugin, Path: l.Path, Options: l.Options, Size: int64(l.Size), BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly})
	}
	return nil, fmt.Errorf("unknown backend %q", l.Backend)
}

// openFile opens a file, and extends it if it is smaller than configured: then it was
// to grow, and nothing is lost. One that is larger is refused, unless the end of the
// process came before it was cut off.
func (d *Daemon) openFile(l *config.LUN) (backend.Store, error) {
	c := backend.FileConfig{Path: l.Path, Size: int64(l.Size), BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly}
	fi, err := os.Stat(l.Path)
	resize := err == nil && fi.Mode().IsRegular() && fi.Size() > 0 && !l.ReadOnly &&
		(fi.Size() < c.Size || fi.Size() > c.Size && d.shrinksTo(l.Path) == c.Size)
	if resize {
		c.Size = 0
	}
	s, _, err := backend.OpenFile(c)
	if err != nil || !resize {
		return s, err
	}
	if err := s.(backend.Resizer).Resize(int64(l.Size)); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	d.log.Info("file has another size", eventKey, "lun", "path", l.Path, "octets_before", fi.Size(), "octets", int64(l.Size))
	return s, nil
}

// target is the served target of that name, or nil.
//
// Preconditions: mu is held, or it is the caller's turn.
func (d *Daemon) target(name string) *servedTarget {
	i := slices.IndexFunc(d.targets, func(t *servedTarget) bool { return t.name == name })
	if i < 0 {
		return nil
	}
	return d.targets[i]
}

// stateTime is how long the files of the state may take to close at the end.
const stateTime = 2 * time.Second

// closeUnits syncs and closes every store, those of LUNs that were removed included, and
// the files of the state. What has not come to an end in time is named in the error.
func (d *Daemon) closeUnits() error {
	type lunOfTarget struct {
		t *servedTarget
		l *servedLUN
	}
	var list []lunOfTarget
	d.mu.Lock()
	for _, t := range d.targets {
		for _, l := range t.luns {
			list = append(list, lunOfTarget{t, l})
		}
	}
	for _, r := range d.leaving {
		list = append(list, lunOfTarget{r.t, r.l})
	}
	d.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.Background(), d.waits.end)
	defer cancel()
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		errs  []error
		slots = newSlots(d.waits.slot)
	)
	for _, tl := range list {
		free := slots.take(ctx)
		wg.Go(func() {
			defer free()
			err := d.closeLUN(ctx, d.waits.end, tl.t, tl.l, func(error) {})
			if err != nil && !errors.Is(err, backend.ErrClosed) {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("LUN %d of target %s: %w", tl.l.ID, tl.t.name, err))
			}
		})
	}
	wg.Wait()

	_, err := d.calls.do(context.Background(), stateTime, "state_dir", closing, func(*call) (*lun.Unit, error) { return nil, d.closeState() }, nil)
	if errors.Is(err, ErrStuck) {
		err = fmt.Errorf("state_dir: %w", err)
	}
	return errors.Join(append(errs, err)...)
}

// closeState closes the files of the state.
func (d *Daemon) closeState() error {
	var errs []error
	if d.ids != nil {
		errs = append(errs, d.ids.Close())
	}
	errs = append(errs, d.shrinks.close())
	if d.reservations != nil {
		errs = append(errs, d.reservations.Close())
	}
	if d.settings != nil {
		errs = append(errs, d.settings.Close())
	}
	if d.sanitizations != nil {
		errs = append(errs, d.sanitizations.Close())
	}
	return errors.Join(errs...)
}
