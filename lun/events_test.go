package lun

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
)

// A state file that cannot be replaced leaves one line with its path and the reason, in addition
// to the sense data.
func TestStateNotStoredIsReported(t *testing.T) {
	fail := func(*os.File) error { return errors.New("injected") }
	for name, refuse := range map[string]func(path string, log *slog.Logger){
		"reservations": func(path string, log *slog.Logger) {
			kept, err := OpenReservations(path)
			if err != nil {
				t.Fatal(err)
			}
			defer kept.Close()
			kept.SetSync(fail)
			r := newPRRig(t, setup{opt: Options{Reservations: kept, Events: logTo(log)}})
			wantSense(t, r.out(r.a, prRegister, 0, prList(0, keyA, 0x01)), 0x4, 0x44, 0x00)
		},
		"settings": func(path string, log *slog.Logger) {
			kept := openSettings(t, path)
			defer kept.Close()
			kept.SetSync(fail)
			s := saving(kept)
			s.opt.Events = logTo(log)
			wantSense(t, newRig(t, s).save("00 00 00 00"+cachingOff), 0x4, 0x44, 0x00)
		},
		"sanitizations": func(path string, log *slog.Logger) {
			kept, err := OpenSanitizations(path)
			if err != nil {
				t.Fatal(err)
			}
			defer kept.Close()
			kept.SetSync(fail)
			r := newRig(t, setup{opt: Options{Sanitize: true, Sanitizations: kept, Events: logTo(log)}})
			wantSense(t, r.run(blockErase, nil), 0x4, 0x44, 0x00)
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "state.json")
			var b bytes.Buffer
			refuse(path, slog.New(slog.NewTextHandler(&b, nil)))
			line := b.String()
			if strings.Count(line, "\n") != 1 || !strings.Contains(line, `msg="state not stored" naa=3001020304050607 reason=`) ||
				!strings.Contains(line, path) || !strings.Contains(line, "injected") {
				t.Errorf("the log is %q", line)
			}
		})
	}
}

// A failing store leaves a line with the reason, for which sense data have no room, but not one
// for each command.
func TestStoreFailureIsReportedOnceASecond(t *testing.T) {
	var b bytes.Buffer
	r := newRig(t, setup{opt: Options{Events: logTo(slog.New(slog.NewTextHandler(&b, nil)))}})
	wantLine := func(want string) {
		t.Helper()
		if !regexp.MustCompile(`^time=\S+ level=ERROR msg="store has failed" ` + want + `\n$`).MatchString(b.String()) {
			t.Errorf("the log is %q, want %s", b.String(), want)
		}
		b.Reset()
	}
	r.store.Fail(backendtest.ReadAt, syscall.EIO)
	for range 10 {
		wantSense(t, r.run(extentCDB(0x88, 0, 7, 2), nil), 0x3, 0x11, 0x00)
	}
	wantLine(`target=\S+ lun=0 initiator=\S+ command=READ\(16\) lba=7 blocks=2 reason="input/output error" not_logged=0`)
	r.unit.storeErrors.last.Add(-int64(storeErrorInterval))
	r.store.Fail(backendtest.ReadAt, nil)
	r.store.Fail(backendtest.WriteAt, backend.ErrNoSpace)
	wantSense(t, r.run(extentCDB(0x8a, 0, 7, 1), make([]byte, 512)), 0x7, 0x27, 0x07)
	wantLine(`target=\S+ lun=0 initiator=\S+ command=WRITE\(16\) lba=7 blocks=1 reason=".*" not_logged=9`)
}

// So does a store that fails EXTENDED COPY, but not a unit that refuses the copy.
func TestStoreFailureOfCopyIsReported(t *testing.T) {
	var b bytes.Buffer
	r := newCopyRig(t, setup{opt: Options{Events: logTo(slog.New(slog.NewTextHandler(&b, nil)))}}, setup{info: volatile})
	fail := func(what, want string) {
		t.Helper()
		wantCopyAborted(t, r.copy(copyList(0, 3, []string{cscdZero, cscdOne}, []string{blocks(0, 1, 8, 0, 0)})), 0x0d, 0x01, 0)
		if !regexp.MustCompile(want).MatchString(b.String()) {
			t.Errorf("%s: the log is %q, want %s", what, b.String(), want)
		}
		b.Reset()
		r.unit.storeErrors.last.Store(0)
	}
	line := func(reason string) string {
		return `^time=\S+ level=ERROR msg="store has failed" target=\S+ lun=0 initiator=\S+ command="EXTENDED COPY.*" lba=0 blocks=0 reason="` + reason + `" not_logged=0\n$`
	}
	r.good(extentCDB(0x8a, 0, 0, 8), pattern(4096, 1))
	r.other.store.Fail(backendtest.WriteAt, syscall.EIO)
	fail("a write fails", line("input/output error"))
	r.other.store.Fail(backendtest.WriteAt, nil)
	r.other.store.Fail(backendtest.Sync, backend.ErrUnsynced)
	r.other.unit.mode.Store(0) // which writes through
	fail("a sync fails", line(".*"))
	r.other.store.Fail(backendtest.WriteAt, backend.ErrClosed)
	fail("the destination has gone", `^$`)
}

// Each change of a reservation by RESERVE leaves a line.
func TestReserveIsReported(t *testing.T) {
	var b bytes.Buffer
	r := newRig(t, setup{opt: Options{Events: logTo(slog.New(slog.NewTextHandler(&b, nil)))}})
	other := r.login()
	for _, step := range []struct {
		do   func()
		want string // in the one line there is
	}{
		{func() { r.good("16 00 0000 00 00", nil) }, "reservation changed"},
		{func() { r.good("16 00 0000 00 00", nil) }, ""},
		{func() { do(other, &r.c, [8]byte{}, "17 00 0000 00 00", nil, all) }, ""},
		{func() { r.good("17 00 0000 00 00", nil) }, "reservation changed"},
		{func() { do(other, &r.c, [8]byte{}, "16 00 0000 00 00", nil, all) }, "reservation changed"},
		{other.Close, "reservation ended"},
	} {
		step.do()
		if line := b.String(); step.want == "" && line != "" || strings.Count(line, "\n") > 1 || !strings.Contains(line, step.want) {
			t.Errorf("the log is %q, want %q", line, step.want)
		}
		b.Reset()
	}
}
