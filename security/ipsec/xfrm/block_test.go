package xfrm

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// wire lets lo take addresses of networks, and policies. It returns lo.
func wire(t *testing.T) netlink.Link {
	t.Helper()
	link, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/conf/lo/disable_xfrm", []byte("0"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, a := range []string{"192.0.2.1/32", "192.0.2.2/32", "10.1.1.1/32", "2001:db8::1/128", "2001:db8::2/128"} {
		assign(t, link, a)
	}
	return link
}

func assign(t *testing.T, link netlink.Link, address string) {
	t.Helper()
	a, err := netlink.ParseAddr(address)
	if err != nil {
		t.Fatal(err)
	}
	a.Flags = unix.IFA_F_NODAD
	if err := netlink.AddrAdd(link, a); err != nil {
		t.Fatal(err)
	}
}

// leaves reports whether the kernel lets a SYN leave, from an address and port to a port that nobody has.
func leaves(t *testing.T, from, to string) (bool, error) {
	t.Helper()
	local := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from))
	// A policy that comes between the kernel's look at the policies and the SYN leaves the socket to repeat that SYN, for minutes.
	c, err := (&net.Dialer{LocalAddr: local, Timeout: time.Second}).DialContext(t.Context(), "tcp", to)
	if err == nil {
		c.Close()
		t.Fatalf("%s answers", to)
	}
	switch {
	case errors.Is(err, unix.EPERM):
		return false, nil
	case errors.Is(err, unix.ECONNREFUSED):
		return true, nil
	}
	return false, fmt.Errorf("from %s: %w", from, err)
}

// SEC-3723.5.7-2: no packet of a portal leaves in clear text that no other policy takes, also after policies were removed. Packets of another port and of another address
// of the machine leave, and each other policy wins. A portal on all addresses has policies for addresses that come later.
func TestBlocksInTheKernel(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	link := wire(t)
	assign(t, link, "192.0.2.3/32")
	b := NewBlocks(func(err error) { t.Errorf("failed: %v", err) })
	portals := func(list ...string) (out []netip.AddrPort) {
		for _, p := range list {
			out = append(out, netip.MustParseAddrPort(p))
		}
		return out
	}
	is := func(want bool, from, to string) {
		t.Helper()
		if got, err := leaves(t, from, to); err != nil || got != want {
			t.Errorf("a packet from %s to %s leaves: %v, %v", from, to, got, err)
		}
	}
	soon := func(want bool, from, to string) {
		t.Helper()
		testkit.Eventually(t, fmt.Sprintf("packets from %s to %s leave: %v", from, to, want), func() bool {
			got, err := leaves(t, from, to)
			return err == nil && got == want
		})
	}
	is(true, "192.0.2.2:3260", "192.0.2.1:40000")
	if err := b.Add(portals("192.0.2.2:3260", "[2001:db8::2]:3260")); err != nil {
		t.Fatal(err)
	}
	for from, to := range map[string]string{"192.0.2.2:3260": "192.0.2.1:40000", "[2001:db8::2]:3260": "[2001:db8::1]:40000"} {
		is(false, from, to)
	}
	is(true, "192.0.2.2:3261", "192.0.2.1:40000")
	is(true, "192.0.2.3:3260", "192.0.2.1:40000")
	is(false, "192.0.2.2:3260", "10.1.1.1:40000")

	s, err := dump()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range s.policies {
		if p.priority != math.MaxUint32 || p.dir != dirOut || p.action != 1 || len(p.templates) != 0 {
			t.Errorf("policy %+v", p)
		}
	}
	if len(s.policies) != 4 {
		t.Errorf("%d policies", len(s.policies))
	}

	// Another policy with the same addresses and port wins, and can be added and removed.
	allow := &netlink.XfrmPolicy{Src: &net.IPNet{IP: net.IPv4(192, 0, 2, 2).To4(), Mask: net.CIDRMask(32, 32)}, Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)},
		Proto: unix.IPPROTO_TCP, SrcPort: 3260, Dir: netlink.XFRM_DIR_OUT, Priority: math.MaxUint32 - 1}
	if err := netlink.XfrmPolicyAdd(allow); err != nil {
		t.Fatal(err)
	}
	is(true, "192.0.2.2:3260", "192.0.2.1:40000")
	if err := netlink.XfrmPolicyDel(allow); err != nil {
		t.Fatal(err)
	}
	is(false, "192.0.2.2:3260", "192.0.2.1:40000")

	// They come back.
	if err := netlink.XfrmPolicyFlush(); err != nil {
		t.Fatal(err)
	}
	soon(false, "192.0.2.2:3260", "192.0.2.1:40000")
	if err := netlink.XfrmPolicyDel(blockPolicies(portals("192.0.2.2:3260")[0])[1]); err != nil {
		t.Fatal(err)
	}
	soon(false, "192.0.2.2:3260", "192.0.2.1:40000")

	// A second process has the same ones, and the first one leaves them to it.
	next := NewBlocks(func(err error) { t.Errorf("failed: %v", err) })
	if err := next.Add(portals("192.0.2.2:3260")); err != nil {
		t.Fatal(err)
	}
	if err := b.Close(true); err != nil {
		t.Fatal(err)
	}
	is(false, "[2001:db8::2]:3260", "[2001:db8::1]:40000")
	if err := next.Clear(portals("[::]:3260")); err != nil { // as if the first one had been killed
		t.Fatal(err)
	}
	// That makes next install its own again.
	soon(true, "[2001:db8::2]:3260", "[2001:db8::1]:40000")
	is(false, "192.0.2.2:3260", "192.0.2.1:40000")

	if err := next.Keep(portals("0.0.0.0:3260")); err != nil {
		t.Fatal(err)
	}
	is(false, "192.0.2.3:3260", "192.0.2.1:40000")
	is(true, "192.0.2.3:3261", "192.0.2.1:40000")
	assign(t, link, "192.0.2.4/32")
	soon(false, "192.0.2.4:3260", "192.0.2.1:40000")
	if err := next.Keep(portals("192.0.2.4:3260")); err != nil {
		t.Fatal(err)
	}
	is(true, "192.0.2.2:3260", "192.0.2.1:40000")
	is(false, "192.0.2.4:3260", "192.0.2.1:40000")
	if err := next.Close(false); err != nil {
		t.Fatal(err)
	}
	is(true, "192.0.2.4:3260", "192.0.2.1:40000")
	if s, err = dump(); err != nil || slices.ContainsFunc(s.policies, func(p policy) bool {
		return p.selector.source.Addr() == netip.MustParseAddr("192.0.2.2") && p.selector.source.Addr().Is4()
	}) {
		t.Errorf("left: %+v, %v", s.policies, err)
	}
}

// A notice that may be about a policy of Blocks, or that nobody understands, makes them install all again. Those about policies of others do not.
func TestNoticesAboutBlocks(t *testing.T) {
	removed := func(priority uint32) []byte {
		return message(nl.XFRM_MSG_DELPOLICY, join(make([]byte, 64), attr(nl.XFRMA_POLICY, policyInfo(1, func(m *nl.XfrmUserpolicyInfo) { m.Priority = priority }))))
	}
	for _, tc := range []struct {
		name string
		b    []byte
		want bool
	}{
		{"a flush", message(nl.XFRM_MSG_FLUSHPOLICY, nil), true},
		{"the weakest one", removed(math.MaxUint32), true},
		{"another one", removed(375423), false},
		{"without the policy", message(nl.XFRM_MSG_DELPOLICY, make([]byte, 64)), true},
		{"cut short", message(nl.XFRM_MSG_DELPOLICY, make([]byte, 10)), true},
		{"a new policy", message(nl.XFRM_MSG_NEWPOLICY, policyInfo(1, nil)), false},
		{"no message", append(message(nl.XFRM_MSG_NEWPOLICY, nil), 3, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12), true},
	} {
		if got := removesBlock(tc.b); got != tc.want {
			t.Errorf("%s: %v", tc.name, got)
		}
	}
}

// A process that may have no sockets of netlink, as under the unit of the service, clears nothing and does not complain. One that has
// to block clear text learns why it can't.
func TestBlocksWithoutNetlink(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	wire(t)
	all := []netip.AddrPort{netip.MustParseAddrPort("0.0.0.0:3260"), netip.MustParseAddrPort("192.0.2.1:3261")}
	before := NewBlocks(nil)
	if err := before.Add(all); err != nil {
		t.Fatal(err)
	}
	if err := before.Close(true); err != nil {
		t.Fatal(err)
	}
	const arg = 16 // offset of the first argument in struct seccomp_data; amd64 and arm64 are little endian
	list := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_SOCKET, Jf: 3},
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: arg},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.AF_NETLINK, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EAFNOSUPPORT)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	runtime.LockOSThread() // for ever: the thread ends with the goroutine
	prog := unix.SockFprog{Len: uint16(len(list)), Filter: &list[0]}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0); err != nil {
		t.Fatal(err)
	}
	runtime.KeepAlive(list)
	for _, p := range all {
		if err := NewBlocks(nil).Clear([]netip.AddrPort{p}); err != nil {
			t.Errorf("Clear %v: %v", p, err)
		}
		if err := NewBlocks(nil).Add([]netip.AddrPort{p}); err == nil || !strings.Contains(err.Error(), "RestrictAddressFamilies") {
			t.Errorf("Add %v: %v", p, err)
		}
	}
}
