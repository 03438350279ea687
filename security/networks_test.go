package security

import (
	"net"
	"net/netip"
	"strings"
	"testing"
)

// A network admits its addresses, in each form that a socket reports them, and no others.
func TestNetworks(t *testing.T) {
	n, err := ParseNetworks([]string{"10.0.0.0/24", "192.0.2.7", "2001:db8::/32", "fe80::1", "0.0.0.0/32"})
	if err != nil {
		t.Fatal(err)
	}
	for remote, want := range map[string]bool{
		"10.0.0.0:1": true, "10.0.0.255:65535": true, "10.0.1.0:1": false, "9.255.255.255:1": false,
		"[::ffff:10.0.0.9]:1": true, "[::ffff:10.0.1.9]:1": false, "192.0.2.7:1": true, "192.0.2.8:1": false,
		"[2001:db8:ffff::1]:1": true, "[2001:db9::1]:1": false, "[fe80::1%eth0]:1": true, "[fe80::2%eth0]:1": false,
		"[::]:1": false, "0.0.0.0:1": true,
	} {
		if got := n.Admit(AddressOf(net.TCPAddrFromAddrPort(netip.MustParseAddrPort(remote)))); got != want {
			t.Errorf("%s: %t, want %t", remote, got, want)
		}
	}
	if n.Admit(AddressOf(&net.UnixAddr{Name: "/s", Net: "unix"})) || n.Admit(AddressOf(nil)) {
		t.Error("a connection without an address is in a network")
	}
	if all := (Networks{}); !all.Admit(netip.MustParseAddr("192.0.2.1")) || !all.Admit(netip.Addr{}) {
		t.Error("without a network not all addresses are admitted")
	}
	if everyone, err := ParseNetworks([]string{"0.0.0.0/0"}); err != nil || everyone.Admit(netip.MustParseAddr("2001:db8::1")) || !everyone.Admit(netip.MustParseAddr("192.0.2.1")) {
		t.Errorf("0.0.0.0/0: %v, %v", everyone, err)
	}
	if got, want := n.String(), "10.0.0.0/24, 192.0.2.7/32, 2001:db8::/32, fe80::1/128, 0.0.0.0/32"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	for s, want := range map[string]string{
		"10.0.0.1/24": `"10.0.0.1/24" has an address beyond its length. The network is 10.0.0.0/24`, "10.0.0/24": "is not a network like", "": "is not a network like",
		"host.example": "is not a network like", "10.0.0.0/33": "is not a network like", "fe80::1%eth0": "is not a network like",
		"::ffff:10.0.0.0/120": "is an IPv4 network in the form of IPv6", "10.0.0.0/24 ": "is not a network like", "*": "is not a network like",
	} {
		if _, err := ParseNetworks([]string{"192.0.2.0/24", s}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", s, err, want)
		}
	}
}
