package lun

import (
	"fmt"
	"testing"

	"github.com/iser-target/iser-target/backend"
)

// A transfer is a READ or WRITE from Begin to End, in pieces.
type transfer struct {
	c    Command
	data []byte
}

func newTransfer(op, flags byte, lba, octets int) *transfer {
	t := &transfer{data: make([]byte, octets)}
	t.c.CDB = append(unhex(extentCDB(op, flags, uint64(lba), uint64(octets/512))), make([]byte, 16)...)[:16]
	for i := range t.data {
		t.data[i] = byte(i) | 1
	}
	return t
}

// run reports whether the command ends with GOOD.
func (t *transfer) run(n *Nexus, piece int) bool {
	ok := n.Begin(&t.c)
	for off := 0; ok && off < len(t.data); off += piece {
		p := t.data[off:min(off+piece, len(t.data))]
		if t.c.DataOut > 0 {
			ok = n.Consume(&t.c, p, uint64(off))
		} else {
			ok = n.Produce(&t.c, p, uint64(off))
		}
	}
	n.End(&t.c)
	return ok && t.c.Status == StatusGood
}

// READ and WRITE allocate nothing, also when they fail.
func TestNoAllocation(t *testing.T) {
	for name, s := range map[string]setup{
		"no cache":      {},
		"cache":         {info: volatile},
		"write-through": {info: volatile, opt: Options{WriteThrough: true}},
	} {
		r := newRig(t, s)
		for id := range uint16(40) {
			if err := r.inv.Add(id+1, r.unit); err != nil {
				t.Fatal(err)
			}
		}
		n := r.login()
		for _, op := range append(readOps, writeOps...) {
			for _, flags := range []byte{0, fua} {
				x := newTransfer(op, flags, 8, 16<<10)
				allocs := testing.AllocsPerRun(100, func() {
					if !x.run(n, 8192) {
						t.Fatalf("sense % x", x.c.Sense())
					}
				})
				if allocs != 0 {
					t.Errorf("%s, %02x, flags %02x: %v allocations", name, op, flags, allocs)
				}
				beyond := newTransfer(op, flags, 1<<20, 512)
				allocs = testing.AllocsPerRun(100, func() {
					if beyond.run(n, 8192) {
						t.Fatal("an LBA out of range is GOOD")
					}
				})
				if allocs != 0 {
					t.Errorf("%s, %02x, flags %02x, failing: %v allocations", name, op, flags, allocs)
				}
			}
		}
	}
}

func benchmark(b *testing.B, op byte) {
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 64 << 20})
	if err != nil {
		b.Fatal(err)
	}
	u, err := New(m, Options{Identity: testIdentity})
	if err != nil {
		b.Fatal(err)
	}
	inv := NewInventory()
	if err := inv.Add(0, u); err != nil {
		b.Fatal(err)
	}
	defer inv.Close()
	for _, parallel := range []bool{false, true} {
		b.Run(fmt.Sprintf("parallel=%v", parallel), func(b *testing.B) {
			n := inv.NewNexus(testPort)
			defer n.Close()
			newTransfer(0x88, 0, 0, 512).run(n, 512) // takes the unit attention
			b.SetBytes(4096)
			b.ReportAllocs()
			if !parallel {
				x := newTransfer(op, 0, 8, 4096)
				for b.Loop() {
					if !x.run(n, 4096) {
						b.Fatalf("sense % x", x.c.Sense())
					}
				}
				return
			}
			b.RunParallel(func(pb *testing.PB) {
				x := newTransfer(op, 0, 8, 4096)
				for pb.Next() {
					if !x.run(n, 4096) {
						b.Errorf("sense % x", x.c.Sense())
						return
					}
				}
			})
		})
	}
}

func BenchmarkRead16(b *testing.B)  { benchmark(b, 0x88) }
func BenchmarkWrite16(b *testing.B) { benchmark(b, 0x8a) }
