package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/tests/interop/harness"
	"github.com/iser-target/iser-target/tests/testkit"
)

func TestMain(m *testing.M) {
	code := m.Run()
	harness.Cleanup()
	os.Exit(code)
}

// soak runs a soak. Other tests use the machine, too, so latencies only have the bound of all tests.
func soak(t *testing.T, d time.Duration, edit func(*options)) *report {
	t.Helper()
	o := options{duration: d, seed: 7, dir: t.TempDir(), bounds: slices.Clone(bounds), progress: io.Discard, settle: 30 * time.Second}
	o.program = filepath.Join(o.dir, "iser-target")
	harness.Copy(t, o.program)
	for i := range o.bounds {
		if o.bounds[i].unit == "ms" {
			o.bounds[i].max = testkit.Patience.Seconds() * 1000
		}
	}
	if edit != nil {
		edit(&o)
	}
	r, err := run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s%s", r.markdown(), strings.Join(r.failures, "\n"))
	return r
}

// A short run passes, and has had each disturbance.
func TestSoak(t *testing.T) {
	r := soak(t, 20*time.Second, nil)
	for _, f := range r.failures {
		t.Error(f)
	}
	for _, k := range []string{"kill -9", "upgrade", "hanging store", "reset"} {
		if r.done[k] == 0 {
			t.Errorf("the run had no %s", k)
		}
	}
	if r.count.medium.Load() == 0 || r.count.lost.Load() == 0 {
		t.Errorf("%d failures of stores, %d sessions lost: the disturbances had no effect", r.count.medium.Load(), r.count.lost.Load())
	}
}

// A file that changes under its LUN is found: without checksums by the data, with checksums by the sense.
func TestSoakFindsCorruption(t *testing.T) {
	for _, tt := range []struct{ file, want string }{
		{"plain.img", "returns other data"},
		{"checked.img", "status 0x2, sense f0 00 03"},
	} {
		t.Run(tt.file, func(t *testing.T) {
			r := soak(t, 3*time.Second, func(o *options) {
				o.settle = 0
				path := filepath.Join(o.dir, tt.file)
				o.halfway = func() {
					f, err := os.OpenFile(path, os.O_WRONLY, 0)
					if err != nil {
						t.Error(err)
						return
					}
					defer f.Close()
					if _, err := f.WriteAt(bytes.Repeat([]byte{0xee}, 8<<20), 0); err != nil {
						t.Error(err)
					}
				}
			})
			if !strings.Contains(strings.Join(r.failures, "\n"), tt.want) {
				t.Errorf("failures %q, want one with %q", r.failures, tt.want)
			}
		})
	}
}

// Each bound is one that a run reports when it is exceeded.
func TestSoakFindsBounds(t *testing.T) {
	r := soak(t, 4*time.Second, func(o *options) {
		o.settle = 0
		for i := range o.bounds {
			o.bounds[i].max = -1000
		}
	})
	for _, b := range bounds {
		if !strings.Contains(strings.Join(r.failures, "\n"), `bound "`+b.name+`"`) {
			t.Errorf("failures %q, want one of the bound %q", r.failures, b.name)
		}
	}
}

// The document has each bound.
func TestDocument(t *testing.T) {
	text, err := os.ReadFile("../../docs/soak.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range bounds {
		row := fmt.Sprintf("| %s | %s | %s |\n", b.name, strings.TrimSpace(fmt.Sprintf("%g %s", b.max, b.unit)), b.reason)
		if !strings.Contains(string(text), row) {
			t.Errorf("docs/soak.md does not have the row\n%s", row)
		}
	}
}

// A plan depends on the seed only, has each kind, and replaces no process at its end.
func TestPlan(t *testing.T) {
	a, b, c := newPlan(1, time.Minute), newPlan(1, time.Minute), newPlan(2, time.Minute)
	if !slices.Equal(a, b) || slices.Equal(a, c) {
		t.Error("the plan does not depend on the seed, or not only on it")
	}
	seen := map[int]bool{}
	for _, p := range a {
		if seen[p.kind] = true; kinds[p.kind].replaces && p.at > 40*time.Second {
			t.Errorf("%s after %v", kinds[p.kind].name, p.at)
		}
	}
	if len(seen) != len(kinds) {
		t.Errorf("%d kinds are planned, want %d", len(seen), len(kinds))
	}
}
