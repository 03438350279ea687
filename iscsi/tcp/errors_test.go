package tcp

import (
	"bytes"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// ISCSI-7.8-1: a wrong header digest closes the connection. So does a first PDU without one
// (ISCSI-13.1-1).
func TestHeaderDigestError(t *testing.T) {
	tg := startTarget(t)
	t.Run("first PDU without digest", func(t *testing.T) {
		c := tg.connect(t)
		c.login("HeaderDigest=CRC32C")
		c.header = false
		c.send(c.scsi(0, cdb.TestUnitReady, 0), nil)
		c.send(c.scsi(0, cdb.TestUnitReady, 0), nil)
		c.wantClosed()
	})
	t.Run("command", func(t *testing.T) {
		c := tg.login(t, "HeaderDigest=CRC32C")
		c.badHeader = true
		c.send(c.scsi(0, cdb.TestUnitReady, 0), nil)
		c.wantClosed()
	})
	t.Run("AHS", func(t *testing.T) {
		c := tg.login(t, "HeaderDigest=CRC32C")
		ahs := pdu.AppendExtendedCDB(nil, make([]byte, 32))
		c.write(c.encode(c.scsi(0, cdb.TestUnitReady, 0), ahs, nil))
		c.want(pdu.SCSIResponse)
		b := c.encode(c.scsi(0, cdb.TestUnitReady, 0), ahs, nil)
		b[60] ^= 1
		c.write(b)
		c.wantClosed()
	})
	t.Run("Data-Out with open R2T", func(t *testing.T) {
		c := tg.login(t, "HeaderDigest=CRC32C")
		data := random(8192)
		cmd, r2t := c.openWrite(data)
		c.badHeader = true
		c.send(dataOut(cmd.ITT(), r2t, 0, 0, true), data)
		c.wantClosed()
	})
}

// ISCSI-7.8-2, ISCSI-7.3-2: a PDU with a wrong data digest is rejected. A command counts as not received,
// and may be sent again.
func TestDataDigestError(t *testing.T) {
	no := false
	tg := startTarget(t, func(_ *target, o *iscsi.Options) { o.Limits.InitialR2T = &no })
	t.Run("immediate data", func(t *testing.T) {
		c := tg.login(t, "DataDigest=CRC32C")
		data := random(4096)
		for _, n := range []int{512, 1024, 4096} {
			h := c.scsi(pdu.FlagW, cdb.Write16(0, uint32(n/blockLen)), n)
			c.badData = true
			c.send(h, data[:n])
			c.wantReject(pdu.RejectDataDigest, h)
			if c.expCmdSN != h.CmdSN() {
				t.Fatalf("ExpCmdSN %d after the Reject of %d", c.expCmdSN, h.CmdSN())
			}
			c.send(h, data[:n])
			if rsp := c.want(pdu.SCSIResponse); rsp.h.Status() != 0 || !bytes.Equal(tg.stored(0, n), data[:n]) {
				t.Fatalf("retry: %x", []byte(rsp.h))
			}
		}
	})
	t.Run("NOP-Out, also one longer than the window", func(t *testing.T) {
		c := tg.login(t, "DataDigest=CRC32C")
		for _, n := range []int{5, 100000} {
			h := c.nopOut()
			c.badData = true
			c.send(h, random(n))
			c.wantReject(pdu.RejectDataDigest, h)
			ping := random(n)
			c.send(h, ping)
			if p := c.want(pdu.NOPIn); !bytes.Equal(p.data, ping[:min(n, 8192)]) { // ISCSI-11.19-1
				t.Fatal("the answer is not the ping")
			}
		}
	})
	t.Run("unsolicited Data-Out", func(t *testing.T) {
		c := tg.login(t, "DataDigest=CRC32C", "InitialR2T=No", "FirstBurstLength=4096")
		before := tg.stored(0, 4096)
		for _, last := range []bool{false, true} {
			h := c.scsi(pdu.FlagW, cdb.Write16(0, 8), 4096)
			h.SetFlags(h.Flags() &^ pdu.FlagF)
			c.send(h, random(1024))
			d := dataOut(h.ITT(), nil, 0, 1024, last)
			n := 1024
			if last {
				n = 3072
			}
			c.badData = true
			c.send(d, random(n))
			var rsp reply
			if last {
				rsp = c.wantRejectAndResponse(pdu.RejectDataDigest, d)
			} else {
				c.wantReject(pdu.RejectDataDigest, d)
				c.quiet()
				c.send(dataOut(h.ITT(), nil, 1, 2048, true), random(2048))
				rsp = c.want(pdu.SCSIResponse)
			}
			c.wantSense(rsp, 0x0b, 0x47, 0x05)
			if !bytes.Equal(tg.stored(0, 4096), before) {
				t.Fatal("the command has written")
			}
		}
	})
}

// ISCSI-4.2.5-2, ISCSI-4.2.5-3, ISCSI-13.10-1: data up to FirstBurstLength may come unsolicited, R2Ts ask
// for the rest. ISCSI-4.2.5-4: that holds for several commands at once.
func TestUnsolicitedData(t *testing.T) {
	no := false
	tg := startTarget(t, func(_ *target, o *iscsi.Options) { o.Limits.InitialR2T = &no })
	c := tg.login(t, "InitialR2T=No", "FirstBurstLength=8192", "HeaderDigest=CRC32C")
	for _, size := range []int{8192, 20480} {
		a, b := random(size), random(size)
		ha := c.scsi(pdu.FlagW, cdb.Write16(0, uint32(size/blockLen)), size)
		hb := c.scsi(pdu.FlagW, cdb.Write16(100, uint32(size/blockLen)), size)
		for _, h := range []pdu.BHS{ha, hb} {
			h.SetFlags(h.Flags() &^ pdu.FlagF)
		}
		c.send(ha, a[:1024])
		c.send(hb, nil)
		c.send(dataOut(ha.ITT(), nil, 0, 1024, false), a[1024:5000])
		c.send(dataOut(ha.ITT(), nil, 1, 5000, true), a[5000:8192])
		c.send(dataOut(hb.ITT(), nil, 0, 0, true), b[:8192])
		for done := 0; done < 2; {
			p := c.any()
			h, data := ha, a
			if p.h.ITT() == hb.ITT() {
				h, data = hb, b
			}
			if p.h.Opcode() == pdu.R2T {
				if p.h.BufferOffset() != 8192 || int(p.h.DesiredDataTransferLength()) != size-8192 {
					t.Fatalf("R2T %x", []byte(p.h))
				}
				c.answer(h, p.h, data, 8192)
				continue
			}
			if p.h.Opcode() != pdu.SCSIResponse || p.h.Status() != 0 {
				t.Fatalf("%x %x", []byte(p.h), p.data)
			}
			done++
		}
		if !bytes.Equal(tg.stored(0, size), a) || !bytes.Equal(tg.stored(100, size), b) {
			t.Fatal("what is stored is not what was written")
		}
	}
	t.Run("too little", func(t *testing.T) { // ISCSI-11.4-8
		h := c.scsi(pdu.FlagW, cdb.Write16(0, 16), 8192)
		h.SetFlags(h.Flags() &^ pdu.FlagF)
		c.send(h, nil)
		c.send(dataOut(h.ITT(), nil, 0, 0, true), random(512))
		c.wantSense(c.want(pdu.SCSIResponse), 0x0b, 0x0c, 0x0d)
	})
}

// ISCSI-7.7-1: a format error closes the connection and uses no memory.
func TestFormatErrors(t *testing.T) {
	tg := startTarget(t, func(_ *target, o *iscsi.Options) { o.Limits.MaxRecvDataSegmentLength = 8192 })
	t.Run("segment longer than declared", func(t *testing.T) {
		c := tg.connect(t)
		if agreed := c.login(); agreed["MaxRecvDataSegmentLength"] != "8192" {
			t.Fatalf("declared: %v", agreed)
		}
		h := make(pdu.BHS, pdu.BHSLen)
		h.Reset(pdu.NOPOut, pdu.FlagF)
		h.SetDataSegmentLength(8193)
		c.write(h)
		c.wantClosed()
	})
	t.Run("AHS that runs over", func(t *testing.T) {
		c := tg.login(t)
		c.write(c.encode(c.scsi(0, cdb.TestUnitReady, 0), []byte{0xff, 0xff, 1, 0}, nil))
		c.wantClosed()
	})
	t.Run("ISCSI-4.2.4-1 no Login Request first", func(t *testing.T) {
		c := tg.connect(t)
		c.send(c.scsi(0, cdb.TestUnitReady, 0), nil)
		c.wantClosed()
	})
	t.Run("ISCSI-6.3-2 Login Request of 8193 bytes", func(t *testing.T) {
		c := tg.connect(t)
		r := pdu.LoginRequest{CSG: 1, ISID: newISID()}
		c.send(r.Append(nil), []byte("InitiatorName=iqn.2026-11.io.github:test\x00TargetName="+targetName+"\x00"))
		c.want(pdu.LoginResp)
		c.send(r.Append(nil), make([]byte, 8193))
		if st := pdu.ParseLoginResponse(c.want(pdu.LoginResp).h).Status; st != pdu.LoginInitiatorError {
			t.Fatalf("status %v", st)
		}
		c.wantClosed()
	})
	t.Run("login of 16 MiB", func(t *testing.T) {
		c := tg.connect(t)
		h := pdu.BHS(pdu.LoginRequest{CSG: 1, NSG: 3}.Append(nil))
		h.SetDataSegmentLength(pdu.MaxData)
		c.write(h)
		c.wantClosed()
	})
}

// Connections end at any time. startTarget checks that nothing remains.
func TestLostConnections(t *testing.T) {
	tg := startTarget(t)
	data := random(1 << 20)
	for _, tt := range []struct {
		name string
		f    func(c *client)
	}{
		{"open R2T", func(c *client) { c.openWrite(data) }},
		{"half a header", func(c *client) { c.write(make([]byte, 20)) }},
		{"inside a Data-Out", func(c *client) {
			cmd, r2t := c.openWrite(data)
			c.write(c.encode(dataOut(cmd.ITT(), r2t, 0, 0, false), nil, data[:65536])[:40000])
		}},
		{"after a Data-Out", func(c *client) {
			cmd, r2t := c.openWrite(data)
			c.send(dataOut(cmd.ITT(), r2t, 0, 0, false), data[:65536])
		}},
		{"several R2Ts", func(c *client) {
			for range 20 {
				c.openWrite(data)
			}
		}},
		{"reads whose data the initiator does not read", func(c *client) {
			for range 30 {
				c.send(c.scsi(pdu.FlagR, cdb.Read16(0, 8192), 8192*blockLen), nil)
			}
			testkit.Eventually(t, "data that waits", func() bool { return tg.node.Stats().BuffersOut > 0 })
		}},
	} {
		for _, reset := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, reset %t", tt.name, reset), func(t *testing.T) {
				c := tg.login(t)
				tt.f(c)
				if reset {
					c.nc.(*net.TCPConn).SetLinger(0)
				}
				c.nc.Close()
			})
		}
	}
}

// An initiator that does not read its data holds up only its own connection, and Shutdown ends that.
func TestPeerThatDoesNotRead(t *testing.T) {
	tg := startTarget(t, func(_ *target, o *iscsi.Options) { o.ConnectionMemory = 1 << 20 })
	stuck, c := tg.login(t), tg.login(t)
	for range 20 {
		stuck.send(stuck.scsi(pdu.FlagR, cdb.Read16(0, 8192), 8192*blockLen), nil)
	}
	for range 20 {
		c.read(0, 1024, 256<<10)
	}
	if n := tg.node.Stats().BufferOctets; n > 2<<20 {
		t.Errorf("%d bytes of buffers", n)
	}
}

// What a target lets its logins agree on, at most, is its own. A change counts for new sessions, and those that exist keep
// what they have.
func TestLimitsOfATarget(t *testing.T) {
	tg := startTarget(t)
	offer := []string{"InitialR2T=No", "MaxBurstLength=16777215", "FirstBurstLength=16777215", "MaxOutstandingR2T=65535"}
	agree := func(want ...string) *client {
		t.Helper()
		c := tg.connect(t)
		got := c.login(offer...)
		for _, pair := range want {
			if k, v, _ := strings.Cut(pair, "="); got[k] != v {
				t.Errorf("%s=%s, want %s", k, got[k], v)
			}
		}
		return c
	}
	old := agree("InitialR2T=Yes", "FirstBurstLength=65536", "MaxBurstLength=1048576", "MaxOutstandingR2T=1", "MaxRecvDataSegmentLength=262144")
	all, err := security.Compile([]string{"*"})
	if err != nil {
		t.Fatal(err)
	}
	no := false
	update := func(l iscsi.TargetLimits) {
		t.Helper()
		err := tg.node.UpdateTarget(iscsi.TargetConfig{Name: targetName, Initiators: all, ResetsFor: all, LUNs: tg.node.Targets()[0].LUNs, Limits: l})
		if err != nil {
			t.Fatal(err)
		}
	}
	update(iscsi.TargetLimits{InitialR2T: &no, FirstBurstLength: 8192, MaxBurstLength: 16384, MaxOutstandingR2T: 2, MaxRecvDataSegmentLength: 4096})
	next := agree("InitialR2T=No", "FirstBurstLength=8192", "MaxBurstLength=16384", "MaxOutstandingR2T=2", "MaxRecvDataSegmentLength=4096")
	for _, c := range []*client{old, next} {
		c.command(0, cdb.TestUnitReady, 0) // takes the unit attention
	}
	data := random(65536)
	if n := old.writeAll(0, data, 32768, 65536, 1<<20); n != 1 {
		t.Errorf("%d R2Ts for the rest of 64 KiB in an old session", n)
	}
	// The new one sends 8 KiB without an R2T, and gets two R2Ts at once.
	h := next.scsi(pdu.FlagW, cdb.Write16(0, uint32(len(data)/blockLen)), len(data))
	h.SetFlags(h.Flags() &^ pdu.FlagF)
	next.send(h, data[:4096])
	next.send(dataOut(h.ITT(), nil, 0, 4096, true), data[4096:8192])
	first, second := next.want(pdu.R2T).h, next.want(pdu.R2T).h
	if first.BufferOffset() != 8192 || first.DesiredDataTransferLength() != 16384 || second.BufferOffset() != 24576 {
		t.Fatalf("R2Ts %x, %x", []byte(first), []byte(second))
	}
	for _, r2t := range []pdu.BHS{first, second} {
		next.answer(h, r2t, data, 4096)
	}
	for range 2 {
		next.answer(h, next.want(pdu.R2T).h, data, 4096)
	}
	if rsp := next.want(pdu.SCSIResponse); rsp.h.Status() != 0 || !bytes.Equal(tg.stored(0, len(data)), data) {
		t.Fatalf("response %x", []byte(rsp.h))
	}
	// A PDU that is longer than the new declaration ends the connection.
	next.send(next.scsi(pdu.FlagW, cdb.Write16(0, 16), 8192), data[:8192])
	next.wantClosed()

	update(iscsi.TargetLimits{FirstBurstLength: 16 << 20, MaxBurstLength: 1<<24 - 1, MaxRecvDataSegmentLength: 1<<24 - 1})
	agree("InitialR2T=Yes", "FirstBurstLength=1048576", "MaxBurstLength=16777215", "MaxRecvDataSegmentLength=16777215")
	update(iscsi.TargetLimits{MaxBurstLength: 4096}) // the limit of FirstBurstLength follows
	agree("FirstBurstLength=4096", "MaxBurstLength=4096")
}
