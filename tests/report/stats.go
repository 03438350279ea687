package main

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/iser-target/iser-target/tests/testkit/fio"
)

// A spread sums up the rounds of a cell.
type spread struct {
	Median, Min, Max float64
	Rounds           int
}

// sum returns the spread of values, of which there is at least one.
func sum(values []float64) spread {
	s := slices.Sorted(slices.Values(values))
	n := len(s)
	return spread{(s[(n-1)/2] + s[n/2]) / 2, s[0], s[n-1], n}
}

// A cell is a job on a column: what each round measured, and why the others did not.
type cell struct {
	values  map[int]float64 // by round
	reasons []string        // of the rounds without a value
}

// A column is a target over a transport.
type column struct {
	Target, Transport string
}

func (c column) String() string { return c.Target + ", " + c.Transport }

// A table is what one part of the report measured.
type table struct {
	rounds  int
	columns []column
	jobs    []job
	cells   map[string]map[column]*cell // by the name of the job
}

// A job is a row.
type job struct {
	Name, What string
	Bytes      bool // the measure is MB/s, not IOPS
}

// newTable returns a table without values.
func newTable(rounds int, columns []column, jobs []job) *table {
	t := &table{rounds, columns, jobs, map[string]map[column]*cell{}}
	for _, j := range jobs {
		t.cells[j.Name] = map[column]*cell{}
		for _, c := range columns {
			t.cells[j.Name][c] = &cell{values: map[int]float64{}}
		}
	}
	return t
}

// add adds a round of a column. A job without a result gets the reason of failed, or err.
func (t *table) add(round int, c column, results map[string]fio.Result, failed map[string]error, err error) {
	for _, j := range t.jobs {
		r, ok := results[j.Name]
		switch {
		case ok:
			t.set(round, c, j, r, nil)
		case failed[j.Name] != nil:
			t.set(round, c, j, r, failed[j.Name])
		case err != nil:
			t.set(round, c, j, r, err)
		default:
			t.set(round, c, j, r, errors.New("fio printed no result"))
		}
	}
}

// set adds a round of a cell, or why it has no value.
func (t *table) set(round int, c column, j job, r fio.Result, err error) {
	x := t.cells[j.Name][c]
	switch {
	case err != nil:
		x.reasons = append(x.reasons, fmt.Sprintf("round %d: %v", round+1, err))
	case j.Bytes:
		x.values[round] = r.Bytes / 1e6
	default:
		x.values[round] = r.IOPS
	}
}

// spread returns the spread of a cell. ok is false if no round has a value.
func (t *table) spread(j job, c column) (s spread, ok bool) {
	x := t.cells[j.Name][c]
	if len(x.values) == 0 {
		return s, false
	}
	return sum(slices.Collect(maps.Values(x.values))), true
}

// ratio returns the ratio of the medians of a and b, with the least and the greatest ratio of a round that measured both. ok is false if no round did.
func (t *table) ratio(j job, a, b column) (s spread, ok bool) {
	var ratios []float64
	x, y := t.cells[j.Name][a], t.cells[j.Name][b]
	for round, v := range x.values {
		if w := y.values[round]; w > 0 {
			ratios = append(ratios, v/w)
		}
	}
	if ratios == nil {
		return s, false
	}
	s = sum(ratios)
	p, _ := t.spread(j, a)
	q, _ := t.spread(j, b)
	s.Median = p.Median / q.Median
	return s, true
}

// pairs returns the columns to compare: those of ours with the other targets over the same transport, and ours over iSER with ours over TCP.
func (t *table) pairs() (list [][2]column) {
	for _, a := range t.columns {
		if a.Target != ours {
			continue
		}
		for _, b := range t.columns {
			if b.Target != ours && b.Transport == a.Transport || b.Target == ours && a.Transport != "TCP" && b.Transport == "TCP" {
				list = append(list, [2]column{a, b})
			}
		}
	}
	return list
}

// missing lists the cells with fewer values than rounds. Jobs of a column that lack values for the same reasons share an entry.
func (t *table) missing() (list []gap) {
	for _, c := range t.columns {
		first := len(list)
		for _, j := range t.jobs {
			x := t.cells[j.Name][c]
			if len(x.values) == t.rounds {
				continue
			}
			at := slices.IndexFunc(list[first:], func(g gap) bool { return slices.Equal(g.Reasons, x.reasons) })
			if at < 0 {
				at = len(list) - first
				list = append(list, gap{Column: c, Rounds: t.rounds - len(x.values), Reasons: x.reasons})
			}
			list[first+at].Jobs = append(list[first+at].Jobs, j.Name)
		}
	}
	return list
}

// A gap is what a column lacks.
type gap struct {
	Column  column
	Jobs    []string
	Rounds  int // that each of them lacks
	Reasons []string
}

// Names returns the jobs, with commas.
func (g gap) Names() string { return strings.Join(g.Jobs, ", ") }
