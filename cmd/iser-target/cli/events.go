package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// eventKinds are the kinds of events, as docs/cli.md lists them.
var eventKinds = []string{"service", "login", "session", "capture", "config", "lun", "reservation", "setting", "control", "ipsec", "limit", "medium", "slow", "cluster"}

// eventLevels are the levels of events, the lowest first.
var eventLevels = []string{"info", "warn", "error"}

// timeLayouts are the forms of a time, besides RFC 3339. They are local times.
var timeLayouts = []string{"2006-01-02T15:04:05", "2006-01-02 15:04:05", "2006-01-02T15:04", "2006-01-02 15:04", time.DateOnly}

// A filter selects events. Zero fields select all.
type filter struct {
	number            uint64    // only events above it
	from              time.Time // only events at this time or later
	kinds             []string
	level             string // the lowest
	target, initiator string
	lun, session      *uint16
}

// parseSince sets what --since says: the number of an event, a duration before now, or a time.
func (f *filter) parseSince(s string, now time.Time) error {
	if s == "" {
		return nil
	}
	var err error
	if f.number, err = strconv.ParseUint(s, 10, 64); err == nil {
		return nil
	}
	if d, err := time.ParseDuration(s); err == nil {
		if d <= 0 {
			return fmt.Errorf("--since %s: the duration must be above 0", s)
		}
		f.from = now.Add(-d)
		return nil
	}
	if f.from, err = time.Parse(time.RFC3339, s); err == nil {
		return nil
	}
	for _, layout := range timeLayouts {
		if f.from, err = time.ParseInLocation(layout, s, now.Location()); err == nil {
			return nil
		}
	}
	return fmt.Errorf("--since %q: want a duration like 1h, a time like 2026-11-25T14:00, or the number of an event", s)
}

// check returns an error if a flag has a value that no event has.
func (f *filter) check() error {
	for _, k := range f.kinds {
		if !slices.Contains(eventKinds, k) {
			return fmt.Errorf("--kind %q: want one of %s", k, strings.Join(eventKinds, ", "))
		}
	}
	if f.level != "" && !slices.Contains(eventLevels, f.level) {
		return fmt.Errorf("--level %q: want one of %s", f.level, strings.Join(eventLevels, ", "))
	}
	return nil
}

// selects reports whether e passes. An event that does not name a target, LUN, session or initiator does not pass a filter for one.
func (f *filter) selects(e *schema.Event) bool {
	text := func(key, want string) bool { return want == "" || e.Attrs[key] == want }
	number := func(key string, want *uint16) bool {
		n, ok := e.Attrs[key].(float64) // as JSON has it
		return want == nil || ok && n == float64(*want)
	}
	return e.Number > f.number && !e.Time.Before(f.from) &&
		(len(f.kinds) == 0 || slices.Contains(f.kinds, e.Event)) &&
		(f.level == "" || slices.Index(eventLevels, strings.ToLower(e.Level)) >= slices.Index(eventLevels, f.level)) &&
		text("target", f.target) && text("initiator", f.initiator) && number("lun", f.lun) && number("tsih", f.session)
}

// events returns the command that shows events.
func (p *program) events() *cobra.Command {
	var (
		follow       bool
		since        string
		f            filter
		lun, session uint16
	)
	cmd := p.output(verb{use: "events [--follow]", short: "Show events: logins, refusals, changes, path errors", args: cobra.NoArgs,
		long: "Show events: logins and refusals with their reasons, changes, path errors. The\ntarget stores the last 1024 of each kind. Several filters select the events that\npass all of them. -o json writes one object on each line.",
		example: "  iser-target events --since 1h --level warn\n" +
			"  iser-target events --follow --kind login,session --target store",
		run: func(ctx context.Context, c *call) error {
			if c.cmd.Flags().Changed("lun") {
				f.lun = &lun
			}
			if c.cmd.Flags().Changed("session") {
				f.session = &session
			}
			if err := f.parseSince(since, time.Now()); err != nil {
				return usage(c.cmd, "%v", err)
			}
			if err := f.check(); err != nil {
				return usage(c.cmd, "%v", err)
			}
			if f.target != "" {
				name, err := findTarget(ctx, c.Client, f.target)
				if err != nil {
					return err
				}
				f.target = name
			}
			w := c.cmd.OutOrStdout()
			if follow {
				ctx = c.cmd.Context() // heartbeats bound it
			}
			each := func(e schema.Event) error {
				if !f.selects(&e) {
					return nil
				}
				return p.printOne(w, e, func() string { return eventLine(&e) })
			}
			if !follow {
				return c.Events(ctx, f.number, false, each)
			}
			say := func(format string, a ...any) {
				fmt.Fprintln(c.cmd.ErrOrStderr(), "iser-target: "+printable(fmt.Sprintf(format, a...)))
			}
			err := c.FollowWith(ctx, f.number, client.Follower{
				Event: each,
				Lost: func(err error) {
					if err == nil {
						say("the target ended the events; waiting for it")
						return
					}
					say("lost the target; waiting for it: %v", err)
				},
				Back: func(restarted bool) {
					if restarted {
						f.number = 0
						say("the target is back; it was started again, and numbers begin at 1")
						return
					}
					say("the target is back")
				},
			})
			if ctx.Err() != nil {
				return nil // interrupted, as intended
			}
			return err
		}})
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "continue with new events until interrupted, also after a restart of the target")
	cmd.Flags().StringVar(&since, "since", "", "only events of the last `TIME`, like 1h; since a time, like 2026-11-25T14:00; or with numbers above that")
	cmd.Flags().StringSliceVar(&f.kinds, "kind", nil, "only events of these `KINDS`, like login,session")
	cmd.Flags().StringVar(&f.level, "level", "", "only events of this `LEVEL` or above: info, warn or error")
	cmd.Flags().StringVar(&f.target, "target", "", "only events that name this `TARGET`")
	cmd.Flags().Uint16Var(&lun, "lun", 0, "only events that name a LUN with this `NUMBER`")
	cmd.Flags().Uint16Var(&session, "session", 0, "only events that name the session with this `TSIH`")
	cmd.Flags().StringVar(&f.initiator, "initiator", "", "only events that name this `INITIATOR`")
	return cmd
}

// eventLine returns an event as one line, without empty attributes.
func eventLine(e *schema.Event) string {
	var attrs []string
	for k, v := range e.Attrs {
		text := fmt.Sprint(v)
		if n, ok := v.(float64); ok { // JSON numbers are float64; avoid exponents
			text = strconv.FormatFloat(n, 'f', -1, 64)
		}
		if text == "" {
			continue
		}
		if strings.ContainsAny(text, " \"") {
			text = fmt.Sprintf("%q", text)
		}
		attrs = append(attrs, k+"="+text)
	}
	slices.Sort(attrs)
	return printable(strings.TrimSpace(fmt.Sprintf("%d %s %s %s: %s %s", e.Number, e.Time.Local().Format(time.DateTime), e.Level, e.Event, e.Text, strings.Join(attrs, " "))))
}
