package lun

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// setInfo returns the CDB of SET IDENTIFYING INFORMATION of that type with a list of n bytes.
func setInfo(code byte, n int) string { return fmt.Sprintf("a4 06 00000000 %08x %02x 00", n, code<<1) }

// reportInfo returns the CDB of REPORT IDENTIFYING INFORMATION of that type with room for n bytes.
func reportInfo(code byte, n int) string {
	return fmt.Sprintf("a3 05 00000000 %08x %02x 00", n, code<<1)
}

// wantInfo checks what REPORT IDENTIFYING INFORMATION returns to n.
func wantInfo(t *testing.T, r *rig, n *Nexus, code byte, want string) {
	t.Helper()
	res := do(n, &r.c, [8]byte{}, reportInfo(code, 4+512), nil, all)
	wantGood(t, "REPORT IDENTIFYING INFORMATION", res)
	header := []byte{0, 0, byte(len(want) >> 8), byte(len(want))}
	wantBytes(t, res.in, append(header, want...))
}

// SPC-4, sections 6.32 and 6.43: one initiator writes the information, all others are notified and read it. It
// survives resets and a restart, until an initiator removes it.
func TestIdentifyingInformation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "settings.json")
	var events []string
	opt := Options{Settings: openSettings(t, path), Events: func(e Event) {
		if s, ok := e.(SettingChangedEvent); ok {
			events = append(events, fmt.Sprintf("%s: %s %q", s.Command, s.Setting, s.Value))
		}
	}}
	r := newRig(t, setup{opt: opt})
	other := r.login()
	wantNoAttention := func(n *Nexus) {
		t.Helper()
		wantGood(t, "TEST UNIT READY", do(n, &r.c, [8]byte{}, "00", nil, all))
	}
	wantChanged := func() {
		t.Helper()
		wantSense(t, do(other, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x3f, 0x05)
		wantNoAttention(other)
		wantNoAttention(r.nexus) // it knows
	}
	wantBytes(t, r.good(reportInfo(infoSupported, 255), nil), unhex("0000 0008 00 00 0200 04 00 0100"))
	wantBytes(t, r.good(reportInfo(infoSupported, 6), nil), unhex("0000 0008 00 00"))
	wantInfo(t, r, r.nexus, infoPeripheral, "")
	wantInfo(t, r, r.nexus, infoText, "")

	info, text := strings.Repeat("\x00\xff", 256), strings.Repeat("é", 127)+"!\x00"
	r.good(setInfo(infoPeripheral, len(info)), []byte(info))
	wantChanged()
	r.good(setInfo(infoText, len(text)), []byte(text))
	wantChanged()
	r.good(setInfo(infoText, len(text)), []byte(text))
	wantNoAttention(other)
	wantBytes(t, r.good(reportInfo(infoPeripheral, 7), nil), unhex("0000 0200 00ff00")) // cut short
	r.reset(r.nexus)
	wantSense(t, do(other, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x29, 0x03)
	r.inv.PowerOn()
	for _, n := range []*Nexus{r.nexus, other} {
		wantSense(t, do(n, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x29, 0x00)
	}
	want := func(r *rig, info, text string) {
		t.Helper()
		for _, n := range []*Nexus{r.nexus, other} {
			if n == other && r.unit != other.list()[0].unit {
				continue
			}
			wantInfo(t, r, n, infoPeripheral, info)
			wantInfo(t, r, n, infoText, text)
		}
	}
	want(r, info, text)

	// A reopened unit has it, and so has the unit of another process.
	reopened := newRig(t, setup{})
	reopened.unit.InheritFrom(r.unit)
	want(reopened, info, text)
	next := newRig(t, setup{})
	if err := next.unit.Restore(throughJSON(t, r.unit.State())); err != nil {
		t.Fatal(err)
	}
	want(next, info, text)

	if err := opt.Settings.Close(); err != nil {
		t.Fatal(err)
	}
	restart := func() {
		t.Helper()
		opt.Settings = openSettings(t, path)
		r = newRig(t, setup{opt: opt})
		other = r.login()
	}
	restart()
	want(r, info, text)
	r.good(setInfo(infoText, 0), nil)
	wantChanged()
	want(r, info, "")
	r.good(setInfo(infoText, 1), []byte{0}) // a text without characters is one
	wantChanged()
	want(r, info, "\x00")
	r.good(setInfo(infoText, 0), nil)
	wantChanged()
	r.good(setInfo(infoPeripheral, 0), nil)
	wantChanged()
	r.good(setInfo(infoPeripheral, 0), nil)
	wantNoAttention(other)
	if err := opt.Settings.Close(); err != nil {
		t.Fatal(err)
	}
	if got := content(t, path); strings.Contains(got, "identifying") {
		t.Errorf("the file is\n%s", got)
	}
	restart()
	want(r, "", "")
	const set = "SET IDENTIFYING INFORMATION: "
	if got, want := strings.Join(events, "\n"), set+`identifying_information "512 bytes"`+"\n"+
		set+fmt.Sprintf("identifying_text %q", text[:len(text)-1])+"\n"+
		set+`identifying_text ""`+"\n"+set+`identifying_text ""`+"\n"+set+`identifying_text ""`+"\n"+
		set+`identifying_information "0 bytes"`; got != want {
		t.Errorf("events\n%s\nwant\n%s", got, want)
	}
}

// What is refused changes nothing.
func TestRefusedIdentifyingInformation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "settings.json")
	s := openSettings(t, path)
	r := newRig(t, setup{opt: Options{Settings: s}})
	r.good(setInfo(infoPeripheral, 1), []byte("i"))
	r.good(setInfo(infoText, 2), []byte("t\x00"))
	other := r.login()
	wantField(t, r.run(setInfo(infoPeripheral, 513), make([]byte, 513)), 6, noField)
	wantField(t, r.run(setInfo(infoPeripheral, 1<<32-1), nil), 6, noField)
	wantField(t, r.run(setInfo(infoText, 257), bytes.Repeat([]byte{'a'}, 257)), 6, noField)
	for code := range byte(0x80) {
		if code != infoPeripheral && code != infoText {
			wantField(t, r.run(setInfo(code, 0), nil), 10, 7)
			if code != infoSupported {
				wantField(t, r.run(reportInfo(code, 255), nil), 10, 7)
			}
		}
	}
	for text, wrong := range map[string]int{
		"a":                 0, // no NUL
		"rack":              3,
		"a\x00b\x00":        1,
		"a\x00\x00":         1,
		"\x00\x00":          0,
		"\xff\x00":          0,
		"ab\xc3\x00":        2, // a character without its end
		"a\xed\xa0\x80\x00": 1, // a surrogate
		"a\xc0\x80":         1, // NUL in two bytes
	} {
		wantListField(t, r.run(setInfo(infoText, len(text)), []byte(text)), wrong)
	}
	wantSense(t, r.run(setInfo(infoPeripheral, 4), make([]byte, 3)), 0x5, 0x0e, 0x03) // less than announced
	s.SetSync(func(*os.File) error { return errors.New("injected") })
	wantSense(t, r.run(setInfo(infoPeripheral, 1), []byte("x")), 0x4, 0x44, 0x00)
	wantSense(t, r.run(setInfo(infoText, 0), nil), 0x4, 0x44, 0x00)
	s.SetSync(nil)
	wantGood(t, "no unit attention for no change", do(other, &r.c, [8]byte{}, "00", nil, all))
	wantInfo(t, r, other, infoPeripheral, "i")
	wantInfo(t, r, other, infoText, "t\x00")

	// An initiator that may only read reads it. The protection of the medium does not extend to it.
	r.good("15 10 0000 10 00", unhex("00 00 00 00"+protected))
	r.good(setInfo(infoText, 2), []byte("u\x00"))
	if err := r.inv.SetMask(0, maskFor(testPort.InitiatorName, ReadOnly)); err != nil {
		t.Fatal(err)
	}
	wantSense(t, r.run("00", nil), 0x6, 0x2a, 0x01)
	wantSense(t, r.run(setInfo(infoText, 0), nil), 0x7, 0x27, 0x00)
	wantInfo(t, r, r.nexus, infoText, "u\x00")
}

// Without a state directory, information is there until the end of the process. ResetSettings removes it.
func TestIdentifyingInformationIsASetting(t *testing.T) {
	r := newRig(t, setup{})
	other := r.login()
	r.good(setInfo(infoText, 7), []byte("rack 7\x00"))
	wantSense(t, do(other, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x3f, 0x05)
	r.reset(r.nexus)
	wantSense(t, do(other, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x29, 0x03)
	found := false
	for _, s := range r.unit.Settings() {
		if s.Name == settingIdentifyingText {
			found = s == Setting{settingIdentifyingText, "rack 7", "", "rack 7", testPort.InitiatorName}
		}
	}
	if !found {
		t.Errorf("settings %+v", r.unit.Settings())
	}
	if changed, err := r.unit.ResetSettings(); !changed || err != nil {
		t.Errorf("ResetSettings: %v, %v", changed, err)
	}
	for _, n := range []*Nexus{r.nexus, other} {
		wantSense(t, do(n, &r.c, [8]byte{}, "00", nil, all), 0x6, 0x3f, 0x05)
		wantInfo(t, r, n, infoText, "")
	}
	if changed, err := r.unit.ResetSettings(); changed || err != nil {
		t.Errorf("ResetSettings again: %v, %v", changed, err)
	}
}
