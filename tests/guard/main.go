// Command guard compares the CPU time that the target takes per command with that of an earlier commit, for the fast paths.
// It serves a memory LUN with the program of each commit, loads both in turn with iser-target bench, and compares the rounds.
// It fails if a path takes more than the tolerance, beyond chance. A change that makes all users pay shows up the day it is made.
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
)

const (
	targetName = "iqn.2026-11.io.example:guard"
	lunSize    = "64MiB"
	startTime  = 30 * time.Second
	// ticks is USER_HZ, in which the kernel counts the times of /proc/PID/stat. It is 100 on all Linux architectures that Go supports.
	ticks = 100
	// chance is the p-value below which a difference counts.
	chance = 0.01
)

// A path is a kind of command.
type path struct {
	name, scheme string
	flags        []string
}

var paths = []path{
	{"TCP, READ 4 KiB, depth 32", "iscsi", []string{"--rw", "randread", "--bs", "4k", "--iodepth", "32"}},
	{"TCP, WRITE 4 KiB, depth 32", "iscsi", []string{"--rw", "randwrite", "--bs", "4k", "--iodepth", "32"}},
	{"TCP, READ 256 KiB, depth 8", "iscsi", []string{"--rw", "randread", "--bs", "256k", "--iodepth", "8"}},
	{"iSER, READ 4 KiB, depth 32", "iser", []string{"--rw", "randread", "--bs", "4k", "--iodepth", "32"}},
	{"iSER, WRITE 64 KiB, depth 8", "iser", []string{"--rw", "randwrite", "--bs", "64k", "--iodepth", "8"}},
}

func main() {
	base := flag.String("base", "HEAD~1", "commit to compare with")
	rounds := flag.Int("rounds", 5, "measurements of each path and program")
	seconds := flag.Int("seconds", 2, "time of each measurement")
	tolerance := flag.Float64("tolerance", 5, "percent by which a path may become more expensive")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	if *rounds < 3 || *seconds < 1 || *tolerance < 0 || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "guard: -rounds must be at least 3, -seconds at least 1 and -tolerance not negative")
		os.Exit(2)
	}
	if err := run(ctx, os.Stdout, *base, *rounds, *seconds, *tolerance); err != nil {
		fmt.Fprintln(os.Stderr, "guard:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, w io.Writer, base string, rounds, seconds int, tolerance float64) error {
	dir, err := os.MkdirTemp("", "guard")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	old, present := filepath.Join(dir, "old"), filepath.Join(dir, "new")
	if err := build(ctx, base, filepath.Join(dir, "tree"), old); err != nil {
		return err
	}
	if err := command(ctx, ".", "go", "build", "-o", present, "./cmd/iser-target"); err != nil {
		return err
	}
	var servers [2]*server
	for i, program := range []string{old, present} {
		if servers[i], err = serve(ctx, program, filepath.Join(dir, strconv.Itoa(i))); err != nil {
			return err
		}
		defer servers[i].stop()
		// Blocks that were never written are cheaper to read.
		if _, err := servers[i].load(ctx, present, "iscsi", 2, []string{"--rw", "write", "--bs", "1m", "--iodepth", "4"}); err != nil {
			return err
		}
	}
	var slower []string
	fmt.Fprintf(w, "%-28s %14s %14s %8s %8s\n", "CPU time per command", base, "now", "change", "p")
	for _, p := range paths {
		var costs [2][]float64
		for round := range rounds {
			for k := range servers {
				i := (k + round) % 2 // neither is always the first
				cost, err := servers[i].load(ctx, present, p.scheme, seconds, p.flags)
				if err != nil {
					return fmt.Errorf("%s: %w", p.name, err)
				}
				costs[i] = append(costs[i], cost)
			}
		}
		v := judge(costs[0], costs[1], tolerance)
		note := ""
		if v.slower {
			note = "  more expensive"
			slower = append(slower, p.name)
		}
		fmt.Fprintf(w, "%-28s %11.2f µs %11.2f µs %+7.1f%% %8.4f%s\n", p.name, v.old, v.present, v.change, v.p, note)
	}
	if len(slower) > 0 {
		return fmt.Errorf("more CPU time per command than %s, by more than %g %% and beyond chance: %s", base, tolerance, strings.Join(slower, "; "))
	}
	return nil
}

// A verdict compares the rounds of a path. Costs are medians, in µs.
type verdict struct {
	old, present, change, p float64
	slower                  bool
}

// judge compares costs in µs. A path is slower if the median has grown by more than tolerance percent, and Welch's t-test says
// that this is hardly chance.
func judge(old, present []float64, tolerance float64) verdict {
	v := verdict{old: median(old), present: median(present)}
	v.change = 100 * (v.present/v.old - 1)
	v.p, _ = bench.Welch(bench.Summarize(old), bench.Summarize(present))
	v.slower = v.change > tolerance && v.p < chance
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
	cmd  *exec.Cmd
	addr string
}

var serving = regexp.MustCompile(`msg=serving portal=(\S+)`)

// serve starts a target with one memory LUN, with the files of dir.
func serve(ctx context.Context, program, dir string) (*server, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	file, log := filepath.Join(dir, "c.yaml"), filepath.Join(dir, "log")
	text := fmt.Sprintf("state_dir: %s/state\ncontrol: {socket: %s/s}\nportals: [{listen: \"127.0.0.1:0\"}]\ntargets: [{name: %s, initiators: [\"*\"], luns: "+
		"[{id: 0, backend: memory, size: %s}]}]\n", dir, dir, targetName, lunSize)
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

// load loads s by bench of program, and returns the CPU time of s per command, in µs. That includes logins and the commands of
// the start, which are few.
func (s *server) load(ctx context.Context, program, scheme string, seconds int, flags []string) (float64, error) {
	before, err := s.cpu()
	if err != nil {
		return 0, err
	}
	args := append([]string{"bench", fmt.Sprintf("%s://%s/%s/0", scheme, s.addr, targetName), "--runtime", strconv.Itoa(seconds), "--destructive",
		"-o", "json"}, flags...)
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
