package static

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/security/ipsec/xfrm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// priority is that of all policies of the driver. Smaller numbers are stronger.
const priority = 1000

// An installed is an SA with its keys, as the kernel has it. Its ReqID is that of the kernel.
type installed struct {
	ipsec.SA
	keys keys
}

// same reports whether both are the same SA with the same keys.
func (a installed) same(b installed) bool {
	return a.SPI == b.SPI && a.Source == b.Source && a.Destination == b.Destination && a.ReqID == b.ReqID && a.Mode == b.Mode &&
		a.String() == b.String() && a.ReplayWindow == b.ReplayWindow && a.keys.equal(b.keys)
}

// A kernel is where SAs and policies are installed. The lists have what others installed, too.
type kernel interface {
	states() ([]installed, error)
	addState(installed) error
	removeState(installed) error
	policies() ([]demand, error)
	addPolicy(demand) error
	removePolicy(demand) error
}

// A demand is a policy with one template of ESP, as the kernel has it. Two that are equal are the same.
type demand xfrm.Demand

// demandOf returns what a Policy stands for.
func demandOf(p Policy) demand {
	d := demand{Out: p.Direction == Out, Source: p.Source.Masked(), Destination: p.Destination.Masked(), Mode: p.Mode, ReqID: ReqIDBase + p.ReqID}
	if p.Port != 0 {
		d.TCP = true
		if d.Out {
			d.SourcePort = p.Port
		} else {
			d.DestinationPort = p.Port
		}
	}
	if p.Mode == ipsec.Tunnel {
		d.TunnelSource, d.TunnelDestination = p.ends()
	}
	return d
}

// String returns the policy as ip xfrm policy takes it.
func (d demand) String() string {
	s := fmt.Sprintf("src %v dst %v", d.Source, d.Destination)
	if d.TCP {
		s += " proto tcp"
	}
	if d.SourcePort != 0 {
		s += fmt.Sprintf(" sport %d", d.SourcePort)
	}
	if d.DestinationPort != 0 {
		s += fmt.Sprintf(" dport %d", d.DestinationPort)
	}
	if d.Out {
		return s + " dir out"
	}
	return s + " dir in"
}

// linux is the kernel of this machine.
type linux struct{}

func (linux) states() ([]installed, error) {
	list, err := xfrm.List()
	if err != nil {
		return nil, err
	}
	withKeys, err := netlink.XfrmStateList(netlink.FAMILY_ALL)
	if err != nil {
		return nil, xfrm.Explain("read SAs", err)
	}
	var all []installed
	for _, sa := range list {
		i := slices.IndexFunc(withKeys, func(x netlink.XfrmState) bool {
			return uint32(x.Spi) == sa.SPI && addr(x.Dst, sa.Destination.Is4()) == sa.Destination && x.Proto == netlink.XFRM_PROTO_ESP
		})
		one := installed{SA: sa}
		if i >= 0 {
			if a := withKeys[i].Crypt; a != nil {
				one.keys.encryption = slices.Clone(a.Key)
			}
			if a := withKeys[i].Auth; a != nil {
				one.keys.integrity = slices.Clone(a.Key)
			}
		}
		all = append(all, one)
	}
	for _, x := range withKeys {
		for _, a := range []*netlink.XfrmStateAlgo{x.Crypt, x.Auth, x.Aead} {
			if a != nil {
				clear(a.Key)
			}
		}
	}
	return all, nil
}

func addr(ip net.IP, v4 bool) netip.Addr {
	a, _ := netip.AddrFromSlice(ip)
	if v4 {
		a = a.Unmap()
	}
	return a
}

func (linux) addState(s installed) error {
	return netlink.XfrmStateAdd(stateOf(s))
}

func stateOf(s installed) *netlink.XfrmState {
	return &netlink.XfrmState{
		Src: s.Source.AsSlice(), Dst: s.Destination.AsSlice(), Proto: netlink.XFRM_PROTO_ESP, Mode: modeOf(s.Mode), Spi: int(s.SPI), Reqid: s.ReqID,
		ESN: s.ESN, ReplayWindow: s.ReplayWindow,
		Crypt: &netlink.XfrmStateAlgo{Name: s.Encryption.Name, Key: s.keys.encryption},
		Auth:  &netlink.XfrmStateAlgo{Name: s.Authentication.Name, Key: s.keys.integrity, TruncateLen: s.Authentication.ICVBits},
	}
}

func modeOf(m ipsec.Mode) netlink.Mode {
	if m == ipsec.Tunnel {
		return netlink.XFRM_MODE_TUNNEL
	}
	return netlink.XFRM_MODE_TRANSPORT
}

func (linux) removeState(s installed) error {
	err := netlink.XfrmStateDel(&netlink.XfrmState{Src: s.Source.AsSlice(), Dst: s.Destination.AsSlice(), Proto: netlink.XFRM_PROTO_ESP, Spi: int(s.SPI)})
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	return err
}

func (linux) policies() ([]demand, error) {
	list, err := xfrm.Demands()
	all := make([]demand, len(list))
	for i, d := range list {
		all[i] = demand(d)
	}
	return all, err
}

func (d demand) policy() *netlink.XfrmPolicy {
	network := func(p netip.Prefix) *net.IPNet {
		return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
	}
	x := &netlink.XfrmPolicy{Src: network(d.Source), Dst: network(d.Destination), SrcPort: d.SourcePort, DstPort: d.DestinationPort, Priority: priority}
	if d.TCP {
		x.Proto = unix.IPPROTO_TCP
	}
	if d.Out {
		x.Dir = netlink.XFRM_DIR_OUT
	}
	t := netlink.XfrmPolicyTmpl{Proto: netlink.XFRM_PROTO_ESP, Mode: modeOf(d.Mode), Reqid: d.ReqID}
	source, destination := d.TunnelSource, d.TunnelDestination
	if d.Mode == ipsec.Transport {
		// The kernel takes the addresses of the packets; those here give the family.
		source, destination = unspecified(d.Source), unspecified(d.Destination)
	}
	t.Src, t.Dst = source.AsSlice(), destination.AsSlice()
	x.Tmpls = []netlink.XfrmPolicyTmpl{t}
	return x
}

func unspecified(p netip.Prefix) netip.Addr {
	if p.Addr().Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

func (linux) addPolicy(d demand) error { return netlink.XfrmPolicyAdd(d.policy()) }

func (linux) removePolicy(d demand) error {
	err := netlink.XfrmPolicyDel(d.policy())
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}
