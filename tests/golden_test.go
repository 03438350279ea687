package tests

import (
	"bytes"
	"testing"

	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// Commands and their answers as bytes on the wire (RFC 7143, appendix A, in
// iSER headers with STags and Base Offsets as Linux has them).
func TestGoldenIO(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	want := random(1024)
	if err := tg.store.Store.WriteAt(want, 0); err != nil {
		t.Fatal(err)
	}
	p := tg.rawLogin(t, initiator.Options{CmdSN: 0x13}, 0) // MSN 1 and 2
	p.ping()
	p.ping()

	t.Run("V-ISER-7 V-ISER-8 V-ISER-9 ISER-7.3.1-1 ISER-7.3.1-8 ISER-7.3.5-3 ISER-7.3.5-4 ISER-7.3.5-5 ISER-4.1-4 ISER-4.1-5 ISER-9.5.2-1", func(t *testing.T) {
		p.t = t
		p.write(unhex(`
			005e 4143 00000000 00000000 00000005 00000000         // FPDU, Send, MSN 5
			14000000 00000000 0000000000000000 0004d101 ffff888012345000
			01c00000 00000000 0000000000000000 14000000 00000400 00000014 00000018
			28000000 00000000 02000000 00000000 c691412d          // READ(10), CRC`))
		p.sendMSN++
		m := p.next()
		head := unhex("040e c140 0004d101 ffff888012345000") // RDMA Write, L, 1024 bytes
		if !bytes.Equal(m.fpdu[:len(head)], head) || !bytes.Equal(m.payload, want) {
			t.Fatalf("V-ISER-8: % x ...", m.fpdu[:len(head)])
		}
		m = p.next()
		// The vector has a StatSN of another session. Its ExpDataSN, which is 0,
		// does not count the data that is handed over (RFC 7143, section 11.4.8).
		rsp := unhex(`
			005e 4144 0004d101 00000000 00000005 00000000         // Send with Invalidate
			10000000 00000000 0000000000000000 00000000 0000000000000000
			21800000 00000000 0000000000000000 14000000 00000000 00000004 00000015 00000094
			00000001 00000000 00000000`)
		if !bytes.Equal(m.fpdu, rsp) {
			t.Fatalf("V-ISER-9:\n% x, want\n% x", m.fpdu, rsp)
		}
	})
	t.Run("V-ISER-10 ISER-7.3.6-2 ISER-7.3.6-5 ISER-7.3.6-7 ISER-7.3.6-8 ISER-7.3.6-9 ISER-7.3.6-10",
		func(t *testing.T) {
			p.t = t
			block := cdb.Write16(0, 8)
			p.CmdSN = 0x15
			h := p.scsi(pdu.FlagW, 4096, block)
			p.send(source(0x0004d202, 0xffff888012346000), h, nil)
			m := p.next()
			sinkSTag := m.read.SinkSTag
			req := unhex("002e 4141 00000000 00000001 00000001 00000000 5a5a0001 0000000000000000 00001000 0004d202 ffff888012346000")
			copy(req[20:], m.fpdu[20:24]) // our STags cannot be known beforehand
			if !bytes.Equal(m.fpdu, req) || sinkSTag == 0 {
				t.Fatalf("% x, want\n% x", m.fpdu, req)
			}
			data := random(4096)
			p.answer(m.read, data)
			if m := p.wantStatus(h, 0); m.op != wire.OpSendInvalidate || m.untag.Invalidate != 0x0004d202 {
				t.Errorf("ISER-7.3.2-5: %v of %#x", m.op, m.untag.Invalidate)
			}
			if !bytes.Equal(tg.stored(t, 0, 4096), data) {
				t.Error("other bytes are stored")
			}
		})
	p.logout()
	tg.waitIdle(t)
}

// The Text Request that Linux sends over siw in discovery, as it was captured.
func TestGoldenDiscovery(t *testing.T) {
	tg := startTarget(t, targetOptions{})
	p := tg.dial(t, initiator.Options{CmdSN: 1})
	p.login() // MSN 1
	p.write(unhex(`
		006e 4143 00000000 00000000 00000002 00000000 // V-ISER-11
		10000000 00000000 0000000000000000 00000000 0000000000000000
		04800000 00000010 0000000000000000 00000000 ffffffff 00000001 f60ab5d3
		00000000 00000000 00000000 00000000
		53656e64546172676574733d416c6c00              // SendTargets=All
		da7429f8`))
	m := p.want(pdu.TextResp)
	b := m.bhs
	text := "TargetName=" + targetName + "\x00TargetAddress=" + tg.addr + ",1\x00"
	for _, f := range []struct {
		id, name  string
		got, want any
	}{
		{"ISER-7.3.8-1", "operation", m.op, wire.OpSend},
		{"", "flags", b.Flags(), byte(pdu.FlagF)},
		{"", "TotalAHSLength", b.TotalAHSLength(), 0},
		{"", "DataSegmentLength", b.DataSegmentLength(), len(text)},
		{"", "ITT", b.ITT(), uint32(0)},
		{"", "TTT", b.TTT(), uint32(pdu.ReservedTag)},
		{"", "StatSN", b.StatSN(), uint32(1)},
		{"", "ExpCmdSN", b.ExpCmdSN(), uint32(2)},
		{"", "MaxCmdSN", b.MaxCmdSN(), uint32(2 + 127)},
		{"", "text", string(m.data), text},
		{"", "length with padding", len(m.payload), iser.HeaderLen + 48 + pdu.Padded(len(text))},
	} {
		if f.got != f.want {
			t.Errorf("V-ISER-11 %s %s: %v, want %v", f.id, f.name, f.got, f.want)
		}
	}
	// L12: no logout, the initiator just disconnects.
	p.nc.Close()
	tg.log.wantLine(`"session ended"`, "session=discovery", `reason="discovery done"`)
}
