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

// A reloader is a target with a session, whose configuration file a test changes.
type reloader struct {
	*process
	session   *initiator.Session
	dir, path string
}

// newReloader starts a target with LUN 0 on a file and LUN 1 in memory.
func newReloader(t *testing.T) *reloader {
	t.Helper()
	r := &reloader{dir: t.TempDir()}
	r.path = filepath.Join(r.dir, "c.yaml")
	if err := os.WriteFile(filepath.Join(r.dir, "disk.img"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	r.configure(t, r.file("1MiB")+memory1, "")
	r.process = start(t, "serve", "--config", r.path)
	r.session = login(t, r.addr, initiator.Options{})
	return r
}

// file returns a LUN on a file with that size and further keys.
func (r *reloader) file(size string) string {
	return "{id: 0, backend: file, path: " + filepath.Join(r.dir, "disk.img") + ", size: " + size + "}"
}

// configure writes a configuration with the LUNs and further sections.
func (r *reloader) configure(t *testing.T, luns, more string) {
	t.Helper()
	text := fmt.Sprintf(`
state_dir: %s/state
portals: [{listen: "127.0.0.1:0"}]
targets:
  - name: iqn.2026-11.io.example:store
    initiators: ["*"]
    luns: [%s]
%s`, r.dir, luns, more)
	if err := os.WriteFile(r.path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// reload sends SIGHUP and waits for lines of the log.
func (r *reloader) reload(t *testing.T, want ...string) {
	t.Helper()
	if err := r.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	for _, w := range want {
		r.wait(t, w)
	}
}

// do executes a command that reads in bytes.
func (r *reloader) do(t *testing.T, lun byte, in int, cdb ...byte) *initiator.Command {
	t.Helper()
	c := &initiator.Command{LUN: lun, In: make([]byte, in)}
	copy(c.CDB[:], cdb)
	if err := r.session.Do(c); err != nil {
		t.Fatal(err)
	}
	return c
}

// attention fails t unless the next command meets that unit attention.
func (r *reloader) attention(t *testing.T, lun, asc, ascq byte) {
	t.Helper()
	if c := r.do(t, lun, 0); c.Status != 2 || c.Sense[12] != asc || c.Sense[13] != ascq {
		t.Fatalf("LUN %d: status %#x, sense % x; want %02x/%02x", lun, c.Status, c.Sense, asc, ascq)
	}
}

// memory1 is LUN 1 in a list of LUNs.
const memory1 = ", {id: 1, backend: memory, size: 1MiB}"

// SIGHUP applies the differences of the file, and initiators are notified.
func TestReloadAppliesTheDifferences(t *testing.T) {
	r := newReloader(t)
	for lun := range byte(2) {
		r.attention(t, lun, 0x29, 0x00)
	}
	r.configure(t, r.file("3MiB")+memory1+", {id: 2, backend: memory, size: 1MiB}", "")
	r.reload(t, `(msg=change .*size of LUN 0)`, `(msg=change .*add LUN 2)`, `(configuration file was applied)`)
	r.attention(t, 0, 0x2a, 0x09) // CAPACITY DATA HAS CHANGED
	r.attention(t, 0, 0x3f, 0x0e) // REPORTED LUNS DATA HAS CHANGED
	r.attention(t, 1, 0x3f, 0x0e)
	r.attention(t, 2, 0x29, 0x00)
	if c := r.do(t, 0, 8, 0x25); binary.BigEndian.Uint32(c.In) != 3<<20/512-1 {
		t.Errorf("READ CAPACITY(10): % x", c.In)
	}
	if c := r.do(t, 0, 64, 0xa0, 0, 0, 0, 0, 0, 0, 0, 0, 64); !bytes.Equal(c.In[:24], []byte{3: 24, 17: 1, 23: 0}) {
		t.Errorf("REPORT LUNS: % x", c.In[:24])
	}
	w := &initiator.Command{CDB: cdb.Write16(4096, 1), Out: bytes.Repeat([]byte{7}, 512)}
	if err := r.session.Do(w); err != nil || w.Status != 0 {
		t.Errorf("WRITE(16) where nothing was before: %v, status %#x", err, w.Status)
	}
}

// A file that is wrong, or would disturb sessions, changes nothing.
func TestReloadOfAWrongFileChangesNothing(t *testing.T) {
	r := newReloader(t)
	r.attention(t, 0, 0x29, 0x00)
	r.configure(t, r.file("1MiB, read_only: true")+memory1, "")
	r.reload(t, `(configuration file was not applied.*refused: set read_only of LUN 0 .*disturbs session .*--disrupt)`)
	r.configure(t, r.file("1MiB"), "")
	r.reload(t, `(configuration file was not applied.*remove LUN 1 of .*disturbs session)`)
	r.configure(t, r.file("512KiB")+memory1, "")
	r.reload(t, `(configuration file was not applied.*set size of LUN 0 .*cuts off data.*allow="iser-target config apply .* --allow-shrink")`)
	r.configure(t, r.file("1MiB")+memory1+", {id: 3, backend: file, path: "+r.dir+", size: 1MiB}", "")
	r.reload(t, `(configuration file was not applied.*add LUN 3 .*is a directory)`)
	r.configure(t, "{id: nonsense}", "")
	r.reload(t, `(configuration file was not applied.*targets\[0\]\.luns\[0\]\.id)`)
	r.configure(t, r.file("1MiB")+memory1, "log: {format: json}")
	r.reload(t, `(format.* takes effect at the next start of the target)`)
	if c := r.do(t, 0, 0); c.Status != 0 {
		t.Errorf("TEST UNIT READY: status %#x, sense % x", c.Status, c.Sense)
	}
}
