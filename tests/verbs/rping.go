package verbs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/iser-target/iser-target/rdma"
)

const (
	advertLen = 16      // a Send of rping: TO (8), STag (4) and length (4), big-endian
	maxPing   = 1 << 20 // bytes that a client may advertise
)

// ErrPingDiffers says that a ping came back with other data.
var ErrPingDiffers = errors.New("verbs: the data of the ping differs")

// A PingServer is the server of rping. For each ping it reads the data that the client advertises, and writes it to
// the buffer that the client advertises next.
type PingServer struct {
	// Pinged, if not nil, is called after each ping with their number. An error ends Serve.
	Pinged func(n int) error
}

// Serve answers pings until the client closes the stream between two pings.
func (s PingServer) Serve(c *rdma.Conn) error {
	p := peer{c: c}
	buf, goAhead := make([]byte, maxPing), make([]byte, advertLen)
	for n := 1; ; n++ {
		stag, to, length, err := p.advert()
		if err != nil {
			return ended(err)
		}
		if err := p.read(stag, to, buf[:length]); err != nil {
			return fmt.Errorf("RDMA Read of ping %d: %w", n, err)
		}
		if err := p.post(&rdma.WorkRequest{Op: rdma.Send, Data: goAhead}); err != nil {
			return err
		}
		stag, to, room, err := p.advert()
		if err != nil {
			return fmt.Errorf("second advertisement of ping %d: %w", n, err)
		}
		if room < length {
			return fmt.Errorf("verbs: ping %d has %d bytes, its sink %d", n, length, room)
		}
		if err := p.post(&rdma.WorkRequest{Op: rdma.Write, Data: buf[:length], STag: stag, TO: to},
			&rdma.WorkRequest{Op: rdma.Send, Data: goAhead}); err != nil {
			return err
		}
		if s.Pinged != nil {
			if err := s.Pinged(n); err != nil {
				return err
			}
		}
	}
}

// advert receives an advertisement.
func (p *peer) advert() (rdma.STag, uint64, int, error) {
	b, err := p.message(advertLen)
	if err != nil {
		return 0, 0, 0, err
	}
	n := binary.BigEndian.Uint32(b[12:])
	if n == 0 || n > maxPing {
		return 0, 0, 0, fmt.Errorf("verbs: an advertisement of %d bytes, the limit is %d", n, maxPing)
	}
	return rdma.STag(binary.BigEndian.Uint32(b[8:])), binary.BigEndian.Uint64(b), int(n), nil
}

// A Pinger is the client of rping on one stream.
type Pinger struct {
	p            peer
	source, sink []byte
	regions      [2]rdma.Region
	adverts      [2][]byte
	n            int
}

// NewPinger returns a client whose pings have size bytes. The server of rping requires the same -S.
func NewPinger(c *rdma.Conn, size int) *Pinger {
	g := &Pinger{p: peer{c: c}, source: make([]byte, size), sink: make([]byte, size)}
	for i, buf := range [][]byte{g.source, g.sink} {
		const base = 1 << 40 // a TO that does not begin at 0, as those of verbs
		stag := c.Register(&g.regions[i], buf, base, []rdma.Access{rdma.RemoteRead, rdma.RemoteWrite}[i])
		b := binary.BigEndian.AppendUint64(nil, base)
		b = binary.BigEndian.AppendUint32(b, uint32(stag))
		g.adverts[i] = binary.BigEndian.AppendUint32(b, uint32(size))
	}
	return g
}

// Ping sends one ping and compares what comes back.
func (g *Pinger) Ping() error {
	// The server of rping takes the data for a string, and writes as many bytes as that has, with its end.
	for i := range g.source {
		g.source[i] = byte('A' + (i+g.n)%58)
	}
	g.source[len(g.source)-1] = 0
	clear(g.sink)
	g.n++
	for _, advert := range g.adverts {
		if err := g.Advertise(advert); err != nil {
			return err
		}
		if _, err := g.p.message(advertLen); err != nil {
			return err
		}
	}
	if !bytes.Equal(g.source, g.sink) {
		return ErrPingDiffers
	}
	return nil
}

// Source returns the advertisement of the memory that the server reads.
func (g *Pinger) Source() []byte { return g.adverts[0] }

// Advertise sends an advertisement and does not wait for the answer.
func (g *Pinger) Advertise(advert []byte) error {
	return g.p.post(&rdma.WorkRequest{Op: rdma.Send, Data: advert})
}

// Close takes the memory back. The caller closes the stream.
func (g *Pinger) Close() {
	for i := range g.regions {
		g.p.c.Deregister(&g.regions[i])
	}
}
