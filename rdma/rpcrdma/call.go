package rpcrdma

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
	"github.com/iser-target/iser-target/rdma/rpcrdma/wire"
)

var be = binary.BigEndian

// A Call is a call of this end. A program fills in the fields, encodes the arguments into what Begin
// returns, and calls Conn.Do. Then it can use the Call for the next call. A Call keeps its memory, so that
// no call allocates once it has grown. The zero value is ready for use.
type Call struct {
	Program, Version, Procedure uint32
	Credential, Verifier        oncrpc.Auth

	// MaxReply is the most bytes that the results can have, without the data that goes to Into.
	MaxReply int
	// Into is memory for the results that the peer may move by RDMA Write: one for each
	// Encoder.Item of the reply, in order, as long as the item can be. The element nil asks for an
	// item inside the message. If the peer leaves an item in the message although memory was offered, the call fails.
	// A connection that allows no chunks, and a call whose credential protects the message, do not use Into.
	// Decoder.Item of Results returns an item in both cases.
	Into [][]byte
	// Long sends the message in a chunk of its own even if it would fit a Send.
	Long bool
	// Once keeps a Client from retransmitting the call after the connection was lost.
	Once bool

	// Reply and Results are the reply, after Do. They are valid until the next Begin or Do.
	Reply   oncrpc.ReplyHeader
	Results oncrpc.Decoder

	enc   oncrpc.Encoder
	begun bool
	busy  atomic.Bool

	head    wire.Header
	segs    []wire.Segment // of the chunks in head
	regions []rdma.Region
	stream  []byte // a message that moves as a whole although it has items
	reply   []byte // memory of the reply chunk
	in      []byte // a reply that came in a Send
	chunks  []oncrpc.Chunk

	done      chan struct{} // has room for one
	err       error         // valid after done
	sent      bool          // the peer may have seen the call
	lens      []int         // bytes that the peer has put into Into
	inReply   bool          // the reply is in the reply chunk
	replyLen  int
	next      *Call // in a callQueue
	isWaiting bool
}

var nextXID atomic.Uint32

func init() {
	var b [4]byte
	rand.Read(b[:])
	nextXID.Store(be.Uint32(b[:]))
}

// Begin starts the message with a new XID, and returns the Encoder for the arguments. Items of the
// Encoder can move in chunks, so they must not change until Do returns. Do without a new Begin
// retransmits the message with the same XID.
func (call *Call) Begin() *oncrpc.Encoder {
	call.enc.Reset()
	h := oncrpc.CallHeader{XID: nextXID.Add(1), Program: call.Program, Version: call.Version,
		Procedure: call.Procedure, Credential: call.Credential, Verifier: call.Verifier}
	call.head.XID = h.XID
	h.Append(&call.enc)
	call.begun = true
	return &call.enc
}

// XID returns the transaction identifier of the message.
func (call *Call) XID() uint32 { return call.head.XID }

// finish hands the outcome of a step to the goroutine in Do.
func (call *Call) finish(err error) {
	call.err = err
	call.done <- struct{}{}
}

// owns reports whether the peer may invalidate the STag in the reply.
//
// Preconditions: c.mu is held, and c.calls has the call.
func (call *Call) owns(stag rdma.STag) bool {
	for i := range call.regions {
		if call.regions[i].STag() == stag {
			return true
		}
	}
	return false
}

// callQueue is a FIFO of calls that wait for a credit.
type callQueue struct{ head, tail *Call }

func (q *callQueue) push(call *Call) {
	call.next, call.isWaiting = nil, true
	if q.tail == nil {
		q.head = call
	} else {
		q.tail.next = call
	}
	q.tail = call
}

func (q *callQueue) pop() *Call {
	call := q.head
	if call != nil {
		if q.head = call.next; q.head == nil {
			q.tail = nil
		}
		call.next, call.isWaiting = nil, false
	}
	return call
}

func (q *callQueue) take() (all callQueue) {
	all, *q = *q, callQueue{}
	return all
}

// remove takes call out of the queue.
func (q *callQueue) remove(call *Call) {
	rest := q.take()
	for c := rest.pop(); c != nil; c = rest.pop() {
		if c != call {
			q.push(c)
		}
	}
}

// fenceTime limits how long a call that was given up waits until the peer no longer uses its memory.
const fenceTime = time.Second

// fenceSpins is how often fence yields before it waits.
const fenceSpins = 20

// Do makes the call and waits for the reply, or until ctx or the connection ends. It returns nil if the
// status is SUCCESS, a *StatusError for another status, a *RefusedError for an RDMA_ERROR, and an error that
// wraps ErrLost if the connection ended.
//
// When Do returns, nothing uses the memory of the call. If ctx ends while the peer may still read or write
// that memory, its next access ends the connection.
func (c *Conn) Do(ctx context.Context, call *Call) error {
	if !call.begun {
		return errNotBegun
	}
	if !call.busy.CompareAndSwap(false, true) {
		return errBusyCall
	}
	defer call.busy.Store(false)
	if call.done == nil {
		call.done = make(chan struct{}, 1)
	}
	call.sent = false
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := c.prepare(call); err != nil {
		return err
	}
	if err := c.admit(ctx, call); err != nil {
		return err
	}
	err := c.send(call)
	if err == nil {
		err = c.await(ctx, call)
	}
	if fenceErr := c.fence(call); err == nil {
		err = fenceErr
	}
	if err == nil {
		err = call.decode()
	}
	return err
}

// admit waits for a credit (RFC 8166, section 3.3.1). One is assumed until the first reply.
func (c *Conn) admit(ctx context.Context, call *Call) error {
	c.mu.Lock()
	if err := c.refusal(); err != nil {
		c.mu.Unlock()
		return err
	}
	if c.inflight < c.limit && c.waiting.head == nil {
		c.inflight++
		c.mu.Unlock()
		return nil
	}
	c.waiting.push(call)
	c.mu.Unlock()
	select {
	case <-call.done:
		return call.err
	case <-ctx.Done():
	}
	c.mu.Lock()
	if call.isWaiting {
		c.waiting.remove(call)
		c.mu.Unlock()
		return ctx.Err()
	}
	c.mu.Unlock()
	if <-call.done; call.err == nil {
		c.giveBack()
	}
	return ctx.Err()
}

// refusal returns why no call can be made, or nil.
//
// Preconditions: c.mu is held.
func (c *Conn) refusal() error {
	switch {
	case c.err != nil:
		return fmt.Errorf("%w: %w", ErrLost, c.err)
	case c.draining:
		return ErrClosed
	case !c.reverse:
		return ErrReverse
	}
	return nil
}

// giveBack returns a credit that was not used.
func (c *Conn) giveBack() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.credit()
}

// credit counts one call less, and admits those that wait.
//
// Preconditions: c.mu is held.
func (c *Conn) credit() {
	c.inflight = max(c.inflight-1, 0)
	for c.inflight < c.limit && c.waiting.head != nil {
		c.inflight++
		c.waiting.pop().finish(nil)
	}
	c.checkQuiet()
}

// granted applies the credits of a reply, before credit. A grant of 0 is not allowed; it counts as 1.
//
// Preconditions: c.mu is held.
func (c *Conn) granted(n uint32) { c.limit = int(min(max(n, 1), uint32(c.cfg.Ask))) }

// chunksAllowed reports whether messages of a direction may have chunks.
func (c *Conn) chunksAllowed(forward bool) bool { return forward || c.cfg.ReverseChunks }

// room makes s n elements long, and keeps its memory if that is enough.
func room[T any](s []T, n int) []T {
	if cap(s) < n {
		return make([]T, n)
	}
	return s[:n]
}

// prepare decides the form of the message (RFC 8166, section 3.5), as far as that requires no STag.
func (c *Conn) prepare(call *Call) error {
	h, e := &call.head, &call.enc
	h.Version, h.Credits, h.Proc = wire.Version, uint32(c.cfg.Ask), wire.Msg
	h.Reads, h.Writes, h.Reply, h.HasReply = h.Reads[:0], h.Writes[:0], nil, false
	chunks := c.chunksAllowed(c.opened)
	whole := call.Credential.Protects() // no part may be moved: RFC 8166, section 8.2.2.3
	items := e.Items()
	segs := len(call.Into) + 2 + len(items)
	call.segs = room(call.segs, segs)[:0]
	call.regions = room(call.regions, segs)[:0]
	call.lens = room(call.lens, len(call.Into))

	// The results: a write chunk for each item, and a reply chunk if the rest may exceed a Send.
	rest := uint64(oncrpc.MaxReplyHeader) + uint64(max(call.MaxReply, 0))
	for _, into := range call.Into {
		if !chunks || whole {
			rest += uint64(len(into)) + uint64(oncrpc.Pad(len(into)))
			continue
		}
		call.addSegment(len(into), into == nil)
		first := len(call.segs)
		if into != nil {
			first--
		}
		h.Writes = append(h.Writes, wire.Chunk(call.segs[first:len(call.segs):len(call.segs)]))
	}
	rest += uint64(oncrpc.Pad(int(rest)))
	if uint64(h.Size())+rest > uint64(c.receiveMax) {
		if !chunks || rest > maxData {
			return fmt.Errorf("%w: the reply can have %d bytes", ErrTooLong, rest)
		}
		call.reply = room(call.reply, int(rest))
		call.addSegment(int(rest), false)
		h.Reply, h.HasReply = wire.Chunk(call.segs[len(call.segs)-1:]), true
	}

	// The call: inside a Send, with its items in read chunks, or as a whole in a read chunk.
	if !call.Long && h.Size()+e.Len() <= c.sendMax {
		return nil
	}
	if !chunks {
		return fmt.Errorf("%w: the call has %d bytes", ErrTooLong, e.Len())
	}
	if whole {
		call.stream = e.Append(call.stream[:0])
		call.addRead(0, len(call.stream))
	} else {
		const readSegmentLen = 24
		size, n := h.Size()+len(e.Bytes()), 0
		for _, item := range items {
			if len(item.Data) > 0 {
				n++
			}
		}
		if size += n * readSegmentLen; call.Long || size > c.sendMax {
			call.stream = e.Bytes()
			call.addRead(0, len(call.stream))
		}
		before := 0
		for _, item := range items {
			if len(item.Data) > 0 {
				call.addRead(uint32(item.At+before), len(item.Data))
			}
			before += len(item.Data) + oncrpc.Pad(len(item.Data))
		}
	}
	if len(h.Reads) > 0 && h.Reads[0].Position == 0 {
		h.Proc = wire.NoMsg
	}
	if h.Size() > c.sendMax {
		return fmt.Errorf("%w: the chunk lists have %d bytes", ErrTooLong, h.Size())
	}
	return nil
}

// addSegment adds a segment of n bytes, unless it is that of an empty chunk.
func (call *Call) addSegment(n int, empty bool) {
	if !empty {
		call.segs = append(call.segs, wire.Segment{Length: uint32(n)})
	}
}

func (call *Call) addRead(position uint32, n int) {
	call.head.Reads = append(call.head.Reads,
		wire.ReadSegment{Position: position, Segment: wire.Segment{Length: uint32(n)}})
}

// register gives the peer access to the memory of the call: one region for each segment.
func (c *Conn) register(call *Call) {
	h := &call.head
	add := func(s *wire.Segment, b []byte, access rdma.Access) {
		call.regions = call.regions[:len(call.regions)+1]
		r := &call.regions[len(call.regions)-1]
		s.Handle = uint32(c.rc.Register(r, b, 0, access))
	}
	for i, chunk := range h.Writes {
		if len(chunk) > 0 {
			add(&chunk[0], call.Into[i], rdma.RemoteWrite)
		}
	}
	if h.HasReply {
		add(&h.Reply[0], call.reply, rdma.RemoteWrite)
	}
	items := call.enc.Items()
	for i := range h.Reads {
		if h.Reads[i].Position == 0 {
			add(&h.Reads[i].Segment, call.stream, rdma.RemoteRead)
			continue
		}
		for len(items[0].Data) == 0 {
			items = items[1:]
		}
		add(&h.Reads[i].Segment, items[0].Data, rdma.RemoteRead)
		items = items[1:]
	}
}

// send registers the memory of the call and sends the message.
func (c *Conn) send(call *Call) error {
	h := &call.head
	c.mu.Lock()
	err := c.refusal()
	if _, used := c.calls[h.XID]; used && err == nil {
		err = errXID
	}
	if err != nil {
		c.credit()
		c.mu.Unlock()
		return err
	}
	m := c.sends
	if m != nil {
		c.sends = m.next
	} else {
		m = &message{c: c}
	}
	c.mu.Unlock()

	c.register(call)
	m.buf = h.Append(m.buf[:0])
	if h.Proc == wire.Msg {
		if len(h.Reads) > 0 {
			m.buf = append(m.buf, call.enc.Bytes()...)
		} else {
			m.buf = call.enc.Append(m.buf)
		}
	}
	m.wr = rdma.WorkRequest{Op: rdma.Send, Data: m.buf, Done: m}

	c.mu.Lock()
	if err = c.refusal(); err != nil && c.err == nil {
		err = nil // Shutdown waits for it
	}
	if err == nil {
		call.sent = true
		c.calls[h.XID] = call
	}
	c.mu.Unlock()
	if err != nil {
		return err
	}
	if err := c.rc.Post(&m.wr); err != nil {
		c.kill(err) // and the call ends with the connection
		return nil
	}
	c.flush()
	return nil
}

// WorkDone keeps the message for the next call, when it has left or will not be sent.
func (m *message) WorkDone(*rdma.WorkRequest, error) {
	m.c.mu.Lock()
	defer m.c.mu.Unlock()
	m.next, m.c.sends = m.c.sends, m
}

// await waits for the reply. A call that is given up keeps its credit until the peer has replied, because
// it still occupies the peer.
func (c *Conn) await(ctx context.Context, call *Call) error {
	select {
	case <-call.done:
		return call.err
	case <-ctx.Done():
	}
	c.mu.Lock()
	if c.calls[call.head.XID] == call {
		c.calls[call.head.XID] = nil
		c.mu.Unlock()
		return ctx.Err()
	}
	c.mu.Unlock()
	<-call.done // the reply has come
	return call.err
}

// fence takes the memory of the call back from the peer (RFC 8166, section 4.4.1). It closes the connection
// if that takes too long (section 4.5.4).
func (c *Conn) fence(call *Call) (err error) {
	for i := range call.regions {
		r := &call.regions[i]
		idle := c.rc.Revoke(r)
		// The goroutine that has sent a Read Response may be about to say so.
		for n := 0; !idle && n < fenceSpins; n++ {
			runtime.Gosched()
			idle = c.rc.Revoke(r)
		}
		if idle {
			continue
		}
		late := time.AfterFunc(fenceTime, func() { c.kill(errFence) })
		c.rc.Deregister(r)
		if !late.Stop() {
			err = errFence
		}
	}
	call.regions = call.regions[:0]
	return err
}

// refused handles an RDMA_ERROR. Its credits are ignored, because its direction is not certain (RFC 8167,
// section 4.1).
func (c *Conn) refused(h *wire.Header, call *Call) {
	if !c.settle(h.XID, 0) || call == nil {
		return
	}
	call.finish(&RefusedError{Code: h.Code, Low: h.Low, High: h.High})
}

// settle removes an unanswered call and gives its credit back. A grant of 0 changes nothing. It reports
// whether the caller has to finish the call, because Do has not given it up meanwhile.
func (c *Conn) settle(xid, grant uint32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	call, ok := c.calls[xid]
	if !ok {
		return false
	}
	delete(c.calls, xid)
	if grant > 0 {
		c.granted(grant)
	}
	c.credit()
	return call != nil
}

// replied handles a reply whose header is in order.
func (c *Conn) replied(h *wire.Header, call *Call, payload []byte) {
	if !c.settle(h.XID, max(h.Credits, 1)) || call == nil {
		return
	}
	call.finish(call.take(h, payload))
}

// take notes where the reply is. It checks that the chunks are those of the call (RFC 8166, section 4.3).
func (call *Call) take(h *wire.Header, payload []byte) error {
	sent := &call.head
	if len(h.Writes) != len(sent.Writes) || h.HasReply && !sent.HasReply {
		return fmt.Errorf("%w: it has %d write chunks, reply chunk: %t", ErrReply, len(h.Writes), h.HasReply)
	}
	for i, chunk := range h.Writes {
		n, ok := filled(chunk, sent.Writes[i])
		if !ok {
			return fmt.Errorf("%w: write chunk %d is not that of the call", ErrReply, i)
		}
		call.lens[i] = n
	}
	call.replyLen = 0
	if h.HasReply {
		n, ok := filled(h.Reply, sent.Reply)
		if !ok {
			return fmt.Errorf("%w: the reply chunk is not that of the call", ErrReply)
		}
		call.replyLen = n
	}
	if call.inReply = h.Proc == wire.NoMsg; call.inReply {
		return nil
	}
	call.in = append(call.in[:0], payload...)
	return nil
}

// filled returns how many bytes of a chunk the peer has filled. ok reports whether the chunk is sent, with
// lengths that are not more. A chunk of ours has one segment, or none if it is empty.
func filled(got, sent wire.Chunk) (n int, ok bool) {
	if len(got) != len(sent) {
		return 0, false
	}
	for i := range got {
		if got[i].Handle != sent[i].Handle || got[i].Offset != sent[i].Offset || got[i].Length > sent[i].Length {
			return 0, false
		}
		n += int(got[i].Length)
	}
	return n, true
}

// decode decodes the header of the reply after the memory was fenced.
func (call *Call) decode() error {
	stream := call.in
	if call.inReply {
		stream = call.reply[:call.replyLen]
	}
	if xid, kind, ok := oncrpc.PeekType(stream); !ok || xid != call.head.XID || kind != oncrpc.MsgReply {
		return fmt.Errorf("%w: the reply chunk has XID %#x and type %d", ErrReply, xid, kind)
	}
	call.chunks = slices.Grow(call.chunks[:0], len(call.Into))
	for i, chunk := range call.head.Writes {
		c := oncrpc.Chunk{Position: oncrpc.AnyPosition}
		if len(chunk) > 0 {
			c.Data = call.Into[i][:call.lens[i]:call.lens[i]]
		}
		call.chunks = append(call.chunks, c)
	}
	call.Results.Reset(stream, call.chunks)
	if err := call.Reply.Parse(&call.Results); err != nil {
		return fmt.Errorf("%w: %w", ErrReply, err)
	}
	if r := &call.Reply; r.Status != oncrpc.Success {
		return &StatusError{Status: r.Status, Low: r.Low, High: r.High, Why: r.Why}
	}
	return nil
}
