package owner

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/lun/state/hometest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A disk is what the LUNs of a test are on. It knows which openings it obeys.
type disk struct {
	mu       sync.Mutex
	random   *rand.Rand
	openings map[string]map[string]bool // of a LUN: their addresses; true: not fenced
	serial   int
	broken   map[string]bool // gateway and LUN: Open fails
	nameless map[string]bool // the same: Address fails
	opened   func(gateway string)
	slow     time.Duration // of Close
	quick    bool          // all else takes no time
}

// A head is the Medium of one gateway.
type head struct {
	*disk
	gateway string
	mine    map[string]string // the address of each open LUN
	dead    bool              // nobody closes what it has opened
}

func newDisk(seed uint64) *disk {
	return &disk{random: rand.New(rand.NewPCG(seed, 1)), openings: map[string]map[string]bool{}, broken: map[string]bool{}, nameless: map[string]bool{}}
}

func (d *disk) head(gateway string) *head {
	return &head{disk: d, gateway: gateway, mine: map[string]string{}}
}

func (d *disk) pass(ctx context.Context) error {
	d.mu.Lock()
	t := time.Duration(d.random.IntN(300)) * time.Millisecond
	if d.quick {
		t = 0
	}
	d.mu.Unlock()
	if !pause(ctx, t) {
		return context.Cause(ctx)
	}
	return nil
}

func (h *head) Fence(ctx context.Context, lun, gateway, last string) error {
	if err := h.pass(ctx); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for address := range h.openings[lun] { // as those of an image are known by its watchers
		h.openings[lun][address] = false
	}
	return nil
}

func (h *head) Open(ctx context.Context, lun string) error {
	if err := h.pass(ctx); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.broken[h.gateway+lun] {
		return errors.New("broken")
	}
	h.serial++
	address := fmt.Sprint(h.gateway, "-", h.serial)
	if h.openings[lun] == nil {
		h.openings[lun] = map[string]bool{}
	}
	h.openings[lun][address] = true
	h.mine[lun] = address
	if h.opened != nil {
		h.opened(h.gateway)
	}
	return nil
}

func (h *head) Address(ctx context.Context, lun string) (string, error) {
	if err := h.pass(ctx); err != nil {
		return "", err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.nameless[h.gateway+lun] {
		return "", errors.New("unknown")
	}
	return h.mine[lun], nil
}

func (h *head) Close(ctx context.Context, lun string) error {
	err := h.pass(ctx)
	h.mu.Lock()
	slow := h.slow
	h.mu.Unlock()
	if slow > 0 && !pause(ctx, slow) {
		err = context.Cause(ctx)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.dead {
		return errors.New("the process is dead")
	}
	delete(h.openings[lun], h.mine[lun])
	delete(h.mine, lun)
	return err
}

// obeyed returns the openings of a LUN that are obeyed.
func (d *disk) obeyed(lun string) (list []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for address, obeyed := range d.openings[lun] {
		if obeyed {
			list = append(list, address)
		}
	}
	return list
}

// A node is a machine of a test.
type node struct {
	name string
	link *hometest.Link
	head *head
	g    *Gateway
	dead bool // after kill -9: it runs on in the test, but it is deaf and nobody hears it
}

// A group is several of them.
type group struct {
	*testing.T
	memory *hometest.Memory
	disk   *disk
	luns   []string
	nodes  []*node
	all    []*Gateway
	change func(*Options)
	stop   chan struct{}
	done   sync.WaitGroup

	mu      sync.Mutex
	pauses  map[string]time.Duration // the longest time without owner, by LUN
	without map[string]time.Time
	atOnce  int // the most LUNs that had no owner at the same time
}

// newGroup starts gateways with LUNs, and watches them until the test ends.
func newGroup(t *testing.T, seed uint64, gateways, luns int, change func(*Options)) *group {
	gr := &group{T: t, memory: hometest.NewMemory(seed), disk: newDisk(seed), change: change, stop: make(chan struct{}),
		pauses: map[string]time.Duration{}, without: map[string]time.Time{}}
	for i := range luns {
		gr.luns = append(gr.luns, fmt.Sprintf("naa.%d", i))
	}
	for i := range gateways {
		name := string(rune('a' + i))
		n := &node{name: name, link: gr.memory.Link(20 * time.Millisecond), head: gr.disk.head(name)}
		gr.nodes = append(gr.nodes, n)
		gr.start(n)
	}
	gr.done.Go(gr.observe)
	return gr
}

func (gr *group) start(n *node) {
	o := Options{Name: n.name, Home: n.link, LUNs: gr.luns, Medium: n.head}
	if gr.change != nil {
		gr.change(&o)
	}
	g, err := Join(o)
	if err != nil {
		gr.Fatal(err)
	}
	gr.mu.Lock()
	n.g, n.dead = g, false
	gr.mu.Unlock()
	gr.all = append(gr.all, g)
}

// kill ends a node as kill -9 does: what it has opened stays open, as in a daemon of its own.
func (gr *group) kill(n *node) {
	gr.mu.Lock()
	n.dead = true
	gr.mu.Unlock()
	gr.disk.mu.Lock()
	n.head.dead = true
	gr.disk.mu.Unlock()
	n.link.Cut(true)
	n.link = gr.memory.Link(20 * time.Millisecond)
	n.head = gr.disk.head(n.name)
}

// revive starts a new process of a node that was killed.
func (gr *group) revive(n *node) { gr.start(n) }

// end stops all.
func (gr *group) end() {
	close(gr.stop)
	gr.done.Wait()
	for _, n := range gr.nodes {
		n.link.Cut(false)
	}
	for _, g := range gr.all {
		g.o.Home.(*hometest.Link).Cut(false)
		g.Close()
	}
}

// servers returns the gateways that may answer commands of a LUN.
func (gr *group) servers(lun string) (list []string) {
	for _, n := range gr.nodes {
		if u := n.g.Unit(lun); u != nil && !n.dead && (u.MayAnswer() || u.Admits()) {
			list = append(list, n.name)
		}
	}
	return list
}

// observe checks every few milliseconds that at most one gateway answers, and that the disk obeys it alone.
func (gr *group) observe() {
	for {
		select {
		case <-gr.stop:
			return
		case <-time.After(3 * time.Millisecond):
		}
		gr.mu.Lock()
		for _, lun := range gr.luns {
			list := gr.servers(lun)
			if len(list) > 1 {
				gr.Errorf("%v answer for %s at once", list, lun)
			}
			if len(list) == 1 {
				if obeyed := gr.disk.obeyed(lun); slices.ContainsFunc(obeyed, func(a string) bool { return !strings.HasPrefix(a, list[0]) }) {
					gr.Errorf("%v serves %s, whose disk obeys %v", list, lun, obeyed)
				}
				delete(gr.without, lun)
				continue
			}
			if gr.without[lun].IsZero() {
				gr.without[lun] = time.Now()
			}
			gr.pauses[lun] = max(gr.pauses[lun], time.Since(gr.without[lun]))
		}
		gr.atOnce = max(gr.atOnce, len(gr.without))
		gr.mu.Unlock()
	}
}

// settle waits until each LUN has the owner that want names.
func (gr *group) settle(limit time.Duration, want func(lun string) string) {
	gr.Helper()
	var wrong string
	for range int(limit / (100 * time.Millisecond)) {
		wrong = ""
		for _, lun := range gr.luns {
			gr.mu.Lock()
			list := gr.servers(lun)
			gr.mu.Unlock()
			if w := want(lun); fmt.Sprint(list) != "["+w+"]" {
				wrong = fmt.Sprintf("%v serve %s instead of %s", list, lun, w)
			}
		}
		if wrong == "" {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	gr.Fatalf("after %v, %s", limit, wrong)
}

// bestBut returns what best does, but another gateway for one LUN.
func bestBut(gateways, lun, to string) func(lun string) string {
	return func(l string) string {
		if l == lun {
			return to
		}
		return best(gateways)(l)
	}
}

// best returns the gateway that should have a LUN, of those that are named.
func best(gateways string) func(lun string) string {
	return func(lun string) string {
		found := ""
		for _, r := range gateways {
			if found == "" || weight(hash(string(r)), hash(lun)) > weight(hash(found), hash(lun)) {
				found = string(r)
			}
		}
		return found
	}
}

// fresh forgets pauses.
func (gr *group) fresh() {
	gr.mu.Lock()
	defer gr.mu.Unlock()
	clear(gr.pauses)
	clear(gr.without)
	gr.atOnce = 0
}

// longest checks the longest time that a LUN had no owner.
func (gr *group) longest(limit time.Duration) {
	gr.Helper()
	gr.mu.Lock()
	defer gr.mu.Unlock()
	for lun, d := range gr.pauses {
		if d > limit {
			gr.Errorf("%s had no owner for %v, more than %v", lun, d, limit)
		}
	}
}

// bubble runs a test with a fake clock.
func bubble(t *testing.T, gateways, luns int, change func(*Options), test func(gr *group)) {
	testkit.Bubble(t, func(t *testing.T) {
		gr := newGroup(t, 1, gateways, luns, change)
		defer gr.end()
		test(gr)
	})
}

// The gateways agree on the owner of each LUN, from the start.
func TestSpread(t *testing.T) {
	bubble(t, 3, 30, nil, func(gr *group) {
		gr.settle(time.Minute, best("abc"))
		n := map[string]int{}
		for _, lun := range gr.luns {
			n[gr.nodes[0].g.Owner(lun)]++
		}
		if len(n) != 3 || n[""] > 0 {
			gr.Errorf("LUNs by gateway: %v", n)
		}
	})
}

// A gateway that is killed loses its LUNs after its lease, and has them again when it was back for a while. LUNs of others keep their
// owners all the time.
func TestKill(t *testing.T) {
	bubble(t, 3, 12, nil, func(gr *group) {
		gr.settle(time.Minute, best("abc"))
		gr.fresh()
		gr.kill(gr.nodes[0])
		gr.settle(time.Minute, best("bc"))
		gr.longest(defaultTTL + 1500*time.Millisecond)
		gr.mu.Lock()
		for lun, d := range gr.pauses {
			if best("abc")(lun) != "a" && d > 0 {
				gr.Errorf("%s, whose owner lives, had none for %v", lun, d)
			}
		}
		gr.mu.Unlock()
		gr.fresh()
		gr.revive(gr.nodes[0])
		gr.settle(2*time.Minute, best("abc"))
		gr.longest(1500 * time.Millisecond)
	})
}

// A gateway that is cut off from the others stops to answer before they begin.
func TestCutOff(t *testing.T) {
	bubble(t, 2, 6, nil, func(gr *group) {
		gr.settle(time.Minute, best("ab"))
		gr.fresh()
		gr.nodes[0].link.Cut(true)
		gr.settle(time.Minute, best("b"))
		gr.longest(defaultTTL/5 + 2500*time.Millisecond)
		gr.nodes[0].link.Cut(false)
		gr.settle(2*time.Minute, best("ab"))
	})
}

// A claim, or the end of one, that came through although it seemed to fail keeps no LUN from being served.
func TestUnsure(t *testing.T) {
	for _, lost := range []int{1, 2} { // the answer to the first or second change of each owner
		bubble(t, 2, 4, func(o *Options) {
			for _, lun := range o.LUNs {
				o.Home.(*hometest.Link).Lose(ownerKey+lun, lost)
			}
		}, func(gr *group) {
			gr.settle(time.Minute, best("ab"))
			if err := gr.nodes[0].g.Drain(gr.Context()); err != nil {
				gr.Fatal(err)
			}
			gr.settle(time.Minute, best("b"))
		})
	}
}

// An owner that dies between the opening of a store and the note of that is fenced all the same.
func TestNotNoted(t *testing.T) {
	bubble(t, 2, 1, nil, func(gr *group) {
		first := best("ab")(gr.luns[0])
		gr.disk.opened = func(gateway string) {
			if n := gr.nodes[strings.Index("ab", first)]; gateway == first {
				n.head.dead = true
				go func() {
					gr.mu.Lock()
					n.dead = true
					gr.mu.Unlock()
					n.link.Cut(true)
				}()
			}
		}
		gr.settle(time.Minute, func(string) string { return strings.Trim("ab", first) })
		if obeyed := gr.disk.obeyed(gr.luns[0]); len(obeyed) != 1 {
			gr.Errorf("the disk obeys %v", obeyed)
		}
	})
}

// An owner whose lease somebody revokes stops when it hears of that, sooner than by its own clock.
func TestRevoked(t *testing.T) {
	bubble(t, 2, 6, func(o *Options) { o.TTL = time.Minute }, func(gr *group) {
		gr.settle(time.Minute, best("ab"))
		gr.fresh()
		gr.disk.mu.Lock()
		gr.disk.slow = 2 * time.Second
		gr.disk.mu.Unlock()
		gr.nodes[0].link.ExpireLeases()
		gr.settle(time.Minute, best("b"))
		gr.longest(2 * time.Second)
		gr.settle(2*time.Minute, best("ab"))
	})
}

// While the home of the values answers nobody, nobody serves; then all is as before.
func TestHomeLost(t *testing.T) {
	bubble(t, 2, 6, nil, func(gr *group) {
		gr.settle(time.Minute, best("ab"))
		for _, n := range gr.nodes {
			n.link.Cut(true)
		}
		time.Sleep(2 * time.Second) // shorter than a lease: nobody notices
		for _, lun := range gr.luns {
			if list := gr.servers(lun); fmt.Sprint(list) != "["+best("ab")(lun)+"]" {
				gr.Errorf("%v serve %s", list, lun)
			}
		}
		time.Sleep(20 * time.Second)
		for _, lun := range gr.luns {
			if list := gr.servers(lun); len(list) > 0 {
				gr.Errorf("%v serve %s without a home", list, lun)
			}
		}
		for _, n := range gr.nodes {
			if n.g.Err() == nil {
				gr.Errorf("gateway %s has no error", n.name)
			}
			n.link.Cut(false)
		}
		gr.settle(2*time.Minute, best("ab"))
	})
}

// However many LUNs a gateway has, it gives away a few at a time: others open few stores at once then. A LUN that nobody can open does not hold up the rest.
func TestDrainOfMany(t *testing.T) {
	bubble(t, 3, 60, nil, func(gr *group) {
		gr.settle(time.Minute, best("abc"))
		drain := func(n *node, limit time.Duration) {
			gr.Helper()
			begun := time.Now()
			if err := n.g.Drain(gr.Context()); err != nil {
				gr.Fatal(err)
			}
			if took := time.Since(begun); took > limit {
				gr.Errorf("gateway %s was drained after %v, more than %v", n.name, took, limit)
			}
		}
		gr.fresh()
		drain(gr.nodes[0], 10*time.Second)
		gr.settle(time.Minute, best("bc"))
		gr.longest(1500 * time.Millisecond)
		if gr.atOnce < 2 || gr.atOnce > defaultMoves {
			gr.Errorf("%d LUNs had no owner at a time, want 2 to %d", gr.atOnce, defaultMoves)
		}
		gr.disk.mu.Lock()
		for _, lun := range gr.luns[:8] {
			gr.disk.broken["c"+lun] = true
		}
		gr.disk.mu.Unlock()
		drain(gr.nodes[1], 20*time.Second)
		for _, lun := range gr.luns[8:] {
			if list := gr.servers(lun); len(list) != 1 || list[0] != "c" {
				gr.Errorf("%v serve %s", list, lun)
			}
		}
	})
}

// A gateway that is drained gives its LUNs away without a lease in between, and gets none while it is there.
func TestDrain(t *testing.T) {
	bubble(t, 3, 12, nil, func(gr *group) {
		gr.settle(time.Minute, best("abc"))
		gr.fresh()
		if err := gr.nodes[1].g.Drain(gr.Context()); err != nil {
			gr.Fatal(err)
		}
		if list := gr.nodes[1].head.mine; len(list) > 0 {
			gr.Errorf("after Drain, %v are open", list)
		}
		gr.settle(time.Minute, best("ac"))
		gr.longest(1500 * time.Millisecond)
		time.Sleep(3 * time.Minute)
		gr.settle(time.Second, best("ac"))
		gr.nodes[1].g.Close()
		gr.kill(gr.nodes[1])
		gr.revive(gr.nodes[1])
		gr.settle(2*time.Minute, best("abc"))
		ctx, cancel := context.WithTimeout(gr.Context(), time.Second)
		defer cancel()
		gr.nodes[0].link.Cut(true)
		if err := gr.nodes[0].g.Drain(ctx); err == nil {
			gr.Error("Drain without a home succeeds")
		}
		gr.nodes[0].link.Cut(false)
	})
}

// A LUN goes where the operator puts it, and back.
func TestPrefer(t *testing.T) {
	bubble(t, 3, 3, func(o *Options) { o.Failback = time.Second }, func(gr *group) {
		gr.settle(time.Minute, best("abc"))
		for _, name := range []string{"b", "c", "b"} {
			for _, lun := range gr.luns {
				if err := gr.nodes[0].g.Prefer(gr.Context(), lun, name); err != nil {
					gr.Fatal(err)
				}
			}
			gr.settle(10*time.Second, func(string) string { return name })
		}
		gr.kill(gr.nodes[1]) // a preference does not keep the others away
		gr.settle(time.Minute, best("ac"))
		for _, lun := range gr.luns {
			if err := gr.nodes[0].g.Prefer(gr.Context(), lun, ""); err != nil {
				gr.Fatal(err)
			}
		}
		gr.revive(gr.nodes[1])
		gr.settle(time.Minute, best("abc"))
	})
}

// What an operator moves while its store is being opened goes as soon as it is open.
func TestPreferWhileOpening(t *testing.T) {
	bubble(t, 2, 24, func(o *Options) { o.Failback = time.Hour }, func(gr *group) {
		want := best("ab")
		gr.settle(time.Minute, want)
		for _, name := range []string{"b", "a", "b"} {
			for i, lun := range gr.luns {
				owner := gr.nodes[0]
				if want(lun) == "b" {
					owner = gr.nodes[1]
				}
				owner.g.Unit(lun).Reopen()
				time.Sleep(time.Duration(i) * 2 * time.Millisecond)
				if err := gr.nodes[0].g.Prefer(gr.Context(), lun, name); err != nil {
					gr.Fatal(err)
				}
			}
			want = func(string) string { return name }
			gr.settle(time.Minute, want)
		}
	})
}

// What an operator moves back as soon as the other gateway serves it has that owner again at once, also if the first one had not noticed the other.
func TestPreferBack(t *testing.T) {
	bubble(t, 2, 1, func(o *Options) { o.Failback = time.Hour }, func(gr *group) {
		lun := gr.luns[0]
		prefer := func(name string) {
			if err := gr.nodes[0].g.Prefer(gr.Context(), lun, name); err != nil {
				gr.Fatal(err)
			}
		}
		gr.settle(time.Minute, best("ab"))
		gr.disk.mu.Lock()
		gr.disk.quick = true
		gr.disk.mu.Unlock()
		for _, n := range gr.nodes {
			n.link.Slow(time.Millisecond)
		}
		for i := range 20 {
			prefer("a")
			gr.settle(time.Minute, func(string) string { return "a" })
			time.Sleep(2 * time.Second) // both may give a LUN back again
			gr.fresh()
			prefer("b")
			for !gr.nodes[1].g.Unit(lun).Admits() {
				time.Sleep(time.Millisecond)
			}
			time.Sleep(time.Duration(i) * time.Millisecond)
			prefer("a")
			gr.settle(4*time.Second, func(string) string { return "a" })
			gr.longest(300 * time.Millisecond)
		}
	})
}

// What an operator moves goes at once, and not after the time of a failback. A gateway that ends a drain gets its LUNs back.
func TestHandover(t *testing.T) {
	bubble(t, 2, 8, nil, func(gr *group) {
		gr.settle(time.Minute, best("ab"))
		gr.fresh()
		lun := gr.luns[0]
		other := map[string]string{"a": "b", "b": "a"}[best("ab")(lun)]
		if err := gr.nodes[0].g.Prefer(gr.Context(), lun, other); err != nil {
			gr.Fatal(err)
		}
		want := bestBut("ab", lun, other)
		gr.settle(2*time.Second, want)
		gr.longest(1500 * time.Millisecond)
		if p, f := gr.nodes[1].g.Preferred(lun), gr.nodes[1].g.Favorite(lun); p != other || f != other {
			gr.Errorf("the preference is %q, and %q should have the LUN, want %q", p, f, other)
		}
		if err := gr.nodes[0].g.Drain(gr.Context()); err != nil {
			gr.Fatal(err)
		}
		gr.settle(time.Second, func(string) string { return "b" })
		if err := gr.nodes[0].g.Resume(gr.Context()); err != nil {
			gr.Fatal(err)
		}
		gr.settle(time.Minute, want)
	})
}

// Only the owner changes what Unit.Put stores: neither another gateway nor the owner before does.
func TestPut(t *testing.T) {
	bubble(t, 2, 2, nil, func(gr *group) {
		gr.settle(time.Minute, best("ab"))
		lun := gr.luns[0]
		owner, other := gr.nodes[0], gr.nodes[1]
		if best("ab")(lun) == "b" {
			owner, other = other, owner
		}
		late := owner.g.Unit(lun)
		if _, err := other.g.Unit(lun).Put(gr.Context(), "work", []byte("x"), 0); !errors.Is(err, state.ErrConflict) {
			gr.Errorf("Put of another gateway: %v, want a conflict", err)
		}
		r, err := late.Put(gr.Context(), "work", []byte("x"), 0)
		if err != nil {
			gr.Fatal(err)
		}
		owner.g.mu.Lock()
		before := owner.g.term
		owner.g.mu.Unlock()
		owner.link.Cut(true)
		gr.settle(time.Minute, func(string) string { return other.name })
		owner.link.Cut(false)
		if _, err := late.Put(gr.Context(), "work", nil, r); !errors.Is(err, state.ErrConflict) {
			gr.Errorf("Put of the owner before: %v, want a conflict", err)
		}
		if _, err := before.lease.PutHeld(gr.Context(), "work", nil, r, ownerKey+lun); !errors.Is(err, state.ErrConflict) {
			gr.Errorf("Put of the owner before, as if it had not heard of the end of its lease: %v, want a conflict", err)
		}
		if v, err := other.link.Get(gr.Context(), "work"); err != nil || string(v.Data) != "x" {
			gr.Errorf("the value is %q, %v", v.Data, err)
		}
		if _, err := other.g.Unit(lun).Put(gr.Context(), "work", nil, r); err != nil {
			gr.Errorf("Put of the next owner: %v", err)
		}
	})
}

// A gateway whose store has failed opens it again, and the others need not know.
func TestReopen(t *testing.T) {
	bubble(t, 2, 4, nil, func(gr *group) {
		gr.settle(time.Minute, best("ab"))
		gr.fresh()
		lun := gr.luns[0]
		n := gr.nodes[map[string]int{"a": 0, "b": 1}[best("ab")(lun)]]
		before := gr.disk.obeyed(lun)
		n.g.Unit(lun).Reopen()
		time.Sleep(2 * time.Second)
		gr.settle(time.Second, best("ab"))
		gr.longest(1500 * time.Millisecond)
		if after := gr.disk.obeyed(lun); len(after) != 1 || slices.Equal(before, after) {
			gr.Errorf("the disk obeys %v, and before %v", after, before)
		}
	})
}

// LUNs come and go with the configurations of the gateways. One that only some gateways have is served by these.
func TestAddRemove(t *testing.T) {
	bubble(t, 3, 9, nil, func(gr *group) {
		gr.settle(time.Minute, best("abc"))
		gr.fresh()
		lun := gr.luns[slices.IndexFunc(gr.luns, func(lun string) bool { return best("abc")(lun) == "a" })]
		a := gr.nodes[0].g
		ctx, cancel := context.WithTimeout(gr.Context(), time.Second)
		defer cancel()
		gr.nodes[0].link.Cut(true) // the lease lasts longer
		if err := a.Remove(ctx, lun); err == nil {
			gr.Error("Remove without a home succeeds")
		}
		gr.nodes[0].link.Cut(false)
		time.Sleep(time.Minute)
		gr.settle(time.Second, best("abc"))
		gr.longest(0) // it kept its part
		if err := a.Remove(gr.Context(), lun); err != nil {
			gr.Fatal(err)
		}
		want := func(l string) string {
			if l == lun {
				return best("bc")(l)
			}
			return best("abc")(l)
		}
		gr.settle(2*time.Second, want)
		gr.longest(1500 * time.Millisecond)
		if a.Unit(lun) != nil || a.Owner(lun) != best("bc")(lun) {
			gr.Errorf("after Remove, the unit is %v, and the owner %q", a.Unit(lun), a.Owner(lun))
		}
		gr.fresh()
		time.Sleep(3 * time.Minute)
		gr.settle(time.Second, want)
		gr.longest(0) // nobody gave it back to a gateway without it
		if _, err := a.Add(lun); err != nil {
			gr.Fatal(err)
		}
		if _, err := a.Add(lun); err == nil {
			gr.Error("Add twice succeeds")
		}
		gr.settle(time.Minute, best("abc"))
		gr.longest(1500 * time.Millisecond)
	})
}

// Balance finds the moves after which no gateway has two LUNs more than another.
func TestBalance(t *testing.T) {
	bubble(t, 3, 31, nil, func(gr *group) {
		gr.settle(time.Minute, best("abc"))
		for _, m := range gr.nodes[0].g.Balance() {
			if m.From != best("abc")(m.LUN) || m.To == m.From {
				gr.Errorf("%+v moves a LUN of %s", m, best("abc")(m.LUN))
			}
			if err := gr.nodes[1].g.Prefer(gr.Context(), m.LUN, m.To); err != nil {
				gr.Fatal(err)
			}
		}
		time.Sleep(10 * time.Second)
		n := map[string]int{}
		for _, lun := range gr.luns {
			n[gr.nodes[0].g.Owner(lun)]++
		}
		if len(n) != 3 || n["a"]+n["b"]+n["c"] != 31 || max(n["a"], n["b"], n["c"]) != 11 {
			gr.Errorf("LUNs by gateway: %v", n)
		}
		if moves := gr.nodes[2].g.Balance(); len(moves) > 0 {
			gr.Errorf("%v are left to move", moves)
		}
	})
}

// A LUN that a gateway cannot open goes to another one, stays there, and comes back some time after it was mended. Its neighbors stay.
func TestUnable(t *testing.T) {
	bubble(t, 2, 8, nil, func(gr *group) {
		lun := gr.luns[slices.IndexFunc(gr.luns, func(lun string) bool { return best("ab")(lun) == "a" })]
		gr.kill(gr.nodes[0])
		gr.settle(time.Minute, best("b"))
		gr.disk.mu.Lock()
		gr.disk.broken["a"+lun] = true
		gr.disk.mu.Unlock()
		gr.revive(gr.nodes[0])
		want := bestBut("ab", lun, "b")
		time.Sleep(defaultFailback + 10*time.Second)
		gr.settle(10*time.Second, want)
		gr.fresh()
		time.Sleep(4 * time.Minute)
		gr.settle(time.Second, want)
		gr.longest(0)
		gr.disk.mu.Lock()
		gr.disk.broken["a"+lun] = false
		gr.disk.mu.Unlock()
		gr.settle(5*time.Minute, best("ab"))
	})
}

// A LUN whose opening has no address, so that nobody could fence it, goes to another gateway, and stays there for some time.
func TestNameless(t *testing.T) {
	bubble(t, 2, 8, nil, func(gr *group) {
		lun := gr.luns[slices.IndexFunc(gr.luns, func(lun string) bool { return best("ab")(lun) == "a" })]
		gr.disk.mu.Lock()
		gr.disk.nameless["a"+lun] = true
		gr.disk.mu.Unlock()
		want := bestBut("ab", lun, "b")
		time.Sleep(time.Minute)
		gr.settle(time.Second, want)
		gr.fresh()
		time.Sleep(3 * time.Minute)
		gr.settle(time.Second, want)
		gr.longest(0)
		gr.disk.mu.Lock()
		gr.disk.nameless["a"+lun] = false
		gr.disk.mu.Unlock()
		gr.settle(5*time.Minute, best("ab"))
	})
}

// Two gateways cannot have one name. A second one says so.
func TestSameName(t *testing.T) {
	bubble(t, 1, 1, nil, func(gr *group) {
		gr.settle(time.Minute, best("a"))
		gr.fresh()
		g, err := Join(Options{Name: "a", Home: gr.memory.Link(0), LUNs: gr.luns, Medium: gr.disk.head("a")})
		if err != nil {
			gr.Fatal(err)
		}
		defer g.Close()
		time.Sleep(20 * time.Second)
		if err := g.Err(); err == nil || !strings.Contains(err.Error(), "another gateway is called a") {
			gr.Errorf("the error is %v", err)
		}
		gr.longest(0)
	})
	for _, o := range []Options{{}, {Name: "a/b"}, {Name: "a", TTL: time.Millisecond}, {Name: "a", Margin: 4 * time.Second}, {Name: "a", LUNs: []string{"x", "x"}}, {Name: "a", LUNs: []string{""}}} {
		if g, err := Join(o); err == nil {
			g.Close()
			t.Errorf("%+v is accepted", o)
		}
	}
}

// Whatever happens to gateways, links and disks: never do two answer for a LUN, or one whose disk obeys another. When all is
// well again, each LUN is where it should be.
func TestRandom(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) { random(t, seed, 250) })
		})
	}
}

func random(t *testing.T, seed uint64, steps int) {
	gr := newGroup(t, seed, 3, 4, func(o *Options) { o.Failback = 5 * time.Second })
	defer gr.end()
	r := rand.New(rand.NewPCG(seed, 2))
	for range steps {
		n := gr.nodes[r.IntN(len(gr.nodes))]
		lun := gr.luns[r.IntN(len(gr.luns))]
		switch r.IntN(8) {
		case 0, 1:
			n.link.Cut(true)
		case 2, 3, 4:
			n.link.Cut(false)
		case 5:
			if n.dead {
				gr.revive(n)
			} else {
				gr.kill(n)
			}
		case 6:
			gr.disk.mu.Lock()
			gr.disk.broken[n.name+lun] = !gr.disk.broken[n.name+lun] && r.IntN(3) == 0
			gr.disk.mu.Unlock()
		case 7:
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_ = n.g.Prefer(ctx, lun, []string{"", "a", "b", "c"}[r.IntN(4)])
			cancel()
		}
		time.Sleep(time.Duration(r.IntN(3000)) * time.Millisecond)
	}
	gr.disk.mu.Lock()
	clear(gr.disk.broken)
	gr.disk.mu.Unlock()
	for _, n := range gr.nodes {
		if n.dead {
			gr.revive(n)
		}
		n.link.Cut(false)
	}
	for _, lun := range gr.luns {
		if err := gr.nodes[0].g.Prefer(t.Context(), lun, ""); err != nil {
			t.Fatal(err)
		}
	}
	gr.settle(10*time.Minute, best("abc"))
}

// The weights spread LUNs evenly, and a gateway that is gone moves only its own.
func TestWeight(t *testing.T) {
	const gateways, luns = 100, 10000
	n := make([]int, gateways)
	moved := 0
	for lun := range luns {
		first, second := -1, -1
		for i := range gateways {
			w := func(i int) uint64 { return weight(hash(fmt.Sprint("gw", i)), hash(fmt.Sprint("naa.", lun))) }
			switch {
			case first < 0 || w(i) > w(first):
				first, second = i, first
			case second < 0 || w(i) > w(second):
				second = i
			}
		}
		n[first]++
		if first == 7 {
			moved++
		}
	}
	if slices.Min(n) < 60 || slices.Max(n) > 140 || moved != n[7] {
		t.Errorf("LUNs per gateway: %d to %d, want about 100", slices.Min(n), slices.Max(n))
	}
}
