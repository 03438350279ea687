package iser

import (
	"errors"
	"fmt"
	"net"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/rdma"
)

// A State is a connection at rest in the full feature phase: all that another process needs to continue it
// on the same TCP connection.
type State struct {
	Stream        rdma.State `json:"stream"`
	RecvSegment   int        `json:"recv_segment"` // the longest data segment of the initiator, bytes
	ORD           int        `json:"ord"`          // RDMA Reads that the Hello allows
	Stepped       bool       `json:"stepped,omitempty"`
	Invalidates   bool       `json:"invalidates,omitempty"`
	SolicitedOnly bool       `json:"solicited_only,omitempty"`
	PeerStarted   bool       `json:"peer_started,omitempty"`
	Hello         bool       `json:"hello,omitempty"`
	NeedsHello    bool       `json:"needs_hello,omitempty"`
	NoHello       bool       `json:"no_hello,omitempty"`
}

// Pause implements iscsi.Resumable.
func (c *Conn) Pause() { c.rc.Pause() }

// Unpause implements iscsi.Resumable.
func (c *Conn) Unpause() { c.rc.Unpause() }

// Idle implements iscsi.Resumable.
func (c *Conn) Idle() bool { return c.rc.Idle() }

// State implements iscsi.Resumable. It returns a State.
func (c *Conn) State() (any, error) {
	c.mu.Lock()
	ending, waits, ord := c.gone != nil, c.outstanding > 0 || !c.waiting.Empty() || !c.flushed.Empty(), c.ord
	c.mu.Unlock()
	switch {
	case ending || !c.fullFeature.Load():
		return nil, errors.New("the connection is ending, or has not logged in")
	case waits:
		return nil, errors.New("RDMA Reads are unanswered")
	}
	stream, err := c.rc.State()
	if err != nil {
		return nil, err
	}
	return State{
		Stream: stream, RecvSegment: c.recvSegment, ORD: ord, Stepped: c.stepped, Invalidates: c.invalidates,
		SolicitedOnly: c.solicitedOnly, PeerStarted: c.peerStarted, Hello: c.hello, NeedsHello: c.needsHello, NoHello: c.noHello,
	}, nil
}

// Continue returns the connection that s describes, on its TCP connection. After an error nc is open.
func Continue(nc net.Conn, o Options, s State) (*Conn, error) {
	if s.RecvSegment < 0 || s.RecvSegment >= 1<<24 {
		return nil, fmt.Errorf("data segments of %d bytes: want at most %d", s.RecvSegment, 1<<24-1)
	}
	rc, err := rdma.Continue(nc, o.complete().RDMA, s.Stream)
	if err != nil {
		return nil, err
	}
	c := &Conn{recvSegment: s.RecvSegment, stepped: s.Stepped, invalidates: s.Invalidates, solicitedOnly: s.SolicitedOnly,
		peerStarted: s.PeerStarted, hello: s.Hello, needsHello: s.NeedsHello, noHello: s.NoHello}
	c.fullFeature.Store(true)
	c.start(rc)
	c.ord = min(max(s.ORD, 0), c.ord)
	return c, nil
}

// Socket implements iscsi.Resumable.
func (c *Conn) Socket() net.Conn { return c.rc.Socket() }

// Advertisement implements iscsi.Resumable. It returns the iSER header of the request.
func (c *Conn) Advertisement(it *iscsi.Task) []byte {
	b := make([]byte, HeaderLen)
	it.Mover.(*task).remote.Put(b)
	return b
}

// Advertise implements iscsi.Resumable.
func (c *Conn) Advertise(bhs pdu.BHS, advertisement []byte) error {
	var h Header
	if len(advertisement) > 0 {
		var hello bool
		var err error
		if h, hello, err = ParseHeader(advertisement); err != nil {
			return err
		} else if hello {
			return errors.New("iSER Hello instead of the header of a request")
		}
	}
	c.hdr, c.bhs = h, bhs
	return nil
}
