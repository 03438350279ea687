package tcp

import (
	"bytes"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// recovering returns a session at ErrorRecoveryLevel 2 with two connections.
func recovering(t *testing.T, keys ...string) (tg *target, a, b *client) {
	t.Helper()
	tg = startTarget(t,
		func(_ *target, o *iscsi.Options) { o.Limits.MaxConnections, o.Limits.ErrorRecoveryLevel = 4, 2 })
	a = tg.login(t,
		append(keys, "MaxConnections=4", "ErrorRecoveryLevel=2", "MaxBurstLength=16384", "FirstBurstLength=4096")...)
	b = tg.connect(t)
	b.isid, b.tsih, b.cid, b.CmdSN, b.ITT = a.isid, a.tsih, 1, a.CmdSN, 0x9000
	b.login("HeaderDigest=CRC32C", "DataDigest=CRC32C", "MaxRecvDataSegmentLength=4096")
	return tg, a, b
}

// immediate returns an immediate request with a new tag.
func (c *client) immediate(op pdu.Opcode, flags byte) pdu.BHS {
	return c.Request(op, pdu.FlagF|flags, true)
}

// past returns the next PDU that is not an Asynchronous Message. Such a message about a lost connection can
// come at any time.
func (c *client) past() reply {
	c.tb.Helper()
	for {
		if p := c.any(); p.h.Opcode() != pdu.AsyncMessage {
			return p
		}
	}
}

// recover closes lost, logs it out for recovery and reassigns the task of h.
func (c *client) recover(lost *client, h pdu.BHS, expStatSN, expDataSN uint32) {
	c.tb.Helper()
	c.logOut(lost, expStatSN)
	f := c.immediate(pdu.TaskMgmtReq, pdu.TaskReassign)
	f.SetReferencedTaskTag(h.ITT())
	f.SetExpDataSN(expDataSN)
	c.send(f, nil)
	if p := c.past(); p.h.Opcode() != pdu.TaskMgmtResp || p.h.Response() != pdu.FunctionComplete {
		c.tb.Fatalf("%x", []byte(p.h))
	}
}

// logOut closes lost and logs it out for recovery.
func (c *client) logOut(lost *client, expStatSN uint32) {
	c.tb.Helper()
	lost.nc.Close()
	c.CmdSN = lost.CmdSN
	l := c.immediate(pdu.LogoutReq, pdu.LogoutForRecovery)
	l.SetCID(lost.cid)
	l.SetExpStatSN(expStatSN)
	c.send(l, nil)
	if p := c.past(); p.h.Opcode() != pdu.LogoutResp || p.h.Response() != pdu.LogoutSuccess {
		c.tb.Fatalf("%x", []byte(p.h))
	}
}

// ISCSI-7.2.2-2: after a READ is reassigned, the target sends the data that was not acknowledged, in PDUs of
// the length for the new connection and with DataSNs that continue, and the status.
func TestReassignRead(t *testing.T) {
	for _, c := range []struct {
		name      string
		expDataSN uint32
		from      uint32 // first DataSN
	}{{"from DataSN 3", 3, 3}, {"all", 0, 0}, {"ExpDataSN beyond", 9, 0}, {"nothing", 8, 8}} {
		t.Run(c.name, func(t *testing.T) {
			_, a, b := recovering(t)
			data := make([]byte, 64<<10)
			for i := range data {
				data[i] = byte(i*3 + i>>8)
			}
			a.writeAll(0, data, 0, 4096, 16384)
			h := a.scsi(pdu.FlagR, cdb.Read16(0, 128), len(data))
			a.send(h, nil)
			expStatSN := a.statSN
			for i := range 8 { // of 8192 bytes
				if p := a.any(); p.h.Opcode() != pdu.DataIn || p.h.DataSN() != uint32(i) {
					t.Fatalf("%x", []byte(p.h))
				}
			}
			a.want(pdu.SCSIResponse)
			b.recover(a, h, expStatSN, c.expDataSN)
			got := data[: c.from*8192 : c.from*8192]
			sn := c.from
			for {
				p := b.past()
				if p.h.Opcode() == pdu.SCSIResponse {
					if p.h.ITT() != h.ITT() || p.h.Status() != 0 || p.h.ExpDataSN() != sn || p.h.Flags() != pdu.FlagF {
						t.Errorf("%x, want ExpDataSN %d", []byte(p.h), sn)
					}
					break
				}
				if p.h.Opcode() != pdu.DataIn || p.h.ITT() != h.ITT() || p.h.DataSN() != sn ||
					int(p.h.BufferOffset()) != len(got) {
					t.Fatalf("%x, want DataSN %d and offset %d", []byte(p.h), sn, len(got))
				}
				got = append(got, p.data...)
				sn++
			}
			if !bytes.Equal(got, data) {
				t.Error("wrong data")
			}
			if want := c.from + (64<<10-c.from*8192)/4096; sn != want {
				t.Errorf("DataSN %d, want %d", sn, want)
			}
		})
	}
}

// RFC 7143, section 11.5.1: of an aborted READ the target repeats only the status, with its ExpDataSN.
func TestAbortAnswered(t *testing.T) {
	_, a, b := recovering(t)
	h := a.scsi(pdu.FlagR, cdb.Read16(0, 128), 64<<10)
	a.send(h, nil)
	expStatSN := a.statSN
	for range 8 {
		a.any()
	}
	sent := a.want(pdu.SCSIResponse)
	b.logOut(a, expStatSN)
	f := b.immediate(pdu.TaskMgmtReq, pdu.AbortTask)
	f.SetReferencedTaskTag(h.ITT())
	f.SetRefCmdSN(h.CmdSN())
	b.send(f, nil)
	if p := b.past(); p.h.Opcode() != pdu.SCSIResponse || p.h.ITT() != h.ITT() || p.h.Status() != 0 ||
		p.h.ExpDataSN() != 8 || p.h.ExpDataSN() != sent.h.ExpDataSN() {
		t.Errorf("%x, sent was %x", []byte(p.h), []byte(sent.h))
	}
	if p := b.past(); p.h.Opcode() != pdu.TaskMgmtResp || p.h.Response() != pdu.FunctionComplete {
		t.Errorf("%x", []byte(p.h))
	}
}

// ISCSI-7.2.2-2: after a WRITE is reassigned, R2Ts ask for all data that is not on the medium, with R2TSNs that
// continue.
func TestReassignWrite(t *testing.T) {
	tg, a, b := recovering(t)
	data := make([]byte, 64<<10)
	for i := range data {
		data[i] = byte(i*5 + i>>8)
	}
	h := a.scsi(pdu.FlagW, cdb.Write16(64, 128), len(data))
	a.send(h, data[:4096])
	r2t := a.want(pdu.R2T)
	a.answer(h, r2t.h, data, 4096)
	r2t = a.want(pdu.R2T)
	if r2t.h.R2TSN() != 1 {
		t.Fatalf("%x", []byte(r2t.h))
	}
	a.write(a.encode(dataOut(h.ITT(), r2t.h, 0, r2t.h.BufferOffset(), false), nil,
		data[r2t.h.BufferOffset():][:4096])) // part of it
	b.recover(a, h, a.statSN, 0)
	off := 4096
	for sn := uint32(2); off < len(data); sn++ {
		p := b.past()
		if p.h.Opcode() != pdu.R2T || p.h.ITT() != h.ITT() || p.h.R2TSN() != sn || int(p.h.BufferOffset()) != off {
			t.Fatalf("%x, want R2TSN %d and offset %d", []byte(p.h), sn, off)
		}
		b.answer(h, p.h, data, 4096)
		off += int(p.h.DesiredDataTransferLength())
	}
	if p := b.past(); p.h.Opcode() != pdu.SCSIResponse || p.h.ITT() != h.ITT() || p.h.Status() != 0 {
		t.Fatalf("%x", []byte(p.h))
	}
	if !bytes.Equal(tg.stored(64, len(data)), data) {
		t.Error("wrong data")
	}
}
