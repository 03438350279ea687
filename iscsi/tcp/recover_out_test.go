package tcp

import (
	"bytes"
	"slices"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A SNACK repeats an R2T of a WRITE until the R2T is answered (ISCSI-11.16-3).
func TestR2TSNACK(t *testing.T) {
	tg := startTarget(t, level1)
	c := tg.login1(t, "MaxBurstLength=8192", "FirstBurstLength=8192")
	data := random(16384)
	cmd, r2t := c.openWrite(data)
	for _, run := range []uint32{0, 1} {
		c.snack(pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 0, run)
		c.sameAgain(reply{h: r2t})
	}
	h := c.snack(pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 1, 1)
	if p := c.any(); p.h.DataSN() != 1 {
		t.Errorf("next R2TSN %d", p.h.DataSN())
	} else {
		c.isReject(p, pdu.RejectProtocolError, h)
	}
	c.send(dataOut(cmd.ITT(), r2t, 0, 0, false), data[:4096])
	c.snack(pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 0, 0)
	c.sameAgain(reply{h: r2t}) // unchanged, although some data has come
	c.send(dataOut(cmd.ITT(), r2t, 1, 4096, true), data[4096:8192])
	second := c.want(pdu.R2T).h
	c.wantReject(pdu.RejectProtocolError, c.snack(pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 0, 1))
	// Answers to the copies are duplicates: they do no harm (ISCSI-7.8-3).
	c.answer(cmd, r2t, random(16384), 3000)
	c.quiet()
	c.answer(cmd, second, data, 3000)
	if rsp := c.want(pdu.SCSIResponse); rsp.h.Status() != 0 || !bytes.Equal(tg.stored(0, 16384), data) {
		t.Fatalf("response %x", []byte(rsp.h))
	}
	c.answer(cmd, second, random(16384), 3000)
	c.quiet()
	if !bytes.Equal(tg.stored(0, 16384), data) {
		t.Fatal("a duplicate was written")
	}
}

// ISCSI-7.8-3, ISCSI-7.8-2: a recovery R2T asks for the Data-Out that is lost, by a wrong data
// digest or because it does not come, and for nothing else.
func TestRecoveryR2T(t *testing.T) {
	const size, segment = 16384, 1024
	type span struct{ from, to uint32 }
	for _, tt := range []struct {
		name    string
		bad     []int // Data-Out with a wrong digest
		missing []int // Data-Out that are not sent
		want    []span
	}{
		{"first", []int{0}, nil, []span{{0, 1024}}},
		{"middle", []int{7}, nil, []span{{7168, 8192}}},
		{"last", []int{15}, nil, []span{{15360, 16384}}},
		{"two that follow each other", []int{3, 4}, nil, []span{{3072, 5120}}},
		{"two", []int{3, 9}, nil, []span{{3072, 4096}, {9216, 10240}}},
		{"all", []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, nil, []span{{0, 16384}}},
		{"missing", nil, []int{5}, []span{{5120, 6144}}},
		{"missing first and two more", nil, []int{0, 5, 6}, []span{{0, 1024}, {5120, 7168}}},
		{"missing after a bad one", []int{4}, []int{5}, []span{{4096, 6144}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tg := startTarget(t, level1)
			c := tg.login1(t, "MaxBurstLength=16384", "FirstBurstLength=16384")
			data := random(2 * size)
			cmd, r2t := c.openWrite(data)
			for i := range size / segment {
				if slices.Contains(tt.missing, i) {
					continue
				}
				h := dataOut(cmd.ITT(), r2t, uint32(i), uint32(i*segment), i == size/segment-1)
				d := data[i*segment:][:segment]
				if c.badData = slices.Contains(tt.bad, i); c.badData {
					d = random(segment)
				}
				bad := c.badData
				c.send(h, d)
				if bad && i < size/segment-1 {
					c.wantReject(pdu.RejectDataDigest, h)
				}
			}
			sn := uint32(1)
			rejects := 0
			if slices.Contains(tt.bad, size/segment-1) {
				rejects = 1
			}
			next := func() reply { // the next PDU that is not the Reject of the last Data-Out
				p := c.any()
				for ; p.h.Opcode() == pdu.Reject && rejects > 0; rejects-- {
					p = c.any()
				}
				return p
			}
			for _, s := range tt.want {
				h := next().h
				if h.Opcode() != pdu.R2T || h.R2TSN() != sn || h.BufferOffset() != s.from ||
					h.DesiredDataTransferLength() != s.to-s.from || h.TTT() == r2t.TTT() {
					t.Fatalf("%x instead of an R2T for %v", []byte(h), s)
				}
				sn++
				c.answer(cmd, h, data, 1000)
			}
			p := next()
			if p.h.Opcode() != pdu.R2T || p.h.BufferOffset() != size || p.h.R2TSN() != sn {
				t.Fatalf("%x instead of the second R2T", []byte(p.h))
			}
			c.answer(cmd, p.h, data, 1000)
			p = next()
			if p.h.Opcode() != pdu.SCSIResponse || p.h.Status() != 0 || !bytes.Equal(tg.stored(0, 2*size), data) {
				t.Fatalf("response %x", []byte(p.h))
			}
		})
	}
}

// ISCSI-7.8-3: data that is lost too often fails its command.
func TestDataLostAgainAndAgain(t *testing.T) {
	tg := startTarget(t, level1)
	c := tg.login1(t)
	before := tg.stored(0, 4096)
	cmd, r2t := c.openWrite(random(4096))
	rounds := 0
	for {
		h := dataOut(cmd.ITT(), r2t, 0, 0, true)
		c.badData = true
		c.send(h, random(4096))
		a, b := c.any(), c.any()
		if a.h.Opcode() == pdu.Reject {
			a, b = b, a
		}
		c.isReject(b, pdu.RejectDataDigest, h)
		if a.h.Opcode() == pdu.SCSIResponse {
			c.wantSense(a, 0x0b, 0x47, 0x05)
			break
		}
		if r2t = a.h; r2t.Opcode() != pdu.R2T || rounds > 100 {
			t.Fatalf("%x", []byte(r2t))
		}
		rounds++
	}
	if rounds < 3 || !bytes.Equal(tg.stored(0, 4096), before) {
		t.Errorf("%d rounds", rounds)
	}
}

// At ErrorRecoveryLevel 1 a duplicate of a Data-Out is discarded without a Reject.
func TestDuplicateDataOut(t *testing.T) {
	tg := startTarget(t, level1)
	c := tg.login1(t)
	data := random(8192)
	cmd, r2t := c.openWrite(data)
	c.send(dataOut(cmd.ITT(), r2t, 0, 0, false), data[:4096])
	c.send(dataOut(cmd.ITT(), r2t, 0, 0, false), random(4096))
	c.send(dataOut(cmd.ITT(), r2t, 1, 4096, false), data[4096:6144])
	c.send(dataOut(cmd.ITT(), r2t, 0, 0, true), random(4096))
	c.send(dataOut(cmd.ITT(), r2t, 2, 6144, true), data[6144:])
	if rsp := c.want(pdu.SCSIResponse); rsp.h.Status() != 0 || !bytes.Equal(tg.stored(0, 8192), data) {
		t.Fatalf("response %x", []byte(rsp.h))
	}
}

// ISCSI-7.8-3: a Data-Out that is wrong and not lost is rejected, as at ErrorRecoveryLevel 0.
func TestBadDataOutAtLevel1(t *testing.T) {
	for _, tt := range []struct {
		name        string
		sn, off, n  int
		final       bool
		reason      pdu.RejectReason
		wantNothing bool
	}{
		{"offset without gap", 1, 2048, 1024, false, pdu.RejectInvalidField, false},
		{"offset before", 1, 0, 1024, false, pdu.RejectInvalidField, false},
		{"gap, offset before", 3, 0, 1024, false, pdu.RejectInvalidField, false},
		{"gap, offset beyond", 3, 9000, 1024, false, pdu.RejectInvalidField, false},
		{"gap, too long", 3, 4096, 8192, false, pdu.RejectInvalidField, false},
		{"F early", 1, 1024, 1024, true, pdu.RejectProtocolError, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tg := startTarget(t, level1)
			c := tg.login1(t)
			data := random(8192)
			cmd, r2t := c.openWrite(data)
			c.send(dataOut(cmd.ITT(), r2t, 0, 0, false), data[:1024])
			h := dataOut(cmd.ITT(), r2t, uint32(tt.sn), uint32(tt.off), tt.final)
			c.send(h, random(tt.n))
			var rsp reply
			if tt.final {
				rsp = c.wantRejectAndResponse(tt.reason, h)
			} else {
				c.wantReject(tt.reason, h)
				c.send(dataOut(cmd.ITT(), r2t, 9, 2048, true), data[2048:])
				rsp = c.want(pdu.SCSIResponse)
			}
			c.wantSense(rsp, 0x0b, 0x0c, 0x0d)
		})
	}
}

// ISCSI-7.8-3: an R2T asks for lost unsolicited data.
func TestLostUnsolicitedData(t *testing.T) {
	no := false
	tg := startTarget(t, level1, func(_ *target, o *iscsi.Options) { o.Limits.InitialR2T = &no })
	for _, tt := range []struct {
		name      string
		immediate int
		lost      int // PDU of 1024 bytes
		missing   bool
		size      int
	}{
		{"first, no immediate data", 0, 0, false, 4096},
		{"first, immediate data", 1024, 0, false, 4096},
		{"last", 1024, 2, false, 4096},
		{"missing", 1024, 1, true, 4096},
		{"more data than FirstBurstLength", 0, 1, false, 8192},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := tg.login1(t, "InitialR2T=No", "FirstBurstLength=4096")
			data := random(tt.size)
			h := c.scsi(pdu.FlagW, cdb.Write16(0, uint32(tt.size/blockLen)), tt.size)
			h.SetFlags(h.Flags() &^ pdu.FlagF)
			c.send(h, data[:tt.immediate])
			rejects := 0
			for i, off := 0, tt.immediate; off < 4096; i, off = i+1, off+1024 {
				if i == tt.lost && tt.missing {
					continue
				}
				if i == tt.lost {
					c.badData, rejects = true, 1
				}
				c.send(dataOut(h.ITT(), nil, uint32(i), uint32(off), off == 3072), data[off:off+1024])
			}
			from := tt.immediate + tt.lost*1024
			for {
				p := c.any()
				switch p.h.Opcode() {
				case pdu.Reject:
					rejects--
				case pdu.R2T:
					if int(p.h.BufferOffset()) != from || p.h.R2TSN() != 0 {
						t.Fatalf("%x", []byte(p.h))
					}
					c.answer(h, p.h, data, 1000)
				default:
					if p.h.Opcode() != pdu.SCSIResponse || p.h.Status() != 0 ||
						!bytes.Equal(tg.stored(0, tt.size), data) {
						t.Fatalf("%x %x", []byte(p.h), p.data)
					}
					for ; rejects > 0; rejects-- { // which may be slower
						c.want(pdu.Reject)
					}
					if rejects < 0 {
						t.Error("a Reject too many")
					}
					return
				}
			}
		})
	}
}

// ISCSI-7.2.1-1: a command with bad immediate data is sent again, and again. The target executes it once.
func TestRetry(t *testing.T) {
	tg := startTarget(t, level1)
	c := tg.login1(t)
	data := random(4096)
	h := c.scsi(pdu.FlagW, cdb.Write16(0, 8), 4096)
	c.badData = true
	c.send(h, data)
	c.wantReject(pdu.RejectDataDigest, h)
	c.send(h, data)
	if rsp := c.want(pdu.SCSIResponse); rsp.h.Status() != 0 || !bytes.Equal(tg.stored(0, 4096), data) {
		t.Fatalf("%x", []byte(rsp.h))
	}
	c.send(h, random(4096)) // answered, not acknowledged
	c.quiet()
	if !bytes.Equal(tg.stored(0, 4096), data) {
		t.Fatal("executed twice")
	}
}
