package daemon

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/iser-target/iser-target/backend"
)

// maxBuilds is how many files are built at a time: their disks also serve initiators.
const maxBuilds = 4

// ErrBuilding answers a request to build a file that is being built.
var ErrBuilding = errors.New("another request is creating this file")

// ErrManyBuilds answers a request to build more files at a time than maxBuilds.
var ErrManyBuilds = fmt.Errorf("%d files are being created, which is the limit", maxBuilds)

// A FileBuilder builds the file of a LUN that a change will add. That takes long and is done
// without an editor. The change, which has the FileBuilder as an option, gives the file its name.
type FileBuilder struct {
	*backend.FileBuilder
	d   *Daemon
	key string

	mu    sync.Mutex // held while the file gets its name, or is removed
	stuck bool       // the former hangs
}

// NewFileBuilder reserves the path for a file. The caller has to call Abort in any case.
func (d *Daemon) NewFileBuilder(c backend.BuildConfig) (*FileBuilder, error) {
	key := c.Path
	if dir, err := filepath.EvalSymlinks(filepath.Dir(c.Path)); err == nil {
		key = filepath.Join(dir, filepath.Base(c.Path)) // the same for all names of the directory
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

// takeBuild reserves a path.
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

// endBuild ends the reservation of the path.
func (b *FileBuilder) endBuild() {
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	delete(b.d.builds, b.key)
}

// Build builds the file. It stops when ctx ends.
func (b *FileBuilder) Build(ctx context.Context, report func(backend.Progress)) error {
	log := b.d.log.With("path", b.Path(), "octets", b.Size())
	log.InfoContext(ctx, "creating a file", eventKey, "lun")
	err := b.FileBuilder.Build(ctx, report)
	if errors.Is(err, context.Canceled) {
		err = fmt.Errorf("its client is gone: %w", err)
	}
	if err != nil {
		log.WarnContext(ctx, "file was not created", eventKey, "lun", "reason", err)
	}
	return err
}

// publish gives the file its name, within the time limit of a change.
func (b *FileBuilder) publish(ctx context.Context) error {
	err := b.d.calls.do(ctx, b.d.waits.store, b.Path(), "giving it its name", func(*call) error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if err := b.d.dropSums(b.Path()); err != nil { // of an earlier file
			return err
		}
		return b.Publish()
	}, nil)
	b.stuck = errors.Is(err, ErrStuck)
	return err
}

// Abort removes the file, unless a LUN uses it. It does not wait for a file system that hangs.
func (b *FileBuilder) Abort() {
	if b.stuck {
		go b.abort()
	} else {
		b.abort()
	}
}

// abort does what Abort says, and waits.
func (b *FileBuilder) abort() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.FileBuilder.Abort(); err != nil {
		b.d.log.Error("incomplete file was not removed", eventKey, "lun", "path", b.Path(), "reason", err)
	}
	b.endBuild()
}

// Allocate allocates space for the file of a LUN from offset from, in bytes, to its end,
// while the LUN is in use. It stops when ctx ends, and keeps the space so far.
func (d *Daemon) Allocate(ctx context.Context, target string, id int, from int64, report func(backend.Progress)) error {
	l, err := d.lun(target, id)
	if err != nil {
		return err
	}
	if err := l.unit.Allocate(ctx, from, report); err != nil {
		return fmt.Errorf("allocate space for LUN %d of %s: %w", id, target, err)
	}
	return nil
}
