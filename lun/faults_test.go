package lun

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/tests/testkit"
)

// waits makes a store one that waits for a device.
func waits(i *backend.Info) { i.Nonblocking = false }

// withFaults injects faults for a minute, unless f says for how long.
func (r *rig) withFaults(f Faults) {
	r.t.Helper()
	if f.For == 0 {
		f.For = time.Minute
	}
	if err := r.unit.SetFaults(f); err != nil {
		r.t.Fatal(err)
	}
}

// READ (10), WRITE (10) and WRITE (10) with FUA of block 1, and SYNCHRONIZE CACHE (10).
const (
	faultyRead  = "28 00 00000001 00 0001 00"
	faultyWrite = "2a 00 00000001 00 0001 00"
	faultyFUA   = "2a 08 00000001 00 0001 00"
	faultySync  = "35 00 00000000 00 0000 00"
)

// Injected errors have the sense data of a store that fails, or the chosen one. The medium does not
// change, and the next command after the faults finds everything well.
func TestFaultErrors(t *testing.T) {
	block := bytes.Repeat([]byte{7}, 512)
	for _, tt := range []struct {
		name    string
		f       Faults
		cdb     string
		out     []byte
		k, a, q byte
	}{
		{"read", Faults{ReadError: 1}, faultyRead, nil, 3, 0x11, 0},
		{"write", Faults{WriteError: 1}, faultyWrite, block, 3, 0x0c, 0},
		{"sync", Faults{SyncError: 1}, faultySync, nil, 3, 0x0c, 0},
		{"durable write, as a write", Faults{WriteError: 1}, faultyFUA, block, 3, 0x0c, 0},
		{"durable write, as a sync", Faults{SyncError: 1}, faultyFUA, block, 3, 0x0c, 0},
		{"chosen sense of a read", Faults{ReadError: 1, Sense: Sense{4, 0x44, 1}}, faultyRead, nil, 4, 0x44, 1},
		{"chosen sense of a write", Faults{WriteError: 1, Sense: Sense{0xb, 0x47, 3}}, faultyWrite, block, 0xb, 0x47, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, setup{info: volatile})
			r.withFaults(tt.f)
			wantSense(t, r.run(tt.cdb, tt.out), tt.k, tt.a, tt.q)
			if s := r.unit.Faults(); s == nil || s.Injected != 1 {
				t.Errorf("%+v, want 1 injected fault", s)
			}
			if !r.unit.ClearFaults() || r.unit.Faults() != nil || r.unit.ClearFaults() {
				t.Error("the faults were not cleared, or twice")
			}
			if in := r.good(faultyRead, nil); !bytes.Equal(in, make([]byte, 512)) {
				t.Error("the medium has changed")
			}
			r.good(tt.cdb, tt.out)
		})
	}
}

// The same seed hits the same calls of each kind, whatever calls of other kinds are between them.
func TestFaultsAreRepeatable(t *testing.T) {
	hits := func(seed uint64, between string) (list []bool) {
		r := newRig(t, setup{info: volatile})
		r.withFaults(Faults{Seed: seed, ReadError: 0.5})
		for range 64 {
			if between != "" {
				r.good(between, nil)
			}
			list = append(list, r.run(faultyRead, nil).status != StatusGood)
		}
		return list
	}
	first := hits(1, "")
	if n := len(slices.DeleteFunc(slices.Clone(first), func(hit bool) bool { return !hit })); n < 16 || n > 48 {
		t.Errorf("%d of 64 reads failed, with probability 0.5", n)
	}
	if !slices.Equal(first, hits(1, "")) || !slices.Equal(first, hits(1, faultySync)) {
		t.Error("the same seed hits other reads")
	}
	if slices.Equal(first, hits(2, "")) {
		t.Error("another seed hits the same reads")
	}
}

// A call that hangs is executed when the faults end: by ClearFaults, by time, or with the unit.
func TestFaultHang(t *testing.T) {
	for name, tt := range map[string]struct {
		end   func(*rig)
		after time.Duration
	}{
		"cleared":  {func(r *rig) { time.Sleep(time.Second); r.unit.ClearFaults() }, time.Second},
		"its time": {func(*rig) {}, 3 * time.Second},
		"replaced": {func(r *rig) { r.withFaults(Faults{ReadError: 1}) }, 0},
		"detached": {func(r *rig) { r.unit.Detach() }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.Bubble(t, func(t *testing.T) {
				r := newRig(t, setup{info: waits})
				r.withFaults(Faults{Hang: 1, For: 3 * time.Second})
				begun := time.Now()
				done := make(chan result)
				go func() { done <- r.run(faultyRead, nil) }()
				synctest.Wait()
				select {
				case res := <-done:
					t.Fatalf("a READ did not hang: %+v", res)
				default:
				}
				if n := r.unit.StoreCalls().UnderWay; n != 1 {
					t.Errorf("%d calls are under way, want that of the READ", n)
				}
				tt.end(r)
				res := <-done
				if took := time.Since(begun); took != tt.after {
					t.Errorf("the READ took %v, want %v", took, tt.after)
				}
				wantGood(t, "READ", res)
				r.unit.ClearFaults()
			})
		})
	}
}

func TestFaultLatency(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		r := newRig(t, setup{info: waits})
		r.withFaults(Faults{Latency: 100 * time.Millisecond})
		begun := time.Now()
		for range 10 {
			r.good(faultyRead, nil)
		}
		if took := time.Since(begun); took < 100*time.Millisecond || took > time.Second {
			t.Errorf("10 READs took %v, with up to 100ms each", took)
		}
	})
}

func TestFaultsAreChecked(t *testing.T) {
	r := newRig(t, setup{})
	for want, f := range map[string]Faults{
		"read_error: 1.5":     {ReadError: 1.5, For: 1},
		"write_error: -1":     {WriteError: -1, For: 1},
		"sync_error: 2":       {SyncError: 2, For: 1},
		"hang: 2":             {Hang: 2, For: 1},
		"latency: -1ns":       {Latency: -1, For: 1},
		"latency: 2m0s":       {Latency: 2 * time.Minute, For: 1},
		"nothing to inject":   {For: 1},
		"for: 0s":             {ReadError: 1},
		"for: 2h0m0s":         {ReadError: 1, For: 2 * time.Hour},
		"sense: key 0x0":      {ReadError: 1, For: 1, Sense: Sense{0, 1, 1}},
		"sense: key 0x10":     {ReadError: 1, For: 1, Sense: Sense{0x10, 1, 1}},
		"the backend memory ": {Hang: 1, For: 1},
	} {
		if err := r.unit.SetFaults(f); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", f, err, want)
		}
	}
	if r.unit.Faults() != nil {
		t.Error("refused faults are in force")
	}
}

// Without faults a call of the store costs one load.
func TestNoFaultsNoAllocations(t *testing.T) {
	r := newRig(t, setup{})
	if n := testing.AllocsPerRun(1000, func() {
		if err := r.unit.fault(faultRead); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A sync that no command asked for, as of a reset or of the end of the process, meets no injected
// faults: their failure is not final, and nobody would be told.
func TestFaultsSpareTheSyncsOfTheTarget(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		r := newRig(t, setup{info: waits})
		for _, f := range []Faults{{SyncError: 1}, {Hang: 1}, {Latency: time.Second}} {
			r.withFaults(f)
			begun := time.Now()
			if err := r.unit.Sync(); err != nil || time.Since(begun) != 0 {
				t.Errorf("%+v: Sync: %v after %v", f, err, time.Since(begun))
			}
			if s := r.unit.Faults(); s == nil || s.Injected != 0 {
				t.Errorf("%+v: %+v, want nothing injected", f, s)
			}
		}
		r.unit.ClearFaults()
	})
}

// A unit that ends takes no more faults: its end waits for commands that hang. Faults that come at the
// same time end with it.
func TestNoFaultsAtTheEnd(t *testing.T) {
	for name, end := range map[string]func(*Unit){
		"closed":   func(u *Unit) { u.Close() },
		"detached": func(u *Unit) { u.Detach() },
	} {
		t.Run(name, func(t *testing.T) {
			hang := Faults{Hang: 1, For: time.Minute}
			r := newRig(t, setup{info: waits})
			end(r.unit)
			if err := r.unit.SetFaults(hang); !errors.Is(err, backend.ErrClosed) || r.unit.Faults() != nil {
				t.Errorf("SetFaults: %v, with the faults %+v", err, r.unit.Faults())
			}
			for range 200 {
				r := newRig(t, setup{info: waits})
				set := make(chan struct{})
				go func() {
					defer close(set)
					r.unit.SetFaults(hang)
				}()
				end(r.unit)
				<-set
				if f := r.unit.Faults(); f != nil {
					t.Fatalf("%+v is in force", f)
				}
			}
		})
	}
}

// Faults end also if their time is over before they are in force, on a machine that is busy.
func TestShortFaultsEnd(t *testing.T) {
	r := newRig(t, setup{info: waits})
	for range 20000 {
		r.withFaults(Faults{ReadError: 1, For: time.Nanosecond})
		if r.unit.Faults() != nil {
			testkit.Eventually(t, "the faults end", func() bool { return r.unit.Faults() == nil })
		}
	}
}
