package cli

import (
	"context"
	"fmt"
	"strings"

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
	t.row("grace", s.Grace)
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
	parts := []string{p.Verdict}
	if p.Suite != "" {
		parts = append(parts, p.Suite)
	}
	if p.SPIIn != "" || p.SPIOut != "" {
		parts = append(parts, "SPIs "+p.SPIIn+" in, "+p.SPIOut+" out")
	}
	if p.Identity != "" {
		parts = append(parts, "identity "+p.Identity)
	}
	text := strings.Join(parts, ", ")
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
	return ipsecFindings(&s), nil
}

func ipsecFindings(s *schema.IPsecState) (list []Finding) {
	const about, status = "ipsec", "see iser-target ipsec status"
	if s.Driver == "none" {
		return nil
	}
	for _, text := range s.Missing {
		list = append(list, Finding{problem, about, "the driver " + s.Driver + " cannot enforce it: " + text, status})
	}
	if s.Failure != "" {
		list = append(list, Finding{warning, about, s.Failure, status})
	}
	for _, c := range s.Connections {
		if c.Verdict == "permit" {
			continue
		}
		severity, name := problem, "connection from "+c.Remote
		if c.Demand == "audit" {
			severity = warning
		}
		if c.TSIH != 0 {
			name = fmt.Sprintf("session %d of %s", c.TSIH, c.Initiator)
		}
		list = append(list, Finding{severity, about, name + " is not protected as required: " + c.Reason, status})
	}
	if len(list) == 0 {
		list = append(list, Finding{fine, about, fmt.Sprintf("driver %s, %s protected", s.Driver, count(len(s.Connections), "connection")), ""})
	}
	return list
}
