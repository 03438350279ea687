package lun

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
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
	r.other.unit.opt.Identity = Identity{NAA: [8]byte{0x3f, 7: 0xee}, Serial: "3f000000000000ee"}
	if err := r.inv.Add(1, r.other.unit); err != nil {
		t.Fatal(err)
	}
	r.nexus = r.login()
	return r
}

const (
	cscdZero = "e4 00 0000 01 03 00 08 3001020304050607 000000000000000000000000 00 000200" // LUN 0 by its NAA
	cscdOne  = "e4 00 0000 01 03 00 08 3f000000000000ee 000000000000000000000000 00 000200" // LUN 1
)

// blocks is a segment descriptor 02h.
func blocks(from, to, count int, fromLBA, toLBA uint64) string {
	return fmt.Sprintf("02 00 0018 %04x %04x 0000 %04x %016x %016x", from, to, count, fromLBA, toLBA)
}

// copyList is the parameter list of EXTENDED COPY with a list identifier.
func copyList(id, usage int, cscds, segments []string) string {
	c, s := strings.Join(cscds, ""), strings.Join(segments, "")
	return fmt.Sprintf("%02x %02x %04x 00000000 %08x 00000000", id, usage<<3, len(unhex(c)), len(unhex(s))) + c + s
}

func (r *copyRig) copy(list string) result {
	b := unhex(list)
	return do(r.nexus, &r.c, [8]byte{}, fmt.Sprintf("83 00 0000000000000000 %08x 00 00", len(b)), b, all)
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
	if res.status != statusCheckCondition || !bytes.Equal(res.sense, want) {
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
	wantOctets(t, r.read(1, 2000, count), data)
	wantOctets(t, r.read(0, 2045, 3), data[:3*512])
	wantOctets(t, r.read(0, 7, count), data)

	// Copy status: once, and of this nexus only.
	status := func(n *Nexus) result {
		return do(n, &r.c, [8]byte{}, "84 00 21 00000000000000 000000ff 00 00", nil, all)
	}
	wantField(t, status(r.rig.nexus), 2, noField)
	res := status(r.nexus)
	wantGood(t, "RECEIVE COPY STATUS", res)
	wantOctets(t, res.in, unhex(`
		00000008
		01                    # HDD 0, completed without errors
		0003                  # SEGMENTS PROCESSED
		01                    # TRANSFER COUNT UNITS: KiB
		00000227              # 1103 blocks`))
	wantField(t, status(r.nexus), 2, noField)

	delete(r.nexus.luns[0].copies.of, 0) // from login
	// LU ID TYPE and NUL mean nothing, and without a list identifier there is no status.
	wantGood(t, "LU ID TYPE", r.copy(copyList(0, 3, []string{strings.Replace(cscdZero, "e4 00", "e4 e0", 1)}, []string{blocks(0, 0, 1, 7, 0)})))
	wantOctets(t, r.read(0, 0, 1), data[:512])
	wantField(t, do(r.nexus, &r.c, [8]byte{}, "84 00 00 00000000000000 000000ff 00 00", nil, all), 2, noField)
	wantGood(t, "nothing to do", r.copy(copyList(0, 2, nil, nil)))
	if res := do(r.nexus, &r.c, [8]byte{}, "83 00 0000000000000000 00000000 00 00", nil, all); res.status != statusGood || res.dataOut != 0 {
		t.Errorf("PARAMETER LIST LENGTH 0: %v", res)
	}
	wantField(t, do(r.nexus, &r.c, [8]byte{}, "83 00 0000000000000000 00010001 00 00", nil, all), 10, noField)
	wantField(t, do(r.nexus, &r.c, [8]byte{}, "83 01 0000000000000000 00000000 00 00", nil, all), 1, 4) // LID4
	wantField(t, do(r.nexus, &r.c, [8]byte{}, "84 01 0000000000000000 00000000 00 00", nil, all), 1, 4) // RECEIVE COPY DATA
}

// Ranges that overlap end up as if all had been read before anything is written.
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
	wantOctets(t, r.read(1, 5, 8), data)
	dc := strings.Replace(blocks(0, 1, 2, 16, 100), "02 00", "02 02", 1)
	wantGood(t, "destination", r.copy(copyList(1, 2, []string{cscdZero, four}, []string{dc})))
	wantOctets(t, r.read(1, 100, 3), slices.Concat(data[:8192], make([]byte, 4096)))
	wantCopyAborted(t, r.copy(copyList(1, 2, []string{cscdZero, four}, []string{blocks(0, 1, 63, 16, 5)})), 0x26, 0x0a, 0)
	wantListField(t, r.copy(copyList(1, 2, []string{cscdOne}, nil)), 16+29) // DISK BLOCK LENGTH
}

// Holes stay holes, and cost nothing.
func TestExtendedCopyOfHoles(t *testing.T) {
	r := newCopyRig(t, setup{size: 1 << 30}, setup{})
	wantGood(t, "WRITE", do(r.nexus, &r.c, [8]byte{0, 1}, extentCDB(0x8a, 0, 0, 4096), pattern(2<<20, 1), all))
	reads := r.store.Calls(backendtest.ReadAt)
	wantGood(t, "EXTENDED COPY", r.copy(copyList(1, 2, []string{cscdZero, cscdOne}, []string{blocks(0, 1, 4096, 0, 0)})))
	if r.store.Calls(backendtest.ReadAt) != reads {
		t.Error("a hole was read")
	}
	res := do(r.nexus, &r.c, [8]byte{0, 1}, "9e 12 0000000000000000 00001000 00 00", nil, all)
	wantOctets(t, res.in, unhex("00000014 00000000 0000000000000000 00001000 01 000000"))

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
		{"segment DESCRIPTOR LENGTH", copyList(1, 0, []string{cscdZero}, []string{strings.Replace(seg, "0018", "0014", 1)}), [3]byte{5, 0x26, 0}, 16 + 32 + 2},
		{"three octets of a segment", copyList(1, 0, []string{cscdZero}, []string{seg, "02 00 00"}), [3]byte{5, 0x1a, 0}, 0},
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

// What goes wrong with a segment is COPY ABORTED and says which it was.
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
	wantOctets(t, res.in, unhex(`
		00000008
		02                    # completed with errors
		0001                  # SEGMENTS PROCESSED
		01
		00000004`))
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
	wantOctets(t, r.good("84 03 00 00000000000000 000000ff 00 00", nil), want)
	wantOctets(t, r.good("84 03 00 00000000000000 00000010 00 00", nil), want[:16])
}
