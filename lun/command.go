package lun

import (
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/protection"
	"github.com/iser-target/iser-target/lun/fair"
)

// MaxParameterList is the longest parameter list of a command, in bytes.
const MaxParameterList = 65536

// A Command is one SCSI command from CDB to status. Its owner reuses it, which allocates nothing.
type Command struct {
	// Set by the caller before Begin.
	LUN [8]byte // LUN field of the PDU
	CDB []byte  // 16 bytes, or more with an extended CDB; not changed until End
	// Expected is how many bytes of data-out the initiator means to send; 0: it does not say.
	// Commands that a misunderstanding makes harmful fail if that is more than they take.
	Expected uint64
	// Abort, if not nil, becomes true when the command has to stop soon. It then
	// begins nothing more, and nobody gets its status.
	Abort *atomic.Bool
	// Ordered: the command has the task attribute ORDERED.
	Ordered bool
	// Owner belongs to the caller, which finds it again in the function of OnPreempt.
	Owner any

	// Set by Begin: how many bytes the command transfers (SPDTL).
	DataOut, DataIn uint64
	// Whole: DataOut is a parameter list, which Consume gets in one piece.
	Whole bool
	// Overflow: the command failed because Expected is less than it takes.
	Overflow bool

	Status byte // valid after Begin returned false, or after End

	row     *command
	nexus   *Nexus
	itl     *itl // nil if the LUN does not exist; so is unit
	unit    *Unit
	counted bool // as one in flight
	entered bool // it has called the store
	failed  bool
	lba     uint64
	count   uint64 // blocks
	arrived uint64 // bytes of data-out
	moved   uint64 // bytes of data that it moved, once Count has counted it
	whole   []byte // data-out of WRITE ATOMIC
	// begun is sanitizer.begun of the unit at the beginning. If one has begun since, c changes nothing: its data would be on
	// the erased medium.
	begun uint32
	same  []byte // DataIn of a command that reports something

	call, other fair.Call // of the store; other is that of the source of EXTENDED COPY

	place  atomic.Uint32        // see detach.go
	copyTo atomic.Pointer[Unit] // the other unit that a segment of EXTENDED COPY changes
	stop   *atomic.Bool         // nil, or true when the copy of c has to end: see copies
	holds  [2]*Unit             // guarded by detaching: units that are held up until c is back

	sense    []byte
	cond     Sense // what sense says, unless that is nil
	senseBuf [maxSenseLen]byte
	buf      []byte // memory of same; kept

	wire   bool // protection information follows each block
	checks protection.Checks
	carry  []byte // a block on the wire that lies in two pieces; kept
}

// Begin decodes the CDB and checks everything that needs no data. If it returns false the command
// ended, with Status and Sense.
func (n *Nexus) Begin(c *Command) bool {
	c.DataOut, c.DataIn, c.Whole, c.Overflow, c.Status = 0, 0, false, false, StatusGood
	c.failed, c.lba, c.count, c.arrived, c.same, c.sense = false, 0, 0, 0, nil, nil
	c.whole, c.entered, c.stop, c.wire = nil, false, nil, false
	c.identify(n)
	if !c.enter() {
		return false
	}
	defer c.leave()
	row := c.row
	if c.itl == nil && (row == nil || row.flags&absentLUN == 0) {
		return c.fail(condNoLUN)
	}
	if row == nil || row.flags&keepAttention == 0 {
		if s, ok := c.itl.takeAttention(); ok {
			return c.failSense(s)
		}
	}
	if c.unit != nil && c.unit.absent != condNone && row != nil && row.flags&absentLUN == 0 {
		return c.fail(c.unit.absent) // an optional command, too: the abilities of the store are unknown
	}
	if row == nil || !c.unit.supports(row) {
		return c.failRow()
	}
	if c.unit != nil {
		if k := c.unit.obstacle(n, row.flags); k != condNone {
			return c.fail(k)
		}
		if row.flags&anyPersistent == 0 && !c.unit.group.admits() {
			return c.busy()
		}
		if f := c.unit.reservations.fence.Load(); f != nil && f.keepsOut(n, row, c.CDB) {
			return c.conflict()
		}
	}
	if octet, bit, ok := row.reserved(c.CDB); !ok && !c.beginProtect(octet, bit) {
		return false
	}
	if row.flags&absentLUN == 0 && c.unit.sanitizer.state.Load() == sanitizeRunning {
		return c.failSense(c.unit.sanitizing())
	}
	if row.flags&medium != 0 {
		k := c.unit.readiness()
		passes := k == condSanitizeFailed && row.flags&sanitizes != 0 || k == condFormatCorrupted && row.flags&formats != 0
		if k != condNone && !passes {
			return c.fail(k)
		}
	}
	if row.flags&(writes|changes) != 0 {
		if k := c.refusal(); k != condNone {
			return c.fail(k)
		}
	}
	if !c.mayUseStore() || !row.begin(c.unit, c) {
		return false
	}
	if row.flags&exactData != 0 && c.Expected > c.DataOut {
		return c.failCDB(lengthOffset(c.CDB), noField)
	}
	return true
}

// identify finds the logical unit and the row of the table that c, which comes from n, is about.
func (c *Command) identify(n *Nexus) {
	c.nexus, c.itl, c.unit, c.arrived, c.moved = n, n.find(c.LUN), nil, 0, 0
	c.call.Who = n.name.initiator.name
	c.call.Waited, c.other.Waited = 0, 0
	if c.itl != nil {
		c.unit = c.itl.unit
		c.begun = c.unit.sanitizer.begun.Load()
	}
	c.row = lookup(c.CDB)
	c.countBegun()
}

// Consume executes the command for the data-out that starts at off. The pieces of a command come
// in order; all except the last are multiples of 4096 bytes. Consume returns false if the command
// failed and takes no more data.
func (n *Nexus) Consume(c *Command, p []byte, off uint64) bool {
	if c.failed || !c.proceed() {
		return false
	}
	defer c.leave()
	c.arrived = off + uint64(len(p))
	if c.Whole && c.arrived < c.DataOut {
		return c.fail(condTooLittle)
	}
	return c.row.consume(c.unit, c, p, off)
}

// Produce fills p with the data-in that starts at off, under the same rules. The last piece may
// end within a block.
func (n *Nexus) Produce(c *Command, p []byte, off uint64) bool {
	if c.failed {
		return false
	}
	if c.row.produce != nil {
		if !c.proceed() {
			return false
		}
		defer c.leave()
		return c.row.produce(c.unit, c, p, off)
	}
	copy(p, c.same[off:])
	return true
}

// Lent is memory of a store that does not change until its Loan is returned.
type Lent struct {
	Data []byte
	Loan *backend.Loan
}

// Return ends the loan.
func (l Lent) Return() { l.Loan.Return() }

// Share does what backend.Loan.Share does.
func (l Lent) Share() bool { return l.Loan.Share() }

// Abandon does what backend.Loan.Abandon does.
func (l Lent) Abandon() { l.Loan.Abandon() }

// Lends returns how many bytes of memory Lend would keep for size bytes of data-in that start at off, or 0 if only Produce has
// them.
func (n *Nexus) Lends(c *Command, off, size uint64) int {
	if c.failed || !c.row.lends || c.wire || c.unit.lender == nil {
		return 0
	}
	first := uint64(c.unit.at(c, off)) / backend.LoanSize
	last := uint64(c.unit.at(c, off+size-1)) / backend.LoanSize
	return int(last-first+1) * backend.LoanSize
}

// Lend does what Produce does, but without a copy: it appends to list the size bytes of data-in that start at off.
//
// Preconditions: Lends does not return 0.
func (n *Nexus) Lend(c *Command, off, size uint64, list []Lent) ([]Lent, bool) {
	if c.failed || !c.proceed() {
		return list, false
	}
	defer c.leave()
	list, err := c.unit.lend(c, c.unit.at(c, off), int64(size), list)
	return list, c.readDone(err)
}

// End ends the command after its data, also if the initiator expected less and the data was cut
// short. Status and Sense are valid then.
func (n *Nexus) End(c *Command) {
	switch {
	case c.failed:
	case c.row.flags&allData != 0 && c.arrived < c.DataOut:
		c.fail(condTooLittle)
	case c.row.end != nil && c.proceed():
		defer c.leave()
		c.row.end(c.unit, c)
	}
}

// Refuse ends c with CHECK CONDITION on behalf of the transport, instead of Begin.
func (n *Nexus) Refuse(c *Command, s Sense) {
	c.identify(n)
	c.Fail(s)
}

// RefuseFull ends c with TASK SET FULL on behalf of the transport, which has no memory for its data,
// instead of Begin.
func (n *Nexus) RefuseFull(c *Command) {
	c.identify(n)
	c.DataOut, c.DataIn, c.Overflow = 0, 0, false
	c.failed, c.sense, c.Status = true, nil, StatusTaskSetFull
}

// TakeAway ends c, which is in no unit, with TASK ABORTED on behalf of the transport: another nexus has
// taken it away (SAM-5, section 5.3.1).
func (c *Command) TakeAway() {
	c.DataOut, c.DataIn, c.Overflow, c.arrived = 0, 0, false, 0
	c.failed, c.sense, c.Status = true, nil, StatusTaskAborted
}

// Fail ends c with CHECK CONDITION on behalf of the transport, before or after Begin.
func (c *Command) Fail(s Sense) {
	c.DataOut, c.DataIn, c.Overflow = 0, 0, false
	c.fail(s)
}

// Taken returns how many bytes of a parameter list c has got, whether or not c failed because of them. It may be
// called once c has ended.
func (c *Command) Taken() uint64 {
	if c.Whole {
		return c.arrived
	}
	return 0
}

// Waited returns how long c has waited for its turn at the store, as part of PhaseBackend. It may be called once c has
// ended; so may Extent and Moved.
func (c *Command) Waited() time.Duration { return c.call.Waited + c.other.Waited }

// Extent returns the blocks that c named, in blocks of its LUN; 0, 0 if it named none.
func (c *Command) Extent() (lba, count uint64) { return c.lba, c.count }

// Moved returns how many bytes of data c moved. Count has counted it.
func (c *Command) Moved() uint64 { return c.moved }

// Sense returns the sense data of a command that ended with CHECK CONDITION, else nil. It is
// valid until the next Begin.
func (c *Command) Sense() []byte { return c.sense }

// Fenced reports whether the transport has to keep the order between the response to c and other
// responses: c is PREEMPT AND ABORT, or reports a unit attention (RFC 7143, section 4.2.2.3.4; the
// target has no ACA). It may be called once c has ended.
func (c *Command) Fenced() bool {
	if c.sense != nil {
		return c.cond.Key == keyUnitAttention
	}
	return c.CDB[0] == opPROut && c.CDB[1]&saMask == prPreemptAndAbort
}

// report makes b, cut to the allocation length, the data-in of c.
func (c *Command) report(b []byte, allocation uint32) bool {
	c.buf = b[:0]
	c.same = b[:min(len(b), int(allocation))]
	c.DataIn = uint64(len(c.same))
	return true
}

// zeroed returns n bytes of memory, all 0, for report.
func (c *Command) zeroed(n int) []byte {
	if cap(c.buf) < n {
		c.buf = make([]byte, n)
	}
	b := c.buf[:n]
	clear(b)
	return b
}
