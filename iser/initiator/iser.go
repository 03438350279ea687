// Package initiator carries the sessions of iscsi/initiator over iSER (RFC 7145), on the software iWARP of package rdma. It
// logs in as Linux does: MPA first, then the login in Sends.
package initiator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"sync"

	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
)

const (
	// segment is the longest data segment in either direction, in bytes, as ib_iser offers it.
	segment = 8192
	headLen = iser.HeaderLen + pdu.BHSLen
	// base is the tagged offset of the first byte of a command's memory.
	base = 0x1000
	// maxControls limits the PDUs other than commands that wait to be sent.
	maxControls = 1024
)

// Transport is an initiator.Transport over iSER.
type Transport struct {
	// RDMA configures the streams. MaxSend and Private are overridden.
	RDMA rdma.Options
	// Dialer makes TCP connections; nil: a net.Dialer.
	Dialer func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Name implements initiator.Transport.
func (Transport) Name() string { return "iser" }

// Dial implements initiator.Transport.
func (t Transport) Dial(ctx context.Context, addr string) (initiator.Carrier, error) {
	dial := t.Dialer
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	nc, err := dial(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	o := t.RDMA
	o.MaxSend = headLen + segment
	// Neither zero-based virtual addresses nor a reason not to use Send with Invalidate (RFC 7145, appendix A).
	o.Private = []byte{0x80, 0, 0, 0}
	rc, _, err := rdma.Initiate(ctx, nc, o)
	if err != nil {
		nc.Close()
		switch {
		case ctx.Err() != nil:
			err = context.Cause(ctx)
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			err = fmt.Errorf("the target did not answer the MPA Request, so its portal may not serve iSER: %w", err)
		}
		return nil, fmt.Errorf("iSER: %w", err)
	}
	c := &carrier{rc: rc}
	c.params.MaxSendSegment = segment
	return c, nil
}

// A carrier is a connection over iSER.
type carrier struct {
	rc     *rdma.Conn
	params initiator.Params
	find   func(uint32) *initiator.Command
	ev     rdma.Event

	mu       sync.Mutex
	controls int // that are queued
}

// state is the State of a Command.
type state struct {
	carrier    *carrier
	cmd        *initiator.Command
	head       [headLen]byte
	wr         rdma.WorkRequest
	region     rdma.Region
	registered bool
}

// WorkDone implements rdma.Completer.
func (st *state) WorkDone(*rdma.WorkRequest, error) { st.cmd.Release() }

// A control is a PDU that is no command.
type control struct {
	wr      rdma.WorkRequest
	carrier *carrier
}

// WorkDone implements rdma.Completer.
func (t *control) WorkDone(*rdma.WorkRequest, error) {
	t.carrier.mu.Lock()
	defer t.carrier.mu.Unlock()
	t.carrier.controls--
}

// Offer implements initiator.Carrier.
func (c *carrier) Offer(o initiator.Offer) []keys.Pair {
	if o.Discovery {
		return nil
	}
	n := strconv.Itoa(segment)
	list := []keys.Pair{{Key: "InitiatorRecvDataSegmentLength", Value: n}, {Key: "TargetRecvDataSegmentLength", Value: n}}
	if !o.Joins {
		list = append(list, keys.Pair{Key: "RDMAExtensions", Value: "Yes"})
	}
	return list
}

// EnterFullFeature implements initiator.Carrier.
func (c *carrier) EnterFullFeature(p initiator.Params, find func(uint32) *initiator.Command) error {
	if p.HeaderDigest || p.DataDigest {
		return errors.New("iSER has no digests: iWARP has CRCs instead")
	}
	if p.MaxSendSegment > segment {
		return fmt.Errorf("TargetRecvDataSegmentLength=%d of the target is above the %d that the initiator offered", p.MaxSendSegment, segment)
	}
	c.params, c.find = p, find
	c.rc.Grow()
	return nil
}

// Post implements initiator.Carrier.
func (c *carrier) Post(bhs pdu.BHS, data []byte) error {
	c.mu.Lock()
	full := c.controls == maxControls
	if !full {
		c.controls++
	}
	c.mu.Unlock()
	if full {
		return fmt.Errorf("the target does not take the answers to its pings: %d wait", maxControls)
	}
	head := make([]byte, iser.HeaderLen, headLen)
	iser.Header{}.Put(head)
	body := append([]byte(nil), data...)
	if op := bhs.Opcode(); op == pdu.LoginReq || op == pdu.TextReq { // as Linux does
		body = append(body, make([]byte, pdu.Padded(len(data))-len(data))...)
	}
	t := &control{carrier: c}
	t.wr = rdma.WorkRequest{Op: rdma.Send, Head: append(head, bhs...), Data: body, Done: t}
	if err := c.rc.Post(&t.wr); err != nil {
		t.WorkDone(nil, err)
		return err
	}
	return nil
}

// PostCommand implements initiator.Carrier. It advertises the memory of cmd, without the immediate data.
func (c *carrier) PostCommand(cmd *initiator.Command) error {
	st, ok := cmd.State.(*state)
	if !ok {
		st = &state{cmd: cmd}
		cmd.State = st
	}
	st.carrier = c
	immediate := 0
	if c.params.ImmediateData {
		immediate = min(len(cmd.Out), c.params.FirstBurstLength, c.params.MaxSendSegment)
	}
	var h iser.Header
	switch rest := cmd.Out[immediate:]; {
	case len(cmd.In) > 0:
		h.Read = iser.Remote{Valid: true, STag: c.rc.Register(&st.region, cmd.In, base, rdma.RemoteWrite), Base: base}
		st.registered = true
	case len(rest) > 0:
		h.Write = iser.Remote{Valid: true, STag: c.rc.Register(&st.region, rest, base, rdma.RemoteRead), Base: base}
		st.registered = true
	}
	h.Put(st.head[:])
	bhs := cmd.BHS()
	bhs.SetDataSegmentLength(immediate)
	copy(st.head[iser.HeaderLen:], bhs)
	st.wr = rdma.WorkRequest{Op: rdma.Send, Head: st.head[:], Data: cmd.Out[:immediate], Done: st}
	cmd.Hold()
	if err := c.rc.Post(&st.wr); err != nil {
		c.End(cmd)
		cmd.Unhold()
		return err
	}
	return nil
}

// End implements initiator.Carrier.
func (c *carrier) End(cmd *initiator.Command) {
	if st := cmd.State.(*state); st.registered {
		st.registered = false
		c.rc.Deregister(&st.region)
	}
}

// Check implements initiator.Carrier. iSER has no count of the data that came: RDMA Writes say nothing to the ULP.
func (c *carrier) Check(*initiator.Command) error { return nil }

// Flush implements initiator.Carrier.
func (c *carrier) Flush() { c.rc.Flush() }

// Receive implements initiator.Carrier.
func (c *carrier) Receive(p *initiator.PDU) error {
	for {
		if err := c.rc.Receive(&c.ev); err != nil {
			if err == io.EOF {
				err = fmt.Errorf("the target closed the connection: %w", io.ErrUnexpectedEOF)
			}
			return err
		}
		if c.ev.Read == nil {
			return c.parse(p)
		}
	}
}

// parse takes the PDU from a Send. An iSER header of a target has no STags (RFC 7145, section 9.2).
func (c *carrier) parse(p *initiator.PDU) error {
	b := c.ev.Data
	if len(b) < headLen {
		return fmt.Errorf("the target sent a message of %d bytes: a PDU over iSER has at least %d", len(b), headLen)
	}
	h, hello, err := iser.ParseHeader(b)
	switch {
	case err != nil:
		return fmt.Errorf("iSER header of the target: %w", err)
	case hello || h.Read.Valid || h.Write.Valid:
		return fmt.Errorf("iSER header of the target: % x has STags or is a Hello", b[:iser.HeaderLen])
	}
	bhs, data := pdu.BHS(b[iser.HeaderLen:headLen]), b[headLen:]
	n := bhs.DataSegmentLength()
	if n > len(data) || len(data) > pdu.Padded(n) || bhs.TotalAHSLength() > 0 {
		return fmt.Errorf("the target sent a %v that announces %d bytes of data and has %d", bhs.Opcode(), n, len(data))
	}
	if c.ev.Invalidates {
		if err := c.invalidated(bhs); err != nil {
			return err
		}
	}
	switch bhs.Opcode() {
	case pdu.DataIn, pdu.R2T: // RDMA takes their place
		return fmt.Errorf("the target sent a %v over iSER", bhs.Opcode())
	}
	*p = initiator.PDU{BHS: bhs, Data: data[:n]}
	return nil
}

// invalidated checks that a Send with Invalidate names the memory of the command that it answers (RFC 7145, section 7.3.2).
func (c *carrier) invalidated(h pdu.BHS) error {
	if h.Opcode() == pdu.SCSIResponse && c.find != nil {
		if cmd := c.find(h.ITT()); cmd != nil {
			if st, ok := cmd.State.(*state); ok && st.carrier == c && st.region.STag() == c.ev.Invalidated {
				return nil
			}
		}
	}
	return fmt.Errorf("the target invalidated STag %#x with a %v that does not end its command", c.ev.Invalidated, h.Opcode())
}

// Close implements initiator.Carrier.
func (c *carrier) Close() error { return c.rc.Close() }
