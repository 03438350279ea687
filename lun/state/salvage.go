package state

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"
)

// When a file and its spare copy are both damaged, most of their records are not. Encode writes each on lines of its
// own, so what is left of one has no effect on the next, and a record that is damaged in the file can be good in the
// spare copy. What is in neither is a Loss: its unit gets an error until somebody accepts the loss, and the
// records of all others count.

// A Loss is the record of a unit that is damaged in the file and in its spare copy.
type Loss struct {
	NAA    string `json:"naa"`    // Identity.Serial
	Reason string `json:"reason"` // why it cannot be read
}

// ErrLost is in errors about a unit whose record is lost.
var ErrLost = errors.New("its record is damaged")

// errNoRecords is in errors about a file of which nothing can be read.
var errNoRecords = errors.New("no record can be read")

// A torn file is what can be read of a damaged one.
type torn[R Record] struct {
	good     []R
	bad      [][]byte // records that cannot be read
	lost     []Loss   // of an earlier salvage
	complete bool     // its list has a beginning and an end, and nothing but records in between
}

// listBegins is the line with which a list begins, which may be empty.
var listBegins = regexp.MustCompile(`^  "([a-z]+)": \[(\],?)?$`)

// partsOf returns what is left of the entries of each list in b. complete means that b has lists, and nothing but entries
// in them. ok is false if b does not begin like a file of that version whose first list has that name.
func partsOf(version int, first string, b []byte) (parts map[string][][]byte, complete, ok bool) {
	head := fmt.Sprintf("{\n  \"version\": %d,\n", version)
	if !bytes.HasPrefix(b, fmt.Appendf(nil, "%s  %q: [", head, first)) {
		return nil, false, false
	}
	parts, complete = map[string][][]byte{}, true
	var part []byte // of the entry that has begun
	list, inside, ended := "", false, false
	end := func() {
		if inside {
			parts[list] = append(parts[list], part)
		}
		inside, part = false, nil
	}
	for line := range bytes.Lines(b[len(head):]) {
		text := strings.TrimSuffix(string(line), "\n")
		begins := listBegins.FindStringSubmatch(text)
		switch closes := list != "" && (text == "  ]," || text == "  ]"); {
		case begins != nil, closes:
			complete = complete && !inside && closes == (list != "") // else the end of an entry or a list is gone
			end()
			if list = ""; begins != nil && begins[2] == "" {
				list = begins[1]
			}
		case list != "" && text == "    {":
			end()
			inside, part = true, []byte("{\n")
		case inside && (text == "    }," || text == "    }"):
			part = append(part, '}')
			end()
		case inside:
			part = append(part, line...)
		case list == "" && text == "}":
			ended = true
		default:
			complete = false
		}
	}
	end()
	return parts, complete && ended && list == "", true
}

// tear reads what is left in b. ok is false if b does not begin like a file of that version.
func tear[R Record](version int, b []byte) (t torn[R], ok bool) {
	parts, complete, ok := partsOf(version, "units", b)
	t.complete = complete
	for _, part := range parts["units"] {
		if r, err := readRecord[R](part); err == nil {
			t.good = append(t.good, r)
			continue
		}
		t.bad = append(t.bad, part)
		t.complete = t.complete && soleRecord(part)
	}
	for _, part := range parts["lost"] {
		var l Loss
		if decodeMembers(part, &l) == nil {
			t.lost = append(t.lost, l)
		} else {
			t.bad, t.complete = append(t.bad, part), false
		}
	}
	return t, ok
}

// betweenRecords is how many bytes are between two records. Damage that is shorter cannot make one of them.
const betweenRecords = len("\n    },\n    {\n")

// soleRecord reports whether part, which cannot be read, is what is left of one record, and not of several.
func soleRecord(part []byte) bool {
	run := 0
	for _, c := range part {
		if run++; c >= ' ' || c == '\n' {
			run = 0
		}
		if run >= betweenRecords {
			return false
		}
	}
	for i, line := range bytes.Split(bytes.TrimSuffix(part, []byte("}")), []byte("\n")) {
		if i > 0 && len(line) > 0 && !bytes.HasPrefix(line, []byte("      ")) {
			return false
		}
	}
	return true
}

// readRecord returns the record with that text.
func readRecord[R Record](b []byte) (r R, err error) {
	if !utf8.Valid(b) {
		return r, errors.New("is not valid UTF-8")
	}
	if err := decodeMembers(b, &r); err != nil {
		return r, err
	}
	if _, err := parseIdentity(r.Unit()); err != nil {
		return r, err
	}
	if err := r.Check(); err != nil {
		return r, err
	}
	return r, sameTokens(b, r)
}

var naaMember = regexp.MustCompile(`"naa": "([0-9a-f]{16})"`)

// likely is how many of the 16 digits of a NAA must be left to recognize it. That others have so many in common with
// it by chance is as good as impossible.
const likely = 12

// unitOf returns the unit whose record part was, or an empty string: the one of the candidates most of whose digits it
// has, or else the one that it names.
func unitOf(part []byte, candidates []string) string {
	found, best, twice := "", likely-1, false
	for _, naa := range candidates {
		n := 0
		for at := 0; at+len(naa) <= len(part); at++ {
			same := 0
			for i := range len(naa) {
				if part[at+i] == naa[i] {
					same++
				}
			}
			n = max(n, same)
		}
		switch {
		case n > best:
			found, best, twice = naa, n, false
		case n == best && n >= likely:
			twice = true
		}
	}
	if twice {
		return ""
	}
	if m := naaMember.FindSubmatch(part); found == "" && m != nil {
		if id, err := parseIdentity(string(m[1])); err == nil {
			return id.Serial
		}
	}
	return found
}

// merge returns the records of a damaged file and its spare copy. known are the units that may have one.
func merge[R Record](format *Format[Records[R]], copies [][]byte, known []string) (s Records[R], err error) {
	s = Records[R]{Version: format.Version, Units: []R{}}
	var list []torn[R]
	for _, b := range copies {
		if version, err := versionOf(b); err == nil && version != format.Version {
			return s, fmt.Errorf("%w %d, but this program knows only version %d", errVersion, version, format.Version)
		}
		if t, ok := tear[R](format.Version, b); ok {
			list = append(list, t)
		}
	}
	if len(list) == 0 {
		return s, errNoRecords
	}
	has := map[string]bool{}
	records := 0 // of a complete copy; 0: none is complete
	for _, t := range list {
		seen := map[string]int{}
		for _, r := range t.good {
			seen[r.Unit()]++
		}
		for _, r := range t.good {
			if naa := r.Unit(); !has[naa] && seen[naa] == 1 {
				s.Units = append(s.Units, r)
				has[naa] = true
			}
		}
		if t.complete {
			records = max(records, len(t.good)+len(t.bad))
		}
	}
	lost := map[string]string{}
	for _, t := range list {
		for _, l := range t.lost {
			if _, err := parseIdentity(l.NAA); err == nil && !has[l.NAA] {
				lost[l.NAA] = l.Reason
			}
		}
	}
	var candidates []string
	for _, naa := range known {
		if _, is := lost[naa]; !is && !has[naa] {
			candidates = append(candidates, naa)
		}
	}
	named := 0
	for _, t := range list {
		for _, part := range t.bad {
			naa := unitOf(part, candidates)
			if _, is := lost[naa]; naa == "" || is || has[naa] {
				continue
			}
			_, err := readRecord[R](part)
			if err == nil {
				err = errors.New("is there twice")
			}
			lost[naa] = err.Error()
			named++
		}
	}
	if records == 0 || len(s.Units)+named < records {
		for _, naa := range candidates {
			if _, is := lost[naa]; !is {
				lost[naa] = "a damaged record that names no unit may be its record"
			}
		}
	}
	for naa, reason := range lost {
		s.Lost = append(s.Lost, Loss{naa, strings.ToValidUTF8(reason, "?")})
	}
	slices.SortFunc(s.Lost, func(a, b Loss) int { return strings.Compare(a.NAA, b.NAA) })
	return s, s.Check()
}

// Salvage makes a file that OpenKeeper can open of a damaged one and its damaged spare copy. known are the serials
// of the units that may have a record. The damaged files are kept as path.damaged and path.spare.damaged. It fails if
// no record can be read, if the file is not damaged, and if a target uses it, and changes nothing then.
func Salvage[R Record](format Format[Records[R]], path string, known []string) (lost []Loss, err error) {
	s, err := salvage(format, path, func(copies [][]byte) (Records[R], error) { return merge(&format, copies, known) })
	return s.Lost, err
}

// salvage replaces a damaged file by what merge makes of it and its spare copy, and keeps both.
func salvage[S State](format Format[S], path string, merge func([][]byte) (S, error)) (s S, err error) {
	f := file{fsync: (*os.File).Sync}
	if err := f.open(path); err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, f.unlock()) }()
	if c := format.Examine(path); c.Verdict != Damaged {
		return s, fmt.Errorf("%s is not damaged, or its spare copy is not", path)
	}
	paths := []string{path, f.spare()}
	var copies [][]byte
	for _, p := range paths {
		b, err := f.read(p)
		if err != nil {
			return s, err
		}
		copies = append(copies, b)
	}
	if s, err = merge(copies); err != nil {
		return s, fmt.Errorf("%s: %w", path, err)
	}
	b, err := Encode(s)
	if err != nil {
		return s, err
	}
	for i, p := range paths {
		if copies[i] == nil {
			continue
		}
		if err := os.Remove(p + ".damaged"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return s, err
		}
		if err := f.write(p+".damaged", copies[i]); err != nil {
			return s, err
		}
	}
	return s, f.replace(b)
}

// ExamineRecords does what Examine does, for a file of OpenKeeper. Its verdict is Partial if only some records are
// damaged. known is that of Salvage.
func ExamineRecords[R Record](format Format[Records[R]], path string, known []string) Condition {
	c := format.Examine(path)
	d := newDocument(format, Records[R]{})
	d.file.path, d.file.fsync = path, func(*os.File) error { return nil }
	switch c.Verdict {
	case Damaged:
		var copies [][]byte
		for _, p := range []string{path, d.file.spare()} {
			b, err := d.file.read(p)
			if err != nil {
				return c
			}
			copies = append(copies, b)
		}
		s, err := merge(&format, copies, known)
		if err != nil {
			return c
		}
		c.Verdict, c.Lost = Partial, s.Lost
	case Good:
		s, _, err := d.find()
		if err != nil || len(s.Lost) == 0 {
			return c
		}
		c.Verdict, c.Lost = Partial, s.Lost
		c.Reason = d.wrap(fmt.Errorf("records that were damaged: %d", len(s.Lost)))
	}
	return c
}

// Lost returns the records of the file that are damaged.
func (k *Keeper[R]) Lost() []Loss {
	lost := k.doc.State().Lost
	for _, d := range k.all() {
		lost = append(lost, d.State().Lost...)
	}
	return lost
}

// Accept forgets that the record of a unit is damaged: the unit has none from then on. It fails with fs.ErrNotExist if
// it is not.
func (k *Keeper[R]) Accept(unit string) error {
	_, err := k.change(unit, Patience{}, k.home != nil, func(s Records[R]) (Records[R], bool, error) {
		i := slices.IndexFunc(s.Lost, func(l Loss) bool { return l.NAA == unit })
		if i < 0 {
			return s, false, fmt.Errorf("no damaged record of NAA %s: %w", unit, fs.ErrNotExist)
		}
		s.Lost = slices.Delete(slices.Clone(s.Lost), i, i+1)
		return s, true, nil
	})
	return err
}
