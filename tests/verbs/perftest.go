package verbs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/iser-target/iser-target/rdma"
)

// Messages of perftest on its control stream, with -R. The client sends each first, and the server answers in kind.
const (
	keysLen    = 56 // struct pingpong_dest; numbers are big-endian: STag at 16, TO at 24
	versionLen = 16
	version    = "6.10"
	perfBuffer = 1 << 18 // bytes of memory that the server gives access to
	perfSends  = 1 << 16 // bytes of the longest Send
)

// A PerftestServer is the server of ib_write_bw, ib_read_bw or ib_send_lat -R of perftest 4.5.
type PerftestServer struct {
	// Connected, if not nil, is called with each of the two streams.
	Connected func(*rdma.Conn)
	// Registered, if not nil, is called with the stream of the data and the memory that the client has access to.
	Registered func(*rdma.Conn, *rdma.Region, []byte)
}

// Serve serves one run: a control stream, and one for data, on which it answers each Send in kind. It returns when the client has
// closed both, or when one of them has failed.
func (s PerftestServer) Serve(ctx context.Context, l net.Listener, o rdma.Options) (err error) {
	control, err := s.accept(ctx, l, o)
	if err != nil {
		return err
	}
	defer control.Close()
	p := peer{c: control}
	var data *rdma.Conn
	var region rdma.Region
	echoed := make(chan error, 1)
	defer func() {
		if data == nil {
			return
		}
		if err != nil {
			data.Close()
		}
		err = errors.Join(err, <-echoed)
		data.Deregister(&region)
	}()
	for {
		if err := control.Receive(&p.ev); err != nil {
			return ended(err)
		}
		b := append([]byte(nil), p.ev.Data...)
		if len(b) == keysLen && data != nil {
			binary.BigEndian.PutUint32(b[16:], uint32(region.STag()))
			binary.BigEndian.PutUint64(b[24:], base)
		}
		if err := p.post(&rdma.WorkRequest{Op: rdma.Send, Data: b}); err != nil {
			return err
		}
		if len(b) == keysLen && data == nil { // with the first one the client is ready to connect
			if data, err = s.accept(ctx, l, o); err != nil {
				return err
			}
			memory := make([]byte, perfBuffer)
			data.Register(&region, memory, base, rdma.RemoteRead|rdma.RemoteWrite)
			if s.Registered != nil {
				s.Registered(data, &region, memory)
			}
			go func() {
				err := echo(data)
				if err != nil { // a client that does not notice would leave the control stream as it is
					control.Close()
				}
				echoed <- err
			}()
		}
	}
}

func (s PerftestServer) accept(ctx context.Context, l net.Listener, o rdma.Options) (*rdma.Conn, error) {
	nc, err := l.Accept()
	if err != nil {
		return nil, err
	}
	o.MaxSend = perfSends
	c, err := rdma.Respond(ctx, nc, o, func(*rdma.Request) rdma.Answer { return rdma.Answer{} })
	if err == nil && s.Connected != nil {
		s.Connected(c)
	}
	return c, err
}

// echo answers Sends until the peer closes the stream.
func echo(c *rdma.Conn) error {
	defer c.Close()
	p := peer{c: c}
	for {
		if err := c.Receive(&p.ev); err != nil {
			return ended(err)
		}
		if err := p.post(&rdma.WorkRequest{Op: rdma.Send, Data: append([]byte(nil), p.ev.Data...)}); err != nil {
			return err
		}
	}
}

// A PerftestClient is the client of one run of perftest.
type PerftestClient struct {
	control peer
	data    peer
	stag    rdma.STag
	to      uint64
}

// DialPerftest connects to the server of a program of perftest. latency is for ib_send_lat, whose steps are others.
func DialPerftest(ctx context.Context, dial func() (net.Conn, error), o rdma.Options, latency bool) (*PerftestClient, error) {
	c := &PerftestClient{}
	o.MaxSend = perfSends
	connect := func(p *peer) error {
		nc, err := dial()
		if err == nil {
			p.c, _, err = rdma.Initiate(ctx, nc, o)
		}
		return err
	}
	if err := connect(&c.control); err != nil {
		return nil, err
	}
	err := c.startPerftest(func() error { return connect(&c.data) }, latency)
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func (c *PerftestClient) startPerftest(connect func() error, latency bool) error {
	for _, b := range [][]byte{append([]byte(version), make([]byte, versionLen-len(version))...),
		binary.BigEndian.AppendUint32(nil, 4096), binary.BigEndian.AppendUint32(nil, 64), []byte("3\x00")} {
		if err := c.exchange(b); err != nil {
			return err
		}
	}
	if err := c.keys(); err != nil {
		return err
	}
	// perftest closes the listener of the control stream only now, which may reset this connection. Its own client tries
	// 10 times, too.
	for n := 1; ; n++ {
		err := connect()
		if err == nil {
			break
		}
		if n == 10 {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
	steps := 4
	if latency {
		steps = 5
	}
	for range steps {
		if err := c.keys(); err != nil {
			return err
		}
	}
	return nil
}

// exchange sends b and receives as many bytes.
func (c *PerftestClient) exchange(b []byte) error {
	if err := c.control.post(&rdma.WorkRequest{Op: rdma.Send, Data: b}); err != nil {
		return err
	}
	_, err := c.control.message(len(b))
	return err
}

// keys exchanges keys, of which the client has none.
func (c *PerftestClient) keys() error {
	if err := c.exchange(make([]byte, keysLen)); err != nil {
		return err
	}
	b := c.control.ev.Data
	c.stag, c.to = rdma.STag(binary.BigEndian.Uint32(b[16:])), binary.BigEndian.Uint64(b[24:])
	return nil
}

// Streams returns the stream of the operations, and the one of everything else.
func (c *PerftestClient) Streams() (data, control *rdma.Conn) { return c.data.c, c.control.c }

// Memory names the memory of the server.
func (c *PerftestClient) Memory() (stag rdma.STag, to uint64) { return c.stag, c.to }

// Write writes b to the memory of the server.
func (c *PerftestClient) Write(b []byte) error {
	return c.data.post(&rdma.WorkRequest{Op: rdma.Write, Data: b, STag: c.stag, TO: c.to})
}

// Read reads the memory of the server.
func (c *PerftestClient) Read(b []byte) error { return c.data.read(c.stag, c.to, b) }

// Ping sends b and receives as many bytes.
func (c *PerftestClient) Ping(b []byte) error {
	if err := c.data.post(&rdma.WorkRequest{Op: rdma.Send, Data: b}); err != nil {
		return err
	}
	_, err := c.data.message(len(b))
	return err
}

// Finish ends the run. results is for the programs that measure bandwidth, which exchange them.
func (c *PerftestClient) Finish(results bool) error {
	if results {
		if err := c.keys(); err != nil {
			return err
		}
		for i := range 5 {
			if err := c.exchange(make([]byte, 8)); err != nil {
				return fmt.Errorf("result %d: %w", i, err)
			}
		}
	}
	return c.keys()
}

// AwaitServer waits after Finish until the server has ended both streams. siw fails the last Send of a server whose stream ends
// before siw has reported that Send. The stream of the operations may end by a reset: the server of ib_write_bw does not wait until
// siw has read all Writes.
func (c *PerftestClient) AwaitServer() error {
	for _, p := range []*peer{&c.data, &c.control} {
		err := p.c.Receive(&p.ev)
		switch reset := errors.Is(err, syscall.ECONNRESET); {
		case err == nil:
			return fmt.Errorf("verbs: a message of %d bytes comes after the end of a run", len(p.ev.Data))
		case !errors.Is(err, io.EOF) && (p == &c.control || !reset):
			return err
		}
	}
	return nil
}

// Close closes both streams.
func (c *PerftestClient) Close() {
	for _, p := range []peer{c.control, c.data} {
		if p.c != nil {
			p.c.Close()
		}
	}
}
