package state

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// A Record is what a Keeper stores for a logical unit, as JSON.
type Record interface {
	Unit() string // Identity.Serial
	Check() error // finds what a logical unit could not have got into
}

// Records is the content of the file of a Keeper, with the members in this order. A value of it does
// not change; a new one takes its place.
type Records[R Record] struct {
	Version int    `json:"version"`
	Units   []R    `json:"units"`          // one for each unit that has something to keep
	Lost    []Loss `json:"lost,omitempty"` // see Salvage
}

// A Keeper keeps a record for each logical unit that has one, all in one file.
// Several goroutines may use it at once.
type Keeper[R Record] struct{ doc *Document[Records[R]] }

// OpenKeeper opens the file at path, as Open does. The file is created when the
// first record is put.
func OpenKeeper[R Record](format Format[Records[R]], path string) (*Keeper[R], error) {
	doc, err := Open(format, path, Records[R]{Version: format.Version, Units: []R{}})
	if err != nil {
		return nil, err
	}
	return &Keeper[R]{doc: doc}, nil
}

// Close does what Document.Close does.
func (k *Keeper[R]) Close() error { return k.doc.Close() }

// Restored does what Document.Restored does.
func (k *Keeper[R]) Restored() error { return k.doc.Restored() }

// SetLimit does what Document.SetLimit does.
func (k *Keeper[R]) SetLimit(limit func() time.Duration, late func()) { k.doc.SetLimit(limit, late) }

// Limit returns the time of SetLimit, or 0 if there is no limit.
func (k *Keeper[R]) Limit() time.Duration {
	if k == nil {
		return 0 // nothing is stored
	}
	k.doc.mu.Lock()
	limit := k.doc.limit
	k.doc.mu.Unlock()
	if limit == nil {
		return 0
	}
	return limit()
}

// TooLate returns the error of a caller that has waited for others for the time of SetLimit.
func (k *Keeper[R]) TooLate() error { return k.doc.wrap(tooLate(k.Limit())) }

// SetSync does what Document.SetSync does.
func (k *Keeper[R]) SetSync(f func(*os.File) error) { k.doc.SetSync(f) }

// Get returns the record of a unit, if it has one. It does not wait for storage. It fails with an ErrLost if the record
// was damaged.
func (k *Keeper[R]) Get(unit string) (r R, ok bool, err error) {
	if _, err := parseIdentity(unit); err != nil {
		return r, false, k.doc.wrap(err) // Put could not store it
	}
	s := k.doc.State()
	if l := s.loss(unit); l != nil {
		return r, false, k.doc.wrap(fmt.Errorf("NAA %s: %w, and so is its spare copy: %s. iser-target state repair --discard %s:%s accepts that loss, while the target is stopped",
			unit, ErrLost, l.Reason, filepath.Base(k.doc.file.path), unit))
	}
	if i := s.index(unit); i >= 0 {
		return s.Units[i], true, nil
	}
	return r, false, nil
}

// Units returns the units that have a record.
func (k *Keeper[R]) Units() (list []string) {
	for _, r := range k.doc.State().Units {
		list = append(list, r.Unit())
	}
	return list
}

// index returns where the record of a unit is, or -1.
func (s Records[R]) index(unit string) int {
	return slices.IndexFunc(s.Units, func(r R) bool { return r.Unit() == unit })
}

// loss returns the loss of the record of a unit, or nil.
func (s Records[R]) loss(unit string) *Loss {
	i := slices.IndexFunc(s.Lost, func(l Loss) bool { return l.NAA == unit })
	if i < 0 {
		return nil
	}
	return &s.Lost[i]
}

// Put keeps r in the place of the record that its unit has. r is on stable storage when Put returns
// nil. After an error, unsure reports that the file may have it all the same.
func (k *Keeper[R]) Put(r R, p Patience) (unsure bool, err error) {
	return k.change(r.Unit(), p, func(s Records[R]) (Records[R], bool, error) {
		i := s.index(r.Unit())
		if s.Units = slices.Clone(s.Units); i >= 0 {
			s.Units[i] = r
		} else {
			s.Units = append(s.Units, r)
		}
		return s, true, nil
	})
}

// Remove forgets the record of a unit, if it has one. It returns what Put does. Without a record it
// does not wait for storage.
func (k *Keeper[R]) Remove(unit string, p Patience) (unsure bool, err error) {
	k.doc.mu.Lock()
	nothing := k.doc.state.index(unit) < 0 && k.doc.isSettled(unit)
	k.doc.mu.Unlock()
	if nothing {
		if !p.commit() {
			return false, k.doc.wrap(ErrAborted)
		}
		return false, nil
	}
	return k.change(unit, p, func(s Records[R]) (Records[R], bool, error) {
		i := s.index(unit)
		if i >= 0 {
			s.Units = slices.Delete(slices.Clone(s.Units), i, i+1)
		}
		return s, i >= 0, nil
	})
}

// change stores what apply makes of the records.
func (k *Keeper[R]) change(unit string, p Patience, apply func(Records[R]) (Records[R], bool, error)) (bool, error) {
	unsure, err := k.doc.store(&update[Records[R]]{keys: []string{unit}, apply: apply, patience: p})
	return unsure, k.doc.wrap(err)
}

// Check refuses records that are bad, and two of one unit. A lost record counts.
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
	for i, l := range s.Lost {
		_, err := parseIdentity(l.NAA)
		switch {
		case err != nil:
			return fmt.Errorf("lost[%d]: %w", i, err)
		case l.Reason == "":
			return fmt.Errorf("lost[%d]: the reason is empty", i)
		case naas[l.NAA]:
			return fmt.Errorf("lost[%d]: naa %s is there twice", i, l.NAA)
		}
		naas[l.NAA] = true
	}
	return nil
}
