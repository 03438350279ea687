package xfrm

import (
	"net/netip"
	"slices"

	"github.com/iser-target/iser-target/security/ipsec"
	"golang.org/x/sys/unix"
)

// Directions of policies. Those of sockets have larger numbers.
const (
	dirIn  = 0
	dirOut = 1
)

// A snapshot is what the kernel had at one moment.
type snapshot struct {
	policies []policy
	states   []state // the newest first
}

// look returns what protects f.
func (s *snapshot) look(f ipsec.Flow) ipsec.Protection {
	local := netip.AddrPortFrom(f.Local.Addr().Unmap(), f.Local.Port())
	remote := netip.AddrPortFrom(f.Remote.Addr().Unmap(), f.Remote.Port())
	var p ipsec.Protection
	p.In, p.InPolicy = s.direction(dirIn, remote, local)
	p.Out, p.OutPolicy = s.direction(dirOut, local, remote)
	return p
}

// direction returns the SAs that packets from source to dst may use, and whether a policy demands ESP for them.
func (s *snapshot) direction(dir uint8, source, dst netip.AddrPort) ([]ipsec.SA, bool) {
	p := s.policy(dir, source, dst)
	var demanded *template
	if p != nil && p.action == 0 {
		i := slices.IndexFunc(p.templates, func(t template) bool { return t.proto == unix.IPPROTO_ESP && !t.optional })
		if i >= 0 {
			demanded = &p.templates[i]
		}
	}
	var list []ipsec.SA
	for _, x := range s.states {
		if !x.usable() || x.mark || !x.selector.matches(source, dst) {
			continue
		}
		if demanded != nil && x.satisfies(*demanded, dir, source.Addr(), dst.Addr()) ||
			demanded == nil && x.ifID == 0 && x.Source == source.Addr() && x.Destination == dst.Addr() {
			list = append(list, x.SA)
		}
	}
	return list, demanded != nil
}

// policy returns the policy that the kernel takes for packets from source to dst, or nil. Policies for packets with a mark or of an interface
// of IPsec do not count, because nobody knows here whether the packets are such.
func (s *snapshot) policy(dir uint8, source, dst netip.AddrPort) *policy {
	var best *policy
	for i := range s.policies {
		p := &s.policies[i]
		if p.dir != dir || p.sub || p.mark || p.ifID != 0 || !p.selector.matches(source, dst) {
			continue
		}
		// Of two with the same priority the kernel takes the older one, which comes later in its list.
		if best == nil || p.priority <= best.priority {
			best = p
		}
	}
	return best
}

// satisfies reports whether the kernel uses the SA for a template.
func (x state) satisfies(t template, dir uint8, source, dst netip.Addr) bool {
	if x.ifID != 0 || x.Mode != t.mode || t.spi != 0 && x.SPI != t.spi {
		return false
	}
	// An incoming packet fits a template without a request id with each SA, and an outgoing one only with those without.
	if x.ReqID != int(t.reqID) && (dir == dirOut || t.reqID != 0) {
		return false
	}
	if t.mode != ipsec.Transport {
		if t.source.IsValid() && !t.source.IsUnspecified() {
			source = t.source
		} else {
			source = x.Source
		}
		if dst = t.dst; dir == dirIn && (!dst.IsValid() || dst.IsUnspecified()) {
			dst = x.Destination
		}
	}
	return x.Source == source && x.Destination == dst
}
