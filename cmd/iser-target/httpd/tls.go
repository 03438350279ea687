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
	// handshakeTime is how long a client may take to prove who it is.
	handshakeTime = 5 * time.Second
	// maxHandshakes is how many may be about to at one time, and peerHandshakes how many
	// of them may come from one address.
	maxHandshakes  = 32
	peerHandshakes = 8
	// acceptPause is the time between two attempts to accept when there are no file
	// descriptors.
	acceptPause = 100 * time.Millisecond
	// reportEvery is how often refusals leave a line in the log at most.
	reportEvery = time.Second
)

// TLS accepts the connections of l whose clients are what c asks for. Those that have not
// proved it yet count on their own, all together and by address: they cannot keep others
// from being accepted. Those that could not are named in the log.
func TLS(l net.Listener, c *tls.Config, log *slog.Logger) net.Listener {
	return listenTLS(l, c, log, handshakeTime)
}

func listenTLS(l net.Listener, c *tls.Config, log *slog.Logger, most time.Duration) net.Listener {
	ctx, cancel := context.WithCancel(context.Background())
	t := &tlsListener{
		Listener: l, config: c, log: log, most: most, ctx: ctx, cancel: cancel,
		proved: make(chan net.Conn), waiting: map[netip.Addr]int{},
	}
	go t.acceptLoop()
	return t
}

type tlsListener struct {
	net.Listener
	config *tls.Config
	log    *slog.Logger
	most   time.Duration   // of a handshake
	ctx    context.Context // ends with Close
	cancel func()
	proved chan net.Conn

	mu       sync.Mutex
	waiting  map[netip.Addr]int // handshakes by address
	all      int
	reported time.Time
	silent   int // refusals since then
}

// Accept is that of net.Listener: a connection whose handshake is over.
func (t *tlsListener) Accept() (net.Conn, error) {
	select {
	case c := <-t.proved:
		return c, nil
	case <-t.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close is that of net.Listener. It ends the handshakes.
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
		if err != nil { // out of file descriptors, most likely: some may be closed soon
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

// enter counts a handshake, or says why there must not be another one.
func (t *tlsListener) enter(from netip.Addr) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.all >= maxHandshakes:
		return fmt.Errorf("%d clients have not proved who they are yet, which is all that may be", t.all)
	case t.waiting[from] >= peerHandshakes:
		return fmt.Errorf("%d connections of this address have not proved whose they are yet, which is all that may be", t.waiting[from])
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

// handshake passes the connection on when its client has proved who it is.
func (t *tlsListener) handshake(c net.Conn, from netip.Addr) {
	defer t.leave(from)
	ctx, cancel := context.WithTimeout(t.ctx, t.most)
	defer cancel()
	tc := tls.Server(&limited{Conn: c}, t.config) // see Limit
	if err := tc.HandshakeContext(ctx); err != nil {
		if ctx.Err() == context.DeadlineExceeded {
			err = fmt.Errorf("the handshake was not over within %v", t.most)
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

// refused leaves a line about a client that was not let in, unless there was one just
// now: those who try have no use of the disk that the log is on.
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
