package lun

import "github.com/iser-target/iser-target/backend"

// NewAbsent makes a logical unit whose store is not there yet. It says who it is,
// and what else needs the medium or changes the unit is answered with NOT READY. Its
// place is taken by Inventory.Replace. The block size is 512 or 4096 octets, and 512
// if it is 0.
func NewAbsent(blockSize uint32, o Options) (*Unit, error) {
	if blockSize == 0 {
		blockSize = 512
	}
	// A unit keeps what its initiators set. This one is set nothing, and what the
	// store's unit has kept is for that one to find.
	o.Reservations, o.Settings, o.Sanitizations, o.Sanitize = nil, nil, nil, false
	u, err := New(absentStore{blockSize}, o)
	if err == nil {
		u.absent = condNoStore
	}
	return u, err
}

// NewOpening is NewAbsent for a store that is about to be there: initiators are told to try
// again, not that somebody has to come.
func NewOpening(blockSize uint32, o Options) (*Unit, error) {
	u, err := NewAbsent(blockSize, o)
	if err == nil {
		u.absent = condBecomingReady
	}
	return u, err
}

// Absent tells that the unit is one of NewAbsent or NewOpening.
func (u *Unit) Absent() bool { return u.absent != condNone }

// absentStore is what stands for a store that is not there.
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
