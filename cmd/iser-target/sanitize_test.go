package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// SBC-3, section 4.11.1: a SANITIZE that kill -9 interrupted completes after the next start.
func TestSanitizeSurvivesKill(t *testing.T) {
	const size = 8 << 20
	dir := t.TempDir()
	disk := filepath.Join(dir, "disk")
	cfg := write(t, "c.yaml", fmt.Sprintf(`
state_dir: %s
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns: [{id: 0, backend: file, path: %s, size: %d, sanitize: true}]
`, dir, disk, size))
	login := func(p *process) *initiator.Session {
		t.Helper()
		return login(t, p.addr, initiator.Options{Name: "iqn.2026-11.io.github.iser-target:1", ISID: [6]byte{0, 2, 0x3d, 0, 0, 1}})
	}
	do := func(s *initiator.Session, c *initiator.Command) *initiator.Command {
		t.Helper()
		if err := s.Do(c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	kept := func() string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(dir, "sanitize.json"))
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	ready := &initiator.Command{}

	p := start(t, "serve", "--config", cfg)
	s := login(p)
	do(s, ready) // takes the unit attention
	const immed, overwrite = 0x80, 0x01
	if c := do(s, &initiator.Command{CDB: [16]byte{0x48, immed | overwrite, 8: 5}, Out: []byte{31, 0, 0, 1, 0x5a}}); c.Status != 0 {
		t.Fatalf("SANITIZE: status %#x, sense % x", c.Status, c.Sense)
	}
	p.cmd.Process.Kill()
	p.cmd.Wait()
	if !strings.Contains(kept(), `"pattern": "5a"`) {
		t.Fatalf("sanitize.json after kill -9:\n%s", kept())
	}

	p = start(t, "serve", "--config", cfg)
	s = login(p)
	do(s, ready)
	testkit.Eventually(t, "end of the sanitize", func() bool {
		if do(s, ready).Status == 0 {
			return true
		}
		if k := ready.Sense; k[2]&0x0f != 2 || k[12] != 0x04 || k[13] != 0x1b { // SANITIZE IN PROGRESS
			t.Fatalf("TEST UNIT READY: sense % x", k)
		}
		return false
	})
	b, err := os.ReadFile(disk)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b, bytes.Repeat([]byte{0x5a}, size)) {
		t.Error("the medium does not hold the pattern")
	}
	if strings.Contains(kept(), "pattern") {
		t.Errorf("sanitize.json after the end of the command:\n%s", kept())
	}
}
