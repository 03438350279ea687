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

// speedRounds is how many rounds there are, in which the store and rbd bench write the same number of blocks, and speedPause is the time between them. The
// OSD writes small blocks to their place later, so what is left of one would slow the other down.
const (
	speedRounds = 5
	speedPause  = 2 * time.Second
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
		total int64 // bytes, for a few seconds
	}{{"4K", 4 << 10, 16, 32 << 20}, {"1M", 1 << 20, 4, 512 << 20}} {
		yardstick := func() float64 {
			out := c.must(t, "rbd", "bench", "--io-type", "write", "--io-pattern", "rand", "--io-size", work.name, "--io-threads", strconv.Itoa(work.depth),
				"--io-total", strconv.FormatInt(work.total, 10), "--rbd-cache=false", cephcluster.Pool+"/bench")
			m := opsPerSecond.FindAllStringSubmatch(out, -1)
			if m == nil {
				t.Fatalf("rbd bench: %s", out)
			}
			n, err := strconv.ParseFloat(m[len(m)-1][1], 64)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		ours := func() float64 {
			n, err := writes(s, work.size, work.depth, work.total)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		var ratios []float64
		for round := range speedRounds {
			var got, want float64
			steps := []func(){func() { want = yardstick() }, func() { got = ours() }}
			if round%2 == 1 {
				slices.Reverse(steps)
			}
			for _, step := range steps {
				time.Sleep(speedPause)
				step()
			}
			ratios = append(ratios, got/want)
			t.Logf("%s writes at depth %d: rbd bench %.0f/s, the store %.0f/s, %.2f of it", work.name, work.depth, want, got, got/want)
		}
		slices.Sort(ratios)
		t.ReportMetric(ratios[speedRounds/2], work.name+"-of-rbd-bench")
	}
}

// writes returns how many writes per second s does, of so many bytes in total.
func writes(s *rbd.Store, size int64, depth int, total int64) (float64, error) {
	var next atomic.Int64
	var running sync.WaitGroup
	errs := make([]error, depth)
	begun, blocks := time.Now(), s.Info().Size/size
	for i := range depth {
		running.Go(func() {
			b := make([]byte, size)
			for errs[i] == nil {
				n := next.Add(1) - 1
				if n*size >= total {
					return
				}
				errs[i] = s.WriteAt(b, n*7919%blocks*size)
			}
		})
	}
	running.Wait()
	return float64(total/size) / time.Since(begun).Seconds(), errors.Join(errs...)
}
