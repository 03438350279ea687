package lun

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
)

const rightsSize = 16 << 10

// A rightsRig is a unit of 16 KiB with all optional commands, a writer (r.a), and an intruder (r.c)
// that tries to change what the writer sees.
type rightsRig struct {
	*prRig
	reader bool // the intruder may only read
}

// newRightsRig returns a rig in that state, and with reader true takes the right to write from the
// intruder.
func newRightsRig(t *testing.T, s *rightsState, reader bool) *rightsRig {
	t.Helper()
	dir := t.TempDir()
	settings := openSettings(t, filepath.Join(dir, "settings.json"))
	kept, err := OpenReservations(filepath.Join(dir, "reservations.json"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kept.Close() })
	asap := func(*os.File) error { return nil }
	settings.SetSync(asap)
	kept.SetSync(asap)
	opt := everything
	opt.Settings, opt.Reservations = settings, kept
	r := &rightsRig{&prRig{rig: newRig(t, setup{size: 1 << 16, info: volatile, opt: opt})}, reader}
	r.a, r.c, r.see = r.enter(portA), r.enter(portC), r.nexus
	wantGood(t, "WRITE(16)", r.on(r.a, extentCDB(0x8a, 0, 0, rightsSize/512), pattern(rightsSize, 1)))
	s.begin(r)
	if reader {
		if err := r.inv.SetMask(0, maskFor(":c", ReadOnly)); err != nil {
			t.Fatal(err)
		}
	}
	r.settle()
	return r
}

// settle takes the unit attentions of all.
func (r *rightsRig) settle() {
	for _, n := range []*Nexus{r.a, r.c, r.see} {
		for {
			if _, pending := n.PendingAttention([8]byte{}); pending == 0 {
				break
			}
			r.on(n, "00", nil)
		}
	}
}

// A rightsState is a state of the unit in which the intruder tries.
type rightsState struct {
	name  string
	begin func(r *rightsRig)
	own   bool // the intruder holds something, so that it may also end it
}

var rightsStates = func() []rightsState {
	list := []rightsState{
		{"nothing reserved", func(*rightsRig) {}, false},
		{"stopped", func(r *rightsRig) { r.on(r.a, "1b 00 0000 00 00", nil) }, false},
		{"ejected", func(r *rightsRig) { r.on(r.a, "1b 00 0000 02 00", nil) }, false},
		{"write protected", func(r *rightsRig) {
			list := unhex("00 00 00 00" + protected)
			r.on(r.a, fmt.Sprintf("15 11 0000 %02x 00", len(list)), list)
		}, false},
		{"removal prevented", func(r *rightsRig) { r.on(r.a, "1e 00 0000 01 00", nil) }, false},
		{"another access state", func(r *rightsRig) { r.setGroups(r.a, "01 00 0001") }, false},
		{"sanitize failed", func(r *rightsRig) {
			r.store.Fail(backendtest.Sync, syscall.EIO)
			r.on(r.a, "48 22 0000000000 0000 00", nil) // AUSE
			r.store.Fail(backendtest.Sync, nil)
		}, false},
		{"RESERVE of the writer", func(r *rightsRig) { r.on(r.a, "16 00 0000 00 00", nil) }, false},
		{"RESERVE of the intruder", func(r *rightsRig) { r.on(r.c, "16 00 0000 00 00", nil) }, true},
		{"registered, APTPL", func(r *rightsRig) {
			r.ok(r.a, prRegister, 0, prList(0, keyA, 1))
			r.ok(r.c, prRegister, 0, prList(0, keyC, 1))
		}, false},
		{"held by the intruder", func(r *rightsRig) {
			r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
			r.ok(r.c, prRegister, 0, prList(0, keyC, 0))
			r.ok(r.c, prReserve, 5, prList(keyC, 0, 0))
		}, true},
	}
	for _, typ := range types {
		list = append(list, rightsState{fmt.Sprintf("type %d of the writer", typ), func(r *rightsRig) {
			r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
			r.ok(r.c, prRegister, 0, prList(0, keyC, 0))
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
		}, false})
	}
	return list
}()

// view returns what the writer sees of the unit, as text: that two views are equal is the oracle. A
// registration of the intruder and PRGENERATION are left out, because a reader may register.
func (r *rightsRig) view() string {
	r.t.Helper()
	var b strings.Builder
	_, pending := r.a.PendingAttention([8]byte{})
	fmt.Fprintf(&b, "%d unit attentions are due\n", pending)
	others := slices.ContainsFunc(r.unit.Reservation().Registrations, func(g Registration) bool {
		return !strings.Contains(g.Initiator, ":c,")
	})
	for _, s := range []struct{ name, cdb string }{
		{"TEST UNIT READY", "00"},
		{"INQUIRY", "12 00 00 00ff 00"},
		{"current mode pages", "5a 08 3f 00 000000 ffff 00"},
		{"changeable mode pages", "5a 08 7f 00 000000 ffff 00"},
		{"default mode pages", "5a 08 bf 00 000000 ffff 00"},
		{"saved mode pages", "5a 08 ff 00 000000 ffff 00"},
		{"READ CAPACITY(16)", "9e 10 0000000000000000 0000ffff 00 00"},
		{"target port groups", "a3 0a 00000000 0000ffff 00 00"},
		{"reservation", "5e 01 0000000000 ffff 00"},
		{"capabilities", "5e 02 0000000000 ffff 00"},
		{"registrations", "5e 03 0000000000 ffff 00"},
		{"LBA status", "9e 12 0000000000000000 0000ffff 00 00"},
		{"data", extentCDB(0x88, 0, 0, rightsSize/512)},
	} {
		res := r.on(r.a, s.cdb, nil)
		switch s.name {
		case "registrations":
			res.in = withoutIntruder(res.in)
		case "reservation", "LBA status":
			res.in = res.in[min(4, len(res.in)):] // PRGENERATION
		case "capabilities":
			if !others && len(res.in) > 3 {
				res.in[3] &^= 1 // PTPL_A, of a registration of the intruder
			}
		case "data":
			h := fnv.New64a()
			h.Write(res.in)
			res.in = h.Sum(nil)
		}
		fmt.Fprintf(&b, "%s: status %#x, sense % x, data % x\n", s.name, res.status, res.sense, res.in)
	}
	first := pattern(rightsSize, 1)[:512]
	res := r.on(r.a, "2a 00 00000000 00 0001 00", first)
	fmt.Fprintf(&b, "WRITE(10): status %#x, sense % x\n", res.status, res.sense)
	fmt.Fprintf(&b, "status %q\n", r.unit.Status())
	if r.unit.Status() == "ready" {
		b.WriteString(r.eject())
	}
	return b.String()
}

// eject returns what the writer gets for an eject and a load.
func (r *rightsRig) eject() string {
	out := r.on(r.a, "1b 00 0000 02 00", nil)
	in := r.on(r.a, "1b 00 0000 03 00", nil)
	r.settle()
	return fmt.Sprintf("eject: status %#x, sense % x; load: status %#x, sense % x\n", out.status, out.sense, in.status, in.sense)
}

// changedLines returns the lines of two views that differ.
func changedLines(before, after string) string {
	var b strings.Builder
	was, is := strings.Split(before, "\n"), strings.Split(after, "\n")
	for i := range max(len(was), len(is)) {
		if i >= len(was) || i >= len(is) || was[i] != is[i] {
			fmt.Fprintf(&b, "before: %s\nafter:  %s\n", strings.Join(was[min(i, len(was)):min(i+1, len(was))], ""),
				strings.Join(is[min(i, len(is)):min(i+1, len(is))], ""))
		}
	}
	return b.String()
}

// withoutIntruder returns the data of READ FULL STATUS without PRGENERATION, the length, and the
// descriptors that name the intruder.
func withoutIntruder(full []byte) (rest []byte) {
	for p := full[min(8, len(full)):]; len(p) >= 24; {
		n := 24 + int(binary.BigEndian.Uint32(p[20:]))
		if !bytes.Contains(p[:n], []byte("example:c,")) {
			rest = append(rest, p[:n]...)
		}
		p = p[n:]
	}
	return rest
}

// An attempt is a command of the intruder.
type attempt struct{ cdb, out []byte }

// attempts returns plausible commands of a row. A new row gets its shortest CDB, and random ones that
// set only bits that the row evaluates, with each of the parameter lists.
func attempts(row *command, seed uint64) (list []attempt) {
	lists := [][]byte{
		rowData,
		pattern(8192, 3),
		unhex("00 00 00 00" + protected),
		unhex("00 00 00 00" + cachingOff),
		unhex("0000 00 00 00 00 0000" + protected),
		unhex("00000000 02 00 0001"),
		unhex("0016 0010 00000000 0000000000000000 00000010 00000000"), // UNMAP
		unhex(copyList(0, 3, []string{cscdZero}, []string{blocks(0, 0, 8, 8, 0)})),
		prList(keyC, 0, 0), prList(keyC, keyA, 0), prList(0, keyC, 0), prList(0, keyC, 1), prList(keyC, keyB, 0), prList(keyC, keyB, 1),
		portList(0, keyC, 0, unhex(strings.Replace(transportIDC, "3a63", "3a64", 1))),
		moveList(keyC, keyC, 2, unhex(strings.Replace(transportIDC, "3a63", "3a61", 1))),
	}
	rnd := rand.New(rand.NewPCG(seed, uint64(row.op)<<8|uint64(row.cdbLen())))
	add := func(cdb, out []byte) { list = append(list, attempt{cdb, out}) }
	add(rowCDB(row), rowData)
	if row.consume == nil {
		lists = lists[:4] // only the CDB counts
	}
	for _, out := range lists {
		for round := range 2 {
			cdb := make([]byte, 16)
			cdb[0] = row.op
			for i := range row.usage {
				if round > 0 && rnd.IntN(2) == 0 {
					cdb[i+1] = byte(rnd.Uint32()) & row.usage[i]
				}
			}
			if row.hasSA() {
				cdb[1] = cdb[1]&^saMask | byte(row.sa)
			}
			setLength(row, cdb, len(out))
			switch {
			case row.op == opPROut:
				cdb[2] = types[rnd.IntN(len(types))]
			case row.op == opModeSelect6, row.op == 0x55:
				cdb[1] = 0x10 | byte(round&1) // PF, SP
			case round == 0 && row.op == opStartStop:
				cdb[4] = byte(len(list) & 3)
			case row.op == opPreventAllow:
				cdb[4] = 1
			}
			add(cdb, out)
		}
	}
	return list
}

// setLength sets the parameter list length of a CDB, or the transfer length of one that has none.
func setLength(row *command, cdb []byte, n int) {
	be := binary.BigEndian
	switch row.op {
	case opModeSelect6:
		cdb[4] = byte(n)
	case 0x42, 0x48, 0x55:
		be.PutUint16(cdb[7:], uint16(n))
	case opPROut:
		be.PutUint32(cdb[5:], uint32(n))
	case opExtendedCopy:
		be.PutUint32(cdb[10:], uint32(n))
	case 0xa4:
		be.PutUint32(cdb[6:], uint32(n))
	default:
		cdb[[...]int{4, 8, 8, 0, 13, 9, 0, 0}[row.op>>5]] = 1
	}
}

// try executes an attempt of the intruder.
func (r *rightsRig) try(a attempt) {
	r.settle()
	if r.unit.Reservation().Registrations != nil {
		r.out(r.c, prRegisterAndIgnore, 0, prList(0, keyC, 1)) // an attempt before may have ended it
	}
	doCDB(r.c, &r.rig.c, [8]byte{}, a.cdb, a.out, all)
}

// Whatever a reader sends, the writer sees the unit as before: no unit attention, the same mode pages,
// readiness, reservations, access states and data, and it continues to write. The test tries a new row
// of the table, too.
func TestReaderChangesNothing(t *testing.T) {
	for i := range rightsStates {
		s := &rightsStates[i]
		if s.own {
			continue // it may end that: TestReaderEndsItsOwn
		}
		t.Run(s.name, func(t *testing.T) {
			r := newRightsRig(t, s, true)
			before := r.view()
			for _, row := range rowsFor(r.unit) {
				for _, a := range attempts(row, uint64(i)) {
					r.try(a)
					after := r.view()
					if after == before {
						continue
					}
					t.Errorf("%s, CDB % x, data % x...:\n%s", row.name, a.cdb, a.out[:min(32, len(a.out))],
						changedLines(before, after))
					r = newRightsRig(t, s, true)
					before = r.view()
					break
				}
			}
		})
	}
}

// The test above can see what it looks for: the same attempts of an initiator that may write change
// the view of the writer, for each row that is refused to readers.
func TestWriterChangesWhatReadersCannot(t *testing.T) {
	for _, row := range rowsFor(newRig(t, setup{opt: everything}).unit) {
		if row.flags&(writes|changes) == 0 {
			continue
		}
		seen := false
		for i := 0; i < len(rightsStates) && !seen; i++ {
			r := newRightsRig(t, &rightsStates[i], false)
			before := r.view()
			for _, a := range attempts(row, uint64(i)) {
				r.try(a)
				if seen = r.view() != before; seen {
					break
				}
			}
		}
		if !seen {
			t.Errorf("%s: no attempt changes what others see", row.name)
		}
	}
}

// A reset without the right to reset others changes nothing that the writer sees, in no state of the
// unit.
func TestResetOfOwnChangesNothing(t *testing.T) {
	for i := range rightsStates {
		s := &rightsStates[i]
		if s.own {
			continue
		}
		r := newRightsRig(t, s, false)
		before := r.view()
		for name, reset := range map[string]func(){
			"LOGICAL UNIT RESET": func() { r.c.ResetUnit([8]byte{}, false) },
			"target reset":       func() { r.c.ResetTarget(false) },
		} {
			reset()
			wantSense(t, r.on(r.c, "00", nil), 0x6, 0x29, 0x03)
			if after := r.view(); after != before {
				t.Errorf("%s, %s:\n%s", s.name, name, changedLines(before, after))
			}
		}
	}
}

// A reset without that right ends what the initiator itself holds, through all of its ports.
func TestResetOfOwnEndsItsOwn(t *testing.T) {
	r := newPRRig(t, setup{opt: everything})
	const eject, load = "1b 00 0000 02 00", "1b 00 0000 03 00"
	wantGood(t, "PREVENT", r.on(r.b, "1e 00 0000 01 00", nil))
	wantGood(t, "PREVENT of another initiator", r.on(r.c, "1e 00 0000 01 00", nil))
	wantGood(t, "RESERVE(6)", r.on(r.b, "16 00 0000 00 00", nil))
	r.a.ResetUnit([8]byte{}, false)
	for _, n := range []*Nexus{r.a, r.b} { // both are portA's initiator
		wantSense(t, r.on(n, "00", nil), 0x6, 0x29, 0x03)
	}
	wantGood(t, "no RESERVE, no unit attention", r.on(r.c, "00", nil))
	wantSense(t, r.on(r.a, eject, nil), 0x5, 0x53, 0x02)
	wantGood(t, "ALLOW of another initiator", r.on(r.c, "1e 00 0000 00 00", nil))
	wantGood(t, "eject", r.on(r.a, eject, nil))
	wantGood(t, "load", r.on(r.a, load, nil))
}

// While no other initiator sees the unit, a reset does all that SAM-5 says, unless the initiator may
// only read.
func TestResetOfUnitOfOneInitiator(t *testing.T) {
	for _, reader := range []bool{false, true} {
		r := newPRRig(t, setup{info: volatile})
		list := unhex("00 00 00 00" + cachingOff)
		wantGood(t, "MODE SELECT(6)", r.on(r.a, fmt.Sprintf("15 10 0000 %02x 00", len(list)), list))
		wantGood(t, "stop", r.on(r.a, "1b 00 0000 00 00", nil))
		r.c.Close()
		r.see.Close()
		if reader {
			if err := r.inv.SetMask(0, maskFor(":a", ReadOnly)); err != nil {
				t.Fatal(err)
			}
		}
		r.b.ResetUnit([8]byte{}, false)
		if got := r.unit.Status() == "ready"; got == reader {
			t.Errorf("reader %v: status %q", reader, r.unit.Status())
		}
		if got := r.unit.mode.Load() == r.unit.modeDefault.Load(); got == reader {
			t.Errorf("reader %v: modes %#x", reader, r.unit.mode.Load())
		}
	}
}
