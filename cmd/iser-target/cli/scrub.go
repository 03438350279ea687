package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// scrubPoll is how often a command that waits for a scrub asks for its progress.
const scrubPoll = 500 * time.Millisecond

// scrubLUN returns the command that scrubs a LUN.
func (p *program) scrubLUN() *cobra.Command {
	var req schema.ScrubRequest
	var wait, status, cancel bool
	cmd := p.output(verb{names: targetOptional, use: "scrub [TARGET] LUN", short: "Read all blocks of a LUN and compare them with their checksums",
		args: cobra.ExactArgs(2), parse: (*call).parseLUN, complete: p.complete(targets, luns),
		long: `Read all blocks of a LUN with checksums from its disk in the background, and compare
them. Commands of initiators come first. Corrupt blocks make the LUN degraded; their
LBAs are in the log. --wait shows the progress until the end, and fails if blocks are
corrupt. If --wait is interrupted, the scrub continues.`,
		example: `  iser-target lun scrub iqn.2026-11.io.example:store 0 --rate 100MiB --wait
  iser-target lun scrub iqn.2026-11.io.example:store 0 --status
  iser-target lun scrub iqn.2026-11.io.example:store 0 --cancel`,
		run: func(ctx context.Context, c *call) error {
			var s *schema.Scrub
			var err error
			switch {
			case status && cancel, (status || cancel) && (wait || req.Rate != ""):
				return usage(c.cmd, "--status and --cancel go alone")
			case status:
				s, err = c.Scrub(ctx, c.target, c.lun)
			case cancel:
				s, err = c.CancelScrub(ctx, c.target, c.lun)
			default:
				s, err = c.BeginScrub(ctx, c.target, c.lun, req)
			}
			if err == nil && wait {
				s, err = c.awaitScrub()
			}
			if err != nil {
				return err
			}
			if err := p.printOne(c.cmd.OutOrStdout(), s, func() string { return scrubText(c, s) }); err != nil {
				return err
			}
			if wait && s.Bad > 0 {
				return &schema.Error{Code: schema.Failed, Message: fmt.Sprintf("LUN %d of %s has %d corrupt blocks", c.lun, c.target, s.Bad),
					Hint: "restore them from a backup, then scrub again; their LBAs are in iser-target events"}
			}
			return nil
		}})
	f := cmd.Flags()
	f.StringVar(&req.Rate, "rate", "", "read at most so much per second, like 100MiB (default: no limit)")
	f.BoolVar(&wait, "wait", false, "wait for the end")
	f.BoolVar(&status, "status", false, "show how far the last scrub is")
	f.BoolVar(&cancel, "cancel", false, "end the scrub")
	return cmd
}

// awaitScrub shows the progress of the scrub until it has ended.
func (c *call) awaitScrub() (*schema.Scrub, error) {
	bar := newBar(c.cmd.ErrOrStderr())
	defer bar.end()
	ctx := c.cmd.Context()
	for {
		ask, cancel := context.WithTimeout(ctx, c.limit)
		s, err := c.Scrub(ask, c.target, c.lun)
		cancel()
		if err != nil {
			return nil, err
		}
		bar.show(schema.Progress{Phase: "scrubbing", Done: s.Done, Total: s.Total})
		if s.State != schema.ScrubRunning {
			return s, nil
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(scrubPoll):
		}
	}
}

// scrubText returns the line about a scrub.
func scrubText(c *call, s *schema.Scrub) string {
	return fmt.Sprintf("LUN %d of %s: scrub %s, %s of %s, %d corrupt blocks", c.lun, c.target, s.State, rounded(s.Done), rounded(s.Total), s.Bad)
}
