package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// SIGHUP: what differs is applied, and initiators hear of it. What is wrong with
// the file, or would disturb them, leaves everything as it was.
func TestReload(t *testing.T) {
	dir := t.TempDir()
	disk := filepath.Join(dir, "disk.img")
	if err := os.WriteFile(disk, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := filepath.Join(dir, "c.yaml")
	configure := func(luns, more string) {
		t.Helper()
		text := fmt.Sprintf(`
state_dir: %s/state
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns: [%s]
%s`, dir, luns, more)
		if err := os.WriteFile(cfg, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	file := func(size string) string { return "{id: 0, backend: file, path: " + disk + ", size: " + size + "}" }
	configure(file("1MiB")+", {id: 1, backend: memory, size: 1MiB}", "")
	p := start(t, "serve", "--config", cfg)
	s := login(t, p.addr, initiator.Options{})
	do := func(lun byte, in int, cdb ...byte) *initiator.Command {
		t.Helper()
		c := &initiator.Command{LUN: lun, In: make([]byte, in)}
		copy(c.CDB[:], cdb)
		if err := s.Do(c); err != nil {
			t.Fatal(err)
		}
		return c
	}
	attention := func(lun, asc, ascq byte) {
		t.Helper()
		if c := do(lun, 0); c.Status != 2 || c.Sense[12] != asc || c.Sense[13] != ascq {
			t.Fatalf("LUN %d: status %#x, sense % x; want %02x/%02x", lun, c.Status, c.Sense, asc, ascq)
		}
	}
	reload := func(want ...string) {
		t.Helper()
		if err := p.cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		for _, w := range want {
			p.wait(t, w)
		}
	}
	for lun := range byte(2) {
		attention(lun, 0x29, 0x00)
	}

	configure(file("3MiB")+", {id: 1, backend: memory, size: 1MiB}, {id: 2, backend: memory, size: 1MiB}", "")
	reload(`(msg=change .*size of LUN 0)`, `(msg=change .*add LUN 2)`, `(configuration file was applied)`)
	attention(0, 0x2a, 0x09) // CAPACITY DATA HAS CHANGED
	attention(0, 0x3f, 0x0e) // REPORTED LUNS DATA HAS CHANGED
	attention(1, 0x3f, 0x0e)
	attention(2, 0x29, 0x00)
	if c := do(0, 8, 0x25); binary.BigEndian.Uint32(c.In) != 3<<20/512-1 {
		t.Errorf("READ CAPACITY(10): % x", c.In)
	}
	if c := do(0, 64, 0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64); !bytes.Equal(c.In[:24], []byte{3: 24, 17: 1, 23: 0}) {
		t.Errorf("REPORT LUNS: % x", c.In[:24])
	}
	w := &initiator.Command{CDB: cdb.Write16(4096, 1), Out: bytes.Repeat([]byte{7}, 512)}
	if err := s.Do(w); err != nil || w.Status != 0 {
		t.Errorf("WRITE(16) where nothing was before: %v, status %#x", err, w.Status)
	}

	two := ", {id: 1, backend: memory, size: 1MiB}, {id: 2, backend: memory, size: 1MiB}"
	configure(file("3MiB, read_only: true")+two, "")
	reload(`(configuration file was not applied.*refused: set read_only of LUN 0 .*disturbs session .*--disrupt)`)
	configure(file("3MiB"), "")
	reload(`(configuration file was not applied.*remove LUN 1 of .*disturbs session)`)
	configure(file("2MiB")+two, "")
	reload(`(configuration file was not applied.*set size of LUN 0 .*cuts off data.*allow="iser-target config apply .* --allow-shrink")`)
	configure(file("3MiB")+two+", {id: 3, backend: file, path: "+dir+", size: 1MiB}", "")
	reload(`(configuration file was not applied.*add LUN 3 .*is a directory)`)
	configure("{id: nonsense}", "")
	reload(`(configuration file was not applied.*targets\[0\]\.luns\[0\]\.id)`)
	configure(file("3MiB")+two, "log: {format: json}")
	reload(`(format.* takes effect at the next start of the target)`)
	if c := do(0, 0); c.Status != 0 {
		t.Errorf("TEST UNIT READY: status %#x, sense % x", c.Status, c.Sense)
	}
	s.Close()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	p.wait(t, `(msg=stopped)`)
}
