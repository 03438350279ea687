package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/cmd/iser-target/probe"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// yamlFiles completes the names of YAML files.
func yamlFiles(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return []string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
}

// config returns the commands about the configuration.
func (p *program) config() *cobra.Command {
	var checkPaths bool
	validate := &cobra.Command{
		Use:   "validate FILE",
		Short: "Check a configuration file and list all errors",
		Long: "Check a configuration file and list all errors. No target needs to run. - reads\n" +
			"standard input. Warnings about settings that are allowed, but unusual, go to\nstandard error.",
		Args: cobra.ExactArgs(1), ValidArgsFunction: yamlFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			source, cfg, err := load(cmd, args[0])
			if err != nil {
				return err
			}
			warnings := cfg.Warnings()
			if w := config.LooseDirectory(source); w != "" && args[0] != "-" {
				warnings = append(warnings, w)
			}
			for _, w := range warnings {
				if _, err := fmt.Fprintf(cmd.ErrOrStderr(), "%s: warning: %s\n", source, printable(w)); err != nil {
					return err
				}
			}
			if checkPaths {
				if err := lookAtPaths(source, cfg); err != nil {
					return err
				}
			}
			luns := 0
			for _, t := range cfg.Targets {
				luns += len(t.LUNs)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: valid: portals %d, targets %d, LUNs %d\n", source, len(cfg.Portals), len(cfg.Targets), luns)
			return err
		},
	}
	plan := p.output(verb{use: "plan [FILE]", short: "Show what applying a file would change, and which sessions that disturbs", args: cobra.MaximumNArgs(1), complete: yamlFiles,
		long: "Show what applying a file would change, and which sessions and LUNs that disturbs.\nWithout FILE, plan uses the file that the target was started with. - reads standard\ninput. plan exits with 3 if apply would be refused without a flag.",
		run: func(ctx context.Context, c *call) error {
			source, b, err := c.readDocument(ctx)
			if err != nil {
				return err
			}
			plan, err := c.Plan(ctx, source, b)
			if err != nil {
				return err
			}
			err = p.print(c.cmd.OutOrStdout(), plan, func(t *table) { planTable(t, plan, &schema.Options{}) })
			return errors.Join(err, wouldRefuse(plan, &schema.Options{}))
		}})
	apply := p.change(verb{use: "apply [FILE]", short: "Make a file the running configuration", args: cobra.MaximumNArgs(1), complete: yamlFiles, shrinks: true,
		long: `Make a file the running configuration. The target changes only what differs. It
writes the text to the file that it was started with, and keeps earlier versions
next to it. Without FILE, apply uses that file itself, after you edited it. - reads
standard input.`},
		func(ctx context.Context, c *call, o schema.Options) (*schema.Plan, error) {
			source, b, err := c.readDocument(ctx)
			if err != nil {
				return nil, err
			}
			if len(c.args) == 0 {
				return c.ApplyOwn(ctx, source, b, o)
			}
			return c.Apply(ctx, source, b, o)
		})
	export := p.command(verb{use: "export", short: "Print the running configuration, for administrators with secrets", args: cobra.NoArgs,
		run: func(ctx context.Context, c *call) error {
			b, err := c.Export(ctx)
			if err != nil {
				return err
			}
			if err := checkText(b); err != nil {
				return err
			}
			_, err = c.cmd.OutOrStdout().Write(b)
			return err
		}})
	schemaCommand := &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of the configuration file, for editors",
		Long: "Print the JSON Schema of the configuration file. Editors with a YAML language server\n" +
			"complete keys by it, show their meaning, and mark what is wrong. config validate checks\nmore.",
		Example: "  iser-target config schema > iser-target.schema.json",
		Args:    cobra.NoArgs, ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := cmd.OutOrStdout().Write(config.Schema())
			return err
		},
	}
	validate.Flags().BoolVar(&checkPaths, "check-paths", false, "check on this machine that the files and devices of LUNs can be opened, or created, and that web configuration files can be used")
	return group("config", "Check, plan, apply, edit and restore the configuration", append(p.history(), asksNoTarget(validate), asksNoTarget(schemaCommand), plan, apply, export, asksNoTarget(p.importCommand()))...)
}

// checkText refuses a configuration that could do harm to a terminal.
func checkText(b []byte) error {
	if i := bytes.IndexFunc(b, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' && r != '\r' }); i >= 0 {
		return fmt.Errorf("the answer is not a configuration: it has a control character at byte %d", i)
	}
	return nil
}

// lookAtPaths returns an error for each LUN of cfg whose file or device a target on this machine could neither open nor create,
// and for each web configuration file that it could not use.
func lookAtPaths(source string, cfg *config.Config) error {
	var errs []error
	for i, t := range cfg.Targets {
		for j, l := range t.LUNs {
			if err := probe.LUN(&l); err != nil {
				errs = append(errs, &config.Error{Source: source, Key: fmt.Sprintf("targets[%d].luns[%d]", i, j), Reason: err.Error()})
			}
		}
	}
	for _, w := range cfg.WebConfigs() {
		if err := httpd.CheckWeb(w.File); err != nil {
			errs = append(errs, &config.Error{Source: source, Key: w.Key, Reason: err.Error()})
		}
	}
	return errors.Join(errs...)
}

// maxInput bounds the bytes that are read of a configuration. It is more than the target
// takes, so that the target reports a larger one.
const maxInput = config.MaxFile + 1

// readInput returns a document from standard input.
func readInput(cmd *cobra.Command) (source string, b []byte, err error) {
	b, err = io.ReadAll(io.LimitReader(cmd.InOrStdin(), maxInput))
	return "input", b, err
}

// load returns the configuration in a file, and its name for messages.
func load(cmd *cobra.Command, path string) (source string, cfg *config.Config, err error) {
	if path != "-" {
		cfg, err = config.Load(path)
		return path, cfg, err
	}
	source, b, err := readInput(cmd)
	if err != nil {
		return source, nil, err
	}
	doc, err := config.NewDocument(source, b)
	if err != nil {
		return source, nil, err
	}
	cfg, err = doc.Config()
	return source, cfg, err
}

// readDocument returns the document that the arguments name, and its name for messages.
func (c *call) readDocument(ctx context.Context) (source string, b []byte, err error) {
	var path string
	if len(c.args) == 1 {
		if path = c.args[0]; path == "-" {
			return readInput(c.cmd)
		}
	} else if c.Remote() {
		return "", nil, usage(c.cmd, "the target may be on another machine: name a FILE on this one")
	} else {
		st, err := c.State(ctx)
		if err != nil {
			return "", nil, err
		}
		if path = st.Config; path == "" {
			return "", nil, usage(c.cmd, "the target was started without a configuration file: name a FILE")
		}
	}
	b, err = config.ReadFile(path)
	return path, b, err
}

// errNotAdmitted is the error of explain if the login would be refused.
var errNotAdmitted = errors.New("the login would be refused")

// explain returns the command that explains the outcome of a login.
func (p *program) explain() *cobra.Command {
	var initiator, target, portal, from string
	cmd := p.output(verb{use: "explain --initiator IQN --target IQN [--portal ADDRESS] [--from ADDRESS]", short: "Explain whether a login would be accepted, and why", args: cobra.NoArgs,
		long:    "Explain whether a login would be accepted, why, and which LUNs it would see. explain\nexits with 1 if the login would be refused.",
		example: "  iser-target explain --initiator iqn.1993-08.org.debian:01:host --target iqn.2026-11.io.example:store",
		run: func(ctx context.Context, c *call) error {
			if initiator == "" || target == "" {
				return usage(c.cmd, "--initiator and --target are required")
			}
			name, err := findTarget(ctx, c.Client, target)
			if err != nil {
				return err
			}
			target = name
			e, err := c.Explain(ctx, initiator, target, portal, from)
			if err != nil {
				return err
			}
			if err := p.print(c.cmd.OutOrStdout(), e, func(t *table) { explanationTable(t, &e, initiator, target) }); err != nil {
				return err
			}
			if !e.Admitted {
				return errNotAdmitted
			}
			return nil
		}})
	f := cmd.Flags()
	f.StringVar(&initiator, "initiator", "", "iSCSI name of the initiator")
	f.StringVar(&target, "target", "", "name of the target, or a short one")
	f.StringVar(&portal, "portal", "", "portal of the login (default: the first that serves the target)")
	f.StringVar(&from, "from", "", "address that the initiator connects from (default: one that the target admits)")
	cmd.RegisterFlagCompletionFunc("target", p.complete(targets))
	cmd.RegisterFlagCompletionFunc("initiator", p.complete(initiators))
	return cmd
}

// remedies has the hints for the rules that can refuse an initiator.
var remedies = map[string]string{
	"target":         "see iser-target target list",
	"portal":         "see iser-target portal list",
	"portal group":   "see iser-target portal list for the groups of portals, and portal_groups of the target",
	"initiators":     "allow it with iser-target initiator allow TARGET INITIATOR",
	"networks":       "check networks of the target",
	"authentication": "check auth.users of the target",
}

// explanationTable writes e with a hint for each rule that refuses the initiator.
func explanationTable(t *table, e *schema.Explanation, initiator, target string) {
	answer := "admitted"
	if !e.Admitted {
		answer = "refused"
	}
	t.line("%s: %s", answer, e.Status)
	for _, r := range e.Rules {
		verdict := "ok"
		if !r.Passed {
			verdict = "NO"
		}
		t.row(verdict, r.Rule, r.Why)
		if help := remedies[r.Rule]; help != "" && !r.Passed {
			t.below("  " + strings.NewReplacer("TARGET", target, "INITIATOR", initiator).Replace(help))
		}
	}
	for _, l := range e.LUNs {
		t.row(fmt.Sprintf("LUN %d", l.ID), l.Access, l.Why)
	}
}
