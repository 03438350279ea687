package tcp

import (
	"bytes"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A session has two TCP connections, one of them with digests. Commands alternate between them, and each
// answer, with its data, uses the connection of its command. One connection fills a gap that the other one
// leaves.
func TestTwoConnections(t *testing.T) {
	tg := startTarget(t, func(_ *target, o *iscsi.Options) { o.Limits.MaxConnections = 4 })
	a := tg.login(t, "MaxConnections=2", "MaxBurstLength=32768", "FirstBurstLength=4096")
	b := tg.connect(t)
	b.isid, b.tsih, b.cid, b.CmdSN, b.ITT = a.isid, a.tsih, 7, a.CmdSN, 0x9000
	b.login("HeaderDigest=CRC32C", "DataDigest=CRC32C", "MaxRecvDataSegmentLength=4096")
	if a.tsih != b.tsih || !b.header || a.header {
		t.Fatalf("TSIH %d and %d, digests %t and %t", a.tsih, b.tsih, a.header, b.header)
	}

	data := make([]byte, 128<<10)
	from, to := a, b
	for i := range 6 {
		for j := range data {
			data[j] = byte(i + j>>9)
		}
		to.writeAll(0, data, 0, 4096, 32768)
		from.CmdSN = to.CmdSN
		if !bytes.Equal(from.read(0, len(data)/blockLen, 32768), data) {
			t.Fatal("wrong data")
		}
		to.CmdSN = from.CmdSN
		from, to = to, from
	}

	first, second := a, b
	gap := first.scsi(pdu.FlagW, cdb.Write16(0, 8), 4096)
	second.CmdSN = first.CmdSN
	held := second.scsi(pdu.FlagR, cdb.Read16(0, 8), 4096)
	second.send(held, nil)
	first.send(gap, data[:4096])
	if p := first.want(pdu.SCSIResponse); p.h.Status() != 0 {
		t.Fatalf("%x", []byte(p.h))
	}
	if got, _, st := second.readData(held, 32768); st.Status() != 0 || len(got) != 4096 {
		t.Fatalf("%d bytes, status %d", len(got), st.Status())
	}

	// RFC 7143, section 11.14: the session continues without one of them.
	l := make(pdu.BHS, pdu.BHSLen)
	l.Reset(pdu.LogoutReq, pdu.FlagF|pdu.LogoutCloseConnection)
	l.SetImmediate()
	l.SetITT(0xf00)
	l.SetCID(b.cid)
	l.SetCmdSN(second.CmdSN)
	b.send(l, nil)
	if p := b.want(pdu.LogoutResp); p.h.Response() != pdu.LogoutSuccess {
		t.Fatalf("%x", []byte(p.h))
	}
	b.wantClosed()
	a.CmdSN = second.CmdSN
	a.read(0, 8, 32768)
}
