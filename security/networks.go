package security

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// Networks is a list of IP networks that connections may come from. The zero value admits all addresses. It is
// immutable and safe for concurrent use.
type Networks struct{ list []netip.Prefix }

// ParseNetworks parses networks like 10.0.0.0/24 and 2001:db8::/32. An address alone is a network of one address.
// The error names every wrong one.
func ParseNetworks(networks []string) (Networks, error) {
	var n Networks
	var errs []error
	for _, s := range networks {
		p, err := parseNetwork(s)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		n.list = append(n.list, p)
	}
	if len(errs) > 0 {
		return Networks{}, errors.Join(errs...)
	}
	return n, nil
}

func parseNetwork(s string) (netip.Prefix, error) {
	text := s
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		text = fmt.Sprintf("%s/%d", s, a.BitLen())
	}
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		return p, fmt.Errorf("%.80q is not a network like 10.0.0.0/24 or 2001:db8::/32", s)
	case p.Addr().Is4In6():
		return p, fmt.Errorf("%q is an IPv4 network in the form of IPv6. Write it as IPv4", s)
	case p != p.Masked():
		return p, fmt.Errorf("%q has an address beyond its length. The network is %v", s, p.Masked())
	}
	return p, nil
}

// Admit reports whether connections may come from a.
func (n Networks) Admit(a netip.Addr) bool {
	if len(n.list) == 0 {
		return true
	}
	a = a.Unmap().WithZone("")
	return slices.ContainsFunc(n.list, func(p netip.Prefix) bool { return p.Contains(a) })
}

// String joins the networks.
func (n Networks) String() string {
	texts := make([]string, len(n.list))
	for i, p := range n.list {
		texts[i] = p.String()
	}
	return strings.Join(texts, ", ")
}

// AddressOf returns the IP address of a, or an invalid one, which is in no network.
func AddressOf(a net.Addr) netip.Addr {
	if a == nil {
		return netip.Addr{}
	}
	ap, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Addr{}
	}
	return ap.Addr()
}
