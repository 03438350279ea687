package lun

import (
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
)

// storeErrorInterval is the shortest time between two StoreFailed events of a unit.
const storeErrorInterval = time.Second

// A storeErrorLog keeps a store that fails often from filling the log.
type storeErrorLog struct {
	last       atomic.Int64  // when the last event was reported, in ns since 1970
	suppressed atomic.Uint64 // failures since then
}

// notStoreErrors are errors of commands that no store began to execute.
var notStoreErrors = []error{errAborted, errSanitizing, backend.ErrReadOnly, backend.ErrClosed, backend.ErrRange}

// storeFailed reports whether err came from a store that failed an operation.
func storeFailed(err error) bool {
	return !slices.ContainsFunc(notStoreErrors, func(other error) bool { return errors.Is(err, other) })
}

// reportStoreError reports that the store failed c, if err says so. The sense data tells the
// initiator what that means for it, but not the reason.
func (c *Command) reportStoreError(err error) {
	if !storeFailed(err) {
		return
	}
	u := c.unit
	e := &u.storeErrors
	now, last := time.Now().UnixNano(), e.last.Load()
	since := time.Duration(now - last)
	if since >= 0 && since < storeErrorInterval || !e.last.CompareAndSwap(last, now) {
		e.suppressed.Add(1)
		return
	}
	u.opt.Events(StoreFailedEvent{
		Target: c.nexus.port.TargetName, LUN: c.itl.id, Initiator: c.nexus.port.InitiatorName,
		Command: c.row.name, LBA: c.lba, Blocks: c.count, Err: err, Suppressed: e.suppressed.Swap(0),
	})
}
