package lun

import "github.com/iser-target/iser-target/backend"

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

// Recover makes syncs possible again that fail since one has failed, after the store was reopened and the
// operator knows that data may be lost.
func (u *Unit) Recover() { u.unsynced.Store(false) }

// Inspect does what backend.Inspector does. It returns nil for a store that has no file.
func (u *Unit) Inspect() error {
	i, ok := u.store.(backend.Inspector)
	if !ok {
		return nil
	}
	return i.Inspect()
}
