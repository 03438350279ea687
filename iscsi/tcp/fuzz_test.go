package tcp

import (
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
	"github.com/iser-target/iser-target/tests/testkit/header"
)

// FuzzTCP sends arbitrary bytes after login. The target must not panic or hang, and must keep nothing. The
// first byte selects what the login agrees on:
//
//	1  header digest
//	2  data digest
//	4  InitialR2T=No
//	8  MaxBurstLength 512
//	16 ErrorRecoveryLevel 1
//
// The rest is the input. Whole PDUs in it get the right digests, so that the input tests more than those.
func FuzzTCP(f *testing.F) {
	no := false
	tg := startTarget(f, func(_ *target, o *iscsi.Options) {
		o.Limits.InitialR2T = &no
		o.Limits.ErrorRecoveryLevel = 1
		o.Limits.MaxRecvDataSegmentLength = 65536
		o.LoginTimeout = testkit.Patience
	})
	c := &client{tb: f, Numbers: header.Numbers{ITT: 0x100, CmdSN: firstCmdSN}}
	whole := func(h pdu.BHS, data []byte) []byte {
		b := c.encode(h, nil, data)
		return append(b, make([]byte, pdu.Padded(len(b))-len(b))...)
	}
	var writes, reads []byte
	for range 5 { // the first ones get the unit attention
		h := c.scsi(pdu.FlagW, cdb.Write16(0, 4), 2048)
		writes = append(writes, whole(h, nil)...)
		for slot := range uint32(4) {
			d := dataOut(h.ITT(), nil, 0, 0, true)
			d.SetTTT(1<<indexBits | slot)
			writes = append(writes, whole(d, make([]byte, 2048))...)
		}
		h = c.scsi(pdu.FlagW, cdb.Write16(0, 4), 2048)
		h.SetFlags(h.Flags() &^ pdu.FlagF)
		writes = append(writes, whole(h, make([]byte, 512))...)
		writes = append(writes, whole(dataOut(h.ITT(), nil, 0, 512, true), make([]byte, 1536))...)
	}
	c.ITT, c.CmdSN = 0x100, firstCmdSN
	for range 5 {
		reads = append(reads, whole(c.scsi(pdu.FlagR, cdb.Read16(0, 4), 2048), nil)...)
	}
	// SNACKs of all types for a READ and a WRITE that are in progress or answered.
	snacks := append([]byte(nil), reads...)
	h := c.scsi(pdu.FlagW, cdb.Write16(0, 4), 2048)
	snacks = append(snacks, whole(h, nil)...)
	for kind := range byte(5) {
		for _, run := range [][2]uint32{{0, 0}, {1, 1}, {0, 0xffffffff}, {7, 0}} {
			for _, itt := range []uint32{h.ITT(), h.ITT() - 1, pdu.ReservedTag} {
				for _, tag := range []uint32{pdu.ReservedTag, 1 << indexBits, 1<<indexBits | 2} {
					s := make(pdu.BHS, pdu.BHSLen)
					s.Reset(pdu.SNACK, pdu.FlagF|kind)
					s.SetITT(itt)
					s.SetTTT(tag)
					s.SetBegRun(run[0])
					s.SetRunLength(run[1])
					snacks = append(snacks, whole(s, nil)...)
				}
			}
		}
	}
	for _, flags := range []byte{0, 16, 19, 27} {
		f.Add(append([]byte{flags}, snacks...))
	}
	for flags := range byte(32) {
		f.Add(append([]byte{flags}, writes...))
		f.Add(append([]byte{flags}, reads...))
	}
	f.Add([]byte{0})
	f.Add(append([]byte{3}, make([]byte, 200)...))
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) == 0 {
			return
		}
		keys := []string{"InitialR2T=Yes", "HeaderDigest=None", "DataDigest=None", "FirstBurstLength=4096"}
		if in[0]&1 != 0 {
			keys[1] = "HeaderDigest=CRC32C"
		}
		if in[0]&2 != 0 {
			keys[2] = "DataDigest=CRC32C"
		}
		if in[0]&4 != 0 {
			keys[0] = "InitialR2T=No"
		}
		if in[0]&8 != 0 {
			keys = append(keys, "MaxBurstLength=512")
			keys[3] = "FirstBurstLength=512"
		}
		if in[0]&16 != 0 {
			keys = append(keys, "ErrorRecoveryLevel=1")
		}
		c := tg.connect(t)
		defer c.nc.Close()
		c.login(keys...)
		go func() {
			for rest := in[1:]; len(rest) > 0; {
				b := rest
				if len(rest) >= pdu.BHSLen {
					h := pdu.BHS(rest[:pdu.BHSLen])
					ahs, n := h.TotalAHSLength(), h.DataSegmentLength()
					if total := pdu.BHSLen + ahs + pdu.Padded(n); total <= len(rest) {
						b = c.encode(h, rest[pdu.BHSLen:][:ahs], rest[pdu.BHSLen+ahs:][:n])
						rest = rest[total:]
					} else {
						rest = nil
					}
				} else {
					rest = nil
				}
				if _, err := c.nc.Write(b); err != nil {
					break
				}
			}
			c.nc.(*net.TCPConn).CloseWrite()
		}()
		c.nc.SetReadDeadline(time.Now().Add(testkit.Patience))
		if _, err := io.Copy(io.Discard, c.nc); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal("the target does not end the connection")
		}
		c.nc.Close()
		testkit.Eventually(t, "nothing is left of the connection", func() bool {
			s := tg.node.Stats()
			return s.Connections+s.Sessions+s.TasksInFlight+s.BuffersOut == 0
		})
	})
}
