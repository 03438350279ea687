// Package tcp carries iSCSI over plain TCP (RFC 7143). Its Conn is the Datamover of
// package iscsi on a net.Conn. SCSI data-in becomes Data-In PDUs. R2Ts ask for data-out,
// which comes in solicited Data-Out PDUs. The Conn checks and computes header and data
// digests. Every other PDU passes unchanged between the core and the initiator.
//
// # Receiving
//
// Conn.Receive is the whole receive side. One goroutine at a time calls it and reads the
// socket; a long Data-Out goes straight into the memory of its task. While nobody calls
// it, TCP holds the initiator back.
//
// # Sending
//
// PutData, GetData and SendControl append to a queue. If several goroutines call Flush, the first
// one writes for all, in as few system calls as it can. It does not copy long data.
//
// # Recovery
//
// At an ErrorRecoveryLevel above 0 the Conn keeps sent data until the initiator has acknowledged
// it, and asks again for lost Data-Out. A wrong header digest ends the connection at every level,
// because nobody knows where the next PDU begins (RFC 7143, section 7.8).
package tcp

import (
	"cmp"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/rdma/llp"
)

// loginSegment is the longest data segment, in bytes, that the target sends during
// login (RFC 7143, section 13.12).
const loginSegment = 8192

// Options configures a connection.
type Options struct {
	// Prefix holds the bytes that the caller has already read from the connection.
	Prefix []byte
	// MaxRecvDataSegmentLength is the value that the target declares, in bytes. Longer
	// data segments end the connection. Default 262144, like that of keys.Limits.
	MaxRecvDataSegmentLength int
}

// A Conn is an iSCSI connection of the target over TCP.
type Conn struct {
	nc       net.Conn
	limit    int          // longest data segment that we receive in the full feature phase
	maxSend  atomic.Int32 // longest data segment that the initiator accepts, bytes
	flush    func()       // flushAside, allocated once
	aside    sync.WaitGroup
	borrow   func(n int) *iscsi.Buffer // of SetLender
	refers   atomic.Bool               // the kernel may refer to pages of files, and that is cheaper than a copy
	deferred atomic.Bool               // Defer was called: Flush before Receive waits
	inPlace  atomic.Int64              // bytes of the present Data-Out that are in place; written by Receive

	rx receiver // for the goroutine in Receive
	tx sender   // for the goroutine in Flush

	mu       sync.Mutex
	tasks    []*task // by the low half of the Target Transfer Tag
	queue    list
	free     list    // items that carried a Data-In or an R2T
	mark     uint    // counts events that no status may be moved across; see collapses
	burst    uint32  // MaxBurstLength, bytes
	r2ts     uint32  // that a GetData may have outstanding
	recovers bool    // ErrorRecoveryLevel is above 0
	digests  digests // for every PDU except Login Responses
	err      error   // why nothing more can be queued
	recvErr  error   // why Receive has ended, and with it every GetData
	ending   bool    // our direction of the stream ends after the queue
	ended    bool    // our direction of the stream has ended
	flushing bool    // a goroutine is in Flush
	batches  uint64  // that Flush has sent
	closed   bool

	holds iscsi.Holds

	paused    atomic.Bool     // see Pause
	impatient syscall.RawConn // see SetImpatient: of nc, or nil; for the goroutine in Receive
	firstTag  uint32          // of Target Transfer Tags: see Continue
}

// digests says which digests are in use.
type digests struct{ header, data bool }

var (
	_ iscsi.Datamover    = (*Conn)(nil)
	_ iscsi.Canceler     = (*Conn)(nil)
	_ iscsi.Meter        = (*Conn)(nil)
	_ iscsi.Renegotiator = (*Conn)(nil)
	_ iscsi.Upgrader     = (*Conn)(nil)
	_ iscsi.Repeater     = (*Conn)(nil)
	_ iscsi.Reassigner   = (*Conn)(nil)
	_ iscsi.Deferrer     = (*Conn)(nil)
	_ iscsi.Sizer        = (*Conn)(nil)
	_ iscsi.Impatient    = (*Conn)(nil)
	_ iscsi.Borrower     = (*Conn)(nil)
	_ iscsi.LentMover    = (*Conn)(nil)
	_ iscsi.PipeMover    = (*Conn)(nil)
	_ iscsi.Resumable    = (*Conn)(nil)
)

// task is the state of a task slot in the Conn. Conn.mu guards it.
type task struct {
	t   *iscsi.Task
	itt uint32
	lun [8]byte

	send item // the PDU of SendControl

	// Data-In:
	dataSN uint32 // of the next PDU
	sent   uint32 // Buffer Offset after the latest PutData
	last   *item  // the latest PutData, if mark is still Conn.mark
	mark   uint
	keeping

	// Data-Out. A GetData is a sequence of R2Ts. The initiator answers them in their order, one after the
	// other (DataSequenceInOrder). Positions are bytes from the start of data.
	getting  bool
	placing  bool   // Receive is reading into data
	came     uint64 // bytes of whole Data-Outs that have come for the GetData
	quit     bool   // CancelData was called during that
	data     []byte // of the GetData
	base     uint32 // Buffer Offset of data
	asked    uint32 // no R2T has asked for data from here on
	at, end  uint32 // the rest of the present R2T
	placeAt  uint32 // start of the present Data-Out
	r2tAt    uint32 // start of the present R2T
	r2tSN    uint32 // of the next R2T
	ttt      uint32 // of the present R2T, or of Data-In with the A bit
	ahead    uint32 // R2Ts after the present one that are outstanding; their tags follow ttt
	quitTTT  uint32 // ttt of the last canceled R2T, whose data is discarded
	quits    uint32 // canceled R2Ts after that
	outSN    uint32 // DataSN of the next Data-Out
	exp, max uint32 // ExpCmdSN and MaxCmdSN for R2Ts
	err      error  // why the GetData fails when the present sequence is over
	losses
}

// New returns a connection before login. nc belongs to it from now on.
func New(nc net.Conn, o Options) *Conn {
	c := &Conn{nc: nc, limit: cmp.Or(o.MaxRecvDataSegmentLength, 262144)}
	c.maxSend.Store(loginSegment)
	c.flush = c.flushAside
	c.borrow = func(int) *iscsi.Buffer { return nil }
	c.rx.limit = loginLimit
	c.rx.one, c.rx.both = llp.Readers(nc)
	c.rx.win.Init(c.read, o.Prefix)
	c.tx.out.SetConn(nc)
	return c
}

// Transport implements iscsi.Datamover.
func (c *Conn) Transport() string { return "tcp" }

// Size implements iscsi.Sizer.
func (c *Conn) Size(*iscsi.Params) int { return llp.WindowLen + llp.GatherLen }

// SetLender implements iscsi.Borrower.
func (c *Conn) SetLender(lend func(n int) *iscsi.Buffer) { c.borrow = lend }

// LocalAddr implements iscsi.Datamover.
func (c *Conn) LocalAddr() net.Addr { return c.nc.LocalAddr() }

// RemoteAddr implements iscsi.Datamover.
func (c *Conn) RemoteAddr() net.Addr { return c.nc.RemoteAddr() }

// RDMA implements iscsi.Datamover.
func (c *Conn) RDMA() bool { return false }

// MaxSendSegment implements iscsi.Datamover.
func (c *Conn) MaxSendSegment() int { return int(c.maxSend.Load()) }

// SetMaxSendSegment implements iscsi.Renegotiator. It applies to every later PutData.
func (c *Conn) SetMaxSendSegment(n int) { c.maxSend.Store(int32(n)) }

// SetReceiveDeadline implements iscsi.Datamover.
func (c *Conn) SetReceiveDeadline(t time.Time) error { return c.nc.SetReadDeadline(t) }

// SetImpatient implements iscsi.Impatient.
func (c *Conn) SetImpatient(on bool) bool {
	c.impatient, c.rx.win.Patience = nil, nil
	sc, ok := c.nc.(syscall.Conn)
	if ok && on {
		if c.impatient, _ = sc.SyscallConn(); c.impatient != nil { // a closed one waits for nothing
			c.rx.win.Patience = c.patience
		}
	}
	return ok
}

// Missing implements iscsi.Impatient.
func (c *Conn) Missing() int { return c.rx.win.Missing() }

// EnterFullFeature implements iscsi.Datamover. The final Login Response has no digests,
// like all Login Responses.
func (c *Conn) EnterFullFeature(p iscsi.Params, tasks int) error {
	if tasks > maxTasks {
		return fmt.Errorf("%d tasks are more than the %d that a Target Transfer Tag can name", tasks, maxTasks)
	}
	d := digests{header: p.HeaderDigest, data: p.DataDigest}
	if p.Declared != 0 {
		c.limit = int(p.Declared)
	}
	c.rx.digests, c.rx.fullFeature, c.rx.limit = d, true, c.limit
	c.rx.win.Grow()
	if c.rx.both != nil {
		c.rx.win.Scatter(c.readBoth)
	}
	c.tx.out.Keep()
	c.maxSend.Store(int32(p.MaxRecvDataSegmentLength))
	c.refers.Store(!p.DataDigest && llp.RefersPages(c.nc))
	c.mu.Lock()
	defer c.mu.Unlock()
	c.digests, c.burst, c.recovers = d, p.MaxBurstLength, p.ErrorRecoveryLevel > 0
	c.r2ts = min(max(uint32(p.MaxOutstandingR2T), 1), maxR2Ts)
	return nil
}

// maxR2Ts is how many R2Ts a GetData has outstanding at most. More of them hide no more latency, and
// each takes memory.
const maxR2Ts = 16

// A Target Transfer Tag consists of the index of a task and, above it, a count of its
// R2Ts. The count identifies answers to an earlier R2T. The index is never ffff, so the
// tag is never pdu.ReservedTag.
const (
	indexBits = 16
	maxTasks  = 1<<indexBits - 1
)

// NewTask implements iscsi.Datamover.
func (c *Conn) NewTask() any {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := &task{ttt: c.firstTag + uint32(len(c.tasks)), quitTTT: pdu.ReservedTag}
	c.tasks = append(c.tasks, t)
	return t
}

// Bind implements iscsi.Datamover.
func (c *Conn) Bind(it *iscsi.Task, _ uint32) error {
	t, h := it.Mover.(*task), it.Request()
	if c.recovers { // else only Receive looks at the task before GetData or PutData, and nobody calls that meanwhile
		c.mu.Lock()
		defer c.mu.Unlock()
	}
	t.t, t.itt, t.lun, t.r2tSN, t.dataSN = it, h.ITT(), h.LUN(), 0, 0
	if c.recovers {
		t.keeping = keeping{}
		t.ttt += 1 << indexBits
	}
	t.sent = 0
	return nil
}

// Unbind implements iscsi.Datamover. Queued items do not refer to the task.
func (c *Conn) Unbind(it *iscsi.Task) {
	t := it.Mover.(*task)
	c.mu.Lock()
	defer c.mu.Unlock()
	t.last = nil
	c.release(t)
}

// PutData implements iscsi.Datamover by Data-In PDUs.
func (c *Conn) PutData(it *iscsi.Task, off uint32, data []byte, b *iscsi.Buffer) error {
	return c.put(it, off, len(data), data, b)
}

// PutLent implements iscsi.LentMover.
func (c *Conn) PutLent(it *iscsi.Task, off uint32, b *iscsi.Buffer) error {
	size := 0
	for _, l := range b.Lent() {
		size += len(l.Data)
	}
	return c.put(it, off, size, nil, b)
}

// TakesLent implements iscsi.LentMover. The kernel refers to the data, or copies it once, from where it lies.
func (c *Conn) TakesLent() bool { return true }

// TakePipe implements iscsi.PipeMover. A data digest needs the data.
func (c *Conn) TakePipe(n, have int) iscsi.Pipe {
	if !c.refers.Load() || c.maxSend.Load() < shareAtLeast {
		return nil
	}
	if p := llp.TakePipe(n, have); p != nil {
		return p
	}
	return nil
}

// PutPipe implements iscsi.PipeMover.
func (c *Conn) PutPipe(it *iscsi.Task, off uint32, n int, b *iscsi.Buffer) error {
	b.Pipe().(*llp.Pipe).Filled(n)
	return c.put(it, off, n, nil, b)
}

// put queues size bytes of b; data is nil if they are lent.
func (c *Conn) put(it *iscsi.Task, off uint32, size int, data []byte, b *iscsi.Buffer) error {
	t, h := it.Mover.(*task), pdu.BHS(it.Header[:])
	segment := uint32(c.maxSend.Load()) &^ 3 // RFC 7143, section 11.7.7
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	i := c.newItem()
	*i = item{op: pdu.DataIn, itt: t.itt, ttt: pdu.ReservedTag, expCmdSN: h.ExpCmdSN(), maxCmdSN: h.MaxCmdSN(),
		stretch: stretch{sn: t.dataSN, off: off, size: uint32(size), segment: segment, burst: c.burst},
		data:    data, buf: b}
	if c.recovers {
		c.keep(t, i)
	}
	t.dataSN += i.pdus()
	t.sent = off + i.size
	t.last, t.mark = i, c.mark
	c.queue.Push(i, &i.link)
	return nil
}

// GetData implements iscsi.Datamover by R2Ts.
func (c *Conn) GetData(it *iscsi.Task, off uint32, data []byte) error {
	t, h := it.Mover.(*task), pdu.BHS(it.Header[:])
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := cmp.Or(c.err, c.recvErr); err != nil {
		return err
	}
	t.getting, t.quit, t.err = true, false, nil
	t.data, t.base, t.asked, t.came, t.ahead = data, off, 0, 0, 0
	t.losses = losses{}
	t.exp, t.max = h.ExpCmdSN(), h.MaxCmdSN()
	c.ask(t)
	return nil
}

// ask queues the next R2T of t, for lost data or for at most MaxBurstLength bytes that
// no R2T has asked for yet (RFC 7143, section 11.8).
//
// Preconditions: c.mu is held.
func (c *Conn) ask(t *task) {
	invariant.Held(&c.mu)
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
	c.askAhead(t)
}

// askAhead queues R2Ts behind the present one of t, as far as the initiator takes them (RFC 7143, section 13.17). With
// ErrorRecoveryLevel above 0 that is none.
//
// Preconditions: c.mu is held.
func (c *Conn) askAhead(t *task) {
	invariant.Held(&c.mu)
	for t.ahead+1 < c.r2ts && t.asked < uint32(len(t.data)) {
		n := min(uint32(len(t.data))-t.asked, c.burst)
		t.ahead++
		i := c.newItem()
		*i = item{op: pdu.R2T, itt: t.itt, ttt: t.ttt + t.ahead<<indexBits, lun: t.lun, expCmdSN: t.exp, maxCmdSN: t.max,
			stretch: stretch{sn: t.r2tSN, off: t.base + t.asked, size: n}}
		t.r2tSN++
		t.asked += n
		c.queue.Push(i, &i.link)
	}
}

// nextAhead makes the R2T that follows the present one of t the present one.
//
// Preconditions: c.mu is held; t.ahead > 0.
func (c *Conn) nextAhead(t *task) {
	invariant.Held(&c.mu)
	t.ahead--
	t.ttt += 1 << indexBits
	t.outSN = 0
	t.at = t.end
	t.end = t.at + min(uint32(len(t.data))-t.at, c.burst)
	t.r2tAt = t.at
}

// quitR2Ts notes that what comes for the R2Ts of t is discarded from now on.
//
// Preconditions: c.mu is held.
func (c *Conn) quitR2Ts(t *task) {
	invariant.Held(&c.mu)
	t.quitTTT, t.quits = t.ttt, t.ahead
	t.ttt += t.ahead << indexBits
	t.ahead = 0
}

// hasQuit reports whether ttt is the tag of an R2T that quitR2Ts was told of.
func (t *task) hasQuit(ttt uint32) bool {
	return (ttt-t.quitTTT)&maxTasks == 0 && (ttt-t.quitTTT)>>indexBits <= t.quits
}

// queueR2T queues the present R2T of t.
//
// Preconditions: c.mu is held.
func (c *Conn) queueR2T(t *task) *item {
	invariant.Held(&c.mu)
	i := c.newItem()
	*i = item{op: pdu.R2T, itt: t.itt, ttt: t.ttt, lun: t.lun, expCmdSN: t.exp, maxCmdSN: t.max,
		stretch: stretch{sn: t.r2tSN - 1, off: t.base + t.r2tAt, size: t.end - t.r2tAt}}
	c.queue.Push(i, &i.link)
	return i
}

// CancelData implements iscsi.Canceler. Data that still comes for the R2T is discarded.
func (c *Conn) CancelData(it *iscsi.Task) bool {
	t := it.Mover.(*task)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !t.getting: // the Notice is on its way
		return false
	case t.placing: // the Notice comes at the end of this PDU
		t.quit = true
		return false
	}
	t.getting, t.data = false, nil
	c.quitR2Ts(t)
	return true
}

// Fetched implements iscsi.Meter.
func (c *Conn) Fetched(it *iscsi.Task) (came uint64, missing int, ok bool) {
	t := it.Mover.(*task)
	c.mu.Lock()
	defer c.mu.Unlock()
	came = t.came
	if t.placing {
		came += uint64(c.inPlace.Load())
	}
	return came, max(0, len(t.data)-int(came)), t.getting
}

// Taken implements iscsi.Meter.
func (c *Conn) Taken() (taken, owed uint64) {
	if taken, owed, ok := llp.Taken(c.nc); ok {
		return taken, owed
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.flushing {
		owed = 1
	}
	return c.batches, owed
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

// collapses reports whether the status of a task may travel in its last Data-In (RFC
// 7143, section 11.7.3). Two more conditions are the caller's. The Data-In is still in
// the queue, and no PDU with a StatSN follows it: then task.mark equals Conn.mark. The
// ErrorRecoveryLevel is 0: above, a PDU that is repeated is either data or a status.
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
	c.holds.End()
	return err
}

// CloseWrite implements iscsi.Datamover.
func (c *Conn) CloseWrite() error {
	c.mu.Lock()
	c.err = cmp.Or(c.err, net.ErrClosed)
	c.ending = true
	c.mu.Unlock()
	c.Flush()
	return nil
}

// abandon drops what is queued, and lets later calls fail with err.
func (c *Conn) abandon(err error) {
	c.mu.Lock()
	c.err = cmp.Or(c.err, err)
	lost := c.queue.Take()
	c.mark++
	c.mu.Unlock()
	c.done(lost)
}
