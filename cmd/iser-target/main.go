// Command iser-target serves files, block devices and memory as SCSI disks
// over iSER, without RDMA hardware or kernel modules.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/config"
)

// version is set by the linker in releases.
var version = ""

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if err := rootCommand(os.Stdout, os.Stderr).ExecuteContext(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "iser-target: %v\n", err)
		os.Exit(1)
	}
}

func rootCommand(out, errOut io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:           "iser-target",
		Short:         "An iSER target in user space, with a software iWARP stack of its own",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetOut(out)
	root.SetErr(errOut)
	root.AddCommand(serveCommand(), configCommand(), versionCommand())
	return root
}

func serveCommand() *cobra.Command {
	var path string
	cmd := &cobra.Command{
		Use:   "serve [--config FILE]",
		Short: "Serve the configured targets in the foreground until SIGTERM or SIGINT",
		Long: `Serve the configured targets in the foreground until SIGTERM or SIGINT.

Without --config there is one memory LUN of 1 GiB, for this machine only and
for any initiator.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := load(path)
			if err != nil {
				return err
			}
			s, err := newServer(cfg, cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			if path == "" {
				fmt.Fprint(cmd.OutOrStdout(), s.invitation())
			}
			return s.run(cmd.Context())
		},
	}
	cmd.Flags().StringVarP(&path, "config", "c", "", "configuration file (YAML)")
	cmd.MarkFlagFilename("config", "yaml", "yml")
	return cmd
}

func load(path string) (*config.Config, error) {
	if path == "" {
		return config.Default()
	}
	return config.Load(path)
}

func configCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "config", Short: "Work with configuration files"}
	cmd.AddCommand(&cobra.Command{
		Use:   "validate FILE",
		Short: "Check a configuration file and say all that is wrong with it",
		Args:  cobra.ExactArgs(1),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return []string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg, err := config.Load(args[0])
			if err != nil {
				return err
			}
			luns := 0
			for _, t := range cfg.Targets {
				luns += len(t.LUNs)
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s: valid: portals %d, targets %d, LUNs %d\n", args[0], len(cfg.Portals), len(cfg.Targets), luns)
			return nil
		},
	})
	return cmd
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		Run: func(cmd *cobra.Command, _ []string) {
			fmt.Fprintln(cmd.OutOrStdout(), "iser-target", versionString())
		},
	}
}

// versionString is what the linker or the build's own record says.
func versionString() string {
	if version != "" {
		return version
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	v := info.Main.Version
	if v == "" {
		v = "(devel)"
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" && len(s.Value) >= 12 {
			v += " " + s.Value[:12]
		}
	}
	return v + " " + info.GoVersion
}
