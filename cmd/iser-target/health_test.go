package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
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

// A failed sync that the state directory has makes the LUN failed at the start, after kill -9 and after upgrades, with the
// same time and reason, until lun recover. The other LUN is well all the time.
func TestFailedSyncOutlivesUpgrades(t *testing.T) {
	dir := t.TempDir()
	s := &station{dir: dir}
	s.configure(t, withFile(dir))
	s.startProgram(t, executable(t))
	naa := read[schema.LUNState](t, s, "lun", "show", storeName, "0").NAA
	kill := func() {
		s.cmd.Process.Kill()
		s.cmd.Wait()
	}
	kill()
	record := fmt.Sprintf(`{"version": 1, "units": [{"naa": %q, "since": "2026-11-23T10:00:00Z", "reason": "sync d.img: input/output error"}]}`, naa)
	if err := os.WriteFile(filepath.Join(dir, "state", "failures.json"), []byte(record), 0o600); err != nil {
		t.Fatal(err)
	}
	s.startProgram(t, executable(t))
	check := func(when string) {
		t.Helper()
		l := read[schema.LUNState](t, s, "lun", "show", storeName, "0")
		if l.State != schema.Ready || l.Health != "failed" || l.HealthSince == nil || l.HealthSince.Unix() != 1795428000 || !strings.Contains(l.Reason, "input/output error") {
			t.Errorf("%s the LUN is %s, %s since %v: %s", when, l.State, l.Health, l.HealthSince, l.Reason)
		}
		if n := read[schema.LUNState](t, s, "lun", "show", storeName, "1"); n.State != schema.Ready || n.Health != schema.Healthy {
			t.Errorf("%s the neighbor is %s, %s", when, n.State, n.Health)
		}
		i := login(t, s.addr, initiator.Options{})
		defer i.Close()
		for lun, want := range []byte{2, 0} {
			for range 2 { // the first outcome is the unit attention of the login
				c := &initiator.Command{LUN: byte(lun), CDB: [16]byte{0x35}} // SYNCHRONIZE CACHE(10)
				if err := i.Do(c); err != nil {
					t.Fatal(err)
				}
				if got := c.Status; got != want && (len(c.Sense) < 3 || c.Sense[2] != 6) || c.Status == 2 && c.Sense[2] != 6 && c.Sense[2] != 4 {
					t.Errorf("%s SYNCHRONIZE CACHE of LUN %d: status %d, sense %x", when, lun, c.Status, c.Sense)
				}
			}
		}
	}
	check("after a start")
	for range 2 {
		s.ok(t, "upgrade")
		check("after an upgrade")
	}
	s.says(t, cli.ExitError, "iser-target lun recover "+storeName+" 0", "doctor")
	s.says(t, cli.ExitOK, "was failed, is ok", "lun", "recover", storeName, "0")
	s.ok(t, "upgrade")
	if l := read[schema.LUNState](t, s, "lun", "show", storeName, "0"); l.Health != schema.Healthy {
		t.Errorf("after lun recover and an upgrade the LUN is %s: %s", l.Health, l.Reason)
	}
}
