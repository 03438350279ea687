package iscsi

import (
	"errors"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// The task management functions of RFC 7144, section 6.3. Each of them answers from one look at the
// state: none waits.

// queryTask serves QUERY TASK: is this command in the task set? If it never came it never will be:
// section 6.3.3 asks to use RefCmdSN as ABORT TASK does.
func (t *Task) queryTask() byte {
	c, req := t.conn, t.header()
	if !c.sess.nexus.LUNExists(req.LUN()) {
		return pdu.LUNDoesNotExist
	}
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
	if !c.sess.nexus.LUNExists(t.header().LUN()) {
		return pdu.LUNDoesNotExist
	}
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

// resetNexus serves I_T NEXUS RESET up to the response; dropNexus does the rest. It does not wait
// for commands that are missing: the session ends.
func (t *Task) resetNexus() byte {
	c := t.conn
	c.mu.Lock()
	c.shared.abortTasks((*Task).isCommand)
	c.mu.Unlock()
	c.shared.awaitAborted((*Task).isCommand, t, true)
	return pdu.FunctionComplete
}

// dropNexus ends the session: its connections count as timed out, and the logical units are told
// about the loss of the nexus.
func (c *conn) dropNexus() { c.sess.end(errNexusReset) }
