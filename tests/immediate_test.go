package tests

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/iser"
	"github.com/iser-target/iser-target/rdma/wire"
	"github.com/iser-target/iser-target/security/limits"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// cut returns the FPDUs of the next Send of p, whose segments have at most size bytes of it.
func (p *raw) cut(b []byte, size int) (fpdus [][]byte) {
	for off := 0; off < len(b); off += size {
		end := min(off+size, len(b))
		h := make([]byte, wire.UntaggedLen)
		wire.Untagged{Last: end == len(b), ULP: wire.OpSend.Control(), MSN: p.sendMSN, MO: uint32(off)}.Put(h)
		fpdus = append(fpdus, fpdu(append(h, b[off:end]...)))
	}
	p.sendMSN++
	return fpdus
}

// Immediate data over iSER stays where the target received it until the store has it, however the initiator cuts its Sends, while other Sends come, and next to
// Sends whose length is not what their PDU says. What a connection that is lost within a Send has used comes back.
func TestLongImmediateDataOverISER(t *testing.T) {
	for _, size := range []int{64000, 9000, 1400, 100} { // bytes in a segment
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			shared := limits.New()
			o := targetOptions{stream: rdmaFirst, quiet: true}
			o.node.Shared = shared
			tg := startTarget(t, o)
			p := tg.rawLogin(t, initiator.Options{Keys: []string{"TargetRecvDataSegmentLength=65536"}}, 0)
			neighbor := tg.rawLogin(t, initiator.Options{Name: "iqn.2026-11.io.github.iser-target:neighbor"}, 0)
			base := shared.Memory.Used()

			const n, length = 8, 65536
			write := func(i int, data []byte) (pdu.BHS, []byte) {
				h := p.scsi(pdu.FlagW, length, cdb.Write16(uint64(i*length/512), length/512))
				return h, pduBytes(iser.Header{}, h, data)
			}
			for round := range 2 { // slots are used again
				all, hold := random(n*length), make(chan struct{})
				before := tg.store.Calls(backendtest.WriteAt)
				tg.store.Hook(func(op backendtest.Op, _, _ int64) error {
					if op == backendtest.WriteAt {
						<-hold
					}
					return nil
				})
				var order []pdu.BHS
				for i := range n {
					h, b := write(i, all[i*length:][:length])
					p.write(bytes.Join(p.cut(b, size), nil))
					order = append(order, h)
				}
				testkit.Eventually(t, "all WRITEs are in the store", func() bool { return tg.store.Calls(backendtest.WriteAt) == before+n })
				neighbor.send(iser.Header{}, neighbor.scsi(0, 0, cdb.TestUnitReady), nil)
				neighbor.want(pdu.SCSIResponse)
				close(hold)
				done := map[uint32]bool{}
				for range order {
					m := p.want(pdu.SCSIResponse)
					if m.bhs.Status() != 0 {
						t.Fatalf("round %d: WRITE: % x", round, []byte(m.bhs))
					}
					done[m.bhs.ITT()] = true
				}
				if len(done) != n {
					t.Errorf("round %d: %d WRITEs have ended", round, len(done))
				}
				tg.store.Hook(nil)
				got := make([]byte, len(all))
				if err := tg.store.ReadAt(got, 0); err != nil || !bytes.Equal(got, all) {
					t.Fatalf("round %d: the LUN does not hold what was written: %v", round, err)
				}
			}
			testkit.Eventually(t, "the memory of the WRITEs is free", func() bool { return shared.Memory.Used() <= base+1<<20 })

			_, b := write(0, random(length))
			fpdus := p.cut(b, size)
			p.write(bytes.Join(fpdus[:1+rand.IntN(len(fpdus)-1)], nil))
			p.nc.Close()
			testkit.Eventually(t, "one connection is left", func() bool { return tg.node.Stats().Connections == 1 })
			neighbor.nc.Close()
			testkit.Eventually(t, "nothing is in use", func() bool { return shared.Memory.Used() == 0 })
		})
	}
}

// Between two segments of a WRITE with immediate data, the data of another one comes by RDMA Read.
func TestReadWithinImmediateData(t *testing.T) {
	tg := startTarget(t, targetOptions{stream: rdmaFirst})
	p := tg.rawLogin(t, initiator.Options{Keys: []string{"TargetRecvDataSegmentLength=65536"}}, 0)
	const length = 32768
	all := random(2 * length)
	first := p.writeCommand(0, length/512)
	read := p.wantRead()
	second := p.scsi(pdu.FlagW, length, cdb.Write16(length/512, length/512))
	fpdus := p.cut(pduBytes(iser.Header{}, second, all[length:]), 20000)
	p.write(fpdus[0])
	p.answer(read, all[:length])
	p.wantStatus(first, 0)
	p.write(fpdus[1])
	p.wantStatus(second, 0)
	got := make([]byte, len(all))
	if err := tg.store.ReadAt(got, 0); err != nil || !bytes.Equal(got, all) {
		t.Errorf("the LUN does not hold what was written: %v", err)
	}
}

// A Send that is longer, or shorter, than its PDU ends the connection, also where its data has gone to memory of its own.
func TestImmediateDataOfAnotherLength(t *testing.T) {
	for name, tt := range map[string]struct {
		says, has int
		log       string
	}{
		"longer":  {8192, 40000, "announces 0 of AHS and 8192 of data"},
		"shorter": {40000, 30000, "announces 0 of AHS and 40000 of data"},
	} {
		for _, size := range []int{64000, 1400} {
			t.Run(fmt.Sprint(name, " ", size), func(t *testing.T) {
				shared := limits.New()
				o := targetOptions{stream: rdmaFirst}
				o.node.Shared = shared
				tg := startTarget(t, o)
				p := tg.rawLogin(t, initiator.Options{Keys: []string{"TargetRecvDataSegmentLength=65536"}}, 0)
				h := p.scsi(pdu.FlagW, 65536, cdb.Write16(0, 128))
				b := pduBytes(iser.Header{}, h, make([]byte, tt.has))
				pdu.BHS(b[iser.HeaderLen:]).SetDataSegmentLength(tt.says)
				p.write(bytes.Join(p.cut(b, size), nil))
				p.wantTerminate(wire.ReasonOperation)
				tg.log.wantLine(`"session ended"`, tt.log)
				testkit.Eventually(t, "nothing is in use", func() bool { return shared.Memory.Used() == 0 })
			})
		}
	}
}
