package selftest

import (
	"slices"

	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iscsi/vectors"
	"github.com/iser-target/iser-target/rdma/wire"
)

// loginCases returns the cases about login and keys (RFC 7143, sections 6 and 13).
func loginCases() (list []testCase) {
	add := func(only, id string, run func(t *T)) {
		list = append(list, testCase{group: "login", only: only, id: id, run: run})
	}
	add("", "login, ping and logout", func(t *T) {
		s := t.login(nil)
		t.check(s.Ping(t.ctx), "NOP-Out")
		t.check(s.Logout(t.ctx), "logout")
	})
	add("", "ISCSI-4.2.2.2-1 ISCSI-6.3.1-3 login in one exchange", func(t *T) {
		p := t.peer()
		if p.answer("TargetPortalGroupTag") == "" {
			t.failf("ISCSI-6.3.1-3: no TargetPortalGroupTag in %q", p.answers)
		}
	})
	add("", "ISCSI-6.2-6 an unknown key", func(t *T) {
		p := t.peer("X-io.example.selftest=1")
		if got := p.answer("X-io.example.selftest"); got != "NotUnderstood" {
			t.failf("answer %q, where NotUnderstood is due", got)
		}
	})
	add("", "ISCSI-6.2.1-1 unknown entries of a list", func(t *T) {
		p := t.stream()
		r := p.loginRequest()
		r.CSG, r.NSG = pdu.SecurityNegotiation, pdu.LoginOperationalNegotiation
		p.sendLogin(r, append(slices.Clone(p.names), "AuthMethod=X-io.example.selftest,None"))
		p.wantLogin(pdu.LoginSuccess)
		if got := p.answer("AuthMethod"); got != "None" {
			t.failf("AuthMethod=%s, where None is due", got)
		}
	})
	add("", "discovery names the target", func(t *T) {
		s := t.login(nil)
		s.Close()
		cfg := initiator.Config{Name: t.o.Name}
		if t.transport == "iser" {
			cfg.Transport = iserTransport
		}
		found, err := initiator.Discover(t.ctx, t.o.Address, cfg)
		t.check(err, "discovery")
		if !slices.ContainsFunc(found, func(g initiator.Target) bool { return g.Name == t.o.Target }) {
			t.failf("%s is not among the %d targets found", t.o.Target, len(found))
		}
	})
	for _, c := range vectors.LoginRefusals {
		add("", c.ID, refusal(c))
	}
	for _, c := range vectors.IserLoginRefusals {
		add("iser", c.ID, refusal(c))
	}
	add("tcp", "ISCSI-13.1-1 digests of headers and data", func(t *T) {
		s := t.login(func(c *initiator.Config) { c.HeaderDigest, c.DataDigest = true, true })
		if p := s.Params(); !p.HeaderDigest || !p.DataDigest {
			t.failf("the login has agreed on %+v", p)
		}
		pattern(t, s)
	})
	add("iser", "ISER-5.1-10 ISER-6.1-1 digests are not for iSER", func(t *T) {
		p := t.peer("HeaderDigest=CRC32C,None", "DataDigest=CRC32C,None")
		for _, key := range []string{"HeaderDigest", "DataDigest"} {
			if got := p.answer(key); got != "None" {
				t.failf("%s=%s, where None is due", key, got)
			}
		}
	})
	add("tcp", "ISCSI-4.2.4-1 a command before the login", func(t *T) {
		p := t.stream()
		p.send(p.command(0, 0, [16]byte{}), nil)
		p.wantEnd()
	})
	add("iser", "ISCSI-4.2.4-1 ISER-10.1.3.3-2 a command before the login", func(t *T) {
		p := t.stream()
		p.send(p.command(0, 0, [16]byte{}), nil)
		p.wantTerminate(wire.ReasonOperation, "")
	})
	add("tcp", "ISCSI-6.3-2 a Login Request of 8193 bytes", func(t *T) {
		p := t.stream()
		r := p.loginRequest()
		r.Transit, r.NSG = false, 0
		p.sendLogin(r, p.names)
		p.wantLogin(pdu.LoginSuccess)
		p.send(pdu.BHS(r.Append(nil)), make([]byte, 8193))
		p.wantLogin(pdu.LoginInitiatorError)
		p.wantEnd()
	})
	add("", "ISCSI-6.3-3 back to the security stage", func(t *T) {
		p := t.stream()
		r := p.loginRequest()
		r.Transit, r.NSG = false, 0
		p.sendLogin(r, p.names)
		p.wantLogin(pdu.LoginSuccess)
		r.Transit, r.CSG, r.NSG = true, pdu.SecurityNegotiation, pdu.LoginOperationalNegotiation
		p.sendLogin(r, []string{"AuthMethod=None"})
		p.wantLogin(pdu.LoginInitiatorError)
	})
	return list
}

// refusal returns the run of a login that is refused.
func refusal(c vectors.LoginRefusal) func(t *T) {
	return func(t *T) {
		p := t.stream()
		r := p.loginRequest()
		if c.Change != nil {
			c.Change(&r)
		}
		p.sendLogin(r, c.Pairs(p.names))
		if got := p.wantLogin(c.Status); got.Transit || got.TSIH != 0 {
			t.failf("the refusal has T %t and TSIH %d", got.Transit, got.TSIH)
		}
	}
}
