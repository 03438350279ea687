package main

import (
	"os/exec"
	"testing"

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
