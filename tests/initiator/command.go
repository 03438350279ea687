package initiator

import (
	"encoding/binary"
	"fmt"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
)

// A Command is a SCSI command and its result. It can be used again when it is
// done; then it allocates nothing.
type Command struct {
	LUN byte // peripheral device addressing
	CDB [16]byte
	In  []byte // memory for data-in
	Out []byte // data-out
	// EDTL is the expected data transfer length; default len(In) or len(Out).
	EDTL    uint32
	Ordered bool // the ORDERED attribute instead of SIMPLE
	// Immediate is how many bytes of Out go with the command.
	Immediate int

	Status      byte
	Flags       byte // of the SCSI Response: FlagOverflow and others
	Residual    uint32
	Sense       []byte
	Invalidated bool // the response was a Send with Invalidate
	Err         error

	itt    uint32
	head   [iser.HeaderLen + 48]byte
	wr     rdma.WorkRequest
	region rdma.Region
	done   chan struct{}
	sent   chan struct{} // wr is ours again, which may be later than the answer to it
	sense  [252]byte
}

// Do runs c and waits for its end. Err is also returned.
func (s *Session) Do(c *Command) error {
	if err := s.Start(c); err != nil {
		return err
	}
	return c.Wait()
}

// Wait waits for the end of a command that was started.
func (c *Command) Wait() error {
	<-c.done
	<-c.sent
	return c.Err
}

// WorkDone implements rdma.Completer.
func (c *Command) WorkDone(*rdma.WorkRequest, error) { c.sent <- struct{}{} }

// Start sends c when the command window allows it.
func (s *Session) Start(c *Command) error {
	if c.done == nil {
		c.done, c.sent = make(chan struct{}, 1), make(chan struct{}, 1)
	}
	c.Status, c.Flags, c.Residual, c.Sense, c.Invalidated, c.Err = 0, 0, 0, nil, false, nil
	if c.Immediate > s.maxSend {
		return fmt.Errorf("%d bytes of immediate data, the target takes %d", c.Immediate, s.maxSend)
	}
	bhs := pdu.BHS(c.head[iser.HeaderLen:])
	edtl := c.EDTL
	if edtl == 0 {
		edtl = uint32(len(c.In) + len(c.Out))
	}
	flags := byte(pdu.FlagF | pdu.AttrSimple)
	if c.Ordered {
		flags = pdu.FlagF | pdu.AttrOrdered
	}
	var h iser.Header
	switch {
	case len(c.In) > 0:
		flags |= pdu.FlagR
		h.Read = iser.Remote{Valid: true, STag: s.rc.Register(&c.region, c.In, s.o.BaseOffset, rdma.RemoteWrite),
			Base: s.o.BaseOffset}
	case len(c.Out) > 0:
		flags |= pdu.FlagW
		if rest := c.Out[c.Immediate:]; len(rest) > 0 {
			if !s.o.solicitedOnly() {
				rest = c.Out
			}
			h.Write = iser.Remote{Valid: true, STag: s.rc.Register(&c.region, rest, s.o.BaseOffset, rdma.RemoteRead),
				Base: s.o.BaseOffset}
		}
	}
	h.Put(c.head[:])
	bhs.Reset(pdu.SCSICommand, flags)
	bhs.SetLUN([8]byte{1: c.LUN})
	bhs.SetEDTL(edtl)
	bhs.SetCDB(c.CDB[:])
	bhs.SetDataSegmentLength(c.Immediate)

	s.mu.Lock()
	for !s.ended && pdu.Before(s.maxCmdSN, s.cmdSN) {
		s.room.Wait()
	}
	if s.ended {
		s.mu.Unlock()
		s.release(c)
		return s.Err()
	}
	s.itt++
	c.itt = s.itt
	bhs.SetITT(c.itt)
	bhs.SetCmdSN(s.cmdSN)
	bhs.SetExpStatSN(s.statSN)
	s.cmdSN++
	s.cmds[c.itt] = c
	c.wr = rdma.WorkRequest{Op: rdma.Send, Head: c.head[:], Data: c.Out[:c.Immediate], Done: c}
	err := s.rc.Post(&c.wr)
	if err != nil {
		delete(s.cmds, c.itt)
	}
	s.mu.Unlock()
	if err != nil {
		s.release(c)
		return err
	}
	s.rc.Flush()
	return nil
}

// ITT returns the tag of a command that was started.
func (c *Command) ITT() uint32 { return c.itt }

func (s *Session) release(c *Command) {
	if len(c.In) > 0 || len(c.Out) > c.Immediate {
		s.rc.Deregister(&c.region)
	}
}

func (c *Command) finish(s *Session, err error) {
	s.release(c)
	c.Err = err
	c.done <- struct{}{}
}

// response takes the SCSI Response of c.
func (c *Command) response(s *Session, bhs pdu.BHS, data []byte, ev *rdma.Event) error {
	c.Status, c.Flags, c.Residual = bhs.Status(), bhs.Flags(), bhs.Residual()
	if n := bhs.DataSegmentLength(); n > 0 {
		if n > len(data) || n < 2 {
			return fmt.Errorf("SCSI Response announces %d bytes of data and has %d", n, len(data))
		}
		c.Sense = append(c.sense[:0], data[2:2+int(binary.BigEndian.Uint16(data))]...)
	}
	if ev.Invalidates {
		c.Invalidated = true
		if ev.Invalidated != c.region.STag() {
			return fmt.Errorf("the response invalidated STag %#x, the command's is %#x", ev.Invalidated,
				c.region.STag())
		}
	}
	c.finish(s, nil)
	return nil
}
