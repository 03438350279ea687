package lun

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
	"golang.org/x/sys/unix"
)

func TestNewRefuses(t *testing.T) {
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	good := m.Info()
	for name, s := range map[string]struct {
		opt  Options
		info func(*backend.Info)
		want string
	}{
		"vendor too long":  {opt: Options{Vendor: "NINECHARS"}, want: "vendor"},
		"product too long": {opt: Options{Product: strings.Repeat("x", 17)}, want: "product"},
		"revision control": {opt: Options{Revision: "1\n"}, want: "revision"},
		"vendor not ASCII": {opt: Options{Vendor: "é"}, want: "vendor"},
		"atomic write":     {info: func(i *backend.Info) { i.AtomicWrite = 700 }, want: "atomic write"},
		"block size":       {info: func(i *backend.Info) { i.BlockSize = 8192 }, want: "block size 8192"},
		"size":             {info: func(i *backend.Info) { i.Size = 513 }, want: "size 513"},
	} {
		t.Run(name, func(t *testing.T) {
			info := good
			if s.info != nil {
				s.info(&info)
			}
			_, err := New(describedStore{&backendtest.Faulty{Store: m}, info}, s.opt)
			if err == nil || !strings.Contains(err.Error(), s.want) {
				t.Fatalf("error %v, want one about %s", err, s.want)
			}
		})
	}
}

// Resize gives unit and store another size and notifies all nexuses (SBC-3, section 4.7: CAPACITY
// DATA HAS CHANGED).
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
					t.Errorf("Resize(%d): %v; %d bytes", size, err, u.Size())
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
				t.Errorf("READ beyond the new end: sense % x", c.Sense())
			}
		})
	}
	r := newRig(t, setup{})
	if err := r.unit.Resize(2 << 20); !errors.Is(err, backend.ErrFixedSize) {
		t.Errorf("a store without Resize: %v", err)
	}
}

// A command to the end of the medium is refused if the unit becomes smaller between its first
// look at the capacity and the next.
func TestCommandToOldEndIsRefused(t *testing.T) {
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
	if mapped, n, err := r.unit.blockStatus(&r.c, 1024); mapped || n != 0 || err != nil { // of GET LBA STATUS
		t.Errorf("%v, %d, %v", mapped, n, err)
	}
}

// A growing is a store whose size a test sets.
type growing struct {
	describedStore
	size *int64
	err  error
}

func (s *growing) Grow() (int64, error) { return *s.size, s.err }

// SBC-3, section 4.7: the capacity after the medium grew.
func TestGrow(t *testing.T) {
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	info := m.Info()
	info.Size = 1 << 20
	size := int64(1 << 20)
	faulty := &backendtest.Faulty{Store: m}
	store := &growing{describedStore: describedStore{faulty, info}, size: &size}
	u, err := New(store, Options{Identity: testIdentity, Sanitize: true})
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, setup{})
	r.inv = NewInventory()
	if err := r.inv.Add(0, u); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { u.Close() })
	r.unit, r.store = u, faulty
	r.nexus = r.login()
	other := r.login()
	grow := func(want bool) {
		t.Helper()
		if grown, err := u.Grow(); grown != want || err != nil {
			t.Fatalf("grown %t, error %v", grown, err)
		}
	}
	grow(false)
	size = 3 << 20
	wantSense(t, r.run(extentCDB(0x28, 0, 2047, 2), nil), 0x5, 0x21, 0x00) // nobody has looked yet
	grow(true)
	for _, n := range []*Nexus{r.nexus, other} {
		wantSense(t, do(n, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x2a, 0x09) // CAPACITY DATA HAS CHANGED
	}
	wantBytes(t, r.good("25", nil), unhex("000017ff 00000200"))
	wantBytes(t, r.good("9e 10 0000000000000000 0000000c 00 00", nil), unhex("00000000000017ff 00000200"))
	wantBytes(t, r.good("1a 00 0a 00 0c 00", nil)[4:], unhex("00001800 00 000200"))
	r.good(extentCDB(0x8a, 0, 6143, 1), pattern(512, 1))
	wantSense(t, r.run(extentCDB(0x8a, 0, 6143, 2), make([]byte, 1024)), 0x5, 0x21, 0x00)
	size = 2 << 20
	grow(false)
	wantGood(t, "TEST UNIT READY", r.run("00", nil))

	// All of it is sanitized, and it does not grow meanwhile.
	size = 4 << 20
	held, release := r.hold(backendtest.WriteAt)
	release = sync.OnceFunc(release)
	defer release()
	r.good("48 81 0000000000 0005 00", unhex("01 00 0001 5a"))
	<-held
	if grown, err := u.Grow(); grown || !errors.Is(err, errSanitizing) {
		t.Errorf("grown %t, error %v while being sanitized", grown, err)
	}
	release()
	testkit.Eventually(t, "end of the sanitize", func() bool { return r.run("00", nil).status == StatusGood })
	wantBytes(t, r.good(extentCDB(0x28, 0, 6143, 1), nil), bytes.Repeat([]byte{0x5a}, 512))
	grow(true)

	store.err = fmt.Errorf("injected")
	if grown, err := u.Grow(); grown || err != store.err {
		t.Errorf("grown %t, error %v", grown, err)
	}
	if grown, err := newRig(t, setup{}).unit.Grow(); grown || err != nil {
		t.Errorf("a store of fixed size: grown %t, error %v", grown, err)
	}
}

// A unit in use takes space for all of its new bytes, in steps between which it can be stopped.
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
		t.Errorf("error %v, %d bytes, of which %d have space", err, st.Size, st.Blocks*512)
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

// Allocate returns after a sync behind the last allocation, and reports its failure. Another unit
// keeps working.
func TestAllocationIsSynced(t *testing.T) {
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: allocateStep + 4096})
	if err != nil {
		t.Fatal(err)
	}
	s := &allocating{Store: m}
	u, err := New(s, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	for _, failure := range []error{nil, unix.EIO} {
		s.calls, s.failure = nil, failure
		if err := u.Allocate(t.Context(), 0, func(backend.Progress) {}); !errors.Is(err, failure) {
			t.Errorf("Allocate with a sync that returns %v: %v", failure, err)
		}
		if want := []string{"allocate", "allocate", "sync"}; !slices.Equal(s.calls, want) {
			t.Errorf("calls %v, want %v", s.calls, want)
		}
	}
	newRig(t, setup{}).good("2a 00 00000000 00 0001 00", make([]byte, 512))
}

// An allocating store is a memory store that notes in calls what it allocates and syncs.
type allocating struct {
	backend.Store
	calls   []string
	failure error // of Sync
}

func (a *allocating) Allocate(_, _ int64) error {
	a.calls = append(a.calls, "allocate")
	return nil
}

func (a *allocating) Sync() error {
	a.calls = append(a.calls, "sync")
	return a.failure
}

// To reopen a unit is not a loss of power: registrations and reservations remain, with or without
// APTPL (SPC-4, section 5.13.5), and the old unit takes no more of them.
func TestInheritFrom(t *testing.T) {
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

// Commands of a unit whose store has moved to another unit change nothing there, however late
// their data arrive.
func TestDetachedUnitChangesNothing(t *testing.T) {
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
