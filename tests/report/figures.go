package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// A figure is a row of the table of docs/performance.md that says how fast the target should be.
type figure struct {
	work, than string // than: what the ratio compares with, or "" if the value is not a ratio
	unit       string // of a value that is not a ratio
	most       bool   // bound is the most, not the least
	bound      float64
	value      spread
	reason     string // why nothing was measured
}

// row returns the figure as a row in Markdown.
func (f *figure) row() string {
	sign, value, reached := "≥", "not measured: "+f.reason, "–"
	if f.most {
		sign = "≤"
	}
	if f.reason == "" {
		value, reached = f.value.text()+f.unit, "no"
		if f.most && f.value.Median <= f.bound || !f.most && f.value.Median >= f.bound {
			reached = "yes"
		}
	}
	cells := []string{f.work, f.than, sign + " " + fmt.Sprint(f.bound) + f.unit, value, reached}
	for i := range cells {
		cells[i] = cellEscape.Replace(cells[i])
	}
	return "| " + strings.Join(cells, " | ") + " |\n"
}

// compare returns the figure of the ratio of a and b.
func (t *table) compare(j job, a, b column, most bool, bound float64) figure {
	f := figure{work: j.Name, than: b.Target, most: most, bound: bound}
	if a.Target != memoryLUN {
		f.work += ", " + a.Target
	}
	var ok bool
	if f.value, ok = t.ratio(j, a, b); !ok {
		f.reason = "no round has both"
		if reasons := slices.Concat(t.cells[j.Name][a].reasons, t.cells[j.Name][b].reasons); reasons != nil {
			f.reason = strings.Join(reasons, "; ")
		}
	}
	return f
}

// A group measures some figures together.
type group struct {
	name    string
	measure func(ctx context.Context, o *options, dir string) ([]figure, error)
}

var groups = []group{
	{"speed", speedFigures},
	{"tail", tailFigures},
	{"sessions", sessionFigures},
	{"stream", streamFigures},
	{"kernel", kernelFigures},
}

// figures measures the groups that names lists, or all, and prints the table.
func figures(ctx context.Context, w io.Writer, o *options, names []string) error {
	var known []string
	for _, g := range groups {
		known = append(known, g.name)
	}
	for _, name := range names {
		if !slices.Contains(known, name) {
			return fmt.Errorf("-figures: %s: unknown: the groups are %s", name, strings.Join(known, ","))
		}
	}
	dir, err := os.MkdirTemp("/dev/shm", "iser-target-figures-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	for _, g := range groups {
		if names != nil && !slices.Contains(names, g.name) {
			continue
		}
		before := load()
		own := filepath.Join(dir, g.name)
		if err := os.Mkdir(own, 0o700); err != nil {
			return err
		}
		list, err := g.measure(ctx, o, own)
		if err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", g.name, err)
		}
		fmt.Fprintf(w, "\n%s, %d rounds of %v, load average %s to %s, TCP congestion control %s:\n\n| work | compared with | bound | median (rounds) | reached |\n|---|---|---|---|---|\n", g.name, o.rounds, o.runtime, before, load(), congestion())
		for _, f := range list {
			io.WriteString(w, f.row())
		}
	}
	return nil
}

// The columns of ours.
const (
	memoryLUN  = "our memory LUN"
	fileLUN    = "our file LUN"
	pollingLUN = "our memory LUN, polling"
)

// startFigures starts a target with a LUN in memory, one with a file on XFS, which only root can mount, those of more, and tgt. sockets has those of the control API, by the name of
// the column.
func startFigures(ctx context.Context, o *options, dir string, more ...variant) (columns []hostColumn, sockets map[string]string, stop func() error) {
	var stops []func() error
	sockets = map[string]string{}
	for _, v := range append([]variant{{name: memoryLUN}, {name: fileLUN, fs: "xfs"}}, more...) {
		own := filepath.Join(dir, fmt.Sprint(len(columns)))
		c, end := v.start(ctx, o, own, nil)
		c.column = column{v.name, "TCP"}
		c.url, stops = "iscsi://"+c.url, append(stops, end)
		columns, sockets[v.name] = append(columns, c), filepath.Join(own, "control")
	}
	tgt, end := startTgt(ctx, dir)
	return append(columns, tgt), sockets, func() (err error) {
		for _, f := range append(stops, end) {
			err = errors.Join(err, f())
		}
		return err
	}
}

// columnsOf returns the names.
func columnsOf(columns []hostColumn) (list []column) {
	for _, c := range columns {
		list = append(list, c.column)
	}
	return list
}

// speedJobs are what the rows of the table compare over TCP.
var speedJobs = []struct {
	job
	flags      string
	writes     bool
	other, tgt float64 // bounds of the ratios to a target of -targets, and to tgt
	cpu        float64 // most CPU time per I/O, µs; 0: no bound
	polls      bool    // bench and the LUN poll
}{
	{job{"READ 4 KiB, depth 32", "", false}, read("4k", 32), false, 1, 2.5, 6, false},
	{job{"READ 64 KiB, depth 32", "", false}, read("64k", 32) + " --skip-rx-copy", false, 1, 2.5, 0, false},
	{job{"READ 256 KiB, depth 32", "", false}, read("256k", 32) + " --skip-rx-copy", false, 1, 2.5, 63, false},
	{job{"WRITE 4 KiB, depth 32", "", false}, write("4k", 32), true, 1, 2.5, 0, false},
	{job{"WRITE 64 KiB, depth 16", "", false}, write("64k", 16), true, 1, 2.5, 0, false},
	{job{"WRITE 1 MiB, depth 8", "", false}, write("1m", 8), true, 1, 2.5, 0, false},
	{job{"READ 4 KiB, depth 1", "", false}, read("4k", 1), false, 0, 1.8, 0, false},
	{job{"WRITE 4 KiB, depth 1", "", false}, write("4k", 1), true, 0, 1.8, 0, false},
	{job{"READ 4 KiB, depth 1, `--hipri`", "", false}, read("4k", 1) + " --hipri", false, 0.9, 1.8, 0, true},
	{job{"WRITE 4 KiB, depth 1, `--hipri`", "", false}, write("4k", 1) + " --hipri", true, 0.9, 1.8, 0, true},
}

// fileBound is the least ratio of a file LUN to a memory LUN.
const fileBound = 0.95

// speedFigures compares IOPS over TCP with tgt and the targets of others, and a file LUN with a memory LUN.
func speedFigures(ctx context.Context, o *options, dir string) (list []figure, err error) {
	columns, sockets, stop := startFigures(ctx, o, dir, variant{name: pollingLUN, limits: "poll_time: 100us"})
	defer func() { err = errors.Join(err, stop()) }()
	for _, c := range o.others {
		if c.Transport == "TCP" {
			columns = append(columns, c)
		}
	}
	var jobs []job
	for _, j := range speedJobs {
		jobs = append(jobs, j.job)
	}
	iops, cpu := newTable(o.rounds, columnsOf(columns), jobs), newTable(o.rounds, columnsOf(columns), jobs)
	for round := range o.rounds {
		for _, j := range speedJobs {
			for i := range columns {
				c := &columns[(i+round)%len(columns)] // none is always the first
				if polls := c.Target == pollingLUN; sockets[c.Target] != "" && polls != j.polls {
					continue
				}
				o.progress("round %d of %d: %s: %s", round+1, o.rounds, c.Target, j.Name)
				flags := j.flags
				if s := sockets[c.Target]; s != "" {
					flags += " --socket " + s
				}
				r, err := c.measure(ctx, o, flags, j.writes)
				iops.set(round, c.column, j.job, r, err)
				if err == nil && r.CPU == 0 {
					err = errors.New("the target did not report its CPU time")
				}
				r.IOPS = r.CPU
				cpu.set(round, c.column, j.job, r, err)
			}
		}
	}
	memory, file, polling := columns[0].column, columns[1].column, columns[2].column
	for _, c := range columns[3:] {
		for _, j := range speedJobs {
			bound, own := j.other, memory
			if c.Target == "tgt" {
				bound = j.tgt
			}
			if j.polls {
				own = polling
			}
			if bound > 0 {
				list = append(list, iops.compare(j.job, own, c.column, false, bound))
			}
		}
	}
	for _, j := range speedJobs {
		if !j.polls {
			list = append(list, iops.compare(j.job, file, memory, false, fileBound))
		}
	}
	for _, j := range speedJobs {
		if j.cpu > 0 {
			f := figure{work: "CPU time per " + j.Name, most: true, bound: j.cpu, unit: " µs"}
			var ok bool
			if f.value, ok = cpu.spread(j.job, memory); !ok {
				f.reason = strings.Join(cpu.cells[j.Name][memory].reasons, "; ")
			}
			list = append(list, f)
		}
	}
	return list, nil
}

var (
	tailOwn  = job{"p99.9 of READ 4 KiB at half of the own peak", "", false}
	tailSame = job{"p99.9 of READ 4 KiB at half of the peak of tgt", "", false}
)

// tailBound is the most ratio of latencies to those of tgt.
const tailBound = 0.5

// tailFigures compares the latency that one command of 1000 exceeds, at half of the IOPS that a target reaches at depth 32.
func tailFigures(ctx context.Context, o *options, dir string) (list []figure, err error) {
	columns, _, stop := startFigures(ctx, o, dir)
	defer func() { err = errors.Join(err, stop()) }()
	t := newTable(o.rounds, columnsOf(columns), []job{tailOwn, tailSame})
	for round := range o.rounds {
		peaks := make([]float64, len(columns))
		for i := range columns {
			n := (i + round) % len(columns)
			c := &columns[n]
			o.progress("round %d of %d: %s: peak", round+1, o.rounds, c.Target)
			r, err := c.measure(ctx, o, read("4k", 32), false)
			if err != nil && c.failed == nil {
				c.failed = err
			}
			peaks[n] = r.IOPS
		}
		of := len(columns) - 1 // tgt
		for _, j := range []job{tailOwn, tailSame} {
			for i := range columns {
				n := (i + round) % len(columns)
				c, peak := &columns[n], peaks[n]
				if j == tailSame {
					peak = peaks[of]
				}
				o.progress("round %d of %d: %s: %s", round+1, o.rounds, c.Target, j.Name)
				var r, err = c.measure(ctx, o, fmt.Sprintf("%s --rate-iops %.0f", read("4k", 32), max(peak/2, 1)), false)
				switch {
				case err != nil:
				case peak == 0:
					err = errors.New("tgt has no peak")
				case r.IOPS < peak/2*0.9:
					err = fmt.Errorf("%.0f IOPS instead of %.0f", r.IOPS, peak/2)
				}
				r.IOPS = r.P999
				t.set(round, c.column, j, r, err)
			}
		}
	}
	for _, j := range t.jobs {
		for _, c := range columns[:2] {
			list = append(list, t.compare(j, c.column, columns[2].column, true, tailBound))
		}
	}
	return list, nil
}
