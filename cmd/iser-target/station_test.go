package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

const (
	storeName = "iqn.2026-11.io.example:store"
	hostName  = "iqn.2026-11.io.example:host"
)

// A station is a target in a process of its own, with the paths that its commands need.
type station struct {
	*process
	dir, file, socket string
	env               []string // more than this process has
}

// newStation starts a target with one memory LUN. edits change its configuration before.
func newStation(t *testing.T, edits ...func(string) string) *station {
	t.Helper()
	s := &station{dir: t.TempDir()}
	s.configure(t, edits...)
	if testkit.Race { // see run
		s.environment(t)
	}
	s.process = start(t, "serve", "--config", s.file)
	return s
}

// configure writes the configuration. edits change it before.
func (s *station) configure(t *testing.T, edits ...func(string) string) {
	t.Helper()
	s.file, s.socket = filepath.Join(s.dir, "c.yaml"), filepath.Join(s.dir, "s")
	text := fmt.Sprintf(`# of a test
state_dir: %s/state
control: {socket: %s}
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: %s # the first
    initiators: ["*"]
    luns: [{id: 0, backend: memory, size: 1MiB}]
`, s.dir, s.socket, storeName)
	for _, edit := range edits {
		text = edit(text)
	}
	if err := os.WriteFile(s.file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// command returns a command line for s, to run in a process of its own.
func (s *station) command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe, args...)
	cmd.Dir = s.dir
	cmd.Env = append(os.Environ(), "BE_ISER_TARGET=1", "ISER_TARGET_CONTROL_SOCKET="+s.socket)
	return cmd
}

// environment gives this process the environment of command.
func (s *station) environment(t *testing.T) {
	t.Helper()
	t.Setenv("ISER_TARGET_CONTROL_SOCKET", s.socket)
	t.Chdir(s.dir)
}

// run runs a command line and returns its outputs and exit code. With the race detector,
// with which a process takes a second to start, it runs the command in this process.
func (s *station) run(t *testing.T, args ...string) (out, errOut string, code int) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	if testkit.Race {
		const name = "ISER_TARGET_CONTROL_SOCKET"
		if os.Getenv(name) != s.socket { // the last station to start has set its own; Setenv is for one goroutine at a time
			t.Setenv(name, s.socket)
		}
		root := rootCommand(&stdout, &stderr)
		root.SetArgs(args)
		code = cli.Report(&stderr, root.ExecuteContext(t.Context()))
		return stdout.String(), stderr.String(), code
	}
	cmd := s.command(t, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	var exit *exec.ExitError
	if err := cmd.Run(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()
}

// ok runs a command line that must succeed, and returns its output.
func (s *station) ok(t *testing.T, args ...string) string {
	t.Helper()
	out, errOut, code := s.run(t, args...)
	if code != cli.ExitOK {
		t.Fatalf("%v: exit code %d\n%s%s", args, code, out, errOut)
	}
	return out
}

// says runs a command line and checks its exit code, and that one of its outputs contains
// want. It returns them.
func (s *station) says(t *testing.T, code int, want string, args ...string) string {
	t.Helper()
	out, errOut, got := s.run(t, args...)
	if got != code || !strings.Contains(out+errOut, want) {
		t.Errorf("%v: exit code %d, want %d with %q in\n%s%s", args, got, code, want, out, errOut)
	}
	return out + errOut
}

// read runs a command line and decodes its output as JSON.
func read[T any](t *testing.T, s *station, args ...string) (v T) {
	t.Helper()
	if err := json.Unmarshal([]byte(s.ok(t, append(args, "-o", "json")...)), &v); err != nil {
		t.Fatalf("%v: %v", args, err)
	}
	return v
}

func (s *station) login(t *testing.T) *initiator.Session {
	t.Helper()
	return s.loginWith(t, initiator.Options{})
}

func (s *station) loginWith(t *testing.T, o initiator.Options) *initiator.Session {
	t.Helper()
	o.Name = hostName
	return login(t, s.addr, o)
}

// text returns the configuration file.
func (s *station) text(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(s.file)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// same fails t unless the running LUNs are those of the file, ready, and n in number.
func (s *station) same(t *testing.T, n int) {
	t.Helper()
	cfg, err := config.Load(s.file)
	if err != nil {
		t.Fatal(err)
	}
	var want, got []int
	for _, l := range cfg.Targets[0].LUNs {
		want = append(want, l.ID)
	}
	for _, l := range read[[]schema.LUNState](t, s, "lun", "list", storeName) {
		if l.State != schema.Ready {
			t.Errorf("LUN %d is %s: %s", l.ID, l.State, l.Reason)
		}
		got = append(got, l.ID)
	}
	slices.Sort(want)
	if len(want) != n || !slices.Equal(got, want) {
		t.Errorf("LUNs %v run, LUNs %v are in the file, want %d", got, want, n)
	}
}

// endsSoon fails t unless the session ends.
func endsSoon(t *testing.T, session *initiator.Session) {
	t.Helper()
	select {
	case <-session.Done():
	case <-time.After(20 * time.Second):
		t.Error("the session does not end")
	}
}
