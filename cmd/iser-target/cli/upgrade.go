package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
)

// upgrade returns the command that replaces the process of the target.
func (p *program) upgrade() *cobra.Command {
	return p.command(verb{use: "upgrade", short: "Replace the process of the target, and keep its sessions",
		long: `Replace the process of the target, and keep its sessions.

The target starts its program file again, which may be another version by now, with the
same arguments. The new process checks the configuration. Then the commands in progress
end, and the new process takes the sessions, portals and LUNs over. Initiators see a
pause of some milliseconds, and no error. The data of memory LUNs is copied; they need
twice their memory meanwhile.

If the new process does not start, or does not understand the state, the target continues
as it was. Sessions that do not come to rest within 500ms, those with an
ErrorRecoveryLevel above 0 and those in discovery are cut; their initiators log in again.`,
		example: "  install -m 755 iser-target.new /usr/bin/iser-target\n  iser-target upgrade",
		run: func(ctx context.Context, c *call) error {
			u, err := c.Upgrade(ctx)
			if err != nil {
				return err
			}
			cut := ""
			if u.Cut > 0 {
				cut = fmt.Sprintf(", %d were cut", u.Cut)
			}
			_, err = fmt.Fprintf(c.cmd.OutOrStdout(), "process %d serves: %s (before: %s)\nsessions %d continue after a pause of %s%s\n",
				u.PID, u.Version, u.Before, u.Sessions, u.Pause, cut)
			return err
		}})
}
