package lun

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/backend"
)

// blocking makes a store one whose calls can wait for a device.
func blocking(i *backend.Info) { i.Nonblocking = false }

// StoreCalls shows the calls that have not returned, and for how long the oldest one is under way.
func TestStoreCallsShowsWhatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, setup{info: blocking})
		if s := r.unit.StoreCalls(); s != (StoreCalls{}) {
			t.Errorf("without commands: %+v", s)
		}
		gate := r.store.Shut()
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { newTransfer(0x88, 0, 0, 4096).run(r.nexus, 4096) })
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
