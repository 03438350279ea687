package xfrm

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A listener with a policy takes what comes in ESP, and a pinned connection sends in ESP. When the SAs are gone, both directions wait and nothing
// passes in clear text.
func TestSocketPolicyWithESP(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	for _, err := range Check() {
		t.Skipf("the kernel cannot have keys: %v", err)
	}
	// The inner packets of a tunnel enter lo like those of another host. By default the kernel drops such with addresses of its own.
	for _, name := range []string{"all/route_localnet", "all/accept_local", "lo/route_localnet", "lo/accept_local"} {
		if err := os.WriteFile("/proc/sys/net/ipv4/conf/"+name, []byte("1"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	host := netip.MustParseAddr("127.0.0.1")
	for _, m := range []ipsec.Mode{ipsec.Transport, ipsec.Tunnel} {
		t.Run(string(m), func(t *testing.T) {
			if err := netlink.XfrmStateFlush(netlink.XFRM_PROTO_ESP); err != nil && !errors.Is(err, unix.ESRCH) {
				t.Fatal(err)
			}
			mode := netlink.XFRM_MODE_TRANSPORT
			if m == ipsec.Tunnel {
				mode = netlink.XFRM_MODE_TUNNEL
			}
			// On lo one SA serves both directions.
			if err := netlink.XfrmStateAdd(&netlink.XfrmState{
				Src: host.AsSlice(), Dst: host.AsSlice(), Proto: netlink.XFRM_PROTO_ESP, Mode: mode, Spi: 0x1001, Reqid: 7, ESN: true, ReplayWindow: 128,
				Aead: &netlink.XfrmStateAlgo{Name: "rfc4106(gcm(aes))", Key: make([]byte, 20), ICVLen: 128},
			}); err != nil {
				t.Fatal(err)
			}
			list, err := List()
			if err != nil || len(list) != 1 {
				t.Fatalf("%+v, %v", list, err)
			}
			l := controlled(t, "tcp4", "127.0.0.1:0", func(fd, family int) error { return SocketPolicy(fd, family, m) })
			d := net.Dialer{Timeout: 20 * time.Second, Control: func(_, _ string, c syscall.RawConn) error {
				var err error
				return errors.Join(c.Control(func(fd uintptr) { err = PinPolicy(int(fd), unix.AF_INET, list[0]) }), err)
			}}
			client, err := d.DialContext(t.Context(), "tcp4", l.Addr().String())
			if err != nil {
				stat, _ := os.ReadFile("/proc/self/net/xfrm_stat")
				t.Fatalf("a connection in ESP: %v\n%s", err, stat)
			}
			defer client.Close()
			server, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			control(t, server, func(fd int) error { return PinPolicy(fd, unix.AF_INET, list[0]) })
			for _, pair := range [][2]net.Conn{{client, server}, {server, client}} {
				if _, err := pair[0].Write([]byte("in ESP")); err != nil {
					t.Fatal(err)
				}
				b := make([]byte, 6)
				if err := pair[1].SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
					t.Fatal(err)
				}
				if _, err := io.ReadFull(pair[1], b); err != nil || string(b) != "in ESP" {
					t.Fatalf("%q, %v", b, err)
				}
			}
			states, err := netlink.XfrmStateList(netlink.FAMILY_V4)
			if err != nil || len(states) != 1 || states[0].Statistics.Packets < 4 {
				t.Errorf("SEC-3723.2.3.1-1: the SA has taken %+v, %v", states, err)
			}
			if err := netlink.XfrmStateFlush(netlink.XFRM_PROTO_ESP); err != nil {
				t.Fatal(err)
			}
			for _, pair := range [][2]net.Conn{{client, server}, {server, client}} {
				if _, err := pair[0].Write([]byte("without keys")); err != nil && !errors.Is(err, unix.EAGAIN) {
					t.Logf("write: %v", err)
				}
				mustBeQuiet(t, pair[1])
			}
		})
	}
}
