// Package tunnel carries one byte stream in the calls of a program of RPC-over-RDMA (RFC 8166), so that managers
// reach the control API over the network of the disks. The client sends by calls in the forward direction, the target by
// calls in the reverse direction (RFC 8167). RDMA has no encryption: the caller runs TLS in the stream.
//
// # The program
//
// The program 0x20495352, version 1, has these procedures. Their results are void:
//
//	1 OPEN  void                             from the client, once and first: the target may make calls
//	2 DATA  unsigned hyper at, opaque bytes  in both directions
//
// A DATA call carries 1 to MaxData bytes of its direction. They begin at the offset at, which is the number of all
// bytes before. The receiver answers when it has taken them. A sender waits for the answer before it makes the next
// call, so an end buffers one call, and a reader that is slow stops the sender. An end that breaks a rule loses
// the connection. The stream ends with the connection.
package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma"
	"github.com/iser-target/iser-target/rdma/rpcrdma/wire"
)

// The numbers of the program. Program is in the range that users define (RFC 5531, section 13.1).
const (
	Program = 0x20495352
	Version = 1

	procOpen = 1
	procData = 2
)

const (
	// inline is the longest Send in bytes, with which iSER has to do, too.
	inline = 8192
	// overhead is the size in bytes of all of a DATA call except its bytes: the transport header, the header of the
	// call, the offset and the count.
	overhead = 28 + 40 + 8 + 4
	// MaxData is the most bytes of a DATA call, a multiple of 4.
	MaxData = inline - overhead

	// closeTime bounds the wait for answers when an end closes.
	closeTime = time.Second
	// startupTime bounds the startup of a client, from the TCP connection to the answer of OPEN.
	startupTime = 5 * time.Second
)

// Errors of Dial, besides those of the TCP connection.
var (
	// ErrNoChannel reports a server that speaks another protocol over RDMA, or a portal without the control API.
	ErrNoChannel = errors.New("no control API at this portal")
	// ErrNoRDMA reports a server that ends the startup of RDMA.
	ErrNoRDMA = errors.New("the server does not start RDMA")
)

var (
	errRule   = errors.New("tunnel: the peer has broken a rule of the calls")
	errEnded  = errors.New("tunnel: the peer has closed the connection")
	errBroken = errors.New("tunnel: a write before this one has failed")
)

// config returns what both ends say of themselves. Messages have no chunks. A sender has one call outstanding; the other
// credit is for a call that must be refused.
func config(programs *rpcrdma.Programs) rpcrdma.Config {
	return rpcrdma.Config{
		Programs: programs, Credits: 2, Ask: 2, InlineSend: inline, InlineReceive: inline,
		MaxArgs: 1, MaxResults: 1, Memory: 2, MaxSegments: 1, NoInvalidate: true,
	}
}

// Announced reports whether an MPA Request asks for RPC-over-RDMA. No other protocol has private data like this: that of
// iSER is 4 bytes.
func Announced(r *rdma.Request) bool { return wire.IsPrivate(r.Private) }

// Answer returns the answer to such a Request.
func Answer() rdma.Answer { return config(nil).Answer() }

// A Conn is one end of the stream. It implements net.Conn.
type Conn struct {
	rpc  *rpcrdma.Conn
	open chan struct{} // closed when the client has opened the stream

	// The reader.
	mu      sync.Mutex
	taken   uint64        // bytes that came
	in      []byte        // those of them that were not read
	buf     []byte        // the memory of in
	busy    bool          // a DATA call is in progress
	arrived chan struct{} // has room for one: in is not empty
	emptied chan struct{} // has room for one: in is empty
	closed  chan struct{} // closed by Close
	closing sync.Once
	reading deadline

	// The writer.
	turn    sync.Mutex
	call    rpcrdma.Call
	sent    uint64
	broken  bool
	writing deadline
}

var _ net.Conn = (*Conn)(nil)

func newConn() *Conn {
	return &Conn{
		open: make(chan struct{}), arrived: make(chan struct{}, 1), emptied: make(chan struct{}, 1), closed: make(chan struct{}),
		reading: newDeadline(), writing: newDeadline(),
		call: rpcrdma.Call{Program: Program, Version: Version, Procedure: procData, Once: true},
	}
}

// Serve returns the end of the target, on a stream that was accepted with Answer. After an error rc is closed.
func Serve(rc *rdma.Conn) (*Conn, error) {
	c := newConn()
	programs := &rpcrdma.Programs{}
	programs.Register(Program, Version, procOpen, c.opened)
	programs.Register(Program, Version, procData, c.data)
	rpc, err := rpcrdma.Serve(rc, config(programs))
	if err != nil {
		return nil, err
	}
	c.rpc = rpc
	return c, nil
}

// Dial connects to the portal at the address, host:port, and opens the stream. ctx limits that.
func Dial(ctx context.Context, address string) (*Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, startupTime)
	defer cancel()
	nc, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	c := newConn()
	close(c.open)
	programs := &rpcrdma.Programs{}
	programs.Register(Program, Version, procData, c.data)
	rpc, err := rpcrdma.Initiate(ctx, nc, config(programs))
	var reject *rdma.RejectedError
	switch {
	case errors.As(err, &reject):
		return nil, fmt.Errorf("%w: it rejects RPC-over-RDMA", ErrNoChannel)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrNoRDMA, err)
	case !rpc.Announced():
		rpc.Close()
		return nil, fmt.Errorf("%w: it speaks another protocol over RDMA", ErrNoChannel)
	}
	c.rpc = rpc
	open := rpcrdma.Call{Program: Program, Version: Version, Procedure: procOpen, Once: true}
	open.Begin()
	if err := rpc.Do(ctx, &open); err != nil {
		rpc.Close()
		return nil, fmt.Errorf("%w: %w", ErrNoChannel, err)
	}
	return c, nil
}

// opened answers OPEN.
func (c *Conn) opened(_ context.Context, r *rpcrdma.Request) error {
	err := r.Args.End()
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil || c.isOpen() {
		return violated(r)
	}
	r.Conn().EnableReverse()
	close(c.open)
	return nil
}

// isOpen reports whether the client has opened the stream.
func (c *Conn) isOpen() bool { return over(c.open) }

// isClosed reports whether Close was called.
func (c *Conn) isClosed() bool { return over(c.closed) }

// over reports whether c is closed.
func over(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// violated ends the connection.
func violated(r *rpcrdma.Request) error {
	go r.Conn().Close() // which waits for this call
	return errRule
}

// data answers DATA: it takes the bytes when those before were read.
func (c *Conn) data(ctx context.Context, r *rpcrdma.Request) error {
	at, b := r.Args.Uint64(), r.Args.Opaque(MaxData)
	err := r.Args.End()
	c.mu.Lock()
	if err != nil || !c.isOpen() || c.busy || at != c.taken || len(b) == 0 {
		c.mu.Unlock()
		return violated(r)
	}
	c.busy = true
	for len(c.in) > 0 {
		c.mu.Unlock()
		select {
		case <-c.emptied:
		case <-c.closed: // nobody reads any longer
			return net.ErrClosed
		case <-ctx.Done():
			return ctx.Err()
		}
		c.mu.Lock()
	}
	c.buf = append(c.buf[:0], b...)
	c.in = c.buf
	c.taken += uint64(len(b))
	c.busy = false
	signal(c.arrived)
	c.mu.Unlock()
	return nil
}

// signal makes a channel with room for one readable.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// Read implements net.Conn. At the end of the connection it returns what has come before, and then io.EOF or the reason.
func (c *Conn) Read(p []byte) (int, error) {
	for {
		if c.isClosed() {
			return 0, net.ErrClosed
		}
		if c.reading.over() {
			return 0, os.ErrDeadlineExceeded
		}
		if n := c.take(p); n > 0 || len(p) == 0 {
			return n, nil
		}
		select {
		case <-c.arrived:
		case <-c.reading.wait():
		case <-c.closed:
		case <-c.rpc.Done():
			if c.isClosed() {
				continue // Close is the reason
			}
			if n := c.take(p); n > 0 {
				return n, nil
			}
			if err := c.rpc.Err(); err != nil && !errors.Is(err, rpcrdma.ErrClosed) {
				return 0, err
			}
			return 0, io.EOF
		}
	}
}

// take moves bytes that have come to p.
func (c *Conn) take(p []byte) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := copy(p, c.in)
	if n == 0 {
		return 0
	}
	if c.in = c.in[n:]; len(c.in) == 0 {
		signal(c.emptied)
	} else {
		signal(c.arrived)
	}
	return n
}

// Write implements net.Conn. It returns when the peer has taken p. After an error further writes fail, because the
// peer may have taken a part.
func (c *Conn) Write(p []byte) (n int, err error) {
	select {
	case <-c.open:
	case <-c.writing.wait():
		return 0, os.ErrDeadlineExceeded
	case <-c.closed:
		return 0, net.ErrClosed
	case <-c.rpc.Done():
		return 0, c.lost()
	}
	c.turn.Lock()
	defer c.turn.Unlock()
	if c.broken {
		return 0, errBroken
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	over := c.writing.wait()
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		select {
		case <-over:
			cancel()
		case <-c.closed:
			cancel()
		case <-stop:
		}
	}()
	for len(p) > 0 {
		b := p[:min(len(p), MaxData)]
		e := c.call.Begin()
		e.Uint64(c.sent)
		e.Opaque(b)
		if err := c.rpc.Do(ctx, &c.call); err != nil {
			c.broken = true
			switch {
			case c.writing.over():
				return n, os.ErrDeadlineExceeded
			case ctx.Err() != nil:
				return n, net.ErrClosed
			case errors.Is(err, rpcrdma.ErrLost):
				return n, c.lost()
			}
			return n, err
		}
		c.sent += uint64(len(b))
		n, p = n+len(b), p[len(b):]
	}
	return n, nil
}

// lost returns why a write fails after the end of the connection.
func (c *Conn) lost() error {
	if c.isClosed() {
		return net.ErrClosed
	}
	if err := c.rpc.Err(); err != nil && err != io.EOF {
		return err
	}
	return errEnded
}

// Close implements net.Conn. It does not wait: answers to the peer may leave for a second.
func (c *Conn) Close() error {
	c.closing.Do(func() {
		close(c.closed)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), closeTime)
			defer cancel()
			c.rpc.Shutdown(ctx)
		}()
	})
	return nil
}

// Done returns a channel that is closed when the connection has ended.
func (c *Conn) Done() <-chan struct{} { return c.rpc.Done() }

// LocalAddr implements net.Conn. It returns the TCP address.
func (c *Conn) LocalAddr() net.Addr { return c.rpc.LocalAddr() }

// RemoteAddr implements net.Conn. It returns the TCP address.
func (c *Conn) RemoteAddr() net.Addr { return c.rpc.RemoteAddr() }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	c.reading.set(t)
	c.writing.set(t)
	return nil
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.reading.set(t)
	return nil
}

// SetWriteDeadline implements net.Conn. It also holds for a Write in progress.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.writing.set(t)
	return nil
}
