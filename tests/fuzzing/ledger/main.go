// Ledger adds the executions of a fuzz run to the table of docs/fuzzing.md.
//
//	make fuzz FUZZTIME=10m | tee fuzz.log
//	go run ./tests/fuzzing/ledger docs/fuzzing.md <fuzz.log
package main

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: ledger DOCUMENT <LOG, in the directory of go.mod")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "ledger:", err)
		os.Exit(1)
	}
}

// run adds the executions of the log to the table of the document at file. The targets are those of the tree
// in the working directory.
func run(file string, log io.Reader) error {
	targets, err := targetsOf(".")
	if err != nil {
		return err
	}
	ran, err := executions(log)
	if err != nil {
		return err
	}
	document, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	next, err := add(string(document), targets, ran)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return os.WriteFile(file, []byte(next), 0o644)
}

// A target is a fuzz target.
type target struct{ pkg, name string } // pkg is a directory, like iscsi/tcp

// gone has the executions of targets that the tree does not have any longer.
var gone = target{"", "targets of the past"}

var declared = regexp.MustCompile(`(?m)^func (Fuzz[A-Za-z0-9_]*)\(`)

// targetsOf returns the fuzz targets below dir, ascending.
func targetsOf(dir string) (list []target, err error) {
	err = filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && file != dir && strings.HasPrefix(d.Name(), "."):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(file, "_test.go"):
			return nil
		}
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		local, err := filepath.Rel(dir, file)
		for _, m := range declared.FindAllStringSubmatch(string(b), -1) {
			list = append(list, target{path.Dir(filepath.ToSlash(local)), m[1]})
		}
		return err
	})
	slices.SortFunc(list, func(a, b target) int { return cmp.Or(strings.Compare(a.pkg, b.pkg), strings.Compare(a.name, b.name)) })
	return list, err
}

var (
	heading  = regexp.MustCompile(`^== \./(\S+) (Fuzz\S+)$`)
	progress = regexp.MustCompile(`^(fuzz|blind): elapsed: \S+ execs: (\d+) `)
)

// A count is how often a target ran.
type count struct{ guided, blind int64 }

func (c *count) add(o count) {
	c.guided += o.guided
	c.blind += o.blind
}

// executions returns how often each target ran, from what .ci/fuzz and make fuzz-blind print.
func executions(log io.Reader) (map[target]count, error) {
	ran := map[target]count{}
	var now target
	lines := bufio.NewScanner(log)
	for lines.Scan() {
		if m := heading.FindStringSubmatch(lines.Text()); m != nil {
			now = target{m[1], m[2]}
		} else if m := progress.FindStringSubmatch(strings.ReplaceAll(lines.Text(), ",", "")); m != nil && now != (target{}) {
			n, err := strconv.ParseInt(m[2], 10, 64)
			if err != nil {
				return nil, err
			}
			c := ran[now]
			if m[1] == "blind" {
				c.blind = n
			} else {
				c.guided = max(c.guided, n) // the count goes up during a run
			}
			ran[now] = c
		}
	}
	if len(ran) == 0 && lines.Err() == nil {
		return nil, fmt.Errorf("the log has no run of a fuzz target")
	}
	return ran, lines.Err()
}

const (
	tableBegin = "| package | target | guided | blind |\n|---|---|---|---|\n"
	totalRow   = "| | **all: %s** | **%s** | **%s** |\n"
)

var row = regexp.MustCompile(`^\| (\S*) ?\| ([^|*]+) \| ([0-9 ]+) \| ([0-9 ]+) \|$`)

// add returns the document with ran added to its table, whose rows are those of the targets.
func add(document string, targets []target, ran map[target]count) (string, error) {
	before, rest, found := strings.Cut(document, tableBegin)
	if !found {
		return "", fmt.Errorf("the table of executions is missing")
	}
	sum := map[target]count{}
	plus := func(t target, c count) {
		s := sum[t]
		s.add(c)
		sum[t] = s
	}
	for {
		line, after, _ := strings.Cut(rest, "\n")
		if !strings.HasPrefix(line, "|") {
			break
		}
		rest = after
		m := row.FindStringSubmatch(line)
		if m == nil {
			continue // the total
		}
		guided, err := ungrouped(m[3])
		if err != nil {
			return "", err
		}
		blind, err := ungrouped(m[4])
		if err != nil {
			return "", err
		}
		plus(target{strings.Trim(m[1], "`"), strings.Trim(m[2], "`")}, count{guided, blind})
	}
	for t, c := range ran {
		plus(t, c)
	}
	past := count{}
	for t, c := range sum {
		if !slices.Contains(targets, t) {
			past.add(c)
		}
	}
	var b strings.Builder
	b.WriteString(before + tableBegin)
	total := past
	for _, t := range targets {
		c := sum[t]
		fmt.Fprintf(&b, "| `%s` | `%s` | %s | %s |\n", t.pkg, t.name, grouped(c.guided), grouped(c.blind))
		total.add(c)
	}
	if past != (count{}) {
		fmt.Fprintf(&b, "| | %s | %s | %s |\n", gone.name, grouped(past.guided), grouped(past.blind))
	}
	fmt.Fprintf(&b, totalRow, grouped(total.guided+total.blind), grouped(total.guided), grouped(total.blind))
	return b.String() + rest, nil
}

// ungrouped returns the number that grouped has written.
func ungrouped(s string) (int64, error) {
	return strconv.ParseInt(strings.ReplaceAll(s, " ", ""), 10, 64)
}

// grouped returns n with spaces between groups of three digits.
func grouped(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + " " + s[i:]
	}
	return s
}
