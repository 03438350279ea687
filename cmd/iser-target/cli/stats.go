package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// A LUNStats has the commands of a LUN in a period.
type LUNStats struct {
	Target  string  `json:"target"`
	LUN     int     `json:"lun"`
	Seconds float64 `json:"seconds,omitempty"` // of the period; 0: since the LUN was opened
	Depth   float64 `json:"depth,omitempty"`   // mean number of commands in progress in the period
	// Operations has reads, writes and other commands, with latencies, sizes and errors.
	Operations []schema.OperationState `json:"operations"`
	Bounds     []float64               `json:"latency_bounds"` // of Buckets, in seconds

	bytes [2]uint64 // read and written
}

// lunStats returns the command that shows latency, sizes and errors of reads and writes.
func (p *program) lunStats() *cobra.Command {
	var interval time.Duration
	v := verb{names: targetOptional, use: "stats [TARGET] LUN", short: "Show latency, sizes and errors of the reads and writes of a LUN",
		args: cobra.ExactArgs(2), parse: (*call).parseLUN, complete: p.complete(targets, luns),
		long: `Show latency, sizes and errors of the reads, writes and other commands of a LUN, since
it was opened or, with --interval, in the time from now on. The latency is the time from the
arrival of a command to its response. Unit attentions do not count as errors.`,
		example: `  iser-target lun stats store 0
  iser-target lun stats store 0 --interval 10s`}
	cmd := show(p, v, func(ctx context.Context, c *call) (*LUNStats, error) {
		if c.cmd.Flags().Changed("interval") && (interval < minInterval || interval > maxInterval) {
			return nil, usage(c.cmd, "--interval must be from %v to %v, not %v", minInterval, maxInterval, interval)
		}
		return c.lunStats(ctx, interval)
	}, statsTable)
	cmd.Flags().DurationVarP(&interval, "interval", "d", 0, "count from now on, for this long (default: since the LUN was opened)")
	return cmd
}

// lunStats returns the stats of the LUN that c names, of an interval or, if that is 0, since it was opened.
func (c *call) lunStats(ctx context.Context, interval time.Duration) (*LUNStats, error) {
	was, err := c.lunSample(ctx)
	if err != nil || interval == 0 {
		return was.stats(nil), err
	}
	select {
	case <-c.cmd.Context().Done():
		return nil, c.cmd.Context().Err()
	case <-time.After(interval):
	}
	ctx, cancel := context.WithTimeout(c.cmd.Context(), c.limit)
	defer cancel()
	now, err := c.lunSample(ctx)
	return now.stats(was), err
}

// A lunSample is the state of a LUN at a time.
type lunSample struct {
	time   time.Time
	lun    schema.LUNState
	bounds []float64
}

func (c *call) lunSample(ctx context.Context) (*lunSample, error) {
	if _, err := c.LUN(ctx, c.target, c.lun); err != nil { // which says what does not exist
		return nil, err
	}
	st, err := c.State(ctx)
	if err != nil {
		return nil, err
	}
	for _, t := range st.Targets {
		for i := range t.LUNs {
			if l := &t.LUNs[i]; strings.EqualFold(t.Name, c.target) && l.ID == c.lun && l.State != schema.Draining {
				return &lunSample{time.Now(), *l, st.LatencyBounds}, nil
			}
		}
	}
	return nil, &schema.Error{Code: schema.NotFound, Message: fmt.Sprintf("LUN %d of target %s: not found", c.lun, c.target), Hint: "see iser-target lun list"}
}

// stats returns what s has more than was, which may be nil.
func (s *lunSample) stats(was *lunSample) *LUNStats {
	if s == nil {
		return nil
	}
	r := &LUNStats{Target: s.lun.Target, LUN: s.lun.ID, Bounds: s.bounds, Operations: []schema.OperationState{}}
	c, before := &s.lun.Counters, &schema.CounterState{}
	if was != nil {
		before, r.Seconds = &was.lun.Counters, s.time.Sub(was.time).Seconds()
		var t schema.Tally
		t.Add(before, c)
		r.Depth = t.Load(r.Seconds, s.bounds).Depth
	}
	for i := range c.Operations {
		r.Operations = append(r.Operations, *c.Operations[i].Since(before.Operation(c.Operations[i].Op), s.bounds))
	}
	r.bytes = [2]uint64{c.ReadBytes - min(before.ReadBytes, c.ReadBytes), c.WriteBytes - min(before.WriteBytes, c.WriteBytes)}
	return r
}

// statsTable shows the stats of a LUN: a row for each operation, and one for each size.
func statsTable(t *table, s *LUNStats) {
	t.line("LUN %d of %s, %s", s.LUN, s.Target, s.period())
	t.head("OP COMMANDS DATA SIZE ERRORS MEAN P50 P99 P99.9")
	for i := range s.Operations {
		o := &s.Operations[i]
		data, size := "-", "-"
		if i < len(s.bytes) {
			data = rounded(int64(s.bytes[i]))
			if o.Count > 0 {
				size = rounded(int64(s.bytes[i] / o.Count))
			}
		}
		var mean *float64
		if o.Count > 0 {
			mean = new(o.Seconds / float64(o.Count))
		}
		of := func(q float64) string { return latencyText(schema.Quantile(q, s.Bounds, o.Buckets)) }
		t.row(o.Op, o.Count, data, size, o.Errors, latencyText(mean), of(0.5), of(0.99), of(0.999))
	}
	highest := 0
	for i := range s.Operations {
		highest = max(highest, len(s.Operations[i].Sizes))
	}
	if highest == 0 {
		return
	}
	t.gap()
	t.head("SIZE READS WRITES")
	for i := range highest {
		var n [2]uint64
		for j := range n {
			if o := s.Operations[j]; i < len(o.Sizes) {
				n[j] = o.Sizes[i]
			}
		}
		if n == [2]uint64{} {
			continue
		}
		bound := "up to " + size(schema.SizeBound(i))
		if i == schema.SizeBuckets-1 {
			bound = "above " + size(schema.SizeBound(i-1))
		}
		t.row(bound, n[0], n[1])
	}
}

// period returns the time that s covers, in words.
func (s *LUNStats) period() string {
	if s.Seconds == 0 {
		return "since it was opened"
	}
	return fmt.Sprintf("in %.1f s, %.1f commands in progress on average", s.Seconds, s.Depth)
}
