package fair

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A rig is a process with bounds that a test chooses, in a bubble.
type rig struct {
	*testing.T
	set *limits.Set
	*Process
}

// inBubble runs f with a process that allows so many calls, and so many for each LUN.
func inBubble(t *testing.T, calls, perLUN int64, f func(r *rig)) {
	testkit.Bubble(t, func(t *testing.T) {
		r := &rig{T: t, set: limits.New()}
		r.set.BackendCalls.SetMax(calls)
		r.set.BackendCallsPerLUN.SetMax(perLUN)
		r.set.HeavyCommands.SetMax(1)
		r.Process = NewProcess(r.set)
		f(r)
	})
}

// A user is an initiator that keeps calls waiting at a gate.
type user struct {
	gate  *Gate
	who   string
	work  Work
	takes time.Duration // what a call takes
	depth int           // calls at a time
	stop  atomic.Bool
	done  atomic.Int64
	calls []Call
	wg    sync.WaitGroup
}

func (u *user) start() *user {
	u.calls = make([]Call, max(u.depth, 1))
	for i := range u.calls {
		c := &u.calls[i]
		c.Who, c.Abort = u.who, &u.stop
		u.wg.Go(func() {
			for u.gate.Enter(c, u.work) {
				time.Sleep(u.takes)
				u.gate.Leave(c)
				u.done.Add(1)
			}
		})
	}
	return u
}

// end aborts all calls of u and waits until they have ended.
func (u *user) end() {
	u.stop.Store(true)
	for i := range u.calls {
		u.calls[i].Cancel()
	}
	u.wg.Wait()
}

// A hang is calls that stay under way until it ends.
type hang struct {
	free chan struct{}
	wg   sync.WaitGroup
}

// hang makes n calls of who that do not return.
func (g *Gate) hang(who string, n int, w Work) *hang {
	h := &hang{free: make(chan struct{})}
	for range n {
		h.wg.Go(func() {
			c := Call{Who: who}
			if g.Enter(&c, w) {
				<-h.free
				g.Leave(&c)
			}
		})
	}
	synctest.Wait()
	return h
}

func (h *hang) end() {
	close(h.free)
	h.wg.Wait()
}

// want compares the state of g.
func (r *rig) want(g *Gate, underWay, waiting int) {
	r.Helper()
	synctest.Wait()
	if s := g.State(); s.UnderWay != underWay || s.Waiting != waiting {
		r.Errorf("%d calls under way and %d waiting, want %d and %d", s.UnderWay, s.Waiting, underWay, waiting)
	}
}

// nothingLeft checks that nobody is counted any longer.
func (r *rig) nothingLeft(gates ...*Gate) {
	r.Helper()
	synctest.Wait()
	for _, g := range gates {
		if n := g.state.Load(); n&^rated != 0 || g.waiting != 0 || g.heavy != 0 || g.line.len() != 0 {
			r.Errorf("%s: state %#x, %d waiting, %d heavy, %d flows", g.name, n, g.waiting, g.heavy, g.line.len())
		}
	}
	if n := r.state.Load(); count(n) != 0 || r.heavies.busy.Load() || r.heavies.used != 0 {
		r.Errorf("process: state %#x, heavy work %v, %d places", n, r.heavies.busy.Load(), r.heavies.used)
	}
}

func TestBoundOfLUN(t *testing.T) {
	inBubble(t, 100, 4, func(r *rig) {
		g, other := r.NewGate("a", true), r.NewGate("b", true)
		h := g.hang("x", 10, Work{})
		r.want(g, 4, 6)
		h2 := other.hang("x", 3, Work{})
		r.want(other, 3, 0)

		r.set.BackendCallsPerLUN.SetMax(6) // live
		time.Sleep(2 * tick)
		r.want(g, 6, 4)
		r.set.BackendCallsPerLUN.SetMax(2) // fewer than are under way
		time.Sleep(2 * tick)
		r.want(g, 6, 4)
		h2.end()
		h.end()
		r.nothingLeft(g, other)
	})
}

func TestWaitersAreCancelled(t *testing.T) {
	inBubble(t, 100, 1, func(r *rig) {
		g := r.NewGate("a", true)
		h := g.hang("x", 1, Work{})
		u := (&user{gate: g, who: "x", depth: 50}).start()
		r.want(g, 1, 50)
		u.end() // or the bubble is dead
		r.want(g, 1, 0)
		h.end()
		r.nothingLeft(g)
	})
}

func TestShutEndsWaits(t *testing.T) {
	inBubble(t, 100, 1, func(r *rig) {
		g := r.NewGate("a", true)
		h := g.hang("x", 1, Work{})
		var refused atomic.Int64
		for range 5 {
			go func() {
				if c := (Call{Who: "y"}); !g.Enter(&c, Work{}) {
					refused.Add(1)
				}
			}()
		}
		r.want(g, 1, 5)
		g.Shut()
		synctest.Wait()
		if c := (Call{Who: "x"}); refused.Load() != 5 || g.Enter(&c, Work{}) {
			t.Errorf("%d of 5 waits have ended", refused.Load())
		}
		h.end()
		r.nothingLeft(g)
	})
}

// serve lets users work for a while, and returns what each has done.
func serve(d time.Duration, users ...*user) []int64 {
	for _, u := range users {
		u.start()
	}
	time.Sleep(d)
	n := make([]int64, len(users))
	for i, u := range users {
		n[i] = u.done.Load()
	}
	for _, u := range users {
		u.end()
	}
	return n
}

// near reports whether got is within a part of want.
func near(got int64, want, part float64) bool {
	return float64(got) >= want*(1-part) && float64(got) <= want*(1+part)
}

// An initiator with many calls gets no more than one with few. Calls count by their cost.
func TestInitiatorsShareByCost(t *testing.T) {
	inBubble(t, 100, 1, func(r *rig) {
		g := r.NewGate("a", true)
		n := serve(10*time.Second,
			&user{gate: g, who: "many", depth: 120, takes: time.Millisecond},
			&user{gate: g, who: "few", depth: 2, takes: time.Millisecond},
			&user{gate: g, who: "big", depth: 30, takes: time.Millisecond, work: Work{Bytes: 3 * callCost}})
		// many and few get four calls each for one of big.
		for i, want := range []float64{10000 * 4 / 9, 10000 * 4 / 9, 10000 / 9} {
			if !near(n[i], want, 0.05) {
				t.Errorf("user %d: %d calls, want %.0f", i, n[i], want)
			}
		}
		r.nothingLeft(g)
	})
}

// An initiator that has nothing to do leaves its turn to others, and has one as soon as it needs one.
func TestNothingIsWasted(t *testing.T) {
	inBubble(t, 100, 1, func(r *rig) {
		g := r.NewGate("a", true)
		n := serve(time.Second, &user{gate: g, who: "always", depth: 32, takes: time.Millisecond})
		if !near(n[0], 1000, 0.01) {
			t.Errorf("alone: %d of 1000 calls", n[0])
		}
		always := (&user{gate: g, who: "always", depth: 32, takes: time.Millisecond}).start()
		time.Sleep(time.Second)
		c := Call{Who: "rarely"}
		began := time.Now()
		if !g.Enter(&c, Work{}) || time.Since(began) > 20*time.Millisecond {
			t.Errorf("the first call of somebody else waited %v", time.Since(began))
		}
		g.Leave(&c)
		always.end()
		r.nothingLeft(g)
	})
}

// LUNs whose stores hang leave the others what they need.
func TestHangingLUNsTakeNothingFromOthers(t *testing.T) {
	inBubble(t, 64, 16, func(r *rig) {
		var gates []*Gate
		var hangs []*hang
		for range 4 {
			g := r.NewGate("hangs", true)
			gates, hangs = append(gates, g), append(hangs, g.hang("x", 100, Work{}))
		}
		g := r.NewGate("answers", true)
		// At once: one call. After a second: all that it may have.
		c := Call{Who: "y"}
		if !g.Enter(&c, Work{}) {
			t.Fatal("the first call of a LUN was refused")
		}
		g.Leave(&c)
		time.Sleep(stallTime + 2*tick)
		n := serve(time.Second, &user{gate: g, who: "y", depth: 32, takes: time.Millisecond})
		if !near(n[0], 16000, 0.02) {
			t.Errorf("%d calls in a second beside hanging LUNs, want 16000", n[0])
		}
		for i, h := range hangs {
			r.want(gates[i], 16, 84)
			h.end()
		}
		r.nothingLeft(append(gates, g)...)
	})
}

// However many LUNs hang, the calls under way stay bounded, and each LUN gets one.
func TestBoundOfProcess(t *testing.T) {
	inBubble(t, 64, 16, func(r *rig) {
		var gates []*Gate
		var hangs []*hang
		for range 100 {
			g := r.NewGate("hangs", true)
			gates, hangs = append(gates, g), append(hangs, g.hang("x", 20, Work{}))
		}
		time.Sleep(10 * time.Second)
		sum := 0
		for _, g := range gates {
			n := g.State().UnderWay
			if sum += n; n == 0 {
				t.Error("a LUN has no call under way")
			}
		}
		if most := 2*64 + len(gates); sum > most {
			t.Errorf("%d calls are under way, want at most %d", sum, most)
		}
		if st := r.set.BackendCalls.State(); st.Bites == 0 || st.Used != int64(sum) {
			t.Errorf("the limit says %+v, and %d are under way", st, sum)
		}
		for _, h := range hangs {
			h.end()
		}
		r.nothingLeft(gates...)
	})
}

// LUNs share what the process has, whatever their numbers of calls.
func TestLUNsShareTheProcess(t *testing.T) {
	inBubble(t, 6, 64, func(r *rig) {
		a, b, c := r.NewGate("a", true), r.NewGate("b", true), r.NewGate("c", true)
		c.SetRates(Rates{MinIOPS: 3000}, nil)
		n := serve(5*time.Second,
			&user{gate: a, who: "x", depth: 60, takes: time.Millisecond, work: Work{Ops: 1}},
			&user{gate: b, who: "x", depth: 6, takes: time.Millisecond, work: Work{Ops: 1}},
			&user{gate: c, who: "x", depth: 30, takes: time.Millisecond, work: Work{Ops: 1}})
		if n[0]+n[1]+n[2] < 29500 || n[2] < 14800 || !near(n[0], float64(n[1]), 0.15) {
			t.Errorf("calls of LUNs %d in 5 s, want all 30000, 15000 of the last one, and as many of both others", n)
		}
		r.nothingLeft(a, b, c)
	})
}
