package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
)

// systemd accepts the units, and rates the exposure of the service as low.
func TestUnitsAreValidAndRestricted(t *testing.T) {
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		backendtest.Unavailable(t, "%v (tests/interop/setup.sh installs it)", err)
	}
	dir := t.TempDir()
	var units []string
	for _, name := range []string{"iser-target.service", "iser-target.socket"} {
		b, err := os.ReadFile(filepath.Join("../../packaging/systemd", name))
		if err != nil {
			t.Fatal(err)
		}
		// systemd-analyze requires that the program exists.
		text := strings.ReplaceAll(string(b), "/usr/bin/iser-target", executable(t))
		units = append(units, filepath.Join(dir, name))
		if err := os.WriteFile(units[len(units)-1], []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command(analyze, append([]string{"verify", "--man=no"}, units...)...).CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
	// The rest is IP addresses, AF_UNIX and /proc/sys.
	if out, err := exec.Command(analyze, "security", "--offline=true", "--threshold=15", units[0]).CombinedOutput(); err != nil {
		t.Errorf("systemd-analyze security: %v\n%s", err, out)
	}
}

// systemd starts a target that has crashed at once, and as often as it crashes: initiators wait for it.
func TestUnitRestartsWithoutLimit(t *testing.T) {
	b, err := os.ReadFile("../../packaging/systemd/iser-target.service")
	if err != nil {
		t.Fatal(err)
	}
	keys := map[string]string{}
	for line := range strings.Lines(string(b)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok && !strings.HasPrefix(key, "#") {
			keys[key] = value
		}
	}
	if keys["Restart"] != "on-failure" || keys["StartLimitIntervalSec"] != "0" || keys["StartLimitBurst"] != "" {
		t.Errorf("Restart=%s, StartLimitIntervalSec=%s, StartLimitBurst=%s", keys["Restart"], keys["StartLimitIntervalSec"], keys["StartLimitBurst"])
	}
	if wait, err := time.ParseDuration(keys["RestartSec"]); err != nil || wait > 500*time.Millisecond {
		t.Errorf("RestartSec=%s, want 500ms at most", keys["RestartSec"])
	}
}
