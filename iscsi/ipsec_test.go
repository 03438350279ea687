package iscsi

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A login that ServeOptions.Authorize refuses ends with status 0202, in normal and discovery sessions. The hook gets the names after the
// initiator has proved its own, and not if it fails to.
func TestAuthorizeRefusesALogin(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newCHAPNode(t, chap(t, ""))
		var claims []Claim
		refuse := true
		hooked := func(tc *testConn) {
			tc.options.Authorize = func(c Claim) error {
				claims = append(claims, c)
				if refuse {
					return errors.New("no SA for the connection")
				}
				return nil
			}
		}
		proved := func(response string) *testConn {
			p := n.connect(hooked).chapPeer()
			p.say("AuthMethod=CHAP")
			p.hear()
			p.say("CHAP_A=5")
			p.hear()
			p.say("T CHAP_N=alice CHAP_R=" + response)
			return p.testConn
		}
		wrong := proved("%bob")
		wrong.wantLogin(pdu.LoginAuthentication)
		wrong.close()
		wrong.wait()
		if len(claims) > 0 {
			t.Errorf("asked about %v, who did not prove the name", claims)
		}
		normal := Claim{initiatorName, targetName, false}
		for _, refuse = range []bool{true, false} {
			claims = nil
			tc := proved("%alice")
			tc.wantLogin(pdu.LoginSuccess)
			tc.writeLogin(tc.loginRequest(true, 1, 3), linuxKeys...)
			if refuse {
				tc.wantRefused(pdu.LoginAuthorization)
			} else {
				tc.loggedIn().logout()
			}
			if !slices.Equal(claims, []Claim{normal}) {
				t.Errorf("claims %v", claims)
			}
		}
		if l := n.log.Lines("outcome=refused"); len(l) != 2 || !strings.Contains(l[1], "no SA for the connection") || !strings.Contains(l[1], "status=") {
			t.Errorf("log %q", l)
		}

		claims, refuse = nil, true
		tc := n.connect(hooked)
		tc.writeLogin(tc.loginRequest(true, 1, 3), "InitiatorName="+initiatorName, "SessionType=Discovery")
		tc.wantRefused(pdu.LoginAuthorization)
		if !slices.Equal(claims, []Claim{{initiatorName, "", true}}) {
			t.Errorf("claims %v", claims)
		}
	})
}

// SEC-3723.2.4.1-3: with a secret below 96 bits, and a connection that IPsec does not encrypt, the login does not continue. The same
// holds for the secret by which the target authenticates itself.
func TestShortSecretsRequireEncryption(t *testing.T) {
	list, err := security.ParseCHAPAlgorithms(nil)
	if err != nil {
		t.Fatal(err)
	}
	identity := func(name, secret string) security.CHAPIdentity {
		return security.CHAPIdentity{Name: name, Secret: security.Secret(secret)}
	}
	short := func(user, target string) *security.CHAP {
		c, err := security.NewCHAP(security.CHAPConfig{Algorithms: list,
			Users: []security.CHAPUser{{CHAPIdentity: identity("alice", user), Target: identity("t", target)}}})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	for _, tc := range []struct {
		name         string
		user, target string
		encrypted    func() bool
		status       pdu.LoginStatus
	}{
		{"96 bits in clear text", aliceSecret[:12], storeSecret[:12], nil, pdu.LoginSuccess},
		{"88 bits in clear text", aliceSecret[:11], storeSecret, nil, pdu.LoginAuthentication},
		{"88 bits without encryption", aliceSecret[:11], storeSecret, func() bool { return false }, pdu.LoginAuthentication},
		{"88 bits encrypted", aliceSecret[:11], storeSecret, func() bool { return true }, pdu.LoginSuccess},
		{"of the target in clear text", aliceSecret, storeSecret[:11], nil, pdu.LoginAuthentication},
		{"of the target, encrypted", aliceSecret, storeSecret[:11], func() bool { return true }, pdu.LoginSuccess},
	} {
		bubble(t, tc.name, func(t *testing.T) {
			old := secrets["alice"]
			secrets["alice"] = tc.user
			defer func() { secrets["alice"] = old }()
			n := newCHAPNode(t, short(tc.user, tc.target))
			p := n.connect(func(c *testConn) { c.options.Encrypted = tc.encrypted }).chapPeer()
			p.say("AuthMethod=CHAP")
			p.hear()
			p.say("CHAP_A=7")
			p.hear()
			p.say("T CHAP_N=alice CHAP_R=%alice CHAP_I=7 CHAP_C=0x0102")
			_, answers := p.wantLogin(tc.status)
			if answered := strings.Contains(strings.Join(answers, " "), "CHAP_R"); answered != (tc.status == pdu.LoginSuccess) {
				t.Errorf("answers %q", answers)
			}
			if l := n.log.Lines("IPsec does not encrypt"); (len(l) == 1) != (tc.status != pdu.LoginSuccess) {
				t.Errorf("log %q", l)
			}
		})
	}
}

// SEC-7143.9.3-4: over a protected portal discovery names only what is protected. Over others it names all.
func TestSendTargetsOverAProtectedPortal(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		all, err := security.Compile([]string{"*"})
		if err != nil {
			t.Fatal(err)
		}
		safe := n.AddPortal(PortalConfig{Listen: "192.0.2.1:3261", TPGT: 2, Protected: true})
		const guarded, open = "iqn.2026-11.io.example:guarded", "iqn.2026-11.io.example:open"
		for _, cfg := range []TargetConfig{
			{Name: guarded, Protected: true, PortalGroups: []uint16{1}},
			{Name: open, PortalGroups: []uint16{1}},
		} {
			cfg.Initiators, cfg.LUNs = all, lun.NewInventory()
			if err := n.AddTarget(cfg); err != nil {
				t.Fatal(err)
			}
		}
		const plain, secure = "TargetAddress=192.0.2.1:3260,1", "TargetAddress=192.0.2.1:3261,2"
		for _, tc := range []struct {
			through *Portal
			want    []string
		}{
			{n.portal, []string{"TargetName=" + guarded, plain, "TargetName=" + open, plain, "TargetName=" + targetName, plain, secure}},
			{safe, []string{"TargetName=" + guarded, plain, "TargetName=" + targetName, "TargetAddress=192.0.2.1:3260,2"}},
		} {
			n.portal = tc.through
			c := n.connect().discover()
			if got := c.readText("SendTargets=All"); !slices.Equal(got, tc.want) {
				t.Errorf("%s: %q, want %q", tc.through.Listen, got, tc.want)
			}
			c.close()
			c.wait()
		}
	})
}

// EndConnection ends one connection, in the login or after it, and no other.
func TestEndConnection(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		local := netip.MustParseAddrPort("192.0.2.1:3260")
		from := func(host byte) (*testConn, netip.AddrPort) {
			tc := n.connect(func(c *testConn) { c.m.host, c.isid[5] = host, host })
			return tc, netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, 0, 2, 2 + host}), 50000)
		}
		neighbour, _ := from(1)
		neighbour.login()
		victim, remote := from(2)
		victim.login()
		newcomer, early := from(3)
		synctest.Wait()
		for _, a := range []netip.AddrPort{remote, early} {
			if !n.EndConnection(local, a, errors.New("the keys are gone")) {
				t.Errorf("no connection of %v", a)
			}
		}
		for _, tc := range []*testConn{victim, newcomer} {
			if err := tc.wait(); err == nil || !strings.Contains(err.Error(), "the keys are gone") {
				t.Errorf("the end: %v", err)
			}
		}
		if l := n.log.Lines("session ended"); len(l) != 1 || !strings.Contains(l[0], "the keys are gone") {
			t.Errorf("log %q", l)
		}
		if n.EndConnection(local, netip.MustParseAddrPort("192.0.2.99:1"), errors.New("x")) || n.EndConnection(local, remote, errors.New("x")) {
			t.Error("a connection that does not exist was ended")
		}
		neighbour.ping()
		neighbour.logout()
	})
}
