package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
)

// A change that adds a LUN on a built file leaves neither file nor LUN if any step fails,
// and both otherwise.
func TestFailedChangeLeavesNoBuiltFile(t *testing.T) {
	const most = 20
	dir := t.TempDir()
	d := serve(t, fmt.Sprintf("state_dir: %s/state\nportals: [{listen: \"127.0.0.1:0\"}]\ntargets: [{name: %s, initiators: [\"*\"]}]\n", dir, store))
	l := config.LUN{ID: 1, Backend: "file", Path: filepath.Join(dir, "a"), Size: 1 << 20, BlockSize: 512}
	for n := range most {
		m, err := d.NewFileBuilder(backend.BuildConfig{Path: l.Path, Size: int64(l.Size), Preallocate: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Build(t.Context(), func(backend.Progress) {}); err != nil {
			t.Fatal(err)
		}
		fault, left := errors.New("a test"), n
		d.before = func(string) error {
			if left--; left < 0 {
				return fault
			}
			return nil
		}
		_, err = d.Change(t.Context(), func(doc *config.Document) error { return doc.AddLUN(store, l) }, ChangeOptions{File: m})
		m.Abort()
		_, missing := os.Lstat(l.Path)
		luns := len(d.State().Targets[0].LUNs)
		if err == nil {
			if missing != nil || luns != 1 || n < 3 {
				t.Errorf("%d LUNs, and the file: %v, after %d things", luns, missing, n)
			}
			return
		}
		if !errors.Is(err, fault) || !errors.Is(missing, fs.ErrNotExist) || luns != 0 {
			t.Errorf("failing before %d: %v; %d LUNs, and the file: %v", n, err, luns, missing)
		}
	}
	t.Errorf("a change does more than %d things", most)
}

// After kill -9 before any step of such a change, the next process has the LUN with its
// complete file, or no LUN. The file is complete or absent.
func TestKilledChangeLeavesNoIncompleteFile(t *testing.T) {
	if n, err := strconv.Atoi(os.Getenv(dieAt)); err == nil {
		dir := os.Getenv("DAEMON_TEST_FILE")
		d := serveFile(t, dir+"/c.yaml", io.Discard)
		addMade(t, d, dir, n)
		return
	}
	const most = 20
	seen := map[bool]int{}
	for n := range most {
		dir := t.TempDir()
		path := filepath.Join(dir, "c.yaml")
		text := fmt.Sprintf("state_dir: %s/state\nportals: [{listen: \"127.0.0.1:0\"}]\ntargets: [{name: %s, initiators: [\"*\"]}]\n", dir, store)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		killed := runKilled(t, n, dir)
		d := serveFile(t, path, io.Discard)
		luns := d.State().Targets[0].LUNs
		b, err := os.ReadFile(dir + "/a")
		switch {
		case errors.Is(err, fs.ErrNotExist) && len(luns) == 0 && killed:
		case err != nil || !bytes.Equal(b, madeContent()):
			t.Errorf("before %d: the file has %d octets, error %v", n, len(b), err)
		case len(luns) == 1 && (luns[0].State != schema.Ready || luns[0].Size != int64(len(b))), len(luns) == 0 && !killed:
			t.Errorf("before %d: %+v", n, luns)
		}
		seen[len(luns) == 1]++
		if !killed {
			if seen[false] == 0 || seen[true] < 2 {
				t.Errorf("%d ended without the LUN, %d with it: want both", seen[false], seen[true])
			}
			return
		}
	}
	t.Errorf("a change does more than %d things", most)
}

// madeContent returns the content of a built file.
func madeContent() []byte { return bytes.Repeat([]byte("made"), 256<<10) }

// addMade adds a LUN on a copied file. The process is killed before the n-th step, if there
// are that many.
func addMade(t *testing.T, d *Daemon, dir string, n int) {
	if err := os.WriteFile(dir+"/from", madeContent(), 0o600); err != nil {
		t.Fatal(err)
	}
	m, err := d.NewFileBuilder(backend.BuildConfig{Path: dir + "/a", From: dir + "/from"})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Abort()
	if err := m.Build(t.Context(), func(backend.Progress) {}); err != nil {
		t.Fatal(err)
	}
	d.before = func(string) error {
		if n--; n < 0 {
			unix.Kill(os.Getpid(), unix.SIGKILL)
		}
		return nil
	}
	l := config.LUN{ID: 1, Backend: "file", Path: m.Path(), Size: config.Size(m.Size()), BlockSize: 512}
	if _, err := d.Change(t.Context(), func(doc *config.Document) error { return doc.AddLUN(store, l) }, ChangeOptions{File: m}); err != nil {
		t.Fatal(err)
	}
}

// A file is not built twice at a time, whatever name of its directory is used, and the
// number of builds is limited.
func TestBuildsAreExclusiveAndLimited(t *testing.T) {
	dir, link := t.TempDir(), filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	d := serve(t, "state_dir: \"\"\nportals: [{listen: \"127.0.0.1:0\"}]\ntargets: [{name: "+store+", initiators: [\"*\"]}]\n")
	build := func(path string) (*FileBuilder, error) {
		m, err := d.NewFileBuilder(backend.BuildConfig{Path: path, Size: 1 << 20})
		if err == nil {
			t.Cleanup(m.Abort)
		}
		return m, err
	}
	first, err := build(dir + "/0")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir + "/0", dir + "/../" + filepath.Base(dir) + "//0", link + "/0"} {
		if _, err := build(path); !errors.Is(err, ErrBuilding) {
			t.Errorf("%s: %v, want ErrBuilding", path, err)
		}
	}
	for i := 1; i < maxBuilds; i++ {
		if _, err := build(fmt.Sprintf("%s/%d", dir, i)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := build(dir + "/more"); !errors.Is(err, ErrManyBuilds) {
		t.Errorf("%v, want ErrManyBuilds", err)
	}
	first.Abort()
	if _, err := d.NewFileBuilder(backend.BuildConfig{Path: dir + "/wrong", Size: 1000}); err == nil || errors.Is(err, ErrManyBuilds) {
		t.Errorf("%v, want that the size is wrong", err)
	}
	if _, err := build(dir + "/0"); err != nil {
		t.Errorf("when another has ended: %v", err)
	}
}
