// Package backendtest tests that an implementation of backend.Store keeps the contract that
// package backend states. It also has stores that fail or hold calls, for other tests.
package backendtest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
)

// MinSize is the least size of the stores that Run tests, in bytes. It spans several pages of
// every implementation.
const MinSize = 1 << 20

// Run tests the Stores that open returns. Each must be new, never written to, writable, and
// have at least MinSize bytes. Run closes them; open releases other resources with t.Cleanup.
func Run(t *testing.T, open func(t *testing.T) backend.Store) {
	for _, c := range []struct {
		name string
		run  func(*testing.T, *suite)
	}{
		{"Info", testInfo},
		{"UnwrittenReadsZeros", testUnwritten},
		{"WriteThenRead", testWriteThenRead},
		{"Range", testRange},
		{"DiscardAndZero", testErase},
		{"EraseWholeStore", testEraseWhole},
		{"Sync", testSync},
		{"ArgumentsAreLoans", testLoans},
		{"RandomOperations", testRandom},
		{"Concurrent", testConcurrent},
		{"OverlappingWrites", testOverlapping},
		{"Extent", testExtent},
		{"Usage", testUsage},
		{"Prefetch", testPrefetch},
		{"Copy", testCopy},
		{"Splice", testSplice},
		{"Close", testClose},
		{"CloseUnderway", testCloseUnderway},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := open(t)
			info := s.Info()
			if info.Size < MinSize {
				t.Fatalf("the store has %d bytes, the suite needs %d", info.Size, MinSize)
			}
			c.run(t, &suite{Store: s, info: info, span: MinSize})
			if err := s.Close(); err != nil && !errors.Is(err, backend.ErrClosed) {
				t.Errorf("Close: %v", err)
			}
		})
	}
}

// RunReadOnly tests the Stores that open returns, which must be read-only and have content.
func RunReadOnly(t *testing.T, open func(t *testing.T, content []byte) backend.Store) {
	content := pattern(MinSize, 1)
	s := open(t, content)
	if info := s.Info(); !info.ReadOnly || info.Size != int64(len(content)) {
		t.Fatalf("Info() = %+v, want read-only and %d bytes", info, len(content))
	}
	if err := s.Info().Validate(); err != nil {
		t.Error(err)
	}
	for name, change := range changes {
		for _, r := range [][2]int64{{0, 512}, {1, 1}, {0, 0}, {-1, 1}, {int64(len(content)), 1}} {
			if err := change(s, r[0], r[1]); !errors.Is(err, backend.ErrReadOnly) {
				t.Errorf("%s of %d bytes at %d: %v, want ErrReadOnly", name, r[1], r[0], err)
			}
		}
	}
	if err := backend.Copy(s, 0, s, 4096, 512, make([]byte, 512)); !errors.Is(err, backend.ErrReadOnly) {
		t.Errorf("Copy: %v, want ErrReadOnly", err)
	}
	if err := s.Sync(); err != nil {
		t.Errorf("Sync: %v", err)
	}
	(&suite{Store: s}).want(t, 0, content)
	if err := s.ReadAt(make([]byte, 2), int64(len(content))-1); !errors.Is(err, backend.ErrRange) {
		t.Errorf("ReadAt across the end: %v, want ErrRange", err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	for name, change := range changes {
		if err := change(s, 0, 512); !errors.Is(err, backend.ErrClosed) {
			t.Errorf("%s after Close: %v, want ErrClosed", name, err)
		}
	}
}

// changes has the calls that change a Store, on n bytes at off.
var changes = map[string]func(s backend.Store, off, n int64) error{
	"WriteAt":      func(s backend.Store, off, n int64) error { return s.WriteAt(pattern(buffer(n), 9), off) },
	"WriteDurable": func(s backend.Store, off, n int64) error { return s.WriteDurable(pattern(buffer(n), 9), off) },
	"Discard":      backend.Store.Discard,
	"Zero":         backend.Store.Zero,
}

// buffer returns a buffer of n bytes, but limits its memory and takes a negative n for 0.
func buffer(n int64) int { return int(max(0, min(n, 8<<20))) }

type suite struct {
	backend.Store
	info backend.Info
	span int64 // bytes at the start of the store that are compared as a whole
}

func testInfo(t *testing.T, s *suite) {
	if err := s.info.Validate(); err != nil {
		t.Error(err)
	}
	if s.info.ReadOnly {
		t.Error("ReadOnly is set")
	}
	must(t, "WriteAt", s.WriteAt(pattern(4096, 1), 0))
	must(t, "Discard", s.Discard(0, s.info.Size))
	if now := s.Info(); now != s.info {
		t.Errorf("Info changed from %+v to %+v", s.info, now)
	}
}

// testUnwritten checks "Bytes that were never written [...] read as zeros."
func testUnwritten(t *testing.T, s *suite) {
	for off := int64(0); off < s.info.Size; off += s.span {
		n := min(s.span, s.info.Size-off)
		s.want(t, off, make([]byte, n))
	}
	s.want(t, s.info.Size-1, []byte{0})

	// Also next to written bytes.
	must(t, "WriteAt", s.WriteAt([]byte{1, 2, 3}, 70_001))
	want := make([]byte, s.span)
	copy(want[70_001:], []byte{1, 2, 3})
	s.want(t, 0, want)
}

// testWriteThenRead checks "Offsets and lengths are in bytes and need not be aligned",
// "ReadAt fills p", "WriteAt writes all of p" and "WriteDurable does what WriteAt does".
func testWriteThenRead(t *testing.T, s *suite) {
	writes := map[string]func([]byte, int64) error{"WriteAt": s.WriteAt, "WriteDurable": s.WriteDurable}
	for name, write := range writes {
		for i, r := range ragged(s.info.Size) {
			what := fmt.Sprintf("%s of %d bytes at %d", name, r.n, r.off)
			p := pattern(int(r.n), uint64(i)+1)
			must(t, what, write(p, r.off))
			s.want(t, r.off, p)
		}
	}
	// Zeros are data.
	must(t, "WriteAt", s.WriteAt(pattern(8192, 3), 512))
	must(t, "WriteAt", s.WriteAt(make([]byte, 4000), 1000))
	want := pattern(8192, 3)
	clear(want[1000-512 : 5000-512])
	s.want(t, 512, want)
	// The whole store with one call.
	p := pattern(int(s.span), 5)
	must(t, "WriteAt", s.WriteAt(p, 0))
	s.want(t, 0, p)
}

// testRange checks "An access that leaves [0, Size) fails with ErrRange and changes nothing; an
// empty one within [0, Size] succeeds."
func testRange(t *testing.T, s *suite) {
	size := s.info.Size
	must(t, "WriteAt", s.WriteAt(pattern(int(s.span), 1), 0))
	must(t, "WriteAt", s.WriteAt(pattern(int(s.span), 2), size-s.span))
	before := make([]byte, 2*s.span)
	must(t, "ReadAt", s.ReadAt(before[:s.span], 0))
	must(t, "ReadAt", s.ReadAt(before[s.span:], size-s.span))
	outside := []struct{ off, n int64 }{
		{-1, 1}, {-1, 0}, {-1, 2}, {-512, 512}, {-512, 1024}, {math.MinInt64, 1}, {math.MinInt64, 0},
		{size, 1}, {size - 1, 2}, {size - 512, 1024}, {size + 1, 0}, {size + 512, 512}, {0, size + 1},
		{math.MaxInt64, 1}, {math.MaxInt64, 0}, {math.MaxInt64 - 511, 512},
		{0, math.MaxInt64}, {1, math.MaxInt64}, {math.MaxInt64, math.MaxInt64},
		{0, -1}, {512, -512}, {size, -1}, {0, math.MinInt64}, {size, math.MinInt64},
	}
	calls := maps.Clone(changes)
	calls["ReadAt"] = func(s backend.Store, off, n int64) error { return s.ReadAt(make([]byte, buffer(n)), off) }
	for name, call := range calls {
		for _, r := range outside {
			if name != "Discard" && name != "Zero" && (r.n != int64(buffer(r.n))) {
				continue // there is no slice of such a length
			}
			if err := call(s, r.off, r.n); !errors.Is(err, backend.ErrRange) {
				t.Errorf("%s of %d bytes at %d of %d: %v, want ErrRange", name, r.n, r.off, size, err)
			}
		}
		for _, off := range []int64{0, 1, size - 1, size} {
			if err := call(s, off, 0); err != nil {
				t.Errorf("%s of nothing at %d: %v", name, off, err)
			}
		}
	}
	s.want(t, 0, before[:s.span])
	s.want(t, size-s.span, before[s.span:])
}

// testErase checks "The range always reads as zeros afterwards", and that nothing else changes.
func testErase(t *testing.T, s *suite) {
	for name, erase := range map[string]func(off, n int64) error{"Discard": s.Discard, "Zero": s.Zero} {
		full := pattern(int(s.span), 7)
		start := s.info.Size - s.span // so that the end of the store is within
		for _, r := range ragged(s.span) {
			must(t, "WriteAt", s.WriteAt(full, start))
			must(t, fmt.Sprintf("%s of %d bytes at %d", name, r.n, start+r.off), erase(start+r.off, r.n))
			want := bytes.Clone(full)
			clear(want[r.off : r.off+r.n])
			s.want(t, start, want)
			// Twice is no different, and the range can be written again.
			must(t, name+" again", erase(start+r.off, r.n))
			must(t, "WriteAt", s.WriteAt(full[r.off:r.off+r.n/2], start+r.off))
			copy(want[r.off:], full[r.off:r.off+r.n/2])
			s.want(t, start, want)
		}
	}
}

func testEraseWhole(t *testing.T, s *suite) {
	for name, erase := range map[string]func(off, n int64) error{"Discard": s.Discard, "Zero": s.Zero} {
		must(t, "WriteAt", s.WriteAt(pattern(int(s.span), 7), 0))
		must(t, "WriteAt", s.WriteAt(pattern(4096, 8), s.info.Size-4096))
		must(t, name, erase(0, s.info.Size))
		s.want(t, 0, make([]byte, s.span))
		s.want(t, s.info.Size-4096, make([]byte, 4096))
	}
}

// testSync checks that Sync succeeds, any number of times and during writes, and keeps the data.
// The tests of the implementations check the medium.
func testSync(t *testing.T, s *suite) {
	must(t, "Sync of nothing", s.Sync())
	p := pattern(int(s.span), 2)
	must(t, "WriteAt", s.WriteAt(p, 0))
	must(t, "Sync", s.Sync())
	must(t, "Discard", s.Discard(0, 100_000))
	must(t, "Sync", s.Sync())
	must(t, "Sync", s.Sync())
	clear(p[:100_000])
	s.want(t, 0, p)
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			if err := s.Sync(); err != nil {
				t.Errorf("Sync during other calls: %v", err)
			}
			if err := s.WriteDurable(p[:512], 0); err != nil {
				t.Errorf("WriteDurable during other calls: %v", err)
			}
		})
	}
	wg.Wait()
	s.want(t, 0, p)
}

// testLoans checks "A Store uses a []byte only until the call returns."
func testLoans(t *testing.T, s *suite) {
	p := pattern(8192, 1)
	must(t, "WriteAt", s.WriteAt(p, 4096))
	must(t, "WriteDurable", s.WriteDurable(p, 40960))
	if !bytes.Equal(p, pattern(8192, 1)) {
		t.Error("writing changed the buffer")
	}
	clear(p)
	s.want(t, 4096, pattern(8192, 1))
	s.want(t, 40960, pattern(8192, 1))

	must(t, "ReadAt", s.ReadAt(p, 4096))
	must(t, "WriteAt", s.WriteAt(pattern(8192, 2), 4096))
	if !bytes.Equal(p, pattern(8192, 1)) {
		t.Error("a write changed what an earlier read returned")
	}
	clear(p)
	s.want(t, 4096, pattern(8192, 2))
	// Bytes outside p do not change.
	big := pattern(3*4096, 3)
	must(t, "ReadAt", s.ReadAt(big[4096:8192:8192], 4096))
	diff(t, "before p", big[:4096], pattern(3*4096, 3)[:4096])
	diff(t, "after p", big[8192:], pattern(3*4096, 3)[8192:])
}

// testRandom checks that any sequence of calls has the same effect as on a []byte.
func testRandom(t *testing.T, s *suite) {
	const seed = 20261101
	rnd := rand.New(rand.NewPCG(seed, 0))
	model := make([]byte, s.span)
	buf := make([]byte, s.span)
	steps := 1500
	if testing.Short() {
		steps = 300
	}
	for i := range steps {
		off := rnd.Int64N(s.span)
		n := min(s.span-off, 1+rnd.Int64N(1<<rnd.IntN(19)))
		if rnd.IntN(2) == 0 { // as initiators do
			off -= off % 4096
			n = min(s.span-off, (n+4095)/4096*4096)
		}
		m := model[off : off+n]
		what, err := "ReadAt", error(nil)
		if rnd.IntN(4) > 0 {
			what, err = randomChange(s, rnd, m, off)
		} else if err = s.ReadAt(buf[:n], off); err == nil && !bytes.Equal(buf[:n], m) {
			diff(t, fmt.Sprintf("seed %d, step %d: ReadAt of %d bytes at %d", seed, i, n, off), buf[:n], m)
			t.FailNow()
		}
		must(t, fmt.Sprintf("seed %d, step %d: %s of %d bytes at %d", seed, i, what, n, off), err)
	}
	s.want(t, 0, model)
}

// randomChange changes the range at off that has the bytes model, and model, or syncs the store. It
// returns what it did.
func randomChange(s *suite, rnd *rand.Rand, model []byte, off int64) (what string, err error) {
	switch rnd.IntN(9) {
	case 0:
		clear(model)
		return "Discard", s.Discard(off, int64(len(model)))
	case 1:
		clear(model)
		return "Zero", s.Zero(off, int64(len(model)))
	case 2:
		clear(model)
		return "WriteAt of zeros", s.WriteAt(model, off)
	case 3:
		return "WriteDurable", s.WriteDurable(fill(model, rnd.Uint64()), off)
	case 4:
		return "Sync", s.Sync()
	}
	return "WriteAt", s.WriteAt(fill(model, rnd.Uint64()), off)
}

// testConcurrent checks "Its methods are safe for concurrent use": each goroutine owns a stripe
// and finds its own changes there, while others use the pages and blocks at the unaligned ends
// of the stripe.
func testConcurrent(t *testing.T, s *suite) {
	const workers, stripe = 16, 50_001
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), 0))
			base := int64(w * stripe)
			model := make([]byte, stripe)
			got := make([]byte, stripe)
			for i := range 40 {
				off := rnd.Int64N(stripe)
				n := 1 + rnd.Int64N(stripe-off)
				what, err := randomChange(s, rnd, model[off:off+n], base+off)
				if err == nil {
					what, err = "ReadAt", s.ReadAt(got, base)
				}
				if err != nil {
					t.Errorf("worker %d, step %d: %s: %v", w, i, what, err)
					return
				}
				if !bytes.Equal(got, model) {
					diff(t, fmt.Sprintf("worker %d, step %d", w, i), got, model)
					return
				}
			}
		})
	}
	wg.Wait()
}

// testOverlapping checks "Of overlapping concurrent writes either may win, byte by byte": after
// them and during them, every byte is that of one write.
func testOverlapping(t *testing.T, s *suite) {
	const n = 200_000
	must(t, "WriteAt", s.WriteAt(bytes.Repeat([]byte{1}, n), 100))
	check := func() {
		got := make([]byte, n)
		if err := s.ReadAt(got, 100); err != nil {
			t.Errorf("ReadAt: %v", err)
		}
		for i, b := range got {
			if b < 1 || b > 8 {
				t.Errorf("byte %d is %#02x, which nobody wrote", i, b)
				return
			}
		}
	}
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			p := bytes.Repeat([]byte{byte(w + 1)}, n)
			for range 10 {
				if err := s.WriteAt(p, 100); err != nil {
					t.Errorf("WriteAt: %v", err)
				}
				check()
			}
		})
	}
	wg.Wait()
	check()
}

// testExtent checks "Extent reports whether the byte at off takes space on the medium": data does,
// the extents cover the store, and the rest reads as zeros.
func testExtent(t *testing.T, s *suite) {
	must(t, "WriteAt", s.WriteAt(pattern(300_000, 1), 100_000))
	must(t, "WriteAt", s.WriteAt([]byte{1}, s.info.Size-1))
	must(t, "Discard", s.Discard(200_000, 100_000))
	for off := int64(0); off < s.info.Size; {
		mapped, n, err := backend.Extent(s.Store, off)
		if err != nil || n <= 0 || n > s.info.Size-off {
			t.Fatalf("Extent(%d) = %v, %d, %v of %d bytes", off, mapped, n, err, s.info.Size)
		}
		for at := off; !mapped && at < off+n; at += s.span {
			s.want(t, at, make([]byte, min(s.span, off+n-at)))
		}
		off += n
	}
	for _, off := range []int64{100_000, 199_999, 300_000, 399_999, s.info.Size - 1} {
		if mapped, _, err := backend.Extent(s.Store, off); !mapped || err != nil {
			t.Errorf("Extent(%d), which holds data, is %v, %v", off, mapped, err)
		}
	}
	if _, ok := s.Store.(backend.Mapper); !ok {
		return
	}
	for _, off := range []int64{-1, s.info.Size, s.info.Size + 1, math.MaxInt64, math.MinInt64} {
		if _, _, err := backend.Extent(s.Store, off); !errors.Is(err, backend.ErrRange) {
			t.Errorf("Extent(%d): %v, want ErrRange", off, err)
		}
	}
	must(t, "Close", s.Close())
	if _, _, err := backend.Extent(s.Store, 0); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("Extent after Close: %v, want ErrClosed", err)
	}
}

// testUsage checks "The bytes of space that the store takes": data takes space, and Discard takes
// no more.
func testUsage(t *testing.T, s *suite) {
	const n = 1 << 20
	usage := func() (used int64) {
		t.Helper()
		used, free, err := backend.Usage(s.Store)
		if err != nil || used < 0 || free < 0 {
			t.Fatalf("Usage is %d, %d, %v", used, free, err)
		}
		return used
	}
	if _, _, err := backend.Usage(s.Store); errors.Is(err, errors.ErrUnsupported) {
		return
	}
	before := usage()
	must(t, "WriteAt", s.WriteAt(pattern(n, 1), 0))
	must(t, "Sync", s.Sync()) // some file systems allocate space then
	full := usage()
	if full < n || full < before {
		t.Errorf("%d bytes with %d bytes of data, %d before", full, n, before)
	}
	must(t, "Discard", s.Discard(0, n))
	if used := usage(); used > full {
		t.Errorf("%d bytes after Discard, %d before", used, full)
	}
	must(t, "Close", s.Close())
	if _, _, err := backend.Usage(s.Store); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("Usage after Close: %v, want ErrClosed", err)
	}
}

// testPrefetch checks that Prefetch changes no data.
func testPrefetch(t *testing.T, s *suite) {
	p := pattern(100_000, 1)
	must(t, "WriteAt", s.WriteAt(p, 5000))
	for _, r := range append(ragged(s.info.Size), extent{0, s.info.Size}, extent{0, 0}, extent{s.info.Size, 0}) {
		must(t, fmt.Sprintf("Prefetch of %d bytes at %d", r.n, r.off), backend.Prefetch(s.Store, r.off, r.n))
	}
	s.want(t, 5000, p)
}

// splice returns what Splice gives for a range, by a pipe, or its error. before, if not nil, is called before the pipe is read.
func splice(t *testing.T, s backend.Splicer, off, n int64, before func()) ([]byte, error) {
	t.Helper()
	var fds [2]int
	must(t, "Pipe2", unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	defer unix.Close(fds[0])
	_, err := unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, 1<<20)
	must(t, "F_SETPIPE_SZ", err)
	err = s.Splice(fds[1], off, n)
	unix.Close(fds[1])
	if err != nil {
		return nil, err
	}
	if before != nil {
		before()
	}
	var got []byte
	for p := make([]byte, 64<<10); ; {
		k, err := unix.Read(fds[0], p)
		must(t, "Read", err)
		if k == 0 {
			return got, nil
		}
		got = append(got, p[:k]...)
	}
}

// testSplice checks that pipes get what the store has, and that this does not change after Freeze.
func testSplice(t *testing.T, s *suite) {
	sp, ok := s.Store.(backend.Splicer)
	if !ok || !sp.CanSplice() {
		return
	}
	content := pattern(300_000, 1)
	must(t, "WriteAt", s.WriteAt(content, 5000)) // the rest was never written
	want := make([]byte, s.span)
	copy(want[5000:], content)
	for _, r := range []extent{{0, s.span - 4096}, {5000, 300_000}, {4999, 2}, {512, 65536}, {s.span - 1, 1}, {s.span, 0}} {
		got, err := splice(t, sp, r.off, r.n, nil)
		if errors.Is(err, backend.ErrNoSplice) {
			if sp.CanSplice() {
				t.Error("CanSplice of a medium without splice")
			}
			return
		}
		must(t, "Splice", err)
		if !bytes.Equal(got, want[r.off:][:r.n]) {
			t.Errorf("Splice of %d bytes at %d gives other data", r.n, r.off)
		}
	}
	for _, r := range []extent{{-1, 1}, {s.info.Size - 1, 2}, {s.info.Size + 1, 0}, {0, -1}} {
		if _, err := splice(t, sp, r.off, r.n, nil); !errors.Is(err, backend.ErrRange) {
			t.Errorf("Splice of %d bytes at %d: %v, want ErrRange", r.n, r.off, err)
		}
	}
	// To the end, where the last page of the cache may be cut short.
	must(t, "WriteAt", s.WriteAt(pattern(5000, 3), s.info.Size-5000))
	for _, r := range []extent{{4096, 200_000}, {s.info.Size - 5000, 5000}} {
		if !sp.CanSplice() {
			break
		}
		before := make([]byte, r.n)
		must(t, "ReadAt", s.ReadAt(before, r.off))
		frozen := false
		got, err := splice(t, sp, r.off, r.n, func() {
			err := sp.Freeze(r.off, r.n)
			if frozen = err == nil; !frozen {
				t.Logf("Freeze of %d bytes at %d: %v", r.n, r.off, err)
			}
			after := make([]byte, r.n)
			must(t, "ReadAt", s.ReadAt(after, r.off))
			if !bytes.Equal(after, before) {
				t.Error("Freeze has changed the data")
			}
			must(t, "WriteAt", s.WriteAt(pattern(int(r.n), 2), r.off))
			s.want(t, r.off, pattern(int(r.n), 2))
		})
		must(t, "Splice", err)
		switch {
		case frozen && !bytes.Equal(got, before):
			t.Errorf("%d bytes at %d have changed after Freeze", r.n, r.off)
		case !frozen && sp.CanSplice():
			t.Error("CanSplice of a medium that does not freeze")
		}
	}
	if _, err := splice(t, sp, 0, 4096, nil); sp.CanSplice() && err != nil || !sp.CanSplice() && !errors.Is(err, backend.ErrNoSplice) {
		t.Errorf("Splice in the end: %v, and CanSplice %t", err, sp.CanSplice())
	}
	must(t, "Close", s.Close())
	if _, err := splice(t, sp, 0, 512, nil); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("Splice after Close: %v", err)
	}
	if err := sp.Freeze(0, 512); !errors.Is(err, backend.ErrClosed) {
		t.Errorf("Freeze after Close: %v", err)
	}
}

// testCopy checks Copy within the store and between it and another one.
func testCopy(t *testing.T, s *suite) {
	other, err := backend.OpenMemory(backend.MemoryConfig{Size: MinSize})
	must(t, "OpenMemory", err)
	defer other.Close()
	buf := make([]byte, 10_000)
	half := s.span / 2
	content := pattern(int(s.span), 1)
	for _, r := range []struct{ from, to, n int64 }{
		{0, half, half}, {half, 0, half}, {1, half + 3, half - 7}, {0, s.span - 1, 1}, {4096, half + 8192, 65536},
		{512, half, 512}, {5, 5 + half, 0}, {s.span, 0, 0}, {0, 4096, 4096},
	} {
		what := fmt.Sprintf("Copy of %d bytes from %d to %d", r.n, r.from, r.to)
		want := bytes.Clone(content)
		copy(want[r.to:], content[r.from:][:r.n])
		must(t, "WriteAt", s.WriteAt(content, 0))
		must(t, what, backend.Copy(s.Store, r.to, s.Store, r.from, r.n, buf))
		s.want(t, 0, want)

		must(t, "WriteAt", other.WriteAt(pattern(MinSize, 2), 0))
		must(t, what+" of another store", backend.Copy(s.Store, r.to, other, r.from, r.n, buf))
		copy(want[r.to:], pattern(MinSize, 2)[r.from:][:r.n])
		s.want(t, 0, want)

		must(t, what+" of another store", backend.Copy(other, r.to, s.Store, r.from, r.n, buf))
		out := pattern(MinSize, 2)
		copy(out[r.to:], want[r.from:][:r.n])
		(&suite{Store: other}).want(t, 0, out)
	}
	before := make([]byte, s.span)
	must(t, "ReadAt", s.ReadAt(before, 0))
	for _, r := range []struct{ from, to, n int64 }{
		{0, s.info.Size - 1, 2}, {s.info.Size - 1, 0, 2}, {-1, 0, 1}, {0, -1, 1}, {0, 0, -1}, {0, 512, math.MaxInt64},
		{math.MaxInt64, 0, 1},
	} {
		if err := backend.Copy(s.Store, r.to, s.Store, r.from, r.n, buf); !errors.Is(err, backend.ErrRange) {
			t.Errorf("Copy of %d bytes from %d to %d: %v, want ErrRange", r.n, r.from, r.to, err)
		}
	}
	s.want(t, 0, before)
	must(t, "Close", s.Close())
	for _, pair := range [][2]backend.Store{{s.Store, other}, {other, s.Store}, {s.Store, s.Store}} {
		if err := backend.Copy(pair[0], 0, pair[1], 512, 512, buf); !errors.Is(err, backend.ErrClosed) {
			t.Errorf("Copy after Close: %v, want ErrClosed", err)
		}
	}
}

// testClose checks "Calls after Close fail with ErrClosed, except Info."
func testClose(t *testing.T, s *suite) {
	must(t, "WriteAt", s.WriteAt(pattern(4096, 1), 0))
	must(t, "Close", s.Close())
	calls := map[string]func() error{
		"ReadAt": func() error { return s.ReadAt(make([]byte, 1), 0) },
		"Sync":   s.Sync,
		"Close":  s.Close,
	}
	for name, change := range changes {
		calls[name] = func() error { return change(s, 0, 512) }
		calls[name+" outside the store"] = func() error { return change(s, -1, 512) }
	}
	for name, call := range calls {
		if err := call(); !errors.Is(err, backend.ErrClosed) {
			t.Errorf("%s after Close: %v, want ErrClosed", name, err)
		}
	}
	if s.Info() != s.info {
		t.Errorf("Info after Close is %+v, before %+v", s.Info(), s.info)
	}
}

// testCloseUnderway checks "Calls in progress complete": they succeed or, if Close was first, fail
// with ErrClosed.
func testCloseUnderway(t *testing.T, s *suite) {
	var wg sync.WaitGroup
	started := make(chan struct{}, 8)
	for w := range 8 {
		wg.Go(func() {
			p := pattern(10_000, uint64(w))
			for i := 0; ; i++ {
				err := s.WriteAt(p, int64(w)*100_000)
				if err == nil && i%5 == 0 {
					err = s.Sync()
				}
				if err == nil {
					err = s.Discard(int64(w)*100_000, 10_000)
				}
				if err == nil {
					err = s.ReadAt(p, int64(w)*100_000)
				}
				if i == 0 {
					started <- struct{}{}
				}
				if err != nil {
					if !errors.Is(err, backend.ErrClosed) {
						t.Errorf("during Close: %v", err)
					}
					return
				}
			}
		})
	}
	for range 8 {
		<-started
	}
	must(t, "Close", s.Close())
	wg.Wait()
}

type extent struct{ off, n int64 }

// ragged returns ranges within [0, size) that begin and end at, before and after the blocks
// and pages of every implementation.
func ragged(size int64) []extent {
	rs := []extent{
		{0, 1}, {0, 512}, {0, 4096}, {511, 2}, {512, 512}, {4095, 2}, {4096, 8192}, {4097, 8190}, {1, 4095},
		{1000, 70_000}, {65_535, 2}, {65_536, 65_536}, {65_535, 65_538}, {65_537, 65_534}, {3, 300_001},
		{131_072, 262_144}, {131_072 - 512, 262_144 + 1024},
	}
	for _, n := range []int64{1, 511, 512, 4096, 4097, 65_536, 100_000} {
		rs = append(rs, extent{size - n, n})
	}
	return rs
}

// want fails unless the store has want at off.
func (s *suite) want(t *testing.T, off int64, want []byte) {
	t.Helper()
	got := bytes.Repeat([]byte{0xee}, len(want)) // so that what is not filled is seen
	must(t, "ReadAt", s.ReadAt(got, off))
	diff(t, fmt.Sprintf("%d bytes at %d", len(want), off), got, want)
}

func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// diff reports the first byte in which got and want differ.
func diff(t *testing.T, what string, got, want []byte) {
	t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("%s: byte %d is %#02x, want %#02x", what, i, got[i], want[i])
			return
		}
	}
}

// pattern returns n bytes that depend on the seed. None is zero, so that none equals an
// unwritten byte.
func pattern(n int, seed uint64) []byte { return fill(make([]byte, n), seed) }

func fill(p []byte, seed uint64) []byte {
	const odd = 0x0101010101010101 // sets the lowest bit of every byte
	x := seed*0x9e3779b97f4a7c15 + 1
	var word [8]byte
	for rest := p; len(rest) > 0; {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		binary.LittleEndian.PutUint64(word[:], x|odd)
		rest = rest[copy(rest, word[:]):]
	}
	return p
}
