package state

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

type colour struct {
	Version int    `json:"version"`
	Name    string `json:"name"`
}

func (colour) Check() error { return nil }

var colours = Format[colour]{Name: "colours", Version: 2, Upgrades: map[int]func([]byte) (colour, any, error){
	0: func(b []byte) (colour, any, error) {
		var old struct {
			Colour string `json:"colour"`
		}
		err := decodeMembers(b, &old)
		return colour{2, old.Colour}, &old, err
	},
}}

// A document is read as it was stored, in the present form or one with an upgrade, and refuses
// everything else.
func TestDocumentIsReadAsStored(t *testing.T) {
	for name, tc := range map[string]struct {
		content string
		want    string
		refused string
	}{
		"missing":           {"", "none", ""},
		"present form":      {`{"version": 2, "name": "red"}`, "red", ""},
		"without version":   {`{"colour": "blue"}`, "blue", ""},
		"version 0":         {`{"version": 0, "colour": "blue"}`, "", "has version 0"},
		"version 3":         {`{"version": 3}`, "", "has version 3"},
		"old form, trailer": {`{"colour": "blue"} 1`, "", "damaged"},
		"old form, twice":   {`{"colour": "blue", "colour": "red"}`, "", "damaged"},
	} {
		path := filepath.Join(t.TempDir(), "a", "colour.json")
		if tc.content != "" {
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(tc.content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		d, err := Open(colours, path, colour{2, "none"})
		if tc.refused != "" {
			wantError(t, err, path, tc.refused)
			continue
		}
		if err != nil || d.State().Name != tc.want {
			t.Fatalf("%s: %v, %v, want %s", name, d, err, tc.want)
		}
		d.Close()
	}
}

// A removed document stays removed, and a missing one is not removed again.
func TestDocumentRemove(t *testing.T) {
	path := filepath.Join(t.TempDir(), "colour.json")
	d, err := Open(colours, path, colour{2, "none"})
	if err != nil {
		t.Fatal(err)
	}
	syncs := 0
	d.file.fsync = func(f *os.File) error { syncs++; return f.Sync() }
	if err := d.Remove(colour{2, "none"}); err != nil || syncs != 0 {
		t.Errorf("a missing file: %v, %d syncs", err, syncs)
	}
	if err := d.Replace(colour{2, "red"}); err != nil || d.State().Name != "red" {
		t.Fatalf("%v, %v", d.State(), err)
	}
	d.file.fsync = func(*os.File) error { return errors.New("injected") }
	wantError(t, d.Remove(colour{2, "none"}), path, "injected")
	if got := d.State().Name; got != "red" {
		t.Errorf("after a failure the state is %s", got)
	}
	d.file.fsync = (*os.File).Sync
	if err := d.Remove(colour{2, "none"}); err != nil || d.State().Name != "none" {
		t.Errorf("%v, %v", d.State(), err)
	}
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file: %v", err)
	}
	if err := errors.Join(d.Close(), d.Close()); err != nil {
		t.Error(err)
	}
	for _, err := range []error{d.Replace(colour{2, "red"}), d.Remove(colour{2, "none"})} {
		if !errors.Is(err, fs.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
	}
}
