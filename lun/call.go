package lun

import (
	"errors"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/lun/fair"
	"github.com/iser-target/iser-target/lun/invariant"
)

// All calls of the store that commands make are in this file. A command enters the gate of the unit
// before it takes stripes of the medium, makes its calls, and leaves. So a command that waits at the
// gate keeps nobody else from the medium, and a call that hangs is known to be under way. The calls of
// the daemon itself (Grow, Resize, Allocate, Close) stay outside.

// StoreCalls is the state of the gate between the commands of a unit and its store.
type StoreCalls = fair.State

// StoreCalls returns how many calls of the store are under way, for how long the oldest one is, and
// how many commands wait for their turn. A store with Info.Nonblocking has no calls to wait for.
func (u *Unit) StoreCalls() StoreCalls { return u.gate.State() }

// SetRates limits and guarantees what the LUN, and initiators of it by their normalized names, may do per
// second. of may be nil. It may be called at any time, also while commands wait for their rate; the
// rates of a new unit are all 0. of returns soon, calls nothing of the unit, and returns the same for the
// same name until the next SetRates.
func (u *Unit) SetRates(lun fair.Rates, of func(initiator string) fair.Rates) {
	u.gate.SetRates(lun, of)
}

// enter waits until c may call the store to do that work, and fails if c is aborted, or the store
// closed, before. Without an error, leave follows.
func (u *Unit) enter(c *Command, w fair.Work) error { return u.enterAs(c, &c.call, w) }

// enterAs does what enter does with a Call of c.
func (u *Unit) enterAs(c *Command, call *fair.Call, w fair.Work) error {
	call.Abort = c.Abort
	if !c.entered || w.Heavy {
		c.entered, w.Ops = true, 1
	}
	switch {
	case u.gate.Enter(call, w):
		u.watchStore()
		return nil
	case c.aborted():
		return errAborted
	}
	return backend.ErrClosed
}

// leave ends what enter began.
func (u *Unit) leave(c *Command) { u.gate.Leave(&c.call) }

// Cancel wakes c if it waits for its turn at the store. The transport calls it after it has set Abort,
// from any goroutine; it does not wait for c.
func (c *Command) Cancel() {
	c.call.Cancel()
	c.other.Cancel()
}

// moved returns the Work of a call that moves n bytes to or from the medium.
func moved(n int) fair.Work { return fair.Work{Bytes: int64(n)} }

// heavyStep returns the Work of a step of a command that uses much CPU time for what its initiator sends. A
// step is an operation, and moves n bytes to or from the medium.
func heavyStep(n int64) fair.Work { return fair.Work{Bytes: n, Heavy: true} }

// toChange notes that a command, or a sanitize, is about to change n bytes at pos.
func (u *Unit) toChange(pos, n int64) {
	if invariant.Enabled && u.splicer != nil && n > 0 {
		invariant.Check(u.isSanitizing() || u.ranges.announced(stripesOf(pos, n)), "lun: a change of %d bytes at %d is not announced", n, pos)
	}
	u.changing(pos, n)
}

// storeRead reads from the store.
//
// Preconditions: the command has entered the gate; so it has for all functions below.
func (u *Unit) storeRead(p []byte, pos int64) error {
	if err := u.fault(faultRead); err != nil {
		return err
	}
	return u.store.ReadAt(p, pos)
}

// storeLend appends to list what the store lends of a range. After an error it has appended nothing.
func (u *Unit) storeLend(pos, n int64, list []Lent) ([]Lent, error) {
	if err := u.fault(faultRead); err != nil {
		return list, err
	}
	before := len(list)
	for n > 0 {
		p, loan, err := u.lender.Lend(pos, n)
		if err != nil {
			for _, l := range list[before:] {
				l.Return()
			}
			clear(list[before:])
			return list[:before], err
		}
		list = append(list, Lent{p, loan})
		pos, n = pos+int64(len(p)), n-int64(len(p))
	}
	return list, nil
}

// storeSplice makes a pipe refer to a range of the store.
func (u *Unit) storeSplice(pipe int, pos, n int64) error {
	if err := u.fault(faultRead); err != nil {
		return err
	}
	return u.splicer.Splice(pipe, pos, n)
}

// storePour copies a range of the store to a pipe, through buf.
func (u *Unit) storePour(pipe int, pos, n int64, buf []byte) error {
	if err := u.fault(faultRead); err != nil {
		return err
	}
	return backend.Pour(u.store, pipe, pos, n, buf)
}

// storeFreeze makes the store get the data of a range to other pages.
func (u *Unit) storeFreeze(pos, n int64) error {
	if err := u.fault(faultWrite); err != nil {
		return err
	}
	return u.splicer.Freeze(pos, n)
}

// storeWrite writes to the store.
func (u *Unit) storeWrite(p []byte, pos int64) error {
	u.toChange(pos, int64(len(p)))
	if err := u.fault(faultWrite); err != nil {
		return err
	}
	return u.store.WriteAt(p, pos)
}

// storeWriteDurable writes to the store, durably.
func (u *Unit) storeWriteDurable(p []byte, pos int64) error {
	u.toChange(pos, int64(len(p)))
	if f := u.faults.Load(); f != nil {
		if err := f.before(faultWrite); err != nil {
			return err
		}
		if err := f.before(faultSync); err != nil {
			return err
		}
	}
	return u.checkSync(u.store.WriteDurable(p, pos))
}

// storeWriteAtomic writes all of p to the store or nothing, durably if asked for or without a cache.
//
// Preconditions: the stripes of the range are held.
func (u *Unit) storeWriteAtomic(c *Command, p []byte, pos int64, durable bool) error {
	u.toChange(pos, int64(len(p)))
	u.ranges.assertHeld(pos, int64(len(p)))
	if err := u.barredTo(c); err != nil {
		return err
	}
	durable = u.writeThrough() || u.cached() && durable
	if durable && u.unsynced.Load() {
		return backend.ErrUnsynced
	}
	if err := u.fault(faultWrite); err != nil {
		return err
	}
	err := backend.WriteAtomic(u.store, p, pos, durable)
	if durable {
		return u.checkSync(err)
	}
	return err
}

// storeDiscard frees the space of a range.
func (u *Unit) storeDiscard(pos, n int64) error {
	u.toChange(pos, n)
	if err := u.fault(faultWrite); err != nil {
		return err
	}
	return u.store.Discard(pos, n)
}

// storeZero makes a range read as zeros.
func (u *Unit) storeZero(pos, n int64) error {
	u.toChange(pos, n)
	if err := u.fault(faultWrite); err != nil {
		return err
	}
	return u.store.Zero(pos, n)
}

// storeReadProtected reads blocks on the wire from the store.
func (u *Unit) storeReadProtected(p []byte, pos int64, checks protection.Checks) error {
	if err := u.fault(faultRead); err != nil {
		return err
	}
	return u.protected.ReadProtected(p, pos, checks)
}

// storeWriteProtected writes blocks on the wire to the store, durably if asked for.
func (u *Unit) storeWriteProtected(p []byte, pos int64, durable bool) error {
	u.toChange(pos, u.dataLen(p))
	if durable && u.unsynced.Load() {
		return backend.ErrUnsynced
	}
	if err := u.fault(faultWrite); err != nil {
		return err
	}
	if !durable {
		return u.protected.WriteProtected(p, pos, false)
	}
	if err := u.fault(faultSync); err != nil {
		return err
	}
	return u.checkSync(u.protected.WriteProtected(p, pos, true))
}

// storeFormat makes a range zeros that nothing checks until they are written.
func (u *Unit) storeFormat(pos, n int64) error {
	u.toChange(pos, n)
	if err := u.fault(faultWrite); err != nil {
		return err
	}
	return u.protected.Format(pos, n, u.isThin())
}

// storeSync syncs the store.
func (u *Unit) storeSync() error {
	if err := u.fault(faultSync); err != nil {
		return err
	}
	return u.checkSync(u.store.Sync())
}

// storeExtent calls backend.Extent.
func (u *Unit) storeExtent(pos int64) (mapped bool, n int64, err error) {
	return backend.Extent(u.store, pos)
}

// storeCopy copies from the store of another unit, or of the same one. An error of that store is a backend.SourceError.
func (u *Unit) storeCopy(pos int64, from *Unit, fromPos, n int64, p []byte) error {
	u.toChange(pos, n)
	if err := from.fault(faultRead); err != nil {
		return &backend.SourceError{Err: err}
	}
	if err := u.fault(faultWrite); err != nil {
		return err
	}
	return backend.Copy(u.store, pos, from.store, fromPos, n, p)
}

// storeShare copies up to n bytes from the store of another unit, or of the same one, without this process, and returns how many.
// Both stores are Copiers. An error of the other one is a backend.SourceError if it can be told.
func (u *Unit) storeShare(pos int64, from *Unit, fromPos, n int64) (int64, error) {
	u.toChange(pos, n)
	if err := from.fault(faultRead); err != nil {
		return 0, &backend.SourceError{Err: err}
	}
	if err := u.fault(faultWrite); err != nil {
		return 0, err
	}
	return u.store.(backend.Copier).CopyFrom(pos, from.store, fromPos, n)
}

// extent enters the gate and calls storeExtent.
func (u *Unit) extent(c *Command, pos int64) (mapped bool, n int64, err error) {
	if err := u.enter(c, fair.Work{}); err != nil {
		return false, 0, err
	}
	defer u.leave(c)
	return u.storeExtent(pos)
}

// usage enters the gate and calls backend.Usage.
func (u *Unit) usage(c *Command) (used, free int64, err error) {
	if err := u.enter(c, fair.Work{}); err != nil {
		return 0, 0, err
	}
	defer u.leave(c)
	return backend.Usage(u.store)
}

// prefetch enters the gate and calls backend.Prefetch.
func (u *Unit) prefetch(c *Command, pos, n int64) error {
	if err := u.enter(c, fair.Work{}); err != nil {
		return err
	}
	defer u.leave(c)
	return backend.Prefetch(u.store, pos, n)
}

// sync enters the gate and syncs the store. Like the store, it keeps failing once a sync failed. c is
// nil if not a command asks for it but a reset, a sanitize or the daemon: these do not wait at the gate, and meet
// no injected faults. An injected failure is not final, so it would be lost where nobody is told of it, and a hang
// would hold up the end of the process.
func (u *Unit) sync(c *Command) error {
	if u.unsynced.Load() {
		return backend.ErrUnsynced
	}
	if c == nil {
		var call fair.Call
		u.gate.Force(&call)
		u.gate.MayTakeLong(&call)
		u.watchStore()
		defer u.gate.Leave(&call)
		return u.checkSync(u.store.Sync())
	}
	if err := u.enter(c, fair.Work{}); err != nil {
		return err
	}
	defer u.leave(c)
	u.gate.MayTakeLong(&c.call)
	return u.storeSync()
}

// Sync synchronizes the store, like SYNCHRONIZE CACHE of all blocks, but without a turn. It fails like the store,
// and with backend.ErrClosed when it is closed.
func (u *Unit) Sync() error { return u.sync(nil) }

// inSanitize makes a call for the sanitize that is running, which it enters and leaves. It fails with
// backend.ErrClosed if the sanitize has to end. A store that moves, or is opened again, does not end it by itself.
func (u *Unit) inSanitize(w fair.Work, call func() error) error {
	for {
		if !u.gate.Enter(&u.sanitizer.call, w) {
			return backend.ErrClosed
		}
		u.watchStore()
		err := call()
		u.gate.Leave(&u.sanitizer.call)
		if !errors.Is(err, backend.ErrMoved) {
			return err
		}
		if !u.sanitizer.pause(sanitizeRetry) {
			return backend.ErrClosed
		}
	}
}

// sanitizeSync syncs the store for the sanitize that is running.
func (u *Unit) sanitizeSync() error {
	for {
		if err := u.sync(nil); !errors.Is(err, backend.ErrMoved) {
			return err
		}
		if !u.sanitizer.pause(sanitizeRetry) {
			return backend.ErrClosed
		}
	}
}

// sanitizeWrite writes to the store for the sanitize that is running.
func (u *Unit) sanitizeWrite(p []byte, pos int64) error {
	return u.inSanitize(heavyStep(int64(len(p))), func() error { return u.storeWrite(p, pos) })
}
