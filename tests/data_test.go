package tests

import (
	"bytes"
	"fmt"
	"math"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/iser/vectors"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// sense keys and codes of commands that the transport refuses
const (
	illegalRequest = 0x05
	abortedCommand = 0x0b
)

// readData takes the RDMA Writes of a READ up to its response, and checks where
// they go.
func (p *raw) readData(h pdu.BHS, stag wire.STag, base uint64, status byte) (data []byte, rsp *message) {
	p.t.Helper()
	for {
		m := p.next()
		if m.op != wire.OpWrite {
			if m.bhs == nil || m.bhs.Opcode() != pdu.SCSIResponse || m.bhs.ITT() != h.ITT() ||
				m.bhs.Status() != status {
				p.t.Fatalf("%v % x", m.op, m.payload)
			}
			return data, m
		}
		if m.tagged.STag != stag || m.tagged.TO != base+uint64(len(data)) {
			p.t.Fatalf("ISER-7.3.5-4 ISER-7.3.5-5: RDMA Write to STag %#x, TO %#x; want %#x, %#x", m.tagged.STag,
				m.tagged.TO, stag, base+uint64(len(data)))
		}
		data = append(data, m.payload...)
	}
}

// EDTL and the CDB need not agree on how much there is.
func TestResiduals(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	p := tg.rawLogin(t, initiator.Options{}, 0)
	medium := random(4096)
	if err := tg.store.Store.WriteAt(medium, 0); err != nil {
		t.Fatal(err)
	}
	const blocks = 2
	for _, tt := range []struct {
		edtl     uint32
		moved    int // of a READ
		flags    byte
		residual uint32
	}{
		{1024, 1024, 0, 0},
		{512, 512, pdu.FlagOverflow, 512},
		{700, 700, pdu.FlagOverflow, 324},
		{4096, 1024, pdu.FlagUnderflow, 3072},
		{0, 0, pdu.FlagOverflow, 1024},
	} {
		check := func(m *message) {
			t.Helper()
			if m.bhs.Flags() != pdu.FlagF|tt.flags || m.bhs.Residual() != tt.residual {
				t.Errorf("flags %#x, residual %d", m.bhs.Flags(), m.bhs.Residual())
			}
		}
		t.Run(fmt.Sprintf("READ of 1024 with EDTL %d", tt.edtl), func(t *testing.T) {
			p.t = t
			block := cdb.Read16(0, blocks)
			h := p.scsi(pdu.FlagR, tt.edtl, block)
			p.send(sink(5, p.o.BaseOffset), h, nil)
			data, m := p.readData(h, 5, p.o.BaseOffset, 0)
			if !bytes.Equal(data, medium[:tt.moved]) {
				t.Errorf("ISER-7.3.5-6 SEC-5042.6.3.2-2: %d bytes", len(data))
			}
			check(m)
		})
		for _, immediate := range []uint32{0, 512} {
			if immediate > tt.edtl {
				continue
			}
			t.Run(fmt.Sprintf("WRITE of 1024 with EDTL %d, %d immediate", tt.edtl, immediate), func(t *testing.T) {
				p.t = t
				block := cdb.Write16(4, blocks)
				h := p.scsi(pdu.FlagW, tt.edtl, block)
				data := random(tt.moved)
				p.send(source(6, p.o.BaseOffset), h, data[:immediate])
				if tt.moved%512 != 0 { // a part of a block is not written
					check(p.wantStatus(h, 2))
					return
				}
				if rest := data[immediate:]; len(rest) > 0 {
					r := p.wantRead()
					if r.Size != uint32(len(rest)) || r.SrcSTag != 6 || r.SrcTO != p.o.BaseOffset {
						t.Fatalf("ISER-6.9-2 L1: %+v", r)
					}
					p.answer(r, rest)
				}
				check(p.wantStatus(h, 0))
				// What has not come may not be written, except to fill a block.
				if got := tg.stored(t, 4, tt.moved); !bytes.Equal(got, data) {
					t.Errorf("other bytes are stored")
				}
			})
		}
	}
	p.logout()
}

// A command whose unsolicited data or whose advertisement is wrong fails by
// CHECK CONDITION, without RDMA and without effect.
func TestBadCommands(t *testing.T) {
	no := false
	tg := startTarget(t, targetOptions{})
	noImmediate := startTarget(t, targetOptions{node: iscsi.Options{Limits: keys.Limits{ImmediateData: &no}}})
	garbage := func(flags byte) []byte { // an STag and a Base Offset everywhere
		return append([]byte{flags, 0, 0, 0}, bytes.Repeat([]byte{0x5a}, 24)...)
	}
	encode := func(h iser.Header) []byte {
		b := make([]byte, iser.HeaderLen)
		h.Put(b)
		return b
	}
	const top = math.MaxUint64 - 4095
	for _, tt := range []struct {
		id        string
		tg        *target
		header    []byte
		write     bool
		edtl      uint32
		immediate int
		key       byte
		asc       byte
		ascq      byte
	}{
		{"ISER-7.3.1-11 READ without an STag", tg, encode(iser.Header{}), false, 4096, 0, illegalRequest, 0x0e, 0x03},
		{"ISER-9.2-3 READ with RSV 0", tg, garbage(0x18), false, 4096, 0, illegalRequest, 0x0e, 0x03},
		{"ISER-7.3.1-11 WRITE without an STag", tg, encode(iser.Header{}), true, 4096, 0, illegalRequest, 0x0e, 0x03},
		{"ISER-7.3.1-4 WRITE with too little immediate data and no STag", tg, encode(iser.Header{}), true, 4096, 512,
			illegalRequest, 0x0e, 0x03},
		{"ISER-9.2-2 WRITE with WSV 0", tg, garbage(0x14), true, 4096, 0, illegalRequest, 0x0e, 0x03},
		{"ISER-7.3.5-5 READ beyond 2^64", tg, encode(sink(3, top+1)), false, 4096, 0, illegalRequest, 0x0e, 0x03},
		{"ISER-7.3.6-10 WRITE beyond 2^64", tg, encode(source(3, top+1)), true, 4096, 0, illegalRequest, 0x0e, 0x03},
		{"immediate data beyond EDTL", tg, encode(source(3, 0)), true, 512, 513, abortedCommand, 0x0c, 0x0d},
		{"ISER-9.2-5 ISER-8.3.1-1 immediate data of a READ", tg, encode(sink(3, 0)), false, 4096, 512, abortedCommand,
			0x0c, 0x0c},
		{"ISER-10.1.3.4-3 immediate data where none was agreed on", noImmediate, encode(source(3, 0)), true, 4096,
			512, abortedCommand, 0x0c, 0x0c},
	} {
		t.Run(tt.id, func(t *testing.T) {
			p := tt.tg.rawLogin(t, initiator.Options{}, 0)
			block, flags := cdb.Read16(0, 8), byte(pdu.FlagR)
			if tt.write {
				block, flags = cdb.Write16(0, 8), pdu.FlagW
			}
			h := p.scsi(flags, tt.edtl, block)
			b := pduBytes(iser.Header{}, h, random(tt.immediate))
			copy(b, tt.header)
			p.sendRaw(b)
			p.wantSense(h, tt.key, tt.asc, tt.ascq)
			tt.tg.untouched(t, 1)
			p.ping()
			p.logout()
		})
	}
}

// ISER-9.5.3-1: commands with data in both directions are refused.
func TestBidirectionalCommandIsRefused(t *testing.T) {
	p := startTarget(t, targetOptions{}).rawLogin(t, initiator.Options{}, 0)
	h := p.scsi(pdu.FlagR|pdu.FlagW, 512, cdb.TestUnitReady)
	p.send(iser.Header{Read: iser.Remote{Valid: true, STag: 1}, Write: iser.Remote{Valid: true, STag: 2}}, h, nil)
	p.wantSense(h, illegalRequest, 0x0e, 0x03)
	p.logout()
}

// ISER-3.1.9-2, ISER-7.3.2-6 L9: a command that is refused before it is bound must not be answered with
// the STag of a command that had its slot before.
func TestRefusedCommandIsNotAnsweredWithAnotherSTag(t *testing.T) {
	p := startTarget(t, targetOptions{}).rawLogin(t, initiator.Options{}, 0)
	p.CmdSN++ // a gap
	block := cdb.Read16(0, 1)
	h := p.scsi(pdu.FlagR, 512, block)
	p.send(iser.Header{Write: iser.Remote{Valid: true, STag: 77}}, h, nil) // not what a READ needs
	p.wantTMF(p.tmf(pdu.AbortTask, 0, h.ITT(), h.CmdSN()), pdu.FunctionComplete)
	p.CmdSN -= 2
	h = p.scsi(0, 0, cdb.TestUnitReady)
	p.send(iser.Header{}, h, nil)
	p.wantStatus(h, 0)
	p.CmdSN++
	const n = 16
	var msgs [][]byte
	for range n {
		msgs = append(msgs, pduBytes(iser.Header{}, p.scsi(pdu.FlagR|pdu.FlagW, 512, cdb.TestUnitReady), nil))
	}
	for i := range msgs { // the first CmdSN last: each has a slot of its own
		p.sendRaw(msgs[n-1-i])
	}
	for range n {
		if m := p.want(pdu.SCSIResponse); m.op != wire.OpSend || m.bhs.Status() != 0x02 {
			t.Fatalf("%v of %#x, which this command did not advertise; status %#x", m.op, m.untag.Invalidate,
				m.bhs.Status())
		}
	}
	p.logout()
}

// Base Offsets are unsigned numbers of 64 bits (L2); STag 0 is an STag.
func TestBaseOffsets(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	const n = 256 << 10
	for _, base := range []uint64{0, 1, 0x7ffffffffffff000, 0x7fffffffffffffff, 0xffff888012345000,
		math.MaxUint64 - n + 1} {
		t.Run(fmt.Sprintf("ISER-7.3.5-5 ISER-7.3.6-10 ISER-1.5.1-3 %#x", base), func(t *testing.T) {
			o := initiator.Options{}
			p := tg.rawLogin(t, o, 0)
			want := random(n)
			block := cdb.Write16(0, n/512)
			const imm = 4096
			h := p.scsi(pdu.FlagW, n, block)
			p.send(source(0, base), h, want[:imm])
			for off := imm; off < n; {
				r := p.wantRead()
				if r.SrcSTag != 0 || r.SrcTO != base+uint64(off-imm) {
					t.Fatalf("%+v at %d", r, off)
				}
				p.answer(r, want[off:][:r.Size])
				off += int(r.Size)
			}
			p.wantStatus(h, 0)
			block = cdb.Read16(0, n/512)
			h = p.scsi(pdu.FlagR, n, block)
			p.send(sink(0, base), h, nil)
			if got, _ := p.readData(h, 0, base, 0); !bytes.Equal(got, want) {
				t.Error("what is read is not what was written")
			}
			p.logout()
		})
	}
}

// A transfer of many pieces: each at its place, one Read or Write after the
// other, and the response after all of them.
func TestPieces(t *testing.T) {
	t.Run("ISER-6.2-5 ISER-7.3.2-10 ISER-7.3.6-10 ISER-9.5.2-2 ISER-9.5.2-3 ISER-9.5.1-3 ISER-7.3.5-1 ISER-7.3.5-14 ISER-7.3.6-1", func(t *testing.T) {
		const piece, n = 64 << 10, 1 << 20
		tg := startTarget(t, targetOptions{node: iscsi.Options{MaxTransferPiece: piece, ConnectionMemory: piece}})
		p := tg.rawLogin(t, initiator.Options{}, 0)
		want := random(n)
		block := cdb.Write16(0, n/512)
		h := p.scsi(pdu.FlagW, n, block)
		p.send(source(4, p.o.BaseOffset), h, nil)
		for off := 0; off < n; off += piece {
			r := p.wantRead()
			if r.Size != piece || r.SrcTO != p.o.BaseOffset+uint64(off) {
				t.Fatalf("%+v at %d", r, off)
			}
			p.ping() // nothing else comes before this one is answered
			p.answer(r, want[off:][:piece])
		}
		p.wantStatus(h, 0)
		block = cdb.Read16(0, n/512)
		h = p.scsi(pdu.FlagR, n, block)
		p.send(sink(4, p.o.BaseOffset), h, nil)
		if got, _ := p.readData(h, 4, p.o.BaseOffset, 0); !bytes.Equal(got, want) {
			t.Error("what is read is not what was written")
		}
		p.logout()
	})
}

// Read Requests on the wire never exceed ORD, and do not hold up anything else.
func TestORD(t *testing.T) {
	for _, tt := range []struct {
		id    string
		ird   int
		hello bool
		want  int
	}{
		{"MPA2-9.1-1 the initiator states no IRD", 0, false, 1},
		{"ISER-5.1.3-5 iSER-IRD 3 after no IRD", 0, true, 3},
		{"ISER-7.3.6-6 ISER-8.2-3 ISER-8.2-4 IRD 1", 1, false, 1},
		{"ISER-7.3.6-6 ISER-8.2-4 L26 IRD 4", 4, false, 4},
		{"ISER-5.1.3-5 ISER-8.2-1 ISER-5.1.3-6 iSER-IRD 3", 128, true, 3},
	} {
		t.Run(tt.id, func(t *testing.T) {
			tg := startTarget(t, targetOptions{})
			o := initiator.Options{}
			o.RDMA.IRD = tt.ird
			var p *raw
			if tt.ird > 0 {
				p = tg.rawLogin(t, o)
			} else {
				o.Target = targetName
				p = tg.dialStream(t, o)
				p.startMPAAs(wire.Startup{Rev: 1, CRC: true})
				p.login()
			}
			if tt.hello {
				p.sendRaw(hello(10, 10, uint16(tt.want)))
				p.wantHelloReply(fmt.Sprintf("30aa%04x", tt.want))
			} else if p.reply.Enhanced && int(p.reply.Depths.ORD) != tt.want {
				t.Fatalf("L30: %+v", p.reply.Depths)
			}
			h := p.scsi(0, 0, cdb.TestUnitReady)
			p.send(iser.Header{}, h, nil)
			p.wantStatus(h, 0x02)

			const n = 32
			base := p.CmdSN
			want := make([][]byte, n)
			itts := map[uint32]int{}
			for i := range n {
				want[i] = random(4096)
				itts[p.writeCommand(uint64(8*i), 8).ITT()] = i
			}
			var pending []wire.ReadRequest
			asked, done := 0, 0
			for done < n {
				for len(pending) < min(tt.want, n-asked+len(pending)) {
					m := p.next()
					if m.op == wire.OpReadRequest {
						pending, asked = append(pending, m.read), asked+1
						continue
					}
					if m.bhs.Opcode() != pdu.SCSIResponse || m.bhs.Status() != 0 {
						t.Fatalf("%v % x", m.op, m.payload)
					}
					done++
				}
				if len(pending) == tt.want {
					pingAmongResponses(p, &done)
				}
				if len(pending) == 0 {
					p.want(pdu.SCSIResponse)
					done++
					continue
				}
				r := pending[0]
				pending = pending[1:]
				p.answer(r, want[itts[uint32(r.SrcSTag)>>8]])
			}
			if p.CmdSN != base+n || asked != n {
				t.Errorf("%d Reads", asked)
			}
			for i := range n {
				if !bytes.Equal(tg.stored(t, 8*i, 4096), want[i]) {
					t.Errorf("ISER-7.3.1-10: WRITE %d has stored something else", i)
				}
			}
			p.logout()
		})
	}
}

// pingAmongResponses sends a ping and takes its answer. SCSI Responses may come before it, but
// no RDMA Read Request.
func pingAmongResponses(p *raw, done *int) {
	p.t.Helper()
	h := p.Request(pdu.NOPOut, pdu.FlagF, true)
	h.SetTTT(pdu.ReservedTag)
	p.send(iser.Header{}, h, nil)
	for {
		m := p.next()
		switch {
		case m.bhs == nil:
			p.t.Fatalf("%v with as many outstanding as ORD allows", m.op)
		case m.bhs.Opcode() == pdu.NOPIn && m.bhs.ITT() == h.ITT():
			return
		case m.bhs.Opcode() == pdu.SCSIResponse && m.bhs.Status() == 0:
			*done++
		default:
			p.t.Fatalf("%v % x", m.op, m.payload)
		}
	}
}

// An initiator can reach nothing of the target by RDMA but the sink of the Read
// that it has been asked, by the Response to that.
func TestRDMAByInitiator(t *testing.T) {
	for _, tt := range vectors.Attacks {
		t.Run(tt.ID, func(t *testing.T) {
			tg := startTarget(t, targetOptions{})
			p := tg.rawLogin(t, initiator.Options{}, 0)
			_, reads := p.held(1)
			nop := pduBytes(iser.Header{}, p.Request(pdu.NOPOut, pdu.FlagF, true), nil)
			p.write(fpdu(tt.ULPDU(reads[0], p.sendMSN, nop)))
			p.wantTerminate(tt.Reason)
			tg.waitIdle(t)
			tg.untouched(t, 1)
		})
	}
	t.Run("ISER-8.3.2-2 ISER-11-5 SEC-5042.6.2.2-1 SEC-5042.6.2.2-3 a second Response", func(t *testing.T) {
		tg := startTarget(t, targetOptions{})
		p := tg.rawLogin(t, initiator.Options{}, 0)
		hs, reads := p.held(1)
		p.answer(reads[0], make([]byte, 4096))
		p.wantStatus(hs[0], 0)
		p.write(fpdu(tagged(wire.OpReadResponse, true, reads[0].SinkSTag, reads[0].SinkTO, random(4096))))
		p.wantTerminate(wire.ReasonOpcode)
		tg.untouched(t, 1)
	})
}

// Unsolicited Data-Out PDUs, where the target has agreed to them.
func TestUnsolicitedData(t *testing.T) {
	t.Run("ISER-7.3.1-9 ISER-7.3.4-1 ISER-7.3.4-2 ISER-7.3.4-3 ISER-6.4-3 ISER-8.1.1.2-1 ISER-9.5.1-2",
		func(t *testing.T) {
			no := false
			tg := startTarget(t, targetOptions{node: iscsi.Options{Limits: keys.Limits{InitialR2T: &no,
				FirstBurstLength: 20480}}})
			p := tg.rawLogin(t, initiator.Options{}, 0)
			const n, burst = 32 << 10, 20480
			want := random(n)
			block := cdb.Write16(0, n/512)
			h := p.scsi(pdu.FlagW, n, block)
			h.SetFlags(h.Flags() &^ pdu.FlagF)
			p.send(source(8, p.o.BaseOffset), h, want[:4000])
			sn := uint32(0)
			for off := 4000; off < burst; sn++ {
				end := min(off+8192, burst)
				d := p.Request(pdu.DataOut, 0, true)
				d[0] = byte(pdu.DataOut)
				d.SetITT(h.ITT())
				d.SetTTT(pdu.ReservedTag)
				d.SetCmdSN(0)
				d.SetDataSN(sn)
				d.SetBufferOffset(uint32(off))
				if end == burst {
					d.SetFlags(pdu.FlagF)
				}
				p.send(iser.Header{}, d, want[off:end])
				off = end
			}
			r := p.wantRead()
			if r.SrcTO != p.o.BaseOffset || r.Size != n-burst { // L1: past all that is unsolicited
				t.Fatalf("%+v", r)
			}
			p.answer(r, want[burst:])
			p.wantStatus(h, 0)
			if !bytes.Equal(tg.stored(t, 0, n), want) {
				t.Error("other bytes are stored")
			}
			// ISER-10.1.4.3-1: a gap in DataSN is no sequence error but a protocol error.
			h = p.scsi(pdu.FlagW, n, block)
			h.SetFlags(h.Flags() &^ pdu.FlagF)
			p.send(source(8, p.o.BaseOffset), h, want[:4000])
			d := p.Request(pdu.DataOut, pdu.FlagF, true)
			d.SetITT(h.ITT())
			d.SetTTT(pdu.ReservedTag)
			d.SetDataSN(1)
			d.SetBufferOffset(4000)
			p.send(iser.Header{}, d, random(8192))
			for range 2 { // in either order
				switch m := p.next(); {
				case m.bhs.Opcode() == pdu.Reject && m.bhs.Reason() == pdu.RejectProtocolError:
				case m.bhs.Opcode() == pdu.SCSIResponse && m.bhs.Status() == 0x02:
				default:
					t.Fatalf("ISER-10.1.4.3-1: %v % x", m.op, m.payload)
				}
			}
			if !bytes.Equal(tg.stored(t, 0, n), want) {
				t.Error("the command that failed has written")
			}
			p.logout()
		})
}
