package lun

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// settingsText returns the settings of u, one on a line, without the initiators.
func settingsText(u *Unit) string {
	var b strings.Builder
	for _, s := range u.Settings() {
		fmt.Fprintf(&b, "%s %s, saved %s\n", s.Name, s.Value, s.Saved)
	}
	return b.String()
}

const defaultSettings = "write_protect off, saved off\nwrite_cache on, saved on\ndescriptor_sense off, saved off\n" +
	"separate_task_sets off, saved off\nmedium ready, saved ready\n"

// Each change of a setting is an event with the initiator. Settings has it, too. ResetSettings undoes
// all of them permanently, and the neighbour writes again.
func TestSettingsCanBeSeenAndUndone(t *testing.T) {
	file := filepath.Join(t.TempDir(), "settings.json")
	var events []string
	opt := everything
	opt.Settings = openSettings(t, file)
	opt.Events = func(e Event) {
		if s, ok := e.(SettingChangedEvent); ok {
			events = append(events, fmt.Sprintf("%s %s %s", strings.TrimPrefix(s.Initiator, "iqn.2026-11.io.example:"), s.Setting, s.Value))
		}
	}
	r := newPRRig(t, setup{info: volatile, opt: opt})
	list := unhex("00 00 00 00" + protected + cachingOff)
	for range 2 { // the second changes nothing
		wantGood(t, "MODE SELECT(6)", r.on(r.c, fmt.Sprintf("15 11 0000 %02x 00", len(list)), list))
	}
	r.on(r.a, "00", nil) // MODE PARAMETERS CHANGED
	wantGood(t, "standby", r.setGroups(r.c, "01 00 0001"))
	wantGood(t, "eject", r.on(r.c, "1b 00 0000 02 00", nil))
	if got, want := settingsText(r.unit), "write_protect on, saved on\nwrite_cache off, saved off\n"+
		"descriptor_sense off, saved off\nseparate_task_sets off, saved off\nmedium ejected, saved ready\naccess_state_1 active/non-optimized, saved active/non-optimized\n"; got != want {
		t.Errorf("settings\n%swant\n%s", got, want)
	}
	for _, s := range r.unit.Settings() {
		if s.Value != s.Default && s.By != portC.InitiatorName || s.Value == s.Default && s.By != "" {
			t.Errorf("%s was changed by %q", s.Name, s.By)
		}
	}
	if want := []string{"c write_protect on", "c write_cache off", "c access_state_1 active/non-optimized",
		"c medium ejected"}; !slices.Equal(events, want) {
		t.Errorf("events %q, want %q", events, want)
	}

	if changed, err := r.unit.ResetSettings(); !changed || err != nil {
		t.Errorf("ResetSettings: %v, %v", changed, err)
	}
	if got := settingsText(r.unit); got != defaultSettings {
		t.Errorf("after ResetSettings\n%swant\n%s", got, defaultSettings)
	}
	for _, due := range [][2]byte{{0x28, 0x00}, {0x2a, 0x01}, {0x2a, 0x06}} {
		wantSense(t, r.on(r.a, "00", nil), 0x6, due[0], due[1])
	}
	wantGood(t, "WRITE(10) of the neighbour", r.on(r.a, "2a 00 00000000 00 0001 00", make([]byte, 512)))
	if changed, err := r.unit.ResetSettings(); changed || err != nil {
		t.Errorf("ResetSettings again: %v, %v", changed, err)
	}
	wantGood(t, "no unit attention for no change", r.on(r.a, "00", nil))
	if err := opt.Settings.Close(); err != nil {
		t.Fatal(err)
	}
	opt.Settings = openSettings(t, file)
	if got := settingsText(newRig(t, setup{info: volatile, opt: opt}).unit); got != defaultSettings {
		t.Errorf("after a restart\n%swant\n%s", got, defaultSettings)
	}
}

// A unit without its store has no settings to reset.
func TestAbsentUnitHasNoSettings(t *testing.T) {
	u, err := NewAbsent(512, Options{Identity: testIdentity})
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	if changed, err := u.ResetSettings(); changed || err == nil || u.Settings() != nil {
		t.Errorf("ResetSettings: %v, %v; settings %v", changed, err, u.Settings())
	}
}
