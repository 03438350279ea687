package tcp

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/security/limits"
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
// wait for the slow initiator.
func TestLentDataDoesNotChange(t *testing.T) {
	for _, digests := range []bool{false, true} {
		t.Run(fmt.Sprintf("digests=%t", digests), func(t *testing.T) {
			var first atomic.Pointer[stoppedConn]
			tg := startTarget(t, func(tg *target, o *iscsi.Options) {
				tg.lends, o.MaxTransferPiece = "memory", 1<<20
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

// Data that has left, so that the kernel refers to the memory of the LUN, does not change until the initiator has read it: not when the slot of the task is free,
// not when another initiator overwrites it meanwhile, and not after the end of the connection. The memory is held until the initiator acknowledges the
// status, and no longer.
func TestSentDataDoesNotChange(t *testing.T) {
	for _, tc := range []struct {
		name string
		keys []string
		ends bool // the target ends the connection
	}{
		{name: "in one PDU", keys: []string{"MaxRecvDataSegmentLength=262144"}},
		{name: "in two PDUs with digests", keys: []string{"HeaderDigest=CRC32C", "DataDigest=CRC32C", "MaxRecvDataSegmentLength=40000"}},
		{name: "at the end of the connection", keys: []string{"MaxRecvDataSegmentLength=262144"}, ends: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var first atomic.Pointer[Conn]
			tg := startTarget(t, func(tg *target, _ *iscsi.Options) {
				tg.lends, tg.made = "memory", func(c *Conn) { first.CompareAndSwap(nil, c) }
			})
			reader := tg.login(t, tc.keys...)
			writer := tg.login(t, "MaxRecvDataSegmentLength=262144")
			const size, at = 64 << 10, 100 // of two pages
			fill := func(b byte) { writer.writeAll(at, bytes.Repeat([]byte{b}, size), 0, 262144, 262144) }
			fill('a')
			c := first.Load()
			read := reader.scsi(pdu.FlagR, cdb.Read10(at, size/blockLen), size)
			reader.send(read, nil)
			held := func() bool {
				s := tg.node.Stats()
				return s.TasksInFlight == 0 && s.BufferOctets == 0 && c.holds.Len() == 1
			}
			testkit.Eventually(t, "the data has left", held)
			if tc.ends {
				c.Close()
				testkit.Eventually(t, "nothing is held", func() bool { return c.holds.Len() == 0 })
			}
			fill('b')
			if got, _, _ := reader.readData(read, 262144); !bytes.Equal(got, bytes.Repeat([]byte{'a'}, size)) {
				t.Errorf("%d bytes of the READ are not those from before", size-bytes.Count(got, []byte{'a'}))
			}
			if tc.ends {
				return
			}
			if c.holds.Len() != 1 {
				t.Error("the target does not hold the data that nobody has acknowledged")
			}
			for range 3 { // each acknowledges the one before
				if got := reader.read(at, size/blockLen, 262144); !bytes.Equal(got, bytes.Repeat([]byte{'b'}, size)) {
					t.Error("the next READ does not have the new data")
				}
				testkit.Eventually(t, "one READ is held", held)
			}
			reader.send(reader.nopOut(), nil)
			reader.want(pdu.NOPIn)
			testkit.Eventually(t, "nothing is held", func() bool { return c.holds.Len() == 0 })
		})
	}
}

// Data of a file that has left does not change, either, until the initiator has it: a WRITE of the same blocks asks the initiator for the acknowledgment, and
// waits for it for a while. From one that does not answer, the WRITE takes the pages away, and it gets copies for a while, on its next connection, too.
func TestSentFileDataDoesNotChange(t *testing.T) {
	for name, answers := range map[string]bool{"the initiator answers": true, "it is silent": false} {
		t.Run(name, func(t *testing.T) {
			var first atomic.Pointer[Conn]
			tg := startTarget(t, func(tg *target, _ *iscsi.Options) {
				tg.lends, tg.made = "file", func(c *Conn) { first.CompareAndSwap(nil, c) }
				if answers { // however busy the machine is
					tg.unit.ViewWait = time.Hour
				}
			})
			keys := []string{"MaxRecvDataSegmentLength=262144"}
			reader, writer, neighbor := tg.login(t, keys...), tg.login(t, keys...), tg.login(t, keys...)
			const size, at = 64 << 10, 100
			fill := func(b byte) { writer.writeAll(at, bytes.Repeat([]byte{b}, size), 0, 262144, 262144) }
			fill('a')
			c := first.Load()
			read := reader.scsi(pdu.FlagR, cdb.Read10(at, size/blockLen), size)
			reader.send(read, nil)
			testkit.Eventually(t, "the data has left", func() bool {
				s := tg.node.Stats()
				return s.TasksInFlight == 0 && s.BufferOctets == 0 && c.holds.Len() == 1
			})
			receive := func() {
				if got, _, _ := reader.readData(read, 262144); !bytes.Equal(got, bytes.Repeat([]byte{'a'}, size)) {
					t.Errorf("%d bytes of the READ are not those from before", size-bytes.Count(got, []byte{'a'}))
				}
				ping := reader.want(pdu.NOPIn)
				h := reader.Request(pdu.NOPOut, pdu.FlagF, true)
				h.SetITT(pdu.ReservedTag)
				h.SetTTT(ping.h.TTT())
				reader.send(h, nil)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				fill('b')
			}()
			if !answers {
				for range 100 {
					neighbor.read(1000, 64, 262144)
					neighbor.writeAll(at+size/blockLen, make([]byte, blockLen), blockLen, 262144, 262144)
				}
				<-done
			}
			receive()
			<-done
			testkit.Eventually(t, "nothing is held", func() bool { return c.holds.Len() == 0 })
			if got := reader.read(at, size/blockLen, 262144); !bytes.Equal(got, bytes.Repeat([]byte{'b'}, size)) {
				t.Error("the next READ does not have the new data")
			}
			held := func() bool {
				s := tg.node.Stats()
				return s.TasksInFlight == 0 && s.BufferOctets == 0 && c.holds.Len() == 1 == answers
			}
			testkit.Eventually(t, "the data has left", held)
			first.Store(nil)
			again := tg.login(t, keys...)
			c = first.Load()
			again.read(at, size/blockLen, 262144)
			testkit.Eventually(t, "the data has left by its next connection", held)
		})
	}
}

// Data of a file has no data digest unless the target reads it. So it is copied, and nothing is held.
func TestFileDataWithDigests(t *testing.T) {
	for _, digest := range []string{"None", "CRC32C"} {
		t.Run(digest, func(t *testing.T) {
			var first atomic.Pointer[Conn]
			tg := startTarget(t, func(tg *target, _ *iscsi.Options) {
				tg.lends, tg.made = "file", func(c *Conn) { first.CompareAndSwap(nil, c) }
			})
			reader := tg.login(t, "MaxRecvDataSegmentLength=262144", "DataDigest="+digest)
			const size = 64 << 10
			want := random(size)
			reader.writeAll(0, want, 0, 262144, 262144)
			if got := reader.read(0, size/blockLen, 262144); !bytes.Equal(got, want) {
				t.Error("the READ has other data")
			}
			held := 1 // until the next command acknowledges it
			if digest != "None" {
				held = 0
			}
			testkit.Eventually(t, "the data has left", func() bool {
				s := tg.node.Stats()
				return s.TasksInFlight == 0 && s.BufferOctets == 0 && first.Load().holds.Len() == held
			})
		})
	}
}

// An initiator that acknowledges nothing makes the target hold what its share of the memory permits, and then gets copies. Another one is served meanwhile.
func TestHeldDataIsBounded(t *testing.T) {
	for _, kind := range []string{"memory", "file"} {
		t.Run(kind, func(t *testing.T) { testHeldData(t, kind) })
	}
}

func testHeldData(t *testing.T, kind string) {
	var first atomic.Pointer[Conn]
	tg := startTarget(t, func(tg *target, o *iscsi.Options) {
		tg.lends, tg.made = kind, func(c *Conn) { first.CompareAndSwap(nil, c) }
		o.Shared = limits.New()
		o.Shared.Memory.SetMax(8 << 20)
	})
	keys := []string{"MaxRecvDataSegmentLength=262144"}
	greedy, neighbor := tg.login(t, keys...), tg.login(t, keys...)
	greedy.acksLate = true
	const size = 64 << 10
	want := random(2 * size)
	neighbor.writeAll(0, want, 0, 262144, 262144)
	var most int
	for range 400 { // 25 MiB
		if got := greedy.read(0, size/blockLen, 262144); !bytes.Equal(got, want[:size]) {
			t.Fatal("other data")
		}
		most = max(most, first.Load().holds.Len())
	}
	if most < 2 || most > 8<<20/size {
		t.Errorf("%d READs were held, want 2 to %d", most, 8<<20/size)
	}
	for range 10 {
		if got := neighbor.read(0, 2*size/blockLen, 262144); !bytes.Equal(got, want) {
			t.Error("the neighbor has other data")
		}
	}
	greedy.ExpStatSN = greedy.statSN
	greedy.send(greedy.nopOut(), nil)
	greedy.want(pdu.NOPIn)
	testkit.Eventually(t, "nothing is held", func() bool { return first.Load().holds.Len() == 0 })
}

// READs of lent memory see a WRITE ATOMIC of the same blocks entirely or not at all, also across pages.
func TestLentDataUnderAtomicWrites(t *testing.T) {
	tg := startTarget(t, func(tg *target, _ *iscsi.Options) { tg.lends = "memory" })
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
