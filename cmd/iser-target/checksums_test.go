package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
)

// An operator creates a LUN with checksums, scrubs it, and hears of a block that is corrupt.
func TestScrubCommand(t *testing.T) {
	dir := t.TempDir()
	s := &station{dir: dir}
	s.configure(t, func(text string) string { return text + "metrics: {listen: \"127.0.0.1:0\"}\n" })
	s.startProgram(t, executable(t))
	path := filepath.Join(dir, "checked.img")
	s.says(t, cli.ExitUsage, "--checksums: cannot be set for backend memory", "lun", "create", storeName, "--id", "8", "--backend", "memory", "--size", "1MiB", "--checksums")
	s.ok(t, "lun", "create", storeName, "--id", "7", "--path", path, "--size", "4MiB", "--checksums")
	s.says(t, cli.ExitOK, "LUN 7 of "+storeName+": scrub done, 4.0 MiB of 4.0 MiB, 0 corrupt blocks", "lun", "scrub", storeName, "7", "--wait", "--rate", "1GiB")
	if err := os.WriteFile(path, []byte("not a write of the target"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 4<<20); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitError, "has 1 corrupt blocks", "lun", "scrub", storeName, "7", "--wait")
	s.says(t, cli.ExitOK, "scrub done, 4.0 MiB of 4.0 MiB, 1 corrupt blocks", "lun", "scrub", storeName, "7", "--status")
	s.says(t, cli.ExitRefused, "no scrub", "lun", "scrub", storeName, "7", "--cancel")
	s.says(t, cli.ExitUsage, "go alone", "lun", "scrub", storeName, "7", "--cancel", "--wait")
	out := s.ok(t, "lun", "show", storeName, "7")
	for _, want := range []string{path + ".sums", "done, 4.0 MiB of 4.0 MiB, 1 corrupt blocks"} {
		if !strings.Contains(out, want) {
			t.Errorf("lun show without %q:\n%s", want, out)
		}
	}
	s.ok(t, "lun", "delete", storeName, "7", "--now")
	s.ok(t, "lun", "create", storeName, "--id", "7", "--path", path, "--size", "4MiB", "--checksums") // it still knows
	s.says(t, cli.ExitError, "1 corrupt blocks", "lun", "scrub", storeName, "7", "--wait")
	s.ok(t, "lun", "set", storeName, "7", "checksums=false")
	s.ok(t, "lun", "set", storeName, "7", "checksums=true") // the data as it is
	s.says(t, cli.ExitOK, "0 corrupt blocks", "lun", "scrub", storeName, "7", "--wait")
	s.ok(t, "lun", "delete", storeName, "7", "--now")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	s.ok(t, "lun", "create", storeName, "--id", "7", "--path", path, "--size", "8MiB", "--checksums", "--preallocate") // another file
	s.says(t, cli.ExitOK, "scrub done, 8.0 MiB of 8.0 MiB, 0 corrupt blocks", "lun", "scrub", storeName, "7", "--wait")
}
