package daemon

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/lun"
)

// maxMakings is how many files are made at one time: disks serve initiators, too.
const maxMakings = 4

// ErrMaking answers one who wants to make a file that is being made.
var ErrMaking = errors.New("somebody else is making this file")

// ErrMakings answers one who wants to make more files at a time than can be.
var ErrMakings = fmt.Errorf("%d files are being made, which is all that may at one time", maxMakings)

// A Making is a file for a LUN that a change is to add. It is made without anybody's
// turn, however long that takes; the change that it is an option of gives it its name.
type Making struct {
	*backend.Making
	d   *Daemon
	key string

	mu    sync.Mutex // held by what gives the file its name, or takes it away
	stuck bool       // the former does not come to an end; nobody else's then
}

// NewMaking prepares the making of a file. Nobody else can make it, and the caller has to
// call Discard in any case.
func (d *Daemon) NewMaking(c backend.MakeConfig) (*Making, error) {
	key := c.Path
	if dir, err := filepath.EvalSymlinks(filepath.Dir(c.Path)); err == nil {
		key = filepath.Join(dir, filepath.Base(c.Path)) // whatever it is called
	}
	m := &Making{d: d, key: key}
	if err := d.takeMaking(key); err != nil {
		return nil, fmt.Errorf("%s: %w", c.Path, err)
	}
	var err error
	if m.Making, err = backend.NewMaking(c); err != nil {
		m.endMaking()
		return nil, err
	}
	return m, nil
}

func (d *Daemon) takeMaking(key string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.makings[key]:
		return ErrMaking
	case len(d.makings) == maxMakings:
		return ErrMakings
	}
	d.makings[key] = true
	return nil
}

func (m *Making) endMaking() {
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	delete(m.d.makings, m.key)
}

// Run makes the file, unless ctx or the target ends before.
func (m *Making) Run(ctx context.Context, report func(backend.Progress)) error {
	log := m.d.log.With("path", m.Path(), "octets", m.Size())
	log.InfoContext(ctx, "making a file", eventKey, "lun")
	err := m.Making.Run(ctx, report)
	if errors.Is(err, context.Canceled) {
		err = fmt.Errorf("whoever has asked for it is gone: %w", err)
	}
	if err != nil {
		log.WarnContext(ctx, "file was not made", eventKey, "lun", "reason", err)
	}
	return err
}

// publish gives the file its name, which somebody waits for who has a turn.
func (m *Making) publish(ctx context.Context) error {
	_, err := m.d.calls.do(ctx, m.d.waits.store, m.Path(), "giving it its name", func(*call) (*lun.Unit, error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		return nil, m.Publish()
	}, nil)
	m.stuck = errors.Is(err, ErrStuck)
	return err
}

// Discard removes the file, unless a LUN lies on it. It waits for a file system that hangs
// as little as the change has.
func (m *Making) Discard() {
	if m.stuck {
		go m.discard()
		return
	}
	m.discard()
}

func (m *Making) discard() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.Making.Discard(); err != nil {
		m.d.log.Error("what there is of a file that was not made stays", eventKey, "lun", "path", m.Path(), "reason", err)
	}
	m.endMaking()
}

// Allocate has the file of a LUN take space for all octets from that one to its end, while
// the LUN is in use. It stops when ctx ends; what it has taken stays.
func (d *Daemon) Allocate(ctx context.Context, target string, id int, from int64, report func(backend.Progress)) error {
	d.mu.Lock()
	var l *servedLUN
	if t := d.target(target); t != nil {
		l = t.luns[id]
	}
	d.mu.Unlock()
	if l == nil {
		return fmt.Errorf("LUN %d of target %s: %w", id, target, ErrNotFound)
	}
	if err := l.unit.Allocate(ctx, from, report); err != nil {
		return fmt.Errorf("allocate space for LUN %d of target %s: %w", id, target, err)
	}
	return nil
}
