package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/tests/interop/proc"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/fio"
	"github.com/iser-target/iser-target/tests/testkit/ports"
)

const (
	hostSize  = 256 << 20
	hostIQN   = "iqn.2026-11.io.example:report"
	hostStart = 2 * time.Minute
	// tgtControl is the number of tgtd's socket, so that another tgtd can run at the same time.
	tgtControl = "7391"
)

// hostJobs are the jobs of iser-target bench, with its flags. They resemble those of examples/fio.
var hostJobs = []struct {
	job
	flags  string
	writes bool
}{
	{job{"randread-4k", "4 KiB random reads, depth 32", false}, "--rw randread --bs 4k --iodepth 32", false},
	{job{"randwrite-4k", "4 KiB random writes, depth 32", false}, "--rw randwrite --bs 4k --iodepth 32", true},
	{job{"mixed-70-30", "70 % reads and 30 % writes of 8 KiB, depth 16", false}, "--rw randrw --rwmixread 70 --bs 8k --iodepth 16", true},
	{job{"read-4k-qd1", "4 KiB random reads, depth 1", false}, "--rw randread --bs 4k --iodepth 1", false},
	{job{"read-128k", "128 KiB reads, depth 16", true}, "--rw read --bs 128k --iodepth 16", false},
	{job{"write-128k", "128 KiB writes, depth 16", true}, "--rw write --bs 128k --iodepth 16", true},
}

// errInterrupted is why nothing is measured after an interrupt. The report has what was measured before.
var errInterrupted = errors.New("interrupted")

// A hostColumn is a LUN that bench reaches from this machine.
type hostColumn struct {
	column
	url       string
	prefix    []string // of the command line of bench
	overwrite bool     // writes are allowed
	failed    error    // why it cannot be measured
	pid       int      // of a target that polls, which would take a CPU from the others: stopped while they are measured; 0: none
}

// freeze stops the processes of columns that have one.
func freeze(columns []hostColumn) error { return signalAll(columns, unix.SIGSTOP) }

// thaw lets them continue.
func thaw(columns []hostColumn) error { return signalAll(columns, unix.SIGCONT) }

func signalAll(columns []hostColumn, sig unix.Signal) (err error) {
	for _, c := range columns {
		if c.pid == 0 {
			continue
		}
		if e := unix.Kill(c.pid, sig); e != nil {
			err = errors.Join(err, fmt.Errorf("-targets: %s: %v to process %d: %w", c.Target, sig, c.pid, e))
		}
	}
	return err
}

// measureHost starts iser-target and tgt on this machine and measures them, and the targets of others, in turn with iser-target bench.
func measureHost(ctx context.Context, o *options) (_ *table, err error) {
	dir, err := os.MkdirTemp("/dev/shm", "iser-target-report-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	columns, stop := startOurs(ctx, o, dir)
	defer func() { err = errors.Join(err, stop()) }()
	other, stopTgt := startTgt(ctx, dir)
	defer stopTgt()
	columns = append(append(columns, other), o.others...)

	var list []column
	for _, c := range columns {
		list = append(list, c.column)
	}
	var jobs []job
	for _, j := range hostJobs {
		jobs = append(jobs, j.job)
	}
	t := newTable(o.rounds, list, jobs)
	for round := range o.rounds {
		for _, j := range hostJobs {
			for i := range columns {
				c := &columns[(i+round)%len(columns)]
				o.progress("round %d of %d: %v: %s", round+1, o.rounds, c.column, j.Name)
				r, err := c.measure(ctx, o, j.flags, j.writes)
				t.set(round, c.column, j.job, r, err)
			}
		}
	}
	return t, nil
}

// measure runs one job of bench.
func (c *hostColumn) measure(ctx context.Context, o *options, flags string, writes bool) (r fio.Result, err error) {
	if ctx.Err() != nil {
		return r, errInterrupted
	}
	if c.failed != nil {
		return r, c.failed
	}
	if writes && !c.overwrite {
		return r, errors.New("not allowed to overwrite the LUN (REPORT_OVERWRITE=1 allows it)")
	}
	args := append(slices.Clone(c.prefix), o.program, "bench", c.url)
	args = append(args, strings.Fields(flags)...)
	args = append(args, "--runtime", o.runtime.String(), "--ramp", o.ramp.String(), "-o", "json")
	if c.overwrite {
		args = append(args, "--destructive")
	}
	own := []hostColumn{*c}
	if err := thaw(own); err != nil {
		return r, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute+2*(o.runtime+o.ramp))
	defer cancel()
	out, err := output(ctx, args[0], args[1:]...)
	if err = errors.Join(err, freeze(own)); err != nil {
		return r, err
	}
	results, failed, err := fio.Results(out)
	if err != nil {
		return r, err
	}
	for _, r := range results {
		return r, nil
	}
	for _, err := range failed {
		return r, err
	}
	return r, errors.New("bench printed no result")
}

// output runs a command and returns its standard output. The error has the first line of its standard error.
func output(ctx context.Context, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w: %s", filepath.Base(name), args[0], err, firstLine(stderr.String()))
	}
	return out, nil
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

// startOurs starts the target with a file LUN in dir. Columns that cannot be measured have the reason.
func startOurs(ctx context.Context, o *options, dir string) (columns []hostColumn, stop func() error) {
	columns = []hostColumn{{column: column{ours, "TCP"}, overwrite: true}, {column: column{ours, "iSER"}, overwrite: true}}
	stop, err := func() (func() error, error) {
		port, err := ports.Free()
		if err != nil {
			return nil, err
		}
		config, disk, socket := filepath.Join(dir, "config.yaml"), filepath.Join(dir, "ours.img"), filepath.Join(dir, "control")
		text := fmt.Sprintf("portals: [{listen: \"127.0.0.1:%d\"}]\ntargets: [{name: %s, initiators: [\"*\"], luns: [{id: 0, backend: file, path: %s, size: %d}]}]\n"+
			"state_dir: %s\ncontrol: {socket: %s}\n", port, hostIQN, disk, hostSize, filepath.Join(dir, "state"), socket)
		if err := errors.Join(os.WriteFile(config, []byte(text), 0o600), os.WriteFile(disk, randomBytes(hostSize), 0o600)); err != nil {
			return nil, err
		}
		for i, scheme := range []string{"iscsi", "iser"} {
			columns[i].url = fmt.Sprintf("%s://127.0.0.1:%d/%s/0", scheme, port, hostIQN)
		}
		c := client.New(socket)
		return daemon(exec.CommandContext(ctx, o.program, "serve", "--config", config), func() error {
			_, err := c.Portals(ctx)
			return err
		})
	}()
	if err != nil {
		for i := range columns {
			columns[i].failed = fmt.Errorf("it did not start: %w", err)
		}
		return columns, func() error { return nil }
	}
	return columns, stop
}

// startTgt starts tgt in the same way.
func startTgt(ctx context.Context, dir string) (c hostColumn, stop func() error) {
	c = hostColumn{column: column{"tgt", "TCP"}, overwrite: true}
	stop, err := func() (func() error, error) {
		port, err := ports.Free()
		if err != nil {
			return nil, err
		}
		disk := filepath.Join(dir, "tgt.img")
		if err := os.WriteFile(disk, randomBytes(hostSize), 0o600); err != nil {
			return nil, err
		}
		admin := func(args string) error {
			_, err := output(ctx, "tgtadm", append([]string{"-C", tgtControl}, strings.Fields(args)...)...)
			return err
		}
		stop, err := daemon(exec.CommandContext(ctx, "tgtd", "-f", "-C", tgtControl, "--iscsi", fmt.Sprintf("portal=127.0.0.1:%d", port)), func() error {
			return admin("--op show --mode system")
		})
		if err != nil {
			return nil, err
		}
		for _, args := range []string{
			"--lld iscsi --op new --mode target --tid 1 -T " + hostIQN,
			"--lld iscsi --op new --mode logicalunit --tid 1 --lun 1 -b " + disk,
			"--lld iscsi --op bind --mode target --tid 1 -I ALL",
		} {
			if err := admin(args); err != nil {
				return nil, errors.Join(err, stop())
			}
		}
		c.url = fmt.Sprintf("iscsi://127.0.0.1:%d/%s/1", port, hostIQN)
		return stop, nil
	}()
	if err != nil {
		c.failed = fmt.Errorf("it did not start: %w", err)
		return c, func() error { return nil }
	}
	return c, stop
}

// daemon starts a process and waits until ready returns nil. stop ends it.
func daemon(cmd *exec.Cmd, ready func() error) (stop func() error, err error) {
	var log testkit.Log
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := proc.Start(cmd); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	stop = func() error {
		if err := cmd.Process.Kill(); err != nil {
			return fmt.Errorf("%s ended before it was stopped: %s", cmd.Path, firstLine(log.String()))
		}
		<-ended
		return nil
	}
	late := time.After(hostStart)
	for {
		err := ready()
		if err == nil {
			return stop, nil
		}
		select {
		case <-ended:
			return nil, fmt.Errorf("%s ended: %s", cmd.Path, firstLine(log.String()))
		case <-late:
			return nil, errors.Join(fmt.Errorf("%s is not ready after %v: %w", cmd.Path, hostStart, err), stop())
		case <-time.After(50 * time.Millisecond):
		}
	}
}
