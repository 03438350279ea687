package lun

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun/state"
)

// Options of a logical unit. The zero value of a field means its default.
type Options struct {
	Identity     state.Identity
	ReadOnly     bool   // in addition to what the store says
	WriteThrough bool   // every write is durable before its status, and no initiator can change that
	Removable    bool   // the medium can be ejected and loaded
	Sanitize     bool   // initiators may have the medium erased by SANITIZE
	Vendor       string // T10 vendor identification, 8 characters; default ISERTGT
	Product      string // 16 characters; default VIRTUAL-DISK
	Revision     string // 4 characters; default 0001
	// Reservations keeps persistent reservations; nil: they do not survive a
	// restart (PTPL_C 0).
	Reservations *Reservations
	// Settings keeps saved mode pages, of which there are none if it is nil, and
	// the states of target port groups.
	Settings *Settings
	// Sanitizations keeps what SANITIZE has begun; nil: the end of the process
	// ends it, which is right if the medium ends with it.
	Sanitizations *Sanitizations
	Events        Events // nil: only lines in the log of slog.Default()
}

// A Unit is a logical unit: a device server and the store below it.
type Unit struct {
	store       backend.Store
	info        backend.Info
	opt         Options
	blocks      atomic.Uint64 // capacity
	shift       uint          // log2 of the block size
	readOnly    bool
	absent      Sense         // why the store is not there yet: see NewAbsent; condNone: it is
	gone        atomic.Bool   // the unit has been taken away from its initiators, and its commands end
	replaced    atomic.Bool   // another unit has its place: see Inventory.Replace
	detached    atomic.Bool   // another unit has the store: see Detach
	unsynced    atomic.Bool   // a sync has failed at or before the end of the store: see Succeed
	predecessor *Unit         // of an absent unit: whose successor it is
	has         flags         // which optional rows of the command set
	mode        atomic.Uint32 // modeWCE, modeSWP: those that are set
	modeDefault uint32
	modeMutable uint32 // bits that MODE SELECT can change
	modeSaved   atomic.Uint32
	modeChanged bool                       // the mode parameters, or the WP bit, differ from those of the unit before
	access      atomic.Pointer[portGroups] // nil: no state has been set
	stopped     atomic.Bool
	ejected     atomic.Bool // set and reset with mu held
	ranges      rangeLocks
	copying     atomic.Int32 // segments of EXTENDED COPY that are being copied to the unit
	number      uint64       // in the order of New, for who takes two of them
	sanitizer   sanitizer
	counts      unitCounts
	storeErrors storeErrorLog

	reservations reservations

	settingsMu sync.Mutex    // held while mode, modeSaved or access change
	kept       settingsEntry // guarded by settingsMu

	mu   sync.Mutex
	seen map[*itl]struct{} // guarded by mu: who is to hear of unit attentions
}

// units counts the logical units that were made.
var units atomic.Uint64

// New makes a logical unit. The store is the unit's from then on.
func New(s backend.Store, o Options) (*Unit, error) {
	for _, f := range []struct {
		v         *string
		def, what string
		n         int
	}{{&o.Vendor, "ISERTGT", "vendor", 8}, {&o.Product, "VIRTUAL-DISK", "product", 16}, {&o.Revision, "0001", "revision", 4}} {
		if *f.v == "" {
			*f.v = f.def
		}
		if len(*f.v) > f.n || !printable(*f.v) {
			return nil, fmt.Errorf("%s %q: want at most %d printable ASCII characters", f.what, *f.v, f.n)
		}
	}
	if o.Events == nil {
		o.Events = logEvents{slog.Default()}
	}
	info := s.Info()
	if err := info.Validate(); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	u := &Unit{store: s, info: info, opt: o, readOnly: o.ReadOnly || info.ReadOnly, seen: map[*itl]struct{}{}, number: units.Add(1)}
	u.shift = uint(bits.TrailingZeros32(info.BlockSize))
	u.blocks.Store(uint64(info.Size) >> u.shift)
	u.modeDefault, u.modeMutable = modesOf(info, o)
	if err := u.restoreSettings(); err != nil {
		return nil, err
	}
	for flag, has := range map[flags]bool{
		thin:        u.isThin(),
		atomicWrite: info.AtomicWrite > 0,
		removable:   o.Removable,
		sanitizes:   o.Sanitize,
	} {
		if has {
			u.has |= flag
		}
	}
	if err := u.restoreReservations(); err != nil {
		return nil, err
	}
	if err := u.resumeSanitize(); err != nil {
		return nil, err
	}
	return u, nil
}

func printable(s string) bool {
	for _, c := range []byte(s) {
		if c < 0x20 || c > 0x7e {
			return false
		}
	}
	return true
}

// Size is the capacity in octets.
func (u *Unit) Size() int64 { return int64(u.blocks.Load() << u.shift) }

// Info is that of the store, with the size that it has now.
func (u *Unit) Info() backend.Info {
	info := u.info
	info.Size = u.Size()
	return info
}

// Identity is who the unit is.
func (u *Unit) Identity() state.Identity { return u.opt.Identity }

// Status is "ready", or why the medium cannot be used, in a few words.
func (u *Unit) Status() string {
	switch k := u.readiness(); {
	case u.absent == condBecomingReady:
		return "store is being opened"
	case u.Absent():
		return "store is absent"
	case u.sanitizer.state.Load() == sanitizeRunning:
		return "sanitize in progress"
	case k == condSanitizeFailed:
		return "sanitize failed"
	case k == condNoMedium:
		return "medium ejected"
	case k == condNotReadyStopped:
		return "stopped"
	}
	return "ready"
}

// Grow takes notice of a medium that has grown, and lets all initiators hear of
// it. It tells whether that is so.
func (u *Unit) Grow() (grown bool, err error) {
	g, ok := u.store.(backend.Grower)
	if !ok {
		return false, nil
	}
	u.sanitizer.mu.Lock() // none begins, with the size as it was
	defer u.sanitizer.mu.Unlock()
	if u.sanitizer.state.Load() == sanitizeRunning {
		return false, errSanitizing
	}
	size, err := g.Grow()
	if err != nil {
		return false, err
	}
	blocks := uint64(size) >> u.shift
	if blocks <= u.blocks.Load() {
		return false, nil
	}
	u.blocks.Store(blocks)
	u.raise(attentionCapacity, nil)
	return true, nil
}

// Resize gives the unit and its store another size, a multiple of the block size in
// octets, and lets all initiators hear of it. What is behind the end of a smaller
// unit is lost. A unit of that size stays as it is. An error leaves the size as it was,
// unless it says otherwise.
func (u *Unit) Resize(size int64) error {
	r, ok := u.store.(backend.Resizer)
	switch {
	case !ok:
		return backend.ErrFixedSize
	case u.readOnly:
		return backend.ErrReadOnly
	case size <= 0 || size&int64(u.info.BlockSize-1) != 0:
		return fmt.Errorf("size %d: want a positive multiple of the block size %d", size, u.info.BlockSize)
	}
	u.sanitizer.mu.Lock() // none begins, with the size as it was
	defer u.sanitizer.mu.Unlock()
	if u.sanitizer.state.Load() == sanitizeRunning {
		return errSanitizing
	}
	old, next := u.blocks.Load(), uint64(size)>>u.shift
	if next < old { // before there is less: commands that come now are refused
		u.blocks.Store(next)
	}
	err := r.Resize(size)
	next = uint64(u.store.Info().Size) >> u.shift // which after an error may be either
	u.blocks.Store(next)
	if next != old {
		u.raise(attentionCapacity, nil)
	}
	return err
}

// allocateStep is how many octets are allocated at once: a Resize waits for that.
const allocateStep = 128 << 20

// Allocate has the medium take space for all octets from that one to the end, as it is
// when it begins, while initiators use the unit; report hears how far it has come, often.
// When ctx ends it stops soon, with the cause, and what it has taken stays.
func (u *Unit) Allocate(ctx context.Context, from int64, report func(backend.Progress)) error {
	a, ok := u.store.(backend.Allocator)
	if !ok {
		return backend.ErrNoAllocate
	}
	p := backend.Progress{Phase: backend.Preallocating, Total: max(u.Size()-from, 0)}
	for p.Done < p.Total {
		n := min(p.Total-p.Done, allocateStep)
		if err := a.Allocate(from+p.Done, n); err != nil {
			return err
		}
		p.Done += n
		report(p)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}
	return nil
}

// sync is that of the store, and like it fails once one has failed.
func (u *Unit) sync() error {
	if u.unsynced.Load() {
		return backend.ErrUnsynced
	}
	return u.store.Sync()
}

func (u *Unit) reset(attention int) {
	u.stopped.Store(false)
	u.dropReserve(nil)
	// An error of the sync that this may take is not lost: the store remembers it.
	u.settingsMu.Lock()
	_ = u.setModes(u.modeMutable, u.modeSaved.Load())
	u.settingsMu.Unlock()
	u.mu.Lock()
	defer u.mu.Unlock()
	for l := range u.seen {
		l.prevents = false
	}
	u.raiseLocked(attention, nil)
}

// notStored reports that a state file could not be replaced.
func (u *Unit) notStored(err error) {
	u.opt.Events.StateNotStored(StateNotStoredEvent{u.opt.Identity.Serial, err})
}

// InheritFrom makes u, which nobody knows yet, the successor of a unit of the same identity. To
// open a store anew is neither a loss of power nor a reset: registrations and persistent
// reservations remain (SPC-4, section 5.13.5), and so do the mode parameters and the states
// of target port groups that initiators have set and not saved. Who has disabled the cache,
// above all, counts on that. A sync that has failed, the one when the old store closed
// included, is as final as in the store: what was written before may be lost. The old unit,
// which has been replaced, takes no more reservations. An absent unit hands all of that on.
func (u *Unit) InheritFrom(old *Unit) {
	if old.Absent() {
		old = old.predecessor
	}
	if old == nil || u.opt.Identity != old.opt.Identity {
		return
	}
	if u.Absent() {
		u.predecessor = old
		return
	}
	if old.unsynced.Load() {
		u.opt.Events.SyncsFail(SyncsFailEvent{u.opt.Identity.Serial})
		u.unsynced.Store(true)
	}
	r := &old.reservations
	r.mu.Lock()
	s := r.persistent
	r.handedOver = true
	r.mu.Unlock()
	next := &u.reservations
	next.mu.Lock()
	next.persistent = s
	next.publish()
	next.mu.Unlock()

	both, was := u.modeMutable&old.modeMutable, old.mode.Load()
	u.mode.Store(u.mode.Load()&^both | was&both)
	u.modeChanged = u.mode.Load() != was || u.readOnly != old.readOnly
	u.access.Store(old.access.Load())
}

// CutOff makes commands that are under way fail as soon as the store is closed as
// those do that come from now on: with LOGICAL UNIT NOT SUPPORTED. It is for a unit
// that no inventory has any more.
func (u *Unit) CutOff() { u.gone.Store(true) }

// Detach ends a sanitize and returns the store, open, of a unit that has been replaced.
// Commands that the unit still has change nothing there any more.
func (u *Unit) Detach() backend.Store {
	u.sanitizer.close()
	u.ranges.exclude(^stripeSet(0))
	u.detached.Store(true)
	u.ranges.admit(^stripeSet(0))
	return u.store
}

// Close ends a sanitize, syncs and closes the store.
func (u *Unit) Close() error {
	u.sanitizer.close()
	err := u.store.Close()
	if err != nil && !errors.Is(err, backend.ErrClosed) {
		u.unsynced.Store(true)
	}
	return err
}
