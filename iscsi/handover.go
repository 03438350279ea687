package iscsi

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/security"
)

// A hand-over gives sessions to another process, with their sockets. Pause lets them come to rest:
// commands that have begun end, and their answers leave. Requests that come meanwhile do not begin. Then
// nothing of a session runs, and SessionState describes it. In the other process Node.Continue makes the
// session again, and the requests that had not begun begin there. What the initiator sends meanwhile
// waits in the socket.
//
// A session is not at rest while its initiator owes data, takes no answers, or has received a part of a
// PDU only, and while a store is at work for it. Discovery sessions, those with an ErrorRecoveryLevel above 0 or with
// a fence, and those in logout do not come to rest.

// A SessionState is a session at rest.
type SessionState struct {
	Initiator string          `json:"initiator"` // normalised
	ISID      []byte          `json:"isid"`
	Target    string          `json:"target"` // normalised
	TPGT      uint16          `json:"tpgt"`
	TSIH      uint16          `json:"tsih"`
	Params    Params          `json:"params"`
	Started   time.Time       `json:"started"`
	ExpCmdSN  uint32          `json:"exp_cmd_sn"`
	MaxCmdSN  uint32          `json:"max_cmd_sn"`
	Depth     int             `json:"depth"`             // commands in flight at most
	Skipped   []uint32        `json:"skipped,omitempty"` // CmdSNs that count as received, without a command
	Units     []lun.PathState `json:"units"`
	Conns     []ConnState     `json:"connections"`
}

// A ConnState is a connection at rest.
type ConnState struct {
	CID       uint16          `json:"cid"`
	Portal    string          `json:"portal"` // PortalConfig.Listen
	Transport string          `json:"transport"`
	Accepted  time.Time       `json:"accepted"`
	Params    Params          `json:"params"`
	StatSN    uint32          `json:"stat_sn"`
	RecvLimit int             `json:"recv_limit"` // longest data segment of the initiator, bytes
	Heard     bool            `json:"heard"`      // the initiator has sent a PDU in the full feature phase
	LastPing  uint32          `json:"last_ping"`  // Target Transfer Tag
	Awaited   []AwaitedState  `json:"awaited,omitempty"`
	LastText  uint32          `json:"last_text"` // Target Transfer Tag
	Requests  []RequestState  `json:"requests,omitempty"`
	Mover     json.RawMessage `json:"mover"` // of Resumable.State

	// Socket is the socket of the connection.
	Socket net.Conn `json:"-"`
}

// An AwaitedState is a PDU that the initiator did not ask for and has not acknowledged.
type AwaitedState struct {
	StatSN uint32 `json:"stat_sn"`
	TTT    uint32 `json:"ttt"`
}

// A RequestState is a request that has come and not begun.
type RequestState struct {
	Seq           uint64 `json:"seq"` // order among those of the session that may begin; 0: its CmdSN is ahead of a gap
	BHS           []byte `json:"bhs"`
	CDB           []byte `json:"cdb,omitempty"`  // of more than 16 bytes
	Data          []byte `json:"data,omitempty"` // all that came unsolicited
	Advertisement []byte `json:"advertisement,omitempty"`
	Refusal       []byte `json:"refusal,omitempty"` // sense key, ASC and ASCQ with which it will end
	NoMemory      bool   `json:"no_memory,omitempty"`
}

// A Rest is the time in which sessions are at rest.
type Rest struct {
	node     *Node
	sessions []*session // at rest
	others   []*session // without those in discovery
}

// restStep is how often Pause looks whether sessions have come to rest.
const restStep = time.Millisecond

// Pause lets sessions come to rest, until ctx ends. Logins are refused from then on, and requests do not
// begin, until Resume. Only one goroutine at a time calls Pause.
func (nd *Node) Pause(ctx context.Context) *Rest {
	r := &Rest{node: nd}
	nd.mu.Lock()
	nd.pausing.Store(true)
	for _, s := range nd.sessions {
		if !s.discovery {
			r.others = append(r.others, s)
		}
	}
	nd.mu.Unlock()
	for _, s := range r.others {
		s.shared.mu.Lock()
		s.shared.pausing = true
		s.shared.mu.Unlock()
	}
	tick := time.NewTicker(restStep)
	defer tick.Stop()
	for {
		r.others = slices.DeleteFunc(r.others, func(s *session) bool {
			rests := s.rest()
			if rests {
				r.sessions = append(r.sessions, s)
			}
			return rests
		})
		if !slices.ContainsFunc(r.others, (*session).mayRest) {
			return r
		}
		select {
		case <-ctx.Done():
			return r
		case <-tick.C:
		}
	}
}

// rest brings s nearer to rest. It reports whether s is at rest.
func (s *session) rest() bool {
	s.shared.mu.Lock()
	defer s.shared.mu.Unlock()
	quiet, resting := s.quiet(), true
	for _, c := range s.conns {
		switch r := c.dm.(Resumable); {
		case c.phase != phaseFullFeature:
			return false
		case !quiet && c.toRest: // what has come since then needs more
			c.wakeUp()
		case !quiet:
			s.shared.mu.Unlock()
			c.dm.Flush()
			s.shared.mu.Lock()
		case !c.toRest:
			c.toRest = true
			r.Pause()
		}
		resting = resting && c.resting
	}
	if !quiet || !resting {
		return false
	}
	for _, c := range s.conns {
		c.setFrozen(true)
	}
	if s.quiet() {
		return true
	}
	for _, c := range s.conns {
		c.setFrozen(false)
	}
	return false
}

// mayRest reports whether s comes to rest when its commands have ended.
func (s *session) mayRest() bool {
	s.shared.mu.Lock()
	defer s.shared.mu.Unlock()
	return s.resumable()
}

// resumable reports whether s is of a kind that another process can continue.
//
// Preconditions: s.shared.mu is held.
func (s *session) resumable() bool {
	invariant.Held(&s.shared.mu)
	return !s.closed && len(s.lost) == 0 && s.shared.fence == nil && s.params.ErrorRecoveryLevel == 0 && len(s.conns) > 0
}

// quiet reports whether nothing of s runs or is on its way.
//
// Preconditions: s.shared.mu is held.
func (s *session) quiet() bool {
	sh := s.shared
	invariant.Held(&sh.mu)
	if !s.resumable() {
		return false
	}
	if sh.tasks.any(func(t *Task) bool {
		return t.state != taskReady && (t.state != taskWaiting || t.needsData) || t.aborted.Load()
	}) {
		return false
	}
	return !slices.ContainsFunc(s.conns, func(c *conn) bool { return !c.quiet() })
}

// quiet reports whether all slots in use are those of requests that have not begun, and nothing is being
// sent.
//
// Preconditions: c.mu is held.
func (c *conn) quiet() bool {
	r, ok := c.dm.(Resumable)
	if !ok || c.phase != phaseFullFeature || c.textBusy || c.text.open || c.unexpected.heldBack != nil || c.recovery.store.on {
		return false
	}
	waiting := 0
	c.shared.tasks.each(func(t *Task) {
		if t.conn == c {
			waiting++
		}
	})
	return c.slots.tasks() == waiting && r.Idle()
}

// setFrozen lets nobody take a slot, so that nothing more is sent, or ends that.
func (c *conn) setFrozen(frozen bool) {
	c.slots.mu.Lock()
	c.slots.closed = frozen
	c.slots.mu.Unlock()
	c.slots.freed.Broadcast()
}

// rest waits until a hand-over ends, after Receive has timed out because of it. It returns false if that is
// not why.
//
// Preconditions: c.baton is held.
func (c *conn) rest() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.phase != phaseFullFeature || c.sess.discovery {
		return false
	}
	for c.toRest && c.phase == phaseFullFeature {
		c.resting = true
		c.shared.changed.Wait()
	}
	c.resting = false
	return true
}

// wakeUp ends the rest of c.
//
// Preconditions: c.mu is held.
func (c *conn) wakeUp() {
	invariant.Held(&c.mu)
	c.toRest, c.resting = false, false
	c.dm.(Resumable).Unpause()
	c.shared.changed.Broadcast()
}

// nextReady takes the next task that may begin from c.ready, or returns nil.
//
// Preconditions: c.mu is held.
func (c *conn) nextReady() *Task {
	if !c.shared.pausing {
		return c.ready.Pop()
	}
	for t := range c.ready.All() {
		if t.fromTarget {
			c.ready.Remove(&t.link)
			return t
		}
	}
	return nil
}

// Resume ends the rest: requests begin, and logins are welcome.
func (r *Rest) Resume() {
	nd := r.node
	nd.mu.Lock()
	nd.pausing.Store(false)
	nd.mu.Unlock()
	for _, s := range slices.Concat(r.sessions, r.others) {
		s.shared.mu.Lock()
		s.shared.pausing = false
		conns := slices.Clone(s.conns)
		s.shared.mu.Unlock()
		for _, c := range conns {
			c.setFrozen(false)
			c.mu.Lock()
			live := c.phase == phaseFullFeature
			if live && c.toRest {
				c.wakeUp()
			}
			c.mu.Unlock()
			if live {
				c.runReady()
				c.keepalive()
			}
		}
	}
	r.sessions, r.others = nil, nil
}

var errHandedOver = errors.New("the target is being handed over to another process, and the session did not come to rest in time")

// EndOthers ends the sessions that have not come to rest, with their commands, and waits for that until ctx
// ends. It returns how many there were.
func (r *Rest) EndOthers(ctx context.Context) (ended int, err error) {
	for _, s := range r.others {
		s.end(errHandedOver)
	}
	for _, s := range r.others {
		select {
		case <-s.done:
			ended++
		case <-ctx.Done():
			return ended, fmt.Errorf("the session of %s with %s does not end: %w", s.key.initiator, s.key.target, ctx.Err())
		}
	}
	r.others = nil
	return ended, nil
}

// Sessions returns the sessions at rest.
func (r *Rest) Sessions() ([]SessionState, error) {
	list := make([]SessionState, len(r.sessions))
	for i, s := range r.sessions {
		var err error
		if list[i], err = s.state(); err != nil {
			return nil, fmt.Errorf("session of %s with %s: %w", s.key.initiator, s.key.target, err)
		}
	}
	return list, nil
}

// state returns s, which is at rest.
func (s *session) state() (SessionState, error) {
	s.shared.mu.Lock()
	defer s.shared.mu.Unlock()
	w := &s.shared.win
	st := SessionState{
		Initiator: s.key.initiator, ISID: s.key.isid[:], Target: s.key.target, TPGT: s.key.tpgt,
		TSIH: s.tsih, Params: s.params, Started: s.started, ExpCmdSN: w.exp, MaxCmdSN: w.max, Depth: w.depth,
		Units: s.nexus.State(),
	}
	for sn := w.exp; w.contains(sn); sn++ {
		if slot := w.slot(sn); slot.received && slot.task == nil {
			st.Skipped = append(st.Skipped, sn)
		}
	}
	for _, c := range s.conns {
		cs, err := c.state()
		if err != nil {
			return st, fmt.Errorf("connection %d: %w", c.cid, err)
		}
		st.Conns = append(st.Conns, cs)
	}
	return st, nil
}

// state returns c, which is at rest.
//
// Preconditions: c.mu is held.
func (c *conn) state() (ConnState, error) {
	invariant.Held(&c.mu)
	r := c.dm.(Resumable)
	if c.phase != phaseFullFeature {
		return ConnState{}, errors.New("it has ended")
	}
	mover, err := r.State()
	if err != nil {
		return ConnState{}, err
	}
	text, err := json.Marshal(mover)
	if err != nil {
		return ConnState{}, err
	}
	st := ConnState{
		CID: c.cid, Portal: c.portal.Listen, Transport: c.dm.Transport(), Accepted: c.serveOptions.Accepted, Params: c.params, StatSN: c.statSN,
		RecvLimit: c.recvLimit, Heard: c.received.Load() > 0, LastPing: c.unexpected.lastPing, LastText: c.text.ttt,
		Mover: text, Socket: r.Socket(),
	}
	for _, u := range c.unexpected.outstanding {
		st.Awaited = append(st.Awaited, AwaitedState{u.statSN, u.ttt})
	}
	c.shared.tasks.each(func(t *Task) {
		if t.conn == c {
			st.Requests = append(st.Requests, t.requestState(r))
		}
	})
	slices.SortFunc(st.Requests, func(a, b RequestState) int { return cmp.Compare(a.Seq, b.Seq) })
	return st, nil
}

// requestState returns t, which has not begun.
func (t *Task) requestState(r Resumable) RequestState {
	st := RequestState{Seq: t.seq, BHS: slices.Clone(t.req[:]), NoMemory: t.noMemory, Data: slices.Clone(t.data)}
	if !t.isCommand() {
		return st
	}
	if len(t.cmd.CDB) > pdu.CDBLen {
		st.CDB = slices.Clone(t.cmd.CDB)
	}
	if t.bound {
		st.Advertisement = r.Advertisement(t)
	}
	switch {
	case t.refusal != (lun.Sense{}):
		st.Refusal = []byte{t.refusal.Key, t.refusal.ASC, t.refusal.ASCQ}
	case t.noMemory:
	case t.placed:
		st.Data = slices.Clone(t.buf.data[:t.unsolicited])
	case t.unsolicited > 0:
		st.Data = slices.Clone(t.stash.data[:t.unsolicited])
	}
	return st
}

var errContinued = errors.New("another process continues the session")

// Release ends the sessions at rest here, without a word to their initiators, because another process has them. It
// waits for that until ctx ends.
func (r *Rest) Release(ctx context.Context) error {
	for _, s := range r.sessions {
		s.end(errContinued)
	}
	for _, s := range r.sessions {
		select {
		case <-s.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	r.sessions = nil
	return nil
}

// An End is where a connection of a session continues.
type End struct {
	Portal  *Portal
	Mover   Datamover // with the state of ConnState.Mover; a Resumable
	Options ServeOptions
}

// Continue makes a session of another process again, with one End for each of its connections. Each
// function that it returns runs one of the connections to its end, like Serve: the caller calls all of
// them, each on a goroutine of its own. After an error the movers are closed.
func (nd *Node) Continue(st SessionState, ends []End) (run []func() error, err error) {
	conns := make([]*conn, 0, len(ends))
	defer func() {
		if err == nil {
			return
		}
		for _, c := range conns {
			c.stop(err)
			c.finish()
			c.dropOut()
		}
		for _, e := range ends[len(conns):] {
			e.Mover.Close()
		}
	}()
	key, t, err := nd.keyOf(&st, ends)
	if err != nil {
		return nil, err
	}
	var sh *shared
	for i, e := range ends {
		c := newConn(e.Portal, e.Mover, e.Options)
		c.enroll()
		conns = append(conns, c)
		if i == 0 {
			sh = newShared(slotsFor(st.Depth))
			sh.win.resume(&st)
		}
		c.continueAs(&st.Conns[i], sh, st.Depth)
		if !c.reserveMemory(key.initiator) {
			return nil, errNoMemory
		}
	}
	if err := nd.takeOver(&st, key, t, conns); err != nil {
		return nil, err
	}
	for _, c := range conns {
		if joined := c.serveOptions.Joined; joined != nil {
			joined(st.TSIH, false)
		}
		c.mu.Lock()
		c.enterPhase(phaseFullFeature)
		c.mu.Unlock()
		run = append(run, func() error {
			defer c.dropOut()
			return c.work()
		})
	}
	if err := takeRequests(&st, conns); err != nil {
		return nil, err
	}
	return run, nil
}

// keyOf checks st against what the node has.
func (nd *Node) keyOf(st *SessionState, ends []End) (key sessionKey, t *target, err error) {
	name, err := security.NormalizeName(st.Initiator)
	if err != nil {
		return key, nil, err
	}
	key = sessionKey{initiator: name, target: st.Target, tpgt: st.TPGT}
	t = nd.target(st.Target)
	depth := uint32(st.Depth)
	switch {
	case len(st.ISID) != len(key.isid) || st.TSIH == 0:
		return key, nil, fmt.Errorf("ISID %x, TSIH %d: not those of a session", st.ISID, st.TSIH)
	case t == nil:
		return key, nil, fmt.Errorf("%w: %s", ErrNoTarget, st.Target)
	case st.Params.Discovery || st.Params.ErrorRecoveryLevel > 0:
		return key, nil, fmt.Errorf("ErrorRecoveryLevel %d, discovery: %t: such a session does not continue", st.Params.ErrorRecoveryLevel, st.Params.Discovery)
	case st.Depth < 1 || st.Depth > maxDepth || st.MaxCmdSN-st.ExpCmdSN+1 > depth:
		return key, nil, fmt.Errorf("window of %d CmdSNs for %d commands", st.MaxCmdSN-st.ExpCmdSN+1, st.Depth)
	case len(st.Conns) == 0 || len(st.Conns) != len(ends):
		return key, nil, fmt.Errorf("%d connections with %d movers", len(st.Conns), len(ends))
	}
	copy(key.isid[:], st.ISID)
	for i, e := range ends {
		if _, ok := e.Mover.(Resumable); !ok || e.Portal.TPGT != st.TPGT || len(st.Conns[i].Requests) > slotsFor(st.Depth) {
			return key, nil, fmt.Errorf("connection %d: portal group %d instead of %d, or %d requests", i, e.Portal.TPGT, st.TPGT, len(st.Conns[i].Requests))
		}
	}
	return key, t, nil
}

// maxDepth bounds the depth of a window that another process had.
const maxDepth = 1 << 14

// resume makes w the window of st.
func (w *window) resume(st *SessionState) {
	w.open(st.ExpCmdSN, st.Depth)
	w.max, w.told = st.MaxCmdSN, st.MaxCmdSN
	for _, sn := range st.Skipped {
		if w.accepts(sn) {
			w.receive(sn, nil)
		}
	}
}

// continueAs gives c the state st in the session with that shared state.
//
// Preconditions: nothing else uses c and sh.
func (c *conn) continueAs(st *ConnState, sh *shared, depth int) {
	c.cid, c.params, c.statSN, c.recvLimit = st.CID, st.Params, st.StatSN, st.RecvLimit
	if st.Heard {
		c.received.Store(1)
	}
	c.unexpected.lastPing, c.text.ttt = st.LastPing, st.LastText
	for _, u := range st.Awaited {
		c.unexpected.outstanding = append(c.unexpected.outstanding, unexpectedPDU{u.StatSN, u.TTT})
	}
	c.slots.setMax(slotsFor(depth))
	c.join(sh)
}

// takeOver makes the session st with those connections.
func (nd *Node) takeOver(st *SessionState, key sessionKey, t *target, conns []*conn) error {
	nd.mu.Lock()
	defer nd.mu.Unlock()
	if nd.sessions[st.TSIH] != nil || nd.find(key) != nil {
		return fmt.Errorf("TSIH %d or its initiator port has a session", st.TSIH)
	}
	s := &session{shared: conns[0].shared, node: nd, key: key, tsih: st.TSIH, params: st.Params,
		target: t, started: st.Started, done: make(chan struct{})}
	if _, refusal := nd.takePlaces(s, true); refusal != nil {
		return refusal
	}
	for range conns[1:] {
		if refusal := nd.logIn(key.initiator, true); refusal != nil {
			return refusal
		}
	}
	s.nexus = t.LUNs.NewNexus(lun.Port{InitiatorName: key.initiator, ISID: key.isid, TargetName: t.Name, TPGT: key.tpgt})
	s.nexus.SetProtocolLevel(st.Params.ISCSIProtocolLevel)
	if st.Params.RDMAExtensions {
		s.nexus.SetTransport(lun.ISER)
	}
	s.nexus.Restore(st.Units)
	s.nexus.OnPreempt(s.abortUnit)
	s.nexus.OnEvent(s.reportEvent)
	s.nexus.SetOthers(s.otherNexus)
	s.shared.mu.Lock()
	s.shared.gate = t.gate
	s.conns = slices.Clone(conns)
	s.shared.mu.Unlock()
	for _, c := range conns {
		c.sess = s
	}
	nd.sessions[st.TSIH] = s
	return nil
}

// takeRequests makes tasks of the requests of st, in their order.
func takeRequests(st *SessionState, conns []*conn) error {
	type request struct {
		c *conn
		*RequestState
	}
	var all []request
	for i, c := range conns {
		for j := range st.Conns[i].Requests {
			all = append(all, request{c, &st.Conns[i].Requests[j]})
		}
	}
	slices.SortStableFunc(all, func(a, b request) int { return cmp.Compare(a.Seq, b.Seq) })
	for _, r := range all {
		if err := r.c.takeAgain(r.RequestState); err != nil {
			return fmt.Errorf("request %x: %w", r.BHS, err)
		}
	}
	return nil
}

// takeAgain makes a task of a request that another process has received and judged.
func (c *conn) takeAgain(r *RequestState) error {
	if len(r.BHS) != pdu.BHSLen || len(r.Data) > max(c.recvLimit, int(c.params.FirstBurstLength)) {
		return fmt.Errorf("header of %d and data of %d bytes", len(r.BHS), len(r.Data))
	}
	h := pdu.BHS(r.BHS)
	if requests[h.Opcode()].run == nil || h.ITT() == pdu.ReservedTag {
		return fmt.Errorf("%v is not a request", h.Opcode())
	}
	t := c.newTask()
	if t == nil {
		return c.endedBy(errPeerClosed)
	}
	copy(t.req[:], r.BHS)
	t.lapBegan, t.waited, t.noMemory = clock(), true, r.NoMemory
	if t.isCommand() {
		if err := t.takeCommandAgain(r); err != nil {
			c.discard(t)
			return err
		}
	} else {
		t.keepData(r.Data)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch w := &c.shared.win; {
	case c.shared.tasks.find(h.ITT()) != nil:
		c.discard(t)
		return errors.New("its tag is in use")
	case !h.Immediate() && r.Seq == 0 && !w.accepts(h.CmdSN()):
		c.discard(t)
		return errors.New("its CmdSN is outside of the window")
	}
	t.become(taskWaiting)
	c.shared.tasks.insert(t)
	switch {
	case h.Immediate():
		c.immediate[h.Opcode()]++
		c.makeReady(t)
	case r.Seq != 0:
		c.makeReady(t)
	default:
		t.needsSN = true
		c.shared.win.receive(h.CmdSN(), t)
	}
	return nil
}

// takeCommandAgain does for a SCSI Command what takeCommand does.
func (t *Task) takeCommandAgain(r *RequestState) error {
	c, h := t.conn, t.header()
	t.cmd.LUN, t.cmd.CDB = h.LUN(), h.CDB()
	if len(r.CDB) > 0 {
		t.cmd.CDB = r.CDB
	}
	out, _ := t.expected()
	switch {
	case len(r.Refusal) == 3:
		t.refusal = lun.Sense{Key: r.Refusal[0], ASC: r.Refusal[1], ASCQ: r.Refusal[2]}
		return nil
	case t.noMemory:
		return nil
	case uint32(len(r.Data)) > out:
		return fmt.Errorf("%d bytes of data for a command that writes %d", len(r.Data), out)
	}
	if err := c.dm.(Resumable).Advertise(h, r.Advertisement); err != nil {
		return err
	}
	t.unsolicited, t.arrived = uint32(len(r.Data)), uint32(len(r.Data))
	if err := c.dm.Bind(t, t.unsolicited); err != nil {
		return err
	}
	t.bound = true
	if t.unsolicited > 0 {
		t.takeImmediate(r.Data, nil, int(out))
	}
	return nil
}
