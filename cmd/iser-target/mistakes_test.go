package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/cli"
)

// A wrong size is about the flag or the argument that the user typed, and a usage error.
func TestWrongSizes(t *testing.T) {
	s := newStation(t)
	for want, args := range map[string][]string{
		`--size: "1Q" is not a size`:                {"lun", "create", "--backend", "memory", "--size", "1Q"},
		`--threshold-used: "x" is not a size`:       {"lun", "create", "--backend", "memory", "--size", "1M", "--threshold-used", "x"},
		`--threshold-available: "y" is not a size`:  {"lun", "create", "--backend", "memory", "--size", "1M", "--threshold-available", "y"},
		`SIZE: "1Q" is not a size`:                  {"lun", "resize", "0", "1Q"},
		`SIZE: "Q" is not a size`:                   {"lun", "resize", "0", "+Q"},
		"--preallocate requires --size, the space ": {"lun", "create", "--path", "a.img", "--preallocate"},
	} {
		s.says(t, cli.ExitUsage, want, args...)
	}
	if out := s.ok(t, "lun", "list", "--no-headers"); strings.Count(out, "\n") != 1 {
		t.Errorf("a refused command created a LUN:\n%s", out)
	}
}

// A pattern that admits all initiators warns, unless authentication or networks keep some out.
func TestAllowAllWarns(t *testing.T) {
	s := newStation(t)
	const warning = "iser-target: warning: any host that reaches a portal can log in to "
	s.ok(t, "target", "create", storeName+"2", "--initiator", hostName)
	s.says(t, cli.ExitOK, warning+storeName+"2", "initiator", "allow", storeName+"2", "*", "--dry-run")
	s.says(t, cli.ExitOK, warning+storeName+"2", "initiator", "allow", storeName+"2", "*")
	s.ok(t, "initiator", "deny", storeName+"2", "*")
	if _, errOut, code := s.run(t, "initiator", "allow", storeName+"2", "iqn.2026-11.*"); code != cli.ExitOK || errOut != "" {
		t.Errorf("exit code %d, %q", code, errOut)
	}
	s.ok(t, "target", "set", storeName+"2", `networks=["127.0.0.0/8"]`)
	if _, errOut, code := s.run(t, "initiator", "allow", storeName+"2", "*"); code != cli.ExitOK || errOut != "" {
		t.Errorf("with networks: exit code %d, %q", code, errOut)
	}
}

// A start without access to the state directory says how to name another one.
func TestStateDirectoryOfAnotherUser(t *testing.T) {
	if os.Getuid() != 0 {
		backendtest.Unavailable(t, "requires root, who becomes another user")
	}
	dir := t.TempDir()
	for d := dir; d != "/"; d = filepath.Dir(d) { // the program of the test is elsewhere
		if st, err := os.Stat(d); err == nil && st.Mode().Perm()&0o001 == 0 {
			if err := os.Chmod(d, st.Mode().Perm()|0o001); err != nil {
				t.Fatal(err)
			}
		}
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	state := filepath.Join(dir, "state")
	if err := os.Mkdir(state, 0o755); err != nil {
		t.Fatal(err)
	}
	s := &station{dir: dir}
	s.configure(t, func(text string) string {
		return strings.Replace(text, "control: {socket: "+dir+"/s}", `control: {socket: ""}`, 1)
	})
	if err := os.Chmod(s.file, 0o644); err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(dir, "iser-target")
	if err := os.WriteFile(copied, program, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := s.command(t, "serve", "--config", s.file)
	cmd.Env = slices.DeleteFunc(cmd.Env, func(v string) bool { return strings.HasPrefix(v, "ISER_TARGET_CONTROL_SOCKET=") })
	cmd.Path, cmd.Args[0] = copied, copied
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	out, err := cmd.CombinedOutput()
	if want := "permission denied. Let the user of the target write to " + state + ", or set state_dir or ISER_TARGET_STATE_DIR"; err == nil || !strings.Contains(string(out), want) {
		t.Errorf("%v, want %q in\n%s", err, want, out)
	}
}
