package lun

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"sync"
	"unicode/utf8"
)

const (
	naaLocal = 0x3 // NAA 3h: locally assigned (SPC-4, NAA Locally Assigned designator format)

	identitiesVersion = 1
	maxIdentityKey    = 8 << 10 // octets: an iSCSI name and the longest path have room

	// Of 60 random bits the first try is as good as certain: only a random
	// source that repeats itself needs all of them.
	identityTries = 100
)

// An Identity names a logical unit for ever.
type Identity struct {
	NAA    [8]byte // NAA 3h, then 60 random bits
	Serial string  // the 16 lower-case hex digits of NAA
}

// parseIdentity is the Identity with that serial.
func parseIdentity(serial string) (id Identity, err error) {
	b, err := hex.DecodeString(serial)
	if err != nil || len(b) != len(id.NAA) || b[0]>>4 != naaLocal || hex.EncodeToString(b) != serial {
		return id, fmt.Errorf("naa %.40q: want the digit 3 and 15 more lower-case hex digits", serial)
	}
	return Identity{[8]byte(b), serial}, nil
}

// Identities remembers the Identity of every logical unit that there has ever
// been. It may be used by several goroutines at once.
//
// What it hands out is on stable storage already. While the file is unsure
// nothing is handed out before state is stored again.
type Identities struct {
	stateFile // without a path nothing is kept
	random    io.Reader

	mu     sync.Mutex // guards the file and what follows
	closed bool
	state  identityState
}

// identityState is the file: JSON, with the members in this order. A value of
// it is not changed; a new one takes its place.
type identityState struct {
	Version    int             `json:"version"`
	Identities []identityEntry `json:"identities"` // one per key
	Retired    []identityEntry `json:"retired"`    // oldest first; never handed out again
}

type identityEntry struct {
	Key string `json:"key"`
	NAA string `json:"naa"` // Identity.Serial
	// Promised is of a key whose medium has not been there yet.
	Promised bool `json:"promised,omitempty"`
}

// Ephemeral makes Identities that last as long as the process.
func Ephemeral() *Identities {
	return &Identities{
		stateFile: stateFile{fsync: (*os.File).Sync},
		random:    rand.Reader,
		state:     identityState{identitiesVersion, []identityEntry{}, []identityEntry{}},
	}
}

// OpenIdentities opens the Identities that the file at path keeps. An absent
// file is made, with mode 0600, when the first identity is; absent directories
// are made with mode 0700. A file that is not wholly as Identities has written
// it is an error and stays as it is, for to begin anew would make all initiators
// take known logical units for others.
//
// Until Close the file path.lock is locked (flock(2)): whoever else opens the
// same path is refused.
func OpenIdentities(path string) (*Identities, error) {
	ids := Ephemeral()
	if path == "" {
		return nil, errors.New("identities: the path of the file is empty")
	}
	if err := ids.open(path); err != nil {
		return nil, ids.wrap(err)
	}
	if err := ids.load(); err != nil {
		ids.unlock()
		return nil, ids.wrap(err)
	}
	return ids, nil
}

// Close gives the file free for others. Get and Renew fail from then on.
func (ids *Identities) Close() error {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	if ids.closed {
		return nil
	}
	ids.closed = true
	if err := ids.unlock(); err != nil {
		return ids.wrap(err)
	}
	return nil
}

// Get returns the permanent identity for the key, whose medium is there, and makes it on
// first use. The key is UTF-8 text of 1 to 8192 octets.
func (ids *Identities) Get(key string) (Identity, error) {
	return ids.identity(key, false, false)
}

// Promise is Get for a key whose medium may not be there: it does not make the key Known.
func (ids *Identities) Promise(key string) (Identity, error) {
	return ids.identity(key, false, true)
}

// Renew gives the key, whose medium has been created afresh, a new identity.
// The one it had is retired and will not name anything again. If Renew fails,
// the key still has the old one.
func (ids *Identities) Renew(key string) (Identity, error) {
	return ids.identity(key, true, false)
}

// Known tells whether the key has an identity that was not only promised: its medium has
// been there.
func (ids *Identities) Known(key string) bool {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	return slices.ContainsFunc(ids.state.Identities, func(e identityEntry) bool { return e.Key == key && !e.Promised })
}

// Make gives those of the keys an identity that have none, all with one change of the
// file. Get does the rest.
func (ids *Identities) Make(keys []string) error {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	old, known := ids.state, map[string]bool{}
	for _, e := range old.Identities {
		known[e.Key] = true
	}
	next := old
	next.Identities = slices.Clone(next.Identities)
	for _, key := range keys {
		if known[key] {
			continue
		}
		known[key] = true
		id, err := ids.unused()
		if err == nil {
			err = checkIdentityKey(key)
		}
		if err != nil {
			ids.state = old
			return ids.wrap(err)
		}
		next.Identities = append(next.Identities, identityEntry{Key: key, NAA: id.Serial})
		ids.state = next // for unused
	}
	switch {
	case len(next.Identities) == len(old.Identities):
		return nil
	case ids.closed:
		ids.state = old
		return ids.wrap(fs.ErrClosed)
	}
	if err := ids.store(next); err != nil {
		ids.state = old
		return ids.wrap(err)
	}
	return nil
}

// Forget retires the identity of the key, if it has one, so that the next Get makes
// another: the medium is gone and is about to be made afresh.
func (ids *Identities) Forget(key string) error {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	i := slices.IndexFunc(ids.state.Identities, func(e identityEntry) bool { return e.Key == key })
	if i < 0 {
		return nil
	}
	if ids.closed {
		return ids.wrap(fs.ErrClosed)
	}
	next := ids.state
	next.retire(i)
	next.Identities = slices.Delete(slices.Clone(next.Identities), i, i+1)
	if err := ids.store(next); err != nil {
		return ids.wrap(err)
	}
	ids.state = next
	return nil
}

// retire notes that the identity of entry i names nothing any more.
func (s *identityState) retire(i int) {
	s.Retired = append(slices.Clone(s.Retired), identityEntry{Key: s.Identities[i].Key, NAA: s.Identities[i].NAA})
}

func (ids *Identities) identity(key string, renew, promise bool) (Identity, error) {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	id, err := ids.identityLocked(key, renew, promise)
	if err != nil {
		return Identity{}, ids.wrap(err)
	}
	return id, nil
}

// Preconditions: mu is held.
func (ids *Identities) identityLocked(key string, renew, promise bool) (id Identity, err error) {
	if ids.closed {
		return id, fs.ErrClosed
	}
	if err := checkIdentityKey(key); err != nil {
		return id, err
	}

	next := ids.state
	i := slices.IndexFunc(next.Identities, func(e identityEntry) bool { return e.Key == key })
	if i >= 0 && !renew {
		kept := next.Identities[i].Promised && !promise
		if kept {
			next.Identities = slices.Clone(next.Identities)
			next.Identities[i].Promised = false
		}
		if kept || ids.unsure {
			if err := ids.store(next); err != nil {
				return id, err
			}
			ids.state = next
		}
		return parseIdentity(next.Identities[i].NAA)
	}

	if id, err = ids.unused(); err != nil {
		return id, err
	}
	e := identityEntry{key, id.Serial, promise}
	if i < 0 {
		next.Identities = append(slices.Clone(next.Identities), e)
	} else {
		next.retire(i)
		next.Identities = slices.Clone(next.Identities)
		next.Identities[i] = e
	}
	if err := ids.store(next); err != nil {
		return id, fmt.Errorf("store the new identity of %s: %w", key, err)
	}
	ids.state = next
	return id, nil
}

func checkIdentityKey(key string) error {
	switch {
	case key == "":
		return errors.New("the key is empty")
	case len(key) > maxIdentityKey:
		return fmt.Errorf("key %.40q… has %d octets, more than the limit of %d", key, len(key), maxIdentityKey)
	case !utf8.ValidString(key):
		// JSON would store a replacement character, for other keys too.
		return fmt.Errorf("key %q is not valid UTF-8", key)
	}
	return nil
}

// unused makes an identity that no logical unit has or has had.
//
// Preconditions: mu is held.
func (ids *Identities) unused() (id Identity, err error) {
	for range identityTries {
		if _, err := io.ReadFull(ids.random, id.NAA[:]); err != nil {
			return id, fmt.Errorf("read random octets: %w", err)
		}
		id.NAA[0] = naaLocal<<4 | id.NAA[0]&0x0f
		id.Serial = hex.EncodeToString(id.NAA[:])
		taken := func(e identityEntry) bool { return e.NAA == id.Serial }
		if !slices.ContainsFunc(ids.state.Identities, taken) && !slices.ContainsFunc(ids.state.Retired, taken) {
			return id, nil
		}
	}
	return id, fmt.Errorf("the random source gave %d identities in a row that are taken", identityTries)
}

// load reads the file, if there is one.
func (ids *Identities) load() error {
	b, err := ids.read()
	if b == nil || err != nil {
		return err
	}
	ids.state, err = decodeIdentities(b)
	return err
}

// store replaces the file.
//
// Preconditions: mu is held.
func (ids *Identities) store(s identityState) error {
	if ids.path == "" {
		return nil
	}
	b, err := encodeState(s)
	if err != nil {
		return err
	}
	return ids.replace(b)
}

func (ids *Identities) wrap(err error) error {
	if ids.path == "" {
		return fmt.Errorf("ephemeral identities: %w", err)
	}
	return fmt.Errorf("identities %s: %w", ids.path, err)
}

// decodeIdentities is the reverse of encodeState. Beside what decodeState and
// sameTokens refuse, keys and NAAs that are bad or there twice are errors.
func decodeIdentities(b []byte) (s identityState, err error) {
	fail := func(format string, a ...any) (identityState, error) {
		return identityState{}, fmt.Errorf(format, a...)
	}
	if err := decodeState(b, identitiesVersion, &s); err != nil {
		return identityState{}, err
	}
	if s.Identities == nil || s.Retired == nil {
		return fail("is damaged: want the members identities and retired, both lists")
	}
	keys, naas := map[string]bool{}, map[string]bool{}
	for _, l := range []struct {
		name    string
		entries []identityEntry
		current bool
	}{{"identities", s.Identities, true}, {"retired", s.Retired, false}} {
		for i, e := range l.entries {
			if _, err := parseIdentity(e.NAA); err != nil {
				return fail("%s[%d]: %w", l.name, i, err)
			}
			if err := checkIdentityKey(e.Key); err != nil {
				return fail("%s[%d]: %w", l.name, i, err)
			}
			switch {
			case naas[e.NAA]:
				return fail("%s[%d]: naa %s is there twice", l.name, i, e.NAA)
			case l.current && keys[e.Key]:
				return fail("%s[%d]: key %q is there twice", l.name, i, e.Key)
			}
			naas[e.NAA] = true
			keys[e.Key] = true
		}
	}
	if err := sameTokens(b, s); err != nil {
		return fail("is damaged: %w", err)
	}
	return s, nil
}
