package rpcrdma

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma/oncrpc"
	"github.com/iser-target/iser-target/rdma/rpcrdma/wire"
	rdmap "github.com/iser-target/iser-target/rdma/wire"
)

// A Conn is one connection that carries calls in both directions. All methods may be called at any time.
type Conn struct {
	cfg        Config
	rc         *rdma.Conn
	opened     bool         // this end has connected, so that its calls are in the forward direction
	peer       wire.Private // what the peer announces
	sendMax    int          // the longest Send in bytes to the peer
	receiveMax int          // the longest Send in bytes from the peer
	invalidate bool         // both ends support remote invalidation
	announced  bool         // peer was in the startup frame

	ctx     context.Context
	cancel  context.CancelCauseFunc
	done    chan struct{} // closed when no call is left in calls and waiting
	workers sync.WaitGroup
	nworker atomic.Int32
	follow  atomic.Int32  // workers that wait for the baton
	timer   *time.Timer   // runs watch
	wake    chan struct{} // has room for one; see flush

	// baton belongs to the worker that receives. It guards what follows.
	baton   sync.Mutex
	ev      rdma.Event
	head    wire.Header
	grown   bool
	ended   bool
	discard bool // the stream was terminated: what comes is dropped

	// mu guards the rest.
	mu  sync.Mutex
	err error // why the connection ends or has ended

	// The requester.
	reverse  bool             // EnableReverse was called, or this end has connected
	calls    map[uint32]*Call // unanswered, by XID; nil for a call that was given up
	inflight int              // len of calls, and those that were admitted and not sent yet
	limit    int              // of inflight: the credits
	waiting  callQueue        // calls that wait for a credit
	sends    *message         // free ones

	// The responder.
	free        *slot
	slots       int // that exist
	busy        int // that are not free
	outstanding int // calls of the peer without a posted reply
	reserved    int // bytes for chunks of the calls in progress
	kept        int // bytes that free slots keep
	starved     slotQueue
	fetching    int // slots with unanswered RDMA Reads
	draining    bool
	quiet       chan struct{} // closed when draining and nothing is in progress
	activity    uint64        // messages so far

	watched watched
}

// A message is a Send of a call.
type message struct {
	wr   rdma.WorkRequest
	buf  []byte
	c    *Conn
	next *message
}

// Dial connects to the address and returns the Conn. ctx limits the startup.
func Dial(ctx context.Context, network, address string, cfg Config) (*Conn, error) {
	nc, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return Initiate(ctx, nc, cfg)
}

// Initiate starts RPC-over-RDMA on nc, a new TCP connection that this end has opened. After an error nc is closed.
func Initiate(ctx context.Context, nc net.Conn, cfg Config) (*Conn, error) {
	cfg, err := cfg.complete()
	if err != nil {
		nc.Close()
		return nil, err
	}
	rc, private, err := rdma.Initiate(ctx, nc, cfg.initiator())
	if err != nil {
		nc.Close()
		return nil, err
	}
	return start(rc, cfg, true, private), nil
}

// Accept starts RPC-over-RDMA on nc, a new TCP connection that the peer has opened. After an error nc is
// closed.
func Accept(ctx context.Context, nc net.Conn, cfg Config) (*Conn, error) {
	cfg, err := cfg.complete()
	if err != nil {
		nc.Close()
		return nil, err
	}
	rc, err := rdma.Respond(ctx, nc, cfg.RDMA, func(*rdma.Request) rdma.Answer { return rdma.Answer{Private: cfg.RDMA.Private} })
	if err != nil {
		nc.Close()
		return nil, err
	}
	return start(rc, cfg, false, rc.Peer().Private), nil
}

// Answer returns what an end with the Config o answers to an MPA Request. It is for a server that accepts streams of
// other protocols, too, and chooses by the Request: it calls rdma.Respond itself, and then Serve.
func (o Config) Answer() rdma.Answer {
	o, _ = o.complete() // Serve returns the error
	return rdma.Answer{Private: o.RDMA.Private}
}

// Serve starts RPC-over-RDMA on rc, a stream that this end has accepted with Config.Answer, and on which
// nothing has been received. The Options of the stream are those of its owner: cfg.RDMA is not used, and a
// Send of cfg.InlineReceive bytes must be allowed. After an error rc is closed.
func Serve(rc *rdma.Conn, cfg Config) (*Conn, error) {
	cfg, err := cfg.complete()
	if err != nil {
		rc.Close()
		return nil, err
	}
	return start(rc, cfg, false, rc.Peer().Private), nil
}

// Announced reports whether the peer has said in the startup that it speaks RPC-over-RDMA (RFC 8797). A peer that has
// not may speak it nevertheless.
func (c *Conn) Announced() bool { return c.announced }

// start returns the Conn for a stream whose startup is complete.
func start(rc *rdma.Conn, cfg Config, opened bool, private []byte) *Conn {
	peer, announced := wire.FindPrivate(private)
	own := cfg.private()
	c := &Conn{cfg: cfg, rc: rc, opened: opened, reverse: opened, peer: peer, limit: 1,
		sendMax: wire.Threshold(own, peer), receiveMax: wire.Threshold(peer, own),
		invalidate: own.Invalidate && peer.Invalidate, announced: announced,
		calls: map[uint32]*Call{}, done: make(chan struct{}), quiet: make(chan struct{}),
		wake: make(chan struct{}, 1)}
	c.ctx, c.cancel = context.WithCancelCause(context.Background())
	c.watched.reset(time.Now())
	c.mu.Lock() // which watch takes before it uses the timer
	c.timer = time.AfterFunc(c.period(), c.watch)
	c.mu.Unlock()
	c.workers.Go(c.flusher)
	c.addWorker()
	return c
}

// flush lets flusher send what is queued. Do must not do that itself: Flush sends for everybody, and
// may wait for the peer when the context of the call has ended.
func (c *Conn) flush() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// flusher sends what Do has queued. The goroutine in Do waits for the reply meanwhile, so that this costs
// little.
func (c *Conn) flusher() {
	for {
		select {
		case <-c.wake:
			c.rc.Flush()
		case <-c.done:
			return
		}
	}
}

// LocalAddr returns the local address.
func (c *Conn) LocalAddr() net.Addr { return c.rc.LocalAddr() }

// RemoteAddr returns the peer's address.
func (c *Conn) RemoteAddr() net.Addr { return c.rc.RemoteAddr() }

// Thresholds returns the longest Sends in bytes to the peer and from it, transport header included.
func (c *Conn) Thresholds() (send, receive int) { return c.sendMax, c.receiveMax }

// Credits returns how many calls of this end may be unanswered now, and how many are.
func (c *Conn) Credits() (limit, inflight int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.limit, c.inflight
}

// EnableReverse allows calls of an end that has accepted the connection. The program calls it when the
// peer has said that it expects them (RFC 8167, section 6).
func (c *Conn) EnableReverse() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.reverse = true
}

// Done returns a channel that is closed when the connection has ended and all its calls have failed.
func (c *Conn) Done() <-chan struct{} { return c.done }

// Err returns why the connection has ended or ends, or nil.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection at once. Unanswered calls fail with ErrLost.
func (c *Conn) Close() error {
	c.kill(ErrClosed)
	<-c.done
	return nil
}

// Shutdown answers the calls that the peer has made, waits for the replies to calls of this end, and
// ends the connection. It takes no further calls in either direction. If ctx ends first, Shutdown closes the
// connection at once and returns the error of ctx. The peer retransmits what was not answered, elsewhere.
func (c *Conn) Shutdown(ctx context.Context) error {
	c.mu.Lock()
	if !c.draining {
		c.draining = true
		c.checkQuiet()
	}
	c.mu.Unlock()
	select {
	case <-c.quiet:
		c.rc.CloseWrite()
	case <-c.done:
		return nil
	case <-ctx.Done():
		c.Close()
		return ctx.Err()
	}
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		c.Close()
		return ctx.Err()
	}
}

// checkQuiet closes quiet if nothing is in progress while the connection drains.
//
// Preconditions: c.mu is held.
func (c *Conn) checkQuiet() {
	if c.draining && c.busy == 0 && c.inflight == 0 {
		select {
		case <-c.quiet:
		default:
			close(c.quiet)
		}
	}
}

// kill ends the connection because of err. The worker that receives does the rest.
func (c *Conn) kill(err error) {
	c.mu.Lock()
	c.err = cmp.Or(c.err, err)
	c.mu.Unlock()
	c.rc.Close()
}

// maxWorkers limits the goroutines: one for each slot, and one that receives.
func (c *Conn) maxWorkers() int32 { return int32(2*c.cfg.Credits + 2) }

func (c *Conn) addWorker() {
	c.nworker.Add(1)
	c.workers.Go(c.work)
}

// work receives until a call of the peer is ready, lets another worker receive, and executes the call.
// So no goroutine hands a call to another, and a procedure may wait without harm to other calls.
func (c *Conn) work() {
	for {
		c.follow.Add(1)
		c.baton.Lock()
		c.follow.Add(-1)
		s := c.next()
		c.baton.Unlock()
		if s == nil {
			return
		}
		if c.follow.Load() == 0 && c.nworker.Load() < c.maxWorkers() {
			c.addWorker()
		}
		s.execute()
	}
}

// next receives until a call of the peer is ready, and returns nil after the end of the connection.
func (c *Conn) next() *slot {
	for !c.ended {
		err := c.rc.Receive(&c.ev)
		switch {
		case err != nil:
			c.over(err)
		case c.ev.Read != nil:
			if s := c.fetched(); s != nil {
				return s
			}
		case !c.discard:
			s, err := c.receive()
			if err != nil {
				c.violated(err)
			}
			if s != nil {
				return s
			}
		}
	}
	return nil
}

// terminateTime limits how long a connection is kept after a Terminate, so that the peer reads it.
const terminateTime = time.Second

// violated ends the stream by a Terminate because the peer has broken a rule of the transport.
func (c *Conn) violated(err error) {
	c.mu.Lock()
	c.err = cmp.Or(c.err, err)
	c.mu.Unlock()
	reason := rdmap.ReasonLocalCatastrophic
	switch {
	case errors.Is(err, errCredits):
		reason = rdmap.ReasonNoBuffer // RFC 5041, section 7.1
	case errors.Is(err, errForeign):
		reason = rdmap.ReasonProtection
	}
	c.discard = true
	c.rc.Terminate(reason, err)
	c.rc.SetReceiveDeadline(time.Now().Add(terminateTime))
}

// over ends the connection: every call fails.
func (c *Conn) over(err error) {
	c.ended = true
	c.rc.Close()
	for { // the stream has ended, but Reads may be left
		if e := c.rc.Receive(&c.ev); e != nil {
			break
		}
		if c.ev.Read != nil {
			c.fetched()
		}
	}
	c.timer.Stop()
	c.mu.Lock()
	c.err = cmp.Or(c.err, err)
	lost := fmt.Errorf("%w: %w", ErrLost, c.err)
	for _, call := range c.calls {
		if call != nil {
			call.finish(lost)
		}
	}
	for call := c.waiting.pop(); call != nil; call = c.waiting.pop() {
		call.finish(lost)
	}
	c.calls, c.inflight = map[uint32]*Call{}, 0
	starved := c.starved.take()
	c.checkQuiet()
	c.mu.Unlock()
	c.cancel(lost)
	for s := starved.pop(); s != nil; s = starved.pop() {
		s.drop()
	}
	close(c.done)
}

// receive handles a message of the peer. It returns a slot with a call that is ready. An error ends the
// connection.
func (c *Conn) receive() (*slot, error) {
	h := &c.head
	payload, err := h.Parse(c.ev.Data)
	c.mu.Lock()
	c.activity++
	call, ours := c.calls[h.XID]
	draining := c.draining
	short := err == wire.ErrTooShort
	foreign := c.ev.Invalidates && (short || call == nil || !call.owns(c.ev.Invalidated))
	c.mu.Unlock()
	if foreign {
		return nil, fmt.Errorf("%w: STag %#x in a message with XID %#x", errForeign, c.ev.Invalidated, h.XID)
	}
	if !c.grown && err == nil {
		c.grown = true
		c.rc.Grow()
	}
	switch {
	case short, h.Proc == wire.Done:
		return nil, nil
	case h.Proc == wire.Error:
		if err == nil && ours {
			c.refused(h, call)
		}
		return nil, nil
	case err != nil:
		return nil, c.malformed(err, ours)
	}
	isCall := h.Proc == wire.NoMsg && len(h.Reads) > 0
	isReply := h.Proc == wire.NoMsg && !isCall && ours
	if h.Proc == wire.Msg && (len(h.Reads) == 0 || h.Reads[0].Position >= 8) {
		xid, kind, ok := oncrpc.PeekType(payload)
		same := ok && xid == h.XID
		isCall, isReply = same && kind == oncrpc.MsgCall, same && kind == oncrpc.MsgReply
	}
	switch {
	case isReply:
		if ours && len(h.Reads) == 0 {
			c.replied(h, call, payload)
		}
		return nil, nil
	case !isCall:
		return nil, c.malformed(wire.ErrNoPayload, ours)
	case c.ev.Invalidates:
		return nil, fmt.Errorf("%w: a call invalidates STag %#x", errForeign, c.ev.Invalidated)
	case draining:
		return nil, nil // the peer retransmits it on another connection
	}
	return c.called(payload)
}

// malformed handles a message whose header is wrong. The peer gets an RDMA_ERROR if it is a call, and
// nothing if it is a reply (RFC 8166, section 4.5). The lists do not say what it is, so the XID decides. An
// end without programs is no responder, and sends no RDMA_ERROR.
func (c *Conn) malformed(err error, ours bool) error {
	if ours || c.opened && c.cfg.Programs.empty() {
		return nil
	}
	s, e := c.takeSlot()
	if s == nil {
		return e
	}
	s.head, c.head = c.head, s.head
	code := wire.CodeChunk
	if err == wire.ErrVersion {
		code = wire.CodeVersion
	}
	s.refuse(code)
	c.rc.Defer()
	return nil
}

// watched is what watch has seen last.
type watched struct {
	taken, fetched, activity uint64
	take, fetch, active      time.Time // of the last progress
}

func (w *watched) reset(now time.Time) { w.take, w.fetch, w.active = now, now, now }

// period returns how often watch looks at the peer.
func (c *Conn) period() time.Duration {
	d := c.cfg.StallTimeout
	if idle := c.cfg.IdleTimeout; idle > 0 {
		d = min(d, idle)
	}
	return max(d/4, time.Millisecond)
}

// watch ends the connection if the peer has owed something for too long, or is idle.
func (c *Conn) watch() {
	now := time.Now()
	taken, owed := c.rc.Taken()
	fetched := c.rc.Fetched()
	c.mu.Lock()
	w := &c.watched
	if owed == 0 || taken != w.taken {
		w.taken, w.take = taken, now
	}
	if c.fetching == 0 || fetched != w.fetched {
		w.fetched, w.fetch = fetched, now
	}
	if c.busy > 0 || c.inflight > 0 || c.activity != w.activity {
		w.activity, w.active = c.activity, now
	}
	idle := c.cfg.IdleTimeout > 0 && now.Sub(w.active) >= c.cfg.IdleTimeout
	stalled := now.Sub(w.take) >= c.cfg.StallTimeout || now.Sub(w.fetch) >= c.cfg.StallTimeout
	over := c.err != nil
	c.mu.Unlock()
	switch {
	case stalled:
		c.kill(errStalled)
	case idle:
		c.kill(errIdle)
	case !over:
		c.timer.Reset(c.period())
	}
}
