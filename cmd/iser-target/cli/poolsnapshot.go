package cli

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/pool"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// volumeOf returns the pool and the volume that a LUN is on, or nil if the target itself makes its snapshots, or refuses that.
func volumeOf(l *schema.LUNState) (pool.Snapshotter, string) {
	if l.Backend != "block" {
		return nil, ""
	}
	p, volume := pool.Of(l.Path)
	s, _ := p.(pool.Snapshotter)
	return s, volume
}

// ownVolume returns the LUN of the command with what volumeOf returns, and an error if its volume is on another machine.
func (c *call) ownVolume(ctx context.Context) (*schema.LUNState, pool.Snapshotter, string, error) {
	l, err := c.LUN(ctx, c.target, c.lun)
	if err != nil {
		return nil, nil, "", err
	}
	p, volume := volumeOf(&l)
	if p != nil && c.Remote() {
		return nil, nil, "", usage(c.cmd, "LUN %d is on volume %s of another machine: run the command there", c.lun, l.Path)
	}
	return &l, p, volume, nil
}

// errNoSnapshot returns the error about a snapshot that a volume does not have.
func errNoSnapshot(l *schema.LUNState, name string) error {
	return &schema.Error{Code: schema.NotFound, Message: fmt.Sprintf("LUN %d of %s, on %s, has no snapshot %s", l.ID, l.Target, l.Path, name), Hint: "see iser-target lun snapshot list"}
}

// findSnapshot returns a snapshot of a volume, or nil.
func findSnapshot(ctx context.Context, p pool.Snapshotter, volume, name string) (*pool.Snapshot, error) {
	all, err := p.Snapshots(ctx, volume)
	if i := slices.IndexFunc(all, func(s pool.Snapshot) bool { return s.Name == name }); i >= 0 {
		return &all[i], err
	}
	return nil, err
}

// asSnapshot returns s as one of the LUN.
func asSnapshot(l *schema.LUNState, s *pool.Snapshot) schema.Snapshot {
	return schema.Snapshot{Target: l.Target, LUN: l.ID, Name: s.Name, Path: s.Path, Size: s.Size, Used: s.Used, Created: s.Created}
}

// makeSnapshot makes a snapshot of a volume.
func (c *call) makeSnapshot(ctx context.Context, l *schema.LUNState, p pool.Snapshotter, volume, name string, dry bool) (schema.Snapshot, error) {
	if s, err := findSnapshot(ctx, p, volume, name); err != nil || s != nil {
		if err == nil {
			err = errors.New("it exists")
		}
		return schema.Snapshot{}, failed("snapshot "+p.SnapshotPath(volume, name), fmt.Errorf("%w. Nothing was changed", err))
	}
	err := error(nil)
	if !dry {
		err = pool.Flush(ctx, l.Path)
	}
	if err == nil {
		err = p.MakeSnapshot(ctx, volume, name, dry)
	}
	if err != nil {
		return schema.Snapshot{}, failed("snapshot "+p.SnapshotPath(volume, name), fmt.Errorf("%w. Nothing was changed", err))
	}
	return asSnapshot(l, &pool.Snapshot{Name: name, Path: p.SnapshotPath(volume, name), Size: l.Size, Created: time.Now()}), nil
}

// removeSnapshot removes a snapshot of a volume.
func (c *call) removeSnapshot(ctx context.Context, l *schema.LUNState, p pool.Snapshotter, volume, name string, dry bool) (schema.Snapshot, error) {
	s, err := findSnapshot(ctx, p, volume, name)
	if err != nil {
		return schema.Snapshot{}, failed("snapshot "+p.SnapshotPath(volume, name), fmt.Errorf("%w. Nothing was changed", err))
	}
	if s == nil {
		return schema.Snapshot{}, errNoSnapshot(l, name)
	}
	if !dry {
		if err := p.RemoveSnapshot(ctx, volume, name); err != nil {
			return schema.Snapshot{}, failed("snapshot "+s.Path, fmt.Errorf("%w. Nothing was changed", err))
		}
	}
	return asSnapshot(l, s), nil
}

// volumeSnapshots returns the snapshots of the LUNs of a target, or of all, that are on volumes. A LUN whose volume does not tell has a row with the
// reason, unless the machine has no program for volumes.
func (c *call) volumeSnapshots(ctx context.Context, target string) (list []schema.Snapshot, err error) {
	all, err := c.LUNs(ctx, target)
	if err != nil {
		return nil, err
	}
	for i := range all {
		l := &all[i]
		p, volume := volumeOf(l)
		if p == nil {
			continue
		}
		var own []pool.Snapshot
		err := errors.New("its volume is on another machine: run the command there")
		if !c.Remote() {
			own, err = p.Snapshots(ctx, volume)
		}
		if err != nil && !errors.Is(err, exec.ErrNotFound) {
			list = append(list, schema.Snapshot{Target: l.Target, LUN: l.ID, Reason: err.Error()})
		}
		for i := range own {
			list = append(list, asSnapshot(l, &own[i]))
		}
	}
	return list, nil
}

// cloneVolume makes a volume with the content of a LUN, or of a snapshot of it, and adds l on it to a target.
func (c *call) cloneVolume(ctx context.Context, source *schema.LUNState, p pool.Snapshotter, volume, snapshot string, f *poolFlags, to string, l schema.LUN,
	o schema.Options) (*schema.Plan, error) {
	if snapshot != "" {
		s, err := findSnapshot(ctx, p, volume, snapshot)
		if err != nil {
			return nil, failed(source.Path, fmt.Errorf("%w. Nothing was changed", err))
		}
		if s == nil {
			return nil, errNoSnapshot(source, snapshot)
		}
	}
	f.pool = "of " + source.Path
	l.Backend, l.Size = p.Backend(), config.Size(source.Size).String()
	build := func(clone string, mark pool.Mark, dry bool) error {
		if snapshot == "" && !dry {
			if err := pool.Flush(ctx, source.Path); err != nil {
				return err
			}
		}
		return p.Clone(ctx, volume, snapshot, clone, mark, dry)
	}
	return c.createInPool(ctx, p, f, to, l, o, build, func(l schema.LUN) (*schema.Plan, error) { return c.AddLUN(ctx, to, l, o) })
}
