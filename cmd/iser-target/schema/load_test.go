package schema

import (
	"math"
	"testing"
)

func near(got, want float64) bool { return math.Abs(got-want) <= 1e-9*math.Abs(want) }

func TestQuantileOfBuckets(t *testing.T) {
	bounds := []float64{1, 2, 4}
	for _, tc := range []struct {
		q       float64
		buckets []uint64
		want    float64 // below 0: none
	}{
		{0.5, nil, -1},
		{0.5, []uint64{0, 0, 0, 0}, -1},
		{0.5, []uint64{10}, 0.5},
		{0.99, []uint64{100}, 0.99},
		{0.5, []uint64{0, 10}, 1.5},
		{0.5, []uint64{5, 5}, 1},
		{0.75, []uint64{2, 0, 2}, 3},
		{0.99, []uint64{98, 0, 0, 2}, 4}, // above all bounds
		{0.5, []uint64{0, 0, 0, 7}, 4},
		{1, []uint64{3, 0, 0}, 1},
	} {
		got := Quantile(tc.q, bounds, tc.buckets)
		if (got == nil) != (tc.want < 0) || got != nil && !near(*got, tc.want) {
			t.Errorf("%v of %v: %v, want %v", tc.q, tc.buckets, got, tc.want)
		}
	}
	if Quantile(0.5, nil, []uint64{1}) != nil {
		t.Error("a latency without bounds")
	}
}

// The sum of several objects equals one object that did it all. A new object, and one
// that was opened again, count from zero.
func TestTallySumsSeveralObjects(t *testing.T) {
	latency := func(seconds float64, buckets ...uint64) []PhaseState {
		p := PhaseState{Phase: "total", Timing: Timing{Seconds: seconds, Buckets: buckets}}
		for _, n := range buckets {
			p.Count += n
		}
		return []PhaseState{{Phase: "backend", Timing: Timing{Count: 1e6, Seconds: 1e6, Buckets: []uint64{1e6}}}, p}
	}
	was := &CounterState{Reads: 100, Writes: 10, Others: 1, ReadBytes: 1000, WriteBytes: 500, Errors: 3, Aborted: 1, InFlight: 7, Latency: latency(1, 50, 50)}
	is := &CounterState{Reads: 300, Writes: 20, Others: 1, ReadBytes: 5000, WriteBytes: 600, Errors: 4, Aborted: 3, InFlight: 2, Latency: latency(1.4, 50, 150, 90, 10)}
	bounds := []float64{0.001, 0.002, 0.004}
	for _, tc := range []struct {
		name              string
		pairs             [][2]*CounterState
		iops, read, write float64
		inFlight          int
		errors            uint64
		average, p50, p99 float64 // 0: no latency
	}{
		{"nothing", nil, 0, 0, 0, 0, 0, 0, 0, 0},
		{"no change", [][2]*CounterState{{is, is}}, 0, 0, 0, 2, 0, 0, 0, 0},
		{"a change", [][2]*CounterState{{was, is}}, 105, 2000, 50, 2, 3, 0.002, 0.002, 0.004},
		{"new", [][2]*CounterState{{nil, is}}, 160.5, 2500, 300, 2, 7, 1.4 / 300, 1.0 / 600, 0.004},
		{"opened again", [][2]*CounterState{{is, was}}, 55.5, 500, 250, 7, 4, 0.01, 0.001, 0.00198},
		{"two", [][2]*CounterState{{was, is}, {was, is}}, 210, 4000, 100, 4, 6, 0.002, 0.002, 0.004},
	} {
		var tally Tally
		for _, p := range tc.pairs {
			tally.Add(p[0], p[1])
		}
		l := tally.Load(2, bounds)
		if !near(l.IOPS, tc.iops) || !near(l.ReadBytes, tc.read) || !near(l.WriteBytes, tc.write) || l.InFlight != tc.inFlight || l.Errors != tc.errors {
			t.Errorf("%s: %+v", tc.name, l)
		}
		switch {
		case tc.average == 0:
			if l.Average != nil || l.P50 != nil || l.P99 != nil {
				t.Errorf("%s: a latency of nothing: %+v", tc.name, l)
			}
		case l.Average == nil || l.P50 == nil || l.P99 == nil:
			t.Errorf("%s: no latency", tc.name)
		case !near(*l.Average, tc.average) || !near(*l.P50, tc.p50) || !near(*l.P99, tc.p99):
			t.Errorf("%s: latencies %v, %v, %v", tc.name, *l.Average, *l.P50, *l.P99)
		}
		if at := tally.Load(0, bounds); at.IOPS != 0 || at.ReadBytes != 0 || at.WriteBytes != 0 {
			t.Errorf("%s, in no time: %+v", tc.name, at)
		}
	}
}

// Latency, sizes and errors of reads do not mix with those of writes, and the depth is the mean of the period.
func TestTallyTellsReadsFromWrites(t *testing.T) {
	bounds := []float64{0.001, 0.002, 0.004}
	state := func(reads, writes, readBytes, writeBytes uint64, seconds float64, read, write OperationState) *CounterState {
		read.Op, write.Op = "read", "write"
		return &CounterState{Reads: reads, Writes: writes, ReadBytes: readBytes, WriteBytes: writeBytes, InFlight: 3,
			Latency: []PhaseState{{Phase: "total", Timing: Timing{Count: reads + writes, Seconds: seconds, Buckets: []uint64{reads + writes}}}}, Operations: []OperationState{read, write}}
	}
	was := state(10, 10, 1000, 1000, 1, OperationState{Timing: Timing{Count: 10, Seconds: 0.5, Buckets: []uint64{10}}, Errors: 1}, OperationState{Timing: Timing{Count: 10, Seconds: 0.5, Buckets: []uint64{10}}})
	is := state(110, 20, 101000, 41000, 9, OperationState{Timing: Timing{Count: 110, Seconds: 0.6, Buckets: []uint64{110}}, Errors: 1, Sizes: []uint64{0, 100}},
		OperationState{Timing: Timing{Count: 20, Seconds: 8.4, Buckets: []uint64{10, 0, 0, 10}}, Errors: 2})
	var tally Tally
	tally.Add(was, is)
	l := tally.Load(2, bounds)
	if !near(l.Depth, 4) {
		t.Errorf("depth %v, want 8 s of commands in 2 s", l.Depth)
	}
	if r := l.Read; !near(r.IOPS, 50) || !near(*r.Size, 1000) || r.Errors != 0 || !near(*r.Average, 0.001) || *r.P99 > 0.001 {
		t.Errorf("reads: %+v", r)
	}
	if w := l.Write; !near(w.IOPS, 5) || !near(*w.Size, 4000) || w.Errors != 2 || !near(*w.Average, 0.79) || !near(*w.P50, 0.004) {
		t.Errorf("writes: %+v", w)
	}
	d := is.Operation("write").Since(was.Operation("write"), bounds)
	if d.Count != 10 || !near(d.Seconds, 7.9) || d.Errors != 2 || d.P50 != 0.004 || d.Buckets[0] != 0 {
		t.Errorf("writes since: %+v", d)
	}
	if d := is.Operation("read").Since(&OperationState{Timing: Timing{Count: 500}}, bounds); d.Count != 110 || d.Sizes[1] != 100 {
		t.Errorf("reads of a LUN that was opened again: %+v", d)
	}

	var idle Tally
	idle.Add(is, is)
	if l := idle.Load(2, bounds); l.Depth != 3 || l.Read.Average != nil || l.Read.Size != nil {
		t.Errorf("commands that hang: %+v", l)
	}
}
