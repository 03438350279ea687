package xfrm

import (
	"net/netip"
	"testing"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"golang.org/x/sys/unix"
)

var (
	local  = netip.MustParseAddrPort("192.0.2.1:3260")
	remote = netip.MustParseAddrPort("192.0.2.2:40000")
	flow   = ipsec.Flow{Local: local, Remote: remote}
)

// between returns the selector of TCP from source to dst, all ports.
func between(source, dst netip.Addr) selector {
	return selector{family: unix.AF_INET, source: netip.PrefixFrom(source, 32), dst: netip.PrefixFrom(dst, 32), proto: unix.IPPROTO_TCP}
}

func sa(spi uint32, source, dst netip.Addr, m ipsec.Mode, reqID int) state {
	return state{proto: unix.IPPROTO_ESP, SA: ipsec.SA{
		SPI: spi, Source: source, Destination: dst, Mode: m, ReqID: reqID, AEAD: ipsec.Algorithm{Name: "rfc4106(gcm(aes))", KeyBits: 128, ICVBits: 128},
		ReplayWindow: 32, Lifetime: time.Hour, IKE: true,
	}}
}

// protected returns the policies and SAs of a flow between hosts in the mode.
func protected(m ipsec.Mode) *snapshot {
	l, r := local.Addr(), remote.Addr()
	t := template{proto: unix.IPPROTO_ESP, mode: m, reqID: 7}
	in, out := t, t
	if m == ipsec.Tunnel {
		in.source, in.dst, out.source, out.dst = r, l, l, r
	}
	return &snapshot{
		policies: []policy{
			{dir: dirIn, priority: 100, selector: between(r, l), templates: []template{in}},
			{dir: dirOut, priority: 100, selector: between(l, r), templates: []template{out}},
		},
		states: []state{sa(1, r, l, m, 7), sa(2, l, r, m, 7)},
	}
}

func TestLook(t *testing.T) {
	l, r := local.Addr(), remote.Addr()
	other := netip.MustParseAddr("203.0.113.1")
	for _, tc := range []struct {
		name            string
		mode            ipsec.Mode
		change          func(*snapshot)
		in, out         int // SAs
		inPolicy, outOK bool
	}{
		{"tunnel", ipsec.Tunnel, nil, 1, 1, true, true},
		{"transport", ipsec.Transport, nil, 1, 1, true, true},
		{"SEC-3723.5.7-1 nothing", ipsec.Tunnel, func(s *snapshot) { *s = snapshot{} }, 0, 0, false, false},
		{"keys without policies", ipsec.Transport, func(s *snapshot) { s.policies = nil }, 1, 1, false, false},
		{"policies without keys", ipsec.Tunnel, func(s *snapshot) { s.states = nil }, 0, 0, true, true},
		{"a policy for another port", ipsec.Tunnel, func(s *snapshot) { s.policies[0].selector.dport, s.policies[0].selector.dmask = 3261, 0xffff }, 1, 1, false, true},
		{"a policy for a range of ports", ipsec.Tunnel, func(s *snapshot) { s.policies[0].selector.dport, s.policies[0].selector.dmask = 3256, 0xfff8 }, 1, 1, true, true},
		{"a policy that lets clear text pass too", ipsec.Tunnel, func(s *snapshot) { s.policies[0].templates[0].optional = true }, 1, 1, false, true},
		{"a policy that asks for AH", ipsec.Tunnel, func(s *snapshot) { s.policies[1].templates[0].proto = unix.IPPROTO_AH }, 1, 1, true, false},
		{"a policy that blocks", ipsec.Tunnel, func(s *snapshot) { s.policies[1].action = 1 }, 1, 1, true, false},
		{"a policy for packets with a mark", ipsec.Tunnel, func(s *snapshot) { s.policies[1].mark = true }, 1, 1, true, false},
		{"a policy of an interface", ipsec.Tunnel, func(s *snapshot) { s.policies[1].ifID = 4 }, 1, 1, true, false},
		{"a policy of a socket", ipsec.Tunnel, func(s *snapshot) { s.policies[0].dir = 3 }, 1, 1, false, true},
		{"a stronger policy that bypasses IPsec", ipsec.Tunnel, func(s *snapshot) {
			s.policies = append(s.policies, policy{dir: dirOut, priority: 10, selector: selector{family: unix.AF_INET, source: netip.MustParsePrefix("0.0.0.0/0"), dst: netip.MustParsePrefix("0.0.0.0/0")}})
		}, 1, 1, true, false},
		{"a weaker policy that bypasses IPsec", ipsec.Tunnel, func(s *snapshot) {
			s.policies = append(s.policies, policy{dir: dirOut, priority: 1000, selector: between(l, r)})
		}, 1, 1, true, true},
		{"of two with the same priority the older counts", ipsec.Tunnel, func(s *snapshot) {
			s.policies = append([]policy{{dir: dirOut, priority: 100, selector: between(l, r)}}, s.policies...)
		}, 1, 1, true, true},
		{"another request id outside", ipsec.Tunnel, func(s *snapshot) { s.states[1].ReqID = 8 }, 1, 0, true, true},
		{"a template without request id takes incoming packets of each", ipsec.Tunnel, func(s *snapshot) { s.policies[0].templates[0].reqID = 0 }, 1, 1, true, true},
		{"but sends only with SAs that have none", ipsec.Tunnel, func(s *snapshot) { s.policies[1].templates[0].reqID = 0 }, 1, 0, true, true},
		{"SAs in the other mode", ipsec.Tunnel, func(s *snapshot) { s.states[0].Mode = ipsec.Transport }, 0, 1, true, true},
		{"SAs of another peer", ipsec.Tunnel, func(s *snapshot) { s.states[0].Source = other }, 0, 1, true, true},
		{"SAs for packets with a mark", ipsec.Tunnel, func(s *snapshot) { s.states[0].mark = true }, 0, 1, true, true},
		{"SAs for other packets", ipsec.Transport, func(s *snapshot) { s.states[0].selector = between(other, l) }, 0, 1, true, true},
		{"an SPI without keys", ipsec.Tunnel, func(s *snapshot) { s.states[0].AEAD = ipsec.Algorithm{} }, 0, 1, true, true},
		{"a tunnel between gateways", ipsec.Tunnel, func(s *snapshot) {
			gate := netip.MustParseAddr("198.51.100.1")
			s.policies[0].templates[0].source, s.policies[1].templates[0].dst = gate, gate
			s.states[0].Source, s.states[1].Destination = gate, gate
		}, 1, 1, true, true},
		{"old and new keys", ipsec.Tunnel, func(s *snapshot) { s.states = append(s.states, sa(3, r, l, ipsec.Tunnel, 7)) }, 2, 1, true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := protected(tc.mode)
			if tc.change != nil {
				tc.change(s)
			}
			p := s.look(flow)
			if len(p.In) != tc.in || len(p.Out) != tc.out || p.InPolicy != tc.inPolicy || p.OutPolicy != tc.outOK {
				t.Errorf("%d and %d SAs, policies %v and %v; want %d, %d, %v, %v", len(p.In), len(p.Out), p.InPolicy, p.OutPolicy, tc.in, tc.out, tc.inPolicy, tc.outOK)
			}
			if tc.in > 0 && p.In[0].SPI != 1 {
				t.Errorf("the newest incoming SA is 0x%x", p.In[0].SPI)
			}
		})
	}
}

// Addresses of a socket for both families are IPv4 in IPv6.
func TestLookMapped(t *testing.T) {
	f := ipsec.Flow{
		Local:  netip.AddrPortFrom(netip.AddrFrom16(local.Addr().As16()), local.Port()),
		Remote: netip.AddrPortFrom(netip.AddrFrom16(remote.Addr().As16()), remote.Port()),
	}
	if p := protected(ipsec.Tunnel).look(f); len(p.In) != 1 || !p.InPolicy {
		t.Errorf("%+v", p)
	}
}

// One SA may carry several connections (SEC-3723.3.2-1).
func TestLookShares(t *testing.T) {
	s := protected(ipsec.Tunnel)
	for port := uint16(40000); port < 40003; port++ {
		f := ipsec.Flow{Local: local, Remote: netip.AddrPortFrom(remote.Addr(), port)}
		if p := s.look(f); len(p.In) != 1 || p.In[0].SPI != 1 || len(p.Out) != 1 || p.Out[0].SPI != 2 {
			t.Errorf("port %d: %+v", port, p)
		}
	}
}
