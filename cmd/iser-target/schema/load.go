package schema

// A Load is the activity between two States.
type Load struct {
	IOPS       float64 `json:"iops"` // commands that ended with a status
	ReadBytes  float64 `json:"read_bytes_per_second"`
	WriteBytes float64 `json:"write_bytes_per_second"`
	InFlight   int     `json:"in_flight"` // in the second State
	// Depth is the mean number of commands in progress: the time that all commands took which ended, per second
	// (Little's law). If none ended, it is InFlight.
	Depth  float64 `json:"depth"`
	Errors uint64  `json:"errors"` // commands that were aborted or ended with CHECK CONDITION, except unit attentions

	LatencyLoad
	Read  OperationLoad `json:"read"`
	Write OperationLoad `json:"write"`
}

// A LatencyLoad has the seconds from a command's arrival to its response; nil: no command ended, or the target does
// not measure it.
type LatencyLoad struct {
	Average *float64 `json:"latency_average,omitempty"`
	P50     *float64 `json:"latency_p50,omitempty"`
	P99     *float64 `json:"latency_p99,omitempty"` // may be more if it is the highest bound
}

// An OperationLoad is the activity of one kind of commands.
type OperationLoad struct {
	IOPS   float64  `json:"iops"`
	Size   *float64 `json:"size,omitempty"` // mean bytes of a command; nil: no command ended
	Errors uint64   `json:"errors"`         // as in Load, except that aborted commands do not count
	LatencyLoad
}

// A tally sums up the Timings of commands between two States.
type tally struct {
	timed   uint64 // commands
	seconds float64
	buckets []uint64
	errors  uint64
}

func (t *tally) add(was, is *Timing) {
	if is.Count <= was.Count {
		return
	}
	t.timed += is.Count - was.Count
	t.seconds += is.Seconds - was.Seconds
	t.buckets = addBuckets(t.buckets, was.Buckets, is.Buckets)
}

// addBuckets adds what is has more than was to sum.
func addBuckets(sum, was, is []uint64) []uint64 {
	for i, n := range is {
		if i < len(was) {
			n -= min(n, was[i])
		}
		if i == len(sum) {
			sum = append(sum, 0)
		}
		sum[i] += n
	}
	return sum
}

// load returns the latencies of t. bounds is State.LatencyBounds.
func (t *tally) load(bounds []float64) (l LatencyLoad) {
	if t.timed > 0 {
		average := t.seconds / float64(t.timed)
		l.Average = &average
		l.P50, l.P99 = Quantile(0.5, bounds, t.buckets), Quantile(0.99, bounds, t.buckets)
	}
	return l
}

// A Tally sums up the activity between two CounterStates of one or more objects.
type Tally struct {
	reads, writes, others, readBytes, writeBytes, errors uint64

	inFlight           int
	all, read, written tally
}

// Add adds the activity between was and is. If was is nil, or larger than is because
// the object was opened again, Add adds all of is.
func (t *Tally) Add(was, is *CounterState) {
	if was == nil || is.Reads < was.Reads || is.Writes < was.Writes || is.Others < was.Others ||
		is.ReadBytes < was.ReadBytes || is.WriteBytes < was.WriteBytes {
		was = &CounterState{}
	}
	t.reads += is.Reads - was.Reads
	t.writes += is.Writes - was.Writes
	t.others += is.Others - was.Others
	t.readBytes += is.ReadBytes - was.ReadBytes
	t.writeBytes += is.WriteBytes - was.WriteBytes
	t.errors += is.Errors + is.Aborted - min(was.Errors+was.Aborted, is.Errors+is.Aborted)
	t.inFlight += is.InFlight
	t.all.add(total(was), total(is))
	for op, sum := range map[string]*tally{"read": &t.read, "write": &t.written} {
		before, now := was.Operation(op), is.Operation(op)
		sum.add(&before.Timing, &now.Timing)
		sum.errors += now.Errors - min(before.Errors, now.Errors)
	}
}

// Load returns t per second for a period of that many seconds. bounds is State.LatencyBounds.
func (t *Tally) Load(seconds float64, bounds []float64) Load {
	l := Load{InFlight: t.inFlight, Depth: float64(t.inFlight), Errors: t.errors, LatencyLoad: t.all.load(bounds)}
	l.Read, l.Write = t.read.operation(t.reads, t.readBytes, seconds, bounds), t.written.operation(t.writes, t.writeBytes, seconds, bounds)
	if seconds > 0 {
		l.IOPS, l.ReadBytes, l.WriteBytes = float64(t.reads+t.writes+t.others)/seconds, float64(t.readBytes)/seconds, float64(t.writeBytes)/seconds
		if t.all.timed > 0 {
			l.Depth = t.all.seconds / seconds
		}
	}
	return l
}

// operation returns the load of that many commands.
func (t *tally) operation(commands, bytes uint64, seconds float64, bounds []float64) OperationLoad {
	o := OperationLoad{Errors: t.errors, LatencyLoad: t.load(bounds)}
	if seconds > 0 {
		o.IOPS = float64(commands) / seconds
	}
	if commands > 0 {
		size := float64(bytes) / float64(commands)
		o.Size = &size
	}
	return o
}

// total returns the timing of the phase that contains all others.
func total(c *CounterState) *Timing {
	for i := range c.Latency {
		if c.Latency[i].Phase == "total" {
			return &c.Latency[i].Timing
		}
	}
	return &Timing{}
}

// Operation returns the commands of a kind.
func (c *CounterState) Operation(op string) *OperationState {
	for i := range c.Operations {
		if c.Operations[i].Op == op {
			return &c.Operations[i]
		}
	}
	return &OperationState{Op: op}
}

// Since returns the commands of c that was, an earlier state of the same object, does not have. bounds is
// State.LatencyBounds.
func (o *OperationState) Since(was *OperationState, bounds []float64) *OperationState {
	if o.Count < was.Count {
		was = &OperationState{} // the object was opened again
	}
	d := &OperationState{Op: o.Op, Errors: o.Errors - min(was.Errors, o.Errors), Sizes: addBuckets(nil, was.Sizes, o.Sizes)}
	d.Count, d.Seconds, d.Buckets = o.Count-was.Count, o.Seconds-was.Seconds, addBuckets(nil, was.Buckets, o.Buckets)
	if p50 := Quantile(0.5, bounds, d.Buckets); p50 != nil {
		d.P50, d.P99 = *p50, *Quantile(0.99, bounds, d.Buckets)
	}
	return d
}

// SizeBuckets is how many Sizes an OperationState has at most.
const SizeBuckets = 15

// SizeBound returns the largest transfer, in bytes, that Sizes of an OperationState counts at index i.
func SizeBound(i int) int64 { return 512 << i }

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
