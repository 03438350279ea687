package fair

import (
	"testing"
	"time"
)

// Limits hold: exactly, apart from the burst.
func TestLimits(t *testing.T) {
	for name, tc := range map[string]struct {
		lun, initiator Rates
		work           Work
		blocking       bool
		want           int64 // calls in 10 s, without the burst
		burst          int64
	}{
		"iops":                   {lun: Rates{IOPS: 500}, work: Work{Ops: 1}, want: 5000, burst: 10},
		"iops of an initiator":   {initiator: Rates{IOPS: 500}, work: Work{Ops: 1}, want: 5000, burst: 10},
		"both":                   {lun: Rates{IOPS: 900}, initiator: Rates{IOPS: 500}, work: Work{Ops: 1}, want: 5000, burst: 10},
		"bandwidth":              {lun: Rates{Bandwidth: 10 << 20}, work: Work{Ops: 1, Bytes: 64 << 10}, want: 1600, burst: 4},
		"bandwidth, large calls": {lun: Rates{Bandwidth: 10 << 20}, work: Work{Ops: 1, Bytes: 4 << 20}, want: 25, burst: 1},
		"few iops":               {lun: Rates{IOPS: 3}, work: Work{Ops: 1}, want: 30, burst: 1},
		"burst":                  {lun: Rates{IOPS: 500, IOPSBurst: 1000}, work: Work{Ops: 1}, want: 5000, burst: 1000},
		"blocking":               {lun: Rates{IOPS: 500}, work: Work{Ops: 1}, blocking: true, want: 5000, burst: 10},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, 100, 64, func(r *rig) {
				g := r.NewGate("a", tc.blocking)
				g.SetRates(tc.lun, func(who string) Rates { return tc.initiator })
				n := serve(10*time.Second, &user{gate: g, who: "x", depth: 128, work: tc.work, takes: 100 * time.Microsecond})
				if n[0] < tc.want || n[0] > tc.want+tc.burst+1 {
					t.Errorf("%d calls in 10 s, want %d to %d", n[0], tc.want, tc.want+tc.burst+1)
				}
				r.nothingLeft(g)
			})
		})
	}
}

// The limit of an initiator, or of a LUN, delays nobody else.
func TestLimitDelaysNobodyElse(t *testing.T) {
	inBubble(t, 100, 8, func(r *rig) {
		g, other := r.NewGate("a", true), r.NewGate("b", true)
		g.SetRates(Rates{}, func(who string) Rates {
			if who == "slow" {
				return Rates{IOPS: 10}
			}
			return Rates{}
		})
		other.SetRates(Rates{IOPS: 10}, nil)
		n := serve(10*time.Second,
			&user{gate: g, who: "slow", depth: 128, work: Work{Ops: 1}, takes: time.Millisecond},
			&user{gate: other, who: "fast", depth: 128, work: Work{Ops: 1}, takes: time.Millisecond},
			&user{gate: g, who: "fast", depth: 8, work: Work{Ops: 1}, takes: time.Millisecond})
		if n[0] > 102 || n[1] > 102 || n[2] < 79000 {
			t.Errorf("calls in 10 s: %d, want 100, 100 and 79000 or more", n)
		}
		r.nothingLeft(g, other)
	})
}

// Calls that are aborted while they wait use nothing of the rate, and a new rate holds for those that
// wait already.
func TestRatesChangeLive(t *testing.T) {
	inBubble(t, 100, 8, func(r *rig) {
		g := r.NewGate("a", false)
		g.SetRates(Rates{IOPS: 1}, nil)
		aborted := (&user{gate: g, who: "x", depth: 1000, work: Work{Ops: 1}}).start()
		time.Sleep(time.Second)
		aborted.end()
		u := (&user{gate: g, who: "x", depth: 100, work: Work{Ops: 1}}).start()
		time.Sleep(10 * time.Second)
		if n := u.done.Load(); n < 9 || n > 11 {
			t.Errorf("%d calls in 10 s at 1 a second, after 1000 were aborted", n)
		}
		before := u.done.Load()
		g.SetRates(Rates{IOPS: 100}, nil)
		time.Sleep(10 * time.Second)
		if n := u.done.Load() - before; n < 1000 || n > 1004 {
			t.Errorf("%d calls in 10 s at 100 a second", n)
		}
		u.end()
		g.SetRates(Rates{}, nil)
		if n := g.state.Load(); n != 0 {
			t.Errorf("state %#x without rates", n)
		}
		r.nothingLeft(g)
	})
}

// An initiator with a guarantee gets it from a LUN that others use up; what it does not use, others
// get.
func TestGuarantee(t *testing.T) {
	inBubble(t, 100, 1, func(r *rig) {
		g := r.NewGate("a", true)
		g.SetRates(Rates{}, func(who string) Rates {
			if who == "vip" {
				return Rates{MinIOPS: 600}
			}
			return Rates{}
		})
		users := func() []*user {
			list := []*user{{gate: g, who: "vip", depth: 16, work: Work{Ops: 1}, takes: time.Millisecond}}
			for _, who := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
				list = append(list, &user{gate: g, who: who, depth: 128, work: Work{Ops: 1}, takes: time.Millisecond})
			}
			return list
		}
		n := serve(10*time.Second, users()...)
		if n[0] < 5900 {
			t.Errorf("%d calls in 10 s of a LUN that makes 1000 a second, want 6000 or more", n[0])
		}
		for _, m := range n[1:] {
			if m < 300 {
				t.Errorf("somebody without a guarantee got %d calls in 10 s", m)
			}
		}
		n = serve(10*time.Second, users()[1:]...)
		sum := int64(0)
		for _, m := range n {
			sum += m
		}
		if sum < 9900 {
			t.Errorf("%d calls in 10 s while nobody uses the guarantee, want 10000", sum)
		}
		r.nothingLeft(g)
	})
}

// A guarantee also decides who uses what the limit of the LUN allows.
func TestGuaranteeWithinALimit(t *testing.T) {
	inBubble(t, 100, 64, func(r *rig) {
		g := r.NewGate("a", false)
		g.SetRates(Rates{Bandwidth: 100 << 20}, func(who string) Rates {
			if who == "vip" {
				return Rates{MinBandwidth: 70 << 20}
			}
			return Rates{}
		})
		work := Work{Ops: 1, Bytes: 64 << 10}
		n := serve(10*time.Second, &user{gate: g, who: "vip", depth: 8, work: work},
			&user{gate: g, who: "a", depth: 100, work: work}, &user{gate: g, who: "b", depth: 100, work: work})
		if !near(n[0], 11200, 0.2) || n[0] < 11000 || !near(n[0]+n[1]+n[2], 16000, 0.01) {
			t.Errorf("calls of 64 KiB in 10 s: %d, want 11200 or more of 16000", n)
		}
		r.nothingLeft(g)
	})
}

// A rate costs a call that need not wait no memory.
func TestNoAllocation(t *testing.T) {
	for _, blocking := range []bool{false, true} {
		for name, rates := range map[string]Rates{"none": {}, "rates": {IOPS: 1 << 40, MinBandwidth: 1 << 40}} {
			p := NewProcess(nil)
			g := p.NewGate("a", blocking)
			g.SetRates(rates, func(string) Rates { return rates })
			c := Call{Who: "x"}
			n := testing.AllocsPerRun(1000, func() {
				if !g.Enter(&c, Work{Ops: 1, Bytes: 4096}) {
					t.Fatal("refused")
				}
				g.Leave(&c)
			})
			if n != 0 {
				t.Errorf("blocking %v, %s: %v allocations", blocking, name, n)
			}
		}
	}
}

// The gate costs a call that need not wait little.
func BenchmarkGate(b *testing.B) {
	for name, blocking := range map[string]bool{"nonblocking": false, "blocking": true} {
		b.Run(name, func(b *testing.B) {
			g := NewProcess(nil).NewGate("a", blocking)
			b.RunParallel(func(pb *testing.PB) {
				c := Call{Who: "x"}
				for pb.Next() {
					g.Enter(&c, Work{Ops: 1, Bytes: 4096})
					g.Leave(&c)
				}
			})
		})
	}
}
