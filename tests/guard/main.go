// Command guard compares the CPU time that the target takes per command with that of an earlier commit, for the fast paths.
// It serves a memory LUN with the program of each commit, loads both in turn with iser-target bench, and compares the rounds.
// It fails if a path takes more than the tolerance, beyond chance. A change that makes all users pay shows up the day it is made.
//
// With -profile it compares nothing, but loads one target with each path in turn and writes the CPU profile of that. The compiler uses
// such a profile for the program (cmd/iser-target/default.pgo).
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/bench"
	"github.com/iser-target/iser-target/tests/testkit"
)

const (
	targetName = "iqn.2026-11.io.example:guard"
	lunSize    = "64MiB"
	startTime  = 30 * time.Second
	// ticks is USER_HZ, in which the kernel counts the times of /proc/PID/stat. It is 100 on all Linux architectures that Go supports.
	ticks = 100
	// chance is how likely a run may call any path slower although none is.
	chance = 0.01
)

// The LUNs of the targets.
const (
	memoryLUN = iota
	fileLUN   // in the page cache
)

// A path is a kind of command.
type path struct {
	name, scheme string
	lun          int
	flags        []string
}

var paths = []path{
	{"TCP, READ 4 KiB, depth 1", "iscsi", memoryLUN, []string{"--rw", "randread", "--bs", "4k", "--iodepth", "1"}},
	{"TCP, READ 4 KiB, depth 32", "iscsi", memoryLUN, []string{"--rw", "randread", "--bs", "4k", "--iodepth", "32"}},
	{"TCP, READ 64 KiB, depth 32", "iscsi", memoryLUN, []string{"--rw", "randread", "--bs", "64k", "--iodepth", "32"}},
	{"TCP, READ 256 KiB, depth 8", "iscsi", memoryLUN, []string{"--rw", "randread", "--bs", "256k", "--iodepth", "8"}},
	{"TCP, WRITE 4 KiB, depth 32", "iscsi", memoryLUN, []string{"--rw", "randwrite", "--bs", "4k", "--iodepth", "32"}},
	{"TCP, WRITE 64 KiB, depth 16", "iscsi", memoryLUN, []string{"--rw", "randwrite", "--bs", "64k", "--iodepth", "16"}},
	{"TCP, WRITE 1 MiB, depth 8", "iscsi", memoryLUN, []string{"--rw", "randwrite", "--bs", "1m", "--iodepth", "8"}},
	{"TCP, file, READ 4 KiB, depth 32", "iscsi", fileLUN, []string{"--rw", "randread", "--bs", "4k", "--iodepth", "32"}},
	{"TCP, file, READ 256 KiB, depth 8", "iscsi", fileLUN, []string{"--rw", "randread", "--bs", "256k", "--iodepth", "8"}},
	{"iSER, READ 4 KiB, depth 32", "iser", memoryLUN, []string{"--rw", "randread", "--bs", "4k", "--iodepth", "32"}},
	{"iSER, READ 64 KiB, depth 8", "iser", memoryLUN, []string{"--rw", "randread", "--bs", "64k", "--iodepth", "8"}},
	{"iSER, WRITE 64 KiB, depth 8", "iser", memoryLUN, []string{"--rw", "randwrite", "--bs", "64k", "--iodepth", "8"}},
	{"iSER, WRITE 256 KiB, depth 8", "iser", memoryLUN, []string{"--rw", "randwrite", "--bs", "256k", "--iodepth", "8"}}, // by RDMA Read
}

func main() {
	var programs [2]string
	base := flag.String("base", "HEAD~1", "commit to compare with")
	rounds := flag.Int("rounds", 5, "measurements of each path and program")
	seconds := flag.Int("seconds", 2, "time of each measurement")
	tolerance := flag.Float64("tolerance", 5, "percent by which a path may become more expensive")
	only := flag.String("only", "", "regular expression: the paths to measure, by name")
	flag.StringVar(&programs[0], "old", "", "program to compare with, instead of that of -base")
	flag.StringVar(&programs[1], "new", "", "program to measure, instead of that of this tree")
	profile := flag.String("profile", "", "file for the CPU profile of this tree's program; nothing is compared")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if *rounds < 3 || *seconds < 1 || *tolerance < 0 || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "guard: -rounds must be at least 3, -seconds at least 1 and -tolerance not negative")
		os.Exit(2)
	}
	chosen, err := choose(*only)
	switch {
	case err != nil:
	case *profile != "":
		err = record(ctx, *profile, chosen, *seconds)
	default:
		err = run(ctx, os.Stdout, *base, programs, chosen, *rounds, *seconds, *tolerance)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "guard:", err)
		os.Exit(1)
	}
}

// choose returns the paths whose names match the regular expression.
func choose(only string) (chosen []path, err error) {
	re, err := regexp.Compile(only)
	if err != nil {
		return nil, fmt.Errorf("-only: %w", err)
	}
	for _, p := range paths {
		if re.MatchString(p.name) {
			chosen = append(chosen, p)
		}
	}
	if chosen == nil {
		return nil, fmt.Errorf("-only %q: no path has such a name", only)
	}
	return chosen, nil
}

func run(ctx context.Context, w io.Writer, base string, programs [2]string, paths []path, rounds, seconds int, tolerance float64) error {
	dir, err := os.MkdirTemp("", "guard")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if programs[0] == "" {
		programs[0] = filepath.Join(dir, "old")
		if err := build(ctx, base, filepath.Join(dir, "tree"), programs[0]); err != nil {
			return err
		}
	} else {
		base = filepath.Base(programs[0])
	}
	if programs[1] == "" {
		programs[1] = filepath.Join(dir, "new")
		if err := command(ctx, ".", "go", "build", "-o", programs[1], "./cmd/iser-target"); err != nil {
			return err
		}
	}
	present := programs[1] // whose bench loads both
	var servers [2]*server
	for i, program := range programs {
		if servers[i], err = serve(ctx, program, filepath.Join(dir, strconv.Itoa(i))); err != nil {
			return err
		}
		defer servers[i].stop()
		if err := servers[i].fill(ctx, present); err != nil {
			return err
		}
	}
	var slower []string
	fmt.Fprintf(w, "%-34s %14s %14s %8s %8s\n", "CPU time per command", base, "now", "change", "p")
	for _, p := range paths {
		var costs [2][]float64
		for round := range rounds {
			for k := range servers {
				i := (k + round) % 2 // neither is always the first
				cost, err := servers[i].load(ctx, present, p, seconds)
				if err != nil {
					return fmt.Errorf("%s: %w", p.name, err)
				}
				costs[i] = append(costs[i], cost)
			}
		}
		v := judge(costs[0], costs[1], tolerance, chance/float64(len(paths)))
		note := ""
		if v.slower {
			note = "  more expensive"
			slower = append(slower, p.name)
		}
		fmt.Fprintf(w, "%-34s %11.2f µs %11.2f µs %+7.1f%% %8.4f%s\n", p.name, v.old, v.present, v.change, v.p, note)
	}
	if len(slower) > 0 {
		return fmt.Errorf("more CPU time per command than %s, by more than %g %% and beyond chance: %s", base, tolerance, strings.Join(slower, "; "))
	}
	return nil
}

// record writes the CPU profile of a target that has all paths in turn.
func record(ctx context.Context, file string, paths []path, seconds int) error {
	dir, err := os.MkdirTemp("", "guard")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	program := filepath.Join(dir, "program")
	if err := command(ctx, ".", "go", "build", "-o", program, "./cmd/iser-target"); err != nil {
		return err
	}
	s, err := serve(ctx, program, filepath.Join(dir, "0"))
	if err != nil {
		return err
	}
	defer s.stop()
	if err := s.fill(ctx, program); err != nil {
		return err
	}
	profiled := make(chan error, 1)
	go func() { profiled <- s.profile(ctx, file, seconds*len(paths)) }()
	for _, p := range paths {
		if _, err := s.load(ctx, program, p, seconds); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return <-profiled
}

// A verdict compares the rounds of a path. Costs are medians, in µs.
type verdict struct {
	old, present, change, p float64
	slower                  bool
}

// judge compares costs in µs. A path is slower if the median has grown by more than tolerance percent, and Welch's t-test says
// that chance makes such a difference with a probability below p only.
func judge(old, present []float64, tolerance, p float64) verdict {
	v := verdict{old: median(old), present: median(present)}
	v.change = 100 * (v.present/v.old - 1)
	v.p, _ = bench.Welch(bench.Summarize(old), bench.Summarize(present))
	v.slower = v.change > tolerance && v.p < p
	return v
}

func median(list []float64) float64 {
	s := slices.Sorted(slices.Values(list))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// build builds the program of a commit from a copy of its tree.
func build(ctx context.Context, commit, tree, program string) error {
	if err := os.Mkdir(tree, 0o700); err != nil {
		return err
	}
	archive := tree + ".tar"
	if err := command(ctx, ".", "git", "archive", "-o", archive, commit); err != nil {
		return err
	}
	if err := command(ctx, tree, "tar", "-xf", archive); err != nil {
		return err
	}
	return command(ctx, tree, "go", "build", "-buildvcs=false", "-o", program, "./cmd/iser-target")
}

func command(ctx context.Context, dir, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

// A server is a target in a process of its own.
type server struct {
	cmd   *exec.Cmd
	addr  string
	debug string // URL of pprof, without a slash at its end
}

var (
	serving   = regexp.MustCompile(`msg=serving portal=(\S+)`)
	debugging = regexp.MustCompile(`msg="debug server" url=(\S+)/debug/vars`)
)

// serve starts a target with a LUN in memory and one on a file, with the files of dir.
func serve(ctx context.Context, program, dir string) (*server, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	file, log := filepath.Join(dir, "c.yaml"), filepath.Join(dir, "log")
	text := fmt.Sprintf("state_dir: %s/state\ncontrol: {socket: %s/s}\ndebug: {listen: \"127.0.0.1:0\"}\nportals: [{listen: \"127.0.0.1:0\"}]\n"+
		"targets: [{name: %s, initiators: [\"*\"], luns: [{id: %d, backend: memory, size: %s}, {id: %d, backend: file, path: %s/lun, size: %s}]}]\n",
		dir, dir, targetName, memoryLUN, lunSize, fileLUN, dir, lunSize)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return nil, err
	}
	out, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	s := &server{cmd: exec.CommandContext(ctx, program, "serve", "--config", file)}
	s.cmd.Stdout, s.cmd.Stderr = out, out
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	for end := time.Now().Add(startTime); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		b, err := os.ReadFile(log)
		if err != nil {
			return nil, errors.Join(err, s.stop())
		}
		if m := serving.FindSubmatch(b); m != nil {
			s.addr = string(m[1])
			if m = debugging.FindSubmatch(b); m == nil {
				s.stop()
				return nil, fmt.Errorf("%s has no debug server: %s", program, b)
			}
			s.debug = string(m[1]) + "/debug/pprof"
			return s, nil
		}
	}
	b, _ := os.ReadFile(log)
	s.stop()
	return nil, fmt.Errorf("%s did not start within %v: %s", program, startTime, b)
}

func (s *server) stop() error {
	s.cmd.Process.Kill()
	s.cmd.Wait() // killed
	return nil
}

// fill writes all blocks of the LUNs: blocks that were never written are cheaper to read.
func (s *server) fill(ctx context.Context, program string) error {
	for _, lun := range []int{memoryLUN, fileLUN} {
		if _, err := s.load(ctx, program, path{scheme: "iscsi", lun: lun, flags: []string{"--rw", "write", "--bs", "1m", "--iodepth", "4"}}, 2); err != nil {
			return err
		}
	}
	return nil
}

// profile writes a CPU profile of s to file.
func (s *server) profile(ctx context.Context, file string, seconds int) error {
	return testkit.Download(ctx, fmt.Sprintf("%s/profile?seconds=%d", s.debug, seconds), file)
}

// load loads s by bench of program, and returns the CPU time of s per command, in µs. That includes logins and the commands of
// the start, which are few.
func (s *server) load(ctx context.Context, program string, p path, seconds int) (float64, error) {
	before, err := s.cpu()
	if err != nil {
		return 0, err
	}
	args := append([]string{"bench", fmt.Sprintf("%s://%s/%s/%d", p.scheme, s.addr, targetName, p.lun), "--runtime", strconv.Itoa(seconds), "--destructive",
		"-o", "json"}, p.flags...)
	cmd := exec.CommandContext(ctx, program, args...)
	var errOut bytes.Buffer
	cmd.Stderr = &errOut
	out, err := cmd.Output()
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, bytes.TrimSpace(errOut.Bytes()))
	}
	var result struct {
		Jobs []struct {
			Read, Write struct {
				IOs float64 `json:"total_ios"`
			}
		}
	}
	if err := json.Unmarshal(out, &result); err != nil {
		return 0, err
	}
	after, err := s.cpu()
	if err != nil {
		return 0, err
	}
	ios := 0.0
	for _, j := range result.Jobs {
		ios += j.Read.IOs + j.Write.IOs
	}
	if ios == 0 {
		return 0, errors.New("bench did no I/O")
	}
	return float64((after - before).Microseconds()) / ios, nil
}

// cpu returns the CPU time of s so far.
func (s *server) cpu() (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	return parseStat(string(b))
}

// parseStat returns utime and stime of /proc/PID/stat (proc(5)). The name of the program, in parentheses, may contain anything.
func parseStat(stat string) (time.Duration, error) {
	fields := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/PID/stat has %d fields", len(fields))
	}
	var sum time.Duration
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/PID/stat: %w", err)
		}
		sum += time.Duration(n) * time.Second / ticks
	}
	return sum, nil
}
