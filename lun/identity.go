package lun

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"unicode/utf8"
)

const (
	naaLocal = 0x3 // NAA 3h: locally assigned (SPC-4, NAA Locally Assigned designator format)

	identitiesVersion = 1
	maxIdentitiesFile = 16 << 20 // octets: some hundred thousand identities
	maxIdentityKey    = 8 << 10  // octets: an iSCSI name and the longest path have room

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
// What it hands out is on stable storage already. The file is only ever
// replaced as a whole: new content goes to path.tmp, is synced and renamed, and
// the directory is synced.
type Identities struct {
	path   string // empty: nothing is kept
	lock   *os.File
	random io.Reader
	fsync  func(*os.File) error // tests let it fail

	mu     sync.Mutex
	closed bool
	state  identityState
	// unsure: a replacement of the file failed in or after its rename. The file
	// has state or what should have followed it, and a power failure may decide
	// which; nothing is handed out before state is stored again.
	unsure bool
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
}

// Ephemeral makes Identities that last as long as the process.
func Ephemeral() *Identities {
	return &Identities{
		random: rand.Reader,
		fsync:  (*os.File).Sync,
		state:  identityState{identitiesVersion, []identityEntry{}, []identityEntry{}},
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
func OpenIdentities(path string) (_ *Identities, err error) {
	ids := Ephemeral()
	ids.path = path
	if path == "" {
		return nil, errors.New("identities: the path of the file is empty")
	}
	if err := makeDirectory(filepath.Dir(path), ids.fsync); err != nil {
		return nil, ids.wrap(err)
	}
	if ids.lock, err = lockFile(path + ".lock"); err != nil {
		return nil, ids.wrap(err)
	}
	if err := ids.load(); err != nil {
		ids.lock.Close()
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
	if ids.lock == nil {
		return nil
	}
	// The lock file stays: if it were removed, one process could lock it while
	// another makes and locks its successor.
	if err := ids.lock.Close(); err != nil {
		return ids.wrap(err)
	}
	return nil
}

// Get returns the permanent identity for the key, and makes it on first use.
// The key is UTF-8 text of 1 to 8192 octets.
func (ids *Identities) Get(key string) (Identity, error) {
	return ids.identity(key, false)
}

// Renew gives the key, whose medium has been created afresh, a new identity.
// The one it had is retired and will not name anything again. If Renew fails,
// the key still has the old one.
func (ids *Identities) Renew(key string) (Identity, error) {
	return ids.identity(key, true)
}

func (ids *Identities) identity(key string, renew bool) (Identity, error) {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	id, err := ids.identityLocked(key, renew)
	if err != nil {
		return Identity{}, ids.wrap(err)
	}
	return id, nil
}

// Preconditions: mu is held.
func (ids *Identities) identityLocked(key string, renew bool) (id Identity, err error) {
	if ids.closed {
		return id, fs.ErrClosed
	}
	if err := checkIdentityKey(key); err != nil {
		return id, err
	}

	next := ids.state
	i := slices.IndexFunc(next.Identities, func(e identityEntry) bool { return e.Key == key })
	if i >= 0 && !renew {
		if ids.unsure {
			if err := ids.store(ids.state); err != nil {
				return id, err
			}
		}
		return parseIdentity(next.Identities[i].NAA)
	}

	if id, err = ids.unused(); err != nil {
		return id, err
	}
	e := identityEntry{key, id.Serial}
	if i < 0 {
		next.Identities = append(slices.Clone(next.Identities), e)
	} else {
		next.Retired = append(slices.Clone(next.Retired), next.Identities[i])
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
	st, err := os.Lstat(ids.path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		// A link too: the rename would replace it, not the file it points to.
		return fmt.Errorf("is no regular file (%s)", st.Mode().Type())
	}
	f, err := os.OpenFile(ids.path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxIdentitiesFile+1))
	if err != nil {
		return err
	}
	if ids.state, err = decodeIdentities(b); err != nil {
		return err
	}
	// The process that wrote this may have been killed before its last sync.
	if err := ids.fsync(f); err != nil {
		return err
	}
	return syncDirectory(filepath.Dir(ids.path), ids.fsync)
}

// store replaces the file.
//
// Preconditions: mu is held.
func (ids *Identities) store(s identityState) error {
	if ids.path == "" {
		return nil
	}
	b, err := s.encode()
	if err != nil {
		return err
	}
	tmp := ids.path + ".tmp"
	// One may be left from a process that was killed, with any owner and mode.
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := ids.write(tmp, b); err != nil {
		os.Remove(tmp)
		return err
	}
	ids.unsure = true
	if err := os.Rename(tmp, ids.path); err != nil {
		os.Remove(tmp)
		return err
	}
	if err := syncDirectory(filepath.Dir(ids.path), ids.fsync); err != nil {
		return err
	}
	ids.unsure = false
	return nil
}

// write makes a file with mode 0600 and content b, and syncs it.
func (ids *Identities) write(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if _, err = f.Write(b); err == nil {
		err = ids.fsync(f)
	}
	return errors.Join(err, f.Close())
}

func (ids *Identities) wrap(err error) error {
	if ids.path == "" {
		return fmt.Errorf("ephemeral identities: %w", err)
	}
	return fmt.Errorf("identities %s: %w", ids.path, err)
}

// encode is the content of the file. What decodeIdentities would refuse for
// its length is an error.
func (s identityState) encode() ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	if err := e.Encode(s); err != nil {
		return nil, err
	}
	if b.Len() > maxIdentitiesFile {
		return nil, fmt.Errorf("the file would have %d octets, more than the limit of %d", b.Len(), maxIdentitiesFile)
	}
	return b.Bytes(), nil
}

// decodeIdentities is the reverse of encode. White space is free, and so is how
// a string is escaped. All else is an error: members that are unknown, missing,
// repeated or in another order, keys and NAAs that are bad or there twice.
func decodeIdentities(b []byte) (s identityState, err error) {
	fail := func(format string, a ...any) (identityState, error) {
		return identityState{}, fmt.Errorf(format, a...)
	}
	switch {
	case len(b) == 0:
		return fail("is empty")
	case len(b) > maxIdentitiesFile:
		return fail("is longer than the limit of %d octets", maxIdentitiesFile)
	case !utf8.Valid(b):
		return fail("is not valid UTF-8")
	}
	// The version first: it decides what else may be there.
	var v struct{ Version *int }
	if err := json.Unmarshal(b, &v); err != nil {
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok {
			return fail("is damaged at octet %d of %d: %w", syntax.Offset, len(b), err)
		}
		return fail("is damaged: %w", err)
	}
	switch {
	case v.Version == nil:
		return fail("has no version")
	case *v.Version != identitiesVersion:
		return fail("has version %d, but this program knows version %d only", *v.Version, identitiesVersion)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return fail("is damaged: %w", err)
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

// sameTokens checks that b says s and nothing else. Package json is lenient:
// of a member that is repeated it takes the last, it overlooks case, and null is as
// good as a value.
func sameTokens(b []byte, s identityState) error {
	canonical, err := json.Marshal(s)
	if err != nil {
		return err
	}
	got, want := json.NewDecoder(bytes.NewReader(b)), json.NewDecoder(bytes.NewReader(canonical))
	for {
		w, err := want.Token()
		if err == io.EOF {
			return nil // b is one JSON value: it has ended as well
		}
		if err != nil {
			return err
		}
		g, err := got.Token()
		if err != nil {
			return err
		}
		if g != w {
			return fmt.Errorf("%v before octet %d, where %v belongs", g, got.InputOffset(), w)
		}
	}
}

// lockFile makes the file if it is absent and locks it until it is closed.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err != syscall.EINTR {
			break
		}
	}
	switch err {
	case nil:
		return f, nil
	case syscall.EWOULDBLOCK:
		err = fmt.Errorf("in use: %s is locked by another target; stop that one, or give this one a directory of its own", path)
	default:
		err = fmt.Errorf("lock %s: %w", path, err)
	}
	f.Close()
	return nil, err
}

// makeDirectory makes dir and those above it that are absent, with mode 0700,
// so that they survive a power failure. It leaves to others to notice that
// something else has the name.
func makeDirectory(dir string, fsync func(*os.File) error) error {
	err := os.Mkdir(dir, 0o700)
	if errors.Is(err, fs.ErrNotExist) && filepath.Dir(dir) != dir {
		if err := makeDirectory(filepath.Dir(dir), fsync); err != nil {
			return err
		}
		err = os.Mkdir(dir, 0o700)
	}
	switch {
	case err == nil:
		return syncDirectory(filepath.Dir(dir), fsync)
	case errors.Is(err, fs.ErrExist):
		return nil
	}
	return err
}

func syncDirectory(dir string, fsync func(*os.File) error) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(fsync(f), f.Close())
}
