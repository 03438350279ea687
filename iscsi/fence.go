package iscsi

import (
	"slices"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun/invariant"
)

// A fence keeps the order of responses in a session of several connections with
// TaskReporting=ResponseFence or FastAbort (RFC 7143, section 4.2.2.3.3). The target sends a fenced
// response when the initiator has acknowledged all that was sent before on any of its connections,
// and the next response when the initiator has acknowledged the fenced one.
//
// The RFC asks for that within a logical unit. Here it holds for the session: fences are rare.
// shared.mu guards it.
type fence struct {
	fastAbort bool // TaskReporting=FastAbort

	queue  taskQueue // responses that wait, in the order in which they will be sent
	conn   *conn     // where the last fenced response was sent, until that is acknowledged
	statSN uint32    // of that

	// The fenced response at the head of queue, by Task.seq, and the StatSN that each connection had
	// reached when it came there. What is sent later does not hold it up.
	head   uint64
	before map[*conn]uint32
}

// Values of TaskReporting that ask for more than RFC 3720 did (section 13.23).
const (
	responseFence = "ResponseFence"
	fastAbort     = "FastAbort"
)

// newFence returns nil if the session has not agreed on fences.
func newFence(p Params) *fence {
	if p.TaskReporting != responseFence && p.TaskReporting != fastAbort {
		return nil
	}
	return &fence{fastAbort: p.TaskReporting == fastAbort}
}

// isFast reports whether the session has agreed on FastAbort. f may be nil.
func (f *fence) isFast() bool { return f != nil && f.fastAbort }

// loggedInConns returns the connections on which responses are sent and acknowledged: not those
// after a logout.
//
// Preconditions: s.shared.mu is held.
func (s *session) loggedInConns() []*conn {
	return slices.DeleteFunc(slices.Clone(s.conns), func(c *conn) bool { return c.phase != phaseFullFeature })
}

// holdBack queues the response of t if there is a fence before it, or if it is one itself. The
// caller calls releaseHeld next.
//
// Preconditions: c.mu is held; the session has a fence.
func (c *conn) holdBack(t *Task) bool {
	f := c.shared.fence
	if !t.isCommand() && t.header().Opcode() != pdu.TaskMgmtReq {
		return false
	}
	if f.conn == nil && f.queue.Empty() && (!t.isFence || len(c.sess.loggedInConns()) == 1) {
		return false
	}
	if t.isCommand() {
		t.leaveOrder() // only its response is left
	}
	t.become(taskHeld)
	f.queue.Push(t, &t.link)
	return true
}

// releaseHeld sends the responses that no fence holds back any longer, and pings connections whose
// acknowledgement the fence awaits. It does not wait.
//
// Preconditions: s.shared.mu is not held; the session has a fence.
func (s *session) releaseHeld() {
	s.shared.mu.Lock()
	sent, awaited := s.releaseHeldLocked()
	s.shared.mu.Unlock()
	for _, c := range sent { // their networks may be slower than the caller's
		c.start(c.dm.Flush)
	}
	for _, c := range awaited {
		c.start(func() {
			if !c.sendNOPIn(true) {
				c.mu.Lock()
				c.recovery.asked = 0 // once the initiator has taken others
				c.mu.Unlock()
			}
		})
	}
}

// awaits reports whether c has not acknowledged all before statSN. If it has not been asked to, it
// is appended to ask.
//
// Preconditions: c.mu is held.
func (c *conn) awaits(statSN uint32, ask []*conn) (bool, []*conn) {
	r := &c.recovery
	if !pdu.Before(r.acked, statSN) {
		return false, ask
	}
	if key := uint64(statSN) + 1; r.asked != key {
		r.asked, r.ackedThen = key, r.acked
		ask = append(ask, c)
	}
	return true, ask
}

// releaseHeldLocked queues the responses that can be sent. It returns the connections on which it
// has queued some, and those that have to acknowledge and have not been asked.
//
// Preconditions: s.shared.mu is held.
func (s *session) releaseHeldLocked() (sent, awaited []*conn) {
	invariant.Held(&s.shared.mu)
	f := s.shared.fence
	for {
		conns := s.loggedInConns()
		if f.conn != nil && slices.Contains(conns, f.conn) {
			var waits bool
			if waits, awaited = f.conn.awaits(f.statSN+1, awaited); waits {
				break
			}
		}
		f.conn = nil
		t := f.queue.Front()
		if t == nil {
			break
		}
		fenced := t.isFence && len(conns) > 1 // section 4.2.2.3.3, a)
		if fenced && f.mustWait(t, conns, &awaited) {
			break
		}
		f.queue.Pop()
		c := t.conn
		if fenced {
			f.conn, f.statSN = c, c.statSN
		}
		c.leave(t)
		if c.sendStatus(t) == nil && !slices.Contains(sent, c) { // an error has ended the connection
			sent = append(sent, c)
		}
	}
	return sent, awaited
}

// mustWait reports whether t, the fenced response at the head of the queue, waits for the
// acknowledgement of what was sent before it came there (section 4.2.2.3.3, b). Connections that
// have not been asked are appended to ask.
//
// Preconditions: shared.mu is held.
func (f *fence) mustWait(t *Task, conns []*conn, ask *[]*conn) (wait bool) {
	if f.head != t.seq {
		f.head, f.before = t.seq, map[*conn]uint32{}
		for _, c := range conns {
			f.before[c] = c.statSN
		}
	}
	for _, c := range conns {
		if statSN, ok := f.before[c]; ok { // else it has joined since
			var waits bool
			waits, *ask = c.awaits(statSN, *ask)
			wait = wait || waits
		}
	}
	return wait
}

// acknowledgeStatus takes an ExpStatSN in a session with a fence.
//
// Preconditions: c.mu is held; the caller is one of the connection's workers.
func (c *conn) acknowledgeStatus(expStatSN uint32) {
	invariant.Held(&c.mu)
	r := &c.recovery
	if !pdu.Before(r.acked, expStatSN) || pdu.Before(c.statSN, expStatSN) {
		return
	}
	r.acked = expStatSN
	if len(r.terminations) > 0 {
		c.tellTerminations()
	}
	if f := c.shared.fence; f.conn != nil || !f.queue.Empty() {
		c.workers.Go(c.sess.releaseHeld)
	}
}

// askAgain asks the initiator again for the acknowledgement that a fence awaits, if the answer to a ping has acknowledged
// less, but more than before: nothing else may ever make it say more.
//
// Preconditions: c.mu is held; the caller is one of the connection's workers; the session has a fence.
func (c *conn) askAgain() {
	invariant.Held(&c.mu)
	r := &c.recovery
	if r.asked == 0 || r.acked == r.ackedThen || !pdu.Before(r.acked, uint32(r.asked-1)) {
		return
	}
	r.asked = 0
	c.workers.Go(c.sess.releaseHeld)
}

// A termination is the news that the tasks of a logical unit on one connection have been aborted
// (Asynchronous Message, event 5). The initiator answers with a NOP-Out, and then sends no more
// data for them (sections 4.2.3.4 and 11.9.1).
type termination struct {
	lun    [8]byte
	told   bool
	statSN uint32 // of the message
}

// announce sends the message that the tasks that match selects will be aborted, if the initiator has
// agreed on FastAbort: on each of their connections except one.
//
// Preconditions: s.shared.mu is held.
func (s *session) announce(match func(*Task) bool, except *conn) {
	invariant.Held(&s.shared.mu)
	if !s.shared.fence.isFast() {
		return
	}
	var to []*conn
	s.shared.tasks.each(func(t *Task) {
		c := t.conn
		if !match(t) || t.aborted.Load() || c == except || c.phase != phaseFullFeature {
			return
		}
		lun, list := t.header().LUN(), &c.recovery.terminations
		i := slices.IndexFunc(*list, func(x termination) bool { return x.lun == lun })
		if i < 0 {
			*list = append(*list, termination{lun: lun})
		} else if (*list)[i].told = false; slices.Contains(to, c) {
			return
		}
		to = append(to, c)
	})
	slices.SortFunc(to, func(a, b *conn) int { return int(a.cid) - int(b.cid) })
	for _, c := range slices.Compact(to) {
		c.tellTerminations()
	}
}

// tellTerminations queues the messages that the initiator has not been sent yet, as far as it can
// take them. The rest follows when it has acknowledged some. Another goroutine sends them.
//
// Preconditions: c.mu is held; the connection has not ended, or the caller is one of its workers.
func (c *conn) tellTerminations() {
	invariant.Held(&c.mu)
	queued := false
	for i := range c.recovery.terminations {
		x := &c.recovery.terminations[i]
		if x.told {
			continue
		}
		t := c.async(pdu.AsyncTaskTermination, 0, 0, 0)
		if t == nil {
			break
		}
		pdu.BHS(t.Header[:]).SetLUN(x.lun)
		statSN := c.statSN
		if ok, err := c.queueFromTarget(t); !ok || err != nil {
			break
		}
		x.told, x.statSN, queued = true, statSN, true
	}
	if queued {
		c.workers.Go(c.dm.Flush) // its network may be slower than the caller's
	}
}

// takeTerminationAnswer takes a NOP-Out that is no ping. It may be the answer to a message about
// the tasks of a LUN: the data that they wait for does not come, and what they have is free.
func (c *conn) takeTerminationAnswer(h pdu.BHS) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := &c.recovery.terminations
	i := slices.IndexFunc(*list, func(x termination) bool {
		return x.lun == h.LUN() && x.told && pdu.Before(x.statSN, h.ExpStatSN())
	})
	if i < 0 {
		return
	}
	*list = slices.Delete(*list, i, i+1)
	c.shared.callOff(func(t *Task) bool { return t.conn == c && t.header().LUN() == h.LUN() })
	c.tellTerminations()
}
