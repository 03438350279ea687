package iscsi

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
)

// Connection recovery: what ErrorRecoveryLevel 2 adds (RFC 7143, sections 6.3.4, 6.3.6, 7.2.2 and
// 7.5; RFC 7145, section 10.2.2). When a connection fails, its non-immediate SCSI commands stay.
// Commands in execution run until they need the connection to send or to fetch, and are parked
// there. Time2Wait and Time2Retain later they end, unless the initiator has logged the connection
// out for recovery and has reassigned them to another connection. A reassigned task continues where
// it was: the target produces data-in again that was not acknowledged, asks for data-out that has
// not come, and sends the status, if need be again.

// keepLost gives a session of an initiator, which has lost its last connection, a place among those
// that wait for one. It returns false if the initiator has all of its places.
func (nd *Node) keepLost(initiator string) bool {
	l := nd.shared
	l.LostSessions.Add(1)
	l.LostSessionsByName.Add(initiator, 1)
	if l.LostSessionsByName.UsedBy(initiator) <= l.LostSessionsByName.Max() {
		return true
	}
	l.LostSessionsByName.Bite(initiator)
	return false
}

// foundAgain gives back the place of keepLost.
//
// Preconditions: s.shared.mu is held.
func (s *session) foundAgain() {
	s.failed = false
	s.node.shared.LostSessions.Give(1)
	s.node.shared.LostSessionsByName.Give(s.key.initiator, 1)
}

var errNoPlace = errors.New("too many sessions wait for a connection")

// makeRoom ends a session that waits for a connection if there are too many: one of the initiator
// that has most.
func (nd *Node) makeRoom() {
	l := nd.shared
	if l.LostSessions.Used() <= l.LostSessions.Max() {
		return
	}
	who := l.LostSessionsByName.Most()
	var oldest *session
	nd.mu.Lock()
	for _, s := range nd.sessions {
		s.shared.mu.Lock()
		if s.failed && !s.closed && s.key.initiator == who && (oldest == nil || s.started.Before(oldest.started)) {
			oldest = s
		}
		s.shared.mu.Unlock()
	}
	nd.mu.Unlock()
	if oldest != nil {
		l.LostSessions.Bite(who)
		oldest.close(errNoPlace)
	}
}

// waitsTooLong reports whether the initiator has made the target agree to a DefaultTime2Wait beyond
// limits.max_time2wait. The higher of both proposals counts (section 13.15), so the target can only
// refuse the login. Of DefaultTime2Retain the lower counts: see limits.
func (c *conn) waitsTooLong() bool {
	return time.Duration(c.params.DefaultTime2Wait)*time.Second > c.node.shared.MaxTime2Wait.Time()
}

// A lostConn is a connection that has failed and not been logged out yet (CLEANUP_WAIT, RFC 7143,
// section 8.2), or the tasks that a logout for recovery has left of one. Tasks without an answer
// are in the task table. shared.mu guards it.
type lostConn struct {
	conn     *conn
	removed  bool    // logged out: the tasks may be reassigned
	answered []*Task // whose status has not been acknowledged, in order of StatSN
	timer    *time.Timer
}

// recovers reports whether the session of c continues when a connection fails.
func (c *conn) recovers() bool {
	return c.params.ErrorRecoveryLevel == 2 && c.params.DefaultTime2Retain > 0
}

// retain returns how long the tasks of a lost connection stay.
func (s *session) retain() time.Duration {
	return time.Duration(uint32(s.params.DefaultTime2Wait)+uint32(s.params.DefaultTime2Retain)) * time.Second
}

// recoverable reports whether t survives its connection (section 7.14): not if it is immediate, nor
// if its CmdSN has not been acknowledged. One that another session has taken away survives as one that has
// ended.
//
// Preconditions: t.conn.mu is held.
func (t *Task) recoverable() bool {
	return t.isCommand() && !t.immediate() && !t.needsSN && (!t.aborted.Load() || t.taken)
}

// suspend parks the tasks of c. Tasks in execution follow as soon as they need c. The task except
// continues. Tasks that cannot survive are aborted.
//
// Preconditions: c.mu is held.
func (c *conn) suspend(except *Task) {
	invariant.Held(&c.mu)
	s := c.sess
	if !c.recovery.suspends.Load() {
		c.recovery.suspends.Store(true)
		l := &lostConn{conn: c}
		l.timer = time.AfterFunc(s.retain(), func() { s.expire(l) })
		if s.lost = append(s.lost, l); len(s.lost) > int(s.params.MaxConnections) {
			s.drop(s.lost[0])
		}
	}
	c.shared.terminate(func(t *Task) bool { return t != except && c.owns(t) && !t.recoverable() })
	running := false
	c.shared.tasks.each(func(t *Task) {
		if !c.owns(t) || t == except {
			return
		}
		switch t.state {
		case taskReady:
			c.ready.Remove(&t.link)
			t.parkLocked()
		case taskWaiting: // for unsolicited data; the target will ask for what has not come
			t.needsData, t.unsolicited = false, t.arrived
			c.arrange(t)
			t.parkLocked()
			if t.taken {
				t.settleParked()
			}
		case taskHeld:
			c.shared.fence.queue.Remove(&t.link)
			t.recovery.finished = true
			t.parkLocked()
		case taskRunning:
			c.budget.cancel(t)
			c.sending.cancel(t)
			running = true
		}
	})
	if running {
		c.shared.detachLater(c)
	}
	c.shared.changed.Broadcast()
	if g := c.shared.gate; g != nil {
		g.moved()
	}
}

// park parks t, which its goroutine cannot continue because its connection is lost. It returns
// false if the caller has to abandon t instead.
//
// Preconditions: the caller runs t; no GetData is outstanding.
func (t *Task) park() bool {
	c := t.conn
	c.mu.Lock()
	lost := c.recovery.suspends.Load() && t.recoverable()
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

// parkLocked parks t, which has no Buffer.
//
// Preconditions: t.conn.mu is held.
func (t *Task) parkLocked() {
	t.detach()
	t.leaveOrder() // it stops nobody while it waits for its initiator
	t.hold.Store(placeKept)
	t.become(taskParked)
	t.conn.shared.changed.Broadcast()
}

// detach takes t from its mover.
//
// Preconditions: t.conn.mu is held.
func (t *Task) detach() {
	invariant.Held(&t.conn.mu)
	if !t.bound {
		return
	}
	t.bound = false
	if r := t.conn.reassigner(); r != nil {
		t.recovery.progress = r.Detach(t)
	}
}

// settleParked makes a parked task, which another session has taken away, one whose answer remains to be
// sent on another connection.
//
// Preconditions: t.conn.mu is held.
func (t *Task) settleParked() {
	t.settle()
	t.recovery.finished = true
}

// dropParked ends a parked task.
//
// Preconditions: c.mu is held.
func (c *conn) dropParked(t *Task) {
	t.endAborted() // of a command that has failed: the backend is not called
	c.drop(t)
}

// keepAnswers takes over the answers of c, which has been closed, that the initiator has not
// acknowledged.
func (s *session) keepAnswers(c *conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.IndexFunc(s.lost, func(l *lostConn) bool { return l.conn == c })
	st := &c.recovery.store
	for sn := c.statSN - uint32(len(st.ring)); sn != c.statSN; sn++ {
		t := st.at(sn)
		if t == nil {
			continue
		}
		if i < 0 || t.fromTarget || !t.isCommand() || t.immediate() {
			c.unstore(t)
			continue
		}
		t.detach()
		st.remove(t)
		t.recovery.finished, t.recovery.answered = true, true
		s.lost[i].answered = append(s.lost[i].answered, t)
	}
	c.reopenWindow()
	c.shared.changed.Broadcast()
}

// drop ends the tasks that l has left (section 7.6, cases b and c).
//
// Preconditions: s.shared.mu is held.
func (s *session) drop(l *lostConn) {
	invariant.Held(&s.shared.mu)
	l.timer.Stop()
	s.lost = slices.DeleteFunc(s.lost, func(o *lostConn) bool { return o == l })
	s.shared.terminate(l.conn.owns)
	for _, t := range l.answered {
		s.nexus.ClearedByTransport(t.header().LUN())
		l.conn.release(t)
	}
	l.answered = nil
}

// expire ends what l has left, at the connection state timeout or when no reassignment has come in
// time. For the last lost connection that is the session timeout (section 6.3.5).
func (s *session) expire(l *lostConn) {
	s.shared.mu.Lock()
	if slices.Contains(s.lost, l) {
		s.drop(l)
	}
	s.shared.mu.Unlock()
	if c := s.anyConn(); c != nil {
		c.start(c.tellWindow)
	}
	if s.finishIdle() {
		s.reportEnd(ConnAddr{}, fmt.Sprintf("no connection came back within %v", s.retain()), true)
	}
}

// connLost handles the failure of a connection whose session continues: the target tells the
// initiator on another one (section 7.1.4.3).
func (s *session) connLost(failed *conn) {
	c := s.anyConn()
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.async(pdu.AsyncConnectionDropped, failed.cid, s.params.DefaultTime2Wait, s.params.DefaultTime2Retain)
	if t != nil {
		c.workers.Go(func() { c.sendFromTarget(t) }) // its network may be slow
	}
}

// remove logs out the lost connections with that CID for recovery (section 11.14): their tasks may
// be reassigned from now on. expStatSN acknowledges answers that they had sent.
func (s *session) remove(cid uint16, expStatSN uint32) {
	s.shared.mu.Lock()
	defer s.shared.mu.Unlock()
	for _, l := range slices.Clone(s.lost) {
		if l.conn.cid != cid || l.removed {
			continue
		}
		l.removed = true
		l.answered = slices.DeleteFunc(l.answered, func(t *Task) bool {
			acknowledged := pdu.Before(pdu.BHS(t.Header[:]).StatSN(), expStatSN)
			if acknowledged {
				l.conn.release(t)
			}
			return acknowledged
		})
		if len(l.answered) == 0 && !s.shared.tasks.any(l.conn.owns) && !slices.Contains(s.conns, l.conn) {
			s.drop(l)
			continue
		}
		l.timer.Reset(s.retain())
	}
}

// removeOther serves a Logout Request for recovery of another connection, which may be lost
// already.
func (t *Task) removeOther() {
	c, s := t.conn, t.conn.sess
	cid := t.header().CID()
	o := s.byCID(cid)
	if o == nil {
		t.respondLogout(pdu.LogoutCIDNotFound)
		return
	}
	o.shut(errLoggedOut, true)
	timer := time.NewTimer(c.opt.ReinstatementWait)
	defer timer.Stop()
	response := byte(pdu.LogoutCleanupFailed)
	select {
	case <-o.done:
		s.remove(cid, t.header().ExpStatSN())
		response = pdu.LogoutSuccess
	case <-timer.C: // a backend does not return
	case <-c.ending:
	}
	t.respondLogout(response)
}

// removeOwn serves a Logout Request for recovery of the connection that it comes on. The response
// is the last PDU there. Once the connection is closed its tasks may be reassigned.
func (t *Task) removeOwn() {
	c := t.conn
	c.mu.Lock()
	if c.phase != phaseFullFeature { // another logout was first
		c.drop(t)
		c.mu.Unlock()
		return
	}
	c.enterPhase(phaseLogout)
	c.suspend(t)
	running := func(u *Task) bool { return u != t && c.owns(u) && u.state == taskRunning }
	for c.phase == phaseLogout && c.shared.tasks.any(running) {
		c.shared.changed.Wait()
	}
	failed := t.aborted.Load() // with the connection
	c.mu.Unlock()
	if !failed {
		c.sess.remove(c.cid, t.header().ExpStatSN())
		c.timer.setLast(c.opt.LogoutWait, func() { c.stop(nil) })
	}
	t.respondLogout(pdu.LogoutSuccess)
	c.halfClose()
}

// dropUnclaimed drops lost connections without tasks when the last connection of s closes (section
// 6.3.5).
//
// Preconditions: s.shared.mu is held.
func (s *session) dropUnclaimed() {
	invariant.Held(&s.shared.mu)
	for _, l := range slices.Clone(s.lost) {
		if l.removed && len(l.answered) == 0 && !s.shared.tasks.any(l.conn.owns) {
			s.drop(l)
		}
	}
}

// byCID returns the connection with that CID that has not been logged out, or nil.
func (s *session) byCID(cid uint16) *conn {
	s.shared.mu.Lock()
	defer s.shared.mu.Unlock()
	for _, c := range s.conns {
		if c.cid == cid {
			return c
		}
	}
	for _, l := range s.lost {
		if l.conn.cid == cid && !l.removed {
			return l.conn
		}
	}
	return nil
}

// reassign serves TASK REASSIGN (sections 7.2.2 and 11.5.1). The task continues after the response.
func (t *Task) reassign() byte {
	c := t.conn
	if c.reassigner() == nil || !c.recovers() {
		return pdu.ReassignNotSupported
	}
	slot := c.newTask() // for the reassigned task
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
	if !t.adopt(ref, l, slot, ref.recovery.progress.resume(ref, t.header().ExpDataSN())) {
		return pdu.FunctionRejected
	}
	t.recovery.reassign = ref
	return pdu.FunctionComplete
}

// adopt moves ref, a task of l, to the connection that t came on, with a slot of that connection.
// It returns false if t advertises what does not fit.
//
// Preconditions: t.conn.mu is held; the Datamover is a Reassigner.
func (t *Task) adopt(ref *Task, l *lostConn, slot *Task, at Resumption) bool {
	c := t.conn
	oldMover := ref.Mover
	ref.Mover = slot.Mover
	if err := c.reassigner().Rebind(ref, t, at); err != nil {
		ref.Mover = oldMover
		c.freeTask(slot)
		return false
	}
	r := &ref.recovery
	if r.answered {
		l.answered = slices.DeleteFunc(l.answered, func(u *Task) bool { return u == ref })
		r.kept, ref.seq = false, 0
		l.conn.slots.mu.Lock()
		ref.resend.stored = false
		l.conn.slots.mu.Unlock()
	}
	if c.shared.tasks.find(t.header().ReferencedTaskTag()) != ref {
		c.shared.tasks.insert(ref)
	}
	ref.conn, ref.bound, r.reassigned = c, true, true
	ref.become(taskRunning)
	r.snackTag, r.resumeAt = 0, uint64(at.Offset)
	slot.giveStash()
	// ref uses the mover's state of slot, and slot itself is garbage.
	l.conn.slots.mu.Lock()
	l.conn.useSlots(-1)
	l.conn.slots.mu.Unlock()
	if len(l.answered) == 0 && !c.shared.tasks.any(l.conn.owns) {
		c.sess.drop(l)
	}
	return true
}

// answerAgain serves an ABORT TASK of a task that was answered on a connection that has been logged
// out since. If the status has not been acknowledged it sends it again, on this connection (section
// 11.5.1).
func (t *Task) answerAgain() bool {
	c, tag := t.conn, t.header().ReferencedTaskTag()
	if c.reassigner() == nil || !c.recovers() {
		return false
	}
	c.mu.Lock()
	lost := len(c.sess.lost) > 0 && c.shared.tasks.find(tag) == nil
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
	if ref == nil || !ref.recovery.answered || ref.header().LUN() != t.header().LUN() {
		c.mu.Unlock()
		c.freeTask(slot)
		return false
	}
	ok := t.adopt(ref, l, slot, Resumption{SN: ref.recovery.progress.Next, Done: true})
	c.mu.Unlock()
	if ok {
		ref.complete()
	}
	return ok
}

// awaitReassignable finds the task that t refers to, and waits until the connection that it was on
// has let it go. Otherwise response says why it cannot be reassigned.
//
// Preconditions: t.conn.mu is held.
func (t *Task) awaitReassignable() (ref *Task, of *lostConn, response byte) {
	c, s, tag := t.conn, t.conn.sess, t.header().ReferencedTaskTag()
	invariant.Held(&c.mu)
	for !t.aborted.Load() {
		ref, of = c.shared.tasks.find(tag), nil
		if ref != nil && !ref.isCommand() {
			return nil, nil, pdu.FunctionRejected
		}
		for _, l := range s.lost {
			i := slices.IndexFunc(l.answered, func(u *Task) bool { return u.header().ITT() == tag })
			store := &l.conn.recovery.store
			switch {
			case ref != nil && ref.conn == l.conn:
				of = l
			case ref == nil && i >= 0:
				ref, of = l.answered[i], l
			case ref == nil && store.on && store.find(tag) != nil:
				of = l // keepAnswers is about to move it to answered
			}
		}
		switch {
		case of == nil && ref == nil:
			for _, o := range s.conns {
				if o.recovery.store.on && o.recovery.store.find(tag) != nil {
					return nil, nil, pdu.TaskStillAllegiant
				}
			}
			return nil, nil, pdu.TaskDoesNotExist
		case of == nil, !of.removed:
			return nil, nil, pdu.TaskStillAllegiant
		case ref != nil && !slices.Contains(s.conns, of.conn):
			return ref, of, pdu.FunctionComplete
		}
		c.shared.changed.Wait()
	}
	return nil, nil, pdu.FunctionRejected
}

// resume returns where t continues. A write asks for what has not come. A read sends again what was
// not acknowledged: from expDataSN on if that acknowledges more, else from what was acknowledged
// before (section 11.5.6).
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

// resumeReassigned continues a task that was reassigned.
func (t *Task) resumeReassigned() {
	if t.begun { // parked where it had to fetch or to send
		waited := lun.PhaseSend
		if t.cmd.DataOut > 0 {
			waited = lun.PhaseReadWait
		}
		t.lap(waited)
	}
	r := &t.recovery
	switch {
	case r.finished && (t.cmd.Status != lun.StatusGood || t.cmd.DataIn == 0):
		t.complete()
	case !r.finished && !t.begun:
		t.waited = true
		t.runCommand()
	case !r.finished && t.cmd.DataOut > 0:
		t.write()
	default:
		t.off = r.resumeAt
		t.read()
	}
}
