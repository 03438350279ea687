package lun

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun/fair"
)

// BenchmarkReadBeside measures READs of 4 KiB of one initiator, alone and while another one has 32 WRITE
// SAME of 32 MiB in flight.
func BenchmarkReadBeside(b *testing.B) {
	for name, attackers := range map[string]int{"nobody": 0, "WRITE SAME": 32} {
		b.Run(name, func(b *testing.B) {
			m, err := backend.OpenMemory(backend.MemoryConfig{Size: 64 << 20})
			if err != nil {
				b.Fatal(err)
			}
			u, err := New(m, Options{Identity: testIdentity})
			if err != nil {
				b.Fatal(err)
			}
			inv := NewInventory()
			defer inv.Close()
			if err := inv.Add(0, u); err != nil {
				b.Fatal(err)
			}
			login := func(name string) *Nexus {
				p := testPort
				p.InitiatorName += name
				n := inv.NewNexus(p)
				newTransfer(opRead16, 0, 0, 512).run(n, 512) // takes the unit attention
				return n
			}
			honest, attacker := login("a"), login("b")
			var stop atomic.Bool
			var wg sync.WaitGroup
			for range attackers {
				wg.Go(func() {
					for !stop.Load() {
						var c Command
						do(attacker, &c, [8]byte{}, extentCDB(0x93, 0, 0, 65535), pattern(512, 1), all)
					}
				})
			}
			x := newTransfer(opRead16, 0, 0, 4096)
			b.ResetTimer()
			for b.Loop() {
				if !x.run(honest, 4096) {
					b.Fatal("a READ has failed")
				}
			}
			b.StopTimer()
			stop.Store(true)
			wg.Wait()
		})
	}
}

// BenchmarkRates measures how well a limit holds in real time: ns/op of 1000 commands a second.
func BenchmarkRates(b *testing.B) {
	r := newRig(b, setup{})
	r.unit.SetRates(fair.Rates{IOPS: 1000}, nil)
	x := newTransfer(opRead16, 0, 0, 4096)
	began := time.Now()
	n := 0
	for b.Loop() {
		x.run(r.nexus, 4096)
		n++
	}
	b.ReportMetric(float64(n)/time.Since(began).Seconds(), "commands/s")
}
