package tcp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/rdma/llp"
)

const (
	// loginLimit is the longest data segment, in bytes, that is received during login. The limit of
	// the RFC is 8192. If a segment is a little longer, the core refuses the login.
	loginLimit = 16 << 10
)

// receiver is the state of the goroutine that is in Receive.
type receiver struct {
	digests     digests
	fullFeature bool
	limit       int // longest data segment, bytes

	win  llp.Window
	one  func(p []byte) (int, error)    // reads from the socket
	both func(p, q []byte) (int, error) // the same to two places, see llp.Readers; nil: it cannot do that
	bhs  [pdu.BHSLen]byte               // of a PDU that does not stay in win
	ahs  []byte
	big  *iscsi.Buffer // a data segment that is longer than win, until the next Receive

	over *task // its GetData has ended; Receive returns the Notice next
	err  error // what Receive returns after the Notices of all GetDatas; over is nil then
}

// A FormatError reports a PDU after which nobody knows where the next one begins. It
// ends the connection without a word to the initiator (RFC 7143, sections 7.7 and 7.8).
type FormatError struct{ Reason string }

// Error implements error.
func (e *FormatError) Error() string { return "iSCSI format error: " + e.Reason }

var (
	errHeaderDigest = &FormatError{"header digest is wrong"}
	errUnanswered   = fmt.Errorf("the initiator has closed its direction of the stream: %w", io.EOF)
)

// Receive implements iscsi.Datamover. After a time-out between two PDUs it may be called again.
func (c *Conn) Receive(n *iscsi.Notice) error {
	rx := &c.rx
	if rx.big != nil {
		rx.big.Release()
		rx.big = nil
	}
	for rx.err == nil {
		if t := rx.over; t != nil {
			rx.over = nil
			*n = iscsi.Notice{Task: t.t, Err: t.err}
			return nil
		}
		ok, err := c.receivePDU(n)
		if ok && rx.fullFeature {
			c.holds.Acknowledge(pdu.BHS(n.BHS).ExpStatSN())
		}
		switch {
		case ok:
			return nil
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded) && !rx.win.Inside:
			return err
		default:
			c.fail(err)
		}
	}
	return c.drainGets(n)
}

// fail ends receiving.
func (c *Conn) fail(err error) {
	rx := &c.rx
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		err = net.ErrClosed
	case c.err != nil && !errors.Is(c.err, net.ErrClosed): // Flush has closed nc
		err = c.err
	}
	rx.err, c.recvErr = err, err
	if err == io.EOF {
		c.recvErr = errUnanswered
	}
}

// drainGets returns a Notice for every outstanding GetData, then why the connection has ended.
func (c *Conn) drainGets(n *iscsi.Notice) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed { // nothing of a connection runs after its end
		c.mu.Unlock()
		c.aside.Wait()
		c.mu.Lock()
	}
	for _, t := range c.tasks {
		if !t.getting {
			continue
		}
		t.getting, t.placing, t.data = false, false, nil
		*n = iscsi.Notice{Task: t.t, Err: c.recvErr}
		return nil
	}
	return c.rx.err
}

// read reads from the socket for the window. It first sends what Defer kept back,
// because it may have to wait.
func (c *Conn) read(p []byte) (int, error) { return c.readBoth(p, nil) }

// readBoth does what read does, and reads to q what comes after p. Without q it reads to p only.
func (c *Conn) readBoth(p, q []byte) (n int, err error) {
	c.flushDeferred()
	for {
		if c.paused.Load() && !c.rx.win.Inside {
			return 0, errPaused
		}
		if c.impatient != nil {
			if err := c.patience(1); err != nil {
				return 0, err
			}
		}
		if q == nil {
			n, err = c.rx.one(p)
		} else {
			n, err = c.rx.both(p, q)
		}
		if n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) || !c.paused.Load() {
			return n, err
		}
		c.nc.SetReadDeadline(time.Time{}) // after Pause, in a PDU
	}
}

// patience returns llp.ErrNothing if Receive can return instead of waiting for n bytes. See SetImpatient.
func (c *Conn) patience(n int) error {
	if !c.rx.win.Inside && !llp.Ready(c.impatient, n) {
		return llp.ErrNothing
	}
	return nil
}

// Pending implements iscsi.Deferrer.
func (c *Conn) Pending() bool {
	rx := &c.rx
	if rx.err != nil || rx.win.Len() < pdu.BHSLen {
		return false
	}
	h := pdu.BHS(rx.win.Peek(pdu.BHSLen))
	size := h.DataSegmentLength()
	n := pdu.BHSLen + h.TotalAHSLength() + size + c.tail(size)
	if rx.digests.header {
		n += digestLen
	}
	return rx.win.Len() >= n
}

// Defer implements iscsi.Deferrer.
func (c *Conn) Defer() {
	if !c.deferred.Load() { // a store that other processors see costs more
		c.deferred.Store(true)
	}
}

// flushDeferred sends what Defer kept back, in another goroutine: Receive must not wait
// for the peer to take data, because the peer may wait for us to receive.
func (c *Conn) flushDeferred() {
	if c.deferred.Load() {
		c.deferred.Store(false)
		c.aside.Add(1)
		go c.flush()
	}
}

// Unread reports where PDUs begin, as llp.Window.Unread does, to a net.Conn that calls it
// from within its Read.
func (c *Conn) Unread() (unread []byte, rest int) {
	return c.rx.win.Unread()
}

// receivePDU receives one PDU (RFC 7143, section 11.2):
//
//	BHS  AHS  header digest  data segment  padding  data digest
//
// ok says that n describes it. receivePDU consumes nothing before the window holds the
// whole PDU, or the header of a longer one, so that a time-out loses nothing.
func (c *Conn) receivePDU(n *iscsi.Notice) (ok bool, err error) {
	rx := &c.rx
	rx.win.Inside = false
	if err := rx.win.Fill(pdu.BHSLen); err != nil {
		return false, err
	}
	head := pdu.BHSLen + pdu.BHS(rx.win.Peek(pdu.BHSLen)).TotalAHSLength()
	whole := head
	if rx.digests.header {
		whole += digestLen
	}
	if err := rx.win.Fill(whole); err != nil {
		return false, err
	}
	b := rx.win.Peek(whole)
	h := pdu.BHS(b[:pdu.BHSLen:pdu.BHSLen])
	if rx.digests.header && updateDigest(0, b[:head]) != binary.LittleEndian.Uint32(b[head:]) {
		return false, errHeaderDigest
	}
	size := h.DataSegmentLength()
	if size > rx.limit {
		return false, &FormatError{fmt.Sprintf("%v with a data segment of %d bytes, more than %d", h.Opcode(), size,
			rx.limit)}
	}
	solicited := rx.fullFeature && h.Opcode() == pdu.DataOut && h.TTT() != pdu.ReservedTag
	tail := c.tail(size)
	total := whole + size + tail
	var begun time.Time
	if !solicited && rx.win.Len() < total {
		begun = time.Now()
	}
	if !solicited && total <= llp.WindowLen {
		// The usual PDU stays in the window.
		if err := rx.win.Fill(total); err != nil {
			return false, err
		}
		b := rx.win.Take(total)
		*n = iscsi.Notice{BHS: b[:pdu.BHSLen:pdu.BHSLen], AHS: b[pdu.BHSLen:head:head], Data: b[whole:][:size:size],
			Begun: begun}
		if rx.digests.data && size > 0 {
			end := total - digestLen
			c.judge(n, updateDigest(0, b[whole:end]) == binary.LittleEndian.Uint32(b[end:]))
		}
		rx.win.Thin = false
		return true, nil
	}
	rx.win.Inside = true
	copy(rx.bhs[:], h)
	rx.ahs = append(rx.ahs[:0], b[pdu.BHSLen:head]...)
	rx.win.TakeHeader(whole, size+tail)
	*n = iscsi.Notice{BHS: rx.bhs[:], AHS: rx.ahs, Begun: begun}
	if solicited {
		return c.receiveData(n, size)
	}
	return true, c.receiveLong(n, size)
}

// receiveLong receives a data segment of size bytes that is longer than the window. Without memory
// for it the segment is discarded.
func (c *Conn) receiveLong(n *iscsi.Notice, size int) error {
	rx := &c.rx
	if rx.big = c.borrow(size); rx.big == nil {
		n.Reject = pdu.RejectOutOfResources
		return rx.win.Skip(size + c.tail(size))
	}
	data := rx.big.Bytes()[:size:size]
	good, err := c.place(data)
	n.Data, n.Buffer = data, rx.big
	c.judge(n, good)
	return err
}

// tail returns the length of padding and data digest after size bytes of data.
func (c *Conn) tail(size int) int {
	n := pdu.Padded(size) - size
	if size > 0 && c.rx.digests.data {
		n += digestLen
	}
	return n
}

// judge lets the core reject the PDU if its data digest is wrong (RFC 7143, section 7.8).
func (c *Conn) judge(n *iscsi.Notice, good bool) {
	if !good {
		n.Data, n.Reject = nil, pdu.RejectDataDigest
	}
}

// place moves a data segment from the stream to dst, and consumes padding and digest. It reports
// whether the data digest is right, which shows only after the data is in dst.
func (c *Conn) place(dst []byte) (good bool, err error) {
	rx := &c.rx
	size := len(dst)
	tail := c.tail(size)
	crc := uint32(0)
	rx.win.Thin = size > llp.LongData
	if !rx.win.Thin {
		if err := rx.win.Fill(size + tail); err != nil {
			return false, err
		}
	}
	c.flushDeferred()
	for len(dst) > 0 {
		got, err := rx.win.Read(dst)
		if got == 0 && err != nil {
			return false, err
		}
		if rx.digests.data {
			crc = updateDigest(crc, dst[:got])
		}
		dst = dst[got:]
		c.inPlace.Store(int64(size - len(dst)))
	}
	if err := rx.win.Fill(tail); err != nil {
		return false, err
	}
	b := rx.win.TakeTrailer(tail)
	if !rx.digests.data || size == 0 {
		return true, nil
	}
	pad, digest := b[:tail-digestLen], b[tail-digestLen:]
	return updateDigest(crc, pad) == binary.LittleEndian.Uint32(digest), nil
}

// receiveData receives the data segment of a solicited Data-Out, size bytes; n.BHS is
// its header. ok says that n describes a PDU that the core rejects. A GetData that fails
// ends with its sequence: the initiator must be done with the R2T when it sees the
// response (RFC 7143, sections 7.3 and 7.8).
func (c *Conn) receiveData(n *iscsi.Notice, size int) (ok bool, err error) {
	h := pdu.BHS(n.BHS)
	t, dst, reason := c.route(h, size)
	good := true
	if dst != nil {
		good, err = c.place(dst)
	} else {
		err = c.rx.win.Skip(size + c.tail(size))
	}
	if err != nil {
		return false, err
	}
	if !good {
		reason = pdu.RejectDataDigest
	}
	if t != nil {
		c.placed(t, len(dst), good, h.Final())
	}
	n.Reject = reason
	return reason != 0, nil
}

// route finds the task of a solicited Data-Out and the destination of its data, nil if the data is
// discarded. A PDU that does not fit into its sequence is rejected, and its GetData fails.
func (c *Conn) route(h pdu.BHS, size int) (t *task, dst []byte, reason pdu.RejectReason) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ttt := h.TTT()
	if i := int(ttt & maxTasks); i < len(c.tasks) {
		t = c.tasks[i]
	}
	switch {
	case t != nil && t.getting && t.ttt == ttt:
	case t != nil && t.hasQuit(ttt), // RFC 7143, section 10.7
		t != nil && c.recovers && t.itt == h.ITT() && (t.ttt == ttt || t.hadTag(ttt)): // a duplicate
		return nil, nil, 0
	default:
		return nil, nil, pdu.RejectInvalidField
	}
	sn, off := h.DataSN(), h.BufferOffset()-t.base
	var why error
	switch {
	case t.err != nil: // one Reject is enough
		return t, nil, 0
	case h.ITT() != t.itt, h.LUN() != t.lun: // RFC 7143, section 4.2.5.3
		reason, why = pdu.RejectProtocolError, iscsi.ErrDataAmount
	case c.recovers && pdu.Before(sn, t.outSN): // a duplicate
		return nil, nil, 0
	case sn != t.outSN && !c.recovers: // RFC 7143, section 7.9
		reason, why = pdu.RejectProtocolError, iscsi.ErrDataLost
	case off != t.at && (sn == t.outSN || off-t.at > t.end-t.at), uint32(size) > t.end-off:
		reason, why = pdu.RejectInvalidField, iscsi.ErrDataAmount
	case h.Final() && uint32(size) < t.end-off: // RFC 7143, section 11.8
		reason, why = pdu.RejectProtocolError, iscsi.ErrDataAmount
	default:
		t.losses.add(t.at, off) // what was in PDUs that did not come
		t.outSN = sn
		t.placing, t.placeAt = true, off
		c.inPlace.Store(0)
		return t, t.data[off:][:size:size], 0
	}
	t.err = why
	return t, nil, reason
}

// placed continues the GetData of t after a Data-Out with n bytes. final says that it
// was the last one for the R2T.
func (c *Conn) placed(t *task, n int, good, final bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.placing {
		t.at = t.placeAt + uint32(n)
		t.came += uint64(n)
	}
	t.placing = false
	t.outSN++
	switch {
	case t.quit:
		t.err = iscsi.ErrCanceled
		c.quitR2Ts(t)
	case !good && c.recovers:
		t.losses.add(t.placeAt, t.at)
	case !good:
		t.err = iscsi.ErrDataLost
	}
	if final && t.ahead > 0 {
		c.nextAhead(t) // what comes for it is dropped if the GetData has failed already
		if t.err == nil {
			c.askAhead(t)
			c.flushR2T()
		}
		return
	}
	whole := t.asked == uint32(len(t.data)) && t.losses.n == 0
	if final && t.err == nil && !whole {
		if t.err = c.err; t.losses.rounds > maxRecoveries { // c.err: no R2T can be sent
			t.err = iscsi.ErrDataLost
		}
	}
	switch {
	case t.quit, final && (t.err != nil || whole):
		t.getting, t.data = false, nil
		c.rx.over = t
	case final:
		c.ask(t)
		c.flushR2T()
	}
}

// flushR2T sends what is queued, but not in this goroutine: see flushDeferred.
//
// Preconditions: c.mu is held.
func (c *Conn) flushR2T() {
	invariant.Held(&c.mu)
	if !c.flushing {
		c.aside.Add(1)
		go c.flush()
	}
}
