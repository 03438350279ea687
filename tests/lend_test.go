package tests

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend"
	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/lun/state"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/llp"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// The LUNs of lendingTarget, which send READs from where the data lies.
const (
	lentLUN  = 1
	otherLUN = 2
)

// lentRead is the size of a READ, bytes; lentReads of them are the part of the LUN that the tests use.
const (
	lentRead   = 256 << 10
	lentReads  = 64
	lentBlocks = lentRead / 512
)

// lendingStores open the stores of LUNs that leave without a copy: a memory store lends, and the kernel refers to the page cache of a file.
var lendingStores = map[string]func(t *testing.T) (backend.Store, error){
	"memory": func(t *testing.T) (backend.Store, error) {
		return backend.OpenMemory(backend.MemoryConfig{Size: 64 << 20, BlockSize: 512})
	},
	"file": func(t *testing.T) (backend.Store, error) {
		s, _, err := backend.OpenFile(backend.FileConfig{Path: backendtest.SpliceDir(t) + "/lun.img", Size: 32 << 20})
		return s, err
	},
}

// lendingTarget starts a target over TCP with two LUNs of a kind of lendingStores. Those of startTarget do not lend: they can be made to fail.
func lendingTarget(t *testing.T, kind string) *target {
	t.Helper()
	tg := startTarget(t, targetOptions{stream: noRDMA, quiet: true, node: iscsi.Options{ConnectionMemory: 8 << 20}, wrap: func(nc net.Conn) net.Conn {
		testkit.Unpaced(t, nc.(*net.TCPConn))
		return nc
	}})
	for id := range uint16(2) {
		tg.addLent(t, lentLUN+id, kind)
	}
	return tg
}

// addLent adds a LUN of a kind of lendingStores.
func (tg *target) addLent(t *testing.T, id uint16, kind string) *lun.Unit {
	t.Helper()
	s, err := lendingStores[kind](t)
	if err != nil {
		t.Fatal(err)
	}
	identity, err := state.Ephemeral().Get(fmt.Sprintf("lent %d", id))
	if err != nil {
		t.Fatal(err)
	}
	u, err := lun.New(s, lun.Options{Identity: identity})
	if err != nil {
		t.Fatal(err)
	}
	if err := tg.inventories[0].Add(id, u); err != nil {
		t.Fatal(err)
	}
	return u
}

// A writer is an initiator of lendingLUN in this process.
type writer struct {
	nexus *lun.Nexus
	c     lun.Command
}

func (tg *target) newWriter() *writer {
	w := &writer{nexus: tg.inventories[0].NewNexus(lun.Port{InitiatorName: "iqn.2026-11.io.github.host:writer", TargetName: targetName, TPGT: 1})}
	w.begin(cdb.TestUnitReady) // the unit attention
	return w
}

// begin begins a command.
func (w *writer) begin(cdb [16]byte) bool {
	w.c.LUN, w.c.CDB = [8]byte{1: lentLUN}, cdb[:]
	return w.nexus.Begin(&w.c)
}

// do executes a command with that data-out.
func (w *writer) do(t *testing.T, cdb [16]byte, out []byte) {
	t.Helper()
	if w.begin(cdb) {
		w.nexus.Consume(&w.c, out, 0)
		w.nexus.End(&w.c)
	}
	if w.c.Status != 0 {
		t.Fatalf("status %#x, sense % x", w.c.Status, w.c.Sense())
	}
}

// stamped returns the content of n blocks from lba on in one version: each 16 bytes tell the LUN, the block and the version.
func stamped(lun byte, lba, n, version uint64) []byte {
	b := make([]byte, 512*n)
	for i := 0; i < len(b); i += 16 {
		binary.BigEndian.PutUint64(b[i:], uint64(lun)<<56|(lba+uint64(i/512)))
		binary.BigEndian.PutUint64(b[i+8:], version)
	}
	return b
}

// checkStamped returns an error unless each block of data, from lba on, is as one WRITE has left it, the last one's version or earlier.
func checkStamped(data []byte, lun byte, lba, oldest, last uint64) error {
	for i := 0; i < len(data); i += 16 {
		block, version := binary.BigEndian.Uint64(data[i:]), binary.BigEndian.Uint64(data[i+8:])
		if want := uint64(lun)<<56 | (lba + uint64(i/512)); block != want && (block != 0 || version != 0) {
			return fmt.Errorf("block %#x where %#x is due", block, want)
		}
		if first := binary.BigEndian.Uint64(data[i/512*512+8:]); version != first || version < oldest || version > last {
			return fmt.Errorf("block %#x has versions %d and %d, the last is %d", block, first, version, last)
		}
	}
	return nil
}

// A tcpHost is an initiator over TCP that writes and reads stamped blocks, one command at a time.
type tcpHost struct{ *initiator.Dialog }

func (tg *target) tcpHost(t *testing.T, name string) tcpHost {
	t.Helper()
	d, err := initiator.Dial(testContext(t), "tcp", tg.addr, initiator.Options{Target: targetName, Name: "iqn.2026-11.io.github.host:" + name})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	if err := d.LogIn(nil); err != nil {
		t.Fatal(err)
	}
	return tcpHost{d}
}

// write writes as much as one READ reads, by WRITEs of FirstBurstLength.
func (h tcpHost) write(lun byte, lba, version uint64) error {
	const blocks = 64 << 10 / 512
	for end := lba + lentBlocks; lba < end; lba += blocks {
		c := cdb.Write16(lba, blocks)
		status, sense, _, err := h.Do([8]byte{1: lun}, c[:], stamped(lun, lba, blocks, version), 0)
		if err != nil {
			return err
		}
		if status != 0 {
			return fmt.Errorf("WRITE of block %d: status %#x, sense % x", lba, status, sense)
		}
	}
	return nil
}

func (h tcpHost) read(lun byte, lba, last uint64) error {
	c := cdb.Read16(lba, lentBlocks)
	status, sense, data, err := h.Do([8]byte{1: lun}, c[:], nil, lentRead)
	if err != nil {
		return err
	}
	if status != 0 {
		return fmt.Errorf("READ of block %d: status %#x, sense % x", lba, status, sense)
	}
	return checkStamped(data, lun, lba, 1, last)
}

// fill writes a version of all blocks of both LUNs.
func (h tcpHost) fill(t *testing.T, version uint64) {
	t.Helper()
	for i := range uint64(lentReads) {
		for _, l := range []byte{lentLUN, otherLUN} {
			if err := h.write(l, i*lentBlocks, version); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// A silentReader has sent lentReads READs, and has received nothing of them.
type silentReader struct {
	*raw
	began time.Time
	itt   []uint32
	lba   map[uint32]uint64 // by Initiator Task Tag
	cmdSN map[uint32]uint32
	first uint64 // version that may be left
}

// silentReader connects one, and waits until the target can send no more.
func (tg *target) silentReader(t *testing.T) *silentReader {
	t.Helper()
	p := tg.dialStream(t, initiator.Options{Target: targetName, Name: "iqn.2026-11.io.github.host:silent"})
	nc := p.nc.(*net.TCPConn)
	if err := nc.SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	p.streamLogin()
	h := p.scsi(0, 0, cdb.TestUnitReady)
	h.SetLUN([8]byte{1: lentLUN})
	p.write(streamPDU(h, nil))
	p.wantStream(pdu.SCSIResponse) // the unit attention
	r := &silentReader{raw: p, began: time.Now(), first: 1, lba: make(map[uint32]uint64), cmdSN: make(map[uint32]uint32)}
	for i := range uint64(lentReads) {
		h := p.scsi(pdu.FlagR, lentRead, cdb.Read16(i*lentBlocks, lentBlocks))
		h.SetLUN([8]byte{1: lentLUN})
		r.lba[h.ITT()], r.cmdSN[h.ITT()], r.itt = i*lentBlocks, h.CmdSN(), append(r.itt, h.ITT())
		p.write(streamPDU(h, nil))
	}
	var before iscsi.Stats
	since := time.Now()
	testkit.Eventually(t, "data that the reader does not take", func() bool {
		st := tg.node.Stats()
		if st != before {
			before, since = st, time.Now()
		}
		return st.TasksInFlight > 0 && time.Since(since) > 50*time.Millisecond // the socket may have got more room meanwhile
	})
	return r
}

// A drained is what drain has received.
type drained struct {
	good, failed int    // READs that are complete; that ended with another status
	responses    []byte // to task management functions
}

// drain receives until the target has nothing more to send. All data is of the version last, or of an earlier one.
func (r *silentReader) drain(tg *target, last uint64) (d drained, err error) {
	in := bufio.NewReader(r.nc)
	got := make(map[uint32]int)
	for {
		r.nc.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		if _, err := in.Peek(1); err != nil {
			st := tg.node.Stats()
			if timeout := errors.Is(err, os.ErrDeadlineExceeded); timeout && st.BuffersOut == 0 && st.TasksInFlight == 0 {
				return d, nil
			} else if timeout && time.Since(r.began) < testkit.Patience {
				continue
			}
			return d, fmt.Errorf("%w, with %+v", err, st)
		}
		r.nc.SetReadDeadline(r.began.Add(testkit.Patience))
		h := pdu.BHS(make([]byte, pdu.BHSLen))
		if _, err := io.ReadFull(in, h); err != nil {
			return d, err
		}
		data := make([]byte, pdu.Padded(h.DataSegmentLength()))
		if _, err := io.ReadFull(in, data); err != nil {
			return d, err
		}
		lba, known := r.lba[h.ITT()]
		switch op := h.Opcode(); {
		case op == pdu.DataIn && known:
			off := int(h.BufferOffset())
			if off != got[h.ITT()] || off%512 != 0 {
				return d, fmt.Errorf("data at %d after %d bytes", off, got[h.ITT()])
			}
			if err := checkStamped(data, lentLUN, lba+uint64(off/512), r.first, last); err != nil {
				return d, err
			}
			got[h.ITT()] += len(data)
			if h.Flags()&pdu.FlagS == 0 {
				continue
			}
		case op == pdu.SCSIResponse && known:
		case op == pdu.AsyncMessage && h.AsyncEvent() == pdu.AsyncSCSIEvent:
			continue // the LUNs have changed
		case op == pdu.TaskMgmtResp:
			d.responses = append(d.responses, h.Response())
			continue
		default:
			return d, fmt.Errorf("% x", []byte(h))
		}
		if h.Status() != 0 {
			d.failed++
		} else if d.good++; got[h.ITT()] != lentRead {
			return d, fmt.Errorf("GOOD after %d bytes", got[h.ITT()])
		}
		delete(r.lba, h.ITT()) // one answer each, and no data after it
	}
}

// tmf sends a task management function for the lent LUN.
func (r *silentReader) tmf(function byte, itt uint32) {
	h := r.Request(pdu.TaskMgmtReq, pdu.FlagF|function, true)
	h.SetLUN([8]byte{1: lentLUN})
	h.SetReferencedTaskTag(itt)
	h.SetRefCmdSN(r.cmdSN[itt])
	r.write(streamPDU(h, nil))
}

// A pagesCounter is a socket that counts what leaves, and the parts of it whose pages the kernel refers to instead of copying them.
type pagesCounter struct {
	*net.TCPConn
	socket        *llp.Socket
	octets, pages *atomic.Int64
}

func (c pagesCounter) Write(p []byte) (int, error) {
	n, err := c.socket.Write(p)
	c.octets.Add(int64(n))
	return n, err
}

func (c pagesCounter) WriteBuffers(b [][]byte) (int64, error) {
	n, err := c.socket.WriteBuffers(b)
	c.octets.Add(n)
	return n, err
}

func (c pagesCounter) WritePages(b [][]byte, pages []llp.PagesPart) (int64, error) {
	n, err := c.socket.WritePages(b, pages)
	c.octets.Add(n)
	c.pages.Add(int64(len(pages)))
	return n, err
}

// Over iSER, too, data leaves from where it lies in the LUN. It does not change before the initiator has received it, also if another one overwrites
// it when it has left already, or after the end of the connection. With CRCs, which the target has to compute, that of a file is copied.
func TestSentDataOverISER(t *testing.T) {
	for name, tc := range map[string]struct {
		kind      string
		crc, ends bool
	}{
		"memory": {kind: "memory"}, "memory, CRC": {kind: "memory", crc: true}, "memory, the connection is lost": {kind: "memory", ends: true},
		"file": {kind: "file"}, "file, CRC": {kind: "file", crc: true}, "file, the connection is lost": {kind: "file", ends: true},
	} {
		t.Run(name, func(t *testing.T) {
			var octets, pages atomic.Int64
			var ends atomic.Pointer[net.TCPConn]
			o := rdma.Options{NoCRC: !tc.crc}
			tg := startTarget(t, targetOptions{stream: rdmaFirst, quiet: true, rdma: o, wrap: func(nc net.Conn) net.Conn {
				ends.Store(nc.(*net.TCPConn))
				testkit.Unpaced(t, nc.(*net.TCPConn))
				return pagesCounter{nc.(*net.TCPConn), llp.NewSocket(nc.(*net.TCPConn)), &octets, &pages}
			}})
			tg.addLent(t, lentLUN, tc.kind)
			p := tg.rawLogin(t, initiator.Options{RDMA: o}, lentLUN)
			w := tg.newWriter()
			const size = 64 << 10 // of two pages
			fill := func(b byte) { w.do(t, cdb.Write16(100, size/512), bytes.Repeat([]byte{b}, size)) }
			read := func() pdu.BHS {
				h := p.scsi(pdu.FlagR, size, cdb.Read16(100, size/512))
				h.SetLUN([8]byte{1: lentLUN})
				p.send(sink(7, 0), h, nil)
				return h
			}
			receive := func(h pdu.BHS, want byte) {
				t.Helper()
				got := make([]byte, size)
				m := p.next()
				for ; m.op == wire.OpWrite || m.bhs != nil && m.bhs.Opcode() == pdu.NOPIn; m = p.next() { // a WRITE asks for the acknowledgment
					if m.op == wire.OpWrite {
						copy(got[m.tagged.TO:], m.payload)
					}
				}
				if m.bhs == nil || m.bhs.Opcode() != pdu.SCSIResponse || m.bhs.ITT() != h.ITT() || m.bhs.Status() != 0 {
					t.Fatalf("%v % x", m.op, m.payload)
				}
				if n := bytes.Count(got, []byte{want}); n != size {
					t.Errorf("%d bytes of the READ are others than %q", size-n, want)
				}
			}
			fill('a')
			receive(read(), 'a') // from here on the target knows how long FPDUs are
			for _, b := range []byte{'b', 'c', 'd'} {
				old, before := b-1, octets.Load()
				h := read()
				testkit.Eventually(t, "the data has left", func() bool {
					st := tg.node.Stats()
					return octets.Load() > before+size && st.TasksInFlight == 0 && st.BuffersOut == 0
				})
				if tc.ends && b == 'd' {
					ends.Load().CloseWrite()
					p.nc.(*net.TCPConn).CloseWrite()
					testkit.Eventually(t, "the end of the connection", func() bool { return tg.node.Stats().Connections == 0 })
				}
				fill(b)
				receive(h, old)
			}
			if got := pages.Load(); got > 0 == (tc.crc && tc.kind == "file") {
				t.Errorf("the kernel refers to %d parts, with CRCs: %t", got, tc.crc)
			}
		})
	}
}

// What a LUN has lent to READs which an initiator does not take: memory, or pages of a file. Whatever happens meanwhile, what arrives is what some WRITE
// had left in that block, never the data of another block or LUN, and a neighbor's commands do not wait.
func TestLentMemory(t *testing.T) {
	for _, tt := range []struct {
		name string
		// meanwhile happens while the reader is silent. It returns the version of the last WRITE.
		meanwhile func(t *testing.T, tg *target, r *silentReader, neighbour tcpHost) (last uint64)
		want      func(d drained, err error) bool
	}{
		{"overwritten", func(t *testing.T, tg *target, r *silentReader, neighbour tcpHost) uint64 {
			for version := uint64(2); version < 6; version++ { // memory of the first ones is free for the next ones
				neighbour.fill(t, version)
				if st := tg.node.Stats(); st.BufferOctets > 16<<20 {
					t.Errorf("SEC-5042.6.4.1-1: %+v", st)
				}
			}
			return 5
		}, func(d drained, err error) bool { return err == nil && d.good == lentReads }},
		{"unmapped", func(t *testing.T, tg *target, r *silentReader, neighbour tcpHost) uint64 {
			// Zeros are version 0.
			r.first = 0
			for i := range uint64(lentReads) {
				var c [16]byte
				c[0] = 0x93 // WRITE SAME(16)
				c[1] = 0x08 // UNMAP
				binary.BigEndian.PutUint64(c[2:], i*lentBlocks)
				binary.BigEndian.PutUint32(c[10:], lentBlocks)
				if status, sense, _, err := neighbour.Do([8]byte{1: lentLUN}, c[:], make([]byte, 512), 0); err != nil || status != 0 {
					t.Fatalf("WRITE SAME: status %#x, sense % x, %v", status, sense, err)
				}
			}
			neighbour.fill(t, 2)
			return 2
		}, func(d drained, err error) bool { return err == nil && d.good == lentReads }},
		{"ABORT TASK", func(t *testing.T, tg *target, r *silentReader, neighbour tcpHost) uint64 {
			for _, itt := range r.itt[:8] {
				r.tmf(pdu.AbortTask, itt)
			}
			neighbour.fill(t, 2)
			return 2
		}, func(d drained, err error) bool { return err == nil && len(d.responses) == 8 && d.good >= lentReads-8 }},
		{"LOGICAL UNIT RESET by the neighbor", func(t *testing.T, tg *target, r *silentReader, neighbour tcpHost) uint64 {
			response, err := neighbour.TMF(pdu.LogicalUnitReset, [8]byte{1: lentLUN})
			if err != nil || response != 0 {
				t.Fatalf("response %d, %v", response, err)
			}
			neighbour.fill(t, 2)
			return 2
		}, func(d drained, err error) bool {
			return err == nil && d.good < lentReads && d.good+d.failed == lentReads
		}}, // TAS
		{"the LUN goes", func(t *testing.T, tg *target, r *silentReader, neighbour tcpHost) uint64 {
			if err := tg.inventories[0].Remove(lentLUN).Close(); err != nil {
				t.Error(err)
			}
			for i := range uint64(lentReads) {
				if err := neighbour.write(otherLUN, i*lentBlocks, 2); err != nil {
					t.Fatal(err)
				}
			}
			return 2
		}, func(d drained, err error) bool {
			return err == nil && d.good < lentReads && d.good+d.failed == lentReads
		}},
		{"the connection is lost", func(t *testing.T, tg *target, r *silentReader, neighbour tcpHost) uint64 {
			r.reset()
			testkit.Eventually(t, "all memory back", func() bool { return tg.node.Stats().BuffersOut == 0 })
			neighbour.fill(t, 2)
			return 2
		}, func(d drained, err error) bool { return err != nil }},
		{"hand-over", func(t *testing.T, tg *target, r *silentReader, neighbour tcpHost) uint64 {
			// The neighbor's session continues in the next node. The reader's cannot come to rest, and ends with this one.
			next := tg.newSuccessor(t, iscsi.Options{Logger: slog.New(slog.DiscardHandler)})
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			rest := tg.node.Pause(ctx)
			if list, err := rest.Sessions(); err != nil || len(list) != 1 {
				t.Fatalf("%d sessions, %v", len(list), err)
			}
			next.take(t, rest)
			neighbour.fill(t, 2)
			r.reset()
			testkit.Eventually(t, "all memory back", func() bool { return tg.node.Stats().BuffersOut == 0 })
			return 2
		}, func(d drained, err error) bool { return err != nil }},
	} {
		for kind := range lendingStores {
			t.Run(tt.name+", "+kind, func(t *testing.T) {
				tg := lendingTarget(t, kind)
				neighbour := tg.tcpHost(t, "neighbor")
				neighbour.fill(t, 1)
				r := tg.silentReader(t)
				last := tt.meanwhile(t, tg, r, neighbour)
				d, err := r.drain(tg, last)
				if !tt.want(d, err) {
					t.Errorf("%+v, %v", d, err)
				}
				if err := neighbour.read(otherLUN, 0, last); err != nil {
					t.Error(err)
				}
			})
		}
	}
}
