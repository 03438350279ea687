package lun

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/lun/fair"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/testkit"
)

// blocking makes a store one whose calls can wait for a device.
func blocking(i *backend.Info) { i.Nonblocking = false }

// StoreCalls shows the calls that have not returned, and for how long the oldest one is under way.
func TestStoreCallsShowsWhatHangs(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		r := newRig(t, setup{info: blocking})
		if s := r.unit.StoreCalls(); s != (StoreCalls{}) {
			t.Errorf("without commands: %+v", s)
		}
		gate := r.store.Shut()
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { newTransfer(opRead16, 0, 0, 4096).run(r.nexus, 4096) })
			time.Sleep(2 * time.Second)
		}
		synctest.Wait()
		if s := r.unit.StoreCalls(); s.UnderWay != 3 || s.Oldest < 5900*time.Millisecond || s.Oldest > 6*time.Second {
			t.Errorf("three READs hang, the first one for 6s: %+v", s)
		}
		gate.Open()
		wg.Wait()
		if s := r.unit.StoreCalls(); s != (StoreCalls{}) {
			t.Errorf("after the store has answered: %+v", s)
		}
	})
}

// another returns a nexus of another initiator.
func (r *rig) another(name string) *Nexus {
	r.t.Helper()
	p := testPort
	p.InitiatorName = "iqn.2026-11.io.example:" + name
	n := r.inv.NewNexus(p)
	var c Command
	for _, l := range n.list() {
		wantSense(r.t, do(n, &c, EncodeLUN(l.id), "00 0000 00 00 00", nil, all), 0x6, 0x29, 0x00)
	}
	return n
}

// A store that hangs has at most as many calls under way as the bound allows, and as many threads. Its
// other commands can be aborted, and another LUN of the process answers as before.
func TestStoreThatHangsKeepsItsBound(t *testing.T) {
	set := limits.New()
	set.BackendCalls.SetMax(64)
	set.BackendCallsPerLUN.SetMax(16)
	opt := Options{Calls: fair.NewProcess(set)}
	hangs := newRig(t, setup{info: blocking, opt: opt})
	answers := newRig(t, setup{info: blocking, opt: opt})
	gate := hangs.store.Shut()
	defer gate.Open()
	var wg sync.WaitGroup
	var abort atomic.Bool
	commands := make([]*transfer, 1000)
	for i := range commands {
		x := newTransfer(opRead16, 0, 0, 4096)
		x.c.Abort = &abort
		commands[i] = x
		wg.Go(func() { x.run(hangs.nexus, 4096) })
	}
	for range 16 {
		<-gate.Entered
	}
	testkit.Eventually(t, "the other commands wait", func() bool {
		s := hangs.unit.StoreCalls()
		return s.UnderWay == 16 && s.Waiting == 984
	})
	for range 100 {
		if !newTransfer(opRead16, 0, 0, 4096).run(answers.nexus, 4096) {
			t.Fatal("a READ of another LUN has failed")
		}
	}
	if n := hangs.store.Calls(backendtest.ReadAt); n != 16 {
		t.Errorf("%d calls reached the store that hangs, want 16", n)
	}
	abort.Store(true)
	for _, x := range commands {
		x.c.Cancel()
	}
	testkit.Eventually(t, "the other commands end", func() bool { return hangs.unit.StoreCalls().Waiting == 0 })
	gate.Open()
	wg.Wait()
	if s := hangs.unit.StoreCalls(); s.UnderWay != 0 || s.Waiting != 0 {
		t.Errorf("afterwards: %+v", s)
	}
}

// Closing a store that hangs ends the commands that wait for their turn.
func TestCloseEndsWaits(t *testing.T) {
	set := limits.New()
	set.BackendCallsPerLUN.SetMax(1)
	r := newRig(t, setup{info: blocking, opt: Options{Calls: fair.NewProcess(set)}})
	gate := r.store.Shut()
	defer gate.Open()
	first := make(chan bool)
	go func() { first <- newTransfer(opRead16, 0, 0, 4096).run(r.nexus, 4096) }()
	<-gate.Entered
	second := newTransfer(opRead16, 0, 0, 4096)
	ended := make(chan bool)
	go func() { ended <- second.run(r.nexus, 4096) }()
	testkit.Eventually(t, "the second READ waits", func() bool { return r.unit.StoreCalls().Waiting == 1 })
	r.unit.CutOff()
	r.store.Hook(func(op backendtest.Op, _, _ int64) error { return nil })
	go r.unit.Close()
	if <-ended {
		t.Error("the second READ ended with GOOD")
	}
	wantSense(t, result{status: second.c.Status, sense: second.c.Sense()}, 0x5, 0x25, 0x00)
	gate.Open()
	<-first
}

// A rate of an initiator holds for what it sends, and not for others or other LUNs.
func TestRatesOfInitiators(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		r := newRig(t, setup{})
		slow, fast := r.another("slow"), r.another("fast")
		r.unit.SetRates(fair.Rates{}, func(who string) fair.Rates {
			if who == "iqn.2026-11.io.example:slow" {
				return fair.Rates{IOPS: 100, Bandwidth: 1 << 20}
			}
			return fair.Rates{}
		})
		began := time.Now()
		for range 200 {
			newTransfer(opRead16, 0, 0, 4096).run(slow, 4096)
		}
		if took := time.Since(began); took < 1970*time.Millisecond || took > 2*time.Second {
			t.Errorf("200 READs at 100 a second took %v", took)
		}
		began = time.Now()
		for range 8 {
			newTransfer(opWrite16, 0, 0, 512<<10).run(slow, 64<<10)
		}
		if took := time.Since(began); took < 3900*time.Millisecond || took > 4100*time.Millisecond {
			t.Errorf("4 MiB at 1 MiB a second took %v", took)
		}
		began = time.Now()
		for range 200 {
			newTransfer(opRead16, 0, 0, 4096).run(fast, 4096)
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("the READs of another initiator took %v", took)
		}
	})
}

// Commands that are heavy run a few at a time, in short steps. Their initiator's other commands, and
// those of others, pass them.
func TestHeavyCommandsTakeFewPlaces(t *testing.T) {
	unmap := unhex("0016 0010 00000000  0000000000000000 00010000 00000000")
	for _, s := range []struct {
		name, cdb string
		out       []byte
	}{
		{"WRITE SAME of zeros", extentCDB(0x93, 0, 0, 65535), make([]byte, 512)},
		{"WRITE SAME", extentCDB(0x93, 0, 0, 65535), pattern(512, 1)},
		{"VERIFY", extentCDB(0x8f, 0, 0, 65535), nil},
		{"VERIFY with BYTCHK 11b", extentCDB(0x8f, 6, 65536, 65535), make([]byte, 512)},
		{"UNMAP", "42 00 00000000 00 0018 00", unmap},
		{"EXTENDED COPY", "", unhex(copyList(0, 3, []string{cscdZero}, []string{blocks(0, 0, 65535, 0, 65536)}))},
	} {
		t.Run(s.name, func(t *testing.T) {
			if s.cdb == "" {
				s.cdb = fmt.Sprintf("83 00 0000000000000000 %08x 00 00", len(s.out))
			}
			testkit.Bubble(t, func(t *testing.T) { fewPlaces(t, s.cdb, s.out) })
		})
	}
}

// fewPlaces runs 32 of a heavy command where there are two places.
func fewPlaces(t *testing.T, cdb string, out []byte) {
	set := limits.New()
	set.HeavyCommands.SetMax(2)
	r := newRig(t, setup{size: 64 << 20, opt: Options{Calls: fair.NewProcess(set)}})
	attacker, honest := r.another("attacker"), r.another("honest")
	var inside atomic.Int64
	free := make(chan struct{})
	r.store.Hook(func(_ backendtest.Op, off, n int64) error {
		if off == 65528*512 {
			return nil // a READ
		}
		if n > 1<<20 {
			t.Errorf("a step of %d bytes", n)
		}
		inside.Add(1)
		defer inside.Add(-1)
		<-free
		return nil
	})
	var abort atomic.Bool
	var wg sync.WaitGroup
	commands := make([]Command, 32)
	for i := range commands {
		commands[i].Abort = &abort
		wg.Go(func() { do(attacker, &commands[i], [8]byte{}, cdb, out, all) })
	}
	synctest.Wait()
	if n := inside.Load(); n != 2 {
		t.Errorf("%d steps at a time, want 2", n)
	}
	for _, n := range []*Nexus{honest, attacker} {
		if !newTransfer(opRead16, 0, 65528, 4096).run(n, 4096) {
			t.Error("a READ next to them has failed")
		}
	}
	abort.Store(true)
	for i := range commands {
		commands[i].Cancel()
	}
	close(free)
	wg.Wait()
}
