package ipsec

import (
	"net/netip"
	"strings"
	"testing"
	"time"
)

var (
	testFlow = Flow{netip.MustParseAddrPort("192.0.2.1:3260"), netip.MustParseAddrPort("192.0.2.2:40000")}
	alice    = "iqn.2026-01.org.example:alice"
)

// good returns a protection that the zero profile accepts.
func good() Protection {
	sa := func(spi uint32, from, to netip.AddrPort) SA {
		return SA{
			SPI: spi, Source: from.Addr(), Destination: to.Addr(), ReqID: 1, Mode: Tunnel, AEAD: Algorithm{gcm, 128, 128},
			ESN: true, ReplayWindow: 32, Lifetime: time.Hour, IKE: true, RemoteID: "alice.example.org", LocalID: "target.example.org",
		}
	}
	return Protection{
		In: []SA{sa(0x1001, testFlow.Remote, testFlow.Local)}, Out: []SA{sa(0x2001, testFlow.Local, testFlow.Remote)},
		InPolicy: true, OutPolicy: true,
	}
}

// both applies change to all SAs of p.
func both(change func(*SA)) func(*Protection) {
	return func(p *Protection) {
		for i := range p.In {
			change(&p.In[i])
		}
		for i := range p.Out {
			change(&p.Out[i])
		}
	}
}

// over changes both directions of a flow over a link.
func over(l Link, change func(*SA)) func(*Protection) {
	return func(p *Protection) {
		both(change)(p)
		p.Link = l
	}
}

func algorithms(aead, enc, auth Algorithm) func(*Protection) {
	return both(func(sa *SA) { sa.AEAD, sa.Encryption, sa.Authentication = aead, enc, auth })
}

func TestJudge(t *testing.T) {
	var none Algorithm
	aes128 := Algorithm{Name: cbc, KeyBits: 128}
	sha1, sha256, aesxcbc := Algorithm{"hmac(sha1)", 160, 96}, Algorithm{"hmac(sha256)", 256, 128}, Algorithm{"xcbc(aes)", 128, 96}
	for _, tc := range []struct {
		name    string // begins with the row that it proves
		profile Profile
		change  func(*Protection)
		suite   string // of a permit
		reason  string // of a denial: a part of it
	}{
		{"zero profile", Profile{}, nil, "esp-tunnel aes128gcm16 esn", ""},

		{"SEC-3723.5.7-1 SEC-5042.5.4-3 no policies and no keys", Profile{}, func(p *Protection) { *p = Protection{} }, "", "in clear text: no IPsec policy covers them. Set up IPsec for TCP port 3260 of 192.0.2.1"},
		{"SEC-3723.5.7-1 keys without policies", Profile{}, func(p *Protection) { p.InPolicy, p.OutPolicy = false, false }, "", "no policy requires them"},
		{"SEC-3723.5.7-1 no incoming policy", Profile{}, func(p *Protection) { p.InPolicy = false }, "", "packets from 192.0.2.2 to 192.0.2.1 may be in clear text"},
		{"SEC-3723.5.7-1 no outgoing policy", Profile{}, func(p *Protection) { p.OutPolicy = false }, "", "packets from 192.0.2.1 to 192.0.2.2 may be in clear text"},
		{"SEC-3723.3.3-1 no incoming keys", Profile{}, func(p *Protection) { p.In = nil }, "", "no SA for packets from 192.0.2.2 to 192.0.2.1"},
		{"SEC-3723.3.3-1 no outgoing keys", Profile{}, func(p *Protection) { p.Out = nil }, "", "no SA for packets from 192.0.2.1 to 192.0.2.2"},

		{"SEC-7146.2-2 encryption without integrity", Profile{}, algorithms(none, aes128, none), "", "has no integrity protection"},
		{"SEC-7143.9.3-2 encryption without integrity in one direction", Profile{}, func(p *Protection) { p.Out[0].AEAD, p.Out[0].Encryption = none, aes128 }, "", "SA 0x00002001 from 192.0.2.1 to 192.0.2.2 has no integrity"},
		{"SEC-7143.9.3-2 digest_null is none", Profile{}, algorithms(none, aes128, Algorithm{"digest_null", 0, 0}), "", "has no integrity protection"},
		{"SEC-7146.2-2 SEC-5042.5.4-1 no replay protection", Profile{}, both(func(sa *SA) { sa.ReplayWindow = 0 }), "", "has no replay protection"},
		{"SEC-3723.2.3.1-1 replay window of the incoming SA alone counts", Profile{}, func(p *Protection) { p.Out[0].ReplayWindow = 0 }, "esp-tunnel aes128gcm16 esn", ""},
		{"replay window too small", Profile{MinReplayWindow: 64}, nil, "", "has a replay window of 32 packets, but profile \"p\" requires 64"},
		{"replay window of the default too small", Profile{}, both(func(sa *SA) { sa.ReplayWindow = 16 }), "", "requires 32"},
		{"replay window large enough", Profile{MinReplayWindow: 64}, both(func(sa *SA) { sa.ReplayWindow = 64 }), "esp-tunnel aes128gcm16 esn", ""},

		{"SEC-7146.2-3 ESN required", Profile{ESN: true}, both(func(sa *SA) { sa.ESN = false }), "", "requires extended ones"},
		{"SEC-7143.9.3-1 ESN there", Profile{ESN: true}, nil, "esp-tunnel aes128gcm16 esn", ""},
		{"SEC-7146.2-3 ESN at 1 Gbit/s", Profile{ESNAuto: true}, over(Link{"eth0", 1000}, func(sa *SA) { sa.ESN = false }), "",
			`SA 0x00001001 from 192.0.2.2 to 192.0.2.1 has sequence numbers of 32 bits, but profile "p" requires extended ones (esn: auto, and interface eth0 has 1 Gbit/s). ` +
				`Add -esn to the ESP proposals of both hosts, or set esn: false in profile "p"`},
		{"ESN at 2.5 Gbit/s", Profile{ESNAuto: true}, over(Link{"eth0", 2500}, func(sa *SA) { sa.ESN = false }), "", "interface eth0 has 2.5 Gbit/s"},
		{"with ESN at 10 Gbit/s", Profile{ESNAuto: true}, over(Link{"eth0", 10000}, func(*SA) {}), "esp-tunnel aes128gcm16 esn", ""},
		{"without ESN at 100 Mbit/s", Profile{ESNAuto: true}, over(Link{"eth0", 100}, func(sa *SA) { sa.ESN = false }), "esp-tunnel aes128gcm16", ""},
		{"without ESN where the speed is unknown", Profile{ESNAuto: true}, over(Link{"eth0", 0}, func(sa *SA) { sa.ESN = false }), "esp-tunnel aes128gcm16", ""},
		{"esn: false at 10 Gbit/s", Profile{}, over(Link{"eth0", 10000}, func(sa *SA) { sa.ESN = false }), "esp-tunnel aes128gcm16", ""},
		{"SEC-7146.2-3 esn: true where the speed is unknown", Profile{ESN: true}, over(Link{}, func(sa *SA) { sa.ESN = false }), "", "requires extended ones (esn: true)"},
		{"SEC-7146.2-3 without ESN unless required", Profile{}, both(func(sa *SA) { sa.ESN = false }), "esp-tunnel aes128gcm16", ""},

		{"SEC-7146.2.1-1 SEC-7146.2.2-1 AES-CBC with HMAC-SHA-1-96", Profile{}, algorithms(none, aes128, sha1), "esp-tunnel aes128-sha1 esn", ""},
		{"SEC-7146.2.1-2 AES-XCBC", Profile{}, algorithms(none, aes128, aesxcbc), "esp-tunnel aes128-aesxcbc esn", ""},
		{"SEC-7146.2.1-3 AES-GMAC", Profile{NullEncryption: true}, algorithms(Algorithm{gmac, 128, 128}, none, none), "esp-tunnel aes128gmac esn", ""},
		{"SEC-7146.2.1-3 AES-GMAC only where the profile does without encryption", Profile{}, algorithms(Algorithm{gmac, 128, 128}, none, none), "", "uses aes128gmac, which does not encrypt"},
		{"SHA-2", Profile{}, algorithms(none, aes128, sha256), "esp-tunnel aes128-sha256 esn", ""},
		{"SHA-2 truncated to 96 bits is another algorithm", Profile{}, algorithms(none, aes128, Algorithm{"hmac(sha256)", 256, 96}), "", "cbc(aes)/128-hmac(sha256)/256/96, which profile \"p\" does not accept"},
		{"SEC-7146.2.2-2 AES-GCM", Profile{Suites: []string{"aes128gcm16"}}, nil, "esp-tunnel aes128gcm16 esn", ""},
		{"SEC-7146.2.2-3 null encryption where the profile says so", Profile{NullEncryption: true}, algorithms(none, Algorithm{Name: null}, sha1), "esp-tunnel null-sha1 esn", ""},
		{"SEC-7146.2.2-3 null encryption elsewhere", Profile{}, algorithms(none, Algorithm{Name: "cipher_null"}, sha1), "", "uses null-sha1, which does not encrypt"},
		{"SEC-7146.2.2-4 3DES is not accepted", Profile{}, algorithms(none, Algorithm{Name: "cbc(des3_ede)", KeyBits: 192}, sha1), "", "cbc(des3_ede)/192-hmac(sha1)/160/96, which profile"},
		{"SEC-7146.2.2-4 AES-CTR is not accepted", Profile{}, algorithms(none, Algorithm{Name: "rfc3686(ctr(aes))", KeyBits: 128}, sha1), "", "does not accept"},
		{"SEC-3723.2.3.1-2 SEC-7143.9.3-3 DES", Profile{NullEncryption: true, MinKeyBits: 128, ManualKeys: true}, algorithms(none, Algorithm{Name: "cbc(des)", KeyBits: 64}, sha1), "", "uses DES, which must not be used"},
		{"suite not listed", Profile{Suites: []string{"aes256gcm16", "aes128-sha256"}}, nil, "", "uses aes128gcm16, which profile \"p\" does not accept. Configure the IKE daemon to propose one of aes256gcm16, aes128-sha256"},
		{"chacha20poly1305 only by name", Profile{}, algorithms(Algorithm{chacha, 256, 128}, none, none), "", "uses chacha20poly1305, which"},
		{"chacha20poly1305 by name", Profile{Suites: []string{"chacha20poly1305"}}, algorithms(Algorithm{chacha, 256, 128}, none, none), "esp-tunnel chacha20poly1305 esn", ""},
		{"key too short", Profile{MinKeyBits: 256}, nil, "", "uses aes128gcm16 with a key of 128 bits, but profile \"p\" requires 256. Configure the IKE daemon to propose one of aes256gcm16, "},
		{"key long enough", Profile{MinKeyBits: 256}, algorithms(Algorithm{gcm, 256, 128}, none, none), "esp-tunnel aes256gcm16 esn", ""},
		{"ICV too short", Profile{}, algorithms(Algorithm{gcm, 128, 64}, none, none), "", "rfc4106(gcm(aes))/128/64"},

		{"SEC-3723.2.3.2-1 tunnel mode required", Profile{Mode: Tunnel}, both(func(sa *SA) { sa.Mode = Transport }), "", "uses transport mode, but profile \"p\" requires tunnel mode"},
		{"SEC-3723.2.3.2-1 transport mode", Profile{Mode: Transport}, both(func(sa *SA) { sa.Mode = Transport }), "esp-transport aes128gcm16 esn", ""},
		{"SEC-3723.2.3.2-1 either mode", Profile{}, both(func(sa *SA) { sa.Mode = Transport }), "esp-transport aes128gcm16 esn", ""},
		{"another mode", Profile{}, both(func(sa *SA) { sa.Mode = "beet" }), "", "uses mode \"beet\""},

		{"SEC-7146.3-2 SEC-3723.5.9-1 manual keys", Profile{}, both(func(sa *SA) { sa.IKE = false }), "", "has keys that no key exchange made"},
		{"manual keys where the profile says so", Profile{ManualKeys: true}, both(func(sa *SA) { sa.IKE = false }), "esp-tunnel aes128gcm16 esn", ""},
		{"no lifetime", Profile{MaxLifetime: time.Hour}, both(func(sa *SA) { sa.Lifetime = 0 }), "", "has no lifetime, but profile \"p\" allows at most 1h0m0s"},
		{"lifetime too long", Profile{MaxLifetime: time.Minute}, nil, "", "lives for 1h0m0s"},
		{"lifetime at the limit", Profile{MaxLifetime: time.Hour}, nil, "esp-tunnel aes128gcm16 esn", ""},

		{"an older incoming SA counts, because the peer may use it", Profile{}, func(p *Protection) {
			old := p.In[0]
			old.SPI, old.AEAD, old.Encryption = 0x1000, none, aes128
			p.In = append(p.In, old)
		}, "", "SA 0x00001000 from 192.0.2.2 to 192.0.2.1 has no integrity"},
		{"an older outgoing SA does not count, because the kernel uses the newest", Profile{}, func(p *Protection) {
			old := p.Out[0]
			old.SPI, old.AEAD, old.Encryption = 0x2000, none, aes128
			p.Out = append(p.Out, old)
		}, "esp-tunnel aes128gcm16 esn", ""},

		{"identity of the initiator", Profile{Identities: []IdentityRule{{alice, "Alice.example.org"}}}, nil, "esp-tunnel aes128gcm16 esn", ""},
		{"identity by pattern", Profile{Identities: []IdentityRule{{"iqn.2026-01.org.example:*", "*.example.org"}}}, nil, "esp-tunnel aes128gcm16 esn", ""},
		{"identity of another initiator", Profile{Identities: []IdentityRule{{"*:bob", "alice.example.org"}, {alice, "bob.example.org"}}}, nil, "", "does not belong to initiator iqn.2026-01.org.example:alice: profile \"p\" requires bob.example.org"},
		{"initiator without a rule", Profile{Identities: []IdentityRule{{"*:bob", "*"}}}, nil, "", "has no IKE identity in profile"},
		{"identity unknown", Profile{Identities: []IdentityRule{{"*", "*"}}}, both(func(sa *SA) { sa.RemoteID = "" }), "", "Set ipsec.driver: vici"},
		{"identity of an older incoming SA", Profile{Identities: []IdentityRule{{alice, "alice.example.org"}}}, func(p *Protection) {
			old := p.In[0]
			old.RemoteID = "mallory.example.org"
			p.In = append(p.In, old)
		}, "", "IKE identity \"mallory.example.org\""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := good()
			if tc.change != nil {
				tc.change(&p)
			}
			tc.profile.Name = "p"
			if err := tc.profile.Validate(); err != nil {
				t.Fatalf("profile: %v", err)
			}
			q := Question{Moment: AtLogin, Flow: testFlow, Initiator: alice, Demand: Required, Profile: &tc.profile}
			v := Judge(q, p)
			if tc.reason == "" {
				if v.Action != Permit || v.Reason != "" || v.Suite != tc.suite || v.KeysGone {
					t.Fatalf("verdict %+v, want a permit of %q", v, tc.suite)
				}
				return
			}
			if v.Action != Deny || !strings.Contains(v.Reason, tc.reason) {
				t.Fatalf("verdict %+v, want a denial with %q", v, tc.reason)
			}
			if strings.Count(v.Reason, ". ") < 1 || !startsWithState(v.Reason) {
				t.Errorf("reason %q does not name the problem and then the remedy", v.Reason)
			}
			if gone := len(p.In) == 0 || len(p.Out) == 0; v.KeysGone != (gone && p.InPolicy && p.OutPolicy) {
				t.Errorf("keys gone: %v", v.KeysGone)
			}
			q.Demand = Audit
			if a := Judge(q, p); a.Action != Mark || a.Reason != v.Reason {
				t.Errorf("under audit: %+v, want a mark with the same reason", a)
			}
			q.Demand = Off
			if o := Judge(q, p); o.Action != Permit || o.Reason != "" {
				t.Errorf("SEC-7146.3-6: under off: %+v, want a permit", o)
			}
		})
	}
}

// startsWithState reports whether the text begins with a problem instead of advice.
func startsWithState(s string) bool {
	for _, verb := range []string{"Add ", "Set ", "Use ", "Configure "} {
		if strings.HasPrefix(s, verb) {
			return false
		}
	}
	return true
}

// Before the login the initiator is unknown, and so each identity that belongs to some initiator is good enough.
func TestJudgeAtAccept(t *testing.T) {
	profile := &Profile{Name: "p", Identities: []IdentityRule{{alice, "alice.example.org"}}}
	q := Question{Moment: AtAccept, Flow: testFlow, Demand: Required, Profile: profile}
	p := good()
	if v := Judge(q, p); v.Action != Permit || v.Identity != "alice.example.org" || v.SPIIn != 0x1001 || v.SPIOut != 0x2001 || !v.Protected() {
		t.Errorf("verdict %+v", v)
	}
	both(func(sa *SA) { sa.RemoteID = "mallory.example.org" })(&p)
	if v := Judge(q, p); v.Action != Deny || !strings.Contains(v.Reason, "belongs to no initiator") {
		t.Errorf("verdict %+v", v)
	}
}

// A profile that is missing is the zero profile, and a demand that nobody knows the strictest one.
func TestJudgeFailsClosed(t *testing.T) {
	p := good()
	both(func(sa *SA) { sa.IKE = false })(&p)
	if v := Judge(Question{Flow: testFlow, Demand: Required}, p); v.Action != Deny {
		t.Errorf("without a profile: %+v", v)
	}
	if v := Judge(Question{Flow: testFlow, Demand: "strict"}, p); v.Action != Deny {
		t.Errorf("with an unknown demand: %+v", v)
	}
	if d := Stricter("strict", Audit); d != "strict" {
		t.Errorf("Stricter returns %q", d)
	}
}

func TestStricter(t *testing.T) {
	order := []Demand{Off, Audit, Required}
	for i, a := range order {
		for j, b := range order {
			if got, want := Stricter(a, b), order[max(i, j)]; got != want {
				t.Errorf("Stricter(%s, %s) = %s, want %s", a, b, got, want)
			}
		}
	}
	for _, s := range []string{"", "off", "audit", "required"} {
		if d, err := ParseDemand(s); err != nil || d != Demand(s) && s != "" {
			t.Errorf("ParseDemand(%q) = %q, %v", s, d, err)
		}
	}
	if _, err := ParseDemand("Required"); err == nil || !strings.Contains(err.Error(), "off, audit or required") {
		t.Errorf("ParseDemand(Required): %v", err)
	}
}

// Every accepted name is a suite with integrity, and an SA of it has that name.
func TestSuites(t *testing.T) {
	if n := len(Suites()); n != 27 {
		t.Errorf("%d suites", n)
	}
	for _, name := range Suites() {
		s, err := ParseSuite(name)
		if err != nil || s.Name != name {
			t.Fatalf("%s: %v, %v", name, s, err)
		}
		if s.AEAD.ICVBits+s.Authentication.ICVBits < 96 {
			t.Errorf("SEC-7146.2-2: %s has no integrity of 96 bits: %+v", name, s)
		}
		got, ok := SA{AEAD: s.AEAD, Encryption: s.Encryption, Authentication: s.Authentication}.Suite()
		if !ok || got.Name != name {
			t.Errorf("an SA of %s is one of %q", name, got.Name)
		}
	}
}

func TestParseSuiteFaults(t *testing.T) {
	for _, tc := range []struct{ name, fault string }{
		{"", "the name is empty"},
		{"des-sha1", "SEC-7143.9.3-3: DES must not be used"},
		{"aes128", "SEC-7143.9.3-2: encryption must not be without integrity"},
		{"null", "encryption must not be without integrity"},
		{"sha256", "encryption is missing"},
		{"AES128GCM16", "names are in small letters"},
		{"aes128gcm16-sha256", "\"aes128gcm16\" includes integrity"},
		{"aes128-md5", "integrity algorithm \"md5\" is not accepted"},
		{"3des-sha1", "encryption algorithm \"3des\" is not accepted"},
		{"aes128ctr-sha1", "encryption algorithm \"aes128ctr\" is not accepted"},
		{"aes128gcm8", "encryption algorithm \"aes128gcm8\" is not accepted"},
		{"aes128gcm16-modp2048", "\"modp2048\" is a key exchange"},
		{"aes128gcm16-esn", "esn is not an algorithm"},
		{"aes128-sha1-sha256", "more than two parts"},
		{strings.Repeat("x", 5000), "is not accepted"},
	} {
		_, fault, rowed := strings.Cut(tc.fault, ": ")
		if !rowed {
			fault = tc.fault
		}
		_, err := ParseSuite(tc.name)
		if err == nil || !strings.Contains(err.Error(), fault) || !strings.Contains(err.Error(), "Use one of aes128gcm16, ") {
			t.Errorf("ParseSuite(%q): %v, want %q and the accepted names", tc.name, err, tc.fault)
		} else if len(err.Error()) > 1000 {
			t.Errorf("ParseSuite: error of %d bytes", len(err.Error()))
		}
	}
}

func TestValidate(t *testing.T) {
	for _, tc := range []struct {
		profile Profile
		faults  string // by lines
	}{
		{Profile{}, ""},
		{Profile{Mode: Transport, Suites: []string{"aes256gcm16"}, MinKeyBits: 256, MinReplayWindow: 4096, MaxLifetime: time.Hour}, ""},
		{Profile{Mode: "beet"}, `mode: "beet" is not a mode. Use tunnel or transport, or leave mode out to accept both`},
		{Profile{MinKeyBits: 64}, "min_key_bits: 64 is not a key length of AES. Use 128, 192 or 256"},
		{Profile{MinReplayWindow: 31}, "min_replay_window: 31 is outside of the range from 32 to 4096 packets"},
		{Profile{MinReplayWindow: -1}, "min_replay_window: -1 is outside of the range from 32 to 4096 packets"},
		{Profile{MaxLifetime: time.Millisecond}, "max_lifetime: 1ms is too short. Use at least 1s, or leave max_lifetime out for no limit"},
		{Profile{Suites: []string{"aes128gcm16", "aes128gcm16"}}, "suites[1]: aes128gcm16 is listed twice"},
		{Profile{Suites: []string{"aes128gmac"}}, "suites[0]: aes128gmac does not encrypt. Set null_encryption: true if integrity alone is enough"},
		{Profile{Suites: []string{"aes128gcm16"}, MinKeyBits: 256}, "suites[0]: aes128gcm16 has a key of 128 bits, but min_key_bits is 256"},
		{Profile{Identities: []IdentityRule{{"iqn.bad", ""}}}, "identities[0].initiator: "},
		{Profile{Identities: []IdentityRule{{"*", ""}}}, "identities[0].id: it is empty. Use * to accept each identity"},
		{Profile{Identities: []IdentityRule{{"*", "@#0a0b"}}}, `identities[0].id: "@#0a0b" is a KEY_ID`}, // SEC-7146.3.1-6
		{Profile{Mode: "x", MinKeyBits: 1}, "mode: \"x\" is not a mode. Use tunnel or transport, or leave mode out to accept both\nmin_key_bits: 1 is not"},
	} {
		err := tc.profile.Validate()
		switch {
		case tc.faults == "" && err != nil, tc.faults != "" && (err == nil || !strings.HasPrefix(err.Error(), tc.faults)):
			t.Errorf("%+v: %v, want %q", tc.profile, err, tc.faults)
		}
	}
}

func TestMatchID(t *testing.T) {
	for _, tc := range []struct {
		pattern, id string
		want        bool
	}{
		{"a", "a", true}, {"a", "ab", false}, {"*", "", true}, {"*", "x", true}, {"a*", "a", true}, {"*a", "ba", true},
		{"a*a", "a", false}, {"a*b*c", "aXbYc", true}, {"a*b*c", "acb", false}, {"*.example.org", "example.org", false},
		{"c=de, o=?, cn=*", "c=de, o=?, cn=alice", true}, {"o=?", "o=x", false}, {"a**b", "ab", true}, {"*aa*", "a", false},
	} {
		if got := matchID(tc.pattern, tc.id); got != tc.want {
			t.Errorf("matchID(%q, %q) = %v", tc.pattern, tc.id, got)
		}
	}
}
