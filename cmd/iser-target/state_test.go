package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// state check finds a damaged file while the target runs, state repair refuses a directory in use, and the next
// start restores the file. The LUN keeps its identity.
func TestStateCheckAndRepair(t *testing.T) {
	disk := filepath.Join(t.TempDir(), "disk.img")
	s := newStation(t, func(text string) string {
		return strings.Replace(text, "{id: 0, backend: memory, size: 1MiB}", "{id: 0, backend: file, path: "+disk+", size: 1MiB}", 1)
	})
	serial := func(addr string) string {
		i := login(t, addr, initiator.Options{})
		defer i.Close()
		c := &initiator.Command{CDB: [16]byte{0x12, 1, 0x80, 0, 255}, In: make([]byte, 255)} // INQUIRY, page 80h
		if err := i.Do(c); err != nil || c.Status != 0 {
			t.Fatalf("%v, status %d", err, c.Status)
		}
		return string(c.In)
	}
	dir := filepath.Join(s.dir, "state")
	ids := filepath.Join(dir, "identities.json")
	before := serial(s.addr)
	if out := s.ok(t, "state", "check", "--config", s.file); !strings.Contains(out, "identities.json    ok") {
		t.Errorf("%s", out)
	}
	if err := os.WriteFile(ids, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.says(t, cli.ExitError, "need a repair: 1", "state", "check", dir)
	s.says(t, cli.ExitError, "in use", "state", "repair", dir)
	s.says(t, cli.ExitError, "is not damaged", "state", "repair", dir, "--discard", "settings.json")
	s.says(t, cli.ExitError, "is not a file of a state directory", "state", "repair", dir, "--discard", "c.yaml")
	s.cmd.Process.Kill()
	s.cmd.Wait()

	again := start(t, "serve", "--config", s.file)
	if log := again.output.all.String(); !strings.Contains(log, "state file restored from its spare copy") {
		t.Errorf("the log does not say what was restored:\n%s", log)
	}
	if after := serial(again.addr); after != before {
		t.Errorf("serial %q, was %q", after, before)
	}
	again.cmd.Process.Kill()
	again.cmd.Wait()

	// Without a spare copy the target does not start, until the operator accepts the loss.
	for _, name := range []string{ids, ids + ".spare"} {
		if err := os.WriteFile(name, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.says(t, cli.ExitError, "its spare copy", "serve", "--config", s.file)
	s.says(t, cli.ExitError, "Without identities.json LUNs on files are not ready", "state", "check", dir)
	s.says(t, cli.ExitError, "its spare copy", "state", "repair", dir)
	if out := s.ok(t, "state", "repair", dir, "--discard", "identities.json"); !strings.Contains(out, "identities.json.damaged") {
		t.Errorf("%s", out)
	}
	last := start(t, "serve", "--config", s.file)
	if got := read[schema.LUNState](t, s, "lun", "show", storeName, "0"); got.State != schema.NotReady || !strings.Contains(got.Reason, "identity") {
		t.Errorf("a LUN whose identity is lost is %s: %s", got.State, got.Reason)
	}
	s.ok(t, "lun", "set", storeName, "0", "identity=new")
	testkit.Eventually(t, "the LUN is ready", func() bool { return read[schema.LUNState](t, s, "lun", "show", storeName, "0").State == schema.Ready })
	if after := serial(last.addr); after == before {
		t.Error("the LUN has the same serial number")
	}
	s.says(t, cli.ExitError, "no such file", "state", "check", dir+"x")
	s.says(t, cli.ExitError, "name the state directory", "state", "check")
}
