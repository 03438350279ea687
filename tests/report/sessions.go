package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/fio"
	"github.com/iser-target/iser-target/tests/testkit/ports"
)

const (
	manySessions = 8
	// lockBound is the most percent of the CPUs' time that goroutines may wait for the locks of one function.
	lockBound = 1
	// growth is how much the CPU time of a command may grow with the number of sessions. Less is noise.
	growth = 1.1
	// longestLocks is how many functions are listed for each job.
	longestLocks = 3
)

// sessionJobs have 32 commands in flight for each session.
var sessionJobs = []tuneJob{
	{job{"READ 4 KiB, TCP", "", false}, "iscsi", read("4k", 32)},
	{job{"WRITE 4 KiB, TCP", "", false}, "iscsi", write("4k", 32)},
	{job{"READ 64 KiB, TCP", "", false}, "iscsi", read("64k", 32)},
	{job{"READ 4 KiB, iSER", "", false}, "iser", read("4k", 32)},
	{job{"WRITE 64 KiB, iSER", "", false}, "iser", write("64k", 32)},
}

// sessionFigures compares eight sessions, each with a LUN in memory of its own, with one. Then it loads the eight once more, and takes the profile of
// locks meanwhile.
func sessionFigures(ctx context.Context, o *options, dir string) (list []figure, err error) {
	debug, err := ports.Free()
	if err != nil {
		return nil, err
	}
	v := variant{name: ours, luns: manySessions, debug: debug}
	own := filepath.Join(dir, "target")
	c, stop := v.start(ctx, o, own, nil)
	if c.failed != nil {
		return nil, c.failed
	}
	defer func() { err = errors.Join(err, stop()) }()
	address := strings.TrimSuffix(c.url, "/0")
	// load has n sessions at the same time. Each asks for the target's CPU time, if cpu is true.
	load := func(j tuneJob, n int, cpu bool) (sum fio.Result, err error) {
		results, failed := make([]fio.Result, n), make([]error, n)
		var all sync.WaitGroup
		for id := range n {
			all.Go(func() {
				c := c
				c.url = fmt.Sprintf("%s://%s/%d", j.scheme, address, id)
				flags := j.flags
				if cpu {
					flags += " --socket " + filepath.Join(own, "control")
				}
				results[id], failed[id] = c.measure(ctx, o, flags, true)
			})
		}
		all.Wait()
		commands := 0.0 // per µs of the target's CPU time, which each bench compares with its own commands
		for _, r := range results {
			sum.IOPS += r.IOPS
			if r.CPU > 0 {
				commands += 1 / r.CPU
			}
		}
		err = errors.Join(failed...)
		switch {
		case err != nil || !cpu:
		case commands == 0:
			err = errors.New("the target did not report its CPU time")
		default:
			sum.CPU = 1 / commands
		}
		return sum, err
	}
	one, many := column{"1 session", ""}, column{fmt.Sprint(manySessions, " sessions"), ""}
	var jobs []job
	for _, j := range sessionJobs {
		jobs = append(jobs, j.job)
	}
	iops, cpu := newTable(o.rounds, []column{one, many}, jobs), newTable(o.rounds, []column{one, many}, jobs)
	for round := range o.rounds {
		for _, j := range sessionJobs {
			for i := range 2 {
				n, col := 1, one
				if (i+round)%2 == 1 {
					n, col = manySessions, many
				}
				o.progress("round %d of %d: %s: %s", round+1, o.rounds, col.Target, j.Name)
				r, err := load(j, n, true)
				iops.set(round, col, j.job, r, err)
				r.IOPS = r.CPU
				cpu.set(round, col, j.job, r, err)
			}
		}
	}
	// One session keeps up to two CPUs busy: one for the target, and one for bench.
	bound := min(manySessions, max(float64(runtime.NumCPU())/2, 1))
	for _, j := range jobs {
		f := iops.compare(j, many, one, false, bound)
		f.work = "IOPS, " + j.Name + ", " + many.Target
		list = append(list, f)
	}
	for _, j := range jobs {
		f := cpu.compare(j, many, one, true, growth)
		f.work = "CPU time per command, " + j.Name + ", " + many.Target
		list = append(list, f)
	}
	// The control API has no part in the profiles.
	for _, j := range sessionJobs {
		waits := map[string][]float64{}
		for round := range o.rounds {
			o.progress("round %d of %d: %s: %s: locks", round+1, o.rounds, many.Target, j.Name)
			locks, err := lockProfile(ctx, o, fmt.Sprintf("http://127.0.0.1:%d/debug/pprof/mutex", debug), dir, func() error {
				_, err := load(j, manySessions, false)
				return err
			})
			if err != nil {
				return nil, err
			}
			for function, percent := range locks {
				waits[function] = append(waits[function], percent)
			}
		}
		for _, f := range longest(waits, o.rounds) {
			f.work += ", " + j.Name + ", " + many.Target
			list = append(list, f)
		}
	}
	return list, nil
}

// longest returns the functions for whose locks others waited longest. waits has percent of the time of all CPUs, of the rounds in which somebody waited.
func longest(waits map[string][]float64, rounds int) (list []figure) {
	for function, values := range waits {
		values = append(values, make([]float64, rounds-len(values))...)
		list = append(list, figure{work: "waits for locks that " + function + " held", unit: " %", most: true, bound: lockBound, value: sum(values)})
	}
	slices.SortFunc(list, func(a, b figure) int {
		return cmp.Or(cmp.Compare(b.value.Median, a.value.Median), cmp.Compare(b.value.Max, a.value.Max), strings.Compare(a.work, b.work))
	})
	if list == nil {
		return []figure{{work: "waits for locks", unit: " %", most: true, bound: lockBound, value: spread{Rounds: rounds}}}
	}
	return list[:min(len(list), longestLocks)]
}

// lockProfile records the waits for locks during do. It returns their percent of the time of all CPUs, by the function that held the lock.
func lockProfile(ctx context.Context, o *options, url, dir string, do func() error) (map[string]float64, error) {
	seconds := int((o.runtime + time.Second - 1) / time.Second)
	recorded := make(chan error, 1)
	file := filepath.Join(dir, "locks")
	go func() {
		recorded <- func() error {
			time.Sleep(o.ramp)
			return testkit.Download(ctx, fmt.Sprintf("%s?seconds=%d", url, seconds), file)
		}()
	}()
	if err := errors.Join(do(), <-recorded); err != nil {
		return nil, err
	}
	// Waits count where the lock was given back: hidden are the functions of the lock itself.
	out, err := output(ctx, "go", "tool", "pprof", "-top", "-unit=ms", "-nodefraction=0", `-hide=^(sync|runtime|internal/sync)\.`, file)
	if err != nil {
		return nil, err
	}
	return parseLocks(string(out), time.Duration(seconds)*time.Second*time.Duration(runtime.NumCPU()))
}

var lockLine = regexp.MustCompile(`(?m)^ *([0-9.]+)ms +[0-9.]+% +[0-9.]+% +[0-9.]+ms +[0-9.]+%  (.+)$`)

// parseLocks reads the table of go tool pprof -top -unit=ms. total is the time of all CPUs.
func parseLocks(text string, total time.Duration) (map[string]float64, error) {
	if !strings.Contains(text, "flat%") {
		return nil, fmt.Errorf("go tool pprof prints %q", firstLine(text))
	}
	locks := map[string]float64{}
	for _, m := range lockLine.FindAllStringSubmatch(text, -1) {
		ms, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			return nil, err
		}
		if ms > 0 {
			name, _, _ := strings.Cut(m[2][strings.LastIndexByte(m[2], '/')+1:], ".deferwrap") // a deferred Unlock
			locks[strings.TrimSpace(strings.TrimSuffix(name, "(inline)"))] += 100 * ms / 1e3 / total.Seconds()
		}
	}
	return locks, nil
}
