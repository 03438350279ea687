package tcp

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/rdma/llp"
)

// A State is a connection at rest, in the full feature phase at ErrorRecoveryLevel 0: all that another
// process needs to continue it on the same socket.
type State struct {
	Unread       []byte `json:"unread,omitempty"` // what came from the socket and was not received
	Limit        int    `json:"limit"`            // the longest data segment that the initiator may send, bytes
	MaxSend      int    `json:"max_send"`         // the longest one that it takes
	MaxBurst     uint32 `json:"max_burst"`        // MaxBurstLength, bytes
	HeaderDigest bool   `json:"header_digest,omitempty"`
	DataDigest   bool   `json:"data_digest,omitempty"`
	StatSN       uint32 `json:"stat_sn"` // of the next status; below it, what was sent last
	ExpCmdSN     uint32 `json:"exp_cmd_sn"`
	MaxCmdSN     uint32 `json:"max_cmd_sn"`
	Tag          uint32 `json:"tag"` // the next count of Target Transfer Tags
}

var (
	errPaused    = fmt.Errorf("the connection is paused: %w", os.ErrDeadlineExceeded)
	errNotAtRest = errors.New("the connection is not at rest")
)

// Pause implements iscsi.Resumable.
func (c *Conn) Pause() {
	c.paused.Store(true)
	c.nc.SetReadDeadline(time.Unix(1, 0))
}

// Unpause implements iscsi.Resumable. The full feature phase has no deadline.
func (c *Conn) Unpause() {
	c.paused.Store(false)
	c.nc.SetReadDeadline(time.Time{})
}

// Idle implements iscsi.Resumable.
func (c *Conn) Idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.queue.Empty() && !c.flushing && !c.deferred.Load()
}

// State implements iscsi.Resumable. It returns a State.
func (c *Conn) State() (any, error) {
	rx := &c.rx
	idle := c.Idle()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case rx.err != nil || c.err != nil || c.ending || c.closed:
		return nil, fmt.Errorf("%w: it is ending", errNotAtRest)
	case c.recovers || !rx.fullFeature:
		return nil, fmt.Errorf("%w: it has an ErrorRecoveryLevel above 0, or has not logged in", errNotAtRest)
	case !idle || rx.win.Inside || rx.over != nil || slices.ContainsFunc(c.tasks, func(t *task) bool { return t.getting }):
		return nil, fmt.Errorf("%w: PDUs or data are on their way", errNotAtRest)
	}
	s := State{
		Unread: slices.Clone(rx.win.Peek(rx.win.Len())),
		Limit:  c.limit, MaxSend: c.MaxSendSegment(), MaxBurst: c.burst,
		HeaderDigest: c.digests.header, DataDigest: c.digests.data,
		StatSN: c.tx.statSN, ExpCmdSN: c.tx.expCmdSN, MaxCmdSN: c.tx.maxCmdSN,
	}
	for _, t := range c.tasks {
		s.Tag = max(s.Tag, t.ttt>>indexBits+1)
	}
	return s, nil
}

// Continue returns the connection that s describes, on its socket. nc belongs to it from now on, unless
// there is an error.
func Continue(nc net.Conn, s State) (*Conn, error) {
	switch {
	case len(s.Unread) > llp.WindowLen:
		return nil, fmt.Errorf("%d bytes of the stream are unread, want at most %d", len(s.Unread), llp.WindowLen)
	case s.Limit < 512 || s.Limit >= 1<<24 || s.MaxSend < 512 || s.MaxSend >= 1<<24: // RFC 7143, section 13.12
		return nil, fmt.Errorf("data segments of %d and %d bytes: want 512 to %d", s.Limit, s.MaxSend, 1<<24-1)
	case s.MaxBurst < 512 || s.MaxBurst >= 1<<24: // section 13.13
		return nil, fmt.Errorf("MaxBurstLength is %d, want 512 to %d", s.MaxBurst, 1<<24-1)
	}
	c := New(nc, Options{Prefix: s.Unread, MaxRecvDataSegmentLength: s.Limit})
	p := iscsi.Params{MaxRecvDataSegmentLength: uint32(s.MaxSend), MaxBurstLength: s.MaxBurst,
		HeaderDigest: s.HeaderDigest, DataDigest: s.DataDigest}
	if err := c.EnterFullFeature(p, 0); err != nil {
		return nil, err
	}
	c.tx.statSN, c.tx.expCmdSN, c.tx.maxCmdSN = s.StatSN, s.ExpCmdSN, s.MaxCmdSN
	c.firstTag = s.Tag << indexBits
	return c, nil
}

// Socket implements iscsi.Resumable.
func (c *Conn) Socket() net.Conn { return c.nc }

// Advertisement implements iscsi.Resumable. Requests advertise nothing over TCP.
func (c *Conn) Advertisement(*iscsi.Task) []byte { return nil }

// Advertise implements iscsi.Resumable.
func (c *Conn) Advertise(pdu.BHS, []byte) error { return nil }
