// Package scale measures groups of gateways that share LUNs (package lun/owner) at an etcd of three members on this machine.
package scale

import (
	"context"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/lun/owner"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/lun/state/etcd"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/etcdserver"
)

var (
	gateways = flag.Int("gateways", 4, "number of gateways")
	luns     = flag.Int("luns", 80, "number of LUNs")
	killed   = flag.Int("killed", 1, "how many gateways die at once")
	ttl      = flag.Duration("ttl", 10*time.Second, "time of the leases") // longer than by default: a busy machine may stand still for a while
)

// store is a Medium that takes as long as an RBD image on a good day: 150 ms to open, 100 ms until its client is known, and 350 ms to fence.
type store struct{}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (store) Fence(ctx context.Context, lun, gateway, address string) error {
	return wait(ctx, 350*time.Millisecond)
}
func (store) Open(ctx context.Context, lun string) error { return wait(ctx, 150*time.Millisecond) }
func (store) Address(ctx context.Context, lun string) (string, error) {
	return lun, wait(ctx, 100*time.Millisecond)
}
func (store) Close(ctx context.Context, lun string) error { return wait(ctx, 50*time.Millisecond) }

// A gateway of the test has a client of etcd of its own.
type gateway struct {
	*owner.Gateway
	home *etcd.Home
	dead bool
}

type group struct {
	t       *testing.T
	members []*etcdserver.Member
	list    []*gateway
	all     []string

	mu    sync.Mutex
	taken map[string]time.Time // when a LUN was served by a new owner
}

func (gr *group) start() {
	for i := range *luns {
		gr.all = append(gr.all, fmt.Sprintf("naa.6001405%09x", i))
	}
	for i := range *gateways {
		h, err := etcd.Open(etcd.Config{Endpoints: etcdserver.Endpoints(gr.members), Prefix: "/scale"})
		if err != nil {
			gr.t.Fatal(err)
		}
		g, err := owner.Join(owner.Options{Name: fmt.Sprint("gw", i), Home: h, LUNs: gr.all, Medium: store{}, TTL: *ttl, Failback: time.Second,
			Changed: func(lun string, serves bool, reason error) {
				if serves {
					gr.mu.Lock()
					gr.taken[lun] = time.Now()
					gr.mu.Unlock()
				}
			}})
		if err != nil {
			gr.t.Fatal(err)
		}
		gr.list = append(gr.list, &gateway{Gateway: g, home: h})
	}
	gr.t.Cleanup(func() {
		var wg sync.WaitGroup
		for _, g := range gr.list {
			wg.Go(func() {
				g.Close()
				g.home.Close()
			})
		}
		wg.Wait()
	})
}

// served returns which gateway serves each LUN. No LUN has two.
func (gr *group) served() map[string]*gateway {
	by := map[string]*gateway{}
	for _, g := range gr.list {
		for _, lun := range gr.all {
			if g.dead || !g.Unit(lun).MayAnswer() {
				continue
			}
			if by[lun] != nil {
				gr.t.Fatalf("two gateways serve %s", lun)
			}
			by[lun] = g
		}
	}
	return by
}

// complete reports whether all LUNs are served.
func (gr *group) complete() bool {
	time.Sleep(100 * time.Millisecond) // to look is much work
	return len(gr.served()) == len(gr.all)
}

// writes returns how many values etcd stores per second.
func (gr *group) writes() float64 {
	const clients, each = 32, 50
	var wg sync.WaitGroup
	h, err := etcd.Open(etcd.Config{Endpoints: etcdserver.Endpoints(gr.members), Prefix: "/writes"})
	if err != nil {
		gr.t.Fatal(err)
	}
	defer h.Close()
	began := time.Now()
	for c := range clients {
		wg.Go(func() {
			r := state.Revision(0)
			for range each {
				var err error
				if r, err = h.Put(gr.t.Context(), fmt.Sprint(c), []byte("a value of some length, as those of owners are"), r); err != nil {
					gr.t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return clients * each / time.Since(began).Seconds()
}

// since returns the median and the longest time until the LUNs were served again.
func (gr *group) since(began time.Time, luns []string) (median, longest time.Duration) {
	gr.mu.Lock()
	defer gr.mu.Unlock()
	var list []time.Duration
	for _, lun := range luns {
		list = append(list, gr.taken[lun].Sub(began))
	}
	slices.Sort(list)
	return list[len(list)/2].Round(10 * time.Millisecond), list[len(list)-1].Round(10 * time.Millisecond)
}

// cpu returns the CPU time of a process, and its resident memory in MiB.
func cpu(t *testing.T, pid int) (time.Duration, int) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+2:]))
	user, _ := strconv.Atoi(f[11])
	system, _ := strconv.Atoi(f[12])
	pages, _ := strconv.Atoi(f[21])
	return time.Duration(user+system) * 10 * time.Millisecond, pages * os.Getpagesize() >> 20
}

// When gateways die, their LUNs have new owners soon after the lease, and LUNs of others keep theirs. A gateway that is drained
// gives its LUNs away without a lease in between. The log has how long all that took, and what it cost.
func TestScale(t *testing.T) {
	if *killed+1 >= *gateways {
		t.Fatal("-gateways must be more than -killed and the one that is drained: else LUNs have nobody")
	}
	gr := &group{t: t, members: etcdserver.Start(t, 3), taken: map[string]time.Time{}}
	t.Logf("writes per second that this etcd takes from 32 clients: %.0f", gr.writes())
	before := memory()
	began := time.Now()
	gr.start()
	testkit.Eventually(t, "all LUNs are served", gr.complete)
	t.Logf("%d gateways, %d LUNs", *gateways, *luns)
	t.Logf("all LUNs served after the start: %v", time.Since(began).Round(10*time.Millisecond))
	quiet := func() bool {
		gr.mu.Lock()
		defer gr.mu.Unlock()
		for _, at := range gr.taken {
			if time.Since(at) < 3*time.Second {
				return false
			}
		}
		return true
	}
	testkit.Eventually(t, "all LUNs are where they should be", func() bool { return quiet() && gr.complete() })
	t.Logf("all LUNs on the gateways that should have them: %v", (time.Since(began) - 3*time.Second).Round(10*time.Millisecond))
	t.Logf("memory of a gateway: %.1f MiB", float64(memory()-before)/float64(*gateways)/(1<<20))

	// At rest
	var first []time.Duration
	for _, m := range gr.members {
		c, _ := cpu(t, m.PID())
		first = append(first, c)
	}
	const rest = 5 * time.Second
	time.Sleep(rest)
	for i, m := range gr.members {
		c, mem := cpu(t, m.PID())
		t.Logf("etcd member %d at rest: %.1f %% of a CPU, %d MiB", i, 100*(c-first[i]).Seconds()/rest.Seconds(), mem)
	}

	owned := map[*gateway][]string{}
	for lun, g := range gr.served() {
		owned[g] = append(owned[g], lun)
	}
	began = time.Now()
	var lost []string
	stay := map[string]time.Time{}
	for i, g := range gr.list {
		if i < *killed {
			g.dead = true
			g.home.Close() // as kill -9 does: it renews nothing from now on
			lost = append(lost, owned[g]...)
			continue
		}
		gr.mu.Lock()
		for _, lun := range owned[g] {
			stay[lun] = gr.taken[lun]
		}
		gr.mu.Unlock()
	}
	testkit.Eventually(t, "all LUNs are served again", gr.complete)
	median, longest := gr.since(began, lost)
	t.Logf("%d gateways killed at once, with %d LUNs: served again after %v, the last after %v", *killed, len(lost), median, longest)
	gr.mu.Lock()
	for lun, at := range stay {
		if gr.taken[lun] != at {
			t.Errorf("%s has another owner, although its own lives", lun)
		}
	}
	gr.mu.Unlock()

	g := gr.list[len(gr.list)-1]
	var own []string
	for lun, by := range gr.served() {
		if by == g {
			own = append(own, lun)
		}
	}
	began = time.Now()
	if err := g.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the LUNs of a drained gateway are served", gr.complete)
	median, longest = gr.since(began, own)
	t.Logf("a gateway with %d LUNs drained: served again after %v, the last after %v", len(own), median, longest)
	for i, m := range gr.members {
		_, mem := cpu(t, m.PID())
		t.Logf("etcd member %d at the end: %d MiB", i, mem)
	}
}

func memory() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse + m.StackInuse
}
