package cli

import (
	"net/netip"
	"strings"
	"testing"
	"text/tabwriter"
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
	var b strings.Builder
	t := &table{tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)}
	printFindings(t, list)
	t.w.Flush()
	return strings.TrimSpace(b.String())
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
