package ipsec

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/tests/testkit"
)

// A fakeDriver protects all flows alike, as the test says.
type fakeDriver struct {
	mu       sync.Mutex
	p        Protection
	err      error
	hang     bool       // calls return when their context ends
	hangs    netip.Addr // the same for calls about this peer alone
	stuck    chan struct{}
	looks    map[netip.Addr]int
	changed  func(Change)
	watchErr chan error
	watches  int
	closed   bool
}

func newFake() *fakeDriver {
	return &fakeDriver{p: good(), looks: map[netip.Addr]int{}}
}

// enter makes what has to belong to the bubble of the test.
func (d *fakeDriver) enter() { d.watchErr = make(chan error) }

func (d *fakeDriver) Name() string { return "fake" }

func (d *fakeDriver) Check(ctx context.Context) []error {
	d.mu.Lock()
	hang := d.hang
	d.mu.Unlock()
	if hang {
		<-ctx.Done()
	}
	return nil
}

func (d *fakeDriver) Look(ctx context.Context, f Flow) (Protection, error) {
	d.mu.Lock()
	d.looks[f.Remote.Addr()]++
	p, err, hang, stuck := d.p, d.err, d.hang || d.hangs == f.Remote.Addr(), d.stuck
	d.mu.Unlock()
	if stuck != nil {
		<-stuck
	}
	if hang {
		<-ctx.Done()
		return Protection{}, ctx.Err()
	}
	return p, err
}

func (d *fakeDriver) Watch(ctx context.Context, changed func(Change)) error {
	d.mu.Lock()
	d.changed = changed
	d.watches++
	d.mu.Unlock()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case err := <-d.watchErr:
		return err
	}
}

func (d *fakeDriver) Close() error {
	d.closed = true
	return nil
}

// set changes what the driver says, and reports a change of remote.
func (d *fakeDriver) set(remote netip.Addr, change func(*fakeDriver)) {
	d.mu.Lock()
	change(d)
	d.mu.Unlock()
	d.changed(Change{Kind: Removed, Remote: remote})
}

func (d *fakeDriver) asked() (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.looks {
		n += c
	}
	return n
}

// A fakeConn records what a Guard does with a connection.
type fakeConn struct {
	mu     sync.Mutex
	ended  []string
	at     time.Time
	change []Verdict
	pins   []SA
	pinErr error
}

func (c *fakeConn) connection(f Flow) Connection {
	return Connection{
		Flow: f,
		End: func(reason string) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.ended, c.at = append(c.ended, reason), time.Now()
		},
		Changed: func(_, now Verdict) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.change = append(c.change, now)
		},
		Pin: func(sa SA) error {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.pins = append(c.pins, sa)
			return c.pinErr
		},
	}
}

// seen returns what the Guard did so far.
func (c *fakeConn) seen() (changes []Verdict, ended []string, at time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.change), slices.Clone(c.ended), c.at
}

// pass lets time pass, and then waits for what happens at its end.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

var required = Need{Required, &Profile{Name: "p"}}

// guarded runs f in a bubble with a Guard.
func guarded(t *testing.T, d Driver, o Options, f func(*testing.T, *Guard)) {
	t.Helper()
	testkit.Bubble(t, func(t *testing.T) {
		d.(interface{ enter() }).enter()
		g := NewGuard(d, o)
		synctest.Wait()
		f(t, g)
		if err := g.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
}

// accept accepts and logs in a connection that must be permitted.
func accept(t *testing.T, g *Guard, c *fakeConn, f Flow, need Need) *Watched {
	t.Helper()
	w, v := g.Accept(t.Context(), c.connection(f), need)
	if v.Action != Permit {
		t.Fatalf("accept: %+v", v)
	}
	if v := w.Login(t.Context(), alice, "iqn.2026-01.org.example:target", Need{}); v.Action != Permit {
		t.Fatalf("login: %+v", v)
	}
	return w
}

func TestGuardOff(t *testing.T) {
	d := newFake()
	d.err = errors.New("must not be asked")
	guarded(t, d, Options{}, func(t *testing.T, g *Guard) {
		var c fakeConn
		w := accept(t, g, &c, testFlow, Need{})
		d.set(netip.Addr{}, func(*fakeDriver) {})
		pass(time.Second)
		if s := g.Stats(); d.asked() != 0 || s.Questions != 0 || s.Watched != 0 || len(c.change) != 0 || w.Demand() != Off {
			t.Errorf("%d questions, %+v", d.asked(), s)
		}
		w.Close()
	})
	var none *Guard
	w, v := none.Accept(t.Context(), Connection{}, Need{})
	if v.Action != Permit || w.Login(t.Context(), alice, "", Need{}).Action != Permit || w.Verdict().Action != Permit {
		t.Errorf("without a Guard: %+v", v)
	}
	w.Close()
	w.Require(Need{}, Need{})
	if v := w.Login(t.Context(), alice, "", required); v.Action != Deny {
		t.Errorf("without a Guard, but with a demand at the login: %+v", v)
	}
	if _, v := none.Accept(t.Context(), Connection{}, required); v.Action != Deny || !strings.Contains(v.Reason, "Set ipsec.driver") {
		t.Errorf("without a Guard, but with a demand: %+v", v)
	}
}

func TestGuardDenies(t *testing.T) {
	d := newFake()
	d.p = Protection{}
	guarded(t, d, Options{}, func(t *testing.T, g *Guard) {
		var c fakeConn
		w, v := g.Accept(t.Context(), c.connection(testFlow), required)
		if w != nil || v.Action != Deny || !strings.Contains(v.Reason, "in clear text") {
			t.Errorf("accept: %+v", v)
		}
		w, v = g.Accept(t.Context(), c.connection(testFlow), Need{Demand: Audit})
		if v.Action != Mark {
			t.Errorf("accept under audit: %+v", v)
		}
		if v = w.Login(t.Context(), alice, "iqn.2026-01.org.example:t", required); v.Action != Deny {
			t.Errorf("login to a target that requires more than the portal: %+v", v)
		}
		w.Close()
		if s := g.Stats(); s.Denied != 2 || s.Marked != 1 || s.Watched != 0 || len(c.ended) != 0 {
			t.Errorf("%+v, ended %v", s, c.ended)
		}
	})
}

// The target's demand does not replace that of the portal: both hold.
func TestGuardAsksForPortalAndTarget(t *testing.T) {
	d := newFake()
	guarded(t, d, Options{}, func(t *testing.T, g *Guard) {
		var c fakeConn
		w, v := g.Accept(t.Context(), c.connection(testFlow), Need{Audit, &Profile{Name: "portal", MinKeyBits: 256}})
		if v.Action != Mark {
			t.Fatalf("accept: %+v", v)
		}
		if v = w.Login(t.Context(), alice, "t", Need{Required, &Profile{Name: "target"}}); v.Action != Mark || !strings.Contains(v.Reason, `profile "portal"`) {
			t.Errorf("the mark of the portal is lost: %+v", v)
		}
		if v = w.Login(t.Context(), alice, "t", Need{Required, &Profile{Name: "target", ESN: true, MinKeyBits: 256}}); v.Action != Deny || !strings.Contains(v.Reason, `profile "target"`) {
			t.Errorf("the denial of the target is lost: %+v", v)
		}
		if w.Demand() != Required {
			t.Errorf("demand %s", w.Demand())
		}
		w.Close()
	})
}

// A driver that hangs delays those connections alone that have a demand, and these for no longer than the time limit.
func TestGuardDriverHangs(t *testing.T) {
	for _, stuck := range []bool{false, true} {
		t.Run(fmt.Sprintf("ignores its context: %v", stuck), func(t *testing.T) {
			d := newFake()
			d.hang = true
			testkit.Bubble(t, func(t *testing.T) {
				d.enter()
				if stuck {
					d.stuck = make(chan struct{})
				}
				g := NewGuard(d, Options{Timeout: 2 * time.Second})
				var c fakeConn
				began := time.Now()
				if _, v := g.Accept(t.Context(), c.connection(testFlow), Need{}); v.Action != Permit || time.Since(began) != 0 {
					t.Errorf("without a demand: %+v after %v", v, time.Since(began))
				}
				_, v := g.Accept(t.Context(), c.connection(testFlow), required)
				if v.Action != Deny || !strings.Contains(v.Reason, "driver fake: the driver has not answered in time: the limit is 2s") || time.Since(began) != 2*time.Second {
					t.Errorf("required: %+v after %v", v, time.Since(began))
				}
				w, v := g.Accept(t.Context(), c.connection(testFlow), Need{Demand: Audit})
				if v.Action != Mark || time.Since(began) != 4*time.Second {
					t.Errorf("audit: %+v after %v", v, time.Since(began))
				}
				w.Close()
				if stuck {
					// The number of goroutines in the driver is bounded.
					var all sync.WaitGroup
					for range 3 * maxCalls {
						all.Go(func() {
							if _, v := g.Accept(t.Context(), c.connection(testFlow), required); v.Action != Deny {
								t.Errorf("%+v", v)
							}
						})
					}
					all.Wait()
					if n := d.asked(); n > maxCalls {
						t.Errorf("%d calls in the driver", n)
					}
					close(d.stuck)
				}
				synctest.Wait()
				if err := g.Close(); err != nil || !d.closed {
					t.Errorf("Close: %v", err)
				}
			})
		})
	}
}

// New keys for old ones change nothing but the SPIs (SEC-3723.5.4-1).
func TestGuardRekey(t *testing.T) {
	d := newFake()
	guarded(t, d, Options{Grace: time.Minute}, func(t *testing.T, g *Guard) {
		var c fakeConn
		w := accept(t, g, &c, testFlow, required)
		for i := range 5 {
			d.set(testFlow.Remote.Addr(), func(d *fakeDriver) {
				old := d.p
				d.p = good()
				d.p.In[0].SPI, d.p.Out[0].SPI = uint32(0x3000+i), uint32(0x4000+i)
				d.p.In = append(d.p.In, old.In[0])
			})
			pass(5 * time.Second)
		}
		v := w.Verdict()
		if v.Action != Permit || v.SPIIn != 0x3004 || v.SPIOut != 0x4004 || len(c.ended) != 0 || len(c.change) != 5 || len(c.pins) != 1 {
			t.Errorf("%+v, %d changes, %d pins, ended %v", v, len(c.change), len(c.pins), c.ended)
		}
		for _, v := range c.change {
			if v.Action != Permit || v.Reason != "" {
				t.Errorf("change %+v", v)
			}
		}
		w.Close()
	})
}

// Deletion of an SA alone is no reason to end a connection (SEC-7146.3-4, SEC-3723.3.5-1, SEC-5042.5.4-4).
func TestGuardKeysComeBack(t *testing.T) {
	d := newFake()
	guarded(t, d, Options{Grace: time.Minute}, func(t *testing.T, g *Guard) {
		var c fakeConn
		w := accept(t, g, &c, testFlow, required)
		d.set(testFlow.Remote.Addr(), func(d *fakeDriver) { d.p.In, d.p.Out = nil, nil })
		pass(time.Second)
		v := w.Verdict()
		if v.Action != Mark || !v.KeysGone || !strings.Contains(v.Reason, "The connection ends 1m0s after the loss, at ") || g.Stats().InGrace != 1 {
			t.Errorf("without keys: %+v", v)
		}
		pass(50 * time.Second)
		d.set(testFlow.Remote.Addr(), func(d *fakeDriver) { d.p = good() })
		pass(time.Hour)
		if v := w.Verdict(); v.Action != Permit || len(c.ended) != 0 || g.Stats().InGrace != 0 || len(c.change) != 2 {
			t.Errorf("with new keys: %+v, ended %v, %d changes", v, c.ended, len(c.change))
		}
		w.Close()
	})
}

func TestGuardKeysStayAway(t *testing.T) {
	d := newFake()
	guarded(t, d, Options{Grace: time.Minute}, func(t *testing.T, g *Guard) {
		var c fakeConn
		w := accept(t, g, &c, testFlow, required)
		began := time.Now()
		d.set(testFlow.Remote.Addr(), func(d *fakeDriver) { d.p.In = nil })
		for range 200 { // more notices do not prolong the time
			pass(time.Second)
			d.changed(Change{Kind: Acquired})
		}
		if len(c.ended) != 1 || !strings.Contains(c.ended[0], "no SA for packets from 192.0.2.2 to 192.0.2.1") {
			t.Fatalf("ended %q", c.ended)
		}
		if d := c.at.Sub(began); d < time.Minute || d > time.Minute+time.Second {
			t.Errorf("ended after %v", d)
		}
		if w.Verdict().Action != Deny || g.Stats().Ended != 1 {
			t.Errorf("%+v", w.Verdict())
		}
		w.Close()
	})
}

// Without policies clear text may leave, so a connection ends at once. Pinned, it has the time of grace.
func TestGuardPoliciesGone(t *testing.T) {
	for _, pinned := range []bool{false, true} {
		d := newFake()
		guarded(t, d, Options{Grace: time.Minute}, func(t *testing.T, g *Guard) {
			var c fakeConn
			conn := c.connection(testFlow)
			if !pinned {
				conn.Pin = nil
			}
			w, _ := g.Accept(t.Context(), conn, required)
			began := time.Now()
			d.set(netip.Addr{}, func(d *fakeDriver) { d.p = Protection{} })
			pass(2 * time.Minute)
			if len(c.ended) != 1 || !strings.Contains(c.ended[0], "in clear text") {
				t.Fatalf("pinned %v: ended %q", pinned, c.ended)
			}
			if after := c.at.Sub(began); pinned != (after >= time.Minute) || after > time.Minute+time.Second {
				t.Errorf("pinned %v: ended after %v", pinned, after)
			}
			w.Close()
		})
	}
}

// Keys that are not good enough end the connection at once, because data flows under them.
func TestGuardWeakerKeys(t *testing.T) {
	d := newFake()
	guarded(t, d, Options{Grace: time.Minute}, func(t *testing.T, g *Guard) {
		var c fakeConn
		w := accept(t, g, &c, testFlow, required)
		d.set(testFlow.Remote.Addr(), func(d *fakeDriver) {
			algorithms(Algorithm{}, Algorithm{Name: null}, Algorithm{"hmac(sha1)", 160, 96})(&d.p)
		})
		pass(time.Second)
		if len(c.ended) != 1 || !strings.Contains(c.ended[0], "does not encrypt") {
			t.Errorf("ended %q", c.ended)
		}
		w.Close()
	})
}

// A burst of notices makes few rounds, and a notice about one peer asks for its connections only.
func TestGuardCoalesces(t *testing.T) {
	d := newFake()
	guarded(t, d, Options{}, func(t *testing.T, g *Guard) {
		const n = 500
		var c fakeConn
		var list []*Watched
		for i := range n {
			f := testFlow
			f.Remote = netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, byte(i / 250), byte(i%250 + 1)}), 40000)
			w, _ := g.Accept(t.Context(), c.connection(f), required)
			list = append(list, w)
		}
		before := d.asked()
		for range 10000 {
			d.changed(Change{Kind: Added})
		}
		pass(time.Second)
		if s := g.Stats(); s.Rounds != 1 || d.asked()-before != n {
			t.Errorf("10000 notices at once: %d rounds with %d questions", s.Rounds, d.asked()-before)
		}
		before = d.asked()
		for range 100 {
			d.changed(Change{Kind: Added, Remote: list[7].c.Flow.Remote.Addr()})
		}
		pass(time.Second)
		if got := d.asked() - before; got != 1 {
			t.Errorf("notices about one peer lead to %d questions", got)
		}
		for _, w := range list {
			w.Close()
		}
		if g.Stats().Watched != 0 {
			t.Errorf("%d connections remain", g.Stats().Watched)
		}
	})
}

// When the driver hangs during a round, hundreds of connections do not wait one after the other. They keep what they have until it answers
// again, or the time of patience and that of grace are over.
func TestGuardRoundFails(t *testing.T) {
	for _, back := range []bool{true, false} {
		d := newFake()
		guarded(t, d, Options{Timeout: 2 * time.Second, Grace: time.Minute}, func(t *testing.T, g *Guard) {
			const n = 300
			conns := make([]fakeConn, n)
			for i := range conns {
				if _, v := g.Accept(t.Context(), conns[i].connection(testFlow), required); v.Action != Permit {
					t.Fatal(v)
				}
			}
			began := d.asked()
			d.set(netip.Addr{}, func(d *fakeDriver) { d.hang = true })
			pass(9 * time.Second)
			changes, _, _ := conns[0].seen()
			if s := g.Stats(); s.InGrace != 0 || changes != nil || d.asked()-began > 4*maxRejudging {
				t.Errorf("%d connections in grace after %d questions, changes %v", s.InGrace, d.asked()-began, changes)
			}
			if err := g.Trouble(); err == nil || err.Error() != "driver fake: the driver has not answered in time: the limit is 2s" {
				t.Errorf("trouble %v", err)
			}
			pass(5 * time.Second)
			if s := g.Stats(); s.InGrace != n || d.asked()-began > 6*maxRejudging {
				t.Errorf("%d connections in grace after %d questions", s.InGrace, d.asked()-began)
			}
			conns[0].mu.Lock()
			if v := conns[0].change[0]; v.Action != Mark || !v.Protected() || !strings.Contains(v.Reason, "IPsec cannot be checked") {
				t.Errorf("%+v", v)
			}
			conns[0].mu.Unlock()
			if back {
				d.mu.Lock()
				d.hang = false // without a notice: the Guard retries
				d.mu.Unlock()
			}
			pass(2 * time.Minute)
			if err := g.Trouble(); err == nil != back {
				t.Errorf("driver back %v: trouble %v", back, err)
			}
			for i := range conns {
				if changes, ended, _ := conns[i].seen(); len(ended) != 0 == back || len(changes) != 2 {
					t.Fatalf("driver back %v: connection %d ended %v, changes %v", back, i, ended, changes)
				}
			}
		})
	}
}

// One slow call neither marks nor ends a connection that was protected a moment ago, whatever the time of grace, and changes of keys count once the
// driver answers. A connection under another driver is judged meanwhile.
func TestGuardOneSlowCall(t *testing.T) {
	for _, grace := range []time.Duration{0, time.Second, time.Minute} {
		for _, need := range []Need{required, {Audit, required.Profile}} {
			t.Run(fmt.Sprintf("%s, grace %v", need.Demand, grace), func(t *testing.T) {
				slow, other := newFake(), newFake()
				guarded(t, slow, Options{Grace: grace}, func(t *testing.T, g *Guard) {
					other.enter()
					neighbours := NewGuard(other, Options{Grace: grace})
					defer neighbours.Close()
					synctest.Wait()
					var c, n fakeConn
					w, neighbour := accept(t, g, &c, testFlow, need), accept(t, neighbours, &n, testFlow, need)
					slow.set(testFlow.Remote.Addr(), func(d *fakeDriver) { d.hang = true })
					pass(time.Second) // the call has begun
					slow.mu.Lock()
					slow.hang = false
					slow.p.In[0].SPI = 0x7777
					slow.mu.Unlock()
					other.set(testFlow.Remote.Addr(), func(d *fakeDriver) { d.p.In[0].SPI = 0x6666 })
					pass(time.Second)
					if v := neighbour.Verdict(); v.Action != Permit || v.SPIIn != 0x6666 {
						t.Errorf("the neighbour waits for the driver of another: %+v", v)
					}
					pass(defaultTimeout)
					changes, ended, _ := c.seen()
					if v := w.Verdict(); v.Action != Permit || v.SPIIn != 0x7777 || len(changes) != 1 || len(ended) != 0 || g.Stats().Marked != 0 {
						t.Errorf("%+v, changes %+v, ended %v", v, changes, ended)
					}
					if s := g.Stats(); s.Failures != 1 || g.Trouble() != nil {
						t.Errorf("%+v, trouble %v", s, g.Trouble())
					}
					// An answer that the keys are gone counts at once, slow call or not.
					slow.set(testFlow.Remote.Addr(), func(d *fakeDriver) { d.p.In = nil })
					pass(time.Second / 2)
					if v := w.Verdict(); v.Action == Permit || !v.KeysGone {
						t.Errorf("keys gone: %+v", v)
					}
					w.Close()
					neighbour.Close()
				})
			})
		}
	}
}

// A connection whose keys change while the driver hangs is marked after the time of patience, and ends after that of grace, or after that of patience if it is
// longer. Both begin with the change, so they do not add up. A connection without a demand, and one under another driver, have no part in that.
func TestGuardHangIsBounded(t *testing.T) {
	for _, tc := range []struct{ timeout, patience, grace time.Duration }{
		{0, 0, 0}, {0, 0, 10 * time.Second}, {0, 0, 11 * time.Second}, {0, 0, time.Minute},
		{time.Second, 2 * time.Second, 0}, {time.Second, 2 * time.Second, 2500 * time.Millisecond},
		{3 * time.Second, 2 * time.Second, time.Second}, // a call may take longer than half of the time of patience
	} {
		for _, n := range []int{1, 8, 100} {
			for _, need := range []Need{required, {Audit, required.Profile}} {
				t.Run(fmt.Sprintf("%v, %d connections, %s", tc, n, need.Demand), func(t *testing.T) {
					d, other := newFake(), newFake()
					o := Options{Timeout: tc.timeout, Patience: tc.patience, Grace: tc.grace}
					guarded(t, d, o, func(t *testing.T, g *Guard) {
						other.enter()
						others := NewGuard(other, o)
						defer others.Close()
						synctest.Wait()
						conns := make([]fakeConn, n)
						list := make([]*Watched, n)
						for i := range conns {
							list[i] = accept(t, g, &conns[i], testFlow, need)
						}
						var free, neighbour fakeConn
						unguarded, apart := accept(t, g, &free, testFlow, Need{}), accept(t, others, &neighbour, testFlow, need)
						began := time.Now()
						d.set(testFlow.Remote.Addr(), func(d *fakeDriver) { d.hang = true })
						patience := max(2*o.timeout(), tc.patience)
						if tc.patience == 0 {
							patience = defaultPatience
						}
						pass(patience - time.Millisecond)
						for i := range conns {
							if changes, ended, _ := conns[i].seen(); len(changes)+len(ended) > 0 || list[i].Verdict().Action != Permit {
								t.Fatalf("connection %d before the time of patience is over: %+v, ended %v", i, changes, ended)
							}
						}
						pass(2 * time.Millisecond)
						for i := range conns {
							v := list[i].Verdict()
							if want := map[bool]Action{true: Deny, false: Mark}[need.Demand == Required && tc.grace <= patience]; v.Action != want || v.Class != ClassDriver {
								t.Fatalf("connection %d after the time of patience: %+v, want %s", i, v, want)
							}
						}
						pass(time.Hour)
						for i := range conns {
							_, ended, at := conns[i].seen()
							if want := map[bool]int{true: 1}[need.Demand == Required]; len(ended) != want || want == 1 && at.Sub(began) != max(tc.grace, patience) {
								t.Fatalf("connection %d ended %v after %v", i, ended, at.Sub(began))
							}
						}
						other.set(testFlow.Remote.Addr(), func(d *fakeDriver) { d.p.In[0].SPI = 0x6666 })
						pass(time.Second)
						if v := apart.Verdict(); v.Action != Permit || v.SPIIn != 0x6666 {
							t.Errorf("under another driver: %+v", v)
						}
						if changes, ended, _ := free.seen(); len(changes)+len(ended) > 0 || unguarded.Verdict().Action != Permit {
							t.Errorf("without a demand: %+v, ended %v", changes, ended)
						}
						unguarded.Close()
						apart.Close()
						for _, w := range list {
							w.Close()
						}
					})
				})
			}
		}
	}
}

// The times of a connection begin with its own change, also while questions about another one hang. The other's that the driver answers
// about in the last moment continues.
func TestGuardChangesWhileADriverHangs(t *testing.T) {
	d := newFake()
	guarded(t, d, Options{Grace: 10 * time.Second}, func(t *testing.T, g *Guard) {
		flow := func(last byte) Flow {
			f := testFlow
			f.Remote = netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, last}), 40000)
			return f
		}
		var conns [4]fakeConn
		var list [4]*Watched
		for i := range list {
			list[i] = accept(t, g, &conns[i], flow(byte(i)), required)
		}
		began := time.Now()
		for i := range list[:3] {
			d.set(flow(byte(i)).Remote.Addr(), func(d *fakeDriver) { d.hang = true })
			pass(1700 * time.Millisecond)
		}
		pass(20 * time.Second)
		for i := range list[:3] {
			if _, ended, at := conns[i].seen(); len(ended) != 1 || at.Sub(began) != time.Duration(i)*1700*time.Millisecond+10*time.Second {
				t.Errorf("connection %d ended %v after %v", i, ended, at.Sub(began))
			}
		}
		for _, w := range list {
			w.Close()
		}
	})
}

// Keys that come back without a notice, or an answer just in time, save the connection. Whether the driver hangs meanwhile does not prolong the time of grace.
func TestGuardLastWord(t *testing.T) {
	for name, tc := range map[string]struct {
		grace, after time.Duration // when the driver changes
		change       func(*fakeDriver)
		ends         bool
	}{
		"keys come back without a notice":    {time.Minute, 58 * time.Second, func(d *fakeDriver) { d.p = good() }, false},
		"the driver hangs":                   {time.Minute, 30 * time.Second, func(d *fakeDriver) { d.hang = true }, true},
		"the driver hangs at the end":        {time.Minute, 59500 * time.Millisecond, func(d *fakeDriver) { d.hang = true }, true},
		"the driver fails":                   {time.Minute, 30 * time.Second, func(d *fakeDriver) { d.err = errors.New("no") }, true},
		"a short time, and the driver hangs": {time.Second, time.Second / 2, func(d *fakeDriver) { d.hang = true }, true},
	} {
		t.Run(name, func(t *testing.T) {
			d := newFake()
			guarded(t, d, Options{Grace: tc.grace}, func(t *testing.T, g *Guard) {
				var c fakeConn
				w := accept(t, g, &c, testFlow, required)
				began := time.Now()
				d.set(testFlow.Remote.Addr(), func(d *fakeDriver) { d.p.In, d.p.Out = nil, nil })
				pass(tc.after)
				if v := w.Verdict(); v.Action != Mark || !v.KeysGone {
					t.Fatalf("%+v", v)
				}
				d.mu.Lock()
				tc.change(d)
				d.mu.Unlock()
				d.changed(Change{Kind: Added, Remote: netip.MustParseAddr("203.0.113.77")}) // of another peer
				pass(10 * time.Minute)
				_, ended, at := c.seen()
				if (len(ended) == 1) != tc.ends || tc.ends && at.Sub(began) != tc.grace {
					t.Errorf("ended %v after %v", ended, at.Sub(began))
				}
				if !tc.ends && w.Verdict().Action != Permit {
					t.Errorf("%+v", w.Verdict())
				}
				w.Close()
			})
		})
	}
}

// A driver that hangs for one peer alone does so to no other: each other connection is judged in time, and the one keeps its verdict for the
// time of patience, then has that of grace.
func TestGuardHangsForOnePeer(t *testing.T) {
	d := newFake()
	guarded(t, d, Options{Grace: time.Minute}, func(t *testing.T, g *Guard) {
		const n = 50
		conns := make([]fakeConn, n)
		list := make([]*Watched, n)
		for i := range conns {
			f := testFlow
			f.Remote = netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i + 1)}), 40000)
			list[i] = accept(t, g, &conns[i], f, required)
		}
		began := time.Now()
		d.set(netip.Addr{}, func(d *fakeDriver) {
			d.hangs = list[0].c.Flow.Remote.Addr()
			d.p.In[0].SPI = 0x7777
		})
		d.changed(Change{Kind: Lost})
		pass(time.Second)
		for i, w := range list[1:] {
			if v := w.Verdict(); v.Action != Permit || v.SPIIn != 0x7777 {
				t.Fatalf("connection %d: %+v", i+1, v)
			}
		}
		pass(8 * time.Second)
		if changes, _, _ := conns[0].seen(); list[0].Verdict().Action != Permit || len(changes) != 0 {
			v := list[0].Verdict()
			t.Errorf("within the time of patience: %+v", v)
		}
		pass(10 * time.Second)
		if v := list[0].Verdict(); v.Action != Mark || v.Class != ClassDriver {
			t.Errorf("after the time of patience: %+v", v)
		}
		pass(5 * time.Minute)
		if _, ended, at := conns[0].seen(); len(ended) != 1 || at.Sub(began) > 2*time.Minute {
			t.Errorf("ended %v at %v", ended, at.Sub(began))
		}
		for i := range conns[1:] {
			if changes, ended, _ := conns[i+1].seen(); len(ended) != 0 || len(changes) != 1 {
				t.Errorf("connection %d: ended %v, changes %v", i+1, ended, changes)
			}
		}
		for _, w := range list {
			w.Close()
		}
	})
}

// While the IKE daemon does not answer, what is missing of an SA denies nothing to a connection that was protected, and a new one is refused with the
// cause. What the kernel knows counts meanwhile.
func TestGuardIncomplete(t *testing.T) {
	for name, change := range map[string]func(*SA){
		"identity":     func(sa *SA) { sa.RemoteID = "" },
		"key exchange": func(sa *SA) { sa.RemoteID, sa.IKE = "", false },
	} {
		t.Run(name, func(t *testing.T) {
			d := newFake()
			d.p = identified(good(), "alice.example.org")
			need := Need{Required, &Profile{Name: "p", Identities: []IdentityRule{{alice, "alice.example.org"}}}}
			guarded(t, d, Options{}, func(t *testing.T, g *Guard) {
				var c, late fakeConn
				w := accept(t, g, &c, testFlow, need)
				d.set(testFlow.Remote.Addr(), func(d *fakeDriver) {
					d.p = identified(good(), "alice.example.org")
					change(&d.p.In[0])
					d.p.Incomplete = errors.New("strongSwan: no answer. Restart it")
				})
				pass(5 * time.Second)
				changes, ended, _ := c.seen()
				if v := w.Verdict(); v.Action != Permit || len(changes) != 0 || len(ended) != 0 {
					t.Errorf("%+v, changes %+v, ended %v", v, changes, ended)
				}
				if err := g.Trouble(); err == nil || err.Error() != "driver fake: strongSwan: no answer. Restart it" {
					t.Errorf("trouble %v", err)
				}
				_, v := g.Accept(t.Context(), late.connection(testFlow), need)
				if v.Action != Deny || v.Class != ClassDriver || v.Reason != "IPsec cannot be checked: strongSwan: no answer. Restart it" {
					t.Errorf("a new connection: %+v", v)
				}
				d.mu.Lock() // the Guard asks again by itself
				d.p = identified(good(), "alice.example.org")
				d.mu.Unlock()
				pass(5 * time.Second)
				_, ended, _ = c.seen()
				if v := w.Verdict(); v.Action != Permit || len(ended) != 0 || g.Trouble() != nil {
					t.Errorf("%+v, ended %v, trouble %v", v, ended, g.Trouble())
				}
				d.set(testFlow.Remote.Addr(), func(d *fakeDriver) {
					d.p.Incomplete = errors.New("no answer")
					d.p.In[0].RemoteID = ""
					d.p.In[0].ReplayWindow = 0
				})
				pass(time.Second)
				if _, ended, _ := c.seen(); len(ended) != 1 || w.Verdict().Class != ClassProfile {
					t.Errorf("what the kernel says: %+v, ended %v", w.Verdict(), ended)
				}
				w.Close()
			})
		})
	}
}

func identified(p Protection, id string) Protection {
	for _, sas := range [][]SA{p.In, p.Out} {
		for i := range sas {
			sas[i].RemoteID = id
		}
	}
	return p
}

// A driver that fails is reported when that begins, and when it answers again, however often it is asked, and at most every 10 s.
func TestGuardReportsTrouble(t *testing.T) {
	d := newFake()
	var mu sync.Mutex
	var reports []string
	report := func(text string) {
		mu.Lock()
		defer mu.Unlock()
		reports = append(reports, text)
	}
	o := Options{Timeout: time.Second, Failed: func(err error) { report(err.Error()) }, Answers: func() { report("answers") }}
	guarded(t, d, o, func(t *testing.T, g *Guard) {
		hang := func(on bool) {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.hang = on
		}
		ask := func() Verdict { return g.Ask(t.Context(), Question{Flow: testFlow, Demand: Required}) }
		want := func(n int, last string) {
			t.Helper()
			mu.Lock()
			defer mu.Unlock()
			if len(reports) != n || n > 0 && reports[n-1] != last {
				t.Fatalf("reports %q, want %d, the last one %q", reports, n, last)
			}
		}
		ask()
		want(0, "")
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		g.Ask(gone, Question{Flow: testFlow, Demand: Required}) // its peer has gone, the driver is well
		want(0, "")
		for round := range 2 {
			hang(true)
			for range 3 {
				if v := ask(); v.Action != Deny || v.Class != ClassDriver {
					t.Fatalf("%+v", v)
				}
			}
			want(2*round+1, "driver fake: the driver has not answered in time: the limit is 1s")
			hang(false)
			ask()
			ask()
			want(2*round+2, "answers")
			pass(reportPause)
		}
		hang(true)
		ask()
		pass(time.Minute)
		want(5, "driver fake: the driver has not answered in time: the limit is 1s")
		hang(false)
		pass(lastRetry + time.Second) // nobody asks but the Guard
		want(6, "answers")
		for range 20 { // 20 failures in 22 s
			hang(true)
			ask()
			hang(false)
			ask()
			pass(time.Second / 10)
		}
		mu.Lock()
		defer mu.Unlock()
		if n := len(reports) - 6; n < 2 || n > 6 {
			t.Errorf("%d reports of a driver that fails each second", n)
		}
	})
}

// Lists have calls of their own: those that hang keep no login out, and their number is bounded.
func TestGuardListsAreBounded(t *testing.T) {
	d := newFake()
	testkit.Bubble(t, func(t *testing.T) {
		d.enter()
		d.stuck = make(chan struct{})
		g := NewGuard(d, Options{})
		began := time.Now()
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() {
				if found, err := g.Look(t.Context(), []Flow{testFlow}); err == nil || len(found) != 0 {
					t.Errorf("%v, %v", found, err)
				}
			})
		}
		all.Wait()
		if after := time.Since(began); after != defaultTimeout || d.asked() != maxInspections {
			t.Errorf("%d calls hang, lists came after %v", d.asked(), after)
		}
		d.mu.Lock()
		stuck := d.stuck
		d.stuck = nil
		d.mu.Unlock()
		if v := g.Ask(t.Context(), Question{Flow: testFlow, Demand: Required}); v.Action != Permit {
			t.Errorf("a login: %+v", v)
		}
		close(stuck)
		synctest.Wait()
		if found, err := g.Look(t.Context(), []Flow{testFlow, testFlow}); err != nil || len(found) != 2 || !found[1].InPolicy {
			t.Errorf("%v, %v", found, err)
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestGuardWatchFails(t *testing.T) {
	d := newFake()
	var mu sync.Mutex
	var failures []error
	o := Options{Failed: func(err error) {
		mu.Lock()
		defer mu.Unlock()
		failures = append(failures, err)
	}}
	guarded(t, d, o, func(t *testing.T, g *Guard) {
		var c fakeConn
		w := accept(t, g, &c, testFlow, required)
		d.mu.Lock()
		d.p = Protection{} // a change that Watch does not report
		d.mu.Unlock()
		d.watchErr <- errors.New("socket closed")
		pass(2 * time.Second)
		mu.Lock()
		defer mu.Unlock()
		if len(failures) != 1 || !strings.Contains(failures[0].Error(), "driver fake: changes of keys are not noticed: socket closed") {
			t.Errorf("failures %v", failures)
		}
		if d.watches != 2 || len(c.ended) != 1 || g.Trouble() == nil {
			t.Errorf("%d watches, ended %v, trouble %v", d.watches, c.ended, g.Trouble())
		}
		pass(defaultTimeout)
		if err := g.Trouble(); err != nil {
			t.Errorf("after the driver notices changes again: %v", err)
		}
		w.Close()
	})
}

func TestGuardPin(t *testing.T) {
	d := newFake()
	guarded(t, d, Options{}, func(t *testing.T, g *Guard) {
		c := fakeConn{pinErr: errors.New("operation not permitted")}
		if w, v := g.Accept(t.Context(), c.connection(testFlow), required); w != nil || v.Action != Deny || !strings.Contains(v.Reason, "operation not permitted") {
			t.Errorf("SEC-3723.5.7-2: %+v", v)
		}
		if w, v := g.Accept(t.Context(), c.connection(testFlow), Need{Demand: Audit}); v.Action != Permit || len(c.pins) != 1 {
			t.Errorf("under audit: %+v, %d pins", v, len(c.pins))
		} else {
			w.Close()
		}
		c = fakeConn{}
		w := accept(t, g, &c, testFlow, required)
		if len(c.pins) != 1 || c.pins[0].SPI != 0x2001 {
			t.Errorf("pins %+v", c.pins)
		}
		moved := netip.MustParseAddr("203.0.113.9")
		d.set(netip.Addr{}, func(d *fakeDriver) { d.p = good(); d.p.Out[0].Destination = moved })
		pass(time.Second)
		if len(c.pins) != 2 || c.pins[1].Destination != moved {
			t.Errorf("pins after the gateway moved: %+v", c.pins)
		}
		w.Require(Need{Demand: Audit}, Need{})
		pass(time.Second)
		w.Require(required, Need{})
		pass(time.Second)
		if len(c.pins) != 3 || c.pins[2].Destination != moved {
			t.Errorf("pins after the demand came back: %+v", c.pins)
		}
		w.Close()
	})
}

// A change of the configuration reaches connections that are in.
func TestGuardRequire(t *testing.T) {
	d := newFake()
	guarded(t, d, Options{}, func(t *testing.T, g *Guard) {
		var weak, free fakeConn
		w := accept(t, g, &weak, testFlow, required)
		f := accept(t, g, &free, testFlow, Need{})
		w.Require(Need{Required, &Profile{Name: "narrow", MinKeyBits: 256}}, Need{})
		f.Require(required, Need{})
		pass(time.Second)
		if len(weak.ended) != 1 || !strings.Contains(weak.ended[0], `profile "narrow" requires 256`) {
			t.Errorf("ended %v", weak.ended)
		}
		if len(free.ended) != 0 || g.Stats().Watched != 2 {
			t.Errorf("a connection that fulfils the new demand: ended %v, %+v", free.ended, g.Stats())
		}
		d.set(netip.Addr{}, func(d *fakeDriver) { d.p = Protection{} })
		pass(time.Second)
		if len(free.ended) != 1 {
			t.Errorf("a connection whose portal got a demand is not asked about")
		}
		w.Close()
		f.Close()
	})
}

func TestGuardUse(t *testing.T) {
	d, next := newFake(), newFake()
	next.p = Protection{}
	guarded(t, d, Options{}, func(t *testing.T, g *Guard) {
		next.enter()
		var c fakeConn
		w := accept(t, g, &c, testFlow, required)
		if before := g.Use(next, Options{}); before != Driver(d) || d.closed {
			t.Errorf("Use returns %v", before)
		}
		pass(time.Second)
		if len(c.ended) != 1 {
			t.Error("the new driver is not asked")
		}
		w.Close()
	})
}

// initiating is a driver that can negotiate keys.
type initiating struct {
	*fakeDriver
	flows chan Flow
}

func (d initiating) Initiate(_ context.Context, f Flow) error {
	d.flows <- f
	return nil
}

func TestGuardInitiates(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		d := initiating{newFake(), make(chan Flow, 10)}
		d.enter()
		g := NewGuard(d, Options{Grace: time.Minute})
		synctest.Wait()
		var c fakeConn
		accept(t, g, &c, testFlow, required)
		d.set(netip.Addr{}, func(d *fakeDriver) { d.p.In, d.p.Out = nil, nil })
		pass(10 * time.Second)
		if len(d.flows) != 1 || <-d.flows != testFlow {
			t.Errorf("%d negotiations", len(d.flows))
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
}

// deciding is a driver that gives verdicts itself.
type deciding struct {
	*fakeDriver
	v   Verdict
	err error
}

func (d *deciding) Decide(context.Context, Question) (Verdict, error) { return d.v, d.err }

func TestGuardDecider(t *testing.T) {
	d := &deciding{fakeDriver: newFake()}
	guarded(t, d, Options{}, func(t *testing.T, g *Guard) {
		for _, tc := range []struct {
			v      Verdict
			err    error
			demand Demand
			want   Action
			reason string
		}{
			{Verdict{Action: Permit}, nil, Required, Permit, ""},
			{Verdict{Action: Mark, Reason: "old keys. Rekey"}, nil, Required, Mark, "old keys. Rekey"},
			{Verdict{Action: Deny, Reason: "no. Ask"}, nil, Required, Deny, "no. Ask"},
			{Verdict{Action: Deny, Reason: "no. Ask"}, nil, Audit, Mark, "no. Ask"},
			{Verdict{Action: Deny}, nil, Required, Deny, "its verdict deny has no reason"},
			{Verdict{Action: "allow"}, nil, Required, Deny, `its verdict "allow" is not permit, mark or deny`},
			{Verdict{}, errors.New("exit status 3"), Required, Deny, "IPsec cannot be checked: driver fake: exit status 3"},
			{Verdict{}, errors.New("exit status 3"), Audit, Mark, "exit status 3"},
		} {
			d.v, d.err = tc.v, tc.err
			class := map[bool]Class{true: ClassDriver, false: ClassProgram}[tc.err != nil || strings.Contains(tc.reason, "its verdict")]
			if tc.want == Permit {
				class = ""
			}
			if v := g.Ask(t.Context(), Question{Flow: testFlow, Demand: tc.demand}); v.Action != tc.want || v.Class != class || !strings.Contains(v.Reason, tc.reason) {
				t.Errorf("%+v: %+v", tc, v)
			}
		}
	})
}

// Close does not wait forever for a driver that ignores the end of its context.
func TestGuardCloseIsBounded(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		d := &stubborn{newFake(), make(chan struct{})}
		g := NewGuard(d, Options{Timeout: time.Second})
		began := time.Now()
		if err := g.Close(); err == nil || !strings.Contains(err.Error(), "its calls do not return: no answer within 1s") || time.Since(began) > 2*time.Second {
			t.Errorf("Close: %v after %v", err, time.Since(began))
		}
		close(d.end)
	})
}

type stubborn struct {
	*fakeDriver
	end chan struct{}
}

func (d *stubborn) Watch(context.Context, func(Change)) error {
	<-d.end
	return nil
}
