package httpd

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/iser-target/iser-target/security/limits"
)

const (
	// handshakeTime bounds the TLS handshake of a client.
	handshakeTime = 5 * time.Second
	// maxHandshakes bounds the handshakes at one time, and peerHandshakes those from one address. The
	// oldest one of the address with most yields to a new one.
	maxHandshakes  = 32
	peerHandshakes = 8
	// acceptPause is the time between two attempts to accept when the process is out of
	// file descriptors.
	acceptPause = 100 * time.Millisecond
	// reportEvery is the shortest time between two log lines about refusals.
	reportEvery = time.Second
)

// TLS returns a listener for the connections of l whose TLS handshake with configuration c
// succeeds. Handshakes in progress have limits of their own, in all and by address. A silent client
// yields to a new one, so it does not keep others out. Failed handshakes are logged.
func TLS(l net.Listener, c *tls.Config, log *slog.Logger) net.Listener {
	return listenTLS(l, c, log, handshakeTime)
}

func listenTLS(l net.Listener, c *tls.Config, log *slog.Logger, timeout time.Duration) net.Listener {
	ctx, cancel := context.WithCancel(context.Background())
	t := &tlsListener{
		Listener: l, config: c, log: log, timeout: timeout, ctx: ctx, cancel: cancel,
		proved: make(chan net.Conn), waiting: map[string]int{},
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
	waiting  map[string]int // handshakes by address
	crowd    limits.Crowd
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
		h := &handshaking{Conn: c, from: limits.AddressKey(c.RemoteAddr())}
		victim, err := t.enter(h)
		if err != nil {
			t.refused(c.RemoteAddr().String(), err)
			c.Close()
			continue
		}
		if victim != nil {
			victim.Close()
		}
		go t.handshake(h)
	}
}

// A handshaking is a connection whose handshake is in progress.
type handshaking struct {
	net.Conn
	from string

	// Under tlsListener.mu:
	member    limits.Member
	displaced error // why it yielded
}

// enter counts a handshake, or returns why no further one is allowed. victim yields to it.
func (t *tlsListener) enter(h *handshaking) (victim *handshaking, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var m *limits.Member
	switch {
	case t.waiting[h.from] >= peerHandshakes:
		m = t.crowd.VictimOf(h.RemoteAddr())
		err = fmt.Errorf("%d TLS handshakes of this address are in progress, the most that are allowed", t.waiting[h.from])
	case t.crowd.Len() >= maxHandshakes:
		m = t.crowd.Victim(h.RemoteAddr())
		err = fmt.Errorf("%d TLS handshakes are in progress, the most that are allowed", t.crowd.Len())
	}
	if err != nil && m == nil {
		return nil, err
	}
	if m != nil {
		victim = m.Value.(*handshaking)
		victim.displaced = fmt.Errorf("%w, and this was the first of the address with most", err)
		t.leave(victim)
	}
	h.member.Value = h
	t.waiting[h.from]++
	t.crowd.Add(h.RemoteAddr(), &h.member)
	return victim, nil
}

// leave counts a handshake no longer.
//
// Preconditions: t.mu is held.
func (t *tlsListener) leave(h *handshaking) {
	if !h.member.In() {
		return
	}
	t.crowd.Remove(&h.member)
	if t.waiting[h.from]--; t.waiting[h.from] == 0 {
		delete(t.waiting, h.from)
	}
}

// ended ends a handshake, and returns why it yielded, if it did.
func (t *tlsListener) ended(h *handshaking) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.leave(h)
	return h.displaced
}

// handshake authenticates the client of c and hands the connection to Accept.
func (t *tlsListener) handshake(h *handshaking) {
	c := h.Conn
	ctx, cancel := context.WithTimeout(t.ctx, t.timeout)
	defer cancel()
	tc := tls.Server(&limited{Conn: c}, t.config) // see Limit
	err := tc.HandshakeContext(ctx)
	if displaced := t.ended(h); displaced != nil { // perhaps at the last moment
		err = displaced
	} else if ctx.Err() == context.DeadlineExceeded {
		err = fmt.Errorf("the handshake took longer than %v", t.timeout)
	}
	if err != nil {
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
