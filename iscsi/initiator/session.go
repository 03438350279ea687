package initiator

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
)

// abortTime limits how long the target may take to answer ABORT TASK and logout.
const abortTime = 5 * time.Second

// A Session is a login to one target, over one or more connections. Its methods may be called at any time.
type Session struct {
	cfg    Config
	addr   string
	params Params // of the leading connection

	mu       sync.Mutex
	room     sync.Cond // a slot is free, the window has moved, or the session has ended
	cmdSN    uint32    // of the next command
	maxCmdSN uint32
	conns    []*conn
	turn     uint
	slots    []slot
	free     []uint16
	err      error // why the session ends
	readers  int   // goroutines that receive
	leaving  bool  // a logout is in progress

	requests   chan struct{} // has room for the one request other than a command that is in progress
	generation uint16        // guarded by mu: of the tags of requests
	done       chan struct{}
}

// A slot is the place of a command in the table of tags. A tag is the generation of a slot and its index, so a late PDU of an
// earlier command finds nothing.
type slot struct {
	generation uint16
	c          *Command
}

// requestTag is the lower half of the tags of requests that are not commands.
const requestTag = 0xfffe

// A conn is one connection of a session.
type conn struct {
	s         *Session
	cid       uint16
	carrier   Carrier
	params    Params
	expStatSN uint32     // guarded by Session.mu
	unsent    bool       // guarded by Session.mu: something is queued
	answers   chan reply // of requests
	itt       uint32     // guarded by Session.mu: of the present request, 0 without
	aborting  uint32     // guarded by Session.mu: the task that the present request aborts
	kick      chan struct{}

	// The immediate requests that are outstanding, guarded by Session.mu. They are counted only if the target limits them.
	unexpected int
	retiring   int    // those of them that a later request with a place in the window retires
	retires    uint32 // its CmdSN
}

// A reply is a PDU with memory of its own.
type reply struct {
	bhs  pdu.BHS
	data []byte
}

// ErrClosed is why a session has ended that Close or Logout has ended.
var ErrClosed = fmt.Errorf("the session is closed: %w", net.ErrClosed)

// errLogout is the end after a logout.
var errLogout = fmt.Errorf("the session has logged out: %w", net.ErrClosed)

// Connect logs in to cfg.Target at addr, HOST:PORT, with all connections, and follows up to four redirects (RFC 7143, section 11.13.5).
// ctx is for the login only: without a deadline, Connect waits for a silent target as long as TCP does. Errors begin with the address. A
// refusal is a *LoginError. After an error, nothing is left open.
func Connect(ctx context.Context, addr string, cfg Config) (*Session, error) {
	cfg, err := cfg.complete(false)
	if err != nil {
		return nil, err
	}
	return connect(ctx, addr, cfg, false)
}

// connect logs in and follows redirects.
func connect(ctx context.Context, addr string, cfg Config, discovery bool) (*Session, error) {
	s := &Session{cfg: cfg, done: make(chan struct{}), slots: make([]slot, cfg.QueueDepth), requests: make(chan struct{}, 1)}
	s.room.L = &s.mu
	for i := range s.slots {
		s.free = append(s.free, uint16(len(s.slots)-1-i))
	}
	for redirects := 0; ; redirects++ {
		n, err := s.dial(ctx, addr, 0, discovery)
		var moved *LoginError
		if errors.As(err, &moved) && moved.Address != "" {
			if redirects == maxRedirects {
				return nil, fmt.Errorf("%s: more than %d redirects: %w", addr, maxRedirects, err)
			}
			addr = moved.Address
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", addr, err)
		}
		s.addr, s.params = addr, n.params
		s.start(n)
		break
	}
	for cid := 1; cid < min(cfg.Connections, s.params.MaxConnections); cid++ {
		n, err := s.dial(ctx, addr, uint16(cid), discovery)
		if err != nil {
			s.Close()
			return nil, fmt.Errorf("%s: connection %d of the session: %w", addr, cid+1, err)
		}
		s.start(n)
	}
	return s, nil
}

// maxRedirects limits how many targets one login may be sent to.
const maxRedirects = 4

// dial opens a connection and logs it in.
func (s *Session) dial(ctx context.Context, addr string, cid uint16, discovery bool) (*conn, error) {
	c, err := s.cfg.Transport.Dial(ctx, addr)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	n := &conn{s: s, cid: cid, carrier: c, answers: make(chan reply, 1), kick: make(chan struct{}, 1)}
	l := login{conn: n, discovery: discovery}
	err = l.run()
	if err == nil {
		err = c.EnterFullFeature(n.params, s.find)
	}
	if !stop() || err != nil {
		c.Close()
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("login over %s: %w", s.cfg.Transport.Name(), err)
	}
	return n, nil
}

// start adds a connection that has logged in.
func (s *Session) start(n *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		n.carrier.Close()
		return
	}
	s.conns = append(s.conns, n)
	s.readers++
	go n.receive()
	go n.send()
}

// find returns the command of a tag, or nil.
func (s *Session) find(itt uint32) *Command {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slot := s.slotOf(itt); slot != nil {
		return slot.c
	}
	return nil
}

// take returns what find returns, and frees the slot.
func (s *Session) take(itt uint32) (c *Command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slot := s.slotOf(itt); slot != nil {
		c, slot.c = slot.c, nil
		s.free = append(s.free, uint16(itt))
		s.room.Signal()
	}
	return c
}

// slotOf returns the slot of a tag if a command is in it, or nil.
// Preconditions: s.mu is held.
func (s *Session) slotOf(itt uint32) *slot {
	if i := itt & 0xffff; int(i) < len(s.slots) {
		if slot := &s.slots[i]; slot.c != nil && uint32(slot.generation) == itt>>16 {
			return slot
		}
	}
	return nil
}

// waitForRoom waits for the window of the target, and for a slot if that is needed. Another goroutine sends what is queued meanwhile.
// Preconditions: s.mu is held.
func (s *Session) waitForRoom(ctx context.Context, slot bool) error {
	// A signal for a free slot may wake a caller that waits for the window only. No other needs it: that one waits for the window, too, and
	// when it moves, all wake.
	full := func() bool { return slot && len(s.free) == 0 || pdu.Before(s.maxCmdSN, s.cmdSN) }
	if s.err == nil && full() {
		for _, n := range s.conns {
			if n.unsent {
				n.unsent = false
				n.wake()
			}
		}
		if ctx.Done() != nil {
			defer context.AfterFunc(ctx, func() {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.room.Broadcast()
			})()
		}
		for s.err == nil && ctx.Err() == nil && full() {
			s.room.Wait()
		}
	}
	if s.err != nil {
		return s.err
	}
	if ctx.Err() != nil {
		s.room.Signal() // it may have been for others
		return context.Cause(ctx)
	}
	return nil
}

// wake makes the goroutine of send flush.
func (n *conn) wake() {
	select {
	case n.kick <- struct{}{}:
	default:
	}
}

// send sends what the goroutine that receives has queued. That one must not wait until the target takes something.
func (n *conn) send() {
	for {
		select {
		case <-n.kick:
			n.carrier.Flush()
		case <-n.s.done:
			return
		}
	}
}

// receive receives until the connection ends, and with it the session. The last connection ends the commands: until then
// another may place data in their memory.
func (n *conn) receive() {
	var p PDU
	var err error
	for err == nil {
		if err = n.carrier.Receive(&p); err == nil {
			err = n.dispatch(&p)
		}
	}
	s := n.s
	s.mu.Lock()
	ends := s.err != nil || !s.leaving || n == s.conns[0] // a target that logs out may close the other connections first
	s.mu.Unlock()
	if ends {
		s.fail(err)
	}
	s.mu.Lock()
	s.readers--
	last := s.readers == 0
	s.mu.Unlock()
	if !last {
		return
	}
	for i := range s.slots {
		s.mu.Lock()
		c := s.slots[i].c
		s.slots[i].c = nil
		s.mu.Unlock()
		if c != nil {
			c.Err = s.err
			c.conn.carrier.End(c)
			c.Release()
		}
	}
	close(s.done)
}

// fail ends the session, for the first reason that comes.
func (s *Session) fail(err error) {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
	}
	conns := s.conns
	s.room.Broadcast()
	s.mu.Unlock()
	for _, n := range conns {
		n.carrier.Close()
	}
}

// dispatch handles a PDU.
func (n *conn) dispatch(p *PDU) error {
	h, s := p.BHS, n.s
	op := h.Opcode()
	if !op.FromTarget() {
		return fmt.Errorf("the target sent a %v, which only initiators send", op)
	}
	s.mu.Lock()
	if op != pdu.NOPIn || h.ITT() != pdu.ReservedTag {
		n.expStatSN = h.StatSN() + 1
	}
	if m := h.MaxCmdSN(); pdu.Before(s.maxCmdSN, m) && !pdu.Before(m+1, h.ExpCmdSN()) {
		s.maxCmdSN = m
		s.room.Broadcast()
	}
	s.retire(h.ExpCmdSN())
	s.mu.Unlock()
	switch op {
	case pdu.SCSIResponse, pdu.DataIn:
		c := s.find(h.ITT())
		if c == nil || c.conn != n {
			return fmt.Errorf("%v of task %#x, which is not in progress on this connection", op, h.ITT())
		}
		err := c.answer(p)
		if err == nil && c.Err == nil && c.Status == 0 {
			err = n.carrier.Check(c)
		}
		if err != nil {
			return err
		}
		s.take(h.ITT())
		n.carrier.End(c)
		c.Release()
		return nil
	case pdu.NOPIn:
		switch {
		case h.ITT() == pdu.ReservedTag && h.TTT() != pdu.ReservedTag:
			return n.pong(h, p.Data)
		case h.ITT() == pdu.ReservedTag:
			return nil // it only moves the window
		}
		return n.answerTo(p)
	case pdu.TaskMgmtResp, pdu.TextResp, pdu.LogoutResp:
		return n.answerTo(p)
	case pdu.AsyncMessage:
		if f := s.cfg.OnAsync; f != nil {
			f(AsyncEvent{Event: h.AsyncEvent(), Parameters: [3]uint16{h.Parameter(1), h.Parameter(2), h.Parameter(3)}, Data: p.Data})
		}
		return nil
	case pdu.Reject:
		return &RejectError{Reason: h.Reason(), Request: rejected(p.Data)}
	}
	return fmt.Errorf("the target sent a %v, which nothing has asked for", op)
}

// A RejectError says that the target rejected a PDU (RFC 7143, section 11.17). It ends the session.
type RejectError struct {
	Reason  pdu.RejectReason
	Request pdu.Opcode // of the PDU; 0x3f if the target did not return it
}

// Error implements error.
func (e *RejectError) Error() string {
	return fmt.Sprintf("the target rejected a %v: reason %#02x", e.Request, byte(e.Reason))
}

// rejected returns the opcode of the PDU that a Reject carries.
func rejected(data []byte) pdu.Opcode {
	if len(data) < pdu.BHSLen {
		return pdu.Reject
	}
	return pdu.BHS(data).Opcode()
}

// pong answers the ping of the target with the data of the ping.
func (n *conn) pong(ping pdu.BHS, data []byte) error {
	var b [pdu.BHSLen]byte
	r := pdu.BHS(b[:])
	r.Reset(pdu.NOPOut, pdu.FlagF)
	r.SetImmediate()
	r.SetLUN(ping.LUN())
	r.SetITT(pdu.ReservedTag)
	r.SetTTT(ping.TTT())
	data = data[:min(len(data), n.params.MaxSendSegment)]
	n.s.mu.Lock()
	err := n.post(r, data)
	n.s.mu.Unlock()
	n.wake()
	return err
}

// admits reports whether the target takes a further immediate request (RFC 7145, section 8.1.1.3). Answers to its pings do not count.
// Preconditions: s.mu is held.
func (s *Session) admits() bool {
	total := 0
	for _, n := range s.conns {
		total += n.unexpected
	}
	return s.params.MaxUnexpected == 0 || total < s.params.MaxUnexpected
}

// regulated notes that n sends a request with a place in the window.
// Preconditions: s.mu is held.
func (n *conn) regulated(cmdSN uint32) {
	if n.retiring == 0 {
		n.retiring, n.retires = n.unexpected, cmdSN
	}
}

// retire notes how far the target has come.
// Preconditions: s.mu is held.
func (s *Session) retire(expCmdSN uint32) {
	for _, n := range s.conns {
		if n.retiring > 0 && pdu.Before(n.retires, expCmdSN) {
			n.unexpected -= n.retiring
			n.retiring = 0
		}
	}
}

// post stamps the numbers into a PDU and queues it.
// Preconditions: Session.mu is held.
func (n *conn) post(h pdu.BHS, data []byte) error {
	h.SetCmdSN(n.s.cmdSN)
	h.SetExpStatSN(n.expStatSN)
	h.SetDataSegmentLength(len(data))
	return n.carrier.Post(h, data)
}

// answerTo passes the answer to the request that waits for it. Others are from requests that have given up.
func (n *conn) answerTo(p *PDU) error {
	n.s.mu.Lock()
	mine, aborting := p.BHS.ITT() == n.itt && n.itt != 0, n.aborting
	if mine {
		n.itt = 0
		if p.BHS.Opcode() == pdu.LogoutResp && p.BHS.Response() == pdu.LogoutSuccess && n.s.err == nil {
			n.s.err = errLogout // before the target closes the connection
		}
	}
	n.s.mu.Unlock()
	if !mine {
		return nil
	}
	if p.BHS.Opcode() == pdu.TaskMgmtResp && p.BHS.Response() <= pdu.TaskDoesNotExist && aborting != 0 {
		if c := n.s.take(aborting); c != nil { // no response follows an abort
			c.Err = ErrAborted
			n.carrier.End(c)
			c.Release()
		}
	}
	a := reply{bhs: append(pdu.BHS(nil), p.BHS...), data: append([]byte(nil), p.Data...)}
	select {
	case n.answers <- a:
	default:
	}
	return nil
}

// begin waits until no other request is in progress. After nil, the caller calls end.
func (s *Session) begin(ctx context.Context) error {
	select {
	case s.requests <- struct{}{}:
		return nil
	case <-s.done:
		return s.Err()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (s *Session) end() { <-s.requests }

// request sends a request and waits for the answer. The request is immediate, or waits for a place in the window if the target admits no
// further immediate one. Without a tag the request gets one.
// Preconditions: the caller is between begin and end.
func (n *conn) request(ctx context.Context, h pdu.BHS, data []byte, want pdu.Opcode) (reply, error) {
	select {
	case <-n.answers: // to one that has given up
	default:
	}
	if err := n.postRequest(ctx, h, data); err != nil {
		return reply{}, err
	}
	n.wake()
	s := n.s
	var a reply
	select {
	case a = <-n.answers:
	case <-s.done:
		select {
		case a = <-n.answers: // the last one, to a logout
		default:
			return a, s.Err()
		}
	case <-ctx.Done():
		return a, context.Cause(ctx)
	}
	if a.bhs.Opcode() != want {
		return a, fmt.Errorf("the target answered a %v with a %v", h.Opcode(), a.bhs.Opcode())
	}
	return a, nil
}

// postRequest queues the request of request.
func (n *conn) postRequest(ctx context.Context, h pdu.BHS, data []byte) error {
	s := n.s
	s.mu.Lock()
	defer s.mu.Unlock()
	immediate := s.admits()
	if !immediate {
		if err := s.waitForRoom(ctx, false); err != nil {
			return err
		}
	}
	if s.err != nil {
		return s.err
	}
	if h.ITT() == 0 {
		s.generation++
		h.SetITT(uint32(s.generation)<<16 | requestTag)
	}
	n.itt, n.aborting = h.ITT(), 0
	if h.Opcode() == pdu.TaskMgmtReq && h.Function() == pdu.AbortTask {
		n.aborting = h.ReferencedTaskTag()
	}
	if immediate {
		h.SetImmediate()
	}
	err := n.post(h, data)
	switch {
	case err != nil:
	case !immediate:
		n.regulated(s.cmdSN)
		s.cmdSN++
	case s.params.MaxUnexpected > 0:
		n.unexpected++
	}
	return err
}

// abort ends c by ABORT TASK. If the target does not answer within abortTime, the session ends.
func (s *Session) abort(c *Command) {
	ctx, cancel := context.WithTimeout(context.Background(), abortTime)
	defer cancel()
	var b [pdu.BHSLen]byte
	h := pdu.BHS(b[:])
	h.Reset(pdu.TaskMgmtReq, pdu.FlagF|pdu.AbortTask)
	h.SetLUN(EncodeLUN(c.LUN))
	h.SetReferencedTaskTag(c.itt)
	h.SetRefCmdSN(c.BHS().CmdSN())
	err := s.begin(ctx)
	if err == nil {
		var a reply
		a, err = c.conn.request(ctx, h, nil, pdu.TaskMgmtResp)
		if err == nil && a.bhs.Response() > pdu.TaskDoesNotExist {
			err = fmt.Errorf("the target answered with response %d", a.bhs.Response())
		}
		s.end()
	}
	if err != nil {
		s.fail(fmt.Errorf("ABORT TASK: %w", err))
	}
}

// ErrAborted is the error of a command that was aborted because its context ended.
var ErrAborted = errors.New("the command was aborted")

// TaskManagement runs a task management function on a LUN, such as pdu.LogicalUnitReset, and returns the response, such as
// pdu.FunctionComplete (RFC 7143, section 11.6.1). Functions on one task are not possible. If ctx ends, TaskManagement returns its
// error, and the target may still do the function. Requests other than commands are one at a time.
func (s *Session) TaskManagement(ctx context.Context, function byte, lun int) (response byte, err error) {
	if lun < 0 || lun > MaxLUN {
		return 0, fmt.Errorf("LUN %d: it can be 0 to %d", lun, MaxLUN)
	}
	switch function {
	case pdu.AbortTask, pdu.TaskReassign, pdu.QueryTask:
		return 0, fmt.Errorf("function %d is about one task", function)
	}
	if err := s.begin(ctx); err != nil {
		return 0, err
	}
	defer s.end()
	var b [pdu.BHSLen]byte
	h := pdu.BHS(b[:])
	h.Reset(pdu.TaskMgmtReq, pdu.FlagF|function)
	h.SetLUN(EncodeLUN(lun))
	h.SetReferencedTaskTag(pdu.ReservedTag)
	a, err := s.leading().request(ctx, h, nil, pdu.TaskMgmtResp)
	if err != nil {
		return 0, err
	}
	return a.bhs.Response(), nil
}

// Ping sends a NOP-Out with data and waits for the answer, or until ctx ends (RFC 7143, section 11.18). A program that has to notice a silent
// target calls it from time to time, and closes the session after an error.
func (s *Session) Ping(ctx context.Context) error {
	if err := s.begin(ctx); err != nil {
		return err
	}
	defer s.end()
	var b [pdu.BHSLen]byte
	h := pdu.BHS(b[:])
	h.Reset(pdu.NOPOut, pdu.FlagF)
	h.SetTTT(pdu.ReservedTag)
	data := binary.BigEndian.AppendUint64(nil, uint64(time.Now().UnixNano()))
	a, err := s.leading().request(ctx, h, data, pdu.NOPIn)
	if err == nil && string(a.data) != string(data) {
		err = fmt.Errorf("the answer to a ping has other data: % x, not % x", a.data, data)
	}
	return err
}

// sendTargets returns the answer to SendTargets=which (RFC 7143, appendix C).
func (s *Session) sendTargets(ctx context.Context, which string) ([]keys.Pair, error) {
	if err := s.begin(ctx); err != nil {
		return nil, err
	}
	defer s.end()
	data, ttt := keys.AppendPair(nil, keys.Pair{Key: "SendTargets", Value: which}), uint32(pdu.ReservedTag)
	var text []byte
	var itt uint32 // of all requests of the exchange
	for {
		var b [pdu.BHSLen]byte
		h := pdu.BHS(b[:])
		h.Reset(pdu.TextReq, pdu.FlagF)
		h.SetITT(itt)
		h.SetTTT(ttt)
		a, err := s.leading().request(ctx, h, data, pdu.TextResp)
		if err != nil {
			return nil, err
		}
		if text = append(text, a.data...); len(text) > maxTargetsText {
			return nil, fmt.Errorf("the list of targets is longer than %d bytes", maxTargetsText)
		}
		if ttt = a.bhs.TTT(); ttt == pdu.ReservedTag {
			return keys.ParseText(text)
		}
		itt, data = h.ITT(), nil
	}
}

// maxTargetsText limits the list of targets, in bytes.
const maxTargetsText = 4 << 20

func (s *Session) leading() *conn { return s.conns[0] }

// Params returns what the leading connection has agreed on.
func (s *Session) Params() Params { return s.params }

// Connections returns the number of connections.
func (s *Session) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// Address returns the address of the target, after redirects.
func (s *Session) Address() string { return s.addr }

// Done returns a channel that is closed when the session has ended. All its commands have come back then.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err returns why the session ends, or nil.
func (s *Session) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Close drops all connections, and waits until all commands have come back. Those in progress end with ErrClosed. The goroutines of the
// session end then, too. Close returns nil, also when it is called again. OnAsync must not call it.
func (s *Session) Close() error {
	s.fail(ErrClosed)
	<-s.done
	return nil
}

// Logout closes the session in an orderly way (RFC 7143, section 11.14): it asks the target to end it, and then does what Close
// does. Commands in progress end with an error that is net.ErrClosed for errors.Is. Logout takes 5 s at most, and less if ctx ends. After
// an error, the session is closed, too.
func (s *Session) Logout(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, abortTime)
	defer cancel()
	err := s.logout(ctx)
	s.fail(errLogout)
	<-s.done
	return err
}

func (s *Session) logout(ctx context.Context) error {
	if err := s.begin(ctx); err != nil {
		return fmt.Errorf("logout: %w", err)
	}
	defer s.end()
	var b [pdu.BHSLen]byte
	h := pdu.BHS(b[:])
	h.Reset(pdu.LogoutReq, pdu.FlagF|pdu.LogoutCloseSession)
	s.mu.Lock()
	s.leaving = true
	s.mu.Unlock()
	a, err := s.leading().request(ctx, h, nil, pdu.LogoutResp)
	if err == nil && a.bhs.Response() != pdu.LogoutSuccess {
		err = fmt.Errorf("logout: the target answered with response %d", a.bhs.Response())
	}
	return err
}
