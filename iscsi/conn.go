package iscsi

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
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

	// sendAhead is how much data, in octets, waits to be sent at a time, or one
	// piece if that is more. What is queued behind it, the answer to a ping above
	// all, waits for no more than that, however much has been read: open-iscsi
	// gives a connection up after 5 s.
	sendAhead = 4 << 20

	// maxUnexpected PDUs are not acknowledged at a time: ib_iser has receive
	// buffers for two NOP-In and two Asynchronous Messages.
	maxUnexpected = 2

	// maxDeferred answers at a time may wait for the next one: then the first has
	// waited long enough. With more than maxDeferredData octets of data-in an answer does not
	// wait: beside its data a system call is little.
	maxDeferred     = 16
	maxDeferredData = 16 << 10
)

// A phase of a connection, in order.
type phase uint8

const (
	phaseLogin       phase = iota // Serve's goroutine is alone
	phaseFullFeature              // LOGGED_IN (RFC 7143, section 8.1)
	phaseLogout                   // a Logout Request is being served: no task begins any more
	phaseEnded                    // the mover is closed or closing
)

// A conn is one connection from login to its end. What it has in common with
// the other connections of its session is in shared.
//
// In the full feature phase any number of goroutines run serve. They take turns
// in receiving: the holder of recvMu reads a PDU, or the end of a GetData, makes
// sure that another goroutine can receive, lets go, and does the work itself.
//
// Lock order: Node.mu, recvMu, mu, the mover's locks, then the leaves slotMu and
// quota.mu. No lock is held over a call that may reach a backend, nor while waiting, except that
// the holder of recvMu waits for the peer in Receive, and in newTask for task
// slots that the network is about to free.
type conn struct {
	node         *Node
	opt          *Options // of the node, when the connection began
	portal       *Portal
	dm           Datamover
	serveOptions ServeOptions
	piece        int // octets of data moved at once

	// Set by login, read-only from then on.
	params    Params
	sess      *session // nil until login has found it, and when login fails then
	cid       uint16
	recvLimit int // longest data segment of the initiator, octets

	recvMu   turn
	notice   Notice        // of the last Receive
	noticed  time.Duration // when that was, by clock
	closing  bool          // Receive has failed once
	received atomic.Uint64 // PDUs and ends of GetDatas; written under recvMu
	pending  atomic.Bool   // behind the last notice a whole message has come; written under recvMu
	deferred int           // answers in a row that flush has left to others

	waiting atomic.Int32 // goroutines that want recvMu
	workers sync.WaitGroup
	worker  func()    // what a new goroutine runs; made once
	started time.Time // when the target accepted the connection

	mu sharedLock // that of shared
	*shared
	phase      phase
	suspends   atomic.Bool // tasks wait to be reassigned to another connection; see suspend
	reason     error       // why the connection ended; nil after a logout
	failed     bool        // nobody has wanted it to end
	statSN     uint32
	ready      taskQueue // may run, in CmdSN order
	immediate  [64]uint8 // immediate requests in execution, by opcode
	unexpected []unexpected
	held       *Task  // an unexpected PDU that waits for the initiator to take others
	ping       uint32 // TTT of the last NOP-In that asked for an answer
	telling    bool   // a goroutine is in tellWindow
	store      statusStore

	acked        uint32 // highest ExpStatSN of the initiator; only with a fence
	terminations []termination

	textBusy bool // a Text Request is being answered

	text textExchange // owned by that Text Request

	slotMu    sync.Mutex // a leaf
	slotFreed sync.Cond  // on slotMu
	freeSlots *Task      // linked by nextFree
	slots     int        // made so far
	maxSlots  int

	budget  budget
	sending quota // data of PutData that has not left

	ending chan struct{} // closed when the connection begins to end
	done   chan struct{} // closed when nothing of it is left

	timerMu  sync.Mutex
	timer    *time.Timer // keepalive, then the wait after logout
	lastWait bool        // it is the latter
}

// unexpected is a PDU of ours that the initiator has not asked for and not
// acknowledged yet (RFC 7145, section 8.1.2).
type unexpected struct {
	statSN uint32 // acknowledged when ExpStatSN is beyond
	ttt    uint32 // of a NOP-In, acknowledged by the answer, too; else ReservedTag
}

// maxSlots is how many task slots a connection has whose session may have that many
// commands in flight.
func maxSlots(depth int) int { return depth + immediateSlots + ownSlots }

func newConn(p *Portal, dm Datamover) *conn {
	nd, opt := p.node, p.node.opt.Load()
	c := &conn{
		node: nd, opt: opt, portal: p, dm: dm, piece: opt.MaxTransferPiece,
		recvLimit: loginDataLength,
		maxSlots:  maxSlots(opt.QueueDepth),
		ending:    make(chan struct{}),
		done:      make(chan struct{}),
	}
	c.join(newShared(c.maxSlots))
	c.slotFreed.L = &c.slotMu
	c.recvMu.init()
	c.budget = budget{pool: &nd.buffers, quota: quota{free: opt.ConnectionMemory}}
	c.sending.free = c.sendAhead()
	c.worker = func() {
		defer c.workers.Done()
		c.serve(false)
	}
	return c
}

// ServeOptions say more about one connection. The zero value of a field means its default.
type ServeOptions struct {
	// Accepted is when the target accepted the connection. LoginTimeout counts from there. The
	// default is when Serve is called.
	Accepted time.Time

	// Joined, unless it is nil, is called when the connection becomes one of a session, before its
	// initiator gets the final Login Response.
	Joined func(tsih uint16, discovery bool)
}

// Serve runs one connection from login to its end and closes dm. It returns nil after a logout or
// the end of a discovery session. Otherwise the error says why the connection ended or the login
// was refused.
func (p *Portal) Serve(dm Datamover, o ServeOptions) error {
	setDefault(&o.Accepted, time.Now())
	c := newConn(p, dm)
	c.serveOptions, c.started = o, o.Accepted
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
	c.reportEnd(c.finish())
	return c.reason
}

// finish waits until nothing of the connection runs and frees what it had. It
// tells whether the session has ended with it.
//
// Preconditions: end or stop has been called.
func (c *conn) finish() (last bool) {
	c.workers.Wait()
	c.stopTimer()
	return c.sess != nil && c.sess.leave(c)
}

// end closes a connection that has failed, or that its initiator has closed.
// Without a logout before, that is the end of its session, too, unless connections
// can be recovered.
func (c *conn) end(reason error) {
	switch failed := c.shut(reason, true); {
	case !failed || c.sess.discovery:
	case c.suspends.Load():
		c.sess.lose(c)
	default:
		c.sess.fail(c)
	}
}

// stop closes the connection for good: its tasks end.
func (c *conn) stop(reason error) { c.shut(reason, false) }

// shut closes the connection; the first call gives the reason. Its tasks are
// aborted, or suspended if keep says so and ErrorRecoveryLevel allows it. failed
// tells that this has ended the full feature phase without a logout. It may be
// called by any goroutine that holds no lock.
func (c *conn) shut(reason error, keep bool) (failed bool) {
	c.mu.Lock()
	if c.phase == phaseEnded {
		c.mu.Unlock()
		return false
	}
	failed = c.phase == phaseFullFeature
	c.failed = failed && keep && reason != errLoggedOut
	if c.phase != phaseLogout {
		c.reason = reason
	}
	was, fence := c.phase, c.fence
	c.phase = phaseEnded
	dm, held := c.dm, c.held
	c.held = nil
	if keep && failed && c.recovers() && !c.sess.over || c.suspends.Load() {
		c.suspend(nil)
	} else {
		c.terminate(c.owns)
	}
	c.changed.Broadcast()
	c.mu.Unlock()

	if held != nil {
		c.freeTask(held)
	}
	close(c.ending)
	c.slotMu.Lock()
	c.slotFreed.Broadcast()
	c.slotMu.Unlock()
	c.budget.close()
	c.sending.close()
	dm.Close() // an error of Close changes nothing: Receive reports the end
	if c.suspends.Load() {
		c.sess.orphan(c)
	} else {
		c.forgetAll()
	}
	if fence != nil && was >= phaseFullFeature {
		c.sess.pass() // this connection acknowledges nothing any more
	}
	return failed
}

// owns tells whether t is one of the connection's tasks.
func (c *conn) owns(t *Task) bool { return t.conn == c }

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
	if first {
		c.waiting.Add(1)
	}
	for {
		c.recvMu.Lock()
		c.waiting.Add(-1)
		t := c.receive()
		if t != nil && c.waiting.Load() == 0 {
			c.workers.Add(1)
			c.waiting.Add(1) // from now on: it may take its time to start
			go c.worker()
		}
		c.recvMu.Unlock()
		if t == nil {
			return
		}
		t.run()
		if c.waiting.Add(1) > maxIdle && !first {
			c.waiting.Add(-1)
			return
		}
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
			t.late = t.late || t.lapBegan != c.noticed
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
		c.noticed = clock()
		if d, ok := c.dm.(Deferrer); ok {
			if p := d.Pending(); p != c.pending.Load() {
				c.pending.Store(p)
			}
		}
		if t := n.Task; t != nil {
			t.lapAt(lun.PhaseReadWait, c.noticed)
			c.mu.Lock()
			t.state = taskRunning
			c.mu.Unlock()
			t.fetched, t.fetchErr = true, n.Err
			c.received.Add(1)
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
	t := c.ready.Pop()
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
		pdu.TaskMgmtReq: {take: (*Task).takeTMF, run: (*Task).runTMF, maxImmediate: maxImmediateTMFs},
		pdu.TextReq:     {discovery: true, take: (*Task).takeText, run: (*Task).runText},
		pdu.LogoutReq:   {discovery: true, run: (*Task).runLogout},
		pdu.DataOut:     {direct: (*conn).dataOut},
		pdu.SNACK:       {direct: (*conn).snack},
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
			c.answered(h)
			return nil
		}
		return c.reject(n, pdu.RejectInvalidField, unasked)
	}
	if c.sess.discovery {
		c.dm.SetReceiveDeadline(time.Now().Add(c.opt.DiscoveryTimeout))
	}

	t := c.newTask()
	if t == nil {
		return nil // the connection is ending
	}
	t.lapBegan = c.noticed
	if !n.Begun.IsZero() {
		t.lapBegan = n.Begun.Sub(epoch)
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
		// Meanwhile another connection may have entered a task with this tag, an
		// ABORT TASK may have made this CmdSN count as received, or the connection
		// may be ending.
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
// a gap, makes tasks ready, those of other connections included.
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
// data. Nobody may be about to look for ready tasks of another connection: such a
// task begins at once.
//
// Preconditions: mu is held.
func (c *conn) makeReady(t *Task) {
	if t.needsSN || t.needsData {
		return
	}
	c.arrange(t)
	if t.conn != c {
		t.conn.begin(t)
		return
	}
	t.state = taskReady
	c.ready.Push(t, &t.link)
}

// arrange gives t its place among the tasks of the session.
//
// Preconditions: mu is held.
func (c *conn) arrange(t *Task) {
	c.seq++
	t.seq = c.seq
	if t.isOrdered() {
		c.ordered++
	}
	t.fenced = c.ordered > 0
	if t.isCommand() && c.order.enter(t) {
		t.fenced = true
	}
}

// begin runs t on a goroutine of its own.
//
// Preconditions: mu is held; either the connection has not ended, or the caller
// is one of its workers.
func (c *conn) begin(t *Task) {
	t.state, t.late = taskRunning, true
	c.workers.Add(1)
	go func() {
		defer c.workers.Done()
		t.run()
	}()
}

// runReady runs what has become ready while somebody else may be waiting in
// Receive.
func (c *conn) runReady() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for t := c.ready.Pop(); t != nil; t = c.ready.Pop() {
		c.begin(t)
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
	if t.answered { // before, on another connection
		t.state = taskFree
		c.changed.Broadcast()
		return
	}
	if t.immediate() {
		c.immediate[t.header().Opcode()]--
	} else if t.needsSN {
		// Ahead of a gap: it counts as received, and ends there. With its
		// connection it is forgotten, and may come again (section 11.14).
		*c.win.slot(t.header().CmdSN()) = windowSlot{received: c.phase == phaseFullFeature}
	} else if !c.store.defers() {
		c.win.ended()
	}
	if t.seq != 0 && t.isOrdered() {
		c.ordered--
	}
	if t.seq != 0 && t.isCommand() {
		c.order.leave(t)
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
		c.tellWindow()
		return
	}
	if c.suspends.Load() && t.recoverable() {
		t.finished = true
		t.parkLocked()
		c.mu.Unlock()
		return
	}
	if c.fence != nil && c.hold(t) {
		c.mu.Unlock()
		c.sess.pass()
		return
	}
	small := t.isCommand() && (t.header().Write() || t.off <= maxDeferredData)
	c.leave(t)
	err := c.sendStatus(t)
	stays := err != nil && t.kept // once it is queued, t is not ours
	c.mu.Unlock()
	if err != nil {
		if !stays {
			c.freeTask(t)
		}
		c.end(fmt.Errorf("sending failed: %w", err))
		return
	}
	if small {
		c.flush()
	} else {
		c.dm.Flush()
	}
}

// flush sends what the caller has queued for a command. If the next PDU has come already
// and nobody receives, which the caller is about to do, it leaves that to who
// answers the next one: one system call is enough for both. Should that one wait for its
// backend, somebody else receives meanwhile, and before that waits for the initiator the
// mover sends what is queued.
func (c *conn) flush() {
	if c.pending.Load() {
		late, d := false, c.dm.(Deferrer)
		c.recvMu.ifFree(func() {
			if late = c.deferred < maxDeferred && d.Pending(); late {
				c.deferred++
				d.Defer()
			} else {
				c.deferred = 0
			}
		})
		if late {
			return
		}
	}
	c.dm.Flush()
}

// drop ends t without a response.
//
// Preconditions: mu is held; no data of t is on its way.
func (c *conn) drop(t *Task) {
	if t.cleared { // section 11.14.5
		c.sess.nexus.ClearedByTransport(t.header().LUN())
	}
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
	if t.snackTag != 0 && pdu.BHS(t.Header[:]).Opcode() == pdu.SCSIResponse {
		pdu.BHS(t.Header[:]).SetSNACKTag(t.snackTag)
	}
	c.keep(t)
	c.statSN++
	err := c.dm.SendControl(t)
	switch {
	case err != nil && t.kept && t.isCommand() && c.recovers(): // sent, but lost
		c.slotMu.Lock()
		t.sending = false
		c.slotMu.Unlock()
	case err != nil:
		c.unkeep(t)
	}
	return err
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
	c.win.told = c.win.max
}

// openWindow makes cmdSN the first one expected.
func (c *conn) openWindow(cmdSN uint32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.win.open(cmdSN, c.opt.QueueDepth)
}

// newTask returns an empty slot. If all are in use it waits until the network
// has taken a response; nil means that the connection is ending.
func (c *conn) newTask() *Task {
	late := false
	c.slotMu.Lock()
	for c.freeSlots == nil && c.slots == c.maxSlots {
		select {
		case <-c.ending:
			c.slotMu.Unlock()
			return nil
		default:
		}
		if !late {
			late = true
			c.slotMu.Unlock()
			c.dm.Flush() // what flush has deferred
			c.slotMu.Lock()
			continue
		}
		if c.store.on {
			c.slotMu.Unlock()
			freed := c.giveUpStatus()
			c.slotMu.Lock()
			if freed {
				continue
			}
		}
		c.slotFreed.Wait()
	}
	t := c.takeSlot()
	t.late = late
	return t
}

// tryTask is newTask without waiting, for goroutines that are not the connection's
// own: before the full feature phase there are no slots for them.
func (c *conn) tryTask() *Task {
	c.mu.Lock()
	ok := c.phase == phaseFullFeature
	c.mu.Unlock()
	if !ok {
		return nil
	}
	return c.trySlot()
}

// trySlot is tryTask for a connection in the full feature phase.
func (c *conn) trySlot() *Task {
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
		c.freeSlots = t.nextFree
	} else {
		c.slots++
	}
	c.slotMu.Unlock()
	if t == nil {
		t = &Task{conn: c, Mover: c.dm.NewTask(), wake: make(chan struct{}, 1)}
		t.cmd.Abort = &t.aborted
	}
	t.nextFree = nil
	c.node.stats.tasks.Add(1)
	return t
}

// freeTask makes the slot of t free. It takes leaf locks only.
func (c *conn) freeTask(t *Task) {
	t.countSpent()
	t.reset()
	c.node.stats.tasks.Add(-1)
	c.slotMu.Lock()
	t.nextFree = c.freeSlots
	c.freeSlots = t
	c.slotMu.Unlock()
	c.slotFreed.Signal()
}
