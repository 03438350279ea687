package iscsi

import (
	"errors"
	"slices"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
)

// A tmf is a row of the table of task management functions.
type tmf struct {
	level uint8 // the lowest iSCSIProtocolLevel that has this function
	unit  bool  // it is about a logical unit, which has to exist
	many  bool  // it may abort more than one task: section 4.2.3.2
	run   func(t *Task) (response byte)
	after func(c *conn) // once the response has been sent; may be nil
}

// tmfs has a row for each function (RFC 7143, section 11.5.1; RFC 7144, section 6.3). A missing row
// is "function not supported": there is no ACA.
var tmfs map[byte]tmf

func init() { // as requests
	tmfs = map[byte]tmf{
		pdu.AbortTask:        {run: (*Task).abortTask},
		pdu.AbortTaskSet:     {unit: true, many: true, run: (*Task).abortTaskSet},
		pdu.ClearTaskSet:     {unit: true, many: true, run: (*Task).clearTaskSet},
		pdu.LogicalUnitReset: {unit: true, many: true, run: (*Task).resetUnit},
		pdu.TargetWarmReset:  {many: true, run: (*Task).warmReset},
		pdu.TargetColdReset:  {run: (*Task).coldReset, after: (*conn).endTarget},
		pdu.TaskReassign:     {run: (*Task).reassign},
		pdu.QueryTask:        {level: 2, unit: true, run: (*Task).queryTask},
		pdu.QueryTaskSet:     {level: 2, unit: true, run: (*Task).queryTaskSet},
		pdu.ITNexusReset:     {level: 2, run: (*Task).resetNexus, after: (*conn).dropNexus},
		pdu.QueryAsyncEvent:  {level: 2, unit: true, run: (*Task).queryAsyncEvent},
	}
}

// takeTMF lets the mover keep what a TASK REASSIGN advertises.
//
// Preconditions: c.baton is held.
func (t *Task) takeTMF(*Notice) error {
	if r := t.conn.reassigner(); r != nil && t.header().Function() == pdu.TaskReassign {
		r.Advertised(t)
		t.bound = true
	}
	return nil
}

// runTMF serves a Task Management Function Request. When the response leaves, the tasks it covers
// have stopped: nothing of them will be sent, read or written later.
func (t *Task) runTMF() {
	c := t.conn
	response := byte(pdu.FunctionNotSupported)
	f, ok := tmfs[t.header().Function()]
	switch ok = ok && f.level <= c.params.ISCSIProtocolLevel; {
	case ok && f.unit && !c.sess.nexus.LUNExists(t.header().LUN()):
		response = pdu.LUNDoesNotExist
	case ok:
		began := clock()
		response = f.run(t)
		c.node.countFencing(t.header().Function(), began)
	}
	h := t.beginPDU(pdu.TaskMgmtResp, t.header().ITT())
	h.SetResponse(response)
	h.SetAdditionalInfo(t.info)
	t.isFence = f.many
	if t.bound {
		c.dm.Unbind(t)
		t.bound = false
	}
	ref := t.recovery.reassign
	c.respond(t)
	if ref != nil {
		c.mu.Lock()
		c.spawn(ref)
		c.mu.Unlock()
	}
	c.runReady() // the function may have closed a gap in the CmdSNs
	if ok && f.after != nil && response == pdu.FunctionComplete {
		f.after(c)
	}
}

// abortTasks aborts the tasks that match selects, on all connections. If taken is true they are commands
// in the task set, which another session takes away: they end with TASK ABORTED, and the caller lets
// their connections send that. Tasks that have not begun end at once, except for one with unsolicited
// data on its way: that comes first (RFC 7143, section 11.4.2). The others end when their goroutine, the
// backend or the mover notices; see awaitAborted.
//
// Preconditions: s.mu is held.
func (s *shared) abortTasks(match func(*Task) bool, taken bool) {
	invariant.Held(&s.mu)
	var running *conn // of a task in a logical unit, which may not let it go
	s.tasks.each(func(t *Task) {
		if !match(t) {
			return
		}
		t.taken = taken
		t.aborted.Store(true)
		switch c := t.conn; t.state {
		case taskReady:
			c.ready.Remove(&t.link)
			if taken {
				c.answer(t)
			} else {
				c.drop(t)
			}
		case taskWaiting:
			if !taken {
				c.drop(t)
			}
		case taskHeld:
			s.fence.queue.Remove(&t.link)
			c.drop(t)
		case taskParked:
			if taken {
				t.settleParked()
			} else {
				c.dropParked(t)
			}
		default:
			c.budget.cancel(t)
			c.sending.cancel(t)
			if t.state == taskFetching && s.gate != nil {
				s.gate.leave(t) // its data is dropped
			}
			if of := t.preempts; of != nil && of != s {
				go of.wake() // one lock at a time
			}
			t.cmd.Cancel()
			if t.mustEnd() && t.cmd.Inside() {
				running = c
			}
		}
	})
	if running != nil {
		s.detachLater(running)
	}
	s.changed.Broadcast() // tasks of this session may wait for them
	if s.gate != nil {
		s.gate.moved() // and tasks of other sessions
	}
}

// terminate aborts the tasks that match selects because a connection or session ends (section
// 11.14.5).
//
// Preconditions: s.mu is held.
func (s *shared) terminate(match func(*Task) bool) {
	s.tasks.each(func(t *Task) {
		if match(t) && t.isCommand() && !t.needsSN && (!t.aborted.Load() || t.taken) {
			t.cleared = true
		}
	})
	s.abortTasks(match, false)
}

// callOff ends the GetDatas of aborted tasks that match selects, as far as the mover can do that. A
// connection that has ended does it anyway.
//
// Preconditions: s.mu is held.
func (s *shared) callOff(match func(*Task) bool) {
	invariant.Held(&s.mu)
	s.tasks.each(func(t *Task) {
		c := t.conn
		if t.state != taskFetching || !t.aborted.Load() || !match(t) || c.phase == phaseEnded {
			return
		}
		if m, ok := c.dm.(Canceler); ok && m.CancelData(t) {
			t.fetched, t.fetchErr = true, ErrCanceled
			c.begin(t)
		}
	})
}

// dataWait is how long an initiator that stops many tasks has to send the data that the target has
// asked for (RFC 7143, section 4.2.3.3). Linux sends none, and waits 30 s for the response.
const dataWait = 1500 * time.Millisecond

// awaitAborted waits until the aborted tasks that match selects have ended, or until by, the task
// that has aborted them, is aborted itself. by may be nil. If data is false, a task that waits for
// its initiator, to send data or to take some, counts as ended: it touches the medium no more.
func (s *shared) awaitAborted(match func(*Task) bool, by *Task, data bool) {
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
		return t.aborted.Load() && match(t) && (data || t.state == taskRunning && t.cmd.Inside())
	}) {
		by.note(waitsAborted)
		s.changed.Wait()
	}
	by.note(waitsNot)
}

// note notes what t waits for. t may be nil.
func (t *Task) note(what waitsFor) {
	if t != nil {
		t.waits.Store(what)
	}
}

// isAborted reports whether t has been aborted. t may be nil.
func (t *Task) isAborted() bool { return t != nil && t.aborted.Load() }

// takeAway aborts those tasks that match selects and that are in the task set, on behalf of another
// session. They end with TASK ABORTED.
func (s *session) takeAway(match func(*Task) bool) {
	s.abort(func(t *Task) bool { return match(t) && t.inTaskSet() }, true)
}

// inTaskSet reports whether t is a command that has come in its turn, and that neither has ended nor is
// aborted. A command ahead of a gap comes later (RFC 7143, section 4.2.3.3), and one whose answer is held
// back has ended.
//
// Preconditions: t.conn.mu is held.
func (t *Task) inTaskSet() bool {
	return t.isCommand() && !t.needsSN && t.state != taskHeld && !t.recovery.finished && !t.aborted.Load()
}

// abort aborts the tasks that match selects, outside of their session's goroutines; taken as with
// abortTasks. It does not wait for the initiator. Connections that lose tasks are told about the room in
// the window, if no response tells it.
func (s *session) abort(match func(*Task) bool, taken bool) {
	var losers []*conn
	s.shared.mu.Lock()
	s.shared.tasks.each(func(t *Task) {
		if match(t) && !slices.Contains(losers, t.conn) {
			losers = append(losers, t.conn)
		}
	})
	s.announce(match, nil)
	s.shared.abortTasks(match, taken)
	s.shared.mu.Unlock()
	if s.shared.fence != nil {
		s.releaseHeld() // responses that were held back may be gone, and others may have come
	}
	for _, c := range losers {
		c.start(c.tellLoss)
	}
}

// tellLoss sends what was queued for tasks that others have aborted, and the news about the window.
func (c *conn) tellLoss() {
	c.dm.Flush()
	c.tellWindow()
}

// abortUnit aborts the commands of s for a logical unit, except the PREEMPT AND ABORT that asks for
// it, and waits until they have ended. A PREEMPT AND ABORT that is aborted itself stops waiting:
// two of them may be each other's victims. preempt is nil if it came through another gateway.
func (s *session) abortUnit(field [8]byte, preempt *lun.Command) {
	defer s.node.countFencing(byPreempt, clock())
	var by *Task
	if preempt != nil {
		by = preempt.Owner.(*Task)
	}
	match := func(t *Task) bool { return t.isCommand() && t != by && s.nexus.SameUnit(t.header().LUN(), field) }
	if by != nil && by.conn.sess == s {
		s.abort(match, false)
	} else {
		s.takeAway(match)
	}
	by.setPreempts(s.shared)
	s.shared.awaitAborted(match, by, false)
	by.setPreempts(nil)
}

// setPreempts notes where t, a PREEMPT AND ABORT, waits for aborted commands: abortTasks wakes
// it there. t may be nil.
func (t *Task) setPreempts(of *shared) {
	if t == nil {
		return
	}
	c := t.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	t.preempts = of
}

// wake lets those that wait for a change of s look again.
func (s *shared) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed.Broadcast()
}

// abortTask serves ABORT TASK (sections 7.11 and 11.6.1).
func (t *Task) abortTask() byte {
	if t.answerAgain() {
		return pdu.FunctionComplete
	}
	c, req := t.conn, t.header()
	tag := req.ReferencedTaskTag()
	c.mu.Lock()
	defer c.mu.Unlock()
	ref := c.shared.tasks.find(tag)
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
	c.shared.abortTasks(isRef, false)
	// The function does not wait for its data, unlike that of the tasks in a set (section 11.5.1).
	c.shared.callOff(isRef)
	for c.shared.tasks.find(tag) == ref && ref.aborted.Load() && !t.aborted.Load() {
		t.waits.Store(waitsAborted)
		c.shared.changed.Wait()
	}
	t.waits.Store(waitsNot)
	return pdu.FunctionComplete
}

// countAsReceived makes the command that the function f refers to count as received if it may never
// have come (section 11.6.1). It returns false if no command with RefCmdSN can still come.
//
// Preconditions: c.mu is held.
func (c *conn) countAsReceived(f pdu.BHS) bool {
	invariant.Held(&c.mu)
	sn, w := f.RefCmdSN(), &c.shared.win
	if !w.contains(sn) || !pdu.Before(sn, f.CmdSN()) {
		return false
	}
	if w.accepts(sn) {
		w.receive(sn, nil)
		c.advance()
	}
	return true
}

// abortTaskSet serves ABORT TASK SET: it aborts the tasks of this session on a logical unit.
func (t *Task) abortTaskSet() byte {
	t.awaitEarlier()
	t.abortInSession(t.before, false)
	t.awaitInSession(t.before)
	return pdu.FunctionComplete
}

// clearTaskSet serves CLEAR TASK SET. A logical unit has one task set for all initiators, unless MODE SELECT has
// set TST 001b: then that of the session is its own (SAM-5, section 7.5).
func (t *Task) clearTaskSet() byte {
	if t.conn.sess.nexus.HasOwnTaskSet(t.header().LUN()) {
		return t.abortTaskSet()
	}
	t.awaitEarlier()
	t.clearTasks(t.before, t.sameUnit, t.conn.sess.resetsOthers(), false)
	return pdu.FunctionComplete
}

// resetUnit serves LOGICAL UNIT RESET.
func (t *Task) resetUnit() byte {
	t.awaitEarlier()
	others := t.conn.sess.resetsOthers()
	t.clearTasks(t.before, t.sameUnit, others, false)
	t.conn.sess.nexus.ResetUnit(t.header().LUN(), others)
	return pdu.FunctionComplete
}

// warmReset serves TARGET WARM RESET.
func (t *Task) warmReset() byte {
	others := t.conn.sess.resetsOthers()
	t.clearTarget(others)
	t.conn.sess.nexus.ResetTarget(others)
	return pdu.FunctionComplete
}

// coldReset serves TARGET COLD RESET: a power-on event for the logical units. All sessions with the
// target end after the response; see endTarget. The initiator has to see all logical units, and needs
// the right to reset others: no part of the function is about itself alone.
func (t *Task) coldReset() byte {
	if !t.conn.sess.nexus.SeesAll() || !t.conn.sess.resetsOthers() {
		return pdu.FunctionNotAuthorized
	}
	t.clearTarget(true)
	t.conn.sess.target.LUNs.PowerOn()
	return pdu.FunctionComplete
}

var errColdReset = errors.New("an initiator has asked for TARGET COLD RESET")

// endTarget closes all connections with the target of c (section 11.5.1). c itself ends as after a
// logout, so that the initiator gets the response.
func (c *conn) endTarget() {
	for _, s := range c.node.sessionsWith(c.sess.target) {
		for _, o := range s.close(errColdReset) {
			if o != c {
				o.dismiss(pdu.AsyncSessionDropped, o.params.DefaultTime2Wait, o.opt.LogoutWait, errColdReset)
			}
		}
	}
	c.closeGently(c.opt.LogoutWait, errColdReset)
}

// clearTarget ends all commands for the logical units that the initiator sees, those of others if it
// may. Commands that are
// missing before the function count as received (section 4.2.3.3).
func (t *Task) clearTarget(others bool) {
	visible := func(u *Task) bool { return u.isCommand() && t.conn.sess.nexus.LUNExists(u.header().LUN()) }
	t.clearTasks(t.earlier, visible, others, true)
}

// earlier selects the commands that the initiator sent before the function.
func (t *Task) earlier(u *Task) bool {
	return u.isCommand() && (u.immediate() || pdu.Before(u.header().CmdSN(), t.header().CmdSN()))
}

// sameUnit selects the commands for the logical unit that the function names.
func (t *Task) sameUnit(u *Task) bool {
	return u.isCommand() && t.conn.sess.nexus.SameUnit(u.header().LUN(), t.header().LUN())
}

// before selects the commands that both earlier and sameUnit select.
func (t *Task) before(u *Task) bool { return t.earlier(u) && t.sameUnit(u) }

// clearTasks stops the tasks that own selects in this session, and others in the sessions that within
// returns. skip is that of abortInSession. Other sessions get TASK ABORTED for them (SAM-5, section 5.3.1), so CLEAR TASK SET raises no
// unit attention.
func (t *Task) clearTasks(own, others func(*Task) bool, resetsOthers, skip bool) {
	c := t.conn
	otherSessions := c.sess.within(resetsOthers)
	t.abortInSession(own, skip)
	for _, s := range otherSessions {
		s.takeAway(others)
	}
	t.awaitInSession(own)
	for _, s := range otherSessions {
		t.waits.Store(waitsAborted)
		s.shared.awaitAborted(others, nil, false)
	}
	t.waits.Store(waitsNot)
}

// abortInSession aborts the tasks that match selects in this session. With FastAbort the initiator
// sends no more data for them on the connection of the function (section 4.2.3.4). If skip is true, the commands
// that are missing before the function count as received. Those that waited for them are aborted before any could
// begin: one that began would overtake what was skipped.
func (t *Task) abortInSession(match func(*Task) bool, skip bool) {
	c := t.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if skip {
		c.shared.win.skip(t.header().CmdSN())
		defer c.advance()
	}
	c.sess.announce(match, c)
	c.shared.abortTasks(match, false)
	if c.shared.fence.isFast() {
		c.shared.callOff(func(u *Task) bool { return u.conn == c && match(u) })
	}
}

// awaitInSession waits until the tasks that abortInSession has aborted have ended. With FastAbort
// it does not wait for data on other connections.
func (t *Task) awaitInSession(match func(*Task) bool) {
	c := t.conn
	if !c.shared.fence.isFast() {
		c.shared.awaitAborted(match, t, true)
		return
	}
	c.shared.awaitAborted(func(u *Task) bool { return match(u) && (u.conn == c || u.state != taskFetching) }, t, true)
}

// awaitEarlier waits until all commands that the initiator sent before the function have come
// (section 4.2.3.3).
func (t *Task) awaitEarlier() {
	c := t.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.phase == phaseFullFeature && !t.aborted.Load() && pdu.Before(c.shared.win.exp, t.header().CmdSN()) {
		t.waits.Store(waitsMissing)
		c.shared.changed.Wait()
	}
	t.waits.Store(waitsNot)
}

// The task management functions of RFC 7144, section 6.3. Each of them answers from one look at the
// state: none waits.

// queryTask serves QUERY TASK: is this command in the task set? If it never came it never will be:
// section 6.3.3 asks to use RefCmdSN as ABORT TASK does.
func (t *Task) queryTask() byte {
	c, req := t.conn, t.header()
	c.mu.Lock()
	defer c.mu.Unlock()
	ref := c.shared.tasks.find(req.ReferencedTaskTag())
	switch {
	case ref == nil:
		c.countAsReceived(req)
		return pdu.FunctionComplete
	case !ref.isCommand():
		return pdu.FunctionRejected
	case ref.aborted.Load() || !t.sameUnit(ref):
		return pdu.FunctionComplete
	}
	return pdu.FunctionSucceeded
}

// queryTaskSet serves QUERY TASK SET: has this nexus any command, sent before the function, in the
// task set?
func (t *Task) queryTaskSet() byte {
	c := t.conn
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shared.tasks.any(func(u *Task) bool { return t.before(u) && !u.aborted.Load() }) {
		return pdu.FunctionSucceeded
	}
	return pdu.FunctionComplete
}

// queryAsyncEvent serves QUERY ASYNCHRONOUS EVENT: is there a unit attention, and which will be
// reported first? There are no deferred errors. SAM-5, section 7.10, has the layout of the answer.
func (t *Task) queryAsyncEvent() byte {
	const one, more = 0x10, 0x20 // UADE DEPTH
	first, pending := t.conn.sess.nexus.PendingAttention(t.header().LUN())
	switch pending {
	case 0:
		return pdu.FunctionComplete
	case 1:
		first.Key |= one
	default:
		first.Key |= more
	}
	t.info = [3]byte{first.Key, first.ASC, first.ASCQ}
	return pdu.FunctionSucceeded
}

var errNexusReset = errors.New("I_T NEXUS RESET")

// resetNexus serves I_T NEXUS RESET up to the response; dropNexus does the rest. It does not wait
// for commands that are missing: the session ends.
func (t *Task) resetNexus() byte {
	c := t.conn
	c.mu.Lock()
	c.shared.abortTasks((*Task).isCommand, false)
	c.mu.Unlock()
	c.shared.awaitAborted((*Task).isCommand, t, true)
	return pdu.FunctionComplete
}

// dropNexus ends the session: its connections count as timed out, and the logical units are told
// about the loss of the nexus.
func (c *conn) dropNexus() { c.sess.end(errNexusReset) }
