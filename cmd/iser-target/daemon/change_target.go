package daemon

import (
	"slices"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/security"
)

// target returns the served target of that name, or nil.
func (e *editor) target(name string) *servedTarget { return e.d.served.target(name) }

func (c *change) addTarget(ch config.Change) error {
	d, tc := c.d, targetOf(c.cfg, ch.Target)
	if c.target(tc.Name) != nil {
		return nil
	}
	t := newTarget(tc, c.cfg.TPGTs(tc))
	for _, l := range tc.LUNs {
		if err := c.open(t, l); err != nil {
			return err
		}
	}
	ic, err := t.config(tc, c.cfg)
	if err == nil {
		err = d.node.AddTarget(ic)
	}
	if err != nil {
		return err
	}
	c.listTarget(t)
	c.onUndo(func() error {
		c.unlistTarget(t)
		for _, s := range d.node.Sessions() {
			if s.Target == t.name {
				d.endSession(c.ctx, s.TSIH, 0, "the change that added the target failed") // at once
			}
		}
		return d.node.RemoveTarget(t.name)
	})
	return nil
}

// listTarget adds t to the list of served targets.
func (e *editor) listTarget(t *servedTarget) {
	e.write(func() { e.d.served.targets = append(e.d.served.targets, t) })
}

// unlistTarget removes t from the list of served targets.
func (e *editor) unlistTarget(t *servedTarget) {
	e.write(func() {
		e.d.served.targets = slices.DeleteFunc(slices.Clone(e.d.served.targets), func(o *servedTarget) bool { return o == t })
	})
}

func (c *change) removeTarget(ch config.Change) error {
	d, t := c.d, c.target(ch.Target)
	if t == nil {
		return nil
	}
	ic, err := t.config(targetOf(d.served.cfg, ch.Target), d.served.cfg)
	if err != nil {
		return err
	}
	if err := d.node.RemoveTarget(t.name); err != nil {
		return err
	}
	c.unlistTarget(t)
	c.onUndo(func() error {
		c.listTarget(t)
		return d.node.AddTarget(ic)
	})
	c.endIf(func(s *iscsi.SessionInfo) bool { return s.Target == t.name }, "the target was removed")
	// The sessions keep the LUNs until they end: they may have data to write.
	for _, l := range t.luns {
		c.removals = append(c.removals, c.newRemoval(t, l))
	}
	return nil
}

func (c *change) updateTarget(ch config.Change) error {
	d, t, tc := c.d, c.target(ch.Target), targetOf(c.cfg, ch.Target)
	ic, err := t.config(tc, c.cfg)
	if err != nil {
		return err
	}
	was, err := t.config(targetOf(d.served.cfg, ch.Target), d.served.cfg)
	if err != nil {
		return err
	}
	if err := d.node.UpdateTarget(ic); err != nil {
		return err
	}
	c.onUndo(func() error { return d.node.UpdateTarget(was) })
	c.ending = append(c.ending, func(s *iscsi.SessionInfo) string { return excluded(s, tc, &ic) })
	return nil
}

// excluded returns why the target as configured in tc and ic does not admit session s, or
// "" if it does or s belongs to another target.
func excluded(s *iscsi.SessionInfo, tc *config.Target, ic *iscsi.TargetConfig) string {
	switch {
	case s.Target != tc.Name:
	case !ic.Initiators.Match(s.Initiator):
		return "initiator is no longer among those of the target"
	case slices.ContainsFunc(s.Conns, func(c iscsi.ConnInfo) bool { return !ic.Networks.Admit(security.AddressOf(c.Remote)) }):
		return "address is no longer in a network of the target"
	case !slices.Contains(ic.PortalGroups, s.TPGT):
		return "portal group no longer leads to the target"
	case !s.Discovery && ic.Auth != nil:
		return ic.Auth.Excludes(s.Params.CHAPName, security.CHAPProof(s.Params.CHAPProof), s.Initiator)
	}
	return ""
}

// refreshPaths updates, for each target, the portal groups that lead to it.
func (c *change) refreshPaths() error {
	d := c.d
	for _, t := range d.served.targets {
		tc := targetOf(c.cfg, t.name)
		if tc == nil {
			continue
		}
		ic, err := t.config(tc, c.cfg)
		if err != nil {
			return err
		}
		if oc := targetOf(d.served.cfg, t.name); oc != nil {
			if slices.Equal(portalGroups(d.served.cfg, oc), ic.PortalGroups) {
				continue
			}
			was, err := t.config(oc, d.served.cfg)
			if err != nil {
				return err
			}
			c.onUndo(func() error {
				d.setPorts(t, d.served.cfg.TPGTs(oc))
				return d.node.UpdateTarget(was)
			})
		}
		if err := d.node.UpdateTarget(ic); err != nil {
			return err
		}
		d.setPorts(t, c.cfg.TPGTs(tc))
	}
	return nil
}
