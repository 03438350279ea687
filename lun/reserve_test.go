package lun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun/state"
)

// Initiator ports of the tests: two of one initiator, one of another.
var (
	portA = Port{InitiatorName: "iqn.2026-11.io.example:a", ISID: [6]byte{0, 2, 0x3d, 0, 0, 1}, TargetName: testPort.TargetName, TPGT: 1}
	portB = Port{InitiatorName: "iqn.2026-11.io.example:a", ISID: [6]byte{0, 2, 0x3d, 0, 0, 2}, TargetName: testPort.TargetName, TPGT: 1}
	portC = Port{InitiatorName: "iqn.2026-11.io.example:c", ISID: [6]byte{0, 2, 0x3d, 0, 0, 1}, TargetName: testPort.TargetName, TPGT: 1}
)

const keyA, keyB, keyC = 0xa0a1a2a3a4a5a6a7, 0xb0b1b2b3b4b5b6b7, 0xc0c1c2c3c4c5c6c7

// transportIDC is portC as the standards have it (SPC-4, section 7.6.4.6).
const transportIDC = `
	45 00 002c                                        # TPID FORMAT 01b, iSCSI; 44 octets
	69716e2e 323032362d31312e 696f2e6578616d706c65 3a63 # iqn.2026-11.io.example:c
	2c692c3078 303030323364303030303031               # ,i,0x00023d000001
	000000`

// A prRig is a rig with three initiator ports, and one that only looks on.
type prRig struct {
	*rig
	a, b, c *Nexus
	see     *Nexus
}

func newPRRig(t testing.TB, s setup) *prRig {
	r := &prRig{rig: newRig(t, s)}
	r.a, r.b, r.c = r.enter(portA), r.enter(portB), r.enter(portC)
	r.see = r.nexus
	return r
}

// enter is login of a certain port.
func (r *prRig) enter(p Port) *Nexus {
	r.t.Helper()
	n := r.inv.NewNexus(p)
	wantSense(r.t, r.on(n, "00", nil), 0x6, 0x29, 0x00)
	return n
}

func (r *prRig) on(n *Nexus, cdb string, out []byte) result {
	return do(n, &r.rig.c, [8]byte{}, cdb, out, all)
}

// prList is a parameter list of 24 octets.
func prList(key, saKey uint64, flags byte) []byte {
	p := make([]byte, prListLen)
	binary.BigEndian.PutUint64(p, key)
	binary.BigEndian.PutUint64(p[8:], saKey)
	p[20] = flags
	return p
}

// moveList is a parameter list of REGISTER AND MOVE.
func moveList(key, saKey uint64, flags byte, id []byte) []byte {
	p := prList(key, saKey, 0)
	p[17], p[19] = flags, 1 // RELATIVE TARGET PORT IDENTIFIER
	binary.BigEndian.PutUint32(p[20:], uint32(len(id)))
	return append(p, id...)
}

// portList is a parameter list with SPEC_I_PT.
func portList(key, saKey uint64, flags byte, ids ...[]byte) []byte {
	id := slices.Concat(ids...)
	p := binary.BigEndian.AppendUint32(prList(key, saKey, flags|0x08), uint32(len(id)))
	return append(p, id...)
}

// out is PERSISTENT RESERVE OUT.
func (r *prRig) out(n *Nexus, sa, scopeType byte, list []byte) result {
	return r.on(n, fmt.Sprintf("5f %02x %02x 0000 %08x 00", sa, scopeType, len(list)), list)
}

// ok is out for a command that has to succeed.
func (r *prRig) ok(n *Nexus, sa, scopeType byte, list []byte) {
	r.t.Helper()
	wantGood(r.t, fmt.Sprintf("service action %d", sa), r.out(n, sa, scopeType, list))
}

// registered has all three ports registered, each with its key.
func (r *prRig) registered() *prRig {
	r.t.Helper()
	for n, key := range map[*Nexus]uint64{r.a: keyA, r.b: keyB, r.c: keyC} {
		r.ok(n, prRegister, 0, prList(0, key, 0))
	}
	return r
}

// in is the data of PERSISTENT RESERVE IN.
func (r *prRig) in(n *Nexus, sa byte) []byte {
	r.t.Helper()
	res := r.on(n, fmt.Sprintf("5e %02x 0000000000 ffff 00", sa), nil)
	wantGood(r.t, "PERSISTENT RESERVE IN", res)
	return res.in
}

// wantKeys checks READ KEYS; the order does not count.
func (r *prRig) wantKeys(keys ...uint64) {
	r.t.Helper()
	var got []uint64
	for p := r.in(r.see, prReadKeys)[8:]; len(p) > 0; p = p[8:] {
		got = append(got, binary.BigEndian.Uint64(p))
	}
	slices.Sort(got)
	slices.Sort(keys)
	if !slices.Equal(got, keys) {
		r.t.Fatalf("registered are %x, want %x", got, keys)
	}
}

func (r *prRig) generation() uint32 {
	r.t.Helper()
	return binary.BigEndian.Uint32(r.in(r.see, prReadKeys))
}

// wantReservation checks READ RESERVATION; type 0 is no reservation.
func (r *prRig) wantReservation(typ byte, key uint64) {
	r.t.Helper()
	p := r.in(r.see, prReadReservation)
	want := binary.BigEndian.AppendUint32(bytes.Clone(p[:4]), 0)
	if typ != 0 {
		want[7] = 16
		want = binary.BigEndian.AppendUint64(want, key)
		want = append(want, 0, 0, 0, 0, 0, typ, 0, 0)
	}
	wantOctets(r.t, p, want)
}

// wantAttention checks the unit attention that waits for n; ascq 0 is none.
func (r *prRig) wantAttention(n *Nexus, ascq byte) {
	r.t.Helper()
	if ascq != 0 {
		wantSense(r.t, r.on(n, "00", nil), 0x6, 0x2a, ascq)
	}
	wantGood(r.t, "TEST UNIT READY", r.on(n, "00", nil))
}

const (
	reservationsPreempted  = 0x03
	reservationsReleased   = 0x04
	registrationsPreempted = 0x05
)

// wantListBit checks for INVALID FIELD IN PARAMETER LIST with a field pointer.
func wantListBit(t testing.TB, res result, octet, bit int) {
	t.Helper()
	wantSense(t, res, 0x5, 0x26, 0x00)
	want := []byte{0x80, 0, byte(octet)} // SKSV
	if bit != noField {
		want[0] |= 0x08 | byte(bit)
	}
	if !bytes.Equal(res.sense[15:], want) {
		t.Fatalf("field pointer % x, want % x", res.sense[15:], want)
	}
}

// types are the valid values of TYPE.
var types = []byte{1, 3, 5, 6, 7, 8}

// passes says, by the name of a row, what a persistent reservation does with
// commands (SPC-4 and SBC-3, tables of commands allowed in the presence of various
// reservations): Allowed or Conflict, for
//
//	Write Exclusive         from any other nexus
//	Exclusive Access        from any other nexus
//	registrants types       from a registered nexus
//	Write Exclusive - RR    from a nexus that is not registered
//	Exclusive Access - RR   from a nexus that is not registered
//
// Rows that are not here are CCACC: whoever adds one that is not has to say so.
var passes = map[string]string{
	"TEST UNIT READY":                  "AAAAA",
	"REQUEST SENSE":                    "AAAAA",
	"INQUIRY":                          "AAAAA",
	"REPORT LUNS":                      "AAAAA",
	"READ CAPACITY(10)":                "AAAAA",
	"READ CAPACITY(16)":                "AAAAA",
	"START STOP UNIT":                  "AAAAA", // rowCDB has START 1
	"MODE SENSE(6)":                    "ACAAC",
	"MODE SENSE(10)":                   "ACAAC",
	"REPORT SUPPORTED OPERATION CODES": "ACAAC",
	"REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS": "ACAAC",
	"READ(6)":              "ACAAC",
	"READ(10)":             "ACAAC",
	"READ(12)":             "ACAAC",
	"READ(16)":             "ACAAC",
	"VERIFY(10)":           "ACAAC",
	"VERIFY(12)":           "ACAAC",
	"VERIFY(16)":           "ACAAC",
	"PRE-FETCH(10)":        "ACAAC",
	"PRE-FETCH(16)":        "ACAAC",
	"READ DEFECT DATA(10)": "ACAAC",
	"READ DEFECT DATA(12)": "ACAAC",
	"GET LBA STATUS":       "ACAAC",

	"LOG SENSE":                         "AAAAA",
	"PREVENT ALLOW MEDIUM REMOVAL":      "AAAAA", // rowCDB has PREVENT 0
	"REPORT TARGET PORT GROUPS":         "AAAAA",
	"RECEIVE COPY STATUS(LID1)":         "AAAAA",
	"RECEIVE COPY OPERATING PARAMETERS": "AAAAA",
}

// always are the commands that meet no RESERVATION CONFLICT before they have
// looked for themselves.
func always(row *command) bool {
	switch row.op {
	case 0x16, 0x17, 0x56, 0x57, 0x5e, 0x5f:
		return true
	}
	return false
}

// Every type with every command of the table, from the holder, from a registered
// nexus and from one that is not.
func TestPersistentReservationConflicts(t *testing.T) {
	for _, typ := range types {
		t.Run(fmt.Sprintf("type %d", typ), func(t *testing.T) {
			r := newPRRig(t, setup{opt: Options{Removable: true, Sanitize: true}})
			r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
			r.ok(r.b, prRegister, 0, prList(0, keyB, 0))
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
			for i := range commands {
				row := &commands[i]
				if always(row) || !r.unit.supports(row) {
					continue
				}
				columns := passes[row.name]
				if columns == "" {
					columns = "CCACC"
				}
				registered, other := columns[2], columns[2]
				switch typ {
				case 1:
					registered, other = columns[0], columns[0]
				case 3:
					registered, other = columns[1], columns[1]
				case 5, 7:
					other = columns[3]
				case 6, 8:
					other = columns[4]
				}
				for _, from := range []struct {
					name  string
					nexus *Nexus
					want  byte
				}{{"the holder", r.a, 'A'}, {"a registered nexus", r.b, registered}, {"another nexus", r.c, other}} {
					res := doCDB(from.nexus, &r.rig.c, [8]byte{}, rowCDB(row), rowData, all)
					got := byte('A')
					if res.status == statusReservationConflict {
						got = 'C'
						wantConflict(t, row.name, res)
					}
					if got != from.want {
						t.Errorf("%s from %s: %c, want %c", row.name, from.name, got, from.want)
					}
				}
			}
			// A nexus keeps its rights when its session ends and begins again.
			r.a.Close()
			r.a = r.enter(portA)
			wantGood(t, "WRITE(10) of the holder", r.on(r.a, "2a 00 00000000 00 0001 00", make([]byte, 512)))
		})
	}
}

// What depends on the CDB: START STOP UNIT with START 0 or a power condition.
func TestConflictOfCDB(t *testing.T) {
	r := newPRRig(t, setup{}).registered()
	r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
	wantConflict(t, "stop", r.on(r.b, "1b 00 0000 00 00", nil))
	wantConflict(t, "power condition", r.on(r.b, "1b 00 0000 11 00", nil))
	wantGood(t, "start", r.on(r.b, "1b 00 0000 01 00", nil))
	wantConflict(t, "WRITE(6)", r.on(r.b, "0a 000000 01 00", nil))
	wantConflict(t, "reserved bits", r.on(r.b, "2a 01 00000000 00 0001 00", nil))
	wantGood(t, "stop of the holder", r.on(r.a, "1b 00 0000 00 00", nil))
	wantConflict(t, "a stopped unit", r.on(r.b, "2a 00 00000000 00 0001 00", nil))
}

// SPC-4, section 6.15: the data of PERSISTENT RESERVE IN.
func TestPersistentReserveIn(t *testing.T) {
	r := newPRRig(t, setup{})
	wantOctets(t, r.in(r.a, prReadKeys), unhex("00000000 00000000"))
	wantOctets(t, r.in(r.a, prReadReservation), unhex("00000000 00000000"))
	wantOctets(t, r.in(r.a, prReadFullStatus), unhex("00000000 00000000"))
	wantOctets(t, r.in(r.a, prReportCapabilities), unhex(`
		0008
		1c    # CRH, SIP_C, ATP_C; PTPL_C 0: there is no file
		b0    # TMV, ALLOW COMMANDS 011b
		ea01  # WR_EX_AR EX_AC_RO WR_EX_RO EX_AC WR_EX, EX_AC_AR
		0000`))

	r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
	r.ok(r.c, prRegister, 0, prList(0, keyC, 0x04)) // ALL_TG_PT
	keys := unhex("00000002 00000010 a0a1a2a3a4a5a6a7 c0c1c2c3c4c5c6c7")
	wantOctets(t, r.in(r.c, prReadKeys), keys)
	r.ok(r.c, prReserve, 6, prList(keyC, 0, 0))
	wantOctets(t, r.in(r.b, prReadReservation), unhex(`
		00000002              # PRGENERATION: not of RESERVE
		00000010
		c0c1c2c3c4c5c6c7
		00000000 00
		06                    # SCOPE 0, TYPE
		0000`))
	full := unhex(`
		00000002 00000090
		a0a1a2a3a4a5a6a7
		00000000 00 00 00000000
		0001                  # RELATIVE TARGET PORT IDENTIFIER
		00000030              # ADDITIONAL DESCRIPTOR LENGTH
		45 00 002c
		69716e2e 323032362d31312e 696f2e6578616d706c65 3a61
		2c692c3078 303030323364303030303031 000000
		c0c1c2c3c4c5c6c7
		00000000 03 06 00000000 # ALL_TG_PT, R_HOLDER; SCOPE and TYPE
		0001 00000030` + transportIDC)
	wantOctets(t, r.in(r.b, prReadFullStatus), full)

	// ADDITIONAL LENGTH does not depend on the allocation length.
	for n := range len(full) + 1 {
		res := r.on(r.a, fmt.Sprintf("5e 03 0000000000 %04x 00", n), nil)
		wantGood(t, "READ FULL STATUS", res)
		wantOctets(t, res.in, full[:n])
	}
	wantOctets(t, r.on(r.a, "5e 00 0000000000 0008 00", nil).in, keys[:8])
	wantOctets(t, r.on(r.a, "5e 02 0000000000 0003 00", nil).in, unhex("0008 1c"))

	// All who are registered hold it, and READ RESERVATION has no key.
	r.ok(r.c, prRelease, 6, prList(keyC, 0, 0))
	r.ok(r.c, prReserve, 8, prList(keyC, 0, 0))
	wantSense(t, r.on(r.a, "00", nil), 0x6, 0x2a, reservationsReleased)
	wantOctets(t, r.in(r.b, prReadReservation), unhex("00000002 00000010 0000000000000000 0000000000 08 0000"))
	full[8+12], full[8+13] = 0x01, 8
	full[8+72+13] = 8
	wantOctets(t, r.in(r.b, prReadFullStatus), full)

	for sa := 4; sa < 0x20; sa++ {
		wantField(t, r.on(r.a, fmt.Sprintf("5e %02x 0000000000 ffff 00", sa), nil), 1, 4)
	}
	for sa := 8; sa < 0x20; sa++ {
		wantField(t, r.out(r.a, byte(sa), 0, prList(keyA, 0, 0)), 1, 4)
	}
}

// SPC-4, section 5.13.7: REGISTER and REGISTER AND IGNORE EXISTING KEY.
func TestRegister(t *testing.T) {
	r := newPRRig(t, setup{})
	wantConflict(t, "a key without registration", r.out(r.a, prRegister, 0, prList(keyA, keyB, 0)))
	r.ok(r.a, prRegister, 0, prList(0, 0, 0)) // nothing to do
	r.wantKeys()
	r.ok(r.a, prRegister, 0xf7, prList(0, keyA, 0)) // SCOPE and TYPE do not count
	r.wantKeys(keyA)
	wantConflict(t, "key 0", r.out(r.a, prRegister, 0, prList(0, keyB, 0)))
	wantConflict(t, "another key", r.out(r.a, prRegister, 0, prList(keyB, keyC, 0)))
	r.wantKeys(keyA)
	before := r.generation()
	r.ok(r.a, prRegister, 0, prList(keyA, keyB, 0))
	r.wantKeys(keyB)
	r.ok(r.a, prRegisterAndIgnore, 0, prList(1, keyC, 0))
	r.wantKeys(keyC)
	r.ok(r.c, prRegisterAndIgnore, 0, prList(keyC, keyC, 0)) // a key may be there twice
	r.wantKeys(keyC, keyC)
	r.ok(r.c, prRegisterAndIgnore, 0, prList(0, 0, 0))
	r.ok(r.c, prRegisterAndIgnore, 0, prList(0, 0, 0))
	r.ok(r.a, prRegister, 0, prList(keyC, 0, 0))
	r.wantKeys()
	if n := r.generation() - before; n != 6 {
		t.Errorf("PRGENERATION grew by %d, want 6", n)
	}
	for _, n := range []*Nexus{r.a, r.b, r.c} {
		r.wantAttention(n, 0)
	}
}

// A registration belongs to name and ISID: the other session of an initiator
// has nothing of it, and a later session with the same ISID has.
func TestRegistrationIsOfThePort(t *testing.T) {
	r := newPRRig(t, setup{})
	r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
	wantConflict(t, "another ISID", r.out(r.b, prReserve, 1, prList(keyA, 0, 0)))
	wantConflict(t, "another name", r.out(r.c, prReserve, 1, prList(keyA, 0, 0)))
	r.a.Close()
	p := portA
	p.InitiatorName = strings.ToUpper(p.InitiatorName)
	r.a = r.enter(p)
	r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
}

// The parameter list and the fields of the CDB.
func TestPersistentReserveOutErrors(t *testing.T) {
	r := newPRRig(t, setup{}).registered()
	idC := unhex(transportIDC)
	for n := range prListLen {
		wantSense(t, r.out(r.a, prRegister, 0, make([]byte, n)), 0x5, 0x1a, 0x00)
	}
	wantSense(t, r.out(r.a, prRegister, 0, make([]byte, 25)), 0x5, 0x1a, 0x00)
	wantSense(t, r.on(r.a, "5f 00 00 0000 00010001 00", nil), 0x5, 0x1a, 0x00)
	wantSense(t, r.on(r.a, "5f 00 00 0000 00000018 00", make([]byte, 23)), 0x5, 0x0e, 0x03)
	wantSense(t, r.on(r.a, "5f 00 00 0000 00000018 00", nil), 0x5, 0x0e, 0x03)
	for sa := byte(1); sa <= prRegisterAndIgnore; sa++ {
		wantListBit(t, r.out(r.a, sa, 1, prList(keyA, 0, 0x08)), 20, 3) // SPEC_I_PT
	}
	for _, sa := range []byte{prRegister, prRegisterAndIgnore} {
		wantListBit(t, r.out(r.a, sa, 0, prList(keyA, keyA, 0x01)), 20, 0) // APTPL without a file
	}
	r.ok(r.a, prClear, 0, prList(keyA, 0, 0x01)) // which does not look at it
	r.wantAttention(r.b, reservationsPreempted)
	r.wantAttention(r.c, reservationsPreempted)
	r.registered()

	for _, typ := range []byte{0, 2, 4, 9, 15} {
		wantField(t, r.out(r.a, prReserve, typ, prList(keyA, 0, 0)), 2, 3)
	}
	wantField(t, r.out(r.a, prReserve, 0x11, prList(keyA, 0, 0)), 2, 7)
	for sa := byte(1); sa <= prRegisterAndMove; sa++ {
		if sa != prRegisterAndIgnore {
			list := prList(keyB, keyB, 0)
			if sa == prRegisterAndMove {
				list = moveList(keyB, keyB, 0, idC)
			}
			wantConflict(t, "another key", r.out(r.a, sa, 1, list))
		}
	}
	wantListBit(t, r.out(r.a, prRegisterAndMove, 0, moveList(keyA, keyA, 1, idC)), 17, 0)
	r.wantReservation(0, 0)
	r.wantKeys(keyA, keyB, keyC)
}

// SPC-4, sections 5.13.9 and 5.13.11.2.2: RESERVE and RELEASE.
func TestReserveAndRelease(t *testing.T) {
	for _, typ := range types {
		t.Run(fmt.Sprintf("type %d", typ), func(t *testing.T) {
			r := newPRRig(t, setup{}).registered()
			before := r.generation()
			allHold, roOrAR := typ >= 7, typ >= 5
			key := uint64(keyA)
			if allHold {
				key = 0
			}
			r.ok(r.a, prRelease, typ, prList(keyA, 0, 0)) // nothing to release
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
			r.wantReservation(typ, key)
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0)) // again
			for _, other := range types {
				if other != typ {
					wantConflict(t, "another type", r.out(r.a, prReserve, other, prList(keyA, 0, 0)))
					wantSense(t, r.out(r.a, prRelease, other, prList(keyA, 0, 0)), 0x5, 0x26, 0x04)
				}
			}
			wantSense(t, r.out(r.a, prRelease, 0x10|typ, prList(keyA, 0, 0)), 0x5, 0x26, 0x04)
			if res := r.out(r.b, prReserve, typ, prList(keyB, 0, 0)); allHold {
				wantGood(t, "RESERVE of another holder", res)
			} else {
				wantConflict(t, "RESERVE of another nexus", res)
				r.ok(r.b, prRelease, typ, prList(keyB, 0, 0)) // of no effect
			}
			r.wantReservation(typ, key)
			for _, n := range []*Nexus{r.a, r.b, r.c} {
				r.wantAttention(n, 0)
			}
			r.ok(r.a, prRelease, typ, prList(keyA, 0, 0))
			r.wantReservation(0, 0)
			r.wantAttention(r.a, 0)
			for _, n := range []*Nexus{r.b, r.c} {
				if roOrAR {
					r.wantAttention(n, reservationsReleased)
				}
				r.wantAttention(n, 0)
			}
			if r.generation() != before {
				t.Error("PRGENERATION has changed")
			}
		})
	}
}

// SPC-4, section 5.13.11.2.3: who unregisters, releases.
func TestUnregisterReleases(t *testing.T) {
	for _, typ := range types {
		t.Run(fmt.Sprintf("type %d", typ), func(t *testing.T) {
			r := newPRRig(t, setup{}).registered()
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
			r.ok(r.b, prRegister, 0, prList(keyB, 0, 0)) // no holder, or one of many
			r.ok(r.a, prRegister, 0, prList(keyA, 0, 0))
			r.wantAttention(r.a, 0)
			r.wantAttention(r.b, 0) // not registered any more
			switch {
			case typ >= 7:
				r.wantReservation(typ, 0)
				r.wantAttention(r.c, 0)
				r.ok(r.c, prRegister, 0, prList(keyC, 0, 0))
			case typ >= 5:
				r.wantAttention(r.c, reservationsReleased)
			default:
				r.wantAttention(r.c, 0)
			}
			r.wantReservation(0, 0)
		})
	}
}

// SPC-4, section 5.13.11.2.7.
func TestClear(t *testing.T) {
	for _, typ := range append(types, 0) {
		r := newPRRig(t, setup{}).registered()
		if typ != 0 {
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
		}
		before := r.generation()
		r.ok(r.b, prClear, 0xff, prList(keyB, 0x1234, 0))
		if r.generation() != before+1 {
			t.Error("PRGENERATION was not incremented once")
		}
		r.wantReservation(0, 0)
		r.wantKeys()
		r.wantAttention(r.a, reservationsPreempted)
		r.wantAttention(r.b, 0)
		r.wantAttention(r.c, reservationsPreempted)
		wantGood(t, "WRITE(10)", r.on(r.c, "2a 00 00000000 00 0001 00", make([]byte, 512)))
	}
}

// SPC-4, sections 5.13.11.2.4 to 5.13.11.2.6: what PREEMPT and PREEMPT AND
// ABORT from port B take, and who hears of it.
func TestPreempt(t *testing.T) {
	for name, s := range map[string]struct {
		typ      byte   // reservation of A
		sameKey  bool   // C has registered keyA too
		saKey    uint64 // of the command
		newType  byte
		keys     []uint64 // that are left
		want     byte     // reservation that is left
		wantKey  uint64
		a, c     byte // unit attentions
		conflict bool
		aborted  string // whose commands PREEMPT AND ABORT stops
	}{
		"registration, no reservation": {saKey: keyA, newType: 0xff, keys: []uint64{keyB, keyC}, a: registrationsPreempted, aborted: "a"},
		"two of one key":               {sameKey: true, saKey: keyA, keys: []uint64{keyB}, a: registrationsPreempted, c: registrationsPreempted, aborted: "ac"},
		"itself, no reservation":       {saKey: keyB, keys: []uint64{keyA, keyC}, aborted: "b"},
		"key of nobody":                {saKey: 5, newType: 1, conflict: true, keys: []uint64{keyA, keyB, keyC}},
		"key 0, no reservation":        {saKey: 0, newType: 1, conflict: true, keys: []uint64{keyA, keyB, keyC}},
		"not the holder":               {typ: 1, saKey: keyC, newType: 0xff, keys: []uint64{keyA, keyB}, want: 1, wantKey: keyA, c: registrationsPreempted, aborted: "c"},
		"holder":                       {typ: 1, saKey: keyA, newType: 1, keys: []uint64{keyB, keyC}, want: 1, wantKey: keyB, a: registrationsPreempted, aborted: "a"},
		"holder, two of one key":       {typ: 1, sameKey: true, saKey: keyA, newType: 1, keys: []uint64{keyB}, want: 1, wantKey: keyB, a: registrationsPreempted, c: registrationsPreempted, aborted: "ac"},
		"holder, new type":             {typ: 1, saKey: keyA, newType: 6, keys: []uint64{keyB, keyC}, want: 6, wantKey: keyB, a: registrationsPreempted, c: reservationsReleased, aborted: "a"},
		"holder, all registrants new":  {typ: 5, saKey: keyA, newType: 8, keys: []uint64{keyB, keyC}, want: 8, a: registrationsPreempted, c: reservationsReleased, aborted: "a"},
		"all registrants, by key 0":    {typ: 7, saKey: 0, newType: 3, keys: []uint64{keyB}, want: 3, wantKey: keyB, a: registrationsPreempted, c: registrationsPreempted, aborted: "ac"},
		"all registrants, one of them": {typ: 8, saKey: keyC, newType: 0xff, keys: []uint64{keyA, keyB}, want: 8, c: registrationsPreempted, aborted: "c"},
		"all registrants, itself":      {typ: 8, saKey: keyB, newType: 1, keys: []uint64{keyA, keyC}, want: 8, aborted: "b"},
		"all registrants, nobody":      {typ: 8, saKey: 5, newType: 1, conflict: true, keys: []uint64{keyA, keyB, keyC}, want: 8},
	} {
		for _, sa := range []byte{prPreempt, prPreemptAndAbort} {
			t.Run(fmt.Sprintf("%s/service action %d", name, sa), func(t *testing.T) {
				r := newPRRig(t, setup{}).registered()
				if s.sameKey {
					r.ok(r.c, prRegister, 0, prList(keyC, keyA, 0))
				}
				if s.typ != 0 {
					r.ok(r.a, prReserve, s.typ, prList(keyA, 0, 0))
				}
				var aborted []string
				for who, n := range map[string]*Nexus{"a": r.a, "b": r.b, "c": r.c} {
					n.OnPreempt(func(lun [8]byte, except *Command) {
						if lun != [8]byte{} || except != &r.rig.c || except.row.sa != prPreemptAndAbort {
							t.Errorf("commands for % x are stopped, except %v", lun, except.row)
						}
						// In force already: what comes now is held against it.
						if got := r.unit.reservations.persistent.typ; got != s.want {
							t.Errorf("type %d while commands are stopped, want %d", got, s.want)
						}
						aborted = append(aborted, who)
					})
				}
				before := r.generation()
				res := r.out(r.b, sa, s.newType, prList(keyB, s.saKey, 0))
				if s.conflict {
					wantConflict(t, name, res)
				} else {
					wantGood(t, name, res)
					before++
				}
				if got := r.generation(); got != before {
					t.Errorf("PRGENERATION %d, want %d", got, before)
				}
				r.wantAttention(r.a, s.a)
				r.wantAttention(r.b, 0)
				r.wantAttention(r.c, s.c)
				r.wantKeys(s.keys...)
				r.wantReservation(s.want, s.wantKey)
				slices.Sort(aborted)
				if got := strings.Join(aborted, ""); sa == prPreemptAndAbort && got != s.aborted || sa == prPreempt && got != "" {
					t.Errorf("commands of %q were stopped, want %q", got, s.aborted)
				}
			})
		}
	}
}

func TestPreemptErrors(t *testing.T) {
	r := newPRRig(t, setup{}).registered()
	r.ok(r.a, prReserve, 5, prList(keyA, 0, 0))
	wantListBit(t, r.out(r.b, prPreempt, 5, prList(keyB, 0, 0)), 8, noField)
	wantField(t, r.out(r.b, prPreempt, 2, prList(keyB, keyA, 0)), 2, 3)
	wantField(t, r.out(r.b, prPreempt, 0x15, prList(keyB, keyA, 0)), 2, 7)
	r.wantKeys(keyA, keyB, keyC)
	r.wantReservation(5, keyA)

	// A holder that preempts itself changes the type and stays registered.
	r.ok(r.a, prPreempt, 3, prList(keyA, keyA, 0))
	r.wantKeys(keyA, keyB, keyC)
	r.wantReservation(3, keyA)
	r.wantAttention(r.a, 0)
	r.wantAttention(r.b, reservationsReleased)
	r.wantAttention(r.c, reservationsReleased)
	r.ok(r.a, prPreempt, 8, prList(keyA, keyA, 0))
	r.wantReservation(8, 0)
	r.wantAttention(r.b, reservationsReleased)
	r.wantAttention(r.c, reservationsReleased)
	checkState(t, r)
	r.ok(r.a, prRelease, 8, prList(keyA, 0, 0))
	r.wantAttention(r.b, reservationsReleased)
	// A session that has gone has no commands, and needs no OnPreempt.
	r.c.Close()
	r.ok(r.a, prPreemptAndAbort, 3, prList(keyA, keyC, 0))
	r.ok(r.a, prPreemptAndAbort, 3, prList(keyA, keyB, 0))
	r.wantKeys(keyA)
}

// SPC-4, section 5.13.8.
func TestRegisterAndMove(t *testing.T) {
	idC := unhex(transportIDC)
	for _, typ := range []byte{1, 3, 5, 6} {
		r := newPRRig(t, setup{})
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
		r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
		before := r.generation()
		r.ok(r.a, prRegisterAndMove, 0xff, moveList(keyA, keyC, 0, idC))
		r.wantReservation(typ, keyC)
		r.wantKeys(keyA, keyC)
		r.ok(r.c, prRegisterAndMove, 0, moveList(keyC, keyB, 0x02, initiatorPort{portB.InitiatorName, portB.ISID}.appendTransportID(nil))) // UNREG
		r.wantReservation(typ, keyB)
		r.wantKeys(keyA, keyB)
		wantConflict(t, "WRITE(10)", r.on(r.c, "2a 00 00000000 00 0001 00", nil))
		wantGood(t, "WRITE(10)", r.on(r.b, "2a 00 00000000 00 0001 00", make([]byte, 512)))
		r.ok(r.b, prRegisterAndMove, 0, moveList(keyB, 7, 0x02, initiatorPort{portA.InitiatorName, portA.ISID}.appendTransportID(nil)))
		r.wantReservation(typ, 7)
		r.wantKeys(7)
		if got := r.generation(); got != before+3 {
			t.Errorf("PRGENERATION %d, want %d", got, before+3)
		}
		for _, n := range []*Nexus{r.a, r.b, r.c} {
			r.wantAttention(n, 0)
		}
	}

	r := newPRRig(t, setup{}).registered()
	move := func(list []byte) result { return r.out(r.a, prRegisterAndMove, 0, list) }
	wantField(t, move(moveList(keyA, keyC, 0, idC)), 1, 4) // there is no reservation
	r.ok(r.b, prReserve, 8, prList(keyB, 0, 0))
	wantConflict(t, "all registrants", move(moveList(keyA, keyC, 0, idC)))
	r.ok(r.b, prRelease, 8, prList(keyB, 0, 0))
	r.wantAttention(r.a, reservationsReleased)
	r.ok(r.b, prReserve, 1, prList(keyB, 0, 0))
	wantConflict(t, "who does not hold the reservation", move(moveList(keyA, keyC, 0, idC)))
	r.ok(r.b, prRelease, 1, prList(keyB, 0, 0))
	r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
	wantListBit(t, move(moveList(keyA, 0, 0, idC)), 8, noField)
	other := moveList(keyA, keyC, 0, idC)
	other[19] = 2
	wantListBit(t, move(other), 18, noField)
	wantListBit(t, move(moveList(keyA, keyC, 0, nil)), 20, noField)
	wantListBit(t, move(moveList(keyA, keyC, 0, append(idC, idC...))), 20, noField)
	wantListBit(t, move(moveList(keyA, keyC, 0, initiatorPort{portA.InitiatorName, portA.ISID}.appendTransportID(nil))), 24, noField)
	wantListBit(t, move(moveList(keyA, keyC, 0, deviceID(portC.InitiatorName))), 24, noField) // which port?
	short := moveList(keyA, keyC, 0, idC)
	wantSense(t, move(short[:len(short)-4]), 0x5, 0x1a, 0x00)
	r.wantReservation(1, keyA)
	r.wantKeys(keyA, keyB, keyC)
}

// deviceID is a TransportID with TPID FORMAT 00b.
func deviceID(name string) []byte {
	name = terminated(name)
	return append([]byte{0x05, 0, 0, byte(len(name))}, name...)
}

func TestSpecIPT(t *testing.T) {
	idC := unhex(transportIDC)
	idB := initiatorPort{portB.InitiatorName, portB.ISID}.appendTransportID(nil)
	unknown := initiatorPort{"iqn.2026-11.io.example:later", [6]byte{1}}.appendTransportID(nil)

	t.Run("ports", func(t *testing.T) {
		r := newPRRig(t, setup{})
		r.ok(r.a, prRegister, 0, portList(0, keyA, 0, idC, unknown, idC))
		r.wantKeys(keyA, keyA, keyA)
		if r.generation() != 1 {
			t.Error("PRGENERATION counts registrations, not commands")
		}
		r.ok(r.c, prReserve, 1, prList(keyA, 0, 0))
		r.ok(r.b, prRegister, 0, prList(0, keyB, 0))
		r.wantKeys(keyA, keyA, keyA, keyB)
	})
	t.Run("who is registered", func(t *testing.T) { // SPC-4, table 67, note b
		r := newPRRig(t, setup{})
		r.ok(r.b, prRegister, 0, prList(0, keyB, 0))
		wantListBit(t, r.out(r.a, prRegister, 0, portList(0, keyA, 0, idC, idB)), 28+len(idC), noField)
		r.wantKeys(keyB)
		wantListBit(t, r.out(r.c, prRegister, 0, portList(0, keyC, 0, deviceID(portA.InitiatorName))), 28, noField)
		r.wantKeys(keyB)
	})
	t.Run("device", func(t *testing.T) {
		r := newPRRig(t, setup{})
		r.ok(r.c, prRegister, 0, portList(0, keyC, 0, deviceID(portA.InitiatorName)))
		r.wantKeys(keyC, keyC, keyC)
		r.ok(r.a, prReserve, 1, prList(keyC, 0, 0))
		r = newPRRig(t, setup{})
		wantListBit(t, r.out(r.c, prRegister, 0, portList(0, keyC, 0, deviceID("iqn.2026-11.io.example:absent"))), 28, noField)
		r.wantKeys()
	})
	t.Run("no list", func(t *testing.T) {
		r := newPRRig(t, setup{})
		r.ok(r.a, prRegister, 0, portList(0, keyA, 0))
		r.wantKeys(keyA)
	})
	t.Run("errors", func(t *testing.T) {
		r := newPRRig(t, setup{})
		list := portList(0, keyA, 0, idC, idB)
		for n := prListLen; n < len(list); n++ {
			wantSense(t, r.out(r.a, prRegister, 0, list[:n]), 0x5, 0x1a, 0x00)
		}
		wantSense(t, r.out(r.a, prRegister, 0, append(list, 0, 0, 0, 0)), 0x5, 0x1a, 0x00)
		for octet, value := range map[int]byte{0: 0x44, 3: 0x2d, 4: ' ', 2: 0xff} {
			bad := bytes.Clone(idC)
			bad[octet] = value
			field := map[int]int{0: 0, 2: 2, 3: 2, 4: 4}[octet]
			wantListBit(t, r.out(r.a, prRegister, 0, portList(0, keyA, 0, idB, bad)), 28+len(idB)+field, noField)
		}
		r.wantKeys() // all or nothing
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
		wantListBit(t, r.out(r.a, prRegister, 0, portList(keyA, keyB, 0, idC)), 20, 3)
		wantListBit(t, r.out(r.a, prRegister, 0, portList(keyA, 0, 0, idC)), 20, 3)
		r.wantKeys(keyA)
	})
}

func TestParseTransportID(t *testing.T) {
	id, n, wrong := parseTransportID(append(unhex(transportIDC), 0xff))
	if want := (initiatorPort{portC.InitiatorName, portC.ISID}); wrong != noField || n != 48 || id.device || id.port != want {
		t.Errorf("%+v, %d, %d", id, n, wrong)
	}
	wantOctets(t, id.port.appendTransportID(nil), unhex(transportIDC))
	for n := range 48 {
		if _, _, wrong := parseTransportID(unhex(transportIDC)[:n]); wrong == noField {
			t.Errorf("the first %d octets were accepted", n)
		}
	}
	with := func(format byte, text string) []byte {
		return append(binary.BigEndian.AppendUint16([]byte{format, 0}, uint16(len(text))), text...)
	}
	for name, s := range map[string]struct {
		id    []byte
		wrong int
	}{
		"Fibre Channel":           {make([]byte, 24), 0},
		"TPID FORMAT 10b":         {with(0x85, terminated("iqn.2026-11.io.example:c")), 0},
		"reserved bit":            {with(0x55, terminated("iqn.2026-11.io.example:c,i,0x00023d000001")), 0},
		"ADDITIONAL LENGTH 16":    {with(0x05, "iqn.2026-11.com\x00"), 2},
		"ADDITIONAL LENGTH 22":    {with(0x05, "iqn.2026-11.io.exampl\x00"), 2},
		"no NUL":                  {with(0x05, "iqn.2026-11.io.examp"), 4},
		"NUL inside":              {with(0x05, "iqn.2026-11.io\x00exam\x00"), 4},
		"empty":                   {with(0x05, strings.Repeat("\x00", 20)), 4},
		"ISID in format 00b":      {with(0x05, terminated("iqn.2026-11.io.example:c,i,0x00023d000001")), 4},
		"no ISID in format 01b":   {with(0x45, terminated("iqn.2026-11.io.example:c")), 4},
		"ISID of 11 digits":       {with(0x45, terminated("iqn.2026-11.io.example:c,i,0x00023d00001")), 4},
		"ISID of 13 digits":       {with(0x45, terminated("iqn.2026-11.io.example:c,i,0x00023d0000001")), 4},
		"ISID not hexadecimal":    {with(0x45, terminated("iqn.2026-11.io.example:c,i,0x00023d00000g")), 4},
		"no name before the ISID": {with(0x45, terminated(",i,0x00023d000001")+"\x00\x00\x00\x00"), 4},
		"name of 224 octets":      {with(0x05, terminated(strings.Repeat("x", 224))), 4},
		"not UTF-8":               {with(0x05, terminated("iqn.2026-11.io.example:\xff")), 4},
		"control character":       {with(0x05, terminated("iqn.2026-11.io.exam\nple")), 4},
	} {
		if _, _, wrong := parseTransportID(s.id); wrong != s.wrong {
			t.Errorf("%s: field at %d is wrong, want %d", name, wrong, s.wrong)
		}
	}
	id, _, wrong = parseTransportID(with(0x45, terminated("IQN.2026-11.io.example:"+strings.Repeat("x", 200)+",i,0x00023D00ABCD")))
	if wrong != noField || id.port.String() != "iqn.2026-11.io.example:"+strings.Repeat("x", 200)+",i,0x00023d00abcd" {
		t.Errorf("longest name, upper case: %+v, %d", id, wrong)
	}
}

// There is a limit on registrations; a list that passes it registers nobody.
func TestRegistrationLimit(t *testing.T) {
	r := newPRRig(t, setup{})
	ids := func(n int) (list [][]byte) {
		for i := range n {
			list = append(list, initiatorPort{"iqn.2026-11.io.example:n", [6]byte{4: byte(i >> 8), 5: byte(i)}}.appendTransportID(nil))
		}
		return list
	}
	wantSense(t, r.out(r.a, prRegister, 0, portList(0, keyA, 0, ids(maxRegistrations)...)), 0x5, 0x55, 0x04)
	r.wantKeys()
	r.ok(r.a, prRegister, 0, portList(0, keyA, 0, ids(maxRegistrations-1)...))
	wantSense(t, r.out(r.b, prRegister, 0, prList(0, keyB, 0)), 0x5, 0x55, 0x04)
	wantSense(t, r.out(r.b, prRegisterAndIgnore, 0, prList(0, keyB, 0)), 0x5, 0x55, 0x04)
	r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
	wantSense(t, r.out(r.a, prRegisterAndMove, 0, moveList(keyA, 1, 0, unhex(transportIDC))), 0x5, 0x55, 0x04)
	in := r.in(r.b, prReadFullStatus)
	if want := maxRegistrations * (24 + 48); binary.BigEndian.Uint32(in[4:]) != uint32(want) || len(in) != min(8+want, 0xffff) {
		t.Errorf("READ FULL STATUS: %d octets, ADDITIONAL LENGTH %d, want %d", len(in), binary.BigEndian.Uint32(in[4:]), want)
	}
}

// RESERVE and RELEASE (SPC-2), 6 and 10 octets.
func TestLegacyReserve(t *testing.T) {
	for _, s := range []struct{ reserve, release string }{
		{"16 00 00 0000 00", "17 00 00 0000 00"},
		{"56 00 00 000000 0000 00", "57 00 00 000000 0000 00"},
	} {
		r := newPRRig(t, setup{})
		reserve := func(n *Nexus) result { return r.on(n, s.reserve, nil) }
		wantGood(t, "RESERVE", reserve(r.a))
		wantGood(t, "RESERVE again", reserve(r.a))
		wantConflict(t, "RESERVE of another port", reserve(r.b))
		wantGood(t, "RELEASE of another port", r.on(r.b, s.release, nil))
		wantConflict(t, "still RESERVE of another port", reserve(r.b))
		for i := range commands {
			row := &commands[i]
			if always(row) || !r.unit.supports(row) {
				continue
			}
			res := doCDB(r.b, &r.rig.c, [8]byte{}, rowCDB(row), rowData, all)
			if got, want := res.status == statusReservationConflict, row.flags&anyReserve == 0; got != want {
				t.Errorf("%s of another port: conflict %v, want %v", row.name, got, want)
			}
			res = doCDB(r.a, &r.rig.c, [8]byte{}, rowCDB(row), rowData, all)
			if res.status == statusReservationConflict {
				t.Errorf("%s of the port that has reserved: conflict", row.name)
			}
		}
		for _, cdb := range []string{"00", "1a 00 3f 00 ff 00", "08 000000 01 00"} {
			wantConflict(t, cdb, r.on(r.b, cdb, nil))
		}
		for _, cdb := range []string{"12 00 00 00ff 00", "03 00 0000 ff 00", "a0 00 00 000000 000000ff 00 00"} {
			wantGood(t, cdb, r.on(r.b, cdb, nil))
		}
		// PERSISTENT RESERVE IN and OUT conflict also for who has reserved.
		for _, n := range []*Nexus{r.a, r.b} {
			for sa := range byte(4) {
				wantConflict(t, "PERSISTENT RESERVE IN", r.on(n, fmt.Sprintf("5e %02x 0000000000 ffff 00", sa), nil))
			}
			wantConflict(t, "PERSISTENT RESERVE OUT", r.out(n, prRegister, 0, prList(0, keyA, 0)))
		}
		wantGood(t, "RELEASE", r.on(r.a, s.release, nil))
		wantGood(t, "RELEASE again", r.on(r.a, s.release, nil))
		wantGood(t, "RESERVE of another port", reserve(r.b))

		for name, end := range map[string]func(){
			"the session ends":   func() { r.b.Close() },
			"LOGICAL UNIT RESET": func() { r.c.ResetUnit([8]byte{}) },
			"target reset":       func() { r.c.ResetTarget() },
		} {
			end()
			r.b = r.enter(portB)
			r.wantReset(r.a)
			r.wantReset(r.c)
			wantGood(t, "RESERVE after "+name, reserve(r.a))
			wantGood(t, "RELEASE after "+name, r.on(r.a, s.release, nil))
			wantGood(t, "RESERVE", reserve(r.b))
		}
	}
	r := newPRRig(t, setup{})
	wantField(t, r.on(r.a, "16 01 00 0000 00", nil), 1, 0) // an extent
	// RESERVE while PERSISTENT RESERVE OUT waits for its parameter list.
	c := Command{CDB: append(unhex("5f 00 00 0000 00000018 00"), make([]byte, 6)...)}
	if !r.a.Begin(&c) {
		t.Fatal("REGISTER cannot begin")
	}
	wantGood(t, "RESERVE", r.on(r.b, "16 00 00 0000 00", nil))
	if r.a.Consume(&c, prList(0, keyA, 0), 0) || c.Status != statusReservationConflict {
		t.Errorf("REGISTER after RESERVE: status %#x", c.Status)
	}
	wantGood(t, "RELEASE", r.on(r.b, "17 00 00 0000 00", nil))
	wantField(t, r.on(r.a, "56 10 00 000000 0000 00", nil), 1, 4)
}

// wantReset takes the unit attention of a reset, if there is one.
func (r *prRig) wantReset(n *Nexus) {
	r.t.Helper()
	if res := r.on(n, "00", nil); res.status != StatusGood {
		wantSense(r.t, res, 0x6, 0x29, 0x03)
	}
}

// SPC-4, section 5.13.3 (CRH 1): RESERVE and RELEASE with registrations.
func TestCompatibleReservationHandling(t *testing.T) {
	r := newPRRig(t, setup{})
	both := func(what string, n *Nexus, check func(testing.TB, string, result)) {
		t.Helper()
		for _, cdb := range []string{"16 00 00 0000 00", "56 00 00 000000 0000 00", "17 00 00 0000 00", "57 00 00 000000 0000 00"} {
			check(t, what, r.on(n, cdb, nil))
		}
	}
	r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
	r.ok(r.b, prRegister, 0, prList(0, keyB, 0))
	for _, n := range []*Nexus{r.a, r.b, r.c} {
		both("registrations only", n, wantConflict)
	}
	for _, typ := range types {
		r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
		both("holder", r.a, wantGood)
		if typ >= 5 {
			both("registered", r.b, wantGood)
		} else {
			both("registered", r.b, wantConflict)
		}
		both("not registered", r.c, wantConflict)
		// Neither has an effect.
		wantConflict(t, "WRITE(10)", r.on(r.c, "2a 00 00000000 00 0001 00", nil))
		r.ok(r.a, prRelease, typ, prList(keyA, 0, 0))
		r.wantReleased(r.b, typ)
	}
	r.a.ResetUnit([8]byte{}) // leaves persistent reservations and registrations
	wantSense(t, r.on(r.see, "00", nil), 0x6, 0x29, 0x03)
	r.wantKeys(keyA, keyB)
}

// SPC-4, section 5.13.5: the loss of power, which a cold reset counts as, takes
// what APTPL does not keep.
func TestReservationsPowerOn(t *testing.T) {
	r := newPRRig(t, setup{})
	r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
	r.ok(r.a, prReserve, 3, prList(keyA, 0, 0))
	r.inv.PowerOn()
	for _, n := range []*Nexus{r.a, r.b, r.see} {
		wantSense(t, r.on(n, "00", nil), 0x6, 0x29, 0x00)
	}
	r.wantKeys()
	wantGood(t, "WRITE(10)", r.on(r.b, "2a 00 00000000 00 0000 00", nil))
}

// wantReleased takes the unit attention of a RELEASE of that type.
func (r *prRig) wantReleased(n *Nexus, typ byte) {
	r.t.Helper()
	if typ >= 5 {
		wantSense(r.t, r.on(n, "00", nil), 0x6, 0x2a, reservationsReleased)
	}
}

// What validation of a Windows failover cluster does with two nodes: keys with
// REGISTER AND IGNORE EXISTING KEY, reservations of type 5, a node that takes
// over by PREEMPT, and a check that the other one is out.
func TestWindowsClusterValidation(t *testing.T) {
	r := newPRRig(t, setup{})
	r.ok(r.a, prRegisterAndIgnore, 0, prList(0, keyA, 0))
	r.ok(r.c, prRegisterAndIgnore, 0, prList(0, keyC, 0))
	r.wantKeys(keyA, keyC)
	r.ok(r.a, prReserve, 5, prList(keyA, 0, 0))
	wantConflict(t, "RESERVE of the other node", r.out(r.c, prReserve, 5, prList(keyC, 0, 0)))
	wantGood(t, "WRITE(10) of a registered node", r.on(r.c, "2a 00 00000000 00 0001 00", make([]byte, 512)))
	wantConflict(t, "WRITE(10) of a node that is not", r.on(r.b, "2a 00 00000000 00 0001 00", nil))
	wantGood(t, "READ(10) of a node that is not", r.on(r.b, "28 00 00000000 00 0001 00", nil))
	wantConflict(t, "PREEMPT of a node that is not", r.out(r.b, prPreempt, 5, prList(keyB, keyA, 0)))
	r.ok(r.c, prPreempt, 5, prList(keyC, keyA, 0))
	r.wantAttention(r.a, registrationsPreempted)
	r.wantReservation(5, keyC)
	wantConflict(t, "WRITE(10) of the node that lost", r.on(r.a, "2a 00 00000000 00 0001 00", nil))
	wantConflict(t, "RELEASE of the node that lost", r.out(r.a, prRelease, 5, prList(keyA, 0, 0)))
	r.ok(r.a, prRegisterAndIgnore, 0, prList(0, keyA, 0))
	wantGood(t, "WRITE(10) again", r.on(r.a, "2a 00 00000000 00 0001 00", make([]byte, 512)))
	r.ok(r.c, prRelease, 5, prList(keyC, 0, 0))
	r.wantAttention(r.a, reservationsReleased)
	r.ok(r.a, prClear, 0, prList(keyA, 0, 0))
	r.wantKeys()
}

// While nothing is reserved, and for the holder and readers, READ and WRITE
// allocate nothing.
func TestNoAllocationWithReservation(t *testing.T) {
	r := newPRRig(t, setup{}).registered()
	check := func(n *Nexus, op byte, want byte) {
		t.Helper()
		x := newTransfer(op, 0, 8, 4096)
		if allocs := testing.AllocsPerRun(100, func() {
			if x.run(n, 4096); x.c.Status != want {
				t.Fatalf("status %#x, want %#x", x.c.Status, want)
			}
		}); allocs != 0 {
			t.Errorf("operation %02x: %v allocations", op, allocs)
		}
	}
	if r.unit.reservations.fence.Load() != nil {
		t.Error("registrations alone make commands look closer")
	}
	r.ok(r.a, prReserve, 5, prList(keyA, 0, 0))
	other := r.enter(Port{InitiatorName: "iqn.2026-11.io.example:other", TargetName: testPort.TargetName, TPGT: 1})
	for _, n := range []*Nexus{r.a, r.b, r.c} {
		check(n, 0x88, StatusGood)
		check(n, 0x8a, StatusGood)
	}
	check(other, 0x88, StatusGood)
	r.ok(r.a, prRelease, 5, prList(keyA, 0, 0))
	if r.unit.reservations.fence.Load() != nil {
		t.Error("a reservation that has gone makes commands look closer")
	}
}

// keeping is a setup whose reservations are in a file, and a way to come back to
// it as after a kill -9: without any goodbye of the process before.
type keeping struct {
	t    testing.TB
	path string
	held *Reservations
}

func newKeeping(t testing.TB) *keeping {
	k := &keeping{t: t, path: filepath.Join(t.TempDir(), "state", "reservations.json")}
	t.Cleanup(func() { k.held.Close() })
	return k
}

// start is a rig over what is in the file.
func (k *keeping) start() *prRig {
	k.t.Helper()
	if k.held != nil {
		k.held.Close()
	}
	var err error
	if k.held, err = OpenReservations(k.path); err != nil {
		k.t.Fatal(err)
	}
	return newPRRig(k.t, setup{opt: Options{Reservations: k.held}})
}

const reservationsGolden = `{
  "version": 2,
  "units": [
    {
      "naa": "3001020304050607",
      "type": 5,
      "registrations": [
        {
          "initiator": "iqn.2026-11.io.example:a,i,0x00023d000001",
          "target_port": 1,
          "key": "0xa0a1a2a3a4a5a6a7",
          "all_target_ports": true,
          "holder": true
        },
        {
          "initiator": "iqn.2026-11.io.example:c,i,0x00023d000001",
          "target_port": 1,
          "key": "0x0000000000000007",
          "all_target_ports": false,
          "holder": false
        }
      ]
    }
  ]
}
`

// reservationsGolden1 is a file of version 1 that says the same.
const reservationsGolden1 = `{
  "version": 1,
  "units": [
    {
      "naa": "3001020304050607",
      "type": 5,
      "holder": "iqn.2026-11.io.example:a,i,0x00023d000001",
      "registrations": [
        {
          "initiator": "iqn.2026-11.io.example:a,i,0x00023d000001",
          "key": "0xa0a1a2a3a4a5a6a7",
          "all_target_ports": true
        },
        {
          "initiator": "iqn.2026-11.io.example:c,i,0x00023d000001",
          "key": "0x0000000000000007",
          "all_target_ports": false
        }
      ]
    }
  ]
}
`

// A file of version 1 is read, and replaced by one of version 2 with the next
// change. What version 1 could not say stays an error.
func TestReservationsFileVersion1(t *testing.T) {
	k := newKeeping(t)
	k.start()
	if err := os.WriteFile(k.path, []byte(reservationsGolden1), 0o600); err != nil {
		t.Fatal(err)
	}
	r := k.start()
	r.wantReservation(5, keyA)
	r.wantKeys(keyA, 7)
	if got := content(t, k.path); got != reservationsGolden1 {
		t.Error("the file has changed without a change")
	}
	r.ok(r.a, prRegister, 0, prList(keyA, keyA, 0x05))
	if got := content(t, k.path); got != reservationsGolden {
		t.Errorf("the file is\n%s", got)
	}
	for old, wrong := range map[string]string{
		`"holder": "iqn.2026-11.io.example:a`: `"holder": "iqn.2026-11.io.example:b`,
		`"type": 5`:                           `"type": 5, "target_port": 1`,
		`"type": 5,`:                          `"type": 5, "type": 5,`,
		`"all_target_ports": true`:            `"all_target_ports": 1`,
		`0x0000000000000007`:                  `0x7`,
	} {
		damaged := strings.Replace(reservationsGolden1, old, wrong, 1)
		if s, err := reservationsKind.Decode([]byte(damaged)); damaged == reservationsGolden1 || err == nil {
			t.Errorf("%s was taken for %+v", wrong, s)
		}
	}
}

// SPC-4, section 5.13.5: APTPL.
func TestAPTPL(t *testing.T) {
	for _, typ := range types {
		t.Run(fmt.Sprintf("type %d", typ), func(t *testing.T) {
			k := newKeeping(t)
			r := k.start()
			wantOctets(t, r.in(r.a, prReportCapabilities), unhex("0008 1d b0 ea01 0000")) // PTPL_C
			r.ok(r.a, prRegister, 0, prList(0, keyA, 0x01))
			wantOctets(t, r.in(r.a, prReportCapabilities), unhex("0008 1d b1 ea01 0000")) // PTPL_A
			r.ok(r.c, prRegister, 0, prList(0, keyC, 0x05))
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
			before := r.in(r.a, prReadFullStatus)
			res := r.in(r.a, prReadReservation)

			r = k.start()
			wantOctets(t, r.in(r.a, prReportCapabilities), unhex("0008 1d b1 ea01 0000"))
			if r.generation() != 0 {
				t.Error("PRGENERATION survived")
			}
			clear(before[:4])
			clear(res[:4])
			wantOctets(t, r.in(r.a, prReadFullStatus), before)
			wantOctets(t, r.in(r.a, prReadReservation), res)
			wantConflict(t, "WRITE(10)", r.on(r.b, "2a 00 00000000 00 0001 00", nil))
			wantGood(t, "WRITE(10)", r.on(r.a, "2a 00 00000000 00 0001 00", make([]byte, 512)))

			// Every change is there after the next kill.
			r.ok(r.a, prRelease, typ, prList(keyA, 0, 0))
			r = k.start()
			r.wantReservation(0, 0)
			r.ok(r.c, prPreempt, typ, prList(keyC, keyA, 0))
			r = k.start()
			r.wantKeys(keyC)
			r.ok(r.c, prClear, 0, prList(keyC, 0, 0))
			r = k.start()
			r.wantKeys()
			wantOctets(t, []byte(content(t, k.path)), []byte("{\n  \"version\": 2,\n  \"units\": []\n}\n"))
		})
	}
	t.Run("the last one counts", func(t *testing.T) {
		k := newKeeping(t)
		r := k.start()
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0x01))
		r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
		r.ok(r.c, prRegister, 0, prList(0, 0, 0)) // registers nothing and says nothing
		r = k.start()
		r.wantReservation(1, keyA)
		r.ok(r.c, prRegister, 0, prList(0, keyC, 0))
		r = k.start()
		r.wantKeys()
		r.wantReservation(0, 0)
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
		r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
		r.ok(r.a, prRegisterAndMove, 0, moveList(keyA, keyC, 0x03, unhex(transportIDC)))
		r = k.start()
		r.wantKeys(keyC)
		r.wantReservation(1, keyC)
	})
	t.Run("golden", func(t *testing.T) {
		k := newKeeping(t)
		r := k.start()
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0x05))
		r.ok(r.c, prRegister, 0, prList(0, 7, 0x01))
		r.ok(r.a, prReserve, 5, prList(keyA, 0, 0))
		if got := content(t, k.path); got != reservationsGolden {
			t.Errorf("the file is\n%s", got)
		}
		// A second unit does not disturb the first.
		id := state.Identity{NAA: [8]byte{0x3f}, Serial: "3f00000000000000"}
		m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		u, err := New(m, Options{Identity: id, Reservations: k.held})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.inv.Add(1, u); err != nil {
			t.Fatal(err)
		}
		n := r.inv.NewNexus(portA)
		do(n, &r.rig.c, [8]byte{0, 1}, "00", nil, all)
		wantGood(t, "REGISTER", do(n, &r.rig.c, [8]byte{0, 1}, "5f 00 00 0000 00000018 00", prList(0, keyB, 1), all))
		r = k.start()
		r.wantKeys(keyA, 7)
		s, err := k.held.load(id.Serial)
		if err != nil || len(s.registrations) != 1 || s.registrations[0].key != keyB {
			t.Errorf("the other unit: %+v, %v", s, err)
		}
	})
}

// A command that cannot be made durable fails, and changes nothing.
func TestReservationsCannotBeStored(t *testing.T) {
	k := newKeeping(t)
	r := k.start()
	r.ok(r.a, prRegister, 0, prList(0, keyA, 0x01))
	before := r.generation()
	for _, name := range []string{"reservations.json.tmp", "."} {
		k.held.SetSync(func(f *os.File) error {
			if f.Name() == filepath.Join(filepath.Dir(k.path), name) {
				return errors.New("injected")
			}
			return f.Sync()
		})
		wantSense(t, r.out(r.c, prRegister, 0, prList(0, keyC, 0x01)), 0x4, 0x44, 0x00)
		wantSense(t, r.out(r.a, prReserve, 1, prList(keyA, 0, 0)), 0x4, 0x44, 0x00)
		wantSense(t, r.out(r.a, prRegister, 0, prList(keyA, keyB, 1)), 0x4, 0x44, 0x00)
		r.wantKeys(keyA)
		r.wantReservation(0, 0)
		wantGood(t, "WRITE(10)", r.on(r.c, "2a 00 00000000 00 0001 00", make([]byte, 512)))
	}
	if r.generation() != before {
		t.Error("PRGENERATION has changed")
	}
	k.held.SetSync(nil)
	r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
	r = k.start()
	r.wantKeys(keyA)
	r.wantReservation(1, keyA)

	// What a failure has left in the file is not there after the next success.
	u := newKeeping(t)
	r2 := u.start()
	u.held.SetSync(func(f *os.File) error {
		if f.Name() == filepath.Dir(u.path) {
			return errors.New("injected")
		}
		return f.Sync()
	})
	wantSense(t, r2.out(r2.c, prRegister, 0, prList(0, keyC, 0x01)), 0x4, 0x44, 0x00)
	u.held.SetSync(nil)
	r2.ok(r2.a, prRegister, 0, prList(0, keyA, 0))
	u.start().wantKeys()

	if err := errors.Join(k.held.Close(), k.held.Close()); err != nil {
		t.Error(err)
	}
	wantSense(t, r.out(r.a, prRelease, 1, prList(keyA, 0, 0)), 0x4, 0x44, 0x00)
}

func TestOpenReservationsRefuses(t *testing.T) {
	if _, err := OpenReservations(""); err == nil {
		t.Error("an empty path was accepted")
	}
	k := newKeeping(t)
	k.start()
	if _, err := OpenReservations(k.path); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second opening: %v", err)
	}
	if _, err := New(newRig(t, setup{}).store, Options{Reservations: k.held}); err == nil {
		t.Error("a unit without identity was accepted")
	}
	for name, s := range map[string]struct{ old, new, want string }{
		"version":             {`"version": 2`, `"version": 3`, "version 3"},
		"version 1":           {`"version": 2`, `"version": 1`, "unknown field"},
		"no units":            {`"units": [`, `"x": [`, "unknown field"},
		"null":                {reservationsGolden, `{"version": 2, "units": null}`, "a list"},
		"null, version 1":     {reservationsGolden, `{"version": 1, "units": null}`, "a list"},
		"identity":            {`"naa": "30`, `"naa": "40`, "the digit 3"},
		"type 2":              {`"type": 5`, `"type": 2`, "type 2"},
		"type 16":             {`"type": 5`, `"type": 16`, "type 16"},
		"type 0 and a holder": {`"type": 5`, `"type": 0`, "want 0 for type 0"},
		"all hold":            {`"type": 5`, `"type": 7`, "want 0 for type 7"},
		"no holder":           {`"holder": true`, `"holder": false`, "0 registrations with holder, want 1"},
		"two holders":         {`"holder": false`, `"holder": true`, "2 registrations with holder, want 1"},
		"target port 0":       {`"target_port": 1`, `"target_port": 0`, "want 1 to 65535"},
		"target port 65536":   {`"target_port": 1`, `"target_port": 65536`, "damaged"},
		"key 0":               {"0x0000000000000007", "0x0000000000000000", "not all 0"},
		"key":                 {"0x0000000000000007", "7", "16 lower-case hex digits"},
		"port":                {`"initiator": "iqn.2026-11.io.example:c,i,0x`, `"initiator": "iqn.2026-11.io.example:c,i,`, "not an initiator port"},
		"upper case":          {`"initiator": "iqn.2026-11.io.example:c`, `"initiator": "iqn.2026-11.io.example:C`, "not an initiator port"},
		"twice":               {`"initiator": "iqn.2026-11.io.example:c`, `"initiator": "iqn.2026-11.io.example:a`, "twice"},
		"repeated member":     {`"type": 5,`, `"type": 5, "type": 5,`, "damaged"},
		"unit twice":          {"    }\n  ]\n}\n", "    }, {\"naa\": \"3001020304050607\", \"type\": 0, \"registrations\": [{\"initiator\": \"a,i,0x000000000000\", \"target_port\": 1, \"key\": \"0x0000000000000001\", \"all_target_ports\": false, \"holder\": false}]}]}", "is there twice"},
		"nobody registered":   {reservationsGolden, `{"version": 2, "units": [{"naa": "3001020304050607", "type": 0, "registrations": []}]}`, "0 registrations"},
		"empty":               {reservationsGolden, "", "is empty"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "r.json")
			damaged := strings.Replace(reservationsGolden, s.old, s.new, 1)
			if damaged == reservationsGolden {
				t.Fatal("nothing is replaced")
			}
			if err := os.WriteFile(path, []byte(damaged), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := OpenReservations(path)
			if err == nil || !strings.Contains(err.Error(), s.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v, want one about %q", err, s.want)
			}
			if got := content(t, path); got != damaged {
				t.Error("the file has changed")
			}
		})
	}
	for n := range len(reservationsGolden) - 1 {
		if _, err := reservationsKind.Decode([]byte(reservationsGolden[:n])); err == nil {
			t.Fatalf("the first %d octets were accepted", n)
		}
	}
}

// Many initiators at once: the state stays sound, and nobody but the holder of an
// Exclusive Access reservation gets through while it holds it.
func TestReservationRaces(t *testing.T) {
	k := newKeeping(t)
	r := k.start()
	var inside sync.Mutex // held by who has the reservation
	// Who is done takes the reservation from others (a PREEMPT): from then on a
	// holder may meet a conflict.
	var preempting atomic.Bool
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			var c Command
			key := uint64(g + 1)
			p := Port{InitiatorName: fmt.Sprintf("iqn.2026-11.io.example:%d", g)}
			out := func(n *Nexus, sa, typ byte, list []byte) byte {
				for {
					res := do(n, &c, [8]byte{}, fmt.Sprintf("5f %02x %02x 0000 00000018 00", sa, typ), list, all)
					if res.status != StatusCheckCondition || res.sense[2] != keyUnitAttention {
						return res.status
					}
				}
			}
			for i := range 30 {
				n := r.inv.NewNexus(p)
				n.OnPreempt(func([8]byte, *Command) {})
				out(n, prRegisterAndIgnore, 0, prList(0, key, byte(i&1)))
				if out(n, prReserve, 3, prList(key, 0, 0)) == StatusGood {
					alone := inside.TryLock()
					if !alone && !preempting.Load() {
						t.Error("two holders at once")
					}
					res := do(n, &c, [8]byte{}, "2a 00 00000000 00 0001 00", make([]byte, 512), all)
					if res.status == statusReservationConflict && !preempting.Load() {
						t.Error("the holder meets a conflict")
					}
					if alone {
						inside.Unlock()
					}
					out(n, prRelease, 3, prList(key, 0, 0))
				}
				do(n, &c, [8]byte{}, "5e 03 0000000000 ffff 00", nil, all)
				do(n, &c, [8]byte{}, "16 00 00 0000 00", nil, all)
				if i%5 == 0 {
					n.ResetUnit([8]byte{})
				}
				n.Close()
			}
			n := r.inv.NewNexus(p)
			defer n.Close()
			preempting.Store(true)
			out(n, prPreemptAndAbort, 3, prList(key, key%4+1, 0))
			out(n, prRegisterAndIgnore, 0, prList(0, 0, 1))
		})
	}
	wg.Wait()
	r.wantReset(r.see)
	r.wantKeys()
	r.wantReservation(0, 0)
}

// FuzzPersistentReserveOut runs any sequence of PERSISTENT RESERVE OUT commands
// with any parameter lists. Each octet of plan begins a command: whose it is, its
// service action and TYPE, and which keys its list has; of data comes the rest.
// After each, what PERSISTENT RESERVE IN says is sound, a command that has failed
// has changed nothing, and the file gives back what is to survive.
func FuzzPersistentReserveOut(f *testing.F) {
	f.Add([]byte{0, 0, 0x01, 1, 1, 0x11, 0, 2, 0x11}, unhex(""), false)
	f.Add([]byte{0, 6, 0x01, 1, 6, 0x01, 0, 0x51, 0x11, 1, 0x54, 0x11, 2, 0x55, 0x12}, unhex(""), true)
	f.Add([]byte{0, 0, 0x01, 0, 0x11, 0x11, 0, 7, 0x12, 1, 3, 0x11}, append(unhex("0001 00000030"), unhex(transportIDC)...), true)
	f.Add([]byte{0, 0, 0x41}, append(unhex("00000030"), unhex(transportIDC)...), true)
	f.Add([]byte{0, 0, 0x01, 1, 0, 0x02, 0, 0x81, 0x11, 1, 0x82, 0x22, 1, 0x84, 0x20}, unhex(""), false)
	f.Fuzz(func(t *testing.T, plan, data []byte, keep bool) {
		if len(plan) > 60 || len(data) > 4096 {
			return
		}
		k := newKeeping(t)
		var err error
		if k.held, err = OpenReservations(k.path); err != nil {
			t.Fatal(err)
		}
		defer k.held.Close()
		k.held.SetSync(func(*os.File) error { return nil })
		var opt Options
		if keep {
			opt.Reservations = k.held
		}
		r := newPRRig(t, setup{opt: opt})
		for ; len(plan) >= 3; plan = plan[3:] {
			n := []*Nexus{r.a, r.b, r.c}[plan[0]%3]
			sa, typ := plan[1]&0x07, plan[1]>>4
			list := prList(uint64(plan[2]>>4&3), uint64(plan[2]&3), plan[2]>>3&0x08|byte(plan[2]>>2&1)|plan[0]>>4&4)
			if sa == prRegisterAndMove {
				list = list[:16]
				list = append(list, 0, plan[2]>>2&3)
			}
			if len(list) < prListLen || list[20]&0x08 != 0 {
				list = append(list, data...)
			}
			s := &r.unit.reservations.persistent
			before := *s
			res := r.out(n, sa, typ, list)
			if res.status != StatusGood && fmt.Sprint(before) != fmt.Sprint(*s) {
				t.Fatalf("status %#x, but %+v has become %+v", res.status, before, *s)
			}
			if res.status == StatusCheckCondition && res.sense[2] != keyIllegalRequest && res.sense[2] != keyUnitAttention {
				t.Fatalf("sense % x", res.sense)
			}
			checkState(t, r)
			if keep {
				got, err := k.held.load(testIdentity.Serial)
				want := prState{}
				if s.aptpl && len(s.registrations) > 0 {
					want = *s
					want.generation = 0
				}
				if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
					t.Fatalf("kept is %+v, %v; want %+v", got, err, want)
				}
				if b, err := os.ReadFile(k.path); err == nil {
					if _, err := reservationsKind.Decode(b); err != nil {
						t.Fatalf("the file %v:\n%s", err, b)
					}
				}
			}
			for _, n := range []*Nexus{r.a, r.b, r.c} { // heard of
				r.on(n, "03 00 0000 12 00", nil)
			}
		}
	})
}

// checkState checks a state of persistent reservations, and that commands are
// held against it.
func checkState(t *testing.T, r *prRig) {
	t.Helper()
	s := &r.unit.reservations.persistent
	holders := 0
	for i, reg := range s.registrations {
		if reg.key == 0 || s.find(reg.nexus) != i {
			t.Fatalf("registration %d of %+v", i, s.registrations)
		}
		if s.holds(reg.nexus) {
			holders++
		}
	}
	switch kind := prTypes[s.typ]; {
	case s.typ == 0 && (holders != 0 || s.holder != nexusName{}),
		s.typ != 0 && !kind.valid,
		kind.valid && !kind.all && holders != 1,
		kind.all && (holders != len(s.registrations) || holders == 0 || s.holder != nexusName{}):
		t.Fatalf("%d holders of %+v", holders, s)
	}
	for _, n := range []*Nexus{r.a, r.b, r.c} {
		r.on(n, "03 00 0000 12 00", nil)
		may := s.typ == 0 || s.holds(n.name) || prTypes[s.typ].registrants && s.find(n.name) >= 0
		res := r.on(n, "0a 000000 01 00", make([]byte, 512))
		if may != (res.status == StatusGood) || !may && res.status != statusReservationConflict {
			t.Fatalf("WRITE(6) of %s: status %#x, with %+v", n.name, res.status, s)
		}
	}
}

// FuzzTransportID: what is decoded comes back the same.
func FuzzTransportID(f *testing.F) {
	f.Add(unhex(transportIDC))
	f.Add(deviceID(portA.InitiatorName))
	f.Fuzz(func(t *testing.T, b []byte) {
		id, n, wrong := parseTransportID(b)
		if wrong != noField {
			return
		}
		if n > len(b) || n%4 != 0 {
			t.Fatalf("%d octets of %d", n, len(b))
		}
		if id.device {
			return
		}
		again := id.port.appendTransportID(nil)
		if id2, n2, wrong := parseTransportID(again); wrong != noField || n2 != len(again) || id2 != id {
			t.Fatalf("%+v came back as %+v (%d)", id, id2, wrong)
		}
	})
}

func FuzzReservationsFile(f *testing.F) {
	f.Add([]byte(reservationsGolden))
	f.Add([]byte(reservationsGolden1))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := reservationsKind.Decode(b)
		if err != nil {
			return
		}
		again, err := reservationsKind.Encode(s)
		if err != nil {
			t.Fatal(err)
		}
		if s2, err := reservationsKind.Decode(again); err != nil || fmt.Sprint(s2) != fmt.Sprint(s) {
			t.Fatalf("%+v came back as %+v, %v", s, s2, err)
		}
	})
}

// content returns what is in a file.
func content(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
