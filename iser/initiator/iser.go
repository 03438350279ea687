// Package initiator carries the sessions of iscsi/initiator over iSER (RFC 7145), on the software iWARP of package rdma. It
// logs in as Linux does: MPA first, then the login in Sends.
package initiator

import (
	"bytes"
	"context"
	"encoding/binary"
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
	// receiveSegment is the longest data segment that the initiator receives, in bytes, as ib_iser offers it.
	receiveSegment = 8192
	// sendSegment is the longest one that it sends, if the target takes it: a WRITE with no more data takes no RDMA Read.
	sendSegment = 65536
	headLen     = iser.HeaderLen + pdu.BHSLen
	// defaultBase is the default of Transport.BaseOffset.
	defaultBase = 0x1000
	// maxControls limits the PDUs other than commands that wait to be sent.
	maxControls = 1024
)

// Transport is an initiator.Transport over iSER.
type Transport struct {
	// RDMA configures the streams. MaxSend and Private are overridden.
	RDMA rdma.Options
	// Dialer makes TCP connections; nil: a net.Dialer.
	Dialer func(ctx context.Context, network, addr string) (net.Conn, error)

	// Hello declares iSERHelloRequired=Yes, and begins the full feature phase of each connection with the iSER Hello (RFC 7145, sections
	// 5.1.3 and 6.10). It tells both sides how many RDMA Reads can be in progress, in place of MPA. Linux targets do not know it.
	Hello bool
	// NoInvalidate asks the target not to use Send with Invalidate (RFC 7145, section 1.5.2, and appendix A). If it does, the connection
	// ends.
	NoInvalidate bool
	// WholeData advertises the data-out of a command with what goes as immediate data, and declares
	// TaggedBufferForSolicitedDataOnly=No (RFC 7145, section 6.9). Linux advertises the rest only.
	WholeData bool
	// BaseOffset is the tagged offset of the first byte of a command's memory; default 0x1000.
	BaseOffset uint64
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
	c, err := t.Start(ctx, nc)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Start completes MPA startup on a TCP connection that is established, and returns its Carrier. After a login on the byte stream
// that agreed on RDMAExtensions=Yes, the connection continues that way (RFC 7145, section 5.1). After an error nc is closed. If
// ctx ends, Start returns its error.
func (t Transport) Start(ctx context.Context, nc net.Conn) (*Carrier, error) {
	if t.BaseOffset == 0 {
		t.BaseOffset = defaultBase
	}
	o := t.RDMA
	o.MaxSend = headLen + receiveSegment
	// No zero-based virtual addresses (RFC 7145, appendix A).
	o.Private = []byte{0x80, 0, 0, 0}
	if t.NoInvalidate {
		o.Private[0] |= 0x40
	}
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
	c := &Carrier{rc: rc, t: t}
	c.params.MaxSendSegment = receiveSegment
	return c, nil
}

// A Carrier is the initiator.Carrier of a connection over iSER.
type Carrier struct {
	rc        *rdma.Conn
	t         Transport
	discovery bool
	params    initiator.Params
	find      func(uint32) *initiator.Command
	ev        rdma.Event
	ord       int

	mu       sync.Mutex
	controls int // that are queued
}

// Stream returns the RDMAP stream of the connection. A program can send messages of its own on it. Receive of the Carrier takes all
// that come.
func (c *Carrier) Stream() *rdma.Conn { return c.rc }

// Message returns the message with the PDU that Receive has returned last. It is valid until the next Receive.
func (c *Carrier) Message() *rdma.Event { return &c.ev }

// ORD returns how many RDMA Reads the target has in progress at most, as its HelloReply says (iSER-ORD; RFC 7145, section 9.4); 0 without
// Transport.Hello.
func (c *Carrier) ORD() int { return c.ord }

// state is the State of a Command.
type state struct {
	carrier    *Carrier
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
	carrier *Carrier
}

// WorkDone implements rdma.Completer.
func (t *control) WorkDone(*rdma.WorkRequest, error) {
	t.carrier.mu.Lock()
	defer t.carrier.mu.Unlock()
	t.carrier.controls--
}

// Offer implements initiator.Carrier.
func (c *Carrier) Offer(o initiator.Offer) []keys.Pair {
	if c.discovery = o.Discovery; o.Discovery {
		return nil
	}
	list := []keys.Pair{{Key: "InitiatorRecvDataSegmentLength", Value: strconv.Itoa(receiveSegment)},
		{Key: "TargetRecvDataSegmentLength", Value: strconv.Itoa(sendSegment)}}
	if !o.Joins {
		list = append(list, keys.Pair{Key: "RDMAExtensions", Value: "Yes"})
		if c.t.Hello {
			list = append(list, keys.Pair{Key: "iSERHelloRequired", Value: "Yes"})
		}
		if c.t.WholeData {
			list = append(list, keys.Pair{Key: "TaggedBufferForSolicitedDataOnly", Value: "No"})
		}
	}
	return list
}

// EnterFullFeature implements initiator.Carrier.
func (c *Carrier) EnterFullFeature(p initiator.Params, find func(uint32) *initiator.Command) error {
	if p.HeaderDigest || p.DataDigest {
		return errors.New("iSER has no digests: iWARP has CRCs instead")
	}
	if p.MaxSendSegment > sendSegment {
		return fmt.Errorf("TargetRecvDataSegmentLength=%d of the target is above the %d that the initiator offered", p.MaxSendSegment, sendSegment)
	}
	c.params, c.find = p, find
	c.rc.Grow()
	if c.t.Hello && !c.discovery {
		return c.hello()
	}
	return nil
}

// hello exchanges iSER Hellos (RFC 7145, section 5.1.3). iSER-IRD is the IRD of MPA startup. An iSER-ORD above it, or another version,
// ends the connection.
func (c *Carrier) hello() error {
	const version = 10 // RFC 7145, section 9.3
	b := make([]byte, iser.HeaderLen)
	iser.Hello{MaxVer: version, MinVer: version, IRD: uint16(c.rc.IRD())}.Put(b)
	if err := c.rc.Post(&rdma.WorkRequest{Op: rdma.Send, Head: b}); err != nil {
		return err
	}
	c.rc.Flush()
	if err := c.rc.Receive(&c.ev); err != nil {
		return fmt.Errorf("no iSER HelloReply: %w", err)
	}
	reply := iser.HelloReply{MaxVer: version, CurVer: version}
	if len(c.ev.Data) == iser.HeaderLen {
		reply.ORD = binary.BigEndian.Uint16(c.ev.Data[2:])
	}
	reply.Put(b)
	if !bytes.Equal(c.ev.Data, b) || int(reply.ORD) > c.rc.IRD() {
		return fmt.Errorf("the target answered the iSER Hello with % x: that is no HelloReply of version %d for %d RDMA Reads",
			c.ev.Data[:min(len(c.ev.Data), iser.HeaderLen)], version, c.rc.IRD())
	}
	c.ord = int(reply.ORD)
	return nil
}

// Post implements initiator.Carrier.
func (c *Carrier) Post(bhs pdu.BHS, data []byte) error {
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

// PostCommand implements initiator.Carrier. It advertises the memory of cmd, without the immediate data unless WholeData is set.
func (c *Carrier) PostCommand(cmd *initiator.Command) error {
	st, ok := cmd.State.(*state)
	if !ok {
		st = &state{cmd: cmd}
		cmd.State = st
	}
	st.carrier = c
	immediate := cmd.ImmediateLength(&c.params)
	var h iser.Header
	base, rest := c.t.BaseOffset, cmd.Out[immediate:]
	if len(rest) > 0 && c.t.WholeData {
		rest = cmd.Out
	}
	switch {
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
func (c *Carrier) End(cmd *initiator.Command) {
	if st := cmd.State.(*state); st.registered {
		st.registered = false
		c.rc.Deregister(&st.region)
	}
}

// Check implements initiator.Carrier. iSER has no count of the data that came: RDMA Writes say nothing to the ULP.
func (c *Carrier) Check(*initiator.Command) error { return nil }

// Flush implements initiator.Carrier.
func (c *Carrier) Flush() { c.rc.Flush() }

// Receive implements initiator.Carrier.
func (c *Carrier) Receive(p *initiator.PDU) error {
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
func (c *Carrier) parse(p *initiator.PDU) error {
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
		if c.t.NoInvalidate {
			return fmt.Errorf("the target sent a %v with Invalidate, which the initiator has excluded", bhs.Opcode())
		}
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

// invalidated checks that a Send with Invalidate names the memory of the command that it answers (RFC 7145, section 7.3.2). A
// command that find does not know is for the caller of Receive.
func (c *Carrier) invalidated(h pdu.BHS) error {
	if h.Opcode() == pdu.SCSIResponse && c.find != nil {
		cmd := c.find(h.ITT())
		if cmd == nil {
			return nil
		}
		if st, ok := cmd.State.(*state); ok && st.carrier == c && st.region.STag() == c.ev.Invalidated {
			return nil
		}
	}
	return fmt.Errorf("the target invalidated STag %#x with a %v that does not end its command", c.ev.Invalidated, h.Opcode())
}

// Close implements initiator.Carrier.
func (c *Carrier) Close() error { return c.rc.Close() }
