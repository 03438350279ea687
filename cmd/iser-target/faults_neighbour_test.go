package main

import (
	"bytes"
	"encoding/binary"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// Faults of a LUN disturb no other LUN: neither for another initiator nor in the session whose commands
// hang. Commands that hang are executed when the faults end, and hold up neither that nor the end of
// the target.
func TestLUNFaultSparesNeighbours(t *testing.T) {
	disks := t.TempDir()
	s := newStation(t, func(text string) string {
		return strings.Replace(text, "[{id: 0, backend: memory, size: 1MiB}]", `
      - {id: 0, backend: file, path: `+filepath.Join(disks, "0.img")+`, size: 1MiB}
      - {id: 1, backend: file, path: `+filepath.Join(disks, "1.img")+`, size: 1MiB}`, 1)
	})
	const hanging, rounds = 16, 200
	victim, neighbour := s.login(t), login(t, s.addr, initiator.Options{Name: "iqn.2026-11.io.example:neighbour"})
	read0 := func() *initiator.Command { return &initiator.Command{CDB: cdb.Read16(0, 1), In: make([]byte, 512)} }
	if st := status(t, victim, read0()); st != 0 { // after the unit attentions
		t.Fatalf("READ: status %#x", st)
	}
	// spared writes to LUN 1 and reads it, over both sessions.
	version := uint64(0)
	spared := func(when string) {
		t.Helper()
		for i := range uint64(rounds) {
			for at, session := range []*initiator.Session{victim, neighbour} {
				version++
				lba, out, in := 2*i+uint64(at), make([]byte, 512), make([]byte, 512)
				binary.BigEndian.PutUint64(out, version)
				w := &initiator.Command{LUN: 1, CDB: cdb.Write16(lba, 1), Out: out, Immediate: int(i%2) * 512}
				r := &initiator.Command{LUN: 1, CDB: cdb.Read16(lba, 1), In: in}
				if st := status(t, session, w); st != 0 {
					t.Fatalf("%s: WRITE of LUN 1: status %#x, sense % x", when, st, w.Sense)
				}
				if st := status(t, session, r); st != 0 || !bytes.Equal(in, out) {
					t.Fatalf("%s: READ of LUN 1: status %#x, sense % x, data % x", when, st, r.Sense, in[:8])
				}
			}
			if st := status(t, neighbour, &initiator.Command{LUN: 1, CDB: [16]byte{0x91}}); i%20 == 0 && st != 0 {
				t.Fatalf("%s: SYNCHRONIZE CACHE of LUN 1: status %#x", when, st)
			}
		}
	}
	hang := func() (list [hanging]*initiator.Command) {
		t.Helper()
		s.ok(t, "lun", "fault", storeName, "0", "--hang", "1", "--for", "1h")
		for i := range list {
			list[i] = read0()
			if err := victim.Start(list[i]); err != nil {
				t.Fatal(err)
			}
		}
		testkit.Eventually(t, "commands that hang", func() bool {
			l := read[schema.LUNState](t, s, "lun", "show", storeName, "0")
			return l.Faults != nil && l.Faults.Injected > 0 && l.Counters.InFlight == hanging
		})
		return list
	}

	list := hang()
	spared("while LUN 0 hangs")
	if l := read[schema.LUNState](t, s, "lun", "show", storeName, "1"); l.Faults != nil || l.State != schema.Ready {
		t.Errorf("LUN 1 is %s, with the faults %+v", l.State, l.Faults)
	}
	s.ok(t, "lun", "fault", storeName, "0", "--clear")
	for _, c := range list {
		if err := c.Wait(); err != nil || c.Status != 0 {
			t.Errorf("READ of LUN 0, after the faults: status %#x, sense % x, %v", c.Status, c.Sense, err)
		}
	}
	testkit.Eventually(t, "LUN 0 answers again", func() bool { // on a busy machine it has counted as hung
		return read[schema.LUNState](t, s, "lun", "show", storeName, "0").State == schema.Ready
	})

	s.ok(t, "lun", "fault", storeName, "0", "--read-error", "1", "--write-error", "1", "--sync-error", "1", "--latency", "1ms")
	if st := status(t, victim, read0()); st != 2 {
		t.Errorf("READ of LUN 0: status %#x, want CHECK CONDITION", st)
	}
	spared("while LUN 0 fails")

	hang()
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.process.wait(t, `(msg=stopped)`)
	if err := s.cmd.Wait(); err != nil {
		t.Errorf("exit: %v", err)
	}
}
