package iscsi

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
)

// maxIdle is how many goroutines of a connection wait to receive. A connection starts more when it
// needs them, and they leave when it does not.
var maxIdle = int32(max(2, runtime.GOMAXPROCS(0)))

// serve receives and works until the connection has ended, or enough other goroutines wait to
// receive. Serve's own goroutine is not among them: it waits for all of them, and a store that hangs
// may keep any.
func (c *conn) serve() {
	for {
		c.baton.Lock()
		c.waiting.Add(-1)
		t := c.receive()
		if t != nil && c.waiting.Load() == 0 {
			c.workers.Add(1)
			c.waiting.Add(1) // counted before it starts, which may take time
			go c.worker()
		}
		if t != nil && c.brief(t) {
			c.leaveBaton()
		} else {
			c.baton.Unlock()
		}
		if t == nil {
			return
		}
		t.run()
		if c.waiting.Add(1) > maxIdle {
			c.waiting.Add(-1)
			c.baton.wake()
			return
		}
	}
}

// receive returns the next task that can run, or nil when the connection has ended.
//
// Preconditions: c.baton is held.
func (c *conn) receive() *Task {
	invariant.Held(&c.baton)
	for {
		t := c.admitted
		if t != nil {
			c.admitted = nil
		} else {
			c.mu.Lock()
			t = c.takeReady()
			c.mu.Unlock()
		}
		if t != nil {
			t.waited = t.waited || t.lapBegan != c.noticed
			return t
		}
		n := &c.notice
		*n = Notice{}
		if err := c.dm.Receive(n); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) && c.rest() {
				continue
			}
			// After Close the mover still has to notify the GetDatas that were outstanding. Then it
			// fails again.
			c.end(c.endReason(err))
			if c.closing {
				return nil
			}
			c.closing = true
			continue
		}
		c.noticed = clock()
		c.notePending()
		c.received.Add(1)
		c.heard.Store(int64(c.noticed))
		if t := n.Task; t != nil {
			t.lapAt(lun.PhaseReadWait, c.noticed)
			c.mu.Lock()
			t.become(taskRunning)
			if n.Err == nil {
				c.dataCame(t)
			}
			c.mu.Unlock()
			t.fetched, t.fetchErr = true, n.Err
			return t
		}
		if err := c.dispatch(n); err != nil {
			if r, ok := c.dm.(Refuser); ok {
				r.Refuse(err)
				continue
			}
			c.end(err)
		}
	}
}

// takeReady takes the next task that may begin, or returns nil.
//
// Preconditions: c.mu is held.
func (c *conn) takeReady() *Task {
	t := c.nextReady()
	if t != nil {
		t.become(taskRunning)
	}
	return t
}

// begin runs t on a goroutine of its own.
//
// Preconditions: c.mu is held; either the connection has not ended, or the caller is one of its
// workers.
func (c *conn) begin(t *Task) {
	t.become(taskRunning)
	c.spawn(t)
}

// spawn does the work of begin for a task that is in state taskRunning already.
//
// Preconditions: as for begin.
func (c *conn) spawn(t *Task) {
	invariant.Held(&c.mu)
	t.waited = true
	c.workers.Add(1)
	go func() { // without defer: see leftUnit
		t.run()
		c.workers.Done()
	}()
}

// runReady runs the tasks that have become ready while another goroutine may be waiting in Receive.
func (c *conn) runReady() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for t := c.nextReady(); t != nil; t = c.nextReady() {
		c.begin(t)
	}
}

// A request is a row of the table of PDUs that an initiator may send in the full feature phase.
type request struct {
	discovery bool // also in a discovery session (RFC 7143, section 4.3)

	// direct handles a PDU that starts no task.
	direct func(c *conn, n *Notice)

	// take copies into t what does not stay in n. An error ends the connection. It may be nil.
	take func(t *Task, n *Notice) error
	// run does what the request asks for, in CmdSN order, and responds.
	run func(t *Task)
	// maxImmediate bounds such requests with the I bit; 0: the slots do.
	maxImmediate uint8
}

// requests has a row for each opcode. A missing row is Reject "command not supported".
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
		pdu.LoginReq:    {direct: (*conn).rejectLogin},
	}
}

// dispatch takes the PDU in n. An error is a format error, which ends the connection (RFC 7143,
// section 7.7).
//
// Preconditions: c.baton is held.
func (c *conn) dispatch(n *Notice) error {
	invariant.Held(&c.baton)
	if err := c.checkFormat(n); err != nil {
		return err
	}
	h := pdu.BHS(n.BHS)
	op := h.Opcode()
	r := &requests[op]

	var v verdict
	c.mu.Lock()
	c.acknowledge(h.ExpStatSN())
	ignore := c.phase != phaseFullFeature
	if r.run != nil {
		v = c.judge(h, r)
	}
	c.mu.Unlock()
	switch {
	case ignore:
	case op.FromTarget():
		c.reject(n, pdu.RejectProtocolError, unexpected)
	case n.Reject != 0 && op == pdu.DataOut:
		c.lostDataOut(n)
	case n.Reject == pdu.RejectOutOfResources && r.run != nil && h.ITT() != pdu.ReservedTag:
		return c.takeRequest(n, r, v) // it has its answer in its turn
	case n.Reject != 0: // a command counts as not received (section 7.3)
		c.reject(n, n.Reject, expected)
	case r.direct == nil && r.run == nil, c.sess.discovery && !r.discovery:
		c.reject(n, pdu.RejectNotSupported, expected)
	case r.direct != nil:
		r.direct(c, n)
	case h.ITT() != pdu.ReservedTag:
		return c.takeRequest(n, r, v)
	case op == pdu.NOPOut && h.Immediate(): // it asks for no answer, or is one
		c.pong(h.TTT())
		c.takeTerminationAnswer(h)
	default:
		c.reject(n, pdu.RejectInvalidField, unexpected)
	}
	return nil
}

// takeRequest makes a task of the request in n, which r describes and v was the verdict about.
//
// Preconditions: c.baton is held.
func (c *conn) takeRequest(n *Notice, r *request, v verdict) error {
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
	h := pdu.BHS(n.BHS)
	if v.take && r.take != nil {
		if err := r.take(t, n); err != nil {
			c.freeTask(t)
			return err
		}
	}
	if v.take {
		// Meanwhile another connection may have entered a task with this tag, an ABORT TASK may
		// have made this CmdSN count as received, or the connection may be ending.
		c.mu.Lock()
		if v = c.judge(h, r); v.take {
			c.admit(t)
			c.admitted = c.takeReady()
		}
		c.mu.Unlock()
	}
	if !v.take {
		c.discard(t)
	}
	if v.reason != 0 {
		c.reject(n, v.reason, expected)
	}
	return nil
}

// checkFormat finds PDU format errors.
func (c *conn) checkFormat(n *Notice) error {
	if len(n.BHS) != pdu.BHSLen {
		return fmt.Errorf("header of %d bytes instead of %d", len(n.BHS), pdu.BHSLen)
	}
	h := pdu.BHS(n.BHS)
	switch {
	case h.TotalAHSLength() != len(n.AHS):
		return fmt.Errorf("%v: TotalAHSLength says %d bytes, %d came", h.Opcode(), h.TotalAHSLength(), len(n.AHS))
	case h.DataSegmentLength() != len(n.Data) && n.Reject == 0:
		return fmt.Errorf("%v: DataSegmentLength is %d, %d bytes came", h.Opcode(), h.DataSegmentLength(), len(n.Data))
	case len(n.Data) > c.recvLimit:
		return fmt.Errorf("%v: data segment of %d bytes, but the limit is %d", h.Opcode(), len(n.Data), c.recvLimit)
	}
	return nil
}

// Whether a Reject stands in for the answer to a request, for which the initiator has a receive
// buffer, or is an unexpected PDU (RFC 7145, section 8.1).
const (
	expected   = false
	unexpected = true
)

// reject queues a Reject of the PDU in n (RFC 7143, section 11.17). It carries the whole header of
// that PDU, or the BHS alone if there is no room for more.
//
// Preconditions: c.baton is held.
func (c *conn) reject(n *Notice, reason pdu.RejectReason, unexpected bool) {
	t := c.newTask()
	if t == nil {
		return
	}
	t.setReject(reason, n.BHS)
	if len(n.BHS)+len(n.AHS) <= len(t.scratch) {
		t.Segment = append(t.Segment, n.AHS...)
	}
	t.fromTarget, t.unexpected = true, unexpected
	c.queueReady(t)
}

// queueReady lets the next goroutine that receives run t, which is no request.
func (c *conn) queueReady(t *Task) {
	c.mu.Lock()
	t.become(taskReady)
	c.ready.Push(t, &t.link)
	c.mu.Unlock()
}

// rejectLogin rejects a Login Request in the full feature phase (RFC 7145, section 7.3.9).
func (c *conn) rejectLogin(n *Notice) { c.reject(n, pdu.RejectProtocolError, expected) }
