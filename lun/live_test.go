package lun

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun/state"
)

// A unit whose store is absent says who it is and is NOT READY; the unit that takes its
// place is found there by the next command (SAM-5, section 5.14; SPC-4, section 5.6).
func TestAbsentUnit(t *testing.T) {
	r := newRig(t, setup{})
	u, err := NewAbsent(0, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	r.add(1, u)
	one := [8]byte{0, 1}
	run := func(cdb string, out []byte) result { return do(r.nexus, &r.c, one, cdb, out, all) }
	wantSense(t, run("00", nil), 0x6, 0x29, 0x00)
	wantSense(t, run("00", nil), 0x6, 0x3f, 0x0e)
	for _, cdb := range []string{
		"00", "25", "28 00 00000000 00 0001 00", "1a 00 3f 00 ff 00", "5e 00 00000000 00 0100 00", "9e10 0000000000000000 00000020 00 00", "1b 00 00 00 01 00",
		"42 00 00000000 00 0000 00", "48 03 00000000 00 0000 00", "9c 00 0000000000000000 0000 0001 00 00", // of those that not all units have
	} {
		wantSense(t, run(cdb, nil), 0x2, 0x04, 0x03) // MANUAL INTERVENTION REQUIRED
	}
	wantSense(t, run("ff", nil), 0x5, 0x20, 0x00)
	if got := run("03 00 00 00 ff 00", nil).in; got[2] != 0x2 || got[12] != 0x04 || got[13] != 0x03 {
		t.Errorf("REQUEST SENSE: % x", got)
	}
	if !u.Absent() || u.Status() != "store is absent" {
		t.Errorf("status %q", u.Status())
	}
	for _, cdb := range []string{"12 00 00 00ff 00", "12 01 80 00ff 00", "a0 00 00 000000 00000100 00 00", "03 00 00 00 ff 00"} {
		wantGood(t, cdb, run(cdb, nil))
	}
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	full, err := New(m, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	var events int
	r.nexus.OnEvent(func([8]byte, []byte) { events++ })
	if old := r.inv.Replace(1, full); old != u || r.inv.Unit(1) != full {
		t.Error("another unit was replaced")
	}
	if r.inv.Replace(2, full) != nil {
		t.Error("what is not there was replaced")
	}
	if events != 1 {
		t.Errorf("%d events", events)
	}
	wantSense(t, run("00", nil), 0x6, 0x28, 0x00) // NOT READY TO READY CHANGE, MEDIUM MAY HAVE CHANGED
	wantGood(t, "TEST UNIT READY", run("00", nil))
	wantGood(t, "WRITE(10)", run("2a 00 00000000 00 0001 00", make([]byte, 512)))
	full.raise(attentionMode, nil)
	wantSense(t, run("00", nil), 0x6, 0x2a, 0x01) // it knows the nexus, and the old one does not
	if len(u.seen) != 0 {
		t.Error("the old unit still has nexuses")
	}
}

// A unit whose store is about to be there is BECOMING READY, and so are commands that end
// because of that: initiators try again.
func TestOpeningUnit(t *testing.T) {
	r := newRig(t, setup{})
	between, err := NewOpening(512, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	late := Command{CDB: unhex("28 00 00000000 00 0001 00 000000000000")}
	if !r.nexus.Begin(&late) {
		t.Fatalf("status %#x", late.Status)
	}
	if r.inv.Replace(0, between) != r.unit {
		t.Error("another unit was replaced")
	}
	if err := r.unit.Close(); err != nil {
		t.Fatal(err)
	}
	if r.nexus.Produce(&late, make([]byte, 512), 0) {
		t.Error("READ of a closed store")
	}
	wantSense(t, result{status: late.Status, sense: late.Sense()}, 0x2, 0x04, 0x01)
	wantSense(t, r.run("00", nil), 0x6, 0x28, 0x00)
	for _, cdb := range []string{"00", "28 00 00000000 00 0001 00", "42 00 00000000 00 0000 00"} {
		wantSense(t, r.run(cdb, nil), 0x2, 0x04, 0x01)
	}
	if got := r.run("03 00 00 00 ff 00", nil).in; got[2] != 0x2 || got[12] != 0x04 || got[13] != 0x01 {
		t.Errorf("REQUEST SENSE: % x", got)
	}
	if !between.Absent() || between.Status() != "store is being opened" {
		t.Errorf("status %q", between.Status())
	}
}

// Resize gives unit and store another size, and all nexuses hear of it (SBC-3, section
// 4.7: CAPACITY DATA HAS CHANGED).
func TestResize(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk")
	for name, open := range map[string]func() (backend.Store, error){
		"memory": func() (backend.Store, error) { return backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20}) },
		"file": func() (s backend.Store, err error) {
			s, _, err = backend.OpenFile(backend.FileConfig{Path: path, Size: 1 << 20})
			return s, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := open()
			if err != nil {
				t.Fatal(err)
			}
			u, err := New(s, Options{Identity: testIdentity})
			if err != nil {
				t.Fatal(err)
			}
			r := newRig(t, setup{})
			r.add(1, u)
			run := func(cdb string, out []byte) result { return do(r.nexus, &r.c, [8]byte{0, 1}, cdb, out, all) }
			wantSense(t, run("00", nil), 0x6, 0x29, 0x00)
			wantSense(t, run("00", nil), 0x6, 0x3f, 0x0e)
			x := bytes.Repeat([]byte{'x'}, 512)
			for _, size := range []int64{200 << 20, 100 << 20, 100 << 20, 150 << 20, 1 << 20} {
				old := u.Size()
				if err := u.Resize(size); err != nil || u.Size() != size || s.Info().Size != size || u.Info().Size != size {
					t.Fatalf("Resize(%d): %v; unit %d, store %d", size, err, u.Size(), s.Info().Size)
				}
				if size != old {
					wantSense(t, run("00", nil), 0x6, 0x2a, 0x09)
				}
				last := uint64(size/512 - 1)
				res := run(extentCDB(0x28, 0, last, 1), nil)
				wantGood(t, "READ of the last block", res)
				if size > old && !bytes.Equal(res.in, make([]byte, 512)) {
					t.Errorf("what was added by Resize(%d) is not zeros", size)
				}
				wantGood(t, "WRITE of the last block", run(extentCDB(0x2a, 0, last, 1), x))
				wantSense(t, run(extentCDB(0x2a, 0, last+1, 1), x), 0x5, 0x21, 0x00)
			}
			for _, size := range []int64{0, -512, 511, 1<<20 + 1} {
				if err := u.Resize(size); err == nil || u.Size() != 1<<20 {
					t.Errorf("Resize(%d): %v; %d octets", size, err, u.Size())
				}
			}
			// A command that had begun meets the new end.
			var c Command
			c.LUN, c.CDB = [8]byte{0, 1}, append(unhex(extentCDB(0x28, 0, 2047, 1)), make([]byte, 6)...)
			if !r.nexus.Begin(&c) {
				t.Fatal("READ(10)")
			}
			if err := u.Resize(512 << 10); err != nil {
				t.Fatal(err)
			}
			if r.nexus.Produce(&c, make([]byte, 512), 0) || !bytes.Equal(c.Sense()[12:14], []byte{0x21, 0}) {
				t.Errorf("READ behind the new end: sense % x", c.Sense())
			}
		})
	}
	r := newRig(t, setup{})
	if err := r.unit.Resize(2 << 20); !errors.Is(err, backend.ErrFixedSize) {
		t.Errorf("a store without Resize: %v", err)
	}
}

// SetMask shows and hides a unit, and write protects it, while initiators are there
// (SPC-4, section 6.33).
func TestSetMask(t *testing.T) {
	r := newRig(t, setup{})
	write := func() result { return r.run("2a 00 00000000 00 0001 00", make([]byte, 512)) }
	if err := r.inv.SetMask(0, maskFor(":host", ReadOnly)); err != nil {
		t.Fatal(err)
	}
	wantSense(t, write(), 0x6, 0x2a, 0x01)
	wantSense(t, write(), 0x7, 0x27, 0x00)
	if err := r.inv.SetMask(0, maskFor(":host", NoAccess)); err != nil {
		t.Fatal(err)
	}
	wantSense(t, write(), 0x5, 0x25, 0x00)
	if r.nexus.SeesAll() || len(r.nexus.LUNs()) != 0 || len(r.unit.seen) != 0 {
		t.Errorf("it sees all: %v, LUNs %v", r.nexus.SeesAll(), r.nexus.LUNs())
	}
	if err := r.inv.SetMask(0, nil); err != nil {
		t.Fatal(err)
	}
	wantSense(t, write(), 0x6, 0x29, 0x00)
	wantSense(t, write(), 0x6, 0x3f, 0x0e)
	wantGood(t, "WRITE(10)", write())
	if !slices.Equal(r.nexus.LUNs(), []uint16{0}) {
		t.Errorf("LUNs %v", r.nexus.LUNs())
	}
	if r.inv.SetMask(7, nil) == nil {
		t.Error("mask of what is not there")
	}
}

// SetPorts changes the target ports, and initiators hear of it (SPC-4, section
// 5.11.2.1: ASYMMETRIC ACCESS STATE CHANGED).
func TestSetPorts(t *testing.T) {
	r := newRig(t, setup{})
	groups := func() int {
		res := r.run("a3 0a 00000000 00000100 00 00", nil)
		wantGood(t, "REPORT TARGET PORT GROUPS", res)
		return (len(res.in) - 4) / 12
	}
	r.inv.SetPorts(1)
	if groups() != 1 {
		t.Errorf("%d groups", groups())
	}
	r.inv.SetPorts(3, 1, 3)
	wantSense(t, r.run("00", nil), 0x6, 0x2a, 0x06)
	if groups() != 2 {
		t.Errorf("%d groups", groups())
	}
}

// ClearReservation takes away what CLEAR would, on stable storage first, and RESERVE.
func TestClearReservation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "reservations.json")
	kept, err := OpenReservations(path)
	if err != nil {
		t.Fatal(err)
	}
	defer kept.Close()
	r := newRig(t, setup{opt: Options{Reservations: kept}})
	register := make([]byte, 24)
	register[15], register[20] = 5, 1 // APTPL
	wantGood(t, "REGISTER", r.run("5f 00 00 00 00 00000018 00", register))
	reserve := make([]byte, 24)
	reserve[7] = 5
	wantGood(t, "RESERVE", r.run("5f 01 03 00 00 00000018 00", reserve))
	info := r.unit.Reservation()
	if info.Type != 3 || !info.APTPL || len(info.Registrations) != 1 || !info.Registrations[0].Holder || info.Registrations[0].Key != 5 {
		t.Fatalf("%+v", info)
	}
	kept.SetSync(func(*os.File) error { return errors.New("injected") })
	if cleared, err := r.unit.ClearReservation(); err == nil || cleared || r.unit.Reservation().Type != 3 {
		t.Errorf("a failure of the file: %v, %v", cleared, err)
	}
	kept.SetSync(nil)
	if cleared, err := r.unit.ClearReservation(); err != nil || !cleared {
		t.Errorf("%v, %v", cleared, err)
	}
	wantSense(t, r.run("00", nil), 0x6, 0x2a, 0x03) // RESERVATIONS PREEMPTED
	if info := r.unit.Reservation(); info.Type != 0 || len(info.Registrations) != 0 || info.Generation != 2 {
		t.Errorf("%+v", info)
	}
	if s, err := kept.load(testIdentity.Serial); err != nil || len(s.registrations) != 0 {
		t.Errorf("the file has %+v, %v", s, err)
	}
	wantGood(t, "RESERVE(6)", r.run("16", nil))
	if r.unit.Reservation().Legacy == "" {
		t.Error("RESERVE(6) is not told")
	}
	if cleared, err := r.unit.ClearReservation(); err != nil || !cleared || r.unit.Reservation().Legacy != "" {
		t.Errorf("RESERVE(6): %v, %v", cleared, err)
	}
	if cleared, err := r.unit.ClearReservation(); err != nil || cleared {
		t.Errorf("nothing: %v, %v", cleared, err)
	}
}

// A unit in use takes space for all of what it has more, in steps between which it can be
// stopped.
func TestAllocate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	s, _, err := backend.OpenFile(backend.FileConfig{Path: path, Size: 2*allocateStep + 4096})
	if err != nil {
		t.Fatal(err)
	}
	u, err := New(s, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	enough := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	var steps []backend.Progress
	report := func(p backend.Progress) { steps = append(steps, p) }
	if err := u.Allocate(ctx, 4096, func(p backend.Progress) { report(p); cancel(enough) }); !errors.Is(err, enough) || len(steps) != 1 {
		t.Errorf("%v after %v", err, steps)
	}
	steps = nil
	if err := u.Allocate(t.Context(), 4096, report); err != nil {
		t.Error(err)
	}
	want := []backend.Progress{{Phase: backend.Preallocating, Done: allocateStep, Total: 2 * allocateStep}, {Phase: backend.Preallocating, Done: 2 * allocateStep, Total: 2 * allocateStep}}
	if !slices.Equal(steps, want) {
		t.Errorf("%v, want %v", steps, want)
	}
	if err := u.Allocate(t.Context(), u.Size(), report); err != nil || len(steps) != 2 {
		t.Errorf("nothing is more: %v, %v", err, steps)
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Blocks*512 < 2*allocateStep || st.Size != u.Size() {
		t.Errorf("error %v, %d octets, of which %d have space", err, st.Size, st.Blocks*512)
	}
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	u, err = New(m, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if err := u.Allocate(t.Context(), 0, report); !errors.Is(err, backend.ErrNoAllocate) {
		t.Errorf("memory: %v, want ErrNoAllocate", err)
	}
}

// A unit that is opened anew is no unit that has lost power: who has registered and reserved
// it has so afterwards, whether or not APTPL says that it is kept (SPC-4, section 5.13.5),
// and the unit of before takes no more of that.
func TestSucceed(t *testing.T) {
	next := func(r *prRig, id state.Identity) *Unit {
		t.Helper()
		u, err := New(r.unit.Detach(), Options{Identity: id})
		if err != nil {
			t.Fatal(err)
		}
		u.InheritFrom(r.unit)
		r.inv.Replace(0, u)
		for _, n := range []*Nexus{r.a, r.b, r.c, r.see} {
			wantSense(t, r.on(n, "00", nil), 0x6, 0x28, 0x00)
		}
		return u
	}
	const write = "2a 00 00000000 00 0001 00"
	t.Run("same unit", func(t *testing.T) {
		r := newPRRig(t, setup{}).registered()
		r.ok(r.a, prReserve, 5, prList(keyA, 0, 0)) // Write Exclusive - Registrants Only
		r.ok(r.c, prRegister, 0, prList(keyC, 0, 0))
		var late Command
		late.CDB = unhex("5f 03 00 0000 00000018 00 000000000000") // CLEAR, whose parameters come late
		if !r.b.Begin(&late) {
			t.Fatalf("status %#x", late.Status)
		}
		generation := r.generation()
		next(r, r.unit.Identity())
		r.wantKeys(keyA, keyB)
		r.wantReservation(5, keyA)
		if got := r.generation(); got != generation {
			t.Errorf("PRGENERATION %d, want %d", got, generation)
		}
		if res := r.on(r.c, write, make([]byte, 512)); res.status != statusReservationConflict {
			t.Errorf("WRITE of who is not registered: status %#x", res.status)
		}
		wantGood(t, "WRITE of a registrant", r.on(r.b, write, make([]byte, 512)))
		if r.b.Consume(&late, prList(keyB, 0, 0), 0) {
			t.Error("CLEAR at the unit of before succeeds")
		}
		wantSense(t, result{status: late.Status, sense: late.Sense()}, 0x2, 0x04, 0x01)
		r.wantReservation(5, keyA)
	})
	t.Run("modes and paths", func(t *testing.T) {
		r := newPRRig(t, setup{info: volatile})
		wantGood(t, "MODE SELECT", r.on(r.a, "15 10 0000 18 00", unhex("00000000 0812 00 000000000000000000000000000000 0000")[:24]))
		wantSense(t, r.on(r.b, "00", nil), 0x6, 0x2a, 0x01)
		wantGood(t, "SET TARGET PORT GROUPS", r.on(r.a, "a4 0a 00000000 00000008 00 00", unhex("00000000 01 00 0001")))
		for _, n := range []*Nexus{r.b, r.c, r.see} {
			r.on(n, "00", nil)
			r.on(n, "00", nil)
		}
		old := r.unit
		for i, o := range []Options{{}, {ReadOnly: true}, {WriteThrough: true}, {}} {
			o.Identity = testIdentity
			u, err := New(old.Detach(), o)
			if err != nil {
				t.Fatal(err)
			}
			u.InheritFrom(old)
			r.inv.Replace(0, u)
			wantSense(t, r.on(r.a, "00", nil), 0x6, 0x28, 0x00)
			if i > 0 { // the WP bit, the same, and the cache
				wantSense(t, r.on(r.a, "00", nil), 0x6, 0x2a, 0x01)
			}
			wantGood(t, "TEST UNIT READY", r.on(r.a, "00", nil))
			if want := i == 3; u.cached() != want {
				t.Errorf("%d: the cache is used: %v", i, !want)
			}
			if res := r.on(r.a, "a3 0a 00000000 00000100 00 00", nil); len(res.in) < 5 || res.in[4] != 1 {
				t.Errorf("REPORT TARGET PORT GROUPS: % x", res.in)
			}
			old = u
		}
	})
	t.Run("another unit", func(t *testing.T) {
		r := newPRRig(t, setup{}).registered()
		r.ok(r.a, prReserve, 5, prList(keyA, 0, 0))
		other := r.unit.Identity()
		other.NAA[7]++
		next(r, other)
		r.wantKeys()
	})
}

// Commands of a unit whose store another one has change nothing there, however late their
// data comes.
func TestDetach(t *testing.T) {
	block := bytes.Repeat([]byte{0x11}, 512)
	copies := unhex(copyList(1, 0, []string{cscdZero}, []string{blocks(0, 0, 1, 0, 1)}))
	for _, tt := range []struct {
		name, cdb string
		data      []byte
	}{
		{"WRITE(10)", "2a 00 00000001 00 0001 00 000000000000", block},
		{"WRITE AND VERIFY(10)", "2e 00 00000001 00 0001 00 000000000000", block},
		{"ORWRITE", "8b 00 0000000000000001 00000001 00 00", block},
		{"COMPARE AND WRITE", "89 00 0000000000000001 000000 01 00 00", append(bytes.Repeat([]byte{0x22}, 512), block...)},
		{"WRITE SAME(10)", "41 00 00000001 00 0001 00 000000000000", block},
		{"WRITE SAME(10), UNMAP", "41 08 00000001 00 0001 00 000000000000", make([]byte, 512)},
		{"WRITE ATOMIC(16)", "9c 00 0000000000000001 0000 0001 00 00", block},
		{"UNMAP", "42 00 00000000 00 0018 00 000000000000", unhex("0016 0010 00000000 0000000000000001 00000001 00000000")},
		{"EXTENDED COPY", fmt.Sprintf("83 00 0000000000000000 %08x 00 00", len(copies)), copies},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newPRRig(t, setup{})
			for lba, b := range map[byte]byte{0: 0x11, 1: 0x22} {
				wantGood(t, "WRITE", r.on(r.a, fmt.Sprintf("2a 00 %08x 00 0001 00", lba), bytes.Repeat([]byte{b}, 512)))
			}
			var c Command
			c.CDB = unhex(tt.cdb)
			if !r.a.Begin(&c) {
				t.Fatalf("status %#x, sense % x", c.Status, c.Sense())
			}
			store := r.unit.Detach()
			r.a.Consume(&c, tt.data, 0)
			r.a.End(&c)
			if c.Status != StatusCheckCondition {
				t.Errorf("status %#x", c.Status)
			}
			got := make([]byte, 512)
			if err := store.ReadAt(got, 512); err != nil || got[0] != 0x22 {
				t.Errorf("block 1 has %#x, %v", got[0], err)
			}
		})
	}
}

// A command that goes to the end of the medium and meets a smaller one, between its first look
// at the capacity and the next, is refused.
func TestToEndOfSmallerUnit(t *testing.T) {
	r := newRig(t, setup{size: 1 << 20})
	c := Command{CDB: unhex("34 00 00000400 00 0000 00 000000000000")} // PRE-FETCH(10) from block 1024 on
	if !r.nexus.Begin(&c) {
		t.Fatalf("status %#x", c.Status)
	}
	r.unit.blocks.Store(1024)
	r.nexus.End(&c)
	wantSense(t, result{status: c.Status, sense: c.Sense()}, 0x5, 0x21, 0x00)
	c.failed, c.count = false, 0
	if r.unit.toEnd(&c) { // of WRITE SAME
		t.Errorf("%d blocks from %d on", c.count, c.lba)
	}
	wantSense(t, result{status: c.Status, sense: c.Sense()}, 0x5, 0x21, 0x00)
	if mapped, n, err := r.unit.blockStatus(1024); mapped || n != 0 || err != nil { // of GET LBA STATUS
		t.Errorf("%v, %d, %v", mapped, n, err)
	}
}

// What becomes due for a nexus as soon as the new unit knows of it is not lost to what it had
// to hear of the old one.
func TestReplaceLosesNoAttention(t *testing.T) {
	r := newRig(t, setup{})
	for i := range 200 {
		p := testPort
		p.InitiatorName = fmt.Sprintf("iqn.2026-11.io.example:%d", i)
		r.inv.NewNexus(p)
	}
	for range 100 {
		u := newRig(t, setup{}).unit
		told := map[*itl]bool{}
		replaced, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			for {
				u.mu.Lock()
				for l := range u.seen {
					if !told[l] && l.nexus.inv == r.inv {
						told[l] = true
						l.raise(attentionReservationsPreempted)
					}
				}
				u.mu.Unlock()
				select {
				case <-replaced:
					return
				default:
				}
			}
		}()
		r.inv.Replace(0, u)
		close(replaced)
		<-ended
		for l := range told {
			if l.due.Load()&(1<<attentionReservationsPreempted) == 0 {
				t.Fatal("a unit attention was lost")
			}
			l.due.Store(0)
		}
	}
}

// PREEMPT AND ABORT that has begun with a unit which is replaced then still ends the commands
// of the preempted, which go on with that unit as well, and lets them hear of it.
func TestPreemptAndAbortBesideReplace(t *testing.T) {
	r := newPRRig(t, setup{}).registered()
	r.ok(r.a, prReserve, writeExclusiveRO, prList(keyA, 0, 0))
	var ended []string
	r.a.OnPreempt(func(lun [8]byte, _ *Command) { ended = append(ended, fmt.Sprintf("%x", lun)) })
	list := prList(keyC, keyA, 0)
	c := Command{CDB: append(unhex("5f 05 05 0000 00000018 00"), make([]byte, 6)...)}
	if !r.c.Begin(&c) {
		t.Fatalf("PREEMPT AND ABORT: sense % x", c.Sense())
	}
	next := newRig(t, setup{}).unit
	r.inv.Replace(0, next)
	r.c.Consume(&c, list, 0)
	if r.c.End(&c); c.Status != StatusGood {
		t.Fatalf("PREEMPT AND ABORT: status %#x, sense % x", c.Status, c.Sense())
	}
	if !slices.Equal(ended, []string{"0000000000000000"}) {
		t.Errorf("commands were ended for %q", ended)
	}
	wantSense(t, r.on(r.a, "00", nil), 0x6, 0x28, 0x00)
	wantSense(t, r.on(r.a, "00", nil), 0x6, 0x2a, registrationsPreempted)
}
