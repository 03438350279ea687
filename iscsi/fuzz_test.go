package iscsi

import (
	"encoding/binary"
	"testing"
	"testing/synctest"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
)

// A step of FuzzSession is 16 bytes:
//
//	0 opcode and I bit; 40, 41, ... of the target's: something else than a PDU
//	1 byte 1 of the BHS
//	2 how CmdSN comes about
//	3 tag       4 LUN       5 operation code
//	6 LBA       7 blocks    8, 9 EDTL or other fields at 20
//	10, 11 length of the data segment      12 byte 36, DataSN
//	13 byte 40, Buffer Offset             14, 15 xor of an byte of the BHS
const stepLen = 16

// The steps that do not send a PDU. No initiator has these opcodes.
const (
	stepHoldGets    = 0x60
	stepReleaseGets = 0x61
	stepHoldFlush   = 0x62
	stepFreeFlush   = 0x63
	stepBindFails   = 0x64
	stepPause       = 0x65
)

// FuzzSession feeds PDUs of any kind in any order to a connection in full
// feature phase. It must not panic, hang, break the Datamover's contract, or
// leave anything behind.
func FuzzSession(f *testing.F) {
	step := func(op pdu.Opcode, octet1, sn, tag, cdb0, blocks byte, edtl, data uint16) []byte {
		b := []byte{byte(op), octet1, sn, tag, 0, cdb0, 0, blocks, byte(edtl >> 8), byte(edtl), byte(data >> 8),
			byte(data), 0, 0, 0, 0}
		return b
	}
	join := func(kind byte, steps ...[]byte) []byte {
		b := []byte{kind}
		for _, s := range steps {
			b = append(b, s...)
		}
		return b
	}
	read := step(pdu.SCSICommand, readF, 0, 1, 0x28, 8, 4096, 0)
	write := step(pdu.SCSICommand, writeF, 0, 2, 0x2a, 8, 4096, 512)
	f.Add(join(0, read, write, step(pdu.NOPOut|0x40, pdu.FlagF, 0, 3, 0, 0, 0xffff, 9)))
	f.Add(join(0, step(stepHoldGets, 0, 0, 0, 0, 0, 0, 0), write,
		step(pdu.TaskMgmtReq|0x40, pdu.FlagF|pdu.AbortTask, 0, 9, 0, 0, 2, 0),
		step(stepReleaseGets, 0, 0, 0, 0, 0, 0, 0), read))
	f.Add(join(0, write, step(pdu.SCSICommand, writeF, 1, 7, 0x2a, 8, 4096, 0),
		step(pdu.TaskMgmtReq|0x40, pdu.FlagF|pdu.TargetWarmReset, 0, 9, 0, 0, 0xffff, 0), read))
	f.Add(join(1, step(pdu.SCSICommand, pdu.FlagW, 0, 4, 0x2a, 8, 4096, 512),
		step(pdu.DataOut, pdu.FlagF, 0, 4, 0, 0, 0xffff, 3584), read))
	f.Add(join(2, step(pdu.TextReq, pdu.FlagF, 0, 5, 0, 0, 0xffff, 1),
		step(pdu.TextReq, pdu.FlagC, 0, 5, 0, 0, 0xffff, 2)))
	f.Add(join(0, step(pdu.SNACK, pdu.FlagF, 0, 1, 0, 0, 0, 0), step(pdu.LoginReq, 0x87, 0, 1, 0, 0, 0, 0),
		step(0x07, 0, 0, 1, 0, 0, 0, 0)))
	f.Add(join(0, read, step(pdu.LogoutReq|0x40, pdu.FlagF, 0, 6, 0, 0, 0, 0), read))
	f.Add(join(0, step(pdu.SCSICommand, writeF|pdu.AttrOrdered, 0, 1, 0x2a, 8, 4096, 0), write, read))

	store := newStore(f)
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 0 && len(in) <= 1+64*stepLen {
			testkit.Bubble(t, func(t *testing.T) { fuzzSession(t, store, in) })
		}
	})
}

// fuzzSession runs the steps of in on a session.
func fuzzSession(t *testing.T, store *backendtest.Faulty, in []byte) {
	no := false
	n := newStoreNode(t, store, func(o *Options) {
		o.QueueDepth, o.LogoutWait = 8, time.Millisecond
		o.ConnectionMemory, o.MaxTransferPiece = 1, 1
		if in[0]&3 == 1 {
			o.Limits.InitialR2T = &no
			o.Limits.FirstBurstLength = 16384
		}
	})
	tc := n.connect()
	if in[0]&3 == 2 {
		tc.discover()
	} else {
		tc.login()
	}
	for steps := in[1:]; len(steps) >= stepLen; steps = steps[stepLen:] {
		s := steps[:stepLen]
		tc.m.mu.Lock()
		switch s[0] {
		case stepHoldGets:
			tc.m.holdGets = true
		case stepReleaseGets:
			tc.m.mu.Unlock()
			tc.m.releaseGets()
			tc.m.mu.Lock()
		case stepHoldFlush:
			tc.m.holdFlush = true
		case stepFreeFlush:
			tc.m.holdFlush = false
			tc.m.cond.Broadcast()
		case stepBindFails:
			tc.m.bindErr = nil
			if s[1]&1 != 0 {
				tc.m.bindErr = errPeerClosed
			}
		case stepPause:
			tc.m.mu.Unlock()
			synctest.Wait()
			tc.m.mu.Lock()
		default:
			tc.m.mu.Unlock()
			tc.writeStep(s)
			tc.m.mu.Lock()
		}
		tc.m.mu.Unlock()
	}
	if in[0]&4 != 0 {
		tc.m.Close()
	}
	tc.m.mu.Lock()
	tc.m.holdFlush = false
	tc.m.cond.Broadcast()
	tc.m.mu.Unlock()
	tc.close()
	tc.wait()
}

// writeStep sends the PDU of a step.
func (tc *testConn) writeStep(s []byte) {
	h := make(pdu.BHS, pdu.BHSLen)
	h.Reset(pdu.Opcode(s[0]), s[1])
	h.SetLUN([8]byte{1: s[4]})
	h.SetITT(uint32(s[3]))
	h.SetTTT(uint32(binary.BigEndian.Uint16(s[8:])))
	if s[8] == 0xff && s[9] == 0xff {
		h.SetTTT(pdu.ReservedTag)
	}
	h.SetCmdSN(tc.CmdSN + uint32(s[2]&7))
	if s[2]&8 != 0 {
		h.SetCmdSN(tc.CmdSN - uint32(s[2]&7))
	}
	h.SetExpStatSN(uint32(s[2] >> 4))
	if h.Opcode() == pdu.SCSICommand {
		h.SetCDB([]byte{s[5], 0, 0, 0, 0, s[6], 0, 0, s[7], 0})
	} else {
		h.SetRefCmdSN(tc.CmdSN + uint32(int8(s[6])))
		h.SetDataSN(uint32(s[12]))
		h.SetBufferOffset(uint32(s[13]) * 512)
	}
	if s[14] != 0 {
		h[s[15]%pdu.BHSLen] ^= s[14]
	}
	if h.Opcode() == pdu.SCSICommand {
		h.SetEDTL(h.EDTL() & 0xffff) // as much as the memory below
	}
	if !h.Immediate() && s[2]&15 == 0 {
		tc.CmdSN++
	}
	tc.m.mu.Lock()
	if len(tc.m.sink[h.ITT()]) < 1<<16 { // the login has used some tags, with less memory
		tc.m.sink[h.ITT()], tc.m.source[h.ITT()] = make([]byte, 1<<16), make([]byte, 1<<16)
	}
	tc.m.mu.Unlock()
	data := make([]byte, int(binary.BigEndian.Uint16(s[10:]))&0x3fff)
	if h.Opcode() == pdu.TextReq {
		data = [][]byte{nil, text("SendTargets=All"), []byte("Send"), text("Targets="), text("X=1", "Y=2"),
			[]byte("="), text("InitiatorAlias=x")}[len(data)%7]
	}
	tc.write(h, data)
}
