package state

import (
	"context"
	"errors"
	"time"
)

// A Lessor is a Home that removes values when nobody renews their lease.
type Lessor interface {
	Home
	// Lease begins a lease. The home may make it longer than ttl, see Lease.TTL.
	Lease(ctx context.Context, ttl time.Duration) (Lease, error)
	// EndLease removes the values of a lease that another process may have begun. It does nothing if the lease is over.
	EndLease(ctx context.Context, id string) error
}

// A Lease keeps values in a Home. When it was not renewed for its TTL, the home removes them, soon after that and never before. Its
// methods are safe for concurrent use, and end like those of Home.
type Lease interface {
	// ID returns what Lessor.EndLease takes.
	ID() string
	// TTL returns how long the values are safe from the moment when Renew, or Lessor.Lease, was called.
	TTL() time.Duration
	// Renew fails with ErrLeaseEnded if the values are permanently gone.
	Renew(ctx context.Context) error
	// Put does what Home.Put does. The value stays as long as the lease. Put fails with ErrLeaseEnded after that.
	Put(ctx context.Context, key string, data []byte, base Revision) (Revision, error)
	// PutHeld does what Home.Put does, if the value of the key held is one of this lease at that moment, and fails with an ErrConflict
	// otherwise. What it stores does not end with the lease.
	PutHeld(ctx context.Context, key string, data []byte, base Revision, held string) (Revision, error)
	// End removes the values now.
	End(ctx context.Context) error
}

// ErrLeaseEnded is in errors about a lease whose values the home has removed.
var ErrLeaseEnded = errors.New("the lease has expired")
