package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/lun/state"
)

// stateCommand returns the commands about a state directory. They need no running target.
func stateCommand() *cobra.Command {
	var path string
	directory := func(args []string) (string, error) {
		switch {
		case len(args) > 0 && path != "":
			return "", errors.New("name a directory or --config, not both")
		case len(args) > 0:
			return args[0], nil
		}
		doc, err := open(path)
		if err != nil {
			return "", err
		}
		cfg, err := doc.Config()
		switch {
		case err != nil:
			return "", err
		case path == "" || cfg.StateDir == "":
			return "", errors.New("name the state directory, or with --config a configuration that has state_dir")
		}
		return cfg.StateDir, nil
	}
	check := &cobra.Command{
		Use: "check [DIRECTORY]", Short: "Examine the files of a state directory", Args: cobra.MaximumNArgs(1),
		Long: `Examine the files of a state directory. Nothing is changed, and a target may run.
The exit code is 1 if a file or a record is damaged, or will be restored.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := directory(args)
			if err != nil {
				return err
			}
			if fi, err := os.Stat(dir); err != nil {
				return err
			} else if !fi.IsDir() {
				return fmt.Errorf("%s is not a directory", dir)
			}
			return checkState(cmd, dir)
		},
	}
	var discard []string
	repair := &cobra.Command{
		Use: "repair [DIRECTORY] [--discard FILE]", Short: "Restore damaged files of a state directory", Args: cobra.MaximumNArgs(1),
		Long: `Restore damaged files of a state directory from their spare copies, as the target does
when it starts. Of a file whose spare copy is damaged, too, the good records are kept.
The LUN of a record that is damaged in both is not ready until --discard FILE:NAA
accepts that. A file of which nothing is left stops the start. --discard FILE sets it
aside as FILE.damaged, and the target begins without it. The target must not run.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := directory(args)
			if err != nil {
				return err
			}
			done, err := daemon.RepairState(dir, discard)
			for _, reason := range done.Restored {
				fmt.Fprintf(cmd.OutOrStdout(), "restored from its spare copy: %v\n", reason)
			}
			for _, reason := range done.Salvaged {
				fmt.Fprintf(cmd.OutOrStdout(), "what is left is kept: %v\n", reason)
			}
			if err != nil {
				return fmt.Errorf("%w. See iser-target state check", err)
			}
			for _, name := range discard {
				if strings.Contains(name, ":") {
					fmt.Fprintf(cmd.OutOrStdout(), "discarded: %s\n", name)
				} else {
					fmt.Fprintf(cmd.OutOrStdout(), "discarded: %s is %[1]s.damaged now\n", filepath.Join(dir, name))
				}
			}
			return checkState(cmd, dir)
		},
	}
	repair.Flags().StringArrayVar(&discard, "discard", nil, "FILE or FILE:NAA, a damaged file or record to begin without; repeatable")
	cmd := &cobra.Command{
		Use: "state", Short: "Examine and repair the state directory", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.PersistentFlags().StringVarP(&path, "config", "c", "", "configuration file (YAML) that names the directory")
	cmd.MarkPersistentFlagFilename("config", "yaml", "yml")
	cmd.AddCommand(check, repair)
	return cmd
}

// checkState prints what is found in dir. The error is about files that are not good.
func checkState(cmd *cobra.Command, dir string) error {
	list := daemon.CheckState(dir)
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "FILE\tSTATE\tREASON")
	bad := 0
	for _, c := range list {
		reason := ""
		if c.Reason != nil {
			reason = c.Reason.Error()
			bad++
		}
		fmt.Fprintf(w, "%s\t%s\t%s\n", filepath.Base(c.Path), c.Verdict, reason)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for i, c := range list {
		if c.Verdict == state.Damaged {
			fmt.Fprintf(cmd.OutOrStdout(), "Without %s %s.\n", daemon.StateFiles[i].File, daemon.StateFiles[i].Without)
		}
		for i, text := range c.Left {
			fmt.Fprintf(cmd.OutOrStdout(), "An entry of %s is damaged (%s): %q. LUNs without an identity are not ready if it may be theirs.\n", filepath.Base(c.Path), c.Lost[i].Reason, text)
		}
		for _, l := range c.Lost[len(c.Left):] {
			fmt.Fprintf(cmd.OutOrStdout(), "The record %s:%s is damaged (%s): %s is not ready.\n", daemon.StateFiles[i].File, l.NAA, l.Reason, daemon.LUNOf(dir, l.NAA))
		}
	}
	if !slices.ContainsFunc(list, func(c state.Condition) bool { return c.Verdict != state.Missing }) {
		fmt.Fprintf(cmd.OutOrStdout(), "%s has no state: no target has used it, or its file system is not mounted.\n", dir)
	}
	if bad > 0 {
		return fmt.Errorf("files of %s that need a repair: %d. Run iser-target state repair while the target is stopped", dir, bad)
	}
	return nil
}
