package lun

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/protection"
)

// eachProtection runs f for units of both types and block sizes.
func eachProtection(t *testing.T, f func(t *testing.T, r *rig, bs int)) {
	for _, typ := range []protection.Type{protection.Type1, protection.Type3} {
		for _, bs := range []int{512, 4096} {
			t.Run(fmt.Sprintf("type %d, %d", typ, bs), func(t *testing.T) {
				f(t, newRig(t, setup{blockSize: uint32(bs), protect: typ, opt: everything}), bs)
			})
		}
	}
}

// onWire returns blocks from lba on, with the protection information of tuple.
func onWire(data []byte, bs int, lba uint64, tuple func(block []byte, lba uint64) protection.Tuple) (p []byte) {
	for ; len(data) > 0; data, lba = data[bs:], lba+1 {
		p = append(p, data[:bs]...)
		p = binary.BigEndian.AppendUint64(p, uint64(tuple(data[:bs], lba)))
	}
	return p
}

// own returns what an initiator sends: a right guard and reference tag, and an application tag of its own.
func own(block []byte, lba uint64) protection.Tuple {
	return protection.New(protection.CRC(block), 0x1234, uint32(lba))
}

// wantCheck checks for ABORTED COMMAND with that ASCQ of 10h and the LBA (SPC-4, section 4.5.3).
func wantCheck(t testing.TB, what string, res result, ascq byte, lba uint32) {
	t.Helper()
	want := make([]byte, senseLen)
	want[0], want[2], want[7], want[12], want[13] = 0xf0, 0x0b, 10, 0x10, ascq
	binary.BigEndian.PutUint32(want[3:], lba)
	if res.status != StatusCheckCondition || !bytes.Equal(res.sense, want) {
		t.Fatalf("%s: status %#x, sense % x; want b/10/%02x at LBA %d", what, res.status, res.sense, ascq, lba)
	}
}

// An initiator learns of the protection by INQUIRY, READ CAPACITY(16), the Extended INQUIRY Data page and REPORT SUPPORTED
// OPERATION CODES.
func TestProtectionIsReported(t *testing.T) {
	for _, c := range []struct {
		typ              protection.Type
		protect, spt, rc byte
		usage            byte
	}{
		{protection.None, 0, 0, 0, 0x18},
		{protection.Type1, 1, 0x07, 0x01, 0xf8}, // SPT 000b, GRD_CHK, APP_CHK, REF_CHK; P_TYPE 000b, PROT_EN
		{protection.Type3, 1, 0x26, 0x05, 0xf8}, // SPT 100b, GRD_CHK, APP_CHK; P_TYPE 010b, PROT_EN
	} {
		r := newRig(t, setup{protect: c.typ})
		if got := r.good("12 00 00 00ff 00", nil)[5] & 1; got != c.protect {
			t.Errorf("type %d: PROTECT %d", c.typ, got)
		}
		if got := r.good("12 01 86 00ff 00", nil)[4]; got != c.spt {
			t.Errorf("type %d: byte 4 of page 86h %#x, want %#x", c.typ, got, c.spt)
		}
		ato := byte(0x40) // TAS
		if c.typ != protection.None {
			ato |= 0x80
		}
		if got := r.good("1a 08 0a 00 ff 00", nil)[4+5]; got != ato {
			t.Errorf("type %d: byte 5 of the Control page %#x, want %#x", c.typ, got, ato)
		}
		if got := r.good("1a 08 4a 00 ff 00", nil)[4+5]; got&0x80 != 0 || got&0x20 != ato>>2&0x20 {
			t.Errorf("type %d: byte 5 of the changeable Control page %#x", c.typ, got)
		}
		if got := r.good("9e 10 0000000000000000 00000020 00 00", nil)[12]; got != c.rc {
			t.Errorf("type %d: byte 12 of READ CAPACITY %#x, want %#x", c.typ, got, c.rc)
		}
		if got := r.good("a3 0c 01 28 0000 00000040 00 00", nil)[5]; got != c.usage {
			t.Errorf("type %d: usage of READ(10) %#x, want %#x", c.typ, got, c.usage)
		}
		if r.unit.Protection() != c.typ {
			t.Errorf("Protection: %d, want %d", r.unit.Protection(), c.typ)
		}
	}
}

// A protect field is refused without protection, where it is reserved, and where a command has none.
func TestProtectFieldsThatAreRefused(t *testing.T) {
	r := newRig(t, setup{})
	for _, op := range []byte{0x28, 0xa8, 0x88, 0x2a, 0xaa, 0x8a, 0x2f, 0x93, 0x89, 0x8b} {
		for field := byte(1); field < 8; field++ {
			res := r.run(extentCDB(op, field<<5, 0, 1), make([]byte, 520))
			bit := 7
			for field<<5>>bit&1 == 0 {
				bit--
			}
			wantField(t, res, 1, bit)
		}
	}
	eachProtection(t, func(t *testing.T, r *rig, bs int) {
		for _, op := range []byte{0x28, 0xa8, 0x88, 0x2a, 0xaa, 0x8a, 0x2e, 0xae, 0x8e, 0x2f, 0xaf, 0x8f, 0x41, 0x93, 0x8b} {
			for _, field := range []byte{6, 7} {
				wantField(t, r.run(extentCDB(op, field<<5, 0, 1), make([]byte, bs+8)), 1, 7)
			}
		}
		wantField(t, r.run("93 21 0000000000000000 00000001 00 00", nil), 1, 7)           // WRITE SAME with NDOB
		wantField(t, r.run("34 20 00000000 00 0001 00", nil), 1, 5)                       // PRE-FETCH
		wantSense(t, r.run("7f 00 0000 0000 0018 0009 20 00 0000", nil), 0x5, 0x20, 0x00) // READ(32)
		for _, sa := range []string{"0009", "000a", "000b", "000c", "000d", "000f"} {     // VERIFY(32) and others are of type 2 only
			wantSense(t, r.run("7f 00 0000 0000 0018 "+sa+" 20 00 0000", nil), 0x5, 0x20, 0x00)
		}
		if most := r.good("12 01 b0 00ff 00", nil)[5]; 2*int(most)*(bs+8) > MaxParameterList || most == 0 { // data-out of COMPARE AND WRITE
			t.Errorf("MAXIMUM COMPARE AND WRITE LENGTH %d", most)
		}
	})
}

// Each value of WRPROTECT and RDPROTECT checks what SBC-3, tables 73 and 108, say, for each fault.
func TestProtectFields(t *testing.T) {
	eachProtection(t, func(t *testing.T, r *rig, bs int) {
		type1 := r.unit.protection == protection.Type1
		const lba, count, bad = 10, 20, 13 // of 4096 bytes: several pieces
		data := pattern(count*bs, 5)
		for _, fault := range []struct {
			name       string
			guard, ref bool
			exempt     bool
			change     func(protection.Tuple) protection.Tuple
		}{
			{name: "none", change: func(p protection.Tuple) protection.Tuple { return p }},
			{name: "guard", guard: true, change: func(p protection.Tuple) protection.Tuple { return p ^ 1<<60 }},
			{name: "reference tag", ref: true, change: func(p protection.Tuple) protection.Tuple { return p ^ 1 }},
			{name: "application tag", change: func(p protection.Tuple) protection.Tuple { return p ^ 1<<40 }},
			{name: "exempt", guard: true, ref: true, exempt: true, change: func(protection.Tuple) protection.Tuple { return protection.Unwritten }},
		} {
			wire := onWire(data, bs, lba, func(block []byte, at uint64) protection.Tuple {
				if at == bad {
					return fault.change(own(block, at))
				}
				return own(block, at)
			})
			// want returns the ASCQ that a value of the field ends with, or 0.
			want := func(field byte, exempt bool) byte {
				checksGuard := field == 0 || field == 1 || field == 4 || field == 5
				checksRef := type1 && (field == 0 || field == 1 || field == 2 || field == 5)
				switch {
				case exempt:
				case fault.guard && checksGuard:
					return 1
				case fault.ref && checksRef:
					return 3
				}
				return 0
			}
			check := func(what string, field byte, res result, exempt bool) bool {
				t.Helper()
				what = fmt.Sprintf("%s, field %d, fault %s", what, field, fault.name)
				if ascq := want(field, exempt); ascq != 0 {
					wantCheck(t, what, res, ascq, bad)
					return false
				}
				wantGood(t, what, res)
				return true
			}
			for field := byte(1); field <= 5; field++ {
				for _, op := range []byte{0x2a, 0xaa, 0x8a, 0x2e, 0xae, 0x8e} {
					check(CommandName([]byte{op}), field, r.run(extentCDB(op, field<<5, lba, count), wire), false)
				}
			}
			// Whatever it is, it can be put there without checks.
			r.good(extentCDB(0x8a, 3<<5, lba, count), wire)
			for field := byte(0); field <= 5; field++ {
				for _, op := range []byte{0x28, 0xa8, 0x88} {
					res := r.run(extentCDB(op, field<<5, lba, count), nil)
					if !check(CommandName([]byte{op}), field, res, fault.exempt) {
						continue
					}
					if field == 0 {
						wantBytes(t, res.in, data)
					} else {
						wantBytes(t, res.in, wire)
					}
				}
				for _, op := range []byte{0x2f, 0xaf, 0x8f} { // BYTCHK 00b
					check(CommandName([]byte{op}), field, r.run(extentCDB(op, field<<5, lba, count), nil), fault.exempt)
				}
				if field != 0 && !fault.exempt { // BYTCHK 01b
					check("VERIFY with data", field, r.run(extentCDB(0x8f, field<<5|2, lba, count), wire), false)
				}
			}
			if field := byte(3); fault.name != "none" { // BYTCHK 01b sees a difference in what counts, without checks
				good := onWire(data, bs, lba, own)
				res := r.run(extentCDB(0x8f, field<<5|2, lba, count), good)
				ascq := byte(1) // SBC-4, table with the compare operation of BYTCHK 01b
				if fault.ref {
					ascq = 3
				}
				if differs := (fault.guard || fault.ref) && !fault.exempt; !differs {
					wantGood(t, "VERIFY with data, fault "+fault.name, res)
				} else if res.status != StatusCheckCondition || res.sense[2] != 0x0e || res.sense[12] != 0x10 || res.sense[13] != ascq || int(binary.BigEndian.Uint32(res.sense[3:]))/(bs+8) != bad-lba {
					t.Errorf("VERIFY with data, fault %s: sense % x; want MISCOMPARE in block %d", fault.name, res.sense, bad-lba)
				}
			}
			// READ(6) and others have no field, and check all.
			if bs == 512 {
				check("READ(6)", 0, r.run(extentCDB(0x08, 0, lba, count), nil), fault.exempt)
			}
		}
	})
}

// A transfer that the initiator cuts short, or that begins or ends within a piece, has the right bytes.
func TestLengthsOfProtectedTransfers(t *testing.T) {
	eachProtection(t, func(t *testing.T, r *rig, bs int) {
		const lba, count = 3, 40
		data := pattern(count*bs, 6)
		wire := onWire(data, bs, lba, own)
		res := r.run(extentCDB(0x8a, 1<<5, lba, count), wire)
		wantGood(t, "WRITE", res)
		if want := uint64(len(wire)); res.dataOut != want {
			t.Errorf("WRITE takes %d bytes, want %d", res.dataOut, want)
		}
		for _, n := range []int{0, 1, bs - 1, bs, bs + 7, bs + 8, bs + 9, 4096, 4097, 8192 + bs, len(wire) - 1, len(wire), len(wire) + 100} {
			res := do(r.nexus, &r.c, [8]byte{}, extentCDB(0x88, 1<<5, lba, count), nil, n)
			wantGood(t, "READ", res)
			if res.dataIn != uint64(len(wire)) {
				t.Errorf("READ has %d bytes, want %d", res.dataIn, len(wire))
			}
			wantBytes(t, res.in, wire[:min(n, len(wire))])
		}
		// Of a WRITE with fewer blocks than the CDB says, those that arrive are written; a part of a block is not.
		other := onWire(pattern(count*bs, 7), bs, lba, own)
		r.c.Expected = uint64(2 * (bs + 8))
		wantGood(t, "WRITE of two blocks", r.run(extentCDB(0x8a, 1<<5, lba, count), other[:2*(bs+8)]))
		r.c.Expected = uint64(2 * bs)
		wantSense(t, r.run(extentCDB(0x8a, 1<<5, lba, count), other[:2*bs]), 0x5, 0x0e, 0x03)
		r.c.Expected = 0
		wantBytes(t, r.good(extentCDB(0x88, 1<<5, lba, count), nil), append(bytes.Clone(other[:2*(bs+8)]), wire[2*(bs+8):]...))
	})
}

// Commands without a protect field, or with 0 in it, leave protection information that fits the data, and what
// UNMAP and FORMAT UNIT erase has none.
func TestProtectionAfterOtherCommands(t *testing.T) {
	eachProtection(t, func(t *testing.T, r *rig, bs int) {
		generated := func(block []byte, lba uint64) protection.Tuple { return r.unit.protection.Generate(block, lba, nil) }
		unwritten := func([]byte, uint64) protection.Tuple { return protection.Unwritten }
		block := pattern(bs, 8)
		zeros := make([]byte, bs)
		old := pattern(bs, 9)
		// want reads the two blocks of each step, and their neighbour.
		want := func(what string, lba uint64, data []byte, tuple func([]byte, uint64) protection.Tuple) {
			t.Helper()
			if got, want := r.good(extentCDB(0x88, 1<<5, lba, 2), nil), onWire(append(bytes.Clone(data), data...), bs, lba, tuple); !bytes.Equal(got, want) {
				t.Errorf("%s: %x ... want %x ...", what, got[bs:bs+8], want[bs:bs+8])
			}
			if got, want := r.good(extentCDB(0x88, 1<<5, lba+2, 1), nil), onWire(old, bs, lba+2, own); !bytes.Equal(got, want) {
				t.Errorf("%s changes the block behind it: %x", what, got[bs:])
			}
		}
		begin := func(lba uint64) {
			t.Helper()
			r.good(extentCDB(0x8a, 1<<5, lba, 3), onWire(bytes.Repeat(old, 3), bs, lba, own))
		}
		twice := append(bytes.Clone(block), block...)
		for i, c := range []struct {
			what, cdb string // %s: LBA of 16 digits
			out       []byte
			data      []byte
			tuple     func([]byte, uint64) protection.Tuple
		}{
			{"WRITE", "8a 00 %s 00000002 00 00", twice, block, generated},
			{"WRITE AND VERIFY", "8e 02 %s 00000002 00 00", twice, block, generated},
			{"WRITE SAME", "93 00 %s 00000002 00 00", block, block, generated},
			{"WRITE SAME of zeros", "93 00 %s 00000002 00 00", zeros, zeros, generated},
			{"WRITE SAME, NDOB", "93 01 %s 00000002 00 00", nil, zeros, generated},
			{"WRITE SAME, UNMAP", "93 08 %s 00000002 00 00", zeros, zeros, unwritten},
			{"WRITE SAME, UNMAP of data", "93 08 %s 00000002 00 00", block, block, generated},
			{"COMPARE AND WRITE", "89 00 %s 000000 02 00 00", append(bytes.Repeat(old, 2), twice...), block, generated},
		} {
			lba := uint64(3 * i)
			begin(lba)
			r.good(fmt.Sprintf(c.cdb, fmt.Sprintf("%016x", lba)), c.out)
			want(c.what, lba, c.data, c.tuple)
		}
		begin(30)
		r.good("8b 00 000000000000001e 00000002 00 00", twice)
		or := bytes.Clone(old)
		for i := range or {
			or[i] |= block[i]
		}
		want("ORWRITE", 30, or, generated)
		begin(33)
		r.good("42 00 00000000 00 0018 00", unhex("0016 0010 00000000  0000000000000021 00000002 00000000"))
		want("UNMAP", 33, zeros, unwritten)

		// With protection information of the initiator.
		begin(36)
		r.good("93 20 0000000000000024 00000002 00 00", onWire(block, bs, 36, own))
		want("WRITE SAME with protection", 36, block, func(block []byte, lba uint64) protection.Tuple {
			if r.unit.protection == protection.Type3 {
				lba = 36
			}
			return own(block, lba)
		})
		begin(39)
		r.good("93 68 0000000000000027 00000002 00 00", onWire(zeros, bs, 39, unwritten))
		want("WRITE SAME, UNMAP with protection", 39, zeros, unwritten)
		begin(42)
		both := append(onWire(bytes.Repeat(old, 2), bs, 42, own), onWire(twice, bs, 42, own)...)
		r.good("89 20 000000000000002a 000000 02 00 00", both)
		want("COMPARE AND WRITE with protection", 42, block, own)
		if res := r.run("89 20 000000000000002a 000000 02 00 00", both); res.status != StatusCheckCondition || res.sense[2] != 0x0e {
			t.Errorf("COMPARE AND WRITE of other data: sense % x", res.sense)
		}
		begin(45)
		r.good("8b 20 000000000000002d 00000002 00 00", onWire(twice, bs, 45, own))
		want("ORWRITE with protection", 45, or, own)
		begin(48)
		r.good("8f 26 0000000000000030 00000001 00 00", onWire(old, bs, 48, own))
		if r.unit.protection == protection.Type1 { // the tags of the medium grow, too
			r.good("8f 26 0000000000000030 00000003 00 00", onWire(old, bs, 48, own))
		}
		wrong := own(block, 0) ^ 1<<63
		for _, cdb := range []string{"93 20 0000000000000030 00000002 00 00", "8b 20 0000000000000030 00000001 00 00", "8f 26 0000000000000030 00000001 00 00"} {
			wantCheck(t, cdb, r.run(cdb, onWire(block, bs, 48, func([]byte, uint64) protection.Tuple { return wrong })), 1, 48)
		}
		bad := onWire(bytes.Repeat(old, 2), bs, 48, own)
		bad[bs] ^= 1
		wantCheck(t, "COMPARE AND WRITE", r.run("89 20 0000000000000030 000000 01 00 00", bad), 1, 48)
	})
}

// FORMAT UNIT takes only the type that the unit has, and leaves blocks without protection information.
func TestFormatOfProtectedUnit(t *testing.T) {
	eachProtection(t, func(t *testing.T, r *rig, bs int) {
		cdb, list := "04 90 0000 0000", "00 00 0000" // FMTPINFO 10b
		if r.unit.protection == protection.Type3 {
			cdb, list = "04 d0 0000 0000", "01 00 0000" // FMTPINFO 11b, PROTECTION FIELD USAGE 001b
			wantField(t, r.run("04 c0 0000 0000", nil), 1, 7)
		}
		for _, wrong := range []byte{0x10, 0x50, 0x90, 0xd0} {
			if wrong != unhex(cdb)[1] {
				wantField(t, r.run(fmt.Sprintf("04 %02x 0000 0000", wrong), unhex(list)), 1, 7)
			}
		}
		if res := r.run(cdb, unhex("02 00 0000")); res.status != StatusCheckCondition || res.sense[12] != 0x26 {
			t.Errorf("another PROTECTION FIELD USAGE: sense % x", res.sense)
		}
		r.good(extentCDB(0x8a, 1<<5, 7, 1), onWire(pattern(bs, 1), bs, 7, own))
		r.good(cdb, unhex(list))
		for wantSame := range 2 {
			res := r.run(extentCDB(0x88, 1<<5, 7, 1), nil)
			if wantSame == 0 && res.status == StatusCheckCondition && res.sense[2] == keyUnitAttention {
				continue
			}
			wantGood(t, "READ", res)
			wantBytes(t, res.in, onWire(make([]byte, bs), bs, 7, func([]byte, uint64) protection.Tuple { return protection.Unwritten }))
			break
		}
	})
}

// Damage below ends in the check that found it, and a neighbour on another unit sees nothing of it.
func TestDamageOfProtectedUnit(t *testing.T) {
	eachProtection(t, func(t *testing.T, r *rig, bs int) {
		m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		u, err := New(m, Options{})
		if err != nil {
			t.Fatal(err)
		}
		r.add(1, u)
		do(r.nexus, &r.c, EncodeLUN(1), "a0 00 0000 0000 00000100 0000", nil, all) // REPORT LUNS takes the attention of the new LUN
		do(r.nexus, &r.c, EncodeLUN(1), "00", nil, all)                            // takes that of the power on
		block := pattern(bs, 3)
		r.good(extentCDB(0x8a, 0, 9, 1), block)
		wantGood(t, "the neighbour writes", do(r.nexus, &r.c, EncodeLUN(1), extentCDB(0x8a, 0, 9, 1), pattern(512, 4), all))
		if err := r.store.WriteAt([]byte{^block[5]}, int64(9*bs+5)); err != nil {
			t.Fatal(err)
		}
		for _, cdb := range []string{extentCDB(0x88, 0, 8, 3), extentCDB(0x88, 1<<5, 8, 3), extentCDB(0x8f, 0, 9, 1)} {
			wantCheck(t, cdb, r.run(cdb, nil), 1, 9)
		}
		wantGood(t, "READ without checks", r.run(extentCDB(0x88, 3<<5, 9, 1), nil))
		wantBytes(t, do(r.nexus, &r.c, EncodeLUN(1), extentCDB(0x88, 0, 9, 1), nil, all).in, pattern(512, 4))
		if n, ok := r.unit.Checksums(); !ok || n.Bad != 1 {
			t.Errorf("%d bad blocks are known, want 1", n.Bad)
		}
		r.good(extentCDB(0x8a, 0, 9, 1), block)
		r.good(extentCDB(0x88, 1<<5, 8, 3), nil)
	})
}
