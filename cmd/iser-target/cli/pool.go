package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/pool"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

const (
	// appearLimit is how long udev may take to make the device of a volume.
	appearLimit = 15 * time.Second
	// fullWarning is the used space of a pool, in percent, from which on lun create warns.
	fullWarning = 80
)

// A poolFlags has the flags of lun create about pools.
type poolFlags struct{ pool, volume string }

// checkPool returns the pool that the flags name. It refuses flags that mean nothing with it.
func (c *call) checkPool(f *poolFlags, l *schema.LUN) (pool.Pool, error) {
	if f.pool == "" {
		if f.volume != "" {
			return nil, usage(c.cmd, "--volume requires --pool")
		}
		return nil, nil
	}
	p, err := pool.Parse(f.pool)
	if err != nil {
		return nil, usage(c.cmd, "--pool: %v", err)
	}
	for _, name := range []string{"path", "backend", "from", "plugin", "options"} {
		if c.cmd.Flags().Changed(name) {
			return nil, usage(c.cmd, "--pool excludes --%s", name)
		}
	}
	switch {
	case l.Size == "":
		return nil, usage(c.cmd, "--pool requires --size, the size of the new volume")
	case l.Preallocate && p.Backend() != "file":
		return nil, usage(c.cmd, "--preallocate requires a pool dir:/DIRECTORY: volumes of LVM and ZFS take space as data is written")
	case l.Checksums && l.ChecksumsPath == "" && p.Backend() == "block":
		return nil, usage(c.cmd, "--checksums requires --checksums-path with this pool: the file of the checksums, on another file system")
	case c.Remote():
		return nil, usage(c.cmd, "--pool makes the volume on this machine, and the target is on another one: run the command there, or make the volume there and use --backend block --path DEVICE")
	}
	if f.volume != "" {
		if err := p.CheckName(f.volume); err != nil {
			return nil, usage(c.cmd, "--volume: %v", err)
		}
	}
	l.Backend = p.Backend()
	return p, nil
}

// createInPool makes a volume, and adds l, a LUN on it, to a target. It removes the volume if the target refuses the LUN.
// build makes the volume, or tries whether it could if dry, and add sends the request.
func (c *call) createInPool(ctx context.Context, p pool.Pool, f *poolFlags, target string, l schema.LUN, o schema.Options,
	build func(volume string, mark pool.Mark, dry bool) error, add func(schema.LUN) (*schema.Plan, error)) (*schema.Plan, error) {
	// The target checks all that does not require the device. It has the last word about the device itself.
	dry := o
	dry.DryRun = true
	plan, err := c.AddLUN(ctx, target, withoutDevice(l), dry)
	if err != nil {
		return nil, err
	}
	number, err := addedLUN(plan)
	if err != nil {
		return nil, err
	}
	l.ID = &number // the volume has its name
	volume := f.volume
	if volume == "" {
		if volume, err = c.volumeName(ctx, target, number, p); err != nil {
			return nil, usage(c.cmd, "--volume is required: %v", err)
		}
	}
	path := p.Path(volume)
	state, found, err := p.State(ctx, volume)
	if err != nil {
		return nil, &schema.Error{Code: schema.Failed, Message: fmt.Sprintf("pool %s: %v. Nothing was changed", f.pool, err)}
	}
	if found != nil {
		return nil, c.volumeExists(ctx, p, volume, target, found)
	}
	if state.Full >= fullWarning {
		fmt.Fprintf(c.cmd.ErrOrStderr(), "iser-target: warning: pool %s is %.0f%% full. Writes fail when it is full: extend it in time\n", f.pool, state.Full)
	}
	mark := pool.NewMark(target, number)
	if err := build(volume, mark, o.DryRun); err != nil {
		if !o.DryRun {
			err = takeBack(ctx, p, volume, mark, err)
		}
		return nil, failed("pool "+f.pool, err)
	}
	if o.DryRun {
		if p.Backend() == "file" { // the target can check all of it
			l.Path = path
			return add(l)
		}
		addNote(plan, fmt.Sprintf("makes volume %s (%s)", path, l.Size))
		return plan, nil
	}
	l.Path = path
	if p.Backend() == "block" {
		l.Size = "" // that of the volume, which may be rounded up
		if err := pool.Appear(ctx, path, appearLimit); err != nil {
			return nil, failed("pool "+f.pool, takeBack(ctx, p, volume, mark, err))
		}
	}
	plan, err = add(l)
	switch {
	case err == nil:
		addNote(plan, "made volume "+path)
		return plan, nil
	case p.Backend() == "file":
		return nil, err // the target removes an unfinished file
	case mayHaveDone(err):
		return nil, withMessage(err, fmt.Sprintf("%v. Volume %s stays, because the target may use it: see iser-target lun list, or remove it with %s", err, path, p.Removal(volume)))
	}
	return nil, withMessage(err, takeBack(ctx, p, volume, mark, devicePaths(path, err)).Error())
}

// withoutDevice returns what of l a target can check before the device of l exists: a LUN in memory stands in for one on a device.
// Keys that memory does not take are left to the request that follows.
func withoutDevice(l schema.LUN) schema.LUN {
	l.Backend, l.Preallocate = "memory", false
	l.Checksums, l.ChecksumsPath, l.Protection, l.Identity = false, "", 0, ""
	l.ThresholdAvailable, l.ThresholdUsed, l.WriteThrough = "", "", false
	return l
}

// addedLUN returns the number of the LUN that plan adds.
func addedLUN(plan *schema.Plan) (int, error) {
	for i := range plan.Steps {
		if ch := &plan.Steps[i].Change; ch.Kind == config.KindLUN {
			return ch.LUN, nil
		}
	}
	return 0, &schema.Error{Code: schema.Failed, Message: "the target names no number for the LUN: give one with --id. Nothing was changed"}
}

// volumeName returns the default name of a volume: the alias of the target, or what follows the last colon of its name, and the number.
func (c *call) volumeName(ctx context.Context, target string, number int, p pool.Pool) (string, error) {
	t, err := c.Target(ctx, target)
	if err != nil {
		return "", err
	}
	base := t.Alias
	if base == "" {
		base = t.Name[strings.LastIndex(t.Name, ":")+1:]
	}
	name := fmt.Sprintf("%s-lun%d", base, number)
	if p.Backend() == "file" {
		name += ".img"
	}
	return name, p.CheckName(name)
}

// volumeExists returns the error about a volume that the command would make: what it is, and what the user can do with it.
func (c *call) volumeExists(ctx context.Context, p pool.Pool, volume, target string, v *pool.Volume) error {
	path := p.Path(volume)
	e := &schema.Error{Code: schema.Failed, Message: path + " exists, and was not touched. Nothing was changed"}
	if all, err := c.LUNs(ctx, ""); err == nil {
		for _, l := range all {
			if l.Path == path {
				e.Message = fmt.Sprintf("%s exists: LUN %d of %s uses it. Nothing was changed", path, l.ID, l.Target)
				e.Hint = "choose another name with --volume"
				return e
			}
		}
	}
	if v.Mark != nil {
		e.Message = fmt.Sprintf("%s exists: a lun create made it for LUN %d of %s, and no LUN of this target process uses it. Nothing was changed", path, v.Mark.LUN, v.Mark.Target)
	}
	e.Hint = fmt.Sprintf("choose another name with --volume, serve it with lun create %s --backend %s --path %s, or remove it with its data: %s", target, p.Backend(), path, p.Removal(volume))
	return e
}

// takeBack removes a volume if it has mark, so that of no other command, and returns err with what became of it.
func takeBack(ctx context.Context, p pool.Pool, volume string, mark pool.Mark, err error) error {
	ctx = context.WithoutCancel(ctx) // an interrupted command removes it, too
	stays := func(why error) error {
		return fmt.Errorf("%w. Volume %s was not removed: %v. Remove it with %s", err, p.Path(volume), why, p.Removal(volume))
	}
	_, found, bad := p.State(ctx, volume)
	switch {
	case bad != nil:
		return stays(bad)
	case found == nil || found.Mark == nil || *found.Mark != mark:
		return fmt.Errorf("%w. Nothing was changed", err)
	}
	if bad := p.Remove(ctx, volume); bad != nil {
		return stays(bad)
	}
	return fmt.Errorf("%w. The volume was removed again", err)
}

// devicePaths adds to an error of the target about a new device what usually keeps the target from it.
func devicePaths(path string, err error) error {
	text := strings.TrimSuffix(err.Error(), ". Nothing was changed")
	if strings.Contains(text, "permission denied") || strings.Contains(text, "operation not permitted") {
		text += fmt.Sprintf(". The user of the target must be able to open %s: put it into the group disk, and add /dev to process.paths", path)
	}
	return errors.New(text)
}

// mayHaveDone reports whether the target may have made the change that ended with err.
func mayHaveDone(err error) bool {
	var e *schema.Error
	return !errors.As(err, &e) || e.Code == schema.Unreached || e.Cause != nil // of the client, which got no answer
}

// withMessage returns err with another text, and the same code and hint.
func withMessage(err error, text string) error {
	var e *schema.Error
	if !errors.As(err, &e) {
		return errors.New(text)
	}
	next := *e
	next.Message, next.Problems = text, nil
	if next.Code == schema.Invalid { // it says that nothing was changed
		next.Hint = ""
	}
	return &next
}

// failed returns the error of a program.
func failed(object string, err error) error {
	return &schema.Error{Code: schema.Failed, Message: fmt.Sprintf("%s: %v", object, err)}
}

// addNote adds text to the note of plan.
func addNote(plan *schema.Plan, text string) {
	if plan.Note != "" {
		text = plan.Note + "; " + text
	}
	plan.Note = text
}

// deleteWithVolume deletes a LUN, and then its volume. It refuses a volume that lun create did not make for that target.
func (c *call) deleteWithVolume(ctx context.Context, o schema.Options) (*schema.Plan, error) {
	if c.Remote() {
		return nil, usage(c.cmd, "--delete-volume removes a volume of this machine, and the target is on another one: run the command there")
	}
	l, err := c.LUN(ctx, c.target, c.lun)
	if err != nil {
		return nil, err
	}
	p, volume := pool.Of(l.Path)
	if l.Backend != "block" || p == nil {
		return nil, &schema.Error{Code: schema.Refused, Message: fmt.Sprintf("refused: LUN %d is on %s %s, not on a volume of LVM or ZFS. Nothing was changed", c.lun, l.Backend, l.Path),
			Hint: "leave out --delete-volume"}
	}
	_, found, err := p.State(ctx, volume)
	switch {
	case err != nil:
		return nil, failed(l.Path, fmt.Errorf("%w. Nothing was changed", err))
	case found == nil || found.Mark == nil || !strings.EqualFold(found.Mark.Target, c.target):
		return nil, &schema.Error{Code: schema.Refused, Message: fmt.Sprintf("refused: lun create --pool did not make %s for a LUN of %s. Nothing was changed", l.Path, c.target),
			Hint: "leave out --delete-volume, and remove it yourself: " + p.Removal(volume)}
	}
	if s, ok := p.(pool.Snapshotter); ok {
		list, err := s.Snapshots(ctx, volume)
		if err != nil {
			return nil, failed(l.Path, fmt.Errorf("%w. Nothing was changed", err))
		}
		if len(list) > 0 { // which LVM would keep, without a LUN to name them by
			return nil, &schema.Error{Code: schema.Refused, Message: fmt.Sprintf("refused: %s has snapshots, %s for example. Nothing was changed", l.Path, list[0].Name),
				Hint: fmt.Sprintf("delete them first: iser-target lun snapshot delete %s %d %s", c.target, c.lun, list[0].Name)}
		}
	}
	plan, err := c.RemoveLUN(ctx, c.target, c.lun, o)
	if err != nil {
		return nil, err
	}
	if o.DryRun {
		addNote(plan, "removes volume "+l.Path+" with its data")
		return plan, nil
	}
	if err := p.Remove(ctx, volume); err != nil {
		return nil, failed(l.Path, fmt.Errorf("%w. LUN %d was deleted, and the volume stays. Remove it with %s", err, c.lun, p.Removal(volume)))
	}
	addNote(plan, "removed volume "+l.Path)
	return plan, nil
}
