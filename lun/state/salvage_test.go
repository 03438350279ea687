package state

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// serials are those of the units of a test, which have no more digits in common than chance gives them.
var serials = []string{"3a91c07d5e2b4f86", "35f0e8b21c9d7a43", "3d4472ffa0916be5", "30b7d91e68f35c2a", "3c8e15a3974d02bf"}

// textOf returns the text of the card of a unit.
func textOf(n int) string { return fmt.Sprintf("card %d", n) + strings.Repeat(" and more", 8) }

// cardsOf returns a file with a record of each of those units.
func cardsOf(t *testing.T, units ...int) string {
	t.Helper()
	s := Records[card]{Version: 1, Units: []card{}}
	for _, n := range units {
		s.Units = append(s.Units, card{serials[n], textOf(n)})
	}
	b, err := Encode(s)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Damage of records in a file and in its spare copy costs the units whose records are good in neither. All others keep
// theirs. What is lost stays lost until somebody accepts that, however often the file changes.
func TestSalvage(t *testing.T) {
	replace := func(s, old, new string) string {
		if strings.Count(s, old) != 1 {
			t.Fatalf("%q is there %d times in\n%s", old, strings.Count(s, old), s)
		}
		return strings.Replace(s, old, new, 1)
	}
	all := cardsOf(t, 0, 1, 2, 3)
	text := func(n int) string { return fmt.Sprintf(`"text": "card %d`, n) }
	head := "    {\n      \"naa\": \""
	zeros := func(s string, n int) string { // half a page from the middle of a record on
		at := strings.Index(s, text(n))
		return s[:at] + strings.Repeat("\x00", min(len(s)-at, 150)) + s[min(len(s), at+150):]
	}
	for _, c := range []struct {
		name        string
		file, spare string
		lost        []int // of the units 0 to 3; unit 4 never had a record
		fails       string
	}{
		{"one record of both", replace(all, text(1), `"text": 7, "x": "`), replace(all, text(1), "\x00"+text(1)), []int{1}, ""},
		{"another record of each", replace(all, text(1), "\x00"), replace(all, text(2), "\x00"), nil, ""},
		{"no spare copy", replace(all, text(3), "\xff"), "", []int{3}, ""},
		{"the NAA has lost digits", replace(all, `"naa": "`+serials[2], `"naa": "`+serials[2][:5]+"\x00\x00"+serials[2][7:]), "", []int{2}, ""},
		{"the NAA is no NAA", replace(all, `"naa": "`+serials[2], `"naa": "x`+serials[2][1:]), "garbage", []int{2}, ""},
		{"nothing is left of one record but its size", replace(all, all[strings.Index(all, head+serials[1])+6:strings.Index(all, head+serials[2])-7], strings.Repeat(" ", 20)), "", []int{1, 4}, ""},
		{"the beginning of a record, and the end of another", replace(all, head+serials[0], "    [\n      \"naa\": \""+serials[0]), replace(all, text(2), "\x00"), nil, ""},
		{"cut short in the last record", all[:strings.Index(all, text(3))], all[:strings.Index(all, text(3))], []int{3, 4}, ""},
		{"cut short before the last record", all[:strings.Index(all, head+serials[3])], "", []int{3, 4}, ""},
		{"zeros over parts of two records", zeros(all, 1), zeros(all, 1), []int{1, 2, 4}, ""},
		{"zeros, and a spare copy that is damaged elsewhere", zeros(all, 1), replace(all, text(3), "\x00"), nil, ""},
		{"one record twice", replace(all, serials[1]+"\",\n", serials[0]+"\",\n"), "", []int{0, 1, 4}, ""},
		{"nothing", strings.Repeat("\x00", 4096), "", nil, "no record can be read"},
		{"another version", replace(all, `"version": 1`, `"version": 2`), replace(all, text(1), "\x00"), nil, "has version 2"},
		{"not damaged", all, "garbage", nil, "is not damaged"},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "cards.json")
			if err := os.WriteFile(path, []byte(c.file), 0o600); err != nil {
				t.Fatal(err)
			}
			if c.spare != "" {
				if err := os.WriteFile(path+".spare", []byte(c.spare), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			before := ExamineRecords(cards, path, serials)
			_, err := Salvage(cards, path, serials)
			if c.fails != "" {
				wantError(t, err, path, c.fails)
				if before.Verdict == Partial || content(t, path) != c.file {
					t.Errorf("verdict %s; the file is now\n%s", before.Verdict, content(t, path))
				}
				return
			}
			if err != nil || before.Verdict != Partial || content(t, path+".damaged") != c.file {
				t.Fatalf("verdict %s: %v", before.Verdict, err)
			}
			for range 3 { // a change does not forget what is lost
				k, err := OpenKeeper(cards, path)
				if err != nil {
					t.Fatal(err)
				}
				var lost []int
				for n, naa := range serials {
					r, ok, err := k.Get(naa)
					switch {
					case errors.Is(err, ErrLost):
						lost = append(lost, n)
						wantError(t, err, path, naa, "state repair --discard cards.json:"+naa)
					case err != nil || ok != (n < 4) || ok && r.Text != textOf(n):
						t.Errorf("unit %d: %+v, %v, %v", n, r, ok, err)
					}
				}
				if !slices.Equal(lost, c.lost) || len(k.Lost()) != len(lost) || len(before.Lost) != len(lost) {
					t.Errorf("lost are %v (%v, found before: %v), want %v", lost, k.Lost(), before.Lost, c.lost)
				}
				if _, err := k.Put(card{unit(7), "new"}, Patience{}); err != nil {
					t.Error(err)
				}
				k.Close()
			}
			if after := ExamineRecords(cards, path, serials); (after.Verdict == Partial) != (len(c.lost) > 0) || (after.Reason != nil) != (len(c.lost) > 0) {
				t.Errorf("afterwards %s: %v", after.Verdict, after.Reason)
			}
			k, err := OpenKeeper(cards, path)
			if err != nil {
				t.Fatal(err)
			}
			defer k.Close()
			for _, n := range c.lost {
				if err := k.Accept(serials[n]); err != nil {
					t.Error(err)
				}
				if _, ok, err := k.Get(serials[n]); ok || err != nil {
					t.Errorf("unit %d afterwards: %v, %v", n, ok, err)
				}
			}
			if err := k.Accept(serials[0]); err == nil {
				t.Error("a record that is not lost is accepted")
			}
			if b := content(t, path); strings.Contains(b, "lost") || !bytes.Contains([]byte(b), []byte(unit(7))) {
				t.Errorf("afterwards\n%s", b)
			}
		})
	}
}

// A file that a target uses is not salvaged.
func TestSalvageOfAFileInUse(t *testing.T) {
	path := filepath.Join(t.TempDir(), "cards.json")
	k, err := OpenKeeper(cards, path)
	if err != nil {
		t.Fatal(err)
	}
	defer k.Close()
	if _, err := k.Put(card{unit(1), "a"}, Patience{}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Truncate(path, 50), os.Remove(path+".spare")); err != nil {
		t.Fatal(err)
	}
	_, err = Salvage(cards, path, nil)
	wantError(t, err, "in use")
	if len(content(t, path)) != 50 {
		t.Error("the file was changed")
	}
}
