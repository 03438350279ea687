// Command report measures iser-target next to other targets and writes one HTML file with charts, and a summary in Markdown. In the virtual machine of
// tests/interop the Linux initiator runs the jobs of examples/fio on LIO, tgt and iser-target in turn. On this machine iser-target bench measures
// iser-target, tgt, and any other target that runs. It writes docs/report.md and docs/report.html.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/tests/testkit/fio"
)

const ours = "iser-target"

// options are what a report is made with.
type options struct {
	rounds        int
	runtime, ramp time.Duration // of each job
	others        []hostColumn
	overwrite     bool
	program       string
	examples      string
	html, md      string
	progress      func(string, ...any)
}

func main() {
	var o options
	var targets string
	flag.IntVar(&o.rounds, "rounds", 3, "measurements of each job on each target")
	flag.DurationVar(&o.runtime, "runtime", 2*time.Second, "time of each measurement")
	flag.DurationVar(&o.ramp, "ramp", 500*time.Millisecond, "time before each measurement")
	flag.StringVar(&targets, "targets", "", `more targets that run: "NAME=iscsi://HOST:PORT/IQN/LUN ...", or iser://; with #pid=PID at its end, that process stops while other targets are measured`)
	flag.BoolVar(&o.overwrite, "overwrite", false, "overwrites the LUNs of -targets")
	flag.StringVar(&o.program, "program", "bin/iser-target", "the program to measure")
	flag.StringVar(&o.examples, "examples", "examples/fio", "directory with the job files of the virtual machine")
	flag.StringVar(&o.html, "html", "docs/report.html", "file to write")
	flag.StringVar(&o.md, "markdown", "docs/report.md", "file to write")
	tune := flag.String("tuning", "", "runs experiments of docs/tuning.md instead, and prints their tables: all, or names with commas")
	show := flag.String("figures", "", "measures the figures of docs/performance.md instead, and prints their table: all, or groups with commas")
	flag.Parse()
	var err error
	if o.others, err = parseTargets(targets, o.overwrite); err != nil || o.rounds < 1 || o.runtime < time.Second || o.ramp < 0 || flag.NArg() > 0 {
		switch {
		case err != nil:
		case flag.NArg() > 0:
			err = fmt.Errorf("unexpected argument %q: the values of -figures, -tuning and -targets have commas between them, and no spaces", flag.Arg(0))
		default:
			err = errors.New("-rounds must be at least 1, -runtime at least 1s and -ramp not negative")
		}
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(2)
	}
	o.progress = func(format string, a ...any) { fmt.Fprintf(os.Stderr, "report: "+format+"\n", a...) }
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	do := func() error { return run(ctx, &o, targets) }
	list := func(flag string) []string {
		if flag == "all" {
			return nil
		}
		return strings.Split(flag, ",")
	}
	switch {
	case *show != "":
		if len(o.others) == 0 { // which are out of reach of another namespace
			code, done, reason := ownLoopback(ctx, "cubic")
			if done {
				os.Exit(code)
			}
			if reason != nil {
				o.progress("the congestion control stays %s: %v", congestion(), reason)
			}
		}
		do = func() error { return figures(ctx, os.Stdout, &o, list(*show)) }
	case *tune != "":
		do = func() error { return tuning(ctx, os.Stdout, &o, list(*tune)) }
	}
	err = freeze(o.others)
	if err == nil {
		err = do()
	}
	if err = errors.Join(err, thaw(o.others)); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

var targetName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._+-]{0,31}$`)

// parseTargets reads the flag -targets.
func parseTargets(s string, overwrite bool) (list []hostColumn, err error) {
	for _, word := range strings.Fields(s) {
		name, address, ok := strings.Cut(word, "=")
		u, err := url.Parse(address)
		switch {
		case !ok || !targetName.MatchString(name):
			return nil, fmt.Errorf("-targets: %q is not NAME=URL; a name has letters, digits and . _ + -", word)
		case err != nil:
			return nil, fmt.Errorf("-targets: %s: %w", name, err)
		case u.Scheme != "iscsi" && u.Scheme != "iser" || u.Host == "":
			return nil, fmt.Errorf("-targets: %s: %q is not iscsi://HOST:PORT/IQN/LUN or iser://HOST:PORT/IQN/LUN", name, address)
		}
		var pid int
		if u.Fragment != "" {
			number, ok := strings.CutPrefix(u.Fragment, "pid=")
			if pid, err = strconv.Atoi(number); !ok || err != nil || pid < 2 {
				return nil, fmt.Errorf("-targets: %s: %q is not pid=PID, the process to stop while other targets are measured", name, u.Fragment)
			}
			address, _, _ = strings.Cut(address, "#")
		}
		c := hostColumn{column: column{name, map[string]string{"iscsi": "TCP", "iser": "iSER"}[u.Scheme]}, url: address, overwrite: overwrite, pid: pid}
		for _, known := range append([]hostColumn{{column: column{ours, c.Transport}}, {column: column{"tgt", "TCP"}}}, list...) {
			if known.column == c.column {
				return nil, fmt.Errorf("-targets: %v is in the report already", c.column)
			}
		}
		list = append(list, c)
	}
	return list, nil
}

// run measures and writes the report. A part that could not be measured at all is in the report, with the reason, and an error.
func run(ctx context.Context, o *options, targets string) error {
	began := time.Now()
	r := &report{Title: "iser-target and other targets", Command: command(o, targets)}
	r.Facts = []fact{{"Command", r.Command}, {"Date", began.UTC().Format("2006-01-02 15:04 MST")}}
	r.Facts = append(r.Facts, machine(ctx, o)...)
	before := load()

	var vmTable *table
	var facts []fact
	jobs, vmErr := fio.Load(o.examples, o.runtime, o.ramp)
	if vmErr == nil {
		vmTable, facts, vmErr = measureGuest(ctx, o, jobs, guestColumns())
	}
	r.Facts = append(r.Facts, facts...)
	r.Parts = append(r.Parts, newPart("In the virtual machine, with the Linux initiator", guestNotes(o), vmTable, vmErr))
	hostTable, hostErr := measureHost(ctx, o)
	r.Parts = append(r.Parts, newPart("On the machine itself, with iser-target bench", hostNotes(o), hostTable, hostErr))
	r.Facts = append(r.Facts, fact{"Load average before and after", before + "; " + load()},
		fact{"Time of the report", time.Since(began).Round(time.Second).String()})
	// The report itself keeps each CPU busy with two processes.
	for _, l := range []string{before, load()} {
		if n, err := strconv.ParseFloat(l, 64); err == nil && n > float64(3*runtime.NumCPU()) {
			r.Busy = busy
		}
	}
	page, err := r.html()
	if err != nil {
		return err
	}
	return errors.Join(context.Cause(ctx), vmErr, hostErr, os.WriteFile(o.html, page, 0o644), os.WriteFile(o.md, []byte(r.markdown(filepath.Base(o.html))), 0o644))
}

// command returns the command that makes the same report.
func command(o *options, targets string) string {
	s := fmt.Sprintf("make report REPORT_ROUNDS=%d REPORT_RUNTIME=%v", o.rounds, o.runtime)
	if targets != "" {
		s += fmt.Sprintf(" REPORT_TARGETS='%s'", strings.Join(strings.Fields(targets), " "))
	}
	if o.overwrite {
		s += " REPORT_OVERWRITE=1"
	}
	return s
}

// machine describes the machine and the programs.
func machine(ctx context.Context, o *options) []fact {
	first := func(name string, args ...string) string {
		out, err := output(ctx, name, args...)
		if err != nil {
			return err.Error()
		}
		return firstLine(string(out))
	}
	cpu := "unknown"
	if b, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if m := regexp.MustCompile(`(?m)^model name\s*: (.*)$`).FindSubmatch(b); m != nil {
			cpu = string(m[1])
		}
	}
	revision, err := exec.CommandContext(ctx, "git", "rev-parse", "--short", "HEAD").Output()
	if err != nil {
		revision = []byte("unknown revision")
	}
	return []fact{
		{"Machine", fmt.Sprintf("%d CPUs, %s", runtime.NumCPU(), cpu)},
		{"Kernel", first("uname", "-sr")},
		{"TCP congestion control", congestion()},
		{"iser-target", strings.TrimSpace(string(revision)) + ", " + runtime.Version()},
		{"QEMU", first("qemu-system-x86_64", "--version")},
	}
}

// load returns the load average of the last minute.
func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return err.Error()
	}
	one, _, _ := strings.Cut(string(b), " ")
	return one
}

// congestion returns the congestion control of TCP on the loopback. Measurements depend on it much (docs/tuning.md).
func congestion() string {
	name, err := func() (name string, err error) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return "", err
		}
		defer l.Close()
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return "", err
		}
		defer c.Close()
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			return "", err
		}
		var called error
		err = raw.Control(func(fd uintptr) {
			name, called = unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
		})
		return name, errors.Join(err, called)
	}()
	if err != nil {
		return err.Error()
	}
	return name
}

// randomBytes returns n random bytes, always the same. A target could store zeros without writing them.
func randomBytes(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

// rows returns a row for each job of fio. Jobs of large blocks are measured in MB/s.
func rows(jobs fio.Jobs) (list []job) {
	for _, j := range jobs {
		list = append(list, describe(j))
	}
	return list
}

// describe describes a job by its options.
func describe(j fio.Job) job {
	get := func(key string) string {
		for _, o := range j.Options {
			if k, v, _ := strings.Cut(o, "="); k == key {
				return v
			}
		}
		return ""
	}
	what := "rw=" + get("rw")
	for _, key := range []string{"rwmixread", "bs", "bssplit", "iodepth", "numjobs", "fdatasync", "ioengine", "thinktime"} {
		if v := get(key); v != "" && v != "libaio" {
			what += ", " + key + "=" + v
		}
	}
	return job{j.Name, what, get("bs") == "128k"}
}
