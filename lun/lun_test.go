package lun

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
)

// testPort and testIdentity are what the golden octets name.
var (
	testPort     = Port{InitiatorName: "iqn.2026-11.io.example:host", TargetName: "iqn.2026-11.io.example:store", TPGT: 1}
	testIdentity = state.Identity{NAA: [8]byte{0x30, 1, 2, 3, 4, 5, 6, 7}, Serial: "3001020304050607"}
)

// A setup describes a rig. The zero value of a field means its default.
type setup struct {
	size      int64  // octets; 1 MiB
	blockSize uint32 // 512
	opt       Options
	info      func(*backend.Info) // changes what the store says of itself
}

// describedStore is a store that describes itself differently.
type describedStore struct {
	*backendtest.Faulty
	info backend.Info
}

func (s describedStore) Info() backend.Info { return s.info }

// everything is the options of a unit that has all optional commands.
var everything = Options{Removable: true, Sanitize: true}

// volatile makes a store one with a cache.
func volatile(i *backend.Info) { i.VolatileCache = true }

// thick makes a store one that cannot give space back.
func thick(i *backend.Info) { i.DiscardGranularity = 0 }

// A rig is one logical unit, LUN 0, over a memory store, and an initiator that
// has heard of the power on.
type rig struct {
	t     testing.TB
	store *backendtest.Faulty
	unit  *Unit
	inv   *Inventory
	nexus *Nexus
	c     Command
}

func newRig(t testing.TB, s setup) *rig {
	t.Helper()
	if s.size == 0 {
		s.size = 1 << 20
	}
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: s.size, BlockSize: s.blockSize})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, store: &backendtest.Faulty{Store: m}, inv: NewInventory()}
	info := m.Info()
	if s.info != nil {
		s.info(&info)
	}
	s.opt.Identity = testIdentity
	if s.opt.Events == nil {
		s.opt.Events = logEvents{slog.New(slog.DiscardHandler)}
	}
	if r.unit, err = New(describedStore{r.store, info}, s.opt); err != nil {
		t.Fatal(err)
	}
	if err := r.inv.Add(0, r.unit); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.inv.Close() })
	r.nexus = r.login()
	return r
}

// login makes another nexus, which has heard of the power on.
func (r *rig) login() *Nexus {
	r.t.Helper()
	n := r.inv.NewNexus(testPort)
	for _, l := range n.list() {
		wantSense(r.t, do(n, &r.c, EncodeLUN(l.id), "00 0000 00 00 00", nil, all), 0x6, 0x29, 0x00)
		l.copies.set(0, copyStatus{}) // or RECEIVE COPY STATUS of rowCDB would have nothing to tell
	}
	return n
}

// add makes u another logical unit, of which the rig's initiator then has heard.
func (r *rig) add(id uint16, u *Unit) {
	r.t.Helper()
	if err := r.inv.Add(id, u); err != nil {
		r.t.Fatal(err)
	}
	wantSense(r.t, r.run("00", nil), 0x6, 0x3f, 0x0e)
}

// reset resets LUN 0 for n, which then hears of it.
func (r *rig) reset(n *Nexus) {
	r.t.Helper()
	n.ResetUnit([8]byte{})
	wantSense(r.t, do(n, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x29, 0x03)
}

// A result is what an initiator sees of a command.
type result struct {
	status          byte
	sense           []byte
	in              []byte // data-in, cut to what is expected
	dataOut, dataIn uint64
	consumed        int // octets of data-out
}

// all is an expected data transfer length that cuts nothing short.
const all = 1 << 32

// pieces are the sizes in which do moves data, over and over.
var pieces = [...]int{4096, 12288, 8192}

// do runs a command as a transport does. out is the data-out there is, edtl how
// much data-in the initiator expects.
func do(n *Nexus, c *Command, lun [8]byte, cdb string, out []byte, edtl int) (r result) {
	return doCDB(n, c, lun, unhex(cdb), out, edtl)
}

func doCDB(n *Nexus, c *Command, lun [8]byte, cdb, out []byte, edtl int) (r result) {
	c.LUN, c.CDB = lun, append(make([]byte, 0, 16), cdb...)[:max(16, len(cdb))]
	if n.Begin(c) {
		r.dataOut, r.dataIn = c.DataOut, c.DataIn
		out = out[:min(uint64(len(out)), c.DataOut)]
		for i := 0; r.consumed < len(out); i++ {
			k := min(pieces[i%len(pieces)], len(out)-r.consumed)
			if c.Whole {
				k = len(out)
			}
			if !n.Consume(c, out[r.consumed:][:k], uint64(r.consumed)) {
				break
			}
			r.consumed += k
		}
		in := make([]byte, min(uint64(edtl), c.DataIn))
		for i, off := 0, 0; off < len(in); i++ {
			k := min(pieces[i%len(pieces)], len(in)-off)
			if !n.Produce(c, in[off:][:k], uint64(off)) {
				in = in[:off]
				break
			}
			off += k
		}
		r.in = in
		n.End(c)
	}
	r.status, r.sense = c.Status, bytes.Clone(c.Sense())
	return r
}

// run runs a command of the rig's initiator for LUN 0.
func (r *rig) run(cdb string, out []byte) result {
	return do(r.nexus, &r.c, [8]byte{}, cdb, out, all)
}

// good is run for a command that has to succeed; it returns its data-in.
func (r *rig) good(cdb string, out []byte) []byte {
	r.t.Helper()
	res := r.run(cdb, out)
	wantGood(r.t, cdb, res)
	return res.in
}

// wantDone is wantGood for a rowCDB. PERSISTENT RESERVE OUT may meet RESERVATION
// CONFLICT, because a rig is not registered.
func wantDone(t testing.TB, row *command, res result) {
	t.Helper()
	if row.op == 0x5f && res.status == statusReservationConflict {
		wantConflict(t, row.name, res)
		return
	}
	wantGood(t, row.name, res)
}

func wantConflict(t testing.TB, what string, res result) {
	t.Helper()
	if res.status != statusReservationConflict || res.sense != nil {
		t.Fatalf("%s: status %#x, sense % x; want RESERVATION CONFLICT", what, res.status, res.sense)
	}
}

func wantGood(t testing.TB, what string, res result) {
	t.Helper()
	if res.status != StatusGood || res.sense != nil {
		t.Fatalf("%s: status %#x, sense % x; want GOOD", what, res.status, res.sense)
	}
}

// wantSense checks for CHECK CONDITION with fixed format sense data that says
// nothing but this.
func wantSense(t testing.TB, res result, key, asc, ascq byte) {
	t.Helper()
	want := make([]byte, senseLen)
	want[0], want[2], want[7], want[12], want[13] = 0x70, key, 10, asc, ascq
	got := bytes.Clone(res.sense)
	if len(got) == senseLen {
		clear(got[15:]) // sense key specific: wantField
		if asc == 0x21 {
			got[0] &^= 0x80 // INFORMATION: TestFirstInvalidLBA
			clear(got[3:7])
		}
	}
	if res.status != StatusCheckCondition || !bytes.Equal(got, want) {
		t.Fatalf("status %#x, sense % x; want CHECK CONDITION, %x/%02x/%02x", res.status, res.sense, key, asc, ascq)
	}
}

// wantField checks for INVALID FIELD IN CDB with a field pointer (SPC-4,
// section 4.5.3, figures of SENSE KEY SPECIFIC); bit may be noField.
func wantField(t testing.TB, res result, octet, bit int) {
	t.Helper()
	wantSense(t, res, 0x5, 0x24, 0x00)
	want := []byte{0xc0, 0, byte(octet)} // SKSV, C/D
	if bit != noField {
		want[0] |= 0x08 | byte(bit) // BPV
	}
	if !bytes.Equal(res.sense[15:], want) {
		t.Fatalf("field pointer % x, want % x", res.sense[15:], want)
	}
}

func wantOctets(t testing.TB, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		t.Fatalf("got\n%swant\n%s", hex.Dump(got), hex.Dump(want))
	}
}

var unhex = testkit.Unhex

// pattern is n octets that differ from block to block and from seed to seed.
func pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i + i>>9*7 + seed*31 + 1)
	}
	return b
}

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

func TestInventory(t *testing.T) {
	r := newRig(t, setup{})
	if err := r.inv.Add(0, r.unit); err == nil {
		t.Error("a LUN was given twice")
	}
	if err := r.inv.Add(1<<14, r.unit); err == nil {
		t.Error("LUN 16384 was accepted")
	}
	other := newRig(t, setup{})
	for _, id := range []uint16{16383, 3} {
		if err := r.inv.Add(id, other.unit); err != nil {
			t.Fatal(err)
		}
	}
	if u := r.inv.Units(); len(u) != 3 || u[0] != r.unit || u[1] != other.unit || u[2] != other.unit {
		t.Errorf("units are %v", u)
	}
}

// SAM-5, section 4.7: LUN fields and what they address.
func TestLUNField(t *testing.T) {
	r := newRig(t, setup{})
	for _, id := range []uint16{1, 255, 256, 16383} {
		u := newRig(t, setup{}).unit
		if err := r.inv.Add(id, u); err != nil {
			t.Fatal(err)
		}
	}
	n := r.inv.NewNexus(testPort)
	for _, s := range []struct {
		field string
		id    int // -1: no logical unit
	}{
		{"0000 0000 0000 0000", 0},
		{"0001 0000 0000 0000", 1},
		{"00ff 0000 0000 0000", 255},
		{"4000 0000 0000 0000", 0}, // flat space addressing
		{"4001 0000 0000 0000", 1},
		{"4100 0000 0000 0000", 256},
		{"7fff 0000 0000 0000", 16383},
		{"0100 0000 0000 0000", -1}, // bus 1
		{"0002 0000 0000 0000", -1},
		{"8001 0000 0000 0000", -1}, // logical unit addressing
		{"c101 0000 0000 0000", -1}, // REPORT LUNS well known logical unit
		{"0001 0001 0000 0000", -1}, // two levels
		{"0000 0000 0000 0001", -1},
	} {
		f := [8]byte(unhex(s.field))
		l := n.find(f)
		if s.id < 0 {
			if l != nil || n.LUNExists(f) || n.SameUnit(f, f) {
				t.Errorf("%s addresses LUN %d", s.field, l.id)
			}
			continue
		}
		if l == nil || int(l.id) != s.id || !n.LUNExists(f) || !n.SameUnit(f, EncodeLUN(l.id)) {
			t.Errorf("%s does not address LUN %d", s.field, s.id)
		}
	}
	if n.SameUnit([8]byte{0, 1}, [8]byte{}) {
		t.Error("LUN 1 and LUN 0 are taken for the same unit")
	}
}

// SAM-5, section 5.13: commands for a LUN that there is not.
func TestAbsentLUN(t *testing.T) {
	r := newRig(t, setup{})
	lun := [8]byte{0, 5}
	for _, row := range commands {
		t.Run(row.name, func(t *testing.T) {
			cdb := rowCDB(&row)
			res := doCDB(r.nexus, &r.c, lun, cdb, nil, all)
			if row.flags&absentLUN == 0 {
				wantSense(t, res, 0x5, 0x25, 0x00)
				return
			}
			wantGood(t, row.name, res)
		})
	}
	wantSense(t, do(r.nexus, &r.c, lun, "ff", nil, all), 0x5, 0x25, 0x00)
	wantSense(t, do(r.nexus, &r.c, lun, "12 01 80 00ff 00", nil, all), 0x5, 0x25, 0x00)

	res := do(r.nexus, &r.c, lun, "12 00 00 00ff 00", nil, all)
	if len(res.in) != 96 || res.in[0] != 0x7f {
		t.Errorf("INQUIRY % x, want PERIPHERAL QUALIFIER 011b and type 1Fh", res.in)
	}
	res = do(r.nexus, &r.c, lun, "03 00 0000 ff 00", nil, all)
	wantOctets(t, res.in, unhex("70 00 05 00000000 0a 00000000 25 00 00 000000"))
}

// rowCDB is the shortest valid CDB of a row: an allocation length of 252 where
// there is one, lengths of 0 or 1 block, and START.
func rowCDB(row *command) []byte {
	cdb := make([]byte, 16)
	cdb[0] = row.op
	if row.hasSA {
		cdb[1] = row.sa
	}
	switch row.op {
	case 0x03, 0x1a: // REQUEST SENSE, MODE SENSE(6)
		cdb[4] = 252
	case 0x12: // INQUIRY
		cdb[4] = 252
	case 0x5a: // MODE SENSE(10)
		cdb[8] = 252
	case 0x1b: // START STOP UNIT
		cdb[4] = 1
	case 0x41: // WRITE SAME(10)
		cdb[8] = 1
	case 0x48: // SANITIZE
		if row.sa == 1 {
			cdb[8] = 5
		}
	case 0x93, 0x9e: // WRITE SAME(16), READ CAPACITY(16)
		cdb[13] = 1
	case 0x5e: // PERSISTENT RESERVE IN
		cdb[8] = 252
	case 0x5f: // PERSISTENT RESERVE OUT: the parameter list
		cdb[8] = prListLen
	case 0xa0, 0xa3: // REPORT LUNS, MAINTENANCE IN
		cdb[9] = 252
	}
	if row.op == 0x1a || row.op == 0x5a {
		cdb[2] = allPages
	}
	return cdb
}

// rowData is data-out that goes with any rowCDB: for SANITIZE, one pass of zeros.
var rowData = append(unhex("01 00 0001"), make([]byte, 508)...)

// SAM-5, section 5.14: a unit attention comes before all other errors, once,
// and INQUIRY, REPORT LUNS and REQUEST SENSE do not fail because of it.
func TestUnitAttention(t *testing.T) {
	r := newRig(t, setup{})
	if err := r.inv.Add(1, newRig(t, setup{}).unit); err != nil {
		t.Fatal(err)
	}
	tur := func(n *Nexus, lun byte) result { return do(n, &r.c, [8]byte{0, lun}, "00", nil, all) }

	t.Run("every command", func(t *testing.T) {
		for _, row := range commands {
			n := r.inv.NewNexus(testPort)
			res := doCDB(n, &r.c, [8]byte{}, rowCDB(&row), make([]byte, 512), all)
			switch {
			case row.flags&keepAttention == 0:
				wantSense(t, res, 0x6, 0x29, 0x00)
				wantGood(t, row.name, tur(n, 0))
			case row.op == 0x03: // REQUEST SENSE reports it as data, which clears it
				wantGood(t, row.name, res)
				wantOctets(t, res.in, unhex("70 00 06 00000000 0a 00000000 29 00 00 000000"))
				wantGood(t, row.name, tur(n, 0))
			default:
				wantGood(t, row.name, res)
				wantSense(t, tur(n, 0), 0x6, 0x29, 0x00)
			}
			n.Close()
		}
	})
	t.Run("priority", func(t *testing.T) {
		for _, cdb := range []string{
			"ff",              // no such operation code
			"00 ff",           // reserved bits
			"9e 1f",           // no such service action
			"28 00 ffffffff ", // LBA out of range
		} {
			wantSense(t, do(r.inv.NewNexus(testPort), &r.c, [8]byte{}, cdb, nil, all), 0x6, 0x29, 0x00)
		}
	})
	t.Run("per unit", func(t *testing.T) {
		n := r.inv.NewNexus(testPort)
		wantSense(t, tur(n, 1), 0x6, 0x29, 0x00)
		wantGood(t, "LUN 1", tur(n, 1))
		wantSense(t, tur(n, 0), 0x6, 0x29, 0x00)
	})
	t.Run("a bad REQUEST SENSE leaves it", func(t *testing.T) {
		n := r.inv.NewNexus(testPort)
		wantField(t, do(n, &r.c, [8]byte{}, "03 80 0000 ff 00", nil, all), 1, 7)
		wantSense(t, tur(n, 0), 0x6, 0x29, 0x00)
	})
	t.Run("descriptor format", func(t *testing.T) {
		n := r.inv.NewNexus(testPort)
		res := do(n, &r.c, [8]byte{}, "03 01 0000 ff 00", nil, all)
		wantGood(t, "REQUEST SENSE", res)
		wantOctets(t, res.in, unhex("72 06 29 00 000000 00"))
	})
	t.Run("resets", func(t *testing.T) {
		by, other, late := r.login(), r.login(), r.inv.NewNexus(testPort)
		by.ResetUnit([8]byte{})
		by.ResetUnit([8]byte{}) // not reported twice
		by.ResetUnit([8]byte{0, 9})
		wantSense(t, tur(by, 0), 0x6, 0x29, 0x03) // the one that asked for it, too
		wantSense(t, tur(other, 0), 0x6, 0x29, 0x03)
		wantGood(t, "the second command", tur(other, 0))
		wantGood(t, "the other unit", tur(other, 1))
		wantSense(t, tur(late, 0), 0x6, 0x29, 0x00) // power on first
		wantSense(t, tur(late, 0), 0x6, 0x29, 0x03)

		by.ResetTarget()
		for lun := range byte(2) {
			wantSense(t, tur(by, lun), 0x6, 0x29, 0x03)
			wantSense(t, tur(other, lun), 0x6, 0x29, 0x03)
		}
		other.Close()
		by.ResetTarget()
		wantGood(t, "a nexus that has ended", tur(other, 0))
	})
	t.Run("power on", func(t *testing.T) {
		n := r.login()
		r.inv.PowerOn()
		for lun := range byte(2) {
			wantSense(t, tur(n, lun), 0x6, 0x29, 0x00)
			wantGood(t, "TEST UNIT READY", tur(n, lun))
		}
	})
	t.Run("commands cleared", func(t *testing.T) {
		n := r.login()
		n.CommandsCleared([8]byte{})
		n.CommandsCleared([8]byte{0, 9})
		wantSense(t, tur(n, 0), 0x6, 0x2f, 0x00)
		wantGood(t, "the second command", tur(n, 0))
		wantGood(t, "the other unit", tur(n, 1))
	})
	t.Run("a reset starts the unit", func(t *testing.T) {
		n := r.login()
		wantGood(t, "stop", do(n, &r.c, [8]byte{}, "1b", nil, all))
		wantSense(t, tur(n, 0), 0x2, 0x04, 0x02)
		r.reset(n) // and would be not ready otherwise
		wantGood(t, "TEST UNIT READY", tur(n, 0))
	})
}

// A Command is used again and again; nothing of the one before shows.
func TestCommandReuse(t *testing.T) {
	r := newRig(t, setup{})
	fresh := func(cdb string, out []byte) result {
		return do(r.nexus, new(Command), [8]byte{}, cdb, out, all)
	}
	block := pattern(512, 3)
	cdbs := []struct {
		cdb string
		out []byte
	}{
		{"a3 0c 80 00 0000 0000ffff 00 00", nil}, // the longest report
		{"41 00 00000001 00 0004 00", block},
		{"41 00 00000001 00 0004 00", block[:100]}, // cut short
		{"93 01 0000000000000005 00000002 00 00", nil},
		{"42 00 00000000 00 0018 00", append(unhex("0016 0010 00000000"), make([]byte, 16)...)},
		{"28 00 00000000 00 0008 00", nil},
		{"2f 02 00000000 00 0001 00", pattern(512, 9)},
		{"12 00 00 0060 00", nil},
		{"12 01 83 00ff 00", nil},
		{"03 00 0000 12 00", nil},
		{"1a 00 3f 00 ff 00", nil},
		{"ff", nil},
		{"28 00 ffffffff 00 0001 00", nil},
	}
	for _, before := range cdbs {
		for _, s := range cdbs {
			r.run(before.cdb, before.out)
			r.c.Fail(Sense{0x0b, 0x0c, 0x0d}) // as a transport does whose data was wrong
			got, want := r.run(s.cdb, s.out), fresh(s.cdb, s.out)
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("%s after %s:\n%v, a fresh Command gives\n%v", s.cdb, before.cdb, got, want)
			}
		}
	}
}

// Fail ends a command on behalf of the transport, before and after Begin.
func TestFail(t *testing.T) {
	r := newRig(t, setup{})
	check := func(c *Command) {
		t.Helper()
		res := result{status: c.Status, sense: c.Sense()}
		wantSense(t, res, 0xb, 0x0c, 0x0d)
		if c.DataOut != 0 || c.DataIn != 0 {
			t.Errorf("DataOut %d and DataIn %d remain", c.DataOut, c.DataIn)
		}
	}
	var c Command
	c.Fail(Sense{0x0b, 0x0c, 0x0d})
	check(&c)

	c.CDB = append(unhex("2a 00 00000000 00 0002 00"), make([]byte, 6)...)
	if !r.nexus.Begin(&c) || !r.nexus.Consume(&c, pattern(512, 1), 0) {
		t.Fatal("WRITE(10) has failed")
	}
	c.Fail(Sense{0x0b, 0x0c, 0x0d})
	if r.nexus.Consume(&c, pattern(512, 1), 512) || r.nexus.Produce(&c, make([]byte, 512), 0) {
		t.Error("a failed command goes on")
	}
	r.nexus.End(&c)
	check(&c)
	wantOctets(t, r.good("28 00 00000000 00 0002 00", nil), append(pattern(512, 1), make([]byte, 512)...))
}

// Sessions come and go, units are reset, stopped and started while commands run.
func TestConcurrency(t *testing.T) {
	r := newRig(t, setup{})
	if err := r.inv.Add(1, newRig(t, setup{}).unit); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 200 {
				n := r.inv.NewNexus(testPort)
				var c Command
				lun := [8]byte{0, byte(g & 1)}
				if res := do(n, &c, lun, "00", nil, all); res.status != StatusCheckCondition || res.sense[2] != keyUnitAttention {
					t.Errorf("the first command of a nexus: %v", res)
				}
				for _, cdb := range []string{"28 00 00000000 00 0010 00", "2a 08 00000000 00 0010 00", "a0 00 00 000000 000000ff 00 00", "2f 00 00000000 00 0010 00"} {
					do(n, &c, lun, cdb, make([]byte, 8192), all)
				}
				switch i % 4 {
				case 0:
					n.ResetUnit(lun)
				case 1:
					n.ResetTarget()
				case 2:
					do(n, &c, lun, "1b 00 0000 00 00", nil, all)
					do(n, &c, lun, "1b 00 0000 01 00", nil, all)
				}
				n.Close()
			}
		})
	}
	wg.Wait()
	if n := len(r.unit.seen); n != 1 {
		t.Errorf("%d nexuses are remembered, want the rig's own", n)
	}
}
