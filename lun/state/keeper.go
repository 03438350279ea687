package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
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

// A Keeper keeps a record for each logical unit that has one, all in one file, or in a shared home
// each as a value of its own. Several goroutines may use it at once.
type Keeper[R Record] struct {
	doc *Document[Records[R]] // stored nowhere if home is not nil

	home   Home
	prefix string // of the keys in home

	mu    sync.Mutex                       // guards the fields below; not held while anything is stored
	units map[string]*Document[Records[R]] // of home, by the unit
}

// OpenKeeper opens the file at path, as Open does. The file is created when the
// first record is put.
func OpenKeeper[R Record](format Format[Records[R]], path string) (*Keeper[R], error) {
	doc, err := Open(format, path, Records[R]{Version: format.Version, Units: []R{}})
	if err != nil {
		return nil, err
	}
	return &Keeper[R]{doc: doc}, nil
}

// OpenKeeperIn opens the records that home has under prefix and the serial of the unit. Other processes may have them open,
// too. A record that one of them has changed fails the next change of that record here with an ErrConflict, and
// Get returns it from then on. Records that could not have been written are errors of their units. Those of another version are
// an error, because this program must not change what a newer one has stored. Close leaves home open.
func OpenKeeperIn[R Record](ctx context.Context, format Format[Records[R]], home Home, prefix string) (*Keeper[R], error) {
	k := &Keeper[R]{doc: newDocument(format, Records[R]{Version: format.Version, Units: []R{}}), home: home, prefix: prefix, units: map[string]*Document[Records[R]]{}}
	k.doc.file.path = prefix + "*"
	values, err := home.List(ctx, prefix)
	if err != nil {
		return nil, k.doc.wrap(err)
	}
	for _, v := range values {
		unit := strings.TrimPrefix(v.Key, prefix)
		if _, err := parseIdentity(unit); err != nil {
			return nil, k.doc.wrap(fmt.Errorf("key %q: %w", v.Key, err))
		}
		d := k.unit(unit)
		if err := d.adopt(v); errors.Is(err, errVersion) {
			return nil, d.wrap(err)
		}
		d.foreign = false
	}
	return k, nil
}

// Follow calls changed for each unit whose record another process changes, or has changed since OpenKeeperIn. Get returns what is
// found then. A call without a change is possible. A record that could not have been written is lost until another process
// replaces it. Follow returns when it listens, and ends with ctx or with the home.
//
// changed is called in the order in which the records of a unit count: after Patience.Commit of an earlier change by this process, and
// before that of a later one. It must not wait, nor change the Keeper.
func (k *Keeper[R]) Follow(ctx context.Context, changed func(unit string)) error {
	values, err := k.home.Watch(ctx, k.prefix)
	if err != nil {
		return k.doc.wrap(err)
	}
	before, err := k.home.List(ctx, k.prefix) // after Watch, so that no change is missed
	if err != nil {
		return k.doc.wrap(err)
	}
	has := map[string]bool{}
	for _, v := range before {
		has[v.Key] = true
	}
	for _, d := range k.all() {
		if !has[d.key] {
			before = append(before, Value{Key: d.key})
		}
	}
	go func() {
		for _, v := range before {
			k.follow(ctx, v, changed)
		}
		for v := range values {
			k.follow(ctx, v, changed)
		}
	}()
	return nil
}

// follow makes v, or what came after it, the record of its unit. While the home does not answer, it tries again.
func (k *Keeper[R]) follow(ctx context.Context, v Value, changed func(unit string)) {
	unit := strings.TrimPrefix(v.Key, k.prefix)
	if _, err := parseIdentity(unit); err != nil {
		return // no unit of this program has it
	}
	d := k.unit(unit)
	for {
		err := d.look(ctx, &update[Records[R]]{keys: []string{unit}, seen: &v, told: func() { changed(unit) }})
		if err == nil || errors.Is(err, fs.ErrClosed) {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(retryAfter):
		}
	}
}

// Refresh learns what a shared home has of a unit. Get returns that from then on.
func (k *Keeper[R]) Refresh(ctx context.Context, unit string) error {
	d := k.unit(unit)
	never := Value{Key: d.key, Data: []byte{}, Revision: -1} // so that the home is asked
	return d.wrap(d.look(ctx, &update[Records[R]]{keys: []string{unit}, seen: &never, told: func() {}}))
}

// unit returns the document that has the record of a unit.
func (k *Keeper[R]) unit(unit string) *Document[Records[R]] {
	if k.home == nil {
		return k.doc
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.units[unit]
	if d == nil {
		d = newShared(k.doc.format, k.home, k.prefix+unit, Records[R]{Version: k.doc.format.Version, Units: []R{}})
		d.accept = func(s Records[R]) error {
			if len(s.Units) != 1 || s.Units[0].Unit() != unit || len(s.Lost) > 0 {
				return errors.New("is damaged: want the record of this unit, and no other")
			}
			return nil
		}
		d.lose = func(reason error) Records[R] {
			return Records[R]{Version: k.doc.format.Version, Units: []R{}, Lost: []Loss{{NAA: unit, Reason: reason.Error()}}}
		}
		k.doc.mu.Lock()
		d.limit, d.late, d.closed = k.doc.limit, k.doc.late, k.doc.closed
		k.doc.mu.Unlock()
		k.units[unit] = d
	}
	return d
}

// Close does what Document.Close does.
func (k *Keeper[R]) Close() error {
	errs := []error{k.doc.Close()}
	for _, d := range k.all() {
		errs = append(errs, d.Close())
	}
	return errors.Join(errs...)
}

// all returns the documents of the units in a shared home.
func (k *Keeper[R]) all() []*Document[Records[R]] {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Values(k.units))
}

// Restored does what Document.Restored does.
func (k *Keeper[R]) Restored() error { return k.doc.Restored() }

// SetLimit does what Document.SetLimit does.
func (k *Keeper[R]) SetLimit(limit func() time.Duration, late func()) {
	k.doc.SetLimit(limit, late)
	for _, d := range k.all() {
		d.SetLimit(limit, late)
	}
}

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
func (k *Keeper[R]) TooLate() error { return k.doc.wrap(tooLate(k.Limit(), k.home != nil)) }

// SetSync does what Document.SetSync does.
func (k *Keeper[R]) SetSync(f func(*os.File) error) { k.doc.SetSync(f) }

// Shared reports whether the records are in a home that other processes may change, too. A Keeper that is nil has none.
func (k *Keeper[R]) Shared() bool { return k != nil && k.home != nil }

// Get returns the record of a unit, if it has one. It does not wait for storage. It fails with an ErrLost if the record
// was damaged.
func (k *Keeper[R]) Get(unit string) (r R, ok bool, err error) {
	if _, err := parseIdentity(unit); err != nil {
		return r, false, k.doc.wrap(err) // Put could not store it
	}
	d := k.unit(unit)
	s := d.State()
	if l := s.loss(unit); l != nil {
		return r, false, d.wrap(k.lost(l))
	}
	if i := s.index(unit); i >= 0 {
		return s.Units[i], true, nil
	}
	return r, false, nil
}

// lost returns the error about a record that was damaged.
func (k *Keeper[R]) lost(l *Loss) error {
	if k.home != nil {
		return fmt.Errorf("NAA %s: %w: %s. To accept that loss, remove the value of %s%s", l.NAA, ErrLost, l.Reason, k.prefix, l.NAA)
	}
	return fmt.Errorf("NAA %s: %w, and so is its spare copy: %s. iser-target state repair --discard %s:%s accepts that loss, while the target is stopped",
		l.NAA, ErrLost, l.Reason, filepath.Base(k.doc.file.path), l.NAA)
}

// Units returns the units that have a record, in a shared home ascending.
func (k *Keeper[R]) Units() (list []string) {
	for _, d := range k.all() {
		for _, r := range d.State().Units {
			list = append(list, r.Unit())
		}
	}
	slices.Sort(list)
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
	return k.change(r.Unit(), p, false, func(s Records[R]) (Records[R], bool, error) {
		if l := s.loss(r.Unit()); l != nil && k.home != nil {
			return s, false, k.lost(l) // what is left of it may be of use
		}
		i := s.index(r.Unit())
		if s.Units = slices.Clone(s.Units); i >= 0 {
			s.Units[i] = r
		} else {
			s.Units = append(s.Units, r)
		}
		return s, true, nil
	})
}

// Update keeps what edit makes of the record of a unit. Without a record, ok is false. If another process changes the record first, edit
// is called again, with what that has made of it: no change is lost. It is called before Patience.Commit, and perhaps again later, then
// with the same record; it must not wait. Update returns what Put does.
func (k *Keeper[R]) Update(unit string, p Patience, edit func(r R, ok bool) R) (unsure bool, err error) {
	d := k.unit(unit)
	unsure, err = d.store(&update[Records[R]]{keys: []string{unit}, patience: p, apply: func(s Records[R]) (Records[R], bool, error) {
		if l := s.loss(unit); l != nil && k.home != nil {
			return s, false, k.lost(l)
		}
		i := s.index(unit)
		if s.Units = slices.Clone(s.Units); i >= 0 {
			s.Units[i] = edit(s.Units[i], true)
		} else {
			var none R
			s.Units = append(s.Units, edit(none, false))
		}
		return s, true, nil
	}})
	return unsure, d.wrap(err)
}

// Remove forgets the record of a unit, if it has one. It returns what Put does. Without a record it
// does not wait for storage.
func (k *Keeper[R]) Remove(unit string, p Patience) (unsure bool, err error) {
	d := k.unit(unit)
	d.mu.Lock()
	nothing := d.state.index(unit) < 0 && (k.home == nil || d.state.loss(unit) == nil) && d.isSettled(unit)
	d.mu.Unlock()
	if nothing {
		if !p.commit() {
			return false, d.wrap(ErrAborted)
		}
		return false, nil
	}
	return k.change(unit, p, k.home != nil, func(s Records[R]) (Records[R], bool, error) {
		if l := s.loss(unit); l != nil && k.home != nil {
			return s, false, k.lost(l)
		}
		i := s.index(unit)
		if i >= 0 {
			s.Units = slices.Delete(slices.Clone(s.Units), i, i+1)
		}
		return s, i >= 0, nil
	})
}

// change stores what apply makes of the records, or with remove removes what a shared home has of the unit.
func (k *Keeper[R]) change(unit string, p Patience, remove bool, apply func(Records[R]) (Records[R], bool, error)) (bool, error) {
	d := k.unit(unit)
	unsure, err := d.store(&update[Records[R]]{keys: []string{unit}, blind: true, remove: remove, apply: apply, patience: p})
	return unsure, d.wrap(err)
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
