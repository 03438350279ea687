package main

import (
	"bufio"
	"fmt"
	"math"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// A bound is what a figure must not exceed.
type bound struct {
	name   string
	max    float64
	unit   string
	reason string
}

// bounds are what a run holds the target to.
var bounds = []bound{
	{"memory", 300, "MiB", "LUNs in memory of 32 MiB, twice during an upgrade, and buffers for 300 connections"},
	{"goroutines", 1200, "", "up to 3 for each of 300 connections, and 300 of its own"},
	{"descriptors", 450, "", "one for each of 300 connections, up to 9 for each LUN on a file, and those of an upgrade"},
	{"threads", 160, "", "64 calls of the store of a LUN that hangs, the same for its neighbour, and those of the Go runtime"},
	{"goroutines left", 4, "", "what the first start has not needed: goroutines of a pool, and of the process that stands for the target after an upgrade"},
	{"descriptors left", 4, "", "the same for descriptors; spare ones of durable writes close after 10 s, and the run waits for that"},
	{"p99 calm", 250, "ms", "a READ of the page cache on a busy machine; syncs do not count"},
	{"max calm", 5000, "ms", "a WRITE that waits for a sync of a busy disk"},
	{"p99 disturbed", 1000, "ms", "what hits others must not be a pause that people notice"},
	{"max disturbed", 5000, "ms", "a disturbance of others adds nothing to a busy disk; initiators abort a command after 30 s"},
	{"max upgrade", 5000, "ms", "commands in progress have 500 ms to end, and the next process takes over; then a busy disk"},
	{"max restart", 20000, "ms", "from the last command before the end to the first one after the login, with a drain of 1 s"},
}

// A histogram counts durations in eight buckets per doubling, from 1 µs on.
type histogram struct {
	buckets [256]atomic.Int64
	max     atomic.Int64
}

func (h *histogram) add(d time.Duration) {
	i := int(8 * math.Log2(float64(max(d, time.Microsecond))/1e3))
	h.buckets[min(i, len(h.buckets)-1)].Add(1)
	for m := h.max.Load(); int64(d) > m && !h.max.CompareAndSwap(m, int64(d)); m = h.max.Load() {
	}
}

func (h *histogram) count() (n int64) {
	for i := range h.buckets {
		n += h.buckets[i].Load()
	}
	return n
}

// quantile returns the upper end of the bucket that has the quantile, in ms.
func (h *histogram) quantile(q float64) float64 {
	rank, n := int64(math.Ceil(q*float64(h.count()))), int64(0)
	for i := range h.buckets {
		if n += h.buckets[i].Load(); n >= rank && n > 0 {
			return min(math.Exp2(float64(i+1)/8)/1e3, h.maximum())
		}
	}
	return 0
}

// maximum returns the longest duration in ms.
func (h *histogram) maximum() float64 { return float64(h.max.Load()) / 1e6 }

// A sample is what the process of the target uses at one moment.
type sample struct{ memory, goroutines, descriptors, threads float64 }

// resources are the names of the fields of a sample.
var resources = []string{"memory", "goroutines", "descriptors", "threads"}

func (s sample) values() []float64 {
	return []float64{s.memory, s.goroutines, s.descriptors, s.threads}
}

var httpClient = http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}

// measure returns what a process uses.
func measure(pid int, metrics string) (s sample, err error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return s, err
	}
	for line := range strings.Lines(string(status)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		switch f[0] {
		case "VmRSS:":
			n, err := strconv.ParseFloat(f[1], 64)
			if err != nil {
				return s, err
			}
			s.memory = n / 1024
		case "Threads:":
			if s.threads, err = strconv.ParseFloat(f[1], 64); err != nil {
				return s, err
			}
		}
	}
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return s, err
	}
	s.descriptors = float64(len(fds))
	resp, err := httpClient.Get("http://" + metrics + "/metrics")
	if err != nil {
		return s, err
	}
	defer resp.Body.Close()
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		if v, ok := strings.CutPrefix(lines.Text(), "go_goroutines "); ok {
			s.goroutines, err = strconv.ParseFloat(v, 64)
			return s, err
		}
	}
	return s, fmt.Errorf("the metrics have no go_goroutines")
}

// watch takes samples until stop is closed. While the process changes, there are no samples.
func (w *world) watch(stop <-chan struct{}) {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		pid := int(w.pid.Load())
		s, err := measure(pid, w.metrics)
		if err != nil {
			if label := w.label.Load().(string); int(w.pid.Load()) == pid && !replaces[label] {
				w.log("no sample: %v", err)
				w.count.blind.Add(1)
			}
			continue
		}
		w.mu.Lock()
		w.samples = append(w.samples, s)
		w.mu.Unlock()
	}
}

// spread returns the least, the median and the greatest value of a resource.
func spread(samples []sample, i int) (least, median, most float64) {
	var all []float64
	for _, s := range samples {
		all = append(all, s.values()[i])
	}
	if len(all) == 0 {
		return math.NaN(), math.NaN(), math.NaN()
	}
	slices.Sort(all)
	return all[0], all[len(all)/2], all[len(all)-1]
}
