package main

import (
	"errors"
	"regexp"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/rbd"
	"github.com/iser-target/iser-target/tests/testkit/cephcluster"
)

// speedTime is the time of one measurement of the store, and speedRounds is how many there are.
const (
	speedTime   = 3 * time.Second
	speedRounds = 5
)

var opsPerSecond = regexp.MustCompile(`ops/sec: ([0-9.]+)`)

// BenchmarkStore prints how many writes per second a Store does, and how many rbd bench does on an image of the same kind, in turn. The metrics are
// medians of the ratios.
func BenchmarkStore(t *testing.B) {
	c := newCluster(t, cephcluster.Options{OSDs: 1, Copies: 1, GiB: 8})
	uri := c.image(t, "speed", "512M")
	c.must(t, "rbd", "create", "--size", "512M", cephcluster.Pool+"/bench")
	fill := func(image string) {
		c.must(t, "rbd", "bench", "--io-type", "write", "--io-size", "4M", "--io-threads", "4", "--io-total", "512M", cephcluster.Pool+"/"+image)
	}
	fill("bench")
	fill("speed")
	s := open(t, rbd.Config{URI: uri, Dir: t.TempDir()})
	for _, work := range []struct {
		name  string
		size  int64
		depth int
		total string // of rbd bench, for a few seconds
	}{{"4K", 4 << 10, 16, "16M"}, {"1M", 1 << 20, 4, "512M"}} {
		var ratios []float64
		for range speedRounds {
			out := c.must(t, "rbd", "bench", "--io-type", "write", "--io-pattern", "rand", "--io-size", work.name, "--io-threads", strconv.Itoa(work.depth),
				"--io-total", work.total, "--rbd-cache=false", cephcluster.Pool+"/bench")
			m := opsPerSecond.FindAllStringSubmatch(out, -1)
			if m == nil {
				t.Fatalf("rbd bench: %s", out)
			}
			yardstick, _ := strconv.ParseFloat(m[len(m)-1][1], 64)
			ours, err := writes(s, work.size, work.depth)
			if err != nil {
				t.Fatal(err)
			}
			ratios = append(ratios, ours/yardstick)
			t.Logf("%s writes at depth %d: rbd bench %.0f/s, the store %.0f/s, %.2f of it", work.name, work.depth, yardstick, ours, ours/yardstick)
		}
		slices.Sort(ratios)
		t.ReportMetric(ratios[speedRounds/2], work.name+"-of-rbd-bench")
	}
}

// writes returns how many writes per second s does.
func writes(s *rbd.Store, size int64, depth int) (float64, error) {
	var done atomic.Int64
	var running sync.WaitGroup
	errs := make([]error, depth)
	begun, blocks := time.Now(), s.Info().Size/size
	for i := range depth {
		running.Go(func() {
			b := make([]byte, size)
			for n := int64(i); time.Since(begun) < speedTime && errs[i] == nil; n += int64(depth) {
				errs[i] = s.WriteAt(b, n*7919%blocks*size)
				done.Add(1)
			}
		})
	}
	running.Wait()
	return float64(done.Load()) / time.Since(begun).Seconds(), errors.Join(errs...)
}
