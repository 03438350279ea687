package lun

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
)

// Faults say what goes wrong between the commands of a unit and its store, to test initiators.
// Probabilities are from 0 to 1, for each call of the store. The same Seed decides the same for the
// first, second, third read, and so on; likewise for writes and syncs.
type Faults struct {
	Seed       uint64
	ReadError  float64       // a read fails
	WriteError float64       // a write, a discard or a zeroing fails; the medium does not change
	SyncError  float64       // a sync, or a durable write, fails; unlike that of a store, its failure is not final
	Hang       float64       // a call hangs until the faults end, and is executed then
	Latency    time.Duration // a call takes longer, by a random time up to this
	Sense      Sense         // of the errors; the zero value: as of a store that fails
	For        time.Duration // when the faults end without ClearFaults
}

// MaxFaultTime is the longest Faults.For.
const MaxFaultTime = time.Hour

// errNotFaulty is the error of faults that a store cannot have.
var errNotFaulty = errors.New("the backend memory does not wait for a device, so that it cannot hang or be slow")

// check returns what is wrong with f.
func (f *Faults) check() error {
	any := false
	for _, p := range []struct {
		name string
		p    float64
	}{{"read_error", f.ReadError}, {"write_error", f.WriteError}, {"sync_error", f.SyncError}, {"hang", f.Hang}} {
		if !(p.p >= 0 && p.p <= 1) {
			return fmt.Errorf("%s: %v: a probability is a number from 0 to 1", p.name, p.p)
		}
		any = any || p.p > 0
	}
	switch {
	case f.Latency < 0 || f.Latency > time.Minute:
		return fmt.Errorf("latency: %v: must be from 0 to 1m", f.Latency)
	case !any && f.Latency == 0:
		return errors.New("nothing to inject: give read_error, write_error, sync_error, hang or latency")
	case f.For <= 0 || f.For > MaxFaultTime:
		return fmt.Errorf("for: %v: must be more than 0, and at most %v", f.For, MaxFaultTime)
	case f.Sense != Sense{} && (f.Sense.Key == keyNoSense || f.Sense.Key > 0x0f):
		return fmt.Errorf("sense: key %#x: must be from 1 to 0xf", f.Sense.Key)
	}
	return nil
}

// A FaultsState describes faults that are being injected.
type FaultsState struct {
	Faults
	Until    time.Time
	Injected uint64 // errors and hangs so far
}

// injected are the faults of a unit.
type injected struct {
	Faults
	until time.Time
	timer *time.Timer
	over  chan struct{} // closed when the faults end
	calls [faultKinds]atomic.Uint64
	count atomic.Uint64
}

// A faultKind is a kind of calls, which are counted separately.
type faultKind uint8

const (
	faultRead faultKind = iota
	faultWrite
	faultSync
	faultKinds
)

// An injectedError is the error of a call that was made to fail.
type injectedError struct{ sense Sense }

// Error implements error.
func (e *injectedError) Error() string { return "injected fault" }

// injectedSense returns the sense data of err if it was injected with some.
func injectedSense(err error) (Sense, bool) {
	var e *injectedError
	if !errors.As(err, &e) {
		return Sense{}, false
	}
	return e.sense, e.sense != Sense{}
}

// SetFaults injects faults from now on, instead of those before. They end after f.For, with
// ClearFaults, and when the unit is closed or its store detached. After that it fails with
// backend.ErrClosed.
func (u *Unit) SetFaults(f Faults) error {
	if err := f.check(); err != nil {
		return err
	}
	if u.info.Nonblocking && (f.Hang > 0 || f.Latency > 0) {
		return errNotFaulty
	}
	next := &injected{Faults: f, until: time.Now().Add(f.For), over: make(chan struct{})}
	next.timer = time.AfterFunc(f.For, func() { u.endFaults(next) })
	old := u.faults.Swap(next)
	u.finishFaults(old)
	if !time.Now().Before(next.until) { // the timer may have fired before next was there
		u.endFaults(next)
	}
	if u.noFaults.Load() { // stopFaults may have looked before next was there
		u.endFaults(next)
		return backend.ErrClosed
	}
	return nil
}

// stopFaults ends all faults, those that SetFaults is about to set included: the end of the unit waits
// for commands that hang.
func (u *Unit) stopFaults() {
	u.noFaults.Store(true)
	u.ClearFaults()
}

// ClearFaults ends the injection of faults. It returns false if no faults were in force.
func (u *Unit) ClearFaults() bool {
	f := u.faults.Load()
	return f != nil && u.endFaults(f)
}

// endFaults ends f, if f is still in force.
func (u *Unit) endFaults(f *injected) bool {
	if !u.faults.CompareAndSwap(f, nil) {
		return false
	}
	u.finishFaults(f)
	return true
}

// finishFaults ends what f has begun; f may be nil.
func (u *Unit) finishFaults(f *injected) {
	if f == nil {
		return
	}
	f.timer.Stop()
	close(f.over)
	u.opt.Events(FaultsEndedEvent{Serial: u.opt.Identity.Serial, Seed: f.Seed, Injected: f.count.Load()})
}

// Faults returns the faults that are being injected, or nil.
func (u *Unit) Faults() *FaultsState {
	f := u.faults.Load()
	if f == nil {
		return nil
	}
	return &FaultsState{Faults: f.Faults, Until: f.until, Injected: f.count.Load()}
}

// before injects what it decides for a call of the store, which is made unless before returns an error.
func (f *injected) before(k faultKind) error {
	n := f.calls[k].Add(1)
	// A call always draws the same numbers, so that one option does not change what another one hits.
	rng := rand.New(rand.NewPCG(f.Seed, uint64(k)<<56|n))
	fails, hangs, latency := rng.Float64(), rng.Float64(), rng.Float64()
	if f.Latency > 0 {
		t := time.NewTimer(time.Duration(latency * float64(f.Latency)))
		defer t.Stop()
		select {
		case <-t.C:
		case <-f.over:
			return nil
		}
	}
	if hangs < f.Hang {
		f.count.Add(1)
		<-f.over
		return nil
	}
	if fails < [...]float64{f.ReadError, f.WriteError, f.SyncError}[k] {
		f.count.Add(1)
		return &injectedError{f.Sense}
	}
	return nil
}

// fault injects what the faults of the unit decide for a call.
func (u *Unit) fault(k faultKind) error {
	if f := u.faults.Load(); f != nil {
		return f.before(k)
	}
	return nil
}
