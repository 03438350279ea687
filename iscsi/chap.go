package iscsi

import (
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/security/limits"
)

// An authenticator is the security stage of one login (RFC 7143, section 12.1.3). Its zero value is
// for a login that needs no authentication.
type authenticator struct {
	chap      *security.CHAP // nil: AuthMethod is None
	step      authStep
	challenge security.CHAPChallenge // once step is stepResponse
	proof     security.CHAPProof     // once step is stepDone
}

// An authStep says which keys the initiator has to send next.
type authStep uint8

const (
	stepMethod    authStep = iota // AuthMethod
	stepAlgorithm                 // CHAP_A
	stepResponse                  // CHAP_N and CHAP_R; to authenticate the target also CHAP_I and CHAP_C
	stepDone                      // nothing
)

// authSteps says which keys a request must have in each step, which it may have, and how they are
// answered. answer moves to the next step. No step leads back: an initiator has one attempt per
// connection.
var authSteps = [...]struct {
	needs, takes []string
	answer       func(l *login, t securityText, answers []keys.Pair) ([]keys.Pair, error)
}{
	stepMethod:    {takes: []string{"AuthMethod"}, answer: (*login).answerMethod},
	stepAlgorithm: {needs: []string{"CHAP_A"}, answer: (*login).answerAlgorithm},
	stepResponse:  {needs: []string{"CHAP_N", "CHAP_R"}, takes: []string{"CHAP_I", "CHAP_C"}, answer: (*login).answerResponse},
	stepDone:      {answer: func(_ *login, _ securityText, answers []keys.Pair) ([]keys.Pair, error) { return answers, nil }},
}

// A securityText has the security keys of one request, each with its values. Keys other than
// AuthMethod have one value: the negotiation ensures that.
type securityText map[string][]string

var securityKeys = []string{"AuthMethod", "CHAP_A", "CHAP_I", "CHAP_C", "CHAP_N", "CHAP_R"}

// done reports whether the initiator may leave the security stage.
func (a *authenticator) done() bool { return a.chap == nil || a.step == stepDone }

// require makes authentication by chap, unless it is nil, a condition of the login.
func (l *login) require(chap *security.CHAP) error {
	if chap == nil {
		return nil
	}
	if l.stage != pdu.SecurityNegotiation { // section 6.3.1
		return refuse(pdu.LoginAuthentication, "initiator skips the security stage, but has to authenticate itself")
	}
	l.auth.chap = chap
	l.neg.RequireCHAP()
	return nil
}

// authenticate answers the security keys of a request in the security stage. A key out of step is an
// initiator error, a key that is missing a missing parameter (section 9.2). Only a cryptographically
// wrong response is an authentication failure.
func (l *login) authenticate(pairs, answers []keys.Pair) ([]keys.Pair, error) {
	step := &authSteps[l.auth.step]
	t := securityText{}
	for _, p := range pairs {
		if !slices.Contains(securityKeys, p.Key) {
			continue
		}
		if !slices.Contains(step.needs, p.Key) && !slices.Contains(step.takes, p.Key) {
			return nil, refuse(pdu.LoginInitiatorError, p.Key+" is out of step")
		}
		t[p.Key] = append(t[p.Key], p.Value)
	}
	for _, key := range step.needs {
		if t[key] == nil {
			return nil, refuse(pdu.LoginMissingParameter, key+" is missing")
		}
	}
	return step.answer(l, t, answers)
}

func (l *login) answerMethod(t securityText, answers []keys.Pair) ([]keys.Pair, error) {
	var err error
	for _, v := range t["AuthMethod"] {
		if answers, err = l.neg.Offer(keys.Security, keys.Pair{Key: "AuthMethod", Value: v}, answers); err != nil {
			if reject := (keys.Pair{Key: "AuthMethod", Value: "Reject"}); slices.Contains(answers, reject) { // section 6.3.2
				l.refusalKeys = []keys.Pair{reject}
			}
			return nil, keyError(err)
		}
		l.auth.step = stepDone
		if l.auth.chap != nil {
			l.auth.step = stepAlgorithm
		}
	}
	if l.auth.step == stepMethod && !l.auth.done() && l.req.Transit {
		return nil, refuse(pdu.LoginAuthentication, "initiator leaves the security stage, but has to authenticate itself")
	}
	return answers, nil
}

func (l *login) answerAlgorithm(t securityText, answers []keys.Pair) ([]keys.Pair, error) {
	var offer []security.CHAPAlgorithm
	for item := range strings.SplitSeq(t["CHAP_A"][0], ",") {
		n, ok := keys.ParseNumber(item)
		if !ok {
			return nil, refuse(pdu.LoginInitiatorError, fmt.Sprintf("CHAP_A: %.80q is not a number", item))
		}
		if a := security.CHAPAlgorithm(n); uint64(a) == n {
			offer = append(offer, a)
		}
	}
	algorithm, ok := l.auth.chap.Choose(offer)
	if !ok {
		return nil, refuse(pdu.LoginAuthentication, fmt.Sprintf("CHAP_A: none of %.80q is supported", t["CHAP_A"][0]))
	}
	c := security.NewCHAPChallenge(algorithm)
	l.conn.node.challenges.Store(c.Octets, nil)
	l.auth.challenge, l.auth.step = c, stepResponse
	return append(answers,
		keys.Pair{Key: "CHAP_A", Value: strconv.Itoa(int(c.Algorithm))},
		keys.Pair{Key: "CHAP_I", Value: strconv.Itoa(int(c.ID))},
		keys.Pair{Key: "CHAP_C", Value: hexConstant(c.Octets)}), nil
}

func (l *login) answerResponse(t securityText, answers []keys.Pair) ([]keys.Pair, error) {
	response, err := keys.ParseBinary(t["CHAP_R"][0])
	if err != nil {
		return nil, &loginError{pdu.LoginInitiatorError, fmt.Errorf("CHAP_R: %w", err)}
	}
	theirs, err := l.peerChallenge(t)
	if err != nil {
		return nil, err
	}
	proved, err := l.auth.chap.Authenticate(l.auth.challenge, t["CHAP_N"][0], response, l.key.initiator)
	if err != nil {
		return nil, &loginError{pdu.LoginAuthentication, err}
	}
	if encrypted := l.conn.serveOptions.Encrypted; proved.Short && (encrypted == nil || !encrypted()) { // RFC 3723, section 2.4.1
		return nil, refuse(pdu.LoginAuthentication,
			fmt.Sprintf("secret has less than %d bytes (96 bits), and IPsec does not encrypt the connection", security.MinSecret))
	}
	us := proved.Target
	l.auth.step, l.auth.proof = stepDone, proved.Proof
	l.advance(limits.Proved)
	if theirs == nil {
		return answers, nil
	}
	// The target responds only after the initiator's response was right (RFC 3723, section 2.4.1).
	if us == (security.CHAPIdentity{}) {
		return nil, refuse(pdu.LoginAuthentication,
			"initiator asks the target to authenticate itself, but no credentials are configured for that")
	}
	return append(answers,
		keys.Pair{Key: "CHAP_N", Value: us.Name},
		keys.Pair{Key: "CHAP_R", Value: hexConstant(string(theirs.Response(us.Secret)))}), nil
}

// peerChallenge returns the challenge that the target has to respond to, or nil.
func (l *login) peerChallenge(t securityText) (*security.CHAPChallenge, error) {
	id, challenge := t["CHAP_I"], t["CHAP_C"]
	switch {
	case id == nil && challenge == nil:
		return nil, nil
	case id == nil || challenge == nil:
		return nil, refuse(pdu.LoginMissingParameter, "CHAP_I and CHAP_C come together, but one is missing")
	}
	n, ok := keys.ParseNumber(id[0])
	if !ok || n > 255 {
		return nil, refuse(pdu.LoginInitiatorError, fmt.Sprintf("CHAP_I: %.80q is not a number up to 255", id[0]))
	}
	c, err := keys.ParseBinary(challenge[0])
	if err != nil {
		return nil, &loginError{pdu.LoginInitiatorError, fmt.Errorf("CHAP_C: %w", err)}
	}
	if _, ours := l.conn.node.challenges.Load(string(c)); ours { // section 9.2.1: on this connection or on another one
		return nil, refuse(pdu.LoginAuthentication, "initiator sends one of the target's own challenges back")
	}
	return &security.CHAPChallenge{Algorithm: l.auth.challenge.Algorithm, ID: uint8(n), Octets: string(c)}, nil
}

func hexConstant(b string) string { return "0x" + hex.EncodeToString([]byte(b)) }
