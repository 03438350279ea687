package xfrm

import (
	"net/netip"
	"testing"
	"unsafe"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/vishvananda/netlink"
)

// The number that the driver of a virtual interface says does not count, and an address that no interface has belongs to none.
func TestLinksOfTheKernel(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	lo := wire(t)
	var l links
	for address, want := range map[string]ipsec.Link{"192.0.2.2": {Name: "lo"}, "2001:db8::2": {Name: "lo"}, "192.0.2.9": {}, "::1": {Name: "lo"}} {
		if got := l.of(netip.MustParseAddr(address)); got != want {
			t.Errorf("%s: %+v, want %+v", address, got, want)
		}
	}
	if n := speedOf(lo.Attrs().Name); n != 0 {
		t.Errorf("lo has %d Mbit/s", n)
	}
	if n := speedOf("none"); n != 0 {
		t.Errorf("an interface that does not exist has %d Mbit/s", n)
	}
	p, err := New().Look(t.Context(), ipsec.Flow{Local: netip.MustParseAddrPort("[::ffff:192.0.2.2]:3260"), Remote: netip.MustParseAddrPort("192.0.2.1:40000")})
	if err != nil || p.Link.Name != "lo" {
		t.Errorf("%+v, %v", p.Link, err)
	}
}

// Drivers say an unknown speed as -1, in 16 or in 32 bits.
func TestSpeedOfEthtool(t *testing.T) {
	if n := unsafe.Sizeof(ethtoolCmd{}); n != 44 {
		t.Errorf("struct ethtool_cmd has %d bytes", n)
	}
	if n, high := unsafe.Offsetof(ethtoolCmd{}.speed), unsafe.Offsetof(ethtoolCmd{}.speedHigh); n != 12 || high != 28 {
		t.Errorf("offsets %d and %d", n, high)
	}
	for _, tc := range []struct {
		speed, high uint16
		want        int
	}{{1000, 0, 1000}, {34464, 1, 100000}, {0xffff, 0xffff, 0}, {0xffff, 0, 0}, {0, 0, 0}} {
		if got := (&ethtoolCmd{speed: tc.speed, speedHigh: tc.high}).mbits(); got != tc.want {
			t.Errorf("%+v: %d Mbit/s", tc, got)
		}
	}
}

// A virtual interface has the speed of the fastest one below it, except veth. Interfaces that form a circle end in a bounded number of steps.
func TestSpeedOfInterfacesAboveEachOther(t *testing.T) {
	at := func(name string, index, parent, master int) netlink.LinkAttrs {
		return netlink.LinkAttrs{Name: name, Index: index, ParentIndex: parent, MasterIndex: master}
	}
	all := []netlink.Link{
		&netlink.Device{LinkAttrs: at("slow", 1, 0, 3)}, &netlink.Device{LinkAttrs: at("fast", 2, 0, 3)}, &netlink.Bond{LinkAttrs: at("bond", 3, 0, 5)},
		&netlink.Vlan{LinkAttrs: at("vlan", 4, 3, 0)}, &netlink.Bridge{LinkAttrs: at("bridge", 5, 0, 0)}, &netlink.Veth{LinkAttrs: at("veth", 6, 2, 0)},
		&netlink.Vlan{LinkAttrs: at("circle", 7, 8, 0)}, &netlink.Vlan{LinkAttrs: at("round", 8, 7, 0)}, &netlink.Dummy{LinkAttrs: at("dummy", 9, 0, 0)},
	}
	want := map[string]int{"slow": 100, "fast": 10000, "bond": 10000, "vlan": 10000, "bridge": 10000}
	for _, link := range all {
		name := link.Attrs().Name
		if n := speed(link, all, linkDepth, func(name string) int { return map[string]int{"slow": 100, "fast": 10000, "veth": 10000}[name] }); n != want[name] {
			t.Errorf("%s: %d Mbit/s", name, n)
		}
	}
}
