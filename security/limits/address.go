package limits

import (
	"net"
	"net/netip"
)

// AddressKey returns the key of the host that a has: its IPv4 address, or the /64 of its IPv6
// address, because a host chooses the rest itself. An address with a method AddressKey has that key, and
// one of another kind is its own.
func AddressKey(a net.Addr) string {
	if k, ok := a.(interface{ AddressKey() string }); ok {
		return k.AddressKey()
	}
	return TextKey(a.String())
}

// TextKey returns the AddressKey of an address in text.
func TextKey(a string) string {
	ap, err := netip.ParseAddrPort(a)
	if err != nil {
		return a
	}
	ip := ap.Addr().Unmap().WithZone("")
	if ip.Is4() {
		return ip.String()
	}
	p, _ := ip.Prefix(64) // cannot fail: every IPv6 address has 64 bits
	return p.String()
}
