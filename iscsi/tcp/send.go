package tcp

import (
	"encoding/binary"
	"fmt"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/fifo"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/rdma/crc32c"
	"github.com/iser-target/iser-target/rdma/llp"
)

const digestLen = 4

// shareAtLeast is the number of bytes in a Data-In from which the kernel refers to data that a logical unit has lent. Less is cheaper to copy.
const shareAtLeast = 32 << 10

// updateDigest returns crc extended by p. A CRC32C starts as 0 (RFC 7143, section 13.1).
func updateDigest(crc uint32, p []byte) uint32 { return crc32c.Update(crc, p) }

// An item is queued data or a PDU; it leaves as one or more PDUs. Data-In and R2T items
// hold all they need, because their task may be over before they leave.
type item struct {
	link fifo.Link[item]
	op   pdu.Opcode

	// task has the PDU of SendControl. In a Data-In it is nil, or the task whose SCSI
	// Response travels in the last PDU.
	task *task

	itt, ttt           uint32
	lun                [8]byte // of an R2T
	expCmdSN, maxCmdSN uint32  // when it was queued

	stretch
	data []byte // nil: all that is lent to buf, or in its Pipe
	buf  *iscsi.Buffer

	// The kernel refers to data, which must not change until the initiator has it: when ExpStatSN is until or later.
	shared bool
	until  uint32

	// At an ErrorRecoveryLevel above 0:
	recovers bool
	repeated bool        // a copy of a sent item
	before   uint32      // bytes of Data-In before data since the last A bit
	by       *iscsi.Task // the core learns by its Sent that this has left
}

// A stretch says what an item asks for or how its data is cut into Data-In PDUs.
type stretch struct {
	sn      uint32 // DataSN of the first PDU, or R2TSN
	off     uint32 // Buffer Offset
	size    uint32 // bytes of data, or Desired Data Transfer Length
	segment uint32 // longest data segment of a Data-In
	burst   uint32 // longest sequence of them

	// At an ErrorRecoveryLevel above 0:
	from, to uint32 // the part of the data to send
	count    uint32 // PDUs of a kept item
}

// cut returns the length of the Data-In that starts at byte off of the data.
func (s *stretch) cut(off uint32) uint32 { return min(s.segment, s.burst-off%s.burst, s.size-off) }

// pdus returns how many Data-In PDUs s needs.
func (s *stretch) pdus() (n uint32) {
	perBurst := (s.burst-1)/s.segment + 1
	return s.size/s.burst*perBurst + (s.size%s.burst+s.segment-1)/s.segment
}

// A list is a queue of items.
type list = fifo.Queue[item]

// newItem returns an item for a Data-In or an R2T.
//
// Preconditions: c.mu is held.
func (c *Conn) newItem() *item {
	invariant.Held(&c.mu)
	if i := c.free.Pop(); i != nil {
		return i
	}
	return &item{}
}

// sender is the state of the goroutine that is in Flush.
type sender struct {
	digests digests

	// The StatSN of the next status, and the latest ExpCmdSN and MaxCmdSN that were sent.
	statSN, expCmdSN, maxCmdSN uint32

	out llp.Gather // what is encoded and not yet written
}

// Flush implements iscsi.Datamover. It waits until TCP has taken what the queue holds.
func (c *Conn) Flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.flushing {
		return
	}
	c.flushing = true
	for {
		if c.deferred.Load() {
			c.deferred.Store(false)
		}
		batch := c.queue.Take()
		c.mark++
		last := c.ending && !c.ended
		if batch.Empty() && !last {
			break
		}
		c.ended = c.ended || last
		c.tx.digests = c.digests
		c.mu.Unlock()
		if err := c.send(batch); err != nil {
			c.abandon(fmt.Errorf("sending: %w", err))
			c.nc.Close() // Receive must not wait for a peer that cannot get our answers
		}
		c.done(batch)
		if last {
			if hc, ok := c.nc.(interface{ CloseWrite() error }); ok {
				hc.CloseWrite()
			}
		}
		c.mu.Lock()
		c.batches++
	}
	c.tx.out.Release()
	c.flushing = false
}

// flushAside calls Flush in a goroutine of its own.
func (c *Conn) flushAside() {
	defer c.aside.Done()
	c.Flush()
}

// done releases what the items refer to, and the items that no task owns.
func (c *Conn) done(l list) {
	var free list
	var departure iscsi.Departure
	for i := l.Pop(); i != nil; i = l.Pop() {
		t, by := i.task, i.by
		switch {
		case i.shared:
			c.holds.Hold(i.buf, i.until)
		case i.op == pdu.DataIn:
			if i.recovers && !i.repeated { // others may keep it
				i.buf.Sent()
			}
			departure.Release(i.buf)
		}
		if i.op == pdu.DataIn || i.op == pdu.R2T {
			i.buf, i.data, i.task, i.by, i.shared = nil, nil, nil, nil, false
			free.Push(i, &i.link)
		}
		if t != nil {
			departure.Sent(t.t)
		}
		if by != nil {
			by.Sent()
		}
	}
	departure.End()
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := free.Pop(); i != nil; i = free.Pop() {
		c.free.Push(i, &i.link)
	}
}

// send writes a batch to the socket.
func (c *Conn) send(batch list) error {
	for i := range batch.All() {
		var err error
		switch i.op {
		case pdu.DataIn:
			err = c.sendDataIn(i)
		case pdu.R2T:
			err = c.sendR2T(i)
		default:
			err = c.sendControl(i.task)
		}
		if err != nil {
			return err
		}
	}
	return c.tx.out.Flush()
}

// sendDataIn encodes data as Data-In PDUs (RFC 7143, section 11.7), in sequences of at
// most MaxBurstLength bytes. The last PDU of each has F set.
func (c *Conn) sendDataIn(i *item) error {
	s, size, sn := &c.tx, i.size, i.sn
	off, last := uint32(0), size
	if i.recovers {
		off, last = i.from, i.to
	}
	s.advance(i.expCmdSN, i.maxCmdSN)
	piped := i.buf.Pipe() != nil
	if i.shared = piped || i.data == nil && min(size, i.segment) >= shareAtLeast && s.out.RefersPages() && i.buf.Share(); i.shared {
		i.until = s.statSN + 1 // the next status leaves after the data
		if i.task != nil {
			i.until = pdu.BHS(i.task.t.Header[:]).StatSN() + 1
		}
	}
	for off < last {
		n := i.cut(off)
		h, err := c.header(len(i.buf.Lent()))
		if err != nil {
			return err
		}
		end := off + n
		var flags byte
		if end == size || end%i.burst == 0 {
			flags = pdu.FlagF
		}
		h.Reset(pdu.DataIn, flags)
		h.SetITT(i.itt)
		h.SetTTT(pdu.ReservedTag)
		if i.recovers && i.wantsAck(end) {
			h.SetFlags(pdu.FlagF | pdu.FlagA)
			h.SetTTT(i.ttt)
			h.SetLUN(i.lun)
		}
		h.SetDataSN(sn)
		h.SetBufferOffset(i.off + off)
		if end == size && i.task != nil {
			rsp := pdu.BHS(i.task.t.Header[:])
			h.SetFlags(flags | pdu.FlagS | rsp.Flags()&(pdu.FlagOverflow|pdu.FlagUnderflow))
			h.SetStatus(rsp.Status())
			h.SetStatSN(rsp.StatSN())
			h.SetResidual(rsp.Residual())
			s.status(rsp)
		}
		h.SetExpCmdSN(s.expCmdSN)
		h.SetMaxCmdSN(s.maxCmdSN)
		if i.data == nil {
			c.lentTrailer(h, i, off, end)
		} else {
			c.trailer(h, i.data[off:end], s.digests)
		}
		sn++
		off = end
	}
	return nil
}

// sendR2T encodes an R2T. It carries the next StatSN without advancing it (RFC
// 7143, section 11.8.3).
func (c *Conn) sendR2T(i *item) error {
	h, err := c.header(0)
	if err != nil {
		return err
	}
	s := &c.tx
	s.advance(i.expCmdSN, i.maxCmdSN)
	h.Reset(pdu.R2T, pdu.FlagF)
	h.SetLUN(i.lun)
	h.SetITT(i.itt)
	h.SetTTT(i.ttt)
	h.SetStatSN(s.statSN)
	h.SetExpCmdSN(s.expCmdSN)
	h.SetMaxCmdSN(s.maxCmdSN)
	h.SetR2TSN(i.sn)
	h.SetBufferOffset(i.off)
	h.SetDesiredDataTransferLength(i.size)
	c.trailer(h, nil, s.digests)
	return nil
}

// sendControl encodes the PDU of SendControl.
func (c *Conn) sendControl(t *task) error {
	h, err := c.header(0)
	if err != nil {
		return err
	}
	copy(h, t.t.Header[:])
	d := c.tx.digests
	if h.Opcode() == pdu.LoginResp { // they start after the last one
		d = digests{}
	}
	c.tx.status(h)
	c.trailer(h, t.t.Segment, d)
	return nil
}

// status notes the serial numbers of a PDU that the core has numbered. The core numbers
// PDUs in the order of SendControl, so these are the latest ones, except for the StatSN
// of a status that is repeated.
func (s *sender) status(h pdu.BHS) {
	next := h.StatSN()
	if h.Opcode() != pdu.NOPIn || h.ITT() != pdu.ReservedTag { // RFC 7143, section 11.19.2
		next++
	}
	if pdu.Before(s.statSN, next) {
		s.statSN = next
	}
	s.expCmdSN, s.maxCmdSN = h.ExpCmdSN(), h.MaxCmdSN()
}

// advance notes the serial numbers from the time when data was queued. A PDU with later
// ones may have left before.
func (s *sender) advance(expCmdSN, maxCmdSN uint32) {
	if pdu.Before(s.expCmdSN, expCmdSN) {
		s.expCmdSN = expCmdSN
	}
	if pdu.Before(s.maxCmdSN, maxCmdSN) {
		s.maxCmdSN = maxCmdSN
	}
}

// header starts a PDU, with that many parts of lent data, and returns its BHS. trailer or lentTrailer ends the PDU.
func (c *Conn) header(parts int) (pdu.BHS, error) {
	out := &c.tx.out
	const most = pdu.BHSLen + llp.CopyBelow + 3 + 2*digestLen
	if !out.RoomFor(most, max(parts, 1)) {
		if err := out.Flush(); err != nil {
			return nil, err
		}
	}
	n := len(out.Slab)
	out.Slab = out.Slab[:n+pdu.BHSLen]
	return pdu.BHS(out.Slab[n:]), nil
}

// startTrailer completes the header of a PDU with n bytes of data.
func (c *Conn) startTrailer(h pdu.BHS, n int, d digests) {
	h.SetDataSegmentLength(n)
	if d.header {
		c.tx.out.Slab = binary.LittleEndian.AppendUint32(c.tx.out.Slab, updateDigest(0, h))
	}
}

// lentTrailer does what trailer does, for bytes off to end of the data of i, which is lent: whole words.
func (c *Conn) lentTrailer(h pdu.BHS, i *item, off, end uint32) {
	out := &c.tx.out
	c.startTrailer(h, int(end-off), c.tx.digests)
	if p := i.buf.Pipe(); p != nil {
		out.ReferPipe(p.(*llp.Pipe), int(end-off))
		return
	}
	at, crc := uint32(0), uint32(0)
	for _, l := range i.buf.Lent() {
		next := at + uint32(len(l.Data))
		if from, to := max(off, at), min(end, next); from < to {
			part := l.Data[from-at : to-at]
			if c.tx.digests.data {
				crc = updateDigest(crc, part)
			}
			if i.shared {
				out.ReferPages(part)
			} else {
				out.Refer(part)
			}
		}
		at = next
	}
	if c.tx.digests.data {
		out.Slab = binary.LittleEndian.AppendUint32(out.Slab, crc)
	}
}

var zeros [3]byte

// trailer ends the PDU that header has started. It adds the data segment and digests.
func (c *Conn) trailer(h pdu.BHS, data []byte, d digests) {
	out := &c.tx.out
	c.startTrailer(h, len(data), d)
	if len(data) == 0 {
		return
	}
	if len(data) < llp.CopyBelow {
		out.Slab = append(out.Slab, data...)
	} else {
		out.Refer(data)
	}
	pad := zeros[:pdu.Padded(len(data))-len(data)]
	out.Slab = append(out.Slab, pad...)
	if d.data {
		out.Slab = binary.LittleEndian.AppendUint32(out.Slab, updateDigest(updateDigest(0, data), pad))
	}
}
