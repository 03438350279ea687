package tcp

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

// Data that was written is read back, in many sizes, with all digests, from a stream in pieces
// and with prefixes. The client checks the numbers, ranges and digests of R2Ts and Data-In
// (ISCSI-4.2.2.4-1, ISCSI-11.7-1, ISCSI-11.8-2, ISCSI-11.8-4).
func TestReadAndWrite(t *testing.T) {
	for _, tt := range []struct {
		name         string
		keys         []string
		header, data bool
		segment      int // of our Data-Out
		burst        int
		chunk        int
		prefix       int
	}{
		{name: "defaults", segment: 8192, burst: 256 << 10},
		{name: "header digest", keys: []string{"HeaderDigest=CRC32C"}, header: true, segment: 65536, burst: 256 << 10},
		{name: "data digest", keys: []string{"DataDigest=CRC32C,None"}, data: true, segment: 100000, burst: 256 << 10},
		// ISCSI-11.2-6, ISCSI-13.1-1
		{name: "both digests",
			keys:   []string{"HeaderDigest=CRC32C", "DataDigest=CRC32C", "MaxRecvDataSegmentLength=65536"},
			header: true, data: true, segment: 8192, burst: 256 << 10},
		{name: "small bursts",
			keys:    []string{"MaxBurstLength=4096", "FirstBurstLength=4096", "MaxRecvDataSegmentLength=512"},
			segment: 1000, burst: 4096},
		{name: "bursts of no whole segments",
			keys: []string{"MaxBurstLength=10000", "FirstBurstLength=512", "MaxRecvDataSegmentLength=3003",
				"DataDigest=CRC32C"}, data: true, segment: 4999, burst: 10000},
		{name: "large", keys: []string{"MaxBurstLength=16776192", "MaxRecvDataSegmentLength=16777215"},
			segment: 262144, burst: 1 << 20},
		{name: "stream in pieces", keys: []string{"HeaderDigest=CRC32C", "DataDigest=CRC32C"}, header: true,
			data: true, segment: 20000, burst: 256 << 10, chunk: 1461},
		{name: "prefix of 8 bytes", segment: 65536, burst: 256 << 10, prefix: 8},
		{name: "prefix longer than a header", segment: 65536, burst: 256 << 10, prefix: 60},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tg := startTarget(t, func(tg *target, _ *iscsi.Options) { tg.prefix = tt.prefix })
			c := tg.login(t, tt.keys...)
			c.chunk = tt.chunk
			if c.header != tt.header || c.data != tt.data {
				t.Fatalf("agreed on header digest %t, data digest %t", c.header, c.data)
			}
			for _, blocks := range []int{1, 2, 8, 16, 17, 128, 129, 512, 1024, 4095} {
				for _, immediate := range []int{0, 512} {
					want := random(blocks * blockLen)
					// No R2T asks for the same data again: ISCSI-4.2.5-5.
					r2ts := c.writeAll(blocks, want, immediate, tt.segment, tt.burst)
					if pieces := (len(want) + 1<<20 - 1) >> 20; r2ts > len(want)/tt.burst+pieces+1 {
						t.Errorf("%d R2Ts for %d bytes", r2ts, len(want))
					}
					if !bytes.Equal(tg.stored(blocks, len(want)), want) {
						t.Fatalf("%d blocks: the LUN does not hold what was written", blocks)
					}
					if !bytes.Equal(c.read(blocks, blocks, tt.burst), want) {
						t.Fatalf("%d blocks: other data was read than written", blocks)
					}
				}
			}
		})
	}
}

// ISCSI-11.2-6: digests match the vectors of RFC 7143 and of other implementations.
func TestDigestVectors(t *testing.T) {
	for _, v := range []struct{ id, data, want string }{
		{"V-ISCSI-1",
			"01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018 28000000 00000000 02000000 " +
				"00000000", "563a96d9"},
		{"V-ISCSI-12", hex.EncodeToString([]byte("SendTargets=All\x00")), "b4e313bf"},
		{"V-ISCSI-13", "aabbccddee000000", "397413d0"},
		// RFC 7143, appendix A.4.
		{"32 bytes of 0", strings.Repeat("00", 32), "aa36918a"},
		{"32 bytes of ff", strings.Repeat("ff", 32), "43aba862"},
	} {
		t.Run(v.id, func(t *testing.T) {
			b, err := hex.DecodeString(strings.ReplaceAll(v.data, " ", ""))
			if err != nil {
				t.Fatal(err)
			}
			// On the way out: a PDU whose data segment is b without its padding.
			c := &Conn{}
			h, _ := c.header(0)
			h.Reset(pdu.NOPIn, pdu.FlagF)
			n := len(b)
			if v.id == "V-ISCSI-13" {
				n = 5
			}
			c.trailer(h, b[:n], digests{data: true})
			if got := hex.EncodeToString(c.tx.out.Slab[pdu.BHSLen+len(b):]); got != v.want {
				t.Errorf("data digest %s, want %s", got, v.want)
			}
			if len(b) == pdu.BHSLen {
				h, _ := c.header(0)
				copy(h, b)
				at := len(c.tx.out.Slab)
				c.trailer(h, nil, digests{header: true, data: true})
				if got := hex.EncodeToString(c.tx.out.Slab[at:]); got != v.want { // no data digest without data
					t.Errorf("header digest %s, want %s", got, v.want)
				}
			}
		})
	}
}

// ISCSI-11.7-2: GOOD travels in the last Data-In, with residuals. Any other status travels in a SCSI Response.
func TestPhaseCollapse(t *testing.T) {
	tg := startTarget(t, func(_ *target, o *iscsi.Options) { o.MaxTransferPiece = 64 << 10 })
	c := tg.login(t)
	for _, tt := range []struct {
		name         string
		blocks, edtl int
		flags        byte
		residual     uint32
	}{
		{"exact", 8, 4096, 0, 0},
		{"underflow", 1, 4096, pdu.FlagUnderflow, 4096 - blockLen}, // ISCSI-11.4-5
		{"overflow", 8, 512, pdu.FlagOverflow, 4096 - 512},         // ISCSI-11.4-4
		{"several pieces", 300, 300 * blockLen, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			// Data that is being sent when the status comes has to leave without it.
			for try := 1; ; try++ {
				h := c.scsi(pdu.FlagR, cdb.Read16(0, uint32(tt.blocks)), tt.edtl)
				c.send(h, nil)
				data, _, status := c.readData(h, 256<<10)
				if status.Status() != 0 || len(data) != min(tt.edtl, tt.blocks*blockLen) {
					t.Fatalf("status %#x after %d bytes", status.Status(), len(data))
				}
				if got := status.Flags() & (pdu.FlagOverflow | pdu.FlagUnderflow); got != tt.flags ||
					status.Residual() != tt.residual {
					t.Fatalf("flags %#x, residual %d", got, status.Residual())
				}
				if status.Opcode() == pdu.DataIn {
					break
				}
				if try == 100 {
					t.Fatalf("the status is always in a %v", status.Opcode())
				}
			}
		})
	}
	t.Run("no data", func(t *testing.T) { // ISCSI-11.3-3
		rsp := c.command(pdu.FlagR, cdb.Read16(0, 1), 0)
		if rsp.h.Status() != 0 || rsp.h.Flags()&pdu.FlagOverflow == 0 || rsp.h.Residual() != blockLen ||
			rsp.h.ExpDataSN() != 0 {
			t.Fatalf("response %x", []byte(rsp.h))
		}
	})
	t.Run("CHECK CONDITION", func(t *testing.T) {
		c.wantSense(c.command(pdu.FlagR, cdb.Read16(storeLen/blockLen, 1), blockLen), 0x05, 0x21, 0)
	})
	t.Run("ISCSI-11.4-9 error after data", func(t *testing.T) {
		tg.store.Hook(func(op backendtest.Op, off, _ int64) error {
			if op == backendtest.ReadAt && off >= 128<<10 {
				return errors.New("unreadable")
			}
			return nil
		})
		h := c.scsi(pdu.FlagR, cdb.Read16(0, 512), 512*blockLen)
		c.send(h, nil)
		data, pdus, status := c.readData(h, 256<<10)
		if status.Opcode() != pdu.SCSIResponse || status.Status() != 2 || len(data) != 128<<10 {
			t.Fatalf("%v with status %d after %d bytes", status.Opcode(), status.Status(), len(data))
		}
		if pdus != 16 || status.ExpDataSN() != 16 {
			t.Fatalf("%d Data-In, ExpDataSN %d", pdus, status.ExpDataSN())
		}
	})
}

// The numbers are right however the answers to many commands interleave (ISCSI-4.2.2.2-1, ISCSI-4.2.5-1).
func TestManyCommands(t *testing.T) {
	tg := startTarget(t)
	c := tg.login(t, "HeaderDigest=CRC32C", "MaxRecvDataSegmentLength=65536")
	const depth, blocks, rounds = 48, 200, 10
	type command struct {
		h     pdu.BHS
		data  []byte
		write bool
		pdus  uint32
	}
	for round := range rounds {
		open := map[uint32]*command{}
		var out []byte
		for i := range depth {
			m := &command{write: (i+round)%2 == 0, data: random(blocks * blockLen)}
			if m.write {
				m.h = c.scsi(pdu.FlagW, cdb.Write16(uint64(i*blocks), uint32(blocks)), len(m.data))
			} else {
				m.data = tg.stored(i*blocks, len(m.data))
				m.h = c.scsi(pdu.FlagR, cdb.Read16(uint64(i*blocks), uint32(blocks)), len(m.data))
			}
			open[m.h.ITT()] = m
			out = append(out, c.encode(m.h, nil, nil)...)
		}
		c.write(out)
		for len(open) > 0 {
			p := c.any()
			m := open[p.h.ITT()]
			if m == nil {
				t.Fatalf("%v with tag %#x", p.h.Opcode(), p.h.ITT())
			}
			switch p.h.Opcode() {
			case pdu.R2T:
				c.answer(m.h, p.h, m.data, 30000)
			case pdu.DataIn:
				if p.h.DataSN() != m.pdus || !bytes.Equal(m.data[p.h.BufferOffset():][:len(p.data)], p.data) {
					t.Fatalf("Data-In %d at %d", p.h.DataSN(), p.h.BufferOffset())
				}
				if m.pdus++; p.h.Flags()&pdu.FlagS != 0 {
					delete(open, p.h.ITT())
				}
			default:
				if p.h.Opcode() != pdu.SCSIResponse || p.h.Status() != 0 || p.h.ExpDataSN() != m.pdus {
					t.Fatalf("%x %x", []byte(p.h), p.data)
				}
				if m.write &&
					!bytes.Equal(tg.stored(int(binary.BigEndian.Uint64(m.h.CDB()[2:])), len(m.data)), m.data) {
					t.Fatal("what is stored is not what was written")
				}
				delete(open, p.h.ITT())
			}
		}
	}
}

// quiet fails if the target sends anything within a moment.
func (c *client) quiet() {
	c.tb.Helper()
	c.nc.SetReadDeadline(time.Now().Add(30 * time.Millisecond))
	var b [1]byte
	if n, err := c.nc.Read(b[:]); n > 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		c.tb.Fatalf("%d bytes, %v", n, err)
	}
}

// openWrite sends a WRITE of two bursts and returns it with its first R2T.
func (c *client) openWrite(data []byte) (cmd, r2t pdu.BHS) {
	c.tb.Helper()
	h := c.scsi(pdu.FlagW, cdb.Write16(0, uint32(len(data)/blockLen)), len(data))
	c.send(h, nil)
	return h, c.want(pdu.R2T).h
}

// ISCSI-11.8-1: the next R2T comes after F, not before. ISCSI-11.7-3: data
// segments may be empty.
func TestOneR2TAtATime(t *testing.T) {
	tg := startTarget(t)
	c := tg.login(t, "MaxBurstLength=8192", "FirstBurstLength=8192")
	data := random(16384)
	cmd, r2t := c.openWrite(data)
	if r2t.DesiredDataTransferLength() != 8192 {
		t.Fatalf("R2T for %d bytes", r2t.DesiredDataTransferLength())
	}
	c.send(dataOut(cmd.ITT(), r2t, 0, 0, false), nil)
	c.send(dataOut(cmd.ITT(), r2t, 1, 0, false), data[:4096])
	c.send(dataOut(cmd.ITT(), r2t, 2, 4096, false), data[4096:8192])
	c.quiet()
	c.send(dataOut(cmd.ITT(), r2t, 3, 8192, true), nil)
	second := c.want(pdu.R2T).h
	if second.TTT() == r2t.TTT() || second.R2TSN() != 1 || second.BufferOffset() != 8192 {
		t.Fatalf("second R2T %x", []byte(second))
	}
	c.answer(cmd, second, data, 3000)
	if rsp := c.want(pdu.SCSIResponse); rsp.h.Status() != 0 || !bytes.Equal(tg.stored(0, len(data)), data) {
		t.Fatalf("response %x", []byte(rsp.h))
	}
}

// severalR2Ts lets a target have so many R2Ts outstanding.
func severalR2Ts(n uint16) func(*target, *iscsi.Options) {
	return func(_ *target, o *iscsi.Options) { o.Limits.MaxOutstandingR2T = n }
}

// openR2Ts begins to write data, and returns the n R2Ts that come at once.
func (c *client) openR2Ts(data []byte, n int) (cmd pdu.BHS, r2ts []pdu.BHS) {
	c.tb.Helper()
	cmd, first := c.openWrite(data)
	r2ts = []pdu.BHS{first}
	for i := 1; i < n; i++ {
		h := c.want(pdu.R2T).h
		if h.R2TSN() != uint32(i) || h.BufferOffset() != uint32(i)*8192 || h.TTT() == r2ts[i-1].TTT() || h.ITT() != cmd.ITT() {
			c.tb.Fatalf("R2T %d is %x", i, []byte(h))
		}
		r2ts = append(r2ts, h)
	}
	return cmd, r2ts
}

// RFC 7143, section 13.17: as many R2Ts are outstanding as was agreed on, and each answer brings the next one.
func TestSeveralR2Ts(t *testing.T) {
	tg := startTarget(t, severalR2Ts(4))
	c := tg.login(t, "MaxBurstLength=8192", "FirstBurstLength=8192", "MaxOutstandingR2T=3")
	data := random(5*8192 + 1024)
	for range 3 { // the tags of one task do not mix with those of the next
		cmd, r2ts := c.openR2Ts(data, 3)
		c.quiet()
		for i := 0; len(r2ts) > 0; i++ {
			c.answer(cmd, r2ts[0], data, 3000)
			r2ts = r2ts[1:]
			if i < 3 {
				next := c.want(pdu.R2T).h
				if want := min(8192, len(data)-(i+3)*8192); next.R2TSN() != uint32(i+3) || int(next.DesiredDataTransferLength()) != want {
					t.Fatalf("R2T %x", []byte(next))
				}
				r2ts = append(r2ts, next)
			}
		}
		rsp := c.want(pdu.SCSIResponse)
		if rsp.h.Status() != 0 || !bytes.Equal(tg.stored(0, len(data)), data) {
			t.Fatalf("response %x", []byte(rsp.h))
		}
		data = random(len(data))
	}
	// A peer that agrees on less gets less.
	tg.login(t, "MaxBurstLength=8192", "FirstBurstLength=8192").writeAll(0, data, 0, 4096, 8192)
}

// A command that fails while R2Ts are outstanding ends when the initiator is done with all of them (ISCSI-7.3-1), and
// one that is aborted takes no more data.
func TestSeveralR2TsEndEarly(t *testing.T) {
	for _, how := range []string{"failed", "aborted"} {
		t.Run(how, func(t *testing.T) {
			tg := startTarget(t, severalR2Ts(3))
			stop := tg.neighbour(t)
			c := tg.login(t, "MaxBurstLength=8192", "FirstBurstLength=8192", "MaxOutstandingR2T=3")
			data := random(5 * 8192)
			before := tg.stored(0, len(data))
			cmd, r2ts := c.openR2Ts(data, 3)
			if how == "failed" {
				bad := dataOut(cmd.ITT(), r2ts[0], 1, 0, false) // a gap
				c.send(bad, data[:512])
				c.wantReject(pdu.RejectProtocolError, bad)
				c.send(dataOut(cmd.ITT(), r2ts[0], 2, 512, true), data[512:8192])
				c.quiet()
				c.answer(cmd, r2ts[1], data, 8192)
				c.quiet()
				c.answer(cmd, r2ts[2], data, 8192)
				c.wantSense(c.want(pdu.SCSIResponse), 0x0b, 0x47, 0x05)
			} else {
				c.answer(cmd, r2ts[0], data, 8192)
				c.want(pdu.R2T) // the fourth
				c.tmf(pdu.AbortTask, cmd.ITT(), cmd.CmdSN())
				c.wantFunctionComplete()
				c.answer(cmd, r2ts[1], data, 8192) // was on its way
				c.answer(cmd, r2ts[2], data, 8192)
				c.quiet()
			}
			if !bytes.Equal(tg.stored(0, len(data)), before) {
				t.Error("a command that has ended has written")
			}
			next := random(4 * 8192)
			again, r2ts2 := c.openR2Ts(next, 3)
			for i := range 4 {
				c.answer(again, r2ts2[i], next, 8192)
				if i == 0 {
					r2ts2 = append(r2ts2, c.want(pdu.R2T).h)
				}
			}
			if rsp := c.want(pdu.SCSIResponse); rsp.h.Status() != 0 || !bytes.Equal(tg.stored(0, len(next)), next) {
				t.Fatalf("response %x", []byte(rsp.h))
			}
			stop()
		})
	}
}

// A Data-Out that does not fit its R2T is rejected (ISCSI-11.17-1). Its command fails at the end
// of the sequence (ISCSI-7.3-1, ISCSI-11.4-2) and writes nothing. The session continues.
func TestBadDataOut(t *testing.T) {
	for _, tt := range []struct {
		name      string
		bad       func(h pdu.BHS) (size int)
		digest    bool // the data digest is wrong
		reason    pdu.RejectReason
		asc, ascq byte
	}{
		// ISCSI-4.2.5-6
		{"LUN of another", func(h pdu.BHS) int { h.SetLUN([8]byte{0, 1}); return 1024 }, false,
			pdu.RejectProtocolError, 0x0c, 0x0d},
		{"tag of another", func(h pdu.BHS) int { h.SetITT(h.ITT() + 1); return 1024 }, false,
			pdu.RejectProtocolError, 0x0c, 0x0d},
		// ISCSI-7.8-3
		{"DataSN gap", func(h pdu.BHS) int { h.SetDataSN(2); return 1024 }, false, pdu.RejectProtocolError, 0x47, 0x05},
		// ISCSI-11.7-4
		{"offset beyond", func(h pdu.BHS) int { h.SetBufferOffset(0xfffffff0); return 1024 }, false,
			pdu.RejectInvalidField, 0x0c, 0x0d},
		{"offset before", func(h pdu.BHS) int { h.SetBufferOffset(0); return 1024 }, false, pdu.RejectInvalidField,
			0x0c, 0x0d},
		{"too long", func(pdu.BHS) int { return 8192 }, false, pdu.RejectInvalidField, 0x0c, 0x0d},
		{"much too long", func(pdu.BHS) int { return 200000 }, false, pdu.RejectInvalidField, 0x0c, 0x0d},
		// ISCSI-11.8-3
		{"F early", func(h pdu.BHS) int { h.SetFlags(pdu.FlagF); return 1024 }, false, pdu.RejectProtocolError, 0x0c,
			0x0d},
		// ISCSI-7.8-2
		{"data digest", func(pdu.BHS) int { return 1024 }, true, pdu.RejectDataDigest, 0x47, 0x05},
		{"data digest with F", func(h pdu.BHS) int { h.SetFlags(pdu.FlagF); return 7168 }, true,
			pdu.RejectDataDigest, 0x47, 0x05},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tg := startTarget(t)
			c := tg.login(t, "MaxBurstLength=8192", "FirstBurstLength=8192", "DataDigest=CRC32C")
			before := tg.stored(0, 16384)
			data := random(16384)
			cmd, r2t := c.openWrite(data)
			c.send(dataOut(cmd.ITT(), r2t, 0, 0, false), data[:1024])
			h := dataOut(cmd.ITT(), r2t, 1, 1024, false)
			n := tt.bad(h)
			c.badData = tt.digest
			c.send(h, make([]byte, n))
			var rsp reply
			if h.Final() {
				rsp = c.wantRejectAndResponse(tt.reason, h)
			} else {
				c.wantReject(tt.reason, h)
				c.quiet()
				c.send(dataOut(cmd.ITT(), r2t, h.DataSN()+1, 2048, true), data[2048:8192])
				rsp = c.want(pdu.SCSIResponse)
			}
			c.wantSense(rsp, 0x0b, tt.asc, tt.ascq)
			if rsp.h.ITT() != cmd.ITT() || !bytes.Equal(tg.stored(0, 16384), before) {
				t.Fatal("the command has written")
			}
			// The tag of the R2T is gone.
			late := dataOut(cmd.ITT(), r2t, 0, 0, true)
			c.send(late, data[:512])
			c.wantReject(pdu.RejectInvalidField, late)
			c.writeAll(0, data, 0, 8192, 8192)
		})
	}
	t.Run("unknown Target Transfer Tags", func(t *testing.T) {
		tg := startTarget(t)
		c := tg.login(t)
		for _, ttt := range []uint32{0, 1, 0xffff, 0x10000, 0xfffffffe, 0x1234ffff} {
			h := dataOut(77, nil, 0, 0, true)
			h.SetTTT(ttt)
			c.send(h, random(20000))
			c.wantReject(pdu.RejectInvalidField, h)
		}
		c.read(0, 8, 256<<10)
	})
}

// ISCSI-13.12-1: the target obeys a new MaxRecvDataSegmentLength at once.
func TestRenegotiation(t *testing.T) {
	tg := startTarget(t)
	c := tg.login(t, "MaxRecvDataSegmentLength=512")
	for _, limit := range []int{512, 65536, 1024} {
		c.limitSegments(limit)
		h := c.scsi(pdu.FlagR, cdb.Read16(0, 256), 256*blockLen)
		c.send(h, nil)
		if _, pdus, _ := c.readData(h, 256<<10); pdus != 256*blockLen/limit {
			t.Fatalf("%d Data-In with a limit of %d", pdus, limit)
		}
	}
}

// tmf sends an immediate task management function.
func (c *client) tmf(function byte, rtt, refCmdSN uint32) {
	c.tb.Helper()
	h := c.Request(pdu.TaskMgmtReq, pdu.FlagF|function, true)
	h.SetReferencedTaskTag(rtt)
	h.SetRefCmdSN(refCmdSN)
	c.send(h, nil)
}

func (c *client) wantFunctionComplete() {
	c.tb.Helper()
	if p := c.want(pdu.TaskMgmtResp); p.h.Response() != pdu.FunctionComplete {
		c.tb.Fatalf("response %d", p.h.Response())
	}
}

// A task that waits for data of the initiator can be aborted, whether the data comes or not.
func TestAbortWithOpenR2T(t *testing.T) {
	tg := startTarget(t)
	before := tg.stored(0, 16384)
	data := random(16384)
	t.Run("ISCSI-10.7-1 ABORT TASK", func(t *testing.T) {
		c := tg.login(t)
		cmd, r2t := c.openWrite(data)
		c.tmf(pdu.AbortTask, cmd.ITT(), cmd.CmdSN())
		c.wantFunctionComplete()
		c.send(dataOut(cmd.ITT(), r2t, 0, 0, true), data) // dropped without a Reject
		c.quiet()
		c.read(0, 1, 256<<10)
	})
	t.Run("ISCSI-11.4-2 LOGICAL UNIT RESET of another within a PDU", func(t *testing.T) {
		c := tg.login(t)
		cmd, r2t := c.openWrite(data)
		b := c.encode(dataOut(cmd.ITT(), r2t, 0, 0, false), nil, data)
		c.write(b[:9000])
		c.quiet()
		other := tg.login(t) // this connection cannot send anything now
		other.tmf(pdu.LogicalUnitReset, pdu.ReservedTag, 0)
		other.wantFunctionComplete()
		c.write(b[9000:])
		c.send(dataOut(cmd.ITT(), r2t, 1, 16384, true), nil)
		c.wantAborted(cmd, 16384)
		c.wantSense(c.command(0, cdb.TestUnitReady, 0), 0x06, 0x29, 0x03)
	})
	t.Run("ISCSI-4.2.3.3-2 ABORT TASK SET waits for the data", func(t *testing.T) {
		c := tg.login(t)
		cmd, r2t := c.openWrite(data)
		c.tmf(pdu.AbortTaskSet, pdu.ReservedTag, 0)
		c.quiet()
		c.answer(cmd, r2t, data, 8192)
		c.wantFunctionComplete()
		late := dataOut(cmd.ITT(), r2t, 0, 0, true)
		c.send(late, nil)
		c.wantReject(pdu.RejectInvalidField, late)
	})
	t.Run("LOGICAL UNIT RESET without the data", func(t *testing.T) {
		c := tg.login(t)
		cmd, r2t := c.openWrite(data)
		c.tmf(pdu.LogicalUnitReset, pdu.ReservedTag, 0)
		c.wantFunctionComplete()
		c.send(dataOut(cmd.ITT(), r2t, 0, 0, true), data)
		c.quiet()
	})
	t.Run("ABORT TASK SET, and the data stops within a PDU", func(t *testing.T) {
		c := tg.login(t)
		cmd, r2t := c.openWrite(data)
		c.tmf(pdu.AbortTaskSet, pdu.ReservedTag, 0)
		c.quiet()
		b := c.encode(dataOut(cmd.ITT(), r2t, 0, 0, false), nil, data[:12000])
		c.write(b[:9500])
		time.Sleep(2200 * time.Millisecond) // LogoutWait is 2 s; the target must not give up the data
		c.quiet()
		c.write(b[9500:])
		c.wantFunctionComplete()
		c.send(dataOut(cmd.ITT(), r2t, 1, 12000, true), data[12000:]) // dropped without a Reject
		c.quiet()
	})
	t.Run("ISCSI-11.14-1 logout", func(t *testing.T) {
		c := tg.login(t)
		c.openWrite(data)
		h := make(pdu.BHS, pdu.BHSLen)
		h.Reset(pdu.LogoutReq, pdu.FlagF)
		h.SetImmediate()
		h.SetITT(1)
		h.SetCmdSN(c.CmdSN)
		c.send(h, nil)
		if p := c.want(pdu.LogoutResp); p.h.Response() != pdu.LogoutSuccess {
			t.Fatalf("response %d", p.h.Response())
		}
		c.wantClosed() // ISCSI-11.14-3
	})
	if !bytes.Equal(tg.stored(0, 16384), before) {
		t.Error("an aborted command has written")
	}
}

// The answer to a ping waits for at most a few MiB of data, however much data is queued.
func TestPingUnderLoad(t *testing.T) {
	const reads, each, rate = 40, 1 << 20, 64 << 20
	tg := startTarget(t, func(tg *target, _ *iscsi.Options) {
		tg.wrap = func(nc net.Conn) net.Conn { return testkit.SlowConn{Conn: nc, Rate: rate} }
	})
	c := tg.login(t, "MaxRecvDataSegmentLength=262144")
	for range reads {
		c.send(c.scsi(pdu.FlagR, cdb.Read16(0, uint32(each/blockLen)), each), nil)
	}
	c.want(pdu.DataIn)
	testkit.Eventually(t, "most READs have their data", func() bool { return tg.node.Stats().BuffersOut >= reads-12 })
	c.send(c.nopOut(), nil)
	sent := time.Now()
	before, after, statuses := 0, 0, 0
	var took time.Duration
	for statuses < reads {
		p := c.any()
		switch {
		case p.h.Opcode() == pdu.NOPIn:
			took = time.Since(sent)
		case took == 0:
			before += len(p.data)
		default:
			after += len(p.data)
		}
		if p.h.Opcode() == pdu.SCSIResponse || p.h.Opcode() == pdu.DataIn && p.h.Flags()&pdu.FlagS != 0 {
			statuses++
		}
	}
	// At most 4 MiB were queued, in addition to what is in the buffers of TCP.
	if took == 0 || before > 18<<20 || after < 18<<20 {
		t.Errorf("answer after %v and %d bytes; %d came after it", took, before, after)
	}
}

// SendTargets over plain TCP (ISCSI-C-1).
func TestDiscovery(t *testing.T) {
	tg := startTarget(t)
	c := tg.connect(t)
	c.send(pdu.LoginRequest{Transit: true, CSG: 1, NSG: 3, CmdSN: 1}.Append(nil),
		[]byte("InitiatorName=iqn.2026-11.io.github:test\x00SessionType=Discovery\x00"))
	c.want(pdu.LoginResp)
	h := make(pdu.BHS, pdu.BHSLen)
	h.Reset(pdu.TextReq, pdu.FlagF)
	h.SetITT(1)
	h.SetTTT(pdu.ReservedTag)
	h.SetCmdSN(1)
	c.send(h, []byte("SendTargets=All\x00"))
	want := "TargetName=" + targetName + "\x00TargetAddress=" + tg.l.Addr().String() + ",1\x00"
	if p := c.want(pdu.TextResp); string(p.data) != want {
		t.Fatalf("%q", p.data)
	}
	c.nc.Close()
}

// ISCSI-7.12-2, ISCSI-6.4-3: a negotiation that fails in the full feature phase has no effect. An answer with F=1
// asks for no further request.
func TestFailedNegotiation(t *testing.T) {
	tg := startTarget(t)
	c := tg.login(t)
	longest := func() (size int) {
		h := c.scsi(pdu.FlagR, cdb.Read16(0, 32), 32*blockLen)
		c.send(h, nil)
		for {
			p := c.any()
			size = max(size, len(p.data))
			if p.h.Opcode() == pdu.SCSIResponse || p.h.Flags()&pdu.FlagS != 0 {
				return size
			}
		}
	}
	c.wantReject(pdu.RejectProtocolError, c.text("MaxRecvDataSegmentLength=1024\x00MaxBurstLength=512\x00"))
	if n := longest(); n != 8192 {
		t.Errorf("Data-In of %d bytes after a failure", n)
	}
	c.text("MaxRecvDataSegmentLength=1024\x00")
	if p := c.want(pdu.TextResp); p.h.Flags() != pdu.FlagF || len(p.data) != 0 {
		t.Errorf("%x %q", []byte(p.h), p.data)
	}
	if n := longest(); n != 1024 {
		t.Errorf("Data-In of %d bytes, agreed were 1024", n)
	}
}

// Immediate data that is longer than the receive window stays where it was received until the store has it. PDUs that come meanwhile go elsewhere.
func TestLongImmediateData(t *testing.T) {
	tg := startTarget(t)
	c := tg.login(t, "ImmediateData=Yes", "FirstBurstLength=65536")
	const n, blocks = 8, 65536 / blockLen
	for round := range 3 { // slots are used again
		all, hold := random(n*65536), make(chan struct{})
		tg.store.Hook(func(op backendtest.Op, _, _ int64) error {
			if op == backendtest.WriteAt {
				<-hold
			}
			return nil
		})
		for i := range n {
			c.send(c.scsi(pdu.FlagW, cdb.Write10(uint32(i*blocks), blocks), 65536), all[i*65536:][:65536])
		}
		testkit.Eventually(t, "all WRITEs are in the store", func() bool { return tg.store.Calls(backendtest.WriteAt) == (round+1)*n })
		close(hold)
		for range n {
			if p := c.want(pdu.SCSIResponse); p.h.Status() != 0 {
				t.Fatalf("WRITE: %x", []byte(p.h))
			}
		}
		if !bytes.Equal(tg.stored(0, len(all)), all) {
			t.Fatal("the LUN does not hold what was written")
		}
	}
}
