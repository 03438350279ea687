package lun

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A sanitizing is a medium that lasts, a unit on it, and a way to restart both as after a kill
// -9.
type sanitizing struct {
	t    *testing.T
	path string
	kept *Sanitizations
	m    backend.Store
}

func newSanitizing(t *testing.T) *sanitizing {
	m, err := backend.OpenMemory(backend.MemoryConfig{Size: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	s := &sanitizing{t: t, path: filepath.Join(t.TempDir(), "state", "sanitize.json"), m: m}
	t.Cleanup(func() { s.kept.Close() })
	return s
}

// An undead is a store whose Close leaves the medium for the next unit.
type undead struct{ *backendtest.Faulty }

func (undead) Close() error { return nil }

// start returns a unit over the medium, after change modified its store.
func (s *sanitizing) start(opt Options, change func(*backendtest.Faulty)) *rig {
	s.t.Helper()
	if s.kept != nil {
		s.kept.Close()
	}
	var err error
	if s.kept, err = OpenSanitizations(s.path); err != nil {
		s.t.Fatal(err)
	}
	r := &rig{t: s.t, store: &backendtest.Faulty{Store: s.m}, inv: NewInventory()}
	if change != nil {
		change(r.store)
	}
	opt.Identity, opt.Sanitizations = testIdentity, s.kept
	if r.unit, err = New(undead{r.store}, opt); err != nil {
		s.t.Fatal(err)
	}
	if err := r.inv.Add(0, r.unit); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { r.inv.Close() })
	r.nexus = r.inv.NewNexus(testPort)
	r.run("00", nil) // takes the unit attention
	return r
}

// interrupt begins a SANITIZE, and abandons it when the store gets a call of op.
func (s *sanitizing) interrupt(r *rig, op backendtest.Op, cdb string, list []byte) {
	s.t.Helper()
	held, release := r.hold(op)
	r.good(cdb, list) // IMMED
	<-held
	r.store.Fail(op, backend.ErrClosed) // the process ended
	r.unit.sanitizer.stop.Store(true)
	release()
	<-r.unit.sanitizer.run.done
}

const sanitizeGolden = `{
  "version": 1,
  "units": [
    {
      "naa": "3001020304050607",
      "action": 1,
      "unrestricted": true,
      "failed": false,
      "passes": 3,
      "invert": true,
      "pattern": "01020304"
    }
  ]
}
`

// SBC-3, section 4.11.1: after a loss of power a sanitize restarts from its beginning, and a
// failed one stays failed.
func TestSanitizeSurvivesRestart(t *testing.T) {
	const idle = "{\n  \"version\": 1,\n  \"units\": []\n}\n"
	ready := func(r *rig) func() bool { return func() bool { return r.run("00", nil).status == StatusGood } }
	for _, x := range []struct {
		name, cdb, list string
		op              backendtest.Op
		want            byte
	}{
		{"OVERWRITE", "48 a1 0000000000 0008 00", "83 00 0004 01020304", backendtest.WriteAt, 0},
		{"BLOCK ERASE", "48 82 0000000000 0000 00", "", backendtest.Sync, 0},
		{"CRYPTOGRAPHIC ERASE", "48 83 0000000000 0000 00", "", backendtest.Discard, 0},
	} {
		t.Run(x.name, func(t *testing.T) {
			s := newSanitizing(t)
			r := s.start(Options{Sanitize: true}, nil)
			r.good(extentCDB(0x8a, 0, 0, 8192), pattern(4<<20, 1))
			s.interrupt(r, x.op, x.cdb, unhex(x.list))
			if got := content(t, s.path); x.name == "OVERWRITE" && got != sanitizeGolden {
				t.Errorf("the file is\n%s", got)
			}

			// It restarts, even if SANITIZE is no longer allowed.
			r = s.start(Options{}, func(f *backendtest.Faulty) { f.Hook(func(backendtest.Op, int64, int64) error { return nil }) })
			testkit.Eventually(t, "end of the sanitize", ready(r))
			want := make([]byte, 4<<20)
			if x.list != "" {
				want = bytes.Repeat(unhex("01020304"), 1<<20)
			}
			wantBytes(t, r.good(extentCDB(0x88, 0, 0, 8192), nil), want)
			if got := content(t, s.path); got != idle {
				t.Errorf("the file is\n%s", got)
			}
			// And data written then stay.
			r.good(extentCDB(0x8a, 0, 0, 1), pattern(512, 7))
			r = s.start(Options{}, nil)
			wantBytes(t, r.good(extentCDB(0x88, 0, 0, 1), nil), pattern(512, 7))
		})
	}
	t.Run("in progress", func(t *testing.T) {
		s := newSanitizing(t)
		r := s.start(Options{Sanitize: true}, nil)
		s.interrupt(r, backendtest.Sync, "48 82 0000000000 0000 00", nil)
		let := make(chan struct{})
		r = s.start(Options{Sanitize: true}, func(f *backendtest.Faulty) {
			f.Hook(func(op backendtest.Op, _, _ int64) error {
				if op == backendtest.Sync {
					<-let
				}
				return nil
			})
		})
		wantSense(t, r.run(extentCDB(0x88, 0, 0, 1), nil), 0x2, 0x04, 0x1b)
		close(let)
		testkit.Eventually(t, "end of the sanitize", ready(r))
	})
	t.Run("read-only now", func(t *testing.T) {
		s := newSanitizing(t)
		r := s.start(Options{Sanitize: true}, nil)
		r.good(extentCDB(0x8a, 0, 0, 1), pattern(512, 1))
		s.interrupt(r, backendtest.WriteAt, "48 82 0000000000 0000 00", nil)
		r = s.start(Options{ReadOnly: true}, nil)
		wantSense(t, r.run(extentCDB(0x88, 0, 0, 1), nil), 0x3, 0x31, 0x03)
		r = s.start(Options{}, nil)
		testkit.Eventually(t, "end of the sanitize", ready(r))
		wantBytes(t, r.good(extentCDB(0x88, 0, 0, 1), nil), make([]byte, 512))
	})
	t.Run("failed", func(t *testing.T) {
		s := newSanitizing(t)
		var b bytes.Buffer
		r := s.start(Options{Sanitize: true, Events: logTo(slog.New(slog.NewTextHandler(&b, nil)))}, func(f *backendtest.Faulty) { f.Fail(backendtest.Sync, syscall.EIO) })
		wantSense(t, r.run("48 22 0000000000 0000 00", nil), 0x3, 0x31, 0x03)
		if lines := strings.Split(b.String(), "\n"); len(lines) != 3 ||
			!strings.Contains(lines[0], `msg="sanitize begins" naa=3001020304050607 action=2 initiator=iqn.2026-11.io.example:host`) ||
			!strings.Contains(lines[1], `msg="sanitize failed" naa=3001020304050607 reason="input/output error"`) {
			t.Errorf("the log is %q", lines)
		}
		r = s.start(Options{Sanitize: true}, nil)
		wantSense(t, r.run("00", nil), 0x3, 0x31, 0x03)
		r.good("48 1f 0000000000 0000 00", nil) // AUSE was set
		r.good("00", nil)
		r = s.start(Options{Sanitize: true}, func(f *backendtest.Faulty) { f.Fail(backendtest.Sync, syscall.EIO) })
		r.good("00", nil)
		wantSense(t, r.run(blockErase, nil), 0x3, 0x31, 0x03)
		r = s.start(Options{Sanitize: true}, nil)
		wantField(t, r.run("48 1f 0000000000 0000 00", nil), 1, 4) // now it was not
		r.good(blockErase, nil)
		r.good("00", nil)
	})
}

// A sanitize that cannot be stored does not begin, and one that cannot be forgotten has failed.
func TestSanitizationsCannotBeStored(t *testing.T) {
	failing := func(s *sanitizing, name string) {
		s.kept.SetSync(func(f *os.File) error {
			if f.Name() == filepath.Join(filepath.Dir(s.path), name) {
				return errors.New("injected")
			}
			return f.Sync()
		})
	}
	s := newSanitizing(t)
	r := s.start(Options{Sanitize: true}, nil)
	r.good(extentCDB(0x8a, 0, 0, 1), pattern(512, 1))
	failing(s, "sanitize.json.tmp")
	wantSense(t, r.run(blockErase, nil), 0x4, 0x44, 0x00)
	wantBytes(t, r.good(extentCDB(0x88, 0, 0, 1), nil), pattern(512, 1))
	failing(s, ".") // after the rename: the next start would erase
	wantSense(t, r.run("48 22 0000000000 0000 00", nil), 0x3, 0x31, 0x03)
	wantSense(t, r.run("00", nil), 0x3, 0x31, 0x03)
	wantSense(t, r.run("48 1f 0000000000 0000 00", nil), 0x4, 0x44, 0x00)
	failing(s, "nothing")
	r.good("48 1f 0000000000 0000 00", nil)
	wantBytes(t, r.good(extentCDB(0x88, 0, 0, 1), nil), pattern(512, 1))
	r = s.start(Options{Sanitize: true}, nil)
	wantBytes(t, r.good(extentCDB(0x88, 0, 0, 1), nil), pattern(512, 1))

	held, release := r.hold(backendtest.Discard)
	r.good("48 a2 0000000000 0000 00", nil)
	<-held
	failing(s, "sanitize.json.tmp")
	release()
	<-r.unit.sanitizer.run.done
	wantSense(t, r.run("00", nil), 0x3, 0x31, 0x03)
	failing(s, "nothing")
	r.good("48 1f 0000000000 0000 00", nil)
	if err := errors.Join(s.kept.Close(), s.kept.Close()); err != nil {
		t.Error(err)
	}
	wantSense(t, r.run(blockErase, nil), 0x4, 0x44, 0x00)
}

func TestOpenSanitizationsRefuses(t *testing.T) {
	if _, err := OpenSanitizations(""); err == nil {
		t.Error("an empty path was accepted")
	}
	s := newSanitizing(t)
	s.start(Options{}, nil)
	if _, err := OpenSanitizations(s.path); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second opening: %v", err)
	}
	if _, err := New(newRig(t, setup{}).store, Options{Sanitizations: s.kept}); err == nil {
		t.Error("a unit without identity was accepted")
	}
	if _, err := sanitizationsFormat.Decode([]byte(sanitizeGolden)); err != nil {
		t.Fatal(err)
	}
	for name, x := range map[string]struct{ old, new, want string }{
		"version":        {`"version": 1`, `"version": 2`, "version 2"},
		"no units":       {`"units": [`, `"x": [`, "unknown field"},
		"null":           {sanitizeGolden, `{"version": 1, "units": null}`, "a list"},
		"identity":       {`"naa": "30`, `"naa": "40`, "the digit 3"},
		"action":         {`"action": 1`, `"action": 4`, "action 4"},
		"no passes":      {`"passes": 3`, `"passes": 0`, "0 passes"},
		"passes":         {`"passes": 3`, `"passes": 32`, "32 passes"},
		"erase, passes":  {`"action": 1`, `"action": 2`, "no passes"},
		"no pattern":     {`"01020304"`, `""`, "0 bytes"},
		"pattern":        {`"01020304"`, `"0102030"`, "hex digits"},
		"capitals":       {`"01020304"`, `"0102030A"`, "hex digits"},
		"long pattern":   {`"01020304"`, `"` + strings.Repeat("00", 4097) + `"`, "4097 bytes"},
		"order":          {"\"action\": 1,\n      \"unrestricted\": true", "\"unrestricted\": true, \"action\": 1", "damaged"},
		"twice":          {sanitizeGolden, strings.Replace(sanitizeGolden, "    {", "    {"+sanitizeGolden[strings.Index(sanitizeGolden, "\n      \"naa"):strings.Index(sanitizeGolden, "    }")]+"}, {", 1), "twice"},
		"nothing at all": {sanitizeGolden, "", "empty"},
	} {
		damaged := strings.Replace(sanitizeGolden, x.old, x.new, 1)
		if _, err := sanitizationsFormat.Decode([]byte(damaged)); damaged == sanitizeGolden || err == nil || !strings.Contains(err.Error(), x.want) {
			t.Errorf("%s: %v, want %q in it", name, err, x.want)
			continue
		}
		path := filepath.Join(t.TempDir(), "sanitize.json")
		if err := os.WriteFile(path, []byte(damaged), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenSanitizations(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
		if content(t, path) != damaged {
			t.Errorf("%s: the file has changed", name)
		}
	}
}
