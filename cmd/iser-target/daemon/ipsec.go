package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/security/ipsec/exec"
)

// protection lets a Guard judge connections: when they are accepted, at their login, and when keys or the configuration have
// changed. It knows each connection. The Guard asks nothing about those that IPsec is not required of.
type protection struct {
	d     *Daemon
	guard *ipsec.Guard
	ipsecHooks

	blocks blocker // of clear text that leaves portals under required; changed with the lock of changes held
	left   bool    // detach has left blocks to another process

	mu       sync.Mutex // held for moments; after Daemon.mu
	driver   ipsec.Driver
	settings config.IPsec // of driver
	missing  []string     // what driver lacked when it began
	borrowed bool         // another process has what driver has installed, too, until this one serves
	profiles map[string]*ipsec.Profile
	conns    map[ipsec.Flow]*guarded
	denials  map[denial]uint64
}

// ipsecHooks are what tests replace.
type ipsecHooks struct {
	newDriver func(*config.Config) (ipsec.Driver, error)
	listener  func(fd, family int, mode ipsec.Mode) error // sets the policy of a listener that drops clear text
	pin       func(fd, family int, sa ipsec.SA) error     // lets the kernel send packets of a connection through sa only
	clear     func(fd, family int) error                  // ends what listener and pin have set
	blocks    func(failed func(error)) blocker
}

// A blocker has policies of the machine that let no packet of a portal leave which no other policy takes (xfrm.Blocks).
type blocker interface {
	Add(portals []netip.AddrPort) error
	Keep(portals []netip.AddrPort) error
	Clear(portals []netip.AddrPort) error
	Close(leave bool) error
}

// A denial is a kind of refusal, for the metrics.
type denial struct {
	Moment ipsec.Moment
	Reason ipsec.Class
}

// A guarded is a connection from its accept to its end.
type guarded struct {
	flow   ipsec.Flow
	portal *portal
	n      *newcomer
	raw    syscall.RawConn // of the socket

	mu      sync.Mutex
	watched *ipsec.Watched // nil: the Guard has not been asked
	cfg     *config.Config // that says what is required of it
	claim   iscsi.Claim    // zero before the login
}

const (
	driverTimeout = 10 * time.Second // while no driver is configured
	// checkTime is for the first look of a driver at what it lacks: the kernel loads modules, and the IKE daemon may be starting.
	checkTime = 10 * time.Second
	// execSlack is what the driver exec may take in addition to ipsec.exec.timeout.
	execSlack = time.Second
	// maxForecasts bounds the questions that a plan asks at a time.
	maxForecasts = 8
)

// An unprotectedError is why a connection that IPsec does not protect as required is refused or ends.
type unprotectedError string

// Error returns the reason, which begins with IPsec.
func (e unprotectedError) Error() string {
	if strings.HasPrefix(string(e), "IPsec") {
		return string(e)
	}
	return "IPsec: " + string(e)
}

// noDriver is the driver while nothing requires IPsec.
type noDriver struct{}

var errNoDriver = errors.New("no driver runs")

func (noDriver) Name() string                  { return "none" }
func (noDriver) Check(context.Context) []error { return []error{errNoDriver} }
func (noDriver) Close() error                  { return nil }

func (noDriver) Look(context.Context, ipsec.Flow) (ipsec.Protection, error) {
	return ipsec.Protection{}, errNoDriver
}

func (noDriver) Watch(ctx context.Context, _ func(ipsec.Change)) error {
	<-ctx.Done()
	return nil
}

func newProtection(d *Daemon, hooks ipsecHooks) *protection {
	x := &protection{
		d: d, ipsecHooks: defaultIPsecHooks, driver: noDriver{}, borrowed: d.received != nil, profiles: map[string]*ipsec.Profile{},
		conns: map[ipsec.Flow]*guarded{}, denials: map[denial]uint64{},
	}
	if hooks.newDriver != nil {
		x.ipsecHooks = hooks
	}
	x.guard = ipsec.NewGuard(x.driver, ipsec.Options{})
	x.blocks = x.ipsecHooks.blocks(x.unblocked)
	return x
}

// options returns those of the Guard.
func (x *protection) options(c *config.IPsec) ipsec.Options {
	o := ipsec.Options{Timeout: callTime(c), Grace: c.Grace, Patience: c.DriverTimeout, Failed: x.failed, Answers: x.answers, NoKeys: x.noKeys}
	if c.Driver == exec.Name {
		o.Timeout = c.Exec.Timeout + execSlack
	}
	return o
}

// callTime returns the time of one call of a driver other than exec. Two calls must fail before a session has no answer.
func callTime(c *config.IPsec) time.Duration {
	return cmp.Or(c.DriverTimeout, driverTimeout) / 2
}

// unblocked reports that the kernel refuses a policy that blocks clear text.
func (x *protection) unblocked(err error) {
	x.d.log.Error("IPsec policies are missing", eventKey, "ipsec", "reason", err)
}

// failed reports that the driver begins to fail. Sessions that are protected stay for the time of ipsec.Options.Unanswered.
func (x *protection) failed(err error) {
	x.d.log.Error("IPsec driver failed", eventKey, "ipsec", "reason", err)
}

// answers reports that the driver answers again.
func (x *protection) answers() {
	x.d.log.Info("IPsec driver answers again", eventKey, "ipsec")
}

// noKeys reports that the driver could not negotiate keys.
func (x *protection) noKeys(f ipsec.Flow, err error) {
	x.d.log.Warn("IPsec keys not negotiated", eventKey, "ipsec", "remote", f.Remote, "local", f.Local, "reason", err)
}

// use makes the driver of cfg the one that answers, unless it is already. It fails if that lacks something to enforce what cfg
// requires. After an error the driver is what it was.
func (x *protection) use(cfg *config.Config) error {
	if err := x.useDriver(cfg); err != nil {
		return err
	}
	if err := x.blocks.Add(blockedBy(cfg)); err != nil {
		return fmt.Errorf("%s: required, but it cannot be enforced: %w", firstRequired(cfg), err)
	}
	return nil
}

// goBack undoes use for a change that failed: before is the configuration that runs.
func (x *protection) goBack(before *config.Config) error {
	return errors.Join(x.use(before), x.blocks.Keep(blockedBy(before)))
}

// useDriver does what use says about drivers.
func (x *protection) useDriver(cfg *config.Config) error {
	x.mu.Lock()
	old, settings := x.driver, x.settings
	x.mu.Unlock()
	if !cfg.UsesIPsec() {
		return nil // retire ends the driver when the change is complete
	}
	if _, none := old.(noDriver); !none {
		if sameDriver(&settings, &cfg.IPsec) {
			if err := x.check(old, cfg); err != nil {
				return err
			}
			x.install(old, cfg.IPsec)
			return nil
		}
		// It has to remove what it installed before the next one installs the same.
		if err := closeDriver(old, x.options(&settings).Timeout); err != nil {
			x.d.log.Warn("IPsec driver did not end cleanly", eventKey, "ipsec", "reason", err)
		}
	}
	driver, err := x.newDriver(cfg)
	if err != nil {
		err = fmt.Errorf("ipsec.driver: %s: %w", cfg.IPsec.Driver, err)
	} else if err = x.check(driver, cfg); err != nil {
		err = errors.Join(err, x.discard(driver, checkTime))
	}
	if err != nil {
		return errors.Join(err, x.restore(old, settings))
	}
	x.install(driver, cfg.IPsec)
	return nil
}

// restore makes a driver again that use has closed.
func (x *protection) restore(old ipsec.Driver, settings config.IPsec) error {
	if _, none := old.(noDriver); none {
		return nil
	}
	driver, err := x.newDriver(&config.Config{IPsec: settings})
	if err != nil {
		return err
	}
	x.install(driver, settings)
	return nil
}

// sameDriver reports whether a and b need no other driver.
func sameDriver(a, b *config.IPsec) bool {
	return a.Driver == b.Driver && a.VICI == b.VICI && (a.Driver != "vici" || a.DriverTimeout == b.DriverTimeout) && reflect.DeepEqual(a.Exec, b.Exec) && reflect.DeepEqual(a.Static, b.Static)
}

// check asks what the driver lacks. That is an error if cfg requires protection, and a warning if it only audits.
func (x *protection) check(driver ipsec.Driver, cfg *config.Config) error {
	lacks := checkDriver(driver, max(x.options(&cfg.IPsec).Timeout, checkTime))
	var texts []string
	for _, err := range lacks {
		texts = append(texts, err.Error())
	}
	if len(lacks) > 0 && cfg.RequiresIPsec() {
		return fmt.Errorf("%s: required, but it cannot be enforced: %w", firstRequired(cfg), errors.Join(lacks...))
	}
	x.mu.Lock()
	x.missing = texts
	x.mu.Unlock()
	for _, text := range texts {
		x.d.log.Warn("IPsec cannot be enforced", eventKey, "ipsec", "driver", driver.Name(), "reason", text)
	}
	return nil
}

// checkDriver returns what a driver lacks, within a time limit.
func checkDriver(driver ipsec.Driver, limit time.Duration) []error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	done := make(chan []error, 1)
	go func() { done <- driver.Check(ctx) }()
	select {
	case lacks := <-done:
		return lacks
	case <-ctx.Done():
		return []error{fmt.Errorf("driver %s: no answer within %v", driver.Name(), limit)}
	}
}

// firstRequired returns the first key that requires protection.
func firstRequired(cfg *config.Config) string {
	if i := slices.IndexFunc(cfg.Portals, func(p config.Portal) bool { return p.Demand() == ipsec.Required }); i >= 0 {
		return fmt.Sprintf("portals[%d].ipsec", i)
	}
	i := slices.IndexFunc(cfg.Targets, func(t config.Target) bool { return t.Demand() == ipsec.Required })
	return fmt.Sprintf("targets[%d].ipsec", i)
}

// install makes driver the one that answers.
func (x *protection) install(driver ipsec.Driver, settings config.IPsec) {
	x.mu.Lock()
	same := x.driver == driver && x.settings.Grace == settings.Grace && x.settings.DriverTimeout == settings.DriverTimeout
	x.driver, x.settings = driver, settings
	x.mu.Unlock()
	if !same {
		x.guard.Use(driver, x.options(&settings)) // the one before has ended, or is the same
	}
}

// drop ends the driver, which nothing needs any longer.
func (x *protection) drop() error {
	x.mu.Lock()
	driver, limit := x.driver, x.options(&x.settings).Timeout
	x.driver, x.settings, x.missing = noDriver{}, config.IPsec{}, nil
	x.mu.Unlock()
	x.guard.Use(noDriver{}, ipsec.Options{})
	return x.discard(driver, limit)
}

// blockedBy returns the addresses whose packets leave only if a policy takes them, which are those of portals under required.
func blockedBy(cfg *config.Config) []netip.AddrPort {
	return portalAddresses(cfg, true)
}

// portalAddresses returns the addresses of the portals that are blocked, or of those that are not. Those on all addresses have one for each family.
func portalAddresses(cfg *config.Config, blocked bool) (list []netip.AddrPort) {
	for _, p := range cfg.Portals {
		if (p.Demand() == ipsec.Required && cfg.IPsec.Drops()) != blocked {
			continue
		}
		a, err := net.ResolveTCPAddr("tcp", p.Listen)
		switch {
		case err != nil || a.Port == 0: // it cannot be opened, or is on the loopback alone
		case everywhere(p.Listen):
			port := uint16(a.Port)
			list = append(list, netip.AddrPortFrom(netip.IPv4Unspecified(), port), netip.AddrPortFrom(netip.IPv6Unspecified(), port))
		default:
			list = append(list, plainAddr(a))
		}
	}
	return list
}

// discard ends a driver, within a time limit. What a process before this one has installed stays if this one has never served, because
// that process may continue: an SA that is installed again begins with sequence numbers that the peer has seen.
func (x *protection) discard(driver ipsec.Driver, limit time.Duration) error {
	x.mu.Lock()
	borrowed := x.borrowed
	x.mu.Unlock()
	if d, ok := driver.(detacher); ok && borrowed {
		if err := d.Detach(); err != nil {
			return err
		}
	}
	return closeDriver(driver, limit)
}

// closeDriver closes a driver, within a time limit.
func closeDriver(driver ipsec.Driver, limit time.Duration) error {
	done := make(chan error, 1)
	go func() { done <- driver.Close() }()
	select {
	case err := <-done:
		return err
	case <-time.After(limit):
		return fmt.Errorf("ipsec.driver: %s did not end within %v", driver.Name(), limit)
	}
}

// close ends the driver, the Guard and the policies.
func (x *protection) close() error {
	x.mu.Lock()
	leave := x.left || x.borrowed
	x.mu.Unlock()
	return errors.Join(x.drop(), x.guard.Close(), x.blocks.Close(leave))
}

// apply makes cfg, which runs now, what is required of the connections that there are. It ends the driver if nothing needs one.
func (x *protection) apply(cfg *config.Config) {
	x.mu.Lock()
	x.borrowed = false
	list := slices.Collect(maps.Values(x.conns))
	x.mu.Unlock()
	for _, g := range list {
		x.require(cfg, g)
	}
	if err := x.blocks.Keep(blockedBy(cfg)); err != nil {
		x.unblocked(err)
	}
	if cfg.UsesIPsec() {
		return
	}
	if err := x.drop(); err != nil {
		x.d.log.Warn("IPsec driver did not end cleanly", eventKey, "ipsec", "reason", err)
	}
}

// require makes cfg what is required of one connection.
func (x *protection) require(cfg *config.Config, g *guarded) {
	g.mu.Lock()
	w, claim := g.watched, g.claim
	g.mu.Unlock()
	if w == nil {
		return // its accept finds cfg
	}
	portal, target := x.needs(cfg, g.portal.cur.Load().cfg, claim)
	before := w.Demand()
	w.Require(portal, target)
	if before == ipsec.Required && w.Demand() != ipsec.Required {
		x.unpin(g)
	}
	if before == ipsec.Off && w.Demand() != ipsec.Off { // nothing was asked about it so far
		go x.begin(g, w, claim, target, x.options(&cfg.IPsec))
	}
}

// beginPause is the time between two questions about a connection whose keys may come back.
const beginPause = 500 * time.Millisecond

// begin judges a connection that was not judged before, and ends it if that denies it. Without keys it has the time of grace, and without an answer of the driver
// that of ipsec.Options.Unanswered: the process that accepted the connection may have had an answer a moment ago.
func (x *protection) begin(g *guarded, w *ipsec.Watched, claim iscsi.Claim, target ipsec.Need, o ipsec.Options) {
	ctx, began := g.n.ctx, time.Now()
	last, cancel := context.WithDeadline(ctx, began.Add(o.Unanswered()))
	defer cancel()
	for {
		v := w.Login(last, claim.Initiator, claim.Target, target)
		end := began.Add(o.Grace)
		if v.Class == ipsec.ClassDriver {
			end = began.Add(o.Unanswered())
		}
		switch {
		case v.Action != ipsec.Deny || ctx.Err() != nil:
			return
		case v.Class != ipsec.ClassKeys && v.Class != ipsec.ClassDriver || !time.Now().Before(end):
			x.end(g, v.Reason)
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(beginPause, time.Until(end))):
		}
	}
}

// profile returns the profile of that name. The same profile has the same address.
func (x *protection) profile(cfg *config.Config, name string) *ipsec.Profile {
	p := cfg.IPsec.Profile(name)
	x.mu.Lock()
	defer x.mu.Unlock()
	if old := x.profiles[name]; old != nil && reflect.DeepEqual(old, p) {
		return old
	}
	x.profiles[name] = p
	return p
}

// needs returns what cfg requires of a connection through a portal, and of a session.
func (x *protection) needs(cfg *config.Config, pc config.Portal, c iscsi.Claim) (portal, target ipsec.Need) {
	if next := portalOf(cfg, pc.Listen); next != nil {
		pc = *next
	}
	if pc.Demand() != ipsec.Off {
		portal = ipsec.Need{Demand: pc.Demand(), Profile: x.profile(cfg, pc.IPsecProfile)}
	}
	if t := targetOf(cfg, c.Target); t != nil && t.Demand() != ipsec.Off {
		target = ipsec.Need{Demand: t.Demand(), Profile: x.profile(cfg, t.IPsecProfile)}
	}
	return portal, target
}

// add makes the connection of n known. leave forgets it.
func (x *protection) add(p *portal, n *newcomer, nc net.Conn) *guarded {
	g := &guarded{flow: flowBetween(nc.LocalAddr(), nc.RemoteAddr()), portal: p, n: n}
	if c, ok := nc.(syscall.Conn); ok {
		g.raw, _ = c.SyscallConn() // without one it cannot be pinned, which pin reports
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.conns[g.flow] = g
	return g
}

func (x *protection) leave(g *guarded) {
	g.mu.Lock()
	w := g.watched
	g.mu.Unlock()
	w.Close()
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.conns[g.flow] == g {
		delete(x.conns, g.flow)
	}
}

func flowBetween(local, remote net.Addr) ipsec.Flow {
	return ipsec.Flow{Local: plainAddr(local), Remote: plainAddr(remote)}
}

// plainAddr returns a without a zone, and as IPv4 if it is IPv4 in IPv6.
func plainAddr(a net.Addr) netip.AddrPort {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := t.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap().WithZone(""), ap.Port())
}

// accept judges a connection before a byte is answered.
func (x *protection) accept(g *guarded) error {
	g.cfg = x.d.Effective()
	portal, _ := x.needs(g.cfg, g.portal.cur.Load().cfg, iscsi.Claim{})
	return x.refusal(ipsec.AtAccept, x.watch(g, portal))
}

// watch lets the Guard judge a connection for the first time.
func (x *protection) watch(g *guarded, portal ipsec.Need) ipsec.Verdict {
	w, v := x.guard.Accept(g.n.ctx, ipsec.Connection{
		Flow:    g.flow,
		End:     func(reason string) { x.end(g, reason) },
		Changed: func(before, now ipsec.Verdict) { x.report(g, before, now) },
		Pin:     func(sa ipsec.SA) error { return x.pinTo(g, sa) },
	}, portal)
	g.mu.Lock()
	g.watched = w
	g.mu.Unlock()
	return v
}

// authorize judges a connection at its login.
func (x *protection) authorize(g *guarded, claim iscsi.Claim) error {
	g.mu.Lock()
	g.claim = claim
	w, known := g.watched, g.cfg
	g.mu.Unlock()
	for {
		cfg := x.d.Effective()
		portal, target := x.needs(cfg, g.portal.cur.Load().cfg, claim)
		if cfg != known {
			w.Require(portal, target)
		}
		known = cfg
		v := w.Login(g.n.ctx, claim.Initiator, claim.Target, target)
		if v.Action == ipsec.Deny || x.d.Effective() == cfg { // otherwise a change has run, and apply may have been before Login
			return x.refusal(ipsec.AtLogin, v)
		}
	}
}

// refusal returns why a verdict refuses a connection, and counts that; nil: it does not.
func (x *protection) refusal(m ipsec.Moment, v ipsec.Verdict) error {
	if v.Action != ipsec.Deny {
		return nil
	}
	x.count(m, v)
	return unprotectedError(v.Reason)
}

// resume makes a connection known that another process has accepted. apply lets it be judged.
func (x *protection) resume(g *guarded, claim iscsi.Claim) {
	g.claim = claim
	x.watch(g, ipsec.Need{})
}

// pinTo lets the kernel send packets of a connection through sa only.
func (x *protection) pinTo(g *guarded, sa ipsec.SA) error {
	if g.raw == nil {
		return errors.New("the connection has no socket")
	}
	return onSocket(g.raw, func(fd int) error { return x.pin(fd, familyOf(g.flow), sa) })
}

// unpin ends what pinTo has set.
func (x *protection) unpin(g *guarded) {
	if g.raw == nil {
		return
	}
	if err := onSocket(g.raw, func(fd int) error { return x.clear(fd, familyOf(g.flow)) }); err != nil {
		x.d.log.Warn("IPsec policy of a socket stays", eventKey, "ipsec", "remote", g.flow.Remote, "local", g.flow.Local, "reason", err)
	}
}

// onSocket calls f with the descriptor of a socket.
func onSocket(raw syscall.RawConn, f func(fd int) error) error {
	var err error
	cerr := raw.Control(func(fd uintptr) { err = f(int(fd)) })
	return errors.Join(cerr, err)
}

// familyOf returns the address family of the packets of a flow.
func familyOf(f ipsec.Flow) int {
	if f.Local.Addr().Is4() {
		return syscall.AF_INET
	}
	return syscall.AF_INET6
}

// report logs that the protection of a connection has changed. New keys for old ones are not worth a line.
func (x *protection) report(g *guarded, before, now ipsec.Verdict) {
	before.SPIIn, before.SPIOut = now.SPIIn, now.SPIOut
	if before == now {
		return
	}
	g.mu.Lock()
	claim := g.claim
	g.mu.Unlock()
	attrs := []any{eventKey, "ipsec", "remote", g.flow.Remote, "local", g.flow.Local, "initiator", claim.Initiator, "target", claim.Target}
	for _, a := range verdictAttrs(now) {
		attrs = append(attrs, a)
	}
	switch log := x.d.log; {
	case now.Action == ipsec.Deny:
		log.Warn("IPsec protection is gone: the connection ends", attrs...)
	case now.KeysGone:
		log.Warn("IPsec keys are gone", attrs...)
	case now.Action == ipsec.Mark:
		log.Warn("IPsec protection is not as required", attrs...)
	default:
		log.Info("IPsec protection changed", attrs...)
	}
}

// verdictAttrs returns what lines of log say about the protection of a connection.
func verdictAttrs(v ipsec.Verdict) (attrs []slog.Attr) {
	add := func(key, value string) {
		if value != "" {
			attrs = append(attrs, slog.String(key, value))
		}
	}
	add("ipsec", string(v.Action))
	add("suite", v.Suite)
	if v.SPIIn != 0 || v.SPIOut != 0 {
		attrs = append(attrs, slog.String("spi_in", spi(v.SPIIn)), slog.String("spi_out", spi(v.SPIOut)))
	}
	add("identity", v.Identity)
	add("ipsec_reason", v.Reason)
	return attrs
}

func spi(n uint32) string { return fmt.Sprintf("0x%08x", n) }

// end ends a connection.
func (x *protection) end(g *guarded, reason string) {
	g.mu.Lock()
	v := g.watched.Verdict()
	g.mu.Unlock()
	x.count(ipsec.AtChange, v)
	err := unprotectedError(reason)
	if !x.d.node.EndConnection(g.flow.Local, g.flow.Remote, err) {
		g.n.displace(err) // its first byte has not come
	}
}

func (x *protection) count(m ipsec.Moment, v ipsec.Verdict) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.denials[denial{m, v.Class}]++
}

// known returns the connection between these addresses, or nil.
func (x *protection) known(local, remote net.Addr) *guarded {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.conns[flowBetween(local, remote)]
}

// now returns the verdict about a connection, which may be nil, and what is required of it.
func (g *guarded) now() (ipsec.Verdict, ipsec.Demand) {
	if g == nil {
		return ipsec.Verdict{}, ipsec.Off
	}
	g.mu.Lock()
	w := g.watched
	g.mu.Unlock()
	return w.Verdict(), w.Demand()
}

// encrypted reports whether IPsec encrypts the connection, and keeps clear text out.
func (g *guarded) encrypted() bool {
	v, demand := g.now()
	return demand == ipsec.Required && v.Action == ipsec.Permit && encrypts(v.Suite)
}

// encrypts reports whether a Verdict.Suite encrypts.
func encrypts(suite string) bool {
	return slices.ContainsFunc(strings.Fields(suite), func(word string) bool {
		s, err := ipsec.ParseSuite(word)
		return err == nil && s.Encrypts()
	})
}

// forecast returns, for a change to cfg, why connections would end. It asks the driver, so the caller holds no locks.
func (x *protection) forecast(ctx context.Context, cfg *config.Config) map[ipsec.Flow]string {
	if !changesIPsec(x.d.Effective(), cfg) || !cfg.UsesIPsec() {
		return nil
	}
	x.mu.Lock()
	guard, settings := x.guard, x.settings
	list := slices.Collect(maps.Values(x.conns))
	x.mu.Unlock()
	if !sameDriver(&settings, &cfg.IPsec) {
		guard = nil // which denies all
		if cfg.IPsec.Driver != "static" {
			if other, err := x.newDriver(cfg); err == nil {
				guard = ipsec.NewGuard(other, ipsec.Options{Timeout: x.options(&cfg.IPsec).Timeout})
				defer guard.Close()
			}
		}
	}
	var (
		mu   sync.Mutex
		wg   sync.WaitGroup
		ends = map[ipsec.Flow]string{}
	)
	slots := make(chan struct{}, maxForecasts)
	for _, g := range list {
		g.mu.Lock()
		claim := g.claim
		g.mu.Unlock()
		portal, target := x.needs(cfg, g.portal.cur.Load().cfg, claim)
		for _, need := range []ipsec.Need{portal, target} {
			if need.Demand != ipsec.Required {
				continue
			}
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				q := ipsec.Question{Moment: ipsec.AtChange, Flow: g.flow, Initiator: claim.Initiator, Target: claim.Target, Demand: need.Demand, Profile: need.Profile}
				if v := guard.Ask(ctx, q); v.Action == ipsec.Deny {
					mu.Lock()
					ends[g.flow] = unprotectedError(v.Reason).Error()
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	return ends
}

// changesIPsec reports whether a and b differ in what they require of IPsec.
func changesIPsec(a, b *config.Config) bool {
	return slices.ContainsFunc(config.Diff(withoutLUNs(a), withoutLUNs(b)), isIPsec)
}

// withoutLUNs returns a copy of c without LUNs: to compare thousands takes time, and none requires IPsec.
func withoutLUNs(c *config.Config) *config.Config {
	next := *c
	next.Targets = slices.Clone(c.Targets)
	for i := range next.Targets {
		next.Targets[i].LUNs = nil
	}
	return &next
}

// isIPsec reports whether ch changes what is required of IPsec.
func isIPsec(ch config.Change) bool {
	return ch.Kind == config.KindIPsec || ch.Op == config.Update && (ch.Key == "ipsec" || ch.Key == "ipsec_profile")
}

// endsBy returns which sessions the change ends by a forecast; nil: none. p is the portal that ch is about, or nil.
func endsBy(ch config.Change, forecast map[ipsec.Flow]string, p *portal) func(*iscsi.SessionInfo) bool {
	if len(forecast) == 0 || !isIPsec(ch) {
		return nil
	}
	return func(s *iscsi.SessionInfo) bool {
		about := ch.Kind == config.KindIPsec || ch.Kind == config.KindTarget && s.Target == ch.Target || ch.Kind == config.KindPortal && p != nil && p.carries(s)
		return about && forecastOf(s, forecast) != ""
	}
}

// forecastOf returns why s would end, or "".
func forecastOf(s *iscsi.SessionInfo, forecast map[ipsec.Flow]string) string {
	for _, c := range s.Conns {
		if reason := forecast[flowBetween(c.Local, c.Remote)]; reason != "" {
			return reason
		}
	}
	return ""
}
