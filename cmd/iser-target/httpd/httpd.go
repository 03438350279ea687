// Package httpd keeps what the target serves by HTTP within bounds: of connections, of
// the time that a peer may take, and of what it may send. Who has nothing to prove
// cannot take from those who have.
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
	// excess connections, beyond those that are answered, are told that there are too
	// many; further ones are closed.
	excess = 16

	headerTime = 5 * time.Second
	readTime   = 30 * time.Second // of a request
	idleTime   = 2 * time.Minute
	maxHeader  = 64 << 10 // octets
)

// NewServer returns a server of h with bounds for all that has none in http.Server, but
// for the time of an answer: that is for h to bound, or for the caller by WriteTimeout.
// What comes by a connection that Limit has found to be one too many is answered by
// busy, or if that is nil by 503 and a line of text.
func NewServer(h, busy http.Handler) *http.Server {
	if busy == nil {
		busy = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			http.Error(w, TooMany(r).Error(), http.StatusServiceUnavailable)
		})
	}
	return &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if TooMany(r) == nil {
				h.ServeHTTP(w, r)
				return
			}
			http.NewResponseController(w).SetWriteDeadline(time.Now().Add(headerTime))
			w.Header().Set("Connection", "close")
			w.Header().Set("Retry-After", "1")
			busy.ServeHTTP(w, r)
		}),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if l := limitedOf(c); l != nil && l.most > 0 {
				return context.WithValue(ctx, tooMany{}, l.most)
			}
			return ctx
		},
		ReadHeaderTimeout: headerTime,
		ReadTimeout:       readTime,
		IdleTimeout:       idleTime,
		MaxHeaderBytes:    maxHeader,
	}
}

// tooMany is the key of a context that has the number of connections that are allowed.
type tooMany struct{}

// TooMany is why a request is not answered because of how many connections there are, or
// nil.
func TooMany(r *http.Request) error {
	if most, ok := r.Context().Value(tooMany{}).(int); ok {
		return fmt.Errorf("%d connections are open, which is all that may be", most)
	}
	return nil
}

// Limit has no more than most connections of l open at one time, and some that are to be
// told so: see NewServer.
func Limit(l net.Listener, most int) net.Listener {
	return &limiter{Listener: l, most: most}
}

type limiter struct {
	net.Listener
	most int

	mu   sync.Mutex
	open int
}

// limited is a connection that counts.
type limited struct {
	net.Conn
	most  int    // 0: it is none too many
	leave func() // nil: it does not count yet
}

// Accept is that of net.Listener.
func (l *limiter) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		l.mu.Lock()
		n := l.open + 1
		if n <= l.most+excess {
			l.open = n
		}
		l.mu.Unlock()
		if n > l.most+excess {
			c.Close()
			continue
		}
		lc := limitedOf(c)
		if lc == nil {
			lc = &limited{Conn: c}
			c = lc
		}
		lc.leave = sync.OnceFunc(l.leave)
		if n > l.most {
			lc.most = l.most
		}
		return c, nil
	}
}

// limitedOf is c, or what c is TLS over, or nil. http.Server has to see that it is TLS.
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

// Close is that of net.Conn.
func (c *limited) Close() error {
	if c.leave != nil {
		defer c.leave()
	}
	return c.Conn.Close()
}
