package ipsec

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/iser-target/iser-target/security"
)

// Judge returns whether p is good enough for q. It only reads its arguments. What falls short is denied under Required and
// marked under Audit. Under Off everything is permitted, and the verdict still describes p. Judge requires:
//   - policies that keep clear text out of both directions (RFC 3723, section 5.7);
//   - for each SA of the incoming direction, because the peer chooses among them, and for the newest one of the outgoing direction:
//     integrity, encryption unless the profile does without, never DES, replay protection (RFC 7146, section 2), and what else
//     the profile says;
//   - an IKE identity that the profile ties to q.Initiator. Before the login, one that it ties to any initiator.
//
// When the only fault of an SA may be that p is incomplete, the class is ClassDriver.
func Judge(q Question, p Protection) Verdict {
	v := describe(p)
	if q.Demand == Off || q.Demand == "" {
		v.Action = Permit
		return v
	}
	profile := q.Profile
	if profile == nil {
		profile = &Profile{}
	}
	v.Reason, v.Class = judge(q, p, profile)
	v.KeysGone = v.Class == ClassKeys
	switch {
	case v.Reason == "":
		v.Action = Permit
	case q.Demand == Audit:
		v.Action = Mark
	default:
		v.Action = Deny
	}
	return v
}

// describe fills what lists show. Protection in one direction only is none.
func describe(p Protection) Verdict {
	var v Verdict
	if len(p.In) > 0 {
		v.SPIIn = p.In[0].SPI
		v.Identity = p.In[0].RemoteID
	}
	if len(p.Out) > 0 {
		v.SPIOut = p.Out[0].SPI
		if v.Identity == "" {
			v.Identity = p.Out[0].RemoteID
		}
	}
	if p.InPolicy && p.OutPolicy && len(p.In) > 0 && len(p.Out) > 0 {
		v.Suite = p.Out[0].String()
	}
	return v
}

// judge returns the first reason why p is not good enough, with its class, or "". ClassKeys says that the policies are right.
func judge(q Question, p Protection, profile *Profile) (reason string, class Class) {
	local, remote := q.Flow.Local.Addr(), q.Flow.Remote.Addr()
	switch {
	case !p.InPolicy && !p.OutPolicy && len(p.In)+len(p.Out) > 0:
		return fmt.Sprintf("IPsec keys between %v and %v exist, but no policy requires them, so packets may be in clear text. "+
			"Add policies in both directions for TCP port %d of %v", local, remote, q.Flow.Local.Port(), local), ClassClear
	case !p.InPolicy && !p.OutPolicy:
		return fmt.Sprintf("packets between %v and %v are in clear text: no IPsec policy covers them. "+
			"Set up IPsec for TCP port %d of %v on both hosts", local, remote, q.Flow.Local.Port(), local), ClassClear
	case !p.InPolicy:
		return oneWay(remote, local), ClassClear
	case !p.OutPolicy:
		return oneWay(local, remote), ClassClear
	case len(p.In) == 0:
		return noKeys(remote, local), ClassKeys
	case len(p.Out) == 0:
		return noKeys(local, remote), ClassKeys
	}
	for _, sa := range p.In {
		if why := profile.fault(sa, true, p.Link); why != "" {
			return why, ClassProfile
		}
	}
	if why := profile.fault(p.Out[0], false, p.Link); why != "" {
		return why, ClassProfile
	}
	chosen := append(p.In[:len(p.In):len(p.In)], p.Out[0])
	for _, sa := range chosen {
		switch why := profile.unnegotiated(sa); {
		case why == "":
		case p.Incomplete != nil && sa.RemoteID == "":
			return unanswered(p.Incomplete), ClassDriver
		default:
			return why, ClassProfile
		}
	}
	why := profile.strangers(q, chosen)
	switch {
	case why == "":
		return "", ""
	case p.Incomplete != nil && slices.ContainsFunc(chosen, func(sa SA) bool { return sa.RemoteID == "" }):
		return unanswered(p.Incomplete), ClassDriver
	}
	return why, ClassIdentity
}

// unanswered returns the reason when a driver did not answer.
func unanswered(err error) string {
	return fmt.Sprintf("IPsec cannot be checked: %v", err)
}

func oneWay(from, to netip.Addr) string {
	return fmt.Sprintf("packets from %v to %v may be in clear text: no IPsec policy covers this direction. "+
		"Add a policy that requires ESP for them", from, to)
}

func noKeys(from, to netip.Addr) string {
	return fmt.Sprintf("no SA for packets from %v to %v: a policy requires ESP, but the keys are missing. "+
		"Look at the IKE daemon of both hosts, or install the keys", from, to)
}

// fault returns what is not good enough about an SA, or "".
func (p *Profile) fault(sa SA, in bool, link Link) string {
	name := fmt.Sprintf("SA 0x%08x from %v to %v", sa.SPI, sa.Source, sa.Destination)
	suite, known := sa.Suite()
	accepted := strings.Join(p.accepted(), ", ")
	switch {
	case isDES(sa.Encryption.Name):
		return name + " uses DES, which must not be used. Configure the IKE daemon to propose one of " + accepted
	case sa.AEAD.Name == "" && (sa.Authentication.Name == "" || sa.Authentication.isNull()):
		return name + " has no integrity protection, so packets can be forged. Configure the IKE daemon to propose one of " + accepted
	case sa.Mode != Tunnel && sa.Mode != Transport:
		return fmt.Sprintf("%s uses mode %s. Configure mode tunnel or transport", name, quote(string(sa.Mode)))
	case p.Mode != "" && sa.Mode != p.Mode:
		return fmt.Sprintf("%s uses %s mode, but profile %s requires %s mode. Configure mode = %s in the IKE daemon of both hosts",
			name, sa.Mode, quote(p.Name), p.Mode, p.Mode)
	case known && !suite.Encrypts() && !p.NullEncryption:
		return fmt.Sprintf("%s uses %s, which does not encrypt. Configure the IKE daemon to propose one of %s, "+
			"or set null_encryption: true in profile %s", name, suite.Name, accepted, quote(p.Name))
	case known && suite.keyBits() != 0 && suite.keyBits() < p.keyBits():
		return fmt.Sprintf("%s uses %s with a key of %d bits, but profile %s requires %d. Configure the IKE daemon to propose one of %s",
			name, suite.Name, suite.keyBits(), quote(p.Name), p.keyBits(), accepted)
	case !known || !p.accepts(suite):
		return fmt.Sprintf("%s uses %s, which profile %s does not accept. Configure the IKE daemon to propose one of %s",
			name, sa.suiteName(), quote(p.Name), accepted)
	case in && sa.ReplayWindow < 1:
		return fmt.Sprintf("%s has no replay protection. Configure replay_window = %d or more in the IKE daemon of this host", name, p.window())
	case in && sa.ReplayWindow < p.window():
		return fmt.Sprintf("%s has a replay window of %d packets, but profile %s requires %d. "+
			"Configure replay_window = %d or more in the IKE daemon of this host", name, sa.ReplayWindow, quote(p.Name), p.window(), p.window())
	}
	if required, why := p.NeedsESN(link); required && !sa.ESN {
		otherwise := ""
		if p.ESNAuto {
			otherwise = fmt.Sprintf(", or set esn: false in profile %s", quote(p.Name))
		}
		return fmt.Sprintf("%s has sequence numbers of 32 bits, but profile %s requires extended ones (%s). "+
			"Add -esn to the ESP proposals of both hosts%s", name, quote(p.Name), why, otherwise)
	}
	return ""
}

// unnegotiated returns what is not good enough about an SA by what an IKE daemon knows of it, or "".
func (p *Profile) unnegotiated(sa SA) string {
	name := fmt.Sprintf("SA 0x%08x from %v to %v", sa.SPI, sa.Source, sa.Destination)
	switch {
	case !sa.IKE && !p.ManualKeys:
		return fmt.Sprintf("%s has keys that no key exchange made. Use an IKE daemon, or set manual_keys: true in profile %s",
			name, quote(p.Name))
	case p.MaxLifetime > 0 && sa.Lifetime <= 0:
		return fmt.Sprintf("%s has no lifetime, but profile %s allows at most %v. Configure life_time in the IKE daemon", name, quote(p.Name), p.MaxLifetime)
	case p.MaxLifetime > 0 && sa.Lifetime > p.MaxLifetime:
		return fmt.Sprintf("%s lives for %v, but profile %s allows at most %v. Configure a shorter life_time in the IKE daemon",
			name, sa.Lifetime, quote(p.Name), p.MaxLifetime)
	}
	return ""
}

func (p *Profile) accepts(s Suite) bool {
	if len(p.Suites) == 0 {
		return s.standard()
	}
	for _, name := range p.Suites {
		if name == s.Name {
			return true
		}
	}
	return false
}

func isDES(name string) bool { return name == "cbc(des)" || name == "des" || name == "ecb(des)" }

// strangers returns why the IKE identity of the peer does not fit the initiator, or "".
func (p *Profile) strangers(q Question, chosen []SA) string {
	if len(p.Identities) == 0 {
		return ""
	}
	var ids []string
	for _, r := range p.Identities {
		if q.Initiator == "" || r.covers(q.Initiator) {
			ids = append(ids, r.ID)
		}
	}
	if len(ids) == 0 {
		return fmt.Sprintf("initiator %s has no IKE identity in profile %s. Add it to identities", q.Initiator, quote(p.Name))
	}
	for _, sa := range chosen {
		switch {
		case sa.RemoteID == "":
			return fmt.Sprintf("the IKE identity of %v is unknown, but profile %s requires one. Set ipsec.driver: vici, "+
				"which asks strongSwan", q.Flow.Remote.Addr(), quote(p.Name))
		case matchesAny(ids, sa.RemoteID):
		case q.Initiator == "":
			return fmt.Sprintf("IKE identity %s of %v belongs to no initiator of profile %s. Add it to identities",
				quote(sa.RemoteID), q.Flow.Remote.Addr(), quote(p.Name))
		default:
			return fmt.Sprintf("IKE identity %s of %v does not belong to initiator %s: profile %s requires %s. "+
				"Correct identities, or the id of the initiator's IKE daemon", quote(sa.RemoteID), q.Flow.Remote.Addr(), q.Initiator,
				quote(p.Name), strings.Join(ids, " or "))
		}
	}
	return ""
}

// covers reports whether the rule is about the initiator.
func (r IdentityRule) covers(initiator string) bool {
	patterns, err := security.Compile([]string{r.Initiator})
	return err == nil && patterns.Match(initiator)
}

func matchesAny(patterns []string, id string) bool {
	for _, p := range patterns {
		if matchID(strings.ToLower(p), strings.ToLower(id)) {
			return true
		}
	}
	return false
}

// matchID reports whether pattern matches the whole identity. Only * has a meaning, because identities may contain ? and [.
// It takes at most len(pattern) * len(id) steps.
func matchID(pattern, id string) bool {
	parts := strings.Split(pattern, "*")
	if len(parts) == 1 {
		return pattern == id
	}
	first, last := parts[0], parts[len(parts)-1]
	if len(id) < len(first)+len(last) || !strings.HasPrefix(id, first) || !strings.HasSuffix(id, last) {
		return false
	}
	id = id[len(first) : len(id)-len(last)]
	for _, part := range parts[1 : len(parts)-1] {
		i := strings.Index(id, part)
		if i < 0 {
			return false
		}
		id = id[i+len(part):]
	}
	return true
}
