package iscsi

import (
	"fmt"
	"slices"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
)

// Connection recovery: what ErrorRecoveryLevel 2 adds (RFC 7143, sections 6.3.4,
// 6.3.6, 7.2.2 and 7.5; RFC 7145, section 10.2.2). When a connection fails, its
// non-immediate SCSI commands stay: those that are in execution run on until they
// want to send or to fetch something, and are parked there. Time2Wait and
// Time2Retain later they end, unless the initiator has logged the connection out for
// recovery and has reassigned them to another connection. A task that is reassigned
// goes on from where it was: data-in that was not acknowledged is produced again,
// data-out that has not come is asked for, and the status is sent, if need be again.

// maxFailedSessions is how many sessions without a connection may wait for one.
// Beyond, a session ends with its last connection.
const maxFailedSessions = 32

// A lostConn is a connection that has failed and not been logged out yet
// (CLEANUP_WAIT, RFC 7143, section 8.2), or what a logout for recovery has left of
// one: its tasks. Those that have not been answered are in the task table. shared.mu
// guards it.
type lostConn struct {
	*conn
	removed  bool    // logged out: the tasks may be reassigned
	answered []*Task // whose status has not been acknowledged, in order of StatSN
	timer    *time.Timer
}

// recovers tells whether the session of c goes on when a connection fails.
func (c *conn) recovers() bool {
	return c.params.ErrorRecoveryLevel == 2 && c.params.DefaultTime2Retain > 0
}

// retain is how long the tasks of a lost connection stay.
func (s *session) retain() time.Duration {
	return time.Duration(uint32(s.params.DefaultTime2Wait)+uint32(s.params.DefaultTime2Retain)) * time.Second
}

// recoverable tells whether t survives its connection (section 7.14): not if it is
// immediate, nor if its CmdSN has not been acknowledged.
func (t *Task) recoverable() bool {
	return t.isCommand() && !t.immediate() && !t.needsSN && !t.aborted.Load()
}

// suspend parks the tasks of c, and those in execution as soon as they want
// something of c. except goes on; others that do not survive are aborted.
//
// Preconditions: mu is held.
func (c *conn) suspend(except *Task) {
	s := c.sess
	if !c.suspends.Load() {
		c.suspends.Store(true)
		l := &lostConn{conn: c}
		l.timer = time.AfterFunc(s.retain(), func() { s.expire(l) })
		if s.lost = append(s.lost, l); len(s.lost) > int(s.params.MaxConnections) {
			s.drop(s.lost[0])
		}
	}
	c.terminate(func(t *Task) bool { return t != except && c.owns(t) && !t.recoverable() })
	c.tasks.each(func(t *Task) {
		if !c.owns(t) || t == except {
			return
		}
		switch t.state {
		case taskReady:
			c.ready.Remove(&t.link)
			t.parkLocked()
		case taskWaiting: // for unsolicited data; what has not come will be asked for
			t.needsData, t.unsolicited = false, t.arrived
			c.arrange(t)
			t.parkLocked()
		case taskHeld:
			c.fence.queue.Remove(&t.link)
			t.finished = true
			t.parkLocked()
		case taskRunning:
			c.budget.cancel(t)
			c.sending.cancel(t)
		}
	})
	c.changed.Broadcast()
}

// park parks t, which its goroutine cannot go on with because its connection is
// lost. It returns false if t is to be abandoned instead.
//
// Preconditions: the caller runs t; no GetData is outstanding.
func (t *Task) park() bool {
	c := t.conn
	c.mu.Lock()
	lost := c.suspends.Load() && t.recoverable()
	c.mu.Unlock()
	if !lost {
		return false
	}
	if t.off == 0 {
		t.unplace()
	}
	if t.buf != nil {
		t.buf.Release()
		t.buf = nil
	}
	t.placed = false
	c.mu.Lock()
	defer c.mu.Unlock()
	if t.aborted.Load() {
		return false
	}
	t.parkLocked()
	return true
}

// Preconditions: mu is held; t has no Buffer.
func (t *Task) parkLocked() {
	t.detach()
	t.state = taskParked
	t.conn.changed.Broadcast()
}

// detach takes t from its mover.
//
// Preconditions: mu is held.
func (t *Task) detach() {
	if !t.bound {
		return
	}
	t.bound = false
	if dm, ok := t.conn.dm.(Reassigner); ok {
		t.progress = dm.Detach(t)
	}
}

// dropParked ends a parked task.
//
// Preconditions: mu is held.
func (c *conn) dropParked(t *Task) {
	if t.begun {
		t.begun = false
		t.cmd.Fail(senseAborted)
		c.sess.nexus.End(&t.cmd) // of a command that has failed: nothing happens
	}
	if t.isCommand() {
		c.sess.nexus.Count(&t.cmd, t.off, true)
	}
	c.drop(t)
}

// orphan takes over what c, which has been closed, had sent without an
// acknowledgement.
func (s *session) orphan(c *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.IndexFunc(s.lost, func(l *lostConn) bool { return l.conn == c })
	st := &c.store
	for sn := c.statSN - uint32(len(st.ring)); sn != c.statSN; sn++ {
		t := st.at(sn)
		if t == nil {
			continue
		}
		if i < 0 || t.own || !t.isCommand() || t.immediate() {
			c.unstore(t)
			continue
		}
		t.detach()
		st.remove(t)
		t.finished, t.answered = true, true
		s.lost[i].answered = append(s.lost[i].answered, t)
	}
	c.reopenWindow()
	c.changed.Broadcast()
}

// drop ends what is left of l (section 7.6, cases b and c).
//
// Preconditions: mu is held.
func (s *session) drop(l *lostConn) {
	l.timer.Stop()
	s.lost = slices.DeleteFunc(s.lost, func(o *lostConn) bool { return o == l })
	l.terminate(l.owns)
	for _, t := range l.answered {
		s.nexus.ClearedByTransport(t.header().LUN())
		l.release(t)
	}
	l.answered = nil
}

// expire is the connection state timeout of l, or the end of the wait for a
// reassignment. The last one is the session timeout (section 6.3.5).
func (s *session) expire(l *lostConn) {
	s.mu.Lock()
	if slices.Contains(s.lost, l) {
		s.drop(l)
	}
	s.mu.Unlock()
	if c := s.anyConn(); c != nil {
		c.tellWindowAside()
	}
	if s.finishIdle() {
		s.reportEnd(ConnAddr{}, fmt.Sprintf("no connection came back within %v", s.retain()), true)
	}
}

// lose does what there is to do about a connection that has failed where the session
// goes on: the initiator is told on another one (section 7.1.4.3).
func (s *session) lose(failed *conn) {
	c := s.anyConn()
	if c == nil || !c.enter() {
		return
	}
	go func() { // its network may be slow
		defer c.workers.Done()
		t := c.async(pdu.AsyncConnectionDropped, failed.cid, s.params.DefaultTime2Wait, s.params.DefaultTime2Retain)
		if t != nil {
			c.sendOwn(t)
		}
	}()
}

// remove logs lost connections out for recovery, those with that CID (section 11.14):
// their tasks may be reassigned from now on. expStatSN acknowledges what they had
// sent.
func (s *session) remove(cid uint16, expStatSN uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range slices.Clone(s.lost) {
		if l.cid != cid || l.removed {
			continue
		}
		l.removed = true
		l.answered = slices.DeleteFunc(l.answered, func(t *Task) bool {
			acknowledged := pdu.Before(pdu.BHS(t.Header[:]).StatSN(), expStatSN)
			if acknowledged {
				l.release(t)
			}
			return acknowledged
		})
		if len(l.answered) == 0 && !s.tasks.any(l.owns) && !slices.Contains(s.conns, l.conn) {
			s.drop(l)
			continue
		}
		l.timer.Reset(s.retain())
	}
}

// removeOther is a Logout Request for recovery of another connection, which may be
// lost already.
func (t *Task) removeOther() {
	c, s := t.conn, t.conn.sess
	cid := t.header().CID()
	o := s.byCID(cid)
	if o == nil {
		t.respondLogout(pdu.LogoutCIDNotFound)
		return
	}
	o.shut(errLoggedOut, true)
	late := time.NewTimer(c.opt.ReinstatementWait)
	defer late.Stop()
	select {
	case <-o.done:
		s.remove(cid, t.header().ExpStatSN())
		t.respondLogout(pdu.LogoutSuccess)
	case <-late.C: // a backend does not return
		t.respondLogout(pdu.LogoutCleanupFailed)
	case <-c.ending:
		t.respondLogout(pdu.LogoutCleanupFailed)
	}
}

// removeOwn is a Logout Request for recovery of the connection that it comes on.
// Nothing of its tasks is sent behind the response; when it has been closed they may
// be reassigned.
func (t *Task) removeOwn() {
	c := t.conn
	c.mu.Lock()
	if c.phase != phaseFullFeature { // another logout was first
		c.drop(t)
		c.mu.Unlock()
		return
	}
	c.phase = phaseLogout
	c.suspend(t)
	for c.phase == phaseLogout && c.tasks.any(func(u *Task) bool { return u != t && c.owns(u) && u.state == taskRunning }) {
		c.changed.Wait()
	}
	failed := t.aborted.Load() // with the connection
	c.mu.Unlock()
	if !failed {
		c.sess.remove(c.cid, t.header().ExpStatSN())
		c.lastTimer(func() { c.stop(nil) })
	}
	t.respondLogout(pdu.LogoutSuccess)
	c.halfClose()
}

// closure drops what nobody waits for any more when the last connection of s closes
// (section 6.3.5).
//
// Preconditions: mu is held.
func (s *session) closure() {
	for _, l := range slices.Clone(s.lost) {
		if l.removed && len(l.answered) == 0 && !s.tasks.any(l.owns) {
			s.drop(l)
		}
	}
}

// byCID is the connection with that CID that has not been logged out, or nil.
func (s *session) byCID(cid uint16) *conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		if c.cid == cid {
			return c
		}
	}
	for _, l := range s.lost {
		if l.cid == cid && !l.removed {
			return l.conn
		}
	}
	return nil
}

// reassign is TASK REASSIGN (sections 7.2.2 and 11.5.1). The task goes on behind the
// response.
func (t *Task) reassign() byte {
	c := t.conn
	if _, ok := c.dm.(Reassigner); !ok || !c.recovers() {
		return pdu.ReassignNotSupported
	}
	slot := c.newTask() // that t.ref will have
	if slot == nil {
		return pdu.FunctionRejected
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	ref, l, response := t.awaitReassignable()
	if ref == nil {
		c.freeTask(slot)
		return response
	}
	if !t.adopt(ref, l, slot, ref.progress.resume(ref, t.header().ExpDataSN())) {
		return pdu.FunctionRejected
	}
	t.ref = ref
	return pdu.FunctionComplete
}

// adopt makes ref, a task of l, one of the connection that t came on, with the slot
// of that connection. It returns false if t advertises what does not fit.
//
// Preconditions: mu is held; the Datamover is a Reassigner.
func (t *Task) adopt(ref *Task, l *lostConn, slot *Task, at Resumption) bool {
	c := t.conn
	oldMover := ref.Mover
	ref.Mover = slot.Mover
	if err := c.dm.(Reassigner).Rebind(ref, t, at); err != nil {
		ref.Mover = oldMover
		c.freeTask(slot)
		return false
	}
	if ref.answered {
		l.answered = slices.DeleteFunc(l.answered, func(u *Task) bool { return u == ref })
		ref.kept, ref.seq = false, 0
		l.slotMu.Lock()
		ref.stored = false
		l.slotMu.Unlock()
	}
	if c.tasks.find(t.header().ReferencedTaskTag()) != ref {
		c.tasks.insert(ref)
	}
	ref.conn, ref.state, ref.bound, ref.reassigned = c, taskRunning, true, true
	ref.snackTag, ref.resumeAt = 0, uint64(at.Offset)
	c.node.stats.tasks.Add(-1) // slot itself is not used any more
	if len(l.answered) == 0 && !c.tasks.any(l.owns) {
		c.sess.drop(l)
	}
	return true
}

// answerAgain serves an ABORT TASK of a task that was answered on a connection that
// has been logged out since: if the status has not been acknowledged it is sent again,
// on this connection (section 11.5.1).
func (t *Task) answerAgain() bool {
	c, tag := t.conn, t.header().ReferencedTaskTag()
	if _, ok := c.dm.(Reassigner); !ok || !c.recovers() {
		return false
	}
	c.mu.Lock()
	lost := len(c.sess.lost) > 0 && c.tasks.find(tag) == nil
	c.mu.Unlock()
	if !lost {
		return false
	}
	slot := c.newTask()
	if slot == nil {
		return false
	}
	c.mu.Lock()
	ref, l, _ := t.awaitReassignable()
	if ref == nil || !ref.answered || ref.header().LUN() != t.header().LUN() {
		c.mu.Unlock()
		c.freeTask(slot)
		return false
	}
	ok := t.adopt(ref, l, slot, Resumption{SN: ref.progress.Next, Done: true})
	c.mu.Unlock()
	if ok {
		ref.complete()
	}
	return ok
}

// awaitReassignable finds the task that t refers to, and waits until the connection
// that it was on has let go of it. Otherwise response tells why it cannot be
// reassigned.
//
// Preconditions: mu is held.
func (t *Task) awaitReassignable() (ref *Task, of *lostConn, response byte) {
	c, s, tag := t.conn, t.conn.sess, t.header().ReferencedTaskTag()
	for !t.aborted.Load() {
		ref, of = c.tasks.find(tag), nil
		if ref != nil && !ref.isCommand() {
			return nil, nil, pdu.FunctionRejected
		}
		for _, l := range s.lost {
			i := slices.IndexFunc(l.answered, func(u *Task) bool { return u.header().ITT() == tag })
			switch {
			case ref != nil && ref.conn == l.conn:
				of = l
			case ref == nil && i >= 0:
				ref, of = l.answered[i], l
			case ref == nil && l.store.on && l.store.find(tag) != nil:
				of = l // it comes into answered
			}
		}
		switch {
		case of == nil && ref == nil:
			for _, o := range s.conns {
				if o.store.on && o.store.find(tag) != nil {
					return nil, nil, pdu.TaskStillAllegiant
				}
			}
			return nil, nil, pdu.TaskDoesNotExist
		case of == nil, !of.removed:
			return nil, nil, pdu.TaskStillAllegiant
		case ref != nil && !slices.Contains(s.conns, of.conn):
			return ref, of, pdu.FunctionComplete
		}
		c.changed.Wait()
	}
	return nil, nil, pdu.FunctionRejected
}

// resume is where t goes on. A write asks for what has not come. A read sends again
// what was not acknowledged: if the initiator acknowledges up to expDataSN, from there
// on, else from what it had acknowledged before (section 11.5.6).
func (p Progress) resume(t *Task, expDataSN uint32) (at Resumption) {
	at.Immediate = uint32(t.header().DataSegmentLength())
	if !t.header().Read() {
		at.SN = p.Next
		return at
	}
	at.SN = p.Acknowledged
	if expDataSN > at.SN && expDataSN <= p.Next {
		at.SN = expDataSN
	}
	if p.Offset != nil {
		at.Offset = p.Offset(at.SN)
	}
	return at
}

// goOn goes on with a task that was reassigned.
func (t *Task) goOn() {
	if t.begun { // parked where it wanted to fetch or to send
		waited := lun.PhaseSend
		if t.cmd.DataOut > 0 {
			waited = lun.PhaseReadWait
		}
		t.lap(waited)
	}
	switch {
	case t.finished && (t.cmd.Status != lun.StatusGood || t.cmd.DataIn == 0):
		t.complete()
	case t.finished:
		t.off = t.resumeAt
		t.read()
	case !t.begun:
		t.late = true
		t.runCommand()
	case t.cmd.DataOut > 0:
		t.write()
	default:
		t.off = t.resumeAt
		t.read()
	}
}
