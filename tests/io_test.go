package tests

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/iser-target/iser-target/iscsi"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

// What is written is read back, in all sizes, with and without immediate data, CRC, small FPDUs
// and Send with Invalidate (ISER-4.1-1).
func TestReadAndWrite(t *testing.T) {
	for _, tt := range []struct {
		name string
		ini  initiator.Options
		tgt  targetOptions
	}{
		{name: "defaults"},
		{name: "no CRC, IRD 4, no invalidation: libiscsi",
			ini: initiator.Options{NoInvalidate: true, RDMA: rdma.Options{NoCRC: true, IRD: 4}},
			tgt: targetOptions{rdma: rdma.Options{NoCRC: true}}},
		{name: "IRD 1", ini: initiator.Options{RDMA: rdma.Options{IRD: 1}}},
		{name: "FPDUs of Ethernet", ini: initiator.Options{RDMA: rdma.Options{MaxULPDU: 1442}},
			tgt: targetOptions{rdma: rdma.Options{MaxULPDU: 1442}}},
		{name: "Markers towards the initiator", ini: initiator.Options{RDMA: rdma.Options{Markers: true}}},
		{name: "Markers towards the target", tgt: targetOptions{rdma: rdma.Options{Markers: true}}},
		{name: "Markers both ways, no CRC", ini: initiator.Options{RDMA: rdma.Options{Markers: true, NoCRC: true}},
			tgt: targetOptions{rdma: rdma.Options{Markers: true, NoCRC: true}}},
		{name: "short of memory", tgt: targetOptions{node: iscsi.Options{ConnectionMemory: 256 << 10,
			MaxTransferPiece: 64 << 10}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tg := startTarget(t, tt.tgt)
			s := tg.login(t, tt.ini)
			for _, blocks := range []uint32{1, 8, 16, 17, 128, 1024, 8192} {
				for _, immediate := range []int{0, 512, 8192} {
					want := random(int(blocks) * 512)
					w := &initiator.Command{CDB: cdb.Write16(uint64(blocks), blocks), Out: want,
						Immediate: min(immediate, len(want))}
					do(t, s, w) // ISER-7.3.1-6, ISER-9.5.1-1..4
					r := &initiator.Command{CDB: cdb.Read16(uint64(blocks), blocks), In: make([]byte, len(want))}
					do(t, s, r) // ISER-7.3.1-8, ISER-9.5.2-1..3
					if !bytes.Equal(r.In, want) {
						t.Fatalf("%d blocks, %d bytes immediate: what is read is not what was written", blocks,
							immediate)
					}
					if r.Invalidated == tt.ini.NoInvalidate || r.Residual != 0 ||
						r.Flags&(pdu.FlagOverflow|pdu.FlagUnderflow) != 0 {
						t.Fatalf("ISER-7.3.2-4 ISER-1.5.2-3: invalidated %t, flags %#x, residual %d", r.Invalidated,
							r.Flags, r.Residual)
					}
					if w.Invalidated == (tt.ini.NoInvalidate || w.Immediate == len(want)) {
						t.Fatalf("ISER-7.3.2-5 ISER-7.3.2-3: write of %d, %d immediate, invalidated: %t", len(want),
							w.Immediate, w.Invalidated)
					}
				}
			}
		})
	}
}

// siw knows no Markers: it closes the connection after a Reply that asks for them. The log says so.
func TestInitiatorWithoutMarkers(t *testing.T) {
	for name, end := range map[string]func(p *raw){
		"closes":                func(p *raw) { p.nc.Close() },
		"closes its direction":  func(p *raw) { p.nc.(*net.TCPConn).CloseWrite(); p.wantEnd() },
		"resets the connection": func(p *raw) { p.reset() },
	} {
		t.Run(name, func(t *testing.T) {
			tg := startTarget(t, targetOptions{rdma: rdma.Options{Markers: true}})
			p := tg.dial(t, initiator.Options{})
			if !p.reply.Markers {
				t.Fatalf("MPA-4.3-15: Reply %+v", p.reply)
			}
			end(p)
			tg.log.wantLine("login", "the peer has sent nothing since the Reply asked for Markers, which it may not support")
		})
	}
	t.Run("ignores it", func(t *testing.T) {
		// Where a Marker is due, a login without them has the length of its FPDU.
		tg := startTarget(t, targetOptions{rdma: rdma.Options{Markers: true}})
		p := tg.dial(t, initiator.Options{Target: targetName})
		h, text := p.o.LoginRequest()
		p.write(fpdu(untagged(wire.OpSend, 1, pduBytes(iser.Header{}, h, text))))
		p.wantEnd()
		tg.log.wantLine("login", "MPA: ")
	})
}

// Many commands at once, on several sessions, each in its own part of the LUN.
func TestConcurrentSessions(t *testing.T) {
	tg := startTarget(t, targetOptions{node: iscsi.Options{QueueDepth: 32}})
	const sessions, depth, rounds, blocks = 3, 32, 20, 64
	var all sync.WaitGroup
	errs := make(chan error, sessions*depth)
	for i := range sessions {
		s := tg.login(t, initiator.Options{ISID: [6]byte{0, 2, 0x3d, 0, 1, byte(i)}})
		do(t, s, &initiator.Command{}) // TEST UNIT READY takes the unit attention
		for j := range depth {
			all.Add(1)
			go func() {
				defer all.Done()
				lba := uint64((i*depth + j) * blocks)
				w, r := &initiator.Command{}, &initiator.Command{}
				for range rounds {
					w.CDB, w.Out, w.Immediate = cdb.Write16(lba, blocks), random(blocks*512), 8192*(j%2)
					r.CDB, r.In = cdb.Read16(lba, blocks), make([]byte, blocks*512)
					if err := errors.Join(s.Do(w), s.Do(r)); err != nil || w.Status != 0 || r.Status != 0 ||
						!bytes.Equal(r.In, w.Out) {
						errs <- fmt.Errorf("session %d, LBA %d: %v, status %x and %x", i, lba, err, w.Status, r.Status)
						return
					}
				}
			}()
		}
	}
	all.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
}
