package iscsi

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

const (
	// immediateSlots are task slots beside the command window, which immediate
	// requests do not count in.
	immediateSlots = 32
	// Of these, commands and task management functions can be long in use. The
	// rest is left to requests that are answered at once, so that those always
	// get a slot when the network has taken the last answers.
	maxImmediateCommands = 16
	maxImmediateTMFs     = 8
	// ownSlots are for PDUs that nobody asked for: Reject, NOP-In, Asynchronous
	// Message.
	ownSlots = 8

	// loginDataLength is the longest data segment of a Login PDU, and of any
	// PDU in a discovery session over RDMA (RFC 7143, section 6.3).
	loginDataLength = 8192

	// maxUnexpected PDUs are not acknowledged at a time: ib_iser has receive
	// buffers for two NOP-In and two Asynchronous Messages.
	maxUnexpected = 2
)

// A phase of a connection, in order.
type phase uint8

const (
	phaseLogin       phase = iota // Serve's goroutine is alone
	phaseFullFeature              // LOGGED_IN (RFC 7143, section 8.1)
	phaseLogout                   // a Logout Request is being served: no task begins any more
	phaseEnded                    // the mover is closed or closing
)

// A conn is one connection from login to its end.
//
// In the full feature phase any number of goroutines run serve. They take turns
// in receiving: the holder of recvMu reads a PDU, or the end of a GetData, makes
// sure that another goroutine can receive, lets go, and does the work itself.
//
// Lock order: recvMu, mu, the mover's locks, then the leaves slotMu and
// budget.mu. No lock is held over a call that may reach a backend, nor while waiting, except that
// the holder of recvMu waits for the peer in Receive, and in newTask for task
// slots that the network is about to free.
type conn struct {
	node   *Node
	portal *Portal
	dm     Datamover
	log    *slog.Logger
	piece  int // octets of data moved at once

	// Set by login, read-only from then on.
	params    Params
	sess      *session
	cid       uint16
	recvLimit int // longest data segment of the initiator, octets

	recvMu   sync.Mutex
	notice   Notice        // of the last Receive
	closing  bool          // Receive has failed once
	received atomic.Uint64 // PDUs; written under recvMu

	waiting atomic.Int32 // goroutines that want recvMu
	workers sync.WaitGroup
	worker  func() // what a new goroutine runs; made once

	mu         sync.Mutex
	changed    sync.Cond // on mu: a task has ended, the window or the phase has moved
	phase      phase
	reason     error // why the connection ended; nil after a logout
	win        window
	statSN     uint32
	tasks      taskTable
	ready      taskList  // may run, in CmdSN order
	seq        uint64    // counts tasks as they become ready
	ordered    int       // tasks in execution that have the ORDERED attribute
	immediate  [64]uint8 // immediate requests in execution, by opcode
	unexpected []unexpected
	ping       uint32 // TTT of the last NOP-In that asked for an answer

	textBusy bool // a Text Request is being answered

	text textExchange // owned by that Text Request

	slotMu    sync.Mutex // a leaf
	slotFreed sync.Cond  // on slotMu
	freeSlots *Task      // linked by next
	slots     int        // made so far
	maxSlots  int

	budget budget

	ending chan struct{} // closed when the connection begins to end
	done   chan struct{} // closed when nothing of it is left

	timerMu sync.Mutex
	timer   *time.Timer // keepalive, then the wait after logout
}

// unexpected is a PDU of ours that the initiator has not asked for and not
// acknowledged yet (RFC 7145, section 8.1.2).
type unexpected struct {
	statSN uint32 // acknowledged when ExpStatSN is beyond
	ttt    uint32 // of a NOP-In, acknowledged by the answer, too; else ReservedTag
}

func newConn(p *Portal, dm Datamover) *conn {
	nd := p.node
	c := &conn{
		node: nd, portal: p, dm: dm, piece: nd.opt.MaxTransferPiece,
		log:       nd.opt.Logger.With("transport", dm.Transport(), "remote", dm.RemoteAddr().String(), "local", dm.LocalAddr().String()),
		recvLimit: loginDataLength,
		maxSlots:  nd.opt.QueueDepth + immediateSlots + ownSlots,
		ending:    make(chan struct{}),
		done:      make(chan struct{}),
	}
	c.changed.L = &c.mu
	c.slotFreed.L = &c.slotMu
	c.tasks.init(c.maxSlots)
	c.budget = budget{pool: &nd.buffers, free: nd.opt.ConnectionMemory}
	c.worker = func() {
		defer c.workers.Done()
		c.serve(false)
	}
	return c
}

// Serve runs one connection from login to its end and closes dm. It returns nil
// after a logout or the end of a discovery session, otherwise why the
// connection ended or the login was refused.
func (p *Portal) Serve(dm Datamover) error {
	c := newConn(p, dm)
	nd := p.node
	nd.mu.Lock()
	nd.conns[c] = struct{}{}
	nd.mu.Unlock()
	defer func() {
		nd.mu.Lock()
		delete(nd.conns, c)
		nd.mu.Unlock()
		close(c.done)
	}()

	if err := c.login(); err != nil {
		c.end(err)
		c.finish()
		return err
	}
	c.keepalive()
	c.serve(true)
	c.finish()
	c.logEnd()
	return c.reason
}

// logEnd writes the one line about the end of a session.
func (c *conn) logEnd() {
	why := "logout"
	if c.reason != nil {
		why = c.reason.Error()
	} else if c.sess.discovery {
		why = "discovery done"
	}
	c.log.LogAttrs(context.Background(), slog.LevelInfo, "session ended", append(c.sess.attrs(),
		slog.String("initiator", c.sess.key.initiator), slog.String("target", c.sess.key.target),
		slog.String("reason", why), slog.Duration("duration", time.Since(c.sess.started).Round(time.Millisecond)))...)
}

// finish waits until nothing of the connection runs and frees what it had.
//
// Preconditions: end has been called.
func (c *conn) finish() {
	c.workers.Wait()
	c.stopTimer()
	if c.sess != nil {
		c.sess.finish(c.node)
	}
}

// end closes the connection; the first call gives the reason. All tasks are
// aborted. It may be called by any goroutine that holds no lock.
func (c *conn) end(reason error) {
	c.mu.Lock()
	if c.phase == phaseEnded {
		c.mu.Unlock()
		return
	}
	if c.phase != phaseLogout {
		c.reason = reason
	}
	c.phase = phaseEnded
	c.abortTasks(func(*Task) bool { return true })
	c.changed.Broadcast()
	c.mu.Unlock()

	close(c.ending)
	c.slotMu.Lock()
	c.slotFreed.Broadcast()
	c.slotMu.Unlock()
	c.budget.close()
	c.dm.Close() // an error of Close changes nothing: Receive reports the end
}

// enter keeps finish waiting while a goroutine other than the connection's own
// uses it. It fails once the connection is ending; otherwise the caller calls
// c.workers.Done.
func (c *conn) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.phase == phaseEnded {
		return false
	}
	c.workers.Add(1)
	return true
}

var errPeerClosed = fmt.Errorf("initiator closed the connection: %w", io.EOF)

// endReason says what Receive's error means. Closing the connection is how
// initiators end a discovery session.
func (c *conn) endReason(err error) error {
	switch {
	case !errors.Is(err, io.EOF):
		return fmt.Errorf("connection failed: %w", err)
	case c.sess != nil && c.sess.discovery:
		return nil
	}
	return errPeerClosed
}

// maxIdle is how many goroutines wait for their turn to receive. More are made
// when they are needed and leave when they are not.
var maxIdle = int32(max(2, runtime.GOMAXPROCS(0)))

// serve receives and works until the connection has ended. The first goroutine,
// Serve's own, stays; others leave when enough are waiting.
func (c *conn) serve(first bool) {
	for {
		if c.waiting.Add(1) > maxIdle && !first {
			c.waiting.Add(-1)
			return
		}
		c.recvMu.Lock()
		c.waiting.Add(-1)
		t := c.receive()
		if t != nil && c.waiting.Load() == 0 {
			c.workers.Add(1)
			go c.worker()
		}
		c.recvMu.Unlock()
		if t == nil {
			return
		}
		t.run()
	}
}

// receive returns the next task that has something to do, or nil when the
// connection has ended.
//
// Preconditions: recvMu is held.
func (c *conn) receive() *Task {
	for {
		c.mu.Lock()
		t := c.nextReady()
		c.mu.Unlock()
		if t != nil {
			return t
		}
		n := &c.notice
		*n = Notice{}
		if err := c.dm.Receive(n); err != nil {
			// Closed, the mover still has to notify the GetDatas that were
			// outstanding; then it fails again.
			c.end(c.endReason(err))
			if c.closing {
				return nil
			}
			c.closing = true
			continue
		}
		if t := n.Task; t != nil {
			c.mu.Lock()
			t.state = taskRunning
			c.mu.Unlock()
			t.fetched, t.fetchErr = true, n.Err
			return t
		}
		c.received.Add(1)
		if err := c.dispatch(n); err != nil {
			c.end(err)
		}
	}
}

// nextReady takes the task that is first in turn.
//
// Preconditions: mu is held.
func (c *conn) nextReady() *Task {
	t := c.ready.pop()
	if t != nil {
		t.state = taskRunning
	}
	return t
}

// A request is a row of the table of what an initiator may send in the full
// feature phase.
type request struct {
	discovery bool // also in a discovery session (RFC 7143, section 4.3)

	// direct handles a PDU that starts no task. An error ends the connection.
	direct func(c *conn, n *Notice) error

	// take copies into t what does not stay in n. An error ends the
	// connection. It may be nil.
	take func(t *Task, n *Notice) error
	// run does what the request asks for, in CmdSN order, and responds.
	run func(t *Task)
	// maxImmediate bounds such requests with the I bit; 0: the slots do.
	maxImmediate uint8
}

// requests is all of them. A missing row is Reject "command not supported".
var requests [64]request

func init() { // a table that mentions conn's methods cannot be initialised in place
	requests = [64]request{
		pdu.NOPOut:      {take: (*Task).takeData, run: (*Task).runNOP},
		pdu.SCSICommand: {take: (*Task).takeCommand, run: (*Task).runCommand, maxImmediate: maxImmediateCommands},
		pdu.TaskMgmtReq: {run: (*Task).runTMF, maxImmediate: maxImmediateTMFs},
		pdu.TextReq:     {discovery: true, take: (*Task).takeData, run: (*Task).runText},
		pdu.LogoutReq:   {discovery: true, run: (*Task).runLogout},
		pdu.DataOut:     {direct: (*conn).dataOut},
		// RFC 7143, section 11.16, at ErrorRecoveryLevel 0; RFC 7145, section 7.3.11.
		pdu.SNACK: {direct: func(c *conn, n *Notice) error { return c.reject(n, pdu.RejectProtocolError, unasked) }},
		// RFC 7145, section 7.3.9.
		pdu.LoginReq: {direct: func(c *conn, n *Notice) error { return c.reject(n, pdu.RejectProtocolError, inAnswer) }},
	}
}

// dispatch takes the PDU in n. An error is a format error, which ends the
// connection (RFC 7143, section 7.7).
//
// Preconditions: recvMu is held.
func (c *conn) dispatch(n *Notice) error {
	if err := c.checkFormat(n); err != nil {
		return err
	}
	h := pdu.BHS(n.BHS)
	op := h.Opcode()
	r := &requests[op]

	c.mu.Lock()
	c.acknowledge(h.ExpStatSN())
	ignore := c.phase != phaseFullFeature
	c.mu.Unlock()
	switch {
	case ignore:
		return nil
	case op.FromTarget():
		return c.reject(n, pdu.RejectProtocolError, unasked)
	case n.Reject != 0 && op == pdu.DataOut:
		return c.lostDataOut(n)
	case n.Reject != 0: // a command counts as not received (section 7.3)
		return c.reject(n, n.Reject, inAnswer)
	case r.direct == nil && r.run == nil, c.sess.discovery && !r.discovery:
		return c.reject(n, pdu.RejectNotSupported, inAnswer)
	case r.direct != nil:
		return r.direct(c, n)
	case h.ITT() == pdu.ReservedTag:
		if op == pdu.NOPOut && h.Immediate() { // no answer is wanted, or it is one
			c.pong(h.TTT())
			return nil
		}
		return c.reject(n, pdu.RejectInvalidField, unasked)
	}
	if c.sess.discovery {
		c.dm.SetReceiveDeadline(time.Now().Add(c.node.opt.DiscoveryTimeout))
	}

	t := c.newTask()
	if t == nil {
		return nil // the connection is ending
	}
	copy(t.req[:], n.BHS)
	c.mu.Lock()
	verdict, reason := c.judge(h, r)
	c.mu.Unlock()
	if verdict == takeIt && r.take != nil {
		if err := r.take(t, n); err != nil {
			c.freeTask(t)
			return err
		}
	}
	if verdict == takeIt {
		// Nobody else enters tasks, but an ABORT TASK may just have made this
		// CmdSN count as received, or the connection may be ending.
		c.mu.Lock()
		if verdict, reason = c.judge(h, r); verdict == takeIt {
			c.admit(t)
		}
		c.mu.Unlock()
	}
	if verdict != takeIt {
		c.discard(t)
	}
	if verdict == rejectIt {
		return c.reject(n, reason, inAnswer)
	}
	return nil
}

// checkFormat finds PDU format errors.
func (c *conn) checkFormat(n *Notice) error {
	if len(n.BHS) != pdu.BHSLen {
		return fmt.Errorf("header of %d octets instead of %d", len(n.BHS), pdu.BHSLen)
	}
	h := pdu.BHS(n.BHS)
	switch {
	case h.TotalAHSLength() != len(n.AHS):
		return fmt.Errorf("%v: TotalAHSLength says %d octets, %d came", h.Opcode(), h.TotalAHSLength(), len(n.AHS))
	case h.DataSegmentLength() != len(n.Data) && n.Reject == 0:
		return fmt.Errorf("%v: DataSegmentLength is %d, %d octets came", h.Opcode(), h.DataSegmentLength(), len(n.Data))
	case len(n.Data) > c.recvLimit:
		return fmt.Errorf("%v: data segment of %d octets, more than the %d agreed on", h.Opcode(), len(n.Data), c.recvLimit)
	}
	return nil
}

type verdict uint8

const (
	takeIt verdict = iota
	ignoreIt
	rejectIt
)

// judge tells what to do with a request that is to become a task. Tags are
// looked at before CmdSN (RFC 7143, section 4.2.2.1).
//
// Preconditions: mu is held.
func (c *conn) judge(h pdu.BHS, r *request) (verdict, pdu.RejectReason) {
	if c.phase != phaseFullFeature {
		return ignoreIt, 0
	}
	if same := c.tasks.find(h.ITT()); same != nil {
		if !h.Immediate() && !same.immediate() && same.header().CmdSN() == h.CmdSN() {
			return ignoreIt, 0 // a retry
		}
		return rejectIt, pdu.RejectTaskInProgress
	}
	if !h.Immediate() {
		if !c.win.accepts(h.CmdSN()) {
			return ignoreIt, 0
		}
		return takeIt, 0
	}
	if r.maxImmediate > 0 && c.immediate[h.Opcode()] >= r.maxImmediate {
		return rejectIt, pdu.RejectTooManyImmediate
	}
	return takeIt, 0
}

// admit enters t in the table of tasks and, as far as CmdSNs have come without
// a gap, makes tasks ready.
//
// Preconditions: mu is held; judge has said takeIt.
func (c *conn) admit(t *Task) {
	t.state = taskWaiting
	c.tasks.insert(t)
	h := t.header()
	if t.immediate() {
		c.immediate[h.Opcode()]++
		c.makeReady(t)
		return
	}
	t.needsSN = true
	c.win.receive(h.CmdSN(), t)
	c.advance()
}

// advance takes from the window what has come without a gap.
//
// Preconditions: mu is held.
func (c *conn) advance() {
	for {
		t, ok := c.win.next()
		if !ok {
			break
		}
		if t != nil {
			t.needsSN = false
			c.makeReady(t)
		}
	}
	c.changed.Broadcast()
}

// makeReady puts t in turn unless it waits for its CmdSN or for unsolicited
// data.
//
// Preconditions: mu is held.
func (c *conn) makeReady(t *Task) {
	if t.needsSN || t.needsData {
		return
	}
	c.seq++
	t.seq = c.seq
	if t.isOrdered() {
		c.ordered++
	}
	t.fenced = c.ordered > 0
	t.state = taskReady
	c.ready.push(t)
}

// runReady runs what has become ready while somebody else may be waiting in
// Receive.
func (c *conn) runReady() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for t := c.nextReady(); t != nil; t = c.nextReady() {
		c.workers.Add(1) // the caller is a worker, so finish is still waiting
		go func() {
			defer c.workers.Done()
			t.run()
		}()
	}
}

// leave takes t out of the table, in one breath with queueing its last PDU or
// with dropping it. From then on the initiator may use the tag again.
//
// Preconditions: mu is held.
func (c *conn) leave(t *Task) {
	if t.own {
		return
	}
	c.tasks.remove(t)
	if t.immediate() {
		c.immediate[t.header().Opcode()]--
	} else if t.needsSN { // ahead of a gap: it counts as received, and ends there
		c.win.slot(t.header().CmdSN()).task = nil
	} else {
		c.win.ended()
	}
	if t.seq != 0 && t.isOrdered() {
		c.ordered--
	}
	t.state = taskFree
	c.changed.Broadcast()
}

// respond queues the PDU in t.Header, with t.Segment, as the last word about t,
// and sends. Nothing is sent if t has been aborted. The slot of t is free when
// the PDU has left.
//
// Preconditions: the caller runs t and has given back its Buffer.
func (c *conn) respond(t *Task) {
	c.mu.Lock()
	if t.aborted.Load() {
		c.drop(t)
		c.mu.Unlock()
		return
	}
	c.leave(t)
	err := c.sendStatus(t)
	c.mu.Unlock()
	if err != nil {
		c.freeTask(t)
		c.end(fmt.Errorf("sending failed: %w", err))
		return
	}
	c.dm.Flush()
}

// drop ends t without a response.
//
// Preconditions: mu is held; no data of t is on its way.
func (c *conn) drop(t *Task) {
	c.leave(t)
	c.discard(t)
}

// discard frees the slot of t and what it has.
func (c *conn) discard(t *Task) {
	if t.bound {
		c.dm.Unbind(t)
	}
	if t.buf != nil {
		t.buf.Release()
	}
	c.freeTask(t)
}

// sendStatus numbers the PDU in t.Header and queues it.
//
// Preconditions: mu is held.
func (c *conn) sendStatus(t *Task) error {
	c.stamp(t)
	c.statSN++
	return c.dm.SendControl(t)
}

// stamp fills in the serial numbers and the data segment length.
//
// Preconditions: mu is held.
func (c *conn) stamp(t *Task) {
	h := pdu.BHS(t.Header[:])
	h.SetStatSN(c.statSN)
	c.stampWindow(t)
	h.SetDataSegmentLength(len(t.Segment))
}

// stampWindow fills in the serial numbers of commands.
//
// Preconditions: mu is held.
func (c *conn) stampWindow(t *Task) {
	h := pdu.BHS(t.Header[:])
	h.SetExpCmdSN(c.win.exp)
	h.SetMaxCmdSN(c.win.max)
}

// openWindow makes cmdSN the first one expected.
func (c *conn) openWindow(cmdSN uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.win.open(cmdSN, c.node.opt.QueueDepth)
}

func (c *conn) expCmdSN() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.win.exp
}

// newTask returns an empty slot. If all are in use it waits until the network
// has taken a response; nil means that the connection is ending.
func (c *conn) newTask() *Task {
	c.slotMu.Lock()
	for c.freeSlots == nil && c.slots == c.maxSlots {
		select {
		case <-c.ending:
			c.slotMu.Unlock()
			return nil
		default:
		}
		c.slotFreed.Wait()
	}
	return c.takeSlot()
}

// tryTask is newTask without waiting.
func (c *conn) tryTask() *Task {
	c.slotMu.Lock()
	if c.freeSlots == nil && c.slots == c.maxSlots {
		c.slotMu.Unlock()
		return nil
	}
	return c.takeSlot()
}

// takeSlot unlocks slotMu.
func (c *conn) takeSlot() *Task {
	t := c.freeSlots
	if t != nil {
		c.freeSlots = t.next
	} else {
		c.slots++
	}
	c.slotMu.Unlock()
	if t == nil {
		t = &Task{conn: c, Mover: c.dm.NewTask(), wake: make(chan struct{}, 1)}
	}
	t.next = nil
	c.node.stats.tasks.Add(1)
	return t
}

// freeTask makes the slot of t free. It takes leaf locks only.
func (c *conn) freeTask(t *Task) {
	t.reset()
	c.node.stats.tasks.Add(-1)
	c.slotMu.Lock()
	t.next = c.freeSlots
	c.freeSlots = t
	c.slotMu.Unlock()
	c.slotFreed.Signal()
}
