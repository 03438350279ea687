package main

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/cli"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// The command passes connections on, prints each fault.
func TestFaultsCommand(t *testing.T) {
	p := start(t, "serve", "--config", write(t, "c.yaml", `
state_dir: ""
portals: [{listen: "127.0.0.1:0"}]
targets: [{name: "iqn.2026-11.io.example:store", initiators: ["*"], luns: [{id: 0, backend: memory, size: 1MiB}]}]
`))
	proxy := launch(t, exec.Command(executable(t), "faults", "--listen", "127.0.0.1:0", "--to", p.addr, "--seed", "3", "--cut", "0.1"))
	addr := proxy.wait(t, `listening on (\S+) for `+p.addr+`, seed 3`)
	if s, err := initiator.Login(t.Context(), addr, initiator.Options{Target: storeName}); err == nil { // in FPDUs, too
		defer s.Close()
		for s.Do(&initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}) == nil {
		}
	}
	proxy.wait(t, `connection \d+, (?:to|from) the target, unit \d+ \(.*, \d+ bytes\): cut after (\d+) bytes`)
	if out, err := run(t, "faults", "--listen", "127.0.0.1:0", "--to", p.addr, "--drop", "2"); err == nil || err.Error() != "--drop: 2: a probability is a number from 0 to 1" {
		t.Errorf("%v\n%s", err, out)
	}
	if out, err := run(t, "faults", "--listen", "127.0.0.1:0"); err == nil {
		t.Errorf("without --to:\n%s", out)
	}
}

// lun fault makes READs fail with the chosen sense data until it is cleared, or its time is over. Lists
// and events show it.
func TestLUNFault(t *testing.T) {
	s := newStation(t)
	session := s.login(t)
	read0 := func() byte {
		return status(t, session, &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)})
	}
	if st := read0(); st != 0 {
		t.Fatalf("READ: status %#x", st)
	}
	s.says(t, cli.ExitOK, "LUN 0 of "+storeName+": faults are injected", "lun", "fault", storeName, "0", "--read-error", "1", "--sense", "4/44/01", "--seed", "5", "--for", "1h")
	c := &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)}
	if st := status(t, session, c); st != 2 || c.Sense[2] != 4 || c.Sense[12] != 0x44 || c.Sense[13] != 1 {
		t.Errorf("READ: status %#x, sense % x", st, c.Sense)
	}
	l := read[[]schema.LUNState](t, s, "lun", "list", storeName)[0]
	if f := l.Faults; f == nil || f.Seed != 5 || f.ReadError != 1 || f.Sense != "4/44/01" || f.Injected != 1 || f.Until.IsZero() {
		t.Errorf("faults %+v", l.Faults)
	}
	s.says(t, cli.ExitOK, "faults are injected until", "lun", "list")
	s.says(t, cli.ExitOK, "faults are injected until", "doctor")
	s.says(t, cli.ExitOK, "faults have ended", "lun", "fault", storeName, "0", "--clear")
	if st := read0(); st != 0 {
		t.Errorf("READ without faults: status %#x", st)
	}
	s.says(t, cli.ExitNotFound, "faults of LUN 0", "lun", "fault", storeName, "0", "--clear")
	s.ok(t, "lun", "fault", storeName, "0", "--write-error", "1", "--for", "1ms")
	s.wait(t, `msg="faults are no longer injected" .*injected=(1)`) // the first
	s.wait(t, `msg="faults are no longer injected" .*injected=(0)`)
	if l := read[schema.LUNState](t, s, "lun", "show", storeName, "0"); l.Faults != nil {
		t.Errorf("faults %+v, want them to end", l.Faults)
	}
	events := s.ok(t, "events")
	for _, want := range []string{"faults are injected", "faults were cleared", "faults are no longer injected"} {
		if !strings.Contains(events, want) {
			t.Errorf("no event %q:\n%s", want, events)
		}
	}
	for _, tt := range []struct {
		code int
		want string
		args string
	}{
		{cli.ExitNotFound, "LUN 9", "9 --read-error 1"},
		{cli.ExitError, "nothing to inject", "0"},
		{cli.ExitError, "read_error: 2", "0 --read-error 2"},
		{cli.ExitError, "is not a time", "0 --read-error 1 --for soon"},
		{cli.ExitError, "at most 1h", "0 --read-error 1 --for 2h"},
		{cli.ExitError, "like 3/11/00", "0 --read-error 1 --sense 3/11"},
		{cli.ExitError, "like 3/11/00", "0 --read-error 1 --sense 3/11/100"},
		{cli.ExitError, "NO SENSE", "0 --read-error 1 --sense 0/0/0"},
		{cli.ExitError, "the backend memory", "0 --hang 1"},
		{cli.ExitUsage, "leave out the other flags", "0 --hang 1 --clear"},
	} {
		s.says(t, tt.code, tt.want, append([]string{"lun", "fault", storeName}, strings.Fields(tt.args)...)...)
	}
}
