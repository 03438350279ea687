package selftest

import (
	"bytes"

	"github.com/iser-target/iser-target/iscsi/initiator"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/iser/vectors"
	"github.com/iser-target/iser-target/rdma/wire"
	mpa "github.com/iser-target/iser-target/rdma/wire/vectors"
)

// noHeader is an iSER header without STags.
var noHeader = iser.Header{}

// fresh starts MPA without a login, and sends the first FPDU, an empty RDMA Write. Without it the target could send no Terminate
// (RFC 5044, section 7.1.2).
func (t *T) fresh() *peer {
	p := t.stream()
	p.write(fpdu(vectors.Tagged(wire.OpWrite, 1, 0, nil)))
	return p
}

// held starts a WRITE of a block without immediate data, and takes the RDMA Read Request for it.
func (p *peer) held(blockSize int) (h pdu.BHS, r wire.ReadRequest) {
	h = p.command(pdu.FlagW, block, write16(block, blockSize))
	p.sendWith(iser.Header{Write: iser.Remote{Valid: true, STag: 0x4711, Base: 0x1000}}, h, nil)
	if r = p.wantRead(); int(r.Size) != block || r.SrcSTag != 0x4711 || r.SrcTO != 0x1000 {
		p.t.failf("RDMA Read of %d bytes from STag %#x, TO %#x; the initiator has offered %d bytes of STag 0x4711 from 0x1000", r.Size, r.SrcSTag, r.SrcTO, block)
	}
	return h, r
}

// read16 returns a READ(16) of the bytes from block 0.
func read16(bytes, size int) (cdb [16]byte) {
	cdb = write16(bytes, size)
	cdb[0] = 0x88
	return cdb
}

// first returns the first block of the LUN.
func (t *T) first() []byte {
	s := t.login(nil)
	defer s.Close()
	d, err := s.Open(t.ctx, t.o.LUN)
	t.check(err, "open")
	b := make([]byte, block)
	t.check(d.Read(t.ctx, b, 0), "READ")
	return b
}

// streamCases returns the cases about MPA, DDP, RDMAP and the iSER header.
func streamCases() (list []testCase) {
	group := "iWARP"
	add := func(id string, run func(t *T)) {
		list = append(list, testCase{group: group, only: "iser", id: id, run: run})
	}
	for _, c := range mpa.BadRequests() {
		add(c.ID, func(t *T) {
			b, err := unhex(c.Frame)
			t.check(err, "the frame")
			p := t.dial()
			p.write(b)
			p.wantEnd()
		})
	}
	add("MPA-7.1.2-14 no Terminate before the first good FPDU", func(t *T) {
		p := t.stream()
		if !p.crc {
			t.skipf("CRCs are off on this connection")
		}
		b := fpdu(vectors.Tagged(wire.OpWrite, 1, 0, nil))
		b[len(b)-1] ^= 1
		p.write(b)
		p.wantEnd()
	})
	for _, c := range mpa.Refusals {
		add(c.ID, func(t *T) {
			p := t.fresh()
			for _, digits := range c.ULPDUs {
				u, err := unhex(digits)
				t.check(err, "the ULPDU")
				p.write(fpdu(u))
			}
			p.wantTerminate(c.Reason, c.Terminate)
		})
	}
	add("MPA-4.4-18 MPA-8-4 a wrong CRC", func(t *T) {
		p := t.fresh()
		if !p.crc {
			t.skipf("CRCs are off on this connection")
		}
		b := fpdu(vectors.Untagged(wire.OpSend, 1, random(100)))
		b[len(b)-1] ^= 1
		p.write(b)
		p.wantTerminate(wire.ReasonCRC, "20020000")
	})
	add("ISER-10.1.2.1-1 ISER-10.1.2.1-2 DDP-7.2-12 a message longer than any PDU", func(t *T) {
		p := t.peer()
		p.sendMessage(make([]byte, 76+256+8192+4))
		p.wantTerminate(wire.ReasonTooLong, "")
	})
	group = "iSER"
	for _, c := range vectors.FormatErrors {
		add(c.ID, func(t *T) {
			p := t.peer()
			p.sendMessage(c.Message(func(change func(pdu.BHS), data, behind int) []byte {
				b := p.encode(noHeader, p.nop(), make([]byte, data))
				change(pdu.BHS(b[iser.HeaderLen:][:pdu.BHSLen]))
				return append(b, make([]byte, behind)...)
			}))
			p.wantTerminate(wire.ReasonOperation, "")
		})
	}
	add("ISER-1.5.4-1 ISER-7.3.6-1 a WRITE by RDMA Read and a READ by RDMA Write", func(t *T) {
		size := t.blockSize()
		p := t.peer()
		h, r := p.held(size)
		want := random(block)
		p.write(fpdu(vectors.Tagged(wire.OpReadResponse, r.SinkSTag, r.SinkTO, want)))
		p.wantStatus(h, initiator.Good)
		h = p.command(pdu.FlagR, block, read16(block, size))
		p.sendWith(iser.Header{Read: iser.Remote{Valid: true, STag: 0x4712, Base: 0x2000}}, h, nil)
		var got []byte
		for len(got) < block {
			m := p.next()
			if m.op != wire.OpWrite || m.tagged.STag != 0x4712 || m.tagged.TO != 0x2000+uint64(len(got)) {
				t.failf("%v to STag %#x, TO %#x, where an RDMA Write to 0x4712, %#x is due", m, m.tagged.STag, m.tagged.TO, 0x2000+len(got))
			}
			got = append(got, m.payload...)
		}
		p.wantStatus(h, initiator.Good)
		if !bytes.Equal(got, want) {
			t.failf("the data read is not what was written")
		}
	})
	for _, c := range vectors.Attacks {
		add(c.ID, func(t *T) {
			before, size := t.first(), t.blockSize()
			p := t.peer()
			_, r := p.held(size)
			nop := p.encode(noHeader, p.request(pdu.NOPOut, pdu.FlagF, true), nil)
			p.write(fpdu(c.ULPDU(r, p.sendMSN, nop)))
			p.wantTerminate(c.Reason, "")
			if !bytes.Equal(t.first(), before) {
				t.failf("the refused data is on the LUN")
			}
		})
	}
	add("ISER-8.3.2-2 SEC-5042.6.2.2-1 a second Response", func(t *T) {
		size := t.blockSize()
		p := t.peer()
		h, r := p.held(size)
		b := fpdu(vectors.Tagged(wire.OpReadResponse, r.SinkSTag, r.SinkTO, random(block)))
		p.write(b)
		p.wantStatus(h, initiator.Good)
		p.write(b)
		p.wantTerminate(wire.ReasonOpcode, "")
	})
	add("DDP-7.2-5 DDP-8.2-2 SEC-5042.6.1.1-1 the STag of another stream", func(t *T) {
		size := t.blockSize()
		p, other := t.peer(), t.peer()
		h, r := p.held(size)
		other.write(fpdu(vectors.Tagged(wire.OpWrite, r.SinkSTag, r.SinkTO, random(block))))
		other.wantTerminate(wire.ReasonStream, "")
		want := random(block)
		p.write(fpdu(vectors.Tagged(wire.OpReadResponse, r.SinkSTag, r.SinkTO, want)))
		p.wantStatus(h, initiator.Good)
		if !bytes.Equal(t.first(), want) {
			t.failf("the LUN does not have the data of the stream that was attacked")
		}
	})
	add("MPA-6-1 a Read Response with a wrong CRC", func(t *T) {
		before, size := t.first(), t.blockSize()
		p := t.peer()
		if !p.crc {
			t.skipf("CRCs are off on this connection")
		}
		_, r := p.held(size)
		b := fpdu(vectors.Tagged(wire.OpReadResponse, r.SinkSTag, r.SinkTO, random(block)))
		b[len(b)-1] ^= 1
		p.write(b)
		p.wantTerminate(wire.ReasonCRC, "20020000")
		if !bytes.Equal(t.first(), before) {
			t.failf("the data is on the LUN in spite of its CRC")
		}
	})
	return list
}
