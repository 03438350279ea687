package lun

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"
)

// The table against SPC-4 and SBC-3: the group of the operation code gives the length of the CDB
// (SPC-4, section 4.2.5.1), and lookup finds every row.
func TestTableAgreesWithStandards(t *testing.T) {
	for i := range commands {
		row := &commands[i]
		want := [...]int{6, 10, 10, 0, 16, 12, 0, 0}[row.op>>5]
		if row.cdbLen() != want {
			t.Errorf("%s: CDB of %d bytes, want %d", row.name, row.cdbLen(), want)
		}
		if row.hasSA() && row.usage[0]&saMask != saMask {
			t.Errorf("%s: usage %#x of byte 1, want that of a service action", row.name, row.usage[0])
		}
		if row.begin == nil {
			t.Errorf("%s cannot begin", row.name)
		}
		if row.flags&writes != 0 && (row.consume == nil && row.end == nil || row.flags&medium == 0) {
			t.Errorf("%s writes, but does nothing or needs no medium", row.name)
		}
		cdb := make([]byte, 16)
		cdb[0] = row.op
		if row.hasSA() {
			cdb[1] = byte(row.sa)
		}
		if lookup(cdb) != row {
			t.Errorf("%s cannot be found", row.name)
		}
	}
}

// A set bit that no row evaluates is refused, and the field pointer names it.
func TestReservedBitsAreRefused(t *testing.T) {
	r := newRig(t, setup{opt: everything})
	for _, row := range commands {
		t.Run(row.name, func(t *testing.T) {
			for i := range row.usage {
				for bit := range 8 {
					isControl := i == len(row.usage)-1
					if row.usage[i]>>bit&1 != 0 || isControl && 1<<bit != naca {
						continue
					}
					cdb := rowCDB(&row)
					cdb[i+1] |= 1 << bit
					wantField(t, doCDB(r.nexus, &r.c, [8]byte{}, cdb, rowData, all), i+1, bit)
				}
			}
			cdb := rowCDB(&row)
			cdb[len(row.usage)] |= 0xfb // CONTROL without NACA
			wantDone(t, &row, doCDB(r.nexus, &r.c, [8]byte{}, cdb, rowData, all))
		})
	}
}

func TestUnknownCommands(t *testing.T) {
	r := newRig(t, setup{})
	for op := range 256 {
		if len(byOpcode[op]) == 0 {
			wantSense(t, r.run(fmt.Sprintf("%02x", op), nil), 0x5, 0x20, 0x00)
		}
	}
	wantField(t, r.run("9e 11", nil), 1, 4)
	wantField(t, r.run("a3 0b", nil), 1, 4)
}

// Only units that can give space back have UNMAP, also if they are read-only.
func TestThickUnitHasNoUnmap(t *testing.T) {
	for _, readOnly := range []bool{false, true} {
		r := newRig(t, setup{info: thick, opt: Options{ReadOnly: readOnly}})
		wantSense(t, r.run("42 00 00000000 00 0008 00", make([]byte, 8)), 0x5, 0x20, 0x00)
		wantBytes(t, r.good("a3 0c 01 42 0000 000000ff 00 00", nil), unhex("00 01 0000")) // SUPPORT: not supported
	}
}

// SPC-4, section 6.35, the one_command parameter data.
func TestReportOneOpcode(t *testing.T) {
	r := newRig(t, setup{})
	for _, s := range []struct{ name, cdb, want string }{
		{"001b READ(10)", "a3 0c 01 28 0000 000000ff 00 00", `
			00
			03          # CTDP 0, SUPPORT 011b
			000a        # CDB SIZE
			28          # CDB USAGE DATA: operation code
			18          #   RDPROTECT 0, DPO, FUA
			ffffffff    #   LOGICAL BLOCK ADDRESS
			1f          #   GROUP NUMBER
			ffff        #   TRANSFER LENGTH
			00          #   CONTROL`},
		{"001b ignores the service action", "a3 0c 01 00 ffff 000000ff 00 00", "00 03 0006 00 00 00 00 00 00"},
		{"001b RCTD", "a3 0c 81 00 0000 000000ff 00 00", `
			00
			83          # CTDP, SUPPORT 011b
			0006
			00 00 00 00 00 00
			000a 00 00 00000000 00000000 # command timeouts descriptor: none given`},
		{"001b WRITE SAME(16)", "a3 0c 01 93 0000 000000ff 00 00", `
			00 03 0010 93
			09          # WRPROTECT 0, ANCHOR 0, UNMAP, NDOB
			ffffffffffffffff ffffffff 1f 00`},
		{"001b not there", "a3 0c 01 85 0000 000000ff 00 00", "00 01 0000"},
		{"010b READ CAPACITY(16)", "a3 0c 02 9e 0010 000000ff 00 00", `
			00 03 0010 9e
			10          # SERVICE ACTION
			ffffffffffffffff ffffffff
			01          # PMI
			00`},
		{"010b itself", "a3 0c 02 a3 000c 000000ff 00 00", "00 03 000c a3 0c 87 ff ffff ffffffff 00 00"},
		{"010b not there", "a3 0c 02 9e 0013 000000ff 00 00", "00 01 0000"},
		{"010b RCTD not there", "a3 0c 82 9e 0013 000000ff 00 00", "00 01 0000"},
		{"011b opcode", "a3 0c 03 00 0000 000000ff 00 00", "00 03 0006 00 00 00 00 00 00"},
		{"011b service action", "a3 0c 03 9e 0010 00000006 00 00", "00 03 0010 9e 10"},
		{"011b opcode without that service action", "a3 0c 03 28 0001 000000ff 00 00", "00 01 0000"},
		{"011b service action FFFFh", "a3 0c 03 28 ffff 000000ff 00 00", "00 01 0000"},
		{"011b service action not there", "a3 0c 03 9e 0000 000000ff 00 00", "00 01 0000"},
		{"allocation length 0", "a3 0c 01 28 0000 00000000 00 00", ""},
	} {
		t.Run(s.name, func(t *testing.T) {
			wantBytes(t, r.run(s.cdb, nil).in, unhex(s.want))
			wantGood(t, s.name, r.run(s.cdb, nil))
		})
	}
	wantField(t, r.run("a3 0c 01 9e 0010 000000ff 00 00", nil), 2, 2) // has service actions
	wantField(t, r.run("a3 0c 02 28 0000 000000ff 00 00", nil), 2, 2) // has none
	for option := 4; option < 8; option++ {
		wantField(t, r.run(fmt.Sprintf("a3 0c %02x 28 0000 000000ff 00 00", option), nil), 2, 2)
	}
}

// SPC-4, section 6.35, the all_commands parameter data: every row once, as in the one_command
// form.
func TestReportAllOpcodes(t *testing.T) {
	for name, s := range map[string]setup{"thin": {}, "thick": {info: thick}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, s)
			rows := len(commands) - 5 // without PREVENT ALLOW MEDIUM REMOVAL and SANITIZE
			if name == "thick" {
				rows--
			}
			for _, timeouts := range []bool{false, true} {
				cdb, size := "a3 0c 00 00 0000 0000ffff 00 00", 8
				if timeouts {
					cdb, size = "a3 0c 80 00 0000 0000ffff 00 00", 20
				}
				b := r.good(cdb, nil)
				if n := int(binary.BigEndian.Uint32(b)); n != len(b)-4 || n != rows*size {
					t.Fatalf("COMMAND DATA LENGTH %d of %d bytes, want %d rows of %d", n, len(b), rows, size)
				}
				seen := map[string]bool{}
				for d := b[4:]; len(d) > 0; d = d[size:] {
					id := fmt.Sprintf("%02x/%x", d[0], d[2:4])
					if seen[id] {
						t.Errorf("%s is listed twice", id)
					}
					seen[id] = true
					option := 1 + d[5]&servactv
					one := r.good(fmt.Sprintf("a3 0c %02x %02x %x 000000ff 00 00", option, d[0], d[2:4]), nil)
					if one[1] != supportYes || one[3] != d[7] || d[6] != 0 || d[1] != 0 || d[4] != 0 {
						t.Errorf("%s: descriptor % x, but on its own % x", id, d[:8], one)
					}
					if timeouts != (d[5]&ctdpAll != 0) {
						t.Errorf("%s: CTDP is wrong", id)
					}
					if timeouts {
						wantBytes(t, d[8:20], unhex("000a 00 00 00000000 00000000"))
					}
				}
			}
		})
	}
}

// SPC-4, section 6.36.
func TestReportTMFs(t *testing.T) {
	r := newRig(t, setup{})
	const supported = "da" // ATS, ATSS, CTSS, LURS, TRS; neither CACAS, QTS nor WAKES
	wantBytes(t, r.good("a3 0d 00 000000 000000ff 00 00", nil), unhex(supported+"000000"))
	wantBytes(t, r.good("a3 0d 80 000000 000000ff 00 00", nil), unhex(supported+"00000c"+strings.Repeat("00", 12)))
	wantField(t, r.run("a3 0d 00 000000 00000003 00 00", nil), 6, noField)
}
