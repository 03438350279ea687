package daemon

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/iser-target/iser-target/cmd/iser-target/schema"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun/invariant"
	"github.com/iser-target/iser-target/security/ipsec"
)

// ChangeOptions say how the daemon makes a change.
type ChangeOptions struct {
	DryRun      bool          // return the plan and change nothing
	Disrupt     bool          // allow steps that disturb sessions
	AllowShrink bool          // allow a LUN to become smaller and lose the data beyond its new end
	Drain       time.Duration // what removed sessions and commands have to end; 0: schema.DefaultDrain
	Now         bool          // end them at once
	// File is the file of a LUN that the change adds, or nil. It exists after a change that
	// succeeds.
	File *FileBuilder

	// follow says that the change was made through another gateway of the cluster: it does not wait for the end of what it removes, and
	// a LUN whose medium is out of reach is not ready.
	follow bool
}

// drain returns the time that removed sessions and commands have to end.
func (o ChangeOptions) drain() time.Duration {
	if o.Now {
		return 0
	}
	return cmp.Or(max(o.Drain, 0), schema.DefaultDrain)
}

// ErrRefused answers a change that requires options which it lacks. Nothing was changed.
type ErrRefused struct {
	Plan *schema.Plan // with those reasons alone that the options do not cover
}

// Needs returns the missing options.
func (e *ErrRefused) Needs() schema.Needs { return e.Plan.Needs() }

// Error lists the steps that require options.
func (e *ErrRefused) Error() string {
	var reasons []string
	for _, s := range e.Plan.Steps {
		switch {
		case s.Shrinks:
			reasons = append(reasons, fmt.Sprintf("%v: cuts off data", s.Change))
		case s.Disruptive:
			reasons = append(reasons, fmt.Sprintf("%v: disturbs %s", s.Change, some(s.Disturbs, ", ")))
		}
	}
	return fmt.Sprintf("refused: %s. Nothing was changed", some(reasons, "; "))
}

// some joins the first elements of list and counts the others: an error is one line.
func some(list []string, sep string) string {
	const limit = 8
	if len(list) <= limit {
		return strings.Join(list, sep)
	}
	return fmt.Sprintf("%s and %d more", strings.Join(list[:limit], sep), len(list)-limit)
}

// allowed returns an ErrRefused if o lacks an option that p requires.
func allowed(p *schema.Plan, o ChangeOptions) error {
	rest := *p
	rest.Steps = slices.Clone(p.Steps)
	for i := range rest.Steps {
		s := &rest.Steps[i]
		s.Disruptive = s.Disruptive && !o.Disrupt
		s.Shrinks = s.Shrinks && !o.AllowShrink
	}
	if rest.Needs() == (schema.Needs{}) {
		return nil
	}
	return &ErrRefused{&rest}
}

// nameKeys are the keys of what a LUN is called towards initiators.
var nameKeys = []string{"serial", "naa", "vendor", "product"}

// checkNames returns an ErrInUse if p gives a LUN another name while sessions use it: for their hosts it would become
// another disk under the same file system.
func checkNames(p *schema.Plan) error {
	for _, s := range p.Steps {
		if s.Change.Kind == config.KindLUN && s.Change.Op == config.Update && s.Disruptive && slices.Contains(nameKeys, s.Change.Key) {
			return fmt.Errorf("refused: %v: %s: %w. Nothing was changed", s.Change, some(s.Disturbs, ", "), ErrInUse)
		}
	}
	return nil
}

var (
	// ErrInUse answers a change of the names of a LUN that sessions use.
	ErrInUse = errors.New("initiators know the disk by this name: log them out first")
	// ErrEnding answers a change when the daemon shuts down.
	ErrEnding = errors.New("the target ends")
	// ErrNotFound answers a call about an object that does not exist.
	ErrNotFound = errors.New("not found")
	// ErrEdited answers a change when the configuration file differs from the running
	// document: the change would undo the edit.
	ErrEdited = errors.New("the configuration file was edited, and the edit is not applied yet")
)

// plan returns the steps from the running configuration to cfg, and what they disturb. forecast says which connections end because
// IPsec does not protect them as cfg requires.
//
// Preconditions: d.mu is held.
func (d *Daemon) plan(cfg *config.Config, forecast map[ipsec.Flow]string) *schema.Plan {
	invariant.Held(&d.mu)
	p := &schema.Plan{Steps: []schema.Step{}}
	var cutting []schema.Step
	sessions := d.node.Sessions()
	for _, ch := range config.Diff(d.served.cfg, cfg) {
		s := schema.Step{Change: ch, Restart: restarts(ch)}
		var hit func(*iscsi.SessionInfo) bool
		switch ch.Kind {
		case config.KindTarget:
			hit = d.served.disturbedByTarget(ch, cfg)
		case config.KindLUN:
			hit, s.Shrinks = d.served.disturbedByLUN(ch, cfg)
		case config.KindPortal:
			hit = d.served.disturbedByPortal(ch)
		}
		unprotected := endsBy(ch, forecast, d.served.portal(ch.Portal))
		for i := range sessions {
			if hit != nil && hit(&sessions[i]) || unprotected != nil && unprotected(&sessions[i]) {
				s.Disturbs = append(s.Disturbs, sessionName(sessions[i].TSIH, sessions[i].Initiator))
			}
		}
		s.Disruptive = len(s.Disturbs) > 0 && !(ch.Kind == config.KindLUN && ch.Key == "size")
		if ch.Kind == config.KindLUN && (len(s.Disturbs) > 0 || s.Shrinks) {
			s.Disturbs = append(s.Disturbs, ch.Object())
		}
		if s.Shrinks {
			cutting = append(cutting, s)
		} else {
			p.Steps = append(p.Steps, s)
		}
	}
	// Steps that cut off data come last: no later step can fail, which would require the data again.
	p.Steps = append(p.Steps, cutting...)
	return p
}

// restarts reports whether ch takes effect at the next start.
func restarts(ch config.Change) bool {
	if ch.Kind == config.KindLog && ch.Key == "format" || ch.Kind == config.KindControl && ch.Key != "access" && ch.Key != "paths" {
		return true
	}
	_, ok := actions[action{ch.Kind, ch.Op}]
	return !ok
}

// disturbedByTarget returns which sessions a change of a target ends; nil: none.
func (v *served) disturbedByTarget(ch config.Change, cfg *config.Config) func(*iscsi.SessionInfo) bool {
	tc := targetOf(cfg, ch.Target)
	if ch.Op == config.Remove || tc == nil {
		return func(s *iscsi.SessionInfo) bool { return s.Target == ch.Target }
	}
	t := v.target(ch.Target)
	if t == nil {
		return nil
	}
	ic, err := t.config(tc, cfg)
	if err != nil {
		return nil // the step reports it
	}
	return func(s *iscsi.SessionInfo) bool { return excluded(s, tc, &ic) != "" }
}

// disturbedByLUN returns which sessions a change of a LUN disturbs, nil for none, and
// whether it cuts off data.
func (v *served) disturbedByLUN(ch config.Change, cfg *config.Config) (hit func(*iscsi.SessionInfo) bool, shrinks bool) {
	t := v.target(ch.Target)
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
		if next.Size == 0 || old.fault != nil || int64(next.Size) >= old.unit.Size() {
			return nil, false
		}
		return sees, true
	case slices.Contains(rateKeys, ch.Key), slices.Contains(thresholdKeys, ch.Key):
		return nil, false
	case ch.Key == "initiators" || ch.Key == "read_only_for":
		was, now := maskOf(old.LUN), maskOf(*next)
		return func(s *iscsi.SessionInfo) bool {
			return s.Target == ch.Target && !s.Discovery && now(s.Initiator) > was(s.Initiator) // less access
		}, false
	}
	return sees, false
}

// disturbedByPortal returns which sessions a change of a portal ends; nil: none.
func (v *served) disturbedByPortal(ch config.Change) func(*iscsi.SessionInfo) bool {
	p := v.portal(ch.Portal)
	if p == nil || ch.Op == config.Add || ch.Op == config.Update && ch.Key != "tpgt" {
		return nil
	}
	return p.carries
}
