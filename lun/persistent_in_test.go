package lun

import (
	"fmt"
	"testing"
)

// SPC-4, section 6.15: the data of PERSISTENT RESERVE IN.
func TestPersistentReserveIn(t *testing.T) {
	r := newPRRig(t, setup{})
	wantBytes(t, r.in(r.a, prReadKeys), unhex("00000000 00000000"))
	wantBytes(t, r.in(r.a, prReadReservation), unhex("00000000 00000000"))
	wantBytes(t, r.in(r.a, prReadFullStatus), unhex("00000000 00000000"))
	wantBytes(t, r.in(r.a, prReportCapabilities), unhex(`
		0008
		1c    # CRH, SIP_C, ATP_C; PTPL_C 0: there is no file
		b0    # TMV, ALLOW COMMANDS 011b
		ea01  # WR_EX_AR EX_AC_RO WR_EX_RO EX_AC WR_EX, EX_AC_AR
		0000`))

	r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
	r.ok(r.c, prRegister, 0, prList(0, keyC, 0x04)) // ALL_TG_PT
	keys := unhex("00000002 00000010 a0a1a2a3a4a5a6a7 c0c1c2c3c4c5c6c7")
	wantBytes(t, r.in(r.c, prReadKeys), keys)
	r.ok(r.c, prReserve, 6, prList(keyC, 0, 0))
	wantBytes(t, r.in(r.b, prReadReservation), unhex(`
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
	wantBytes(t, r.in(r.b, prReadFullStatus), full)

	// ADDITIONAL LENGTH does not depend on the allocation length.
	for n := range len(full) + 1 {
		res := r.on(r.a, fmt.Sprintf("5e 03 0000000000 %04x 00", n), nil)
		wantGood(t, "READ FULL STATUS", res)
		wantBytes(t, res.in, full[:n])
	}
	wantBytes(t, r.on(r.a, "5e 00 0000000000 0008 00", nil).in, keys[:8])
	wantBytes(t, r.on(r.a, "5e 02 0000000000 0003 00", nil).in, unhex("0008 1c"))

	// All registered nexuses hold it, and READ RESERVATION has no key.
	r.ok(r.c, prRelease, 6, prList(keyC, 0, 0))
	r.ok(r.c, prReserve, 8, prList(keyC, 0, 0))
	wantSense(t, r.on(r.a, "00", nil), 0x6, 0x2a, reservationsReleased)
	wantBytes(t, r.in(r.b, prReadReservation), unhex("00000002 00000010 0000000000000000 0000000000 08 0000"))
	full[8+12], full[8+13] = 0x01, 8
	full[8+72+13] = 8
	wantBytes(t, r.in(r.b, prReadFullStatus), full)

	for sa := 4; sa < 0x20; sa++ {
		wantField(t, r.on(r.a, fmt.Sprintf("5e %02x 0000000000 ffff 00", sa), nil), 1, 4)
	}
	for sa := 8; sa < 0x20; sa++ {
		wantField(t, r.out(r.a, byte(sa), 0, prList(keyA, 0, 0)), 1, 4)
	}
}
