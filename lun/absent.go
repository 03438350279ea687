package lun

import "github.com/iser-target/iser-target/backend"

// NewAbsent returns a logical unit whose store is missing. It reports its identity, and answers
// NOT READY to what else needs the medium or changes the unit. Inventory.Replace puts another
// unit in its place. The block size is 512 or 4096 bytes; 0 means 512.
func NewAbsent(blockSize uint32, o Options) (*Unit, error) {
	if blockSize == 0 {
		blockSize = 512
	}
	// Initiators can set nothing here that has to be kept. What is kept is for the
	// unit that gets the store, except for the format of sense data.
	var modes uint32
	if o.Settings != nil {
		if kept, ok, err := o.Settings.Get(o.Identity.Serial); err == nil && ok && kept.Mode != nil {
			modes = kept.Mode.modes() & modeDSense
		}
	}
	o.Reservations, o.Shared, o.Settings, o.Sanitizations, o.SyncFailures, o.Sanitize = nil, nil, nil, nil, nil, false
	u, err := New(absentStore{blockSize}, o)
	if err == nil {
		u.absent = condNoStore
		u.mode.Store(modes)
	}
	return u, err
}

// NewOpening returns a logical unit like that of NewAbsent for a store that is about to open: it
// tells initiators to try again, not that somebody has to intervene.
func NewOpening(blockSize uint32, o Options) (*Unit, error) {
	u, err := NewAbsent(blockSize, o)
	if err == nil {
		u.absent = condBecomingReady
	}
	return u, err
}

// Absent reports whether NewAbsent or NewOpening made the unit.
func (u *Unit) Absent() bool { return u.absent != condNone }

// An absentStore takes the place of a store that is missing.
type absentStore struct{ blockSize uint32 }

func (s absentStore) Info() backend.Info {
	return backend.Info{Size: int64(s.blockSize), BlockSize: s.blockSize, PhysicalBlockSize: s.blockSize}
}

func (absentStore) ReadAt([]byte, int64) error { return backend.ErrClosed }

func (absentStore) WriteAt([]byte, int64) error { return backend.ErrClosed }

func (absentStore) WriteDurable([]byte, int64) error { return backend.ErrClosed }

func (absentStore) Sync() error { return nil }

func (absentStore) Discard(int64, int64) error { return backend.ErrClosed }

func (absentStore) Zero(int64, int64) error { return backend.ErrClosed }

func (absentStore) Close() error { return nil }
