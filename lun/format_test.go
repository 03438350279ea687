package lun

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
)

const (
	formatAll  = "04 00 0000 00 00" // without a parameter list
	formatList = "04 10 0000 00 00"
	formatLong = "04 30 0000 00 00"
)

// SBC-3, section 5.3: all blocks become zeros, and a medium that can gives their space back.
func TestFormatUnit(t *testing.T) {
	for _, x := range []struct{ name, cdb, list string }{
		{"without a list", formatAll, ""},
		{"short header", formatList, "00 00 0000"},
		{"short header, FOV and DCRT", formatList, "00 a0 0000"},
		{"long header", formatLong, "00 00 00 00 00000000"},
	} {
		t.Run(x.name, func(t *testing.T) {
			for _, info := range []func(*backend.Info){nil, thick} {
				r := newRig(t, setup{info: info})
				r.good(extentCDB(0x8a, 0, 0, 2048), pattern(1<<20, 1))
				r.good(x.cdb, unhex(x.list))
				wantBytes(t, r.good(extentCDB(0x88, 0, 0, 2048), nil), make([]byte, 1<<20))
				if n := r.store.Calls(backendtest.Discard); (n > 0) != (info == nil) {
					t.Errorf("%d calls of Discard", n)
				}
			}
		})
	}
}

// A list that the unit cannot obey changes nothing.
func TestFormatUnitRefusals(t *testing.T) {
	r := newRig(t, setup{})
	data := pattern(512, 3)
	r.good(extentCDB(0x8a, 0, 5, 1), data)
	wantField(t, r.run("04 40 0000 00 00", nil), 1, 6)                  // FMTPINFO
	wantField(t, r.run("04 00 0000 01 00", nil), 4, 0)                  // FFMT of SBC-4
	wantListField(t, r.run(formatList, unhex("01 00 0000")), 0)         // PROTECTION FIELD USAGE
	wantListField(t, r.run(formatList, unhex("00 08 0000")), 1)         // IP
	wantListField(t, r.run(formatList, unhex("00 00 0004")), 2)         // DEFECT LIST LENGTH
	wantListField(t, r.run(formatLong, unhex("0000 0010 00000000")), 3) // P_I_INFORMATION
	wantListField(t, r.run(formatLong, unhex("0000 0000 00000001")), 4)
	wantSense(t, r.run(formatLong, unhex("00 00 0000")), 0x5, 0x0e, 0x03) // less than the header
	wantBytes(t, r.good(extentCDB(0x88, 0, 5, 1), nil), data)

	protected := newRig(t, setup{opt: Options{ReadOnly: true}})
	wantSense(t, protected.run(formatAll, nil), 0x7, 0x27, 0x00)
}

// SBC-3, section 4.33: an immediate FORMAT UNIT continues after its status. Until its end, all initiators meet
// FORMAT IN PROGRESS, and then work as before.
func TestFormatUnitInProgress(t *testing.T) {
	r := newRig(t, setup{})
	other := r.login()
	held, let := r.hold(backendtest.Sync)
	release := sync.OnceFunc(let)
	defer release()
	r.good(formatList, unhex("00 02 0000")) // IMMED
	<-held
	for _, n := range []*Nexus{r.nexus, other} {
		for _, row := range rowsFor(r.unit) {
			res := doCDB(n, &r.c, [8]byte{}, rowCDB(row), rowData, all)
			if row.flags&absentLUN != 0 {
				wantGood(t, row.name, res)
				continue
			}
			wantSense(t, res, 0x2, 0x04, 0x04)
			if res.sense[15] != 0x80 {
				t.Fatalf("%s: % x, want a progress", row.name, res.sense[15:])
			}
		}
	}
	if got := r.unit.Status(); got != "format in progress" {
		t.Errorf("Status is %q", got)
	}
	other.ResetUnit([8]byte{}, true)
	for _, n := range []*Nexus{r.nexus, other} {
		wantSense(t, do(n, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x29, 0x03)
	}
	wantSense(t, r.run("00", nil), 0x2, 0x04, 0x04) // no reset ends it
	release()
	testkit.Eventually(t, "end of the format", func() bool { return r.run("00", nil).status == StatusGood })
	wantGood(t, "WRITE of the other", do(other, &r.c, [8]byte{}, extentCDB(0x8a, 0, 0, 1), pattern(512, 1), all))
}

// After a FORMAT UNIT that failed nobody gets at the medium before another one, or a SANITIZE, has succeeded.
func TestFormatUnitFails(t *testing.T) {
	r := newRig(t, setup{opt: Options{Sanitize: true}})
	fail := func(op backendtest.Op) {
		t.Helper()
		r.store.Fail(op, syscall.EIO)
		wantSense(t, r.run(formatAll, nil), 0x3, 0x31, 0x01) // FORMAT COMMAND FAILED
		r.store.Fail(op, nil)
		wantSense(t, r.run(extentCDB(0x88, 0, 0, 1), nil), 0x3, 0x31, 0x00) // MEDIUM FORMAT CORRUPTED
		if got := r.unit.Status(); got != "format failed" {
			t.Errorf("Status is %q", got)
		}
	}
	fail(backendtest.Discard)
	r.good("48 3f 0000000000 0000 00", nil) // EXIT FAILURE MODE is about a SANITIZE
	wantSense(t, r.run("00", nil), 0x3, 0x31, 0x00)
	r.good(formatAll, nil)
	r.good("00", nil)
	fail(backendtest.Sync)
	r.good("48 22 0000000000 0000 00", nil) // BLOCK ERASE with AUSE
	r.good("00", nil)

	// The other way around: only a SANITIZE ends a failed SANITIZE.
	r.store.Fail(backendtest.Sync, syscall.EIO)
	wantSense(t, r.run(blockErase, nil), 0x3, 0x31, 0x03)
	r.store.Fail(backendtest.Sync, nil)
	wantSense(t, r.run(formatAll, nil), 0x3, 0x31, 0x03)
}

// A FORMAT UNIT that the end of the process interrupts restarts with the next one.
func TestFormatUnitSurvivesRestart(t *testing.T) {
	s := newSanitizing(t)
	var log bytes.Buffer
	var mu sync.Mutex
	opt := Options{Events: func(e Event) {
		mu.Lock()
		defer mu.Unlock()
		e.Log(slog.New(slog.NewTextHandler(&log, nil)))
	}}
	r := s.start(opt, nil)
	r.good(extentCDB(0x8a, 0, 0, 8192), pattern(4<<20, 1))
	s.interrupt(r, backendtest.Discard, formatList, unhex("00 02 0000"))
	if got := content(t, s.path); !strings.Contains(got, `"action": 32`) {
		t.Errorf("the file is\n%s", got)
	}
	r = s.start(opt, func(f *backendtest.Faulty) { f.Hook(func(backendtest.Op, int64, int64) error { return nil }) })
	testkit.Eventually(t, "end of the format", func() bool { return r.run("00", nil).status == StatusGood })
	wantBytes(t, r.good(extentCDB(0x88, 0, 0, 8192), nil), make([]byte, 4<<20))
	mu.Lock()
	defer mu.Unlock()
	for _, want := range []string{"format begins", "format interrupted", "format restarts", "format done"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("no event %q in\n%s", want, &log)
		}
	}
}

// SPC-4, section 6.42: a self-test reads, and fails where the medium cannot be read.
func TestSendDiagnostic(t *testing.T) {
	r := newRig(t, setup{})
	for _, x := range []struct {
		name, cdb string
		reads     int
		last      bool // it reads the last block
	}{
		{"no self-test", "1d 00 00 0000 00", 0, false},
		{"no pages", "1d 10 00 0000 00", 0, false},
		{"default self-test", "1d 04 00 0000 00", 64, true},
		{"default self-test with DEVOFFL and UNITOFFL", "1d 07 00 0000 00", 64, true},
		{"short self-test", "1d a0 00 0000 00", 64, true},
		{"extended self-test", "1d c0 00 0000 00", 4, true},
	} {
		t.Run(x.name, func(t *testing.T) {
			before, end := r.store.Calls(backendtest.ReadAt), int64(0)
			r.store.Hook(func(op backendtest.Op, off, n int64) error {
				if op == backendtest.ReadAt {
					end = max(end, off+n)
				}
				return nil
			})
			r.good(x.cdb, nil)
			if n := r.store.Calls(backendtest.ReadAt) - before; n != x.reads {
				t.Errorf("%d reads, want %d", n, x.reads)
			}
			if (end == 1<<20) != x.last {
				t.Errorf("read up to byte %d", end)
			}
		})
	}
	for _, x := range []struct {
		cdb        string
		octet, bit int
	}{
		{"1d 20 00 0000 00", 1, 7}, // background short self-test
		{"1d 80 00 0000 00", 1, 7}, // abort background self-test
		{"1d a4 00 0000 00", 1, 7}, // SELFTEST with a code
		{"1d b0 00 0000 00", 1, 4}, // PF with a code
		{"1d 10 00 0004 00", 3, noField},
	} {
		wantField(t, r.run(x.cdb, nil), x.octet, x.bit)
	}
	r.store.Hook(func(op backendtest.Op, off, n int64) error {
		if op == backendtest.ReadAt && off+n == 1<<20 { // the last block is bad
			return syscall.EIO
		}
		return nil
	})
	for _, cdb := range []string{"1d 04 00 0000 00", "1d a0 00 0000 00", "1d c0 00 0000 00"} {
		wantSense(t, r.run(cdb, nil), 0x4, 0x3e, 0x03) // LOGICAL UNIT FAILED SELF-TEST
	}
	r.store.Hook(nil)

	var abort atomic.Bool
	abort.Store(true)
	r.c.Abort = &abort
	if res := r.run("1d c0 00 0000 00", nil); res.status == StatusGood {
		t.Error("an aborted self-test ends with GOOD")
	}
}
