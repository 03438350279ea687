// Package cu knows libiscsi's conformance suite, iscsi-test-cu: which tests it
// has, what each needs, and what its output means. It runs nothing.
package cu

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Program is the name of the suite.
const Program = "iscsi-test-cu"

// A Medium is what a test has to be given to say more than "skipped".
type Medium string

const (
	Plain    Medium = ""          // removable, and may be sanitized
	ReadOnly Medium = "read-only" // nothing can be written
	Coarse   Medium = "coarse"    // physical blocks of several logical ones; thin
	Large    Medium = "large"     // longer than MAXIMUM WRITE SAME LENGTH
	Huge     Medium = "huge"      // SANITIZE OVERWRITE with zeros takes 5 s at least; thin
)

// A Case is how to run one test.
type Case struct {
	Name   string // SUITE.TEST
	Medium Medium
	Paths  int           // how many devices, all with the same logical unit
	Limit  time.Duration // what takes longer hangs
	// Twice: in one process, of which the second time counts.
	Twice bool
}

// special are the tests that need something of their own.
var special = map[string]Case{
	"CompareAndWrite.InvalidDataOutSize": {Medium: Coarse},
	"WriteSame10.InvalidDataOutSize":     {Medium: Coarse},
	"WriteSame10.UnmapUnaligned":         {Medium: Coarse},
	"WriteSame16.InvalidDataOutSize":     {Medium: Coarse},
	"WriteSame16.UnmapUnaligned":         {Medium: Coarse},
	// Where a WRITE SAME of 0 blocks is served, this sends one with UNMAP and a
	// block of FFh bytes, and expects to read zeros. That for (16) sends zeros.
	"WriteSame10.UnmapUntilEnd": {Medium: Large},
	// Looks at the SANITIZE after 3 s and after 4 s, and then once in a minute
	// whether it has ended.
	"Sanitize.Reset": {Medium: Huge, Limit: 4 * time.Minute},
	// Of libiscsi 1.19 this asserts a static variable that the callback of its
	// task management function sets, before it waits for that. The first time,
	// the callback runs when the test logs out; the second time the variable is
	// set, and the test continues with its subject. Upstream's commit 5553d6b
	// moved the assertion.
	"iSCSITMF.LUNResetSimpleAsync": {Twice: true},
}

// Of returns how to run the test of that name.
func Of(name string) Case {
	c := special[name]
	c.Name = name
	c.Paths = 1
	if strings.HasPrefix(name, "ReadOnly.") {
		c.Medium = ReadOnly
	}
	if strings.HasPrefix(name, "Multipath") {
		c.Paths = 2
	}
	if c.Limit == 0 {
		c.Limit = time.Minute
	}
	return c
}

// Args returns the arguments of Program for a test on a device: an iSCSI URL or a device file.
func (c Case) Args(device string) []string {
	family := "ALL"
	if c.Twice {
		family = "*" // it is in two families
	}
	return append([]string{"-d", "-S", "-t", family + "." + c.Name}, slices.Repeat([]string{device}, c.Paths)...)
}

// Names returns the names of all tests, SUITE.TEST, from the output of Program -l.
func Names(list string) (names []string, err error) {
	for line := range strings.Lines(list) {
		if f := strings.Split(strings.TrimSpace(line), "."); len(f) == 3 && f[0] == "ALL" {
			names = append(names, f[1]+"."+f[2])
		}
	}
	if len(names) < 200 {
		return nil, fmt.Errorf("%s lists only %d tests", Program, len(names))
	}
	return names, nil
}

// What can become of a test.
const (
	Pass = "pass"
	Fail = "fail"
	Skip = "skip"
	Hang = "hang"
)

// An Outcome is what became of a test.
type Outcome struct {
	Result string
	Reason string
}

// verdict is what CUnit prints of a test: what the test said, and the word.
// Before and after it the suite speaks of clearing reservations.
var verdict = regexp.MustCompile(`(?s)\n  Test: \S+ \.\.\.(.*?)(passed|FAILED)`)

// remark is a line of a test about what it could not do, or what was wrong.
var remark = regexp.MustCompile(`\[(SKIPPED|WRONG)\] (.*)`)

// Parse returns the outcome of a test that ended with this output.
func (c Case) Parse(output string) Outcome {
	all := verdict.FindAllStringSubmatch(strings.ReplaceAll(output, "[FAILED]", "[WRONG]"), -1)
	want := 1
	if c.Twice {
		want = 2
	}
	if len(all) != want {
		lines := strings.Split(strings.TrimSpace(output), "\n")
		return Outcome{Fail, fmt.Sprintf("%d verdicts, want %d: %s", len(all), want, lines[len(lines)-1])}
	}
	m := all[want-1]
	reason := ""
	said := remark.FindStringSubmatch(m[1])
	if said != nil {
		reason = strings.TrimSpace(said[2])
	}
	switch {
	case m[2] == "FAILED":
		return Outcome{Fail, reason}
	case said != nil && said[1] == "SKIPPED":
		return Outcome{Skip, reason}
	}
	return Outcome{Pass, ""}
}

// TimedOut returns the outcome of a test that did not end in time.
func (c Case) TimedOut() Outcome { return Outcome{Hang, fmt.Sprintf("no end within %v", c.Limit)} }

// Summary counts the outcomes.
func Summary(got map[string]Outcome) string {
	n := map[string]int{}
	for _, o := range got {
		n[o.Result]++
	}
	return fmt.Sprintf("%d tests: %d pass, %d fail, %d skip, %d hang", len(got), n[Pass], n[Fail], n[Skip], n[Hang])
}

// A Table is a table of outcomes in a document, between two marks that are lines
// of their own. Command is what printed it.
type Table struct {
	File, Begin, End string
	Command          string
}

// Write replaces the table: the tests in their order, today's.
func (t Table) Write(names []string, got map[string]Outcome) error {
	b, err := os.ReadFile(t.File)
	if err != nil {
		return err
	}
	head, _, tail, err := t.cut(string(b))
	if err != nil {
		return err
	}
	var text strings.Builder
	fmt.Fprintf(&text, "%s, on %s by `%s`.\n\n| test | result | LUN | reason |\n|---|---|---|---|\n", Summary(got),
		time.Now().Format(time.DateOnly), t.Command)
	for _, name := range names {
		o := got[name]
		fmt.Fprintf(&text, "| %s | %s | %s | %s |\n", name, o.Result, Of(name).Medium,
			strings.ReplaceAll(o.Reason, "|", "/"))
	}
	return os.WriteFile(filepath.Clean(t.File), []byte(head+text.String()+tail), 0o644)
}

// cut parts a document in what ends with the line of Begin, the table, and what
// starts with the line of End.
func (t Table) cut(text string) (head, table, tail string, err error) {
	begin, end := t.Begin+"\n", t.End+"\n"
	i := strings.Index(text, begin)
	if i < 0 {
		return "", "", "", fmt.Errorf("%s has no line %s", t.File, t.Begin)
	}
	i += len(begin)
	n := strings.Index(text[i:], end)
	if n < 0 {
		return "", "", "", fmt.Errorf("%s has no line %s after %s", t.File, t.End, t.Begin)
	}
	return text[:i], text[i : i+n], text[i+n:], nil
}

// Read returns what is in the table.
func (t Table) Read() (map[string]Outcome, error) {
	b, err := os.ReadFile(t.File)
	if err != nil {
		return nil, err
	}
	_, table, _, err := t.cut(string(b))
	if err != nil {
		return nil, err
	}
	was := map[string]Outcome{}
	for line := range strings.Lines(table) {
		f := strings.Split(strings.TrimSuffix(line, " |\n"), " | ")
		if len(f) == 4 && slices.Contains([]string{Pass, Fail, Skip, Hang}, f[1]) {
			was[strings.TrimPrefix(f[0], "| ")] = Outcome{f[1], strings.TrimSpace(f[3])}
		}
	}
	if len(was) == 0 {
		return nil, fmt.Errorf("%s has no results", t.File)
	}
	return was, nil
}
