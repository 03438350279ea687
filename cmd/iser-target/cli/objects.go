package cli

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// list returns the command of v, which shows something, with -o.
func (p *program) list(v verb) *cobra.Command {
	cmd := p.command(v)
	p.outputFlag(cmd)
	return cmd
}

// target returns the commands about targets.
func (p *program) target() *cobra.Command {
	list := p.list(verb{use: "list", short: "List the targets", args: cobra.NoArgs,
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, _ []string) error {
			targets, err := c.Targets(ctx)
			if err != nil {
				return err
			}
			return p.print(cmd.OutOrStdout(), targets, func(t *table) {
				t.row("NAME", "ALIAS", "LUNS", "SESSIONS", "AUTH", "GROUPS", "INITIATORS")
				for _, s := range targets {
					t.row(s.Name, s.Alias, len(s.LUNs), len(s.Sessions), s.Auth, numbers(s.PortalGroups), strings.Join(s.Initiators, ","))
				}
			})
		}})
	var t schema.Target
	create := p.change(verb{use: "create NAME --initiator PATTERN...", short: "Create a target without LUNs", args: cobra.ExactArgs(1),
		long: "Create a target without LUNs. Initiators whose names match one of the patterns may\nlog in. In a pattern, * stands for any characters and ? for one character.", complete: cobra.NoFileCompletions},
		func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string, o schema.Options) (*schema.Plan, error) {
			if len(t.Initiators) == 0 {
				return nil, usage(cmd, "--initiator is required: a pattern of initiators that may log in, \"*\" for all")
			}
			t.Name = args[0]
			return c.AddTarget(ctx, t, o)
		})
	f := create.Flags()
	f.StringVar(&t.Alias, "alias", "", "a name for display")
	f.StringArrayVar(&t.Initiators, "initiator", nil, "pattern of initiators that may log in; repeatable")
	f.IntSliceVar(&t.PortalGroups, "portal-group", nil, "tag of a portal group that serves the target; repeatable (default: all)")
	remove := p.change(verb{use: "delete NAME", short: "Delete a target with its LUNs; their files and devices stay", args: cobra.ExactArgs(1), complete: p.names(nil)},
		func(ctx context.Context, _ *cobra.Command, c *client.Client, args []string, o schema.Options) (*schema.Plan, error) {
			return c.RemoveTarget(ctx, args[0], o)
		})
	return group("target", "Manage targets", list, create, remove)
}

func numbers[T int | uint16](list []T) string {
	var s []string
	for _, n := range list {
		s = append(s, fmt.Sprint(n))
	}
	return strings.Join(s, ",")
}

// lun returns the commands about LUNs.
func (p *program) lun() *cobra.Command {
	list := p.list(verb{use: "list [TARGET]", short: "List the LUNs of all targets, or of one", args: cobra.MaximumNArgs(1), complete: p.names(nil),
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string) error {
			luns, err := c.LUNs(ctx, strings.Join(args, ""))
			if err != nil {
				return err
			}
			return p.print(cmd.OutOrStdout(), luns, func(t *table) {
				t.row("TARGET", "LUN", "STATE", "SIZE", "BACKEND", "PATH", "ACCESS", "REASON")
				for _, l := range luns {
					t.row(l.Target, l.ID, l.State, size(l.Size), l.Backend, l.Path, access(&l), l.Reason)
				}
			})
		}})
	show := p.list(verb{use: "show TARGET LUN", short: "Show a LUN with its settings, counters and reservation", args: cobra.ExactArgs(2), complete: p.names(luns),
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string) error {
			target, id, err := lunArgs(cmd, args)
			if err != nil {
				return err
			}
			l, err := c.LUN(ctx, target, id)
			if err != nil {
				return err
			}
			return p.print(cmd.OutOrStdout(), l, func(t *table) { lunTable(t, &l) })
		}})
	return group("lun", "Manage LUNs", list, show, p.createLUN(), p.deleteLUN(), p.resizeLUN(), p.setLUN())
}

func access(l *schema.LUNState) string {
	if l.ReadOnly {
		return "ro"
	}
	return "rw"
}

func lunTable(t *table, l *schema.LUNState) {
	t.row("target", l.Target)
	t.row("LUN", l.ID)
	t.row("state", l.State)
	if l.Reason != "" {
		t.row("reason", l.Reason)
	}
	t.row("backend", l.Backend)
	t.row("path", l.Path)
	t.row("size", fmt.Sprintf("%s (%d bytes)", size(l.Size), l.Size))
	t.row("block size", l.BlockSize)
	t.row("NAA", "naa."+l.NAA) // as in wwid of Linux
	t.row("read only", l.ReadOnly)
	t.row("write through", l.WriteThrough)
	t.row("removable", l.Removable)
	t.row("sanitize", l.Sanitize)
	t.row("initiators", all(l.Initiators))
	t.row("read only for", strings.Join(l.ReadOnlyFor, ","))
	counterRows(t, &l.Counters)
	if r := l.Reservation; r != nil {
		reservationRows(t, r)
	}
}

func (p *program) createLUN() *cobra.Command {
	var (
		l  schema.LUN
		id int
	)
	cmd := p.change(verb{use: "create TARGET [--backend BACKEND] [--path PATH] [--size SIZE] [--preallocate] [--from FILE]", short: "Create a LUN", args: cobra.ExactArgs(1), complete: p.names(nil),
		long: `Create a LUN. Initiators that are logged in are notified (REPORTED LUNS DATA HAS
CHANGED). If its file does not exist, the target creates it with the given size. The
file takes space as data is written.

--preallocate creates the file with all its space. --from creates it as a copy of a
file or block device, which shares blocks with it if the file system supports that;
--size may be left out. Both require that the file does not exist, and show their
progress. If interrupted, they leave nothing behind.`,
		example: `  iser-target lun create iqn.2026-11.io.example:store --path /srv/one.img --size 10GiB
  iser-target lun create iqn.2026-11.io.example:store --backend block --path /dev/sdb`},
		func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string, o schema.Options) (*schema.Plan, error) {
			if cmd.Flags().Changed("id") {
				l.ID = &id
			}
			if l.Path != "" && (l.Backend == "file" || l.Backend == "block") {
				path, err := absolute(cmd, c, l.Path)
				if err != nil {
					return nil, err
				}
				l.Path = path
			}
			if !l.Preallocate && l.From == "" {
				return c.AddLUN(ctx, args[0], l, o)
			}
			if l.Backend != "file" {
				return nil, usage(cmd, "--preallocate and --from require the backend file, not %s", l.Backend)
			}
			if l.From == "" && l.Size == "" {
				return nil, usage(cmd, "--preallocate requires --size, the space of the file")
			}
			if l.From != "" {
				from, err := absolute(cmd, c, l.From)
				if err != nil {
					return nil, err
				}
				l.From = from
			}
			bar := newBar(cmd.ErrOrStderr())
			defer bar.end()
			plan, err := c.MakeLUN(cmd.Context(), args[0], l, o, bar.show) // without timeLimit
			if err != nil && cmd.Context().Err() != nil {
				err = &schema.Error{Code: schema.Failed, Message: "interrupted: " + l.Path + " was not created, unless it was complete just before",
					Hint: "see iser-target lun list"}
			}
			return plan, err
		})
	f := cmd.Flags()
	f.IntVar(&id, "id", 0, "number of the LUN (default: the first free one)")
	f.StringVar(&l.Backend, "backend", "file", "kind of backend: memory, file, block or gotgt")
	f.StringVar(&l.Path, "path", "", "path of the file or device")
	f.StringVar(&l.Size, "size", "", "size of the LUN, like 10GiB (default: that of the file or device)")
	f.IntVar(&l.BlockSize, "block-size", 0, "bytes of a block, 512 or 4096 (default 512)")
	f.BoolVar(&l.ReadOnly, "read-only", false, "refuse all writes")
	f.BoolVar(&l.WriteThrough, "write-through", false, "report a write as complete only when it is on stable storage")
	f.BoolVar(&l.Removable, "removable", false, "let initiators eject the medium")
	f.BoolVar(&l.Sanitize, "sanitize", false, "let initiators erase the whole LUN with SANITIZE")
	f.StringVar(&l.Plugin, "plugin", "", "name of the gotgt backend")
	f.StringVar(&l.Options, "options", "", "options for the gotgt backend")
	f.StringArrayVar(&l.Initiators, "initiator", nil, "pattern of initiators that see the LUN; repeatable (default: all)")
	f.StringArrayVar(&l.ReadOnlyFor, "read-only-for", nil, "pattern of initiators that may only read; repeatable")
	f.BoolVar(&l.Preallocate, "preallocate", false, "create the file with all its space")
	f.StringVar(&l.From, "from", "", "create the file as a copy of this file or block device")
	cmd.MarkFlagFilename("path")
	cmd.MarkFlagFilename("from")
	cmd.RegisterFlagCompletionFunc("backend", cobra.FixedCompletions([]string{"memory", "file", "block", "gotgt"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (p *program) deleteLUN() *cobra.Command {
	return p.change(verb{use: "delete TARGET LUN", short: "Delete a LUN; its file or device stays", args: cobra.ExactArgs(2), complete: p.names(luns),
		long: "Delete a LUN. Its file or device stays. If a session uses the LUN, choose what\nhappens to its commands: --drain lets them finish, --now aborts them. --now also\naborts those of a LUN that was deleted before and still drains."},
		func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string, o schema.Options) (*schema.Plan, error) {
			target, id, err := lunArgs(cmd, args)
			if err != nil {
				return nil, err
			}
			return c.RemoveLUN(ctx, target, id, o)
		})
}

func (p *program) resizeLUN() *cobra.Command {
	var preallocate bool
	cmd := p.change(verb{use: "resize TARGET LUN SIZE", short: "Change the size of a LUN while it is in use", args: cobra.ExactArgs(3), complete: p.names(luns), shrinks: true,
		long: `Change the size of a LUN while it is in use. Initiators are notified (CAPACITY DATA
HAS CHANGED); Linux shows the new size after a rescan. A smaller size loses data and
requires --allow-shrink. The size of a block device cannot be set here: extend the
device, and send the target SIGHUP.

With --preallocate, the target changes the size first, and then allocates the space of
the file. If interrupted, or if the file system is full, the file has a part of it.`,
		example: "  iser-target lun resize iqn.2026-11.io.example:store 0 20GiB"},
		func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string, o schema.Options) (*schema.Plan, error) {
			target, id, err := lunArgs(cmd, args)
			if err != nil {
				return nil, err
			}
			v := schema.Values{"size": args[2]}
			if !preallocate {
				return c.SetLUN(ctx, target, id, v, o)
			}
			bar := newBar(cmd.ErrOrStderr())
			defer bar.end()
			plan, err := c.GrowLUN(cmd.Context(), target, id, v, o, bar.show) // without timeLimit
			if err != nil && cmd.Context().Err() != nil {
				err = &schema.Error{Code: schema.Failed, Message: "interrupted: the LUN may have its new size, but not all its space",
					Hint: "see iser-target lun show " + target + " " + args[1]}
			}
			return plan, err
		})
	cmd.Flags().BoolVar(&preallocate, "preallocate", false, "allocate the space that the LUN grows by")
	return cmd
}

func (p *program) setLUN() *cobra.Command {
	return p.change(verb{use: "set TARGET LUN KEY=VALUE...", short: "Set keys of a LUN", args: cobra.MinimumNArgs(3), complete: p.names(luns), shrinks: true,
		long:    "Set keys of a LUN in one change. Keys and values are those of luns in the\nconfiguration file (docs/config.md).",
		example: "  iser-target lun set iqn.2026-11.io.example:store 0 read_only=true\n  iser-target lun set iqn.2026-11.io.example:store 0 initiators='[\"iqn.2026-11.io.example:*\"]'"},
		func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string, o schema.Options) (*schema.Plan, error) {
			target, id, err := lunArgs(cmd, args)
			if err != nil {
				return nil, err
			}
			v := schema.Values{}
			for _, a := range args[2:] {
				key, value, ok := strings.Cut(a, "=")
				if !ok || key == "" {
					return nil, usage(cmd, "%q is not KEY=VALUE", a)
				}
				if _, twice := v[key]; twice {
					return nil, usage(cmd, "%s is given twice", key)
				}
				v[key] = value
			}
			return c.SetLUN(ctx, target, id, v, o)
		})
}

// portal returns the commands about portals.
func (p *program) portal() *cobra.Command {
	list := p.list(verb{use: "list", short: "List the portals", args: cobra.NoArgs,
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, _ []string) error {
			portals, err := c.Portals(ctx)
			if err != nil {
				return err
			}
			return p.print(cmd.OutOrStdout(), portals, func(t *table) {
				t.row("LISTEN", "ADDRESS", "TPGT", "TRANSPORTS", "CONNECTIONS", "ADVERTISE")
				for _, s := range portals {
					t.row(s.Listen, s.Address, s.TPGT, strings.Join(s.Transports, ","), s.Connections, strings.Join(s.Advertise, ","))
				}
			})
		}})
	var po schema.Portal
	add := p.change(verb{use: "add ADDRESS", short: "Add a portal: listen on another address, host:port", args: cobra.ExactArgs(1), complete: cobra.NoFileCompletions},
		func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string, o schema.Options) (*schema.Plan, error) {
			switch {
			case po.TPGT == 0: // which the API takes for 1
				return nil, usage(cmd, "--tpgt must be from 1 to 65535, not 0")
			case cmd.Flags().Changed("transport") && len(po.Transports) == 0: // and for both
				return nil, usage(cmd, "--transport is empty: give iser or tcp, or leave it out for both")
			}
			po.Listen = args[0]
			return c.AddPortal(ctx, po, o)
		})
	f := add.Flags()
	f.IntVar(&po.TPGT, "tpgt", 1, "tag of the portal group")
	f.StringSliceVar(&po.Transports, "transport", nil, "iser or tcp (default: both)")
	f.StringSliceVar(&po.Advertise, "advertise", nil, "address that discovery returns instead of ADDRESS; repeatable")
	remove := p.change(verb{use: "remove ADDRESS", short: "Remove a portal: stop listening on its address", args: cobra.ExactArgs(1),
		complete: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			return p.ask(cmd, func(ctx context.Context, c *client.Client) (list []string) {
				if len(args) > 0 {
					return nil
				}
				portals, _ := c.Portals(ctx)
				for _, s := range portals {
					list = append(list, s.Listen)
				}
				return list
			})
		}},
		func(ctx context.Context, _ *cobra.Command, c *client.Client, args []string, o schema.Options) (*schema.Plan, error) {
			return c.RemovePortal(ctx, args[0], o)
		})
	return group("portal", "Manage portals, the addresses that the target listens on", list, add, remove)
}

// session returns the commands about sessions.
func (p *program) session() *cobra.Command {
	list := p.list(verb{use: "list", short: "List the sessions", args: cobra.NoArgs,
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, _ []string) error {
			sessions, err := c.Sessions(ctx)
			if err != nil {
				return err
			}
			return p.print(cmd.OutOrStdout(), sessions, func(t *table) {
				t.row("TSIH", "INITIATOR", "TARGET", "TRANSPORT", "CONNECTIONS", "FROM", "SINCE", "TASKS")
				for _, s := range sessions {
					from := ""
					if len(s.Connections) > 0 {
						from = s.Connections[0].Remote
					}
					target := s.Target
					if s.Discovery {
						target = "(discovery)"
					}
					t.row(s.TSIH, s.Initiator, target, s.Transport, len(s.Connections), from, s.Started.Local().Format(time.DateTime), s.Tasks)
				}
			})
		}})
	complete := func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		return p.ask(cmd, func(ctx context.Context, c *client.Client) (list []string) {
			if len(args) > 0 {
				return nil
			}
			return sessions(ctx, c)
		})
	}
	show := p.list(verb{use: "show TSIH", short: "Show a session with its parameters, counters and connections", args: cobra.ExactArgs(1), complete: complete,
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string) error {
			id, err := tsih(cmd, args[0])
			if err != nil {
				return err
			}
			s, err := c.Session(ctx, id)
			if err != nil {
				return err
			}
			return p.print(cmd.OutOrStdout(), s, func(t *table) { sessionTable(t, &s) })
		}})
	var reason string
	kill := p.command(verb{use: "kill TSIH", short: "End a session; its initiator may log in again", args: cobra.ExactArgs(1), complete: complete,
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string) error {
			id, err := tsih(cmd, args[0])
			if err != nil {
				return err
			}
			if err := c.KillSession(ctx, id, reason); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "session %d ended\n", id)
			return err
		}})
	kill.Flags().StringVar(&reason, "reason", "", "reason for the log and the events")
	return group("session", "List, show and end sessions of initiators", list, show, kill)
}

// tsih returns the TSIH that an argument names.
func tsih(cmd *cobra.Command, s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0, usage(cmd, "TSIH %q is not a number up to 65535", s)
	}
	return uint16(n), nil
}

func sessionTable(t *table, s *schema.SessionState) {
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
	t.row("tasks", s.Tasks)
	counterRows(t, &s.Counters)
	for _, k := range schema.Values(s.Parameters).Keys() {
		t.row(k, s.Parameters[k])
	}
	for _, c := range s.Connections {
		t.row(fmt.Sprintf("connection %d", c.CID), fmt.Sprintf("%s from %s to %s since %s, %d PDUs", c.Transport, c.Remote, c.Local, c.Started.Local().Format(time.RFC3339), c.Received))
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
	show := p.list(verb{use: "show", short: "Show the reservations and registrations of all LUNs", args: cobra.NoArgs,
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, _ []string) error {
			list, err := c.Reservations(ctx)
			if err != nil {
				return err
			}
			return p.print(cmd.OutOrStdout(), list, func(t *table) {
				t.row("TARGET", "LUN", "TYPE", "HOLDER", "REGISTRATIONS", "GENERATION", "APTPL")
				for _, r := range list {
					t.row(r.Target, r.LUN, typeOf(&r.ReservationState), holder(&r.ReservationState), len(r.Registrations), r.Generation, r.APTPL)
				}
			})
		}})
	var yes bool
	clearIt := p.command(verb{use: "clear TARGET LUN", short: "Remove all reservations and registrations of a LUN", args: cobra.ExactArgs(2), complete: p.names(luns),
		long: "Remove all reservations and registrations of a LUN. Clusters rely on them:\ninitiators that they keep out can write afterwards. Therefore --disrupt is required.",
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string) error {
			target, id, err := lunArgs(cmd, args)
			if err != nil {
				return err
			}
			if !yes {
				list, err := c.Reservations(ctx)
				if err != nil {
					return err
				}
				if !slices.ContainsFunc(list, func(r schema.Reservation) bool { return strings.EqualFold(r.Target, target) && r.LUN == id }) {
					return &schema.Error{Code: schema.NotFound, Message: fmt.Sprintf("reservation of LUN %d of target %s: not found", id, target)}
				}
				return &schema.Error{Code: schema.Refused, Message: "refused: initiators that the reservation keeps out could write. Nothing was changed",
					Needs: []string{"disrupt"}, Hint: "use --disrupt to remove it"}
			}
			if err := c.ClearReservation(ctx, target, id); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "LUN %d of %s: all reservations and registrations were removed\n", id, target)
			return err
		}})
	clearIt.Flags().BoolVar(&yes, "disrupt", false, "let in the initiators that the reservation keeps out")
	return group("reservation", "Show and clear reservations of LUNs", show, clearIt)
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

// initiator returns the commands about the initiators that may log in.
func (p *program) initiator() *cobra.Command {
	patterns := p.names(func(ctx context.Context, c *client.Client, target string) []string {
		t, _ := c.Target(ctx, target)
		return t.Initiators
	})
	allow := p.change(verb{use: "allow TARGET PATTERN", short: "Let initiators log in whose names match a pattern", args: cobra.ExactArgs(2), complete: p.names(nil)},
		func(ctx context.Context, _ *cobra.Command, c *client.Client, args []string, o schema.Options) (*schema.Plan, error) {
			return c.Allow(ctx, args[0], args[1], o)
		})
	deny := p.change(verb{use: "deny TARGET PATTERN", short: "Remove a pattern of initiators that may log in", args: cobra.ExactArgs(2), complete: patterns,
		long: "Remove a pattern of initiators that may log in, as target list shows it. Initiators\nthat no other pattern matches lose their sessions, which requires --disrupt."},
		func(ctx context.Context, _ *cobra.Command, c *client.Client, args []string, o schema.Options) (*schema.Plan, error) {
			return c.Deny(ctx, args[0], args[1], o)
		})
	return group("initiator", "Manage the initiators that may log in to a target", allow, deny)
}
