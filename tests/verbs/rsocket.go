package verbs

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"

	"github.com/iser-target/iser-target/rdma"
)

const (
	connDataLen = 40      // struct rs_conn_data
	sgeLen      = 16      // struct rs_sge: TO (8), STag (4), length (4), little-endian in memory
	sgl         = 2       // elements of a list of sinks
	half        = 1 << 17 // bytes of each of two sinks
	credits     = 256     // messages that the peer may send ahead
	maxTransfer = 65536   // bytes of an RDMA Write
	base        = 1 << 40 // TO of the first byte, not 0, as those of verbs
)

// Operations are the upper 3 bits of a message. iWARP has no immediate data, so messages are Sends of 4 bytes.
const (
	opData = 0
	opSGL  = 4
	opCtrl = 7

	ctrlDisconnect = 0
	ctrlKeepalive  = 1
	ctrlShutdown   = 2
)

// A sink is memory of the peer that takes data.
type sink struct {
	stag rdma.STag
	to   uint64
	n    uint32
}

// A Socket is a stream socket of rsockets. Read and Write belong to one goroutine.
type Socket struct {
	p peer
	// in is where the peer writes data, in two halves, and offers where it writes which memory is free.
	in, offers   []byte
	regions      [2]rdma.Region
	got          []uint32 // bytes of messages of the peer that were not read
	at           int      // of the next byte of in
	free         int      // bytes of in that were read and not offered
	from         int      // the half of in that is offered next
	received     uint16   // messages of the peer with data that were read
	granted      uint16   // the peer may send until that
	sent, allows uint16   // messages with data: sent, and those that the peer allows
	sinks        sink     // where the offers of the peer are
	nextOffer    int      // element of the peer's list for the next offer
	current      sink     // takes our data
	element      int      // of offers, current is from there
	closed       bool     // the peer sends no more
}

// prepare registers the memory and returns the private data.
func (s *Socket) prepare(c *rdma.Conn) []byte {
	s.p.c, s.in, s.offers = c, make([]byte, 2*half), make([]byte, sgl*sgeLen)
	b := []byte{1, 0} // version, flags: little-endian, no memory that is mapped
	b = binary.BigEndian.AppendUint16(b, credits)
	b = append(b, 0, 0, 0, 0)
	for i, m := range []struct {
		buf []byte
		n   uint32
	}{{s.offers, sgl}, {s.in, half}} {
		stag := c.Register(&s.regions[i], m.buf, base, rdma.RemoteWrite)
		b = binary.BigEndian.AppendUint64(b, base)
		b = binary.BigEndian.AppendUint32(b, uint32(stag))
		b = binary.BigEndian.AppendUint32(b, m.n)
	}
	s.free, s.from, s.granted, s.nextOffer = half, half, credits, 1
	return b
}

// connected takes the private data of the peer.
func (s *Socket) connected(b []byte) error {
	if len(b) < connDataLen || b[0] != 1 || b[1]&1 != 0 {
		return fmt.Errorf("verbs: %x is not the private data of rsockets on a little-endian machine", b)
	}
	s.allows = binary.BigEndian.Uint16(b[2:])
	get := func(b []byte) sink {
		return sink{rdma.STag(binary.BigEndian.Uint32(b[8:])), binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[12:])}
	}
	s.sinks, s.current = get(b[8:]), get(b[24:])
	if s.sinks.n == 0 || s.sinks.n > 1024 {
		return fmt.Errorf("verbs: a list of %d sinks", s.sinks.n)
	}
	return nil
}

// AcceptSocket accepts a stream as rsockets does.
func AcceptSocket(ctx context.Context, nc net.Conn, o rdma.Options) (*Socket, error) {
	s := &Socket{}
	_, err := rdma.Respond(ctx, nc, o, func(r *rdma.Request) rdma.Answer {
		if err := s.connected(r.Private); err != nil {
			return rdma.Answer{Reject: err}
		}
		return rdma.Answer{Prepare: s.prepare}
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// ConnectSocket connects a stream as rsockets does.
func ConnectSocket(ctx context.Context, nc net.Conn, o rdma.Options) (*Socket, error) {
	s := &Socket{}
	o.Prepare = s.prepare
	c, private, err := rdma.Initiate(ctx, nc, o)
	if err != nil {
		return nil, err
	}
	if err := s.connected(private); err != nil {
		c.Close()
		return nil, err
	}
	return s, nil
}

// Conn returns the stream.
func (s *Socket) Conn() *rdma.Conn { return s.p.c }

// next receives a message.
func (s *Socket) next() error {
	b, err := s.p.message(4)
	if err != nil {
		if err = ended(err); err == nil {
			s.closed = true
		}
		return err
	}
	m := binary.LittleEndian.Uint32(b)
	switch op, n := m>>29, m&(1<<29-1); op {
	case opData:
		have := 0
		for _, n := range s.got {
			have += int(n)
		}
		if len(s.got) >= credits || int(n) > 2*half-have || n == 0 {
			return fmt.Errorf("verbs: %d bytes of data come after %d in %d messages", n, have, len(s.got))
		}
		s.got = append(s.got, n)
	case opSGL:
		s.allows = uint16(n)
	case opCtrl:
		switch n {
		case ctrlDisconnect, ctrlShutdown:
			s.closed = true
		case ctrlKeepalive:
		default:
			return fmt.Errorf("verbs: control message %d", n)
		}
	default:
		return fmt.Errorf("verbs: message %#x", m)
	}
	return nil
}

// Read implements io.Reader.
func (s *Socket) Read(b []byte) (int, error) {
	for len(s.got) == 0 {
		if s.closed {
			return 0, io.EOF
		}
		if err := s.next(); err != nil {
			return 0, err
		}
	}
	n := min(len(b), int(s.got[0]), len(s.in)-s.at)
	copy(b, s.in[s.at:][:n])
	s.at, s.free = (s.at+n)%len(s.in), s.free+n
	if s.got[0] -= uint32(n); s.got[0] == 0 {
		s.got = s.got[1:]
		s.received++
	}
	return n, s.offer()
}

// offer gives the peer memory and credits, if there is enough to give.
func (s *Socket) offer() error {
	const all = credits
	more := s.free >= half
	if !more && int16(s.received+all/2-s.granted) < 0 {
		return nil
	}
	s.granted = s.received + all
	msg := s.control(opSGL, uint32(s.granted))
	if !more {
		return s.p.post(msg)
	}
	b := binary.LittleEndian.AppendUint64(nil, base+uint64(s.from)) // the halves in turn
	s.from = (s.from + half) % len(s.in)
	b = binary.LittleEndian.AppendUint32(b, uint32(s.regions[1].STag()))
	b = binary.LittleEndian.AppendUint32(b, half)
	to := s.sinks.to + uint64(s.nextOffer)*sgeLen
	s.free -= half
	s.nextOffer = (s.nextOffer + 1) % int(s.sinks.n)
	return s.p.post(&rdma.WorkRequest{Op: rdma.Write, Data: b, STag: s.sinks.stag, TO: to}, msg)
}

// control returns a message.
func (s *Socket) control(op, n uint32) *rdma.WorkRequest {
	return &rdma.WorkRequest{Op: rdma.Send, Data: binary.LittleEndian.AppendUint32(nil, op<<29|n)}
}

// Write implements io.Writer. It receives messages while the peer has no room.
func (s *Socket) Write(b []byte) (int, error) {
	done := 0
	for done < len(b) {
		if s.current.n == 0 { // the next element, once the peer has filled it
			e := s.offers[(s.element+1)%sgl*sgeLen:][:sgeLen]
			if n := binary.LittleEndian.Uint32(e[12:]); n != 0 {
				s.current = sink{rdma.STag(binary.LittleEndian.Uint32(e[8:])), binary.LittleEndian.Uint64(e), n}
				s.element = (s.element + 1) % sgl
				clear(e)
			}
		}
		if s.current.n == 0 || s.sent == s.allows {
			if s.closed {
				return done, errors.New("verbs: the peer has closed the socket")
			}
			if err := s.next(); err != nil {
				return done, err
			}
			continue
		}
		n := min(len(b)-done, int(s.current.n), maxTransfer)
		data := append([]byte(nil), b[done:][:n]...)
		if err := s.p.post(&rdma.WorkRequest{Op: rdma.Write, Data: data, STag: s.current.stag, TO: s.current.to},
			s.control(opData, uint32(n))); err != nil {
			return done, err
		}
		s.current.to, s.current.n, s.sent, done = s.current.to+uint64(n), s.current.n-uint32(n), s.sent+1, done+n
	}
	return done, nil
}

// Shutdown sends the peer that no more data comes, and waits until the peer has ended the stream or sent the same.
func (s *Socket) Shutdown() error {
	if err := s.p.post(s.control(opCtrl, ctrlDisconnect)); err != nil {
		return err
	}
	for !s.closed {
		if err := s.next(); err != nil {
			return err
		}
	}
	return nil
}

// Close ends the stream.
func (s *Socket) Close() error { return s.p.c.Close() }
