package api

import (
	"context"
	"errors"
	"net"
	"sync"

	"github.com/iser-target/iser-target/cmd/iser-target/daemon"
	"github.com/iser-target/iser-target/cmd/iser-target/httpd"
	"github.com/iser-target/iser-target/config"
)

// maxManagers bounds the connections of managers through portals, of all portals at one time.
const maxManagers = 32

// errTLSLater refuses managers while the target has no certificate.
var errTLSLater = errors.New("control.tls was not set when the target started. Restart the target")

// managers serves the control API to managers that the daemon has accepted at its portals. It begins with the first of
// them, because a change may allow managers while the target runs.
type managers struct {
	s     *Server
	tls   config.ControlTLS
	serve func(net.Listener) // Server.serve, on a goroutine of its own

	mu    sync.Mutex
	l     *accepted // nil: not begun
	ended bool
}

// end makes begin refuse.
func (m *managers) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ended = true
}

// begin begins to serve, unless that has happened.
func (m *managers) begin() (*accepted, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.ended:
		return nil, daemon.ErrEnding
	case m.l != nil:
		return m.l, nil
	}
	t := m.s.trust.Load()
	if t == nil {
		if m.tls.Cert == "" || m.tls.Key == "" || m.tls.ClientCA == "" {
			return nil, errTLSLater
		}
		var err error
		if t, err = newTrust(m.tls, m.s.d.Logger()); err != nil {
			return nil, err
		}
		m.s.use(t)
	}
	m.l = &accepted{conns: make(chan net.Conn), closed: make(chan struct{})}
	m.serve(authenticated{httpd.TLS(m.l, t.serverConfig(), m.s.d.Logger())})
	return m.l, nil
}

// take serves a manager.
func (m *managers) take(c *daemon.Manager) error {
	l, err := m.begin()
	if err != nil {
		return err
	}
	select {
	case l.conns <- c:
		return nil
	case <-l.closed:
		return daemon.ErrEnding
	}
}

// An accepted is a listener whose connections another one has accepted.
type accepted struct {
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

// Accept implements net.Listener.
func (l *accepted) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *accepted) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr implements net.Listener.
func (l *accepted) Addr() net.Addr { return portals{} }

// portals is the address of an accepted.
type portals struct{}

// Network implements net.Addr.
func (portals) Network() string { return "rdma" }

// String implements net.Addr.
func (portals) String() string { return "portals" }

// An authenticated is a listener of TLS. It tells the daemon which managers have proved their identity.
type authenticated struct{ net.Listener }

// Accept implements net.Listener.
func (l authenticated) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if m := managerOf(c); m != nil {
		m.Authenticated()
	}
	return c, err
}

// managerOf returns the manager at the other end of c, or nil if c is no connection through a portal.
func managerOf(c net.Conn) *daemon.Manager {
	if c == nil {
		return nil
	}
	m, _ := httpd.Under(c).(*daemon.Manager)
	return m
}

// managerKey is the key of a connection through a portal in a context.
type managerKey struct{}

// withManager returns a ConnContext for http.Server that notes connections through portals in what next returns.
func withManager(next func(context.Context, net.Conn) context.Context) func(context.Context, net.Conn) context.Context {
	return func(ctx context.Context, c net.Conn) context.Context {
		ctx = next(ctx, c)
		if managerOf(c) != nil {
			ctx = context.WithValue(ctx, managerKey{}, true)
		}
		return ctx
	}
}
