package lun

import (
	"errors"
	"fmt"
	"time"

	"github.com/iser-target/iser-target/backend"
)

// A Health says how far the data of a unit can be trusted.
type Health uint32

// Values of Health.
const (
	Healthy  Health = iota
	Degraded        // it is served, but something is lost
	Failed          // its syncs fail: what was written before one failed may be lost
	Orphaned        // its file is not in its place: what is written would be lost with the next start
)

// Healths has the names of all values, in their order.
var Healths = [...]string{"ok", "degraded", "failed", "orphaned"}

// String returns the name of the value.
func (h Health) String() string { return Healths[h] }

// Health returns the value of SetHealth.
func (u *Unit) Health() Health { return Health(u.health.Load()) }

// Unsynced reports whether a sync of a predecessor has failed: see InheritFrom.
func (u *Unit) Unsynced() bool { return u.unsynced.Load() }

// SetHealth sets what is known of the store. Commands that write or sync are refused while the unit is
// Orphaned, as NOT READY, MANUAL INTERVENTION REQUIRED.
func (u *Unit) SetHealth(h Health) { u.health.Store(uint32(h)) }

func (u *Unit) orphaned() bool { return Health(u.health.Load()) == Orphaned }

// ErrNotInPlace reports a store that can only be recovered by closing and opening it.
var ErrNotInPlace = errors.New("the store cannot be recovered in place")

// Recover makes the store usable again in place (backend.Recoverer), and raises a unit attention: the content may differ from
// what initiators know. After an error syncs fail as before.
func (u *Unit) Recover() error {
	r, ok := u.store.(backend.Recoverer)
	if !ok {
		return ErrNotInPlace
	}
	u.sanitizer.mu.Lock() // none begins meanwhile
	defer u.sanitizer.mu.Unlock()
	if u.sanitizer.state.Load() == sanitizeRunning {
		return errSanitizing
	}
	if err := r.Recover(); err != nil {
		return err
	}
	u.raise(condMediumChanged, nil)
	return u.ForgetFailure()
}

// A StoreError is a command that the store failed.
type StoreError struct {
	Err error
	At  time.Time
}

// LastError returns the last command that the store failed; ok is false before the first one. A lack of space
// does not count, and neither does a sync that fails because one has failed.
func (u *Unit) LastError() (e StoreError, ok bool) {
	if last := u.lastError.Load(); last != nil {
		return *last, true
	}
	return StoreError{}, false
}

// noteError notes that the store failed a command.
func (u *Unit) noteError(err error) {
	if !errors.Is(err, backend.ErrNoSpace) && !errors.Is(err, backend.ErrUnsynced) {
		u.lastError.Store(&StoreError{err, time.Now()})
	}
}

// Device returns a number that stores have in common that hang together. ok is false if Inspect never hangs.
func (u *Unit) Device() (device uint64, ok bool) {
	r, ok := u.store.(backend.Recoverer)
	if !ok {
		return 0, false
	}
	return r.Device(), true
}

// Settle does what backend.Settler does, and fails if that takes longer than limit. It returns nil at once for a store that keeps nothing.
func (u *Unit) Settle(limit time.Duration) error {
	s, ok := u.store.(backend.Settler)
	if !ok {
		return nil
	}
	settled := make(chan error, 1)
	go func() { settled <- s.Settle() }()
	select {
	case err := <-settled:
		return err
	case <-time.After(limit):
		return fmt.Errorf("its store has not flushed within %v. Try again", limit)
	}
}

// Inspect does what backend.Inspector does. It returns nil for a store that has no file.
func (u *Unit) Inspect() error {
	i, ok := u.store.(backend.Inspector)
	if !ok {
		return nil
	}
	return i.Inspect()
}
