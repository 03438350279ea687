package state

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// helperIdentities in the environment makes the test binary a process that opens the file of that
// name, reports it, and then makes one identity after the other.
const helperIdentities = "LUN_TEST_IDENTITIES"

func TestMain(m *testing.M) {
	if path := os.Getenv(helperIdentities); path != "" {
		ids, err := OpenIdentities(path)
		if err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		fmt.Println("open")
		for i := 0; ; i++ {
			key := fmt.Sprint("key", i/2)
			id, err := ids.Get(key)
			if i%2 == 1 {
				id, err = ids.Renew(key)
			}
			if err != nil {
				fmt.Println("error", err)
				os.Exit(1)
			}
			fmt.Println(key, id.Serial)
		}
	}
	os.Exit(m.Run())
}

// startHelper starts that process, and kills it at the end of the test.
func startHelper(t *testing.T, path string) (*exec.Cmd, *bufio.Scanner) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe)
	c.Env = append(os.Environ(), helperIdentities+"="+path)
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Process.Kill()
		c.Wait()
	})
	return c, bufio.NewScanner(out)
}

func TestIdentitiesAreLocked(t *testing.T) {
	path := filepath.Join(t.TempDir(), "identities.json")
	ids := openIdentities(t, path)

	_, err := OpenIdentities(path)
	wantError(t, err, path, path+".lock", "locked by another target")

	_, lines := startHelper(t, path)
	if !lines.Scan() {
		t.Fatal("the second process says nothing")
	}
	wantError(t, errors.New(lines.Text()), "error", path+".lock", "locked by another target")

	// The refused ones have not broken the lock of the first.
	_, err = OpenIdentities(path)
	wantError(t, err, "locked")
	reopen(t, ids)
}

// A process is killed again and again while it writes. What it returned is stored, the file can
// be read, and the lock ends with the process.
func TestIdentitiesSurviveKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "identities.json")
	current, retired := map[string]string{}, map[string]bool{}
	for round := range 8 {
		c, lines := startHelper(t, path)
		if !lines.Scan() || lines.Text() != "open" {
			t.Fatalf("round %d: the process says %q", round, lines.Text())
		}
		_, err := OpenIdentities(path)
		wantError(t, err, "locked by another target")
		for n := 0; lines.Scan(); n++ {
			if n == 4+2*round { // the process continues to write until it is killed
				time.AfterFunc(time.Duration(round)*time.Millisecond, func() { c.Process.Kill() })
			}
			key, naa, ok := strings.Cut(lines.Text(), " ")
			if !ok || key == "error" || len(naa) != 16 {
				t.Fatalf("round %d: the process says %q", round, lines.Text())
			}
			if old := current[key]; old != "" && old != naa {
				retired[old] = true
			}
			current[key] = naa
		}
		c.Wait()

		ids := openIdentities(t, path)
		for _, e := range ids.doc.state.Retired {
			delete(retired, e.NAA)
		}
		// The last Renew may have been stored but not said.
		unsaid := 0
		for key, naa := range current {
			if got := must(t, ids.Get, key).Serial; got != naa {
				unsaid++
				current[key] = got
			}
		}
		if unsaid > 1 || len(retired) > 0 {
			t.Fatalf("round %d: %d keys have another identity, of the retired are missing %v", round, unsaid, retired)
		}
		if err := ids.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(current) < 8 {
		t.Errorf("only %d identities in all: the test has not tested", len(current))
	}
}

func TestIdentitiesLeftoverTemp(t *testing.T) {
	for name, leave := range map[string]func(path string) error{
		"half written":    func(path string) error { return os.WriteFile(path, []byte(identitiesGolden[:100]), 0o644) },
		"link":            func(path string) error { return os.Symlink("victim", path) },
		"empty directory": func(path string) error { return os.Mkdir(path, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path, victim := filepath.Join(dir, "identities.json"), filepath.Join(dir, "victim")
			if err := os.WriteFile(victim, []byte("precious"), 0o600); err != nil {
				t.Fatal(err)
			}
			ids := openIdentities(t, path)
			one := must(t, ids.Get, keyOne)
			if err := leave(path + ".tmp"); err != nil {
				t.Fatal(err)
			}
			ids = reopen(t, ids)
			two := must(t, ids.Get, keyTwo)
			if _, err := os.Lstat(path + ".tmp"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the temporary file is still there: %v", err)
			}
			if st, err := os.Lstat(path); err != nil || st.Mode() != 0o600 {
				t.Errorf("mode %v, %v; want 0600", st.Mode(), err)
			}
			ids = reopen(t, ids)
			if a, b := must(t, ids.Get, keyOne), must(t, ids.Get, keyTwo); a != one || b != two {
				t.Errorf("have become %v and %v, were %v and %v", a, b, one, two)
			}
			if got := content(t, victim); got != "precious" {
				t.Errorf("another file has become %q", got)
			}
		})
	}
}

// Root may write everywhere, but not below a regular file.
func TestIdentitiesUnwritableDirectory(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file + "/identities.json", file + "/state/identities.json"} {
		_, err := OpenIdentities(path)
		wantError(t, err, path, "not a directory")
	}
	if got := content(t, file); got != "precious" {
		t.Errorf("the file has become %q", got)
	}
	_, err := OpenIdentities("")
	wantError(t, err, "empty")

	dangling := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink("nowhere", dangling); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dangling + "/identities.json", dangling + "/state/identities.json"} {
		_, err := OpenIdentities(path)
		wantError(t, err, path, "no such file")
	}

	if os.Geteuid() != 0 {
		dir := t.TempDir()
		if err := os.Chmod(dir, 0o500); err != nil {
			t.Fatal(err)
		}
		_, err := OpenIdentities(dir + "/identities.json")
		wantError(t, err, dir+"/identities.json", "permission denied")
	}
}

// A path that is not a regular file is refused at once.
func TestIdentitiesNoRegularFile(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "golden"), []byte(identitiesGolden), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "directory"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("golden", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/zero", filepath.Join(dir, "zero")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"directory", "link", "zero"} {
		_, err := OpenIdentities(filepath.Join(dir, name))
		wantError(t, err, filepath.Join(dir, name), "not a regular file")
		// And the lock is free again.
		f, err := lockFile(filepath.Join(dir, name) + ".lock")
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
}

// A file that would be too long to read is not written.
func TestIdentitiesFull(t *testing.T) {
	ids := openIdentities(t, filepath.Join(t.TempDir(), "identities.json"))
	one := must(t, ids.Get, keyOne)
	before := content(t, ids.doc.file.path)
	long := strings.Repeat("x", maxIdentityKey)
	for i := range maxFile / maxIdentityKey {
		ids.doc.state.Retired = append(ids.doc.state.Retired, identityEntry{Key: long, NAA: fmt.Sprintf("3%015x", i)})
	}
	for _, f := range []func(string) (Identity, error){ids.Get, ids.Renew} {
		id, err := f(keyTwo)
		wantError(t, err, ids.doc.file.path, keyTwo, "limit of 16777216")
		if id != (Identity{}) {
			t.Errorf("an error and %v", id)
		}
	}
	if got := must(t, ids.Get, keyOne); got != one {
		t.Errorf("%s has become %v, was %v", keyOne, got, one)
	}
	if got := content(t, ids.doc.file.path); got != before {
		t.Errorf("the file has become %.200q", got)
	}
}

// If the file cannot be written, the identity is neither returned nor known.
func TestIdentitiesWriteFails(t *testing.T) {
	errInjected := errors.New("injected: input/output error")
	failFor := func(name string) func(ids *Identities) error {
		return func(ids *Identities) error {
			ids.doc.file.fsync = func(f *os.File) error {
				if f.Name() == filepath.Join(filepath.Dir(ids.doc.file.path), name) {
					return errInjected
				}
				return f.Sync()
			}
			return nil
		}
	}
	for _, tc := range []struct {
		name   string
		damage func(ids *Identities) error
		repair func(ids *Identities) error
		reason string
		// renamed: the file has the new content when the failure comes, so that
		// the old one has to be stored again before it is handed out.
		renamed bool
	}{
		{
			name: "directory is away",
			damage: func(ids *Identities) error {
				return os.Rename(filepath.Dir(ids.doc.file.path), filepath.Dir(ids.doc.file.path)+"~")
			},
			repair: func(ids *Identities) error {
				return os.Rename(filepath.Dir(ids.doc.file.path)+"~", filepath.Dir(ids.doc.file.path))
			},
			reason: "no such file",
		},
		{
			name:   "name of the temporary file is taken",
			damage: func(ids *Identities) error { return os.MkdirAll(ids.doc.file.path+".tmp/x", 0o700) },
			repair: func(ids *Identities) error { return os.RemoveAll(ids.doc.file.path + ".tmp") },
			reason: "not empty",
		},
		{
			name:   "sync of the temporary file",
			damage: failFor("identities.json.tmp"),
			reason: "injected",
		},
		{
			name: "rename",
			damage: func(ids *Identities) error {
				return errors.Join(os.Rename(ids.doc.file.path, ids.doc.file.path+"~"), os.MkdirAll(ids.doc.file.path+"/x", 0o700))
			},
			repair: func(ids *Identities) error {
				return errors.Join(os.RemoveAll(ids.doc.file.path), os.Rename(ids.doc.file.path+"~", ids.doc.file.path))
			},
			reason: "rename",
			// It has not, but nobody knows that.
			renamed: true,
		},
		{
			name:    "sync of the directory",
			damage:  failFor("."),
			reason:  "injected",
			renamed: true,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ids := openIdentities(t, filepath.Join(t.TempDir(), "state", "identities.json"))
			one := must(t, ids.Get, keyOne)
			before := content(t, ids.doc.file.path)
			if err := tc.damage(ids); err != nil {
				t.Fatal(err)
			}
			failed := map[Identity]bool{}
			ids.random = recorder{failed}
			for range 2 {
				for _, f := range []func() (Identity, error){
					func() (Identity, error) { return ids.Get(keyTwo) },
					func() (Identity, error) { return ids.Renew(keyTwo) },
					func() (Identity, error) { return ids.Renew(keyOne) },
				} {
					id, err := f()
					wantError(t, err, ids.doc.file.path, tc.reason)
					if id != (Identity{}) {
						t.Errorf("an error and %v", id)
					}
				}
				// The old one is known, but must not be handed out while the
				// disk may have another for the key.
				id, err := ids.Get(keyOne)
				if tc.renamed {
					wantError(t, err, ids.doc.file.path, tc.reason)
				} else if err != nil || id != one {
					t.Errorf("Get = %v, %v; want %v", id, err, one)
				}
			}
			if tc.repair != nil {
				if err := tc.repair(ids); err != nil {
					t.Fatal(err)
				}
			}
			ids.doc.file.fsync = (*os.File).Sync
			if _, err := os.Lstat(ids.doc.file.path + ".tmp"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the temporary file is still there: %v", err)
			}

			if got := must(t, ids.Get, keyOne); got != one {
				t.Errorf("%s has become %v, was %v", keyOne, got, one)
			}
			if got := content(t, ids.doc.file.path); got != before {
				t.Errorf("the file has become\n%swas\n%s", got, before)
			}
			two := must(t, ids.Get, keyTwo)
			if len(failed) != 7 { // six that failed and this one
				t.Errorf("%d identities were made, want 7", len(failed))
			}
			ids = reopen(t, ids)
			want := []identityEntry{{Key: keyOne, NAA: one.Serial}, {Key: keyTwo, NAA: two.Serial}}
			if !slices.Equal(ids.doc.state.Identities, want) || len(ids.doc.state.Retired) != 0 {
				t.Errorf("stored are %v, want %v", ids.doc.state, want)
			}
		})
	}
}

// A recorder is a random source that notes what it gives.
type recorder struct{ gave map[Identity]bool }

func (r recorder) Read(p []byte) (int, error) {
	binary.BigEndian.PutUint64(p, uint64(len(r.gave)+1))
	r.gave[Identity{NAA: [8]byte(p)}] = true
	return len(p), nil
}

// A file or a directory that cannot be synced is not trusted.
func TestOpenIdentitiesSyncFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "identities.json")
	if err := os.WriteFile(path, []byte(identitiesGolden), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{path, filepath.Dir(path)} {
		ids := Ephemeral()
		ids.doc.file.path = path
		ids.doc.file.fsync = func(f *os.File) error {
			if f.Name() == name {
				return errors.New("injected")
			}
			return nil
		}
		_, err := ids.doc.file.load(func([]byte) error { return nil })
		wantError(t, err, "injected")
	}
	err := makeDirectory(filepath.Join(t.TempDir(), "a", "b"), func(*os.File) error { return errors.New("injected") })
	wantError(t, err, "injected")
}

// Content, name and new directories are synced in the order that survives a power failure.
func TestIdentitiesSyncOrder(t *testing.T) {
	top := t.TempDir()
	var synced []string
	fsync := func(f *os.File) error {
		rel, err := filepath.Rel(top, f.Name())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Lstat(filepath.Join(top, "a/b/identities.json")); err == nil {
			rel += " (file is there)"
		}
		synced = append(synced, rel)
		return f.Sync()
	}
	dir := filepath.Join(top, "a", "b")
	if err := makeDirectory(dir, fsync); err != nil {
		t.Fatal(err)
	}
	ids := openIdentities(t, filepath.Join(dir, "identities.json"))
	ids.doc.file.fsync = fsync
	must(t, ids.Get, keyOne)
	must(t, ids.Get, keyOne) // writes nothing
	want := []string{".", "a", "a/b/identities.json.tmp", "a/b/identities.json.spare.tmp", "a/b (file is there)"}
	if !slices.Equal(synced, want) {
		t.Errorf("synced are %q, want %q", synced, want)
	}
}
