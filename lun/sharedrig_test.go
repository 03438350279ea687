package lun

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/lun/state/hometest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A sharedGroup is several gateways that share a home, each with LUN 0.
type sharedGroup struct {
	*testing.T
	memory *hometest.Memory
	all    []*sharedGateway
	ttl    time.Duration // of SharedOptions, like limit, which may change
	limit  time.Duration
}

// A sharedGateway is one of them, as a process.
type sharedGateway struct {
	*sharedGroup
	name   string
	tpgt   uint16
	link   *hometest.Link // nil: the home is another one
	shared *SharedReservations
	unit   *Unit
	inv    *Inventory
	events []Event // guarded by mu
	mu     sync.Mutex
	closed bool
}

// sharedBubble runs a test with gateways of these names on a fake clock.
func sharedBubble(t *testing.T, names string, test func(t *testing.T, gr *sharedGroup, g []*sharedGateway)) {
	sharedBubbleOf(t, 1, names, test)
}

// sharedBubbleOf does what sharedBubble does with a seed of the home.
func sharedBubbleOf(t *testing.T, seed uint64, names string, test func(t *testing.T, gr *sharedGroup, g []*sharedGateway)) {
	testkit.Bubble(t, func(t *testing.T) {
		gr := &sharedGroup{T: t, memory: hometest.NewMemory(seed), limit: 30 * time.Second}
		var list []*sharedGateway
		for i, name := range strings.Split(names, "") {
			list = append(list, gr.start(name, uint16(i+1)))
		}
		defer func() {
			for _, g := range gr.all {
				g.stop()
			}
		}()
		test(t, gr, list)
	})
}

// start starts a gateway whose port has that tag, and waits until it serves its unit.
func (gr *sharedGroup) start(name string, tpgt uint16) *sharedGateway {
	gr.Helper()
	g := gr.prepare(name, tpgt)
	g.serve()
	return g
}

// serve lets initiators use the unit.
func (g *sharedGateway) serve() {
	g.Helper()
	g.join(g.unit)
	if err := g.inv.Add(0, g.unit); err != nil {
		g.Fatal(err)
	}
}

// prepare does what start does, up to JoinShared.
func (gr *sharedGroup) prepare(name string, tpgt uint16) *sharedGateway {
	gr.Helper()
	link := gr.memory.Link(5 * time.Millisecond)
	g := gr.prepareAt(link, name, tpgt)
	g.link = link
	return g
}

// prepareAt does what prepare does with a way to the home.
func (gr *sharedGroup) prepareAt(home state.Lessor, name string, tpgt uint16) *sharedGateway {
	gr.Helper()
	g := &sharedGateway{sharedGroup: gr, name: name, tpgt: tpgt, inv: NewInventory(1, 2, 3)}
	var err error
	g.shared, err = NewSharedReservations(SharedOptions{Home: home, Gateway: name, TTL: gr.ttl, Limit: func() time.Duration { return gr.limit }})
	if err != nil {
		gr.Fatal(err)
	}
	g.unit = g.newUnit(testIdentity)
	gr.all = append(gr.all, g)
	return g
}

func (g *sharedGateway) newUnit(id state.Identity) *Unit {
	g.Helper()
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
	if err != nil {
		g.Fatal(err)
	}
	u, err := New(m, Options{Identity: id, Removable: true, Shared: g.shared, Events: func(e Event) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.events = append(g.events, e)
	}})
	if err != nil {
		g.Fatal(err)
	}
	return u
}

func (g *sharedGateway) join(u *Unit) {
	g.Helper()
	ctx, cancel := context.WithTimeout(g.Context(), time.Minute)
	defer cancel()
	if err := u.JoinShared(ctx); err != nil {
		g.Fatal(err)
	}
}

// stop ends the gateway in order.
func (g *sharedGateway) stop() {
	if g.closed {
		return
	}
	g.closed = true
	if g.link != nil {
		g.link.Cut(false)
	}
	if err := g.inv.Close(); err != nil {
		g.Error(err)
	}
	g.shared.Close()
}

// kill ends the gateway as kill -9 does: nobody hears of it.
func (g *sharedGateway) kill() {
	g.link.Cut(true)
	g.closed = true
	g.Cleanup(func() {
		g.closed = false
		g.stop()
	})
}

// enter returns a nexus of the initiator, which knows of the power on.
func (g *sharedGateway) enter(initiator string) *Nexus {
	g.Helper()
	n := g.inv.NewNexus(Port{InitiatorName: "iqn.2026-11.io.example:" + initiator, ISID: [6]byte{0, 2, 0x3d, 0, 0, 1}, TargetName: testPort.TargetName, TPGT: g.tpgt})
	for _, l := range n.list() {
		l.due.Store(0)
	}
	return n
}

// send runs a command for LUN 0.
func send(n *Nexus, cdb string, out []byte) result {
	return do(n, &Command{}, [8]byte{}, cdb, out, all)
}

// sendOut runs a PERSISTENT RESERVE OUT for LUN 0.
func sendOut(n *Nexus, sa, typ byte, key, saKey uint64) result {
	return send(n, prOutCDB(sa, typ), prList(key, saKey, 0))
}

// ok runs a PERSISTENT RESERVE OUT that has to succeed.
func (gr *sharedGroup) ok(n *Nexus, sa, typ byte, key, saKey uint64) {
	gr.Helper()
	wantGood(gr, fmt.Sprintf("service action %d", sa), sendOut(n, sa, typ, key, saKey))
}

// due returns the unit attentions that are due for LUN 0, as "2a/05 …", and takes them away.
func due(n *Nexus) string {
	var list []string
	for bits, i := n.find([8]byte{}).due.Swap(0), 0; bits != 0; bits, i = bits>>1, i+1 {
		if bits&1 != 0 {
			list = append(list, attentions[i].code())
		}
	}
	return strings.Join(list, " ")
}

func (gr *sharedGroup) wantDue(n *Nexus, want string) {
	gr.Helper()
	if got := due(n); got != want {
		gr.Errorf("for %s attentions %q are due, want %q", n.name, got, want)
	}
}

// has returns the reservations of the gateway: their type and the initiators, and * after each that holds the reservation.
func (g *sharedGateway) has() string {
	info := g.unit.Reservation()
	var list []string
	for _, r := range info.Registrations {
		name, _, _ := strings.Cut(strings.TrimPrefix(r.Initiator, "iqn.2026-11.io.example:"), ",")
		list = append(list, fmt.Sprintf("%s%d=%x%s", name, r.TargetPort, r.Key, map[bool]string{true: "*"}[r.Holder]))
	}
	slices.Sort(list)
	return strings.Join(append([]string{fmt.Sprintf("%d@%d", info.Type, info.Generation)}, list...), " ")
}

func (g *sharedGateway) want(want string) {
	g.Helper()
	if got := g.has(); got != want {
		g.Errorf("gateway %s has %s, want %s", g.name, got, want)
	}
}

// isDone reports whether a command has ended.
func (p *pending) isDone() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// beginOut begins a PERSISTENT RESERVE OUT for LUN 0.
func beginOut(n *Nexus, sa, typ byte, key, saKey uint64) *pending {
	return begin(n, 0, prOutCDB(sa, typ), prList(key, saKey, 0))
}

const (
	sharedWrite = "2a 00 00000000 00 0001 00"
	sharedRead  = "28 00 00000000 00 0001 00"
)

var sharedBlock = make([]byte, 512)
