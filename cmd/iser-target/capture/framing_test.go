package capture

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"testing"
)

// startup returns a frame of MPA's startup (RFC 5044, section 7.1.1).
func startup(d direction, flags byte, private int) []byte {
	b := append([]byte(keys[d]), flags, 2, byte(private>>8), byte(private))
	return append(b, random(private)...)
}

// fpdu returns an FPDU with a ULPDU of n bytes.
func fpdu(n int) []byte {
	b := append(binary.BigEndian.AppendUint16(nil, uint16(n)), random(n)...)
	b = append(b, make([]byte, -len(b)&3)...) // padding
	return append(b, random(4)...)            // CRC
}

// A capture has each FPDU in a packet of its own.
func TestEachFPDUIsAPacket(t *testing.T) {
	p := newPair(t, NewHub(), "127.0.0.1:0")
	request, reply := startup(toTarget, 0, 24), startup(toInitiator, 0, 4)
	p.send(t, request)
	p.answer(t, reply)
	want := [2][][]byte{{request}, {reply}}
	pass := func(lengths ...int) {
		var list [2][][]byte
		for d := range list {
			for _, n := range lengths {
				list[d] = append(list[d], fpdu(n+d))
			}
			want[d] = append(want[d], list[d]...)
		}
		p.send(t, slices.Concat(list[toTarget]...))
		p.answer(t, list[toInitiator]...)
	}
	pass(120, 48)
	p.hub.Join(p.target, 1)
	r := start(t, p.hub, 1, 64<<20, nil)
	pass(94)
	pass(1450, 1126, 94, 1450, 1450)
	pass(1450, 326)
	var got [2][][]byte
	for _, pkt := range r.stop(t) {
		d := toInitiator
		if pkt.inbound {
			d = toTarget
		}
		if len(pkt.payload) > 0 {
			got[d] = append(got[d], pkt.payload)
		}
	}
	for d := range want {
		if !slices.EqualFunc(got[d], want[d], bytes.Equal) {
			t.Errorf("direction %d: packets of %v bytes, want %v", d, lengths(got[d]), lengths(want[d]))
		}
	}
}

func lengths(list [][]byte) (n []int) {
	for _, b := range list {
		n = append(n, len(b))
	}
	return n
}

// Each FPDU begins a packet, in whatever pieces the bytes come.
func TestFramingFindsEachFPDU(t *testing.T) {
	stream, want := startup(toTarget, 0x40, 5), []int{0} // CRC
	for _, n := range []int{0, 1, 2, 3, 4, 5, 255, 256, 1450, 16398, 0xffff} {
		want = append(want, len(stream))
		stream = append(stream, fpdu(n)...)
	}
	cuts := func(f *framing, b []byte, most int) (list []int) {
		for at := 0; at < len(b); {
			chunk := b[at:min(at+1+rand.IntN(most), len(b))]
			if at == 0 {
				chunk = b[:25]
				f.begin(toTarget, chunk)
			}
			for len(chunk) > 0 {
				list = append(list, at)
				n := f.next(chunk)
				at, chunk = at+n, chunk[n:]
			}
		}
		return list
	}
	for _, most := range []int{1, 2, 3, 100, 5000, len(stream)} {
		for range 50 {
			got := cuts(&framing{}, stream, most)
			for _, at := range want {
				if _, ok := slices.BinarySearch(got, at); !ok {
					t.Fatalf("chunks of up to %d bytes: no packet begins at %d, where an FPDU does", most, at)
				}
			}
		}
	}
	// In one piece nothing else is cut.
	f := framing{}
	f.begin(toTarget, stream)
	var got []int
	for at := 0; at < len(stream); at += f.next(stream[at:]) {
		got = append(got, at)
	}
	if !slices.Equal(got, want) {
		t.Errorf("packets begin at %v, want %v", got, want)
	}
	f.next(stream[want[5]:][:1])
	f.resume()
	if n := f.next(stream[want[7]:]); n != want[8]-want[7] {
		t.Errorf("after a gap the first packet has %d bytes, want %d", n, want[8]-want[7])
	}
}

// Framing does not cut a stream that is not MPA or has Markers.
func TestFramingLeavesOtherStreams(t *testing.T) {
	for _, tt := range []struct {
		name    string
		first   []byte
		markers bool // asked for by the other side
		asks    bool
	}{
		{"iSCSI", random(48), false, false},
		{"short", []byte("MPA ID Req Frame"), false, false},
		{"a reply", startup(toInitiator, 0, 0), false, false},
		{"Markers", startup(toTarget, 0, 0), true, false},
		{"Markers both ways", startup(toTarget, 0x80, 0), true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := framing{markers: tt.markers}
			if asks := f.begin(toTarget, tt.first); asks != tt.asks {
				t.Errorf("it asks for Markers: %t, want %t", asks, tt.asks)
			}
			if b := append(tt.first, make([]byte, 100)...); f.next(b) != len(b) {
				t.Error("it is cut")
			}
		})
	}
}
