package tcp

import (
	"bytes"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// The target asks an initiator that acknowledges nothing to do so. Its commands run anyway, in limited memory. A
// SNACK cannot ask for answers and data that were discarded for that (ISCSI-11.16-3, ISCSI-11.4-11,
// ISCSI-11.19-2).
func TestNothingIsAcknowledged(t *testing.T) {
	const memory, depth = 4 << 20, 4
	for _, tt := range []struct {
		name  string
		count int
		cmd   func(c *client) pdu.BHS
	}{
		{"memory", 6, func(c *client) pdu.BHS { return c.scsi(pdu.FlagR, cdb.Read16(0, 2048), 1<<20) }},
		{"window", 2*depth + 1, func(c *client) pdu.BHS { return c.scsi(0, cdb.TestUnitReady, 0) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tg := startTarget(t, level1, hasty,
				func(_ *target, o *iscsi.Options) { o.ConnectionMemory, o.QueueDepth = memory, depth })
			c := tg.login1(t, "MaxRecvDataSegmentLength=262144")
			pings := 0
			for range tt.count {
				for pdu.Before(c.maxCmdSN, c.CmdSN) { // the window is closed
					pings += c.unasked(c.any())
				}
				h := tt.cmd(c)
				c.send(h, nil)
				for {
					p := c.any()
					if p.h.Opcode() == pdu.SCSIResponse {
						if p.h.Status() != 0 || p.h.ITT() != h.ITT() {
							t.Fatalf("%x", []byte(p.h))
						}
						break
					}
					if p.h.Opcode() != pdu.DataIn {
						pings += c.unasked(p)
					}
				}
				if s := tg.node.Stats(); s.BufferOctets > memory || s.TasksInFlight > 3*depth+2 {
					t.Fatalf("%+v", s)
				}
			}
			if pings == 0 {
				t.Error("the target did not ask for an acknowledgement")
			}
			h := c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, c.ExpStatSN, 1)
			p := c.any()
			for ; p.h.Opcode() == pdu.NOPIn; p = c.any() {
			}
			c.isReject(p, pdu.RejectSNACK, h)
		})
	}
}

// An initiator sends nothing except answers to pings, which acknowledge data. That is enough for READs of more
// data than the target has memory (ISCSI-11.18-3).
func TestPingsAcknowledge(t *testing.T) {
	const reads, size = 12, 1 << 20
	tg := startTarget(t, level1, func(_ *target, o *iscsi.Options) { o.ConnectionMemory = 4 << 20 })
	c := tg.login1(t, "MaxRecvDataSegmentLength=262144")
	for range reads {
		c.send(c.scsi(pdu.FlagR, cdb.Read16(0, uint32(size/blockLen)), size), nil)
	}
	pongs := 0
	for done := 0; done < reads; {
		p := c.any()
		switch {
		case p.h.Opcode() == pdu.SCSIResponse && p.h.Status() == 0:
			done++
		case p.h.Opcode() == pdu.NOPIn && c.unasked(p) > 0:
			pongs++
			h := make(pdu.BHS, pdu.BHSLen)
			h.Reset(pdu.NOPOut, pdu.FlagF)
			h.SetImmediate()
			h.SetITT(pdu.ReservedTag)
			h.SetTTT(p.h.TTT())
			h.SetCmdSN(c.CmdSN)
			h.SetExpStatSN(c.statSN)
			c.ExpStatSN = c.statSN
			c.send(h, nil)
		case p.h.Opcode() != pdu.DataIn && p.h.Opcode() != pdu.NOPIn:
			t.Fatalf("%x", []byte(p.h))
		}
		if n := tg.node.Stats().BufferOctets; n > 4<<20 {
			t.Fatalf("%d bytes", n)
		}
	}
	if pongs == 0 {
		t.Error("the target did not ask for an acknowledgement")
	}
}

// The target answers more immediate requests than it has slots, although none is acknowledged.
func TestManyImmediateRequests(t *testing.T) {
	tg := startTarget(t, level1, func(_ *target, o *iscsi.Options) { o.QueueDepth = 4 })
	c := tg.login1(t)
	for range 300 {
		c.ping()
	}
	if n := tg.node.Stats().TasksInFlight; n > 60 {
		t.Errorf("%d slots in use", n)
	}
	h := c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, c.ExpStatSN, 0)
	c.wantReject(pdu.RejectSNACK, h)
	last := c.ping()
	c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, last.h.StatSN(), 0)
	c.sameAgain(last)
}

// The target keeps at most 1 MiB of long answers.
func TestManyLongPings(t *testing.T) {
	tg := startTarget(t, level1)
	c := tg.login1(t, "MaxRecvDataSegmentLength=65536")
	data := random(65536)
	var pings []reply
	for range 40 {
		c.send(c.nopOut(), data)
		pings = append(pings, c.want(pdu.NOPIn))
	}
	c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, pings[28].h.StatSN(), 0)
	for _, p := range pings[28:] {
		c.sameAgain(p)
	}
	c.wantReject(pdu.RejectSNACK, c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, pings[20].h.StatSN(), 1))
}

// unasked checks that p is a NOP-In without a request, and returns how many answers it asks for.
func (c *client) unasked(p reply) int {
	c.tb.Helper()
	if p.h.Opcode() != pdu.NOPIn || p.h.ITT() != pdu.ReservedTag {
		c.tb.Fatalf("%x", []byte(p.h))
	}
	if p.h.TTT() == pdu.ReservedTag {
		return 0
	}
	return 1
}

// ISCSI-11.16-3: a SNACK for data that the target no longer keeps is rejected, and its command, which is still
// running, fails.
func TestDataGivenUp(t *testing.T) {
	tg := startTarget(t, level1, hasty, func(_ *target, o *iscsi.Options) { o.ConnectionMemory = 1 << 20 })
	c := tg.login1(t, "MaxRecvDataSegmentLength=262144", "MaxBurstLength=16776192")
	const size = 2 << 20
	h := c.scsi(pdu.FlagR, cdb.Read16(0, uint32(size/blockLen)), size)
	gate := tg.store.ShutFrom(1<<20, backendtest.ReadAt)
	c.send(h, nil)
	for off := 0; off < 1<<20; {
		p := c.any()
		if p.h.Opcode() == pdu.DataIn {
			if off += len(p.data); p.h.Flags()&pdu.FlagA != 0 && off < 1<<20 {
				t.Errorf("A bit after %d bytes", off)
			}
		}
	}
	<-gate.Entered // it uses the memory of the discarded data
	s := c.snack(pdu.SNACKData, h.ITT(), pdu.ReservedTag, 0, 1)
	for {
		p := c.any()
		if p.h.Opcode() == pdu.NOPIn {
			continue
		}
		c.isReject(p, pdu.RejectSNACK, s)
		break
	}
	gate.Open()
	for {
		p := c.any()
		if p.h.Opcode() == pdu.SCSIResponse {
			c.wantSense(p, 0x0b, 0x11, 0x13)
			break
		}
		if p.h.Opcode() != pdu.DataIn && p.h.Opcode() != pdu.NOPIn {
			t.Fatalf("%x", []byte(p.h))
		}
	}
}

// A READ needs more memory than the target has. Acknowledgements of data let it continue, and the target discards
// nothing else: a SNACK can always ask for data that was not acknowledged.
func TestDataACK(t *testing.T) {
	tg := startTarget(t, level1, func(_ *target, o *iscsi.Options) { o.ConnectionMemory = 2 << 20 })
	c := tg.login1(t, "MaxRecvDataSegmentLength=262144", "MaxBurstLength=262144")
	const size = 12 << 20
	h := c.scsi(pdu.FlagR, cdb.Read16(0, uint32(size/blockLen)), size)
	c.send(h, nil)
	var got []byte
	next, copies, acks := uint32(0), 0, 0
	asked := false
	var last reply // with the A bit
	for {
		p := c.again()
		if p.h.Opcode() == pdu.NOPIn {
			continue
		}
		if p.h.Opcode() == pdu.SCSIResponse && p.h.Status() == 0 {
			break
		}
		if p.h.Opcode() != pdu.DataIn {
			t.Fatalf("%x", []byte(p.h))
		}
		if p.h.DataSN() < next { // the copy: all data has come
			c.snack(pdu.SNACKDataACK, pdu.ReservedTag, last.h.TTT(), last.h.DataSN()+1, 0)
			asked = false
			copies++
			continue
		}
		next = p.h.DataSN() + 1
		got = append(got, p.data...)
		if p.h.Flags()&pdu.FlagA != 0 {
			acks++
			last = p
			if !asked {
				asked = true
				c.snack(pdu.SNACKData, h.ITT(), pdu.ReservedTag, p.h.DataSN(), 1)
			}
		}
	}
	if acks != size>>18 || copies == 0 || !bytes.Equal(got, tg.stored(0, size)) {
		t.Errorf("%d A bits, %d copies", acks, copies)
	}
}
