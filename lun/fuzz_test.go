package lun

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/backend/protection"
)

// fuzzSetups are the kinds of units that FuzzCDB uses.
var fuzzSetups = []setup{
	{},
	{info: volatile},
	{info: volatile, opt: Options{WriteThrough: true}},
	{blockSize: 4096, info: thick},
	{opt: Options{ReadOnly: true}},
	{info: volatile, opt: everything},
	{info: volatile, opt: everything, protect: protection.Type1},
	{blockSize: 4096, protect: protection.Type3},
}

// FuzzCDB runs any CDB for any LUN on a unit of any kind, like a transport: in pieces of any
// allowed size, with an expected data transfer length that may cut the data short, and with a
// store that may fail. The command always ends with a status, well-formed sense data and bounded
// lengths. A read-only unit stays as it is, and the Command can be reused.
func FuzzCDB(f *testing.F) {
	kinds := byte(len(fuzzSetups))
	add := func(cdb []byte, data string) {
		for kind := range kinds {
			f.Add(make([]byte, 8), cdb, unhex(data), uint32(1<<24), uint64(kind), kind, false)
		}
		f.Add(make([]byte, 8), cdb, unhex(data), uint32(100), uint64(1), byte(0), false)
		f.Add(make([]byte, 8), cdb, unhex(data), uint32(1<<24), uint64(1), byte(0), true)
		f.Add(unhex("4005 0000 0000 0000"), cdb, unhex(data), uint32(1<<24), uint64(1), byte(0), false)
	}
	for i := range commands {
		add(rowCDB(&commands[i]), "")
	}
	add(unhex("42 00 00000000 00 0028 00"), "0026 0020 00000000  0000000000000002 00000003 00000000  00000000000000ff 00000001 00000000")
	add(unhex("42 00 00000000 00 ffff 00"), "ffff fff0 00000000")
	add(unhex("42 00 00000000 00 0004 00"), "")
	add(unhex("93 09 0000000000000000 00000040 00 00"), "")
	add(unhex("93 08 0000000000000000 00000040 00 00"), "00")
	add(unhex("2f 02 00000000 00 0040 00"), "00")
	add(unhex("8f 06 0000000000000000 00000040 00 00"), "01")
	add(unhex("88 08 ffffffffffffffff ffffffff 00 00"), "")
	add(unhex("8a 08 0000000000000001 00000040 00 00"), "01 02 03")
	add(unhex("08 000000 00 00"), "")
	add(unhex("a3 0c 80 00 0000 ffffffff 00 00"), "")
	add(unhex("a3 0c 03 28 ffff ffffffff 00 00"), "")
	add(unhex("12 01 83 ffff 00"), "")
	add(unhex("5a 10 3f ff 000000 ffff 00"), "")
	add(unhex("9e 1f"), "")
	add(unhex("89 08 0000000000000001 00000002 00 00"), "")
	add(unhex("8b 08 0000000000000001 00000002 00 00"), "01")
	add(unhex("9c 08 0000000000000001 00000002 00 00"), "01")
	add(unhex("8a 20 0000000000000001 00000040 00 00"), "01 02 03")
	add(unhex("88 60 0000000000000001 00000040 00 00"), "")
	add(unhex("8f 62 0000000000000001 00000040 00 00"), "")
	add(unhex("8f 66 0000000000000001 00000040 00 00"), "")
	add(unhex("93 60 0000000000000001 00000040 00 00"), "01")
	add(unhex("89 60 0000000000000001 00000002 00 00"), "")
	add(unhex("8b 60 0000000000000001 00000002 00 00"), "01")
	add(unhex("15 10 0000 18 00"), "00000000 08 12 04 00 0000 0000 0000 0000 00 00 0000 00 000000")
	add(unhex("55 10 0000000000 0024 00"), "0000000001000010 0000000000000800 0000000000000200 0a0a02100840 0000ffff0000")
	add(unhex("1e 00 0000 01 00"), "")
	add(unhex("1b 00 0000 02 00"), "")
	add(unhex("1b 00 0000 f3 00"), "")
	cscd := "e4 00 0000 01 03 00 08 3001020304050607 000000000000000000000000 00000200"
	copyBlocks := func(list string) {
		n := len(unhex(list))
		add(unhex(fmt.Sprintf("83 00 0000000000000000 %08x 00 00", n)), list)
	}
	copyBlocks("01 18 0020 00000000 0000001c 00000000" + cscd + "02 00 0018 0000 0000 0000 0100 0000000000000000 0000000000000080")
	copyBlocks("00 18 0020 00000000 00000038 00000000" + cscd +
		"02 02 0018 0000 0000 0000 0100 0000000000000080 0000000000000000 02 00 0018 0000 0001 0000 ffff ffffffffffffffff 0000000000000000")
	copyBlocks("01 00 0020 00000000 ffffffff 00000000" + cscd)
	copyBlocks4 := func(list string) {
		n := len(unhex(list))
		add(unhex(fmt.Sprintf("83 01 0000000000000000 %08x 00 00", n)), list)
	}
	header := "01 10 0020" + strings.Repeat("00", 11) + "%s ff000000 00000001" + strings.Repeat("00", 18)
	for _, immed := range []string{"00", "01", "03"} {
		copyBlocks4(fmt.Sprintf(header, immed) + "0020 001c 0000" + cscd + "02 00 0018 0000 0000 0000 0100 0000000000000000 0000000000000080")
	}
	copyBlocks4(fmt.Sprintf(header, "00") + "0020 ffff 0001" + cscd)
	copyBlocks4("01 10 0020")
	zeros := strings.Repeat("00", 504)
	tokens := func(sa byte, list string) {
		add(unhex(fmt.Sprintf("83 %02x 00000000 00000001 %08x 00 00", sa, len(unhex(list)))), list)
	}
	tokens(0x10, "002e 00 00 00000000 00000000 0000 0020 0000000000000008 00000010 00000000 0000000000000000 00000008 00000000")
	tokens(0x10, "001e 03 00 00000258 0080ffff 0000 0010 0000000000000000 ffffffff 00000000")
	tokens(0x10, "ffff 01 00 ffffffff 00000000 0000 ffff ffffffffffffffff 00000001 00000000")
	for _, token := range []string{"ffff0001 0000 01f8", "00800001 0000 01f8", "00800000 0000 01f7", "00010000 0000 01f8"} {
		tokens(0x11, "0226 01 0000000000 0000000000000001"+token+zeros+"000000000000 0010 0000000000000008 00000010 00000000")
		tokens(0x11, "0236 02 0000000000 ffffffffffffffff"+token+zeros+
			"000000000000 0020 0000000000000008 00000010 00000000 0000000000000010 00000010 00000000")
	}
	add(unhex("84 07 00000001 00000000 ffffffff 00 00"), "")
	add(unhex("83 1c 00000001 00000000 00000000 00 00"), "")
	add(unhex("84 05 00000001 00000000 ffffffff 00 00"), "")
	add(unhex("84 00 01 00000000000000 ffffffff 00 00"), "")
	add(unhex("84 03 00 00000000000000 ffffffff 00 00"), "")
	add(unhex("48 01 0000000000 0008 00"), "02 00 0004 01020304")
	add(unhex("48 82 0000000000 0000 00"), "")
	add(unhex("04 10 0000 00 00"), "00 02 0000")
	add(unhex("04 30 0000 00 00"), "00 00 00 00 00000000")
	add(unhex("1d 04 00 0000 00"), "")
	add(unhex("1d c0 00 0000 00"), "")
	add(unhex("3b 0a 00 000000 000004 00"), "01020304")
	add(unhex("3c 0a 00 000000 0000ff 00"), "")
	add(unhex("3c 0b 00 000000 0000ff 00"), "")
	add(unhex("4d 00 40 ff 00 0000 ffff 00"), "")
	add(unhex("a3 2a 00000000 ffffffff 00 00"), "")
	add(unhex("7f 00 00 00 00 00 00 18 00 0a"), "")

	f.Fuzz(func(t *testing.T, field, cdb, data []byte, edtl uint32, seed uint64, kind byte, faulty bool) {
		if len(field) != 8 || len(cdb) == 0 || len(cdb) > 260 {
			return
		}
		s := fuzzSetups[kind%kinds]
		r := newRig(t, s)
		for _, l := range r.nexus.list() {
			delete(l.copies.of, 0) // from login
		}
		before := make([]byte, 1<<20)
		if s.opt.ReadOnly {
			copy(before, pattern(1<<20, 1))
			if err := r.store.WriteAt(before, 0); err != nil {
				t.Fatal(err)
			}
		}
		random := rand.New(rand.NewPCG(seed, 0))
		if faulty {
			r.store.Hook(func(backendtest.Op, int64, int64) error {
				if random.IntN(2) == 0 {
					return backend.ErrUnsynced
				}
				return nil
			})
		}
		lun := [8]byte(field)
		fuzzRun(t, r, lun, cdb, data, edtl, random)
		r.store.Hook(nil)
		if cap(r.c.buf) > MaxParameterList {
			t.Errorf("the Command keeps %d bytes", cap(r.c.buf))
		}
		if s.opt.ReadOnly {
			after := make([]byte, 1<<20)
			if err := r.store.ReadAt(after, 0); err != nil || !bytes.Equal(before, after) {
				t.Errorf("a read-only unit has changed (%v)", err)
			}
		}
		if in := r.good("12 00 00 0024 00", nil); len(in) != 36 || in[4] != 91 {
			t.Errorf("INQUIRY afterwards: % x", in)
		}
		if cap(r.c.buf) > MaxParameterList {
			t.Errorf("the Command keeps %d bytes", cap(r.c.buf))
		}
	})
}

// fuzzRun runs one command like a transport.
func fuzzRun(t *testing.T, r *rig, lun [8]byte, cdb, data []byte, edtl uint32, random *rand.Rand) {
	c, n := &r.c, r.nexus
	c.LUN, c.CDB = lun, append(make([]byte, 0, 16), cdb...)[:max(16, len(cdb))]
	began := n.Begin(c)
	if began {
		total := max(c.DataOut, c.DataIn)
		switch {
		case c.DataOut > 0 && c.DataIn > 0:
			t.Fatalf("data both ways: %d out, %d in", c.DataOut, c.DataIn)
		case total > maxTransfer/512*520 || c.Whole && c.DataOut > MaxParameterList:
			t.Fatalf("%d bytes out, %d in, whole %v", c.DataOut, c.DataIn, c.Whole)
		}
		total = min(total, uint64(edtl))
		buf := make([]byte, total)
		if c.DataOut > 0 && len(data) > 0 {
			copy(buf, data)
		}
		for off, ok := uint64(0), true; ok && off < total; {
			k := min(total-off, uint64(1+random.IntN(64))*4096)
			if c.Whole {
				k = total
			}
			if c.DataOut > 0 {
				ok = n.Consume(c, buf[off:off+k], off)
			} else {
				ok = n.Produce(c, buf[off:off+k], off)
			}
			if !ok && c.Status == StatusGood {
				t.Fatal("stopped without an error")
			}
			off += k
		}
		n.End(c)
	}
	checkSense(t, c, began)
}

// checkSense checks status and sense data (SPC-4, section 4.5.3).
func checkSense(t *testing.T, c *Command, began bool) {
	s := c.Sense()
	switch c.Status {
	case StatusGood:
		if !began || s != nil {
			t.Fatalf("GOOD, but began is %v, and sense % x", began, s)
		}
	case statusReservationConflict:
		if c.row == nil || c.row.op != 0x5f || s != nil { // no other initiator has reserved anything
			t.Fatalf("RESERVATION CONFLICT, sense % x", s)
		}
	case StatusCheckCondition:
		if len(s) != senseLen || s[0]&0x7f != 0x70 || int(s[7]) != senseLen-8 {
			t.Fatalf("sense % x is malformed", s)
		}
		key, asc := s[2], s[12]
		if key == keyNoSense || key > 0x0e || asc == 0 && key != keyCopyAborted || key == keyUnitAttention {
			t.Fatalf("sense % x says nothing, or what it should not", s)
		}
		field := int(binary.BigEndian.Uint16(s[16:]))
		end := 2 // without a row it is the service action that is wrong
		if c.row != nil {
			end = c.row.cdbLen()
		}
		if inCDB := s[15]&0xc0 == 0xc0; inCDB && field >= end {
			t.Fatalf("sense % x points beyond the CDB", s)
		}
	default:
		t.Fatalf("status %#x", c.Status)
	}
}
