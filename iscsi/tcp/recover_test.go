package tcp

import (
	"bytes"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// level1 allows ErrorRecoveryLevel 1.
func level1(_ *target, o *iscsi.Options) { o.Limits.ErrorRecoveryLevel = 1 }

// hasty makes the target wait only briefly for acknowledgements.
func hasty(_ *target, o *iscsi.Options) { o.AckWait = 200 * time.Millisecond }

// login1 logs in at ErrorRecoveryLevel 1 with all digests. From then on only ack acknowledges.
func (tg *target) login1(tb testing.TB, keys ...string) *client {
	tb.Helper()
	c := tg.login(tb, append([]string{"ErrorRecoveryLevel=1", "HeaderDigest=CRC32C", "DataDigest=CRC32C"}, keys...)...)
	if !c.header || !c.data {
		tb.Fatal("no digests")
	}
	c.acksLate = true
	c.ack()
	return c
}

func (c *client) snack(kind byte, itt, tag, begin, length uint32) pdu.BHS {
	c.tb.Helper()
	h := make(pdu.BHS, pdu.BHSLen)
	h.Reset(pdu.SNACK, pdu.FlagF|kind)
	h.SetITT(itt)
	h.SetTTT(tag)
	h.SetExpStatSN(c.ExpStatSN)
	h.SetBegRun(begin)
	h.SetRunLength(length)
	c.send(h, nil)
	return h
}

// again receives a PDU that is a copy of an earlier one, and so no new status.
func (c *client) again() reply {
	c.tb.Helper()
	p, err := c.next()
	if err != nil {
		c.tb.Fatalf("no PDU: %v", err)
	}
	return p
}

// sameAgain receives a copy of p (ISCSI-11.16-2, ISCSI-11.4-10). Only ExpCmdSN and MaxCmdSN may be newer.
func (c *client) sameAgain(p reply) {
	c.tb.Helper()
	got := c.again()
	h := bytes.Clone(got.h)
	copy(h[28:36], p.h[28:36])
	if got.h.Opcode() == pdu.R2T {
		copy(h[24:28], p.h[24:28]) // StatSN
	}
	if !bytes.Equal(h, p.h) || !bytes.Equal(got.data, p.data) {
		c.tb.Fatalf("a copy of\n%x %d bytes is\n%x %d bytes", []byte(p.h), len(p.data), []byte(got.h), len(got.data))
	}
	if got.h.ExpCmdSN() != c.expCmdSN || pdu.Before(got.h.MaxCmdSN(), c.maxCmdSN) {
		c.tb.Fatalf("ExpCmdSN %d, MaxCmdSN %d are not those of now", got.h.ExpCmdSN(), got.h.MaxCmdSN())
	}
}

// openRead sends a READ and returns its PDUs, the response last. It checks the A bits (ISCSI-11.7-2), and that the
// status travels alone.
func (c *client) openRead(size, burst int) (cmd pdu.BHS, pdus []reply) {
	c.tb.Helper()
	h := c.scsi(pdu.FlagR, cdb.Read16(0, uint32(size/blockLen)), size)
	c.send(h, nil)
	since := 0
	for {
		p := c.any()
		pdus = append(pdus, p)
		if p.h.Opcode() == pdu.SCSIResponse {
			return h, pdus
		}
		if p.h.Opcode() != pdu.DataIn || p.h.Flags()&pdu.FlagS != 0 || int(p.h.DataSN()) != len(pdus)-1 {
			c.tb.Fatalf("%x", []byte(p.h))
		}
		since += len(p.data)
		if asks := p.h.Flags()&pdu.FlagA != 0; asks != (p.h.TTT() != pdu.ReservedTag) ||
			asks && (!p.h.Final() || since < burst) {
			c.tb.Fatalf("A bit in %x after %d bytes", []byte(p.h), since)
		} else if asks {
			since = 0
		}
	}
}

// ack acknowledges what has come, and receives what the target sends because of that.
func (c *client) ack() {
	c.tb.Helper()
	c.ExpStatSN = c.statSN
	c.ping()
	c.ExpStatSN = c.statSN
}

// ping sends a NOP-Out and receives its answer.
func (c *client) ping() reply {
	c.tb.Helper()
	h := c.nopOut()
	c.send(h, []byte("ping"))
	for {
		p := c.any()
		if p.h.Opcode() != pdu.NOPIn {
			c.tb.Fatalf("%v instead of a NOP-In", p.h.Opcode())
		}
		if p.h.ITT() == h.ITT() {
			return p
		}
	}
}

// ISCSI-11.16-1, ISCSI-11.16-2, ISCSI-11.4-10: the target repeats sent data as often as a SNACK asks for it.
func TestDataSNACK(t *testing.T) {
	tg := startTarget(t, level1, func(_ *target, o *iscsi.Options) { o.MaxTransferPiece = 64 << 10 })
	for _, tt := range []struct {
		name  string
		keys  []string
		size  int
		burst int
	}{
		{"one PDU", nil, 4096, 1 << 20},
		{"several pieces", []string{"MaxBurstLength=262144"}, 200 << 10, 256 << 10},
		{"bursts within a piece", []string{"MaxBurstLength=16384", "FirstBurstLength=16384"}, 100 << 10, 16 << 10},
		{"bursts of no whole segments",
			[]string{"MaxBurstLength=10000", "FirstBurstLength=512", "MaxRecvDataSegmentLength=3003"}, 150 << 10,
			10000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := tg.login1(t, tt.keys...)
			cmd, pdus := c.openRead(tt.size, tt.burst)
			data, n := pdus[:len(pdus)-1], uint32(len(pdus)-1)
			for _, run := range []struct{ begin, length uint32 }{{0, 0}, {0, 1}, {n - 1, 1}, {n / 2, 0},
				{n / 3, n - n/3}, {n / 2, 1}} {
				c.snack(pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, run.begin, run.length)
				end := run.begin + run.length
				if run.length == 0 {
					end = n
				}
				for _, p := range data[run.begin:end] {
					c.sameAgain(p)
				}
			}
			for range 3 {
				c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, pdus[n].h.StatSN(), 1)
				c.sameAgain(pdus[n])
			}
			c.quiet()
			c.ack()
		})
	}
}

// ISCSI-11.16-3: a SNACK for data that was never sent, or that is acknowledged, is a protocol error. The Reject
// contains the next number.
func TestSNACKForNothing(t *testing.T) {
	tg := startTarget(t, level1)
	c := tg.login1(t, "MaxBurstLength=16384", "FirstBurstLength=16384")
	cmd, pdus := c.openRead(64<<10, 16<<10)
	status := pdus[len(pdus)-1].h
	for _, tt := range []struct {
		name          string
		kind          byte
		itt, tag      uint32
		begin, length uint32
		reason        pdu.RejectReason
		next          uint32
	}{
		{"DataSN not sent", pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 8, 1, pdu.RejectProtocolError, 8},
		{"DataSN not sent, all", pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 8, 0, pdu.RejectProtocolError, 8},
		{"run too long", pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 7, 2, pdu.RejectProtocolError, 8},
		{"run much too long", pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 7, 0xffffffff, pdu.RejectProtocolError, 8},
		{"unknown task", pdu.SNACKData, 0xabcd, pdu.ReservedTag, 0, 0, pdu.RejectProtocolError, 0},
		{"status not sent", pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, status.StatSN() + 100, 1,
			pdu.RejectProtocolError, 0},
		{"status acknowledged", pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, c.ExpStatSN - 1, 1,
			pdu.RejectProtocolError, 0},
		{"more statuses than there are", pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, status.StatSN(), 100,
			pdu.RejectProtocolError, 0},
		{"status with a tag", pdu.SNACKStatus, cmd.ITT(), pdu.ReservedTag, status.StatSN(), 1,
			pdu.RejectInvalidField, 0},
		{"DataACK with an unknown tag", pdu.SNACKDataACK, pdu.ReservedTag, 0x77777777, 1, 0,
			pdu.RejectInvalidDataAck, 0},
		{"DataACK with a slot that is not there", pdu.SNACKDataACK, pdu.ReservedTag, 0x7777fffe, 1, 0,
			pdu.RejectInvalidDataAck, 0},
		{"DataACK for what was not sent", pdu.SNACKDataACK, pdu.ReservedTag, pdus[7].h.TTT(), 9, 0,
			pdu.RejectInvalidDataAck, 0},
		{"DataACK with a run", pdu.SNACKDataACK, pdu.ReservedTag, pdus[7].h.TTT(), 1, 1, pdu.RejectInvalidField, 0},
		{"DataACK with a task", pdu.SNACKDataACK, cmd.ITT(), pdus[7].h.TTT(), 1, 0, pdu.RejectInvalidField, 0},
		{"R-Data without tag", pdu.SNACKRData, cmd.ITT(), 0, 0, 0, pdu.RejectInvalidField, 0},
		{"R-Data with the reserved tag", pdu.SNACKRData, cmd.ITT(), pdu.ReservedTag, 0, 0, pdu.RejectInvalidField, 0},
		{"R-Data with a run", pdu.SNACKRData, cmd.ITT(), 5, 1, 0, pdu.RejectInvalidField, 0},
		{"R-Data for nothing", pdu.SNACKRData, 0xabcd, 5, 0, 0, pdu.RejectProtocolError, 0},
		{"ISCSI-11-2 reserved type", 4, cmd.ITT(), pdu.ReservedTag, 0, 0, pdu.RejectProtocolError, 0},
		{"ISCSI-11-2 another reserved type", 15, cmd.ITT(), pdu.ReservedTag, 0, 0, pdu.RejectProtocolError, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			h := c.snack(tt.kind, tt.itt, tt.tag, tt.begin, tt.length)
			p := c.any()
			c.isReject(p, tt.reason, h)
			if p.h.DataSN() != tt.next { // RFC 7143, section 11.17.2
				t.Errorf("next is %d, want %d", p.h.DataSN(), tt.next)
			}
		})
	}
	t.Run("data acknowledged", func(t *testing.T) {
		c.snack(pdu.SNACKDataACK, pdu.ReservedTag, pdus[3].h.TTT(), 4, 0)
		c.quiet()
		h := c.snack(pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 3, 1)
		c.wantReject(pdu.RejectProtocolError, h)
		c.snack(pdu.SNACKDataACK, pdu.ReservedTag, pdus[1].h.TTT(), 2, 0) // no news
		c.snack(pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 0, 0)          // all data without acknowledgement
		for _, p := range pdus[4:8] {
			c.sameAgain(p)
		}
	})
	t.Run("all acknowledged", func(t *testing.T) {
		c.ack()
		h := c.snack(pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 4, 1)
		c.wantReject(pdu.RejectProtocolError, h)
		if n := tg.node.Stats().BuffersOut; n != 0 {
			t.Errorf("%d Buffers are kept", n)
		}
	})
}

// ISCSI-11.16-1: at ErrorRecoveryLevel 0 a SNACK is a protocol error, and the target keeps nothing (ISCSI-7.1.5-1).
func TestSNACKAtLevel0(t *testing.T) {
	tg := startTarget(t, level1)
	c := tg.login(t)
	h := c.scsi(pdu.FlagR, cdb.Read16(0, 8), 8*blockLen)
	c.send(h, nil)
	c.readData(h, 256<<10)
	for kind := range byte(5) {
		c.wantReject(pdu.RejectProtocolError, c.snack(kind, h.ITT(), pdu.ReservedTag, 0, 0))
	}
	if s := tg.node.Stats(); s.BuffersOut != 0 || s.TasksInFlight > 1 {
		t.Errorf("%+v", s)
	}
}

// ISCSI-11.16-2, ISCSI-4.2.2.2-2: the target keeps every numbered PDU until it is acknowledged.
func TestStatusSNACK(t *testing.T) {
	tg := startTarget(t, level1)
	c := tg.login1(t)
	var pdus []reply
	pdus = append(pdus, c.ping())
	c.send(c.scsi(0, cdb.TestUnitReady, 0), nil)
	pdus = append(pdus, c.want(pdu.SCSIResponse))
	c.send(c.scsi(pdu.FlagR, cdb.Read16(storeLen/blockLen, 1), blockLen), nil) // with sense
	pdus = append(pdus, c.want(pdu.SCSIResponse))
	c.tmf(pdu.AbortTask, 0x9999, c.CmdSN-1)
	pdus = append(pdus, c.want(pdu.TaskMgmtResp))
	c.text("SendTargets=\x00")
	pdus = append(pdus, c.want(pdu.TextResp))
	h := c.snack(pdu.SNACKData, 0x1234, pdu.ReservedTag, 0, 0)
	rej := c.any()
	c.isReject(rej, pdu.RejectProtocolError, h)
	pdus = append(pdus, rej)

	first := pdus[0].h.StatSN()
	c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, first, 0)
	for _, p := range pdus {
		c.sameAgain(p)
	}
	for i, p := range pdus {
		c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, first+uint32(i), 1)
		c.sameAgain(p)
	}
	c.ExpStatSN = first + 2
	c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, 0, 0)
	for _, p := range pdus[2:] {
		c.sameAgain(p)
	}
	h = c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, first+1, 1)
	c.wantReject(pdu.RejectProtocolError, h)
	// The StatSN of later PDUs does not change, nor that of an R2T (ISCSI-11.8-5).
	_, r2t := c.openWrite(random(4096))
	if r2t.StatSN() != c.statSN {
		t.Errorf("R2T with StatSN %d, want %d", r2t.StatSN(), c.statSN)
	}
}

// ISCSI-11.16-2: after an R-Data SNACK the target repeats all data, in PDUs of the length that the initiator
// accepts now, and then the Response with the SNACK Tag. A Status SNACK repeats that Response.
func TestRDataSNACK(t *testing.T) {
	for _, acked := range []int{0, 4, 6} {
		t.Run(fmt.Sprintf("%d acknowledged", acked), func(t *testing.T) {
			tg := startTarget(t, level1, func(_ *target, o *iscsi.Options) { o.MaxTransferPiece = 64 << 10 })
			c := tg.login1(t, "MaxBurstLength=32768", "FirstBurstLength=32768")
			const size = 100 << 10
			cmd, pdus := c.openRead(size, 32<<10)
			status := pdus[len(pdus)-1]
			var want []byte
			for _, p := range pdus[acked : len(pdus)-1] {
				want = append(want, p.data...)
			}
			if acked > 0 {
				c.snack(pdu.SNACKDataACK, pdu.ReservedTag, pdus[3].h.TTT(), uint32(acked), 0)
			}
			c.limitSegments(2048)
			for _, tag := range []uint32{77, 78} {
				c.snack(pdu.SNACKRData, cmd.ITT(), tag, 0, 0)
				var got []byte
				sn := uint32(acked)
				for {
					p := c.again()
					if p.h.Opcode() == pdu.SCSIResponse {
						if p.h.SNACKTag() != tag || p.h.StatSN() != status.h.StatSN() || p.h.ExpDataSN() != sn ||
							p.h.Status() != 0 {
							t.Fatalf("Response %x", []byte(p.h))
						}
						c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, p.h.StatSN(), 1)
						c.sameAgain(p)
						break
					}
					if p.h.Opcode() != pdu.DataIn || p.h.DataSN() != sn || len(p.data) > 2048 ||
						int(p.h.BufferOffset()) != acked*8192+len(got) {
						t.Fatalf("%x", []byte(p.h))
					}
					sn++
					got = append(got, p.data...)
				}
				if !bytes.Equal(got, want) {
					t.Fatal("the data is not the same")
				}
				// A SNACK can ask for these PDUs, too.
				c.snack(pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, sn-1, 1)
				if p := c.again(); !bytes.Equal(p.data, got[len(got)-len(p.data):]) || len(p.data) != 2048 {
					t.Fatalf("%x", []byte(p.h))
				}
			}
			c.ack()
		})
	}
}

// limitSegments declares another MaxRecvDataSegmentLength.
func (c *client) limitSegments(size int) {
	c.tb.Helper()
	c.text(fmt.Sprintf("MaxRecvDataSegmentLength=%d\x00", size))
	c.want(pdu.TextResp)
	c.limit = size
}

// SNACKs for a READ in progress repeat what has come. The rest follows with the next numbers (ISCSI-11.16-2).
func TestSNACKWithinARead(t *testing.T) {
	const size, half = 256 << 10, 128 << 10
	tg := startTarget(t, level1, func(_ *target, o *iscsi.Options) { o.MaxTransferPiece = 64 << 10 })
	if err := tg.store.WriteAt(random(size), 0); err != nil {
		t.Fatal(err)
	}
	c := tg.login1(t)
	gate := tg.store.ShutFrom(half, backendtest.ReadAt)
	h := c.scsi(pdu.FlagR, cdb.Read16(0, uint32(size/blockLen)), size)
	c.send(h, nil)
	var pdus []reply
	for range half / 8192 {
		pdus = append(pdus, c.want(pdu.DataIn))
	}
	<-gate.Entered
	c.snack(pdu.SNACKData, h.ITT(), pdu.ReservedTag, 3, 2)
	c.sameAgain(pdus[3])
	c.sameAgain(pdus[4])
	reject := c.snack(pdu.SNACKData, h.ITT(), pdu.ReservedTag, uint32(len(pdus)), 0)
	c.wantReject(pdu.RejectProtocolError, reject)
	c.limitSegments(4096)
	c.snack(pdu.SNACKRData, h.ITT(), 9, 0, 0)
	var got []byte
	sn := uint32(0)
	take := func() {
		p := c.any()
		if p.h.Opcode() != pdu.DataIn || p.h.DataSN() != sn || int(p.h.BufferOffset()) != len(got) ||
			len(p.data) > 4096 {
			t.Fatalf("%x", []byte(p.h))
		}
		sn++
		got = append(got, p.data...)
	}
	for len(got) < half {
		take()
	}
	c.quiet()
	gate.Open()
	for len(got) < size {
		take()
	}
	rsp := c.want(pdu.SCSIResponse)
	if rsp.h.SNACKTag() != 9 || rsp.h.ExpDataSN() != sn || rsp.h.Status() != 0 ||
		!bytes.Equal(got, tg.stored(0, size)) {
		t.Fatalf("%x", []byte(rsp.h))
	}
	c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, rsp.h.StatSN(), 1)
	c.sameAgain(rsp)
}

// R-Data SNACKs under load: the copies come without a gap and after what was queued.
func TestRDataUnderLoad(t *testing.T) {
	const size, reads = 1 << 20, 12
	tg := startTarget(t, level1, func(tg *target, _ *iscsi.Options) {
		tg.wrap = func(nc net.Conn) net.Conn { return testkit.SlowConn{Conn: nc, Rate: 100 << 20} }
	})
	c := tg.login1(t, "MaxRecvDataSegmentLength=65536")
	var tags []uint32
	for range reads {
		h := c.scsi(pdu.FlagR, cdb.Read16(0, uint32(size/blockLen)), size)
		c.send(h, nil)
		tags = append(tags, h.ITT())
	}
	c.want(pdu.DataIn)
	for i := 0; i < reads; i += 3 {
		c.snack(pdu.SNACKRData, tags[i], uint32(100+i), 0, 0)
	}
	tagged := map[uint32]bool{}
	for len(tagged) < reads/3 {
		p := c.again()
		switch {
		case p.h.Opcode() == pdu.SCSIResponse && p.h.Status() != 0, p.h.Opcode() == pdu.Reject:
			t.Fatalf("%x", []byte(p.h))
		case p.h.Opcode() == pdu.SCSIResponse && p.h.SNACKTag() != 0:
			if p.h.ITT() != tags[p.h.SNACKTag()-100] || p.h.ExpDataSN() != size/65536 {
				t.Fatalf("%x", []byte(p.h))
			}
			tagged[p.h.SNACKTag()] = true
		}
	}
}

// A SNACK is about its own connection (ISCSI-11.16-3). Another connection of the session has its own StatSNs and tasks.
func TestSNACKOnAnotherConnection(t *testing.T) {
	tg := startTarget(t, level1, func(_ *target, o *iscsi.Options) { o.Limits.MaxConnections = 2 })
	c := tg.login1(t, "MaxConnections=2", "MaxBurstLength=16384", "FirstBurstLength=16384")
	other := tg.connect(t)
	other.isid, other.tsih, other.cid, other.CmdSN, other.ITT = c.isid, c.tsih, 1, c.CmdSN, 0x8000
	other.login("HeaderDigest=CRC32C", "DataDigest=CRC32C")
	other.acksLate = true
	other.ack()
	gate := tg.store.ShutFrom(1<<20, backendtest.ReadAt)
	defer gate.Open()
	going := c.scsi(pdu.FlagR, cdb.Read16(2048, 8), 4096)
	c.send(going, nil)
	<-gate.Entered
	cmd, pdus := c.openRead(64<<10, 16<<10)
	for _, h := range []pdu.BHS{cmd, going} {
		other.wantReject(pdu.RejectProtocolError, other.snack(pdu.SNACKData, h.ITT(), pdu.ReservedTag, 0, 0))
		other.wantReject(pdu.RejectProtocolError, other.snack(pdu.SNACKRData, h.ITT(), 5, 0, 0))
	}
	other.wantReject(pdu.RejectInvalidDataAck, other.snack(pdu.SNACKDataACK, pdu.ReservedTag, pdus[7].h.TTT(), 8, 0))
	c.snack(pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 7, 1)
	c.sameAgain(pdus[7])
}

// PDUs get lost at random in both directions, under load. The data that is read is the data that was written.
func TestLossyStream(t *testing.T) {
	tg := startTarget(t, level1, func(_ *target, o *iscsi.Options) { o.MaxTransferPiece = 64 << 10 })
	c := tg.login1(t, "MaxBurstLength=65536", "FirstBurstLength=65536")
	want := random(256 << 10)
	lose := func(n int) bool { return (n*2654435761>>7)%5 == 0 }
	lost, rejected := 0, 0
	// Write, with every fifth Data-Out spoiled.
	h := c.scsi(pdu.FlagW, cdb.Write16(0, uint32(len(want)/blockLen)), len(want))
	c.send(h, nil)
	for n := 0; ; {
		p := c.any()
		if p.h.Opcode() == pdu.Reject {
			rejected++
			continue
		}
		if p.h.Opcode() == pdu.SCSIResponse {
			if p.h.Status() != 0 {
				t.Fatalf("%x %x", []byte(p.h), p.data)
			}
			break
		}
		off, end := p.h.BufferOffset(), p.h.BufferOffset()+p.h.DesiredDataTransferLength()
		for sn := uint32(0); off < end; sn++ {
			k := min(4096, end-off)
			d := dataOut(h.ITT(), p.h, sn, off, off+k == end)
			if n++; lose(n) {
				c.badData = true
				lost++
			}
			c.send(d, want[off:off+k])
			off += k
		}
	}
	if lost == 0 || !bytes.Equal(tg.stored(0, len(want)), want) {
		t.Fatalf("%d lost; the LUN does not hold what was written", lost)
	}
	for ; rejected < lost; rejected++ { // a Reject may come later than the Response
		c.want(pdu.Reject)
	}
	// Read, with a SNACK for every fifth Data-In as if it was lost.
	h = c.scsi(pdu.FlagR, cdb.Read16(0, uint32(len(want)/blockLen)), len(want))
	h.SetExpStatSN(c.ExpStatSN)
	c.send(h, nil)
	got := make([]byte, len(want))
	var holes []uint32
	for n := 0; ; n++ {
		p := c.any()
		if p.h.Opcode() == pdu.SCSIResponse {
			break
		}
		if lose(n) {
			holes = append(holes, p.h.DataSN())
			continue
		}
		copy(got[p.h.BufferOffset():], p.data)
	}
	for n := 0; len(holes) > 0; n++ {
		c.snack(pdu.SNACKData, h.ITT(), pdu.ReservedTag, holes[0], 1)
		p := c.again()
		if p.h.DataSN() != holes[0] {
			t.Fatalf("%x", []byte(p.h))
		}
		if !lose(n) {
			copy(got[p.h.BufferOffset():], p.data)
			holes = holes[1:]
		}
	}
	if !bytes.Equal(got, want) {
		t.Fatal("what is read is not what was written")
	}
	c.ack()
}

// wantData receives a Data-In. Before it only NOP-Ins may come, which ask for acknowledgements.
func (c *client) wantData() {
	c.tb.Helper()
	p := c.any()
	for p.h.Opcode() == pdu.NOPIn {
		p = c.any()
	}
	if p.h.Opcode() != pdu.DataIn {
		c.tb.Fatalf("%x", []byte(p.h))
	}
}

// Connections end while the target keeps something or waits. startTarget checks that nothing remains.
func TestLostConnectionsAtLevel1(t *testing.T) {
	tg := startTarget(t, level1, func(_ *target, o *iscsi.Options) { o.ConnectionMemory = 4 << 20 })
	for name, f := range map[string]func(c *client){
		"kept data": func(c *client) { c.openRead(1<<20, 1<<20) },
		"waiting for acknowledgements": func(c *client) {
			for range 20 {
				c.send(c.scsi(pdu.FlagR, cdb.Read16(0, 2048), 1<<20), nil)
			}
			c.wantData()
		},
		"SNACKs whose answers the initiator does not read": func(c *client) {
			cmd, _ := c.openRead(1<<20, 1<<20)
			for range 200 {
				c.snack(pdu.SNACKData, cmd.ITT(), pdu.ReservedTag, 0, 0)
				c.snack(pdu.SNACKRData, cmd.ITT(), 5, 0, 0)
				c.snack(pdu.SNACKStatus, pdu.ReservedTag, pdu.ReservedTag, 0, 0)
			}
		},
		"recovery R2T": func(c *client) {
			cmd, r2t := c.openWrite(random(8192))
			c.badData = true
			c.send(dataOut(cmd.ITT(), r2t, 0, 0, true), random(8192))
			c.any()
		},
		"ABORT TASK with kept data": func(c *client) {
			h := c.scsi(pdu.FlagR, cdb.Read16(0, 16384), 8<<20)
			c.send(h, nil)
			c.wantData()
			c.tmf(pdu.AbortTask, h.ITT(), h.CmdSN())
			for c.any().h.Opcode() != pdu.TaskMgmtResp {
			}
			s := c.snack(pdu.SNACKData, h.ITT(), pdu.ReservedTag, 0, 1)
			p := c.any()
			for p.h.Opcode() == pdu.NOPIn {
				p = c.any()
			}
			c.isReject(p, pdu.RejectProtocolError, s)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := tg.login1(t, "MaxBurstLength=1048576")
			f(c)
			c.nc.Close()
		})
	}
}
