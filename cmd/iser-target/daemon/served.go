package daemon

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/security/ipsec"
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

// lun returns a LUN that is served, or an ErrNotFound.
func (d *Daemon) lun(target string, id int) (*servedLUN, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.served.target(target)
	switch {
	case t == nil:
		return nil, fmt.Errorf("target %s: %w", target, ErrNotFound)
	case t.luns[id] == nil:
		return nil, fmt.Errorf("LUN %d of %s: %w", id, target, ErrNotFound)
	}
	return t.luns[id], nil
}

// find returns the first element of list that match accepts, or nil.
func find[T any](list []T, match func(*T) bool) *T {
	for i := range list {
		if match(&list[i]) {
			return &list[i]
		}
	}
	return nil
}

// portalOf returns the portal with that listen address in cfg, or nil.
func portalOf(cfg *config.Config, listen string) *config.Portal {
	return find(cfg.Portals, func(p *config.Portal) bool { return p.Listen == listen })
}

// targetOf returns the target of that name in cfg, or nil.
func targetOf(cfg *config.Config, name string) *config.Target {
	return find(cfg.Targets, func(t *config.Target) bool { return t.Name == name })
}

// lunOf returns the LUN with that number in t, or nil. t may be nil.
func lunOf(t *config.Target, id int) *config.LUN {
	if t == nil {
		return nil
	}
	return find(t.LUNs, func(l *config.LUN) bool { return l.ID == id })
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
	health  health
	// recovered counts the recoveries in place.
	recovered int
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
	networks, err := security.ParseNetworks(c.Networks)
	if err != nil {
		return iscsi.TargetConfig{}, fmt.Errorf("target %s: networks: %w", c.Name, err)
	}
	resetters, err := security.Compile(c.ResetsFor)
	if err != nil {
		return iscsi.TargetConfig{}, fmt.Errorf("target %s: resets_for: %w", c.Name, err)
	}
	chap, err := c.Auth.CHAP()
	if err != nil {
		return iscsi.TargetConfig{}, fmt.Errorf("target %s: auth: %w", c.Name, err)
	}
	return iscsi.TargetConfig{
		Limits: iscsi.TargetLimits{
			InitialR2T: &c.InitialR2T, FirstBurstLength: uint32(c.FirstBurst), MaxBurstLength: uint32(c.MaxBurst),
			MaxOutstandingR2T: uint16(c.MaxOutstandingR2T), MaxRecvDataSegmentLength: uint32(c.MaxRecvSegment),
		},
		Name: c.Name, Alias: c.Alias, Initiators: initiators, Networks: networks, ResetsFor: resetters, Auth: chap,
		Redirect: iscsi.Redirect{Address: c.Redirect.To, Permanent: c.Redirect.Permanent},
		LUNs:     t.inventory, PortalGroups: portalGroups(cfg, c), Protected: c.Demand() == ipsec.Required,
	}, nil
}

// portalGroups returns the portal groups that lead to c. A target of the cluster may only have groups of other gateways: then it is
// group 0, which no portal has, because none would mean all.
func portalGroups(cfg *config.Config, c *config.Target) []uint16 {
	if tags := cfg.TPGTs(c); len(tags) > 0 {
		return tags
	}
	return []uint16{0}
}

// add shows l to the initiators.
//
// Preconditions: Daemon.mu is held, or initiators cannot reach t yet.
func (t *servedTarget) add(l *servedLUN) error {
	if err := t.inventory.AddMasked(uint16(l.ID), l.unit, maskOf(l.LUN)); err != nil {
		return fmt.Errorf("LUN %d of %s: %w", l.ID, t.name, err)
	}
	t.luns[l.ID] = l
	return nil
}

// maskOf returns which initiators see l, and which may only read. The patterns of a
// configuration are valid.
func maskOf(l config.LUN) lun.Mask {
	seers, serr := security.Compile(l.Initiators)
	readers, rerr := security.Compile(l.ReadOnlyFor)
	valid := errors.Join(serr, rerr) == nil
	return func(initiator string) lun.Access {
		switch {
		case !valid, len(l.Initiators) > 0 && !seers.Match(initiator):
			return lun.NoAccess
		case readers.Match(initiator):
			return lun.ReadOnly
		}
		return lun.ReadWrite
	}
}
