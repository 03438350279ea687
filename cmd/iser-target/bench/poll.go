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
	s := llp.NewSocket(tcp)
	return &pollingConn{tcp, s, always.Reader(s)}, nil
}

// A pollingConn is a connection whose Read polls.
type pollingConn struct {
	*net.TCPConn
	socket *llp.Socket
	poller *llp.Poller
}

// Read implements net.Conn.
func (c *pollingConn) Read(p []byte) (int, error) { return c.poller.Read(p) }

// ReadBuffers reads the long data of PDUs, and sleeps while it comes.
func (c *pollingConn) ReadBuffers(p, q []byte) (int, error) { return c.socket.ReadBuffers(p, q) }

// Write implements net.Conn.
func (c *pollingConn) Write(p []byte) (int, error) { return c.socket.Write(p) }

// WriteBuffers writes b with one system call.
func (c *pollingConn) WriteBuffers(b [][]byte) (int64, error) { return c.socket.WriteBuffers(b) }
