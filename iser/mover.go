// Package iser carries iSCSI over RDMA (RFC 7145). Its Conn is the Datamover of package
// iscsi on a stream of package rdma. SCSI data-in becomes RDMA Writes, data-out RDMA
// Reads, and every other PDU a Send with an iSER header.
//
// A connection starts in one of two ways. Accept is for Linux initiators, which use MPA and RDMA
// mode from the first byte and log in with Sends. Allocate is for the step-up of RFC 7145, section
// 5.1: login on the byte stream, then RDMA mode on the same TCP connection.
package iser

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/fifo"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/rdma/wire"
)

const (
	headLen = HeaderLen + pdu.BHSLen

	// Linux ib_iser and libiscsi post receives of 28+48+128 bytes once login
	// is over, whatever InitiatorRecvDataSegmentLength says, and of 28+48+8192 before
	// that and in discovery. open-iscsi requires login text shorter than 8192 bytes.
	fullFeatureSegment = 128
	loginSegment       = 8188

	// leastSegment is how long a data segment of the initiator may be before its login has succeeded, and
	// at least afterwards: a longer one than the session allows then ends in a FormatError that says so.
	leastSegment = 8192

	// maxAHS is the default of MaxAHSLength (RFC 7145, section 6.8).
	maxAHS = 256
	maxPad = 3

	// drainTime limits how long the target reads after it has told the peer of an error.
	drainTime = time.Second
)

// Options configures an iSER connection.
type Options struct {
	// RDMA configures the stream. MaxSend is overridden.
	RDMA rdma.Options
	// RecvDataSegmentLength is the TargetRecvDataSegmentLength: the longest data
	// segment that the target receives, in bytes. Default 65536.
	RecvDataSegmentLength int
}

// A Conn is an iSER connection of the target.
type Conn struct {
	rc          *rdma.Conn
	recvSegment int         // longest data segment that the initiator may send, bytes
	stepped     bool        // login was on the byte stream
	invalidates bool        // the initiator takes Sends with Invalidate
	fullFeature atomic.Bool // not in discovery
	flush       func()      // rc.Flush, allocated once

	// solicitedOnly says that a Write Base Offset names the first byte after the
	// unsolicited data, not the first byte of all (RFC 7145, section 6.9).
	solicitedOnly bool

	// For the goroutine in Receive:
	ev          rdma.Event
	hdr         Header // of the PDU that Receive returned last
	bhs         pdu.BHS
	err         error // why the connection ended
	peerStarted bool  // a message has come in this phase
	hello       bool  // a Hello has come
	needsHello  bool  // a Hello must be the next message
	noHello     bool  // a Hello must not come

	// Of SetLender, for the same goroutine:
	borrow func(n int) *iscsi.Buffer // nil: nothing lends
	coming *iscsi.Buffer             // for the data segment of the Send that is coming
	came   *iscsi.Buffer             // with the data segment of the PDU that Receive returned last

	mu          sync.Mutex
	ord         int // RDMA Reads that may be outstanding
	outstanding int
	waiting     fifo.Queue[task] // GetDatas that wait because ORD Reads are outstanding
	flushed     fifo.Queue[task] // GetDatas that nobody will answer
	gone        error            // why the connection ended
	puts        *put             // free
	statSN      uint32           // of the next status that is posted, if numbered
	numbered    bool             // a status was posted

	holds iscsi.Holds

	// For the goroutine in rc.Flush: what has left with the present batch.
	departure iscsi.Departure
	sent      *put
}

var (
	_ iscsi.Datamover  = (*Conn)(nil)
	_ iscsi.Reassigner = (*Conn)(nil)
	_ iscsi.Deferrer   = (*Conn)(nil)
	_ iscsi.Refuser    = (*Conn)(nil)
	_ iscsi.Framed     = (*Conn)(nil)
	_ iscsi.Meter      = (*Conn)(nil)
	_ iscsi.Sizer      = (*Conn)(nil)
	_ iscsi.Impatient  = (*Conn)(nil)
	_ iscsi.Resumable  = (*Conn)(nil)
	_ iscsi.Borrower   = (*Conn)(nil)
	_ iscsi.LentMover  = (*Conn)(nil)
	_ iscsi.PipeMover  = (*Conn)(nil)
)

// task is the mover's state of a task slot.
type task struct {
	c      *Conn // that sends
	t      *iscsi.Task
	remote Header // Remote Mapping (RFC 7145, section 7.3.1)
	base   uint32 // Buffer Offset that the Write Base Offset corresponds to

	send rdma.WorkRequest
	head [headLen]byte // of send

	get  rdma.WorkRequest
	err  error           // in flushed: why
	link fifo.Link[task] // in waiting or flushed
}

// put is a PutData, or a part of a PutLent, that is being sent.
type put struct {
	c      *Conn
	wr     rdma.WorkRequest
	b      *iscsi.Buffer
	shared bool   // the kernel refers to the data of b, all of which has left with this part
	until  uint32 // ExpStatSN of an initiator that has it then
	next   *put
}

// Accept answers the MPA Request on nc. It returns the connection in RDMA mode, before
// login. After an error nc is closed.
func Accept(ctx context.Context, nc net.Conn, o Options) (*Conn, error) {
	return AcceptUnless(ctx, nc, o, func(*rdma.Request) *rdma.Answer { return nil })
}

// ErrOther is the error of AcceptUnless for a stream of another protocol.
var ErrOther = errors.New("the stream is of another protocol")

// An Other is ErrOther with the stream, which now belongs to the caller.
type Other struct{ Stream *rdma.Conn }

// Error implements error.
func (*Other) Error() string { return ErrOther.Error() }

// Is reports whether target is ErrOther.
func (*Other) Is(target error) bool { return target == ErrOther }

// AcceptUnless accepts like Accept, at a port that serves another protocol over RDMA, too. other returns nil if the MPA Request
// is for iSER, and else what answers it. If that answer is no reject, the error is an *Other. After any other error nc is closed.
func AcceptUnless(ctx context.Context, nc net.Conn, o Options, other func(*rdma.Request) *rdma.Answer) (*Conn, error) {
	o = o.complete()
	c := &Conn{recvSegment: o.RecvDataSegmentLength}
	is := false
	rc, err := rdma.Respond(ctx, nc, o.RDMA, func(r *rdma.Request) rdma.Answer {
		if a := other(r); a != nil {
			is = true
			return *a
		}
		return c.answer(r)
	})
	switch {
	case err != nil:
		nc.Close()
		return nil, err
	case is:
		return nil, &Other{rc}
	}
	c.start(rc)
	return c, nil
}

// Allocate allocates the resources for RDMA mode, for a connection that logs in on the byte stream
// with the parameters p. It runs before the final Login Response (Allocate_Connection_Resources,
// RFC 7145, section 5.1.2). Except for the Options it is an iscsi.StepUp.
func Allocate(o Options, p iscsi.Params, tasks int) (iscsi.EnableDatamover, error) {
	o = o.complete()
	c := &Conn{recvSegment: o.RecvDataSegmentLength, stepped: true}
	if err := c.EnterFullFeature(p, tasks); err != nil {
		return nil, err
	}
	r, err := rdma.NewResponder(o.RDMA)
	if err != nil {
		return nil, err
	}
	return func(nc net.Conn, prefix []byte, timeout time.Duration) (iscsi.Datamover, error) {
		rc, err := r.Respond(context.Background(), nc, prefix, timeout, c.answer)
		if err != nil {
			nc.Close()
			return nil, err
		}
		c.start(rc)
		return c, nil
	}, nil
}

// complete returns o with its defaults filled in, and the limits that follow from them.
func (o Options) complete() Options {
	o.RecvDataSegmentLength = cmp.Or(o.RecvDataSegmentLength, 65536)
	o.RDMA.MaxSend = maxSend(0)
	return o
}

// maxSend returns the length of the longest Send with a data segment of so many bytes, or of leastSegment.
func maxSend(segment int) int { return headLen + maxAHS + max(segment, leastSegment) + maxPad }

// answer returns the private data of the MPA Reply, and notes that of the Request.
func (c *Conn) answer(r *rdma.Request) rdma.Answer {
	reply := [cmLen]byte{cmNoZBVA | cmNoInvalidate}
	if len(r.Private) > 0 && r.Private[0]&cmNoInvalidate == 0 {
		reply[0] = cmNoZBVA
		c.invalidates = true
	}
	return rdma.Answer{Private: reply[:]}
}

// start gives c its stream in RDMA mode.
func (c *Conn) start(rc *rdma.Conn) {
	c.rc, c.ord, c.flush = rc, rc.ORD(), rc.Flush
	rc.SetSink(headLen, c.memoryFor)
	rc.SetFlushed(c.left)
	if c.fullFeature.Load() {
		rc.SetMaxSend(maxSend(c.recvSegment))
		rc.Grow()
	}
}

// Transport implements iscsi.Datamover.
func (c *Conn) Transport() string { return "iser" }

// Size implements iscsi.Sizer.
func (c *Conn) Size(p *iscsi.Params) int {
	if p.Discovery {
		return c.rc.Size(maxSend(0))
	}
	return c.rc.Size(maxSend(int(p.TargetRecvDataSegmentLength)))
}

// LocalAddr implements iscsi.Datamover.
func (c *Conn) LocalAddr() net.Addr { return c.rc.LocalAddr() }

// RemoteAddr implements iscsi.Datamover.
func (c *Conn) RemoteAddr() net.Addr { return c.rc.RemoteAddr() }

// RDMA implements iscsi.Datamover.
func (c *Conn) RDMA() bool { return true }

// Stream returns the RDMAP stream that carries the connection.
func (c *Conn) Stream() *rdma.Conn { return c.rc }

// Framing implements iscsi.Framed.
func (c *Conn) Framing() iscsi.Framing {
	in, out := c.rc.Markers()
	c.mu.Lock()
	defer c.mu.Unlock()
	return iscsi.Framing{CRC: c.rc.CRC(), MarkersToUs: in, MarkersOut: out, ORD: c.ord}
}

// MaxSendSegment implements iscsi.Datamover.
func (c *Conn) MaxSendSegment() int {
	if c.fullFeature.Load() {
		return fullFeatureSegment
	}
	return loginSegment
}

// EnterFullFeature implements iscsi.Datamover. It decides how long data segments may be,
// and whether a Hello may or must come.
//
// Linux and libiscsi log in in RDMA mode and do not declare TaggedBufferForSolicitedDataOnly, but
// behave as if they had declared Yes. No initiator is known that logs in that way and means the
// default, No. After a login on the byte stream the default holds.
func (c *Conn) EnterFullFeature(p iscsi.Params, _ int) error {
	c.peerStarted = false
	if p.Discovery {
		return nil
	}
	if n := int(p.TargetRecvDataSegmentLength); n > c.recvSegment {
		return fmt.Errorf("TargetRecvDataSegmentLength is %d, more than the limit of %d", n, c.recvSegment)
	} else if n > 0 {
		c.recvSegment = n
	}
	c.needsHello = p.ISERHelloRequired && !c.hello
	c.noHello = p.ISERHelloDeclared && !p.ISERHelloRequired
	c.solicitedOnly = p.TaggedBufferForSolicitedDataOnly || !p.TaggedBufferDeclared && !c.stepped
	c.fullFeature.Store(true)
	if c.rc != nil { // else after a step-up
		c.rc.SetMaxSend(maxSend(c.recvSegment))
		c.rc.Grow()
	}
	return nil
}

// SetImpatient implements iscsi.Impatient.
func (c *Conn) SetImpatient(on bool) bool { return c.rc.SetImpatient(on) }

// Missing implements iscsi.Impatient.
func (c *Conn) Missing() int { return c.rc.Missing() }

// SetReceiveDeadline implements iscsi.Datamover.
func (c *Conn) SetReceiveDeadline(t time.Time) error { return c.rc.SetReceiveDeadline(t) }

// Close implements iscsi.Datamover.
func (c *Conn) Close() error {
	err := c.rc.Close()
	c.holds.End()
	return err
}

// CloseWrite implements iscsi.Datamover.
func (c *Conn) CloseWrite() error { return c.rc.CloseWrite() }

// Flush implements iscsi.Datamover.
func (c *Conn) Flush() { c.rc.Flush() }

// Pending implements iscsi.Deferrer.
func (c *Conn) Pending() bool { return c.err == nil && c.rc.Pending() }

// Defer implements iscsi.Deferrer.
func (c *Conn) Defer() { c.rc.Defer() }

// NewTask implements iscsi.Datamover.
func (c *Conn) NewTask() any {
	t := &task{}
	t.send.Done, t.get.Done = t, t
	return t
}

// Bind implements iscsi.Datamover. It creates the Remote Mapping.
func (c *Conn) Bind(it *iscsi.Task, unsolicited uint32) error {
	if err := c.mapRemote(it, c.bhs, c.hdr, unsolicited); err != nil {
		return fmt.Errorf("%v: %w", c.bhs.Opcode(), err)
	}
	return nil
}

// mapRemote gives it the Remote Mapping h for the command req. The first unsolicited bytes of a
// write come, or came, without RDMA.
func (c *Conn) mapRemote(it *iscsi.Task, req pdu.BHS, h Header, unsolicited uint32) error {
	var write, read uint32 // bytes that RDMA may have to move
	switch edtl := req.EDTL(); {
	case req.Write():
		if write = edtl - min(unsolicited, edtl); write > 0 && !c.solicitedOnly {
			write = edtl
		}
	case req.Read():
		read = edtl
	}
	if err := errors.Join(h.Write.check(write), h.Read.check(read)); err != nil {
		return err
	}
	t := it.Mover.(*task)
	t.t, t.remote, t.base = it, h, 0
	if c.solicitedOnly {
		t.base = unsolicited
	}
	return nil
}

// Unbind implements iscsi.Datamover.
func (c *Conn) Unbind(it *iscsi.Task) { it.Mover.(*task).remote = Header{} }

// Detach implements iscsi.Reassigner. The STags of the task become invalid with the end
// of its connection (RFC 7145, section 7.3.3).
func (c *Conn) Detach(it *iscsi.Task) iscsi.Progress {
	c.Unbind(it)
	return iscsi.Progress{}
}

// Advertised implements iscsi.Reassigner.
func (c *Conn) Advertised(it *iscsi.Task) { it.Mover.(*task).remote = c.hdr }

// Rebind implements iscsi.Reassigner. The Remote Mapping gets the STags and Base Offsets
// of the TASK REASSIGN. Its Write STag covers all data except the immediate data (RFC
// 7145, section 10.2.2).
func (c *Conn) Rebind(it, by *iscsi.Task, at iscsi.Resumption) error {
	if at.Done {
		t := it.Mover.(*task)
		t.t, t.remote, t.base = it, Header{}, 0
		return nil
	}
	if err := c.mapRemote(it, it.Request(), by.Mover.(*task).remote, at.Immediate); err != nil {
		return fmt.Errorf("TASK REASSIGN: %w", err)
	}
	return nil
}

// PutData implements iscsi.Datamover by an RDMA Write.
func (c *Conn) PutData(it *iscsi.Task, off uint32, data []byte, b *iscsi.Buffer) error {
	t := it.Mover.(*task)
	r := t.remote.Read
	if !r.Valid {
		return errors.New("the command has no Read STag")
	}
	p := c.takePut()
	p.b = b
	p.wr.Op, p.wr.Data, p.wr.STag, p.wr.TO = rdma.Write, data, r.STag, r.Base+uint64(off)
	if err := c.rc.Post(&p.wr); err != nil {
		c.givePut(p)
		return err
	}
	return nil
}

// TakesLent implements iscsi.LentMover: see lentBuffer of package iscsi.
func (c *Conn) TakesLent() bool { return c.rc.RefersPages() }

// PutLent implements iscsi.LentMover by an RDMA Write of each part.
func (c *Conn) PutLent(it *iscsi.Task, off uint32, b *iscsi.Buffer) error {
	r := it.Mover.(*task).remote.Read
	if !r.Valid {
		return errors.New("the command has no Read STag")
	}
	c.mu.Lock()
	shared := c.numbered
	c.mu.Unlock()
	shared = shared && c.rc.RefersPages() && b.Share()
	lent := b.Lent()
	for i, l := range lent {
		last := i == len(lent)-1
		if !last {
			b.Retain()
		}
		p := c.takePut()
		p.b, p.shared = b, shared && last
		p.wr.Op, p.wr.Data, p.wr.STag, p.wr.TO, p.wr.Pages = rdma.Write, l.Data, r.STag, r.Base+uint64(off), shared
		c.mu.Lock()
		p.until = c.statSN + 1 // that status will be posted later
		err := c.rc.Post(&p.wr)
		c.mu.Unlock()
		if err != nil {
			c.givePut(p)
			if !last {
				b.Release()
			}
			return err
		}
		off += uint32(len(l.Data))
	}
	return nil
}

// TakePipe implements iscsi.PipeMover.
func (c *Conn) TakePipe(n, have int) iscsi.Pipe {
	c.mu.Lock()
	numbered := c.numbered
	c.mu.Unlock()
	if !numbered || !c.rc.TakesPipes() {
		return nil
	}
	if p := llp.TakePipe(n, have); p != nil {
		return p
	}
	return nil
}

// PutPipe implements iscsi.PipeMover by an RDMA Write.
func (c *Conn) PutPipe(it *iscsi.Task, off uint32, n int, b *iscsi.Buffer) error {
	r := it.Mover.(*task).remote.Read
	if !r.Valid {
		return errors.New("the command has no Read STag")
	}
	pipe := b.Pipe().(*llp.Pipe)
	pipe.Filled(n)
	p := c.takePut()
	p.b, p.shared = b, true
	p.wr.Op, p.wr.STag, p.wr.TO, p.wr.Pipe, p.wr.Piped = rdma.Write, r.STag, r.Base+uint64(off), pipe, n
	c.mu.Lock()
	p.until = c.statSN + 1 // that status will be posted later
	err := c.rc.Post(&p.wr)
	c.mu.Unlock()
	if err != nil {
		c.givePut(p)
	}
	return err
}

// takePut returns a free put, or a new one.
func (c *Conn) takePut() *put {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.puts
	if p == nil {
		p = &put{c: c}
		p.wr.Done = p
		return p
	}
	c.puts = p.next
	return p
}

// reset makes p keep nothing alive.
func (p *put) reset() {
	p.b, p.shared, p.wr.Data, p.wr.Pages, p.wr.Pipe, p.wr.Piped = nil, false, nil, false, nil, 0
}

// givePut makes p free.
func (c *Conn) givePut(p *put) {
	p.reset()
	c.mu.Lock()
	defer c.mu.Unlock()
	p.next, c.puts = c.puts, p
}

// WorkDone implements rdma.Completer. The data has left, or never will.
func (p *put) WorkDone(_ *rdma.WorkRequest, err error) {
	switch {
	case p.shared:
		p.c.holds.Hold(p.b, p.until)
	case err != nil:
		p.b.Release()
	default:
		p.c.departure.Release(p.b)
	}
	if err != nil {
		p.c.givePut(p)
		return
	}
	p.reset()
	p.next, p.c.sent = p.c.sent, p
}

// GetData implements iscsi.Datamover by an RDMA Read.
func (c *Conn) GetData(it *iscsi.Task, off uint32, data []byte) error {
	t := it.Mover.(*task)
	r := t.remote.Write
	if !r.Valid {
		return errors.New("the command has no Write STag")
	}
	t.get.Op, t.get.Data, t.get.STag, t.get.TO = rdma.Read, data, r.STag, r.Base+uint64(off-t.base)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.gone != nil:
		return c.gone
	case c.ord == 0: // RFC 7145, section 7.3.6
		return errors.New("the initiator accepts no RDMA Reads")
	case c.outstanding >= c.ord:
		c.waiting.Push(t, &t.link)
		return nil
	}
	return c.postRead(t)
}

// Fetched implements iscsi.Meter. Read Responses come in order, so what has come for any Read counts.
func (c *Conn) Fetched(it *iscsi.Task) (came uint64, missing int, ok bool) {
	return c.rc.Fetched(), len(it.Mover.(*task).get.Data), true
}

// Taken implements iscsi.Meter.
func (c *Conn) Taken() (taken, owed uint64) { return c.rc.Taken() }

// postRead posts the RDMA Read of t. A Read that exceeds ORD would hold up everything
// after it in the send queue.
//
// Preconditions: c.mu is held; ORD allows one more Read.
func (c *Conn) postRead(t *task) error {
	invariant.Held(&c.mu)
	invariant.Check(c.outstanding < c.ord, "iser: %d RDMA Reads outstanding, ORD is %d", c.outstanding, c.ord)
	if err := c.rc.Post(&t.get); err != nil {
		return err
	}
	c.outstanding++
	return nil
}

// readDone notes the end of an RDMA Read, and posts the next one that waits.
func (c *Conn) readDone() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.outstanding--
	t := c.waiting.Pop()
	if t == nil {
		return
	}
	if err := c.postRead(t); err != nil { // the connection has ended
		t.err = err
		c.flushed.Push(t, &t.link)
		return
	}
	// Not in this goroutine, which receives: it must not wait for the peer to take
	// data, because the peer may wait for us to receive.
	go c.flush()
}

// SendControl implements iscsi.Datamover by a Send. The SCSI Response of a command that
// advertised an STag leaves in a Send with Invalidate (RFC 7145, section 7.3.2), if the
// initiator supports that.
func (c *Conn) SendControl(it *iscsi.Task) error {
	t := it.Mover.(*task)
	t.c, t.t = c, it
	Header{}.Put(t.head[:])
	copy(t.head[HeaderLen:], it.Header[:])
	wr := &t.send
	wr.Op, wr.Head, wr.Data, wr.STag = rdma.Send, t.head[:], it.Segment, 0
	h := pdu.BHS(it.Header[:])
	next := h.StatSN()
	switch h.Opcode() {
	case pdu.SCSIResponse:
		if stag := t.remote.toInvalidate(); stag != 0 && c.invalidates {
			wr.Op, wr.STag = rdma.SendInvalidate, stag
		}
		t.remote = Header{}
	case pdu.LoginResp, pdu.TextResp: // padded, as other targets do
		n := len(it.Segment)
		wr.Data = append(it.Segment[:n:n], make([]byte, pdu.Padded(n)-n)...)
	}
	if h.Opcode() != pdu.NOPIn || h.ITT() != pdu.ReservedTag { // RFC 7143, section 11.19.2
		next++
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.numbered || pdu.Before(c.statSN, next) { // else the status is repeated
		c.numbered, c.statSN = true, next
	}
	return c.rc.Post(wr)
}

// toInvalidate returns the STag that the initiator shall invalidate, or 0: the Read STag
// if there is one, else the Write STag (RFC 7145, section 7.3.2). It never invalidates
// STag 0, which ib_iser advertises if EDTL exceeds a buffer that it has not registered.
func (h *Header) toInvalidate() rdma.STag {
	if h.Read.Valid {
		return h.Read.STag
	}
	return h.Write.STag
}

// WorkDone implements rdma.Completer. The PDU has left, or never will. Reads end in Receive.
func (t *task) WorkDone(_ *rdma.WorkRequest, err error) {
	t.send.Data = nil
	if err != nil {
		t.t.Sent()
		return
	}
	t.c.departure.Sent(t.t)
}

// left ends what WorkDone has begun for the messages of a batch.
func (c *Conn) left() {
	c.departure.End()
	if c.sent == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for p := c.sent; p != nil; p = c.sent {
		c.sent, p.next, c.puts = p.next, c.puts, p
	}
}

// SetLender implements iscsi.Borrower. Without a Buffer the data stays in memory of the stream.
func (c *Conn) SetLender(lend func(n int) *iscsi.Buffer) { c.borrow = lend }

// memoryFor returns memory for the immediate data of a Send that begins with head, or nil.
func (c *Conn) memoryFor(head []byte) []byte {
	bhs := pdu.BHS(head[HeaderLen:])
	n := bhs.DataSegmentLength()
	if c.err != nil || c.borrow == nil || !c.fullFeature.Load() || bhs.Opcode() != pdu.SCSICommand || bhs.TotalAHSLength() > 0 || n == 0 || n > c.recvSegment {
		return nil
	}
	if c.coming = c.borrow(pdu.Padded(n)); c.coming == nil {
		return nil
	}
	return c.coming.Bytes()[:pdu.Padded(n)]
}

// giveBack releases b, unless it is nil.
func giveBack(b **iscsi.Buffer) {
	if *b != nil {
		(*b).Release()
		*b = nil
	}
}

// Receive implements iscsi.Datamover.
func (c *Conn) Receive(n *iscsi.Notice) error {
	giveBack(&c.came)
	if c.err != nil {
		giveBack(&c.coming)
	}
	for c.err == nil {
		err, ok := c.rc.Receive(&c.ev), false
		switch {
		case err == nil && c.ev.Read != nil:
			*n = iscsi.Notice{Task: c.ev.Read.Done.(*task).t, Err: c.ev.Err}
			c.readDone()
			return nil
		case err == nil:
			ok, err = c.message(n)
		case isTimeout(err):
			c.ev, c.bhs = rdma.Event{}, nil // else they keep the memory of the last message
			return err
		}
		if ok {
			return nil
		}
		if err != nil {
			c.failed(err)
		}
	}
	return c.drainReads(n)
}

// failed ends receiving because of err. It is not a part of Receive, in which the variable would take memory per command.
func (c *Conn) failed(err error) {
	var format *FormatError
	if errors.As(err, &format) {
		c.Refuse(err)
		return
	}
	c.end(err)
}

// isTimeout reports whether err is that of the receive deadline.
func isTimeout(err error) bool {
	var se *rdma.StreamError
	return !errors.As(err, &se) && errors.Is(err, os.ErrDeadlineExceeded)
}

// message handles a Send. ok says that n describes a PDU.
func (c *Conn) message(n *iscsi.Notice) (ok bool, err error) {
	b, rest, size := c.ev.Head, c.ev.Data, len(c.ev.Head)+len(c.ev.Data)
	if b == nil {
		b, rest = c.ev.Data, c.ev.Data[min(size, headLen):]
	}
	c.came, c.coming = c.coming, nil
	first := !c.peerStarted
	c.peerStarted = true
	h, hello, err := ParseHeader(b)
	switch {
	case err != nil:
		return false, &FormatError{err}
	case hello && !first:
		return false, &FormatError{errors.New("iSER Hello is not the first message")}
	case hello && c.noHello: // RFC 7145, section 5.1.3
		return false, &FormatError{errors.New("iSER Hello came although iSERHelloRequired=No")}
	case hello:
		c.hello, c.needsHello = true, false
		return false, c.helloReply(parseHello(b))
	case c.needsHello:
		return false, &FormatError{errors.New("no iSER Hello came although iSERHelloRequired=Yes")}
	case size < headLen:
		return false, &FormatError{fmt.Errorf("iSCSI PDU of %d bytes", size-HeaderLen)}
	}
	bhs := pdu.BHS(b[HeaderLen:headLen:headLen])
	ahs, data := bhs.TotalAHSLength(), bhs.DataSegmentLength()
	// Login and Text PDUs of Linux are padded, immediate data is not.
	if extra := len(rest) - ahs - data; extra < 0 || extra > pdu.Padded(data)-data {
		return false, &FormatError{fmt.Errorf("%v of %d bytes announces %d of AHS and %d of data", bhs.Opcode(),
			size-HeaderLen, ahs, data)}
	}
	if data > c.recvSegment {
		return false, &FormatError{fmt.Errorf("%v: data segment of %d bytes, but the limit is %d", bhs.Opcode(), data,
			c.recvSegment)}
	}
	if c.fullFeature.Load() {
		c.holds.Acknowledge(bhs.ExpStatSN())
	}
	c.hdr, c.bhs = h, bhs
	*n = iscsi.Notice{BHS: bhs, AHS: rest[:ahs:ahs], Data: rest[ahs:][:data:data]}
	if c.ev.Head != nil {
		n.Buffer = c.came
	}
	return true, nil
}

// A FormatError is an iSER format or protocol error. It ends the connection by a
// Terminate (RFC 7145, sections 10.1.3.3 and 10.1.3.4) with the reason "unspecified operation error".
type FormatError struct{ Err error }

// Error implements error.
func (e *FormatError) Error() string { return "iSER format error: " + e.Err.Error() }

// Unwrap returns e.Err.
func (e *FormatError) Unwrap() error { return e.Err }

// helloReply answers a Hello (RFC 7145, section 5.1.3), which limits the RDMA Reads of
// the target. The Hello is the first message of the connection or, after a login in
// RDMA mode, of the full feature phase.
func (c *Conn) helloReply(h Hello) error {
	r := HelloReply{MaxVer: protocolVersion, CurVer: protocolVersion}
	c.mu.Lock()
	if c.rc.Peer().Enhanced {
		c.ord = min(c.ord, int(h.IRD))
	} else { // MPA has agreed on no depth
		c.ord = c.rc.SetORD(int(h.IRD))
	}
	r.ORD = uint16(c.ord)
	c.mu.Unlock()
	r.Reject = !h.speaks() || h.IRD > 0 && r.ORD == 0
	b := make([]byte, HeaderLen)
	r.Put(b)
	if err := c.rc.Post(&rdma.WorkRequest{Op: rdma.Send, Head: b}); err != nil {
		return err
	}
	c.rc.Flush() // 28 bytes, once or twice: TCP has room for them
	if r.Reject {
		return &FormatError{fmt.Errorf("iSER Hello with versions %d..%d and iSER-IRD %d is not acceptable", h.MinVer,
			h.MaxVer, h.IRD)}
	}
	return nil
}

// Refuse implements iscsi.Refuser. RFC 5040 has one reason for what is wrong above RDMAP.
func (c *Conn) Refuse(err error) {
	c.end(err)
	c.rc.SetImpatient(false) // drainReads waits for the end
	c.rc.Refuse(wire.ReasonOperation, err)
	c.rc.SetReceiveDeadline(time.Now().Add(drainTime))
}

// end notes why the connection ended. drainReads does the rest.
func (c *Conn) end(err error) {
	c.err = err
	c.mu.Lock()
	c.gone = err
	for t := c.waiting.Pop(); t != nil; t = c.waiting.Pop() {
		t.err = err
		c.flushed.Push(t, &t.link)
	}
	c.mu.Unlock()
	c.rc.SetReceiveDeadline(time.Now().Add(drainTime))
}

// drainReads returns a Notice for every outstanding GetData, then why the connection has
// ended. It reads what the peer still sends: to close a socket with unread data resets
// the connection, and the reset could overtake a Terminate. Reads that the peer does not
// answer in that time end when the core calls Close.
func (c *Conn) drainReads(n *iscsi.Notice) error {
	c.mu.Lock()
	t := c.flushed.Pop()
	c.mu.Unlock()
	if t != nil {
		*n = iscsi.Notice{Task: t.t, Err: t.err}
		return nil
	}
	for c.rc.Receive(&c.ev) == nil {
		if c.ev.Read != nil {
			*n = iscsi.Notice{Task: c.ev.Read.Done.(*task).t, Err: c.err}
			return nil
		}
	}
	return c.err
}
