package tcp

import (
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/fifo"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun/invariant"
)

// This file is for an ErrorRecoveryLevel above 0 (RFC 7143, sections 7.8, 7.9 and 11.16).

// keeping holds the Data-In of a task that may have to be sent again. Conn.mu guards it.
type keeping struct {
	kept  list   // copies of the items, without a gap before task.dataSN
	acked uint32 // all Data-In before this DataSN is acknowledged
	since uint32 // bytes since the last A bit
}

// keep keeps a copy of i, which is about to be queued, so that it can be sent again. The
// queue and the task share the Buffer from now on.
//
// Preconditions: c.mu is held.
func (c *Conn) keep(t *task, i *item) {
	invariant.Held(&c.mu)
	size := i.size
	i.recovers, i.to, i.count = true, size, i.pdus()
	i.ttt, i.lun, i.before = t.ttt, t.lun, t.since
	switch {
	case size >= i.burst:
		t.since = size % i.burst
	case t.since+size >= i.burst:
		t.since = 0
	default:
		t.since += size
	}
	i.buf.Retain()
	k := c.newItem()
	*k = *i
	t.kept.Push(k, &k.link)
}

// wantsAck reports whether the PDU that ends at byte end of i.data has the A bit set:
// where a sequence ends, if at least MaxBurstLength bytes were sent since the last A bit
// (RFC 7143, section 11.7.2).
func (i *item) wantsAck(end uint32) bool {
	return end%i.burst == 0 || end == i.size && i.size < i.burst && i.before+i.size >= i.burst
}

// release releases everything that is kept of t.
//
// Preconditions: c.mu is held.
func (c *Conn) release(t *task) { c.releaseTo(t, t.dataSN) }

// releaseTo releases the kept items of t whose PDUs all come before sn.
//
// Preconditions: c.mu is held.
func (c *Conn) releaseTo(t *task, sn uint32) {
	invariant.Held(&c.mu)
	for k := t.kept.Front(); k != nil && k.sn+k.count <= sn; k = t.kept.Front() {
		t.kept.Pop()
		k.buf.Release()
		*k = item{}
		c.free.Push(k, &k.link)
	}
}

// seek returns the position in the data where the PDU with DataSN sn begins. sn may be the one
// after the last PDU.
func (s *stretch) seek(sn uint32) (off uint32) {
	off = s.from
	for n := s.sn; n < sn; n++ {
		off += s.cut(off)
	}
	return off
}

// Forget implements iscsi.Repeater.
func (c *Conn) Forget(it *iscsi.Task) { c.Unbind(it) }

// Acknowledge implements iscsi.Repeater. A tag that the task had before changes nothing.
func (c *Conn) Acknowledge(tag uint32, lun [8]byte, next uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := int(tag & maxTasks)
	if n >= len(c.tasks) {
		return false
	}
	t := c.tasks[n]
	switch {
	case tag != t.ttt:
		return t.hadTag(tag)
	case lun != t.lun, next > t.dataSN:
		return false
	case next > t.acked:
		t.acked = next
		c.releaseTo(t, next)
	}
	return true
}

// hadTag reports whether ttt is an earlier tag of t.
func (t *task) hadTag(ttt uint32) bool {
	ago := (t.ttt - ttt) >> indexBits
	return 0 < ago && ago <= t.ttt>>indexBits
}

// Repeat implements iscsi.Repeater.
func (c *Conn) Repeat(it, by *iscsi.Task, begin, length uint32) (queued bool, next uint32, err error) {
	t, h := it.Mover.(*task), pdu.BHS(by.Header[:])
	c.mu.Lock()
	defer c.mu.Unlock()
	first := t.acked
	if t.r2tSN > 0 { // all before the present R2T are answered
		if next, first = t.r2tSN, t.r2tSN; t.getting {
			first--
		}
	} else {
		next = t.dataSN
	}
	if begin == 0 && length == 0 {
		begin = first
	} else if begin < first || begin >= next || length > next-begin {
		return false, next, iscsi.ErrNeverSent
	}
	end := begin + length
	if length == 0 {
		end = next
	}
	switch {
	case begin == end, c.err != nil: // nothing to repeat, or the connection is ending
		return false, next, nil
	case t.r2tSN > 0:
		i := c.queueR2T(t)
		i.expCmdSN, i.maxCmdSN, i.by = h.ExpCmdSN(), h.MaxCmdSN(), by
		return true, next, nil
	case t.kept.Empty(), begin < t.kept.Front().sn:
		return false, next, iscsi.ErrGivenUp
	}
	var last *item
	for k := range t.kept.All() {
		if k.sn >= end {
			break
		}
		if k.sn+k.count <= begin {
			continue
		}
		i := c.repeat(k, h)
		i.from, i.sn = k.seek(begin), max(k.sn, begin)
		if end < k.sn+k.count {
			i.to = k.seek(end)
		}
		last = i
	}
	last.by = by
	return true, next, nil
}

// repeat queues a copy of the kept item k, with the ExpCmdSN and MaxCmdSN of h.
//
// Preconditions: c.mu is held.
func (c *Conn) repeat(k *item, h pdu.BHS) *item {
	invariant.Held(&c.mu)
	i := c.newItem()
	*i = *k
	i.link = fifo.Link[item]{}
	i.repeated, i.expCmdSN, i.maxCmdSN = true, h.ExpCmdSN(), h.MaxCmdSN()
	i.buf.Retain()
	c.queue.Push(i, &i.link)
	return i
}

// AskAgain implements iscsi.Repeater. The recovery R2T has a tag of its own, so data that comes for
// the present one is a duplicate from now on.
func (c *Conn) AskAgain(it *iscsi.Task) bool {
	t := it.Mover.(*task)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !t.getting || t.placing || t.err != nil || c.err != nil {
		return false
	}
	t.losses.add(t.at, t.end)
	c.ask(t)
	return true
}

// Resegment implements iscsi.Repeater. The A bits stay where they are.
func (c *Conn) Resegment(it, by *iscsi.Task) (queued bool, err error) {
	t, h := it.Mover.(*task), pdu.BHS(by.Header[:])
	segment := uint32(c.maxSend.Load()) &^ 3
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case t.acked == t.dataSN, c.err != nil:
		return false, nil
	case t.kept.Empty(), t.kept.Front().sn > t.acked:
		return false, iscsi.ErrGivenUp
	}
	sn := t.acked
	var last *item
	for k := range t.kept.All() {
		k.from = k.seek(t.acked)
		k.sn, k.segment, k.count = sn, segment, 0
		for off := k.from; off < k.size; off += k.cut(off) {
			k.count++
		}
		sn += k.count
		last = c.repeat(k, h)
	}
	t.dataSN = sn
	last.by = by
	return true, nil
}

// maxRecoveries limits the recovery R2Ts of a GetData. If more are needed, its command fails.
const maxRecoveries = 32

// losses holds the lost parts of the data of a GetData, in ascending order. If they do
// not fit, the last one covers several and what is between them.
type losses struct {
	spans  [8]span
	n      int
	rounds int // recovery R2Ts so far
}

// A span is the bytes from to to-1 of the data of a GetData.
type span struct{ from, to uint32 }

// add appends a span, which may be empty. It must follow the present ones.
func (l *losses) add(from, to uint32) {
	switch {
	case from == to:
	case l.n > 0 && (l.spans[l.n-1].to == from || l.n == len(l.spans)):
		l.spans[l.n-1].to = to
	default:
		l.spans[l.n] = span{from, to}
		l.n++
	}
}

// pop removes the first span.
func (l *losses) pop() (s span, ok bool) {
	if l.n == 0 {
		return span{}, false
	}
	s = l.spans[0]
	l.n--
	l.rounds++
	copy(l.spans[:], l.spans[1:])
	return s, true
}
