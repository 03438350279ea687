package cli

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/api/client"
	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// ipsec returns the commands about IPsec.
func (p *program) ipsec() *cobra.Command {
	status := show(p, verb{use: "status", short: "Show the IPsec driver, what it lacks, and what protects each connection",
		args: cobra.NoArgs,
		long: `Show the driver of IPsec and what it lacks to enforce "required", with the command that
mends it; what portals and targets require; and for each connection the verdict, the
policies and the security associations (SAs). docs/ipsec.md describes the rest.`},
		func(ctx context.Context, c *call) (schema.IPsecState, error) { return c.IPsec(ctx) }, ipsecTable)
	return group("ipsec", "Show what IPsec protects", status)
}

func ipsecTable(t *table, s schema.IPsecState) {
	t.row("driver", s.Driver)
	t.row("grace", s.Grace+" without keys, "+s.Unanswered+" without an answer of the driver")
	t.row("key changes", s.Notices)
	t.row("failures", s.Failures)
	if s.Failure != "" {
		t.row("failure", s.Failure)
	}
	for _, text := range s.Missing {
		t.row("missing", text)
	}
	for _, d := range s.Denials {
		t.row("denied", fmt.Sprintf("%d at %s, because of %s", d.Count, d.Moment, d.Reason))
	}
	for _, p := range s.Portals {
		says := p.Demand
		if p.Profile != "" {
			says += ", profile " + p.Profile
		}
		if p.Policy {
			says += ", clear text is dropped at " + strings.Join(p.Sockets, " and ")
		}
		t.row("portal "+p.Listen, says)
	}
	for _, g := range s.Targets {
		t.row("target "+g.Name, g.Demand+", profile "+g.Profile)
	}
	for _, c := range s.Connections {
		name := "connection " + c.Remote
		if c.TSIH != 0 {
			name = fmt.Sprintf("session %d", c.TSIH)
		}
		t.row(name, fmt.Sprintf("%s from %s to %s", c.Initiator, c.Remote, c.Local))
		t.below("  " + protectionText(&c.ConnectionProtection))
		if c.Unknown {
			t.below("  policies and SAs: unknown, because the driver does not answer")
			continue
		}
		t.below(fmt.Sprintf("  policies: in %s, out %s", yesNo(c.InPolicy), yesNo(c.OutPolicy)))
		for _, sa := range c.SAs {
			t.below("  " + saText(&sa))
		}
		t.below("  extended sequence numbers: " + c.ESN)
	}
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func saText(sa *schema.IPsecSA) string {
	text := fmt.Sprintf("%s %s %s -> %s reqid %d: %s, window %d", sa.Direction, sa.SPI, sa.Source, sa.Destination, sa.ReqID, sa.Suite, sa.ReplayWindow)
	if sa.Lifetime > 0 {
		text += fmt.Sprintf(", lifetime %.0fs", sa.Lifetime)
	}
	if !sa.Expires.IsZero() {
		text += ", until " + sa.Expires.UTC().Format(time.RFC3339)
	}
	if !sa.IKE {
		text += ", manual keys"
	}
	if sa.RemoteID != "" {
		text += ", " + sa.RemoteID
	}
	return text
}

// protectionText describes how a connection is protected.
func protectionText(p *schema.ConnectionProtection) string {
	text := p.Verdict
	if details := p.Details(); details != "" {
		text += ", " + details
	}
	if p.Reason != "" {
		text += ": " + p.Reason
	}
	return text
}

// checkIPsec finds what keeps IPsec from being enforced, and sessions that are not protected as they should be.
func checkIPsec(ctx context.Context, c *client.Client) ([]Finding, error) {
	s, err := c.IPsec(ctx)
	if err != nil {
		return nil, err
	}
	return ipsecFindings(&s, time.Now()), nil
}

func ipsecFindings(s *schema.IPsecState, now time.Time) (list []Finding) {
	const about = "ipsec"
	if s.Driver == "none" {
		return nil
	}
	for _, text := range s.Missing {
		list = append(list, Finding{problem, about, "the driver " + s.Driver + " cannot enforce it: " + text, "see iser-target ipsec status"})
	}
	if s.Failure != "" {
		list = append(list, Finding{problem, about, "the driver fails: " + s.Failure, "see iser-target ipsec status"})
	}
	for _, c := range s.Connections {
		name := "connection from " + c.Remote
		if c.TSIH != 0 {
			name = fmt.Sprintf("session %d of %s", c.TSIH, c.Initiator)
		}
		if c.Verdict != "permit" {
			severity := problem
			if c.Demand == "audit" {
				severity = warning
			}
			list = append(list, Finding{severity, about, name + " is not protected as required: " + c.Reason, ipsecRemedy(s.Driver, c.Class)})
			continue
		}
		if c.ESNUnsure && slices.ContainsFunc(c.SAs, func(sa schema.IPsecSA) bool { return !slices.Contains(strings.Fields(sa.Suite), "esn") }) {
			list = append(list, Finding{warning, about, name + " has SAs without extended sequence numbers, which are " + c.ESN,
				"set esn of the profile: true to require them, false if the link has less than 1 Gbit/s"})
		}
		for _, direction := range []string{"in", "out"} {
			if sa := expiring(c.SAs, direction, now); sa != nil {
				list = append(list, Finding{warning, about, fmt.Sprintf("%s: SA %s from %s to %s expires at %s, and there is no newer one",
					name, sa.SPI, sa.Source, sa.Destination, sa.Expires.UTC().Format(time.RFC3339)), ipsecRemedy(s.Driver, "keys")})
			}
		}
	}
	if len(list) == 0 {
		list = append(list, Finding{fine, about, fmt.Sprintf("driver %s, %s protected", s.Driver, count(len(s.Connections), "connection")), ""})
	}
	return list
}

// lastPart of the lifetime of an SA is when it should have been replaced. strongSwan does so after 10/11 of it at the latest.
const lastPart = 0.05

// expiring returns the SA of a direction that lives longest, if that is in the last part of its lifetime; nil: it is not.
func expiring(list []schema.IPsecSA, direction string, now time.Time) (last *schema.IPsecSA) {
	for i := range list {
		sa := &list[i]
		switch {
		case sa.Direction != direction:
		case sa.Expires.IsZero():
			return nil
		case last == nil || sa.Expires.After(last.Expires):
			last = sa
		}
	}
	if last == nil || last.Expires.Sub(now).Seconds() > lastPart*last.Lifetime {
		return nil
	}
	return last
}

// ipsecRemedy returns the commands that mend a class of reasons.
func ipsecRemedy(driver, class string) string {
	manual := driver == "static"
	switch class {
	case "clear":
		if manual {
			return "add policies in both directions to ipsec.static.policies, then: iser-target config apply"
		}
		return "load the policies on both hosts: swanctl --load-all (docs/ipsec.md), and look at them: ip xfrm policy"
	case "keys":
		if manual {
			return "give both hosts new keys (ipsec.static.sas), then: iser-target config apply"
		}
		return "negotiate keys: swanctl --initiate --child NAME, and look at them: swanctl --list-sas"
	case "profile":
		if manual {
			return "correct ipsec.static.sas, or the profile, then: iser-target config apply"
		}
		return "correct the proposals of both hosts, or the profile, then: swanctl --load-all; swanctl --rekey --child NAME"
	case "identity":
		return "correct identities of the profile, then: iser-target config apply; swanctl --list-sas shows the identity"
	case "program":
		return "the program of ipsec.exec.command says so; run it by hand to find out why"
	}
	return "see iser-target ipsec status"
}
