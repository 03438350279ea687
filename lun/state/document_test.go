package state

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

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
	if got, err := Encode(ids.doc.state); err != nil || string(got) != identitiesGolden {
		t.Errorf("written again it is\n%s%v", got, err)
	}
}

// Other white space and escapes say the same.
func TestIdentitiesFileFormatted(t *testing.T) {
	want, err := identitiesFormat.Decode([]byte(identitiesGolden))
	if err != nil {
		t.Fatal(err)
	}
	b := strings.NewReplacer("\n", "", "  ", "\t", "é", `\u00e9`, "<", `\u003c`, "/", `\/`).Replace(identitiesGolden)
	got, err := identitiesFormat.Decode([]byte(b))
	if err != nil || !slices.Equal(got.Identities, want.Identities) || !slices.Equal(got.Retired, want.Retired) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
}

// badIdentities are damaged files, with a part of the error for each.
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

func TestIdentitiesTruncated(t *testing.T) {
	whole := strings.TrimSpace(identitiesGolden)
	for n := range len(whole) {
		if s, err := identitiesFormat.Decode([]byte(whole[:n])); err == nil {
			t.Errorf("the first %d of %d octets are read as %v", n, len(whole), s)
		}
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
		s, err := identitiesFormat.Decode(b)
		if err != nil {
			if s.Identities != nil || s.Retired != nil {
				t.Fatalf("an error and %v", s)
			}
			return
		}
		// What is read holds what Get and Renew rely on.
		naas, keys := map[string]bool{}, map[string]bool{}
		for _, e := range slices.Concat(s.Identities, s.Retired) {
			id, err := parseIdentity(e.NAA)
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
		again, err := Encode(s)
		if err != nil {
			t.Fatal(err)
		}
		s2, err := identitiesFormat.Decode(again)
		if err != nil || s2.Version != s.Version || !slices.Equal(s2.Identities, s.Identities) || !slices.Equal(s2.Retired, s.Retired) {
			t.Fatalf("%v came back as %v, %v", s, s2, err)
		}
	})
}
