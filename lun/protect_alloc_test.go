//go:build !race

package lun

import (
	"bytes"
	"testing"

	"github.com/iser-target/iser-target/backend/protection"
)

// READ and WRITE with protection information allocate nothing, also when a block lies in two pieces. With the race
// detector, a sync.Pool drops a part of what it gets.
func TestNoAllocationWithProtection(t *testing.T) {
	r := newRig(t, setup{protect: protection.Type1})
	wire := onWire(pattern(64*512, 1), 512, 8, own)
	for _, op := range []byte{0x2a, 0x8a, 0x28, 0x88} {
		for _, field := range []byte{0, 1, 3} {
			x := newTransfer(op, field<<5, 8, 64*512)
			if field != 0 {
				x.data = bytes.Clone(wire)
			}
			allocs := testing.AllocsPerRun(200, func() {
				if !x.run(r.nexus, 8192) {
					t.Fatalf("sense % x", x.c.Sense())
				}
			})
			if allocs > 0.5 { // a pool may be emptied once
				t.Errorf("%02x, field %d: %v allocations", op, field, allocs)
			}
		}
	}
}
