package config

import (
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
)

// onPortal returns an edit that adds keys to the portal and sections at the end.
func onPortal(keys, sections string) [2]string {
	return [2]string{good, strings.Replace(good, "- listen: 127.0.0.1:3260", "- listen: 127.0.0.1:3260\n"+indent(keys), 1) + sections}
}

func indent(keys string) string {
	return "    " + strings.ReplaceAll(keys, ", ", "\n    ")
}

// SEC-7146.3-6: the configuration decides whether IPsec is used, and how. Mistakes in it are errors.
func TestWrongIPsecIsRefused(t *testing.T) {
	static := func(sas, policies string) [2]string {
		return [2]string{"", "ipsec: {driver: static, static: {sas: [" + sas + "], policies: [" + policies + "]}}\n"}
	}
	const (
		sa     = "{spi: 0x1001, source: 192.0.2.2, destination: 192.0.2.1, reqid: 1, mode: transport, suite: aes128-sha256, key_file: /k}"
		policy = "{direction: in, source: 192.0.2.2, destination: 192.0.2.1, mode: transport, reqid: 1}"
	)
	change := func(of, old, now string) string { return strings.Replace(of, old, now, 1) }
	refused(t, []mistake{
		{"demand", onPortal("ipsec: always", ""), []string{`f: portals[0].ipsec: must be off, audit or required, not "always"`}},
		{"demand is a switch", onPortal("ipsec: true", ""), []string{"f: portals[0].ipsec: must be a string, not true"}},
		{"demand of a target", [2]string{"initiators:", "ipsec: on\n    initiators:"}, []string{`f: targets[0].ipsec: must be off, audit or required, not "on"`}},
		{"no such profile", onPortal("ipsec: audit, ipsec_profile: strict", ""), []string{`f: portals[0].ipsec_profile: ipsec.profiles has no profile "strict"`}},
		{"a profile for nothing", onPortal("ipsec: off, ipsec_profile: a", "ipsec: {profiles: [{name: a}]}\n"), []string{"f: portals[0].ipsec_profile: requires ipsec: audit or ipsec: required"}},
		{"any port", [2]string{"listen: 127.0.0.1:3260", "listen: 127.0.0.1:0\n    ipsec: required"}, []string{"f: portals[0].listen: must have a port"}},
		{"driver", [2]string{"", "ipsec: {driver: racoon}\n"}, []string{`f: ipsec.driver: must be xfrm, vici, static or exec, not "racoon"`}},
		{"driver_timeout", [2]string{"", "ipsec: {driver_timeout: 1999ms}\n"}, []string{"f: ipsec.driver_timeout: must be 2s to 10m, not 1.999s"}},
		{"grace", [2]string{"", "ipsec: {grace: 1h}\n"}, []string{"f: ipsec.grace: must be 0 to 10m, not 1h0m0s"}},
		{"profiles", [2]string{"", "ipsec: {profiles: [{mode: tunnel}, {name: a}, {name: a, mode: wide, suites: [des-sha1, aes128gcm16, aes128gcm16, null-sha256], min_key_bits: 64, min_replay_window: 1, max_lifetime: 1ms}]}\n"}, []string{
			"f: ipsec.profiles[0].name: is required", `f: ipsec.profiles[2].name: "a" is the name of ipsec.profiles[1]`, `f: ipsec.profiles[2].mode: "wide" is not a mode`,
			"f: ipsec.profiles[2].min_key_bits: 64 is not a key length", "f: ipsec.profiles[2].min_replay_window: 1 is outside", "f: ipsec.profiles[2].max_lifetime: 1ms is too short",
			`f: ipsec.profiles[2].suites[0]: suite "des-sha1": DES must not be used`, "f: ipsec.profiles[2].suites[2]: aes128gcm16 is listed twice",
			"f: ipsec.profiles[2].suites[3]: null-sha256 does not encrypt"}}, // SEC-7143.9.3-2
		{"identities", [2]string{"", "ipsec: {profiles: [{name: a, identities: [{initiator: host, id: x}, {initiator: \"*\"}]}]}\n"}, []string{
			"f: ipsec.profiles[0].identities[0].initiator: iSCSI name", "f: ipsec.profiles[0].identities[1].id: it is empty"}},
		{"vici", [2]string{"", "ipsec: {vici: {socket: charon}}\n"}, []string{"f: ipsec.vici.socket: must be an absolute path"}},
		{"exec without a program", [2]string{"", "ipsec: {driver: exec}\n"}, []string{"f: ipsec.exec.command: is required"}},
		{"exec", [2]string{"", "ipsec: {driver: exec, exec: {command: [verdict, \"a\\0\"], timeout: 1h}}\n"}, []string{
			`f: ipsec.exec.command[0]: must be an absolute path, not "verdict"`, "f: ipsec.exec.command[1]: has a NUL", "f: ipsec.exec.timeout: must be 100ms to 30s"}},
		{"static without SAs", [2]string{"", "ipsec: {driver: static}\n"}, []string{"f: ipsec.static.sas: is required", "f: ipsec.static.policies: is required"}},
		{"SAs for another driver", [2]string{"", "ipsec: {static: {sas: [" + sa + "]}}\n"}, []string{"f: ipsec.static: requires ipsec.driver: static"}},
		{"SPI", static(change(sa, "0x1001", "255"), policy), []string{"f: ipsec.static.sas[0].spi: must be 256 to 4294967295, not 255"}},
		{"SPI twice", static(sa+", "+change(sa, "192.0.2.2", "192.0.2.3"), policy), []string{"f: ipsec.static.sas[1].spi: 4097 to 192.0.2.1 is the SPI of ipsec.static.sas[0]"}},
		{"addresses", static(change(change(sa, "192.0.2.2", "host"), "192.0.2.1", "0.0.0.0"), policy), []string{
			`f: ipsec.static.sas[0].source: "host" is not an IP address`, `f: ipsec.static.sas[0].destination: "0.0.0.0" is not an IP address`}},
		{"families", static(change(sa, "192.0.2.2", `"2001:db8::1"`), policy), []string{"f: ipsec.static.sas[0].destination: must be of the address family of source"}},
		{"suite", static(change(sa, "aes128-sha256", "aes128"), policy), []string{`f: ipsec.static.sas[0].suite: suite "aes128": encryption must not be without integrity`}},
		{"counter mode", static(change(sa, "aes128-sha256", "aes128gcm16"), policy), []string{"f: ipsec.static.sas[0].suite: aes128gcm16 must not have keys that are set by hand"}}, // SEC-3723.5.9-1
		{"key file", static(change(sa, "key_file: /k", "key_file: k"), policy), []string{"f: ipsec.static.sas[0].key_file: is required"}},
		{"window", static(change(sa, "spi:", "replay_window: 64, spi:"), policy), []string{"f: ipsec.static.sas[0].replay_window: must be at most 32 without esn: true"}},
		{"policy", static(sa, change(change(change(policy, "in,", "fwd,"), "192.0.2.2", "192.0.2.2/24"), "reqid: 1", "reqid: 2")), []string{
			`f: ipsec.static.policies[0].direction: must be in or out, not "fwd"`, "f: ipsec.static.policies[0].source: 192.0.2.2/24 has bits beyond its prefix",
			"f: ipsec.static.policies[0].reqid: no SA has the reqid 2"}},
		{"no reqid", static(change(sa, "reqid: 1, ", ""), change(policy, ", reqid: 1", "")), []string{
			"f: ipsec.static.sas[0].reqid: is required", "f: ipsec.static.policies[0].reqid: is required"}},
		{"tunnel", static(sa, change(change(policy, "192.0.2.2", "192.0.2.0/24"), "transport", "tunnel")), []string{"f: ipsec.static.policies[0].tunnel_source: is required"}},
		{"no tunnel", static(sa, change(policy, "reqid", "tunnel_source: 192.0.2.9, reqid")), []string{"f: ipsec.static.policies[0].tunnel_source: requires mode: tunnel"}},
	})
}

// SEC-3723.2.4.1-3, SEC-7143.9.2.1-4: a secret below 96 bits is valid only where each portal that leads to it ensures encryption.
func TestShortSecretsRequireIPsec(t *testing.T) {
	yaml := func(first, second, target, profile string) string {
		return "portals:\n  - {listen: 192.0.2.1:3260, tpgt: 1, " + first + "}\n  - {listen: 192.0.2.2:3260, tpgt: 2, " + second + "}\ntargets:\n" +
			"  - {name: iqn.2026-11.io.example:store, initiators: [\"*\"], luns: [" + lun + "], " + target +
			"auth: {method: chap, users: [{name: a, secret: short, mutual: {name: t, secret: brief}}]}}\nipsec: {profiles: [{name: p, " + profile + "}]}\n"
	}
	for _, tc := range []struct{ name, yaml, want string }{
		{"protected portals", yaml("ipsec: required", "ipsec: required, ipsec_profile: p", "", "esn: true"), ""},
		{"one audits", yaml("ipsec: required", "ipsec: audit", "", "esn: true"), "portals[1] (192.0.2.2:3260) does not require IPsec"},
		{"it does not lead there", yaml("ipsec: required", "ipsec: off", "portal_groups: [1], ", "esn: true"), ""},
		{"the target requires it, after the login", yaml("ipsec: required", "ipsec: off", "ipsec: required, ", "esn: true"), "portals[1] (192.0.2.2:3260) does not require IPsec"},
		{"integrity alone", yaml("ipsec: required", "ipsec: required, ipsec_profile: p", "", "null_encryption: true"),
			`portals[1] (192.0.2.2:3260) does not require encryption: its profile "p" has null_encryption: true`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := load("f", []byte(tc.yaml))
			if tc.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			const short = "secret has 5 bytes, less than 12 (96 bits), and "
			wantErrors(t, err, []string{"f: targets[0].auth.users[0].secret: " + short + tc.want, "f: targets[0].auth.users[0].mutual.secret: " + short + tc.want})
		})
	}
}

// Keys of ipsec.yaml have the documented effect, and profiles without a name their defaults.
func TestIPsecProfiles(t *testing.T) {
	c, err := Load("../examples/ipsec.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if a, b := c.Portals[0].Demand(), c.Portals[1].Demand(); a != ipsec.Required || b != ipsec.Off || !c.RequiresIPsec() || !c.UsesIPsec() {
		t.Errorf("%s, %s", a, b)
	}
	p := c.IPsec.Profile(c.Portals[0].IPsecProfile)
	if p == nil || p.Name != "storage" || !p.ESN || p.ESNAuto || p.MaxLifetime != 8*time.Hour || len(p.Identities) != 2 || p.Identities[1].ID != "host2.example.com" || p.ManualKeys {
		t.Errorf("%+v", p)
	}
	if c.IPsec.Grace != 10*time.Second || c.IPsec.VICI.Socket != "/run/charon.vici" || c.IPsec.Driver != "vici" {
		t.Errorf("%+v", c.IPsec)
	}
	if p := c.IPsec.Profile(""); p == nil || p.Name != "default" || p.ManualKeys || len(p.Suites) > 0 {
		t.Errorf("%+v", p)
	}
	c.IPsec.Profiles = append(c.IPsec.Profiles, IPsecProfile{Name: "default", ManualKeys: true})
	if p := c.IPsec.Profile(""); p == nil || !p.ManualKeys {
		t.Errorf("%+v", p)
	}
	if plain, err := load("f", []byte(good)); err != nil || plain.UsesIPsec() || plain.RequiresIPsec() {
		t.Errorf("%v: a configuration without ipsec uses it", err)
	}
}
