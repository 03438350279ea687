package state

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Damage of entries in the file and in its spare copy costs the keys whose entries are good in neither. They get no other
// identity until somebody accepts that, and all others keep theirs.
func TestLostIdentities(t *testing.T) {
	path := filepath.Join(t.TempDir(), "identities.json")
	ids := openIdentities(t, path)
	var keys, naas []string
	for n := range 4 {
		keys = append(keys, fmt.Sprintf("iqn.2026-11.io.example:store/%d/file:/srv/%s.img", n, strings.Repeat(string(rune('a'+n)), 5)))
		naas = append(naas, must(t, ids.Get, keys[n]).Serial)
	}
	must(t, ids.Renew, keys[0])
	naas[0] = must(t, ids.Get, keys[0]).Serial
	if err := ids.Close(); err != nil {
		t.Fatal(err)
	}
	all := content(t, path)
	replace := func(s, old, new string) string {
		if strings.Count(s, old) != 1 {
			t.Fatalf("%q is there %d times in\n%s", old, strings.Count(s, old), s)
		}
		return strings.Replace(s, old, new, 1)
	}
	brokenNAA := func(n int) string { return replace(all, naas[n], naas[n][:6]+"\x00\x00"+naas[n][8:]) }
	brokenKey := func(n int) string {
		return replace(all, keys[n]+"\",\n      \"naa\": \""+naas[n], keys[n][:len(keys[n])-8]+"\x00\x00\",\n      \"naa\": \""+naas[n])
	}
	fresh := "iqn.2026-11.io.example:other/9/memory:"
	for _, c := range []struct {
		name        string
		file, spare string
		lost        []int // keys
		naa         bool  // that can be seen
		fresh       bool  // a new key may have been lost, too
		fails       string
	}{
		{"a NAA", brokenNAA(1), brokenNAA(1), []int{1}, true, false, ""},
		{"a key", brokenKey(2), brokenKey(2), []int{2}, true, true, ""},
		{"another entry of each", brokenNAA(1), brokenKey(2), nil, false, false, ""},
		{"no spare copy", brokenNAA(3), "", []int{3}, true, false, ""},
		{"cut short", all[:strings.Index(all, naas[3])], all[:strings.Index(all, naas[3])], []int{3}, false, true, ""},
		{"nothing", "garbage", "", nil, false, false, "no record can be read"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "identities.json")
			if err := os.WriteFile(path, []byte(c.file), 0o600); err != nil {
				t.Fatal(err)
			}
			if c.spare != "" {
				if err := os.WriteFile(path+".spare", []byte(c.spare), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := OpenIdentities(path); err == nil {
				t.Fatal("it is not damaged")
			}
			before := ExamineIdentities(path)
			if err := SalvageIdentities(path); c.fails != "" {
				wantError(t, err, path, c.fails)
				if before.Verdict != Damaged || content(t, path) != c.file {
					t.Errorf("verdict %s, and\n%s", before.Verdict, content(t, path))
				}
				return
			} else if err != nil || before.Verdict != Partial {
				t.Fatalf("verdict %s: %v", before.Verdict, err)
			}
			ids := openIdentities(t, path)
			for range 2 { // as a change leaves it, too
				isLost := map[int]bool{}
				for _, n := range c.lost {
					isLost[n] = true
				}
				for n, key := range keys {
					if err := ids.Lost(key); isLost[n] != errors.Is(err, ErrLost) {
						t.Errorf("key %d: %v", n, err)
					}
					if !isLost[n] && (!ids.Known(key) || must(t, ids.Get, key).Serial != naas[n]) {
						t.Errorf("key %d has another identity", n)
					}
					if ids.LostAs(key, naas[n]) != (isLost[n] && c.naa) {
						t.Errorf("key %d: its NAA is seen: %v", n, ids.LostAs(key, naas[n]))
					}
				}
				if err := ids.Lost(fresh); (err != nil) != c.fresh {
					t.Errorf("a new key: %v", err)
				}
				must(t, ids.Get, "iqn.2026-11.io.example:third/1/block:/dev/third")
				ids = reopen(t, ids)
			}
			for _, n := range c.lost {
				if _, err := ids.Adopt(keys[n], naas[n]); err != nil {
					t.Fatal(err)
				}
				if ids.Lost(keys[n]) != nil || must(t, ids.Get, keys[n]).Serial != naas[n] {
					t.Errorf("key %d is not what it was", n)
				}
			}
			if err := ids.Lost(fresh); err != nil {
				t.Errorf("a new key afterwards: %v", err)
			}
			if err := ids.AcceptLost(fresh); err == nil {
				t.Error("an entry that is not lost is accepted")
			}
		})
	}
}
