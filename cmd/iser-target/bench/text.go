package bench

import (
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"time"
)

// WriteTable writes results for people. base may be nil.
func WriteTable(w io.Writer, o *Options, results []*Result, base *Baseline) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', tabwriter.AlignRight)
	heads := []string{"RW", "BS", "QD", "IOPS", "MB/s", "MEAN", "P50", "P99", "P99.9", "MAX", "CPU"}
	withTarget, withRepeats := false, false
	for _, r := range results {
		withTarget = withTarget || r.Target != nil && r.Target.CPU > 0
		withRepeats = withRepeats || r.Repeated() > 0
	}
	if withRepeats {
		heads = append(heads, "REPEATED")
	}
	if withTarget {
		heads = append(heads, "TARGET CPU")
	}
	if base != nil {
		heads = append(heads, "BASE IOPS", "CHANGE", "LATENCY", "p")
	}
	fmt.Fprintln(t, strings.Join(heads, "\t")+"\t")
	for _, r := range results {
		for d := range r.Directions {
			x := &r.Directions[d]
			if x.IOs == 0 && !(d == read && o.reads() || d == write && o.writes()) {
				continue
			}
			iops, bw := r.PerSecond(d)
			row := []string{[...]string{"read", "write"}[d], FormatSize(int64(r.Size)), fmt.Sprint(r.Depth), fmt.Sprintf("%.0f", iops), fmt.Sprintf("%.1f", bw/1e6),
				latency(x.Mean)}
			for _, p := range []float64{50, 99, 99.9} {
				row = append(row, latency(float64(value(x.Latency, p, x.Max))))
			}
			row = append(row, latency(float64(x.Max)), cpu(r.Initiator.User+r.Initiator.System, r.Elapsed))
			if withRepeats {
				row = append(row, fmt.Sprint(x.Repeats.Total()))
			}
			if withTarget {
				target := "-"
				if r.Target != nil {
					target = cpu(r.Target.CPU, r.Elapsed)
				}
				row = append(row, target)
			}
			if base != nil {
				row = append(row, compared(base.Compare(o, r, d))...)
			}
			fmt.Fprintln(t, strings.Join(row, "\t")+"\t")
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, r := range results {
		if r.Verified > 0 {
			fmt.Fprintf(w, "\n%s: %d places were read again and have the data that was written last.\n", r.Name(o), r.Verified)
		}
	}
	for _, r := range results {
		if r.Repeated() == 0 {
			continue
		}
		all := r.repeats()
		fmt.Fprintf(w, "\n%s: I/Os were repeated: %v.", r.Name(o), &all)
		if r.LowestDepth < r.Depth {
			fmt.Fprintf(w, " A job had at times only %d in progress.", r.LowestDepth)
		}
		fmt.Fprintln(w)
	}
	if base != nil {
		fmt.Fprintln(w, "\np is the p-value of Welch's t-test over the IOPS of each second. Below 0.01 the difference is hardly chance.")
	}
	for _, r := range results {
		writePhases(w, o, r)
	}
	return nil
}

// repeats returns those of both directions.
func (r *Result) repeats() (all Repeats) {
	for d := range r.Directions {
		all.add(&r.Directions[d].Repeats)
	}
	return all
}

// Repeated returns how often I/Os were repeated.
func (r *Result) Repeated() uint64 {
	all := r.repeats()
	return all.Total()
}

// compared returns the columns of a difference.
func compared(x Difference, ok bool) []string {
	if !ok {
		return []string{"-", "-", "-", "-"}
	}
	p := "-"
	switch {
	case math.IsNaN(x.P):
	case x.P < 0.0001:
		p = "<0.0001"
	default:
		p = fmt.Sprintf("%.4f", x.P)
	}
	return []string{fmt.Sprintf("%.0f", x.IOPS), fmt.Sprintf("%+.1f%%", x.Change), fmt.Sprintf("%+.1f%%", x.Latency), p}
}

// latency returns a latency of ns in a unit that suits it.
func latency(ns float64) string {
	switch {
	case ns == 0:
		return "-"
	case ns < 1e3:
		return fmt.Sprintf("%.0fns", ns)
	case ns < 1e5:
		return fmt.Sprintf("%.1fµs", ns/1e3)
	case ns < 1e6:
		return fmt.Sprintf("%.0fµs", ns/1e3)
	case ns < 1e8:
		return fmt.Sprintf("%.2fms", ns/1e6)
	case ns < 1e9:
		return fmt.Sprintf("%.0fms", ns/1e6)
	}
	return fmt.Sprintf("%.2fs", ns/1e9)
}

// cpu returns a CPU time as a share of one CPU.
func cpu(used, of time.Duration) string {
	if of == 0 {
		return "-"
	}
	return fmt.Sprintf("%.0f%%", 100*used.Seconds()/of.Seconds())
}

// phaseTexts say what happens in the phases of the target.
var phaseTexts = map[string]string{
	"receive":   "from its first byte until the command begins",
	"backend":   "in the store of the LUN",
	"read_wait": "until the data of a WRITE is there",
	"send":      "until TCP has taken data and status",
}

// writePhases writes where the time of a run was spent.
func writePhases(w io.Writer, o *Options, r *Result) {
	if r.Target == nil {
		return
	}
	var ios uint64
	var sum float64
	for d := range r.Directions {
		ios, sum = ios+r.Directions[d].Recorded, sum+r.Directions[d].sum
	}
	var total Phase
	for _, p := range r.Target.Phases {
		if p.Name == "total" {
			total = p
		}
	}
	if ios == 0 || total.Count == 0 {
		return
	}
	mean := sum / float64(ios)
	fmt.Fprintf(w, "\nWhere is the time? %s, per I/O:\n", r.Name(o))
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	line := func(where string, ns float64, text string) {
		fmt.Fprintf(t, "  %s\t%s\t%.0f%%\t%s\n", where, latency(max(ns, 0)), 100*max(ns, 0)/mean, text)
	}
	line("initiator", mean, "from the command to its end")
	for _, p := range r.Target.Phases {
		if text := phaseTexts[p.Name]; text != "" {
			line("  target: "+p.Name, float64(p.Sum)/float64(total.Count), text)
		}
	}
	line("  rest", mean-float64(total.Sum)/float64(total.Count), "in the network, in the kernels, and in this process")
	t.Flush()
}
