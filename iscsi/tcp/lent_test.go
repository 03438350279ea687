package tcp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A stoppedConn is a connection that takes nothing until go is closed.
type stoppedConn struct {
	net.Conn
	stopped atomic.Bool
	waiting atomic.Bool // a Write waits
	resume  chan struct{}
}

func (s *stoppedConn) Write(p []byte) (int, error) {
	if s.stopped.Load() {
		s.waiting.Store(true)
		<-s.resume
	}
	return s.Conn.Write(p)
}

// Data of a memory LUN leaves from where it lies in the LUN. A READ whose initiator is slow gets the data as it was when the target executed the
// READ, although another initiator overwrites it meanwhile, and later READs get the new data. The writes do not
// wait for the slow initiator. With data digests the data is copied, and nothing else differs.
func TestLentDataDoesNotChange(t *testing.T) {
	for _, digests := range []bool{false, true} {
		t.Run(fmt.Sprintf("digests=%t", digests), func(t *testing.T) {
			var first atomic.Pointer[stoppedConn]
			tg := startTarget(t, func(tg *target, o *iscsi.Options) {
				tg.lends, o.MaxTransferPiece = true, 1<<20
				tg.wrap = func(nc net.Conn) net.Conn {
					c := &stoppedConn{Conn: nc, resume: make(chan struct{})}
					if first.CompareAndSwap(nil, c) {
						return c
					}
					return nc
				}
			})
			keys := []string{"MaxRecvDataSegmentLength=262144"}
			if digests {
				keys = append(keys, "HeaderDigest=CRC32C", "DataDigest=CRC32C")
			}
			reader := tg.login(t, keys...)
			writer := tg.login(t, keys...)
			const size, at = 1<<20 - 1024, 1 // neither end is that of a page
			fill := func(b byte) { writer.writeAll(at, bytes.Repeat([]byte{b}, size), 0, 262144, 262144) }
			fill('a')
			slow := first.Load()
			slow.stopped.Store(true)
			read := reader.scsi(pdu.FlagR, cdb.Read10(at, size/blockLen), size)
			reader.send(read, nil)
			testkit.Eventually(t, "the READ waits for its initiator", slow.waiting.Load)
			testkit.Eventually(t, "all data is queued", func() bool { return tg.node.Stats().BufferOctets >= size })
			fill('b')
			slow.stopped.Store(false)
			close(slow.resume)
			if got, _, _ := reader.readData(read, 262144); !bytes.Equal(got, bytes.Repeat([]byte{'a'}, size)) {
				t.Errorf("%d bytes of the READ are not those from before it", size-bytes.Count(got, []byte{'a'}))
			}
			if got := reader.read(at, size/blockLen, 262144); !bytes.Equal(got, bytes.Repeat([]byte{'b'}, size)) {
				t.Error("the next READ does not have the new data")
			}
		})
	}
}

// READs of lent memory see a WRITE ATOMIC of the same blocks entirely or not at all, also across pages.
func TestLentDataUnderAtomicWrites(t *testing.T) {
	tg := startTarget(t, func(tg *target, _ *iscsi.Options) { tg.lends = true })
	const lba, blocks, rounds = 64, 256, 60 // parts of three pages
	keys := []string{"MaxRecvDataSegmentLength=262144"}
	reader, writer := tg.login(t, keys...), tg.login(t, keys...)
	var all sync.WaitGroup
	all.Go(func() {
		for i := range rounds {
			atomic := [16]byte{0: 0x9c} // WRITE ATOMIC(16), SBC-4
			binary.BigEndian.PutUint64(atomic[2:], lba)
			binary.BigEndian.PutUint16(atomic[12:], blocks)
			h := writer.scsi(pdu.FlagW, atomic, blocks*blockLen)
			writer.send(h, nil)
			data := bytes.Repeat([]byte{byte('a' + i%26)}, blocks*blockLen)
			p := writer.any()
			for ; p.h.Opcode() == pdu.R2T; p = writer.any() {
				writer.answer(h, p.h, data, 262144)
			}
			if p.h.Opcode() != pdu.SCSIResponse || p.h.Status() != 0 {
				t.Errorf("WRITE ATOMIC: %x %x", []byte(p.h), p.data)
			}
		}
	})
	for range 2 * rounds {
		got := reader.read(lba, blocks, 262144)
		if n := bytes.Count(got, got[:1]); n != len(got) {
			t.Errorf("%d bytes are of one WRITE, the rest of another", n)
		}
	}
	all.Wait()
}
