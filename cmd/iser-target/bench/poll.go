package bench

import (
	"context"
	"math"
	"net"

	"github.com/iser-target/iser-target/rdma/llp"
)

// always lets all connections poll until something comes.
var always = llp.Polling{Most: math.MaxInt}

func init() { always.SetTime(math.MaxInt64) }

// DialPolling makes a TCP connection whose reader polls. It is the Dialer of a Transport.
func DialPolling(ctx context.Context, network, addr string) (net.Conn, error) {
	nc, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	tcp := nc.(*net.TCPConn)
	return &pollingConn{tcp, always.Reader(tcp), llp.NewScatter(tcp)}, nil
}

// A pollingConn is a connection whose Read polls.
type pollingConn struct {
	*net.TCPConn
	poller *llp.Poller
	both   *llp.Scatter
}

// Read implements net.Conn.
func (c *pollingConn) Read(p []byte) (int, error) { return c.poller.Read(p) }

// ReadBuffers reads the long data of PDUs, and sleeps while it comes.
func (c *pollingConn) ReadBuffers(p, q []byte) (int, error) { return c.both.ReadBuffers(p, q) }

// WriteBuffers writes b with one system call, which b.WriteTo(c) would not do.
func (c *pollingConn) WriteBuffers(b *net.Buffers) (int64, error) { return b.WriteTo(c.TCPConn) }
