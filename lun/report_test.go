package lun

import "testing"

// SPC-4, section 6.37.
func TestReportTargetPortGroups(t *testing.T) {
	r := newRig(t, setup{})
	group := `
		00          # PREF 0, active/optimized
		01          # AO_SUP
		0001        # TARGET PORT GROUP
		00 00 00    # STATUS CODE: none
		01          # TARGET PORT COUNT
		0000 0001   # RELATIVE TARGET PORT IDENTIFIER`
	wantOctets(t, r.good("a3 0a 00000000 000000ff 00 00", nil), unhex("0000000c"+group))
	wantOctets(t, r.good("a3 2a 00000000 000000ff 00 00", nil), unhex("00000010 10 00 0000"+group)) // RETURN DATA FORMAT 001b
	wantOctets(t, r.good("a3 0a 00000000 00000004 00 00", nil), unhex("0000000c"))
	wantOctets(t, r.good("a3 0a 00000000 00000000 00 00", nil), nil)
	wantField(t, r.run("a3 4a 00000000 000000ff 00 00", nil), 1, 6)
}

// SPC-4, sections 6.7 and 7.3.
func TestLogSense(t *testing.T) {
	r := newRig(t, setup{})
	for _, s := range []struct{ name, cdb, want string }{
		{"supported pages", "4d 00 40 00 00 0000 00ff 00", "00 00 0002 00 2f"},
		{"supported pages and subpages", "4d 00 40 ff 00 0000 00ff 00", "40 ff 0006 00 00 00 ff 2f 00"},
		{"informational exceptions", "4d 00 6f 00 00 0000 00ff 00", `
			2f 00 0008
			0000 03 04              # parameter 0, binary list
			00 00                   # no exception
			ff 00                   # temperature unknown`},
		{"cut", "4d 00 40 00 00 0000 0005 00", "00 00 0002 00"},
	} {
		t.Run(s.name, func(t *testing.T) { wantOctets(t, r.good(s.cdb, nil), unhex(s.want)) })
	}
	wantField(t, r.run("4d 00 4d 00 00 0000 00ff 00", nil), 2, 5)       // Temperature
	wantField(t, r.run("4d 00 6f 01 00 0000 00ff 00", nil), 3, noField) // a subpage
	wantField(t, r.run("4d 00 6f ff 00 0000 00ff 00", nil), 3, noField)
	wantField(t, r.run("4d 00 6f 00 00 0001 00ff 00", nil), 5, noField) // PARAMETER POINTER
	wantField(t, r.run("4d 01 40 00 00 0000 00ff 00", nil), 1, 0)       // SP
}
