package daemon

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/iser-target/iser-target/cmd/iser-target/metrics"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/security/ipsec"
	"github.com/iser-target/iser-target/security/ipsec/exec"
)

// protectionState returns how IPsec protects a connection; nil: nothing is required of it.
func (x *protection) protectionState(g *guarded) *schema.ConnectionProtection {
	v, demand := g.now()
	if demand == ipsec.Off {
		return nil
	}
	p := &schema.ConnectionProtection{Demand: string(demand), Verdict: string(v.Action), Suite: v.Suite, Identity: v.Identity, Reason: v.Reason, Class: string(v.Class)}
	if v.SPIIn != 0 {
		p.SPIIn = spi(v.SPIIn)
	}
	if v.SPIOut != 0 {
		p.SPIOut = spi(v.SPIOut)
	}
	return p
}

// IPsec returns what is known about IPsec: the driver and what it lacks, what is required, and what covers each connection. It waits for the driver up
// to the time limit of a call.
func (d *Daemon) IPsec() schema.IPsecState {
	x := d.ipsec
	cfg := d.Effective()
	x.mu.Lock()
	st := schema.IPsecState{
		Driver: x.driver.Name(), Grace: config.FormatDuration(cfg.IPsec.Grace), Unanswered: config.FormatDuration(x.options(&cfg.IPsec).Unanswered()),
		Portals: []schema.IPsecPortal{}, Connections: []schema.IPsecConnection{},
	}
	missing := x.missing
	list := slices.Collect(maps.Values(x.conns))
	for dn, n := range x.denials {
		st.Denials = append(st.Denials, schema.IPsecDenials{Moment: string(dn.Moment), Reason: string(dn.Reason), Count: n})
	}
	x.mu.Unlock()
	slices.SortFunc(st.Denials, func(a, b schema.IPsecDenials) int {
		return strings.Compare(a.Moment+a.Reason, b.Moment+b.Reason)
	})
	stats := x.guard.Stats()
	st.Notices, st.Failures = stats.Notices, stats.Failures
	st.Missing = missing
	failure := x.guard.Trouble()
	if cfg.UsesIPsec() {
		st.Missing = nil
		lacks, err := x.guard.Check(context.Background())
		for _, err := range lacks {
			st.Missing = append(st.Missing, err.Error())
		}
		if err != nil {
			failure = err
		}
	}
	d.locked(func() {
		for _, p := range d.served.portals {
			c := p.cur.Load().cfg
			ps := schema.IPsecPortal{Listen: c.Listen, Demand: string(c.Demand()), Policy: c.Demand() == ipsec.Required, Sockets: []string{}}
			if c.Demand() != ipsec.Off {
				ps.Profile = cfg.IPsec.Profile(c.IPsecProfile).Name
			}
			for _, l := range p.listeners() {
				ps.Sockets = append(ps.Sockets, l.Addr().String())
			}
			st.Portals = append(st.Portals, ps)
		}
	})
	for _, t := range cfg.Targets {
		if t.Demand() != ipsec.Off {
			st.Targets = append(st.Targets, schema.IPsecTarget{Name: t.Name, Demand: string(t.Demand()), Profile: cfg.IPsec.Profile(t.IPsecProfile).Name})
		}
	}
	connections, err := x.connectionStates(list, failure == nil || !errors.Is(failure, ipsec.ErrSlow))
	if err != nil {
		failure = err
	}
	st.Connections = append(st.Connections, connections...)
	st.Failure = failureText(st.Driver, failure)
	return st
}

// failureText returns how a driver fails, with what to do about it; "": it does not.
func failureText(driver string, err error) string {
	switch {
	case err == nil:
		return ""
	case !errors.Is(err, ipsec.ErrSlow): // the driver says what to do
		return err.Error()
	}
	remedy := "Look for what the kernel waits for: ip xfrm state; dmesg"
	switch driver {
	case "vici":
		remedy = "Run: systemctl restart strongswan"
	case exec.Name:
		remedy = "Run the program of ipsec.exec.command by hand, and correct it, or raise ipsec.exec.timeout"
	}
	return fmt.Sprintf("%v. %s", err, remedy)
}

// connectionStates returns what covers the connections of which something is required. Those that the driver says nothing about in
// time, or without asking it, are Unknown.
func (x *protection) connectionStates(list []*guarded, ask bool) (states []schema.IPsecConnection, err error) {
	tsihs := map[ipsec.Flow]uint16{}
	for _, s := range x.d.node.Sessions() {
		for _, c := range s.Conns {
			tsihs[flowBetween(c.Local, c.Remote)] = s.TSIH
		}
	}
	cfg := x.d.Effective()
	var flows []ipsec.Flow
	var needs [][]ipsec.Need
	for _, g := range list {
		p := x.protectionState(g)
		if p == nil {
			continue
		}
		g.mu.Lock()
		claim := g.claim
		g.mu.Unlock()
		flows = append(flows, g.flow)
		portal, target := x.needs(cfg, g.portal.cur.Load().cfg, claim)
		needs = append(needs, []ipsec.Need{portal, target})
		states = append(states, schema.IPsecConnection{
			TSIH: tsihs[g.flow], Initiator: claim.Initiator, Target: claim.Target, Portal: g.portal.cur.Load().cfg.Listen,
			Local: g.flow.Local.String(), Remote: g.flow.Remote.String(), ConnectionProtection: *p,
		})
	}
	found := map[int]ipsec.Protection{}
	if ask && len(flows) > 0 {
		found, err = x.guard.Look(context.Background(), flows)
	}
	for i := range states {
		p, known := found[i]
		states[i].Unknown = !known
		states[i].InPolicy, states[i].OutPolicy = p.InPolicy, p.OutPolicy
		if known {
			states[i].ESN, states[i].ESNUnsure = esnText(needs[i], p.Link)
		}
		for _, sa := range p.In {
			states[i].SAs = append(states[i].SAs, saState("in", sa))
		}
		for _, sa := range p.Out {
			states[i].SAs = append(states[i].SAs, saState("out", sa))
		}
	}
	slices.SortFunc(states, func(a, b schema.IPsecConnection) int { return strings.Compare(a.Remote, b.Remote) })
	return states, err
}

// esnText returns whether extended sequence numbers are required over an interface, and why. unsure says that none of the profiles requires them, because the interface
// does not say its speed.
func esnText(needs []ipsec.Need, l ipsec.Link) (text string, unsure bool) {
	for _, n := range needs {
		if n.Demand == ipsec.Off || n.Demand == "" {
			continue
		}
		required, why := n.Profile.NeedsESN(l)
		if required {
			return "required (" + why + ")", false
		}
		if text == "" || n.Profile.UnsureESN(l) {
			text = "not required (" + why + ")"
		}
		unsure = unsure || n.Profile.UnsureESN(l)
	}
	return text, unsure
}

func saState(direction string, sa ipsec.SA) schema.IPsecSA {
	s := schema.IPsecSA{
		Direction: direction, SPI: spi(sa.SPI), Source: sa.Source.String(), Destination: sa.Destination.String(), ReqID: sa.ReqID, Suite: sa.String(),
		ReplayWindow: sa.ReplayWindow, Lifetime: sa.Lifetime.Seconds(), IKE: sa.IKE, LocalID: sa.LocalID, RemoteID: sa.RemoteID,
	}
	if sa.Lifetime > 0 && !sa.Added.IsZero() {
		s.Expires = sa.Added.Add(sa.Lifetime)
	}
	return s
}

// ipsecMetrics returns the numbers of the metrics.
func (d *Daemon) ipsecMetrics() metrics.IPsec {
	x := d.ipsec
	stats := x.guard.Stats()
	n := metrics.IPsec{Sessions: map[string]int{"none": 0, "marked": 0}, Denials: map[[2]string]uint64{}, Notices: stats.Notices, Failures: stats.Failures}
	for _, m := range []ipsec.Moment{ipsec.AtAccept, ipsec.AtLogin, ipsec.AtChange} {
		for _, r := range ipsec.Classes {
			n.Denials[[2]string{string(m), string(r)}] = 0
		}
	}
	x.mu.Lock()
	for d, times := range x.denials {
		n.Denials[[2]string{string(d.Moment), string(d.Reason)}] = times
	}
	_, none := x.driver.(noDriver)
	n.Up = !none && x.guard.Trouble() == nil
	x.mu.Unlock()
	for _, s := range d.node.Sessions() {
		if s.Discovery {
			continue
		}
		n.Sessions[x.protectionOf(&s)]++
		for _, c := range s.Conns {
			p := x.protectionState(x.known(c.Local, c.Remote))
			if p == nil {
				continue
			}
			n.Protected = append(n.Protected, metrics.IPsecConnection{
				Target: s.Target, Initiator: s.Initiator, Transport: s.Transport.String(), TSIH: s.TSIH, CID: c.CID,
				Verdict: p.Verdict, Suite: p.Suite, SPIIn: p.SPIIn, SPIOut: p.SPIOut, Identity: p.Identity,
			})
		}
	}
	return n
}

// protectionOf returns how IPsec protects a session, in one word of few: none, marked, or the suite.
func (x *protection) protectionOf(s *iscsi.SessionInfo) string {
	best := "none"
	for _, c := range s.Conns {
		v, demand := x.known(c.Local, c.Remote).now()
		switch {
		case demand == ipsec.Off:
			return "none"
		case v.Action != ipsec.Permit:
			return "marked"
		}
		best = v.Suite
	}
	return best
}

// explain adds the rules about IPsec to an explanation. It asks the driver, so the caller holds no locks.
func (x *protection) explain(e *explaining, from string) {
	if e.portal == nil {
		return
	}
	claim := iscsi.Claim{Initiator: e.initiator, Target: e.target}
	portal, target := x.needs(e.cfg, *e.portal, claim)
	for _, n := range []struct {
		rule string
		need ipsec.Need
	}{{"ipsec of the portal", portal}, {"ipsec of the target", target}} {
		if n.need.Demand == "" || n.need.Demand == ipsec.Off {
			continue
		}
		if from == "" {
			e.insert(n.rule, true, "IPsec is %s, by profile %s; give the address of the initiator to see whether it is protected", n.need.Demand, n.need.Profile.Name)
			continue
		}
		f, err := flowFrom(from, e.listen)
		if err != nil {
			e.insert(n.rule, true, "IPsec is %s, by profile %s; %v", n.need.Demand, n.need.Profile.Name, err)
			continue
		}
		q := ipsec.Question{Moment: ipsec.AtLogin, Flow: f, Initiator: claim.Initiator, Target: claim.Target, Demand: n.need.Demand, Profile: n.need.Profile}
		switch v := x.guard.Ask(context.Background(), q); v.Action {
		case ipsec.Deny:
			e.insert(n.rule, false, "%s", v.Reason)
			return
		case ipsec.Mark:
			e.insert(n.rule, true, "admitted, and marked: %s", v.Reason)
		default:
			text := fmt.Sprintf("%s meets profile %s", strings.TrimSpace(v.Suite+" "+v.Identity), n.need.Profile.Name)
			if found, err := x.guard.Look(context.Background(), []ipsec.Flow{f}); err == nil {
				esn, _ := esnText([]ipsec.Need{n.need}, found[0].Link)
				text += "; extended sequence numbers: " + esn
			}
			e.insert(n.rule, true, "%s", text)
		}
	}
}

// flowFrom returns the flow of a connection from an address to a listener. Its port of the initiator is not known.
func flowFrom(from string, listen net.Addr) (f ipsec.Flow, err error) {
	remote, err := netip.ParseAddr(from)
	if err != nil {
		return f, fmt.Errorf("%.80q is not an address", from)
	}
	remote = remote.Unmap()
	f = ipsec.Flow{Local: plainAddr(listen), Remote: netip.AddrPortFrom(remote.WithZone(""), 0)}
	if !f.Local.Addr().IsUnspecified() {
		return f, nil
	}
	c, err := net.Dial("udp", net.JoinHostPort(remote.String(), "9")) // sends nothing: it only finds a route
	if err != nil {
		return f, fmt.Errorf("no route to %v", remote)
	}
	defer c.Close()
	local, ok := c.LocalAddr().(*net.UDPAddr)
	if !ok {
		return f, fmt.Errorf("no route to %v", remote)
	}
	f.Local = netip.AddrPortFrom(local.AddrPort().Addr().Unmap().WithZone(""), f.Local.Port())
	return f, nil
}
