package rpcrdma

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/rdma"
)

// A Server accepts connections and serves Config.Programs on them.
type Server struct {
	Config Config
	// MaxConns limits the connections, those in the startup included. The server closes further ones at
	// once. Default 256.
	MaxConns int
	// OnConn, if not nil, is called with each new connection, in a goroutine of the connection.
	OnConn func(*Conn)
	// OnError, if not nil, is called when a connection could not be started, and with the reason when
	// one has ended that the peer did not close in order.
	OnError func(peer net.Addr, err error)

	mu        sync.Mutex
	conns     map[*Conn]struct{}
	listeners map[net.Listener]struct{}
	starting  map[net.Conn]struct{}
	stopped   bool
	wg        sync.WaitGroup
}

const defaultMaxConns = 256

// errMaxConns reports a connection that exceeds MaxConns.
var errMaxConns = errors.New("rpcrdma: too many connections")

// Serve accepts connections from l until Shutdown or Close, and returns ErrClosed then. It returns every
// other permanent error of l. It closes l.
func (s *Server) Serve(l net.Listener) error {
	defer l.Close()
	if _, err := s.Config.complete(); err != nil {
		return err
	}
	s.mu.Lock()
	if s.stopped {
		s.mu.Unlock()
		return ErrClosed
	}
	if s.Config.RDMA.Domain == nil {
		s.Config.RDMA.Domain = rdma.NewDomain() // its connections know of each other
	}
	if s.conns == nil {
		s.conns, s.starting = map[*Conn]struct{}{}, map[net.Conn]struct{}{}
		s.listeners = map[net.Listener]struct{}{}
	}
	s.listeners[l] = struct{}{}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.listeners, l)
	}()
	for {
		nc, err := l.Accept()
		if err != nil {
			s.mu.Lock()
			stopped := s.stopped
			s.mu.Unlock()
			switch {
			case stopped:
				return ErrClosed
			case !passes(err):
				return err
			}
			time.Sleep(acceptPause)
			continue
		}
		s.mu.Lock()
		most := s.MaxConns
		if most == 0 {
			most = defaultMaxConns
		}
		switch {
		case s.stopped:
			nc.Close()
		case len(s.conns)+len(s.starting) >= most:
			nc.Close()
			s.report(nc, errMaxConns)
		default:
			s.starting[nc] = struct{}{}
			s.wg.Go(func() { s.serve(nc) })
		}
		s.mu.Unlock()
	}
}

// acceptPause is how long Serve waits after an error that passes.
const acceptPause = 100 * time.Millisecond

// passes reports whether a later Accept may work: a peer has gone, or the machine lacks descriptors or memory now.
func passes(err error) bool {
	for _, e := range []error{syscall.ECONNABORTED, syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func (s *Server) report(nc net.Conn, err error) {
	if s.OnError != nil {
		s.OnError(nc.RemoteAddr(), err)
	}
}

// serve serves one connection.
func (s *Server) serve(nc net.Conn) {
	c, err := Accept(context.Background(), nc, s.Config)
	s.mu.Lock()
	delete(s.starting, nc)
	stopped := s.stopped
	if err == nil && !stopped {
		s.conns[c] = struct{}{}
	}
	s.mu.Unlock()
	switch {
	case err != nil:
		s.report(nc, err)
		return
	case stopped:
		c.Close()
		return
	}
	if s.OnConn != nil {
		s.OnConn(c)
	}
	<-c.Done()
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	if err := c.Err(); !inOrder(err) {
		s.report(nc, err)
	}
}

// stop closes the listeners and what is not started, and returns the connections.
func (s *Server) stop() (conns []*Conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	for l := range s.listeners {
		l.Close()
	}
	for nc := range s.starting {
		nc.Close()
	}
	for c := range s.conns {
		conns = append(conns, c)
	}
	return conns
}

// Shutdown stops accepting, and shuts all connections down as Conn.Shutdown does.
func (s *Server) Shutdown(ctx context.Context) error {
	var wg sync.WaitGroup
	errs := make(chan error, 1)
	for _, c := range s.stop() {
		wg.Go(func() {
			if err := c.Shutdown(ctx); err != nil {
				select {
				case errs <- err:
				default:
				}
			}
		})
	}
	wg.Wait()
	s.wg.Wait()
	select {
	case err := <-errs:
		return err
	default:
		return nil
	}
}

// Close stops accepting, and closes all connections at once.
func (s *Server) Close() error {
	for _, c := range s.stop() {
		c.Close()
	}
	s.wg.Wait()
	return nil
}

// Backoff of a Client: the first and the longest pause between two attempts to connect.
const (
	firstPause   = 50 * time.Millisecond
	longestPause = 5 * time.Second
)

// A Client makes calls over one connection at a time. When that is lost, the Client connects again, and
// retransmits the calls that were not answered, with the same XIDs (RFC 8167, section 5.4). Calls wait for
// the connection until their contexts end.
type Client struct {
	dial  func(ctx context.Context) (net.Conn, error)
	cfg   Config
	ready func(ctx context.Context, c *Conn) error

	ctx    context.Context
	cancel context.CancelFunc
	turn   chan struct{} // has a token while nobody connects
	wg     sync.WaitGroup

	mu       sync.Mutex
	conn     *Conn
	calls    int           // in Do
	draining bool          // Shutdown was called
	idle     chan struct{} // closed when draining and no call is in Do
}

// NewClient returns a Client that connects through dial when it is first used. If cfg.Programs has a
// program, the Client connects again automatically after a loss, because the peer may have calls. ready, if
// not nil, is called with each new connection before other calls use it. Its error closes the
// connection, and counts as a failed attempt.
func NewClient(dial func(ctx context.Context) (net.Conn, error), cfg Config,
	ready func(ctx context.Context, c *Conn) error) *Client {
	c := &Client{dial: dial, cfg: cfg, ready: ready, turn: make(chan struct{}, 1), idle: make(chan struct{})}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.turn <- struct{}{}
	return c
}

// Do makes a call as Conn.Do does, on as many connections as it takes. With Call.Once it returns ErrLost if
// the peer may have seen the call.
func (c *Client) Do(ctx context.Context, call *Call) error {
	if !c.begin() {
		return ErrClosed
	}
	defer c.end()
	for {
		conn, err := c.Conn(ctx)
		if err != nil {
			return err
		}
		err = conn.Do(ctx, call)
		again := err != nil && (errors.Is(err, ErrLost) || err == ErrClosed) && c.ctx.Err() == nil
		if !again || call.Once && call.sent {
			return err
		}
	}
}

// begin notes a call. It returns false after Shutdown.
func (c *Client) begin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.draining {
		return false
	}
	c.calls++
	return true
}

// end notes that a call has ended.
func (c *Client) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.calls--; c.draining && c.calls == 0 {
		close(c.idle)
	}
}

// current returns the connection unless it has ended.
func (c *Client) current() *Conn {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil || c.conn.Err() != nil {
		return nil
	}
	return c.conn
}

// Conn returns the present connection, or connects until that has worked, ctx ends, or the Client is closed.
func (c *Client) Conn(ctx context.Context) (*Conn, error) {
	if conn := c.current(); conn != nil {
		return conn, nil
	}
	select {
	case <-c.turn:
		defer func() { c.turn <- struct{}{} }()
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-c.ctx.Done():
		return nil, ErrClosed
	}
	if conn := c.current(); conn != nil {
		return conn, nil
	}
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		conn, err := c.connect(ctx)
		switch {
		case c.ctx.Err() != nil:
			if conn != nil {
				conn.Close()
			}
			return nil, ErrClosed
		case err == nil:
			if !c.use(conn) {
				conn.Close()
				return nil, ErrClosed
			}
			return conn, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), err)
		case <-c.ctx.Done():
			return nil, ErrClosed
		}
	}
}

// use makes conn the present connection. It reports false after Close.
func (c *Client) use(conn *Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ctx.Err() != nil {
		return false
	}
	c.conn = conn
	if !conn.cfg.Programs.empty() {
		c.wg.Go(func() { c.keep(conn) })
	}
	return true
}

// connect connects once.
func (c *Client) connect(ctx context.Context) (*Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	nc, err := c.dial(ctx)
	if err != nil {
		return nil, err
	}
	conn, err := Initiate(ctx, nc, c.cfg)
	if err != nil {
		return nil, err
	}
	if c.ready != nil {
		if err := c.ready(ctx, conn); err != nil {
			conn.Close()
			return nil, err
		}
	}
	return conn, nil
}

// keep connects again when conn has ended (RFC 8167, section 5.4).
func (c *Client) keep(conn *Conn) {
	select {
	case <-conn.Done():
		c.Conn(c.ctx)
	case <-c.ctx.Done():
	}
}

// Shutdown waits for the calls in progress, and retransmits them if their connection is lost meanwhile. Then it shuts the connection
// down as Conn.Shutdown does, so that the calls of the peer get their replies. Further calls fail with ErrClosed. If ctx ends first,
// Shutdown closes the Client as Close does, and returns the error of ctx.
func (c *Client) Shutdown(ctx context.Context) error {
	c.mu.Lock()
	if !c.draining {
		if c.draining = true; c.calls == 0 {
			close(c.idle)
		}
	}
	c.mu.Unlock()
	var err error
	select {
	case <-c.idle:
	case <-c.ctx.Done(): // Close was called
	case <-ctx.Done():
		err = ctx.Err()
	}
	c.cancel() // from here on nothing connects again
	c.mu.Lock()
	conn := c.conn
	c.mu.Unlock()
	if conn != nil && err == nil {
		err = conn.Shutdown(ctx)
	}
	c.Close()
	return err
}

// Close closes the connection at once. Calls fail with ErrLost or ErrClosed.
func (c *Client) Close() error {
	c.cancel()
	c.mu.Lock()
	conn := c.conn
	c.mu.Unlock()
	if conn != nil {
		conn.Close()
	}
	c.wg.Wait()
	return nil
}
