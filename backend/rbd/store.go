package rbd

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/nbd"
	"github.com/iser-target/iser-target/backend/rbd/rbduri"
)

// Config describes a Store.
type Config struct {
	URI       string // see rbduri.Parse
	Size      int64  // bytes: a smaller image is enlarged, and a larger one refused; 0: the size of the image
	BlockSize uint32 // of the LUN, in bytes: 512 or 4096; 0: 512
	ReadOnly  bool
	// Shared says that other gateways open the image, too, after this Store was fenced or has failed. So its daemon is not started
	// again, and calls fail with backend.ErrClosed then: see nbd.Config.Once.
	Shared bool
	// Dir has the socket, and a file about the client of RBD, by which a process that follows this one after a kill finds it. Empty: a temporary
	// directory, and no file.
	Dir string

	// What is told about the daemon and the connection, from goroutines of the Store; nil: nothing.
	Said func(line string)         // the daemon said something, or ended, or cannot be started
	Lost func(reason error)        // the connection broke, and calls wait
	Back func(after time.Duration) // the Store is connected again, and the image has all changes
}

// closeTime is what Close gives the cluster before it ends the daemon. Tests change it.
var closeTime = 20 * time.Second

// A client is a Store of package nbd.
type client interface {
	backend.Store
	backend.Settler
	backend.SyncFailer
	backend.Inspector
	backend.Recoverer
	backend.Grower
	SetSize(int64)
}

// A Store is an image. See the package.
type Store struct {
	client
	d        *daemon
	closed   atomic.Bool
	resizing sync.Mutex // of a shared Store: held by Resize, which ends the connection, so that nobody takes that for a failure before
}

// Open starts a daemon and opens the image. It gives up after about 30 s.
func Open(c Config) (*Store, error) {
	s, err := open(c)
	if err != nil {
		return nil, fmt.Errorf("rbd store %s: %w", c.URI, err)
	}
	return s, nil
}

// Probe returns the error that Open would return, or nil. The image does not become larger.
func Probe(c Config) error {
	i, err := rbduri.Parse(c.URI)
	if err != nil {
		return err
	}
	if !c.ReadOnly && c.Size > 0 {
		ctx, cancel := context.WithTimeout(context.Background(), commandTime)
		defer cancel()
		has, err := sizeOf(ctx, i)
		switch names, listed := list(ctx, i); {
		case err == nil && has < c.Size: // the target enlarges it
			c.Size = has
		case err != nil && listed == nil && !slices.Contains(names, i.Name): // the target creates it
			return nil
		}
	}
	c.ReadOnly, c.Dir = true, ""
	s, err := Open(c)
	if err != nil {
		return err
	}
	return s.Close()
}

func open(c Config) (*Store, error) {
	image, err := rbduri.Parse(c.URI)
	if err != nil {
		return nil, err
	}
	h := fnv.New64a()
	h.Write([]byte(image.Conf + " " + image.String()))
	key := fmt.Sprintf("%016x", h.Sum64())
	d := &daemon{c: c, image: image, ended: make(chan struct{})}
	d.ctx, d.closing = context.WithCancel(context.Background())
	dir := c.Dir
	if dir == "" {
		dir = os.TempDir()
	} else if !c.ReadOnly {
		d.record = filepath.Join(dir, "rbd-"+key+".client")
		d.recall()
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return nil, err
	}
	if err := d.open(dir, key); err != nil {
		return nil, err
	}
	s := &Store{d: d}
	d.mu.Lock()
	err = d.start(c.Size, true)
	d.mu.Unlock()
	if err != nil {
		close(d.ended)
		d.end(endTime)
		return nil, err
	}
	opened := make(chan struct{})
	go d.supervise(func() int64 {
		select {
		case <-opened:
			if s.client != nil {
				return s.Info().Size
			}
		default:
		}
		return c.Size
	})
	uri := url.URL{Scheme: "nbd+unix", Path: "/" + exportName, RawQuery: url.Values{"socket": {d.socket}}.Encode()}
	inner, err := nbd.Open(nbd.Config{URI: uri.String(), BlockSize: c.BlockSize, ReadOnly: c.ReadOnly, Once: c.Shared, Stable: true, Ready: d.wait, Lost: s.lost, Back: c.Back})
	if err != nil {
		close(opened)
		d.end(endTime)
		return nil, err
	}
	s.client = inner.(client)
	close(opened)
	return s, nil
}

// lost starts the daemon again if the cluster has put its client on the blocklist: it refuses all I/O then.
func (s *Store) lost(reason error) {
	if s.d.c.Shared {
		s.resizing.Lock()
		defer s.resizing.Unlock()
	}
	if errors.Is(reason, nbd.ErrShutdown) {
		if s.d.c.Shared {
			reason = fmt.Errorf("the Ceph cluster refuses the client (blocklist): %w", reason)
		} else {
			reason = fmt.Errorf("the Ceph cluster refuses the client (blocklist), which is closed and opened again: %w", reason)
			s.d.kill()
		}
	}
	if s.d.c.Lost != nil {
		s.d.c.Lost(reason)
	}
}

// Extent implements backend.Mapper.
func (s *Store) Extent(off int64) (mapped bool, n int64, err error) {
	return backend.Extent(s.client, off)
}

// Inspect implements backend.Inspector.
func (s *Store) Inspect() error {
	err := s.client.Inspect()
	if reason := s.d.why(); err != nil && reason != nil {
		s.d.told.Lock()
		since := s.d.since
		s.d.told.Unlock()
		return fmt.Errorf("no daemon for %v, and commands wait: %w", time.Since(since).Round(time.Second), reason)
	}
	return err
}

// Grow implements backend.Grower.
func (s *Store) Grow() (int64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), commandTime)
	defer cancel()
	size, err := sizeOf(ctx, s.d.image)
	if err != nil {
		return 0, err
	}
	if size -= size % int64(s.Info().BlockSize); size > s.Info().Size {
		err = s.Resize(size)
	}
	return s.Info().Size, err
}

// Resize implements backend.Resizer.
func (s *Store) Resize(size int64) error {
	if s.closed.Load() {
		return backend.ErrClosed
	}
	if s.d.c.ReadOnly {
		return backend.ErrReadOnly
	}
	if s.d.c.Shared {
		s.resizing.Lock()
		defer s.resizing.Unlock()
	}
	old := s.Info().Size
	if size < old { // before, so that nobody expects more of the export
		if err := s.Settle(); err != nil {
			return err
		}
		s.SetSize(size)
	}
	err := s.d.resize(size)
	if err != nil {
		s.SetSize(old)
		return fmt.Errorf("rbd store %s: %w", s.d.c.URI, err)
	}
	switch {
	case s.d.c.Shared: // the client of NBD is gone, and another Store follows
		s.SetSize(size)
	case size > old:
		_, err = s.client.Grow()
	}
	return err
}

// Close implements backend.Store. A cluster that does not answer has 20 s before the daemon is ended. Then calls in progress fail, and what is not flushed is
// lost.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return backend.ErrClosed
	}
	finished := make(chan error, 1)
	go func() { finished <- s.client.Close() }()
	select {
	case err := <-finished:
		limit := endTime
		if err == nil {
			limit = cleanTime
		}
		s.d.end(limit)
		return err
	case <-time.After(closeTime):
	}
	s.d.end(endTime)
	return <-finished
}
