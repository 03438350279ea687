package daemon

import (
	"math"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/lun"
)

// Percentiles are exact to the width of a bucket, a quarter.
func TestPercentiles(t *testing.T) {
	bucketOf := func(d time.Duration) int {
		i := 0
		for i < lun.LatencyBuckets-1 && d > lun.LatencyBound(i) {
			i++
		}
		return i
	}
	var l lun.Latencies
	b := &l[lun.PhaseBackend]
	b.Buckets[bucketOf(100*time.Microsecond)] = 600
	b.Buckets[bucketOf(time.Millisecond)] = 380
	b.Buckets[bucketOf(time.Second)] = 20
	b.Count, b.Sum = 1000, 20400*time.Millisecond
	never := &l[lun.PhaseSend]
	never.Buckets[lun.LatencyBuckets-1], never.Count = 3, 3
	short := &l[lun.PhaseReceive]
	short.Buckets[0], short.Count = 10, 10

	got := phases(&l)
	want := []schema.PhaseState{
		{Phase: "receive", Timing: schema.Timing{Count: 10, P50: 0.512e-6, P99: 1.014e-6}},
		{Phase: "backend", Timing: schema.Timing{Count: 1000, Seconds: 20.4, P50: 100e-6, P99: 1}},
		{Phase: "send", Timing: schema.Timing{Count: 3, P50: 30, P99: 30}}, // above all bounds
	}
	if len(got) != len(want) {
		t.Fatalf("%+v", got)
	}
	for i, w := range want {
		g := got[i]
		near := func(a, b float64) bool { return math.Abs(a-b) <= b/4 }
		if g.Phase != w.Phase || g.Count != w.Count || g.Seconds != w.Seconds || !near(g.P50, w.P50) || !near(g.P99, w.P99) {
			t.Errorf("%+v, want %+v", g, w)
		}
		if n := len(g.Buckets); g.Buckets[n-1] == 0 || n > len(latencyBounds)+1 {
			t.Errorf("%s: %d buckets, the last has %d", g.Phase, n, g.Buckets[n-1])
		}
	}
}
