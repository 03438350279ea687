package cli

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/security/ipsec"
)

// doctor says each thing that IPsec lacks together with the command that mends it. The reasons are those of the Judge.
func TestDoctorSaysWhatIPsecLacks(t *testing.T) {
	now := time.Date(2026, 11, 25, 12, 0, 0, 0, time.UTC)
	flow := ipsec.Flow{Local: netip.MustParseAddrPort("192.0.2.2:3260"), Remote: netip.MustParseAddrPort("192.0.2.1:40000")}
	sa := func(spi uint32, from, to string) ipsec.SA {
		return ipsec.SA{SPI: spi, Source: netip.MustParseAddr(from), Destination: netip.MustParseAddr(to), Mode: ipsec.Tunnel, ReplayWindow: 64, ESN: true, IKE: true,
			RemoteID: "host.example", AEAD: ipsec.Algorithm{Name: "rfc4106(gcm(aes))", KeyBits: 128, ICVBits: 128}}
	}
	good := func() ipsec.Protection {
		return ipsec.Protection{In: []ipsec.SA{sa(0x1001, "192.0.2.1", "192.0.2.2")}, Out: []ipsec.SA{sa(0x1002, "192.0.2.2", "192.0.2.1")}, InPolicy: true, OutPolicy: true}
	}
	for _, tc := range []struct {
		name, driver string
		change       func(*ipsec.Protection)
		want         string
	}{
		{"protected", "vici", func(p *ipsec.Protection) {}, "ok  ipsec  driver vici, 1 connection protected"},
		{"no policy", "vici", func(p *ipsec.Protection) { *p = ipsec.Protection{} },
			`problem  ipsec  session 7 of iqn.2026-11.io.example:host is not protected as required: packets between 192.0.2.2 and 192.0.2.1 are in clear text: no IPsec policy covers them. Set up IPsec for TCP port 3260 of 192.0.2.2 on both hosts
                  load the policies on both hosts: swanctl --load-all (docs/ipsec.md), and look at them: ip xfrm policy`},
		{"no policy that keeps clear text out", "xfrm", func(p *ipsec.Protection) { p.InPolicy, p.OutPolicy = false, false },
			`problem  ipsec  session 7 of iqn.2026-11.io.example:host is not protected as required: IPsec keys between 192.0.2.2 and 192.0.2.1 exist, but no policy requires them, so packets may be in clear text. Add policies in both directions for TCP port 3260 of 192.0.2.2
                  load the policies on both hosts: swanctl --load-all (docs/ipsec.md), and look at them: ip xfrm policy`},
		{"a policy for one direction", "static", func(p *ipsec.Protection) { p.OutPolicy = false },
			`problem  ipsec  session 7 of iqn.2026-11.io.example:host is not protected as required: packets from 192.0.2.2 to 192.0.2.1 may be in clear text: no IPsec policy covers this direction. Add a policy that requires ESP for them
                  add policies in both directions to ipsec.static.policies, then: iser-target config apply`},
		{"no SA", "vici", func(p *ipsec.Protection) { p.In = nil },
			`problem  ipsec  session 7 of iqn.2026-11.io.example:host is not protected as required: no SA for packets from 192.0.2.1 to 192.0.2.2: a policy requires ESP, but the keys are missing. Look at the IKE daemon of both hosts, or install the keys
                  negotiate keys: swanctl --initiate --child NAME, and look at them: swanctl --list-sas`},
		{"wrong suite", "vici", func(p *ipsec.Protection) {
			p.Out[0].AEAD = ipsec.Algorithm{}
			p.Out[0].Encryption = ipsec.Algorithm{Name: "cbc(des)", KeyBits: 64}
			p.Out[0].Authentication = ipsec.Algorithm{Name: "hmac(sha256)", KeyBits: 256, ICVBits: 128}
		},
			`problem  ipsec  session 7 of iqn.2026-11.io.example:host is not protected as required: SA 0x00001002 from 192.0.2.2 to 192.0.2.1 uses DES, which must not be used. Configure the IKE daemon to propose one of aes128gcm16
                  correct the proposals of both hosts, or the profile, then: swanctl --load-all; swanctl --rekey --child NAME`},
		{"wrong identity", "vici", func(p *ipsec.Protection) { p.In[0].RemoteID = "other.example" },
			`problem  ipsec  session 7 of iqn.2026-11.io.example:host is not protected as required: IKE identity "other.example" of 192.0.2.1 does not belong to initiator iqn.2026-11.io.example:host: profile "p" requires host.example. Correct identities, or the id of the initiator's IKE daemon
                  correct identities of the profile, then: iser-target config apply; swanctl --list-sas shows the identity`},
		{"strongSwan does not answer", "vici", func(p *ipsec.Protection) {
			p.In[0].RemoteID, p.Incomplete = "", errorText("strongSwan: /run/charon.vici: connection refused. Start strongSwan (systemctl start strongswan), or set ipsec.vici.socket")
		},
			`problem  ipsec  session 7 of iqn.2026-11.io.example:host is not protected as required: IPsec cannot be checked: strongSwan: /run/charon.vici: connection refused. Start strongSwan (systemctl start strongswan), or set ipsec.vici.socket
                  see iser-target ipsec status`},
		{"lifetimes that end", "vici", func(p *ipsec.Protection) {
			p.In[0].Lifetime, p.In[0].Added = 1000*time.Second, now.Add(-951*time.Second)
			p.Out[0].Lifetime, p.Out[0].Added = 1000*time.Second, now.Add(-949*time.Second)
		},
			`warning  ipsec  session 7 of iqn.2026-11.io.example:host: SA 0x00001001 from 192.0.2.1 to 192.0.2.2 expires at 2026-11-25T12:00:49Z, and there is no newer one
                  negotiate keys: swanctl --initiate --child NAME, and look at them: swanctl --list-sas`},
		{"a lifetime that ends, with new keys", "vici", func(p *ipsec.Protection) {
			p.In[0].Lifetime, p.In[0].Added = 1000*time.Second, now.Add(-999*time.Second)
			next := sa(0x2001, "192.0.2.1", "192.0.2.2")
			next.Lifetime, next.Added = 1000*time.Second, now
			p.In = append([]ipsec.SA{next}, p.In...)
		}, "ok  ipsec  driver vici, 1 connection protected"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := good()
			tc.change(&p)
			profile := &ipsec.Profile{Name: "p", Suites: []string{"aes128gcm16"}, Identities: []ipsec.IdentityRule{{Initiator: "iqn.2026-11.io.example:host", ID: "host.example"}}}
			v := ipsec.Judge(ipsec.Question{Flow: flow, Initiator: "iqn.2026-11.io.example:host", Demand: ipsec.Required, Profile: profile}, p)
			c := schema.IPsecConnection{TSIH: 7, Initiator: "iqn.2026-11.io.example:host", Remote: flow.Remote.String(),
				ConnectionProtection: schema.ConnectionProtection{Demand: "required", Verdict: string(v.Action), Reason: v.Reason, Class: string(v.Class)}}
			for direction, list := range map[string][]ipsec.SA{"in": p.In, "out": p.Out} {
				for _, sa := range list {
					s := schema.IPsecSA{Direction: direction, SPI: "0x0000" + map[uint32]string{0x1001: "1001", 0x1002: "1002", 0x2001: "2001"}[sa.SPI],
						Source: sa.Source.String(), Destination: sa.Destination.String(), Lifetime: sa.Lifetime.Seconds()}
					if sa.Lifetime > 0 {
						s.Expires = sa.Added.Add(sa.Lifetime)
					}
					c.SAs = append(c.SAs, s)
				}
			}
			if got := printed(ipsecFindings(&schema.IPsecState{Driver: tc.driver, Connections: []schema.IPsecConnection{c}}, now)); got != tc.want {
				t.Errorf("got\n%s\nwant\n%s", got, tc.want)
			}
		})
	}
}

type errorText string

func (e errorText) Error() string { return string(e) }

// printed returns findings as doctor prints them.
func printed(list []Finding) string {
	return strings.TrimSpace(tableText(func(t *table) { printFindings(t, list) }))
}

// What the driver itself lacks, and how it fails, are problems. Nothing is said while nothing requires IPsec.
func TestDoctorSaysWhatTheDriverLacks(t *testing.T) {
	if list := ipsecFindings(&schema.IPsecState{Driver: "none"}, time.Now()); list != nil {
		t.Errorf("without a driver: %+v", list)
	}
	got := printed(ipsecFindings(&schema.IPsecState{Driver: "xfrm", Missing: []string{"the kernel lacks CONFIG_INET_ESP. Run: modprobe esp4"},
		Failure: "the driver has not answered in time: the limit is 5s. Look for what the kernel waits for: ip xfrm state; dmesg"}, time.Now()))
	const want = `problem  ipsec  the driver xfrm cannot enforce it: the kernel lacks CONFIG_INET_ESP. Run: modprobe esp4
                  see iser-target ipsec status
problem  ipsec  the driver fails: the driver has not answered in time: the limit is 5s. Look for what the kernel waits for: ip xfrm state; dmesg
                  see iser-target ipsec status`
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

// The list of sessions has verdict, suite, SPIs and identity of each connection, in a table that fits in 120 columns. Without IPsec it has no such table.
func TestSessionListShowsIPsec(t *testing.T) {
	list := []schema.SessionState{
		{TSIH: 1, Initiator: "iqn.2026-11.io.example:guest", Target: "iqn.2026-11.io.example:store", Transport: "iser", Connections: []schema.ConnectionState{
			{CID: 0, Remote: "192.0.2.1:52779", IPsec: &schema.ConnectionProtection{Demand: "required", Verdict: "permit", Suite: "esp-transport chacha20poly1305 esn",
				SPIIn: "0xc208e7cf", SPIOut: "0xcaaa80bd", Identity: "initiator.example.com"}},
			{CID: 1, Remote: "192.0.2.1:52780", IPsec: &schema.ConnectionProtection{Demand: "required", Verdict: "mark", SPIOut: "0xcaaa80be", Reason: "the keys are missing"}},
		}},
		{TSIH: 2, Initiator: "iqn.2026-11.io.example:other", Target: "iqn.2026-11.io.example:store", Transport: "tcp", Tasks: 3,
			Connections: []schema.ConnectionState{{Remote: "198.51.100.1:40000"}}},
	}
	text := func(list []schema.SessionState) string {
		return tableText(func(t *table) {
			t.head("TSIH ...")
			for i := range list {
				t.row(sessionRow(&list[i])[:8]...)
			}
			protectionTable(t, list)
		})
	}
	sessions, guarded, found := strings.Cut(text(list), "\n\n")
	const want = `TSIH  CID  IPSEC   SUITE                               SPI-IN      SPI-OUT     IDENTITY
1     0    permit  esp-transport chacha20poly1305 esn  0xc208e7cf  0xcaaa80bd  initiator.example.com
1     1    mark    -                                   -           0xcaaa80be  -
`
	if !found || guarded != want {
		t.Errorf("got\n%s\nwant\n%s", guarded, want)
	}
	for line := range strings.Lines(guarded) {
		if n := len(strings.TrimSpace(line)); n > 120 {
			t.Errorf("a row has %d columns", n)
		}
	}
	if strings.Count(sessions, "\n") != 2 || !strings.Contains(sessions, "198.51.100.1:40000") || strings.Contains(sessions, "IPSEC") {
		t.Errorf("sessions\n%s", sessions)
	}
	if plain := text(list[1:]); strings.Contains(plain, "IPSEC") || strings.Contains(plain, "\n\n") {
		t.Errorf("without IPsec:\n%s", plain)
	}
}

// doctor warns of SAs without extended sequence numbers where nobody knows whether the interface is fast enough to require them, and ipsec status says
// whether they are required and why.
func TestReportsOfSequenceNumbers(t *testing.T) {
	for _, tc := range []struct {
		profile ipsec.Profile
		link    ipsec.Link
		suite   string
		unsure  bool
		says    string
	}{
		{ipsec.Profile{ESNAuto: true}, ipsec.Link{Name: "ens3"}, "esp-tunnel aes128gcm16", true, "not required (esn: auto, and interface ens3 does not say its speed)"},
		{ipsec.Profile{ESNAuto: true}, ipsec.Link{Name: "ens3"}, "esp-tunnel aes128gcm16 esn", true, "not required (esn: auto, and interface ens3 does not say its speed)"},
		{ipsec.Profile{ESNAuto: true}, ipsec.Link{Name: "eth0", Mbits: 100}, "esp-tunnel aes128gcm16", false, "not required (esn: auto, and interface eth0 has 100 Mbit/s, less than 1 Gbit/s)"},
		{ipsec.Profile{ESNAuto: true}, ipsec.Link{Name: "eth0", Mbits: 25000}, "esp-tunnel aes128gcm16 esn", false, "required (esn: auto, and interface eth0 has 25 Gbit/s)"},
		{ipsec.Profile{}, ipsec.Link{Name: "eth0"}, "esp-tunnel aes128gcm16", false, "not required (esn: false)"},
		{ipsec.Profile{ESN: true}, ipsec.Link{}, "esp-tunnel aes128gcm16 esn", false, "required (esn: true)"},
	} {
		required, why := tc.profile.NeedsESN(tc.link)
		text := map[bool]string{true: "required (", false: "not required ("}[required] + why + ")"
		if text != tc.says || tc.profile.UnsureESN(tc.link) != tc.unsure {
			t.Errorf("%s, unsure %v, want %s", text, tc.profile.UnsureESN(tc.link), tc.says)
		}
		st := schema.IPsecState{Driver: "xfrm", Connections: []schema.IPsecConnection{{TSIH: 7, Initiator: "iqn.2026-11.io.example:host", ESN: text, ESNUnsure: tc.unsure,
			ConnectionProtection: schema.ConnectionProtection{Demand: "required", Verdict: "permit"}, SAs: []schema.IPsecSA{{Direction: "in", Suite: tc.suite}}}}}
		want := "ok  ipsec  driver xfrm, 1 connection protected"
		if tc.unsure && !strings.HasSuffix(tc.suite, " esn") {
			want = "warning  ipsec  session 7 of iqn.2026-11.io.example:host has SAs without extended sequence numbers, which are " + tc.says + `
                  set esn of the profile: true to require them, false if the link has less than 1 Gbit/s`
		}
		if got := printed(ipsecFindings(&st, time.Now())); got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
		status := tableText(func(t *table) { ipsecTable(t, st) })
		if !strings.Contains(status, "extended sequence numbers: "+tc.says+"\n") {
			t.Errorf("status\n%s", status)
		}
	}
}
