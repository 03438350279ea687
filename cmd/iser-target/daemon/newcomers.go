package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/iser-target/iser-target/security/limits"
)

// errDisplaced ends a newcomer whose place a new connection takes.
var errDisplaced = errors.New("a new connection has taken its place")

// newcomerBytes is what a newcomer counts of limits.memory. All of them together have the quarter that
// is never lent, so that they leave an initiator the share of its session.
const newcomerBytes = 48 << 10

// newcomers give connections their places: those of max_connections, connections_per_address and
// connections_per_portal. Connections that have not logged in to a target, and those of discovery,
// are newcomers. At a limit one of them yields, so that newcomers cannot keep an initiator out.
// limits.Crowd says which.
type newcomers struct {
	limits *limits.Set

	mu      sync.Mutex // held for moments; before the locks of limits
	crowd   limits.Crowd
	portals map[string]*limits.Crowd // by address of the portal, with those of it
}

// A newcomer is a connection from its accept to its end. It is in the crowds until it has logged in.
type newcomer struct {
	ctx    context.Context // ends when the newcomer is displaced, or with its connection
	cancel context.CancelCauseFunc
	from   net.Addr
	portal string

	// Under newcomers.mu:
	all, near limits.Member // of the crowd of all portals, and of that of its own
	placed    bool          // it has places

	mu        sync.Mutex
	abort     func(reason error) // closes the connection; nil: not known yet
	displaced error              // why it yielded
}

// add takes the places of nc, which the target accepted at a portal. If others have yielded, their
// connections end. The error says which limit is in the way. The caller calls abortBy, and end when
// the connection has ended.
func (n *newcomers) add(ctx context.Context, nc net.Conn, portal net.Addr) (*newcomer, error) {
	c := &newcomer{from: nc.RemoteAddr(), portal: portal.String()}
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.take(c); err != nil {
		return nil, err
	}
	c.ctx, c.cancel = context.WithCancelCause(ctx)
	n.crowd.Add(c.from, &c.all)
	near := n.portals[c.portal]
	if near == nil {
		if n.portals == nil {
			n.portals = map[string]*limits.Crowd{}
		}
		near = &limits.Crowd{}
		n.portals[c.portal] = near
	}
	near.Add(c.from, &c.near)
	c.all.Value, c.near.Value = c, c
	return c, nil
}

// take takes the places of c. The places of the address come first: an address that has used them up
// displaces nobody else.
//
// Preconditions: n.mu is held.
func (n *newcomers) take(c *newcomer) error {
	l, key := n.limits, limits.AddressKey(c.from)
	err := n.room(&l.PerAddress.Limit, c, func() bool { return l.PerAddress.Take(key, 1) },
		func() *limits.Member { return n.crowd.VictimOf(c.from) })
	if err != nil {
		return err
	}
	err = n.room(&l.Connections, c, func() bool { return l.Connections.Take(1) },
		func() *limits.Member { return n.crowd.Victim(c.from) })
	if err != nil {
		l.PerAddress.Give(key, 1)
		return err
	}
	err = n.room(&l.PerPortal.Limit, c, func() bool { return l.PerPortal.Take(c.portal, 1) }, func() *limits.Member {
		if near := n.portals[c.portal]; near != nil {
			return near.Victim(c.from)
		}
		return nil
	})
	if err != nil {
		l.PerAddress.Give(key, 1)
		l.Connections.Give(1)
		return err
	}
	err = n.room(&l.Memory, c, func() bool { return int64(n.crowd.Len()+1)*newcomerBytes <= l.Memory.Max()/4 },
		func() *limits.Member { return n.crowd.Victim(c.from) })
	if err != nil {
		l.PerAddress.Give(key, 1)
		l.Connections.Give(1)
		l.PerPortal.Give(c.portal, 1)
		return err
	}
	c.placed = true
	return nil
}

// room takes a place of l for c, and displaces victims until there is one.
//
// Preconditions: n.mu is held.
func (n *newcomers) room(l *limits.Limit, c *newcomer, take func() bool, victim func() *limits.Member) error {
	if take() {
		return nil
	}
	l.Bite(limits.AddressKey(c.from))
	for {
		m := victim()
		if m == nil {
			return errors.New(l.String())
		}
		v := m.Value.(*newcomer)
		n.leave(v)
		n.give(v)
		v.displace(fmt.Errorf("%v, and this one had not logged in: %w", l, errDisplaced))
		if take() {
			return nil
		}
	}
}

// leave takes c out of the crowds.
//
// Preconditions: n.mu is held.
func (n *newcomers) leave(c *newcomer) {
	n.crowd.Remove(&c.all)
	if near := n.portals[c.portal]; near != nil {
		near.Remove(&c.near)
		if near.Len() == 0 {
			delete(n.portals, c.portal)
		}
	}
}

// give gives back the places of c, once.
//
// Preconditions: n.mu is held.
func (n *newcomers) give(c *newcomer) {
	if !c.placed {
		return
	}
	c.placed = false
	n.limits.Connections.Give(1)
	n.limits.PerPortal.Give(c.portal, 1)
	n.limits.PerAddress.Give(limits.AddressKey(c.from), 1)
}

// advance notes that the login of c has come to p.
func (n *newcomers) advance(c *newcomer, p limits.Progress) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.crowd.Advance(&c.all, p)
	if near := n.portals[c.portal]; near != nil {
		near.Advance(&c.near, p)
	}
}

// joined notes that c has logged in to a target. It keeps its places until it ends.
func (n *newcomers) joined(c *newcomer) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.leave(c)
}

// end gives back the places of c, whose connection has ended.
func (n *newcomers) end(c *newcomer) {
	c.cancel(nil)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.leave(c)
	n.give(c)
}

// shed ends the newcomer that yields first, for that reason. It returns false if there is no newcomer.
func (n *newcomers) shed(from net.Addr, reason error) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	m := n.crowd.Victim(from)
	if m == nil {
		return false
	}
	c := m.Value.(*newcomer)
	n.leave(c)
	n.give(c)
	c.displace(reason)
	return true
}

// abortBy sets how displace closes the connection of c.
func (c *newcomer) abortBy(abort func(error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setAbort(abort)
}

// setAbort does the work of abortBy.
//
// Preconditions: c.mu is held.
func (c *newcomer) setAbort(abort func(error)) {
	c.abort = abort
	if c.displaced != nil {
		abort(c.displaced)
	}
}

// abortFirst does the work of abortBy, unless abortBy has been called.
func (c *newcomer) abortFirst(abort func(error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.abort == nil {
		c.setAbort(abort)
	}
}

// ended returns why c has ended although its initiator has done nothing wrong, or nil.
func (c *newcomer) ended() error {
	var unprotected unprotectedError
	if cause := context.Cause(c.ctx); errors.Is(cause, errDisplaced) || errors.As(cause, &unprotected) {
		return cause
	}
	return nil
}

// displace ends c for that reason.
func (c *newcomer) displace(reason error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.displaced = reason
	c.cancel(reason)
	if c.abort != nil {
		c.abort(reason)
	}
}
