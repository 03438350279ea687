package daemon

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
)

// Indices of the portals of accessConfig.
const (
	portalIPv4 = iota // tpgt 1
	portalIPv6        // tpgt 2
	portalISER        // tpgt 3
	portalTCP         // tpgt 3
)

// accessConfig has all kinds of access rules. Its initiators are
// iqn.2026-11.io.example:host1 to host4.
const accessConfig = `
state_dir: ""
portals:
  - {listen: "127.0.0.1:0"}
  - {listen: "[::1]:0", tpgt: 2}
  - {listen: "127.0.0.2:0", tpgt: 3, transports: [iser]}
  - {listen: "127.0.0.3:0", tpgt: 3, transports: [tcp]}
targets:
  - name: iqn.2026-11.io.example:masked
    initiators: ["iqn.2026-11.io.example:host?"]
    luns:
      - {id: 0, backend: memory, size: 1MiB, read_only_for: ["*:host3"]}
      - {id: 1, backend: memory, size: 1MiB, initiators: ["*:host1", "IQN.2026-11.io.example:HOST3"]}
      - {id: 2, backend: memory, size: 1MiB, read_only: true}
      - {id: 300, backend: memory, size: 1MiB, initiators: ["*:host2"], read_only_for: ["*2"]}
  - name: iqn.2026-11.io.example:chap
    initiators: ["iqn.2026-11.io.example:host?"]
    auth:
      method: chap
      users:
        - {name: one, secret: secret of host1, initiator: "*:host1"}
        - {name: two, secret: secret of host2, initiator: "*:host2", mutual: {name: to two, secret: the host is two}}
        - {name: any, secret: secret of all}
      mutual: {name: store, secret: secret of the store}
    luns: [{id: 0, backend: memory, size: 1MiB}]
  - name: iqn.2026-11.io.example:oneway
    initiators: ["iqn.2026-11.io.example:host1"]
    auth: {method: chap, users: [{name: one, secret: secret of host1}]}
    luns: [{id: 0, backend: memory, size: 1MiB}]
  - name: iqn.2026-11.io.example:group2
    initiators: ["iqn.2026-11.io.example:host?"]
    portal_groups: [2]
    luns: [{id: 0, backend: memory, size: 1MiB}]
  - name: iqn.2026-11.io.example:moved
    initiators: ["iqn.2026-11.io.example:host1"]
    auth: {method: chap, users: [{name: one, secret: secret of host1}]}
    redirect: {to: "[2001:db8::1]:3260"}
  - name: iqn.2026-11.io.example:gone
    initiators: ["iqn.2026-11.io.example:host1"]
    redirect: {to: 192.0.2.1:3261, permanent: true}
`

// An accessRule is a login and its expected outcome. Zero fields mean the default.
type accessRule struct {
	name   string
	portal int
	host   string // default host1
	target string // behind iqn.2026-11.io.example: ; empty: discovery
	auth   *initiator.CHAP
	only   string // the transport that the portal serves, if not both

	status  pdu.LoginStatus
	address string // TargetAddress of a redirect
	luns    string // what accessTo says
	targets string // what discovery names, without iqn.2026-11.io.example:
}

func chapOf(name, secret string) *initiator.CHAP {
	return &initiator.CHAP{Name: name, Secret: secret}
}

func mutualCHAP(name, secret, target string) *initiator.CHAP {
	return &initiator.CHAP{Name: name, Secret: secret, Target: target}
}

var accessRules = []accessRule{
	// initiators, and LUNs by initiator.
	{name: "pattern of a LUN", target: "masked", luns: "0:write 1:write 2:read"},
	{name: "exact name of a LUN, and read_only_for", host: "host2", target: "masked", luns: "0:write 2:read 300:read"},
	{name: "case does not count", host: "HOST3", target: "masked", luns: "0:read 1:write 2:read"},
	{name: "in no pattern of a LUN", host: "host4", target: "masked", luns: "0:write 2:read"},
	{name: "ISCSI-C-4 not among initiators", host: "host10", target: "masked", status: pdu.LoginAuthorization},
	{name: "pattern in the initiator's own name", host: "host*", target: "masked", status: pdu.LoginInitiatorError},
	{name: "no such target", target: "nothing", status: pdu.LoginNotFound},

	// CHAP.
	{name: "CHAP is required", target: "chap", status: pdu.LoginAuthentication},
	{name: "CHAP", target: "chap", auth: chapOf("one", "secret of host1"), luns: "0:write"},
	{name: "CHAP, user of any initiator", host: "host4", target: "chap", auth: chapOf("any", "secret of all"), luns: "0:write"},
	{name: "CHAP, wrong secret", target: "chap", auth: chapOf("one", "secret of host2"), status: pdu.LoginAuthentication},
	{name: "CHAP, user of another initiator", host: "host2", target: "chap", auth: chapOf("one", "secret of host1"), status: pdu.LoginAuthentication},
	{name: "CHAP, unknown user", target: "chap", auth: chapOf("three", "secret of host1"), status: pdu.LoginAuthentication},
	{name: "CHAP, not among initiators", host: "host10", target: "chap", auth: chapOf("any", "secret of all"), status: pdu.LoginAuthorization},
	{name: "mutual CHAP", target: "chap", auth: mutualCHAP("one", "secret of host1", "secret of the store"), luns: "0:write"},
	{name: "mutual CHAP by initiator", host: "host2", target: "chap", auth: mutualCHAP("two", "secret of host2", "the host is two"), luns: "0:write"},
	{name: "mutual CHAP, wrong secret", target: "chap", auth: mutualCHAP("one", "secret of host2", "secret of the store"), status: pdu.LoginAuthentication},
	{name: "mutual CHAP that the target cannot", target: "oneway", auth: mutualCHAP("one", "secret of host1", "secret of the store"), status: pdu.LoginAuthentication},
	{name: "one-way CHAP", target: "oneway", auth: chapOf("one", "secret of host1"), luns: "0:write"},

	// Portals.
	{name: "IPv6", portal: portalIPv6, target: "masked", luns: "0:write 1:write 2:read"},
	{name: "portal of the group", portal: portalIPv6, target: "group2", luns: "0:write"},
	{name: "portal of another group", target: "group2", status: pdu.LoginNotFound},
	{name: "portal of another group, not among initiators", host: "host10", target: "group2", status: pdu.LoginNotFound},
	{name: "transports: iser", portal: portalISER, only: "iser", target: "masked", luns: "0:write 1:write 2:read"},
	{name: "transports: tcp", portal: portalTCP, only: "tcp", target: "masked", luns: "0:write 1:write 2:read"},

	// Redirects, before authentication (ISCSI-11.13-3) and after the check of names.
	{name: "ISCSI-13.8-1 moved", target: "moved", status: pdu.LoginMovedTemporarily, address: "[2001:db8::1]:3260"},
	{name: "moved for good", target: "gone", status: pdu.LoginMovedPermanently, address: "192.0.2.1:3261"},
	{name: "moved, for whom it is no target", host: "host2", target: "moved", status: pdu.LoginAuthorization},

	// Discovery.
	{name: "ISCSI-C-2 discovery", targets: "chap gone group2 masked moved oneway"},
	{name: "ISCSI-C-4 discovery of another initiator", host: "host2", targets: "chap group2 masked"},
	{name: "ISCSI-C-4 discovery of nothing", host: "host10"},
	{name: "ISCSI-C-1 discovery on IPv6", portal: portalIPv6, host: "host4", targets: "chap group2 masked"},
	{name: "ISCSI-C-1 discovery by iSER", portal: portalISER, only: "iser", host: "host4", targets: "chap group2 masked"},
	{name: "ISCSI-C-1 discovery by TCP", portal: portalTCP, only: "tcp", host: "host4", targets: "chap group2 masked"},
	{name: "discovery with CHAP that is not required", auth: chapOf("one", "secret of host1"), host: "host4", targets: "none"},
}

// discoveryRules are the rules of accessConfig with discovery_auth.
var discoveryRules = []accessRule{
	{name: "CHAP is required", status: pdu.LoginAuthentication},
	{name: "CHAP", auth: chapOf("finder", "secret to find"), targets: "chap gone group2 masked moved oneway"},
	{name: "CHAP, wrong secret", auth: chapOf("finder", "secret of host1"), status: pdu.LoginAuthentication},
	{name: "CHAP, user of a target", auth: chapOf("one", "secret of host1"), status: pdu.LoginAuthentication},
	{name: "mutual CHAP", auth: mutualCHAP("finder", "secret to find", "secret to be found"), targets: "chap gone group2 masked moved oneway"},
	{name: "targets without CHAP", target: "masked", luns: "0:write 1:write 2:read"},
}

// Every access rule has the same outcome over TCP, over iSER, and with a step-up.
func TestAccessIsTheSameOnAllTransports(t *testing.T) {
	for _, set := range []struct {
		name, yaml string
		rules      []accessRule
	}{
		{"targets", accessConfig, accessRules},
		{"discovery_auth", accessConfig + `
discovery_auth:
  method: chap
  users: [{name: finder, secret: secret to find}]
  mutual: {name: found, secret: secret to be found}
`, discoveryRules},
	} {
		t.Run(set.name, func(t *testing.T) {
			s := serve(t, set.yaml)
			for _, rule := range set.rules {
				for _, transport := range []string{"tcp", "iser", "step-up"} {
					t.Run(rule.name+" over "+transport, func(t *testing.T) { rule.check(t, s, transport) })
				}
			}
		})
	}
}

func (r *accessRule) check(t *testing.T, s *Daemon, transport string) {
	const prefix = "iqn.2026-11.io.example:"
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	o := initiator.Options{Name: prefix + r.host}
	if r.host == "" {
		o.Name += "host1"
	}
	if r.target != "" {
		o.Target = prefix + r.target
	}
	d, err := initiator.Dial(ctx, transport, s.served.portals[r.portal].l.Addr().String(), o)
	if err == nil {
		defer d.Close()
		err = d.LogIn(r.auth)
	}
	var refused *initiator.LoginError
	speaks := transport // first of all
	if transport == "step-up" {
		speaks = "tcp"
	}
	switch {
	case r.only != "" && r.only != speaks:
		if err == nil || errors.As(err, &refused) || ctx.Err() != nil {
			t.Errorf("login: %v, want the end of the connection", err)
		}
		return
	case r.targets == "none":
		if err == nil || err.Error() != "AuthMethod=None" {
			t.Errorf("login: %v, want AuthMethod=None", err)
		}
		return
	case r.status != 0:
		if !errors.As(err, &refused) || refused.Status != r.status {
			t.Fatalf("login: %v, want status %v", err, r.status)
		}
		if got := valueOf(d, "TargetAddress"); got != r.address {
			t.Errorf("TargetAddress=%s, want %q", got, r.address)
		}
		return
	case err != nil:
		t.Fatal(err)
	}
	if r.auth != nil && r.auth.Target != "" && !d.Mutual {
		t.Error("the target has not proved who it is")
	}
	if want := fmt.Sprint(s.served.portals[r.portal].cur.Load().TPGT); valueOf(d, "TargetPortalGroupTag") != want { // ISCSI-13.9-1
		t.Errorf("TargetPortalGroupTag=%s, want %s", valueOf(d, "TargetPortalGroupTag"), want)
	}
	if r.target != "" {
		if extensions := valueOf(d, "RDMAExtensions"); (extensions == "Yes") != (transport == "iser" || transport == "step-up" && r.only == "") {
			t.Errorf("RDMAExtensions=%s", extensions)
		}
		if got := accessTo(t, d, 0, 1, 2, 3, 300); got != r.luns {
			t.Errorf("LUNs %s, want %s", got, r.luns)
		}
		wantTargets(t, s, d, "", r.target) // ISCSI-C-3
		return
	}
	wantTargets(t, s, d, "All", r.targets)
}

func valueOf(d *initiator.Dialog, key string) string {
	for _, p := range d.Keys {
		if p.Key == key {
			return p.Value
		}
	}
	return ""
}

// wantTargets requires that SendTargets names the targets, each with the addresses and tags
// of its portals (ISCSI-C-2).
func wantTargets(t *testing.T, s *Daemon, d *initiator.Dialog, which, names string) {
	t.Helper()
	var want []string
	for name := range strings.FieldsSeq(names) {
		want = append(want, "TargetName=iqn.2026-11.io.example:"+name)
		for _, p := range s.served.portals {
			if name != "group2" || p.cur.Load().TPGT == 2 {
				want = append(want, fmt.Sprintf("TargetAddress=%v,%d", p.l.Addr(), p.cur.Load().TPGT))
			}
		}
	}
	pairs, err := d.SendTargets(which)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range pairs {
		got = append(got, p.Key+"="+p.Value)
	}
	if g, w := strings.Join(got, "\n"), strings.Join(want, "\n"); g != w {
		t.Errorf("SendTargets=%s:\n%s\nwant\n%s", which, g, w)
	}
}

// accessTo tries all commands that show LUNs and returns which exist and which can be
// written. The answers have to agree.
func accessTo(t *testing.T, d *initiator.Dialog, ids ...uint16) string {
	t.Helper()
	do := func(lun [8]byte, cdb string, out []byte, in int) (outcome string, data []byte) {
		t.Helper()
		status, sense, data, err := d.Do(lun, []byte(cdb), out, in)
		if err != nil {
			t.Fatalf("CDB % x: %v", cdb, err)
		}
		if status == 0x02 && len(sense) >= 14 {
			return fmt.Sprintf("%x/%02x/%02x", sense[2]&0x0f, sense[12], sense[13]), data
		}
		return fmt.Sprintf("%#02x", status), data
	}
	outcome, list := do([8]byte{}, "\xa0\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00", nil, 256) // REPORT LUNS
	if outcome != "0x00" || len(list) < 8 {
		t.Fatalf("REPORT LUNS: %s, % x", outcome, list)
	}
	reported := map[[8]byte]bool{}
	for list = list[8:]; len(list) > 0; list = list[8:] {
		reported[[8]byte(list)] = true
	}
	var access []string
	for _, id := range ids {
		lun := [8]byte{0, byte(id)}
		if id > 255 {
			lun[0], lun[1] = 0x40|byte(id>>8), byte(id)
		}
		_, inquiry := do(lun, "\x12\x00\x00\x00\x24\x00", nil, 36)
		mode, header := do(lun, "\x1a\x00\x3f\x00\xff\x00", nil, 255)
		read, _ := do(lun, "\x28\x00\x00\x00\x00\x00\x00\x00\x01\x00", nil, 512)
		var writes []string
		for _, w := range []struct {
			cdb string
			out []byte
		}{
			{"\x2a\x00\x00\x00\x00\x00\x00\x00\x01\x00", make([]byte, 512)},                                 // WRITE(10)
			{"\x41\x00\x00\x00\x00\x00\x00\x00\x01\x00", make([]byte, 512)},                                 // WRITE SAME(10)
			{"\x42\x00\x00\x00\x00\x00\x00\x00\x18\x00", append([]byte{1: 22, 3: 16}, make([]byte, 20)...)}, // UNMAP
			{"\x89\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00", make([]byte, 1024)},        // COMPARE AND WRITE
		} {
			w, _ := do(lun, w.cdb, w.out, 0)
			writes = append(writes, w)
		}
		reset, err := d.TMF(pdu.LogicalUnitReset, lun)
		if err != nil {
			t.Fatal(err)
		}
		wp := len(header) > 2 && header[2]&0x80 != 0
		all := func(outcome string) string { return strings.TrimSuffix(strings.Repeat(outcome+" ", len(writes)), " ") }
		seen := fmt.Sprintf("reported %v, INQUIRY %#02x, MODE SENSE %s, WP %v, READ %s, writes %s, reset %d",
			reported[lun], inquiry[0], mode, wp, read, strings.Join(writes, " "), reset)
		switch seen {
		case fmt.Sprintf("reported true, INQUIRY 0x00, MODE SENSE 0x00, WP false, READ 0x00, writes %s, reset %d", all("0x00"), pdu.FunctionComplete):
			access = append(access, fmt.Sprintf("%d:write", id))
		case fmt.Sprintf("reported true, INQUIRY 0x00, MODE SENSE 0x00, WP true, READ 0x00, writes %s, reset %d", all("7/27/00"), pdu.FunctionComplete):
			access = append(access, fmt.Sprintf("%d:read", id))
		case fmt.Sprintf("reported false, INQUIRY 0x7f, MODE SENSE 5/25/00, WP false, READ 5/25/00, writes %s, reset %d", all("5/25/00"), pdu.LUNDoesNotExist):
		default:
			t.Errorf("LUN %d: %s", id, seen)
		}
	}
	return strings.Join(access, " ")
}

// ISCSI-4.4.2-1, ISCSI-4.4.3-1, ISCSI-4.4.3-2: a portal group is a target port, whatever
// the transport. One initiator port has a session with each. A reservation through one port
// does not hold for the other, and outlasts its session.
func TestPathsByPortalGroup(t *testing.T) {
	s := serve(t, accessConfig)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	o := initiator.Options{Name: "iqn.2026-11.io.example:host1", Target: "iqn.2026-11.io.example:masked"}
	login := func(transport string, portal int) *initiator.Dialog {
		t.Helper()
		d, err := initiator.Dial(ctx, transport, s.served.portals[portal].l.Addr().String(), o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { d.Close() })
		if err := d.LogIn(nil); err != nil {
			t.Fatal(err)
		}
		return d
	}
	run := func(d *initiator.Dialog, want byte, cdb string, out []byte, in int) []byte {
		t.Helper()
		status, sense, data, err := d.Do([8]byte{}, []byte(cdb), out, in)
		if err != nil || status != want {
			t.Fatalf("CDB % x: status %#02x, sense % x, %v; want %#02x", cdb, status, sense, err, want)
		}
		return data
	}
	const write10, conflict = "\x2a\x00\x00\x00\x00\x00\x00\x00\x01\x00", 0x18
	tcp, iser := login("tcp", portalIPv4), login("iser", portalIPv6)
	for d, name := range map[*initiator.Dialog]string{tcp: o.Target + ",t,0x0001\x00", iser: o.Target + ",t,0x0002\x00"} {
		if page := run(d, 0, "\x12\x01\x83\x00\xff\x00", nil, 255); !strings.Contains(string(page), name) {
			t.Errorf("no %q in %q", name, page)
		}
		if page := run(d, 0, "\x12\x01\x88\x00\xff\x00", nil, 255); !strings.Contains(string(page), name) || strings.Count(string(page), ",t,0x") != 3 {
			t.Errorf("SCSI Ports: %q", page)
		}
	}
	key := make([]byte, 24)
	key[15] = 7 // SERVICE ACTION RESERVATION KEY
	run(tcp, 0, "\x5f\x00\x00\x00\x00\x00\x00\x00\x18\x00", key, 0)
	key[7] = 7 // RESERVATION KEY
	run(tcp, 0, "\x5f\x01\x05\x00\x00\x00\x00\x00\x18\x00", key, 0)
	run(tcp, 0, write10, make([]byte, 512), 0)
	run(iser, conflict, write10, make([]byte, 512), 0)
	key[7] = 0
	run(iser, 0, "\x5f\x00\x00\x00\x00\x00\x00\x00\x18\x00", key, 0)
	run(iser, 0, write10, make([]byte, 512), 0)
	full := run(iser, 0, "\x5e\x03\x00\x00\x00\x00\x00\x00\xff\x00", nil, 255)
	if n := strings.Count(string(full), o.Name+",i,0x00023d000001\x00"); n != 2 || full[8+19] != 1 || full[8+24+int(full[8+23])+19] != 2 {
		t.Errorf("READ FULL STATUS: % x", full)
	}

	// The same portal group over another transport: the session is reinstated.
	again := login("iser", portalIPv4)
	run(again, 0, write10, make([]byte, 512), 0)
	if _, _, _, err := tcp.Do([8]byte{}, []byte(write10), make([]byte, 512), 0); err == nil || ctx.Err() != nil {
		t.Errorf("the session that was replaced: %v", err)
	}
	run(iser, 0, write10, make([]byte, 512), 0)

	// The registrations outlast both sessions; a registered initiator may write.
	again.Close()
	iser.Close()
	other := o
	o.Name = "iqn.2026-11.io.example:host2"
	run(login("tcp", portalIPv4), conflict, write10, make([]byte, 512), 0)
	o = other
	run(login("tcp", portalIPv6), 0, write10, make([]byte, 512), 0)
	run(login("iser", portalIPv4), 0, write10, make([]byte, 512), 0)
}

// ISCSI-9.4-1: the target neither answers a node architecture with its own nor logs it.
func TestNodeArchitectureIsNotLogged(t *testing.T) {
	var log testkit.Log
	s := serve(t, strings.Replace(accessConfig, "state_dir", "log: {level: debug}\nstate_dir", 1), &log)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for _, transport := range []string{"tcp", "iser"} {
		d, err := initiator.Dial(ctx, transport, s.served.portals[portalIPv4].l.Addr().String(), initiator.Options{
			Name: "iqn.2026-11.io.example:host1", Target: "iqn.2026-11.io.example:masked", Keys: []string{"X#NodeArchitecture=Unheard-Of/3.14"}})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		if err := d.LogIn(nil); err != nil {
			t.Fatal(err)
		}
		if got := valueOf(d, "X#NodeArchitecture"); got != "" {
			t.Errorf("%s: X#NodeArchitecture=%s", transport, got)
		}
		testkit.Eventually(t, "a line about the login", func() bool { // written after the answer
			return strings.Contains(log.String(), "msg=login transport="+transport)
		})
		if strings.Contains(log.String(), "Unheard") {
			t.Errorf("the log is\n%s", log.String())
		}
	}
}
