package lun

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// SBC-3, section 5.2; VMware's ATS.
func TestCompareAndWrite(t *testing.T) {
	const lba, count = 2040, 8
	n := count * 512
	old, instead := pattern(n, 1), pattern(n, 2)
	for _, flags := range []byte{0, 0x08, 0x10} { // FUA, DPO
		r := newRig(t, setup{})
		r.good(extentCDB(0x8a, 0, lba, count), old)
		res := r.run(extentCDB(0x89, flags, lba, count), slices.Concat(old, instead))
		wantGood(t, "COMPARE AND WRITE", res)
		if res.dataOut != uint64(2*n) {
			t.Errorf("DataOut %d, want %d", res.dataOut, 2*n)
		}
		wantBytes(t, r.good(extentCDB(0x88, 0, lba, count), nil), instead)
		for _, at := range []int{0, 1, 511, 512, n - 1} {
			wrong := bytes.Clone(instead)
			wrong[at] ^= 0x40
			res := r.run(extentCDB(0x89, flags, lba, count), slices.Concat(wrong, old))
			if res.status != StatusCheckCondition {
				t.Fatalf("a difference at %d was not found", at)
			}
			// VALID, MISCOMPARE, INFORMATION: the offset of the first byte that
			// differs, MISCOMPARE DURING VERIFY OPERATION
			wantBytes(t, res.sense, unhex(fmt.Sprintf("f0 00 0e %08x 0a 00000000 1d 00 00 000000", at)))
			wantBytes(t, r.good(extentCDB(0x88, 0, lba, count), nil), instead)
		}
	}
	r := newRig(t, setup{})
	if res := r.run(extentCDB(0x89, 0, 5, 0), nil); res.status != StatusGood || res.dataOut != 0 {
		t.Errorf("no blocks: %v", res)
	}
	wantSense(t, r.run(extentCDB(0x89, 0, 2047, 2), nil), 0x5, 0x21, 0x00)
	wantSense(t, r.run(extentCDB(0x89, 0, 2048, 0), nil), 0x5, 0x21, 0x00)
	wantField(t, r.run(extentCDB(0x89, 0, 0, 1<<8), nil), 12, 0) // NUMBER OF LOGICAL BLOCKS has one byte
	wantField(t, r.run(extentCDB(0x89, 0x20, 0, 1), nil), 1, 5)  // WRPROTECT
	for _, short := range []int{0, 512, 1023} {
		wantSense(t, r.run(extentCDB(0x89, 0, 0, 1), make([]byte, short)), 0x5, 0x0e, 0x03)
	}
}

// Of many commands that compare with the same data and write other data, one wins each round. No
// other write comes between its comparison and its write.
func TestCompareAndWriteIsAtomic(t *testing.T) {
	const rivals, rounds = 8, 200
	r := newRig(t, setup{size: 8 << 20})
	counter := func(i uint64) []byte {
		b := make([]byte, 1024)
		for off := 0; off < len(b); off += 8 {
			binary.BigEndian.PutUint64(b[off:], i)
		}
		return b
	}
	var wg sync.WaitGroup
	for i := range rivals {
		n := r.login()
		lba := uint64(2047) // across two stripes
		wg.Go(func() {
			var c Command
			for range rounds {
				for done := false; !done; {
					now := do(n, &c, [8]byte{}, extentCDB(0x88, 0, lba, 2), nil, all).in
					v := binary.BigEndian.Uint64(now)
					if !bytes.Equal(now, counter(v)) {
						t.Errorf("rival %d read the middle of a COMPARE AND WRITE", i)
						return
					}
					res := do(n, &c, [8]byte{}, extentCDB(0x89, 0, lba, 2), slices.Concat(counter(v), counter(v+1)), all)
					done = res.status == StatusGood
				}
			}
		})
	}
	wg.Wait()
	if v := binary.BigEndian.Uint64(r.good(extentCDB(0x88, 0, 2047, 1), nil)); v != rivals*rounds {
		t.Errorf("%d increments were counted, want %d", v, rivals*rounds)
	}
}

// While one command holds a range exclusively, others for that range wait, and those for other
// ranges do not.
func TestExclusiveRangeWaits(t *testing.T) {
	for name, cdb := range map[string]string{
		"COMPARE AND WRITE": extentCDB(0x89, 0, 4, 1),
		"ORWRITE":           extentCDB(0x8b, 0, 4, 2),
		"WRITE ATOMIC":      extentCDB(0x9c, 0, 4, 2),
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, setup{size: 8 << 20})
			other := r.login()
			held, release := make(chan struct{}), make(chan struct{})
			var once sync.Once
			r.store.Hook(func(op backendtest.Op, off, _ int64) error {
				if op == backendtest.WriteAt && off == 4*512 {
					once.Do(func() {
						close(held)
						<-release
					})
				}
				return nil
			})
			var wg sync.WaitGroup
			wg.Go(func() {
				if res := r.run(cdb, make([]byte, 1024)); res.status != StatusGood {
					t.Errorf("%s: sense % x", name, res.sense)
				}
			})
			<-held
			waiting := make(chan string, 4)
			for what, cdb := range map[string]string{
				"READ":       extentCDB(0x28, 0, 4, 1),
				"WRITE":      extentCDB(0x2a, 0, 4, 1),
				"WRITE SAME": extentCDB(0x93, 0, 0, 9),
				"VERIFY":     extentCDB(0x2f, 2, 4, 1),
			} {
				wg.Go(func() {
					var c Command
					do(other, &c, [8]byte{}, cdb, make([]byte, 512), all)
					waiting <- what
				})
			}
			var c Command
			wantGood(t, "READ elsewhere", do(other, &c, [8]byte{}, extentCDB(0x28, 0, 4096, 8), nil, all))
			wantGood(t, "WRITE elsewhere", do(other, &c, [8]byte{}, extentCDB(0x2a, 0, 4096, 8), make([]byte, 4096), all))
			select {
			case what := <-waiting:
				t.Errorf("%s did not wait", what)
			default:
			}
			close(release)
			wg.Wait()
		})
	}
}

func TestStripesOf(t *testing.T) {
	const mib = 1 << 20
	for _, s := range []struct {
		off, n int64
		want   stripeSet
	}{
		{0, 0, 0}, {5, -1, 0}, {0, 1, 1}, {mib - 1, 1, 1}, {mib - 1, 2, 3}, {mib, mib, 2}, {mib, mib + 1, 6},
		{63 * mib, mib, 1 << 63}, {63 * mib, mib + 1, 1<<63 | 1}, {64 * mib, 2 * mib, 3}, {62 * mib, 4 * mib, 3<<62 | 3},
		{0, 64 * mib, ^stripeSet(0)}, {mib / 2, 63 * mib, ^stripeSet(0)}, {0, 63 * mib, ^stripeSet(0) >> 1},
		{1 << 62, 1 << 61, ^stripeSet(0)}, {1<<63 - mib, mib, 1 << 63},
	} {
		if got := stripesOf(s.off, s.n); got != s.want {
			t.Errorf("%d bytes at %d: %#x, want %#x", s.n, s.off, got, s.want)
		}
	}
}

// SBC-3, section 5.12.
func TestOrWrite(t *testing.T) {
	const count = 1200 // more than the scratch memory holds
	r := newRig(t, setup{size: 4 << 20})
	old, set := pattern(count*512, 1), pattern(count*512, 6)
	r.good(extentCDB(0x8a, 0, 3, count), old)
	r.good(extentCDB(0x8b, 0, 3, count), set)
	want := make([]byte, count*512)
	for i := range want {
		want[i] = old[i] | set[i]
	}
	if !bytes.Equal(r.good(extentCDB(0x88, 0, 2, count+2), nil), slices.Concat(make([]byte, 512), want, make([]byte, 512))) {
		t.Error("the medium is not the OR of what was there and what came")
	}
	if res := r.run(extentCDB(0x8b, 0, 0, 0), nil); res.status != StatusGood || res.dataOut != 0 {
		t.Errorf("no blocks: %v", res)
	}
	wantField(t, r.run(extentCDB(0x8b, 0x40, 0, 1), nil), 1, 6) // ORPROTECT
}

// SBC-4, section 5.48 and 4.29.
func TestWriteAtomic(t *testing.T) {
	const count = 600
	r := newRig(t, setup{})
	old, data := pattern(count*512, 1), pattern(count*512, 2)
	r.good(extentCDB(0x8a, 0, 7, count), old)
	// All or nothing: the store fails after it wrote a part.
	r.store.Hook(func(op backendtest.Op, off, n int64) error {
		if op != backendtest.WriteAt {
			return nil
		}
		r.store.Hook(nil)
		if err := r.store.Store.WriteAt(data[:n/2], off); err != nil {
			t.Error(err)
		}
		return backend.ErrNoSpace
	})
	wantSense(t, r.run(extentCDB(0x9c, 0, 7, count), data), 0x7, 0x27, 0x07)
	wantBytes(t, r.good(extentCDB(0x88, 0, 7, count), nil), old)
	// The initiator sends less.
	wantSense(t, r.run(extentCDB(0x9c, 0, 7, count), data[:count*512-1]), 0x5, 0x0e, 0x03)
	wantBytes(t, r.good(extentCDB(0x88, 0, 7, count), nil), old)

	r.good(extentCDB(0x9c, 0, 7, count), data)
	wantBytes(t, r.good(extentCDB(0x88, 0, 7, count), nil), data)
	if res := r.run(extentCDB(0x9c, 0, 7, 0), nil); res.status != StatusGood || res.dataOut != 0 {
		t.Errorf("no blocks: %v", res)
	}
	wantSense(t, r.run(extentCDB(0x9c, 0, 2047, 2), nil), 0x5, 0x21, 0x00)
	wantField(t, r.run("9c 00 0000000000000000 0008 0008 00 00", nil), 11, 3) // ATOMIC BOUNDARY

	// Nothing helps when the old data cannot be written either.
	r.store.Fail(backendtest.WriteAt, syscall.EIO)
	wantSense(t, r.run(extentCDB(0x9c, 0, 7, 1), data[:512]), 0x3, 0x0c, 0x00)

	other := newRig(t, setup{info: func(i *backend.Info) { i.AtomicWrite = 0 }})
	wantSense(t, other.run(extentCDB(0x9c, 0, 0, 1), data[:512]), 0x5, 0x20, 0x00)
}

// SBC-3, sections 5.36 to 5.38.
func TestWriteAndVerify(t *testing.T) {
	for _, op := range []byte{0x2e, 0xae, 0x8e} {
		for _, flags := range []byte{0x00, 0x10, 0x02, 0x12} { // DPO, BYTCHK
			r := newRig(t, setup{info: volatile})
			data := pattern(300*512, int(flags))
			res := r.run(extentCDB(op, flags, 5, 300), data)
			if wantGood(t, "WRITE AND VERIFY", res); res.dataOut != 300*512 {
				t.Errorf("DataOut %d", res.dataOut)
			}
			if r.store.Calls(backendtest.ReadAt) == 0 || r.store.Calls(backendtest.WriteAt) != 0 {
				t.Error("the medium was not written, or not read")
			}
			wantBytes(t, r.good(extentCDB(0x28, 0, 5, 300), nil), data)
		}
		// The medium does not keep the data.
		r := newRig(t, setup{})
		r.store.Hook(func(op backendtest.Op, off, _ int64) error {
			if op == backendtest.ReadAt && off == 4096 {
				return r.store.Store.WriteAt([]byte{0xee}, off+9)
			}
			return nil
		})
		r.good(extentCDB(op, 0, 0, 16), make([]byte, 8192)) // nothing is compared
		res := r.run(extentCDB(op, 0x02, 0, 16), make([]byte, 8192))
		if res.status != StatusCheckCondition {
			t.Fatal("a difference was not found")
		}
		wantBytes(t, res.sense, unhex(fmt.Sprintf("f0 00 0e %08x 0a 00000000 1d 00 00 000000", 4096+9)))
		wantField(t, r.run(extentCDB(op, 0x04, 0, 1), nil), 1, 2) // BYTCHK 10b
		wantField(t, r.run(extentCDB(op, 0x80, 0, 1), nil), 1, 7) // WRPROTECT
	}
}

// SBC-3, sections 5.13 and 5.14: a TRANSFER LENGTH of 0 means the rest of the medium.
func TestPrefetch(t *testing.T) {
	r := newRig(t, setup{})
	var off, n int64
	r.store.Hook(func(_ backendtest.Op, at, len int64) error { off, n = at, len; return nil })
	for _, s := range []struct {
		cdb    string
		off, n int64
	}{
		{extentCDB(0x34, 0, 3, 5), 3 * 512, 5 * 512},
		{extentCDB(0x90, 2, 2047, 1), 2047 * 512, 512},
		{extentCDB(0x34, 0, 8, 0), 8 * 512, 2040 * 512},
		{extentCDB(0x90, 0, 0, 0), 0, 1 << 20},
	} {
		if res := r.run(s.cdb, nil); res.status != StatusGood || res.dataOut|res.dataIn != 0 || off != s.off || n != s.n {
			t.Errorf("%s: %v, %d bytes at %d", s.cdb, res, n, off)
		}
	}
}

// WRITE ATOMIC on a medium with bounds, as files and devices have them: Block Limits has them, each command is one atomic write of the
// store, and what cannot be one is refused (SBC-4, sections 4.29.4 and 5.47). Neighboring blocks of the same unit keep their content.
func TestWriteAtomicOfAMediumWithBounds(t *testing.T) {
	r := newRig(t, setup{info: func(i *backend.Info) {
		i.AtomicUnit, i.AtomicWrite, i.VolatileCache = 4096, 65536, true
	}})
	limits := r.good("12 01 b0 0040 00", nil)
	wantBytes(t, limits[44:], unhex("00000080 00000008 00000008 00000000 00000000")) // 64 KiB; alignment and granularity 4 KiB
	before := pattern(1<<20, 9)
	for lba := 0; lba < 2048; lba += 1024 {
		r.good(extentCDB(0x8a, 0, uint64(lba), 1024), before[lba*512:][:512<<10])
	}
	atomic := func(flags byte, lba uint64, n int) string {
		return fmt.Sprintf("9c %02x %016x 0000 %04x 00 00", flags, lba, n)
	}
	type call struct{ off, n int64 }
	var calls []call
	r.store.Hook(func(op backendtest.Op, off, n int64) error {
		if op == backendtest.WriteAtomic {
			calls = append(calls, call{off, n})
		} else if op != backendtest.ReadAt && op != backendtest.Sync {
			t.Errorf("%v of %d bytes at %d", op, n, off)
		}
		return nil
	})
	for _, tt := range []struct {
		lba  uint64
		n    int
		want call
	}{
		{0, 8, call{0, 4096}},
		{128, 128, call{65536, 65536}},
		{16, 16, call{8192, 8192}},
		{8, 16, call{0, 16384}},        // 4 KiB on both sides are read first
		{264, 24, call{131072, 16384}}, // not a power of two
	} {
		calls = nil
		data := pattern(tt.n*512, int(tt.lba)+3)
		r.good(atomic(0, tt.lba, tt.n), data)
		copy(before[tt.lba*512:], data)
		if len(calls) != 1 || calls[0] != tt.want {
			t.Errorf("%d blocks at %d: %+v, want %+v", tt.n, tt.lba, calls, tt.want)
		}
	}
	calls = nil
	r.good(atomic(0, 0, 0), nil)
	for _, tt := range []struct {
		lba   uint64
		n     int
		octet int
	}{{1, 8, 2}, {0, 7, 12}, {0, 256, 12}, {120, 16, 2}} { // the last is on both sides of a boundary of 64 KiB
		wantField(t, r.run(atomic(0, tt.lba, tt.n), make([]byte, tt.n*512)), tt.octet, noField)
	}
	if len(calls) != 0 {
		t.Errorf("refused commands have written: %+v", calls)
	}
	r.store.Hook(nil)
	r.store.Fail(backendtest.WriteAtomic, syscall.EIO)
	wantSense(t, r.run(atomic(fua, 0, 8), make([]byte, 4096)), 0x3, 0x0c, 0x00)
	r.store.Fail(backendtest.WriteAtomic, nil)
	wantBytes(t, append(r.good(extentCDB(0x88, 0, 0, 1024), nil), r.good(extentCDB(0x88, 0, 1024, 1024), nil)...), before)

	// Without atomic writes of the medium, the command does not exist.
	none := newRig(t, setup{info: func(i *backend.Info) { i.AtomicWrite = 0 }})
	wantSense(t, none.run(atomic(0, 0, 8), make([]byte, 4096)), 0x5, 0x20, 0x00)
	wantBytes(t, none.good("12 01 b0 0040 00", nil)[44:], make([]byte, 20))
}
