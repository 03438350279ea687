package vici

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
)

var (
	target    = netip.MustParseAddr("192.0.2.2")
	initiator = netip.MustParseAddr("192.0.2.1")
	flow      = ipsec.Flow{Local: netip.AddrPortFrom(target, 3260), Remote: netip.AddrPortFrom(initiator, 40000)}
)

// A kernel is the driver of a kernel with SAs that the test sets.
type kernel struct {
	mu      sync.Mutex
	p       ipsec.Protection
	changes chan ipsec.Change
	ended   chan error // ends Watch
	closed  bool
}

func newKernel(in, out uint32) *kernel {
	k := &kernel{changes: make(chan ipsec.Change), ended: make(chan error)}
	k.set(in, out)
	return k
}

func (k *kernel) set(in, out uint32) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.p = ipsec.Protection{InPolicy: true, OutPolicy: true,
		In:  []ipsec.SA{{SPI: in, Source: initiator, Destination: target}},
		Out: []ipsec.SA{{SPI: out, Source: target, Destination: initiator}}}
}

func (k *kernel) Name() string { return "kernel" }

func (k *kernel) Check(context.Context) []error { return []error{errors.New("no ESP")} }

func (k *kernel) Look(context.Context, ipsec.Flow) (ipsec.Protection, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	p := k.p
	p.In, p.Out = append([]ipsec.SA(nil), p.In...), append([]ipsec.SA(nil), p.Out...)
	return p, nil
}

func (k *kernel) Watch(ctx context.Context, changed func(ipsec.Change)) error {
	for {
		select {
		case c := <-k.changes:
			changed(c)
		case err := <-k.ended:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (k *kernel) Close() error { k.closed = true; return nil }

func newDriver(t *testing.T, k *kernel, socket string, timeout time.Duration) *Driver {
	d := New(k, Options{Socket: socket, Timeout: timeout})
	t.Cleanup(func() {
		if err := d.Close(); err != nil || !k.closed {
			t.Errorf("Close returns %v, and has closed the kernel's driver: %v", err, k.closed)
		}
	})
	return d
}

// look returns the only SAs of a look.
func look(t *testing.T, d *Driver) (in, out ipsec.SA) {
	t.Helper()
	p, err := d.Look(t.Context(), flow)
	if err != nil || len(p.In) != 1 || len(p.Out) != 1 || !p.InPolicy || !p.OutPolicy {
		t.Fatalf("Look returns %+v, %v", p, err)
	}
	return p.In[0], p.Out[0]
}

// Identities, lifetimes and that IKE made the keys are joined with the SAs of the kernel.
func TestLook(t *testing.T) {
	c := newCharon(t)
	c.set(func(c *charon) {
		c.sas = [][]byte{established("other.example.com", "c0000001", "c0000002"), established("host1.example.com", "c49e2f67", "ca216527")}
	})
	d := newDriver(t, newKernel(0xc49e2f67, 0xca216527), c.socket, 0)
	in, out := look(t, d)
	want := ipsec.SA{SPI: 0xc49e2f67, Source: initiator, Destination: target, LocalID: "target.example.com",
		RemoteID: "host1.example.com", IKE: true, Lifetime: 4200 * time.Second}
	if in != want {
		t.Errorf("in is %+v, want %+v", in, want)
	}
	want.SPI, want.Source, want.Destination = 0xca216527, target, initiator
	if out != want {
		t.Errorf("out is %+v, want %+v", out, want)
	}
	look(t, d)
	if n := c.count("list-sas"); n != 1 {
		t.Errorf("charon was asked %d times for SAs that are known, want once", n)
	}
}

// An SPI belongs to a destination: that of another host is another SA.
func TestSPIOfAnotherHost(t *testing.T) {
	c := newCharon(t)
	c.set(func(c *charon) { c.sas = [][]byte{established("host1.example.com", "ca216527", "c49e2f67")} })
	d := newDriver(t, newKernel(0xc49e2f67, 0xca216527), c.socket, 0) // in and out are exchanged
	if in, out := look(t, d); in.IKE || out.IKE || in.RemoteID != "" || out.RemoteID != "" {
		t.Errorf("got %+v and %+v, want SAs without identities", in, out)
	}
}

// During a rekey the kernel has an SA before strongSwan tells of it. Look waits for that. An SA that strongSwan never tells of
// has no identity, and the next Look does not wait again until something changes.
func TestLookWaitsForRekey(t *testing.T) {
	c := newCharon(t)
	k := newKernel(0x1001, 0x1002)
	d := newDriver(t, k, c.socket, 0)
	time.AfterFunc(200*time.Millisecond, func() {
		c.set(func(c *charon) { c.sas = [][]byte{established("host1.example.com", "1001", "1002")} })
	})
	if in, _ := look(t, d); in.RemoteID != "host1.example.com" {
		t.Errorf("the identity is %q", in.RemoteID)
	}
	k.set(0x2001, 0x2002) // of somebody else
	if in, _ := look(t, d); in.IKE || in.RemoteID != "" {
		t.Errorf("a foreign SA has the identity %q", in.RemoteID)
	}
	n := c.count("list-sas")
	begun := time.Now()
	look(t, d)
	if more := c.count("list-sas") - n; more != 0 || time.Since(begun) >= keysTime {
		t.Errorf("charon was asked %d times, in %v, for an SA that it does not have", more, time.Since(begun))
	}
	d.forget()
	c.set(func(c *charon) { c.sas = [][]byte{established("host2.example.com", "2001", "2002")} })
	if in, _ := look(t, d); in.RemoteID != "host2.example.com" {
		t.Errorf("after a change the identity is %q", in.RemoteID)
	}
}

// A daemon that hangs costs a Look the time limit of one request, and those after it nothing. SAs that are known stay known. When
// it answers again, or was restarted without its SAs, everything continues.
func TestCharonHangs(t *testing.T) {
	const timeout = 2 * time.Second
	c := newCharon(t)
	c.set(func(c *charon) { c.sas = [][]byte{established("host1.example.com", "1001", "1002")} })
	k := newKernel(0x1001, 0x1002)
	d := newDriver(t, k, c.socket, timeout)
	look(t, d)
	c.set(func(c *charon) { c.silent = true })
	begun := time.Now()
	if in, _ := look(t, d); in.RemoteID != "host1.example.com" || time.Since(begun) >= timeout {
		t.Errorf("a known SA has the identity %q after %v", in.RemoteID, time.Since(begun))
	}
	k.set(0x2001, 0x2002)
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			p, err := d.Look(t.Context(), flow)
			if err != nil || len(p.In) != 1 || p.In[0].RemoteID != "" {
				t.Errorf("without an answer: %+v, %v", p, err)
			}
			if p.Incomplete == nil || !strings.Contains(p.Incomplete.Error(), "charon does not answer within 2s: ") {
				t.Errorf("incomplete: %v", p.Incomplete)
			}
		})
	}
	wg.Wait()
	if took := time.Since(begun); took < timeout || took > 30*time.Second {
		t.Errorf("20 looks took %v, with a time limit of %v for one", took, timeout)
	}
	if n := c.count("list-sas"); n > 1 {
		t.Errorf("charon got %d questions while it did not answer, want none", n-1)
	}
	errs := d.Check(t.Context())
	if len(errs) != 2 || !strings.Contains(errs[1].Error(), "charon does not answer within 2s") ||
		!strings.Contains(errs[1].Error(), "systemctl restart strongswan") {
		t.Errorf("Check returns %v", errs)
	}

	c.stop() // as kill -9: the kernel keeps the SAs
	c.set(func(c *charon) { c.silent, c.sas = false, nil })
	c.start()
	time.Sleep(pause)
	if errs := d.Check(t.Context()); len(errs) != 1 {
		t.Errorf("Check returns %v after the restart", errs)
	}
	k.set(0x1001, 0x1002)
	if in, _ := look(t, d); in.RemoteID != "host1.example.com" || !in.IKE {
		t.Errorf("after a crash of charon an SA that the kernel has kept is %+v", in)
	}
	if p, err := d.Look(t.Context(), flow); err != nil || p.Incomplete != nil {
		t.Errorf("after the restart: %v, %v", p.Incomplete, err)
	}
}

// What is known of SAs that charon has lost is forgotten after a day.
func TestLearnForgets(t *testing.T) {
	d := New(newKernel(1, 2), Options{})
	k, now := key{1, target}, time.Now()
	d.learn(map[key]record{k: {remoteID: "host1.example.com"}}, now)
	d.learn(map[key]record{}, now)
	d.learn(map[key]record{}, now.Add(keep-time.Second))
	if d.known[k].remoteID == "" {
		t.Error("forgotten too early")
	}
	d.learn(map[key]record{}, now.Add(keep))
	if len(d.known) != 0 {
		t.Errorf("%v is still known", d.known)
	}
}

// Check names what is missing, and how to mend it.
func TestCheck(t *testing.T) {
	d := newDriver(t, newKernel(1, 2), t.TempDir()+"/charon.vici", 0)
	errs := d.Check(t.Context())
	if len(errs) != 2 || errs[0].Error() != "no ESP" || !strings.Contains(errs[1].Error(), "no such file or directory. Start strongSwan (systemctl start strongswan)") {
		t.Errorf("Check returns %v", errs)
	}
	if d.Name() != "vici" {
		t.Errorf("the name is %q", d.Name())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := d.Look(ctx, flow); !errors.Is(err, context.Canceled) {
		t.Errorf("Look returns %v after its context has ended", err)
	}
}

// A packet or an answer without end is refused before memory is allocated for it.
func TestLongPackets(t *testing.T) {
	for name, raw := range map[string][]byte{
		"packet": {0xff, 0xff, 0xff, 0xff},
		"answer": nil,
	} {
		t.Run(name, func(t *testing.T) {
			c := newCharon(t)
			want := errLongPacket
			if raw == nil {
				want = errLongAnswer
				raw = packet(eventConfirm, "", nil)
				for range maxAnswer/maxPacket + 1 {
					raw = append(raw, packet(event, "list-sa", make([]byte, maxPacket-20))...)
				}
			}
			c.set(func(c *charon) { c.raw = raw })
			d := newDriver(t, newKernel(1, 2), c.socket, time.Minute)
			if err := d.ask(t.Context()); !errors.Is(err, want) {
				t.Errorf("got %v, want %v", err, want)
			}
		})
	}
}

// Watch joins the changes of the kernel with strongSwan's events, and survives a restart of charon.
func TestWatch(t *testing.T) {
	c := newCharon(t)
	k := newKernel(1, 2)
	d := newDriver(t, k, c.socket, 0)
	got := make(chan ipsec.Change, 10)
	done := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	go func() { done <- d.Watch(ctx, func(c ipsec.Change) { got <- c }) }()
	expect := func(want ipsec.Change) {
		t.Helper()
		select {
		case c := <-got:
			if c != want {
				t.Fatalf("got %+v, want %+v", c, want)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("no %+v", want)
		}
	}
	raise := func(name string, m []byte) {
		t.Helper()
		for begun := time.Now(); c.raise(name, m) == 0; time.Sleep(10 * time.Millisecond) {
			if time.Since(begun) > 30*time.Second {
				t.Fatalf("nobody listens to %s", name)
			}
		}
	}
	up := value("up", "yes")
	raise("child-rekey", established("host1.example.com", "1", "2"))
	expect(ipsec.Change{Kind: ipsec.Added, Remote: initiator})
	raise("child-updown", append(up, established("host1.example.com", "1001", "1002")...))
	expect(ipsec.Change{Kind: ipsec.Added, SPI: 0x1001, Remote: initiator})
	raise("child-updown", established("host1.example.com", "1001", "1002"))
	expect(ipsec.Change{Kind: ipsec.Removed, SPI: 0x1001, Remote: initiator})
	raise("ike-updown", established("host1.example.com", "1001", "1002"))
	expect(ipsec.Change{Kind: ipsec.Removed, Remote: initiator})
	k.changes <- ipsec.Change{Kind: ipsec.Expired, SPI: 7}
	expect(ipsec.Change{Kind: ipsec.Expired, SPI: 7})

	c.stop()
	k.changes <- ipsec.Change{Kind: ipsec.Policy} // without charon
	expect(ipsec.Change{Kind: ipsec.Policy})
	c.start()
	expect(ipsec.Change{Kind: ipsec.Lost})
	raise("ike-updown", append(up, established("host1.example.com", "1", "2")...))
	expect(ipsec.Change{Kind: ipsec.Added, Remote: initiator})

	failure := errors.New("netlink is gone")
	k.ended <- failure
	if err := <-done; err != failure {
		t.Errorf("Watch returns %v, want the error of the kernel's driver", err)
	}
	go func() { done <- d.Watch(ctx, func(ipsec.Change) {}) }()
	cancel()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Error("Watch does not end with its context")
	}
}

// Initiate chooses the connection and child of the flow, and says why keys cannot be had.
func TestInitiate(t *testing.T) {
	conn := func(name, remote string, children ...[]byte) []byte {
		return section(name, values("local_addrs", "%any"), values("remote_addrs", remote), section("children", children...))
	}
	child := func(name, local, remote string) []byte {
		return section(name, value("mode", "TUNNEL"), values("local-ts", local), values("remote-ts", remote))
	}
	for _, tt := range []struct {
		name   string
		conns  [][]byte
		refuse string
		want   string // in the request
		err    string
	}{
		{name: "by address", conns: [][]byte{
			conn("any", "%any", child("iscsi", "dynamic", "dynamic")),
			conn("other", "192.0.2.9", child("iscsi", "dynamic", "dynamic")),
			conn("host1", "192.0.2.1", child("ssh", "dynamic[tcp/ssh]", "dynamic[tcp]"), child("udp", "dynamic[udp]", "dynamic[udp]"),
				child("far", "198.51.100.0/24", "dynamic"), child("iscsi", "192.0.2.2/32[tcp/iscsi-target]", "dynamic[tcp]")),
		}, want: string(value("ike", "host1")) + string(value("child", "iscsi"))},
		{name: "range of ports", conns: [][]byte{conn("host1", "192.0.2.1", child("iscsi", "192.0.2.0/24[tcp/3000-4000]", "192.0.2.0/24"))},
			want: string(value("child", "iscsi"))},
		{name: "none", conns: [][]byte{conn("any", "%any", child("iscsi", "dynamic", "dynamic"))},
			err: "no connection that can ask 192.0.2.1 for keys"},
		{name: "refused", conns: [][]byte{conn("host1", "192.0.2.1", child("iscsi", "dynamic", "dynamic"))},
			refuse: "establishing CHILD_SA 'iscsi' failed", want: string(value("ike", "host1")),
			err: "keys for 192.0.2.1 by connection host1: vici: command failed: establishing CHILD_SA 'iscsi' failed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCharon(t)
			c.set(func(c *charon) { c.conns, c.refuse = tt.conns, tt.refuse })
			err := newDriver(t, newKernel(1, 2), c.socket, 0).Initiate(t.Context(), flow)
			if got := fmt.Sprint(err); (tt.err == "") != (err == nil) || !strings.Contains(got, tt.err) {
				t.Errorf("Initiate returns %v, want %q", err, tt.err)
			}
			request := strings.Join(c.requests, "|")
			if !strings.Contains(request, tt.want) || (tt.want == "") != (request == "") {
				t.Errorf("charon is asked %q, want %q", request, tt.want)
			}
		})
	}
	t.Run("charon hangs", func(t *testing.T) {
		c := newCharon(t)
		c.set(func(c *charon) { c.silent = true })
		err := newDriver(t, newKernel(1, 2), c.socket, 100*time.Millisecond).Initiate(t.Context(), flow)
		if err == nil || !strings.Contains(err.Error(), "charon does not answer within 100ms") {
			t.Errorf("Initiate returns %v", err)
		}
	})
}
