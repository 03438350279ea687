package iscsi

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/security/limits"
)

const (
	// loginDataLength is the longest data segment of a Login PDU, and of any PDU in a discovery
	// session over RDMA (RFC 7143, section 6.3).
	loginDataLength = 8192

	// sendAhead is how many bytes of data wait to be sent at a time, or one piece if that is more.
	// PDUs queued after them, above all the answer to a ping, wait for no more data than that,
	// however much the initiator reads: open-iscsi gives a connection up after 5 s.
	sendAhead = 4 << 20

	// discoveryPause is how long a request of a discovery session over RDMA waits for its answer. iscsiadm (open-iscsi 2.1.8) sends
	// such a request with a call of its kernel, by netlink. An answer that comes before the kernel has confirmed the call is read with
	// the confirmation. Then iscsiadm polls for that answer for 10 s, fails, and may crash when it tries again.
	discoveryPause = 50 * time.Millisecond
)

// A phase is where a connection is in its life. The picture is in doc.go.
type phase uint8

const (
	phaseLogin       phase = iota // one goroutine at most, that of Serve or Start
	phaseFullFeature              // LOGGED_IN (RFC 7143, section 8.1)
	phaseLogout                   // a Logout Request is being served: no new task begins
	phaseEnded                    // the mover is closed or closing
)

// phaseMoves has the phases that may follow each phase, one bit each.
var phaseMoves = [...]uint8{
	phaseLogin:       1<<phaseFullFeature | 1<<phaseEnded,
	phaseFullFeature: 1<<phaseLogout | 1<<phaseEnded,
	phaseLogout:      1 << phaseEnded,
	phaseEnded:       0,
}

// A conn is one connection from login to its end. The state that it shares with the other
// connections of its session is in shared.
//
// Lock order: Node.mu, baton, mu, the mover's locks, then the leaves: slots.mu, timer.mu, the
// mutexes of quotas, orderedGate.mu and loginCounts.mu. No goroutine holds a lock over a call that
// may reach a backend, nor while it waits, with one exception: the holder of the baton waits for
// the peer in Receive, and in newTask for task slots that the network is about to free.
type conn struct {
	node         *Node
	opt          *Options // of the node, when the connection began
	portal       *Portal
	serveOptions ServeOptions
	dm           Datamover
	piece        int // bytes of data moved at once

	// Login sets these. They do not change afterwards.
	params    Params
	sess      *session // nil until login has found it, and when login fails then
	cid       uint16
	probed    probe // by an initiator that has as many sessions as it may have
	recvLimit int   // longest data segment of the initiator, bytes

	// The holder of the baton receives; see serve. It owns the next five fields.
	baton    baton
	notice   Notice        // of the last Receive
	noticed  time.Duration // when that was, by clock
	admitted *Task         // the task that receive returns next, or nil
	closing  bool          // Receive has failed once
	received atomic.Uint64 // PDUs and ends of GetDatas; written by the holder of the baton
	heard    atomic.Int64  // noticed, for others
	putOff   putOffFlush
	lent     LentMover    // the mover; nil: it is none
	piped    PipeMover    // the mover; nil: it is none
	pressed  atomic.Int64 // when Press asked the initiator last, by clock
	lagged   atomic.Int64 // until when data is copied, by clock; 0: it is not
	brevity  brevity

	waiting atomic.Int32   // goroutines that want the baton
	workers sync.WaitGroup // what finish waits for: the goroutines of the connection, and whichever shuts it
	worker  func()         // what a new goroutine runs; made once

	mu         sharedLock // the lock of shared, which guards what follows
	shared     *shared
	phase      phase
	reason     error // why the connection ended; nil after a logout
	failed     bool  // neither side ended it on purpose
	statSN     uint32
	ready      taskQueue // tasks that may run, in CmdSN order
	immediate  [64]uint8 // immediate requests in execution, by opcode
	unexpected unexpectedPDUs
	textBusy   bool // a Text Request is being answered
	toRest     bool // the holder of the baton waits as soon as nothing is received in part
	resting    bool // it does
	data       dataWatch

	text textExchange // owned by that Text Request

	slots   slotPool
	budget  budget // Buffers
	sending quota  // data of PutData that has not left
	timer   connTimer

	recovery connRecovery // zero at ErrorRecoveryLevel 0 without fences

	ending chan struct{} // closed when the connection begins to end
	done   chan struct{} // closed when nothing of it is left
}

func newConn(p *Portal, dm Datamover, o ServeOptions) *conn {
	nd, opt := p.node, p.node.opt.Load()
	c := &conn{
		node: nd, opt: opt, portal: p, serveOptions: o, piece: opt.MaxTransferPiece,
		recvLimit: loginDataLength,
		ending:    make(chan struct{}),
		done:      make(chan struct{}),
	}
	c.use(dm)
	c.slots.max, c.slots.freed.L = slotsFor(opt.QueueDepth), &c.slots.mu
	c.join(newShared(c.slots.max))
	c.baton.init()
	c.brevity.average.Store(int64(longestCounted)) // the first commands show how fast the store is
	c.budget.pool, c.budget.bound, c.budget.quota.free = &nd.buffers, opt.ConnectionMemory, opt.ConnectionMemory
	nd.memory.join(&c.budget, limits.AddressKey(dm.RemoteAddr()), c.trimSlots)
	c.sending.free = c.sendAhead()
	c.worker = func() { // without defer: see leftUnit
		c.serve()
		c.workers.Done()
	}
	return c
}

// use makes dm the mover of the connection.
func (c *conn) use(dm Datamover) {
	c.dm = dm
	c.putOff.deferrer, _ = dm.(Deferrer)
	c.lent, _ = dm.(LentMover)
	c.piped, _ = dm.(PipeMover)
	if b, ok := dm.(Borrower); ok {
		b.SetLender(c.budget.other)
	}
}

// reassigner returns the mover as a Reassigner, or nil if it is none.
func (c *conn) reassigner() Reassigner {
	r, _ := c.dm.(Reassigner)
	return r
}

// reserveMemory reserves the share of the connection of that initiator in the full feature phase. It
// returns false if there is no memory for that.
func (c *conn) reserveMemory(initiator string) bool {
	fixed, piece := loginBytes, c.leastPiece()
	if s, ok := c.dm.(Sizer); ok {
		fixed += s.Size(&c.params)
	}
	if c.params.Discovery {
		piece = 0
	}
	return c.node.memory.promote(&c.budget, initiator, fixed, piece)
}

// leastPiece returns how many bytes of a command's data are moved at once when memory is short: the
// share of a connection has room for that.
func (c *conn) leastPiece() int {
	return max(lun.MaxParameterList, int(c.params.FirstBurstLength))
}

// sendAhead returns how many bytes of data may wait to be sent at a time.
func (c *conn) sendAhead() int { return max(sendAhead, c.piece) }

// ServeOptions say more about one connection. The zero value of a field means its default.
type ServeOptions struct {
	// Accepted is when the target accepted the connection. LoginTimeout counts from there. The
	// default is when Serve is called.
	Accepted time.Time

	// Joined, unless it is nil, is called when the connection becomes one of a session, before its
	// initiator gets the final Login Response.
	Joined func(tsih uint16, discovery bool)

	// Advanced, unless it is nil, is called when the login of the connection has come further.
	Advanced func(limits.Progress)

	// Encrypted, unless it is nil, reports whether the connection is encrypted. The login of an initiator that
	// proves its name by a secret that requires encryption continues only then (security.Secret.Short).
	Encrypted func() bool

	// Authorize, unless it is nil, is called when the names are known, and proved if the target requires that. An error
	// refuses the login as an authorization failure (status 0202).
	Authorize func(Claim) error
}

// A Claim is who logs in to what on a connection.
type Claim struct {
	Initiator string // normalised
	Target    string // the same; empty in an unnamed discovery session
	Discovery bool
}

// Serve runs one connection from login to its end and closes dm. It returns nil after a logout or
// the end of a discovery session. Otherwise the error says why the connection ended or the login
// was refused.
func (p *Portal) Serve(dm Datamover, o ServeOptions) error {
	setDefault(&o.Accepted, time.Now())
	c := newConn(p, dm, o)
	c.enroll()
	return c.complete(c.login())
}

// complete runs a connection whose login has ended with err. It returns what Serve returns.
func (c *conn) complete(err error) error {
	defer c.dropOut()
	if err != nil {
		c.end(err)
		c.finish()
		return err
	}
	return c.work()
}

// An Await calls ready once, later or at once and from any goroutine: with nil when missing bytes have come from the initiator of
// a connection or the connection has been closed, with os.ErrDeadlineExceeded, or with another error if it cannot wait.
type Await func(deadline time.Time, missing int, ready func(error))

// Start serves a connection like Serve, but needs no goroutine while the login waits for the initiator: it may return
// before. Then another goroutine, on which await calls ready, continues. done gets what Serve returns, at the end.
func (p *Portal) Start(dm Datamover, o ServeOptions, await Await, done func(error)) {
	setDefault(&o.Accepted, time.Now())
	c := newConn(p, dm, o)
	c.enroll()
	s := &startedLogin{l: c.newLogin(), await: await, done: done}
	s.dm, _ = dm.(Impatient)
	s.setImpatient(true)
	s.run()
}

// A startedLogin is a login that has a goroutine only while it has something to do.
type startedLogin struct {
	l     *login
	dm    Impatient // nil: the Datamover waits in Receive
	await Await
	done  func(error)
}

// setImpatient lets the login wait by await, or in Receive.
func (s *startedLogin) setImpatient(on bool) {
	s.l.impatient = s.dm != nil && s.dm.SetImpatient(on) && on
}

// run continues the login until it waits, or the connection until its end.
func (s *startedLogin) run() {
	err := s.l.run()
	if err == errAwaited {
		s.await(s.l.deadline, s.dm.Missing(), s.ready)
		return
	}
	s.setImpatient(false)
	s.done(s.l.conn.complete(s.l.finish(err)))
}

// ready continues a login that has waited. After an error Receive waits, which finds the cause.
func (s *startedLogin) ready(err error) {
	if err != nil {
		s.setImpatient(false)
	}
	s.run()
}

// enroll makes the node know c.
func (c *conn) enroll() {
	c.node.mu.Lock()
	defer c.node.mu.Unlock()
	c.node.conns[c] = struct{}{}
}

// dropOut undoes enroll: nothing of c is left.
func (c *conn) dropOut() {
	c.node.mu.Lock()
	delete(c.node.conns, c)
	c.leaveSlots()
	c.node.mu.Unlock()
	close(c.done)
}

// work runs c in the full feature phase until its end. It returns why c has ended, like Serve.
func (c *conn) work() error {
	c.keepalive()
	c.waiting.Add(1)
	c.mu.Lock()
	c.workers.Add(1) // with c.mu, because shut may have added the first one
	c.mu.Unlock()
	go c.worker()
	c.reportEnd(c.finish())
	return c.reason
}

// enterPhase changes the phase of the connection.
//
// Preconditions: c.mu is held.
func (c *conn) enterPhase(p phase) {
	if invariant.Enabled {
		invariant.Held(&c.mu)
		invariant.Check(phaseMoves[c.phase]&(1<<p) != 0, "connection moves from phase %d to %d", c.phase, p)
	}
	c.phase = p
}

// finish waits until nothing of the connection runs and frees what it had. It reports whether the
// session has ended with it.
//
// Preconditions: end or stop has been called.
func (c *conn) finish() (last bool) {
	c.workers.Wait()
	c.timer.stop()
	if invariant.Enabled {
		out := c.opt.ConnectionMemory - c.budget.left()
		invariant.Check(out == 0, "connection has ended with %d bytes of Buffers in use", out)
	}
	c.node.memory.leave(&c.budget)
	c.slots.trimmed.Store(true)
	c.trimSlots()
	return c.sess != nil && c.sess.leave(c)
}

// end closes a connection that has failed, or that its initiator has closed. Without a logout
// before, the session ends too, unless connections can be recovered.
func (c *conn) end(reason error) {
	switch failed := c.shut(reason, true); {
	case !failed || c.sess.discovery:
	case c.recovery.suspends.Load():
		c.sess.connLost(c)
	default:
		c.sess.connFailed(c)
	}
}

// stop closes the connection and aborts its tasks.
func (c *conn) stop(reason error) { c.shut(reason, false) }

// shut closes the connection. The first call gives the reason. Its tasks are aborted, or suspended
// if keep is true and ErrorRecoveryLevel allows it. failed reports whether the full feature phase
// ended without a logout. Any goroutine that holds no lock may call shut.
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
	was, fence := c.phase, c.shared.fence
	c.enterPhase(phaseEnded)
	c.workers.Add(1) // the caller may be none of them, such as a login that reinstates the session
	defer c.workers.Done()
	dm, heldBack := c.dm, c.unexpected.heldBack
	c.unexpected.heldBack = nil
	if keep && failed && c.recovers() && !c.sess.closed || c.recovery.suspends.Load() {
		c.suspend(nil)
	} else {
		c.shared.terminate(c.owns)
	}
	c.shared.changed.Broadcast()
	c.mu.Unlock()

	if heldBack != nil {
		c.freeTask(heldBack)
	}
	close(c.ending)
	c.slots.mu.Lock()
	c.slots.moves++
	c.slots.freed.Broadcast() // newTask may wait
	c.slots.mu.Unlock()
	c.budget.close()
	c.sending.close()
	dm.Close() // an error of Close changes nothing: Receive reports the end
	if c.recovery.suspends.Load() {
		c.sess.keepAnswers(c)
	} else {
		c.forgetAll()
	}
	if fence != nil && was >= phaseFullFeature {
		c.sess.releaseHeld() // this connection acknowledges nothing more
	}
	return failed
}

// owns reports whether t is one of the connection's tasks.
func (c *conn) owns(t *Task) bool { return t.conn == c }

// start runs f, which may wait for the network, on a goroutine of its own, unless the connection is
// ending. finish waits for it.
func (c *conn) start(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.phase != phaseEnded && !c.shared.pausing {
		c.workers.Go(f)
	}
}

var errPeerClosed = fmt.Errorf("initiator closed the connection: %w", io.EOF)

// endReason turns an error of the Datamover into the reason for the end of the connection. Initiators end
// a discovery session by closing the connection.
func (c *conn) endReason(err error) error {
	switch {
	case !errors.Is(err, io.EOF):
		return fmt.Errorf("connection failed: %w", err)
	case c.sess != nil && c.sess.discovery:
		return nil
	}
	return errPeerClosed
}

// endedBy returns why the connection is ending, or err if it is not or nobody said why.
func (c *conn) endedBy(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.reason != nil {
		return c.reason
	}
	return err
}

// pause delays the answer to a request of a discovery session; see discoveryPause.
func (c *conn) pause(discovery bool) {
	if discovery && c.dm.RDMA() {
		time.Sleep(discoveryPause)
	}
}

// linger waits until the initiator has closed the connection, or LogoutWait.
func (c *conn) linger() {
	c.halfClose()
	c.dm.SetReceiveDeadline(time.Now().Add(c.opt.LogoutWait))
	for c.dm.Receive(&c.notice) == nil {
	}
}

// halfClose ends the target's direction of a TCP connection after its last PDU. With RDMA the
// initiator has to close first: a FIN that comes with a Send can overtake it inside siw.
func (c *conn) halfClose() {
	if !c.dm.RDMA() {
		c.dm.CloseWrite() // if that fails Receive, or the timer, ends the connection
	}
}

// dismiss drops the connection for that reason. First it sends the initiator the message that the
// target drops this connection (event 2) or its session (event 3) and keeps nothing, and after how many
// seconds it may come back. The connection ends after wait at the latest, whether or not the initiator reads.
// dismiss does not wait.
func (c *conn) dismiss(event byte, time2Wait uint16, wait time.Duration, reason error) {
	cid := c.cid
	if event != pdu.AsyncConnectionDropped {
		cid = 0
	}
	c.mu.Lock()
	t := c.async(event, cid, time2Wait, 0)
	if t == nil {
		c.mu.Unlock()
		c.stop(reason)
		return
	}
	timer := time.AfterFunc(wait, func() { c.stop(reason) })
	c.workers.Go(func() {
		defer timer.Stop()
		if !c.sendFromTarget(t) {
			c.stop(reason)
			return
		}
		c.closeGently(wait, reason) // PDUs in the queue leave first
		if !c.dm.RDMA() {
			c.stop(reason)
		}
	})
	c.mu.Unlock()
}

// closeGently ends the connection for that reason as after a logout: the initiator has that time to
// close it.
func (c *conn) closeGently(wait time.Duration, reason error) {
	c.mu.Lock()
	if c.phase != phaseFullFeature {
		c.mu.Unlock()
		return
	}
	c.enterPhase(phaseLogout)
	c.reason = reason
	c.shared.terminate(c.owns)
	c.mu.Unlock()
	c.timer.setLast(wait, func() { c.stop(reason) })
	c.halfClose()
}
