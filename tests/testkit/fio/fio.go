// Package fio reads job files and results of fio, and shortens and joins jobs for tests.
package fio

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Jobs is what fio runs: sections, each with its options in the order of the file.
type Jobs []Job

// A Job is one job of fio. Options has the lines "key=value" or "key", those of [global] first.
type Job struct {
	Name    string
	Options []string
}

// Parse reads a job file of fio. Each section has the options of [global] in front, so that sections of several files can be joined.
func Parse(text string) (Jobs, error) {
	var jobs Jobs
	var global []string
	current := &global
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		switch {
		case line == "" || line[0] == '#' || line[0] == ';':
		case line == "[global]":
			if jobs != nil {
				return nil, fmt.Errorf("line %d: [global] after a job", i+1)
			}
		case line[0] == '[' && line[len(line)-1] == ']':
			jobs = append(jobs, Job{line[1 : len(line)-1], slices.Clone(global)})
			current = &jobs[len(jobs)-1].Options
		case line[0] == '[':
			return nil, fmt.Errorf("line %d: %q is not a section", i+1, line)
		default:
			*current = append(*current, line)
		}
	}
	if jobs == nil {
		return nil, errors.New("no jobs")
	}
	return jobs, nil
}

// Short sets the times of all jobs, and has them run as threads, which start faster than processes. The first job begins when all earlier ones have ended, so
// that the file can follow another one.
func (jobs Jobs) Short(runtime, ramp time.Duration) Jobs {
	var list Jobs
	for i, j := range jobs {
		var options []string
		for _, o := range j.Options {
			key, _, _ := strings.Cut(o, "=")
			switch strings.TrimSpace(key) {
			case "runtime", "ramp_time", "thread", "stonewall":
			default:
				options = append(options, o)
			}
		}
		options = append(options, fmt.Sprintf("runtime=%dms", runtime.Milliseconds()), "thread")
		if ramp > 0 {
			options = append(options, fmt.Sprintf("ramp_time=%dms", ramp.Milliseconds()))
		}
		if i == 0 || slices.Contains(j.Options, "stonewall") {
			options = append(options, "stonewall")
		}
		list = append(list, Job{j.Name, options})
	}
	return list
}

// String returns the text of a job file.
func (jobs Jobs) String() string {
	var b strings.Builder
	for _, j := range jobs {
		fmt.Fprintf(&b, "[%s]\n%s\n", j.Name, strings.Join(j.Options, "\n"))
	}
	return b.String()
}

// Names returns the names of the jobs.
func (jobs Jobs) Names() (list []string) {
	for _, j := range jobs {
		list = append(list, j.Name)
	}
	return list
}

// Load joins the shortened job files of a directory, in the order of their names. No two jobs may have the same name.
func Load(dir string, runtime, ramp time.Duration) (Jobs, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.fio"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s: no job files (*.fio)", dir)
	}
	var all Jobs
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		jobs, err := Parse(string(text))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, name := range jobs.Names() {
			if slices.Contains(all.Names(), name) {
				return nil, fmt.Errorf("%s: another file has a job %q, too", file, name)
			}
		}
		all = append(all, jobs.Short(runtime, ramp)...)
	}
	return all, nil
}

// A Result is what a job did in one round.
type Result struct {
	IOPS  float64 // reads and writes together
	Bytes float64 // per second
	CPU   float64 // µs of the target per I/O, which only bench knows; 0: not known
	P999  float64 // latency that 1 of 1000 I/Os exceeds, µs; of reads and writes the greater; 0: not known
}

// Results reads the JSON of fio, or of iser-target bench, which has the same form. A job that failed, or did no I/O, is an error in failed.
func Results(text []byte) (results map[string]Result, failed map[string]error, err error) {
	// fio prints errors of a job in front of the object.
	if at := strings.IndexByte(string(text), '{'); at > 0 {
		text = text[at:]
	}
	type direction struct {
		IOs   uint64  `json:"total_ios"`
		IOPS  float64 `json:"iops"`
		Bytes float64 `json:"bw_bytes"`
		CLat  struct {
			Percentile map[string]float64 `json:"percentile"` // ns
		} `json:"clat_ns"`
	}
	var all struct {
		Jobs []struct {
			Name        string `json:"jobname"`
			Error       int    `json:"error"`
			Read, Write direction
			Own         struct {
				Target struct {
					CPU float64 `json:"cpu_seconds"`
				} `json:"target"`
			} `json:"iser_target"`
		}
	}
	if err := json.Unmarshal(text, &all); err != nil {
		return nil, nil, fmt.Errorf("the output of fio: %w", err)
	}
	results, failed = map[string]Result{}, map[string]error{}
	for _, j := range all.Jobs {
		n := j.Read.IOs + j.Write.IOs
		switch {
		case j.Error != 0:
			failed[j.Name] = fmt.Errorf("fio reports error %d", j.Error)
		case n == 0:
			failed[j.Name] = errors.New("no I/O completed")
		default:
			const key = "99.900000"
			results[j.Name] = Result{j.Read.IOPS + j.Write.IOPS, j.Read.Bytes + j.Write.Bytes, 1e6 * j.Own.Target.CPU / float64(n),
				max(j.Read.CLat.Percentile[key], j.Write.CLat.Percentile[key]) / 1e3}
		}
	}
	return results, failed, nil
}
