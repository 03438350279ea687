package initiator

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/iser-target/iser-target/iscsi/pdu"
)

// MaxLUN is the highest LUN that a Command can address: that of flat space addressing (SAM-5, section 4.7.7.2).
const MaxLUN = 16383

// MaxTransfer limits the data of a Command, in bytes. Immediate data and lengths of DDP segments are far below.
const MaxTransfer = 1 << 30

// A Command is a SCSI command and its result. From Start until it comes back, it and its memory belong to the Session. Then
// it can be started again.
type Command struct {
	LUN int // 0 to MaxLUN
	CDB [pdu.CDBLen]byte
	In  []byte // memory for data-in; not together with Out
	Out []byte // data-out
	// Attr is the task attribute; default pdu.AttrSimple.
	Attr byte
	// Immediate is how many bytes of Out go with the command at most. 0: as many as the login has agreed on. Negative: none.
	Immediate int
	// SkipCopy says that nobody reads the data-in. Over TCP, what has not been read from the socket when its header is seen is
	// dropped in the kernel (MSG_TRUNC; tcp(7)): it counts, but In does not get it. A data digest, and iSER, require the data.
	SkipCopy bool
	// Done receives the command when it has ended. It must have room. Do does not use it.
	Done chan *Command
	// Tag is for the caller.
	Tag any

	// The result. With an error, the other fields are not valid.
	Err    error
	Status byte   // SCSI status
	Sense  []byte // sense data; valid until the next Start
	// Residual is the number of bytes of In or Out that were not transferred; negative: that the target had more.
	Residual int64

	// State belongs to the Carrier.
	State any

	conn  *conn
	itt   uint32
	head  [pdu.BHSLen]byte
	holds atomic.Int32 // uses of the memory, and one until the answer
	sense [252]byte
	reply chan *Command // Done, or own
	own   chan *Command // of Do
}

// BHS returns the header of the command. It belongs to the Carrier from PostCommand on.
func (c *Command) BHS() pdu.BHS { return c.head[:] }

// ITT returns the tag of the command since its latest Start.
func (c *Command) ITT() uint32 { return c.itt }

// Hold notes that a Carrier uses the command or its memory.
func (c *Command) Hold() { c.holds.Add(1) }

// Release takes one Hold back. With the last one the command goes back to its caller, through Done if no Session has started it.
func (c *Command) Release() {
	switch n := c.holds.Add(-1); {
	case n == 0 && c.reply == nil:
		c.Done <- c
	case n == 0:
		c.reply <- c
	case n < 0:
		panic("initiator: a command is released twice")
	}
}

// Unhold takes a Hold back within PostCommand, before an error.
func (c *Command) Unhold() { c.holds.Add(-1) }

// ImmediateLength returns how many bytes of Out go with the command on a connection with those Params.
func (c *Command) ImmediateLength(p *Params) int {
	switch {
	case !p.ImmediateData || c.Immediate < 0:
		return 0
	case c.Immediate == 0:
		return min(len(c.Out), p.FirstBurstLength, p.MaxSendSegment)
	}
	return min(len(c.Out), p.FirstBurstLength, p.MaxSendSegment, c.Immediate)
}

// prepare fills the header, except what depends on the connection.
func (c *Command) prepare() error {
	switch {
	case c.LUN < 0 || c.LUN > MaxLUN:
		return fmt.Errorf("LUN %d: it can be 0 to %d", c.LUN, MaxLUN)
	case len(c.In) > 0 && len(c.Out) > 0:
		return errors.New("bidirectional commands are not supported")
	case len(c.In) > MaxTransfer || len(c.Out) > MaxTransfer:
		return fmt.Errorf("%d bytes of data: a command can transfer up to %d", max(len(c.In), len(c.Out)), MaxTransfer)
	case c.Attr > pdu.AttrACA:
		return fmt.Errorf("task attribute %d: it can be 0 to %d", c.Attr, pdu.AttrACA)
	}
	c.Err, c.Status, c.Sense, c.Residual = nil, 0, nil, 0
	flags := byte(pdu.FlagF) | c.Attr
	if c.Attr == 0 {
		flags |= pdu.AttrSimple
	}
	if len(c.In) > 0 {
		flags |= pdu.FlagR
	}
	if len(c.Out) > 0 {
		flags |= pdu.FlagW
	}
	h := c.BHS()
	h.Reset(pdu.SCSICommand, flags)
	h.SetLUN(EncodeLUN(c.LUN))
	h.SetEDTL(uint32(len(c.In) + len(c.Out)))
	h.SetCDB(c.CDB[:])
	return nil
}

// EncodeLUN returns a LUN as SAM-5 encodes it: peripheral device addressing up to 255, then flat space addressing.
func EncodeLUN(n int) (l [8]byte) {
	l[0], l[1] = byte(n>>8), byte(n)
	if n > 255 {
		l[0] |= 0x40
	}
	return l
}

// answer takes the status of c from its SCSI Response, or from the last Data-In.
func (c *Command) answer(p *PDU) error {
	h := p.BHS
	c.Status = h.Status()
	if f := h.Flags(); f&pdu.FlagUnderflow != 0 {
		c.Residual = int64(h.Residual())
	} else if f&pdu.FlagOverflow != 0 {
		c.Residual = -int64(h.Residual())
	}
	if h.Opcode() == pdu.DataIn {
		return nil
	}
	if c.Residual > int64(len(c.In)+len(c.Out)) {
		return fmt.Errorf("SCSI Response of task %#x: %d bytes are missing of %d", h.ITT(), c.Residual, len(c.In)+len(c.Out))
	}
	if r := h.Response(); r != pdu.CommandCompleted {
		c.Err = &ResponseError{Response: r}
	}
	if n := len(p.Data); n >= 2 {
		s := int(binary.BigEndian.Uint16(p.Data))
		if s > n-2 {
			return fmt.Errorf("SCSI Response of task %#x: %d bytes of sense data in a data segment of %d", h.ITT(), s, n)
		}
		c.Sense = append(c.sense[:0], p.Data[2:2+min(s, len(c.sense))]...)
	}
	return nil
}

// Check returns the error of a command that has ended: Err, or a *StatusError unless the status is GOOD.
func (c *Command) Check() error {
	if c.Err != nil {
		return c.Err
	}
	if c.Status != 0 {
		return &StatusError{Operation: c.CDB[0], Status: c.Status, Sense: ParseSense(c.Sense)}
	}
	return nil
}

// A ResponseError is a response code other than "command completed at target" (RFC 7143, section 11.4.3).
type ResponseError struct{ Response byte }

// Error implements error.
func (e *ResponseError) Error() string {
	if e.Response == pdu.TargetFailure {
		return "the target failed to execute the command (response 0x01)"
	}
	return fmt.Sprintf("the target answered with response %#02x", e.Response)
}

// Do runs c and waits until it has ended. It returns what Check returns. If ctx ends before, Do aborts the command by ABORT
// TASK (RFC 7143, section 11.5.1), or ends the session if the target does not answer that, and returns the error of ctx. In both cases it
// returns within 5 s, and c can be used again.
func (s *Session) Do(ctx context.Context, c *Command) error {
	if c.own == nil {
		c.own = make(chan *Command, 1)
	}
	if err := s.queue(ctx, c, c.own); err != nil {
		return err
	}
	s.flush(ctx)
	select {
	case <-c.own:
		return c.Check()
	case <-ctx.Done():
		s.abort(c)
		<-c.own
		if c.Err == nil && c.Status == 0 {
			return nil // it has ended meanwhile
		}
		return context.Cause(ctx)
	}
}

// Start sends c, when the window of the target and QueueDepth have room for it. The command comes back through Done. After
// an error it does not. ctx limits only how long Start waits: it does not end the command.
func (s *Session) Start(ctx context.Context, c *Command) error {
	err := s.Queue(ctx, c)
	s.flush(ctx)
	return err
}

// flush does what Flush does. If the target takes nothing for abortTime after the end of ctx, the session ends.
func (s *Session) flush(ctx context.Context) {
	if ctx.Done() == nil {
		s.Flush()
		return
	}
	var flushed atomic.Bool
	stop := context.AfterFunc(ctx, func() {
		time.AfterFunc(abortTime, func() {
			if !flushed.Load() {
				s.fail(fmt.Errorf("the target takes no data: %w", context.Cause(ctx)))
			}
		})
	})
	s.Flush()
	flushed.Store(true)
	stop()
}

// Queue does what Start does, but does not send c until Flush is called, or until a Queue waits for room. It is for callers
// that start several commands at once.
func (s *Session) Queue(ctx context.Context, c *Command) error {
	if c.Done == nil {
		return errors.New("the command has no Done channel")
	}
	return s.queue(ctx, c, c.Done)
}

// queue queues c, which comes back through reply.
func (s *Session) queue(ctx context.Context, c *Command, reply chan *Command) error {
	if err := c.prepare(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.waitForRoom(ctx, true); err != nil {
		return err
	}
	n := s.conns[s.turn%uint(len(s.conns))]
	s.turn++
	i := s.free[len(s.free)-1]
	slot := &s.slots[i]
	slot.generation++
	c.conn, c.reply, c.itt = n, reply, uint32(slot.generation)<<16|uint32(i)
	h := c.BHS()
	h.SetITT(c.itt)
	h.SetCmdSN(s.cmdSN)
	h.SetExpStatSN(n.expStatSN)
	c.holds.Store(1)
	if err := n.carrier.PostCommand(c); err != nil {
		return err
	}
	n.regulated(s.cmdSN)
	s.cmdSN++
	s.free = s.free[:len(s.free)-1]
	slot.c = c
	n.unsent = true
	return nil
}

// Flush sends what Queue has queued. It may wait until the target takes it, or until the session ends.
func (s *Session) Flush() {
	for _, n := range s.conns {
		s.mu.Lock()
		unsent := n.unsent
		n.unsent = false
		s.mu.Unlock()
		if unsent {
			n.carrier.Flush()
		}
	}
}
