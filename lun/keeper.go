package lun

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
)

// A record is what is kept of a logical unit.
type record interface {
	unit() string // its NAA: Identity.Serial
	check() error // finds what a unit could not have got into
}

// A recordKind is what a file of records is about.
type recordKind[R record] struct {
	name    string // in errors
	version int    // of the file
	// upgrade, if not nil, takes a file of version 1: it returns the units, and
	// what is written there.
	upgrade func(b []byte) (units []R, written any, err error)
}

// kept is the file: JSON, with the members in this order. A value of it is not
// changed; a new one takes its place.
type kept[R record] struct {
	Version int `json:"version"`
	Units   []R `json:"units"` // one per unit that has something to keep
}

// A keeper keeps a record for each logical unit that has one, those of all
// units in one file. It may be used by several goroutines at once.
type keeper[R record] struct {
	kind recordKind[R]

	mu     sync.Mutex // guards what follows
	file   stateFile
	closed bool
	state  kept[R]
}

func newKeeper[R record](k recordKind[R]) *keeper[R] {
	return &keeper[R]{kind: k, file: stateFile{fsync: (*os.File).Sync}, state: kept[R]{k.version, []R{}}}
}

// openKeeper opens the file at path, as OpenIdentities does. A file that is not
// wholly as a keeper has written it is an error and stays as it is.
func openKeeper[R record](kind recordKind[R], path string) (*keeper[R], error) {
	if path == "" {
		return nil, fmt.Errorf("%s: the path of the file is empty", kind.name)
	}
	k := newKeeper(kind)
	if err := k.file.open(path); err != nil {
		return nil, k.wrap(err)
	}
	b, err := k.file.read()
	if err == nil && b != nil {
		k.state, err = kind.decode(b)
	}
	if err != nil {
		k.file.unlock()
		return nil, k.wrap(err)
	}
	return k, nil
}

// Close gives the file free for others. Commands that change what is kept fail
// from then on.
func (k *keeper[R]) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return nil
	}
	k.closed = true
	if err := k.file.unlock(); err != nil {
		return k.wrap(err)
	}
	return nil
}

func (k *keeper[R]) wrap(err error) error {
	return fmt.Errorf("%s %s: %w", k.kind.name, k.file.path, err)
}

// get returns the record of the unit with that NAA, if it has one.
func (k *keeper[R]) get(naa string) (r R, ok bool, err error) {
	if _, err := parseIdentity(naa); err != nil {
		return r, false, k.wrap(err) // and could not be saved
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if i := k.index(naa); i >= 0 {
		return k.state.Units[i], true, nil
	}
	return r, false, nil
}

// Preconditions: mu is held.
func (k *keeper[R]) index(naa string) int {
	return slices.IndexFunc(k.state.Units, func(r R) bool { return r.unit() == naa })
}

// put keeps a record, in place of the one that its unit has. When it returns nil
// that is on stable storage; otherwise unsure tells that it may be there all the
// same.
func (k *keeper[R]) put(r R) (unsure bool, err error) { return k.change(r.unit(), r) }

// remove forgets the record of the unit with that NAA, if it has one. It returns
// what put does.
func (k *keeper[R]) remove(naa string) (unsure bool, err error) { return k.change(naa) }

// change makes with, which is at most one, the records of the unit with that NAA.
func (k *keeper[R]) change(naa string, with ...R) (unsure bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	i := k.index(naa)
	switch {
	case i < 0 && len(with) == 0 && !k.file.unsure:
		return false, nil
	case k.closed:
		return false, k.wrap(fs.ErrClosed)
	}
	next := k.state
	if next.Units = slices.Clone(next.Units); i >= 0 {
		next.Units = slices.Replace(next.Units, i, i+1, with...)
	} else {
		next.Units = append(next.Units, with...)
	}
	b, err := encodeState(next)
	if err == nil {
		err = k.file.replace(b)
	}
	if err != nil {
		return k.file.unsure, k.wrap(err)
	}
	k.state = next
	return false, nil
}

// decode is the reverse of encodeState. Beside what decodeState and sameTokens
// refuse, records that are bad or there twice are errors.
func (k recordKind[R]) decode(b []byte) (s kept[R], err error) {
	var written any = &s // what is in b
	if version, _ := stateVersion(b); version == 1 && k.upgrade != nil {
		s.Version = k.version
		s.Units, written, err = k.upgrade(b)
	} else {
		err = decodeState(b, k.version, &s)
	}
	if err == nil {
		err = s.check()
	}
	if err == nil {
		if err = sameTokens(b, written); err != nil {
			err = fmt.Errorf("is damaged: %w", err)
		}
	}
	if err != nil {
		return kept[R]{}, err
	}
	return s, nil
}

func (s *kept[R]) check() error {
	if s.Units == nil {
		return errors.New("is damaged: want the member units, a list")
	}
	naas := map[string]bool{}
	for i, r := range s.Units {
		naa := r.unit()
		_, err := parseIdentity(naa)
		if err == nil {
			err = r.check()
		}
		switch {
		case err != nil:
			return fmt.Errorf("units[%d]: %w", i, err)
		case naas[naa]:
			return fmt.Errorf("units[%d]: naa %s is there twice", i, naa)
		}
		naas[naa] = true
	}
	return nil
}
