package capture

import (
	"io"
	"math/rand/v2"
	"net/netip"
	"testing"
)

// A filter takes streams of any content, in pieces of any length, with gaps anywhere: a peer chooses them.
func TestFilterTakesAnything(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	lun := uint16(1)
	filters := []Filter{{Headers: true}, {LUN: &lun}, {Headers: true, LUN: &lun}, {Snap: MinSnap}, {Snap: MaxSnap, LUN: &lun}, {Snap: 256, Headers: true}}
	for round := range 3000 {
		k := &Capture{file: newFile(io.Discard, "a", "n", "d"), max: 1 << 40, flows: map[uint32]*flow{}, filter: filters[round%len(filters)],
			tasks: map[uint32]bool{}, stags: map[stag]bool{}, sinks: map[stag]bool{}}
		k.flows[0] = newFlow(0, netip.MustParseAddrPort("192.0.2.1:5"), netip.MustParseAddrPort("192.0.2.2:3260"))
		var pos [2]uint64
		for range 30 {
			d := direction(rng.IntN(2))
			b := random(1 + rng.IntN(300))
			if rng.IntN(2) == 0 { // small fields, so that units end
				for i := range b {
					b[i] &= 0x47
				}
				b[0], b[min(len(b)-1, 5)] = byte(rng.IntN(0x40)), 0
			}
			if pos[d] == 0 && rng.IntN(2) == 0 {
				b = append([]byte(keys[d]), 0, 2, 0, byte(rng.IntN(40)))
			}
			if rng.IntN(20) == 0 {
				pos[d] += uint64(rng.IntN(1000))
			}
			if !k.packets(&record{kind: data, dir: d, pos: pos[d]}, b) {
				t.Fatal("the file is full")
			}
			pos[d] += uint64(len(b))
		}
		if k.file.err != nil {
			t.Fatal(k.file.err)
		}
		for d, s := range k.flows[0].streams {
			if s.pos != pos[d] || len(s.unit.buf) > maxSegment+1024 {
				t.Fatalf("direction %d ends at %d, want %d; %d bytes are kept", d, s.pos, pos[d], len(s.unit.buf))
			}
		}
	}
}
