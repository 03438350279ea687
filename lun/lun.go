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
}

// A Unit is a logical unit: a device server and the store below it.
type Unit struct {
	store       backend.Store
	info        backend.Info
	opt         Options
	blocks      uint64 // capacity
	shift       uint   // log2 of the block size
	readOnly    bool
	has         flags         // which optional rows of the command set
	mode        atomic.Uint32 // modeWCE, modeSWP: those that are set
	modeDefault uint32
	modeMutable uint32 // bits that MODE SELECT can change
	stopped     atomic.Bool
	ejected     atomic.Bool // set and reset with mu held
	ranges      rangeLocks
	sanitizer   sanitizer

	reservations reservations

	mu   sync.Mutex
	seen map[*itl]struct{} // guarded by mu: who is to hear of unit attentions
}

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
	info := s.Info()
	if err := info.Validate(); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	u := &Unit{store: s, info: info, opt: o, readOnly: o.ReadOnly || info.ReadOnly, seen: map[*itl]struct{}{}}
	u.shift = uint(bits.TrailingZeros32(info.BlockSize))
	u.blocks = uint64(info.Size) >> u.shift
	u.modeDefault, u.modeMutable = modesOf(info, o)
	u.mode.Store(u.modeDefault)
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

// Close ends a sanitize, syncs and closes the store.
func (u *Unit) Close() error {
	u.sanitizer.close()
	return u.store.Close()
}

// An Inventory is the logical units of one SCSI target device: what REPORT
// LUNS lists.
type Inventory struct {
	mu    sync.RWMutex
	ids   []uint16 // ascending
	units []*Unit
}

// NewInventory makes an empty inventory.
func NewInventory() *Inventory { return &Inventory{} }

// Add makes u the logical unit with that LUN, 0 to 16383.
func (inv *Inventory) Add(id uint16, u *Unit) error {
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
	return nil
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

// encodeLUN is the reverse; small LUNs get the older form.
func encodeLUN(id uint16) (f [8]byte) {
	if f[0], f[1] = byte(id>>8), byte(id); id > 0xff {
		f[0] |= 1 << 6
	}
	return f
}

// Port names both ends of an I_T nexus.
type Port struct {
	InitiatorName string
	ISID          [6]byte
	TargetName    string
	TPGT          uint16
}

// A Nexus is the relation between an initiator port and a target port (I_T
// nexus). It knows the logical units that there were when it began.
type Nexus struct {
	port      Port
	initiator initiatorPort
	luns      []*itl // ascending by id
	abort     atomic.Pointer[func(lun [8]byte, except *Command)]
}

// An itl is a logical unit as one initiator port sees it (I_T_L nexus).
type itl struct {
	nexus *Nexus
	id    uint16
	unit  *Unit
	due   atomic.Uint32 // bit i: the initiator has not heard of attentions[i]

	prevents bool // guarded by unit.mu: the medium must not be removed
	copies   copies
}

// attentions are the unit attentions there are; the first is reported first.
var attentions = [...]cond{
	attentionPowerOn:                condPowerOn,
	attentionReset:                  condReset,
	attentionMedium:                 condMediumChanged,
	attentionMode:                   condModeChanged,
	attentionReservationsPreempted:  condReservationsPreempted,
	attentionReservationsReleased:   condReservationsReleased,
	attentionRegistrationsPreempted: condRegistrationsPreempted,
}

const (
	attentionPowerOn = iota
	attentionReset
	attentionMedium
	attentionMode
	attentionReservationsPreempted
	attentionReservationsReleased
	attentionRegistrationsPreempted
)

// NewNexus makes a nexus with the target's units. The first command for each of
// them meets a unit attention: POWER ON, RESET, OR BUS DEVICE RESET OCCURRED.
func (inv *Inventory) NewNexus(p Port) *Nexus {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	n := &Nexus{port: p, initiator: initiatorPort{strings.ToLower(p.InitiatorName), p.ISID}, luns: make([]*itl, len(inv.ids))}
	for i, u := range inv.units {
		l := &itl{nexus: n, id: inv.ids[i], unit: u}
		l.raise(attentionPowerOn)
		n.luns[i] = l
		u.mu.Lock()
		u.seen[l] = struct{}{}
		u.mu.Unlock()
	}
	return n
}

// Close ends the nexus, and what it has reserved with RESERVE. Registrations and
// persistent reservations remain.
func (n *Nexus) Close() {
	for _, l := range n.luns {
		l.unit.dropReserve(n)
		l.unit.mu.Lock()
		delete(l.unit.seen, l)
		l.unit.mu.Unlock()
	}
}

func (l *itl) raise(attention int) { l.due.Or(1 << attention) }

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

// find returns the logical unit that a LUN field addresses, or nil.
func (n *Nexus) find(lun [8]byte) *itl {
	id, ok := decodeLUN(lun)
	if !ok {
		return nil
	}
	i, ok := sort.Find(len(n.luns), func(i int) int { return cmp.Compare(id, n.luns[i].id) })
	if !ok {
		return nil
	}
	return n.luns[i]
}

// LUNExists tells whether the LUN field addresses a logical unit.
func (n *Nexus) LUNExists(lun [8]byte) bool { return n.find(lun) != nil }

// SameUnit tells whether both LUN fields address the same logical unit.
func (n *Nexus) SameUnit(a, b [8]byte) bool {
	l, m := n.find(a), n.find(b)
	return l != nil && m != nil && l.unit == m.unit
}

// ResetUnit is the effect of LOGICAL UNIT RESET beyond the end of the tasks:
// a stopped unit is started, mode parameters have their default values, the
// medium may be removed, a RESERVE ends, and all other nexuses hear of it.
func (n *Nexus) ResetUnit(lun [8]byte) {
	if l := n.find(lun); l != nil {
		l.unit.reset(n)
	}
}

// ResetTarget is ResetUnit for all logical units.
func (inv *Inventory) ResetTarget(by *Nexus) {
	for _, u := range inv.Units() {
		u.reset(by)
	}
}

func (u *Unit) reset(by *Nexus) {
	u.stopped.Store(false)
	u.dropReserve(nil)
	u.mode.Store(u.modeDefault)
	u.mu.Lock()
	defer u.mu.Unlock()
	for l := range u.seen {
		l.prevents = false
	}
	u.raiseLocked(attentionReset, by)
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

	// Set by Begin: how many octets the command transfers (SPDTL).
	DataOut, DataIn uint64
	// Whole: DataOut is a parameter list, which Consume gets in one piece.
	Whole bool

	Status byte // valid when Begin has returned false, or after End

	row     *command
	nexus   *Nexus
	itl     *itl // nil if there is no such logical unit; so is unit
	unit    *Unit
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
	c.DataOut, c.DataIn, c.Whole, c.Status = 0, 0, false, statusGood
	c.failed, c.lba, c.count, c.arrived, c.same, c.sense = false, 0, 0, 0, nil, nil
	c.whole = nil
	c.nexus, c.itl, c.unit = n, n.find(c.LUN), nil
	if c.itl != nil {
		c.unit = c.itl.unit
	}
	row := lookup(c.CDB)
	c.row = row
	if c.itl == nil && (row == nil || row.flags&absentLUN == 0) {
		return c.fail(condNoLUN)
	}
	if row == nil || row.flags&keepAttention == 0 {
		if k, ok := c.itl.takeAttention(); ok {
			return c.fail(k)
		}
	}
	if row == nil || !c.unit.supports(row) {
		return c.failRow()
	}
	if c.unit != nil {
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
		if k := c.unit.protection(); k != condNone {
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

// Fail ends c with CHECK CONDITION on behalf of the transport, before or after
// Begin.
func (c *Command) Fail(key, asc, ascq byte) {
	c.DataOut, c.DataIn = 0, 0
	c.fail(cond{key, asc, ascq})
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
