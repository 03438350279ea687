package lun

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/lun/state"
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

// A command that began before a SANITIZE or FORMAT UNIT changes nothing afterwards, also if that is over when its next data come. It
// ends with ABORTED COMMAND, so that initiators send it again. A command for a neighbour is not affected.
func TestWritesEndWithErasure(t *testing.T) {
	block := pattern(512, 1)
	for erase, cdb := range map[string]string{"SANITIZE": cryptoErase, "FORMAT UNIT": "04 00 0000 00 00"} {
		for _, s := range []struct {
			cdb     string
			out     []byte
			first   int // bytes that come before
			protect protection.Type
		}{
			{cdb: extentCDB(0x8a, 0, 0, 16), out: pattern(8192, 1), first: 4096},
			{cdb: extentCDB(0x2a, 0, 0, 16), out: pattern(8192, 1)},
			{cdb: extentCDB(0x8a, fua, 0, 16), out: pattern(8192, 1), first: 4096},
			{cdb: extentCDB(0x8e, 2, 0, 16), out: pattern(8192, 1), first: 4096}, // WRITE AND VERIFY
			{cdb: extentCDB(0x8b, 0, 0, 16), out: pattern(8192, 1), first: 4096}, // ORWRITE
			{cdb: extentCDB(0x89, 0, 0, 1), out: append(make([]byte, 512), block...)},
			{cdb: extentCDB(0x93, 0, 0, 16), out: block},
			{cdb: extentCDB(0x93, 0, 0, 16), out: make([]byte, 512)},
			{cdb: "42 00 00000000 00 0018 00", out: unhex("0016 0010 00000000 0000000000000000 00000010 00000000")},
			{cdb: "9c 00 0000000000000000 0000 0008 00 00", out: pattern(4096, 1)},
			{cdb: extentCDB(0x8a, 1<<5, 0, 16), out: onWire(pattern(8192, 1), 512, 0, own), first: 4096, protect: protection.Type1},
			{cdb: extentCDB(0x93, 1<<5, 0, 16), out: onWire(block, 512, 0, own), protect: protection.Type1},
		} {
			t.Run(fmt.Sprintf("%s, %.5s", erase, s.cdb), func(t *testing.T) {
				r := newRig(t, setup{opt: everything, protect: s.protect, info: func(i *backend.Info) { i.AtomicWrite = 4096 }})
				other := newRig(t, setup{opt: everything, protect: s.protect, info: func(i *backend.Info) { i.AtomicWrite = 4096 }})
				other.unit.opt.Identity = state.Identity{NAA: [8]byte{0x3f, 7: 0xee}, Serial: "3f000000000000ee"}
				r.add(1, other.unit)
				n := r.login()
				begin := func(lun byte) *Command {
					c := &Command{LUN: [8]byte{0, lun}, CDB: append(unhex(s.cdb), make([]byte, 16)...)[:16]}
					if !n.Begin(c) || s.first > 0 && !n.Consume(c, s.out[:s.first], 0) {
						t.Fatalf("sense % x", c.Sense())
					}
					return c
				}
				end := func(c *Command) result {
					n.Consume(c, s.out[s.first:], uint64(s.first))
					n.End(c)
					return result{status: c.Status, sense: bytes.Clone(c.Sense())}
				}
				if s.protect != protection.None {
					cdb = strings.Replace(cdb, "04 00", "04 80", 1) // FMTPINFO
				}
				hit, neighbour := begin(0), begin(1)
				wantGood(t, erase, do(r.nexus, new(Command), [8]byte{}, cdb, nil, all))
				if r.unit.isSanitizing() {
					t.Fatal("the erasure is in progress")
				}
				wantSense(t, end(hit), 0xb, 0, 0)
				wantBytes(t, r.good(extentCDB(0x88, 0, 0, 32), nil), make([]byte, 32*512))
				wantGood(t, "the neighbour", end(neighbour))
				wantGood(t, "the command again", end(begin(0)))
				at := func(lun byte) []byte {
					res := do(n, new(Command), [8]byte{0, lun}, extentCDB(0x88, 0, 0, 32), nil, all)
					wantGood(t, "READ(16)", res)
					return res.in
				}
				wantBytes(t, at(0), at(1))
			})
		}
	}
}

// A command that began before a SANITIZE or FORMAT UNIT reads nothing afterwards, or its initiator would get old and erased data in one
// answer. It ends with ABORTED COMMAND; while the erasure runs, with NOT READY. A command for a neighbour is not affected.
func TestReadsEndWithErasure(t *testing.T) {
	const read16, verify16 = 0x88, 0x8f
	data := pattern(8192, 1)
	wire := onWire(data, 512, 0, own)
	produce := func(n *Nexus, c *Command, p []byte, at int) bool { return n.Produce(c, p, uint64(at)) }
	consume := func(n *Nexus, c *Command, p []byte, at int) bool { return n.Consume(c, p, uint64(at)) }
	lend := func(n *Nexus, c *Command, p []byte, at int) bool {
		list, ok := n.Lend(c, uint64(at), uint64(len(p)), nil)
		at = 0
		for _, l := range list {
			at += copy(p[at:], l.Data)
			l.Return()
		}
		return ok
	}
	for erase, cdb := range map[string]string{"SANITIZE": cryptoErase, "FORMAT UNIT": "04 00 0000 00 00"} {
		for _, s := range []struct {
			name    string
			cdb     string
			step    func(n *Nexus, c *Command, p []byte, at int) bool // moves p, which is at that offset of the data; nil: the command moves no data
			data    []byte
			protect protection.Type
		}{
			{"READ", extentCDB(read16, 0, 0, 16), produce, data, protection.None},
			{"READ that lends", extentCDB(read16, 0, 0, 16), lend, data, protection.None},
			{"READ with protection information", extentCDB(read16, 1<<5, 0, 16), produce, wire, protection.Type1},
			{"VERIFY", extentCDB(verify16, 0, 0, 16), nil, nil, protection.None},
			{"VERIFY of data", extentCDB(verify16, 2, 0, 16), consume, data, protection.None},
			{"VERIFY with protection information", extentCDB(verify16, 1<<5, 0, 16), nil, nil, protection.Type1},
			{"VERIFY of data with protection information", extentCDB(verify16, 1<<5|2, 0, 16), consume, wire, protection.Type1},
		} {
			t.Run(erase+", "+s.name, func(t *testing.T) {
				r := newRig(t, setup{opt: everything, protect: s.protect})
				other := newRig(t, setup{opt: everything, protect: s.protect})
				other.unit.opt.Identity = state.Identity{NAA: [8]byte{0x3f, 7: 0xee}, Serial: "3f000000000000ee"}
				for _, r := range []*rig{r, other} {
					r.unit.lender = r.store.Store.(backend.Lender) // the store of a rig lends nothing itself
				}
				r.add(1, other.unit)
				n := r.login()
				for id := range byte(2) {
					if s.protect == protection.None {
						wantGood(t, "WRITE(16)", do(n, new(Command), [8]byte{0, id}, extentCDB(0x8a, 0, 0, 16), data, all))
					} else {
						wantGood(t, "WRITE(16)", do(n, new(Command), [8]byte{0, id}, extentCDB(0x8a, 1<<5, 0, 16), wire, all))
					}
				}
				half := len(s.data) / 2
				step := func(c *Command, from, to int) {
					t.Helper()
					if s.step == nil {
						return
					}
					p := bytes.Clone(s.data[from:to])
					if s.step(n, c, p, from) && !bytes.Equal(p, s.data[from:to]) {
						t.Error("GOOD, with other data than was written")
					}
				}
				begin := func(id byte) *Command {
					c := &Command{LUN: [8]byte{0, id}, CDB: append(unhex(s.cdb), make([]byte, 16)...)[:16]}
					if !n.Begin(c) {
						t.Fatalf("sense % x", c.Sense())
					}
					step(c, 0, half)
					return c
				}
				end := func(c *Command) result {
					step(c, half, len(s.data))
					n.End(c)
					return result{status: c.Status, sense: bytes.Clone(c.Sense())}
				}
				erasure := cdb
				if s.protect != protection.None {
					erasure = strings.Replace(erasure, "04 00", "04 80", 1) // FMTPINFO
				}
				during, after, neighbor := begin(0), begin(0), begin(1)
				held, let := r.hold(backendtest.Sync)
				release := sync.OnceFunc(let)
				defer release() // or a failure would leave Close waiting
				ended := make(chan result, 1)
				go func() { ended <- do(r.nexus, new(Command), [8]byte{}, erasure, nil, all) }()
				<-held
				progress := end(during)
				if progress.status != StatusCheckCondition || progress.sense[2] != keyNotReady || progress.sense[12] != 0x04 {
					t.Errorf("during the erasure: status %#x, sense % x; want NOT READY, in progress", progress.status, progress.sense)
				}
				release()
				wantGood(t, erase, <-ended)
				if r.unit.isSanitizing() {
					t.Fatal("the erasure is in progress")
				}
				wantSense(t, end(after), 0xb, 0, 0)
				wantGood(t, "the neighbor", end(neighbor))
				wantGood(t, "TEST UNIT READY", do(n, new(Command), [8]byte{}, "00", nil, all))
			})
		}
	}
}

// A SANITIZE of the source ends all tokens before it bars readers. So a WRITE USING TOKEN that reads in between has data that nothing
// has changed, and then knows why it may write no more: TOKEN CANCELLED.
func TestTokensEndBeforeSanitizeBarsReaders(t *testing.T) {
	r := newCountRig(t, setup{}, setup{opt: everything})
	first := r.odxRig.token(1, blockRange{0, 1}) // ends first: the newest of those that begin at the same LBA
	tokens, third := r.tokens(), r.third()
	before, used := tokens.of[secret(first[tokenRandom:][:secretLen])], tokens.of[secret(r.token[tokenRandom:][:secretLen])]
	release := sync.OnceFunc(tokens.mu.Unlock)
	sanitized := make(chan result, 1)
	reads := 0
	r.other.store.Hook(func(op backendtest.Op, _, _ int64) error {
		if op != backendtest.ReadAt {
			return nil
		}
		switch reads++; reads {
		case 1: // of the first step. With the lock, the SANITIZE stops within the end of the first token.
			tokens.mu.Lock()
			go func() { sanitized <- do(r.neighbour, new(Command), [8]byte{0, 1}, cryptoErase, nil, all) }()
			testkit.Eventually(t, "the end of the first token", func() bool { return before.ended.Load() != 0 })
			if used.ended.Load() != 0 {
				t.Error("the SANITIZE did not stop between both tokens")
			}
			if res := do(third, new(Command), [8]byte{0, 1}, "00", nil, all); res.status != StatusGood {
				t.Errorf("the SANITIZE bars readers before it has ended all tokens: % x", res.sense)
				release()
			}
		case 2: // of the second step, which may still read
			release()
			testkit.Eventually(t, "the end of the other token", func() bool { return used.ended.Load() != 0 })
		}
		return nil
	})
	res := writeToken(r.nexus, 0, 9, 0, r.token, blockRange{0, 2048})
	wantTransfer(t, res, condTokenCancelled, 512)
	if reads != 2 {
		t.Errorf("%d reads of the source, want 2", reads)
	}
	wantGood(t, "SANITIZE", <-sanitized)
	r.wantCount(9, copyFailed, StatusCheckCondition, 512)
	if got := r.read(0, 0, 2048); !bytes.Equal(got[:512*512], pattern(512*512, 1)) || !bytes.Equal(got[512*512:], make([]byte, 1536*512)) {
		t.Error("the destination has something else than what was read before the end of the token")
	}
}
