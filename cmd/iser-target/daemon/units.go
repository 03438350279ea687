package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/gotgt"
	"github.com/iser-target/iser-target/backend/nbd"
	"github.com/iser-target/iser-target/backend/rbd"
	"github.com/iser-target/iser-target/backend/rbd/rbduri"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
)

// openState opens the files of the state directory: the identities of LUNs, their reservations, the
// settings that initiators saved, sanitize operations in progress, and failed syncs. If dir is empty, the state is kept in memory.
// It gives up when the file system hangs.
func (d *Daemon) openState(dir string) error {
	var s *stateFiles // valid when the call is back
	err := d.calls.do(context.Background(), d.waits.start, "state_dir", callOpen, func(*call) (err error) {
		s = &stateFiles{}
		if err = s.open(dir); err != nil {
			err = errors.Join(err, s.close())
		}
		return err
	}, nil)
	if errors.Is(err, ErrStuck) {
		return fmt.Errorf("state_dir %s: the file system does not answer. Repair it, or configure another directory", dir)
	}
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("state_dir: %w. Let the user of the target write to %s, or set state_dir or ISER_TARGET_STATE_DIR to another directory", err, dir)
	}
	if err != nil {
		return fmt.Errorf("state_dir: %w", err)
	}
	d.state = s
	for _, reason := range s.restored() {
		d.log.Error("state file restored from its spare copy", eventKey, "service", "reason", reason)
	}
	for _, reason := range s.salvaged {
		d.log.Error("state file is damaged, and so is its spare copy: what is left is used", eventKey, "service", "reason", reason)
	}
	if dir != "" {
		for file, list := range s.lost() {
			for _, l := range list {
				d.log.Error("record of a state file is damaged: its LUN is not ready", eventKey, "service", "file", file, "naa", l.NAA, "reason", l.Reason)
			}
		}
	}
	limit := &d.net.limits.StateTimeout
	s.setLimit(limit.Time, func() { limit.Bite("state_dir " + dir) })
	return nil
}

// open opens the files.
func (s *stateFiles) open(dir string) (err error) {
	s.ids, s.dir = state.Ephemeral(), dir
	if dir == "" {
		return nil
	}
	path := filepath.Join(dir, identitiesFile)
	ids, err := state.OpenIdentities(path)
	if err != nil && state.ExamineIdentities(path).Verdict == state.Partial {
		s.salvaged = append(s.salvaged, err)
		if err := state.SalvageIdentities(path); err != nil {
			return errors.Join(s.salvaged[0], err)
		}
		ids, err = state.OpenIdentities(path)
	}
	if err != nil {
		return err
	}
	s.ids = ids
	if err = s.openShrinks(dir); err != nil {
		return err
	}
	if err = s.openChecksums(dir); err != nil {
		return err
	}
	in := func(file string) string { return filepath.Join(dir, file) }
	if s.reservations, err = openRecords(s, in(reservationsFile), lun.OpenReservations, lun.ExamineReservations, lun.SalvageReservations); err != nil {
		return err
	}
	if s.settings, err = openRecords(s, in(settingsFile), lun.OpenSettings, lun.ExamineSettings, lun.SalvageSettings); err != nil {
		return err
	}
	if s.sanitizations, err = openRecords(s, in(sanitizeFile), lun.OpenSanitizations, lun.ExamineSanitizations, lun.SalvageSanitizations); err != nil {
		return err
	}
	s.failures, err = openRecords(s, in(failuresFile), lun.OpenSyncFailures, lun.ExamineSyncFailures, lun.SalvageSyncFailures)
	return err
}

// openShrinks opens the file of shrinks. If it is damaged, and its spare copy too, the target begins without it: a file
// whose shrinking was interrupted is too large then, and its LUN not ready.
func (s *stateFiles) openShrinks(dir string) error {
	err := s.shrinks.open(dir)
	path := filepath.Join(dir, shrinkFile)
	if err == nil || shrinkFormat.Examine(path).Verdict != state.Damaged {
		return err
	}
	if discarded := state.Discard(path); discarded != nil {
		return errors.Join(err, discarded)
	}
	s.salvaged = append(s.salvaged, err)
	return s.shrinks.open(dir)
}

// openChecksums opens the file of checksums. If it is damaged, and its spare copy too, LUNs with checksums are not ready.
func (s *stateFiles) openChecksums(dir string) error {
	err := s.checksums.open(dir)
	if err == nil || checksumsFormat.Examine(filepath.Join(dir, checksumsFile)).Verdict != state.Damaged {
		return err
	}
	s.checksums.broken = err
	s.salvaged = append(s.salvaged, err)
	return nil
}

// A stateFile is one of them.
type stateFile interface {
	Lock() *os.File
	SetLimit(limit func() time.Duration, late func())
	Restored() error
}

// all returns the files that exist. Without a state directory most do not.
func (s *stateFiles) all() (list []stateFile) {
	for _, f := range []stateFile{s.ids, s.reservations, s.settings, s.sanitizations, s.failures, s.shrinks.doc, s.checksums.doc} {
		if !reflect.ValueOf(f).IsNil() {
			list = append(list, f)
		}
	}
	return list
}

// setLimit makes changes fail that are not stored within limit; late is called then.
func (s *stateFiles) setLimit(limit func() time.Duration, late func()) {
	for _, f := range s.all() {
		f.SetLimit(limit, late)
	}
}

// restored returns why files were restored from their spare copies.
func (s *stateFiles) restored() (reasons []error) {
	for _, f := range s.all() {
		if err := f.Restored(); err != nil {
			reasons = append(reasons, err)
		}
	}
	return reasons
}

// identityKey returns the key of a LUN's identity in the state directory.
func identityKey(target string, l *config.LUN) string {
	path := l.Path
	if i, err := rbduri.Parse(path); err == nil && l.Backend == "rbd" {
		path = i.String() // with another user, or another place of ceph.conf, it is the same disk
	}
	return fmt.Sprintf("%s/%d/%s:%s", target, l.ID, l.Backend, path)
}

// ErrStateStuck is in errors about a file of the state directory that could not be stored in time.
var ErrStateStuck = state.ErrTimeout

var errMissing = errors.New("the file is missing: it existed before, and a new one would hide the loss of its data. " +
	"Restore the file, or remove the LUN and add it again")

// lateAnswer is logged when a store answers after its time limit.
const lateAnswer = "store answered after its time limit"

// openLUN opens the store of l within the time limit of a change and makes its logical unit.
func (e *editor) openLUN(ctx context.Context, t *servedTarget, l config.LUN) (*servedLUN, error) {
	d := e.d
	fresh := !d.state.ids.Known(identityKey(t.name, &l))
	open := e.opener(t.name, &l, fresh)
	var unit *lun.Unit // valid when the call is back
	err := d.calls.do(ctx, d.waits.store, storeKey(t.name, &l), callOpen, func(c *call) error {
		err := open(c)
		unit = c.unit
		return err
	}, func(err error) {
		if err == nil {
			err = unit.Close()
		}
		d.log.Warn(lateAnswer, "target", t.name, "lun", l.ID, "reason", err)
	})
	if err != nil {
		return nil, err
	}
	return newServed(l, unit), nil
}

// openOrRetry opens the store of l within timeout. If that fails it returns a LUN that is
// not ready, and the daemon retries.
func (e *editor) openOrRetry(ctx context.Context, timeout time.Duration, t *servedTarget, l config.LUN) (*servedLUN, error) {
	fresh := !e.d.state.ids.Known(identityKey(t.name, &l))
	c, err := e.d.calls.begin(storeKey(t.name, &l), callOpen, e.opener(t.name, &l, fresh))
	if err == nil {
		err = c.wait(ctx, timeout)
	}
	return e.readyOrNot(t, l, fresh, c, err)
}

// readyOrNot returns the LUN that call c opened, or, if reason is not nil, one whose store cannot
// be opened for that reason. c may be nil then.
func (e *editor) readyOrNot(t *servedTarget, l config.LUN, fresh bool, c *call, reason error) (*servedLUN, error) {
	if reason == nil {
		return newServed(l, c.unit), nil
	}
	d := e.d
	id, err := d.promise(t.name, &l)
	if err != nil {
		return nil, err
	}
	absent := lun.NewAbsent
	if errors.Is(reason, errNotOpened) { // it takes moments
		absent = lun.NewOpening
	}
	unit, err := absent(uint32(l.BlockSize), d.unitOptions(&l, id))
	if err != nil {
		return nil, err
	}
	d.log.Error("LUN not ready", eventKey, "lun", "target", t.name, "lun", l.ID, "reason", reason)
	served := &servedLUN{LUN: l, unit: unit, fault: reason, retryAt: time.Now().Add(firstRetry), wait: firstRetry, fresh: fresh}
	if errors.Is(reason, ErrStuck) {
		served.attempt = c
	}
	return served, nil
}

// errAbandoned ends the opening of a store when its caller no longer waits.
var errAbandoned = errors.New("the time limit for opening the store has passed")

// opener returns the function of a call that opens the store of l. The call may outlast
// the editor: the function only uses what is copied here or locks itself.
func (e *editor) opener(target string, l *config.LUN, fresh bool) func(*call) error {
	d, open, config := e.d, e.d.openStore, *l
	return func(c *call) (err error) {
		c.unit, err = d.openUnit(target, &config, fresh, open, c.isAbandoned)
		return err
	}
}

// closeLUN closes the store of a LUN that initiators cannot reach. If that takes longer
// than timeout, or ctx ends, the error is an ErrStuck, and whenClosed is called later.
func (d *Daemon) closeLUN(ctx context.Context, timeout time.Duration, t *servedTarget, l *servedLUN, whenClosed func(error)) error {
	if l.Shared {
		ctx, cancel := context.WithTimeout(ctx, timeout)
		err := d.group.forget(ctx, &l.LUN)
		cancel()
		if err != nil {
			return fmt.Errorf("%w: %w", ErrStuck, err)
		}
	}
	if c := l.attempt; c != nil { // closes what it opens, if it ever does
		if err := c.wait(ctx, 0); errors.Is(err, ErrStuck) && c.abandon(func(err error) {
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
	if l.fault != nil { // it has no store
		return nil
	}
	return d.calls.do(ctx, timeout, storeKey(t.name, &l.LUN), callClose, func(*call) error { return l.unit.Close() }, whenClosed)
}

// openUnit opens the store of a LUN with open and makes its logical unit. It may run after
// its caller stopped waiting, which isAbandoned reports: then it stops.
//
// It does not create a file that existed once. If such a file exists and is empty, it is
// another disk with a new identity. The check of the identity comes first, and a new
// identity is stored after its file is created: a crash in between neither leaves a file
// that was never created as missing, nor gives a new disk the identity of an old one.
func (d *Daemon) openUnit(target string, l *config.LUN, fresh bool, open func(*config.LUN) (backend.Store, error), isAbandoned func() bool) (*lun.Unit, error) {
	if l.Shared {
		return d.group.openShared(target, l, isAbandoned)
	}
	found, err := d.findLost(target, l)
	if err != nil {
		return nil, err
	}
	fresh = fresh && !found
	key := identityKey(target, l)
	blank := false // the file is another disk, without data
	if l.Backend == "file" && !fresh {
		switch fi, err := os.Stat(l.Path); {
		case errors.Is(err, fs.ErrNotExist):
			return nil, errMissing
		case err == nil && fi.Size() == 0:
			if _, err := d.state.ids.Renew(key); err != nil {
				return nil, err
			}
			blank = true
		}
	}
	if isAbandoned() {
		return nil, errAbandoned
	}
	madeImage := false
	if l.Backend == "rbd" && fresh && l.Size > 0 && !l.ReadOnly {
		if madeImage, err = rbd.Create(l.Path, int64(l.Size)); err != nil {
			return nil, err
		}
	}
	created := willCreate(l)
	store, err := open(l)
	if err != nil {
		if madeImage {
			err = errors.Join(err, rbd.Remove(l.Path))
		}
		return nil, err
	}
	fail := func(err error) (*lun.Unit, error) {
		if created {
			err = errors.Join(err, removeNew(l.Path)) // before another target can lock it
		}
		err = errors.Join(err, store.Close())
		if madeImage {
			err = errors.Join(err, rbd.Remove(l.Path))
		}
		return nil, err
	}
	if err := d.receiveMemory(target, l.ID, store); err != nil {
		return fail(err)
	}
	if isAbandoned() {
		return fail(errAbandoned)
	}
	withSums, err := d.withChecksums(store, target, l, created || blank || madeImage)
	if err != nil {
		return fail(err)
	}
	store = withSums
	id, err := d.identify(target, l)
	if err != nil {
		return fail(err)
	}
	unit, err := d.newUnit(store, l, id)
	if err != nil {
		return fail(err)
	}
	return unit, nil
}

// willCreate reports whether opening the store of l creates its file.
func willCreate(l *config.LUN) bool {
	if l.Backend != "file" {
		return false
	}
	_, err := os.Lstat(l.Path)
	return errors.Is(err, fs.ErrNotExist)
}

// removeNew removes a file that was created a moment ago, which this process has locked, unless
// somebody has written to it.
func removeNew(path string) error {
	fi, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || !fi.Mode().IsRegular() || st.Blocks != 0 {
		return fmt.Errorf("%s is left behind: it has data already", path)
	}
	return os.Remove(path)
}

// newUnit returns the logical unit of l over a store.
func (d *Daemon) newUnit(store backend.Store, l *config.LUN, id state.Identity) (*lun.Unit, error) {
	u, err := lun.New(store, d.unitOptions(l, id))
	if err == nil {
		setRates(u, l)
	}
	return u, err
}

// unitOptions returns the options of the logical unit of l.
func (d *Daemon) unitOptions(l *config.LUN, id state.Identity) lun.Options {
	naa, _ := config.ParseNAA(l.NAA) // the configuration is valid
	if l.NAA == "" {
		naa = nil
	}
	kept, shared := d.state.reservations, (*lun.SharedReservations)(nil)
	records := groupRecords{settings: d.state.settings, failures: d.state.failures, sanitizations: d.state.sanitizations}
	if l.Shared && d.group != nil {
		kept, shared = nil, d.group.reservations
		records = d.group.records()
	}
	return lun.Options{
		Serial: l.Serial, NAA: naa, Vendor: l.Vendor, Product: l.Product,
		Identity: id, ImplicitAccess: l.Shared, ReadOnly: l.ReadOnly, WriteThrough: l.WriteThrough, Removable: l.Removable, Sanitize: l.Sanitize,
		ThresholdAvailable: int64(l.ThresholdAvailable), ThresholdUsed: int64(l.ThresholdUsed),
		Reservations: kept, Shared: shared, Settings: records.settings, Sanitizations: records.sanitizations, SyncFailures: records.failures, Events: d.report,
		Calls: d.stores, Tokens: d.tokens, Name: fmt.Sprintf("LUN %d, naa %s", l.ID, id.Serial),
		Registrations: &d.net.limits.Registrations, StoreTimeout: &d.net.limits.StoreTimeout,
	}
}

// openBackend opens the store of a LUN whose configuration is valid.
func (d *Daemon) openBackend(l *config.LUN) (s backend.Store, err error) {
	switch l.Backend {
	case "memory":
		return backend.OpenMemory(backend.MemoryConfig{Size: int64(l.Size), BlockSize: uint32(l.BlockSize)})
	case "file":
		return d.openFile(l)
	case "block":
		return backend.OpenBlock(backend.BlockConfig{Path: l.Path, BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly})
	case "nbd":
		return nbd.Open(d.nbdConfig(l))
	case "rbd":
		return rbd.Open(d.rbdConfig(l))
	case "gotgt":
		return gotgt.Open(gotgt.Config{Plugin: l.Plugin, Path: l.Path, Options: l.Options, Size: int64(l.Size), BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly})
	}
	return nil, fmt.Errorf("unknown backend %q", l.Backend)
}

// nbdConfig returns the configuration of a store on a server of NBD, which logs when that is away.
func (d *Daemon) nbdConfig(l *config.LUN) nbd.Config {
	log := d.log.With(eventKey, "lun", "lun", l.ID, "path", l.Path)
	return nbd.Config{
		URI: l.Path, BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly, Once: l.Shared,
		Lost: func(reason error) { d.storeLost(log, l, "NBD server does not answer, and commands wait", reason) },
		Back: func(after time.Duration) {
			log.Info("NBD server answers again", "after", after.Round(time.Millisecond))
		},
	}
}

// storeLost logs that a store has no server. That of a shared LUN is opened again.
func (d *Daemon) storeLost(log *slog.Logger, l *config.LUN, text string, reason error) {
	log.Error(text, "reason", reason)
	if l.Shared {
		d.group.lost(l)
	}
}

// rbdConfig returns the configuration of a store on an RBD image, which logs what its daemon says.
func (d *Daemon) rbdConfig(l *config.LUN) rbd.Config {
	log := d.log.With(eventKey, "lun", "lun", l.ID, "path", l.Path)
	size := int64(l.Size)
	if l.Shared { // the image may have another size since another gateway has set it
		size = 0
	}
	return rbd.Config{
		URI: l.Path, Size: size, BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly, Dir: d.state.dir,
		Said:   func(line string) { log.Warn("message about the daemon of an RBD image", "text", line) },
		Shared: l.Shared,
		Lost:   func(reason error) { d.storeLost(log, l, "RBD image cannot be reached, and commands wait", reason) },
		Back: func(after time.Duration) {
			log.Info("RBD image can be reached again", "after", after.Round(time.Millisecond))
		},
	}
}

// openFile opens a file. It extends a file that is smaller than configured: the process ended
// before it did. It refuses a larger file, unless the process ended before it cut the file off.
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
	d.log.Info("file was resized", eventKey, "lun", "path", l.Path, "octets_before", fi.Size(), "octets", int64(l.Size))
	return s, nil
}

// stateTime is what the state files have to close at a shutdown.
const stateTime = 2 * time.Second

// closeUnits synchronizes and closes all stores, also those of removed LUNs, and the state
// files. The error names those that did not close in time.
func (d *Daemon) closeUnits() error {
	d.mu.Lock()
	list := slices.Clone(d.ending.removals)
	for _, t := range d.served.targets {
		for _, l := range t.luns {
			list = append(list, &removal{t: t, l: l})
		}
	}
	d.mu.Unlock()

	ctx, cancel := context.WithTimeout(context.Background(), d.waits.end)
	defer cancel()
	failed := inParallel(ctx, d.waits.slot, list, func(r *removal) error {
		wait := d.waits.end
		if _, hangs := r.l.unit.Hang(); hangs { // it has had its time
			wait = min(wait, d.waits.close)
		}
		err := d.closeLUN(ctx, wait, r.t, r.l, nil)
		if err == nil || errors.Is(err, backend.ErrClosed) {
			return nil
		}
		return fmt.Errorf("LUN %d of %s: %w", r.l.ID, r.t.name, err)
	})
	if d.group != nil {
		failed = errors.Join(failed, d.group.close())
	}
	err := d.calls.do(context.Background(), stateTime, "state_dir", callClose, func(*call) error { return d.state.close() }, nil)
	if errors.Is(err, ErrStuck) {
		err = fmt.Errorf("state_dir: %w", err)
	}
	return errors.Join(failed, err)
}

// close closes the files.
func (s *stateFiles) close() error {
	return errors.Join(closeFile(s.ids), s.shrinks.close(), s.checksums.close(), closeFile(s.reservations), closeFile(s.settings), closeFile(s.sanitizations), closeFile(s.failures))
}

// closeFile closes f, unless it is nil.
func closeFile[T any, F interface {
	*T
	io.Closer
}](f F) error {
	if f == nil {
		return nil
	}
	return f.Close()
}
