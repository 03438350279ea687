// Package tcp carries iSCSI over plain TCP (RFC 7143): it is the Datamover of
// package iscsi on a net.Conn. SCSI data-in becomes Data-In PDUs, data-out is
// asked for by R2Ts and comes in solicited Data-Out PDUs; header and data digests
// are checked and made here. Every other PDU goes to the core as it is, and comes
// from there.
//
// # Receiving
//
// Conn.Receive is the whole receive side: one goroutine at a time reads the
// socket, and a long Data-Out is read straight into the memory of its task. As
// long as nobody calls it, TCP holds the peer back.
//
// # Sending
//
// PutData, GetData and SendControl append to a queue. Of several goroutines in
// Flush the first writes for all, gathering the queue into as few system calls as
// it can. Data is referred to, not copied.
//
// # Recovery
//
// At an ErrorRecoveryLevel above 0 data that was sent is kept until it is
// acknowledged, and Data-Out that got lost is asked for again. A wrong header digest
// ends the connection at every level: nobody knows where the next PDU begins (RFC
// 7143, section 7.8).
package tcp

import (
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
)

// loginSegment is the longest data segment, in octets, that we send during login
// (RFC 7143, section 13.12).
const loginSegment = 8192

// Options of a connection.
type Options struct {
	// Prefix is what the caller has already read from the connection.
	Prefix []byte
	// MaxRecvDataSegmentLength is what the target declares, in octets: longer
	// data segments end the connection. Default 262144, which is also that of
	// keys.Limits.
	MaxRecvDataSegmentLength int
}

// A Conn is an iSCSI connection of the target over TCP.
type Conn struct {
	nc       net.Conn
	limit    int          // longest data segment in the full feature phase
	maxSend  atomic.Int32 // longest data segment that the initiator takes, octets
	flush    func()       // flushAside; made once
	aside    sync.WaitGroup
	deferred atomic.Bool // what is queued leaves before Receive waits

	rx receiver // of the goroutine in Receive
	tx sender   // of the goroutine in Flush

	mu       sync.Mutex
	tasks    []*task // by the low half of the Target Transfer Tag
	queue    list
	free     list    // items that carried a Data-In or an R2T
	mark     uint    // counts events that a status cannot be moved across; see collapses
	burst    uint32  // MaxBurstLength, octets
	recovers bool    // ErrorRecoveryLevel is above 0
	digests  digests // in force from the first PDU that is not a Login Response
	err      error   // why nothing more can be queued
	recvErr  error   // why Receive has ended: nobody would notice the end of a GetData
	ending   bool    // our direction of the stream ends behind the queue
	ended    bool    // it has ended
	flushing bool    // a goroutine is in Flush
	closed   bool
}

// digests tells which are in use.
type digests struct{ header, data bool }

var (
	_ iscsi.Datamover    = (*Conn)(nil)
	_ iscsi.Canceler     = (*Conn)(nil)
	_ iscsi.Renegotiator = (*Conn)(nil)
	_ iscsi.Upgrader     = (*Conn)(nil)
	_ iscsi.Repeater     = (*Conn)(nil)
	_ iscsi.Reassigner   = (*Conn)(nil)
	_ iscsi.Deferrer     = (*Conn)(nil)
)

// task is the mover's state of a task slot. Conn.mu guards it.
type task struct {
	t   *iscsi.Task
	itt uint32
	lun [8]byte

	send item // the PDU of SendControl

	// Data-In:
	dataSN uint32 // of the next PDU
	sent   uint32 // Buffer Offset behind the latest PutData
	last   *item  // the latest PutData, if mark is still Conn.mark
	mark   uint
	keeping

	// Data-Out. A GetData is a sequence of R2Ts, one outstanding at a time.
	// Positions are octets of data.
	getting  bool
	placing  bool   // Receive is moving octets into data
	quit     bool   // CancelData was called meanwhile
	data     []byte // of the GetData
	base     uint32 // Buffer Offset of data
	asked    uint32 // where the part begins that no R2T has asked for yet
	at, end  uint32 // what is still to come for the present R2T
	placeAt  uint32 // where the present Data-Out begins
	r2tAt    uint32 // where the present R2T begins
	r2tSN    uint32 // of the next R2T
	ttt      uint32 // of the present R2T, or of the Data-In that want to be acknowledged
	quitTTT  uint32 // ttt of the last R2T that was called off; its data is discarded
	outSN    uint32 // DataSN of the next Data-Out
	exp, max uint32 // ExpCmdSN and MaxCmdSN for R2Ts
	err      error  // why the GetData fails when the present sequence is over
	losses
}

// New returns the connection before login. nc belongs to it from then on.
func New(nc net.Conn, o Options) *Conn {
	if o.MaxRecvDataSegmentLength == 0 {
		o.MaxRecvDataSegmentLength = 262144
	}
	c := &Conn{nc: nc, limit: o.MaxRecvDataSegmentLength}
	c.maxSend.Store(loginSegment)
	c.flush = c.flushAside
	c.rx.limit = loginLimit
	c.rx.win.Init(c.read, o.Prefix)
	c.tx.out.Init()
	c.tx.out.SetConn(nc)
	return c
}

// Transport, LocalAddr, RemoteAddr and RDMA describe the connection.
func (c *Conn) Transport() string    { return "tcp" }
func (c *Conn) LocalAddr() net.Addr  { return c.nc.LocalAddr() }
func (c *Conn) RemoteAddr() net.Addr { return c.nc.RemoteAddr() }
func (c *Conn) RDMA() bool           { return false }

// MaxSendSegment implements iscsi.Datamover.
func (c *Conn) MaxSendSegment() int { return int(c.maxSend.Load()) }

// SetMaxSendSegment implements iscsi.Renegotiator. PutData from now on keeps to
// it.
func (c *Conn) SetMaxSendSegment(octets int) { c.maxSend.Store(int32(octets)) }

// SetReceiveDeadline implements iscsi.Datamover.
func (c *Conn) SetReceiveDeadline(t time.Time) error { return c.nc.SetReadDeadline(t) }

// EnterFullFeature implements iscsi.Datamover. The final Login Response is still
// without digests, like all of them.
func (c *Conn) EnterFullFeature(p iscsi.Params, tasks int) error {
	if tasks > maxTasks {
		return fmt.Errorf("%d tasks, Target Transfer Tags are made for %d", tasks, maxTasks)
	}
	d := digests{header: p.HeaderDigest, data: p.DataDigest}
	c.rx.digests, c.rx.fullFeature, c.rx.limit = d, true, c.limit
	c.maxSend.Store(int32(p.MaxRecvDataSegmentLength))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.digests, c.burst, c.recovers = d, p.MaxBurstLength, p.ErrorRecoveryLevel > 0
	return nil
}

// A Target Transfer Tag is the index of a task and, above it, a count of its
// R2Ts, so that an answer to an earlier R2T is found out. The index is never
// ffff, and the tag never pdu.ReservedTag.
const (
	indexBits = 16
	maxTasks  = 1<<indexBits - 1
)

// NewTask implements iscsi.Datamover.
func (c *Conn) NewTask() any {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &task{ttt: uint32(len(c.tasks)), quitTTT: pdu.ReservedTag}
	c.tasks = append(c.tasks, t)
	return t
}

// Bind implements iscsi.Datamover.
func (c *Conn) Bind(it *iscsi.Task, _ uint32) error {
	t, h := it.Mover.(*task), it.Request()
	c.mu.Lock()
	defer c.mu.Unlock()
	t.t, t.itt, t.lun, t.r2tSN, t.dataSN = it, h.ITT(), h.LUN(), 0, 0
	if c.recovers {
		t.keeping = keeping{}
		t.ttt += 1 << indexBits
	}
	t.sent = 0
	return nil
}

// Unbind implements iscsi.Datamover. What is queued does not refer to the task.
func (c *Conn) Unbind(it *iscsi.Task) {
	t := it.Mover.(*task)
	c.mu.Lock()
	defer c.mu.Unlock()
	t.last = nil
	c.release(t)
}

// PutData implements iscsi.Datamover by Data-In PDUs.
func (c *Conn) PutData(it *iscsi.Task, off uint32, data []byte, b *iscsi.Buffer) error {
	t, h := it.Mover.(*task), pdu.BHS(it.Header[:])
	segment := uint32(c.maxSend.Load()) &^ 3 // RFC 7143, section 11.7.7
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	i := c.newItem()
	*i = item{op: pdu.DataIn, itt: t.itt, ttt: pdu.ReservedTag, sn: t.dataSN, off: off, expCmdSN: h.ExpCmdSN(), maxCmdSN: h.MaxCmdSN(),
		data: data, buf: b, segment: segment, burst: c.burst}
	if c.recovers {
		c.keep(t, i)
	}
	t.dataSN += i.pdus()
	t.sent = off + uint32(len(data))
	t.last, t.mark = i, c.mark
	c.queue.Push(i, &i.link)
	return nil
}

// GetData implements iscsi.Datamover by R2Ts.
func (c *Conn) GetData(it *iscsi.Task, off uint32, data []byte) error {
	t, h := it.Mover.(*task), pdu.BHS(it.Header[:])
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.err != nil:
		return c.err
	case c.recvErr != nil:
		return c.recvErr
	}
	t.getting, t.quit, t.err = true, false, nil
	t.data, t.base, t.asked = data, off, 0
	t.losses = losses{}
	t.exp, t.max = h.ExpCmdSN(), h.MaxCmdSN()
	c.ask(t)
	return nil
}

// ask queues an R2T for what t has lost, or for the first MaxBurstLength octets of
// what it has not asked for yet (RFC 7143, section 11.8).
//
// Preconditions: c.mu is held.
func (c *Conn) ask(t *task) {
	t.ttt += 1 << indexBits
	t.outSN = 0
	if s, ok := t.losses.pop(); ok {
		t.at, t.end = s.from, s.to
	} else {
		t.at = t.asked
		t.end = t.at + min(uint32(len(t.data))-t.at, c.burst)
		t.asked = t.end
	}
	t.r2tAt = t.at
	t.r2tSN++
	c.queueR2T(t)
}

// queueR2T queues the present R2T of t.
//
// Preconditions: c.mu is held.
func (c *Conn) queueR2T(t *task) *item {
	i := c.newItem()
	*i = item{op: pdu.R2T, itt: t.itt, ttt: t.ttt, lun: t.lun, sn: t.r2tSN - 1, off: t.base + t.r2tAt, length: t.end - t.r2tAt,
		expCmdSN: t.exp, maxCmdSN: t.max}
	c.queue.Push(i, &i.link)
	return i
}

// CancelData implements iscsi.Canceler. The R2T stays answered for: what still
// comes for it is discarded.
func (c *Conn) CancelData(it *iscsi.Task) bool {
	t := it.Mover.(*task)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !t.getting: // the Notice is on its way
		return false
	case t.placing: // it comes at the end of this PDU
		t.quit = true
		return false
	}
	t.getting, t.quitTTT, t.data = false, t.ttt, nil
	return true
}

// SendControl implements iscsi.Datamover.
func (c *Conn) SendControl(it *iscsi.Task) error {
	t, h := it.Mover.(*task), pdu.BHS(it.Header[:])
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	t.t = it
	if h.Opcode() == pdu.SCSIResponse {
		if h.ExpDataSN() > 0 { // there was a data phase
			h.SetExpDataSN(t.dataSN)
		}
		last := t.last
		t.last = nil
		if last != nil && t.mark == c.mark && collapses(it) && !c.recovers {
			last.task = t
			c.mark++
			return nil
		}
	}
	c.mark++
	t.send = item{op: h.Opcode(), task: t}
	c.queue.Push(&t.send, &t.send.link)
	return nil
}

// collapses tells whether the status of a task may travel in its last Data-In
// (RFC 7143, section 11.7.3). That Data-In must be queued still, and no PDU with a
// StatSN may be queued behind it: then task.mark equals Conn.mark. At an
// ErrorRecoveryLevel above 0 it travels alone, so that what is repeated is either
// data or a status.
func collapses(it *iscsi.Task) bool {
	h := pdu.BHS(it.Header[:])
	return h.Response() == pdu.CommandCompleted && h.Status() == 0 && len(it.Segment) == 0
}

// Upgrade implements iscsi.Upgrader.
func (c *Conn) Upgrade() (nc net.Conn, prefix []byte, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return nil, nil, c.err
	}
	c.err = net.ErrClosed
	return c.nc, slices.Clone(c.rx.win.Peek(c.rx.win.Len())), nil
}

// Close implements iscsi.Datamover.
func (c *Conn) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.mu.Unlock()
	err := c.nc.Close()
	c.abandon(net.ErrClosed)
	return err
}

// CloseWrite implements iscsi.Datamover.
func (c *Conn) CloseWrite() error {
	c.mu.Lock()
	if c.err == nil {
		c.err = net.ErrClosed
	}
	c.ending = true
	c.mu.Unlock()
	c.Flush()
	return nil
}

// abandon fails what is queued and what will be.
func (c *Conn) abandon(err error) {
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	lost := c.queue.Take()
	c.mark++
	c.mu.Unlock()
	c.done(lost)
}
