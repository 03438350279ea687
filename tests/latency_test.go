package tests

import (
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/iser-target/iser-target/lun"
	"github.com/iser-target/iser-target/tests/initiator"
	"github.com/iser-target/iser-target/tests/testkit"
	"github.com/iser-target/iser-target/tests/testkit/cdb"
)

// A lagConn is the target's end of a connection on a slow network: what comes is late,
// and what is sent is taken late.
type lagConn struct {
	net.Conn
	reads, writes *atomic.Int64 // in ns
}

func (c lagConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	time.Sleep(time.Duration(c.reads.Load()))
	return n, err
}

func (c lagConn) Write(b []byte) (int, error) {
	time.Sleep(time.Duration(c.writes.Load()))
	return c.Conn.Write(b)
}

// Over iSER, what a command waits for shows in the phase that it belongs to.
func TestLatencies(t *testing.T) {
	const lag = 60 * time.Millisecond
	var reads, writes atomic.Int64
	tg := startTarget(t, targetOptions{wrap: func(nc net.Conn) net.Conn { return lagConn{nc, &reads, &writes} }})
	s := tg.login(t, initiator.Options{})
	commands := uint64(0)
	// spent is what a command that run runs spends in the phases.
	spent := func(run func()) (d [lun.Phases]time.Duration) {
		t.Helper()
		counted := func() lun.Latencies { return *tg.node.Sessions()[0].Latencies }
		testkit.Eventually(t, "earlier responses have left", func() bool {
			c := tg.node.Sessions()[0].Counts.Commands
			commands = c[lun.KindRead] + c[lun.KindWrite] + c[lun.KindOther]
			return counted()[lun.PhaseTotal].Count == commands
		})
		before := counted()
		run()
		testkit.Eventually(t, "the response has left",
			func() bool { return counted()[lun.PhaseTotal].Count == commands+1 })
		after := counted()
		for p := range d {
			d[p] = after[p].Sum - before[p].Sum
		}
		return d
	}
	read := &initiator.Command{CDB: cdb.Read16(0, 8), In: make([]byte, 4096)}
	write := &initiator.Command{CDB: cdb.Write16(0, 256), Out: make([]byte, 128<<10)}
	do(t, s, read) // which takes the unit attention
	for _, c := range []struct {
		name  string
		phase lun.Phase
		run   func()
	}{
		{"slow store", lun.PhaseBackend, func() {
			gate := tg.store.Shut()
			if err := s.Start(read); err != nil {
				t.Fatal(err)
			}
			<-gate.Entered
			time.Sleep(lag)
			gate.Open()
			if err := read.Wait(); err != nil || read.Status != 0 {
				t.Error(err, read.Status)
			}
		}},
		{"RDMA Read that is answered late", lun.PhaseReadWait, func() {
			reads.Store(int64(lag))
			do(t, s, write)
			reads.Store(0)
		}},
		{"data and response that are taken late", lun.PhaseSend, func() {
			writes.Store(int64(lag))
			do(t, s, read)
			writes.Store(0)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for try := 1; ; try++ {
				d := spent(c.run)
				sum, longer := time.Duration(0), false
				for p := range lun.PhaseTotal {
					sum += d[p]
					longer = longer || p != c.phase && d[p] >= d[c.phase]
				}
				if d[c.phase] < lag || d[lun.PhaseTotal] != sum {
					t.Fatalf("%v in %v, %v in all, %v the sum", d[c.phase], c.phase, d[lun.PhaseTotal], sum)
				}
				if !longer {
					return
				}
				if try == 10 { // a machine that has much to do can stop a goroutine for that long, but not always
					t.Fatalf("%v in %v, of %v", d[c.phase], c.phase, d)
				}
			}
		})
	}
}
