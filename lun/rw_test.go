package lun

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// SBC-4, section 4.18.1: INFORMATION has the first LBA beyond the unit, if four bytes have room
// for it.
func TestFirstInvalidLBA(t *testing.T) {
	r := newRig(t, setup{size: 1 << 20}) // 2048 blocks
	descriptors := unhex("0026 0020 00000000  0000000000000000 00000008 00000000  00000000000007ff 00000002 00000000")
	for _, tt := range []struct {
		cdb  string
		out  []byte
		want uint64
	}{
		{extentCDB(0x28, 0, 2047, 2), nil, 2048},
		{extentCDB(0x88, 0, 0, 4096), nil, 2048},
		{extentCDB(0x8a, 0, 5000, 1), make([]byte, 512), 5000},
		{extentCDB(0x35, 0, 2048, 0), nil, 2048},
		{extentCDB(0x93, 0, 0xffffffff, 1), make([]byte, 512), 0xffffffff},
		{extentCDB(0x88, 0, 1<<32, 1), nil, 1 << 32},
		{extentCDB(0x88, 0, 1<<64-1, 2), nil, 1<<64 - 1},
		{"42 00 00000000 00 0028 00", descriptors, 2048},
		{"9e 12 0000000000000900 00000018 00 00", nil, 0x900},
	} {
		want := unhex("70 00 05 00000000 0a 00000000 21 00 00 000000")
		if tt.want < 1<<32 {
			want[0] |= 0x80 // VALID
			binary.BigEndian.PutUint32(want[3:], uint32(tt.want))
		}
		if res := r.run(tt.cdb, tt.out); !bytes.Equal(res.sense, want) {
			t.Errorf("%s: sense % x, want % x", tt.cdb, res.sense, want)
		}
	}
}

// extentCDB returns a medium access CDB with an operation code of any group, with flags in byte 1
// if it has any.
func extentCDB(op, flags byte, lba, count uint64) string {
	switch op >> 5 {
	case 0:
		return fmt.Sprintf("%02x %06x %02x 00", op, lba, count)
	case 1, 2:
		return fmt.Sprintf("%02x %02x %08x 00 %04x 00", op, flags, lba, count)
	case 4:
		return fmt.Sprintf("%02x %02x %016x %08x 00 00", op, flags, lba, count)
	default:
		return fmt.Sprintf("%02x %02x %08x %08x 00 00", op, flags, lba, count)
	}
}

var (
	readOps  = []byte{0x08, 0x28, 0xa8, 0x88}
	writeOps = []byte{0x0a, 0x2a, 0xaa, 0x8a}
	fourGiB  = setup{size: 4 << 30, blockSize: 512}
)

// All forms of READ read what any form of WRITE wrote, at the right place, and nothing around it
// changes.
func TestReadWrite(t *testing.T) {
	for _, blockSize := range []int{512, 4096} {
		r := newRig(t, setup{size: 16 << 20, blockSize: uint32(blockSize)})
		model := make([]byte, 16<<20)
		for i, op := range writeOps {
			for _, e := range []struct{ lba, count int }{{0, 1}, {7, 3}, {90, 100}, {16<<20/blockSize - 9, 9}} {
				data := pattern(e.count*blockSize, i+e.lba)
				res := r.run(extentCDB(op, 0, uint64(e.lba), uint64(e.count)), data)
				wantGood(t, "WRITE", res)
				if res.dataOut != uint64(len(data)) || res.dataIn != 0 {
					t.Errorf("DataOut %d, DataIn %d, want %d, 0", res.dataOut, res.dataIn, len(data))
				}
				copy(model[e.lba*blockSize:], data)
				for _, op := range readOps {
					lba := max(0, e.lba-4)
					count := min(110, len(model)/blockSize-lba)
					res := r.run(extentCDB(op, 0, uint64(lba), uint64(count)), nil)
					wantGood(t, "READ", res)
					if res.dataIn != uint64(count*blockSize) || res.dataOut != 0 {
						t.Errorf("DataIn %d, DataOut %d, want %d, 0", res.dataIn, res.dataOut, count*blockSize)
					}
					if !bytes.Equal(res.in, model[lba*blockSize:][:count*blockSize]) {
						t.Fatalf("block size %d: READ %02x of %d blocks at %d differs", blockSize, op, count, lba)
					}
				}
			}
		}
	}
}

// SBC-3, sections 5.8 to 5.11 and 5.32 to 5.35: where the extent may lie.
func TestExtent(t *testing.T) {
	const blocks = 2048
	type access struct {
		op         byte
		lba, count uint64
	}
	r := newRig(t, setup{})
	ops := slices.Concat(readOps[1:], writeOps[1:], []byte{0x2f, 0xaf, 0x8f, 0x35, 0x91, 0x41, 0x93,
		0x2e, 0xae, 0x8e, 0x8b, 0x34, 0x90})
	isWriteSame := func(op byte) bool { return op == 0x41 || op == 0x93 }
	for _, op := range ops {
		out := []access{{op, blocks, 0}, {op, blocks, 1}, {op, blocks - 1, 2}, {op, 0, blocks + 1}, {op, math.MaxUint32, 0},
			{op, math.MaxUint32, 1}, {op, 1 << 31, 2}, {op, 0, math.MaxUint16}, {op, math.MaxUint32, math.MaxUint16}}
		if op>>5 == 4 {
			out = append(out, access{op, math.MaxUint64, 0}, access{op, math.MaxUint64, 1}, access{op, math.MaxUint64, math.MaxUint32},
				access{op, 1 << 63, 1}, access{op, 1 << 55, 1}, access{op, 1<<55 - 1, 2}, access{op, math.MaxUint64 - math.MaxUint32, math.MaxUint32}, access{op, 0, math.MaxUint32})
		}
		for _, a := range out {
			wantSense(t, r.run(extentCDB(a.op, 0, a.lba, a.count), make([]byte, 512)), 0x5, 0x21, 0x00)
		}
		for _, a := range []access{{op, 0, 0}, {op, blocks - 1, 0}, {op, blocks - 1, 1}, {op, 0, blocks}} {
			out := make([]byte, a.count*512)
			if isWriteSame(op) {
				out = make([]byte, 512)
			}
			res := r.run(extentCDB(a.op, 0, a.lba, a.count), out)
			wantGood(t, fmt.Sprintf("%02x %d+%d", a.op, a.lba, a.count), res)
		}
	}
	// A length of 0 means 256 blocks in 6 bytes.
	if in := r.good("08 000000 00 00", nil); len(in) != 256*512 {
		t.Errorf("READ(6) of length 0 reads %d bytes", len(in))
	}
	if res := r.run("0a 000000 00 00", make([]byte, 256*512)); res.dataOut != 256*512 {
		t.Errorf("WRITE(6) of length 0 writes %d bytes", res.dataOut)
	}
	wantSense(t, r.run("08 000701 00 00", nil), 0x5, 0x21, 0x00)
	wantSense(t, r.run("08 1fffff 01 00", nil), 0x5, 0x21, 0x00)
	r.good("08 0007ff 01 00", nil)
}

// The unit enforces the limits of VPD page B0h.
func TestTransferLimits(t *testing.T) {
	r := newRig(t, fourGiB)
	const most = 32 << 20 / 512
	for _, op := range []byte{0xa8, 0x88, 0xaa, 0x8a, 0x8f, 0xaf, 0xae, 0x8e, 0x8b} {
		wantField(t, r.run(extentCDB(op, 0, 0, most+1), nil), lengthOffset([]byte{op}), noField)
	}
	if res := do(r.nexus, &r.c, [8]byte{}, extentCDB(0x88, 0, 1, most), nil, 512); res.status != StatusGood || res.dataIn != 32<<20 {
		t.Errorf("the longest READ: %v", res)
	}
	const mostSame = 256<<20/512 - 8
	wantField(t, r.run(extentCDB(0x93, 0, 0, mostSame+1), make([]byte, 512)), 10, noField)
	r.good(extentCDB(0x93, 0, 1, mostSame), make([]byte, 512))
	// A length of 0 is all to the end: never (WSNZ is 1) where that could be too
	// much, and from any block where it cannot.
	for _, lba := range []uint64{0, 4<<30/512 - mostSame, 4<<30/512 - 1} {
		wantField(t, r.run(extentCDB(0x93, 0, lba, 0), make([]byte, 512)), 10, noField)
		wantField(t, r.run(extentCDB(0x41, 0, lba, 0), make([]byte, 512)), 7, noField)
	}
	small := newRig(t, setup{size: mostSame * 512})
	for _, op := range []byte{0x93, 0x41} {
		small.good(extentCDB(0x8a, 0, mostSame-2, 2), pattern(1024, 1))
		small.good(extentCDB(op, 0, mostSame-1, 0), make([]byte, 512))
		wantBytes(t, small.good(extentCDB(0x88, 0, mostSame-2, 2), nil), append(pattern(1024, 1)[:512], make([]byte, 512)...))
		small.good(extentCDB(op, 0, 0, 0), make([]byte, 512))
		wantBytes(t, small.good(extentCDB(0x88, 0, mostSame-2, 2), nil), make([]byte, 1024))
	}
	r.good(extentCDB(0x91, 0, 0, 4<<30/512), nil) // SYNCHRONIZE CACHE has no limit
	r.good(extentCDB(0x90, 0, 0, 4<<30/512), nil) // neither has PRE-FETCH

	wantField(t, r.run(extentCDB(0x89, 0, 0, 65), nil), 13, noField)
	if res := do(r.nexus, &r.c, [8]byte{}, extentCDB(0x89, 0, 0, 64), make([]byte, 64<<10), all); res.status != StatusGood || res.dataOut != 64<<10 {
		t.Errorf("the longest COMPARE AND WRITE: %v", res)
	}
	wantField(t, r.run(extentCDB(0x9c, 0, 0, 2049), nil), 12, noField)
	r.good(extentCDB(0x9c, 0, 0, 2048), make([]byte, 1<<20))
}

// The last block of 4 GiB and beyond: no arithmetic in 32 bits.
func TestReadWriteBeyond4GiB(t *testing.T) {
	r := newRig(t, setup{size: 3 << 40})
	lba := uint64(3<<40/512 - 8)
	data := pattern(8*512, 5)
	r.good(extentCDB(0x8a, 0, lba, 8), data)
	wantBytes(t, r.good(extentCDB(0x88, 0, lba, 8), nil), data)
	wantBytes(t, r.good(extentCDB(0x88, 0, uint64(uint32(lba)), 8), nil), make([]byte, 8*512))
	wantSense(t, r.run(extentCDB(0x88, 0, lba, 9), nil), 0x5, 0x21, 0x00)
}

// The initiator expects less than the CDB says. DataIn and DataOut stay what the command itself
// transfers.
func TestCommandWithLessDataThanItsCDB(t *testing.T) {
	old, data := pattern(8*512, 1), pattern(8*512, 2)
	for _, edtl := range []int{0, 1, 200, 512, 513, 1024, 4095, 4096} {
		r := newRig(t, setup{})
		r.good("2a 00 00000000 00 0008 00", old)
		written := edtl

		res := do(r.nexus, &r.c, [8]byte{}, "28 00 00000000 00 0008 00", nil, edtl)
		wantGood(t, "READ", res)
		if wantBytes(t, res.in, old[:edtl]); res.dataIn != 4096 { // ISCSI-11.4-4
			t.Errorf("DataIn %d, want 4096", res.dataIn)
		}
		for _, op := range []string{"2a", "2e"} {
			r.c.Expected = uint64(edtl)
			res = r.run(op+" 00 00000000 00 0008 00", data[:edtl])
			r.c.Expected = 0
			if r.c.Overflow != (edtl%512 != 0) {
				t.Errorf("Overflow %t with %d bytes", r.c.Overflow, edtl)
			}
			if edtl%512 != 0 { // the data would end within a block
				wantSense(t, res, 0x5, 0x0e, 0x03) // INVALID FIELD IN COMMAND INFORMATION UNIT
				written = 0
			} else if wantGood(t, "WRITE", res); res.dataOut != 4096 || res.consumed != edtl { // ISCSI-11.4-4
				t.Errorf("DataOut %d, consumed %d; want 4096, %d", res.dataOut, res.consumed, edtl)
			}
			wantBytes(t, r.good("28 00 00000000 00 0008 00", nil), slices.Concat(data[:written], old[written:]))
		}
	}
	t.Run("all or nothing", func(t *testing.T) {
		r := newRig(t, setup{})
		r.good("2a 00 00000000 00 0008 00", old)
		unmap := append(unhex("0016 0010 00000000  0000000000000000 00000008 00000000"), make([]byte, 100)...)
		for _, s := range []struct {
			cdb string
			out []byte
		}{
			{"41 00 00000000 00 0008 00", data[:512]},
			{"93 08 0000000000000000 00000008 00 00", make([]byte, 512)},
			{"42 00 00000000 00 007c 00", unmap},
			{"2f 02 00000000 00 0008 00", old},
			{"2f 06 00000000 00 0001 00", old[:512]},
		} {
			for _, n := range []int{0, 1, 30, 511} {
				if n < len(s.out) {
					wantSense(t, r.run(s.cdb, s.out[:n]), 0x5, 0x0e, 0x03) // INVALID FIELD IN COMMAND INFORMATION UNIT
				}
			}
			wantBytes(t, r.good("28 00 00000000 00 0008 00", nil), old)
		}
	})
}

// The unit is honest about its cache: the calls to the store make data durable before the status
// that promises it.
func TestStatusPromisesDurability(t *testing.T) {
	block, fuaBit, none := make([]byte, 512), byte(0x08), byte(0)
	block[0] = 1
	unmap := unhex("0016 0010 00000000  0000000000000000 00000008 00000000")
	noCache := setup{}
	cache := setup{info: volatile}
	through := setup{info: volatile, opt: Options{WriteThrough: true}}
	for _, s := range []struct {
		name  string
		setup setup
		cdb   string
		out   []byte
		want  map[backendtest.Op]int
	}{
		{"WRITE, no cache", noCache, extentCDB(0x2a, none, 0, 1), block, map[backendtest.Op]int{backendtest.WriteAt: 1}},
		{"WRITE FUA, no cache", noCache, extentCDB(0x2a, fuaBit, 0, 1), block, map[backendtest.Op]int{backendtest.WriteAt: 1}},
		{"READ FUA, no cache", noCache, extentCDB(0x28, fuaBit, 0, 1), nil, map[backendtest.Op]int{backendtest.ReadAt: 1}},
		{"WRITE(6), cache", cache, extentCDB(0x0a, 0, 0, 1), block, map[backendtest.Op]int{backendtest.WriteAt: 1}},
		{"WRITE(6) LBA bits are no FUA", setup{size: 1 << 30, info: volatile}, extentCDB(0x0a, 0, 0x080000, 1), block, map[backendtest.Op]int{backendtest.WriteAt: 1}},
		{"WRITE(10), cache", cache, extentCDB(0x2a, none, 0, 1), block, map[backendtest.Op]int{backendtest.WriteAt: 1}},
		{"WRITE(10) DPO, cache", cache, extentCDB(0x2a, 0x10, 0, 1), block, map[backendtest.Op]int{backendtest.WriteAt: 1}},
		{"WRITE(10) FUA", cache, extentCDB(0x2a, fuaBit, 0, 1), block, map[backendtest.Op]int{backendtest.WriteDurable: 1}},
		{"WRITE(12) FUA", cache, extentCDB(0xaa, fuaBit, 0, 1), block, map[backendtest.Op]int{backendtest.WriteDurable: 1}},
		{"WRITE(16) FUA", cache, extentCDB(0x8a, fuaBit, 0, 1), block, map[backendtest.Op]int{backendtest.WriteDurable: 1}},
		{"READ(10), cache", cache, extentCDB(0x28, none, 0, 1), nil, map[backendtest.Op]int{backendtest.ReadAt: 1}},
		{"READ(10) FUA", cache, extentCDB(0x28, fuaBit, 0, 1), nil, map[backendtest.Op]int{backendtest.Sync: 1, backendtest.ReadAt: 1}},
		{"READ(12) FUA", cache, extentCDB(0xa8, fuaBit, 0, 1), nil, map[backendtest.Op]int{backendtest.Sync: 1, backendtest.ReadAt: 1}},
		{"READ(16) FUA", cache, extentCDB(0x88, fuaBit, 0, 1), nil, map[backendtest.Op]int{backendtest.Sync: 1, backendtest.ReadAt: 1}},
		{"SYNCHRONIZE CACHE(10)", cache, extentCDB(0x35, none, 0, 0), nil, map[backendtest.Op]int{backendtest.Sync: 1}},
		{"SYNCHRONIZE CACHE(10) IMMED", cache, extentCDB(0x35, 0x02, 0, 1), nil, map[backendtest.Op]int{backendtest.Sync: 1}},
		{"SYNCHRONIZE CACHE(16) SYNC_NV", cache, extentCDB(0x91, 0x04, 5, 9), nil, map[backendtest.Op]int{backendtest.Sync: 1}},
		{"PRE-FETCH(10)", cache, extentCDB(0x34, none, 0, 8), nil, map[backendtest.Op]int{backendtest.Prefetch: 1}},
		{"PRE-FETCH(16) IMMED", cache, extentCDB(0x90, 0x02, 0, 0), nil, map[backendtest.Op]int{backendtest.Prefetch: 1}},
		{"WRITE AND VERIFY(10), cache", cache, extentCDB(0x2e, none, 0, 1), block, map[backendtest.Op]int{backendtest.WriteDurable: 1, backendtest.ReadAt: 1}},
		{"WRITE AND VERIFY(16) BYTCHK, cache", cache, extentCDB(0x8e, 0x02, 0, 1), block, map[backendtest.Op]int{backendtest.WriteDurable: 1, backendtest.ReadAt: 1}},
		{"WRITE AND VERIFY(12), no cache", noCache, extentCDB(0xae, none, 0, 1), block, map[backendtest.Op]int{backendtest.WriteAt: 1, backendtest.ReadAt: 1}},
		{"ORWRITE(16), cache", cache, extentCDB(0x8b, none, 0, 1), block, map[backendtest.Op]int{backendtest.ReadAt: 1, backendtest.WriteAt: 1}},
		{"ORWRITE(16) FUA", cache, extentCDB(0x8b, fuaBit, 0, 1), block, map[backendtest.Op]int{backendtest.ReadAt: 1, backendtest.WriteDurable: 1}},
		{"COMPARE AND WRITE, cache", cache, extentCDB(0x89, none, 0, 1), make([]byte, 1024), map[backendtest.Op]int{backendtest.ReadAt: 1, backendtest.WriteAt: 1}},
		{"COMPARE AND WRITE FUA", cache, extentCDB(0x89, fuaBit, 0, 1), make([]byte, 1024), map[backendtest.Op]int{backendtest.ReadAt: 1, backendtest.WriteDurable: 1}},
		{"WRITE ATOMIC(16), cache", cache, extentCDB(0x9c, none, 0, 1), block, map[backendtest.Op]int{backendtest.ReadAt: 1, backendtest.WriteAt: 1}},
		{"WRITE ATOMIC(16) FUA", cache, extentCDB(0x9c, fuaBit, 0, 1), block, map[backendtest.Op]int{backendtest.ReadAt: 1, backendtest.WriteDurable: 1}},
		{"WRITE SAME, cache", cache, extentCDB(0x41, none, 0, 8), block, map[backendtest.Op]int{backendtest.WriteAt: 1}},
		{"WRITE SAME zeros, cache", cache, extentCDB(0x41, none, 0, 8), make([]byte, 512), map[backendtest.Op]int{backendtest.Zero: 1}},
		{"UNMAP, cache", cache, "42 00 00000000 00 0018 00", unmap, map[backendtest.Op]int{backendtest.Discard: 1}},
		{"stop", cache, "1b", nil, map[backendtest.Op]int{backendtest.Sync: 1}},
		{"start", cache, "1b 00 0000 01 00", nil, nil},

		{"WRITE(6), write-through", through, extentCDB(0x0a, 0, 0, 1), block, map[backendtest.Op]int{backendtest.WriteDurable: 1}},
		{"WRITE(10), write-through", through, extentCDB(0x2a, none, 0, 1), block, map[backendtest.Op]int{backendtest.WriteDurable: 1}},
		{"WRITE(16) FUA, write-through", through, extentCDB(0x8a, fuaBit, 0, 1), block, map[backendtest.Op]int{backendtest.WriteDurable: 1}},
		{"READ FUA, write-through", through, extentCDB(0x28, fuaBit, 0, 1), nil, map[backendtest.Op]int{backendtest.ReadAt: 1}},
		{"COMPARE AND WRITE, write-through", through, extentCDB(0x89, none, 0, 1), make([]byte, 1024), map[backendtest.Op]int{backendtest.ReadAt: 1, backendtest.WriteDurable: 1}},
		{"ORWRITE(16), write-through", through, extentCDB(0x8b, none, 0, 1), block, map[backendtest.Op]int{backendtest.ReadAt: 1, backendtest.WriteDurable: 1}},
		{"WRITE SAME(10), write-through", through, extentCDB(0x41, none, 0, 8), block, map[backendtest.Op]int{backendtest.WriteAt: 1, backendtest.Sync: 1}},
		{"WRITE SAME(16) zeros, write-through", through, extentCDB(0x93, none, 0, 8), make([]byte, 512), map[backendtest.Op]int{backendtest.Zero: 1, backendtest.Sync: 1}},
		{"WRITE SAME(16) UNMAP, write-through", through, extentCDB(0x93, 0x08, 0, 8), make([]byte, 512), map[backendtest.Op]int{backendtest.Discard: 1, backendtest.Sync: 1}},
		{"WRITE SAME(16) NDOB, write-through", through, extentCDB(0x93, 0x01, 0, 8), nil, map[backendtest.Op]int{backendtest.Zero: 1, backendtest.Sync: 1}},
		{"UNMAP, write-through", through, "42 00 00000000 00 0018 00", unmap, map[backendtest.Op]int{backendtest.Discard: 1, backendtest.Sync: 1}},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newRig(t, s.setup)
			r.good(s.cdb, s.out)
			for op := backendtest.ReadAt; op <= backendtest.Prefetch; op++ {
				if got := r.store.Calls(op); got != s.want[op] {
					t.Errorf("%v was called %d times, want %d", op, got, s.want[op])
				}
			}
		})
	}
}

// SBC-3, sections 5.43 and 5.44.
func TestWriteSame(t *testing.T) {
	const mib = 1 << 20
	block := pattern(512, 4)
	for _, s := range []struct {
		name  string
		cdb   string
		out   []byte
		want  []byte // what each block is then
		calls backendtest.Op
	}{
		{"10", extentCDB(0x41, 0, 3, 600), block, block, backendtest.WriteAt},
		{"16", extentCDB(0x93, 0, 3, 600), block, block, backendtest.WriteAt},
		{"zeros", extentCDB(0x93, 0, 3, 600), make([]byte, 512), make([]byte, 512), backendtest.Zero},
		{"UNMAP of zeros", extentCDB(0x41, 0x08, 3, 600), make([]byte, 512), make([]byte, 512), backendtest.Discard},
		{"UNMAP of data writes it", extentCDB(0x93, 0x08, 3, 600), block, block, backendtest.WriteAt},
		{"NDOB", extentCDB(0x93, 0x01, 3, 600), nil, make([]byte, 512), backendtest.Zero},
		{"NDOB, UNMAP", extentCDB(0x93, 0x09, 3, 600), nil, make([]byte, 512), backendtest.Discard},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newRig(t, setup{})
			old := pattern(mib, 8)
			r.good(extentCDB(0x2a, 0, 0, 2048), old)
			res := r.run(s.cdb, s.out)
			wantGood(t, s.name, res)
			if res.dataOut != uint64(len(s.out)) {
				t.Errorf("DataOut %d, want %d", res.dataOut, len(s.out))
			}
			if r.store.Calls(s.calls) == 0 {
				t.Errorf("%v was not called", s.calls)
			}
			want := slices.Concat(old[:3*512], bytes.Repeat(s.want, 600), old[603*512:])
			if !bytes.Equal(r.good(extentCDB(0x28, 0, 0, 2048), nil), want) {
				t.Error("the medium is not what was to be written")
			}
		})
	}
	// More than the scratch memory holds, of a block that is no part of it.
	r := newRig(t, setup{size: 16 * mib, blockSize: 4096})
	big := pattern(4096, 6)
	r.good(extentCDB(0x93, 0, 1, 200), big)
	if !bytes.Equal(r.good(extentCDB(0x88, 0, 0, 202), nil), slices.Concat(make([]byte, 4096), bytes.Repeat(big, 200), make([]byte, 4096))) {
		t.Error("a long WRITE SAME went wrong")
	}
	other := pattern(4096, 7) // the block of the command before is forgotten
	r.good(extentCDB(0x93, 0, 1, 2), other)
	wantBytes(t, r.good(extentCDB(0x88, 0, 1, 3), nil), slices.Concat(other, other, big))
	for _, cdb := range []string{extentCDB(0x41, 0x10, 0, 1), extentCDB(0x93, 0x18, 0, 1)} { // ANCHOR: ANC_SUP is 0
		wantField(t, r.run(cdb, big), 1, 4)
	}
	thickRig := newRig(t, setup{info: thick})
	wantField(t, thickRig.run(extentCDB(0x93, 0x08, 0, 1), block), 1, 3) // UNMAP
	thickRig.good(extentCDB(0x93, 0x00, 0, 1), block)
}

// SBC-3, section 5.28.
func TestUnmap(t *testing.T) {
	old := pattern(1<<20, 8)
	desc := func(lba, count uint64) string { return fmt.Sprintf("%016x %08x 00000000", lba, count) }
	for _, s := range []struct {
		name, list string
		gone       [][2]int // blocks [from, to) that read as zeros then
		fail       func(t testing.TB, res result)
	}{
		{name: "one", list: "0016 0010 00000000" + desc(2, 300), gone: [][2]int{{2, 302}}},
		{name: "two", list: "0026 0020 00000000" + desc(2, 3) + desc(2047, 1), gone: [][2]int{{2, 5}, {2047, 2048}}},
		{name: "all", list: "0016 0010 00000000" + desc(0, 2048), gone: [][2]int{{0, 2048}}},
		{name: "none", list: "0006 0000 00000000"},
		{name: "no blocks", list: "0016 0010 00000000" + desc(2048, 0)},
		{name: "an incomplete descriptor is ignored", list: "001e 0018 00000000" + desc(2, 3) + "0000000000000007", gone: [][2]int{{2, 5}}},
		{name: "more list than descriptors", list: "0016 0010 00000000" + desc(2, 3) + desc(7, 1), gone: [][2]int{{2, 5}}},
		{name: "less list than descriptors", list: "0026 0020 00000000" + desc(2, 3),
			fail: func(t testing.TB, res result) { wantSense(t, res, 0x5, 0x1a, 0x00) }},
		{name: "half a header", list: "0016 0010",
			fail: func(t testing.TB, res result) { wantSense(t, res, 0x5, 0x1a, 0x00) }},
		{name: "beyond the end", list: "0026 0020 00000000" + desc(2, 3) + desc(2047, 2),
			fail: func(t testing.TB, res result) { wantSense(t, res, 0x5, 0x21, 0x00) }},
		{name: "LBA overflow", list: "0016 0010 00000000" + desc(math.MaxUint64, math.MaxUint32),
			fail: func(t testing.TB, res result) { wantSense(t, res, 0x5, 0x21, 0x00) }},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newRig(t, setup{})
			r.good(extentCDB(0x2a, 0, 0, 2048), old)
			list := unhex(s.list)
			res := r.run(fmt.Sprintf("42 00 00000000 00 %04x 00", len(list)), list)
			if s.fail != nil {
				s.fail(t, res)
			} else {
				wantGood(t, s.name, res)
			}
			want := bytes.Clone(old)
			for _, g := range s.gone {
				clear(want[g[0]*512 : g[1]*512])
			}
			if !bytes.Equal(r.good(extentCDB(0x28, 0, 0, 2048), nil), want) {
				t.Error("the medium is not what it should be")
			}
		})
	}

	// The limits of VPD page B0h: INVALID FIELD IN PARAMETER LIST.
	r := newRig(t, fourGiB)
	const mostBlocks = 512 << 20 / 512
	list := unhex("0026 0020 00000000" + desc(0, mostBlocks-1) + desc(0, 2))
	res := r.run("42 00 00000000 00 0028 00", list)
	wantSense(t, res, 0x5, 0x26, 0x00)
	wantBytes(t, res.sense[15:], unhex("80 0020")) // SKSV, C/D 0; byte 32: the second NUMBER OF LOGICAL BLOCKS
	list[39-4] = 1
	r.good("42 00 00000000 00 0028 00", list)

	list = make([]byte, 8+257*16)
	copy(list, unhex("1016 1010"))
	res = r.run(fmt.Sprintf("42 00 00000000 00 %04x 00", len(list)), list)
	wantSense(t, res, 0x5, 0x26, 0x00)
	wantBytes(t, res.sense[15:], unhex("80 0002"))
	copy(list, unhex("1006 1000"))
	r.good(fmt.Sprintf("42 00 00000000 00 %04x 00", len(list)), list)

	if res := r.run("42 00 00000000 00 0000 00", nil); res.status != StatusGood || res.dataOut != 0 {
		t.Errorf("PARAMETER LIST LENGTH 0: %v", res)
	}
	wantField(t, r.run("42 01 00000000 00 0000 00", nil), 1, 0) // ANCHOR
}

// SBC-3, section 5.29.
func TestVerify(t *testing.T) {
	r := newRig(t, setup{})
	data := pattern(300*512, 3)
	r.good(extentCDB(0x2a, 0, 5, 300), data)
	wrong := func(at int) []byte {
		b := bytes.Clone(data)
		b[at] ^= 0x10
		return b
	}
	for _, op := range []byte{0x2f, 0xaf, 0x8f} {
		for _, bytchk := range []byte{0x00, 0x10, 0x02, 0x12} { // with and without DPO
			r.good(extentCDB(op, bytchk, 5, 300), data)
		}
		reads := r.store.Calls(backendtest.ReadAt)
		if res := r.run(extentCDB(op, 0, 5, 300), nil); res.dataOut != 0 || r.store.Calls(backendtest.ReadAt) == reads {
			t.Error("BYTCHK 00b transfers data, or does not read the medium")
		}
		for _, at := range []int{0, 4095, 4096, 150 * 512, 300*512 - 1} {
			res := r.run(extentCDB(op, 0x02, 5, 300), wrong(at))
			if res.status != StatusCheckCondition {
				t.Fatalf("a difference at %d was not found", at)
			}
			wantBytes(t, res.sense, unhex(fmt.Sprintf("f0 00 0e %08x 0a 00000000 1d 00 00 000000", at)))
		}

		r.good(extentCDB(0x93, 0, 400, 100), data[:512])
		res := r.run(extentCDB(op, 0x06, 400, 100), data[:512])
		if wantGood(t, "BYTCHK 11b", res); res.dataOut != 512 {
			t.Errorf("DataOut %d, want 512", res.dataOut)
		}
		res = r.run(extentCDB(op, 0x06, 400, 101), data[:512])
		if res.status != StatusCheckCondition {
			t.Fatal("BYTCHK 11b: a difference was not found")
		}
		// Block 500 is zeros, and data does not begin with one.
		wantBytes(t, res.sense, unhex(fmt.Sprintf("f0 00 0e %08x 0a 00000000 1d 00 00 000000", 100*512)))
		if res := r.run(extentCDB(op, 0x06, 400, 0), nil); res.status != StatusGood || res.dataOut != 0 {
			t.Errorf("BYTCHK 11b of no blocks: %v", res)
		}
		wantField(t, r.run(extentCDB(op, 0x04, 5, 1), nil), 1, 2) // BYTCHK 10b is reserved
		wantField(t, r.run(extentCDB(op, 0x20, 5, 1), nil), 1, 5) // VPROTECT
	}
}

// A read-only unit refuses everything that writes before it asks for data, and serves everything
// else.
func TestReadOnlyUnitRefusesWrites(t *testing.T) {
	for name, s := range map[string]setup{
		"option": {opt: Options{ReadOnly: true}},
		"store":  {info: func(i *backend.Info) { i.ReadOnly = true }},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, s)
			for _, row := range rowsFor(r.unit) {
				res := doCDB(r.nexus, &r.c, [8]byte{}, rowCDB(row), make([]byte, 512), all)
				if row.flags&writes != 0 {
					wantSense(t, res, 0x7, 0x27, 0x00)
				} else {
					wantDone(t, row, res)
				}
			}
			for _, op := range []backendtest.Op{backendtest.WriteAt, backendtest.WriteDurable, backendtest.Discard, backendtest.Zero} {
				if n := r.store.Calls(op); n != 0 {
					t.Errorf("%v was called %d times", op, n)
				}
			}
		})
	}
}

// More data-out than the CDB asks for means that initiator and target misunderstand each other: a
// command that could do harm does nothing.
func TestTooMuchDataIsRefused(t *testing.T) {
	for _, s := range []struct {
		cdb   string
		n     uint64 // bytes that it takes
		octet int    // of the length in the CDB; 0: more is accepted
	}{
		{extentCDB(0x89, 0, 0, 1), 1024, 13},
		{extentCDB(0x89, 0, 0, 0), 0, 13}, // 256 in eight bits
		{extentCDB(0x41, 0, 0, 8), 512, 7},
		{extentCDB(0x93, 0, 0, 8), 512, 10},
		{extentCDB(0x93, 1, 0, 8), 0, 10}, // NDOB
		{extentCDB(0x2a, 0, 0, 1), 512, 0},
		{extentCDB(0x2f, 2, 0, 1), 512, 0},
	} {
		r := newRig(t, setup{})
		for _, expected := range []uint64{s.n, s.n + 1, s.n + 4096} {
			r.c.Expected = expected
			res := r.run(s.cdb, make([]byte, s.n))
			if s.octet != 0 && expected > s.n {
				wantField(t, res, s.octet, noField)
			} else {
				wantGood(t, s.cdb, res) // ISCSI-11.4-5: a WRITE takes what it needs
			}
		}
	}
}
