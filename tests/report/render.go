package main

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"strings"
)

//go:embed report.html.tmpl
var pageText string

var page = template.Must(template.New("report").Parse(pageText))

// A report is what the files show.
type report struct {
	Title   string
	Command string
	Busy    string // a warning, or ""
	Facts   []fact
	Parts   []part
}

// A fact is a line about the machine.
type fact struct{ Name, Value string }

// A part shows a table.
type part struct {
	Title   string
	Notes   []string
	Failure string // why nothing was measured
	Rounds  int
	Charts  []chart
	Pairs   []string   // columns of Ratios
	Ratios  []ratioRow // of the medians
	Missing []gap
	table   *table
}

// A chart is the bars of a job. Lengths are pixels.
type chart struct {
	Job    job
	Unit   string
	Height int
	Bars   []bar
}

// A bar is a cell. Y is its top.
type bar struct {
	Label, Text         string
	Y, Width, From, To  int
	TextX               int
	Ours, ISER, Missing bool
}

// A ratioRow has the ratios of a job, in the order of the pairs.
type ratioRow struct {
	Job    string
	Ratios []string
}

const (
	barHeight = 16
	barStep   = 22
	barLeft   = 150 // where bars begin
	barMost   = 330 // length of the longest bar
)

// busy is the warning of a report whose machine had other work.
const busy = "The machine was busy with other work (see the load average): the figures say little about speed. Repeat the report on a quiet machine before you draw a conclusion."

// newPart shows t, or that err kept it from being measured.
func newPart(title string, notes []string, t *table, err error) part {
	p := part{Title: title, Notes: notes, table: t}
	if err != nil {
		p.Failure, p.table = firstLine(err.Error()), nil
		return p
	}
	p.Rounds, p.Missing = t.rounds, t.missing()
	pairs := t.pairs()
	for _, pair := range pairs {
		p.Pairs = append(p.Pairs, pair[0].String()+" / "+pair[1].String())
	}
	for _, j := range t.jobs {
		p.Charts = append(p.Charts, newChart(t, j))
		row := ratioRow{Job: j.Name}
		for _, pair := range pairs {
			text := "–"
			if s, ok := t.ratio(j, pair[0], pair[1]); ok {
				text = fmt.Sprintf("%.2f (%.2f–%.2f)", s.Median, s.Min, s.Max)
			}
			row.Ratios = append(row.Ratios, text)
		}
		p.Ratios = append(p.Ratios, row)
	}
	return p
}

func newChart(t *table, j job) chart {
	c := chart{Job: j, Unit: j.unit(), Height: barStep * len(t.columns)}
	most := 0.0
	for _, col := range t.columns {
		if s, ok := t.spread(j, col); ok {
			most = max(most, s.Max)
		}
	}
	x := func(v float64) int { return barLeft + int(v/most*barMost+0.5) }
	for i, col := range t.columns {
		b := bar{Label: col.String(), Y: i * barStep, Ours: col.Target == ours, ISER: col.Transport == "iSER"}
		s, ok := t.spread(j, col)
		if !ok {
			b.Text, b.Missing, b.TextX = "not measured, see below", true, barLeft+6
		} else {
			b.Width, b.From, b.To, b.TextX = x(s.Median)-barLeft, x(s.Min), x(s.Max), x(s.Max)+6
			b.Text = s.text()
		}
		c.Bars = append(c.Bars, b)
	}
	return c
}

func (j job) unit() string {
	if j.Bytes {
		return "MB/s"
	}
	return "IOPS"
}

// text returns "MEDIAN (MIN–MAX)".
func (s spread) text() string {
	return fmt.Sprintf("%s (%s–%s)", number(s.Median), number(s.Min), number(s.Max))
}

// number formats v with at least three digits.
func number(v float64) string {
	switch {
	case v < 10:
		return fmt.Sprintf("%.2f", v)
	case v < 100:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// html returns the page.
func (r *report) html() ([]byte, error) {
	var b bytes.Buffer
	err := page.Execute(&b, r)
	return b.Bytes(), err
}

// cellEscape keeps text within a cell of a table in Markdown.
var cellEscape = strings.NewReplacer("|", `\|`, "\n", " ", "<", "&lt;", "*", `\*`)

// markdown returns the summary. html is the name of the page.
func (r *report) markdown(html string) string {
	var b strings.Builder
	row := func(cells ...string) {
		for i := range cells {
			cells[i] = cellEscape.Replace(cells[i])
		}
		fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | "))
	}
	rule := func(n int) { fmt.Fprintf(&b, "|%s\n", strings.Repeat("---|", n)) }
	fmt.Fprintf(&b, "# %s\n\nThis page compares targets. The command below made it and [%s](%s), which has the charts:\n\n```\n%s\n```\n\n", r.Title, html, html, r.Command)
	if r.Busy != "" {
		fmt.Fprintf(&b, "**%s**\n\n", r.Busy)
	}
	row("", "")
	rule(2)
	for _, f := range r.Facts {
		row(f.Name, f.Value)
	}
	for i := range r.Parts {
		p := &r.Parts[i]
		fmt.Fprintf(&b, "\n## %s\n\n", p.Title)
		for _, n := range p.Notes {
			fmt.Fprintf(&b, "%s\n\n", n)
		}
		if p.Failure != "" {
			fmt.Fprintf(&b, "**Not measured.** The reason:\n\n```\n%s\n```\n", strings.ReplaceAll(p.Failure, "```", "'''"))
			continue
		}
		fmt.Fprintf(&b, "Median, and in brackets the least and the greatest of %d rounds:\n\n", p.Rounds)
		head := []string{"job", ""}
		for _, c := range p.table.columns {
			head = append(head, c.String())
		}
		row(head...)
		rule(len(head))
		for _, j := range p.table.jobs {
			cells := []string{j.Name, j.unit()}
			for _, c := range p.table.columns {
				text := "not measured"
				if s, ok := p.table.spread(j, c); ok {
					text = s.text()
				}
				cells = append(cells, text)
			}
			row(cells...)
		}
		b.WriteString("\nRatios of the medians, and in brackets the least and the greatest ratio of a round. Above 1 the first one is faster:\n\n")
		row(append([]string{"job"}, p.Pairs...)...)
		rule(1 + len(p.Pairs))
		for _, r := range p.Ratios {
			row(append([]string{r.Job}, r.Ratios...)...)
		}
		if p.Missing != nil {
			b.WriteString("\nThese were not measured in all rounds:\n\n")
			row("target", "jobs", "rounds", "reason")
			rule(4)
			for _, g := range p.Missing {
				row(g.Column.String(), g.Names(), fmt.Sprint(g.Rounds), strings.Join(g.Reasons, "; "))
			}
		}
		b.WriteString("\nThe jobs:\n\n")
		for _, j := range p.table.jobs {
			fmt.Fprintf(&b, "- `%s`: %s\n", j.Name, j.What)
		}
	}
	return b.String()
}
