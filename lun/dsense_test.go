package lun

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// controlWith returns a parameter list of MODE SELECT(6) with a Control mode page that has these bits of byte 2
// besides GLTSD (SPC-4, section 7.5.8).
func controlWith(bits byte) string {
	return fmt.Sprintf("00 00 00 00 0a 0a %02x 10 00 40 0000 ffff 0000 ", 0x02|bits)
}

const (
	dSense = 0x04
	tst    = 0x20
)

// wantSenseData checks for CHECK CONDITION with exactly that sense data.
func wantSenseData(t testing.TB, what string, res result, want string) {
	t.Helper()
	if res.status != StatusCheckCondition {
		t.Fatalf("%s: status %#x", what, res.status)
	}
	t.Log(what)
	wantBytes(t, res.sense, unhex(want))
}

// SPC-4, section 4.5.2: with D_SENSE, all sense data is in descriptor format. What fixed format has no room for is
// in it.
func TestDescriptorFormat(t *testing.T) {
	r := newRig(t, setup{})
	wantGood(t, "D_SENSE", r.modeSelect(false, controlWith(dSense)))
	wantSenseData(t, "no descriptor", r.run("ff", nil), "72 05 20 00 000000 00")
	wantSenseData(t, "a field of the CDB", r.run("12 02", nil), `
		72 05 24 00 000000 08
		02 06 0000      # Sense key specific
		c9 0001 00      # SKSV, C/D, BPV, bit 1; byte 1`)
	wantSenseData(t, "a field of the list", r.modeSelect(false, "00 01 00 00"), `
		72 05 26 00 000000 08
		02 06 0000
		80 0001 00      # SKSV, in the list; byte 1`)
	wantSenseData(t, "an LBA", r.run(extentCDB(0x28, 0, 2047, 2), nil), `
		72 05 21 00 000000 0c
		00 0a 80 00 0000000000000800   # Information: VALID`)
	wantSenseData(t, "an LBA of more than 32 bits", r.run(extentCDB(0x88, 0, 1<<40, 1), nil), `
		72 05 21 00 000000 0c
		00 0a 80 00 0000010000000000`)
	wantSenseData(t, "the offset of a miscompare", r.run("89 00 0000000000000000 00 0000 01 00 00",
		append(append(make([]byte, 300), 1), make([]byte, 723)...)), `
		72 0e 1d 00 000000 0c
		00 0a 80 00 000000000000012c   # byte 300`)
	r.store.Fail(backendtest.ReadAt, backend.ErrUnsynced)
	wantSenseData(t, "the medium", r.run(extentCDB(0x28, 0, 0, 1), nil), "72 03 11 00 000000 00")
	r.store.Fail(backendtest.ReadAt, nil)

	// DESC chooses the format of REQUEST SENSE, not D_SENSE (SPC-4, section 6.39).
	r.good("1b 00 0000 00 00", nil)
	wantBytes(t, r.good("03 00 0000 ff 00", nil), unhex("70 00 02 00000000 0a 00000000 04 02 00 000000"))
	wantBytes(t, r.good("03 01 0000 ff 00", nil), unhex("72 02 04 02 000000 00"))
	wantSenseData(t, "not ready", r.run("00", nil), "72 02 04 02 000000 00")
	r.good("1b 00 0000 01 00", nil)

	// What is not there has no mode pages.
	wantSense(t, do(r.nexus, &r.c, [8]byte{0, 7}, "00", nil, all), 0x5, 0x25, 0x00)

	// The counters do not depend on the format, nor does what the transport is told.
	before := r.unit.Counts()[r.nexus.transport].CheckConditions[KindOther][keyIllegalRequest]
	r.run("ff", nil)
	r.nexus.Count(&r.c, 0, false)
	if got := r.unit.Counts()[r.nexus.transport].CheckConditions[KindOther][keyIllegalRequest]; got != before+1 {
		t.Errorf("%d CHECK CONDITIONs with ILLEGAL REQUEST, want %d", got, before+1)
	}
	n := r.inv.NewNexus(testPort)
	wantSenseData(t, "a unit attention", do(n, &r.c, [8]byte{}, "00", nil, all), "72 06 29 00 000000 00")
	if !r.c.Fenced() {
		t.Error("a unit attention in descriptor format is not fenced")
	}
}

// SPC-4, section 6.4.5.4: the number of the segment that failed is command-specific information.
func TestDescriptorFormatOfACopy(t *testing.T) {
	s := newSense(condInexactSegment)
	s.command = 7
	wantBytes(t, s.put(make([]byte, maxSenseLen), true), unhex(`
		72 0a 26 0a 000000 0c
		01 0a 0000 0000000000000007   # Command specific information`))
	s = s.withInfo(1<<64 - 1)
	s.field = 0xffff
	if got := len(s.put(make([]byte, maxSenseLen), true)); got != maxSenseLen {
		t.Errorf("the longest sense data has %d bytes, want %d", got, maxSenseLen)
	}
	wantBytes(t, s.put(make([]byte, maxSenseLen), false), unhex("70 00 0a 00000000 0a 00000007 26 0a 00 c0ffff"))
}

// Each command that fails says the same in both formats: with every reserved bit of every command.
func TestBothFormatsSayTheSame(t *testing.T) {
	fixed, desc := newRig(t, setup{opt: everything}), newRig(t, setup{opt: everything})
	wantGood(t, "D_SENSE", desc.modeSelect(false, controlWith(dSense)))
	compared := 0
	for i := range commands {
		row := &commands[i]
		for o := range row.usage {
			for bit := range 8 {
				if row.usage[o]>>bit&1 != 0 || o == len(row.usage)-1 && 1<<bit != naca {
					continue
				}
				cdb := rowCDB(row)
				cdb[o+1] |= 1 << bit
				f := doCDB(fixed.nexus, &fixed.c, [8]byte{}, cdb, rowData, all)
				d := doCDB(desc.nexus, &desc.c, [8]byte{}, cdb, rowData, all)
				if len(f.sense) != senseLen || len(d.sense) != 16 || f.status != d.status ||
					[3]byte{f.sense[2], f.sense[12], f.sense[13]} != [3]byte(d.sense[1:4]) || [3]byte(f.sense[15:]) != [3]byte(d.sense[12:15]) {
					t.Fatalf("%s: fixed % x, descriptors % x", row.name, f.sense, d.sense)
				}
				compared++
			}
		}
	}
	if compared < 500 {
		t.Errorf("only %d commands compared", compared)
	}
}

// SPC-4, section 7.5.8: D_SENSE and TST are shared by all initiators. The unit notifies the others. With SP it saves
// them, and without SP a reset ends them. Both are settings that an operator sees and resets.
func TestDescriptorSenseIsKept(t *testing.T) {
	for name, bit := range map[string]byte{"descriptor_sense": dSense, "separate_task_sets": tst} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "settings.json")
			s := openSettings(t, path)
			r := newRig(t, saving(s))
			other := r.login()
			has := func(unit *rig, current, saved byte) {
				t.Helper()
				for pc, want := range map[string]byte{"0a": current, "ca": saved, "8a": 0} {
					if got := unit.good("1a 08 "+pc+" 00 ff 00", nil)[4+2]; got != 0x02|want {
						t.Errorf("page control and page %s: byte 2 is %#x, want %#x", pc, got, 0x02|want)
					}
				}
			}
			wantGood(t, "not saved", r.modeSelect(false, controlWith(bit)))
			has(r, bit, 0)
			if name == "descriptor_sense" {
				wantSenseData(t, "the neighbour is notified", do(other, &r.c, [8]byte{}, "00", nil, all), "72 06 2a 01 000000 00")
			} else {
				wantSense(t, do(other, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x2a, 0x01)
			}
			wantGood(t, "no change", r.modeSelect(false, controlWith(bit)))
			wantGood(t, "TEST UNIT READY", do(other, &r.c, [8]byte{}, "00", nil, all))
			r.reset(r.nexus)
			has(r, 0, 0)
			wantGood(t, "saved", r.save(controlWith(bit)))
			has(r, bit, bit)
			if got := r.nexus.HasOwnTaskSet([8]byte{}); got != (bit == tst) {
				t.Errorf("HasOwnTaskSet: %v", got)
			}
			r.nexus.ResetUnit([8]byte{}, true)
			if r.run("00", nil); r.c.cond != condReset {
				t.Errorf("%+v, want BUS DEVICE RESET FUNCTION OCCURRED", r.c.cond)
			}
			has(r, bit, bit)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			s = openSettings(t, path)
			if name == "descriptor_sense" {
				absent, err := NewAbsent(512, Options{Identity: testIdentity, Settings: s})
				if err != nil {
					t.Fatal(err)
				}
				inv := NewInventory()
				if err := inv.Add(0, absent); err != nil {
					t.Fatal(err)
				}
				defer inv.Close()
				var c Command
				wantSenseData(t, "without a store", do(inv.NewNexus(testPort), &c, [8]byte{}, "00", nil, all), "72 06 29 00 000000 00")
			}
			next := newRig(t, saving(s))
			has(next, bit, bit)

			// Another process and a reopened store continue with it.
			r2 := newRig(t, setup{info: volatile})
			if err := r2.unit.Restore(throughJSON(t, next.unit.State())); err != nil {
				t.Fatal(err)
			}
			r3 := newRig(t, setup{info: volatile})
			r3.unit.InheritFrom(next.unit)
			for _, u := range []*Unit{r2.unit, r3.unit} {
				if got := u.mode.Load() & (modeDSense | modeTST); got != next.unit.mode.Load()&(modeDSense|modeTST) || got == 0 {
					t.Errorf("modes %#x", got)
				}
			}
			if changed, err := next.unit.ResetSettings(); !changed || err != nil {
				t.Errorf("ResetSettings: %v, %v", changed, err)
			}
			wantSense(t, next.run("00", nil), 0x6, 0x2a, 0x01)
			has(next, 0, 0)
		})
	}
}
