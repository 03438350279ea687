package httpd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// handshakeTime bounds the TLS handshake of a client.
	handshakeTime = 5 * time.Second
	// maxHandshakes bounds the handshakes at one time, and peerHandshakes those from one address.
	maxHandshakes  = 32
	peerHandshakes = 8
	// acceptPause is the time between two attempts to accept when the process is out of
	// file descriptors.
	acceptPause = 100 * time.Millisecond
	// reportEvery is the shortest time between two log lines about refusals.
	reportEvery = time.Second
)

// TLS returns a listener for the connections of l whose TLS handshake with configuration c
// succeeds. Handshakes in progress have limits of their own, in all and by address, so that
// silent clients do not keep others out. Failed ones are logged.
func TLS(l net.Listener, c *tls.Config, log *slog.Logger) net.Listener {
	return listenTLS(l, c, log, handshakeTime)
}

func listenTLS(l net.Listener, c *tls.Config, log *slog.Logger, timeout time.Duration) net.Listener {
	ctx, cancel := context.WithCancel(context.Background())
	t := &tlsListener{
		Listener: l, config: c, log: log, timeout: timeout, ctx: ctx, cancel: cancel,
		proved: make(chan net.Conn), waiting: map[netip.Addr]int{},
	}
	go t.acceptLoop()
	return t
}

type tlsListener struct {
	net.Listener
	config  *tls.Config
	log     *slog.Logger
	timeout time.Duration   // of a handshake
	ctx     context.Context // ends with Close
	cancel  func()
	proved  chan net.Conn

	mu       sync.Mutex
	waiting  map[netip.Addr]int // handshakes by address
	all      int
	reported time.Time
	silent   int // refusals since then
}

// Accept implements net.Listener. It returns connections whose handshake has succeeded.
func (t *tlsListener) Accept() (net.Conn, error) {
	select {
	case c := <-t.proved:
		return c, nil
	case <-t.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. It ends the handshakes in progress.
func (t *tlsListener) Close() error {
	t.cancel()
	return t.Listener.Close()
}

func (t *tlsListener) acceptLoop() {
	for {
		c, err := t.Listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // probably out of file descriptors; some may be closed soon
			t.refused("", err)
			select {
			case <-t.ctx.Done():
				return
			case <-time.After(acceptPause):
			}
			continue
		}
		from := peer(c)
		if err := t.enter(from); err != nil {
			t.refused(c.RemoteAddr().String(), err)
			c.Close()
			continue
		}
		go t.handshake(c, from)
	}
}

func peer(c net.Conn) netip.Addr {
	a, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return netip.Addr{}
	}
	return a.Addr().Unmap().WithZone("")
}

// enter counts a handshake, or returns why no further one is allowed.
func (t *tlsListener) enter(from netip.Addr) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.all >= maxHandshakes:
		return fmt.Errorf("%d TLS handshakes are in progress, the most that are allowed", t.all)
	case t.waiting[from] >= peerHandshakes:
		return fmt.Errorf("%d TLS handshakes of this address are in progress, the most that are allowed", t.waiting[from])
	}
	t.all++
	t.waiting[from]++
	return nil
}

func (t *tlsListener) leave(from netip.Addr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all--
	if t.waiting[from]--; t.waiting[from] == 0 {
		delete(t.waiting, from)
	}
}

// handshake authenticates the client of c and hands the connection to Accept.
func (t *tlsListener) handshake(c net.Conn, from netip.Addr) {
	defer t.leave(from)
	ctx, cancel := context.WithTimeout(t.ctx, t.timeout)
	defer cancel()
	tc := tls.Server(&limited{Conn: c}, t.config) // see Limit
	if err := tc.HandshakeContext(ctx); err != nil {
		if ctx.Err() == context.DeadlineExceeded {
			err = fmt.Errorf("the handshake took longer than %v", t.timeout)
		}
		t.refused(c.RemoteAddr().String(), err)
		c.Close()
		return
	}
	select {
	case t.proved <- tc:
	case <-t.ctx.Done():
		c.Close()
	}
}

// refused logs that a client was refused, unless it logged a refusal just before: clients
// must not be able to fill the disk of the log.
func (t *tlsListener) refused(remote string, reason error) {
	if t.ctx.Err() != nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if time.Since(t.reported) < reportEvery {
		t.silent++
		return
	}
	t.log.Warn("client refused", "address", t.Addr(), "remote", remote, "reason", reason, "not_shown", t.silent)
	t.reported, t.silent = time.Now(), 0
}
