package daemon

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/security"
)

// Explain returns whether the target would admit an initiator through a portal, and why.
// from is the address that the initiator connects from; empty: one of a network of the target.
// by is the portal's listen address in the configuration or the address of a connection;
// empty: the first portal that leads to the target. Explain does not check secrets: it
// only says that a login requires CHAP.
func (d *Daemon) Explain(initiator, target, portal, from string) schema.Explanation {
	e := &explaining{Explanation: schema.Explanation{Rules: []schema.Rule{}}}
	d.locked(func() {
		e.cfg = d.served.cfg
		if e.run(d, initiator, target, portal, from) {
			e.Admitted, e.Status = true, pdu.LoginSuccess.String()
		}
	})
	d.ipsec.explain(e, from) // which asks the driver
	return e.Explanation
}

// An explaining is an Explanation in progress.
type explaining struct {
	schema.Explanation
	cfg       *config.Config
	initiator string         // normalized
	target    string         // the same
	portal    *config.Portal // nil: none was found
	listen    net.Addr       // of the portal
	at        int            // index of the next rule about IPsec
}

// insert adds a rule about IPsec. One that has not passed is the last one.
func (e *explaining) insert(name string, passed bool, why string, a ...any) {
	r := schema.Rule{Rule: name, Passed: passed, Why: fmt.Sprintf(why, a...)}
	if !passed {
		e.Rules, e.LUNs = e.Rules[:e.at], nil
		e.Admitted, e.Status = false, pdu.LoginAuthorization.String()
	}
	e.Rules = slices.Insert(e.Rules, e.at, r)
	e.at++
}

// rule adds a rule. If it has not passed, its status is that of the Explanation.
func (e *explaining) rule(name string, passed bool, status pdu.LoginStatus, why string, a ...any) bool {
	e.Rules = append(e.Rules, schema.Rule{Rule: name, Passed: passed, Why: fmt.Sprintf(why, a...)})
	if !passed {
		e.Status = status.String()
	}
	return passed
}

// run applies the rules of a login (package iscsi, login.identify) and returns whether
// they admit it.
func (e *explaining) run(d *Daemon, initiator, target, by, from string) bool {
	name, err := security.NormalizeName(initiator)
	if err != nil {
		return e.rule("initiator name", false, pdu.LoginInitiatorError, "%v", err)
	}
	e.rule("initiator name", true, 0, "%s is a valid name", name)
	tname, err := security.NormalizeName(target)
	if err != nil {
		return e.rule("target name", false, pdu.LoginNotFound, "%v", err)
	}
	t := targetOf(e.cfg, tname)
	if t == nil {
		return e.rule("target", false, pdu.LoginNotFound, "target %s does not exist", tname)
	}
	e.rule("target", true, 0, "%s is served", tname)
	i := slices.IndexFunc(d.served.portals, func(p *portal) bool {
		cur := p.cur.Load()
		return by == "" && t.ServedBy(cur.cfg) || by != "" && (cur.cfg.Listen == by || p.l.Addr().String() == by || covers(p.l.Addr(), by))
	})
	if i < 0 {
		if by == "" {
			return e.rule("portal", false, pdu.LoginNotFound, "no portal leads to the target")
		}
		return e.rule("portal", false, pdu.LoginNotFound, "portal %s does not exist", by)
	}
	p := d.served.portals[i].cur.Load()
	if !t.ServedBy(p.cfg) {
		return e.rule("portal group", false, pdu.LoginNotFound, "portal %s is in portal group %d, but the target uses %s", p.cfg.Listen, p.cfg.TPGT, groups(t.PortalGroups))
	}
	speaks := p.cfg.Transports
	if len(speaks) == 0 {
		speaks = []string{string(transportISER), string(transportTCP)}
	}
	e.rule("portal group", true, 0, "portal %s, in portal group %d, leads to the target, over %s", p.cfg.Listen, p.cfg.TPGT, strings.Join(speaks, " and "))
	e.initiator, e.target, e.portal, e.listen, e.at = name, tname, &p.cfg, d.served.portals[i].l.Addr(), len(e.Rules)
	pattern := matching(t.Initiators, name)
	if pattern == "" {
		return e.rule("initiators", false, pdu.LoginAuthorization, "no pattern of the target matches: %s", list(t.Initiators))
	}
	e.rule("initiators", true, 0, "%q matches", pattern)
	if !e.networks(t.Networks, from) {
		return false
	}
	if t.Redirect.To != "" {
		status := pdu.LoginMovedTemporarily
		if t.Redirect.Permanent {
			status = pdu.LoginMovedPermanently
		}
		return e.rule("redirect", false, status, "the target has moved to %s", t.Redirect.To)
	}
	if !e.chap(&t.Auth, name) {
		return false
	}
	for i := range t.LUNs {
		e.LUNs = append(e.LUNs, view(&t.LUNs[i], name))
	}
	return true
}

// covers reports whether a listener on all addresses of the machine accepts connections to address.
func covers(listen net.Addr, address string) bool {
	at, err := netip.ParseAddrPort(address)
	l, ok := listen.(*net.TCPAddr)
	return err == nil && ok && l.IP.IsUnspecified() && l.Port == int(at.Port()) && (l.IP.To4() == nil || at.Addr().Unmap().Is4())
}

// networks adds the rule about the address of the initiator.
func (e *explaining) networks(list []string, from string) bool {
	if len(list) == 0 {
		return true
	}
	networks := strings.Join(list, ", ")
	if from == "" {
		return e.rule("networks", true, 0, "connections from %s are admitted", networks)
	}
	at, err := netip.ParseAddr(from)
	if err != nil {
		return e.rule("networks", false, pdu.LoginAuthorization, "%.80q is not an address", from)
	}
	for _, one := range list {
		if n, err := security.ParseNetworks([]string{one}); err == nil && n.Admit(at) {
			return e.rule("networks", true, 0, "%s is in %s", from, one)
		}
	}
	return e.rule("networks", false, pdu.LoginAuthorization, "%s is in none of %s", from, networks)
}

// chap adds the rule about CHAP users for the initiator.
func (e *explaining) chap(a *config.Auth, initiator string) bool {
	if a.Method != "chap" {
		return e.rule("authentication", true, 0, "not required")
	}
	var users []string
	for _, u := range a.Users {
		if u.Initiator == "" || matches(u.Initiator, initiator) {
			users = append(users, u.Name)
		}
	}
	if len(users) == 0 {
		return e.rule("authentication", false, pdu.LoginAuthentication, "CHAP is required, and no user is for this initiator")
	}
	return e.rule("authentication", true, 0, "CHAP is required: user %s, with the right secret", strings.Join(users, " or "))
}

// view returns l as the initiator sees it.
func view(l *config.LUN, initiator string) schema.LUNView {
	v := schema.LUNView{ID: l.ID, Access: "read and write", Why: "the LUN is for all initiators of the target"}
	if p := matching(l.Initiators, initiator); p != "" {
		v.Why = fmt.Sprintf("initiators: %q matches", p)
	}
	switch maskOf(*l)(initiator) {
	case lun.NoAccess:
		return schema.LUNView{ID: l.ID, Access: "none", Why: "initiators: no match in " + list(l.Initiators)}
	case lun.ReadOnly:
		return schema.LUNView{ID: l.ID, Access: "read only", Why: fmt.Sprintf("read_only_for: %q matches", matching(l.ReadOnlyFor, initiator))}
	}
	if l.ReadOnly {
		v.Access, v.Why = "read only", "read_only is set"
	}
	return v
}

// matching returns the first of the patterns that matches a normalized name, or "".
func matching(patterns []string, name string) string {
	i := slices.IndexFunc(patterns, func(p string) bool { return matches(p, name) })
	if i < 0 {
		return ""
	}
	return patterns[i]
}

// matches reports whether a valid pattern matches a normalized name.
func matches(pattern, name string) bool {
	p, err := security.Compile([]string{pattern})
	return err == nil && p.Match(name)
}

// list joins patterns.
func list(patterns []string) string {
	if len(patterns) == 0 {
		return "it has no pattern"
	}
	return strings.Join(patterns, ", ")
}

// groups joins portal groups.
func groups(list []int) string {
	words := make([]string, len(list))
	for i, g := range list {
		words[i] = strconv.Itoa(g)
	}
	return "portal group " + strings.Join(words, ", ")
}
