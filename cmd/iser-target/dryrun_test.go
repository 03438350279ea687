package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
)

// A dry run answers what the command would: the same error, and the same exit code. It leaves nothing behind.
func TestDryRunIsTrue(t *testing.T) {
	s := newStation(t)
	busy := filepath.Join(s.dir, "busy.img")
	if err := os.WriteFile(busy, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		code int
		text string
		args []string
	}{
		{cli.ExitError, "no such file or directory", []string{"lun", "create", "--path", "none/q.img", "--size", "1GiB"}},
		{cli.ExitError, "no such file or directory", []string{"lun", "create", "--backend", "block", "--path", filepath.Join(s.dir, "none")}},
		{cli.ExitError, "not a block device", []string{"lun", "create", "--backend", "block", "--path", busy}},
		{cli.ExitError, "must be at most", []string{"lun", "create", "--backend", "memory", "--size", "100TiB"}},
		{cli.ExitError, "file too large", []string{"lun", "create", "--path", "q.img", "--size", "4000P"}},
		{cli.ExitError, "busy.img exists and is 1MiB (1048576 bytes), but --size is 4KiB", []string{"lun", "create", "--path", busy, "--size", "4KiB"}},
	} {
		before := s.text(t)
		s.says(t, tt.code, tt.text, append(tt.args, "--dry-run")...)
		s.says(t, tt.code, tt.text, tt.args...)
		if got := s.text(t); got != before {
			t.Errorf("%v: the file is different:\n%s", tt.args, got)
		}
	}
	if _, err := os.Stat(filepath.Join(s.dir, "q.img")); !os.IsNotExist(err) {
		t.Errorf("a file was left behind: %v", err)
	}
	// The file of a LUN that runs is open in this process.
	s.ok(t, "lun", "create", "--id", "5", "--path", busy, "--size", "1MiB")
	s.says(t, cli.ExitOK, "set read_only of LUN 5", "lun", "set", "5", "read_only=true", "--dry-run")
	s.says(t, cli.ExitError, "file too large", "lun", "resize", "5", "4000P", "--dry-run")

	s.login(t)
	out := s.says(t, cli.ExitRefused, "requires --disrupt", "lun", "delete", "0", "--dry-run")
	if !strings.Contains(out, "the change would be refused") || !strings.Contains(out, "Use --drain 30s") {
		t.Errorf("the dry run says %s", out)
	}
	for _, flag := range []string{"--now", "--drain=1s", "--disrupt"} {
		if out := s.says(t, cli.ExitOK, "remove LUN 0", "lun", "delete", "0", "--dry-run", flag); strings.Contains(out, "requires") {
			t.Errorf("with %s: %s", flag, out)
		}
	}
	s.says(t, cli.ExitRefused, "requires --allow-shrink", "lun", "resize", "5", "512K", "--dry-run")
	if out := s.says(t, cli.ExitOK, "1MiB -> 512KiB", "lun", "resize", "5", "512K", "--dry-run", "--allow-shrink"); strings.Contains(out, "requires") {
		t.Errorf("with --allow-shrink: %s", out)
	}

	// A plan, too.
	other := filepath.Join(s.dir, "other.yaml")
	write := func(old, next string) {
		if err := os.WriteFile(other, []byte(strings.Replace(s.text(t), old, next, 1)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("512KiB", "512KiB")
	s.says(t, cli.ExitOK, "nothing to do", "config", "plan", other)
	write("size: 1MiB}", "size: 512KiB}")
	s.says(t, cli.ExitRefused, "the change would be refused", "config", "plan", other)
	s.says(t, cli.ExitRefused, "refused", "config", "apply", other)
	write("size: 1MiB}", "size: 4000PiB}")
	s.says(t, cli.ExitError, "must be at most", "config", "plan", other)
}

// config validate --check-paths finds files and devices that a target here could not open.
func TestValidateChecksPaths(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "c.yaml")
	text := strings.ReplaceAll(`state_dir: DIR
portals: [{listen: "127.0.0.1:3260"}]
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns:
      - {id: 0, backend: file, path: DIR/zero.img, size: 1GiB}
      - {id: 1, backend: file, path: DIR/none/one.img, size: 1GiB}
      - {id: 2, backend: block, path: DIR/none}
`, "DIR", dir)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := run(t, "config", "validate", file); err != nil {
		t.Errorf("without --check-paths: %v", err)
	}
	_, err := run(t, "config", "validate", "--check-paths", file)
	if err == nil || strings.Count(err.Error(), "\n") != 1 || !strings.Contains(err.Error(), file+": targets[0].luns[1]: file store "+dir+"/none/one.img: ") ||
		!strings.Contains(err.Error(), "targets[0].luns[2]: block store") {
		t.Errorf("with it: %v", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "zero.img")); !os.IsNotExist(err) {
		t.Errorf("the check creates files: %v", err)
	}
}
