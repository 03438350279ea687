package xfrm

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// quiet is how long a test waits for what must not arrive. TCP repeats a SYN after 1 s.
const quiet = 1500 * time.Millisecond

// controlled listens with a call of control for the socket before it listens.
func controlled(t *testing.T, network, address string, control func(fd, family int) error) net.Listener {
	t.Helper()
	family := unix.AF_INET
	if network == "tcp6" {
		family = unix.AF_INET6
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = control(int(fd), family) }), err)
	}}
	l, err := lc.Listen(t.Context(), network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// counter returns a value of /proc/net/xfrm_stat.
func counter(t *testing.T, name string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/net/xfrm_stat")
	if err != nil {
		t.Skipf("the kernel counts nothing (CONFIG_XFRM_STATISTICS): %v", err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == name {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatalf("no counter %s", name)
	return 0
}

// A SYN in clear text gets no answer from a listener with a policy, not even a refusal, and another listener answers as before.
func TestSocketPolicyDropsClearText(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	for _, tc := range []struct {
		network, address string
		mode             ipsec.Mode
	}{{"tcp4", "127.0.0.1:0", ipsec.Tunnel}, {"tcp4", "127.0.0.1:0", ipsec.Transport}, {"tcp6", "[::1]:0", ipsec.Tunnel}, {"tcp6", "[::1]:0", ipsec.Transport}} {
		t.Run(tc.network+" "+string(tc.mode), func(t *testing.T) {
			guarded := controlled(t, tc.network, tc.address, func(fd, family int) error { return SocketPolicy(fd, family, tc.mode) })
			free := controlled(t, tc.network, tc.address, func(int, int) error { return nil })
			before := counter(t, "XfrmInTmplMismatch")
			began := time.Now()
			c, err := net.DialTimeout(tc.network, guarded.Addr().String(), quiet)
			var timeout net.Error
			if err == nil || !errors.As(err, &timeout) || !timeout.Timeout() || time.Since(began) < quiet {
				t.Errorf("SEC-3723.5.7-1: a connection in clear text: %v, %v after %v", c, err, time.Since(began))
			}
			if n := counter(t, "XfrmInTmplMismatch") - before; n < 1 {
				t.Errorf("the kernel counts %d dropped packets", n)
			}
			if c, err := net.DialTimeout(tc.network, free.Addr().String(), quiet); err != nil {
				t.Errorf("a listener without a policy: %v", err)
			} else {
				c.Close()
			}
		})
	}
}

// The policy belongs to the socket and not to the process. So a listener that goes from one process to the next drops clear text all the time, and the next
// process may set the policy again.
func TestSocketPolicyGoesWithTheSocket(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	set := func(fd, family int) error { return SocketPolicy(fd, family, ipsec.Tunnel) }
	l := controlled(t, "tcp4", "127.0.0.1:0", set)
	addr := l.Addr().String()
	dial := func() error {
		c, err := net.DialTimeout("tcp4", addr, quiet)
		if err == nil {
			c.Close()
		}
		return err
	}
	f, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	before := counter(t, "XfrmInTmplMismatch")
	if err := dial(); err == nil {
		t.Error("a connection in clear text while nobody accepts")
	}
	next, err := net.FileListener(f)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	if err := dial(); err == nil {
		t.Error("a connection in clear text to the next process")
	}
	raw, err := next.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = set(int(fd), unix.AF_INET) }); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
	if err := dial(); err == nil {
		t.Error("a connection in clear text after the policy was set again")
	}
	if n := counter(t, "XfrmInTmplMismatch") - before; n < 3 {
		t.Errorf("the kernel counts %d dropped packets", n)
	}
}

func TestSocketPolicyFaults(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	six, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(six)
	if err := SocketPolicy(six, unix.AF_INET6, ipsec.Tunnel); err == nil || !strings.Contains(err.Error(), "Set IPV6_V6ONLY") {
		t.Errorf("a socket for both families: %v", err)
	}
	if err := unix.SetsockoptInt(six, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
		t.Fatal(err)
	}
	if err := SocketPolicy(six, unix.AF_INET6, ipsec.Tunnel); err != nil {
		t.Errorf("a socket for IPv6: %v", err)
	}
	if err := SocketPolicy(six, unix.AF_INET6, "beet"); err == nil || !strings.Contains(err.Error(), `mode "beet" is not tunnel or transport`) {
		t.Errorf("another mode: %v", err)
	}
	if err := SocketPolicy(six, unix.AF_UNIX, ipsec.Tunnel); err == nil || !strings.Contains(err.Error(), "is not IPv4 or IPv6") {
		t.Errorf("another family: %v", err)
	}
	if err := SocketPolicy(-1, unix.AF_INET, ipsec.Tunnel); err == nil {
		t.Error("no socket, but no error")
	}
	if err := PinPolicy(six, unix.AF_INET6, ipsec.SA{Mode: ipsec.Tunnel}); err == nil || !strings.Contains(err.Error(), "no endpoints") {
		t.Errorf("a tunnel without endpoints: %v", err)
	}
}

// The kernel copies the policy of the listener to each accepted socket. To get a connection at all without ESP, this test makes the template
// optional.
func TestSocketPolicyIsInherited(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	l := controlled(t, "tcp4", "127.0.0.1:0", func(fd, family int) error {
		b, err := socketPolicy(family, dirIn, ipsec.SA{Mode: ipsec.Transport})
		if err != nil {
			return err
		}
		b[sizePolicy+50] = 1
		return unix.SetsockoptString(fd, unix.IPPROTO_IP, unix.IP_XFRM_POLICY, string(b))
	})
	of := func() (n int) {
		s, err := dump()
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range s.policies {
			if p.dir == 3 { // of a socket, incoming
				n++
			}
		}
		return n
	}
	if n := of(); n != 1 {
		t.Fatalf("%d policies of sockets", n)
	}
	c, server := connect(t, l)
	if n := of(); n != 2 {
		t.Errorf("after a connection: %d policies of sockets", n)
	}
	// What the accepted socket has really counts: a strict one in its place drops data in clear text.
	control(t, server, func(fd int) error { return setPolicy(fd, unix.AF_INET, dirIn, ipsec.SA{Mode: ipsec.Transport}) })
	if _, err := c.Write([]byte("clear text")); err != nil {
		t.Fatal(err)
	}
	mustBeQuiet(t, server)
}

func connect(t *testing.T, l net.Listener) (client, server net.Conn) {
	t.Helper()
	client, err := net.DialTimeout(l.Addr().Network(), l.Addr().String(), 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	if server, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	return client, server
}

func control(t *testing.T, c net.Conn, f func(fd int) error) {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var ferr error
	if err := errors.Join(raw.Control(func(fd uintptr) { ferr = f(int(fd)) }), ferr); err != nil {
		t.Fatal(err)
	}
}

// mustBeQuiet fails if something arrives.
func mustBeQuiet(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(quiet)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	if n, err := c.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("SEC-3723.5.7-2: %q arrives in clear text, %v", b[:n], err)
	}
}

// A pinned connection sends nothing in clear text, although the machine has no policy (any longer).
func TestPinPolicy(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	for _, m := range []ipsec.Mode{ipsec.Tunnel, ipsec.Transport} {
		for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
			t.Run(string(m)+" "+address, func(t *testing.T) {
				network, family := "tcp4", unix.AF_INET
				if address[0] == '[' {
					network, family = "tcp6", unix.AF_INET6
				}
				l := controlled(t, network, address, func(int, int) error { return nil })
				client, server := connect(t, l)
				if _, err := server.Write([]byte("before")); err != nil {
					t.Fatal(err)
				}
				b := make([]byte, 6)
				if _, err := client.Read(b); err != nil || string(b) != "before" {
					t.Fatalf("%q, %v", b, err)
				}
				a := netip.MustParseAddrPort(l.Addr().String()).Addr()
				control(t, server, func(fd int) error {
					return PinPolicy(fd, family, ipsec.SA{SPI: 1, Mode: m, Source: a, Destination: a, ReqID: 7})
				})
				if _, err := server.Write([]byte("after")); err != nil && !errors.Is(err, unix.EAGAIN) {
					t.Logf("write: %v", err)
				}
				mustBeQuiet(t, client)
			})
		}
	}
}

// addPolicies demands ESP for TCP between 192.0.2.1:3260 and 192.0.2.2.
func addPolicies(t *testing.T) {
	t.Helper()
	l, r := net.ParseIP("192.0.2.1"), net.ParseIP("192.0.2.2")
	host := func(ip net.IP) *net.IPNet { return &net.IPNet{IP: ip, Mask: net.CIDRMask(32, 32)} }
	for _, p := range []*netlink.XfrmPolicy{
		{Src: host(r), Dst: host(l), Proto: unix.IPPROTO_TCP, DstPort: 3260, Dir: netlink.XFRM_DIR_IN, Priority: 100,
			Tmpls: []netlink.XfrmPolicyTmpl{{Src: r, Dst: l, Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL, Reqid: 7}}},
		{Src: host(l), Dst: host(r), Proto: unix.IPPROTO_TCP, SrcPort: 3260, Dir: netlink.XFRM_DIR_OUT, Priority: 100,
			Tmpls: []netlink.XfrmPolicyTmpl{{Src: l, Dst: r, Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL, Reqid: 7}}},
	} {
		if err := netlink.XfrmPolicyAdd(p); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDriverLooksInTheKernel(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	d := New()
	q := ipsec.Question{Moment: ipsec.AtAccept, Flow: flow, Demand: ipsec.Required}
	judge := func() ipsec.Verdict {
		t.Helper()
		p, err := d.Look(t.Context(), flow)
		if err != nil {
			t.Fatal(err)
		}
		return ipsec.Judge(q, p)
	}
	if v := judge(); v.Action != ipsec.Deny || !strings.Contains(v.Reason, "packets between 192.0.2.1 and 192.0.2.2 are in clear text") {
		t.Errorf("without policies: %+v", v)
	}
	addPolicies(t)
	if v := judge(); v.Action != ipsec.Deny || !v.KeysGone || !strings.Contains(v.Reason, "no SA for packets from 192.0.2.2 to 192.0.2.1") {
		t.Errorf("with policies, without keys: %+v", v)
	}
	// An SPI that an IKE daemon has reserved is an SA without keys.
	state, err := netlink.XfrmStateAllocSpi(&netlink.XfrmState{Src: net.ParseIP("192.0.2.2"), Dst: net.ParseIP("192.0.2.1"),
		Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL, Reqid: 7})
	if err != nil {
		t.Fatal(err)
	}
	s, err := dump()
	if err != nil {
		t.Fatal(err)
	}
	if len(s.states) != 1 || s.states[0].SPI != uint32(state.Spi) || s.states[0].ReqID != 7 || s.states[0].Source != remote.Addr() || s.states[0].usable() {
		t.Errorf("states %+v, want SPI 0x%x", s.states, state.Spi)
	}
	if v := judge(); !v.KeysGone {
		t.Errorf("with an SPI without keys: %+v", v)
	}
	other := ipsec.Flow{Local: netip.MustParseAddrPort("192.0.2.1:3261"), Remote: remote}
	if p, err := d.Look(t.Context(), other); err != nil || p.InPolicy || p.OutPolicy {
		t.Errorf("another port: %+v, %v", p, err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if _, err := d.Look(t.Context(), flow); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// One dump serves all flows until the kernel reports a change, and a change that Watch has not read yet counts.
func TestDriverKeepsWhatItRead(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	d := New()
	changes := make(chan ipsec.Change, 100)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- d.Watch(ctx, func(c ipsec.Change) { changes <- c }) }()
	next := func() ipsec.Change {
		t.Helper()
		select {
		case c := <-changes:
			return c
		case <-time.After(10 * time.Second):
			t.Fatal("no notice")
			return ipsec.Change{}
		}
	}
	if c := next(); c.Kind != ipsec.Lost {
		t.Errorf("first %+v", c)
	}
	// Keys cannot be in every kernel that runs this test, so the test puts them in.
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		d.mu.Lock()
		ready := d.notices != nil
		if ready {
			d.kept = protected(ipsec.Tunnel)
		}
		d.mu.Unlock()
		if ready {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("Watch does not start")
		}
	}
	for range 100 {
		if p, err := d.Look(t.Context(), flow); err != nil || len(p.In) != 1 {
			t.Fatalf("%+v, %v", p, err)
		}
	}
	if d.dumps != 0 {
		t.Errorf("%d dumps", d.dumps)
	}
	addPolicies(t)
	if p, err := d.Look(t.Context(), flow); err != nil || len(p.In) != 0 || !p.InPolicy || !p.OutPolicy {
		t.Errorf("after a change: %+v, %v", p, err)
	}
	// Without keys a dump serves others too, for a short time.
	before := d.dumps
	for range 1000 {
		if p, err := d.Look(t.Context(), flow); err != nil || len(p.In) != 0 {
			t.Fatalf("%+v, %v", p, err)
		}
	}
	if n := d.dumps - before; n > 500 {
		t.Errorf("1000 flows without keys make %d dumps", n)
	}
	time.Sleep(2 * young)
	before = d.dumps
	if _, err := d.Look(t.Context(), flow); err != nil || d.dumps != before+1 {
		t.Errorf("an old dump says that keys are missing: %v", err)
	}
	if c := next(); c.Kind != ipsec.Policy {
		t.Errorf("then %+v", c)
	}
	if err := netlink.XfrmPolicyFlush(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if c := next(); c.Kind != ipsec.Policy {
			t.Errorf("then %+v", c)
		}
	}
	if err := netlink.XfrmStateFlush(0); err == nil {
		t.Log("the kernel reports a flush of no SAs")
	}
	cancel()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Watch: %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("Watch does not end")
	}
}

// Packets that need keys make a notice.
func TestDriverNoticesMissingKeys(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	d := New()
	changes := make(chan ipsec.Change, 100)
	go d.Watch(t.Context(), func(c ipsec.Change) { changes <- c })
	if c := <-changes; c.Kind != ipsec.Lost {
		t.Errorf("first %+v", c)
	}
	l := controlled(t, "tcp4", "127.0.0.1:0", func(int, int) error { return nil })
	_, server := connect(t, l)
	a := netip.MustParseAddr("127.0.0.1")
	control(t, server, func(fd int) error {
		return PinPolicy(fd, unix.AF_INET, ipsec.SA{Mode: ipsec.Transport, Source: a, Destination: a, ReqID: 7})
	})
	if _, err := server.Write([]byte("x")); err != nil {
		t.Logf("write: %v", err)
	}
	for {
		select {
		case c := <-changes:
			if c.Kind == ipsec.Acquired {
				return
			}
		case <-time.After(10 * time.Second):
			t.Fatal("no notice")
		}
	}
}

// Check changes nothing and finds what is missing, with the command that mends it.
func TestCheck(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	missing := Check()
	for _, err := range missing {
		if s := err.Error(); !strings.Contains(s, "CONFIG_INET_ESP. Run: modprobe esp4") && !strings.Contains(s, "CONFIG_INET6_ESP. Run: modprobe esp6") {
			t.Errorf("missing: %v", err)
		}
	}
	t.Logf("missing: %v", missing)
	if s, err := dump(); err != nil || len(s.states)+len(s.policies) != 0 {
		t.Errorf("Check leaves %+v, %v", s, err)
	}
	// The rest of the test is without the capability, on a thread that ends with it.
	result := make(chan []error)
	go func() {
		runtime.LockOSThread()
		h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		err := unix.Capget(&h, &data[0])
		data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
		if err = errors.Join(err, unix.Capset(&h, &data[0])); err != nil {
			result <- []error{err}
			return
		}
		result <- append(Check(), checkSocket())
	}()
	errs := <-result
	if len(errs) != 2 {
		t.Fatalf("without CAP_NET_ADMIN: %v", errs)
	}
	for _, err := range errs {
		if err == nil || !strings.Contains(err.Error(), "CAP_NET_ADMIN is missing. Run: systemctl edit iser-target") {
			t.Errorf("without CAP_NET_ADMIN: %v", err)
		}
	}
}

// Where the kernel has ESP, keys in it are enough, and their removal is noticed.
func TestDriverWithKeys(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	for _, err := range Check() {
		t.Skipf("the kernel cannot have keys: %v", err)
	}
	addPolicies(t)
	add := func(spi int, from, to string) *netlink.XfrmState {
		s := &netlink.XfrmState{Src: net.ParseIP(from), Dst: net.ParseIP(to), Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TUNNEL, Spi: spi, Reqid: 7,
			ESN: true, ReplayWindow: 128, Limits: netlink.XfrmStateLimits{TimeHard: 3600},
			Aead: &netlink.XfrmStateAlgo{Name: "rfc4106(gcm(aes))", Key: make([]byte, 20), ICVLen: 128}}
		if err := netlink.XfrmStateAdd(s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	in := add(0x1001, "192.0.2.2", "192.0.2.1")
	add(0x2001, "192.0.2.1", "192.0.2.2")
	d := New()
	q := ipsec.Question{Flow: flow, Demand: ipsec.Required, Profile: &ipsec.Profile{ESN: true, MinReplayWindow: 128, MaxLifetime: time.Hour}}
	p, err := d.Look(t.Context(), flow)
	if err != nil {
		t.Fatal(err)
	}
	if v := ipsec.Judge(q, p); v.Action != ipsec.Permit || v.Suite != "esp-tunnel aes128gcm16 esn" || v.SPIIn != 0x1001 || v.SPIOut != 0x2001 {
		t.Errorf("%+v from %+v", v, p)
	}
	if err := netlink.XfrmStateDel(in); err != nil {
		t.Fatal(err)
	}
	if p, err = d.Look(t.Context(), flow); err != nil || len(p.In) != 0 || len(p.Out) != 1 {
		t.Errorf("%+v, %v", p, err)
	}
}
