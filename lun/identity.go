package lun

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// Identity is what names a logical unit for ever: an initiator that finds it
// again, by whatever path, takes the disk for the same.
type Identity struct {
	NAA    [8]byte // NAA 3h, locally assigned (SPC-4, section 7.8.6.6)
	Serial string  // the 16 hexadecimal digits of NAA
}

// identityVersion is the version of the state file.
const identityVersion = 1

// identityFile is the state file: serial numbers by key, and those that are no
// longer anybody's, which are never given again.
type identityFile struct {
	Version int               `json:"version"`
	Units   map[string]string `json:"units"`
	Retired []string          `json:"retired"`
}

// Identities gives every logical unit an identity that it keeps, and keeps
// count of them in a state file.
type Identities struct {
	path string   // empty: nothing is kept
	lock *os.File // on path + ".lock": one process at a time

	mu    sync.Mutex
	state identityFile
}

// Ephemeral is identities that last as long as the process.
func Ephemeral() *Identities {
	return &Identities{state: identityFile{Version: identityVersion, Units: map[string]string{}}}
}

// OpenIdentities reads the state file at path; if there is none it is made with
// the first identity. A file that makes no sense is an error and is left as it
// is.
func OpenIdentities(path string) (*Identities, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		if err == unix.EWOULDBLOCK {
			return nil, fmt.Errorf("%s is in use by another process: give each target a state_dir of its own", path)
		}
		return nil, fmt.Errorf("locking %s: %w", lock.Name(), err)
	}
	ids := Ephemeral()
	ids.path, ids.lock = path, lock
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return ids, nil
	}
	if err == nil {
		ids.state, err = decodeIdentities(b)
	}
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("%s: %w; restore it from a backup, or move it away to give all LUNs new identities", path, err)
	}
	return ids, nil
}

// decodeIdentities reads a state file and checks all of it.
func decodeIdentities(b []byte) (s identityFile, err error) {
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("not a list of identities: %w", err)
	}
	if s.Version != identityVersion {
		return s, fmt.Errorf("version %d, only %d is known", s.Version, identityVersion)
	}
	if s.Units == nil {
		s.Units = map[string]string{}
	}
	seen := map[string]bool{}
	check := func(serial string) error {
		if _, err := parseSerial(serial); err != nil {
			return err
		}
		if seen[serial] {
			return fmt.Errorf("identity %s occurs twice", serial)
		}
		seen[serial] = true
		return nil
	}
	for key, serial := range s.Units {
		if err := check(serial); err != nil {
			return s, fmt.Errorf("unit %q: %w", key, err)
		}
	}
	for _, serial := range s.Retired {
		if err := check(serial); err != nil {
			return s, fmt.Errorf("retired: %w", err)
		}
	}
	return s, nil
}

func parseSerial(serial string) (id Identity, err error) {
	b, err := hex.DecodeString(serial)
	if err != nil || len(b) != len(id.NAA) || b[0]>>4 != 3 || hex.EncodeToString(b) != serial {
		return id, fmt.Errorf("%q is not an identity: want 16 hexadecimal digits, the first of them 3", serial)
	}
	return Identity{[8]byte(b), serial}, nil
}

// Get returns the identity of key, the same for ever. A new one is on stable
// storage before it is returned.
func (ids *Identities) Get(key string) (Identity, error) {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	if serial, ok := ids.state.Units[key]; ok {
		return parseSerial(serial)
	}
	return ids.assign(key)
}

// Renew gives key a new identity, because its medium has been made anew. The
// one that it had is retired.
func (ids *Identities) Renew(key string) (Identity, error) {
	ids.mu.Lock()
	defer ids.mu.Unlock()
	return ids.assign(key)
}

// assign draws a new identity for key and stores it.
//
// Preconditions: mu is held.
func (ids *Identities) assign(key string) (Identity, error) {
	id := ids.draw()
	old, had := ids.state.Units[key]
	ids.state.Units[key] = id.Serial
	if had {
		ids.state.Retired = append(ids.state.Retired, old)
	}
	err := ids.store()
	if err == nil {
		return id, nil
	}
	if delete(ids.state.Units, key); had {
		ids.state.Units[key] = old
		ids.state.Retired = ids.state.Retired[:len(ids.state.Retired)-1]
	}
	return Identity{}, fmt.Errorf("storing the identity of %q: %w", key, err)
}

// draw returns an identity that never was anybody's.
func (ids *Identities) draw() Identity {
	for {
		var id Identity
		rand.Read(id.NAA[:])
		id.NAA[0] = 0x30 | id.NAA[0]&0x0f
		id.Serial = hex.EncodeToString(id.NAA[:])
		if !ids.taken(id.Serial) {
			return id
		}
	}
}

func (ids *Identities) taken(serial string) bool {
	for _, s := range ids.state.Units {
		if s == serial {
			return true
		}
	}
	for _, s := range ids.state.Retired {
		if s == serial {
			return true
		}
	}
	return false
}

// store replaces the state file, so that after a crash there is the old one or
// the new one.
func (ids *Identities) store() (err error) {
	if ids.path == "" {
		return nil
	}
	b, err := json.MarshalIndent(&ids.state, "", "  ")
	if err != nil {
		return err
	}
	dir := filepath.Dir(ids.path)
	f, err := os.CreateTemp(dir, filepath.Base(ids.path)+".*.tmp") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // which fails once it has its name
	_, err = f.Write(append(b, '\n'))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), ids.path); err != nil {
		return err
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Close lets another process use the state file.
func (ids *Identities) Close() error {
	if ids.lock == nil {
		return nil
	}
	return ids.lock.Close()
}
