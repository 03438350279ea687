package lun

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
)

// openSettings opens the file, and closes it at the end of the test.
func openSettings(t testing.TB, path string) *Settings {
	t.Helper()
	s, err := OpenSettings(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// saving returns the setup of a rig with a cache and a file of settings.
func saving(s *Settings) setup { return setup{info: volatile, opt: Options{Settings: s}} }

// save runs MODE SELECT(6) with SP.
func (r *rig) save(list string) result {
	b := unhex(list)
	return r.run(fmt.Sprintf("15 11 0000 %02x 00", len(b)), b)
}

// wantCaching checks the Caching page: current and saved values of WCE.
func (r *rig) wantCaching(current, saved string) {
	r.t.Helper()
	wantBytes(r.t, r.good("1a 08 08 00 ff 00", nil), unhex("17 00 10 00 8"+current[1:]))
	wantBytes(r.t, r.good("1a 08 c8 00 ff 00", nil), unhex("17 00 10 00 8"+saved[1:]))
	wantBytes(r.t, r.good("5a 08 88 00 000000 00ff 00", nil), unhex("001a 00 10 00 00 0000 8"+cachingOn[1:])) // default
	wantBytes(r.t, r.good("1a 08 48 00 ff 00", nil), unhex("17 00 10 00 88 12 04 00 0000 0000 0000 0000 00 00 0000 00 000000"))
}

// SPC-4, sections 6.9, 6.11.4 and 7.5.1: SP saves pages, PS says that they can be saved, page
// control 11b returns the saved ones. A reset and a restart restore them.
func TestSavedPages(t *testing.T) {
	path := filepath.Join(t.TempDir(), "settings.json")
	s := openSettings(t, path)
	r := newRig(t, saving(s))
	other := r.login()
	r.wantCaching(cachingOn, cachingOn)

	wantGood(t, "WCE 0, saved", r.save("00 00 00 00"+cachingOff))
	wantSense(t, do(other, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x2a, 0x01)
	r.wantCaching(cachingOff, cachingOff)
	wantGood(t, "WCE 1, not saved", r.modeSelect(true, "0000 00 00 00 00 0000"+cachingOn))
	r.wantCaching(cachingOn, cachingOff)

	// The write is durable when the cache is off again, as the page says.
	r.good(extentCDB(0x2a, 0, 0, 1), pattern(512, 1))
	syncs := r.store.Calls(backendtest.Sync)
	r.reset(r.nexus)
	r.wantCaching(cachingOff, cachingOff)
	if r.store.Calls(backendtest.Sync) != syncs+1 {
		t.Error("the cache was turned off without a sync")
	}

	wantGood(t, "SWP, saved with all else", r.save("00 00 00 00 8"+protected[1:]))
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	want := `{
  "version": 1,
  "units": [
    {
      "naa": "3001020304050607",
      "mode": {
        "wce": false,
        "swp": true
      },
      "port_groups": []
    }
  ]
}
`
	if got := content(t, path); got != want {
		t.Errorf("the file is\n%s", got)
	}

	s = openSettings(t, path)
	r = newRig(t, saving(s))
	wantBytes(t, r.good("1a 08 0a 00 ff 00", nil), unhex("0f 00 90 00 8"+protected[1:]))
	wantSense(t, r.run(extentCDB(0x2a, 0, 0, 1), make([]byte, 512)), 0x7, 0x27, 0x02)

	// Without parameters the current values are saved.
	wantGood(t, "SWP 0", r.modeSelect(false, "00 00 00 00"+control))
	wantGood(t, "nothing but SP", r.save(""))
	r.reset(r.nexus)
	r.good(extentCDB(0x2a, 0, 0, 1), make([]byte, 512))

	// A bit that can no longer change has its default value.
	wantGood(t, "WCE 1, saved", r.save("00 00 00 00"+cachingOn))
	through := newRig(t, setup{info: volatile, opt: Options{Settings: s, WriteThrough: true}})
	wantBytes(t, through.good("1a 08 08 00 ff 00", nil), unhex("17 00 10 00 8"+cachingOff[1:]))

	// A wrong list saves nothing.
	wantListField(t, r.save("00 00 00 00"+cachingOff+"1c 0a 00 00 00000000 00000000"), 4+20+2)
	r.wantCaching(cachingOn, cachingOn)
}

// A page that cannot be saved does not change.
func TestPageThatCannotBeSavedDoesNotChange(t *testing.T) {
	path := filepath.Join(t.TempDir(), "settings.json")
	s := openSettings(t, path)
	r := newRig(t, saving(s))
	s.SetSync(func(*os.File) error { return errors.New("injected") })
	wantSense(t, r.save("00 00 00 00"+cachingOff), 0x4, 0x44, 0x00)
	wantSense(t, r.save(""), 0x4, 0x44, 0x00)
	r.wantCaching(cachingOn, cachingOn)
	s.SetSync(nil)
	if err := errors.Join(s.Close(), s.Close()); err != nil {
		t.Error(err)
	}
	wantSense(t, r.save("00 00 00 00"+cachingOff), 0x4, 0x44, 0x00)
	wantGood(t, "not saved", r.modeSelect(false, "00 00 00 00"+cachingOff))
}

func TestOpenSettingsRefuses(t *testing.T) {
	if _, err := OpenSettings(""); err == nil {
		t.Error("an empty path was accepted")
	}
	const good = `{"version": 1, "units": [{"naa": "3001020304050607", "mode": {"wce": false, "swp": true}, "port_groups": [{"tag": 1, "state": "standby"}, {"tag": 2, "state": "active/optimized"}]}]}`
	path := filepath.Join(t.TempDir(), "settings.json")
	if err := os.WriteFile(path, []byte(good), 0o600); err != nil {
		t.Fatal(err)
	}
	s := openSettings(t, path)
	if _, err := OpenSettings(path); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second opening: %v", err)
	}
	if _, err := New(newRig(t, setup{}).store, Options{Settings: s}); err == nil {
		t.Error("a unit without identity was accepted")
	}
	for name, c := range map[string]struct{ old, new, want string }{
		"version":         {`"version": 1`, `"version": 2`, "version 2"},
		"null":            {good, `{"version": 1, "units": null}`, "a list"},
		"identity":        {`"30`, `"40`, "the digit 3"},
		"unknown member":  {`"wce"`, `"rcd"`, "unknown field"},
		"no value":        {`"wce": false, `, ``, "damaged"},
		"repeated member": {`"wce": false`, `"wce": true, "wce": false`, "damaged"},
		"unit twice":      {`}]}]}`, `}]}, {"naa": "3001020304050607", "mode": null, "port_groups": []}]}`, "is there twice"},
		"no port groups":  {`"port_groups": [`, `"port_groups": null, "x": [`, "unknown field"},
		"null groups":     {good, `{"version": 1, "units": [{"naa": "3001020304050607", "mode": null, "port_groups": null}]}`, "want a list"},
		"tag 0":           {`"tag": 1`, `"tag": 0`, "tag 0"},
		"tag twice":       {`"tag": 2`, `"tag": 1`, "ascend"},
		"state":           {`"standby"`, `"offline"`, "is unknown"},
		"no information":  {`"}]}]}`, `"}], "identifying": {}}]}`, "neither"},
		"long":            {`"}]}]}`, `"}], "identifying": {"information": "` + strings.Repeat("AAAA", 171) + `"}}]}`, "513 bytes"},
		"long text":       {`"}]}]}`, `"}], "identifying": {"text": "` + strings.Repeat("a", 256) + `\u0000"}}]}`, "257 bytes"},
		"text":            {`"}]}]}`, `"}], "identifying": {"text": "a"}}]}`, "a NUL only at its end"},
		"empty":           {good, "", "is empty"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s.json")
			damaged := strings.Replace(good, c.old, c.new, 1)
			if err := os.WriteFile(path, []byte(damaged), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := OpenSettings(path)
			if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v, want one about %q", err, c.want)
			}
			if got := content(t, path); got != damaged {
				t.Error("the file has changed")
			}
		})
	}
}
