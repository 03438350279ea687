package iscsi

import (
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
	c.ready.push(t)
	c.mu.Unlock()
	return nil
}

// sendOwn sends a PDU that is not the answer of a task: StatSN advances unless
// it is a NOP-In. Where an initiator with RDMA could not take it, it is dropped
// (RFC 7145, section 8.1.2). The result tells whether it was sent.
func (c *conn) sendOwn(t *Task) bool {
	h := pdu.BHS(t.Header[:])
	t.unasked = t.unasked && c.dm.RDMA() // on TCP there are no receive buffers to count
	c.mu.Lock()
	room := !t.unasked || len(c.unexpected) < c.maxUnexpected()
	if !room || c.phase != phaseFullFeature {
		c.mu.Unlock()
		c.freeTask(t)
		return false
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
		c.statSN++
	}
	err := c.dm.SendControl(t)
	c.mu.Unlock()
	if err != nil {
		c.freeTask(t)
		c.end(fmt.Errorf("sending failed: %w", err))
		return false
	}
	c.dm.Flush()
	return true
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
	if len(c.unexpected) > 0 {
		c.unexpected = slices.DeleteFunc(c.unexpected, func(u unexpected) bool { return pdu.Before(u.statSN, expStatSN) })
	}
}

// pong takes the answer to a NOP-In. An unknown tag is ignored.
func (c *conn) pong(ttt uint32) {
	if ttt == pdu.ReservedTag {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unexpected = slices.DeleteFunc(c.unexpected, func(u unexpected) bool { return u.ttt == ttt })
}

// sendNOPIn sends a NOP-In that nobody asked for (RFC 7143, section 11.19): a
// ping, or news about MaxCmdSN. Without a free slot, or if the initiator could
// not take it, it is not sent.
func (c *conn) sendNOPIn(ping bool) {
	t := c.tryTask()
	if t == nil {
		return
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
	c.sendOwn(t)
}

// keepalive pings the initiator of a normal session when nothing has come from
// it for NopInterval, and gives it up when nothing has come for another
// NopTimeout. An initiator in discovery has no buffers for pings; its silence is
// bounded by the receive deadline.
func (c *conn) keepalive() {
	if c.sess.discovery {
		c.dm.SetReceiveDeadline(time.Now().Add(c.node.opt.DiscoveryTimeout))
		return
	}
	c.dm.SetReceiveDeadline(time.Time{})
	if c.node.opt.NopInterval < 0 {
		return
	}
	var heard uint64 // c.received at the last tick
	pinged := false
	var tick func()
	tick = func() {
		if !c.enter() {
			return
		}
		defer c.workers.Done()
		wait := c.node.opt.NopInterval
		switch now := c.received.Load(); {
		case now != heard:
			heard, pinged = now, false
		case pinged:
			c.end(fmt.Errorf("initiator has been silent for %v in spite of a NOP-In", c.node.opt.NopInterval+c.node.opt.NopTimeout))
			return
		default:
			pinged, wait = true, c.node.opt.NopTimeout
			defer c.sendNOPIn(true) // which may wait for the network: set the timer first
		}
		c.setTimer(wait, tick)
	}
	c.setTimer(c.node.opt.NopInterval, tick)
}

// setTimer replaces the connection's timer.
func (c *conn) setTimer(d time.Duration, f func()) {
	c.timerMu.Lock()
	defer c.timerMu.Unlock()
	if c.timer != nil {
		c.timer.Stop()
	}
	c.timer = time.AfterFunc(d, f)
}

func (c *conn) stopTimer() {
	c.timerMu.Lock()
	defer c.timerMu.Unlock()
	if c.timer != nil {
		c.timer.Stop()
	}
}

// askLogout asks the initiator of a normal session to log out within d
// (Asynchronous Message, event 1). It returns false if that cannot be asked:
// before full feature phase and in discovery, when the initiator could not take
// the message, and before it has sent its first PDU, when it may not have the
// buffers yet (RFC 7145, section 5.1.3).
func (c *conn) askLogout(d time.Duration) bool {
	if !c.enter() {
		return false
	}
	c.mu.Lock()
	ok := c.phase == phaseFullFeature && !c.sess.discovery && c.received.Load() > 0 && len(c.unexpected) < c.maxUnexpected()
	c.mu.Unlock()
	var t *Task
	if ok {
		t = c.tryTask()
	}
	if t == nil {
		c.workers.Done()
		return false
	}
	h := pdu.BHS(t.Header[:])
	h.Reset(pdu.AsyncMessage, pdu.FlagF)
	h.SetITT(pdu.ReservedTag)
	h.SetAsync(pdu.AsyncLogoutRequest, 0, 0, uint16(min((d+time.Second-1)/time.Second, 0xffff)))
	t.own, t.unasked = true, true
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

// runLogout serves a Logout Request (RFC 7143, section 11.14). All tasks are
// stopped first. Afterwards the initiator has LogoutWait to close the connection.
func (t *Task) runLogout() {
	c := t.conn
	req := t.header()
	h := pdu.BHS(t.Header[:])
	h.Reset(pdu.LogoutResp, pdu.FlagF)
	h.SetITT(req.ITT())
	h.SetTime2Wait(c.params.DefaultTime2Wait)
	h.SetTime2Retain(c.params.DefaultTime2Retain)

	reason := req.LogoutReason()
	switch {
	case reason > pdu.LogoutForRecovery, c.sess.discovery && reason != pdu.LogoutCloseSession:
		t.rejectRequest(pdu.RejectProtocolError)
		return
	case reason == pdu.LogoutForRecovery:
		h.SetResponse(pdu.LogoutRecoveryNotSupported)
		c.respond(t)
		return
	case reason == pdu.LogoutCloseConnection && req.CID() != c.cid:
		h.SetResponse(pdu.LogoutCIDNotFound)
		c.respond(t)
		return
	}

	c.mu.Lock()
	if c.phase != phaseFullFeature {
		c.drop(t)
		c.mu.Unlock()
		return
	}
	c.phase = phaseLogout
	others := func(u *Task) bool { return u != t }
	c.abortTasks(others)
	if c.callOff(others) {
		c.mu.Unlock()
		c.runReady()
		c.mu.Lock()
	}
	for c.phase == phaseLogout && c.tasks.any(others) {
		c.changed.Wait()
	}
	c.mu.Unlock()
	c.setTimer(c.node.opt.LogoutWait, func() { c.end(nil) })
	c.respond(t)
	c.halfClose()
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
