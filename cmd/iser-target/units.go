package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/gotgt"
	"github.com/iser-target/iser-target/config"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/security"
)

// In the state directory: who is who of the LUNs, and who has reserved them.
const (
	identitiesFile   = "identities.json"
	reservationsFile = "reservations.json"
)

// units are the logical units of all targets.
type units struct {
	ids          *lun.Identities
	reservations *lun.Reservations
	inventories  []*lun.Inventory
}

// openUnits opens all stores and gives the targets to the node. After an error
// the units that it returns are still to be closed.
func openUnits(cfg *config.Config, node *iscsi.Node) (*units, error) {
	u := &units{ids: lun.Ephemeral()}
	if cfg.StateDir != "" {
		ids, err := lun.OpenIdentities(filepath.Join(cfg.StateDir, identitiesFile))
		if err != nil {
			return u, fmt.Errorf("state_dir: %w", err)
		}
		u.ids = ids
		if u.reservations, err = lun.OpenReservations(filepath.Join(cfg.StateDir, reservationsFile)); err != nil {
			return u, fmt.Errorf("state_dir: %w", err)
		}
	}
	for i := range cfg.Targets {
		t := &cfg.Targets[i]
		inv := lun.NewInventory()
		u.inventories = append(u.inventories, inv)
		for j := range t.LUNs {
			if err := u.open(t.Name, &t.LUNs[j], inv); err != nil {
				return u, fmt.Errorf("target %s, LUN %d: %w", t.Name, t.LUNs[j].ID, err)
			}
		}
		who, err := security.Compile(t.Initiators)
		if err != nil {
			return u, fmt.Errorf("target %s: %w", t.Name, err)
		}
		chap, err := t.Auth.CHAP()
		if err != nil {
			return u, fmt.Errorf("target %s: auth: %w", t.Name, err)
		}
		if err := node.AddTarget(iscsi.TargetConfig{
			Name: t.Name, Alias: t.Alias, Initiators: who, Auth: chap,
			Redirect: iscsi.Redirect{Address: t.Redirect.To, Permanent: t.Redirect.Permanent},
			LUNs:     inv,
		}); err != nil {
			return u, err
		}
	}
	return u, nil
}

// open makes one logical unit. A medium that is made here gets a new identity:
// what was there before under the same name was another disk. The identity
// comes first, so that a crash in between cannot leave the new disk with the
// old one's.
func (u *units) open(target string, l *config.LUN, inv *lun.Inventory) (err error) {
	key := fmt.Sprintf("%s/%d/%s:%s", target, l.ID, l.Backend, l.Path)
	identity := u.ids.Get
	if l.Backend == "file" && absent(l.Path) {
		identity = u.ids.Renew
	}
	id, err := identity(key)
	if err != nil {
		return err
	}
	store, err := openStore(l)
	if err != nil {
		return err
	}
	unit, err := lun.New(store, lun.Options{
		Identity: id, ReadOnly: l.ReadOnly, WriteThrough: l.WriteThrough, Removable: l.Removable, Sanitize: l.Sanitize,
		Reservations: u.reservations,
	})
	if err == nil {
		err = inv.Add(uint16(l.ID), unit)
	}
	if err != nil {
		return errors.Join(err, store.Close())
	}
	return nil
}

// absent tells whether OpenFile would make the file: there is none, or an
// empty one.
func absent(path string) bool {
	fi, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist) || err == nil && fi.Size() == 0
}

// openStore opens the backend of a LUN. The configuration is valid.
func openStore(l *config.LUN) (s backend.Store, err error) {
	switch l.Backend {
	case "memory":
		return backend.OpenMemory(backend.MemoryConfig{Size: int64(l.Size), BlockSize: uint32(l.BlockSize)})
	case "file":
		s, _, err = backend.OpenFile(backend.FileConfig{Path: l.Path, Size: int64(l.Size), BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly})
		return s, err
	case "block":
		return backend.OpenBlock(backend.BlockConfig{Path: l.Path, BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly})
	case "gotgt":
		return gotgt.Open(gotgt.Config{Plugin: l.Plugin, Path: l.Path, Options: l.Options, Size: int64(l.Size), BlockSize: uint32(l.BlockSize), ReadOnly: l.ReadOnly})
	}
	return nil, fmt.Errorf("unknown backend %q", l.Backend)
}

// close syncs and closes every store.
func (u *units) close() error {
	if u == nil {
		return nil
	}
	var errs []error
	for _, inv := range u.inventories {
		errs = append(errs, inv.Close())
	}
	errs = append(errs, u.ids.Close())
	if u.reservations != nil {
		errs = append(errs, u.reservations.Close())
	}
	return errors.Join(errs...)
}
