package crash

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/faults"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A lossy is a way to the target that disturbs what passes.
type lossy struct {
	addr string
	log  testkit.Log
}

// disturb starts a proxy that lives until the test ends.
func disturb(t *testing.T, to string, o faults.Options) *lossy {
	t.Helper()
	way := &lossy{}
	o.To, o.Log = to, func(line string) { fmt.Fprintln(&way.log, line) }
	p, err := faults.New(o)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	way.addr = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- p.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return way
}

// login logs in over a transport: iser with CRCs, tcp with digests, or bare, which is TCP without them.
func login(limit time.Duration, transport, addr, name string) (port, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if transport == "iser" {
		return loginISER(ctx, addr, name, store)
	}
	return loginTCP(ctx, addr, name, store, transport != "bare")
}

// aborted reports whether a command ended with ABORTED COMMAND, as one whose data was damaged on its
// way does. What is on the medium is then unknown.
func aborted(err error) bool {
	const abortedCommand = 0x0b
	var r *refusal
	return errors.As(err, &r) && r.status == 2 && len(r.sense) > 2 && r.sense[2]&0x0f == abortedCommand
}

// TestFaults runs verified I/O over connections that lose, damage, delay and cut PDUs and FPDUs, with
// digests and CRCs. Connections may end. No data is wrong, and a neighbour with a connection of its own
// notices nothing.
func TestFaults(t *testing.T) {
	rounds, seed := max(variable(t, "CRASH_ROUNDS", 5)/10, 3), variable(t, "CRASH_SEED", uint64(time.Now().UnixNano()))
	t.Logf("CRASH_SEED=%d", seed)
	w := newWorld(t)
	var n, beside counts
	end := make(chan struct{})
	var neighbour sync.WaitGroup
	p, err := login(testkit.Patience, "tcp", w.Listen()[0], overTCP)
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint64(4) {
		rng := rand.New(rand.NewPCG(seed, i))
		neighbour.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
				}
				if _, err := w.disks[2].step(p, rng, &beside); err != nil {
					t.Errorf("the neighbour: %v", err)
					return
				}
			}
		})
	}
	for _, tt := range []struct {
		name, says string
		o          faults.Options
	}{
		{"iser drop", ": dropped", faults.Options{Drop: 0.005}},
		{"iser corrupt", " changed", faults.Options{Corrupt: 0.005}},
		{"iser cut", ": cut after", faults.Options{Cut: 0.005}},
		{"iser withhold", ": withheld", faults.Options{Withhold: 0.02}},
		{"iser delay", ": delayed by", faults.Options{Delayed: 0.01, Delay: 10 * time.Millisecond}},
		{"tcp drop", ": dropped", faults.Options{Drop: 0.005}},
		{"tcp corrupt", " changed", faults.Options{Corrupt: 0.005}},
		{"tcp cut", ": cut after", faults.Options{Cut: 0.005}},
		{"tcp delay", ": delayed by", faults.Options{Delayed: 0.01, Delay: 10 * time.Millisecond}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			transport, _, _ := strings.Cut(tt.name, " ")
			tt.o.Seed = seed
			way := disturb(t, w.Listen()[0], tt.o)
			before := beside.acknowledged.Load()
			for round := uint64(0); round < rounds || !strings.Contains(way.log.String(), tt.says); round++ {
				if wrong := w.underFaults(t, transport, way.addr, seed+round, &n); len(wrong) > 0 {
					t.Fatalf("round %d: %q; CRASH_SEED=%d\n%s", round, wrong[:min(len(wrong), 10)], seed, way.log.String())
				}
			}
			testkit.Eventually(t, "an answer to the neighbour", func() bool { return beside.acknowledged.Load() > before || t.Failed() })
		})
	}
	close(end)
	neighbour.Wait()
	faults, err := w.disks[2].readAll(p)
	if err != nil || len(faults) > 0 {
		t.Errorf("the neighbour: %q, %v", faults, err)
	}
	testkit.Eventually(t, "no session but that of the neighbour", func() bool {
		list, err := w.api.Sessions(t.Context())
		return err == nil && len(list) == 1
	})
	p.Close()
	t.Logf("acknowledged: %d writes, %d syncs; verified: %d reads; unanswered: %d writes; neighbour: %d writes, %d reads",
		n.acknowledged.Load(), n.syncs.Load(), n.reads.Load(), n.unanswered.Load(), beside.acknowledged.Load(), beside.reads.Load())
}

// TestFaultsFindsWrongData shows that the check sees data that is wrong: without digests, nobody else
// notices a bit that changes on the way.
func TestFaultsFindsWrongData(t *testing.T) {
	w := newWorld(t)
	var n counts
	way := disturb(t, w.Listen()[0], faults.Options{Seed: 1, Corrupt: 0.01})
	for seed := uint64(0); seed < 100; seed++ {
		for _, wrong := range w.underFaults(t, "bare", way.addr, seed, &n) {
			if strings.Contains(wrong, "is torn") || strings.Contains(wrong, "holds version") {
				return
			}
		}
	}
	t.Errorf("all data is right, but the proxy changed some:\n%s", way.log.String())
}

// underFaults runs load over a connection until it ends or its time is over, and then checks all
// blocks over one that nothing disturbs. The login of that ends the session before, with all its
// commands. It returns what is wrong.
func (w *world) underFaults(t *testing.T, transport, addr string, seed uint64, n *counts) (wrong []string) {
	t.Helper()
	const name, span = "iqn.2026-11.io.example:host-victim", 150 * time.Millisecond
	if p, err := login(time.Second, transport, addr, name); err == nil { // a part of the login may be lost
		var over atomic.Bool
		clock := time.AfterFunc(span, func() {
			over.Store(true)
			p.Close()
		})
		var wg sync.WaitGroup
		var mu sync.Mutex
		for i := range uint64(depth) {
			rng := rand.New(rand.NewPCG(seed, i))
			wg.Go(func() {
				for !over.Load() {
					lost, err := w.disks[rng.IntN(2)].step(p, rng, n)
					switch {
					case err == nil, aborted(err):
					case lost:
						return
					default:
						mu.Lock()
						wrong = append(wrong, err.Error())
						mu.Unlock()
						return
					}
				}
			})
		}
		wg.Wait()
		clock.Stop()
		p.Close()
	}
	p, err := login(testkit.Patience, transport, w.Listen()[0], name)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for _, d := range w.disks[:2] {
		more, err := d.readAll(p)
		if err != nil {
			t.Fatal(err)
		}
		wrong = append(wrong, more...)
	}
	return wrong
}
