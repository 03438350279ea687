package lun

import (
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
)

// storeErrorInterval is how much time there is at least between two lines of the log
// about the store of a unit.
const storeErrorInterval = time.Second

// A storeErrorLog keeps a store that fails often from filling the log.
type storeErrorLog struct {
	last       atomic.Int64  // when the last line was written, in ns since 1970
	suppressed atomic.Uint64 // what has failed since
}

// notStoreErrors are the errors of commands that no store has begun to serve.
var notStoreErrors = []error{errAborted, errSanitizing, backend.ErrReadOnly, backend.ErrClosed, backend.ErrRange}

// storeFailed tells whether err is that of a store that could not do what it was asked.
func storeFailed(err error) bool {
	return !slices.ContainsFunc(notStoreErrors, func(other error) bool { return errors.Is(err, other) })
}

// reportStoreError says that a store has failed a command, if err says so. The sense data
// tells the initiator what that means for it, and nobody why.
func (c *Command) reportStoreError(err error) {
	if !storeFailed(err) {
		return
	}
	u := c.unit
	now, last := time.Now().UnixNano(), u.storeErrors.last.Load()
	if since := time.Duration(now - last); since >= 0 && since < storeErrorInterval || !u.storeErrors.last.CompareAndSwap(last, now) {
		u.storeErrors.suppressed.Add(1)
		return
	}
	u.opt.Events.StoreFailed(StoreFailedEvent{
		Target: c.nexus.port.TargetName, LUN: c.itl.id, Initiator: c.nexus.port.InitiatorName,
		Command: c.row.name, LBA: c.lba, Blocks: c.count, Err: err, Suppressed: u.storeErrors.suppressed.Swap(0),
	})
}
