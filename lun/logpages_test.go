package lun

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// SPC-4, section 6.37.
func TestReportTargetPortGroups(t *testing.T) {
	r := newRig(t, setup{})
	group := `
		00          # PREF 0, active/optimized
		0f          # U_SUP, S_SUP, AN_SUP, AO_SUP
		0001        # TARGET PORT GROUP
		00 00 00    # STATUS CODE: none
		01          # TARGET PORT COUNT
		0000 0001   # RELATIVE TARGET PORT IDENTIFIER`
	wantBytes(t, r.good("a3 0a 00000000 000000ff 00 00", nil), unhex("0000000c"+group))
	wantBytes(t, r.good("a3 2a 00000000 000000ff 00 00", nil), unhex("00000010 10 00 0000"+group)) // RETURN DATA FORMAT 001b
	wantBytes(t, r.good("a3 0a 00000000 00000004 00 00", nil), unhex("0000000c"))
	wantBytes(t, r.good("a3 0a 00000000 00000000 00 00", nil), nil)
	wantField(t, r.run("a3 4a 00000000 000000ff 00 00", nil), 1, 6)
}

// SPC-4, sections 6.7 and 7.3.
func TestLogSense(t *testing.T) {
	r := newRig(t, setup{})
	for _, s := range []struct{ name, cdb, want string }{
		{"supported pages", "4d 00 40 00 00 0000 00ff 00", "00 00 0006 00 02 03 0c 19 2f"},
		{"supported pages and subpages", "4d 00 40 ff 00 0000 00ff 00", `
			40 ff 0018
			00 00 00 ff 02 00 02 ff 03 00 03 ff
			0c 00 0c ff 19 00 19 ff 2f 00 2f ff`},
		{"supported subpages", "4d 00 59 ff 00 0000 00ff 00", "59 ff 0004 19 00 19 ff"},
		{"informational exceptions", "4d 00 6f 00 00 0000 00ff 00", `
			af 00 0008              # DS
			0000 03 04              # parameter 0, binary list
			00 00                   # no exception
			ff 00                   # temperature unknown`},
		{"cut", "4d 00 40 00 00 0000 0005 00", "00 00 0006 00"},
	} {
		t.Run(s.name, func(t *testing.T) { wantBytes(t, r.good(s.cdb, nil), unhex(s.want)) })
	}
	wantField(t, r.run("4d 00 4d 00 00 0000 00ff 00", nil), 2, 5)       // Temperature
	wantField(t, r.run("4d 00 4d ff 00 0000 00ff 00", nil), 2, 5)       // and its subpages
	wantField(t, r.run("4d 00 6f 01 00 0000 00ff 00", nil), 3, noField) // a subpage
	wantField(t, r.run("4d 00 6f 00 00 0001 00ff 00", nil), 5, noField) // PARAMETER POINTER
	wantField(t, r.run("4d 00 40 00 00 0001 00ff 00", nil), 5, noField)
	wantField(t, r.run("4d 00 40 ff 00 0001 00ff 00", nil), 5, noField)
	wantField(t, r.run("4d 01 40 00 00 0000 00ff 00", nil), 1, 0) // SP
}

// SPC-4, sections 7.3.6 and 7.3.9: the counts of the unit over all its nexuses.
func TestLogCounters(t *testing.T) {
	r := newRig(t, setup{})
	other := r.login()
	other.SetTransport(ISER)
	r.forget(r.nexus, other)
	block := make([]byte, 512)
	for range 3 {
		r.counted(r.nexus, &r.c, "28 00 00000000 00 0008 00", nil, false)
	}
	r.counted(other, &r.c, "88 00 0000000000000000 00000001 00 00", nil, false)
	r.counted(r.nexus, &r.c, "2a 00 00000000 00 0001 00", block, false)
	r.store.Fail(backendtest.ReadAt, errors.New("injected"))
	r.counted(r.nexus, &r.c, "28 00 00000000 00 0001 00", nil, false)
	r.store.Fail(backendtest.ReadAt, nil)
	r.store.Fail(backendtest.WriteAt, errors.New("injected"))
	for range 2 {
		r.counted(r.nexus, &r.c, "2a 00 00000000 00 0001 00", block, false)
	}
	r.store.Fail(backendtest.WriteAt, nil)
	r.counted(r.nexus, &r.c, "00 00 00 00 00 00", nil, false)

	const general = `
		0001 22 40
		0000000000000005 0000000000000003   # READ and WRITE commands
		0000000000000001 0000000000000019   # blocks received and sent
		0000000000000000 0000000000000000
		0000000000000000 0000000000000000`
	const times = `
		0002 22 08 0000000000000000         # idle
		0003 03 08 00000003 00000001        # of 1 ms`
	for _, s := range []struct{ name, cdb, want string }{
		{"write errors", "4d 00 42 00 00 0000 00ff 00", "82 00 0018 0005 22 08 0000000000000200 0006 22 08 0000000000000002"},
		{"read errors", "4d 00 43 00 00 0000 00ff 00", "83 00 0018 0005 22 08 0000000000003200 0006 22 08 0000000000000001"},
		{"read errors from parameter 6 on", "4d 00 43 00 00 0006 00ff 00", "83 00 000c 0006 22 08 0000000000000001"},
		{"statistics", "4d 00 59 00 00 0000 00ff 00", "99 00 005c" + general + times},
		{"statistics from parameter 1 on", "4d 00 59 00 00 0001 00ff 00", "99 00 005c" + general + times},
		{"statistics from parameter 2 on", "4d 00 59 00 00 0002 00ff 00", "99 00 0018" + times},
		{"cut", "4d 00 59 00 00 0000 0006 00", "99 00 005c 0001"},
	} {
		t.Run(s.name, func(t *testing.T) { wantBytes(t, r.good(s.cdb, nil), unhex(s.want)) })
	}
	wantField(t, r.run("4d 00 43 00 00 0007 00ff 00", nil), 5, noField)
	wantField(t, r.run("4d 00 59 00 00 0004 00ff 00", nil), 5, noField)

	// SPC-4, sections 6.6.1 and 7.3.2.2.2: thresholds and defaults of data counters are 0,
	// and a list has none.
	zero := strings.Repeat("00", 64)
	for name, pc := range map[string]byte{"thresholds": 0b00, "default thresholds": 0b10, "default cumulative values": 0b11} {
		for page, want := range map[byte]string{
			0x00: "00 00 0006 00 02 03 0c 19 2f",
			0x02: "82 00 0018 0005 22 08" + zero[:16] + "0006 22 08" + zero[:16],
			0x03: "83 00 0018 0005 22 08" + zero[:16] + "0006 22 08" + zero[:16],
			0x19: "99 00 005c 0001 22 40" + zero + times,
			0x2f: "af 00 0008 0000 03 04 00 00 ff 00",
		} {
			t.Run(fmt.Sprintf("%s of %02xh", name, page), func(t *testing.T) {
				wantBytes(t, r.good(fmt.Sprintf("4d 00 %02x 00 00 0000 00ff 00", pc<<6|page), nil), unhex(want))
			})
		}
		wantBytes(t, r.good(fmt.Sprintf("4d 00 %02x 00 00 0006 00ff 00", pc<<6|0x03), nil), unhex("83 00 000c 0006 22 08"+zero[:16]))
		available := r.good("4d 00 4c 00 00 0000 00ff 00", nil)
		wantBytes(t, r.good(fmt.Sprintf("4d 00 %02x 00 00 0000 00ff 00", pc<<6|0x0c), nil), available)
	}
}

// SPC-4, section 6.6: LOG SELECT resets the counters of a page, or of all, and notifies the other initiators. The counts that become
// metrics continue, and other units keep theirs.
func TestLogSelect(t *testing.T) {
	r := newRig(t, setup{})
	neighbor := newRig(t, setup{}) // another unit
	other := r.login()
	r.forget(r.nexus)
	neighbor.forget(neighbor.nexus)
	block := make([]byte, 512)
	counted := func(r *rig, cdb string, out []byte) {
		res := do(r.nexus, &r.c, [8]byte{}, cdb, out, all)
		r.nexus.Count(&r.c, uint64(res.consumed+len(res.in)), false)
	}
	work := func(r *rig) {
		t.Helper()
		counted(r, "28 00 00000000 00 0008 00", nil)
		counted(r, "2a 00 00000000 00 0001 00", block)
		r.store.Fail(backendtest.ReadAt, errors.New("injected"))
		counted(r, "28 00 00000000 00 0001 00", nil)
		r.store.Fail(backendtest.ReadAt, nil)
	}
	// pages checks the bytes and errors of pages 03h and 02h, and the commands of page 19h.
	pages := func(r *rig, read, readErrors, written, reads, writes uint64) {
		t.Helper()
		be := binary.BigEndian
		for _, p := range []struct {
			page   byte
			values []uint64
		}{{0x43, []uint64{read, readErrors}}, {0x42, []uint64{written, 0}}, {0x59, []uint64{reads, writes, written / 512, read / 512}}} {
			b := r.good(fmt.Sprintf("4d 00 %02x 00 00 0000 00ff 00", p.page), nil)
			for i, want := range p.values {
				at := 8 + 8*i
				if p.page != 0x59 {
					at = 8 + 12*i
				}
				if got := be.Uint64(b[at:]); got != want {
					t.Errorf("page %02xh, value %d: %d, want %d", p.page&0x3f, i, got, want)
				}
			}
		}
	}
	quiet := func() {
		t.Helper()
		wantGood(t, "TEST UNIT READY of the other initiator", do(other, &r.c, [8]byte{}, "00", nil, all))
	}
	notified := func() {
		t.Helper()
		wantSense(t, do(other, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x2a, 0x02)
		quiet()
		r.good("00", nil) // the one that reset it knows
	}
	work(r)
	work(neighbor)
	pages(r, 4096, 1, 512, 2, 1)

	for _, nothing := range []string{
		"4c 00 00 00", "4c 00 43 00", "4c 00 80 00", // without PCR
		"4c 02 00 00", "4c 02 83 00", // thresholds, which are 0
		"4c 02 4c 00", "4c 02 6f ff", // lists
	} {
		r.good(nothing+"000000 0000 00", nil)
		pages(r, 4096, 1, 512, 2, 1)
		quiet()
	}
	wantField(t, r.run("4c 03 40 00 000000 0000 00", nil), 1, 0)                 // SP
	wantField(t, r.run("4c 00 40 00 000000 0004 00", unhex("02 00 0000")), 8, 2) // a list
	wantField(t, r.run("4c 00 40 00 000000 0100 00", make([]byte, 256)), 7, 0)   // a long one
	wantField(t, r.run("4c 02 4d 00 000000 0000 00", nil), 2, 5)                 // no such page
	wantField(t, r.run("4c 02 43 01 000000 0000 00", nil), 3, noField)           // no such subpage
	wantField(t, r.run("4c 02 40 01 000000 0000 00", nil), 3, noField)           // nor of all pages
	pages(r, 4096, 1, 512, 2, 1)
	quiet()

	metrics := r.unit.counted()
	r.good("4c 02 43 00 000000 0000 00", nil) // Read Error Counters: PCR
	notified()
	for i, want := range []uint64{0, 0} {
		if got := binary.BigEndian.Uint64(r.good("4d 00 43 00 00 0000 00ff 00", nil)[8+12*i:]); got != want {
			t.Errorf("page 03h, value %d: %d, want %d", i, got, want)
		}
	}
	wantBytes(t, r.good("4d 00 59 00 00 0000 00ff 00", nil)[8:24], unhex("0000000000000002 0000000000000001")) // as they were
	wantBytes(t, r.good("4d 00 42 00 00 0000 00ff 00", nil)[8:16], unhex("0000000000000200"))
	r.good("4c 02 42 00 000000 0000 00", nil) // Write Error Counters
	notified()
	for _, page := range []string{"42", "43"} {
		wantBytes(t, r.good("4d 00 "+page+" 00 00 0000 00ff 00", nil)[8:16], make([]byte, 8))
	}
	for _, every := range []string{"4c 02 40 00", "4c 02 40 ff", "4c 00 c0 00", "4c 02 c0 00"} {
		r.good(every+"000000 0000 00", nil)
		notified()
		pages(r, 0, 0, 0, 0, 0)
		work(r)
		pages(r, 4096, 1, 512, 2, 1)
		metrics.commands[KindRead] += 2
		metrics.commands[KindWrite]++
		metrics.bytes[KindRead] += 4096
		metrics.bytes[KindWrite] += 512
		metrics.mediumErrors[KindRead]++
	}
	if got := r.unit.counted(); got != metrics {
		t.Errorf("metrics %+v, want %+v", got, metrics)
	}
	pages(neighbor, 4096, 1, 512, 2, 1)
	neighbor.good("00", nil)
	r.reset(r.nexus)
	pages(r, 4096, 1, 512, 2, 1)

	// An initiator that may only read does not reset the counters of the others.
	if err := r.inv.SetMask(0, maskFor(testPort.InitiatorName, ReadOnly)); err != nil {
		t.Fatal(err)
	}
	wantSense(t, r.run("00", nil), 0x6, 0x2a, 0x01)
	wantSense(t, r.run("4c 02 40 00 000000 0000 00", nil), 0x7, 0x27, 0x00)
	pages(r, 4096, 1, 512, 2, 1)
}

// A command that a failed sanitize refuses has read and written nothing: it does not count as an
// uncorrected error.
func TestSanitizeFailureIsNoErrorOfTheStore(t *testing.T) {
	r := newRig(t, sanitizable)
	r.store.Fail(backendtest.WriteAt, errors.New("injected"))
	wantSense(t, r.overwrite(0, unhex("01 00 0001 5a")), 0x3, 0x31, 0x03)
	r.store.Fail(backendtest.WriteAt, nil)
	r.forget(r.nexus)
	r.counted(r.nexus, &r.c, extentCDB(0x88, 0, 0, 1), nil, false)
	counts := r.counted(r.nexus, &r.c, extentCDB(0x8a, 0, 0, 1), make([]byte, 512), false)
	if n := counts.CheckConditions[KindRead][keyMediumError] + counts.CheckConditions[KindWrite][keyMediumError]; n != 2 {
		t.Errorf("%d MEDIUM ERRORs, want 2", n)
	}
	for _, page := range []string{"42", "43"} {
		wantBytes(t, r.good("4d 00 "+page+" 00 00 0006 00ff 00", nil)[8:], make([]byte, 8))
	}
}

// SBC-3, section 6.4.5: a thin unit reports the space that it takes, if the store knows it.
func TestLogProvisioning(t *testing.T) {
	const page = "4d 00 4c 00 00 0000 00ff 00"
	r := newRig(t, setup{size: 1 << 30})
	resources := func(available, used string) {
		t.Helper()
		wantBytes(t, r.good(page, nil), unhex("8c 00 0018 0001 03 08 "+available+" 02 000000 0002 03 08 "+used+" 01 000000"))
	}
	resources("00004000", "00000000") // 1 GiB
	block := bytes.Repeat([]byte{1}, 512)
	r.good("2a 00 00000000 00 0001 00", block)
	r.good("2a 00 00010000 00 0001 00", block)
	resources("00003ffe", "00000002") // two pages of 64 KiB
	wantBytes(t, r.good("4d 00 4c 00 00 0002 00ff 00", nil), unhex("8c 00 000c 0002 03 08 00000002 01 000000"))
	r.good("42 00 00000000 00 0018 00", unhex("0016 0010 00000000 0000000000000000 00000080 00000000"))
	resources("00003fff", "00000001")

	for name, r := range map[string]*rig{
		"no space is given back":     newRig(t, setup{info: thick}),
		"a store that does not know": newRig(t, setup{}),
	} {
		t.Run(name, func(t *testing.T) {
			if name == "a store that does not know" {
				r.unit.store = struct{ backend.Store }{r.unit.store}
			}
			wantField(t, r.run(page, nil), 2, 5)
			wantField(t, r.run("4d 00 4c ff 00 0000 00ff 00", nil), 2, 5)
			wantBytes(t, r.good("4d 00 40 00 00 0000 00ff 00", nil), unhex("00 00 0005 00 02 03 19 2f"))
		})
	}
}
