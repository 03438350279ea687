package lun

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/backend"
)

// SPC-4, section 6.6.2.
func TestStandardInquiry(t *testing.T) {
	want := unhex(`
		00                    # PERIPHERAL QUALIFIER 000b, direct access block device
		00                    # RMB 0
		06                    # VERSION: SPC-4
		12                    # NORMACA 0, HISUP, RESPONSE DATA FORMAT 2
		5b                    # ADDITIONAL LENGTH: 96-5
		38                    # SCCS 0, TPGS 11b, 3PC, PROTECT 0
		00                    # MULTIP 0: one target port
		02                    # CMDQUE
		4953455254475420      # "ISERTGT "
		5649525455414c2d4449534b20202020 # "VIRTUAL-DISK    "
		30303031              # "0001"
		0000000000000000000000000000000000000000 0000
		00a0 0460 04c0        # version descriptors: SAM-5, SPC-4, SBC-3
		0961                  # iSCSI: RFC 7144, section 4.2: 0960h + iSCSIProtocolLevel 1
		0000 0000 0000 0000
		00000000000000000000000000000000000000000000`)
	r := newRig(t, setup{})
	wantBytes(t, r.good("12 00 00 00ff 00", nil), want)
	wantBytes(t, r.good("12 00 00 0200 00", nil), want)
	for _, n := range []int{0, 4, 5, 36, 95} {
		wantBytes(t, r.good(fmt.Sprintf("12 00 00 %04x 00", n), nil), want[:n])
	}
	wantField(t, r.run("12 00 80 00ff 00", nil), 2, noField) // a page code without EVPD
	wantField(t, r.run("12 02 00 00ff 00", nil), 1, 1)       // CMDDT

	// ISCSI-11.4-5: "INQUIRY allocation 255 answers 96: U with 159".
	if res := r.run("12 00 00 00ff 00", nil); res.dataIn != 96 {
		t.Errorf("DataIn %d, want 96", res.dataIn)
	}

	want[1] = 0x80 // RMB
	wantBytes(t, newRig(t, setup{opt: Options{Removable: true}}).good("12 00 00 00ff 00", nil), want)

	custom := newRig(t, setup{opt: Options{Vendor: "ACME", Product: "Disk", Revision: "9"}})
	if got := string(custom.good("12 00 00 00ff 00", nil)[8:36]); got != "ACME    Disk            9   " {
		t.Errorf("identification %q", got)
	}
}

func TestVPD(t *testing.T) {
	for _, s := range []struct {
		name, page, want string
		setup            setup
	}{
		{name: "00 thin", page: "00", want: "00 00 000a 00 80 83 86 87 88 8f b0 b1 b2"},
		{name: "00 thick", page: "00", setup: setup{info: thick}, want: "00 00 0009 00 80 83 86 87 88 8f b0 b1"},
		{name: "80", page: "80", want: `
			00 80 0010
			33303031303230333034303530363037 # "3001020304050607"`},
		{name: "83", page: "83", want: `
			00 83 0088              # 136
			01 03 00 08             # binary, logical unit, NAA
			3001020304050607        # NAA 3h: locally assigned
			02 01 00 18             # ASCII, logical unit, T10 vendor ID
			4953455254475420 33303031303230333034303530363037
			51 94 00 04             # iSCSI, binary, PIV, target port, relative port
			00000001
			51 95 00 04             # iSCSI, binary, PIV, target port, target port group
			00000001
			53 98 00 28             # iSCSI, UTF-8, PIV, target port, SCSI name string
			69716e2e323032362d31312e696f2e6578616d706c653a73746f7265 # iqn.2026-11.io.example:store
			2c742c307830303031 000000                                # ,t,0x0001
			53 a8 00 20             # iSCSI, UTF-8, PIV, target device, SCSI name string
			69716e2e323032362d31312e696f2e6578616d706c653a73746f7265 00000000`},
		{name: "87", page: "87", want: `
			00 87 0004
			3f ff                 # all pages and subpages
			00                    # MLUS 0, shared
			00`},
		{name: "86", page: "86", want: `
			00 86 003c
			00                      # ACTIVATE MICROCODE, SPT, GRD_CHK, APP_CHK, REF_CHK: none
			07                      # HEADSUP, ORDSUP, SIMPSUP
			00                      # V_SUP 0
			00 00 00 0000 00
			28                      # MAXIMUM SUPPORTED SENSE DATA LENGTH: 40
			` + strings.Repeat("00", 50)},
		{name: "86 with a cache", page: "86", setup: setup{info: volatile}, want: `
			00 86 003c
			00 07
			01                      # V_SUP
			00 00 00 0000 00 28` + strings.Repeat("00", 50)},
		{name: "8f", page: "8f", want: `
			00 8f 01f4              # 500
			0000 0020 000000000000  # Block Device ROD Token Limits
			0040                    #   MAXIMUM RANGE DESCRIPTORS
			00000258 0000003c       #   MAXIMUM and DEFAULT INACTIVITY TIMEOUT: 600 s, 60 s
			0000000000200000        #   MAXIMUM TOKEN TRANSFER SIZE: 1 GiB
			0000000000020000        #   OPTIMAL TRANSFER COUNT: 64 MiB
			0001 0010 0d            # Supported Commands
			83 05 00 01 10 11 1c    #   EXTENDED COPY(LID1) and (LID4), POPULATE TOKEN, WRITE USING TOKEN, COPY OPERATION ABORT
			84 04 00 03 05 07       #   RECEIVE COPY STATUS(LID1), OPERATING PARAMETERS, STATUS(LID4), ROD TOKEN INFORMATION
			00 00                   #   padding
			0004 001c 00000000      # Parameter Data
			0010                    #   MAXIMUM CSCD DESCRIPTOR COUNT
			0020                    #   MAXIMUM SEGMENT DESCRIPTOR COUNT
			00001000                #   MAXIMUM DESCRIPTOR LIST LENGTH
			00000000                #   MAXIMUM INLINE DATA LENGTH
			000000000000000000000000
			0008 0004 02 02 e4 00   # Supported Descriptors: block to block, identification
			000c 0004 0000 0000     # Supported CSCD Descriptor IDs
			0106 005c               # ROD Token Features
			00                      #   REMOTE TOKENS: not supported
			0000000000000000000000
			0000003c 00000258       #   MINIMUM and MAXIMUM TOKEN LIFETIME
			00000258                #   MAXIMUM TOKEN INACTIVITY TIMEOUT
			000000000000000000000000000000000000 0030
			00 00 002c 0000         #   block ROD device type specific features
			0001                    #   OPTIMAL BLOCK ROD LENGTH GRANULARITY
			0000000040000000        #   MAXIMUM BYTES IN BLOCK ROD: 1 GiB
			0000000004000000        #   OPTIMAL BYTES IN BLOCK ROD TRANSFER: 64 MiB
			ffffffffffffffff        #   OPTIMAL BYTES TO TOKEN PER SEGMENT: no limit
			0000000004000000        #   OPTIMAL BYTES FROM TOKEN PER SEGMENT
			0000000000000000
			0108 0104 0000 0100     # Supported ROD Types
			00800000 03` + strings.Repeat("00", 59) + ` # point in time copy, default: TOKEN_IN, TOKEN_OUT
			00800001 03` + strings.Repeat("00", 59) + ` # change vulnerable: TOKEN_IN, TOKEN_OUT
			0080ffff 01` + strings.Repeat("00", 59) + ` # any: TOKEN_OUT
			ffff0001 02` + strings.Repeat("00", 59) + ` # block device zero: TOKEN_IN
			8001 0020               # General Copy Operations
			000000ff 000000ff       #   concurrent copies
			02000000                #   MAXIMUM SEGMENT LENGTH: 32 MiB
			09 00                   #   DATA SEGMENT GRANULARITY: 512, INLINE DATA GRANULARITY
			000000000000000000000000000000000000`},
		{name: "b0 thin", page: "b0", want: `
			00 b0 003c
			00                      # WSNZ is 0
			40                      # MAXIMUM COMPARE AND WRITE LENGTH: 32 KiB
			0001                    # OPTIMAL TRANSFER LENGTH GRANULARITY
			00010000                # MAXIMUM TRANSFER LENGTH: 32 MiB
			00000800                # OPTIMAL TRANSFER LENGTH: 1 MiB
			00000000                # MAXIMUM PREFETCH LENGTH
			00100000                # MAXIMUM UNMAP LBA COUNT: 512 MiB
			00000100                # MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT
			00000080                # OPTIMAL UNMAP GRANULARITY: 64 KiB
			80000000                # UGAVALID, UNMAP GRANULARITY ALIGNMENT 0
			000000000007fff8        # MAXIMUM WRITE SAME LENGTH: 4 KiB less than 256 MiB
			00000800                # MAXIMUM ATOMIC TRANSFER LENGTH: 1 MiB
			00000000                # ATOMIC ALIGNMENT
			00000000                # ATOMIC TRANSFER LENGTH GRANULARITY
			00000000                # MAXIMUM ATOMIC TRANSFER LENGTH WITH ATOMIC BOUNDARY
			00000000                # MAXIMUM ATOMIC BOUNDARY SIZE`},
		{name: "b0 thin, longer than a WRITE SAME", page: "b0", setup: fourGiB, want: `
			00 b0 003c
			01                      # WSNZ
			40 0001 00010000 00000800 00000000 00100000 00000100 00000080 80000000
			000000000007fff8        # MAXIMUM WRITE SAME LENGTH
			00000800 00000000 00000000 00000000 00000000`},
		{name: "b0 thin, granules from block 63 on", page: "b0", setup: setup{info: func(i *backend.Info) { i.DiscardAlignment = 63 * 512 }}, want: `
			00 b0 003c 00 40 0001 00010000 00000800 00000000 00100000 00000100 00000080
			8000003f                # UGAVALID, UNMAP GRANULARITY ALIGNMENT 63
			000000000007fff8 00000800 00000000 00000000 00000000 00000000`},
		{name: "b0 thin, granules anywhere", page: "b0", setup: setup{info: func(i *backend.Info) { i.DiscardAlignment = backend.DiscardUnaligned }}, want: `
			00 b0 003c 00 40 0001 00010000 00000800 00000000 00100000 00000100 00000080
			00000000                # UGAVALID 0
			000000000007fff8 00000800 00000000 00000000 00000000 00000000`},
		{name: "b0 thick, 4096 in 8192", page: "b0", setup: setup{blockSize: 4096, info: func(i *backend.Info) {
			i.DiscardGranularity, i.PhysicalBlockSize, i.AtomicWrite = 0, 8192, 0
		}}, want: `
			00 b0 003c
			00 08 0002
			00002000 00000100 00000000
			00000000 00000000       # no UNMAP
			00000000 00000000
			000000000000ffff
			0000000000000000000000000000000000000000`},
		{name: "b1", page: "b1", want: `
			00 b1 003c
			0001                    # MEDIUM ROTATION RATE: does not rotate
			00 00` + strings.Repeat("00", 56)},
		{name: "b1 with SANITIZE", page: "b1", setup: setup{opt: Options{Sanitize: true}}, want: `
			00 b1 003c
			0001 00
			50                      # WABEREQ 01b, WACEREQ 01b
			` + strings.Repeat("00", 56)},
		{name: "b1 with SANITIZE, thick", page: "b1", setup: setup{info: thick, opt: Options{Sanitize: true}}, want: `
			00 b1 003c
			0001 00
			10                      # WABEREQ 00b, WACEREQ 01b
			` + strings.Repeat("00", 56)},
		{name: "b2", page: "b2", want: `
			00 b2 0004
			07                      # THRESHOLD EXPONENT: 64 KiB
			e4                      # LBPU, LBPWS, LBPWS10, LBPRZ 001b
			02                      # PROVISIONING TYPE: thin
			00`},
	} {
		t.Run(s.name, func(t *testing.T) {
			r, want := newRig(t, s.setup), unhex(s.want)
			wantBytes(t, r.good("12 01 "+s.page+" 0fff 00", nil), want)
			for n := range len(want) {
				wantBytes(t, r.good(fmt.Sprintf("12 01 %s %04x 00", s.page, n), nil), want[:n])
			}
		})
	}
	r := newRig(t, setup{info: thick})
	for page := range 256 {
		switch page {
		case 0x00, 0x80, 0x83, 0x86, 0x87, 0x88, 0x8f, 0xb0, 0xb1:
		default:
			wantField(t, r.run(fmt.Sprintf("12 01 %02x 00ff 00", page), nil), 2, noField)
		}
	}
}

// With the longest target name, designators have less than 256 bytes.
func TestLongestTargetNameFitsDesignators(t *testing.T) {
	r := newRig(t, setup{})
	name := "iqn.2026-11.io.example:" + strings.Repeat("n", 200) // RFC 7143, section 4.2.7.1: at most 223
	n := r.inv.NewNexus(Port{TargetName: name, TPGT: 0xffff})
	res := do(n, &r.c, [8]byte{}, "12 01 83 ffff 00", nil, all)
	wantGood(t, "VPD 83h", res)
	if got := int(binary.BigEndian.Uint16(res.in[2:])); got != len(res.in)-4 {
		t.Errorf("PAGE LENGTH %d of %d", got, len(res.in))
	}
	var names []string
	for d := res.in[4:]; len(d) > 0; d = d[4+int(d[3]):] {
		if d[1]&0x0f == desSCSI {
			if d[3]%4 != 0 || d[3+d[3]] != 0 {
				t.Errorf("designator of %d bytes is not padded", d[3])
			}
			names = append(names, strings.TrimRight(string(d[4:][:d[3]]), "\x00"))
		}
	}
	if len(names) != 2 || names[0] != name+",t,0xffff" || names[1] != name {
		t.Errorf("SCSI name strings %q", names)
	}
}

// SPC-4, section 6.33.
func TestReportLUNs(t *testing.T) {
	r := newRig(t, setup{})
	for _, id := range []uint16{300, 2, 16383} {
		if err := r.inv.Add(id, newRig(t, setup{}).unit); err != nil {
			t.Fatal(err)
		}
	}
	n := r.inv.NewNexus(testPort)
	want := unhex(`
		00000020 00000000
		0000000000000000      # 0
		0002000000000000      # 2: peripheral device addressing
		412c000000000000      # 300: flat space addressing
		7fff000000000000      # 16383`)
	run := func(report, allocation int) result {
		return do(n, &r.c, [8]byte{}, fmt.Sprintf("a0 00 %02x 000000 %08x 00 00", report, allocation), nil, all)
	}
	for _, report := range []int{0x00, 0x02} {
		for _, allocation := range []int{0, 8, 16, 39, 40, 1 << 20} {
			res := run(report, allocation)
			wantGood(t, "REPORT LUNS", res)
			wantBytes(t, res.in, want[:min(len(want), allocation)])
		}
	}
	res := run(0x01, 255)
	wantGood(t, "well known logical units", res)
	wantBytes(t, res.in, make([]byte, 8))
	wantField(t, run(0x10, 255), 2, noField)

	// So does the nexus that was there before the units were added.
	wantBytes(t, r.good("a0 00 00 000000 00000100 00 00", nil), want)
}
