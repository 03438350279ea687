package lun

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
)

const blockErase = "48 02 0000000000 0000 00"

var sanitizable = setup{size: 4 << 20, opt: Options{Sanitize: true}}

// overwrite runs SANITIZE OVERWRITE with that parameter list.
func (r *rig) overwrite(flags byte, list []byte) result {
	return r.run(fmt.Sprintf("48 %02x 0000000000 %04x 00", flags|1, len(list)), list)
}

// SBC-3, section 5.24.2.2.
func TestSanitizeOverwrite(t *testing.T) {
	for _, s := range []struct{ name, list, want string }{
		{"one pass", "01 00 0004 01020304", "01020304"},
		{"two passes, inverted", "82 00 0004 01020304", "fefdfcfb"},
		{"three passes, inverted", "83 00 0004 01020304", "01020304"},
		{"two passes", "02 00 0001 5a", "5a5a5a5a"},
		{"more list than pattern", "01 00 0001 5a ffff", "5a5a5a5a"},
	} {
		t.Run(s.name, func(t *testing.T) {
			r := newRig(t, sanitizable)
			r.good(extentCDB(0x8a, 0, 100, 3), pattern(3*512, 1))
			list := unhex(s.list)
			wantGood(t, s.name, r.overwrite(0, list))
			got := make([]byte, 4<<20)
			if err := r.store.ReadAt(got, 0); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, bytes.Repeat(unhex(s.want), 1<<20)) {
				t.Error("the medium does not hold the pattern")
			}
			passes := int(list[0] & 0x1f)
			if n := r.store.Calls(backendtest.Sync); n != passes {
				t.Errorf("%d syncs, want %d", n, passes)
			}
		})
	}
	// A pattern that does not divide the block restarts with each block.
	r := newRig(t, sanitizable)
	wantGood(t, "a pattern of 5", r.overwrite(0, unhex("01 00 0005 0102030405")))
	block := bytes.Repeat(unhex("0102030405"), 103)[:512]
	wantBytes(t, r.good(extentCDB(0x88, 0, 8190, 2), nil), append(bytes.Clone(block), block...))
	wantGood(t, "a pattern of a block", r.overwrite(0, append(unhex("01 00 0200"), block...)))

	for n := range 5 {
		wantField(t, r.overwrite(0, make([]byte, n)), 7, noField)
	}
	wantField(t, r.overwrite(0, make([]byte, 517)), 7, noField)
	wantListField(t, r.overwrite(0, unhex("00 00 0001 5a")), 0)                           // OVERWRITE COUNT
	wantListField(t, r.overwrite(0, unhex("01 00 0000 5a")), 2)                           // INITIALIZATION PATTERN LENGTH
	wantListField(t, r.overwrite(0, unhex("01 00 0002 5a")), 2)                           // more than the list has
	wantSense(t, r.run("48 01 0000000000 0008 00", unhex("01 00 0004")), 0x5, 0x0e, 0x03) // less than announced
	wantBytes(t, r.good(extentCDB(0x88, 0, 8190, 1), nil), block)                         // none of which did anything
	wantSense(t, newRig(t, setup{}).run(blockErase, nil), 0x5, 0x20, 0x00)                // not allowed
	wantSense(t, newRig(t, setup{opt: Options{Sanitize: true, ReadOnly: true}}).run(blockErase, nil), 0x7, 0x27, 0x00)
	wantField(t, newRig(t, setup{info: thick, opt: Options{Sanitize: true}}).run(blockErase, nil), 1, 4)
}

const cryptoErase = "48 03 0000000000 0000 00"

// SBC-3, sections 5.24.2.3 and 5.24.2.4: data are overwritten, holes take no space for that, and
// in the end the medium takes none.
func TestSanitizeErase(t *testing.T) {
	for _, cdb := range []string{blockErase, cryptoErase} {
		t.Run(cdb[:5], func(t *testing.T) { testErase(t, cdb) })
	}
	r := newRig(t, setup{info: thick, opt: Options{Sanitize: true}})
	r.good(extentCDB(0x8a, 0, 0, 2048), pattern(1<<20, 1))
	r.good(cryptoErase, nil)
	wantBytes(t, r.good(extentCDB(0x88, 0, 0, 2048), nil), make([]byte, 1<<20))
	if n := r.store.Calls(backendtest.Discard); n != 0 {
		t.Errorf("%d calls of Discard on a store that cannot give space back", n)
	}
	wantField(t, r.run("48 03 0000000000 0008 00", make([]byte, 8)), 8, 3) // PARAMETER LIST LENGTH
}

func testErase(t *testing.T, cdb string) {
	s := sanitizable
	s.size = 1 << 40
	r := newRig(t, s)
	for _, lba := range []uint64{0, 5000, 1<<31 - 3} {
		r.good(extentCDB(0x8a, 0, lba, 3), pattern(3*512, 1))
	}
	var written atomic.Int64
	r.store.Hook(func(op backendtest.Op, _, n int64) error {
		if op == backendtest.WriteAt {
			written.Add(n)
		}
		return nil
	})
	r.good(cdb, nil)
	if n := written.Load(); n != 3*64<<10 {
		t.Errorf("%d bytes were overwritten, want three pages", n)
	}
	for _, lba := range []uint64{0, 5000, 1<<31 - 3} {
		wantBytes(t, r.good(extentCDB(0x88, 0, lba, 3), nil), make([]byte, 3*512))
	}
	wantBytes(t, r.good("9e 12 0000000000000000 00001000 00 00", nil), unhex("00000014 00000000 0000000000000000 80000000 01 000000"))
}

// hold makes calls of op on the store wait until release is called.
func (r *rig) hold(op backendtest.Op) (held <-chan struct{}, release func()) {
	g := r.store.Shut(op)
	return g.Entered, g.Open
}

// SBC-3, section 4.11.3: while it runs, all commands except INQUIRY, REPORT LUNS and REQUEST
// SENSE fail, and no reset ends it.
func TestSanitizeInProgress(t *testing.T) {
	r := newRig(t, sanitizable)
	other := r.login()
	held, let := r.hold(backendtest.Sync)
	release := sync.OnceFunc(let)
	defer release()                                           // or a failure would leave Close waiting
	r.run("48 81 0000000000 0005 00", unhex("01 00 0001 5a")) // IMMED
	<-held
	check := func(n *Nexus) {
		t.Helper()
		for _, row := range rowsFor(r.unit) {
			res := doCDB(n, &r.c, [8]byte{}, rowCDB(row), rowData, all)
			if row.flags&absentLUN != 0 {
				wantGood(t, row.name, res)
				continue
			}
			wantSense(t, res, 0x2, 0x04, 0x1b) // SANITIZE IN PROGRESS
			if res.sense[15] != 0x80 || res.sense[16] < 0xbf {
				t.Fatalf("progress % x, want SKSV and more than three quarters", res.sense[15:])
			}
		}
	}
	check(r.nexus)
	check(other)
	in := r.good("03 00 0000 ff 00", nil)
	if want := unhex("70 00 02 00000000 0a 00000000 04 1b 00 80"); !bytes.Equal(in[:16], want) {
		t.Errorf("REQUEST SENSE: % x", in)
	}
	// SPC-4, section 4.5.2.4: in descriptor format the progress has a descriptor.
	desc := r.good("03 01 0000 ff 00", nil)
	if want := slices.Concat(unhex("72 02 04 1b 000000 08  02 06 0000 80"), in[16:18], []byte{0}); !bytes.Equal(desc, want) {
		t.Errorf("REQUEST SENSE with DESC: % x, want % x", desc, want)
	}
	r.nexus.ResetUnit([8]byte{}, true)
	for _, n := range []*Nexus{r.nexus, other} {
		wantSense(t, do(n, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x29, 0x03)
	}
	check(r.nexus)
	release()
	testkit.Eventually(t, "end of the sanitize", func() bool { return r.run("00", nil).status == StatusGood })
	wantBytes(t, r.good(extentCDB(0x88, 0, 0, 1), nil), bytes.Repeat([]byte{0x5a}, 512))
}

// A write that began before the sanitize leaves no data after it.
func TestEarlierWriteLeavesNothingAfterSanitize(t *testing.T) {
	r := newRig(t, sanitizable)
	other := r.login()
	c := Command{CDB: append(unhex(extentCDB(0x8a, 0, 0, 16)), make([]byte, 16)...)[:16]}
	if !other.Begin(&c) || !other.Consume(&c, pattern(4096, 1), 0) {
		t.Fatalf("sense % x", c.Sense())
	}
	held, release := r.hold(backendtest.Sync)
	r.run("48 82 0000000000 0000 00", nil)
	<-held
	if other.Consume(&c, pattern(4096, 1), 4096) {
		t.Error("a write goes on while the medium is being sanitized")
	}
	other.End(&c)
	if c.Status != StatusCheckCondition || !bytes.Equal(c.Sense()[2:3], []byte{2}) || c.Sense()[13] != 0x1b {
		t.Errorf("status %#x, sense % x", c.Status, c.Sense())
	}
	release()
	testkit.Eventually(t, "end of the sanitize", func() bool { return r.run("00", nil).status == StatusGood })
	wantBytes(t, r.good(extentCDB(0x88, 0, 0, 16), nil), make([]byte, 8192))
}

// SBC-3, section 4.11.4: after a failure the medium is not accessible until a sanitize succeeds
// or, if AUSE allowed it, EXIT FAILURE MODE.
func TestSanitizeFails(t *testing.T) {
	const exit = "48 1f 0000000000 0000 00"
	r := newRig(t, sanitizable)
	r.good(exit, nil) // nothing to leave
	fail := func(cdb string) {
		t.Helper()
		r.store.Fail(backendtest.Sync, syscall.EIO)
		wantSense(t, r.run(cdb, nil), 0x3, 0x31, 0x03) // SANITIZE COMMAND FAILED
		r.store.Fail(backendtest.Sync, nil)
		wantSense(t, r.run("00", nil), 0x3, 0x31, 0x03)
		wantSense(t, r.run(extentCDB(0x88, 0, 0, 1), nil), 0x3, 0x31, 0x03)
		if in := r.good("03 00 0000 ff 00", nil); in[2] != 0x3 || in[12] != 0x31 {
			t.Errorf("REQUEST SENSE: % x", in)
		}
	}
	fail(blockErase)
	wantField(t, r.run(exit, nil), 1, 4)                       // AUSE was not set
	wantField(t, r.run("48 22 0000000000 0000 00", nil), 1, 5) // nor can it be now
	r.good(blockErase, nil)
	r.good("00", nil)
	fail("48 22 0000000000 0000 00") // AUSE
	r.good(exit, nil)
	r.good("00", nil)
	// Each call that it makes can fail.
	for _, op := range []backendtest.Op{backendtest.Extent, backendtest.WriteAt, backendtest.Discard} {
		r.good(extentCDB(0x8a, 0, 0, 1), pattern(512, 1))
		r.store.Fail(op, errors.New("injected"))
		wantSense(t, r.run("48 22 0000000000 0000 00", nil), 0x3, 0x31, 0x03)
		r.store.Fail(op, nil)
		r.good(exit, nil)
	}
	r.store.Fail(backendtest.WriteAt, syscall.EIO)
	wantSense(t, r.overwrite(0, unhex("01 00 0001 5a")), 0x3, 0x31, 0x03)
}

// Close does not wait until all of a large medium is sanitized.
func TestCloseStopsSanitize(t *testing.T) {
	r := newRig(t, sanitizable)
	held, release := r.hold(backendtest.WriteAt)
	r.good("48 81 0000000000 0005 00", unhex("1f 00 0001 5a"))
	<-held
	closed := make(chan error)
	go func() { closed <- r.unit.Close() }()
	testkit.Eventually(t, "Close", r.unit.sanitizer.stop.Load)
	release()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if n := r.store.Calls(backendtest.WriteAt); n != 1 {
		t.Errorf("%d writes, want 1", n)
	}
	wantSense(t, r.run("48 82 0000000000 0000 00", nil), 0x4, 0x44, 0x00)
}

// SBC-3, section 4.11.3: the end of the command does not end the sanitize.
func TestAbortDoesNotEndSanitize(t *testing.T) {
	r := newRig(t, sanitizable)
	var abort atomic.Bool
	r.c.Abort = &abort
	held, release := r.hold(backendtest.Sync)
	ended := make(chan result)
	go func() { ended <- r.run(blockErase, nil) }()
	<-held
	abort.Store(true)
	wantSense(t, <-ended, 0xb, 0x00, 0x00)
	abort.Store(false)
	wantSense(t, r.run("00", nil), 0x2, 0x04, 0x1b)
	release()
	testkit.Eventually(t, "end of the sanitize", func() bool { return r.run("00", nil).status == StatusGood })
	abort.Store(true)
	wantSense(t, r.run(blockErase, nil), 0xb, 0x00, 0x00)
	abort.Store(false)
	r.good("00", nil) // it has not begun
}
