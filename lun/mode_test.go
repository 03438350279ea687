package lun

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// The mode pages of a unit without a cache (SPC-4, section 7.5; SBC-3, section
// 6.5).
const (
	pagesCurrent = `
		01 0a c0 00 00 00 00 00 00 00 0000             # Read-Write Error Recovery: AWRE, ARRE
		08 12 00 00 0000 0000 0000 0000 00 00 0000 00 000000 # Caching: WCE 0, RCD 0
		0a 0a 02 10 00 40 0000 ffff 0000               # Control: D_SENSE 0, GLTSD; unrestricted reordering, QERR 0; TAS
		1c 0a 08 00 00000000 00000000                  # Informational Exceptions Control: DEXCPT`
	pagesChangeable = `
		01 0a 00 00 00 00 00 80 00 00 0000             # LBPERE
		08 12 00 00 0000 0000 0000 0000 00 00 0000 00 000000
		0a 0a 24 00 08 00 0000 0000 0000               # TST 001b, D_SENSE, SWP
		1c 0a 00 00 00000000 00000000`
	provisioningOff = `
		5c 02 001c                                     # Logical Block Provisioning (SBC-3, section 6.5.8): SPF
		00 00 00000000 00000000 0000                   # SITUA 0
		00 01 0000 00000000                            # soft, armed decreasing; available space
		01 02 0000 00000000                            # soft, armed increasing; used space`
	shortDescriptor = "00000800 00 000200 " // 2048 blocks of 512
)

func TestModeSense(t *testing.T) {
	for _, s := range []struct {
		name, cdb, want string
		setup           setup
	}{
		{name: "6 all pages", cdb: "1a 00 3f 00 ff 00", want: `
			43                    # MODE DATA LENGTH: 68-1
			00
			10                    # WP 0, DPOFUA
			08                    # BLOCK DESCRIPTOR LENGTH
			` + shortDescriptor + pagesCurrent},
		{name: "6 all pages and subpages", cdb: "1a 08 3f ff ff 00", want: "5b 00 10 00" + pagesCurrent + provisioningOff},
		{name: "6 subpages of a page", cdb: "1a 08 1c ff ff 00", want: "2f 00 10 00 1c 0a 08 00 00000000 00000000" + provisioningOff},
		{name: "6 all subpages, thick", cdb: "1a 08 3f ff ff 00", setup: setup{info: thick}, want: "3b 00 10 00" + pagesCurrent},
		{name: "6 provisioning", cdb: "1a 08 1c 02 ff 00", want: "23 00 10 00" + provisioningOff},
		{name: "6 changeable provisioning", cdb: "1a 08 5c 02 ff 00", want: `
			23 00 10 00
			5c 02 001c
			01                    # SITUA
			00 00000000 00000000 0000
			80 00 0000 ffffffff   # ENABLED, THRESHOLD COUNT
			80 00 0000 ffffffff`},
		{name: "6 changeable", cdb: "1a 08 7f 00 ff 00", want: "3b 00 10 00" + pagesChangeable},
		{name: "6 changeable caching", cdb: "1a 08 48 00 ff 00", setup: setup{info: volatile}, want: `
			17 00 10 00
			08 12 04 00 0000 0000 0000 0000 00 00 0000 00 000000 # WCE`},
		{name: "6 changeable caching, write-through", cdb: "1a 08 48 00 ff 00",
			setup: setup{info: volatile, opt: Options{WriteThrough: true}}, want: `
			17 00 10 00
			08 12 00 00 0000 0000 0000 0000 00 00 0000 00 000000`},
		{name: "6 default", cdb: "1a 08 bf 00 ff 00", want: "3b 00 10 00" + pagesCurrent},
		{name: "6 cut", cdb: "1a 00 3f 00 04 00", want: "43 00 10 08"},
		{name: "6 none", cdb: "1a 00 3f 00 00 00", want: ""},
		{name: "6 caching", cdb: "1a 08 08 00 ff 00", setup: setup{info: volatile}, want: `
			17 00 10 00
			08 12 04 00 0000 0000 0000 0000 00 00 0000 00 000000 # WCE`},
		{name: "6 caching, write-through", cdb: "1a 08 08 00 ff 00",
			setup: setup{info: volatile, opt: Options{WriteThrough: true}}, want: `
			17 00 10 00
			08 12 00 00 0000 0000 0000 0000 00 00 0000 00 000000`},
		{name: "6 read-only", cdb: "1a 08 1c 00 ff 00", setup: setup{opt: Options{ReadOnly: true}}, want: `
			0f 00
			90                    # WP, DPOFUA
			00
			1c 0a 08 00 00000000 00000000`},
		{name: "6 read-only store", cdb: "1a 08 1c 00 04 00", setup: setup{info: func(i *backend.Info) { i.ReadOnly = true }},
			want: "0f 00 90 00"},
		{name: "10 control", cdb: "5a 08 0a 00 000000 00ff 00", want: `
			0012                  # MODE DATA LENGTH: 20-2
			00 10 00 00 0000
			0a 0a 02 10 00 40 0000 ffff 0000`},
		{name: "10 short descriptor", cdb: "5a 00 0a 00 000000 0010 00", want: `
			001a 00 10
			00                    # LONGLBA 0
			00 0008 ` + shortDescriptor},
		{name: "10 long descriptor", cdb: "5a 10 0a 00 000000 00ff 00", want: `
			0022                  # MODE DATA LENGTH: 36-2
			00 10
			01                    # LONGLBA
			00
			0010                  # BLOCK DESCRIPTOR LENGTH
			0000000000000800      # NUMBER OF LOGICAL BLOCKS
			00000000 00000200     # LOGICAL BLOCK LENGTH
			0a 0a 02 10 00 40 0000 ffff 0000`},
		{name: "10 2 TiB", cdb: "5a 00 0a 00 000000 0010 00", setup: setup{size: 2 << 40}, want: `
			001a 00 10 00 00 0008
			ffffffff              # more blocks than fit
			00 000200`},
		{name: "10 long descriptor of 2 TiB", cdb: "5a 10 0a 00 000000 0018 00", setup: setup{size: 2 << 40}, want: `
			0022 00 10 01 00 0010 0000000100000000 00000000 00000200`},
		{name: "6 of 4096", cdb: "1a 00 3f 00 0c 00", setup: setup{blockSize: 4096}, want: "43 00 10 08 00000100 00 001000"},
	} {
		t.Run(s.name, func(t *testing.T) {
			wantBytes(t, newRig(t, s.setup).good(s.cdb, nil), unhex(s.want))
		})
	}

	r := newRig(t, setup{})
	wantSense(t, r.run("1a 00 ff 00 ff 00", nil), 0x5, 0x39, 0x00) // saved values
	wantSense(t, r.run("5a 00 c8 00 000000 00ff 00", nil), 0x5, 0x39, 0x00)
	wantField(t, r.run("1a 00 0a 01 ff 00", nil), 3, noField) // Control Extension
	wantField(t, r.run("5a 00 3f 05 000000 00ff 00", nil), 3, noField)
	wantField(t, r.run("5a 00 3f 02 000000 00ff 00", nil), 3, noField)
	wantField(t, newRig(t, setup{info: thick}).run("1a 00 1c 02 ff 00", nil), 3, noField)
	for page := range 0x3f {
		switch page {
		case 0x01, 0x08, 0x0a, 0x1c:
		default:
			wantField(t, r.run(fmt.Sprintf("1a 00 %02x 00 ff 00", page), nil), 2, 5)
		}
	}
}

// SBC-3, sections 5.15 and 5.16.
func TestReadCapacity(t *testing.T) {
	for _, s := range []struct {
		name, cdb, want string
		setup           setup
	}{
		{name: "10", cdb: "25", want: "000007ff 00000200"},
		{name: "10 PMI", cdb: "25 00 00000005 0000 01 00", want: "000007ff 00000200"},
		{name: "10 of 2 TiB - 512", cdb: "25", setup: setup{size: 2<<40 - 512}, want: "fffffffe 00000200"},
		{name: "10 of 2 TiB", cdb: "25", setup: setup{size: 2 << 40}, want: "ffffffff 00000200"},
		{name: "10 of 4 TiB", cdb: "25", setup: setup{size: 4 << 40}, want: "ffffffff 00000200"},
		{name: "16", cdb: "9e 10 0000000000000000 000000ff 00 00", want: `
			00000000000007ff 00000200
			00                    # P_TYPE 0, PROT_EN 0
			00                    # a logical block is a physical block
			c000                  # LBPME, LBPRZ, LOWEST ALIGNED LBA 0
			00000000000000000000000000000000`},
		{name: "16 thick, 512 in 4096", cdb: "9e 10 0000000000000000 00000020 00 00", setup: setup{info: func(i *backend.Info) {
			i.DiscardGranularity, i.PhysicalBlockSize = 0, 4096
		}}, want: `
			00000000000007ff 00000200
			00
			03                    # 2^3 logical blocks in a physical one
			0000
			00000000000000000000000000000000`},
		{name: "16 of 4 TiB", cdb: "9e 10 0000000000000000 0000000c 00 00", setup: setup{size: 4 << 40},
			want: "00000001ffffffff 00000200"},
		{name: "16 none", cdb: "9e 10 0000000000000000 00000000 00 00", want: ""},
		{name: "16 PMI", cdb: "9e 10 0000000000000001 00000008 01 00", want: "00000000000007ff"},
	} {
		t.Run(s.name, func(t *testing.T) {
			wantBytes(t, newRig(t, s.setup).good(s.cdb, nil), unhex(s.want))
		})
	}
	r := newRig(t, setup{})
	wantField(t, r.run("25 00 00000001 0000 00 00", nil), 2, noField) // an LBA without PMI
	wantField(t, r.run("9e 10 0000000000000001 000000ff 00 00", nil), 2, noField)
}

// SPC-4, section 6.39.
func TestRequestSense(t *testing.T) {
	r := newRig(t, setup{})
	wantBytes(t, r.good("03 00 0000 ff 00", nil), unhex("70 00 00 00000000 0a 00000000 00 00 00 000000"))
	wantBytes(t, r.good("03 00 0000 05 00", nil), unhex("70 00 00 0000"))
	wantBytes(t, r.good("03 00 0000 00 00", nil), nil)
	wantBytes(t, r.good("03 01 0000 ff 00", nil), unhex("72 00 00 00 000000 00"))
	r.good("1b 00 0000 00 00", nil)
	wantBytes(t, r.good("03 00 0000 ff 00", nil), unhex("70 00 02 00000000 0a 00000000 04 02 00 000000"))
	wantBytes(t, r.good("03 01 0000 ff 00", nil), unhex("72 02 04 02 000000 00"))
}

// SBC-3, section 5.25: while the medium is stopped, commands that need it fail for all
// initiators, and no others do.
func TestStartStop(t *testing.T) {
	r := newRig(t, setup{info: volatile})
	other := r.login()
	r.good("1b 01 0000 04 00", nil) // IMMED, NO_FLUSH, START 0
	if n := r.store.Calls(backendtest.Sync); n != 1 {
		t.Errorf("%d syncs, want 1", n)
	}
	r.wantNotReady(0x04, 0x02, r.nexus, other)
	r.good("1b 00 0000 01 00", nil)
	wantGood(t, "TEST UNIT READY", do(other, &r.c, [8]byte{}, "00", nil, all))
	wantField(t, r.run("1b 00 0000 10 00", nil), 4, 7) // POWER CONDITION
	wantField(t, r.run("1b 00 0000 02 00", nil), 4, 1) // LOEJ: nothing to eject
	wantField(t, r.run("1b 00 0001 00 00", nil), 3, 3) // POWER CONDITION MODIFIER
	r.good("00", nil)
}

const (
	cachingOff = "08 12 00 00 0000 0000 0000 0000 00 00 0000 00 000000 "
	cachingOn  = "08 12 04 00 0000 0000 0000 0000 00 00 0000 00 000000 "
	control    = "0a 0a 02 10 00 40 0000 ffff 0000 "
	protected  = "0a 0a 02 10 08 40 0000 ffff 0000 " // SWP
)

// modeSelect runs MODE SELECT(6), or with ten MODE SELECT(10), with PF.
func (r *rig) modeSelect(ten bool, list string) result {
	b := unhex(list)
	if ten {
		return r.run(fmt.Sprintf("55 10 0000000000 %04x 00", len(b)), b)
	}
	return r.run(fmt.Sprintf("15 10 0000 %02x 00", len(b)), b)
}

// The unit follows WCE (SBC-3, section 6.5.4): without it, a write is durable before its status,
// and so is everything written before.
func TestModeSelectCache(t *testing.T) {
	r := newRig(t, setup{info: volatile})
	other := r.login()
	block := pattern(512, 1)
	r.good(extentCDB(0x2a, 0, 0, 1), block)
	wantGood(t, "WCE 0", r.modeSelect(false, "00 00 00 00"+cachingOff))
	if n := r.store.Calls(backendtest.Sync); n != 1 {
		t.Errorf("%d syncs, want 1", n)
	}
	wantBytes(t, r.good("1a 08 08 00 ff 00", nil), unhex("17 00 10 00"+cachingOff))
	wantBytes(t, r.good("1a 08 88 00 ff 00", nil), unhex("17 00 10 00"+cachingOn)) // default
	r.good(extentCDB(0x2a, 0, 0, 1), block)
	if w, d := r.store.Calls(backendtest.WriteAt), r.store.Calls(backendtest.WriteDurable); w != 1 || d != 1 {
		t.Errorf("%d plain writes, %d durable ones; want 1 of each", w, d)
	}
	// All other nexuses hear of it, once, and that nothing changed, nobody.
	wantSense(t, do(other, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x2a, 0x01)
	wantGood(t, "WCE 0 again", r.modeSelect(false, "00 00 00 00"+cachingOff))
	wantGood(t, "TEST UNIT READY", do(other, &r.c, [8]byte{}, "00", nil, all))
	r.good("00", nil)

	wantGood(t, "WCE 1", r.modeSelect(true, "0000 00 00 00 00 0000"+cachingOn))
	r.good(extentCDB(0x2a, 0, 0, 1), block)
	if w := r.store.Calls(backendtest.WriteAt); w != 2 {
		t.Errorf("with WCE again, %d plain writes, want 2", w)
	}
	// A reset brings the default value back.
	wantGood(t, "WCE 0", r.modeSelect(false, "00 00 00 00"+cachingOff))
	r.reset(r.nexus)
	wantBytes(t, r.good("1a 08 08 00 ff 00", nil), unhex("17 00 10 00"+cachingOn))

	// The sync that turning it off takes may fail.
	r.store.Fail(backendtest.Sync, backend.ErrUnsynced)
	wantSense(t, r.modeSelect(false, "00 00 00 00"+cachingOff), 0x4, 0x0c, 0x00)

	// There is no cache to turn on, or it is not to be used.
	for _, s := range []setup{{}, {info: volatile, opt: Options{WriteThrough: true}}} {
		r := newRig(t, s)
		wantListField(t, r.modeSelect(false, "00 00 00 00"+cachingOn), 4+2)
		wantGood(t, "WCE 0", r.modeSelect(false, "00 00 00 00"+cachingOff))
	}
}

// wantListField checks for INVALID FIELD IN PARAMETER LIST with a field pointer.
func wantListField(t testing.TB, res result, octet int) {
	t.Helper()
	wantSense(t, res, 0x5, 0x26, 0x00)
	if want := []byte{0x80, byte(octet >> 8), byte(octet)}; !bytes.Equal(res.sense[15:], want) {
		t.Fatalf("field pointer % x, want % x", res.sense[15:], want)
	}
}

// SPC-4, section 7.5.8: SWP write protects the unit for all initiators.
func TestModeSelectSWP(t *testing.T) {
	r := newRig(t, setup{})
	other := r.login()
	wantGood(t, "SWP 1", r.modeSelect(false, "00 00 00 00"+protected))
	wantSense(t, do(other, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x2a, 0x01)
	for _, n := range []*Nexus{r.nexus, other} {
		for _, row := range rowsFor(r.unit) {
			res := doCDB(n, &r.c, [8]byte{}, rowCDB(row), make([]byte, 512), all)
			if row.flags&writes != 0 {
				wantSense(t, res, 0x7, 0x27, 0x02)
			} else {
				wantDone(t, row, res)
			}
		}
	}
	wantBytes(t, r.good("1a 08 0a 00 ff 00", nil), unhex("0f 00 90 00"+protected)) // WP
	wantGood(t, "SWP 0", r.modeSelect(false, "0f 00 90 00"+control))               // as MODE SENSE has it
	r.good(extentCDB(0x2a, 0, 0, 1), make([]byte, 512))
	wantGood(t, "SWP 1", r.modeSelect(false, "00 00 00 00"+protected))
	r.reset(r.nexus)
	r.good(extentCDB(0x2a, 0, 0, 1), make([]byte, 512))
}

// SPC-4, sections 6.9, 6.10 and 7.5: an initiator can send back what MODE SENSE returns. Anything
// else is refused with the offset of the wrong byte, and has no effect.
func TestModeSelectList(t *testing.T) {
	const six, ten = "00 00 00 00", "0000 00 00 00 00 0000"
	for _, s := range []struct {
		name  string
		ten   bool
		list  string
		octet int // that is wrong; -1: none; -2: PARAMETER LIST LENGTH ERROR
	}{
		{"nothing", false, "", -1},
		{"a header", false, six, -1},
		{"a header of eight", true, ten, -1},
		{"all pages", false, six + pagesCurrent, -1},
		{"all pages, ten", true, ten + pagesCurrent, -1},
		{"a block descriptor", false, "00 00 00 08" + shortDescriptor + cachingOff, -1},
		{"a block descriptor without blocks", false, "00 00 00 08 00000000 00 000200", -1},
		{"a block descriptor of all blocks", true, "0000 00 00 00 00 0008 ffffffff 00 000200", -1},
		{"a long block descriptor", true, "0000 00 00 01 00 0010 0000000000000800 00000000 00000200" + control, -1},
		{"MODE DATA LENGTH and device-specific parameter", false, "ff 00 90 00" + control, -1},
		{"half a header", false, "00 00", -2},
		{"half a header of eight", true, "00 00 00 00 00 00 00", -2},
		{"MEDIUM TYPE", false, "00 01 00 00", 1},
		{"MEDIUM TYPE, ten", true, "0000 01 00 00 00 0000", 2},
		{"BLOCK DESCRIPTOR LENGTH", false, "00 00 00 04 00000000", 3},
		{"BLOCK DESCRIPTOR LENGTH, ten", true, "0000 00 00 00 00 0010" + shortDescriptor + shortDescriptor, 7},
		{"half a block descriptor", false, "00 00 00 08 00000000", -2},
		{"another capacity", false, "00 00 00 08 000007ff 00 000200", 4},
		{"another block length", false, "00 00 00 08 00000800 00 001000", 4 + 5},
		{"another long block length", true, "0000 00 00 01 00 0010 0000000000000800 00000000 00001000", 8 + 12},
		{"an unknown page", false, six + "02 0e 00000000 00000000 00000000 0000", 4},
		{"PS", false, six + "8a 0a 02 10 00 40 0000 ffff 0000", -1},
		{"SPF", false, six + "4a 0a 02 10 00 00 0000 ffff 0000", 4},
		{"PAGE LENGTH", false, six + "0a 08 02 10 00 00 0000 ffff", 5},
		{"half a page", false, six + "0a 0a 02 10 00 40", -2},
		{"one byte of a page", false, six + "0a", -2},
		{"what cannot be changed", false, six + "0a 0a 02 10 00 40 0000 fffe 0000", 4 + 9},
		{"TST 010b", false, six + "0a 0a 42 10 00 40 0000 ffff 0000", 4 + 2},
		{"TST 011b", false, six + "0a 0a 62 10 00 40 0000 ffff 0000", 4 + 2},
		{"TMF_ONLY", false, six + "0a 0a 12 10 00 40 0000 ffff 0000", 4 + 2},
		{"TAS", false, six + "0a 0a 02 10 00 00 0000 ffff 0000", 4 + 5},
		{"what cannot be changed, behind what can", false, six + protected + "1c 0a 00 00 00000000 00000000", 4 + 12 + 2},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newRig(t, setup{})
			res := r.modeSelect(s.ten, s.list)
			switch s.octet {
			case -1:
				wantGood(t, s.name, res)
			case -2:
				wantSense(t, res, 0x5, 0x1a, 0x00)
			default:
				wantListField(t, res, s.octet)
			}
			wantBytes(t, r.good("1a 08 3f 00 ff 00", nil), unhex("3b 00 10 00"+pagesCurrent))
		})
	}
	r := newRig(t, setup{})
	wantField(t, r.run("15 00 0000 10 00", make([]byte, 16)), 1, 4)                            // PF 0
	wantField(t, r.run("15 11 0000 10 00", make([]byte, 16)), 1, 0)                            // SP: nothing is saved
	wantSense(t, r.run("15 10 0000 10 00", unhex(six + control)[:15]), 0x5, 0x0e, 0x03)        // less than announced
	wantSense(t, r.run("55 10 0000000000 0014 00", unhex(ten + control)[:9]), 0x5, 0x0e, 0x03) // less than announced
}
