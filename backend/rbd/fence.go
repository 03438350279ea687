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

// Address returns the address of the client of the image, which Fence takes.
func (s *Store) Address(ctx context.Context) (string, error) {
	s.d.mu.Lock()
	client := ""
	if s.d.p != nil {
		client = s.d.p.client
	}
	s.d.mu.Unlock()
	list, err := watching(ctx, s.d.image)
	if err != nil {
		return "", fmt.Errorf("rbd store %s: %w", s.d.c.URI, err)
	}
	for _, w := range list {
		if client != "" && w.name() == client {
			return w.Address, nil
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
	list, err := watching(ctx, i)
	if err != nil {
		return explain(i, err)
	}
	var addresses []string
	if address != "" {
		addresses = append(addresses, address)
	}
	for _, w := range list {
		addresses = append(addresses, w.Address)
	}
	slices.Sort(addresses)
	var errs []error
	for _, a := range slices.Compact(addresses) {
		if !addressPattern.MatchString(a) {
			errs = append(errs, fmt.Errorf("%.80q is not an address of a client of Ceph", a))
			continue
		}
		_, err := runProgram(ctx, i, adminProgram, "osd", "blocklist", "add", a)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
