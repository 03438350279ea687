// Package lun is the SCSI device server: logical units over the stores of
// package backend, driven by one table of commands (commands.go).
//
// A command goes through Begin, then Consume for its data-out or Produce for
// its data-in, as often as the transport likes, then End. Commands run at the
// same time on as many goroutines as there are, and wait for nothing but the store.
package lun

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/iser-target/iser-target/backend"
)

// MaxParameterList is the longest parameter list of a command, in octets.
const MaxParameterList = 65536

// maxLUN is the largest LUN of flat space addressing (SAM-5, section 4.7.7).
const maxLUN = 1<<14 - 1

// Options of a logical unit. The zero value of a field means its default.
type Options struct {
	Identity     Identity
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
	Logger        *slog.Logger // slog.Default()
}

// A Unit is a logical unit: a device server and the store below it.
type Unit struct {
	store       backend.Store
	info        backend.Info
	opt         Options
	blocks      atomic.Uint64 // capacity
	shift       uint          // log2 of the block size
	readOnly    bool
	absent      cond          // why the store is not there yet: see NewAbsent; condNone: it is
	gone        atomic.Bool   // the unit has been taken away from its initiators, and its commands end
	replaced    atomic.Bool   // another unit has its place: see Inventory.Replace
	detached    atomic.Bool   // another unit has the store: see Detach
	unsynced    atomic.Bool   // a sync has failed at or before the end of the store: see Succeed
	before      *Unit         // of an absent unit: whose successor it is
	has         flags         // which optional rows of the command set
	mode        atomic.Uint32 // modeWCE, modeSWP: those that are set
	modeDefault uint32
	modeMutable uint32 // bits that MODE SELECT can change
	modeSaved   atomic.Uint32
	modeNews    bool                       // the mode parameters, or the WP bit, differ from those of the unit before
	access      atomic.Pointer[portGroups] // nil: no state has been set
	stopped     atomic.Bool
	ejected     atomic.Bool // set and reset with mu held
	ranges      rangeLocks
	copying     atomic.Int32 // segments of EXTENDED COPY that are being copied to the unit
	number      uint64       // in the order of New, for who takes two of them
	sanitizer   sanitizer
	counts      unitCounts
	trouble     trouble

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
	if o.Logger == nil {
		o.Logger = slog.Default()
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

// logUnkept says why a state file has not been replaced. The initiator, whose command
// has failed, is told nothing about files.
func (u *Unit) logUnkept(err error) {
	u.opt.Logger.Error("state not stored", "event", "medium", "naa", u.opt.Identity.Serial, "reason", err)
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

// sync is that of the store, and like it fails once one has failed.
func (u *Unit) sync() error {
	if u.unsynced.Load() {
		return backend.ErrUnsynced
	}
	return u.store.Sync()
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

// An Inventory is the logical units of one SCSI target device, which all of its
// target ports lead to.
type Inventory struct {
	ports atomic.Pointer[[]uint16] // relative target port identifiers, ascending; a new slice takes its place

	mu      sync.RWMutex
	ids     []uint16 // ascending
	units   []*Unit
	masks   []Mask // nil: everybody has ReadWrite
	nexuses map[*Nexus]struct{}
}

// Access is what an initiator may do with a logical unit.
type Access int

const (
	ReadWrite Access = iota
	ReadOnly         // the medium is write protected
	NoAccess         // there is no such logical unit
)

// A Mask is the access of the initiator with that name, which is normalised. It
// is asked once for every nexus.
type Mask func(initiator string) Access

// NewInventory makes an empty inventory. The target is reached by portal groups
// with these tags, 1 to 65535, or else by one with tag 1.
func NewInventory(tpgts ...uint16) *Inventory {
	if len(tpgts) == 0 {
		tpgts = []uint16{1}
	}
	inv := &Inventory{nexuses: map[*Nexus]struct{}{}}
	inv.setPorts(tpgts)
	return inv
}

// Add makes u the logical unit with that LUN, 0 to 16383. Initiators that are
// there already find it, and hear that there is something to find.
func (inv *Inventory) Add(id uint16, u *Unit) error { return inv.AddMasked(id, u, nil) }

// AddMasked is Add for some initiators only.
func (inv *Inventory) AddMasked(id uint16, u *Unit, m Mask) error {
	if id > maxLUN {
		return fmt.Errorf("LUN %d is above %d", id, maxLUN)
	}
	inv.mu.Lock()
	defer inv.mu.Unlock()
	i, taken := slices.BinarySearch(inv.ids, id)
	if taken {
		return fmt.Errorf("LUN %d is used twice", id)
	}
	inv.ids = slices.Insert(inv.ids, i, id)
	inv.units = slices.Insert(inv.units, i, u)
	inv.masks = slices.Insert(inv.masks, i, m)
	for n := range inv.nexuses {
		if l := inv.show(n, i); l != nil {
			n.changeList(slices.Insert(slices.Clone(n.list()), n.search(id), l))
		}
	}
	return nil
}

// Remove takes the logical unit with that LUN away from all initiators, and
// returns it, or nil if there is none. Commands that have begun go on until the
// caller closes it.
func (inv *Inventory) Remove(id uint16) *Unit {
	inv.mu.Lock()
	defer inv.mu.Unlock()
	i, ok := slices.BinarySearch(inv.ids, id)
	if !ok {
		return nil
	}
	u := inv.units[i]
	inv.ids = slices.Delete(inv.ids, i, i+1)
	inv.units = slices.Delete(inv.units, i, i+1)
	inv.masks = slices.Delete(inv.masks, i, i+1)
	for n := range inv.nexuses {
		list := n.list()
		at := n.search(id)
		if at == len(list) || list[at].id != id {
			continue
		}
		list[at].leave()
		n.changeList(slices.Delete(slices.Clone(list), at, at+1))
	}
	return u
}

// show makes the view of the i-th unit for n, or nil if the mask hides it.
//
// Preconditions: mu is held.
func (inv *Inventory) show(n *Nexus, i int) *itl {
	access := ReadWrite
	if mask := inv.masks[i]; mask != nil {
		access = mask(n.name.initiator.name)
	}
	if access == NoAccess {
		n.blind.Store(true)
		return nil
	}
	u := inv.units[i]
	l := &itl{nexus: n, id: inv.ids[i], unit: u}
	l.readOnly.Store(access == ReadOnly)
	l.raise(attentionPowerOn)
	u.mu.Lock()
	defer u.mu.Unlock()
	u.seen[l] = struct{}{}
	return l
}

// leave ends what a nexus has with a unit: the other half of show.
func (l *itl) leave() {
	l.unit.mu.Lock()
	delete(l.unit.seen, l)
	l.unit.mu.Unlock()
	l.unit.dropReserve(l.nexus) // behind that: see Unit.reserve
}

// Units are the logical units in the order of their LUNs.
func (inv *Inventory) Units() []*Unit {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	return slices.Clone(inv.units)
}

// Close closes all logical units.
func (inv *Inventory) Close() error {
	var errs []error
	for _, u := range inv.Units() {
		errs = append(errs, u.Close())
	}
	return errors.Join(errs...)
}

// decodeLUN is the LUN that a LUN field addresses: peripheral device addressing
// on bus 0 or flat space addressing, on one level (SAM-5, section 4.7).
func decodeLUN(f [8]byte) (id uint16, ok bool) {
	if [6]byte(f[2:]) != [6]byte{} {
		return 0, false
	}
	switch f[0] >> 6 {
	case 0:
		return uint16(f[1]), f[0] == 0
	case 1:
		return uint16(f[0]&0x3f)<<8 | uint16(f[1]), true
	}
	return 0, false
}

// EncodeLUN is the LUN field of a PDU that addresses a LUN (SAM-5, section 4.7);
// small LUNs get the older form.
func EncodeLUN(id uint16) (f [8]byte) {
	if f[0], f[1] = byte(id>>8), byte(id); id > 0xff {
		f[0] |= 1 << 6
	}
	return f
}

// Port names both ends of an I_T nexus. A portal group is a target port (RFC
// 7143, section 4.4.2), and its tag is the relative target port identifier.
type Port struct {
	InitiatorName string
	ISID          [6]byte
	TargetName    string
	TPGT          uint16 // one of those of the inventory
}

// A Nexus is the relation between an initiator port and a target port (I_T
// nexus).
type Nexus struct {
	inv       *Inventory
	port      Port
	name      nexusName
	luns      atomic.Pointer[[]*itl] // ascending by id; a new slice takes its place
	blind     atomic.Bool            // there are more, which a mask hides
	level     uint8                  // iSCSIProtocolLevel
	transport Transport
	shard     uint8 // of the counts of units
	counts    *nexusCounts
	abort     atomic.Pointer[func(lun [8]byte, except *Command)]
	event     atomic.Pointer[func(lun [8]byte, sense []byte)]
}

// An itl is a logical unit as one initiator port sees it (I_T_L nexus).
type itl struct {
	nexus    *Nexus
	id       uint16
	unit     *Unit
	readOnly atomic.Bool   // the mask says so
	due      atomic.Uint32 // bit i: the initiator has not heard of attentions[i]

	prevents bool // guarded by unit.mu: the medium must not be removed
	copies   copies
}

// attentions are the unit attentions there are; the first is reported first.
var attentions = [...]cond{
	attentionPowerOn:                condPowerOn,
	attentionReset:                  condReset,
	attentionClearedByTransport:     condClearedByTransport,
	attentionMedium:                 condMediumChanged,
	attentionMode:                   condModeChanged,
	attentionCapacity:               condCapacityChanged,
	attentionLUNs:                   condLUNsChanged,
	attentionAccess:                 condAccessChanged,
	attentionCleared:                condCleared,
	attentionReservationsPreempted:  condReservationsPreempted,
	attentionReservationsReleased:   condReservationsReleased,
	attentionRegistrationsPreempted: condRegistrationsPreempted,
}

const (
	attentionPowerOn = iota
	attentionReset
	attentionClearedByTransport
	attentionMedium
	attentionMode
	attentionCapacity
	attentionLUNs
	attentionAccess
	attentionCleared
	attentionReservationsPreempted
	attentionReservationsReleased
	attentionRegistrationsPreempted
)

// reported are the attentions about what initiators keep in mind of a unit, which
// may be wrong now although they have nothing to ask it: see OnEvent.
// Of attentionLUNs, which all units of a nexus have at the same time, one is enough:
// see changeList.
const reported = 1<<attentionMedium | 1<<attentionMode | 1<<attentionCapacity

// NewNexus makes a nexus with the units that the masks let the initiator see. The
// first command for each of them meets a unit attention: POWER ON, RESET, OR BUS
// DEVICE RESET OCCURRED.
func (inv *Inventory) NewNexus(p Port) *Nexus {
	inv.mu.Lock()
	defer inv.mu.Unlock()
	n := &Nexus{
		inv: inv, port: p, level: 1,
		shard: uint8(nexuses.Add(1) % countShards), counts: &nexusCounts{},
		name: nexusName{initiatorPort{strings.ToLower(p.InitiatorName), p.ISID}, p.TPGT},
	}
	var list []*itl
	for i := range inv.units {
		if l := inv.show(n, i); l != nil {
			list = append(list, l)
		}
	}
	n.luns.Store(&list)
	inv.nexuses[n] = struct{}{}
	return n
}

// list is the logical units that the initiator sees, ascending by id.
func (n *Nexus) list() []*itl { return *n.luns.Load() }

// changeList makes list the logical units that the initiator sees. It hears of that
// by all of them, and by Asynchronous Message once.
//
// Preconditions: the mu of the inventory is held.
func (n *Nexus) changeList(list []*itl) {
	n.luns.Store(&list)
	for i, l := range list {
		l.raise(attentionLUNs)
		if i == 0 {
			l.report(attentionLUNs)
		}
	}
}

// search is where in list the LUN is, or is to be.
func (n *Nexus) search(id uint16) int {
	list := n.list()
	return sort.Search(len(list), func(i int) bool { return list[i].id >= id })
}

// SetProtocolLevel tells what iSCSIProtocolLevel the session has agreed on, 1 unless
// it is called: with 2 there are more task management functions. To be called
// before the first command.
func (n *Nexus) SetProtocolLevel(level uint8) { n.level = level }

// Close ends the nexus, and what it has reserved with RESERVE. Registrations and
// persistent reservations remain.
func (n *Nexus) Close() {
	n.inv.mu.Lock()
	delete(n.inv.nexuses, n) // its list changes no more
	n.inv.mu.Unlock()
	for _, l := range n.list() {
		l.leave()
	}
}

// raise makes a unit attention due. One that is due already changes nothing.
func (l *itl) raise(attention int) {
	if l.due.Or(1<<attention)&(1<<attention) == 0 && reported&(1<<attention) != 0 {
		l.report(attention)
	}
}

func (l *itl) report(attention int) {
	if f := l.nexus.event.Load(); f != nil {
		s := sense{cond: attentions[attention], field: noField, bit: noField}
		(*f)(EncodeLUN(l.id), s.put(make([]byte, senseLen)))
	}
}

// OnEvent makes report hear of a unit attention as soon as it is due, if what it is
// about should not wait for the initiator's next command. The attention remains
// due. report must neither wait nor call the nexus.
func (n *Nexus) OnEvent(report func(lun [8]byte, sense []byte)) { n.event.Store(&report) }

// takeAttention returns the first unit attention that is due, which then is no
// longer.
func (l *itl) takeAttention() (k cond, ok bool) {
	for {
		due := l.due.Load()
		if due == 0 {
			return k, false
		}
		if l.due.CompareAndSwap(due, due&(due-1)) {
			return attentions[bits.TrailingZeros32(due)], true
		}
	}
}

// PendingAttention returns the unit attention that the next command for the LUN
// field would meet, and how many there are in all. It does not take it away.
func (n *Nexus) PendingAttention(lun [8]byte) (first Sense, pending int) {
	l := n.find(lun)
	if l == nil {
		return Sense{}, 0
	}
	due := l.due.Load()
	if due == 0 {
		return Sense{}, 0
	}
	return attentions[bits.TrailingZeros32(due)], bits.OnesCount32(due)
}

// find returns the logical unit that a LUN field addresses, or nil.
func (n *Nexus) find(lun [8]byte) *itl {
	id, ok := decodeLUN(lun)
	if !ok {
		return nil
	}
	list := n.list()
	i, ok := sort.Find(len(list), func(i int) int { return cmp.Compare(id, list[i].id) })
	if !ok {
		return nil
	}
	return list[i]
}

// LUNExists tells whether the LUN field addresses a logical unit.
func (n *Nexus) LUNExists(lun [8]byte) bool { return n.find(lun) != nil }

// SameUnit tells whether both LUN fields address the same logical unit.
func (n *Nexus) SameUnit(a, b [8]byte) bool {
	l, m := n.find(a), n.find(b)
	return l != nil && m != nil && l.unit == m.unit
}

// ResetUnit is the effect of LOGICAL UNIT RESET beyond the end of the tasks:
// a stopped unit is started, mode parameters have their saved values, the
// medium may be removed, a RESERVE ends, and all nexuses hear of it (SAM-5,
// section 6.3.3: the one that asked, too).
func (n *Nexus) ResetUnit(lun [8]byte) {
	if l := n.find(lun); l != nil {
		l.unit.reset(attentionReset)
	}
}

// ResetTarget is ResetUnit for all logical units that the initiator knows (RFC
// 7143, section 11.5.1).
func (n *Nexus) ResetTarget() {
	for _, l := range n.list() {
		l.unit.reset(attentionReset)
	}
}

// SeesAll tells whether no mask hides a logical unit from the initiator.
func (n *Nexus) SeesAll() bool { return !n.blind.Load() }

// PowerOn is ResetUnit for all logical units, with what the loss of power takes as well: persistent
// reservations and registrations that APTPL does not keep (SPC-4, section
// 5.13.5).
func (inv *Inventory) PowerOn() {
	for _, u := range inv.Units() {
		u.reservations.losePower()
		u.reset(attentionPowerOn)
	}
}

// CommandsCleared lets n hear that another nexus has ended commands of it for
// the logical unit (SAM-5, section 5.8.6, with TAS 0).
func (n *Nexus) CommandsCleared(lun [8]byte) {
	if l := n.find(lun); l != nil {
		l.raise(attentionCleared)
	}
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

// raise lets all nexuses but by, which may be nil, hear of an attention.
func (u *Unit) raise(attention int, by *Nexus) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.raiseLocked(attention, by)
}

// Preconditions: mu is held.
func (u *Unit) raiseLocked(attention int, by *Nexus) {
	for l := range u.seen {
		if l.nexus != by {
			l.raise(attention)
		}
	}
}

// ClearedByTransport makes the next command for the unit meet a unit attention:
// SOME COMMANDS CLEARED BY ISCSI PROTOCOL EVENT (RFC 7143, section 11.14.5).
func (n *Nexus) ClearedByTransport(lun [8]byte) {
	if l := n.find(lun); l != nil {
		l.raise(attentionClearedByTransport)
	}
}

// A Command is one SCSI command from CDB to status. Its owner uses it again
// and again, which allocates nothing.
type Command struct {
	// Set by the caller before Begin.
	LUN [8]byte // LUN field of the PDU
	CDB []byte  // 16 octets, or more with an extended CDB; not changed until End
	// Expected is how many octets of data-out the initiator means to send; 0
	// if it does not say. With more than they take, commands that could do harm
	// by a misunderstanding fail.
	Expected uint64
	// Abort, unless it is nil, becomes true when the command is to stop soon: it
	// then begins nothing more, and its status is told to nobody.
	Abort *atomic.Bool

	// Set by Begin: how many octets the command transfers (SPDTL).
	DataOut, DataIn uint64
	// Whole: DataOut is a parameter list, which Consume gets in one piece.
	Whole bool
	// Overflow: the command has failed because Expected is less than it takes.
	Overflow bool

	Status byte // valid when Begin has returned false, or after End

	row     *command
	nexus   *Nexus
	itl     *itl // nil if there is no such logical unit; so is unit
	unit    *Unit
	counted bool // as one in flight
	failed  bool
	lba     uint64
	count   uint64 // blocks
	arrived uint64 // octets of data-out
	whole   []byte // data-out of WRITE ATOMIC
	same    []byte // DataIn of a command that reports something

	sense    []byte
	senseBuf [senseLen]byte
	buf      []byte // memory of same; kept
}

// Begin decodes the CDB and checks all that can be checked without data. If
// it returns false the command has ended, with Status and Sense.
func (n *Nexus) Begin(c *Command) bool {
	c.DataOut, c.DataIn, c.Whole, c.Overflow, c.Status = 0, 0, false, false, statusGood
	c.failed, c.lba, c.count, c.arrived, c.same, c.sense = false, 0, 0, 0, nil, nil
	c.whole = nil
	c.identify(n)
	row := c.row
	if c.itl == nil && (row == nil || row.flags&absentLUN == 0) {
		return c.fail(condNoLUN)
	}
	if row == nil || row.flags&keepAttention == 0 {
		if k, ok := c.itl.takeAttention(); ok {
			return c.fail(k)
		}
	}
	if c.unit != nil && c.unit.absent != condNone && row != nil && row.flags&absentLUN == 0 {
		return c.fail(c.unit.absent) // an optional command, too: nobody knows what the store can do
	}
	if row == nil || !c.unit.supports(row) {
		return c.failRow()
	}
	if c.unit != nil {
		if k := c.unit.obstacle(n, row.flags); k != condNone {
			return c.fail(k)
		}
		if f := c.unit.reservations.fence.Load(); f != nil && f.keepsOut(c) {
			return c.conflict()
		}
	}
	if octet, bit, ok := row.reserved(c.CDB); !ok {
		return c.failCDB(octet, bit)
	}
	if row.flags&absentLUN == 0 && c.unit.sanitizer.state.Load() == sanitizeRunning {
		return c.failSense(c.unit.sanitizing())
	}
	if row.flags&medium != 0 {
		k := c.unit.readiness()
		if k != condNone && (k != condSanitizeFailed || row.flags&sanitizes == 0) {
			return c.fail(k)
		}
	}
	if row.flags&writes != 0 {
		if k := c.itl.protection(); k != condNone {
			return c.fail(k)
		}
	}
	if !row.begin(c.unit, c) {
		return false
	}
	if row.flags&exactData != 0 && c.Expected > c.DataOut {
		return c.failCDB(lengthOctet(c.CDB), noField)
	}
	return true
}

// Consume takes the data-out that starts at off. The pieces of a command come
// in order; all but the last are multiples of 4096 octets. It returns false
// when the command has failed and wants no more.
func (n *Nexus) Consume(c *Command, p []byte, off uint64) bool {
	if c.failed {
		return false
	}
	c.arrived = off + uint64(len(p))
	if c.Whole && c.arrived < c.DataOut {
		return c.fail(condTooLittle)
	}
	return c.row.consume(c.unit, c, p, off)
}

// Produce fills p with the data-in that starts at off, under the same rules;
// the last piece may end within a block.
func (n *Nexus) Produce(c *Command, p []byte, off uint64) bool {
	if c.failed {
		return false
	}
	if c.row.produce != nil {
		return c.row.produce(c.unit, c, p, off)
	}
	copy(p, c.same[off:])
	return true
}

// End is called after the data, also if that was cut short because the
// initiator expected less. Status and Sense are valid then.
func (n *Nexus) End(c *Command) {
	switch {
	case c.failed:
	case c.row.flags&allData != 0 && c.arrived < c.DataOut:
		c.fail(condTooLittle)
	case c.row.end != nil:
		c.row.end(c.unit, c)
	}
}

// Sense is the sense data of a command that has ended with CHECK CONDITION,
// else nil. It is valid until the next Begin.
func (c *Command) Sense() []byte { return c.sense }

// Fenced reports whether the transport has to keep the order between the response to c and other
// responses: c is PREEMPT AND ABORT, or reports a unit attention (RFC 7143, section 4.2.2.3.4; the
// target has no ACA). It may be called once c has ended.
func (c *Command) Fenced() bool {
	if c.sense != nil {
		return c.sense[2]&0x0f == keyUnitAttention // fixed format
	}
	return c.CDB[0] == 0x5f && c.CDB[1]&0x1f == prPreemptAndAbort
}

// Fail ends c with CHECK CONDITION on behalf of the transport, before or after
// Begin.
func (c *Command) Fail(s Sense) {
	c.DataOut, c.DataIn, c.Overflow = 0, 0, false
	c.fail(s)
}

// report makes b, cut to the allocation length, the data-in of c.
func (c *Command) report(b []byte, allocation uint32) bool {
	c.buf = b[:0]
	c.same = b[:min(len(b), int(allocation))]
	c.DataIn = uint64(len(c.same))
	return true
}

// zeroed is memory of n octets, all 0, for report.
func (c *Command) zeroed(n int) []byte {
	if cap(c.buf) < n {
		c.buf = make([]byte, n)
	}
	b := c.buf[:n]
	clear(b)
	return b
}
