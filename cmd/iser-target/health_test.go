package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A LUN whose file is gone is shown by list, show and doctor, and recover says what stands in the way, and
// what is lost. The other LUN stays well.
func TestLUNRecover(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.img")
	s := newStation(t, func(text string) string {
		return strings.Replace(text, "1MiB}]", "1MiB}, {id: 1, backend: file, path: "+path+", size: 1MiB}]", 1)
	})
	s.says(t, cli.ExitRefused, "is healthy, and needs no recovery", "lun", "recover", storeName, "1")
	s.says(t, cli.ExitNotFound, "LUN 9", "lun", "recover", storeName, "9")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	end := time.Now().Add(testkit.Patience)
	for out := ""; !strings.Contains(out, "orphaned"); { // the target looks every 5 s
		if time.Now().After(end) {
			t.Fatalf("lun list does not say that the file was deleted:\n%s", out)
		}
		out, _, _ = s.run(t, "lun", "list")
	}
	s.says(t, cli.ExitOK, "deleted", "lun", "show", storeName, "1")
	s.says(t, cli.ExitError, "iser-target lun recover "+storeName+" 1", "doctor")
	s.says(t, cli.ExitError, "bring the file back", "lun", "recover", storeName, "1")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitOK, "was orphaned, is ok", "lun", "recover", storeName, "1")
	s.says(t, cli.ExitOK, "LUN 1 of", "lun", "resize", storeName, "1", "2MiB")
	if out, _, code := s.run(t, "doctor"); code != cli.ExitOK || strings.Contains(out, "orphaned") {
		t.Errorf("doctor exits with %d:\n%s", code, out)
	}
}
