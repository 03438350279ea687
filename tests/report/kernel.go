package main

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/iser-target/iser-target/tests/testkit/fio"
)

// kernelJobs are what the rows of the table compare in the virtual machine.
var kernelJobs = []struct {
	name, rw, bs string
	depth        int
	lio, tcp     float64 // least ratio to LIO over iSER, and to ours over TCP; 0: none
}{
	{"READ 4 KiB, depth 16", "randread", "4k", 16, 1.2, 0},
	{"WRITE 4 KiB, depth 16", "randwrite", "4k", 16, 1.2, 0},
	{"READ 64 KiB, depth 8", "randread", "64k", 8, 1.5, 1.1},
	{"WRITE 64 KiB, depth 8", "randwrite", "64k", 8, 1.5, 1.1},
	{"READ 1 MiB, depth 4", "randread", "1m", 4, 1.5, 1.1},
	{"WRITE 1 MiB, depth 4", "randwrite", "1m", 4, 1.5, 1.1},
}

// kernelFio returns the jobs of fio.
func kernelFio(runtime, ramp time.Duration) fio.Jobs {
	var jobs fio.Jobs
	for _, j := range kernelJobs {
		jobs = append(jobs, fio.Job{Name: j.name, Options: []string{"filename=${DISK}", "ioengine=libaio", "direct=1", "time_based", "stonewall",
			"rw=" + j.rw, "bs=" + j.bs, fmt.Sprint("iodepth=", j.depth)}})
	}
	return jobs.Short(runtime, ramp)
}

// kernelFigures compares iSER with LIO over iSER and with TCP, for the Linux initiator in the virtual machine.
func kernelFigures(ctx context.Context, o *options, _ string) (list []figure, err error) {
	luns := []struct{ kind, ours, lio string }{{"file LUN", ours, "LIO"}, {"memory LUN", oursInMemory, lioInMemory}}
	var columns []column
	for _, l := range luns {
		columns = append(columns, column{l.ours, "iSER"}, column{l.ours, "TCP"}, column{l.lio, "iSER"})
	}
	t, _, err := measureGuest(ctx, o, kernelFio(o.runtime, o.ramp), columns)
	if err != nil {
		return nil, err
	}
	for _, l := range luns {
		lio, tcp := column{l.lio, "iSER"}, column{l.ours, "TCP"}
		for _, than := range []column{lio, tcp} {
			for i, j := range kernelJobs {
				bound := j.lio
				if than == tcp {
					bound = j.tcp
				}
				if bound > 0 {
					f := t.compare(t.jobs[i], column{l.ours, "iSER"}, than, false, bound)
					f.work, f.than = j.name+", ib_iser, "+l.kind, than.String()
					list = append(list, f)
				}
			}
		}
	}
	return list, nil
}

// streamRows are the benchmarks of package rdma that the rows compare with BenchmarkRawTCP.
var streamRows = []struct {
	work, bench, size string
	bound             float64
}{
	{"RDMA Writes of 64 KiB, no CRC", "Write/crc=false/64K", "64K", 0.95},
	{"RDMA Writes of 1 MiB, no CRC", "Write/crc=false/1M", "1M", 0.95},
	{"RDMA Writes of 64 KiB by pages, no CRC", "Write/crc=false,pages/64K", "64K", 0.95},
	{"RDMA Writes of 1 MiB by pages, no CRC", "Write/crc=false,pages/1M", "1M", 0.95},
	{"RDMA Writes of 64 KiB, CRC", "Write/crc=true/64K", "64K", 0.8},
	{"RDMA Writes of 1 MiB, CRC", "Write/crc=true/1M", "1M", 0.8},
}

// streamFigures compares a stream of RDMA Writes with the same bytes on a socket.
func streamFigures(ctx context.Context, o *options, dir string) (list []figure, err error) {
	program := filepath.Join(dir, "rdma.test")
	if _, err := output(ctx, "go", "test", "-c", "-o", program, "./rdma"); err != nil {
		return nil, err
	}
	raw, rdma := column{"raw TCP", ""}, column{"RDMA", ""}
	var jobs []job
	for _, r := range streamRows {
		jobs = append(jobs, job{Name: r.work})
	}
	t := newTable(o.rounds, []column{raw, rdma}, jobs)
	for round := range o.rounds {
		o.progress("round %d of %d: streams", round+1, o.rounds)
		out, err := output(ctx, program, "-test.run=^$", "-test.bench=^Benchmark(RawTCP|Write)$", "-test.benchtime=0.3s")
		if err != nil {
			return nil, err
		}
		times := parseBench(string(out))
		for i, r := range streamRows {
			for c, name := range map[column]string{raw: "RawTCP/" + r.size, rdma: r.bench} {
				if times[name] == 0 {
					return nil, fmt.Errorf("go test printed no result of Benchmark%s", name)
				}
				t.set(round, c, jobs[i], fio.Result{IOPS: 1e9 / times[name]}, nil)
			}
		}
	}
	for i, r := range streamRows {
		f := t.compare(jobs[i], rdma, raw, false, r.bound)
		f.work = r.work
		list = append(list, f)
	}
	return list, nil
}

var benchLine = regexp.MustCompile(`(?m)^Benchmark(\S+?)(?:-\d+)?\s+\d+\s+([0-9.]+) ns/op`)

// parseBench returns the ns per operation of the benchmarks in the output of go test.
func parseBench(text string) map[string]float64 {
	times := map[string]float64{}
	for _, m := range benchLine.FindAllStringSubmatch(text, -1) {
		times[m[1]], _ = strconv.ParseFloat(m[2], 64) // 0: no result
	}
	return times
}
