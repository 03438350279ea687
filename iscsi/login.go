package iscsi

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/security/limits"
)

// maxLoginRequests bounds a login. Six exchanges must be possible (RFC 7143, section 6.2). An
// initiator that puts every key into a PDU of its own needs some 40.
const maxLoginRequests = 100

// A login is the state that only Serve's goroutine needs, until the full feature phase.
type login struct {
	conn  *conn
	first pdu.LoginRequest // has the fields that must stay the same
	req   pdu.LoginRequest // the present one
	count int              // of requests

	stage  pdu.Stage // the stage that the login is in
	in     []byte    // text of requests with C=1
	out    []byte    // rest of an answer that does not fit into one PDU
	named  bool      // the first text, with the initiator's name, has come
	neg    *keys.Negotiation
	key    sessionKey
	target *target
	auth   authenticator
	joins  *session // that the connection joins or reinstates; known once the initiator has proved its name

	charged int // bytes of long text

	refusalKeys []keys.Pair // sent with the status of a refusal

	deadline  time.Time // of the whole login
	impatient bool      // Receive does not wait for the next PDU
	enable    EnableDatamover
	enabling  bool // login has succeeded on the byte stream
}

// login runs the login phase (RFC 7143, section 6.3) and reports its outcome. An error means that
// the login was refused, or that the connection is lost. The initiator has then been told and given
// time to close.
func (c *conn) login() error {
	l := c.newLogin()
	return l.finish(l.run())
}

// newLogin begins the login phase.
func (c *conn) newLogin() *login {
	l := &login{conn: c, deadline: c.serveOptions.Accepted.Add(c.opt.LoginTimeout)}
	c.dm.SetReceiveDeadline(l.deadline)
	return l
}

// finish ends the login phase with the error of run, and returns that of login.
func (l *login) finish(err error) error {
	c := l.conn
	defer func() {
		c.node.challenges.Delete(l.auth.challenge.Octets)
		c.budget.discharge(l.charged)
	}()
	var refusal *loginError
	refused := errors.As(err, &refusal)
	if err != nil && !refused {
		err = c.endedBy(err) // err may only say that the socket is closed
	}
	l.reportLogin(err)
	if err == nil {
		c.node.stats.accepted.Add(1)
		return nil
	}
	c.node.stats.refused.Add(1)
	if refused && l.count > 0 {
		if c.sess != nil { // the session ends before the initiator gets the refusal
			c.sess.leave(c)
			c.sess = nil
		}
		if l.respond(pdu.LoginResponse{Status: refusal.status}, keys.AppendPair(nil, l.refusalKeys...)) == nil {
			c.linger()
		}
	}
	return err
}

// run serves Login Requests until one ends the phase. Requests that come before the last one is
// answered, as they must not (section 6.3), wait. A *loginError has to be told to the initiator.
// errAwaited means that run has to be called again. Any other error ends the connection.
func (l *login) run() error {
	c := l.conn
	n := &c.notice
	for {
		if err := c.dm.Receive(n); err != nil {
			if l.impatient && errors.Is(err, os.ErrDeadlineExceeded) {
				*n = Notice{} // else it keeps the memory of the last request
				return errAwaited
			}
			c.end(c.endReason(err))
			return err
		}
		if n.Task != nil {
			return errors.New("end of a transfer during login")
		}
		if err := c.checkFormat(n); err != nil {
			if l.count == 0 || pdu.BHS(n.BHS).Opcode() != pdu.LoginReq {
				return l.terminate(err)
			}
			return &loginError{pdu.LoginInitiatorError, err}
		}
		h := pdu.BHS(n.BHS)
		if h.Opcode() != pdu.LoginReq { // section 4.2.4
			err := fmt.Errorf("%v before the end of login", h.Opcode())
			if l.count == 0 {
				return l.terminate(err)
			}
			return &loginError{pdu.LoginInvalidRequest, err}
		}
		done, err := l.serve(pdu.ParseLoginRequest(h), n.Data)
		if done || err != nil {
			return err
		}
	}
}

// terminate ends the connection because of the PDU that Receive has returned. No Login Response can tell the initiator why: the
// PDU is no Login Request. It returns err.
func (l *login) terminate(err error) error {
	c := l.conn
	if r, ok := c.dm.(Refuser); ok {
		r.Refuse(err)
		c.dm.Receive(&c.notice) // until the initiator has closed the connection: see Refuser
	}
	return err
}

// serve answers one Login Request. done reports that login has succeeded.
func (l *login) serve(req pdu.LoginRequest, data []byte) (done bool, err error) {
	l.req = req
	l.count++
	if err := l.check(); err != nil {
		return false, err
	}
	if len(l.out) > 0 { // the initiator asks for the rest of an answer
		if len(data) > 0 || req.Continue {
			return false, refuse(pdu.LoginInitiatorError, "initiator sends text before the target's answer is complete")
		}
		return l.answer()
	}
	if len(l.in)+len(data) > keys.MaxText {
		return false, refuse(pdu.LoginInitiatorError, fmt.Sprintf("text is longer than %d bytes", keys.MaxText))
	}
	if len(l.in) > loginDataLength && l.charged == 0 {
		if !l.conn.budget.charge(keys.MaxText) {
			return false, &loginError{pdu.LoginOutOfResources, errNoMemory}
		}
		l.charged = keys.MaxText
	}
	l.in = append(l.in, data...)
	if req.Continue {
		return false, l.respond(pdu.LoginResponse{}, nil)
	}
	if err := l.negotiate(); err != nil {
		return false, err
	}
	return l.answer()
}

// check validates the header of a Login Request.
func (l *login) check() error {
	r := &l.req
	if l.count == 1 {
		l.first, l.stage = *r, r.CSG
		l.conn.cid = r.CID
		l.expectCmdSN()
	}
	f := &l.first
	switch {
	case l.conn.node.stopping.Load():
		return &loginError{pdu.LoginUnavailable, errShutdown}
	case r.VersionMin > pdu.Version:
		return refuse(pdu.LoginVersion, fmt.Sprintf("initiator supports version %d and up", r.VersionMin))
	case r.ISID != f.ISID, r.TSIH != f.TSIH, r.CID != f.CID, r.VersionMin != f.VersionMin, r.VersionMax != f.VersionMax:
		return refuse(pdu.LoginInitiatorError, "ISID, TSIH, CID or version changed during login") // section 11.12
	case r.CSG != l.stage, r.CSG > pdu.LoginOperationalNegotiation:
		return refuse(pdu.LoginInitiatorError, fmt.Sprintf("request is about the %v stage, login is in the %v stage", r.CSG, l.stage))
	case r.Transit && r.Continue:
		return refuse(pdu.LoginInitiatorError, "T and C bit together")
	case r.Transit && (r.NSG <= r.CSG || r.NSG == 2):
		return refuse(pdu.LoginInitiatorError, fmt.Sprintf("no transition from stage %d to stage %d", r.CSG, r.NSG))
	case l.count > maxLoginRequests:
		return refuse(pdu.LoginInitiatorError, fmt.Sprintf("login is not complete after %d requests", maxLoginRequests))
	}
	return nil
}

// negotiate processes the text in l.in and puts the answers in l.out.
func (l *login) negotiate() error {
	pairs, err := keys.ParseText(l.in)
	if err != nil {
		return keyError(err)
	}
	l.in = nil
	if l.neg == nil {
		l.neg = l.newNegotiation(pairs)
	}
	keys.Arrange(pairs)
	var answers []keys.Pair
	first, names := !l.named, 0
	if first {
		l.named = true
		names = keys.Names(pairs)
		if answers, err = l.offer(pairs[:names], answers); err != nil {
			return err
		}
		if err := l.identify(); err != nil {
			return err
		}
		if err := l.join(); err != nil {
			return err
		}
	}
	if answers, err = l.offer(pairs[names:], answers); err != nil {
		return err
	}
	if first {
		l.advance(limits.Named)
		answers = append(answers, keys.Pair{Key: "TargetPortalGroupTag", Value: fmt.Sprint(l.conn.portal.TPGT)})
		if l.target != nil && l.target.Alias != "" && !l.neg.Params().Discovery {
			answers = append(answers, keys.Pair{Key: "TargetAlias", Value: l.target.Alias})
		}
	}
	if l.stage == pdu.SecurityNegotiation {
		if answers, err = l.authenticate(pairs, answers); err != nil {
			return err
		}
		if err := l.join(); err != nil {
			return err
		}
	} else {
		answers = l.neg.Declare(answers)
	}
	l.out = keys.AppendPair(l.out, answers...)
	return nil
}

// advance reports that the login has come to p.
func (l *login) advance(p limits.Progress) {
	if f := l.conn.serveOptions.Advanced; f != nil {
		f(p)
	}
}

// offer negotiates pairs of the initiator and appends the answers.
func (l *login) offer(pairs, answers []keys.Pair) ([]keys.Pair, error) {
	for _, p := range pairs {
		if l.stage == pdu.SecurityNegotiation && p.Key == "AuthMethod" {
			continue // the answer depends on the initiator and the target
		}
		var err error
		if answers, err = l.neg.Offer(keys.Stage(l.stage), p, answers); err != nil {
			return nil, keyError(err)
		}
	}
	return answers, nil
}

// join finds the session that a login with a TSIH names, once the initiator has authenticated itself. Before
// that no answer may depend on whether there is such a session.
func (l *login) join() error {
	if l.first.TSIH == 0 || l.joins != nil || !l.auth.done() {
		return nil
	}
	nd := l.conn.node
	nd.mu.Lock()
	defer nd.mu.Unlock()
	s := nd.find(l.key)
	if refusal := s.refuses(l.first.TSIH, l.neg.Params().CHAPName); refusal != nil {
		return refusal
	}
	l.joins = s
	l.neg.Join(s.params)
	return nil
}

// oldest is how far before CmdSN the window begins that a login names whose session is not known yet. No
// session has that many commands in flight.
const oldest = 1 << 16

// expectCmdSN sets the window that Login Responses carry until the end of login. That of a login with a TSIH
// is empty and in the past, so that it changes nothing in the session of the initiator (RFC 7143, section
// 4.2.2.1). The final response carries the window of the session.
func (l *login) expectCmdSN() {
	own := l.conn.shared
	own.mu.Lock()
	defer own.mu.Unlock()
	if l.first.TSIH == 0 {
		own.win.open(l.first.CmdSN, l.conn.opt.QueueDepth)
		return
	}
	own.win.exp, own.win.max = l.first.CmdSN-oldest, l.first.CmdSN-oldest-1
}

// newNegotiation begins the negotiation with the first text of the initiator, which names the target.
func (l *login) newNegotiation(first []keys.Pair) *keys.Negotiation {
	c := l.conn
	limits := c.limits()
	for _, p := range first {
		if name, err := security.NormalizeName(p.Value); p.Key == "TargetName" && err == nil {
			if t := c.node.target(name); t != nil { // else the login fails
				t.Limits.apply(&limits, c.piece)
			}
		}
	}
	if l.first.TSIH != 0 {
		return keys.NewJoin(limits)
	}
	return keys.NewLogin(limits)
}

// limits returns what this connection may agree on.
func (c *conn) limits() keys.Limits {
	limits := c.opt.Limits
	limits.RDMA = c.dm.RDMA()
	limits.DefaultTime2Retain = uint16(c.node.shared.MaxTime2Retain.Time() / time.Second)
	_, upgrades := c.dm.(Upgrader)
	limits.StepUp = upgrades && c.portal.StepUp != nil
	return limits
}

// identify finds the initiator and the target in the first text, and checks whether the initiator
// may log in.
func (l *login) identify() error {
	if err := l.neg.FirstRequest(); err != nil {
		return keyError(err)
	}
	c, p := l.conn, l.neg.Params()
	name, err := security.NormalizeName(p.InitiatorName)
	if err != nil {
		return &loginError{pdu.LoginInitiatorError, fmt.Errorf("InitiatorName: %w", err)}
	}
	l.key = sessionKey{initiator: name, isid: l.first.ISID, tpgt: c.portal.TPGT}
	if p.TargetName == "" {
		l.key.portal = c.portal
		return l.require(c.opt.DiscoveryAuth)
	}
	if name, err = security.NormalizeName(p.TargetName); err != nil {
		return &loginError{pdu.LoginNotFound, fmt.Errorf("TargetName: %w", err)}
	}
	l.key.target = name
	if l.target = c.node.target(name); l.target == nil {
		return refuse(pdu.LoginNotFound, "there is no such target")
	}
	if !l.target.servedBy(c.portal) {
		return refuse(pdu.LoginNotFound, fmt.Sprintf("portal group %d does not lead to the target", c.portal.TPGT))
	}
	if !l.target.Initiators.Match(l.key.initiator) {
		return refuse(pdu.LoginAuthorization, "initiator is not among those of the target")
	}
	if !l.target.Networks.Admit(security.AddressOf(c.dm.RemoteAddr())) {
		return refuse(pdu.LoginAuthorization, "address of the initiator is in no network of the target")
	}
	if p.Discovery {
		return l.require(c.opt.DiscoveryAuth)
	}
	if cl := c.node.closing.Load(); cl != nil { // before authentication, like any redirect
		if cl.to != "" {
			l.refusalKeys = []keys.Pair{{Key: "TargetAddress", Value: cl.to}}
		}
		return cl.refusal()
	}
	if to := l.target.Redirect; to.Address != "" { // before authentication: section 11.13.5
		l.refusalKeys = []keys.Pair{{Key: "TargetAddress", Value: to.Address}}
		status := pdu.LoginMovedTemporarily
		if to.Permanent {
			status = pdu.LoginMovedPermanently
		}
		return refuse(status, "target has moved to "+to.Address)
	}
	return l.require(l.target.Auth)
}

// keyError makes a loginError of an error of package keys.
func keyError(err error) error {
	var ke *keys.Error
	if errors.As(err, &ke) {
		return &loginError{pdu.LoginStatus(ke.Status), err}
	}
	return &loginError{pdu.LoginInitiatorError, err}
}

// answer sends the next part of the answer. After the last part it makes the transition that the
// initiator asks for.
func (l *login) answer() (done bool, err error) {
	n := min(len(l.out), l.conn.dm.MaxSendSegment(), loginDataLength-1) // open-iscsi needs one byte for itself
	part := l.out[:n:n]
	if l.out = l.out[n:]; len(l.out) == 0 {
		l.out = nil // else a login that waits keeps the memory
	}
	rsp := pdu.LoginResponse{Continue: len(l.out) > 0}
	if rsp.Continue || !l.req.Transit || !l.auth.done() {
		return false, l.respond(rsp, part)
	}
	rsp.Transit, rsp.NSG = true, l.req.NSG
	if l.req.NSG != pdu.FullFeaturePhase {
		err := l.respond(rsp, part)
		l.stage = l.req.NSG
		return false, err
	}
	if err := l.enterFullFeature(); err != nil {
		return false, err
	}
	rsp.TSIH = l.conn.sess.tsih
	if err := l.respond(rsp, part); err != nil {
		return false, err
	}
	if l.enable != nil {
		err = l.stepUp()
	}
	return err == nil, err
}

// enterFullFeature makes the connection ready for what follows the final Login Response.
func (l *login) enterFullFeature() error {
	c := l.conn
	if l.first.TSIH != 0 {
		s := l.joins
		// A session is all RDMA or all TCP. A connection that can step up counts as both.
		rdma := s.params.RDMAExtensions
		if !s.discovery && (rdma && !c.dm.RDMA() && !c.limits().StepUp || !rdma && c.dm.RDMA()) {
			return refuse(pdu.LoginCannotInclude, "iSER and TCP connections do not go together in a session")
		}
	}
	p, err := l.neg.Finish()
	if err != nil {
		return keyError(err)
	}
	if authorize := c.serveOptions.Authorize; authorize != nil {
		if err := authorize(Claim{l.key.initiator, l.key.target, p.Discovery}); err != nil {
			return &loginError{pdu.LoginAuthorization, err}
		}
	}
	p.CHAPProof = string(l.auth.proof)
	c.params = p
	if !c.reserveMemory(l.key.initiator) {
		return &loginError{pdu.LoginOutOfResources, errNoMemory}
	}
	if refusal := c.node.establish(c, l.key, &l.first, l.target); refusal != nil {
		return refusal
	}
	c.lagged.Store(int64(c.node.laggards.find(l.key.initiator)))
	if joined := c.serveOptions.Joined; joined != nil {
		joined(c.sess.tsih, p.Discovery)
	}
	c.openStore()
	if p.RDMAExtensions && !c.dm.RDMA() {
		l.enable, err = c.portal.StepUp(p, c.slots.max)
	} else {
		err = c.dm.EnterFullFeature(p, c.slots.max)
	}
	if err != nil {
		return &loginError{pdu.LoginOutOfResources, err}
	}
	switch {
	case p.Discovery && c.dm.RDMA():
		c.recvLimit = loginDataLength
	case p.RDMAExtensions:
		c.recvLimit = int(p.TargetRecvDataSegmentLength)
	default:
		c.recvLimit = int(p.Declared)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.phase == phaseEnded { // replaced by yet another login, or shut down
		return &loginError{pdu.LoginUnavailable, c.reason}
	}
	if l.enable == nil {
		c.enterPhase(phaseFullFeature)
	}
	c.recovery.acked = c.statSN + 1 // no fence waits for the final Login Response, which follows
	return nil
}

// stepUp changes to RDMA mode: the final Login Response was the last PDU on the byte stream (RFC
// 7145, section 5.1.2). Until it has succeeded only login sends on this connection, and end closes
// it through the old Datamover.
func (l *login) stepUp() error {
	l.enabling = true
	c := l.conn
	nc, prefix, err := c.dm.(Upgrader).Upgrade()
	if err != nil {
		return fmt.Errorf("sending failed: %w", err)
	}
	dm, err := l.enable(nc, prefix, time.Until(l.deadline))
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.phase == phaseEnded {
		dm.Close()
		return errPeerClosed // login finds the real reason
	}
	c.use(dm)
	c.slots.mu.Lock()
	c.slots.free, c.slots.made = nil, 0 // they were made for the old Datamover
	c.slots.mu.Unlock()
	c.enterPhase(phaseFullFeature)
	return nil
}

// respond sends a Login Response. The caller sets the fields that differ from request to request. A
// refusal has no stages and no numbers, as in V-ISCSI-7.
func (l *login) respond(rsp pdu.LoginResponse, data []byte) error {
	c := l.conn
	if l.neg != nil {
		c.pause(l.neg.Params().Discovery)
	}
	t := c.newTask()
	if t == nil {
		return c.endedBy(errPeerClosed)
	}
	t.fromTarget = true
	rsp.ISID, rsp.ITT, rsp.DataSegmentLength = l.first.ISID, l.req.ITT, len(data)
	t.Segment = data
	c.mu.Lock()
	if rsp.Status == pdu.LoginSuccess {
		rsp.CSG = l.req.CSG
		rsp.StatSN, rsp.ExpCmdSN, rsp.MaxCmdSN = c.statSN, c.shared.win.exp, c.shared.win.max
		c.statSN++
	}
	rsp.Put(t.Header[:])
	err := c.dm.SendControl(t)
	c.mu.Unlock()
	if err != nil {
		c.freeTask(t)
		return fmt.Errorf("sending failed: %w", err)
	}
	dm := c.dm // the receive deadline does not bound sending
	timer := time.AfterFunc(max(time.Until(l.deadline), 0)+c.opt.LogoutWait, func() { dm.Close() })
	dm.Flush()
	if !timer.Stop() {
		return errNotTaken
	}
	return nil
}

// errAwaited is what run returns when the next PDU has not come.
var errAwaited = errors.New("the next PDU of the login has not come")

var errNoMemory = errors.New("there is no memory left for another connection")

var errNotTaken = errors.New("initiator does not take the Login Response")
