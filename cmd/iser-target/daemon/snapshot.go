package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/rbd/rbduri"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// A snapshot of a LUN is a file next to that of the LUN, whose name says what it is: FILE@NAME.snap. It shares the blocks of
// the LUN's file (reflink). Nothing else knows of it: it needs no state, and stays when its LUN is removed.

// snapshotMode is the mode of the files. A LUN on one is read-only.
const snapshotMode = 0o400

// maxSnapshots is how many snapshots a LUN has at most: a list reads them all.
const maxSnapshots = 1024

// settleTime is what commands in progress have to end for a snapshot, while others wait.
const settleTime = 5 * time.Second

// snapshotPath returns the path of a snapshot of the LUN with the file at path.
func snapshotPath(path, name string) string { return path + "@" + name + backend.SnapshotEnd }

// snapshotFailed returns an error about a snapshot or clone of a LUN, after which nothing has changed.
func snapshotFailed(code schema.Code, target string, id int, hint, format string, a ...any) error {
	return &schema.Error{Code: code, Message: fmt.Sprintf("LUN %d of %s: %s", id, target, fmt.Sprintf(format, a...)), Hint: hint}
}

// snapshotError returns err, of a snapshot or clone of a LUN, with what the operator can do.
func snapshotError(target string, id int, err error) error {
	switch {
	case errors.Is(err, backend.ErrNoReflink):
		return snapshotFailed(schema.Refused, target, id, "nothing was changed; snapshots and clones require XFS (mkfs.xfs -m reflink=1) or btrfs, and a path on the file system of the LUN. lun clone LUN@SNAPSHOT --copy copies to another one, and so does lun create --from after the LUN was deleted", "%v", err)
	case errors.Is(err, backend.ErrUnsettled):
		return snapshotFailed(schema.Busy, target, id, "nothing was changed; try again, or see with iser-target lun list whether the store hangs", "%v", err)
	case errors.Is(err, backend.ErrUnsynced):
		return fmt.Errorf("LUN %d of %s: %w: %w", id, target, err, ErrUnwell)
	}
	return fmt.Errorf("LUN %d of %s: %w", id, target, err)
}

// noFile returns the error about a LUN that is not on a file, with what makes a snapshot of its store.
func noFile(target string, l *config.LUN) error {
	how := map[string]string{
		"block": "; LVM and ZFS make snapshots of their devices",
		"nbd":   "; make a snapshot on the NBD server",
	}[l.Backend]
	if i, err := rbduri.Parse(l.Path); l.Backend == "rbd" && err == nil {
		how = fmt.Sprintf("; make a snapshot with rbd snap create %v@NAME", i)
	}
	return snapshotFailed(schema.Refused, target, l.ID, "nothing was changed"+how, "snapshots and clones require the backend file, not %s", l.Backend)
}

// cloneable returns the LUN with that number if it is one on a file whose data can be trusted. The copy does not change.
func (d *Daemon) cloneable(target string, id int) (l servedLUN, err error) {
	p, err := d.lun(target, id)
	if err != nil {
		return l, err
	}
	d.locked(func() { l = *p })
	switch {
	case l.Backend != "file":
		return l, noFile(target, &l.LUN)
	case l.fault != nil:
		return l, fmt.Errorf("LUN %d of %s is not ready: %w", id, target, l.fault)
	}
	return l, mayResize(target, &l)
}

// fileOf returns the path of the file of a LUN on a file, without links. It gives up when the file system hangs.
func (d *Daemon) fileOf(ctx context.Context, target string, l *config.LUN) (path string, err error) {
	var found string // valid when the call is back
	err = d.calls.do(ctx, d.waits.store, storeKey(target, l)+"@name", "looking for its file", func(*call) (err error) {
		found, err = filepath.EvalSymlinks(l.Path)
		return err
	}, nil)
	if err != nil {
		return "", fmt.Errorf("LUN %d of %s: %w", l.ID, target, err)
	}
	return found, nil
}

// SnapshotPath returns the path that a snapshot of a LUN has, or would have.
func (d *Daemon) SnapshotPath(ctx context.Context, target string, id int, name string) (string, error) {
	if err := schema.CheckSnapshotName(name); err != nil {
		return "", &schema.Error{Code: schema.Invalid, Message: err.Error(), Hint: "nothing was changed"}
	}
	p, err := d.lun(target, id)
	if err != nil {
		return "", err
	}
	var l config.LUN
	d.locked(func() { l = p.LUN })
	if l.Backend != "file" {
		return "", noFile(target, &l)
	}
	path, err := d.fileOf(ctx, target, &l)
	if err != nil {
		return "", err
	}
	path = snapshotPath(path, name)
	if base := filepath.Base(path); len(base) > unix.NAME_MAX {
		return "", snapshotFailed(schema.Invalid, target, id, "nothing was changed; use a shorter name", "the name of the file would have %d bytes, %d more than a file system takes", len(base), len(base)-unix.NAME_MAX)
	}
	return path, nil
}

// Snapshot makes a snapshot of a LUN: its content at one moment during the call. Writes wait meanwhile. With dry it
// only looks whether that would work. A process that dies meanwhile leaves no snapshot, or a whole one.
func (d *Daemon) Snapshot(ctx context.Context, target string, id int, name string, dry bool) (*schema.Snapshot, error) {
	path, err := d.SnapshotPath(ctx, target, id, name)
	if err != nil {
		return nil, err
	}
	l, err := d.cloneable(target, id)
	if err != nil {
		return nil, err
	}
	var made *schema.Snapshot // valid when the call is back
	log := d.log.With(eventKey, "lun", "target", target, "lun", id, "path", path)
	err = d.calls.do(ctx, d.waits.slow, storeKey(target, &l.LUN)+"@", "making a snapshot", func(c *call) (err error) {
		made, err = d.makeSnapshot(ctx, c, &l, path, name, dry)
		return err
	}, func(err error) {
		if err == nil && !dry { // its caller was told that it failed
			err = os.Remove(path)
		}
		log.Warn(lateAnswer, "reason", err)
	})
	if err != nil {
		if !dry {
			log.WarnContext(ctx, "snapshot was not made", "reason", err)
		}
		return nil, snapshotError(target, id, err)
	}
	made.Target, made.LUN, made.Name = target, id, name
	if !dry {
		log.InfoContext(ctx, "snapshot was made", "octets", made.Size, "seconds_waited", made.Waited)
	}
	return made, nil
}

// makeSnapshot makes a snapshot at path, or looks whether it could.
func (d *Daemon) makeSnapshot(ctx context.Context, c *call, l *servedLUN, path, name string, dry bool) (*schema.Snapshot, error) {
	file := strings.TrimSuffix(path, "@"+name+backend.SnapshotEnd)
	if _, err := os.Lstat(path); err == nil {
		return nil, &schema.Error{Code: schema.Exists, Message: path + " exists, and was not overwritten", Hint: "nothing was changed; use another name, or delete that snapshot"}
	}
	all, err := snapshotsOf(file)
	switch {
	case err != nil:
		return nil, err
	case len(all) >= maxSnapshots:
		return nil, &schema.Error{Code: schema.Refused, Message: fmt.Sprintf("it has %d snapshots, which is the limit", len(all)), Hint: "nothing was changed; delete some of them"}
	}
	if err := l.unit.CanClone(""); err != nil {
		return nil, err
	}
	made := &schema.Snapshot{Path: path, Size: l.unit.Size()}
	if dry {
		return made, nil
	}
	b, err := backend.NewFileBuilder(backend.BuildConfig{
		Path: path, Size: made.Size, BlockSize: uint32(l.BlockSize), Mode: snapshotMode,
		Fill: func(fd int) error {
			waited, err := l.unit.CloneTo(fd, settleTime)
			made.Waited = waited.Seconds()
			return err
		},
	})
	if err != nil {
		return nil, err
	}
	defer b.Abort()
	if err := d.before("snapshot"); err != nil {
		return nil, err
	}
	if err := b.Build(ctx, func(backend.Progress) {}); err != nil {
		return nil, err
	}
	if err := d.before("name of the snapshot"); err != nil {
		return nil, err
	}
	if c.isAbandoned() {
		return nil, errAbandoned
	}
	if err := b.Publish(); err != nil {
		return nil, err
	}
	if err := d.before("end of the snapshot"); err != nil {
		return nil, err
	}
	b.Keep()
	fi, err := os.Lstat(path)
	if err != nil {
		return nil, err
	}
	made.Size = fi.Size()
	made.Used, made.Created = usedBy(fi), fi.ModTime()
	return made, nil
}

// snapshotsOf returns the snapshots next to the file at path, the oldest first.
func snapshotsOf(path string) (list []schema.Snapshot, err error) {
	dir, base := filepath.Split(path)
	f, err := os.Open(cmp.Or(dir, "."))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	for _, file := range names {
		name, ok := strings.CutPrefix(file, base+"@")
		if !ok {
			continue
		}
		if name, ok = strings.CutSuffix(name, backend.SnapshotEnd); !ok || schema.CheckSnapshotName(name) != nil {
			continue
		}
		fi, err := os.Lstat(filepath.Join(dir, file))
		if errors.Is(err, fs.ErrNotExist) || err == nil && !fi.Mode().IsRegular() {
			continue
		}
		if err != nil {
			return nil, err
		}
		list = append(list, schema.Snapshot{Name: name, Path: filepath.Join(dir, file), Size: fi.Size(), Used: usedBy(fi), Created: fi.ModTime()})
	}
	slices.SortFunc(list, func(a, b schema.Snapshot) int {
		return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.Name, b.Name))
	})
	return list, nil
}

// Snapshots returns the snapshots of the LUNs of a target, or of all if target is empty. A LUN whose file system does not answer
// has one entry that says so.
func (d *Daemon) Snapshots(ctx context.Context, target string) ([]schema.Snapshot, error) {
	type place struct {
		target string
		l      config.LUN
		list   []schema.Snapshot
		err    error
	}
	var places []*place
	found := target == ""
	d.locked(func() {
		for _, t := range d.served.targets {
			if target != "" && t.name != target {
				continue
			}
			found = true
			for _, l := range t.luns {
				if l.Backend == "file" {
					places = append(places, &place{target: t.name, l: l.LUN})
				}
			}
		}
	})
	if !found {
		return nil, fmt.Errorf("target %s: %w", target, ErrNotFound)
	}
	slices.SortFunc(places, func(a, b *place) int { return cmp.Or(cmp.Compare(a.target, b.target), cmp.Compare(a.l.ID, b.l.ID)) })
	_ = inParallel(ctx, healthTime, places, func(p *place) error {
		var list []schema.Snapshot // valid when the call is back
		p.err = d.calls.do(ctx, healthTime, storeKey(p.target, &p.l)+"@list", "listing its snapshots", func(*call) error {
			path, err := filepath.EvalSymlinks(p.l.Path)
			if err == nil {
				list, err = snapshotsOf(path)
			}
			return err
		}, nil)
		if p.err == nil {
			p.list = list
		}
		return nil
	})
	all := []schema.Snapshot{}
	for _, p := range places {
		if p.err != nil && !errors.Is(p.err, fs.ErrNotExist) {
			p.list = []schema.Snapshot{{Reason: p.err.Error()}}
		}
		for _, s := range p.list {
			s.Target, s.LUN = p.target, p.l.ID
			all = append(all, s)
		}
	}
	return all, nil
}

// DeleteSnapshot removes a snapshot of a LUN, or with dry only looks whether it could. It refuses to remove one that a
// LUN serves, or that is being copied.
func (d *Daemon) DeleteSnapshot(ctx context.Context, target string, id int, name string, dry bool) (*schema.Snapshot, error) {
	path, err := d.SnapshotPath(ctx, target, id, name)
	if err != nil {
		return nil, err
	}
	user := ""
	d.locked(func() {
		for _, t := range d.served.targets {
			for _, l := range t.luns {
				if l.Path == path {
					user = fmt.Sprintf("LUN %d of %s", l.ID, t.name)
				}
			}
		}
	})
	inUse := func(by string) error {
		return &schema.Error{Code: schema.Refused, Message: fmt.Sprintf("snapshot %s of LUN %d of %s is in use by %s", name, id, target, by), Hint: "nothing was changed; delete that LUN first, or wait until the copy is complete"}
	}
	if user != "" {
		return nil, inUse(user)
	}
	gone := &schema.Snapshot{Target: target, LUN: id, Name: name, Path: path}
	what := "removing a snapshot"
	key := target + "@" + path
	err = d.calls.do(ctx, d.waits.slow, key, what, func(*call) error {
		fi, err := os.Lstat(path)
		switch {
		case errors.Is(err, fs.ErrNotExist) || err == nil && !fi.Mode().IsRegular():
			return &schema.Error{Code: schema.NotFound, Message: fmt.Sprintf("snapshot %s of LUN %d of %s: not found", name, id, target), Hint: "see iser-target lun snapshot list"}
		case err != nil:
			return err
		}
		gone.Size, gone.Used, gone.Created = fi.Size(), usedBy(fi), fi.ModTime()
		f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case err == unix.EWOULDBLOCK:
			return inUse("a LUN or a copy")
		case err != nil:
			return err
		}
		if dry {
			return nil
		}
		if err := os.Remove(path); err != nil {
			return err
		}
		return syncDir(filepath.Dir(path))
	}, nil)
	if err != nil {
		return nil, snapshotError(target, id, err)
	}
	if !dry {
		d.log.InfoContext(ctx, "snapshot was deleted", eventKey, "lun", "target", target, "lun", id, "path", path)
	}
	return gone, nil
}

// usedBy returns the bytes that a file takes.
func usedBy(fi fs.FileInfo) int64 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Blocks * 512
	}
	return 0
}

// CloneConfig completes c, which describes the file of a new LUN, so that it begins as a clone of another LUN, or of a snapshot of
// that. It looks whether that is possible.
func (d *Daemon) CloneConfig(ctx context.Context, c *backend.BuildConfig, from *schema.CloneSource) error {
	target, id, dir := from.Target, from.LUN, filepath.Dir(c.Path)
	if from.Snapshot != "" {
		path, err := d.SnapshotPath(ctx, target, id, from.Snapshot)
		if err != nil {
			return err
		}
		l, err := d.lun(target, id)
		if err != nil {
			return err
		}
		if c.BlockSize == 0 {
			d.locked(func() { c.BlockSize = uint32(l.BlockSize) })
		}
		if fi, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) || err == nil && !fi.Mode().IsRegular() {
			return &schema.Error{Code: schema.NotFound, Message: fmt.Sprintf("snapshot %s of LUN %d of %s: not found", from.Snapshot, id, target), Hint: "see iser-target lun snapshot list"}
		}
		c.From, c.Share = path, !from.Copy
		if from.Copy {
			return nil
		}
		err = d.calls.do(ctx, d.waits.store, path, "looking whether it can be cloned", func(*call) error { return backend.CanShare(path, dir) }, nil)
		if errors.Is(err, backend.ErrNoReflink) {
			return snapshotFailed(schema.Refused, target, id, "nothing was changed; use a path on the file system of the snapshot, or copy all its data with --copy", "a file in %s cannot share its blocks: %v", dir, err)
		}
		return err
	}
	if from.Copy {
		return &schema.Error{Code: schema.Invalid, Message: "copy requires a snapshot: a LUN that is in use changes while it is copied", Hint: "nothing was changed; make a snapshot first, and clone that"}
	}
	l, err := d.cloneable(target, id)
	if err != nil {
		return err
	}
	unit := l.unit
	err = d.calls.do(ctx, d.waits.store, storeKey(target, &l.LUN)+"@", "looking whether it can be cloned", func(*call) error { return unit.CanClone(dir) }, nil)
	if err != nil {
		return snapshotError(target, id, err)
	}
	c.BlockSize, c.Size = cmp.Or(c.BlockSize, uint32(l.BlockSize)), unit.Size()
	c.Fill = func(fd int) error {
		waited, err := unit.CloneTo(fd, settleTime)
		if err == nil {
			d.log.Info("LUN was cloned", eventKey, "lun", "target", target, "lun", id, "path", c.Path, "seconds_waited", waited.Seconds())
		}
		return err
	}
	return nil
}
