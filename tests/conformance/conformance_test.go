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
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	// go test must not take a result of another program for today's
	_ "github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/tests/conformance/cu"
	"github.com/iser-target/iser-target/tests/interop/harness"
)

const iqn = "iqn.2026-11.io.example:conformance"

var table = cu.Table{
	File:    "../../docs/conformance.md",
	Begin:   "<!-- begin of the table -->",
	End:     "<!-- end of the table -->",
	Command: "make conformance",
}

var update = flag.Bool("update", false, "write the table to "+table.File)

func TestMain(m *testing.M) {
	code := m.Run()
	harness.Cleanup()
	os.Exit(code)
}

// luns are the logical units for the tests, by what these need. The one of Huge
// is a target of its own: its test resets that, and takes so long that others run
// meanwhile. An empty memory LUN stays empty when zeros are written to it.
const luns = `
      - {id: 0, backend: memory, size: 100MiB, removable: true, sanitize: true}
      - {id: 1, backend: memory, size: 100MiB, read_only: true}
      - {id: 2, backend: file, path: %s, size: 100MiB}
      - {id: 3, backend: memory, size: 1GiB}
`

func TestSuite(t *testing.T) {
	need(t, cu.Program)
	target := func(luns string) string {
		d := harness.Config{
			Targets: "\n  - name: " + iqn + "\n    initiators: [\"*\"]\n    resets_for: [\"*\"]\n    luns:" + luns,
			// Sanitize.Reset sleeps for a minute, and answers no ping meanwhile.
			More: "limits: {nop_timeout: 5m}",
		}.Start(t)
		return fmt.Sprintf("iscsi://127.0.0.1:%d/%s/", d.Port, iqn)
	}
	url := target(fmt.Sprintf(luns, filepath.Join(t.TempDir(), "coarse")))
	devices := map[cu.Medium]string{
		cu.Plain:    url + "0",
		cu.ReadOnly: url + "1",
		cu.Coarse:   url + "2",
		cu.Large:    url + "3",
		cu.Huge:     target("\n      - {id: 0, backend: memory, size: 768GiB, sanitize: true}") + "0",
	}
	out, err := exec.Command(cu.Program, "-l").Output()
	if err != nil {
		t.Fatalf("%s -l: %v", cu.Program, err)
	}
	names, err := cu.Names(string(out))
	if err != nil {
		t.Fatal(err)
	}
	was, err := table.Read()
	if err != nil {
		t.Fatal(err)
	}

	var mu sync.Mutex
	got := make(map[string]cu.Outcome, len(names)) // guarded by mu
	try := func(name string) {
		c := cu.Of(name)
		o := run(c, devices[c.Medium])
		// Some tests depend on time, like PreventAllow.ITNexusLoss: it closes a
		// connection, and the target has to know before a command of another one.
		for tries := 1; was[name].Result == cu.Pass && o.Result != cu.Pass && tries < 4; tries++ {
			t.Logf("%s: %s: %s; once more", name, o.Result, o.Reason)
			o = run(c, devices[c.Medium])
		}
		mu.Lock()
		defer mu.Unlock()
		got[name] = o
	}
	var wg sync.WaitGroup
	for _, name := range names {
		if cu.Of(name).Medium == cu.Huge {
			wg.Go(func() { try(name) })
		}
	}
	for _, name := range names {
		if cu.Of(name).Medium != cu.Huge {
			try(name)
		}
	}
	wg.Wait()

	if *update {
		if err := table.Write(names, got); err != nil {
			t.Fatal(err)
		}
	}
	t.Log(cu.Summary(got))
	for _, name := range names {
		if o := got[name]; was[name].Result == cu.Pass && o.Result != cu.Pass {
			t.Errorf("%s passed before: now %s: %s", name, o.Result, o.Reason)
		} else if o.Result == cu.Hang {
			t.Errorf("%s hangs", name)
		}
	}
}

// run runs one test in a process of its own.
func run(c cu.Case, device string) cu.Outcome {
	ctx, cancel := context.WithTimeout(context.Background(), c.Limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, cu.Program, c.Args(device)...)
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return c.TimedOut()
	}
	o := c.Parse(string(out))
	if o.Result == cu.Fail && err != nil { // the exit code alone says less than the output
		o.Reason += fmt.Sprintf(" (%v)", err)
	}
	return o
}

// need skips, or where the tests are required fails, a test whose peer is not
// installed.
func need(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		backendtest.Unavailable(t, "%v: install libiscsi-bin, or run tests/interop/setup.sh", err)
	}
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
