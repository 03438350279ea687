package fair

import (
	"testing"
	"testing/synctest"
	"time"
)

// fakeCPU makes the time of a bubble the CPU time of heavy work.
func (r *rig) fakeCPU() {
	began := time.Now()
	r.heavies.cpu = func() time.Duration { return time.Since(began) }
}

// Heavy work has the CPU to itself as long as nobody else has work, and a fifth of it otherwise.
func TestHeavyWorkYields(t *testing.T) {
	inBubble(t, 100, 64, func(r *rig) {
		r.fakeCPU()
		g, other := r.NewGate("a", false), r.NewGate("b", false)
		heavy := func() *user {
			return &user{gate: g, who: "x", depth: 32, takes: time.Millisecond, work: Work{Ops: 1, Heavy: true}}
		}
		if n := serve(time.Second, heavy()); n[0] < 990 {
			t.Errorf("alone: %d steps of 1 ms in a second", n[0])
		}
		own := &user{gate: other, who: "x", depth: 1, takes: time.Millisecond, work: Work{Ops: 1}}
		if n := serve(time.Second, heavy(), own); n[0] < 990 {
			t.Errorf("beside work of the same initiator: %d steps of 1 ms in a second", n[0])
		}
		n := serve(time.Second, heavy(), &user{gate: other, who: "y", depth: 1, takes: time.Millisecond, work: Work{Ops: 1}})
		if n[0] > 210 || n[0] < 180 || n[1] < 990 {
			t.Errorf("%d steps of 1 ms in a second beside %d calls of another initiator, want 200 and 1000", n[0], n[1])
		}
		r.nothingLeft(g, other)
	})
}

// Initiators share the places for heavy work by the time that they use.
func TestHeavyWorkIsShared(t *testing.T) {
	inBubble(t, 100, 64, func(r *rig) {
		r.fakeCPU()
		g := r.NewGate("a", false)
		w := Work{Ops: 1, Heavy: true}
		n := serve(4*time.Second,
			&user{gate: g, who: "many", depth: 32, takes: time.Millisecond, work: w},
			&user{gate: g, who: "few", depth: 2, takes: time.Millisecond, work: w},
			&user{gate: g, who: "long", depth: 8, takes: 4 * time.Millisecond, work: w})
		for i, want := range []float64{1333, 1333, 333} {
			if !near(n[i], want, 0.1) {
				t.Errorf("user %d: %d steps, want %.0f", i, n[i], want)
			}
		}
		r.nothingLeft(g)
	})
}

// A heavy command whose store hangs gives its place away, and leaves the LUN calls for others.
func TestHeavyWorkThatHangs(t *testing.T) {
	inBubble(t, 100, 16, func(r *rig) {
		r.fakeCPU()
		g, other := r.NewGate("a", true), r.NewGate("b", true)
		h := g.hang("x", 40, Work{Heavy: true})
		r.want(g, 16/heavyShare, 40-16/heavyShare)
		light := g.hang("x", 5, Work{})
		r.want(g, 16/heavyShare+5, 40-16/heavyShare)
		time.Sleep(16 / heavyShare * (stallTime + 2*tick))
		n := serve(time.Second, &user{gate: other, who: "y", depth: 1, takes: time.Millisecond, work: Work{Heavy: true}})
		if n[0] < 990 {
			t.Errorf("%d heavy steps of 1 ms in a second beside a LUN that hangs", n[0])
		}
		light.end()
		h.end()
		r.nothingLeft(g, other)
	})
}

func TestHeavyWaitersAreCancelled(t *testing.T) {
	inBubble(t, 100, 64, func(r *rig) {
		r.fakeCPU()
		g := r.NewGate("a", false)
		h := g.hang("x", 1, Work{Heavy: true})
		u := (&user{gate: g, who: "y", depth: 20, work: Work{Heavy: true}}).start()
		synctest.Wait()
		if n := r.heavies.waiting; n != 20 {
			t.Errorf("%d wait for a place, want 20", n)
		}
		u.end()
		h.end()
		r.nothingLeft(g)
	})
}
