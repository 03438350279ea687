package lun

import (
	"bytes"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// An aborted command stops between two steps, and leaves untouched what it has not begun (SAM-5,
// section 7.3).
func TestAbortedCommandStopsBetweenSteps(t *testing.T) {
	const size = 64 << 20
	unmap := unhex("0026 0020 00000000  0000000000000000 00010000 00000000 0000000000010000 00010000 00000000")
	for _, s := range []struct {
		name, cdb string
		out       []byte
		op        backendtest.Op
		calls     int // of op, when nobody aborts
	}{
		{"WRITE SAME", extentCDB(0x93, 0, 0, size/512), pattern(512, 1), backendtest.WriteAt, size / (256 << 10)},
		{"WRITE SAME of zeros", extentCDB(0x93, 0, 0, size/512), make([]byte, 512), backendtest.Zero, size / stepLength},
		{"WRITE SAME with UNMAP", extentCDB(0x93, 8, 0, size/512), make([]byte, 512), backendtest.Discard, size / stepLength},
		{"UNMAP", "42 00 00000000 00 0028 00", unmap, backendtest.Discard, 2 * 65536 * 512 / stepLength},
		{"VERIFY", extentCDB(0x8f, 0, 0, 65536), nil, backendtest.ReadAt, 65536 * 512 / (256 << 10)},
		{"VERIFY with BYTCHK 11b", extentCDB(0x8f, 6, 8192, 64), make([]byte, 512), backendtest.ReadAt, 64},
		{"WRITE AND VERIFY", extentCDB(0x8e, 0, 0, 2), pattern(1024, 2), backendtest.ReadAt, 1},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newRig(t, setup{size: size})
			r.good(s.cdb, s.out)
			if n := r.store.Calls(s.op); n != s.calls {
				t.Fatalf("%d calls of %v, want %d", n, s.op, s.calls)
			}
			var abort atomic.Bool
			r.c.Abort = &abort
			n := 0
			r.store.Hook(func(op backendtest.Op, _, _ int64) error {
				if op == s.op {
					n++
					abort.Store(true)
				}
				return nil
			})
			res := r.run(s.cdb, s.out)
			if s.calls > 1 {
				wantSense(t, res, 0xb, 0x00, 0x00)
			}
			if n != 1 {
				t.Errorf("%d calls of %v after the abort", n-1, s.op)
			}
			res = r.run(s.cdb, s.out) // aborted before it begins
			if n != 1 {
				t.Errorf("%d calls of %v of a command that was aborted before", n-1, s.op)
			}
			wantSense(t, res, 0xb, 0x00, 0x00)
		})
	}
}

// A range erased piece by piece is as free as one erased at once, whatever the granularity of the
// store.
func TestEraseInStepsFreesAsMuch(t *testing.T) {
	for _, g := range []struct{ granularity, alignment int64 }{
		{64 << 10, 0}, {64 << 10, 32256}, {192 << 10, 0}, {192 << 10, 512}, {24 << 20, 0}, {64 << 20, 1 << 20}, {64 << 10, backend.DiscardUnaligned},
	} {
		t.Run(fmt.Sprint(g.granularity, g.alignment), func(t *testing.T) {
			r := newRig(t, setup{size: 256 << 20, info: func(i *backend.Info) {
				i.DiscardGranularity, i.DiscardAlignment = uint32(g.granularity), g.alignment
			}})
			var at int64 = 512
			r.store.Hook(func(op backendtest.Op, off, n int64) error {
				if op == backendtest.Discard {
					if off != at || off != 512 && (off-max(g.alignment, 0))%g.granularity != 0 {
						t.Errorf("[%d, %d) after %d", off, off+n, at)
					}
					at = off + n
				}
				return nil
			})
			r.good(extentCDB(0x93, 8, 1, 400000), make([]byte, 512))
			if at != 400001*512 {
				t.Errorf("erased up to %d", at)
			}
		})
	}
}

// WRITE SAME writes its whole range, also where steps meet.
func TestWriteSameInStepsWritesAll(t *testing.T) {
	r := newRig(t, setup{size: 40 << 20})
	block := pattern(512, 9)
	r.good(extentCDB(0x93, 0, 3, 70000), block)
	r.good(extentCDB(0x93, 0, 5, 69990), make([]byte, 512))
	got := make([]byte, 40<<20)
	if err := r.store.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	want := make([]byte, 40<<20)
	for _, lba := range []int{3, 4, 69995, 69996, 69997, 69998, 69999, 70000, 70001, 70002} {
		copy(want[lba*512:], block)
	}
	if !bytes.Equal(got, want) {
		t.Error("the medium differs")
	}
}
