package daemon

import (
	"errors"
	"slices"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
)

// portal returns the served portal with that listen address in the configuration, or nil.
func (e *editor) portal(listen string) *portal { return e.d.served.portal(listen) }

// openPortal listens on a portal and serves it, if Run has begun.
func (e *editor) openPortal(cfg config.Portal, policy listenerPolicy) (*portal, error) {
	p, err := e.d.listen(cfg, policy)
	if err != nil {
		return nil, err
	}
	e.write(func() { e.d.served.portals = append(e.d.served.portals, p) })
	e.accept(p)
	return p, nil
}

// unlistPortal removes p from the list of served portals and from discovery.
func (e *editor) unlistPortal(p *portal) {
	e.d.node.RemovePortal(p.cur.Load().Portal)
	e.write(func() {
		e.d.served.portals = slices.DeleteFunc(slices.Clone(e.d.served.portals), func(o *portal) bool { return o == p })
	})
}

func (c *change) addPortal(ch config.Change) error {
	pc := *portalOf(c.cfg, ch.Portal)
	p, err := c.openPortal(pc, policyOf(c.cfg, pc))
	if err != nil {
		return err
	}
	c.onUndo(func() error {
		c.unlistPortal(p)
		return p.close()
	})
	return nil
}

func (c *change) removePortal(ch config.Change) error {
	p := c.portal(ch.Portal)
	if p == nil {
		return ErrNotFound
	}
	if p.passed {
		return errors.New("the socket belongs to the service manager. Remove it from the socket unit and the portal from the configuration, then restart both")
	}
	cur := p.cur.Load()
	c.unlistPortal(p)
	if err := p.close(); err != nil {
		return err
	}
	c.onUndo(func() error {
		_, err := c.openPortal(cur.cfg, p.policy)
		return err
	})
	c.endIf(p.carries, "the portal was removed")
	return nil
}

func (c *change) updatePortal(ch config.Change) error {
	d, p, next := c.d, c.portal(ch.Portal), portalOf(c.cfg, ch.Portal)
	if p == nil {
		return ErrNotFound
	}
	old := d.describePortal(p, *next)
	c.onUndo(func() error {
		d.describePortal(p, old.cfg)
		return nil
	})
	if old.cfg.TPGT != next.TPGT {
		c.endIf(func(s *iscsi.SessionInfo) bool {
			return s.TPGT != uint16(next.TPGT) && p.carries(s) // otherwise it is a new session
		}, "the portal moved to another portal group")
	}
	return nil
}
