package daemon

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
)

// ChangeOptions say how a change is to be made.
type ChangeOptions struct {
	DryRun      bool          // the Plan alone: nothing changes
	Disrupt     bool          // steps that disturb sessions are allowed
	AllowShrink bool          // a LUN may become smaller: what is behind its new end is lost
	Drain       time.Duration // what sessions and commands have to come to an end by themselves; 0: DefaultDrain
	Now         bool          // they have no time at all
	// File is for a LUN that the change adds, and has been made; nil: there is none. It
	// is there after a change that succeeds.
	File *FileBuilder
}

// drain is the time that things have to end.
func (o ChangeOptions) drain() time.Duration {
	switch {
	case o.Now:
		return 0
	case o.Drain > 0:
		return o.Drain
	}
	return schema.DefaultDrain
}

// ErrRefused answers a change that requires options which it lacks. Nothing was
// changed.
type ErrRefused struct {
	Plan *schema.Plan // with those reasons alone that the options do not cover
}

// Needs returns the missing options.
func (e *ErrRefused) Needs() schema.Needs { return e.Plan.Needs() }

func (e *ErrRefused) Error() string {
	var reasons []string
	for _, s := range e.Plan.Steps {
		switch {
		case s.Shrinks:
			reasons = append(reasons, describe(s.Change)+" cuts off data")
		case s.Disruptive:
			reasons = append(reasons, describe(s.Change)+" disturbs "+some(s.Disturbs, ", "))
		}
	}
	return fmt.Sprintf("refused, nothing has changed: %s (allowed by %s)", some(reasons, "; "), strings.Join(e.Needs().Flags(), " "))
}

// some joins the first of list and says how many more there are: an error is a line.
func some(list []string, sep string) string {
	const most = 8
	if len(list) <= most {
		return strings.Join(list, sep)
	}
	return fmt.Sprintf("%s and %d more", strings.Join(list[:most], sep), len(list)-most)
}

// allowed returns an ErrRefused if o lacks an option that p requires.
func allowed(p *schema.Plan, o ChangeOptions) error {
	for _, s := range p.Steps {
		if s.Disruptive && !o.Disrupt || s.Shrinks && !o.AllowShrink {
			return &ErrRefused{without(p, o)}
		}
	}
	return nil
}

// without returns p with only those reasons to refuse it that o does not cover.
func without(p *schema.Plan, o ChangeOptions) *schema.Plan {
	c := *p
	c.Steps = slices.Clone(p.Steps)
	for i := range c.Steps {
		s := &c.Steps[i]
		s.Disruptive = s.Disruptive && !o.Disrupt
		s.Shrinks = s.Shrinks && !o.AllowShrink
	}
	return &c
}

// object names what a change is about.
func object(c config.Change) string {
	switch c.Kind {
	case kindTarget:
		return "target " + c.Target
	case kindLUN:
		return fmt.Sprintf("LUN %d of target %s", c.LUN, c.Target)
	case kindPortal:
		return "portal " + c.Portal
	}
	return c.Kind
}

// describe is a change in a few words.
func describe(c config.Change) string {
	what := object(c)
	if c.Key != "" { // there is none in a section that is a single value: drain
		what = c.Key + " of " + what
	}
	switch {
	case c.Op == config.Add:
		return "adding " + what
	case c.Op == config.Remove:
		return "removing " + what
	case c.Old == "" && c.New == "":
		return "changing " + what
	}
	return fmt.Sprintf("changing %s from %s to %s", what, orNothing(c.Old), orNothing(c.New))
}

func orNothing(s string) string {
	if s == "" {
		return "nothing"
	}
	return s
}

// Kinds of changes, as package config names them.
const (
	kindTarget        = "target"
	kindLUN           = "lun"
	kindPortal        = "portal"
	kindLimits        = "limits"
	kindMPA           = "mpa"
	kindDiscoveryAuth = "discovery_auth"
	kindDebug         = "debug"
	kindMetrics       = "metrics"
	kindDashboard     = "dashboard"
	kindLog           = "log"
	kindWatch         = "watch"
	kindDrain         = "drain"
)

var (
	// ErrEnding answers a change that comes too late.
	ErrEnding = errors.New("the target ends")
	// ErrNotFound answers a call about what there is not.
	ErrNotFound = errors.New("not found")
	// ErrEdited answers a change when the configuration file says something else
	// than what runs: the change would take that back.
	ErrEdited = errors.New("configuration file was edited and not applied yet")
)

// plan is how to get from what runs to cfg, and whom that disturbs. It is the caller's
// turn.
func (d *Daemon) plan(cfg *config.Config) *schema.Plan {
	p := &schema.Plan{Steps: []schema.Step{}}
	sessions := d.node.Sessions()
	for _, ch := range config.Diff(d.cfg, cfg) {
		s := schema.Step{Change: ch, Restart: restarts(ch)}
		var hit func(*iscsi.SessionInfo) bool
		switch ch.Kind {
		case kindTarget:
			hit = d.targetDisturbs(ch, cfg)
		case kindLUN:
			hit, s.Shrinks = d.lunDisturbs(ch, cfg)
		case kindPortal:
			hit = d.portalDisturbs(ch)
		}
		for i := range sessions {
			if hit != nil && hit(&sessions[i]) {
				s.Disturbs = append(s.Disturbs, sessionName(sessions[i].TSIH, sessions[i].Initiator))
			}
		}
		s.Disruptive = len(s.Disturbs) > 0 && !(ch.Kind == kindLUN && ch.Key == "size")
		if ch.Kind == kindLUN && (len(s.Disturbs) > 0 || s.Shrinks) {
			s.Disturbs = append(s.Disturbs, object(ch))
		}
		p.Steps = append(p.Steps, s)
	}
	// What cuts off data comes last: nothing behind it can fail and want it back.
	slices.SortStableFunc(p.Steps, func(a, b schema.Step) int {
		switch {
		case a.Shrinks == b.Shrinks:
			return 0
		case a.Shrinks:
			return 1
		}
		return -1
	})
	return p
}

// restarts tells whether a difference is made good at the next start only.
func restarts(ch config.Change) bool {
	if ch.Kind == kindLog && ch.Key == "format" {
		return true
	}
	_, ok := actions[action{ch.Kind, ch.Op}]
	return !ok
}

func (d *Daemon) targetDisturbs(ch config.Change, cfg *config.Config) func(*iscsi.SessionInfo) bool {
	tc := targetOf(cfg, ch.Target)
	if ch.Op == config.Remove || tc == nil {
		return func(s *iscsi.SessionInfo) bool { return s.Target == ch.Target }
	}
	t := d.target(ch.Target)
	if t == nil {
		return nil
	}
	ic, err := t.config(tc, cfg)
	if err != nil {
		return nil // which is reported when the step is taken
	}
	return func(s *iscsi.SessionInfo) bool { return excluded(s, tc, &ic) != "" }
}

func (d *Daemon) lunDisturbs(ch config.Change, cfg *config.Config) (hit func(*iscsi.SessionInfo) bool, shrinks bool) {
	t := d.target(ch.Target)
	if t == nil || ch.Op == config.Add {
		return nil, false
	}
	old, next := t.luns[ch.LUN], lunOf(targetOf(cfg, ch.Target), ch.LUN)
	if old == nil {
		return nil, false
	}
	sees := func(s *iscsi.SessionInfo) bool {
		return s.Target == ch.Target && slices.Contains(s.LUNs, uint16(ch.LUN))
	}
	switch {
	case ch.Op == config.Remove || next == nil:
		return sees, false
	case ch.Key == "size":
		shrinks = next.Size != 0 && old.fault == nil && int64(next.Size) < old.unit.Size()
		if !shrinks {
			return nil, false
		}
		return sees, true
	case ch.Key == "initiators" || ch.Key == "read_only_for":
		was, now := mustMask(old.LUN), mustMask(*next)
		return func(s *iscsi.SessionInfo) bool {
			return s.Target == ch.Target && !s.Discovery && now(s.Initiator) > was(s.Initiator) // less access
		}, false
	}
	return sees, false
}

func (d *Daemon) portalDisturbs(ch config.Change) func(*iscsi.SessionInfo) bool {
	p := d.portal(ch.Portal)
	if p == nil || ch.Op == config.Add || ch.Op == config.Update && ch.Key != "tpgt" {
		return nil
	}
	return func(s *iscsi.SessionInfo) bool { return p.connections(s) > 0 }
}
