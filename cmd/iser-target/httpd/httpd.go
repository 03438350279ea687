// Package httpd bounds the HTTP servers of the target: the number of connections, the time
// that a peer may take, and the size of its requests. Clients that have not authenticated
// cannot use up the connections of those that have.
package httpd

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/iser-target/iser-target/security/limits"
)

const (
	// excess is how many connections beyond the limit get the answer that there are too
	// many. Further ones are closed.
	excess = 16

	headerTime = 5 * time.Second
	readTime   = 30 * time.Second // of a request
	idleTime   = 2 * time.Minute
	maxHeader  = 64 << 10 // bytes
)

// NewServer returns a server of h with bounds for everything that http.Server leaves
// unbounded, except the time of an answer, which h bounds, or the caller by WriteTimeout.
// Requests on connections beyond the limit of Limit go to busy with the error, or, if busy is nil,
// get status 503 and a line of text.
func NewServer(h http.Handler, busy func(http.ResponseWriter, error)) *http.Server {
	if busy == nil {
		busy = func(w http.ResponseWriter, err error) { http.Error(w, err.Error(), http.StatusServiceUnavailable) }
	}
	return &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			c, _ := r.Context().Value(connKey{}).(*limited)
			if c == nil || !c.beyond {
				c.begin()
				defer c.rest()
				h.ServeHTTP(w, r)
				return
			}
			http.NewResponseController(w).SetWriteDeadline(time.Now().Add(headerTime))
			w.Header().Set("Connection", "close")
			w.Header().Set("Retry-After", "1")
			busy(w, c.reason)
		}),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if l := limitedOf(c); l != nil && l.of != nil {
				return context.WithValue(ctx, connKey{}, l)
			}
			return ctx
		},
		ReadHeaderTimeout: headerTime,
		ReadTimeout:       readTime,
		IdleTimeout:       idleTime,
		MaxHeaderBytes:    maxHeader,
	}
}

// connKey is the key of the connection in the context of a request.
type connKey struct{}

// Limit bounds the connections of l that are open at one time to max, plus a few that only
// get the answer that there are too many: see NewServer. At the limit a connection without a request
// yields, of the address that has most of those. One address gets at most seven eighths of the
// connections.
func Limit(l net.Listener, max int) net.Listener {
	return &limiter{Listener: l, max: max, of: map[string]int{}}
}

type limiter struct {
	net.Listener
	max int

	mu      sync.Mutex
	open    int            // without those beyond the limit
	of      map[string]int // open, by address
	silent  limits.Crowd   // those of them without a request
	beyond  int
	refused limits.Crowd // those beyond the limit
}

// A limited is a connection that a limiter counts.
type limited struct {
	net.Conn
	of     *limiter // nil: it is not counted yet
	from   string
	beyond bool // the limit, because of reason
	reason error

	// Under limiter.mu:
	member   limits.Member
	requests int // in progress
	left     bool
}

// Accept implements net.Listener.
func (l *limiter) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		lc := limitedOf(c)
		if lc == nil {
			lc = &limited{Conn: c}
			c = lc
		}
		lc.from = limits.AddressKey(c.RemoteAddr())
		victim, ok := l.enter(lc)
		if victim != nil {
			victim.Close()
		}
		if ok {
			return c, nil
		}
		c.Close()
	}
}

// enter counts c, or reports that there is no place for it. victim is the connection that yields.
func (l *limiter) enter(c *limited) (victim *limited, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m, err := l.full(c)
	if err != nil && m == nil {
		c.beyond, c.reason = true, err
		if l.beyond >= excess {
			if m = l.refused.Victim(c.RemoteAddr()); m == nil {
				return nil, false
			}
		}
	}
	if m != nil {
		victim = m.Value.(*limited)
		l.leave(victim)
	}
	c.of, c.member.Value = l, c
	if c.beyond {
		l.beyond++
		l.refused.Add(c.RemoteAddr(), &c.member)
		return victim, true
	}
	l.open++
	l.of[c.from]++
	l.silent.Add(c.RemoteAddr(), &c.member)
	return victim, true
}

// full returns the connection that yields to c, or why there is no place for c.
//
// Preconditions: l.mu is held.
func (l *limiter) full(c *limited) (*limits.Member, error) {
	each := l.max - l.max/8
	switch {
	case each < l.max && l.of[c.from] >= each:
		return l.silent.VictimOf(c.RemoteAddr()), fmt.Errorf("%d connections of this address are open, the most that are allowed", each)
	case l.open >= l.max:
		return l.silent.Victim(c.RemoteAddr()), fmt.Errorf("%d connections are open, the most that are allowed", l.max)
	}
	return nil, nil
}

// leave counts c no longer.
//
// Preconditions: l.mu is held.
func (l *limiter) leave(c *limited) {
	if c.left {
		return
	}
	c.left = true
	if c.beyond {
		l.refused.Remove(&c.member)
		l.beyond--
		return
	}
	l.silent.Remove(&c.member)
	l.open--
	if l.of[c.from]--; l.of[c.from] == 0 {
		delete(l.of, c.from)
	}
}

// begin notes that c has a request. A connection with a request does not yield.
func (c *limited) begin() {
	if c == nil {
		return
	}
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if c.requests++; c.requests == 1 {
		c.of.silent.Remove(&c.member)
	}
}

// rest notes that a request of c has been answered. Of the connections of an address those that never
// had a request yield first.
func (c *limited) rest() {
	if c == nil {
		return
	}
	c.of.mu.Lock()
	defer c.of.mu.Unlock()
	if c.requests--; c.requests == 0 && !c.left {
		c.of.silent.Add(c.RemoteAddr(), &c.member)
		c.of.silent.Advance(&c.member, limits.Named)
	}
}

// limitedOf returns c, or the connection below c if c is TLS, or nil. It is not the outer
// one, because http.Server must see a *tls.Conn.
func limitedOf(c net.Conn) *limited {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	l, _ := c.(*limited)
	return l
}

// Under returns the connection that the listener of Limit, or of TLS, got.
func Under(c net.Conn) net.Conn {
	if l := limitedOf(c); l != nil {
		return l.Conn
	}
	return c
}

// Close implements net.Conn.
func (c *limited) Close() error {
	if l := c.of; l != nil {
		l.mu.Lock()
		l.leave(c)
		l.mu.Unlock()
	}
	return c.Conn.Close()
}
