package daemon

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"

	pi "github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// protect sets a protect field in the CDB of c.
func protect(c *initiator.Command, field byte) *initiator.Command {
	c.CDB[1] |= field << 5
	return c
}

// protectedBlocks returns blocks of b from lba on, with protection information of that application tag.
func protectedBlocks(b byte, lba uint64, n int, app uint16) (p []byte) {
	block := bytes.Repeat([]byte{b}, 512)
	for i := range n {
		p = append(p, block...)
		p = binary.BigEndian.AppendUint64(p, uint64(pi.New(pi.CRC(block), app, uint32(lba)+uint32(i))))
	}
	return p
}

// A LUN of a file gets protection information, keeps what initiators write, and finds what changed below it: the data, or the side file. The
// neighbor works as before. Another type, or none, requires that the LUN may be disrupted.
func TestProtection(t *testing.T) {
	w := newWard(t, nil)
	w.write(1, 6)
	plain := w.luns
	with := func(key string) string { return strings.Replace(plain, "backend: file", key+"backend: file", 1) }
	w.luns = with("protection: 1, ")
	if _, err := w.apply(ChangeOptions{}); err == nil || !strings.Contains(err.Error(), "disturbs session") {
		t.Errorf("protection of a LUN in use: %v", err)
	}
	w.ok(ChangeOptions{Disrupt: true})
	if got := attentions(t, w.s, 1); !strings.Contains(got, "3f/03") {
		t.Errorf("unit attentions %q, want INQUIRY DATA HAS CHANGED, too", got)
	}
	w.settled()
	if got := w.read(1); got != 6 {
		t.Errorf("read %d of before, want 6", got)
	}
	if l := w.lunState(1); l.Protection != 1 || l.Checksums == nil || l.Checksums.Path != w.path+".pi" {
		t.Errorf("state %+v", l)
	}

	// More than an immediate data segment, and than a piece.
	sent := protectedBlocks(7, 8, 900, 0xabcd)
	write := protect(&initiator.Command{LUN: 1, CDB: cdb.Write16(8, 900), Out: sent}, 1)
	if got := do(t, w.s, write); got != "" || write.Residual != 0 {
		t.Fatalf("WRITE with protection information: %s, residual %d", got, write.Residual)
	}
	read := protect(&initiator.Command{LUN: 1, CDB: cdb.Read16(8, 900), In: make([]byte, len(sent))}, 1)
	if got := do(t, w.s, read); got != "" || !bytes.Equal(read.In, sent) {
		t.Fatalf("READ with protection information: %s, or other bytes", got)
	}
	wrong := bytes.Clone(sent[:520])
	wrong[513] ^= 1
	for _, c := range []struct {
		field byte
		want  string
	}{{1, "b/10/01"}, {4, "b/10/01"}, {5, "b/10/01"}, {2, ""}} {
		p := bytes.Clone(wrong)
		binary.BigEndian.PutUint32(p[516:], 700)
		if got := do(t, w.s, protect(&initiator.Command{LUN: 1, CDB: cdb.Write16(700, 1), Out: p}, c.field)); sense(got) != c.want {
			t.Errorf("WRPROTECT %d with a wrong guard: %s, want %s", c.field, got, c.want)
		}
	}
	if s := w.scrub(0); s.Bad != 1 { // WRPROTECT 2 has put a wrong guard there
		t.Errorf("scrub: %+v", s)
	}
	do(t, w.s, &initiator.Command{LUN: 1, CDB: cdb.Write16(700, 1), Out: make([]byte, 512)})

	flip(t, w.path, 8*512+3)
	c := &initiator.Command{LUN: 1, CDB: cdb.Read16(4, 8), In: make([]byte, 4096)}
	if got := do(t, w.s, c); sense(got) != "b/10/01" || binary.BigEndian.Uint32(c.Sense[3:]) != 8 {
		t.Errorf("READ of a flipped bit: %s, sense % x", got, c.Sense)
	}
	w.look("degraded", "(protection information): 1 blocks, the first has LBA 8")
	if got := w.extendedCopy(1, 0, 8, 1); !strings.HasPrefix(got, "a/") {
		t.Errorf("copy of a damaged block: %s", got)
	}
	if out, _ := w.write(1, 8); out != "" || w.read(1) != 8 {
		t.Errorf("a write of the block: %s", out)
	}
	flip(t, w.path+".pi", 8<<20+8*8+1) // its guard
	if got := do(t, w.s, &initiator.Command{LUN: 1, CDB: cdb.Read16(8, 1), In: make([]byte, 512)}); sense(got) != "b/10/01" {
		t.Errorf("READ of a block whose guard was changed: %s", got)
	}
	w.write(1, 9)
	if got := w.extendedCopy(0, 1, 40, 16); got != "" {
		t.Errorf("copy to the LUN: %s", got)
	}
	if s := w.scrub(0); s.Bad != 0 {
		t.Errorf("scrub: %+v", s)
	}

	w.luns = with("protection: 3, ")
	if _, err := w.apply(ChangeOptions{}); err == nil {
		t.Error("another type of a LUN in use is possible")
	}
	w.ok(ChangeOptions{Disrupt: true})
	attentions(t, w.s, 1)
	w.settled()
	capacity := &initiator.Command{LUN: 1, CDB: [16]byte{0x9e, 0x10, 13: 32}, In: make([]byte, 32)}
	if got := do(t, w.s, capacity); got != "" || capacity.In[12] != 5 || w.read(1) != 9 {
		t.Errorf("READ CAPACITY(16): %s, P_TYPE and PROT_EN %#x; read %d", got, capacity.In[12], w.read(1))
	}
	w.luns = plain
	w.ok(ChangeOptions{Disrupt: true})
	attentions(t, w.s, 1)
	if _, err := os.Stat(w.path + ".pi"); !os.IsNotExist(err) || w.read(1) != 9 {
		t.Errorf("without protection: %v, read %d", err, w.read(1))
	}
}

// sense removes what testkit adds to the response code of sense data with INFORMATION.
func sense(got string) string { return strings.Replace(got, "fb/", "b/", 1) }

// A side file that is missing, short or damaged makes the LUN not ready, with the reason and the remedy, and the remedy works. Its neighbor is served.
func TestLostProtectionFile(t *testing.T) {
	l := &lab{t: t, dir: t.TempDir(), portals: `{listen: "127.0.0.1:0"}`, initiators: `"*"`}
	l.path = filepath.Join(l.dir, "c.yaml")
	w := &ward{l, nil, filepath.Join(l.dir, "disk.img")}
	side := w.path + ".pi"
	without := "{id: 0, backend: memory, size: 4MiB}, " + l.disk(1, "disk.img", "")
	l.luns = strings.Replace(without, "backend: file", "protection: 1, backend: file", 1)
	start := func() func() error {
		l.write()
		var end func() error
		l.Daemon, end = run(t, l.path, Options{})
		w.s = l.login("host1", store)
		attentions(t, w.s, 0)
		return end
	}
	end := start()
	attentions(t, w.s, 1)
	w.settled()
	w.write(1, 7)
	if err := end(); err != nil {
		t.Fatal(err)
	}
	sound, err := os.ReadFile(side)
	if err != nil {
		t.Fatal(err)
	}
	damaged := bytes.Clone(sound)
	damaged[20] ^= 1
	for _, c := range []struct {
		name    string
		content []byte
		reason  string
	}{
		{"missing", nil, "not found, but the LUN had one"},
		{"short", sound[:9<<10], "it has 9216 bytes, too few for any protection information"},
		{"damaged", damaged, "it is damaged: the header"},
	} {
		err := os.Remove(side)
		if c.content != nil {
			err = os.WriteFile(side, c.content, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		end := start()
		if s := w.lunState(1); s.State != schema.NotReady || !strings.Contains(s.Reason, side+": "+c.reason) || !strings.Contains(s.Reason, "protection=0") {
			t.Errorf("%s: %s: %s", c.name, s.State, s.Reason)
		}
		if out, sync := w.write(0, 3); out != "" || sync != "" {
			t.Errorf("%s: the neighbor: %s, %s", c.name, out, sync)
		}
		if err := end(); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(side, sound, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(side); err != nil {
		t.Fatal(err)
	}
	end = start()
	t.Cleanup(func() { end() })
	with := l.luns
	l.luns = without
	w.ok(ChangeOptions{Disrupt: true})
	l.luns = with
	w.ok(ChangeOptions{Disrupt: true})
	attentions(t, w.s, 1)
	w.settled()
	if got := w.read(1); got != 7 {
		t.Errorf("read %d, want 7", got)
	}
}
