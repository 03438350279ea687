package iscsi

import (
	"bytes"
	"crypto/md5"
	"crypto/sha1"
	"crypto/sha256"
	"crypto/sha3"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

const (
	aliceSecret = "0123456789abcdef"
	bobSecret   = "another random secret"
	storeSecret = "the secret of the target"
)

// secrets are what a test initiator answers with, by the word for it.
var secrets = map[string]string{"alice": aliceSecret, "bob": bobSecret, "store": storeSecret,
	"nobody": "no secret of anybody"}

// hashes are the algorithms by their numbers, apart from package security.
var hashes = map[string]func(b []byte) []byte{
	"5": func(b []byte) []byte { h := md5.Sum(b); return h[:] },
	"6": func(b []byte) []byte { h := sha1.Sum(b); return h[:] },
	"7": func(b []byte) []byte { h := sha256.Sum256(b); return h[:] },
	"8": func(b []byte) []byte { h := sha3.Sum256(b); return h[:] },
}

// chap makes an authentication of these users with the target's identity
// store. alice is tied to the name of the test initiator.
func chap(tb testing.TB, target string, algorithms ...string) *security.CHAP {
	tb.Helper()
	list, err := security.ParseCHAPAlgorithms(algorithms)
	if err != nil {
		tb.Fatal(err)
	}
	user := func(name, initiator string) security.CHAPUser {
		return security.CHAPUser{CHAPIdentity: security.CHAPIdentity{Name: name,
			Secret: security.Secret(secrets[name])}, Initiator: initiator}
	}
	cfg := security.CHAPConfig{Algorithms: list,
		Users: []security.CHAPUser{user("alice", initiatorName), user("bob", "")}}
	if target != "" {
		cfg.Target = security.CHAPIdentity{Name: target, Secret: storeSecret}
	}
	c, err := security.NewCHAP(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return c
}

// require changes the one target of a node, on which there is no connection
// yet.
func (n *testNode) require(change func(*TargetConfig)) *testNode {
	n.mu.Lock()
	defer n.mu.Unlock()
	change(&n.targets[0].TargetConfig)
	return n
}

func newCHAPNode(tb testing.TB, c *security.CHAP, change ...func(*Options)) *testNode {
	return newTestNode(tb, change...).require(func(cfg *TargetConfig) { cfg.Auth = c })
}

// A chapPeer is an initiator in the security stage.
type chapPeer struct {
	*testConn
	algorithm, id, challenge string // as last sent by the target
	first                    []string
}

func (tc *testConn) chapPeer() *chapPeer { return &chapPeer{testConn: tc, first: names} }

// say sends one request, "T" for the transit bit and pairs. In a value, %w is
// the right response made with the secret of w in hexadecimal, and $w that in
// base64; @ is the challenge that has come.
func (p *chapPeer) say(request string) {
	words := strings.Fields(request)
	transit := slices.Contains(words, "T")
	pairs := p.first
	p.first = nil
	for _, w := range words {
		key, value, ok := strings.Cut(w, "=")
		if !ok {
			continue
		}
		for sign, encode := range map[string]func([]byte) string{
			"%": func(b []byte) string { return "0x" + hex.EncodeToString(b) },
			"$": func(b []byte) string { return "0b" + base64.StdEncoding.EncodeToString(b) },
		} {
			if who, ok := strings.CutPrefix(value, sign); ok {
				value = encode(p.response(secrets[who], p.id, p.challenge))
			}
		}
		if value == "@" {
			value = p.challenge
		}
		pairs = append(slices.Clone(pairs), key+"="+value)
	}
	p.writeLogin(p.loginRequest(transit, 0, 1), pairs...)
}

// response hashes identifier, secret and challenge.
func (p *chapPeer) response(secret, id, challenge string) []byte {
	n, _ := strconv.Atoi(id)
	c, _ := hex.DecodeString(strings.TrimPrefix(challenge, "0x"))
	if h := hashes[p.algorithm]; h != nil {
		return h(slices.Concat([]byte{byte(n)}, []byte(secret), c))
	}
	return make([]byte, 16)
}

// hear takes the answer, which does not refuse, and returns it by key.
func (p *chapPeer) hear() (pdu.LoginResponse, map[string]string) {
	p.tb.Helper()
	r, answers := p.wantLogin(pdu.LoginSuccess)
	m := map[string]string{}
	for _, a := range answers {
		k, v, _ := strings.Cut(a, "=")
		m[k] = v
	}
	if v, ok := m["CHAP_C"]; ok {
		p.algorithm, p.id, p.challenge = m["CHAP_A"], m["CHAP_I"], v
		if len(v) < 2+2*16 { // ISCSI-12.1.3-3
			p.tb.Fatalf("challenge %s", v)
		}
	}
	return r, m
}

// authenticate goes through the security stage with requests that succeed.
func (p *chapPeer) authenticate(requests ...string) map[string]string {
	p.tb.Helper()
	var last map[string]string
	for i, request := range requests {
		p.say(request)
		r, m := p.hear()
		if r.Transit != (i == len(requests)-1) || r.CSG != 0 || r.TSIH != 0 {
			p.tb.Fatalf("answer %+v %q to %q", r, m, request)
		}
		last = m
	}
	return last
}

// ISCSI-12.1-1, SEC-7143.9.2.1-1: CHAP leads to a session. The last request has T=1, and only
// its answer has.
func TestCHAP(t *testing.T) {
	for _, c := range []struct {
		id         string
		algorithms []string
		requests   []string
		algorithm  string
	}{
		{"open-iscsi, one-way", nil, []string{"T AuthMethod=CHAP,None", "CHAP_A=5", "T CHAP_N=alice CHAP_R=%alice"},
			"5"},
		{"open-iscsi, all algorithms", nil, []string{"T AuthMethod=CHAP,None", "CHAP_A=8,7,6,5",
			"T CHAP_N=alice CHAP_R=%alice"}, "8"},
		{"transit asked for throughout", nil,
			[]string{"T AuthMethod=CHAP", "T CHAP_A=7", "T CHAP_N=alice CHAP_R=%alice"}, "7"},
		{"transit after all", nil, []string{"AuthMethod=CHAP", "CHAP_A=6", "CHAP_N=alice CHAP_R=%alice", "T"}, "6"},
		{"AuthMethod after the names", nil, []string{"", "AuthMethod=KRB5,CHAP,None", "CHAP_A=5",
			"T CHAP_N=alice CHAP_R=%alice"}, "5"},
		{"base64", nil, []string{"AuthMethod=CHAP", "CHAP_A=8", "T CHAP_N=alice CHAP_R=$alice"}, "8"},
		{"keys of any stage in between", nil,
			[]string{"AuthMethod=CHAP X-a=1", "CHAP_A=5 InitiatorAlias=a", "T CHAP_N=alice CHAP_R=%alice X-b=1"}, "5"},
		{"our order counts", []string{"md5", "sha256"},
			[]string{"AuthMethod=CHAP", "CHAP_A=8,7,6,5", "T CHAP_N=alice CHAP_R=%alice"}, "5"},
		{"unknown algorithms are skipped", nil,
			[]string{"AuthMethod=CHAP", "CHAP_A=99,0x05,261", "T CHAP_N=alice CHAP_R=%alice"}, "5"},
		{"user for any initiator", nil, []string{"AuthMethod=CHAP", "CHAP_A=5", "T CHAP_N=bob CHAP_R=%bob"}, "5"},
	} {
		bubble(t, c.id, func(t *testing.T) {
			n := newCHAPNode(t, chap(t, "", c.algorithms...))
			p := n.connect().chapPeer()
			// ISCSI-12.1.3-1: authenticate keeps the order. ISCSI-6.3.2-1: AuthMethod is CHAP.
			if last := p.authenticate(c.requests...); p.algorithm != c.algorithm || last["CHAP_N"] != "" ||
				last["CHAP_R"] != "" {
				t.Errorf("CHAP_A=%s, last answer %q", p.algorithm, last)
			}
			p.writeLogin(p.loginRequest(true, 1, 3), linuxKeys...)
			p.loggedIn().logout()
			if l := n.log.Lines("outcome=accepted"); len(l) != 1 || !strings.Contains(l[0], "user=") {
				t.Errorf("log: %q", l)
			}
		})
	}
}

// ISCSI-12.1.3-4, SEC-3723.2.1-1: the target proves who it is.
func TestMutualCHAP(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		for algorithm := range hashes {
			for _, theirs := range []string{"0x000102030405060708090a0b0c0d0e0f", "0bAAECAwQFBgcICQoLDA0ODw==", "0x" +
				strings.Repeat("ab", 1024)} {
				p := newCHAPNode(t, chap(t, "store")).connect().chapPeer()
				last := p.authenticate("AuthMethod=CHAP", "CHAP_A="+algorithm,
					"T CHAP_N=alice CHAP_R=%alice CHAP_I=42 CHAP_C="+theirs)
				challenge := theirs
				if strings.HasPrefix(theirs, "0b") {
					challenge = "0x000102030405060708090a0b0c0d0e0f" // V-ISCSI-15
				}
				want := "0x" + hex.EncodeToString(p.response(storeSecret, "42", challenge))
				if last["CHAP_N"] != "store" || last["CHAP_R"] != want {
					t.Errorf("ISCSI-4.2.4-4: %q, want CHAP_R=%s", last, want)
				}
				p.writeLogin(p.loginRequest(true, 1, 3), linuxKeys...)
				p.loggedIn().logout()
			}
		}
	})
}

// untilResponse is what an initiator says before its CHAP_R.
const untilResponse = "AuthMethod=CHAP; CHAP_A=5; "

// chapRefusals lists the ways to get CHAP wrong, in the language of say.
var chapRefusals = []struct {
	id       string
	requests string // the last one is refused
	status   pdu.LoginStatus
}{
	{"ISCSI-6.3.2-1 no method of ours", "T AuthMethod=SRP", pdu.LoginAuthentication},
	{"ISCSI-6.3.2-1 None", "T AuthMethod=None", pdu.LoginAuthentication},
	{"ISCSI-6.3.1-2 no method at all", "T", pdu.LoginAuthentication},
	{"ISCSI-6.3.1-2 no method in the end", "; T", pdu.LoginAuthentication},
	{"ISCSI-6.3-9 method twice", "AuthMethod=CHAP AuthMethod=None", pdu.LoginInitiatorError},
	{"ISCSI-9.2-2 CHAP_A before the method", "CHAP_A=5", pdu.LoginInitiatorError},
	{"ISCSI-9.2-2 CHAP_A with the method", "AuthMethod=CHAP CHAP_A=5", pdu.LoginInitiatorError},
	{"ISCSI-9.2-2 CHAP_R before CHAP_A", "AuthMethod=CHAP; CHAP_N=alice CHAP_R=0x00", pdu.LoginInitiatorError},
	{"ISCSI-9.2-2 CHAP_A missing", "AuthMethod=CHAP; T", pdu.LoginMissingParameter},
	{"ISCSI-12.1.3-1 method again", "AuthMethod=CHAP; AuthMethod=CHAP", pdu.LoginInitiatorError},
	{"ISCSI-12.1.3-1 CHAP_A again", untilResponse + "CHAP_A=5", pdu.LoginInitiatorError},
	{"ISCSI-12.1.3-1 response again", untilResponse + "CHAP_N=alice CHAP_R=%alice; CHAP_N=alice CHAP_R=%alice",
		pdu.LoginInitiatorError},
	{"ISCSI-12.1.3-1 method after all", untilResponse + "CHAP_N=alice CHAP_R=%alice; T AuthMethod=None",
		pdu.LoginInitiatorError},
	{"ISCSI-12.1.3-2 no algorithm of ours", "AuthMethod=CHAP; CHAP_A=99", pdu.LoginAuthentication},
	{"ISCSI-9.2-2 CHAP_A is no number", "AuthMethod=CHAP; CHAP_A=md5", pdu.LoginInitiatorError},
	{"ISCSI-9.2-2 CHAP_R missing", untilResponse + "T CHAP_N=alice", pdu.LoginMissingParameter},
	{"ISCSI-9.2-2 CHAP_N missing", untilResponse + "T CHAP_R=%alice", pdu.LoginMissingParameter},
	{"ISCSI-9.2-2 nothing", untilResponse + "T", pdu.LoginMissingParameter},
	{"SEC-3723.2.4.1-2 challenge instead of CHAP_R", untilResponse + "T CHAP_N=alice CHAP_I=1 CHAP_C=@",
		pdu.LoginMissingParameter},
	{"ISCSI-9.2-2 CHAP_I missing", untilResponse + "T CHAP_N=alice CHAP_R=%alice CHAP_C=0x01",
		pdu.LoginMissingParameter},
	{"ISCSI-9.2-2 CHAP_C missing", untilResponse + "T CHAP_N=alice CHAP_R=%alice CHAP_I=1", pdu.LoginMissingParameter},
	{"ISCSI-9.2-2 CHAP_I is no octet", untilResponse + "T CHAP_N=alice CHAP_R=%alice CHAP_I=256 CHAP_C=0x01",
		pdu.LoginInitiatorError},
	{"ISCSI-12.1.3-3 long challenge", untilResponse + "T CHAP_N=alice CHAP_R=%alice CHAP_I=1 CHAP_C=0x" +
		strings.Repeat("00", 1025), pdu.LoginInitiatorError},
	{"ISCSI-12.1.3-3 long response", untilResponse + "T CHAP_N=alice CHAP_R=0x" + strings.Repeat("00", 1025),
		pdu.LoginInitiatorError},
	{"ISCSI-6.1-4 decimal challenge", untilResponse +
		"T CHAP_N=alice CHAP_R=%alice CHAP_I=1 CHAP_C=12345678901234567890", pdu.LoginInitiatorError},
	{"ISCSI-6.2-8 Reject", untilResponse + "T CHAP_N=alice CHAP_R=Reject", pdu.LoginInitiatorError},
	{"ISCSI-9.2-3 wrong secret", untilResponse + "T CHAP_N=alice CHAP_R=%nobody", pdu.LoginAuthentication},
	{"ISCSI-9.2-3 unknown user", untilResponse + "T CHAP_N=carol CHAP_R=%alice", pdu.LoginAuthentication},
	{"ISCSI-9.2-3 secret of another user", untilResponse + "T CHAP_N=alice CHAP_R=%bob", pdu.LoginAuthentication},
	{"ISCSI-9.2-3 short response", untilResponse + "T CHAP_N=alice CHAP_R=0x00", pdu.LoginAuthentication},
	{"SEC-3723.2.4.1-1 wrong secret, mutual", untilResponse + "T CHAP_N=alice CHAP_R=%nobody CHAP_I=1 CHAP_C=0x01",
		pdu.LoginAuthentication},
	{"SEC-7143.9.2.1-7 secret of the target", untilResponse + "T CHAP_N=alice CHAP_R=%store", pdu.LoginAuthentication},
	{"SEC-7143.9.2.1-9 our own challenge", untilResponse + "T CHAP_N=alice CHAP_R=%alice CHAP_I=1 CHAP_C=@",
		pdu.LoginAuthentication},
}

// Every way to get CHAP wrong has its status, ends the connection, and gets no
// CHAP_R of the target (SEC-3723.2.4.1-1).
func TestCHAPRefusals(t *testing.T) {
	for _, c := range chapRefusals {
		bubble(t, c.id, func(t *testing.T) {
			n := newCHAPNode(t, chap(t, "store"))
			p := n.connect().chapPeer()
			requests := strings.Split(c.requests, ";")
			for _, request := range requests[:len(requests)-1] {
				p.say(request)
				if r, m := p.hear(); r.Transit {
					t.Fatalf("transit in answer to %q: %q", request, m)
				}
			}
			p.say(requests[len(requests)-1])
			r, answers := p.wantLogin(c.status)
			if all := strings.Join(answers, ","); r.Transit || strings.Contains(all, "CHAP") {
				t.Errorf("%+v %q", r, answers)
			}
			p.close()
			if p.wait() == nil {
				t.Error("no error")
			}
			log := strings.Join(n.log.Lines(""), "")
			for _, s := range secrets { // SEC-3723.5.8-2
				if strings.Contains(log, s) {
					t.Errorf("secret in the log: %s", log)
				}
			}
		})
	}
}

// ISCSI-6.3.2-1: the answer to methods that the target does not accept is Reject.
func TestCHAPAnswersRejectToOtherMethods(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		p := newCHAPNode(t, chap(t, "store")).connect().chapPeer()
		p.say("T AuthMethod=SRP,None")
		if _, answers := p.wantLogin(pdu.LoginAuthentication); !slices.Equal(answers, []string{"AuthMethod=Reject"}) {
			t.Errorf("%q", answers)
		}
	})
}

// ISCSI-6.3.2-2, V-ISCSI-7: the refusal as it is on the wire.
func TestCHAPRefusalInBytes(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		p := newCHAPNode(t, chap(t, "store")).connect(func(tc *testConn) { tc.isid = [6]byte{0, 2, 0x3d} }).chapPeer()
		p.authenticateUntilResponse()
		p.say("T CHAP_N=alice CHAP_R=%nobody")
		h := p.want(pdu.LoginResp).h
		copy(h[16:20], make([]byte, 4)) // the vector has ITT 0
		const want = "23000000 00000000 00023d00 00000000 00000000 00000000 00000000 00000000 00000000 02010000 00000000 00000000"
		if got := hex.EncodeToString(h); got != strings.ReplaceAll(want, " ", "") {
			t.Errorf("%s\nwant %s", got, want)
		}
	})
}

// ISCSI-6.3.1-2: a login without a security stage is refused.
func TestLoginThatSkipsCHAPIsRefused(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		tc := newCHAPNode(t, chap(t, "")).connect()
		tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), linuxKeys...)...)
		tc.wantRefused(pdu.LoginAuthentication)
	})
}

// ISCSI-12.1.3-4: a target without a secret cannot prove who it is.
func TestMutualCHAPWithoutATargetSecretIsRefused(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		p := newCHAPNode(t, chap(t, "")).connect().chapPeer()
		p.authenticateUntilResponse()
		p.say("T CHAP_N=alice CHAP_R=%alice CHAP_I=1 CHAP_C=0x01")
		p.wantRefused(pdu.LoginAuthentication)
	})
}

// ISCSI-9.2-4: a user that belongs to one initiator is no user of another.
func TestCHAPUserOfAnotherInitiatorIsRefused(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newCHAPNode(t, chap(t, ""))
		for user, status := range map[string]pdu.LoginStatus{"alice": pdu.LoginAuthentication,
			"bob": pdu.LoginSuccess} {
			p := n.connect().chapPeer()
			p.first = append(without(names, "InitiatorName"), "InitiatorName=iqn.1993-08.org.debian:01:other")
			p.authenticateUntilResponse()
			p.say("T CHAP_N=" + user + " CHAP_R=%" + user)
			p.wantLogin(status)
		}
	})
}

// authenticateUntilResponse gets a challenge.
func (p *chapPeer) authenticateUntilResponse() {
	p.tb.Helper()
	for _, request := range []string{"AuthMethod=CHAP", "CHAP_A=5"} {
		p.say(request)
		p.hear()
	}
}

// SEC-7143.9.2.1-10: the challenge of another connection is refused as long as
// that connection may still answer it.
func TestReflectionAcrossConnections(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newCHAPNode(t, chap(t, "store"))
		first := n.connect().chapPeer()
		first.authenticateUntilResponse()

		second := n.connect(func(tc *testConn) { tc.isid[5]++ }).chapPeer()
		second.authenticateUntilResponse()
		second.say("T CHAP_N=alice CHAP_R=%alice CHAP_I=" + first.id + " CHAP_C=" + first.challenge)
		second.wantRefused(pdu.LoginAuthentication)

		first.close()
		first.wait()
		third := n.connect().chapPeer()
		third.authenticate("AuthMethod=CHAP", "CHAP_A=5",
			"T CHAP_N=alice CHAP_R=%alice CHAP_I="+first.id+" CHAP_C="+first.challenge)
		third.writeLogin(third.loginRequest(true, 1, 3), linuxKeys...)
		third.loggedIn().logout()
		n.challenges.Range(func(c, _ any) bool {
			t.Errorf("challenge %x is still known", c)
			return true
		})
	})
}

// ISCSI-9.2-5: a session is replaced and joined by its own CHAP user only.
func TestSessionOfAnotherUser(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newCHAPNode(t, chap(t, ""))
		enter := func(user string, tsih uint16) *chapPeer {
			p := n.connect(func(tc *testConn) { tc.tsih = tsih }).chapPeer()
			p.authenticateUntilResponse()
			p.say("T CHAP_N=" + user + " CHAP_R=%" + user)
			if tsih != 0 { // the target knows now that the session is not that of user
				return p
			}
			p.hear()
			p.writeLogin(p.loginRequest(true, 1, 3), linuxKeys...)
			return p
		}
		old := enter("alice", 0)
		old.loggedIn()
		enter("bob", 0).wantRefused(pdu.LoginAuthentication)
		enter("bob", old.tsih).wantRefused(pdu.LoginAuthentication)

		named := n.connect() // authenticated by nobody
		named.writeLogin(named.loginRequest(true, 1, 3), "InitiatorName="+initiatorName, "SessionType=Discovery",
			"TargetName="+targetName)
		named.wantRefused(pdu.LoginAuthentication)

		old.ping()
		again := enter("alice", 0)
		again.loggedIn()
		if err := old.wait(); err != errReinstated {
			t.Error(err)
		}
		again.logout()
	})
}

// A target that asks nobody who it is does as before, whatever is offered.
func TestCHAPWithoutAuth(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		for request, status := range map[string]pdu.LoginStatus{
			"T AuthMethod=CHAP,None": pdu.LoginSuccess, "T": pdu.LoginSuccess,
			"T AuthMethod=CHAP": pdu.LoginAuthentication, "T CHAP_A=5": pdu.LoginInitiatorError,
			"T AuthMethod=None CHAP_N=alice": pdu.LoginInitiatorError,
		} {
			p := newTestNode(t).connect().chapPeer()
			p.say(request)
			if r, _ := p.wantLogin(status); r.Transit != (status == pdu.LoginSuccess) {
				t.Errorf("%q: %+v", request, r)
			}
		}
	})
}

// ISCSI-12.1-1: discovery has users of its own; those of the target do not
// count, and the other way round.
func TestDiscoveryCHAP(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.DiscoveryAuth = chap(t, "store") })
		for _, named := range []bool{false, true} {
			first := []string{"InitiatorName=" + initiatorName, "SessionType=Discovery"}
			if named {
				first = append(first, "TargetName="+targetName)
			}
			tc := n.connect()
			tc.writeLogin(tc.loginRequest(true, 1, 3), first...)
			tc.wantRefused(pdu.LoginAuthentication)

			p := n.connect().chapPeer()
			p.first = first
			last := p.authenticate("AuthMethod=CHAP", "CHAP_A=5", "T CHAP_N=alice CHAP_R=%alice CHAP_I=7 CHAP_C=0x0102")
			if last["CHAP_N"] != "store" {
				t.Errorf("%q", last)
			}
			p.writeLogin(p.loginRequest(true, 1, 3))
			p.wantLogin(pdu.LoginSuccess)
			p.close()
			if err := p.wait(); err != nil {
				t.Error(err)
			}
		}
		n.connect().login().logout()

		n = newCHAPNode(t, chap(t, "")) // only the target asks
		d := n.connect().discover()
		d.close()
		d.wait()
	})
}

// ISCSI-11.13-3, ISCSI-13.8-1: a target that has moved says where to, without a
// portal group tag, before it authenticates anybody.
func TestRedirect(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		for _, c := range []struct {
			to     Redirect
			status pdu.LoginStatus
		}{
			{Redirect{Address: "192.0.2.9:3261"}, pdu.LoginMovedTemporarily},
			{Redirect{Address: "[2001:db8::1]:3260", Permanent: true}, pdu.LoginMovedPermanently},
		} {
			n := newCHAPNode(t, chap(t, "")).require(func(cfg *TargetConfig) { cfg.Redirect = c.to })
			for _, stage := range []pdu.Stage{0, 1} {
				tc := n.connect()
				tc.writeLogin(tc.loginRequest(true, stage, 3), names...)
				r, answers := tc.wantLogin(c.status)
				if r.Transit || !slices.Equal(answers, []string{"TargetAddress=" + c.to.Address}) {
					t.Errorf("%+v %q", r, answers)
				}
				if stage > 0 || c.to.Permanent {
					tc.close() // else the target ends it
				}
				if tc.wait() == nil { // ISCSI-11.13-4
					t.Error("no error")
				}
			}
			d := n.connect().discover() // the target is still to be found here
			d.close()
			d.wait()

			tc := n.connect() // an initiator that may not log in is not redirected
			tc.writeLogin(tc.loginRequest(true, 1, 3),
				append(without(names, "InitiatorName"), "InitiatorName=iqn.2001-04.com.example:x")...)
			tc.wantRefused(pdu.LoginAuthorization)
		}
	})
}

// FuzzCHAP says anything in the login of a target with CHAP: lines of text, each
// a request, with "," for NUL and byte 1 of the header in front. An initiator that does
// not know a secret does not get through, and the target proves nothing.
func FuzzCHAP(f *testing.F) {
	line := func(flags byte, pairs string) string { return string(flags) + pairs + "\n" }
	for _, rest := range []string{"CHAP_N=alice;CHAP_R=0x00",
		"CHAP_N=alice;CHAP_R=0bAAECAwQFBgcICQoLDA0ODw==;CHAP_I=1;CHAP_C=0x01", "CHAP_I=1;CHAP_C=@", ""} {
		f.Add([]byte(line(0x81, "AuthMethod=CHAP,None") + line(0, "CHAP_A=8,7,6,5") + line(0x81, rest) +
			line(0x87, "InitialR2T=No")))
	}
	f.Add([]byte(line(0x81, "AuthMethod=None") + line(0x87, "")))
	f.Add([]byte(line(0x40, "AuthMethod=C") + line(0x83, "HAP;CHAP_A=5")))
	f.Add([]byte(line(0x87, "InitialR2T=No")))
	f.Add([]byte(line(0x80, "CHAP_R_A=") + line(0, "CHAP_R=")))

	store, auth := newStore(f), chap(f, "store")
	f.Fuzz(func(t *testing.T, in []byte) {
		n := newStoreNode(t, store, func(o *Options) { o.LogoutWait, o.DiscoveryAuth = time.Millisecond, auth })
		n.require(func(cfg *TargetConfig) { cfg.Auth = auth })
		tc := n.connect()
		for i, l := range bytes.Split(in, []byte("\n")) {
			if len(l) == 0 || i > 20 {
				continue
			}
			h := tc.loginRequest(false, 0, 0).Append(nil)
			h[1] = l[0]
			data := bytes.ReplaceAll(l[1:], []byte(";"), []byte{0})
			if i == 0 {
				data = append(text(names...), data...)
			}
			if h[1]&pdu.FlagC == 0 && len(data) > 0 {
				data = append(data, 0)
			}
			tc.write(h, data)
		}
		tc.close()
		if tc.wait() == nil {
			t.Error("session without a secret")
		}
		for _, p := range tc.m.sent {
			// A key that only begins like the response is answered with NotUnderstood.
			if r := pdu.ParseLoginResponse(p.h); r.Transit || r.TSIH != 0 ||
				bytes.Contains(p.data, []byte("CHAP_R=0")) {
				t.Errorf("%+v %q", r, p.data)
			}
		}
	})
}

// Names may be as long as open-iscsi has them, secrets may be any bytes:
// SEC-7143.9.2.1-2.
func TestCHAPExtremes(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		name, secret := strings.Repeat("n", security.MaxCHAPName), strings.Repeat("\x00", security.MaxSecret)
		secrets["zeros"] = secret
		defer delete(secrets, "zeros")
		c, err := security.NewCHAP(security.CHAPConfig{Algorithms: []security.CHAPAlgorithm{security.CHAPMD5},
			Users: []security.CHAPUser{{CHAPIdentity: security.CHAPIdentity{Name: name,
				Secret: security.Secret(secret)}}}})
		if err != nil {
			t.Fatal(err)
		}
		p := newCHAPNode(t, c).connect().chapPeer()
		p.authenticate("AuthMethod=CHAP", "CHAP_A=5", fmt.Sprintf("T CHAP_N=%s CHAP_R=%%zeros", name))
	})
}

// Before an initiator has proved who it is, no answer depends on the sessions that others have: neither the
// numbers of a Login Response nor its text and status show that a TSIH is in use.
func TestNothingOfForeignSessionsBeforeAuthentication(t *testing.T) {
	begin := func(t *testing.T) (n *testNode, victim *testConn) {
		n = newCHAPNode(t, chap(t, ""), several(2))
		p := n.connect().chapPeer()
		p.authenticateUntilResponse()
		p.say("T CHAP_N=alice CHAP_R=%alice")
		p.hear()
		p.writeLogin(p.loginRequest(true, 1, 3), leadingKeys...)
		victim = p.loggedIn()
		for range 9 {
			victim.wantStatus(victim.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
		}
		return n, victim
	}
	// stranger logs in with a TSIH until it would have to know a secret, and returns all that it was told.
	stranger := func(n *testNode, tsih uint16, requests ...[]string) (told []string) {
		tc := n.connect(func(tc *testConn) { tc.tsih, tc.cid, tc.CmdSN = tsih, 7, 1000 })
		for _, pairs := range requests {
			tc.writeLogin(tc.loginRequest(false, 0, 0), pairs...)
			p := tc.want(pdu.LoginResp)
			told = append(told, fmt.Sprintf("%x %q", []byte(p.h), p.data))
			if pdu.ParseLoginResponse(p.h).Status != pdu.LoginSuccess {
				break
			}
		}
		tc.close()
		tc.wait()
		return told
	}
	for name, requests := range map[string][][]string{
		"names":           {names, {"AuthMethod=CHAP"}},
		"one request":     {append(slices.Clone(names), "AuthMethod=CHAP,None")},
		"no CHAP":         {append(slices.Clone(names), "AuthMethod=None")},
		"a leading key":   {append(slices.Clone(names), "AuthMethod=CHAP"), {"MaxConnections=4"}},
		"another name":    {append(without(names, "InitiatorName"), "InitiatorName=iqn.1993-08.org.debian:01:other", "AuthMethod=CHAP")},
		"other session":   {append(without(names, "SessionType"), "SessionType=Discovery", "AuthMethod=CHAP")},
		"no names at all": {{"AuthMethod=CHAP"}},
	} {
		bubble(t, name, func(t *testing.T) {
			n, victim := begin(t)
			used, unused := stranger(n, victim.tsih, requests...), stranger(n, victim.tsih+1, requests...)
			if len(used) == 0 || !slices.Equal(used, unused) {
				t.Errorf("with the TSIH of a session: %q\nwith another one: %q", used, unused)
			}
			victim.ping()
			victim.wantStatus(victim.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
			victim.logout()
		})
	}
	bubble(t, "wrong secret, and the operational stage at once", func(t *testing.T) {
		n, victim := begin(t)
		for _, tsih := range []uint16{victim.tsih, victim.tsih + 1} {
			p := n.connect(func(tc *testConn) { tc.tsih, tc.cid = tsih, 7 }).chapPeer()
			p.authenticateUntilResponse()
			p.say("T CHAP_N=alice CHAP_R=%nobody")
			p.wantRefused(pdu.LoginAuthentication)
			tc := n.connect(func(tc *testConn) { tc.tsih, tc.cid = tsih, 7 })
			tc.writeLogin(tc.loginRequest(true, 1, 3), append(slices.Clone(names), "MaxConnections=4")...)
			tc.wantRefused(pdu.LoginAuthentication)
			// Another user of the same initiator port learns nothing either.
			p = n.connect(func(tc *testConn) { tc.tsih, tc.cid = tsih, 7 }).chapPeer()
			p.authenticateUntilResponse()
			p.say("T CHAP_N=bob CHAP_R=%bob")
			p.wantRefused(pdu.LoginAuthentication)
		}
		victim.ping()
		// The owner of the session joins it.
		p := n.connect(func(tc *testConn) { tc.tsih, tc.cid, tc.CmdSN = victim.tsih, 7, victim.CmdSN }).chapPeer()
		p.authenticateUntilResponse()
		p.say("T CHAP_N=alice CHAP_R=%alice")
		p.hear()
		p.writeLogin(p.loginRequest(true, 1, 3), joiningKeys...)
		p.loggedIn()
		p.logout()
		victim.wantEnd(nil)
	})
}
