package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"

	"github.com/iser-target/iser-target/lun/invariant"
)

// A Record is what a Keeper stores for a logical unit, as JSON.
type Record interface {
	Unit() string // Identity.Serial
	Check() error // finds what a logical unit could not have got into
}

// Records is the content of the file of a Keeper, with the members in this order. A value of it does
// not change; a new one takes its place.
type Records[R Record] struct {
	Version int `json:"version"`
	Units   []R `json:"units"` // one for each unit that has something to keep
}

// A Keeper keeps a record for each logical unit that has one, all in one file.
// Several goroutines may use it at once.
type Keeper[R Record] struct {
	mu  sync.Mutex
	doc *Document[Records[R]] // guarded by mu
}

// OpenKeeper opens the file at path, as Open does. The file is created when the
// first record is put.
func OpenKeeper[R Record](format Format[Records[R]], path string) (*Keeper[R], error) {
	doc, err := Open(format, path, Records[R]{format.Version, []R{}})
	if err != nil {
		return nil, err
	}
	return &Keeper[R]{doc: doc}, nil
}

// Close releases the file for others. Changes fail from then on with fs.ErrClosed.
func (k *Keeper[R]) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.doc.Close()
}

// SetSync makes f the function that syncs files and directories, so that a test
// can let it fail. With nil it is (*os.File).Sync again.
func (k *Keeper[R]) SetSync(f func(*os.File) error) {
	if f == nil {
		f = (*os.File).Sync
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.doc.file.fsync = f
}

// Get returns the record of a unit, if it has one.
func (k *Keeper[R]) Get(unit string) (r R, ok bool, err error) {
	if _, err := parseIdentity(unit); err != nil {
		return r, false, k.doc.wrap(err) // Put could not store it
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if i := k.index(unit); i >= 0 {
		return k.doc.state.Units[i], true, nil
	}
	return r, false, nil
}

// index returns where the record of a unit is, or -1.
//
// Preconditions: k.mu is held.
func (k *Keeper[R]) index(unit string) int {
	invariant.Held(&k.mu)
	return slices.IndexFunc(k.doc.state.Units, func(r R) bool { return r.Unit() == unit })
}

// Put keeps r in the place of the record that its unit has. r is on stable storage when Put returns
// nil. After an error, unsure reports that it may be there all the same.
func (k *Keeper[R]) Put(r R) (unsure bool, err error) { return k.change(r.Unit(), r) }

// Remove forgets the record of a unit, if it has one. It returns what Put does.
func (k *Keeper[R]) Remove(unit string) (unsure bool, err error) { return k.change(unit) }

// change replaces the records of a unit by with, which is at most one.
func (k *Keeper[R]) change(unit string, with ...R) (unsure bool, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	i := k.index(unit)
	switch {
	case i < 0 && len(with) == 0 && !k.doc.file.unsure:
		return false, nil
	case k.doc.closed:
		return false, k.doc.wrap(fs.ErrClosed)
	}
	next := k.doc.state
	if next.Units = slices.Clone(next.Units); i >= 0 {
		next.Units = slices.Replace(next.Units, i, i+1, with...)
	} else {
		next.Units = append(next.Units, with...)
	}
	err = k.doc.Replace(next)
	return err != nil && k.doc.file.unsure, err
}

// Check refuses records that are bad, and two of one unit.
func (s Records[R]) Check() error {
	if s.Units == nil {
		return errors.New("is damaged: the member units is not a list")
	}
	naas := map[string]bool{}
	for i, r := range s.Units {
		naa := r.Unit()
		_, err := parseIdentity(naa)
		if err == nil {
			err = r.Check()
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
