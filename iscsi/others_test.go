package iscsi

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"slices"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
)

const otherName = "iqn.2026-11.io.example:other"

// addOther adds a target with one LUN, whose name ends with ee.
func (n *testNode) addOther(change func(*TargetConfig)) (store *backendtest.Faulty, update func(func(*TargetConfig))) {
	n.tb.Helper()
	store = newStore(n.tb)
	u, err := lun.New(store, lun.Options{Identity: state.Identity{NAA: [8]byte{0x3f, 7: 0xee}, Serial: "3f000000000000ee"}})
	if err != nil {
		n.tb.Fatal(err)
	}
	inv := lun.NewInventory()
	if err := inv.Add(0, u); err != nil {
		n.tb.Fatal(err)
	}
	config := func(change func(*TargetConfig)) TargetConfig {
		cfg := TargetConfig{Name: otherName, Initiators: patternOf(n.tb, "*"), LUNs: inv}
		change(&cfg)
		return cfg
	}
	if err := n.AddTarget(config(change)); err != nil {
		n.tb.Fatal(err)
	}
	return store, func(change func(*TargetConfig)) {
		n.tb.Helper()
		if err := n.UpdateTarget(config(change)); err != nil {
			n.tb.Fatal(err)
		}
	}
}

func patternOf(tb testing.TB, pattern string) security.Patterns {
	tb.Helper()
	p, err := security.Compile([]string{pattern})
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

// copyToOther sends an EXTENDED COPY of eight blocks to the LUN of addOther, which ends with that status.
func (tc *testConn) copyToOther(status byte) *sentPDU {
	tc.tb.Helper()
	cscd := func(naa string) string {
		return "e40000000103000" + "8" + naa + "000000000000000000000000" + "00000200"
	}
	list, err := hex.DecodeString("0018004000000000" + "0000001c00000000" + cscd("3000000000000000") + cscd("3f000000000000ee") +
		"02000018" + "00000001" + "00000008" + fmt.Sprintf("%016x%016x", 0, 16))
	if err != nil {
		tc.tb.Fatal(err)
	}
	return tc.wantStatus(tc.command(writeF, uint32(len(list)), [16]byte{0x83, 13: byte(len(list))}, list), status)
}

// EXTENDED COPY reaches a LUN of another target exactly if the initiator could log in there as it has logged in here.
func TestExtendedCopyBetweenTargets(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		n.fill()
		store, update := n.addOther(func(*TargetConfig) {})
		tc := n.connect().login()
		tc.copyToOther(0)
		got := make([]byte, 4096)
		if err := store.ReadAt(got, 16*blockLen); err != nil || !bytes.Equal(got, n.stored(0, 4096)) {
			t.Fatalf("other bytes were copied (%v)", err)
		}
		elsewhere, err := security.ParseNetworks([]string{"198.51.100.0/24"})
		if err != nil {
			t.Fatal(err)
		}
		for name, change := range map[string]func(*TargetConfig){
			"another initiator": func(c *TargetConfig) { c.Initiators = patternOf(t, "*:somebody-else") },
			"another network":   func(c *TargetConfig) { c.Networks = elsewhere },
			"CHAP":              func(c *TargetConfig) { c.Auth = chap(t, "") },
			"a redirect":        func(c *TargetConfig) { c.Redirect.Address = "192.0.2.1:3260" },
			"another portal":    func(c *TargetConfig) { c.PortalGroups = []uint16{2} },
		} {
			update(change)
			update(change)
			p := tc.copyToOther(2)
			if s := p.data[2:]; s[2] != 0x0a || s[12] != 0x0d || s[13] != 0x02 { // COPY TARGET DEVICE NOT REACHABLE
				t.Errorf("%s: sense % x", name, s)
			}
		}
		update(func(*TargetConfig) {})
		tc.copyToOther(0)
		if err := n.RemoveTarget(otherName); err != nil {
			t.Fatal(err)
		}
		tc.copyToOther(2)
		tc.logout()
	})
}

// A session that has proved who it is reaches another target with the same user and secret, and the port is that of the session
// that the same user has there.
func TestExtendedCopyAsCHAPUser(t *testing.T) {
	n := newCHAPNode(t, chap(t, ""), several(2))
	var others *lun.Inventory
	_, update := n.addOther(func(c *TargetConfig) { c.Auth, others = chap(t, ""), c.LUNs })
	has := func(inv *lun.Inventory) bool { return inv == others }
	p := n.connect().chapPeer()
	p.authenticateUntilResponse()
	p.say("T CHAP_N=alice CHAP_R=%alice")
	p.hear()
	p.writeLogin(p.loginRequest(true, 1, 3), leadingKeys...)
	tc := p.loggedIn()
	s := tc.session(t)
	find := func() *lun.Nexus {
		x := s.otherNexus(has)
		if x != nil {
			x.Close()
		}
		return x
	}
	if find() == nil {
		t.Error("the same user with the same secret does not reach the other target")
	}
	n.mu.Lock()
	other := n.targets[slices.IndexFunc(n.targets, func(t *target) bool { return t.Name == otherName })]
	there := sessionKey{initiator: s.key.initiator, isid: [6]byte{9}, target: otherName, tpgt: 1}
	n.sessions[7] = &session{key: there, params: s.params}
	n.sessions[8] = &session{key: sessionKey{initiator: s.key.initiator, isid: [6]byte{8}, target: otherName, tpgt: 1}, params: Params{CHAPName: "bob"}}
	n.mu.Unlock()
	if port := s.portAt(other); port.ISID != there.isid || port.TargetName != otherName {
		t.Errorf("port %+v is not that of the session of the same user", port)
	}
	n.mu.Lock()
	delete(n.sessions, 7)
	n.mu.Unlock()
	if port := s.portAt(other); port.ISID != s.key.isid {
		t.Errorf("port %+v is that of another user", port)
	}
	n.mu.Lock()
	delete(n.sessions, 8)
	n.mu.Unlock()

	algorithms, err := security.ParseCHAPAlgorithms(nil)
	if err != nil {
		t.Fatal(err)
	}
	c, err := security.NewCHAP(security.CHAPConfig{Algorithms: algorithms, Users: []security.CHAPUser{
		{CHAPIdentity: security.CHAPIdentity{Name: "alice", Secret: security.Secret("another secret of alice")}}}})
	if err != nil {
		t.Fatal(err)
	}
	update(func(cfg *TargetConfig) { cfg.Auth = c })
	if find() != nil {
		t.Error("a user of the same name with another secret reaches the target")
	}
	tc.logout()
}
