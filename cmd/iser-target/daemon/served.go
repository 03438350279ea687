package daemon

import (
	"fmt"
	"slices"

	"time"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/security"
)

// served is what runs. Daemon.mu guards it; only an editor writes it.
type served struct {
	doc     *config.Document
	next    *config.Document // of the change in progress, or nil
	cfg     *config.Config
	pending []config.Change // that take effect at the next start
	portals []*portal
	targets []*servedTarget
}

// target returns the target of that name, or nil.
//
// Preconditions: Daemon.mu is held, or the caller is the editor.
func (v *served) target(name string) *servedTarget {
	i := slices.IndexFunc(v.targets, func(t *servedTarget) bool { return t.name == name })
	if i < 0 {
		return nil
	}
	return v.targets[i]
}

// portal returns the portal with that listen address in the configuration, or nil.
//
// Preconditions: Daemon.mu is held, or the caller is the editor.
func (v *served) portal(listen string) *portal {
	i := slices.IndexFunc(v.portals, func(p *portal) bool { return p.cur.Load().cfg.Listen == listen })
	if i < 0 {
		return nil
	}
	return v.portals[i]
}

// A servedTarget is a target and its LUNs. name and inventory do not change; luns is
// guarded like Daemon.served.
type servedTarget struct {
	name      string
	inventory *lun.Inventory
	luns      map[int]*servedLUN // by number
}

// A servedLUN is a LUN. It is guarded like Daemon.served.
type servedLUN struct {
	config.LUN
	unit *lun.Unit
	// fault is why the LUN has no store; nil: it has one.
	fault   error
	retryAt time.Time     // when to open the store again
	wait    time.Duration // between the last two attempts
	fresh   bool          // the LUN never existed: its file may be created
	closed  bool          // the store was closed, to be opened again
	attempt *call         // that opens the store and has not ended, or nil
}

// newTarget returns a target without LUNs.
func newTarget(c *config.Target, tpgts []uint16) *servedTarget {
	return &servedTarget{c.Name, lun.NewInventory(tpgts...), map[int]*servedLUN{}}
}

// config returns t in the form of package iscsi, as c, a part of cfg, describes it.
func (t *servedTarget) config(c *config.Target, cfg *config.Config) (iscsi.TargetConfig, error) {
	initiators, err := security.Compile(c.Initiators)
	if err != nil {
		return iscsi.TargetConfig{}, fmt.Errorf("target %s: %w", c.Name, err)
	}
	chap, err := c.Auth.CHAP()
	if err != nil {
		return iscsi.TargetConfig{}, fmt.Errorf("target %s: auth: %w", c.Name, err)
	}
	return iscsi.TargetConfig{
		Name: c.Name, Alias: c.Alias, Initiators: initiators, Auth: chap,
		Redirect: iscsi.Redirect{Address: c.Redirect.To, Permanent: c.Redirect.Permanent},
		LUNs:     t.inventory, PortalGroups: cfg.TPGTs(c),
	}, nil
}

// add shows l to the initiators.
//
// Preconditions: Daemon.mu is held, or initiators cannot reach t yet.
func (t *servedTarget) add(l *servedLUN) error {
	mask, err := maskOf(l.LUN)
	if err == nil {
		err = t.inventory.AddMasked(uint16(l.ID), l.unit, mask)
	}
	if err != nil {
		return fmt.Errorf("LUN %d of %s: %w", l.ID, t.name, err)
	}
	t.luns[l.ID] = l
	return nil
}

// maskOf returns which initiators see l, and which may only read.
func maskOf(l config.LUN) (lun.Mask, error) {
	seers, err := security.Compile(l.Initiators)
	if err != nil {
		return nil, err
	}
	readers, err := security.Compile(l.ReadOnlyFor)
	if err != nil {
		return nil, err
	}
	return func(initiator string) lun.Access {
		switch {
		case len(l.Initiators) > 0 && !seers.Match(initiator):
			return lun.NoAccess
		case readers.Match(initiator):
			return lun.ReadOnly
		}
		return lun.ReadWrite
	}, nil
}
