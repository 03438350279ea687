package lun

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun/state"
)

// A keeping is a setup that keeps reservations in a file, and restarts from it as after a kill
// -9.
type keeping struct {
	t    testing.TB
	path string
	held *Reservations
}

func newKeeping(t testing.TB) *keeping {
	k := &keeping{t: t, path: filepath.Join(t.TempDir(), "state", "reservations.json")}
	t.Cleanup(func() { k.held.Close() })
	return k
}

// start returns a rig with what the file keeps.
func (k *keeping) start() *prRig {
	k.t.Helper()
	if k.held != nil {
		k.held.Close()
	}
	var err error
	if k.held, err = OpenReservations(k.path); err != nil {
		k.t.Fatal(err)
	}
	return newPRRig(k.t, setup{opt: Options{Reservations: k.held}})
}

const reservationsGolden = `{
  "version": 2,
  "units": [
    {
      "naa": "3001020304050607",
      "type": 5,
      "registrations": [
        {
          "initiator": "iqn.2026-11.io.example:a,i,0x00023d000001",
          "target_port": 1,
          "key": "0xa0a1a2a3a4a5a6a7",
          "all_target_ports": true,
          "holder": true
        },
        {
          "initiator": "iqn.2026-11.io.example:c,i,0x00023d000001",
          "target_port": 1,
          "key": "0x0000000000000007",
          "all_target_ports": false,
          "holder": false
        }
      ]
    }
  ]
}
`

// reservationsGolden1 is a file of version 1 with the same content.
const reservationsGolden1 = `{
  "version": 1,
  "units": [
    {
      "naa": "3001020304050607",
      "type": 5,
      "holder": "iqn.2026-11.io.example:a,i,0x00023d000001",
      "registrations": [
        {
          "initiator": "iqn.2026-11.io.example:a,i,0x00023d000001",
          "key": "0xa0a1a2a3a4a5a6a7",
          "all_target_ports": true
        },
        {
          "initiator": "iqn.2026-11.io.example:c,i,0x00023d000001",
          "key": "0x0000000000000007",
          "all_target_ports": false
        }
      ]
    }
  ]
}
`

// A file of version 1 is read, and the next change replaces it by one of version 2. What version
// 1 could not contain stays an error.
func TestReservationsFileVersion1(t *testing.T) {
	k := newKeeping(t)
	k.start()
	if err := os.WriteFile(k.path, []byte(reservationsGolden1), 0o600); err != nil {
		t.Fatal(err)
	}
	r := k.start()
	r.wantReservation(5, keyA)
	r.wantKeys(keyA, 7)
	if got := content(t, k.path); got != reservationsGolden1 {
		t.Error("the file has changed without a change")
	}
	r.ok(r.a, prRegister, 0, prList(keyA, keyA, 0x05))
	if got := content(t, k.path); got != reservationsGolden {
		t.Errorf("the file is\n%s", got)
	}
	for old, wrong := range map[string]string{
		`"holder": "iqn.2026-11.io.example:a`: `"holder": "iqn.2026-11.io.example:b`,
		`"type": 5`:                           `"type": 5, "target_port": 1`,
		`"type": 5,`:                          `"type": 5, "type": 5,`,
		`"all_target_ports": true`:            `"all_target_ports": 1`,
		`0x0000000000000007`:                  `0x7`,
	} {
		damaged := strings.Replace(reservationsGolden1, old, wrong, 1)
		if s, err := reservationsFormat.Decode([]byte(damaged)); damaged == reservationsGolden1 || err == nil {
			t.Errorf("%s was taken for %+v", wrong, s)
		}
	}
}

// SPC-4, section 5.13.5: APTPL.
func TestAPTPL(t *testing.T) {
	for _, typ := range types {
		t.Run(fmt.Sprintf("type %d", typ), func(t *testing.T) {
			k := newKeeping(t)
			r := k.start()
			wantBytes(t, r.in(r.a, prReportCapabilities), unhex("0008 1d b0 ea01 0000")) // PTPL_C
			r.ok(r.a, prRegister, 0, prList(0, keyA, 0x01))
			wantBytes(t, r.in(r.a, prReportCapabilities), unhex("0008 1d b1 ea01 0000")) // PTPL_A
			r.ok(r.c, prRegister, 0, prList(0, keyC, 0x05))
			r.ok(r.a, prReserve, typ, prList(keyA, 0, 0))
			before := r.in(r.a, prReadFullStatus)
			res := r.in(r.a, prReadReservation)

			r = k.start()
			wantBytes(t, r.in(r.a, prReportCapabilities), unhex("0008 1d b1 ea01 0000"))
			if r.generation() != 0 {
				t.Error("PRGENERATION survived")
			}
			clear(before[:4])
			clear(res[:4])
			wantBytes(t, r.in(r.a, prReadFullStatus), before)
			wantBytes(t, r.in(r.a, prReadReservation), res)
			wantConflict(t, "WRITE(10)", r.on(r.b, "2a 00 00000000 00 0001 00", nil))
			wantGood(t, "WRITE(10)", r.on(r.a, "2a 00 00000000 00 0001 00", make([]byte, 512)))

			// Every change is there after the next kill.
			r.ok(r.a, prRelease, typ, prList(keyA, 0, 0))
			r = k.start()
			r.wantReservation(0, 0)
			r.ok(r.c, prPreempt, typ, prList(keyC, keyA, 0))
			r = k.start()
			r.wantKeys(keyC)
			r.ok(r.c, prClear, 0, prList(keyC, 0, 0))
			r = k.start()
			r.wantKeys()
			wantBytes(t, []byte(content(t, k.path)), []byte("{\n  \"version\": 2,\n  \"units\": []\n}\n"))
		})
	}
	t.Run("the last one counts", func(t *testing.T) {
		k := newKeeping(t)
		r := k.start()
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0x01))
		r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
		r.ok(r.c, prRegister, 0, prList(0, 0, 0)) // registers nothing and says nothing
		r = k.start()
		r.wantReservation(1, keyA)
		r.ok(r.c, prRegister, 0, prList(0, keyC, 0))
		r = k.start()
		r.wantKeys()
		r.wantReservation(0, 0)
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0))
		r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
		r.ok(r.a, prRegisterAndMove, 0, moveList(keyA, keyC, 0x03, unhex(transportIDC)))
		r = k.start()
		r.wantKeys(keyC)
		r.wantReservation(1, keyC)
	})
	t.Run("golden", func(t *testing.T) {
		k := newKeeping(t)
		r := k.start()
		r.ok(r.a, prRegister, 0, prList(0, keyA, 0x05))
		r.ok(r.c, prRegister, 0, prList(0, 7, 0x01))
		r.ok(r.a, prReserve, 5, prList(keyA, 0, 0))
		if got := content(t, k.path); got != reservationsGolden {
			t.Errorf("the file is\n%s", got)
		}
		// A second unit does not disturb the first.
		id := state.Identity{NAA: [8]byte{0x3f}, Serial: "3f00000000000000"}
		m, err := backend.OpenMemory(backend.MemoryConfig{Size: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		u, err := New(m, Options{Identity: id, Reservations: k.held})
		if err != nil {
			t.Fatal(err)
		}
		if err := r.inv.Add(1, u); err != nil {
			t.Fatal(err)
		}
		n := r.inv.NewNexus(portA)
		do(n, &r.rig.c, [8]byte{0, 1}, "00", nil, all)
		wantGood(t, "REGISTER", do(n, &r.rig.c, [8]byte{0, 1}, "5f 00 00 0000 00000018 00", prList(0, keyB, 1), all))
		r = k.start()
		r.wantKeys(keyA, 7)
		s, err := keptState(k.held, id.Serial)
		if err != nil || len(s.registrations) != 1 || s.registrations[0].key != keyB {
			t.Errorf("the other unit: %+v, %v", s, err)
		}
	})
}

// A command that cannot be made durable fails and changes nothing.
func TestReservationsCannotBeStored(t *testing.T) {
	k := newKeeping(t)
	r := k.start()
	r.ok(r.a, prRegister, 0, prList(0, keyA, 0x01))
	before := r.generation()
	for _, name := range []string{"reservations.json.tmp", "."} {
		k.held.SetSync(func(f *os.File) error {
			if f.Name() == filepath.Join(filepath.Dir(k.path), name) {
				return errors.New("injected")
			}
			return f.Sync()
		})
		wantSense(t, r.out(r.c, prRegister, 0, prList(0, keyC, 0x01)), 0x4, 0x44, 0x00)
		wantSense(t, r.out(r.a, prReserve, 1, prList(keyA, 0, 0)), 0x4, 0x44, 0x00)
		wantSense(t, r.out(r.a, prRegister, 0, prList(keyA, keyB, 1)), 0x4, 0x44, 0x00)
		r.wantKeys(keyA)
		r.wantReservation(0, 0)
		wantGood(t, "WRITE(10)", r.on(r.c, "2a 00 00000000 00 0001 00", make([]byte, 512)))
	}
	if r.generation() != before {
		t.Error("PRGENERATION has changed")
	}
	k.held.SetSync(nil)
	r.ok(r.a, prReserve, 1, prList(keyA, 0, 0))
	r = k.start()
	r.wantKeys(keyA)
	r.wantReservation(1, keyA)

	// What a failure has left in the file is not there after the next success.
	u := newKeeping(t)
	r2 := u.start()
	u.held.SetSync(func(f *os.File) error {
		if f.Name() == filepath.Dir(u.path) {
			return errors.New("injected")
		}
		return f.Sync()
	})
	wantSense(t, r2.out(r2.c, prRegister, 0, prList(0, keyC, 0x01)), 0x4, 0x44, 0x00)
	u.held.SetSync(nil)
	r2.ok(r2.a, prRegister, 0, prList(0, keyA, 0))
	u.start().wantKeys()

	if err := errors.Join(k.held.Close(), k.held.Close()); err != nil {
		t.Error(err)
	}
	wantSense(t, r.out(r.a, prRelease, 1, prList(keyA, 0, 0)), 0x4, 0x44, 0x00)
}

func TestOpenReservationsRefuses(t *testing.T) {
	if _, err := OpenReservations(""); err == nil {
		t.Error("an empty path was accepted")
	}
	k := newKeeping(t)
	k.start()
	if _, err := OpenReservations(k.path); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second opening: %v", err)
	}
	if _, err := New(newRig(t, setup{}).store, Options{Reservations: k.held}); err == nil {
		t.Error("a unit without identity was accepted")
	}
	for name, s := range map[string]struct{ old, new, want string }{
		"version":             {`"version": 2`, `"version": 3`, "version 3"},
		"version 1":           {`"version": 2`, `"version": 1`, "unknown field"},
		"no units":            {`"units": [`, `"x": [`, "unknown field"},
		"null":                {reservationsGolden, `{"version": 2, "units": null}`, "a list"},
		"null, version 1":     {reservationsGolden, `{"version": 1, "units": null}`, "a list"},
		"identity":            {`"naa": "30`, `"naa": "40`, "the digit 3"},
		"type 2":              {`"type": 5`, `"type": 2`, "type 2"},
		"type 16":             {`"type": 5`, `"type": 16`, "type 16"},
		"type 0 and a holder": {`"type": 5`, `"type": 0`, "want 0 for type 0"},
		"all hold":            {`"type": 5`, `"type": 7`, "want 0 for type 7"},
		"no holder":           {`"holder": true`, `"holder": false`, "0 registrations with holder, want 1"},
		"two holders":         {`"holder": false`, `"holder": true`, "2 registrations with holder, want 1"},
		"target port 0":       {`"target_port": 1`, `"target_port": 0`, "want 1 to 65535"},
		"target port 65536":   {`"target_port": 1`, `"target_port": 65536`, "damaged"},
		"key 0":               {"0x0000000000000007", "0x0000000000000000", "not all 0"},
		"key":                 {"0x0000000000000007", "7", "16 lower-case hex digits"},
		"port":                {`"initiator": "iqn.2026-11.io.example:c,i,0x`, `"initiator": "iqn.2026-11.io.example:c,i,`, "not an initiator port"},
		"upper case":          {`"initiator": "iqn.2026-11.io.example:c`, `"initiator": "iqn.2026-11.io.example:C`, "not an initiator port"},
		"twice":               {`"initiator": "iqn.2026-11.io.example:c`, `"initiator": "iqn.2026-11.io.example:a`, "twice"},
		"by upper case":       {`"holder": true`, `"holder": true, "by": "iqn.2026-11.io.example:X"`, "is not the name of another initiator"},
		"by a comma":          {`"holder": true`, `"holder": true, "by": "a,b"`, "is not the name of another initiator"},
		"repeated member":     {`"type": 5,`, `"type": 5, "type": 5,`, "damaged"},
		"unit twice":          {"    }\n  ]\n}\n", "    }, {\"naa\": \"3001020304050607\", \"type\": 0, \"registrations\": [{\"initiator\": \"a,i,0x000000000000\", \"target_port\": 1, \"key\": \"0x0000000000000001\", \"all_target_ports\": false, \"holder\": false}]}]}", "is there twice"},
		"nobody registered":   {reservationsGolden, `{"version": 2, "units": [{"naa": "3001020304050607", "type": 0, "registrations": []}]}`, "0 registrations"},
		"empty":               {reservationsGolden, "", "is empty"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "r.json")
			damaged := strings.Replace(reservationsGolden, s.old, s.new, 1)
			if damaged == reservationsGolden {
				t.Fatal("nothing is replaced")
			}
			if err := os.WriteFile(path, []byte(damaged), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := OpenReservations(path)
			if err == nil || !strings.Contains(err.Error(), s.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v, want one about %q", err, s.want)
			}
			if got := content(t, path); got != damaged {
				t.Error("the file has changed")
			}
		})
	}
	for n := range len(reservationsGolden) - 1 {
		if _, err := reservationsFormat.Decode([]byte(reservationsGolden[:n])); err == nil {
			t.Fatalf("the first %d bytes were accepted", n)
		}
	}
}

func FuzzReservationsFile(f *testing.F) {
	f.Add([]byte(reservationsGolden))
	f.Add([]byte(reservationsGolden1))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := reservationsFormat.Decode(b)
		if err != nil {
			return
		}
		again, err := state.Encode(s)
		if err != nil {
			t.Fatal(err)
		}
		if s2, err := reservationsFormat.Decode(again); err != nil || fmt.Sprint(s2) != fmt.Sprint(s) {
			t.Fatalf("%+v came back as %+v, %v", s, s2, err)
		}
	})
}

// content returns the content of a file.
func content(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// keptState returns what r keeps of the unit with that NAA.
func keptState(r *Reservations, naa string) (s prState, err error) {
	e, ok, err := r.Get(naa)
	if ok {
		s, err = e.decode()
	}
	return s, err
}
