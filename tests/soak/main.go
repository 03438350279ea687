// Command soak runs the target for a given time under verified load, disturbs it in all ways that it has to
// survive, and reports data, resources and latencies that break their bounds. docs/soak.md describes it.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

func main() {
	o := options{bounds: bounds, progress: os.Stderr, settle: 30 * time.Second}
	flag.DurationVar(&o.duration, "duration", 30*time.Minute, "how long the load runs")
	flag.Uint64Var(&o.seed, "seed", uint64(time.Now().UnixNano()), "which disturbances come, and when; default: the time")
	flag.StringVar(&o.program, "program", "", "the program to test; default: built from this tree")
	flag.StringVar(&o.dir, "dir", "", "an empty directory for files, state and logs; default: a new one, removed after a good run")
	flag.Parse()
	if flag.NArg() > 0 || o.duration < 2*time.Second {
		fmt.Fprintln(os.Stderr, "soak: the duration is at least 2s, and there are no other arguments")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	defer stop()
	os.Exit(command(ctx, o))
}

// prepare makes the paths absolute, and the directory if it has no name.
func (o *options) prepare() (err error) {
	if o.program != "" {
		if o.program, err = filepath.Abs(o.program); err != nil {
			return err
		}
	}
	if o.dir == "" {
		o.dir, err = os.MkdirTemp("", "soak-")
		return err
	}
	if o.dir, err = filepath.Abs(o.dir); err != nil {
		return err
	}
	left, err := os.ReadDir(o.dir)
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("%s is not empty", o.dir)
	}
	return err
}

// command runs the soak, prints its report and returns the exit code.
func command(ctx context.Context, o options) int {
	own := o.dir == ""
	if err := o.prepare(); err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		return 1
	}
	if o.program == "" {
		o.program = filepath.Join(o.dir, "iser-target")
		if out, err := exec.Command("go", "build", "-o", o.program, "./cmd/iser-target").CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "soak: go build: %v\n%s", err, out)
			return 1
		}
	}
	r, err := run(ctx, o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		return 1
	}
	fmt.Print(r.markdown())
	for _, f := range r.failures {
		fmt.Println("FAILED:", f)
	}
	if len(r.failures) > 0 {
		fmt.Printf("The log is %s; -seed %d repeats the plan.\n", filepath.Join(o.dir, "soak.log"), o.seed)
		return 1
	}
	if own {
		os.RemoveAll(o.dir)
	}
	return 0
}
