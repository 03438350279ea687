package lun

import (
	"fmt"
	"sync"
	"testing"
)

// A reused Command shows nothing of the command before.
func TestReusedCommandIsFresh(t *testing.T) {
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
func TestFailEndsCommand(t *testing.T) {
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
	wantBytes(t, r.good("28 00 00000000 00 0002 00", nil), append(pattern(512, 1), make([]byte, 512)...))
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
					n.ResetUnit(lun, true)
				case 1:
					n.ResetTarget(true)
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

// rowCDB returns the shortest valid CDB of a row: an allocation length of 252 if it has one,
// lengths of 0 or 1 block, and START.
func rowCDB(row *command) []byte {
	cdb := make([]byte, 16)
	cdb[0] = row.op
	if row.hasSA() {
		cdb[1] = byte(row.sa)
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
	case 0x3b: // WRITE BUFFER: of the echo buffer
		cdb[1] = bufferEcho
	case 0x3c: // READ BUFFER
		cdb[1], cdb[8] = bufferEchoDescriptor, 252
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

// rowData is data-out for any rowCDB. For SANITIZE it is one pass of zeros.
var rowData = append(unhex("01 00 0001"), make([]byte, 508)...)
