package lun

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun/state"
)

// SyncFailures keeps which logical units have lost a sync, those of all units in one file, or in a home that gateways share. So a unit
// fails its syncs after a restart, too, and on the next owner, until it is recovered. Several goroutines may use it at once.
type SyncFailures = state.Keeper[SyncFailure]

// A SyncFailure is the record of a unit whose sync has failed: data that was written before may be lost.
type SyncFailure struct {
	NAA    string    `json:"naa"` // Identity.Serial
	Since  time.Time `json:"since"`
	Reason string    `json:"reason"` // of the first failure
}

// maxFailureReason is the longest reason that is kept, in bytes.
const maxFailureReason = 512

// Unit implements state.Record.
func (f SyncFailure) Unit() string { return f.NAA }

// Check implements state.Record.
func (f SyncFailure) Check() error {
	switch {
	case f.Since.IsZero():
		return errors.New("since is missing")
	case f.Reason == "" || len(f.Reason) > maxFailureReason:
		return fmt.Errorf("reason has %d bytes, want 1 to %d", len(f.Reason), maxFailureReason)
	}
	return nil
}

var syncFailuresFormat = state.Format[state.Records[SyncFailure]]{Name: "sync failures", Version: 1}

// OpenSyncFailures opens the file at path, as state.Open does. A damaged file is an error: without it a unit
// whose data may be lost would look healthy.
func OpenSyncFailures(path string) (*SyncFailures, error) {
	return state.OpenKeeper(syncFailuresFormat, path)
}

// sharedFailuresKey and the NAA are the key of a SyncFailure in a home that gateways share.
const sharedFailuresKey = "failures/"

// OpenSharedSyncFailures opens the sync failures that home has under the keys failures/NAA, as state.OpenKeeperIn does. The caller
// uses Follow, to call AdoptFailure of the unit whose record has changed.
func OpenSharedSyncFailures(ctx context.Context, home state.Home) (*SyncFailures, error) {
	return state.OpenKeeperIn(ctx, syncFailuresFormat, home, sharedFailuresKey)
}

// ExamineSyncFailures looks at the file of OpenSyncFailures.
func ExamineSyncFailures(path string, known []string) state.Condition {
	return state.ExamineRecords(syncFailuresFormat, path, known)
}

// SalvageSyncFailures does what state.Salvage does, for that file.
func SalvageSyncFailures(path string, known []string) ([]state.Loss, error) {
	return state.Salvage(syncFailuresFormat, path, known)
}

// A failureRecord is what a unit knows of its SyncFailure. A goroutine of its own stores it: neither a command nor
// the daemon waits for the state directory, except to forget it.
type failureRecord struct {
	is      atomic.Pointer[SyncFailure] // nil: no sync has failed
	kept    atomic.Pointer[SyncFailure] // that the file has
	storing atomic.Bool                 // a goroutine is at work
	silent  atomic.Bool                 // an error of it was reported
	closed  atomic.Bool                 // it is being forgotten, or see DropFailure
	mu      sync.Mutex                  // held while the file changes, by nothing that a command waits for
}

// restoreFailure makes syncs fail that failed before the restart.
func (u *Unit) restoreFailure() error {
	if u.opt.SyncFailures == nil {
		return nil
	}
	f, ok, err := u.opt.SyncFailures.Get(u.opt.Identity.Serial)
	if err != nil || !ok {
		return err
	}
	u.failure.is.Store(&f)
	u.failure.kept.Store(&f)
	u.failSyncs()
	u.SetHealth(Failed)
	return nil
}

// failSyncs makes all syncs fail.
func (u *Unit) failSyncs() {
	if !u.unsynced.Swap(true) {
		u.opt.Events(SyncsFailEvent{u.opt.Identity.Serial})
	}
}

// SyncFailure returns the failure of the first sync that failed, or nil. The caller does not change it.
func (u *Unit) SyncFailure() *SyncFailure { return u.failure.is.Load() }

// checkSync notes err, which a sync or a durable write has returned, if syncs fail from now on. It waits for
// nothing, and returns err.
func (u *Unit) checkSync(err error) error {
	if err == nil {
		return nil
	}
	final := errors.Is(err, backend.ErrUnsynced)
	if l, ok := u.store.(backend.SyncFailer); ok {
		final = l.SyncFailed()
	}
	if final {
		u.NoteSyncFailure(err)
	}
	return err
}

// NoteSyncFailure notes that a sync has failed for that reason, and that later ones will. Only the first reason
// counts. It begins to store that, if Options.SyncFailures is set and it is not stored yet, and does not wait.
func (u *Unit) NoteSyncFailure(reason error) {
	u.endTokens(condTokenCancelled) // data may be as it was before writes that are lost
	f := &u.failure
	if f.closed.Load() {
		return
	}
	if f.is.Load() == nil {
		f.is.CompareAndSwap(nil, &SyncFailure{u.opt.Identity.Serial, time.Now().UTC().Truncate(time.Second), failureReason(reason)})
	}
	if u.opt.SyncFailures.Shared() { // of any store that the unit will have, on any gateway
		u.unsynced.Store(true)
	}
	if u.opt.SyncFailures == nil || f.is.Load() == f.kept.Load() || !f.storing.CompareAndSwap(false, true) {
		return
	}
	go func() {
		defer f.storing.Store(false)
		if err := u.keepFailure(); err != nil && !f.silent.Swap(true) {
			u.notStored(err)
		}
	}()
}

// failureReason returns err as text that a file can keep.
func failureReason(err error) string {
	s := strings.ToValidUTF8(err.Error(), "?")
	s = strings.ToValidUTF8(s[:min(len(s), maxFailureReason)], "") // without half a rune at its end
	if s == "" {
		return "unknown"
	}
	return s
}

// keepFailure makes the file have what the unit knows. It waits for storage.
func (u *Unit) keepFailure() (err error) {
	if u.opt.SyncFailures == nil {
		return nil
	}
	f := &u.failure
	f.mu.Lock()
	defer f.mu.Unlock()
	is := f.is.Load()
	p := state.Patience{Commit: func() bool { // in the order of AdoptFailure
		f.kept.Store(is)
		return true
	}}
	if is == nil {
		_, err = u.opt.SyncFailures.Remove(u.opt.Identity.Serial, p)
	} else if is != f.kept.Load() {
		_, err = u.opt.SyncFailures.Put(*is, p)
	}
	if err == nil {
		f.silent.Store(false)
	}
	return err
}

// ForgetFailure makes syncs possible again that fail since one has failed, after the store was reopened and the
// operator knows that data may be lost. It waits until that is stored; if it fails, syncs continue to fail.
func (u *Unit) ForgetFailure() error {
	u.failure.closed.Store(true) // a look meanwhile meets a unit whose syncs fail
	was := u.failure.is.Swap(nil)
	if err := u.keepFailure(); err != nil {
		u.failure.is.Store(was)
		u.unsynced.Store(true)
		u.failure.closed.Store(false)
		return fmt.Errorf("syncs continue to fail, because it stays on record that one has failed: %w", err)
	}
	u.unsynced.Store(false)
	u.lastError.Store(nil)
	u.failure.closed.Store(false)
	if u.MediumFailed() { // another one, a moment ago
		u.NoteSyncFailure(backend.ErrUnsynced)
	}
	return nil
}

// MediumFailed reports whether the store itself fails its syncs because one has failed. Otherwise it only is on record, of another store that
// the unit has had, perhaps on another gateway. It waits for nothing.
func (u *Unit) MediumFailed() bool {
	l, ok := u.store.(backend.SyncFailer)
	return ok && l.SyncFailed()
}

// AdoptFailure makes syncs fail after another gateway has lost one, and makes them possible again after another gateway has recovered the unit.
// Call it from SyncFailures.Follow only: so it comes in the order of the changes.
func (u *Unit) AdoptFailure() {
	if !u.opt.SyncFailures.Shared() {
		return
	}
	rec, ok, err := u.opt.SyncFailures.Get(u.opt.Identity.Serial)
	f := &u.failure
	switch {
	case err != nil: // what is known stays
		u.notStored(err)
	case ok:
		f.is.Store(&rec)
		f.kept.Store(&rec)
		u.SetHealth(Failed)
		u.failSyncs()
	case f.kept.Swap(nil) != nil && !u.MediumFailed():
		f.is.Store(nil)
		u.unsynced.Store(false)
		u.lastError.Store(nil)
	}
}

// DropFailure forgets a failed sync of a unit that was removed and closed, and of what follows. It waits until that
// is stored. If gateways share the unit, the failure stays on record for the others.
func (u *Unit) DropFailure() error {
	u.failure.closed.Store(true)
	u.failure.is.Store(nil)
	if u.opt.SyncFailures.Shared() {
		return nil
	}
	return u.keepFailure()
}

// inheritFailure makes the failed sync of a predecessor that of u.
func (u *Unit) inheritFailure(old *Unit) {
	was := old.failure.is.Load()
	if was == nil && !old.unsynced.Load() {
		return
	}
	u.failSyncs()
	u.failure.is.CompareAndSwap(nil, was)
	u.NoteSyncFailure(backend.ErrUnsynced)
}
