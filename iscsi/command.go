package iscsi

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
)

// What iSCSI itself reports by CHECK CONDITION (RFC 7143, section 11.4.7.2; the first is SPC's
// INVALID FIELD IN COMMAND INFORMATION UNIT). Commands get it rather than a Reject: Linux does not
// complete a command that is rejected.
var (
	senseInvalidIU   = lun.Sense{Key: 0x05, ASC: 0x0e, ASCQ: 0x03}
	senseUnexpected  = lun.Sense{Key: 0x0b, ASC: 0x0c, ASCQ: 0x0c} // UNEXPECTED UNSOLICITED DATA
	senseWrongAmount = lun.Sense{Key: 0x0b, ASC: 0x0c, ASCQ: 0x0d} // NOT ENOUGH UNSOLICITED DATA
	senseLost        = lun.Sense{Key: 0x0b, ASC: 0x47, ASCQ: 0x05} // PROTOCOL SERVICE CRC ERROR
	senseSNACK       = lun.Sense{Key: 0x0b, ASC: 0x11, ASCQ: 0x13} // READ ERROR - FAILED RETRANSMISSION REQUEST
	senseAborted     = lun.Sense{Key: 0x0b, ASC: 0x00, ASCQ: 0x00} // never sent
)

// expected returns how much data the initiator expects to send and to get. A flag that is not set
// expects nothing, whatever EDTL says.
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

// takeCommand copies CDB and immediate data, and binds what the initiator advertised. A fault of
// the command, other than in its format, becomes a refusal.
//
// Preconditions: c.baton is held.
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

	if n.Reject != 0 {
		t.noMemory = true
		t.needsData = !h.Final() && h.Write() && !c.params.InitialR2T
		return nil
	}
	out, _ := t.expected()
	imm := uint32(len(n.Data))
	burst := min(c.params.FirstBurstLength, out)
	switch {
	case h.Attr() >= pdu.AttrACA, // not supported or reserved: section 11.3.1, like the next three
		!h.Final() && !h.Write(),
		h.EDTL() > 0 && !h.Read() && !h.Write(),
		h.Read() && h.Write(): // no command of the target is bidirectional
		t.refusal = senseInvalidIU
	case imm > 0 && (!h.Write() || !c.params.ImmediateData), imm > c.params.FirstBurstLength:
		t.refusal = senseUnexpected
	case imm > out:
		t.refusal = senseWrongAmount
	default:
		t.unsolicited, t.arrived = imm, imm
		// With InitialR2T=Yes nothing may follow, and F does not matter. An F=0 that leaves
		// nothing to follow does not, either.
		if !h.Final() && !c.params.InitialR2T && imm < burst {
			t.unsolicited, t.needsData = burst, true
		}
	}
	if t.refusal != (lun.Sense{}) {
		// The response has to wait for unsolicited Data-Out that follows (section 7.3): the
		// initiator may use the tag again as soon as it has the response.
		t.needsData = !h.Final() && h.Write() && !c.params.InitialR2T
		return nil
	}
	if err := c.dm.Bind(t, t.unsolicited); err != nil {
		t.refusal = senseInvalidIU
		return nil
	}
	t.bound = true
	if t.unsolicited > 0 {
		t.takeImmediate(n.Data, n.Buffer, int(out))
	}
	return nil
}

// takeImmediate finds memory for the unsolicited data of t, which is to write out bytes, and copies
// immediate data there, unless b, which may be nil, has that memory.
//
// Preconditions: c.baton is held.
func (t *Task) takeImmediate(data []byte, b *Buffer, out int) {
	c := t.conn
	// A longer transfer goes through a Buffer: put the immediate data there at once. But a task
	// that still waits for something must not hold a Buffer.
	whole := min(out, c.piece)
	mayHold := !t.needsData && c.isNext(t.header())
	if mayHold && whole > len(data) {
		t.buf = c.budget.try(whole)
	}
	if t.buf == nil {
		if b != nil && len(b.data) >= int(t.unsolicited) {
			t.giveStash()
			b.Retain()
			t.stash = b
			return
		}
		if room := t.room(int(t.unsolicited)); room != nil {
			copy(room, data)
			return
		}
		if mayHold { // the connection's share of memory for pieces may be free
			t.buf = c.budget.try(min(whole, c.leastPiece()))
		}
	}
	if t.buf == nil {
		t.noMemory = true
		return
	}
	copy(t.buf.data, data)
	t.placed = true
}

// isNext reports whether a command with header h begins without waiting for other tasks.
//
// Preconditions: c.baton is held.
func (c *conn) isNext(h pdu.BHS) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.shared.ordered == 0 && h.Attr() != pdu.AttrOrdered && (h.Immediate() || h.CmdSN() == c.shared.win.exp)
}

// runCommand executes a SCSI Command up to its response or its first GetData.
func (t *Task) runCommand() {
	c := t.conn
	if t.mayWait {
		t.unplace()
		t.waited = true
		if !c.awaitOlder(t) {
			t.abandon()
			return
		}
	}
	t.endWait()
	if t.aborted.Load() {
		t.abandon()
		return
	}
	out, in := t.expected()
	if out <= t.unsolicited && !t.takeTurn() { // else write does, when its first data is there
		t.abandon()
		return
	}
	switch {
	case t.refusal != (lun.Sense{}):
		c.sess.nexus.Refuse(&t.cmd, t.refusal)
	case t.noMemory:
		c.sess.nexus.RefuseFull(&t.cmd)
	default:
		t.cmd.Expected, t.cmd.Ordered = uint64(out), t.isOrdered()
		t.begun = c.sess.nexus.Begin(&t.cmd)
		t.leftUnit()
	}
	switch {
	case !t.begun:
		t.complete()
	case t.cmd.DataOut > 0 && in > 0:
		// The initiator and the CDB do not agree on the direction. Without an expected length they
		// merely disagree on the amount: overflow. Data-in that goes nowhere does no harm, but
		// data to be written has to come from somewhere.
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

// lendAtLeast is the number of bytes of data-in from which memory of the logical unit is sent where it lies. Less is
// cheaper to copy.
const lendAtLeast = 32 << 10

// lentBuffer returns a Buffer for the next n bytes of data-in, which the logical unit can lend, else nil. At an
// ErrorRecoveryLevel above 0 data is kept, for which a copy takes less memory.
func (t *Task) lentBuffer(n int) *Buffer {
	c := t.conn
	if n < lendAtLeast || c.params.ErrorRecoveryLevel > 0 || c.lent == nil || !c.lent.TakesLent() {
		return nil
	}
	keeps := c.sess.nexus.Lends(&t.cmd, t.off, uint64(n))
	switch {
	case keeps == 0:
		return t.pipedBuffer(n)
	case keeps > 2*n: // as many READs as before find memory, or half as many
		return nil
	}
	return c.budget.tryLent(keeps)
}

// maxPiped is the most bytes of data-in in a Pipe: with more, Pipes would have to be larger than the kernel permits.
const maxPiped = 256 << 10

// pipedBuffer returns a Buffer for the next n bytes of data-in or maxPiped, which a pipe can have, else nil.
func (t *Task) pipedBuffer(n int) *Buffer {
	c := t.conn
	n = min(n, maxPiped)
	if c.piped == nil || !c.sess.nexus.Refers(&t.cmd) || c.lags() {
		return nil
	}
	pipe := c.piped.TakePipe(n, int(c.budget.pipes.Load()))
	if pipe == nil {
		return nil
	}
	b := c.budget.tryPiped(n, pipe)
	if b == nil {
		pipe.Release()
	}
	return b
}

// read moves data-in to the initiator piece by piece. The last piece leaves together with the
// response.
func (t *Task) read() {
	c := t.conn
	for t.off < t.total {
		n := int(min(t.total-t.off, uint64(c.piece)))
		buf := t.lentBuffer(n)
		if buf == nil {
			if buf = t.takeBuffer(n); buf == nil {
				t.abandon()
				return
			}
			n = min(n, len(buf.data))
		} else if buf.pipe != nil {
			n = buf.keeps
		}
		if !t.resume() {
			buf.Release()
			t.cmd.Fail(senseNotTaken)
			break
		}
		if !t.takeTurn() {
			buf.Release()
			t.abandon()
			return
		}
		t.buf = buf // of t while t may be detached
		ok := false
		switch {
		case buf.pipe != nil:
			ok = c.sess.nexus.Refer(&t.cmd, t.off, uint64(n), buf.pipe.In(), &buf.view, c)
		case buf.keeps > 0:
			buf.lent, ok = c.sess.nexus.Lend(&t.cmd, t.off, uint64(n), buf.lent)
		default:
			ok = c.sess.nexus.Produce(&t.cmd, buf.data[:n], t.off)
		}
		t.leftUnit()
		t.buf = nil
		if !ok {
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
		if err := t.put(buf, n); err != nil {
			c.end(c.endReason(err))
			t.abandon()
			return
		}
		if t.off += uint64(n); t.off < t.total {
			t.lap(lun.PhaseBackend)
			t.idle()
			c.dm.Flush()
			t.lap(lun.PhaseSend)
		}
	}
	t.complete()
}

// put queues the next n bytes of data-in, which are in b, and gives b away.
func (t *Task) put(b *Buffer, n int) (err error) {
	switch {
	case b.pipe != nil:
		err = t.conn.piped.PutPipe(t, uint32(t.off), n, b)
	case b.keeps > 0:
		err = t.conn.lent.PutLent(t, uint32(t.off), b)
	default:
		err = t.conn.dm.PutData(t, uint32(t.off), b.data[:n], b)
	}
	if err != nil {
		b.Release()
	}
	t.transfers++
	return err
}

// write moves data-out from the initiator piece by piece. Unsolicited data is the beginning of the
// first piece. If the rest of a piece has to be fetched, write returns and afterFetch continues.
func (t *Task) write() {
	c := t.conn
	for t.off < t.total {
		n := int(min(t.total-t.off, uint64(c.piece)))
		have := 0
		if t.off == 0 {
			have = min(int(t.unsolicited), n)
		}
		if have == n && !t.placed {
			if !t.takeTurn() {
				t.abandon()
				return
			}
			if !t.consume(t.stash.data[:n]) {
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
		n = min(n, len(t.buf.data))
		if have > 0 && !t.placed {
			copy(t.buf.data, t.stash.data[:have])
		}
		if have < n {
			t.fetch(have, n)
			return
		}
		if !t.takeTurn() {
			t.abandon()
			return
		}
		if !t.consume(t.buf.data[:n]) {
			break
		}
	}
	t.complete()
}

// fetch asks for bytes have to n of the piece. When it has succeeded t belongs to the goroutine
// that receives the Notice.
func (t *Task) fetch(have, n int) {
	c := t.conn
	t.piece = n
	t.transfers++
	if t.off > 0 { // else only the CDB has been decoded
		t.lap(lun.PhaseBackend)
	}
	c.mu.Lock()
	if t.aborted.Load() || c.recovery.suspends.Load() {
		c.mu.Unlock()
		t.abandon()
		return
	}
	t.idle()
	t.become(taskFetching)
	c.stampWindow(t)
	c.awaitData(t, n-have)
	// c.mu is still held, so that callOff finds the GetData of each task in this state.
	err := c.dm.GetData(t, uint32(t.off)+uint32(have), t.buf.data[have:n])
	if err != nil {
		t.become(taskRunning)
	}
	c.mu.Unlock()
	if err != nil {
		c.end(c.endReason(err))
		t.abandon()
		return
	}
	c.flush()
}

// afterFetch continues a write when the rest of a piece has come.
func (t *Task) afterFetch() {
	switch kept := t.resume(); {
	case t.aborted.Load(): // the data is dropped
		t.abandon()
		return
	case t.fetchErr == nil && !kept:
		t.failTransfer(senseNotTaken)
		return
	case t.fetchErr == nil:
	case errors.Is(t.fetchErr, ErrCanceled):
		t.failTransfer(senseNotTaken)
		return
	case errors.Is(t.fetchErr, ErrDataLost):
		t.failTransfer(senseLost)
		return
	case errors.Is(t.fetchErr, ErrDataAmount):
		t.failTransfer(senseWrongAmount)
		return
	default: // the connection is ending, perhaps nobody has noticed yet
		if t.conn.recovers() {
			t.conn.end(t.conn.endReason(t.fetchErr)) // so that t is parked
		}
		t.abandon()
		return
	}
	if !t.takeTurn() {
		t.abandon()
		return
	}
	if !t.consume(t.buf.data[:t.piece]) {
		t.complete()
		return
	}
	t.write()
}

// failTransfer ends a command whose data did not come as the target asked for it.
func (t *Task) failTransfer(s lun.Sense) {
	t.cmd.Fail(s)
	t.complete()
}

// consume hands a piece to the logical unit. It returns false if the command has failed or was
// aborted.
func (t *Task) consume(p []byte) bool {
	if t.aborted.Load() {
		return false
	}
	ok := t.conn.sess.nexus.Consume(&t.cmd, p, t.off)
	t.leftUnit()
	if !ok {
		return false
	}
	t.off += uint64(len(p))
	return true
}

// takeBuffer returns a Buffer for n bytes, or nil if t was aborted while it waited for one.
func (t *Task) takeBuffer(n int) *Buffer {
	c := t.conn
	if b := c.budget.try(n); b != nil {
		return b
	}
	t.lap(lun.PhaseBackend)
	defer t.lap(lun.PhaseReceive)
	if t.off == 0 {
		t.leaveOrder() // it cannot run yet
	}
	t.idle()
	c.dm.Flush() // Buffers on their way to the initiator come back only when they leave
	c.wantAcks()
	return c.budget.wait(t, n, c.leastPiece())
}

// enqueue takes room for n bytes of b that are about to be queued for sending. It returns false if
// t was aborted while it waited for that.
func (t *Task) enqueue(b *Buffer, n int) bool {
	c := t.conn
	if !c.sending.take(n) {
		t.lap(lun.PhaseBackend)
		defer t.lap(lun.PhaseSend)
		if t.off+uint64(n) == t.total {
			t.leaveOrder() // all is read
		}
		t.idle()
		c.dm.Flush() // t may wait for what it has queued itself
		if !c.sending.wait(t, n) {
			return false
		}
	}
	b.room, b.queued = &c.sending, n
	return true
}

// abandon ends an aborted task without a response, or with TASK ABORTED, or parks one whose connection is
// lost. The logical unit keeps the data that it has got, and begins nothing more.
func (t *Task) abandon() {
	if t.park() {
		return
	}
	c := t.conn
	t.endAborted()
	c.mu.Lock()
	if t.taken {
		c.mu.Unlock()
		c.respond(t)
		return
	}
	aborted := t.aborted.Load() // and not ended by a connection that fails
	c.drop(t)
	c.mu.Unlock()
	if aborted {
		c.tellWindow()
	}
}

// settle makes t, which another session has taken away, a command that has ended with TASK ABORTED.
//
// Preconditions: t.conn.mu is held; the caller runs t, or nobody does; no data of t is on its way.
func (t *Task) settle() {
	invariant.Held(&t.conn.mu)
	t.endAborted()
	t.giveStash() // the initiator may take its time with the answer
	t.taken, t.placed = false, false
	t.aborted.Store(false)
	t.cmd.TakeAway()
	t.putResponse()
}

// endAborted does the work of endBegun for a command that was aborted.
func (t *Task) endAborted() {
	if t.begun {
		t.cmd.Fail(senseAborted)
	}
	t.endBegun(true)
}

// endBegun gives back what the data phase has taken, and counts the command. It returns false if
// the command was counted before.
func (t *Task) endBegun(aborted bool) (counted bool) {
	nexus := t.conn.sess.nexus
	if t.begun {
		t.begun = false
		nexus.End(&t.cmd)
		if !aborted { // else End has called nothing
			t.leftUnit()
		}
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
	if t.resend.refused.Load() && t.cmd.Status == lun.StatusGood {
		t.cmd.Fail(senseSNACK)
	}
	counted := t.endBegun(false)
	if counted {
		t.lap(lun.PhaseBackend)
		t.timed = true
	}
	if flag := t.putResponse(); flag != 0 && counted {
		c.sess.nexus.CountResidual(&t.cmd, flag == pdu.FlagOverflow)
	}
	c.respond(t)
}

// putResponse makes the PDU of t the SCSI Response to its command, which has ended. It returns the flag of
// a residual count, or 0.
func (t *Task) putResponse() (residual byte) {
	h := t.beginPDU(pdu.SCSIResponse, t.header().ITT())
	h.SetResponse(pdu.CommandCompleted)
	h.SetStatus(t.cmd.Status)
	h.SetExpDataSN(t.transfers)
	flag, n := t.residual()
	if n > 0 {
		h.SetFlags(pdu.FlagF | flag)
		h.SetResidual(n)
	}
	t.isFence = t.conn.shared.fence != nil && t.cmd.Fenced()
	t.Segment = nil
	if t.cmd.Status == lun.StatusCheckCondition {
		n := copy(t.scratch[2:], t.cmd.Sense())
		binary.BigEndian.PutUint16(t.scratch[:], uint16(n))
		t.Segment = t.scratch[:2+n]
	}
	return flag
}

// residual compares what the command transfers (SPDTL) with what the initiator expects (EDTL): RFC
// 7143, section 11.4.5. A command that has failed transfers what it had transferred until then,
// unless it failed because of EDTL.
func (t *Task) residual() (flag byte, n uint32) {
	edtl := uint64(t.header().EDTL())
	spdtl := max(t.cmd.DataOut, t.cmd.DataIn)
	switch {
	case t.cmd.Status != lun.StatusGood && !t.cmd.Overflow:
		spdtl = max(t.off, t.cmd.Taken())
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
