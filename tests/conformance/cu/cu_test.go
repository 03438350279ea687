package cu

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	const head = "Suite: X\n  Test: Y ..."
	for _, tt := range []struct {
		name, output string
		want         Outcome
	}{
		{"X.Y", "\n" + head + "passed\n", Outcome{Pass, ""}},
		{"X.Y", "\n" + head + "    [SKIPPED] no such thing.  \npassed\n", Outcome{Skip, "no such thing."}},
		{"X.Y", "\n" + head + "    [FAILED] bad\nFAILED\n    1. x.c:1", Outcome{Fail, "bad"}},
		{"X.Y", "\n" + head + "FAILED\n    1. x.c:1", Outcome{Fail, ""}},
		{"X.Y", "\n" + head + "    [FAILED] bad\npassed\n", Outcome{Pass, ""}},
		{"X.Y", "[FAILED] to log in", Outcome{Fail, "0 verdicts, want 1: [FAILED] to log in"}},
		{"X.Y", "[SKIPPED] a\n" + head + "passed\n[SKIPPED] b", Outcome{Pass, ""}},
		{"iSCSITMF.LUNResetSimpleAsync", "\n" + head + "FAILED\n1. x\n" + head + "passed\n", Outcome{Pass, ""}},
		{"iSCSITMF.LUNResetSimpleAsync", "\n" + head + "passed\n1. x\n" + head + "FAILED\n", Outcome{Fail, ""}},
		{"iSCSITMF.LUNResetSimpleAsync", "\n" + head + "passed\n\n",
			Outcome{Fail, "1 verdicts, want 2:   Test: Y ...passed"}},
	} {
		if got := Of(tt.name).Parse(tt.output); got != tt.want {
			t.Errorf("%s %q: %+v, want %+v", tt.name, tt.output, got, tt.want)
		}
	}
}

func TestArgs(t *testing.T) {
	for name, want := range map[string]string{
		"Read10.Simple":                "-d -S -t ALL.Read10.Simple dev",
		"MultipathIO.Reset":            "-d -S -t ALL.MultipathIO.Reset dev dev",
		"iSCSITMF.LUNResetSimpleAsync": "-d -S -t *.iSCSITMF.LUNResetSimpleAsync dev",
	} {
		if got := strings.Join(Of(name).Args("dev"), " "); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
}

func TestTable(t *testing.T) {
	table := Table{File: filepath.Join(t.TempDir(), "d.md"), Begin: "<!-- b -->", End: "<!-- e -->", Command: "make it"}
	if err := os.WriteFile(table.File, []byte("a\n| Z.Z | pass |  |\n<!-- b -->\nold\n<!-- e -->\nz\n"),
		0o600); err != nil {
		t.Fatal(err)
	}
	got := map[string]Outcome{"ReadOnly.B": {Pass, ""}, "C.D": {Skip, "a | b"}}
	if err := table.Write([]string{"C.D", "ReadOnly.B"}, got); err != nil {
		t.Fatal(err)
	}
	b, _ := os.ReadFile(table.File)
	for _, want := range []string{"a\n| Z.Z | pass |  |\n<!-- b -->\n2 tests: 1 pass, 0 fail, 1 skip, 0 hang, on ",
		" by `make it`.\n", "| C.D | skip |  | a / b |\n| ReadOnly.B | pass | read-only |  |\n<!-- e -->\nz\n"} {
		if !strings.Contains(string(b), want) {
			t.Errorf("%q is not in\n%s", want, b)
		}
	}
	was, err := table.Read()
	if err != nil || !maps.Equal(was, map[string]Outcome{"ReadOnly.B": {Pass, ""}, "C.D": {Skip, "a / b"}}) {
		t.Errorf("%v, %v", was, err)
	}
	table.End = "<!-- x -->"
	if _, err := table.Read(); err == nil {
		t.Error("a table without end was read")
	}
}

func TestNames(t *testing.T) {
	var list strings.Builder
	for range 200 {
		list.WriteString("ALL.A.B\n")
	}
	if names, err := Names("ALL\nALL.A\n" + list.String() + "iSCSI.A.B\n"); err != nil || len(names) != 200 ||
		names[0] != "A.B" {
		t.Errorf("%v, %v", names, err)
	}
	if _, err := Names("ALL.A.B\n"); err == nil {
		t.Error("a list of one test was taken")
	}
}
