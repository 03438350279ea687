package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/security/limits"
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

// unitKeys returns the keys of the service, each with its last value.
func unitKeys(t *testing.T) map[string]string {
	t.Helper()
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
	return keys
}

// The unit bounds memory and threads, and the bounds fit the limits of the configuration: no number of stores that
// hang takes the last thread, and the default of limits.memory leaves room for the rest of the process.
func TestUnitBoundsFitTheLimits(t *testing.T) {
	keys := unitKeys(t)
	share := func(key string) int {
		n, err := strconv.Atoi(strings.TrimSuffix(keys[key], "%"))
		if err != nil || !strings.HasSuffix(keys[key], "%") {
			t.Fatalf("%s=%s, want a share of the memory", key, keys[key])
		}
		return n
	}
	if high, most := share("MemoryHigh"), share("MemoryMax"); high >= most || most > 90 || high < 50 {
		t.Errorf("MemoryHigh=%d%%, MemoryMax=%d%%", high, most)
	}
	// The heap ends at 90 % of MemoryHigh, see limitHeap, and what initiators use at a quarter.
	const gib = 1 << 30
	m := limits.ReadMachine(fstest.MapFS{
		"proc/meminfo":        {Data: []byte("MemTotal: 16777216 kB\n")},
		"proc/self/cgroup":    {Data: []byte("0::/system.slice/iser-target.service\n")},
		"proc/self/mountinfo": {Data: []byte("30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")},
		"sys/fs/cgroup/system.slice/iser-target.service/memory.high": {Data: []byte(strconv.Itoa(16 * gib / 100 * share("MemoryHigh")))},
		"sys/fs/cgroup/system.slice/iser-target.service/memory.max":  {Data: []byte(strconv.Itoa(16 * gib / 100 * share("MemoryMax")))},
		"sys/fs/cgroup/system.slice/iser-target.service/pids.max":    {Data: []byte(keys["TasksMax"])},
	}, limits.Rlimits{}, 4)
	if !strings.Contains(m.Memory.From, "memory.high") || m.Memory.N != 16*gib/100*int64(share("MemoryHigh")) {
		t.Errorf("memory: %+v", m.Memory)
	}
	// backend_calls has 4096 at most; see neededThreads in package daemon.
	if need := int64(2*4096 + 8000); m.Threads.N < need {
		t.Errorf("TasksMax=%d, want %d at least", m.Threads.N, need)
	}
	if files, _ := strconv.Atoi(keys["LimitNOFILE"]); files < 16384+1024+64 { // LUNs, connections, the rest
		t.Errorf("LimitNOFILE=%s", keys["LimitNOFILE"])
	}
}

// systemd starts a target that has crashed at once, and as often as it crashes: initiators wait for it.
func TestUnitRestartsWithoutLimit(t *testing.T) {
	keys := unitKeys(t)
	if keys["Restart"] != "on-failure" || keys["StartLimitIntervalSec"] != "0" || keys["StartLimitBurst"] != "" {
		t.Errorf("Restart=%s, StartLimitIntervalSec=%s, StartLimitBurst=%s", keys["Restart"], keys["StartLimitIntervalSec"], keys["StartLimitBurst"])
	}
	if wait, err := time.ParseDuration(keys["RestartSec"]); err != nil || wait > 500*time.Millisecond {
		t.Errorf("RestartSec=%s, want 500ms at most", keys["RestartSec"])
	}
}
