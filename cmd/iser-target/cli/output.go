package cli

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"unicode"

	"github.com/ohler55/ojg/jp"
	"github.com/ohler55/ojg/oj"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

var formats = []string{"table", "json", "yaml"}

// listFormats are the formats of lists.
var listFormats = []string{"table", "wide", "name", "json", "yaml"}

// jsonPath begins the format that prints a part of the answer.
const jsonPath = "jsonpath="

// outputFlag adds -o to cmd.
func (p *program) outputFlag(cmd *cobra.Command) {
	cmd.Flags().StringVarP(&p.format, "output", "o", "table", "format: table, json, yaml or jsonpath=EXPR")
	cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(append(slices.Clone(formats), jsonPath), cobra.ShellCompDirectiveNoFileComp))
}

// listFlags adds the flags of lists to cmd, which has -o.
func (p *program) listFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.Lookup("output").Usage = "format: table, wide (with more columns), name, json, yaml or jsonpath=EXPR"
	f.BoolVar(&p.noHeaders, "no-headers", false, "leave out the headings of the table")
	f.StringVar(&p.sortBy, "sort-by", "", "sort by this field of -o json, like size or counters.reads; with - before it, the largest first")
	f.BoolVarP(&p.watch, "watch", "w", false, "print the list again each time that it changes, until interrupted")
	cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(append(slices.Clone(listFormats), jsonPath), cobra.ShellCompDirectiveNoFileComp))
	cmd.RegisterFlagCompletionFunc("sort-by", cobra.NoFileCompletions)
}

// checkOutput returns a usageError if -o or --sort-by is wrong.
func (p *program) checkOutput(cmd *cobra.Command) (err error) {
	if cmd.Flags().Lookup("output") == nil {
		return nil
	}
	known, isList := formats, cmd.Flags().Lookup("sort-by") != nil
	if isList {
		known = listFormats
		if p.sortBy != "" {
			if p.sortPath, err = parsePath(strings.TrimPrefix(p.sortBy, "-")); err != nil {
				return usage(cmd, "--sort-by: %v", err)
			}
		}
	}
	if expr, ok := strings.CutPrefix(p.format, jsonPath); ok && cmd.Name() != "top" {
		if p.path, err = parsePath(expr); err != nil {
			return usage(cmd, "--output: %v", err)
		}
		return nil
	}
	if !slices.Contains(known, p.format) {
		return usage(cmd, "--output must be %s or jsonpath=EXPR, not %q", strings.Join(known, ", "), p.format)
	}
	return nil
}

// parsePath parses a JSONPath (RFC 9535). As in kubectl, braces around it and the $ at its begin may be left out.
func parsePath(text string) (jp.Expr, error) {
	expr := strings.TrimSpace(text)
	if strings.HasPrefix(expr, "{") && strings.HasSuffix(expr, "}") {
		expr = strings.TrimSpace(expr[1 : len(expr)-1])
	}
	switch {
	case expr == "":
		return nil, fmt.Errorf("the JSONPath is empty: give one like [*].name")
	case strings.HasPrefix(expr, "$"), strings.HasPrefix(expr, "@"):
	case expr[0] == '.' || expr[0] == '[':
		expr = "$" + expr
	default:
		expr = "$." + expr
	}
	x, err := jp.ParseString(expr)
	if err != nil {
		return nil, fmt.Errorf("%q is no JSONPath: %w", text, err)
	}
	return x, nil
}

// generic returns v as its JSON has it.
func generic(v any) (any, error) {
	b, err := json.Marshal(v)
	if err != nil {
		return nil, err
	}
	return oj.Parse(b)
}

// printPath writes what the JSONPath of -o finds in v: texts as they are, other values as JSON, one on each line.
func (p *program) printPath(w io.Writer, v any) error {
	data, err := generic(v)
	if err != nil {
		return err
	}
	for _, found := range p.path.Get(data) {
		text, ok := found.(string)
		if !ok {
			text = oj.JSON(found)
		}
		if _, err := fmt.Fprintln(w, shown(text)); err != nil {
			return err
		}
	}
	return nil
}

// sortList sorts list by --sort-by. Objects without the field come last.
func sortList[T any](p *program, list []T) error {
	if p.sortBy == "" {
		return nil
	}
	keys := make([]any, len(list))
	order := make([]int, len(list))
	found := len(list) == 0
	for i := range list {
		data, err := generic(list[i])
		if err != nil {
			return err
		}
		order[i], keys[i] = i, p.sortPath.First(data)
		found = found || p.sortPath.Has(data)
	}
	if !found {
		return fmt.Errorf("--sort-by: no object has the field %q. See -o json for the fields", strings.TrimPrefix(p.sortBy, "-"))
	}
	down := strings.HasPrefix(p.sortBy, "-")
	slices.SortStableFunc(order, func(a, b int) int {
		switch x, y := keys[a], keys[b]; {
		case x == nil || y == nil:
			return cmp.Compare(missing(x), missing(y))
		case down:
			return compareKeys(y, x)
		default:
			return compareKeys(x, y)
		}
	})
	sorted := make([]T, len(list))
	for i, from := range order {
		sorted[i] = list[from]
	}
	copy(list, sorted)
	return nil
}

func missing(key any) int {
	if key == nil {
		return 1
	}
	return 0
}

// compareKeys compares two values of JSON: numbers as numbers, all others as text.
func compareKeys(x, y any) int {
	number := func(v any) (float64, bool) {
		switch n := v.(type) {
		case int64:
			return float64(n), true
		case float64:
			return n, true
		}
		return 0, false
	}
	a, ok := number(x)
	if b, also := number(y); ok && also {
		return cmp.Compare(a, b)
	}
	return cmp.Compare(fmt.Sprint(x), fmt.Sprint(y))
}

// A table writes rows with aligned columns.
type table struct {
	w        *tabwriter.Writer
	text     *bytes.Buffer // that w has written
	coloured bool
	colours  map[int]string // of lines
	lines    int
}

func newTable(coloured bool) *table {
	t := &table{text: &bytes.Buffer{}, coloured: coloured, colours: map[int]string{}}
	t.w = tabwriter.NewWriter(t.text, 0, 8, 2, ' ', 0)
	return t
}

// writeTo writes the table.
func (t *table) writeTo(w io.Writer) error {
	t.w.Flush()
	if len(t.colours) == 0 {
		_, err := w.Write(t.text.Bytes())
		return err
	}
	var b bytes.Buffer
	i := 0
	for line := range strings.Lines(t.text.String()) {
		if c := t.colours[i]; c != "" {
			line = c + strings.TrimSuffix(line, "\n") + reset + "\n"
		}
		b.WriteString(line)
		i++
	}
	_, err := w.Write(b.Bytes())
	return err
}

// Colours of rows, as SGR sequences of ECMA-48.
const (
	red    = "\x1b[31m"
	green  = "\x1b[32m"
	yellow = "\x1b[33m"
	reset  = "\x1b[0m"
)

// cellColours are the colours of rows with a cell of that text.
var cellColours = map[string]string{
	schema.NotReady: red, "failed": red, "orphaned": red, "NO": red, "NOT HEALTHY": red, "problem": red, "degraded": yellow, schema.Draining: yellow, "warning": yellow,
}

// useColour reports whether w shows colours (https://no-color.org).
func useColour(w io.Writer) bool {
	return os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && isTerminal(w)
}

// head writes the names of the columns, which are space separated.
func (t *table) head(names string) {
	fmt.Fprintln(t.w, strings.ReplaceAll(names, " ", "\t"))
	t.lines++
}

func (t *table) row(columns ...any) {
	for i, c := range columns {
		if i > 0 {
			fmt.Fprint(t.w, "\t")
		}
		text := printable(fmt.Sprint(c))
		if colour := cellColours[text]; colour != "" && t.coloured {
			t.colours[t.lines] = colour
		}
		fmt.Fprint(t.w, text)
	}
	fmt.Fprintln(t.w)
	t.lines++
}

// below writes text under the third column of the row before.
func (t *table) below(text string) {
	fmt.Fprintf(t.w, "\t\t%s\n", printable(text))
	t.lines++
}

// line writes text that spans all columns.
func (t *table) line(format string, a ...any) {
	t.w.Flush()
	fmt.Fprintln(t.text, printable(fmt.Sprintf(format, a...)))
	t.lines++
}

// gap ends the columns and writes an empty line.
func (t *table) gap() {
	t.w.Flush()
	fmt.Fprintln(t.text)
	t.lines++
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
	if p.path != nil {
		return p.printPath(w, v)
	}
	switch p.format {
	case "json":
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(v)
	case "yaml":
		return printYAML(w, v)
	}
	t := newTable(useColour(w))
	fill(t)
	return t.writeTo(w)
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
