package lun

import (
	"bytes"
	"encoding/hex"
	"log/slog"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/backend/checked"
	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/tests/testkit"
)

// testPort and testIdentity are the names in the golden bytes.
var (
	testPort     = Port{InitiatorName: "iqn.2026-11.io.example:host", TargetName: "iqn.2026-11.io.example:store", TPGT: 1}
	testIdentity = state.Identity{NAA: [8]byte{0x30, 1, 2, 3, 4, 5, 6, 7}, Serial: "3001020304050607"}
)

// A setup describes a rig. The zero value of a field means its default.
type setup struct {
	size      int64  // bytes; 1 MiB
	blockSize uint32 // 512
	opt       Options
	info      func(*backend.Info) // changes what the store says of itself
	protect   protection.Type
}

// A describedStore is a store with another Info.
type describedStore struct {
	*backendtest.Faulty
	info backend.Info
}

func (s describedStore) Info() backend.Info { return s.info }

// everything has the options of a unit with all optional commands.
var everything = Options{Removable: true, Sanitize: true}

// volatile gives a store a cache.
func volatile(i *backend.Info) { i.VolatileCache = true }

// thick makes a store one that cannot give space back.
func thick(i *backend.Info) { i.DiscardGranularity = 0 }

// A rig is one logical unit, LUN 0, over a memory store, and an initiator that knows of the power
// on.
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
		s.opt.Events = logTo(slog.New(slog.DiscardHandler))
	}
	store := backend.Store(describedStore{r.store, info})
	if s.protect != protection.None {
		store = protectedStore(t, store, s.protect)
	}
	if r.unit, err = New(store, s.opt); err != nil {
		t.Fatal(err)
	}
	if err := r.inv.Add(0, r.unit); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.inv.Close() })
	r.nexus = r.login()
	return r
}

// protectedStore adds protection information to a store.
func protectedStore(t testing.TB, below backend.Store, typ protection.Type) *checked.Store {
	t.Helper()
	side, err := checked.NewSide(below.Info(), typ)
	if err != nil {
		t.Fatal(err)
	}
	s, err := checked.OpenMemory(below, side, checked.Config{Protection: typ})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// login returns another nexus, which knows of the power on.
func (r *rig) login() *Nexus {
	r.t.Helper()
	n := r.inv.NewNexus(testPort)
	for _, l := range n.list() {
		if res := do(n, &r.c, EncodeLUN(l.id), "00 0000 00 00 00", nil, all); r.c.cond != condPowerOn { // in any format
			r.t.Fatalf("status %#x, sense % x; want POWER ON", res.status, res.sense)
		}
		l.copies.begin(0, &copyStatus{}, &Command{}) // so that RECEIVE COPY STATUS of rowCDB has something to report
	}
	return n
}

// add adds u as another logical unit, and takes the attentions of the rig's initiator about it.
func (r *rig) add(id uint16, u *Unit) {
	r.t.Helper()
	if err := r.inv.Add(id, u); err != nil {
		r.t.Fatal(err)
	}
	wantSense(r.t, r.run("00", nil), 0x6, 0x3f, 0x0e)
}

// reset resets LUN 0 for n, and takes the attention of n about it.
func (r *rig) reset(n *Nexus) {
	r.t.Helper()
	n.ResetUnit([8]byte{}, true)
	wantSense(r.t, do(n, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x29, 0x03)
}

// A result is what an initiator sees of a command.
type result struct {
	status          byte
	sense           []byte
	in              []byte // data-in, cut to the expected length
	dataOut, dataIn uint64
	consumed        int // bytes of data-out
}

// all is an expected data transfer length that cuts nothing short.
const all = 1 << 32

// pieces are the sizes in which do moves data, over and over.
var pieces = [...]int{4096, 12288, 8192}

// do runs a command like a transport. out is all data-out, edtl how much data-in the initiator
// expects.
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

// good runs a command that has to succeed, and returns its data-in.
func (r *rig) good(cdb string, out []byte) []byte {
	r.t.Helper()
	res := r.run(cdb, out)
	wantGood(r.t, cdb, res)
	return res.in
}

// wantDone checks that a rowCDB ended with GOOD. PERSISTENT RESERVE OUT may meet RESERVATION CONFLICT,
// because a rig is not registered.
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

// wantSense checks for CHECK CONDITION with fixed format sense data and nothing else in them.
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

func wantBytes(t testing.TB, got, want []byte) {
	t.Helper()
	if !bytes.Equal(got, want) {
		t.Fatalf("got\n%swant\n%s", hex.Dump(got), hex.Dump(want))
	}
}

var unhex = testkit.Unhex

// pattern returns n bytes that differ from block to block and from seed to seed.
func pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i + i>>9*7 + seed*31 + 1)
	}
	return b
}

// logTo returns Options.Events that writes only the lines.
func logTo(l *slog.Logger) func(Event) { return func(e Event) { e.Log(l) } }
