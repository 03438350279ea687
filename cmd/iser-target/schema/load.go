package schema

// A Load is the activity between two States.
type Load struct {
	IOPS       float64 `json:"iops"` // commands that ended with a status
	ReadBytes  float64 `json:"read_bytes_per_second"`
	WriteBytes float64 `json:"write_bytes_per_second"`
	InFlight   int     `json:"in_flight"` // in the second State
	Errors     uint64  `json:"errors"`    // commands that were aborted or ended with CHECK CONDITION

	// Seconds from a command's arrival to its status; nil: no command ended, or the
	// target does not measure it.
	Average *float64 `json:"latency_average,omitempty"`
	P50     *float64 `json:"latency_p50,omitempty"`
	P99     *float64 `json:"latency_p99,omitempty"` // may be more if it is the highest bound
}

// A Tally sums up the activity between two CounterStates of one or more objects.
type Tally struct {
	commands, readBytes, writeBytes, errors uint64
	inFlight                                int

	timed   uint64 // commands
	seconds float64
	buckets []uint64
}

// Add adds the activity between was and is. If was is nil, or larger than is because
// the object was opened again, Add adds all of is.
func (t *Tally) Add(was, is *CounterState) {
	if was == nil || is.Reads < was.Reads || is.Writes < was.Writes || is.Others < was.Others ||
		is.ReadBytes < was.ReadBytes || is.WriteBytes < was.WriteBytes {
		was = &CounterState{}
	}
	t.commands += is.Reads + is.Writes + is.Others - was.Reads - was.Writes - was.Others
	t.readBytes += is.ReadBytes - was.ReadBytes
	t.writeBytes += is.WriteBytes - was.WriteBytes
	t.errors += is.Errors + is.Aborted - min(was.Errors+was.Aborted, is.Errors+is.Aborted)
	t.inFlight += is.InFlight
	before, now := total(was), total(is)
	if now.Count <= before.Count {
		return
	}
	t.timed += now.Count - before.Count
	t.seconds += now.Seconds - before.Seconds
	for i, n := range now.Buckets {
		if i < len(before.Buckets) {
			n -= min(n, before.Buckets[i])
		}
		if i == len(t.buckets) {
			t.buckets = append(t.buckets, 0)
		}
		t.buckets[i] += n
	}
}

// Load returns t per second for a period of that many seconds. bounds is State.LatencyBounds.
func (t *Tally) Load(seconds float64, bounds []float64) Load {
	l := Load{InFlight: t.inFlight, Errors: t.errors}
	if seconds > 0 {
		l.IOPS, l.ReadBytes, l.WriteBytes = float64(t.commands)/seconds, float64(t.readBytes)/seconds, float64(t.writeBytes)/seconds
	}
	if t.timed > 0 {
		average := t.seconds / float64(t.timed)
		l.Average = &average
		l.P50, l.P99 = Quantile(0.5, bounds, t.buckets), Quantile(0.99, bounds, t.buckets)
	}
	return l
}

// total returns the phase that contains all others.
func total(c *CounterState) PhaseState {
	for _, p := range c.Latency {
		if p.Phase == "total" {
			return p
		}
	}
	return PhaseState{}
}

// Quantile estimates the value that a share q of all values does not exceed, or returns
// nil without values. buckets[i] counts the values above bounds[i-1] up to bounds[i]. A
// bucket counts as evenly filled, and values above the last bound as equal to it.
func Quantile(q float64, bounds []float64, buckets []uint64) *float64 {
	var all, below uint64
	for _, n := range buckets {
		all += n
	}
	if all == 0 || len(bounds) == 0 {
		return nil
	}
	rank := q * float64(all)
	for i, n := range buckets[:min(len(buckets), len(bounds))] {
		if float64(below+n) < rank || n == 0 {
			below += n
			continue
		}
		low := 0.0
		if i > 0 {
			low = bounds[i-1]
		}
		v := low + (bounds[i]-low)*(rank-float64(below))/float64(n)
		return &v
	}
	return &bounds[len(bounds)-1]
}
