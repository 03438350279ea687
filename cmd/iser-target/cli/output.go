package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

var formats = []string{"table", "json", "yaml"}

// outputFlag adds -o to cmd.
func (p *program) outputFlag(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&p.format, "output", "o", "table", "format: table, json or yaml")
	cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
}

// checkOutput returns a usageError if -o is not one of formats.
func (p *program) checkOutput(cmd *cobra.Command) error {
	if cmd.Flags().Lookup("output") != nil && !slices.Contains(formats, p.format) {
		return usage(cmd, "--output must be table, json or yaml, not %q", p.format)
	}
	return nil
}

// A table writes rows with aligned columns.
type table struct{ w *tabwriter.Writer }

// head writes the names of the columns, which are space separated.
func (t *table) head(names string) { fmt.Fprintln(t.w, strings.ReplaceAll(names, " ", "\t")) }

func (t *table) row(columns ...any) {
	for i, c := range columns {
		if i > 0 {
			fmt.Fprint(t.w, "\t")
		}
		fmt.Fprint(t.w, printable(fmt.Sprint(c)))
	}
	fmt.Fprintln(t.w)
}

// below writes text under the third column of the row before.
func (t *table) below(text string) { fmt.Fprintf(t.w, "\t\t%s\n", printable(text)) }

// line writes text that spans all columns.
func (t *table) line(format string, a ...any) {
	t.w.Flush()
	fmt.Fprintln(t.w, printable(fmt.Sprintf(format, a...)))
}

// gap ends the columns and writes an empty line.
func (t *table) gap() {
	t.w.Flush()
	fmt.Fprintln(t.w)
}

// printable returns s with a ? for each character that would control a terminal, like one
// that changes the direction of writing. Initiators choose their names.
func printable(s string) string {
	if s == "" {
		return "-"
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// shown returns s like printable, but an empty s as it is.
func shown(s string) string {
	if s == "" {
		return s
	}
	return printable(s)
}

// print writes v in the format of -o. fill makes the table.
func (p *program) print(w io.Writer, v any, fill func(*table)) error {
	switch p.format {
	case "json":
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(v)
	case "yaml":
		return printYAML(w, v)
	}
	t := &table{tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)}
	fill(t)
	return t.w.Flush()
}

// printOne writes v, one of several objects, in the format of -o. text returns it for people.
func (p *program) printOne(w io.Writer, v any, text func() string) error {
	switch p.format {
	case "json":
		return json.NewEncoder(w).Encode(v)
	case "yaml":
		if _, err := fmt.Fprintln(w, "---"); err != nil {
			return err
		}
		return printYAML(w, v)
	}
	_, err := fmt.Fprintln(w, text())
	return err
}

// printYAML writes the JSON of v as YAML. Unlike sigs.k8s.io/yaml, it keeps the order of the
// fields.
func printYAML(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	var n yaml.Node
	if err := yaml.Unmarshal(b, &n); err != nil {
		return err
	}
	block(&n)
	e := yaml.NewEncoder(w)
	e.SetIndent(2)
	if err := e.Encode(&n); err != nil {
		return err
	}
	return e.Close()
}

// block sets the block style in n and below, and quotes only where YAML requires it.
func block(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		block(c)
	}
}

func size(n int64) string { return config.Size(n).String() }

// count returns n and a noun, with an s unless n is 1.
func count[T int | int64 | uint64](n T, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprint(n, " ", what)
}

// all returns a list of patterns, or "all" if it is empty.
func all(list []string) string {
	if len(list) == 0 {
		return "all"
	}
	return strings.Join(list, ",")
}

// planTable writes the steps of a plan. If given is not nil, they have not been taken, and given are the options of
// the dry run.
func planTable(t *table, p *schema.Plan, given *schema.Options) {
	dry := given != nil
	if len(p.Steps) == 0 {
		t.line("nothing to do")
	}
	for i := range p.Steps {
		s := &p.Steps[i]
		state := ""
		switch {
		case s.Restart:
			state = " (at the next start)"
		case !dry && s.Done:
			state = " (done)"
		}
		t.line("%v%s", s.Change, state)
		for _, d := range s.Disturbs {
			t.line("  disturbs %s", d)
		}
		if dry && s.Disruptive && !given.Disrupt {
			t.line("  requires --disrupt, --drain or --now")
		}
		if dry && s.Shrinks && !given.AllowShrink {
			t.line("  requires --allow-shrink")
		}
	}
	if p.Note != "" {
		t.line("note: %s", p.Note)
	}
}

// wouldRefuse returns the error that a plan ends with if it is carried out with the options given, or nil.
func wouldRefuse(p *schema.Plan, given *schema.Options) error {
	n := p.Needs()
	n.Disrupt, n.Shrink = n.Disrupt && !given.Disrupt, n.Shrink && !given.AllowShrink
	if n == (schema.Needs{}) {
		return nil
	}
	return &schema.Error{Code: schema.Refused, Message: "the change would be refused", Hint: strings.Join(remediesOf(n), " ")}
}
