package daemon

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/iser-target/iser-target/cmd/iser-target/capture"
)

// errGaveWay is why a newcomer ends whose place another connection has taken.
var errGaveWay = errors.New("a new connection has taken its place")

// newcomers are the connections that have not logged in to a target: of those who say
// nothing, and of discovery. Where there is no place left, the one that has been here
// longest gives way, so that no number of them keeps an initiator out. The zero value
// is ready.
type newcomers struct {
	mu   sync.Mutex
	list []newcomer // the oldest first
}

type newcomer struct {
	nc  *capture.Conn
	end context.CancelCauseFunc
}

// add takes nc up, which is to be removed when it ends; end is for then, too. The
// context ends when nc gives way.
func (n *newcomers) add(ctx context.Context, nc *capture.Conn) (_ context.Context, end context.CancelCauseFunc) {
	ctx, end = context.WithCancelCause(ctx)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.list = append(n.list, newcomer{nc, end})
	return ctx, end
}

// remove is for a connection that has logged in, or has ended.
func (n *newcomers) remove(nc *capture.Conn) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if i := slices.IndexFunc(n.list, func(c newcomer) bool { return c.nc == nc }); i >= 0 {
		n.list = slices.Delete(n.list, i, i+1)
	}
}

// giveWay ends the connection that has been a newcomer longest, for that reason. Without
// one the result is false.
func (n *newcomers) giveWay(reason error) bool {
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
