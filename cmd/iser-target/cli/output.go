package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

var formats = []string{"table", "json", "yaml"}

func (p *program) outputFlag(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&p.output, "output", "o", "table", "table, json or yaml")
	cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp))
}

func (p *program) checkOutput(cmd *cobra.Command) error {
	if cmd.Flags().Lookup("output") != nil && !slices.Contains(formats, p.output) {
		return usage(cmd, "--output must be table, json or yaml, not %q", p.output)
	}
	return nil
}

// A table is lines with columns.
type table struct{ w *tabwriter.Writer }

func (t *table) row(columns ...any) {
	for i, c := range columns {
		if i > 0 {
			fmt.Fprint(t.w, "\t")
		}
		fmt.Fprint(t.w, printable(fmt.Sprint(c)))
	}
	fmt.Fprintln(t.w)
}

// below is a line that goes with the row above it, from its third column on.
func (t *table) below(text string) { fmt.Fprintf(t.w, "\t\t%s\n", printable(text)) }

// line is one that has no columns.
func (t *table) line(format string, a ...any) {
	t.w.Flush()
	fmt.Fprintln(t.w, printable(fmt.Sprintf(format, a...)))
}

// printable is s without what would do something to a terminal, such as to write from
// right to left: names are chosen by initiators.
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

// print writes v in the format that was asked for; a table is what fill makes.
func (p *program) print(w io.Writer, v any, fill func(*table)) error {
	switch p.output {
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

// printYAML writes what JSON says of v, with its names and order, as YAML.
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

// block has n written on lines of its own, and quoted only where that is needed.
func block(n *yaml.Node) {
	n.Style = 0
	for _, c := range n.Content {
		block(c)
	}
}

func size(n int64) string { return config.Size(n).String() }

// count is n of something, in words.
func count(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return strconv.Itoa(n) + " " + what
}

func all(list []string) string {
	if len(list) == 0 {
		return "all"
	}
	return strings.Join(list, ",")
}

// stepText is a step in words.
func stepText(s *schema.Step) string {
	c, object := s.Change, s.Change.Kind
	switch c.Kind {
	case "target":
		object = "target " + c.Target
	case "lun":
		object = fmt.Sprintf("LUN %d of %s", c.LUN, c.Target)
	case "portal":
		object = "portal " + c.Portal
	}
	switch c.Op {
	case config.Add:
		return "add " + object
	case config.Remove:
		return "remove " + object
	}
	text := "set "
	if c.Key != "" {
		text += c.Key + " of "
	}
	text += object
	if c.Old != "" || c.New != "" {
		text += fmt.Sprintf(": %s -> %s", orNone(c.Old), orNone(c.New))
	}
	return text
}

func planTable(t *table, p *schema.Plan, dry bool) {
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
		t.line("%s%s", stepText(s), state)
		for _, d := range s.Disturbs {
			t.line("  disturbs %s", d)
		}
		if dry && s.Disruptive {
			t.line("  needs --disrupt")
		}
		if dry && s.Shrinks {
			t.line("  needs --allow-shrink")
		}
	}
	if p.Note != "" {
		t.line("note: %s", p.Note)
	}
}
