package etcd

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/iser-target/iser-target/lun/state"
)

// A lease is a state.Lease in etcd, which a new leader of etcd restarts, so that it never ends early.
type lease struct {
	home *Home
	id   clientv3.LeaseID
	ttl  time.Duration
}

// Lease implements state.Lessor. etcd counts whole seconds, and has a least TTL of its own, 2 s with its defaults.
func (h *Home) Lease(ctx context.Context, ttl time.Duration) (state.Lease, error) {
	if ttl < time.Second || ttl > fenceTTL {
		return nil, fmt.Errorf("a lease of %v: it can be 1s to %v", ttl, fenceTTL)
	}
	ctx, done, err := h.begin(ctx, true)
	if err != nil {
		return nil, err
	}
	defer done()
	grant, err := h.client.Grant(ctx, int64((ttl+time.Second-1)/time.Second))
	if err != nil {
		return nil, h.explain(ctx, err)
	}
	return &lease{h, grant.ID, time.Duration(grant.TTL) * time.Second}, nil
}

// ID implements state.Lease.
func (l *lease) ID() string { return strconv.FormatInt(int64(l.id), 16) }

// TTL implements state.Lease.
func (l *lease) TTL() time.Duration { return l.ttl }

// Renew implements state.Lease.
func (l *lease) Renew(ctx context.Context) error {
	ctx, done, err := l.home.begin(ctx, true)
	if err != nil {
		return err
	}
	defer done()
	_, err = l.home.client.KeepAliveOnce(ctx, l.id)
	return l.explain(ctx, err)
}

// Put implements state.Lease.
func (l *lease) Put(ctx context.Context, key string, data []byte, base state.Revision) (state.Revision, error) {
	return l.home.put(ctx, key, data, base, l.id, "")
}

// PutHeld implements state.Lease.
func (l *lease) PutHeld(ctx context.Context, key string, data []byte, base state.Revision, held string) (state.Revision, error) {
	return l.home.put(ctx, key, data, base, l.id, held)
}

// End implements state.Lease.
func (l *lease) End(ctx context.Context) error { return l.home.endLease(ctx, l.id) }

// EndLease implements state.Lessor.
func (h *Home) EndLease(ctx context.Context, id string) error {
	n, err := strconv.ParseInt(id, 16, 64)
	if err != nil {
		return fmt.Errorf("lease %q: want a hexadecimal number", id)
	}
	return h.endLease(ctx, clientv3.LeaseID(n))
}

func (h *Home) endLease(ctx context.Context, id clientv3.LeaseID) error {
	ctx, done, err := h.begin(ctx, true)
	if err != nil {
		return err
	}
	defer done()
	if _, err = h.client.Revoke(ctx, id); err == nil || errors.Is(err, rpctypes.ErrLeaseNotFound) {
		return nil
	}
	return h.explain(ctx, err)
}

// explain returns the error of a call about l that failed with err, or nil if err is.
func (l *lease) explain(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, rpctypes.ErrLeaseNotFound):
		return fmt.Errorf("%s: %w", l.home.where, state.ErrLeaseEnded)
	}
	return l.home.explain(ctx, err)
}
