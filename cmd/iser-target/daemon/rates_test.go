package daemon

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A reader reads LUN 0 with 16 commands at a time until the test ends, and counts what ended.
// Anything but status GOOD is an error.
type reader struct{ done atomic.Int64 }

func (l *lab) reads(s *initiator.Session, blocks int) *reader {
	l.t.Helper()
	attentions(l.t, s, 0)
	r := &reader{}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		var queue []*initiator.Command
		for range 16 {
			queue = append(queue, &initiator.Command{CDB: cdb.Read16(0, uint32(blocks)), In: make([]byte, 512*blocks)})
		}
		for i, c := range queue {
			if err := s.Start(c); err != nil {
				l.t.Errorf("command %d: %v", i, err)
				return
			}
		}
		for i := 0; ; i = (i + 1) % len(queue) {
			c := queue[i]
			if err := c.Wait(); err != nil || outcome(c) != "" {
				l.t.Errorf("a reader: %v, %s", err, outcome(c))
				return
			}
			r.done.Add(1)
			select {
			case <-stop:
				for _, c := range slices.Concat(queue[i+1:], queue[:i]) {
					c.Wait()
				}
				return
			default:
			}
			if err := s.Start(c); err != nil {
				l.t.Errorf("a reader: %v", err)
				return
			}
		}
	})
	l.t.Cleanup(func() {
		close(stop)
		wg.Wait()
	})
	testkit.Eventually(l.t, "the first command of a reader", func() bool { return r.done.Load() > 0 })
	return r
}

// A limited initiator never gets more than 5 % above its rate, by the clock of the process. Its neighbour
// on the same LUN is not limited. A change takes effect at once, and no command fails.
func TestRateLimitsOneInitiatorAndNotItsNeighbour(t *testing.T) {
	const iops, window = 400, 3 * time.Second
	l := newLab(t, func(l *lab) {
		l.luns = fmt.Sprintf("{id: 0, backend: memory, size: 4MiB, rates: [{initiators: [%slimited], iops: %d}]}", prefix, iops)
	})
	limited, free := l.reads(l.login("limited", store), 1), l.reads(l.login("free", store), 1)
	measure := func(d time.Duration) (n, others, seconds float64) {
		begin, before, otherBefore := time.Now(), limited.done.Load(), free.done.Load()
		time.Sleep(d)
		n, others = float64(limited.done.Load()-before), float64(free.done.Load()-otherBefore)
		return n, others, time.Since(begin).Seconds()
	}
	if n := l.State().Targets[0].LUNs[0].Waiting; n == 0 {
		t.Error("the state says that no command waits")
	}
	n, others, seconds := measure(window)
	t.Logf("%.0f commands/s of %d, the neighbour %.0f", n/seconds, iops, others/seconds)
	if n > 1.05*iops*seconds {
		t.Errorf("the limited initiator got %.1f commands/s, want at most %d", n/seconds, iops)
	}
	if n == 0 || others < 2*n {
		t.Errorf("the neighbour got %.0f commands, the limited initiator %.0f", others, n)
	}

	set := func(key, value string) {
		t.Helper()
		edit := func(d *config.Document) error { return d.SetLUN(store, 0, key, value) }
		p, err := l.Change(t.Context(), edit, ChangeOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(p.Steps) != 1 || !p.Steps[0].Done || p.Steps[0].Disruptive {
			t.Errorf("plan %+v", p)
		}
	}
	set("rates", "")
	before := limited.done.Load()
	testkit.Eventually(t, "without a rate it becomes fast", func() bool { return limited.done.Load() > before+4*iops })
	set("iops", fmt.Sprint(iops))   // of both together
	measure(500 * time.Millisecond) // commands that were let in before
	if n, others, seconds := measure(window); n+others > 1.05*iops*seconds || n+others == 0 {
		t.Errorf("both got %.1f commands/s, want at most %d", (n+others)/seconds, iops)
	}
}

// A bandwidth limit counts bytes of READ commands, whatever their size.
func TestBandwidthIsLimited(t *testing.T) {
	const mib, window = 4, 3 * time.Second
	l := newLab(t, func(l *lab) { l.luns = fmt.Sprintf("{id: 0, backend: memory, size: 4MiB, bandwidth: %dMiB}", mib) })
	r := l.reads(l.login("a", store), 64) // 32 KiB
	begin, before := time.Now(), r.done.Load()
	time.Sleep(window)
	got := float64(r.done.Load()-before) * 32 / 1024 / time.Since(begin).Seconds()
	t.Logf("%.2f MiB/s of %d", got, mib)
	if got > 1.05*mib || got == 0 {
		t.Errorf("%.2f MiB/s, want at most %d", got, mib)
	}
}

// A change of rates neither reopens the LUN nor ends a session, is shown, and is undone if the change fails.
func TestRatesChangeInPlaceAndAreUndone(t *testing.T) {
	l := newLab(t)
	load(t, l.login("a", store))
	unit := l.served.targets[0].luns[0].unit
	change := func(edit func(*config.Document) error) error {
		_, err := l.Change(t.Context(), edit, ChangeOptions{})
		return err
	}
	if err := change(func(d *config.Document) error {
		d.SetLUN(store, 0, "bandwidth", "100MiB")
		d.SetLUN(store, 0, "burst", "2s")
		return d.SetLUN(store, 0, "rates", `[{initiators: ["*"], iops: 5000, min_iops: 7}]`)
	}); err != nil {
		t.Fatal(err)
	}
	check := func() {
		t.Helper()
		s := l.State().Targets[0].LUNs[0]
		if s.RateState != (schema.RateState{Bandwidth: 100 << 20, Burst: 2}) || len(s.Rates) != 1 ||
			s.Rates[0].RateState != (schema.RateState{IOPS: 5000, MinIOPS: 7}) {
			t.Errorf("state %+v, %+v", s.RateState, s.Rates)
		}
		if l.served.targets[0].luns[0].unit != unit {
			t.Error("the LUN was reopened")
		}
	}
	check()
	l.before = func(what string) error {
		if what == "paths" {
			return os.ErrInvalid
		}
		return nil
	}
	if err := change(func(d *config.Document) error { return d.SetLUN(store, 0, "iops", "5") }); err == nil {
		t.Fatal("the change did not fail")
	}
	check()
}
