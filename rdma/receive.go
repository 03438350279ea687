package rdma

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/rdma/wire"
)

// An Event is what Receive returns: a Send of the peer, or the end of a posted Read.
type Event struct {
	// Read is the work request that is complete, or nil for a Send.
	Read *WorkRequest
	// Err is nil if the Read has filled all of its memory.
	Err error

	// Data is the message of a Send. It is valid until the next Receive. If it is in memory of SetSink, it lacks the
	// bytes at its beginning, which are in Head.
	Head, Data []byte
	// Solicited says that the peer asked for an event (RFC 5040, section 5.3).
	Solicited bool
	// Invalidates says that the Send has invalidated an STag, Invalidated.
	Invalidates bool
	Invalidated wire.STag
}

// receiver is the state of the goroutine that is in Receive.
type receiver struct {
	win  llp.Window
	one  func(p []byte) (int, error)    // reads from the socket
	both func(p, q []byte) (int, error) // the same to two places, see llp.Readers; nil: it cannot do that
	long int                            // longer ULPDUs do not wait in win until they are whole

	asm     []byte // a Send of several segments; maxSend bytes at most
	asmLen  int    // of the present Send, wherever it is
	maxSend int
	sendMSN uint32 // expected on queue 0
	readMSN uint32 // expected on queue 1

	// Of SetSink:
	head []byte
	sink func(head []byte) []byte
	sunk []byte // memory for the present Send without head; nil: it is in asm

	seg  segment
	hdr  [wire.UntaggedLen + wire.ReadRequestLen]byte
	fpdu uint64 // FPDUs so far

	flusher bool // the goroutine of flushAside is running

	// For receiveMarked only:
	markers bool
	grid    wire.MarkerGrid
	marked  []byte // the present FPDU as it came
	plain   []byte // the present FPDU without its Markers

	failed error // what Receive returns after all Reads
}

// segment is the FPDU that is being received.
type segment struct {
	op     wire.Opcode
	last   bool
	tagged wire.Tagged
	untag  wire.Untagged
	hlen   int    // DDP header
	length int    // ULPDU_Length
	hdr    []byte // copy of the DDP header, and of a Read Request, for a Terminate
	begins bool   // the payload begins with the head of SetSink: begin knows dst
	dst    []byte // where the payload goes; nil: it stays in the window
	region *Region
	read   *WorkRequest
}

func (s *segment) payload() int { return s.length - s.hlen }

const (
	// drainTime and drainLen limit for how long and how much drain reads after a
	// Terminate, so that no TCP reset overtakes it.
	drainTime = time.Second
	drainLen  = 16 << 20
)

// init allocates the memory of the receiver, which gets its bytes from read.
func (rx *receiver) init(read func([]byte) (int, error), maxSend int, markers bool) {
	rx.win.Init(read, nil)
	rx.maxSend, rx.long = maxSend, llp.FirstLong
	rx.sendMSN, rx.readMSN = 1, 1
	rx.markers = markers
}

var (
	errRevoked    = errors.New("the memory of this message was deregistered")
	errUnanswered = fmt.Errorf("the peer has closed its direction of the stream: %w", io.EOF)
)

// Receive waits for the next Send of the peer or the end of a posted Read, and meanwhile places
// RDMA data. It returns io.EOF if the peer closed the stream between two messages, and a
// *StreamError if a Terminate ended it, ours or the peer's. After every error except a time-out the
// stream has ended. Receive returns every posted Read before such an error.
func (c *Conn) Receive(ev *Event) error {
	rx := &c.rx
	for rx.failed == nil {
		done, err := c.receiveFPDU(ev)
		if err != nil {
			// Between FPDUs, and while the window holds all that has come of one, a
			// time-out loses nothing.
			if errors.Is(err, os.ErrDeadlineExceeded) && !rx.win.Inside && len(rx.marked) == 0 && !c.writeFailed() {
				return err
			}
			c.fail(err)
			break
		}
		if done {
			return nil
		}
	}
	return c.drainReads(ev)
}

// drainReads returns each Read that nobody will answer, then why the stream ended.
// After Close it waits for the goroutine of flushAside, so that nothing of the Conn
// runs when its caller is told of the end.
func (c *Conn) drainReads(ev *Event) error {
	c.mu.Lock()
	for wr := c.popRead(); wr != nil; wr = c.popRead() {
		if wr != c.rtr {
			c.flushed.push(wr)
		}
	}
	wr, closed := c.flushed.pop(), c.closed
	c.mu.Unlock()
	if wr == nil {
		if closed {
			c.aside.Wait()
		}
		return c.rx.failed
	}
	wr.posted = false
	*ev = Event{Read: wr, Err: c.rx.failed}
	if ev.Err == io.EOF {
		ev.Err = errUnanswered
	}
	return nil
}

// writeFailed reports whether a write to the socket has failed.
func (c *Conn) writeFailed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.broken != nil
}

// fail ends the stream because of err. If it is the peer's fault, fail tells the peer.
func (c *Conn) fail(err error) {
	rx := &c.rx
	c.mu.Lock()
	broken, txErr, closed := c.broken, cmp.Or(c.broken, c.err), c.closed
	c.mu.Unlock()
	if err == io.EOF {
		if failed := c.foundByWrite(); failed != nil {
			err, txErr = failed, nil
		}
	}
	var se *StreamError
	if rx.markers && !c.peerStarted.Load() && !closed && !errors.As(err, &se) {
		err = fmt.Errorf("the peer has sent nothing since the Reply asked for Markers, which it may not support: %v", err)
	}
	switch {
	case closed:
		err = ErrClosed
	case errors.As(err, &se):
		if !se.Remote {
			c.refuse(se)
			c.drain()
		}
	case err == io.EOF && rx.asmLen == 0:
		// A peer that has closed its direction still receives, but answers nothing.
		rx.failed = err
		c.mu.Lock()
		c.flushReads(errUnanswered)
		c.mu.Unlock()
		c.flushAside() // what those Reads held up
		return
	default:
		if err == io.EOF {
			err = llp.ErrTruncated
		}
		switch {
		case txErr == nil || txErr == ErrClosed:
		case broken != nil && errors.Is(err, os.ErrDeadlineExceeded): // that of trySend
			err = broken
		default:
			err = errors.Join(err, txErr)
		}
		err = &StreamError{Reason: wire.ReasonClosed, Err: err}
	}
	rx.failed = err
	c.abandon(err)
}

// refuse terminates the stream because of the segment in c.rx.seg.
func (c *Conn) refuse(why *StreamError) {
	c.opt.Domain.counts.fault(why.Reason)
	seg := &c.rx.seg
	var ddp, read []byte
	if len(seg.hdr) > 0 {
		ddp = seg.hdr[:seg.hlen]
		if len(seg.hdr) > seg.hlen && why.Reason.Layer == wire.LayerRDMAP && why.Reason.EType == 1 {
			read = seg.hdr[seg.hlen:]
		}
	}
	c.terminate(why, ddp, seg.length, read)
}

// Refuse ends the stream because the ULP does not accept the message that Receive returned last. The
// Terminate describes that message. A later Post returns why. Only the goroutine that calls Receive may
// call Refuse.
func (c *Conn) Refuse(reason wire.Reason, why error) {
	c.refuse(&StreamError{Reason: reason, Err: why})
}

// drain reads what the peer sent before our Terminate could reach it. To close a socket with unread
// data resets the connection, and the reset could overtake the Terminate (RFC 5040, section 6.2.1).
func (c *Conn) drain() {
	c.rx.win.Lose()
	c.nc.SetReadDeadline(time.Now().Add(drainTime))
	io.Copy(io.Discard, io.LimitReader(c.nc, drainLen))
}

// Unread reports where FPDUs begin, as llp.Window.Unread does, to a net.Conn that calls
// it from within its Read. In the middle of an FPDU with Markers that is not known.
func (c *Conn) Unread() (unread []byte, rest int) {
	rx := &c.rx
	if len(rx.marked) > 0 {
		return nil, math.MaxInt
	}
	return rx.win.Unread()
}

// read reads from the socket for the window. It first sends what Defer kept back,
// because it may have to wait. A Deregister interrupts it, and so does Pause. Then it returns errRevoked
// if the memory of the present segment is gone, errPaused between two messages, and reads again otherwise.
func (c *Conn) read(p []byte) (n int, err error) { return c.readBoth(p, nil) }

// readBoth does what read does, and reads to q what comes after p. Without q it reads to p only.
func (c *Conn) readBoth(p, q []byte) (n int, err error) {
	c.flushDeferred()
	for {
		if c.paused.Load() && c.rx.rests() {
			return 0, errPaused
		}
		if c.impatient {
			if err := c.patience(1); err != nil {
				return 0, err
			}
		}
		if q == nil {
			n, err = c.rx.one(p)
		} else {
			n, err = c.rx.both(p, q)
		}
		if n > 0 || err == nil || !c.interrupted(err) {
			return n, err
		}
		if r := c.rx.seg.region; r != nil && c.mem.revoked(r) {
			return 0, errRevoked
		}
	}
}

// patience returns llp.ErrNothing if Receive can return instead of waiting for n bytes. See SetImpatient.
func (c *Conn) patience(n int) error {
	rx := &c.rx
	if rx.win.Inside || len(rx.marked) > 0 || llp.Ready(c.raw, n) {
		return nil
	}
	if rx.asmLen == 0 {
		rx.asm = nil // of the last Send
	}
	return llp.ErrNothing
}

// Pending reports whether the next FPDU is short and has come as a whole, so that
// Receive would not wait. Only the goroutine that calls Receive may call it.
func (c *Conn) Pending() bool {
	rx := &c.rx
	b := rx.win.Peek(rx.win.Len())
	if rx.failed != nil || rx.markers || len(b) < wire.LengthLen {
		return false
	}
	n := wire.ULPDULength(b)
	return n <= rx.long && len(b) >= wire.FPDULen(n)
}

// Defer replaces a Flush while an FPDU is Pending. What is queued leaves with the next
// Flush, or before Receive waits for the peer.
func (c *Conn) Defer() { c.deferred.Store(true) }

// flushDeferred sends what Defer kept back.
func (c *Conn) flushDeferred() {
	if c.deferred.Load() {
		c.deferred.Store(false)
		c.flushAside()
	}
}

// receiveFPDU receives one FPDU. done says that it filled ev.
func (c *Conn) receiveFPDU(ev *Event) (done bool, err error) {
	rx := &c.rx
	seg := &rx.seg
	*seg = segment{}
	rx.win.Inside = false
	if rx.markers {
		return c.receiveMarked(ev)
	}
	if err := rx.win.Fill(wire.LengthLen); err != nil {
		return false, err
	}
	b := rx.win.Peek(wire.LengthLen)
	seg.length = wire.ULPDULength(b)
	total := wire.FPDULen(seg.length)
	if seg.length > rx.long {
		return c.receiveLong(ev, total)
	}
	if err := rx.win.Fill(total); err != nil {
		return false, err
	}
	b = rx.win.Take(total)
	if c.crc && wire.UpdateCRC(0, b[:total-wire.CRCLen]) != wire.CRC(b[total-wire.CRCLen:]) {
		return false, fault(wire.ReasonCRC, "FPDU of %d bytes", total)
	}
	return c.place(ev, b[wire.LengthLen:][:seg.length])
}

// verified notes that an FPDU of the peer has passed its CRC. After the first one a
// Responder may send.
func (c *Conn) verified() {
	if c.unheard.Load() {
		c.hear()
	}
	if !c.peerStarted.Load() {
		c.peerStarted.Store(true)
		c.mu.Lock()
		waits := c.queue.head != nil || c.due.head != nil || c.ending
		c.mu.Unlock()
		if waits { // what the ULP has posted so far
			c.flushAside()
		}
	}
}

// place handles a whole ULPDU after its CRC was checked.
func (c *Conn) place(ev *Event, ulpdu []byte) (done bool, err error) {
	c.verified()
	seg := &c.rx.seg
	if err := c.route(ulpdu); err != nil {
		return false, err
	}
	payload := ulpdu[seg.hlen:]
	if seg.begins {
		payload = payload[c.rx.begin(payload):]
	}
	if seg.dst != nil {
		copy(seg.dst, payload)
		c.unuse()
	}
	c.rx.win.Thin = false
	return c.deliver(ev, payload)
}

// receiveLong receives an FPDU with a long payload. It reads the header first, and then the payload
// straight to its destination. The CRC comes last: placing may run ahead of it, delivery does not.
func (c *Conn) receiveLong(ev *Event, total int) (done bool, err error) {
	rx := &c.rx
	seg := &rx.seg
	c.flushDeferred()
	if err := rx.win.Await(total); err != nil {
		return false, err
	}
	const headers = wire.LengthLen + wire.UntaggedLen + wire.ReadRequestLen
	if err := rx.win.Fill(headers); err != nil {
		return false, err
	}
	routeErr := c.route(rx.win.Peek(headers)[wire.LengthLen:])
	if routeErr != nil {
		// If CRCs are on, the end of the FPDU shows whether to trust the header.
		return false, c.judge(routeErr, total)
	}
	hlen := wire.LengthLen + seg.hlen
	n := hlen
	if seg.begins {
		n += len(rx.head)
		if err := rx.win.Fill(n); err != nil {
			return false, err
		}
	}
	crc := uint32(0)
	header := rx.win.TakeHeader(n, total-n)
	if c.crc {
		crc = wire.UpdateCRC(0, header)
	}
	rx.win.Inside, rx.win.Thin = true, true
	if seg.begins {
		rx.begin(header[hlen:])
	}
	tail := wire.Pad(seg.length) + wire.CRCLen
	for dst := seg.dst; len(dst) > 0; {
		got, err := rx.win.Read(dst)
		if got == 0 && err != nil {
			c.unuse()
			if err == errRevoked { // the rest goes nowhere
				err = c.judge(fault(wire.ReasonInvalidSTag, "STag %#x was revoked", seg.tagged.STag), len(dst)+tail)
			}
			return false, err
		}
		if c.crc {
			crc = wire.UpdateCRC(crc, dst[:got])
		}
		dst = dst[got:]
	}
	c.unuse()
	if err := rx.win.Fill(tail); err != nil {
		return false, err
	}
	b := rx.win.TakeTrailer(tail)
	if c.crc && wire.UpdateCRC(crc, b[:tail-wire.CRCLen]) != wire.CRC(b[tail-wire.CRCLen:]) {
		return false, fault(wire.ReasonCRC, "FPDU of %d bytes", total)
	}
	c.verified()
	return c.deliver(ev, seg.dst)
}

// judge reads the last n bytes of an FPDU whose header is wrong or whose memory is
// gone. It returns a CRC error if there is one, and found otherwise.
func (c *Conn) judge(found error, n int) error {
	rx := &c.rx
	whole := rx.seg.dst == nil
	crc := uint32(0)
	for n > wire.CRCLen {
		k := min(n-wire.CRCLen, llp.WindowLen/2)
		if err := rx.win.Fill(k); err != nil {
			return found
		}
		crc = wire.UpdateCRC(crc, rx.win.Take(k))
		n -= k
	}
	if err := rx.win.Fill(wire.CRCLen); err != nil {
		return found
	}
	if b := rx.win.Take(wire.CRCLen); c.crc && whole && crc != wire.CRC(b) {
		return fault(wire.ReasonCRC, "FPDU with an invalid header")
	}
	c.verified()
	return found
}

// receiveMarked receives an FPDU from a stream with Markers. It assembles the FPDU in
// a buffer first. The CRC covers the Markers, DDP does not see them. See
// Options.Markers.
func (c *Conn) receiveMarked(ev *Event) (done bool, err error) {
	rx := &c.rx
	rx.marked, rx.plain = rx.marked[:0], rx.plain[:0]
	header := 0 // offset of ULPDU_Length in marked
	take := func(n int) error {
		for n > 0 {
			if rx.grid == 0 {
				if err := rx.win.Fill(wire.MarkerLen); err != nil {
					return err
				}
				m := rx.win.Take(wire.MarkerLen)
				if len(rx.marked) == 0 {
					header = wire.MarkerLen
				}
				want := max(len(rx.marked)-header, 0)
				if wire.MarkerPointer(m) != want {
					err = fault(wire.ReasonMarker, "FPDUPTR %d, the FPDU started %d bytes before",
						wire.MarkerPointer(m), want)
				}
				rx.marked = append(rx.marked, m...)
				rx.grid = rx.grid.Advance(wire.MarkerLen)
			}
			k := min(n, rx.grid.Next())
			if err := rx.win.Fill(k); err != nil {
				return err
			}
			b := rx.win.Take(k)
			rx.marked = append(rx.marked, b...)
			rx.plain = append(rx.plain, b...)
			rx.grid = rx.grid.Advance(k)
			n -= k
		}
		return nil
	}
	if ioErr := take(wire.LengthLen); ioErr != nil {
		return false, ioErr
	}
	seg := &rx.seg
	seg.length = wire.ULPDULength(rx.plain)
	rx.win.Inside = true
	if ioErr := take(wire.FPDULen(seg.length) - wire.LengthLen); ioErr != nil {
		return false, ioErr
	}
	n := len(rx.marked) - wire.CRCLen
	if c.crc && wire.UpdateCRC(0, rx.marked[:n]) != wire.CRC(rx.marked[n:]) {
		return false, fault(wire.ReasonCRC, "FPDU of %d bytes", len(rx.marked))
	}
	if err != nil {
		return false, err
	}
	return c.place(ev, rx.plain[wire.LengthLen:][:seg.length])
}

// route decodes and checks the headers of a segment (RFC 5041, section 7.1; RFC 5040, section 7.2),
// and finds the destination of its payload. b is the ULPDU or at least the headers of a long one.
// route changes only rx.seg and the use count of a tagged buffer; unuse decrements that.
func (c *Conn) route(b []byte) error {
	seg := &c.rx.seg
	tagged := seg.length > 0 && wire.IsTagged(b)
	badVersion := wire.ReasonUntaggedVersion
	seg.hlen = wire.UntaggedLen
	if tagged {
		seg.hlen, badVersion = wire.TaggedLen, wire.ReasonTaggedVersion
	}
	if seg.length < seg.hlen {
		return fault(wire.ReasonMarker, "ULPDU of %d bytes", seg.length)
	}
	seg.hdr = append(c.rx.hdr[:0], b[:seg.hlen]...)
	if !wire.VersionOK(b) {
		return fault(badVersion, "control byte %#02x", b[0])
	}
	if tagged {
		seg.tagged, _ = wire.ParseTagged(b)
		seg.last = seg.tagged.Last
	} else {
		seg.untag, _ = wire.ParseUntagged(b)
		seg.last = seg.untag.Last
		if seg.untag.QN > wire.QNTerminate {
			return fault(wire.ReasonQN, "queue %d", seg.untag.QN)
		}
	}
	var ok bool
	if seg.op, ok = wire.ParseControl(b[1]); !ok {
		return fault(wire.ReasonRDMAPVersion, "control byte %#02x", b[1])
	}
	if seg.op == wire.OpTerminate {
		return c.routeTerminate(seg, tagged)
	}
	if !seg.op.Valid() || seg.op.Tagged() != tagged || !tagged && seg.op.QN() != seg.untag.QN {
		return fault(wire.ReasonOpcode, "%v in a segment with T=%t, QN=%d", seg.op, tagged, seg.untag.QN)
	}
	switch seg.op {
	case wire.OpWrite:
		return c.routeWrite(seg)
	case wire.OpReadResponse:
		return c.routeReadResponse(seg)
	case wire.OpReadRequest:
		return c.routeReadRequest(seg, b)
	}
	return c.routeSend(seg)
}

// routeWrite finds the tagged buffer of an RDMA Write.
func (c *Conn) routeWrite(seg *segment) (err error) {
	if seg.payload() == 0 {
		return nil // STag and TO do not matter: RFC 5041, section 7.1
	}
	seg.region, seg.dst, err = c.use(seg.tagged.STag, seg.tagged.TO, uint64(seg.payload()), RemoteWrite, &writeReasons)
	return err
}

// unuse ends the use of the memory that route has found.
func (c *Conn) unuse() {
	if seg := &c.rx.seg; seg.region != nil {
		c.mem.release(seg.region)
		seg.region = nil
	}
}

// routeReadResponse checks a Response against the oldest Read: Responses come in the
// order of the Requests (RFC 5040, section 5.2.2).
func (c *Conn) routeReadResponse(seg *segment) error {
	c.mu.Lock()
	wr := c.reads.head
	c.mu.Unlock()
	n, h := uint64(seg.payload()), &seg.tagged
	switch {
	case wr == nil:
		return fault(wire.ReasonOpcode, "RDMA Read Response without a Request")
	case n == 0 && len(wr.Data) == 0 && seg.last:
		// STag and TO do not matter: RFC 5041, section 5.2.
	case h.STag != wr.sink && c.opt.Domain.knows(h.STag, c):
		return fault(wire.ReasonStream, "Read Response to STag %#x of another stream, expected %#x", h.STag, wr.sink)
	case h.STag != wr.sink:
		return fault(wire.ReasonInvalidSTag, "Read Response to STag %#x, expected %#x", h.STag, wr.sink)
	case wraps(h.TO, n):
		return fault(wire.ReasonWrap, "Read Response of %d bytes at TO %#x", n, h.TO)
	case h.TO != wr.got || n > uint64(len(wr.Data))-wr.got:
		return fault(wire.ReasonBounds, "Read Response of %d bytes at TO %#x, expected %d at %#x", n, h.TO,
			uint64(len(wr.Data))-wr.got, wr.got)
	case seg.last && wr.got+n != uint64(len(wr.Data)):
		return fault(wire.ReasonBounds, "Read Response ends after %d of %d bytes", wr.got+n, len(wr.Data))
	}
	seg.read, seg.dst = wr, wr.Data[wr.got:][:n:n]
	return nil
}

// routeSend checks the sequence of a Send. Its payload stays in the window if it is
// short and the Send has one segment.
func (c *Conn) routeSend(seg *segment) error {
	rx, h := &c.rx, &seg.untag
	n := seg.payload()
	switch {
	case h.MSN != rx.sendMSN:
		return fault(wire.ReasonMSN, "Send with MSN %d, expected %d", h.MSN, rx.sendMSN)
	case uint64(h.MO) != uint64(rx.asmLen):
		return fault(wire.ReasonMO, "Send with MO %d, expected %d", h.MO, rx.asmLen)
	case n > rx.maxSend-rx.asmLen:
		return fault(wire.ReasonTooLong, "Send of more than %d bytes", rx.maxSend)
	}
	if h.MO == 0 && seg.last && seg.length <= rx.long {
		return nil
	}
	switch at := rx.asmLen - len(rx.head); {
	case rx.asmLen == 0 && rx.sink != nil && n > len(rx.head):
		seg.begins = true
		return nil
	case rx.sunk != nil && n <= len(rx.sunk)-at:
		seg.dst = rx.sunk[at:][:n:n]
		return nil
	case rx.sunk != nil: // the Send is longer than its head says
		rx.assemble(n)
		copy(rx.asm, rx.head)
		copy(rx.asm[len(rx.head):], rx.sunk[:at])
		rx.sunk = nil
	}
	seg.dst = rx.assemble(n)
	return nil
}

// assemble returns memory for the next n bytes of a Send behind those that asm has.
func (rx *receiver) assemble(n int) []byte {
	if end := rx.asmLen + n; end > len(rx.asm) { // it grows with what the peer sends, so that a login that waits keeps little
		asm := make([]byte, min(rx.maxSend, max(end, 2*len(rx.asm))))
		copy(asm, rx.asm[:min(rx.asmLen, len(rx.asm))])
		rx.asm = asm
	}
	return rx.asm[rx.asmLen:][:n:n]
}

// begin takes the head of a Send from its first bytes, and finds memory for the rest of the segment. It returns the length of the head.
func (rx *receiver) begin(payload []byte) int {
	seg, head := &rx.seg, copy(rx.head, payload)
	n := seg.payload()
	if rx.sunk = rx.sink(rx.head); n-head <= len(rx.sunk) {
		seg.dst = rx.sunk[: n-head : n-head]
	} else {
		rx.sunk = nil
		asm := rx.assemble(n)
		seg.dst = asm[copy(asm, rx.head):]
	}
	rx.asmLen = head
	return head
}

// routeReadRequest checks the sequence and the size of a Read Request.
func (c *Conn) routeReadRequest(seg *segment, b []byte) error {
	rx, h := &c.rx, &seg.untag
	switch {
	case h.MSN != rx.readMSN:
		return fault(wire.ReasonMSN, "Read Request with MSN %d, expected %d", h.MSN, rx.readMSN)
	case h.MO != 0:
		return fault(wire.ReasonMO, "Read Request with MO %d", h.MO)
	case seg.payload() > wire.ReadRequestLen:
		return fault(wire.ReasonTooLong, "Read Request of %d bytes", seg.payload())
	case seg.payload() < wire.ReadRequestLen || !seg.last:
		return fault(wire.ReasonOpcode, "Read Request of %d bytes, last segment: %t", seg.payload(), seg.last)
	}
	seg.hdr = append(seg.hdr, b[seg.hlen:][:wire.ReadRequestLen]...)
	return nil
}

// routeTerminate checks a Terminate. A bad one ends the stream, too, and nothing
// answers a Terminate (RFC 5040, section 5.4).
func (c *Conn) routeTerminate(seg *segment, tagged bool) error {
	h := &seg.untag
	if tagged || h.QN != wire.QNTerminate || h.MSN != 1 || h.MO != 0 || !seg.last ||
		seg.payload() > wire.MaxTerminateLen+64 {
		return badTerminate(fmt.Errorf("tagged %t, queue %d, MSN %d, MO %d, %d bytes", tagged, h.QN, h.MSN, h.MO,
			seg.payload()))
	}
	return nil
}

// badTerminate returns the error for a Terminate that breaks the rules.
func badTerminate(err error) *StreamError {
	return &StreamError{Reason: wire.ReasonOperation, Remote: true, Err: fmt.Errorf("bad Terminate: %w", err)}
}

// deliver acts on a segment after it was verified and placed. payload is the ULPDU
// after the DDP header.
func (c *Conn) deliver(ev *Event, payload []byte) (done bool, err error) {
	rx, seg := &c.rx, &c.rx.seg
	first := rx.fpdu == 0
	rx.fpdu++
	c.counts.received.fpdus.Add(1)
	if seg.last {
		c.counts.received.messages[seg.op].Add(1)
	}
	switch seg.op {
	case wire.OpWrite:
		return false, nil
	case wire.OpReadResponse:
		return c.deliverRead(ev, seg), nil
	case wire.OpReadRequest:
		return false, c.answerRead(payload)
	case wire.OpTerminate:
		t, err := wire.ParseTerminate(payload)
		if err != nil {
			return false, badTerminate(err)
		}
		c.opt.Domain.counts.terminateReceived(t.Reason)
		t.DDP, t.ReadRequest = bytes.Clone(t.DDP), bytes.Clone(t.ReadRequest)
		return false, &StreamError{Reason: t.Reason, Remote: true, Terminate: &t}
	}
	var head []byte
	if seg.dst != nil {
		rx.asmLen += len(seg.dst)
		if rx.sunk != nil {
			head, payload = rx.head, rx.sunk[:rx.asmLen-len(rx.head)]
		} else {
			payload = rx.asm[:rx.asmLen]
		}
	}
	if !seg.last {
		return false, nil
	}
	rx.asmLen, rx.sunk = 0, nil
	rx.sendMSN++
	if first && c.rtrSend && seg.op == wire.OpSend && len(payload) == 0 {
		return false, nil // RFC 6581, section 4.4: the ULP does not see an RTR
	}
	*ev = Event{Head: head, Data: payload, Solicited: seg.op.Solicited(), Invalidates: seg.op.Invalidates()}
	if ev.Invalidates {
		ev.Invalidated = seg.untag.Invalidate
		if err := c.invalidateRemote(ev.Invalidated); err != nil {
			return false, err
		}
	}
	return true, nil
}

// Fetched returns how many bytes of Read Responses have come. Responses come in the order of the
// Reads, so bytes that come are of the oldest one.
func (c *Conn) Fetched() uint64 { return c.fetched.Load() }

// deliverRead counts a segment of a Read Response, and fills ev after the last one.
func (c *Conn) deliverRead(ev *Event, seg *segment) (done bool) {
	wr := seg.read
	wr.got += uint64(len(seg.dst))
	c.fetched.Add(uint64(len(seg.dst)))
	if !seg.last {
		return false
	}
	c.mu.Lock()
	c.popRead()
	stalled := c.queue.head != nil
	c.mu.Unlock()
	if stalled {
		c.flushAside()
	}
	if wr == c.rtr {
		return false
	}
	wr.posted = false
	*ev = Event{Read: wr}
	return true
}

// answer returns a free Read Response, or nil if all are in use. It makes one when it is first needed, so that a connection without
// Reads of the peer, and one that logs in, needs no memory for them.
func (c *Conn) answer() *WorkRequest {
	c.mu.Lock()
	defer c.mu.Unlock()
	wr := c.answers.pop()
	if wr == nil && c.unmade > 0 {
		c.unmade--
		wr = &WorkRequest{Op: readResponse}
	}
	return wr
}

// answerRead queues the Response to a Read Request (RFC 5040, section 5.2).
func (c *Conn) answerRead(payload []byte) error {
	r, err := wire.ParseReadRequest(payload)
	if err != nil {
		return err
	}
	c.rx.readMSN++
	wr := c.answer()
	if wr == nil {
		return fault(wire.ReasonNoBuffer, "more than %d unanswered RDMA Read Requests", c.ird)
	}
	wr.STag, wr.TO, wr.region, wr.Data = r.SinkSTag, r.SinkTO, nil, nil
	if r.Size > 0 {
		wr.region, wr.Data, err = c.use(r.SrcSTag, r.SrcTO, uint64(r.Size), RemoteRead, &readReasons)
		if err != nil {
			c.finish(list{wr, wr}, err)
			return err
		}
	}
	c.mu.Lock()
	over := c.dead || c.broken != nil || c.ended
	if !over {
		c.due.push(wr)
	}
	c.mu.Unlock()
	if over {
		c.finish(list{wr, wr}, ErrClosed)
		return nil
	}
	c.flushAside()
	return nil
}
