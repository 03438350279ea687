package lun

import (
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
		0a 0a 02 10 00 00 0000 ffff 0000               # Control: D_SENSE 0, GLTSD; unrestricted reordering, QERR 0
		1c 0a 08 00 00000000 00000000                  # Informational Exceptions Control: DEXCPT`
	pagesChangeable = `
		01 0a 00 00 00 00 00 00 00 00 0000
		08 12 00 00 0000 0000 0000 0000 00 00 0000 00 000000
		0a 0a 00 00 00 00 0000 0000 0000
		1c 0a 00 00 00000000 00000000`
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
		{name: "6 all pages and subpages", cdb: "1a 08 3f ff ff 00", want: "3b 00 10 00" + pagesCurrent},
		{name: "6 changeable", cdb: "1a 08 7f 00 ff 00", want: "3b 00 10 00" + pagesChangeable},
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
			0a 0a 02 10 00 00 0000 ffff 0000`},
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
			0a 0a 02 10 00 00 0000 ffff 0000`},
		{name: "10 2 TiB", cdb: "5a 00 0a 00 000000 0010 00", setup: setup{size: 2 << 40}, want: `
			001a 00 10 00 00 0008
			ffffffff              # more blocks than fit
			00 000200`},
		{name: "10 long descriptor of 2 TiB", cdb: "5a 10 0a 00 000000 0018 00", setup: setup{size: 2 << 40}, want: `
			0022 00 10 01 00 0010 0000000100000000 00000000 00000200`},
		{name: "6 of 4096", cdb: "1a 00 3f 00 0c 00", setup: setup{blockSize: 4096}, want: "43 00 10 08 00000100 00 001000"},
	} {
		t.Run(s.name, func(t *testing.T) {
			wantOctets(t, newRig(t, s.setup).good(s.cdb, nil), unhex(s.want))
		})
	}

	r := newRig(t, setup{})
	wantSense(t, r.run("1a 00 ff 00 ff 00", nil), 0x5, 0x39, 0x00) // saved values
	wantSense(t, r.run("5a 00 c8 00 000000 00ff 00", nil), 0x5, 0x39, 0x00)
	wantField(t, r.run("1a 00 0a 01 ff 00", nil), 3, noField) // Control Extension
	wantField(t, r.run("5a 00 3f 05 000000 00ff 00", nil), 3, noField)
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
			wantOctets(t, newRig(t, s.setup).good(s.cdb, nil), unhex(s.want))
		})
	}
	r := newRig(t, setup{})
	wantField(t, r.run("25 00 00000001 0000 00 00", nil), 2, noField) // an LBA without PMI
	wantField(t, r.run("9e 10 0000000000000001 000000ff 00 00", nil), 2, noField)
}

// SPC-4, section 6.39.
func TestRequestSense(t *testing.T) {
	r := newRig(t, setup{})
	wantOctets(t, r.good("03 00 0000 ff 00", nil), unhex("70 00 00 00000000 0a 00000000 00 00 00 000000"))
	wantOctets(t, r.good("03 00 0000 05 00", nil), unhex("70 00 00 0000"))
	wantOctets(t, r.good("03 00 0000 00 00", nil), nil)
	wantOctets(t, r.good("03 01 0000 ff 00", nil), unhex("72 00 00 00 000000 00"))
	r.good("1b 00 0000 00 00", nil)
	wantOctets(t, r.good("03 00 0000 ff 00", nil), unhex("70 00 02 00000000 0a 00000000 04 02 00 000000"))
	wantOctets(t, r.good("03 01 0000 ff 00", nil), unhex("72 02 04 02 000000 00"))
}

// SBC-3, section 5.25: commands that need the medium fail while it is stopped,
// for all initiators; the others do not.
func TestStartStop(t *testing.T) {
	r := newRig(t, setup{info: volatile})
	other := r.login()
	r.good("1b 01 0000 04 00", nil) // IMMED, NO_FLUSH, START 0
	if n := r.store.Calls(backendtest.Sync); n != 1 {
		t.Errorf("%d syncs, want 1", n)
	}
	for _, n := range []*Nexus{r.nexus, other} {
		for _, row := range commands {
			if row.op == 0x1b {
				continue
			}
			res := doCDB(n, &r.c, [8]byte{}, rowCDB(&row), make([]byte, 512), all)
			if row.flags&medium != 0 {
				wantSense(t, res, 0x2, 0x04, 0x02)
			} else {
				wantGood(t, row.name, res)
			}
		}
	}
	r.good("1b 00 0000 01 00", nil)
	wantGood(t, "TEST UNIT READY", do(other, &r.c, [8]byte{}, "00", nil, all))
	wantField(t, r.run("1b 00 0000 10 00", nil), 4, 4) // POWER CONDITION
	wantField(t, r.run("1b 00 0000 02 00", nil), 4, 1) // LOEJ: nothing to eject
	wantField(t, r.run("1b 00 0001 00 00", nil), 3, 0) // POWER CONDITION MODIFIER
	r.good("00", nil)
}
