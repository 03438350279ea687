package cli

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/migrate"
	"github.com/iser-target/iser-target/config"
)

// importCommand returns the command that reads the configuration of another target.
func (p *program) importCommand() *cobra.Command {
	var from, dir string
	cmd := &cobra.Command{
		Use: "import --from lio|tgt|ctl FILE", Short: "Turn the configuration of LIO, tgt or ctld into one of this target", Args: cobra.ExactArgs(1),
		Long: `Turn the configuration of another target into one of this target, on standard output:
saveconfig.json of LIO (targetcli saveconfig), targets.conf of tgt (tgt-admin --dump), or
ctl.conf of ctld. Targets, LUNs with their identities (naa, serial, vendor, product), portals,
initiators and CHAP users keep their names. Secrets go into new files of mode 0600 below
--secrets. Standard error lists what has no counterpart. - reads standard input. No
target needs to run.`,
		Example: "  iser-target config import --from lio /etc/rtslib-fb-target/saveconfig.json --secrets /etc/iser-target/secrets >new.yaml\n" +
			"  tgt-admin --dump | iser-target config import --from tgt - >new.yaml",
		RunE: func(cmd *cobra.Command, args []string) error {
			if from == "" {
				return usage(cmd, "--from is required: %s", strings.Join(migrate.Formats, ", "))
			}
			source, b := args[0], []byte(nil)
			var err error
			if source == "-" {
				source, b, err = readInput(cmd)
			} else {
				b, err = config.ReadFile(source)
			}
			if err != nil {
				return err
			}
			r, err := migrate.Import(from, source, b)
			if err != nil {
				return err
			}
			if r.Secrets() > 0 && dir == "" {
				return usage(cmd, "--secrets DIR is required: the file has %s of CHAP", count(r.Secrets(), "secret"))
			}
			if dir, err = filepath.Abs(dir); err != nil {
				return err
			}
			text, err := r.Write(dir, source)
			if err != nil {
				return err
			}
			for _, n := range r.Notes {
				fmt.Fprintf(cmd.ErrOrStderr(), "note: %s\n", printable(n))
			}
			if _, err := cmd.OutOrStdout().Write(text); err != nil {
				return err
			}
			if err := migrate.Check(text); err != nil {
				return errors.Join(errors.New("the text needs an edit before config validate accepts it"), err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&from, "from", "", "where the file is from: lio, tgt or ctl")
	cmd.Flags().StringVar(&dir, "secrets", "", "directory for the files with CHAP secrets")
	cmd.MarkFlagDirname("secrets")
	cmd.RegisterFlagCompletionFunc("from", cobra.FixedCompletions(migrate.Formats, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}
