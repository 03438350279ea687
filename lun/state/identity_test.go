package state

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	keyOne = "iqn.2026-11.io.example:store/0/file:/var/lib/iser-target/one.img"
	keyTwo = "iqn.2026-11.io.example:store/1/block:/dev/sdb"
)

// identitiesGolden is version 1 of the file. Files like this are out there:
// what changes it needs a new version.
const identitiesGolden = `{
  "version": 1,
  "identities": [
    {
      "key": "iqn.2026-11.io.example:store/0/file:/var/lib/<é>.img",
      "naa": "3000000000000001"
    },
    {
      "key": "iqn.2026-11.io.example:store/1/block:/dev/sdb",
      "naa": "3fedcba987654321"
    }
  ],
  "retired": [
    {
      "key": "iqn.2026-11.io.example:store/1/block:/dev/sdb",
      "naa": "3fffffffffffffff"
    }
  ]
}
`

func openIdentities(t testing.TB, path string) *Identities {
	t.Helper()
	ids, err := OpenIdentities(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ids.Close() })
	return ids
}

func reopen(t testing.TB, ids *Identities) *Identities {
	t.Helper()
	if err := ids.Close(); err != nil {
		t.Fatal(err)
	}
	return openIdentities(t, ids.doc.file.path)
}

func must(t testing.TB, f func(string) (Identity, error), key string) Identity {
	t.Helper()
	id, err := f(key)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func content(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// wantError checks that err names all of the words.
func wantError(t testing.TB, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

// SPC-4, NAA Locally Assigned designator: the NAA field is 3h, 60 bits follow.
func TestIdentityIsLocallyAssigned(t *testing.T) {
	ids := Ephemeral()
	var or, and uint64 = 0, 1<<64 - 1
	for i := range 200 {
		id := must(t, ids.Get, fmt.Sprint(i))
		if id.NAA[0]>>4 != 3 {
			t.Fatalf("NAA %x does not begin with 3", id.NAA)
		}
		if len(id.Serial) != 16 || id.Serial != hex.EncodeToString(id.NAA[:]) {
			t.Fatalf("serial %q of NAA %x", id.Serial, id.NAA)
		}
		n := binary.BigEndian.Uint64(id.NAA[:])
		or, and = or|n, and&n
	}
	if or != 0x3fffffffffffffff || and != 0x3000000000000000 {
		t.Errorf("of 60 random bits %015x are never set and %015x always", ^or&(1<<60-1), and&(1<<60-1))
	}
}

func TestIdentitiesLast(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "var", "lib")
	path := filepath.Join(dir, "identities.json")
	ids := openIdentities(t, path)
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("before the first identity the file is there: %v", err)
	}
	one, two := must(t, ids.Get, keyOne), must(t, ids.Get, keyTwo)
	if one == two {
		t.Fatalf("both keys have %v", one)
	}
	for range 3 {
		if got := must(t, ids.Get, keyOne); got != one {
			t.Errorf("%s has become %v, was %v", keyOne, got, one)
		}
		if got := must(t, ids.Get, keyTwo); got != two {
			t.Errorf("%s has become %v, was %v", keyTwo, got, two)
		}
		ids = reopen(t, ids)
	}
	for path, want := range map[string]fs.FileMode{
		filepath.Dir(dir): fs.ModeDir | 0o700,
		dir:               fs.ModeDir | 0o700,
		path:              0o600,
		path + ".lock":    0o600,
	} {
		if st, err := os.Stat(path); err != nil || st.Mode() != want {
			t.Errorf("%s: mode %v, %v; want %v", path, st.Mode(), err, want)
		}
	}
}

func TestIdentitiesFileVersion1(t *testing.T) {
	path := filepath.Join(t.TempDir(), "identities.json")
	if err := os.WriteFile(path, []byte(identitiesGolden), 0o600); err != nil {
		t.Fatal(err)
	}
	ids := openIdentities(t, path)
	want := Identity{[8]byte{0x30, 7: 1}, "3000000000000001"}
	if got := must(t, ids.Get, "iqn.2026-11.io.example:store/0/file:/var/lib/<é>.img"); got != want {
		t.Errorf("first is %v, want %v", got, want)
	}
	want = Identity{[8]byte{0x3f, 0xed, 0xcb, 0xa9, 0x87, 0x65, 0x43, 0x21}, "3fedcba987654321"}
	if got := must(t, ids.Get, keyTwo); got != want {
		t.Errorf("second is %v, want %v", got, want)
	}
	if got := content(t, path); got != identitiesGolden {
		t.Errorf("reading has changed the file to\n%s", got)
	}
	if got, err := encode(ids.doc.state); err != nil || string(got) != identitiesGolden {
		t.Errorf("written again it is\n%s%v", got, err)
	}
}

// Other white space and escapes say the same.
func TestIdentitiesFileFormatted(t *testing.T) {
	want, err := identitiesFormat.decode([]byte(identitiesGolden))
	if err != nil {
		t.Fatal(err)
	}
	b := strings.NewReplacer("\n", "", "  ", "\t", "é", `\u00e9`, "<", `\u003c`, "/", `\/`).Replace(identitiesGolden)
	got, err := identitiesFormat.decode([]byte(b))
	if err != nil || !slices.Equal(got.Identities, want.Identities) || !slices.Equal(got.Retired, want.Retired) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
}

func TestRenew(t *testing.T) {
	ids := openIdentities(t, filepath.Join(t.TempDir(), "identities.json"))
	two := must(t, ids.Get, keyTwo)
	had := []Identity{must(t, ids.Renew, keyOne)} // none existed to retire
	for range 5 {
		id := must(t, ids.Renew, keyOne)
		if slices.Contains(had, id) {
			t.Fatalf("%v names something again", id)
		}
		had = append(had, id)
		if got := must(t, ids.Get, keyOne); got != id {
			t.Errorf("Get after Renew: %v, want %v", got, id)
		}
		ids = reopen(t, ids)
		if got := must(t, ids.Get, keyOne); got != id {
			t.Errorf("Get after Renew and restart: %v, want %v", got, id)
		}
	}
	if got := must(t, ids.Get, keyTwo); got != two {
		t.Errorf("the other key has become %v, was %v", got, two)
	}
	var retired []identityEntry
	for _, id := range had[:len(had)-1] {
		retired = append(retired, identityEntry{Key: keyOne, NAA: id.Serial})
	}
	if !slices.Equal(ids.doc.state.Retired, retired) {
		t.Errorf("retired are %v, want %v", ids.doc.state.Retired, retired)
	}
}

// A random source that repeats itself does not make an identity name two.
func TestIdentitiesAreNeverReused(t *testing.T) {
	octets := func(n byte) []byte { return bytes.Repeat([]byte{n}, 8) }
	ids := openIdentities(t, filepath.Join(t.TempDir(), "identities.json"))
	ids.random = bytes.NewReader(slices.Concat(octets(1), octets(2)))
	must(t, ids.Get, keyOne)
	must(t, ids.Renew, keyOne)
	ids = reopen(t, ids)
	ids.random = bytes.NewReader(slices.Concat(octets(2), octets(1), octets(2), octets(0xf1), octets(1), octets(3)))
	if got, want := must(t, ids.Get, keyTwo).Serial, "31f1f1f1f1f1f1f1"; got != want {
		t.Errorf("new identity is %s, want %s: 3202… is taken, 3101… retired", got, want)
	}
	if got, want := must(t, ids.Renew, keyTwo).Serial, "3303030303030303"; got != want {
		t.Errorf("renewed identity is %s, want %s", got, want)
	}

	before := content(t, ids.doc.file.path)
	ids.random = constReader(2)
	_, err := ids.Get("third")
	wantError(t, err, ids.doc.file.path, "100 identities", "taken")
	ids.random = strings.NewReader("short")
	_, err = ids.Get("third")
	wantError(t, err, ids.doc.file.path, "random", io.ErrUnexpectedEOF.Error())
	if got := content(t, ids.doc.file.path); got != before {
		t.Errorf("the file has become\n%s", got)
	}
}

type constReader byte

func (r constReader) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(r)
	}
	return len(p), nil
}

func TestEphemeral(t *testing.T) {
	t.Chdir(t.TempDir())
	ids, other := Ephemeral(), Ephemeral()
	one := must(t, ids.Get, keyOne)
	if got := must(t, ids.Get, keyOne); got != one {
		t.Errorf("%s has become %v, was %v", keyOne, got, one)
	}
	if got := must(t, other.Get, keyOne); got == one {
		t.Errorf("both have %v", got)
	}
	if got := must(t, ids.Renew, keyOne); got == one || got != must(t, ids.Get, keyOne) {
		t.Errorf("Renew gave %v after %v", got, one)
	}
	if left, err := os.ReadDir("."); err != nil || len(left) > 0 {
		t.Errorf("on disk: %v, %v", left, err)
	}
	_, err := ids.Get("")
	wantError(t, err, "ephemeral", "key is empty")
	if err := ids.Close(); err != nil {
		t.Error(err)
	}
}

func TestIdentitiesClose(t *testing.T) {
	for name, ids := range map[string]*Identities{
		"file":      openIdentities(t, filepath.Join(t.TempDir(), "identities.json")),
		"ephemeral": Ephemeral(),
	} {
		t.Run(name, func(t *testing.T) {
			must(t, ids.Get, keyOne)
			for range 2 {
				if err := ids.Close(); err != nil {
					t.Fatal(err)
				}
			}
			for _, key := range []string{keyOne, keyTwo} {
				if id, err := ids.Get(key); !errors.Is(err, fs.ErrClosed) || id != (Identity{}) {
					t.Errorf("Get(%q) = %v, %v; want fs.ErrClosed", key, id, err)
				}
				if id, err := ids.Renew(key); !errors.Is(err, fs.ErrClosed) || id != (Identity{}) {
					t.Errorf("Renew(%q) = %v, %v; want fs.ErrClosed", key, id, err)
				}
			}
		})
	}
}

func TestIdentitiesBadKey(t *testing.T) {
	ids := openIdentities(t, filepath.Join(t.TempDir(), "identities.json"))
	for key, reason := range map[string]string{
		"":                                    "key is empty",
		"file:/\xff":                          "not valid UTF-8",
		"\xed\xa0\x80":                        "not valid UTF-8", // a surrogate
		strings.Repeat("x", maxIdentityKey+1): "limit of 8192",
	} {
		for _, f := range []func(string) (Identity, error){ids.Get, ids.Renew} {
			id, err := f(key)
			wantError(t, err, ids.doc.file.path, reason)
			if id != (Identity{}) {
				t.Errorf("an error and %v", id)
			}
		}
	}
	long := strings.Repeat("x", maxIdentityKey)
	id := must(t, ids.Get, long)
	if got := must(t, reopen(t, ids).Get, long); got != id {
		t.Errorf("the longest key has become %v, was %v", got, id)
	}
}

func TestIdentitiesOddKey(t *testing.T) {
	ids := openIdentities(t, filepath.Join(t.TempDir(), "identities.json"))
	odd := "a\"\\/<>&\u2028\x00\x7f\ufffd\n"
	id := must(t, ids.Get, odd)
	if got := must(t, reopen(t, ids).Get, odd); got != id {
		t.Errorf("%q has become %v, was %v", odd, got, id)
	}
}

// helperIdentities in the environment makes the test binary a process that
// opens the file it names, says so, and then makes one identity after the other.
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

// startHelper starts that process. It is killed at the end of the test.
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

// A process is killed while it writes, again and again: what it has handed out
// is there, what is there can be read, and the lock is gone with the process.
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

// What is no regular file is refused, at once.
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

// badIdentities are files that are refused, and what the error says.
var badIdentities = []struct{ name, content, reason string }{
	{"empty", "", "is empty"},
	{"not JSON", "hello", "damaged at byte 1 of 5"},
	{"zeros after a power failure", strings.Repeat("\x00", 100), "damaged at byte 1 of 100"},
	{"other JSON", "[]", "damaged"},
	{"null", "null", "has no version"},
	{"empty object", "{}", "has no version"},
	{"something behind", identitiesGolden + "{}", "damaged at byte"},
	{"invalid UTF-8", strings.Replace(identitiesGolden, "é", "\xe9", 1), "not valid UTF-8"},
	{"later version", `{"version": 2, "volumes": []}`, "has version 2, but this program knows only version 1"},
	{"version 0", strings.Replace(identitiesGolden, "1", "0", 1), "has version 0"},
	{"version text", strings.Replace(identitiesGolden, "1", `"1"`, 1), "string"},
	{"version fraction", strings.Replace(identitiesGolden, "1", "1.5", 1), "1.5"},
	{"version null", strings.Replace(identitiesGolden, "1", "null", 1), "has no version"},
	{"version twice", strings.Replace(identitiesGolden, "{", `{"version": 1,`, 1), "version before byte 26, where identities belongs"},
	{"unknown member", strings.Replace(identitiesGolden, "{", `{"comment": "x",`, 1), `unknown field "comment"`},
	{"member in other case", strings.Replace(identitiesGolden, "retired", "Retired", 1), "Retired before byte"},
	{"no identities", `{"version": 1, "retired": []}`, "want the members identities and retired"},
	{"identities null", `{"version": 1, "identities": null, "retired": []}`, "want the members identities and retired, both lists"},
	{"retired null", `{"version": 1, "identities": [], "retired": null}`, "want the members identities and retired, both lists"},
	{"other order", `{"version": 1, "retired": [], "identities": []}`, "retired before byte 24, where identities belongs"},
	{"key null", `{"version": 1, "identities": [{"key": null, "naa": "3000000000000001"}], "retired": []}`, "identities[0]: the key is empty"},
	{"long key", strings.Replace(identitiesGolden, "/dev/sdb", strings.Repeat("x", maxIdentityKey), 1), "limit of 8192"},
	{"no retired", `{"version": 1, "identities": []}`, "want the members identities and retired"},
	{"identities twice", strings.Replace(identitiesGolden, `"retired"`, `"identities": [], "retired"`, 1), "damaged"},
	{"no key", `{"version": 1, "identities": [{"naa": "3000000000000001"}], "retired": []}`, "identities[0]: the key is empty"},
	{"no naa", `{"version": 1, "identities": [{"key": "a"}], "retired": []}`, `identities[0]: naa ""`},
	{"null entry", `{"version": 1, "identities": [null], "retired": []}`, `identities[0]: naa ""`},
	{"naa twice in an entry", strings.Replace(identitiesGolden, `"naa"`, `"naa": "3fff000000000000", "naa"`, 1), "damaged"},
	{"bad hex", strings.Replace(identitiesGolden, "3fedcba987654321", "3fedcba98765432g", 1), `identities[1]: naa "3fedcba98765432g": want the digit 3 and 15 more lower-case hex digits`},
	{"upper case", strings.Replace(identitiesGolden, "3fedcba987654321", "3FEDCBA987654321", 1), "identities[1]: naa"},
	{"short naa", strings.Replace(identitiesGolden, "3fedcba987654321", "3fedcba9876543", 1), "identities[1]: naa"},
	{"long naa", strings.Replace(identitiesGolden, "3fedcba987654321", "3fedcba98765432100", 1), "identities[1]: naa"},
	{"odd naa", strings.Replace(identitiesGolden, "3fedcba987654321", "3fedcba98765432", 1), "identities[1]: naa"},
	{"NAA 5h", strings.Replace(identitiesGolden, "3fedcba987654321", "5fedcba987654321", 1), "identities[1]: naa"},
	{"bad hex, retired", strings.Replace(identitiesGolden, "3fffffffffffffff", "x", 1), "retired[0]: naa"},
	{"same naa", strings.Replace(identitiesGolden, "3fedcba987654321", "3000000000000001", 1), "identities[1]: naa 3000000000000001 is there twice"},
	{"retired naa in use", strings.Replace(identitiesGolden, "3fffffffffffffff", "3000000000000001", 1), "retired[0]: naa 3000000000000001 is there twice"},
	{"same key", strings.Replace(identitiesGolden, "store/0/file:/var/lib/<é>.img", "store/1/block:/dev/sdb", 1), "identities[1]: key \"" + keyTwo + "\" is there twice"},
	{"too long", identitiesGolden + strings.Repeat(" ", maxFile), "limit of 16777216 bytes"},
}

func TestIdentitiesBadFile(t *testing.T) {
	for _, tc := range badIdentities {
		t.Run(tc.name, func(t *testing.T) {
			if tc.content == identitiesGolden {
				t.Fatal("nothing is wrong with it")
			}
			path := filepath.Join(t.TempDir(), "identities.json")
			if err := os.WriteFile(path, []byte(tc.content), 0o600); err != nil {
				t.Fatal(err)
			}
			for range 2 { // the first has not kept the lock
				ids, err := OpenIdentities(path)
				wantError(t, err, path, tc.reason)
				if ids != nil {
					t.Fatal("an error and Identities")
				}
			}
			if got := content(t, path); got != tc.content {
				t.Errorf("the file has become %.200q", got)
			}
			if err := os.WriteFile(path, []byte(identitiesGolden), 0o600); err != nil {
				t.Fatal(err)
			}
			openIdentities(t, path)
		})
	}
}

// A file that could not be read again is not written.
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

func TestIdentitiesTruncated(t *testing.T) {
	whole := strings.TrimSpace(identitiesGolden)
	for n := range len(whole) {
		if s, err := identitiesFormat.decode([]byte(whole[:n])); err == nil {
			t.Errorf("the first %d of %d octets are read as %v", n, len(whole), s)
		}
	}
}

// If the file cannot be written, the identity is neither handed out nor known.
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

// recorder is a random source that notes what it gives.
type recorder struct{ gave map[Identity]bool }

func (r recorder) Read(p []byte) (int, error) {
	binary.BigEndian.PutUint64(p, uint64(len(r.gave)+1))
	r.gave[Identity{NAA: [8]byte(p)}] = true
	return len(p), nil
}

// A file that its reader cannot make durable must not be trusted, nor a
// directory that may vanish.
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
		wantError(t, ids.doc.load(), "injected")
	}
	err := makeDirectory(filepath.Join(t.TempDir(), "a", "b"), func(*os.File) error { return errors.New("injected") })
	wantError(t, err, "injected")
}

// Content, name and new directories are synced, in the order that a power
// failure asks for.
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
	want := []string{".", "a", "a/b/identities.json.tmp", "a/b (file is there)"}
	if !slices.Equal(synced, want) {
		t.Errorf("synced are %q, want %q", synced, want)
	}
}

func TestIdentitiesConcurrently(t *testing.T) {
	const workers, keys = 16, 12
	ids := openIdentities(t, filepath.Join(t.TempDir(), "identities.json"))
	var got [workers][keys]Identity
	var renewed [workers]Identity
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for k := range keys {
				id, err := ids.Get(fmt.Sprint("key", (k+w)%keys))
				if err != nil {
					t.Error(err)
				}
				got[w][(k+w)%keys] = id
			}
			id, err := ids.Renew("renewed")
			if err != nil {
				t.Error(err)
			}
			renewed[w] = id
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	ids = reopen(t, ids)
	seen := map[Identity]bool{}
	for k := range keys {
		id := must(t, ids.Get, fmt.Sprint("key", k))
		seen[id] = true
		for w := range workers {
			if got[w][k] != id {
				t.Errorf("key%d is %v for goroutine %d, %v for the file", k, got[w][k], w, id)
			}
		}
	}
	for _, id := range renewed {
		seen[id] = true
	}
	if len(seen) != keys+workers {
		t.Errorf("%d different identities, want %d", len(seen), keys+workers)
	}
	if n := len(ids.doc.state.Retired); n != workers-1 {
		t.Errorf("%d are retired, want %d", n, workers-1)
	}
}

func FuzzIdentitiesFile(f *testing.F) {
	f.Add([]byte(identitiesGolden))
	for _, tc := range badIdentities {
		if len(tc.content) < 4096 {
			f.Add([]byte(tc.content))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := identitiesFormat.decode(b)
		if err != nil {
			if s.Identities != nil || s.Retired != nil {
				t.Fatalf("an error and %v", s)
			}
			return
		}
		// What is read holds what Get and Renew rely on.
		naas, keys := map[string]bool{}, map[string]bool{}
		for _, e := range slices.Concat(s.Identities, s.Retired) {
			id, err := ParseIdentity(e.NAA)
			if err != nil || id.NAA[0]>>4 != naaLocal || hex.EncodeToString(id.NAA[:]) != e.NAA || naas[e.NAA] || e.Key == "" {
				t.Fatalf("entry %v, %v", e, err)
			}
			naas[e.NAA] = true
		}
		for _, e := range s.Identities {
			if keys[e.Key] {
				t.Fatalf("key %q is there twice", e.Key)
			}
			keys[e.Key] = true
		}
		again, err := encode(s)
		if err != nil {
			t.Fatal(err)
		}
		s2, err := identitiesFormat.decode(again)
		if err != nil || s2.Version != s.Version || !slices.Equal(s2.Identities, s.Identities) || !slices.Equal(s2.Retired, s.Retired) {
			t.Fatalf("%v came back as %v, %v", s, s2, err)
		}
	})
}

// Make stores many identities at once, and a failure leaves none of them.
func TestMakeIdentities(t *testing.T) {
	path := filepath.Join(t.TempDir(), "identities.json")
	ids, err := OpenIdentities(path)
	if err != nil {
		t.Fatal(err)
	}
	defer ids.Close()
	first, err := ids.Get("a")
	if err != nil {
		t.Fatal(err)
	}
	syncs := 0
	ids.doc.file.fsync = func(*os.File) error { syncs++; return errors.New("injected") }
	if err := ids.Make([]string{"b"}); err == nil || ids.Known("b") {
		t.Errorf("a failure: %v", err)
	}
	syncs = 0
	ids.doc.file.fsync = func(f *os.File) error { syncs++; return f.Sync() }
	if err := ids.Make([]string{"a", "b", "c", "b"}); err != nil || syncs != 2 {
		t.Errorf("%v, %d syncs", err, syncs)
	}
	if err := ids.Make([]string{"", "d"}); err == nil || ids.Known("d") {
		t.Errorf("a bad key: %v", err)
	}
	if err := ids.Make([]string{"c"}); err != nil || syncs != 2 {
		t.Errorf("nothing to do: %v, %d syncs", err, syncs)
	}
	b, err := ids.Get("b")
	if a, err2 := ids.Get("a"); err != nil || err2 != nil || a != first || a == b {
		t.Errorf("%v, %v, %v, %v", a, b, err, err2)
	}
	if err := ids.Forget("b"); err != nil || ids.Known("b") {
		t.Errorf("Forget: %v", err)
	}
	if again, err := ids.Get("b"); err != nil || again == b {
		t.Errorf("%v after it was forgotten, %v", again, err)
	}
}

// A promised identity is not Known before Get returns it, and stays the
// same.
func TestPromisedIdentity(t *testing.T) {
	ids := openIdentities(t, filepath.Join(t.TempDir(), "identities.json"))
	want := must(t, ids.Promise, keyOne)
	known := must(t, ids.Get, keyTwo)
	for range 2 {
		if ids.Known(keyOne) || !ids.Known(keyTwo) {
			t.Errorf("known: %t, %t", ids.Known(keyOne), ids.Known(keyTwo))
		}
		if got := must(t, ids.Promise, keyOne); got != want {
			t.Errorf("%v was promised, then %v", want, got)
		}
		ids = reopen(t, ids)
	}
	if got := must(t, ids.Promise, keyTwo); got != known || !ids.Known(keyTwo) {
		t.Errorf("%v is %v after a promise", known, got)
	}
	ids.doc.file.fsync = func(*os.File) error { return errors.New("injected") }
	if _, err := ids.Get(keyOne); err == nil || ids.Known(keyOne) {
		t.Errorf("error %v; known: %t", err, ids.Known(keyOne))
	}
	ids.doc.file.fsync = (*os.File).Sync
	if got := must(t, ids.Get, keyOne); got != want {
		t.Errorf("%v was promised, but it is %v", want, got)
	}
	ids = reopen(t, ids)
	if !ids.Known(keyOne) {
		t.Error("not known")
	}
	if next := must(t, ids.Renew, keyOne); next == want || !ids.Known(keyOne) {
		t.Errorf("renewed: %v", next)
	}
	if strings.Contains(content(t, ids.doc.file.path), "promised") {
		t.Errorf("the file is\n%s", content(t, ids.doc.file.path))
	}
}
