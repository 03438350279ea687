package state

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
	"unicode/utf8"
)

const (
	naaLocal = 0x3 // NAA 3h: locally assigned (SPC-4, NAA Locally Assigned designator format)

	identitiesVersion = 1
	maxIdentityKey    = 8 << 10 // bytes: an iSCSI name and the longest path have room

	// maxRetired is how many retired identities are kept, the latest. Older ones come back by a chance of 1
	// in 2^60 only, and all of them would fill the file in the end.
	maxRetired = 1024

	// Of 60 random bits the first try is as good as certain: only a random
	// source that repeats itself needs all of them.
	identityTries = 100
)

// An Identity is the permanent name of a logical unit.
type Identity struct {
	NAA    [8]byte // NAA 3h, then 60 random bits
	Serial string  // the 16 lower-case hex digits of NAA
}

// parseIdentity returns the Identity with that serial.
func parseIdentity(serial string) (id Identity, err error) {
	b, err := hex.DecodeString(serial)
	if err != nil || len(b) != len(id.NAA) || b[0]>>4 != naaLocal || hex.EncodeToString(b) != serial {
		return id, fmt.Errorf("naa %.40q: want the digit 3 and 15 more lower-case hex digits", serial)
	}
	return Identity{[8]byte(b), serial}, nil
}

// Identities remembers the Identity of every logical unit, and those that were retired last. Several
// goroutines may use it at once.
//
// An identity is on stable storage before a method returns it. While the file is
// unsure, the methods first store the state again.
type Identities struct {
	random io.Reader // only the writer of doc uses it
	doc    *Document[identityState]
}

// identityState is the content of the file, with the members in this order. A value
// of it does not change; a new one takes its place.
type identityState struct {
	Version    int             `json:"version"`
	Identities []identityEntry `json:"identities"` // one for each key
	Retired    []identityEntry `json:"retired"`    // oldest first, up to maxRetired; not handed out again
	Lost       []lostIdentity  `json:"lost,omitempty"`
}

type identityEntry struct {
	Key string `json:"key"`
	NAA string `json:"naa"` // Identity.Serial
	// Promised marks a key whose medium has never existed.
	Promised bool `json:"promised,omitempty"`
}

var identitiesFormat = Format[identityState]{Name: "identities", Version: identitiesVersion}

func noIdentities() identityState {
	return identityState{Version: identitiesVersion, Identities: []identityEntry{}, Retired: []identityEntry{}}
}

// Ephemeral returns Identities that last as long as the process.
func Ephemeral() *Identities {
	return &Identities{random: rand.Reader, doc: newDocument(identitiesFormat, noIdentities())}
}

// OpenIdentities opens the Identities in the file at path, as Open does. The file is
// created with the first identity. A damaged file is an error because new
// identities would make all initiators take known logical units for others.
func OpenIdentities(path string) (*Identities, error) {
	doc, err := Open(identitiesFormat, path, noIdentities())
	if err != nil {
		return nil, err
	}
	return &Identities{random: rand.Reader, doc: doc}, nil
}

// Close releases the file for others. Get and Renew fail from then on.
func (ids *Identities) Close() error { return ids.doc.Close() }

// Restored does what Document.Restored does.
func (ids *Identities) Restored() error { return ids.doc.Restored() }

// Fresh does what Document.Fresh does.
func (ids *Identities) Fresh() bool { return ids.doc.Fresh() }

// SetLimit does what Document.SetLimit does.
func (ids *Identities) SetLimit(limit func() time.Duration, late func()) {
	ids.doc.SetLimit(limit, late)
}

// SetSync does what Keeper.SetSync does.
func (ids *Identities) SetSync(f func(*os.File) error) { ids.doc.SetSync(f) }

// Get returns the permanent identity of the key, whose medium exists, and creates it on
// first use. The key is UTF-8 text of 1 to 8192 bytes.
func (ids *Identities) Get(key string) (Identity, error) { return ids.identity(key, false, false) }

// Promise returns what Get does for a key whose medium may not exist: it does not make
// the key Known.
func (ids *Identities) Promise(key string) (Identity, error) {
	return ids.identity(key, false, true)
}

// Renew gives the key, whose medium was just created again, a new identity. It retires the old
// identity, which never names anything again. If Renew fails, the key keeps the old one.
func (ids *Identities) Renew(key string) (Identity, error) { return ids.identity(key, true, false) }

// Known reports whether the key has an identity that Get, Renew or Make returned: its
// medium existed.
func (ids *Identities) Known(key string) bool {
	s := ids.doc.State()
	i := s.index(key)
	return i >= 0 && !s.Identities[i].Promised
}

// Serials returns the serials of the identities whose medium existed, by key.
func (ids *Identities) Serials() map[string]string {
	serials := map[string]string{}
	for _, e := range ids.doc.State().Identities {
		if !e.Promised {
			serials[e.Key] = e.NAA
		}
	}
	return serials
}

// Has reports whether an identity with that serial exists, or was retired not long ago.
func (ids *Identities) Has(serial string) bool {
	s := ids.doc.State()
	return s.has(serial)
}

func (s *identityState) has(serial string) bool {
	is := func(e identityEntry) bool { return e.NAA == serial }
	return slices.ContainsFunc(s.Identities, is) || slices.ContainsFunc(s.Retired, is)
}

// Adopt gives the key, whose medium comes from another target and must not be Known, the identity with that
// serial. It fails if another key has it.
func (ids *Identities) Adopt(key, serial string) (Identity, error) {
	id, err := parseIdentity(serial)
	if err == nil {
		err = checkIdentityKey(key)
	}
	if err != nil {
		return Identity{}, ids.doc.wrap(err)
	}
	err = ids.store([]string{key}, func(next identityState) (identityState, bool, error) {
		if i := slices.IndexFunc(next.Identities, func(e identityEntry) bool { return e.NAA == serial && e.Key != key }); i >= 0 {
			return next, false, fmt.Errorf("NAA %s is that of %s: two LUNs cannot have it", serial, next.Identities[i].Key)
		}
		e := identityEntry{Key: key, NAA: serial}
		next.resolve(key)
		i := next.index(key)
		switch {
		case i < 0:
			next.Identities = append(slices.Clone(next.Identities), e)
		case next.Identities[i] == e:
			return next, false, nil
		case !next.Identities[i].Promised:
			return next, false, fmt.Errorf("%s has NAA %s already", key, next.Identities[i].NAA)
		default:
			next.retire(i)
			next.Identities = slices.Clone(next.Identities)
			next.Identities[i] = e
		}
		next.Retired = slices.DeleteFunc(slices.Clone(next.Retired), func(e identityEntry) bool { return e.NAA == serial })
		return next, true, nil
	})
	if err != nil {
		return Identity{}, err
	}
	return id, nil
}

// Make gives those of the keys an identity that have none, all with one change of the
// file. After an error it has given none.
func (ids *Identities) Make(keys []string) error {
	made := map[string]Identity{}
	return ids.store(keys, func(next identityState) (identityState, bool, error) {
		known := map[string]bool{}
		for _, e := range next.Identities {
			known[e.Key] = true
		}
		before := len(next.Identities)
		next.Identities = slices.Clone(next.Identities)
		for _, key := range keys {
			if known[key] {
				continue
			}
			known[key] = true
			id, err := ids.unused(&next, made[key])
			if err == nil {
				err = checkIdentityKey(key)
			}
			if err != nil {
				return next, false, err
			}
			made[key] = id
			next.Identities = append(next.Identities, identityEntry{Key: key, NAA: id.Serial})
		}
		return next, len(next.Identities) > before, nil
	})
}

// Forget retires the identity of the key, if it has one, so that the next Get creates
// another. It is for a medium that was removed.
func (ids *Identities) Forget(key string) error {
	return ids.store([]string{key}, func(next identityState) (identityState, bool, error) {
		i := next.index(key)
		if i < 0 {
			return next, false, nil
		}
		next.retire(i)
		next.Identities = slices.Delete(slices.Clone(next.Identities), i, i+1)
		return next, true, nil
	})
}

// store stores what apply makes of the state, in the writer of the document.
func (ids *Identities) store(keys []string, apply func(identityState) (identityState, bool, error)) error {
	_, err := ids.doc.store(&update[identityState]{keys: keys, apply: apply})
	return ids.doc.wrap(err)
}

// index returns where the identity of the key is, or -1.
func (s *identityState) index(key string) int {
	return slices.IndexFunc(s.Identities, func(e identityEntry) bool { return e.Key == key })
}

// retire adds the identity of entry i to those that are never handed out again.
func (s *identityState) retire(i int) {
	kept := s.Retired[max(len(s.Retired)-(maxRetired-1), 0):]
	s.Retired = append(slices.Clone(kept), identityEntry{Key: s.Identities[i].Key, NAA: s.Identities[i].NAA})
}

// identity returns the identity of the key, as Get, Renew and Promise say. It waits for storage only
// if something changes, or the file may have another identity of the key.
func (ids *Identities) identity(key string, renew, promise bool) (Identity, error) {
	if err := checkIdentityKey(key); err != nil {
		return Identity{}, ids.doc.wrap(err)
	}
	if !renew {
		if id, ok := ids.settled(key, promise); ok {
			return id, nil
		}
	}
	var made, id Identity // the writer sets them
	apply := func(next identityState) (_ identityState, changed bool, err error) {
		i := next.index(key)
		if i >= 0 && !renew {
			exists := next.Identities[i].Promised && !promise
			if exists {
				next.Identities = slices.Clone(next.Identities)
				next.Identities[i].Promised = false
			}
			id, err = parseIdentity(next.Identities[i].NAA)
			return next, exists, err
		}
		if made, err = ids.unused(&next, made); err != nil {
			return next, false, err
		}
		id = made
		e := identityEntry{key, id.Serial, promise}
		if i < 0 {
			next.Identities = append(slices.Clone(next.Identities), e)
		} else {
			next.retire(i)
			next.Identities = slices.Clone(next.Identities)
			next.Identities[i] = e
		}
		return next, true, nil
	}
	if _, err := ids.doc.store(&update[identityState]{keys: []string{key}, apply: apply}); err != nil {
		return Identity{}, ids.doc.wrap(fmt.Errorf("store the identity of %s: %w", key, err))
	}
	return id, nil
}

// settled returns the identity of a key that is stored, and as Get, or with promise as Promise, returns it.
func (ids *Identities) settled(key string, promise bool) (id Identity, ok bool) {
	d := ids.doc
	d.mu.Lock()
	defer d.mu.Unlock()
	i := d.state.index(key)
	if d.closed || i < 0 || d.state.Identities[i].Promised && !promise || !d.isSettled(key) {
		return id, false
	}
	id, err := parseIdentity(d.state.Identities[i].NAA)
	return id, err == nil
}

func checkIdentityKey(key string) error {
	switch {
	case key == "":
		return errors.New("the key is empty")
	case len(key) > maxIdentityKey:
		return fmt.Errorf("key %.40q… has %d bytes, more than the limit of %d", key, len(key), maxIdentityKey)
	case !utf8.ValidString(key):
		// JSON would store a replacement character, for other keys too.
		return fmt.Errorf("key %q is not valid UTF-8", key)
	}
	return nil
}

// unused returns an identity that is not in s, for a logical unit that never existed. It returns
// before, if that is set: a change that is made again keeps its identity.
func (ids *Identities) unused(s *identityState, before Identity) (id Identity, err error) {
	if before.Serial != "" {
		return before, nil
	}
	for range identityTries {
		if _, err := io.ReadFull(ids.random, id.NAA[:]); err != nil {
			return id, fmt.Errorf("read random bytes: %w", err)
		}
		id.NAA[0] = naaLocal<<4 | id.NAA[0]&0x0f
		id.Serial = hex.EncodeToString(id.NAA[:])
		if !s.has(id.Serial) {
			return id, nil
		}
	}
	return Identity{}, fmt.Errorf("the random source gave %d identities in a row that are taken", identityTries)
}

// Check refuses keys and NAAs that are bad or there twice.
func (s identityState) Check() error {
	if s.Identities == nil || s.Retired == nil {
		return errors.New("is damaged: want the members identities and retired, both lists")
	}
	keys, naas := map[string]bool{}, map[string]bool{}
	for _, l := range []struct {
		name    string
		entries []identityEntry
		current bool
	}{{"identities", s.Identities, true}, {"retired", s.Retired, false}} {
		for i, e := range l.entries {
			_, err := parseIdentity(e.NAA)
			if err == nil {
				err = checkIdentityKey(e.Key)
			}
			switch {
			case err != nil:
				return fmt.Errorf("%s[%d]: %w", l.name, i, err)
			case naas[e.NAA]:
				return fmt.Errorf("%s[%d]: naa %s is there twice", l.name, i, e.NAA)
			case l.current && keys[e.Key]:
				return fmt.Errorf("%s[%d]: key %q is there twice", l.name, i, e.Key)
			}
			naas[e.NAA] = true
			keys[e.Key] = true
		}
	}
	return nil
}
