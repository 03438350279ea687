package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
)

// An openFile is a document that an editor has read from a file and saves there, unless
// the file has another text by then.
type openFile struct {
	*Document
	path string
	read []byte
}

func (f *openFile) Save() error {
	err := f.SaveOver(f.path, f.read)
	if err == nil {
		f.read = f.Bytes()
	}
	return err
}

// saved creates a file with the text good and opens it.
func saved(t *testing.T, mode fs.FileMode) (string, *openFile) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(path, []byte(good), mode); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
	return path, openDocument(t, path)
}

func openDocument(t *testing.T, path string) *openFile {
	t.Helper()
	d, err := OpenDocument(path)
	if err != nil {
		t.Fatal(err)
	}
	return &openFile{d, path, d.Bytes()}
}

func setSize(t *testing.T, d *openFile, size string) {
	t.Helper()
	if err := d.SetLUN("iqn.2026-11.io.example:store", 0, "size", size); err != nil {
		t.Fatal(err)
	}
}

// wantFile compares a file, and the other names in its directory.
func wantFile(t *testing.T, path, want string, others ...string) {
	t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != want {
		t.Errorf("%s: %q, %v; want %q", path, b, err, want)
	}
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if e.Name() != filepath.Base(path) {
			names = append(names, e.Name())
		}
	}
	if strings.Join(names, " ") != strings.Join(others, " ") {
		t.Errorf("next to %s: %q, want %q", path, names, others)
	}
}

func TestSave(t *testing.T) {
	path, d := saved(t, 0o640)
	if err := d.Save(); err != nil { // nothing to do
		t.Fatal(err)
	}
	wantFile(t, path, good)
	setSize(t, d, "2GiB")
	two := strings.Replace(good, "1GiB", "2GiB", 1)
	if err := os.WriteFile(filepath.Dir(path)+"/.c.yaml.new", []byte("of one that was killed"), 0o444); err != nil {
		t.Fatal(err)
	}
	if err := d.Save(); err != nil {
		t.Fatal(err)
	}
	wantFile(t, path, two, "c.yaml.history")
	wantFile(t, path+".history/0001.yaml", good)
	if fi, err := os.Stat(path); err != nil || fi.Mode() != 0o640 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	if fi, err := os.Stat(path + ".history/0001.yaml"); err != nil || fi.Mode() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	if got := string(openDocument(t, path).Bytes()); got != two {
		t.Errorf("read again: %s", got)
	}
	setSize(t, d, "3GiB")
	if err := d.Save(); err != nil { // again, by the same document
		t.Fatal(err)
	}
	wantFile(t, path+".history/0002.yaml", two, "0001.yaml")
}

func TestSaveKeepsTheOwner(t *testing.T) {
	if os.Getuid() != 0 {
		backendtest.Unavailable(t, "only root can give a file to somebody else")
	}
	path, d := saved(t, 0o600)
	if err := os.Chown(path, 12, 34); err != nil {
		t.Fatal(err)
	}
	setSize(t, d, "2GiB")
	if err := d.Save(); err != nil {
		t.Fatal(err)
	}
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(owner(fi)); got != "[12 34]" || fi.Mode() != 0o600 {
		t.Errorf("owner %s, mode %v", got, fi.Mode())
	}
}

func TestHistoryIsBounded(t *testing.T) {
	path, d := saved(t, 0o600)
	for i := range maxHistory + 3 {
		setSize(t, d, fmt.Sprintf("%dMiB", i+1))
		if err := d.Save(); err != nil {
			t.Fatal(err)
		}
	}
	numbers, err := versions(path + ".history")
	if err != nil || len(numbers) != maxHistory || numbers[0] != 4 || numbers[maxHistory-1] != maxHistory+3 {
		t.Errorf("%v, %v", numbers, err)
	}
}

// SaveOver does not overwrite the text of another process; SaveAs does and keeps it.
func TestSaveChanged(t *testing.T) {
	path, d := saved(t, 0o600)
	other := strings.Replace(good, "1GiB", "7GiB", 1)
	if err := os.WriteFile(path, []byte(other), 0o600); err != nil {
		t.Fatal(err)
	}
	setSize(t, d, "2GiB")
	err := d.Save()
	if !errors.Is(err, ErrChanged) || !strings.HasPrefix(err.Error(), path+": changed by another process") {
		t.Error(err)
	}
	wantFile(t, path, other)
	if err := d.SaveAs(path); err != nil {
		t.Fatal(err)
	}
	wantFile(t, path, strings.Replace(good, "1GiB", "2GiB", 1), "c.yaml.history")
	wantFile(t, path+".history/0001.yaml", other)
}

func TestSaveFollowsLinks(t *testing.T) {
	path, _ := saved(t, 0o600)
	link := filepath.Join(t.TempDir(), "link.yaml")
	if err := os.Symlink("../"+filepath.Base(filepath.Dir(path))+"/c.yaml", link+"2"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(link+"2", link); err != nil {
		t.Fatal(err)
	}
	d := openDocument(t, link)
	setSize(t, d, "2GiB")
	if err := d.Save(); err != nil {
		t.Fatal(err)
	}
	wantFile(t, path, strings.Replace(good, "1GiB", "2GiB", 1), "c.yaml.history")
	for _, l := range []string{link, link + "2"} {
		if fi, err := os.Lstat(l); err != nil || fi.Mode()&fs.ModeSymlink == 0 {
			t.Errorf("%s: %v, %v", l, fi.Mode(), err)
		}
	}
}

// A write that fails leaves no files, and its error names the path.
func TestSaveErrors(t *testing.T) {
	d, err := DefaultDocument()
	if err != nil {
		t.Fatal(err)
	}
	missing := filepath.Join(t.TempDir(), "missing")
	if err := d.SaveAs(missing + "/c.yaml"); err == nil || err.Error() != missing+"/c.yaml: open "+missing+": no such file or directory" {
		t.Error(err)
	}
	if err := d.SaveAs(filepath.Dir(missing)); err == nil || err.Error() != filepath.Dir(missing)+": is a directory" {
		t.Error(err)
	}
	loop := filepath.Join(t.TempDir(), "loop")
	if err := os.Symlink(loop, loop); err != nil {
		t.Fatal(err)
	}
	if err := d.SaveAs(loop); err == nil || err.Error() != loop+": too many levels of symbolic links" {
		t.Error(err)
	}

	path, f := saved(t, 0o600)
	setSize(t, f, "2GiB")
	if err := os.WriteFile(path+".history", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := f.Save(); err == nil || err.Error() != path+": history: open "+path+".history: not a directory" {
		t.Error(err)
	}
	wantFile(t, path, good, "c.yaml.history")
	if err := os.Remove(path + ".history"); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Dir(path)+"/.c.yaml.new", 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Dir(path)+"/.c.yaml.new/x", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := f.Save(); !errors.Is(err, syscall.ENOTEMPTY) || !strings.Contains(err.Error(), ".c.yaml.new: directory not empty") {
		t.Error(err)
	}
	wantFile(t, path, good, ".c.yaml.new", "c.yaml.history")
}

// Secrets are not saved to a file that other users can read.
func TestSaveSecrets(t *testing.T) {
	path, d := saved(t, 0o644)
	if err := d.SetTarget("iqn.2026-11.io.example:store", "auth", "{method: chap, users: [{name: h, secret: aaaaaaaaaaaa}]}"); err != nil {
		t.Fatal(err)
	}
	const want = ": has secrets, but other users can read it: its mode is 0644. Run chmod 600"
	if _, err := d.Config(); err == nil || err.Error() != path+want {
		t.Error(err)
	}
	if err := d.Save(); err == nil || err.Error() != path+want {
		t.Error(err)
	}
	wantFile(t, path, good)
	if err := d.SaveAs(path + "2"); err != nil {
		t.Fatal(err)
	}
	if _, err := d.Config(); err != nil {
		t.Error(err)
	}
	if fi, err := os.Stat(path + "2"); err != nil || fi.Mode() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
}

// Of several saves of edits of the same text one succeeds. The others fail, and no text is
// lost.
func TestSaveAtTheSameTime(t *testing.T) {
	path, _ := saved(t, 0o600)
	const n = 8
	results := make(chan error, n)
	var docs []*openFile
	for i := range n {
		d := openDocument(t, path)
		setSize(t, d, fmt.Sprintf("%dMiB", i+1))
		docs = append(docs, d)
	}
	for _, d := range docs {
		go func() { results <- d.Save() }()
	}
	won := 0
	for range n {
		if err := <-results; err == nil {
			won++
		} else if !errors.Is(err, ErrChanged) {
			t.Error(err)
		}
	}
	if won != 1 {
		t.Errorf("%d have won", won)
	}
	if c, err := Load(path); err != nil || c.Targets[0].LUNs[0].Size > n<<20 {
		t.Errorf("%+v, %v", c, err)
	}
	wantFile(t, path+".history/0001.yaml", good)
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(entries) != 2 {
		t.Errorf("%v, %v", entries, err)
	}
}
