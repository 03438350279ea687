package rbd

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"

	"github.com/iser-target/iser-target/backend/rbd/rbduri"
)

// adminProgram changes the blocklist of a cluster.
const adminProgram = "ceph"

// addressPattern matches addresses of clients of Ceph, such as 10.0.0.1:0/3892811.
var addressPattern = regexp.MustCompile(`^[0-9A-Za-z\[][0-9A-Za-z\[\]:./-]*$`)

// Address returns the address of the client of the image, which Fence takes. The Store can be used before it is known, because the cluster takes a moment to
// tell. It is empty for a ReadOnly store.
func (s *Store) Address(ctx context.Context) (string, error) {
	if s.d.c.ReadOnly {
		return "", nil
	}
	s.d.mu.Lock()
	p := s.d.p
	s.d.mu.Unlock()
	if p != nil {
		select {
		case <-p.known:
		case <-ctx.Done():
			return "", fmt.Errorf("rbd store %s: address of its client: %w", s.d.c.URI, context.Cause(ctx))
		}
		if p.client.Address != "" {
			return p.client.Address, nil
		}
	}
	return "", fmt.Errorf("rbd store %s: its client is not known to the cluster, so that nobody could fence it", s.d.c.URI)
}

// Fence returns when the cluster obeys no client any longer that has the image open, nor the one with that address, unless it is empty. The
// user of Ceph needs the right to change the blocklist, which is in profile rbd.
func Fence(ctx context.Context, uri, address string) error {
	err := fence(ctx, uri, address)
	if err != nil {
		return fmt.Errorf("rbd store %s: %w", uri, err)
	}
	return nil
}

func fence(ctx context.Context, uri, address string) error {
	i, err := rbduri.Parse(uri)
	if err != nil {
		return err
	}
	// At once, because ceph takes a second to start.
	known := make(chan error, 1)
	go func() {
		if address == "" {
			known <- nil
			return
		}
		known <- blocklist(ctx, i, address)
	}()
	list, err := watching(ctx, i)
	if err != nil {
		err = explain(i, err)
	}
	done := []string{address}
	for _, w := range list {
		if !slices.Contains(done, w.Address) {
			done = append(done, w.Address)
			err = errors.Join(err, blocklist(ctx, i, w.Address))
		}
	}
	return errors.Join(<-known, err)
}

// blocklist makes the cluster refuse a client.
func blocklist(ctx context.Context, i *rbduri.Image, address string) error {
	if !addressPattern.MatchString(address) {
		return fmt.Errorf("%.80q is not an address of a client of Ceph", address)
	}
	_, err := runProgram(ctx, i, adminProgram, "osd", "blocklist", "add", address)
	return err
}
