package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/rdma/wire"
)

// An Op is the operation of a WorkRequest.
type Op uint8

// Operations of RDMAP (RFC 5040, section 5). SE stands for "with Solicited Event".
const (
	Send Op = iota + 1
	SendInvalidate
	SendSE
	SendSEInvalidate
	Write
	Read
	readResponse
	readRequest // represents a Read in a batch
)

var opcodeOf = [...]wire.Opcode{
	Send:             wire.OpSend,
	SendInvalidate:   wire.OpSendInvalidate,
	SendSE:           wire.OpSendSE,
	SendSEInvalidate: wire.OpSendSEInvalidate,
	Write:            wire.OpWrite,
	Read:             wire.OpReadRequest,
	readResponse:     wire.OpReadResponse,
	readRequest:      wire.OpReadRequest,
}

// A WorkRequest is one RDMAP operation. From Post until it is done, it and the memory
// that it names belong to the Conn. Then it can be posted again.
type WorkRequest struct {
	Op Op
	// Head and Data are the message of a Send or Write, in this order. Head should be
	// short: it is copied. A Read fills Data and does not use Head.
	Head, Data []byte
	// STag and TO name the peer's memory of a Write or Read. In a Send with
	// Invalidate, STag is the one that the peer shall invalidate.
	STag wire.STag
	TO   uint64
	// Done, if not nil, is called when a Send or Write no longer needs its memory: TCP
	// has taken it, or (with an error) it will not be sent. That says nothing about
	// the peer. The end of a Read is an Event instead.
	Done Completer
	// Pages permits the kernel to refer to Data of a Write instead of copying it, also after Done: until the peer has said by its own protocol that it
	// has the message. Data must not change until then, and its memory must not be of the heap. See RefersPages.
	Pages bool
	// Pipe, if not nil, has the Piped bytes that follow Head in a Write, instead of Data. The kernel refers to them as with Pages. See TakesPipes.
	Pipe  *llp.Pipe
	Piped int

	posted bool // between Post and its end; kept in builds with the tag "invariants"
	next   *WorkRequest
	sink   wire.STag // of a Read
	stalls bool      // the Read is counted in ORDStalls
	got    uint64    // bytes of Data that the Response has filled; size of a readRequest
	region *Region   // of a readResponse
}

// A Completer receives a WorkRequest when it is done.
type Completer interface {
	// WorkDone must not wait. err is nil if the message was sent.
	WorkDone(wr *WorkRequest, err error)
}

func (wr *WorkRequest) size() int { return len(wr.Head) + len(wr.Data) + wr.Piped }

// list is a FIFO of work requests, linked through next. It is an iscsi/fifo without its
// second pointer; a package for both would have to lie below rdma and iscsi, and there
// is no such place for 30 lines.
type list struct{ head, tail *WorkRequest }

func (l *list) push(wr *WorkRequest) {
	wr.next = nil
	if l.tail == nil {
		l.head = wr
	} else {
		l.tail.next = wr
	}
	l.tail = wr
}

func (l *list) pop() *WorkRequest {
	wr := l.head
	if wr != nil {
		if l.head = wr.next; l.head == nil {
			l.tail = nil
		}
		wr.next = nil
	}
	return wr
}

func (l *list) take() (all list) {
	all, *l = *l, list{}
	return all
}

// sender is the state of the goroutine that is in Flush.
type sender struct {
	sendMSN, readMSN uint32 // of the next message of queues 0 and 1
	mulpdu           int
	flushes          uint

	out llp.Gather // what is encoded and not yet written

	grid   wire.MarkerGrid
	plain  []byte // one FPDU without Markers
	marked []byte
}

const (
	// writeLen limits the bytes of long payloads in one write: few enough to be still
	// in the cache, where the CRC has brought them, when TCP copies them.
	writeLen = 128 << 10

	// pagesAtLeast is the number of bytes in an FPDU from which the kernel refers to data. Less is cheaper to copy.
	pagesAtLeast = 16 << 10

	// remeasure is the number of flushes after which send reads the segment size again.
	remeasure = 64
	// terminateTime limits how long it may take to send a Terminate.
	terminateTime = 2 * time.Second
)

// init allocates the memory of the sender.
func (s *sender) init() {
	s.sendMSN, s.readMSN = 1, 1
}

// Post appends wr to the send queue, from which Flush sends it. Operations leave in the
// order of Post. A Read that would exceed ORD holds up what follows it until an earlier
// Read is answered. After an error wr is not in the queue. Post does not
// report that a write to the socket has failed: Done does, and Receive returns why the stream ended.
func (c *Conn) Post(wr *WorkRequest) error {
	if uint64(wr.size()) > 1<<32-1 {
		return errTooBig
	}
	if invariants && wr.posted {
		panic("rdma: Post of a WorkRequest that is not done")
	}
	wr.got, wr.stalls = 0, false
	if wr.Op == Read {
		c.mem.mu.Lock()
		wr.sink = c.newSTag()
		c.mem.mu.Unlock()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.err != nil:
		return c.err
	case wr.Op == Read && c.ord == 0:
		return errNoORD
	case wr.Op == Read && c.readErr != nil:
		return c.readErr
	}
	wr.posted = invariants
	c.queue.push(wr)
	return nil
}

// readPending reports whether stag is the sink of a Read without an answer.
func (c *Conn) readPending(stag wire.STag) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range [...]*list{&c.reads, &c.queue} {
		for wr := l.head; wr != nil; wr = wr.next {
			if wr.Op == Read && wr.sink == stag {
				return true
			}
		}
	}
	return false
}

// RefersPages reports whether WorkRequest.Pages saves time at present: FPDUs are long, and have no Markers.
func (c *Conn) RefersPages() bool { return c.refers.Load() }

// TakesPipes reports whether WorkRequest.Pipe is possible, and saves time at present: for a CRC, the target would have to read the data.
func (c *Conn) TakesPipes() bool { return !c.crc && c.RefersPages() }

// Flush sends what the queue holds, and waits until TCP has taken it. If another
// goroutine is in Flush, that one sends everything and this call returns at once. A
// Responder keeps everything back until the peer has sent its first FPDU.
func (c *Conn) Flush() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.flushing {
		return
	}
	c.flushing = true
	for {
		batch := c.takeBatch()
		last := c.ending && !c.ended && c.queue.head == nil && c.due.head == nil
		if batch.head == nil && !last {
			break
		}
		c.ended = c.ended || last
		c.mu.Unlock()
		if batch.head != nil {
			c.finish(batch, c.trySend(batch))
			if c.afterFlush != nil {
				c.afterFlush()
			}
		}
		c.mu.Lock()
		terminate, why := c.terminateFPDU, c.terminateReason
		if c.broken != nil || !c.peerStarted.Load() {
			terminate = nil // the stream has no place for it
		}
		c.mu.Unlock()
		if last {
			c.sendEnd(terminate, why)
		}
		c.mu.Lock()
		c.batches++
	}
	c.tx.out.Release()
	c.flushing = false
}

// trySend writes a batch to the socket, unless a write has failed before. Then no later one can succeed, but the peer may have sent why
// it ended the stream. So Receive says it, and may not wait long. Until then the ULP can post: an error of Post would make it close the
// Conn, and nobody would learn the peer's reason.
func (c *Conn) trySend(batch list) error {
	if c.broken != nil { // without mu: only the goroutine in Flush changes it
		return c.broken
	}
	err := c.send(batch)
	if err == nil {
		return nil
	}
	c.mu.Lock()
	c.broken = err
	c.mu.Unlock()
	c.SetReceiveDeadline(time.Now().Add(terminateTime))
	return err
}

// foundByWrite returns the error of a write that has found that the connection failed, or nil. The kernel reports that once: if a write
// gets the report, a read finds the end of the stream. EPIPE is not such an error: a peer that closes both directions causes it.
func (c *Conn) foundByWrite() error {
	for range 100 {
		c.mu.Lock()
		err, flushing := c.broken, c.flushing
		c.mu.Unlock()
		switch {
		case errors.Is(err, syscall.EPIPE):
			return nil
		case err != nil || !flushing || !llp.Closed(c.nc):
			return err
		}
		time.Sleep(time.Millisecond) // a write to a socket that is closed returns at once
	}
	return nil
}

// flushAside lets another goroutine call Flush, and starts it when first needed. Receive must not
// wait for the peer to take data: two ends that did so would wait for each other.
func (c *Conn) flushAside() {
	if !c.rx.flusher {
		c.rx.flusher = true
		c.aside.Go(func() {
			for {
				select {
				case <-c.wake:
					c.Flush()
				case <-c.gone:
					return
				}
			}
		})
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// takeBatch removes from the queues what may be sent now: all Read Responses, which nothing of ours
// may hold up, and what was posted, up to a Read that exceeds ORD. The Reads in it count as
// outstanding from now on, because their Responses may come at once. Their owners may then reuse
// them before the batch is done, so a readRequest represents each in the batch.
//
// Preconditions: c.mu is held.
func (c *Conn) takeBatch() (batch list) {
	held(&c.mu)
	if !c.peerStarted.Load() {
		return batch
	}
	if c.deferred.Load() {
		c.deferred.Store(false)
	}
	batch = c.due.take()
	for wr := c.queue.head; wr != nil; wr = c.queue.head {
		if wr.Op != Read {
			batch.push(c.queue.pop())
			continue
		}
		if c.nreads >= c.ord {
			if !wr.stalls {
				wr.stalls = true
				c.opt.Domain.counts.ordStalls.Add(1)
			}
			break
		}
		c.nreads++
		liveSTags.Add(1)
		c.reads.push(c.queue.pop())
		r := c.requests.pop()
		if r == nil {
			r = &WorkRequest{Op: readRequest}
		}
		r.STag, r.TO, r.sink, r.got = wr.STag, wr.TO, wr.sink, uint64(len(wr.Data))
		batch.push(r)
	}
	return batch
}

// finish returns work requests to their owners.
func (c *Conn) finish(l list, err error) {
	for wr := l.pop(); wr != nil; wr = l.pop() {
		switch wr.Op {
		case readRequest:
			c.mu.Lock()
			c.requests.push(wr)
			c.mu.Unlock()
		case readResponse:
			if wr.region != nil {
				c.mem.release(wr.region)
			}
			c.mu.Lock()
			wr.region, wr.Data = nil, nil
			c.answers.push(wr)
			c.mu.Unlock()
		default:
			wr.posted = false
			if wr.Done != nil {
				wr.Done.WorkDone(wr, err)
			}
		}
	}
}

// send writes a batch to the socket.
func (c *Conn) send(batch list) error {
	s := &c.tx
	if s.flushes%remeasure == 0 {
		s.mulpdu = c.mulpdu()
		c.refers.Store(!c.markersOut && s.mulpdu >= pagesAtLeast && s.out.RefersPages())
	}
	s.flushes++
	for wr := batch.head; wr != nil; wr = wr.next {
		var err error
		switch {
		case wr.Op == readRequest:
			err = c.sendReadRequest(wr)
		case wr.Op == Write || wr.Op == readResponse:
			err = c.sendTagged(wr)
		default:
			err = c.sendUntagged(wr)
		}
		if err != nil {
			return err
		}
		c.counts.sent.messages[opcodeOf[wr.Op]].Add(1)
	}
	return c.write()
}

// sendTagged encodes an RDMA Write or RDMA Read Response (RFC 5041, sections
// 4.2 and 5.2). An empty message is one segment.
func (c *Conn) sendTagged(wr *WorkRequest) error {
	h := wire.Tagged{ULP: opcodeOf[wr.Op].Control(), STag: wr.STag, TO: wr.TO}
	return c.segments(wr, wire.TaggedLen, func(b []byte, off int, last bool) {
		h.TO, h.Last = wr.TO+uint64(off), last
		h.Put(b)
	})
}

// sendUntagged encodes a Send (RFC 5041, section 4.3).
func (c *Conn) sendUntagged(wr *WorkRequest) error {
	op := opcodeOf[wr.Op]
	h := wire.Untagged{ULP: op.Control(), QN: wire.QNSend, MSN: c.tx.sendMSN}
	if op.Invalidates() {
		h.Invalidate = wr.STag
	}
	c.tx.sendMSN++
	return c.segments(wr, wire.UntaggedLen, func(b []byte, off int, last bool) {
		h.MO, h.Last = uint32(off), last
		h.Put(b)
	})
}

func (c *Conn) sendReadRequest(wr *WorkRequest) error {
	s := &c.tx
	n := wire.UntaggedLen + wire.ReadRequestLen
	b, err := c.header(n)
	if err != nil {
		return err
	}
	wire.Untagged{Last: true, ULP: wire.OpReadRequest.Control(), QN: wire.QNReadRequest, MSN: s.readMSN}.Put(b)
	wire.ReadRequest{SinkSTag: wr.sink, Size: uint32(wr.got), SrcSTag: wr.STag, SrcTO: wr.TO}.Put(b[wire.UntaggedLen:])
	s.readMSN++
	return c.trailer(n, nil, payload{})
}

// segments cuts the message of wr into DDP segments of at most one MULPDU. put encodes
// the header of the segment whose payload begins at off.
func (c *Conn) segments(wr *WorkRequest, hlen int, put func(b []byte, off int, last bool)) error {
	size, most := wr.size(), c.tx.mulpdu-hlen
	head, rest := wr.Head, payload{wr.Data, wr.Pages, wr.Pipe, wr.Piped}
	for off := 0; ; {
		n := min(size-off, most)
		b, err := c.header(hlen + n)
		if err != nil {
			return err
		}
		put(b, off, off+n == size)
		k := min(n, len(head))
		if err := c.trailer(hlen, head[:k], rest.take(n-k)); err != nil {
			return err
		}
		head = head[k:]
		if off += n; off == size {
			return nil
		}
	}
}

// A payload is what follows the head of a message, or a part of it: see WorkRequest.
type payload struct {
	data  []byte
	pages bool
	pipe  *llp.Pipe
	piped int
}

// take removes the first n bytes of p and returns them.
func (p *payload) take(n int) payload {
	first := *p
	if p.pipe != nil {
		first.piped = n
		p.piped -= n
		return first
	}
	first.data, p.data = p.data[:n], p.data[n:]
	return first
}

// header starts an FPDU for a ULPDU of n bytes: it makes room, writes ULPDU_Length and
// returns the place of the DDP header. trailer ends the FPDU.
func (c *Conn) header(n int) ([]byte, error) {
	s := &c.tx
	const most = wire.LengthLen + wire.UntaggedLen + wire.ReadRequestLen + 2*llp.CopyBelow + 3 + wire.CRCLen
	if !s.out.Room(most) || s.out.Long() >= writeLen {
		if err := c.write(); err != nil {
			return nil, err
		}
	}
	b := append(s.out.Slab, byte(n>>8), byte(n))
	s.out.Slab = b
	return b[len(b):cap(b)], nil
}

// trailer ends the FPDU that header has started, after the caller has written the DDP
// header of hlen bytes. It adds head and p, then PAD and CRC.
func (c *Conn) trailer(hlen int, head []byte, p payload) error {
	out := &c.tx.out
	c.counts.sent.fpdus.Add(1)
	start := len(out.Slab) - wire.LengthLen
	out.Slab = out.Slab[:len(out.Slab)+hlen]
	out.Slab = append(out.Slab, head...) // a Send's head is a PDU header
	data := p.data
	pad := wire.Pad(hlen + len(head) + len(data) + p.piped)
	if c.markersOut {
		return c.trailerMarked(start, data, pad)
	}
	short := len(data) < llp.CopyBelow
	if short {
		out.Slab = append(out.Slab, data...)
	}
	var crc uint32
	if c.crc {
		crc = wire.UpdateCRC(0, out.Slab[start:])
	}
	switch {
	case p.pipe != nil:
		out.ReferPipe(p.pipe, p.piped)
	case !short:
		if p.pages && len(data) >= pagesAtLeast && out.RefersPages() {
			out.ReferPages(data)
		} else {
			out.Refer(data)
		}
		if c.crc {
			crc = wire.UpdateCRC(crc, data)
		}
	}
	out.Slab = append(out.Slab, zeros[:pad]...)
	if c.crc {
		crc = wire.UpdateCRC(crc, zeros[:pad])
	}
	out.Slab = wire.AppendCRC(out.Slab, crc)
	return nil
}

var zeros [3]byte

// trailerMarked ends an FPDU for a peer that requires Markers. It assembles the FPDU and
// writes it at once.
func (c *Conn) trailerMarked(start int, data []byte, pad int) error {
	s := &c.tx
	s.plain = append(s.plain[:0], s.out.Slab[start:]...)
	s.plain = append(s.plain, data...)
	s.plain = append(s.plain, zeros[:pad]...)
	s.plain = append(s.plain, 0, 0, 0, 0)
	s.out.Reset()
	s.marked, s.grid = s.grid.AppendFPDU(s.marked[:0], s.plain, c.crc)
	if _, err := c.nc.Write(s.marked); err != nil {
		return fmt.Errorf("%w: %w", errWriting, err)
	}
	return nil
}

// write writes what is encoded to the socket.
func (c *Conn) write() error {
	if err := c.tx.out.Flush(); err != nil {
		return fmt.Errorf("%w: %w", errWriting, err)
	}
	return nil
}

// end ends our direction of the stream after what is queued. terminate, if not nil, is
// the FPDU of a Terminate with the Reason why, and comes last. The first one counts.
func (c *Conn) end(terminate []byte, why wire.Reason) {
	c.mu.Lock()
	c.err = cmp.Or(c.err, ErrClosed)
	c.ending = true
	if c.terminateFPDU == nil {
		c.terminateFPDU, c.terminateReason = terminate, why
	}
	c.mu.Unlock()
	c.Flush()
}

// sendEnd sends the Terminate, if any, and ends our direction of the TCP connection.
func (c *Conn) sendEnd(terminate []byte, why wire.Reason) {
	if c.markersOut && terminate != nil {
		terminate, c.tx.grid = c.tx.grid.AppendFPDU(nil, terminate, c.crc)
	}
	if terminate != nil {
		if _, err := c.nc.Write(terminate); err == nil {
			c.counts.sent.fpdus.Add(1)
			c.opt.Domain.counts.terminateSent(why)
		}
	}
	if hc, ok := c.nc.(interface{ CloseWrite() error }); ok {
		hc.CloseWrite()
	}
}

// terminate ends the stream with a Terminate (RFC 5040, section 5.4), which is our last
// message. ddp, segment and read describe the refused message.
func (c *Conn) terminate(why *StreamError, ddp []byte, segment int, read []byte) {
	t := wire.Terminate{Reason: why.Reason, DDP: ddp, Segment: uint16(segment), ReadRequest: read}
	if why.Reason.Layer == wire.LayerLLP || why.Reason.Layer == wire.LayerRDMAP && why.Reason.EType == 0 {
		t.DDP = nil // RFC 5040, Figure 10
	}
	n := wire.UntaggedLen + wire.MaxTerminateLen
	b := make([]byte, wire.LengthLen+wire.UntaggedLen, wire.LengthLen+n+3+wire.CRCLen)
	wire.Untagged{Last: true, ULP: wire.OpTerminate.Control(), QN: wire.QNTerminate, MSN: 1}.Put(b[wire.LengthLen:])
	b = t.Append(b)
	b[0], b[1] = byte((len(b)-2)>>8), byte(len(b)-2)
	b = append(b, zeros[:wire.Pad(len(b)-2)]...)
	var crc uint32
	if c.crc {
		crc = wire.UpdateCRC(0, b)
	}
	b = wire.AppendCRC(b, crc)

	c.abandon(why)
	c.nc.SetWriteDeadline(time.Now().Add(terminateTime))
	c.end(b, t.Reason)
}
