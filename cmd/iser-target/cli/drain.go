package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// drainPoll is how often drain looks how many sessions are left.
const drainPoll = 200 * time.Millisecond

// drain returns the command that makes the initiators leave.
func (p *program) drain() *cobra.Command {
	var (
		within time.Duration
		to     string
		detach bool
	)
	cmd := p.command(verb{use: "drain [--within TIME] [--to HOST:PORT]", short: "Make the initiators leave, and end the target",
		long: `Make the initiators leave, and end the target.

The target asks all initiators to log out, and serves them until they do. It sends their
next logins to the portal --to of another target, or refuses them without --to. When no
session is left, or the time is over, it cuts the other sessions, closes its LUNs and ends
with code 0. Interrupting this command does not stop the drain; SIGTERM to the target
ends it at once.`,
		example: "  iser-target drain --within 5m --to 192.0.2.8:3260",
		args:    cobra.NoArgs,
		parse: func(c *call) error {
			if within < 0 || within > schema.MaxDrain {
				return usage(c.cmd, "--within must be 0 to %v, not %v", schema.MaxDrain, within)
			}
			if _, _, err := net.SplitHostPort(to); to != "" && err != nil {
				return usage(c.cmd, "--to must be HOST:PORT, not %q", to)
			}
			return nil
		},
		run: func(ctx context.Context, c *call) error {
			state, err := c.Drain(ctx, within, to)
			if err != nil {
				return err
			}
			out := c.cmd.OutOrStdout()
			where := ""
			if to != "" {
				where = " and sent to " + to
			}
			if _, err := fmt.Fprintf(out, "sessions %d: asked to log out within %v%s\n", state.Sessions, within, where); err != nil || detach {
				return err
			}
			return followDrain(c.cmd.Context(), c, state.Sessions)
		}})
	f := cmd.Flags()
	f.DurationVar(&within, "within", 30*time.Second, "how long initiators have to log out; up to 24h")
	f.StringVar(&to, "to", "", "portal of another target that initiators are sent to")
	f.BoolVar(&detach, "detach", false, "do not wait for the end")
	return cmd
}

// followDrain shows how many sessions are left, until the target has ended.
func followDrain(ctx context.Context, c *call, last int) error {
	tick := time.NewTicker(drainPoll)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return errors.New("interrupted; the target continues to drain")
		case <-tick.C:
		}
		ask, cancel := context.WithTimeout(ctx, c.limit)
		n, err := normalSessions(ask, c.Client)
		silent := errors.Is(ask.Err(), context.DeadlineExceeded)
		cancel()
		var e *schema.Error
		switch {
		case errors.As(err, &e) && e.Code == schema.Unreached && !silent:
			_, err := fmt.Fprintln(c.cmd.OutOrStdout(), "the target has ended")
			return err
		case err != nil && ctx.Err() == nil:
			return err
		case err == nil && n != last:
			if _, err := fmt.Fprintf(c.cmd.OutOrStdout(), "sessions %d\n", n); err != nil {
				return err
			}
			last = n
		}
	}
}

// normalSessions returns how many sessions the target has, except those for discovery.
func normalSessions(ctx context.Context, c *client.Client) (n int, err error) {
	all, err := c.Sessions(ctx)
	for _, s := range all {
		if !s.Discovery {
			n++
		}
	}
	return n, err
}
