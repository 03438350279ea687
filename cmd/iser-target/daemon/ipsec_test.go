package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/ports"
)

// A fakeIPsec is a driver whose SAs a test sets, and the socket calls that go with it.
type fakeIPsec struct {
	mu       sync.Mutex
	p        ipsec.Protection
	lacks    []error
	hang     chan struct{} // nil: it answers
	watchers map[int]func(ipsec.Change)
	next     int
	running  int
	sockets  []string // calls
	refuse   error    // of socket calls
	blocks   fakeBlocks
}

func (f *fakeIPsec) Name() string { return "fake" }

func (f *fakeIPsec) wait() {
	f.mu.Lock()
	hang := f.hang
	f.mu.Unlock()
	if hang != nil {
		<-hang // whatever the context says
	}
}

func (f *fakeIPsec) Check(context.Context) []error {
	f.wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lacks
}

func (f *fakeIPsec) Look(context.Context, ipsec.Flow) (ipsec.Protection, error) {
	f.wait()
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.p, nil
}

func (f *fakeIPsec) Watch(ctx context.Context, changed func(ipsec.Change)) error {
	f.mu.Lock()
	id := f.next
	f.next++
	if f.watchers == nil {
		f.watchers = map[int]func(ipsec.Change){}
	}
	f.watchers[id] = changed
	f.mu.Unlock()
	<-ctx.Done()
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.watchers, id)
	return ctx.Err()
}

func (f *fakeIPsec) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running--
	return nil
}

// set replaces what protects all flows, and notifies the daemon.
func (f *fakeIPsec) set(kind ipsec.ChangeKind, p ipsec.Protection) {
	f.mu.Lock()
	f.p = p
	var all []func(ipsec.Change)
	for _, changed := range f.watchers {
		all = append(all, changed)
	}
	f.mu.Unlock()
	for _, changed := range all {
		changed(ipsec.Change{Kind: kind, Remote: netip.MustParseAddr("127.0.0.1")})
	}
}

// setHang makes calls hang from now on, or lets them all return.
func (f *fakeIPsec) setHang(on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.hang != nil {
		close(f.hang)
		f.hang = nil
	}
	if on {
		f.hang = make(chan struct{})
	}
}

// call notes a call about a socket.
func (f *fakeIPsec) call(what string, fd, family int) error {
	listens, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sockets = append(f.sockets, fmt.Sprintf("%s %s listening=%d", what, map[int]string{unix.AF_INET: "IPv4", unix.AF_INET6: "IPv6"}[family], listens))
	return f.refuse
}

func (f *fakeIPsec) calls() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.sockets)
}

func (f *fakeIPsec) hooks() ipsecHooks {
	return ipsecHooks{
		newDriver: func(*config.Config) (ipsec.Driver, error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.running++
			return f, nil
		},
		listener: func(fd, family int, mode ipsec.Mode) error { return f.call("listener "+string(mode), fd, family) },
		pin:      func(fd, family int, sa ipsec.SA) error { return f.call("pin", fd, family) },
		clear:    func(fd, family int) error { return f.call("clear", fd, family) },
		blocks:   func(func(error)) blocker { return &f.blocks },
	}
}

// fakeBlocks notes which addresses have policies that block clear text.
type fakeBlocks struct {
	mu     sync.Mutex
	on     []netip.AddrPort
	closed string
	refuse error
}

func (f *fakeBlocks) Add(portals []netip.AddrPort) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(portals) > 0 && f.refuse != nil {
		return f.refuse
	}
	f.on = append(f.on, portals...)
	return nil
}

func (f *fakeBlocks) Keep(portals []netip.AddrPort) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.on = slices.Clone(portals)
	return nil
}

func (f *fakeBlocks) Clear([]netip.AddrPort) error { return nil }

func (f *fakeBlocks) Close(leave bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed == "" { // a process that was followed ends later
		f.closed = map[bool]string{true: "leaves them", false: "removes them"}[leave]
	}
	return nil
}

// blocked returns the addresses that have policies.
func (f *fakeBlocks) blocked() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []string
	for _, a := range f.on {
		list = append(list, a.String())
	}
	slices.Sort(list)
	return strings.Join(slices.Compact(list), " ")
}

// gcm returns a protection by AES-GCM with that SPI and IKE identity.
func gcm(n uint32, identity string) ipsec.Protection {
	sa := func(spi uint32) ipsec.SA {
		return ipsec.SA{SPI: spi, Mode: ipsec.Tunnel, AEAD: ipsec.Algorithm{Name: "rfc4106(gcm(aes))", KeyBits: 128, ICVBits: 128}, ESN: true,
			ReplayWindow: 64, Lifetime: time.Hour, IKE: true, RemoteID: identity}
	}
	return ipsec.Protection{In: []ipsec.SA{sa(n)}, Out: []ipsec.SA{sa(n + 1)}, InPolicy: true, OutPolicy: true}
}

// keyless is a protection without SAs.
var keyless = ipsec.Protection{InPolicy: true, OutPolicy: true}

// freePort returns an address of the loopback that nobody listens on.
func freePort(t *testing.T) string {
	t.Helper()
	addr, err := ports.FreeAddress()
	if err != nil {
		t.Fatal(err)
	}
	return addr
}

// A guardedLab is a lab with two portals, of which the second one requires IPsec, and a driver.
type guardedLab struct {
	*lab
	fake *fakeIPsec
	safe string // address of the second portal
}

func newGuardedLab(t *testing.T, o ...func(*guardedLab)) *guardedLab {
	t.Helper()
	g := &guardedLab{fake: &fakeIPsec{p: gcm(0x1001, "host.example")}, safe: freePort(t)}
	g.lab = newLab(t, func(l *lab) {
		g.lab = l
		l.hooks = g.fake.hooks()
		l.portals = fmt.Sprintf(`{listen: "127.0.0.1:0"}, {listen: %q, ipsec: required}`, g.safe)
		l.more = "ipsec: {grace: 2s}"
		for _, f := range o {
			f(g)
		}
	})
	return g
}

// loginSafe logs in over iSER through the portal that requires IPsec.
func (g *guardedLab) loginSafe(name string) (*initiator.Session, error) {
	ctx, cancel := context.WithTimeout(g.t.Context(), 20*time.Second)
	defer cancel()
	s, err := initiator.Login(ctx, g.safe, initiator.Options{Name: prefix + name, Target: store})
	if err == nil {
		g.t.Cleanup(func() { s.Close() })
	}
	return s, err
}

// loginTCP does the same over TCP.
func (g *guardedLab) loginTCP(name string) error {
	ctx, cancel := context.WithTimeout(g.t.Context(), 20*time.Second)
	g.t.Cleanup(cancel)
	d, err := initiator.Dial(ctx, "tcp", g.safe, initiator.Options{Name: prefix + name, Target: store})
	if err != nil {
		return err
	}
	g.t.Cleanup(func() { d.Close() })
	return d.LogIn(nil)
}

// protectionOf returns how IPsec protects the session of an initiator; nil: not at all, or there is no session.
func (g *guardedLab) protectionOf(name string) *schema.ConnectionProtection {
	for _, s := range g.State().Sessions {
		if s.Initiator == prefix+name {
			return s.Protection()
		}
	}
	return nil
}

// protectedSeries returns what the metrics say about connections that something is required of.
func (g *guardedLab) protectedSeries() (list []string) {
	for _, c := range g.ipsecMetrics().Protected {
		if c.Target != store || c.TSIH == 0 || !strings.HasPrefix(c.Initiator, prefix) {
			g.t.Errorf("%+v", c)
		}
		list = append(list, strings.Join([]string{c.Transport, c.Verdict, c.Suite, c.SPIIn, c.SPIOut, c.Identity}, " "))
	}
	slices.Sort(list)
	return list
}

func (g *guardedLab) has(name string) bool {
	return slices.ContainsFunc(g.State().Sessions, func(s schema.SessionState) bool { return s.Initiator == prefix+name })
}

// eventOf returns the events of a kind with a text.
func (l *lab) eventOf(kind, text string) (list []schema.Event) {
	for _, e := range l.Events(0) {
		if e.Event == kind && e.Text == text {
			list = append(list, e)
		}
	}
	return list
}

// SEC-3723.5.7-1, SEC-3723.3.3-1, SEC-7143.9.1-1, SEC-5042.5.4-1: a portal that requires IPsec closes a connection without SAs before it answers a byte. With
// SAs a session comes up over each transport, and lists, log and explanations show suite, SPI and identity.
func TestPortalThatRequiresIPsec(t *testing.T) {
	g := newGuardedLab(t)
	load(t, g.login("stays", store))
	for _, transport := range []string{"tcp", "iser"} {
		var err error
		if transport == "tcp" {
			err = g.loginTCP(transport)
		} else {
			_, err = g.loginSafe(transport)
		}
		if err != nil {
			t.Fatalf("%s: %v", transport, err)
		}
		want := schema.ConnectionProtection{Demand: "required", Verdict: "permit", Suite: "esp-tunnel aes128gcm16 esn",
			SPIIn: "0x00001001", SPIOut: "0x00001002", Identity: "host.example"}
		if p := g.protectionOf(transport); p == nil || *p != want {
			t.Errorf("%s: %+v", transport, p)
		}
		logins := g.logged("initiator=" + prefix + transport + " ")
		if l := logins[0]; !strings.Contains(l, `suite="esp-tunnel aes128gcm16 esn" spi_in=0x00001001 spi_out=0x00001002 identity=host.example`) {
			t.Errorf("log %q", l)
		}
	}
	if p := g.protectionOf("stays"); p != nil {
		t.Errorf("nothing is required of the neighbour: %+v", p)
	}
	if got := g.protectedSeries(); len(got) != 2 || got[0] != "iser permit esp-tunnel aes128gcm16 esn 0x00001001 0x00001002 host.example" || got[1] != "tcp"+strings.TrimPrefix(got[0], "iser") {
		t.Errorf("metrics of protected connections %q", got)
	}
	if c := g.fake.calls(); !slices.Contains(c, "listener tunnel IPv4 listening=0") || !slices.Contains(c, "pin IPv4 listening=0") {
		t.Errorf("socket calls %q", c)
	}

	g.fake.set(ipsec.Policy, ipsec.Protection{}) // SEC-7143.9.3-2: clear text is refused
	testkit.Eventually(t, "sessions without policies end at once, and the neighbour stays", func() bool {
		return !g.has("tcp") && !g.has("iser") && g.has("stays")
	})
	nc, err := net.Dial("tcp", g.safe)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if err := nc.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(nc); len(b) > 0 || err != nil && !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("answered %q, %v", b, err)
	}
	var refused []schema.Event
	testkit.Eventually(t, "an event says why", func() bool {
		refused = nil
		for _, e := range g.Events(0) {
			if e.Event == "login" && e.Attrs["stage"] == "ipsec" {
				refused = append(refused, e)
			}
		}
		return len(refused) > 0
	})
	if r := fmt.Sprint(refused[0].Attrs["reason"]); !strings.HasPrefix(r, "IPsec: packets between 127.0.0.1 and 127.0.0.1 are in clear text") {
		t.Errorf("reason %q", r)
	}
	if n := g.ipsecMetrics(); n.Denials[[2]string{"accept", "clear"}] != 1 || n.Denials[[2]string{"change", "clear"}] != 2 || !n.Up || n.Notices == 0 || n.Sessions["none"] != 1 {
		t.Errorf("metrics %+v", n)
	}
}

// SEC-7146.3-4, SEC-3723.3.5-1, SEC-5042.5.4-4: a session whose SAs are deleted stays for ipsec.grace. If the keys come back, nobody notices; if not,
// it ends with the reason. New keys do not disturb it. A session through another portal works all the time.
func TestKeysVanish(t *testing.T) {
	g := newGuardedLab(t)
	load(t, g.login("stays", store))
	s, err := g.loginSafe("a")
	if err != nil {
		t.Fatal(err)
	}
	attentions(t, s, 0)
	g.fake.set(ipsec.Added, gcm(0x2001, "host.example")) // a rekey
	testkit.Eventually(t, "lists show the new keys", func() bool {
		p := g.protectionOf("a")
		return p != nil && p.SPIIn == "0x00002001"
	})
	if e := g.eventOf("ipsec", "IPsec protection changed"); len(e) > 0 {
		t.Errorf("a rekey is an event: %+v", e)
	}
	if got := g.protectedSeries(); len(got) != 1 || got[0] != "iser permit esp-tunnel aes128gcm16 esn 0x00002001 0x00002002 host.example" {
		t.Errorf("metrics after a rekey %q", got)
	}
	g.fake.set(ipsec.Removed, keyless)
	testkit.Eventually(t, "lists show that the keys are gone", func() bool {
		p := g.protectionOf("a")
		return p != nil && p.Verdict == "mark" && strings.Contains(p.Reason, "the keys are missing")
	})
	if got := testUnitReady(t, s, 0); got != "" {
		t.Errorf("within the time of grace: %s", got)
	}
	g.fake.set(ipsec.Added, gcm(0x3001, "host.example"))
	testkit.Eventually(t, "the keys are back", func() bool {
		p := g.protectionOf("a")
		return p != nil && p.Verdict == "permit" && p.SPIIn == "0x00003001"
	})
	time.Sleep(2500 * time.Millisecond) // longer than the time of grace
	if got := testUnitReady(t, s, 0); got != "" {
		t.Errorf("after the keys came back: %s", got)
	}
	gone := time.Now()
	g.fake.set(ipsec.Removed, keyless)
	select {
	case <-s.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("the session did not end")
	}
	if d := time.Since(gone); d < 1900*time.Millisecond {
		t.Errorf("the session ended after %v, before ipsec.grace", d)
	}
	testkit.Eventually(t, "an event says why the session ended", func() bool {
		return slices.ContainsFunc(g.eventOf("session", "session ended"), func(e schema.Event) bool {
			return strings.Contains(fmt.Sprint(e.Attrs["reason"]), "IPsec: no SA for packets from 127.0.0.1")
		})
	})
	if len(g.eventOf("ipsec", "IPsec keys are gone")) != 2 {
		t.Errorf("events %+v", g.eventOf("ipsec", "IPsec keys are gone"))
	}
	if n := g.ipsecMetrics(); n.Denials[[2]string{"change", "keys"}] != 1 || len(n.Protected) != 0 {
		t.Errorf("metrics %+v", n)
	}
	if !g.has("stays") {
		t.Error("the neighbour has lost its session")
	}
}

// A driver that hangs stops logins that IPsec is required of, in bounded time, and nobody else: sessions and logins through another portal, lists and
// changes do not wait for it. A session that was protected keeps its verdict for the time of patience. Event, metric and status say that the driver hangs,
// and that it answers again.
func TestDriverHangs(t *testing.T) {
	g := newGuardedLab(t, func(g *guardedLab) { g.more = "ipsec: {grace: 10m}" })
	load(t, g.login("stays", store))
	s, err := g.loginSafe("a")
	if err != nil {
		t.Fatal(err)
	}
	attentions(t, s, 0)
	if n := g.ipsecMetrics(); !n.Up {
		t.Error("the metric says that the driver failed")
	}
	g.fake.setHang(true)
	defer g.fake.setHang(false)
	g.fake.set(ipsec.Added, gcm(0x2001, "host.example")) // keys change while it hangs
	for range 3 {
		nc, err := net.Dial("tcp", g.safe)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
	}
	for i := range 5 {
		begin := time.Now()
		attentions(t, g.login(fmt.Sprintf("neighbour%d", i), store), 0)
		if d := time.Since(begin); d > 4*time.Second { // the driver's limit is 5 s
			t.Errorf("login through another portal took %v", d)
		}
	}
	begin := time.Now()
	if g.protectionOf("a") == nil || time.Since(begin) > 4*time.Second {
		t.Errorf("a list took %v", time.Since(begin))
	}
	if _, err := g.loginSafe("b"); err == nil {
		t.Error("a login was admitted without an answer")
	}
	if d := time.Since(begin); d > 10*time.Second {
		t.Errorf("it was refused after %v", d)
	}
	if got := testUnitReady(t, s, 0); got != "" {
		t.Errorf("the session that is protected: %s", got)
	}
	begin = time.Now()
	st := g.IPsec()
	const hangs = "the driver has not answered in time: the limit is 5s. Look for what the kernel waits for: ip xfrm state; dmesg"
	if d := time.Since(begin); d > 10*time.Second || st.Failure != hangs || len(st.Missing) != 0 {
		t.Errorf("after %v: %q, %q", d, st.Failure, st.Missing)
	}
	i := slices.IndexFunc(st.Connections, func(c schema.IPsecConnection) bool { return c.Initiator == prefix+"a" })
	if i < 0 || !st.Connections[i].Unknown || len(st.Connections[i].SAs) != 0 {
		t.Errorf("%+v", st.Connections)
	}
	if n := g.ipsecMetrics(); n.Up || n.Failures == 0 || n.Denials[[2]string{"accept", "driver"}] == 0 || n.Sessions["none"] != 6 {
		t.Errorf("metrics %+v", n)
	}
	if e := g.eventOf("ipsec", "IPsec driver failed"); len(e) != 1 || e[0].Attrs["reason"] != "driver fake: the driver has not answered in time: the limit is 5s" {
		t.Errorf("events %+v", e)
	}
	g.fake.setHang(false)
	if _, err := g.loginSafe("b"); err != nil {
		t.Errorf("after the driver answers again: %v", err)
	}
	testkit.Eventually(t, "the driver is said to answer, and the session has its new keys", func() bool {
		p := g.protectionOf("a")
		return len(g.eventOf("ipsec", "IPsec driver answers again")) == 1 && g.ipsecMetrics().Up && p.Verdict == "permit" && p.SPIIn == "0x00002001"
	})
	if st := g.IPsec(); st.Failure != "" {
		t.Errorf("failure %q", st.Failure)
	}
}

// A session about whose keys the driver gives no answer ends after ipsec.grace, of which ipsec.driver_timeout is a part. Without a demand a session stays.
func TestHangEndsASessionInTime(t *testing.T) {
	g := newGuardedLab(t, func(g *guardedLab) { g.more = "ipsec: {grace: 3s, driver_timeout: 2s}" })
	load(t, g.login("stays", store))
	s, err := g.loginSafe("a")
	if err != nil {
		t.Fatal(err)
	}
	attentions(t, s, 0)
	if st := g.IPsec(); st.Grace != "3s" || st.Unanswered != "3s" {
		t.Errorf("status %+v", st)
	}
	g.fake.setHang(true)
	defer g.fake.setHang(false)
	gone := time.Now()
	g.fake.set(ipsec.Removed, keyless)
	testkit.Eventually(t, "it is marked first", func() bool {
		p := g.protectionOf("a")
		return p != nil && p.Verdict == "mark" && p.Class == "driver" && strings.Contains(p.Reason, "The connection ends 3s after the loss")
	})
	select {
	case <-s.Done():
	case <-time.After(30 * time.Second):
		t.Fatal("the session did not end")
	}
	if d := time.Since(gone); d < 2900*time.Millisecond || d > 9*time.Second {
		t.Errorf("the session ended after %v, want 3s", d)
	}
	if !g.has("stays") {
		t.Error("the neighbour has lost its session")
	}
}

// One call of the driver that takes longer than its limit neither marks nor ends a session that was protected, not even without a time of grace.
func TestOneSlowCall(t *testing.T) {
	g := newGuardedLab(t, func(g *guardedLab) { g.more = "ipsec: {grace: 0s}" })
	load(t, g.login("stays", store))
	s, err := g.loginSafe("a")
	if err != nil {
		t.Fatal(err)
	}
	attentions(t, s, 0)
	g.fake.setHang(true)
	defer g.fake.setHang(false)
	g.fake.set(ipsec.Added, gcm(0x2001, "host.example"))
	testkit.Eventually(t, "the call has taken too long", func() bool { return len(g.eventOf("ipsec", "IPsec driver failed")) == 1 })
	g.fake.setHang(false)
	testkit.Eventually(t, "the session has its new keys", func() bool {
		p := g.protectionOf("a")
		return p != nil && p.SPIIn == "0x00002001"
	})
	if p := g.protectionOf("a"); p.Verdict != "permit" {
		t.Errorf("%+v", p)
	}
	for _, text := range []string{"IPsec protection is not as required", "IPsec keys are gone", "IPsec protection is gone: the connection ends"} {
		if e := g.eventOf("ipsec", text); len(e) != 0 {
			t.Errorf("events %+v", e)
		}
	}
	if got := testUnitReady(t, s, 0); got != "" {
		t.Error(got)
	}
}

// A start fails if the driver cannot enforce what is required, and names what is missing. With audit it warns.
func TestStartThatCannotEnforceIPsec(t *testing.T) {
	text := func(demand string) string {
		return fmt.Sprintf("state_dir: \"\"\nportals: [{listen: %q, ipsec: %s}]\ntargets: [{name: %s, initiators: ['*'], luns: [{id: 0, backend: memory, size: 1MiB}]}]\n", freePort(t), demand, store)
	}
	fake := &fakeIPsec{lacks: []error{errors.New("CAP_NET_ADMIN is missing. Run: setcap"), errors.New("the kernel lacks ESP. Run: modprobe esp4")}}
	path := write(t, "c.yaml", text("required"))
	doc, err := config.OpenDocument(path)
	if err != nil {
		t.Fatal(err)
	}
	log := &testkit.Log{}
	_, err = New(doc, Options{Path: path, LogTo: log, ipsec: fake.hooks()})
	if err == nil || !strings.Contains(err.Error(), "portals[0].ipsec: required, but it cannot be enforced: CAP_NET_ADMIN is missing. Run: setcap") ||
		!strings.Contains(err.Error(), "modprobe esp4") {
		t.Errorf("%v", err)
	}
	if fake.running != 0 {
		t.Errorf("%d drivers run", fake.running)
	}
	d, end := run(t, write(t, "c.yaml", text("audit")), Options{LogTo: log, ipsec: fake.hooks()})
	if l := log.Lines("IPsec cannot be enforced"); len(l) != 2 || !strings.Contains(l[1], "modprobe esp4") {
		t.Errorf("log %q", l)
	}
	if st := d.IPsec(); len(st.Missing) != 2 || st.Driver != "fake" {
		t.Errorf("%+v", st)
	}
	if err := end(); err != nil {
		t.Error(err)
	}
	if fake.running != 0 {
		t.Errorf("%d drivers run after the end", fake.running)
	}
	fake.lacks, fake.refuse = nil, errors.New("operation not permitted: CAP_NET_ADMIN is missing")
	if _, err = New(doc, Options{Path: path, LogTo: log, ipsec: fake.hooks()}); err == nil || !strings.Contains(err.Error(), "ipsec: required: operation not permitted: CAP_NET_ADMIN is missing") {
		t.Errorf("%v", err)
	}
}

// SEC-7146.3-6: a live change names the sessions that it would end, and needs --disrupt. Sessions that meet the new rules stay. A change that cannot be
// enforced changes nothing.
func TestRequireIPsecLive(t *testing.T) {
	g := newGuardedLab(t, func(g *guardedLab) {
		g.portals = fmt.Sprintf(`{listen: "127.0.0.1:0"}, {listen: %q}`, g.safe)
		g.fake.p = ipsec.Protection{}
	})
	load(t, g.login("stays", store))
	if _, err := g.loginSafe("a"); err != nil {
		t.Fatal(err)
	}
	plain := g.portals
	g.portals = fmt.Sprintf(`{listen: "127.0.0.1:0"}, {listen: %q, ipsec: required}`, g.safe)
	g.fake.lacks = []error{errors.New("the kernel lacks ESP. Run: modprobe esp4")}
	if _, err := g.apply(ChangeOptions{Disrupt: true}); err == nil || !strings.Contains(err.Error(), "modprobe esp4") || !strings.Contains(err.Error(), "Nothing was changed") {
		t.Errorf("%v", err)
	}
	g.fake.lacks, g.fake.refuse = nil, errors.New("no policy for sockets")
	if _, err := g.apply(ChangeOptions{Disrupt: true}); err == nil || !strings.Contains(err.Error(), "no policy for sockets") || !strings.Contains(err.Error(), "Nothing was changed") {
		t.Errorf("%v", err)
	}
	g.fake.refuse = nil
	g.fake.blocks.refuse = errors.New("no policy that blocks")
	if _, err := g.apply(ChangeOptions{Disrupt: true}); err == nil || !strings.Contains(err.Error(), "no policy that blocks") || !strings.Contains(err.Error(), "Nothing was changed") {
		t.Errorf("%v", err)
	}
	g.fake.blocks.refuse = nil
	if on := g.fake.blocks.blocked(); on != "" {
		t.Errorf("after changes that failed, clear text from %s is blocked", on)
	}
	if !g.has("a") || g.State().Portals[1].IPsec != "off" {
		t.Fatal("a change that failed has changed something")
	}
	p, err := g.apply(ChangeOptions{})
	var refused *ErrRefused
	if !errors.As(err, &refused) || len(p.Steps) != 1 || len(p.Steps[0].Disturbs) != 1 || !strings.HasSuffix(p.Steps[0].Disturbs[0], "of "+prefix+"a") {
		t.Fatalf("%+v, %v", p, err)
	}
	g.fake.set(ipsec.Added, gcm(0x1001, "host.example"))
	if p := g.ok(ChangeOptions{}); len(p.Steps[0].Disturbs) > 0 {
		t.Errorf("%+v", p)
	}
	testkit.Eventually(t, "the session is judged", func() bool {
		p := g.protectionOf("a")
		return p != nil && p.Verdict == "permit" && p.Suite != ""
	})
	if c := g.fake.calls(); !slices.Contains(c, "listener tunnel IPv4 listening=1") || !slices.Contains(c, "pin IPv4 listening=0") {
		t.Errorf("socket calls %q", c)
	}

	if on := g.fake.blocks.blocked(); on != g.safe {
		t.Errorf("clear text from %q is blocked", on)
	}

	g.more = `ipsec: {profiles: [{name: default, suites: [aes256gcm16]}]}` // a stricter profile
	if p, err := g.apply(ChangeOptions{}); !errors.As(err, &refused) || len(p.Steps) != 2 || len(p.Steps[0].Disturbs)+len(p.Steps[1].Disturbs) == 0 {
		t.Fatalf("%+v, %v", p, err)
	}
	g.ok(ChangeOptions{Disrupt: true, Drain: 100 * time.Millisecond})
	testkit.Eventually(t, "the session ends, and the neighbour stays", func() bool { return !g.has("a") && g.has("stays") })

	g.portals, g.more = plain, ""
	g.ok(ChangeOptions{Disrupt: true})
	if c := g.fake.calls(); !slices.Contains(c, "clear IPv4 listening=1") {
		t.Errorf("socket calls %q", c)
	}
	if on := g.fake.blocks.blocked(); on != "" {
		t.Errorf("clear text from %s is blocked, and nothing requires IPsec", on)
	}
	if g.fake.running != 0 || g.IPsec().Driver != "none" {
		t.Errorf("%d drivers run, %s", g.fake.running, g.IPsec().Driver)
	}
	if _, err := g.loginSafe("b"); err != nil {
		t.Error(err)
	}
}

// A portal on all addresses has a socket for each address family, and its policy before it listens. A live change replaces a socket for both.
func TestPortalOnAllAddresses(t *testing.T) {
	_, port, err := net.SplitHostPort(freePort(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, live := range []bool{false, true} {
		t.Run(fmt.Sprintf("live=%t", live), func(t *testing.T) {
			portals := func(demand string) string {
				return fmt.Sprintf(`{listen: "127.0.0.1:0"}, {listen: ":%s", ipsec: %s}`, port, demand)
			}
			g := newGuardedLab(t, func(g *guardedLab) {
				if g.portals = portals("required"); live {
					g.portals = portals("audit")
				}
			})
			if live {
				load(t, g.login("stays", store))
				g.portals = portals("required")
				g.ok(ChangeOptions{})
			}
			for _, family := range []string{"IPv4", "IPv6"} {
				if c := g.fake.calls(); !slices.Contains(c, "listener tunnel "+family+" listening=0") {
					t.Errorf("socket calls %q", c)
				}
			}
			if on := g.fake.blocks.blocked(); on != "0.0.0.0:"+port+" [::]:"+port {
				t.Errorf("clear text from %q is blocked", on)
			}
			st := g.IPsec()
			if p := st.Portals[1]; !p.Policy || !slices.Equal(p.Sockets, []string{"[::]:" + port, "0.0.0.0:" + port}) {
				t.Errorf("%+v", p)
			}
			for _, address := range []string{"127.0.0.1", "::1"} {
				g.safe = net.JoinHostPort(address, port)
				if _, err := g.loginSafe("host"); err != nil {
					t.Errorf("%s: %v", address, err)
				}
			}
		})
	}
}

// A target that requires IPsec refuses the login of an initiator with the IKE identity of another one, with status 0202. The reason is in the log, and
// explain gives it before.
func TestTargetThatRequiresAnIdentity(t *testing.T) {
	g := newGuardedLab(t, func(g *guardedLab) {
		g.targets = fmt.Sprintf(`  - {name: %q, initiators: ['*'], ipsec: required, ipsec_profile: hosts, luns: [{id: 0, backend: memory, size: 1MiB}]}`, prefix+"second")
		g.more = fmt.Sprintf(`ipsec: {profiles: [{name: hosts, identities: [{initiator: "%sa", id: "host-a.*"}, {initiator: "%sb", id: host-b.example}]}]}`, prefix, prefix)
		g.fake.p = gcm(0x1001, "host-a.example")
	})
	g.login("a", prefix+"second")
	_, err := g.tryLogin("b", prefix+"second")
	if err == nil || !strings.Contains(err.Error(), "0202") && !strings.Contains(strings.ToLower(err.Error()), "authoriz") {
		t.Errorf("%v, want a refusal", err)
	}
	const reason = "does not belong to initiator"
	if l := g.logged("outcome=refused"); len(l) != 1 || !strings.Contains(l[0], reason) {
		t.Errorf("log %q", l)
	}
	if c := g.fake.calls(); !slices.Contains(c, "pin IPv4 listening=0") {
		t.Errorf("socket calls %q", c)
	}
	for _, tc := range []struct {
		name, from string
		admitted   bool
		why        string
	}{
		{"a", "127.0.0.1", true, "esp-tunnel aes128gcm16 esn host-a.example meets profile hosts"},
		{"b", "127.0.0.1", false, reason},
		{"b", "", true, "give the address of the initiator"},
	} {
		e := g.Explain(prefix+tc.name, prefix+"second", "", tc.from)
		i := slices.IndexFunc(e.Rules, func(r schema.Rule) bool { return r.Rule == "ipsec of the target" })
		if i < 0 || e.Admitted != tc.admitted || !strings.Contains(e.Rules[i].Why, tc.why) || !tc.admitted && (len(e.LUNs) > 0 || i != len(e.Rules)-1) {
			t.Errorf("%s from %q: %+v", tc.name, tc.from, e)
		}
	}
	g.login("b", store) // nothing is required of the other target
}

// logged returns the lines of the log with s, once there is one: the line about a login may come after its last response.
func (g *guardedLab) logged(s string) []string {
	g.t.Helper()
	testkit.Eventually(g.t, "a line with "+s, func() bool { return len(g.lines.Lines(s)) > 0 })
	return g.lines.Lines(s)
}

// With audit a connection that the profile forbids is served, and everything says why it should not be.
func TestAuditMarks(t *testing.T) {
	g := newGuardedLab(t, func(g *guardedLab) {
		g.portals = fmt.Sprintf(`{listen: "127.0.0.1:0"}, {listen: %q, ipsec: audit}`, g.safe)
		g.fake.p = ipsec.Protection{}
	})
	s, err := g.loginSafe("a")
	if err != nil {
		t.Fatal(err)
	}
	if p := g.protectionOf("a"); p == nil || p.Verdict != "mark" || !strings.Contains(p.Reason, "clear text") {
		t.Errorf("%+v", p)
	}
	if l := g.logged("msg=login "); len(l) != 1 || !strings.Contains(l[0], "ipsec=mark") || !strings.Contains(l[0], "clear text") {
		t.Errorf("log %q", l)
	}
	if n := g.ipsecMetrics(); n.Sessions["marked"] != 1 {
		t.Errorf("metrics %+v", n)
	}
	if c := g.fake.calls(); len(c) > 0 {
		t.Errorf("socket calls %q", c)
	}
	g.fake.set(ipsec.Added, gcm(0x1001, ""))
	testkit.Eventually(t, "the mark goes", func() bool { return g.protectionOf("a").Verdict == "permit" })
	testkit.Eventually(t, "an event tells it", func() bool { return len(g.eventOf("ipsec", "IPsec protection changed")) > 0 })
	if e := g.eventOf("ipsec", "IPsec protection changed"); len(e) != 1 {
		t.Errorf("events %+v", e)
	}
	attentions(t, s, 0)
	if got := testUnitReady(t, s, 0); got != "" {
		t.Error(got)
	}
}
