package daemon

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// checkedWard returns a ward whose LUN 1 has checksums, all of which are computed.
func checkedWard(t *testing.T, open func(l *lab) func(*config.LUN) (backend.Store, error)) *ward {
	t.Helper()
	w := newWard(t, open)
	w.luns = strings.Replace(w.luns, "backend: file", "checksums: true, backend: file", 1)
	w.ok(ChangeOptions{Disrupt: true})
	attentions(t, w.s, 1)
	w.settled()
	return w
}

// settled waits until all checksums are computed.
func (w *ward) settled() {
	w.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		if k := w.lunState(1).Checksums; k != nil && k.Pending == 0 {
			return
		}
		if time.Now().After(end) {
			w.t.Fatal("checksums are still computed")
		}
	}
}

// flip flips a bit of the file.
func flip(t *testing.T, path string, off int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, off); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := f.WriteAt(b, off); err != nil {
		t.Fatal(err)
	}
}

// scrub runs a scrub of LUN 1 and returns how it ended.
func (w *ward) scrub(rate int64) *schema.Scrub {
	w.t.Helper()
	testkit.Eventually(w.t, "the end of a scrub of before", func() bool {
		_, err := w.BeginScrub(w.t.Context(), store, 1, rate)
		if err != nil && !strings.Contains(err.Error(), "still executes a step") {
			w.t.Fatal(err)
		}
		return err == nil
	})
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		s, err := w.Scrub(store, 1)
		if err != nil || time.Now().After(end) {
			w.t.Fatalf("%+v, %v", s, err)
		}
		if s.State != schema.ScrubRunning {
			return s
		}
	}
}

// A flipped bit on disk is a MEDIUM ERROR with the LBA, degrades the LUN, and is found by a scrub; a write of the
// block mends it. The neighbor works as before.
func TestCorruptBlock(t *testing.T) {
	w := checkedWard(t, nil)
	if write, sync := w.write(1, 7); write != "" || sync != "" {
		t.Fatal(write, sync)
	}
	if s := w.scrub(0); s.State != schema.ScrubDone || s.Bad != 0 || s.Done != s.Total || s.First != nil {
		t.Errorf("scrub of sound data: %+v", s)
	}
	flip(t, w.path, 8*512+3)
	if s := w.scrub(0); s.Bad != 1 || s.First == nil || *s.First != 0 {
		t.Errorf("scrub of a flipped bit: %+v", s)
	}
	w.look("degraded", "1 blocks, the first has LBA 8")
	for name, c := range map[string]*initiator.Command{
		"READ":                           {CDB: cdb.Read16(4, 8), In: make([]byte, 4096)},
		"VERIFY with the data":           {CDB: [16]byte{0: 0x2f, 1: 0x02, 5: 8, 8: 1}, Out: make([]byte, 512)},
		"COMPARE AND WRITE of the block": {CDB: [16]byte{0: 0x89, 9: 8, 13: 1}, Out: make([]byte, 1024)},
	} {
		c.LUN = 1
		got := do(t, w.s, c)
		if got != "f0/11/00" && got != "3/11/00" || c.Sense[0]&0x80 == 0 || binary.BigEndian.Uint32(c.Sense[3:]) != 8 {
			t.Errorf("%s: %s, sense % x, want MEDIUM ERROR with LBA 8", name, got, c.Sense)
		}
	}
	if got := do(t, w.s, &initiator.Command{LUN: 1, CDB: cdb.Read16(9, 8), In: make([]byte, 4096)}); got != "" {
		t.Errorf("READ of other blocks: %s", got)
	}
	if k := w.lunState(1).Checksums; k.Mismatches == 0 || k.Verified == 0 || k.Bad != 1 || k.Path != w.path+".sums" {
		t.Errorf("state %+v", k)
	}
	found := false
	for _, e := range w.Events(0) {
		found = found || e.Event == "medium" && e.Text == "data is corrupt: it differs from its checksum" && e.Attrs["lba"] == int64(8)
	}
	if !found {
		t.Error("no event says that data is corrupt")
	}
	if write, _ := w.write(1, 8); write != "" || w.read(1) != 8 {
		t.Errorf("a write of the block: %s, then %d", write, w.read(1))
	}
	if s := w.scrub(0); s.Bad != 0 {
		t.Errorf("scrub of the mended block: %+v", s)
	}
	w.ForgetErrors(t)
	w.look("ok", "")
}

// ForgetErrors forgets the last error of the store, which degrades the LUN for minutes.
func (w *ward) ForgetErrors(t *testing.T) {
	l, err := w.lun(store, 1)
	if err != nil {
		t.Fatal(err)
	}
	l.unit.ForgetFailure()
}

// Without its side file a LUN is not ready, and says what to do; that works. A LUN that was served without checksums
// gets other ones later.
func TestSideFileIsMissing(t *testing.T) {
	l := &lab{t: t, dir: t.TempDir(), portals: `{listen: "127.0.0.1:0"}`, initiators: `"*"`}
	l.path = filepath.Join(l.dir, "c.yaml")
	w := &ward{l, nil, filepath.Join(l.dir, "disk.img")}
	sums := w.path + ".sums"
	without := "{id: 0, backend: memory, size: 4MiB}, " + l.disk(1, "disk.img", "")
	with := strings.Replace(without, "backend: file", "checksums: true, backend: file", 1)
	start := func() (end func() error) {
		l.luns = with
		l.write()
		l.Daemon, end = run(t, l.path, Options{})
		return end
	}
	end := start()
	w.s = l.login("host1", store)
	attentions(t, w.s, 0)
	attentions(t, w.s, 1)
	w.settled()
	w.write(1, 7)
	if err := end(); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(sums, sums+".away"); err != nil {
		t.Fatal(err)
	}
	end = start()
	t.Cleanup(func() { end() })
	switch l := w.lunState(1); {
	case l.State != schema.NotReady || !strings.Contains(l.Reason, sums+": not found, but the LUN had one") || !strings.Contains(l.Reason, "checksums=false"):
		t.Fatalf("without the side file: %s: %s", l.State, l.Reason)
	}
	w.luns = without
	w.ok(ChangeOptions{Disrupt: true})
	if l := w.lunState(1); l.State != schema.Ready || l.Checksums != nil {
		t.Fatalf("without checksums: %s: %s", l.State, l.Reason)
	}
	w.s = w.login("host2", store)
	attentions(t, w.s, 1)
	w.write(1, 9)
	if err := os.Rename(sums+".away", sums); err != nil { // too late
		t.Fatal(err)
	}
	w.luns = with
	if _, err := w.apply(ChangeOptions{Disrupt: true}); err == nil || !strings.Contains(err.Error(), "it is there already, and belongs to other data, or is old") {
		t.Errorf("with an old side file: %v", err)
	}
	if err := os.Remove(sums); err != nil {
		t.Fatal(err)
	}
	w.ok(ChangeOptions{Disrupt: true})
	attentions(t, w.s, 1)
	w.settled()
	if got := w.read(1); got != 9 {
		t.Errorf("read %d, want 9", got)
	}
	// Served without checksums for a while: the old ones are gone.
	w.luns = without
	w.ok(ChangeOptions{Disrupt: true})
	if _, err := os.Stat(sums); !os.IsNotExist(err) {
		t.Errorf("the side file is still there: %v", err)
	}
	attentions(t, w.s, 1)
	w.write(1, 10)
	w.luns = with
	w.ok(ChangeOptions{Disrupt: true})
	attentions(t, w.s, 1)
	w.settled()
	if got := w.read(1); got != 10 {
		t.Errorf("read %d, want 10", got)
	}
	if s := w.scrub(0); s.Bad != 0 {
		t.Errorf("%+v", s)
	}
}

// While the disk of a scrub hangs, the neighbor works, and so does everything that an operator asks for. A scrub that
// was canceled ends when the disk answers.
func TestScrubOfHangingDisk(t *testing.T) {
	var below *backendtest.Faulty
	w := checkedWard(t, func(l *lab) func(*config.LUN) (backend.Store, error) {
		return func(c *config.LUN) (backend.Store, error) {
			s, err := l.openBackend(c)
			if err == nil && c.ID == 1 {
				below = &backendtest.Faulty{Store: s}
				s = below
			}
			return s, err
		}
	})
	gate := below.Shut(backendtest.ReadAt)
	defer gate.Open()
	if _, err := w.BeginScrub(t.Context(), store, 1, 0); err != nil {
		t.Fatal(err)
	}
	<-gate.Entered
	if _, err := w.BeginScrub(t.Context(), store, 1, 0); err == nil || !strings.Contains(err.Error(), "running already") {
		t.Errorf("a second scrub: %v", err)
	}
	for i := range byte(20) {
		if write, sync := w.write(0, i); write != "" || sync != "" || w.read(0) != i {
			t.Fatalf("the neighbor: %s, %s", write, sync)
		}
	}
	s, err := w.CancelScrub(t.Context(), store, 1)
	if err != nil || s.State != schema.ScrubCanceled {
		t.Errorf("cancel: %+v, %v", s, err)
	}
	if _, err := w.BeginScrub(t.Context(), store, 1, 0); err == nil || !strings.Contains(err.Error(), "still executes a step") {
		t.Errorf("another scrub: %v", err)
	}
	gate.Open()
	if s := w.scrub(0); s.State != schema.ScrubDone || s.Bad != 0 {
		t.Errorf("after that: %+v", s)
	}
	began := time.Now()
	if s := w.scrub(8 << 20); time.Since(began) < time.Duration(float64(s.Total)/(8<<20)*0.8*float64(time.Second)) {
		t.Errorf("%d bytes at 8 MiB per second took %v", s.Total, time.Since(began))
	}
}

// A LUN without checksums says so.
func TestScrubWithoutChecksums(t *testing.T) {
	w := newWard(t, nil)
	for _, err := range []error{
		func() error { _, err := w.BeginScrub(t.Context(), store, 1, 0); return err }(),
		func() error { _, err := w.Scrub(store, 1); return err }(),
		func() error { _, err := w.CancelScrub(t.Context(), store, 1); return err }(),
	} {
		if err == nil || !strings.Contains(err.Error(), "the LUN has no checksums") {
			t.Errorf("error %v", err)
		}
	}
	if _, err := os.Stat(filepath.Join(w.dir, "disk.img.sums")); !os.IsNotExist(err) {
		t.Errorf("a side file without checksums: %v", err)
	}
}

// Commands that change much leave sound checksums, and copy no corrupt block: SANITIZE, EXTENDED COPY, WRITE SAME, UNMAP.
func TestChecksumsOfCommands(t *testing.T) {
	w := checkedWard(t, nil)
	w.luns = strings.Replace(w.luns, "checksums: true", "sanitize: true, checksums: true", 1)
	w.ok(ChangeOptions{Disrupt: true})
	attentions(t, w.s, 1)
	for i, c := range []*initiator.Command{
		{CDB: [16]byte{0x48, 1, 8: 5}, Out: []byte{1, 0, 0, 1, 0x5a}},                                          // SANITIZE OVERWRITE
		{CDB: [16]byte{0x93, 8: 1, 13: 200}, Out: bytes.Repeat([]byte{3}, 512)},                                // WRITE SAME(16)
		{CDB: [16]byte{0x42, 8: 24}, Out: []byte{1: 22, 3: 16, 14: 1, 19: 100, 23: 0}},                         // UNMAP
		{CDB: [16]byte{0x89, 9: 8, 13: 1}, Out: append(bytes.Repeat([]byte{0x5a}, 512), make([]byte, 512)...)}, // COMPARE AND WRITE
	} {
		c.LUN = 1
		if got := do(t, w.s, c); got != "" {
			t.Errorf("command %d: %s", i, got)
		}
	}
	if s := w.scrub(0); s.Bad != 0 || s.Done != s.Total {
		t.Errorf("scrub: %+v", s)
	}
	if got := w.extendedCopy(0, 1, 8, 16); got != "" {
		t.Errorf("copy to the LUN: %s", got)
	}
	w.write(1, 7)
	if got := w.extendedCopy(1, 0, 8, 100); got != "" || w.read(0) != 7 {
		t.Errorf("copy from the LUN: %s, then %d", got, w.read(0))
	}
	if s := w.scrub(0); s.Bad != 0 {
		t.Errorf("scrub after copies: %+v", s)
	}
	w.write(0, 9)
	flip(t, w.path, 8*512+3)
	if got := w.extendedCopy(1, 0, 8, 1); !strings.HasPrefix(got, "a/") || w.read(0) != 9 {
		t.Errorf("copy of a corrupt block: %s, then LUN 0 has %d", got, w.read(0))
	}
}

// extendedCopy copies that many blocks of one LUN to the same LBA of another one.
func (w *ward) extendedCopy(from, to int, lba, count uint16) string {
	w.t.Helper()
	list := make([]byte, 16, 16+2*32+28)
	binary.BigEndian.PutUint16(list[2:], 2*32)
	binary.BigEndian.PutUint32(list[8:], 28)
	for _, id := range []int{from, to} {
		naa, err := hex.DecodeString(strings.TrimPrefix(w.lunState(id).NAA, "naa."))
		if err != nil || len(naa) != 8 {
			w.t.Fatalf("NAA %q", w.lunState(id).NAA)
		}
		cscd := [32]byte{0: 0xe4, 4: 1, 5: 3, 7: 8, 30: 2}
		copy(cscd[8:], naa)
		list = append(list, cscd[:]...)
	}
	segment := [28]byte{0: 2, 3: 0x18, 7: 1}
	binary.BigEndian.PutUint16(segment[10:], count)
	binary.BigEndian.PutUint64(segment[12:], uint64(lba))
	binary.BigEndian.PutUint64(segment[20:], uint64(lba))
	list = append(list, segment[:]...)
	return do(w.t, w.s, &initiator.Command{LUN: byte(from), CDB: [16]byte{0x83, 13: byte(len(list))}, Out: list})
}

// lun recover with another file: its data counts, and its checksums are computed from it.
func TestRecoverWithChecksums(t *testing.T) {
	w := checkedWard(t, nil)
	w.write(1, 7)
	next := w.path + ".next"
	if err := os.WriteFile(next, bytes.Repeat([]byte{9}, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(next, w.path); err != nil {
		t.Fatal(err)
	}
	w.look("orphaned", "another file")
	if _, err := w.Recover(t.Context(), store, 1); err != nil {
		t.Fatal(err)
	}
	attentions(t, w.s, 1)
	w.settled()
	w.look("ok", "")
	if s := w.scrub(0); s.Bad != 0 || w.read(1) != 9 {
		t.Errorf("%+v, and the LUN has %d", s, w.read(1))
	}
	flip(t, w.path, 8*512+3)
	if s := w.scrub(0); s.Bad != 1 {
		t.Errorf("scrub of a flipped bit: %+v", s)
	}
}

// A block device has its checksums in a file elsewhere, and a bit that flips on the device is found.
func TestChecksumsOfBlockDevice(t *testing.T) {
	device, file := backendtest.LoopDevice(t, make([]byte, 4<<20), 512, false)
	l := newLab(t)
	side := filepath.Join(l.dir, "device.sums")
	w := &ward{l, nil, file}
	was := l.luns
	l.luns += fmt.Sprintf(", {id: 1, backend: block, path: %s, checksums: true}", device)
	if _, err := l.apply(ChangeOptions{}); err == nil || !strings.Contains(err.Error(), "checksums_path") {
		t.Errorf("without a path of the side file: %v", err)
	}
	l.luns = was + fmt.Sprintf(", {id: 1, backend: block, path: %s, checksums: true, checksums_path: %s}", device, side)
	l.ok(ChangeOptions{})
	w.s = l.login("host1", store)
	attentions(t, w.s, 0)
	attentions(t, w.s, 1)
	w.settled()
	if write, sync := w.write(1, 7); write != "" || sync != "" {
		t.Fatal(write, sync)
	}
	if s := w.scrub(0); s.Bad != 0 || s.Total != 4<<20 {
		t.Errorf("scrub of sound data: %+v", s)
	}
	flip(t, device, 8*512+3)
	if s := w.scrub(0); s.Bad != 1 {
		t.Errorf("scrub of a flipped bit: %+v", s)
	}
	w.look("degraded", "the first has LBA 8")
	if write, sync := w.write(1, 8); write != "" || sync != "" || w.read(1) != 8 {
		t.Errorf("a write of the block: %s, %s, then %d", write, sync, w.read(1))
	}
}

// A LUN that is created on a file whose side file is missing hears what to do, and that works.
func TestCreateWithoutItsSideFile(t *testing.T) {
	w := checkedWard(t, nil)
	w.write(1, 7)
	with := w.luns
	w.luns = strings.Split(with, ", {id: 1")[0]
	w.ok(ChangeOptions{Disrupt: true})
	if err := os.Remove(w.path + ".sums"); err != nil {
		t.Fatal(err)
	}
	w.luns = with
	if _, err := w.apply(ChangeOptions{}); err == nil || !strings.Contains(err.Error(), "serve the LUN without checksums once") {
		t.Fatalf("without the side file: %v", err)
	}
	w.luns = strings.Replace(with, "checksums: true, ", "", 1)
	w.ok(ChangeOptions{})
	w.luns = with
	w.ok(ChangeOptions{Disrupt: true})
	attentions(t, w.s, 1)
	w.settled()
	if s := w.scrub(0); s.Bad != 0 || w.read(1) != 7 {
		t.Errorf("%+v, and the LUN has %d", s, w.read(1))
	}
}
