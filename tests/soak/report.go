package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// A report is the outcome of a run.
type report struct {
	*world
	before, after sample // at rest
	took          time.Duration
}

// rest waits until the target has ended what the load left, and measures it.
func (r *report) rest() {
	limit := func(name string) float64 {
		for _, b := range r.bounds {
			if b.name == name {
				return b.max
			}
		}
		return 0
	}
	for end := time.Now().Add(r.settle); ; time.Sleep(100 * time.Millisecond) {
		s, err := measure(int(r.pid.Load()), r.metrics)
		if err != nil {
			r.fail("at rest: %v", err)
			return
		}
		r.after = s
		if s.goroutines-r.before.goroutines <= limit("goroutines left") && s.descriptors-r.before.descriptors <= limit("descriptors left") ||
			time.Now().After(end) {
			r.log("at rest: %+v, descriptors %s", s, strings.Join(descriptors(int(r.pid.Load())), " "))
			return
		}
	}
}

// descriptors returns what the descriptors of a process are.
func descriptors(pid int) (all []string) {
	links, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		return nil
	}
	for _, l := range links {
		if to, err := os.Readlink(l); err == nil { // it may be closed by now
			all = append(all, to)
		}
	}
	slices.Sort(all)
	return all
}

// end ends the target.
func (r *report) end() {
	if all, err := r.api.Sessions(r.ctx); err != nil || len(all) > 0 {
		r.fail("%d sessions are left (%v)", len(all), err)
	}
	if err := r.terminate(); err != nil {
		r.fail("the end of the target: %v", err)
	}
}

// figures returns what the bounds are about.
func (r *report) figures() map[string]float64 {
	f := map[string]float64{
		"goroutines left":  r.after.goroutines - r.before.goroutines,
		"descriptors left": r.after.descriptors - r.before.descriptors,
	}
	for i, name := range resources {
		_, _, f[name] = spread(r.samples, i)
	}
	for label, h := range r.latencies {
		key := "disturbed"
		switch {
		case label == calm:
			key = calm
		case label == "drain" || label == "kill -9":
			f["max restart"] = max(f["max restart"], h.maximum())
			continue
		case label == "upgrade":
			f["max upgrade"] = h.maximum()
			continue
		}
		f["p99 "+key] = max(f["p99 "+key], h.quantile(0.99))
		f["max "+key] = max(f["max "+key], h.maximum())
	}
	return f
}

// judge adds a failure for each figure that exceeds its bound.
func (r *report) judge() {
	f := r.figures()
	for _, b := range r.bounds {
		if v, ok := f[b.name]; !ok {
			r.fail("bound %q: nothing measures it", b.name)
		} else if !(v <= b.max) {
			r.fail("bound %q: %.1f %s, want at most %g", b.name, v, b.unit, b.max)
		}
	}
	if r.count.reads.Load() == 0 || r.count.writes.Load() == 0 || len(r.samples) == 0 {
		r.fail("%d reads, %d writes and %d samples: nothing was tested", r.count.reads.Load(), r.count.writes.Load(), len(r.samples))
	}
}

// markdown returns the tables of figures.
func (r *report) markdown() string {
	var b strings.Builder
	c := &r.count
	fmt.Fprintf(&b, "soak: seed %d, %v of load on %d processors, %s\n\n", r.seed, r.took.Round(time.Second), runtime.NumCPU(), runtime.Version())
	fmt.Fprintf(&b, "| what | number |\n|---|---|\n")
	for _, row := range []struct {
		what string
		n    int64
	}{
		{"reads, verified", c.reads.Load()}, {"writes, acknowledged", c.writes.Load()}, {"syncs", c.syncs.Load()},
		{"commands that an injected fault failed", c.medium.Load()}, {"LUNs recovered after that", c.recovered.Load()}, {"logins", c.logins.Load()}, {"sessions lost by a disturbance", c.lost.Load()},
		{"upgrades refused", int64(r.refused)}, {"samples of resources", int64(len(r.samples))}, {"samples that failed", c.blind.Load()}, {"failures", int64(len(r.failures))},
	} {
		fmt.Fprintf(&b, "| %s | %d |\n", row.what, row.n)
	}
	fmt.Fprintf(&b, "\n| resource | start | least | median | most | at rest | bound |\n|---|---|---|---|---|---|---|\n")
	for i, name := range resources {
		least, median, most := spread(r.samples, i)
		var limit float64
		for _, k := range r.bounds {
			if k.name == name {
				limit = k.max
			}
		}
		if name == "memory" {
			name += " (MiB)"
		}
		fmt.Fprintf(&b, "| %s | %.0f | %.0f | %.0f | %.0f | %.0f | %g |\n", name, r.before.values()[i], least, median, most, r.after.values()[i], limit)
	}
	fmt.Fprintf(&b, "\n| during | times | commands of neighbours | p50 ms | p99 ms | max ms |\n|---|---|---|---|---|---|\n")
	row := func(label string, times string) {
		h := r.latencies[label]
		fmt.Fprintf(&b, "| %s | %s | %d | %.2f | %.2f | %.0f |\n", label, times, h.count(), h.quantile(0.5), h.quantile(0.99), h.maximum())
	}
	row(calm, "–")
	for _, k := range kinds {
		row(k.name, fmt.Sprint(r.done[k.name]))
	}
	return b.String()
}
