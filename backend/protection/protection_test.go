package protection

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
)

// bitwise computes the CRC bit by bit (SBC-3, section 4.22.4).
func bitwise(p []byte) (crc uint16) {
	for _, b := range p {
		for bit := 7; bit >= 0; bit-- {
			top := crc>>15 ^ uint16(b>>bit&1)
			if crc <<= 1; top != 0 {
				crc ^= polynomial
			}
		}
	}
	return crc
}

// The CRC is that of the test cases of SBC-3, table 36, and that of the polynomial for any length.
func TestCRC(t *testing.T) {
	counting := make([]byte, 32)
	for i := range counting {
		counting[i] = byte(i)
	}
	for _, c := range []struct {
		name string
		p    []byte
		want uint16
	}{
		{"zeros", make([]byte, 32), 0},
		{"ones", bytes.Repeat([]byte{0xff}, 32), 0xa293},
		{"counting", counting, 0x0224},
		{"123456789", []byte("123456789"), 0xd0db}, // CRC-16/T10-DIF in the catalogue of CRCs
		{"nothing", nil, 0},
	} {
		if got := CRC(c.p); got != c.want {
			t.Errorf("%s: %#x, want %#x", c.name, got, c.want)
		}
	}
	r := rand.New(rand.NewPCG(1, 2))
	for n := range 600 {
		p := make([]byte, n+n%16)[n%16:]
		for i := range p {
			p[i] = byte(r.Uint32())
		}
		want := bitwise(p)
		if got := CRC(p); got != want {
			t.Fatalf("%d bytes: %#x, want %#x", n, got, want)
		}
		if got := update(0, p); got != want {
			t.Fatalf("%d bytes by the tables: %#x, want %#x", n, got, want)
		}
	}
}

// A Tuple is on the wire as in SBC-3, section 4.22.3.
func TestTuple(t *testing.T) {
	wire := []byte{
		0x12, 0x34, // LOGICAL BLOCK GUARD
		0xab, 0xcd, // LOGICAL BLOCK APPLICATION TAG
		0x01, 0x02, 0x03, 0x04, // LOGICAL BLOCK REFERENCE TAG
	}
	p := Get(wire)
	if p != New(0x1234, 0xabcd, 0x01020304) || p.Guard() != 0x1234 || p.App() != 0xabcd || p.Ref() != 0x01020304 {
		t.Errorf("Get: %#x", p)
	}
	got := make([]byte, Len)
	if p.Put(got); !bytes.Equal(got, wire) {
		t.Errorf("Put: %x", got)
	}
	if p := p.WithRef(7); p != New(0x1234, 0xabcd, 7) {
		t.Errorf("WithRef: %#x", p)
	}
}

// Each field that differs is found if it is checked, and only then. Tags that disable checks do so for what is read.
func TestCheck(t *testing.T) {
	const lba = 0x2_0000_0007
	block := bytes.Repeat([]byte("protection"), 52)[:512]
	crc := CRC(block)
	known := &AppTags{{0, lba, 3}, {lba, 1, 5}, {lba + 1, 1, 4}}
	tags := []struct {
		name            string
		tuple           Tuple
		guard, app, ref bool // differs
		escapes         [4]bool
	}{
		{name: "right", tuple: New(crc, 5, 7)},
		{name: "guard", tuple: New(crc^1, 5, 7), guard: true},
		{name: "application tag", tuple: New(crc, 4, 7), app: true},
		{name: "application tag and guard", tuple: New(crc^1, 4, 7), guard: true, app: true},
		{name: "reference tag", tuple: New(crc, 5, 8), ref: true},
		{name: "both", tuple: New(crc^1, 5, 8), guard: true, ref: true},
		{name: "application tag ffff", tuple: New(crc^1, 0xffff, 8), guard: true, app: true, ref: true, escapes: [4]bool{Type1: true}},
		{name: "reference tag ffffffff", tuple: New(crc^1, 0, 0xffffffff), guard: true, app: true, ref: true},
		{name: "unwritten", tuple: Unwritten, guard: true, app: true, ref: true, escapes: [4]bool{Type1: true, Type3: true}},
	}
	for _, typ := range []Type{Type1, Type3} {
		for _, c := range tags {
			for n := range 2 * (CheckAll + 1) {
				want, checks, a := Field(0), n>>1, known
				if n&1 == 0 {
					a = nil
				}
				switch {
				case c.guard && checks&CheckGuard != 0:
					want = Guard
				case c.ref && checks&CheckRef != 0 && typ == Type1:
					want = Ref
				case c.app && checks&CheckApp != 0 && a != nil:
					want = App
				}
				what := fmt.Sprintf("type %d, %s, checks %b, tags %v", typ, c.name, checks, a)
				if got := typ.Check(block, c.tuple, lba, checks, a); got != want {
					t.Errorf("%s: Check finds %v, want %v", what, got, want)
				}
				if c.escapes[typ] {
					want = 0
				}
				if got := typ.CheckRead(block, c.tuple, lba, checks, a); got != want {
					t.Errorf("%s: CheckRead finds %v, want %v", what, got, want)
				}
			}
		}
		for a, app := range map[*AppTags]uint16{nil: 0, known: 5} {
			own := typ.Generate(block, lba, a)
			if typ.Escapes(own) || typ.Check(block, own, lba, CheckAll, known) != 0 && a != nil || own.App() != app {
				t.Errorf("type %d: %#x of Generate is not checked, or wrong", typ, own)
			}
			if zeros := typ.OfZeros(lba, a); zeros != typ.Generate(make([]byte, 512), lba, a) {
				t.Errorf("type %d: %#x of OfZeros", typ, zeros)
			}
		}
		if p := typ.Generate(block, lba+2, known); p.App() != 0 || typ.Check(block, p, lba+2, CheckAll, known) != 0 {
			t.Errorf("type %d: %#x of Generate for a block with an unknown tag", typ, p)
		}
	}
	if p := Type1.Next(New(1, 2, 0xffffffff)); p != New(1, 2, 0) {
		t.Errorf("Next of type 1: %#x", p)
	}
	if p := Type3.Next(New(1, 2, 3)); p != New(1, 2, 3) {
		t.Errorf("Next of type 3: %#x", p)
	}
	for typ, ok := range []bool{true, true, false, true, false} {
		if err := Type(typ).Validate(); (err == nil) != ok {
			t.Errorf("Validate of type %d: %v", typ, err)
		}
	}
}

func BenchmarkCRC(b *testing.B) {
	for _, n := range []int{512, 4096} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p := make([]byte, n)
			b.SetBytes(int64(n))
			for b.Loop() {
				CRC(p)
			}
		})
	}
}
