package iscsi

import (
	"errors"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// The task management functions of RFC 7144, section 6.3. What each of them
// asks about is found out in one look: nothing waits.

// queryTask is QUERY TASK: is this command in the task set? One that never came
// will not be in it any more, either: section 6.3.3 wants RefCmdSN to be used as
// ABORT TASK does.
func (t *Task) queryTask() byte {
	c, req := t.conn, t.header()
	if !c.sess.nexus.LUNExists(req.LUN()) {
		return pdu.LUNDoesNotExist
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	ref := c.tasks.find(req.ReferencedTaskTag())
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

// queryTaskSet is QUERY TASK SET: has this nexus any command, sent before the
// function, in the task set?
func (t *Task) queryTaskSet() byte {
	c := t.conn
	if !c.sess.nexus.LUNExists(t.header().LUN()) {
		return pdu.LUNDoesNotExist
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.tasks.any(func(u *Task) bool { return t.before(u) && !u.aborted.Load() }) {
		return pdu.FunctionSucceeded
	}
	return pdu.FunctionComplete
}

// queryAsyncEvent is QUERY ASYNCHRONOUS EVENT: is there a unit attention, and
// which will be reported first? There are no deferred errors. The answer is laid
// out as in SAM-5, section 7.10.
func (t *Task) queryAsyncEvent() byte {
	const one, more = 0x10, 0x20 // UADE DEPTH
	nexus, field := t.conn.sess.nexus, t.header().LUN()
	if !nexus.LUNExists(field) {
		return pdu.LUNDoesNotExist
	}
	first, pending := nexus.PendingAttention(field)
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

// resetNexus is I_T NEXUS RESET as far as it comes before the response; dropNexus
// does the rest. Since the session goes, commands that are missing need not be
// waited for.
func (t *Task) resetNexus() byte {
	c := t.conn
	c.mu.Lock()
	c.abortTasks((*Task).isCommand)
	c.mu.Unlock()
	c.stopped((*Task).isCommand, t, true)
	return pdu.FunctionComplete
}

// dropNexus ends the session: its connections count as timed out, and the
// logical units hear of the loss of the nexus.
func (c *conn) dropNexus() { c.sess.end(errNexusReset) }
