package iscsi

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// Whether a Reject stands in for the answer to a request, for which the
// initiator has a receive buffer, or was not to be foreseen by the initiator
// and counts as unexpected (RFC 7145, section 8.1).
const (
	inAnswer = false
	unasked  = true
)

// reject queues a Reject of the PDU in n (RFC 7143, section 11.17). It carries
// the whole header of that PDU, or the BHS alone if there is no room for more.
// The error is always nil; it lets a caller end with reject.
//
// Preconditions: recvMu is held.
func (c *conn) reject(n *Notice, reason pdu.RejectReason, unexpected bool) error {
	t := c.newTask()
	if t == nil {
		return nil
	}
	h := pdu.BHS(t.Header[:])
	h.Reset(pdu.Reject, pdu.FlagF)
	h.SetReason(reason)
	h.SetITT(pdu.ReservedTag)
	t.Segment = append(t.scratch[:0], n.BHS...)
	if len(n.BHS)+len(n.AHS) <= len(t.scratch) {
		t.Segment = append(t.Segment, n.AHS...)
	}
	t.own, t.unasked = true, unexpected
	c.mu.Lock()
	c.ready.Push(t, &t.link)
	c.mu.Unlock()
	return nil
}

// sendOwn sends a PDU that is not the answer of a task: StatSN advances unless
// it is a NOP-In. The result tells whether it was sent. An initiator with RDMA may
// have no room for it (RFC 7145, section 8.1.2). The last place is for a ping, the
// answer to which makes room, or for the last words: until then one other PDU is
// held back, and what comes beyond that is dropped.
func (c *conn) sendOwn(t *Task) bool {
	c.mu.Lock()
	if c.held == nil && c.phase == phaseFullFeature && !c.hasRoom(t) && !takesLast(pdu.BHS(t.Header[:])) {
		c.held = t
		c.mu.Unlock()
		c.sendNOPIn(true)
		return false
	}
	ok, err := c.queueOwn(t)
	c.mu.Unlock()
	if err != nil {
		c.end(fmt.Errorf("sending failed: %w", err))
	}
	if ok {
		c.dm.Flush()
	}
	return ok
}

// hasRoom tells whether the initiator can take a PDU of ours.
//
// Preconditions: mu is held.
func (c *conn) hasRoom(t *Task) bool {
	t.unasked = t.unasked && c.dm.RDMA() // on TCP there are no receive buffers to count
	limit := c.maxUnexpected()
	if !takesLast(pdu.BHS(t.Header[:])) {
		limit--
	}
	return !t.unasked || len(c.unexpected) < limit
}

// queueOwn is sendOwn up to the queue of the mover, and holds nothing back. An error
// ends the connection.
//
// Preconditions: mu is held.
func (c *conn) queueOwn(t *Task) (ok bool, err error) {
	h := pdu.BHS(t.Header[:])
	if !c.hasRoom(t) || c.phase != phaseFullFeature {
		c.freeTask(t)
		return false, nil
	}
	if t.unasked {
		u := unexpected{statSN: c.statSN, ttt: pdu.ReservedTag}
		if h.Opcode() == pdu.NOPIn {
			u.ttt = h.TTT()
		}
		c.unexpected = append(c.unexpected, u)
	}
	c.stamp(t)
	if h.Opcode() != pdu.NOPIn {
		c.keep(t)
		c.statSN++
	}
	if err := c.dm.SendControl(t); err != nil {
		c.unkeep(t)
		c.freeTask(t)
		return false, err
	}
	return true, nil
}

// takesLast tells whether an unexpected PDU may be the last one that the initiator
// has room for: a ping, or that this is the end of the connection.
func takesLast(h pdu.BHS) bool {
	switch h.Opcode() {
	case pdu.NOPIn:
		return h.TTT() != pdu.ReservedTag
	case pdu.AsyncMessage:
		return h.AsyncEvent() == pdu.AsyncConnectionDropped || h.AsyncEvent() == pdu.AsyncSessionDropped
	}
	return false
}

// maxUnexpected is how many unexpected PDUs may be outstanding.
func (c *conn) maxUnexpected() int {
	if n := c.params.MaxOutstandingUnexpectedPDUs; n > 0 {
		return int(min(n, maxUnexpected))
	}
	return maxUnexpected
}

// acknowledge takes the ExpStatSN of a PDU of the initiator.
//
// Preconditions: mu is held.
func (c *conn) acknowledge(expStatSN uint32) {
	if c.store.on {
		c.forgetBefore(expStatSN)
	}
	if len(c.unexpected) > 0 {
		c.retire(func(u unexpected) bool { return pdu.Before(u.statSN, expStatSN) })
	}
	if c.fence != nil {
		c.acknowledgeStatus(expStatSN)
	}
}

// pong takes the answer to a NOP-In. An unknown tag is ignored.
func (c *conn) pong(ttt uint32) {
	if ttt == pdu.ReservedTag {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.retire(func(u unexpected) bool { return u.ttt == ttt })
}

// retire forgets unexpected PDUs that the initiator has taken. There may be room
// now for what could not be sent before.
//
// Preconditions: mu is held; the caller keeps finish waiting.
func (c *conn) retire(taken func(unexpected) bool) {
	n := len(c.unexpected)
	c.unexpected = slices.DeleteFunc(c.unexpected, taken)
	switch t := c.held; {
	case t != nil && len(c.unexpected) < c.maxUnexpected()-1:
		c.held = nil
		c.workers.Add(1)
		go func() {
			defer c.workers.Done()
			c.sendOwn(t)
		}()
	case len(c.unexpected) < n && c.windowNews():
		c.workers.Add(1)
		go func() {
			defer c.workers.Done()
			c.tellWindow()
		}()
	}
}

// windowNews tells whether MaxCmdSN has moved while there is nothing on its way
// that will carry it (RFC 7143, section 11.4.11).
//
// Preconditions: mu is held.
func (c *conn) windowNews() bool {
	return c.win.told != c.win.max && c.phase == phaseFullFeature && !c.sess.discovery && !c.tasks.any(func(t *Task) bool { return t.state != taskParked })
}

// tellWindow sends a NOP-In if there is news about MaxCmdSN that nothing else
// will carry: to be called when tasks have ended without a response. With RDMA an
// answer is wanted, because it frees the receive buffer. Tasks that end at the same
// time say it once: who is here already, and may wait for the network, says it for all.
func (c *conn) tellWindow() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.telling {
		return
	}
	c.telling = true
	for c.windowNews() {
		news := c.win.max
		c.mu.Unlock()
		sent := c.sendNOPIn(c.dm.RDMA())
		c.mu.Lock()
		if !sent && news == c.win.max {
			break
		}
	}
	c.telling = false
}

// tellWindowAside is tellWindow on another goroutine: the network may be slow.
func (c *conn) tellWindowAside() {
	if !c.enter() {
		return
	}
	go func() {
		defer c.workers.Done()
		c.tellWindow()
	}()
}

// sendNOPIn sends a NOP-In that nobody asked for (RFC 7143, section 11.19): a
// ping, or news about MaxCmdSN. Without a free slot, or if the initiator could
// not take it, it is not sent, and the result is false.
func (c *conn) sendNOPIn(ping bool) bool {
	t := c.tryTask()
	if t == nil {
		return false
	}
	h := pdu.BHS(t.Header[:])
	h.Reset(pdu.NOPIn, pdu.FlagF)
	h.SetITT(pdu.ReservedTag)
	h.SetTTT(pdu.ReservedTag)
	if ping {
		c.mu.Lock()
		if c.ping++; c.ping == pdu.ReservedTag {
			c.ping = 0
		}
		h.SetTTT(c.ping)
		c.mu.Unlock()
	}
	t.own, t.unasked = true, true
	return c.sendOwn(t)
}

// keepalive pings the initiator of a normal session when nothing has come from
// it for NopInterval, and gives it up when nothing has come for another
// NopTimeout. Data that it takes counts, too: who is busy receiving is not silent,
// and our ping may be behind that data. An initiator in discovery has no buffers for pings; its silence is
// bounded by the receive deadline.
func (c *conn) keepalive() {
	if c.sess.discovery {
		c.dm.SetReceiveDeadline(time.Now().Add(c.opt.DiscoveryTimeout))
		c.watchDiscovery()
		return
	}
	c.dm.SetReceiveDeadline(time.Time{})
	if c.opt.NopInterval < 0 {
		return
	}
	var heard uint64 // c.received and c.sending.done at the last tick
	pinged := false
	var tick func()
	tick = func() {
		if !c.enter() {
			return
		}
		defer c.workers.Done()
		wait := c.opt.NopInterval
		switch now := c.received.Load() + c.sending.done.Load(); {
		case now != heard:
			heard, pinged = now, false
		case pinged:
			c.end(fmt.Errorf("initiator has been silent for %v in spite of a NOP-In", c.opt.NopInterval+c.opt.NopTimeout))
			return
		default:
			pinged, wait = true, c.opt.NopTimeout
			defer c.sendNOPIn(true) // which may wait for the network: set the timer first
		}
		c.setTimer(wait, tick)
	}
	c.setTimer(c.opt.NopInterval, tick)
}

// watchDiscovery ends a discovery session from which nothing comes although nobody waits
// for it: an initiator that takes no answers has used up the slots.
func (c *conn) watchDiscovery() {
	heard := ^uint64(0) // c.received at the last tick
	var tick func()
	tick = func() {
		if !c.enter() {
			return
		}
		defer c.workers.Done()
		now := c.received.Load()
		if now == heard {
			c.end(fmt.Errorf("initiator has taken no answer for %v", c.opt.DiscoveryTimeout))
			return
		}
		heard = now
		c.setTimer(c.opt.DiscoveryTimeout, tick)
	}
	c.setTimer(c.opt.DiscoveryTimeout, tick)
}

// setTimer replaces the connection's timer, but not that of lastTimer.
func (c *conn) setTimer(d time.Duration, f func()) {
	c.timerMu.Lock()
	defer c.timerMu.Unlock()
	if c.lastWait {
		return
	}
	if c.timer != nil {
		c.timer.Stop()
	}
	c.timer = time.AfterFunc(d, f)
}

// lastTimer has f called when the initiator has had LogoutWait to close the
// connection. A keepalive that is due at that moment does not replace it.
func (c *conn) lastTimer(f func()) {
	c.timerMu.Lock()
	defer c.timerMu.Unlock()
	if c.timer != nil {
		c.timer.Stop()
	}
	c.timer, c.lastWait = time.AfterFunc(c.opt.LogoutWait, f), true
}

func (c *conn) stopTimer() {
	c.timerMu.Lock()
	defer c.timerMu.Unlock()
	if c.timer != nil {
		c.timer.Stop()
	}
}

// askLogout asks the initiator of a normal session to log out within d
// (Asynchronous Message, event 1). It returns false if that cannot be asked.
func (c *conn) askLogout(d time.Duration) bool {
	if !c.enter() {
		return false
	}
	c.mu.Lock()
	room := len(c.unexpected) < c.maxUnexpected()
	c.mu.Unlock()
	var t *Task
	if room {
		t = c.async(pdu.AsyncLogoutRequest, 0, 0, uint16(min((d+time.Second-1)/time.Second, 0xffff)))
	}
	if t == nil {
		c.workers.Done()
		return false
	}
	go func() { // sending may wait for a peer that does not read
		defer c.workers.Done()
		c.sendOwn(t)
	}()
	return true
}

// runNOP answers a ping with its data, as far as the initiator can take it
// (RFC 7143, section 11.19; RFC 7145, section 6.2).
func (t *Task) runNOP() {
	h := pdu.BHS(t.Header[:])
	h.Reset(pdu.NOPIn, pdu.FlagF)
	h.SetLUN(t.header().LUN())
	h.SetITT(t.header().ITT())
	h.SetTTT(pdu.ReservedTag)
	t.Segment = t.data[:min(len(t.data), t.conn.dm.MaxSendSegment())]
	t.conn.respond(t)
}

var errLoggedOut = errors.New("logged out on another connection")

// runLogout serves a Logout Request (RFC 7143, section 11.14). All tasks that it
// takes along are stopped first. Afterwards the initiator has LogoutWait to close
// the connection.
func (t *Task) runLogout() {
	c := t.conn
	reason := t.header().LogoutReason()
	switch {
	case reason > pdu.LogoutForRecovery, c.sess.discovery && reason != pdu.LogoutCloseSession:
		t.rejectRequest(pdu.RejectProtocolError)
		return
	case reason == pdu.LogoutForRecovery && !c.recovers():
		t.respondLogout(pdu.LogoutRecoveryNotSupported)
		return
	case reason == pdu.LogoutForRecovery && t.header().CID() == c.cid:
		t.removeOwn()
		return
	case reason == pdu.LogoutForRecovery:
		t.removeOther()
		return
	case reason == pdu.LogoutCloseConnection && t.header().CID() != c.cid:
		t.logoutOther()
		return
	}

	c.mu.Lock()
	if c.phase != phaseFullFeature { // another logout was first
		c.drop(t)
		c.mu.Unlock()
		return
	}
	leaving := []*conn{c}
	if reason == pdu.LogoutCloseSession {
		leaving = c.sess.closeLocked()
	}
	for _, o := range leaving {
		if o.phase == phaseFullFeature {
			o.phase = phaseLogout
		}
	}
	covered := func(u *Task) bool { return u != t && (u.conn == c || reason == pdu.LogoutCloseSession) }
	c.terminate(covered)
	c.callOff(covered)
	for c.phase == phaseLogout && c.tasks.any(covered) {
		c.changed.Wait()
	}
	if len(c.sess.conns) == 1 {
		c.sess.closure()
	}
	c.mu.Unlock()
	for _, o := range leaving {
		if o != c {
			o.stop(errLoggedOut)
		}
	}
	c.lastTimer(func() { c.end(nil) })
	t.respondLogout(pdu.LogoutSuccess)
	c.halfClose()
}

// logoutOther closes another connection of the session, the one with the CID of
// the Logout Request.
func (t *Task) logoutOther() {
	s := t.conn.sess
	o := s.byCID(t.header().CID())
	if o == nil {
		t.respondLogout(pdu.LogoutCIDNotFound)
		return
	}
	o.stop(errLoggedOut)
	s.mu.Lock()
	if i := slices.IndexFunc(s.lost, func(l *lostConn) bool { return l.conn == o }); i >= 0 {
		s.drop(s.lost[i])
	}
	for slices.Contains(s.conns, o) && !t.aborted.Load() {
		s.changed.Wait()
	}
	s.mu.Unlock()
	t.respondLogout(pdu.LogoutSuccess)
}

// respondLogout sends the Logout Response.
func (t *Task) respondLogout(response byte) {
	c := t.conn
	h := pdu.BHS(t.Header[:])
	h.Reset(pdu.LogoutResp, pdu.FlagF)
	h.SetResponse(response)
	h.SetITT(t.header().ITT())
	h.SetTime2Wait(c.params.DefaultTime2Wait)
	h.SetTime2Retain(c.params.DefaultTime2Retain)
	c.respond(t)
}

// halfClose ends our direction of a TCP connection when the last word has been
// said. With RDMA the initiator has to close first: a FIN that comes with a
// Send can overtake it inside siw.
func (c *conn) halfClose() {
	if !c.dm.RDMA() {
		c.dm.CloseWrite() // if that fails Receive, or the timer, ends the connection
	}
}

// rejectRequest answers the request of t with a Reject instead of a response.
func (t *Task) rejectRequest(reason pdu.RejectReason) {
	h := pdu.BHS(t.Header[:])
	h.Reset(pdu.Reject, pdu.FlagF)
	h.SetReason(reason)
	h.SetITT(pdu.ReservedTag)
	t.Segment = append(t.scratch[:0], t.req[:]...)
	t.conn.respond(t)
}
