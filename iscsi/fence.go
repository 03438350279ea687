package iscsi

import (
	"slices"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// A fence keeps the order of responses in a session of several connections with
// TaskReporting=ResponseFence or FastAbort (RFC 7143, section 4.2.2.3.3). A fenced
// response is sent when the initiator has acknowledged all that was sent before on
// any of its connections, and the next one when that has been acknowledged, too.
//
// The RFC asks for that within a logical unit. Here it holds for the session: fences
// are rare. Guarded by the mutex of shared.
type fence struct {
	fastAbort bool // TaskReporting=FastAbort

	queue  taskQueue // responses that wait, in the order in which they are to be sent
	conn   *conn     // where the last fenced response was sent, until that is acknowledged
	statSN uint32    // of that
	asked  bool      // for the acknowledgements that are awaited now
}

// Values of TaskReporting that ask for more than RFC 3720 did (section 13.23).
const (
	responseFence = "ResponseFence"
	fastAbort     = "FastAbort"
)

// newFence is nil if the session has not agreed on fences.
func newFence(p Params) *fence {
	if p.TaskReporting != responseFence && p.TaskReporting != fastAbort {
		return nil
	}
	return &fence{fastAbort: p.TaskReporting == fastAbort}
}

// isFast tells whether the session has agreed on FastAbort; f may be nil.
func (f *fence) isFast() bool { return f != nil && f.fastAbort }

// parties are the connections on which responses are sent and acknowledged. After a
// logout nothing is.
//
// Preconditions: mu is held.
func (s *session) parties() []*conn {
	return slices.DeleteFunc(slices.Clone(s.conns), func(c *conn) bool { return c.phase != phaseFullFeature })
}

// hold keeps back the response of t if there is a fence before it, or if it is one
// itself. The caller goes on with pass.
//
// Preconditions: mu is held; the session has a fence.
func (c *conn) hold(t *Task) bool {
	f := c.fence
	if !t.isCommand() && t.header().Opcode() != pdu.TaskMgmtReq {
		return false
	}
	if f.conn == nil && f.queue.Empty() && (!t.isFence || len(c.sess.parties()) == 1) {
		return false
	}
	t.state = taskHeld
	f.queue.Push(t, &t.link)
	return true
}

// pass sends the responses that no fence holds back any more, and pings where an
// acknowledgement is awaited. It does not wait.
//
// Preconditions: mu is not held; the session has a fence.
func (s *session) pass() {
	s.mu.Lock()
	sent, awaited := s.passLocked()
	s.mu.Unlock()
	work := func(conns []*conn, f func(*conn)) {
		for _, c := range conns {
			if c.enter() {
				go func() { // its network may be slower than ours
					defer c.workers.Done()
					f(c)
				}()
			}
		}
	}
	work(sent, func(c *conn) { c.dm.Flush() })
	work(awaited, func(c *conn) { c.sendNOPIn(true) })
}

// passLocked queues what can be sent. It returns the connections that have got
// something, and those that have to acknowledge and have not been asked.
//
// Preconditions: mu is held.
func (s *session) passLocked() (sent, awaited []*conn) {
	f := s.fence
	for {
		parties := s.parties()
		if f.conn != nil && slices.Contains(parties, f.conn) && !pdu.Before(f.statSN, f.conn.acked) {
			awaited = []*conn{f.conn}
			break
		}
		f.conn = nil
		t := f.queue.Front()
		if t == nil {
			break
		}
		fenced := t.isFence && len(parties) > 1 // section 4.2.2.3.3, a)
		if fenced {
			for _, c := range parties {
				if pdu.Before(c.acked, c.statSN) {
					awaited = append(awaited, c)
				}
			}
			if len(awaited) > 0 {
				break
			}
		}
		f.queue.Pop()
		f.asked = false
		c := t.conn
		if fenced {
			f.conn, f.statSN = c, c.statSN
		}
		c.leave(t)
		if c.sendStatus(t) != nil { // which has ended the connection
			if !t.kept {
				c.freeTask(t)
			}
		} else if !slices.Contains(sent, c) {
			sent = append(sent, c)
		}
	}
	if f.asked {
		awaited = nil
	}
	f.asked = f.asked || len(awaited) > 0
	return sent, awaited
}

// acknowledgeStatus takes an ExpStatSN in a session with a fence.
//
// Preconditions: mu is held; the caller is a worker.
func (c *conn) acknowledgeStatus(expStatSN uint32) {
	if !pdu.Before(c.acked, expStatSN) || pdu.Before(c.statSN, expStatSN) {
		return
	}
	c.acked = expStatSN
	if len(c.terminations) > 0 {
		c.tellTerminations()
	}
	if f := c.fence; f.conn != nil || !f.queue.Empty() {
		c.workers.Add(1)
		go func() {
			defer c.workers.Done()
			c.sess.pass()
		}()
	}
}

// A termination is what the initiator has to be told, or has been told, about the
// tasks of a logical unit on one connection: they have been aborted (Asynchronous
// Message, event 5). It answers with a NOP-Out, and then sends no more data for
// them (sections 4.2.3.4 and 11.9.1).
type termination struct {
	lun    [8]byte
	told   bool
	statSN uint32 // of the message
}

// announce tells the initiator, where it has agreed on FastAbort, that the tasks
// that match selects will be aborted: on each of their connections but except.
//
// Preconditions: mu is held.
func (s *session) announce(match func(*Task) bool, except *conn) {
	if !s.fence.isFast() {
		return
	}
	var to []*conn
	s.tasks.each(func(t *Task) {
		c := t.conn
		if !match(t) || t.aborted.Load() || c == except || c.phase != phaseFullFeature {
			return
		}
		lun := t.header().LUN()
		i := slices.IndexFunc(c.terminations, func(x termination) bool { return x.lun == lun })
		if i < 0 {
			c.terminations = append(c.terminations, termination{lun: lun})
		} else if c.terminations[i].told = false; slices.Contains(to, c) {
			return
		}
		to = append(to, c)
	})
	slices.SortFunc(to, func(a, b *conn) int { return int(a.cid) - int(b.cid) })
	for _, c := range slices.Compact(to) {
		c.tellTerminations()
	}
}

// tellTerminations queues the messages that the initiator has not been sent yet, as
// far as it can take them; the rest follows when it has acknowledged some. They
// leave on another goroutine.
//
// Preconditions: mu is held; the connection has not ended, or the caller is one of
// its workers.
func (c *conn) tellTerminations() {
	some := false
	for i := range c.terminations {
		x := &c.terminations[i]
		if x.told {
			continue
		}
		t := c.asyncLocked(pdu.AsyncTaskTermination, 0, 0, 0)
		if t == nil {
			break
		}
		pdu.BHS(t.Header[:]).SetLUN(x.lun)
		statSN := c.statSN
		if ok, err := c.queueOwn(t); !ok || err != nil {
			break
		}
		x.told, x.statSN, some = true, statSN, true
	}
	if some {
		c.workers.Add(1)
		go func() { // its network may be slower than ours
			defer c.workers.Done()
			c.dm.Flush()
		}()
	}
}

// answered takes a NOP-Out that is no ping. It may be the answer to a message about
// the tasks of a LUN: the data that they wait for does not come any more, and what
// they have is free.
func (c *conn) answered(h pdu.BHS) {
	c.mu.Lock()
	defer c.mu.Unlock()
	i := slices.IndexFunc(c.terminations, func(x termination) bool {
		return x.lun == h.LUN() && x.told && pdu.Before(x.statSN, h.ExpStatSN())
	})
	if i < 0 {
		return
	}
	c.terminations = slices.Delete(c.terminations, i, i+1)
	c.callOff(func(t *Task) bool { return t.conn == c && t.header().LUN() == h.LUN() })
	c.tellTerminations()
}
