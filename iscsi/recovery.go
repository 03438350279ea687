package iscsi

import (
	"math/bits"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// Recovery within a connection: what ErrorRecoveryLevel 1 adds (RFC 7143, sections
// 7.1.4.1, 7.1.4.2 and 11.16). With RDMA there is none: data and status cannot get
// lost there, and a SNACK is a protocol error (RFC 7145, section 7.3.11).

const (
	// While memory or slots are short because the initiator has not
	// acknowledged what it was sent, it is asked to do so every askInterval. If it
	// has not acknowledged anything for Options.AckWait what is kept for it is given
	// up.
	askInterval = 100 * time.Millisecond

	// maxKeptSegments bounds the data segments in a statusStore, in octets: there
	// is ping data and text among them.
	maxKeptSegments = 1 << 20
)

// A statusStore keeps the PDUs with a StatSN that the initiator has not
// acknowledged, each in the task slot it was sent from: Task.Header and
// Task.Segment are the PDU, Task.req is the request, the mover has the data. Such
// a task is out of the task table; its tag may be in use again. The slot belongs to
// the store (Task.stored) and, as often as the PDU is on its way, to the mover
// (Task.sending); who is the last frees it. conn.mu guards the store.
//
// At ErrorRecoveryLevel 0, and with RDMA at 1, on is false, nothing is kept and the
// other fields mean nothing. At level 2 this is what can be sent again on another
// connection.
type statusStore struct {
	on       bool     // set by login, read-only from then on
	movers   Repeater // nil with RDMA: data is not kept
	ring     []*Task  // by the low bits of StatSN; nil: acknowledged or given up
	first    uint32   // StatSN of the first PDU that is not acknowledged
	count    int      // of tasks in ring
	octets   int      // of their Segments
	limit    int      // from which on the window does not open any more
	deferred int      // by how much it would have opened
	acks     uint64   // counts acknowledgements of status and of data
	asking   bool     // askForAcks is running
}

// openStore makes the store of a connection whose login has agreed on an
// ErrorRecoveryLevel above 0. The slots that it takes are beside those of the window.
func (l *login) openStore() {
	r, ok := l.dm.(Repeater)
	if l.params.RDMAExtensions {
		r, ok = nil, l.params.ErrorRecoveryLevel == 2
	}
	if !ok || l.params.ErrorRecoveryLevel == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	depth := l.win.depth
	l.slotMu.Lock()
	l.maxSlots += depth
	slots := l.maxSlots
	l.slotMu.Unlock()
	l.store = statusStore{
		on: true, movers: r,
		ring:  make([]*Task, 1<<bits.Len(uint(slots-1))),
		first: l.statSN + 1, // behind the final Login Response
		limit: depth,
	}
}

// at is the task with that StatSN, or nil.
func (s *statusStore) at(statSN uint32) *Task {
	t := s.ring[statSN%uint32(len(s.ring))]
	if t == nil || pdu.BHS(t.Header[:]).StatSN() != statSN {
		return nil
	}
	return t
}

// remove takes out t, which is in the store, and its data.
func (s *statusStore) remove(t *Task) {
	s.ring[pdu.BHS(t.Header[:]).StatSN()%uint32(len(s.ring))] = nil
	s.count--
	s.octets -= len(t.Segment)
	s.forget(t)
}

// find is the latest task with that Initiator Task Tag, or nil.
func (s *statusStore) find(itt uint32) (found *Task) {
	for _, t := range s.ring {
		if t == nil || t.own || t.header().ITT() != itt {
			continue
		}
		if found == nil || pdu.Before(pdu.BHS(found.Header[:]).StatSN(), pdu.BHS(t.Header[:]).StatSN()) {
			found = t
		}
	}
	return found
}

// forget gives back the data that is kept of t.
func (s *statusStore) forget(t *Task) {
	if s.movers != nil {
		s.movers.Forget(t)
	}
}

// defers tells whether the window stays as it is although a command has ended,
// because too many answers are not acknowledged. It counts that; forgetBefore makes
// up for it. So an initiator that acknowledges nothing runs out of CmdSNs, not we of
// slots.
func (s *statusStore) defers() bool {
	if !s.on || s.count < s.limit {
		return false
	}
	s.deferred++
	return true
}

// keep puts t, the PDU of which is about to be queued, into the store.
//
// Preconditions: mu is held; StatSN is stamped.
func (c *conn) keep(t *Task) {
	s := &c.store
	if !s.on {
		return
	}
	sn := pdu.BHS(t.Header[:]).StatSN()
	place := &s.ring[sn%uint32(len(s.ring))]
	if *place != nil { // far behind: much has been given up since
		c.unstore(*place)
	}
	*place = t
	s.count++
	s.octets += len(t.Segment)
	t.kept = true
	c.slotMu.Lock()
	t.stored, t.sending = true, true
	c.slotMu.Unlock()
	for s.octets > maxKeptSegments && c.giveUpOldest() {
	}
	if s.deferred > 0 {
		c.startAsking()
	}
}

// unkeep takes back keep: SendControl has failed, and t is the caller's.
//
// Preconditions: mu is held.
func (c *conn) unkeep(t *Task) {
	if !t.kept {
		return
	}
	c.store.remove(t)
	t.kept = false
	c.slotMu.Lock()
	t.stored, t.sending = false, false
	c.slotMu.Unlock()
}

// unstore takes t out of the store.
//
// Preconditions: mu is held; t is in the store.
func (c *conn) unstore(t *Task) {
	c.store.remove(t)
	c.release(t)
}

// release frees the slot of t, whose answer is not to be sent again, as soon as
// the mover does not need it.
//
// Preconditions: mu is held.
func (c *conn) release(t *Task) { c.free(t, &t.stored) }

// free takes away one of the two reasons to keep the slot of t, stored or sending. It
// takes leaf locks only.
func (c *conn) free(t *Task, reason *bool) {
	c.slotMu.Lock()
	*reason = false
	last := !t.stored && !t.sending
	c.slotMu.Unlock()
	if last {
		c.freeTask(t)
	}
}

// keptSent is Task.Sent of a task that is, or was, in the store. It takes leaf
// locks only.
func (c *conn) keptSent(t *Task) {
	c.free(t, &t.sending)
	c.slotFreed.Broadcast() // runRData may wait for it
}

// forgetBefore takes an ExpStatSN.
//
// Preconditions: mu is held; the store is on.
func (c *conn) forgetBefore(expStatSN uint32) {
	s := &c.store
	if !pdu.Before(s.first, expStatSN) || pdu.Before(c.statSN, expStatSN) {
		return
	}
	n := min(expStatSN-s.first, uint32(len(s.ring)))
	for sn := expStatSN - n; sn != expStatSN; sn++ {
		if t := s.at(sn); t != nil {
			c.unstore(t)
		}
	}
	s.first = expStatSN
	s.acks++
	c.reopenWindow()
}

// reopenWindow lets the window move on as far as the store has room again, and
// tells the initiator: it may be waiting for just that.
//
// Preconditions: mu is held; the caller is one of workers.
func (c *conn) reopenWindow() {
	s := &c.store
	moved := false
	for ; s.deferred > 0 && s.count < s.limit; s.deferred-- {
		c.win.ended()
		moved = true
	}
	if !moved || c.phase != phaseFullFeature {
		return
	}
	c.changed.Broadcast()
	c.workers.Add(1)
	go func() { // the network may be slow
		defer c.workers.Done()
		c.sendNOPIn(false)
	}()
}

// forgetAll empties the store.
//
// Preconditions: the connection has ended.
func (c *conn) forgetAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range c.store.ring {
		if t != nil {
			c.unstore(t)
		}
	}
	c.reopenWindow() // for other connections of the session
}

// giveUpStatus makes a slot free by giveUpOldest.
func (c *conn) giveUpStatus() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.giveUpOldest()
}

// giveUpOldest takes the oldest PDU out of the store that is not on its way. It
// tells whether there was one.
//
// Preconditions: mu is held.
func (c *conn) giveUpOldest() bool {
	for sn := c.statSN - uint32(len(c.store.ring)); sn != c.statSN; sn++ {
		t := c.store.at(sn)
		if t == nil {
			continue
		}
		c.slotMu.Lock()
		sending := t.sending
		c.slotMu.Unlock()
		if !sending {
			c.unstore(t)
			return true
		}
	}
	return false
}

// wantAcks is called by a task that is going to wait for memory.
func (c *conn) wantAcks() {
	if c.store.movers == nil {
		return
	}
	c.mu.Lock()
	c.startAsking()
	c.mu.Unlock()
}

// startAsking has the initiator asked for acknowledgements.
//
// Preconditions: mu is held; the caller is one of workers.
func (c *conn) startAsking() {
	if c.store.asking || c.phase != phaseFullFeature {
		return
	}
	c.store.asking = true
	c.workers.Add(1)
	go c.askForAcks()
}

// askForAcks asks the initiator for acknowledgements as long as memory or slots
// are short, by a NOP-In that wants an answer: the answer has an ExpStatSN. Data of
// commands that go on is asked about by the A bit. If neither helps, what is kept is
// given up: a SNACK about it will be rejected.
func (c *conn) askForAcks() {
	defer c.workers.Done()
	acks, since := uint64(0), time.Now()
	for {
		c.sendNOPIn(true)
		select {
		case <-c.ending:
			return
		case <-time.After(askInterval):
		}
		c.mu.Lock()
		s := &c.store
		if short := s.deferred > 0 || c.budget.contended(); !short || c.phase != phaseFullFeature {
			s.asking = false
			c.mu.Unlock()
			return
		}
		if s.acks != acks {
			acks, since = s.acks, time.Now()
		} else if time.Since(since) >= c.opt.AckWait {
			since = time.Now()
			for _, t := range s.ring {
				if t != nil {
					c.unstore(t)
				}
			}
			c.tasks.each(func(t *Task) {
				if c.owns(t) && t.bound {
					s.forget(t)
				}
			})
			c.reopenWindow()
		}
		c.mu.Unlock()
	}
}

// snacks serve a SNACK, by type (section 11.16.1): they queue what it asks for. queued
// tells that t is the mover's, which calls t.Sent; otherwise it is free. A reason other
// than 0 rejects the SNACK; next goes into that Reject.
var snacks = [16]func(t *Task) (queued bool, reason pdu.RejectReason, next uint32){
	pdu.SNACKData:   (*Task).resendData,
	pdu.SNACKStatus: (*Task).resendStatus,
	pdu.SNACKRData:  (*Task).resegmentData,
}

// snack takes a SNACK Request. What has to be sent is sent by a task of its own, so
// that many SNACKs wait for slots, not in the send queue.
//
// Preconditions: recvMu is held.
func (c *conn) snack(n *Notice) error {
	h := pdu.BHS(n.BHS)
	switch kind := h.SNACKType(); {
	case c.store.movers == nil: // section 11.16; RFC 7145, section 7.3.11
		return c.reject(n, pdu.RejectProtocolError, unasked)
	case kind == pdu.SNACKDataACK:
		return c.dataACK(n)
	case snacks[kind] == nil:
		return c.reject(n, pdu.RejectProtocolError, unasked)
	}
	t := c.newTask()
	if t == nil {
		return nil
	}
	copy(t.req[:], n.BHS)
	t.own, t.snack = true, true
	c.mu.Lock()
	c.ready.Push(t, &t.link)
	c.mu.Unlock()
	return nil
}

// dataACK takes an acknowledgement of data (section 11.16.2).
//
// Preconditions: recvMu is held.
func (c *conn) dataACK(n *Notice) error {
	h := pdu.BHS(n.BHS)
	if h.ITT() != pdu.ReservedTag || h.RunLength() != 0 {
		return c.reject(n, pdu.RejectInvalidField, unasked)
	}
	if !c.store.movers.Acknowledge(h.TTT(), h.LUN(), h.BegRun()) {
		return c.reject(n, pdu.RejectInvalidDataAck, unasked)
	}
	c.mu.Lock()
	c.store.acks++
	c.mu.Unlock()
	return nil
}

// runSNACK serves the SNACK in t.req.
func (t *Task) runSNACK() {
	c, h := t.conn, t.header()
	queued, reason, next := snacks[h.SNACKType()](t)
	switch {
	case reason != 0:
		r := pdu.BHS(t.Header[:])
		r.Reset(pdu.Reject, pdu.FlagF)
		r.SetReason(reason)
		r.SetITT(pdu.ReservedTag)
		r.SetDataSN(next)
		t.Segment = append(t.scratch[:0], t.req[:]...)
		c.sendOwn(t)
		return
	case !queued:
		c.freeTask(t)
	}
	c.dm.Flush()
}

// referenced finds the command that a SNACK is about, which may have been answered
// already, if its data is kept.
//
// Preconditions: mu is held.
func (c *conn) referenced(itt uint32) *Task {
	t := c.tasks.find(itt)
	if t == nil || !c.owns(t) {
		t = c.store.find(itt)
	}
	if t == nil || !t.isCommand() || !t.bound {
		return nil
	}
	return t
}

// resendData serves a Data/R2T SNACK.
func (t *Task) resendData() (queued bool, reason pdu.RejectReason, next uint32) {
	c, h := t.conn, t.header()
	c.mu.Lock()
	defer c.mu.Unlock()
	u := c.referenced(h.ITT())
	if u == nil {
		return false, pdu.RejectProtocolError, 0
	}
	c.stampWindow(t)
	queued, next, err := c.store.movers.Repeat(u, t, h.BegRun(), h.RunLength())
	switch err {
	case ErrNeverSent:
		return false, pdu.RejectProtocolError, next
	case ErrGivenUp:
		u.snackRefused.Store(true)
		return false, pdu.RejectSNACK, 0
	}
	return queued, 0, 0
}

// resendStatus serves a Status SNACK.
func (t *Task) resendStatus() (queued bool, reason pdu.RejectReason, next uint32) {
	c, h := t.conn, t.header()
	if h.ITT() != pdu.ReservedTag {
		return false, pdu.RejectInvalidField, 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &c.store
	begin, n := h.BegRun(), h.RunLength()
	if begin == 0 && n == 0 {
		begin = s.first
	}
	sent := c.statSN - begin // from begin on
	if n == 0 {
		n = sent
	}
	if pdu.Before(begin, s.first) || pdu.Before(c.statSN, begin) || n > sent || n == 0 && s.first != begin {
		return false, pdu.RejectProtocolError, 0
	}
	for sn := begin; sn != begin+n; sn++ {
		if s.at(sn) == nil {
			return false, pdu.RejectSNACK, 0
		}
	}
	for sn := begin; sn != begin+n; {
		u := s.at(sn)
		switch {
		case u == nil: // acknowledged meanwhile
		case c.awaitSent(u):
			c.resend(u)
		default:
			c.mu.Lock()
			continue
		}
		sn++
	}
	return false, 0, 0
}

// resend queues the PDU of a task in the store once more.
//
// Preconditions: mu is held, and awaitSent has returned true.
func (c *conn) resend(u *Task) {
	c.slotMu.Lock()
	u.sending = true
	c.slotMu.Unlock()
	c.stampWindow(u)
	if err := c.dm.SendControl(u); err != nil { // Receive reports the end
		c.slotMu.Lock()
		u.sending = false
		c.slotMu.Unlock()
	}
}

// resegmentData serves an R-Data SNACK (section 11.16.3). The data is sent again when
// all that is queued has left, and no other data is queued meanwhile: the initiator
// discards what it gets before. Then comes the Response, also if it has been sent.
func (t *Task) resegmentData() (queued bool, reason pdu.RejectReason, next uint32) {
	c, h := t.conn, t.header()
	tag := h.SNACKTag()
	if h.BegRun() != 0 || h.RunLength() != 0 || tag == 0 || tag == pdu.ReservedTag {
		return false, pdu.RejectInvalidField, 0
	}
	if all := c.sendAhead(); c.sending.take(all) || c.sending.wait(t, all) {
		defer c.sending.release(all)
	}
	for {
		c.mu.Lock()
		u := c.referenced(h.ITT())
		if u == nil || !u.header().Read() {
			c.mu.Unlock()
			return false, pdu.RejectProtocolError, 0
		}
		if !c.awaitSent(u) {
			continue
		}
		c.stampWindow(t)
		queued, err := c.store.movers.Resegment(u, t)
		if err != nil {
			u.snackRefused.Store(true)
			c.mu.Unlock()
			return false, pdu.RejectSNACK, 0
		}
		u.snackTag = tag
		if u.kept {
			pdu.BHS(u.Header[:]).SetSNACKTag(tag)
			c.resend(u)
		}
		c.mu.Unlock()
		return queued, 0, 0
	}
}

// awaitSent returns false, without mu, after it has waited for the PDU of u to
// leave, and true if there was nothing to wait for.
//
// Preconditions: mu is held.
func (c *conn) awaitSent(u *Task) bool {
	c.slotMu.Lock()
	if !u.sending {
		c.slotMu.Unlock()
		return true
	}
	c.mu.Unlock()
	defer c.slotMu.Unlock()
	for u.sending {
		c.slotFreed.Wait()
	}
	return false
}

// sendAhead is how many octets of data wait to be sent at a time.
func (c *conn) sendAhead() int { return max(sendAhead, c.piece) }
