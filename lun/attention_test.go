package lun

import "testing"

// SAM-5, section 5.14: a unit attention comes before all other errors, once. INQUIRY, REPORT LUNS
// and REQUEST SENSE do not fail because of it.
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
				wantBytes(t, res.in, unhex("70 00 06 00000000 0a 00000000 29 00 00 000000"))
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
		wantBytes(t, res.in, unhex("72 06 29 00 000000 00"))
	})
	t.Run("resets", func(t *testing.T) {
		by, other, late := r.login(), r.login(), r.inv.NewNexus(testPort)
		by.ResetUnit([8]byte{}, true)
		by.ResetUnit([8]byte{}, true) // not reported twice
		by.ResetUnit([8]byte{0, 9}, true)
		wantSense(t, tur(by, 0), 0x6, 0x29, 0x03) // the one that asked for it, too
		wantSense(t, tur(other, 0), 0x6, 0x29, 0x03)
		wantGood(t, "the second command", tur(other, 0))
		wantGood(t, "the other unit", tur(other, 1))
		wantSense(t, tur(late, 0), 0x6, 0x29, 0x00) // power on first
		wantSense(t, tur(late, 0), 0x6, 0x29, 0x03)

		by.ResetTarget(true)
		for lun := range byte(2) {
			wantSense(t, tur(by, lun), 0x6, 0x29, 0x03)
			wantSense(t, tur(other, lun), 0x6, 0x29, 0x03)
		}
		other.Close()
		by.ResetTarget(true)
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
	t.Run("commands cleared by the transport", func(t *testing.T) {
		n := r.login()
		n.ClearedByTransport([8]byte{})
		n.ClearedByTransport([8]byte{0, 9})
		wantSense(t, tur(n, 0), 0x6, 0x47, 0x7f)
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
