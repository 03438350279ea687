package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
)

// A Status is the summary that status prints.
type Status struct {
	Healthy  bool             `json:"healthy"` // no Finding is a problem
	Version  string           `json:"version,omitempty"`
	Started  time.Time        `json:"started"`
	Uptime   float64          `json:"uptime_seconds"`
	Config   string           `json:"config,omitempty"`
	Portals  []PortalSummary  `json:"portals"`
	Targets  []TargetSummary  `json:"targets"`
	LUNs     map[string]int   `json:"luns"` // number of LUNs by condition: see condition
	Sessions []SessionSummary `json:"sessions"`
	Findings []Finding        `json:"findings"` // warnings and problems
}

// A PortalSummary describes a portal in a Status.
type PortalSummary struct {
	Address     string   `json:"address"`
	TPGT        int      `json:"tpgt"`
	Transports  []string `json:"transports"`
	Connections int      `json:"connections"`
}

// A TargetSummary describes a target in a Status.
type TargetSummary struct {
	Name     string         `json:"name"`
	LUNs     map[string]int `json:"luns"` // as Status.LUNs
	Sessions int            `json:"sessions"`
}

// A SessionSummary describes a session in a Status.
type SessionSummary struct {
	TSIH      uint16    `json:"tsih"`
	Initiator string    `json:"initiator"`
	Target    string    `json:"target,omitempty"` // empty: discovery
	Transport string    `json:"transport"`
	Started   time.Time `json:"started"`
	Tasks     int       `json:"tasks"` // now
	Depth     float64   `json:"depth"` // as in schema.SessionState
}

// errNotHealthy is the error of status if there is a problem.
var errNotHealthy = errors.New("the target is not healthy")

// condition returns the State of a LUN, or its Health if it is ready and not healthy.
func condition(l *schema.LUNState) string {
	if l.State == schema.Ready && l.Health != schema.Healthy {
		return l.Health
	}
	return l.State
}

// statusOf returns the summary of st at the time now.
func statusOf(st *schema.State, now time.Time) *Status {
	s := &Status{
		Version: st.Version, Started: st.Started, Uptime: now.Sub(st.Started).Seconds(), Config: st.Config,
		Portals: []PortalSummary{}, Targets: []TargetSummary{}, LUNs: map[string]int{}, Sessions: []SessionSummary{}, Findings: []Finding{},
	}
	for _, p := range st.Portals {
		s.Portals = append(s.Portals, PortalSummary{p.Address, p.TPGT, p.Transports, p.Connections})
	}
	for _, t := range st.Targets {
		luns := map[string]int{}
		for i := range t.LUNs {
			luns[condition(&t.LUNs[i])]++
			s.LUNs[condition(&t.LUNs[i])]++
		}
		s.Targets = append(s.Targets, TargetSummary{t.Name, luns, len(t.Sessions)})
	}
	for _, e := range st.Sessions {
		s.Sessions = append(s.Sessions, SessionSummary{e.TSIH, e.Initiator, e.Target, e.Transport, e.Started, e.Tasks, e.Depth})
	}
	if len(st.Portals) == 0 {
		s.Findings = append(s.Findings, Finding{problem, "portals", "no portal: no initiator can connect", "create one with iser-target portal create"})
	}
	for _, list := range [][]Finding{checkTargets(st), checkThresholds(st), checkCertificates(st, now), checkPending(st)} {
		for _, f := range list {
			if f.Severity != fine {
				s.Findings = append(s.Findings, f)
			}
		}
	}
	s.Healthy = !slices.ContainsFunc(s.Findings, func(f Finding) bool { return f.Severity == problem })
	return s
}

// checkPending finds changes that take effect at the next start.
func checkPending(st *schema.State) (list []Finding) {
	const hint = "restart the target when convenient"
	switch n := len(st.Pending); n {
	case 0:
	case 1:
		list = append(list, Finding{warning, "configuration", st.Pending[0] + " takes effect at the next start", hint})
	default:
		list = append(list, Finding{warning, "configuration", fmt.Sprintf("%d changes take effect at the next start:\n%s", n, strings.Join(st.Pending, "\n")), hint})
	}
	return list
}

// checkThresholds finds LUNs that have reached a threshold of space.
func checkThresholds(st *schema.State) (list []Finding) {
	for _, t := range st.Targets {
		for _, l := range t.LUNs {
			if l.Space == nil {
				continue
			}
			for _, th := range l.Space.Thresholds {
				if th.Reached {
					list = append(list, Finding{warning, fmt.Sprintf("LUN %d of %s", l.ID, t.Name),
						fmt.Sprintf("reached threshold_%s of %s: %s are used, and %s available", th.Threshold, size(th.Limit), rounded(l.Space.Used), rounded(l.Space.Available)),
						"free space on its medium, or move the LUN"})
				}
			}
		}
	}
	return list
}

// conditions returns numbers of LUNs as text, those with problems last.
func conditions(luns map[string]int) string {
	if len(luns) == 0 {
		return "0"
	}
	names := slices.SortedFunc(maps.Keys(luns), func(a, b string) int {
		if (a == schema.Ready) != (b == schema.Ready) {
			return map[bool]int{true: -1, false: 1}[a == schema.Ready]
		}
		return strings.Compare(a, b)
	})
	for i, name := range names {
		names[i] = fmt.Sprintf("%d %s", luns[name], name)
	}
	return strings.Join(names, ", ")
}

// maxSessions bounds the sessions of the page that status prints.
const maxSessions = 20

// fill adds the page to t.
func (s *Status) fill(t *table) {
	verdict := "healthy"
	if !s.Healthy {
		verdict = "NOT HEALTHY"
	}
	t.row("status", verdict)
	t.row("version", cmp.Or(s.Version, "-"))
	t.row("up", fmt.Sprintf("%v, since %s", time.Duration(s.Uptime)*time.Second, s.Started.Local().Format(time.DateTime)))
	t.row("configuration", cmp.Or(s.Config, "-"))
	t.row("LUNs", conditions(s.LUNs))
	t.row("sessions", len(s.Sessions))
	if len(s.Portals) > 0 {
		t.gap()
		t.head("PORTAL TPGT TRANSPORTS CONNECTIONS")
		for _, p := range s.Portals {
			t.row(p.Address, p.TPGT, strings.Join(p.Transports, ","), p.Connections)
		}
	}
	if len(s.Targets) > 0 {
		t.gap()
		t.head("TARGET SESSIONS LUNS")
		for _, g := range s.Targets {
			t.row(g.Name, g.Sessions, conditions(g.LUNs))
		}
	}
	if len(s.Sessions) > 0 {
		t.gap()
		t.head("TSIH INITIATOR TARGET TRANSPORT SINCE DEPTH")
		for _, e := range s.Sessions[:min(len(s.Sessions), maxSessions)] {
			t.row(e.TSIH, e.Initiator, cmp.Or(e.Target, "-"), e.Transport, e.Started.Local().Format(time.DateTime), depth(e.Depth))
		}
		if more := len(s.Sessions) - maxSessions; more > 0 {
			t.line("and %s, which iser-target session list shows", count(more, "more session"))
		}
	}
	if len(s.Findings) > 0 {
		t.gap()
		printFindings(t, s.Findings)
	}
}

// status returns the command that prints a summary of the target.
func (p *program) status() *cobra.Command {
	return p.output(verb{use: "status", short: "Show on one page whether the target is healthy, and what it serves", args: cobra.NoArgs,
		long: `Show on one page whether the target is healthy, and what it serves: version, portals,
targets, LUNs by their condition, sessions, and warnings. It exits with 0 if the target is
healthy, and with 1 if a LUN is not ready or not healthy, a target has no portal, or a
certificate has expired. Warnings do not count. doctor checks more, which takes longer.`,
		example: "  iser-target status\n  iser-target status -o jsonpath='$.luns' --timeout 2s",
		run: func(ctx context.Context, c *call) error {
			st, err := c.State(ctx)
			if err != nil {
				return err
			}
			s := statusOf(&st, time.Now())
			if err := p.print(c.cmd.OutOrStdout(), s, s.fill); err != nil {
				return err
			}
			if !s.Healthy {
				return errNotHealthy
			}
			return nil
		}})
}
