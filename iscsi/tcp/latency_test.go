package tcp

import (
	"testing"
	"time"

	"github.com/iser-target/iser-target/backend/backendtest"
	"github.com/iser-target/iser-target/iscsi/pdu"
	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// Over TCP, each wait of a command counts in its own phase.
func TestLatencies(t *testing.T) {
	const lag = 60 * time.Millisecond
	for _, c := range []struct {
		name  string
		phase lun.Phase
		run   func(tg *target, c *client) (response pdu.BHS) // of one command
	}{
		{"slow store", lun.PhaseBackend, func(tg *target, c *client) pdu.BHS {
			gate := tg.store.Shut(backendtest.ReadAt)
			h := c.scsi(pdu.FlagR, cdb.Read16(0, 8), 4096)
			c.send(h, nil)
			<-gate.Entered
			time.Sleep(lag)
			gate.Open()
			_, _, status := c.readData(h, 1<<20)
			return status
		}},
		{"immediate data that comes late", lun.PhaseReceive, func(_ *target, c *client) pdu.BHS {
			b := c.encode(c.scsi(pdu.FlagW, cdb.Write16(0, 8), 4096), nil, random(4096))
			c.write(b[:pdu.BHSLen+100])
			time.Sleep(lag)
			c.write(b[pdu.BHSLen+100:])
			return c.want(pdu.SCSIResponse).h
		}},
		{"immediate data that comes late and is longer than the window", lun.PhaseReceive,
			func(_ *target, c *client) pdu.BHS {
				b := c.encode(c.scsi(pdu.FlagW, cdb.Write16(0, 128), 64<<10), nil, random(64<<10))
				c.write(b[:pdu.BHSLen])
				time.Sleep(lag)
				c.write(b[pdu.BHSLen:])
				return c.want(pdu.SCSIResponse).h
			}},
		{"R2T that is answered late", lun.PhaseReadWait, func(_ *target, c *client) pdu.BHS {
			data := random(8192)
			h, r2t := c.openWrite(data)
			time.Sleep(lag)
			c.answer(h, r2t, data, 4096)
			return c.want(pdu.SCSIResponse).h
		}},
		{"data that is taken late", lun.PhaseSend, func(_ *target, c *client) pdu.BHS {
			h := c.scsi(pdu.FlagR, cdb.Read16(0, storeLen/blockLen), storeLen) // more than TCP has buffers for
			c.send(h, nil)
			time.Sleep(4 * lag) // part of it passes until they are full
			_, _, status := c.readData(h, 1<<20)
			return status
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			tg := startTarget(t)
			cl := tg.login(t, "MaxBurstLength=1048576", "FirstBurstLength=65536", "MaxRecvDataSegmentLength=262144")
			counted := func() lun.Latencies { return tg.node.Latencies()[lun.TCP] }
			responses := func(n uint64) lun.Latencies {
				t.Helper()
				testkit.Eventually(t, "a response counts", func() bool { return counted()[lun.PhaseTotal].Count == n })
				return counted() // what the look before may have lacked, too: see lun.Tally.End
			}
			for try := uint64(1); ; try++ {
				before := responses(1 + try) // with those of login, which are 2
				if rsp := c.run(tg, cl); rsp.Status() != 0 {
					t.Fatalf("status %#x", rsp.Status())
				}
				after := responses(2 + try)
				took := func(p lun.Phase) time.Duration { return after[p].Sum - before[p].Sum }
				sum, longer := time.Duration(0), false
				for p := range lun.PhaseTotal {
					sum += took(p)
					longer = longer || p != c.phase && took(p) >= took(c.phase)
				}
				if took(lun.PhaseTotal) != sum {
					t.Fatalf("%v in all, %v the sum", took(lun.PhaseTotal), sum)
				}
				// The target may notice the beginning of the phase later than the test.
				if !longer && took(c.phase) > lag/2 {
					return
				}
				if try == 10 { // a busy machine can stop a goroutine for that long, but not always
					t.Fatalf("%v in %v, of %v", took(c.phase), c.phase, took(lun.PhaseTotal))
				}
			}
		})
	}
}
