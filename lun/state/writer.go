package state

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync/atomic"
	"time"
)

// A file system can hang: its server is gone, or its device is stuck. So only one goroutine, the
// writer, calls it, with no lock held. Everybody else hands an update to the writer and waits as long
// as its Patience lasts. Updates that wait at the same time are stored together.
//
// An update whose caller lost its patience does not count: its caller reported a failure. If it was
// being stored at that time the file may have it, as after a failed sync of the directory: a process
// that ends now may find it at its next start. When the file system answers again, the writer stores
// the state without it. It tries until that succeeds.

// ErrTimeout is in errors about a file that could not be stored in time.
var ErrTimeout = errors.New("the file system does not answer")

// ErrAborted is the error of an update that its caller did not want any longer.
var ErrAborted = errors.New("aborted while it was being stored")

// A Patience says how long a caller waits until its change is stored.
type Patience struct {
	Since   time.Time   // when the time of SetLimit began; zero: now
	Aborted func() bool // if not nil, it is asked often; when it reports true, the wait ends
	// Commit, if not nil, puts the stored change in force. If it reports false, the change does not
	// count: the writer stores the state without it, and the caller gets ErrAborted. It runs in
	// another goroutine, once, only while the caller waits, and must not wait for storage.
	Commit func() bool
}

// waited returns how long the caller has waited so far.
func (p *Patience) waited() time.Duration {
	if p.Since.IsZero() {
		return 0
	}
	return time.Since(p.Since)
}

// commit calls p.Commit.
func (p *Patience) commit() bool { return p.Commit == nil || p.Commit() }

// The phases of an update.
const (
	waiting   int32 = iota
	storing         // the writer has it
	settled         // the writer has decided its result
	abandoned       // its caller has gone
)

// An update is a change of a document that its writer stores.
type update[S State] struct {
	keys  []string // whose entries change
	force bool     // also store what does not change
	blind bool     // apply does not look at the state: if that is not what the caller knew, u fails with an ErrConflict
	// remove: the file is removed, because what apply returns is the state without a file.
	remove bool
	// seen is not nil in what changes nothing: see look.
	seen *Value
	told func() // with seen: is called by the writer if another process has changed the state since the last look
	// apply returns the next state, and whether it differs. The writer calls it. If it calls it again,
	// with another state whose entries of keys are the same, apply makes the same change.
	apply    func(S) (S, bool, error)
	patience Patience

	phase  atomic.Int32
	done   chan struct{} // closed after the writer has set the fields below
	err    error
	unsure bool // with err: the file may have the change all the same
}

// end gives u its result.
func (u *update[S]) end(err error, unsure bool) {
	u.err, u.unsure = err, unsure
	close(u.done)
}

// abortPoll is how often a caller that waits asks whether it was aborted.
const abortPoll = 10 * time.Millisecond

// retryAfter is how long the writer waits before it stores a state again without what was abandoned.
const retryAfter = time.Second

// store hands u to the writer and waits. unsure reports, with an error, that the file may have u.
func (d *Document[S]) store(u *update[S]) (unsure bool, err error) {
	u.done = make(chan struct{})
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return false, fs.ErrClosed
	}
	d.queue = append(d.queue, u)
	d.startWriter()
	limit, late := d.limit, d.late
	d.mu.Unlock()
	if err := u.wait(limit, d.shared); err != nil {
		return d.abandon(u, err, late)
	}
	return u.unsure, u.err
}

// look hands u to the writer, which makes the state that of the home if the home has had u.seen and the document has not, and waits.
func (d *Document[S]) look(ctx context.Context, u *update[S]) error {
	u.done = make(chan struct{})
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return fs.ErrClosed
	}
	d.queue = append(d.queue, u)
	d.startWriter()
	d.mu.Unlock()
	select {
	case <-u.done:
		return u.err
	case <-ctx.Done():
		_, err := d.abandon(u, ctx.Err(), nil)
		return err
	}
}

// answer ends an update of look.
func (d *Document[S]) answer(u *update[S]) {
	known := u.seen.Data != nil && u.seen.Revision == d.base || u.seen.Data == nil && d.absent
	if !known {
		v, err := d.home.Get(context.Background(), d.key)
		if err != nil {
			d.settle(u, err, false)
			return
		}
		if v.Revision != d.base || (v.Data == nil) != d.absent {
			_ = d.adopt(v) // an error is in the state: see lose
		}
	}
	if u.phase.CompareAndSwap(storing, settled) {
		if d.foreign {
			d.foreign = false
			u.told()
		}
		u.end(nil, false)
	}
}

// wait waits until u is done. It returns an error when the caller waits no longer.
func (u *update[S]) wait(limit func() time.Duration, shared bool) error {
	var timeout, poll <-chan time.Time
	var max time.Duration
	if limit != nil {
		max = limit()
		t := time.NewTimer(max - u.patience.waited())
		defer t.Stop()
		timeout = t.C
	}
	if u.patience.Aborted != nil {
		t := time.NewTicker(abortPoll)
		defer t.Stop()
		poll = t.C
	}
	for {
		select {
		case <-u.done:
			return nil
		case <-timeout:
			return tooLate(max, shared)
		case <-poll:
			if u.patience.Aborted() {
				return ErrAborted
			}
		}
	}
}

// tooLate returns the ErrTimeout of a caller that has waited that long.
func tooLate(limit time.Duration, shared bool) error {
	reason := ErrTimeout
	if shared {
		reason = lateHome{ErrUnreachable}
	}
	return fmt.Errorf("%w: nothing was stored within %v (limits.state_timeout)", reason, limit)
}

// A lateHome is the ErrTimeout of a home that several processes share.
type lateHome struct{ error }

func (e lateHome) Unwrap() []error { return []error{e.error, ErrTimeout} }

// abandon makes u not count, for that reason, unless the writer was faster.
func (d *Document[S]) abandon(u *update[S], reason error, late func()) (unsure bool, err error) {
	if u.phase.CompareAndSwap(waiting, abandoned) {
		d.mu.Lock()
		d.queue = slices.DeleteFunc(d.queue, func(o *update[S]) bool { return o == u })
		d.mu.Unlock()
	} else if unsure = u.phase.CompareAndSwap(storing, abandoned); !unsure {
		<-u.done
		return u.unsure, u.err
	}
	if late != nil && errors.Is(reason, ErrTimeout) {
		late()
	}
	return unsure, reason
}

// startWriter starts the writer, unless it runs.
//
// Preconditions: d.mu is held.
func (d *Document[S]) startWriter() {
	if d.writing == nil {
		d.writing = make(chan struct{})
		go d.write()
	}
}

// write stores what waits, until nothing does. It is the writer.
func (d *Document[S]) write() {
	for {
		d.mu.Lock()
		d.batch = d.takeBatch()
		retry := d.retry
		d.retry = false
		if len(d.batch) == 0 && !retry {
			close(d.writing)
			d.writing = nil
			d.mu.Unlock()
			return
		}
		d.mu.Unlock()
		d.writeBatch(d.batch, retry)
	}
}

// takeBatch takes updates from the queue that do not depend on each other: of each key the first.
//
// Preconditions: d.mu is held.
func (d *Document[S]) takeBatch() (batch []*update[S]) {
	var later []*update[S]
	taken := map[string]bool{}
	for _, u := range d.queue {
		if slices.ContainsFunc(u.keys, func(key string) bool { return taken[key] }) {
			later = append(later, u)
		} else {
			batch = append(batch, u)
		}
		for _, key := range u.keys {
			taken[key] = true
		}
	}
	d.queue = later
	return batch
}

// writeBatch stores the updates, and with retry also a state that differs from the file.
func (d *Document[S]) writeBatch(batch []*update[S], retry bool) {
	var mine []*update[S]
	for _, u := range batch {
		switch {
		case !u.phase.CompareAndSwap(waiting, storing):
		case u.seen != nil:
			d.answer(u)
		default:
			mine = append(mine, u)
		}
	}
	for {
		next, absent, changed := d.state, d.absent, retry
		var stored []*update[S]
		for _, u := range mine {
			s, differs, err := u.apply(next)
			needed := differs || u.force || d.isDirty(u.keys)
			switch {
			case err != nil:
				d.settle(u, err, false)
			case !needed && !changed:
				d.commit(u)
			default:
				next, stored, changed = s, append(stored, u), true
				absent = u.remove
			}
		}
		if !changed {
			return
		}
		err := d.put(next, absent)
		if d.shared && (errors.Is(err, ErrUnsure) || errors.Is(err, ErrConflict)) {
			var other bool
			if other, err = d.resolve(next, absent, err); other {
				mine, retry = d.again(stored, err), false
				continue
			}
		}
		if err != nil {
			d.failed(stored, err, retry)
			return
		}
		d.counts(stored, next, absent)
		return
	}
}

// failed ends updates that could not be stored.
func (d *Document[S]) failed(stored []*update[S], err error, retry bool) {
	unsure := errors.Is(err, ErrUnsure)
	if unsure {
		d.mu.Lock()
		for _, u := range stored {
			d.markDirty(u)
		}
		d.mu.Unlock()
	}
	for _, u := range stored {
		d.settle(u, err, unsure)
	}
	if retry || unsure && d.shared || slices.ContainsFunc(stored, func(u *update[S]) bool { return u.phase.Load() == abandoned }) {
		time.AfterFunc(retryAfter, d.storeAgain)
	}
}

// resolve asks a shared home what it has after a put of next that failed with err. If another process has changed that,
// it is the state then, and resolve returns an ErrConflict. Otherwise it returns the error of the put, nil if it has succeeded.
func (d *Document[S]) resolve(next S, absent bool, err error) (other bool, _ error) {
	v, failed := d.home.Get(context.Background(), d.key)
	if failed != nil {
		return false, err
	}
	if errors.Is(err, ErrUnsure) {
		var b []byte
		if !absent {
			b, _ = Encode(next) // put has done it
		}
		switch {
		case v.Revision == d.base:
			return false, fmt.Errorf("%w: nothing was stored", ErrUnreachable)
		case (v.Data == nil) == absent && bytes.Equal(v.Data, b):
			d.base = v.Revision
			return false, nil
		}
	}
	if err := d.adopt(v); err != nil {
		return false, err
	}
	return true, fmt.Errorf("%w: %s has revision %d", ErrConflict, d.key, v.Revision)
}

// again returns those of the updates that can be applied to another state. The others end with err.
func (d *Document[S]) again(stored []*update[S], err error) (mine []*update[S]) {
	for _, u := range stored {
		switch {
		case u.blind:
			d.settle(u, err, false)
		case u.phase.Load() == storing:
			mine = append(mine, u)
		}
	}
	return mine
}

// counts puts stored updates in force that still count. If some do not, the state without them is
// stored next.
func (d *Document[S]) counts(stored []*update[S], next S, absent bool) {
	var good, gone []*update[S]
	for _, u := range stored {
		if u.phase.CompareAndSwap(storing, settled) && u.patience.commit() {
			good = append(good, u)
		} else {
			gone = append(gone, u)
		}
	}
	d.mu.Lock()
	if len(gone) > 0 {
		next, absent = d.state, d.absent
		for _, u := range good {
			next, _, _ = u.apply(next) // it succeeded before
			absent = u.remove
		}
	}
	d.state, d.absent = next, absent
	d.dirty = nil
	for _, u := range gone {
		d.markDirty(u)
		d.retry = true
	}
	d.mu.Unlock()
	for _, u := range good {
		u.end(nil, false)
	}
	for _, u := range gone {
		if u.phase.Load() == settled { // Commit refused it
			u.end(ErrAborted, true)
		}
	}
}

// storeAgain makes the writer store the state if the file may have another.
func (d *Document[S]) storeAgain() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.dirty) > 0 && !d.closed {
		d.retry = true
		d.startWriter()
	}
}

// put stores s in the home, or removes what it has. Only the writer calls it, and waits as long as the home takes: its
// callers have their Patience.
func (d *Document[S]) put(s S, absent bool) error {
	if d.home == nil {
		return nil
	}
	var b []byte
	if !absent {
		var err error
		if b, err = Encode(s); err != nil {
			return err
		}
	}
	revision, err := d.home.Put(context.Background(), d.key, b, d.base)
	if err == nil {
		d.base = revision
	}
	return err
}

// commit puts u, which the file has already, in force.
func (d *Document[S]) commit(u *update[S]) {
	if !u.phase.CompareAndSwap(storing, settled) {
		return
	}
	var err error
	if !u.patience.commit() {
		err = ErrAborted
	}
	u.end(err, false)
}

// settle ends u with an error, unless its caller has gone.
func (d *Document[S]) settle(u *update[S], err error, unsure bool) {
	if u.phase.CompareAndSwap(storing, settled) {
		u.end(err, unsure)
	}
}

// markDirty notes that the file may have other entries of the keys of u than the state.
//
// Preconditions: d.mu is held.
func (d *Document[S]) markDirty(u *update[S]) {
	if d.dirty == nil {
		d.dirty = map[string]bool{}
	}
	for _, key := range u.keys {
		d.dirty[key] = true
	}
}

// isDirty reports whether the file may have another entry of a key than the state.
func (d *Document[S]) isDirty(keys []string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.ContainsFunc(keys, func(key string) bool { return d.dirty[key] })
}

// isSettled reports whether the file has the entry of the key that the state has, and no update of
// it is in progress.
//
// Preconditions: d.mu is held.
func (d *Document[S]) isSettled(key string) bool {
	has := func(u *update[S]) bool { return slices.Contains(u.keys, key) }
	return !d.dirty[key] && !slices.ContainsFunc(d.queue, has) && !slices.ContainsFunc(d.batch, has)
}
