package tcp

import (
	"bytes"
	"net"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A goroutine that runs a brief command and waits for an initiator to read its data keeps no command from being received.
func TestBriefCommandsOfAnInitiatorThatReadsNothing(t *testing.T) {
	tg := startTarget(t, func(tg *target, _ *iscsi.Options) {
		tg.wrap = func(nc net.Conn) net.Conn {
			if err := nc.(*net.TCPConn).SetWriteBuffer(4096); err != nil {
				t.Error(err)
			}
			return nc
		}
	})
	c := tg.login(t, "MaxRecvDataSegmentLength=262144")
	for range 200 {
		c.read(0, 1, 262144)
	}
	const reads, size = 100, 16 << 10
	for range reads { // far more than the buffers of both sockets hold
		c.send(c.scsi(pdu.FlagR|pdu.FlagF, cdb.Read10(0, size/blockLen), size), nil)
	}
	data := random(blockLen)
	c.send(c.scsi(pdu.FlagW|pdu.FlagF, cdb.Write10(1000, 1), blockLen), data)
	testkit.Eventually(t, "the WRITE is executed", func() bool { return bytes.Equal(tg.stored(1000, blockLen), data) })
}
