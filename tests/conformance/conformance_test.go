// Package conformance runs libiscsi's conformance suite, iscsi-test-cu, against
// the target, one test in a process, and compares the outcome with the table in
// docs/conformance.md: a test that passed must not stop passing.
package conformance

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
)

const (
	suite   = "iscsi-test-cu"
	limit   = 60 * time.Second // for one test
	results = "../../docs/conformance.md"
	iqn     = "iqn.2026-11.io.example:conformance"
)

var update = flag.Bool("update", false, "write the table to "+results)

func TestMain(m *testing.M) {
	code := m.Run()
	harness.Cleanup()
	os.Exit(code)
}

// An outcome is what became of one test.
type outcome struct {
	result string // pass, fail, skip or hang
	reason string
}

func TestSuite(t *testing.T) {
	need(t, suite)
	d := harness.Start(t, `
  - name: `+iqn+`
    initiators: ["*"]
    luns:
      - {id: 0, backend: memory, size: 100MiB, removable: true, sanitize: true}
      - {id: 1, backend: memory, size: 100MiB, read_only: true}
`)
	url := fmt.Sprintf("iscsi://127.0.0.1:%d/%s/", d.Port, iqn)
	tests := list(t)
	was := read(t, results)
	got := make(map[string]outcome, len(tests))
	for _, name := range tests {
		got[name] = run(name, url)
		if o := got[name]; was[name] == "pass" && o.result != "pass" {
			t.Logf("%s: %s: %s; once more", name, o.result, o.reason) // some tests depend on time
			got[name] = run(name, url)
		}
	}
	text := table(tests, got)
	if *update {
		if err := write(results, text); err != nil {
			t.Fatal(err)
		}
	}
	t.Log(summary(got))
	for _, name := range tests {
		if o := got[name]; was[name] == "pass" && o.result != "pass" {
			t.Errorf("%s passed before: now %s: %s", name, o.result, o.reason)
		} else if o.result == "hang" {
			t.Errorf("%s hangs", name)
		}
	}
}

// need skips, or where the tests are required fails, a test whose peer is not
// installed.
func need(t *testing.T, program string) {
	t.Helper()
	_, err := exec.LookPath(program)
	switch {
	case err == nil:
	case os.Getenv("ISER_TARGET_REQUIRE_INTEROP") == "1":
		t.Fatalf("%v: install libiscsi-bin, or run tests/interop/setup.sh", err)
	default:
		t.Skipf("%v: install libiscsi-bin, or run tests/interop/setup.sh", err)
	}
}

// list returns the names of all tests, SUITE.TEST.
func list(t *testing.T) (names []string) {
	out, err := exec.Command(suite, "-l").Output()
	if err != nil {
		t.Fatalf("%s -l: %v", suite, err)
	}
	for line := range strings.Lines(string(out)) {
		if f := strings.Split(strings.TrimSpace(line), "."); len(f) == 3 && f[0] == "ALL" {
			names = append(names, f[1]+"."+f[2])
		}
	}
	if len(names) < 200 {
		t.Fatalf("%s lists only %d tests", suite, len(names))
	}
	return names
}

// verdict is what CUnit prints of a test: what the test said, and the word.
// Before and after it the suite speaks of clearing reservations.
var verdict = regexp.MustCompile(`(?s)\n  Test: \S+ \.\.\.(.*?)(passed|FAILED)`)

// remark is a line of a test about what it could not do, or what was wrong.
var remark = regexp.MustCompile(`\[(SKIPPED|WRONG)\] (.*)`)

// run runs one test in a process of its own, against the LUN that it is about;
// those of several paths get the same LUN by a second session.
func run(name, url string) outcome {
	args := []string{"-d", "-S", "-t", "ALL." + name}
	switch {
	case strings.HasPrefix(name, "ReadOnly."):
		args = append(args, url+"1")
	case strings.HasPrefix(name, "Multipath"):
		args = append(args, url+"0", url+"0")
	default:
		args = append(args, url+"0")
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, suite, args...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return outcome{"hang", fmt.Sprintf("no end within %v", limit)}
	}
	m := verdict.FindStringSubmatch(strings.ReplaceAll(string(out), "[FAILED]", "[WRONG]"))
	if m == nil {
		return outcome{"fail", fmt.Sprintf("no verdict: %v", err)}
	}
	reason := ""
	said := remark.FindStringSubmatch(m[1])
	if said != nil {
		reason = strings.TrimSpace(said[2])
	}
	switch {
	case m[2] == "FAILED":
		return outcome{"fail", reason}
	case said != nil && said[1] == "SKIPPED":
		return outcome{"skip", reason}
	}
	return outcome{"pass", ""}
}

func summary(got map[string]outcome) string {
	n := map[string]int{}
	for _, o := range got {
		n[o.result]++
	}
	return fmt.Sprintf("%d tests: %d pass, %d fail, %d skip, %d hang", len(got), n["pass"], n["fail"], n["skip"], n["hang"])
}

// table is the text for docs/conformance.md between its marks.
func table(tests []string, got map[string]outcome) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, on %s by `make conformance`.\n\n| test | result | reason |\n|---|---|---|\n", summary(got), time.Now().Format(time.DateOnly))
	for _, name := range tests {
		o := got[name]
		fmt.Fprintf(&b, "| %s | %s | %s |\n", name, o.result, strings.ReplaceAll(o.reason, "|", "/"))
	}
	return b.String()
}

const (
	begin = "<!-- begin of the table -->\n"
	end   = "<!-- end of the table -->\n"
)

// write replaces the table in a file.
func write(file, text string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	head, rest, ok := strings.Cut(string(b), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		return fmt.Errorf("%s has no marks for the table", file)
	}
	return os.WriteFile(filepath.Clean(file), []byte(head+begin+text+end+tail), 0o644)
}

// read returns the results in the table of a file.
func read(t *testing.T, file string) map[string]string {
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	was := map[string]string{}
	for line := range strings.Lines(string(b)) {
		f := strings.Split(line, " | ")
		if len(f) >= 2 && slices.Contains([]string{"pass", "fail", "skip", "hang"}, f[1]) {
			was[strings.TrimPrefix(f[0], "| ")] = f[1]
		}
	}
	if len(was) == 0 {
		t.Fatalf("%s has no results", file)
	}
	return was
}

// libiscsi proves who it is by CHAP, or is refused.
func TestCHAP(t *testing.T) {
	need(t, "iscsi-inq")
	d := harness.Start(t, `
  - name: `+iqn+`
    initiators: ["*"]
    auth: {method: chap, users: [{name: ini, secret: "0123456789abcdef"}]}
    luns:
      - {id: 0, backend: memory, size: 1MiB}
`)
	for _, tt := range []struct{ who, want string }{
		{"ini%0123456789abcdef@", "Peripheral Device Type:DIRECT_ACCESS"},
		{"ini%0123456789abcdeX@", "Authentication failure"},
		{"other%0123456789abcdef@", "Authentication failure"},
		{"", "Authentication failure"},
	} {
		cmd := exec.Command("iscsi-inq", fmt.Sprintf("iscsi://%s127.0.0.1:%d/%s/0", tt.who, d.Port, iqn))
		if out, err := cmd.CombinedOutput(); !strings.Contains(string(out), tt.want) {
			t.Errorf("%v: %v, output\n%s\nwant %q in it", cmd, err, out, tt.want)
		}
	}
}
