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

// So does a store that fails a copy, with the LUN and the blocks at which it failed: those of the source or those of the destination,
// at any target. A unit that refuses the copy leaves none, and only the unit that failed has an error to show.
func TestStoreFailureOfCopyIsReported(t *testing.T) {
	var b bytes.Buffer
	opt := Options{Events: logTo(slog.New(slog.NewTextHandler(&b, nil)))}
	r := newODXRig(t, setup{opt: opt}, setup{opt: opt, info: volatile})
	r.other.unit.mode.Store(0) // which writes through
	r.good(extentCDB(0x8a, 0, 0, 1024), pattern(1<<19, 1))
	token := r.token(0, blockRange{8, 600})
	failures := []struct {
		what   string
		rig    *rig
		op     backendtest.Op
		from   int64 // bytes
		err    error
		copied string // what the line of EXTENDED COPY says: LUN, LBA, blocks
		token  string // and of WRITE USING TOKEN
	}{
		{"a write", r.other, backendtest.WriteAt, 0, syscall.EIO, "lun=1 .*lba=100 blocks=600", "lun=1 .*lba=100 blocks=512"},
		{"a later write", r.other, backendtest.WriteAt, 612 << 9, syscall.EIO, "lun=1 .*lba=100 blocks=600", "lun=1 .*lba=612 blocks=88"},
		{"a full store", r.other, backendtest.WriteAt, 0, backend.ErrNoSpace, "lun=1 .*lba=100 blocks=600", "lun=1 .*lba=100 blocks=512"},
		{"a sync", r.other, backendtest.Sync, 0, syscall.EIO, "lun=1 .*lba=100 blocks=600", "lun=1 .*lba=100 blocks=600"},
		{"a read", r.rig, backendtest.ReadAt, 0, syscall.EIO, "lun=0 .*lba=8 blocks=600", "lun=0 .*lba=8 blocks=512"},
		{"a later read", r.rig, backendtest.ReadAt, 520 << 9, syscall.EIO, "lun=0 .*lba=8 blocks=600", "lun=0 .*lba=520 blocks=88"},
		{"a look for holes", r.rig, backendtest.Extent, 0, syscall.EIO, "lun=0 .*lba=8 blocks=600", "lun=0 .*lba=8 blocks=600"},
		{"a closed store", r.other, backendtest.WriteAt, 0, backend.ErrClosed, "", ""},
	}
	for _, f := range failures {
		for command, s := range map[string]struct {
			want string
			do   func() result
		}{
			`EXTENDED COPY\S*`: {f.copied, func() result {
				return r.copy(copyList(0, 3, []string{cscdZero, cscdOne}, []string{blocks(0, 1, 600, 8, 100)}))
			}},
			"WRITE USING TOKEN": {f.token, func() result { return writeToken(r.nexus, 1, 1, 0, token, blockRange{100, 600}) }},
		} {
			b.Reset()
			for _, u := range []*Unit{r.unit, r.other.unit} {
				u.storeErrors.last.Store(0)
				u.lastError.Store(nil)
			}
			f.rig.store.Hook(func(op backendtest.Op, off, n int64) error {
				if op == f.op && off+max(n, 1) > f.from {
					return f.err
				}
				return nil
			})
			res := s.do()
			f.rig.store.Hook(nil)
			if res.status != StatusCheckCondition {
				t.Errorf("%s, %s: status %#x", f.what, command, res.status)
			}
			want := "^$"
			if s.want != "" {
				want = `^time=\S+ level=ERROR msg="store has failed" target=\S+ ` + strings.Replace(s.want, ".*", `initiator=\S+ command="`+command+`" `, 1) + ` reason=.* not_logged=0\n$`
			}
			if !regexp.MustCompile(want).MatchString(b.String()) {
				t.Errorf("%s, %s: the log is %q, want %s", f.what, command, b.String(), want)
			}
			for _, u := range []*rig{r.rig, r.other} {
				failed := u.unit.lastError.Load() != nil
				if want := u == f.rig && f.err == syscall.EIO; failed != want {
					t.Errorf("%s, %s: LUN %d has an error: %t, want %t", f.what, command, map[*rig]int{r.other: 1}[u], failed, want)
				}
			}
		}
	}
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
