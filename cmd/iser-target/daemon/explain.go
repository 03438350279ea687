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

// Explain tells whether the initiator of that name would be let in to the target by way
// of the portal (as it is configured, or where it is reached; empty: the first that leads
// there), and what decides it. It knows nothing of secrets: a login that gets as far as
// CHAP is told to have to prove who it is.
func (d *Daemon) Explain(initiator, target, portal string) schema.Explanation {
	d.mu.Lock()
	defer d.mu.Unlock()
	e := &explaining{cfg: d.cfg, Explanation: schema.Explanation{Rules: []schema.Rule{}}}
	if e.run(d, initiator, target, portal) {
		e.Admitted, e.Status = true, pdu.LoginSuccess.String()
	}
	return e.Explanation
}

type explaining struct {
	schema.Explanation
	cfg *config.Config
}

// rule notes what came of a rule; when it has not passed, that is the status.
func (e *explaining) rule(name string, passed bool, status pdu.LoginStatus, why string, a ...any) bool {
	e.Rules = append(e.Rules, schema.Rule{Rule: name, Passed: passed, Why: fmt.Sprintf(why, a...)})
	if !passed {
		e.Status = status.String()
	}
	return passed
}

// run goes the way of a login (package iscsi, login.identify).
func (e *explaining) run(d *Daemon, initiator, target, by string) bool {
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
		return e.rule("target", false, pdu.LoginNotFound, "there is no target %s", tname)
	}
	e.rule("target", true, 0, "%s is served", tname)
	i := slices.IndexFunc(d.portals, func(p *portal) bool {
		cur := p.cur.Load()
		return by == "" && t.ServedBy(cur.cfg) || by != "" && (cur.cfg.Listen == by || p.l.Addr().String() == by || covers(p.l.Addr(), by))
	})
	if i < 0 {
		if by == "" {
			return e.rule("portal", false, pdu.LoginNotFound, "no portal leads to the target")
		}
		return e.rule("portal", false, pdu.LoginNotFound, "there is no portal %s", by)
	}
	p := d.portals[i].cur.Load()
	if !t.ServedBy(p.cfg) {
		return e.rule("portal group", false, pdu.LoginNotFound, "portal %s is in portal group %d; what leads to the target is %s", p.cfg.Listen, p.cfg.TPGT, groups(t.PortalGroups))
	}
	speaks := p.cfg.Transports
	if len(speaks) == 0 {
		speaks = []string{string(transportISER), string(transportTCP)}
	}
	e.rule("portal group", true, 0, "portal %s, in portal group %d, leads to the target, over %s", p.cfg.Listen, p.cfg.TPGT, strings.Join(speaks, " and "))
	at := slices.IndexFunc(t.Initiators, func(pattern string) bool { return matches(pattern, name) })
	if at < 0 {
		return e.rule("initiators", false, pdu.LoginAuthorization, "no pattern of the target matches: %s", list(t.Initiators))
	}
	e.rule("initiators", true, 0, "%q matches", t.Initiators[at])
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

// covers tells whether who listens on all addresses is reached at that one.
func covers(listen net.Addr, address string) bool {
	at, err := netip.ParseAddrPort(address)
	l, ok := listen.(*net.TCPAddr)
	return err == nil && ok && l.IP.IsUnspecified() && l.Port == int(at.Port()) && (l.IP.To4() == nil || at.Addr().Unmap().Is4())
}

// chap looks for a CHAP user that the initiator can be.
func (e *explaining) chap(a *config.Auth, initiator string) bool {
	if a.Method != "chap" {
		return e.rule("authentication", true, 0, "none is asked for")
	}
	var users []string
	for _, u := range a.Users {
		if u.Initiator == "" || matches(u.Initiator, initiator) {
			users = append(users, u.Name)
		}
	}
	if len(users) == 0 {
		return e.rule("authentication", false, pdu.LoginAuthentication, "CHAP is asked for, and no user may be this initiator")
	}
	return e.rule("authentication", true, 0, "CHAP is asked for: as user %s, with the right secret", strings.Join(users, " or "))
}

// view is what the initiator would find.
func view(l *config.LUN, initiator string) schema.LUNView {
	matching := func(patterns []string) string {
		if i := slices.IndexFunc(patterns, func(p string) bool { return matches(p, initiator) }); i >= 0 {
			return patterns[i]
		}
		return ""
	}
	v := schema.LUNView{ID: l.ID, Access: "read and write", Why: "it is for all who may log in"}
	if p := matching(l.Initiators); p != "" {
		v.Why = fmt.Sprintf("initiators: %q matches", p)
	}
	switch mustMask(*l)(initiator) {
	case lun.NoAccess:
		return schema.LUNView{ID: l.ID, Access: "none", Why: "initiators: none matches of " + list(l.Initiators)}
	case lun.ReadOnly:
		return schema.LUNView{ID: l.ID, Access: "read only", Why: fmt.Sprintf("read_only_for: %q matches", matching(l.ReadOnlyFor))}
	}
	if l.ReadOnly {
		v.Access, v.Why = "read only", "read_only is set"
	}
	return v
}

// matches tells whether a pattern, which is valid, matches a normalised name.
func matches(pattern, name string) bool {
	p, err := security.Compile([]string{pattern})
	return err == nil && p.Match(name)
}

// list is patterns for people.
func list(patterns []string) string {
	if len(patterns) == 0 {
		return "there are none"
	}
	return strings.Join(patterns, ", ")
}

// groups are portal groups in words.
func groups(list []int) string {
	words := make([]string, len(list))
	for i, g := range list {
		words[i] = strconv.Itoa(g)
	}
	return "portal group " + strings.Join(words, ", ")
}
