package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A file that something damages, cuts short, replaces or removes is restored from its spare copy, and the
// damaged one is kept.
func TestSpareCopy(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(path string) error
		reason string
		kept   bool
	}{
		{"garbage", func(p string) error { return os.WriteFile(p, []byte("garbage"), 0o600) }, "is damaged", true},
		{"empty", func(p string) error { return os.Truncate(p, 0) }, "is empty", true},
		{"cut short", func(p string) error { return os.Truncate(p, 100) }, "is damaged", true},
		{"a directory", func(p string) error { return errors.Join(os.Remove(p), os.Mkdir(p, 0o700)) }, "is not a regular file", true},
		{"gone", os.Remove, "was missing", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "identities.json")
			ids := openIdentities(t, path)
			one, two := must(t, ids.Get, keyOne), must(t, ids.Get, keyTwo)
			if err := ids.doc.Restored(); err != nil {
				t.Errorf("restored at first: %v", err)
			}
			ids.Close()
			if err := c.damage(path); err != nil {
				t.Fatal(err)
			}
			ids = openIdentities(t, path)
			wantError(t, ids.doc.Restored(), path, c.reason)
			if must(t, ids.Get, keyOne) != one || must(t, ids.Get, keyTwo) != two {
				t.Error("other identities")
			}
			if _, err := os.Lstat(path + ".damaged"); (err == nil) != c.kept {
				t.Errorf("the damaged file: %v", err)
			}
			ids = reopen(t, ids)
			if err := ids.doc.Restored(); err != nil {
				t.Errorf("restored again: %v", err)
			}
			if content(t, path) != content(t, path+".spare") {
				t.Error("the spare copy differs")
			}
		})
	}
}

// A file whose spare copy is damaged, too, is an error that names both, and both stay. So is one of another
// version, whatever its spare copy is: an earlier program could have left that.
func TestSpareCopyDoesNotHelp(t *testing.T) {
	for _, c := range []struct{ file, spare, words string }{
		{"garbage", "", "is damaged|.spare|is empty"},
		{"garbage", "garbage", "is damaged|.spare"},
		{`{"version": 99}`, identitiesGolden, "has version 99"},
		{identitiesGolden, `{"version": 99}`, ""},
	} {
		path := filepath.Join(t.TempDir(), "identities.json")
		for p, text := range map[string]string{path: c.file, path + ".spare": c.spare} {
			if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		ids, err := OpenIdentities(path)
		if c.words == "" {
			if err != nil {
				t.Errorf("a good file with a spare copy of another version: %v", err)
			} else {
				ids.Close()
			}
			continue
		}
		wantError(t, err, strings.Split(c.words, "|")...)
		if content(t, path) != c.file || content(t, path+".spare") != c.spare {
			t.Error("the files were changed")
		}
	}
}

// The process may end between any two steps of a change: the file counts, and its spare copy is brought up to
// date at the next start. The spare copy of a file that is removed does not bring it back.
func TestSpareCopyFollows(t *testing.T) {
	path := filepath.Join(t.TempDir(), "identities.json")
	ids := openIdentities(t, path)
	must(t, ids.Get, keyOne)
	old := content(t, path)
	two := must(t, ids.Get, keyTwo)
	ids.Close()
	if err := os.WriteFile(path+".spare", []byte(old), 0o600); err != nil { // the second rename was not made
		t.Fatal(err)
	}
	ids = openIdentities(t, path)
	if content(t, path+".spare") != content(t, path) {
		t.Error("the spare copy is old")
	}
	ids.Close()
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if ids = openIdentities(t, path); must(t, ids.Get, keyTwo) != two {
		t.Error("another identity")
	}
	if err := ids.doc.Remove(noIdentities()); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{path, path + ".spare"} {
		if _, err := os.Lstat(p); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", p, err)
		}
	}
	if ids = reopen(t, ids); ids.Known(keyTwo) {
		t.Error("the removed file came back")
	}
}

// The identities that were retired do not fill the file.
func TestRetiredIdentitiesArePruned(t *testing.T) {
	path := filepath.Join(t.TempDir(), "identities.json")
	s := noIdentities()
	for i := range 3 * maxRetired { // as an earlier version left them
		s.Retired = append(s.Retired, identityEntry{Key: "old", NAA: fmt.Sprintf("3%015x", i)})
	}
	b, err := Encode(s)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	ids := openIdentities(t, path)
	id := must(t, ids.Get, keyOne)
	if err := ids.Forget(keyOne); err != nil {
		t.Fatal(err)
	}
	left := ids.doc.State().Retired
	if len(left) != maxRetired || left[maxRetired-1].NAA != id.Serial || left[0].NAA != fmt.Sprintf("3%015x", 2*maxRetired+1) {
		t.Errorf("%d are left, the last is %v", len(left), left[len(left)-1])
	}
}
