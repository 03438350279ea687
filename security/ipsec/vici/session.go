package vici

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/strongswan/govici/vici"
)

const (
	maxPacket = 512 << 10 // of the protocol; charon sends none that is longer
	maxAnswer = 16 << 20  // all packets of an answer: about 12,000 IKE SAs
)

var (
	errLongPacket = fmt.Errorf("charon sends a packet of more than %d bytes", maxPacket)
	errLongAnswer = fmt.Errorf("charon sends an answer of more than %d bytes", maxAnswer)
)

// A session is a connection for requests and one for events. It is not used again after an error.
type session struct {
	*vici.Session

	mu    sync.Mutex
	conns []net.Conn
	shut  bool
}

// dial connects to charon's socket. The session lives until end, whatever becomes of ctx.
func dial(ctx context.Context, socket string, timeout time.Duration) (*session, error) {
	s := &session{}
	made, err := vici.NewSession(vici.WithAddr("unix", socket), vici.WithDialContext(
		func(_ context.Context, network, addr string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			conn, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			s.conns = append(s.conns, conn) // nobody else knows s before NewSession returns
			return &bounded{Conn: conn}, nil
		}))
	if err != nil {
		s.end()
		return nil, err
	}
	s.Session = made
	return s, nil
}

// end closes both connections. Close of vici.Session would ask charon before.
func (s *session) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shut = true
	for _, c := range s.conns {
		c.Close()
	}
}

// within calls f, which uses s, and ends s when f takes longer than timeout or ctx ends. The error says so.
func (s *session) within(ctx context.Context, timeout time.Duration, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	stop := context.AfterFunc(ctx, s.end)
	err := f()
	if !stop() {
		s.end()
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return fmt.Errorf("charon does not answer within %v: %w", timeout, ctx.Err())
		}
		return ctx.Err()
	}
	if err != nil {
		s.end()
	}
	return err
}

// A bounded connection reads packets up to maxPacket, and maxAnswer bytes after each write. govici allocates the length that a
// packet says before it reads on. So Read returns the bytes of a length only if they are acceptable.
type bounded struct {
	net.Conn
	header [4]byte
	have   int // bytes of header
	left   int // bytes of the packet
	total  int // bytes since Write
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left > 0 {
		n, err := b.Conn.Read(p[:min(len(p), b.left)])
		b.left -= n
		return n, err
	}
	n, err := b.Conn.Read(p[:min(len(p), len(b.header)-b.have)])
	copy(b.header[b.have:], p[:n])
	b.have += n
	if b.have < len(b.header) {
		return n, err
	}
	length := binary.BigEndian.Uint32(b.header[:])
	b.have = 0
	if length > maxPacket {
		return 0, errLongPacket
	}
	b.left = int(length)
	if b.total += b.left; b.total > maxAnswer {
		return 0, errLongAnswer
	}
	return n, err
}

func (b *bounded) Write(p []byte) (int, error) {
	b.total = 0
	return b.Conn.Write(p)
}
