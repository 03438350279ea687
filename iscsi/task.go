package iscsi

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/iser-target/iser-target/iscsi/fifo"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
)

// A taskState says where a task is. A slot that is not in the task table has
// the first one.
type taskState uint8

const (
	taskFree     taskState = iota
	taskWaiting            // for its CmdSN or for unsolicited data
	taskReady              // in conn.ready
	taskRunning            // a goroutine works on it
	taskFetching           // a GetData is outstanding; no goroutine
	taskHeld               // a fence holds its response back; no goroutine
	taskParked             // its connection is lost; no goroutine, no mover
)

// maxResponseData is the longest data segment of a SCSI Response: SenseLength
// and 126 octets of sense. It is what ib_iser's receive buffers hold.
const maxResponseData = 128

// A Task is a slot for one request from its PDU to its response, and for one
// PDU of ours at a time. Slots are used again and again; a connection has
// QueueDepth and a few more.
type Task struct {
	// Header and Segment are the PDU that SendControl queues. They do not
	// change until the mover has called Sent.
	Header  [pdu.BHSLen]byte
	Segment []byte

	// Mover is the mover's own state: what Datamover.NewTask made.
	Mover any

	conn *conn
	cmd  lun.Command

	req     [pdu.BHSLen]byte      // the request's BHS
	scratch [maxResponseData]byte // room for a short Segment
	stash   []byte                // room for unsolicited data; kept when the slot is free

	// For recovery; see statusStore. The first two are under conn.slotMu and false
	// in a free slot.
	stored       bool        // the PDU in Header has not been acknowledged
	sending      bool        // it is the mover's
	snackRefused atomic.Bool // data that was asked for again is no longer there

	aborted atomic.Bool // set under conn.mu: no response, stop soon

	link                fifo.Link[Task] // in a taskQueue; under conn.mu
	nextByITT, nextFree *Task           // in taskTable (conn.mu), of free slots (slotMu)

	// Of quota.
	waiter  fifo.Link[Task]
	wake    chan struct{} // ends a wait for a quota; capacity 1
	wants   int           // octets that it waits for
	granted bool

	taskVars
}

// taskVars is what is zero in a free slot.
type taskVars struct {
	watch // of the goroutine that has the task

	// Under conn.mu.
	state     taskState
	seq       uint64 // order of becoming ready
	stamp     uint64 // and among all sessions, if there are ORDERED commands
	needsSN   bool   // waits for CmdSNs before its own
	needsData bool   // waits for unsolicited Data-Out PDUs

	// For recovery; see statusStore. Written under conn.mu.
	kept     bool // the PDU in Header has a StatSN and may be asked for again
	snackTag uint32

	// For connection recovery, under conn.mu.
	cleared    bool   // ended by a connection or session that goes, not by a function
	finished   bool   // the command has ended, it remains to send data and status
	answered   bool   // the status was sent before: the window has moved on
	reassigned bool   // go on from resumeAt
	resumeAt   uint64 // octets of data-in that need not be sent again
	progress   Progress
	ref        *Task // of TASK REASSIGN: goes on behind the response

	// Of the goroutine that runs the task, or of the holder of recvMu before.
	own     bool      // not a request: never in the table
	unasked bool      // of own: counts as unexpected
	snack   bool      // of own: serves the SNACK in req
	gap     bool      // unsolicited data was lost; from there on it is asked for
	bound   bool      // the mover has a binding
	fenced  bool      // there are ORDERED tasks about, possibly this one
	data    []byte    // data segment of a Text Request or NOP-Out
	refusal lun.Sense // why the transport fails the command; zero: it does not
	isFence bool      // the response is one that others do not overtake
	info    [3]byte   // Additional Response Information of a task management function

	// Data phase of a command. Offsets and lengths are octets.
	begun       bool
	unsolicited uint32 // write data that came, or comes, without being asked for
	arrived     uint32 // of that
	dataSN      uint32 // of the next unsolicited Data-Out
	total       uint64 // how much data moves in all
	off         uint64 // what is done
	buf         *Buffer
	placed      bool // the unsolicited data is in buf, not in stash
	piece       int  // length of the piece that is being fetched into buf
	fetched     bool // that has ended
	fetchErr    error
	transfers   uint32 // PutData and GetData calls
}

// What iSCSI itself reports by CHECK CONDITION (RFC 7143, section 11.4.7.2;
// the first is SPC's INVALID FIELD IN COMMAND INFORMATION UNIT). It is preferred
// to Reject for commands: Linux does not complete a command that is rejected.
var (
	senseInvalidIU   = lun.Sense{Key: 0x05, ASC: 0x0e, ASCQ: 0x03}
	senseUnexpected  = lun.Sense{Key: 0x0b, ASC: 0x0c, ASCQ: 0x0c} // UNEXPECTED UNSOLICITED DATA
	senseWrongAmount = lun.Sense{Key: 0x0b, ASC: 0x0c, ASCQ: 0x0d} // NOT ENOUGH UNSOLICITED DATA
	senseLost        = lun.Sense{Key: 0x0b, ASC: 0x47, ASCQ: 0x05} // PROTOCOL SERVICE CRC ERROR
	senseSNACK       = lun.Sense{Key: 0x0b, ASC: 0x11, ASCQ: 0x13} // READ ERROR - FAILED RETRANSMISSION REQUEST
	senseAborted     = lun.Sense{Key: 0x0b, ASC: 0x00, ASCQ: 0x00} // never sent
)

// Request is the BHS of the request that t serves.
func (t *Task) Request() pdu.BHS { return t.header() }

// Sent is called by the mover when Header and Segment have left, or when the
// connection has ended. It takes no lock that is held while the mover is
// called.
func (t *Task) Sent() {
	if t.kept {
		t.countSpent()
		t.conn.keptSent(t)
		return
	}
	t.conn.freeTask(t)
}

func (t *Task) header() pdu.BHS { return pdu.BHS(t.req[:]) }
func (t *Task) immediate() bool { return t.header().Immediate() }
func (t *Task) isCommand() bool { return t.header().Opcode() == pdu.SCSICommand }
func (t *Task) isOrdered() bool { return t.isCommand() && t.header().Attr() == pdu.AttrOrdered }

// expected is how much data the initiator expects to send and to get. A flag
// that is not set expects nothing, whatever EDTL says.
func (t *Task) expected() (out, in uint32) {
	h := t.header()
	if h.Write() {
		out = h.EDTL()
	}
	if h.Read() {
		in = h.EDTL()
	}
	return out, in
}

// reset empties the slot. What it refers to must not outlive the task.
func (t *Task) reset() {
	t.taskVars = taskVars{}
	t.aborted.Store(false)
	t.snackRefused.Store(false)
	t.Segment, t.cmd.CDB = nil, nil
}

// run goes on with t: with what the request asks for, or with what follows a
// GetData.
func (t *Task) run() {
	switch {
	case t.snack:
		t.runSNACK()
	case t.own:
		t.conn.sendOwn(t)
	case t.reassigned:
		t.reassigned = false
		t.goOn()
	case t.fetched:
		t.fetched = false
		t.afterFetch()
	default:
		requests[t.header().Opcode()].run(t)
	}
}

// takeData keeps the data segment of a ping.
func (t *Task) takeData(n *Notice) error {
	t.data = bytes.Clone(n.Data)
	return nil
}

// takeText keeps the data segment of a Text Request, and of one that is too long no more
// than shows that.
func (t *Task) takeText(n *Notice) error {
	t.data = bytes.Clone(n.Data[:min(len(n.Data), keys.MaxText+1)])
	return nil
}

// takeCommand copies CDB and immediate data, and binds what was advertised.
// What is wrong with the command, short of its format, becomes a refusal.
//
// Preconditions: recvMu is held.
func (t *Task) takeCommand(n *Notice) error {
	c, h := t.conn, t.header()
	x, err := pdu.ParseAHS(n.AHS)
	if err != nil {
		return fmt.Errorf("%v: %w", pdu.SCSICommand, err)
	}
	t.cmd.LUN = h.LUN()
	t.cmd.CDB = h.CDB()
	if x.CDB != nil {
		t.cmd.CDB = append(append(make([]byte, 0, pdu.CDBLen+len(x.CDB)), h.CDB()...), x.CDB...)
	}

	out, _ := t.expected()
	imm := uint32(len(n.Data))
	burst := min(c.params.FirstBurstLength, out)
	switch {
	case h.Attr() >= pdu.AttrACA, // not supported or reserved: section 11.3.1, like the next three
		!h.Final() && !h.Write(),
		h.EDTL() > 0 && !h.Read() && !h.Write(),
		h.Read() && h.Write(): // no command of ours is bidirectional
		t.refusal = senseInvalidIU
	case imm > 0 && (!h.Write() || !c.params.ImmediateData), imm > c.params.FirstBurstLength:
		t.refusal = senseUnexpected
	case imm > out:
		t.refusal = senseWrongAmount
	default:
		t.unsolicited, t.arrived = imm, imm
		// With InitialR2T=Yes nothing may follow, and F does not matter. An
		// F=0 that leaves nothing to follow does not, either.
		if !h.Final() && !c.params.InitialR2T && imm < burst {
			t.unsolicited, t.needsData = burst, true
		}
	}
	if t.refusal != (lun.Sense{}) {
		// Unsolicited Data-Out that follows must be waited for (section 7.3):
		// the initiator may use the tag again as soon as it has the response.
		t.needsData = !h.Final() && h.Write() && !c.params.InitialR2T
		return nil
	}
	if err := c.dm.Bind(t, t.unsolicited); err != nil {
		t.refusal = senseInvalidIU
		return nil
	}
	t.bound = true
	if imm == 0 {
		return nil
	}
	// A longer transfer goes through a Buffer, where the immediate data may be
	// put right away. But a task that still waits for something must not hold
	// one.
	if whole := min(int(out), c.piece); whole > int(imm) && !t.needsData && c.isNext(h) {
		if t.buf = c.budget.try(whole); t.buf != nil {
			copy(t.buf.data, n.Data)
			t.placed = true
			return nil
		}
	}
	copy(t.room(), n.Data)
	return nil
}

// isNext tells whether a command with header h begins without waiting for other
// tasks.
//
// Preconditions: recvMu is held.
func (c *conn) isNext(h pdu.BHS) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ordered == 0 && h.Attr() != pdu.AttrOrdered && (h.Immediate() || h.CmdSN() == c.win.exp)
}

// room is the slot's own memory for unsolicited data, as long as that can be.
func (t *Task) room() []byte {
	if n := int(t.conn.params.FirstBurstLength); len(t.stash) < n {
		// As long as needed, but no longer than a segment if that is all that
		// can come.
		if t.conn.params.InitialR2T {
			n = min(n, t.conn.recvLimit)
		}
		if len(t.stash) < n {
			t.stash = make([]byte, n)
		}
	}
	return t.stash
}

// dataOut takes an unsolicited Data-Out PDU (RFC 7143, section 11.7). Solicited
// ones never come here: with RDMA there are none (RFC 7145, section 7.3.4), on
// TCP they are the mover's. A PDU that does not fit is rejected, and the task it
// names fails once the last Data-Out has come.
//
// Preconditions: recvMu is held.
func (c *conn) dataOut(n *Notice) error {
	h := pdu.BHS(n.BHS)
	c.mu.Lock()
	t := c.tasks.find(h.ITT())
	if t != nil && t.conn != c {
		t = nil // data comes where the command came (section 4.2.2)
	}
	if t == nil || !t.needsData || h.TTT() != pdu.ReservedTag {
		c.mu.Unlock()
		reason := pdu.RejectProtocolError
		if t == nil && h.TTT() == pdu.ReservedTag {
			reason = pdu.RejectInvalidField // of a task that has ended, perhaps
		}
		return c.reject(n, reason, unasked)
	}
	end := uint64(h.BufferOffset()) + uint64(len(n.Data))
	var wrong pdu.RejectReason
	if c.store.movers != nil && h.LUN() == t.header().LUN() && h.DataSN() != t.dataSN {
		if pdu.Before(h.DataSN(), t.dataSN) { // a duplicate
			c.mu.Unlock()
			return nil
		}
		t.gap, t.dataSN = true, h.DataSN()
	}
	switch {
	case h.LUN() != t.header().LUN(), h.DataSN() != t.dataSN: // sections 4.2.5.3 and 11.7.5
		wrong = pdu.RejectProtocolError
	case t.refusal != (lun.Sense{}), t.gap: // whatever it is, it is not wanted
	case h.BufferOffset() != t.arrived, end > uint64(t.unsolicited):
		wrong = pdu.RejectInvalidField
	default:
		copy(t.room()[t.arrived:], n.Data)
		t.arrived = uint32(end)
	}
	t.dataSN = h.DataSN() + 1
	if wrong != 0 {
		t.refusal = senseWrongAmount
	}
	if h.Final() {
		if t.refusal == (lun.Sense{}) && !t.gap && t.arrived != t.unsolicited { // section 4.2.5.2
			t.refusal = senseWrongAmount
		}
		c.endUnsolicited(t)
	}
	c.mu.Unlock()
	if wrong != 0 {
		return c.reject(n, wrong, unasked)
	}
	return nil
}

// endUnsolicited goes on with t when the last unsolicited Data-Out has come. From
// where some was lost on, all is asked for: the R2T is a recovery R2T (RFC 7143,
// section 7.8).
//
// Preconditions: mu is held.
func (c *conn) endUnsolicited(t *Task) {
	t.needsData = false
	t.lap(lun.PhaseReadWait)
	if t.gap {
		t.unsolicited = t.arrived
	}
	c.makeReady(t)
}

// lostDataOut rejects a Data-Out PDU that the mover has discarded. Unsolicited
// data that is lost is asked for, or at ErrorRecoveryLevel 0 fails its task, once
// the last Data-Out has come (RFC 7143, section 7.8); solicited data is the
// mover's.
//
// Preconditions: recvMu is held.
func (c *conn) lostDataOut(n *Notice) error {
	h := pdu.BHS(n.BHS)
	c.mu.Lock()
	if t := c.tasks.find(h.ITT()); t != nil && t.conn == c && t.needsData && h.TTT() == pdu.ReservedTag {
		if t.dataSN = h.DataSN() + 1; c.store.movers != nil {
			t.gap = true
		} else {
			t.refusal = senseLost
		}
		if h.Final() {
			c.endUnsolicited(t)
		}
	}
	c.mu.Unlock()
	return c.reject(n, n.Reject, unasked)
}

// unplace gives back the Buffer of a task that is going to wait.
func (t *Task) unplace() {
	if !t.placed {
		return
	}
	copy(t.room(), t.buf.data[:t.unsolicited])
	t.buf.Release()
	t.buf, t.placed = nil, false
}

// runCommand executes a SCSI Command up to its response or its first GetData.
func (t *Task) runCommand() {
	c := t.conn
	if t.fenced {
		t.unplace()
		t.late = true
		if !c.waitTurn(t) {
			t.abandon()
			return
		}
	}
	t.takeTurn()
	if t.aborted.Load() {
		t.abandon()
		return
	}
	if r := t.refusal; r != (lun.Sense{}) {
		c.sess.nexus.Refuse(&t.cmd, r)
		t.complete()
		return
	}
	out, in := t.expected()
	t.cmd.Expected = uint64(out)
	if !c.sess.nexus.Begin(&t.cmd) {
		t.complete()
		return
	}
	t.begun = true
	switch {
	case t.cmd.DataOut > 0 && in > 0:
		// The initiator and the CDB do not agree on the direction. Without an
		// expected length they merely disagree on how much there is: overflow.
		// Data-in that goes nowhere does no harm, but what is to be written has
		// to come from somewhere.
		t.cmd.Fail(senseInvalidIU)
		t.complete()
	case t.cmd.DataOut > 0:
		t.total = min(t.cmd.DataOut, uint64(out))
		t.write()
	default:
		t.total = min(t.cmd.DataIn, uint64(in))
		t.read()
	}
}

// read moves data-in to the initiator piece by piece. The last piece leaves
// together with the response.
func (t *Task) read() {
	c := t.conn
	for t.off < t.total {
		n := int(min(t.total-t.off, uint64(c.piece)))
		buf := t.takeBuffer(n)
		if buf == nil {
			t.abandon()
			return
		}
		if !c.sess.nexus.Produce(&t.cmd, buf.data[:n], t.off) {
			buf.Release()
			break
		}
		if !t.enqueue(buf, n) || t.aborted.Load() {
			buf.Release()
			t.abandon()
			return
		}
		c.mu.Lock()
		c.stampWindow(t)
		c.mu.Unlock()
		if err := c.dm.PutData(t, uint32(t.off), buf.data[:n], buf); err != nil {
			buf.Release()
			c.end(fmt.Errorf("sending failed: %w", err))
			t.abandon()
			return
		}
		t.transfers++
		if t.off += uint64(n); t.off < t.total {
			t.lap(lun.PhaseBackend)
			c.dm.Flush()
			t.lap(lun.PhaseSend)
		}
	}
	t.complete()
}

// write moves data-out from the initiator piece by piece. What came without
// being asked for is the beginning of the first piece. Where the rest of a piece
// has to be fetched, write returns and afterFetch goes on.
func (t *Task) write() {
	c := t.conn
	for t.off < t.total {
		n := int(min(t.total-t.off, uint64(c.piece)))
		have := 0
		if t.off == 0 {
			have = min(int(t.unsolicited), n)
		}
		if have == n && !t.placed {
			if !t.consume(t.stash[:n]) {
				break
			}
			continue
		}
		if t.buf == nil {
			if t.buf = t.takeBuffer(n); t.buf == nil {
				t.abandon()
				return
			}
		}
		if !t.placed {
			copy(t.buf.data, t.stash[:have])
		}
		if have < n {
			t.fetch(have, n)
			return
		}
		if !t.consume(t.buf.data[:n]) {
			break
		}
	}
	t.complete()
}

// fetch asks for octets have to n of the piece. When it has succeeded t belongs
// to whoever receives the Notice.
func (t *Task) fetch(have, n int) {
	c := t.conn
	t.piece = n
	t.transfers++
	if t.off > 0 { // else it has decoded the command, not more
		t.lap(lun.PhaseBackend)
	}
	c.mu.Lock()
	if t.aborted.Load() || c.suspends.Load() {
		c.mu.Unlock()
		t.abandon()
		return
	}
	t.state = taskFetching
	c.stampWindow(t)
	// With mu held, so that callOff finds the GetData of a task in this state.
	err := c.dm.GetData(t, uint32(t.off)+uint32(have), t.buf.data[have:n])
	if err != nil {
		t.state = taskRunning
	}
	c.mu.Unlock()
	if err != nil {
		c.end(fmt.Errorf("fetching failed: %w", err))
		t.abandon()
		return
	}
	c.flush()
}

// afterFetch goes on with a write when the rest of a piece is there.
func (t *Task) afterFetch() {
	switch {
	case t.aborted.Load(): // what came is dropped
		t.abandon()
		return
	case t.fetchErr == ErrDataLost:
		t.failTransfer(senseLost)
		return
	case t.fetchErr == ErrDataAmount:
		t.failTransfer(senseWrongAmount)
		return
	case t.fetchErr != nil: // the connection is ending, perhaps nobody has noticed yet
		if t.conn.recovers() {
			t.conn.end(fmt.Errorf("connection failed: %w", t.fetchErr)) // so that t is parked
		}
		t.abandon()
		return
	}
	if !t.consume(t.buf.data[:t.piece]) {
		t.complete()
		return
	}
	t.write()
}

// failTransfer ends a command whose data did not come as it was asked for.
func (t *Task) failTransfer(s lun.Sense) {
	t.cmd.Fail(s)
	t.complete()
}

// consume hands a piece to the logical unit. It returns false if the command
// has failed or was aborted.
func (t *Task) consume(p []byte) bool {
	if t.aborted.Load() || !t.conn.sess.nexus.Consume(&t.cmd, p, t.off) {
		return false
	}
	t.off += uint64(len(p))
	return true
}

// takeBuffer returns a Buffer for n octets, or nil if t was aborted while it
// waited for one.
func (t *Task) takeBuffer(n int) *Buffer {
	c := t.conn
	if b := c.budget.try(n); b != nil {
		return b
	}
	t.lap(lun.PhaseBackend)
	defer t.lap(lun.PhaseReceive)
	c.dm.Flush() // the Buffers on their way to the initiator are among those to wait for
	c.wantAcks()
	return c.budget.wait(t, n)
}

// enqueue takes room for n octets of b that are about to be queued for sending. It
// returns false if t was aborted while it waited for that.
func (t *Task) enqueue(b *Buffer, n int) bool {
	c := t.conn
	if !c.sending.take(n) {
		t.lap(lun.PhaseBackend)
		defer t.lap(lun.PhaseSend)
		c.dm.Flush() // what t itself has queued is among what it waits for
		if !c.sending.wait(t, n) {
			return false
		}
	}
	b.room, b.queued = &c.sending, n
	return true
}

// abandon ends an aborted task without a response, or parks one whose connection is
// lost. What the logical unit was given before stays; it does not begin anything
// now.
func (t *Task) abandon() {
	if t.park() {
		return
	}
	c := t.conn
	if t.begun {
		t.cmd.Fail(senseAborted)
	}
	t.endBegun(true)
	c.mu.Lock()
	stopped := t.aborted.Load() // and not ended by a connection that fails
	c.drop(t)
	c.mu.Unlock()
	if stopped {
		c.tellWindow()
	}
}

// endBegun gives back what the data phase has taken, and counts the command. It
// returns false if that has been done before.
func (t *Task) endBegun(aborted bool) (counted bool) {
	nexus := t.conn.sess.nexus
	if t.begun {
		t.begun = false
		nexus.End(&t.cmd)
	}
	if t.isCommand() {
		counted = nexus.Count(&t.cmd, t.off, aborted)
	}
	if t.buf != nil {
		t.buf.Release()
		t.buf = nil
	}
	return counted
}

// complete ends a command and responds (RFC 7143, section 11.4).
func (t *Task) complete() {
	c := t.conn
	if t.aborted.Load() {
		t.abandon()
		return
	}
	if t.snackRefused.Load() && t.cmd.Status == lun.StatusGood {
		t.cmd.Fail(senseSNACK)
	}
	counted := t.endBegun(false)
	if counted {
		t.lap(lun.PhaseBackend)
		t.counts = true
	}
	h := pdu.BHS(t.Header[:])
	h.Reset(pdu.SCSIResponse, pdu.FlagF)
	h.SetResponse(pdu.CommandCompleted)
	h.SetStatus(t.cmd.Status)
	h.SetITT(t.header().ITT())
	h.SetExpDataSN(t.transfers)
	if flag, n := t.residual(); n > 0 {
		h.SetFlags(pdu.FlagF | flag)
		h.SetResidual(n)
		if counted {
			c.sess.nexus.CountResidual(&t.cmd, flag == pdu.FlagOverflow)
		}
	}
	t.isFence = c.fence != nil && t.cmd.Fenced()
	if t.cmd.Status == lun.StatusCheckCondition {
		n := copy(t.scratch[2:], t.cmd.Sense())
		binary.BigEndian.PutUint16(t.scratch[:], uint16(n))
		t.Segment = t.scratch[:2+n]
	}
	c.respond(t)
}

// residual compares what the command transfers (SPDTL) with what the initiator
// expects (EDTL): RFC 7143, section 11.4.5. A command that has failed transfers
// what it had transferred until then, unless it is EDTL that it has failed for.
func (t *Task) residual() (flag byte, n uint32) {
	edtl := uint64(t.header().EDTL())
	spdtl := max(t.cmd.DataOut, t.cmd.DataIn)
	switch {
	case t.cmd.Status != lun.StatusGood && !t.cmd.Overflow:
		spdtl = t.off
	case edtl > 0 && t.header().Write():
		spdtl = t.cmd.DataOut // EDTL is about data-out, of which a READ takes none
	}
	switch {
	case spdtl > edtl:
		return pdu.FlagOverflow, uint32(min(spdtl-edtl, math.MaxUint32))
	case spdtl < edtl:
		return pdu.FlagUnderflow, uint32(edtl - spdtl)
	}
	return 0, 0
}

// A taskQueue is a queue of tasks.
type taskQueue = fifo.Queue[Task]

// A taskTable finds tasks by Initiator Task Tag. It is a hash table of fixed
// size with chains, so that entering a task allocates nothing.
type taskTable struct {
	buckets []*Task // linked by nextByITT; a power of two of them
}

func (tt *taskTable) init(tasks int) {
	n := 16
	for n < 2*tasks {
		n *= 2
	}
	tt.buckets = make([]*Task, n)
}

func (tt *taskTable) bucket(itt uint32) **Task {
	// Initiators count in either end of the tag: spread both.
	return &tt.buckets[(itt*0x9e3779b1>>12)&uint32(len(tt.buckets)-1)]
}

func (tt *taskTable) find(itt uint32) *Task {
	t := *tt.bucket(itt)
	for t != nil && t.header().ITT() != itt {
		t = t.nextByITT
	}
	return t
}

func (tt *taskTable) insert(t *Task) {
	b := tt.bucket(t.header().ITT())
	t.nextByITT, *b = *b, t
}

func (tt *taskTable) remove(t *Task) {
	for p := tt.bucket(t.header().ITT()); *p != nil; p = &(*p).nextByITT {
		if *p == t {
			*p, t.nextByITT = t.nextByITT, nil
			return
		}
	}
}

// any tells whether f holds for any task.
func (tt *taskTable) any(f func(*Task) bool) bool {
	for _, t := range tt.buckets {
		for ; t != nil; t = t.nextByITT {
			if f(t) {
				return true
			}
		}
	}
	return false
}

// each calls f for every task; f may remove it.
func (tt *taskTable) each(f func(*Task)) {
	for _, t := range tt.buckets {
		for t != nil {
			next := t.nextByITT
			f(t)
			t = next
		}
	}
}
