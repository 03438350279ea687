package main

import (
	"fmt"
	"net"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// fileLUNs writes a configuration with n LUNs on files.
func fileLUNs(t *testing.T, n int) string {
	t.Helper()
	dir := t.TempDir()
	var luns []string
	for i := range n {
		luns = append(luns, fmt.Sprintf("{id: %d, backend: file, path: %s, size: 1MiB}", i, filepath.Join(dir, fmt.Sprint(i))))
	}
	return write(t, "c.yaml", fmt.Sprintf(`
state_dir: %s/state
control: {socket: ""}
portals: [{listen: "127.0.0.1:0"}]
targets: [{name: %s, initiators: ["*"], luns: [%s]}]
`, dir, serviceTarget, strings.Join(luns, ", ")))
}

// limited returns the command that serves a configuration with at most n descriptors.
func limited(t *testing.T, n int, config string) *exec.Cmd {
	return exec.Command("sh", "-c", `ulimit -n "$1" && shift && exec "$@"`, "sh", fmt.Sprint(n), executable(t), "serve", "--config", config)
}

// 50 LUNs on files are served with 200 descriptors. A flood of connections takes all but the last 64:
// those that are too many are refused with one line each, and sessions notice nothing.
func TestFewDescriptors(t *testing.T) {
	p := launch(t, limited(t, 200, fileLUNs(t, 50)))
	if line := p.wait(t, `(level=WARN msg="too few descriptors.*)`); !strings.Contains(line, "allowed=200") ||
		!strings.Contains(line, "luns=50") || !strings.Contains(line, "LimitNOFILE=") {
		t.Errorf("the warning is %q", line)
	}
	p.addr = p.wait(t, `msg=serving portal=(\S+)`)
	s := logIn(t, p.addr)
	for range 150 {
		c, err := net.Dial("tcp", p.addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
	p.wait(t, `(outcome=refused stage=\S+( byte")? reason="limits.descriptors is 200, and the last 64 are kept; this one had not logged in)`)
	for lun := range byte(50) {
		c := &initiator.Command{LUN: lun, CDB: cdb.Write16(0, 1), Out: make([]byte, 512)}
		c.CDB[1] = 0x08                // FUA
		for try := 0; try < 2; try++ { // the first meets a unit attention
			if err := s.Do(c); err != nil {
				t.Fatal(err)
			}
		}
		if c.Status != 0 {
			t.Fatalf("WRITE of LUN %d during the flood: status %d, sense %x", lun, c.Status, c.Sense)
		}
	}
}

// A configuration that cannot be served is refused with one line that says what to set.
func TestTooFewDescriptors(t *testing.T) {
	out, err := func() ([]byte, error) {
		cmd := limited(t, 128, fileLUNs(t, 100))
		cmd.Env = append(cmd.Environ(), "BE_ISER_TARGET=1")
		return cmd.CombinedOutput()
	}()
	for _, want := range []string{"needs 165 (LUNs 100, portals 1, the rest 64)", "may open 128", "LimitNOFILE=2213"} {
		if err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%v, output without %q:\n%s", err, want, out)
		}
	}
}
