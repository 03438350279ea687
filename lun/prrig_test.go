package lun

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"
)

// Initiator ports of the tests: two of one initiator, one of another.
var (
	portA = Port{InitiatorName: "iqn.2026-11.io.example:a", ISID: [6]byte{0, 2, 0x3d, 0, 0, 1}, TargetName: testPort.TargetName, TPGT: 1}
	portB = Port{InitiatorName: "iqn.2026-11.io.example:a", ISID: [6]byte{0, 2, 0x3d, 0, 0, 2}, TargetName: testPort.TargetName, TPGT: 1}
	portC = Port{InitiatorName: "iqn.2026-11.io.example:c", ISID: [6]byte{0, 2, 0x3d, 0, 0, 1}, TargetName: testPort.TargetName, TPGT: 1}
)

const keyA, keyB, keyC = 0xa0a1a2a3a4a5a6a7, 0xb0b1b2b3b4b5b6b7, 0xc0c1c2c3c4c5c6c7

// transportIDC is portC in the form of the standards (SPC-4, section 7.6.4.6).
const transportIDC = `
	45 00 002c                                        # TPID FORMAT 01b, iSCSI; 44 octets
	69716e2e 323032362d31312e 696f2e6578616d706c65 3a63 # iqn.2026-11.io.example:c
	2c692c3078 303030323364303030303031               # ,i,0x00023d000001
	000000`

// A prRig is a rig with three initiator ports, and one that only observes.
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

// enter logs in through p.
func (r *prRig) enter(p Port) *Nexus {
	r.t.Helper()
	n := r.inv.NewNexus(p)
	wantSense(r.t, r.on(n, "00", nil), 0x6, 0x29, 0x00)
	return n
}

func (r *prRig) on(n *Nexus, cdb string, out []byte) result {
	return do(n, &r.rig.c, [8]byte{}, cdb, out, all)
}

// prList returns a parameter list of 24 bytes.
func prList(key, saKey uint64, flags byte) []byte {
	p := make([]byte, prListLen)
	binary.BigEndian.PutUint64(p, key)
	binary.BigEndian.PutUint64(p[8:], saKey)
	p[20] = flags
	return p
}

// moveList returns a parameter list of REGISTER AND MOVE.
func moveList(key, saKey uint64, flags byte, id []byte) []byte {
	p := prList(key, saKey, 0)
	p[17], p[19] = flags, 1 // RELATIVE TARGET PORT IDENTIFIER
	binary.BigEndian.PutUint32(p[20:], uint32(len(id)))
	return append(p, id...)
}

// portList returns a parameter list with SPEC_I_PT.
func portList(key, saKey uint64, flags byte, ids ...[]byte) []byte {
	id := slices.Concat(ids...)
	p := binary.BigEndian.AppendUint32(prList(key, saKey, flags|0x08), uint32(len(id)))
	return append(p, id...)
}

// out sends PERSISTENT RESERVE OUT.
func (r *prRig) out(n *Nexus, sa, scopeType byte, list []byte) result {
	return r.on(n, fmt.Sprintf("5f %02x %02x 0000 %08x 00", sa, scopeType, len(list)), list)
}

// ok sends PERSISTENT RESERVE OUT, which has to succeed.
func (r *prRig) ok(n *Nexus, sa, scopeType byte, list []byte) {
	r.t.Helper()
	wantGood(r.t, fmt.Sprintf("service action %d", sa), r.out(n, sa, scopeType, list))
}

// registered registers all three ports, each with its key.
func (r *prRig) registered() *prRig {
	r.t.Helper()
	for n, key := range map[*Nexus]uint64{r.a: keyA, r.b: keyB, r.c: keyC} {
		r.ok(n, prRegister, 0, prList(0, key, 0))
	}
	return r
}

// in returns the data of PERSISTENT RESERVE IN.
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
	wantBytes(r.t, p, want)
}

// wantAttention checks the pending unit attention of n; ascq 0 is none.
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

// wantReset takes the unit attention of a reset, if one is due.
func (r *prRig) wantReset(n *Nexus) {
	r.t.Helper()
	if res := r.on(n, "00", nil); res.status != StatusGood {
		wantSense(r.t, res, 0x6, 0x29, 0x03)
	}
}

// wantReleased takes the unit attention of a RELEASE of that type.
func (r *prRig) wantReleased(n *Nexus, typ byte) {
	r.t.Helper()
	if typ >= 5 {
		wantSense(r.t, r.on(n, "00", nil), 0x6, 0x2a, reservationsReleased)
	}
}
