// Package lun is the SCSI device server: logical units over the stores of
// package backend, driven by one table of commands (commands.go).
//
// A command goes through Begin, then Consume for its data-out or Produce for
// its data-in, as often as the transport likes, then End. Commands run at the
// same time on as many goroutines as there are; READ and WRITE take no lock.
package lun

import (
	"errors"
	"fmt"
	"slices"
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
	WriteThrough bool   // every write is durable before its status
	Vendor       string // T10 vendor identification, 8 characters; default ISERTGT
	Product      string // 16 characters; default VIRTUAL-DISK
	Revision     string // 4 characters; default 0001
}

// A Unit is a logical unit: a device server and the store below it.
type Unit struct {
	store        backend.Store
	info         backend.Info
	opt          Options
	blocks       uint64 // capacity
	shift        uint   // log2 of the block size
	readOnly     bool
	writeThrough bool // writes are durable before their status
	cached       bool // WCE: they are not, until a sync
	stopped      atomic.Bool

	mu    sync.Mutex
	nexus []*Nexus // whom unit attentions are for
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
	if info.BlockSize == 0 || info.BlockSize&(info.BlockSize-1) != 0 || info.Size <= 0 || info.Size%int64(info.BlockSize) != 0 {
		return nil, fmt.Errorf("store of %d octets with blocks of %d cannot be a disk", info.Size, info.BlockSize)
	}
	u := &Unit{store: s, info: info, opt: o, readOnly: o.ReadOnly || info.ReadOnly}
	for info.BlockSize>>u.shift > 1 {
		u.shift++
	}
	u.blocks = uint64(info.Size) >> u.shift
	u.cached = info.VolatileCache && !o.WriteThrough
	u.writeThrough = info.VolatileCache && o.WriteThrough
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

// Close syncs and closes the store.
func (u *Unit) Close() error { return u.store.Close() }

// attention raises a unit attention for every nexus but one.
func (u *Unit) attention(k cond, except *Nexus) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, n := range u.nexus {
		if n != except {
			n.raise(u, k)
		}
	}
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

// unit returns the logical unit with that LUN, or nil.
func (inv *Inventory) unit(id uint16) *Unit {
	inv.mu.RLock()
	defer inv.mu.RUnlock()
	if i, ok := slices.BinarySearch(inv.ids, id); ok {
		return inv.units[i]
	}
	return nil
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

// A Nexus is the relation between an initiator port and a target port. It
// keeps the unit attentions that the initiator has not heard of.
type Nexus struct {
	inv  *Inventory
	port Port

	pending atomic.Int32 // unit attentions, all units together
	mu      sync.Mutex
	queue   []attention
}

type attention struct {
	unit *Unit
	cond cond
}

// maxAttentions bounds what is queued for one nexus and unit; later ones are
// covered by the first, which is always a power on or reset.
const maxAttentions = 8

// NewNexus makes a nexus with the targets units. The first command for each of
// them meets a unit attention: POWER ON, RESET, OR BUS DEVICE RESET OCCURRED.
func (inv *Inventory) NewNexus(p Port) *Nexus {
	n := &Nexus{inv: inv, port: p}
	for _, u := range inv.Units() {
		u.mu.Lock()
		u.nexus = append(u.nexus, n)
		u.mu.Unlock()
		n.raise(u, condPowerOn)
	}
	return n
}

// Close ends the nexus.
func (n *Nexus) Close() {
	for _, u := range n.inv.Units() {
		u.mu.Lock()
		u.nexus = slices.DeleteFunc(u.nexus, func(o *Nexus) bool { return o == n })
		u.mu.Unlock()
	}
}

func (n *Nexus) raise(u *Unit, k cond) {
	n.mu.Lock()
	defer n.mu.Unlock()
	a := attention{u, k}
	queued := 0
	for _, q := range n.queue {
		if q == a {
			return
		}
		if q.unit == u {
			queued++
		}
	}
	if queued < maxAttentions {
		n.queue = append(n.queue, a)
		n.pending.Add(1)
	}
}

// takeAttention removes and returns the oldest unit attention for u.
func (n *Nexus) takeAttention(u *Unit) (k cond, ok bool) {
	if n.pending.Load() == 0 {
		return k, false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, q := range n.queue {
		if q.unit == u {
			n.queue = slices.Delete(n.queue, i, i+1)
			n.pending.Add(-1)
			return q.cond, true
		}
	}
	return k, false
}

func (n *Nexus) unitOf(lun [8]byte) *Unit {
	id, ok := decodeLUN(lun)
	if !ok {
		return nil
	}
	return n.inv.unit(id)
}

// LUNExists tells whether the LUN field addresses a logical unit.
func (n *Nexus) LUNExists(lun [8]byte) bool { return n.unitOf(lun) != nil }

// SameUnit tells whether both LUN fields address the same logical unit.
func (n *Nexus) SameUnit(a, b [8]byte) bool {
	u := n.unitOf(a)
	return u != nil && u == n.unitOf(b)
}

// ResetUnit is the effect of LOGICAL UNIT RESET beyond the end of the tasks:
// a stopped unit is started, and all other nexuses hear of it.
func (n *Nexus) ResetUnit(lun [8]byte) {
	if u := n.unitOf(lun); u != nil {
		u.reset(n)
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
	u.attention(condReset, by)
}

// A Command is one SCSI command from CDB to status. Its owner uses it again
// and again, which allocates nothing.
type Command struct {
	// Set by the caller before Begin.
	LUN [8]byte // LUN field of the PDU
	CDB []byte  // 16 octets, or more with an extended CDB; not changed until End

	// Set by Begin: how many octets the command transfers (SPDTL).
	DataOut, DataIn uint64
	// Whole: DataOut is a parameter list, which Consume gets in one piece.
	Whole bool

	Status byte // valid when Begin has returned false, or after End

	row    *command
	unit   *Unit
	nexus  *Nexus
	failed bool
	lba    uint64
	count  uint64 // blocks
	same   []byte // DataIn of a command that reports something

	sense    []byte
	senseBuf [senseLen]byte
	buf      []byte // memory of same; kept
}

// Begin decodes the CDB and checks all that can be checked without data. If
// it returns false the command has ended, with Status and Sense.
func (n *Nexus) Begin(c *Command) bool {
	c.DataOut, c.DataIn, c.Whole, c.Status = 0, 0, false, statusGood
	c.failed, c.lba, c.count, c.same, c.sense = false, 0, 0, nil, nil
	c.nexus = n
	c.unit = n.unitOf(c.LUN)
	row := lookup(c.CDB)
	c.row = row
	if c.unit == nil && (row == nil || row.flags&absentLUN == 0) {
		return c.fail(condNoLUN)
	}
	if row == nil || row.flags&keepAttention == 0 {
		if k, ok := n.takeAttention(c.unit); ok {
			return c.fail(k)
		}
	}
	if row == nil {
		return c.failRow()
	}
	if octet, bit, ok := row.reserved(c.CDB); !ok {
		return c.failCDB(octet, bit)
	}
	switch u := c.unit; {
	case row.flags&medium != 0 && u.stopped.Load():
		return c.fail(condNotReadyStopped)
	case row.flags&writes != 0 && u.readOnly:
		return c.fail(condWriteProtected)
	}
	return row.begin(c.unit, c)
}

// Consume takes the data-out that starts at off. The pieces of a command come
// in order; all but the last are multiples of 4096 octets. It returns false
// when the command has failed and wants no more.
func (n *Nexus) Consume(c *Command, p []byte, off uint64) bool {
	return !c.failed && c.row.consume(c.unit, c, p, off)
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
	if !c.failed && c.row.end != nil {
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
