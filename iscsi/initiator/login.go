package initiator

import (
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net"
	"strconv"
	"strings"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security"
)

// A LoginError says that the target refused the login, or redirected it.
type LoginError struct {
	Status pdu.LoginStatus
	// Address is HOST:PORT where the target has moved to; empty: it has not.
	Address string
}

// Error implements error.
func (e *LoginError) Error() string {
	if e.Address != "" {
		return fmt.Sprintf("the target has moved to %s (0x%04x)", e.Address, uint16(e.Status))
	}
	return fmt.Sprintf("the target refused the login: %v", e.Status)
}

// Limits of a login.
const (
	maxRounds    = 32   // exchanges
	loginSegment = 8192 // longest data segment during login (RFC 7143, section 13.12)
)

// A login is the login phase of a connection (RFC 7143, section 6.3).
type login struct {
	conn      *conn
	discovery bool
	answers   map[string]string // all so far
	last      pdu.LoginResponse
	round     int
	proved    bool // the target has proved its identity
}

func (l *login) run() error {
	n := l.conn
	cfg := &n.s.cfg
	l.answers = map[string]string{}
	names := []keys.Pair{{Key: "InitiatorName", Value: cfg.Name}}
	switch {
	case l.discovery:
		names = append(names, keys.Pair{Key: "SessionType", Value: "Discovery"})
	default:
		names = append(names, keys.Pair{Key: "SessionType", Value: "Normal"}, keys.Pair{Key: "TargetName", Value: cfg.Target})
	}
	if cfg.CHAP != nil {
		var err error
		l.proved, err = cfg.CHAP.Authenticate(names, func(csg, next pdu.Stage, text []keys.Pair) (map[string]string, bool, error) {
			answers, err := l.exchange(csg, next, text)
			return answers, l.last.Transit, err
		})
		if err != nil {
			return err
		}
		names = nil
	}
	if err := l.operational(names); err != nil {
		return err
	}
	p, err := l.params()
	if err != nil {
		return err
	}
	n.params = p
	n.s.mu.Lock()
	defer n.s.mu.Unlock()
	n.expStatSN = l.last.StatSN + 1
	if n.cid == 0 {
		n.s.cmdSN, n.s.maxCmdSN = l.last.ExpCmdSN, l.last.MaxCmdSN
	}
	return nil
}

// exchange sends text in stage csg, and returns the answers. With next it asks for that stage. It collects a text that the
// target sends in several parts.
func (l *login) exchange(csg, next pdu.Stage, text []keys.Pair) (map[string]string, error) {
	n := l.conn
	data := keys.AppendPair(nil, text...)
	if len(data) > loginSegment {
		return nil, fmt.Errorf("the keys have %d bytes: %d are possible", len(data), loginSegment)
	}
	req := pdu.LoginRequest{Transit: next != csg, CSG: csg, NSG: next, ISID: n.s.cfg.ISID, CID: n.cid, ITT: uint32(n.cid) + 1}
	n.s.mu.Lock()
	req.TSIH, req.CmdSN = n.s.params.TSIH, n.s.cmdSN
	n.s.mu.Unlock()
	var got []byte
	for {
		if l.round++; l.round > maxRounds {
			return nil, fmt.Errorf("the login has not ended after %d exchanges", maxRounds)
		}
		if l.round > 1 {
			req.ExpStatSN = l.last.StatSN + 1
		}
		bhs := pdu.BHS(req.Append(nil))
		bhs.SetDataSegmentLength(len(data))
		if err := n.carrier.Post(bhs, data); err != nil {
			return nil, err
		}
		n.carrier.Flush()
		var p PDU
		if err := n.carrier.Receive(&p); err != nil {
			return nil, fmt.Errorf("no Login Response: %w", err)
		}
		switch op := p.BHS.Opcode(); {
		case op == pdu.Reject:
			return nil, &RejectError{Reason: p.BHS.Reason(), Request: rejected(p.Data)}
		case op != pdu.LoginResp:
			return nil, fmt.Errorf("the target sent a %v where a Login Response is due", op)
		case p.BHS.ITT() != req.ITT:
			return nil, fmt.Errorf("the target sent a Login Response to task %#x, which is not in progress", p.BHS.ITT())
		}
		l.last = pdu.ParseLoginResponse(p.BHS)
		if got = append(got, p.Data...); len(got) > keys.MaxText {
			return nil, fmt.Errorf("the answers have more than %d bytes", keys.MaxText)
		}
		if l.last.Status != pdu.LoginSuccess {
			return nil, l.refusal(got)
		}
		if !l.last.Continue {
			break
		}
		req.Transit, data = false, nil
	}
	pairs, err := keys.ParseText(got)
	if err != nil {
		return nil, err
	}
	answers := map[string]string{}
	for _, p := range pairs {
		if _, twice := answers[p.Key]; twice {
			return nil, fmt.Errorf("the target answered %s twice", p.Key)
		}
		answers[p.Key], l.answers[p.Key] = p.Value, p.Value
	}
	return answers, nil
}

// refusal returns the error of a status other than success.
func (l *login) refusal(text []byte) error {
	e := &LoginError{Status: l.last.Status}
	if e.Status>>8 != 1 {
		return e
	}
	pairs, err := keys.ParseText(text)
	if err != nil {
		return err
	}
	for _, p := range pairs {
		if p.Key == "TargetAddress" {
			addr, _, _ := strings.Cut(p.Value, ",") // the tag of the portal group
			host, port, err := net.SplitHostPort(addr)
			if err != nil {
				host, port = strings.Trim(addr, "[]"), DefaultPort
			}
			e.Address = net.JoinHostPort(host, port)
			return e
		}
	}
	return fmt.Errorf("the target redirects the login (0x%04x), but names no address", uint16(e.Status))
}

// An Exchange sends keys in the login stage csg, and asks for the stage next if that is another. It returns the answers of the
// target, and whether the target changes to the stage next.
type Exchange func(csg, next pdu.Stage, text []keys.Pair) (answers map[string]string, transit bool, err error)

// Authenticate completes the security stage of a login by CHAP (RFC 7143, section 12.1.3). Connect does it for a Config with
// CHAP. Programs that send Login Requests themselves call it with their own exchange. The first request begins with names, which
// are InitiatorName and the like. If the target answers None, Authenticate fails only if c has a TargetSecret. proved says that
// the target has proved its identity.
func (c *CHAP) Authenticate(names []keys.Pair, exchange Exchange) (proved bool, err error) {
	const sec = pdu.SecurityNegotiation
	answers, _, err := exchange(sec, sec, append(names, keys.Pair{Key: "AuthMethod", Value: "CHAP,None"}))
	if err != nil {
		return false, err
	}
	switch m := answers["AuthMethod"]; m {
	case "CHAP":
	case "None":
		if c.TargetSecret != "" {
			return false, errors.New("CHAP: the target does not authenticate initiators, so it cannot prove its own identity")
		}
		return false, leaveSecurity(exchange)
	default:
		return false, fmt.Errorf("the target chose AuthMethod=%q of CHAP and None", m)
	}
	if answers, _, err = exchange(sec, sec, []keys.Pair{{Key: "CHAP_A", Value: "8,7,6,5"}}); err != nil {
		return false, err
	}
	a, err := strconv.ParseUint(answers["CHAP_A"], 10, 8)
	if err != nil || a < uint64(security.CHAPMD5) || a > uint64(security.CHAPSHA3256) {
		return false, fmt.Errorf("CHAP: the target chose algorithm %q of 8, 7, 6 and 5", answers["CHAP_A"])
	}
	id, ok := keys.ParseNumber(answers["CHAP_I"])
	if !ok || id > 255 {
		return false, fmt.Errorf("CHAP: the identifier %q of the target is not a number up to 255", answers["CHAP_I"])
	}
	challenge, err := keys.ParseBinary(answers["CHAP_C"])
	if err != nil {
		return false, fmt.Errorf("CHAP: the challenge of the target: %w", err)
	}
	theirs := security.CHAPChallenge{Algorithm: security.CHAPAlgorithm(a), ID: uint8(id), Octets: string(challenge)}
	say := []keys.Pair{{Key: "CHAP_N", Value: c.Name}, {Key: "CHAP_R", Value: hexadecimal(theirs.Response(c.Secret))}}
	own := security.NewCHAPChallenge(theirs.Algorithm)
	if c.TargetSecret != "" {
		if own.Octets == theirs.Octets {
			return false, errors.New("CHAP: the challenge of the target is that of the initiator")
		}
		say = append(say, keys.Pair{Key: "CHAP_I", Value: strconv.Itoa(int(own.ID))},
			keys.Pair{Key: "CHAP_C", Value: hexadecimal([]byte(own.Octets))})
	}
	answers, transit, err := exchange(sec, pdu.LoginOperationalNegotiation, say)
	if err != nil {
		return false, err
	}
	if c.TargetSecret != "" {
		proof, err := keys.ParseBinary(answers["CHAP_R"])
		if err != nil || answers["CHAP_N"] == "" {
			return false, errors.New("CHAP: the target did not prove its identity")
		}
		if c.TargetName != "" && answers["CHAP_N"] != c.TargetName {
			return false, fmt.Errorf("CHAP: the target says that its name is %q, not %q", answers["CHAP_N"], c.TargetName)
		}
		if subtle.ConstantTimeCompare(proof, own.Response(c.TargetSecret)) != 1 {
			return false, errors.New("CHAP: the target does not know its secret: it may be another target")
		}
		proved = true
	}
	if !transit {
		return proved, leaveSecurity(exchange)
	}
	return proved, nil
}

// leaveSecurity asks for the operational stage.
func leaveSecurity(exchange Exchange) error {
	_, transit, err := exchange(pdu.SecurityNegotiation, pdu.LoginOperationalNegotiation, nil)
	if err == nil && !transit {
		err = errors.New("the target does not leave the security stage")
	}
	return err
}

func hexadecimal(b []byte) string { return "0x" + hex.EncodeToString(b) }

// operational negotiates, and enters the full feature phase.
func (l *login) operational(text []keys.Pair) error {
	n := l.conn
	cfg := &n.s.cfg
	if !l.discovery && n.cid == 0 {
		text = append(text, leadingKeys...)
		text = append(text, keys.Pair{Key: "MaxConnections", Value: strconv.Itoa(cfg.Connections)})
	}
	if n.cid == 0 {
		text = append(text, keys.Pair{Key: "ErrorRecoveryLevel", Value: "0"}, keys.Pair{Key: "DefaultTime2Wait", Value: "2"},
			keys.Pair{Key: "DefaultTime2Retain", Value: "0"})
	}
	text = append(text, n.carrier.Offer(Offer{Discovery: l.discovery, Joins: n.cid != 0, HeaderDigest: cfg.HeaderDigest,
		DataDigest: cfg.DataDigest})...)
	for {
		if _, err := l.exchange(pdu.LoginOperationalNegotiation, pdu.FullFeaturePhase, text); err != nil {
			return err
		}
		if l.last.Transit {
			if l.last.NSG != pdu.FullFeaturePhase {
				return fmt.Errorf("the target changes to the stage %v instead of the full feature phase", l.last.NSG)
			}
			return nil
		}
		text = nil
	}
}

// leadingKeys are what the session offers. Immediate data saves a round trip for each short WRITE.
var leadingKeys = []keys.Pair{
	{Key: "InitialR2T", Value: "No"}, {Key: "ImmediateData", Value: "Yes"}, {Key: "MaxBurstLength", Value: "16776192"},
	{Key: "FirstBurstLength", Value: "262144"}, {Key: "MaxOutstandingR2T", Value: "1"}, {Key: "DataPDUInOrder", Value: "Yes"},
	{Key: "DataSequenceInOrder", Value: "Yes"},
}

// params returns the result of the login.
func (l *login) params() (Params, error) {
	n := l.conn
	cfg := &n.s.cfg
	p := Params{TSIH: l.last.TSIH, Answers: l.answers, Authenticated: l.answers["AuthMethod"] == "CHAP", TargetAuthenticated: l.proved}
	if n.cid != 0 {
		p = n.s.params
		p.Answers, p.Authenticated, p.TargetAuthenticated = l.answers, l.answers["AuthMethod"] == "CHAP", l.proved
	}
	if !l.discovery && p.TSIH == 0 {
		return p, errors.New("the target gave the session no handle (TSIH is 0)")
	}
	var err error
	number := func(key string, low, high, unset int) int {
		v, ok := l.answers[key]
		if !ok {
			return unset
		}
		x, valid := keys.ParseNumber(v)
		if (!valid || x < uint64(low) || x > uint64(high)) && err == nil {
			err = fmt.Errorf("%s=%q of the target is not a number from %d to %d", key, v, low, high)
		}
		return int(x)
	}
	yes := func(key string, unset bool) bool {
		switch v, ok := l.answers[key]; {
		case !ok:
			return unset
		case v == "Yes":
			return true
		case v != "No" && err == nil:
			err = fmt.Errorf("%s=%q of the target is neither Yes nor No", key, v)
		}
		return false
	}
	digest := func(key string, wanted bool) bool {
		got := l.answers[key] == "CRC32C"
		if got != wanted && err == nil {
			err = fmt.Errorf("%s: the target answered %q instead of %s", key, l.answers[key], digestName(wanted))
		}
		return got
	}
	if n.cid == 0 {
		p.InitialR2T, p.ImmediateData = yes("InitialR2T", true), yes("ImmediateData", true)
		p.MaxBurstLength = number("MaxBurstLength", 512, pdu.MaxData, 262144)
		p.FirstBurstLength = number("FirstBurstLength", 512, pdu.MaxData, 65536)
		p.MaxConnections = number("MaxConnections", 1, cfg.Connections, 1)
		number("ErrorRecoveryLevel", 0, 0, 0)
		number("MaxOutstandingR2T", 1, 1, 1)
		if p.FirstBurstLength > p.MaxBurstLength && err == nil {
			err = fmt.Errorf("FirstBurstLength=%d of the target is above MaxBurstLength=%d", p.FirstBurstLength, p.MaxBurstLength)
		}
	}
	const unexpected = "MaxOutstandingUnexpectedPDUs"
	if v, ok := l.answers[unexpected]; ok && n.cid == 0 && l.answers["RDMAExtensions"] == "Yes" {
		x, valid := keys.ParseNumber(v)
		if (!valid || x == 1 || x > math.MaxUint32) && err == nil {
			err = fmt.Errorf("%s=%q of the target is neither 0 nor a number from 2 to 4294967295", unexpected, v)
		}
		p.MaxUnexpected = int(min(x, math.MaxInt32))
	}
	p.MaxSendSegment = number("MaxRecvDataSegmentLength", 512, pdu.MaxData, 8192)
	if l.answers["RDMAExtensions"] == "Yes" {
		p.MaxSendSegment = number("TargetRecvDataSegmentLength", 512, pdu.MaxData, 8192)
	}
	if _, ok := l.answers["HeaderDigest"]; ok || cfg.HeaderDigest {
		p.HeaderDigest = digest("HeaderDigest", cfg.HeaderDigest)
	}
	if _, ok := l.answers["DataDigest"]; ok || cfg.DataDigest {
		p.DataDigest = digest("DataDigest", cfg.DataDigest)
	}
	return p, err
}

func digestName(on bool) string {
	if on {
		return "CRC32C"
	}
	return "None"
}
