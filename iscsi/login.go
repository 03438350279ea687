package iscsi

import (
	"errors"
	"fmt"
	"time"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security"
)

// maxLoginRequests bounds a login. Six exchanges must be possible (RFC 7143,
// section 6.2); an initiator that puts every key into a PDU of its own needs
// some 40.
const maxLoginRequests = 100

// A login is what Serve's goroutine knows until the full feature phase.
type login struct {
	conn  *conn
	first pdu.LoginRequest // what must stay the same
	req   pdu.LoginRequest // the present one
	count int              // of requests

	stage  pdu.Stage // where we are
	in     []byte    // text of requests with C=1
	out    []byte    // rest of an answer that does not fit into one PDU
	named  bool      // the first text has come: we know who it is
	neg    *keys.Negotiation
	key    sessionKey
	target *target
	auth   authenticator

	refusalKeys []keys.Pair // what a refusal says beside its status

	deadline time.Time // of the whole login
	enable   EnableDatamover
	enabling bool // login has succeeded on the byte stream
}

// login runs the login phase (RFC 7143, section 6.3) and writes the one line
// about the connection attempt. An error means that it was refused, or that the
// connection is lost; the initiator has been told and given time to close.
func (c *conn) login() error {
	l := &login{conn: c}
	defer func() { c.node.challenges.Delete(l.auth.challenge.Octets) }()
	l.deadline = c.serveOptions.Accepted.Add(c.opt.LoginTimeout)
	c.dm.SetReceiveDeadline(l.deadline)
	err := l.run()
	l.reportLogin(err)
	if err == nil {
		c.node.stats.accepted.Add(1)
		return nil
	}
	c.node.stats.refused.Add(1)
	var refusal *loginError
	if errors.As(err, &refusal) && l.count > 0 {
		if c.sess != nil { // the session is over before the initiator hears of it
			c.sess.leave(c)
			c.sess = nil
		}
		var data []byte
		for _, p := range l.refusalKeys {
			data = keys.AppendPair(data, p)
		}
		if l.respond(pdu.LoginResponse{Status: refusal.status}, data) == nil {
			c.linger()
		}
	}
	return err
}

// run serves Login Requests until one ends the phase. Those that come before
// the last one is answered, as they must not (section 6.3), wait their turn. A
// *loginError is to be told to the initiator; any other error is the end of the
// connection.
func (l *login) run() error {
	for {
		if err := l.conn.dm.Receive(&l.conn.notice); err != nil {
			l.conn.end(l.conn.endReason(err))
			return l.conn.endedBy() // it may have been closed for another reason
		}
		if l.conn.notice.Task != nil {
			return errors.New("end of a transfer during login")
		}
		if err := l.conn.checkFormat(&l.conn.notice); err != nil {
			if l.count == 0 || pdu.BHS(l.conn.notice.BHS).Opcode() != pdu.LoginReq {
				return err
			}
			return &loginError{pdu.LoginInitiatorError, err}
		}
		h := pdu.BHS(l.conn.notice.BHS)
		if h.Opcode() != pdu.LoginReq { // section 4.2.4
			err := fmt.Errorf("%v before the end of login", h.Opcode())
			if l.count == 0 {
				return err
			}
			return &loginError{pdu.LoginInvalidRequest, err}
		}
		done, err := l.serve(pdu.ParseLoginRequest(h), l.conn.notice.Data)
		if done || err != nil {
			return err
		}
	}
}

// serve answers one Login Request; done means that login has succeeded.
func (l *login) serve(req pdu.LoginRequest, data []byte) (done bool, err error) {
	l.req = req
	l.count++
	if err := l.check(); err != nil {
		return false, err
	}
	if len(l.out) > 0 { // the initiator asks for the rest of an answer
		if len(data) > 0 || req.Continue {
			return false, refuse(pdu.LoginInitiatorError, "text from the initiator before the end of ours")
		}
		return l.answer()
	}
	if len(l.in)+len(data) > keys.MaxText {
		return false, refuse(pdu.LoginInitiatorError, fmt.Sprintf("text is longer than %d octets", keys.MaxText))
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

// check judges the header of a Login Request.
func (l *login) check() error {
	r := &l.req
	if l.count == 1 {
		l.first, l.stage = *r, r.CSG
		l.conn.cid = r.CID
		l.expectCmdSN()
	}
	f := &l.first
	switch {
	case l.conn.node.isStopping():
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

// negotiate works on the text in l.in and puts the answers in l.out.
func (l *login) negotiate() error {
	pairs, err := keys.ParseText(l.in)
	if err != nil {
		return keyError(err)
	}
	l.in = nil
	if l.neg == nil {
		l.neg = l.newNegotiation()
	}
	keys.Arrange(pairs)
	var answers []keys.Pair
	securing := l.stage == pdu.SecurityNegotiation
	for _, p := range pairs {
		if securing && p.Key == "AuthMethod" {
			continue // the answer depends on who wants what
		}
		if answers, err = l.neg.Offer(keys.Stage(l.stage), p, answers); err != nil {
			return keyError(err)
		}
	}
	if !l.named {
		l.named = true
		if err := l.identify(); err != nil {
			return err
		}
		answers = append(answers, keys.Pair{Key: "TargetPortalGroupTag", Value: fmt.Sprint(l.conn.portal.TPGT)})
		if l.target != nil && l.target.Alias != "" && !l.neg.Params().Discovery {
			answers = append(answers, keys.Pair{Key: "TargetAlias", Value: l.target.Alias})
		}
	}
	if securing {
		if answers, err = l.authenticate(pairs, answers); err != nil {
			return err
		}
	} else {
		answers = l.neg.Declare(answers)
	}
	for _, p := range answers {
		l.out = keys.AppendPair(l.out, p)
	}
	return nil
}

// continues returns the session that the first request names, which another
// initiator may have, or nil.
func (l *login) continues() *session {
	l.conn.node.mu.Lock()
	defer l.conn.node.mu.Unlock()
	if s := l.conn.node.sessions[l.first.TSIH]; s != nil && s.key.isid == l.first.ISID {
		return s
	}
	return nil
}

// expectCmdSN makes the window what Login Responses say until the end of login.
func (l *login) expectCmdSN() {
	c, s := l.conn, l.continues()
	var exp, max uint32
	if s != nil {
		s.shared.mu.Lock()
		exp, max = s.shared.win.exp, s.shared.win.max
		s.shared.mu.Unlock()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if s == nil {
		c.shared.win.open(l.first.CmdSN, c.opt.QueueDepth)
		return
	}
	c.shared.win.exp, c.shared.win.max = exp, max
}

func (l *login) newNegotiation() *keys.Negotiation {
	if s := l.continues(); s != nil {
		return keys.NewJoin(l.conn.limits(), s.params)
	}
	return keys.NewLogin(l.conn.limits())
}

// limits is what this connection may agree on.
func (c *conn) limits() keys.Limits {
	limits := c.opt.Limits
	limits.RDMA = c.dm.RDMA()
	limits.StepUp = c.dm.upgrader != nil && c.portal.StepUp != nil
	return limits
}

// identify finds out who wants what, and whether that is allowed, when the first
// text has come.
func (l *login) identify() error {
	if err := l.neg.FirstRequest(); err != nil {
		return keyError(err)
	}
	p := l.neg.Params()
	name, err := security.NormalizeName(p.InitiatorName)
	if err != nil {
		return &loginError{pdu.LoginInitiatorError, fmt.Errorf("InitiatorName: %w", err)}
	}
	l.key = sessionKey{initiator: name, isid: l.first.ISID, tpgt: l.conn.portal.TPGT}
	if p.TargetName == "" {
		l.key.portal = l.conn.portal
		return l.require(l.conn.opt.DiscoveryAuth)
	}
	if name, err = security.NormalizeName(p.TargetName); err != nil {
		return &loginError{pdu.LoginNotFound, fmt.Errorf("TargetName: %w", err)}
	}
	l.key.target = name
	if l.target = l.conn.node.target(name); l.target == nil {
		return refuse(pdu.LoginNotFound, "there is no such target")
	}
	if !l.target.servedBy(l.conn.portal) {
		return refuse(pdu.LoginNotFound, fmt.Sprintf("portal group %d does not lead to the target", l.conn.portal.TPGT))
	}
	if !l.target.Initiators.Match(l.key.initiator) {
		return refuse(pdu.LoginAuthorization, "initiator is not among those of the target")
	}
	if p.Discovery {
		return l.require(l.conn.opt.DiscoveryAuth)
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

// keyError makes a login status of an error of package keys.
func keyError(err error) error {
	var ke *keys.Error
	if errors.As(err, &ke) {
		return &loginError{pdu.LoginStatus(ke.Status), err}
	}
	return &loginError{pdu.LoginInitiatorError, err}
}

// answer sends what there is to be sent and makes the transition that the
// initiator asks for when all has been said.
func (l *login) answer() (done bool, err error) {
	n := min(len(l.out), l.conn.dm.MaxSendSegment(), loginDataLength-1) // open-iscsi keeps one octet
	part := l.out[:n:n]
	l.out = l.out[n:]
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
		if err := l.stepUp(); err != nil {
			return false, err
		}
	}
	return true, nil
}

// enterFullFeature makes the connection ready for what follows the final Login
// Response.
func (l *login) enterFullFeature() error {
	if l.first.TSIH != 0 {
		switch s := l.continues(); {
		case s == nil:
			return errNoSession
		case !s.discovery && (s.params.RDMAExtensions && !l.conn.dm.RDMA() && !l.conn.limits().StepUp || !s.params.RDMAExtensions && l.conn.dm.RDMA()):
			return refuse(pdu.LoginCannotInclude, "iSER and TCP connections do not go together in a session")
		}
	}
	p, err := l.neg.Finish()
	if err != nil {
		return keyError(err)
	}
	l.conn.params = p
	if refusal := l.conn.node.establish(l.conn, l.key, &l.first, l.target); refusal != nil {
		return refusal
	}
	if joined := l.conn.serveOptions.Joined; joined != nil {
		joined(l.conn.sess.tsih, p.Discovery)
	}
	l.conn.openStore()
	if p.RDMAExtensions && !l.conn.dm.RDMA() {
		l.enable, err = l.conn.portal.StepUp(p, l.conn.slots.max)
	} else {
		err = l.conn.dm.EnterFullFeature(p, l.conn.slots.max)
	}
	if err != nil {
		return &loginError{pdu.LoginOutOfResources, err}
	}
	switch {
	case p.Discovery && l.conn.dm.RDMA():
		l.conn.recvLimit = loginDataLength
	case p.RDMAExtensions:
		l.conn.recvLimit = int(p.TargetRecvDataSegmentLength)
	default:
		l.conn.recvLimit = int(l.conn.opt.Limits.MaxRecvDataSegmentLength)
	}
	l.conn.mu.Lock()
	defer l.conn.mu.Unlock()
	if l.conn.phase == phaseEnded { // replaced by yet another login, or shut down
		return &loginError{pdu.LoginUnavailable, l.conn.reason}
	}
	if l.enable == nil {
		l.conn.enterPhase(phaseFullFeature)
	}
	l.conn.recovery.acked = l.conn.statSN + 1 // the final Login Response, which follows, is behind every fence
	return nil
}

// stepUp goes on in RDMA mode: the final Login Response was the last PDU on the
// byte stream (RFC 7145, section 5.1.2). Until it has succeeded nobody but login
// sends on this connection, and end closes it through the Datamover of before.
func (l *login) stepUp() error {
	l.enabling = true
	nc, prefix, err := l.conn.dm.upgrader.Upgrade()
	if err != nil {
		return fmt.Errorf("sending failed: %w", err)
	}
	dm, err := l.enable(nc, prefix, time.Until(l.deadline))
	l.conn.mu.Lock()
	ended := l.conn.phase == phaseEnded
	if err == nil && !ended {
		l.conn.dm = newMover(dm)
		l.conn.slots.discard()
		l.conn.enterPhase(phaseFullFeature)
	}
	l.conn.mu.Unlock()
	if ended {
		if err == nil {
			dm.Close()
		}
		return l.conn.endedBy()
	}
	return err
}

// respond sends a Login Response. The caller sets what differs from request to
// request. A refusal has no stages and no numbers (V-ISCSI-7 has none, either).
func (l *login) respond(rsp pdu.LoginResponse, data []byte) error {
	t := l.conn.newTask()
	if t == nil {
		return l.conn.endedBy()
	}
	t.fromTarget = true
	rsp.ISID, rsp.ITT, rsp.DataSegmentLength = l.first.ISID, l.req.ITT, len(data)
	t.Segment = data
	l.conn.mu.Lock()
	if rsp.Status == pdu.LoginSuccess {
		rsp.CSG = l.req.CSG
		rsp.StatSN, rsp.ExpCmdSN, rsp.MaxCmdSN = l.conn.statSN, l.conn.shared.win.exp, l.conn.shared.win.max
		l.conn.statSN++
	}
	rsp.Put(t.Header[:])
	err := l.conn.dm.SendControl(t)
	l.conn.mu.Unlock()
	if err != nil {
		l.conn.freeTask(t)
		return fmt.Errorf("sending failed: %w", err)
	}
	dm := l.conn.dm // the receive deadline does not bound sending
	late := time.AfterFunc(max(time.Until(l.deadline), 0)+l.conn.opt.LogoutWait, func() { dm.Close() })
	dm.Flush()
	if !late.Stop() {
		return errNotTaken
	}
	return nil
}

var errNotTaken = errors.New("initiator does not take the Login Response")
