package initiator

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"syscall"

	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/rdma/crc32c"
	"github.com/iser-target/iser-target/rdma/llp"
)

const (
	// receiveSegment is the MaxRecvDataSegmentLength that the initiator declares, in bytes.
	receiveSegment = 262144
	digestLen      = 4
	// maxControls limits the PDUs other than commands and their data that wait to be sent. A target that sends more pings
	// than it takes answers to ends the session.
	maxControls = 1024
)

var zeros [4]byte

// TCP is the Transport of iSCSI over plain TCP (RFC 7143).
type TCP struct {
	// Dialer makes connections; nil: a net.Dialer.
	Dialer func(ctx context.Context, network, addr string) (net.Conn, error)
}

// Name implements Transport.
func (TCP) Name() string { return "tcp" }

// Dial implements Transport.
func (t TCP) Dial(ctx context.Context, addr string) (Carrier, error) {
	dial := t.Dialer
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	nc, err := dial(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	return NewTCP(nc), nil
}

// NewTCP returns a Carrier on a connection that is established.
func NewTCP(nc net.Conn) Carrier {
	c := &tcpCarrier{nc: nc, params: Params{MaxSendSegment: loginSegment}, limit: 2 * loginSegment}
	var one func([]byte) (int, error)
	one, c.both = llp.Readers(nc)
	c.win.Init(one, nil)
	c.out.SetConn(nc)
	c.out.Keep()
	if sc, ok := nc.(syscall.Conn); ok {
		if raw, err := sc.SyscallConn(); err == nil {
			c.sink = llp.NewSink(raw)
		}
	}
	return c
}

// tcpCarrier is a connection over TCP.
type tcpCarrier struct {
	nc     net.Conn
	sink   *llp.Sink // nil: data cannot be dropped in the kernel
	params Params
	find   func(uint32) *Command

	// Of the goroutine in Receive:
	win   llp.Window
	both  func(p, q []byte) (int, error) // reads from the socket, see llp.Readers; nil: it cannot do that
	limit int                            // longest data segment, bytes
	head  [pdu.BHSLen]byte
	data  []byte // of the PDU that Receive returned

	sending sync.Mutex // the goroutine in Flush
	out     llp.Gather
	written []*item // of commands, until out is flushed

	mu         sync.Mutex
	first, end *item // queue
	queued     int   // items in it
	controls   int   // those of them that Post has made
	err        error // why nothing can be queued
}

// An item is what waits to be sent.
type item struct {
	next    *item
	c       *Command // nil: a PDU of Post
	busy    bool     // guarded by mu: in the queue, or not written yet
	bhs     [pdu.BHSLen]byte
	data    []byte // to follow bhs
	isBurst bool   // the data is that of an R2T, in Data-Outs; bhs is the first one's
}

// tcpState is the State of a Command.
type tcpState struct {
	carrier *tcpCarrier
	cmd     item
	// The answers to R2Ts alternate: the next R2T may come before Flush notes that the data of the last one was sent.
	out   [2]item
	came  int    // bytes of data-in; they come in order
	r2tsn uint32 // of the next R2T
	asked uint64 // bytes of data-out that were sent or asked for; they go in order
	ended bool   // guarded by mu
}

// Offer implements Carrier.
func (c *tcpCarrier) Offer(o Offer) []keys.Pair {
	list := []keys.Pair{{Key: "MaxRecvDataSegmentLength", Value: strconv.Itoa(receiveSegment)}}
	if !o.Discovery {
		list = append(list, keys.Pair{Key: "HeaderDigest", Value: digestName(o.HeaderDigest)},
			keys.Pair{Key: "DataDigest", Value: digestName(o.DataDigest)})
	}
	return list
}

// EnterFullFeature implements Carrier.
func (c *tcpCarrier) EnterFullFeature(p Params, find func(uint32) *Command) error {
	c.params, c.find, c.limit = p, find, receiveSegment
	c.win.Grow()
	if c.both != nil {
		c.win.Scatter(c.both)
	}
	return nil
}

// Post implements Carrier.
func (c *tcpCarrier) Post(bhs pdu.BHS, data []byte) error {
	it := &item{data: append([]byte(nil), data...)}
	copy(it.bhs[:], bhs)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	if c.controls == maxControls {
		return fmt.Errorf("the target does not take the answers to its pings: %d wait", maxControls)
	}
	c.controls++
	c.append(it)
	return nil
}

// append appends to the queue.
// Preconditions: c.mu is held.
func (c *tcpCarrier) append(it *item) {
	it.next, it.busy = nil, true
	c.queued++
	if c.first == nil {
		c.first = it
	} else {
		c.end.next = it
	}
	c.end = it
}

// PostCommand implements Carrier.
func (c *tcpCarrier) PostCommand(cmd *Command) error {
	st, ok := cmd.State.(*tcpState)
	if !ok {
		st = &tcpState{}
		cmd.State = st
	}
	h := cmd.BHS()
	immediate := cmd.ImmediateLength(&c.params)
	h.SetDataSegmentLength(immediate)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	st.carrier, st.came, st.r2tsn, st.asked, st.ended = c, 0, 0, uint64(immediate), false
	st.cmd.c, st.out[0].c, st.out[1].c = cmd, cmd, cmd
	st.out[0].busy, st.out[1].busy = false, false
	st.cmd.bhs, st.cmd.data = cmd.head, cmd.Out[:immediate]
	cmd.Hold()
	c.append(&st.cmd)
	return nil
}

// End implements Carrier. Data-Outs that are not sent yet are left out.
func (c *tcpCarrier) End(cmd *Command) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cmd.State.(*tcpState).ended = true
}

// Check implements Carrier.
func (c *tcpCarrier) Check(cmd *Command) error {
	came, want := cmd.State.(*tcpState).came, len(cmd.In)-int(max(cmd.Residual, 0))
	if len(cmd.In) > 0 && came != want {
		return fmt.Errorf("the command ended well, but %d bytes of data came instead of %d", came, want)
	}
	return nil
}

// pop returns the first item of the queue, or nil. It takes at most *left items, and counts them down.
func (c *tcpCarrier) pop(left *int) *item {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.first != nil && *left > 0 {
		it := c.first
		c.queued--
		*left--
		c.first, it.next = it.next, nil
		if it.c == nil {
			c.controls--
		} else if it.isBurst && it.c.State.(*tcpState).ended {
			c.written = append(c.written, it)
			continue
		}
		return it
	}
	return nil
}

// Flush implements Carrier.
func (c *tcpCarrier) Flush() {
	c.sending.Lock()
	defer c.sending.Unlock()
	for c.flushBatch() {
	}
}

// flushBatch sends what is queued when it begins. It returns false if that is nothing. What comes later waits: the target may ask for
// more data as soon as it has that of an item, whose memory has to be free by then.
func (c *tcpCarrier) flushBatch() bool {
	c.mu.Lock()
	left := c.queued
	c.mu.Unlock()
	if left == 0 {
		return false
	}
	var err error
	for err == nil {
		it := c.pop(&left)
		if it == nil {
			break
		}
		if it.isBurst {
			err = c.putBurst(it)
		} else {
			err = c.put(it.bhs[:], it.data)
		}
		if it.c != nil {
			c.written = append(c.written, it)
		}
	}
	if err == nil {
		err = c.out.Flush()
	}
	if err != nil {
		c.fail(err)
		c.out.Reset()
	}
	c.mu.Lock()
	for _, it := range c.written {
		it.busy = false
	}
	c.mu.Unlock()
	for i, it := range c.written {
		c.written[i] = nil
		it.c.Release()
	}
	c.written = c.written[:0]
	return err == nil
}

// putBurst adds the Data-Outs that answer an R2T.
func (c *tcpCarrier) putBurst(it *item) error {
	h := pdu.BHS(it.bhs[:])
	for sn, data := uint32(0), it.data; ; sn++ {
		n := min(len(data), c.params.MaxSendSegment)
		if n == len(data) {
			h.SetFlags(pdu.FlagF)
		}
		h.SetDataSN(sn)
		h.SetDataSegmentLength(n)
		if err := c.put(h, data[:n]); err != nil {
			return err
		}
		if data = data[n:]; len(data) == 0 {
			return nil
		}
		h.SetBufferOffset(h.BufferOffset() + uint32(n))
	}
}

// put adds a PDU to what is written next. It writes what it has no room for.
func (c *tcpCarrier) put(h pdu.BHS, data []byte) error {
	g := &c.out
	short := len(data)
	if short >= llp.CopyBelow {
		short = 0
	}
	for room := pdu.BHSLen + 2*digestLen + 4 + short; !g.Room(room); {
		if err := g.Flush(); err != nil {
			return err
		}
	}
	g.Slab = append(g.Slab, h...)
	if c.params.HeaderDigest {
		g.Slab = binary.LittleEndian.AppendUint32(g.Slab, crc32c.Checksum(h))
	}
	if len(data) == 0 {
		return nil
	}
	if short > 0 {
		g.Slab = append(g.Slab, data...)
	} else {
		g.Refer(data)
	}
	pad := zeros[:pdu.Padded(len(data))-len(data)]
	g.Slab = append(g.Slab, pad...)
	if c.params.DataDigest {
		crc := crc32c.Update(crc32c.Checksum(data), pad)
		g.Slab = binary.LittleEndian.AppendUint32(g.Slab, crc)
	}
	return nil
}

// fail ends sending, and gives back what is queued.
func (c *tcpCarrier) fail(err error) {
	c.nc.Close()
	c.mu.Lock()
	if c.err == nil {
		c.err = err
	}
	it := c.first
	c.first, c.end, c.queued, c.controls = nil, nil, 0, 0
	c.mu.Unlock()
	for it != nil {
		next := it.next
		it.next = nil
		if it.c != nil {
			it.c.Release()
		}
		it = next
	}
}

// Close implements Carrier.
func (c *tcpCarrier) Close() error {
	c.fail(ErrClosed)
	return nil
}

// Receive implements Carrier. It places the data of Data-Ins, and answers R2Ts.
func (c *tcpCarrier) Receive(p *PDU) error {
	for {
		done, err := c.receive(p)
		if done || err != nil {
			return err
		}
	}
}

// receive takes one PDU. It returns true if that is for the caller of Receive.
func (c *tcpCarrier) receive(p *PDU) (bool, error) {
	c.win.Inside = false
	n := pdu.BHSLen
	if c.params.HeaderDigest {
		n += digestLen
	}
	if err := c.win.Fill(n); err != nil {
		return false, c.reason(err)
	}
	copy(c.head[:], c.win.Take(pdu.BHSLen))
	h := pdu.BHS(c.head[:])
	c.win.Inside = true
	if n := h.TotalAHSLength(); n > 0 {
		return false, fmt.Errorf("the target sent %d bytes of additional header segments, which no PDU of a target has", n)
	}
	if c.params.HeaderDigest {
		if binary.LittleEndian.Uint32(c.win.Take(digestLen)) != crc32c.Checksum(h) {
			return false, errors.New("a header digest of the target is wrong")
		}
	}
	size := h.DataSegmentLength()
	if size > c.limit {
		return false, fmt.Errorf("the target sent a %v with %d bytes of data: the initiator declared a limit of %d", h.Opcode(), size, c.limit)
	}
	var to []byte
	var st *tcpState
	skip := false
	if op := h.Opcode(); op == pdu.DataIn && c.find != nil {
		var err error
		if st, to, err = c.place(h, size); err != nil {
			return false, err
		}
		skip = c.sink != nil && st.cmd.c.SkipCopy && !c.params.DataDigest
	} else {
		if cap(c.data) < size {
			c.data = make([]byte, size)
		}
		to = c.data[:size]
	}
	if err := c.body(to, skip); err != nil {
		return false, c.reason(err)
	}
	if st != nil {
		st.came += size
		*p = PDU{BHS: h}
		return h.Flags()&pdu.FlagS != 0, nil
	}
	if h.Opcode() == pdu.R2T && c.find != nil {
		return false, c.answerR2T(h)
	}
	*p = PDU{BHS: h, Data: to}
	return true, nil
}

// body reads a data segment with its padding and digest. With skip, the data need not come to to.
func (c *tcpCarrier) body(to []byte, skip bool) error {
	if len(to) == 0 {
		return nil
	}
	c.win.Thin = len(to) >= llp.LongData
	var err error
	if skip && c.win.Thin {
		err = c.win.Drop(len(to), c.sink.Drop)
	} else {
		_, err = io.ReadFull(&c.win, to)
	}
	if err != nil {
		return err
	}
	pad := pdu.Padded(len(to)) - len(to)
	n := pad
	if c.params.DataDigest {
		n += digestLen
	}
	if n == 0 {
		return nil
	}
	if err := c.win.Fill(n); err != nil {
		return err
	}
	tail := c.win.Take(n)
	if c.params.DataDigest {
		crc := crc32c.Update(crc32c.Checksum(to), tail[:pad])
		if binary.LittleEndian.Uint32(tail[pad:]) != crc {
			return errors.New("a data digest of the target is wrong")
		}
	}
	return nil
}

// reason returns why the connection has ended.
func (c *tcpCarrier) reason(err error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.err != nil:
		return c.err
	case err == io.EOF:
		return fmt.Errorf("the target closed the connection: %w", io.ErrUnexpectedEOF)
	}
	return err
}

// place returns where the data of a Data-In belongs.
func (c *tcpCarrier) place(h pdu.BHS, size int) (*tcpState, []byte, error) {
	cmd := c.find(h.ITT())
	if cmd == nil {
		return nil, nil, fmt.Errorf("Data-In of task %#x, which is not in progress", h.ITT())
	}
	st, ok := cmd.State.(*tcpState)
	if !ok || st.carrier != c {
		return nil, nil, fmt.Errorf("Data-In of task %#x, which is in progress on another connection", h.ITT())
	}
	off := uint64(h.BufferOffset())
	if off != uint64(st.came) || off+uint64(size) > uint64(len(cmd.In)) {
		return nil, nil, fmt.Errorf("Data-In of task %#x: %d bytes at offset %d, where %d of %d bytes came before", h.ITT(), size, off,
			st.came, len(cmd.In))
	}
	return st, cmd.In[off:][:size], nil
}

// answerR2T queues the data that an R2T asks for.
func (c *tcpCarrier) answerR2T(h pdu.BHS) error {
	cmd := c.find(h.ITT())
	if cmd == nil {
		return fmt.Errorf("R2T of task %#x, which is not in progress", h.ITT())
	}
	st, ok := cmd.State.(*tcpState)
	if !ok || st.carrier != c {
		return fmt.Errorf("R2T of task %#x, which is in progress on another connection", h.ITT())
	}
	off, n := uint64(h.BufferOffset()), uint64(h.DesiredDataTransferLength())
	if n == 0 || n > uint64(c.params.MaxBurstLength) || off+n > uint64(len(cmd.Out)) {
		return fmt.Errorf("R2T of task %#x: %d bytes at offset %d of %d, with MaxBurstLength %d", h.ITT(), n, off, len(cmd.Out),
			c.params.MaxBurstLength)
	}
	if h.R2TSN() != st.r2tsn {
		return fmt.Errorf("R2T of task %#x has R2TSN %d where %d is due", h.ITT(), h.R2TSN(), st.r2tsn)
	}
	if off != st.asked {
		return fmt.Errorf("R2T of task %#x: %d bytes at offset %d, where offset %d is due", h.ITT(), n, off, st.asked)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	it := &st.out[st.r2tsn%2]
	if it.busy {
		return fmt.Errorf("R2T of task %#x before the data of the one before was sent: MaxOutstandingR2T is 1", h.ITT())
	}
	st.r2tsn++
	st.asked += n
	o := pdu.BHS(it.bhs[:])
	o.Reset(pdu.DataOut, 0)
	o.SetLUN(h.LUN())
	o.SetITT(h.ITT())
	o.SetTTT(h.TTT())
	o.SetExpStatSN(cmd.BHS().ExpStatSN())
	o.SetBufferOffset(uint32(off))
	it.isBurst, it.data = true, cmd.Out[off:][:n]
	cmd.Hold()
	c.append(it)
	cmd.conn.wake()
	return nil
}
