package iscsi

import (
	"errors"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// tmfs is what the target does about each task management function (RFC 7143,
// section 11.5.1). A missing row is "function not supported": there is no ACA,
// a cold reset would close everybody's connections, and the functions of RFC
// 7144 need iSCSIProtocolLevel 2.
var tmfs map[byte]func(t *Task) (response byte)

func init() { // as requests
	tmfs = map[byte]func(*Task) byte{
		pdu.AbortTask:        (*Task).abortTask,
		pdu.AbortTaskSet:     (*Task).abortTaskSet,
		pdu.ClearTaskSet:     (*Task).clearTaskSet,
		pdu.LogicalUnitReset: (*Task).resetUnit,
		pdu.TargetWarmReset:  (*Task).resetTarget,
		pdu.TaskReassign:     func(*Task) byte { return pdu.ReassignNotSupported }, // section 7.2.2
	}
}

// runTMF serves a Task Management Function Request. When the response leaves,
// the tasks it covers have stopped: nothing of them will be sent, read or
// written any more.
func (t *Task) runTMF() {
	response := byte(pdu.FunctionNotSupported)
	if f := tmfs[t.header().Function()]; f != nil {
		response = f(t)
	}
	h := pdu.BHS(t.Header[:])
	h.Reset(pdu.TaskMgmtResp, pdu.FlagF)
	h.SetResponse(response)
	h.SetITT(t.header().ITT())
	c := t.conn
	c.respond(t)
	c.runReady() // the function may have closed a gap in the CmdSNs
}

// abortTasks aborts what match selects. Tasks that have not begun end at once.
// The others end when their goroutine, the backend or the mover notices; see
// stopped.
//
// Preconditions: mu is held.
func (c *conn) abortTasks(match func(*Task) bool) {
	c.tasks.each(func(t *Task) {
		if !match(t) {
			return
		}
		t.aborted.Store(true)
		switch t.state {
		case taskReady:
			c.ready.remove(t)
			c.drop(t)
		case taskWaiting:
			c.drop(t)
		default:
			c.budget.cancel(t)
		}
	})
	c.changed.Broadcast() // some may wait for their turn
}

var errCalledOff = errors.New("data of an aborted task was called off")

// callOff ends the GetDatas of aborted tasks that match selects, as far as the
// mover can do that. If it returns true the caller calls runReady.
//
// Preconditions: mu is held.
func (c *conn) callOff(match func(*Task) bool) (some bool) {
	dm, ok := c.dm.(Canceler)
	if !ok {
		return false
	}
	c.tasks.each(func(t *Task) {
		if t.state == taskFetching && t.aborted.Load() && match(t) && dm.CancelData(t) {
			t.state = taskRunning // it never waits in ready, where abortTasks would find it
			t.fetched, t.fetchErr = true, errCalledOff
			c.ready.push(t)
			some = true
		}
	})
	return some
}

// dataWait is how long an initiator that stops many tasks has to send the data
// that it was asked for (RFC 7143, section 4.2.3.3). Linux sends none, and waits
// 30 s for the response.
const dataWait = 2 * time.Second

// stopped waits until what match selects, of the tasks that were aborted, has
// ended. With data false a task that waits for data of its initiator counts as
// ended: what comes is dropped.
func (c *conn) stopped(match func(*Task) bool, data bool) {
	if data {
		defer time.AfterFunc(dataWait, func() {
			if !c.enter() {
				return
			}
			defer c.workers.Done()
			c.mu.Lock()
			some := c.callOff(match)
			c.mu.Unlock()
			if some {
				c.runReady()
			}
		}).Stop()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.tasks.any(func(t *Task) bool {
		return t.aborted.Load() && match(t) && (data || t.state != taskFetching)
	}) {
		c.changed.Wait()
	}
}

// abortTask is ABORT TASK (sections 7.11 and 11.6.1).
func (t *Task) abortTask() byte {
	c, req := t.conn, t.header()
	tag := req.ReferencedTaskTag()
	c.mu.Lock()
	defer c.mu.Unlock()
	ref := c.tasks.find(tag)
	switch {
	case ref == nil:
		sn := req.RefCmdSN()
		if !c.win.contains(sn) || !pdu.Before(sn, req.CmdSN()) {
			return pdu.TaskDoesNotExist // it has been answered, most likely
		}
		if c.win.accepts(sn) { // it never came: it counts as received
			c.win.receive(sn, nil)
			c.advance()
		}
		return pdu.FunctionComplete
	case !ref.isCommand():
		return pdu.FunctionRejected
	case ref.header().LUN() != req.LUN():
		return pdu.TaskDoesNotExist
	}
	isRef := func(u *Task) bool { return u == ref }
	c.abortTasks(isRef)
	// Its data is not waited for, unlike that of the tasks in a set (section
	// 11.5.1).
	if c.callOff(isRef) {
		c.mu.Unlock()
		c.runReady()
		c.mu.Lock()
	}
	for c.tasks.find(tag) == ref && ref.aborted.Load() {
		c.changed.Wait()
	}
	return pdu.FunctionComplete
}

// abortTaskSet is ABORT TASK SET: the tasks of this session on a logical unit.
func (t *Task) abortTaskSet() byte {
	c := t.conn
	if !c.sess.nexus.LUNExists(t.header().LUN()) {
		return pdu.LUNDoesNotExist
	}
	t.awaitEarlier()
	c.mu.Lock()
	c.abortTasks(t.before)
	c.mu.Unlock()
	c.stopped(t.before, true)
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

// resetTarget is TARGET WARM RESET. Commands that are missing before it count
// as received (section 4.2.3.3).
func (t *Task) resetTarget() byte {
	c := t.conn
	c.mu.Lock()
	c.win.skip(t.header().CmdSN())
	c.advance()
	c.mu.Unlock()
	t.clear(t.earlier, (*Task).isCommand)
	c.sess.target.LUNs.ResetTarget(c.sess.nexus)
	return pdu.FunctionComplete
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
// other sessions with the target. A session that loses tasks is told about the
// room in its window, because no response of them will.
func (t *Task) clear(own, others func(*Task) bool) {
	c := t.conn
	neighbours := c.node.neighbours(c.sess)
	for _, o := range neighbours {
		match := others
		if o == c {
			match = own
		}
		o.mu.Lock()
		lost := o.tasks.any(match)
		o.abortTasks(match)
		o.mu.Unlock()
		if lost && o != c && o.enter() {
			go func() { // its network may be slower than ours
				defer o.workers.Done()
				o.sendNOPIn(false)
			}()
		}
	}
	for _, o := range neighbours {
		if o == c {
			o.stopped(own, true)
		} else {
			o.stopped(others, false)
		}
	}
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
