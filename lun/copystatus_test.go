package lun

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// copyList4 returns the parameter list of EXTENDED COPY(LID4) (SPC-4, section 6.3).
func copyList4(id uint32, usage, flags byte, cscds, segments []string) string {
	c, s := strings.Join(cscds, ""), strings.Join(segments, "")
	return fmt.Sprintf(`
		01                    # PARAMETER LIST FORMAT
		%02x                  # LIST ID USAGE
		0020                  # HEADER CSCD DESCRIPTOR LIST LENGTH
		0000000000000000000000
		%02x                  # G_SENSE, IMMED
		ff 000000             # HEADER CSCD DESCRIPTOR TYPE CODE
		%08x                  # LIST IDENTIFIER
		000000000000000000000000000000000000
		%04x %04x             # CSCD DESCRIPTOR LIST LENGTH, SEGMENT DESCRIPTOR LIST LENGTH
		0000                  # INLINE DATA LENGTH
		`, usage<<3, flags, id, len(unhex(c)), len(unhex(s))) + c + s
}

func (r *copyRig) copy4(list string) result {
	p := unhex(list)
	return do(r.nexus, &r.c, [8]byte{}, fmt.Sprintf("83 01 0000000000000000 %08x 00 00", len(p)), p, all)
}

// status4 executes RECEIVE COPY STATUS(LID4) with a Command of its own.
func (r *copyRig) status4(id uint32) result {
	var c Command
	return do(r.nexus, &c, [8]byte{}, fmt.Sprintf("84 05 %08x 00000000 000000ff 00 00", id), nil, all)
}

// abort4 executes COPY OPERATION ABORT with a Command of its own.
func (r *copyRig) abort4(id uint32) result {
	var c Command
	return do(r.nexus, &c, [8]byte{}, fmt.Sprintf("83 1c %08x 00000000 00000000 00 00", id), nil, all)
}

// awaitStatus4 polls until the copy has ended, and returns its status.
func (r *copyRig) awaitStatus4(id uint32) (b []byte) {
	r.t.Helper()
	testkit.Eventually(r.t, "the end of the copy", func() bool {
		res := r.status4(id)
		wantGood(r.t, "RECEIVE COPY STATUS(LID4)", res)
		b = res.in
		return b[5] != copyInForeground && b[5] != copyInBackground
	})
	return b
}

// SPC-4, sections 6.3 and 6.25: the copy, and its status once.
func TestExtendedCopyLID4(t *testing.T) {
	const count = 1100
	data := pattern(count*512, 1)
	r := newCopyRig(t, setup{}, setup{})
	r.good(extentCDB(0x8a, 0, 7, count), data)
	both := []string{cscdZero, cscdOne}
	wantGood(t, "EXTENDED COPY(LID4)", r.copy4(copyList4(0x12345678, 2, 0, both, []string{blocks(0, 1, count, 7, 2000), blocks(1, 0, 3, 2000, 2045)})))
	wantBytes(t, r.read(1, 2000, count), data)
	wantBytes(t, r.read(0, 2045, 3), data[:3*512])
	wantField(t, do(r.rig.nexus, &r.c, [8]byte{}, "84 05 12345678 00000000 000000ff 00 00", nil, all), 2, noField) // of another nexus
	res := r.status4(0x12345678)
	wantGood(t, "RECEIVE COPY STATUS(LID4)", res)
	wantBytes(t, res.in, unhex(`
		0000001c              # AVAILABLE DATA
		01                    # RESPONSE TO SERVICE ACTION
		01                    # completed without errors
		0002                  # OPERATION COUNTER
		fffffffe              # ESTIMATED STATUS UPDATE DELAY
		00                    # EXTENDED COPY COMPLETION STATUS: GOOD
		00 00                 # no sense data
		00                    # TRANSFER COUNT UNITS: bytes
		0000000000089e00      # 1103 blocks
		0002                  # SEGMENTS PROCESSED
		000000000000`))
	wantField(t, r.status4(0x12345678), 2, noField)

	// After an error, the sense data is that of the command.
	wantCopyAborted(t, r.copy4(copyList4(9, 0, 0, both, []string{blocks(0, 1, 8, 7, 0), blocks(0, 2, 8, 7, 0)})), 0x08, 0x04, 1)
	wantField(t, r.status4(9), 2, noField) // the list has an error: no copy began
	r.other.store.Fail(backendtest.WriteAt, syscall.EIO)
	wantCopyAborted(t, r.copy4(copyList4(9, 0, 0, both, []string{blocks(0, 0, 8, 7, 100), blocks(0, 1, 8, 7, 0)})), 0x0d, 0x01, 1)
	wantBytes(t, r.status4(9).in, unhex(`
		00000030 01 02 0001 fffffffe
		02                    # CHECK CONDITION
		14 12                 # sense data, padded to a multiple of four bytes
		00 0000000000001000 0001 000000000000
		70 00 0a 00000000 0a 00000001 0d 01 00 000000 0000`))

	// Identifiers of one byte and of four are the same to RECEIVE COPY STATUS.
	wantGood(t, "LID4", r.copy4(copyList4(5, 2, 0, both, []string{blocks(0, 0, 8, 7, 100)})))
	wantBytes(t, do(r.nexus, &r.c, [8]byte{}, "84 00 05 00000000000000 000000ff 00 00", nil, all).in, unhex("00000008 01 0001 00 00001000"))
	wantGood(t, "without an identifier", r.copy4(copyList4(0, 3, 0, both, []string{blocks(0, 0, 8, 7, 100)})))
	wantGood(t, "PARAMETER LIST LENGTH 0", do(r.nexus, &r.c, [8]byte{}, "83 01 0000000000000000 00000000 00 00", nil, all))
}

func TestExtendedCopyLID4List(t *testing.T) {
	r := newCopyRig(t, setup{}, setup{})
	seg := []string{blocks(0, 0, 8, 0, 100)}
	good := copyList4(1, 2, 0, []string{cscdZero}, seg)
	change := func(at int, b ...byte) string {
		p := unhex(good)
		copy(p[at:], b)
		return fmt.Sprintf("%x", p)
	}
	for _, s := range []struct {
		name, list string
		field      int // of the list, or 0 for PARAMETER LIST LENGTH ERROR, or -1
	}{
		{"half a header", fmt.Sprintf("%x", unhex(good)[:47]), 0},
		{"HEADER CSCD DESCRIPTOR LIST LENGTH", change(2, 0, 0x1f), 2},
		{"G_SENSE", copyList4(1, 2, 2, []string{cscdZero}, seg), 15},
		{"HEADER CSCD DESCRIPTOR TYPE CODE", change(16, 0xe4), 16},
		{"LIST ID USAGE 01b", copyList4(1, 1, 0, []string{cscdZero}, seg), 1},
		{"usage 11b with an identifier", copyList4(1, 3, 0, []string{cscdZero}, seg), 1},
		{"IMMED without an identifier", copyList4(0, 3, 1, []string{cscdZero}, seg), 1},
		{"CSCD list length", change(42, 0, 0x1f), 42},
		{"a CSCD that the list has not", change(42, 0, 0x60), 0},
		{"more than the maximum", change(44, 0xff, 0xff), 0},
		{"half a segment", change(44, 0, 0x1b), 0},
	} {
		t.Run(s.name, func(t *testing.T) {
			res := r.copy4(s.list)
			if s.field == 0 {
				wantSense(t, res, 5, 0x1a, 0)
			} else {
				wantListField(t, res, s.field)
			}
			if n := r.store.Calls(backendtest.WriteAt) + r.store.Calls(backendtest.Discard); n != 0 {
				t.Error("something was written")
			}
		})
	}
	wantListField(t, r.copy4(change(0, 0)), 0)
	wantSense(t, r.copy4(change(46, 0, 4)), 5, 0x26, 0x0b)
	wantGood(t, "the list that the others are made of", r.copy4(good))
}

// A heldCopy is a copy of 8 MiB within LUN 0 to LBA 65536 that has written its first step and waits within the second one.
type heldCopy struct {
	*copyRig
	let    chan struct{}
	held   atomic.Bool  // the second step is in the store
	octets func() int64 // written
}

func holdCopy(t *testing.T, two setup) *heldCopy {
	r := newCopyRig(t, setup{size: 64 << 20}, two)
	wantGood(t, "WRITE(16)", do(r.nexus, &r.c, [8]byte{}, extentCDB(0x8a, 0, 0, 16384), pattern(8<<20, 1), all))
	h := &heldCopy{copyRig: r, let: make(chan struct{})}
	var mu sync.Mutex
	var octets int64
	h.octets = func() int64 {
		mu.Lock()
		defer mu.Unlock()
		return octets
	}
	r.store.Hook(func(op backendtest.Op, off, n int64) error {
		if op == backendtest.WriteAt && off >= 32<<20 {
			if off >= 32<<20+maxCopyStep {
				h.held.Store(true)
				<-h.let
			}
			mu.Lock()
			octets += n
			mu.Unlock()
		}
		return nil
	})
	return h
}

func (h *heldCopy) list(flags byte) string {
	return copyList4(7, 2, flags, []string{cscdZero, cscdOne}, []string{blocks(0, 0, 16384, 0, 65536)})
}

func (h *heldCopy) release() {
	select {
	case <-h.let:
	default:
		close(h.let)
	}
}

// begin begins the copy with IMMED, and returns while its second step is in progress.
func (h *heldCopy) begin() {
	h.t.Helper()
	h.t.Cleanup(h.release)
	wantGood(h.t, "EXTENDED COPY(LID4) with IMMED", h.copy4(h.list(1)))
	testkit.Eventually(h.t, "the second step", h.held.Load)
}

// With IMMED, GOOD comes before the copy (SPC-4, section 6.3), and RECEIVE COPY STATUS(LID4) follows it.
func TestExtendedCopyInBackground(t *testing.T) {
	h := holdCopy(t, setup{})
	h.begin()
	testkit.Eventually(t, "the status of the first step", func() bool { return h.status4(7).in[7] == 1 })
	wantBytes(t, h.status4(7).in, unhex(`
		0000001c 01
		12                    # in progress in the background
		0001
		00000064              # ESTIMATED STATUS UPDATE DELAY: 100 ms
		00 00 00 00 0000000000100000 0000 000000000000`))
	wantSense(t, h.copy4(h.list(1)), 0x5, 0x00, 0x16) // OPERATION IN PROGRESS
	if got := h.unit.Busy(); got != "EXTENDED COPY(LID4) is in progress" {
		t.Errorf("the unit is busy with %q", got)
	}
	h.release()
	wantBytes(t, h.awaitStatus4(7), unhex("0000001c 01 01 0008 fffffffe 00 00 00 00 0000000000800000 0001 000000000000"))
	testkit.Eventually(t, "the unit at rest", func() bool { return h.unit.Busy() == "" })
	h.store.Hook(nil)
	if !bytes.Equal(h.read(0, 65536, 16384), pattern(8<<20, 1)) {
		t.Error("the copy differs")
	}
	wantField(t, h.status4(7), 2, noField)
}

// After the answer to a command or function that ends a copy in the background, the copy writes nothing more: COPY OPERATION
// ABORT, LOGICAL UNIT RESET, the end of the I_T nexus, and PREEMPT AND ABORT. A copy of a neighbour continues.
func TestExtendedCopyInBackgroundEnds(t *testing.T) {
	for _, s := range []struct {
		name string
		end  func(h *heldCopy)
		ends bool
	}{
		{"COPY OPERATION ABORT", func(h *heldCopy) { wantGood(t, "COPY OPERATION ABORT", h.abort4(7)) }, true},
		{"LOGICAL UNIT RESET", func(h *heldCopy) { h.nexus.ResetUnit([8]byte{}, true) }, true},
		{"the end of the nexus", func(h *heldCopy) { h.nexus.Close() }, true},
		{"PREEMPT AND ABORT", func(h *heldCopy) {
			a := h.inv.NewNexus(portA)
			on := func(n *Nexus, sa, typ byte, list []byte) {
				var c Command
				wantGood(t, "PERSISTENT RESERVE OUT", do(n, &c, [8]byte{}, fmt.Sprintf("5f %02x %02x 0000 %08x 00", sa, typ, len(list)), list, all))
			}
			do(a, new(Command), [8]byte{}, "00", nil, all)
			on(h.nexus, prRegister, 0, prList(0, keyB, 0))
			on(a, prRegister, 0, prList(0, keyA, 0))
			on(a, prReserve, 5, prList(keyA, 0, 0))
			on(a, prPreemptAndAbort, 5, prList(keyA, keyB, 0))
		}, true},
		{"COPY OPERATION ABORT of another nexus", func(h *heldCopy) {
			wantField(t, do(h.rig.nexus, new(Command), [8]byte{}, "83 1c 00000007 00000000 00000000 00 00", nil, all), 2, noField)
		}, false},
		{"COPY OPERATION ABORT of another list", func(h *heldCopy) { wantField(t, h.abort4(8), 2, noField) }, false},
		{"the end of another nexus", func(h *heldCopy) { h.rig.nexus.Close() }, false},
	} {
		t.Run(s.name, func(t *testing.T) {
			h := holdCopy(t, setup{})
			h.begin()
			nexus := h.nexus.list()[0]
			ended := make(chan int64)
			go func() {
				s.end(h)
				ended <- h.octets()
			}()
			testkit.Eventually(t, "the request", func() bool {
				nexus.copies.mu.Lock()
				defer nexus.copies.mu.Unlock()
				return !s.ends || nexus.copies.of[7] == nil || nexus.copies.of[7].stop.Load()
			})
			h.release()
			written := <-ended
			if !s.ends {
				wantBytes(t, h.awaitStatus4(7)[4:6], []byte{1, copyGood})
				return
			}
			testkit.Eventually(t, "the end of the copy", func() bool {
				nexus.copies.mu.Lock()
				defer nexus.copies.mu.Unlock()
				return nexus.copies.background == 0
			})
			if got := h.octets(); got != written || got >= 8<<20 {
				t.Errorf("%d bytes were written, %d of them after the answer", got, got-written)
			}
			nexus.copies.mu.Lock()
			got := nexus.copies.of[7].status
			nexus.copies.mu.Unlock()
			if got != copyTerminated {
				t.Errorf("COPY OPERATION STATUS %#x, want %#x", got, copyTerminated)
			}
		})
	}
}

// COPY OPERATION ABORT ends a copy whose command is in progress. It ends with COPY ABORTED.
func TestCopyOperationAbort(t *testing.T) {
	h := holdCopy(t, setup{})
	list := unhex(h.list(0))
	ended := make(chan result)
	go func() {
		var c Command
		ended <- do(h.nexus, &c, [8]byte{}, fmt.Sprintf("83 01 0000000000000000 %08x 00 00", len(list)), list, all)
	}()
	testkit.Eventually(t, "the second step", h.held.Load)
	aborted := make(chan result)
	go func() { aborted <- h.abort4(7) }()
	l := &h.nexus.list()[0].copies
	testkit.Eventually(t, "the request", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.of[7].stop.Load()
	})
	h.release()
	wantGood(t, "COPY OPERATION ABORT", <-aborted)
	wantSense(t, <-ended, 0xa, 0x00, 0x06)
	if n := h.octets(); n != 2*maxCopyStep {
		t.Errorf("%d bytes were written, want %d", n, 2*maxCopyStep)
	}
	b := h.status4(7).in
	wantBytes(t, b[:16], unhex("0000001c 01 60 0002 fffffffe 40 00 00 00")) // TASK ABORTED
	wantField(t, h.abort4(7), 2, noField)
}

// The target keeps a bounded number of statuses, the last ones, and runs a bounded number of copies in the background.
func TestCopiesAreBounded(t *testing.T) {
	h := holdCopy(t, setup{})
	one := func(id uint32, flags byte) string {
		return copyList4(id, 2, flags, []string{cscdZero}, []string{blocks(0, 0, 1, 0, 20000)})
	}
	for id := uint32(1000); id < 1000+maxCopies+10; id++ {
		wantGood(t, "EXTENDED COPY", h.copy4(one(id, 0)))
	}
	if n := len(h.nexus.list()[0].copies.of); n != maxCopies {
		t.Errorf("%d statuses, want %d", n, maxCopies)
	}
	wantField(t, h.status4(1005), 2, noField)
	wantGood(t, "the status of a late copy", h.status4(1000+maxCopies+9))

	t.Cleanup(h.release)
	for id := range uint32(backgroundPerNexus) {
		list := copyList4(100+id, 2, 1, []string{cscdZero}, []string{blocks(0, 0, 4096, 0, 65536)})
		wantGood(t, "EXTENDED COPY with IMMED", h.copy4(list))
	}
	if n := inBackground.Load(); n != backgroundPerNexus {
		t.Errorf("%d copies in the background, want %d", n, backgroundPerNexus)
	}
	wantGood(t, "EXTENDED COPY with IMMED", h.copy4(one(99, 1))) // ends before its status
	wantBytes(t, h.status4(99).in[4:6], []byte{1, copyGood})
	h.release()
	testkit.Eventually(t, "the end of all", func() bool { return inBackground.Load() == 0 })

	l := &h.nexus.list()[0].copies
	for id := range uint32(maxCopies - 1) { // one is from login
		if k := l.begin(1<<20+id, &copyStatus{}, &Command{}); k != condNone {
			t.Fatalf("copy %d: %v", id, k)
		}
	}
	wantSense(t, h.copy4(one(1, 0)), 0x5, 0x55, 0x03)
}

// A segment whose ends are as far from blocks of the file system begins with what is before the first one.
func TestAlignShared(t *testing.T) {
	for _, s := range [][4]int64{{0, 0, 100 << 10, 100 << 10}, {512, 512, 100 << 10, 3584}, {512, 4096 + 512, 1024, 1024}, {512, 1024, 8192, 8192}} {
		if got := alignShared(s[0], s[1], s[2]); got != s[3] {
			t.Errorf("%d to %d: %d bytes first, want %d", s[0], s[1], got, s[3])
		}
	}
}

// Without a write cache, RECEIVE COPY STATUS counts only bytes that are durable: a segment whose sync fails has written nothing,
// and the steps before an error count if they were synced.
func TestCopyStatusCountsDurableBytes(t *testing.T) {
	fails := func(op backendtest.Op, from int64, err error) func(backendtest.Op, int64) error {
		return func(o backendtest.Op, off int64) error {
			if o == op && off >= from {
				return err
			}
			return nil
		}
	}
	fails2 := func(op backendtest.Op, off int64) error {
		return cmp.Or(fails(backendtest.Sync, 0, syscall.EIO)(op, off), fails(backendtest.WriteAt, 1<<20, syscall.EIO)(op, off))
	}
	for name, s := range map[string]struct {
		hook     func(op backendtest.Op, off int64) error // of the destination, from the second segment on
		end      func(r *copyRig)
		octets   int64
		segments int
		syncs    int
	}{
		"all":                  {func(backendtest.Op, int64) error { return nil }, nil, 4096 + 1<<20 + 8192, 2, 2},
		"a sync fails":         {fails(backendtest.Sync, 0, syscall.EIO), nil, 4096, 1, 2},
		"a write fails":        {fails(backendtest.WriteAt, 1<<20, syscall.EIO), nil, 4096 + 1<<20, 1, 2},
		"a first write fails":  {fails(backendtest.WriteAt, 0, syscall.EIO), nil, 4096, 1, 1},
		"a write and a sync":   {fails2, nil, 4096, 1, 2},
		"COPY OPERATION ABORT": {nil, func(r *copyRig) { go r.abort4(9) }, 4096 + 1<<20, 1, 2},
	} {
		t.Run(name, func(t *testing.T) {
			r := newCopyRig(t, setup{size: 4 << 20}, setup{info: volatile})
			r.good(extentCDB(0x8a, 0, 0, 4096), pattern(2<<20, 1))
			to := r.other.unit
			to.mode.Store(to.mode.Load() &^ modeWCE)
			var syncs atomic.Int32
			r.other.store.Hook(func(op backendtest.Op, off, n int64) error {
				if op == backendtest.Sync {
					syncs.Add(1)
				}
				switch l := &r.nexus.list()[0].copies; {
				case syncs.Load() == 0 || op == backendtest.Sync && syncs.Load() == 1:
				case s.hook != nil:
					return s.hook(op, off)
				case off == 0 && op == backendtest.WriteAt:
					s.end(r)
					testkit.Eventually(t, "COPY OPERATION ABORT", func() bool {
						l.mu.Lock()
						defer l.mu.Unlock()
						return l.of[9].stop.Load()
					})
				}
				return nil
			})
			res := r.copy4(copyList4(9, 2, 0, []string{cscdZero, cscdOne}, []string{blocks(0, 1, 8, 0, 4000), blocks(0, 1, 2048+16, 0, 0)}))
			if (res.status == StatusGood) != (s.segments == 2) {
				t.Errorf("status %#x, sense % x", res.status, res.sense)
			}
			b := r.status4(9).in
			if got := int64(binary.BigEndian.Uint64(b[16:])); got != s.octets {
				t.Errorf("TRANSFER COUNT %d, want %d", got, s.octets)
			}
			if got := int(binary.BigEndian.Uint16(b[24:])); got != s.segments {
				t.Errorf("SEGMENTS PROCESSED %d, want %d", got, s.segments)
			}
			if got := int(syncs.Load()); got != s.syncs {
				t.Errorf("%d syncs, want %d", got, s.syncs)
			}
		})
	}
}
