package iscsi

import (
	"errors"
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun/invariant"
)

// Recovery within a connection: what ErrorRecoveryLevel 1 adds (RFC 7143, sections 7.1.4.1, 7.1.4.2
// and 11.16). RDMA needs no such recovery: data and status cannot get lost there, and a SNACK is a
// protocol error (RFC 7145, section 7.3.11).
//
// A reader of the normal case, ErrorRecoveryLevel 0, can skip this file, reassign.go and fence.go:
// the fields below are then all zero.

// connRecovery is the part of a conn that recovery and fences need. conn.mu guards it.
type connRecovery struct {
	suspends     atomic.Bool // tasks wait to be reassigned to another connection; see suspend
	store        statusStore
	acked        uint32        // highest ExpStatSN of the initiator; only with a fence
	asked        uint64        // one more than the StatSN that a fence has asked the initiator to acknowledge; 0: none
	ackedThen    uint32        // acked when it asked
	terminations []termination // see fence.go
}

// taskRecovery is the part of a Task that recovery needs. Zero in a free slot.
type taskRecovery struct {
	// Written under conn.mu.
	kept     bool // the PDU in Header has a StatSN and may have to be sent again
	snackTag uint32

	// For connection recovery, under conn.mu.
	finished   bool   // the command has ended, its data and status remain to be sent
	answered   bool   // the status was sent before: the window has moved
	reassigned bool   // continue from resumeAt
	resumeAt   uint64 // bytes of data-in that need not be sent again
	progress   Progress
	reassign   *Task // of TASK REASSIGN: continues after the response

	// Of the holder of the baton, or the goroutine that runs the task.
	isSNACK bool // the task serves the SNACK in Task.req
	gap     bool // unsolicited data was lost; the target asks for what follows
}

// resendState says who uses the slot of a task whose PDU may have to be sent again. Both flags are
// under slotPool.mu and false in a free slot.
type resendState struct {
	stored  bool        // statusStore: the PDU in Header has not been acknowledged
	sending bool        // the mover: the PDU is on its way
	refused atomic.Bool // the initiator asked again for data that is no longer kept
}

const (
	// While memory or slots are short because the initiator has not acknowledged what it was
	// sent, the target asks it to every askInterval. After Options.AckWait without an
	// acknowledgement the target gives up what it keeps.
	askInterval = 100 * time.Millisecond

	// maxKeptSegments bounds the data segments in a statusStore, in bytes: ping data and text are
	// among them.
	maxKeptSegments = 1 << 20
)

// A statusStore keeps the PDUs with a StatSN that the initiator has not acknowledged, each in the
// task slot it was sent from: Task.Header and Task.Segment are the PDU, Task.req is the request,
// the mover has the data. Such a task is out of the task table; its tag may be in use again. The
// store and the mover use the slot (Task.resend). The last of them frees it. conn.mu guards the
// store.
//
// At ErrorRecoveryLevel 0, and with RDMA at 1, on is false, nothing is kept and the other fields
// mean nothing. At level 2 the store has what can be sent again on another connection.
type statusStore struct {
	on       bool     // set by login, read-only from then on
	repeater Repeater // nil with RDMA: data is not kept
	ring     []*Task  // by the low bits of StatSN; nil: acknowledged or given up
	first    uint32   // StatSN of the first PDU that is not acknowledged
	count    int      // of tasks in ring
	bytes    int      // of their Segments
	limit    int      // from which on the window stops opening
	deferred int      // by how much it would have opened
	acks     uint64   // counts acknowledgements of status and of data
	asking   bool     // askForAcks is running
}

// openStore makes the store of a connection whose login has agreed on an ErrorRecoveryLevel above
// 0. It takes slots in addition to those of the window.
func (c *conn) openStore() {
	r, on := c.dm.(Repeater)
	if c.params.RDMAExtensions {
		r, on = nil, c.params.ErrorRecoveryLevel == 2
	}
	if !on || c.params.ErrorRecoveryLevel == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	depth := c.shared.win.depth
	slots := c.slots.max + depth
	c.slots.setMax(slots)
	c.recovery.store = statusStore{
		on: true, repeater: r,
		ring:  make([]*Task, 1<<bits.Len(uint(slots-1))),
		first: c.statSN + 1, // after the final Login Response
		limit: depth,
	}
}

// at returns the task with that StatSN, or nil.
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
	s.bytes -= len(t.Segment)
	s.forget(t)
}

// find returns the latest task with that Initiator Task Tag, or nil.
func (s *statusStore) find(itt uint32) (found *Task) {
	for _, t := range s.ring {
		if t == nil || t.fromTarget || t.header().ITT() != itt {
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
	if s.repeater != nil {
		s.repeater.Forget(t)
	}
}

// defers reports whether the window stays as it is although a command has ended, because too many
// answers are not acknowledged. It counts that, and forgetBefore makes up for it. So an initiator
// that acknowledges nothing runs out of CmdSNs before the target runs out of slots.
func (s *statusStore) defers() bool {
	if !s.on || s.count < s.limit {
		return false
	}
	s.deferred++
	return true
}

// keep puts t, whose PDU is about to be queued, into the store.
//
// Preconditions: c.mu is held; StatSN is stamped.
func (c *conn) keep(t *Task) {
	invariant.Held(&c.mu)
	s := &c.recovery.store
	if !s.on {
		return
	}
	sn := pdu.BHS(t.Header[:]).StatSN()
	place := &s.ring[sn%uint32(len(s.ring))]
	if *place != nil { // old: much has been given up since
		c.unstore(*place)
	}
	*place = t
	s.count++
	s.bytes += len(t.Segment)
	t.recovery.kept = true
	c.setUse(t, true, true)
	for s.bytes > maxKeptSegments && c.giveUpOldest() {
	}
	if s.deferred > 0 {
		c.startAsking()
	}
}

// unkeep takes back keep: SendControl has failed, and t belongs to the caller.
//
// Preconditions: c.mu is held.
func (c *conn) unkeep(t *Task) {
	invariant.Held(&c.mu)
	if !t.recovery.kept {
		return
	}
	c.recovery.store.remove(t)
	t.recovery.kept = false
	c.setUse(t, false, false)
}

// unstore takes t out of the store.
//
// Preconditions: c.mu is held; t is in the store.
func (c *conn) unstore(t *Task) {
	invariant.Held(&c.mu)
	c.recovery.store.remove(t)
	c.release(t)
}

// release frees the slot of t, whose answer will not be sent again, as soon as the mover does not
// need it.
//
// Preconditions: c.mu is held.
func (c *conn) release(t *Task) { c.endUse(t, &t.resend.stored) }

// setUse notes who uses the slot of t.
func (c *conn) setUse(t *Task, stored, sending bool) {
	c.slots.mu.Lock()
	t.resend.stored, t.resend.sending = stored, sending
	c.slots.mu.Unlock()
}

// endUse ends one of the two uses of the slot of t, stored or sending, and frees the slot after the
// last. It takes leaf locks only.
func (c *conn) endUse(t *Task, use *bool) {
	c.slots.mu.Lock()
	*use = false
	c.slots.moves++
	last := !t.resend.stored && !t.resend.sending
	c.slots.mu.Unlock()
	if last {
		c.freeTask(t)
	}
}

// keptSent does the work of Task.Sent for a task that is, or was, in the store. It takes leaf locks
// only.
func (c *conn) keptSent(t *Task) {
	c.endUse(t, &t.resend.sending)
	c.slots.freed.Broadcast() // awaitSent may wait for it
}

// forgetBefore takes an ExpStatSN.
//
// Preconditions: c.mu is held; the store is on.
func (c *conn) forgetBefore(expStatSN uint32) {
	s := &c.recovery.store
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

// reopenWindow moves the window as far as the store has room again, and tells the initiator, which
// may be waiting for just that.
//
// Preconditions: c.mu is held; the caller is one of the connection's workers.
func (c *conn) reopenWindow() {
	invariant.Held(&c.mu)
	s := &c.recovery.store
	moved := false
	for ; s.deferred > 0 && s.count < s.limit; s.deferred-- {
		c.shared.win.ended()
		moved = true
	}
	if !moved || c.phase != phaseFullFeature {
		return
	}
	c.shared.changed.Broadcast()
	c.workers.Go(func() { c.sendNOPIn(false) }) // the network may be slow
}

// forgetAll empties the store.
//
// Preconditions: the connection has ended.
func (c *conn) forgetAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unstoreAll()
	c.reopenWindow() // for other connections of the session
}

// unstoreAll takes every task out of the store.
//
// Preconditions: c.mu is held.
func (c *conn) unstoreAll() {
	for _, t := range c.recovery.store.ring {
		if t != nil {
			c.unstore(t)
		}
	}
}

// giveUpStatus makes a slot free by giveUpOldest.
func (c *conn) giveUpStatus() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.giveUpOldest()
}

// giveUpOldest removes the oldest PDU that is not on its way from the store. It returns false if all
// are on their way.
//
// Preconditions: c.mu is held.
func (c *conn) giveUpOldest() bool {
	s := &c.recovery.store
	for sn := c.statSN - uint32(len(s.ring)); sn != c.statSN; sn++ {
		t := s.at(sn)
		if t == nil {
			continue
		}
		c.slots.mu.Lock()
		sending := t.resend.sending
		c.slots.mu.Unlock()
		if !sending {
			c.unstore(t)
			return true
		}
	}
	return false
}

// wantAcks asks for acknowledgements on behalf of a task that is going to wait for memory.
func (c *conn) wantAcks() {
	if c.recovery.store.repeater == nil {
		return
	}
	c.mu.Lock()
	c.startAsking()
	c.mu.Unlock()
}

// startAsking starts askForAcks unless it is running.
//
// Preconditions: c.mu is held; the caller is one of the connection's workers.
func (c *conn) startAsking() {
	invariant.Held(&c.mu)
	if c.recovery.store.asking || c.phase != phaseFullFeature {
		return
	}
	c.recovery.store.asking = true
	c.workers.Go(c.askForAcks)
}

// askForAcks asks the initiator for acknowledgements as long as memory or slots are short. It sends
// a NOP-In that asks for an answer: the answer has an ExpStatSN. The A bit asks about data of
// commands in progress. If neither helps it gives up what is kept: a SNACK about it will be
// rejected.
func (c *conn) askForAcks() {
	acks, since := uint64(0), time.Now()
	for {
		c.sendNOPIn(true)
		select {
		case <-c.ending:
			return
		case <-time.After(askInterval):
		}
		c.mu.Lock()
		s := &c.recovery.store
		if short := s.deferred > 0 || c.budget.contended(); !short || c.phase != phaseFullFeature {
			s.asking = false
			c.mu.Unlock()
			return
		}
		if s.acks != acks {
			acks, since = s.acks, time.Now()
		} else if time.Since(since) >= c.opt.AckWait {
			since = time.Now()
			c.unstoreAll()
			c.shared.tasks.each(func(t *Task) {
				if c.owns(t) && t.bound {
					s.forget(t)
				}
			})
			c.reopenWindow()
		}
		c.mu.Unlock()
	}
}

// snacks serve a SNACK, by type (section 11.16.1): they queue what it asks for. If queued is true t
// belongs to the mover, which calls t.Sent; otherwise it is free. A reason other than 0 rejects the
// SNACK; next goes into that Reject.
var snacks = [16]func(t *Task) (queued bool, reason pdu.RejectReason, next uint32){
	pdu.SNACKData:   (*Task).resendData,
	pdu.SNACKStatus: (*Task).resendStatus,
	pdu.SNACKRData:  (*Task).resegmentData,
}

// snack takes a SNACK Request. A task of its own sends what it asks for, so that many SNACKs wait
// for slots, not in the send queue.
//
// Preconditions: c.baton is held.
func (c *conn) snack(n *Notice) {
	kind := pdu.BHS(n.BHS).SNACKType()
	switch {
	case c.recovery.store.repeater == nil: // section 11.16; RFC 7145, section 7.3.11
		c.reject(n, pdu.RejectProtocolError, unexpected)
		return
	case kind == pdu.SNACKDataACK:
		c.dataACK(n)
		return
	case snacks[kind] == nil:
		c.reject(n, pdu.RejectProtocolError, unexpected)
		return
	}
	if t := c.newTask(); t != nil {
		copy(t.req[:], n.BHS)
		t.fromTarget, t.recovery.isSNACK = true, true
		c.queueReady(t)
	}
}

// dataACK takes an acknowledgement of data (section 11.16.2).
//
// Preconditions: c.baton is held.
func (c *conn) dataACK(n *Notice) {
	h := pdu.BHS(n.BHS)
	if h.ITT() != pdu.ReservedTag || h.RunLength() != 0 {
		c.reject(n, pdu.RejectInvalidField, unexpected)
		return
	}
	if !c.recovery.store.repeater.Acknowledge(h.TTT(), h.LUN(), h.BegRun()) {
		c.reject(n, pdu.RejectInvalidDataAck, unexpected)
		return
	}
	c.mu.Lock()
	c.recovery.store.acks++
	c.mu.Unlock()
}

// runSNACK serves the SNACK in t.req.
func (t *Task) runSNACK() {
	c, h := t.conn, t.header()
	queued, reason, next := snacks[h.SNACKType()](t)
	switch {
	case reason != 0:
		t.setReject(reason, t.req[:])
		pdu.BHS(t.Header[:]).SetDataSN(next)
		c.sendFromTarget(t)
		return
	case !queued:
		c.freeTask(t)
	}
	c.dm.Flush()
}

// referenced returns the command that a SNACK is about, if its data is kept. It may have been
// answered already.
//
// Preconditions: c.mu is held.
func (c *conn) referenced(itt uint32) *Task {
	invariant.Held(&c.mu)
	t := c.shared.tasks.find(itt)
	if t == nil || !c.owns(t) {
		t = c.recovery.store.find(itt)
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
	queued, next, err := c.recovery.store.repeater.Repeat(u, t, h.BegRun(), h.RunLength())
	switch {
	case errors.Is(err, ErrNeverSent):
		return false, pdu.RejectProtocolError, next
	case errors.Is(err, ErrGivenUp):
		u.resend.refused.Store(true)
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
	s := &c.recovery.store
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
	for sn := begin; sn != begin+n; sn++ {
		if u := c.awaitSent(func() *Task { return s.at(sn) }); u != nil { // else acknowledged meanwhile
			c.resend(u)
		}
	}
	return false, 0, 0
}

// resend queues the PDU of a task in the store once more.
//
// Preconditions: c.mu is held; awaitSent has returned u.
func (c *conn) resend(u *Task) {
	c.setUse(u, true, true)
	c.stampWindow(u)
	if err := c.dm.SendControl(u); err != nil { // Receive reports the end
		c.setUse(u, true, false)
	}
}

// resegmentData serves an R-Data SNACK (section 11.16.3). It sends the data again when all queued
// data has left, and lets no other data be queued meanwhile: the initiator discards data that it
// gets before. Then comes the Response, even if it has been sent.
func (t *Task) resegmentData() (queued bool, reason pdu.RejectReason, next uint32) {
	c, h := t.conn, t.header()
	tag := h.SNACKTag()
	if h.BegRun() != 0 || h.RunLength() != 0 || tag == 0 || tag == pdu.ReservedTag {
		return false, pdu.RejectInvalidField, 0
	}
	if all := c.sendAhead(); c.sending.take(all) || c.sending.wait(t, all) {
		defer c.sending.release(all)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	u := c.awaitSent(func() *Task {
		if u := c.referenced(h.ITT()); u != nil && u.header().Read() {
			return u
		}
		return nil
	})
	if u == nil {
		return false, pdu.RejectProtocolError, 0
	}
	c.stampWindow(t)
	queued, err := c.recovery.store.repeater.Resegment(u, t)
	if err != nil {
		u.resend.refused.Store(true)
		return false, pdu.RejectSNACK, 0
	}
	u.recovery.snackTag = tag
	if u.recovery.kept {
		pdu.BHS(u.Header[:]).SetSNACKTag(tag)
		c.resend(u)
	}
	return queued, 0, 0
}

// awaitSent returns what find returns, once the PDU of that task is not on its way. It unlocks c.mu
// while it waits, and then calls find again.
//
// Preconditions: c.mu is held.
func (c *conn) awaitSent(find func() *Task) *Task {
	invariant.Held(&c.mu)
	for {
		u := find()
		if u == nil {
			return nil
		}
		c.slots.mu.Lock()
		if !u.resend.sending {
			c.slots.mu.Unlock()
			return u
		}
		c.mu.Unlock()
		for u.resend.sending {
			c.slots.freed.Wait()
		}
		c.slots.mu.Unlock()
		c.mu.Lock()
	}
}
