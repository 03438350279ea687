package harness

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Try runs the program with a command line that manages d, and returns what it
// printed and its exit code.
func (d *Target) Try(t testing.TB, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	begun := time.Now()
	stdout, stderr, code = d.try(t, args)
	t.Logf("iser-target %s: exit code %d after %v\n%s%s", strings.Join(args, " "), code,
		time.Since(begun).Round(time.Millisecond), stdout, stderr)
	return stdout, stderr, code
}

func (d *Target) try(t testing.TB, args []string) (stdout, stderr string, code int) {
	t.Helper()
	name, err := build()
	if err != nil {
		t.Fatal(err)
	}
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(t.Context(), name, args...)
	cmd.Env = environment("ISER_TARGET_CONTROL_SOCKET=" + d.socket)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

// Manage runs the program as Try does, and fails t unless the exit code is 0.
func (d *Target) Manage(t testing.TB, args ...string) (stdout string) {
	t.Helper()
	stdout, _, code := d.Try(t, args...)
	if code != 0 {
		t.Fatalf("iser-target %s has failed", strings.Join(args, " "))
	}
	return stdout
}

// Ask returns the answer, by -o json, to a command line that manages d.
func Ask[T any](t testing.TB, d *Target, args ...string) (v T) {
	t.Helper()
	stdout, stderr, code := d.try(t, append(args, "-o", "json"))
	if err := json.Unmarshal([]byte(stdout), &v); err != nil || code != 0 {
		t.Fatalf("iser-target %s: exit code %d, %v\n%s%s", strings.Join(args, " "), code, err, stdout, stderr)
	}
	return v
}

// ConfigFile returns the name of the configuration file.
func (d *Target) ConfigFile() string { return d.config }

// Metrics returns the samples of the metrics endpoint by their series: name,
// and labels in alphabetical order, as in a{b="c",d="e"}.
func (d *Target) Metrics(t testing.TB) map[string]float64 {
	t.Helper()
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", d.metrics))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("GET %v: %s, %v", resp.Request.URL, resp.Status, err)
	}
	samples := make(map[string]float64)
	for line := range strings.Lines(string(text)) {
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || line[0] == '#' {
			continue
		}
		n, err := strconv.ParseFloat(strings.TrimSpace(line[i:]), 64)
		if err != nil {
			t.Fatalf("metrics: %q: %v", line, err)
		}
		samples[line[:i]] = n
	}
	return samples
}
