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

// maxBuilds is how many files are made at one time: disks serve initiators, too.
const maxBuilds = 4

// ErrBuilding answers one who wants to make a file that is being made.
var ErrBuilding = errors.New("somebody else is making this file")

// ErrManyBuilds answers one who wants to make more files at a time than can be.
var ErrManyBuilds = fmt.Errorf("%d files are being made, which is all that may at one time", maxBuilds)

// A FileBuilder is a file for a LUN that a change is to add. It is made without anybody's
// turn, however long that takes; the change that it is an option of gives it its name.
type FileBuilder struct {
	*backend.FileBuilder
	d   *Daemon
	key string

	mu    sync.Mutex // held by what gives the file its name, or takes it away
	stuck bool       // the former does not come to an end; nobody else's then
}

// NewFileBuilder prepares the making of a file. Nobody else can make it, and the caller has to
// call Abort in any case.
func (d *Daemon) NewFileBuilder(c backend.BuildConfig) (*FileBuilder, error) {
	key := c.Path
	if dir, err := filepath.EvalSymlinks(filepath.Dir(c.Path)); err == nil {
		key = filepath.Join(dir, filepath.Base(c.Path)) // whatever it is called
	}
	b := &FileBuilder{d: d, key: key}
	if err := d.takeBuild(key); err != nil {
		return nil, fmt.Errorf("%s: %w", c.Path, err)
	}
	var err error
	if b.FileBuilder, err = backend.NewFileBuilder(c); err != nil {
		b.endBuild()
		return nil, err
	}
	return b, nil
}

func (d *Daemon) takeBuild(key string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.builds[key]:
		return ErrBuilding
	case len(d.builds) == maxBuilds:
		return ErrManyBuilds
	}
	d.builds[key] = true
	return nil
}

func (b *FileBuilder) endBuild() {
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	delete(b.d.builds, b.key)
}

// Build makes the file, unless ctx or the target ends before.
func (b *FileBuilder) Build(ctx context.Context, report func(backend.Progress)) error {
	log := b.d.log.With("path", b.Path(), "octets", b.Size())
	log.InfoContext(ctx, "making a file", eventKey, "lun")
	err := b.FileBuilder.Build(ctx, report)
	if errors.Is(err, context.Canceled) {
		err = fmt.Errorf("whoever has asked for it is gone: %w", err)
	}
	if err != nil {
		log.WarnContext(ctx, "file was not made", eventKey, "lun", "reason", err)
	}
	return err
}

// publish gives the file its name, which somebody waits for who has a turn.
func (b *FileBuilder) publish(ctx context.Context) error {
	_, err := b.d.calls.do(ctx, b.d.waits.store, b.Path(), "giving it its name", func(*call) (*lun.Unit, error) {
		b.mu.Lock()
		defer b.mu.Unlock()
		return nil, b.Publish()
	}, nil)
	b.stuck = errors.Is(err, ErrStuck)
	return err
}

// Abort removes the file, unless a LUN lies on it. It waits for a file system that hangs
// as little as the change has.
func (b *FileBuilder) Abort() {
	if b.stuck {
		go b.abort()
		return
	}
	b.abort()
}

func (b *FileBuilder) abort() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.FileBuilder.Abort(); err != nil {
		b.d.log.Error("what there is of a file that was not made stays", eventKey, "lun", "path", b.Path(), "reason", err)
	}
	b.endBuild()
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
