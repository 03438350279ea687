package rpcrdma

import (
	"errors"
	"fmt"
	"math/bits"
	"sync/atomic"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
	"github.com/iser-target/iser-target/rdma/rpcrdma/wire"
)

// A Request is a call of the peer. It belongs to the Procedure until that returns.
type Request struct {
	// Header is the header of the call. Its Auths refer to the message.
	Header oncrpc.CallHeader
	// Args decodes the arguments. What it returns is valid until the Procedure returns, and until then
	// the Procedure may also change it.
	Args oncrpc.Decoder
	// Results encodes the results. Items of it move into the write chunks of the call, in order.
	Results oncrpc.Encoder

	s *slot
}

// Conn returns the connection that the call came on, for calls in the other direction.
func (r *Request) Conn() *Conn { return r.s.c }

// Verify sets the verifier of the reply, which is AUTH_NONE by default. It removes all results.
func (r *Request) Verify(v oncrpc.Auth) { r.s.begin(oncrpc.ReplyHeader{Verifier: v}) }

// Buffer returns memory of n bytes for results, with undefined content. It belongs to the
// Request until the reply was sent. All of it together is limited by Config.MaxResults and by the memory
// that the requester offers for the reply; beyond that the error is ErrTooLong.
func (r *Request) Buffer(n int) ([]byte, error) {
	s := r.s
	if n < 0 || n > s.room-s.used {
		return nil, fmt.Errorf("%w: %d bytes, and %d are left for results", ErrTooLong, n, s.room-s.used)
	}
	s.results = s.c.grow(s.results, s.room)
	b := s.results[s.used:][:n:n]
	s.used += n
	return b, nil
}

// Room returns how many bytes Buffer can still return.
func (r *Request) Room() int { return r.s.room - r.s.used }

// Sent calls f when the memory of the results is no longer in use: when the reply was sent, or
// will not be. f must not wait.
func (r *Request) Sent(f func()) { r.s.sent = f }

// A slot holds one call of the peer, from its arrival until its reply has left.
type slot struct {
	c    *Conn
	next *slot

	head     wire.Header // of the call; its chunk lists become those of the reply
	msg      []byte      // what came in the Send
	args     []byte      // what came in read chunks, in the order of the list
	results  []byte      // for Buffer
	argsLen  int
	room     int // bytes that Buffer can return
	used     int // bytes that Buffer has returned
	reserved int // bytes counted in Conn.reserved
	kept     int // bytes counted in Conn.kept

	reads   []rdma.WorkRequest
	pending int // reads that are not answered; guarded by the baton
	failed  error
	chunks  []oncrpc.Chunk

	req    Request
	sent   func()
	writes []rdma.WorkRequest
	pieces [][]byte
	out    []byte // the Send of the reply
	send   rdma.WorkRequest
	left   atomic.Int32 // work requests of the reply that are not done
}

// slotQueue is a FIFO of slots that wait for memory.
type slotQueue struct{ head, tail *slot }

func (q *slotQueue) push(s *slot) {
	s.next = nil
	if q.tail == nil {
		q.head = s
	} else {
		q.tail.next = s
	}
	q.tail = s
}

func (q *slotQueue) pop() *slot {
	s := q.head
	if s != nil {
		if q.head = s.next; q.head == nil {
			q.tail = nil
		}
		s.next = nil
	}
	return s
}

func (q *slotQueue) take() (all slotQueue) {
	all, *q = *q, slotQueue{}
	return all
}

// takeSlot returns a slot for a message of the peer, or an error if that exceeds its credits. There are
// twice as many slots as credits: a peer may send its next call as soon as a reply has arrived, when the
// slot of that reply is still in the batch that Flush is sending.
func (c *Conn) takeSlot() (*slot, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.free
	switch {
	case c.outstanding >= c.cfg.Credits, s == nil && c.slots >= 2*c.cfg.Credits:
		return nil, fmt.Errorf("%w: %d calls are unanswered", errCredits, c.outstanding)
	case s == nil:
		s = &slot{c: c}
		s.req.s = s
		c.slots++
	default:
		c.free = s.next
	}
	s.next = nil
	c.kept -= s.kept
	c.busy++
	c.outstanding++
	return s, nil
}

// called handles a call whose header, c.head, is in order. It returns the slot if the call is ready.
func (c *Conn) called(payload []byte) (*slot, error) {
	s, err := c.takeSlot()
	if s == nil {
		return nil, err
	}
	s.head, c.head = c.head, s.head
	h := &s.head
	segments := len(h.Reads) + len(h.Reply)
	args, results := uint64(0), h.Reply.Len()
	for i := range h.Reads {
		args += uint64(h.Reads[i].Length)
	}
	for _, chunk := range h.Writes {
		segments += max(len(chunk), 1)
		results += chunk.Len()
	}
	chunks := len(h.Reads) > 0 || len(h.Writes) > 0 || h.HasReply
	if chunks && !c.chunksAllowed(!c.opened) || segments > c.cfg.MaxSegments || args > uint64(c.cfg.MaxArgs) {
		s.refuse(wire.CodeChunk)
		c.rc.Defer()
		return nil, nil
	}
	s.msg = append(s.msg[:0], payload...)
	s.argsLen, s.used, s.failed = int(args), 0, nil
	s.reserved = s.argsLen + int(min(results, uint64(c.cfg.MaxResults)))
	s.room = min(int(min(results, maxData))+c.sendMax, c.cfg.MaxResults)

	c.mu.Lock()
	starved := s.reserved > 0 && (c.starved.head != nil || c.reserved+s.reserved > c.cfg.Memory)
	if starved {
		c.starved.push(s)
	} else {
		c.reserved += s.reserved
	}
	c.mu.Unlock()
	if starved || !s.fetch() {
		return nil, nil
	}
	return s, nil
}

// grow makes b n bytes long. What it allocates is a power of two, so that b soon has its final size.
func (c *Conn) grow(b []byte, n int) []byte {
	if cap(b) < n {
		return make([]byte, n, 1<<bits.Len(uint(n-1)))
	}
	return b[:n]
}

// fetch posts RDMA Reads for the read chunks. It reports whether the call is ready now.
func (s *slot) fetch() (ready bool) {
	if s.argsLen == 0 {
		return true
	}
	c, h := s.c, &s.head
	s.args = c.grow(s.args, s.argsLen)
	n := 0
	for i := range h.Reads {
		if h.Reads[i].Length > 0 {
			n++
		}
	}
	s.reads = room(s.reads, n)
	off, n := 0, 0
	for i := range h.Reads {
		seg := &h.Reads[i]
		if seg.Length == 0 {
			continue
		}
		// Done leads from the Event back to the slot.
		s.reads[n] = rdma.WorkRequest{Op: rdma.Read, Data: s.args[off:][:seg.Length:seg.Length], STag: rdma.STag(seg.Handle),
			TO: seg.Offset, Done: s}
		off += int(seg.Length)
		n++
	}
	// The Events come to the worker with the baton, which may be another one.
	c.mu.Lock()
	c.fetching++
	s.pending = n
	c.mu.Unlock()
	for i := range s.reads {
		if err := c.rc.Post(&s.reads[i]); err != nil {
			return s.readsDone(len(s.reads)-i, err)
		}
	}
	c.rc.Defer()
	return false
}

// readsDone counts n Reads that are done. It reports whether the call is ready.
func (s *slot) readsDone(n int, err error) (ready bool) {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		s.failed = err
	}
	if s.pending -= n; s.pending > 0 {
		return false
	}
	c.fetching--
	return true
}

// fetched handles the end of an RDMA Read. It returns the slot if its call is ready.
func (c *Conn) fetched() *slot {
	s := c.ev.Read.Done.(*slot)
	if !s.readsDone(1, c.ev.Err) {
		return nil
	}
	if c.ended {
		s.drop()
		return nil
	}
	return s
}

// drop releases a slot whose call will not be answered.
func (s *slot) drop() {
	s.c.mu.Lock()
	s.c.outstanding--
	s.c.mu.Unlock()
	s.release()
}

// execute executes the call and sends the reply.
func (s *slot) execute() {
	if s.failed != nil {
		// The peer does not accept RDMA Reads, or the stream has ended.
		s.refuse(wire.CodeChunk)
	} else {
		s.answer(s.serve())
	}
	s.c.rc.Flush()
}

// serve decodes the header of the call and lets its Procedure answer.
func (s *slot) serve() error {
	h, r := &s.head, &s.req
	stream, off := s.msg, 0
	s.chunks = s.chunks[:0]
	for i := 0; i < len(h.Reads); {
		position, from := h.Reads[i].Position, off
		for ; i < len(h.Reads) && h.Reads[i].Position == position; i++ {
			off += int(h.Reads[i].Length)
		}
		if data := s.args[from:off:off]; position == 0 {
			stream = data
		} else {
			s.chunks = append(s.chunks, oncrpc.Chunk{Position: position, Data: data})
		}
	}
	if xid, kind, ok := oncrpc.PeekType(stream); !ok || xid != h.XID || kind != oncrpc.MsgCall {
		return errNotCall
	}
	s.begin(oncrpc.ReplyHeader{})
	r.Args.Reset(stream, s.chunks)
	if err := r.Header.Parse(&r.Args); err != nil {
		return err
	}
	if len(s.chunks) > 0 && r.Header.Credential.Protects() {
		return oncrpc.ErrNotEligible
	}
	f, err := s.c.cfg.Programs.find(&r.Header)
	if err != nil {
		return err
	}
	if err := f(s.c.ctx, r); err != nil {
		return err
	}
	return r.Args.Err()
}

// errNotCall reports a message whose payload is not the call that its header announces.
var errNotCall = errors.New("the payload is not a call with the XID of the header")

// begin starts the results, after the header of the reply.
func (s *slot) begin(h oncrpc.ReplyHeader) {
	h.XID = s.head.XID
	s.req.Results.Reset()
	h.Append(&s.req.Results)
}

// answer sends the reply. err is why the call was not executed, or nil.
func (s *slot) answer(err error) {
	if err != nil {
		status := statusOf(err)
		if status == nil {
			s.refuse(wire.CodeChunk)
			return
		}
		s.begin(oncrpc.ReplyHeader{Status: status.Status, Low: status.Low, High: status.High, Why: status.Why})
	}
	if !s.reply() {
		s.refuse(wire.CodeChunk)
	}
}

// statusOf returns the status for a call that ended with err, or nil if the answer is ERR_CHUNK.
func statusOf(err error) (status *StatusError) {
	switch {
	case errors.Is(err, oncrpc.ErrNotEligible), errors.Is(err, ErrTooLong), err == errNotCall:
		return nil
	case errors.As(err, &status):
		return status
	case errors.Is(err, oncrpc.ErrRPCVersion):
		return errRPCMismatch
	case errors.Is(err, oncrpc.ErrGarbage):
		return errGarbage
	}
	return errSystem
}

// reply sends the reply in the form that RFC 8166, section 3.5, asks for. It reports false if the reply
// does not fit what the requester offers; nothing was sent then.
func (s *slot) reply() bool {
	c, h, e := s.c, &s.head, &s.req.Results
	s.writes = s.writes[:0]
	stag, known := s.anySTag()
	items := e.Items()
	moved := 0 // items whose chunk was used or is empty
	if s.req.Header.Credential.Protects() {
		for _, chunk := range h.Writes {
			unuse(chunk)
		}
	} else {
		for i, chunk := range h.Writes {
			p := placer{s: s, chunk: chunk}
			if i < len(items) {
				moved++
				if len(chunk) > 0 && !p.put(items[i].Data) {
					return false
				}
			}
			p.end()
		}
	}
	// The pieces of the stream that remain: the encoded bytes, and the items without a chunk.
	s.pieces = s.pieces[:0]
	at, size := 0, 0
	add := func(b []byte) {
		if len(b) > 0 {
			s.pieces = append(s.pieces, b)
			size += len(b)
		}
	}
	for i, item := range items {
		if i < moved && len(h.Writes[i]) > 0 {
			continue
		}
		add(e.Bytes()[at:item.At])
		at = item.At
		add(item.Data)
		add(zeros[:oncrpc.Pad(len(item.Data))])
	}
	add(e.Bytes()[at:])

	h.Reads = h.Reads[:0]
	h.Proc, h.Version, h.Credits = wire.Msg, wire.Version, uint32(c.cfg.Credits)
	inline := h.Size()+size <= c.sendMax
	if h.HasReply {
		p := placer{s: s, chunk: h.Reply}
		if !inline {
			h.Proc = wire.NoMsg
			for _, b := range s.pieces {
				if !p.put(b) {
					return false
				}
			}
		}
		p.end()
	} else if !inline {
		return false
	}
	s.out = h.Append(s.out[:0])
	if inline {
		for _, b := range s.pieces {
			s.out = append(s.out, b...)
		}
	}
	clear(s.pieces)
	if len(s.out) > c.sendMax {
		return false
	}
	s.post(stag, known && c.invalidate)
	return true
}

var zeros [4]byte

// anySTag returns an STag of the call that the peer has certainly registered for it (RFC 8797, section 4.1).
func (s *slot) anySTag() (stag uint32, ok bool) {
	h := &s.head
	switch {
	case len(h.Reads) > 0:
		return h.Reads[0].Handle, true
	case len(h.Reply) > 0:
		return h.Reply[0].Handle, true
	}
	for _, chunk := range h.Writes {
		if len(chunk) > 0 {
			return chunk[0].Handle, true
		}
	}
	return 0, false
}

// unuse marks a chunk as unused (RFC 8166, section 3.4.6).
func unuse(chunk wire.Chunk) {
	for i := range chunk {
		chunk[i].Length = 0
	}
}

// A placer fills a chunk by RDMA Writes, in the order of its segments, and sets the lengths to what it has
// written.
type placer struct {
	s     *slot
	chunk wire.Chunk
	used  uint32 // bytes of chunk[0] that are filled
}

// put appends b. It reports false if the chunk is too small.
func (p *placer) put(b []byte) bool {
	for len(b) > 0 {
		if len(p.chunk) == 0 {
			return false
		}
		seg := &p.chunk[0]
		n := int(min(uint64(len(b)), uint64(seg.Length-p.used)))
		if n > 0 {
			p.s.writes = append(p.s.writes, rdma.WorkRequest{Op: rdma.Write, Data: b[:n:n], STag: rdma.STag(seg.Handle),
				TO: seg.Offset + uint64(p.used), Done: p.s})
			p.used += uint32(n)
			b = b[n:]
		}
		if p.used == seg.Length {
			p.chunk, p.used = p.chunk[1:], 0
		}
	}
	return true
}

// end sets the lengths of what was not filled.
func (p *placer) end() {
	if len(p.chunk) > 0 {
		p.chunk[0].Length = p.used
		unuse(p.chunk[1:])
	}
}

// refuse sends an RDMA_ERROR that repeats XID and version of the call (RFC 8166, section 4.5).
func (s *slot) refuse(code wire.Code) {
	h := wire.Header{XID: s.head.XID, Version: s.head.Version, Credits: uint32(s.c.cfg.Credits), Proc: wire.Error,
		Code: code, Low: wire.Version, High: wire.Version}
	s.writes = s.writes[:0]
	s.out = h.Append(s.out[:0])
	s.post(0, false)
}

// post queues the RDMA Writes of the reply and the Send. If the stream does not take them, it has ended.
func (s *slot) post(stag uint32, invalidate bool) {
	c := s.c
	s.send = rdma.WorkRequest{Op: rdma.Send, Data: s.out, Done: s}
	if invalidate {
		s.send.Op, s.send.STag = rdma.SendInvalidate, rdma.STag(stag)
	}
	c.mu.Lock()
	c.outstanding--
	c.mu.Unlock()
	s.left.Store(int32(len(s.writes)) + 1)
	for i := range s.writes {
		if err := c.rc.Post(&s.writes[i]); err != nil {
			s.fail(len(s.writes)-i+1, err)
			return
		}
	}
	if err := c.rc.Post(&s.send); err != nil {
		s.fail(1, err)
	}
}

// fail ends the connection because n work requests of the reply were not taken (RFC 8166, section 4.5.4).
func (s *slot) fail(n int, err error) {
	s.c.kill(err)
	if s.left.Add(-int32(n)) == 0 {
		s.release()
	}
}

// WorkDone counts the work requests of the reply that have left or will not be sent.
func (s *slot) WorkDone(*rdma.WorkRequest, error) {
	if s.left.Add(-1) == 0 {
		s.release()
	}
}

// release returns the slot, and starts the calls that wait for its memory.
func (s *slot) release() {
	c := s.c
	if f := s.sent; f != nil {
		s.sent = nil
		f()
	}
	clear(s.writes) // they refer to memory of the Procedure, and so do the items
	s.req.Results.Reset()
	c.mu.Lock()
	c.reserved -= s.reserved
	s.reserved = 0
	if s.kept = cap(s.args) + cap(s.results); c.kept+s.kept > c.cfg.Memory {
		s.args, s.results, s.kept = nil, nil, 0
	}
	c.kept += s.kept
	s.next, c.free = c.free, s
	c.busy--
	c.checkQuiet()
	var start slotQueue
	for next := c.starved.head; next != nil && c.reserved+next.reserved <= c.cfg.Memory; next = c.starved.head {
		c.reserved += next.reserved
		start.push(c.starved.pop())
	}
	c.mu.Unlock()
	for next := start.pop(); next != nil; next = start.pop() {
		if next.fetch() {
			c.workers.Go(next.execute)
		}
	}
}
