package daemon

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/iser-target/iser-target/cmd/iser-target/capture"
)

// errDisplaced ends a newcomer whose place a new connection takes.
var errDisplaced = errors.New("a new connection has taken its place")

// newcomers are the connections that have not logged in to a target: silent ones and those
// of discovery. At the limit of connections a new one displaces the oldest newcomer, so
// that newcomers cannot keep an initiator out. The zero value is ready.
type newcomers struct {
	mu   sync.Mutex
	list []newcomer // the oldest first
}

type newcomer struct {
	nc  *capture.Conn
	end context.CancelCauseFunc
}

// add adds nc. The context ends when nc is displaced. When nc ends, the caller has to
// call end and to remove nc.
func (n *newcomers) add(ctx context.Context, nc *capture.Conn) (_ context.Context, end context.CancelCauseFunc) {
	ctx, end = context.WithCancelCause(ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.list = append(n.list, newcomer{nc, end})
	return ctx, end
}

// remove removes a connection that has logged in or ended.
func (n *newcomers) remove(nc *capture.Conn) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if i := slices.IndexFunc(n.list, func(c newcomer) bool { return c.nc == nc }); i >= 0 {
		n.list = slices.Delete(n.list, i, i+1)
	}
}

// displace ends the oldest newcomer for that reason. It returns false if there is no
// newcomer.
func (n *newcomers) displace(reason error) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.list) == 0 {
		return false
	}
	c := n.list[0]
	n.list = slices.Delete(n.list, 0, 1)
	c.end(reason)
	c.nc.Abort(reason)
	return true
}
