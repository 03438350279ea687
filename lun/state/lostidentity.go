package state

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"unicode/utf8"
)

// A lostIdentity is an entry that is damaged in the file and in its spare copy. A key without an identity that it may
// have been of gets none, until somebody decides.
type lostIdentity struct {
	Text   string `json:"text"` // what is left of the entry; empty: nothing
	Reason string `json:"reason"`
}

// maxLostText is the longest text that is kept of an entry, in bytes.
const maxLostText = 2 * maxIdentityKey

// unreadable takes the place of a byte that a text cannot have.
const unreadable = "\x7f"

// mayBe reports whether l may be what is left of the entry of the key.
func (l *lostIdentity) mayBe(key string) bool {
	_, left, found := strings.Cut(l.Text, `"key": `)
	if !found {
		return true
	}
	left, _, whole := strings.Cut(left, ",\n")
	var other string
	if !whole || strings.Contains(left, unreadable) || json.Unmarshal([]byte(left), &other) != nil {
		return true
	}
	if len(other) != len(key) {
		return false
	}
	differ := 0
	for i := range len(key) {
		if other[i] != key[i] {
			differ++
		}
	}
	return differ <= 1
}

// Lost returns an ErrLost if the key has no identity because its entry is, or may be, damaged.
func (ids *Identities) Lost(key string) error {
	s := ids.doc.State()
	if i := s.index(key); i >= 0 && !s.Identities[i].Promised {
		return nil
	}
	for _, l := range s.Lost {
		if l.mayBe(key) {
			return ids.doc.wrap(fmt.Errorf("%s: %w, and so is its spare copy: %s", key, ErrLost, l.Reason))
		}
	}
	return nil
}

// LostAs reports whether the entry that is lost of the key had that NAA, as far as can be seen.
func (ids *Identities) LostAs(key, naa string) bool {
	for _, l := range ids.doc.State().Lost {
		if l.mayBe(key) && unitOf([]byte(l.Text), []string{naa}) == naa {
			return true
		}
	}
	return false
}

// AcceptLost forgets the damaged entries that may be of the key, which gets another identity when it is next used. It fails
// with fs.ErrNotExist without such an entry.
func (ids *Identities) AcceptLost(key string) error {
	return ids.store([]string{key}, func(next identityState) (identityState, bool, error) {
		if !next.resolve(key) {
			return next, false, fmt.Errorf("no damaged entry can be that of %s: %w", key, fs.ErrNotExist)
		}
		return next, true, nil
	})
}

// resolve removes the damaged entries that may be of the key, and reports whether it has.
func (s *identityState) resolve(key string) bool {
	was := len(s.Lost)
	s.Lost = slices.DeleteFunc(slices.Clone(s.Lost), func(l lostIdentity) bool { return l.mayBe(key) })
	return len(s.Lost) < was
}

// readEntry returns the entry with that text.
func readEntry(b []byte) (e identityEntry, err error) {
	if !utf8.Valid(b) {
		return e, errors.New("is not valid UTF-8")
	}
	if err := decodeMembers(b, &e); err != nil {
		return e, err
	}
	if _, err := parseIdentity(e.NAA); err != nil {
		return e, err
	}
	if err := checkIdentityKey(e.Key); err != nil {
		return e, err
	}
	return e, sameTokens(b, e)
}

// mergeIdentities returns the identities of a damaged file and its spare copy.
func mergeIdentities(copies [][]byte) (identityState, error) {
	s := noIdentities()
	keys, naas := map[string]bool{}, map[string]bool{}
	type bad struct {
		text   string
		reason error
	}
	var unread []bad
	var retired []identityEntry
	entries, found := 0, false // of a complete copy
	for _, b := range copies {
		if version, err := versionOf(b); err == nil && version != identitiesVersion {
			return s, fmt.Errorf("%w %d, but this program knows only version %d", errVersion, version, identitiesVersion)
		}
		parts, complete, ok := partsOf(identitiesVersion, "identities", b)
		if !ok {
			continue
		}
		found = true
		var good []identityEntry
		times := map[string]int{}
		for _, part := range parts["identities"] {
			e, err := readEntry(part)
			if err != nil {
				complete = complete && soleRecord(part)
				unread = append(unread, bad{text(part), err})
				continue
			}
			times[e.Key]++
			times[e.NAA]++
			good = append(good, e)
		}
		for _, e := range good {
			if times[e.Key] > 1 || times[e.NAA] > 1 {
				unread = append(unread, bad{"", errors.New("is there twice")})
			} else if !keys[e.Key] && !naas[e.NAA] {
				keys[e.Key], naas[e.NAA] = true, true
				s.Identities = append(s.Identities, e)
			}
		}
		if complete {
			entries = max(entries, len(parts["identities"]))
		}
		for _, part := range parts["retired"] {
			if e, err := readEntry(part); err == nil { // one that is lost comes back by a chance of 1 in 2^60
				retired = append(retired, e)
			}
		}
		for _, part := range parts["lost"] {
			var l lostIdentity
			if decodeMembers(part, &l) != nil {
				l = lostIdentity{Reason: "a damaged entry of before"}
			}
			s.Lost = append(s.Lost, l)
		}
	}
	if !found {
		return s, errNoRecords
	}
	for _, e := range retired {
		if !naas[e.NAA] {
			naas[e.NAA] = true
			s.Retired = append(s.Retired, e)
		}
	}
	if entries == 0 || len(s.Identities) < entries {
		before := len(s.Lost)
		for _, u := range unread {
			if !slices.ContainsFunc(s.Identities, func(e identityEntry) bool { return u.text != "" && strings.Contains(u.text, e.NAA) }) {
				s.Lost = append(s.Lost, lostIdentity{u.text, strings.ToValidUTF8(u.reason.Error(), "?")})
			}
		}
		if entries == 0 || len(s.Lost) == before {
			s.Lost = append(s.Lost, lostIdentity{Reason: "nothing is left of an entry"})
		}
	}
	s.Lost = slices.CompactFunc(s.Lost, func(a, b lostIdentity) bool { return a == b })
	return s, s.Check()
}

// text returns what is left of an entry as text that JSON can have. Each byte keeps its place.
func text(part []byte) string {
	var b []byte
	for part = part[:min(len(part), maxLostText)]; len(part) > 0; {
		r, n := utf8.DecodeRune(part)
		if r == utf8.RuneError && n == 1 || r < ' ' && r != '\n' {
			b = append(b, unreadable...)
		} else {
			b = append(b, part[:n]...)
		}
		part = part[n:]
	}
	return string(b)
}

// SalvageIdentities makes a file that OpenIdentities can open of a damaged one and its damaged spare copy: see Salvage.
func SalvageIdentities(path string) error {
	_, err := salvage(identitiesFormat, path, mergeIdentities)
	return err
}

// examineIdentities does what ExamineRecords does, for the file of OpenIdentities.
func examineIdentities(path string) Condition {
	c := identitiesFormat.Examine(path)
	d := newDocument(identitiesFormat, noIdentities())
	d.file.path, d.file.fsync = path, func(*os.File) error { return nil }
	var s identityState
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
		var err error
		if s, err = mergeIdentities(copies); err != nil {
			return c
		}
	case Good:
		s, _, _ = d.find()
		if len(s.Lost) == 0 {
			return c
		}
		c.Reason = d.wrap(fmt.Errorf("entries that were damaged: %d", len(s.Lost)))
	default:
		return c
	}
	c.Verdict = Partial
	for _, l := range s.Lost {
		c.Lost = append(c.Lost, Loss{Reason: l.Reason})
		c.Left = append(c.Left, l.Text)
	}
	return c
}
