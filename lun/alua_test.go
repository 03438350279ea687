package lun

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// setGroups sends SET TARGET PORT GROUPS with descriptors of four bytes.
func (r *prRig) setGroups(n *Nexus, descriptors string) result {
	b := unhex("00000000" + descriptors)
	return r.on(n, "a4 0a 00000000 000000"+hexOctet(len(b))+" 00 00", b)
}

func hexOctet(n int) string { return fmt.Sprintf("%02x", n) }

// wantGroups checks REPORT TARGET PORT GROUPS: state and status code of both
// groups.
func (r *prRig) wantGroups(n *Nexus, one, two string) {
	r.t.Helper()
	wantBytes(r.t, r.on(n, "a3 0a 00000000 000000ff 00 00", nil).in, unhex(`
		00000018
		`+one[:2]+` 0f 0001 00 `+one[2:]+` 00 01 0000 0001
		`+two[:2]+` 0f 0102 00 `+two[2:]+` 00 01 0000 0102`))
}

// served are the commands of the table in standby and, with always, in the unavailable state
// (SPC-4, sections 5.11.2.5 and 5.11.2.6). The standard requires some in standby. The target adds
// READ CAPACITY, which an initiator needs to know the disk.
var served = map[string]string{
	"INQUIRY":                          "always",
	"REPORT LUNS":                      "always",
	"REQUEST SENSE":                    "always",
	"REPORT TARGET PORT GROUPS":        "always",
	"SET TARGET PORT GROUPS":           "always",
	"READ BUFFER":                      "always",
	"WRITE BUFFER":                     "always",
	"SEND DIAGNOSTIC":                  "standby",
	"LOG SELECT":                       "standby",
	"LOG SENSE":                        "standby",
	"MODE SELECT(6)":                   "standby",
	"MODE SELECT(10)":                  "standby",
	"MODE SENSE(6)":                    "standby",
	"MODE SENSE(10)":                   "standby",
	"READ CAPACITY(10)":                "standby",
	"READ CAPACITY(16)":                "standby",
	"REPORT SUPPORTED OPERATION CODES": "standby",
	"REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS": "standby",
}

// SPC-4, sections 5.11 and 6.45: the states of the paths that initiators set.
func TestSetTargetPortGroups(t *testing.T) {
	r, a2 := newPortsRig(t, everything)
	r.wantGroups(r.a, "0000", "0000")
	wantGood(t, "non-optimized", r.setGroups(r.a, "01 00 0102"))
	for _, n := range []*Nexus{r.b, r.c, r.see, a2} { // all except the one that set it
		wantSense(t, r.on(n, "00", nil), 0x6, 0x2a, 0x06)
	}
	for _, n := range []*Nexus{r.a, a2} {
		r.wantGroups(n, "0000", "0101")
		wantGood(t, "TEST UNIT READY", r.on(n, "00", nil))
	}
	wantGood(t, "the same again", r.setGroups(r.a, "01 00 0102"))
	wantGood(t, "no unit attention for no change", r.on(a2, "00", nil))
	wantGood(t, "nothing", r.on(r.a, "a4 0a 00000000 00000000 00 00", nil))
	wantGood(t, "a header", r.setGroups(r.a, ""))

	for _, s := range []struct {
		name, state string
		ascq        byte
	}{{"standby", "02", 0x0b}, {"unavailable", "03", 0x0c}} {
		t.Run(s.name, func(t *testing.T) {
			wantGood(t, s.name, r.setGroups(r.a, s.state+" 00 0102"))
			wantSense(t, r.on(a2, "00", nil), 0x6, 0x2a, 0x06)
			r.wantGroups(a2, "0000", s.state+"01")
			for _, row := range rowsFor(r.unit) {
				res := doCDB(a2, &r.rig.c, [8]byte{}, rowCDB(row), rowData, all)
				pass := served[row.name]
				if strings.HasPrefix(row.name, "PERSISTENT RESERVE") {
					pass = "standby"
				}
				if pass == "always" || pass == s.name {
					wantDone(t, row, res)
				} else {
					wantSense(t, res, 0x2, 0x04, s.ascq)
				}
			}
			if in := r.on(a2, "03 00 0000 ff 00", nil).in; in[2] != 0x2 || in[12] != 0x04 || in[13] != s.ascq {
				t.Errorf("REQUEST SENSE: % x", in)
			}
			wantGood(t, "the other path", r.on(r.a, "2a 00 00000000 00 0001 00", make([]byte, 512)))
		})
	}
	// The standby path itself accepts the command.
	wantGood(t, "active/optimized", r.setGroups(a2, "00 00 0102"))
	wantGood(t, "WRITE(10)", r.on(a2, "2a 00 00000000 00 0001 00", make([]byte, 512)))
	for range 2 {
		wantSense(t, r.on(r.a, "00", nil), 0x6, 0x2a, 0x06)
		wantGood(t, "both at once", r.setGroups(a2, "02 00 0102 01 00 0001"))
	}
}

// A refused SET TARGET PORT GROUPS changes nothing.
func TestRefusedSetTargetPortGroupsChangesNothing(t *testing.T) {
	r, _ := newPortsRig(t, Options{})
	for descriptors, octet := range map[string]int{
		"01 00 0001 04 00 0102": 8, // LOGICAL BLOCK DEPENDENT
		"01 00 0001 0e 00 0102": 8, // OFFLINE
		"01 00 0001 0f 00 0102": 8, // TRANSITIONING
		"01 00 0001 01 00 0002": 10,
		"01 00 0000":            6,
	} {
		wantListField(t, r.setGroups(r.a, descriptors), octet)
	}
	wantSense(t, r.setGroups(r.a, "01 00 00"), 0x5, 0x1a, 0x00)
	wantSense(t, r.on(r.a, "a4 0a 00000000 00010001 00 00", make([]byte, 65537)), 0x5, 0x1a, 0x00)
	wantSense(t, r.on(r.a, "a4 0a 00000000 00000003 00 00", make([]byte, 3)), 0x5, 0x1a, 0x00)
	wantField(t, r.on(r.a, "a4 0b 00000000 00000000 00 00", nil), 1, 4)
	r.wantGroups(r.a, "0000", "0000")
	wantGood(t, "TEST UNIT READY", r.on(r.b, "00", nil))
}

// States of target port groups survive a restart.
func TestPortGroupsSurviveRestart(t *testing.T) {
	path := filepath.Join(t.TempDir(), "settings.json")
	s := openSettings(t, path)
	r, _ := newPortsRig(t, Options{Settings: s})
	wantGood(t, "SET TARGET PORT GROUPS", r.setGroups(r.a, "03 00 0102 01 00 0001"))
	wantSense(t, r.on(r.b, "00", nil), 0x6, 0x2a, 0x06)
	s.SetSync(func(*os.File) error { return errors.New("injected") })
	wantSense(t, r.setGroups(r.a, "00 00 0102"), 0x4, 0x44, 0x00)
	r.wantGroups(r.a, "0101", "0301")
	wantGood(t, "no unit attention for no change", r.on(r.b, "00", nil))
	s.SetSync(nil)
	wantGood(t, "a saved page beside it", r.on(r.a, "15 11 0000 00 00", nil))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	s = openSettings(t, path)
	r = &prRig{rig: newRig(t, setup{opt: Options{Settings: s}})}
	inv := NewInventory(1, 0x0102)
	if err := inv.Add(0, r.unit); err != nil {
		t.Fatal(err)
	}
	r.inv = inv
	a, a2 := r.enter(portA), inv.NewNexus(portA2)
	r.wantGroups(a, "0101", "0301")
	wantSense(t, r.on(a2, "00", nil), 0x6, 0x29, 0x00)
	wantSense(t, r.on(a2, "00", nil), 0x2, 0x04, 0x0c)
}
