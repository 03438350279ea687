package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/pool"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// output returns the command of v with -o.
func (p *program) output(v verb) *cobra.Command {
	cmd := p.command(v)
	p.outputFlag(cmd)
	return cmd
}

// show returns the command of v, which prints the object that get returns, as a table by fill.
func show[T any](p *program, v verb, get func(context.Context, *call) (T, error), fill func(*table, T)) *cobra.Command {
	v.run = func(ctx context.Context, c *call) error {
		object, err := get(ctx, c)
		if err != nil {
			return err
		}
		return p.print(c.cmd.OutOrStdout(), object, func(t *table) { fill(t, object) })
	}
	return p.output(v)
}

// list returns the command of v, which prints the objects that get returns, as a table with a row
// of each. Columns after | are those of -o wide, and those with * are what -o name prints.
func list[T any](p *program, v verb, get func(context.Context, *call) ([]T, error),
	head string, row func(*T) []any) *cobra.Command {
	return listAnd(p, v, get, head, row, nil)
}

// watchEvery is the time between two looks of --watch.
const watchEvery = time.Second

// listAnd returns the command of v, like list. after, unless it is nil, adds to the table.
func listAnd[T any](p *program, v verb, get func(context.Context, *call) ([]T, error),
	head string, row func(*T) []any, after func(*table, []T)) *cobra.Command {
	narrow, wide, _ := strings.Cut(head, " | ")
	columns, names := len(strings.Fields(narrow)), []int{}
	for i, name := range strings.Fields(narrow) {
		if strings.HasSuffix(name, "*") {
			names = append(names, i)
		}
	}
	narrow = strings.ReplaceAll(narrow, "*", "")
	once := func(ctx context.Context, c *call, w io.Writer, coloured bool) error {
		objects, err := get(ctx, c)
		if err == nil {
			err = sortList(p, objects)
		}
		if err != nil {
			return err
		}
		if p.format == "name" {
			for i := range objects {
				cells := row(&objects[i])
				texts := texts(names, func(n int) string { return shown(fmt.Sprint(cells[n])) })
				if _, err := fmt.Fprintln(w, strings.Join(texts, " ")); err != nil {
					return err
				}
			}
			return nil
		}
		if p.path != nil || p.format != "table" && p.format != "wide" {
			return p.print(w, objects, nil)
		}
		t := newTable(coloured)
		if all := narrow; !p.noHeaders {
			if p.format == "wide" && wide != "" {
				all += " " + wide
			}
			t.head(all)
		}
		for i := range objects {
			cells := row(&objects[i])
			if p.format != "wide" {
				cells = cells[:columns]
			}
			t.row(cells...)
		}
		if after != nil {
			after(t, objects)
		}
		return t.writeTo(w)
	}
	v.run = func(ctx context.Context, c *call) error {
		w := c.cmd.OutOrStdout()
		if !p.watch {
			return once(ctx, c, w, useColour(w))
		}
		var last []byte
		for {
			var b bytes.Buffer
			ctx, cancel := context.WithTimeout(c.cmd.Context(), c.limit)
			err := once(ctx, c, &b, useColour(w))
			cancel()
			if c.cmd.Context().Err() != nil {
				return nil // interrupted
			}
			if err != nil {
				return err
			}
			if !bytes.Equal(last, b.Bytes()) {
				if last != nil && p.format != "json" && p.format != "yaml" {
					fmt.Fprintln(w)
				}
				if last = b.Bytes(); p.format == "yaml" {
					fmt.Fprintln(w, "---")
				}
				if _, err := w.Write(last); err != nil {
					return err
				}
			}
			select {
			case <-c.cmd.Context().Done():
				return nil
			case <-time.After(watchEvery):
			}
		}
	}
	cmd := p.output(v)
	p.listFlags(cmd)
	return cmd
}

// target returns the commands about targets.
func (p *program) target() *cobra.Command {
	list := list(p, verb{use: "list", short: "List the targets", args: cobra.NoArgs},
		func(ctx context.Context, c *call) ([]schema.TargetState, error) { return c.Targets(ctx) },
		"NAME* ALIAS LUNS SESSIONS AUTH GROUPS INITIATORS | NETWORKS IPSEC REDIRECT RESETS-FOR", func(s *schema.TargetState) []any {
			return []any{s.Name, s.Alias, len(s.LUNs), len(s.Sessions), s.Auth, numbers(s.PortalGroups),
				strings.Join(s.Initiators, ","), all(s.Networks), s.IPsec, s.Redirect, strings.Join(s.ResetsFor, ",")}
		})
	var t schema.Target
	create := p.change(verb{adds: true, use: "create NAME --initiator PATTERN...", short: "Create a target without LUNs", args: cobra.ExactArgs(1),
		long: "Create a target without LUNs. Initiators whose names match one of the patterns may\nlog in. In a pattern, * stands for any characters and ? for one character.", complete: cobra.NoFileCompletions},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			if len(t.Initiators) == 0 {
				return nil, usage(c.cmd, "--initiator is required: a pattern of initiators that may log in, \"*\" for all")
			}
			t.Name = c.args[0]
			return c.AddTarget(ctx, t, o)
		})
	f := create.Flags()
	f.StringVar(&t.Alias, "alias", "", "a name for display")
	f.StringArrayVar(&t.Initiators, "initiator", nil, "pattern of initiators that may log in; repeatable")
	f.StringArrayVar(&t.Networks, "network", nil, "network that initiators may log in from, like 10.0.0.0/24; repeatable (default: all)")
	f.StringArrayVar(&t.ResetsFor, "resets-for", nil,
		"pattern of initiators whose resets also end commands of others; repeatable (default: none)")
	f.IntSliceVar(&t.PortalGroups, "portal-group", nil, "tag of a portal group that serves the target; repeatable (default: all)")
	f.StringVar(&t.IPsec, "ipsec", "", "off, audit or required (default: off)")
	f.StringVar(&t.IPsecProfile, "ipsec-profile", "", "profile of the configuration that says which protection is good enough")
	f.BoolVar(&t.Cluster, "cluster", false, "let all gateways of the cluster have the target; its LUNs are shared")
	remove := p.change(verb{names: targetRequired, use: "delete TARGET", short: "Delete a target with its LUNs; their files and devices stay",
		args: cobra.ExactArgs(1), complete: p.complete(targets)},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			return c.RemoveTarget(ctx, c.args[0], o)
		})
	show := show(p, verb{names: targetOptional, use: "show [TARGET]", short: "Show a target with its LUNs and sessions", args: cobra.ExactArgs(1), complete: p.complete(targets)},
		func(ctx context.Context, c *call) (schema.TargetState, error) { return c.Target(ctx, c.args[0]) }, targetTable)
	return group("target", "Manage targets", list, show, create, remove, p.setTarget())
}

// targetTable shows a target.
func targetTable(t *table, s schema.TargetState) {
	t.row("name", s.Name)
	t.row("alias", s.Alias)
	t.row("authentication", s.Auth)
	t.row("algorithms", strings.Join(s.Algorithms, ", "))
	for _, user := range s.Users {
		t.row("user", user)
	}
	t.row("mutual", s.Mutual)
	t.row("portal groups", numbers(s.PortalGroups))
	t.row("IPsec", s.IPsec)
	t.row("IPsec profile", s.IPsecProfile)
	redirect := s.Redirect
	if s.Permanent {
		redirect += " (permanent)"
	}
	t.row("redirect", redirect)
	n := &s.Negotiation
	t.row("InitialR2T", map[bool]string{true: "Yes", false: "No"}[n.InitialR2T])
	t.row("FirstBurstLength", size(n.FirstBurstLength))
	t.row("MaxBurstLength", size(n.MaxBurstLength))
	t.row("MaxOutstandingR2T", n.MaxOutstandingR2T)
	t.row("MaxRecvDataSegmentLength", size(n.MaxRecvDataSegmentLength))
	for _, pattern := range s.Initiators {
		t.row("initiators", pattern)
	}
	for _, network := range s.Networks {
		t.row("networks", network)
	}
	for _, pattern := range s.ResetsFor {
		t.row("resets for", pattern)
	}
	for i := range s.LUNs {
		l := &s.LUNs[i]
		t.row(fmt.Sprintf("LUN %d", l.ID), fmt.Sprintf("%s, %s, %s, %s", stateOf(l), size(l.Size), l.Backend, access(l)))
	}
	for _, id := range s.Sessions {
		t.row("session", id)
	}
}

func (p *program) setTarget() *cobra.Command {
	return p.change(verb{names: targetOptional, use: "set [TARGET] KEY=VALUE...", short: "Set keys of a target",
		args: cobra.MinimumNArgs(2), complete: p.completeKeys(config.Target{}, []string{"name", "luns"}, targets),
		long:    "Set keys of a target in one change. Keys and values are those of targets in the\nconfiguration file (docs/config.md).",
		example: "  iser-target target set iqn.2026-11.io.example:store resets_for='[\"iqn.2026-11.io.example:node*\"]'"},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			v, err := c.values(c.args[1:])
			if err != nil {
				return nil, err
			}
			return c.SetTarget(ctx, c.args[0], v, o)
		})
}

func numbers(list []int) string {
	return strings.Join(texts(list, strconv.Itoa), ",")
}

// lun returns the commands about LUNs.
func (p *program) lun() *cobra.Command {
	list := list(p, verb{names: targetRequired, use: "list [TARGET]", short: "List the LUNs of all targets, or of one",
		args: cobra.MaximumNArgs(1), complete: p.complete(targets)},
		func(ctx context.Context, c *call) ([]schema.LUNState, error) {
			return c.LUNs(ctx, strings.Join(c.args, ""))
		},
		"TARGET* LUN* STATE SIZE USED BACKEND PATH ACCESS REASON | BLOCK NAA SERIAL VENDOR PRODUCT WAITING", func(l *schema.LUNState) []any {
			used := ""
			if l.Space != nil {
				used = compact(l.Space.Used)
			}
			return []any{l.Target, l.ID, stateOf(l), size(l.Size), used, l.Backend, l.Path, access(l), reason(l),
				l.BlockSize, l.NAA, l.Serial, l.Vendor, l.Product, l.Waiting}
		})
	show := show(p, verb{names: targetOptional, use: "show [TARGET] LUN", short: "Show a LUN with its settings, counters and reservation",
		args: cobra.ExactArgs(2), parse: (*call).parseLUN, complete: p.complete(targets, luns)},
		func(ctx context.Context, c *call) (schema.LUNState, error) { return c.LUN(ctx, c.target, c.lun) }, lunTable)
	return group("lun", "Manage LUNs", list, show, p.lunStats(), p.createLUN(), p.deleteLUN(), p.resizeLUN(), p.snapshotLUN(), p.cloneLUN(), p.setLUN(), p.resetSettings(), p.recoverLUN(), p.scrubLUN(), p.faultLUN())
}

// stateOf returns the state of a LUN, or its health if that says more.
func stateOf(l *schema.LUNState) string {
	if l.State == schema.Ready && l.Health != schema.Healthy {
		return l.Health
	}
	return l.State
}

func (p *program) recoverLUN() *cobra.Command {
	return p.command(verb{names: targetOptional, use: "recover [TARGET] LUN", short: "Use the file or device of a LUN again that is not healthy",
		args: cobra.ExactArgs(2), parse: (*call).parseLUN, complete: p.complete(targets, luns),
		long: "Use the file or device of a LUN again that lun list shows as failed, orphaned or\ndegraded. Its sessions stay. Repair the cause first. After a failed sync, data that was written\nbefore it may be lost: check it, for example with fsck. An orphaned LUN serves the\nfile that is in place now.",
		run: func(ctx context.Context, c *call) error {
			r, err := c.RecoverLUN(ctx, c.target, c.lun)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(c.cmd.OutOrStdout(), "LUN %d of %s: was %s, is %s\n", c.lun, c.target, r.Before, r.Health)
			if err == nil && r.Lost != "" {
				_, err = fmt.Fprintf(c.cmd.OutOrStdout(), "%s.\n", r.Lost)
			}
			return err
		}})
}

// reason returns why l is not ready, or what is unusual about it.
func reason(l *schema.LUNState) string {
	if l.Reason == "" && l.Faults != nil {
		return "faults are injected until " + l.Faults.Until.Local().Format(time.TimeOnly)
	}
	return l.Reason
}

func access(l *schema.LUNState) string {
	switch {
	case l.ReadOnly:
		return "ro"
	case slices.ContainsFunc(l.Settings, func(s schema.SettingState) bool {
		return s.Setting == "write_protect" && s.Value == "on"
	}):
		return "ro, by an initiator"
	}
	return "rw"
}

func (p *program) resetSettings() *cobra.Command {
	return p.command(verb{names: targetOptional, use: "reset-settings [TARGET] LUN", short: "Restore the defaults of what initiators set of a LUN",
		args: cobra.ExactArgs(2), parse: (*call).parseLUN, complete: p.complete(targets, luns),
		long: "Restore the defaults of what initiators set of a LUN for all: write protection (SWP),\nthe write cache (WCE), the format of sense data (D_SENSE), task sets (TST), a stopped or\nejected medium, the access states of portal groups, and identifying information. Saved\nsettings return to their defaults, too. Initiators are notified.\nlun show lists the settings, and the initiators that changed them.",
		run: func(ctx context.Context, c *call) error {
			if err := c.ResetSettings(ctx, c.target, c.lun); err != nil {
				return err
			}
			_, err := fmt.Fprintf(c.cmd.OutOrStdout(), "LUN %d of %s: all settings have their defaults\n", c.lun, c.target)
			return err
		}})
}

// faultLUN returns the command that injects faults.
func (p *program) faultLUN() *cobra.Command {
	var f schema.Faults
	var end bool
	cmd := p.command(verb{names: targetOptional, use: "fault [TARGET] LUN", short: "Inject faults between a LUN and its backend for a time",
		args: cobra.ExactArgs(2), parse: (*call).parseLUN, complete: p.complete(targets, luns),
		long: `Inject faults between a LUN and its backend for a time, to test initiators and their
file systems. Each call of the backend fails, hangs or takes longer with the given
probability. The same seed hits the same calls. A failed write changes nothing on the
medium. Faults end after --for, with --clear, and when the LUN is reopened or removed.
lun list shows them. They replace faults that are in force.`,
		example: `  iser-target lun fault iqn.2026-11.io.example:store 0 --read-error 0.01 --for 5m
  iser-target lun fault iqn.2026-11.io.example:store 0 --write-error 1 --sense 7/27/07
  iser-target lun fault iqn.2026-11.io.example:store 0 --hang 0.001 --latency 20ms --seed 42
  iser-target lun fault iqn.2026-11.io.example:store 0 --clear`,
		run: func(ctx context.Context, c *call) error {
			text := "faults are injected, see lun list"
			var err error
			switch {
			case !end:
				err = c.SetFaults(ctx, c.target, c.lun, f)
			case f != schema.Faults{Seed: 1}:
				return usage(c.cmd, "--clear ends all faults: leave out the other flags")
			default:
				text, err = "faults have ended", c.ClearFaults(ctx, c.target, c.lun)
			}
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(c.cmd.OutOrStdout(), "LUN %d of %s: %s\n", c.lun, c.target, text)
			return err
		}})
	fl := cmd.Flags()
	fl.Uint64Var(&f.Seed, "seed", 1, "number that chooses the calls")
	fl.Float64Var(&f.ReadError, "read-error", 0, "probability that a read fails")
	fl.Float64Var(&f.WriteError, "write-error", 0, "probability that a write fails")
	fl.Float64Var(&f.SyncError, "sync-error", 0, "probability that a sync or a durable write fails")
	fl.Float64Var(&f.Hang, "hang", 0, "probability that a call hangs until the faults end")
	fl.StringVar(&f.Latency, "latency", "", "how much longer calls take at most, like 50ms")
	fl.StringVar(&f.Sense, "sense", "", "sense key, ASC and ASCQ of errors in hexadecimal, like 3/11/00")
	fl.StringVar(&f.For, "for", "", "when the faults end, up to 1h (default 1m)")
	fl.BoolVar(&end, "clear", false, "end the faults")
	return cmd
}

// settingText returns the value of a setting, and what is unusual about it.
func settingText(s *schema.SettingState) string {
	var notes []string
	value, show := s.Value, func(text string) string { return text }
	if s.Setting == "identifying_text" { // any characters
		value, show = strconv.Quote(value), strconv.Quote
	}
	if s.Value != s.Default {
		notes = append(notes, "default "+show(s.Default))
	}
	if s.Value != s.Saved {
		notes = append(notes, "after a reset "+show(s.Saved))
	}
	if s.By != "" {
		notes = append(notes, "set by "+s.By)
	}
	if len(notes) == 0 {
		return value
	}
	return value + " (" + strings.Join(notes, ", ") + ")"
}

func lunTable(t *table, l schema.LUNState) {
	t.row("target", l.Target)
	t.row("LUN", l.ID)
	t.row("state", stateOf(&l))
	if why := reason(&l); why != "" {
		t.row("reason", why)
	}
	t.row("backend", l.Backend)
	t.row("path", l.Path)
	t.row("size", fmt.Sprintf("%s (%d bytes)", size(l.Size), l.Size))
	t.row("block size", l.BlockSize)
	t.row("NAA", "naa."+l.NAA) // as in wwid of Linux
	t.row("serial", l.Serial)
	t.row("vendor", l.Vendor)
	t.row("product", l.Product)
	t.row("read only", l.ReadOnly)
	t.row("write through", l.WriteThrough)
	t.row("removable", l.Removable)
	t.row("sanitize", l.Sanitize)
	t.row("shared", l.Shared)
	if l.Protection != 0 {
		t.row("protection", fmt.Sprintf("type %d", l.Protection))
	}
	if k := l.Checksums; k != nil {
		if l.Protection == 0 {
			t.row("checksums", k.Path)
		} else if k.Path != "" {
			t.row("protection file", k.Path)
		}
		t.row("corrupt blocks", k.Bad)
		if k.Pending > 0 {
			t.row(map[bool]string{true: "checksums pending", false: "protection pending"}[l.Protection == 0], rounded(k.Pending))
		}
		if s := k.Scrub; s != nil {
			t.row("scrub", fmt.Sprintf("%s, %s of %s, %d corrupt blocks", s.State, rounded(s.Done), rounded(s.Total), s.Bad))
		}
	}
	if v := l.Space; v != nil {
		t.row("space used", rounded(v.Used))
		t.row("space available", rounded(v.Available))
		for _, one := range v.Thresholds {
			text := size(one.Limit)
			if one.Reached {
				text += ", reached"
			}
			t.row("threshold "+one.Threshold, text)
		}
	}
	t.row("initiators", all(l.Initiators))
	t.row("read only for", strings.Join(l.ReadOnlyFor, ","))
	for _, s := range l.Settings {
		t.row(strings.ReplaceAll(s.Setting, "_", " "), settingText(&s))
	}
	t.row("rate", rateText(&l.RateState))
	t.row("waiting", l.Waiting)
	for i := range l.Rates {
		t.row("rate of each", fmt.Sprintf("%s: %s", strings.Join(l.Rates[i].Initiators, ","), rateText(&l.Rates[i].RateState)))
	}
	counterRows(t, &l.Counters)
	if r := l.Reservation; r != nil {
		reservationRows(t, r)
	}
}

func (p *program) createLUN() *cobra.Command {
	var (
		l     schema.LUN
		id    int
		rates rateFlags
		in    poolFlags
	)
	cmd := p.change(verb{adds: true, names: targetOptional, use: "create [TARGET] [--backend BACKEND] [--path PATH] [--pool POOL] [--size SIZE] [--preallocate] [--from FILE]", short: "Create a LUN", args: cobra.ExactArgs(1), complete: p.complete(targets),
		long: `Create a LUN. Initiators that are logged in are notified (REPORTED LUNS DATA HAS
CHANGED). If its file does not exist, the target creates it with the given size. The
file takes space as data is written. A file that exists keeps its size: leave out
--size, and use lun resize afterwards to extend it.

--preallocate creates the file with all its space. --from creates it as a copy of a
file or block device, which shares blocks with it if the file system supports that;
--size may be left out. Both require that the file does not exist, and show their
progress. If interrupted, they leave nothing behind.

--pool makes a new volume on this machine, and serves it: dir:/DIRECTORY makes a file,
lvm:GROUP/THINPOOL a thin volume of LVM, zfs:POOL/DATASET a sparse volume of ZFS. The
command runs lvcreate or zfs itself, so run it as root. If the target refuses the LUN,
the command removes the volume again.`,
		example: `  iser-target lun create iqn.2026-11.io.example:store --path /srv/one.img --size 10GiB
  iser-target lun create iqn.2026-11.io.example:store --backend block --path /dev/sdb
  iser-target lun create iqn.2026-11.io.example:store --pool lvm:vg0/thin --size 10GiB`},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			if c.cmd.Flags().Changed("id") {
				l.ID = &id
			}
			from, err := c.checkPool(&in, &l)
			if err != nil {
				return nil, err
			}
			if l.Path != "" && (l.Backend == "file" || l.Backend == "block") {
				if l.Path, err = c.absolute(l.Path); err != nil {
					return nil, err
				}
			}
			if l.ChecksumsPath != "" {
				if l.ChecksumsPath, err = c.absolute(l.ChecksumsPath); err != nil {
					return nil, err
				}
			}
			for flag, size := range map[string]string{"size": l.Size, "threshold-available": l.ThresholdAvailable, "threshold-used": l.ThresholdUsed} {
				if size == "" {
					continue
				}
				if _, err := config.ParseSize(size); err != nil {
					return nil, usage(c.cmd, "--%s: %v", flag, err)
				}
			}
			if err := rates.of(c.cmd, &l); err != nil {
				return nil, err
			}
			if from != nil {
				bytes, err := config.ParseSize(l.Size)
				if err != nil {
					return nil, usage(c.cmd, "--size: %v", err)
				}
				build := func(volume string, mark pool.Mark, dry bool) error {
					return from.Create(ctx, volume, int64(bytes), mark, dry)
				}
				return c.createInPool(ctx, from, &in, c.args[0], l, o, build, func(l schema.LUN) (*schema.Plan, error) {
					return c.makeLUN(ctx, l, o)
				})
			}
			return c.makeLUN(ctx, l, o)
		})
	f := cmd.Flags()
	f.IntVar(&id, "id", 0, "number of the LUN (default: the first free one)")
	f.StringVar(&l.Backend, "backend", "file", "kind of backend: memory, file, block, nbd, rbd or gotgt")
	f.StringVar(&l.Path, "path", "", "path of the file or device, or URI of an NBD server or RBD image")
	f.StringVar(&l.Size, "size", "", "size of the LUN, like 10GiB (default: that of the file or device)")
	f.IntVar(&l.BlockSize, "block-size", 0, "bytes of a block, 512 or 4096 (default 512)")
	f.BoolVar(&l.ReadOnly, "read-only", false, "refuse all writes")
	f.BoolVar(&l.WriteThrough, "write-through", false, "report a write as complete only when it is on stable storage")
	f.BoolVar(&l.Removable, "removable", false, "let initiators eject the medium")
	f.StringVar(&l.Identity, "identity", "", "of a file from another target: \"file\" keeps its serial number and NAA, \"new\" does not")
	f.StringVar(&l.Serial, "serial", "", "serial number that initiators see, of a disk that moves here (default: a new one)")
	f.StringVar(&l.NAA, "naa", "", "NAA designator that initiators see, of a disk that moves here (default: a new one)")
	f.StringVar(&l.Vendor, "vendor", "", "vendor that initiators see (default ISERTGT)")
	f.StringVar(&l.Product, "product", "", "product that initiators see (default VIRTUAL-DISK)")
	f.BoolVar(&l.Shared, "shared", false, "share the LUN with the other gateways of the cluster; requires --naa")
	f.BoolVar(&l.Sanitize, "sanitize", false, "let initiators erase the whole LUN with SANITIZE")
	f.BoolVar(&l.Checksums, "checksums", false, "keep checksums of the blocks in a side file, and verify them on each read")
	f.StringVar(&l.ChecksumsPath, "checksums-path", "", "the side file (default of a file: its path with .sums)")
	f.IntVar(&l.Protection, "protection", 0, "keep T10 protection information of that type, 1 or 3, with each block")
	f.StringVar(&l.ThresholdAvailable, "threshold-available", "", "space left on the medium that notifies initiators and operators, like 10GiB")
	f.StringVar(&l.ThresholdUsed, "threshold-used", "", "space taken by the LUN that notifies them")
	f.StringVar(&l.Plugin, "plugin", "", "name of the gotgt backend")
	f.StringVar(&l.Options, "options", "", "options for the gotgt backend")
	f.StringArrayVar(&l.Initiators, "initiator", nil, "pattern of initiators that see the LUN; repeatable (default: all)")
	f.StringArrayVar(&l.ReadOnlyFor, "read-only-for", nil, "pattern of initiators that may only read; repeatable")
	rates.add(cmd)
	f.BoolVar(&l.Preallocate, "preallocate", false, "create the file with all its space")
	f.StringVar(&in.pool, "pool", "", "make a volume in this pool: dir:/DIRECTORY, lvm:GROUP/THINPOOL or zfs:POOL/DATASET")
	f.StringVar(&in.volume, "volume", "", "name of the new volume of --pool (default: ALIAS-lunN)")
	f.StringVar(&l.From, "from", "", "create the file as a copy of this file or block device")
	cmd.MarkFlagFilename("path")
	cmd.MarkFlagFilename("from")
	cmd.RegisterFlagCompletionFunc("identity", cobra.FixedCompletions([]string{"file", "new"}, cobra.ShellCompDirectiveNoFileComp))
	cmd.RegisterFlagCompletionFunc("backend", cobra.FixedCompletions([]string{"memory", "file", "block", "nbd", "rbd", "gotgt"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// makeLUN adds l to the target that the first argument names, with progress if its file takes time to create.
func (c *call) makeLUN(ctx context.Context, l schema.LUN, o schema.Options) (*schema.Plan, error) {
	if !l.Preallocate && l.From == "" {
		return c.AddLUN(ctx, c.args[0], l, o)
	}
	if l.Backend != "file" {
		return nil, usage(c.cmd, "--preallocate and --from require the backend file, not %s", l.Backend)
	}
	if l.From == "" && l.Size == "" {
		return nil, usage(c.cmd, "--preallocate requires --size, the space of the file")
	}
	if l.From != "" {
		var err error
		if l.From, err = c.absolute(l.From); err != nil {
			return nil, err
		}
	}
	bar := newBar(c.cmd.ErrOrStderr())
	defer bar.end()
	plan, err := c.MakeLUN(c.cmd.Context(), c.args[0], l, o, bar.show)
	if err != nil && c.cmd.Context().Err() != nil {
		err = &schema.Error{Code: schema.Failed, Message: "interrupted: " + l.Path + " was not created, unless it was complete just before",
			Hint: "see iser-target lun list"}
	}
	return plan, err
}

func (p *program) deleteLUN() *cobra.Command {
	var volume bool
	cmd := p.change(verb{names: targetOptional, use: "delete [TARGET] LUN", short: "Delete a LUN; its file or device stays",
		args: cobra.ExactArgs(2), parse: (*call).parseLUN, complete: p.complete(targets, luns),
		long: "Delete a LUN. Its file or device stays. If a session uses the LUN, choose what\nhappens to its commands: --drain lets them finish, --now aborts them. --now also\naborts those of a LUN that was deleted before and still drains.\n\n--delete-volume also removes the volume that lun create --pool made in LVM or ZFS for the\nLUN, with its data. Run it as root, on the machine of the target."},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			if volume {
				return c.deleteWithVolume(ctx, o)
			}
			return c.RemoveLUN(ctx, c.target, c.lun, o)
		})
	cmd.Flags().BoolVar(&volume, "delete-volume", false, "also remove the volume of LVM or ZFS that lun create --pool made, with its data")
	return cmd
}

func (p *program) resizeLUN() *cobra.Command {
	var preallocate bool
	cmd := p.change(verb{names: targetOptional, use: "resize [TARGET] LUN [+]SIZE", short: "Change the size of a LUN while it is in use",
		args: cobra.ExactArgs(3), parse: (*call).parseLUN, complete: p.complete(targets, luns), shrinks: true,
		long: `Change the size of a LUN while it is in use. Initiators are notified (CAPACITY DATA
HAS CHANGED); Linux shows the new size after a rescan. A smaller size loses data and
requires --allow-shrink. +SIZE is added to the present size. The size of a block device cannot be set here: extend the
device, and send the target SIGHUP.

With --preallocate, the target changes the size first, and then allocates the space of
the file. If interrupted, or if the file system is full, the file has a part of it.`,
		example: "  iser-target lun resize iqn.2026-11.io.example:store 0 20GiB\n  iser-target lun resize store 0 +5G"},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			size := c.args[2]
			if more, ok := strings.CutPrefix(size, "+"); ok {
				l, err := c.LUN(ctx, c.target, c.lun)
				if err != nil {
					return nil, err
				}
				n, err := config.ParseSize(more)
				if err != nil {
					return nil, usage(c.cmd, "SIZE: %v", err)
				}
				if n > math.MaxInt64-config.Size(l.Size) {
					return nil, fmt.Errorf("%q is too much for a LUN of %v", size, config.Size(l.Size))
				}
				size = (n + config.Size(l.Size)).String()
			}
			if _, err := config.ParseSize(size); err != nil {
				return nil, usage(c.cmd, "SIZE: %v", err)
			}
			v := schema.Values{"size": size}
			if !preallocate {
				return c.SetLUN(ctx, c.target, c.lun, v, o)
			}
			bar := newBar(c.cmd.ErrOrStderr())
			defer bar.end()
			plan, err := c.GrowLUN(c.cmd.Context(), c.target, c.lun, v, o, bar.show)
			if err != nil && c.cmd.Context().Err() != nil {
				err = &schema.Error{Code: schema.Failed, Message: "interrupted: the LUN may have its new size, but not all its space",
					Hint: "see iser-target lun show " + c.target + " " + c.args[1]}
			}
			return plan, err
		})
	cmd.Flags().BoolVar(&preallocate, "preallocate", false, "allocate the space that the LUN grows by")
	return cmd
}

func (p *program) setLUN() *cobra.Command {
	var rates rateFlags
	cmd := p.change(verb{names: targetOptional, use: "set [TARGET] LUN [KEY=VALUE...]", short: "Set keys of a LUN",
		args: cobra.MinimumNArgs(2), parse: (*call).parseLUN, complete: p.completeKeys(config.LUN{}, []string{"id"}, targets, luns), shrinks: true,
		long: `Set keys of a LUN in one change. Keys and values are those of luns in the
configuration file (docs/config.md). --iops, --bandwidth and --burst limit how fast all
initiators together use the LUN; --min-iops and --min-bandwidth guarantee a rate. They
apply at once, without an error for commands in progress. 0 and none remove a rate.`,
		example: `  iser-target lun set iqn.2026-11.io.example:store 0 read_only=true
  iser-target lun set iqn.2026-11.io.example:store 0 initiators='["iqn.2026-11.io.example:*"]'
  iser-target lun set iqn.2026-11.io.example:store 0 --iops 5000 --bandwidth 100MiB --burst 2s
  iser-target lun set iqn.2026-11.io.example:store 0 rates='[{initiators: ["*:backup"], iops: 500}]'`},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			v, err := c.values(c.args[2:])
			if err == nil {
				err = rates.set(c.cmd, v)
			}
			if err != nil {
				return nil, err
			}
			if len(v) == 0 {
				return nil, usage(c.cmd, "nothing to set: give KEY=VALUE, or a flag like --iops")
			}
			return c.SetLUN(ctx, c.target, c.lun, v, o)
		})
	rates.add(cmd)
	return cmd
}

// portal returns the commands about portals.
func (p *program) portal() *cobra.Command {
	list := list(p, verb{use: "list", short: "List the portals", args: cobra.NoArgs},
		func(ctx context.Context, c *call) ([]schema.PortalState, error) { return c.Portals(ctx) },
		"LISTEN* ADDRESS TPGT TRANSPORTS CONNECTIONS IPSEC CONTROL ADVERTISE", func(s *schema.PortalState) []any {
			return []any{s.Listen, s.Address, s.TPGT, strings.Join(s.Transports, ","),
				s.Connections, s.IPsec, map[bool]string{true: "yes"}[s.Control], strings.Join(s.Advertise, ",")}
		})
	show := show(p, verb{use: "show ADDRESS", short: "Show a portal", args: cobra.ExactArgs(1), complete: p.complete(portals)},
		func(ctx context.Context, c *call) (schema.PortalState, error) {
			all, err := c.Portals(ctx)
			if err != nil {
				return schema.PortalState{}, err
			}
			address := WithPort(c.args[0])
			if i := slices.IndexFunc(all, func(s schema.PortalState) bool { return s.Listen == address || s.Address == address }); i >= 0 {
				return all[i], nil
			}
			return schema.PortalState{}, &schema.Error{Code: schema.NotFound, Message: "portal " + address + ": not found", Hint: lists["portal"]}
		}, func(t *table, s schema.PortalState) {
			t.row("listen", s.Listen)
			t.row("address", s.Address)
			t.row("TPGT", s.TPGT)
			t.row("transports", strings.Join(s.Transports, ", "))
			t.row("connections", s.Connections)
			t.row("IPsec", s.IPsec)
			t.row("control", s.Control)
			t.row("advertise", strings.Join(s.Advertise, ", "))
		})
	var po schema.Portal
	add := p.change(verb{adds: true, use: "create ADDRESS", short: "Create a portal: listen on another address, host[:port]", args: cobra.ExactArgs(1), complete: cobra.NoFileCompletions},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			switch {
			case po.TPGT == 0: // which the API takes for 1
				return nil, usage(c.cmd, "--tpgt must be from 1 to 65535, not 0")
			case c.cmd.Flags().Changed("transport") && len(po.Transports) == 0: // and for both
				return nil, usage(c.cmd, "--transport is empty: give iser or tcp, or leave it out for both")
			}
			po.Listen = WithPort(c.args[0])
			return c.AddPortal(ctx, po, o)
		})
	f := add.Flags()
	f.IntVar(&po.TPGT, "tpgt", 1, "tag of the portal group")
	f.StringSliceVar(&po.Transports, "transport", nil, "iser or tcp (default: both)")
	f.StringVar(&po.IPsec, "ipsec", "", "off, audit or required (default: off)")
	f.StringVar(&po.IPsecProfile, "ipsec-profile", "", "profile of the configuration that says which protection is good enough")
	f.BoolVar(&po.Control, "control", false, "make the control API available here, over RDMA, to callers with a certificate")
	f.StringSliceVar(&po.Advertise, "advertise", nil, "address that discovery returns instead of ADDRESS; repeatable")
	remove := p.change(verb{use: "delete ADDRESS", short: "Delete a portal: stop listening on its address", args: cobra.ExactArgs(1), complete: p.complete(portals)},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			return c.RemovePortal(ctx, WithPort(c.args[0]), o)
		})
	set := p.change(verb{use: "set ADDRESS KEY=VALUE...", short: "Set keys of a portal", args: cobra.MinimumNArgs(2), complete: p.completeKeys(config.Portal{}, []string{"listen"}, portals),
		long:    "Set keys of a portal in one change. Keys and values are those of portals in the\nconfiguration file (docs/config.md).",
		example: "  iser-target portal set 192.0.2.1:3260 ipsec=required ipsec_profile=storage"},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			v, err := c.values(c.args[1:])
			if err != nil {
				return nil, err
			}
			return c.SetPortal(ctx, WithPort(c.args[0]), v, o)
		})
	return group("portal", "Manage portals, the addresses that the target listens on", list, show, add, set, remove)
}

// WithPort returns the address of a portal with the port of iSCSI (RFC 7143, section 13.8) if it is an IP address alone.
func WithPort(address string) string {
	if a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(address, "["), "]")); err == nil {
		return netip.AddrPortFrom(a, iscsiPort).String()
	}
	return address
}

const iscsiPort = 3260

// session returns the commands about sessions.
func (p *program) session() *cobra.Command {
	list := listAnd(p, verb{use: "list", short: "List the sessions", args: cobra.NoArgs,
		long: "List the sessions. If IPsec is required or audited of one, a second table has the\nverdict, suite, SPIs and IKE identity of each of its connections. session show has\nthe reason of a verdict.\n\nDEPTH is the mean number of commands in progress in the last 5 to 10 seconds, or since\nthe login. top shows it for shorter and longer periods. TASKS of -o wide counts the\nrequests in progress at this moment, often none of a fast target."},
		func(ctx context.Context, c *call) ([]schema.SessionState, error) { return c.Sessions(ctx) },
		"TSIH* INITIATOR TARGET TRANSPORT CONNECTIONS FROM SINCE DEPTH | ISID TPGT USER LUNS TASKS", sessionRow, protectionTable)
	show := show(p, verb{use: "show TSIH", short: "Show a session with its parameters, counters and connections",
		args: cobra.ExactArgs(1), parse: (*call).parseTSIH, complete: p.complete(sessions)},
		func(ctx context.Context, c *call) (schema.SessionState, error) { return c.Session(ctx, c.tsih) }, sessionTable)
	var (
		reason string
		dry    bool
	)
	kill := p.output(verb{use: "kill TSIH", short: "End a session; its initiator may log in again",
		args: cobra.ExactArgs(1), parse: (*call).parseTSIH, complete: p.complete(sessions),
		long: "End a session. Its commands are aborted, and its initiator may log in again, as Linux does\nat once. The command is about nothing else, and requires no --disrupt.",
		run: func(ctx context.Context, c *call) error {
			s, err := c.Session(ctx, c.tsih)
			if err != nil {
				return err
			}
			if !dry {
				if err := c.KillSession(ctx, c.tsih, reason); err != nil {
					return err
				}
			}
			e := Killed{s.TSIH, s.Initiator, s.Target, s.Tasks, !dry}
			return p.print(c.cmd.OutOrStdout(), e, e.fill)
		}})
	kill.Flags().StringVar(&reason, "reason", "", "reason for the log and the events")
	kill.Flags().BoolVar(&dry, "dry-run", false, "show the session and do not end it")
	return group("session", "List, show and end sessions of initiators", list, show, kill)
}

// A Killed is what session kill did, or would do.
type Killed struct {
	TSIH      uint16 `json:"tsih"`
	Initiator string `json:"initiator"`
	Target    string `json:"target,omitempty"` // empty: discovery
	Tasks     int    `json:"tasks"`            // in progress before
	Ended     bool   `json:"ended"`            // false: dry run
}

func (k *Killed) fill(t *table) {
	if k.Ended {
		t.line("session %d ended", k.TSIH)
		return
	}
	t.line("session %d of %s would end, with %s in progress", k.TSIH, k.Initiator, count(k.Tasks, "task"))
}

func sessionRow(s *schema.SessionState) []any {
	from := ""
	if len(s.Connections) > 0 {
		from = s.Connections[0].Remote
	}
	target := s.Target
	if s.Discovery {
		target = "(discovery)"
	}
	return []any{s.TSIH, s.Initiator, target, s.Transport, len(s.Connections), from, s.Started.Local().Format(time.DateTime), depth(s.Depth), s.ISID, s.TPGT, s.User, numbers(s.LUNs), s.Tasks}
}

// depth returns a mean number of commands in progress as text.
func depth(d float64) string { return strconv.FormatFloat(d, 'f', 1, 64) }

// protectionTable shows how IPsec protects the connections of sessions, if that is required of any.
func protectionTable(t *table, list []schema.SessionState) {
	if !slices.ContainsFunc(list, func(s schema.SessionState) bool { return s.Protection() != nil }) {
		return
	}
	t.gap()
	t.head("TSIH CID IPSEC SUITE SPI-IN SPI-OUT IDENTITY")
	for i := range list {
		for j := range list[i].Connections {
			if c := &list[i].Connections[j]; c.IPsec != nil {
				t.row(list[i].TSIH, c.CID, c.IPsec.Verdict, c.IPsec.Suite, c.IPsec.SPIIn, c.IPsec.SPIOut, c.IPsec.Identity)
			}
		}
	}
}

func sessionTable(t *table, s schema.SessionState) {
	t.row("TSIH", s.TSIH)
	t.row("initiator", s.Initiator)
	t.row("ISID", s.ISID)
	t.row("target", s.Target)
	t.row("TPGT", s.TPGT)
	t.row("discovery", s.Discovery)
	t.row("transport", s.Transport)
	t.row("CHAP user", s.User)
	t.row("since", s.Started.Local().Format(time.RFC3339))
	t.row("LUNs", numbers(s.LUNs))
	t.row("depth", depth(s.Depth)+" commands in progress on average")
	t.row("tasks", fmt.Sprintf("%d now", s.Tasks))
	counterRows(t, &s.Counters)
	for _, k := range schema.Values(s.Parameters).Keys() {
		t.row(k, s.Parameters[k])
	}
	for _, c := range s.Connections {
		text := fmt.Sprintf("%s from %s to %s since %s, %d PDUs", c.Transport, c.Remote, c.Local, c.Started.Local().Format(time.RFC3339), c.Received)
		if f := c.Framing; f != nil {
			text += fmt.Sprintf(", CRC %v, Markers %v in and %v out, ORD %d", config.Switch(f.CRC), config.Switch(f.MarkersIn), config.Switch(f.MarkersOut), f.ORD)
		}
		t.row(fmt.Sprintf("connection %d", c.CID), text)
		if c.IPsec != nil {
			t.row("IPsec", protectionText(c.IPsec))
		}
	}
}

func counterRows(t *table, c *schema.CounterState) {
	t.row("commands", fmt.Sprintf("%d reads, %d writes, %d others, %d aborted, %d in flight", c.Reads, c.Writes, c.Others, c.Aborted, c.InFlight))
	t.row("data", fmt.Sprintf("%d bytes read, %d written", c.ReadBytes, c.WriteBytes))
	t.row("errors", fmt.Sprintf("%d, residuals %d", c.Errors, c.Residuals))
	for _, p := range c.Latency {
		t.row(strings.ReplaceAll(p.Phase, "_", " ")+" latency", fmt.Sprintf("p50 %s, p99 %s, mean %s", duration(p.P50), duration(p.P99), duration(p.Seconds/float64(p.Count))))
	}
}

// duration returns a time in seconds with three digits. The histograms cannot tell times
// below their first bound.
func duration(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	if d < time.Microsecond {
		return "below 1µs"
	}
	return d.Round(time.Duration(math.Pow10(int(math.Log10(float64(d))) - 2))).String()
}

// reservation returns the commands about reservations.
func (p *program) reservation() *cobra.Command {
	list := list(p, verb{use: "list", short: "List the reservations and registrations of all LUNs", args: cobra.NoArgs},
		func(ctx context.Context, c *call) ([]schema.Reservation, error) { return c.Reservations(ctx) },
		"TARGET* LUN* TYPE HOLDER REGISTRATIONS GENERATION APTPL", func(r *schema.Reservation) []any {
			return []any{r.Target, r.LUN, typeOf(&r.ReservationState),
				holder(&r.ReservationState), len(r.Registrations), r.Generation, r.APTPL}
		})
	var yes, dry bool
	clearIt := p.output(verb{names: targetOptional, use: "clear [TARGET] LUN", short: "Remove all reservations and registrations of a LUN",
		args: cobra.ExactArgs(2), parse: (*call).parseLUN, complete: p.complete(targets, luns),
		long: "Remove all reservations and registrations of a LUN. Clusters rely on them:\ninitiators that they keep out can write afterwards. Therefore --disrupt is required.",
		run: func(ctx context.Context, c *call) error {
			list, err := c.Reservations(ctx)
			if err != nil {
				return err
			}
			i := slices.IndexFunc(list, func(r schema.Reservation) bool { return strings.EqualFold(r.Target, c.target) && r.LUN == c.lun })
			if i < 0 {
				return &schema.Error{Code: schema.NotFound, Message: fmt.Sprintf("reservation of LUN %d of target %s: not found", c.lun, c.target)}
			}
			r := &list[i]
			done := Cleared{r.Target, r.LUN, typeOf(&r.ReservationState), holder(&r.ReservationState), len(r.Registrations), !dry}
			if dry {
				err := p.print(c.cmd.OutOrStdout(), done, done.fill)
				if !yes {
					err = errors.Join(err, &schema.Error{Code: schema.Refused, Message: "the change would be refused", Needs: []string{"disrupt"}, Hint: "use --disrupt to remove it"})
				}
				return err
			}
			if !yes {
				return &schema.Error{Code: schema.Refused, Message: "refused: initiators that the reservation keeps out could write. Nothing was changed",
					Needs: []string{"disrupt"}, Hint: "use --disrupt to remove it"}
			}
			if err := c.ClearReservation(ctx, c.target, c.lun); err != nil {
				return err
			}
			return p.print(c.cmd.OutOrStdout(), done, done.fill)
		}})
	clearIt.Flags().BoolVar(&yes, "disrupt", false, "let in the initiators that the reservation keeps out")
	clearIt.Flags().BoolVar(&dry, "dry-run", false, "show what would be removed and change nothing")
	list.Aliases = append(slices.Clone(list.Aliases), "show")
	return group("reservation", "List and clear reservations of LUNs", list, clearIt)
}

// A Cleared is what reservation clear removed, or would remove.
type Cleared struct {
	Target        string `json:"target"`
	LUN           int    `json:"lun"`
	Type          string `json:"type"`
	Holder        string `json:"holder,omitempty"`
	Registrations int    `json:"registrations"`
	Removed       bool   `json:"removed"` // false: dry run
}

func (c *Cleared) fill(t *table) {
	if c.Removed {
		t.line("LUN %d of %s: all reservations and registrations were removed", c.LUN, c.Target)
		return
	}
	by := ""
	if c.Holder != "" {
		by = " of " + c.Holder
	}
	t.line("LUN %d of %s: the reservation (%s)%s and %s would be removed", c.LUN, c.Target, c.Type, by, count(c.Registrations, "registration"))
}

func typeOf(r *schema.ReservationState) string {
	switch {
	case r.Legacy != "":
		return "RESERVE"
	case r.Type == "":
		return "registered only"
	}
	return r.Type
}

func holder(r *schema.ReservationState) string {
	if r.Legacy != "" {
		return r.Legacy
	}
	for _, reg := range r.Registrations {
		if reg.Holder {
			return reg.Initiator
		}
	}
	return ""
}

func reservationRows(t *table, r *schema.ReservationState) {
	t.row("reservation", typeOf(r))
	t.row("generation", r.Generation)
	t.row("APTPL", r.APTPL)
	for _, reg := range r.Registrations {
		role := "registered"
		if reg.Holder {
			role = "holder"
		}
		t.row(role, fmt.Sprintf("%s through port %d with key %s", reg.Initiator, reg.TargetPort, reg.Key))
	}
}

// An Admission is a pattern of the initiators that may log in to a target.
type Admission struct {
	Target    string `json:"target"`
	Initiator string `json:"initiator"`
}

// warnOfAll warns if all initiators may log in to the target of c, and nothing else than a pattern decides about that.
func warnOfAll(ctx context.Context, c *call) error {
	t, err := c.Target(ctx, c.args[0])
	if err != nil || t.Auth != "none" || len(t.Networks) > 0 {
		return err
	}
	_, err = fmt.Fprintf(c.cmd.ErrOrStderr(), "iser-target: warning: any host that reaches a portal can log in to %s: it has no authentication and no networks. Name initiators, or see iser-target auth user create --help\n", shown(t.Name))
	return err
}

// initiator returns the commands about the initiators that may log in.
func (p *program) initiator() *cobra.Command {
	patterns := func(ctx context.Context, c *client.Client, args []string) []string {
		name, _ := findTarget(ctx, c, args[0])
		t, _ := c.Target(ctx, name)
		return t.Initiators
	}
	allow := p.changeThen(verb{adds: true, names: targetOptional, use: "allow [TARGET] PATTERN", short: "Let initiators log in whose names match a pattern", args: cobra.ExactArgs(2), complete: p.complete(targets, refused)},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, func() error, error) {
			plan, err := c.Allow(ctx, c.args[0], c.args[1], o)
			if err == nil && strings.Trim(c.args[1], "*") == "" {
				err = warnOfAll(ctx, c)
			}
			return plan, nil, err
		})
	deny := p.change(verb{names: targetOptional, use: "deny [TARGET] PATTERN", short: "Remove a pattern of initiators that may log in", args: cobra.ExactArgs(2), complete: p.complete(targets, patterns),
		long: "Remove a pattern of initiators that may log in, as target list shows it. Initiators\nthat no other pattern matches lose their sessions, which requires --disrupt."},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			return c.Deny(ctx, c.args[0], c.args[1], o)
		})
	list := list(p, verb{names: targetRequired, use: "list [TARGET]", short: "List the patterns of initiators that may log in to all targets, or to one",
		args: cobra.MaximumNArgs(1), complete: p.complete(targets)},
		func(ctx context.Context, c *call) ([]Admission, error) {
			all, err := c.Targets(ctx)
			if err != nil {
				return nil, err
			}
			rows := []Admission{}
			found := len(c.args) == 0
			for _, t := range all {
				if len(c.args) > 0 && !strings.EqualFold(t.Name, c.args[0]) {
					continue
				}
				found = true
				for _, pattern := range t.Initiators {
					rows = append(rows, Admission{t.Name, pattern})
				}
			}
			if !found {
				return nil, notThere(c.args[0], all)
			}
			return rows, nil
		}, "TARGET* INITIATOR*", func(a *Admission) []any { return []any{a.Target, a.Initiator} })
	return group("initiator", "Manage the initiators that may log in to a target", list, allow, deny)
}
