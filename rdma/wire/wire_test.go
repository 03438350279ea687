package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/tests/testkit"
)

var unhex = testkit.Unhex

const (
	reqKey = "4d504120494420526571204672616d65"
	repKey = "4d504120494420526570204672616d65"
)

// The startup frames of RFC 5044, section 7.1.1, and RFC 6581, section 9;
// V-MPA-8 and V-MPA-9 were captured from Linux siw.
func TestStartupGolden(t *testing.T) {
	iser := []byte{0x80, 0, 0, 0}
	for _, tt := range []struct {
		name  string // row ids
		wire  string
		frame Startup
	}{
		{"V-MPA-6 MPA-7.1.1-1 MPA-7.1.1-13", reqKey + "40010000", Startup{CRC: true, Rev: 1}},
		{"V-MPA-7 MPA-7.1.1-3", repKey + "40010000", Startup{Reply: true, CRC: true, Rev: 1}},
		{"V-MPA-8 V-MPA2-1 MPA2-9-1 MPA2-9-3 MPA2-6-7", reqKey + "10020008 00800001 80000000",
			Startup{Rev: 2, Enhanced: true, Depths: Depths{IRD: 128, ORD: 1}, Private: iser}},
		{"V-MPA-9", repKey + "10020008 00010080 80000000",
			Startup{Reply: true, Rev: 2, Enhanced: true, Depths: Depths{IRD: 1, ORD: 128}, Private: iser}},
		{"V-MPA2-2 MPA2-6-9", repKey + "50020008 00010020 80000000",
			Startup{Reply: true, CRC: true, Rev: 2, Enhanced: true, Depths: Depths{IRD: 1, ORD: 32}, Private: iser}},
		{"V-MPA2-3", reqKey + "50020004 c004c000", Startup{CRC: true, Rev: 2, Enhanced: true,
			Depths: Depths{PeerToPeer: true, RTR: RTR{true, true, true}, IRD: 4}}},
		{"V-MPA2-4", repKey + "50020004 8001c004", Startup{Reply: true, CRC: true, Rev: 2, Enhanced: true,
			Depths: Depths{PeerToPeer: true, RTR: RTR{Write: true, Read: true}, IRD: 1, ORD: 4}}},
		{"V-MPA2-5 MPA2-9-4", reqKey + "50020004 3fff3fff",
			Startup{CRC: true, Rev: 2, Enhanced: true, Depths: Depths{IRD: NoDepth, ORD: NoDepth}}},
		{"V-MPA2-6", repKey + "70020004 00000008",
			Startup{Reply: true, CRC: true, Reject: true, Rev: 2, Enhanced: true, Depths: Depths{ORD: 8}}},
		{"MPA2-6-5", reqKey + "00020004 01020304", Startup{Rev: 2, Private: []byte{1, 2, 3, 4}}},
		{"MPA-7.1.1-5 markers", reqKey + "80010000", Startup{Markers: true, Rev: 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want := unhex(tt.wire)
			got, err := tt.frame.Append(nil)
			if err != nil || !bytes.Equal(got, want) {
				t.Fatalf("encoded %x, %v; want %x", got, err, want)
			}
			f, n, err := ParseStartup(want, tt.frame.Reply)
			if err != nil || n != len(want)-StartupLen {
				t.Fatalf("ParseStartup: %d bytes follow, %v", n, err)
			}
			f.SetPrivate(want[StartupLen:])
			again, err := f.Append(nil)
			if err != nil || !bytes.Equal(again, want) {
				t.Fatalf("%+v came back as %x, %v", f, again, err)
			}
			for i := range StartupLen {
				if _, _, err := ParseStartup(want[:i], tt.frame.Reply); err == nil {
					t.Fatalf("a prefix of %d bytes was accepted", i)
				}
			}
		})
	}
}

func TestStartupRefused(t *testing.T) {
	for _, tt := range []struct {
		name, wire string
		reply      bool
		want       error
	}{
		{"MPA-7.1.2-20 request for a reply", reqKey + "00010000", true, ErrRequestKey},
		{"reply for a request", repKey + "00010000", false, ErrReplyKey},
		{"MPA-7.1.1-14 revision 0", reqKey + "00000000", false, ErrRevision},
		{"MPA-7.1.1-14 revision 3", reqKey + "00030000", false, ErrRevision},
		{"MPA-7.1.1-15 revision 255", reqKey + "00ff0000", false, ErrRevision},
		{"MPA2-6-2 enhanced revision 1", reqKey + "10010004", false, ErrRevision},
		{"MPA-7.1.1-19 MPA-7.1.2-22 private data 513", reqKey + "00010201", false, ErrPrivateData},
		{"MPA2-6-8 enhanced with 3 bytes", reqKey + "10020003", false, ErrPrivateData},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, _, err := ParseStartup(unhex(tt.wire), tt.reply); !errors.Is(err, tt.want) {
				t.Fatalf("got %v, want %v", err, tt.want)
			}
		})
	}
	t.Run("MPA-7.1.1-2 MPA-7.1.1-4 every mutation of the key", func(t *testing.T) {
		for i := range 16 {
			b := unhex(reqKey + "00010000")
			b[i] ^= 0x20
			if _, _, err := ParseStartup(b, false); !errors.Is(err, ErrKey) {
				t.Fatalf("byte %d: %v", i, err)
			}
		}
	})
	t.Run("MPA-7.1.1-12 MPA-7.1.1-10 MPA2-6-6 reserved bits and R are not checked in a Request", func(t *testing.T) {
		f, _, err := ParseStartup(unhex(reqKey+"2f010000"), false)
		if err != nil || f.Reject {
			t.Fatalf("%+v, %v", f, err)
		}
	})
	t.Run("MPA-7.1.1-21 MPA2-9-2 too much private data is not sent", func(t *testing.T) {
		for _, f := range []Startup{{Rev: 1, Private: make([]byte, 513)},
			{Rev: 2, Enhanced: true, Private: make([]byte, 509)}} {
			if _, err := f.Append(nil); !errors.Is(err, ErrPrivateData) {
				t.Errorf("%d bytes: %v", len(f.Private), err)
			}
		}
	})
}

// RFC 5044, section 4.4: the CRC is that of iSCSI digests.
func TestCRC(t *testing.T) {
	ramp := make([]byte, 32)
	for i := range ramp {
		ramp[i] = byte(i)
	}
	down := make([]byte, 32)
	for i := range down {
		down[i] = byte(31 - i)
	}
	for _, tt := range []struct {
		id   string
		data []byte
		want string
	}{
		{"MPA-4.4-12 zeros", make([]byte, 32), "aa36918a"},
		{"MPA-4.4-12 ones", bytes.Repeat([]byte{0xff}, 32), "43aba862"},
		{"MPA-4.4-12 up", ramp, "4e79dd46"},
		{"MPA-4.4-12 down", down, "5cdb3f11"},
	} {
		b := AppendCRC(nil, UpdateCRC(0, tt.data))
		if got := hex.EncodeToString(b); got != tt.want || CRC(b) != UpdateCRC(0, tt.data) {
			t.Errorf("%s: %s, want %s", tt.id, got, tt.want)
		}
	}
}

// send returns the FPDU of a Send of n zero bytes, without Markers and CRC.
func send(msn uint32, n int) []byte {
	l := UntaggedLen + n
	b := make([]byte, LengthLen+l+Pad(l)+CRCLen)
	be.PutUint16(b, uint16(l))
	Untagged{Last: true, ULP: OpSend.Control(), MSN: msn}.Put(b[LengthLen:])
	return b
}

// Figures 5 and 6 of RFC 5044 and the vectors derived from them.
func TestMarkedFPDUGolden(t *testing.T) {
	fig5 := unhex(`00000000                    // Marker
		002a 41 43 00000000 00000000     // ULPDU_Length, Send
		00000001 00000000` + strings.Repeat("00", 24) + `52239983`)
	fig6 := unhex(`002a 41 43 00000000 00000000 00000002 00000000
		00000014                          // Marker at stream position 512
		` + strings.Repeat("00", 24) + `84925898`)

	got, g := MarkerGrid(0).AppendFPDU(nil, send(1, 24), true)
	if !bytes.Equal(got, fig5) || g != 52 {
		t.Errorf("Figure 5 (MPA-4.2-1, MPA-4.4-15, MPA-4.4-16, MPA-4.3-9): %x, grid %d", got, g)
	}
	got, g = MarkerGrid(0).AppendFPDU(nil, send(1, 464), true)
	if want := unhex("a01ee4fd"); !bytes.HasSuffix(got, want) || len(got) != 492 {
		t.Errorf("V-MPA-2: %d bytes, CRC %x", len(got), got[len(got)-4:])
	}
	got, g = g.AppendFPDU(nil, send(2, 24), true)
	if !bytes.Equal(got, fig6) || g != (492+52)%512 {
		t.Errorf("Figure 6 (MPA-4.3-1, MPA-4.4-13): %x, grid %d", got, g)
	}
	got, _ = MarkerGrid(0).AppendFPDU(nil, send(1, 506-UntaggedLen), true)
	if len(got) != 520 || !bytes.Equal(got[512:], unhex("000001fc38cf64e8")) {
		t.Errorf("V-MPA-3 (MPA-4.4-14): %d bytes, %x", len(got), got[512:])
	}
	got, g = MarkerGrid(0).AppendFPDU(nil, send(1, 502-UntaggedLen), true)
	if len(got) != 512 || g != 0 || !bytes.HasSuffix(got, unhex("a09bb55b")) {
		t.Errorf("V-MPA-4 first: %d bytes, grid %d, %x", len(got), g, got[508:])
	}
	got, _ = g.AppendFPDU(nil, send(2, 24), true)
	if !bytes.HasPrefix(got, unhex("00000000002a4143")) || !bytes.HasSuffix(got, unhex("cc08199e")) {
		t.Errorf("V-MPA-4 second (MPA-4.3-6, MPA-4.3-7): %x", got)
	}
	got, _ = MarkerGrid(0).AppendFPDU(nil, send(1, 1442-UntaggedLen), true)
	if len(got) != 1460 || !bytes.HasSuffix(got, unhex("c4c7dc02")) {
		t.Errorf("V-MPA-5: %d bytes, CRC %x", len(got), got[len(got)-4:])
	}
	for pos, ptr := range map[int]int{0: 0, 512: 508, 1024: 1020} {
		if p := MarkerPointer(got[pos:]); p != ptr {
			t.Errorf("V-MPA-5 (MPA-4.2-4, MPA-4.3-11): Marker at %d points back %d, want %d", pos, p, ptr)
		}
	}
}

// MPA-4.5-1, MPA-4.5-2, MPA-4.5-7, MPA-3-4: the table of segment sizes.
func TestMULPDU(t *testing.T) {
	for _, tt := range []struct{ emss, with, without int }{
		{64, 128, 128}, {128, 128, 128}, {536, 522, 530}, {1448, 1430, 1442}, {1460, 1442, 1454},
		{8948, 8870, 8942}, {8960, 8882, 8954}, {65483, 64768, 64768},
	} {
		if a, b := MULPDU(tt.emss, true), MULPDU(tt.emss, false); a != tt.with || b != tt.without {
			t.Errorf("EMSS %d: %d with Markers, %d without; want %d, %d", tt.emss, a, b, tt.with, tt.without)
		}
	}
}

// MPA-4.1-5: PAD brings the FPDU to a multiple of 4.
func TestPad(t *testing.T) {
	for n := 1; n <= 8; n++ {
		if p := Pad(n); p != (4-(2+n)%4)%4 {
			t.Errorf("ULPDU of %d bytes: %d PAD bytes", n, p)
		}
	}
}

// fpdu puts a ULPDU into an FPDU without Markers, with CRC.
func fpdu(ulpdu []byte) []byte {
	b := be.AppendUint16(nil, uint16(len(ulpdu)))
	b = append(b, ulpdu...)
	b = append(b, make([]byte, Pad(len(ulpdu)))...)
	return AppendCRC(b, UpdateCRC(0, b))
}

func tagged(h Tagged, payload string) []byte {
	b := make([]byte, TaggedLen)
	h.Put(b)
	return append(b, unhex(payload)...)
}

func untagged(h Untagged, payload []byte) []byte {
	b := make([]byte, UntaggedLen)
	h.Put(b)
	return append(b, payload...)
}

var readRequest = ReadRequest{SinkSTag: 0x11111111, SinkTO: 0x2222222233333333, Size: 0x1000, SrcSTag: 0x44444444,
	SrcTO: 0x5555555566666666}

func readRequestULPDU() []byte {
	var b [ReadRequestLen]byte
	readRequest.Put(b[:])
	return untagged(Untagged{Last: true, ULP: OpReadRequest.Control(), QN: QNReadRequest, MSN: 1}, b[:])
}

func TestDDPAndRDMAPGolden(t *testing.T) {
	term := Untagged{Last: true, ULP: OpTerminate.Control(), QN: QNTerminate, MSN: 1}
	rr := readRequestULPDU()
	refused := Terminate{Reason: ReasonNoBuffer, Segment: 118,
		DDP: untagged(Untagged{Last: true, ULP: OpSend.Control(), MSN: 9}, nil)}
	bad := Terminate{Reason: ReasonReadInvalidSTag, Segment: 46, DDP: rr[:UntaggedLen], ReadRequest: rr[UntaggedLen:]}
	for _, tt := range []struct {
		id    string
		ulpdu []byte
		want  string
	}{
		{"V-DDP-1 DDP-4.2-1 DDP-4.1-9 DDP-4.1-10 RDMAP-4.3-1",
			tagged(Tagged{Last: true, ULP: OpWrite.Control(), STag: 0x100, TO: 0x1000}, "0102030405060708"),
			"0016 c140 00000100 0000000000001000 0102030405060708 4a09cc67"},
		{"V-DDP-2 MPA-4.1-3", tagged(Tagged{Last: true, ULP: OpWrite.Control(), STag: 0x100, TO: 0x1000}, "0102030405"),
			"0013 c140 00000100 0000000000001000 0102030405 000000 fe28b9e1"},
		{"V-DDP-3 V-MPA2-7 DDP-4.4-2", tagged(Tagged{Last: true, ULP: OpWrite.Control(), STag: 1}, ""),
			"000e c140 00000001 0000000000000000 ebd34c5f"},
		{"V-DDP-4 V-MPA-1 DDP-4.3-1 MPA-4.1-1",
			untagged(Untagged{Last: true, ULP: OpSend.Control(), MSN: 1}, make([]byte, 24)),
			"002a 4143 00000000 00000000 00000001 00000000" + strings.Repeat("00", 24) + "b7243ec3"},
		{"V-RDMAP-1 RDMAP-4.4-1 RDMAP-4.1-1", rr,
			"002e 4141 00000000 00000001 00000001 00000000 11111111 2222222233333333 00001000 44444444 " +
				"5555555566666666 fadf12aa"},
		{"V-RDMAP-2 RDMAP-4.4-2",
			tagged(Tagged{Last: true, ULP: OpReadResponse.Control(), STag: 0x11111111, TO: 0x2222222233333333},
				"aabbccdd"),
			"0012 c142 11111111 2222222233333333 aabbccdd b2b86dcf"},
		{"V-RDMAP-3 RDMAP-4.1-3",
			untagged(Untagged{Last: true, ULP: OpSendSEInvalidate.Control(), Invalidate: 0xcafef00d, MSN: 1},
				unhex("deadbeef")),
			"0016 4146 cafef00d 00000000 00000001 00000000 deadbeef cc281a48"},
		{"V-RDMAP-4 RDMAP-4.8-2 RDMAP-4.8-9", untagged(term, refused.Append(nil)),
			"002a 4147 00000000 00000002 00000001 00000000 1202c000 0076 4143 00000000 00000000 00000009 " +
				"00000000 84b505b0"},
		{"V-RDMAP-5 RDMAP-4.8-13 RDMAP-7.1-4", untagged(term, bad.Append(nil)),
			"0046 4147 00000000 00000002 00000001 00000000 0100e000 002e 4141 00000000 00000001 00000001 " +
				"00000000 11111111 2222222233333333 00001000 44444444 5555555566666666 03ce9fb3"},
		{"V-RDMAP-6", untagged(term, (&Terminate{Reason: ReasonCRC}).Append(nil)),
			"0016 4147 00000000 00000002 00000001 00000000 20020000 7fe42585"},
		{"V-MPA2-11 MPA2-8-1 5", untagged(term, (&Terminate{Reason: ReasonMPACatastrophic}).Append(nil)),
			"0016 4147 00000000 00000002 00000001 00000000 20050000 1680d5f1"},
		{"V-MPA2-11 MPA2-8-2 6", untagged(term, (&Terminate{Reason: ReasonIRD}).Append(nil)),
			"0016 4147 00000000 00000002 00000001 00000000 20060000 6540fb1b"},
		{"V-MPA2-11 MPA2-8-2 7", untagged(term, (&Terminate{Reason: ReasonRTR}).Append(nil)),
			"0016 4147 00000000 00000002 00000001 00000000 20070000 1bd2babe"},
		{"V-MPA2-10", untagged(Untagged{Last: true, ULP: OpSend.Control(), MSN: 1}, nil),
			"0012 4143 00000000 00000000 00000001 00000000 587be8c4"},
		{"V-MPA2-9", tagged(Tagged{Last: true, ULP: OpReadResponse.Control(), STag: 1}, ""),
			"000e c142 00000001 0000000000000000 21a3e83e"},
	} {
		t.Run(tt.id, func(t *testing.T) {
			want := unhex(tt.want)
			if got := fpdu(tt.ulpdu); !bytes.Equal(got, want) {
				t.Fatalf("encoded\n%x, want\n%x", got, want)
			}
			b := want[LengthLen:]
			if !VersionOK(b) {
				t.Fatal("version")
			}
			if IsTagged(b) {
				h, err := ParseTagged(b)
				if again := tagged(h, ""); err != nil || !bytes.Equal(again, b[:TaggedLen]) {
					t.Fatalf("%+v came back as %x, %v", h, again, err)
				}
			} else {
				h, err := ParseUntagged(b)
				if again := untagged(h, nil); err != nil || !bytes.Equal(again, b[:UntaggedLen]) {
					t.Fatalf("%+v came back as %x, %v", h, again, err)
				}
			}
		})
	}
	if r, err := ParseReadRequest(rr[UntaggedLen:]); err != nil || r != readRequest {
		t.Errorf("ParseReadRequest: %+v, %v", r, err)
	}
	for n := range ReadRequestLen + 4 {
		if _, err := ParseReadRequest(make([]byte, n)); (err == nil) != (n == ReadRequestLen) {
			t.Errorf("Read Request header of %d bytes: %v", n, err)
		}
	}
	for n := range UntaggedLen {
		if _, err := ParseUntagged(make([]byte, n)); err == nil {
			t.Errorf("untagged header of %d bytes was accepted", n)
		}
		if _, err := ParseTagged(make([]byte, n)); n < TaggedLen && err == nil {
			t.Errorf("tagged header of %d bytes was accepted", n)
		}
	}
}

// RDMAP-4.1-2, RDMAP-4.1-4, RDMAP-4.1-5, RDMAP-3.1-2: Figure 4.
func TestOpcodes(t *testing.T) {
	for _, tt := range []struct {
		op         Opcode
		control    byte
		tagged     bool
		qn         uint32
		invalidate bool
	}{
		{OpWrite, 0x40, true, 0, false}, {OpReadRequest, 0x41, false, 1, false}, {OpReadResponse, 0x42, true, 0, false},
		{OpSend, 0x43, false, 0, false}, {OpSendInvalidate, 0x44, false, 0, true}, {OpSendSE, 0x45, false, 0, false},
		{OpSendSEInvalidate, 0x46, false, 0, true}, {OpTerminate, 0x47, false, 2, false},
	} {
		if tt.op.Control() != tt.control || tt.op.Tagged() != tt.tagged || tt.op.QN() != tt.qn ||
			tt.op.Invalidates() != tt.invalidate || !tt.op.Valid() {
			t.Errorf("%v: control %#x", tt.op, tt.op.Control())
		}
		if o, ok := ParseControl(tt.control | 0x30); o != tt.op || !ok {
			t.Errorf("RDMAP-4.1-8: %#x is read as %v, %t", tt.control|0x30, o, ok)
		}
	}
	for o := Opcode(8); o < 16; o++ {
		if o.Valid() {
			t.Errorf("RDMAP-4.1-9: opcode %d", o)
		}
	}
	for _, rv := range []byte{0, 0x80, 0xc0} {
		if _, ok := ParseControl(rv | 3); ok {
			t.Errorf("RDMAP-4.1-7: version bits %#x", rv)
		}
	}
}

// Reasons in the RFC's order, and what siw sends instead.
func TestParseTerminate(t *testing.T) {
	for _, tt := range []struct {
		name, wire string
		want       Reason
		swapped    bool
		ddp        int
	}{
		{"the RFC's order", "1202c000 0076 414300000000000000000000000900000000", ReasonNoBuffer, false, UntaggedLen},
		{"siw: 1/2/05 with M and D", "21050300 0064 414300000000000000000000000900000000", ReasonTooLong, true,
			UntaggedLen},
		{"siw: LLP CRC", "02020000", ReasonCRC, true, 0},
		{"siw: insufficient IRD (V-MPA2-12)", "02060000", ReasonOpcode, false, 0},
		{"adapters: LLP with type 3", "23020000", Reason{2, 3, 2}, false, 0},
		{"RDMAP-4.8-16 local catastrophic, any code", "00ff0000", Reason{0, 0, 0xff}, false, 0},
		{"RDMAP-4.8-17", "01000000", ReasonReadInvalidSTag, false, 0},
		{"RDMAP-4.8-18", "01010000", ReasonReadBounds, false, 0},
		{"RDMAP-4.8-19", "01020000", ReasonReadAccess, false, 0},
		{"RDMAP-4.8-20", "01030000", ReasonReadStream, false, 0},
		{"RDMAP-4.8-21", "01040000", ReasonReadWrap, false, 0},
		{"RDMAP-4.8-22", "01090000", ReasonNotInvalidated, false, 0},
		{"RDMAP-4.8-23", "02ff0000", ReasonOperation, false, 0},
		{"RDMAP-4.8-24", "02050000", ReasonRDMAPVersion, false, 0},
		{"RDMAP-4.8-25", "02060000", ReasonOpcode, false, 0},
		{"RDMAP-4.8-26", "02070000", ReasonCatastrophic, false, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := unhex(tt.wire)
			got, err := ParseTerminate(b)
			if err != nil || got.Reason != tt.want || got.Swapped != tt.swapped || len(got.DDP) != tt.ddp {
				t.Fatalf("%+v, %v", got, err)
			}
			if s := got.Reason.String(); strings.HasPrefix(s, "unknown") {
				t.Error(s)
			}
			for i := range b {
				if _, err := ParseTerminate(b[:i]); err == nil && i < len(b) && (i < 4 || tt.ddp > 0) {
					t.Errorf("a prefix of %d bytes was accepted", i)
				}
			}
		})
	}
}

func FuzzStartup(f *testing.F) {
	f.Add(unhex(reqKey+"10020008 00800001 80000000"), false)
	f.Add(unhex(repKey+"50020004 8001c004"), true)
	f.Fuzz(func(t *testing.T, b []byte, reply bool) {
		fr, n, err := ParseStartup(b, reply)
		if err != nil || len(b) < StartupLen+n {
			return
		}
		fr.SetPrivate(b[StartupLen:][:n])
		again, err := fr.Append(nil)
		if err != nil {
			t.Fatalf("%+v cannot be encoded: %v", fr, err)
		}
		g, m, err := ParseStartup(again, reply)
		if err != nil || m != n {
			t.Fatalf("%x is refused: %v", again, err)
		}
		g.SetPrivate(again[StartupLen:])
		if !bytes.Equal(g.Private, fr.Private) || g.Depths != fr.Depths {
			t.Fatalf("%+v came back as %+v", fr, g)
		}
	})
}

func FuzzHeaders(f *testing.F) {
	f.Add(readRequestULPDU())
	f.Add(tagged(Tagged{Last: true, ULP: OpWrite.Control(), STag: 7, TO: 1 << 40}, ""))
	testkit.FuzzBytes(f, func(t testing.TB, b []byte) {
		if h, err := ParseTagged(b); err == nil {
			var w [TaggedLen]byte
			h.Put(w[:])
			if h2, err := ParseTagged(w[:]); err != nil || h2 != h {
				t.Fatalf("%+v came back as %+v, %v", h, h2, err)
			}
		}
		if h, err := ParseUntagged(b); err == nil {
			var w [UntaggedLen]byte
			h.Put(w[:])
			if h2, err := ParseUntagged(w[:]); err != nil || h2 != h {
				t.Fatalf("%+v came back as %+v, %v", h, h2, err)
			}
			o, _ := ParseControl(h.ULP)
			_ = o.String()
		}
		if r, err := ParseReadRequest(b); err == nil {
			var w [ReadRequestLen]byte
			if r.Put(w[:]); !bytes.Equal(w[:], b) {
				t.Fatalf("%+v came back as %x", r, w)
			}
		}
	})
}

func FuzzTerminate(f *testing.F) {
	f.Add(unhex("1202c000 0076 414300000000000000000000000900000000"))
	f.Add(unhex("21050300 0064 414300000000000000000000000900000000"))
	testkit.FuzzBytes(f, func(t testing.TB, b []byte) {
		h, err := ParseTerminate(b)
		if err != nil {
			return
		}
		_ = h.Reason.String()
		if h.Swapped || h.DDP == nil && h.ReadRequest != nil {
			return // not a form that we send
		}
		g, err := ParseTerminate(h.Append(nil))
		if err != nil || !bytes.Equal(g.DDP, h.DDP) || !bytes.Equal(g.ReadRequest, h.ReadRequest) {
			t.Fatalf("%+v came back as %+v, %v", h, g, err)
		}
	})
}
