package lun

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A copyRig is a rig with another unit of 2 MiB, LUN 1.
type copyRig struct {
	*rig
	other *rig
	nexus *Nexus
}

func newCopyRig(t *testing.T, one, two setup) *copyRig {
	t.Helper()
	r := &copyRig{rig: newRig(t, one)}
	two.size = 2 << 20
	r.other = newRig(t, two)
	r.other.unit.opt.Identity = state.Identity{NAA: [8]byte{0x3f, 7: 0xee}, Serial: "3f000000000000ee"}
	r.add(1, r.other.unit)
	r.nexus = r.login()
	return r
}

const (
	cscdZero = "e4 00 0000 01 03 00 08 3001020304050607 000000000000000000000000 00 000200" // LUN 0 by its NAA
	cscdOne  = "e4 00 0000 01 03 00 08 3f000000000000ee 000000000000000000000000 00 000200" // LUN 1
)

// blocks returns a segment descriptor 02h.
func blocks(from, to, count int, fromLBA, toLBA uint64) string {
	return fmt.Sprintf("02 00 0018 %04x %04x 0000 %04x %016x %016x", from, to, count, fromLBA, toLBA)
}

// copyList returns the parameter list of EXTENDED COPY with a list identifier.
func copyList(id, usage int, cscds, segments []string) string {
	c, s := strings.Join(cscds, ""), strings.Join(segments, "")
	return fmt.Sprintf("%02x %02x %04x 00000000 %08x 00000000", id, usage<<3, len(unhex(c)), len(unhex(s))) + c + s
}

func (r *copyRig) copy(list string) result {
	return do(r.nexus, &r.c, [8]byte{}, copyCDB(list), unhex(list), all)
}

// copyCDB returns the CDB of EXTENDED COPY with that list.
func copyCDB(list string) string {
	return fmt.Sprintf("83 00 0000000000000000 %08x 00 00", len(unhex(list)))
}

func (r *copyRig) read(lun byte, lba, count uint64) []byte {
	r.t.Helper()
	res := do(r.nexus, &r.c, [8]byte{0, lun}, extentCDB(0x88, 0, lba, count), nil, all)
	wantGood(r.t, "READ(16)", res)
	return res.in
}

// wantCopyAborted checks for COPY ABORTED with the number of the segment.
func wantCopyAborted(t testing.TB, res result, asc, ascq byte, segment int) {
	t.Helper()
	want := unhex(fmt.Sprintf("70 00 0a 00000000 0a %08x %02x %02x 00 000000", segment, asc, ascq))
	if res.status != StatusCheckCondition || !bytes.Equal(res.sense, want) {
		t.Fatalf("status %#x, sense % x, want % x", res.status, res.sense, want)
	}
}

// SPC-4, section 6.4; VMware's XCOPY.
func TestExtendedCopy(t *testing.T) {
	const count = 1100 // more than one piece
	data := pattern(count*512, 1)
	r := newCopyRig(t, setup{}, setup{})
	r.good(extentCDB(0x8a, 0, 7, count), data)
	wantGood(t, "within a unit, and to another one", r.copy(copyList(0x21, 0, []string{cscdZero, cscdOne}, []string{
		blocks(0, 1, count, 7, 2000), blocks(1, 0, 3, 2000, 2045), blocks(0, 0, 0, 0, 0)})))
	wantBytes(t, r.read(1, 2000, count), data)
	wantBytes(t, r.read(0, 2045, 3), data[:3*512])
	wantBytes(t, r.read(0, 7, count), data)

	// Copy status: once, and only for this nexus.
	status := func(n *Nexus) result {
		return do(n, &r.c, [8]byte{}, "84 00 21 00000000000000 000000ff 00 00", nil, all)
	}
	wantField(t, status(r.rig.nexus), 2, noField)
	res := status(r.nexus)
	wantGood(t, "RECEIVE COPY STATUS", res)
	wantBytes(t, res.in, unhex(`
		00000008
		01                    # HDD 0, completed without errors
		0003                  # SEGMENTS PROCESSED
		00                    # TRANSFER COUNT UNITS: octets
		00089e00              # 1103 blocks`))
	wantField(t, status(r.nexus), 2, noField)

	delete(r.nexus.list()[0].copies.of, 0) // from login
	// LU ID TYPE means nothing, and without a list identifier there is no status.
	wantGood(t, "LU ID TYPE", r.copy(copyList(0, 3, []string{strings.Replace(cscdZero, "e4 00", "e4 c0", 1)}, []string{blocks(0, 0, 1, 7, 0)})))
	wantBytes(t, r.read(0, 0, 1), data[:512])
	// A null device (NUL) is not the unit that the rest of its descriptor names.
	null := strings.Replace(cscdZero, "e4 00", "e4 20", 1)
	wantCopyAborted(t, r.copy(copyList(0, 3, []string{null, cscdOne}, []string{blocks(1, 0, 1, 2001, 0)})), 0x0d, 0x02, 0)
	wantCopyAborted(t, r.copy(copyList(0, 3, []string{null, cscdOne}, []string{blocks(0, 1, 1, 0, 2001)})), 0x0d, 0x02, 0)
	wantBytes(t, r.read(0, 0, 1), data[:512])
	wantField(t, do(r.nexus, &r.c, [8]byte{}, "84 00 00 00000000000000 000000ff 00 00", nil, all), 2, noField)
	wantGood(t, "nothing to do", r.copy(copyList(0, 2, nil, nil)))
	if res := do(r.nexus, &r.c, [8]byte{}, "83 00 0000000000000000 00000000 00 00", nil, all); res.status != StatusGood || res.dataOut != 0 {
		t.Errorf("PARAMETER LIST LENGTH 0: %v", res)
	}
	wantField(t, do(r.nexus, &r.c, [8]byte{}, "83 00 0000000000000000 00010001 00 00", nil, all), 10, noField)
	wantField(t, do(r.nexus, &r.c, [8]byte{}, "83 02 0000000000000000 00000000 00 00", nil, all), 1, 4)
	wantField(t, do(r.nexus, &r.c, [8]byte{}, "84 01 0000000000000000 00000000 00 00", nil, all), 1, 4) // RECEIVE COPY DATA
}

// Overlapping ranges end up as if the copy had read everything before it wrote.
func TestExtendedCopyOverlap(t *testing.T) {
	const count = 1500
	for _, s := range [][2]uint64{{0, 1}, {1, 0}, {0, 512}, {500, 20}, {3, 3}} {
		r := newCopyRig(t, setup{}, setup{})
		data := pattern(count*512, 1)
		r.good(extentCDB(0x8a, 0, s[0], count), data)
		wantGood(t, "EXTENDED COPY", r.copy(copyList(1, 2, []string{cscdZero}, []string{blocks(0, 0, count, s[0], s[1])})))
		if !bytes.Equal(r.read(0, s[1], count), data) {
			t.Errorf("from %d to %d: the copy differs", s[0], s[1])
		}
	}
}

// Blocks of different sizes: the count is that of the source or, with DC, of
// the destination.
func TestExtendedCopyBlockSizes(t *testing.T) {
	four := strings.Replace(cscdOne, "000200", "001000", 1)
	r := newCopyRig(t, setup{}, setup{blockSize: 4096})
	data := pattern(64*512, 1)
	r.good(extentCDB(0x8a, 0, 16, 64), data)
	wantGood(t, "source", r.copy(copyList(1, 2, []string{cscdZero, four}, []string{blocks(0, 1, 64, 16, 5)})))
	wantBytes(t, r.read(1, 5, 8), data)
	dc := strings.Replace(blocks(0, 1, 2, 16, 100), "02 00", "02 02", 1)
	wantGood(t, "destination", r.copy(copyList(1, 2, []string{cscdZero, four}, []string{dc})))
	wantBytes(t, r.read(1, 100, 3), slices.Concat(data[:8192], make([]byte, 4096)))
	wantCopyAborted(t, r.copy(copyList(1, 2, []string{cscdZero, four}, []string{blocks(0, 1, 63, 16, 5)})), 0x26, 0x0a, 0)
	wantListField(t, r.copy(copyList(1, 2, []string{cscdOne}, nil)), 16+29) // DISK BLOCK LENGTH
}

// Holes stay holes, and their copy writes nothing.
func TestExtendedCopyKeepsHoles(t *testing.T) {
	r := newCopyRig(t, setup{size: 1 << 30}, setup{})
	wantGood(t, "WRITE", do(r.nexus, &r.c, [8]byte{0, 1}, extentCDB(0x8a, 0, 0, 4096), pattern(2<<20, 1), all))
	reads := r.store.Calls(backendtest.ReadAt)
	wantGood(t, "EXTENDED COPY", r.copy(copyList(1, 2, []string{cscdZero, cscdOne}, []string{blocks(0, 1, 4096, 0, 0)})))
	if r.store.Calls(backendtest.ReadAt) != reads {
		t.Error("a hole was read")
	}
	res := do(r.nexus, &r.c, [8]byte{0, 1}, "9e 12 0000000000000000 00001000 00 00", nil, all)
	wantBytes(t, res.in, unhex("00000014 00000000 0000000000000000 00001000 01 000000"))

	through := newCopyRig(t, setup{size: 1 << 30}, setup{info: volatile, opt: Options{WriteThrough: true}})
	wantGood(t, "EXTENDED COPY", through.copy(copyList(1, 2, []string{cscdZero, cscdOne}, []string{blocks(0, 1, 8, 0, 0)})))
	if n := through.other.store.Calls(backendtest.Sync); n != 1 {
		t.Errorf("%d syncs of a write-through destination, want 1", n)
	}
}

func TestExtendedCopyList(t *testing.T) {
	r := newCopyRig(t, setup{}, setup{})
	seg := blocks(0, 0, 8, 0, 100)
	good := copyList(1, 0, []string{cscdZero}, []string{seg})
	cut := func(list string, octets int) string { return fmt.Sprintf("%x", unhex(list)[:octets]) }
	for _, s := range []struct {
		name, list string
		want       [3]byte
		octet      int // of a field pointer, or 0
	}{
		{"half a header", cut(good, 15), [3]byte{5, 0x1a, 0}, 0},
		{"half a CSCD descriptor", cut(good, 16+31), [3]byte{5, 0x1a, 0}, 0},
		{"half a segment descriptor", cut(good, 16+32+27), [3]byte{5, 0x1a, 0}, 0},
		{"LIST ID USAGE 01b", copyList(1, 1, []string{cscdZero}, []string{seg}), [3]byte{5, 0x26, 0}, 1},
		{"a list identifier with usage 11b", copyList(1, 3, []string{cscdZero}, []string{seg}), [3]byte{5, 0x26, 0}, 1},
		{"inline data", "01 00 0000 00000000 00000000 00000004 00000000", [3]byte{5, 0x26, 0x0b}, 0},
		{"CSCD list length", "01 00 0010 00000000 00000000 00000000" + cut(cscdZero, 16), [3]byte{5, 0x26, 0}, 2},
		{"too many CSCD descriptors", copyList(1, 0, slices.Repeat([]string{cscdZero}, 17), []string{seg}), [3]byte{5, 0x26, 0x06}, 0},
		{"too many segment descriptors", copyList(1, 0, []string{cscdZero}, slices.Repeat([]string{seg}, 33)), [3]byte{5, 0x26, 0x08}, 0},
		{"too long", copyList(1, 0, slices.Repeat([]string{cscdZero}, 17), slices.Repeat([]string{seg}, 128)), [3]byte{5, 0x1a, 0}, 0},
		{"a Fibre Channel CSCD descriptor", copyList(1, 0, []string{strings.Replace(cscdZero, "e4", "e0", 1)}, []string{seg}), [3]byte{5, 0x26, 0x07}, 0},
		{"a tape", copyList(1, 0, []string{strings.Replace(cscdZero, "e4 00", "e4 01", 1)}, []string{seg}), [3]byte{5, 0x26, 0}, 16 + 1},
		{"DESIGNATOR LENGTH", copyList(1, 0, []string{cscdZero, strings.Replace(cscdZero, "00 08 30", "00 15 30", 1)}, []string{seg}), [3]byte{5, 0x26, 0}, 16 + 32 + 7},
		{"stream to stream", copyList(1, 0, []string{cscdZero}, []string{seg, "03" + seg[2:]}), [3]byte{5, 0x26, 0x09}, 0},
		{"block to block with offsets", copyList(1, 0, []string{cscdZero}, []string{seg, "0a 00 001c 0000 0000 00000200 0000000000000000 0000000000000008 0000 0010"}),
			[3]byte{5, 0x26, 0x09}, 0},
		{"to a stream, with held data", copyList(1, 0, []string{cscdZero}, []string{seg, "0b" + seg[2:]}), [3]byte{5, 0x26, 0x09}, 0},
		{"segment DESCRIPTOR LENGTH", copyList(1, 0, []string{cscdZero}, []string{strings.Replace(seg, "0018", "0014", 1)}), [3]byte{5, 0x26, 0}, 16 + 32 + 2},
		{"three bytes of a segment", copyList(1, 0, []string{cscdZero}, []string{seg, "02 00 00"}), [3]byte{5, 0x1a, 0}, 0},
		{"half a segment", copyList(1, 0, []string{cscdZero}, []string{seg, cut(seg, 20)}), [3]byte{5, 0x1a, 0}, 0},
	} {
		t.Run(s.name, func(t *testing.T) {
			res := r.copy(s.list)
			wantSense(t, res, s.want[0], s.want[1], s.want[2])
			if s.octet != 0 {
				wantListField(t, res, s.octet)
			}
			if n := r.store.Calls(backendtest.WriteAt) + r.store.Calls(backendtest.Discard); n != 0 {
				t.Error("something was written")
			}
		})
	}
	wantGood(t, "the list that the others are made of", r.copy(good))
}

// An error in a segment is COPY ABORTED with the number of the segment.
func TestExtendedCopyAborted(t *testing.T) {
	ok := blocks(0, 0, 8, 0, 100)
	two := func(segment string) string {
		return copyList(9, 0, []string{cscdZero, cscdOne}, []string{ok, segment})
	}
	r := newCopyRig(t, setup{}, setup{})
	r.good(extentCDB(0x8a, 0, 0, 8), pattern(4096, 1))
	unknown := strings.Replace(cscdOne, "3f", "3e", 1)
	for _, list := range []string{two(blocks(0, 2, 8, 0, 0)), two(blocks(2, 0, 8, 0, 0)), two(blocks(0xffff, 0, 8, 0, 0))} {
		wantCopyAborted(t, r.copy(list), 0x08, 0x04, 1) // UNREACHABLE COPY TARGET
	}
	wantCopyAborted(t, r.copy(copyList(9, 0, []string{cscdZero, unknown}, []string{ok, blocks(0, 1, 8, 0, 0)})), 0x0d, 0x02, 1)
	wantGood(t, "a name that is not used", r.copy(copyList(9, 2, []string{cscdZero, unknown}, []string{ok})))
	for _, seg := range []string{blocks(0, 1, 8, 2041, 0), blocks(1, 0, 8, 0, 2041), blocks(0, 1, 1, 1<<63, 0), blocks(0, 1, 1, 0, 1<<64-1)} {
		wantCopyAborted(t, r.copy(two(seg)), 0, 0, 1)
	}
	toOther := blocks(0, 1, 8, 0, 0)
	failing := func(what string, do func(), undo func()) {
		t.Helper()
		t.Log(what)
		do()
		wantCopyAborted(t, r.copy(two(toOther)), 0x0d, 0x01, 1) // THIRD PARTY DEVICE FAILURE
		undo()
		wantGood(t, what+", later", r.copy(two(toOther)))
	}
	failing("a write fails", func() { r.other.store.Fail(backendtest.WriteAt, syscall.EIO) }, func() { r.other.store.Fail(backendtest.WriteAt, nil) })
	failing("the destination is stopped", func() { r.other.unit.stopped.Store(true) }, func() { r.other.unit.stopped.Store(false) })
	failing("the destination is write protected", func() { r.other.unit.mode.Store(modeSWP) }, func() { r.other.unit.mode.Store(0) })
	failing("the destination is being sanitized", func() { r.other.unit.sanitizer.state.Store(sanitizeRunning) },
		func() { r.other.unit.sanitizer.state.Store(sanitizeIdle) })
	port := testPort
	port.InitiatorName = "iqn.2026-11.io.example:third"
	third := r.inv.NewNexus(port)
	on := func(cdb string) {
		t.Helper()
		do(third, &r.c, [8]byte{0, 1}, "00", nil, all) // takes the unit attention
		wantGood(t, cdb, do(third, &r.c, [8]byte{0, 1}, cdb, nil, all))
	}
	failing("another initiator has reserved the destination", func() { on("16") }, func() { on("17") })

	r.other.store.Fail(backendtest.Extent, syscall.EIO)
	wantCopyAborted(t, r.copy(two(blocks(1, 0, 8, 0, 0))), 0x0d, 0x01, 1)
	res := do(r.nexus, &r.c, [8]byte{}, "84 00 09 00000000000000 0000000c 00 00", nil, all)
	wantBytes(t, res.in, unhex(`
		00000008
		02                    # completed with errors
		0001                  # SEGMENTS PROCESSED
		00
		00001000`))
	big := newCopyRig(t, setup{size: 1 << 30, blockSize: 4096, info: func(i *backend.Info) {}}, setup{})
	wantCopyAborted(t, big.copy(copyList(1, 0, []string{strings.Replace(cscdZero, "000200", "001000", 1)},
		[]string{blocks(0, 0, 8193, 0, 100000)})), 0, 0, 0) // MAXIMUM SEGMENT LENGTH
}

// SPC-4, section 6.22.
func TestReceiveCopyOperatingParameters(t *testing.T) {
	r := newRig(t, setup{})
	want := unhex(`
		0000002a              # AVAILABLE DATA: 46-4
		01 000000             # SNLID
		0010                  # MAXIMUM CSCD DESCRIPTOR COUNT
		0020                  # MAXIMUM SEGMENT DESCRIPTOR COUNT
		00001000              # MAXIMUM DESCRIPTOR LIST LENGTH
		02000000              # MAXIMUM SEGMENT LENGTH: 32 MiB
		00000000 00000000 00000000 0000
		00ff                  # TOTAL CONCURRENT COPIES
		ff                    # MAXIMUM CONCURRENT COPIES
		09 00 00              # granularity of segments: 512, of inline and held data
		000000
		02 02 e4              # IMPLEMENTED DESCRIPTOR LIST`)
	wantBytes(t, r.good("84 03 00 00000000000000 000000ff 00 00", nil), want)
	wantBytes(t, r.good("84 03 00 00000000000000 00000010 00 00", nil), want[:16])
}

// A copy from file to file or within one copies data as data, and holes as holes.
func TestExtendedCopyFiles(t *testing.T) {
	r := filePair(t, t.TempDir(), 64<<20)
	// Data, a hole of 8 MiB, and data again.
	want := make([]byte, 16<<20)
	copy(want, pattern(2<<20, 1))
	copy(want[10<<20:], pattern(6<<20, 2))
	write := func(lun byte, lba int, p []byte) {
		t.Helper()
		wantGood(t, "WRITE(16)", do(r.nexus, &r.c, [8]byte{0, lun}, extentCDB(0x8a, 0, uint64(lba), uint64(len(p)/512)), p, all))
	}
	write(0, 8, want[:2<<20])
	write(0, 8+10<<11, want[10<<20:])
	const blocksOf16MiB = 16 << 11
	for _, s := range []struct {
		name string
		to   int // unit
		lba  uint64
	}{{"to another file", 1, 4096}, {"to another file, not aligned", 1, 4097}, {"within a file", 0, 20 << 11}, {"within a file, not aligned", 0, 40<<11 + 3}} {
		t.Run(s.name, func(t *testing.T) {
			write(byte(s.to), int(s.lba), bytes.Repeat([]byte{0xaa}, 16<<20)) // where there is to be a hole, too
			wantGood(t, "EXTENDED COPY", r.copy(copyList(1, 2, []string{cscdZero, cscdOne}, []string{blocks(0, s.to, blocksOf16MiB, 8, s.lba)})))
			if !bytes.Equal(r.read(byte(s.to), s.lba, blocksOf16MiB), want) {
				t.Error("the copy differs")
			}
			res := do(r.nexus, &r.c, [8]byte{0, byte(s.to)}, fmt.Sprintf("9e 12 %016x 00000018 00 00", s.lba+4<<11), nil, all)
			wantGood(t, "GET LBA STATUS", res)
			if res.in[20] != statusDeallocated {
				t.Errorf("LBA status % x: no hole", res.in)
			}
		})
	}
	status := do(r.nexus, &r.c, [8]byte{}, "84 00 01 00000000000000 000000ff 00 00", nil, all)
	wantGood(t, "RECEIVE COPY STATUS", status)
	wantBytes(t, status.in, unhex("00000008 01 0001 00 01000000"))
}

// SAM-5, section 7.3: an aborted copy stops at the end of a step.
func TestExtendedCopyIsAborted(t *testing.T) {
	r := newCopyRig(t, setup{size: 128 << 20}, setup{})
	wantGood(t, "WRITE(16)", do(r.nexus, &r.c, [8]byte{}, extentCDB(0x8a, 0, 0, 65535), pattern(65535*512, 1), all))
	var abort atomic.Bool
	r.c.Abort = &abort
	for _, s := range []struct {
		name    string
		segment string
		steps   int64 // most bytes that are copied
	}{{"apart", blocks(0, 0, 65535, 0, 65535), maxCopyStep}, {"overlapping", blocks(0, 0, 65535, 0, 1), 256 << 10}} {
		t.Run(s.name, func(t *testing.T) {
			abort.Store(false)
			copied := int64(0)
			r.store.Hook(func(op backendtest.Op, _, n int64) error {
				if op == backendtest.WriteAt {
					copied += n
					abort.Store(true)
				}
				return nil
			})
			list := copyList(7, 2, []string{cscdZero}, []string{s.segment, s.segment})
			wantSense(t, r.copy(list), 0xb, 0x00, 0x00)
			if copied != s.steps {
				t.Errorf("%d bytes were copied, want %d", copied, s.steps)
			}
			abort.Store(false)
			res := do(r.nexus, &r.c, [8]byte{}, "84 00 07 00000000000000 000000ff 00 00", nil, all)
			abort.Store(true)
			wantBytes(t, res.in, unhex(fmt.Sprintf("00000008 02 0000 00 %08x", s.steps)))
			wantSense(t, r.copy(list), 0xb, 0x00, 0x00) // aborted before it begins
			if copied != s.steps {
				t.Errorf("%d bytes were copied by a command that was aborted before", copied-s.steps)
			}
		})
	}
}

// SPC-4, section 6.4.3.2: a list identifier belongs to one copy at a time. RECEIVE COPY STATUS
// reports its progress.
func TestExtendedCopyInProgress(t *testing.T) {
	r := newCopyRig(t, setup{size: 64 << 20}, setup{})
	wantGood(t, "WRITE(16)", do(r.nexus, &r.c, [8]byte{}, extentCDB(0x8a, 0, 0, 16384), pattern(8<<20, 1), all))
	held, let := make(chan struct{}), make(chan struct{})
	r.store.Hook(func(op backendtest.Op, off, _ int64) error {
		if op == backendtest.WriteAt && off == 32<<20+maxCopyStep {
			close(held)
			<-let
		}
		return nil
	})
	list := unhex(copyList(7, 0, []string{cscdZero}, []string{blocks(0, 0, 16384, 0, 65536)}))
	cdb := fmt.Sprintf("83 00 0000000000000000 %08x 00 00", len(list))
	ended := make(chan result)
	go func() {
		var c Command
		ended <- do(r.nexus, &c, [8]byte{}, cdb, list, all)
	}()
	<-held
	status := "84 00 07 00000000000000 000000ff 00 00"
	for range 2 {
		wantBytes(t, do(r.nexus, &r.c, [8]byte{}, status, nil, all).in, unhex("00000008 00 0000 00 00100000"))
	}
	wantSense(t, do(r.nexus, &r.c, [8]byte{}, cdb, list, all), 0x5, 0x00, 0x16) // OPERATION IN PROGRESS
	close(let)
	wantGood(t, "EXTENDED COPY", <-ended)
	wantBytes(t, do(r.nexus, &r.c, [8]byte{}, status, nil, all).in, unhex("00000008 01 0001 00 00800000"))
}

// Copies from each of two units to the other, and commands that hold a range exclusively, do not
// wait for one another in a circle.
func TestExtendedCopyBothWays(t *testing.T) {
	r := newCopyRig(t, setup{size: 2 << 20}, setup{})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			var c Command
			list := unhex(copyList(0, 3, []string{cscdZero, cscdOne}, []string{blocks(i%2, 1-i%2, 4096, 0, 0)}))
			for range 50 {
				if res := do(r.nexus, &c, [8]byte{}, fmt.Sprintf("83 00 0000000000000000 %08x 00 00", len(list)), list, all); res.status != StatusGood {
					t.Errorf("EXTENDED COPY: sense % x", res.sense)
				}
			}
		})
		wg.Go(func() {
			var c Command
			for j := range 200 {
				do(r.nexus, &c, [8]byte{0, byte(i % 2)}, extentCDB(opCompareAndWrite, 0, uint64(j%4096), 1), make([]byte, 1024), all)
			}
		})
	}
	wg.Wait()
}

// A copy in progress stops when the destination would refuse a WRITE.
func TestExtendedCopyLosesDestination(t *testing.T) {
	r := newCopyRig(t, setup{size: 64 << 20}, setup{})
	wantGood(t, "WRITE(16)", do(r.nexus, &r.c, [8]byte{}, extentCDB(0x8a, 0, 0, 32768), pattern(16<<20, 1), all))
	port := testPort
	port.InitiatorName = "iqn.2026-11.io.example:third"
	third := r.inv.NewNexus(port)
	for name, cut := range map[string]func(c *Command){
		"reserved":        func(c *Command) { do(third, c, [8]byte{}, "16", nil, all) },
		"stopped":         func(c *Command) { r.unit.stopped.Store(true) },
		"write protected": func(c *Command) { r.unit.mode.Or(modeSWP) },
	} {
		t.Run(name, func(t *testing.T) {
			var c Command
			do(third, &c, [8]byte{}, "00", nil, all) // takes the unit attention
			var octets int64
			r.store.Hook(func(op backendtest.Op, _, n int64) error {
				if op == backendtest.WriteAt {
					if octets == 0 {
						cut(&c)
					}
					octets += n
				}
				return nil
			})
			wantCopyAborted(t, r.copy(copyList(0, 3, []string{cscdZero}, []string{blocks(0, 0, 32768, 0, 65536)})), 0x0d, 0x01, 0)
			if octets != maxCopyStep {
				t.Errorf("%d bytes were copied, want %d", octets, maxCopyStep)
			}
			r.store.Hook(nil)
			r.unit.stopped.Store(false)
			r.unit.mode.Store(r.unit.modeDefault.Load())
			wantGood(t, "RELEASE(6)", do(third, &c, [8]byte{}, "17", nil, all))
			wantGood(t, "EXTENDED COPY", r.copy(copyList(0, 3, []string{cscdZero}, []string{blocks(0, 0, 32768, 0, 65536)})))
		})
	}
}

// After the answer to PREEMPT AND ABORT, a copy of the preempted initiator writes nothing to the
// unit, even if its EXTENDED COPY is a command for another unit (SPC-4, section 5.13.11.2.6).
func TestExtendedCopyIsPreempted(t *testing.T) {
	r := newCopyRig(t, setup{size: 64 << 20}, setup{})
	const octets = maxCopyStep
	wantGood(t, "WRITE(16)", do(r.nexus, &r.c, [8]byte{}, extentCDB(0x8a, 0, 0, octets/512), pattern(octets, 1), all))
	one := [8]byte{0, 1}
	a := r.inv.NewNexus(portA)
	reserve := func(n *Nexus, sa, typ byte, list []byte) {
		t.Helper()
		var c Command
		wantGood(t, "PERSISTENT RESERVE OUT", do(n, &c, one, fmt.Sprintf("5f %02x %02x 0000 %08x 00", sa, typ, len(list)), list, all))
	}
	do(a, &r.c, one, "00", nil, all) // takes the unit attention
	reserve(r.nexus, prRegister, 0, prList(0, keyB, 0))
	reserve(a, prRegister, 0, prList(0, keyA, 0))
	reserve(a, prReserve, 5, prList(keyA, 0, 0)) // Write Exclusive - Registrants Only

	held, let := make(chan struct{}), make(chan struct{})
	var once sync.Once
	r.other.store.Hook(func(op backendtest.Op, _, _ int64) error {
		if op == backendtest.WriteAt {
			once.Do(func() { close(held); <-let })
		}
		return nil
	})
	list := unhex(copyList(7, 0, []string{cscdZero, cscdOne}, []string{blocks(0, 1, octets/512, 0, 0), blocks(0, 1, 1, 0, 9)}))
	ended := make(chan result)
	go func() {
		var c Command
		ended <- do(r.nexus, &c, [8]byte{}, fmt.Sprintf("83 00 0000000000000000 %08x 00 00", len(list)), list, all)
	}()
	<-held
	time.AfterFunc(50*time.Millisecond, func() { close(let) })
	reserve(a, prPreemptAndAbort, 5, prList(keyA, keyB, 0))
	read := func() []byte {
		p := make([]byte, octets)
		if err := r.other.unit.store.ReadAt(p, 0); err != nil {
			t.Fatal(err)
		}
		return p
	}
	before := read()
	wantCopyAborted(t, <-ended, 0x0d, 0x01, 1)
	if !bytes.Equal(read(), before) {
		t.Error("something was written after the answer to PREEMPT AND ABORT")
	}
}

// A copy reaches a unit only if it would serve the initiator's own commands (SPC-4, section
// 5.11.2).
func TestExtendedCopyThroughStandby(t *testing.T) {
	r := newCopyRig(t, setup{}, setup{})
	wantGood(t, "SET TARGET PORT GROUPS", do(r.nexus, &r.c, [8]byte{0, 1}, "a4 0a 00000000 00000008 00 00", unhex("00000000 02 00 0001"), all))
	for _, s := range []string{blocks(0, 1, 1, 0, 0), blocks(1, 0, 1, 0, 0)} {
		wantCopyAborted(t, r.copy(copyList(0, 3, []string{cscdZero, cscdOne}, []string{s})), 0x0d, 0x01, 0)
	}
}

// A foreign is another target with a unit of 2 MiB, which a copyRig's initiator reaches through no session.
type foreign struct {
	*rig
	port   Port
	closed []*Nexus // nexuses that EXTENDED COPY got
}

func newForeign(t *testing.T, r *rig, s setup) *foreign {
	s.size = 2 << 20
	f := &foreign{rig: newRig(t, s), port: testPort}
	f.unit.opt.Identity = state.Identity{NAA: [8]byte{0x3f, 7: 0xee}, Serial: "3f000000000000ee"}
	f.port.TargetName, f.port.ISID = "iqn.2026-11.io.example:other", [6]byte{5: 9}
	r.nexus.SetOthers(func(has func(*Inventory) bool) *Nexus {
		if !has(f.inv) {
			return nil
		}
		f.closed = append(f.closed, f.inv.NewNexus(f.port))
		return f.closed[len(f.closed)-1]
	})
	return f
}

// EXTENDED COPY reaches a logical unit of another target as the initiator would through a session there: masks, write protection,
// reservations and states of its ports hold.
func TestExtendedCopyBetweenTargets(t *testing.T) {
	r := newRig(t, setup{})
	f := newForeign(t, r, setup{})
	list := func(segments ...string) string { return copyList(7, 0, []string{cscdZero, cscdOne}, segments) }
	run := func(list string) result { return r.run(copyCDB(list), unhex(list)) }
	data := pattern(100*512, 1)
	r.good(extentCDB(0x8a, 0, 7, 100), data)
	wantGood(t, "to the other target and back", run(list(blocks(0, 1, 100, 7, 3000), blocks(1, 0, 50, 3000, 1000))))
	wantBytes(t, f.good(extentCDB(0x88, 0, 3000, 100), nil), data)
	wantBytes(t, r.good(extentCDB(0x88, 0, 1000, 50), nil), data[:50*512])
	if len(f.closed) != 1 {
		t.Errorf("%d nexuses for one list", len(f.closed))
	}
	to, from := list(blocks(0, 1, 8, 7, 0)), list(blocks(1, 0, 8, 3000, 0))
	const reachable, failure = 0x02, 0x01
	for _, x := range []struct {
		name     string
		do, undo func()
		to, from byte // ASCQ of COPY ABORTED 0Dh; 0: GOOD
	}{
		{"no access", func() { f.inv.SetMask(0, func(string) Access { return NoAccess }) }, nil, reachable, reachable},
		{"read only", func() { f.inv.SetMask(0, func(string) Access { return ReadOnly }) }, nil, failure, 0},
		{"read and write", func() { f.inv.SetMask(0, nil) }, nil, 0, 0},
		{"stopped", func() { f.unit.stopped.Store(true) }, func() { f.unit.stopped.Store(false) }, failure, failure},
		{"standby", func() { f.unit.access.Store(&portGroups{1: Standby}) }, func() { f.unit.access.Store(nil) }, failure, failure},
		{"reserved by somebody else", func() {
			for range 3 { // takes the attentions of the mask
				f.run("00", nil)
			}
			f.good("16", nil)
		}, func() { f.good("17", nil) }, failure, failure},
		{"it does not answer", func() { f.unit.detachedIn.Add(1) }, func() { f.unit.detachedIn.Add(-1) }, 0xff, 0xff},
	} {
		t.Run(x.name, func(t *testing.T) {
			x.do()
			for _, y := range []struct {
				list string
				ascq byte
			}{{to, x.to}, {from, x.from}} {
				switch res := run(y.list); y.ascq {
				case 0:
					wantGood(t, "EXTENDED COPY", res)
				case 0xff:
					if res.status != StatusBusy {
						t.Errorf("status %#x, want BUSY", res.status)
					}
				default:
					wantCopyAborted(t, res, 0x0d, y.ascq, 0)
				}
			}
			if x.undo != nil {
				x.undo()
			}
		})
	}
	wantGood(t, "afterwards", run(to))

	// A registration of the port that the initiator has there counts.
	f.good("5f 00 0000000000 0018 00", unhex("0000000000000000 0000000000000001 00000000 00 00 0000")) // REGISTER
	f.good("5f 01 03 00000000 0018 00", unhex("0000000000000001 0000000000000000 00000000 00 00 0000"))
	wantCopyAborted(t, run(to), 0x0d, failure, 0) // exclusive access; the port of f.nexus is another one
	f.port = testPort
	wantGood(t, "as the port that holds the reservation", run(to))

	for _, n := range f.closed {
		if _, open := f.inv.nexuses[n]; open {
			t.Error("a nexus was not closed")
		}
	}
	if len(f.unit.seen) != 1 { // that of the rig
		t.Errorf("the unit knows %d nexuses", len(f.unit.seen))
	}
}

// An initiator that loses access while it copies to another target copies nothing more.
func TestExtendedCopyEndsWithItsAccess(t *testing.T) {
	r := newRig(t, setup{size: 8 << 20})
	f := newForeign(t, r, setup{})
	r.good(extentCDB(0x8a, 0, 0, 4096), pattern(2<<20, 1))
	l := copyList(7, 3, []string{cscdZero, cscdOne}, []string{blocks(0, 1, 4096, 0, 0)})
	l = "00" + l[2:]
	first := true
	f.store.Hook(func(op backendtest.Op, _, _ int64) error {
		if first && (op == backendtest.WriteAt || op == backendtest.CopyFrom) {
			first = false
			go f.inv.SetMask(0, func(string) Access { return NoAccess })
			testkit.Eventually(t, "the new mask", func() bool { return len(f.closed[0].list()) == 0 })
		}
		return nil
	})
	wantCopyAborted(t, r.run(copyCDB(l), unhex(l)), 0x0d, 0x01, 0)
	got := make([]byte, 1<<20)
	if err := f.store.Store.ReadAt(got, 1<<20); err != nil || !bytes.Equal(got, make([]byte, 1<<20)) {
		t.Errorf("the second MiB was copied (%v)", err)
	}
}

// filePair returns a rig with two LUNs of files in that directory.
func filePair(t testing.TB, dir string, size int64) *copyRig {
	t.Helper()
	inv := NewInventory()
	t.Cleanup(func() { inv.Close() })
	for i, id := range []state.Identity{testIdentity, {NAA: [8]byte{0x3f, 7: 0xee}, Serial: "3f000000000000ee"}} {
		store, _, err := backend.OpenFile(backend.FileConfig{Path: filepath.Join(dir, fmt.Sprintf("lun%d.img", i)), Size: size})
		if err != nil {
			t.Fatal(err)
		}
		u, err := New(store, Options{Identity: id})
		if err != nil {
			t.Fatal(err)
		}
		if err := inv.Add(uint16(i), u); err != nil {
			t.Fatal(err)
		}
	}
	r := &copyRig{rig: &rig{t: t, inv: inv}}
	r.nexus = r.login()
	return r
}

// sharingFS returns a directory on a file system that can share blocks.
func sharingFS(t testing.TB, size int) string {
	return backendtest.Mount(t, backendtest.MakeFS(t, "btrfs", size, "-q", "--mixed"), "btrfs", "")
}

// A copy between files on a file system that can share blocks takes no space, also if it begins and ends within a block of the
// file system. A write to the source afterwards does not change the copy.
func TestExtendedCopySharesBlocks(t *testing.T) {
	const count = 12<<11 + 3 // 12 MiB and three blocks
	dir := sharingFS(t, 64<<20)
	r := filePair(t, dir, 16<<20)
	data := pattern(count*512, 1)
	wantGood(t, "WRITE(16)", do(r.nexus, &r.c, [8]byte{}, extentCDB(0x8a, 0, 5, count), data, all))
	free := func() int64 {
		t.Helper()
		for i := range byte(2) {
			wantGood(t, "SYNCHRONIZE CACHE", do(r.nexus, &r.c, [8]byte{0, i}, extentCDB(0x91, 0, 0, 0), nil, all))
		}
		f, err := os.Open(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var st unix.Statfs_t
		if err := errors.Join(unix.Syncfs(int(f.Fd())), unix.Fstatfs(int(f.Fd()), &st)); err != nil {
			t.Fatal(err)
		}
		return int64(st.Bfree) * st.Bsize
	}
	before := free()
	wantGood(t, "EXTENDED COPY", r.copy(copyList(1, 2, []string{cscdZero, cscdOne}, []string{blocks(0, 1, count, 5, 2048+5)})))
	if took := before - free(); took > 2<<20 {
		t.Errorf("the copy of %d bytes took %d", count*512, took)
	}
	wantBytes(t, r.read(1, 2048+5, count), data)
	wantGood(t, "WRITE(16)", do(r.nexus, &r.c, [8]byte{}, extentCDB(0x8a, 0, 5, count), pattern(count*512, 2), all))
	wantBytes(t, r.read(1, 2048+5, count), data)
}

// BenchmarkCopy compares EXTENDED COPY of 32 MiB between two files with READ and WRITE of the same data in pieces of 1 MiB, on the
// file system of the tests, and on one that can share blocks. The initiator is in the process, so READ and WRITE cross no network.
func BenchmarkCopy(b *testing.B) {
	const count = 32 << 11
	for _, fs := range []struct {
		name string
		dir  func() string
	}{{"temporary", b.TempDir}, {"sharing", func() string { return sharingFS(b, 256<<20) }}} {
		b.Run(fs.name, func(b *testing.B) {
			r := filePair(b, fs.dir(), 32<<20)
			wantGood(b, "WRITE(16)", do(r.nexus, &r.c, [8]byte{}, extentCDB(0x8a, 0, 0, count), pattern(count*512, 1), all))
			wantGood(b, "SYNCHRONIZE CACHE", do(r.nexus, &r.c, [8]byte{}, extentCDB(0x91, 0, 0, 0), nil, all))
			list := unhex(copyList(0, 3, []string{cscdZero, cscdOne}, []string{blocks(0, 1, count/2, 0, 0), blocks(0, 1, count/2, count/2, count/2)}))
			cdb := unhex(fmt.Sprintf("83 00 0000000000000000 %08x 00 00", len(list)))
			b.Run("EXTENDED COPY", func(b *testing.B) {
				b.SetBytes(count * 512)
				for b.Loop() {
					wantGood(b, "EXTENDED COPY", doCDB(r.nexus, &r.c, [8]byte{}, cdb, list, all))
				}
			})
			b.Run("READ and WRITE", func(b *testing.B) {
				b.SetBytes(count * 512)
				p := make([]byte, 1<<20)
				for b.Loop() {
					for lba := uint64(0); lba < count; lba += 2048 {
						r.move(b, 0, 0x88, lba, p)
						r.move(b, 1, 0x8a, lba, p)
					}
				}
			})
		})
	}
}

// move reads or writes p, without copies of it.
func (r *copyRig) move(t testing.TB, lun byte, op byte, lba uint64, p []byte) {
	c, n := &r.c, r.nexus
	c.LUN, c.CDB = [8]byte{0, lun}, unhex(extentCDB(op, 0, lba, uint64(len(p)/512)))
	ok := n.Begin(c)
	if ok && op == 0x88 {
		ok = n.Produce(c, p, 0)
	} else if ok {
		ok = n.Consume(c, p, 0)
	}
	n.End(c)
	if !ok || c.Status != StatusGood {
		t.Fatalf("status %#x, sense % x", c.Status, c.Sense())
	}
}
