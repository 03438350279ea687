package harness

import (
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Reload replaces old by new in the configuration, and has the target read it
// again by SIGHUP.
func (d *Target) Reload(t testing.TB, old, new string) {
	t.Helper()
	b, err := os.ReadFile(d.config)
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(string(b), old, new, 1)
	if text == string(b) {
		t.Fatalf("the configuration has no %q", old)
	}
	if err := os.WriteFile(d.config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	const done = "configuration file was applied"
	before := strings.Count(d.Log(), done)
	if err := d.run.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(startLimit); strings.Count(d.Log(), done) == before; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("SIGHUP has no effect within %v", startLimit)
		}
	}
}
