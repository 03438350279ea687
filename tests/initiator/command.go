package initiator

import (
	"encoding/binary"
	"fmt"

	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/pdu"
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

	carried initiator.Command // that the Carrier knows
	sense   [252]byte
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
	<-c.carried.Done
	return c.Err
}

// Start sends c when the command window allows it.
func (s *Session) Start(c *Command) error {
	k := &c.carried
	if k.Done == nil {
		k.Done = make(chan *initiator.Command, 1)
	}
	c.Status, c.Flags, c.Residual, c.Sense, c.Invalidated, c.Err = 0, 0, 0, nil, false, nil
	if c.Immediate > s.maxSend {
		return fmt.Errorf("%d bytes of immediate data, the target takes %d", c.Immediate, s.maxSend)
	}
	k.In, k.Out, k.Immediate = c.In, c.Out, c.Immediate
	if c.Immediate == 0 {
		k.Immediate = -1
	}
	edtl := c.EDTL
	if edtl == 0 {
		edtl = uint32(len(c.In) + len(c.Out))
	}
	flags := byte(pdu.FlagF | pdu.AttrSimple)
	if c.Ordered {
		flags = pdu.FlagF | pdu.AttrOrdered
	}
	switch {
	case len(c.In) > 0:
		flags |= pdu.FlagR
	case len(c.Out) > 0:
		flags |= pdu.FlagW
	}
	bhs := k.BHS()
	bhs.Reset(pdu.SCSICommand, flags)
	bhs.SetLUN([8]byte{1: c.LUN})
	bhs.SetEDTL(edtl)
	bhs.SetCDB(c.CDB[:])

	s.mu.Lock()
	for !s.ended && pdu.Before(s.maxCmdSN, s.cmdSN) {
		s.room.Wait()
	}
	if s.ended {
		s.mu.Unlock()
		return s.Err()
	}
	s.itt++
	itt := s.itt
	bhs.SetITT(itt)
	bhs.SetCmdSN(s.cmdSN)
	bhs.SetExpStatSN(s.statSN)
	s.cmdSN++
	s.cmds[itt] = c
	k.Hold() // until the answer
	err := s.carrier.PostCommand(k)
	if err != nil {
		delete(s.cmds, itt)
		k.Unhold()
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	s.carrier.Flush()
	return nil
}

// ITT returns the tag of a command that was started.
func (c *Command) ITT() uint32 { return c.carried.BHS().ITT() }

func (c *Command) finish(s *Session, err error) {
	c.Err = err
	s.carrier.End(&c.carried)
	c.carried.Release()
}

// response takes the SCSI Response of c.
func (c *Command) response(s *Session, p *initiator.PDU) error {
	c.Status, c.Flags, c.Residual = p.BHS.Status(), p.BHS.Flags(), p.BHS.Residual()
	if n := len(p.Data); n > 0 {
		var sense int
		if n >= 2 {
			sense = int(binary.BigEndian.Uint16(p.Data))
		}
		if n < 2 || sense > n-2 {
			err := fmt.Errorf("SCSI Response with %d bytes of data, of which %d are sense data", n, sense)
			c.finish(s, err)
			return err
		}
		c.Sense = append(c.sense[:0], p.Data[2:][:sense]...)
	}
	c.Invalidated = s.carrier.Message().Invalidates
	c.finish(s, nil)
	return nil
}
