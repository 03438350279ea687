package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// snapshotLUN returns the commands about snapshots of LUNs.
func (p *program) snapshotLUN() *cobra.Command {
	list := list(p, verb{names: targetRequired, use: "list [TARGET]", short: "List the snapshots of the LUNs of all targets, or of one",
		args: cobra.MaximumNArgs(1), complete: p.complete(targets),
		long: "List the snapshots of the LUNs of all targets, or of one. USED counts blocks that the\nsnapshot shares with its LUN, and with other snapshots, too."},
		func(ctx context.Context, c *call) ([]schema.Snapshot, error) {
			list, err := c.Snapshots(ctx, strings.Join(c.args, ""))
			if err != nil {
				return nil, err
			}
			more, err := c.volumeSnapshots(ctx, strings.Join(c.args, ""))
			return append(list, more...), err
		},
		"TARGET* LUN* NAME* CREATED SIZE USED REASON | PATH", func(s *schema.Snapshot) []any {
			if s.Name == "" {
				return []any{s.Target, s.LUN, "", "", "", "", s.Reason, ""}
			}
			return []any{s.Target, s.LUN, s.Name, s.Created.Local().Format(time.DateTime), size(s.Size), compact(s.Used), "", s.Path}
		})
	create := p.snapshotVerb(verb{use: "create [TARGET] LUN NAME", short: "Make a snapshot of a LUN", complete: p.complete(targets, luns),
		long: `Make a snapshot of a LUN on a file: its content at one moment, in a file next to it that
shares its blocks (reflink: XFS, btrfs). Writes of all initiators wait for some
milliseconds; reads and other LUNs do not. The snapshot has every write whose status was
sent before the command, flushed or not, like a disk after a loss of power. Freeze the
file system of the initiator first (fsfreeze) if it must be clean.

Of a LUN on a thin volume of LVM, or on a volume of ZFS, the command makes a snapshot of
the volume: as root, on the machine of the target. No write waits. The snapshot has what
was flushed, and maybe some of what is written meanwhile.`,
		example: `  iser-target lun snapshot create store 0 daily-1
  iser-target lun snapshot create store 0 before-upgrade --dry-run`},
		func(ctx context.Context, c *call, dry bool) (schema.Snapshot, error) {
			l, p, volume, err := c.ownVolume(ctx)
			switch {
			case err != nil:
				return schema.Snapshot{}, err
			case p != nil:
				return c.makeSnapshot(ctx, l, p, volume, c.args[2], dry)
			}
			return c.Snapshot(ctx, c.target, c.lun, c.args[2], dry)
		}, func(s *schema.Snapshot, dry bool) string {
			if dry {
				return fmt.Sprintf("make snapshot %s of LUN %d of %s: %s", s.Name, s.LUN, s.Target, s.Path)
			}
			text := fmt.Sprintf("snapshot %s of LUN %d of %s: %s, %s", s.Name, s.LUN, s.Target, s.Path, size(s.Size))
			if s.Waited > 0 {
				text += ", writes waited " + duration(s.Waited)
			}
			return text
		})
	remove := p.snapshotVerb(verb{use: "delete [TARGET] LUN NAME", short: "Delete a snapshot of a LUN, with its data",
		complete: p.complete(targets, luns, snapshots),
		long:     "Delete a snapshot of a LUN, with its data. Clones of it stay as they are. A snapshot that a\nLUN serves is not deleted.",
		example:  "  iser-target lun snapshot delete store 0 daily-1"},
		func(ctx context.Context, c *call, dry bool) (schema.Snapshot, error) {
			l, p, volume, err := c.ownVolume(ctx)
			switch {
			case err != nil:
				return schema.Snapshot{}, err
			case p != nil:
				return c.removeSnapshot(ctx, l, p, volume, c.args[2], dry)
			}
			return c.DeleteSnapshot(ctx, c.target, c.lun, c.args[2], dry)
		}, func(s *schema.Snapshot, dry bool) string {
			text := fmt.Sprintf("delete snapshot %s of LUN %d of %s: %s", s.Name, s.LUN, s.Target, s.Path)
			if !dry {
				text += " (done)"
			}
			return text
		})
	return group("snapshot", "Make, list and delete snapshots of LUNs", list, create, remove)
}

// snapshotVerb returns a command about one snapshot. do sends its request, and text says what it has done, or would do.
func (p *program) snapshotVerb(v verb, do func(context.Context, *call, bool) (schema.Snapshot, error), text func(*schema.Snapshot, bool) string) *cobra.Command {
	var dry bool
	v.names, v.args = targetOptional, cobra.ExactArgs(3)
	v.parse = func(c *call) error {
		if err := c.parseLUN(); err != nil {
			return err
		}
		if err := schema.CheckSnapshotName(c.args[2]); err != nil {
			return usage(c.cmd, "%v", err)
		}
		return nil
	}
	v.run = func(ctx context.Context, c *call) error {
		s, err := do(ctx, c, dry)
		if err != nil {
			return err
		}
		return p.print(c.cmd.OutOrStdout(), s, func(t *table) { t.line("%s", text(&s, dry)) })
	}
	cmd := p.output(v)
	cmd.Flags().BoolVar(&dry, "dry-run", false, "say what would be done, or why not, and change nothing")
	return cmd
}

// snapshots completes the names of the snapshots of a LUN.
func snapshots(ctx context.Context, c *client.Client, args []string) []string {
	target, _ := findTarget(ctx, c, args[0])
	all, _ := c.Snapshots(ctx, target)
	var names []string
	for _, s := range all {
		if strconv.Itoa(s.LUN) == args[1] && s.Name != "" {
			names = append(names, s.Name)
		}
	}
	return names
}

// clones completes what of a target can be cloned.
func clones(ctx context.Context, c *client.Client, args []string) []string {
	list := luns(ctx, c, args)
	target, _ := findTarget(ctx, c, args[0])
	all, _ := c.Snapshots(ctx, target)
	for _, s := range all {
		if s.Name != "" {
			list = append(list, fmt.Sprintf("%d@%s", s.LUN, s.Name))
		}
	}
	return list
}

// cloneLUN returns the command that clones a LUN.
func (p *program) cloneLUN() *cobra.Command {
	var (
		l    schema.LUN
		id   int
		to   string
		from schema.CloneSource
		in   poolFlags
	)
	cmd := p.change(verb{adds: true, names: targetOptional, use: "clone [TARGET] LUN[@SNAPSHOT] (--path PATH | --volume NAME)", short: "Create a LUN as a clone of another one, or of a snapshot",
		args: cobra.ExactArgs(2), complete: p.complete(targets, clones),
		long: `Create a LUN on a new file that shares the blocks of another LUN, or of a snapshot of it
(reflink: XFS, btrfs). It takes no space until one of them changes. The clone of a LUN
that is in use has its content at one moment, as lun snapshot create describes. The new
LUN has the size and block size of the other, and an identity of its own. A host that
sees both may find the same file system UUIDs, LVM and partition labels twice.

--copy copies all data of a snapshot, also to another file system, and shows its progress.

The clone of a LUN on a thin volume of LVM, or on a volume of ZFS, is on a new volume of the
same pool, which the command makes: as root, on the machine of the target.`,
		example: `  iser-target lun clone store 0 --path /srv/luns/test.img
  iser-target lun clone store 0@daily-1 --path /srv/luns/restored.img --read-only
  iser-target lun clone store 0@daily-1 --path /backup/0.img --copy
  iser-target lun clone store 1@daily-1 --volume test`,
		parse: func(c *call) error {
			number, snapshot, named := strings.Cut(c.args[1], "@")
			c.target = c.args[0]
			var err error
			if c.lun, err = strconv.Atoi(number); err != nil || c.lun < 0 {
				return usage(c.cmd, "LUN %q is not a number", number)
			}
			if named {
				if err := schema.CheckSnapshotName(snapshot); err != nil {
					return usage(c.cmd, "%v", err)
				}
			}
			from.LUN, from.Snapshot = c.lun, snapshot
			switch {
			case l.Path != "" && in.volume != "":
				return usage(c.cmd, "--path excludes --volume")
			case from.Copy && !named:
				return usage(c.cmd, "--copy requires a snapshot, like %d@NAME: a LUN that is in use changes while it is copied", c.lun)
			}
			if l.Path != "" {
				l.Path, err = c.absolute(l.Path)
			}
			return err
		}},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			from.Target = c.target
			if to == "" {
				to = c.target
			}
			if c.cmd.Flags().Changed("id") {
				l.ID = &id
			}
			source, p, volume, err := c.ownVolume(ctx)
			switch {
			case err != nil:
				return nil, err
			case p != nil && l.Path != "":
				return nil, usage(c.cmd, "LUN %d is on a volume, and its clone will be, too: give --volume NAME instead of --path", c.lun)
			case p != nil && from.Copy:
				return nil, usage(c.cmd, "--copy is for LUNs on files: LUN %d is on a volume", c.lun)
			case p != nil:
				return c.cloneVolume(ctx, source, p, volume, from.Snapshot, &in, to, l, o)
			case in.volume != "":
				return nil, usage(c.cmd, "--volume is for LUNs on volumes of LVM or ZFS: LUN %d is on %s %s", c.lun, source.Backend, source.Path)
			case l.Path == "":
				return nil, usage(c.cmd, "--path is required: the file of the new LUN, which must not exist")
			}
			l.Backend, l.Clone = "file", &from
			bar := newBar(c.cmd.ErrOrStderr())
			defer bar.end()
			plan, err := c.MakeLUN(c.cmd.Context(), to, l, o, bar.show)
			if err != nil && c.cmd.Context().Err() != nil {
				err = &schema.Error{Code: schema.Failed, Message: "interrupted: " + l.Path + " was not created, unless it was complete just before",
					Hint: "see iser-target lun list"}
			}
			return plan, err
		})
	f := cmd.Flags()
	f.StringVar(&l.Path, "path", "", "path of the new file, on the file system of the LUN")
	f.StringVar(&in.volume, "volume", "", "name of the new volume, of a LUN on a volume (default: ALIAS-lunN)")
	f.IntVar(&id, "id", 0, "number of the new LUN (default: the first free one)")
	f.StringVar(&to, "to", "", "target of the new LUN, by its full name (default: TARGET)")
	f.BoolVar(&l.ReadOnly, "read-only", false, "refuse all writes to the new LUN")
	f.StringArrayVar(&l.Initiators, "initiator", nil, "pattern of initiators that see the new LUN; repeatable (default: all)")
	f.BoolVar(&from.Copy, "copy", false, "copy all data of the snapshot")
	cmd.MarkFlagFilename("path")
	cmd.RegisterFlagCompletionFunc("to", func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return p.complete(targets)(cmd, nil, "")
	})
	return cmd
}
