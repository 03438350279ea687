package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

func yamlFiles(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return []string{"yaml", "yml"}, cobra.ShellCompDirectiveFilterFileExt
}

func (p *program) config() *cobra.Command {
	validate := &cobra.Command{
		Use:   "validate FILE",
		Short: "Check a configuration file and say all that is wrong with it",
		Long: "Check a configuration file and say all that is wrong with it. No target has to run. - is the input.\n" +
			"Warnings, of what is allowed and may not be meant, are on standard error.",
		Args: cobra.ExactArgs(1), ValidArgsFunction: yamlFiles,
		RunE: func(cmd *cobra.Command, args []string) error {
			source, cfg, err := load(cmd, args[0])
			if err != nil {
				return err
			}
			for _, w := range cfg.Warnings() {
				if _, err := fmt.Fprintf(cmd.ErrOrStderr(), "%s: warning: %s\n", source, printable(w)); err != nil {
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
	plan := p.list(verb{use: "plan [FILE]", short: "Say what applying a file would do, and whom it would disturb", args: cobra.MaximumNArgs(1), complete: yamlFiles,
		long: "Say what applying a file would do, and which sessions and LUNs it would disturb.\nWithout FILE it is the one that the target was started with. - is the input.",
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string) error {
			source, b, err := readDocument(ctx, cmd, c, args)
			if err != nil {
				return err
			}
			plan, err := c.Plan(ctx, source, b)
			if err != nil {
				return err
			}
			return p.print(cmd.OutOrStdout(), plan, func(t *table) { planTable(t, plan, true) })
		}})
	apply := p.change(verb{use: "apply [FILE]", short: "Make a file the configuration that runs", args: cobra.MaximumNArgs(1), complete: yamlFiles, shrinks: true,
		long: `Make a file the configuration that runs: what differs is done, and what does not
stays as it is. Its text becomes that of the file that the target was started
with, of which earlier versions are kept beside it. Without FILE it is that file
itself, after it was edited. - is the input.`},
		func(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string, o schema.Options) (*schema.Plan, error) {
			source, b, err := readDocument(ctx, cmd, c, args)
			if err != nil {
				return nil, err
			}
			if len(args) == 0 {
				return c.ApplyOwn(ctx, source, b, o)
			}
			return c.Apply(ctx, source, b, o)
		})
	export := p.command(verb{use: "export", short: "Write the configuration that runs, secrets included", args: cobra.NoArgs,
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, _ []string) error {
			b, err := c.Export(ctx)
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(b)
			return err
		}})
	return group("config", "Configuration files, and the configuration that runs", validate, plan, apply, export)
}

// maxInput is the most that is read of a configuration, in octets; the target takes no
// more, and says so.
const maxInput = config.MaxFile + 1

func readInput(cmd *cobra.Command) (source string, b []byte, err error) {
	b, err = io.ReadAll(io.LimitReader(cmd.InOrStdin(), maxInput))
	return "input", b, err
}

// load is the configuration in a file, and what to call it.
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

// readDocument is the document that a command line names, and what to call it.
func readDocument(ctx context.Context, cmd *cobra.Command, c *client.Client, args []string) (source string, b []byte, err error) {
	if len(args) == 1 && args[0] == "-" {
		return readInput(cmd)
	}
	var path string
	if len(args) == 1 {
		path = args[0]
	} else if c.Remote() {
		return "", nil, usage(cmd, "the target may be on another machine: name a FILE that is here")
	} else {
		st, err := c.State(ctx)
		if err != nil {
			return "", nil, err
		}
		if path = st.Config; path == "" {
			return "", nil, usage(cmd, "the target was started without a file: name one")
		}
	}
	b, err = config.ReadFile(path)
	return path, b, err
}

func (p *program) events() *cobra.Command {
	var (
		follow bool
		since  uint64
	)
	cmd := &cobra.Command{
		Use: "events [--follow]", Short: "Show what has happened: logins, refusals, changes", Args: cobra.NoArgs,
		Long: "Show what has happened: logins and refusals with their reasons, changes, path\nerrors. The target remembers the last 1024 of each kind. -o json writes one object\non each line.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := p.checkOutput(cmd); err != nil {
				return err
			}
			w := cmd.OutOrStdout()
			c, err := p.client(cmd)
			if err != nil {
				return err
			}
			err = c.Events(cmd.Context(), since, follow, func(e schema.Event) error { return p.event(w, e) })
			if cmd.Context().Err() != nil {
				return nil // it was interrupted, which is how following ends
			}
			if err == nil && follow {
				err = &schema.Error{Code: schema.Unreached, Message: "the target has ended", Hint: "start it, and follow again"}
			}
			return err
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what happens, until interrupted")
	cmd.Flags().Uint64Var(&since, "since", 0, "only events with higher numbers")
	p.outputFlag(cmd)
	return cmd
}

func (p *program) event(w io.Writer, e schema.Event) error {
	switch p.output {
	case "json":
		return json.NewEncoder(w).Encode(e)
	case "yaml":
		if _, err := fmt.Fprintln(w, "---"); err != nil {
			return err
		}
		return printYAML(w, e)
	}
	_, err := fmt.Fprintln(w, eventLine(&e))
	return err
}

// eventLine is an event for people. What an attribute says nothing with is left out.
func eventLine(e *schema.Event) string {
	var attrs []string
	for k, v := range e.Attrs {
		text := fmt.Sprint(v)
		if n, ok := v.(float64); ok { // as all numbers of JSON: not with an exponent
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

// errNotAdmitted ends explain when the answer is no.
var errNotAdmitted = errors.New("the login would be refused")

func (p *program) explain() *cobra.Command {
	var initiator, target, portal string
	cmd := p.list(verb{use: "explain --initiator IQN --target IQN [--portal ADDRESS]", short: "Say whether a login would be let in, and why", args: cobra.NoArgs,
		long: "Say whether a login would be let in, why, and what it would find. It exits with 1\nif it would not be.",
		run: func(ctx context.Context, cmd *cobra.Command, c *client.Client, _ []string) error {
			if initiator == "" || target == "" {
				return usage(cmd, "--initiator and --target are required")
			}
			e, err := c.Explain(ctx, initiator, target, portal)
			if err != nil {
				return err
			}
			if err := p.print(cmd.OutOrStdout(), e, func(t *table) { explanationTable(t, &e, initiator, target) }); err != nil {
				return err
			}
			if !e.Admitted {
				return errNotAdmitted
			}
			return nil
		}})
	f := cmd.Flags()
	f.StringVar(&initiator, "initiator", "", "iSCSI name of the initiator")
	f.StringVar(&target, "target", "", "iSCSI name of the target")
	f.StringVar(&portal, "portal", "", "portal that the login comes by (default: the first that leads to the target)")
	cmd.RegisterFlagCompletionFunc("target", func(cmd *cobra.Command, _ []string, to string) ([]string, cobra.ShellCompDirective) {
		return p.names(nil)(cmd, nil, to)
	})
	return cmd
}

// remedies are what helps an initiator against a rule that keeps it out.
var remedies = map[string]string{
	"target":         "iser-target target list has those that are served",
	"portal":         "iser-target portal list has those that are served",
	"portal group":   "iser-target portal list has the portals and their groups; portal_groups of the target says which lead to it",
	"initiators":     "iser-target initiator allow TARGET INITIATOR lets it in",
	"authentication": "auth.users of the target says who may be which initiator",
}

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
