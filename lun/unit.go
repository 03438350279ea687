package lun

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/bits"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/checked"
	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/lun/fair"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/security/limits"
)

// Options configure a logical unit. The zero value of a field means its default.
type Options struct {
	Identity     state.Identity
	Serial       string // of page 80h; default: Identity.Serial
	NAA          []byte // of page 83h, 8 or 16 bytes; default: Identity.NAA
	ReadOnly     bool   // even if the store can be written
	WriteThrough bool   // every write is durable before its status; initiators cannot change that
	Removable    bool   // the medium can be ejected and loaded
	Sanitize     bool   // initiators may erase the medium by SANITIZE
	// ImplicitAccess says that SetAccess sets the states of target port groups, not SET TARGET PORT GROUPS (SPC-4, section 5.11.2.7).
	ImplicitAccess bool
	Vendor         string // T10 vendor identification, 8 characters; default ISERTGT
	Product        string // 16 characters; default VIRTUAL-DISK
	Revision       string // 4 characters; default 0001
	// Reservations keeps persistent reservations; nil: they do not survive a restart (PTPL_C 0).
	Reservations *Reservations
	// Shared makes persistent reservations the same on all gateways of a group; Reservations is nil then. See NewSharedReservations.
	Shared *SharedReservations
	// Settings keeps saved mode pages, the states of target port groups, and identifying
	// information; nil: no mode page can be saved. Those of OpenSharedSettings require ImplicitAccess, and
	// that writes are durable at once.
	Settings *Settings
	// Sanitizations keeps what SANITIZE began; nil: the end of the process ends it,
	// which is right if the medium ends, too. With those of OpenSharedSanitizations, ResumeSanitize continues it.
	Sanitizations *Sanitizations
	// SyncFailures keeps that a sync has failed; nil: the end of the process ends that, too.
	SyncFailures *SyncFailures
	// ThresholdAvailable and ThresholdUsed are thresholds of the space of a thin unit, in bytes; 0: none. See SetThresholds.
	ThresholdAvailable, ThresholdUsed int64
	Name                              string // of the unit in messages about limits; default: Identity.Serial
	// Calls is what the units of a process share to call their stores; nil: this unit shares with none.
	Calls *fair.Process
	// Registrations bounds how many registrations of persistent reservations an initiator makes; nil: a
	// Limit with the default bound.
	Registrations *limits.Limit
	// Tokens has the ROD tokens of all units that WRITE USING TOKEN copies between; nil: those of this unit.
	Tokens *Tokens
	// StoreTimeout is how long a call of the store may take before the store counts as hung; nil: the
	// default of limits.
	StoreTimeout *limits.Limit
	// ViewWait is how long a change waits for initiators to acknowledge READs of the same blocks that leave from the page cache; default 100 ms.
	ViewWait time.Duration
	Events   func(Event) // returns soon and does not call the Unit; nil: only lines in the log of slog.Default()
}

// A Unit is a logical unit: a device server and the store below it.
type Unit struct {
	store         backend.Store
	lender        backend.Lender  // the store, or nil
	splicer       backend.Splicer // the store, or nil
	views         viewList
	gate          *fair.Gate // before the store: see call.go
	info          backend.Info
	opt           Options
	blocks        atomic.Uint64 // capacity
	shift         uint          // log2 of the block size
	readOnly      bool
	absent        Sense         // why the store is missing: see NewAbsent; condNone: it is there
	gone          atomic.Bool   // the initiators lost the unit, and its commands end
	replaced      atomic.Bool   // another unit took its place: see Inventory.Replace
	detached      atomic.Bool   // another unit has the store: see Detach
	health        atomic.Uint32 // see SetHealth
	lastError     atomic.Pointer[StoreError]
	unsynced      atomic.Bool // a sync failed, of a predecessor or before the restart: see InheritFrom
	failure       failureRecord
	predecessor   *Unit         // of an absent unit: the unit that it inherits from
	has           flags         // the optional rows of the command set
	mode          atomic.Uint32 // modeWCE and others, as set
	modeDefault   atomic.Uint32 // written with settingsMu held
	modeMutable   uint32        // bits that MODE SELECT can change
	modeSaved     atomic.Uint32
	levels        atomic.Uint64 // thresholds of initiators: levels
	levelsSaved   atomic.Uint64
	levelsDefault atomic.Uint64
	tags          atomic.Pointer[protection.AppTags] // of the Application Tag mode page; nil: none
	tagsSaved     atomic.Pointer[protection.AppTags]
	space         spaceWatch
	modeChanged   bool                             // the mode parameters, or the WP bit, differ from those of the predecessor
	known         *knownSettings                   // of Options.Settings that gateways share: what initiators know; nil: nothing else
	access        atomic.Pointer[portGroups]       // nil: no state was set
	settles       atomic.Pointer[time.Time]        // when states that SetAccess has announced should have come; nil: it has announced none
	clock         atomic.Pointer[deviceClock]      // nil: that of the machine
	identifying   atomic.Pointer[identifyingEntry] // nil: none
	logBases      atomic.Pointer[logBases]         // nil: LOG SELECT has reset nothing
	stopped       atomic.Bool
	ejected       atomic.Bool // set and reset with mu held
	ranges        rangeLocks
	copying       copyCount                  // steps of copies in progress to the unit, and copies that continue after commands for it
	tokens        atomic.Pointer[unitTokens] // for data of the unit; nil: none; written with opt.Tokens.mu held
	noTokens      bool                       // guarded by opt.Tokens.mu: the unit makes no tokens any longer
	number        uint64                     // in the order of New, for commands that lock two units
	watch         storeWatch
	detachedIn    atomic.Int32 // commands, and calls by aside, that nobody waits for: see detach.go
	sanitizer     sanitizer
	scrubber      scrubber
	counts        unitCounts
	storeErrors   storeErrorLog
	faults        atomic.Pointer[injected] // nil: none
	noFaults      atomic.Bool              // the unit ends: see stopFaults

	reservations reservations
	group        *member // nil: no other gateway has the unit

	settings   turn       // of changes that are stored in Options.Settings
	settingsMu sync.Mutex // held while mode, modeSaved, access or identifying change, but not while they are stored

	mu   sync.Mutex
	seen map[*itl]struct{} // guarded by mu: gets unit attentions
	// changedBy has the initiators that changed settings last. It is guarded by mu.
	changedBy map[string]string

	inquiryChanged bool // the protection type differs from that of the predecessor
	protection     protection.Type
	protected      *checked.Store // the store, if it has protection information; else nil
}

// units counts the logical units that New made.
var units atomic.Uint64

// New returns a logical unit over a store, which belongs to the unit from then on.
func New(s backend.Store, o Options) (*Unit, error) {
	for _, f := range []struct {
		v         *string
		def, what string
		n         int
	}{
		{&o.Vendor, "ISERTGT", "vendor", 8},
		{&o.Product, "VIRTUAL-DISK", "product", 16},
		{&o.Revision, "0001", "revision", 4},
	} {
		*f.v = cmp.Or(*f.v, f.def)
		if len(*f.v) > f.n || !printable(*f.v) {
			return nil, fmt.Errorf("%s %q: want at most %d printable ASCII characters", f.what, *f.v, f.n)
		}
	}
	if o.Registrations == nil {
		o.Registrations = &limits.New().Registrations
	}
	if o.Tokens == nil {
		o.Tokens = NewTokens(limits.New())
	}
	if o.StoreTimeout == nil {
		o.StoreTimeout = &limits.New().StoreTimeout
	}
	if o.Events == nil {
		o.Events = func(e Event) { e.Log(slog.Default()) }
	}
	if o.Shared != nil && o.Reservations != nil {
		return nil, errors.New("reservations: Options.Reservations and Options.Shared exclude each other")
	}
	if o.Settings.Shared() && !o.ImplicitAccess {
		return nil, errors.New("settings: those that gateways share require Options.ImplicitAccess")
	}
	info := s.Info()
	if err := info.Validate(); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	if o.Settings.Shared() && info.VolatileCache && !o.WriteThrough {
		return nil, errors.New("settings: those that gateways share require a store without a volatile cache, or Options.WriteThrough")
	}
	if o.Calls == nil {
		o.Calls = fair.NewProcess(nil)
	}
	o.ViewWait = cmp.Or(o.ViewWait, viewWait)
	u := &Unit{
		store: s, info: info, opt: o, readOnly: o.ReadOnly || info.ReadOnly,
		seen: map[*itl]struct{}{}, number: units.Add(1), gate: o.Calls.NewGate(cmp.Or(o.Name, o.Identity.Serial), !info.Nonblocking),
		settings: newTurn(),
	}
	u.reservations.turn = newTurn()
	u.lender, _ = s.(backend.Lender)
	u.splicer, _ = s.(backend.Splicer)
	if c, ok := s.(*checked.Store); ok {
		u.withProtection(c)
	}
	u.shift = uint(bits.TrailingZeros32(info.BlockSize))
	u.blocks.Store(uint64(info.Size) >> u.shift)
	u.initSpace()
	u.initModes()
	if err := u.restoreSettings(); err != nil {
		return nil, err
	}
	for flag, has := range map[flags]bool{
		thin:        u.isThin(),
		atomicWrite: info.AtomicWrite > 0,
		removable:   o.Removable,
		sanitizes:   o.Sanitize,
		setsAccess:  !o.ImplicitAccess,
		aloneOnly:   o.Shared == nil,
	} {
		if has {
			u.has |= flag
		}
	}
	if err := u.restoreFailure(); err != nil {
		return nil, err
	}
	if err := u.restoreReservations(); err != nil {
		return nil, err
	}
	if o.Shared != nil {
		u.group = newMember(o.Shared, u)
	}
	if !o.Sanitizations.Shared() { // see ResumeSanitize
		err := u.resumeSanitize()
		if err != nil {
			u.group.leave()
			return nil, err
		}
	}
	return u, nil
}

// printable reports whether s consists of printable ASCII characters.
func printable(s string) bool {
	return !strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r > 0x7e })
}

// Size returns the capacity in bytes.
func (u *Unit) Size() int64 { return int64(u.blocks.Load() << u.shift) }

// Info returns the Info of the store with the current size.
func (u *Unit) Info() backend.Info {
	info := u.info
	info.Size = u.Size()
	return info
}

// A Naming is what a unit is called towards initiators.
type Naming struct {
	Serial          string
	NAA             []byte
	Vendor, Product string
}

// Naming returns what the unit is called towards initiators.
func (u *Unit) Naming() Naming {
	return Naming{u.serial(), u.naa(), u.opt.Vendor, u.opt.Product}
}

func (u *Unit) serial() string { return cmp.Or(u.opt.Serial, u.opt.Identity.Serial) }

func (u *Unit) naa() []byte {
	if u.opt.NAA == nil {
		return u.opt.Identity.NAA[:]
	}
	return u.opt.NAA
}

// Identity returns the permanent name of the unit, by which state files know it.
func (u *Unit) Identity() state.Identity { return u.opt.Identity }

// Status returns "ready", or in a few words why the medium cannot be used.
func (u *Unit) Status() string {
	switch k := u.readiness(); {
	case u.absent == condBecomingReady:
		return "store is being opened"
	case u.Absent():
		return "store is absent"
	case u.heldUp():
		return u.heldUpStatus()
	case u.sanitizer.state.Load() == sanitizeRunning && u.sanitizer.formats.Load():
		return "format in progress"
	case u.sanitizer.state.Load() == sanitizeRunning:
		return "sanitize in progress"
	case k == condSanitizeFailed:
		return "sanitize failed"
	case k == condFormatCorrupted:
		return "format failed"
	case k == condNoMedium:
		return "medium ejected"
	case k == condNotReadyStopped:
		return "stopped"
	}
	return "ready"
}

// Grow reads the size of a medium that may have grown, and notifies all initiators if it has. It
// reports whether it has.
func (u *Unit) Grow() (grown bool, err error) {
	g, ok := u.store.(backend.Grower)
	if !ok {
		return false, nil
	}
	u.sanitizer.mu.Lock() // no sanitize begins with the old size
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
	u.raise(condCapacityChanged, nil)
	return true, nil
}

// Resize gives the unit and its store another size, a multiple of the block size in bytes, and
// notifies all initiators. A smaller unit loses the data after its new end. A unit of that size
// stays as it is. An error leaves the size as it was, unless it says otherwise.
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
	u.sanitizer.mu.Lock() // no sanitize begins with the old size
	defer u.sanitizer.mu.Unlock()
	if u.sanitizer.state.Load() == sanitizeRunning {
		return errSanitizing
	}
	old, next := u.blocks.Load(), uint64(size)>>u.shift
	if next < old { // first: new commands beyond the new end are refused
		u.blocks.Store(next)
	}
	if next < old {
		u.changing(int64(next<<u.shift), math.MaxInt64-int64(next<<u.shift))
	}
	err := u.checkSync(r.Resize(size))
	next = uint64(u.store.Info().Size) >> u.shift // after an error, old or new
	u.blocks.Store(next)
	if next != old {
		u.raise(condCapacityChanged, nil)
	}
	return err
}

// allocateStep is how many bytes Allocate allocates at once: a Resize waits that long.
const allocateStep = 128 << 20

// Allocate makes the medium take space for all bytes from that one to its present end, while
// initiators use the unit, and returns when the allocation is on stable storage. It often calls report
// with its progress. When ctx ends it stops soon and returns the cause; the medium keeps the space that
// it has taken.
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
	if p.Total == 0 {
		return nil
	}
	return u.Sync()
}

// reset does what a reset does beyond the end of the tasks, and raises the attention.
func (u *Unit) reset(attention Sense) {
	u.stopped.Store(false)
	all := func(*Nexus) bool { return true }
	u.dropReserveOf(all)
	u.endBackground(all)
	// This may sync. An error of that is not lost: the store keeps failing.
	if now, saved := u.current(), u.saved(); (now.modes^saved.modes)&u.modeMutable != 0 || now.levels != saved.levels || now.tags != saved.tags {
		u.aside(func() {
			u.settingsMu.Lock()
			defer u.settingsMu.Unlock()
			u.levels.Store(u.levelsSaved.Load())
			u.tags.Store(u.tagsSaved.Load())
			_ = u.setModes(nil, u.modeMutable, u.modeSaved.Load())
			u.useTags()
		})
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for l := range u.seen {
		l.prevents = false
		l.echo.set(nil)
	}
	u.forgetChangedBy(true, false) // as saved
	delete(u.changedBy, settingMedium)
	u.raiseLocked(attention, nil)
}

// notStored reports that a state file could not be replaced.
func (u *Unit) notStored(err error) {
	u.opt.Events(StateNotStoredEvent{u.opt.Identity.Serial, err})
}

// InheritFrom makes u, which nobody knows yet, the successor of a unit of the same identity. To
// reopen a store is neither a loss of power nor a reset. So registrations and persistent
// reservations remain (SPC-4, section 5.13.5), and so do the mode parameters, identifying information
// and the states of target port groups that initiators set and did not save. An initiator that disabled the cache
// counts on that. A failed sync, also the one when the old store closed, is as final as in the
// store: what was written before may be lost. The old unit, which was replaced, takes no more
// reservations. An absent unit passes all of that on.
func (u *Unit) InheritFrom(old *Unit) {
	if old.Absent() {
		old = old.predecessor
	}
	if old == nil || u.opt.Identity != old.opt.Identity {
		return
	}
	if u.Absent() {
		u.predecessor = old
		u.mode.Store(old.mode.Load() & (modeDSense | modeTST))
		return
	}
	u.inheritFailure(old)
	u.inheritReservations(old)
	u.addLeft(old.views.ranges())

	if u.opt.Settings.Shared() { // all that initiators set is saved, and perhaps changed since
		u.known = &knownSettings{old.current(), old.identifying.Load()}
		u.modeChanged = u.readOnly != old.readOnly
		u.access.Store(old.access.Load())
		u.clock.Store(old.clock.Load())
		return
	}
	both, was := u.modeMutable&old.modeMutable, old.mode.Load()
	if u.hasThresholds() && old.hasThresholds() {
		if old.newThresholdsEntry(was, levels(old.levels.Load())) == nil {
			both &^= provisioningModes // they follow the configuration
		} else {
			u.levels.Store(old.levels.Load())
		}
	}
	if both&modeATMPE != 0 {
		u.tags.Store(old.tags.Load())
	}
	u.mode.Store(u.mode.Load()&^both | was&both)
	u.useTags()
	u.cross(old.crossed())
	u.modeChanged = u.mode.Load() != was || u.readOnly != old.readOnly || u.levels.Load() != old.levels.Load() || tagsOf(&u.tags) != tagsOf(&old.tags)
	u.inquiryChanged = u.protection != old.protection
	u.access.Store(old.access.Load())
	u.clock.Store(old.clock.Load())
	u.identifying.Store(old.identifying.Load())
}

// inheritReservations makes the reservations of old those of u, unless u has those of other gateways already.
func (u *Unit) inheritReservations(old *Unit) {
	r, next := &old.reservations, &u.reservations
	r.mu.Lock()
	defer r.mu.Unlock()
	r.handedOver = true
	next.mu.Lock()
	defer next.mu.Unlock()
	if u.group != nil && u.group.begun {
		return
	}
	u.group.inherit(old.group)
	next.persistent = r.persistent
	next.publish()
}

// CutOff makes commands in progress fail with LOGICAL UNIT NOT SUPPORTED as soon as the store is
// closed, like new ones. It is for a unit that no inventory has any longer.
func (u *Unit) CutOff() { u.gone.Store(true) }

// Detach stops a sanitize and returns the store, open, of a unit that was replaced. Commands in
// progress in the unit change nothing in the store from then on.
func (u *Unit) Detach() backend.Store {
	u.stopFaults()
	u.sanitizer.close()
	u.scrubber.close()
	all := u.ranges.exclude(allStripes)
	u.detached.Store(true)
	all.release()
	u.shutTokens()
	u.gate.Retire()
	u.group.leave()
	return u.store
}

// Close stops a sanitize, then syncs and closes the store.
func (u *Unit) Close() error {
	u.stopFaults()
	u.sanitizer.close()
	u.gate.Shut()
	u.shutTokens()
	u.scrubber.close()
	err := u.store.Close()
	u.group.leave()
	if err != nil && !errors.Is(err, backend.ErrClosed) {
		u.unsynced.Store(true)
		_ = u.checkSync(err)
		if err := u.keepFailure(); u.SyncFailure() != nil && err != nil { // the process may end when all stores are closed
			u.notStored(err)
		}
	}
	return err
}
