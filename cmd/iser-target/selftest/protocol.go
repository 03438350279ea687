package selftest

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"

	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iscsi/vectors"
	iserinitiator "github.com/iser-target/iser-target/iser/initiator"
)

var iserTransport = iserinitiator.Transport{}

// random returns n random bytes.
func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

// protocolCases returns the cases about PDUs in the full feature phase (RFC 7143, section 11).
func protocolCases() (list []testCase) {
	add := func(only, id string, run func(t *T)) {
		list = append(list, testCase{group: "iSCSI", only: only, id: id, run: run})
	}
	add("", "ISCSI-11.18-1 ISCSI-11.19-1 a ping with data", func(t *T) {
		p := t.peer()
		h, data := p.nop(), random(100)
		p.send(h, data)
		if m := p.wantFor(pdu.NOPIn, h); m.bhs.TTT() != pdu.ReservedTag || !bytes.Equal(m.data, data) {
			t.failf("the NOP-In has TTT %#x and % x, not the data of the ping", m.bhs.TTT(), m.data)
		}
	})
	add("", "ISCSI-11.18-2 a NOP-Out that asks for no answer", func(t *T) {
		p := t.peer()
		h := p.nop()
		h.SetITT(pdu.ReservedTag)
		p.send(h, nil)
		p.ping()
	})
	add("", "ISCSI-4.2.2.1-6 a command outside the window", func(t *T) {
		p := t.peer()
		h := p.command(0, 0, [16]byte{})
		h.SetCmdSN(p.cmdSN + 1<<20)
		p.send(h, nil)
		p.cmdSN--
		p.ping()
		h = p.command(0, 0, [16]byte{})
		p.send(h, nil)
		p.wantStatus(h, initiator.Good)
	})
	add("", "ISCSI-4.2.2.1-3 commands that come out of order", func(t *T) {
		p := t.peer()
		first, second := p.command(0, 0, [16]byte{}), p.command(0, 0, [16]byte{})
		p.send(second, nil)
		p.ping()
		p.send(first, nil)
		seen := map[uint32]bool{}
		for range 2 {
			m := p.want(pdu.SCSIResponse)
			seen[m.bhs.ITT()] = true
		}
		if !seen[first.ITT()] || !seen[second.ITT()] {
			t.failf("the answers are for %v", seen)
		}
	})
	for _, c := range vectors.Rejects {
		add("", c.ID, reject(c))
	}
	for _, c := range vectors.IserRejects {
		add("iser", c.ID, reject(c))
	}
	taskManagement := func(id string, function, response byte, lun func(own [8]byte) [8]byte) {
		add("", id, func(t *T) {
			p := t.peer()
			h := p.request(pdu.TaskMgmtReq, pdu.FlagF|function, true)
			own := initiator.EncodeLUN(t.o.LUN)
			if lun != nil {
				own = lun(own)
			}
			h.SetLUN(own)
			h.SetReferencedTaskTag(pdu.ReservedTag)
			if function == pdu.AbortTask {
				h.SetReferencedTaskTag(0x7fff_0001)
				h.SetRefCmdSN(p.cmdSN + 1<<20)
			}
			p.send(h, nil)
			if m := p.wantFor(pdu.TaskMgmtResp, h); m.bhs.Response() != response || len(m.data) > 0 {
				t.failf("response %d with %d bytes of data, where %d is due", m.bhs.Response(), len(m.data), response)
			}
		})
	}
	nowhere := func(own [8]byte) [8]byte { return [8]byte{0x7f, 0xfe} } // 16382 by flat space addressing
	taskManagement("ISCSI-11.6-1 ABORT TASK of an unknown task", pdu.AbortTask, pdu.TaskDoesNotExist, nil)
	taskManagement("ISCSI-11.5-1 ABORT TASK SET", pdu.AbortTaskSet, pdu.FunctionComplete, nil)
	taskManagement("ISCSI-11.5-5 LOGICAL UNIT RESET", pdu.LogicalUnitReset, pdu.FunctionComplete, nil)
	taskManagement("ISCSI-11.6-2 LOGICAL UNIT RESET of an unknown LUN", pdu.LogicalUnitReset, pdu.LUNDoesNotExist, nowhere)
	taskManagement("an unknown function", 0x7e, pdu.FunctionNotSupported, nil)
	logout := func(id string, reason byte, cid uint16, response byte) {
		add("", id, func(t *T) {
			p := t.peer()
			h := p.request(pdu.LogoutReq, pdu.FlagF|reason, true)
			h.SetCID(cid)
			p.send(h, nil)
			if m := p.wantFor(pdu.LogoutResp, h); m.bhs.Response() != response {
				t.failf("response %d, where %d is due", m.bhs.Response(), response)
			}
			if response == pdu.LogoutSuccess {
				p.wantEnd()
			} else {
				p.ping()
			}
		})
	}
	logout("ISCSI-11.14-1 ISCSI-11.14-3 ISCSI-11.15-1 logout of the session", pdu.LogoutCloseSession, 0, pdu.LogoutSuccess)
	logout("ISCSI-11.14-4 logout of an unknown connection", pdu.LogoutCloseConnection, 77, pdu.LogoutCIDNotFound)
	logout("logout for recovery at ErrorRecoveryLevel 0", pdu.LogoutForRecovery, 0, pdu.LogoutRecoveryNotSupported)
	add("", "ISCSI-11.10-2 a Text Request with an unknown TTT", func(t *T) {
		p := t.peer()
		h := p.request(pdu.TextReq, pdu.FlagF, true)
		h.SetTTT(0x7777)
		p.send(h, nil)
		if m := p.want(pdu.Reject); m.bhs.Reason() != pdu.RejectInvalidField {
			t.failf("Reject %v, where %v is due", m.bhs.Reason(), pdu.RejectInvalidField)
		}
		p.ping()
	})
	add("", "a Text Request for the targets", func(t *T) {
		p := t.peer()
		h := p.request(pdu.TextReq, pdu.FlagF, false)
		h.SetTTT(pdu.ReservedTag)
		p.send(h, []byte("SendTargets=\x00"))
		if m := p.wantFor(pdu.TextResp, h); !bytes.Contains(m.data, []byte("TargetName="+t.o.Target+"\x00")) {
			t.failf("the Text Response is %q", m.data)
		}
	})
	dataCases(add)
	return list
}

// reject returns the run of a request that gets a Reject.
func reject(c vectors.Refused) func(t *T) {
	return func(t *T) {
		p := t.peer()
		h := p.request(c.Op, c.Flags, true)
		p.send(h, nil)
		p.wantReject(h, c.Reason)
		p.ping()
	}
}

// write16 returns a WRITE(16) of the bytes from block 0, in blocks of size bytes.
func write16(bytes, size int) (cdb [16]byte) {
	cdb[0] = 0x8a
	binary.BigEndian.PutUint32(cdb[10:], uint32(bytes/size))
	return cdb
}

// block is a length in bytes that is a multiple of all block sizes.
const block = 4096

// blockSize returns the block size of the LUN.
func (t *T) blockSize() int {
	s := t.login(nil)
	d, err := s.Open(t.ctx, t.o.LUN)
	t.check(err, "open")
	s.Close()
	return d.BlockSize
}

// dataCases adds the cases about data PDUs of plain TCP.
func dataCases(add func(only, id string, run func(t *T))) {
	// open starts a WRITE without immediate data, and takes its R2T.
	open := func(t *T, p *peer, n int) (h, r2t pdu.BHS) {
		h = p.command(pdu.FlagW, n, write16(n, t.blockSize()))
		p.send(h, nil)
		r2t = p.wantFor(pdu.R2T, h).bhs
		if r2t.BufferOffset() != 0 || int(r2t.DesiredDataTransferLength()) != n || r2t.TTT() == pdu.ReservedTag || r2t.R2TSN() != 0 {
			t.failf("ISCSI-11.8-5: R2T %d of %d bytes from %d with TTT %#x", r2t.R2TSN(), r2t.DesiredDataTransferLength(), r2t.BufferOffset(), r2t.TTT())
		}
		return h, r2t
	}
	// out returns the Data-Out that answers an R2T.
	out := func(p *peer, h, r2t pdu.BHS, sn, offset uint32, flags byte) pdu.BHS {
		d := make(pdu.BHS, pdu.BHSLen)
		d.Reset(pdu.DataOut, flags)
		d.SetLUN(h.LUN())
		d.SetITT(h.ITT())
		d.SetTTT(r2t.TTT())
		d.SetExpStatSN(p.statSN)
		d.SetDataSN(sn)
		d.SetBufferOffset(offset)
		return d
	}
	add("tcp", "ISCSI-11.8-4 ISCSI-11.8-5 an R2T and its Data-Outs", func(t *T) {
		p := t.peer("ImmediateData=No")
		h, r2t := open(t, p, 2*block)
		p.send(out(p, h, r2t, 0, 0, 0), random(block))
		p.send(out(p, h, r2t, 1, block, pdu.FlagF), random(block))
		p.wantStatus(h, initiator.Good)
	})
	add("tcp", "ISCSI-11.7-4 a Data-Out beyond its R2T", func(t *T) {
		p := t.peer()
		h, r2t := open(t, p, block)
		d := out(p, h, r2t, 0, block, pdu.FlagF)
		p.send(d, random(512))
		m := p.next() // either a Reject, or the end of the command with an error
		if m.bhs == nil || m.bhs.Opcode() != pdu.Reject && (m.bhs.Opcode() != pdu.SCSIResponse || m.bhs.Status() == initiator.Good) {
			t.failf("%v, where an error is due", m)
		}
	})
	add("tcp", "ISCSI-11.3-6 immediate data up to FirstBurstLength", func(t *T) {
		p := t.peer()
		if got := p.answer("ImmediateData"); got != "Yes" {
			t.skipf("the target has agreed on ImmediateData=%s", got)
		}
		h := p.command(pdu.FlagW, block, write16(block, t.blockSize()))
		p.send(h, random(block))
		p.wantStatus(h, initiator.Good)
	})
	add("tcp", "ISCSI-4.2.5-2 ISCSI-4.2.5-3 unsolicited Data-Out", func(t *T) {
		p := t.peer("InitialR2T=No")
		if got := p.answer("InitialR2T"); got != "No" {
			t.skipf("the target has agreed on InitialR2T=%s (initial_r2t)", got)
		}
		h := p.command(pdu.FlagW, block, write16(block, t.blockSize()))
		h.SetFlags(h.Flags() &^ pdu.FlagF)
		p.send(h, nil)
		d := out(p, h, h, 0, 0, pdu.FlagF)
		d.SetTTT(pdu.ReservedTag)
		p.send(d, random(block))
		p.wantStatus(h, initiator.Good)
	})
	add("tcp", "ISCSI-7.8-1 a wrong header digest", func(t *T) {
		p := t.peer("HeaderDigest=CRC32C")
		if !p.header {
			t.failf("ISCSI-13.1-1: HeaderDigest=%s", p.answer("HeaderDigest"))
		}
		h := p.nop()
		b := p.encode(noHeader, h, nil)
		b[len(b)-1] ^= 1
		p.write(b)
		p.wantEnd()
	})
	add("tcp", "ISCSI-7.8-2 a wrong data digest", func(t *T) {
		p := t.peer("DataDigest=CRC32C")
		if !p.data {
			t.failf("ISCSI-13.1-1: DataDigest=%s", p.answer("DataDigest"))
		}
		h := p.nop()
		b := p.encode(noHeader, h, random(8))
		b[len(b)-1] ^= 1
		p.write(b)
		h.SetDataSegmentLength(8)
		p.wantReject(h, pdu.RejectDataDigest)
		p.ping()
	})
	add("tcp", "ISCSI-7.7-1 AHS that run over", func(t *T) {
		p := t.peer()
		h := p.command(0, 0, [16]byte{})
		h.SetTotalAHSLength(4)
		p.write(append(h, 0xff, 0xff, 1, 0))
		p.wantEnd()
	})
	add("tcp", "ISCSI-7.7-1 a data segment of 16 MiB", func(t *T) {
		p := t.peer()
		h := p.nop()
		h.SetDataSegmentLength(pdu.MaxData)
		p.write(h)
		p.wantEnd()
	})
}
