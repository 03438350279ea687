package lun

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// SBC-3, section 5.4.
func TestGetLBAStatus(t *testing.T) {
	r := newRig(t, setup{size: 1 << 40})
	r.good(extentCDB(0x8a, 0, 128, 1), bytes.Repeat([]byte{1}, 512)) // the page of blocks 128 to 255
	want := unhex(`
		00000034 00000000                     # PARAMETER DATA LENGTH: 56-4
		0000000000000000 00000080 01 000000   # deallocated
		0000000000000080 00000080 00 000000   # mapped
		0000000000000100 7fffff00 01 000000`)
	wantBytes(t, r.good("9e 12 0000000000000000 00001000 00 00", nil), want)
	// No more descriptors than there is room for, and the length says so.
	want[3] = 0x14
	wantBytes(t, r.good("9e 12 0000000000000000 00000018 00 00", nil), want[:24])
	wantBytes(t, r.good("9e 12 0000000000000000 00000027 00 00", nil), want[:24])
	wantBytes(t, r.good("9e 12 0000000000000000 00000004 00 00", nil), want[:4])
	wantBytes(t, r.good("9e 12 0000000000000000 00000000 00 00", nil), nil)
	wantBytes(t, r.good("9e 12 0000000000000085 00000018 00 00", nil), unhex(`
		00000014 00000000 0000000000000085 0000007b 00 000000`))
	wantSense(t, r.run("9e 12 0000000080000000 00000018 00 00", nil), 0x5, 0x21, 0x00)
	wantSense(t, r.run("9e 12 ffffffffffffffff 00000018 00 00", nil), 0x5, 0x21, 0x00)
	wantField(t, r.run("9e 12 0000000000000000 00000018 01 00", nil), 14, 0) // REPORT TYPE

	// More blocks than a descriptor can count.
	huge := newRig(t, setup{size: 4 << 40})
	wantBytes(t, huge.good("9e 12 0000000000000000 00001000 00 00", nil), unhex(`
		00000034 00000000
		0000000000000000 ffffffff 01 000000
		00000000ffffffff ffffffff 01 000000
		00000001fffffffe 00000002 01 000000`))

	// As many descriptors as there may be.
	for i := range 300 {
		r.good(extentCDB(0x8a, 0, uint64(i)*256, 1), bytes.Repeat([]byte{1}, 512))
	}
	if in := r.good("9e 12 0000000000000000 00010000 00 00", nil); len(in) != 8+256*16 {
		t.Errorf("%d bytes, want 256 descriptors", len(in))
	}
}

// A store that does not know its holes reports only data.
func TestGetLBAStatusWithoutMap(t *testing.T) {
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	u, err := New(struct{ backend.Store }{m}, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, setup{})
	if err := r.inv.Add(1, u); err != nil {
		t.Fatal(err)
	}
	res := do(r.login(), &r.c, [8]byte{0, 1}, "9e 12 0000000000000001 00001000 00 00", nil, all)
	wantBytes(t, res.in, unhex("00000014 00000000 0000000000000001 000007ff 00 000000"))
}

// An oddStore is a store whose data and holes do not end at block boundaries.
type oddStore struct{ backend.Store }

func (oddStore) Extent(off int64) (mapped bool, n int64, err error) {
	for _, end := range []int64{1000, 1100, 5000, 5500, 1 << 20} {
		if off < end {
			return mapped, end - off, nil
		}
		mapped = !mapped
	}
	return false, 0, backend.ErrRange
}

// A block takes space if a part of it does.
func TestGetLBAStatusWithinBlocks(t *testing.T) {
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	u, err := New(oddStore{m}, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, setup{})
	if err := r.inv.Add(1, u); err != nil {
		t.Fatal(err)
	}
	res := do(r.login(), &r.c, [8]byte{0, 1}, "9e 12 0000000000000000 00001000 00 00", nil, all)
	wantBytes(t, res.in, unhex(`
		00000054 00000000
		0000000000000000 00000001 01 000000   # 0 to 512
		0000000000000001 00000002 00 000000   # 512 to 1536: data at 1000 to 1100
		0000000000000003 00000006 01 000000   # 1536 to 4608
		0000000000000009 00000002 00 000000   # 4608 to 5632: data at 5000 to 5500
		000000000000000b 000007f5 01 000000`))
}

// The reported holes are those of the file.
func TestGetLBAStatusOfFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lun.img")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s, _, err := backend.OpenFile(backend.FileConfig{Path: path, Size: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if s.Info().DiscardGranularity == 0 {
		backendtest.Unavailable(t, "the file system punches no holes")
	}
	u, err := New(s, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, setup{})
	if err := r.inv.Add(1, u); err != nil {
		t.Fatal(err)
	}
	n, lun := r.login(), [8]byte{0, 1}
	status := func() []byte {
		return do(n, &r.c, lun, "9e 12 0000000000000000 00001000 00 00", nil, all).in
	}
	wantBytes(t, status(), unhex("00000014 00000000 0000000000000000 00002000 01 000000"))
	wantGood(t, "WRITE", do(n, &r.c, lun, extentCDB(0x8a, 0, 0x800, 0x1000), bytes.Repeat([]byte{1}, 2<<20), all))
	unmap := unhex("0016 0010 00000000  0000000000001000 00000800 00000000")
	wantGood(t, "UNMAP", do(n, &r.c, lun, "42 00 00000000 00 0018 00", unmap, all))
	wantBytes(t, status(), unhex(`
		00000034 00000000
		0000000000000000 00000800 01 000000
		0000000000000800 00000800 00 000000
		0000000000001000 00001000 01 000000`))
}

// SBC-3, sections 5.17 and 5.18: empty lists, in any format.
func TestReadDefectData(t *testing.T) {
	r := newRig(t, setup{})
	for _, s := range []struct{ cdb, want string }{
		{"37 00 00 00000000 0020 00", "00 00 0000"},
		{"37 00 1d 00000000 0020 00", "00 1d 0000"}, // PLISTV, GLISTV, format 101b
		{"37 00 08 00000000 0002 00", "00 08"},
		{"b7 00 00000000 00000020 00 00", "00 00 0000 00000000"},
		{"b7 15 00000000 00000020 00 00", "00 15 0000 00000000"},
		{"b7 15 ffffffff 00000003 00 00", "00 15 00"}, // ADDRESS DESCRIPTOR INDEX beyond the end
	} {
		t.Run(strings.ReplaceAll(s.cdb, " ", ""), func(t *testing.T) {
			wantBytes(t, r.good(s.cdb, nil), unhex(s.want))
		})
	}
}
