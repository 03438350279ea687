package iscsi

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi/keys"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

const (
	readF  = pdu.FlagF | pdu.FlagR
	writeF = pdu.FlagF | pdu.FlagW
)

// sinkOf returns what a READ has put into the initiator's memory.
func (tc *testConn) sinkOf(h pdu.BHS) []byte {
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	return tc.m.sink[h.ITT()]
}

// stored returns what the medium has at a block.
func (n *testNode) stored(lba, octets int) []byte {
	b := make([]byte, octets)
	if err := n.store.Store.ReadAt(b, int64(lba)*blockLen); err != nil {
		n.tb.Fatal(err)
	}
	return b
}

// fill gives the medium a pattern.
func (n *testNode) fill() {
	if err := n.store.Store.WriteAt(pattern(storeLen, 99), 0); err != nil {
		n.tb.Fatal(err)
	}
}

// The data of a READ goes in pieces, in order, and its response follows.
func TestRead(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		n.fill()
		tc := n.connect().login()
		for _, blocks := range []int{1, 8, 9, 2048, 2049, 5000} {
			tc.m.mu.Lock()
			tc.m.puts = nil
			flushes := tc.m.flushes
			tc.m.mu.Unlock()
			size := blocks * blockLen
			h := tc.command(readF, uint32(size), cdb.Read10(3, uint16(blocks)), nil)
			p := tc.wantStatus(h, 0) // ISER-3.3-5, ISER-7.3.2-2
			wantResidual(t, p, 0, 0)
			// ISER-7.3.2-10: all data is there when the response is
			if !bytes.Equal(tc.sinkOf(h), n.stored(3, size)) {
				t.Errorf("%d blocks: wrong data", blocks)
			}
			pieces := (size + 1<<20 - 1) >> 20
			tc.m.mu.Lock()
			// ISER-1.5.3-1, ISER-9.5.2-2: each piece leaves when it is available
			if len(tc.m.puts) != pieces || tc.m.flushes-flushes != pieces {
				t.Errorf("%d blocks: PutData %v in %d Flushes", blocks, tc.m.puts, tc.m.flushes-flushes)
			}
			for i, p := range tc.m.puts {
				if p[0] != i<<20 {
					t.Errorf("%d blocks: PutData %v", blocks, tc.m.puts)
				}
			}
			tc.m.mu.Unlock()
			if p.h.ExpDataSN() != uint32(pieces) { // ISCSI-11.4-9
				t.Errorf("%d blocks: ExpDataSN %d", blocks, p.h.ExpDataSN())
			}
		}
		tc.logout()
	})
}

// The target fetches what is not there as immediate data, once and in order.
func TestWrite(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		for _, c := range []struct {
			blocks, immediate int
			gets              [][2]int
		}{
			{1, 512, nil}, // ISER-1.5.1-1: all of it is there
			{8, 4096, nil},
			{16, 8192, nil},
			// ISER-1.5.4-1
			{8, 0, [][2]int{{0, 4096}}},
			{8, 512, [][2]int{{512, 3584}}},
			{8, 4095, [][2]int{{4095, 1}}},
			{128, 8192, [][2]int{{8192, 65536 - 8192}}},
			{2048, 8192, [][2]int{{8192, 1<<20 - 8192}}},
			{5000, 8192, [][2]int{{8192, 1<<20 - 8192}, {1 << 20, 1 << 20}, {2 << 20, 5000*512 - 2<<20}}},
		} {
			tc.m.mu.Lock()
			tc.m.getRanges = nil
			tc.m.mu.Unlock()
			size := c.blocks * blockLen
			h := tc.scsi(writeF, uint32(size), cdb.Write10(7, uint16(c.blocks)))
			tc.write(h, pattern(size, h.ITT())[:c.immediate]) // ISER-9.5.1-1
			p := tc.wantStatus(h, 0)                          // ISER-9.5.1-4
			wantResidual(t, p, 0, 0)
			if !bytes.Equal(n.stored(7, size), pattern(size, h.ITT())) {
				t.Errorf("%d blocks, %d immediate: wrong data", c.blocks, c.immediate)
			}
			tc.m.mu.Lock()
			// ISCSI-4.2.5-5: nothing is fetched twice
			if !slices.Equal(tc.m.getRanges, c.gets) || tc.m.unsol[h.ITT()] != uint32(c.immediate) {
				t.Errorf("%d blocks, %d immediate: fetched %v, unsolicited %d", c.blocks, c.immediate, tc.m.getRanges,
					tc.m.unsol[h.ITT()])
			}
			tc.m.mu.Unlock()
			if p.h.ExpDataSN() != uint32(len(c.gets)) {
				t.Errorf("ExpDataSN %d", p.h.ExpDataSN())
			}
		}
		tc.logout()
	})
}

// The response has the residual count, and the target never moves more data than the initiator
// expects (ISER-1.5.1-2). FlagOverflow is ISCSI-11.4-4, FlagUnderflow ISCSI-11.4-5.
func TestResiduals(t *testing.T) {
	for _, c := range []struct {
		name     string
		flags    byte
		edtl     uint32
		cdb      [16]byte
		residual byte
		n        uint32
		status   byte
	}{
		{"read 8, expect 4", readF, 4 * blockLen, cdb.Read10(0, 8), pdu.FlagOverflow, 4 * blockLen, 0},
		{"read 1, expect 200 octets", readF, 200, cdb.Read10(0, 1), pdu.FlagOverflow, blockLen - 200, 0},
		{"read 1, expect 10000", readF, 10000, cdb.Read10(0, 1), pdu.FlagUnderflow, 10000 - blockLen, 0},
		{"ISCSI-11.3-3 read 1, expect nothing", readF, 0, cdb.Read10(0, 1), pdu.FlagOverflow, blockLen, 0},
		{"read 1, no R", pdu.FlagF, 0, cdb.Read10(0, 1), pdu.FlagOverflow, blockLen, 0},
		{"read 1, expect to write 512", writeF, blockLen, cdb.Read10(0, 1), pdu.FlagUnderflow, blockLen, 0},
		{"ISCSI-11.3-3 write 1, expect nothing", writeF, 0, cdb.Write10(0, 1), pdu.FlagOverflow, blockLen, 0},
		{"write 1, no W", pdu.FlagF, 0, cdb.Write10(0, 1), pdu.FlagOverflow, blockLen, 0},
		{"write 2, expect 1", writeF, blockLen, cdb.Write10(0, 2), pdu.FlagOverflow, blockLen, 0},
		{"write 1, expect 10000", writeF, 10000, cdb.Write10(0, 1), pdu.FlagUnderflow, 10000 - blockLen, 0},
		{"write 1, expect 200 octets", writeF, 200, cdb.Write10(0, 1), pdu.FlagOverflow, blockLen - 200, 2},
		{"no data, expect 512", readF, blockLen, cdb.TestUnitReady, pdu.FlagUnderflow, blockLen, 0},
		{"no data, expect to write 512", writeF, blockLen, cdb.TestUnitReady, pdu.FlagUnderflow, blockLen, 0},
	} {
		bubble(t, c.name, func(t *testing.T) {
			n := newTestNode(t)
			n.fill()
			tc := n.connect().login()
			defer tc.logout()
			before := n.stored(0, 3*blockLen)
			h := tc.command(c.flags, c.edtl, c.cdb, nil)
			p := tc.wantStatus(h, c.status)
			wantResidual(t, p, c.residual, c.n)
			if c.cdb[0] == 0x28 {
				want := n.stored(0, 8*blockLen)[:min(int(c.edtl), int(c.cdb[8])*blockLen)]
				if c.flags&pdu.FlagR == 0 {
					want = nil
				}
				if got := tc.sinkOf(h); !bytes.HasPrefix(got, want) {
					t.Error("wrong data")
				}
				return
			}
			// Only what the CDB says and only what was sent is written.
			moved := min(int(c.edtl), int(c.cdb[8])*blockLen) / blockLen * blockLen
			want := append(pattern(int(c.edtl), h.ITT())[:moved:moved], before[moved:]...)
			if !bytes.Equal(n.stored(0, 3*blockLen), want) {
				t.Errorf("wrong data after %d bytes", moved)
			}
		})
	}
}

// What is wrong with a command is answered by CHECK CONDITION, its data is not
// moved, and the next command finds nothing left behind.
func TestBadCommands(t *testing.T) {
	ext := pdu.AppendBidiReadLength(nil, 512)
	for _, c := range []struct {
		id               string
		flags            byte
		edtl             uint32
		cdb              [16]byte
		immediate        int
		ahs              []byte
		key, asc, ascq   byte
		attr             byte
		unsupportedCheck bool
	}{
		{id: "ISCSI-11.3-1 neither W nor F", flags: pdu.FlagR, edtl: 512, cdb: cdb.Read10(0, 1), key: 5, asc: 0x0e,
			ascq: 3},
		{id: "ISCSI-11.3-2 length without R and W", flags: pdu.FlagF, edtl: 512, cdb: cdb.Read10(0, 1), key: 5,
			asc: 0x0e, ascq: 3},
		{id: "ISCSI-11.3-4 R and W", flags: readF | pdu.FlagW, edtl: 512, cdb: cdb.Read10(0, 1), key: 5, asc: 0x0e,
			ascq: 3},
		{id: "ISCSI-11.3-4 bidirectional", flags: readF | pdu.FlagW, edtl: 512, cdb: cdb.Read10(0, 1), ahs: ext,
			key: 5, asc: 0x0e, ascq: 3},
		{id: "ISCSI-11-2 ATTR 5", flags: readF | 5, edtl: 512, cdb: cdb.Read10(0, 1), key: 5, asc: 0x0e, ascq: 3},
		{id: "ISCSI-10.2-1 ATTR ACA", flags: readF | pdu.AttrACA, edtl: 512, cdb: cdb.Read10(0, 1), key: 5, asc: 0x0e,
			ascq: 3},
		{id: "write with R", flags: readF, edtl: 512, cdb: cdb.Write10(0, 1), key: 5, asc: 0x0e, ascq: 3},
		{id: "ISCSI-11.4-8 immediate data of a read", flags: readF, edtl: 512, cdb: cdb.Read10(0, 1), immediate: 512,
			key: 0x0b, asc: 0x0c, ascq: 0x0c},
		{id: "ISCSI-11.3-6 more than EDTL", flags: writeF, edtl: 512, cdb: cdb.Write10(0, 1), immediate: 1024,
			key: 0x0b, asc: 0x0c, ascq: 0x0d},
		{id: "unknown LUN", flags: readF, edtl: 512, cdb: cdb.Read10(0, 1), key: 5, asc: 0x25, ascq: 0,
			unsupportedCheck: true},
		{id: "beyond the medium", flags: readF, edtl: 512, cdb: cdb.Read10(storeLen/blockLen, 1), key: 5, asc: 0x21,
			ascq: 0},
		{id: "ISCSI-11.4-2 write beyond the medium", flags: writeF, edtl: 65536,
			cdb: cdb.Write10(storeLen/blockLen, 128), immediate: 8192, key: 5, asc: 0x21, ascq: 0},
		{id: "unknown command", flags: pdu.FlagF, cdb: [16]byte{0xff}, key: 5, asc: 0x20, ascq: 0},
	} {
		bubble(t, c.id, func(t *testing.T) {
			tc := newTestNode(t).connect().login()
			defer tc.logout()
			h := tc.scsi(c.flags, c.edtl, c.cdb)
			if c.unsupportedCheck {
				h.SetLUN([8]byte{1: 99})
			}
			tc.writeAHS(h, c.ahs, make([]byte, c.immediate))
			tc.wantSense(h, c.key, c.asc, c.ascq)
			if c.edtl > 0 && len(tc.m.puts)+len(tc.m.getRanges) != 0 {
				t.Errorf("moved %v %v", tc.m.puts, tc.m.getRanges)
			}
			tc.wantStatus(tc.command(pdu.FlagF, 0, cdb.TestUnitReady, nil), 0)
		})
	}
	bubble(t, "ISER-7.3.1-11 nothing advertised", func(t *testing.T) {
		tc := newTestNode(t).connect().login()
		defer tc.logout()
		tc.m.mu.Lock()
		tc.m.bindErr = errors.New("no sink")
		tc.m.mu.Unlock()
		h := tc.command(readF, 512, cdb.Read10(0, 1), nil)
		tc.wantSense(h, 5, 0x0e, 3)
		tc.m.mu.Lock()
		tc.m.bindErr = nil
		tc.m.mu.Unlock()
	})
	bubble(t, "failing medium", func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		defer tc.logout()
		n.store.FailIO(errors.New("bad sector"))
		for _, h := range []pdu.BHS{tc.command(readF, 3<<20, cdb.Read10(0, 6144), nil),
			tc.command(writeF, 3<<20, cdb.Write10(0, 6144), nil)} {
			p := tc.want(pdu.SCSIResponse)
			if p.h.ITT() != h.ITT() && p.h.Status() != 2 {
				t.Errorf("%x", []byte(p.h))
			}
			wantResidual(t, p, pdu.FlagUnderflow, 3<<20) // ISCSI-11.4-1
		}
		n.store.FailIO(nil)
	})
}

// ISCSI-11.2-5, ISER-7.3-1: a CDB of 32 bytes reaches the logical unit (which
// does not know it), and the AHS area is checked.
func TestExtendedCDB(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		tc := newTestNode(t).connect().login()
		long := make([]byte, 32)
		long[0] = 0x7f
		h := tc.scsi(pdu.FlagF, 0, [16]byte{0x7f})
		tc.writeAHS(h, pdu.AppendExtendedCDB(nil, long), nil)
		tc.wantSense(h, 5, 0x20, 0)

		// ISCSI-7.7-1: an AHS that runs over ends the connection.
		tc.writeAHS(tc.scsi(pdu.FlagF, 0, [16]byte{0x7f}), []byte{0, 200, 1, 0}, nil)
		if err := tc.wait(); !errors.Is(err, pdu.ErrAHSTruncated) {
			t.Error(err)
		}
	})
}

// ISCSI-7.7-1, ISER-10.1.4.1-1: format errors end the connection, whereas unknown opcodes are
// rejected (ISCSI-11.2-2, ISCSI-11.2-1).
func TestFormatErrors(t *testing.T) {
	for _, c := range []struct {
		id     string
		notice func(h pdu.BHS) Notice
	}{
		{"data longer than said", func(h pdu.BHS) Notice {
			h.SetDataSegmentLength(8)
			return Notice{BHS: h, Data: make([]byte, 9)}
		}},
		{"data shorter than said", func(h pdu.BHS) Notice { h.SetDataSegmentLength(8); return Notice{BHS: h} }},
		{"AHS shorter than said", func(h pdu.BHS) Notice {
			h.SetTotalAHSLength(8)
			return Notice{BHS: h, AHS: make([]byte, 4)}
		}},
		{"short header", func(h pdu.BHS) Notice { return Notice{BHS: h[:47]} }},
		{"ISER-6.4-2 segment too long", func(h pdu.BHS) Notice {
			h.SetDataSegmentLength(8193)
			return Notice{BHS: h, Data: make([]byte, 8193)}
		}},
	} {
		bubble(t, c.id, func(t *testing.T) {
			tc := newTestNode(t).connect().login()
			h := tc.scsi(writeF, 65536, cdb.Write10(0, 128))
			tc.m.mu.Lock()
			tc.m.in = append(tc.m.in, c.notice(bytes.Clone(h)))
			tc.m.cond.Broadcast()
			tc.m.mu.Unlock()
			if err := tc.wait(); err == nil {
				t.Error("no error")
			}
		})
	}
}

// dataOutPDU returns an unsolicited Data-Out for h.
func (tc *testConn) dataOutPDU(h pdu.BHS, final bool, sn, off uint32) pdu.BHS {
	d := make(pdu.BHS, pdu.BHSLen)
	d.Reset(pdu.DataOut, 0)
	if final {
		d.SetFlags(pdu.FlagF)
	}
	d.SetLUN(h.LUN())
	d.SetITT(h.ITT())
	d.SetTTT(pdu.ReservedTag)
	d.SetExpStatSN(tc.ExpStatSN)
	d.SetDataSN(sn)
	d.SetBufferOffset(off)
	return d
}

// unsolicitedNode allows unsolicited Data-Out.
func unsolicitedNode(t *testing.T, change ...func(*Options)) *testNode {
	no := false
	return newTestNode(t, append([]func(*Options){func(o *Options) {
		o.Limits = keys.Limits{InitialR2T: &no,
			FirstBurstLength: 32768}
	}}, change...)...)
}

// The target puts unsolicited Data-Out together, in any cut and of interleaved commands.
func TestUnsolicitedData(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := unsolicitedNode(t)
		tc := n.connect().login()
		type write struct {
			h    pdu.BHS
			all  []byte
			sn   uint32
			sent int
		}
		rnd := rand.New(rand.NewPCG(1, 2))
		for range 30 {
			size := (1 + rnd.IntN(160)) * blockLen
			burst := min(size, 32768) // ISCSI-4.2.5-3, ISCSI-13.10-1
			var ws []*write
			for i := range 2 {
				h := tc.scsi(pdu.FlagW, uint32(size), cdb.Write10(uint32(i)*1000, uint16(size/blockLen)))
				w := &write{h: h, all: pattern(size, h.ITT()), sent: rnd.IntN(min(burst, 8193))}
				tc.write(h, w.all[:w.sent])
				ws = append(ws, w)
			}
			for _, w := range ws { // ISCSI-4.2.5-4: in the order of the commands
				for last := false; !last; {
					m := min(rnd.IntN(8193), burst-w.sent) // ISER-7.3.1-9; also zero bytes: ISCSI-11.7-3
					last = w.sent+m == burst
					tc.write(tc.dataOutPDU(w.h, last, w.sn, uint32(w.sent)), w.all[w.sent:w.sent+m])
					w.sent += m
					w.sn++
				}
			}
			for range ws {
				if p := tc.want(pdu.SCSIResponse); p.h.Status() != 0 {
					t.Fatalf("%x %x", []byte(p.h), p.data)
				}
			}
			for i, w := range ws {
				if !bytes.Equal(n.stored(i*1000, size), w.all) { // ISER-7.3.4-3
					t.Fatalf("%d bytes: wrong data", size)
				}
				if got := tc.m.unsol[w.h.ITT()]; got != uint32(burst) {
					t.Fatalf("Bind with %d unsolicited bytes of %d", got, burst)
				}
			}
		}
		tc.logout()
	})
}

// sortSent waits until the target has sent n PDUs and puts the first op in
// front, where the order is not prescribed. Their StatSNs change places, too.
func (tc *testConn) sortSent(op pdu.Opcode, n int) {
	tc.tb.Helper()
	testkit.Eventually(tc.tb, "PDUs of the target", func() bool {
		tc.m.mu.Lock()
		defer tc.m.mu.Unlock()
		return len(tc.m.sent) >= n
	})
	tc.m.mu.Lock()
	defer tc.m.mu.Unlock()
	s := tc.m.sent
	i := slices.IndexFunc(s, func(p sentPDU) bool { return p.h.Opcode() == op })
	if i > 0 {
		a, b := s[0].h.StatSN(), s[i].h.StatSN()
		s[0].h.SetStatSN(b)
		s[i].h.SetStatSN(a)
		s[0], s[i] = s[i], s[0]
	}
}

// Unsolicited data that breaks the rules is rejected, or ends its command or the connection
// (ISCSI-7.3-1).
func TestBadUnsolicitedData(t *testing.T) {
	for _, c := range []struct {
		id     string
		change func(d pdu.BHS) int // returns how much data
		reason pdu.RejectReason
	}{
		{"ISCSI-11.7-4 offset wraps", func(d pdu.BHS) int { d.SetBufferOffset(0xfffffff0); return 512 },
			pdu.RejectInvalidField},
		{"ISCSI-11.7-4 gap", func(d pdu.BHS) int { d.SetBufferOffset(1024); return 512 }, pdu.RejectInvalidField},
		{"ISCSI-11.7-4 overlap", func(d pdu.BHS) int { d.SetBufferOffset(0); return 512 }, pdu.RejectInvalidField},
		{"ISCSI-4.2.5-2 too much", func(d pdu.BHS) int { return 4096 }, pdu.RejectInvalidField},
		{"ISCSI-4.2.5-6 other LUN", func(d pdu.BHS) int { d.SetLUN([8]byte{1: 1}); return 512 },
			pdu.RejectProtocolError},
		{"ISER-10.1.4.3-1 DataSN gap", func(d pdu.BHS) int { d.SetDataSN(3); return 512 }, pdu.RejectProtocolError},
		{"ISCSI-4.2.5-3 too little", func(d pdu.BHS) int { return 512 }, 0},
	} {
		bubble(t, c.id, func(t *testing.T) {
			n := unsolicitedNode(t)
			tc := n.connect().login()
			h := tc.scsi(pdu.FlagW, 4096, cdb.Write10(0, 8))
			tc.write(h, make([]byte, 512))
			d := tc.dataOutPDU(h, true, 0, 512)
			data := c.change(d)
			tc.write(d, make([]byte, data))
			if c.reason != 0 {
				tc.sortSent(pdu.Reject, 2)
				tc.wantReject(c.reason, d)
			}
			tc.wantSense(h, 0x0b, 0x0c, 0x0d)
			tc.ping()
			tc.logout()
		})
	}
	bubble(t, "ISER-7.3.4-4 solicited", func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		tc.m.holdGets = true
		h := tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		d := tc.dataOutPDU(h, true, 0, 0)
		d.SetTTT(5)
		tc.write(d, make([]byte, 512))
		tc.wantReject(pdu.RejectProtocolError, d)
		d = tc.dataOutPDU(h, true, 0, 0) // not allowed with InitialR2T=Yes
		d.SetExpStatSN(tc.ExpStatSN)
		tc.write(d, make([]byte, 512))
		tc.wantReject(pdu.RejectProtocolError, d)
		tc.m.releaseGets()
		tc.wantStatus(h, 0)
		tc.logout()
	})
	bubble(t, "without a task", func(t *testing.T) {
		tc := newTestNode(t).connect().login()
		d := tc.dataOutPDU(tc.Request(pdu.SCSICommand, 0, true), true, 0, 0)
		tc.write(d, make([]byte, 512))
		tc.wantReject(pdu.RejectInvalidField, d)
		tc.logout()
	})
	bubble(t, "ISCSI-11.3-5 F=0 with InitialR2T=Yes", func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		h := tc.scsi(pdu.FlagW, 4096, cdb.Write10(0, 8))
		tc.write(h, pattern(4096, h.ITT()))
		tc.wantStatus(h, 0)
		tc.logout()
	})
	bubble(t, "ISCSI-13.11-1 ImmediateData=No", func(t *testing.T) {
		no := false
		tc := newTestNode(t, func(o *Options) { o.Limits.ImmediateData = &no }).connect().login()
		h := tc.command(writeF, 4096, cdb.Write10(0, 8), make([]byte, 512))
		tc.wantSense(h, 0x0b, 0x0c, 0x0c)
		h = tc.command(writeF, 4096, cdb.Write10(0, 8), nil)
		tc.wantStatus(h, 0)
		tc.logout()
	})
}

// ISER-9.5.1-3: with its memory used up a connection gets slow, not stuck; the
// bound holds.
func TestConnectionMemory(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t, func(o *Options) { o.ConnectionMemory, o.MaxTransferPiece = 1, 1 }) // one piece of 64 KiB
		if o := n.opt.Load(); o.MaxTransferPiece != 65536 || o.ConnectionMemory != 65536 {
			t.Fatalf("%+v", o)
		}
		n.fill()
		tc := n.connect().login()
		var mu sync.Mutex
		most := 0
		n.store.Hook(func(backendtest.Op, int64, int64) error {
			mu.Lock()
			defer mu.Unlock()
			most = max(most, n.Stats().BufferOctets)
			return nil
		})
		var hs []pdu.BHS
		for i := range 60 {
			if i%2 == 0 {
				hs = append(hs, tc.command(readF, 200*blockLen, cdb.Read10(uint32(i), 200), nil))
			} else {
				hs = append(hs, tc.command(writeF, 200*blockLen, cdb.Write10(4000, 200), make([]byte, 4096)))
			}
		}
		for range hs {
			if p := tc.want(pdu.SCSIResponse); p.h.Status() != 0 {
				t.Fatalf("%x %x", []byte(p.h), p.data)
			}
		}
		mu.Lock()
		if most == 0 || most > 65536 {
			t.Errorf("buffers of %d bytes, want at most 65536", most)
		}
		mu.Unlock()
		for i, h := range hs {
			if i%2 == 0 && !bytes.Equal(tc.sinkOf(h), n.stored(i, 200*blockLen)) {
				t.Errorf("read %d: wrong data", i)
			}
		}
		tc.logout()
	})
}

// A mix of everything at once ends with the right data everywhere.
func TestManyTasks(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		rnd := rand.New(rand.NewPCG(3, 4))
		for range 20 {
			var hs [2][]pdu.BHS // writes, then the same places are read
			for i := range 60 {
				blocks := 1 + rnd.IntN(64)
				h := tc.scsi(writeF, uint32(blocks*blockLen), cdb.Write10(uint32(i)*100, uint16(blocks)))
				tc.write(h, pattern(blocks*blockLen, h.ITT())[:min(blocks*blockLen, rnd.IntN(8192))])
				hs[0] = append(hs[0], h)
			}
			tc.wantAllGood(hs[0])
			for i, w := range hs[0] {
				read := cdb.Read10(uint32(i)*100, uint16(w.EDTL()/blockLen))
				hs[1] = append(hs[1], tc.command(readF, w.EDTL(), read, nil))
			}
			tc.wantAllGood(hs[1])
			for i, r := range hs[1] {
				if !bytes.Equal(tc.sinkOf(r), pattern(int(r.EDTL()), hs[0][i].ITT())) {
					t.Fatalf("command %d read back something else", i)
				}
			}
		}
		tc.logout()
	})
}

// wantAllGood takes one response with GOOD for each command, in any order.
func (tc *testConn) wantAllGood(hs []pdu.BHS) {
	tc.tb.Helper()
	open := map[uint32]bool{}
	for _, h := range hs {
		open[h.ITT()] = true
	}
	for len(open) > 0 {
		p := tc.want(pdu.SCSIResponse)
		if !open[p.h.ITT()] || p.h.Status() != 0 {
			tc.tb.Fatalf("SCSI Response %x %x", []byte(p.h), p.data)
		}
		delete(open, p.h.ITT())
	}
}

// Commands with the ORDERED attribute begin after all older ones have ended and
// before all younger ones begin (SAM); HEAD OF QUEUE does not wait.
func TestOrdered(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		tc.m.holdGets = true
		first := tc.command(writeF|pdu.AttrSimple, 4096, cdb.Write10(0, 8), nil)
		tc.wantGets(1)
		ordered := tc.command(writeF|pdu.AttrOrdered, 4096, cdb.Write10(0, 8), nil)
		last := tc.command(writeF|pdu.AttrSimple, 8192, cdb.Write10(0, 16), make([]byte, 512))
		tc.wantStatus(tc.command(pdu.FlagF|pdu.AttrHeadOfQueue, 0, cdb.TestUnitReady, nil), 0)
		tc.wantNothing()
		if got := tc.m.getting(); got != 1 {
			t.Errorf("%d GetDatas before the ORDERED command", got)
		}
		tc.m.releaseGets()
		tc.wantStatus(first, 0)
		tc.wantStatus(ordered, 0)
		tc.wantStatus(last, 0)
		tc.logout()
	})
}

// Sessions that use all task attributes do not wait for one another for ever.
func TestOrderedLoad(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		var wg sync.WaitGroup
		for i := range 3 {
			tc := n.connect(func(tc *testConn) { tc.isid[5] = byte(i) }).login()
			wg.Go(func() {
				rnd := rand.New(rand.NewPCG(1, uint64(i)))
				for range 20 {
					var hs []pdu.BHS
					for range 30 {
						flags, block, edtl := byte(pdu.FlagF), cdb.TestUnitReady, uint32(0)
						if rnd.IntN(2) == 0 {
							flags, block, edtl = writeF, cdb.Write10(rnd.Uint32N(8), 1), blockLen
						}
						hs = append(hs, tc.command(flags|byte(rnd.IntN(4)), edtl, block, make([]byte, edtl)))
					}
					tc.wantAllGood(hs)
				}
				tc.logout()
			})
		}
		wg.Wait()
	})
}

// A connection that ends in the middle of everything leaves nothing behind:
// ISER-5.2.3.1-2, ISER-10.1.1.2-1, ISER-7.1-4.
func TestConnectionLoss(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		before := n.stored(0, 65536)
		tc.m.holdGets = true
		for range 10 {
			tc.command(writeF, 65536, cdb.Write10(0, 128), nil)
		}
		tc.wantGets(10)
		gate := n.store.Shut()
		for range 10 {
			tc.command(readF, 65536, cdb.Read10(0, 128), nil)
		}
		for range 10 {
			<-gate.Entered
		}
		tc.CmdSN += 3 // a gap: these wait
		for range 10 {
			tc.command(writeF, 65536, cdb.Write10(0, 128), make([]byte, 8192))
		}
		tc.close()
		synctest.Wait()
		gate.Open()
		if err := tc.wait(); !errors.Is(err, errPeerClosed) {
			t.Error(err)
		}
		if !bytes.Equal(n.stored(0, 65536), before) {
			t.Error("data of an unfinished write is on the medium")
		}
		if l := n.log.Lines("session ended"); len(l) != 1 || !strings.Contains(l[0], "level=WARN") {
			t.Errorf("log: %q", l)
		}
	})
}

// A command that fails because of its parameter list has got the list: nothing of it is residual (ISCSI-11.4-5).
func TestResidualOfParameterLists(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		tc := newTestNode(t).connect().login()
		defer tc.logout()
		list := make([]byte, 24)
		list[7] = 1                                                    // a reservation key that nobody has registered
		h := tc.command(writeF, 24, [16]byte{0x5f, 1, 1, 8: 24}, list) // PERSISTENT RESERVE OUT, RESERVE
		wantResidual(t, tc.wantStatus(h, 0x18), 0, 0)
		h = tc.command(writeF, 48, [16]byte{0x5f, 1, 1, 8: 24}, append(list, list...))
		wantResidual(t, tc.wantStatus(h, 0x18), pdu.FlagUnderflow, 24)
		h = tc.command(writeF, 8, [16]byte{0x55, 0x10, 8: 8}, []byte{2: 1, 7: 0}) // MODE SELECT(10), wrong DEVICE-SPECIFIC PARAMETER
		wantResidual(t, tc.wantStatus(h, 2), 0, 0)
	})
}

// ISCSI-11.4-5, ISCSI-11.4-6: what a command reports is cut by its ALLOCATION
// LENGTH before it is compared with EDTL.
func TestReportResiduals(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		h := tc.command(readF, 255, [16]byte{0x12, 0, 0, 0, 255}, nil)
		p := tc.wantStatus(h, 0)
		length := 5 + uint32(tc.sinkOf(h)[4]) // ADDITIONAL LENGTH
		if length < 36 || length >= 255 {
			t.Fatalf("INQUIRY data of %d bytes", length)
		}
		wantResidual(t, p, pdu.FlagUnderflow, 255-length)
		h = tc.command(readF, 36, [16]byte{0x12, 0, 0, 0, 36}, nil)
		wantResidual(t, tc.wantStatus(h, 0), 0, 0)
		h = tc.command(readF, 16, [16]byte{0xa0, 9: 16, 11: 0}, nil) // REPORT LUNS
		wantResidual(t, tc.wantStatus(h, 0), 0, 0)
		h = tc.command(readF, 64, [16]byte{0xa0, 9: 64, 11: 0}, nil)
		wantResidual(t, tc.wantStatus(h, 0), pdu.FlagUnderflow, 48)
		tc.logout()
	})
}

// ISCSI-11-1, ISCSI-7.10-1, ISCSI-7144.5.1-1: reserved bits of a request, and
// PRI, change nothing; ours are zero.
func TestReservedBits(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		tc := n.connect().login()
		h := tc.scsi(readF|0x18, 4096, cdb.Read10(0, 8))
		h[0] |= 0x80
		h[2], h[3] = 0xff, 0xff
		tc.write(h, nil)
		p := tc.wantStatus(h, 0)
		for i, b := range p.h[8:16] { // Status Qualifier and the rest of the word
			if b != 0 {
				t.Errorf("byte %d is %#x", 8+i, b)
			}
		}
		// ISCSI-11.5-8: a function with data and a tag that it does not need.
		f := tc.Request(pdu.TaskMgmtReq, pdu.FlagF|pdu.AbortTaskSet, true)
		f.SetReferencedTaskTag(5)
		tc.write(f, []byte{1, 2, 3})
		tc.wantTMF(f, pdu.FunctionComplete)
		tc.logout()
	})
}

// The core serves a mover without RDMA, too: data segments as long as declared,
// and our side of the connection is closed after the last word (ISCSI-11.14-3).
func TestWithoutRDMA(t *testing.T) {
	testkit.Bubble(t, func(t *testing.T) {
		n := newTestNode(t)
		n.fill()
		tc := n.connect(func(tc *testConn) { tc.m.rdma = false })
		tc.writeLogin(tc.loginRequest(true, 1, 3),
			append(without(linuxKeys, "RDMAExtensions", "TargetRecvDataSegmentLength",
				"InitiatorRecvDataSegmentLength"), names...)...)
		tc.loggedIn()
		h := tc.scsi(writeF, 65536, cdb.Write10(0, 128))
		tc.write(h, pattern(65536, h.ITT())) // FirstBurstLength in one segment
		tc.wantStatus(h, 0)
		if !bytes.Equal(n.stored(0, 65536), pattern(65536, h.ITT())) {
			t.Error("wrong data")
		}
		h = tc.command(readF, 65536, cdb.Read10(0, 128), nil)
		tc.wantStatus(h, 0)
		if !bytes.Equal(tc.sinkOf(h), n.stored(0, 65536)) {
			t.Error("wrong data")
		}
		tc.logout()
	})
}
