package rdma

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"

	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/rdma/wire"
)

// A State is a stream at rest: all that another process needs to continue it on the same TCP
// connection. The stream is in RDMA mode, nothing is queued or unanswered in either direction, and no
// memory is registered.
type State struct {
	Unread     []byte `json:"unread,omitempty"` // what came from the socket and was not received
	IRD        int    `json:"ird"`
	ORD        int    `json:"ord"`
	MaxSend    int    `json:"max_send"`  // bytes of the longest Send that the peer may send
	MaxULPDU   int    `json:"max_ulpdu"` // bytes of the longest ULPDU that leaves
	CRC        bool   `json:"crc"`
	MarkersIn  bool   `json:"markers_in,omitempty"`
	MarkersOut bool   `json:"markers_out,omitempty"`
	GridIn     int    `json:"grid_in,omitempty"` // position between Markers, bytes
	GridOut    int    `json:"grid_out,omitempty"`
	// The MSNs of the next messages on queues 0 and 1 (RFC 5041, section 5.1), in both directions.
	SendIn  uint32 `json:"send_in"`
	ReadIn  uint32 `json:"read_in"`
	SendOut uint32 `json:"send_out"`
	ReadOut uint32 `json:"read_out"`
	// Started says that the first FPDU of the peer has come, and FirstIsRTR that it may be an empty Send.
	Started    bool `json:"started"`
	FirstIsRTR bool `json:"first_is_rtr,omitempty"`
}

// ErrNotAtRest is why a stream has no State.
var ErrNotAtRest = errors.New("the stream is not at rest")

// Pause makes Receive time out between two messages, also one that waits for the peer. What has come
// of the next message remains. A message that was received in part is received to its end before.
func (c *Conn) Pause() {
	c.paused.Store(true)
	c.interruptRead()
}

// Unpause ends what Pause began.
func (c *Conn) Unpause() { c.paused.Store(false) }

// rests reports whether Pause stops Receive here.
func (rx *receiver) rests() bool { return !rx.win.Inside && rx.asmLen == 0 && len(rx.marked) == 0 }

// Idle reports whether nothing waits to be sent, and nothing is being sent.
func (c *Conn) Idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.queue.head == nil && c.due.head == nil && !c.flushing && !c.deferred.Load()
}

// Socket returns the TCP connection of the stream.
func (c *Conn) Socket() net.Conn { return c.nc }

// State returns the stream as another process can continue it, or an ErrNotAtRest.
//
// Preconditions: Pause was called, and nobody is in Receive.
func (c *Conn) State() (State, error) {
	rx := &c.rx
	c.mem.mu.Lock()
	regions := len(c.mem.regions)
	c.mem.mu.Unlock()
	idle := c.Idle()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case rx.failed != nil || c.err != nil || c.ending || c.broken != nil || c.closed:
		return State{}, fmt.Errorf("%w: it is ending", ErrNotAtRest)
	case !idle || c.nreads > 0 || c.flushed.head != nil:
		return State{}, fmt.Errorf("%w: work requests are not done", ErrNotAtRest)
	case !rx.rests() || regions > 0:
		return State{}, fmt.Errorf("%w: a message is being received, or memory is registered", ErrNotAtRest)
	}
	return State{
		Unread: slices.Clone(rx.win.Peek(rx.win.Len())),
		IRD:    c.ird, ORD: c.ord, MaxSend: rx.maxSend, MaxULPDU: c.opt.MaxULPDU,
		CRC: c.crc, MarkersIn: rx.markers, MarkersOut: c.markersOut, GridIn: int(rx.grid), GridOut: int(c.tx.grid),
		SendIn: rx.sendMSN, ReadIn: rx.readMSN, SendOut: c.tx.sendMSN, ReadOut: c.tx.readMSN,
		Started: c.peerStarted.Load(), FirstIsRTR: c.rtrSend && rx.fpdu == 0,
	}, nil
}

// Continue returns the stream that s describes, on its TCP connection, for a Responder. After an error nc
// is open.
func Continue(nc net.Conn, o Options, s State) (*Conn, error) {
	o.MaxSend, o.MaxULPDU, o.Markers = s.MaxSend, s.MaxULPDU, s.MarkersIn
	o.IRD = max(s.IRD, 1) // 0 is the default
	o, err := o.complete()
	switch {
	case err != nil:
		return nil, err
	case s.IRD < 0 || s.IRD > maxDepth || s.ORD < 0 || s.ORD > maxDepth:
		return nil, fmt.Errorf("IRD %d, ORD %d: want at most %d", s.IRD, s.ORD, maxDepth)
	case len(s.Unread) > llp.WindowLen:
		return nil, fmt.Errorf("%d bytes of the stream are unread, want at most %d", len(s.Unread), llp.WindowLen)
	case min(s.GridIn, s.GridOut) < 0 || max(s.GridIn, s.GridOut) >= wire.MarkerInterval:
		return nil, fmt.Errorf("positions %d and %d between Markers: want 0 to %d", s.GridIn, s.GridOut, wire.MarkerInterval-1)
	}
	c := allocate(o)
	c.attach(nc, s.Unread, s.IRD, s.ORD, s.CRC, s.MarkersOut)
	rx, tx := &c.rx, &c.tx
	rx.grid, tx.grid = wire.MarkerGrid(s.GridIn), wire.MarkerGrid(s.GridOut)
	rx.sendMSN, rx.readMSN, tx.sendMSN, tx.readMSN = s.SendIn, s.ReadIn, s.SendOut, s.ReadOut
	c.rtrSend = s.FirstIsRTR
	if !s.FirstIsRTR {
		rx.fpdu = 1
	}
	c.peerStarted.Store(s.Started)
	return c, nil
}

// errPaused is what a read for Receive returns while the stream is paused.
var errPaused = fmt.Errorf("the stream is paused: %w", os.ErrDeadlineExceeded)
