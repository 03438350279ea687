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
			max, beyond := r.Context().Value(tooMany{}).(int)
			if !beyond {
				h.ServeHTTP(w, r)
				return
			}
			http.NewResponseController(w).SetWriteDeadline(time.Now().Add(headerTime))
			w.Header().Set("Connection", "close")
			w.Header().Set("Retry-After", "1")
			busy(w, fmt.Errorf("%d connections are open, the most that are allowed", max))
		}),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if l := limitedOf(c); l != nil && l.max > 0 {
				return context.WithValue(ctx, tooMany{}, l.max)
			}
			return ctx
		},
		ReadHeaderTimeout: headerTime,
		ReadTimeout:       readTime,
		IdleTimeout:       idleTime,
		MaxHeaderBytes:    maxHeader,
	}
}

// tooMany is the key of the limit in the context of an excess connection.
type tooMany struct{}

// Limit bounds the connections of l that are open at one time to max, plus a few that only
// get the answer that there are too many: see NewServer.
func Limit(l net.Listener, max int) net.Listener {
	return &limiter{Listener: l, max: max}
}

type limiter struct {
	net.Listener
	max int

	mu   sync.Mutex
	open int
}

// A limited is a connection that a limiter counts.
type limited struct {
	net.Conn
	max   int    // the limit that it exceeds, or 0
	leave func() // nil: it is not counted yet
}

// Accept implements net.Listener.
func (l *limiter) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		l.mu.Lock()
		n := l.open + 1
		if n <= l.max+excess {
			l.open = n
		}
		l.mu.Unlock()
		if n > l.max+excess {
			c.Close()
			continue
		}
		lc := limitedOf(c)
		if lc == nil {
			lc = &limited{Conn: c}
			c = lc
		}
		lc.leave = sync.OnceFunc(l.leave)
		if n > l.max {
			lc.max = l.max
		}
		return c, nil
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

func (l *limiter) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
}

// Close implements net.Conn.
func (c *limited) Close() error {
	if c.leave != nil {
		defer c.leave()
	}
	return c.Conn.Close()
}
