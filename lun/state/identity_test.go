package state

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const (
	keyOne = "iqn.2026-11.io.example:store/0/file:/var/lib/iser-target/one.img"
	keyTwo = "iqn.2026-11.io.example:store/1/block:/dev/sdb"
)

// identitiesGolden is version 1 of the file. Installations have such files: a change of the
// format needs a new version.
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

// A random source that repeats itself does not give two keys one identity.
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
	if err := ids.Make([]string{"a", "b", "c", "b"}); err != nil || syncs != 3 {
		t.Errorf("%v, %d syncs", err, syncs)
	}
	if err := ids.Make([]string{"", "d"}); err == nil || ids.Known("d") {
		t.Errorf("a bad key: %v", err)
	}
	if err := ids.Make([]string{"c"}); err != nil || syncs != 3 {
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

// Adopt gives a key the identity of another target, once, and no identity to two keys. A key that was only
// promised one changes it.
func TestAdopt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "identities.json")
	ids := openIdentities(t, path)
	const serial = "3aaaaaaaaaaaaaaa"
	if ids.Has(serial) {
		t.Error("a foreign identity is known")
	}
	promised, err := ids.Promise(keyOne)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if id, err := ids.Adopt(keyOne, serial); err != nil || id.Serial != serial || !ids.Known(keyOne) {
			t.Errorf("%v, %v", id, err)
		}
	}
	_, err = ids.Adopt(keyTwo, serial)
	wantError(t, err, serial, keyOne)
	_, err = ids.Adopt(keyOne, "3bbbbbbbbbbbbbbb")
	wantError(t, err, keyOne, serial)
	_, err = ids.Adopt(keyTwo, "5bbbbbbbbbbbbbbb")
	wantError(t, err, "5bbbbbbbbbbbbbbb")
	ids = reopen(t, ids)
	if id := must(t, ids.Get, keyOne); id.Serial != serial || !ids.Has(promised.Serial) || ids.Known(keyTwo) {
		t.Errorf("after a restart: %v", id)
	}
	if err := ids.Forget(keyOne); err != nil { // and back again
		t.Fatal(err)
	}
	if _, err := ids.Adopt(keyTwo, serial); err != nil {
		t.Error(err)
	}
	reopen(t, ids)
}
