package lun

import (
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun/fair"
)

// CloneTo gives the empty file fd the content of the unit at one moment, as backend.Snapshotter.CloneTo says, and returns for how
// long writes waited. Writes whose status was sent before the call are in it, flushed or not. If it takes as long as a store
// that hangs, commands get BUSY meanwhile. It fails while the medium is being sanitized or formatted.
func (u *Unit) CloneTo(fd int, limit time.Duration) (waited time.Duration, err error) {
	s, err := u.snapshotter()
	if err != nil {
		return 0, err
	}
	var call fair.Call
	u.gate.Force(&call)
	u.gate.MayTakeLong(&call)
	u.watchStore()
	defer u.gate.Leave(&call)
	waited, err = s.CloneTo(fd, limit)
	return waited, u.checkSync(err)
}

// CanClone returns nil if CloneTo would succeed now for a file in dir, else its error. An empty dir is that of the store.
func (u *Unit) CanClone(dir string) error {
	s, err := u.snapshotter()
	if err != nil {
		return err
	}
	return s.CanClone(dir)
}

// snapshotter returns the store, if it can be cloned now.
func (u *Unit) snapshotter() (backend.Snapshotter, error) {
	s, ok := u.store.(backend.Snapshotter)
	switch {
	case !ok:
		return nil, backend.ErrNoReflink
	case u.sanitizer.state.Load() == sanitizeRunning:
		return nil, errSanitizing
	case u.unsynced.Load():
		return nil, backend.ErrUnsynced
	}
	return s, nil
}
