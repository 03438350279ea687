package iscsi

import (
	"errors"
	"slices"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// A tmf is a row of the table of task management functions.
type tmf struct {
	level uint8 // iSCSIProtocolLevel from which on there is this function
	many  bool  // it may abort more than one task: section 4.2.3.2
	run   func(t *Task) (response byte)
	after func(c *conn) // once the response has been sent; may be nil
}

// tmfs is what the target does about each function (RFC 7143, section 11.5.1; RFC
// 7144, section 6.3). A missing row is "function not supported": there is no ACA.
var tmfs map[byte]tmf

func init() { // as requests
	tmfs = map[byte]tmf{
		pdu.AbortTask:        {run: (*Task).abortTask},
		pdu.AbortTaskSet:     {many: true, run: (*Task).abortTaskSet},
		pdu.ClearTaskSet:     {many: true, run: (*Task).clearTaskSet},
		pdu.LogicalUnitReset: {many: true, run: (*Task).resetUnit},
		pdu.TargetWarmReset:  {many: true, run: (*Task).warmReset},
		pdu.TargetColdReset:  {run: (*Task).coldReset, after: (*conn).endTarget},
		pdu.TaskReassign:     {run: (*Task).reassign},
		pdu.QueryTask:        {level: 2, run: (*Task).queryTask},
		pdu.QueryTaskSet:     {level: 2, run: (*Task).queryTaskSet},
		pdu.ITNexusReset:     {level: 2, run: (*Task).resetNexus, after: (*conn).dropNexus},
		pdu.QueryAsyncEvent:  {level: 2, run: (*Task).queryAsyncEvent},
	}
}

// runTMF serves a Task Management Function Request. When the response leaves,
// the tasks it covers have stopped: nothing of them will be sent, read or
// written any more.
func (t *Task) runTMF() {
	c := t.conn
	response := byte(pdu.FunctionNotSupported)
	f, ok := tmfs[t.header().Function()]
	if ok = ok && f.level <= c.params.ISCSIProtocolLevel; ok {
		response = f.run(t)
	}
	h := pdu.BHS(t.Header[:])
	h.Reset(pdu.TaskMgmtResp, pdu.FlagF)
	h.SetResponse(response)
	h.SetAdditionalInfo(t.info)
	t.isFence = f.many
	h.SetITT(t.header().ITT())
	if t.bound {
		c.dm.Unbind(t)
		t.bound = false
	}
	ref := t.ref
	c.respond(t)
	if ref != nil {
		c.mu.Lock()
		c.begin(ref)
		c.mu.Unlock()
	}
	c.runReady() // the function may have closed a gap in the CmdSNs
	if ok && f.after != nil && response == pdu.FunctionComplete {
		f.after(c)
	}
}

// abortTasks aborts what match selects, whichever its connection. Tasks that have
// not begun end at once. The others end when their goroutine, the backend or the
// mover notices; see stopped.
//
// Preconditions: mu is held.
func (s *shared) abortTasks(match func(*Task) bool) {
	s.tasks.each(func(t *Task) {
		if !match(t) {
			return
		}
		t.aborted.Store(true)
		switch c := t.conn; t.state {
		case taskReady:
			c.ready.Remove(&t.link)
			c.drop(t)
		case taskWaiting:
			c.drop(t)
		case taskHeld:
			s.fence.queue.Remove(&t.link)
			c.drop(t)
		case taskParked:
			c.dropParked(t)
		default:
			c.budget.cancel(t)
			c.sending.cancel(t)
		}
	})
	s.changed.Broadcast() // some may wait for their turn
	if s.order != nil {
		s.order.moved() // and not only here
	}
}

// terminate aborts what match selects as a connection or session that goes does it
// (section 11.14.5).
//
// Preconditions: mu is held.
func (s *shared) terminate(match func(*Task) bool) {
	s.tasks.each(func(t *Task) {
		if match(t) && t.isCommand() && !t.needsSN && !t.aborted.Load() {
			t.cleared = true
		}
	})
	s.abortTasks(match)
}

// takeTMF lets the mover keep what a TASK REASSIGN advertises.
//
// Preconditions: recvMu is held.
func (t *Task) takeTMF(*Notice) error {
	if dm, ok := t.conn.dm.(Reassigner); ok && t.header().Function() == pdu.TaskReassign {
		dm.Advertised(t)
		t.bound = true
	}
	return nil
}

var errCalledOff = errors.New("data of an aborted task was called off")

// callOff ends the GetDatas of aborted tasks that match selects, as far as the
// mover can do that. That of a connection that has ended does it anyway.
//
// Preconditions: mu is held.
func (s *shared) callOff(match func(*Task) bool) {
	s.tasks.each(func(t *Task) {
		c := t.conn
		if t.state != taskFetching || !t.aborted.Load() || !match(t) || c.phase == phaseEnded {
			return
		}
		if dm, ok := c.dm.(Canceler); ok && dm.CancelData(t) {
			t.fetched, t.fetchErr = true, errCalledOff
			c.begin(t)
		}
	})
}

// dataWait is how long an initiator that stops many tasks has to send the data
// that it was asked for (RFC 7143, section 4.2.3.3). Linux sends none, and waits
// 30 s for the response.
const dataWait = 2 * time.Second

// stopped waits until what match selects, of the tasks that were aborted, has
// ended, or until by, on behalf of which that is, is aborted itself. With data
// false a task that waits for data of its initiator counts as ended: what comes is
// dropped.
func (s *shared) stopped(match func(*Task) bool, by *Task, data bool) {
	if data {
		defer time.AfterFunc(dataWait, func() {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.callOff(match)
		}).Stop()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for !by.isAborted() && s.tasks.any(func(t *Task) bool {
		return t.aborted.Load() && match(t) && (data || t.state != taskFetching)
	}) {
		s.changed.Wait()
	}
}

// isAborted is false for no task.
func (t *Task) isAborted() bool { return t != nil && t.aborted.Load() }

// abort aborts what match selects, on behalf of another session. Connections that
// lose tasks are told about the room in the window, because no response of those
// will.
func (s *session) abort(match func(*Task) bool) (lost bool) {
	var losers []*conn
	s.mu.Lock()
	s.tasks.each(func(t *Task) {
		if match(t) && !slices.Contains(losers, t.conn) {
			losers = append(losers, t.conn)
		}
	})
	s.announce(match, nil)
	s.abortTasks(match)
	s.mu.Unlock()
	if s.fence != nil {
		s.pass() // responses that were held back may be gone
	}
	for _, c := range losers {
		c.tellWindowAside()
	}
	return len(losers) > 0
}

// abortTask is ABORT TASK (sections 7.11 and 11.6.1).
func (t *Task) abortTask() byte {
	if t.answerAgain() {
		return pdu.FunctionComplete
	}
	c, req := t.conn, t.header()
	tag := req.ReferencedTaskTag()
	c.mu.Lock()
	defer c.mu.Unlock()
	ref := c.tasks.find(tag)
	switch {
	case ref == nil && c.countAsReceived(req):
		return pdu.FunctionComplete
	case ref == nil:
		return pdu.TaskDoesNotExist // it has been answered, most likely
	case !ref.isCommand():
		return pdu.FunctionRejected
	case ref.header().LUN() != req.LUN():
		return pdu.TaskDoesNotExist
	}
	isRef := func(u *Task) bool { return u == ref }
	c.abortTasks(isRef)
	// Its data is not waited for, unlike that of the tasks in a set (section
	// 11.5.1).
	c.callOff(isRef)
	for c.tasks.find(tag) == ref && ref.aborted.Load() && !t.aborted.Load() {
		c.changed.Wait()
	}
	return pdu.FunctionComplete
}

// countAsReceived makes the command that the function f refers to count as
// received if it may never have come (section 11.6.1). It returns false if
// RefCmdSN is none that could still come.
//
// Preconditions: mu is held.
func (c *conn) countAsReceived(f pdu.BHS) bool {
	sn := f.RefCmdSN()
	if !c.win.contains(sn) || !pdu.Before(sn, f.CmdSN()) {
		return false
	}
	if c.win.accepts(sn) {
		c.win.receive(sn, nil)
		c.advance()
	}
	return true
}

// abortTaskSet is ABORT TASK SET: the tasks of this session on a logical unit.
func (t *Task) abortTaskSet() byte {
	c := t.conn
	if !c.sess.nexus.LUNExists(t.header().LUN()) {
		return pdu.LUNDoesNotExist
	}
	t.awaitEarlier()
	t.abortOwn(t.before)
	t.awaitOwn(t.before)
	return pdu.FunctionComplete
}

// clearTaskSet is CLEAR TASK SET. Our logical units have one task set for all
// initiators.
func (t *Task) clearTaskSet() byte {
	if !t.conn.sess.nexus.LUNExists(t.header().LUN()) {
		return pdu.LUNDoesNotExist
	}
	t.awaitEarlier()
	t.clear(t.before, t.sameUnit)
	return pdu.FunctionComplete
}

// resetUnit is LOGICAL UNIT RESET.
func (t *Task) resetUnit() byte {
	nexus, lun := t.conn.sess.nexus, t.header().LUN()
	if !nexus.LUNExists(lun) {
		return pdu.LUNDoesNotExist
	}
	t.awaitEarlier()
	t.clear(t.before, t.sameUnit)
	nexus.ResetUnit(lun)
	return pdu.FunctionComplete
}

// warmReset is TARGET WARM RESET.
func (t *Task) warmReset() byte {
	t.clearTarget()
	t.conn.sess.nexus.ResetTarget()
	return pdu.FunctionComplete
}

// coldReset is TARGET COLD RESET: a power-on event for the logical units. All
// sessions with the target end behind the response; see endTarget. It takes an
// initiator from which none of them is hidden.
func (t *Task) coldReset() byte {
	if !t.conn.sess.nexus.SeesAll() {
		return pdu.FunctionNotAuthorized
	}
	t.clearTarget()
	t.conn.sess.target.LUNs.PowerOn()
	return pdu.FunctionComplete
}

var errColdReset = errors.New("an initiator has asked for TARGET COLD RESET")

// endTarget closes all connections with the target of c (section 11.5.1). That of c
// itself ends as after a logout, so that the response gets through.
func (c *conn) endTarget() {
	for _, s := range c.node.sessionsWith(c.sess.target) {
		for _, o := range s.close(errColdReset) {
			if o != c {
				o.farewell(pdu.AsyncSessionDropped, errColdReset)
			}
		}
	}
	c.part(errColdReset)
}

// clearTarget ends all commands for the logical units that the initiator knows.
// Those that are missing before the function count as received (section
// 4.2.3.3).
func (t *Task) clearTarget() {
	c := t.conn
	c.mu.Lock()
	c.win.skip(t.header().CmdSN())
	c.advance()
	c.mu.Unlock()
	t.clear(t.earlier, func(u *Task) bool { return u.isCommand() && c.sess.nexus.LUNExists(u.header().LUN()) })
}

// earlier selects the commands that the initiator sent before the function.
func (t *Task) earlier(u *Task) bool {
	return u.isCommand() && (u.immediate() || pdu.Before(u.header().CmdSN(), t.header().CmdSN()))
}

// sameUnit selects the commands for the logical unit that the function names.
func (t *Task) sameUnit(u *Task) bool {
	return u.isCommand() && t.conn.sess.nexus.SameUnit(u.header().LUN(), t.header().LUN())
}

// before selects both.
func (t *Task) before(u *Task) bool { return t.earlier(u) && t.sameUnit(u) }

// clear stops what own selects in this session and what others selects in the
// other sessions with the target. Those that lose tasks hear of CLEAR TASK SET,
// which unlike resets has no unit attention of its own.
func (t *Task) clear(own, others func(*Task) bool) {
	c := t.conn
	neighbours := c.node.neighbours(c.sess)
	t.abortOwn(own)
	for _, s := range neighbours {
		if lost := s.abort(others); lost && t.header().Function() == pdu.ClearTaskSet {
			s.nexus.CommandsCleared(t.header().LUN())
		}
	}
	t.awaitOwn(own)
	for _, s := range neighbours {
		s.stopped(others, nil, false)
	}
}

// abortOwn aborts what match selects in this session. With FastAbort the initiator
// sends no more data for that where it has sent the function (section 4.2.3.4).
func (t *Task) abortOwn(match func(*Task) bool) {
	c := t.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sess.announce(match, c)
	c.abortTasks(match)
	if c.fence.isFast() {
		c.callOff(func(u *Task) bool { return u.conn == c && match(u) })
	}
}

// awaitOwn waits until what abortOwn has aborted has ended. With FastAbort the data
// on other connections is not waited for.
func (t *Task) awaitOwn(match func(*Task) bool) {
	c := t.conn
	if !c.fence.isFast() {
		c.stopped(match, t, true)
		return
	}
	c.stopped(func(u *Task) bool { return match(u) && (u.conn == c || u.state != taskFetching) }, t, true)
}

// awaitEarlier waits until all commands that the initiator sent before the
// function have come (section 4.2.3.3).
func (t *Task) awaitEarlier() {
	c := t.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.phase == phaseFullFeature && !t.aborted.Load() && pdu.Before(c.win.exp, t.header().CmdSN()) {
		c.changed.Wait()
	}
}
