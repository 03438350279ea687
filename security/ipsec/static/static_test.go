package static

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/security/ipsec/xfrm"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A fakeKernel keeps what is installed, without ESP.
type fakeKernel struct {
	list    []installed
	demands []demand
	calls   []string
	refuse  map[string]error // by call
}

func (k *fakeKernel) call(name string) error {
	k.calls = append(k.calls, name)
	return k.refuse[name]
}

func copyOf(s installed) installed {
	s.keys = keys{slices.Clone(s.keys.encryption), slices.Clone(s.keys.integrity)}
	return s
}

func (k *fakeKernel) states() ([]installed, error) {
	var all []installed
	for _, s := range k.list {
		all = append(all, copyOf(s))
	}
	return all, nil
}

func (k *fakeKernel) addState(s installed) error {
	if err := k.call(fmt.Sprintf("add SA 0x%x", s.SPI)); err != nil {
		return err
	}
	if slices.ContainsFunc(k.list, func(o installed) bool { return o.SPI == s.SPI && o.Destination == s.Destination }) {
		return unix.EEXIST
	}
	k.list = append(k.list, copyOf(s))
	return nil
}

func (k *fakeKernel) removeState(s installed) error {
	k.list = slices.DeleteFunc(k.list, func(o installed) bool { return o.SPI == s.SPI && o.Destination == s.Destination })
	return k.call(fmt.Sprintf("remove SA 0x%x", s.SPI))
}

func (k *fakeKernel) policies() ([]demand, error) { return slices.Clone(k.demands), nil }

func (k *fakeKernel) addPolicy(d demand) error {
	if err := k.call("add policy " + d.String()); err != nil {
		return err
	}
	if slices.ContainsFunc(k.demands, func(o demand) bool { return o.String() == d.String() }) {
		return unix.EEXIST
	}
	k.demands = append(k.demands, d)
	return nil
}

func (k *fakeKernel) removePolicy(d demand) error {
	k.demands = slices.DeleteFunc(k.demands, func(o demand) bool { return o.String() == d.String() })
	return k.call("remove policy " + d.String())
}

// keyFile writes a key file for aes128-sha256: 16 and 32 bytes.
func keyFile(t *testing.T, name string, seed byte) string {
	t.Helper()
	b := make([]byte, 48)
	for i := range b {
		b[i] = seed + byte(i)
	}
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(hex.EncodeToString(b)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

var (
	target    = netip.MustParseAddr("192.0.2.1")
	initiator = netip.MustParseAddr("192.0.2.2")
)

// config returns SAs and policies for TCP port 3260 in both directions.
func config(t *testing.T, m ipsec.Mode) Config {
	t.Helper()
	host := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, 32) }
	return Config{
		SAs: []SA{
			{SPI: 0x1001, Source: initiator, Destination: target, ReqID: 1, Mode: m, Suite: "aes128-sha256", KeyFile: keyFile(t, "in", 1)},
			{SPI: 0x2001, Source: target, Destination: initiator, ReqID: 1, Mode: m, Suite: "aes128-sha256", KeyFile: keyFile(t, "out", 100)},
		},
		Policies: []Policy{
			{Direction: In, Source: host(initiator), Destination: host(target), Port: 3260, Mode: m, ReqID: 1},
			{Direction: Out, Source: host(target), Destination: host(initiator), Port: 3260, Mode: m, ReqID: 1},
		},
	}
}

func TestValidate(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*Config)
		fault  string
	}{
		{"good", func(*Config) {}, ""},
		{"SEC-3723.5.9-1 counter mode", func(c *Config) { c.SAs[0].Suite = "aes128gcm16" }, "sas[0].suite: aes128gcm16 must not have keys that are set by hand"},
		{"SEC-3723.5.9-1 AES-GMAC", func(c *Config) { c.SAs[1].Suite = "aes256gmac" }, "sas[1].suite: aes256gmac must not have keys that are set by hand"},
		{"SEC-7143.9.3-3 DES", func(c *Config) { c.SAs[0].Suite = "des-sha1" }, "sas[0].suite: suite \"des-sha1\": DES must not be used"},
		{"SPI", func(c *Config) { c.SAs[0].SPI = 255 }, "sas[0].spi: 255 is reserved"},
		{"SPI twice", func(c *Config) { c.SAs = append(c.SAs, c.SAs[0]) }, "sas[2].spi: 0x1001 to 192.0.2.1 is the SPI of sas[0], too"},
		{"families", func(c *Config) { c.SAs[0].Source = netip.MustParseAddr("2001:db8::1") }, "sas[0].source: 2001:db8::1 and 192.0.2.1 are not two addresses of one family"},
		{"no address", func(c *Config) { c.SAs[0].Source = netip.Addr{} }, "sas[0].source: "},
		{"reqid", func(c *Config) { c.SAs[0].ReqID = 0x8000 }, "sas[0].reqid: 32768 is outside of the range from 1 to 32767"},
		{"mode", func(c *Config) { c.SAs[0].Mode = "beet" }, "sas[0].mode: \"beet\" is not tunnel or transport"},
		{"window", func(c *Config) { c.SAs[0].ReplayWindow = 64 }, "sas[0].replay_window: 64 requires esn: true"},
		{"window beyond the kernel's", func(c *Config) { c.SAs[0].ReplayWindow = 5000 }, "sas[0].replay_window: 5000 is outside of the range from 1 to 4096 packets"},
		{"negative window", func(c *Config) { c.SAs[0].ReplayWindow = -1 }, "sas[0].replay_window: -1 is outside"},
		{"no key file", func(c *Config) { c.SAs[0].KeyFile = "" }, "sas[0].key_file: it is empty"},
		{"direction", func(c *Config) { c.Policies[0].Direction = "fwd" }, "policies[0].direction: \"fwd\" is not in or out"},
		{"networks", func(c *Config) { c.Policies[0].Source = netip.Prefix{} }, "policies[0].source: "},
		{"port", func(c *Config) { c.Policies[0].Port = 65536 }, "policies[0].port: 65536 is outside"},
		{"policy without SAs", func(c *Config) { c.Policies[0].ReqID = 2 }, "policies[0].reqid: no SA has 2, so the policy would drop all packets"},
		{"policy twice", func(c *Config) { c.Policies = append(c.Policies, c.Policies[0]) }, "policies[2]: it is for the same packets as policies[0]"},
		{"ends of no tunnel", func(c *Config) { c.Policies[0].Mode = ipsec.Transport; c.Policies[0].TunnelSource = target }, "policies[0].tunnel_source: it requires mode: tunnel"},
		{"tunnel without ends", func(c *Config) { c.Policies[0].Source = netip.MustParsePrefix("192.0.2.0/24") }, "policies[0].tunnel_source: a tunnel needs two addresses"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := config(t, ipsec.Tunnel)
			tc.change(&c)
			err := c.Validate()
			if tc.fault == "" && err != nil || tc.fault != "" && (err == nil || !strings.HasPrefix(err.Error(), tc.fault)) {
				t.Errorf("%v, want %q", err, tc.fault)
			}
		})
	}
}

func TestReadKeys(t *testing.T) {
	suite, err := ipsec.ParseSuite("aes128-sha256")
	if err != nil {
		t.Fatal(err)
	}
	good := strings.Repeat("0123456789abcdef", 6)
	dir := t.TempDir()
	for _, tc := range []struct {
		name, text string
		mode       os.FileMode
		fault      string
	}{
		{"good", good + "\n", 0o600, ""},
		{"prefix and read only", "0x" + strings.ToUpper(good), 0o400, ""},
		{"group", good, 0o640, "others may use it: mode 0640. Run: chmod 0600 "},
		{"others", good, 0o604, "others may use it: mode 0604"},
		{"short", good[2:], 0o600, "it must have one line with 96 hexadecimal digits: 16 bytes for the encryption and 32 for the integrity of aes128-sha256. Run: openssl rand -hex 48 > "},
		{"long", good + "00", 0o600, "it must have one line with 96"},
		{"empty", "", 0o600, "it must have one line with 96"},
		{"huge", strings.Repeat(" ", 1<<20) + good, 0o600, "it must have one line with 96"},
		{"no digits", "g" + good[1:], 0o600, "characters other than hexadecimal digits"},
		{"zeros", strings.Repeat("0", 96), 0o600, "all bytes are the same"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(dir, strings.ReplaceAll(tc.name, " ", "-"))
			if err := os.WriteFile(path, []byte(tc.text), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, tc.mode); err != nil {
				t.Fatal(err)
			}
			k, err := readKeys(path, suite)
			if tc.fault == "" {
				if err != nil || len(k.encryption) != 16 || len(k.integrity) != 32 || k.encryption[0] != 1 || k.integrity[31] != 0xef {
					t.Errorf("%x, %v", k, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.fault) || !strings.Contains(err.Error(), path) {
				t.Fatalf("%v, want %q", err, tc.fault)
			}
			if strings.Contains(err.Error(), "0123") {
				t.Errorf("the error has a part of the key: %v", err)
			}
		})
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(filepath.Join(dir, "good"), link); err != nil {
		t.Fatal(err)
	}
	if _, err := readKeys(link, suite); err == nil || !strings.Contains(err.Error(), "symbolic link") {
		t.Errorf("a link: %v", err)
	}
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := readKeys(fifo, suite); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Errorf("a FIFO: %v", err)
	}
	if os.Geteuid() == 0 {
		foreign := filepath.Join(dir, "good")
		if err := os.Chown(foreign, 65534, 65534); err != nil {
			t.Fatal(err)
		}
		if _, err := readKeys(foreign, suite); err == nil || !strings.Contains(err.Error(), "user 65534 owns it. Run: chown root ") {
			t.Errorf("a file of another user: %v", err)
		}
	}
}

// foreign returns a kernel in which another program has an SA and policies.
func foreign() *fakeKernel {
	return &fakeKernel{
		list:    []installed{{SA: ipsec.SA{SPI: 0xc001, Destination: target, ReqID: 1}}},
		demands: []demand{{Source: netip.MustParsePrefix("198.51.100.0/24"), Destination: netip.PrefixFrom(target, 32), ReqID: 1}},
		refuse:  map[string]error{},
	}
}

// untouched fails if the foreign SA and policy are not all that the kernel has.
func (k *fakeKernel) untouched(t *testing.T, when string) {
	t.Helper()
	if len(k.list) != 1 || k.list[0].SPI != 0xc001 || len(k.demands) != 1 || k.demands[0].ReqID != 1 {
		t.Errorf("%s the kernel has %+v and %+v", when, k.list, k.demands)
	}
}

func TestDriver(t *testing.T) {
	k := foreign()
	c := config(t, ipsec.Tunnel)
	d, err := open(t.Context(), k, c)
	if err != nil {
		t.Fatal(err)
	}
	if len(k.list) != 3 || len(k.demands) != 3 {
		t.Fatalf("the kernel has %+v and %+v", k.list, k.demands)
	}
	if !strings.HasPrefix(k.calls[0], "add policy ") || !strings.HasPrefix(k.calls[len(k.calls)-1], "add SA ") {
		t.Errorf("SEC-3723.5.7-2: policies come first, but the calls are %q", k.calls)
	}
	for _, s := range k.list[1:] {
		if !own(s.ReqID) || s.String() != "esp-tunnel aes128-sha256" || s.ReplayWindow != 32 || len(s.keys.encryption) != 16 {
			t.Errorf("SA %+v", s)
		}
	}
	k.calls = nil
	if err := d.Apply(c); err != nil || len(k.calls) != 0 {
		t.Errorf("the same again: %v, calls %q", err, k.calls)
	}
	// Another key for one SA disturbs no other.
	c.SAs[0].KeyFile = keyFile(t, "new", 7)
	if err := d.Apply(c); err != nil || !slices.Equal(k.calls, []string{"remove SA 0x1001", "add SA 0x1001"}) {
		t.Errorf("another key: %v, calls %q", err, k.calls)
	}
	// Another template for the same packets.
	k.calls = nil
	c.Policies[0].TunnelSource = netip.MustParseAddr("192.0.2.9")
	if err := d.Apply(c); err != nil || len(k.calls) != 2 || !strings.HasPrefix(k.calls[0], "remove policy ") || !strings.HasPrefix(k.calls[1], "add policy ") {
		t.Errorf("another template: %v, calls %q", err, k.calls)
	}
	if err := d.Apply(Config{SAs: c.SAs}); err != nil || len(k.demands) != 1 {
		t.Errorf("no policies: %v, %+v", err, k.demands)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	k.untouched(t, "after Close")
	if err := d.Apply(c); err == nil {
		t.Error("Apply after Close returns no error")
	}
	if err := d.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

// A process that dies leaves SAs and policies. The next one keeps the same, so that sequence numbers continue, and removes the rest.
func TestDriverAfterCrash(t *testing.T) {
	k := foreign()
	c := config(t, ipsec.Transport)
	d, err := open(t.Context(), k, c)
	if err != nil {
		t.Fatal(err)
	}
	d.lock.Close() // as the kernel does when a process dies
	k.calls = nil
	next := Config{SAs: c.SAs[1:], Policies: c.Policies[1:]}
	d, err = open(t.Context(), k, next)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"remove SA 0x1001", "remove policy src 192.0.2.2/32 dst 192.0.2.1/32 proto tcp dport 3260 dir in"}; !slices.Equal(k.calls, want) {
		t.Errorf("calls %q, want %q", k.calls, want)
	}
	if err := d.Detach(); err != nil {
		t.Fatal(err)
	}
	if len(k.list) != 2 || len(k.demands) != 2 {
		t.Errorf("after Detach the kernel has %+v and %+v", k.list, k.demands)
	}
	k.calls = nil
	if d, err = open(t.Context(), k, next); err != nil || len(k.calls) != 0 {
		t.Fatalf("after Detach: %v, calls %q", err, k.calls)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	k.untouched(t, "after Close")
}

// A process that cannot take over what another one has left changes nothing: that process continues with the same SAs, and so with the same
// sequence numbers. It needs no key file for that.
func TestSuccessorThatFails(t *testing.T) {
	k := foreign()
	c := config(t, ipsec.Transport)
	d, err := open(t.Context(), k, c)
	if err != nil {
		t.Fatal(err)
	}
	k.calls = nil
	if err := d.Detach(); err != nil {
		t.Fatal(err)
	}
	unreadable := c
	unreadable.SAs = slices.Clone(c.SAs)
	unreadable.SAs[1].KeyFile = filepath.Join(t.TempDir(), "none")
	if _, err := open(t.Context(), k, unreadable); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("without a key file: %v", err)
	}
	more := c
	more.SAs = append(slices.Clone(c.SAs), SA{SPI: 0x3001, Source: target, Destination: initiator, ReqID: 1, Mode: ipsec.Transport, Suite: "aes128-sha256", KeyFile: keyFile(t, "more", 50)})
	k.refuse["add SA 0x3001"] = unix.EEXIST
	if _, err := open(t.Context(), k, more); err == nil || !strings.Contains(err.Error(), "another program has one with this SPI") {
		t.Errorf("the SPI of another program: %v", err)
	}
	// One that has taken over, and fails then.
	next, err := open(t.Context(), k, c)
	if err == nil {
		err = errors.Join(next.Detach(), next.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(k.calls, []string{"add SA 0x3001"}) || len(k.list) != 3 || len(k.demands) != 3 {
		t.Errorf("calls %q; the kernel has %+v and %+v", k.calls, k.list, k.demands)
	}
	for _, sa := range c.SAs {
		if err := os.Remove(sa.KeyFile); err != nil {
			t.Fatal(err)
		}
	}
	k.calls = nil
	k.list = k.list[:2] // the SA 0x2001 was lost
	if err := d.Apply(c); err == nil {
		t.Error("Apply after Detach returns no error")
	}
	if err := d.Attach(t.Context()); err != nil || !slices.Equal(k.calls, []string{"add SA 0x2001"}) {
		t.Errorf("Attach: %v, calls %q", err, k.calls)
	}
	if len(k.list) != 3 || len(k.list[2].keys.encryption) != 16 || slices.Max(k.list[2].keys.encryption) == 0 {
		t.Errorf("after Attach the kernel has %+v", k.list)
	}
	if _, err := open(expired(t), k, c); err == nil || !strings.Contains(err.Error(), "another process in this network namespace has it") {
		t.Errorf("a second driver after Attach: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	k.untouched(t, "after Close")
	if err := errors.Join(d.Detach(), d.Attach(t.Context())); err != nil {
		t.Errorf("after Close: %v", err)
	}
	k.untouched(t, "after Attach of a closed driver")
}

// expired returns a context that has ended.
func expired(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

func TestDriverRollsBack(t *testing.T) {
	for _, tc := range []struct {
		name, refused string
		err           error
		fault         string
	}{
		{"SPI of another program", "add SA 0x2001", unix.EEXIST, "SA 0x2001 to 192.0.2.2: another program has one with this SPI. Run: ip xfrm state delete src 192.0.2.1 dst 192.0.2.2 proto esp spi 0x2001"},
		{"policy of another program", "add policy src 192.0.2.1/32 dst 192.0.2.2/32 proto tcp sport 3260 dir out", unix.EEXIST, "Run: ip xfrm policy delete src 192.0.2.1/32 dst 192.0.2.2/32 proto tcp sport 3260 dir out"},
		{"no capability", "add SA 0x1001", unix.EPERM, "CAP_NET_ADMIN is missing. Run: systemctl edit iser-target"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			k := foreign()
			k.refuse[tc.refused] = tc.err
			d, err := open(t.Context(), k, config(t, ipsec.Transport))
			if err == nil || !strings.Contains(err.Error(), tc.fault) {
				t.Errorf("%v, %v; want %q", d, err, tc.fault)
			}
			k.untouched(t, "after the error")
			// The lock is free again.
			delete(k.refuse, tc.refused)
			if d, err = open(t.Context(), k, config(t, ipsec.Transport)); err != nil {
				t.Fatal(err)
			}
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// A change that fails leaves what was there.
func TestApplyRollsBack(t *testing.T) {
	k := foreign()
	c := config(t, ipsec.Transport)
	d, err := open(t.Context(), k, c)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	before, policies := slices.Clone(k.list), slices.Clone(k.demands)
	k.refuse["add SA 0x3001"] = unix.EEXIST
	more := c
	more.SAs = append(slices.Clone(c.SAs), SA{SPI: 0x3001, Source: target, Destination: initiator, ReqID: 1, Mode: ipsec.Transport, Suite: "aes128-sha256", KeyFile: keyFile(t, "more", 50)})
	if err := d.Apply(more); err == nil {
		t.Error("no error")
	}
	if len(k.list) != len(before) || !slices.Equal(k.demands, policies) {
		t.Errorf("the kernel has %+v and %+v", k.list, k.demands)
	}
	more.SAs[2].KeyFile = c.SAs[0].KeyFile
	if err := d.Apply(more); err == nil || !strings.Contains(err.Error(), "has the keys of sas[0]. Each SA needs its own") {
		t.Errorf("the same keys twice: %v", err)
	}
}

func TestDriverIsExclusive(t *testing.T) {
	k := foreign()
	d, err := open(t.Context(), k, Config{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := open(ctx, k, Config{}); err == nil || !strings.Contains(err.Error(), "another process in this network namespace has it") {
		t.Errorf("a second driver: %v", err)
	}
	// A second one waits for the first.
	go func() {
		time.Sleep(50 * time.Millisecond)
		d.Close()
	}()
	next, err := open(t.Context(), k, Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := next.Close(); err != nil {
		t.Error(err)
	}
}

func TestCheckFindsWhatIsGone(t *testing.T) {
	k := foreign()
	d, err := open(t.Context(), k, config(t, ipsec.Transport))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	before := len(d.Check(t.Context()))
	k.list, k.demands = k.list[:2], k.demands[:1]
	missing := errors.Join(d.Check(t.Context())[before:]...)
	for _, want := range []string{"the SA 0x2001 to 192.0.2.2 of ipsec.static is gone", "dir in of ipsec.static is gone", "dir out of ipsec.static is gone"} {
		if missing == nil || !strings.Contains(missing.Error(), want) {
			t.Errorf("missing %v, want %q", missing, want)
		}
	}
	if len(k.list) != 2 || len(k.demands) != 1 {
		t.Error("Check installs something")
	}
}

// policiesOnly is the kernel of this machine for policies, and a fake for SAs, which need ESP.
type policiesOnly struct {
	*fakeKernel
	linux
}

func (k policiesOnly) states() ([]installed, error)  { return k.fakeKernel.states() }
func (k policiesOnly) addState(s installed) error    { return k.fakeKernel.addState(s) }
func (k policiesOnly) removeState(s installed) error { return k.fakeKernel.removeState(s) }
func (k policiesOnly) policies() ([]demand, error)   { return k.linux.policies() }
func (k policiesOnly) addPolicy(d demand) error      { return k.linux.addPolicy(d) }
func (k policiesOnly) removePolicy(d demand) error   { return k.linux.removePolicy(d) }

func TestPoliciesInTheKernel(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	other := demand{Source: netip.MustParsePrefix("198.51.100.0/24"), Destination: netip.PrefixFrom(target, 32), Mode: ipsec.Transport, ReqID: 5}
	if err := (linux{}).addPolicy(other); err != nil {
		t.Fatal(err)
	}
	six := func(s string) netip.Prefix { return netip.MustParsePrefix(s) }
	for _, m := range []ipsec.Mode{ipsec.Tunnel, ipsec.Transport} {
		k := policiesOnly{fakeKernel: foreign()}
		c := config(t, m)
		c.Policies = append(c.Policies, Policy{Direction: Out, Source: six("2001:db8::/64"), Destination: six("2001:db8:1::/64"), Mode: m, ReqID: 1})
		if m == ipsec.Tunnel {
			c.Policies[2].TunnelSource, c.Policies[2].TunnelDestination = target, initiator
		}
		d, err := open(t.Context(), k, c)
		if err != nil {
			t.Fatal(err)
		}
		have, err := k.policies()
		if err != nil || len(have) != 4 {
			t.Fatalf("%s: %+v, %v", m, have, err)
		}
		for _, p := range c.Policies {
			if !slices.Contains(have, demandOf(p)) {
				t.Errorf("%s: the kernel has %+v, without %+v", m, have, demandOf(p))
			}
		}
		flow := ipsec.Flow{Local: netip.AddrPortFrom(target, 3260), Remote: netip.AddrPortFrom(initiator, 40000)}
		if p, err := d.Look(t.Context(), flow); err != nil || !p.InPolicy || !p.OutPolicy {
			t.Errorf("%s: %+v, %v", m, p, err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if have, err := k.policies(); err != nil || len(have) != 1 || have[0] != other {
			t.Errorf("%s: after Close the kernel has %+v, %v", m, have, err)
		}
	}
}

// The policies of the kernel stay the same while processes take turns, also if one fails: the kernel gives a policy that is removed and added again
// another index. So there is no moment without them.
func TestPoliciesAreHandedOver(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	k := policiesOnly{fakeKernel: foreign()}
	c := config(t, ipsec.Tunnel)
	d, err := open(t.Context(), k, c)
	if err != nil {
		t.Fatal(err)
	}
	indexes := func() (all []int) {
		t.Helper()
		list, err := netlink.XfrmPolicyList(netlink.FAMILY_ALL)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range list {
			all = append(all, p.Index)
		}
		slices.Sort(all)
		return all
	}
	before := indexes()
	if len(before) != 2 {
		t.Fatalf("policies %v", before)
	}
	same := func(when string) {
		t.Helper()
		if now := indexes(); !slices.Equal(now, before) {
			t.Errorf("%s the kernel has policies %v, before %v", when, now, before)
		}
	}
	for _, step := range []struct {
		name string
		run  func() error
	}{
		{"detach", d.Detach},
		{"a successor without a key file", func() error {
			bad := c
			bad.SAs = slices.Clone(c.SAs)
			bad.SAs[0].KeyFile += ".none"
			if _, err := open(t.Context(), k, bad); err == nil {
				return errors.New("it has opened")
			}
			return nil
		}},
		{"attach", func() error { return d.Attach(t.Context()) }},
		{"detach again", d.Detach},
		{"close", d.Close},
	} {
		if err := step.run(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		same("after " + step.name)
	}
	next, err := open(t.Context(), k, c)
	if err != nil {
		t.Fatal(err)
	}
	same("under the successor")
	if err := next.Close(); err != nil {
		t.Error(err)
	}
	if now := indexes(); len(now) != 0 {
		t.Errorf("after Close the kernel has policies %v", now)
	}
}

// SAs need ESP. Without it the driver says so and leaves nothing. With it, they are what the configuration says.
func TestStatesInTheKernel(t *testing.T) {
	if !testkit.InNamespace(t) {
		return
	}
	c := config(t, ipsec.Transport)
	d, err := New(t.Context(), c)
	if missing := xfrm.Check(); len(missing) > 0 {
		if err == nil || !strings.Contains(err.Error(), "CONFIG_INET_ESP. Run: modprobe esp4") {
			t.Errorf("without ESP: %v", err)
		}
		if list, err := netlink.XfrmPolicyList(netlink.FAMILY_ALL); err != nil || len(list) != 0 {
			t.Errorf("it leaves %v, %v", list, err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	flow := ipsec.Flow{Local: netip.AddrPortFrom(target, 3260), Remote: netip.AddrPortFrom(initiator, 40000)}
	p, err := d.Look(t.Context(), flow)
	if err != nil {
		t.Fatal(err)
	}
	q := ipsec.Question{Flow: flow, Demand: ipsec.Required, Profile: &ipsec.Profile{ManualKeys: true}}
	if v := ipsec.Judge(q, p); v.Action != ipsec.Permit || v.Suite != "esp-transport aes128-sha256" {
		t.Errorf("%+v from %+v", v, p)
	}
	q.Profile = &ipsec.Profile{}
	if v := ipsec.Judge(q, p); v.Action != ipsec.Deny || !strings.Contains(v.Reason, "manual_keys") {
		t.Errorf("SEC-7146.3-2: %+v", v)
	}
	if err := d.Detach(); err != nil {
		t.Fatal(err)
	}
	if d, err = New(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	if errs := d.Check(t.Context()); len(errs) != 0 {
		t.Errorf("after Detach: %v", errs)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if list, err := xfrm.List(); err != nil || len(list) != 0 {
		t.Errorf("after Close: %v, %v", list, err)
	}
}
