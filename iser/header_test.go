package iser

import (
	"bytes"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/testkit"
)

var unhex = testkit.Unhex

// The headers of RFC 7145, section 9.2, with STags and Base Offsets like those of Linux.
func TestHeaderGolden(t *testing.T) {
	read := Remote{true, 0x0004d101, 0xffff888012345000}
	write := Remote{true, 0x0004d202, 0xffff888012346000}
	for _, tt := range []struct {
		id, wire string
		h        Header
	}{
		{"V-ISER-1 ISER-9.2-1 ISER-9.2-4", "10000000 00000000 0000000000000000 00000000 0000000000000000", Header{}},
		{"V-ISER-2 ISER-9.2-1", "14000000 00000000 0000000000000000 0004d101 ffff888012345000", Header{Read: read}},
		{"V-ISER-3 ISER-9.2-1", "18000000 0004d202 ffff888012346000 00000000 0000000000000000", Header{Write: write}},
		{"V-ISER-4 ISER-9.2-1 ISER-9.5.3-1", "1c000000 0004d202 ffff888012346000 0004d101 ffff888012345000",
			Header{Write: write, Read: read}},
		{"STag 0 is an STag", "18000000 00000000 0000000000001000 00000000 0000000000000000",
			Header{Write: Remote{true, 0, 0x1000}}},
	} {
		t.Run(tt.id, func(t *testing.T) {
			want := unhex(tt.wire)
			got := bytes.Repeat([]byte{0xee}, HeaderLen)
			tt.h.Put(got)
			if !bytes.Equal(got, want) {
				t.Errorf("encoded %x, want %x", got, want)
			}
			h, hello, err := ParseHeader(want)
			if err != nil || hello || h != tt.h {
				t.Errorf("decoded %+v, %t, %v", h, hello, err)
			}
			for i := range want {
				if _, _, err := ParseHeader(want[:i]); err == nil {
					t.Errorf("a prefix of %d bytes was accepted", i)
				}
			}
		})
	}
}

func TestHeaderTolerance(t *testing.T) {
	t.Run("ISER-9.2-2 ISER-9.2-3 ISER-9.2-6", func(t *testing.T) {
		h, _, err := ParseHeader(unhex("13ffffff" + strings.Repeat("ee", 24)))
		if err != nil || h != (Header{}) {
			t.Fatalf("%+v, %v", h, err)
		}
	})
	t.Run("ISER-9.1-3 ISER-10.1.3.3-1", func(t *testing.T) {
		for op := range 16 {
			b := make([]byte, HeaderLen)
			b[0] = byte(op << 4)
			_, hello, err := ParseHeader(b)
			if known := op == msgControl || op == msgHello; (err == nil) != known || hello != (op == msgHello) {
				t.Errorf("opcode %d: hello %t, %v", op, hello, err)
			}
		}
	})
}

// The Hello messages of RFC 7145, sections 9.3 and 9.4.
func TestHelloGolden(t *testing.T) {
	b := make([]byte, HeaderLen)
	Hello{10, 10, 128}.Put(b)
	if want := unhex("20aa0080" + strings.Repeat("00", 24)); !bytes.Equal(b, want) {
		t.Errorf("V-ISER-5 ISER-9.3-2 ISER-9.3-3: %x", b)
	}
	b[0] |= 0x0f // reserved
	for i := range b[4:] {
		b[4+i] = 0xee
	}
	if h := parseHello(b); h != (Hello{10, 10, 128}) {
		t.Errorf("ISER-9.3-4: %+v", h)
	}
	if _, hello, err := ParseHeader(append(b, 0)); err == nil || hello {
		t.Error("ISER-9.3-1: a Hello of 29 bytes was accepted")
	}
	HelloReply{MaxVer: 10, CurVer: 10, ORD: 16}.Put(b)
	if want := unhex("30aa0010" + strings.Repeat("00", 24)); !bytes.Equal(b, want) {
		t.Errorf("V-ISER-6 ISER-9.4-3: %x", b)
	}
	HelloReply{Reject: true, MaxVer: 10, CurVer: 10}.Put(b)
	if want := unhex("31aa0000" + strings.Repeat("00", 24)); !bytes.Equal(b, want) {
		t.Errorf("V-ISER-6 ISER-9.4-2: %x", b)
	}
	for _, tt := range []struct {
		h    Hello
		want bool
	}{{Hello{10, 10, 1}, true}, {Hello{1, 1, 1}, true}, {Hello{15, 9, 1}, true}, {Hello{11, 11, 1}, false},
		{Hello{9, 2, 1}, false}} {
		if tt.h.speaks() != tt.want {
			t.Errorf("ISER-5.1.3-7: versions %d..%d: %t", tt.h.MinVer, tt.h.MaxVer, !tt.want)
		}
	}
}

func FuzzHeader(f *testing.F) {
	f.Add(unhex("1c000000 0004d202 ffff888012346000 0004d101 ffff888012345000"))
	f.Add(unhex("20aa0080" + strings.Repeat("00", 24)))
	testkit.FuzzBytes(f, func(t testing.TB, b []byte) {
		h, hello, err := ParseHeader(b)
		if err != nil {
			return
		}
		if hello {
			x := parseHello(b)
			y := make([]byte, HeaderLen)
			if x.Put(y); parseHello(y) != x {
				t.Fatalf("%+v came back as %+v", x, parseHello(y))
			}
			return
		}
		again := make([]byte, HeaderLen)
		h.Put(again)
		if h2, _, err := ParseHeader(again); err != nil || h2 != h {
			t.Fatalf("%+v came back as %+v, %v", h, h2, err)
		}
	})
}
